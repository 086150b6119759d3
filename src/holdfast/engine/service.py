"""The service thread of a rank: everything of a save that need not be on the training thread.

    capture (overlap only) -> file -> receipt -> announcement -> rank 0: all announcements -> manifest -> retention

Where the ranks write to several folders, rank 0 hands the manifest to the ranks that lead in the others, and puts its own, which
says that the save is complete, when they have theirs.

It waits for no other rank to write its own part; only the manifest needs them all. A failure anywhere is told to all ranks
through the store, the files of the attempt that a rank wrote are removed by that rank, and the next save starts afresh.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.core.documents import canonical, digest
from holdfast.core.manifest import BLOCK, Announcement, Manifest, Receipt, rank_file
from holdfast.engine import commit, writer
from holdfast.engine.blocks import BlockFile
from holdfast.engine.capture import Staging
from holdfast.engine.collect import Collected
from holdfast.engine.deadlines import Deadlines, poll_of
from holdfast.engine.gate import Capture
from holdfast.engine.plan import SavePlan
from holdfast.engine.retention import remove_attempts
from holdfast.engine.store import Run, Store, name_ranks
from holdfast.engine.verify import bad_blocks
from holdfast.engine.watch import beat_of, roll_call
from holdfast.engine.windows import Windows
from holdfast.errors import CorruptCheckpoint, DeadlineExceeded, HoldfastError, SaveFailed
from holdfast.storage import Storage

log = logging.getLogger("holdfast")


@dataclass
class Save:
    """One requested save and what became of it. Times are seconds; `durable_s` counts from the request to the manifest."""

    step: int
    index: int
    folder: str
    attempt: str
    metric: float | None = None
    replaces_verified: bool = False
    """Whether it takes the place of a checkpoint that was read back: then it is read back, too, before it does."""

    state: str = "writing"
    """writing, complete, failed, or skipped: where a rank was still busy with the save before and was not to wait for it."""

    blocked_s: float = 0.0
    captured_s: float = 0.0
    written_s: float = 0.0
    durable_s: float = 0.0
    bytes: int = 0
    error: HoldfastError | None = None
    error_raised: bool = False
    """Whether `save` itself raised it, so that `wait` need not."""

    requested: float = field(default_factory=time.perf_counter)
    finished: threading.Event = field(default_factory=threading.Event, repr=False)


@dataclass
class Job:
    """A save on its way: `capture` is set where the copy is still to be made, `announced` when this rank has done its part."""

    save: Save
    plan: SavePlan
    collected: Collected
    staging: Staging | Windows
    capture: Capture | None
    announced: float | None = None
    manifest: Manifest | None = None
    """What this rank has put into its folder, or on rank 0 will, when the other folders have it."""

    parts: list[Announcement] = field(default_factory=list)
    """Of all ranks, on rank 0."""


@dataclass
class Warm:
    """Work on the staging that no save waits for."""

    work: Callable[[], None]


class SaveSkipped(SaveFailed):
    """A rank was busy and was told not to wait. Never raised: the record of the save says it."""


@dataclass
class Refusal:
    """A save that this rank could not even begin."""

    save: Save
    error: Exception


class Service:
    """Owns the thread and the list of saves that wait for their manifest."""

    def __init__(
        self,
        storage: Storage,
        store: Store,
        run: Run,
        rank: int,
        world_size: int,
        deadlines: Deadlines,
        *,
        before_commit: Callable[[], None],
        after_commit: Callable[[Save], None],
        read_back: bool,
    ) -> None:
        self._storage, self._store, self._run = storage, store, run
        self._rank, self._world_size, self._deadlines = rank, world_size, deadlines
        self._before_commit, self._after_commit, self._read_back = before_commit, after_commit, read_back
        self._leads = run.home(rank) == rank
        self._queue: queue.SimpleQueue[Job | Refusal | Warm | None] = queue.SimpleQueue()
        self._pending: list[Job] = []
        self.staging_free = threading.Event()
        self.staging_free.set()
        self._warming = False
        self.host = socket.gethostname()
        self.doing: tuple[str, float] | None = None
        """What the thread is at, and since when (monotonic): a disk that does not answer keeps it there."""

        # Rank 0 listens for a heartbeat before it says who is missing: its word comes before the others lose patience with it.
        self._patience = deadlines.commit + (4 * beat_of(world_size) if rank else 0.0)
        self._poll = poll_of(rank, world_size)
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._thread = threading.Thread(target=self._serve, name="holdfast-service", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether a save is still being written out of the staging."""
        return not self.staging_free.is_set() and not self._warming

    def submit(self, job: Job) -> None:
        self.staging_free.clear()
        self._queue.put(job)

    def warm(self, work: Callable[[], None]) -> None:
        """Do something with the staging before the first save, on the service thread."""
        self._warming = True
        self.staging_free.clear()
        self._queue.put(Warm(work))

    def refuse(self, save: Save, error: Exception) -> None:
        """Tell all ranks that this one will not take part in a save."""
        self._queue.put(Refusal(save, error))

    def stop(self, deadline: float) -> bool:
        """Let it finish what it has and end; False when it did not within `deadline` seconds."""
        self._queue.put(None)
        self._thread.join(deadline)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        if self._device is not None:  # a new thread begins on device 0
            torch.accelerator.set_device_index(self._device)
        stopping = False
        while not (stopping and not self._pending):
            try:
                job = self._queue.get(timeout=self._poll if self._pending else None)
            except queue.Empty:
                job = None
            else:
                stopping = stopping or job is None
            if isinstance(job, Warm):
                try:
                    job.work()
                except Exception as error:  # the first save will meet the same and say it
                    log.warning("rank %d: staging could not be prepared ahead: %s", self._rank, error)
                self._warming = False
                self.staging_free.set()
            elif isinstance(job, Refusal):
                self._fail(job.save, "skip" if isinstance(job.error, SaveSkipped) else "capture", job.error)
            elif job is not None:
                self._perform(job)
            elif stopping and self._pending:
                time.sleep(self._poll)
            for waiting in list(self._pending):
                self._follow(waiting)

    def _perform(self, job: Job) -> None:
        phase = self._enter("capture", job)
        try:
            try:
                self._finish_capture(job)
                phase = self._enter("write", job)
                receipt = self._write(job)
            finally:
                if job.capture is not None:
                    job.capture.done.set()
                self.staging_free.set()
            phase = self._enter("announcement", job)
            self._store.publish(f"{job.save.index}/receipt/{self._rank}", Announcement.of(receipt).encoded())
            self._store.add(f"{job.save.index}/receipts", 1)
        except Exception as error:  # whatever it is: the training goes on, and every rank hears of it
            self._fail(job.save, phase, error, job)
        else:
            job.announced = time.perf_counter()
            self._pending.append(job)
        self.doing = None

    def _enter(self, phase: str, job: Job) -> str:
        self.doing = f"{phase} of step {job.save.step}", time.monotonic()
        return phase

    def _finish_capture(self, job: Job) -> None:
        if job.capture is None:
            return
        if isinstance(job.staging, Windows):  # copied while it is written
            if job.capture.begun is not None:
                job.capture.begun.synchronize()
            return
        start = time.perf_counter()
        names = job.staging.names_without(job.collected.volatile)
        job.capture.ended = job.staging.enqueue(names, job.collected.tensors, job.capture.begun)
        job.capture.done.set()  # the host may go on; the compute stream waits for the copies' end
        if job.capture.ended is not None:
            job.capture.ended.synchronize()
        job.save.captured_s = time.perf_counter() - start
        _refuse_void(job.capture)

    def _write(self, job: Job) -> Receipt:
        save, plan = job.save, job.plan
        start = time.perf_counter()
        name = rank_file(self._rank, save.attempt)
        what = f"rank {self._rank}: writing step {save.step}"

        def write_file() -> tuple[str, ...]:
            self._storage.make_folder(save.folder)
            return writer.write_image(self._storage, save.folder, name, plan, job.staging)

        blocks = writer.persistently(write_file, what)
        plain = job.staging.plain_digest()
        if isinstance(job.staging, Windows) and job.capture is not None:
            save.captured_s = time.perf_counter() - start
            job.capture.done.set()
            _refuse_void(job.capture)
        save.written_s, save.bytes = time.perf_counter() - start, plan.image_size
        receipt = Receipt(
            attempt=save.attempt,
            run_sequence=self._run.run_sequence,
            save_index=save.index,
            step=save.step,
            rank=self._rank,
            world_size=self._world_size,
            layout=plan.layout.digest,
            size=plan.image_size,
            block_size=BLOCK,
            blocks=blocks,
            plain=plain,
            host=self.host,
            captured_s=save.captured_s,
            written_s=save.written_s,
            metric=save.metric,
            groups=_groups_digest(job.collected),
            bases=plan.bases.notes,
            home=self._run.home(self._rank) if self._run.homes else None,
        )
        if self._read_back or save.replaces_verified:
            self._check(BlockFile(self._storage, f"{save.folder}/{name}", plan.image_size, blocks))
        writer.persistently(lambda: writer.write_receipt(self._storage, save.folder, plan, receipt), what)
        return receipt

    def _check(self, file: BlockFile) -> None:
        bad = list(bad_blocks(file))
        if bad:
            raise CorruptCheckpoint(f"{file.path} does not read back as it was written: {len(bad)} blocks differ, the first is {bad[0]}")

    def _follow(self, job: Job) -> None:
        """Has this save become complete, or failed, or waited for too long?"""
        save = job.save
        try:
            failure = self._store.look(f"{save.index}/failed")
            if failure is not None:
                self._told(save, failure, job)
            elif self._rank == 0 and self._store.add(f"{save.index}/receipts", 0) == self._world_size:
                self._commit(job)
            elif self._leads and self._rank != 0 and job.manifest is None and (told := self._store.look(f"{save.index}/manifest")):
                self._put(job, Manifest.parse(told, f"the manifest of step {save.step}"))
                self._store.add(f"{save.index}/placed", 1)
            elif self._rank != 0 and self._store.look(f"{save.index}/complete") is not None:
                self._finish(job)
            elif job.announced is not None and time.perf_counter() - job.announced > self._patience:
                self._out_of_time(job)
        except Exception as error:
            self._fail(job.save, "commit", error, job)

    def _out_of_time(self, job: Job) -> None:
        """Rank 0 alone decides that a save has failed once receipts are out: it alone knows that it will not commit."""
        if self._rank == 0:
            phase = "delivery" if job.manifest is None else "commit"  # or the manifest may be in some of the folders
            self._fail(job.save, phase, DeadlineExceeded(self._missing(job.save)), job)
        else:
            waited = f"rank 0 has not completed step {job.save.step} within {self._patience:.0f} s"
            error = DeadlineExceeded(f"rank {self._rank} ({self.host}): {waited}; look into its log")
            self._give_up(job.save, error, remove=False, job=job)

    def _commit(self, job: Job) -> None:
        """On rank 0: all ranks have announced their part."""
        save, others = job.save, len(self._run.leaders) - 1
        if job.manifest is None:
            job.parts = self._announcements(save, range(self._world_size))
            job.manifest = Manifest.of(job.parts, self._run.run_sequence, save.index)
            if others:
                self._before_commit()
                self._store.publish(f"{save.index}/manifest", job.manifest.encoded())
        if others == 0 or self._store.add(f"{save.index}/placed", 0) == others:
            self._put(job, job.manifest)
            self._store.publish(f"{save.index}/complete", commit.manifest_digest(job.manifest).encode())
            self._finish(job)
        elif job.announced is not None and time.perf_counter() - job.announced > self._patience:
            self._out_of_time(job)

    def _put(self, job: Job, manifest: Manifest) -> None:
        """The manifest into this rank's folder, for all that write there."""
        self._before_commit()
        ranks = [rank for rank in range(self._world_size) if self._run.home(rank) == self._rank]
        parts = [job.parts[rank] for rank in ranks] if job.parts else self._announcements(job.save, ranks)
        commit.check(self._storage, job.save.folder, manifest, parts)
        commit.put(self._storage, job.save.folder, manifest)
        job.manifest = manifest

    def _announcements(self, save: Save, ranks: Sequence[int]) -> list[Announcement]:
        told = self._store.gather([f"{save.index}/receipt/{rank}" for rank in ranks])
        named = zip(ranks, told, strict=True)
        return [Announcement.parse(data, f"the announcement of rank {rank} for step {save.step}") for rank, data in named]

    def _finish(self, job: Job) -> None:
        self._pending.remove(job)
        job.save.durable_s = time.perf_counter() - job.save.requested
        job.save.state = "complete"
        try:
            if self._leads:
                remove_attempts(self._storage, job.save.folder, self._run.nonce, job.save.index, keep=job.manifest)
        except (HoldfastError, OSError) as error:
            log.warning("files of an earlier attempt stay in %s: %s", job.save.folder, error)
        try:
            self._after_commit(job.save)
            if self._store.add(f"{job.save.index}/seen", 1) == self._world_size:
                self._forget(job.save.index)
        except Exception as error:  # the checkpoint is complete, whatever comes after it
            log.warning("rank %d: after the save of step %d: %s", self._rank, job.save.step, error)
        job.save.finished.set()

    def _forget(self, index: int) -> None:
        """All ranks have seen how this save ended: its keys may go."""
        for key in ("receipts", "manifest", "placed", "complete", "failed", "seen", *(f"receipt/{r}" for r in range(self._world_size))):
            self._store.delete(f"{index}/{key}")

    def _fail(self, save: Save, phase: str, error: Exception, job: Job | None = None) -> None:
        own = isinstance(error, HoldfastError) and error.args
        message = str(error.args[0]) if own else f"{type(error).__name__}: {error}"
        told = {"rank": self._rank, "host": self.host, "phase": phase, "message": message}
        failure = json.dumps(told).encode()
        try:
            self._store.publish(f"{save.index}/failed", failure)
        except Exception as lost:  # the store is gone, and with it the job: what is known is said here
            log.error("rank %d: the store does not answer (%s)", self._rank, lost)
        self._told(save, failure, job, error)

    def _told(self, save: Save, failure: bytes, job: Job | None, cause: Exception | None = None) -> None:
        """A save ends as a rank, this or another, has said of it."""
        skipped = json.loads(failure)["phase"] == "skip"
        self._give_up(save, SaveFailed(self._describe_failure(save, failure)), _nobody_commits(failure), job, cause, skipped)

    def _give_up(
        self, save: Save, error: SaveFailed, remove: bool, job: Job | None, cause: Exception | None = None, skipped: bool = False
    ) -> None:
        if job in self._pending:
            self._pending.remove(job)
        if skipped:
            save.state = "skipped"
            log.warning("%s", error)
        else:
            error.__cause__ = cause
            save.error, save.state = error, "failed"
            log.error("%s", error)
        try:
            if remove:
                writer.remove_attempt(self._storage, save.folder, self._rank, save.attempt)
        except OSError as left:
            log.warning("rank %d: files of the failed attempt stay in %s (%s)", self._rank, save.folder, left)
        save.finished.set()

    def _describe_failure(self, save: Save, failure: bytes) -> str:
        told = json.loads(failure)
        if told["phase"] == "skip":
            return f"the save of step {save.step} is skipped: rank {told['rank']} ({told['host']}) {told['message']}"
        return (
            f"the save of step {save.step} failed on rank {told['rank']} ({told['host']}) in phase '{told['phase']}': "
            f"{told['message']}. Earlier checkpoints are untouched and training goes on."
        )

    def _missing(self, save: Save) -> str:
        waited = f"after {self._deadlines.commit:.0f} s"
        absent = [r for r in range(self._world_size) if self._store.look(f"{save.index}/receipt/{r}") is None]
        if not absent:
            absent = self._run.leaders[1:]
            seen = roll_call(self._store, absent, self._world_size)
            return f"not all of {name_ranks(absent)} put the manifest into their folders {waited}: {seen}"
        seen = roll_call(self._store, absent, self._world_size)
        return (
            f"{name_ranks(absent)} did not deliver {waited}: {seen}. Every rank has to call save({save.step}) (or one, with "
            "one_caller=True), and its disk has to take its part in that time; look into their logs"
        )


def _refuse_void(capture: Capture) -> None:
    if capture.void:
        raise SaveFailed("the copy of the state took longer than its deadline, and the training went on without it")


def _groups_digest(collected: Collected) -> str:
    """Of the values in all parameter groups, which are the same on all ranks unless an optimizer keeps its own."""
    groups = {key: state for key, state in collected.small.items() if key.partition(".")[0] == "optimizer"}
    return digest(canonical({key: [group["values"] for group in state["groups"]] for key, state in groups.items()}))


def _nobody_commits(failure: bytes) -> bool:
    """Whether no manifest can name this attempt, so that its files may go: a rank did not deliver, and rank 0 knows it.

    A failure while the manifest is written, or while a receipt is announced, may come after the fact.
    """
    return json.loads(failure)["phase"] in ("skip", "capture", "write", "delivery")
