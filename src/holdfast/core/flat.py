"""Flat units: how FSDP version 1 cuts tensors, and what that means as boxes.

FSDP1 joins the parameters of a unit, flattened and with some padding between them, into one vector, and cuts that into
equal shards. Where a rank's part of a parameter lies follows from two numbers, the parameter's offset in the vector and the
elements of a shard: no list of what any rank holds is needed, however many there are.

A range of the flattened elements of a tensor with n dimensions is no box, but at most 2n - 1 of them: a first row's end,
whole rows, a last row's beginning, and so on inwards. With these, flat tensors are read and written by the same arithmetic
as all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core.boxes import Box, Mesh, Shape


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor inside a flat unit that is cut over a mesh of copies x shards.

    `offset` is the tensor's first element in the unit, `shard` the elements of one shard. The copies of a shard write a part
    of it each, equal up to rounding, so that replicas are written once and the work is spread without asking.
    """

    mesh: Mesh
    offset: int
    shard: int

    def __post_init__(self) -> None:
        if len(self.mesh.shape) != 2 or self.shard < 1 or self.offset < 0:
            raise ValueError(f"a flat unit needs a mesh of copies x shards and shards of at least one element, got {self}")

    @property
    def part(self) -> int:
        """Elements of a shard that each of its copies writes; the last ones may have fewer."""
        return -(-self.shard // self.mesh.shape[0])

    def held(self, numel: int, coordinate: Shape) -> tuple[int, int]:
        """The range of a tensor's flattened elements that the rank at (copy, shard) holds; (0, 0) where it holds none."""
        return self._within(numel, coordinate[1] * self.shard, (coordinate[1] + 1) * self.shard)

    def written(self, numel: int, coordinate: Shape) -> tuple[int, int]:
        """The range that it writes: its part of what it holds."""
        copy, index = coordinate
        begin, end = (index * self.shard + min(c * self.part, self.shard) for c in (copy, copy + 1))
        return self._within(numel, begin, end)

    def _within(self, numel: int, begin: int, end: int) -> tuple[int, int]:
        start, stop = max(0, begin - self.offset), min(numel, end - self.offset)
        return (start, stop) if start < stop else (0, 0)

    def pieces(self, numel: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(rank, first element, end) of every written piece that meets the flattened elements `start` to `stop`."""
        start, stop = max(0, start), min(numel, stop)
        if start >= stop:
            return
        begin, end = self.offset + start, self.offset + stop
        for index in range(begin // self.shard, min(self.mesh.shape[1], -(-end // self.shard))):
            base = index * self.shard
            for copy in range(max(0, begin - base) // self.part, min(self.mesh.shape[0], -(-(end - base) // self.part))):
                first, last = self.written(numel, (copy, index))
                if first < last:
                    yield self.mesh.rank((copy, index)), first, last


def span(shape: Shape, box: Box) -> tuple[int, int]:
    """The shortest range of the flattened elements that holds a box."""
    if box.numel == 0:
        return 0, 0
    first = last = 0
    for extent, o, n in zip(shape, box.offset, box.size, strict=True):
        first, last = first * extent + o, last * extent + o + n - 1
    return first, last + 1


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Cut a range of the flattened elements into boxes; with each, how far from `start` its elements begin, row by row."""
    at = start
    while at < stop:
        # The largest block of whole trailing dimensions that begins at `at` and ends in the range.
        inner, level = 1, len(shape)
        while level and at % (inner * shape[level - 1]) == 0 and at + inner * shape[level - 1] <= stop:
            level -= 1
            inner *= shape[level]
        if level == 0:
            yield Box.whole(shape), 0
            return
        # As many of them as the next dimension and the range have left.
        row = at // inner % shape[level - 1]
        count = min(shape[level - 1] - row, (stop - at) // inner)
        offset, rest = [0] * len(shape), at // inner
        for d in reversed(range(level)):
            rest, offset[d] = divmod(rest, shape[d])
        yield Box(tuple(offset), (*(1,) * (level - 1), count, *shape[level:])), at - start
        at += count * inner

