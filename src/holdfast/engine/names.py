"""Clean names: what a parameter is called, whatever wraps the model, and where its shard is now.

Wrappers (DDP, FSDP1, torch.compile, activation checkpointing) put a module of their own between a parent and its child.
They are recognised by what they are, so that a user's own attribute called `module` keeps its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

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


@dataclass
class NamedState:
    """The parameters and persistent buffers of one or several models by clean name.

    `aliases` maps the further names of a tied parameter to its first one. `replicated` holds the names whose equality on
    all ranks DDP vouches for.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    replicated: set[str] = field(default_factory=set)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **self.buffers}


def keyed(value: object, what: str) -> dict[str, object]:
    """One object, a list or a dict of them, as a dict; a single one gets the empty key."""
    if isinstance(value, Mapping):
        bad = [k for k in value if not isinstance(k, str) or not k or "/" in k]
        if bad:
            raise UsageError(f"{what}: keys of a dict should be non-empty strings without '/', got {bad[0]!r}")
        return dict(value)
    if isinstance(value, list | tuple):
        return {str(i): v for i, v in enumerate(value)}
    return {} if value is None else {"": value}


def join(*parts: str) -> str:
    return ".".join(p for p in parts if p)


def named_state(models: Mapping[str, nn.Module]) -> NamedState:
    """Walk the models and resolve where each parameter's shard is.

    To be called on the training thread at each save: FSDP replaces parameters (lazy initialisation, offload), and after a
    forward without gradients a module may show its full parameters while the shard is elsewhere.
    """
    state = NamedState()
    first_name: dict[int, str] = {}
    for key, model in models.items():
        shards = _fsdp2_shards(model)
        for prefix, module, vouched in _walk(model, join("model", key)):
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                shard = shards.get((id(module), name), parameter)
                full = join(prefix, name)
                known = first_name.setdefault(id(shard), full)
                if known != full:
                    state.aliases[full] = known
                    continue
                state.parameters[full] = shard
                if vouched is not None and id(parameter) in vouched:
                    state.replicated.add(full)
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                full = join(prefix, name)
                known = first_name.setdefault(id(buffer), full)
                if known != full:
                    state.aliases[full] = known
                else:
                    state.buffers[full] = buffer
    return state


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


def _fsdp2_shards(model: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """The sharded parameter behind every (module id, parameter name) that FSDP2 manages."""
    shards: dict[tuple[int, str], nn.Parameter] = {}
    for module in model.modules():
        get_state = getattr(module, "_get_fsdp_state", None)
        if get_state is None:
            continue
        fsdp_state = get_state()
        groups = getattr(fsdp_state, "_fsdp_param_groups", None)  # several since torch 2.12, one before
        if groups is None:
            groups = [g for g in [fsdp_state._fsdp_param_group] if g is not None]
        for group in groups:
            for p in group.fsdp_params:
                info = p._module_info
                shards[id(info.module), info.param_name] = p.sharded_param
                for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    shards[id(shared), name] = p.sharded_param
    return shards
