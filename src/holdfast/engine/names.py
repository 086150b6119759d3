"""Clean names: what a parameter is called, whatever wraps the model, and where its shard is now.

Wrappers (DDP, FSDP1, torch.compile, activation checkpointing) put a module of their own between a parent and its child.
They are recognised by what they are, so that a user's own attribute called `module` keeps its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from holdfast.engine.fsdp1 import FlatPiece, FlatUnit, flat_units
from holdfast.errors import UsageError

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]

# Attribute names that nobody but the wrapper uses.
_PRIVATE = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def unwrap(module: nn.Module) -> nn.Module:
    """The module below all wrappers."""
    while (inner := _wrapped(module)) is not None:
        module = inner[1]
    return module


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    for name in _PRIVATE:
        if name in module._modules:
            child = module._modules[name]
            return (name, child) if child is not None else None
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module", module.module
    return None


@dataclass(frozen=True)
class Optimised:
    """What one parameter of an optimizer is: `names` of the parameters in it, and the flat unit it is the shard of, if any.

    An original parameter of FSDP1 (`use_orig_params=True`) has one name and no unit; its pieces are in `parameters`.
    """

    names: tuple[str, ...]
    unit: FlatUnit | None = None


@dataclass
class NamedState:
    """The parameters and persistent buffers of one or several models by clean name.

    `aliases` maps the further names of a tied parameter to its first one. `replicated` holds the names whose equality on
    all ranks DDP vouches for. `optimised` says by id what an optimizer's parameters are.
    """

    parameters: dict[str, nn.Parameter | FlatPiece] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    replicated: set[str] = field(default_factory=set)
    optimised: dict[int, Optimised] = field(default_factory=dict)
    places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    """By every clean name, further ones of tied parameters included, the module that it is an attribute of."""

    @property
    def tensors(self) -> dict[str, torch.Tensor | FlatPiece]:
        return {**self.parameters, **self.buffers}


def keyed(value: object, what: str) -> dict[str, object]:
    """One object, a list or a dict of them, as a dict; a single one gets the empty key."""
    if isinstance(value, Mapping):
        bad = [k for k in value if not isinstance(k, str) or not k or "/" in k or "." in k]
        if bad:
            raise UsageError(f"{what}: keys of a dict should be non-empty strings without '/' and '.', got {bad[0]!r}")
        return dict(value)
    if isinstance(value, list | tuple):
        return {str(i): v for i, v in enumerate(value)}
    return {} if value is None else {"": value}


def join(*parts: str) -> str:
    return ".".join(p for p in parts if p)


def named_state(models: Mapping[str, nn.Module], homes: tuple[int, ...] = ()) -> NamedState:
    """Walk the models and resolve where each parameter's shard is; `homes` as in `Placement.beside`.

    To be called on the training thread at each save: FSDP replaces parameters (lazy initialisation, offload), and after a
    forward without gradients a module may show its full parameters while the shard is elsewhere.
    """
    state = NamedState()
    first_name: dict[object, str] = {}

    def is_new(key: object, full: str, module: nn.Module, attribute: str) -> bool:
        known = first_name.setdefault(key, full)
        state.places[full] = module, attribute
        if known != full:
            state.aliases[full] = known
        return known == full

    for key, model in models.items():
        shards = _fsdp2_shards(model)
        units = list(flat_units(model, homes))
        inside, whole_units = _by_module(units), {id(unit.flat) for unit in units}
        for prefix, module, vouched in _walk(model, join("model", key)):
            flat = inside.get(id(module), {})
            for name, (unit, index) in flat.items():
                full = join(prefix, name)
                if is_new((id(unit.flat), index), full, module, name):
                    state.parameters[full] = unit.pieces[index]
            for name, parameter in module._parameters.items():
                if parameter is None or name in flat or id(parameter) in whole_units:
                    continue
                shard = shards.get((id(module), name), parameter)
                full = join(prefix, name)
                if is_new(id(shard), full, module, name):
                    state.parameters[full] = shard
                    state.optimised[id(shard)] = Optimised((full,))
                    if vouched is not None and id(parameter) in vouched:
                        state.replicated.add(full)
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                full = join(prefix, name)
                if is_new(id(buffer), full, module, name):
                    state.buffers[full] = buffer
        for unit in units:
            state.optimised |= _optimised(unit, tuple(first_name[id(unit.flat), i] for i in range(len(unit.pieces))))
    return state


def _by_module(units: Sequence[FlatUnit]) -> dict[int, dict[str, tuple[FlatUnit, int]]]:
    """By module id and name, the parameters that are in a flat unit, and as which of its pieces."""
    found: dict[int, dict[str, tuple[FlatUnit, int]]] = {}
    for unit in units:
        for module, name, index in unit.places:
            found.setdefault(module, {})[name] = unit, index
    return found


def _optimised(unit: FlatUnit, names: tuple[str, ...]) -> dict[int, Optimised]:
    if unit.parameters is None:
        return {id(unit.flat): Optimised(names, unit)}
    singles = {id(p): Optimised((name,)) for p, name in zip(unit.parameters, names, strict=True)}
    return singles | {id(p): Optimised((names[index],)) for p, index in unit.shared}


def persistent_buffers(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module, str]]:
    """(clean name, module, attribute) of every persistent buffer."""
    return [
        (join(prefix, name), module, name)
        for key, model in models.items()
        for prefix, module, *_ in _walk(model, join("model", key))
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def extra_state_modules(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that keep state of their own kind (`get_extra_state`), by clean name."""
    found: dict[str, nn.Module] = {}
    for key, model in models.items():
        for prefix, module, *_ in _walk(model, join("model", key)):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                found.setdefault(prefix, module)
    return found


def clean_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its clean name; wrappers have that of what they wrap."""
    for prefix, module, _ in _walk(model, ""):
        yield prefix, module


def _walk(module: nn.Module, prefix: str, vouched: set[int] | None = None) -> Iterator[tuple[str, nn.Module, set[int] | None]]:
    """(clean prefix, module, ids of the parameters that an enclosing DDP replicates) of every module once a path."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        ignored = module.parameters_to_ignore
        vouched = {id(p) for name, p in module.module.named_parameters(remove_duplicate=False) if name not in ignored}
    inner = _wrapped(module)
    yield prefix, module, vouched
    for name, child in module._modules.items():
        if child is not None:
            through = inner is not None and name == inner[0]
            yield from _walk(child, prefix if through else join(prefix, name), vouched)


def fsdp2_groups(module: nn.Module) -> Sequence[Any]:
    """The groups of parameters that FSDP2 manages for a module it was called on; none for any other."""
    get_state = getattr(type(module), "_get_fsdp_state", None)
    if get_state is None:
        return ()
    fsdp_state = get_state(module)
    groups = getattr(fsdp_state, "_fsdp_param_groups", None)  # several since torch 2.12, one before
    return groups if groups is not None else [g for g in [fsdp_state._fsdp_param_group] if g is not None]


def _fsdp2_shards(model: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """The sharded parameter behind every (module id, parameter name) that FSDP2 manages."""
    shards: dict[tuple[int, str], nn.Parameter] = {}
    for module in model.modules():
        for group in fsdp2_groups(module):
            for p in group.fsdp_params:
                info = p._module_info
                shards[id(info.module), info.param_name] = p.sharded_param
                for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    shards[id(shared), name] = p.sharded_param
    return shards
