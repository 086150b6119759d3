"""The state of one rank: every tensor with its place in the global state, and the small state beside them.

Called on the training thread at each save, since FSDP may have replaced what it manages. Nothing is copied here and no
other rank is asked: a rank holds everything that it must write.
"""

from __future__ import annotations

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
from holdfast.engine.names import NamedState, join, named_state
from holdfast.errors import UnsupportedState, UsageError

PLAIN_TENSORS: tuple[type, ...] = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor as this rank holds it: its description and the local data."""

    spec: TensorSpec
    local: torch.Tensor


@dataclass
class Collected:
    """What a save writes. `volatile` names the tensors that a forward may change (buffers), so that they are copied first."""

    tensors: dict[str, Held] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    volatile: set[str] = field(default_factory=set)
    small: dict[str, Json] = field(default_factory=dict)


@dataclass
class Registered:
    """The objects that a Checkpointer was given, by key."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    stateful: dict[str, Any]
    """Schedulers, scaler, data loader and the caller's own: objects with `state_dict`, or dicts and lists."""

    rank: int
    world_size: int
    placements: dict[object, tuple[object, Placement]] = field(default_factory=dict)
    """What was made of each DTensor's mesh and placements, with the mesh itself so that its id stays its own."""


def bare_optimizer(optimizer: object, what: str) -> torch.optim.Optimizer:
    """The torch optimizer inside wrappers such as Accelerate's, which calls itself an Optimizer, too."""
    while not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise UsageError(f"{what} is a {type(optimizer).__name__}, should be a torch.optim.Optimizer")
        optimizer = inner
    if any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__):
        raise UsageError(f"{what} is a ZeroRedundancyOptimizer, whose partitions cannot be saved yet: use FSDP2 instead")
    return optimizer


def collect(registered: Registered) -> Collected:
    """Everything that this rank has to write, by clean name.

    Raises:
        UnsupportedState: a tensor or value that a checkpoint cannot hold, with its path.
        UsageError: an optimizer holds parameters that no registered model has.
    """
    names = named_state(registered.models)
    result = Collected(aliases=names.aliases, volatile=set(names.buffers))

    def hold(name: str, tensor: torch.Tensor, replicated: bool = False, slot: OptimizerSlot | None = None) -> None:
        result.tensors[name] = describe(name, tensor, registered, replicated, slot)

    for name, tensor in names.tensors.items():
        hold(name, tensor, name in names.replicated)
    for key, optimizer in registered.optimizers.items():
        result.small[join("optimizer", key)] = _collect_optimizer(key, optimizer, names, hold)
    for key, value in registered.stateful.items():
        result.small[key] = encode_stateful(key, value, hold)
    return result


def encode_stateful(key: str, value: object, hold: Any) -> Json:
    """The state of one registered object as a tree; `hold(name, tensor)` is told of each tensor in it."""
    state = value.state_dict() if hasattr(value, "state_dict") else value
    tensors: dict[str, torch.Tensor] = {}
    document = statetree.encode(state, key, key, tensors)
    for name, tensor in tensors.items():
        hold(name, tensor)
    return document


def param_names(key: str, optimizer: torch.optim.Optimizer, names: NamedState) -> dict[int, str]:
    """The clean name of each of the optimizer's parameters, by its id."""
    by_id = {id(p): name for name, p in names.parameters.items()}
    found = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            name = by_id.get(id(p))
            if name is None:
                raise UsageError(
                    f"optimizer {key or type(optimizer).__name__}: parameter {i} of group {g} (shape {tuple(p.shape)}) belongs "
                    "to no registered model; make the optimizer after sharding the model, and register every model it trains"
                )
            found[id(p)] = name
    return found


def slot_name(slot: OptimizerSlot) -> str:
    return join("optimizer", slot.optimizer, slot.param, slot.key)


def _collect_optimizer(key: str, optimizer: torch.optim.Optimizer, names: NamedState, hold: Any) -> Json:
    """Param groups and all state that is no tensor; the tensors of a parameter's state go to `hold` under their slot."""
    by_id = param_names(key, optimizer, names)
    prefix = join("optimizer", key)
    values: dict[str, Json] = {}
    tensors: dict[str, torch.Tensor] = {}
    for p, state in optimizer.state.items():
        name = by_id.get(id(p)) if isinstance(p, torch.Tensor) else None
        if name is None:
            raise UnsupportedState(f"{prefix}: state under the key {p!r:.60}, which is none of its parameters")
        rest: dict[str, object] = {}
        for state_key, value in state.items():
            if isinstance(value, torch.Tensor):
                slot = OptimizerSlot(key, name, state_key)
                hold(slot_name(slot), value, name in names.replicated, slot)
            else:
                rest[state_key] = value
        if rest:
            values[name] = statetree.encode(rest, join(prefix, name), join(prefix, name), tensors)
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        where = f"{prefix}.param_groups[{i}]"
        rest = {k: v for k, v in group.items() if k != "params"}
        encoded = statetree.encode(rest, where, where, tensors)
        groups.append({"params": [by_id[id(p)] for p in group["params"]], "values": encoded})
    for name, tensor in tensors.items():
        hold(name, tensor)
    return {"groups": groups, "values": values}


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
            placements[key] = tensor.device_mesh, dtensor_placement(name, tensor)
        local = tensor._local_tensor
        spec = TensorSpec(dtypes.name_of(local, name), tuple(tensor.shape), placements[key][1], 0, slot)
        return Held(spec, local)
    if type(tensor) not in PLAIN_TENSORS and not (type(tensor).__name__ == "FlatParameter"):
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
            placements["ddp"] = None, Placement(everybody, (REPLICATE,))
        return Held(TensorSpec(dtype, tuple(tensor.shape), placements["ddp"][1], 0, slot), tensor)
    return Held(TensorSpec(dtype, None, None, 0, slot), tensor)


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


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    grid = device_mesh.mesh
    return Mesh(tuple(grid.shape), tuple(grid.flatten().tolist()))


def world() -> tuple[int, int]:
    """Rank and world size of the default process group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
