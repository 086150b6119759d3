"""The engine behind an `Accelerator`: what `holdfast run` does to a script, and `attach` to a program of one's own.

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    holdfast.integrations.accelerate.attach(accelerator)
    ...
    accelerator.save_state("out/checkpoint-500")   # on one rank or on all

A Checkpointer with `one_caller` is made of everything that the accelerator has prepared and registered, at the first of: the first
batch of a prepared loader, `load_state`, the first optimizer step, `save_state`. All ranks come there, in this order.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from torch import nn

from holdfast.core.manifest import MANIFEST_FILE, RANK_NAME
from holdfast.engine import rng
from holdfast.engine.checkpointer import Checkpointer
from holdfast.engine.collect import bare_optimizer
from holdfast.engine.deadlines import Deadlines
from holdfast.engine.firstbatch import become
from holdfast.engine.lease import Lease
from holdfast.engine.names import unwrap
from holdfast.engine.registration import usable_folder
from holdfast.engine.resume import folder_of, survey, tidy
from holdfast.engine.service import Save
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    HoldfastError,
    SaveFailed,
    UsageError,
)
from holdfast.integrations import handover
from holdfast.integrations.deletion import Guard
from holdfast.integrations.lone_forward import LoneForwards
from holdfast.integrations.presence import Presence
from holdfast.integrations.script_hooks import Hooks
from holdfast.integrations.script_state import Counters, ScriptFolder, Sized
from holdfast.integrations.shared_forward import SharedForwards, lead_through_wrapper
from holdfast.integrations.stopping import StoppedBySignal, stop_signals
from holdfast.storage import LocalFolder

logger = logging.getLogger("holdfast")

DEADLINES = Deadlines(handshake=3600, agreement=1800, commit=1800)
"""Scripts prepare for long on one rank, and nobody is there to be told of a slow disk."""

_FOLLOWED = "_holdfast_followed"

LEFT_ALONE = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Distributed types whose state is not the ranks' own tensors."""


class Attached:
    """What stands behind one accelerator on one rank. `folder` is where its checkpoints lie, by default its project folder."""

    def __init__(self, accelerator: Any, folder: Path | None = None, validate_on_all_ranks: bool = False) -> None:
        self.accelerator = accelerator
        self._on_all_ranks = validate_on_all_ranks
        self.forwards = LoneForwards()
        self.hooks = Hooks(self)
        self.guard = Guard(self._known_folders)
        self.counters = Counters(accelerator)
        self.checkpointer: Checkpointer | None = None
        self.presence: Presence | None = None
        self.failed: HoldfastError | None = None
        self._folder = folder
        self._resumed_from: Path | None = None
        self._resumed_at = 0
        self._watched: set[int] = set()
        self._generators: Any = None
        self._wanted_types: dict[int, Any] = {}

    # -- what is prepared

    def prepared(self) -> None:
        """After each `prepare`: look after what is new."""
        for number, loader in enumerate(self.accelerator._dataloaders):
            self._follow(loader, number)
        sharded = [m for m in self.accelerator._models if handover.is_sharded(m) and id(m) not in self._watched]
        for model in sharded:
            self._watched.add(id(model))
            self.forwards.watch(model)
            handover.name_as_before(model)
            for module in {id(m): m for m in (model, unwrap(model))}.values():
                self._keep_in_place(module)
                self._give_whole_to_one(module)
        if sharded:
            self.forwards.wrap_script()

    def follow_rest(self, rest: Any, of: Any) -> None:
        """The same for what is left of a prepared loader."""
        number = next((n for n, d in enumerate(self.accelerator._dataloaders) if d is of), None)
        if number is not None:
            self._follow(rest, number)

    def _follow(self, loader: Any, number: int) -> None:
        """Have a loader say when it is iterated, and put generators back after its first batch of a resumed run."""
        if _FOLLOWED in loader.__dict__:
            return
        loader.__dict__[_FOLLOWED] = True
        kind = type(loader)

        def batches(this: Any) -> Any:
            self._stop_here()
            if self.presence is not None and all(m.training for m in self.accelerator._models):
                self.forwards.mark()
            generators, self._generators = self._generators, None
            with self.counters.orders.epoch(number, this):
                for batch in kind.__iter__(this):
                    if generators is not None:
                        rng.restore(generators, "generators")
                        generators = None
                    yield batch
                    self._stop_here()

        def iterate(this: Any) -> Any:
            if self.checkpointer is None and self.accelerator._optimizers and any(d is this for d in self.accelerator._dataloaders):
                self.ready()
                return iter(this)  # the engine watches it by now, too
            return batches(this)

        become(loader, type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__}))

    def _keep_in_place(self, module: nn.Module) -> None:
        """`module.to(dtype)` of one rank alone would leave its shards in another type than the others': it is kept for what is saved."""

        def to(*args: Any, **kwargs: Any) -> nn.Module:
            import torch

            _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
            if dtype is not None:
                self._wanted_types[id(unwrap(module))] = dtype
            return module

        module.__dict__["to"] = to

    def _give_whole_to_one(self, module: nn.Module) -> None:
        """`module.state_dict()` on one rank alone gathers, or holds one rank's pieces: there it is the whole one, handed over."""
        own = module.state_dict

        def state_dict(*args: Any, prefix: str = "", **kwargs: Any) -> Any:
            for_a_parent = bool(args) or kwargs.get("destination") is not None
            if for_a_parent or self.presence is None or self.presence.all_call():
                return own(*args, prefix=prefix, **kwargs)
            found = self.whole(module)
            return found if not prefix or found is None else {prefix + name: found[name] for name in found}

        module.__dict__["state_dict"] = state_dict

    # -- the engine

    def ready(self) -> Checkpointer:
        """The Checkpointer, made now if there is none; all ranks come here in the same order."""
        if self.checkpointer is None:
            a = self.accelerator
            if not a._models or not a._optimizers:
                raise UsageError("there is nothing to save yet: accelerator.prepare(model, optimizer) comes first")
            self.storage = ScriptFolder(usable_folder(self._root()).root)
            self.storage.remove_folder(handover.FOLDER)
            loaders = [d for d in a._dataloaders if getattr(d, "use_stateful_dataloader", False)]
            custom = {f"custom_checkpoint_{i}": o for i, o in enumerate(a._custom_objects)}
            self.models = {"" if len(a._models) == 1 else str(i): m for i, m in enumerate(a._models)}
            self.checkpointer = Checkpointer(
                self.storage,
                model=_single(a._models),
                optimizer=_single(a._optimizers),
                lr_scheduler=_single(a._schedulers),
                dataloader=_single(loaders),
                scaler=a.scaler,
                extra={"accelerate": self.counters, **custom},
                one_caller=True,
                stop_signals=stop_signals(),
                deadlines=DEADLINES,
            )
            self.checkpointer.stop_folder = self._named_like_the_last
            self.hand_over = handover.HandOver(self.checkpointer, self.storage, a.process_index, DEADLINES.commit)
            bare_optimizer(a._optimizers[0], "optimizer").register_step_post_hook(self._stepped)
            if a.num_processes > 1:
                self.presence = Presence(self.checkpointer.peers(), self.checkpointer.peers(), a.process_index, a.num_processes)
                self.forwards.presence = self.presence
                if self._on_all_ranks:
                    self.forwards.shared = SharedForwards(
                        self.checkpointer.peers(), a.process_index, a.num_processes, list(a._models), DEADLINES.commit
                    )
                    for model in a._models:
                        lead_through_wrapper(model, self.forwards.past_the_wrapper)
        return self.checkpointer

    def tidy(self) -> None:
        """Before the script looks for its newest folder: complete what only lacks its manifest, remove what a dead run left."""
        if self.accelerator.is_main_process and (self._folder is not None or self.accelerator.project_dir):
            for root in (self._root(), self._root() / "checkpoints"):
                if root.is_dir():
                    storage = LocalFolder(root)
                    Lease(storage).await_free(survey(storage).complete)
                    tidy(storage)
        self.accelerator.state.wait_for_everyone()

    def _stepped(self, *_: Any) -> None:
        if not self.counters.steps:
            self.forwards.note_training_loop()
        self.counters.stepped()
        self.guard.settle()

    def _root(self) -> Path:
        if self._folder is not None:
            return self._folder.absolute()
        project = getattr(self.accelerator, "project_dir", None)
        return Path(project or ".").absolute()

    def _known_folders(self) -> dict[Path, bool]:
        if self.checkpointer is None:
            return {}
        known = {self._resumed_from: False} if self._resumed_from is not None else {}
        for save in self.saves():
            known[self.storage.root / save.folder] = save.state == "writing"
        return known

    def saves(self) -> list[Save]:
        """Checkpoints only: no hand-overs."""
        if self.checkpointer is None:
            return []
        return [s for s in list(self.checkpointer.saves) if not s.folder.startswith(handover.FOLDER)]

    # -- save_state, load_state

    def save_state(self, output_dir: str | os.PathLike[str] | None) -> str:
        checkpointer = self.ready()
        settings = self.accelerator.project_configuration
        if settings.automatic_checkpoint_naming:
            output_dir = self.counters.next_folder(self.storage.root / "checkpoints")
        if output_dir is None:
            raise UsageError("save_state() was called without a folder, and automatic_checkpoint_naming is off")
        path = Path(output_dir).absolute()
        path.mkdir(parents=True, exist_ok=True)
        numbered = _numbered(path)
        step = int(re.findall(r"\d+", numbered.name)[-1]) if numbered is not None else self.counters.steps
        checkpointer.save(step, folder=self.storage.name_of(path))
        self.hooks.before_save(path)
        settings.iteration += 1
        return str(output_dir)

    def _named_like_the_last(self, step: int) -> str:
        """Where the script itself would save this step, as far as its last save tells; diffusers' scripts look for `checkpoint-N`."""
        last = self.saves()[-1:]
        folder = Path(last[0].folder) if last and not last[0].folder.startswith("/") else self._resumed_from
        if folder is None or not folder.name.endswith(str(last[0].step if last else self._resumed_at)):
            return folder_of(step)
        named = re.sub(r"\d+$", str(step), folder.name)
        return self.storage.name_of(folder.with_name(named)) if folder.is_absolute() else folder.with_name(named).as_posix()

    def _stop_here(self) -> None:
        """Where the loop asks for its next batch: the ranks end here, if they were told to, and all of them at this step."""
        if self.checkpointer is None or not self.checkpointer.should_stop:
            return
        save = self.checkpointer.saves[-1]
        if self.accelerator.is_main_process:
            self.hooks.before_save(self.storage.root / save.folder)
            logger.warning("stopped by a signal after step %d: %s; start again to go on from there", save.step, self.storage.root / save.folder)
        raise StoppedBySignal(save.step)

    def load_state(self, input_dir: str | os.PathLike[str] | None) -> None:
        checkpointer = self.ready()
        if input_dir is None:
            input_dir = self.counters.newest_folder(self.storage.root / "checkpoints")
        path = Path(os.path.expanduser(input_dir)).absolute()
        self.hooks.before_load(path)
        try:
            self._resumed_at = checkpointer.resume(path)
        except (CorruptCheckpoint, CheckpointNotFound) as error:
            raise self._set_aside(path, error) from error
        self._resumed_from = path
        self.counters.resumed(path)
        if not any(getattr(d, "use_stateful_dataloader", False) for d in self.accelerator._dataloaders):
            self._generators = rng.capture()

    def _set_aside(self, path: Path, error: CheckpointError) -> CheckpointError:
        """A damaged or incomplete checkpoint gets a name that no script takes for one: the next start takes the one before."""
        ours = any(RANK_NAME.fullmatch(name) or name == MANIFEST_FILE for name in self.storage.names(str(path)))
        folder = _numbered(path)
        if not ours and path.is_dir() and isinstance(error, CheckpointNotFound) and self.accelerator._load_model_state_pre_hook:
            return CheckpointNotFound(
                f"{path} was saved without Holdfast, and there is no model in it that accelerate wrote: a save hook of the script has written the weights in a "
                "form of its own, which only its load hook reads. Go on from it without `holdfast run`, or from a checkpoint that accelerate wrote whole"
            )
        if not ours or folder is None:
            return error
        aside = folder.with_name(f"unusable-{folder.name}")
        if self.accelerator.is_main_process:
            folder.rename(aside)
        return CorruptCheckpoint(f"{error.args[0]}. {folder} is called {aside.name} now: start again to go on from the one before it")

    # -- whole weights

    def whole(self, module: nn.Module) -> dict[str, Any] | None:
        """The full state dict of a sharded module that was prepared, or of one inside; None for any other."""
        found = self._place(module)
        if found is None:
            return None
        state = self.hand_over.state_dict(*found, self.counters.steps)
        dtype = self._wanted_types.get(id(unwrap(module)))
        return state if dtype is None else Sized(state, dtype)

    def owns(self, module: Any) -> bool:
        """Whether `module` is a sharded model that was prepared, or in one."""
        return isinstance(module, nn.Module) and self._place(module) is not None

    def _place(self, module: nn.Module) -> tuple[str, str] | None:
        found = handover.find(self.models, module) if self.checkpointer is not None else None
        return found if found is not None and handover.is_sharded(self.models[found[0]]) else None

    # -- the end

    def close(self) -> None:
        """Serve until all ranks have come here, and let go."""
        if self.checkpointer is None:
            return
        self.forwards.end()
        try:
            self.checkpointer.close()
        except SaveFailed as error:
            self.failed = error
        self._let_go()

    def report(self) -> list[str]:
        """What was saved, in lines for people, and what was not run."""
        saves = self.saves()
        complete = [s for s in saves if s.state == "complete"]
        lines = [f"{len(saves)} saves, {len(complete)} complete; the training waited {sum(s.blocked_s for s in saves):.2f} s for them"]
        for save in saves:
            folder = self.storage.root / save.folder
            size = sum(f.stat().st_size for f in folder.glob("rank-*")) if folder.is_dir() else 0
            there = f"{size / 1e6:,.1f} MB" if folder.is_dir() else "removed since"
            lines.append(f"  {save.folder}: {save.state}, {there}, waited {save.blocked_s:.3f} s, durable after {save.durable_s:.2f} s")
        return lines + [f"skipped {what}" for what in self.forwards.skipped] + self.hooks.said

    def abandon(self) -> None:
        """After an error: finish the own part and wait for nobody."""
        if self.checkpointer is not None:
            self.checkpointer.__exit__(RuntimeError)
            self._let_go()

    def _let_go(self) -> None:
        self.guard.settle()
        if self.accelerator.is_main_process:
            self.storage.remove_folder(handover.FOLDER)
        self.forwards.close()
        if self.presence is not None:
            self.presence.close()


def _numbered(path: Path) -> Path | None:
    """The folder whose name says the step: the checkpoint's own, or the one that a script has put around it."""
    return next((p for p in (path, path.parent) if re.search(r"\d", p.name)), None)


def _single(objects: list[Any]) -> Any:
    """One object keeps its names without a number."""
    return objects[0] if len(objects) == 1 else list(objects) or None


def attached_to(accelerator: Any) -> Attached | None:
    found: Attached | None = accelerator.__dict__.get("_holdfast")
    return found


def attach(accelerator: Any, folder: str | os.PathLike[str] | None = None) -> Attached:
    """Put the engine behind this accelerator, once, after `prepare` and on every rank.

    From then on `save_state` may be called by one rank or by all and returns when the state is copied, `load_state` reads each rank's
    own part, and `get_state_dict` and `save_pretrained` of sharded models need no other rank to call. `folder` is where the
    checkpoints lie; by default `accelerator.project_dir`. DeepSpeed and Megatron runs are left as they are.

    Raises:
        UsageError: what is replaced is not there in the installed release of accelerate.
    """
    from holdfast.integrations import drop_in

    drop_in.install()
    return drop_in.take(accelerator, Path(folder) if folder is not None else None)
