"""One caller is enough: a plain loop that saves on one rank only, and signals that reach any rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from jobs import Numbers, build, differing, snapshot
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.deadlines import Deadlines
from holdfast.errors import SaveFailed
from holdfast.storage import LocalFolder
from holdfast.testing.pool import Died

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

DEADLINES = Deadlines(handshake=20, agreement=20, load=20, capture=20, commit=15, goodbye=10, store=10)


@dataclass
class Plan:
    folder: Path
    sharding: str = "fsdp2"
    stop: int = 8
    save_at: tuple[int, ...] = (3, 6, 8)
    caller: int = 0
    accumulation: int = 1
    loader: bool = True
    barrier_s: float = 0.0
    kill_at: int = 0


def train(plan: Plan) -> tuple[int, dict[int, float], dict[str, Any], list[tuple[int, str]]]:
    """The loop of a script that knows nothing of sharding: `save` on one rank, nothing in the other ranks' branch."""
    rank = dist.get_rank()
    model = build(plan.sharding)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    loader = holdfast.DataLoader(Numbers(), batch_size=2, seed=3)
    torch.manual_seed(100 + rank)
    checkpointer = holdfast.Checkpointer(
        plan.folder, model=model, optimizer=optimizer, lr_scheduler=scheduler, dataloader=loader if plan.loader else None,
        one_caller=True, deadlines=DEADLINES,
    )  # fmt: skip
    begun = step = checkpointer.resume()
    losses: dict[int, float] = {}
    batches = iter([])
    while step < plan.stop:
        if step == plan.kill_at > 0:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        total = 0.0
        for _ in range(plan.accumulation):
            if plan.loader:
                batch = next(batches, None)
                if batch is None:
                    batches = iter(loader)
                    batch = next(batches)
                ids = batch["ids"]
            else:
                ids = torch.randint(0, 7, (2, 6))
            loss = (model(ids).float() * torch.rand(())).square().mean() / plan.accumulation
            loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        losses[step] = total
        if rank == plan.caller and step in plan.save_at:
            checkpointer.save(step)
        if plan.barrier_s and step == plan.save_at[0]:
            if rank == plan.caller:
                time.sleep(plan.barrier_s)
                checkpointer.save(1000 + step)  # while the others wait in the barrier
            dist.barrier()
    final = snapshot(model, optimizer)
    if rank == plan.caller:
        time.sleep(0.5)  # the others have come to the end of the script
    checkpointer.close()
    return begun, losses, final, [(s.step, s.state) for s in checkpointer.saves]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(Path()),
        Plan(Path(), sharding="ddp"),
        Plan(Path(), caller=1),
        Plan(Path(), accumulation=3),
        Plan(Path(), loader=False, sharding="ddp"),
        Plan(Path(), barrier_s=0.5),
    ],
    ids=["fsdp2", "ddp", "caller 1", "accumulation", "no loader", "barrier"],
)
def test_every_rank_is_saved_as_it_was_at_that_step(pool: RankPool, tmp_path: Path, plan: Plan) -> None:
    """The last step's save included; killed after step 6 and resumed, the run is the uninterrupted one, bit for bit."""
    plan.folder = tmp_path / "whole"
    whole = pool.run(train, 2, plan, timeout=60)
    steps = [3, 1003, 6, 8] if plan.barrier_s else [3, 6, 8]
    for _, _, _, saves in whole:
        assert saves == [(step, "complete") for step in steps]

    cut = Plan(**{**vars(plan), "folder": tmp_path / "cut", "kill_at": 7})
    assert pool.run(train, 2, cut, expect_death=True, timeout=60) == [Died(9), Died(9)]
    cut.kill_at = 0
    for (begun, losses, final, _), (_, all_losses, all_final, _) in zip(pool.run(train, 2, cut, timeout=60), whole, strict=True):
        assert begun == 6
        assert losses == {s: loss for s, loss in all_losses.items() if s > 6}
        assert differing(final, all_final) == []

    last = Plan(**{**vars(plan), "stop": 8})
    for begun, losses, final, _ in pool.run(train, 2, last, timeout=60):
        assert (begun, losses) == (8, {})
        assert differing(final, whole[0][2]) == []


def unsynchronised(folder: Path) -> list[tuple[int, str, str]]:
    """Ranks that share no gradients: the other one is steps ahead before it hears of the request."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = holdfast.Checkpointer(folder, model=model, optimizer=optimizer, one_caller=True, deadlines=DEADLINES)
    for step in range(1, 6):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if dist.get_rank() == 0 and step == 1:
            time.sleep(1.0)
            checkpointer.save(step)
    with contextlib.suppress(SaveFailed):
        checkpointer.close()
    return [(s.step, s.state, str(s.error)) for s in checkpointer.saves]


def test_a_loop_that_does_not_synchronise_is_told_so(pool: RankPool, tmp_path: Path) -> None:
    for states in pool.run(unsynchronised, 2, tmp_path, timeout=60):
        assert [(step, state) for step, state, _ in states] == [(1, "failed")]
        assert "failed on rank 1" in states[0][2]
        assert "the loop does not synchronise gradients at every step" in states[0][2]
    assert not (tmp_path / "checkpoint-1" / "manifest.json").exists()


def until_told(folder: Path, who: list[int], times: int, inside: bool) -> tuple[int, list[tuple[int, str]]]:
    """Trains until `should_stop`; the ranks in `who` get SIGTERM during step 3, some of them inside a collective."""
    rank = dist.get_rank()
    model = build("fsdp2")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    checkpointer = holdfast.Checkpointer(
        folder, model=model, optimizer=optimizer, stop_signals=(signal.SIGTERM, signal.SIGUSR1), deadlines=DEADLINES
    )
    step = checkpointer.resume()
    while step < 60:
        if step == 3:
            if inside and rank == 1:
                time.sleep(1.5)  # rank 0 sits in the forward's all-gather meanwhile
            if rank in who:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.05)
        if inside and step == 3 and rank == 0:
            import threading

            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        model(torch.randint(0, 7, (2, 6))).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(0.05)
        if checkpointer.should_stop:
            break
    checkpointer.close()
    return step, [(s.step, s.state) for s in checkpointer.saves]


@pytest.mark.parametrize(
    ("who", "times", "inside"), [([0], 1, False), ([1], 1, False), ([0, 1], 4, False), ([], 0, True)],
    ids=["rank 0", "rank 1", "all, four times", "in a collective"],
)  # fmt: skip
def test_a_signal_gives_one_checkpoint_and_one_stop(
    pool: RankPool, tmp_path: Path, who: list[int], times: int, inside: bool
) -> None:
    results = pool.run(until_told, 2, tmp_path, who, times, inside, timeout=60)
    (step, saves), other = results
    assert other == (step, saves)
    assert saves == [(step, "complete")]
    assert step < 60
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{step}"]


def other_signals(folder: Path) -> tuple[bool, bool]:
    """Ctrl-C is not one of them, and afterwards every signal does what it did before."""
    before = signal.getsignal(signal.SIGTERM)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    checkpointer = holdfast.Checkpointer(folder, model=model, optimizer=optimizer, stop_signals=[signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.5)
    called = checkpointer._watcher.call_to_stop is not None
    checkpointer.close()
    return called, signal.getsignal(signal.SIGTERM) is before


def test_only_the_signals_that_were_named_stop_a_run(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(other_signals, 1, tmp_path) == [(False, True)]


SCRIPT = """
import sys, time, torch, torch.distributed as dist, holdfast
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
checkpointer = holdfast.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, one_caller=True)
for step in range(1, 4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    time.sleep(1.5)
    checkpointer.save(3)
"""


def test_a_plain_script_that_just_ends(tmp_path: Path) -> None:
    """Under torchrun, nothing closed: the other rank has come to its end, and rank 0 still saves its last step for both."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29613", str(script), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "out" / "checkpoint-3"
    assert (folder / "manifest.json").exists()
    assert len(list(folder.glob("rank-*.safetensors"))) == 2


def in_a_row(folder: Path) -> tuple[list[tuple[int, str, str]], list[str]]:
    """Rank 0 saves three times after the last step, twice into one folder, while rank 1 makes no more steps; then rank 1 calls, too."""
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = holdfast.Checkpointer(folder, model=model, optimizer=optimizer, one_caller=True, deadlines=DEADLINES)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        for name in ("whole", "again", "again"):
            checkpointer.save(1, folder=name).finished.wait(30)
        checkpointer.save(1, folder="weights", weights_only=True).finished.wait(30)
    dist.barrier()
    if dist.get_rank() == 1:
        checkpointer.save(1, folder="whole")
        checkpointer.save(1, folder="weights", weights_only=True)
    checkpointer.close()
    weights = Checkpoint(LocalFolder(folder), "weights")
    return [(s.index, s.folder, s.state) for s in checkpointer.saves], sorted(weights.tensors)


def test_requests_in_a_row_and_a_late_caller(pool: RankPool, tmp_path: Path) -> None:
    """A rank that makes no more steps serves each request; one that calls after it was served joins instead of asking anew."""
    for saves, tensors in pool.run(in_a_row, 2, tmp_path):
        assert saves == [(i + 1, name, "complete") for i, name in enumerate(("whole", "again", "again", "weights"))]
        assert tensors == ["model.bias", "model.weight"]
