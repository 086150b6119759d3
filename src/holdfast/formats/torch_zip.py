"""Where the elements of a tensor lie that `torch.save` wrote, without reading them.

Such a file is a zip archive whose entries are stored as they are: `data.pkl` describes the tensor, `data/0` holds the elements.
The description is read by an unpickler that knows how torch rebuilds a tensor and nothing else, and builds none: it gives
dtype, shape and position. What is not a single contiguous tensor is left to torch.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.storage import Storage

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a zip entry: signature, then the lengths of its name and of the extra field, behind which the data begins."""

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Region:
    """`length` bytes from `offset` on in the file `path`, which has `file_size`."""

    path: str
    file_size: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor, row-major; its first element lies `start` bytes behind the beginning of the region."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class RegionReader(io.RawIOBase):
    """A region as a file of its own: nothing but what is asked for is read."""

    def __init__(self, storage: Storage, region: Region) -> None:
        self._storage, self._region, self._at = storage, region, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._region.length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        n = max(0, min(len(target), self._region.length - self._at))
        if n:
            self._storage.read_into(self._region.path, self._region.offset + self._at, target[:n])
            self._at += n
        return n


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class of storages by the type of its elements; None for one of bytes."""

    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Storage:
    """What stands in the pickle for a storage."""

    kind: _Kind
    key: str


def describe_tensor(storage: Storage, region: Region) -> Described | None:
    """The tensor that `torch.save` put into `region`; None where it is something else, or laid out otherwise."""
    try:
        with zipfile.ZipFile(io.BufferedReader(RegionReader(storage, region), 4096)) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "byteorder" in entries and archive.read(entries["byteorder"]) != sys.byteorder.encode():
                return None
            found = _Unpickler(io.BytesIO(archive.read(entries["data.pkl"]))).load()
            if not isinstance(found, tuple) or len(found) != 5:
                return None
            stored, dtype, at, shape, stride = found
            info = entries[f"data/{stored.key}"]
            if info.compress_type != zipfile.ZIP_STORED or stride != torch.empty(shape, device="meta").stride():
                return None
            start = _data_start(storage, region, info) + at * dtype.itemsize
            stop = at * dtype.itemsize + shape.numel() * dtype.itemsize
            return Described(dtype, tuple(shape), start) if stop <= info.file_size else None
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, EOFError, ValueError, TypeError, AttributeError, struct.error):
        return None


def _data_start(storage: Storage, region: Region, info: zipfile.ZipInfo) -> int:
    header = bytearray(_LOCAL_HEADER.size)
    storage.read_into(region.path, region.offset + info.header_offset, memoryview(header))
    signature, name, extra = _LOCAL_HEADER.unpack(header)
    if signature != b"PK\3\4":
        raise zipfile.BadZipFile
    return info.header_offset + len(header) + int(name) + int(extra)


class _Unpickler(pickle.Unpickler):
    """Builds numbers, tuples and `_Storage`: a tensor becomes (storage, dtype, offset, shape, strides)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _rebuild_typed
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return _Kind(_STORAGES.get(name))  # and not the class, which could be called
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, _ = pid
        if not isinstance(kind, _Kind) or not isinstance(key, str):
            raise pickle.UnpicklingError(f"storage {pid!r}")
        return _Storage(kind, key)


def _rebuild(
    stored: _Storage, at: int, shape: Any, stride: Any, grad: object, hooks: object, metadata: object = None
) -> Any:
    return _rebuild_typed(stored, at, shape, stride, grad, hooks, stored.kind.dtype, metadata)


def _rebuild_typed(
    stored: _Storage, at: int, shape: Any, stride: Any, grad: object, hooks: object, dtype: object, metadata: object = None
) -> Any:
    if metadata or not isinstance(dtype, torch.dtype) or not isinstance(stored, _Storage) or at < 0:
        raise pickle.UnpicklingError("no plain tensor")  # conjugated or negated views, say
    return stored, dtype, at, torch.Size(shape), tuple(stride)
