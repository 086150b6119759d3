"""The functions that take the place of other libraries', row by row of the table in `replacements`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from holdfast.integrations import handover, replacements, trainer
from holdfast.integrations.accelerate import LEFT_ALONE, Attached, attached_to
from holdfast.integrations.lone_forward import ForwardSkipped
from holdfast.integrations.script_hooks import Touched

logger = logging.getLogger("holdfast")

replaced = replacements.Replaced()
everybody: list[Attached] = []
"""Behind every accelerator of this process."""

folder: Path | None = None
"""Where checkpoints lie that no accelerator has a project folder for."""

validate_on_all_ranks = False
"""Whether all ranks take part in a forward that one of them comes to alone, where that is possible."""

take_all = False
"""Whether every accelerator gets the engine, or only those that were attached."""


def install() -> None:
    """Put accelerate's rows in place, and those of what was imported by now; a second call does the rest."""
    import accelerate  # noqa: F401

    replacements.install(replaced, FUNCTIONS, ("accelerate", "shutil"))


def install_imported() -> None:
    replacements.install(replaced, FUNCTIONS, tuple(p for p in replacements.TRIED if p in sys.modules))


def take(accelerator: Any, where: Path | None = None) -> Attached:
    """The engine behind this accelerator, put there now if it is not yet."""
    attached = attached_to(accelerator)
    if attached is None:
        project = getattr(accelerator, "project_dir", None)
        attached = Attached(accelerator, where or (None if project else folder), validate_on_all_ranks)
        accelerator.__dict__["_holdfast"] = attached
        everybody.append(attached)
        install_imported()
        attached.prepared()
    return attached


def _left_alone(accelerator: Any) -> bool:
    kind = str(accelerator.distributed_type.value)
    if kind in LEFT_ALONE and "_holdfast_said" not in accelerator.__dict__:
        accelerator.__dict__["_holdfast_said"] = True
        logger.warning("holdfast run: %s keeps its own state: its saving and loading are left as they are", kind)
    return kind in LEFT_ALONE


def _prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if take_all and attached_to(self) is None and not trainer.is_left_alone(self) and not _left_alone(self):
        take(self).tidy()
    attached = attached_to(self)
    if attached is not None:
        attached.prepared()
    return result


def _save_state(original: Any, self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
    attached = attached_to(self)
    return original(self, output_dir, *args, **kwargs) if attached is None else attached.save_state(output_dir)


def _load_state(original: Any, self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
    attached = attached_to(self)
    return original(self, input_dir, *args, **kwargs) if attached is None else attached.load_state(input_dir)


def _get_state_dict(original: Any, self: Any, model: Any, unwrap: bool = True) -> Any:
    attached = attached_to(self)
    if attached is None or not attached.owns(model):
        return original(self, model, unwrap)
    if attached.hooks.running:
        raise Touched("it wants the whole weights of a sharded model")
    if not self.is_main_process:  # as accelerate's: rank 0 alone gets them
        attached.hand_over.join(attached.counters.steps)
        return {}
    return attached.whole(model)


def _wait_for_everyone(original: Any, self: Any) -> Any:
    attached = attached_to(self)
    if attached is not None and attached.presence is not None:
        attached.forwards.mark()
        attached.presence.barrier()
    return original(self)


def _end_training(original: Any, self: Any) -> Any:
    attached = attached_to(self)
    if attached is not None:
        attached.close()
    return original(self)


def _skip_first_batches(original: Any, self: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
    rest = original(self, dataloader, *args, **kwargs)
    attached = attached_to(self)
    if attached is not None and rest is not dataloader:
        attached.follow_rest(rest, dataloader)
    return rest


def _step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    for attached in everybody:
        if attached.checkpointer is None and any(o is self for o in attached.accelerator._optimizers):
            attached.ready()
    return original(self, *args, **kwargs)


def _owner(module: Any) -> Attached | None:
    return next((a for a in everybody if a.owns(module)), None)


def _save_pretrained(original: Any, self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    attached = _owner(self)
    if attached is None or kwargs.get("state_dict") is not None or handover.is_given(self):
        return original(self, save_directory, *args, **kwargs)
    if attached.hooks.running:  # its weights are in the checkpoint beside
        return None
    if not attached.accelerator.is_main_process:  # all ranks would write the same files over each other
        attached.hand_over.join(attached.counters.steps)
        return None
    state = attached.whole(self)
    assert state is not None
    with handover.state_dict_of(self, state):
        return original(self, save_directory, *args, **kwargs)


def _peft_state_dict(original: Any, model: Any, state_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
    attached = _owner(model)
    if attached is None:
        return original(model, state_dict, *args, **kwargs)
    if state_dict is None:
        state_dict = model.state_dict() if handover.is_given(model) or attached.hooks.running else attached.whole(model)
    # peft looks for its layers by the names that they have now, between FSDP1's wrappers.
    names = handover.names_between_wrappers(model)
    found = original(model, {names(k): v for k, v in state_dict.items()}, *args, **kwargs)
    return {handover.clean(k): v for k, v in found.items()}


def _register_modules(original: Any, self: Any, **kwargs: Any) -> Any:
    attached = next((a for a in map(_owner, kwargs.values()) if a is not None), None)
    if attached is not None:
        _survive(type(self))
    return original(self, **kwargs)


def _survive(kind: type) -> None:
    """Have pipelines of this class return a black picture for a call that would run a sharded model on one rank only."""
    call = kind.__call__
    if "_holdfast" in vars(kind):
        return

    def surviving(self: Any, *args: Any, **kwargs: Any) -> Any:
        attached = next((a for a in map(_owner, self.components.values()) if a is not None), None)
        if attached is None:
            return call(self, *args, **kwargs)
        with attached.forwards.surviving_pipeline():
            try:
                return call(self, *args, **kwargs)
            except ForwardSkipped:
                if attached.forwards.in_function:
                    raise
                attached.forwards.left(f"a call of {kind.__name__} (a black picture stands for its result)")
                return _black_picture()

    kind.__call__ = surviving  # type: ignore[method-assign]
    kind._holdfast = True  # type: ignore[attr-defined]


def _black_picture() -> Any:
    from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
    from PIL import Image

    return ImagePipelineOutput(images=[Image.new("RGB", (64, 64))])


def _rmtree(original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    for attached in everybody:
        if attached.guard.concerns(path):
            return attached.guard.rmtree(original, path, *args, **kwargs)
    return original(path, *args, **kwargs)


FUNCTIONS: dict[str, replacements.Function] = {
    "accelerate:Accelerator.prepare": _prepare,
    "accelerate:Accelerator.save_state": _save_state,
    "accelerate:Accelerator.load_state": _load_state,
    "accelerate:Accelerator.get_state_dict": _get_state_dict,
    "accelerate:Accelerator.wait_for_everyone": _wait_for_everyone,
    "accelerate:Accelerator.end_training": _end_training,
    "accelerate:Accelerator.skip_first_batches": _skip_first_batches,
    "accelerate.optimizer:AcceleratedOptimizer.step": _step,
    "diffusers:ModelMixin.save_pretrained": _save_pretrained,
    "diffusers:DiffusionPipeline.register_modules": _register_modules,
    "transformers:PreTrainedModel.save_pretrained": _save_pretrained,
    "peft:PeftModel.save_pretrained": _save_pretrained,
    "peft:get_peft_model_state_dict": _peft_state_dict,
    "shutil:rmtree": _rmtree,
}
