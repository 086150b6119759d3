"""Many jobs that begin on one folder in the same instant: one of them trains, the others are told who does."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from holdfast.engine import lease
from holdfast.engine.lease import Lease
from holdfast.engine.store import Run
from holdfast.errors import SaveFailed, UsageError
from holdfast.storage import LocalFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

JOBS, ROUNDS = 8, 10
DEAD = {"run_sequence": 7, "nonce": "00", "host": "elsewhere", "pid": 1, "namespace": "", "beat": 4, "released": False}


def begin(folder: Path, owner: str) -> list[tuple[int, int, str]]:
    """Each rank is a job of its own: its process, its sequence number (0 for one that is refused), and what it was told."""
    lease.PATIENCE = 5.0  # several processes that make files durable at once take a while
    told = []
    for number in range(ROUNDS if owner == "nobody" else 3):
        storage = LocalFolder(folder / str(number))
        if dist.get_rank() == 0:
            (storage.root / ".holdfast").mkdir(parents=True)
            if owner != "nobody":
                name = "run.json" if owner == "dead" else "claim-7"
                (storage.root / ".holdfast" / name).write_text(json.dumps(DEAD))
        dist.barrier()
        mine = Lease(storage)
        try:
            told.append((os.getpid(), mine.take([], str(folder)).run_sequence, ""))
        except UsageError as error:
            told.append((os.getpid(), 0, str(error)))
        dist.barrier()
        mine.check()  # nobody takes it from who has it
        dist.barrier()
        mine.release()
    return told


@pytest.mark.parametrize(("owner", "sequence"), [("nobody", 1), ("dead", 8), ("dead before its note", 8)])
def test_of_many_that_begin_at_once_one_trains(pool: RankPool, tmp_path: Path, owner: str, sequence: int) -> None:
    for jobs in zip(*pool.run(begin, JOBS, tmp_path, owner, timeout=60), strict=True):
        winners = [pid for pid, found, _ in jobs if found]
        assert len(winners) == 1
        for _, found, message in jobs:
            assert found == sequence or (
                f"another job (process {winners[0]} on {socket.gethostname()}) is saving to {tmp_path}" in message
                and "give this one a folder of its own, or stop the other" in message
            )


def test_a_newcomer_that_was_held_up_finds_its_number_taken(tmp_path: Path) -> None:
    """It looked before another job began, and claims after that one has ended and a third has begun."""
    storage = LocalFolder(tmp_path)
    late, second, third = Lease(storage), Lease(storage), Lease(storage)
    number = late.await_free([])
    assert second.take([], "").run_sequence == number == 1
    second.release()
    assert third.take([], "").run_sequence == 2
    assert sorted(p.name for p in (tmp_path / ".holdfast").iterdir()) == ["claim-2", "run.json"]
    assert not late._claim(Run.begin(number, ""))
    third.check()
    third.release()
    assert sorted(p.name for p in (tmp_path / ".holdfast").iterdir()) == ["claim-2", "run.json"]


def test_an_owner_that_was_stopped_finds_a_later_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even before the note of the job that took the folder over is there; and its own beats cost that one nothing."""
    storage = LocalFolder(tmp_path)
    stopped, heir = Lease(storage), Lease(storage)
    stopped.take([], "")
    monkeypatch.setattr(lease, "_alive", lambda note: False)
    assert heir._claim(Run.begin(heir.await_free([]), ""))
    with pytest.raises(SaveFailed, match=rf"was taken over by process {os.getpid()} on "):
        stopped.check()
    heir._put_beat()
    note = json.loads((tmp_path / ".holdfast" / "run.json").read_text())
    assert (note["run_sequence"], note["nonce"]) == (2, heir._note["nonce"])
    (tmp_path / ".holdfast" / "run.json").write_text(json.dumps(stopped._note))  # a beat that was under way
    heir._look()
    assert not heir.lost
    stopped.release()
    assert json.loads((tmp_path / ".holdfast" / "run.json").read_text())["released"] is False
