"""Ranks that meet on folders, one or several: here threads with one store, each with the folder that it sees."""

from __future__ import annotations

import errno
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.engine.deadlines import Deadlines
from holdfast.engine.lease import Lease
from holdfast.engine.meeting import meet
from holdfast.engine.store import LocalStore, Run
from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.storage import LocalFolder
from holdfast.testing.faults import Fault, FaultyFolder


class Full(FaultyFolder):
    """A disk on which nothing can be put."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, Fault(".holdfast", "put", "fail", errno.ENOSPC, times=1000))


def come(
    folders: list[LocalFolder], absent: tuple[int, ...] = (), seconds: float = 20.0, leads: list[int] | None = None
) -> list[Run | HoldfastError | OSError | None]:
    """What each rank gets: the run, or its error. Leaders leave at once, and are noted in `leads`."""
    store = LocalStore()

    def rank(number: int) -> Run | HoldfastError | OSError | None:
        if number in absent:
            return None
        try:
            _, run, lease = meet(folders[number], store, number, len(folders), Deadlines(handshake=seconds))
        except (HoldfastError, OSError) as error:
            return error
        if lease is not None:
            if leads is not None:
                leads.append(number)
            lease.release()
        return run

    with ThreadPoolExecutor(len(folders)) as ranks:
        return list(ranks.map(rank, range(len(folders))))


def on(tmp_path: Path, nodes: str) -> list[LocalFolder]:
    for node in nodes:
        (tmp_path / node).mkdir(exist_ok=True)
    return [LocalFolder(tmp_path / node) for node in nodes]


@pytest.mark.parametrize("nodes", ["aaaa", "aabb", "abab", "abcb", "abcd", "abbbcca"])
def test_who_shares_a_folder_is_found_out(tmp_path: Path, nodes: str) -> None:
    leads: list[int] = []
    runs = come(on(tmp_path, nodes), leads=leads)
    first = [nodes.index(node) for node in nodes]
    homes = () if set(nodes) == {"a"} else tuple(first)
    assert len({run.nonce for run in runs if isinstance(run, Run)}) == 1
    for run in runs:
        assert isinstance(run, Run)
        assert (run.run_sequence, run.homes) == (1, homes)
    assert sorted(leads) == sorted(set(first))
    for node in set(nodes):  # nothing is left of how they found out
        assert {p.name for p in (tmp_path / node / ".holdfast").iterdir()} == {"run.json", "claim-1"}


def test_the_run_counts_on_from_the_folder_that_has_seen_the_most(tmp_path: Path) -> None:
    for _ in range(3):
        come(on(tmp_path, "b"))
    for expected in (4, 5):
        for run in come(on(tmp_path, "abc")):
            assert isinstance(run, Run)
            assert run.run_sequence == expected
        for node in "abc":
            assert {p.name for p in (tmp_path / node / ".holdfast").iterdir()} == {"run.json", f"claim-{expected}"}


def test_a_disk_on_which_nothing_can_be_put_ends_the_meeting_for_all(tmp_path: Path) -> None:
    """Not after a deadline: at once, with the rank, its host and the cause."""
    folders: list[LocalFolder] = [*on(tmp_path, "aab"), Full(tmp_path / "b")]
    start = time.monotonic()
    told = come(folders, seconds=60.0)
    assert time.monotonic() - start < 20
    assert isinstance(told[3], OSError)
    for error in told[:3]:
        assert isinstance(error, UsageError)
        assert "rank 3 on " in str(error)
        assert "OSError: [Errno 28] No space left on device" in str(error)


def test_a_path_that_one_rank_cannot_use_ends_the_meeting_for_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = LocalStore()

    def rank(number: int) -> str:
        with pytest.raises(UsageError) as error:
            meet(tmp_path / ("out", "out", "file")[number], store, number, 3, Deadlines(handshake=60.0))
        return str(error.value)

    start = time.monotonic()
    with ThreadPoolExecutor(3) as ranks:
        told = list(ranks.map(rank, range(3)))
    assert time.monotonic() - start < 20
    for text in told:
        assert f"cannot use {tmp_path}/file for checkpoints: it is a file, give a folder" in text
    assert all("rank 2 on " in text for text in told[:2])


def test_a_rank_that_does_not_come_is_named_to_those_that_did(tmp_path: Path) -> None:
    told = come(on(tmp_path, "aabb"), absent=(2,), seconds=1.0)
    for error in (told[0], told[1], told[3]):
        assert isinstance(error, DeadlineExceeded)
        assert "rank 2 did not make a Checkpointer within 1 s" in str(error)


def test_a_folder_of_another_job_on_one_node_refuses_the_run_on_all(tmp_path: Path) -> None:
    folders = on(tmp_path, "aabb")
    lease = Lease(folders[2])
    lease.take([], "")
    try:
        told = come(folders)
    finally:
        lease.release()
    for number, error in enumerate(told):
        assert isinstance(error, UsageError)
        assert number == 2 or "rank 2 on " in str(error)
        assert f"already has a Checkpointer on {tmp_path / 'b'}" in str(error)
    again = come(folders)  # those that had taken their folder have left it
    assert all(isinstance(run, Run) for run in again)
