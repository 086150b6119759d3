"""Every wait of the engine, in one place, in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long the engine waits before it says who is missing.

    The defaults stay under half of the process group's usual ten minutes, so that a message comes before a watchdog. Raise
    `commit` for disks that take longer than that to write one rank's state.
    """

    handshake: float = 240.0
    """All ranks have made their Checkpointer, counted from the first."""

    agreement: float = 240.0
    """All ranks have looked at the checkpoint that rank 0 proposes."""

    load: float = 3600.0
    """All ranks have read their parts of it: bounded by the slowest disk, not by a collective's watchdog."""

    capture: float = 240.0
    """A rank's state has been copied to staging; past it the gate opens and the capture is void."""

    commit: float = 280.0
    """From one rank's durable file to the manifest: the slowest rank's write."""

    goodbye: float = 60.0
    """The rank that hosts the store waits for the others to leave."""

    store: float = 20.0
    """One request to the store."""


POLL = 0.02
"""Between two looks into the store. Only waiting threads poll, and only the service thread while a save is under way."""

CROWD = 64
"""So many ranks may look as often as `POLL` says without keeping the store busy: one thread serves them all."""


def poll_of(rank: int, world_size: int) -> float:
    """Seconds between two looks of a rank that waits for the others or, as all but rank 0 do at the same time, for rank 0.

    More ranks look more rarely, so that together they ask as much as `CROWD` would and rank 0 is served without delay.
    """
    return POLL if rank == 0 else POLL * max(1.0, world_size / CROWD)


def pauses(longest: float = POLL) -> Iterator[float]:
    """Between the looks of one wait, in seconds: short at first, since who comes last is usually not far behind, then `longest`."""
    pause = longest / 16
    while True:
        yield pause
        pause = min(longest, 1.5 * pause)
