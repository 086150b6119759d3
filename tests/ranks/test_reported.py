"""Faults that were reported of other tools and are not tested elsewhere, each by what it would show."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
import pytest
import torch
import torch.distributed as dist
from compat.foreign import build, optimizer_of, sharded, snapshot, whole_fsdp1
from jobs import Job, Result
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.core.manifest import Manifest, rank_file, receipt_file
from holdfast.engine.verify import verify
from holdfast.errors import UsageError
from holdfast.storage import LocalFolder
from holdfast.testing.faults import Fault, FaultyFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool


def in_bf16(folder: Path, sharding: str, resume: bool) -> tuple[dict[str, Any], list[float]]:
    """A model whose weights are bf16: three steps and a save, or a resume; the state, and the next three losses."""
    if sharding == "fsdp1":
        model: nn.Module = FullyShardedDataParallel(build().bfloat16(), use_orig_params=True, device_id=torch.device("cpu"))
    elif sharding == "fsdp2":
        model = sharded(torch.bfloat16)[0]
    else:
        model = build().bfloat16()
    optimizer = optimizer_of(model)

    def step(number: int) -> float:
        ids = torch.randint(0, 7, (4, 6), generator=torch.Generator().manual_seed(number))
        loss = nn.functional.cross_entropy(model(ids).float().transpose(1, 2), ids.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        if resume:
            assert checkpointer.resume() == 3
        else:
            for number in range(3):
                step(number)
            checkpointer.save(3)
    state = whole_fsdp1(model, optimizer) if sharding == "fsdp1" else snapshot(model, optimizer)
    return state, [step(number) for number in range(3, 6)]


@pytest.mark.parametrize(("saved", "other"), [("fsdp1", "fsdp2"), ("fsdp2", "fsdp1")])
def test_no_spike_after_a_resume_in_bf16(pool: RankPool, tmp_path: Path, saved: str, other: str) -> None:
    """C23: types and values of weights and moments are those of the run, in each sharding; on the same ranks the losses, too."""
    first = pool.run(in_bf16, 2, tmp_path, saved, False)
    same = pool.run(in_bf16, 2, tmp_path, saved, True)
    assert [losses for _, losses in same] == [losses for _, losses in first]
    for state, losses in (*same, *pool.run(in_bf16, 2, tmp_path, other, True), *pool.run(in_bf16, 1, tmp_path, "none", True)):
        assert {t.dtype for n, t in state.items() if not n.endswith("/step")} == {torch.bfloat16}
        assert state.keys() == first[0][0].keys()
        assert [n for n, t in state.items() if not torch.equal(t, first[0][0][n])] == []
        assert losses == pytest.approx(first[0][1], rel=2e-2)  # bf16 keeps 8 bits, and other ranks add up in another order


def test_the_schedule_counts_optimizer_steps_and_not_ranks(pool: RankPool, tmp_path: Path) -> None:
    """C24: after 4 steps of 2 ranks and 4 of 3 the learning rate is that of step 8."""
    pool.run(jobs.train, 2, Job(tmp_path, "ddp", stop=4))
    after: list[Result] = pool.run(jobs.train, 3, Job(tmp_path, "fsdp2", stop=8, save_at=()))
    optimizer = jobs.make_optimizer("adamw", nn.Linear(1, 1))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for _ in range(8):
        optimizer.step()
        scheduler.step()
    assert [result.begun_at for result in after] == [4] * 3
    assert [result.final["lr"] for result in after] == [scheduler.get_last_lr()] * 3


def test_averaged_weights_and_their_count_come_back_beside_the_live_ones(tmp_path: Path) -> None:
    """C27: an average is a model of its own; a save while it stands in for the live weights is refused."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    def begin() -> tuple[nn.Module, AveragedModel, torch.optim.Optimizer]:
        model = build()
        return model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), optimizer_of(model)

    model, average, optimizer = begin()
    with holdfast.Checkpointer(tmp_path, model={"live": model, "ema": average}, optimizer=optimizer) as checkpointer:
        for _ in range(3):
            model(torch.arange(6).view(1, 6)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
        live = {n: t.clone() for n, t in model.state_dict().items()}
        averaged = {n: t.clone() for n, t in average.state_dict().items()}
        with checkpointer.mutating():
            model.load_state_dict(average.module.state_dict())
            with pytest.raises(UsageError, match="mutating"):
                checkpointer.save(3)
            model.load_state_dict(live)
        checkpointer.save(3)
    model, average, optimizer = begin()
    with holdfast.Checkpointer(tmp_path, model={"live": model, "ema": average}, optimizer=optimizer) as checkpointer:
        assert checkpointer.resume() == 3
    assert int(average.n_averaged) == 3
    assert any(not torch.equal(t, averaged[f"module.{n}"]) for n, t in live.items())
    assert [n for n, t in model.state_dict().items() if not torch.equal(t, live[n])] == []
    assert [n for n, t in average.state_dict().items() if not torch.equal(t, averaged[n])] == []


def ends_with_a_slow_disk(folder: Path) -> list[tuple[int, str]]:
    """The last save of a run, on a disk that takes twice as long as a collective may, with the other rank in a barrier at once."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    fault = Fault("checkpoint-1", "write", "stall", seconds=3.0) if dist.get_rank() == 0 else None
    with holdfast.Checkpointer(FaultyFolder(folder, fault), model=DistributedDataParallel(nn.Linear(4, 4))) as checkpointer:
        checkpointer.save(1)
        dist.barrier(group)
    dist.barrier(group)
    return [(save.step, save.state) for save in checkpointer.saves]


def test_a_disk_may_be_slower_than_the_collectives_limit(pool: RankPool, tmp_path: Path) -> None:
    """C02: nobody waits in a collective for a file."""
    assert pool.run(ends_with_a_slow_disk, 2, tmp_path) == [[(1, "complete")]] * 2
    assert (tmp_path / "checkpoint-1" / "manifest.json").exists()


def saves_a_step_twice(folder: Path) -> list[tuple[int, str]]:
    """Each rank is late with its file by another time, so that all are in the folder at different points."""
    fault = Fault("checkpoint-1", "close", "stall", seconds=0.2 * dist.get_rank())
    with holdfast.Checkpointer(FaultyFolder(folder, fault), model=DistributedDataParallel(nn.Linear(4, 4))) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(1)
    return [(save.step, save.state) for save in checkpointer.saves]


def test_ranks_that_lag_share_a_folder_and_may_save_a_step_again(pool: RankPool, tmp_path: Path) -> None:
    """C10: one rank commits, nothing is renamed under another's hands, and the second attempt replaces the first as a whole."""
    assert pool.run(saves_a_step_twice, 4, tmp_path) == [[(1, "complete")] * 2] * 4
    names = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    attempt = Manifest.parse((tmp_path / "checkpoint-1" / "manifest.json").read_bytes(), "it").attempt
    assert {name for name in names if name.startswith("rank-")} == {f(r, attempt) for r in range(4) for f in (rank_file, receipt_file)}
    assert verify(LocalFolder(tmp_path), "checkpoint-1") == []
