"""Flat units against a slow, obvious oracle: join tensors of numbers, pad, cut, and look where each number went."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.boxes import Box, Mesh
from holdfast.core.flat import Flat, boxes, span

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def units(draw: st.DrawFn) -> tuple[tuple[int, ...], Flat, int]:
    """A tensor's shape, its place in a unit, and how many elements the unit has before the end padding."""
    shape = draw(shapes | st.just((0, 3)))
    offset, after = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    copies, shards = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    ranks = draw(st.permutations(range(copies * shards)))
    total = max(1, offset + prod(shape) + after)
    return shape, Flat(Mesh((copies, shards), tuple(ranks)), offset, -(-total // shards)), total


def numbered(shape: tuple[int, ...], flat: Flat) -> torch.Tensor:
    """The shards, one a row: the tensor's elements carry their index, all else -1."""
    unit = torch.full((flat.mesh.shape[1] * flat.shard,), -1)
    unit[flat.offset : flat.offset + prod(shape)] = torch.arange(prod(shape))
    return unit.view(flat.mesh.shape[1], flat.shard)


@given(units())
def test_a_rank_holds_what_cutting_the_vector_gives_it(unit: tuple[tuple[int, ...], Flat, int]) -> None:
    shape, flat, _ = unit
    shards = numbered(shape, flat)
    for copy, index in product(*map(range, flat.mesh.shape)):
        mine = shards[index][shards[index] >= 0].tolist()
        assert list(range(*flat.held(prod(shape), (copy, index)))) == mine


@given(units())
def test_the_copies_write_every_element_once_and_evenly(unit: tuple[tuple[int, ...], Flat, int]) -> None:
    shape, flat, _ = unit
    copies, shards = flat.mesh.shape
    for index in range(shards):
        parts = [set(range(*flat.written(prod(shape), (c, index)))) for c in range(copies)]
        assert sum(map(len, parts)) == len(set().union(*parts))
        assert set().union(*parts) == set(range(*flat.held(prod(shape), (0, index))))
        assert max(map(len, parts)) <= -(-flat.shard // copies)


@given(units(), st.data())
def test_pieces_cover_any_range_once(unit: tuple[tuple[int, ...], Flat, int], data: st.DataObject) -> None:
    shape, flat, _ = unit
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    seen = [0] * prod(shape)
    for rank, first, last in flat.pieces(prod(shape), start, stop):
        coordinate = flat.mesh.coordinate(rank)
        assert coordinate is not None
        assert (first, last) == flat.written(prod(shape), coordinate)
        assert first < stop and last > start  # no piece is opened in vain
        for i in range(max(first, start), min(last, stop)):
            seen[i] += 1
    assert seen == [int(start <= i < stop) for i in range(prod(shape))]


@given(shapes, st.data())
def test_a_range_is_a_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    whole = torch.arange(prod(shape)).reshape(shape)
    found = list(boxes(shape, start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    elements: list[int] = []
    for box, at in found:
        assert at == len(elements)
        elements += whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))].flatten().tolist()
    assert elements == list(range(start, stop))


@given(units(), st.data())
def test_what_a_box_needs_lies_where_it_is_said(unit: tuple[tuple[int, ...], Flat, int], data: st.DataObject) -> None:
    """Any box out of flat files: each of its elements is met once, at its place in the file of the rank that has it."""
    shape, flat, _ = unit
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    wanted = Box(offset, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))
    whole = torch.arange(prod(shape)).reshape(shape)
    got = torch.full(shape, -1)
    for _, start, stop in flat.pieces(prod(shape), *span(shape, wanted)):
        file = torch.arange(start, stop)  # what that rank wrote
        for box, at in boxes(shape, start, stop):
            if (common := box.intersect(wanted)) is not None:
                values = file[at : at + box.numel].view(box.size)
                inner = common.relative_to(box)
                target = got[tuple(slice(o, o + n) for o, n in zip(common.offset, common.size, strict=True))]
                assert (target == -1).all()
                target.copy_(values[tuple(slice(o, o + n) for o, n in zip(inner.offset, inner.size, strict=True))])
    window = tuple(slice(o, o + n) for o, n in zip(wanted.offset, wanted.size, strict=True))
    assert torch.equal(got[window], whole[window])
    assert int((got >= 0).sum()) == wanted.numel


@given(shapes, st.data())
def test_the_span_of_a_box_is_the_shortest(shape: tuple[int, ...], data: st.DataObject) -> None:
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))
    inside = torch.arange(prod(shape)).reshape(shape)
    inside = inside[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
    assert span(shape, box) == (int(inside.min()), int(inside.max()) + 1)


def test_finding_a_piece_among_many_ranks_is_local() -> None:
    flat = Flat(Mesh((4, 4096), tuple(range(16384))), 1_000_003, 1_000)
    found = list(flat.pieces(3_000_000, 1_234_567, 1_234_867))
    assert len(found) <= 3


def test_a_unit_needs_copies_and_shards() -> None:
    with pytest.raises(ValueError, match="copies x shards"):
        Flat(Mesh((2,), (0, 1)), 0, 1)
