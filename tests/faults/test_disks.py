"""What a disk can do to a save: full, over quota, read-only, failing once or for ever, losing or cutting a file, taking little at a time.

The save fails with the cause on every rank, nothing of it stays, older checkpoints are untouched, and the training goes on.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.engine.verify import verify
from holdfast.errors import SaveFailed
from holdfast.storage import LocalFolder, local
from holdfast.testing.faults import Fault, FaultyFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

RANKS = 2
STRUCK = 1
"""The rank whose disk it is."""

FAULTS = {
    "quota": Fault("checkpoint-2", "write", "fail", errno.EDQUOT),
    "read-only": Fault("checkpoint-2", "close", "fail", errno.EROFS),
    "for ever": Fault("checkpoint-2", "create", "fail", errno.EIO, times=3),  # tried again twice
    "passing": Fault("checkpoint-2", "close", "fail", errno.EIO, times=2),
    "lost file": Fault("checkpoint-2", "close rank", "lose"),
    "lost receipt": Fault("checkpoint-2", "put rank", "lose"),
    "cut": Fault("checkpoint-2", "close rank", "cut"),
}
"""What happens to the second of three saves."""

Outcome = tuple[list[tuple[int, str]], list[str], list[float]]
"""How each save ended, what was said of failures, and a weight before each save and at the end."""


def shard() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def strike_all(folder: Path) -> dict[str, Outcome]:
    """Each fault in a folder of its own, on the disk of one rank, by name."""
    outcomes = {}
    for name, fault in FAULTS.items():
        model, optimizer = shard()
        storage = FaultyFolder(folder / name, fault if dist.get_rank() == STRUCK else None)
        failures, losses = [], []
        with holdfast.Checkpointer(storage, model=model, optimizer=optimizer) as checkpointer:
            for step in (1, 2, 3):
                loss = model(torch.ones(2, 8)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                checkpointer.save(step)
                try:
                    checkpointer.wait()
                except SaveFailed as error:
                    failures.append(str(error))
        outcomes[name] = [(save.step, save.state) for save in checkpointer.saves], failures, losses
    return outcomes


def resume(folder: Path) -> int:
    model, optimizer = shard()
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        return checkpointer.resume()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def struck(pool: RankPool, folder: Path) -> list[dict[str, Outcome]]:
    """By rank and fault; the training went on as if nothing had been."""
    for name in FAULTS:
        (folder / name).mkdir()
    outcomes: list[dict[str, Outcome]] = pool.run(strike_all, RANKS, folder)
    for by_fault in outcomes:
        assert len({tuple(losses) for _, _, losses in by_fault.values()}) == 1
        for saves, _, losses in by_fault.values():
            assert [step for step, _ in saves] == [1, 2, 3]
            assert (saves[0][1], saves[2][1]) == ("complete", "complete")
            assert losses == sorted(losses, reverse=True)
    for name in FAULTS:
        for step in (1, 3):
            assert verify(LocalFolder(folder / name), f"checkpoint-{step}") == []
    return outcomes


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("quota", "[Errno 122] Disk quota exceeded"),
        ("read-only", "[Errno 30] Read-only file system"),
        ("for ever", "[Errno 5] Input/output error"),
    ],
)
def test_an_error_of_one_disk_is_told_on_every_rank(folder: Path, struck: list[dict[str, Outcome]], name: str, cause: str) -> None:
    for by_fault in struck:
        saves, (failure,), _ = by_fault[name]
        assert saves[1] == (2, "failed")
        assert f"the save of step 2 failed on rank 1 ({os.uname().nodename}) in phase 'write': OSError: {cause}" in failure
    assert not list((folder / name / "checkpoint-2").glob("rank-*"))


def test_an_error_that_passes_the_second_time_costs_nothing(folder: Path, struck: list[dict[str, Outcome]]) -> None:
    for by_fault in struck:
        saves, failures, _ = by_fault["passing"]
        assert saves[1] == (2, "complete")
        assert failures == []
    assert verify(LocalFolder(folder / "passing"), "checkpoint-2") == []
    assert len(list((folder / "passing" / "checkpoint-2").glob("rank-*.safetensors"))) == RANKS


@pytest.mark.parametrize("name", ["lost file", "lost receipt"])
def test_a_file_that_vanishes_before_the_commit(folder: Path, struck: list[dict[str, Outcome]], name: str) -> None:
    for by_fault in struck:
        saves, (failure,), _ = by_fault[name]
        assert saves[1] == (2, "failed")
        where = folder / name / "checkpoint-2"
        assert f"{where} lacks the files of rank 1 although they were written: somebody has removed them" in failure
    assert not (where / "manifest.json").exists()


def test_a_file_that_is_cut_behind_the_save_is_never_loaded(pool: RankPool, folder: Path, struck: list[dict[str, Outcome]]) -> None:
    """Nothing could tell when the save completed; whoever loads it does, and takes the older one."""
    for by_fault in struck:
        saves, failures, _ = by_fault["cut"]
        assert saves[1] == (2, "complete")
        assert failures == []
    (damage,) = verify(LocalFolder(folder / "cut"), "checkpoint-2")
    assert "its receipt says" in str(damage)
    (folder / "cut" / "checkpoint-3").rename(folder / "newest")
    assert pool.run(resume, RANKS, folder / "cut") == [1] * RANKS


def test_a_disk_that_takes_a_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`write` may take less than it was given, and say so; direct I/O cannot go on in the middle of a block."""
    original, calls = os.write, [0]

    def little(descriptor: int, data: Any) -> int:
        calls[0] += 1
        return original(descriptor, memoryview(data)[:1000])

    monkeypatch.setattr(local.os, "write", little)
    model = torch.nn.Linear(50, 50)
    with holdfast.Checkpointer(tmp_path, model=model) as checkpointer:
        checkpointer.save(1)
    monkeypatch.undo()
    assert calls[0] > 20
    assert verify(LocalFolder(tmp_path), "checkpoint-1") == []


SMALL = """
import os, resource, sys, torch, holdfast
from pathlib import Path
from holdfast.errors import SaveFailed
folder = Path(sys.argv[1])
model = torch.nn.Linear(512, 512)  # 1 MiB, and a header
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
    checkpointer.save(1)
    checkpointer.wait()
    used = sum(f.stat().st_blocks * 512 for f in (folder / "checkpoint-1").glob("*.safetensors"))
    for step, how in enumerate(sys.argv[2:], 2):
        (folder / f"checkpoint-{step}").mkdir()
        if how == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, limits[1]))
        else:
            room = used if how == "full" else 512 << 10  # to the byte for the file, none for its receipt; or too little for the file
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
            (folder / "others").write_bytes(bytes(free - room))
        checkpointer.save(step)
        try:
            checkpointer.wait()
        except SaveFailed as error:
            print(step, error.args[0])
        print(sorted(p.name for p in (folder / f"checkpoint-{step}").iterdir()))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        (folder / "others").unlink(missing_ok=True)
    checkpointer.save(step + 1)
    checkpointer.wait()
with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
    print(checkpointer.resume())
"""


CAUSES = {
    "limit": "[Errno 27] File too large",
    "short": "bytes are missing for a file of 1,",
    "full": "[Errno 28] No space left on device",
}


def mounts(folder: Path) -> bool:
    """Whether this user may mount a file system of his own, in a namespace of his own."""
    script = f"mount -t tmpfs -o size=1m none {folder}"
    return subprocess.run(["unshare", "--map-root-user", "--mount", "sh", "-c", script], capture_output=True, check=False).returncode == 0


def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    """A real one, of 4 MiB: the space is looked at before the first byte; and where only the receipt finds no room, nothing stays.

    And a kernel that ends a file at a limit, which is all that is tried where nothing may be mounted.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    command, causes = [sys.executable, "-c", SMALL, str(disk)], ["limit"]
    if mounts(disk):
        script = f'mount -t tmpfs -o size=4m none "{disk}" && exec "$@"'
        command, causes = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", *command], list(CAUSES)
    done = subprocess.run([*command, *causes], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *lines, resumed = done.stdout.splitlines()
    assert len(lines) == 2 * len(causes)
    for step, (how, failure, left) in enumerate(zip(causes, lines[::2], lines[1::2], strict=True), 2):
        assert failure.startswith(f"{step} the save of step {step} failed on rank 0 (")
        assert CAUSES[how] in failure
        assert "Earlier checkpoints are untouched and training goes on." in failure
        assert left == "[]"
    assert resumed == str(2 + len(causes))
