"""Loads a frozen text encoder of a pipeline, straight from its files and in the dtype that it will run in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn

import holdfast
from holdfast.training.pipeline_folder import part_files, weight_variant


def load_text_encoder(cls: Any, folder: Path, dtype: torch.dtype, variant: str | None) -> nn.Module:
    """The transformers model of class `cls` that `folder` holds, on the CPU, frozen, in evaluation mode.

    Files written before transformers 5 have CLIP's names below `text_model.`, newer ones have not: both are read.
    """
    with init_empty_weights(include_buffers=False):
        model = cls(cls.config_class.from_pretrained(folder))
    model.tie_weights()
    names = _tensor_names(folder, variant)
    below = nn.Module()
    prefix = cls.base_model_prefix
    if prefix and all(name.startswith(f"{prefix}.") for name in names) and not hasattr(model, prefix):
        below.add_module(prefix, model)
        holdfast.load_pretrained(below, folder, dtype=dtype)
    else:
        holdfast.load_pretrained(model, folder, dtype=dtype)
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


def _tensor_names(folder: Path, variant: str | None) -> set[str]:
    files = [path for path in part_files(folder.parent, folder.name, variant) if weight_variant(path.name) is not None]
    names: set[str] = set()
    for path in files:
        if path.suffix == ".json":
            names |= set(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        else:
            with safe_open(path, framework="pt") as file:
                names |= set(file.keys())
    return names
