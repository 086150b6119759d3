"""Trees of Python state with tensors in them: encoded as JSON in which a tensor is a reference by name.

The tensors themselves go the way of all tensors (into the rank's file, sharded ones as shards); on the way back each
reference is replaced by what the caller's `resolve` gives for it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

import torch

from holdfast.core import codec
from holdfast.core.documents import Fields, Json
from holdfast.errors import CorruptCheckpoint, UnsupportedState

try:
    import numpy as np
except ImportError:  # the engine needs none; a state without arrays can be saved without it
    np = None  # type: ignore[assignment]

_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_NUMPY_KINDS = "biufcSU"
"""Booleans, numbers and fixed-length strings: array kinds whose bytes are their content."""


def encode(value: object, path: str, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    """`value` as JSON; its tensors are added to `tensors` under names that begin with `name`.

    Raises:
        UnsupportedState: with the path of a value that a checkpoint cannot hold.
    """

    def foreign(part: object, where: str) -> Json | None:
        if isinstance(part, torch.Tensor):
            key = name + where.removeprefix(path)
            while key in tensors:  # {1: ..., "1": ...} and {"a.b": ..., "a": {"b": ...}} have paths that read the same
                key += "~"
            tensors[key] = part
            return {"$": "tensor", "v": key}
        if isinstance(part, torch.Size):
            return {"$": "size", "v": list(part)}
        if isinstance(part, torch.dtype | torch.device):
            return {"$": type(part).__name__, "v": str(part)}
        if np is not None and isinstance(part, np.ndarray | np.generic | np.dtype):
            return _encode_numpy(part, where)
        return None

    return codec.encode(value, path, foreign)


def decode(document: Json, what: str, resolve: Callable[[str], torch.Tensor]) -> object:
    """The value that was encoded, with `resolve(name)` for every tensor."""

    def foreign(tag: str, fields: Fields, where: str) -> object:
        if tag == "tensor":
            return resolve(fields.get("v", str))
        if tag == "size":
            return torch.Size(fields.counts("v"))
        if tag == "dtype" and fields.get("v", str) in _DTYPES:
            return _DTYPES[fields.get("v", str)]
        try:
            if tag == "device":
                return torch.device(fields.get("v", str))
            if tag in ("ndarray", "npscalar", "npdtype"):
                return _decode_numpy(tag, fields, where)
        except (ValueError, TypeError, RuntimeError) as error:
            raise CorruptCheckpoint(f"{where}: a value tagged {tag!r} cannot be read ({error})") from error
        raise CorruptCheckpoint(f"{where}: unknown tag {tag!r}")

    return codec.decode(document, what, foreign)


def _encode_numpy(value: object, where: str) -> Json:
    if isinstance(value, np.dtype):
        return {"$": "npdtype", "v": value.str}
    array = np.asarray(value)
    if array.dtype.kind not in _NUMPY_KINDS or not (type(value) is np.ndarray or isinstance(value, np.generic)):
        raise UnsupportedState(f"{where} is a {type(value).__name__} of {array.dtype}: give numbers, booleans or fixed-length strings")
    tag = "npscalar" if isinstance(value, np.generic) else "ndarray"
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"$": tag, "dtype": array.dtype.str, "shape": list(array.shape), "v": data}


def _decode_numpy(tag: str, fields: Fields, where: str) -> object:
    if np is None:
        raise CorruptCheckpoint(f"{where} holds a NumPy value, and NumPy is not installed: pip install numpy")
    if tag == "npdtype":
        return np.dtype(fields.get("v", str))
    dtype = np.dtype(fields.get("dtype", str))
    if dtype.kind not in _NUMPY_KINDS:
        raise CorruptCheckpoint(f"{where}: a NumPy array of {dtype}")
    data = base64.b64decode(fields.get("v", str), validate=True)
    array = np.frombuffer(data, dtype=dtype).reshape(fields.counts("shape")).copy()
    return array[()] if tag == "npscalar" else array
