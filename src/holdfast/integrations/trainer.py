"""transformers' Trainer with the engine behind its saving and loading: as a mixin, or for every Trainer of a script.

    class MyTrainer(HoldfastTrainerMixin, Trainer): ...     # in a program of one's own
    install()                                               # what `holdfast run` does: no line of the script changes

Both replace the same methods by the same functions, which are called with what they replace. Runs whose state is not the ranks'
own tensors (DeepSpeed, SageMaker's model parallelism, XLA) are left to the Trainer.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.integrations import replacements
from holdfast.integrations.replacements import Replaced, Replacement
from holdfast.integrations.stopping import StoppedBySignal
from holdfast.integrations.trainer_engine import LATEST, NEWEST, TrainerEngine, is_native
from holdfast.integrations.trainer_folders import get_last_checkpoint as get_last_checkpoint

logger = logging.getLogger("holdfast")

everybody: list[TrainerEngine] = []
"""Behind every Trainer of this process that has begun to train."""

failures: list[HoldfastError] = []
"""Of last checkpoints that did not become complete, once `finish` has been called."""

resume_where_not_told: str | None = None
"""What a Trainer takes that is told of no checkpoint: a path, `latest`, or nothing."""

asked: set[Path] = set()
"""Output folders for which that was asked: a second `train()` in one process goes on from the first, and not from a checkpoint."""

_ENGINE, _WISH, _LOADER, _BATCHES, _SAID = (f"_holdfast_{name}" for name in ("engine", "wish", "loader", "batches", "said"))


def engine_of(trainer: Any) -> TrainerEngine | None:
    found: TrainerEngine | None = trainer.__dict__.get(_ENGINE)
    return found


def takes(trainer: Any) -> bool:
    """Whether the engine can serve this Trainer; says so once where it cannot."""
    args = trainer.args
    others = {"DeepSpeed": trainer.is_deepspeed_enabled, "SageMaker's model parallelism": args.parallel_mode.value == "sagemaker_model_parallel",
              "XLA": args.parallel_mode.value == "tpu"}  # fmt: skip
    owner = next((name for name, is_so in others.items() if is_so), None)
    if owner is not None and _SAID not in trainer.__dict__:
        trainer.__dict__[_SAID] = True
        logger.warning("%s keeps its own state: the Trainer's saving and loading are left as they are", owner)
    return owner is None


# -- what takes the methods' places: each gets what it replaces, then the Trainer


def _accelerator(original: Any, self: Any) -> None:
    original(self)
    if takes(self):
        self.accelerator.__dict__["_holdfast_trainer"] = self  # its state is looked after here


def _train(original: Any, self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not takes(self):
        return original(self, resume_from_checkpoint, *args, **kwargs)
    if isinstance(resume_from_checkpoint, str) and resume_from_checkpoint.lower() in ("true", "false"):
        resume_from_checkpoint = resume_from_checkpoint.lower() == "true"  # as a script's flag gives it
    self.__dict__[_WISH] = resume_from_checkpoint or _not_told(self)
    return original(self, None, *args, **kwargs)


def _not_told(self: Any) -> str | None:
    output = Path(self.args.output_dir).absolute()
    if resume_where_not_told is None or output in asked:
        return None
    asked.add(output)
    return resume_where_not_told


def _inner_training_loop(original: Any, self: Any, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None, *rest: Any, **kwargs: Any) -> Any:
    if not takes(self):
        return original(self, batch_size, args, resume_from_checkpoint, *rest, **kwargs)
    _let_go(self)
    wish = self.__dict__.get(_WISH)
    told = str(self.args.output_dir) if wish in (NEWEST, LATEST) else wish  # only whether there is one counts from here on
    try:
        return original(self, batch_size, args, told, *rest, **kwargs)
    except StoppedBySignal:
        raise
    except BaseException:
        engine = engine_of(self)
        if engine is not None:
            engine.abandon()
        raise


def _let_go(self: Any) -> None:
    """Of an earlier `train()` of this Trainer."""
    engine = self.__dict__.pop(_ENGINE, None)
    if engine is not None:
        engine.close()
        everybody.remove(engine)


def _initial_values(original: Any, self: Any, args: Any, dataloader: Any) -> Any:
    values = original(self, args, dataloader)
    self.__dict__[_LOADER] = dataloader
    self.__dict__[_BATCHES] = values[5]
    return values


def _init_training_state(original: Any, self: Any, max_steps: Any, num_update_steps_per_epoch: Any, num_train_epochs: Any, resume_from_checkpoint: Any, trial: Any) -> Any:
    if not takes(self):
        return original(self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial)
    self._prepare_for_training(max_steps, self.__dict__[_LOADER], None)
    root = Path(self._get_output_dir(trial)).absolute()
    engine = TrainerEngine(self, root, self.__dict__[_LOADER], self.__dict__[_BATCHES], self.__dict__.get(_WISH))
    self.__dict__[_ENGINE] = engine
    everybody.append(engine)
    with engine.state_folder() as folder:
        epochs, batches = original(self, max_steps, num_update_steps_per_epoch, num_train_epochs, folder, trial)
    return engine.place(epochs, batches)


def _prepare_for_training(original: Any, self: Any, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
    engine = engine_of(self)
    if engine is None:  # or it is called from `_init_training_state`
        return original(self, max_steps, train_dataloader, resume_from_checkpoint)
    self.callback_handler.train_dataloader = train_dataloader
    return engine.model, train_dataloader


def _run_epoch(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    engine = engine_of(self)
    if engine is None:
        return original(self, *args, **kwargs)
    with engine.continuation.following(kwargs.get("train_dataloader", self.__dict__[_LOADER])):
        return original(self, *args, **kwargs)


def _load_rng_state(original: Any, self: Any, checkpoint: Any) -> None:
    engine = engine_of(self)
    if engine is None:
        original(self, checkpoint)
    else:
        engine.continuation.put_generators_back()


def _save_checkpoint(original: Any, self: Any, model: Any, trial: Any) -> None:
    engine = engine_of(self)
    if engine is None:
        original(self, model, trial)
        return
    if self.hp_search_backend is None and trial is None:
        self.store_flos()
    engine.save()


def _maybe_log_save_evaluate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    engine = engine_of(self)
    if engine is not None:
        engine.stop_if_told()
    return result


def _load_best_model(original: Any, self: Any) -> None:
    engine, best = engine_of(self), self.state.best_model_checkpoint
    if engine is not None:
        engine.settle()
    if engine is None or not is_native(best):
        original(self)
        return
    logger.info("loading the best weights, those of %s (%s)", best, self.state.best_metric)
    engine.load_weights(Path(best).absolute())


def _finalize_training(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    engine = engine_of(self)
    if engine is not None:
        engine.trained()
    return original(self, *args, **kwargs)


def _save_model(original: Any, self: Any, output_dir: Any = None, _internal_call: bool = False) -> None:
    engine = engine_of(self)
    if engine is None or not engine.shards:
        original(self, output_dir, _internal_call)
        return
    engine.write_model(Path(output_dir if output_dir is not None else self.args.output_dir).absolute())
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


TABLE = (
    Replacement("transformers:Trainer.create_accelerator_and_postprocess", (), "its accelerator is left to what follows"),
    Replacement("transformers:Trainer.train", ("resume_from_checkpoint",), "True takes the newest checkpoint that every rank finds whole"),
    Replacement("transformers:Trainer._inner_training_loop", ("resume_from_checkpoint",), "one Checkpointer for each call of train()"),
    Replacement("transformers:Trainer.set_initial_training_values", ("args", "dataloader"), "the loader is noted"),
    Replacement("transformers:Trainer._init_training_state", ("max_steps", "trial"), "each rank reads its own part, the Trainer's state with it"),
    Replacement("transformers:Trainer._prepare_for_training", ("max_steps", "train_dataloader"), "is done before the state is read"),
    Replacement("transformers:Trainer._run_epoch", (), "batches that are done are skipped, or the loader is put to its place"),
    Replacement("transformers:Trainer._load_rng_state", ("checkpoint",), "generators go back to where they stood"),
    Replacement("transformers:Trainer._save_checkpoint", ("model", "trial"), "a checkpoint of all ranks; returns when the state is copied"),
    Replacement("transformers:Trainer._maybe_log_save_evaluate", (), "the run ends here after a signal, with a checkpoint of all ranks"),
    Replacement("transformers:Trainer._load_best_model", (), "each rank reads its own part of the best weights"),
    Replacement("transformers:Trainer._finalize_training", (), "waits for the last checkpoint"),
    Replacement("transformers:Trainer.save_model", ("output_dir",), "whole weights of a sharded model, streamed by one rank with no collective"),
    Replacement("transformers.trainer_utils:get_last_checkpoint", ("folder",), "takes the newest checkpoint that is whole"),
)  # fmt: skip

_METHODS: dict[str, Callable[..., Any]] = {
    "create_accelerator_and_postprocess": _accelerator,
    "train": _train,
    "_inner_training_loop": _inner_training_loop,
    "set_initial_training_values": _initial_values,
    "_init_training_state": _init_training_state,
    "_prepare_for_training": _prepare_for_training,
    "_run_epoch": _run_epoch,
    "_load_rng_state": _load_rng_state,
    "_save_checkpoint": _save_checkpoint,
    "_maybe_log_save_evaluate": _maybe_log_save_evaluate,
    "_load_best_model": _load_best_model,
    "_finalize_training": _finalize_training,
    "save_model": _save_model,
}


class HoldfastTrainerMixin:
    """Before `Trainer` among the bases of a class: its checkpoints are the engine's.

    `trainer.train(resume_from_checkpoint=True)` takes the newest checkpoint that every rank finds whole, a path takes that one; both
    may be of a Trainer without the mixin. `save_total_limit`, `load_best_model_at_end`, `save_only_model` and callbacks mean what
    they mean to the Trainer. `trainer.save_model()` writes whole weights under FSDP, whatever the state dict type; after the training
    rank 0 may be the only one to call it. Importing transformers' `get_last_checkpoint` gives, once such a class exists, the newest
    checkpoint that is whole. After SIGTERM to any rank all of them save and stop at one step: `train()` raises `StoppedBySignal`,
    which ends the program with exit code 0; a program that has a handler of its own for the signal keeps it.

    Raises:
        UsageError: there is nothing to resume from.
        CheckpointError: what was named cannot be resumed from.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        replacements.install(_last_checkpoint, _functions(), ("transformers",), TABLE[-1:])


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        following = getattr(super(HoldfastTrainerMixin, self), name)
        return function(lambda _, *a, **k: following(*a, **k), self, *args, **kwargs)

    method.__name__ = name
    return method


for _name, _function in _METHODS.items():
    setattr(HoldfastTrainerMixin, _name, _method(_name, _function))


# -- every Trainer of a script

replaced, _last_checkpoint = Replaced(), Replaced()


def _functions() -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {f"transformers:Trainer.{name}": _unless_mixed_in(f) for name, f in _METHODS.items()}
    functions["transformers.trainer_utils:get_last_checkpoint"] = lambda original, folder: get_last_checkpoint(folder)
    return functions


def _unless_mixed_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """A class with the mixin comes here a second time, on the way to the Trainer's own method."""

    @functools.wraps(function)
    def replacement(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, HoldfastTrainerMixin):
            return original(self, *args, **kwargs)
        return function(original, self, *args, **kwargs)

    return replacement


def install() -> None:
    """Make every `transformers.Trainer` of this process save and load through the engine; one that is imported later, too.

    Raises:
        UsageError: the installed release does not have what is replaced.
    """
    if "transformers.trainer" in sys.modules:
        replacements.install(replaced, _functions(), ("transformers",), TABLE)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def undo() -> None:
    """Take the replacements out again."""
    replaced.undo()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]


def finish() -> list[str]:
    """At the end of a script: take leave of the other ranks; returns what was saved, in lines for people."""
    lines = []
    for engine in everybody:
        engine.close()
        lines += engine.report()
        failures.extend(s.error for s in engine.checkpointer.saves[-1:] if s.error is not None)
    everybody.clear()
    return lines


def abandon() -> None:
    """After an error: finish the own part and wait for nobody."""
    for engine in everybody:
        engine.abandon()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `install` when transformers' module of the Trainer has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "transformers.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def explain() -> list[str]:
    """What would be replaced, in lines for people."""
    return replacements.explain(TABLE)


def is_left_alone(accelerator: Any) -> bool:
    """Whether a Trainer's accelerator is looked after here, so that nothing else need attach to it."""
    return "_holdfast_trainer" in accelerator.__dict__


