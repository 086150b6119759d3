"""Which checkpoints may go: a pure function, and the removal that can be killed half-way."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.manifest import MANIFEST_FILE
from holdfast.storage import Storage

log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Complete:
    """A complete checkpoint: its folder, its (run sequence, save index) and its step."""

    folder: str
    order: tuple[int, int]
    step: int


def superfluous(complete: Sequence[Complete], keep_last: int | None, verified: set[str]) -> list[Complete]:
    """The checkpoints to remove, oldest first.

    Kept are the `keep_last` newest (all when None), and the newest of those that were read back and found whole.
    """
    if keep_last is None:
        return []
    newest_first = sorted(complete, key=lambda c: c.order, reverse=True)
    keep = {c.folder for c in newest_first[: max(1, keep_last)]}
    keep.update([c.folder for c in newest_first if c.folder in verified][:1])
    return [c for c in reversed(newest_first) if c.folder not in keep]


def remove_checkpoint(storage: Storage, folder: str) -> None:
    """Without its manifest it no longer counts, so that removing the rest may stop at any file."""
    storage.remove(f"{folder}/{MANIFEST_FILE}")
    storage.remove_folder(folder)
    log.info("removed the old checkpoint %s of %s", folder, storage.describe())
