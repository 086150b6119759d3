"""Folders of `torch.distributed.checkpoint`: a `.metadata` file, and `.distcp` files with the pieces of the tensors.

`.metadata` is a pickle. It is read by an unpickler that knows the classes of DCP's metadata, torch's dtypes and paths, and
nothing else, so that a stranger's file can describe tensors and do no more. Every piece is a small file of `torch.save`
within a `.distcp` file and is read under `weights_only`; nothing is read before it is asked for.

Memory: a tensor that is asked for, and one piece of it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint
from holdfast.formats.pickles import load_pickle_from
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
        self._storage = LocalFolder(folder)
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

    def read(self, key: str) -> torch.Tensor:
        """A whole tensor.

        Raises:
            CorruptCheckpoint: a piece is missing or of another size, or the pieces do not fill the tensor.
        """
        dtype, shape = self.tensors[key]
        chunks = self._chunks[key]
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
            raise CorruptCheckpoint(f"{self.folder}: the pieces of {key} do not make up its shape {list(shape)}")
        whole = torch.empty(shape, dtype=dtype)
        for chunk in chunks:
            piece = self._load(key, torch.Size(chunk.offsets))
            if not isinstance(piece, torch.Tensor) or piece.dtype != dtype or tuple(piece.shape) != tuple(chunk.sizes):
                raise CorruptCheckpoint(f"{self.folder}: a piece of {key} is not what {METADATA} says")
            target = whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
            if target.shape != piece.shape:
                raise CorruptCheckpoint(f"{self.folder}: a piece of {key} lies outside of it")
            target.copy_(piece)
        return whole

    def value(self, key: str) -> Any:
        """An entry that is no tensor."""
        return self._load(key, None)

    def _load(self, key: str, offset: torch.Size | None) -> Any:
        assert self._index is not None or not self._where
        info = self._where.get(self._index(key, offset)) if self._index is not None else None
        if info is None:
            raise CorruptCheckpoint(f"{self.folder}: {METADATA} does not say where {key} lies")
        what = f"{key} in {self.folder / str(info.relative_path)}"
        if getattr(info, "transform_descriptors", None):
            raise IncompatibleCheckpoint(f"{what} was written through an extension ({info.transform_descriptors}), which is not read")
        data = bytearray(info.length)
        try:
            self._storage.read_into(str(info.relative_path), info.offset, memoryview(data))
        except (FileNotFoundError, EOFError) as error:
            raise CorruptCheckpoint(f"{what} is missing or cut short: {error}") from error
        return load_pickle_from(io.BytesIO(data), what)
