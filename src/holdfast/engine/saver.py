"""One rank's part in a save, up to where the service thread takes over: find the state, note the small state, copy, hand over."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Literal

import torch

from holdfast.core.documents import canonical
from holdfast.core.manifest import attempt_name
from holdfast.engine import rng
from holdfast.engine.capture import Staging
from holdfast.engine.collect import Collected, Held, Registered, collect
from holdfast.engine.deadlines import Deadlines
from holdfast.engine.gate import Capture, Gate
from holdfast.engine.memory import room_for_staging
from holdfast.engine.onecaller import Note
from holdfast.engine.plan import SavePlan, make_plan
from holdfast.engine.service import Job, Save, SaveSkipped, Service
from holdfast.engine.store import Run
from holdfast.engine.watch import Request
from holdfast.engine.windows import Windows
from holdfast.engine.writer import PIECE
from holdfast.errors import DeadlineExceeded, SaveFailed, UsageError

log = logging.getLogger("holdfast")

WINDOW = 256 << 20
"""Where the whole image does not fit, this much at a time: more would not make the disk faster."""

StagingLimit = int | Literal["auto"]
WhenBusy = Literal["wait", "skip"]


def known(when_busy: WhenBusy) -> WhenBusy:
    """Raises UsageError for what is none."""
    if when_busy not in ("wait", "skip"):
        raise UsageError(f"when_busy is {when_busy!r}, should be 'wait' or 'skip'")
    return when_busy


class Saver:
    """Keeps what saves share: the staging, the plan, the list of saves, and which checkpoints were found whole (`verified`).

    Used by one thread at a time: whoever has closed the gate.
    """

    def __init__(
        self,
        registered: Registered,
        run: Run,
        gate: Gate,
        service: Service,
        deadlines: Deadlines,
        overlap: bool,
        staging_limit: StagingLimit,
        when_busy: WhenBusy,
    ) -> None:
        self._when_busy = known(when_busy)
        if staging_limit != "auto" and (type(staging_limit) is not int or staging_limit < PIECE):
            raise UsageError(f"staging_limit is {staging_limit!r}, should be 'auto' or a number of bytes, at least {PIECE:,}")
        self._registered, self._run, self._gate, self._service = registered, run, gate, service
        self._models = replace(registered, optimizers={}, stateful={})
        self._models.bases = registered.bases
        self._rank, self._world_size = registered.rank, registered.world_size
        self._deadlines, self.overlap = deadlines, overlap
        self._staging, self._limit = Staging(), staging_limit
        self._windows: Windows | None = None
        self._plan: SavePlan | None = None
        self.saves: list[Save] = []
        self.verified: set[str] = set()

    def save(self, wish: Request, started: float, note: Note | None = None, held: Capture | None = None) -> Save:
        """Capture this rank's part and hand it to the service; `held` where the gate is closed for it already."""
        capture = held or self._gate.begin()
        save = self._record(wish, started)
        if (wish.when_busy or self._when_busy) == "skip" and self._service.busy:
            capture.done.set()
            self._service.refuse(save, SaveSkipped("is still writing the one before it (when_busy='skip')"))
            return save
        later = self.overlap and held is None
        try:
            self._wait_for_staging()
            plan, collected, image = self._stage(save, note, later, self._models if wish.weights_only else self._registered)
        except BaseException as error:
            capture.done.set()
            save.error_raised = True
            self._service.refuse(save, error if isinstance(error, Exception) else SaveFailed(repr(error)))
            raise
        later = later or isinstance(image, Windows)
        if not later:
            capture.done.set()
        elif torch.accelerator.is_available():
            capture.begun = torch.accelerator.current_stream().record_event()
        self._service.submit(Job(save, plan, collected, image, capture if later else None))
        if isinstance(image, Windows) and held is None:
            self._wait_for_windows(save, capture)
        save.blocked_s += time.perf_counter() - started
        self._gate.charge(save)
        return save

    def _wait_for_windows(self, save: Save, capture: Capture) -> None:
        """The state may change again only when the last of it is in the file."""
        if not capture.done.wait(self._deadlines.commit):
            capture.void = True
            capture.done.set()
        elif self._rank == 0:
            log.info("step %d: copied and written in pieces, since the staging is limited; the training waited %.2f s",
                     save.step, save.captured_s)  # fmt: skip

    def _record(self, wish: Request, started: float) -> Save:
        """Counted even if it fails later, so that the ranks' counts stay the same."""
        attempt = attempt_name(self._run.nonce, wish.index)
        save = Save(wish.step, wish.index, wish.folder, attempt, wish.metric, wish.folder in self.verified, requested=started)
        self.saves.append(save)
        return save

    def _stage(self, save: Save, note: Note | None, later: bool, registered: Registered) -> tuple[SavePlan, Collected, Staging | Windows]:
        """Find the state, note the small state, and copy what must be copied before `save` returns."""
        collected = collect(registered)
        if note is not None:
            collected.small.update({key: value for key, value in note.small.items() if key in collected.small})
            for name, buffer in note.buffers.items():
                if name in collected.tensors:
                    collected.tensors[name] = Held(collected.tensors[name].spec, buffer)
        generators = rng.capture() if note is None or note.generators is None else note.generators
        small = canonical({"state": collected.small, "rng": generators, "step": save.step, "rank": self._rank})
        registered.bases.settle(collected)
        self._plan = make_plan(collected, registered.bases, self._rank, self._world_size, len(small), self._plan)
        image = self._image(self._plan)
        image.prepare(self._plan, collected.tensors)
        start = time.perf_counter()
        if isinstance(image, Staging):
            image.copy(collected.volatile if later else image.names, collected.tensors)
        image.put_small(small)
        save.captured_s = time.perf_counter() - start
        return self._plan, collected, image

    def _image(self, plan: SavePlan) -> Staging | Windows:
        """The staging for the whole image, if it is there or may be allocated, else a window of it."""
        if self._windows is not None or plan.buffer_size <= self._staging.size:
            return self._windows or self._staging
        free = self._staging.size + room_for_staging(self._world_size) if self._limit == "auto" else self._limit
        if plan.buffer_size <= free:
            return self._staging
        size = max(PIECE, free // PIECE * PIECE)
        self._staging, self._windows = Staging(), Windows(min(size, WINDOW))
        log.warning(
            "rank %d: its state of %.1f GB does not fit into a staging of %.1f GB (staging_limit): each save copies and writes "
            "it in pieces before it returns", self._rank, plan.image_size / 1e9, free / 1e9,
        )  # fmt: skip
        return self._windows

    def warm_up(self) -> None:
        """After the first step, when the state has its size: the first save should cost what later ones do."""
        if self.saves:
            return
        collected = collect(self._registered)
        bases = self._registered.bases
        bases.settle(collected)
        small = len(canonical({"state": collected.small, "rng": rng.capture()}))
        plan = self._plan = make_plan(collected, bases, self._rank, self._world_size, small, self._plan)
        if isinstance(image := self._image(plan), Staging):
            self._service.warm(lambda: image.warm(plan, collected.tensors))

    def _wait_for_staging(self) -> None:
        if not self._service.staging_free.wait(self._deadlines.commit):
            raise DeadlineExceeded(
                f"rank {self._rank}: the last save is still being written after {self._deadlines.commit:.0f} s; save less often, or "
                "write to a faster disk"
            )

    def refuse(self, wish: Request, why: str) -> None:
        """Record a save that this rank cannot take part in, and tell the others."""
        self._service.refuse(self._record(wish, time.perf_counter()), SaveFailed(why))
