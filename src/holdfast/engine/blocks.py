"""Reading parts of tensors out of a file: only the blocks that the parts touch, each once, checked, straight into place.

A part is a box of a tensor that lies in the file, and the tensor (a view of the caller's shard) that receives it. Where a part
needs the whole of a block, and its memory is laid out as the file is, the block is read into that memory; else it passes through a
buffer, a quarter of a block at a time, out of which each part takes its elements. Hashing goes along with the reading. Where a
part's rows are longer than a block, the gaps between its columns are not read. A file without hashes is read in the same way, by
the ranges that the parts need instead of by blocks.

Memory: for each worker one buffer of `BUFFER` bytes, a quarter of a block.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import xxhash

from holdfast.core.boxes import Box
from holdfast.core.flat import boxes
from holdfast.core.layout import item_size
from holdfast.core.manifest import BLOCK
from holdfast.core.safetensors import Entry
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.errors import CorruptCheckpoint
from holdfast.storage import Storage

BUFFER = BLOCK // 4
"""Bytes read at once. What was read is hashed and copied while it is in the processor's cache, and a load needs little memory
beside the shards that it fills."""

WORKERS = 4
"""Reading, hashing and copying leave the GIL; a few workers keep a disk busy while others hash."""

_GAP = 4096
"""Ranges of a file without hashes that lie closer together than this are read as one."""


@dataclass(frozen=True, slots=True)
class Part:
    """`wanted` (within `piece`, both boxes of the global tensor) goes into `target`, a tensor of the shape `wanted.size`.

    `entry` says where the file holds `piece`, row-major; `dtype` is its element type's name (C128 stands as F64 pairs).
    """

    name: str
    dtype: str
    entry: Entry
    piece: Box
    wanted: Box
    target: torch.Tensor


@dataclass(frozen=True)
class BlockFile:
    """A file and, where they are known, the hashes of its blocks."""

    storage: Storage
    path: str
    size: int
    hashes: Sequence[str] | None = None
    block_size: int = BLOCK

    def take(self, start: int, stop: int) -> bytearray:
        """Bytes `start..stop`, out of blocks that are checked without being kept: for what is small and lies anywhere.

        Raises:
            CorruptCheckpoint: the file ends early, or a block's hash is another one.
        """
        if self.hashes is None:
            data = bytearray(stop - start)
            self.fetch(start, memoryview(data))
            return data
        taken = bytearray(stop - start)
        buffer = memoryview(bytearray(min(BUFFER, self.size)))
        for index in range(start // self.block_size, -(-stop // self.block_size)):
            hashed, end = xxhash.xxh3_128(), min((index + 1) * self.block_size, self.size)
            for at in range(index * self.block_size, end, BUFFER):
                piece = buffer[: min(BUFFER, end - at)]
                self.fetch(at, piece)
                hashed.update(piece)
                low, high = max(at, start), min(at + len(piece), stop)
                if low < high:
                    taken[low - start : high - start] = piece[low - at : high - at]
            self.check(index, hashed.hexdigest())
        return taken

    def fetch(self, start: int, target: memoryview) -> None:
        """Fill `target` with any bytes of the file, unchecked; CorruptCheckpoint where it ends early."""
        try:
            self.storage.read_into(self.path, start, target)
        except EOFError as error:
            raise CorruptCheckpoint(f"{self.path} of {self.storage.describe()} is cut short: {error}") from error

    def check(self, index: int, found: str) -> None:
        """Raises CorruptCheckpoint where the hash of a block is another one than `found`."""
        assert self.hashes is not None
        if found != self.hashes[index]:
            raise CorruptCheckpoint(
                f"{self.path} of {self.storage.describe()}: block {index} (bytes from {index * self.block_size:,}) "
                "is not what was written; take another checkpoint"
            )


@dataclass(frozen=True, slots=True)
class _Wish:
    """A part as bytes `first` to `last` of the file: `wanted` is counted within a tensor of shape `size` that begins at `start`."""

    start: int
    item: int
    dtype: torch.dtype
    size: tuple[int, ...]
    wanted: Box
    target: torch.Tensor
    first: int
    last: int
    run: int | None
    """Address of the memory that takes all of these bytes as they are, if that is so."""


@dataclass(slots=True)
class _Window:
    """Bytes that are read together, and who wants something of them: a block, or of a file without hashes a range."""

    start: int
    stop: int
    wishes: list[_Wish]


def read_parts(file: BlockFile, parts: Sequence[Part], workers: int = WORKERS) -> int:
    """Fill the targets of `parts`; returns the bytes read.

    Raises:
        CorruptCheckpoint: a block's hash differs or the file ends early; targets may be partly filled then.
        OSError: the storage cannot read.
    """
    wishes = [wish for part in parts if (wish := _wish(part, file.hashes is not None)) is not None]
    windows = _ranges(wishes) if file.hashes is None else _blocks(wishes, file)
    if not windows:
        return 0
    share = -(-len(windows) // workers)
    jobs = [windows[i : i + share] for i in range(0, len(windows), share)]
    with ThreadPoolExecutor(len(jobs), "holdfast-read") as pool:
        return sum(pool.map(lambda job: _read_windows(file, job), jobs))


def _wish(part: Part, in_blocks: bool) -> _Wish | None:
    item, dtype, target = item_size(part.dtype), DTYPE_OF[part.dtype], part.target.detach()
    wanted, size = part.wanted.relative_to(part.piece), part.piece.size
    if part.wanted.numel == 0:
        return None
    if part.dtype == "C128":  # pairs of F64 in the file
        item, dtype, target = 8, torch.float64, torch.view_as_real(target)
        wanted, size = Box((*wanted.offset, 0), (*wanted.size, 2)), (*size, 2)
    if in_blocks and part.entry.start % item:  # an element may lie in two blocks: taken by its bytes
        wanted, size = Box((*wanted.offset, 0), (*wanted.size, item)), (*size, item)
        item, dtype, target = 1, torch.uint8, target.unsqueeze(-1).view(torch.uint8)
    strides = [item * prod(size[d + 1 :]) for d in range(len(size))]
    first = part.entry.start + sum(o * s for o, s in zip(wanted.offset, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(wanted.size, strides, strict=True)) + item
    straight = last - first == wanted.numel * item and target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
    return _Wish(part.entry.start, item, dtype, size, wanted, target, first, last, target.data_ptr() if straight else None)


def _stretches(wish: _Wish) -> Iterator[tuple[int, int]]:
    """Ranges of the file without a gap of a block: let `level` be the first dimension whose rows (one index of it) are at most a
    block long. What lies between the wanted elements of one of its rows and of the next is shorter; outer dimensions are walked."""
    size, wanted = wish.size, wish.wanted
    strides = [wish.item * prod(size[d + 1 :]) for d in range(len(size))]
    level = next((d for d in range(len(size)) if strides[d] <= BLOCK), 0)
    length = sum((n - 1) * s for n, s in zip(wanted.size[level:], strides[level:], strict=True)) + wish.item
    for outer in product(*(range(n) for n in wanted.size[:level])):
        begin = wish.first + sum(i * s for i, s in zip(outer, strides, strict=False))
        yield begin, begin + length


def _blocks(wishes: Sequence[_Wish], file: BlockFile) -> list[_Window]:
    found: dict[int, list[_Wish]] = {}
    for wish in wishes:
        last = -1
        for start, stop in _stretches(wish):
            for block in range(max(last + 1, start // file.block_size), -(-stop // file.block_size)):
                found.setdefault(block, []).append(wish)
                last = block
    size = file.block_size
    return [_Window(block * size, min((block + 1) * size, file.size), found[block]) for block in sorted(found)]


def _ranges(wishes: Sequence[_Wish]) -> list[_Window]:
    """Ranges of whole elements, of at most a buffer; those that lie beside each other are one."""
    cut = []
    for wish in wishes:
        step = BUFFER // wish.item * wish.item
        for start, stop in _stretches(wish):
            cut += [_Window(at, min(at + step, stop), [wish]) for at in range(start, stop, step)]
    cut.sort(key=lambda window: window.start)
    merged: list[_Window] = []
    for window in cut:
        before = merged[-1] if merged else None
        if before and window.start <= before.stop + _GAP and max(window.stop, before.stop) - before.start <= BUFFER:
            before.stop = max(before.stop, window.stop)
            before.wishes += window.wishes
        else:
            merged.append(window)
    return merged


def _read_windows(file: BlockFile, windows: Sequence[_Window]) -> int:
    buffer = mmap.mmap(-1, min(BUFFER, max(w.stop - w.start for w in windows)))  # given back at once, which a heap would not do
    view, scratch = memoryview(buffer), torch.frombuffer(buffer, dtype=torch.uint8)
    with torch.no_grad(), file.storage.opened(file.path):
        for window in windows:
            _read_window(file, window, view, scratch)
    return sum(w.stop - w.start for w in windows)


def _read_window(file: BlockFile, window: _Window, view: memoryview, scratch: torch.Tensor) -> None:
    straight = next((w for w in window.wishes if w.run and w.first <= window.start and window.stop <= w.last), None)
    others = [w for w in window.wishes if w is not straight]
    hashed = xxhash.xxh3_128() if file.hashes is not None else None
    if straight is not None:
        assert straight.run is not None
        place = memoryview((ctypes.c_char * (window.stop - window.start)).from_address(straight.run + window.start - straight.first)).cast("B")
    for start in range(window.start, window.stop, BUFFER):
        n = min(BUFFER, window.stop - start)
        if straight is None:
            data, raw = view[:n], scratch[:n]
        else:
            data = place[start - window.start :][:n]
            raw = torch.frombuffer(data, dtype=torch.uint8) if others else scratch
        file.fetch(start, data)
        if hashed is not None:
            hashed.update(data)
        for wish in others:
            if wish.first < start + n and start < wish.last:
                _deliver(wish, raw, start, start + n)
    if hashed is not None:
        file.check(window.start // file.block_size, hashed.hexdigest())


def _deliver(wish: _Wish, raw: torch.Tensor, start: int, stop: int) -> None:
    """Copy what `wish` wants out of the bytes `start..stop` of the file, which are `raw`."""
    first = max(0, -(-(start - wish.start) // wish.item))
    last = min(prod(wish.size), (stop - wish.start) // wish.item)
    for box, at in boxes(wish.size, first, last):
        common = box.intersect(wish.wanted)
        if common is None:
            continue
        begin = wish.start + (first + at) * wish.item - start
        data = raw[begin : begin + box.numel * wish.item]
        if data.storage_offset() % wish.item:
            data = data.clone()
        piece = data.view(wish.dtype).view(box.size)[common.relative_to(box).slices()]
        wish.target[common.relative_to(wish.wanted).slices()].copy_(piece)
