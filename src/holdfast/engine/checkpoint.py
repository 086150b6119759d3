"""A complete checkpoint as a reader sees it: nothing is believed before its digest or hash has been checked.

    manifest -> receipts and layouts (by digest) -> blocks of a rank's file (by hash) -> header, tensors, small state

A reader opens only the receipts and headers of the ranks whose pieces it needs. What a rank has not written of a tensor that
names a base lies in a file of that base, which `engine.base_files` finds. Such a file is a source like a rank's file, with a number
below 0: -1 is the first that the layouts name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from holdfast.core.boxes import Box, Shape
from holdfast.core.documents import Json, digest
from holdfast.core.flat import Flat, boxes, span
from holdfast.core.layout import BaseFile, Layout, Named, TensorSpec, item_size, stored_as
from holdfast.core.manifest import MANIFEST_FILE, Manifest, Receipt, layout_file, rank_file, receipt_file
from holdfast.core.safetensors import Entry, header_length, parse_header
from holdfast.engine.base_files import BaseFiles
from holdfast.engine.blocks import BlockFile, Part, read_parts
from holdfast.engine.plan import STATE_TENSOR
from holdfast.engine.small import parse_small
from holdfast.engine.store import name_ranks
from holdfast.errors import CheckpointNotFound, CorruptCheckpoint
from holdfast.formats.recognise import NATIVE, recognise
from holdfast.storage import Storage


@dataclass(frozen=True, slots=True)
class Piece:
    """What `source` has of a tensor: `box` of it is good. It lies in `whole`, which `entry` says where to find, as `dtype`."""

    source: int
    box: Box
    whole: Box
    entry: Entry
    dtype: str


class Checkpoint:
    """One folder of a storage that holds a manifest.

    Raises, here and later:
        CheckpointNotFound: no such folder, or no manifest in it.
        CorruptCheckpoint: something in it is not what was written.
    """

    native = True

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage, self.folder = storage, folder
        self.where = f"{storage.describe()}/{folder}"
        try:
            encoded = storage.get(f"{folder}/{MANIFEST_FILE}")
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointNotFound(self._no_manifest()) from None
        self.manifest = Manifest.parse(encoded, f"{self.where}/{MANIFEST_FILE}")
        self.digest = digest(encoded)
        self._receipts: dict[int, Receipt] = {}
        self._headers: dict[int, dict[str, Entry]] = {}
        self.base_files = BaseFiles(self.where, lambda: self.receipt(self.first).bases)

    def _no_manifest(self) -> str:
        names = self.storage.names(self.folder)
        if not names:
            return f"there is no checkpoint {self.where}"
        receipts = sum(n.startswith("rank-") and n.endswith(".json") for n in names)
        if receipts or any(n.startswith("rank-") for n in names):
            return f"{self.where} is incomplete: it has {receipts} receipts and no {MANIFEST_FILE} (its save was interrupted)"
        kind = recognise(self.storage, self.folder)
        if kind not in (None, NATIVE):
            return f"{self.where} is {kind}, which has to be imported first: holdfast import {self.where} OUTPUT_DIR"
        return f"{self.where} is no Holdfast checkpoint: it has no {MANIFEST_FILE} (it holds {', '.join(sorted(names)[:3])})"

    @cached_property
    def here(self) -> Collection[int]:
        """The ranks whose files lie in this folder: all, unless they wrote to several folders."""
        every = range(self.manifest.world_size)
        if self.manifest.homes is None:
            return every
        names = set(self.storage.names(self.folder))
        homes = {home for rank, home in enumerate(self.manifest.homes) if receipt_file(rank, self.manifest.attempt) in names}
        if not homes:
            raise CorruptCheckpoint(f"{self.where} has a {MANIFEST_FILE}, and the files of no rank")
        return frozenset(rank for rank, home in enumerate(self.manifest.homes) if home in homes)

    @property
    def first(self) -> int:
        """The rank whose own state is taken where there is none for the rank that asks: the first whose file is here."""
        return min(self.here)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Those that the ranks here wrote by."""
        found = {}
        keys = self.manifest.layouts
        if len(self.here) < self.manifest.world_size:
            keys = tuple(sorted({self.receipt(rank).layout for rank in self.here}))
        for key in keys:
            encoded = self._get(layout_file(key), key)
            layout = found[key] = Layout.parse(encoded, f"{self.where}/{layout_file(key)}")
            if layout.world_size != self.manifest.world_size:
                raise CorruptCheckpoint(f"{self.where}: a layout for {layout.world_size} ranks in a checkpoint of another size")
        return found

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor of the checkpoint; where layouts differ, the first one that has it speaks for it."""
        merged: dict[str, TensorSpec] = {}
        for layout in self.layouts.values():
            for name, spec in layout.tensors.items():
                known = merged.setdefault(name, spec)
                if known.base is None and spec.base is not None:
                    merged[name] = replace(known, base=spec.base)
        return merged

    @cached_property
    def bases(self) -> list[BaseFile]:
        """The base files that its tensors name: the sources -1, -2, ..."""
        return sorted({spec.base.file for spec in self.tensors.values() if spec.base is not None})

    @cached_property
    def aliases(self) -> dict[str, str]:
        return {alias: name for layout in self.layouts.values() for alias, name in layout.aliases.items()}

    def receipt(self, rank: int) -> Receipt:
        if rank not in self._receipts:
            name = receipt_file(rank, self.manifest.attempt)
            if rank not in self.here:
                raise CorruptCheckpoint(self._elsewhere(rank))
            receipt = Receipt.parse(self._get(name, self.manifest.receipts[rank]), f"{self.where}/{name}")
            expected = (self.manifest.attempt, self.manifest.step, rank, self.manifest.world_size, *self.manifest.order)
            found = (receipt.attempt, receipt.step, receipt.rank, receipt.world_size)
            if (*found, receipt.run_sequence, receipt.save_index) != expected:
                raise CorruptCheckpoint(f"{self.where}/{name} speaks of another rank or attempt than the manifest")
            if receipt.layout not in self.manifest.layouts:
                raise CorruptCheckpoint(f"{self.where}/{name} names a layout that the manifest does not have")
            self._receipts[rank] = receipt
        return self._receipts[rank]

    @property
    def part(self) -> str:
        """`ranks 0 and 1 of 4`, where the others wrote into other folders; else nothing."""
        ranks = self.manifest.world_size
        return f"{name_ranks(self.here)} of {ranks}" if len(self.here) < ranks else ""

    def _elsewhere(self, rank: int) -> str:
        assert self.manifest.homes is not None
        beside = [r for r, home in enumerate(self.manifest.homes) if home == self.manifest.homes[rank]]
        return (
            f"{self.where} has the files of {self.part}, and those of {name_ranks(beside)} were written into another folder: start the "
            "ranks on the machines that they ran on, or copy the files of all folders into each"
        )

    def nearest(self, ranks: Iterable[int]) -> int | None:
        """The first of some ranks whose file is here."""
        return next((rank for rank in ranks if rank in self.here), None)

    def file(self, rank: int) -> BlockFile:
        """The rank's file, or a base's; its size is checked, a rank's blocks are when they are read."""
        if rank < 0:
            return self.base_files.find(self.bases[-1 - rank])
        receipt = self.receipt(rank)
        path = f"{self.folder}/{rank_file(rank, self.manifest.attempt)}"
        try:
            size = self.storage.size(path)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{self.where}: the file of rank {rank} is missing ({path})") from None
        if size != receipt.size:
            raise CorruptCheckpoint(f"{self.where}: the file of rank {rank} has {size:,} bytes, its receipt says {receipt.size:,}")
        return BlockFile(self.storage, path, size, receipt.blocks, receipt.block_size)

    @property
    def left(self) -> set[str]:
        """Names and keys of the state that it need not hold, and that a resume leaves as it is: none, in a complete checkpoint."""
        return set()

    def read(self, source: int, parts: Sequence[Part]) -> int:
        """Fill the targets of `parts` from one source; returns the bytes read."""
        return read_parts(self.file(source), parts)

    def header(self, rank: int) -> dict[str, Entry]:
        if rank not in self._headers:
            file = self.file(rank)
            what = f"{self.storage.describe()}/{file.path}"
            first = bytearray(8)
            file.fetch(0, memoryview(first))
            try:
                length = header_length(bytes(first), file.size, what)
            except CorruptCheckpoint:
                file.take(0, len(first))  # says which block it is
                raise
            head = file.take(0, length)
            self._headers[rank] = parse_header(bytes(head), file.size, what)[0]
        return self._headers[rank]

    def small(self, rank: int) -> dict[str, Json]:
        """The small state that `rank` wrote."""
        entry = self.header(rank).get(STATE_TENSOR)
        if entry is None:
            raise CorruptCheckpoint(f"{self.where}: the file of rank {rank} has no {STATE_TENSOR}")
        return parse_small(bytes(self.file(rank).take(entry.start, entry.stop)), f"{self.where}: state of rank {rank}")

    def writers(self, spec: TensorSpec, wanted: Box | None = None) -> Iterator[int]:
        """The ranks whose files have a piece of a placed or flat tensor, or of the part of it that is wanted.

        One after the other: who only needs one of thousands should not have to find them all.
        """
        assert spec.placement is not None and spec.shape is not None
        wanted = wanted or Box.whole(spec.shape)
        if isinstance(spec.placement, Flat):
            return (rank for rank, _, _ in spec.placement.pieces(prod(spec.shape), *span(spec.shape, wanted)))
        return (rank for rank, _ in spec.placement.pieces(spec.shape, spec.replica, wanted))

    def exists(self, name: str) -> bool:
        """Whether any file has a tensor: optimizer state of flat units is described wherever it could be."""
        spec = self.tensors[name]
        if spec.shape is None:
            return any(name in self.header(rank) for rank in self.here)
        if spec.slot is None or not isinstance(spec.placement, Flat):
            return True
        writer = self.nearest(self.writers(spec))
        return writer is not None and name in self.header(writer)

    def pieces(self, name: str, spec: TensorSpec, wanted: Box) -> Iterator[Piece]:
        """Every written or named box of a placed or flat tensor that meets `wanted`; the boxes do not overlap."""
        assert spec.placement is not None and spec.shape is not None
        if not isinstance(spec.placement, Flat):
            for rank, box in spec.placement.pieces(spec.shape, spec.replica, wanted):
                if self._in_base(rank, name, spec):
                    yield self._named(name, spec, spec.shape, box)
                else:
                    yield Piece(rank, box, box, self._checked(rank, name, spec.dtype, box.size), spec.dtype)
            return
        for rank, start, stop in spec.placement.pieces(prod(spec.shape), *span(spec.shape, wanted)):
            named = self._in_base(rank, name, spec)
            entry = None if named else self._checked(rank, name, spec.dtype, (stop - start,))
            for box, at in boxes(spec.shape, start, stop):
                if box.intersect(wanted) is None:
                    continue
                if entry is None:
                    yield self._named(name, spec, spec.shape, box)
                    continue
                dtype, shape = stored_as(spec.dtype, box.size)
                begin = entry.start + at * item_size(spec.dtype)
                part = Entry(dtype, shape, begin, begin + box.numel * item_size(spec.dtype))
                yield Piece(rank, box, box, part, spec.dtype)

    def rests_on_base(self, name: str, wanted: Sequence[Box]) -> bool:
        """Whether some rank has named its part of a tensor, of those that meet the boxes, and not written it."""
        spec = self.tensors[name]
        if spec.base is None:
            return False
        if spec.shape is None:
            return any(name not in self.header(rank) for rank in self.here)
        return any(name not in self.header(rank) for box in wanted for rank in self.writers(spec, box))

    def own(self, name: str, rank: int) -> Piece:
        """The copy of a per-rank tensor that is good for `rank`: what it wrote, or what its base holds."""
        spec = self.tensors[name]
        if self._in_base(rank, name, spec):
            return self._named(name, spec, None, None)
        entry = self.entry(rank, name)
        whole = Box.whole(entry.shape[:-1] if spec.dtype == "C128" else entry.shape)
        return Piece(rank, whole, whole, entry, spec.dtype)

    def _in_base(self, rank: int, name: str, spec: TensorSpec) -> bool:
        return spec.base is not None and name not in self.header(rank)

    def _named(self, name: str, spec: TensorSpec, shape: Shape | None, box: Box | None) -> Piece:
        assert isinstance(spec.base, Named)
        entry = self.base_files.entry(spec.base)
        whole = Box.whole(entry.shape)
        if shape not in (None, entry.shape):
            raise CorruptCheckpoint(
                f"{self.where}: {name} is of shape {list(shape or ())}, and {spec.base.tensor} of the base {spec.base.file.file} of "
                f"{list(entry.shape)}"
            )
        return Piece(-1 - self.bases.index(spec.base.file), box or whole, whole, entry, entry.dtype)

    def _checked(self, rank: int, name: str, dtype: str, shape: Shape) -> Entry:
        entry = self.entry(rank, name)
        if (entry.dtype, entry.shape) != stored_as(dtype, shape):
            raise CorruptCheckpoint(
                f"{self.where}: rank {rank} holds {name} as {entry.dtype} {list(entry.shape)}, "
                f"its layout says {dtype} {list(shape)}"
            )
        return entry

    def entry(self, rank: int, name: str) -> Entry:
        try:
            return self.header(rank)[name]
        except KeyError:
            raise CorruptCheckpoint(f"{self.where}: the file of rank {rank} lacks {name}") from None

    def nbytes(self) -> int:
        """Bytes of all placed tensors, each counted once."""
        total = 0
        for spec in self.tensors.values():
            if spec.shape is not None:
                total += Box.whole(spec.shape).numel * item_size(spec.dtype)
        return total

    def _get(self, name: str, expected: str) -> bytes:
        try:
            data = self.storage.get(f"{self.folder}/{name}")
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{self.where}: {name} is missing") from None
        if digest(data) != expected:
            raise CorruptCheckpoint(f"{self.where}: {name} is not what the manifest vouches for")
        return data
