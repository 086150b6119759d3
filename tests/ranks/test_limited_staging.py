"""A rank that the watcher serves, with a staging smaller than its state: nothing may change before the last piece is copied."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import holdfast
from holdfast.engine.writer import PIECE
from holdfast.testing.faults import Fault, FaultyFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool


def change_while_it_is_written(folder: Path) -> tuple[bool, float]:
    """Rank 0 asks; rank 1 stands still until its part is begun, and then changes its weights while its disk is slow."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.Linear(2048, 3000)  # 24.6 MB, a tensor larger than the window
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fault = Fault("checkpoint-1", "write", "stall", seconds=1.5) if rank == 1 else None
    checkpointer = holdfast.Checkpointer(
        FaultyFolder(folder, fault), model=model, optimizer=optimizer, one_caller=True, staging_limit=PIECE
    )
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    wanted = model.weight.detach().clone()
    dist.barrier()
    if rank == 0:
        checkpointer.save(1)
    end = time.monotonic() + 20
    while not checkpointer.saves and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)  # the first piece is on its way to the disk
    start = time.monotonic()
    with checkpointer.mutating(), torch.no_grad():
        model.weight.add_(1.0)
    waited = time.monotonic() - start
    checkpointer.wait()
    dist.barrier()
    assert checkpointer.resume("checkpoint-1") == 1
    same = torch.equal(model.weight, wanted)
    checkpointer.close()
    return same, waited


def test_the_gate_stays_closed_until_the_last_piece(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(change_while_it_is_written, 2, tmp_path, timeout=60)
    assert [same for same, _ in results] == [True, True]
    assert results[1][1] > 0.5  # the change waited for the slow disk
