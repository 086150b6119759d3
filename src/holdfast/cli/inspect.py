"""The flags of `holdfast verify` and `holdfast repair`, and what becomes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from holdfast.errors import CheckpointNotFound


@dataclass
class Verify:
    """Read checkpoints back, check every byte against its hash, and name what does not hold. Exit code 1 if something does not,
    2 if nothing is damaged, but a checkpoint is of a version that this Holdfast does not read."""

    folder: Annotated[Path, tyro.conf.Positional]
    """A checkpoint, or an output folder: then all of its complete checkpoints."""


@dataclass
class Repair:
    """Complete checkpoints of a dead job that only lack their manifest, and remove what its interrupted saves left."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The output folder; no job may be saving to it."""


def run_verify(options: Verify) -> int:
    from holdfast.engine.checkpoint import Checkpoint
    from holdfast.engine.resume import survey
    from holdfast.engine.verify import verify
    from holdfast.errors import IncompatibleCheckpoint
    from holdfast.storage import LocalFolder

    if (options.folder / "manifest.json").is_file():
        storage, names = LocalFolder(options.folder.absolute().parent), [options.folder.absolute().name]
    else:
        storage = LocalFolder(options.folder)
        names = [c.folder for c in survey(storage).complete]
        names += [n for n in sorted(storage.names("")) if n not in names and storage.exists(f"{n}/manifest.json")]
        if not names:
            raise CheckpointNotFound(f"there is no complete checkpoint in {options.folder}")
    bad = unknown = 0
    for name in names:
        try:
            damages = verify(storage, name, _progress(name))
        except IncompatibleCheckpoint as error:
            print(f"UNKNOWN {name}\n        {error.args[0]}")
            unknown += 1
            continue
        part = "" if damages else Checkpoint(storage, name).part
        print(f"{'DAMAGED' if damages else 'whole  '} {name}" + f": what {part} wrote; the others wrote into other folders" * bool(part))
        for damage in damages:
            print(f"        {damage}")
        bad += bool(damages)
    return 1 if bad else 2 if unknown else 0


def _progress(name: str) -> Callable[[int, int], None] | None:
    """A line that counts the ranks' files, where somebody looks at it."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        print(f"\r{name}: {done} of {total} files", end="\n" if done == total else "", file=sys.stderr)

    return show


def run_repair(options: Repair) -> int:
    from holdfast.engine.lease import Lease
    from holdfast.engine.resume import survey, tidy
    from holdfast.storage import LocalFolder

    if not options.folder.is_dir():
        raise CheckpointNotFound(f"there is no folder {options.folder}")
    storage = LocalFolder(options.folder)
    lease = Lease(storage)
    lease.take(survey(storage).complete, storage.describe())
    try:
        done = tidy(storage)
    finally:
        lease.release()
    print("\n".join(done) if done else f"{options.folder}: nothing to repair")
    return 0
