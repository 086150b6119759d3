"""A folder of pretrained weights as transformers and diffusers write it: which tensor lies in which file, and where.

    model.safetensors                                   one file, or
    model.safetensors.index.json                        {"weight_map": {tensor: file}}
    model-00001-of-00002.safetensors, …                 and the files that it names

with `diffusion_pytorch_model` for `model` in diffusers, and a variant before the last part of the name: `model.fp16.safetensors`,
`model.safetensors.index.fp16.json`. Only headers and the index are read here, and they are believed in nothing: the folder
may be a stranger's.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from holdfast.core.documents import Fields, parse
from holdfast.core.safetensors import Entry, header_length, parse_header
from holdfast.errors import CheckpointNotFound, CorruptCheckpoint
from holdfast.storage import Storage

_STEMS = ("diffusion_pytorch_model", "model")
_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the folder: as `name` in the file `path` (of `file_size` bytes), where `entry` says it lies."""

    path: str
    file_size: int
    entry: Entry
    name: str


def stored_tensors(storage: Storage, variant: str | None = None) -> dict[str, StoredTensor]:
    """Every tensor of the folder by the name it is stored under; a single file goes before an index.

    Raises:
        CheckpointNotFound: there is no such folder, or no safetensors weights in it (of that variant).
        CorruptCheckpoint: a file that the index names is missing, or a header or the index contradicts itself.
    """
    names = set(storage.names(""))
    middle = f".{variant}" if variant else ""
    for stem in _STEMS:
        single = f"{stem}{middle}{_SUFFIX}"
        if single in names:
            return tensors_of_file(storage, single)
        index = f"{stem}{_SUFFIX}.index{middle}.json"
        if index in names:
            return _of_index(storage, index, names)
    raise CheckpointNotFound(_what_is_there_instead(storage.describe(), names, variant))


def stored_in_any_variant(storage: Storage) -> dict[str, StoredTensor]:
    """The weights without a variant, or of the first variant there is.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: as `stored_tensors`.
    """
    names = storage.names("")
    variants = sorted({n.split(".")[1] for n in names if n.endswith(_SUFFIX) and n.count(".") > 1})
    for variant in variants:
        if not any(f"{stem}{_SUFFIX}" in names or f"{stem}{_SUFFIX}.index.json" in names for stem in _STEMS):
            with contextlib.suppress(CheckpointNotFound):
                return stored_tensors(storage, variant)
    return stored_tensors(storage)


def tensors_of_file(storage: Storage, path: str) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file by name."""
    what = f"{path} of {storage.describe()}"
    size = storage.size(path)
    first = bytearray(min(8, size))
    storage.read_into(path, 0, memoryview(first))
    header = bytearray(header_length(bytes(first), size, what))
    storage.read_into(path, 0, memoryview(header))
    entries, _ = parse_header(bytes(header), size, what)
    return {name: StoredTensor(path, size, entry, name) for name, entry in entries.items()}


def _of_index(storage: Storage, path: str, names: set[str]) -> dict[str, StoredTensor]:
    what = f"{path} of {storage.describe()}"
    weight_map = Fields(parse(storage.get(path), what), what).get("weight_map", dict)
    files: dict[str, dict[str, StoredTensor]] = {}
    found: dict[str, StoredTensor] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file not in names:
            raise CorruptCheckpoint(f"{what} has tensor {name!r} in {file!r}, which is not there: download it again")
        if file not in files:
            files[file] = tensors_of_file(storage, file)
        if name not in files[file]:
            raise CorruptCheckpoint(
                f"{what} has tensor {name!r} in {file!r}, which does not hold it: download it again"
            )
        found[name] = files[file][name]
    return found


def _what_is_there_instead(folder: str, names: set[str], variant: str | None) -> str:
    if not names:
        return f"{folder}: no such folder, or an empty one; give the folder that holds config.json and the weights"
    wanted = f"safetensors weights of variant {variant!r}" if variant else "safetensors weights"
    weights = sorted(
        name for name in names if name.endswith((_SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5"))
    )
    if not weights:
        subfolders = sorted(name for name in names if "." not in name)
        return f"{folder}: no {wanted} there; it holds {', '.join(subfolders[:8]) or 'no folder with some either'}"
    shown = ", ".join(weights[:4])
    if any(name.endswith(_SUFFIX) for name in weights):
        return f"{folder}: no {wanted} there, only {shown}; choose one of these by `variant`"
    return f"{folder}: no {wanted} there, only {shown}; convert them (save_pretrained writes safetensors)"
