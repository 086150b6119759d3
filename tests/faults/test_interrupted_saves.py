"""Whatever operation of a save is interrupted, on whatever rank: a whole checkpoint resumes, old or new, never a mix.

Ranks save at steps 2 and 4. Something happens while step 4 is saved; then the job is started again.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
import pytest
from jobs import Job, Result, differing

from holdfast.testing.faults import Fault
from holdfast.testing.pool import Died

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

RANKS = 2
OPERATIONS = ["make_folder", "create", "write", "close", "put layout", "put rank", "put manifest"]
"""What the ranks do to the folder of step 4: the layout is put by who comes first, the manifest by rank 0."""


@pytest.fixture(scope="module")
def whole(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """The uninterrupted run."""
    results: list[Result] = pool.run(jobs.train, RANKS, Job(tmp_path_factory.mktemp("whole"), save_at=(2, 4), settle=(2,), stop=6))
    return results


def continued(pool: RankPool, job: Job, whole: list[Result], *, possible: set[int]) -> int:
    """Start the job again: it resumes from one of the `possible` steps and is the uninterrupted run from there on."""
    results: list[Result] = pool.run(jobs.train, RANKS, replace(job, faults={}, kill=None))
    begun = results[0].begun_at
    assert begun in possible
    for result, expected in zip(results, whole, strict=True):
        assert result.begun_at == begun
        assert result.losses == {s: loss for s, loss in expected.losses.items() if s > begun}
        assert differing(result.final, expected.final) == []
    return begun


KILLS = [
    (0, "make_folder", "kill before"),
    (0, "create", "kill after"),
    (0, "write", "kill before"),
    (0, "close", "kill after"),
    (0, "put rank", "kill before"),
    (0, "put rank", "kill after"),
    (0, "put manifest", "kill before"),
    (0, "put manifest", "kill after"),
    (1, "create", "kill before"),
    (1, "close", "kill before"),
    (1, "put rank", "kill after"),
    (-1, "write", "kill after"),
    (-1, "put layout", "kill after"),
    (-1, "put rank", "kill after"),
]


@pytest.mark.parametrize(("who", "operation", "action"), KILLS)
def test_killed_at_any_operation(
    pool: RankPool, tmp_path: Path, whole: list[Result], operation: str, who: int, action: Any
) -> None:
    """`who` is a rank, or -1 for all of them."""
    faults = {rank: Fault("checkpoint-4", operation, action) for rank in range(RANKS) if who in (rank, -1)}
    job = Job(tmp_path / "out", save_at=(2, 4), settle=(2,), stop=6, faults=faults)
    results = pool.run(jobs.survive, RANKS, job, expect_death=True)
    assert Died(9) in (results if who == -1 else [results[who]])
    folder = tmp_path / "out" / "checkpoint-4"
    durable = (folder / "manifest.json").exists() or len(list(folder.glob("rank-*.json"))) == RANKS
    begun = continued(pool, job, whole, possible={2, 4})
    assert begun == (4 if durable else 2)  # with all receipts there, the next job writes the manifest


@pytest.mark.parametrize(("who", "operation"), [(0, "make_folder"), (1, "create"), (0, "write"), (1, "close"), (0, "put rank"), (1, "put rank")])
def test_an_operation_that_fails_on_one_rank(
    pool: RankPool, tmp_path: Path, whole: list[Result], operation: str, who: int
) -> None:
    """Every rank hears of it with its cause, the training goes on unchanged, step 2 stays, nothing of step 4 is left."""
    fault = Fault("checkpoint-4", operation, "fail", errno.ENOSPC)
    job = Job(tmp_path / "out", save_at=(2, 4), settle=(2,), stop=6, faults={who: fault})
    results: list[Result] = pool.run(jobs.survive, RANKS, job)
    for result, expected in zip(results, whole, strict=True):
        assert result.losses == expected.losses
        assert [(step, state) for step, state, _ in result.saves] == [(2, "complete"), (4, "failed")]
        (failure,) = result.failures
        assert f"the save of step 4 failed on rank {who} " in failure
        assert "in phase 'write'" in failure
        assert "No space left on device" in failure
    left = [p.name for p in (tmp_path / "out" / "checkpoint-4").glob("rank-*")]
    assert left == []
    assert continued(pool, job, whole, possible={2}) == 2


@pytest.mark.parametrize("operation", ["create", "close", "put rank"])
def test_an_error_that_passes_is_tried_again(
    pool: RankPool, tmp_path: Path, whole: list[Result], operation: str
) -> None:
    fault = Fault("checkpoint-4", operation, "fail", errno.ESTALE)
    job = Job(tmp_path / "out", save_at=(2, 4), settle=(2,), stop=6, faults={1: fault})
    results: list[Result] = pool.run(jobs.survive, RANKS, job)
    for result, expected in zip(results, whole, strict=True):
        assert result.losses == expected.losses
        assert [(step, state) for step, state, _ in result.saves] == [(2, "complete"), (4, "complete")]
        assert result.failures == []
    assert continued(pool, job, whole, possible={4}) == 4


def test_a_rank_that_stalls_in_a_write_holds_up_nobody(pool: RankPool, tmp_path: Path, whole: list[Result]) -> None:
    """The others train on, the save is reported as failed within its deadline, naming the rank that did not deliver."""
    deadlines = replace(Job(tmp_path).deadlines, commit=2.0)
    fault = Fault("checkpoint-4", "write", "stall", seconds=6.0)
    job = Job(tmp_path / "out", save_at=(2, 4), settle=(2,), stop=6, faults={1: fault}, deadlines=deadlines)
    results: list[Result] = pool.run(jobs.survive, RANKS, job, timeout=30)
    for result, expected in zip(results, whole, strict=True):
        assert result.losses == expected.losses
        assert [(step, state) for step, state, _ in result.saves] == [(2, "complete"), (4, "failed")]
        assert "rank 1 did not deliver after 2 s: rank 1 (" in result.failures[0]
        assert "last seen at step" in result.failures[0]
    assert continued(pool, job, whole, possible={2}) == 2


def test_killed_between_saves(pool: RankPool, tmp_path: Path, whole: list[Result]) -> None:
    """All ranks at once in the middle of the training, right after a save was requested, and one rank alone."""
    for number, kill in enumerate([(-1, 3), (-1, 4), (-1, 5), (0, 5), (1, 5)]):
        job = Job(tmp_path / str(number), save_at=(2, 4), stop=6, kill=kill, overlap=bool(number % 2))
        results = pool.run(jobs.survive, RANKS, job, expect_death=True)
        assert Died(9) in results
        continued(pool, job, whole, possible={0, 2, 4})
