"""One job to a folder: a lease whose heartbeat is seen to change, and the run sequence number that comes with it.

Rank 0 of a run writes a note into the folder and counts a beat up in it. Who finds a note watches it: a beat that changes is
a living owner, and the second job is refused; one that stands still for `PATIENCE` is a dead one's, and its folder is taken
over unattended. No clock is compared, and no lock of the file system is needed. On the same machine a dead process is known
at once. An owner that finds the note of a later run in its place stops committing.

Each run gets a higher sequence number than any that began here or left a complete checkpoint, so that what it saves is newer
than all that was there. A number is claimed by making a file of its name, which only one can do; so of several jobs that begin
in the same instant one goes on, and the others find its claim and watch for its note. The last claim stays. A newcomer that
was held up for long and claims a number that is past finds it, and looks anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from holdfast.core.documents import Fields, Json, canonical, parse
from holdfast.core.manifest import MAX_SEQUENCE
from holdfast.engine.retention import Complete
from holdfast.engine.store import Run
from holdfast.errors import CorruptCheckpoint, SaveFailed, UsageError
from holdfast.storage import Storage

log = logging.getLogger("holdfast")

_FOLDER = ".holdfast"
_FILE = f"{_FOLDER}/run.json"
_CLAIM = re.compile(r"claim-(\d{1,18})")

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

    def take(self, complete: Sequence[Complete], folder: str, least: int = 1, nonce: str | None = None) -> Run:
        """Own the folder from now on: waits until nobody else does. The run's sequence number is `least` or higher; `nonce` is that
        of a run that has begun in another folder already.

        Raises:
            UsageError: its owner is alive.
        """
        self._storage.make_folder(_FOLDER)
        while True:
            run = Run.begin(max(self.await_free(complete), least), folder, nonce)
            if self._claim(run):
                break
        self._put_beat()
        self._thread = threading.Thread(target=self._keep, name="holdfast-lease", daemon=True)
        self._thread.start()
        return run

    def advance(self, sequence: int) -> None:
        """Another folder of this run has seen later runs: count on from there."""
        before = self._note["run_sequence"]
        if sequence > before:
            self._note["run_sequence"] = sequence
            self._storage.put(f"{_FOLDER}/claim-{sequence}", canonical(self._note))
            self._put_beat()
            self._storage.remove(f"{_FOLDER}/claim-{before}")

    def await_free(self, complete: Sequence[Complete]) -> int:
        """Until nobody owns the folder or is about to; returns the next sequence number.

        Raises:
            UsageError: its owner is alive.
        """
        note = self._read()
        last = max((c.order[0] for c in complete), default=0)
        if note and not note.get("released") and _alive(note) is not False:
            self._watch(note)
        last = max(last, _sequence(note))
        claimed = max(self._claims(), default=0)
        if claimed > last:  # somebody has begun, and has left no note yet: a moment ago, or before it died
            claim = self._read(f"{_FOLDER}/claim-{claimed}")
            if not claim or _alive(claim) is not False:
                self._watch(note, claim)
        if max(last, claimed) >= MAX_SEQUENCE:
            raise UsageError(f"no number is left for another run in {self._storage.describe()}: give it a folder of its own")
        return max(last, claimed) + 1

    def _claim(self, run: Run) -> bool:
        """Whether this job is the one that goes on with that sequence number."""
        self._note = {
            "run_sequence": run.run_sequence,
            "nonce": run.nonce,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "namespace": _namespace(),
            "beat": 0,
            "released": False,
        }
        path, data = f"{_FOLDER}/claim-{run.run_sequence}", canonical(self._note)
        try:
            file = self._storage.create(path, len(data))
        except FileExistsError:
            return False
        try:
            file.write(memoryview(data))
            file.close(len(data))
        except BaseException:
            file.abort()
            raise
        others = self._claims()
        if max(others, default=0) > run.run_sequence or _sequence(self._read()) >= run.run_sequence:
            self._storage.remove(path)  # held up since it looked: the number is another's past
            return False
        for older in others:
            if older < run.run_sequence:
                self._storage.remove(f"{_FOLDER}/claim-{older}")
        return True

    def _claims(self) -> list[int]:
        numbers = (int(match[1]) for name in self._storage.names(_FOLDER) if (match := _CLAIM.fullmatch(name)))
        return [number for number in numbers if number <= MAX_SEQUENCE]

    def _watch(self, note: dict[str, Json], claim: dict[str, Json] | None = None) -> None:
        """Until it is certain that whoever wrote the note, or made the claim, is dead, or has left."""
        left = note if claim is None else claim
        owner = _name(left)
        if note and _alive(left):
            raise UsageError(f"this process already has a Checkpointer on {self._storage.describe()}: close() it first")
        log.info("%s was left by %s: watching whether it is still alive, up to %.0f s", self._storage.describe(), owner, PATIENCE)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            time.sleep(0.25)
            now = self._read()
            if now and now != note:
                if now.get("released"):
                    return
                raise UsageError(
                    f"another job ({_name(now)}) is saving to {self._storage.describe()}: give this one a folder of its own, or stop "
                    "the other"
                )

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
                self._put_beat()

    def _keep(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                self._look()
                if self.lost:
                    log.error("%s was taken over by %s", self._storage.describe(), self.lost)
                    return
                self._note["beat"] += 1
                self._put_beat()
            except OSError as error:  # a full disk must not cost the lease: the next beat may succeed
                log.warning("the lease of %s could not be renewed: %s", self._storage.describe(), error)

    def _look(self) -> None:
        """Has a later run begun here? A note of an earlier one is a straggler's, who will find this run's claim."""
        own, note = self._note["run_sequence"], self._read()
        if _sequence(note) >= own and note.get("nonce") != self._note["nonce"]:
            self.lost = _name(note)
        elif later := [c for c in self._claims() if c > own]:
            self.lost = _name(self._read(f"{_FOLDER}/claim-{max(later)}"))

    def _read(self, path: str = _FILE) -> dict[str, Any]:
        try:
            note = parse(self._storage.get(path), path)
        except (FileNotFoundError, NotADirectoryError, CorruptCheckpoint):
            return {}  # the first run here, or a note that a crash tore
        return note if isinstance(note, dict) else {}

    def _put_beat(self) -> None:
        self._storage.put(_FILE, canonical(self._note))


def _sequence(note: dict[str, Json]) -> int:
    with contextlib.suppress(CorruptCheckpoint):
        return Fields(note, _FILE).count("run_sequence", MAX_SEQUENCE)
    return 0


def _name(note: dict[str, Json]) -> str:
    return f"process {note.get('pid')} on {note.get('host')}" if note else "a process that has not said its name yet"


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
    except (OSError, OverflowError):
        return None
    return True if pid == os.getpid() else None  # a number that is in use may be another process by now


def _namespace() -> str:
    """Which numbering of processes this one lives in: containers of one host have several."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
