"""One order of samples for the whole job, and generators that a resume puts back at the right moment."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

import holdfast
from holdfast.engine.firstbatch import before_first_batch
from holdfast.errors import UsageError


class Items(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Items):
    """Samples that draw from every generator, as random flips and crops do."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, float(torch.rand(())), random.random(), float(np.random.rand())])


def taken(loaders: list[holdfast.DataLoader], batches: int) -> list[int]:
    iterators = [iter(()) for _ in loaders]
    samples: list[int] = []
    for _ in range(batches):
        for i, loader in enumerate(loaders):
            batch = next(iterators[i], None)
            if batch is None:
                iterators[i] = iter(loader)
                batch = next(iterators[i])
            samples += batch.tolist()
    return samples


@settings(max_examples=60)
@given(st.integers(1, 20), st.integers(0, 5), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4))
def test_any_change_of_ranks_and_batch_size_loses_and_repeats_nothing(
    size: int, seed: int, parts: list[tuple[int, int, int]]
) -> None:
    """The whole stream is permutation after permutation, however it is cut."""
    samples: list[int] = []
    state: dict[str, Any] | None = None
    for world_size, batch_size, batches in parts:
        loaders = [
            holdfast.DataLoader(Items(size), batch_size, seed=seed, rank=r, world_size=world_size) for r in range(world_size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        samples += taken(loaders, batches)
        state = loaders[0].state_dict()
        assert state["samples_seen"] == len(samples)
    for start in range(0, len(samples), size):
        epoch = samples[start : start + size]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < size or Counter(epoch) == Counter(range(size))


def test_epochs_end_where_their_samples_do() -> None:
    loader = holdfast.DataLoader(Items(5), 2, shuffle=False, rank=0, world_size=1)
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert epochs == [[[0, 1], [2, 3], [4, 0]], [[1, 2], [3, 4]]]
    assert (loader.epoch, loader.samples_seen, len(loader)) == (2, 10, 3)


def test_the_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    list(holdfast.DataLoader(Items(5), 2, rank=0, world_size=1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("change", [{"seed": 2}, {"shuffle": False}, {"size": 6}])
def test_another_order_is_refused(change: dict[str, Any]) -> None:
    options = {"size": 5, "seed": 1, "shuffle": True}
    state = holdfast.DataLoader(Items(options.pop("size")), rank=0, world_size=1, **options).state_dict()  # type: ignore[arg-type]
    options = {"size": 5, "seed": 1, "shuffle": True, **change}
    loader = holdfast.DataLoader(Items(options.pop("size")), rank=0, world_size=1, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="when the checkpoint was saved: the order of the samples would be another one"):
        loader.load_state_dict(state)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="the dataset is empty"):
        holdfast.DataLoader(Items(0), rank=0, world_size=1)


def run(folder: Path, stop: int, workers: int, validate: bool) -> list[float]:
    """Trains with augmented samples and noise; validation, if any, has a loader of its own after every second step."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loaders = {"train": holdfast.DataLoader(Augmented(7), 2, num_workers=workers, seed=1, rank=0, world_size=1)}
    if validate:
        loaders["val"] = holdfast.DataLoader(Augmented(4), 2, shuffle=False, seed=2, rank=0, world_size=1)
    losses = []
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer, dataloader=loaders) as checkpointer:
        step = checkpointer.resume()
        while step < stop:
            for batch in loaders["train"]:
                loss = model(batch + torch.randn(4)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                losses.append(loss.item())
                if step == 3:
                    checkpointer.save(step)
                if validate and step % 2 == 0:
                    losses += [float((model(b) * torch.rand(())).detach().mean()) for b in loaders["val"]]
                if step == stop:
                    break
    return losses


@pytest.mark.parametrize(("workers", "validate"), [(0, False), (2, False), (0, True)])
def test_samples_that_draw_numbers_draw_the_same_ones(tmp_path: Path, workers: int, validate: bool) -> None:
    whole = run(tmp_path / "whole", 8, workers, validate)
    first = run(tmp_path / "cut", 3, workers, validate)
    second = run(tmp_path / "cut", 8, workers, validate)
    assert first + second == whole


def test_a_loader_that_reads_ahead_gets_its_generators_back_after_its_first_batch() -> None:
    class Lazy:
        def __iter__(self) -> Any:
            yield torch.rand(())
            yield torch.rand(())

    torch.manual_seed(0)
    expected = torch.rand(3)[1:]
    loader = Lazy()
    torch.manual_seed(0)
    torch.rand(())
    state = torch.get_rng_state()
    before_first_batch(loader, lambda: torch.set_rng_state(state))
    torch.manual_seed(99)
    iterator = iter(loader)
    next(iterator)
    assert torch.equal(torch.rand(()), expected[0])
    assert torch.equal(next(iterator), expected[1])
    assert type(loader) is Lazy


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=20),
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4),
)
def test_buckets_have_each_sample_once_an_epoch_however_the_run_is_cut(
    buckets: list[str], seed: int, parts: list[tuple[int, int, int]]
) -> None:
    """Parts are (ranks, batch size, batches): every rank gets as many batches, of one bucket each, none larger than the batch size."""
    size, samples, state = len(buckets), [], None
    for world_size, batch_size, steps in parts:
        loaders = [
            holdfast.DataLoader(Items(size), batch_size, seed=seed, rank=r, world_size=world_size, buckets=buckets)
            for r in range(world_size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [endless(loader) for loader in loaders]
        for _ in range(steps):
            for iterator in iterators:
                batch = next(iterator).tolist()
                assert 1 <= len(batch) <= batch_size
                assert len({buckets[sample] for sample in batch}) == 1
                samples += batch
        assert len({str(loader.state_dict()) for loader in loaders}) == 1
        state = loaders[0].state_dict()
        assert loaders[0].samples_seen == len(samples)
    for start in range(0, len(samples), size):
        epoch = samples[start : start + size]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < size or Counter(epoch) == Counter(range(size))


def endless(loader: holdfast.DataLoader) -> Any:
    while True:
        yield from loader


def test_batches_in_buckets_come_in_one_order_whatever_the_number_of_ranks_is() -> None:
    buckets = [index % 3 for index in range(23)]

    def batches(world_size: int) -> list[list[int]]:
        loaders = [endless(holdfast.DataLoader(Items(23), 4, seed=3, rank=r, world_size=world_size, buckets=buckets)) for r in range(world_size)]
        return [next(loader).tolist() for _ in range(12 // world_size) for loader in loaders]

    assert batches(1) == batches(2) == batches(3)
    loader = holdfast.DataLoader(Items(23), 4, seed=3, rank=0, world_size=2, buckets=buckets)
    assert (loader.batches(1), loader.batches(2)) == (3, 6)  # each epoch has 2 batches of each bucket
    assert sum(len(list(loader)) for _ in range(2)) == 6
    assert loader.epoch == 2


def test_a_run_goes_on_in_buckets_and_without_only_where_no_sample_is_lost() -> None:
    plain = holdfast.DataLoader(Items(5), 2, rank=0, world_size=1)
    first = next(iter(plain)).tolist()
    bucketed = holdfast.DataLoader(Items(5), 2, rank=0, world_size=1, buckets=[0, 1, 0, 1, 0])
    bucketed.load_state_dict(plain.state_dict())
    assert sorted(first + [sample for batch in bucketed for sample in batch.tolist()]) == list(range(5))
    plain.load_state_dict(bucketed.state_dict())
    assert plain.epoch == 1
    fresh = holdfast.DataLoader(Items(4), 2, shuffle=False, rank=0, world_size=1, buckets=[0, 1, 0, 1])
    next(iter(fresh))
    with pytest.raises(UsageError, match="in the middle of an epoch with buckets"):
        holdfast.DataLoader(Items(4), 2, shuffle=False, rank=0, world_size=1).load_state_dict(fresh.state_dict())


def test_workers_read_ahead_in_buckets_and_the_position_is_the_loops() -> None:
    buckets = [0, 1, 1, 0, 1, 0, 0]
    plain = holdfast.DataLoader(Items(7), 2, seed=1, rank=0, world_size=1, buckets=buckets)
    ahead = holdfast.DataLoader(Items(7), 2, seed=1, num_workers=2, rank=0, world_size=1, buckets=buckets)
    for expected, batch in zip(plain, ahead, strict=True):
        assert batch.tolist() == expected.tolist()
        assert ahead.state_dict() == plain.state_dict()
