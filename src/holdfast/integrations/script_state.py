"""Small things that a script's checkpoint needs beside the prepared objects: its counters, its folders, its types."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.core.manifest import MANIFEST_FILE
from holdfast.engine.resume import survey
from holdfast.errors import CheckpointNotFound
from holdfast.integrations.script_order import Orders
from holdfast.storage import LocalFolder


class ScriptFolder(LocalFolder):
    """A script's output folder, and any other folder that it names by an absolute path."""

    def name_of(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) and path != self.root else str(path)

    def _inside(self, path: str) -> Path:
        if path.startswith("/") and ".." not in path.split("/"):
            return Path(path)
        return super()._inside(path)


class Counters:
    """The accelerator's own counters as they stood after the last optimizer step, which is where all ranks agree."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.steps = 0
        self._step = accelerator.step
        self.orders = Orders(accelerator)
        self._loaders: list[dict[str, Any]] | None = None

    def stepped(self) -> None:
        self.steps += 1
        self._step = self._accelerator.step
        self._loaders = self.orders.state()

    def state_dict(self) -> dict[str, Any]:
        loaders = self.orders.state() if self._loaders is None else self._loaders
        return {"step": self._step, "loaders": loaders, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = self._step = state["step"]
        self.steps = state["steps"]
        self._loaders = list(state.get("loaders", []))
        self.orders.load(self._loaders)

    def resumed(self, folder: Path) -> None:
        """Go on after this folder where accelerate gives the names: the next one of its own would be there already."""
        settings = self._accelerator.project_configuration
        if settings.automatic_checkpoint_naming and (number := re.findall(r"\d+$", folder.name)):
            settings.iteration = int(number[0]) + 1

    def next_folder(self, parent: Path) -> Path:
        """Accelerate's automatic name; beyond `total_limit` the oldest go."""
        settings = self._accelerator.project_configuration
        folders = sorted(_numbered(parent), key=_number)
        if settings.total_limit is not None and self._accelerator.is_main_process:
            for old in folders[: max(0, len(folders) + 1 - settings.total_limit)]:
                shutil.rmtree(old)  # which keeps the last complete one
        return parent / f"checkpoint_{settings.iteration}"

    def newest_folder(self, parent: Path) -> Path:
        complete = survey(LocalFolder(parent)).complete if parent.is_dir() else []
        if complete:
            return parent / complete[0].folder
        foreign = [f for f in _numbered(parent) if not (f / MANIFEST_FILE).exists()]
        if not foreign:
            raise CheckpointNotFound(f"there is no checkpoint in {parent}")
        return max(foreign, key=_number)


def _numbered(parent: Path) -> list[Path]:
    return [parent / n for n in os.listdir(parent) if re.search(r"\d+$", n)] if parent.is_dir() else []


def _number(folder: Path) -> int:
    return int(re.findall(r"\d+$", folder.name)[0])


class Sized(dict[str, Any]):
    """A state dict whose floating-point tensors are of another type once they are looked at: one at a time."""

    def __init__(self, state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__(state)
        self._dtype = dtype

    def _cast(self, tensor: Any) -> Any:
        return tensor.to(self._dtype) if torch.is_tensor(tensor) and tensor.is_floating_point() else tensor

    def __getitem__(self, name: str) -> Any:
        return self._cast(super().__getitem__(name))

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]

    def copy(self) -> Sized:
        return Sized(dict(super().items()), self._dtype)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()
