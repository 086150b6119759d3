"""A rank that is stopped, killed, or waits for a disk that never answers: named by number, host and phase; nobody waits for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import holdfast
from holdfast.engine.deadlines import Deadlines
from holdfast.errors import DeadlineExceeded, HoldfastError, SaveFailed
from holdfast.testing.faults import Fault, FaultyFolder
from holdfast.testing.pool import Died

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

VICTIM = 1


def train_beside(folder: Path, how: str) -> dict[str, Any]:
    """Ranks that need nothing of each other but the checkpoint. The victim is stuck when step 2 is saved."""
    rank, store = dist.get_rank(), _get_default_store()
    fault = Fault("checkpoint-2", "write", "stall", seconds=3600.0) if how == "disk" and rank == VICTIM else None
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    deadlines = Deadlines(handshake=20, agreement=20, capture=2, commit=2, goodbye=2, store=10)
    checkpointer = holdfast.Checkpointer(FaultyFolder(folder, fault), model=model, optimizer=optimizer, deadlines=deadlines)

    def step() -> None:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    checkpointer.save(1)
    checkpointer.wait()
    time.sleep(2.2)  # a heart beats every two seconds
    if rank == VICTIM and how != "disk":
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    step()
    start = time.monotonic()
    save = checkpointer.save(2)
    steps = 0
    while not save.finished.wait(0.01) and time.monotonic() - start < 6:
        step()
        steps += 1
    waited = time.monotonic() - start
    message = ""
    try:
        checkpointer.wait(timeout=1.0)
    except SaveFailed as error:
        message = str(error)
    except DeadlineExceeded as error:  # the victim itself, whose disk does not answer
        message = str(error)
    start = time.monotonic()
    try:
        checkpointer.close()
    except HoldfastError as error:
        message = message or str(error)
    closed = time.monotonic() - start
    if how == "stopped":
        os.kill(int(store.get("pid")), signal.SIGKILL) if rank == 0 else None
    return {"steps": steps, "waited": waited, "closed": closed, "message": message, "state": save.state}


@pytest.mark.parametrize(
    ("how", "phase"),
    [
        ("stopped", "in phase 'training' for 2 s, silent since: stopped, dead or cut off)"),
        ("killed", "in phase 'training' for 2 s, silent since: stopped, dead or cut off)"),
        ("disk", "with 'write of step 2' on its disk for "),
    ],
)
def test_it_is_named_and_the_others_train_on(pool: RankPool, tmp_path: Path, how: str, phase: str) -> None:
    results = pool.run(train_beside, 3, tmp_path, how, timeout=60, expect_death=True)
    for rank, result in enumerate(results):
        if rank == VICTIM:
            assert how == "disk" or result == Died(signal.SIGKILL)
            continue
        assert result["state"] == "failed"
        assert f"rank 1 did not deliver after 2 s: rank 1 ({socket.gethostname()}, last seen at step " in result["message"]
        assert phase in result["message"]
        assert "Earlier checkpoints are untouched and training goes on" in result["message"]
        assert result["steps"] > 100  # a step takes a hundredth of a second: nothing stood still
        assert 2.0 <= result["waited"] < 8.0  # the deadline, and a heartbeat to listen for
        # Goodbye's deadline; for a rank that lives it is waited until that one gives its disk up.
        assert result["closed"] < (40.0 if how == "disk" else 10.0)
    if how == "disk":  # the victim's own training and its end are not held up either
        assert results[VICTIM]["steps"] > 100
        assert results[VICTIM]["closed"] < 30.0  # what is allowed for capture and commit, and goodbye
    assert (tmp_path / "checkpoint-1" / "manifest.json").exists()
    assert not (tmp_path / "checkpoint-2" / "manifest.json").exists()
    assert pool.run(resumed_step, 3, tmp_path) == [1, 1, 1]


def resumed_step(folder: Path) -> int:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        return checkpointer.resume()


STUCK_AT_EXIT = """
import sys, torch, holdfast
from holdfast.errors import HoldfastError
from holdfast.engine.deadlines import Deadlines
from holdfast.testing.faults import Fault, FaultyFolder
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
folder = FaultyFolder(sys.argv[1], Fault("checkpoint-1", "write", "stall", seconds=3600.0))
checkpointer = holdfast.Checkpointer(folder, model=model, optimizer=optimizer, deadlines=Deadlines(capture=2, commit=2, goodbye=2))
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
checkpointer.save(1)
if sys.argv[2] == "close":
    try:
        checkpointer.close()
    except HoldfastError as error:
        print(error)
print("the end")
"""


@pytest.mark.parametrize("ending", ["close", "none"])
def test_a_disk_that_never_answers_does_not_keep_the_process(tmp_path: Path, ending: str) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", STUCK_AT_EXIT, str(tmp_path), ending], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["the end"]), done.stderr[-2000:]
    assert time.monotonic() - start < 60
    if ending == "close":
        assert "the save of step 1 is not done after" in done.stdout
        assert "did not end within 2 s" in done.stderr
