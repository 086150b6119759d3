"""The watcher thread of a rank: it alone keeps an eye on the store while the training runs.

It looks for requests to save and for the call to stop (a few times a second, and at once when the training thread asks),
publishes the rank's heartbeat, and passes a signal on that the main thread, deep in a collective, cannot see. It has a
connection of its own and never writes files, so that neither a slow disk nor a long capture delays a look.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.core.documents import canonical
from holdfast.engine.deadlines import POLL, Deadlines, pauses, poll_of
from holdfast.engine.store import Store
from holdfast.errors import UsageError

log = logging.getLogger("holdfast")

IDLE = 0.1
"""Seconds between two looks when nobody asks for one."""

BEAT = 2.0
"""Seconds between two heartbeats of up to `MANY` ranks."""

MANY = 2048
"""A heart beats more slowly in a larger job, so that the store hears no more of them together than of so many."""


def beat_of(world_size: int) -> float:
    """Seconds between two heartbeats of a rank."""
    return BEAT * max(1.0, world_size / MANY)


@dataclass(frozen=True, slots=True)
class Request:
    """A wish for a checkpoint: `steps` are the optimizers' counts (by key) at which every rank's state is wanted, `batches`
    how many the caller had taken from its loader; with `stop` the run ends there. It goes to `folder`, and holds nothing but
    the models with `weights_only`."""

    index: int
    step: int
    steps: dict[str, int]
    batches: int
    caller: int
    metric: float | None = None
    stop: bool = False
    folder: str = ""
    weights_only: bool = False
    when_busy: str = ""
    """`wait` or `skip`, where it is not what the Checkpointer does otherwise."""

    occurrence: str = ""
    """Which call for this folder at this boundary, counted by each rank for itself."""

    changes: int = -1
    """How many changes outside `step` (`mutating`) the caller had made: a step that a scaler skips is told by them alone."""


class Watcher:
    """Requests in index order, as this rank has seen them. `on_request` runs on the watcher thread."""

    def __init__(
        self,
        store: Store,
        rank: int,
        deadlines: Deadlines,
        *,
        on_look: Callable[[], None],
        step: Callable[[], int],
        saving: Callable[[], tuple[str, float] | None],
        idle: float = IDLE,
        beat: float = BEAT,
    ) -> None:
        self._store, self._rank, self._deadlines, self._idle, self._beat_s = store, rank, deadlines, idle, beat
        self._on_look, self._step, self._saving = on_look, step, saving
        self._condition = threading.Condition()
        self._wanted = self._done = 0
        self._stopping = False
        self.requests: dict[int, Request] = {}
        self.call_to_stop: dict[str, object] | None = None
        self._phase, self._since = "starting", time.monotonic()
        self._beats = 0
        self._signal_pipe: tuple[int, int] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        """What the process did on these signals before."""

        self._thread = threading.Thread(target=self._watch, name="holdfast-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(self._deadlines.store)
        self._unhook_signals()

    def enter(self, phase: str) -> None:
        """What this rank's training thread is doing, for its heartbeat."""
        self._phase, self._since = phase, time.monotonic()

    def look_now(self) -> bool:
        """Have the store looked at by a look that begins after this call; False when it did not come back in time."""
        with self._condition:
            self._wanted += 1
            mine = self._wanted
            self._condition.notify_all()
            return self._condition.wait_for(lambda: self._done >= mine or self._stopping, self._deadlines.store)

    def post(self, wish: Request) -> Request | None:
        """Ask all ranks for a checkpoint; returns when the store has it. None when another rank asked for the same before.

        What ranks ask for is the same where steps, folder and occurrence are; the index is given here.
        """
        claim = f"claim/{canonical(wish.steps).decode()}/{wish.folder}/{wish.occurrence}"
        if self._store.claim(claim, str(self._rank).encode()) != str(self._rank).encode():
            return None
        request = replace(wish, index=self._store.add("issued", 1))
        self._store.publish(f"request/{request.index}", canonical(asdict(request)))
        return request

    def acknowledge_stop(self) -> None:
        """Tell the others that this rank looks for requests before each of its steps."""
        self._store.add("stopping", 1)

    def hook_signals(self, signals: Sequence[signal.Signals]) -> None:
        """Take these signals: a byte in a pipe is written at once, wherever the main thread is."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("stop_signals need a Checkpointer that is made on the main thread")
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _seen) for number in signals}
        self._signal_pipe = read, write
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forget_wakeup)

    def _unhook_signals(self) -> None:
        if self._signal_pipe is None:
            return
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        for end in self._signal_pipe:
            os.close(end)
        self._signal_pipe = None

    def _watch(self) -> None:
        last_beat = -self._beat_s
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._wanted > self._done or self._stopping, self._idle)
                if self._stopping:
                    return
                answering = self._wanted
            try:
                self._read_signals()
                self._look()
                if time.monotonic() - last_beat >= self._beat_s:
                    self._beat()
                    last_beat = time.monotonic()
            except RuntimeError as error:  # the store: a rank that hosts it may be gone
                log.debug("rank %d: the store does not answer: %s", self._rank, error)
                time.sleep(IDLE)
            with self._condition:
                self._done = answering
                self._condition.notify_all()
            self._on_look()

    def _look(self) -> None:
        issued = self._store.add("issued", 0)
        for index in range(1, issued + 1):
            if index in self.requests:
                continue
            data = self._store.look(f"request/{index}")
            if data is None:
                break  # its caller is still inside save(): no rank can have finished the step after it
            self.requests[index] = Request(**json.loads(data))
        if self.call_to_stop is None and (told := self._store.look("stop")) is not None:
            self.call_to_stop = json.loads(told)

    def _read_signals(self) -> None:
        if self._signal_pipe is None:
            return
        try:
            numbers = os.read(self._signal_pipe[0], 64)
        except BlockingIOError:
            return
        meant = [signal.Signals(number) for number in numbers if number in self._handlers]  # Ctrl-C writes to the pipe as well
        if meant and self.call_to_stop is None:  # schedulers signal every process, launchers repeat: all of it is one call
            told = {"rank": self._rank, "host": socket.gethostname(), "signal": meant[0].name}
            self._store.claim("stop", json.dumps(told).encode())
            log.warning("rank %d received %s: all ranks will save and stop", self._rank, told["signal"])

    def _beat(self) -> None:
        self._beats += 1
        saving = self._saving()
        beat = {
            "beat": self._beats,
            "phase": self._phase,
            "step": self._step(),
            "for_s": round(time.monotonic() - self._since, 1),
            "host": socket.gethostname(),
            "saving": None if saving is None else [saving[0], round(time.monotonic() - saving[1], 1)],
        }
        self._store.publish(f"beat/{self._rank}", json.dumps(beat).encode())


def roll_call(store: Store, ranks: Sequence[int], world_size: int) -> str:
    """What the first few of these ranks last said of themselves, for a message that names them, and whether they are silent now.

    Takes a little longer than a heartbeat, to hear whose heart still beats.
    """
    shown = list(ranks)[:5]
    before = {rank: store.look(f"beat/{rank}") for rank in shown}
    time.sleep(1.25 * beat_of(world_size))
    return "; ".join(last_seen(store, rank, before[rank]) for rank in shown)


def last_seen(store: Store, rank: int, before: bytes | None = None) -> str:
    """What a rank last said of itself; `before` is the beat that it is known for a while by now."""
    data = store.look(f"beat/{rank}")
    if data is None:
        return f"rank {rank} (never heard of)"
    beat = json.loads(data)
    saving = f", with '{beat['saving'][0]}' on its disk for {beat['saving'][1]:.0f} s" if beat["saving"] else ""
    silent = ", silent since: stopped, dead or cut off" if data == before else ""
    return (
        f"rank {rank} ({beat['host']}, last seen at step {beat['step']} in phase '{beat['phase']}' for {beat['for_s']:.0f} s"
        f"{saving}{silent})"
    )


def say_goodbye(store: Store, rank: int, world_size: int, patience: float, waits: bool) -> None:
    """Tell the others that this rank leaves and, if it `waits`, stay until all of them have said so, too.

    Rank 0 alone knows who is missing: it waits for such a rank as long as its heart beats, and `patience` seconds longer. The others
    wait for rank 0's word, in the same way, so that no rank asks for every other. By now everything of this rank's own is durable:
    a store that is gone costs nothing.
    """
    try:
        if waits and rank:
            store.add("waiting", 1)
        store.publish(f"goodbye/{rank}", b"1")
        store.add("goodbyes", 1)
        if not waits:
            return
        if rank:
            _await_the_last(store, rank, world_size, patience)
        else:
            missing = _see_off(store, world_size, patience)
            store.publish("all gone", b"1")
            if missing:
                seen = "; ".join(last_seen(store, r) for r in sorted(missing)[:5])
                log.warning("rank %d leaves although %d others have not said goodbye: %s", rank, len(missing), seen)
            end = time.monotonic() + 2 * poll_of(1, world_size) + 1.0  # the store may go with this process
            while store.add("waiting", 0) > 0 and time.monotonic() < end:
                time.sleep(POLL)
    except RuntimeError as error:
        log.warning("rank %d: the store is gone before all ranks have left: %s", rank, error)


def _see_off(store: Store, world_size: int, patience: float) -> set[int]:
    """On rank 0: until all have said goodbye; returns who has not, by the time that they have been silent for too long."""
    missing = set(range(world_size))
    beats: dict[int, bytes | None] = {}
    end, looked = time.monotonic() + patience, 0.0
    while store.add("goodbyes", 0) < world_size:
        now = time.monotonic()
        if now > end:
            return {r for r in missing if store.look(f"goodbye/{r}") is None}
        if now - looked > min(BEAT, patience / 4):
            looked = now
            missing = {r for r in missing if store.look(f"goodbye/{r}") is None}
            for r in missing:
                if (beat := store.look(f"beat/{r}")) != beats.get(r):
                    beats[r], end = beat, time.monotonic() + patience
        time.sleep(POLL)
    return set()


def _await_the_last(store: Store, rank: int, world_size: int, patience: float) -> None:
    """On another rank: until rank 0 has seen all of them off, or is silent for too long."""
    beat: bytes | None = None
    end, pause = time.monotonic() + patience, pauses(poll_of(rank, world_size))
    while store.look("all gone") is None:
        if (now := store.look("beat/0")) != beat:
            beat, end = now, time.monotonic() + patience
        if time.monotonic() > end:
            log.warning("rank %d leaves although rank 0 has not said goodbye: %s", rank, last_seen(store, 0))
            break
        time.sleep(next(pause))
    store.add("waiting", -1)


def _seen(number: int, frame: object) -> None:
    """The pipe has it already; this only keeps the default action from ending the process."""


def _forget_wakeup() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
