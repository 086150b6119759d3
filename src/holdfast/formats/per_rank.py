"""One file per rank: every rank's own DTensors in a pickle of its own, put together again from their placements.

accelerate writes them for FSDP2 with `use_dcp=False`. The mesh is made without a process group, as plain data. Files of
FSDP1's `LOCAL_STATE_DICT` hold flat pieces without their layout, and `ShardedTensor` is no class that `weights_only` reads;
both are refused by name.

Memory: the files are mapped, so that of a piece only what is copied out of it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.core.boxes import REPLICATE, Box, Mesh, Placement
from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint
from holdfast.formats.foreign import ForeignModel, ForeignOptimizer, Loader, Source, clean, of_optimizer_state
from holdfast.formats.pickles import load_pickle


def merge_model(files: list[Path]) -> ForeignModel:
    """The model of which `files` hold each rank's part, in rank order."""
    states = [_load(path) for path in files]
    if any("_flat_param" in name for name in states[0]):
        raise IncompatibleCheckpoint(
            f"{files[0]} holds flat pieces (FSDP1, LOCAL_STATE_DICT), and not where they belong in the parameters: load it with "
            "the program that wrote it, and save it again as SHARDED_STATE_DICT"
        )
    names = [name for name, value in states[0].items() if isinstance(value, torch.Tensor)]
    return ForeignModel({clean(name): _merged([s[name] for s in states], f"{name} in {files[0]}") for name in names}, ordered=True)


def merge_optimizer(files: list[Path]) -> ForeignOptimizer:
    """The same of an optimizer."""
    states = [_load(path) for path in files]
    merged = {
        param: {
            key: _merged([s["state"][param][key] for s in states], f"{param}.{key} in {files[0]}")
            if isinstance(value, torch.Tensor)
            else value
            for key, value in values.items()
        }
        for param, values in states[0]["state"].items()
    }
    optimizer = of_optimizer_state({"state": {}, "param_groups": states[0]["param_groups"]})
    optimizer.state = {clean(name) if isinstance(name, str) else name: values for name, values in merged.items()}
    return optimizer


def _load(path: Path) -> Any:
    quiet = logging.getLogger("torch.distributed.device_mesh")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # it warns that the mesh has no process group, which is what is wanted here
    try:
        return load_pickle(path)
    finally:
        quiet.setLevel(level)


def _merged(parts: list[torch.Tensor], what: str) -> Source:
    first = parts[0]
    if not isinstance(first, DTensor):
        return Source.of(first)  # a rank's own copy: step counters, buffers
    dims = []
    for p in first.placements:
        if type(p) is not Shard and not isinstance(p, Replicate):
            raise IncompatibleCheckpoint(f"{what} is laid out as {p!r}: only Shard and Replicate are read")
        dims.append(p.dim % max(1, first.ndim) if isinstance(p, Shard) else REPLICATE)
    grid = first.device_mesh.mesh
    placement = Placement(Mesh(tuple(grid.shape), tuple(grid.flatten().tolist())), tuple(dims))
    shape = tuple(first.shape)
    if max(placement.mesh.ranks) >= len(parts):
        raise CorruptCheckpoint(f"{what}: its mesh has {len(placement.mesh.ranks)} ranks, there are files of {len(parts)}")

    def pieces(wanted: Box) -> Iterator[tuple[Box, Loader]]:
        for rank, box in placement.pieces(shape, 0, wanted):
            part = parts[rank]
            local = part._local_tensor if isinstance(part, DTensor) else part
            if tuple(local.shape) != box.size:
                raise CorruptCheckpoint(f"{what}: rank {rank} holds {list(local.shape)} of it, its mesh says {list(box.size)}")
            yield box, partial(_same, local)

    return Source(first.dtype, shape, pieces)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
