"""Reading parts of tensors out of a file: only the blocks that the parts touch, each once, checked, straight into place.

A part is a box of a tensor that lies in the file, and the tensor (a view of the caller's shard) that receives it. Parts are
cut into *spans*, ranges of the file that are short enough for a bounded buffer, and spans that share blocks are read
together as one *group*. Where a part's rows are longer than a block, the gaps between its columns are not read.

Memory: for each worker one buffer of `GROUP` bytes, and two blocks: where a span straddles them, and the last one read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import torch

from holdfast.core.boxes import Box
from holdfast.core.documents import digest
from holdfast.core.layout import item_size
from holdfast.core.manifest import BLOCK
from holdfast.core.safetensors import Entry
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.errors import CorruptCheckpoint
from holdfast.storage import Storage

GROUP = 2 * BLOCK
"""Bytes read at once. Four times as much was 5 % faster (2.8 against 3.0 GB/s out of the page cache, hashed, two cores), and a
load should need little memory beside the shards that it fills."""

WORKERS = 4
"""Reading, hashing and copying leave the GIL; a few workers keep a disk busy while others hash."""


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

    def read(self, start: int, target: memoryview) -> None:
        """Fill `target` from byte `start`, the beginning of a block, on; `target` ends with a block or with the file.

        Raises:
            CorruptCheckpoint: the file ends early, or a block's hash is another one.
        """
        try:
            self.storage.read_into(self.path, start, target)
        except EOFError as error:
            raise CorruptCheckpoint(f"{self.path} of {self.storage.describe()} is cut short: {error}") from error
        if self.hashes is None:
            return
        for offset in range(0, len(target), self.block_size):
            index = (start + offset) // self.block_size
            if digest(target[offset : offset + self.block_size]) != self.hashes[index]:
                raise CorruptCheckpoint(
                    f"{self.path} of {self.storage.describe()}: block {index} (bytes from {index * self.block_size:,}) "
                    "is not what was written; take another checkpoint"
                )


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes `start..stop` of the file hold what `target` wants: seen as `shape` from byte `base` on, its `window`."""

    part: Part
    base: int
    start: int
    stop: int
    shape: tuple[int, ...]
    window: tuple[slice, ...]
    target: torch.Tensor


def read_parts(file: BlockFile, parts: Sequence[Part], workers: int = WORKERS) -> int:
    """Fill the targets of `parts`; returns the bytes read.

    Raises:
        CorruptCheckpoint: a block's hash differs or the file ends early; targets may be partly filled then.
        OSError: the storage cannot read.
    """
    spans = sorted((s for part in parts for s in _spans(part)), key=lambda s: s.start)
    groups = list(_groups(spans, file.block_size))
    if not groups:
        return 0
    share = -(-len(groups) // workers)
    jobs = [groups[i : i + share] for i in range(0, len(groups), share)]
    done, common = _read_common(file, jobs)
    with ThreadPoolExecutor(len(jobs), "holdfast-read") as pool:
        return done + sum(pool.map(lambda job: _read_groups(file, job, common), jobs))


def _extent(group: Sequence[_Span], file: BlockFile) -> tuple[int, int]:
    """The bytes of the blocks that a group touches."""
    block = file.block_size
    return group[0].start // block * block, min(-(-max(s.stop for s in group) // block) * block, file.size)


def _read_common(file: BlockFile, jobs: Sequence[Sequence[Sequence[_Span]]]) -> tuple[int, Mapping[int, torch.Tensor]]:
    """Bytes read, and by their first byte the blocks in which one worker's groups end and the next one's begin."""
    blocks: dict[int, torch.Tensor] = {}
    done = 0
    for before, after in pairwise(jobs):
        for start in range(_extent(after[0], file)[0], max(_extent(group, file)[1] for group in before), file.block_size):
            if start not in blocks:
                data = bytearray(min(file.block_size, file.size - start))
                file.read(start, memoryview(data))
                blocks[start] = torch.frombuffer(data, dtype=torch.uint8)
                done += len(data)
    return done, blocks


def _spans(part: Part) -> Iterator[_Span]:
    """Cut a part into spans of at most half a group.

    Let `level` be the first dimension whose rows (one index of it) are at most a block long. Rows of that dimension are
    read together, what lies between them included: such a gap never holds a whole block. Outer dimensions are walked.
    """
    item = item_size(part.dtype)
    inner, size = part.wanted.relative_to(part.piece), part.piece.size
    if part.wanted.numel == 0:
        return
    if not size:
        yield _Span(part, part.entry.start, part.entry.start, part.entry.start + item, (), (), part.target)
        return
    strides = [item * prod(size[d + 1 :]) for d in range(len(size))]
    level = next(d for d in range(len(size)) if strides[d] <= BLOCK)
    rows = max(1, GROUP // 2 // strides[level])
    inside = tuple(slice(o, o + n) for o, n in zip(inner.offset[level + 1 :], inner.size[level + 1 :], strict=True))
    # First and last wanted byte within one row.
    first = sum(o * s for o, s in zip(inner.offset[level + 1 :], strides[level + 1 :], strict=True))
    last = sum((o + n - 1) * s for o, n, s in zip(inner.offset[level + 1 :], inner.size[level + 1 :], strides[level + 1 :], strict=True))
    for outer in product(*(range(n) for n in inner.size[:level])):
        corner = part.entry.start + sum((o + i) * s for o, i, s in zip(inner.offset[:level], outer, strides, strict=False))
        for row in range(0, inner.size[level], rows):
            n = min(rows, inner.size[level] - row)
            base = corner + (inner.offset[level] + row) * strides[level]
            target = part.target[outer].narrow(0, row, n)
            stop = base + (n - 1) * strides[level] + last + item
            yield _Span(part, base, base + first, stop, (n, *size[level + 1 :]), (slice(None), *inside), target)


def _groups(spans: list[_Span], block: int) -> Iterator[list[_Span]]:
    """Neighbours that touch the same or adjoining blocks, up to `GROUP` bytes of blocks."""
    group: list[_Span] = []
    begin = end = 0
    for span in spans:
        first, last = span.start // block, -(-span.stop // block)
        if group and (first > end or max(end, last) - begin > GROUP // block):
            yield group
            group = []
        if not group:
            begin = first
            end = last
        group.append(span)
        end = max(end, last)
    if group:
        yield group


def _read_groups(file: BlockFile, groups: Sequence[Sequence[_Span]], common: Mapping[int, torch.Tensor]) -> int:
    extents = [_extent(group, file) for group in groups]
    buffer = mmap.mmap(-1, max(stop - start for start, stop in extents))  # given back at once, which a heap would not do
    view, scratch = memoryview(buffer), torch.frombuffer(buffer, dtype=torch.uint8)
    done = 0
    kept: Mapping[int, torch.Tensor] = {}
    for (start, stop), group, (following, _) in zip(extents, groups, [*extents[1:], (file.size, 0)], strict=True):
        done += _fill(file, start, view[: stop - start], scratch, {**common, **kept})
        # The blocks that the next group touches, too.
        kept = {at: scratch[at - start :][: file.block_size].clone() for at in range(following, stop, file.block_size)}
        with torch.no_grad():
            for span in group:
                _deliver(span, scratch[: stop - start], start)
    return done


def _fill(file: BlockFile, start: int, view: memoryview, scratch: torch.Tensor, known: Mapping[int, torch.Tensor]) -> int:
    """Fill `view` (and `scratch`, which shares its memory) from byte `start` on; returns the bytes that were not known."""
    done = at = 0
    while at < len(view):
        block = known.get(start + at)
        if block is not None:
            scratch[at : at + len(block)] = block
            at += len(block)
            continue
        end = at + file.block_size
        while end < len(view) and start + end not in known:
            end += file.block_size
        end = min(end, len(view))
        file.read(start + at, view[at:end])
        done += end - at
        at = end
    return done


def _deliver(span: _Span, scratch: torch.Tensor, start: int) -> None:
    dtype = DTYPE_OF[span.part.dtype]
    span_bytes = prod(span.shape) * item_size(span.part.dtype)
    begin = span.base - start
    if begin >= 0 and begin + span_bytes <= len(scratch):
        raw = scratch[begin : begin + span_bytes]
    else:  # the ends of the first and last row are not wanted and lie outside what was read
        raw = torch.empty(span_bytes, dtype=torch.uint8)
        raw[span.start - span.base : span.stop - span.base] = scratch[span.start - start : span.stop - start]
    if raw.storage_offset() % item_size(span.part.dtype):
        raw = raw.clone()
    span.target.copy_(raw.view(dtype).view(span.shape)[span.window])

