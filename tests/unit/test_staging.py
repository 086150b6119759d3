"""The staging's limit: a state that does not fit is written in pieces, byte for byte the same, before `save` returns."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.engine.deadlines import Deadlines
from holdfast.engine.memory import room_for_staging
from holdfast.engine.verify import verify
from holdfast.engine.writer import PIECE
from holdfast.errors import SaveFailed, UsageError
from holdfast.storage import LocalFolder
from holdfast.testing.faults import Fault, FaultyFolder


class Mixed(nn.Module):
    """45 MB with AdamW's state: a tensor over several windows, odd sizes, other types, one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(2048, 1500)
        self.narrow = nn.Parameter(torch.randn(333, 7, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(640, 480).t())
        self.register_buffer("wave", torch.randn(1001, dtype=torch.complex128))
        self.register_buffer("flags", torch.rand(12345) > 0.5)

    def forward(self) -> torch.Tensor:
        return self.large.weight.square().sum() + self.narrow.float().sum() + self.turned.sum() + self.large.bias.sum()


def saved(folder: Path, **options: Any) -> tuple[list[str], bytes, holdfast.engine.service.Save]:
    """One step and one save of the same state: the receipt's hashes, the file, and the record."""
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer, **options) as checkpointer:
        model().backward()
        optimizer.step()
        torch.manual_seed(5)
        save = checkpointer.save(1)
        model().backward()
        optimizer.step()  # the save is of the state before this one, however it was copied
    where = folder / "checkpoint-1"
    receipt = json.loads(next(where.glob("rank-*.json")).read_text())
    return receipt["blocks"], next(where.glob("rank-*.safetensors")).read_bytes(), save


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"one_caller": True}], ids=["default", "overlap", "one caller"])
def test_pieces_make_the_same_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]) -> None:
    whole = saved(tmp_path / "whole", **options)
    caplog.set_level(logging.INFO, "holdfast")
    pieces = saved(tmp_path / "pieces", staging_limit=PIECE, **options)
    assert len(whole[1]) > 2 * PIECE
    assert pieces[0] == whole[0]
    assert pieces[1] == whole[1]
    assert pieces[2].state == "complete"
    assert pieces[2].blocked_s >= pieces[2].written_s > 0
    assert "does not fit into a staging of 0.0 GB" in caplog.text
    assert "copied and written in pieces, since the staging is limited; the training waited" in caplog.text
    assert verify(LocalFolder(tmp_path / "pieces"), "checkpoint-1") == []


def test_a_disk_too_slow_for_it_opens_the_gate_and_fails_the_save(tmp_path: Path) -> None:
    folder = FaultyFolder(tmp_path, Fault("checkpoint-1", "write", "stall", seconds=3.0))
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    deadlines = Deadlines(commit=1, goodbye=5, capture=5)
    checkpointer = holdfast.Checkpointer(folder, model=model, optimizer=optimizer, staging_limit=PIECE, deadlines=deadlines)
    model().backward()
    optimizer.step()
    start = time.monotonic()
    checkpointer.save(1)
    assert 1.0 <= time.monotonic() - start < 2.5
    optimizer.step()
    with pytest.raises(SaveFailed, match="the copy of the state took longer than its deadline"):
        checkpointer.wait()
    checkpointer.close()
    assert list((tmp_path / "checkpoint-1").glob("rank-*")) == []


@pytest.mark.parametrize("limit", [PIECE - 1, 0, -5, "8GB", 1e9, True])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(UsageError, match="staging_limit is"):
        holdfast.Checkpointer(tmp_path, model=nn.Linear(2, 2), staging_limit=limit)


MEMINFO = "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n"  # 16 GiB


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "free_gib"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/memory.max": "max\n",
          "sys/fs/cgroup/job/step/memory.current": "5\n", "sys/fs/cgroup/job/memory.max": f"{6 << 30}\n",
          "sys/fs/cgroup/job/memory.current": f"{3 << 30}\n",
          "sys/fs/cgroup/job/memory.stat": f"anon 7\ninactive_file {1 << 30}\n"}, 4),
        ({"proc/self/cgroup": "4:cpu,memory:/j\n", "sys/fs/cgroup/memory/j/memory.limit_in_bytes": f"{9 << 30}\n",
          "sys/fs/cgroup/memory/j/memory.usage_in_bytes": f"{1 << 30}\n"}, 8),
        ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n"}, 16),
    ],
    ids=["no groups", "version 2, limit of a parent", "version 1", "version 1, no limit"],
)  # fmt: skip
def test_a_rank_takes_its_part_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free_gib: int
) -> None:
    root = host(tmp_path, {"proc/meminfo": MEMINFO, **files})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert room_for_staging(64, root) == int(0.8 * (free_gib << 30) / 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert room_for_staging(2, root) == int(0.8 * (free_gib << 30) / 2)


def test_a_save_waits_for_the_one_before_it_or_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = FaultyFolder(tmp_path, Fault("checkpoint-1", "write", "stall", seconds=1.0))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer, when_busy="skip") as checkpointer:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        first = checkpointer.save(1)
        skipped = checkpointer.save(2)
        assert first.state == "writing"
        waited = checkpointer.save(3, when_busy="wait")
        checkpointer.wait()
        assert [first.state, skipped.state, waited.state] == ["complete", "skipped", "complete"]
        assert waited.blocked_s > 0.5 > skipped.blocked_s
        assert checkpointer.save(4).finished.wait(10)  # nobody is busy any more
        folder.fault = Fault("checkpoint-5", "write", "stall", seconds=1.0)
        checkpointer.save(5)
        checkpointer.save(6)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{i}" for i in (1, 3, 4, 5)]
    assert "the save of step 2 is skipped: rank 0" in caplog.text
    assert "the last save, of step 6, was skipped" in caplog.text
    with pytest.raises(UsageError, match="when_busy is 'never'"):
        holdfast.Checkpointer(tmp_path, model=model, when_busy="never")  # type: ignore[arg-type]
