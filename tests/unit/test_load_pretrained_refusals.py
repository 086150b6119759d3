"""load_pretrained: what it refuses, how, and that the model is untouched then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from holdfast.engine.pretrained import load_pretrained
from holdfast.errors import CheckpointNotFound, CorruptCheckpoint, IncompatibleCheckpoint


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, device="meta")
    for folder, message in ((tmp_path / "none", "no such folder"), (tmp_path, "no such folder, or an empty one")):
        with pytest.raises(CheckpointNotFound, match=message) as caught:
            load_pretrained(model, folder)
        assert caught.value.exit_code == 2
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(CheckpointNotFound, match=r"only pytorch_model\.bin; convert them"):
        load_pretrained(model, tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "transformer").mkdir()
    (tmp_path / "text_encoder").mkdir()
    with pytest.raises(CheckpointNotFound, match="it holds text_encoder, transformer"):
        load_pretrained(model, tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.zeros(3, 2)}, r"does not fit this Linear: 1 missing there: bias"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(3), "more": torch.zeros(1)}, "unknown.*: more.*allow_unexpected"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, r"weight is float32\[2, 3\] in the folder and float32\[3, 2\]"),
        ({"weight": torch.zeros(3, 2).int(), "bias": torch.zeros(3)}, r"weight is int32\[3, 2\] in the folder"),
        ({"wait": torch.zeros(3, 2), "bias": torch.zeros(3)}, "weight.*wait.*pass key_mapping"),
    ],
)  # fmt: skip
def test_a_folder_of_another_model(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    model = nn.Linear(2, 3, device="meta")
    with pytest.raises(IncompatibleCheckpoint, match=message) as caught:
        load_pretrained(model, tmp_path)
    assert caught.value.exit_code == 2
    assert all(p.is_meta for p in model.parameters())
    if "more" in tensors:
        assert not load_pretrained(model, tmp_path, allow_unexpected=True).weight.is_meta


def header_of(tensors: dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(tensors).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


HOSTILE = {
    "cut short": b"\x10",
    "giant header": header_of({}, b"", length=1 << 62),
    "no json": (4).to_bytes(8, "little") + b"{{{{",
    "beyond the file": header_of({"weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}}, b"\0" * 8),
    "negative": header_of({"weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [-24, 0]}}, b"\0" * 24),
    "giant shape": header_of({"weight": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 24]}}, b"\0" * 24),
    "overlap": header_of(
        {
            "weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]},
            "bias": {"dtype": "F32", "shape": [3], "data_offsets": [20, 32]},
        },
        b"\0" * 32,
    ),
    "unknown dtype": header_of({"weight": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8),
    "a shape of words": header_of({"weight": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}, b"\0" * 8),
}  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors") as caught:
        load_pretrained(nn.Linear(2, 3, device="meta"), tmp_path)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("file", ["model-2.safetensors", "../outside.safetensors", "/etc/passwd", 7, None])
def test_a_hostile_index_is_refused(tmp_path: Path, file: object) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": file, "bias": file}}))
    with pytest.raises(CorruptCheckpoint, match="which is not there"):
        load_pretrained(nn.Linear(2, 3, device="meta"), folder)
    shutil.copy(tmp_path / "outside.safetensors", folder / "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"other": "model-2.safetensors"}}))
    with pytest.raises(CorruptCheckpoint, match="which does not hold it"):
        load_pretrained(nn.Linear(2, 3, device="meta"), folder)
