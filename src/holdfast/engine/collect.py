"""The state of one rank: every tensor with its place in the global state, and the small state beside them.

Called on the training thread at each save, since FSDP may have replaced what it manages; what has not been replaced is bound
once (`engine.binding`), the small state is collected anew each time. Nothing is copied here and no
other rank is asked: a rank holds everything that it must write.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.core.boxes import REPLICATE, Mesh, Placement, one_rank
from holdfast.core.documents import Json
from holdfast.core.layout import OptimizerSlot, TensorSpec
from holdfast.engine import dtypes, statetree
from holdfast.engine.base import Bases, Origin, origin_of
from holdfast.engine.binding import Binding, Found, shows_its_shards
from holdfast.engine.fsdp1 import FlatPiece
from holdfast.engine.memory import without_collecting
from holdfast.engine.names import NamedState, extra_state_modules, join, named_state
from holdfast.engine.optimizers import OptimizerState, small_state
from holdfast.engine.optimizers import bare_optimizer as bare_optimizer
from holdfast.engine.optimizers import slot_name as slot_name
from holdfast.errors import UnsupportedState

log = logging.getLogger("holdfast")

PLAIN_TENSORS: tuple[type, ...] = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor as this rank holds it: its description and the local data."""

    spec: TensorSpec
    local: torch.Tensor


@dataclass
class Collected:
    """What a save writes. `volatile` names the tensors that a forward may change (buffers), so that they are copied first.

    `elsewhere` describes what other ranks write of flat units, for a layout that is the same on all. `origins` says of frozen
    tensors where they were read; `named` are those that have proved to be what stands there, and are not written.
    """

    tensors: dict[str, Held] = field(default_factory=dict)
    named: dict[str, Held] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    based: set[str] = field(default_factory=set)
    """Those that have an origin, be it lost by now: the same on all ranks."""

    elsewhere: dict[str, TensorSpec] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    volatile: set[str] = field(default_factory=set)
    small: dict[str, Json] = field(default_factory=dict)
    structure: object = None
    """The same object as that of another save: the same names, specs and shapes."""


@dataclass
class Registered:
    """The objects that a Checkpointer was given, by key."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    stateful: dict[str, Any]
    """Schedulers, scaler, data loader and the caller's own: objects with `state_dict`, or dicts and lists."""

    rank: int
    world_size: int
    homes: tuple[int, ...] = ()
    """Where the ranks write to several folders: for each rank the lowest one that writes to the same."""

    told: set[str] = field(default_factory=set)
    """Names of the state that was said to be good for the same ranks only."""

    placements: dict[object, tuple[object, Placement]] = field(default_factory=dict)
    """What was made of each DTensor's mesh and placements, with the mesh itself so that its id stays its own."""

    bases: Bases = field(init=False)
    """What is known of the files that frozen weights came from."""

    binding: Binding | None = field(init=False, default=None)
    """What the last collect found, where it may be used again."""

    def __post_init__(self) -> None:
        self.bases = Bases(self.rank)

    def write_to(self, homes: tuple[int, ...]) -> None:
        """Where the ranks write to several folders, as was found out when they met: forget who would have written what."""
        if homes == self.homes:
            return
        self.homes = homes
        self.placements.clear()
        if self.binding is not None:
            self.binding.release()
        self.binding = None


def collect(registered: Registered) -> Collected:
    """Everything that this rank has to write, by clean name. What was bound by the call before is used where it still holds.

    Raises:
        UnsupportedState: a tensor or value that a checkpoint cannot hold, with its path.
        UsageError: an optimizer holds parameters that no registered model has.
    """
    binding = registered.binding
    found = binding.holds(registered) if binding is not None else None
    if found is None:
        if binding is not None:
            binding.release()
        registered.binding = None
        with without_collecting():
            found, keeps = _find(registered)
            if keeps and shows_its_shards(registered):
                registered.binding = Binding(registered, found)
    fresh: dict[str, Held] = {}

    def hold(name: str, tensor: torch.Tensor) -> None:
        fresh[name] = describe(name, tensor, registered)

    small: dict[str, Json] = {}
    for key, optimizer in registered.optimizers.items():
        loose: dict[str, torch.Tensor] = {}
        small[join("optimizer", key)] = small_state(key, optimizer, found.others[key], found.groups[key], loose)
        for name, tensor in loose.items():
            hold(name, tensor)
    for key, value in registered.stateful.items():
        small[key] = encode_stateful(key, value, hold)
    alive = ((name, reference()) for name, reference in found.modules.items())
    small["modules"] = {
        name: encode_stateful(f"modules.{name}", module.get_extra_state(), hold) for name, module in alive if module is not None
    }
    found.settle_small(fresh)
    return Collected(
        tensors={**found.tensors, **fresh},
        origins=dict(found.origins),
        based=set(found.origins),
        elsewhere=found.elsewhere,
        aliases=found.aliases,
        volatile=found.volatile | {name for name in fresh if not name.startswith("extra.")},
        small=small,
        structure=found.structure,
    )


def _find(registered: Registered) -> tuple[Found, bool]:
    """Every tensor of the models and optimizers; and whether it may be bound: FSDP1's are cut anew from its shards each time."""
    names = named_state(registered.models, registered.homes)
    found = Found(aliases=names.aliases, volatile=set(names.buffers))
    found.modules = {name: weakref.ref(module) for name, module in extra_state_modules(registered.models).items()}

    def hold(name: str, tensor: torch.Tensor, replicated: bool = False, slot: OptimizerSlot | None = None) -> None:
        held = describe(name, tensor, registered, replicated, slot)
        # What is kept until the next save must not keep the tensor itself alive.
        found.tensors[name] = Held(held.spec, held.local.detach()) if held.local is tensor else held
        found.owners.append(tensor)

    def hold_piece(name: str, piece: FlatPiece, local: torch.Tensor, slot: OptimizerSlot | None = None) -> None:
        spec = TensorSpec(dtypes.name_of(local, name), piece.shape, piece.placement, 0, slot)
        written = piece.written(local)
        if written.numel():
            found.tensors[name] = Held(spec, written)
        else:
            found.elsewhere[name] = spec

    for name, tensor in names.tensors.items():
        if isinstance(tensor, FlatPiece):
            hold_piece(name, tensor, tensor.local)
        else:
            hold(name, tensor, name in names.replicated)
        trained = tensor.trained if isinstance(tensor, FlatPiece) else tensor.requires_grad
        if not trained and (origin := origin_of(*names.places[name])) is not None and origin.entry.shape == tuple(tensor.shape):
            found.origins[name] = origin
    for key, optimizer in registered.optimizers.items():
        state = OptimizerState(key, optimizer, names, hold, hold_piece)
        found.others[key], found.groups[key] = state.collect(), state.groups()
        state.describe_others(found.tensors)
        found.elsewhere |= state.elsewhere
        _tell_once(registered, state.same_ranks_only)
    found.volatile |= {name for name, held in found.tensors.items() if _may_change_in_forward(name, held.spec, names)}
    return found, not any(isinstance(tensor, FlatPiece) for tensor in names.parameters.values())


def _may_change_in_forward(name: str, spec: TensorSpec, names: NamedState) -> bool:
    """What is neither a parameter, nor a parameter's optimizer state, nor the caller's own: schedulers step, modules count."""
    return name not in names.parameters and spec.slot is None and not name.startswith("extra.")


def _tell_once(registered: Registered, names: list[str]) -> None:
    new = set(names) - registered.told
    if new and not registered.told and registered.rank == 0:
        log.warning(
            "%s is not of its parameter's shape%s: checkpoints with it can be resumed on the same number of ranks with the "
            "same sharding only",
            min(new), f" (and {len(new) - 1} more like it)" if len(new) > 1 else "",
        )  # fmt: skip
    registered.told |= new


def encode_stateful(key: str, value: object, hold: Any) -> Json:
    """The state of one registered object as a tree; `hold(name, tensor)` is told of each tensor in it."""
    state = value.state_dict() if hasattr(value, "state_dict") else value
    tensors: dict[str, torch.Tensor] = {}
    document = statetree.encode(state, key, key, tensors)
    for name, tensor in tensors.items():
        hold(name, tensor)
    return document


def describe(
    name: str,
    tensor: torch.Tensor,
    registered: Registered,
    replicated: bool = False,
    slot: OptimizerSlot | None = None,
) -> Held:
    """Where a tensor's local data lies in the global state.

    It counts as replicated only with proof: a `Replicate` placement, DDP's own list, or a job of one rank.
    """
    placements = registered.placements
    if isinstance(tensor, DTensor):
        key: object = (id(tensor.device_mesh), tensor.placements)
        if key not in placements:
            placement = dtensor_placement(name, tensor)
            _refuse_part_of_the_ranks(name, placement, registered.world_size)
            placements[key] = tensor.device_mesh, placement.beside(registered.rank, registered.homes)
        local = tensor._local_tensor
        spec = TensorSpec(dtypes.name_of(local, name), tuple(tensor.shape), placements[key][1], 0, slot)
        return Held(spec, local)
    if type(tensor) not in PLAIN_TENSORS:
        raise UnsupportedState(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor subclass whose parts are not known; "
            "give a plain tensor or a DTensor"
        )
    if tensor.is_sparse or tensor.is_quantized or tensor.layout != torch.strided:
        raise UnsupportedState(f"{name} is a tensor of layout {tensor.layout}; only dense tensors can be saved")
    if tensor.is_meta:
        raise UnsupportedState(f"{name} is on the meta device: it has no values yet; load or initialise the model first")
    dtype = dtypes.name_of(tensor, name)
    if registered.world_size == 1:
        return Held(TensorSpec(dtype, tuple(tensor.shape), one_rank(), 0, slot), tensor)
    if replicated:
        if "ddp" not in placements:
            everybody = Mesh((registered.world_size,), tuple(range(registered.world_size)))
            placements["ddp"] = None, Placement(everybody, (REPLICATE,)).beside(registered.rank, registered.homes)
        return Held(TensorSpec(dtype, tuple(tensor.shape), placements["ddp"][1], 0, slot), tensor)
    return Held(TensorSpec(dtype, None, None, 0, slot), tensor)


def held_of(name: str, tensor: torch.Tensor | FlatPiece) -> Held:
    """What this rank writes of a tensor of a model, as `collect` would find it but for who has copies."""
    if isinstance(tensor, FlatPiece):
        return Held(TensorSpec(dtypes.name_of(tensor.local, name), tensor.shape, tensor.placement), tensor.written(tensor.local))
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        return Held(TensorSpec(dtypes.name_of(local, name), tuple(tensor.shape), dtensor_placement(name, tensor)), local)
    return Held(TensorSpec(dtypes.name_of(tensor, name), None, None), tensor)


def dtensor_placement(name: str, tensor: DTensor) -> Placement:
    """A DTensor's mesh and placements as plain data.

    Raises:
        UnsupportedState: a placement other than `Shard(d)` and `Replicate()`, by name.
    """
    dims = []
    for placement in tensor.placements:
        if type(placement) is Shard:
            dims.append(placement.dim % max(1, tensor.ndim))
        elif isinstance(placement, Replicate):
            dims.append(REPLICATE)
        else:
            raise UnsupportedState(
                f"{name} is laid out as {placement!r} over the mesh {tuple(tensor.device_mesh.mesh_dim_names or ())}: only "
                "Shard and Replicate are supported yet (no tensor parallelism combined with FSDP, no partial sums)"
            )
    return Placement(mesh_of(tensor.device_mesh), tuple(dims))


def _refuse_part_of_the_ranks(name: str, placement: Placement, world_size: int) -> None:
    ranks = placement.mesh.ranks
    if len(ranks) != world_size:
        raise UnsupportedState(
            f"{name} is laid over {len(ranks)} of the {world_size} ranks: parameters that some ranks have for themselves "
            "(experts, pipeline stages) cannot be saved yet"
        )


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    grid = device_mesh.mesh
    return Mesh(tuple(grid.shape), tuple(grid.flatten().tolist()))


def world() -> tuple[int, int]:
    """Rank and world size of the default process group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
