"""What was reported of checkpoint folders elsewhere, tried on one process: names, clocks, other runs, file systems that lack something."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import SaveFailed
from holdfast.storage import FileWriter, LocalFolder
from holdfast.testing.faults import Fault, FaultyFolder


@contextmanager
def run(folder: Any, **options: Any) -> Iterator[tuple[holdfast.Checkpointer, nn.Linear]]:
    """A run that has made one step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer, **options) as checkpointer:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        yield checkpointer, model


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_new_run_in_an_old_folder_keeps_what_it_saves(tmp_path: Path) -> None:
    """Its steps are lower than those that lie there, and no clock is to be believed: what was saved first goes first."""
    with run(tmp_path) as (checkpointer, _):
        for step in (500, 600, 700):
            checkpointer.save(step)
    for age, name in enumerate(("checkpoint-700", "checkpoint-600", "checkpoint-500")):
        for path in (tmp_path / name, *(tmp_path / name).iterdir()):
            os.utime(path, (2e9 + age, 2e9 + age))
    with run(tmp_path, keep_last=3) as (checkpointer, _):
        checkpointer.save(100)
        checkpointer.wait()
        assert left(tmp_path) == ["checkpoint-100", "checkpoint-600", "checkpoint-700"]
        checkpointer.save(200)
    assert left(tmp_path) == ["checkpoint-100", "checkpoint-200", "checkpoint-700"]
    with run(tmp_path) as (checkpointer, _):
        assert checkpointer.resume() == 200


def test_an_old_one_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    """With one to keep, a save that fails costs nothing; while one is being written, the one before it is there and complete."""
    with run(tmp_path, keep_last=1) as (checkpointer, _):
        checkpointer.save(1)
    failing = run(FaultyFolder(tmp_path, Fault("checkpoint-2", "write", "fail", errno.ENOSPC)), keep_last=1)
    with pytest.raises(SaveFailed, match="step 2 failed"), failing as (checkpointer, _):
        checkpointer.save(2)
    assert (tmp_path / "checkpoint-1" / "manifest.json").exists()
    with run(FaultyFolder(tmp_path, Fault("checkpoint-3", "write", "stall", seconds=0.5)), keep_last=1) as (checkpointer, _):
        save = checkpointer.save(3)
        assert not save.finished.is_set()
        shutil.copytree(tmp_path, tmp_path / "seen", ignore=lambda *_: [".holdfast", "seen"])
    assert left(tmp_path) == ["checkpoint-3"]
    with run(tmp_path / "seen") as (checkpointer, _):
        assert checkpointer.resume() == 1


@pytest.mark.parametrize("name", ["with a space", "Übergröße 模型", "new\nline", "100%s{0}", "n" * 200])
def test_any_name_of_an_output_folder_will_do(tmp_path: Path, name: str) -> None:
    with run(tmp_path / name) as (checkpointer, model):
        checkpointer.save(1)
    with run(tmp_path / name) as (checkpointer, again):
        assert checkpointer.resume() == 1
        assert torch.equal(again.weight, model.weight)


def test_folders_that_cannot_be_opened_are_not_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, some network file systems, and where a folder may be written and not listed."""
    original = os.open

    def no_folders(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_folders)
    with run(tmp_path) as (checkpointer, model):
        checkpointer.save(1)
    with run(tmp_path) as (checkpointer, again):
        assert checkpointer.resume() == 1
        assert torch.equal(again.weight, model.weight)


class Losing(LocalFolder):
    """A store that says yes to a large file and does not have it then."""

    def create(self, path: str, size: int) -> FileWriter:
        writer = super().create(path, size)
        if path.startswith("checkpoint-2/"):
            (self.root / path).unlink()
        return writer


def test_what_a_store_has_lost_is_not_committed(tmp_path: Path) -> None:
    """Every file is looked for before the manifest is written."""
    with run(tmp_path) as (checkpointer, _):
        checkpointer.save(1)
    with pytest.raises(SaveFailed, match="lacks the files of rank 0 although they were written"), run(Losing(tmp_path)) as (checkpointer, _):
        checkpointer.save(2)
    assert not (tmp_path / "checkpoint-2" / "manifest.json").exists()
    with run(tmp_path) as (checkpointer, _):
        assert checkpointer.resume() == 1
