"""`holdfast verify` and `holdfast repair`, as a user types them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = nn.Linear(3, 2)
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
            checkpointer.wait()
    return tmp_path


def damage(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"whole   checkpoint-{s}" for s in (3, 2, 1)]
    damage(folder / "checkpoint-2")
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "whole   checkpoint-3\nDAMAGED checkpoint-2\n        rank 0: block 0 of checkpoint-2/rank-00000-" in out
    assert "model.weight" in out
    assert main(["verify", str(folder / "checkpoint-3")]) == 0
    assert main(["verify", str(folder / "checkpoint-9")]) == 2
    assert "there is no complete checkpoint in" in capsys.readouterr().err


def test_a_checkpoint_of_another_version_is_not_called_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for one checkpoint as for a folder of them; what is damaged goes first."""
    manifest = folder / "checkpoint-2/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":1', b'"version":99'))
    for given in (folder, folder / "checkpoint-2"):
        assert main(["verify", str(given)]) == 2
        assert "UNKNOWN checkpoint-2\n" in (out := capsys.readouterr().out)
        assert "99" in out and "DAMAGED" not in out
    (folder / "checkpoint-1/manifest.json").write_text("{")
    assert main(["verify", str(folder)]) == 1
    assert "DAMAGED checkpoint-1\n" in capsys.readouterr().out


def test_repair(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = (folder / "checkpoint-3" / "manifest.json").read_bytes()
    (folder / "checkpoint-3" / "manifest.json").unlink()
    for name in ("manifest.json", "rank-*.json"):
        next((folder / "checkpoint-2").glob(name)).unlink()
    assert main(["repair", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "removed 2 files of interrupted saves from checkpoint-2",
        "completed checkpoint-3: all ranks had written it and only its manifest was missing or damaged",
    ]
    assert (folder / "checkpoint-3" / "manifest.json").read_bytes() == expected
    assert main(["repair", str(folder)]) == 0
    assert "nothing to repair" in capsys.readouterr().out
    assert main(["repair", str(folder / "nowhere")]) == 2


def test_repair_is_refused_while_a_job_lives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    with holdfast.Checkpointer(tmp_path, model=model):
        assert main(["repair", str(tmp_path)]) == 2
    assert "close() it first" in capsys.readouterr().err
