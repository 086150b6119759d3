"""What the engine asks of a storage. Paths are relative to its root, with `/` between parts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class FileWriter(Protocol):
    """A new file that is written from front to back."""

    def write(self, data: memoryview) -> None:
        """Append `data`; all of it, or an OSError."""
        ...

    def close(self, size: int) -> None:
        """Cut the file to `size` bytes, make it durable and close it."""
        ...

    def abort(self) -> None:
        """Close and remove what was written; never raises for a file that is already gone."""
        ...


class Storage(Protocol):
    """A tree of files. Every method raises OSError where the file system does."""

    def describe(self) -> str:
        """Where it is, for messages."""
        ...

    def create(self, path: str, size: int) -> FileWriter:
        """Start a file that will take `size` bytes; ENOSPC at once when there is no room for it."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a small file so that readers see all of it or nothing, durably."""
        ...

    def get(self, path: str) -> bytes:
        """All bytes of a small file."""
        ...

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on; EOFError when the file ends before."""
        ...

    def opened(self, path: str) -> AbstractContextManager[None]:
        """Keep a file open for what this thread reads of it inside, about from front to back."""
        ...

    def size(self, path: str) -> int: ...

    def exists(self, path: str) -> bool: ...

    def names(self, folder: str) -> list[str]:
        """Names of the files and folders in `folder`, unordered; empty where there is no such folder."""
        ...

    def make_folder(self, folder: str) -> None:
        """Make `folder` (its parent is there) durably; not an error when it is there."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; not an error when it is gone."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it; not an error when it is gone."""
        ...
