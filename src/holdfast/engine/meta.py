"""Memory for a model that was built on the meta device: its shards, and the buffers that no file holds.

Tensors are given memory in place (`torch.utils.swap_tensors`), so that a parameter under two names stays one, and what an
optimizer refers to stays the model's. FSDP2 is shown its new shards afterwards, which it pads and pins as it needs.

Non-persistent buffers (RoPE frequencies, position ids) are in no file. Where they are on the meta device too, a *twin* of
the model is built from its config, with parameters on the meta device and real buffers, and theirs are taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from holdfast.engine.names import unwrap
from holdfast.errors import UsageError


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A model built in here has its parameters on the meta device and real buffers; no parameter is initialised.

    The memory that a constructor asks for a parameter is given back untouched. Affects the calling thread only.
    """
    thread = threading.get_ident()

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)

    hook = nn.modules.module.register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


def home_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Where tensors belong that are on the meta device: `device`, or the mesh's, or torch's default."""
    if device is not None:
        return torch.device(device)
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) and module.compute_device is not None:
            return module.compute_device
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            if kind == "cpu":
                return torch.device("cpu")
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.get_default_device()


def materialise(
    model: nn.Module, tensors: Iterable[torch.Tensor], dtype: torch.dtype | None, home: torch.device
) -> None:
    """Give memory to those of `tensors` that have none, or another floating-point type than `dtype`: uninitialised."""
    offloaded = _offloaded(model)
    for tensor in tensors:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if not tensor.is_meta and wanted == tensor.dtype:
            continue
        device = torch.device("cpu") if id(tensor) in offloaded else home if tensor.is_meta else tensor.device
        real = torch.empty_like(tensor, dtype=wanted, device=device, requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, tensor.requires_grad)
        real.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # As after `.to()`, only that nothing more is changed: FSDP2 drops whole parameters that a forward without gradients
            # has left, and takes the new shards, which it pads and pins.
            module._apply(lambda tensor: tensor, recurse=False)  # type: ignore[no-untyped-call]


def give_memory(device: torch.device) -> Callable[[nn.Module], nn.Module]:
    """FSDP1's `param_init_fn`: memory for what a module itself has on the meta device, uninitialised and in place.

    Buffers are left alone: real ones keep their values, and `load_pretrained` knows where others get theirs.
    """

    def materialise_own(module: nn.Module) -> nn.Module:
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta:
                real = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                real.__dict__.update(parameter.__dict__)
                torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
        return module

    return materialise_own


def _offloaded(model: nn.Module) -> set[int]:
    """Ids of the parameters that FSDP2 keeps on the host."""
    ids = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # several since torch 2.12, one before
            for group in [state._fsdp_param_group] if groups is None else groups:
                ids |= {id(p.sharded_param) for p in (group.fsdp_params if group else ()) if p.offload_to_cpu}
    return ids


@dataclass(frozen=True, slots=True)
class MissingValue:
    """A tensor on the meta device that no file fills, the module that owns it, and the `value` that it should get."""

    module: nn.Module
    key: str
    tensor: torch.Tensor
    value: torch.Tensor

    def put(self, home: torch.device) -> None:
        value = self.value.to(device=home, dtype=self.tensor.dtype)
        if self.key in self.module._buffers:
            self.module._buffers[self.key] = value
        else:
            setattr(self.module, self.key, value)


def values_without_file(
    model: nn.Module, filled: set[int], build: Callable[[], nn.Module] | None
) -> list[MissingValue]:
    """Find a value for every buffer (and tensor attribute) on the meta device whose id is not in `filled`.

    Raises:
        UsageError: the model has no config and there is no `build`, or the twin does not have the buffer.
    """
    model = unwrap(model)
    empty = list(_empty(model, "", filled))
    if not empty:
        return []
    twin = _twin(model, ".".join(filter(None, empty[0][1:3])), build)
    found = []
    for module, path, key, tensor in empty:
        value = _at(twin, path, key)
        if value is None or value.is_meta or value.shape != tensor.shape:
            raise UsageError(
                f"nothing gives {path}.{key} its values, which is on the meta device and in no file: build the model "
                "in holdfast.engine.meta.parameters_on_meta() instead of on the meta device"
            )
        found.append(MissingValue(module, key, tensor, value.detach()))
    return found


def _empty(module: nn.Module, path: str, filled: set[int]) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """(module, its clean path, key, tensor) of what is on the meta device, parameters apart."""
    for key, value in {**module.__dict__, **module._buffers}.items():
        if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in filled:
            yield module, path, key, value
    for name, child in module._modules.items():
        if child is not None:
            yield from _empty(unwrap(child), f"{path}.{name}" if path else name, filled)


def _at(twin: nn.Module, path: str, key: str) -> torch.Tensor | None:
    try:
        value = getattr(twin.get_submodule(path), key)
    except AttributeError:
        return None
    return value if isinstance(value, torch.Tensor) else None


def _twin(model: nn.Module, name: str, build: Callable[[], nn.Module] | None) -> nn.Module:
    """A second model with real buffers; leaves the host's random state as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), parameters_on_meta():
        if build is not None:
            return unwrap(build())
        # fully_shard gives a module a class of its own, which is made of FSDPModule and the one that it had.
        kind: Any = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
        config = getattr(model, "config", None)
        if config is None:
            raise UsageError(
                f"the buffer {name} is on the meta device and in no file, and {kind.__name__} has no config to rebuild it "
                f"from: pass build=lambda: {kind.__name__}(…)"
            )
        twin: nn.Module = getattr(kind, "from_config", kind)(config)  # diffusers' classes have from_config
        return twin
