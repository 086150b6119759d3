"""Work that one rank does for the others: done once, and its failure is everybody's within a moment."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.testing import RankPool
from holdfast.training.once import once


def as_rank_of_a_node(ranks_per_node: int) -> int:
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % ranks_per_node)
    return rank


def work_on(folder: str, per: str) -> str:
    rank = as_rank_of_a_node(2)

    def work() -> str:
        (Path(folder) / f"{rank}-{time.monotonic_ns()}").touch()
        return f"by rank {rank}"

    return once(work, per, 20.0)


@pytest.mark.parametrize(
    ("per", "results"),
    [("node", ["by rank 0", "by rank 0", "by rank 2", "by rank 2"]), ("run", ["by rank 0"] * 4)],
)
def test_each_result_comes_from_its_own_worker(pool: RankPool, tmp_path, per, results):
    assert pool.run(work_on, 4, str(tmp_path), per) == results
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == sorted({r[-1] for r in results})


def fail(how: str, deadline_s: float) -> tuple[str, str, float]:
    rank = as_rank_of_a_node(2)

    def work() -> str:
        if rank == 2:
            if how == "usage":
                raise UsageError("the repository is gated")
            if how == "bug":
                raise ZeroDivisionError("a bug")
            time.sleep(3)
        return ""

    begun = time.monotonic()
    try:
        once(work, "node", deadline_s)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", time.monotonic() - begun


@pytest.mark.parametrize(
    ("how", "own", "others", "message"),
    [
        ("usage", UsageError, UsageError, "the repository is gated"),
        ("bug", ZeroDivisionError, HoldfastError, "a bug"),
    ],
)
def test_a_failing_worker_ends_all_ranks_at_once(pool: RankPool, how, own, others, message):
    results = pool.run(fail, 4, how, 60.0)
    assert [kind for kind, _, _ in results] == [others.__name__] * 2 + [own.__name__, others.__name__]
    for rank, (_, text, seconds) in enumerate(results):
        assert message in text
        assert seconds < 5
        if rank != 2:
            assert "(rank 2 on " in text


def test_a_silent_worker_is_named_when_the_deadline_passes(pool: RankPool):
    results = pool.run(fail, 4, "silent", 1.0)
    for rank in (0, 1, 3):
        kind, text, seconds = results[rank]
        assert kind == DeadlineExceeded.__name__
        assert "No word after 1 s from rank 2 on " in text
        assert seconds < 4
