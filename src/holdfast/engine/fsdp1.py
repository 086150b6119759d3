"""Where FSDP version 1 keeps each parameter: the handles of its flat parameters, read as they stand. Nothing is gathered.

FSDP1 has no public way to a rank's own piece of a parameter, so private fields are read here, and only here. What they say
is checked against the arithmetic of `core.flat` for every parameter; where a release of torch keeps them otherwise, that is
told and nothing is saved or loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from holdfast.core.boxes import REPLICATE, Mesh, Placement, Shape
from holdfast.core.flat import Flat
from holdfast.errors import UnsupportedState

_TRIED = "2.13 and 2.14"


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A parameter inside a flat unit, and this rank's piece of it.

    `local` is a 1-D view of the rank's shard: the elements `start` to `stop` of the flattened parameter; `window` says which
    elements of the shard they are. `part` are those that this rank writes.
    """

    shape: Shape
    placement: Flat
    start: int
    stop: int
    part: tuple[int, int]
    local: torch.Tensor
    window: slice
    trained: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def written(self, local: torch.Tensor) -> torch.Tensor:
        """Of a 1-D tensor laid out like `local`, what this rank writes."""
        return local[self.part[0] - self.start : self.part[1] - self.start]


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """One flat parameter: its pieces by (module id, parameter name), and what an optimizer may hold of it.

    `parameters` are the original ones of `use_orig_params=True` in the order of `pieces`, or None; then an optimizer holds
    `flat`, and of its state tensors the shard's elements.
    """

    flat: torch.Tensor
    shard: torch.Tensor
    pieces: tuple[FlatPiece, ...]
    places: tuple[tuple[int, str, int], ...]
    """(module id, parameter name, index of its piece); shared parameters have several."""
    parameters: tuple[nn.Parameter, ...] | None
    shared: tuple[tuple[nn.Parameter, int], ...]


def flat_units(model: nn.Module, homes: Shape = ()) -> Iterator[FlatUnit]:
    """The flat parameters of a model that FSDP1 has wrapped, wholly or in part; `homes` as in `Placement.beside`.

    Raises:
        UnsupportedState: it is laid out in a way that is not understood, with the parameter's name.
    """
    meshes: dict[object, Mesh] = {}
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) and getattr(module, "_handle", None) is not None:
            yield _unit(module, module._handle, homes, meshes)


def shard_group(module: FullyShardedDataParallel) -> dist.ProcessGroup | None:
    """The ranks that cut the unit of an FSDP1 module; None where each holds the whole."""
    handle: Any = module._handle
    return module.process_group if handle.uses_sharded_strategy else None


def reshard(module: FullyShardedDataParallel) -> None:
    """Forget the whole parameters that a forward without gradients has left: they have the values from before a load."""
    handle: Any = module._handle
    if handle is not None and handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):
        handle.reshard(free_unsharded_flat_param=True)
        handle.post_reshard()


def _unit(module: FullyShardedDataParallel, handle: Any, homes: Shape, meshes: dict[object, Mesh]) -> FlatUnit:
    flat = handle.flat_param
    try:
        shard = getattr(flat, "_local_shard", None)  # there is none before the first forward
        shard = (flat.data if shard is None else shard).detach()
        groups = module.process_group, getattr(module, "_inter_node_pg", None), handle.uses_sharded_strategy
        if groups not in meshes:  # that of all units, in the usual case: it lists every rank, so it is made once
            meshes[groups] = Placement(_mesh(module, handle), (REPLICATE, 0)).beside(dist.get_rank(), homes).mesh
        mesh = meshes[groups]
        offsets = _offsets(flat)
        total = int(flat._unpadded_unsharded_size.numel())
        names, shapes, infos = flat._fqns, [tuple(s) for s in flat._shapes], flat._shard_param_infos
        contiguous = [_row_major(shape, stride) for shape, stride in zip(flat._shapes, flat._strides, strict=True)]
        places = {(id(info.module), info.param_name): i for i, info in enumerate(flat._param_infos)}
        shared = [
            (id(s.module), s.param_name, places[id(s.prim_module), s.prim_param_name]) for s in flat._shared_param_infos
        ]
        parameters = tuple(flat._params) if handle._use_orig_params else None
        tied = flat._shared_params if handle._use_orig_params else ()
        trained = [p.requires_grad for p in parameters] if parameters is not None else [flat.requires_grad] * len(names)
    except UnsupportedState:
        raise
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise _unknown(f"{error}") from error
    size, shards = shard.numel(), mesh.shape[1]
    if shard.ndim != 1 or size != -(-total // shards) or len({len(names), len(shapes), len(infos), len(offsets)}) != 1:
        raise _unknown(f"a shard of {tuple(shard.shape)} for {total} elements and {len(names)} parameters on {shards} ranks")
    if not all(contiguous):
        name = names[contiguous.index(False)]
        raise UnsupportedState(
            f"{name} was not contiguous when FSDP1 flattened it (channels_last?), which is not supported: convert the model "
            "with .to(memory_format=torch.contiguous_format) before wrapping it, or use FSDP2"
        )
    coordinate = mesh.coordinate(dist.get_rank())
    assert coordinate is not None
    pieces = []
    for name, shape, offset, info, trains in zip(names, shapes, offsets, infos, trained, strict=True):
        place = Flat(mesh, offset, max(1, size))
        start, stop = place.held(prod(shape), coordinate)
        begin = max(0, offset + start - coordinate[1] * size) if start < stop else 0
        if (begin, stop - start) != ((info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)) and prod(shape):
            raise _unknown(f"{name} is expected at {begin} with {stop - start} elements, torch says {tuple(info)}")
        window = slice(begin, begin + stop - start)
        pieces.append(FlatPiece(shape, place, start, stop, place.written(prod(shape), coordinate), shard[window], window, trains))
    every = (*((*key, i) for key, i in places.items()), *shared)
    ties = tuple((p, index) for p, (_, _, index) in zip(tied, shared, strict=True)) if tied else ()
    return FlatUnit(flat, shard, tuple(pieces), every, parameters, ties)


def _offsets(flat: Any) -> list[int]:
    """Where each parameter begins in the unit; between them there may be padding for aligned addresses."""
    offsets, at = [], 0
    for length, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            offsets.append(at)
        at += length
    if at != flat._unpadded_unsharded_size.numel() or [n.numel() for n in flat._shapes] != list(flat._numels):
        raise _unknown(f"parts of {at} elements in a flat parameter of {flat._unpadded_unsharded_size.numel()}")
    return offsets


def _mesh(module: FullyShardedDataParallel, handle: Any) -> Mesh:
    """Copies x shards, from the groups of this rank: they form a regular grid, or are not understood."""
    group = dist.get_process_group_ranks(module.process_group)
    across = getattr(module, "_inter_node_pg", None)
    if not handle.uses_sharded_strategy:
        group, across_ranks = [dist.get_rank()], group
    else:
        across_ranks = dist.get_process_group_ranks(across) if across is not None else [dist.get_rank()]
    rank = dist.get_rank()
    ranks = tuple(first + other - rank for first in across_ranks for other in group)
    if set(ranks) != set(range(dist.get_world_size())):
        raise UnsupportedState(
            f"FSDP1 shards over the ranks {group} with copies on {across_ranks}, which is no regular grid of all "
            f"{dist.get_world_size()} ranks: parameters that some ranks have for themselves cannot be saved yet"
        )
    return _grid((len(across_ranks), len(group)), ranks)


@cache
def _grid(shape: Shape, ranks: Shape) -> Mesh:
    """The same object at every save, so that what it was compared with last time is known to be equal at once."""
    return Mesh(shape, ranks)


def _row_major(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    expected = 1
    for extent, step in zip(reversed(shape), reversed(stride), strict=True):
        if extent != 1 and step != expected:
            return shape.numel() == 0
        expected *= extent
    return True


def _unknown(what: str) -> UnsupportedState:
    return UnsupportedState(
        f"torch {torch.__version__} keeps FSDP1's flat parameters in another way than was tried ({_TRIED}): {what}. "
        "Nothing was read from them. Use one of these releases, or FSDP2"
    )
