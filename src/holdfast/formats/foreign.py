"""A checkpoint that another program wrote, as plain data: what its readers give, and an import or a resume takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.core.boxes import Box
from holdfast.core.safetensors import Entry
from holdfast.errors import CorruptCheckpoint
from holdfast.storage import Storage

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of a name that torch.compile, FSDP1 and activation checkpointing put there."""

_STEP_IN_NAME = re.compile(r"(?:checkpoint-|step[-_]|global_step)(\d+)")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file that hold a piece of a tensor, row-major; `size` is the file's, for what the entry has to fit in."""

    storage: Storage
    path: str
    size: int
    entry: Entry
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        data = bytearray(self.entry.nbytes)
        self.storage.read_into(self.path, self.entry.start, memoryview(data))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(self.dtype).view(self.entry.shape)


Loader = Callable[[], torch.Tensor]
"""Gives a piece that only its format's own reader can find, on the CPU, and mapped from its file where that is possible."""

Pieces = Callable[[Box], Iterable[tuple[Box, Stretch | Loader]]]
"""Gives the pieces of a tensor that meet a box of it, each with where it lies."""


@dataclass(frozen=True)
class Source:
    """A tensor of another program's checkpoint, of which nothing is read before it is asked for."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Pieces

    def read(self) -> torch.Tensor:
        """All of it, on the CPU. Raises CorruptCheckpoint where the pieces do not fill it."""
        everything = Box.whole(self.shape)
        whole: torch.Tensor | None = None
        filled = 0
        for box, piece in self.pieces(everything):
            part = piece.read() if isinstance(piece, Stretch) else piece()
            if box == everything:
                return part
            if whole is None:
                whole = torch.empty(self.shape, dtype=self.dtype)
            whole[box.slices()].copy_(part)
            filled += box.numel
        if whole is None or filled != everything.numel:
            if not everything.numel:
                return torch.empty(self.shape, dtype=self.dtype)
            raise CorruptCheckpoint(f"pieces of {filled} elements do not make up a tensor of shape {list(self.shape)}")
        return whole

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Source:
        return cls(tensor.dtype, tuple(tensor.shape), lambda wanted: [(Box.whole(tuple(tensor.shape)), lambda: tensor)])


@dataclass
class ForeignModel:
    """Tensors by clean name; `aliases` maps further names of a tied tensor to the one that it is stored under.

    `ordered`: the names stand in the model's own order, as a state dict has them, and not in that of a file format. `partial`: it is an
    adapter, without the model below it.
    """

    tensors: dict[str, Source]
    aliases: dict[str, str] = field(default_factory=dict)
    ordered: bool = False
    partial: bool = False


@dataclass
class ForeignOptimizer:
    """`groups`: each its parameters and its values; parameters are names, or positions where the file has no names.

    `state`: of each parameter its tensors (as `Source`) and other values.
    """

    groups: list[tuple[list[str | int], dict[str, Any]]]
    state: dict[str | int, dict[str, Any]]

    @property
    def named(self) -> bool:
        return not any(isinstance(p, int) for params, _ in self.groups for p in params)


@dataclass
class Foreign:
    """`rng` has one entry per rank that saved: generator kind (python, numpy, torch, device) to its state. `stateful` are
    schedulers, scaler, loader and the like by the key that a Checkpointer keeps them under. `left_out` says in words what
    was not taken over, and why."""

    kind: str
    folder: Path
    models: list[ForeignModel] = field(default_factory=list)
    optimizers: list[ForeignOptimizer] = field(default_factory=list)
    stateful: dict[str, Any] = field(default_factory=dict)
    rng: list[dict[str, Any]] = field(default_factory=list)
    step: int | None = None
    left_out: list[str] = field(default_factory=list)


def key_of(what: str, index: int, count: int) -> str:
    """The key that a Checkpointer gives to the `index`-th of `count` objects: none to a single one."""
    return what if count == 1 else f"{what}.{index}"


def clean(name: str) -> str:
    """A parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def of_state_dict(state: Mapping[str, Any]) -> ForeignModel:
    """A model's state dict as `torch.load` gives it: names that share a whole tensor are one tensor's names."""
    model = ForeignModel({}, ordered=True)
    first: dict[tuple[object, ...], str] = {}
    for raw, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue  # `_extra_state` and the like
        name = clean(raw)
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        known = first.setdefault(identity, name) if tensor.numel() else name
        if known != name:
            model.aliases[name] = known
        else:
            model.tensors[name] = Source.of(tensor.detach())
    return model


def of_optimizer_state(state: Mapping[str, Any]) -> ForeignOptimizer:
    """An optimizer's state dict: torch's own, keyed by position, or FSDP's, keyed by name."""
    groups: list[tuple[list[str | int], dict[str, Any]]] = []
    for group in state["param_groups"]:
        params = group.get("param_names") or group["params"]  # torch keeps names that the optimizer was given
        values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append(([clean(p) if isinstance(p, str) else int(p) for p in params], values))
    renamed = {
        old: new
        for group, (params, _) in zip(state["param_groups"], groups, strict=True)
        for old, new in zip(group["params"], params, strict=True)
    }
    found = {}
    for key, values in state["state"].items():
        place = renamed.get(key, clean(key) if isinstance(key, str) else key)
        found[place] = {k: Source.of(v.detach()) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    return ForeignOptimizer(groups, found)


def step_of(foreign: Foreign) -> int | None:
    """Optimizer steps done: by the folder's name, or by the highest `step` that an optimizer keeps for a parameter."""
    if named := _STEP_IN_NAME.fullmatch(foreign.folder.name):
        return int(named[1])
    counters = [values["step"] for optimizer in foreign.optimizers for values in optimizer.state.values() if "step" in values]
    numbers = [int(c.read().max() if isinstance(c, Source) else c) for c in counters]
    return max(numbers, default=None)
