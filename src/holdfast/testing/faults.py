"""A storage on which something happens at its N-th operation: the rank is killed, the operation fails, stands still, or its file is lost.

A fault is data: which operation (by number, counted over those that change something below a folder, or by the beginning
of what it does, such as `put manifest`), and what happens there.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Literal

from holdfast.storage import FileWriter, LocalFolder

Action = Literal["kill before", "kill after", "fail", "stall", "lose", "cut"]


@dataclass(frozen=True)
class Fault:
    """At one change below `folder` do `action`: `seconds` is how long a stall lasts; "lose" removes the file after the operation, and
    "cut" takes its second half away.

    `operation` is the change's number, from 1, or a verb and the beginning of a file name; the first `times` that fit are struck.
    """

    folder: str
    operation: int | str
    action: Action
    error: int = errno.EIO
    seconds: float = 0.0
    times: int = 1


class FaultyFolder(LocalFolder):
    """A real folder with at most one fault in it. `operations` names the changes made below the fault's folder so far."""

    def __init__(self, root: str | os.PathLike[str], fault: Fault | None = None) -> None:
        super().__init__(root)
        self.fault = fault
        self.operations: list[str] = []
        self._lock = threading.Lock()

    def create(self, path: str, size: int) -> FileWriter:
        with self._at(path, "create"):
            return _FaultyWriter(self, path, super().create(path, size))

    def put(self, path: str, data: bytes) -> None:
        with self._at(path, "put"):
            super().put(path, data)

    def make_folder(self, folder: str) -> None:
        with self._at(folder, "make_folder"):
            super().make_folder(folder)

    def remove(self, path: str) -> None:
        with self._at(path, "remove"):
            super().remove(path)

    def remove_folder(self, folder: str) -> None:
        with self._at(folder, "remove_folder"):
            super().remove_folder(folder)

    def _at(self, path: str, operation: str) -> _Moment:
        return _Moment(self, path, operation)

    def strike(self, path: str, operation: str) -> Fault | None:
        """Count an operation; the fault, if this is the one."""
        if self.fault is None or path.split("/")[0] != self.fault.folder:
            return None
        wanted = self.fault.operation
        with self._lock:
            self.operations.append(f"{operation} {path.split('/')[-1]}")
            if isinstance(wanted, int):
                return self.fault if len(self.operations) == wanted else None
            fits = [o for o in self.operations if o.startswith(wanted)]
            return self.fault if 0 < len(fits) <= self.fault.times and self.operations[-1].startswith(wanted) else None


class _Moment:
    """Around one operation: what happens before it, and what after."""

    def __init__(self, folder: FaultyFolder, path: str, operation: str) -> None:
        self._fault = folder.strike(path, operation)
        self._folder, self._path = folder, path

    def __enter__(self) -> None:
        if self._fault is None:
            return
        if self._fault.action == "kill before":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._fault.action == "fail":
            raise OSError(self._fault.error, os.strerror(self._fault.error), self._path)
        elif self._fault.action == "stall":
            time.sleep(self._fault.seconds)

    def __exit__(self, *_: object) -> None:
        if self._fault is None:
            return
        if self._fault.action == "kill after":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._fault.action == "lose":
            (self._folder.root / self._path).unlink()
        elif self._fault.action == "cut":
            os.truncate(self._folder.root / self._path, self._folder.size(self._path) // 2)


class _FaultyWriter:
    def __init__(self, folder: FaultyFolder, path: str, inner: FileWriter) -> None:
        self._folder, self._path, self._inner = folder, path, inner

    def write(self, data: memoryview) -> None:
        with _Moment(self._folder, self._path, "write"):
            self._inner.write(data)

    def close(self, size: int) -> None:
        with _Moment(self._folder, self._path, "close"):
            self._inner.close(size)

    def abort(self) -> None:
        self._inner.abort()
