"""Commit: the manifest of one attempt, written last, and then the leftovers of earlier attempts at the same step."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.documents import digest
from holdfast.core.manifest import MANIFEST_FILE, RANK_NAME, Announcement, Manifest, layout_file
from holdfast.storage import Storage


def write_manifest(
    storage: Storage, folder: str, announcements: Sequence[Announcement], run_sequence: int, save_index: int
) -> str:
    """Make `folder` a complete checkpoint of these receipts; returns the manifest's digest.

    Idempotent: the same receipts give the same bytes. A manifest that is there already is replaced in one rename, so that
    the folder is a whole checkpoint, old or new, at every instant.

    Raises:
        ValueError: the receipts speak of different attempts or steps.
    """
    manifest = Manifest.of(announcements, run_sequence, save_index)
    encoded = manifest.encoded()
    storage.put(f"{folder}/{MANIFEST_FILE}", encoded)
    remove_superseded(storage, folder, manifest)
    return digest(encoded)


def remove_superseded(storage: Storage, folder: str, manifest: Manifest) -> None:
    """Remove the files of attempts that the manifest has replaced; not those of a later attempt of the same run."""
    nonce = manifest.attempt.partition("-")[0]
    layouts = {layout_file(d) for d in manifest.layouts}
    later = False
    for name in storage.names(folder):
        match = RANK_NAME.fullmatch(name)
        if match is None:
            continue
        owner, _, index = match[2].partition("-")
        if owner == nonce and int(index) > manifest.save_index:
            later = True
        elif match[2] != manifest.attempt:
            storage.remove(f"{folder}/{name}")
    if later:
        return
    for name in storage.names(folder):
        if name.startswith("layout-") and name not in layouts:
            storage.remove(f"{folder}/{name}")
