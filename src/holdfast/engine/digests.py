"""Content digests of base files: the Hub's own where its cache tells them, else computed once, streamed, and kept.

Large files in the Hub's cache are links to blobs that are called by the SHA-256 of their content. Others are read once, and
the digest is kept in the user's cache folder for as long as path, size and time of change stay the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.storage import LocalFolder, Storage

log = logging.getLogger("holdfast")

PIECE = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def cache_folder() -> Path:
    """`$HOLDFAST_CACHE`, else `holdfast` in the user's cache folder."""
    named = os.environ.get("HOLDFAST_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"


def sha256_of(storage: Storage, path: str) -> str:
    """The SHA-256 of a file's content as 64 hexadecimal digits.

    Raises:
        OSError, EOFError: it cannot be read.
    """
    if not isinstance(storage, LocalFolder):
        return compute_sha256(storage, path)
    file = storage.root / path
    target = file.resolve()
    if file.is_symlink() and target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
        return target.name
    status = target.stat()
    state = {"path": str(target), "size": status.st_size, "changed": status.st_mtime_ns}
    kept = cache_folder() / "digests" / f"{hashlib.sha256(str(target).encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(kept.read_bytes())
        if {key: known[key] for key in state} == state and _SHA256.fullmatch(known["sha256"]):
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = compute_sha256(storage, path)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f".{kept.name}.{uuid.uuid4().hex[:8]}")
        temporary.write_text(json.dumps(state | {"sha256": found}), encoding="utf-8")
        os.replace(temporary, kept)
    except OSError as error:
        log.debug("the digest of %s is not kept: %s", target, error)
    return found


def compute_sha256(storage: Storage, path: str) -> str:
    """Read the file, whatever is known of it."""
    size = storage.size(path)
    buffer = memoryview(bytearray(min(PIECE, size)))
    hasher = hashlib.sha256()
    for start in range(0, size, PIECE):
        piece = buffer[: min(PIECE, size - start)]
        storage.read_into(path, start, piece)
        hasher.update(piece)
    return hasher.hexdigest()


@dataclass
class _Wanted:
    storage: Storage
    path: str
    done: threading.Event = field(default_factory=threading.Event)
    value: str = ""
    error: Exception | None = None


class Digests:
    """Digests that are computed beside the training, each once. A rank begins at another file than its neighbours and finds
    in the cache what they have computed meanwhile."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._wanted: dict[tuple[str, str], _Wanted] = {}

    def want(self, files: Iterable[tuple[Storage, str]]) -> None:
        """Begin with those that were not asked for before."""
        new = []
        for storage, path in files:
            key = storage.describe(), path
            if key not in self._wanted:
                new.append(self._wanted.setdefault(key, _Wanted(storage, path)))
        if new:
            first = self._rank % len(new)
            threading.Thread(target=_compute, args=([*new[first:], *new[:first]],), name="holdfast-digests", daemon=True).start()

    def get(self, storage: Storage, path: str) -> str:
        """Waits until it is known.

        Raises:
            OSError, EOFError: the file could not be read.
        """
        self.want([(storage, path)])
        wanted = self._wanted[storage.describe(), path]
        wanted.done.wait()
        if wanted.error is not None:
            raise wanted.error
        return wanted.value

    def failed(self, storage: Storage, path: str) -> bool:
        """Whether it is known already that there will be none."""
        wanted = self._wanted.get((storage.describe(), path))
        return wanted is not None and wanted.done.is_set() and wanted.error is not None


def _compute(files: list[_Wanted]) -> None:
    for wanted in files:
        try:
            wanted.value = sha256_of(wanted.storage, wanted.path)
        except Exception as error:  # whoever asks for it gets it
            wanted.error = error
        wanted.done.set()
