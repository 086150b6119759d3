"""A save that one rank skips, since it is still busy with the one before, is skipped by all, and nothing of it stays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.testing.faults import Fault, FaultyFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool


def train(folder: Path, one_caller: bool) -> tuple[list[tuple[int, str]], int]:
    rank = dist.get_rank()
    fault = Fault("checkpoint-1", "write", "stall", seconds=2.0) if rank == 1 else None
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpointer = holdfast.Checkpointer(
        FaultyFolder(folder, fault), model=model, optimizer=optimizer, when_busy="skip", one_caller=one_caller
    )
    for step in range(1, 5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step <= 3 and (rank == 0 or not one_caller):
            checkpointer.save(step, when_busy="wait" if step == 3 else None)
    if one_caller:
        dist.barrier()  # the other rank has no record of its own to wait for before it has seen the request
    checkpointer.wait()
    done = [(save.step, save.state) for save in checkpointer.saves]
    checkpointer.close()
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as again:
        return done, again.resume()


@pytest.mark.parametrize("one_caller", [False, True])
def test_all_ranks_skip_what_one_skips(pool: RankPool, tmp_path: Path, one_caller: bool) -> None:
    results = pool.run(train, 2, tmp_path, one_caller, timeout=60)
    assert results == [([(1, "complete"), (2, "skipped"), (3, "complete")], 3)] * 2
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*/rank-*.json")) != []
    assert not list((tmp_path / "checkpoint-2").glob("*.safetensors"))
