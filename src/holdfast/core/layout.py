"""The layout: what the state is and how it is cut, in O(tensors + ranks), the same document for all ranks in the usual case.

A tensor is either *placed* (its global shape, a mesh and what each mesh dimension does with it: any reader computes where
any rank's piece lies), *flat* (its global shape and its place in a flat unit that a mesh cuts: the same holds), or *per
rank* (every rank that has it wrote its own, and that rank's file says in which shape). Of a placed tensor that several ranks
hold, one copy is written; which one is spread over the copies by bytes and recorded. Of a flat one, each copy writes a part.

A frozen tensor may name where it was read from: a file of the *base*, by the digest of its content, and the tensor's name in
it. What a rank should have written of such a tensor and has not in its file is in the base, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from holdfast.core.boxes import REPLICATE, Mesh, Placement, Shape
from holdfast.core.documents import MAX_DIMENSIONS, Fields, Json, canonical, digest, parse
from holdfast.core.flat import Flat
from holdfast.core.safetensors import ITEM_SIZE
from holdfast.errors import CorruptCheckpoint

FORMAT, VERSION, WITH_BASES = "holdfast-layout", 1, 2
"""Version 2 is version 1 with names of base files; where there are none, version 1 is written, byte for byte."""

MAX_RANKS = 1 << 20
_STORED_AS = {"C128": "F64"}
"""safetensors has no complex128: its parts are stored as float64 with a last dimension of 2."""


def item_size(dtype: str) -> int:
    return 16 if dtype == "C128" else ITEM_SIZE[dtype]


def stored_as(dtype: str, shape: Shape) -> tuple[str, Shape]:
    """How a tensor of this dtype stands in a safetensors header."""
    return (_STORED_AS[dtype], (*shape, 2)) if dtype in _STORED_AS else (dtype, shape)


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """Of which optimizer, parameter and key a tensor is the state."""

    optimizer: str
    param: str
    key: str


_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"(?!\.{1,2}$)[^/\\:\x00]{1,255}")
"""A plain file name: it is looked for in the folder of a base, and nowhere else."""


@dataclass(frozen=True, slots=True, order=True)
class BaseFile:
    """A safetensors file that frozen weights were read from, by its content; `file` is its name in its folder."""

    file: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor in a base file, stored whole there under the name `tensor`, perhaps in another type."""

    file: BaseFile
    tensor: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the state. `shape` and `placement` are None for a per-rank tensor.

    With `base`, a piece that is not in its rank's file is that of the named tensor, converted to `dtype`.
    """

    dtype: str
    shape: Shape | None
    placement: Placement | Flat | None
    replica: int = 0
    slot: OptimizerSlot | None = None
    base: Named | None = None


@dataclass(frozen=True)
class Layout:
    """All tensors by clean name; `aliases` maps further names of tied parameters to the one they are stored under."""

    world_size: int
    tensors: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]

    @cached_property
    def bases(self) -> list[BaseFile]:
        """The base files that tensors name, in order."""
        return sorted({spec.base.file for spec in self.tensors.values() if spec.base is not None})

    @cached_property
    def encoded(self) -> bytes:
        bases = {file: index for index, file in enumerate(self.bases)}
        placements: dict[Placement, int] = {}
        for spec in self.tensors.values():
            if spec.placement is not None:
                placements.setdefault(_mesh_and_dims(spec.placement), len(placements))
        document: dict[str, Json] = {
            "format": FORMAT,
            "version": WITH_BASES if bases else VERSION,
            "world_size": self.world_size,
            "placements": [_placement_to_json(p) for p in placements],
            "tensors": {name: _spec_to_json(spec, placements, bases) for name, spec in self.tensors.items()},
            "aliases": dict(self.aliases),
        }
        if bases:
            document["bases"] = [{"file": b.file, "size": b.size, "sha256": b.sha256} for b in bases]
        return canonical(document)

    @cached_property
    def digest(self) -> str:
        return digest(self.encoded)

    @classmethod
    def parse(cls, data: bytes, what: str) -> Layout:
        """Read a layout of unknown origin.

        Raises:
            CorruptCheckpoint: it contradicts itself, or a later version wrote it.
        """
        fields = Fields(parse(data, what), what)
        fields.expect("format", FORMAT)
        version = fields.version(VERSION, WITH_BASES)
        world_size = fields.count("world_size", MAX_RANKS)
        placements = [_placement_from_json(p, world_size, what) for p in fields.get("placements", list)]
        bases = [_base_from_json(b, f"{what}: base") for b in fields.get("bases", list)] if version == WITH_BASES else None
        tensors = {
            name: _spec_from_json(value, placements, bases, f"{what}: tensor {name!r}")
            for name, value in fields.get("tensors", dict).items()
        }
        aliases = fields.get("aliases", dict)
        for alias, name in aliases.items():
            if name not in tensors or alias in tensors:
                raise CorruptCheckpoint(f"{what}: alias {alias!r} of {name!r}, which is no tensor of its own")
        return cls(world_size, tensors, aliases)


def spread_replicas(tensors: Mapping[str, TensorSpec], based: Collection[str] = ()) -> dict[str, TensorSpec]:
    """Choose for every tensor with several copies the one that is written, so that each copy's ranks write the same.

    The largest first, each to the copy that has the fewest bytes so far: a function of the layout alone, so that all ranks
    find the same without asking. Those with a base (`based`) are counted apart, since they are hardly ever written.
    """
    load: dict[tuple[Placement, bool], list[int]] = {}
    chosen = dict(tensors)
    sizes = {name: item_size(t.dtype) * prod(t.shape) for name, t in tensors.items() if t.shape is not None}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        spec = tensors[name]
        if not isinstance(spec.placement, Placement) or spec.placement.replicas == 1:
            continue
        loads = load.setdefault((spec.placement, name in based), [0] * spec.placement.replicas)
        replica = loads.index(min(loads))
        loads[replica] += sizes[name]
        chosen[name] = replace(spec, replica=replica)
    return chosen


def _mesh_and_dims(placement: Placement | Flat) -> Placement:
    """What the tensors of all flat units over one mesh have in common: copies, and a cut of what has one dimension."""
    return Placement(placement.mesh, (REPLICATE, 0)) if isinstance(placement, Flat) else placement


def _placement_to_json(placement: Placement) -> Json:
    mesh = placement.mesh
    ranks = None if mesh.ranks == tuple(range(len(mesh.ranks))) else list(mesh.ranks)
    dims = ["R" if d == REPLICATE else d for d in placement.dims]
    return {"mesh": list(mesh.shape), "ranks": ranks, "dims": dims}


def _placement_from_json(document: Json, world_size: int, what: str) -> Placement:
    fields = Fields(document, f"{what}: placement")
    shape = fields.counts("mesh", MAX_RANKS)
    if prod(shape) > world_size:
        raise CorruptCheckpoint(f"{what}: a mesh of shape {list(shape)} for {world_size} ranks")
    ranks = tuple(range(prod(shape))) if document.get("ranks") is None else fields.counts("ranks", max(0, world_size - 1))
    dims = fields.get("dims", list)
    if not all(d == "R" or (type(d) is int and 0 <= d < MAX_DIMENSIONS) for d in dims):
        raise CorruptCheckpoint(f"{what}: placement {dims!r:.60} is neither 'R' nor a tensor dimension")
    try:
        return Placement(Mesh(shape, ranks), tuple(REPLICATE if d == "R" else d for d in dims))
    except ValueError as error:
        raise CorruptCheckpoint(f"{what}: {error}") from error


def _spec_to_json(spec: TensorSpec, placements: Mapping[Placement, int], bases: Mapping[BaseFile, int]) -> Json:
    document: dict[str, Json] = {"dtype": spec.dtype}
    if spec.placement is not None and spec.shape is not None:
        document |= {"shape": list(spec.shape), "placement": placements[_mesh_and_dims(spec.placement)]}
        if isinstance(spec.placement, Flat):
            document["flat"] = [spec.placement.offset, spec.placement.shard]
        else:
            document["replica"] = spec.replica
    if spec.slot is not None:
        document["slot"] = [spec.slot.optimizer, spec.slot.param, spec.slot.key]
    if spec.base is not None:
        document["base"] = [bases[spec.base.file], spec.base.tensor]
    return document


def _base_from_json(document: Json, what: str) -> BaseFile:
    fields = Fields(document, what)
    file, sha256 = fields.get("file", str), fields.get("sha256", str)
    if not _FILE.fullmatch(file):
        raise CorruptCheckpoint(f"{what}: {file!r:.60} is no plain file name")
    if not _SHA256.fullmatch(sha256):
        raise CorruptCheckpoint(f"{what}: field 'sha256' is no digest")
    return BaseFile(file, fields.count("size"), sha256)


def _named_from_json(fields: Fields, bases: list[BaseFile]) -> Named:
    parts = fields.get("base", list)
    if len(parts) != 2 or type(parts[0]) is not int or not 0 <= parts[0] < len(bases) or not isinstance(parts[1], str):
        raise CorruptCheckpoint(f"{fields.what}: field 'base' should be one of {len(bases)} base files and a tensor's name")
    return Named(bases[parts[0]], parts[1])


def _spec_from_json(document: Json, placements: list[Placement], bases: list[BaseFile] | None, what: str) -> TensorSpec:
    fields = Fields(document, what)
    dtype = fields.get("dtype", str)
    if dtype != "C128" and dtype not in ITEM_SIZE:
        raise CorruptCheckpoint(f"{what}: unknown dtype {dtype!r}")
    slot = None
    if "slot" in document:
        parts = fields.get("slot", list)
        if len(parts) != 3 or not all(isinstance(p, str) for p in parts):
            raise CorruptCheckpoint(f"{what}: field 'slot' should name optimizer, parameter and key")
        slot = OptimizerSlot(*parts)
    base = _named_from_json(fields, bases) if bases is not None and "base" in document else None
    if "placement" not in document:
        return TensorSpec(dtype, None, None, 0, slot, base)
    shape = fields.shape()
    index = fields.count("placement")
    if index >= len(placements):
        raise CorruptCheckpoint(f"{what}: placement {index} of {len(placements)}")
    placement = placements[index]
    if "flat" in document:
        return TensorSpec(dtype, shape, _flat_from_json(fields, shape, placement), 0, slot, base)
    if any(d != REPLICATE and d >= len(shape) for d in placement.dims):
        raise CorruptCheckpoint(f"{what}: shape {list(shape)} does not fit placement {index}")
    replica = fields.count("replica")
    if replica >= placement.replicas:
        raise CorruptCheckpoint(f"{what}: copy {replica} of {placement.replicas}")
    return TensorSpec(dtype, shape, placement, replica, slot, base)


def _flat_from_json(fields: Fields, shape: Shape, placement: Placement) -> Flat:
    numbers = fields.counts("flat")
    if placement.dims != (REPLICATE, 0) or len(numbers) != 2 or numbers[1] == 0:
        raise CorruptCheckpoint(f"{fields.what}: field 'flat' should be offset and shard size in a mesh of copies x shards")
    flat = Flat(placement.mesh, *numbers)
    if flat.offset + prod(shape) > flat.shard * placement.mesh.shape[1]:
        raise CorruptCheckpoint(f"{fields.what}: shape {list(shape)} at {flat.offset} goes past the end of its unit")
    return flat
