"""The pool itself, attacked: whatever a rank does, the call ends in time, says why, and the next call works."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from holdfast.testing import Died, RankFailure, RankPool


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    where: str


def rank_and_sum(offset: int) -> tuple[int, int, float, int]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    assert int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"]) == dist.get_rank()
    return dist.get_rank(), int(os.environ["WORLD_SIZE"]), total.item(), torch.get_num_threads()


def give_back(point: Point) -> Point:
    return Point(point.x + 1, f"{point.where} rank {dist.get_rank()}")


def raise_on(rank: int) -> None:
    print(f"a word of rank {dist.get_rank()}")
    if dist.get_rank() == rank:
        raise ValueError("the reason")
    dist.barrier()


def die_on(*ranks: int) -> str:
    if dist.get_rank() in ranks:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def leave_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def hang_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()


def return_a_lambda() -> object:
    return lambda: None


def leave_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def ids() -> tuple[int, int]:
    os.environ["LEFT_BEHIND"] = "1"
    first = os.environ.get("SEEN", "")
    os.environ["SEEN"] = "1"
    return os.getpid(), len(first)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_have_their_environment_and_a_group(pool: RankPool, world_size: int) -> None:
    total = sum(range(world_size)) + 10.0 * world_size
    assert pool.run(rank_and_sum, world_size, 10) == [(rank, world_size, total, 1) for rank in range(world_size)]


def test_classes_of_the_test_file_travel_both_ways(pool: RankPool) -> None:
    points = pool.run(give_back, 2, point=Point(torch.ones(2), "here"))
    assert [point.where for point in points] == ["here rank 0", "here rank 1"]
    assert all(isinstance(point, Point) and torch.equal(point.x, torch.full((2,), 2.0)) for point in points)


def test_a_rank_that_raises_ends_the_call_with_every_ranks_story(pool: RankPool) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        pool.run(raise_on, 2, 1)
    message = str(failure.value)
    assert "ValueError: the reason" in message
    assert "a word of rank 0" in message
    assert "rank 0 (pid" in message
    assert "in raise_on" in message.split("=== rank 1")[0], "the stack of the rank that waited is missing"
    assert time.monotonic() - begin < 10, "the call waited for the collective's time-out"
    assert pool.run(die_on, 2) == ["alive", "alive"]


def test_a_killed_rank_fails_the_call_unless_it_was_expected(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="DIED of SIGKILL"):
        pool.run(die_on, 2, 0)
    assert pool.run(die_on, 3, 0, 2, expect_death=True) == [Died(9), "alive", Died(9)]
    assert pool.run(die_on, 2, 0, 1, expect_death=True) == [Died(9), Died(9)]
    assert pool.run(die_on, 2) == ["alive", "alive"]


def test_expecting_death_excuses_no_exception(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="the reason"):
        pool.run(raise_on, 2, 0, expect_death=True)


def test_leaving_without_a_result_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="exit code 3"):
        pool.run(leave_on, 2, 1)


@pytest.mark.parametrize("how", ["wait", "stop"])
def test_a_rank_that_hangs_is_shown_and_ended_in_time(pool: RankPool, how: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 .*LATE") as failure:
        pool.run(hang_on, 2, 1, how, timeout=1.0)
    assert time.monotonic() - begin < 6
    if how == "wait":
        assert "in hang_on" in str(failure.value)
    assert pool.run(die_on, 2) == ["alive", "alive"]


def test_a_result_that_cannot_travel_is_said(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 0 .*RAISED(.|\n)*pickle"):
        pool.run(return_a_lambda, 1)


def test_each_call_begins_with_fresh_processes(pool: RankPool) -> None:
    first, second = pool.run(ids, 2), pool.run(ids, 2)
    assert not {pid for pid, _ in first} & {pid for pid, _ in second}
    assert [seen for _, seen in first + second] == [0] * 4


def test_children_of_a_rank_do_not_outlive_the_call(pool: RankPool) -> None:
    [pid] = pool.run(leave_a_child, 1)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def test_a_dead_server_is_replaced() -> None:
    with RankPool() as own:
        assert own.run(die_on, 1) == ["alive"]
        assert own._server is not None
        own._server.kill()
        own._server.wait()
        assert own.run(die_on, 2) == ["alive", "alive"]


def test_ranks_end_with_the_test_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The test process is killed in the middle of a call: no rank is left behind."""
    folder = tmp_path_factory.mktemp("orphans")
    (folder / "orphans.py").write_text(
        "import os, sys, time\n"
        "from holdfast.testing import RankPool\n"
        "def sleep(folder):\n"
        "    open(f'{folder}/pid-{os.environ[\"RANK\"]}', 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    import orphans\n"
        "    RankPool().run(orphans.sleep, 2, sys.argv[1], timeout=600)\n"
    )
    process = subprocess.Popen([sys.executable, "orphans.py", str(folder)], cwd=folder, env=os.environ | _path())
    files = [folder / "pid-0", folder / "pid-1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    pids = [int(file.read_text()) for file in files]
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(_runs(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
