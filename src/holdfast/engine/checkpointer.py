"""The public door of the engine."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from holdfast.core.documents import canonical
from holdfast.engine.collect import collect
from holdfast.engine.deadlines import CROWD, POLL, Deadlines
from holdfast.engine.ending import close_at_exit
from holdfast.engine.firstbatch import before_first_batch
from holdfast.engine.gate import Capture, Gate
from holdfast.engine.meeting import meet
from holdfast.engine.names import Models
from holdfast.engine.onecaller import STOP_INDEX, Boundaries, Note, OneCaller, passed, reached
from holdfast.engine.registration import register
from holdfast.engine.restore import restore_rng
from holdfast.engine.resume import Resume, folder_of, survey
from holdfast.engine.retention import Retention
from holdfast.engine.saver import Saver, StagingLimit, WhenBusy, known
from holdfast.engine.service import Save, Service
from holdfast.engine.store import Below, Connections, Store
from holdfast.engine.watch import IDLE, Request, Watcher, beat_of, say_goodbye
from holdfast.errors import DeadlineExceeded, HoldfastError, SaveFailed, UsageError
from holdfast.storage import LocalFolder, Storage

log = logging.getLogger("holdfast")


class Checkpointer:
    """Saves and resumes a training run, on every rank of it, with no collective.

    Args:
        folder: where the checkpoints go, as `checkpoint-<step>`: a path, or a `Storage`. A relative path is resolved by
            rank 0.
        model: the model, or a list or dict of models; wrapped by DDP or FSDP2, compiled, or plain.
        optimizer: the optimizer, or a list or dict of them; Accelerate's wrappers are seen through.
        lr_scheduler, scaler: objects with `state_dict` and `load_state_dict`, or lists or dicts of them.
        dataloader: the same; `holdfast.DataLoader` keeps a position that any number of ranks can continue.
        base: the folder that the model was loaded from, or folders by the models' keys, where not `load_pretrained` loaded it. Frozen
            weights that are found to be what stands there are named in checkpoints, not copied.
        extra: the caller's own state by name: objects with `state_dict` and `load_state_dict`, or dicts and lists that are
            filled in place on resume.
        overlap: False: `save` returns when the state has been copied. True: it returns at once, and the copy runs beside
            forward and backward; the next `optimizer.step` waits for it, and whatever else changes parameters or `extra`
            tensors must run inside `mutating()`.
        keep_last, keep_every, keep_best, best: which complete checkpoints to keep, see `Retention`; None keeps all. The newest
            and the last one that was read back and found whole are never removed.
        read_back: read every rank's file back and check it before the checkpoint counts.
        one_caller: any rank may be the only one to call `save`. Costs every rank one look into the store before each optimizer
            step, and a note of the small state at each batch; parameters that change outside `optimizer.step` have to do so
            inside `mutating()`.
        stop_signals: signals after which all ranks save and stop at one step: see `should_stop`.
        staging_limit: bytes of host memory for a rank's copy of its state; "auto" takes an equal part of what is free on the
            host. A state that is larger is copied and written in pieces before `save` returns.
        when_busy: what `save` does while the one before it is still being written: "wait" for its turn, or "skip" with a warning;
            a save that one rank skips is skipped by all.
        deadlines: how long to wait for other ranks.

    All ranks make their Checkpointers in the same order, after the process group.

    Raises:
        UsageError: an argument is not what it should be.
        UnsupportedState: the state holds something that cannot be saved; the message has its path.
        DeadlineExceeded: not all ranks came.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Storage,
        *,
        model: Models,
        optimizer: object = None,
        lr_scheduler: object = None,
        dataloader: object = None,
        scaler: object = None,
        extra: Mapping[str, object] | None = None,
        base: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = None,
        overlap: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: Literal["min", "max"] = "min",
        read_back: bool = False,
        one_caller: bool = False,
        stop_signals: Sequence[signal.Signals] = (),
        staging_limit: StagingLimit = "auto",
        when_busy: WhenBusy = "wait",
        deadlines: Deadlines | None = None,
    ) -> None:
        self.read_back = read_back
        self.retention = Retention(keep_last, keep_every, keep_best, best)
        self.on_complete: Callable[[Save], None] = lambda save: None
        """Called on rank 0's service thread with each save that is complete, before older checkpoints are removed."""
        self.stop_folder: Callable[[int], str] = folder_of
        """Where the checkpoint goes with which a stop by a signal ends, by its step."""
        self._deadlines = deadlines or Deadlines()
        self._registered = register(model, optimizer, lr_scheduler, dataloader, scaler, extra, base)
        self._rank, self._world_size = self._registered.rank, self._registered.world_size
        first = collect(self._registered)
        canonical(first.small)  # what cannot be saved is refused before the first step
        if (one_caller or stop_signals) and not self._registered.optimizers:
            raise UsageError("one_caller and stop_signals count optimizer steps: give the Checkpointer its optimizer")
        self._connections = Connections(self._world_size, self._deadlines.store)
        training_store, service_store, watcher_store = (self._connections.another() for _ in range(3))
        self._storage, self._run, self._lease = meet(folder, training_store, self._rank, self._world_size, self._deadlines)
        self._registered.write_to(self._run.homes)
        self._store = Below(training_store, self._run.nonce)
        self._resumes = 0
        self._reported = 0
        self._gate = Gate(self._registered.optimizers, self._deadlines.capture)
        self._service = Service(
            self._storage, Below(service_store, self._run.nonce), self._run, self._rank, self._world_size, self._deadlines,
            before_commit=self._lease.check if self._lease is not None else _nothing, after_commit=self._after_commit, read_back=read_back,
        )  # fmt: skip
        self._registered.bases.prepare(first)
        self._saver = Saver(self._registered, self._run, self._gate, self._service, self._deadlines, overlap, staging_limit, when_busy)
        self._gate.first_steps_made = self._saver.warm_up
        self._closed = False
        self._base_step = 0
        beat = beat_of(self._world_size)
        idle = min(beat, IDLE * max(1, self._world_size // CROWD)) if one_caller or stop_signals else beat
        self._watcher = Watcher(
            Below(watcher_store, self._run.nonce), self._rank, self._deadlines, on_look=self._after_look,
            step=self._step_now, saving=lambda: self._service.doing, idle=idle, beat=beat,
        )  # fmt: skip
        self._one_caller, self._stopping, self._led, self._before = one_caller, False, False, 0
        self._calls: OneCaller | None = None
        self._asked: Counter[tuple[bytes, str]] = Counter()
        if one_caller:
            self._listen()
        if stop_signals:
            self._watcher.hook_signals(stop_signals)
        self._watcher.start()
        self._at_exit = close_at_exit(self)

    @property
    def saves(self) -> list[Save]:
        """Every save of this run, with its times and its outcome."""
        return self._saver.saves

    def peers(self) -> Store:
        """A further connection to the store that this run's ranks share, below its nonce: for what else they have to tell.

        `beat/<rank>` holds a rank's last heartbeat; keys that begin with `script/` are nobody else's.
        """
        return Below(self._connections.another(), self._run.nonce)

    def resume(self, path: str | os.PathLike[str] | None = None) -> int:
        """Continue where a checkpoint stood; returns its step: optimizer steps already done, 0 where there is none.

        Args:
            path: exactly this checkpoint (`checkpoint-500` in the folder, or a path); by default the newest that every
                rank finds whole. It may be one that accelerate, the transformers Trainer or torch.distributed.checkpoint wrote, or
                Hugging Face weights: then what it does not hold stays as it is, and the log says what.

        All ranks call it, after the Checkpointer is made and before training. The random number generators are put back
        at once, and again just before the first batch of a registered data loader reaches the loop.

        Raises:
            CheckpointNotFound: there is nothing at `path`.
            IncompatibleCheckpoint: it is of another model, another optimizer, or cannot go to this number of ranks.
            NoUsableCheckpoint: there are complete checkpoints and none holds.
            CorruptCheckpoint: `path` does not hold.
        """
        self._gate.wait()
        self._watcher.enter("resume")
        self._resumes += 1
        resume = Resume(self._store, self._registered, self._deadlines, self._resumes, self._run.leaders)
        start = time.perf_counter()
        if path is None:
            checkpoint = resume.newest(self._storage)
        else:
            folder = Path(path)
            if len(folder.parts) == 1 and not folder.is_absolute():
                checkpoint = resume.exactly(self._storage, folder.name)
            else:
                checkpoint = resume.exactly(LocalFolder(folder.absolute().parent), folder.name)
        self._watcher.enter("training")
        if checkpoint is None or resume.plan is None:
            self._say(f"no checkpoint in {self._storage.describe()} yet: beginning at step 0")
            return 0
        self._gate.resumed()
        if checkpoint.native and checkpoint.storage.describe() == self._storage.describe():
            self._saver.verified.add(checkpoint.folder)
        pending = [resume.plan]

        def put_generators_back() -> None:
            if pending:  # the first loader that is asked: a later one, for validation say, comes in the middle of the run
                restore_rng(pending.pop())

        for key, value in self._registered.stateful.items():
            if key.partition(".")[0] == "dataloader":
                before_first_batch(value, put_generators_back)
        step = self._base_step = checkpoint.manifest.step
        self._say(f"resumed from {checkpoint.where} at step {step} in {time.perf_counter() - start:.2f} s")
        return step

    def save(
        self, step: int, metric: float | None = None, *, folder: str = "", weights_only: bool = False, when_busy: WhenBusy | None = None
    ) -> Save:
        """Save the state as `checkpoint-<step>`; all ranks call it, between two optimizer steps.

        `metric` rates the checkpoint for `keep_best`; rank 0's counts, and one that is no finite number does not. `folder` is
        another name in the storage than `checkpoint-<step>`. With `weights_only` nothing but the models is written.

        Returns when the state has been copied (at once with `overlap`); the writing goes on beside the training. While the
        save before this one is still being written, `when_busy` counts, or what the Checkpointer was given: give the last save "wait".

        Returns:
            Save: its record, filled as it goes on.

        Raises:
            UsageError: `step` is no whole number, or the state is being changed (`mutating`).
            SaveFailed: the service thread has died.
        """
        started = time.perf_counter()
        if type(step) is not int or step < 0:
            raise UsageError(f"save(step): step is {step!r}, should be the number of optimizer steps done")
        rating = float(metric) if metric is not None and math.isfinite(metric) else None
        if self._closed:
            raise UsageError("save() after close()")
        if not self._service.alive:
            raise SaveFailed(f"rank {self._rank}: the service thread has died; see the log for what it said")
        if self._saver.overlap and not self.saves:
            self._gate.check_hooks()
        self._watcher.enter("save")
        wish = Request(len(self.saves) + 1, step, {}, -1, self._rank, rating, False, folder or folder_of(step), weights_only,
                       known(when_busy) if when_busy else "")  # fmt: skip
        if self._calls is not None and self._one_caller:
            save = self._ask(self._calls, wish, started)
        else:
            save = self._saver.save(wish, started)
        self._watcher.enter("training")
        if self._gate.steps:
            self._base_step = step - next(iter(self._gate.steps.values()))
        return save

    # -- one caller

    def _listen(self) -> None:
        """From now on this rank takes part in saves that others ask for."""
        self._calls = OneCaller(
            self._watcher,
            self._gate,
            Boundaries(self._registered, self._gate),
            self._serve,
            self._refuse,
            self._lead_the_stop,
        )
        self._gate.before_step, self._gate.before_change = self._calls.before_step, self._calls.before_change

    def listen(self) -> None:
        """From now on any rank may be the only one to call `save`, as with `one_caller`; all ranks call this after the same step."""
        if not self._one_caller:
            self._one_caller, self._before = True, len(self.saves)
            if self._calls is None:
                self._listen()

    def _ask(self, calls: OneCaller, wish: Request, started: float) -> Save:
        """Ask all ranks for a checkpoint of this boundary, or join in what another rank has asked for."""
        steps = dict(self._gate.steps)
        before = canonical(steps), wish.folder
        wish = replace(wish, steps=steps, batches=calls.boundaries.batches, changes=self._gate.changes,
                       occurrence=f"{self._resumes}.{self._asked[before]}")  # fmt: skip
        self._asked[before] += 1
        request = self._watcher.post(wish)
        end = time.monotonic() + self._deadlines.agreement
        while request is None:
            self._watcher.look_now()
            same = (wish.steps, wish.folder, wish.occurrence)
            request = next((r for r in list(self._watcher.requests.values()) if (r.steps, r.folder, r.occurrence) == same), None)
            if request is None and time.monotonic() > end:
                raise DeadlineExceeded(f"rank {self._rank}: another rank asked for a save of step {wish.step}, and its request never came")
        if calls.take(request):
            return self._saver.save(self._numbered(request), started)
        while True:  # the watcher was faster
            save = next((s for s in list(self.saves) if s.index == self._numbered(request).index), None)
            if save is not None:
                return save
            if time.monotonic() > end:
                raise DeadlineExceeded(f"rank {self._rank}: its part of the save of step {wish.step} was begun beside it, and never came")
            time.sleep(POLL)

    def _serve(self, request: Request, note: Note | None, held: Capture | None) -> None:
        try:
            self._saver.save(self._numbered(request), time.perf_counter(), note, held)
        except (HoldfastError, OSError) as error:  # told to all ranks already: the training of this one goes on
            log.error("rank %d cannot take part in the save of step %d: %s", self._rank, request.step, error)

    def _refuse(self, request: Request, why: str) -> None:
        self._saver.refuse(self._numbered(request), why)

    def _numbered(self, request: Request) -> Request:
        """Requests are counted from 1: after what all ranks saved together, and one to stop is the last save of its run."""
        return replace(request, index=request.index + (STOP_INDEX if request.stop else self._before))

    @property
    def stop_called(self) -> bool:
        """Whether this rank has heard that one of them received one of `stop_signals`."""
        return self._stopping

    @property
    def should_stop(self) -> bool:
        """Whether the run ends here: true on every rank after the same step, with a checkpoint of that step under way.

        Ask it at the end of an iteration, after the step, and leave the loop; `close` waits for the checkpoint. It becomes true
        within two steps after all ranks have heard that one of them received one of `stop_signals` (a fraction of a second); a run
        that ends before then ends as it would have.
        """
        calls = self._calls
        request = next((r for r in self._watcher.requests.values() if r.stop), None) if calls is not None else None
        if calls is None or request is None or not (reached(self._gate.steps, request) or passed(self._gate.steps, request)):
            return False
        if reached(self._gate.steps, request):
            calls.serve(request, None)
        return True

    def _lead_the_stop(self) -> None:
        """On rank 0, before its step c + 1, once all ranks look before each of theirs: all stop after step c + 2.

        Nobody finishes the backward of step c + 2 before rank 0 takes part in it, which it does after this has been acknowledged;
        so everybody sees it in the look before that step, and knows it after it.
        """
        if self._rank != 0 or self._led or self._watcher.call_to_stop is None:
            return
        if self._store.add("stopping", 0) < self._world_size:
            return
        self._led = True
        first, count = next(iter(self._gate.steps.items()))
        step = self._step_now() + 2
        folder = self.stop_folder(step)
        self._watcher.post(Request(0, step, {first: count + 2}, -1, 0, stop=True, folder=folder, when_busy="wait"))

    def _step_now(self) -> int:
        """Optimizer steps done, in the caller's count."""
        return self._base_step + next(iter(self._gate.steps.values()), 0)

    def _after_look(self) -> None:
        """On the watcher thread."""
        if self._watcher.call_to_stop is not None and not self._stopping:
            if self._calls is None:
                self._listen()
            self._stopping = True
            self._watcher.acknowledge_stop()  # rank 0 names the step only when all ranks look before theirs
        if self._calls is not None:
            self._calls.beside()

    def wait(self, timeout: float | None = None) -> None:
        """Until every requested save is complete.

        Raises:
            SaveFailed: one of them failed since the last `wait`; the message has the rank, the host and the cause.
            DeadlineExceeded: it took longer than `timeout` seconds (by default, what the deadlines allow in all).
        """
        if timeout is None:
            timeout = self._deadlines.capture + 2 * self._deadlines.commit
        end = time.monotonic() + timeout
        while self._reported < len(self.saves):
            save = self.saves[self._reported]
            while not save.finished.wait(min(1.0, max(0.0, end - time.monotonic()))):
                if not self._service.alive:
                    raise SaveFailed(f"rank {self._rank}: the service thread died while it saved step {save.step}")
                if time.monotonic() >= end:
                    raise DeadlineExceeded(f"rank {self._rank}: the save of step {save.step} is not done after {timeout:.0f} s")
            self._reported += 1
            if save.error is not None and not save.error_raised:
                raise save.error

    @contextlib.contextmanager
    def mutating(self) -> Iterator[None]:
        """Around whatever changes parameters or `extra` tensors outside `optimizer.step`: waits for a copy under way.

        EMA updates and swaps, `fuse_lora`, a schedule-free optimizer's `train()` and `eval()`, loading weights.
        """
        with self._gate.mutating():
            yield

    def close(self) -> None:
        """Finish what was requested, say goodbye to the other ranks and stop; a second call does nothing.

        Raises:
            SaveFailed: a save that nobody has waited for failed.
        """
        if self._closed:
            return
        try:
            self.wait()
            if self.saves and self.saves[-1].state == "skipped":
                self._say(f"the last save, of step {self.saves[-1].step}, was skipped: give the last one when_busy='wait'", logging.WARNING)
        finally:
            self._part()
            self._stop(patience=self._deadlines.goodbye)

    def _part(self) -> None:
        """Leave in order: the rank that may host the store last; with one caller, nobody before all others can do without it."""
        self._watcher.enter("closing")
        if self._calls is not None:
            self._calls.idle = True
        everybody = self._rank == 0 or self._calls is not None
        say_goodbye(self._store, self._rank, self._world_size, self._deadlines.goodbye, waits=everybody)

    def _stop(self, patience: float) -> None:
        self._closed = True
        atexit.unregister(self._at_exit)
        self._gate.close()
        self._watcher.stop()
        if self._calls is not None:
            self._calls.boundaries.close()
        if not self._service.stop(patience):
            log.error("rank %d: the service thread did not end within %.0f s", self._rank, patience)
        if self._lease is not None:
            self._lease.release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._closed:  # other ranks may be gone: finish the own part and leave
            self._stop(patience=self._deadlines.goodbye)

    def _after_commit(self, save: Save) -> None:
        """On the service thread, once a save is complete: who leads in a folder removes what `keep_last` no longer wants."""
        if self.read_back:
            self._saver.verified.add(save.folder)
        if self._rank == 0:
            self.on_complete(save)
        if self._lease is not None:
            self.retention.apply(self._storage, survey(self._storage).complete, self._saver.verified, self._run.nonce)

    def _say(self, line: str, level: int = logging.INFO) -> None:
        if self._rank == 0:
            log.log(level, "%s", line)


def _nothing() -> None:
    pass
