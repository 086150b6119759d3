"""The state of an optimizer on one rank: param groups, and every parameter's state under the parameter's clean name.

FSDP1 needs two things more. Where an optimizer holds a unit's whole shard (`use_orig_params=False`), its state is cut into
named pieces, and what it keeps once for the shard (`step`) is kept for each of them. And state exists only on ranks that
hold a piece: so that all ranks have one layout nevertheless, each describes the state that others must have, too, from what
it sees in the same param group. Whether it is really there is told by the headers of the files that would have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.core.documents import Json
from holdfast.core.layout import OptimizerSlot, TensorSpec
from holdfast.engine import statetree
from holdfast.engine.fsdp1 import FlatPiece
from holdfast.engine.names import NamedState, Optimised, join
from holdfast.errors import UnsupportedState, UsageError

Hold = Callable[[str, torch.Tensor, bool, OptimizerSlot | None], None]
"""(name, tensor, known to be replicated, slot): take a tensor into the checkpoint."""

HoldPiece = Callable[[str, FlatPiece, torch.Tensor, OptimizerSlot | None], None]
"""(name, piece, a vector laid out like the piece, slot): the same for a part of a flat unit."""


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


def known_params(key: str, optimizer: torch.optim.Optimizer, names: NamedState) -> dict[int, Optimised]:
    """What each of the optimizer's parameters is, by its id."""
    found = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            known = names.optimised.get(id(p))
            if known is None:
                raise UsageError(
                    f"optimizer {key or type(optimizer).__name__}: parameter {i} of group {g} (shape {tuple(p.shape)}) belongs "
                    "to no registered model; make the optimizer after sharding the model, and register every model it trains"
                )
            found[id(p)] = known
    return found


def slot_name(slot: OptimizerSlot) -> str:
    return join("optimizer", slot.optimizer, slot.param, slot.key)


class OptimizerState:
    """Walks one optimizer; tensors go to `hold` and `hold_piece`, `elsewhere` gets what only other ranks may hold."""

    def __init__(self, key: str, optimizer: torch.optim.Optimizer, names: NamedState, hold: Hold, hold_piece: HoldPiece) -> None:
        self.key, self.optimizer, self.names = key, optimizer, names
        self.hold, self.hold_piece = hold, hold_piece
        self.known = known_params(key, optimizer, names)
        self.elsewhere: dict[str, TensorSpec] = {}
        self._odd = self._odd_keys()
        self.same_ranks_only: list[str] = []
        """State whose tensors cannot be cut anew, by name."""

    def collect(self) -> dict[int, tuple[str, ...]]:
        """All tensors in the parameters' state. Returns whose each entry of the state is that has more than tensors, by its place."""
        others = {}
        for place, (p, state) in enumerate(self.optimizer.state.items()):
            known = self.known.get(id(p)) if isinstance(p, torch.Tensor) else None
            if known is None:
                prefix = join("optimizer", self.key)
                raise UnsupportedState(f"{prefix}: state under the key {p!r:.60}, which is none of its parameters")
            tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
            found = self._tensors_of_unit(known, tensors) if self._flat(known) else self._tensors(known.names[0], p, tensors)
            if len(tensors) < len(state):
                others[place] = tuple(found)
        return others

    def groups(self) -> list[list[str]]:
        """The names of the parameters in each group."""
        return [[name for p in group["params"] for name in self.known[id(p)].names] for group in self.optimizer.param_groups]

    def _flat(self, known: Optimised) -> bool:
        return isinstance(self.names.parameters[known.names[0]], FlatPiece)

    def _slot(self, name: str, key: str) -> OptimizerSlot:
        return OptimizerSlot(self.key, name, key)

    def _tensors(self, name: str, param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        for key, value in tensors.items():
            slot = self._slot(name, key)
            self.hold(slot_name(slot), value, name in self.names.replicated, slot)
            if isinstance(param, DTensor) and not isinstance(value, DTensor) and value.ndim:
                self.same_ranks_only.append(slot_name(slot))
        return [name]

    def _tensors_of_unit(self, known: Optimised, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Cut the state of a shard, or of a rank's piece of one parameter, into pieces; returns whose they are."""
        held = self._held(known)
        if any(key in self._odd for key in tensors):
            # Quantised, sliced or factored: no part of it belongs to one element of a parameter. Kept as it is, by one name.
            for key, value in tensors.items():
                slot = self._slot(known.names[0], key)
                self.hold(slot_name(slot), value, False, slot)
                if key in self._odd:
                    self.same_ranks_only.append(slot_name(slot))
            return [known.names[0]]
        for name, piece in held.items():
            for key, value in tensors.items():
                slot = self._slot(name, key)
                if value.ndim == 0:
                    self.hold(slot_name(slot), value, False, slot)
                else:
                    self.hold_piece(slot_name(slot), piece, vector(value)[piece.window if known.unit else slice(None)], slot)
        return list(held)

    def _held(self, known: Optimised) -> dict[str, FlatPiece]:
        pieces = {name: piece for name in known.names if isinstance(piece := self.names.parameters[name], FlatPiece)}
        return {name: piece for name, piece in pieces.items() if piece.start < piece.stop}

    def _odd_keys(self) -> set[str]:
        """Keys of flat state whose tensors are not of their parameter's shape, for one parameter at least.

        One that only happens to have as many elements (a scale for each of one element) is no different from the others.
        """
        odd = set()
        for p, state in self.optimizer.state.items():
            known = self.known.get(id(p))
            if known is not None and self._flat(known):
                size = known.unit.shard.numel() if known.unit else sum(len(piece.local) for piece in self._held(known).values())
                odd |= {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim and v.numel() != size}
        return odd

    def describe_others(self, tensors: Mapping[str, Any]) -> None:
        """Fill `elsewhere` for the flat parameters of this optimizer whose state is not among `tensors` (by name)."""
        seen: dict[tuple[int, torch.dtype], dict[str, TensorSpec]] = {}
        group_of = {
            name: g
            for g, group in enumerate(self.optimizer.param_groups)
            for p in group["params"]
            for name in self.known[id(p)].names
        }
        flat = {name: piece for name in group_of if isinstance(piece := self.names.parameters[name], FlatPiece)}
        for held in tensors.values():
            slot = held.spec.slot
            if slot is not None and slot.optimizer == self.key and slot.param in flat:
                seen.setdefault((group_of[slot.param], flat[slot.param].dtype), {})[slot.key] = held.spec
        anywhere = {dtype: specs for (_, dtype), specs in reversed(seen.items())}
        for name, piece in flat.items():
            if not piece.trained:
                continue
            for key, spec in seen.get((group_of[name], piece.dtype), anywhere.get(piece.dtype, {})).items():
                slot = self._slot(name, key)
                if slot_name(slot) not in tensors:
                    cut = spec.placement is not None
                    self.elsewhere[slot_name(slot)] = TensorSpec(
                        spec.dtype, piece.shape if cut else None, piece.placement if cut else None, 0, slot
                    )


def small_state(
    key: str,
    optimizer: torch.optim.Optimizer,
    others: Mapping[int, tuple[str, ...]],
    groups: Sequence[Sequence[str]],
    loose: dict[str, torch.Tensor],
) -> Json:
    """Param groups and all state that is no tensor; `others` and `groups` are what `OptimizerState` says of the names.

    Tensors inside param groups and nested values are added to `loose`.
    """
    prefix = join("optimizer", key)
    values: dict[str, Json] = {}
    states = list(optimizer.state.values()) if others else []
    for place, names in others.items():
        rest = {k: v for k, v in states[place].items() if not isinstance(v, torch.Tensor)}
        for name in names:
            values[name] = statetree.encode(rest, join(prefix, name), join(prefix, name), loose)
    encoded = []
    for i, (members, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        where = f"{prefix}.param_groups[{i}]"
        of_group = statetree.encode({k: v for k, v in group.items() if k != "params"}, where, where, loose)
        encoded.append({"params": members, "values": of_group})
    return {"class": type(optimizer).__name__, "groups": encoded, "values": values}


def vector(value: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of its memory, sharing it."""
    return value.detach().view(-1) if value.is_contiguous() else value.detach().as_strided((value.numel(),), (1,))

