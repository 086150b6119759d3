"""Finishing a dead job's work: an attempt whose receipts are all there becomes a checkpoint, the rest is left or removed.

Completing needs no live job and is idempotent: the manifest is a function of the receipts. It is done by the next resume, or
by `holdfast repair`. Where ranks wrote to several folders, one of these alone cannot tell whether all had: then the leaders of the
next run's folders do it together (`engine.folders`).
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.manifest import (
    MANIFEST_FILE,
    RANK_NAME,
    REMOVED,
    Announcement,
    Manifest,
    Receipt,
    layout_file,
    rank_file,
    removed_file,
)
from holdfast.engine.commit import write_manifest
from holdfast.engine.retention import remove_all
from holdfast.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint
from holdfast.storage import Storage

_OTHERS = (1 << 62, 0)
"""Above all orders: what another version has written is not ours to judge, and stays."""


def attempts(storage: Storage, folder: str, but: str | None = None) -> dict[str, list[Receipt]]:
    """The receipts in a folder by attempt, those that can be read, in rank order; none of attempts that were to be removed.

    `but` is an attempt whose receipts are of no interest: they are as many as ranks, in every complete checkpoint.
    """
    found: dict[str, dict[int, Receipt]] = {}
    names = set(storage.names(folder))
    for name in names:
        match = RANK_NAME.fullmatch(name)
        if match is None or match[3] != "json" or match[2] == but or removed_file(match[2]) in names:
            continue
        try:
            receipt = Receipt.parse(storage.get(f"{folder}/{name}"), f"{storage.describe()}/{folder}/{name}")
        except (CheckpointError, OSError):
            continue
        if (receipt.attempt, receipt.rank) == (match[2], int(match[1])):
            found.setdefault(receipt.attempt, {})[receipt.rank] = receipt
    return {attempt: [by_rank[r] for r in sorted(by_rank)] for attempt, by_rank in found.items()}


def finish(storage: Storage, folder: str) -> Manifest | None:
    """Complete the newest attempt in `folder` that only lacks its manifest; None where there is nothing to complete.

    A manifest that is there stays, unless the attempt is newer than the one that it names.
    """
    complete, attempt = _named(storage, folder)
    others = attempts(storage, folder, but=attempt)
    candidates = [receipts for receipts in others.values() if _whole(storage, folder, receipts)]
    if not candidates:
        return None
    newest = max(candidates, key=lambda receipts: (receipts[0].run_sequence, receipts[0].save_index))
    first = newest[0]
    if (first.run_sequence, first.save_index) <= complete:
        return None
    return write_manifest(storage, folder, [Announcement.of(r) for r in newest], first.run_sequence, first.save_index)


def _named(storage: Storage, folder: str) -> tuple[tuple[int, int], str | None]:
    """Order and attempt that the manifest there names; below all orders where there is no good one."""
    try:
        manifest = Manifest.parse(storage.get(f"{folder}/{MANIFEST_FILE}"), folder)
    except (FileNotFoundError, NotADirectoryError, CorruptCheckpoint):
        return (0, 0), None
    except IncompatibleCheckpoint:
        return _OTHERS, None
    return manifest.order, manifest.attempt


def _whole(storage: Storage, folder: str, receipts: list[Receipt]) -> bool:
    """Whether every rank vouches for a file that is there, in the size that it had, and they agree."""
    first = receipts[0]
    return [r.rank for r in receipts] == list(range(first.world_size)) and _durable(storage, folder, receipts)


def _durable(storage: Storage, folder: str, receipts: list[Receipt]) -> bool:
    """Whether the receipts agree, and the file of each is there in the size that it had."""
    first = receipts[0]
    for receipt in receipts:
        same = (receipt.step, receipt.run_sequence, receipt.save_index, receipt.world_size)
        if same != (first.step, first.run_sequence, first.save_index, first.world_size):
            return False
        try:
            if storage.size(f"{folder}/{rank_file(receipt.rank, receipt.attempt)}") != receipt.size:
                return False
        except (OSError, CorruptCheckpoint):
            return False
        if not storage.exists(f"{folder}/{layout_file(receipt.layout)}"):
            return False
    return True


def durable_attempts(storage: Storage, folder: str, but: str | None = None) -> dict[str, list[Receipt]]:
    """Of ranks that wrote to several folders: the attempts whose part in this one is good, not older than its manifest."""
    complete, _ = _named(storage, folder)
    return {
        attempt: receipts
        for attempt, receipts in attempts(storage, folder, but).items()
        if all(r.home is not None and (r.run_sequence, r.save_index) >= complete for r in receipts) and _durable(storage, folder, receipts)
    }


def complete_with(
    storage: Storage, folder: str, announcements: Sequence[Announcement], run_sequence: int, save_index: int
) -> Manifest | None:
    """Put the manifest of an attempt that is whole over several folders; None where there is one already, or no part of it here.

    Raises:
        CorruptCheckpoint, ValueError: it cannot be completed.
    """
    complete, _ = _named(storage, folder)
    here = [receipt.rank for receipt in durable_attempts(storage, folder).get(announcements[0].attempt, [])]
    if complete >= (run_sequence, save_index) or not here:
        return None
    return write_manifest(storage, folder, announcements, run_sequence, save_index, here)


def is_part(storage: Storage, folder: str) -> bool:
    """Whether a rank has left its part of a save into several folders here, which no manifest names: others may have theirs."""
    return bool(durable_attempts(storage, folder, but=_named(storage, folder)[1]))


def remove_leftovers(storage: Storage, folder: str) -> list[str]:
    """Remove what no manifest names from `folder`, and the folder with it where nothing is left; returns the names.

    Only for whoever knows that nobody can still be writing there: the owner of the folder's lease, before its first save.
    """
    try:
        manifest: Manifest | None = Manifest.parse(storage.get(f"{folder}/{MANIFEST_FILE}"), folder)
    except FileNotFoundError:
        manifest = None
    except (OSError, CheckpointError):
        return []  # a damaged manifest is evidence; what it named may still be wanted
    names = storage.names(folder)
    if manifest is None and any(name.startswith(REMOVED) for name in names):
        return remove_all(storage, folder)  # what a removal was about that was killed
    layouts = {layout_file(d) for d in manifest.layouts} if manifest is not None else set()
    removed = []
    for name in names:
        match = RANK_NAME.fullmatch(name)
        ours = match is not None or name.startswith(("layout-", REMOVED)) or (name.startswith(".") and name.endswith(".tmp"))
        wanted = (match is not None and manifest is not None and match[2] == manifest.attempt) or name in layouts
        if ours and not wanted:
            storage.remove(f"{folder}/{name}")
            removed.append(name)
    if manifest is None and not storage.names(folder):
        storage.remove_folder(folder)
    return removed
