"""An exponential moving average of the trained weights, shard by shard: no rank holds more of it than of the model.

    average <- average + (1 - decay) * (weights - average)        decay = min(ema_decay, (1 + step) / (10 + step))

The average is a model of its own to the checkpoints, with the key `ema` and only the trained parameters: in DTensors placed
like the model's, replicated ones under DDP, and under FSDP1 a second model that is cut in the same way. Its shards are
found by name at each use, since FSDP moves its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import holdfast
from holdfast.engine.fsdp1 import FlatPiece
from holdfast.engine.names import named_state
from holdfast.training.adapters import Adapter
from holdfast.training.config import DiffusionConfig
from holdfast.training.models import Build, forget_whole_parameters, is_fsdp1, on_meta, wrapped_by_fsdp1

KEY = "ema"


class Average:
    """The moving average of what is trained in `model` (prepared).

    Under FSDP1 `twin` is a second model, wrapped in the same way, whose values do not matter. Register `self.model` with
    the Checkpointer under the key `ema`, and hand that to `watch`.
    """

    def __init__(self, model: nn.Module, decay: float, twin: nn.Module | None) -> None:
        self.decay, self._of = decay, model
        self.model = _container(model) if twin is None else twin
        self._checkpointer: holdfast.Checkpointer | None = None
        with torch.no_grad():
            for mine, theirs in self._pairs():
                mine.copy_(theirs)

    def watch(self, checkpointer: holdfast.Checkpointer) -> None:
        """The Checkpointer that may be copying when the average changes."""
        self._checkpointer = checkpointer

    def update(self, step: int) -> None:
        """Take in the weights after optimizer step `step`, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        with self._mutating(), torch.no_grad():
            for mine, theirs in self._pairs():
                mine.lerp_(theirs.to(mine.dtype), 1.0 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averaged weights, as long as this lasts. Costs a copy of the rank's shards."""
        with self._mutating(), torch.no_grad():
            pairs = self._pairs()
            kept = [theirs.clone() for _, theirs in pairs]
            for mine, theirs in pairs:
                theirs.copy_(mine)
            forget_whole_parameters(self._of)
            try:
                yield
            finally:
                forget_whole_parameters(self._of)  # what was gathered is of the average
                for (_, theirs), value in zip(self._pairs(), kept, strict=True):
                    theirs.copy_(value)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(the average's, the model's) local data of each trained parameter."""
        mine, theirs = _locals(self.model), _locals(self._of)
        return [(mine[name], theirs[name]) for name in mine]

    @contextmanager
    def _mutating(self) -> Iterator[None]:
        if self._checkpointer is None:
            yield
        else:
            with self._checkpointer.mutating():
                yield


def average_of(
    config: DiffusionConfig, accelerator: Accelerator, model: nn.Module, build: Build, adapter: Adapter | None
) -> Average | None:
    """The average that the flags ask for, if they do, of the `model` that `prepare_model` made with `build` and `adapter`."""
    if not config.use_ema:
        return None
    twin = None
    if is_fsdp1(accelerator):
        twin = wrapped_by_fsdp1(accelerator, on_meta(build, adapter, accelerator), only_trained=True)
        accelerator._models.remove(twin)  # is never called
    return Average(model, config.ema_decay, twin)


def _locals(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in named_state({"": model}).parameters.items():
        if isinstance(parameter, FlatPiece):
            found[name] = parameter.local
        else:
            found[name] = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
    return found


def _container(model: nn.Module) -> nn.Module:
    """Modules of the model's names, with a parameter for each trained one."""
    root, everybody = nn.Module(), None
    for name, parameter in named_state({"": model}).parameters.items():
        assert isinstance(parameter, nn.Parameter)
        if not parameter.requires_grad:
            continue
        value = parameter.detach().clone()
        if dist.is_initialized() and dist.get_world_size() > 1 and not isinstance(value, DTensor):
            everybody = everybody or init_device_mesh(value.device.type, (dist.get_world_size(),))
            value = DTensor.from_local(value, everybody, [Replicate()], run_check=False)
        *path, last = name.removeprefix("model.").split(".")
        module = root
        for word in path:
            if word not in module._modules:
                module.add_module(word, nn.Module())
            module = module.get_submodule(word)
        module.register_parameter(last, nn.Parameter(value, requires_grad=False))
    return root
