"""Frozen weights that came from a base on disk: where each was read, and the proof that it still is what stands there.

`load_pretrained` leaves at every module where its parameters and buffers were read (an `Origin`), and `claim_base` does the
same for a model that something else has loaded. It is left at the module, which wrappers (FSDP, DDP, PEFT) put elsewhere, but
never replace.

It is believed only with proof. The bytes that this rank should hold are read from the base once (or have just been, by
`load_pretrained`), converted as the parameter is, and their fingerprint is kept. At each save the fingerprint of the live
tensor is taken: where both agree, the tensor is named and not written; where they differ, it is written like any other, for the
parts of this rank alone, whatever other ranks find.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from holdfast.core.boxes import Box
from holdfast.core.flat import Flat, boxes
from holdfast.core.layout import BaseFile, Named
from holdfast.core.manifest import BaseNote
from holdfast.core.safetensors import Entry
from holdfast.engine.blocks import BlockFile, Part, read_parts
from holdfast.engine.digests import Digests
from holdfast.engine.fingerprint import fingerprints, kind_of
from holdfast.errors import CheckpointError
from holdfast.formats.huggingface import StoredTensor
from holdfast.storage import LocalFolder, Storage

if TYPE_CHECKING:
    from holdfast.engine.collect import Collected, Held

log = logging.getLogger("holdfast")

ATTRIBUTE = "_holdfast_origins"
PAGE = 4096
"""The base has no hashes of blocks, so reads are rounded out to pages."""

Extent = Box | tuple[int, int]
"""What of a tensor a rank writes: a box, or of a flat one the elements from the first to before the second."""

Cut = tuple[str, torch.dtype, Extent]
"""Which fingerprint: its kind, the dtype, and what of the tensor it is of."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor was read: as `name` in `file` of a folder. `prints` are fingerprints of parts of it, as they stand there."""

    storage: Storage
    file: str
    size: int
    name: str
    entry: Entry
    prints: dict[Cut, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, storage: Storage, stored: StoredTensor) -> Origin:
        return cls(storage, stored.path, stored.file_size, stored.name, stored.entry)


def leave_origin(module: nn.Module, attribute: str, origin: Origin) -> None:
    module.__dict__.setdefault(ATTRIBUTE, {})[attribute] = origin


def origin_of(module: nn.Module, attribute: str) -> Origin | None:
    found: Origin | None = module.__dict__.get(ATTRIBUTE, {}).get(attribute)
    return found


def note_of(model: str, storage: Storage) -> BaseNote:
    """What is noted of a folder; a snapshot in the Hub's cache is `models--OWNER--NAME/snapshots/REVISION/…`."""
    where = storage.describe()
    repository, revision = None, None
    if isinstance(storage, LocalFolder):
        parts = storage.root.parts
        for kind, middle, last in zip(parts, parts[1:], parts[2:], strict=False):
            if kind.startswith("models--") and middle == "snapshots":
                repository, revision = kind.removeprefix("models--").replace("--", "/"), last
    return BaseNote(model, where, repository, revision)


class Bases:
    """What the frozen tensors of a rank's registered models are parts of."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._told: set[str] = set()
        self._broken: set[str] = set()
        """Tensors whose base can no longer be read."""
        self.digests = Digests(rank)
        self.notes: tuple[BaseNote, ...] = ()
        """From where the models came, trained weights and all."""

    def take_notes(self, models: Mapping[str, nn.Module]) -> None:
        found: dict[tuple[str, str], BaseNote] = {}
        for name, model in models.items():
            for module in model.modules():
                for origin in module.__dict__.get(ATTRIBUTE, {}).values():
                    found.setdefault((name, origin.storage.describe()), note_of(name, origin.storage))
        self.notes = tuple(found.values())

    def prepare(self, collected: Collected) -> None:
        """Read from the bases what no fingerprint is known of, and begin with the digests of their files."""
        self.digests.want(dict.fromkeys((o.storage, o.file) for o in collected.origins.values()))
        for name, held in _with_origin(collected):
            self._expected(name, collected.origins[name], held)

    def settle(self, collected: Collected) -> None:
        """Move the tensors that are what their base holds from `tensors` to `named`."""
        for name, origin in list(collected.origins.items()):
            if name in self._broken or self.digests.failed(origin.storage, origin.file):
                del collected.origins[name]
        candidates = list(_with_origin(collected))
        expected = [self._expected(name, collected.origins[name], held) for name, held in candidates]
        live = fingerprints([held.local for _, held in candidates], [kind_of(held.local) for _, held in candidates])
        changed = []
        for (name, held), then, now in zip(candidates, expected, live, strict=True):
            if then == now:
                collected.named[name] = held
                del collected.tensors[name]
            else:
                changed.append(name)
        new = set(changed) - self._told
        if new:
            self._told |= new
            where = collected.origins[min(new)].storage.describe() if min(new) in collected.origins else "their base"
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            log.info("rank %d: %s%s: frozen, and not what %s holds: written into checkpoints", self._rank, min(new), more, where)

    def named(self, origin: Origin) -> Named:
        """For the layout; waits for the file's digest.

        Raises:
            OSError, EOFError: the file can no longer be read.
        """
        return Named(BaseFile(origin.file, origin.size, self.digests.get(origin.storage, origin.file)), origin.name)

    def unchanged(self, origin: Origin, held: Held) -> bool:
        """Whether a live tensor is known to be what its base holds; reads nothing."""
        known = origin.prints.get(_cut(held, self._rank))
        return known is not None and known == fingerprints([held.local], [kind_of(held.local)])[0]

    def _expected(self, name: str, origin: Origin, held: Held) -> str | None:
        cut = _cut(held, self._rank)
        if cut not in origin.prints and name not in self._broken:
            try:
                origin.prints[cut] = _print_in_base(origin, held, self._rank)
            except (CheckpointError, OSError) as error:
                self._broken.add(name)
                log.warning("%s is written into checkpoints: its base cannot be read again: %s", name, error)
        return origin.prints.get(cut)


def keep_prints(found: Iterable[tuple[Origin, Held]], rank: int) -> None:
    """These tensors have just been read from there: their fingerprints are those of the base."""
    pairs = list(found)
    live = fingerprints([held.local for _, held in pairs], [kind_of(held.local) for _, held in pairs])
    for (origin, held), value in zip(pairs, live, strict=True):
        origin.prints[_cut(held, rank)] = value


def _with_origin(collected: Collected) -> Iterator[tuple[str, Held]]:
    for name in collected.origins:
        if name in collected.tensors:
            yield name, collected.tensors[name]


def _cut(held: Held, rank: int) -> Cut:
    return kind_of(held.local), held.local.dtype, _extent(held, rank)


def _extent(held: Held, rank: int) -> Extent:
    placement, shape = held.spec.placement, held.spec.shape
    coordinate = placement.mesh.coordinate(rank) if placement is not None else None
    if coordinate is None or placement is None or shape is None:
        return Box.whole(tuple(held.local.shape))
    return placement.written(prod(shape), coordinate) if isinstance(placement, Flat) else placement.box(shape, coordinate)


def _print_in_base(origin: Origin, held: Held, rank: int) -> str:
    """Of what the base holds in the place of `held`, in its dtype. Takes the tensor's memory on the host for the moment."""
    fresh = torch.empty(held.local.shape, dtype=held.local.dtype)
    extent = _extent(held, rank)
    if isinstance(extent, Box):
        targets = [(extent, fresh)]
    else:
        targets = [(box, fresh[at : at + box.numel].view(box.size)) for box, at in boxes(origin.entry.shape, *extent)]
    read_from(origin, targets)
    return fingerprints([fresh], [kind_of(held.local)])[0]


def read_from(origin: Origin, targets: Iterable[tuple[Box, torch.Tensor]]) -> None:
    """Fill boxes of a tensor from its base, converted to the targets' dtype."""
    entry = origin.entry
    whole = Box.whole(entry.shape)
    file = BlockFile(origin.storage, origin.file, origin.size, block_size=PAGE)
    read_parts(file, [Part(origin.name, entry.dtype, entry, whole, box, view) for box, view in targets])

