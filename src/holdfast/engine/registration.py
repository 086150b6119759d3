"""What a Checkpointer is given, looked at before anything else happens: one clear message for what it cannot be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from holdfast.engine.collect import Registered, world
from holdfast.engine.names import Models, join, keyed
from holdfast.engine.optimizers import bare_optimizer
from holdfast.engine.pretrained import claim_base
from holdfast.errors import UsageError
from holdfast.storage import LocalFolder


def usable_folder(folder: Path) -> LocalFolder:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"cannot use {folder} for checkpoints: it is a file, give a folder") from error
    except OSError as error:
        raise UsageError(f"cannot use {folder} for checkpoints: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write to {folder}: give a folder that this user may write to")
    return LocalFolder(folder)


def register(
    model: Models,
    optimizer: object,
    lr_scheduler: object,
    dataloader: object,
    scaler: object,
    extra: Mapping[str, object] | None,
    base: object,
) -> Registered:
    models: dict[str, nn.Module] = {}
    for key, value in keyed(model, "model").items():
        if not isinstance(value, nn.Module):
            raise UsageError(f"{join('model', key)} is of type {type(value).__name__}, should be a torch.nn.Module")
        models[key] = value
    if not models:
        raise UsageError("a Checkpointer needs a model")
    optimizers = {key: bare_optimizer(value, join("optimizer", key)) for key, value in keyed(optimizer, "optimizer").items()}
    stateful: dict[str, Any] = {}
    groups = {"lr_scheduler": lr_scheduler, "scaler": scaler, "dataloader": dataloader}
    for kind, given in groups.items():
        for key, value in keyed(given, kind).items():
            name = join(kind, key)
            if not _stateful(value):
                remedy = (
                    "; use holdfast.DataLoader, torchdata's StatefulDataLoader, or Accelerate's use_stateful_dataloader"
                    if kind == "dataloader"
                    else ""
                )
                raise UsageError(f"{name} is a {type(value).__name__} without state_dict and load_state_dict{remedy}")
            stateful[name] = value
    for key, value in keyed(extra or {}, "extra").items():
        if not _stateful(value) and not isinstance(value, dict | list):
            raise UsageError(
                f"extra[{key!r}] is a {type(value).__name__}: give an object with state_dict and load_state_dict, or a dict or list, "
                "which is filled in place on resume"
            )
        stateful[join("extra", key)] = value
    for key, folder in keyed(base, "base").items():
        if key not in models:
            raise UsageError(f"{join('base', key)}: there is no such model; give folders as the models are given: one, or by key")
        if not isinstance(folder, str | os.PathLike):
            raise UsageError(f"{join('base', key)} is a {type(folder).__name__}, should be the folder that the model was loaded from")
        claim_base(models[key], folder)
    registered = Registered(models, optimizers, stateful, *world())
    registered.bases.take_notes({join("model", key): m for key, m in models.items()})
    return registered


def _stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
