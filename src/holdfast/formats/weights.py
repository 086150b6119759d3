"""Weights in a folder, whatever form they have: safetensors or pickles, one file or several and an index."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from holdfast.core.boxes import Box
from holdfast.errors import CheckpointNotFound, CorruptCheckpoint
from holdfast.formats.foreign import ForeignModel, Source, Stretch, clean, of_state_dict
from holdfast.formats.huggingface import StoredTensor, stored_tensors, tensors_of_file
from holdfast.formats.pickles import load_pickle
from holdfast.storage import LocalFolder

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
"""By safetensors name."""

_BIN_INDEX = "pytorch_model.bin.index.json"


def weights_of_folder(folder: Path) -> ForeignModel:
    """The model in `folder`, in any layout that transformers, diffusers or accelerate write.

    Raises:
        CheckpointNotFound: there are no weights.
        CorruptCheckpoint: an index names a file that is not there, or a header contradicts itself.
        IncompatibleCheckpoint: a pickle holds other things than tensors.
    """
    if (folder / "pytorch_model.bin").is_file():
        return of_state_dict(load_pickle(folder / "pytorch_model.bin"))
    if (folder / _BIN_INDEX).is_file():
        return _of_bin_index(folder)
    return of_safetensors(folder, stored_tensors(LocalFolder(folder, follow_links=True)))


def weights_of_file(path: Path) -> ForeignModel:
    """The model in one file, a pickle or safetensors."""
    if path.suffix == ".safetensors":
        return of_safetensors(path.parent, tensors_of_file(LocalFolder(path.parent, follow_links=True), path.name))
    return of_state_dict(load_pickle(path))


def of_safetensors(folder: Path, stored: dict[str, StoredTensor]) -> ForeignModel:
    """What lies in safetensors files of `folder`: read from there when it is asked for."""
    storage = LocalFolder(folder, follow_links=True)

    def source(tensor: StoredTensor) -> Source:
        entry, dtype = tensor.entry, DTYPES[tensor.entry.dtype]
        where = Stretch(storage, tensor.path, tensor.file_size, entry, dtype)
        return Source(dtype, entry.shape, lambda wanted: [(Box.whole(entry.shape), where)])

    return ForeignModel({clean(name): source(tensor) for name, tensor in stored.items()})


def _of_bin_index(folder: Path) -> ForeignModel:
    path = folder / _BIN_INDEX
    try:
        weight_map: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({Path(file).name for file in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path} is no index: {error}") from error
    merged: dict[str, torch.Tensor] = {}
    for file in files:
        if not (folder / file).is_file():
            raise CheckpointNotFound(f"{path} names {file}, which is not there: download it again")
        merged |= load_pickle(folder / file)
    if missing := sorted(weight_map.keys() - merged.keys()):
        raise CorruptCheckpoint(f"{path} names {missing[0]}, which none of its files holds")
    return of_state_dict(merged)
