"""Pretrained weights from a Hugging Face folder, straight into the shards of a model that was built on the meta device.

1. *Plan*, with no memory touched: pair the tensors of the model with those of the folder by name, compare shapes, find a
   value for every buffer that no file has. Whatever does not fit is told at once, in one error.
2. *Materialise* (`engine.meta`): allocate this rank's shard of each tensor.
3. *Read* the box that each shard is of its tensor. Every rank reads for itself: no collective, no broadcast, and none ever
   holds the whole. A shard of whole rows (FSDP2's own) costs its own bytes, up to a page at either end; of a shard of
   columns, the gaps between rows that are shorter than a block (1 MiB) are read too.

Memory beside the shards: a few read buffers of 8 MiB, and the model's non-persistent buffers twice for a moment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.core.boxes import REPLICATE, Box, Mesh, Placement
from holdfast.engine.base import Origin, keep_prints, leave_origin, origin_of
from holdfast.engine.blocks import BlockFile, Part, read_parts
from holdfast.engine.collect import Held, held_of, world
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.engine.fsdp1 import FlatPiece
from holdfast.engine.meta import home_of, materialise, values_without_file
from holdfast.engine.names import named_state, unwrap
from holdfast.engine.reading import flat_targets
from holdfast.errors import IncompatibleCheckpoint, UsageError
from holdfast.formats.huggingface import StoredTensor, stored_in_any_variant, stored_tensors
from holdfast.formats.peft import WRAPPER
from holdfast.storage import LocalFolder, Storage

Model = TypeVar("Model", bound=nn.Module)
Initial = Callable[[str, tuple[int, ...]], torch.Tensor | None]

PAGE = 4096
"""There are no hashes to check, so reads are rounded out to pages and not to hash blocks."""


def load_pretrained(
    model: Model,
    folder: str | os.PathLike[str] | Storage,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    variant: str | None = None,
    key_mapping: Mapping[str, str] | None = None,
    build: Callable[[], nn.Module] | None = None,
    allow_unexpected: bool = False,
    initial: Initial | None = None,
) -> Model:
    """Fill `model` from `folder` and return it. Every rank calls it for itself, at any time.

    Args:
        model: built on the meta device or not; sharded by FSDP2, wrapped by FSDP1, or neither, before or after DDP. Gradients and
            optimizer state are no business of this function: call it before there are any.
        folder: holds `model*.safetensors` or `diffusion_pytorch_model*.safetensors`, one file or several with their index.
        dtype: of floating-point parameters and persistent buffers; None keeps the model's. Values are converted on the way.
            FSDP2 fixes its types at the first forward, FSDP1 when it wraps: change them before.
        device: where tensors go that are on the meta device; None means the mesh's device (the host for what FSDP2
            offloads), and without a mesh torch's default device.
        variant: as in `model.fp16.safetensors`.
        key_mapping: regular expression -> replacement for names of the folder, the first that matches; for folders whose
            names differ by more than a leading part.
        build: makes a second model of the same kind; needed for non-persistent buffers on the meta device where the model has
            no `config` to build it from.
        allow_unexpected: do not mind tensors of the folder that the model has no place for.
        initial: gives the whole value of a parameter that the folder does not have (an adapter's), by its name and shape, the
            same on every rank; None where it should be in the folder. These parameters keep the model's dtype.

    Raises:
        CheckpointNotFound: no such folder, or no safetensors weights in it.
        IncompatibleCheckpoint: names, shapes or kinds of number differ; the model is as it was.
        CorruptCheckpoint: a file is damaged or lies about itself.
        UsageError: the model cannot be filled like this (a placement without boxes, no source for a buffer).
    """
    storage = LocalFolder(folder, follow_links=True) if isinstance(folder, str | os.PathLike) else folder
    fills, made = _plan(
        model, stored_tensors(storage, variant), storage.describe(), key_mapping or {}, allow_unexpected, initial
    )
    missing = values_without_file(model, {id(fill.target) for fill in fills}, build)

    for fill in fills:
        if isinstance(fill.target, FlatPiece) and dtype not in (None, fill.target.dtype):
            raise UsageError(
                f"FSDP1 holds {fill.name} in {fill.target.dtype}, which cannot be changed any more: convert the model with "
                f".to({dtype}) before FSDP1 wraps it (on the meta device that costs nothing)"
            )
    home = home_of(model, device)
    materialise(model, [fill.target for fill in fills if isinstance(fill.target, torch.Tensor)], dtype, home)
    materialise(model, [new.target for new in made if isinstance(new.target, torch.Tensor)], None, home)
    for value in missing:
        value.put(home)
    _read(storage, fills)
    for new in made:
        new.put()
    _leave_origins(storage, fills)
    return model


def claim_base(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Say that `model`, loaded by other means, has its values from `folder`: believed of a tensor once it has been compared.

    Names are those of the model below an adapter; tensors without a counterpart are left alone.

    Raises:
        CheckpointNotFound: no such folder, or no safetensors weights in it.
        UsageError: no tensor of the folder has the name and shape of one of the model.
    """
    storage = LocalFolder(folder, follow_links=True)
    stored = stored_in_any_variant(storage)
    state = named_state({"": model})
    names = {full: _bare(full).removeprefix(WRAPPER).replace(".base_layer.", ".") for full in state.places}
    found = _aligned(stored, set(names.values()), str(getattr(unwrap(model), "base_model_prefix", "")), {})
    pairs = [(place, found[names[full]]) for full, place in state.places.items() if names[full] in found]
    if not pairs:
        raise UsageError(f"base: {storage.describe()} has no tensor named like one of the {type(unwrap(model)).__name__}")
    for (module, attribute), source in pairs:
        known = origin_of(module, attribute)
        if known is None or (known.storage.describe(), known.file) != (storage.describe(), source.path):
            leave_origin(module, attribute, Origin.of(storage, source))


def _leave_origins(storage: Storage, fills: Iterable[_Fill]) -> None:
    """Tell the modules where their tensors are from; of frozen ones keep what proves it."""
    rank = world()[0]
    frozen: list[tuple[Origin, Held]] = []
    for fill in fills:
        origin = Origin.of(storage, fill.source)
        for module, attribute in fill.places:
            leave_origin(module, attribute, origin)
        trained = fill.target.trained if isinstance(fill.target, FlatPiece) else fill.target.requires_grad
        if not trained:
            frozen.append((origin, held_of(fill.name, fill.target)))
    keep_prints(frozen, rank)


@dataclass(frozen=True, slots=True)
class _Fill:
    """A tensor of the model (whole, a DTensor, or a piece of a flat unit), and where its values lie."""

    name: str
    target: torch.Tensor | FlatPiece
    source: StoredTensor
    places: tuple[tuple[nn.Module, str], ...]
    """(module, attribute) under each of its names."""

    def targets(self) -> Iterator[tuple[Box, torch.Tensor]]:
        return _targets(self.name, self.target)


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of the model that no file has, and its whole value."""

    name: str
    target: torch.Tensor | FlatPiece
    value: torch.Tensor

    def put(self) -> None:
        for box, local in _targets(self.name, self.target):
            part = tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))
            local.copy_(self.value[part])


def _targets(name: str, target: torch.Tensor | FlatPiece) -> Iterator[tuple[Box, torch.Tensor]]:
    """The part of a tensor that this rank holds, as boxes with their memory."""
    if isinstance(target, FlatPiece):
        yield from flat_targets(target, target.local)
    else:
        local = target.to_local() if isinstance(target, DTensor) else target
        yield _box(name, target), local.detach()


def _plan(
    model: nn.Module,
    stored: dict[str, StoredTensor],
    where: str,
    key_mapping: Mapping[str, str],
    allow_unexpected: bool,
    initial: Initial | None,
) -> tuple[list[_Fill], list[_Made]]:
    """Pair every parameter and persistent buffer with a stored tensor; a tied one is found under any of its names."""
    state = named_state({"": model})
    targets = {_bare(name): tensor for name, tensor in state.tensors.items()}
    names = {name: [name] for name in targets}
    for alias, name in state.aliases.items():
        names[_bare(name)].append(_bare(alias))
    known = {name for group in names.values() for name in group}

    inner = unwrap(model)
    found = _aligned(stored, known, str(getattr(inner, "base_model_prefix", "")), key_mapping)
    fills, made, missing, differing = [], [], [], []
    for name, target in targets.items():
        source = next((found[n] for n in names[name] if n in found), None)
        if source is None:
            value = initial(name, tuple(target.shape)) if initial is not None else None
            if value is None:
                missing.append(name)
            else:
                made.append(_Made(name, target, value))
        elif not _fits(target, source):
            stored_as = _described(DTYPE_OF[source.entry.dtype], source.entry.shape)
            differing.append(f"{name} is {stored_as} in the folder and {_described(target.dtype, target.shape)} here")
        else:
            fills.append(_Fill(name, target, source, tuple(state.places[f"model.{n}"] for n in names[name])))
            if isinstance(target, DTensor):
                _box(name, target)  # is refused here where it has none
    unexpected = [] if allow_unexpected else sorted(found.keys() - known - _ignored(inner, found))
    if missing or unexpected or differing:
        hint = _hint(inner, missing, unexpected, differing)
        raise IncompatibleCheckpoint(
            f"{where} does not fit this {type(inner).__name__}: "
            + "; ".join(
                f"{len(names)} {what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
                for names, what in (
                    (missing, "missing there"),
                    (unexpected, "unknown to the model"),
                    (differing, "of another shape or kind"),
                )
                if names
            )
            + hint
        )
    return fills, made


def _read(storage: Storage, fills: Iterable[_Fill]) -> int:
    """Read the boxes, file by file; returns the bytes read."""
    files: dict[str, tuple[int, list[Part]]] = {}
    for fill in fills:
        entry = fill.source.entry
        parts = files.setdefault(fill.source.path, (fill.source.file_size, []))[1]
        parts += [Part(fill.name, entry.dtype, entry, Box.whole(entry.shape), box, view) for box, view in fill.targets()]
    return sum(
        read_parts(BlockFile(storage, path, size, block_size=PAGE), parts) for path, (size, parts) in files.items()
    )


def _box(name: str, tensor: torch.Tensor) -> Box:
    """Which part of the whole tensor this rank holds."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box.whole(shape)
    mesh, dims = tensor.device_mesh, []
    for placement in tensor.placements:
        if type(placement) is not Shard and not isinstance(placement, Replicate):
            raise UsageError(f"load_pretrained cannot fill {name}, which is placed as {placement}")
        dims.append(placement.dim % len(shape) if type(placement) is Shard else REPLICATE)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"load_pretrained was called on a rank that holds no part of {name}: it is not in {mesh}")
    ranks = tuple(mesh.mesh.flatten().tolist())
    return Placement(Mesh(tuple(mesh.shape), ranks), tuple(dims)).box(shape, tuple(coordinate))


# ------------------------------------------------------------------------------------------------------------ the names


def _bare(name: str) -> str:
    return name.removeprefix("model.")  # which `named_state` puts before all of them


def _aligned(
    stored: dict[str, StoredTensor], known: set[str], base: str, key_mapping: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """The stored tensors under the model's names.

    A leading part may stand on one side only: the folder is of a body and the model has a head or the other way round
    (`base`), or all names of one side share it (the attribute of a wrapper that another version of the library does not
    have). Taken is the reading under which most names meet, the plain one if it is as good.
    """
    if key_mapping:
        stored = {_mapped(name, key_mapping): tensor for name, tensor in stored.items()}
    readings = [stored]
    for prefix in sorted({f"{base}." if base else "", _shared_prefix(stored), _shared_prefix(known)} - {""}):
        readings.append({n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)})
        readings.append({prefix + n: t for n, t in stored.items()})
    return max(readings, key=lambda reading: len(reading.keys() & known))


def _mapped(name: str, key_mapping: Mapping[str, str]) -> str:
    for pattern, replacement in key_mapping.items():
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name


def _shared_prefix(names: Iterable[str]) -> str:
    """`part.` when all names begin with it, else the empty string."""
    first = {name.split(".", 1)[0] if "." in name else "" for name in names}
    return f"{first.pop()}." if len(first) == 1 and "" not in first else ""


def _fits(target: torch.Tensor | FlatPiece, source: StoredTensor) -> bool:
    stored = DTYPE_OF[source.entry.dtype]
    same_kind = (stored.is_floating_point, stored.is_complex) == (
        target.dtype.is_floating_point,
        target.dtype.is_complex,
    )
    return same_kind and tuple(target.shape) == source.entry.shape


def _ignored(inner: nn.Module, names: Iterable[str]) -> set[str]:
    """Names that a folder may have beside the model's: what its class says, and buffers that the model makes itself.

    The latter by their last two parts: older folders hold `rotary_emb.inv_freq` once for every layer.
    """
    patterns = getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ()
    own = {_last_two(name) for name, _ in inner.named_buffers()}
    return {name for name in names if _last_two(name) in own or any(re.search(p, name) for p in patterns)}


def _last_two(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])


def _described(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _hint(inner: nn.Module, missing: list[str], unexpected: list[str], differing: list[str]) -> str:
    """What to do next."""
    ties = getattr(inner, "all_tied_weights_keys", None) or {}
    for name, source in ties.items():
        if name in missing:
            return (
                f". {name} should be the same parameter as {source}, and is one of its own: give both modules to one "
                "fully_shard call, so that they stay tied"
            )
    if missing and unexpected:
        return ". Where only names differ, pass key_mapping={pattern: replacement}"
    if unexpected and not missing and not differing:
        return ". Pass allow_unexpected=True to leave them out"
    return ". Build the model from the config.json of this folder"
