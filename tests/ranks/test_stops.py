"""A signal to stop, in a loop whose scaler skips steps, whose average is late, and whose last save is still being written."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.engine.deadlines import Deadlines
from holdfast.engine.onecaller import reached
from holdfast.testing.faults import Fault, FaultyFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

DEADLINES = Deadlines(handshake=20, agreement=20, load=20, capture=20, commit=15, goodbye=10, store=10)
SAVED, LAST = 3, 60


def train(folder: Path) -> tuple[int, dict[str, Any], list[tuple[int, str]]]:
    """Saves at step 3, which rank 1's disk takes long for; rank 1 is told to stop meanwhile, and then every other step is skipped.

    Returns the iteration after which this rank stopped, what it held then, and its saves.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, average = (nn.Linear(6, 5) for _ in range(2))
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    counters = {"iterations": 0}
    fault = Fault(f"checkpoint-{SAVED}", "write", "stall", seconds=3.0) if rank == 1 else None
    checkpointer = holdfast.Checkpointer(
        FaultyFolder(folder, fault), model={"model": parallel, "average": average}, optimizer=optimizer, scaler=scaler,
        extra={"counters": counters}, stop_signals=[signal.SIGTERM], when_busy="skip", deadlines=DEADLINES,
    )  # fmt: skip

    def held() -> dict[str, Any]:
        return {"average": average.weight.clone(), "scale": scaler.get_scale(), **counters}

    begun = checkpointer.resume()
    if begun:
        with checkpointer:
            return begun, held(), []
    late = rank == 1
    for step in range(1, LAST):
        skipped = step > SAVED and step % 2 == 0
        loss = parallel(torch.ones(2, 6)).square().mean() * (float("inf") if skipped else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        stop = next((r for r in checkpointer._watcher.requests.values() if r.stop), None)
        if late and stop is not None and reached(checkpointer._gate.steps, stop):
            late = False
            time.sleep(2.0)  # its part must not be taken before its average is up to date, as the other rank's is
        with checkpointer.mutating(), torch.no_grad():
            average.weight.lerp_(model.weight, 0.1)
        optimizer.zero_grad()
        counters["iterations"] = step
        if step == SAVED:
            checkpointer.save(SAVED)
            if rank == 1:
                for _ in range(3):
                    os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        if checkpointer.should_stop:
            break
    checkpointer.close()
    return step, held(), [(save.step, save.state) for save in checkpointer.saves]


def test_a_stop_between_skipped_steps_while_a_save_is_being_written(pool: RankPool, tmp_path: Path) -> None:
    """All stop after the same iteration, and each is saved as it was there, though saves are skipped while one is being written."""
    (step, held, saves), (other_step, other, other_saves) = pool.run(train, 2, tmp_path, timeout=60)
    assert step == other_step < LAST - 1
    assert step % 2 == 1  # after a step that was made
    made = SAVED + (step - SAVED) // 2
    assert saves == other_saves == [(SAVED, "complete"), (made, "complete")]
    assert held["scale"] < 1024.0
    for loaded, expected in zip(pool.run(train, 2, tmp_path, timeout=60), (held, other), strict=True):
        begun, now, _ = loaded
        assert begun == made
        assert now["iterations"] == expected["iterations"] == step
        assert torch.equal(now["average"], expected["average"])
        assert now["scale"] == expected["scale"]
