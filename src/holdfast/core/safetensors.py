"""The safetensors container: its header built and parsed as plain data (https://github.com/huggingface/safetensors).

8 bytes little-endian header length, the JSON header, then the tensors without holes. Our own files pad the header with
spaces to a multiple of `ALIGNMENT`, so that the data of a file that is written from an aligned image is aligned too, and
order tensors by falling item size, so that every view of the mapped file is aligned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from holdfast.core.boxes import Shape
from holdfast.core.documents import Fields, parse
from holdfast.errors import CorruptCheckpoint

ITEM_SIZE = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by safetensors dtype name."""

ALIGNMENT = 4096
"""Direct I/O wants offsets and lengths in multiples of the logical block, which is at most this on common devices."""

MAX_HEADER = 100_000_000
"""The bound that the safetensors library sets itself."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `start` and `stop` count bytes from the beginning of the file."""

    dtype: str
    shape: Shape
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def nbytes(dtype: str, shape: Shape) -> int:
    return ITEM_SIZE[dtype] * prod(shape)


def build_header(tensors: Iterable[tuple[str, str, Shape]], metadata: dict[str, str]) -> tuple[bytes, dict[str, Entry]]:
    """The header for (name, dtype, shape) in that order, and where each tensor will lie in the file."""
    described: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    spans: list[tuple[str, str, Shape, int, int]] = []
    for name, dtype, shape in tensors:
        end = offset + nbytes(dtype, shape)
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        spans.append((name, dtype, shape, offset, end))
        offset = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    header = length.to_bytes(8, "little") + text.ljust(length)
    base = len(header)
    return header, {name: Entry(dtype, shape, base + a, base + b) for name, dtype, shape, a, b in spans}


def header_length(first: bytes, file_size: int, what: str) -> int:
    """How many bytes the header takes, its 8-byte length included."""
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or not 2 <= length <= min(MAX_HEADER, file_size - 8):
        raise CorruptCheckpoint(f"{what}: its header claims {length} bytes in a file of {file_size}")
    return 8 + length


def parse_header(header: bytes, file_size: int, what: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors and metadata of a header of unknown origin.

    Raises:
        CorruptCheckpoint: unknown dtype, a size that is not its shape's, offsets outside the file, holes or overlaps.
    """
    document = parse(header[8:], what)
    if not isinstance(document, dict):
        raise CorruptCheckpoint(f"{what}: its header is no object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptCheckpoint(f"{what}: its metadata should map strings to strings")
    base = len(header)
    entries: dict[str, Entry] = {}
    for name, value in document.items():
        fields = Fields(value, f"{what}: tensor {name!r}")
        dtype, shape, offsets = fields.get("dtype", str), fields.shape(), fields.counts("data_offsets", file_size)
        if dtype not in ITEM_SIZE:
            raise CorruptCheckpoint(f"{what}: tensor {name!r} has the unknown dtype {dtype!r}")
        if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes(dtype, shape):
            raise CorruptCheckpoint(f"{what}: tensor {name!r} has offsets {list(offsets)} for {dtype} of shape {list(shape)}")
        entries[name] = Entry(dtype, shape, base + offsets[0], base + offsets[1])
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise CorruptCheckpoint(f"{what}: tensor {name!r} leaves a hole or overlaps its neighbour at byte {entry.start}")
        end = entry.stop
    if end != file_size:
        raise CorruptCheckpoint(f"{what}: tensors end at byte {end}, the file at {file_size}")
    return entries, metadata
