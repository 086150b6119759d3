"""Boxes: which part of a global tensor a rank holds, and which other ranks hold the parts that it needs.

A box is a hyper-rectangle of a global index space. A tensor laid out over a mesh of ranks is cut once for every mesh
dimension with a `Shard(d)` placement, from the first mesh dimension to the last, each time as `torch.chunk` cuts: pieces
of ceil(n / parts), the last ones shorter or empty. All of it is arithmetic on shapes: a box costs O(dimensions), and
finding the pieces that meet a box costs O(pieces found), however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, product
from math import prod

Shape = tuple[int, ...]

REPLICATE = -1
"""A placement is the tensor dimension that a mesh dimension shards, or this."""


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle: `offset[d] <= index[d] < offset[d] + size[d]`."""

    offset: Shape
    size: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None where it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        end = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True))
        size = tuple(e - o for o, e in zip(offset, end, strict=True))
        return None if any(n <= 0 for n in size) else Box(offset, size)

    def slices(self) -> tuple[slice, ...]:
        """The box as an index into a tensor of the whole."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.size, strict=True))

    def relative_to(self, outer: Box) -> Box:
        """The same box, counted from the first element of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.size)


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of piece `index` when `length` elements are cut into `parts` as `torch.chunk` cuts them."""
    step = -(-length // parts)
    start = min(index * step, length)
    return start, min(step, length - start)


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks: `ranks` in row-major order, `shape` its extents."""

    shape: Shape
    ranks: Shape
    _hash: int = field(init=False, repr=False, compare=False)
    """Taken once: every tensor's placement is looked up by its mesh, and a tuple of thousands of ranks hashes anew each time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, self.ranks)))
        if prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a mesh of shape {self.shape} needs {prod(self.shape)} different ranks, got {len(self.ranks)}")

    def __hash__(self) -> int:
        return self._hash

    def coordinate(self, rank: int) -> Shape | None:
        """Where `rank` stands in the grid, or None when it is not in it."""
        if rank < 0:
            return None
        if rank < len(self.ranks) and self.ranks[rank] == rank:
            index = rank
        elif rank in self.ranks:
            index = self.ranks.index(rank)
        else:
            return None
        coordinate = []
        for extent in reversed(self.shape):
            index, c = divmod(index, extent)
            coordinate.append(c)
        return tuple(reversed(coordinate))

    def rank(self, coordinate: Shape) -> int:
        index = 0
        for extent, c in zip(self.shape, coordinate, strict=True):
            index = index * extent + c
        return self.ranks[index]


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor is laid over a mesh: for each mesh dimension a tensor dimension, or `REPLICATE`."""

    mesh: Mesh
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.mesh.shape):
            raise ValueError(f"{len(self.dims)} placements for a mesh of {len(self.mesh.shape)} dimensions")

    @property
    def replicas(self) -> int:
        """How many ranks hold each piece."""
        return prod(n for n, dim in zip(self.mesh.shape, self.dims, strict=True) if dim == REPLICATE)

    def replica(self, coordinate: Shape) -> int:
        """Which of the `replicas` copies the rank at `coordinate` holds."""
        index = 0
        for n, dim, c in zip(self.mesh.shape, self.dims, coordinate, strict=True):
            if dim == REPLICATE:
                index = index * n + c
        return index

    def beside(self, rank: int, homes: Shape) -> Placement:
        """What `rank` has to know of the placement where not all ranks write to the same folder: `homes` has a number for each.

        A folder should hold all that its ranks need. Copies that lie in one folder, all ranks of them, write each piece once and
        share the work; a copy that is spread over folders is written whole by its own ranks. The result is over the ranks that share.
        """
        coordinate = self.mesh.coordinate(rank)
        if not homes or coordinate is None or self.replicas == 1:
            return self
        copies: dict[int, list[int]] = {}
        for at, r in zip(product(*map(range, self.mesh.shape)), self.mesh.ranks, strict=True):
            copies.setdefault(self.replica(at), []).append(r)
        own = copies[self.replica(coordinate)]
        at_home = [c for c in copies.values() if {homes[r] for r in c} == {homes[rank]}]
        together = at_home if own in at_home else [own]
        if len(together) == len(copies):
            return self
        first = self.dims.index(REPLICATE)  # which of these copies; further dimensions of copies have one index
        extents = [1 if dim == REPLICATE else n for n, dim in zip(self.mesh.shape, self.dims, strict=True)]
        before, after = prod(extents[:first]), prod(extents[first:])
        ranks = (copy[i * after : (i + 1) * after] for i in range(before) for copy in together)
        extents[first] = len(together)
        return Placement(Mesh(tuple(extents), tuple(chain.from_iterable(ranks))), self.dims)

    def box(self, shape: Shape, coordinate: Shape) -> Box:
        """The part of a tensor of global `shape` that the rank at `coordinate` holds."""
        offset, size = [0] * len(shape), list(shape)
        for n, dim, c in zip(self.mesh.shape, self.dims, coordinate, strict=True):
            if dim != REPLICATE:
                start, length = chunk(size[dim], n, c)
                offset[dim] += start
                size[dim] = length
        return Box(tuple(offset), tuple(size))

    def pieces(self, shape: Shape, replica: int, wanted: Box) -> Iterator[tuple[int, Box]]:
        """(rank, box) of every piece of copy `replica` that meets `wanted`; the boxes do not overlap."""
        copies = []
        for n, dim in reversed(list(zip(self.mesh.shape, self.dims, strict=True))):
            if dim == REPLICATE:
                replica, c = divmod(replica, n)
                copies.append(c)
        yield from self._descend(Box.whole(shape), (), copies[::-1], wanted)

    def _descend(self, box: Box, coordinate: Shape, copies: list[int], wanted: Box) -> Iterator[tuple[int, Box]]:
        level = len(coordinate)
        if level == len(self.dims):
            if box.numel:
                yield self.mesh.rank(coordinate), box
            return
        n, dim = self.mesh.shape[level], self.dims[level]
        if dim == REPLICATE:
            yield from self._descend(box, (*coordinate, copies[0]), copies[1:], wanted)
            return
        step = max(1, -(-box.size[dim] // n))
        first = max(0, (wanted.offset[dim] - box.offset[dim]) // step)
        last = min(n - 1, (wanted.offset[dim] + wanted.size[dim] - 1 - box.offset[dim]) // step)
        for c in range(first, last + 1):
            start, length = chunk(box.size[dim], n, c)
            offset, size = list(box.offset), list(box.size)
            offset[dim] += start
            size[dim] = length
            if length:
                yield from self._descend(Box(tuple(offset), tuple(size)), (*coordinate, c), copies, wanted)


@cache
def one_rank(rank: int = 0) -> Placement:
    """The placement of a tensor that `rank` alone holds."""
    return Placement(Mesh((1,), (rank,)), (REPLICATE,))
