"""Run sequence numbers: each run on a folder gets a higher one, so that what it saves is newer than all that was there."""

from __future__ import annotations

import contextlib

from holdfast.core.documents import Fields, canonical, parse
from holdfast.engine.resume import survey
from holdfast.engine.store import Run
from holdfast.errors import CorruptCheckpoint
from holdfast.storage import Storage

_FOLDER = ".holdfast"
_FILE = f"{_FOLDER}/run.json"


def next_run_sequence(storage: Storage) -> int:
    """One more than that of any run that began here or left a complete checkpoint."""
    last = max((c.order[0] for c in survey(storage)[0]), default=0)
    # The first run here has no note; one that a crash tore says nothing that the manifests do not.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, CorruptCheckpoint):
        last = max(last, Fields(parse(storage.get(_FILE), _FILE), _FILE).count("run_sequence"))
    return last + 1


def remember_run(storage: Storage, run: Run) -> None:
    """Note that this run has begun, before it saves anything."""
    storage.make_folder(_FOLDER)
    storage.put(_FILE, canonical({"run_sequence": run.run_sequence, "nonce": run.nonce}))
