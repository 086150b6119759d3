"""Cut a model over the ranks before it has any weights, so that no rank ever holds the whole: encoders and denoisers alike.

    with torch.device("meta"): model = LlamaForCausalLM(config)      # or holdfast.engine.meta.parameters_on_meta()
    model = holdfast.shard(model, dtype=torch.bfloat16, offload=True)
    model = holdfast.load_pretrained(model, folder)                  # every rank reads its own part

Each layer becomes a unit of its own, and what is left (embeddings, norms, heads; tied weights stay tied) one more.
Nothing is broadcast: `sync_module_states` and `cpu_ram_efficient_loading` have nothing left to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from holdfast.engine.meta import give_memory
from holdfast.errors import UsageError


def shard(
    model: nn.Module,
    *,
    layer_classes: Iterable[str | type[nn.Module]] | None = None,
    offload: bool = False,
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    mesh: DeviceMesh | None = None,
    version: int = 2,
    use_orig_params: bool = True,
) -> nn.Module:
    """Apply FSDP to a model, on the meta device or not, and return it (version 1: its wrapper). All ranks call it.

    Without a process group there is nothing to cut, and only `dtype` has an effect.

    Args:
        layer_classes: the layers that become units, by class or class name; by default the elements of the outermost
            `ModuleList`s, as Transformers and diffusers keep their layers.
        offload: keep the shards in host memory and bring a unit to the device when it is its turn.
        dtype: of the floating-point parameters; None keeps the model's.
        compute_dtype: of forward and backward, where it is not that of the parameters (gradients are reduced in fp32).
        mesh: one dimension to shard over, or replicate x shard; by default all ranks shard.
        version: 2 (`fully_shard`) or 1 (`FullyShardedDataParallel`).
        use_orig_params: version 1 only: whether the optimizer sees the parameters or the flat ones.

    Raises:
        UsageError: no layer of these classes is in the model, or another version is asked for.
    """
    if version not in (1, 2):
        raise UsageError(f"shard(version={version!r}): there are FSDP versions 1 and 2")
    layers = list(_layers(model, layer_classes))
    if dtype is not None:
        model.to(dtype)
    if not dist.is_initialized():
        return model
    device = _device()
    if mesh is None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if version == 1:
        return _version_1(model, layers, offload, compute_dtype, mesh, device, use_orig_params)
    policy = CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(compute_dtype, torch.float32 if compute_dtype else None)
    for layer in layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy, mp_policy=precision)
    fully_shard(model, mesh=mesh, offload_policy=policy, mp_policy=precision)
    return model


def trained_units(model: nn.Module, layers: Iterable[nn.Module]) -> set[int]:
    """Ids of the modules that FSDP1 has to make units of their own: what is trained (an adapter) in a layer that is frozen else.

    A unit of FSDP1 has one dtype, and without original parameters it is trained or not as a whole.
    """
    found: set[int] = set()
    layers = list(layers)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    for unit in [*layers, model]:
        own = [p for p in unit.parameters() if unit is not model or id(p) not in inside]
        if len({p.requires_grad for p in own}) < 2:
            continue
        mixed = {id(p) for p in own}
        for module in unit.modules():
            leaf = list(module.parameters(recurse=False))
            if leaf and all(p.requires_grad and id(p) in mixed for p in leaf):
                found.add(id(module))
    return found


def _version_1(
    model: nn.Module,
    layers: list[nn.Module],
    offload: bool,
    compute_dtype: torch.dtype | None,
    mesh: DeviceMesh,
    device: torch.device,
    use_orig_params: bool,
) -> nn.Module:
    units = {id(layer) for layer in layers} | trained_units(model, layers)
    strategy = ShardingStrategy.FULL_SHARD if mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
        device_mesh=mesh,
        sharding_strategy=strategy,
        # On CPU ranks the shards are in host memory, and torch refuses to be asked.
        cpu_offload=CPUOffload(offload and device.type != "cpu"),
        mixed_precision=MixedPrecision(compute_dtype, torch.float32) if compute_dtype else None,
        device_id=device,
        param_init_fn=give_memory(device),  # type: ignore[arg-type]  # torch has no use for what it returns, Accelerate has
        use_orig_params=use_orig_params,
    )


def _device() -> torch.device:
    accelerator: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or dist.get_backend() == dist.Backend.GLOO:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _layers(model: nn.Module, classes: Iterable[str | type[nn.Module]] | None) -> Iterator[nn.Module]:
    if classes is not None:
        wanted = list(classes)
        found = [m for m in model.modules() if any(_is(m, kind) for kind in wanted)]
        odd = [kind for kind in wanted if not any(_is(m, kind) for m in found)]
        if odd:
            there = sorted({type(m).__name__ for m in model.modules()})
            raise UsageError(f"shard: {type(model).__name__} has no {odd[0]} among its layers; it is made of {', '.join(there)}")
        yield from found
        return
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    outer = [(name, m) for name, m in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    if not outer:
        raise UsageError(f"shard: {type(model).__name__} keeps its layers in no ModuleList: name them with layer_classes=[...]")
    for _, layers in outer:
        yield from layers


def _is(module: nn.Module, kind: str | type[nn.Module]) -> bool:
    return type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind)
