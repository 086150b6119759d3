"""One caller is enough: any rank may be the only one to call `save`, and a signal is one more caller.

The caller's `save` returns when its request is in the store and acknowledged. Every other rank looks for requests before each
optimizer step, by a look that begins once that step's gradients are there: to finish the backward of step N+1 a rank needs
the caller's part of a gradient collective, which the caller gives only after its `save(N)` has returned. So no rank that
synchronises its gradients at every step can be past N before it has seen the request; one that is says so, and the save fails.

A step that a scaler skips calls no hook, and what follows it (an average's update inside `mutating`) would change the state: the
look is made before such a block, too. The caller's count of these blocks says whether this rank's own is still to come.

A rank that will not step for a while (a barrier, a long validation, the end of the script) is served by the watcher thread: its
optimizers' counts say that its state is still that of step N, and the gate keeps it so while the copy runs.

Small state (generators, schedulers, data position, persistent buffers) belongs to the loop's boundary, which only the caller
names. Other ranks keep a note of it, taken when the loop asks for its next batch; without a registered loader, generators right
after the optimizer step and the rest before the next forward.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.core.documents import Json
from holdfast.engine import rng
from holdfast.engine.collect import Registered, encode_stateful
from holdfast.engine.firstbatch import become
from holdfast.engine.gate import Capture, Gate
from holdfast.engine.names import persistent_buffers
from holdfast.engine.watch import Request, Watcher

log = logging.getLogger("holdfast")

GRACE = 1.0
"""Seconds that a request waits for the training thread to come to its next step before the watcher copies beside it."""

BEHIND = 5.0
"""The same where this rank has made fewer changes outside `step` than the caller: one that only some ranks make never comes. And for a
stop, whose changes nobody can count beforehand: they come between the step and `should_stop`."""

KEPT = 64
"""Notes kept since the last optimizer step: more micro-batches than that to a step, and the first ones are forgotten."""

STOP_INDEX = 10**11
"""Added to the index of a request to stop, which is the last save of its run whatever has been numbered before."""


@dataclass
class Note:
    """The small state of a boundary: after `steps`, before batch `batches` + 1."""

    steps: dict[str, int]
    batches: int
    small: dict[str, Json] = field(default_factory=dict)
    generators: Json = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


class Boundaries:
    """Takes the notes, by hooks on loaders, models and the gate. Only in use where ranks other than the caller need them."""

    def __init__(self, registered: Registered, gate: Gate) -> None:
        self._registered, self._gate = registered, gate
        self._buffers = persistent_buffers(registered.models)
        self._notes: list[Note] = []
        self.batches = 0
        self._handles: list[Any] = []
        loaders = [v for k, v in registered.stateful.items() if k.partition(".")[0] == "dataloader"]
        for loader in loaders:
            _observe(loader, self._asked)
        if not loaders:
            gate.after_step = self._stepped
            for model in registered.models.values():
                self._handles.append(model.register_forward_pre_hook(self._before_forward))

    def close(self) -> None:
        self._gate.after_step = None
        for handle in self._handles:
            handle.remove()

    def now(self) -> Note:
        """The boundary that the training thread stands at."""
        note = Note(dict(self._gate.steps), self.batches, generators=rng.capture())
        self._note_rest(note)
        return note

    def of(self, request: Request) -> Note | None:
        """The note of the boundary that a request means; None where none was taken, or where the loop has not left it."""
        fitting = [note for note in self._notes if reached(note.steps, request)]
        exact = [note for note in fitting if note.batches == request.batches]
        if not exact and request.batches == self.batches > 0:
            return None  # the loop stands there still; the notes are of boundaries before steps that a scaler skipped
        return next(iter(exact or fitting), None)

    def _note_rest(self, note: Note) -> None:
        for key, value in self._registered.stateful.items():
            note.small[key] = encode_stateful(key, value, _ignore)
        note.buffers = {name: module._buffers[attribute].clone() for name, module, attribute in self._buffers}  # type: ignore[union-attr]

    def _keep(self, note: Note) -> None:
        if self._notes and self._notes[-1].steps != note.steps:
            self._notes.clear()
        self._notes.append(note)
        del self._notes[KEPT:]

    def _asked(self) -> None:
        self._keep(self.now())
        self.batches += 1

    def _stepped(self) -> None:
        self._keep(Note(dict(self._gate.steps), 0, generators=rng.capture()))

    def _before_forward(self, *_: Any) -> None:
        if self._notes and not self._notes[-1].small and not self._notes[-1].buffers:
            self._note_rest(self._notes[-1])


def reached(steps: dict[str, int], request: Request) -> bool:
    return all(steps[key] == count for key, count in request.steps.items())


def passed(steps: dict[str, int], request: Request) -> bool:
    return any(steps[key] > count for key, count in request.steps.items())


class OneCaller:
    """Serves requests on one rank: before a step on the training thread, or beside it on the watcher's.

    `serve(request, note, capture)` makes the save; `refuse(request, why)` says that this rank cannot; `lead()` is called before
    each step, for the rank that names where a called run stops.
    """

    def __init__(
        self,
        watcher: Watcher,
        gate: Gate,
        boundaries: Boundaries,
        serve: Callable[[Request, Note | None, Capture | None], None],
        refuse: Callable[[Request, str], None],
        lead: Callable[[], None],
    ) -> None:
        self.watcher, self.gate, self.boundaries = watcher, gate, boundaries
        self._serve, self._refuse, self._lead = serve, refuse, lead
        self.served: set[int] = set()
        self._lock = threading.Lock()
        self.idle = False
        """The training thread has nothing left to do but to wait for the others."""

        self._seen: dict[int, float] = {}

    def take(self, request: Request) -> bool:
        """Whether this thread is the one to serve it: only the first that asks is."""
        with self._lock:
            new = request.index not in self.served
            self.served.add(request.index)
            return new

    def pending(self) -> list[Request]:
        return [r for i, r in sorted(self.watcher.requests.items()) if i not in self.served]

    def _look(self) -> None:
        if torch.accelerator.is_available():
            # The gradients' collectives are enqueued, perhaps not done: their end is what proves that the caller is here, too.
            torch.accelerator.current_stream().synchronize()
        if not self.watcher.look_now():
            log.warning("the store did not answer before a step: a save that another rank asked for may fail")

    def before_change(self) -> None:
        """On the training thread, before a block of `mutating`: requests that this change would come too late for."""
        self._look()
        for request in self.pending():
            if not request.stop and reached(self.gate.steps, request) and 0 <= request.changes <= self.gate.changes:
                self.serve(request, self.boundaries.of(request))

    def before_step(self, key: str) -> None:
        """On the training thread, at the beginning of a step's pre-hook."""
        self._look()
        self._lead()
        first = next(iter(self.gate.steps))
        for request in self.pending():
            if passed(self.gate.steps, request):
                self._late(request)
            elif reached(self.gate.steps, request) and (key == first or not request.stop):
                self.serve(request, self.boundaries.of(request))

    def beside(self) -> None:
        """On the watcher thread, after each look: requests that the training thread does not come to."""
        for request in self.pending():
            late = passed(self.gate.steps, request)
            if not late and not reached(self.gate.steps, request):
                continue
            seen = self._seen.setdefault(request.index, time.monotonic())
            grace = BEHIND if request.stop or self.gate.changes < request.changes else GRACE
            if not self.idle and time.monotonic() - seen < grace:
                continue
            if late:
                self._late(request)
                continue

            def still_there(request: Request = request) -> bool:
                return reached(self.gate.steps, request) and self.take(request)

            capture = self.gate.begin_beside(still_there)
            if capture is not None:
                try:
                    self._serve(request, self.boundaries.of(request) or self.boundaries.now(), capture)
                except BaseException:  # else whoever copies opens the gate, which may be later than this
                    capture.done.set()
                    raise

    def serve(self, request: Request, note: Note | None) -> None:
        """On the training thread."""
        if self.take(request):
            self._serve(request, note, None)

    def _late(self, request: Request) -> None:
        if not self.take(request):
            return
        where = ", ".join(f"{k or 'optimizer'} {v}" for k, v in self.gate.steps.items())
        self._refuse(request, f"its optimizers have gone on already ({where}): the loop does not synchronise gradients at every step")


class _Asking:
    """An iterator that says when it is asked."""

    def __init__(self, inner: Iterator[Any], asked: Callable[[], None]) -> None:
        self.inner, self._asked = inner, asked

    def __iter__(self) -> _Asking:
        return self

    def __next__(self) -> Any:
        self._asked()
        return next(self.inner)


def _observe(loader: Any, asked: Callable[[], None]) -> None:
    """Have `asked` called whenever a loop asks `loader` for its next batch, before that is made."""
    kind = type(loader)
    members = {"__iter__": lambda self: _Asking(kind.__iter__(self), asked), "__module__": kind.__module__}
    become(loader, type(kind.__name__, (kind,), members))


def _ignore(name: str, tensor: torch.Tensor) -> None:
    pass
