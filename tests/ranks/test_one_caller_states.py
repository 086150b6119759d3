"""One caller, and all that a loop can have: two optimizers, a scaler that skips steps, an average updated after the step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from jobs import Numbers, differing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.engine.deadlines import Deadlines

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

DEADLINES = Deadlines(handshake=20, agreement=20, load=20, capture=20, commit=15, goodbye=10, store=10)
SKIPPED = (3, 6)
"""Steps whose gradients overflow: the scaler does not make them."""

SAVED = (2, 3, 4, 6)
"""Before, at and after a step that is skipped, and one at the end."""


@dataclass
class Plan:
    folder: Path
    sharding: str
    late: int = 0
    """A step after which the other rank is late with its average."""

    resume_from: int = 0


def local(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def train(plan: Plan) -> tuple[dict[int, dict[str, Any]], list[tuple[int, str]]]:
    """What this rank held at each boundary; with `resume_from`, what it holds after resuming there, and nothing is trained."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module
    average: nn.Module
    model, average = (nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.1), nn.Linear(10, 3)) for _ in range(2))
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    if plan.sharding == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (model, average):
            fully_shard(module, mesh=mesh)
    trained = list(model.parameters())
    optimizers = [torch.optim.AdamW(trained[:2], lr=1e-2), torch.optim.SGD(trained[2:], lr=1e-2, momentum=0.9)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    torch.manual_seed(100 + rank)
    counters = {"seen": 0}

    def held() -> dict[str, Any]:
        state = {f"model {i}": local(p) for i, p in enumerate(model.parameters())}
        state |= {f"average {i}": local(p) for i, p in enumerate(average.parameters())}
        for k, optimizer in enumerate(optimizers):
            for i, p in enumerate(optimizer.param_groups[0]["params"]):
                state |= {f"optimizer {k}.{i} {n}": local(v) for n, v in optimizer.state[p].items()}
        state |= {f"scheduler {k}": s.state_dict()["last_epoch"] for k, s in enumerate(schedulers)}
        return state | {"scaler": scaler.state_dict(), "generator": torch.get_rng_state(), "counters": dict(counters)}

    loader = holdfast.DataLoader(Numbers(), batch_size=1, seed=3)
    checkpointer = holdfast.Checkpointer(
        plan.folder, model={"model": model, "average": average}, optimizer=optimizers, lr_scheduler=schedulers, scaler=scaler,
        dataloader=loader, extra={"counters": counters}, one_caller=True, deadlines=DEADLINES,
    )  # fmt: skip
    if plan.resume_from:
        step = checkpointer.resume(plan.folder / f"checkpoint-{plan.resume_from}")
        with checkpointer:
            return {step: held()}, []
    history: dict[int, dict[str, Any]] = {}
    for step, batch in zip(range(1, 7), loader, strict=False):
        loss = model(batch["ids"] * torch.rand(())).square().mean() * (float("inf") if step in SKIPPED else 1.0)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if rank == 1 and step == plan.late:
            time.sleep(2.5)  # longer than a request waits for the training thread
        with checkpointer.mutating(), torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                local_mean, now = (v.to_local() if isinstance(v, DTensor) else v for v in (mean, p))
                local_mean.lerp_(now, 0.1)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            scheduler.step()
            optimizer.zero_grad()
        counters["seen"] += 4
        history[step] = held()
        if rank == 0 and step in SAVED:
            checkpointer.save(step)
    dist.barrier()
    checkpointer.close()
    return history, [(save.step, save.state) for save in checkpointer.saves]


@pytest.mark.parametrize(("sharding", "late"), [("ddp", 0), ("fsdp2", 0), ("fsdp2", 4)], ids=["ddp", "fsdp2", "late average"])
def test_each_rank_is_saved_as_it_was(pool: RankPool, tmp_path: Path, sharding: str, late: int) -> None:
    ran = pool.run(train, 2, Plan(tmp_path, sharding, late), timeout=60)
    for history, saves in ran:
        assert saves == [(step, "complete") for step in SAVED]
        assert history[3]["scaler"]["scale"] < history[2]["scaler"]["scale"]  # the step was skipped
        assert differing({"": history[3]["model 0"]}, {"": history[2]["model 0"]}) == []
    for step in SAVED:
        for (loaded, _), (history, _) in zip(pool.run(train, 2, Plan(tmp_path, sharding, resume_from=step), timeout=60), ran, strict=True):
            assert differing(loaded[step], history[step]) == [], step
