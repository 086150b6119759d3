"""A DataLoader for map-style datasets whose position any number of ranks can continue.

There is one stream of samples for the whole job: the permutation of epoch 0, then that of epoch 1, and so on. The next
global batch takes the next `world_size * batch_size` samples of it, each rank its part, so that no sample is lost, padded
or seen twice in an epoch, and the position is one number. A batch may hold the end of one epoch and the beginning of the
next. The order depends on `seed` and the epoch only, and nothing is drawn from the global generators. Workers seed theirs
anew for every sample, from `seed` and its place in the stream, so that what a sample draws does not depend on which worker
makes it, or on how often the run was interrupted; without workers samples draw from the rank's own generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from holdfast.engine import rng
from holdfast.engine.batches import BucketBatches, GlobalBatches
from holdfast.errors import UsageError


class _Seeded(Dataset[Any]):
    """A dataset whose samples are asked for by (place in the stream, index), and seeded by the place."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: tuple[int, int]) -> Any:
        place, index = key
        rng.reseed((self.seed * 1_000_003 + place) % (1 << 63))
        return self.dataset[index]


class DataLoader(TorchDataLoader[Any]):
    """torch's DataLoader over one global, resumable order of a map-style dataset.

    Args:
        dataset: has `__len__` and `__getitem__`; one item is one sample.
        batch_size: samples per rank and batch.
        shuffle: a new permutation every epoch, else the dataset's own order.
        seed: of the permutations; the same on all ranks.
        rank, world_size: of the data-parallel group; by default those of the default process group.
        num_workers, collate_fn, pin_memory: as in torch.
        buckets: for each sample what it shares with those that it may be in one batch with (its size, say). Batches of one bucket
            each are as large as `batch_size`, but for the last ones of an epoch, which hold what is left.

    One `for` over the loader gives the rest of the current epoch. `epoch` and `samples_seen` count what has been handed to
    the loop, on all ranks together; batches that workers have read ahead do not count.
    """

    draws_nothing = True
    """Making its iterator leaves the global generators alone."""

    any_world_size = True
    """Its position is that of the whole job, so a checkpoint of any number of ranks fits."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        buckets: Sequence[Any] | None = None,
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        rank = rank if rank is not None else dist.get_rank() if distributed else 0
        world_size = world_size if world_size is not None else dist.get_world_size() if distributed else 1
        if not hasattr(dataset, "__len__"):
            raise UsageError("holdfast.DataLoader needs a map-style dataset (one with __len__); streams keep their own position")
        size = len(dataset)
        if size == 0:
            raise UsageError("the dataset is empty")
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}, should be at least 1")
        if buckets is not None and len(buckets) != size:
            raise UsageError(f"buckets has {len(buckets)} entries for {size} samples")
        how = (size, batch_size, shuffle, seed, rank, world_size, num_workers > 0)
        batches = GlobalBatches(*how) if buckets is None else BucketBatches(buckets, *how)
        # A generator of its own: torch would draw the workers' seed from the global one at every iter().
        super().__init__(
            _Seeded(dataset, seed) if num_workers > 0 else dataset,
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(seed),
        )
        self._batches = batches

    @property
    def epoch(self) -> int:
        return self._batches.position // self._batches.size

    @property
    def samples_seen(self) -> int:
        """Samples handed out since the beginning of the run, on all ranks together."""
        return self._batches.position

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self._batches.advance()
            yield batch

    def batches(self, epochs: int) -> int:
        """How many batches each rank gets in so many epochs, from the beginning of the run."""
        return self._batches.count(epochs)

    def state_dict(self) -> dict[str, Any]:
        b = self._batches
        return {**b.state(), "dataset_size": b.size, "seed": b.seed, "shuffle": b.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` stood, on any number of ranks and with any batch size.

        Raises:
            UsageError: the order was another one (dataset size, seed or shuffle differ).
        """
        mine = self.state_dict()
        for key in ("dataset_size", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise UsageError(
                    f"the data loader's {key} is {mine[key]}, it was {state[key]} when the checkpoint was saved: "
                    "the order of the samples would be another one; restore it, or start a new run"
                )
        self._batches.load(state)
