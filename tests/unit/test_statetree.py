"""Small state keeps its types through a round trip; what cannot be kept is refused by its path."""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine import statetree
from holdfast.errors import CorruptCheckpoint, UnsupportedState

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.booleans()
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.frozensets(st.integers()) | st.sets(st.text()),
    max_leaves=20,
)  # fmt: skip


def round_trip(value: object) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    document = json.loads(json.dumps(statetree.encode(value, "it", "it", tensors), allow_nan=False))
    return statetree.decode(document, "it", tensors.__getitem__)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


@given(trees)
def test_any_tree_comes_back(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(b=1, a=2), collections.Counter({3: 2}), {"$": "tuple", "v": [1]}, {1: "a", "1": "b"},
        torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), np.dtype("<f4"), np.float32("nan"), np.int64(7), np.bool_(True),
        float("inf"), -0.0, 10**40, bytearray(b"x"), {"deep": [({"x": {None}},)]},
    ],
    ids=repr,
)  # fmt: skip
def test_types_survive(value: Any) -> None:
    back = round_trip(value)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f8", "c16", "S3", "U2"])
def test_arrays_survive(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = round_trip({"a": array})["a"]
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    assert back.flags.writeable


def test_tensors_are_named_by_their_path() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"ema": [torch.ones(2), {"x": torch.zeros(())}]}
    document = statetree.encode(value, "extra.ema", "extra.ema", tensors)
    assert list(tensors) == ["extra.ema.ema[0]", "extra.ema.ema[1].x"]
    assert statetree.decode(document, "it", tensors.__getitem__) == value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, Path("x")]}, r"extra\.a\[1\] is a pathlib\.\w+"),
        ({"a": {"b": lambda: 0}}, r"extra\.a\.b is a builtins\.function"),
        ([object()], r"extra\[0\]"),
        ({"a": np.array([{}])}, r"extra\.a is a ndarray of object"),
        ({object(): 1}, "extra key"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(value: object, path: str) -> None:
    with pytest.raises(UnsupportedState, match=path):
        statetree.encode(value, "extra", "extra", {})


@pytest.mark.parametrize(
    "document",
    [
        {"$": "pickle", "v": "gASVAA=="},
        {"$": 5},
        {"$": "tuple", "v": 3},
        {"$": "ndarray", "dtype": "|O", "shape": [1], "v": "AAAAAAAAAAA="},
        {"$": "ndarray", "dtype": "<f8", "shape": [99], "v": "AAAAAAAAAAA="},
        {"$": "device", "v": "nowhere"},
        {"$": "dtype", "v": "torch.load"},
        {"$": "float", "v": "seven"},
        {"$": "bytes", "v": "!!"},
        {"$": "dict", "v": [[1]]},
        {"$": "set", "v": [[1]]},
    ],
)
def test_a_strange_tree_is_refused(document: Any) -> None:
    with pytest.raises(CorruptCheckpoint):
        statetree.decode(document, "it", {}.__getitem__)
