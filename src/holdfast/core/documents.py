"""JSON as Holdfast reads and writes it: one canonical form to write, a strict and bounded one to read.

The same content gives the same bytes, so that a document is identified by its digest and two committers write the same
file. What is read may come from a stranger: size and depth are bounded, a key may stand once, and NaN is no number.
"""

from __future__ import annotations

import json
import re
from math import isfinite, prod
from typing import Any, NoReturn, TypeVar

import xxhash

from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint

Json = Any
T = TypeVar("T")

MAX_DOCUMENT = 1 << 30
MAX_DEPTH = 256
"""No document of ours is nested deeper than a caller's state tree can be, and json itself gives up near 1,000."""

MAX_DIMENSIONS = 64
"""torch's own limit on the dimensions of a tensor."""

MAX_ELEMENTS = 1 << 56
"""Far more than any memory holds, and few enough that their bytes are a number that torch can count in."""

_HEX_DIGEST = re.compile(r"[0-9a-f]{32}")


def canonical(document: Json) -> bytes:
    """UTF-8, sorted keys, no spaces, finite numbers only."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def parse(data: bytes, what: str) -> Json:
    """Read a document of unknown origin; `what` names it in the error.

    Raises:
        CorruptCheckpoint: it is too large, too deep, no JSON, has a key twice or a number that is none.
    """
    if len(data) > MAX_DOCUMENT:
        raise CorruptCheckpoint(f"{what}: {len(data)} bytes, more than any such document has ({MAX_DOCUMENT})")
    if _depth_exceeds(data, MAX_DEPTH):
        raise CorruptCheckpoint(f"{what}: nested deeper than {MAX_DEPTH} levels")

    try:
        return json.loads(data, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{what}: not a valid document ({error})") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):  # 1e999
        raise ValueError(f"{text} is too large a number")
    return value


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _depth_exceeds(data: bytes, limit: int) -> bool:
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    # A header of thousands of tensors is three levels deep: taking away the innermost pairs a few times leaves nothing of it.
    left = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    for _ in range(8):
        if not left:
            return False
        left = left.replace(b"[]", b"").replace(b"{}", b"")
    depth = 0
    for match in _BRACKETS.finditer(data):
        token = match.group()
        if token in b"[{":
            depth += 1
            if depth > limit:
                return True
        elif token in b"]}":
            depth -= 1
    return False


class Fields:
    """Typed access to an untrusted object: a missing or mistyped field is a CorruptCheckpoint that names it."""

    def __init__(self, document: Json, what: str) -> None:
        if not isinstance(document, dict):
            raise CorruptCheckpoint(f"{what}: expected an object, found {type(document).__name__}")
        self.document: dict[str, Json] = document
        self.what = what

    def get(self, name: str, kind: type[T]) -> T:
        value = self.document.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CorruptCheckpoint(f"{self.what}: field {name!r} should be {kind.__name__}, is {value!r:.60}")
        return value

    def count(self, name: str, limit: int = 1 << 62) -> int:
        """A whole number from 0 to `limit`."""
        value = self.get(name, int)
        if not 0 <= value <= limit:
            raise CorruptCheckpoint(f"{self.what}: field {name!r} is out of range: {value}")
        return value

    def counts(self, name: str, limit: int = 1 << 62) -> tuple[int, ...]:
        values = self.get(name, list)
        if not all(type(v) is int and 0 <= v <= limit for v in values):
            raise CorruptCheckpoint(f"{self.what}: field {name!r} should hold whole numbers from 0 to {limit}")
        return tuple(values)

    def shape(self, name: str = "shape") -> tuple[int, ...]:
        """A tensor's, which may have no elements; not one whose strides would be too large for any tensor."""
        shape = self.counts(name)
        if len(shape) > MAX_DIMENSIONS or prod(n or 1 for n in shape) > MAX_ELEMENTS:
            raise CorruptCheckpoint(f"{self.what}: no tensor has the shape {list(shape)!s:.60}")
        return shape

    def digest(self, name: str) -> str:
        value = self.get(name, str)
        if not _HEX_DIGEST.fullmatch(value):
            raise CorruptCheckpoint(f"{self.what}: field {name!r} is no digest")
        return value

    def digests(self, name: str) -> tuple[str, ...]:
        values = self.get(name, list)
        if not all(isinstance(v, str) and _HEX_DIGEST.fullmatch(v) for v in values):
            raise CorruptCheckpoint(f"{self.what}: field {name!r} should hold digests")
        return tuple(values)

    def version(self, *known: int) -> int:
        """The version, which is one that this code reads.

        Raises:
            IncompatibleCheckpoint: it is whole, perhaps, but another Holdfast's.
        """
        found = self.count("version")
        if found not in known:
            reads = f"version {known[0]}" if len(known) == 1 else f"versions {' and '.join(map(str, known))}"
            raise IncompatibleCheckpoint(
                f"{self.what} is of format version {found}, this Holdfast reads {reads}: use the Holdfast that wrote it"
            )
        return found

    def expect(self, name: str, value: str | int) -> None:
        found = self.document.get(name)
        if found != value or type(found) is not type(value):
            raise CorruptCheckpoint(f"{self.what}: field {name!r} is {found!r:.60}, expected {value!r}")
