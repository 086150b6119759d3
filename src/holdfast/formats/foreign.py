"""A checkpoint that another program wrote, as plain data: what its readers give and what an import makes a native one of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of a name that torch.compile, FSDP1 and activation checkpointing put there."""


@dataclass(frozen=True)
class Source:
    """A tensor that is read when it is written: `read` gives all of it, on the CPU."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Source:
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)


@dataclass
class ForeignModel:
    """Tensors by clean name; `aliases` maps further names of a tied tensor to the one that it is stored under.

    `ordered`: the names stand in the model's own order, as a state dict has them, and not in that of a file format.
    """

    tensors: dict[str, Source]
    aliases: dict[str, str] = field(default_factory=dict)
    ordered: bool = False


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
