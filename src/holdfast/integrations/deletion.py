"""Keeps a script's own deletion of old checkpoints from taking the last complete one.

Scripts delete before they save, so with a limit of one there is a while with none. A folder that this run has saved to, or was
resumed from, is left alone while it is the newest complete one or is still being written; it goes when a newer one is complete.
Several ranks that delete the same folder at once do not disturb each other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.manifest import MANIFEST_FILE, RANK_NAME, Manifest
from holdfast.errors import CheckpointError

logger = logging.getLogger("holdfast")


class Guard:
    """Of one rank; `known` gives the checkpoints that this run knows of, and whether each is still being written."""

    def __init__(self, known: Callable[[], dict[Path, bool]]) -> None:
        self._known = known
        self._postponed: dict[Path, Callable[[], Any]] = {}

    def rmtree(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """`shutil.rmtree` of anything."""
        target = _path(path)
        if target is None or not self._inside(target):
            return original(path, *args, **kwargs)
        if not self._may_go(target):
            self._postponed[target] = lambda: original(path, ignore_errors=True)
            logger.warning("holdfast run: %s stays until a newer checkpoint is complete", target)
            return None
        return self._remove(target, lambda: original(path, *args, **kwargs))

    def concerns(self, path: Any) -> bool:
        target = _path(path)
        return target is not None and bool(self._inside(target))

    def settle(self) -> None:
        """Remove what was to go and may go now."""
        for target in list(self._postponed):
            if self._may_go(target):
                self._remove(target, self._postponed.pop(target))

    def _inside(self, target: Path) -> list[Path]:
        return [folder for folder in self._known() if target == folder or target in folder.parents]

    def _may_go(self, target: Path) -> bool:
        """Whether a newer complete checkpoint is there than any in `target`, and none in it is being written."""
        inside = self._inside(target)
        others = [order for folder in self._known() if folder not in inside and (order := _order(folder)) is not None]
        orders = [order for folder in inside if (order := _order(folder)) is not None]
        writing = any(self._known()[folder] for folder in inside)
        return not writing and (not orders or max(others, default=(-1, 0)) > max(orders))

    def _remove(self, target: Path, remove: Callable[[], Any]) -> Any:
        try:
            if target.is_dir():
                (target / MANIFEST_FILE).unlink(missing_ok=True)  # first: a removal that is cut short leaves nothing that counts
            return remove()
        except FileNotFoundError:  # another rank was faster
            return None


def _order(folder: Path) -> tuple[int, int] | None:
    """When a complete checkpoint was asked for, as in its manifest; another program's, that this run was resumed from, is the oldest."""
    try:
        return Manifest.parse((folder / MANIFEST_FILE).read_bytes(), str(folder)).order
    except FileNotFoundError:
        names = os.listdir(folder) if folder.is_dir() else []
        return (0, 0) if names and not any(RANK_NAME.fullmatch(name) for name in names) else None
    except (OSError, CheckpointError):
        return None


def _path(path: Any) -> Path | None:
    return Path(os.fsdecode(path)).absolute() if isinstance(path, str | bytes | os.PathLike) else None
