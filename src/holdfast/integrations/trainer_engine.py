"""The engine behind one `train()` of a transformers Trainer: a Checkpointer over what the Trainer has prepared.

    set_initial_training_values     the loader is noted
    _init_training_state            model and optimizer are prepared, the Checkpointer is made, the checkpoint is read
    _run_epoch                      batches that are done are skipped, generators are put back
    _save_checkpoint                on all ranks; returns when the state is copied
    _finalize_training              waits for the last checkpoint
    save_model                      whole weights, streamed by rank 0; the Checkpointer lives until the process ends

The Trainer's own state is part of the checkpoint, hashed like all of it. `trainer_state.json`, the config and the tokenizer are put
beside it once it is complete, for people and other tools: a folder that has them is whole.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from holdfast.core.documents import Json
from holdfast.core.manifest import MANIFEST_FILE
from holdfast.engine import restore, rng
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.checkpointer import Checkpointer
from holdfast.engine.deadlines import POLL, Deadlines
from holdfast.engine.registration import register
from holdfast.engine.retention import Complete, Retention
from holdfast.engine.service import Save
from holdfast.errors import DeadlineExceeded, HoldfastError, SaveFailed, UsageError
from holdfast.integrations import handover, trainer_model
from holdfast.integrations.stopping import StoppedBySignal, stop_signals
from holdfast.integrations.trainer_data import Continuation, has_position
from holdfast.integrations.trainer_folders import STATE, newest_foreign
from holdfast.storage import LocalFolder

logger = logging.getLogger("holdfast")

DEADLINES = Deadlines(handshake=3600, agreement=1800, commit=1800)
"""Ranks load models and tokenise for long before they meet, and nobody is there to be told of a slow disk."""

NEWEST = True
"""The wish for the newest checkpoint in the output folder."""

LATEST = "latest"
"""The same, where there may be none yet."""

SAMPLES, PLACE, AHEAD = "holdfast_samples_per_step", "holdfast_samples_of_epoch", "holdfast_read_ahead"
"""Beside the Trainer's own keys in its saved state: samples of all ranks in one optimizer step, and those of the epoch that are done;
the rank, how many ranks there are, and this rank's generators before the batch that was read ahead."""


class TrainerEngine:
    """Made on every rank, when model and optimizer are prepared."""

    def __init__(self, trainer: Any, root: Path, loader: Any, batches_in_epoch: int, wish: str | bool | None) -> None:
        self.trainer, self.root = trainer, root
        self.model: nn.Module = trainer.model_wrapped
        self.shards = handover.is_sharded(self.model)
        keeps_position = has_position(loader)
        self.continuation = Continuation(keeps_position)
        self.remembered = _TrainerState(trainer, batches_in_epoch, self.continuation)
        self._beside: dict[int, bytes] = {}
        self._exports = 0
        self.is_trained = False
        if trainer.args.process_index == 0:  # at the very end, when nobody has called `close`
            atexit.register(shutil.rmtree, root / trainer_model.FOLDER, ignore_errors=True)
        self.checkpointer = Checkpointer(
            root,
            model=self.model,
            optimizer=trainer.optimizer,
            lr_scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            dataloader=loader if keeps_position else None,
            extra={"trainer_state": self.remembered},
            base=_base(trainer),
            stop_signals=stop_signals(),
            deadlines=DEADLINES,
        )
        self.checkpointer.retention = TrainerRetention(trainer)
        self.checkpointer.on_complete = self._completed
        if trainer.args.process_index == 0:
            trainer_model.write_small_files(trainer, root / trainer_model.FOLDER / "base")
        self.step = self._resume(wish)
        if self.step is not None:
            self.continuation.resumed(self.remembered.ahead, rng.capture())

    # -- resume

    def _resume(self, wish: str | bool | None) -> int | None:
        """Optimizer steps done; None for a run from the beginning."""
        if wish is None:
            return None
        path = Path(str(wish)).absolute() if wish not in (NEWEST, LATEST) else self._agree(lambda: newest_foreign(self.root))
        step = self.checkpointer.resume(path)
        if self.remembered.loaded is not None:
            return step
        if wish == LATEST:
            return None
        if wish is NEWEST:
            raise UsageError(f"there is no checkpoint in {self.root} to resume from: leave resume_from_checkpoint out, or give its path")
        raise UsageError(f"{path} is no checkpoint of a Trainer: it has no {STATE}")

    def _agree(self, find: Callable[[], Path | None]) -> Path | None:
        """What rank 0 finds, on all ranks: they may see the folder at different times."""
        if self.trainer.args.world_size == 1:
            return find()
        store, key = self.checkpointer.peers(), "script/resume"
        if self.trainer.args.process_index == 0:
            found = find()
            store.publish(key, json.dumps(str(found) if found else None).encode())
            return found
        end = time.monotonic() + DEADLINES.agreement
        while (word := store.look(key)) is None:
            if time.monotonic() > end:
                raise DeadlineExceeded(f"rank {self.trainer.args.process_index}: rank 0 did not say what to resume from")
            time.sleep(POLL)
        told = json.loads(word)
        return Path(told) if told else None

    @contextmanager
    def state_folder(self) -> Iterator[str | None]:
        """A folder with the resumed Trainer state, for the Trainer to read; None for a run from the beginning."""
        if self.remembered.loaded is None:
            yield None
            return
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, STATE).write_text(_as_json(self.remembered.loaded), encoding="utf-8")
            yield folder

    def place(self, epochs: int, batches: int) -> tuple[int, int]:
        """The epoch that a resumed run is in, and its batches that are done, where a step now takes another number of samples."""
        saved, now = self.remembered.samples, _samples_per_step(self.trainer)
        if self.remembered.loaded is None or saved in (None, now) or self.trainer.args.ignore_data_skip:
            return epochs, batches
        steps, rest = divmod(self.remembered.place, now)
        epochs = int(self.remembered.loaded.get("epoch") or 0)
        logger.warning(
            "a step took %d samples when the checkpoint was saved, and takes %d now: going on at sample %d of epoch %d%s",
            saved, now, steps * now, epochs, f", {rest} samples of it for the second time" if rest else "",
        )  # fmt: skip
        return epochs, steps * self.trainer.args.gradient_accumulation_steps

    # -- save

    def save(self) -> None:
        """A checkpoint of this step; every rank calls this."""
        trainer = self.trainer
        self._note_best()
        trainer.state.stateful_callbacks = _callback_states(trainer)
        if trainer.args.save_only_model:
            self._save_model_only()
            return
        step = int(trainer.state.global_step)
        if trainer.args.process_index == 0:
            self._beside[step] = _as_json(dataclasses.asdict(trainer.state)).encode()
        self._tell_failed()
        self.checkpointer.save(step)

    def _note_best(self) -> None:
        state = self.trainer.state
        if state.best_global_step:
            best = self.root / f"checkpoint-{state.best_global_step}"
            if state.best_global_step == state.global_step or best.is_dir():
                state.best_model_checkpoint = os.path.join(self.trainer.args.output_dir, best.name)

    def _save_model_only(self) -> None:
        """What `from_pretrained` loads, under its final name only when it is whole."""
        from transformers.trainer_utils import rotate_checkpoints

        trainer = self.trainer
        name = f"checkpoint-{trainer.state.global_step}"
        made = self.root / trainer_model.FOLDER / name
        self.write_model(made)
        if trainer.args.process_index == 0:
            (made / STATE).write_text(_as_json(dataclasses.asdict(trainer.state)), encoding="utf-8")
            shutil.rmtree(self.root / name, ignore_errors=True)
            made.rename(self.root / name)
            rotate_checkpoints(
                output_dir=str(self.root), save_total_limit=trainer.args.save_total_limit,
                best_model_checkpoint=_absolute(trainer.state.best_model_checkpoint), use_mtime=True,
            )  # fmt: skip

    def _completed(self, save: Save) -> None:
        """On rank 0's service thread: the small files, the Trainer's state last."""
        state = self._beside.pop(save.step, None)
        if state is None or save.folder.startswith("."):
            return
        try:
            target = self.root / save.folder
            for path in sorted((self.root / trainer_model.FOLDER / "base").iterdir()):
                shutil.copyfile(path, target / path.name)
            LocalFolder(self.root).put(f"{save.folder}/{STATE}", state)
        except OSError as error:
            logger.warning("%s is complete, but the files beside it are not: %s", save.folder, error)

    def settle(self) -> None:
        """Until what was saved is complete, or is known to have failed."""
        for save in self.checkpointer.saves:
            if save.state == "writing" and not save.finished.wait(DEADLINES.capture + 2 * DEADLINES.commit):
                logger.error("the save of step %d is still not done", save.step)
        self._tell_failed()

    def stop_if_told(self) -> None:
        """After each step: a run that a signal stops has its last checkpoint made here, by all ranks.

        Raises:
            StoppedBySignal: it is complete.
        """
        step = int(self.trainer.state.global_step)
        if not self.checkpointer.stop_called or step >= self.trainer.state.max_steps:
            return
        self._note_best()
        self.trainer.state.stateful_callbacks = _callback_states(self.trainer)
        if self.trainer.args.process_index == 0:
            self._beside[step] = _as_json(dataclasses.asdict(self.trainer.state)).encode()
        if self.checkpointer.should_stop:
            self.settle()
            if self.trainer.args.process_index == 0:
                logger.warning("stopped by a signal after step %d: start again with resume_from_checkpoint to go on from there", step)
            raise StoppedBySignal(step)

    def trained(self) -> None:
        """After the last step: waits for its checkpoint. From here on any rank may be the only one to ask for the model."""
        self.settle()
        if self.shards and self.trainer.args.world_size > 1:
            self.checkpointer.listen()
            self.is_trained = True

    def _tell_failed(self) -> None:
        """The training goes on after a save that failed: its error was logged by the engine, and is no news at the end."""
        try:
            done = [s for s in self.checkpointer.saves if s.finished.is_set()]
            if len(done) == len(self.checkpointer.saves):
                self.checkpointer.wait(timeout=1.0)
        except SaveFailed as error:
            logger.debug("told before: %s", error)

    # -- weights

    def write_model(self, target: Path) -> None:
        """The model as `from_pretrained` loads it, in `target`; every rank calls this."""
        if not self.shards:
            if self.trainer.args.should_save:
                self.trainer._save(str(target))
            return
        self._tell_failed()
        self._exports += 1
        others = not self.is_trained
        trainer_model.write_sharded(self.trainer, self.checkpointer, self.root, target, self._exports, DEADLINES.commit, others)

    def load_weights(self, folder: Path) -> None:
        """The weights of a native checkpoint into the model; nothing else changes."""
        self.settle()
        registered = register(self.model, None, None, None, None, None, None)
        generators = rng.capture()
        with self.checkpointer.mutating():
            plan = restore.match(Checkpoint(LocalFolder(folder.parent), folder.name), registered)
            restore.read(plan)
            restore.install(plan)
        rng.restore(generators, "generators")

    # -- the end

    def close(self) -> None:
        """Take leave of the other ranks; every rank calls this."""
        try:
            self.checkpointer.close()
        except HoldfastError as error:
            logger.error("%s", error)
        self._clean()

    def abandon(self) -> None:
        """After an error: finish the own part and wait for nobody."""
        self.checkpointer.__exit__(RuntimeError)

    def _clean(self) -> None:
        if self.trainer.args.process_index == 0:
            shutil.rmtree(self.root / trainer_model.FOLDER, ignore_errors=True)

    def report(self) -> list[str]:
        """What was saved, in lines for people."""
        saves = [s for s in self.checkpointer.saves if not s.folder.startswith(".")]
        complete = sum(s.state == "complete" for s in saves)
        lines = [f"{len(saves)} saves, {complete} complete; the training waited {sum(s.blocked_s for s in saves):.2f} s for them"]
        for s in saves:
            size = f"{s.bytes / 1e6:,.1f} MB of rank 0"
            lines.append(f"  {s.folder}: {s.state}, {size}, waited {s.blocked_s:.3f} s, durable after {s.durable_s:.2f} s")
        return lines


class TrainerRetention(Retention):
    """`save_total_limit` as the Trainer counts it: the newest and the best stay, then the newest ones up to the limit."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_trainer", trainer)

    def superfluous(self, complete: Sequence[Complete], verified: set[str]) -> list[Complete]:
        trainer: Any = getattr(self, "_trainer")  # noqa: B009 (the base is frozen, with slots)
        limit = trainer.args.save_total_limit
        if limit is None or limit <= 0:
            return []
        newest_first = sorted(complete, key=lambda c: c.order, reverse=True)
        best = Path(trainer.state.best_model_checkpoint or "").name
        keep = {c.order for c in newest_first[:1]} | {c.order for c in newest_first if c.folder == best}
        keep |= {c.order for c in [c for c in newest_first if c.folder in verified][:1]}
        for candidate in newest_first:
            if len(keep) >= limit:
                break
            keep.add(candidate.order)
        return [c for c in reversed(newest_first) if c.order not in keep]


class _TrainerState:
    """The Trainer's own state as a checkpoint holds it, and what was loaded."""

    def __init__(self, trainer: Any, batches_in_epoch: int, continuation: Continuation) -> None:
        self._trainer, self._batches_in_epoch, self._continuation = trainer, batches_in_epoch, continuation
        self.loaded: dict[str, Any] | None = None
        self.samples: int | None = None
        self.place = 0
        self.ahead: Json = None

    def _samples_of_epoch(self) -> int:
        done = round((self._trainer.state.epoch or 0) % 1 * self._batches_in_epoch)
        return int(done * _samples_per_step(self._trainer) // self._trainer.args.gradient_accumulation_steps)

    def _rank(self) -> list[int]:
        return [self._trainer.args.process_index, self._trainer.args.world_size]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(_as_json(dataclasses.asdict(self._trainer.state)))
        ahead = [*self._rank(), self._continuation.ahead]
        return state | {SAMPLES: _samples_per_step(self._trainer), PLACE: self._samples_of_epoch(), AHEAD: ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples, self.place = state.get(SAMPLES), state.get(PLACE, 0)
        *rank, ahead = state.get(AHEAD, [None])
        self.ahead = ahead if rank == self._rank() else None
        self.loaded = {key: value for key, value in state.items() if key not in (SAMPLES, PLACE, AHEAD)}


def _samples_per_step(trainer: Any) -> int:
    return int(trainer.get_total_train_batch_size(trainer.args))


def _as_json(state: dict[str, Any]) -> str:
    return json.dumps(state, indent=2, sort_keys=True, default=float) + "\n"


def _absolute(path: str | None) -> str | None:
    return os.path.abspath(path) if path else None


def _callback_states(trainer: Any) -> dict[str, Any]:
    """What callbacks and the control export, by class; several of one class as a list, as the Trainer reads it."""
    from transformers.trainer_callback import ExportableState

    found: dict[str, list[Any]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _base(trainer: Any) -> Path | None:
    """The folder of the frozen weights below an adapter, if it is one with safetensors: those are named, not copied."""
    if not trainer_model.is_adapter(trainer.model):
        return None
    folder = Path(getattr(trainer.model.config, "_name_or_path", "") or "")
    return folder if folder.is_dir() and any(folder.glob("*.safetensors")) else None


def is_native(folder: str | os.PathLike[str]) -> bool:
    """Whether it is a complete checkpoint of the engine."""
    return Path(folder, MANIFEST_FILE).is_file()
