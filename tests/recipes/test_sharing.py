"""Work that ranks share out: each piece once, a slow rank gets fewer, and an error or a silent rank ends the others' wait."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.testing import RankPool
from holdfast.training.sharing import crew_for


def do_pieces(folder: str, count: int, slow_rank: int) -> dict[str, Any]:
    crew = crew_for(Path(folder))
    with crew.share(count, "the test") as numbers:
        mine = [(number, time.sleep(0.05 if crew.rank == slow_rank else 0.001))[0] for number in numbers]
    with crew.in_step(count, "the test") as turns:
        step = list(turns)
    return {"mine": mine, "step": step, "told": crew.tell(lambda: crew.rank), "crews": crew.crews}


@pytest.mark.parametrize("count", [0, 1, 41])
def test_every_piece_is_done_once_and_a_slow_rank_gets_fewer(pool: RankPool, tmp_path: Path, count: int) -> None:
    results = pool.run(do_pieces, 3, str(tmp_path), count, 1)
    assert sorted(number for result in results for number in result["mine"]) == list(range(count))
    if count > 10:
        assert len(results[1]["mine"]) < count // 3
    steps = [result["step"] for result in results]
    assert {len(step) for step in steps} == {-(-count // 3)}
    assert sorted(number for step in steps for number, wanted in step if wanted) == list(range(count))
    assert all(result["told"] == [0, 1, 2] and result["crews"] == [[0, 1, 2]] for result in results)
    assert list(tmp_path.iterdir()) == []


def own_folders(folder: str) -> list[int]:
    rank = dist.get_rank()
    crew = crew_for(Path(folder) / ("a" if rank < 2 else "b"))
    with crew.share(9, "the test") as numbers:
        mine = list(numbers)
    with crew.in_step(5, "the test") as turns:
        mine += [100 + number for number, wanted in turns if wanted]
    return mine


def test_ranks_that_do_not_see_the_folder_do_all_of_it_for_themselves(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(own_folders, 3, str(tmp_path))
    everything = [*range(9), *range(100, 105)]
    assert sorted(results[0] + results[1]) == everything
    assert sorted(results[2]) == everything


def fail(folder: str, how: str) -> tuple[str, str, float]:
    crew = crew_for(Path(folder), piece_deadline_s=60.0 if how != "silent" else 1.0)
    begun = time.monotonic()
    try:
        with crew.share(200, "the encoding of images") as numbers:
            for _ in numbers:
                if crew.rank == 1 and how == "usage":
                    raise UsageError("no such picture")
                if crew.rank == 1 and how == "bug":
                    raise ZeroDivisionError("a bug")
                time.sleep(3 if crew.rank == 1 else 0.01)
                if crew.rank == 1:
                    break
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", time.monotonic() - begun


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("usage", UsageError, "no such picture\n(rank 1 on "),
        ("bug", HoldfastError, "a bug"),
        ("silent", DeadlineExceeded, "No word for 1 s from rank 1 on "),
    ],
)
def test_a_failing_or_silent_rank_ends_the_others_wait(pool: RankPool, tmp_path: Path, how: str, kind: type, message: str) -> None:
    results = pool.run(fail, 3, str(tmp_path), how)
    for rank in (0, 2):
        name, text, seconds = results[rank]
        assert (name, message in text, seconds < 5) == (kind.__name__, True, True), results
