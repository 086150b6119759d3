"""Folders of `torch.distributed.checkpoint`: a `.metadata` file, and `.distcp` files with the pieces of the tensors.

`.metadata` is a pickle. It is read by an unpickler that knows the classes of DCP's metadata, torch's dtypes and paths, and
nothing else, so that a stranger's file can describe tensors and do no more. Every piece is a small file of `torch.save`
within a `.distcp` file: where its elements lie is found out (`formats.torch_zip`), so that any part of a tensor costs the bytes
of that part; an unusual piece is read whole under `weights_only`. Nothing is read before it is asked for.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from holdfast.core.boxes import Box
from holdfast.core.safetensors import Entry
from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint
from holdfast.formats.foreign import Loader, Stretch
from holdfast.formats.pickles import load_pickle_from
from holdfast.formats.torch_zip import Region, RegionReader, describe_tensor
from holdfast.storage import LocalFolder

METADATA = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            return PurePosixPath  # where it once lay; never opened
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


class DcpFolder:
    """One such folder. `tensors` maps each flat key to dtype and global shape, `values` names the other entries.

    Raises:
        CorruptCheckpoint: the metadata cannot be read.
        IncompatibleCheckpoint: it holds objects of other classes than DCP's own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._storage = LocalFolder(folder, follow_links=True)
        metadata = self._read_metadata()
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.values: list[str] = []
        self._chunks: dict[str, list[Any]] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                self.tensors[key] = entry.properties.dtype, tuple(entry.size)
                self._chunks[key] = list(entry.chunks)
            else:
                self.values.append(key)
        self._where: Mapping[Any, Any] = metadata.storage_data or {}
        self._index = type(next(iter(self._where))) if self._where else None
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        self._sizes: dict[str, int] = {}
        self._paths = {key: tuple(path) for key, path in paths.items()}

    def _read_metadata(self) -> Any:
        path = self.folder / METADATA
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except pickle.UnpicklingError as error:
            if str(error).startswith("GLOBAL "):
                raise IncompatibleCheckpoint(
                    f"{path} is refused: it is a pickle with an object of {str(error)[7:]}, which is none of DCP's own metadata"
                ) from None
            raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error
        except (EOFError, ValueError, TypeError, AttributeError, ImportError, IndexError, KeyError) as error:
            raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error
        if not hasattr(metadata, "state_dict_metadata") or not isinstance(metadata.state_dict_metadata, dict):
            raise CorruptCheckpoint(f"{path} is no DCP metadata")
        return metadata

    def path(self, key: str) -> tuple[str | int, ...]:
        """Where a flat key stands in the nested state that was saved; the key alone where it was not nested."""
        return self._paths.get(key, (key,))

    @property
    def entries(self) -> list[str]:
        return [*self.tensors, *self.values]

    def pieces(self, key: str, wanted: Box) -> Iterator[tuple[Box, Stretch | Loader]]:
        """The pieces of a tensor that meet `wanted`: where the elements of each lie, or the piece itself where it is not plain.

        Raises:
            CorruptCheckpoint: a piece is missing or of another size, or the pieces do not fill the tensor.
        """
        dtype, shape = self.tensors[key]
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._chunks[key]]
        if sum(box.numel for box in boxes) != prod(shape):
            raise CorruptCheckpoint(f"{self.folder}: the pieces of {key} do not make up its shape {list(shape)}")
        for box in boxes:
            if len(box.size) != len(shape) or any(o + n > m for o, n, m in zip(box.offset, box.size, shape, strict=True)):
                raise CorruptCheckpoint(f"{self.folder}: a piece of {key} lies outside of it")
            if box.intersect(wanted) is None:
                continue
            place, what = self._place(key, torch.Size(box.offset))
            described = describe_tensor(self._storage, place)
            if described is None:
                yield box, partial(self._piece, key, box, place, what)
                continue
            if (described.dtype, described.shape) != (dtype, box.size):
                raise CorruptCheckpoint(f"{self.folder}: a piece of {key} is not what {METADATA} says")
            start = place.offset + described.start
            entry = Entry("", box.size, start, start + box.numel * dtype.itemsize)
            yield box, Stretch(self._storage, place.path, place.file_size, entry, dtype)

    def _piece(self, key: str, box: Box, place: Region, what: str) -> torch.Tensor:
        piece = self._load(place, what)
        if not isinstance(piece, torch.Tensor) or (piece.dtype, tuple(piece.shape)) != (self.tensors[key][0], box.size):
            raise CorruptCheckpoint(f"{self.folder}: a piece of {key} is not what {METADATA} says")
        return piece

    def value(self, key: str) -> Any:
        """An entry that is no tensor."""
        return self._load(*self._place(key, None))

    def _place(self, key: str, offset: torch.Size | None) -> tuple[Region, str]:
        """Where the file of one piece or value lies, and what to call it."""
        info = self._where.get(self._index(key, offset)) if self._index is not None else None
        if info is None:
            raise CorruptCheckpoint(f"{self.folder}: {METADATA} does not say where {key} lies")
        path = str(info.relative_path)
        what = f"{key} in {self.folder / path}"
        if getattr(info, "transform_descriptors", None):
            raise IncompatibleCheckpoint(f"{what} was written through an extension ({info.transform_descriptors}), which is not read")
        try:
            if path not in self._sizes:
                self._sizes[path] = self._storage.size(path)
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{what} is missing: {error}") from error
        if info.offset + info.length > self._sizes[path]:
            raise CorruptCheckpoint(f"{what} is cut short: the file has {self._sizes[path]:,} bytes of {info.offset + info.length:,}")
        return Region(path, self._sizes[path], info.offset, info.length), what

    def _load(self, place: Region, what: str) -> Any:
        return load_pickle_from(RegionReader(self._storage, place), what)
