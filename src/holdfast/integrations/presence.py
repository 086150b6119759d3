"""Where the ranks of a script are: in a barrier, in a training forward, in a forward that only some of them make.

A rank that is about to run a sharded model outside its training steps asks whether the others come there, too, before the first
collective. Every rank counts its training forwards as it enters them, and since the last one its barriers and its new rounds through a
loader; ranks of one program count alike. So another rank that has counted further has passed by, one that has ended will not come,
and one that asks at the same counts is there. One that has counted less is still on its way, and is waited for.

The answers travel through the store, by a thread that looks twenty times a second and publishes this rank's counts only while
somebody asks. The first that knows decides for all (compare-and-set), so that no rank goes on alone.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

import torch.distributed as dist

from holdfast.engine.deadlines import poll_of
from holdfast.engine.store import Store

logger = logging.getLogger("holdfast")

IDLE = 0.05
"""Seconds between two looks for questions."""

PATIENCE = 60.0
"""Seconds that a rank which is still on its way is waited for, before a forward counts as one rank's alone."""

SILENCE = 120.0
"""Seconds without a heartbeat after which a rank is not waited for in a barrier any more."""

LISTENS = 8
"""Times in `SILENCE` that a rank which waits in a barrier asks for the heartbeats of those that are missing, by name."""

Counts = tuple[int, int]
"""Training forwards entered, and since then barriers and rounds through loaders."""

Place = tuple[int, int, int]
"""Counts, and which call since they changed; 0 for a forward."""


class Presence:
    """One rank's counts, and the thread that tells them. `store` is a connection of its own for each of two threads."""

    def __init__(self, ask_store: Store, tell_store: Store, rank: int, world_size: int) -> None:
        self._ask, self._tell = ask_store, tell_store
        self.rank, self.world_size = rank, world_size
        self._forwards = self._marks = self._barriers = self._calls = 0
        self._arrived: Place | None = None
        self._ended = False
        self._decided: dict[Counts, bool] = {}
        self._all_there = False
        self._ask.publish(f"script/where/{rank}", self._here())
        self._ask.add("script/present", 1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="holdfast-presence", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counts:
        return self._forwards, self._marks

    def forward(self) -> None:
        """A training forward begins."""
        self._forwards += 1
        self._marks = self._calls = 0

    def mark(self) -> None:
        """Something else begins that all ranks do, between two training forwards."""
        self._marks += 1
        self._calls = 0

    def end(self) -> None:
        """This rank makes no further forward."""
        self._ended = True

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def together(self) -> bool:
        """Whether all ranks come to the forward that this one is about to make; the answer holds until the counts change."""
        counts = self.counts
        if self.world_size == 1:
            return True
        if counts not in self._decided:
            self._decided[counts] = self._find_out((*counts, 0))
        return self._decided[counts]

    def all_call(self) -> bool:
        """Whether all ranks make the call that this one is about to make; asked anew for each."""
        if self.world_size == 1:
            return True
        self._calls += 1
        return self._find_out((*self.counts, self._calls))

    def _find_out(self, place: Place) -> bool:
        self._arrived = place
        key = f"script/together/{'/'.join(map(str, place))}"
        end = time.monotonic() + PATIENCE
        self._ask.add("script/questions", 1)
        try:
            while True:
                decided = self._ask.look(key)
                if decided is not None:
                    return decided == b"1"
                others = self._others()
                alone = time.monotonic() > end or any(_gone(place[:2], other) for other in others or ())
                if alone or (others is not None and all(other["arrived"] == list(place) for other in others)):
                    return self._ask.claim(key, b"0" if alone else b"1") == b"1"
                time.sleep(poll_of(self.rank, self.world_size))
        finally:
            self._ask.add("script/questions", -1)

    def _others(self) -> list[dict[str, Any]] | None:
        """What the others last told, in few requests; None until all of them have."""
        self._all_there = self._all_there or self._ask.add("script/present", 0) == self.world_size
        if not self._all_there:
            return None
        return list(map(json.loads, self._ask.gather([f"script/where/{r}" for r in range(self.world_size) if r != self.rank])))

    def _here(self) -> bytes:
        return json.dumps({"counts": self.counts, "arrived": self._arrived, "ended": self._ended}).encode()

    def barrier(self) -> None:
        """Until all ranks have come to as many barriers; a rank whose heart has stopped is not waited for. `mark` it before."""
        self._barriers += 1
        here = f"script/barrier/{self._barriers}"
        self._ask.publish(f"{here}/{self.rank}", b"1")
        self._ask.add(here, 1)  # one number tells thousands of ranks that all have come
        poll, beats = poll_of(self.rank, self.world_size), dict[int, bytes | None]()
        end = listen = time.monotonic()
        while self._ask.add(here, 0) < self.world_size:
            if time.monotonic() >= listen:
                heard = {r: self._ask.look(f"beat/{r}") for r in self._missing(here)}
                if any(beat != beats.get(r, b"") for r, beat in heard.items()):
                    end = time.monotonic() + SILENCE
                beats, listen = heard, time.monotonic() + SILENCE / LISTENS
            if time.monotonic() > end:
                break
            time.sleep(poll)
        if self._barriers > 2:  # all have passed the barrier before the last one, or nobody would be here
            past = f"script/barrier/{self._barriers - 2}"
            self._ask.delete(f"{past}/{self.rank}")
            if self.rank == 0:
                self._ask.delete(past)

    def _missing(self, here: str) -> list[int]:
        return [r for r in range(self.world_size) if r != self.rank and self._ask.look(f"{here}/{r}") is None]

    def _serve(self) -> None:
        told: bytes | None = None
        while not self._stop.wait(IDLE):
            try:
                if self._tell.add("script/questions", 0) > 0:
                    now = self._here()
                    if now != told:
                        self._tell.publish(f"script/where/{self.rank}", now)
                        told = now
            except dist.DistNetworkError:  # the store went with its host, and torch would write its stack at each look
                logger.debug("rank %d: the store is gone", self.rank)
                return
            except RuntimeError as error:
                logger.debug("rank %d: the store does not answer: %s", self.rank, error)


def _gone(counts: Counts, other: dict[str, Any]) -> bool:
    """Whether a rank that says so of itself will not come to a forward at `counts`."""
    return bool(other["ended"]) or tuple(other["counts"]) > counts
