"""Work that ranks share out among themselves, piece by piece: images to look at, images and captions to encode.

A rank takes the next pieces from a counter in the process group's store, many while there is much left and single ones towards
the end, so that a slow rank gets fewer. Nobody waits in a collective meanwhile, whose time limit is made for training steps:
who has finished looks into the store for the others' words, and gives up on a rank only when it has made no progress for a
whole deadline. An error of one rank becomes an error of all of them within a second.

What is made goes into a folder. Ranks that do not see the folder of rank 0 (each node's own disk) are a crew of their own for
each host, and every crew makes all of it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from holdfast.engine.store import SharedStore
from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.training.once import POLL_S, encoded, let_others_hear, meet

PIECE_DEADLINE_S = 1800.0
"""For one piece: a rank that reports nothing for so long is given up on. Opening a large encoder is part of the first piece."""
_BEAT_S = 1.0
_FIRST_POLL_S = 0.005  # who comes last is usually not far behind
_LOOK_S = 10.0  # between two looks at each of the others: there may be a thousand
_LOOKS = 10  # a network folder may show a new file a moment late


@dataclass
class Crew:
    """The ranks that fill one folder together: `crews` are all ranks, crew by crew, `rank` is this one."""

    rank: int = 0
    crews: list[list[int]] = field(default_factory=lambda: [[0]])
    hosts: list[str] = field(default_factory=list)
    store: SharedStore | None = None
    piece_deadline_s: float = PIECE_DEADLINE_S
    _shares: int = 0
    _beaten: float = 0.0
    _told: bool = False  # an error of another rank has come here

    @property
    def mine(self) -> list[int]:
        return next(crew for crew in self.crews if self.rank in crew)

    @property
    def leads(self) -> bool:
        """Whether this rank does what one rank of each crew has to do."""
        return self.rank == self.mine[0]

    @contextmanager
    def share(self, count: int, what: str) -> Iterator[Iterator[int]]:
        """Gives the numbers, out of those below `count`, that this rank is to do; leaves when all ranks have done theirs.

        Raises, on every rank: the error that ended one of them, as UsageError if it was one, else as HoldfastError;
        DeadlineExceeded where a rank makes no progress. `what` says in its message what was done.
        """
        with self._together(what) as prefix:
            yield self._claims(count, f"{prefix}/{self.mine[0]}")

    @contextmanager
    def in_step(self, count: int, what: str) -> Iterator[Iterator[tuple[int, bool]]]:
        """As `share`, for work in which all ranks take part at the same time (an encoder that is sharded over them).

        Gives (number, wanted), the same count of them on every rank; what is not wanted only keeps the ranks together.
        """
        place, size = self.mine.index(self.rank), len(self.mine)
        # Crews of different sizes need different numbers of turns; all take part in the most.
        turns = max(-(-count // len(crew)) for crew in self.crews)

        def numbers() -> Iterator[tuple[int, bool]]:
            for turn in range(turns):
                number = turn * size + place
                self._beat(f"{prefix}/beat/{self.rank}")
                yield min(number, count - 1), number < count

        with self._together(what) as prefix:
            yield numbers()

    def tell_all(self, find: Callable[[], Any]) -> list[Any]:
        """What each rank finds, by rank; every rank calls this, and none waits in a collective. Errors are told as in `share`."""
        if self.store is None:
            return [find()]
        with self._together("the exchange of results") as prefix:
            self.store.publish(f"{prefix}/told/{self.rank}", json.dumps(find()).encode())
        return [json.loads(self.store.look(f"{prefix}/told/{rank}") or b"null") for rank in range(len(self.hosts))]

    def tell(self, find: Callable[[], Any]) -> list[Any]:
        """What each rank of this crew finds, in the order of the ranks."""
        told = self.tell_all(find)
        return [told[rank] for rank in self.mine]

    def _claims(self, count: int, key: str) -> Iterator[int]:
        if self.store is None:
            yield from range(count)
            return
        while True:
            left = count - self.store.add(key, 0)
            taken = max(1, left // (4 * len(self.mine)))
            stop = self.store.add(key, taken)
            if stop - taken >= count:
                return
            for number in range(stop - taken, min(stop, count)):
                self._beat(f"{key.rpartition('/')[0]}/beat/{self.rank}")
                yield number

    def _beat(self, key: str) -> None:
        if self.store is not None and time.monotonic() - self._beaten > _BEAT_S:
            self._beaten = time.monotonic()
            self.store.add(key, 1)
            self._raise_of_others(key.partition("/beat/")[0])

    @contextmanager
    def _together(self, what: str) -> Iterator[str]:
        """Around this rank's part: its end and its error are told, and the others' waited for."""
        self._shares += 1
        prefix = str(self._shares)
        if self.store is None:
            yield prefix
            return
        try:
            try:
                yield prefix
            except dist.DistNetworkError:
                raise
            except Exception as error:
                if not self._told:
                    self._tell_error(prefix, error)
                raise
            self.store.publish(f"{prefix}/done/{self.rank}", b"1")
            self.store.add(f"{prefix}/done", 1)
            self._await(prefix, what)
        except dist.DistNetworkError as error:
            raise HoldfastError(
                f"Rank {self.rank} lost the others in {what}: rank 0 on {self.hosts[0]}, or the launcher, has ended. Look at its log."
            ) from error

    def _tell_error(self, prefix: str, error: Exception) -> None:
        assert self.store is not None
        usage = isinstance(error, UsageError)
        word = {"problem": str(error.args[0]) if usage else repr(error), "usage": usage, "rank": self.rank}
        self.store.claim(f"{prefix}/error", encoded(word))
        let_others_hear(self.store)

    def _await(self, prefix: str, what: str) -> None:
        assert self.store is not None
        everybody = sorted(rank for crew in self.crews for rank in crew)
        beats: dict[int, tuple[int, float]] = {}
        looked = -_LOOK_S
        pause = _FIRST_POLL_S
        while True:
            self._raise_of_others(prefix)
            if self.store.add(f"{prefix}/done", 0) >= len(everybody):
                return
            if time.monotonic() - looked > min(_LOOK_S, self.piece_deadline_s / 4):
                looked = time.monotonic()
                for rank in everybody:
                    beat = self.store.add(f"{prefix}/beat/{rank}", 0)
                    seen, since = beats.get(rank, (-1, looked))
                    beats[rank] = (beat, looked if beat != seen else since)
                    if looked - beats[rank][1] > self.piece_deadline_s and self.store.look(f"{prefix}/done/{rank}") is None:
                        raise DeadlineExceeded(
                            f"No word for {self.piece_deadline_s:.0f} s from rank {rank} on {self.hosts[rank]} in {what}, which "
                            "the other ranks wait for. Look at its log."
                        )
            time.sleep(pause)
            pause = min(POLL_S, 1.5 * pause)

    def _raise_of_others(self, prefix: str) -> None:
        assert self.store is not None
        found = self.store.look(f"{prefix}/error")
        if found is None:
            return
        word = json.loads(found)
        self._told = True
        self.store.add("heard", 1)
        raised = UsageError if word["usage"] else HoldfastError
        raise raised(f"{word['problem']}\n(rank {word['rank']} on {self.hosts[word['rank']]})")


def crew_for(folder: Path, piece_deadline_s: float = PIECE_DEADLINE_S) -> Crew:
    """Meet the other ranks, and find out who sees the same `folder`, which is made. Every rank calls this at about the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Crew(piece_deadline_s=piece_deadline_s)
    store, token, hosts = meet(socket.gethostname())
    crew = Crew(dist.get_rank(), [list(range(len(hosts)))], hosts, store, piece_deadline_s)
    mark = folder / f".here-{token}"
    if crew.rank == 0:
        mark.touch()
    crew.tell(lambda: None)  # the mark is there
    seen = crew.tell(lambda: crew.rank == 0 or _is_there(mark))
    if crew.rank == 0:
        mark.unlink(missing_ok=True)
    crews = {"": [rank for rank, sees in enumerate(seen) if sees]}
    for rank, sees in enumerate(seen):
        if not sees:
            crews.setdefault(f"host {hosts[rank]}", []).append(rank)
    crew.crews = list(crews.values())
    return crew


def _is_there(path: Path) -> bool:
    for _ in range(_LOOKS):
        if any(entry.name == path.name for entry in path.parent.iterdir()):
            return True
        time.sleep(POLL_S)
    return False
