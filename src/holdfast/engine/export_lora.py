"""LoRA exports: PEFT's adapter folder, and the one file that diffusers' `load_lora_weights` reads.

    in the checkpoint    base_model.model.layers.0.q_proj.lora_A.default.weight     transformer_blocks.0.attn.to_q.lora_A.default.weight
    PEFT                 base_model.model.layers.0.q_proj.lora_A.weight             -
    diffusers            -                                                          transformer.transformer_blocks.0.attn.to_q.lora_A.weight

The rank is read off the shapes. The alpha stands in no tensor: it comes from an adapter_config.json in the base folder or
from the caller, since a wrong one would scale the adapter without an error.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import torch

from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.export_weights import Weights
from holdfast.engine.extract import Stored
from holdfast.errors import IncompatibleCheckpoint, UsageError
from holdfast.formats.peft import CONFIG, WRAPPER, stored_name

if TYPE_CHECKING:
    from holdfast.engine.export import Request

_ADAPTER = re.compile(r".*\.lora_[AB]\.([^.]+)\.weight")


def export_peft(checkpoint: Checkpoint, request: Request, weights: Weights, dtype: torch.dtype | None) -> list[str]:
    """`adapter_model.safetensors` and `adapter_config.json`, as `PeftModel.from_pretrained` loads them."""
    from holdfast.engine.export import write_weights

    named = _adapter(checkpoint, weights)
    if not all(name.startswith(WRAPPER) for name in named):
        named = {WRAPPER + name: tensor for name, tensor in named.items()}
    config = _config(checkpoint, request, named)
    write_weights(checkpoint, request.output_dir, "adapter_model", named, dtype, 1 << 62)
    (request.output_dir / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [*weights.notes, f"{len(named)} tensors of an adapter of rank {config['r']}, alpha {config['lora_alpha']}"]


def export_diffusers_lora(checkpoint: Checkpoint, request: Request, weights: Weights, dtype: torch.dtype | None) -> list[str]:
    """`pytorch_lora_weights.safetensors` with the part's name before each tensor's, and the config in the file's metadata."""
    from holdfast.engine.export import write_weights

    part = request.model or "transformer"
    named = {name.removeprefix(WRAPPER): tensor for name, tensor in _adapter(checkpoint, weights).items()}
    config = _config(checkpoint, request, named)
    known = {f"{part}.{key}": value for key, value in config.items() if key != "base_model_name_or_path"}
    metadata = {"lora_adapter_metadata": json.dumps(known, indent=2, sort_keys=True)}
    prefixed = {f"{part}.{name}": tensor for name, tensor in named.items()}
    write_weights(checkpoint, request.output_dir, "pytorch_lora_weights", prefixed, dtype, 1 << 62, metadata)
    return [*weights.notes, f"{len(named)} tensors of a LoRA of rank {config['r']}, alpha {config['lora_alpha']}, for the {part}"]


def _adapter(checkpoint: Checkpoint, weights: Weights) -> dict[str, Stored]:
    """The adapter's tensors by the names that PEFT stores them under.

    Raises:
        IncompatibleCheckpoint: there is no adapter, or there are several.
    """
    adapters = sorted({found[1] for name in weights.tensors if (found := _ADAPTER.fullmatch(name))})
    if len(adapters) != 1:
        what = f"adapters {', '.join(adapters)}; one can be exported" if adapters else "no LoRA"
        raise IncompatibleCheckpoint(f"{checkpoint.where} holds {what} (its tensors: {weights.shown})")
    return {stored: t for name, t in weights.tensors.items() if (stored := stored_name(name, adapters[0])) is not None}


def _config(checkpoint: Checkpoint, request: Request, named: dict[str, Stored]) -> dict[str, Any]:
    """The adapter_config.json of the base folder, or one made from the tensors and the given alpha."""
    if request.base is not None and (request.base / CONFIG).is_file():
        config: dict[str, Any] = json.loads((request.base / CONFIG).read_text(encoding="utf-8"))
        return config | {"inference_mode": True}
    if request.lora_alpha is None:
        raise UsageError(
            f"{checkpoint.where} holds a LoRA, and its alpha stands in no tensor: say it with --lora_alpha N, or give the folder of an "
            f"{CONFIG} with --base"
        )
    ranks = {name.removesuffix(".lora_A.weight"): t.shape[0] for name, t in named.items() if name.endswith(".lora_A.weight")}
    modules = sorted(name.removeprefix(WRAPPER) for name in ranks)
    if len(set(ranks.values())) != 1:
        raise UsageError(f"{checkpoint.where} holds a LoRA of several ranks: give the folder of its {CONFIG} with --base")
    alpha = int(request.lora_alpha) if request.lora_alpha == int(request.lora_alpha) else request.lora_alpha
    saved = sorted({n.removeprefix(WRAPPER).rpartition(".")[0] for n in named if ".lora_" not in n})
    return {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "inference_mode": True,
        "r": next(iter(ranks.values())), "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "use_dora": any("lora_magnitude_vector" in n for n in named), "use_rslora": False, "init_lora_weights": True,
        "target_modules": modules, "modules_to_save": saved or None,
    }  # fmt: skip
