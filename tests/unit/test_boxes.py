"""The arithmetic of boxes against a slow, obvious oracle: cut an array of numbers with torch.chunk, as DTensor does."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.boxes import REPLICATE, Box, Mesh, Placement, chunk

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def placements(draw: st.DrawFn, dimensions: int) -> Placement:
    grid = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(prod(grid))))
    dims = draw(st.lists(st.integers(REPLICATE, dimensions - 1), min_size=len(grid), max_size=len(grid)))
    return Placement(Mesh(grid, tuple(ranks)), tuple(dims))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Placement]:
    shape = draw(shapes)
    return shape, draw(placements(len(shape)))


def cut(whole: torch.Tensor, placement: Placement, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The piece at a mesh coordinate, by cutting the tensor itself."""
    for extent, dim, c in zip(placement.mesh.shape, placement.dims, coordinate, strict=True):
        if dim != REPLICATE:
            chunks = list(torch.chunk(whole, extent, dim=dim)) if whole.shape[dim] else []
            empty = whole.narrow(dim, 0, 0)
            whole = chunks[c] if c < len(chunks) else empty
    return whole


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


def window(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))


@given(cases())
def test_a_rank_holds_what_chunking_gives_it(case: tuple[tuple[int, ...], Placement]) -> None:
    shape, placement = case
    whole = numbered(shape)
    for coordinate in product(*map(range, placement.mesh.shape)):
        box = placement.box(shape, coordinate)
        assert torch.equal(whole[window(box)], cut(whole, placement, coordinate))


@given(cases(), st.data())
def test_the_pieces_of_any_copy_cover_any_box_once(case: tuple[tuple[int, ...], Placement], data: st.DataObject) -> None:
    shape, placement = case
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    wanted = Box(offset, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))
    replica = data.draw(st.integers(0, placement.replicas - 1))
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank, piece in placement.pieces(shape, replica, wanted):
        coordinate = placement.mesh.coordinate(rank)
        assert coordinate is not None
        assert placement.replica(coordinate) == replica
        assert piece == placement.box(shape, coordinate)
        common = piece.intersect(wanted)
        if common is not None:
            seen[window(common)] += 1
    expected = torch.zeros(shape, dtype=torch.int64)
    expected[window(wanted)] = 1
    assert torch.equal(seen, expected)


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_are_torchs(length: int, parts: int) -> None:
    expected = [len(c) for c in torch.chunk(torch.arange(length), parts)] if length else []
    expected += [0] * (parts - len(expected))
    assert [chunk(length, parts, i)[1] for i in range(parts)] == expected


def test_finding_a_piece_among_many_ranks_is_local() -> None:
    """A resume on the same ranks finds one piece, whether there are 8 ranks or 16,384."""
    placement = Placement(Mesh((16384,), tuple(range(16384))), (0,))
    mine = placement.box((100_000, 8), (777,))
    assert [rank for rank, _ in placement.pieces((100_000, 8), 0, mine)] == [777]


def test_a_mesh_needs_different_ranks() -> None:
    with pytest.raises(ValueError, match="needs 4 different ranks"):
        Mesh((2, 2), (0, 1, 1, 2))


@given(st.data())
def test_every_folder_holds_what_its_ranks_need(data: st.DataObject) -> None:
    """Ranks over folders in any way: each piece that a rank holds is written into its folder, by whoever its layout says."""
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    dims = tuple(data.draw(st.sampled_from([REPLICATE, 0, 1])) for _ in shape)
    world = prod(shape)
    ranks = tuple(data.draw(st.permutations(range(world))))
    homes = tuple(data.draw(st.integers(0, 2)) for _ in range(world))
    whole, tensor = Placement(Mesh(shape, ranks), dims), (4, 5)
    for rank in range(world):
        here = whole.beside(rank, homes)
        coordinate = here.mesh.coordinate(rank)
        assert coordinate is not None
        box = here.box(tensor, coordinate)
        assert box == whole.box(tensor, whole.mesh.coordinate(rank))
        for replica in range(here.replicas):
            for writer, piece in here.pieces(tensor, replica, box):
                assert piece == box
                assert homes[writer] == homes[rank]
                assert whole.beside(writer, homes) == here  # it knows of it
        # Copied together, the folders hold the whole tensor by this layout alone.
        assert sum(piece.numel for _, piece in here.pieces(tensor, 0, Box.whole(tensor))) == prod(tensor)
    assert whole.beside(ranks[0], (7,) * world) == whole
