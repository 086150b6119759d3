"""One job to a folder: a lease whose heartbeat is seen to change, and the run sequence number that comes with it.

Rank 0 of a run writes a note into the folder and counts a beat up in it. Who finds a note watches it: a beat that changes is
a living owner, and the second job is refused; one that stands still for `PATIENCE` is a dead one's, and its folder is taken
over unattended. No clock is compared, and no lock of the file system is needed. On the same machine a dead process is known
at once. An owner that finds another's note in its place stops committing.

Each run gets a higher sequence number than any that began here or left a complete checkpoint, so that what it saves is newer
than all that was there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from holdfast.core.documents import Fields, Json, canonical, parse
from holdfast.engine.retention import Complete
from holdfast.engine.store import Run
from holdfast.errors import CorruptCheckpoint, SaveFailed, UsageError
from holdfast.storage import Storage

log = logging.getLogger("holdfast")

_FOLDER = ".holdfast"
_FILE = f"{_FOLDER}/run.json"

BEAT = 3.0
"""Seconds between two beats."""

PATIENCE = 12.0
"""Seconds without a beat after which an owner is dead: four beats, so that a slow file system does not kill it."""


class Lease:
    """The lease of a folder, held by rank 0 of a run from `take` to `release`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._note: dict[str, Json] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: str = ""
        """Who has taken the folder over, once somebody has."""

    def await_free(self, complete: Sequence[Complete]) -> int:
        """Until nobody else owns the folder; returns the sequence number for the run that takes it.

        Raises:
            UsageError: its owner is alive.
        """
        note = self._read()
        last = max((c.order[0] for c in complete), default=0)
        if not note:
            return last + 1
        if not note.get("released") and _alive(note) is not False:
            self._watch(note)
        with contextlib.suppress(CorruptCheckpoint):
            last = max(last, Fields(note, _FILE).count("run_sequence"))
        return last + 1

    def _watch(self, note: dict[str, Json]) -> None:
        owner = f"process {note.get('pid')} on {note.get('host')}"
        message = (
            f"another job ({owner}) is saving to {self._storage.describe()}: give this one a folder of its own, or stop the other"
        )
        if _alive(note):
            raise UsageError(f"this process already has a Checkpointer on {self._storage.describe()}: close() it first")
        log.info("%s was left by %s: watching whether it is still alive, up to %.0f s", self._storage.describe(), owner, PATIENCE)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            time.sleep(0.25)
            now = self._read()
            if now != note:
                if now.get("released"):
                    return
                raise UsageError(message)

    def take(self, run: Run) -> None:
        """Own the folder from now on."""
        self._storage.make_folder(_FOLDER)
        self._note = {
            "run_sequence": run.run_sequence,
            "nonce": run.nonce,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "namespace": _namespace(),
            "beat": 0,
            "released": False,
        }
        self._write()
        self._thread = threading.Thread(target=self._keep, name="holdfast-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Before a commit.

        Raises:
            SaveFailed: the folder is somebody else's.
        """
        if not self.lost and self._thread is not None:
            self._look()
        if self.lost:
            raise SaveFailed(f"{self._storage.describe()} was taken over by {self.lost}: this job no longer completes checkpoints there")

    def release(self) -> None:
        """Leave the folder to whoever comes next."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(BEAT)
        self._thread = None
        if not self.lost:
            self._note["released"] = True
            with contextlib.suppress(OSError):
                self._write()

    def _keep(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                self._look()
                if self.lost:
                    log.error("%s was taken over by %s", self._storage.describe(), self.lost)
                    return
                self._note["beat"] += 1
                self._write()
            except OSError as error:  # a full disk must not cost the lease: the next beat may succeed
                log.warning("the lease of %s could not be renewed: %s", self._storage.describe(), error)

    def _look(self) -> None:
        note = self._read()
        if note and note.get("nonce") != self._note.get("nonce"):
            self.lost = f"process {note.get('pid')} on {note.get('host')}"

    def _read(self) -> dict[str, Any]:
        try:
            note = parse(self._storage.get(_FILE), _FILE)
        except (FileNotFoundError, NotADirectoryError, CorruptCheckpoint):
            return {}  # the first run here, or a note that a crash tore
        return note if isinstance(note, dict) else {}

    def _write(self) -> None:
        self._storage.put(_FILE, canonical(self._note))


def _alive(note: dict[str, Json]) -> bool | None:
    """Whether the owner lives, as far as this machine can know; None where only its beat can tell."""
    pid = note.get("pid")
    if note.get("host") != socket.gethostname() or note.get("namespace") != _namespace() or not isinstance(pid, int):
        return None
    if os.name == "nt" or not note.get("namespace"):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None
    return True if pid == os.getpid() else None  # a number that is in use may be another process by now


def _namespace() -> str:
    """Which numbering of processes this one lives in: containers of one host have several."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
