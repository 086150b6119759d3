"""Small state as JSON: Python values keep their types through a round trip, and nothing is pickled.

None, bool, int, finite float, str, list and str-keyed dict stand for themselves; everything else is an object tagged
with `$`. What this module does not know (tensors, arrays, dtypes) is handed to `foreign`, which returns a tagged object
or None; then the value is refused with its path.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable
from math import isfinite

from holdfast.core.documents import Fields, Json
from holdfast.errors import CorruptCheckpoint, UnsupportedState

Foreign = Callable[[object, str], Json | None]
ForeignBack = Callable[[str, Fields, str], object]

_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "odict", Counter: "counter"}
_SEQUENCE_OF = {tag: kind for kind, tag in _SEQUENCES.items()}
_MAPPING_OF = {tag: kind for kind, tag in _MAPPINGS.items()}


MAX_NESTING = 64
"""Levels of a caller's state tree. One level takes up to three of JSON, and a reader refuses deeper documents."""


def encode(value: object, path: str, foreign: Foreign, level: int = 0) -> Json:
    """`value` as JSON; the result shares no mutable part with it.

    Raises:
        UnsupportedState: a part of it is of another type, or nested too deep; the message has its path below `path`.
    """
    if level > MAX_NESTING:
        raise UnsupportedState(f"{path} is nested deeper than {MAX_NESTING} levels, or holds itself")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and kind is float:
        return value if isfinite(value) else {"$": "float", "v": repr(value)}
    if isinstance(value, list) and kind is list:
        return [encode(v, f"{path}[{i}]", foreign, level + 1) for i, v in enumerate(value)]
    if isinstance(value, dict) and kind in _MAPPINGS:
        return _encode_mapping(value, _MAPPINGS[kind], path, foreign, level + 1)
    if isinstance(value, tuple | set | frozenset) and kind in _SEQUENCES:
        items = list(value)
        if kind is not tuple:  # the order of a set is not its content; the encoding must not depend on it
            items.sort(key=lambda v: (type(v).__name__, repr(v)))
        return {"$": _SEQUENCES[kind], "v": [encode(v, f"{path}[{i}]", foreign, level + 1) for i, v in enumerate(items)]}
    if isinstance(value, complex) and kind is complex:
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes | bytearray) and kind in (bytes, bytearray):
        return {"$": kind.__name__, "v": base64.b64encode(value).decode()}
    document = foreign(value, path)
    if document is None:
        raise UnsupportedState(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint without pickle cannot hold; "
            "give tensors, numbers, strings, lists, dicts, or an object whose state_dict() is made of them"
        )
    return document


def _encode_mapping(value: dict[object, object], tag: str, path: str, foreign: Foreign, level: int) -> Json:
    if tag == "dict" and "$" not in value and all(type(k) is str for k in value):
        return {str(k): encode(v, f"{path}.{k}", foreign, level) for k, v in value.items()}
    pairs = [
        [encode(k, f"{path} key {k!r:.60}", foreign, level), encode(v, f"{path}.{k}", foreign, level)] for k, v in value.items()
    ]
    return {"$": tag, "v": pairs}


def decode(document: Json, what: str, foreign: ForeignBack) -> object:
    """The value that `encode` was given; `foreign` gets the tags that this module does not know.

    Raises:
        CorruptCheckpoint: no such encoding.
    """
    if isinstance(document, list):
        return [decode(v, what, foreign) for v in document]
    if not isinstance(document, dict):
        return document
    if "$" not in document:
        return {k: decode(v, what, foreign) for k, v in document.items()}
    fields = Fields(document, what)
    tag = fields.get("$", str)
    try:
        if tag == "float":
            return float(fields.get("v", str))
        if tag == "complex":
            real, imag = fields.get("v", list)
            return complex(float(real), float(imag))
        if tag in ("bytes", "bytearray"):
            data = base64.b64decode(fields.get("v", str), validate=True)
            return data if tag == "bytes" else bytearray(data)
        if tag in _SEQUENCE_OF:
            return _SEQUENCE_OF[tag]([decode(v, what, foreign) for v in fields.get("v", list)])
        if tag in _MAPPING_OF:
            return _MAPPING_OF[tag]({decode(k, what, foreign): decode(v, what, foreign) for k, v in fields.get("v", list)})
    except (ValueError, TypeError) as error:
        raise CorruptCheckpoint(f"{what}: a value tagged {tag!r} cannot be read ({error})") from error
    return foreign(tag, fields, what)
