"""Which checkpoints may go: a pure function, and the removal that can be killed half-way."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.core.manifest import MANIFEST_FILE, RANK_NAME, REMOVED, Manifest, layout_file, removed_file
from holdfast.errors import CheckpointError, UsageError
from holdfast.storage import Storage

log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Complete:
    """A complete checkpoint: its folder, its (run sequence, save index), its step and the metric that it was saved with."""

    folder: str
    order: tuple[int, int]
    step: int
    metric: float | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep beside the newest; with nothing set, everything.

    Args:
        keep_last: this many of the newest.
        keep_every: every checkpoint whose step is a multiple of this.
        keep_best: this many of the best by `save(step, metric=...)`; NaN and no metric are never among them.
        best: whether the best metric is the smallest ("min") or the greatest ("max").
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} is {value!r}, should be a whole number from 1, or None")
        if self.best not in ("min", "max"):
            raise UsageError(f"best is {self.best!r}, should be 'min' or 'max'")

    def superfluous(self, complete: Sequence[Complete], verified: set[str]) -> list[Complete]:
        """The checkpoints to remove, oldest first.

        Never among them: the newest, and the newest of those that were read back and found whole. Folders of one order are one
        checkpoint, a link and where it leads to, say: all of them stay, or none does.
        """
        if self.keep_last is None and self.keep_every is None and self.keep_best is None:
            return []
        newest_first = sorted(complete, key=lambda c: c.order, reverse=True)
        keep = set(list(dict.fromkeys(c.order for c in newest_first))[: self.keep_last or 1])
        keep.update([c.order for c in newest_first if c.folder in verified][:1])
        if self.keep_every is not None:
            keep.update(c.order for c in newest_first if c.step % self.keep_every == 0)
        if self.keep_best is not None:
            rated = {c.order: c.metric for c in newest_first if c.metric is not None and not math.isnan(c.metric)}
            sign = 1 if self.best == "min" else -1
            keep.update(sorted(rated, key=lambda order: sign * rated[order])[: self.keep_best])
        return [c for c in reversed(newest_first) if c.order not in keep]

    def apply(self, storage: Storage, complete: Sequence[Complete], verified: set[str], nonce: str) -> None:
        """Remove what is superfluous, but for what the run `nonce` may be writing again. One that cannot be removed, since
        its folder is a link, say, keeps none of the others."""
        for old in self.superfluous(complete, verified):
            try:
                remove_checkpoint(storage, old.folder, nonce)
            except (CheckpointError, OSError) as error:
                log.warning("the old checkpoint %s stays: %s", old.folder, error)


def remove_checkpoint(storage: Storage, folder: str, nonce: str) -> None:
    """Remove what a folder holds, but for what the run `nonce` may be writing into it again.

    Without its manifest it no longer counts, so that removing the rest may stop at any file. A mark, which goes last, tells who finds
    the rest that it is to go, and not to be completed.
    """
    manifest = Manifest.parse(storage.get(f"{folder}/{MANIFEST_FILE}"), f"{storage.describe()}/{folder}/{MANIFEST_FILE}")
    mark = f"{folder}/{removed_file(manifest.attempt)}"
    with contextlib.suppress(OSError):  # a full disk may be what this is about: then without it
        storage.put(mark, b"")
    storage.remove(f"{folder}/{MANIFEST_FILE}")
    if not remove_attempts(storage, folder, nonce, manifest.save_index if manifest.attempt.startswith(f"{nonce}-") else 0):
        storage.remove(mark)
    else:
        remove_all(storage, folder)
        log.info("removed the old checkpoint %s of %s", folder, storage.describe())


def remove_all(storage: Storage, folder: str) -> list[str]:
    """Remove a folder with all that is in it, whoever put it there, marks of removal last; returns the names."""
    names = sorted(storage.names(folder), key=lambda name: name.startswith(REMOVED))
    for name in names:
        try:
            storage.remove(f"{folder}/{name}")
        except OSError:  # a folder
            storage.remove_folder(f"{folder}/{name}")
    storage.remove_folder(folder)
    return names


def remove_attempts(storage: Storage, folder: str, nonce: str, up_to: int, keep: Manifest | None = None) -> bool:
    """Remove the files of attempts in `folder` that are neither `keep`'s nor later ones of the run `nonce`.

    Returns whether no later attempt was seen: layouts are shared, so they stay as long as somebody may need them.
    """
    wanted = {layout_file(d) for d in keep.layouts} if keep is not None else set()
    later = False
    names = storage.names(folder)
    for name in names:
        match = RANK_NAME.fullmatch(name)
        if match is None:
            continue
        owner, _, index = match[2].partition("-")
        if owner == nonce and int(index) > up_to:
            later = True
        elif keep is None or match[2] != keep.attempt:
            storage.remove(f"{folder}/{name}")
    if not later:
        for name in names:
            if name.startswith("layout-") and name not in wanted:
                storage.remove(f"{folder}/{name}")
    return not later
