"""Documents, headers, layouts, receipts and manifests: what is written is read back, and a stranger's is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.boxes import REPLICATE, Mesh, Placement
from holdfast.core.documents import MAX_DEPTH, canonical, parse
from holdfast.core.flat import Flat
from holdfast.core.layout import BaseFile, Layout, Named, OptimizerSlot, TensorSpec, spread_replicas
from holdfast.core.manifest import Announcement, BaseNote, Manifest, Receipt
from holdfast.core.safetensors import build_header, header_length, parse_header
from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint

D = "0123456789abcdef" * 2

RECEIPT = Receipt("00aa11bb-3", 2, 3, 500, 1, 4, D, (1 << 20) + 5, 1 << 20, (D, D), D, "node-1", 0.25, 1.5)
MANIFEST = Manifest("00aa11bb-3", 2, 3, 500, 2, (D,), (D, D), True)


def make_layout() -> Layout:
    mesh = Placement(Mesh((2, 2), (0, 1, 2, 3)), (REPLICATE, 0))
    odd = Placement(Mesh((2,), (3, 1)), (1,))
    tensors = {
        "model.a": TensorSpec("F32", (7, 3), mesh, 1),
        "model.b": TensorSpec("C128", (2, 4), odd),
        "model.seen": TensorSpec("I64", None, None),
        "optimizer.model.a.exp_avg": TensorSpec("BF16", (7, 3), mesh, 0, OptimizerSlot("", "model.a", "exp_avg")),
        "model.flat": TensorSpec("F32", (5, 2), Flat(Mesh((2, 2), (0, 1, 2, 3)), 3, 7)),
        "model.scalar": TensorSpec("F32", (), Flat(Mesh((1, 4), (0, 1, 2, 3)), 0, 1)),
    }
    return Layout(4, tensors, {"model.tied": "model.a"})


def based_layout() -> Layout:
    """The same with two of its tensors in base files."""
    layout = make_layout()
    named = {"model.a": Named(BaseFile("a.safetensors", 9, "1" * 64), "a"), "model.seen": Named(BaseFile("a.safetensors", 7, "0" * 64), "s")}
    return replace(layout, tensors={name: replace(spec, base=named.get(name)) for name, spec in layout.tensors.items()})


def test_round_trips() -> None:
    layout = make_layout()
    assert Layout.parse(layout.encoded, "it") == layout
    assert Receipt.parse(RECEIPT.encoded(), "it") == RECEIPT
    assert Manifest.parse(MANIFEST.encoded(), "it") == MANIFEST
    announcement = Announcement.of(RECEIPT)
    assert Announcement.parse(announcement.encoded(), "it") == announcement


def change(document: bytes, path: list[Any], value: Any) -> bytes:
    parsed = json.loads(document)
    place = parsed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(parsed).encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["attempt"], "../../etc/passwd", "is no attempt"),
        (["step"], -1, "out of range"),
        (["step"], 1.5, "should be int"),
        (["step"], True, "should be int"),
        (["size"], 1 << 63, "out of range"),
        (["blocks"], [D], "1 hashes for"),
        (["blocks"], ["x", D], "should hold digests"),
        (["format"], "pickle", "expected"),
        (["block_size"], 0, "hashes for"),
    ],
)
def test_a_strange_receipt_is_refused(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        Receipt.parse(change(RECEIPT.encoded(), path, value), "it")


@pytest.mark.parametrize(
    ("read", "known"), [(Receipt.parse, "version 1"), (Manifest.parse, "version 1"), (Layout.parse, "versions 1 and 2")]
)
def test_another_version_is_said_to_be_one(read: Any, known: str) -> None:
    written = {Receipt.parse: RECEIPT.encoded(), Manifest.parse: MANIFEST.encoded(), Layout.parse: make_layout().encoded}
    with pytest.raises(IncompatibleCheckpoint, match=f"it is of format version 3, this Holdfast reads {known}: use"):
        read(change(written[read], ["version"], 3), "it")


def test_a_layout_names_a_base_in_version_2_and_is_version_1_without() -> None:
    plain, based = make_layout(), based_layout()
    assert json.loads(plain.encoded)["version"] == 1 and b"base" not in plain.encoded
    assert json.loads(based.encoded)["version"] == 2
    assert Layout.parse(based.encoded, "it") == based
    assert Layout.parse(based.encoded, "it").bases == [BaseFile("a.safetensors", 7, "0" * 64), BaseFile("a.safetensors", 9, "1" * 64)]
    # Version 1 has no such fields, so they mean nothing there.
    assert Layout.parse(change(based.encoded, ["version"], 1), "it") == plain
    noted = replace(RECEIPT, bases=(BaseNote("model", "/base"), BaseNote("model.ema", "/hub", "owner/name", "main")))
    assert Receipt.parse(noted.encoded(), "it") == noted


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["bases", 0, "file"], "../a.safetensors", "no plain file name"),
        (["bases", 0, "file"], "..", "no plain file name"),
        (["bases", 0, "file"], "/etc/passwd", "no plain file name"),
        (["bases", 0, "file"], "c:\\a", "no plain file name"),
        (["bases", 0, "file"], "", "no plain file name"),
        (["bases", 0, "sha256"], "0" * 63, "is no digest"),
        (["bases", 0, "size"], -1, "out of range"),
        (["bases", 0], "a", "expected an object"),
        (["bases"], {}, "should be list"),
        (["tensors", "model.a", "base"], [2, "x"], "one of 2 base files"),
        (["tensors", "model.a", "base"], [-1, "x"], "one of 2 base files"),
        (["tensors", "model.a", "base"], [True, "x"], "one of 2 base files"),
        (["tensors", "model.a", "base"], [0, 5], "one of 2 base files"),
        (["tensors", "model.a", "base"], [0], "one of 2 base files"),
    ],
)
def test_a_strange_base_is_refused(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        Layout.parse(change(based_layout().encoded, path, value), "it")


@pytest.mark.parametrize(
    ("value", "message"),
    [({}, "should be list"), ([5], "expected an object"), ([{"model": "m"}], "'path' should be str"), ([{}] * 1025, "1025 bases"),
     ([{"model": "m", "path": "p", "revision": 3}], "'revision' should be str")],
)  # fmt: skip
def test_a_strange_note_of_a_base_is_refused(value: Any, message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        Receipt.parse(change(RECEIPT.encoded(), ["bases"], value), "it")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["tensors", "model.a", "dtype"], "F33", "unknown dtype"),
        (["tensors", "model.a", "shape"], [7, -3], "whole numbers"),
        (["tensors", "model.a", "placement"], 9, "placement 9 of"),
        (["tensors", "model.a", "replica"], 2, "copy 2 of 2"),
        (["tensors", "model.b", "shape"], [5], "does not fit placement"),
        (["tensors", "model.flat", "flat"], [5, 7], "past the end of its unit"),
        (["tensors", "model.flat", "flat"], [0, 0], "should be offset and shard size"),
        (["tensors", "model.flat", "flat"], [0], "should be offset and shard size"),
        (["tensors", "model.flat", "flat"], [-1, 7], "whole numbers"),
        (["tensors", "model.b", "flat"], [0, 9], "copies x shards"),
        (["placements", 0, "dims"], ["R", "S"], "neither"),
        (["placements", 0, "mesh"], [1 << 19, 1 << 19], "for 4 ranks"),
        (["placements", 0, "ranks"], [0, 0, 1, 2], "different ranks"),
        (["aliases"], {"x": "nothing"}, "no tensor of its own"),
        (["world_size"], 10**9, "out of range"),
    ],
)
def test_a_strange_layout_is_refused(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        Layout.parse(change(make_layout().encoded, path, value), "it")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a":1,"a":2}', "stands twice"),
        (b'{"a":NaN}', "no JSON number"),
        (b'{"a":1e999}', "too large a number"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested deeper"),
        (b'{"a":', "not a valid document"),
        (b"\xff", "not a valid document"),
    ],
)
def test_strange_json_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        parse(data, "it")


@pytest.mark.parametrize("depth", [7, 17, MAX_DEPTH, MAX_DEPTH + 1])
@pytest.mark.parametrize("text", [r'"[{"', r'"\\"', r'"\"]"', r'"a\\\"[["'])
def test_the_depth_is_exact_whatever_stands_in_strings(depth: int, text: str) -> None:
    flat = "[" + ",".join(["{}", text, f"[{text}]"] * 200) + "]"
    deep = "[" * (depth - 4) + f"{{{text}:[[],{text}]}}" + "]" * (depth - 4)
    document = f"[{flat},{deep}]".encode()
    if depth > MAX_DEPTH:
        with pytest.raises(CorruptCheckpoint, match="nested deeper"):
            parse(document, "d")
    else:
        assert canonical(parse(document, "d")).decode() == canonical(json.loads(document)).decode()


def test_brackets_in_strings_are_no_nesting() -> None:
    document = {"text": '"[[[[' * 100, "more": ["{" * 100] * 80}
    assert parse(canonical(document), "it") == document


@given(st.binary(max_size=200))
def test_no_bytes_crash_a_parser(data: bytes) -> None:
    for read in (Layout.parse, Receipt.parse, Manifest.parse, Announcement.parse):
        with pytest.raises(CorruptCheckpoint):
            read(data, "it")
    with pytest.raises(CorruptCheckpoint):
        parse_header(b"\0" * 8 + data, 8 + len(data) + 1, "it")


def test_a_header_is_aligned_and_read_back() -> None:
    header, entries = build_header([("a", "F32", (2, 3)), ("b", "BF16", (0, 3)), ("c", "U8", (5,))], {"format": "pt"})
    size = len(header) + 24 + 5
    assert len(header) % 4096 == 0
    assert header_length(header[:8], size, "it") == len(header)
    assert parse_header(header, size, "it") == (entries, {"format": "pt"})
    assert [(e.start - len(header), e.nbytes) for e in entries.values()] == [(0, 24), (24, 0), (24, 5)]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "offsets"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "hole or overlaps"),
        ({"a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, "hole or overlaps"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, "tensors end at"),
        ({"a": {"dtype": "U8", "shape": [10**15], "data_offsets": [0, 10**15]}}, "whole numbers from 0"),
        ({"a": {"dtype": "U8", "shape": [10**18], "data_offsets": [0, 8]}}, "no tensor has the shape"),
        ({"a": {"dtype": "U8", "shape": [0, 10**18], "data_offsets": [0, 0]}}, "no tensor has the shape"),
        ({"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, "no tensor has the shape"),
        ({"a": {"dtype": "Q4", "shape": [8], "data_offsets": [0, 8]}}, "unknown dtype"),
    ],
)  # fmt: skip
def test_a_strange_header_is_refused(tensors: dict[str, Any], message: str) -> None:
    text = json.dumps(tensors).encode()
    header = len(text).to_bytes(8, "little") + text
    with pytest.raises(CorruptCheckpoint, match=message):
        parse_header(header, len(header) + 8, "it")


def test_copies_are_spread_by_bytes() -> None:
    everybody = Placement(Mesh((4,), (0, 1, 2, 3)), (REPLICATE,))
    tensors = {f"t{i}": TensorSpec("F32", (size,), everybody) for i, size in enumerate([100, 10, 10, 10, 30, 30, 30, 90])}
    load = [0] * 4
    for name, spec in spread_replicas(tensors).items():
        assert tensors[name].shape is not None
        load[spec.replica] += sum(tensors[name].shape or ())
    assert sum(load) == 310
    assert max(load) == 100


def test_receipts_that_disagree_are_never_committed() -> None:
    a = Announcement(0, "00aa11bb-3", 500, D, D, D)
    with pytest.raises(ValueError, match="announced step 501"):
        Manifest.of([a, Announcement(1, "00aa11bb-3", 501, D, D, D)], 1, 3)
    with pytest.raises(ValueError, match="attempt 00aa11bb-2"):
        Manifest.of([a, Announcement(1, "00aa11bb-2", 500, D, D, D)], 1, 3)


def test_two_committers_write_the_same_bytes() -> None:
    announcements = [Announcement(r, "00aa11bb-3", 500, D, D, D) for r in range(3)]
    assert Manifest.of(announcements, 1, 3).encoded() == Manifest.of(list(announcements), 1, 3).encoded()
