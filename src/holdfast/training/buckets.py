"""Aspect ratio buckets: images are trained in the shape nearest to their own, a batch in one shape.

An epoch is a permutation of the samples, drawn from seed and epoch. Walking it, each sample joins the open batch of its bucket,
and a full batch is given out; what is left at the end comes as smaller batches. So an epoch has every sample once, as without
buckets, and is a list of batches that every rank can compute: batch b of the run is rank b mod ranks'. Its place in that list
is all that a checkpoint needs, and any number of ranks can go on from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.engine import rng
from holdfast.errors import UsageError

Size = tuple[int, int]

# Ratios of height to width, as in the usual lists of shapes for 1024 x 1024.
_RATIOS = (1.0, 1.78, 1 / 1.78, 1.33, 1 / 1.33, 1.5, 1 / 1.5)


def parse_buckets(text: str) -> list[Size]:
    """`1024,1024;768,1360` as (height, width) pairs."""
    sides = [[int(number) for number in part.split(",")] for part in text.split(";")]
    return [(height, width) for height, width in sides]


def usual_buckets(resolution: int, multiple: int) -> list[Size]:
    """Shapes of about the area of a square of `resolution`, with sides that are multiples of `multiple`."""
    sizes = []
    for ratio in _RATIOS:
        height = max(1, round(resolution * ratio**0.5 / multiple)) * multiple
        width = max(1, round(resolution / ratio**0.5 / multiple)) * multiple
        sizes.append((height, width))
    return list(dict.fromkeys(sizes))


def nearest_bucket(height: int, width: int, buckets: Sequence[Size]) -> Size:
    """The bucket whose ratio is nearest to the image's, the first of several."""
    return min(buckets, key=lambda size: abs(math.log(size[0] / size[1]) - math.log(height / width)))


class _Batches(Sampler[list[Any]]):
    """The batches of one rank from the loader's position to the end of its epoch."""

    def __init__(self, sizes: Sequence[Size], batch_size: int, seed: int, rank: int, ranks: int) -> None:
        self.sizes, self.batch_size, self.seed = list(sizes), batch_size, seed
        self.rank, self.ranks = rank, ranks
        self.position = 0  # batches of the run that were handed out, on all ranks together
        self._epochs: dict[int, list[list[int]]] = {}
        self._starts = [0]  # the run's number of each epoch's first batch

    def epoch_of(self, batch: int) -> int:
        while self._starts[-1] <= batch:
            self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1)))
        return next(epoch for epoch in range(len(self._starts) - 1) if batch < self._starts[epoch + 1])

    def epoch(self, number: int) -> list[list[int]]:
        if number not in self._epochs:
            self._epochs = {n: found for n, found in self._epochs.items() if n >= number - 1}
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number) % (1 << 63))
            open_batches: dict[Size, list[int]] = {}
            batches = []
            for sample in torch.randperm(len(self.sizes), generator=generator).tolist():
                batch = open_batches.setdefault(self.sizes[sample], [])
                batch.append(sample)
                if len(batch) == self.batch_size:
                    batches.append(open_batches.pop(self.sizes[sample]))
            self._epochs[number] = [*batches, *open_batches.values()]
        return self._epochs[number]

    def batch(self, number: int) -> list[int]:
        epoch = self.epoch_of(number)
        return self.epoch(epoch)[number - self._starts[epoch]]

    def __len__(self) -> int:
        """Batches that this rank gets until the current epoch's have all been given out."""
        epoch = self.epoch_of(self.position)
        return -(-(self._starts[epoch + 1] - self.position) // self.ranks)

    def __iter__(self) -> Iterator[list[Any]]:
        start = self.position
        for _ in range(len(self)):
            number = start + self.rank
            yield [(number * self.batch_size + place, sample) for place, sample in enumerate(self.batch(number))]
            start += self.ranks


class _Seeded(Dataset[Any]):
    """A dataset whose samples are asked for by (place in the run, index); workers are seeded by the place."""

    def __init__(self, dataset: Any, seed: int, in_workers: bool) -> None:
        self.dataset, self.seed, self.in_workers = dataset, seed, in_workers

    def __getitem__(self, key: tuple[int, int]) -> Any:
        place, index = key
        if self.in_workers:
            rng.reseed((self.seed * 1_000_003 + place) % (1 << 63))
        return self.dataset[index]


class BucketLoader(DataLoader[Any]):
    """Like `holdfast.DataLoader`, with batches of samples of one size; `sizes` gives each sample's (height, width)."""

    draws_nothing = True
    any_world_size = True

    def __init__(
        self,
        dataset: Any,
        sizes: Sequence[Size],
        batch_size: int,
        *,
        seed: int,
        rank: int,
        world_size: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        batches = _Batches(sizes, batch_size, seed, rank, world_size)
        # A generator of its own: torch would draw the workers' seed from the global one at every iter().
        super().__init__(
            _Seeded(dataset, seed, num_workers > 0),
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=collate_fn,
            generator=torch.Generator().manual_seed(seed),
        )
        self._batches = batches

    @property
    def epoch(self) -> int:
        return self._batches.epoch_of(self._batches.position)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self._batches.position += self._batches.ranks
            yield batch

    def state_dict(self) -> dict[str, Any]:
        b = self._batches
        sizes = [list(size) for size in sorted(set(b.sizes))]
        return {"batches_seen": b.position, "dataset_size": len(b.sizes), "seed": b.seed, "batch_size": b.batch_size, "sizes": sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` stood, on any number of ranks.

        Raises:
            UsageError: the batches would be others (dataset size, seed, batch size or buckets differ).
        """
        mine = self.state_dict()
        for key in ("dataset_size", "seed", "batch_size", "sizes"):
            if state[key] != mine[key]:
                raise UsageError(
                    f"the data loader's {key} is {mine[key]}, it was {state[key]} when the checkpoint was saved: with buckets the "
                    "batches would be other ones; restore it, or start a new run"
                )
        self._batches.position = int(state["batches_seen"])
