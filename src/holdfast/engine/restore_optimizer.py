"""An optimizer's state from a checkpoint, laid out for this run, whatever sharding saved it. No optimizer makes a step.

State of a parameter's shape is cut as the parameter is: a DTensor, a rank's piece of a flat unit, or a stretch of a unit's
shard (whose padding is filled with zeros). What is one number for each parameter (`step`) is taken from the ranks whose
pieces of that parameter are read, which must agree. State that cannot be cut anew goes back to where it was, or is refused.

State that is there already is filled in place, as parameters are (`engine.live_state`): after the ranks' vote, not here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.core.boxes import REPLICATE, Box, Placement
from holdfast.core.documents import Json
from holdfast.core.flat import Flat
from holdfast.core.layout import TensorSpec
from holdfast.engine import statetree
from holdfast.engine.collect import describe, mesh_of
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.engine.fsdp1 import FlatPiece, FlatUnit
from holdfast.engine.live_state import LiveState
from holdfast.engine.names import NamedState, join
from holdfast.engine.optimizers import known_params
from holdfast.engine.reading import Restore, flat_targets
from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint

log = logging.getLogger("holdfast")

_SHOWN = 5


def match_optimizer(plan: Restore, key: str, optimizer: torch.optim.Optimizer, names: NamedState) -> None:
    """Find the state of every parameter of `optimizer`, and add its installation to the plan.

    Raises:
        IncompatibleCheckpoint: it was saved without this optimizer, or cannot be cut for this run.
    """
    where = join("optimizer", key)
    document = plan.small.get("state", {}).get(where)
    if document is None:
        raise IncompatibleCheckpoint(f"{plan.checkpoint.where} has no state for {where}: it was saved without this optimizer")
    saved_class = document.get("class", type(optimizer).__name__)
    if saved_class != type(optimizer).__name__:
        raise IncompatibleCheckpoint(
            f"{plan.checkpoint.where}: {where} was a {saved_class}, it is a {type(optimizer).__name__}: continue with the same "
            "optimizer, or start a new run from the weights"
        )
    if not plan.same_world and plan.checkpoint.manifest.groups_differ:
        raise IncompatibleCheckpoint(
            f"{plan.checkpoint.where}: values in the parameter groups of {where} differ between the ranks that saved it, so they "
            f"cannot be given to another number of ranks; resume on {plan.checkpoint.manifest.world_size} ranks"
        )
    if len(document["groups"]) != len(optimizer.param_groups):
        raise IncompatibleCheckpoint(
            f"{plan.checkpoint.where}: {where} had {len(document['groups'])} parameter groups, it has {len(optimizer.param_groups)}"
        )
    known = known_params(key, optimizer, names)
    trained = {name for k in known.values() for name in k.names}
    saved = {name for group in document["groups"] for name in group["params"]}
    here = {plan.saved_name(name) or name for name in trained}
    for what, odd in (("dropped: it trains no longer", saved - here), ("begun anew: it was not trained then", here - saved)):
        if odd:
            log.warning("%s: optimizer state is %s: %s", plan.checkpoint.where, what, first_few(odd))
    matcher = _Matcher(plan, key, names, LiveState(optimizer, names))
    state: list[tuple[torch.Tensor, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            k = known[id(p)]
            piece = names.parameters[k.names[0]]
            if k.unit is not None:
                found = matcher.unit(k.unit, k.names, p, group)
            elif isinstance(piece, FlatPiece):
                found = matcher.piece(k.names[0], piece, p, group)
            else:
                found = matcher.parameter(k.names[0], p, group)
            if found:
                state.append((p, found))
    live: dict[str, torch.Tensor] = {}
    for i, group in enumerate(optimizer.param_groups):
        tensors = {k: v for k, v in group.items() if isinstance(v, torch.Tensor)}
        statetree.encode(tensors, f"{where}.param_groups[{i}]", f"{where}.param_groups[{i}]", live)
    resolve = plan.resolver(live)
    groups = [mapping(g["values"], f"{where}.param_groups[{i}]", resolve) for i, g in enumerate(document["groups"])]

    def install_optimizer() -> None:
        optimizer.state.clear()
        for p, values in state:
            optimizer.state[p] = values
        for group, loaded in zip(optimizer.param_groups, groups, strict=True):
            group.update(loaded)

    plan.install.append(install_optimizer)


def mapping(document: Json, what: str, resolve: Any) -> dict[str, Any]:
    decoded = statetree.decode(document, what, resolve)
    if not isinstance(decoded, dict):
        raise CorruptCheckpoint(f"{what}: expected a dict, found a {type(decoded).__name__}")
    return decoded


def first_few(names: set[str] | list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(sorted(names)[:_SHOWN])}{more}"


class _Matcher:
    """Finds the saved state of one optimizer's parameters, each by its present name."""

    def __init__(self, plan: Restore, key: str, names: NamedState, live: LiveState) -> None:
        self.plan, self.names, self.live = plan, names, live
        self.where = join("optimizer", key)
        self.others: dict[int, Json] = {}
        """What other ranks keep beside tensors, as far as it was looked at."""
        self.slots: dict[str, dict[str, str]] = {}
        """Parameter's saved name -> key of its state -> the state tensor's name."""
        for name, spec in plan.checkpoint.tensors.items():
            if spec.slot is not None and spec.slot.optimizer == key:
                self.slots.setdefault(spec.slot.param, {})[spec.slot.key] = name

    def parameter(self, name: str, param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a DTensor or a plain parameter."""
        saved = self._saved(name)
        found: dict[str, Any] = {}
        holders = self._holders(name)
        for key, slot in self.slots.get(saved, {}).items():
            spec = self.plan.spec(slot)
            if spec.placement is None and self.plan.spec(saved).placement is not None:
                value = self._of_holders(name, slot, holders, param, group)
                if value is not None:
                    found[key] = value
                continue
            if spec.placement is None and self.plan.same_world and slot not in self.plan.checkpoint.header(self.plan.registered.rank):
                continue  # this rank held no such state
            if isinstance(spec.placement, Flat) and not self._present(slot, holders):
                continue
            found[key] = self._state_for(slot, key, spec, param, group)
            self.plan.add(slot, self.plan.targets(slot, found[key]))
        return found | self._values(saved, holders)

    def piece(self, name: str, piece: FlatPiece, param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of an original parameter of FSDP1; where this rank holds nothing of it there is none."""
        if piece.start == piece.stop:
            return {}
        like = piece.local.view(param.shape) if param.numel() == len(piece.local) else piece.local
        return self._of_piece(name, piece, param, group, like)

    def unit(self, unit: FlatUnit, names: tuple[str, ...], param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a flat parameter: what belongs to elements put together, what is one number agreed on."""
        pieces = {name: piece for name in names if isinstance(piece := self.names.parameters[name], FlatPiece)}
        held = {name: piece for name, piece in pieces.items() if piece.start < piece.stop}
        if raw := self._whole_shard(names[0], unit):
            return raw
        state: dict[str, Any] = {}
        scalars: dict[str, list[tuple[str, Any]]] = {}
        keys: dict[str, set[str]] = {}
        # A shard of nothing but padding has state, too: its numbers are those of the unit's first parameter.
        for name, piece in (held or dict(list(pieces.items())[:1])).items():
            found = self._of_piece(name, piece, param, group, unit.shard, state)
            keys[name] = set(found)
            for key, value in found.items():
                if value is not state.get(key):
                    scalars.setdefault(key, []).append((name, value))
        if len({frozenset(k) for k in keys.values()}) > 1:
            lacking = min(keys, key=lambda n: len(keys[n]))
            raise IncompatibleCheckpoint(
                f"{self.plan.checkpoint.where}: {lacking} has less state in {self.where} than others that are in one flat "
                "parameter with it here: load it with use_orig_params=True"
            )
        vectors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        self.plan.install.append(partial(_clear_padding, vectors, [piece.window for piece in held.values()]))
        for key, values in scalars.items():
            state[key] = values[0][1]
            self.plan.checks.append(partial(self._agree, key, values))
        return state

    def _whole_shard(self, name: str, unit: FlatUnit) -> dict[str, Any]:
        """State of a shard that was kept as it is, under its first parameter's name; nothing where it was cut into pieces."""
        plan, own, saved = self.plan, self.plan.registered.rank, self._saved(name)
        slots = {key: slot for key, slot in self.slots.get(saved, {}).items() if plan.spec(slot).placement is None}
        if not plan.same_world or not any(plan.shape_at(own, s) != () for s in slots.values() if s in plan.checkpoint.header(own)):
            return {}
        found: dict[str, Any] = {}
        for key, slot in slots.items():
            if slot in plan.checkpoint.header(own):
                device = unit.shard.device if plan.shape_at(own, slot) != () else torch.device("cpu")
                found[key] = self._as_it_was(name, slot, own, DTYPE_OF[plan.spec(slot).dtype], device)
        return found | self._values(saved, [own])

    # ------------------------------------------------------------------------------------------------------- the pieces

    def _of_piece(
        self,
        name: str,
        piece: FlatPiece,
        param: torch.Tensor,
        group: Mapping[str, Any],
        like: torch.Tensor,
        whole: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One piece's state, its vectors laid out as `like`; of a unit they are stretches of those in `whole`."""
        saved, holders, plan = self._saved(name), self._holders(name), self.plan
        found: dict[str, Any] = {}
        for key, slot in self.slots.get(saved, {}).items():
            spec = plan.spec(slot)
            if spec.placement is None:
                value = self._of_holders(name, slot, holders, piece.local, group)
                if value is not None:
                    found[key] = value
                continue
            if isinstance(spec.placement, Flat) and not self._present(slot, holders):
                continue
            dtype = DTYPE_OF[spec.dtype]
            if spec.shape == () and piece.shape != ():
                number = torch.empty((), dtype=dtype, device=_scalar_device(piece.local, group))
                plan.add(slot, plan.targets(slot, number))
                found[key] = number
                continue
            if spec.shape != piece.shape:
                raise self._cannot_be_cut(slot)
            if whole is None:
                vector = self._room(param, key, like, dtype)
                local = vector.view(-1)
            else:
                if key not in whole:
                    whole[key] = self._room(param, key, like, dtype)
                vector = whole[key]
                local = vector[piece.window]
            if vector.dtype != dtype:
                raise IncompatibleCheckpoint(f"{plan.checkpoint.where}: {slot} is {spec.dtype}, others of its unit are not")
            plan.add(slot, flat_targets(piece, local))
            found[key] = vector
        return found | self._values(saved, holders)

    def _saved(self, name: str) -> str:
        return self.plan.saved_name(name) or name

    def _holders(self, name: str) -> list[int]:
        """The ranks whose pieces of a parameter this rank reads, its own first; where it reads none, one that has a piece."""
        checkpoint, rank = self.plan.checkpoint, self.plan.registered.rank
        spec = self.plan.spec(self._saved(name))
        if spec.placement is None or spec.shape is None:
            return []
        boxes = [box for box, _ in self.plan.targets(name, self.names.parameters[name])]
        ranks = list(dict.fromkeys(r for box in boxes for r in checkpoint.writers(spec, box)))
        if not ranks:
            near = checkpoint.nearest(checkpoint.writers(spec))
            ranks = [near] if near is not None else [rank if self.plan.same_world else checkpoint.first]
        return sorted(ranks, key=lambda r: (r != rank or not self.plan.same_world, r))

    def _present(self, slot: str, holders: list[int]) -> bool:
        """Whether flat state exists: a layout tells only where it would be."""
        there = [slot in self.plan.checkpoint.header(rank) for rank in holders]
        if any(there) and not all(there):
            with_it = [rank for rank, yes in zip(holders, there, strict=True) if yes]
            raise IncompatibleCheckpoint(
                f"{self.plan.checkpoint.where}: of the ranks {holders} only {with_it} had {slot}, so that a part of it is missing; "
                "resume on the same ranks"
            )
        return all(there)

    def _of_holders(
        self, name: str, slot: str, holders: list[int], like: torch.Tensor, group: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """A number that every rank with a piece of the parameter has; or this rank's own state that cannot be cut anew."""
        plan, dtype = self.plan, DTYPE_OF[self.plan.spec(slot).dtype]
        own = plan.registered.rank
        if plan.same_world and slot in plan.checkpoint.header(own) and plan.shape_at(own, slot) != ():
            return self._as_it_was(name, slot, own, dtype, like.device)
        ranks = [rank for rank in holders if slot in plan.checkpoint.header(rank)]
        if not ranks:
            return None
        numbers = []
        for rank in ranks:
            if plan.shape_at(rank, slot) != ():
                raise self._cannot_be_cut(slot)
            number = torch.empty((), dtype=dtype, device=_scalar_device(like, group))
            plan.add_piece(rank, slot, Box.whole(()), Box.whole(()), number)
            numbers.append((f"rank {rank}'s {slot}", number))
        plan.checks.append(partial(self._agree, slot, numbers))
        return numbers[0][1]

    def _as_it_was(self, name: str, slot: str, own: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        parameter = self.names.parameters[name]
        if isinstance(parameter, FlatPiece):
            placement: object = parameter.placement
        else:
            placement = describe(name, parameter, self.plan.registered).spec.placement
        if placement != self.plan.spec(self._saved(name)).placement:
            raise self._cannot_be_cut(slot)
        shape = self.plan.shape_at(own, slot)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.plan.add_piece(own, slot, Box.whole(shape), Box.whole(shape), tensor)
        return tensor

    def _cannot_be_cut(self, slot: str) -> IncompatibleCheckpoint:
        return IncompatibleCheckpoint(
            f"{self.plan.checkpoint.where}: {slot} is not of its parameter's shape (quantised, sliced or factored state), so it "
            f"cannot be cut anew: resume on {self.plan.checkpoint.manifest.world_size} ranks with the sharding that saved it, or "
            "start the optimizer anew from the weights"
        )

    def _agree(self, key: str, values: list[tuple[str, Any]]) -> None:
        """Called after reading."""
        (first, value), *others = values
        for name, other in others:
            if not _same(value, other):
                raise IncompatibleCheckpoint(
                    f"{self.plan.checkpoint.where}: {key} is {value} for {first} and {other} for {name}, and one value has to do for "
                    "both here; resume on the same ranks with the same sharding"
                )

    def _values(self, saved: str, holders: list[int]) -> dict[str, Any]:
        """The state of a parameter that is no tensor, from a rank that had it."""
        plan = self.plan
        values = plan.small["state"][self.where]["values"]
        if holders and isinstance(plan.spec(saved).placement, Flat) and not (plan.same_world and holders[0] == plan.registered.rank):
            if holders[0] not in self.others:
                self.others[holders[0]] = plan.checkpoint.small(holders[0])["state"][self.where]["values"]
            values = self.others[holders[0]]
        document = values.get(saved)
        return {} if document is None else mapping(document, f"{self.where}.{saved}", plan.resolver())

    def _room(self, param: torch.Tensor, key: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor to fill: what the state has there, else a new one; strides as optimizers make them, like the parameter's."""
        there = self.live.take(param, key, like, dtype)
        return torch.empty_like(like, dtype=dtype, requires_grad=False) if there is None else there

    def _state_for(
        self, slot: str, key: str, spec: TensorSpec, param: torch.Tensor, group: Mapping[str, Any]
    ) -> torch.Tensor:
        """A tensor to fill for one entry of a parameter's optimizer state, laid out for this run.

        State of the parameter's shape is laid out like the parameter. Other sharded state keeps its placements over the
        parameter's mesh. What is left is whole on every rank, which a sharded parameter has no use for.
        """
        plan = self.plan
        dtype, shape = DTYPE_OF[spec.dtype], plan.saved_shape(slot)
        if shape == tuple(param.shape) and (spec.placement is not None or not isinstance(param, DTensor)):
            return self._room(param, key, param, dtype)
        if not shape:
            return torch.empty((), dtype=dtype, device=_scalar_device(param, group))
        if isinstance(param, DTensor):
            placement = spec.placement
            if not isinstance(placement, Placement) or all(d == REPLICATE for d in placement.dims):
                raise self._cannot_be_cut(slot)
            if len(placement.dims) != param.device_mesh.ndim:
                raise IncompatibleCheckpoint(
                    f"{plan.checkpoint.where}: {slot} of shape {list(shape)} was laid over {len(placement.dims)} mesh dimensions, "
                    f"there are {param.device_mesh.ndim} now; this state can only be loaded into the same kind of mesh"
                )
            placements = [Replicate() if d == REPLICATE else Shard(d) for d in placement.dims]
            here = Placement(mesh_of(param.device_mesh), placement.dims)
            coordinate = here.mesh.coordinate(plan.registered.rank)
            assert coordinate is not None
            box = here.box(shape, coordinate)
            plan.check_held(slot, box)
            local = torch.empty(box.size, dtype=dtype, device=param.device)
            return DTensor.from_local(
                local, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=_strides(shape)
            )
        plan.check_held(slot, Box.whole(shape))
        return torch.empty(shape, dtype=dtype, device=param.device)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _clear_padding(vectors: list[torch.Tensor], windows: list[slice]) -> None:
    """Zero what lies between and behind the pieces of a flat unit's shard."""
    at = 0
    for window in [*sorted(windows, key=lambda w: w.start), slice(None)]:
        for vector in vectors:
            vector[at : window.start].zero_()
        at = max(at, window.stop or 0)


def _scalar_device(like: torch.Tensor, group: Mapping[str, Any]) -> torch.device:
    """torch keeps a step counter on the host unless the kernel wants it beside the parameter."""
    return like.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
