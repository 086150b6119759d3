"""Tensors of a checkpoint one after the other, by one process, in bounded pieces: what an export reads.

A tensor is cut into row ranges of at most `PIECE` bytes. Pieces that follow each other are read together, up to `PIECE`
bytes, so that small tensors that share hash blocks cost one read. Every block is checked against its hash.

Memory: one buffer of `PIECE` bytes, used again and again so that the heap does not grow by its own holes, and the readers'
buffers (`WORKERS` times that of `engine.blocks`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch

from holdfast.core.boxes import Box, Shape
from holdfast.core.layout import item_size
from holdfast.core.manifest import MANIFEST_FILE
from holdfast.engine.blocks import Part, read_parts
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.engine.resume import survey
from holdfast.errors import CheckpointNotFound, CorruptCheckpoint
from holdfast.formats.recognise import NATIVE, recognise
from holdfast.storage import LocalFolder

PIECE = 8 << 20
WORKERS = 2
_ALIGNED = 16
"""Bytes: what the widest dtype wants."""


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest complete one in the output folder `path`.

    Raises:
        CheckpointNotFound: there is neither; for another program's checkpoint it says how to import it.
    """
    path = path.absolute()
    parent = LocalFolder(path.parent)
    if (path / MANIFEST_FILE).is_file():
        return Checkpoint(parent, path.name)
    complete = survey(LocalFolder(path)).complete if path.is_dir() else []
    if complete:
        return Checkpoint(LocalFolder(path), complete[0].folder)
    kind = recognise(parent, path.name)
    if kind not in (None, NATIVE):
        raise CheckpointNotFound(f"{path} is {kind}: make a Holdfast checkpoint of it first: holdfast import {path} OUTPUT_DIR")
    return Checkpoint(parent, path.name)  # says what is there instead


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: `rank` is whose copy of a per-rank tensor to take, None for one with a place of its own."""

    name: str
    dtype: str
    shape: Shape
    rank: int | None = None

    @property
    def nbytes(self) -> int:
        return item_size(self.dtype) * prod(self.shape)


def stored(checkpoint: Checkpoint, name: str) -> Stored:
    """What the checkpoint knows of a tensor; of one that each rank has for itself, the first rank's that has it."""
    spec = checkpoint.tensors[name]
    if spec.shape is not None:
        return Stored(name, spec.dtype, spec.shape)
    for rank in sorted(checkpoint.here):
        if name in checkpoint.header(rank) or spec.base is not None:
            return Stored(name, spec.dtype, checkpoint.own(name, rank).whole.size, rank)
    raise CorruptCheckpoint(f"{checkpoint.where}: no rank's file has {name}")


def cuts(shape: Shape, item: int, limit: int = PIECE) -> Iterator[Box]:
    """Boxes of at most `limit` bytes (or of one element) that are consecutive in row-major order and fill `shape`."""
    if prod(shape) * item <= limit or not shape:
        yield Box.whole(shape)
        return
    strides = [item * prod(shape[d + 1 :]) for d in range(len(shape))]
    level = next(d for d in range(len(shape)) if strides[d] <= limit or d == len(shape) - 1)
    rows = max(1, limit // strides[level])
    for outer in product(*(range(n) for n in shape[:level])):
        for row in range(0, shape[level], rows):
            n = min(rows, shape[level] - row)
            offset = (*outer, row, *(0 for _ in shape[level + 1 :]))
            yield Box(offset, (*(1 for _ in outer), n, *shape[level + 1 :]))


def stream(checkpoint: Checkpoint, tensors: Iterable[Stored]) -> Iterator[tuple[Stored, Box, torch.Tensor]]:
    """The content of `tensors` in this order: for each of its `cuts` the box, and a tensor of the box's shape.

    The tensor's memory is used again: it holds until the next one is asked for.

    Raises:
        CorruptCheckpoint: a block is not what was written, or a file is missing.
    """
    memory = mmap.mmap(-1, PIECE)
    batch: list[tuple[Stored, Box, torch.Tensor]] = []
    used = 0
    for tensor in tensors:
        for box in cuts(tensor.shape, item_size(tensor.dtype)):
            n = -(-box.numel * item_size(tensor.dtype) // _ALIGNED) * _ALIGNED
            if used + n > PIECE:
                yield from _read(checkpoint, batch)
                batch, used = [], 0
            batch.append((tensor, box, _view(memory, used, box, DTYPE_OF[tensor.dtype])))
            used += n
    yield from _read(checkpoint, batch)


def _view(memory: mmap.mmap, offset: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Part of the buffer as a tensor with a storage of just its size."""
    if not box.numel:
        return torch.empty(box.size, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=box.numel, offset=offset).view(box.size)


def read_whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A whole tensor, for those that are known to be small."""
    tensor = stored(checkpoint, name)
    whole = torch.empty(tensor.shape, dtype=DTYPE_OF[tensor.dtype])
    for _, box, piece in stream(checkpoint, [tensor]):
        whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))] = piece
    return whole


def _read(checkpoint: Checkpoint, batch: list[tuple[Stored, Box, torch.Tensor]]) -> Iterator[tuple[Stored, Box, torch.Tensor]]:
    parts: dict[int, list[Part]] = {}
    for tensor, wanted, target in batch:
        filled = 0
        for rank, part in _parts(checkpoint, tensor, wanted, target):
            parts.setdefault(rank, []).append(part)
            filled += part.wanted.numel
        if filled != wanted.numel:
            raise CorruptCheckpoint(f"{checkpoint.where}: the pieces of {tensor.name} do not fill it")
    for rank, of_rank in sorted(parts.items()):
        read_parts(checkpoint.file(rank), of_rank, WORKERS)
    yield from batch


def _parts(checkpoint: Checkpoint, tensor: Stored, wanted: Box, target: torch.Tensor) -> Iterator[tuple[int, Part]]:
    if tensor.rank is not None:
        own = checkpoint.own(tensor.name, tensor.rank)
        yield own.source, Part(tensor.name, own.dtype, own.entry, own.whole, wanted, target)
        return
    for piece in checkpoint.pieces(tensor.name, checkpoint.tensors[tensor.name], wanted):
        common = piece.box.intersect(wanted) if piece.box.size else piece.box
        if common is None:
            continue
        inner = common.relative_to(wanted)
        view = target[tuple(slice(o, o + n) for o, n in zip(inner.offset, inner.size, strict=True))]
        yield piece.source, Part(tensor.name, piece.dtype, piece.entry, piece.whole, common, view)
