"""A resumed run is the same run: on the same ranks to the bit in everything, on other ranks in weights, optimizer and data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jobs
import pytest
from jobs import SAMPLES, Job, Result, differing

from holdfast.testing.pool import Died

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

TOPOLOGIES = [("none", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 3), ("offload", 2), ("mixed", 2), ("hsdp", 4), ("flat", 4)]


@pytest.mark.parametrize(("optimizer", "overlap"), [("adamw", True), ("prodigy", False)])
@pytest.mark.parametrize(("sharding", "ranks"), TOPOLOGIES)
def test_same_ranks_continue_bit_for_bit(
    pool: RankPool, tmp_path: Path, sharding: str, ranks: int, optimizer: str, overlap: bool
) -> None:
    """Left after step 6 with a checkpoint of step 4: weights, optimizer, data order, RNG and losses are the same."""
    check_same_ranks(pool, tmp_path, sharding, ranks, optimizer, overlap)


@pytest.mark.parametrize(
    ("sharding", "ranks", "optimizer", "overlap"),
    [
        ("fsdp1", 2, "adamw", True),
        ("fsdp1", 3, "prodigy", False),
        ("fsdp1-flat", 3, "adamw", True),
        ("fsdp1-flat", 2, "prodigy", True),
        ("fsdp1-frozen", 2, "prodigy", True),
        ("fsdp1-grad-op", 2, "adamw", True),
        ("fsdp1-mixed", 2, "adamw", True),
        ("fsdp1-hybrid", 4, "prodigy", True),
        ("fsdp1-hybrid-flat", 4, "adamw", False),
        ("fsdp1-whole", 2, "prodigy", False),
        ("fsdp1-whole-flat", 2, "adamw", True),
        ("fsdp1-flat", 1, "adamw", False),
    ],
)
def test_fsdp1_ranks_continue_bit_for_bit(
    pool: RankPool, tmp_path: Path, sharding: str, ranks: int, optimizer: str, overlap: bool
) -> None:
    """Every strategy of FSDP1, with and without original parameters, the load before the first forward; one layout for all."""
    check_same_ranks(pool, tmp_path, sharding, ranks, optimizer, overlap)
    assert len(list((tmp_path / "left" / "checkpoint-4").glob("layout-*"))) == 1


def check_same_ranks(pool: RankPool, tmp_path: Path, sharding: str, ranks: int, optimizer: str, overlap: bool) -> None:
    job = Job(tmp_path / "whole", sharding, optimizer, overlap=overlap)
    uninterrupted: list[Result] = pool.run(jobs.train, ranks, job)

    interrupted = replace(job, folder=tmp_path / "left")
    first: list[Result] = pool.run(jobs.train, ranks, replace(interrupted, stop=6))
    second: list[Result] = pool.run(jobs.train, ranks, interrupted)

    for before, after, whole in zip(first, second, uninterrupted, strict=True):
        assert after.begun_at == 4
        assert {s: loss for s, loss in before.losses.items() if s <= 4} | after.losses == whole.losses
        assert before.samples[: 4 * 2] + after.samples == whole.samples
        assert differing(after.final, whole.final) == []
        assert after.collectives == before.collectives == whole.collectives == 0
        assert [(step, state) for step, state, _ in whole.saves] == [(4, "complete")]


@pytest.mark.parametrize(
    ("optimizer", "saved", "loaded"),
    [
        ("adamw", ("fsdp2", 2), ("fsdp2", 3)),
        ("prodigy", ("fsdp2", 3), ("none", 1)),
        ("adamw", ("none", 1), ("fsdp2", 3)),
        ("prodigy", ("ddp", 2), ("fsdp2", 2)),
        ("adamw", ("fsdp2", 3), ("ddp", 2)),
        ("prodigy", ("hsdp", 4), ("fsdp2", 2)),
        ("adamw", ("fsdp2", 2), ("hsdp", 4)),
        ("prodigy", ("flat", 4), ("fsdp2", 3)),
        ("adamw", ("fsdp1", 2), ("fsdp1-flat", 3)),
        ("prodigy", ("fsdp1-flat", 3), ("fsdp2", 2)),
        ("adamw", ("fsdp2", 3), ("fsdp1-flat", 2)),
        ("prodigy", ("fsdp1-hybrid", 4), ("fsdp1", 3)),
        ("adamw", ("fsdp1-flat", 3), ("none", 1)),
        ("prodigy", ("none", 1), ("fsdp1", 2)),
        ("adamw", ("ddp", 2), ("fsdp1-flat", 2)),
    ],
    ids=lambda v: v if isinstance(v, str) else f"{v[0]}x{v[1]}",
)
def test_other_ranks_get_the_same_state(
    pool: RankPool, tmp_path: Path, optimizer: str, saved: tuple[str, int], loaded: tuple[str, int]
) -> None:
    """Weights and optimizer state are equal to the bit before the first new step, and no sample is lost or repeated."""
    before: list[Result] = pool.run(jobs.train, saved[1], Job(tmp_path, saved[0], optimizer, stop=4))
    after: list[Result] = pool.run(jobs.train, loaded[1], Job(tmp_path, loaded[0], optimizer, save_at=()))
    expected = {k: v for k, v in before[0].final.items() if k not in ("counters", "lr")}
    for result in after:
        assert result.begun_at == 4
        assert differing(result.loaded, expected) == []
        assert result.collectives == 0
    seen = Counter(i for r in (*before, *after) for i in r.samples)
    total = sum(len(r.samples) for r in (*before, *after))
    assert total == (4 * saved[1] + 4 * loaded[1]) * 2
    assert set(seen.values()) <= {total // SAMPLES, total // SAMPLES + 1}


def test_one_rank_is_killed(pool: RankPool, tmp_path: Path) -> None:
    """The other rank cannot go on, but the checkpoint that was complete before carries the next job."""
    whole: list[Result] = pool.run(jobs.train, 2, Job(tmp_path / "whole", overlap=True))
    killed = Job(tmp_path / "killed", overlap=True, settle=(4,), kill=(1, 6))
    assert pool.run(jobs.survive, 2, killed, expect_death=True)[1] == Died(9)
    resumed: list[Result] = pool.run(jobs.train, 2, replace(killed, kill=None))
    assert [r.begun_at for r in resumed] == [4, 4]
    for a, b in zip(resumed, whole, strict=True):
        assert a.losses == {s: loss for s, loss in b.losses.items() if s > 4}
        assert differing(a.final, b.final) == []


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_compiling_does_not_change_names(pool: RankPool, tmp_path: Path, first: bool, second: bool) -> None:
    """C16: a compiled run saves, resumes, saves again; compiled and eager runs interchange."""
    whole = pool.run(jobs.train, 1, Job(tmp_path / "whole", "none"))[0]
    job = Job(tmp_path / "toggled", "none", save_at=(2, 4, 6))
    pool.run(jobs.train, 1, replace(job, stop=4, compiled=first))
    pool.run(jobs.train, 1, replace(job, stop=6, compiled=second))
    third = pool.run(jobs.train, 1, replace(job, compiled=first))[0]
    assert third.begun_at == 6
    assert third.losses == {s: loss for s, loss in whole.losses.items() if s > 6}


def test_old_checkpoints_go_after_the_new_one_is_whole(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(jobs.train, 2, Job(tmp_path, keep_last=2, save_at=(1, 2, 4, 7)))
    assert [state for _, state, _ in results[0].saves] == ["complete"] * 4
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-7"]
