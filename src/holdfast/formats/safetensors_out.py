"""Safetensors files written as a stream: the header first, since names and shapes are known, then bytes as they come.

    model.safetensors, or model-00001-of-00002.safetensors … and model.safetensors.index.json

Memory: one buffer of `PIECE` bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch

from holdfast.core.boxes import Shape
from holdfast.core.safetensors import ITEM_SIZE, build_header, nbytes
from holdfast.storage import FileWriter, Storage

PIECE = 8 << 20
"""Bytes of one write."""

Described = tuple[str, str, Shape]
"""Name, safetensors dtype and shape of a tensor."""


def cut_into_files(tensors: Sequence[Described], stem: str, max_bytes: int) -> list[tuple[str, list[Described]]]:
    """File names with their tensors, wide types first, so that every view of a mapped file is aligned.

    A file holds at most `max_bytes` of tensors, or a single larger tensor.
    """
    groups: list[list[Described]] = [[]]
    size = 0
    for tensor in sorted(tensors, key=lambda t: (-ITEM_SIZE[t[1]], t[0])):
        n = nbytes(tensor[1], tensor[2])
        if groups[-1] and size + n > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += n
    if len(groups) == 1:
        return [(f"{stem}.safetensors", groups[0])]
    return [(f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups)]


def write_files(
    storage: Storage,
    folder: str,
    stem: str,
    files: Sequence[tuple[str, list[Described]]],
    data: Iterator[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write `files` into `folder`, and an index where there are several; returns the bytes of the tensors.

    `data` gives the content of all files' tensors in that order, in pieces of any size, none of which spans two tensors.
    """
    prefix = f"{folder}/" if folder else ""
    total = 0
    for name, tensors in files:
        total += write_file(storage, prefix + name, tensors, data, metadata)
    if len(files) > 1:
        where = {tensor[0]: name for name, tensors in files for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        storage.put(f"{prefix}{stem}.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())
    return total


def write_file(
    storage: Storage,
    path: str,
    tensors: Sequence[Described],
    data: Iterator[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """One file; takes from `data` what its tensors need. Returns the bytes of the tensors."""
    header, entries = build_header(tensors, {"format": "pt", **(metadata or {})})
    size = max((entry.stop for entry in entries.values()), default=len(header))
    file = storage.create(path, size)
    try:
        stream = Buffered(file)
        stream.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for name, _, _ in tensors:
            missing = entries[name].nbytes
            while missing:
                piece = as_bytes(next(data))
                missing -= len(piece)
                assert missing >= 0, name
                stream.write(piece)
        stream.flush()
        file.close(size)
    except BaseException:
        file.abort()
        raise
    return size - len(header)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The content of a tensor on the CPU as a vector of bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Buffered:
    """Bytes of tensors through one buffer into a file; each full buffer is one write."""

    def __init__(self, file: FileWriter, size: int = PIECE) -> None:
        self._file, self._size = file, size
        self._buffer = bytearray(size)
        self._bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._filled = 0

    def write(self, data: torch.Tensor) -> None:
        done = 0
        while done < len(data):
            n = min(self._size - self._filled, len(data) - done)
            self._bytes[self._filled : self._filled + n].copy_(data[done : done + n])
            self._filled += n
            done += n
            if self._filled == self._size:
                self.flush()

    def flush(self) -> None:
        if self._filled:
            view = memoryview(self._buffer)[: self._filled]
            self.seen(view)
            self._file.write(view)
            self._filled = 0

    def seen(self, data: memoryview) -> None:
        """Called with every write: for who hashes what goes by."""
