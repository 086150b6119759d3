"""From a checkpoint into the live objects, in three stages: match, read, install.

*Match* compares names, shapes and dtypes and finds the pieces of every tensor in the ranks' files, before any memory is
touched. *Read* fills parameters and buffers in place and optimizer state into new tensors, file by file. *Install* hands
the optimizers their state and the other objects theirs. No other rank is asked, and no optimizer makes a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.core.boxes import REPLICATE, Box, Placement
from holdfast.core.documents import Json
from holdfast.core.layout import TensorSpec
from holdfast.engine import rng, statetree
from holdfast.engine.blocks import Part, read_parts
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.collect import Registered, describe, encode_stateful, mesh_of, param_names
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.engine.names import NamedState, join, named_state
from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint

log = logging.getLogger("holdfast")

_SHOWN = 5


@dataclass
class Restore:
    """What is to be read, by rank whose file holds it, and what to do with it afterwards."""

    checkpoint: Checkpoint
    registered: Registered
    small: dict[str, Json]
    same_world: bool
    parts: dict[int, list[Part]] = field(default_factory=dict)
    new_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    install: list[Callable[[], None]] = field(default_factory=list)


def match(checkpoint: Checkpoint, registered: Registered) -> Restore:
    """Find where everything that this rank needs lies.

    Raises:
        IncompatibleCheckpoint: another model or optimizer, or a state that cannot go to this number of ranks.
        CorruptCheckpoint: the checkpoint's documents do not hold.
    """
    same_world = checkpoint.manifest.world_size == registered.world_size
    small = checkpoint.small(registered.rank if same_world else 0)
    plan = Restore(checkpoint, registered, small, same_world)
    names = named_state(registered.models)
    _match_models(plan, names)
    for key, optimizer in registered.optimizers.items():
        _match_optimizer(plan, key, optimizer, names)
    for key, value in registered.stateful.items():
        _match_stateful(plan, key, value)
    return plan


def read(plan: Restore) -> int:
    """Read all parts into their tensors; returns the bytes read from files."""
    return sum(read_parts(plan.checkpoint.file(rank), parts) for rank, parts in sorted(plan.parts.items()))


def install(plan: Restore) -> None:
    """Give the optimizers and the other objects what was read, and put the generators back."""
    for action in plan.install:
        action()
    restore_rng(plan)


def restore_rng(plan: Restore) -> None:
    """This rank's generators as they were saved; those of a rank that the saved run did not have begin anew."""
    saved, rank = plan.checkpoint.manifest, plan.registered.rank
    if rank < saved.world_size:
        small = plan.small if plan.same_world else plan.checkpoint.small(rank)
        rng.restore(small["rng"], f"{plan.checkpoint.where}: generators of rank {rank}")
        return
    seed = int(plan.checkpoint.digest[:12], 16) + rank
    log.info("rank %d: the checkpoint was saved by %d ranks; this rank's generators begin with seed %d", rank, saved.world_size, seed)
    rng.reseed(seed)


def _match_models(plan: Restore, names: NamedState) -> None:
    saved = plan.checkpoint.tensors
    needed = names.tensors
    source = {name: _saved_name(plan.checkpoint, name) for name in needed}
    missing = [name for name, found in source.items() if found is None]
    known = {*needed, *names.aliases}
    extra = [name for name in saved if name.partition(".")[0] == "model" and name not in known]
    if missing or extra:
        raise IncompatibleCheckpoint(
            f"{plan.checkpoint.where} is a checkpoint of another model: "
            + "; ".join(_first(what, found) for what, found in (("it lacks", missing), ("the model lacks", extra)) if found)
        )
    differing = []
    for name, tensor in needed.items():
        spec = saved[source[name] or name]
        shape = _saved_shape(plan, source[name] or name, spec)
        if shape != tuple(tensor.shape) or DTYPE_OF[spec.dtype] != tensor.dtype:
            differing.append(f"{name}: {spec.dtype} {list(shape)} there, {str(tensor.dtype)[6:]} {list(tensor.shape)} here")
    if differing:
        raise IncompatibleCheckpoint(f"{plan.checkpoint.where} does not fit the model: {_first('', differing).strip()}")
    for name, tensor in needed.items():
        _add_parts(plan, source[name] or name, tensor)


def _saved_name(checkpoint: Checkpoint, name: str) -> str | None:
    """Under which name the checkpoint holds a tensor: its own, or that of a parameter it was tied to."""
    return name if name in checkpoint.tensors else checkpoint.aliases.get(name)


def _first(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} {', '.join(sorted(names)[:_SHOWN])}{more}"


def _match_optimizer(plan: Restore, key: str, optimizer: torch.optim.Optimizer, names: NamedState) -> None:
    where = join("optimizer", key)
    document = plan.small.get("state", {}).get(where)
    if document is None:
        raise IncompatibleCheckpoint(f"{plan.checkpoint.where} has no state for {where}: it was saved without this optimizer")
    if len(document["groups"]) != len(optimizer.param_groups):
        raise IncompatibleCheckpoint(
            f"{plan.checkpoint.where}: {where} had {len(document['groups'])} parameter groups, it has {len(optimizer.param_groups)}"
        )
    by_id = param_names(key, optimizer, names)
    params = {by_id[id(p)]: (p, g) for g in optimizer.param_groups for p in g["params"]}
    saved = {name for group in document["groups"] for name in group["params"]}
    for what, odd in (("dropped: it trains no longer", saved - params.keys()), ("begun anew: it was not trained then", params.keys() - saved)):
        if odd:
            log.warning("%s: optimizer state is %s: %s", plan.checkpoint.where, what, _first("", sorted(odd)).strip())
    state: dict[str, dict[str, Any]] = {}
    for name, spec in plan.checkpoint.tensors.items():
        slot = spec.slot
        if slot is None or slot.optimizer != key or slot.param not in params:
            continue
        if spec.placement is None and plan.same_world and name not in plan.checkpoint.header(plan.registered.rank):
            continue  # this rank held no such state
        param, group = params[slot.param]
        tensor = _new_state(plan, name, spec, slot.key, param, group)
        _add_parts(plan, name, tensor)
        state.setdefault(slot.param, {})[slot.key] = tensor
    resolve = _resolver(plan)
    values = {name: _mapping(doc, f"{where}.{name}", resolve) for name, doc in document["values"].items()}
    groups = [_mapping(g["values"], f"{where}.param_groups[{i}]", resolve) for i, g in enumerate(document["groups"])]

    def install_optimizer() -> None:
        optimizer.state.clear()
        for name, (param, _) in params.items():
            if name in state or name in values:
                optimizer.state[param] = {**state.get(name, {}), **values.get(name, {})}
        for group, loaded in zip(optimizer.param_groups, groups, strict=True):
            group.update(loaded)

    plan.install.append(install_optimizer)


def _mapping(document: Json, what: str, resolve: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    decoded = statetree.decode(document, what, resolve)
    if not isinstance(decoded, dict):
        raise CorruptCheckpoint(f"{what}: expected a dict, found a {type(decoded).__name__}")
    return decoded


def _new_state(plan: Restore, name: str, spec: TensorSpec, key: str, param: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """An empty tensor for one entry of a parameter's optimizer state, laid out for this run.

    State of the parameter's shape is laid out like the parameter. Other sharded state (Prodigy's flattened slices) keeps its
    placements over the parameter's mesh. What is left is whole on every rank.
    """
    dtype, shape = DTYPE_OF[spec.dtype], _saved_shape(plan, name, spec)
    if shape == tuple(param.shape) and (spec.placement is not None or not isinstance(param, DTensor)):
        return torch.empty_like(param, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)
    if not shape:  # torch keeps a step counter on the host unless the kernel wants it beside the parameter
        device = param.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        return torch.empty((), dtype=dtype, device=device)
    sharded = spec.placement is not None and any(d != REPLICATE for d in spec.placement.dims)
    if sharded and isinstance(param, DTensor):
        assert spec.placement is not None
        dims = spec.placement.dims
        if len(dims) != param.device_mesh.ndim:
            raise IncompatibleCheckpoint(
                f"{plan.checkpoint.where}: {name} of shape {list(shape)} was laid over {len(dims)} mesh dimensions, there are "
                f"{param.device_mesh.ndim} now; this state can only be loaded into the same kind of mesh"
            )
        placements = [Replicate() if d == REPLICATE else Shard(d) for d in dims]
        here = Placement(mesh_of(param.device_mesh), dims)
        coordinate = here.mesh.coordinate(plan.registered.rank)
        assert coordinate is not None
        local = torch.empty(here.box(shape, coordinate).size, dtype=dtype, device=param.device)
        return DTensor.from_local(
            local, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=_strides(shape)
        )
    return torch.empty(shape, dtype=dtype, device=param.device)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _match_stateful(plan: Restore, key: str, value: Any) -> None:
    document = plan.small.get("state", {}).get(key)
    if key not in plan.small.get("state", {}):
        raise IncompatibleCheckpoint(f"{plan.checkpoint.where} has no state for {key}: it was saved without it")
    if not plan.same_world and key.partition(".")[0] == "dataloader" and not getattr(value, "any_world_size", False):
        raise IncompatibleCheckpoint(
            f"{plan.checkpoint.where} was saved by {plan.checkpoint.manifest.world_size} ranks, and the position of a "
            f"{type(value).__name__} is of one rank: continue on as many ranks, or use holdfast.DataLoader, whose position is global"
        )
    current: dict[str, torch.Tensor] = {}
    encode_stateful(key, value, current.__setitem__)
    decoded: Any = statetree.decode(document, f"{plan.checkpoint.where}: {key}", _resolver(plan, current))

    def install_value() -> None:
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(decoded)
        elif isinstance(value, dict):
            value.clear()
            value.update(decoded)
        else:
            value[:] = decoded

    plan.install.append(install_value)


def _resolver(plan: Restore, current: Mapping[str, torch.Tensor] | None = None) -> Callable[[str], torch.Tensor]:
    """Give every tensor of a state tree a new one of its own, laid out like the current one where there is one."""

    def resolve(name: str) -> torch.Tensor:
        spec = plan.checkpoint.tensors.get(name)
        if spec is None:
            raise CorruptCheckpoint(f"{plan.checkpoint.where}: the state speaks of a tensor {name!r} that is not there")
        shape, dtype = _saved_shape(plan, name, spec), DTYPE_OF[spec.dtype]
        like = (current or {}).get(name)
        if like is not None and tuple(like.shape) == shape:
            tensor = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        _add_parts(plan, name, tensor)
        return tensor

    return resolve


def _saved_shape(plan: Restore, name: str, spec: TensorSpec) -> tuple[int, ...]:
    """Global shape of a saved tensor; of a per-rank one, that of the rank whose copy this rank would take."""
    if spec.shape is not None:
        return spec.shape
    shape = plan.checkpoint.entry(_plain_source(plan, name, spec), name).shape
    return shape[:-1] if spec.dtype == "C128" else shape


def _plain_source(plan: Restore, name: str, spec: TensorSpec) -> int:
    """Whose copy of a per-rank tensor to take: the own one, or, for another number of ranks, one of equal copies."""
    manifest, rank = plan.checkpoint.manifest, plan.registered.rank
    if plan.same_world:
        return rank
    if manifest.plain_equal or spec.slot is None:
        return rank % manifest.world_size if rank < manifest.world_size else 0
    return _equal_copy(plan, name)


def _equal_copy(plan: Restore, name: str) -> int:
    """A rank whose copy of an optimizer's per-rank tensor equals that of every rank that has one.

    Raises:
        IncompatibleCheckpoint: they differ, so that there is no telling what another number of ranks should get.
    """
    first: tuple[int, bytes] | None = None
    for rank in range(plan.checkpoint.manifest.world_size):
        entry = plan.checkpoint.header(rank).get(name)
        if entry is None:
            continue
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        whole = Box.whole((entry.nbytes,))
        read_parts(plan.checkpoint.file(rank), [Part(name, "U8", entry, whole, whole, data)], workers=1)
        content = bytes(data.tolist())
        if first is None:
            first = rank, content
        elif content != first[1]:
            raise IncompatibleCheckpoint(
                f"{plan.checkpoint.where}: {name} differs between rank {first[0]} and rank {rank}, so it cannot be given to "
                f"another number of ranks; resume on {plan.checkpoint.manifest.world_size} ranks"
            )
    if first is None:
        raise CorruptCheckpoint(f"{plan.checkpoint.where}: no rank's file has {name}")
    return first[0]


def _box(plan: Restore, name: str, tensor: torch.Tensor) -> Box:
    """The part of the global tensor that this rank holds of it."""
    spec = describe(name, tensor, plan.registered).spec
    if spec.placement is None or spec.shape is None:
        return Box.whole(tuple(tensor.shape))
    coordinate = spec.placement.mesh.coordinate(plan.registered.rank)
    if coordinate is None:
        return Box((0,) * len(spec.shape), (0,) * len(spec.shape))
    return spec.placement.box(spec.shape, coordinate)


def _add_parts(plan: Restore, name: str, tensor: torch.Tensor) -> None:
    """Find the pieces that fill this rank's part of `tensor`."""
    spec = plan.checkpoint.tensors[name]
    mine = _box(plan, name, tensor)
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    if spec.placement is None:
        rank = _plain_source(plan, name, spec)
        entry = plan.checkpoint.entry(rank, name)
        shape = _saved_shape(plan, name, spec)
        sources = [(rank, Box.whole(shape), entry)]
    else:
        sources = list(plan.checkpoint.pieces(name, spec, mine))
    for rank, piece, entry in sources:
        wanted = piece.intersect(mine)
        if wanted is None:
            continue
        target = local
        for d, (o, n) in enumerate(zip(wanted.relative_to(mine).offset, wanted.size, strict=True)):
            if n != target.shape[d]:
                target = target.narrow(d, o, n)
        plan.parts.setdefault(rank, []).append(Part(name, spec.dtype, entry, piece, wanted, target))
