"""Commit: what the receipts vouch for is looked at once more, and the manifest is written, last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.core.documents import digest
from holdfast.core.flat import Flat
from holdfast.core.layout import Layout
from holdfast.core.manifest import MANIFEST_FILE, Announcement, Manifest, layout_file, rank_file, receipt_file
from holdfast.engine.store import name_ranks
from holdfast.errors import CorruptCheckpoint, UnsupportedState
from holdfast.storage import Storage


def write_manifest(
    storage: Storage,
    folder: str,
    announcements: Sequence[Announcement],
    run_sequence: int,
    save_index: int,
    here: Sequence[int] | None = None,
) -> Manifest:
    """Make `folder` a complete checkpoint of these receipts; with `here`, of which these ranks wrote into it.

    Idempotent: the same receipts give the same bytes. A manifest that is there already is replaced in one rename, so that
    the folder is a whole checkpoint, old or new, at every instant.

    Raises:
        ValueError: the receipts speak of different attempts or steps.
        CorruptCheckpoint: a file that a receipt vouches for is not to be seen.
        UnsupportedState: ranks describe the same tensor differently.
    """
    manifest = Manifest.of(announcements, run_sequence, save_index)
    check(storage, folder, manifest, announcements if here is None else [announcements[rank] for rank in here])
    put(storage, folder, manifest)
    return manifest


def put(storage: Storage, folder: str, manifest: Manifest) -> None:
    storage.put(f"{folder}/{MANIFEST_FILE}", manifest.encoded())


def check(storage: Storage, folder: str, manifest: Manifest, announcements: Sequence[Announcement]) -> None:
    """Whether a manifest may be put into `folder`, into which the ranks of these announcements wrote. (Where there are several, what
    ranks of different folders have in common is compared by nobody: neither has the other's layout.)"""
    layouts = {a.layout for a in announcements}
    _check_files(storage, folder, manifest, [a.rank for a in announcements], layouts)
    if len(layouts) > 1:
        _check_layouts(storage, folder, announcements)


def manifest_digest(manifest: Manifest) -> str:
    return digest(manifest.encoded())


def _check_files(storage: Storage, folder: str, manifest: Manifest, ranks: Sequence[int], layouts: set[str]) -> None:
    """One listing: a file that was removed must not be named."""
    names = set(storage.names(folder))
    absent = [
        rank
        for rank in ranks
        if not {rank_file(rank, manifest.attempt), receipt_file(rank, manifest.attempt)} <= names
    ]
    if absent:
        raise CorruptCheckpoint(
            f"{storage.describe()}/{folder} lacks the files of {name_ranks(absent)} although they were written: "
            "somebody has removed them"
        )
    for layout in layouts:
        if layout_file(layout) not in names:
            raise CorruptCheckpoint(f"{storage.describe()}/{folder} lacks {layout_file(layout)} although it was written")


def _check_layouts(storage: Storage, folder: str, announcements: Sequence[Announcement]) -> None:
    """All ranks that hold a placed tensor must describe it alike, else nobody could tell whose bytes are whose.

    A rank without any state in a flat unit does not know of the others' (and a load finds out if a piece should be missing).
    """
    by_rank = {a.rank: a.layout for a in announcements}
    layouts = {d: Layout.parse(storage.get(f"{folder}/{layout_file(d)}"), layout_file(d)) for d in set(by_rank.values())}
    meshes = {spec.placement.mesh for layout in layouts.values() for spec in layout.tensors.values() if spec.placement is not None}
    # One rank speaks for all that have its layout: there are a few layouts, and thousands of ranks.
    speakers = {mesh: {by_rank[rank]: rank for rank in reversed(mesh.ranks) if rank in by_rank} for mesh in meshes}
    placed = [
        (name, spec, layouts[theirs].tensors.get(name), rank)
        for layout in layouts.values()
        for name, spec in layout.tensors.items()
        if spec.placement is not None
        for theirs, rank in speakers[spec.placement.mesh].items()
    ]
    for name, spec, theirs, rank in placed:
        if theirs is None and not isinstance(spec.placement, Flat):
            raise UnsupportedState(
                f"{name} would be written once for all ranks that hold it, and rank {rank} has none: state that only some ranks have "
                "cannot be saved under DDP"
            )
    for name, spec, theirs, rank in placed:
        # A rank that could not read its base any more has none to name, and has written its part.
        if theirs is not None and replace(theirs, base=None) != replace(spec, base=None):
            raise UnsupportedState(
                f"{name} is laid out differently on rank {rank} than on others of its mesh: a tensor of one name has to be one tensor "
                "of the whole job"
            )
