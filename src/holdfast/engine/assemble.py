"""A checkpoint made by one process out of tensors that are read one after the other: what ranks would have written.

Every tensor goes whole into the file of one rank, the files filled evenly; each rank's file has the small state with that
rank's generators. So any number of ranks resumes from it, as from any other checkpoint.

Memory: one tensor, and a buffer of `PIECE` bytes.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence

import torch

from holdfast.core.boxes import one_rank
from holdfast.core.documents import canonical, digest
from holdfast.core.layout import Layout, TensorSpec, item_size, stored_as
from holdfast.core.manifest import (
    BLOCK,
    Announcement,
    Receipt,
    attempt_name,
    layout_file,
    rank_file,
    receipt_file,
)
from holdfast.core.safetensors import ITEM_SIZE, build_header
from holdfast.engine import dtypes
from holdfast.engine.commit import write_manifest
from holdfast.engine.foreign import Held
from holdfast.engine.plan import STATE_TENSOR
from holdfast.engine.resume import survey
from holdfast.errors import CorruptCheckpoint
from holdfast.formats.foreign import Source
from holdfast.formats.safetensors_out import Buffered, as_bytes
from holdfast.storage import FileWriter, Storage

PIECE = 16 * BLOCK
"""Bytes of one write."""


def write_checkpoint(
    storage: Storage,
    folder: str,
    step: int,
    tensors: Mapping[str, Held],
    aliases: Mapping[str, str],
    small: Sequence[object],
) -> int:
    """Write `folder`, which is not there yet, one rank for each document in `small`; returns the bytes of the tensors.

    Raises:
        CorruptCheckpoint: a tensor is not what it was announced as.
        OSError: the storage cannot take it. Either way the folder is removed again.
    """
    try:
        return _write(storage, folder, step, tensors, aliases, small)
    except BaseException:
        storage.remove_folder(folder)
        raise


def _write(
    storage: Storage,
    folder: str,
    step: int,
    tensors: Mapping[str, Held],
    aliases: Mapping[str, str],
    small: Sequence[object],
) -> int:
    world_size = len(small)
    owner = _spread(tensors, world_size)
    specs = {name: _spec(name, part, owner[name]) for name, part in tensors.items()}
    layout = Layout(world_size, specs, dict(aliases))
    sequence = 1 + max((complete.order[0] for complete in survey(storage).complete), default=0)
    attempt = attempt_name(secrets.token_hex(8), 1)
    storage.make_folder(folder)
    storage.put(f"{folder}/{layout_file(layout.digest)}", layout.encoded)
    announcements = []
    for rank, document in enumerate(small):
        mine = {name: part.source for name, part in tensors.items() if owner[name] == rank}
        start = time.perf_counter()
        size, blocks = _write_file(storage, f"{folder}/{rank_file(rank, attempt)}", mine, specs, canonical(document))
        receipt = Receipt(
            attempt=attempt, run_sequence=sequence, save_index=1, step=step, rank=rank, world_size=world_size,
            layout=layout.digest, size=size, block_size=BLOCK, blocks=blocks, plain=digest(b""), host=socket.gethostname(),
            captured_s=0.0, written_s=time.perf_counter() - start,
        )  # fmt: skip
        storage.put(f"{folder}/{receipt_file(rank, attempt)}", receipt.encoded())
        announcements.append(Announcement.of(receipt))
    write_manifest(storage, folder, announcements, sequence, 1)
    return sum(_nbytes(part) for part in tensors.values())


def _spread(tensors: Mapping[str, Held], world_size: int) -> dict[str, int]:
    """Whose file each tensor goes to: the largest first, each to the one with the fewest bytes so far."""
    load = [0] * world_size
    owner = {}
    for name in sorted(tensors, key=lambda n: (-_nbytes(tensors[n]), n)):
        owner[name] = load.index(min(load))
        load[owner[name]] += _nbytes(tensors[name])
    return owner


def _nbytes(part: Held) -> int:
    return part.source.dtype.itemsize * torch.Size(part.source.shape).numel()


def _spec(name: str, part: Held, rank: int) -> TensorSpec:
    dtype = dtypes.name_of(torch.empty(0, dtype=part.source.dtype), name)
    return TensorSpec(dtype, part.source.shape, one_rank(rank), 0, part.slot)


def _write_file(
    storage: Storage, path: str, sources: Mapping[str, Source], specs: Mapping[str, TensorSpec], small: bytes
) -> tuple[int, tuple[str, ...]]:
    stored = [(name, *stored_as(specs[name].dtype, source.shape)) for name, source in sources.items()]
    stored.sort(key=lambda t: (-ITEM_SIZE[t[1]], t[0]))
    header, entries = build_header([*stored, (STATE_TENSOR, "U8", (len(small),))], {"format": "pt", "holdfast": "1"})
    size = entries[STATE_TENSOR].stop
    file = storage.create(path, size)
    try:
        stream = _Hashed(file)
        stream.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for name, _, _ in stored:
            tensor = sources[name].read()
            if tensor.dtype != sources[name].dtype or tuple(tensor.shape) != sources[name].shape:
                raise CorruptCheckpoint(f"{name} is {tensor.dtype} {list(tensor.shape)}, announced was {sources[name]}")
            assert tensor.numel() * item_size(specs[name].dtype) == entries[name].nbytes
            stream.write(as_bytes(tensor))
            del tensor  # before the next one is read
        stream.write(torch.frombuffer(bytearray(small), dtype=torch.uint8))
        stream.flush()
        file.close(size)
    except BaseException:
        file.abort()
        raise
    return size, tuple(stream.hashes)


class _Hashed(Buffered):
    """Hashes every block on its way into the file."""

    def __init__(self, file: FileWriter) -> None:
        super().__init__(file, PIECE)
        self.hashes: list[str] = []

    def seen(self, data: memoryview) -> None:
        self.hashes += [digest(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]
