"""PEFT's adapter folders: `adapter_model.safetensors` holds the adapter without its name, `adapter_config.json` the rest.

    in the model      base_model.model.layers.0.q_proj.lora_A.default.weight     …q_proj.base_layer.weight
    in the file       base_model.model.layers.0.q_proj.lora_A.weight             -
    in the base       -                                                          layers.0.q_proj.weight
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.formats.foreign import ForeignModel
from holdfast.formats.weights import weights_of_file, weights_of_folder

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
CONFIG = "adapter_config.json"
WRAPPER = "base_model.model."
_LORA = re.compile(r"(.*\.(?:lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector))(\.weight)?")


def adapter_of(path: Path, base: Path | None, alone: bool = False, adapter: str = "default") -> ForeignModel:
    """The whole PEFT model: the adapter at `path` in the pretrained model `base`; or the adapter `alone`, of a `partial` model.

    Raises:
        UsageError: there is no `base`, and the adapter alone is not wanted.
    """
    if base is None and not alone:
        raise UsageError(
            f"{path} is an adapter without its base model: give the pretrained folder that it was trained on, with --base FOLDER"
        )
    stored = weights_of_file(path)
    model = ForeignModel({})
    wrapped: set[str] = set()
    for name, source in stored.tensors.items():
        if (found := _LORA.fullmatch(name)) is not None:
            wrapped.add(found[1].rpartition(".")[0])
            model.tensors[f"{found[1]}.{adapter}{found[2] or ''}"] = source
        else:
            model.tensors[name] = source
    if base is None:
        model.partial = True
        return model
    for name, source in weights_of_folder(base).tensors.items():
        module, _, leaf = (WRAPPER + name).rpartition(".")
        full = f"{module}.base_layer.{leaf}" if module in wrapped else f"{module}.{leaf}"
        model.tensors.setdefault(full, source)
    return model


def stored_name(name: str, adapter: str = "default") -> str | None:
    """Under which name PEFT stores a tensor of its model; None for what is of the base model."""
    middle = f".{adapter}"
    found = re.fullmatch(rf"(.*\.lora_\w+){re.escape(middle)}(\.weight)?", name)
    if found is not None:
        return found[1] + (found[2] or "")
    kept = re.fullmatch(rf"(.*)\.modules_to_save{re.escape(middle)}(\..*)", name)
    return kept[1] + kept[2] if kept is not None else None
