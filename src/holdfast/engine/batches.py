"""Which samples come next: the one order of a job's samples, cut into batches that any number of ranks can go on with.

There is one stream of samples for the whole job: the permutation of epoch 0, then that of epoch 1, and so on. A sample's place in
it is `epoch * size + place in the epoch`.

`GlobalBatches` cuts the stream as it is. `BucketBatches` makes batches of samples of one bucket each: it walks the stream, every
sample joins the open batch of its bucket, and a full batch is given out; at the end of an epoch what is open comes as smaller
batches, so that every epoch has each of its samples once. The batches come in one order, whatever the number of ranks is, and
each step takes the next `world_size` of them. Its state is how many samples were given out, and which had been walked over and
were still waiting, fewer than a batch for each bucket: all that is needed to go on, with another batch size or other buckets, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from holdfast.errors import UsageError


class GlobalBatches(Sampler[list[Any]]):
    """The batches of one rank, from the position to the end of its epoch. `position` counts samples, on all ranks together.

    With `places` samples are given as (place, index), else as index.
    """

    def __init__(
        self, size: int, batch_size: int, shuffle: bool, seed: int, rank: int, world_size: int, places: bool
    ) -> None:
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        self.places = places
        self.rank, self.world_size = rank, world_size
        self.position = 0
        self._cached: tuple[int, list[int]] | None = None

    @property
    def stride(self) -> int:
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """Batches until the current epoch's samples have all been given out."""
        return -(-(self.size - self.position % self.size) // self.stride)

    def count(self, epochs: int) -> int:
        """Batches of each rank for so many epochs from the very beginning."""
        return -(-self.size * epochs // self.stride)

    def __iter__(self) -> Iterator[list[Any]]:
        start = self.position
        for _ in range(len(self)):
            mine = start + self.rank * self.batch_size
            yield self._asked(range(mine, mine + self.batch_size))
            start += self.stride

    def advance(self) -> None:
        """The loop has got the next batch."""
        self.position += self.stride

    def state(self) -> dict[str, Any]:
        return {"samples_seen": self.position}

    def load(self, state: dict[str, Any]) -> None:
        if state.get("pending"):
            raise UsageError(
                "the checkpoint was saved in the middle of an epoch with buckets, some of whose samples are still to come; "
                "go on with buckets, or start a new run"
            )
        self.position = int(state["samples_seen"])

    def _asked(self, places: Sequence[int]) -> list[Any]:
        return [(place, self._sample(place)) for place in places] if self.places else [self._sample(place) for place in places]

    def _sample(self, place: int) -> int:
        epoch, within = divmod(place, self.size)
        return self._order(epoch)[within]

    def _order(self, epoch: int) -> list[int]:
        if self._cached is None or self._cached[0] != epoch:
            if self.shuffle:
                generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
                order = torch.randperm(self.size, generator=generator).tolist()
            else:
                order = list(range(self.size))
            self._cached = (epoch, order)
        return self._cached[1]


class BucketBatches(GlobalBatches):
    """The same, a batch in one bucket; `buckets` gives each sample's."""

    def __init__(self, buckets: Sequence[Any], *args: Any) -> None:
        super().__init__(*args)
        self.buckets = list(buckets)
        self._pending: list[int] = []
        self._ahead: deque[tuple[int, list[int]]] = deque()

    def __len__(self) -> int:
        epoch, drawn = divmod(self.position + len(self._pending), self.size)
        if self._pending and drawn == 0:  # all of the epoch has been walked over
            left: list[int] = []
        else:
            left = self._order(epoch)[drawn:]
        counts = Counter(self.buckets[sample] for sample in [*left, *map(self._sample, self._pending)])
        return -(-self._full(counts) // self.world_size)

    def count(self, epochs: int) -> int:
        return -(-self._full(Counter(self.buckets)) * epochs // self.world_size)

    def _full(self, counts: Counter[Any]) -> int:
        return sum(-(-number // self.batch_size) for number in counts.values())

    def __iter__(self) -> Iterator[list[Any]]:
        self._ahead.clear()
        walk = _Walk(self, self.position, self._pending)
        for _ in range(len(self)):
            batches = [walk.next_batch() for _ in range(self.world_size)]
            self._ahead.append((walk.given, walk.waiting()))
            yield self._asked(batches[self.rank])

    def advance(self) -> None:
        self.position, self._pending = self._ahead.popleft()

    def state(self) -> dict[str, Any]:
        return {"samples_seen": self.position, "pending": list(self._pending)}

    def load(self, state: dict[str, Any]) -> None:
        self.position, self._pending = int(state["samples_seen"]), [int(place) for place in state.get("pending", [])]

    def bucket(self, place: int) -> Any:
        return self.buckets[self._sample(place)]


class _Walk:
    """Goes along the stream from where `given` samples were given out and the places `pending` were waiting."""

    def __init__(self, batches: BucketBatches, given: int, pending: Sequence[int]) -> None:
        self._batches, self.given = batches, given
        self._next = given + len(pending)
        self._open: dict[Any, list[int]] = {}
        for place in pending:
            self._open.setdefault(batches.bucket(place), []).append(place)

    def waiting(self) -> list[int]:
        return sorted(place for places in self._open.values() for place in places)

    def next_batch(self) -> list[int]:
        size = self._batches.batch_size
        while True:
            full = [places for places in self._open.values() if len(places) >= size]
            if full:
                return self._give(min(full, key=min)[:size])
            if self._open and self._next % self._batches.size == 0:  # the epoch ends: nothing of it may stay open
                return self._give(min(self._open.values(), key=min))
            self._open.setdefault(self._batches.bucket(self._next), []).append(self._next)
            self._next += 1

    def _give(self, places: list[int]) -> list[int]:
        bucket = self._batches.bucket(places[0])
        left = self._open.pop(bucket)[len(places) :]
        if left:
            self._open[bucket] = left
        self.given += len(places)
        return list(places)
