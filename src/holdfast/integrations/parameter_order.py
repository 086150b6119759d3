"""The names of an optimizer's parameters in its order, where a checkpoint keeps its state by position.

The model is built from its config.json on the meta device by the library that wrote it, so that its parameters come in the
order in which the library hands them out. The Trainer makes two groups of them: with weight decay and without.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.formats.foreign import Foreign
from holdfast.formats.peft import CONFIG as ADAPTER_CONFIG
from holdfast.formats.recognise import TRAINER


def group_names(foreign: Foreign, base: Path | None) -> list[list[str]] | None:
    """The names of each group of the only optimizer; None where no config.json tells which model it is.

    Raises:
        UsageError: the config names a class that is not there.
    """
    folders = [folder for folder in (base, foreign.folder, foreign.folder.parent) if folder is not None]
    folder = next((f for f in folders if (f / "config.json").is_file()), None)
    if folder is None:
        return None
    model = build_on_meta(folder)
    if (foreign.folder / ADAPTER_CONFIG).is_file():
        peft: Any = import_module("peft")
        config = peft.PeftConfig.from_pretrained(str(foreign.folder))
        config.inference_mode = False  # as it was trained
        with torch.device("meta"):
            model = peft.get_peft_model(model, config)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    groups = foreign.optimizers[0].groups
    if len(groups) == 1:
        return [names]
    if foreign.kind == TRAINER and len(groups) == 2:
        trainer: Any = import_module("transformers").Trainer
        decayed = set(trainer.get_decay_parameter_names(None, model))
        return [[n for n in names if n in decayed], [n for n in names if n not in decayed]]
    return None


def build_on_meta(folder: Path) -> nn.Module:
    """The model of a config.json of transformers or diffusers, without memory."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "_class_name" in config:
        library: Any = import_module("diffusers")
        kind = getattr(library, config["_class_name"], None)
        name = config["_class_name"]
    else:
        library = import_module("transformers")
        name = (config.get("architectures") or [""])[0]
        kind = getattr(library, name, None)
    if kind is None:
        raise UsageError(f"{folder / 'config.json'} is of a model {name!r}, which {library.__name__} {library.__version__} does not have")
    with torch.device("meta"):
        model: nn.Module = kind.from_config(config) if "_class_name" in config else kind(kind.config_class.from_dict(config))
    return model
