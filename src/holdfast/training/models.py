"""Models that are sharded, loaded and ready to be trained, or frozen and ready to be used.

No rank ever holds a sharded model whole: it is built on the meta device, cut, and each rank reads its own slices from
disk. Accelerate's own ways of loading (one rank reads and broadcasts) are switched off. Elsewhere (DDP, one process)
every rank reads the whole from disk. A LoRA is put in before the model is cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.engine.fsdp1 import reshard
from holdfast.engine.meta import give_memory, parameters_on_meta
from holdfast.engine.shard import trained_units
from holdfast.errors import UsageError
from holdfast.training.adapters import Adapter, names_in_base
from holdfast.training.setup import compute_dtype

Build = Callable[[], nn.Module]


def is_fsdp1(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2


def prepare_model(
    accelerator: Accelerator,
    build: Build,
    folder: Path,
    variant: str | None,
    checkpointing: bool,
    adapter: Adapter | None = None,
) -> nn.Module:
    """The model that `build` makes, with the weights of `folder`, sharded or wrapped as the run needs it.

    All of it is trained, in fp32, or `adapter` is, and then the rest is frozen and in the dtype of the arithmetic.
    `checkpointing` asks for activation checkpointing. Make the optimizer from the result's parameters.
    """
    model = on_meta(build, adapter, accelerator).train()
    load, dtype = _loading(accelerator, model, adapter, folder, variant)
    fsdp = accelerator.distributed_type == DistributedType.FSDP
    if checkpointing and not (fsdp and accelerator.state.fsdp_plugin.activation_checkpointing):
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    prepared: nn.Module
    if not fsdp:
        load(model, dtype=dtype, device=accelerator.device)
        prepared = accelerator.prepare(model)
        return prepared
    if not accelerator.is_fsdp2:
        return load(wrapped_by_fsdp1(accelerator, model))
    # Accelerate shards a model only together with an optimizer, whose parameters it then swaps by their address. On the
    # meta device all addresses are 0, so it gets one without parameters, and the real one is made afterwards.
    with _named_layers_are_there():
        prepared, _ = accelerator.prepare(model, torch.optim.SGD([{"params": []}], lr=0.0))
    accelerator._optimizers.clear()
    return load(prepared, dtype=dtype)


def on_meta(build: Build, adapter: Adapter | None, accelerator: Accelerator) -> nn.Module:
    """The model without memory, in the dtypes that it is trained in."""
    with parameters_on_meta():
        model = build()
        if adapter is None:
            return model.float()
        adapter.put_into(model, compute_dtype(accelerator))
    return model


def _loading(
    accelerator: Accelerator, model: nn.Module, adapter: Adapter | None, folder: Path, variant: str | None
) -> tuple[Callable[..., nn.Module], torch.dtype]:
    """`load_pretrained` for this model, before or after it is wrapped, and the dtype of what is read."""
    if adapter is None:
        return functools.partial(holdfast.load_pretrained, folder=folder, variant=variant), torch.float32
    load = functools.partial(
        holdfast.load_pretrained,
        folder=folder,
        variant=variant,
        key_mapping=names_in_base(model),
        initial=adapter.initial,
    )
    return load, compute_dtype(accelerator)


def wrapped_by_fsdp1(accelerator: Accelerator, model: nn.Module, only_trained: bool = False) -> nn.Module:
    """The model under FSDP1, its values not set yet: a unit at a time gets memory and is cut.

    With `only_trained` the frozen parameters are dropped, and the trained ones are cut as they are with them.
    """
    plugin = accelerator.state.fsdp_plugin
    plugin.param_init_fn = give_memory(accelerator.device)
    configured = plugin.auto_wrap_policy
    with _named_layers_are_there():
        plugin.set_auto_wrap_policy(model)
    classes = tuple(getattr(plugin.auto_wrap_policy, "keywords", {}).get("transformer_layer_cls", ()))
    if own := trained_units(model, [module for module in model.modules() if isinstance(module, classes)]):
        policy = plugin.auto_wrap_policy
        plugin.auto_wrap_policy = CustomPolicy(
            lambda module: id(module) in own
            or (policy is not None and bool(policy(module=module, recurse=False, nonwrapped_numel=_numel(module))))
        )
    if only_trained:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.requires_grad:
                    module._parameters[name] = None
    prepared: nn.Module = accelerator.prepare(model)
    plugin.auto_wrap_policy = configured  # the next model has layers of its own
    return prepared


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _named_layers_are_there() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "transformer layer class" not in str(error):
            raise
        raise UsageError(
            f"The accelerate config's fsdp_transformer_layer_cls_to_wrap does not fit: {error} Leave that key out: the "
            "model knows its layers."
        ) from error


def prepare_text_encoder(
    accelerator: Accelerator, build: Build, folder: Path, variant: str | None, adapter: Adapter | None = None
) -> nn.Module:
    """A second model that is trained along: sharded like the first, in units of its own layers."""
    model = on_meta(build, adapter, accelerator).train()
    load, dtype = _loading(accelerator, model, adapter, folder, variant)
    if accelerator.distributed_type != DistributedType.FSDP:
        load(model, dtype=dtype, device=accelerator.device)
        prepared: nn.Module = accelerator.prepare(model)
        return prepared
    plugin = accelerator.state.fsdp_plugin
    sharded = holdfast.shard(
        model,
        offload=_offloads(accelerator),
        compute_dtype=compute_dtype(accelerator),
        version=plugin.fsdp_version,
        use_orig_params=bool(plugin.use_orig_params),
    )
    return load(sharded) if plugin.fsdp_version == 1 else load(sharded, dtype=dtype)


def prepare_frozen(
    accelerator: Accelerator, build: Build, folder: Path, variant: str | None, dtype: torch.dtype
) -> nn.Module:
    """A model that is only used, in `dtype`: sharded where the run shards, whole on each rank elsewhere."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return load_frozen(build, folder, variant, dtype).to(accelerator.device)
    return load_sharded(build, folder, variant, dtype, _offloads(accelerator))


def load_sharded(
    build: Build,
    folder: Path,
    variant: str | None,
    dtype: torch.dtype,
    offload: bool,
    units: Iterable[str | type[nn.Module]] | None = None,
    names: Mapping[str, str] | None = None,
) -> nn.Module:
    """A part of the pipeline that is not trained, cut over all ranks, each of which reads its own slices.

    `units` are `layer_classes` of `holdfast.shard`; `names` as in `load_frozen`.
    """
    with parameters_on_meta():
        model = holdfast.shard(build(), layer_classes=units, offload=offload)
    return _read_frozen(model, folder, variant, dtype, names)


def _offloads(accelerator: Accelerator) -> bool:
    """Whether the accelerate config keeps shards in host memory."""
    asked = accelerator.state.fsdp_plugin.cpu_offload
    return isinstance(asked, CPUOffloadPolicy) or bool(getattr(asked, "offload_params", False))


def load_frozen(
    build: Build, folder: Path, variant: str | None, dtype: torch.dtype, names: Mapping[str, str] | None = None
) -> nn.Module:
    """A part of the pipeline that is not trained, on the CPU, in evaluation mode; only its own files are read.

    With `names`, which translates those in `folder` (`key_mapping` of `load_pretrained`), it may hold more than is built.
    """
    with parameters_on_meta():
        model = build()
    return _read_frozen(model, folder, variant, dtype, names)


def _read_frozen(
    model: nn.Module, folder: Path, variant: str | None, dtype: torch.dtype, names: Mapping[str, str] | None
) -> nn.Module:
    more = names is not None
    loaded = holdfast.load_pretrained(model, folder, dtype=dtype, variant=variant, key_mapping=names, allow_unexpected=more)
    return loaded.requires_grad_(False).eval()


@contextmanager
def on_device(module: nn.Module, device: torch.device, offload: bool) -> Iterator[None]:
    """`module` on `device` while it is used; with `offload` (`--offload`) in host memory again afterwards."""
    _move(module, device)
    try:
        yield
    finally:
        if offload:
            _move(module, torch.device("cpu"))


def _move(module: nn.Module, device: torch.device) -> None:
    """All of it, unless it is there: asking every tensor takes a millisecond, at each step."""
    first = next(module.parameters(), None)
    if first is None or first.device != device:
        module.to(device)


def forward_of(model: nn.Module) -> nn.Module:
    """What a pipeline can call like the model itself: without DDP's wrapper, which is for backward, and with FSDP's."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def forget_whole_parameters(model: nn.Module) -> None:
    """Give back what a forward without gradients has left whole, so that the next one gathers the shards as they are then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            reshard(module)


def clip_gradients(accelerator: Accelerator, models: list[nn.Module], max_norm: float) -> Any:
    """Scale the gradients of all models together down to `max_norm`; returns their norm before that.

    Under FSDP2 torch's own would sum the norm over the ranks once for the scale, and once more for whoever looks at it.
    """
    if len(models) == 1 and not any(isinstance(parameter, DTensor) for parameter in models[0].parameters()):
        return accelerator.clip_grad_norm_(models[0].parameters(), max_norm)
    accelerator.unscale_gradients()
    norms = []
    for model in models:
        if isinstance(model, FullyShardedDataParallel):
            norm: Any = model.clip_grad_norm_(float("inf"))  # scales by 1
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).float().to(accelerator.device))
    total = torch.linalg.vector_norm(torch.stack(norms))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for model in models:
        for parameter in model.parameters():
            if parameter.grad is not None:
                grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
                grad.mul_(scale.to(grad.device))
    return total
