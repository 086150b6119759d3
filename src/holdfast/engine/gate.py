"""The gate: while a copy of the state runs, no optimizer step may begin.

A pre-step hook on every optimizer waits for the copy that is under way, and so does `mutating()` around whatever else
changes parameters. The gate opens by itself when the copy is done, when it failed, and when it takes longer than its
deadline; the copy is void then, so that a slow or dead service thread never stops the training.

On an accelerator the host runs ahead of the device, so the gate lives in streams: the copies wait, on a stream of their own,
for an event that the training thread recorded after the last step's kernels; the host waits only until they are enqueued, and
has the compute stream wait for their end. State on the host (offloaded parameters, step counters) is copied before that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from holdfast.errors import UsageError

log = logging.getLogger("holdfast")


class Charged(Protocol):
    """Who is told of the time that the training thread waited."""

    blocked_s: float


class Capture:
    """One copy of the state under way. `void` is set when it must not be used any more.

    `done` means that the host may go on. On a device `begun` is the event after which the state is that of the save, and `ended`
    the one before which the compute stream must not change it.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self.void = False
        self.begun: torch.Event | None = None
        self.ended: torch.Event | None = None


class Gate:
    """Hooks on the optimizers of one Checkpointer.

    All methods belong to the training thread but `begin_beside`, with which the watcher starts a copy of its own while the
    training thread is elsewhere, and `Capture.done.set`.
    """

    def __init__(self, optimizers: dict[str, torch.optim.Optimizer], deadline: float) -> None:
        self._deadline = deadline
        self._capture: Capture | None = None
        self._mutating = 0
        self.changes = 0
        """Blocks of `mutating` that have ended."""

        self.before_change: Callable[[], None] | None = None
        """Called before the outermost block of `mutating` begins, with the gate open."""

        self._charged: Charged | None = None
        self._lock = threading.Lock()
        self._stepping = False
        self.before_step: Callable[[str], None] | None = None
        """Called with the optimizer's key before every step, with the gate open."""

        self.after_step: Callable[[], None] | None = None
        self.first_steps_made: Callable[[], None] | None = None
        """Called once, when every optimizer has made a step and so has its state."""

        self.steps = dict.fromkeys(optimizers, 0)
        self._optimizers = optimizers
        self._own_steps = {key: own_counter(o) for key, o in optimizers.items()}
        self._handles = []
        for key, optimizer in optimizers.items():
            self._handles += [
                optimizer.register_step_pre_hook(self._before(key)),
                optimizer.register_step_post_hook(self._counter(key)),
                optimizer.register_load_state_dict_post_hook(lambda _: self.resumed()),
            ]

    def close(self) -> None:
        self.wait()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self) -> Capture:
        """A copy begins; from now on the gate is closed until its `done` is set."""
        if self._mutating:
            raise UsageError("save() was called inside `with checkpointer.mutating()`: the state is not one to keep; save after it")
        while True:
            self.wait()
            with self._lock:
                if self._capture is None:
                    self._capture = Capture()
                    return self._capture

    def begin_beside(self, allowed: Callable[[], bool]) -> Capture | None:
        """Begin a copy from another thread, if no step, change or copy is under way and `allowed()` holds just then."""
        with self._lock:
            before = self._capture  # stays until the training thread comes by, which may be never
            over = before is None or (before.done.is_set() and (before.ended is None or before.ended.query()))
            if self._stepping or self._mutating or not over or not allowed():
                return None
            self._capture = Capture()
            return self._capture

    def charge(self, save: Charged) -> None:
        """Count what the training thread waits for the copy under way as blocked by `save`."""
        self._charged = save

    def wait(self) -> None:
        """Until no copy is under way, or until the deadline makes it void."""
        capture = self._capture
        if capture is None:
            return
        if not capture.done.is_set():
            start = time.perf_counter()
            if not capture.done.wait(self._deadline):
                capture.void = True
                log.error("the copy of the state was not done after %.0f s: it is void, and the training goes on", self._deadline)
            if self._charged is not None:
                self._charged.blocked_s += time.perf_counter() - start
        if capture.ended is not None and not capture.void:
            torch.accelerator.current_stream().wait_event(capture.ended)
        with self._lock:
            if self._capture is capture:
                self._capture = None

    def _close_for_others(self, enter: Callable[[], None]) -> None:
        """Wait for a copy under way, and let none begin from then on: `enter` says why."""
        while True:
            self.wait()
            with self._lock:
                if self._capture is None:
                    enter()
                    return

    @contextmanager
    def mutating(self) -> Iterator[None]:
        def enter() -> None:
            self._mutating += 1

        if self.before_change is not None and not self._mutating:
            self.before_change()
        self._close_for_others(enter)
        try:
            yield
        finally:
            with self._lock:  # a copy from beside sees both or neither
                self.changes += self._mutating == 1
                self._mutating -= 1

    def resumed(self) -> None:
        """The optimizers' own counters were loaded: count from there."""
        self.steps = dict.fromkeys(self._optimizers, 0)
        self._own_steps = {key: own_counter(o) for key, o in self._optimizers.items()}

    def check_hooks(self) -> None:
        """That no optimizer moved past its hooks; asked before the first overlapping save.

        Raises:
            UsageError: one did (its step is fused into the backward, or called on a copy).
        """
        for key, optimizer in self._optimizers.items():
            before, now = self._own_steps[key], own_counter(optimizer)
            if now is not None and now - (before or 0) > self.steps[key]:
                raise UsageError(
                    f"optimizer {key or type(optimizer).__name__} has made {now - (before or 0)} steps, and its step hooks have "
                    f"seen {self.steps[key]}: it changes parameters outside step(). Use overlap=False with it."
                )

    def _counter(self, key: str) -> Callable[..., None]:
        def after_step(*_: Any) -> None:
            self.steps[key] += 1
            self._stepping = False
            if self.after_step is not None:
                self.after_step()
            if self.first_steps_made is not None and all(self.steps.values()):
                call = self.first_steps_made
                self.first_steps_made = None
                call()

        after_step._torchdynamo_disable = True  # type: ignore[attr-defined]
        return after_step

    def _before(self, key: str) -> Callable[..., None]:
        def enter() -> None:
            self._stepping = True

        def before_step(*_: Any) -> None:
            self._stepping = False  # a step that raised never came to its post-hook
            if self.before_step is not None:
                self.before_step(key)
            self._close_for_others(enter)

        # A hook that waits cannot be traced; the attribute is what torch.compiler.disable sets, without importing dynamo.
        before_step._torchdynamo_disable = True  # type: ignore[attr-defined]
        return before_step


def own_counter(optimizer: torch.optim.Optimizer) -> int | None:
    """How many steps the optimizer says it has made; None when it does not count, or has not begun."""
    for state in optimizer.state.values():
        if isinstance(state, dict) and "step" in state:
            return int(state["step"])
    counters = [g[k] for g in optimizer.param_groups for k in ("step", "k") if isinstance(g.get(k), int)]
    return max(counters) if counters else None
