"""What one rank meets, all ranks hear of: failing saves, votes on a resume, two saves that cross each other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.engine.deadlines import Deadlines
from holdfast.engine.lease import Lease
from holdfast.errors import HoldfastError, SaveFailed, UnsupportedState
from holdfast.storage import LocalFolder
from holdfast.testing.faults import Fault, FaultyFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

DEADLINES = Deadlines(handshake=20, agreement=20, load=20, capture=20, commit=10, goodbye=10)


def sharded(value: float = 0.0) -> nn.Module:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(value)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def checkpointer(folder: Any, model: nn.Module, **options: Any) -> holdfast.Checkpointer:
    return holdfast.Checkpointer(folder, model=model, deadlines=DEADLINES, **options)


def one_rank_cannot_save(folder: Path) -> tuple[list[str], str]:
    state: dict[str, Any] = {}
    caught = ""
    with checkpointer(folder, sharded(), extra={"own": state}) as c:
        for step in (1, 2, 3):
            state["bad"] = object() if (dist.get_rank(), step) == (1, 2) else 0
            try:
                c.save(step)
            except UnsupportedState as error:
                caught = str(error)
            try:
                c.wait()
            except SaveFailed as error:
                caught = str(error)
        return [s.state for s in c.saves], caught


def test_a_rank_that_cannot_save_fails_that_save_and_no_later_one(pool: RankPool, tmp_path: Path) -> None:
    (states0, caught0), (states1, caught1) = pool.run(one_rank_cannot_save, 2, tmp_path)
    assert states0 == states1 == ["complete", "failed", "complete"]
    assert "extra.own.bad is a builtins.object" in caught1
    assert "step 2 failed on rank 1" in caught0
    assert "extra.own.bad is a builtins.object" in caught0


class Stubborn:
    """State that one rank cannot take back."""

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank() == 1:
            raise KeyError("no such thing here")


def save_once(folder: Path) -> None:
    with checkpointer(folder, sharded(1.0), extra={"own": Stubborn()}) as c:
        c.save(1)


def resume_fails_on_rank_1(folder: Path, where: str) -> tuple[str, float]:
    if where == "read" and dist.get_rank() == 1:
        from holdfast.engine import restore

        def out_of_memory(plan: Any) -> int:
            raise torch.OutOfMemoryError("tried to allocate everything")

        restore.read = out_of_memory
    start = time.monotonic()
    c = checkpointer(folder, sharded(), extra={"own": Stubborn()})
    try:
        c.resume()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    finally:
        c._stop(5)
    return "resumed", 0.0


@pytest.mark.parametrize(
    ("where", "own", "told"),
    [("read", "OutOfMemoryError: tried to allocate", "tried to allocate"), ("install", "KeyError: 'no such thing", "no such thing here")],
)
def test_an_error_of_one_rank_is_an_error_of_all_within_seconds(
    pool: RankPool, tmp_path: Path, where: str, own: str, told: str
) -> None:
    """C03: the rank itself shows its own error, the others name it and its cause."""
    pool.run(save_once, 2, tmp_path)
    (others, waited), (mine, _) = pool.run(resume_fails_on_rank_1, 2, tmp_path, where)
    assert mine.startswith(own)
    assert told in others
    assert "rank 1 on " in others
    assert waited < 10


def train_on(folder: Path, steps: list[int]) -> list[str]:
    """A run that does not resume and saves where older checkpoints are; rank 1's disk is slow once."""
    fault = Fault(f"checkpoint-{steps[0]}", "write", "stall", seconds=1.0) if dist.get_rank() == 1 else None
    with checkpointer(FaultyFolder(folder, fault), sharded(2.0), keep_last=1) as c:
        for step in steps:
            c.save(step)
        c.wait()
        return [s.state for s in c.saves]


def look(folder: Path) -> tuple[int, float]:
    model = sharded()
    with checkpointer(folder, model) as c:
        return c.resume(), float(model.weight.full_tensor()[0, 0])


def test_removing_an_old_checkpoint_spares_the_new_save_into_its_folder(pool: RankPool, tmp_path: Path) -> None:
    """Rank 0 has written its part of step 4 already when step 3 completes and makes the old step 4 superfluous."""
    for step in (2, 4):
        pool.run(train_on, 2, tmp_path, [step])
    assert pool.run(train_on, 2, tmp_path, [3, 4]) == [["complete", "complete"]] * 2
    assert pool.run(look, 2, tmp_path) == [(4, 2.0)] * 2


def two_meshes(folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(float(dist.get_rank() // 2))
    fully_shard(model, mesh=mesh["shard"])
    try:
        checkpointer(folder, model)
    except UnsupportedState as error:
        return [str(error)]
    return []


def test_one_name_for_two_tensors_is_refused(pool: RankPool, tmp_path: Path) -> None:
    """Experts that only differ by their mesh would be loaded from whoever comes first."""
    for failures in pool.run(two_meshes, 4, tmp_path):
        assert len(failures) == 1
        assert "is laid over 2 of the 4 ranks" in failures[0]


def state_on_one_rank(folder: Path) -> str:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 0:
        optimizer.state[model.module.weight]["momentum_buffer"] = torch.ones(4, 4)
    c = checkpointer(folder, model, optimizer=optimizer)
    c.save(1)
    try:
        c.wait()
    except SaveFailed as error:
        return str(error)
    finally:
        c._stop(5)
    return "complete"


def test_state_that_only_one_rank_of_ddp_has_is_no_copy(pool: RankPool, tmp_path: Path) -> None:
    """DDP vouches for parameters; a checkpoint that counted on copies that are not there could not be loaded."""
    for text in pool.run(state_on_one_rank, 2, tmp_path):
        assert "optimizer.model.weight.momentum_buffer would be written once" in text
        assert "and rank 1 has none" in text
    assert not (tmp_path / "checkpoint-1" / "manifest.json").exists()


def who_stays_away(folder: Path) -> str:
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    try:
        holdfast.Checkpointer(folder, model=nn.Linear(2, 2), deadlines=Deadlines(handshake=1.0))
    except HoldfastError as error:
        return str(error)
    return "met"


def test_a_rank_that_does_not_come_is_named(pool: RankPool, tmp_path: Path) -> None:
    texts = pool.run(who_stays_away, 3, tmp_path)
    assert "rank 0 on " in texts[0]
    assert "rank 1 did not make a Checkpointer within 1 s" in texts[0]
    assert "rank 1 did not make a Checkpointer within 1 s" in texts[2] or "rank 0 did not answer" in texts[2]


def relative(folders: list[Path]) -> str:
    import os

    os.chdir(folders[dist.get_rank()])
    with checkpointer("out", sharded(1.0)) as c:
        c.save(1)
    return str(c._storage.describe())


def test_a_relative_folder_is_rank_0s(pool: RankPool, tmp_path: Path) -> None:
    """C30: ranks that were started in different folders save to one."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert pool.run(relative, 2, folders) == [str(folders[0] / "out")] * 2
    assert (folders[0] / "out" / "checkpoint-1" / "manifest.json").exists()
    assert list(folders[1].iterdir()) == []


def validate_first(folder: Path) -> tuple[float, float]:
    """A forward before the resume leaves FSDP2's root unsharded; the next one must see what was loaded."""
    x = torch.ones(2, 4)
    model = sharded(3.0)
    with checkpointer(folder, model) as c:
        c.save(1)
        expected = float(model(x).sum())
    other = sharded(0.5)
    with torch.no_grad():
        other(x)
    with checkpointer(folder, other) as c:
        c.resume()
        return float(other(x).sum()), expected


def test_a_forward_before_the_resume_does_not_hide_it(pool: RankPool, tmp_path: Path) -> None:
    for got, expected in pool.run(validate_first, 2, tmp_path):
        assert got == expected


class Own(torch.optim.SGD):
    """Keeps a number in its param groups that is another one on every rank, as plain Prodigy does under FSDP2."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.param_groups[0]["d"] = 1.0 + dist.get_rank()


def save_own(folder: Path) -> None:
    model = sharded(1.0)
    with checkpointer(folder, model, optimizer=Own(model.parameters())) as c:
        c.save(1)


def resume_own(folder: Path) -> float | str:
    model = sharded()
    optimizer = Own(model.parameters())
    optimizer.param_groups[0]["d"] = 0.0
    c = checkpointer(folder, model, optimizer=optimizer)
    try:
        c.resume()
    except HoldfastError as error:
        return str(error)
    finally:
        c._stop(5)
    return float(optimizer.param_groups[0]["d"])


def test_group_values_of_one_rank_go_back_to_it_or_are_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_own, 2, tmp_path)
    assert pool.run(resume_own, 2, tmp_path) == [1.0, 2.0]
    for text in pool.run(resume_own, 3, tmp_path):
        assert "values in the parameter groups of optimizer differ between the ranks that saved it" in text
        assert "resume on 2 ranks" in text


def second_job(folder: Path) -> tuple[str, float]:
    start = time.monotonic()
    try:
        checkpointer(folder, sharded(1.0))
    except HoldfastError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def test_ranks_of_a_job_that_is_refused_need_not_wait(pool: RankPool, tmp_path: Path) -> None:
    """Rank 0 finds the folder taken, and says so to the ranks that come to meet it."""
    lease = Lease(LocalFolder(tmp_path))
    lease.take([], str(tmp_path))
    try:
        (own, _), (others, waited) = pool.run(second_job, 2, tmp_path)
    finally:
        lease.release()
    assert own.startswith("another job (process ")
    assert others.startswith("rank 0 cannot begin: another job (process ")
    assert waited < 18
