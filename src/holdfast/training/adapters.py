"""LoRA: small trained matrices beside the layers of a frozen model (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    y = W x + (alpha / rank) B A x        A of shape (rank, in), normal with deviation 1 / rank; B of shape (out, rank), zeros

An adapter is put into a model on the meta device, before that is sharded. The base's weights come from its folder, under
the names that they have there (PEFT moves `to_q.weight` to `to_q.base_layer.weight`), in the dtype of the arithmetic and
frozen. The adapter's first values are drawn from the seed and the parameter's name, so that they are the same on any
number of ranks; they are kept in fp32.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from holdfast.engine.export import DTYPES, write_weights
from holdfast.engine.export_weights import choose_weights
from holdfast.engine.extract import Stored, open_checkpoint
from holdfast.engine.meta import parameters_on_meta
from holdfast.errors import UsageError
from holdfast.formats.peft import stored_name

if TYPE_CHECKING:
    from holdfast.training.config import DiffusionConfig

FILE_STEM = "pytorch_lora_weights"  # what diffusers' `load_lora_weights` looks for


@dataclass(frozen=True)
class Adapter:
    """What LoRA a model gets: `targets` are the ends of its layers' names, `seed` is of the first values."""

    rank: int
    alpha: int
    dropout: float
    targets: tuple[str, ...]
    seed: int

    def put_into(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Freeze `model` and put the adapter beside its layers; the model's dtype becomes `dtype`, the adapter's is fp32."""
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(dtype)
        inject_adapter_in_model(self.config(), model)
        layers: Any = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            # It would look at its weight's dtype, which FSDP1 changes under it. Autocast does the same, and always alike.
            layer.cast_input_dtype_enabled = False
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def elsewhere(self, targets: tuple[str, ...]) -> Adapter:
        """The same kind of adapter for another model."""
        return dataclasses.replace(self, targets=targets)

    def config(self) -> LoraConfig:
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            init_lora_weights="gaussian",
            target_modules=list(self.targets),
        )

    def initial(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The whole first value of one of the adapter's parameters, in fp32; None for what is no parameter of it."""
        if ".lora_B." in name:
            return torch.zeros(shape)
        if ".lora_A." not in name:
            return None
        seed = int(hashlib.sha256(f"{self.seed} {name}".encode()).hexdigest()[:15], 16)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / self.rank

    def check_targets(self, model: nn.Module) -> None:
        """Raises UsageError where a target is the end of no layer's name; the nearest ones are told."""
        layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
        ends = {end for name in layers for end in _ends(name)}
        lines = []
        for target in self.targets:
            if target not in ends:
                near = difflib.get_close_matches(target, sorted(ends), n=3)
                hint = f"nearest: {', '.join(near)}" if near else f"it has, among others: {', '.join(sorted(ends)[:5])}"
                lines.append(f"--lora_layers: no layer of {type(model).__name__} ends in {target!r}; {hint}.")
        if lines:
            raise UsageError("\n".join(lines))


def adapter_of(config: DiffusionConfig, default_targets: tuple[str, ...], build: Callable[[], nn.Module]) -> Adapter | None:
    """The LoRA that the flags ask for, if they do, for the model that `build` makes.

    Raises:
        UsageError: a layer that it does not have is named; told from its structure, before anything is read.
    """
    if config.rank is None:
        return None
    adapter = Adapter(config.rank, config.lora_alpha, config.lora_dropout, config.lora_targets(default_targets), config.seed)
    with parameters_on_meta():
        adapter.check_targets(build())
    return adapter


def names_in_base(model: nn.Module) -> dict[str, str]:
    """For `load_pretrained(key_mapping=...)`: from the names of the base's folder to those of the model with its adapter."""
    wrapped = [re.escape(name) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    return {rf"^({'|'.join(wrapped)})\.(\w+)$": r"\1.base_layer.\2"} if wrapped else {}


def export_adapters(
    checkpoint: Path, output_dir: Path, adapters: Mapping[str, tuple[str, Adapter]], dtype: str, ema_of: str | None
) -> Path:
    """Writes `pytorch_lora_weights.safetensors`, which a pipeline's `load_lora_weights` reads; returns its path.

    `adapters` maps a part of the pipeline (`transformer`, `text_encoder`) to the key of its model in the checkpoint and
    its adapter. `dtype` is one of fp32, bf16, fp16. `ema_of` is the part whose averaged weights are taken, if any.
    """
    source = open_checkpoint(checkpoint)
    tensors: dict[str, Stored] = {}
    described: dict[str, Any] = {}
    for part, (key, adapter) in adapters.items():
        weights = choose_weights(source, key, ema=part == ema_of)
        for name, tensor in weights.tensors.items():
            if (stored := stored_name(name)) is not None:
                tensors[f"{part}.{stored}"] = tensor
        config: Any = adapter.config()
        for field, value in config.to_dict().items():
            described[f"{part}.{field}"] = sorted(value) if isinstance(value, set) else value
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(described, indent=2, sort_keys=True)}
    target, new = output_dir / f"{FILE_STEM}.safetensors", output_dir / f".{FILE_STEM}.new.safetensors"
    new.unlink(missing_ok=True)  # of an export that was killed
    write_weights(source, output_dir, new.stem, tensors, DTYPES[dtype], 1 << 62, metadata)
    os.replace(new, target)  # a former run's
    return target


def _ends(name: str) -> Iterable[str]:
    """`blocks.0.attn.to_q` -> itself, attn.to_q, to_q: ends that are more than a number."""
    words = name.split(".")
    return (".".join(words[start:]) for start in range(len(words)) if not words[start].isdigit())
