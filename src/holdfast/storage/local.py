"""A folder of the local (or mounted) file system.

Large files go past the page cache where the file system takes it: a checkpoint is written once and not read back, so
caching it would only push the training's own pages out and cost a copy. Small files are written beside their final name
and renamed. Whatever a platform lacks (direct I/O, a folder's fsync) is left out there.

A checkpoint may be a stranger's: what is read in it are plain files, so that no link leads out of the folder and no pipe keeps the
reader waiting. A folder that is a link is the user's own doing and may be read, but nothing is changed through it: it would be
changed somewhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import stat
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import cast

from holdfast.core.safetensors import ALIGNMENT
from holdfast.errors import CorruptCheckpoint
from holdfast.storage.base import FileWriter

_DIRECT = getattr(os, "O_DIRECT", 0)
_BINARY = getattr(os, "O_BINARY", 0)


_READ = os.O_RDONLY | _BINARY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Opening a pipe must not wait for its writer."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class LocalFolder:
    """A `Storage` below `root`; touches nothing above it.

    With `follow_links` files may be links: for folders of models, which the Hub's cache is made of, and never for checkpoints.
    """

    def __init__(self, root: str | os.PathLike[str], *, follow_links: bool = False) -> None:
        self.root = Path(root).absolute()
        self.follow_links = follow_links
        self._kept = threading.local()

    def describe(self) -> str:
        return str(self.root)

    def create(self, path: str, size: int) -> FileWriter:
        target = self._own(path)
        free = shutil.disk_usage(target.parent).free
        if free < size:
            raise OSError(errno.ENOSPC, f"{size - free:,} bytes are missing for a file of {size:,}", str(target))
        return _Writer(target, size)

    def put(self, path: str, data: bytes) -> None:
        target = self._own(path)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
            try:
                _write_all(descriptor, memoryview(data))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)

    def get(self, path: str) -> bytes:
        with open(self._open(path), "rb") as file:
            return file.read()

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        with contextlib.ExitStack() as stack:
            kept: tuple[str, FileIO] | None = getattr(self._kept, "file", None)
            if kept is not None and kept[0] == path:
                file = kept[1]
            else:
                file = stack.enter_context(self._reader(path))
            file.seek(offset)
            done = 0
            while done < len(target):
                n = file.readinto(target[done:])
                if not n:
                    raise EOFError(f"{path} ends at byte {offset + done}, {len(target) - done} bytes too early")
                done += n

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[None]:
        before = getattr(self._kept, "file", None)
        with self._reader(path) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the kernel reads further ahead
            self._kept.file = path, file
            try:
                yield
            finally:
                self._kept.file = before

    def _reader(self, path: str) -> FileIO:
        return FileIO(self._open(path), "rb")

    def size(self, path: str) -> int:
        return self._plain(path).st_size

    def exists(self, path: str) -> bool:
        try:
            self._plain(path)
        except (FileNotFoundError, NotADirectoryError, CorruptCheckpoint):
            return False
        return True

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self._inside(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_folder(self, folder: str) -> None:
        target = self._own(folder)
        with contextlib.suppress(FileExistsError):
            target.mkdir()
            _sync_folder(target.parent)

    def remove(self, path: str) -> None:
        self._own(path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        # On NFS a file that somebody still reads stays behind under a `.nfs` name for a while: not worth an error.
        shutil.rmtree(self._own(folder), ignore_errors=True)

    def _inside(self, path: str) -> Path:
        """The path below the root, or CorruptCheckpoint: names of files can come out of a stranger's checkpoint."""
        parts = path.split("/") if path else []
        if any(p in ("", ".", "..") or "\\" in p or "\0" in p or ":" in p for p in parts):
            raise CorruptCheckpoint(f"{path!r} leads out of {self.root}")
        return self.root.joinpath(*parts)

    def _own(self, path: str) -> Path:
        """The path below the root, of a file or folder that is to be made or removed."""
        target = self._inside(path)
        for folder in target.parents:
            if folder == self.root:
                return target
            if folder.is_symlink():
                raise OSError(errno.ELOOP, "is a link, through which nothing is changed", str(folder))
        return target

    def _plain(self, path: str, found: os.stat_result | None = None) -> os.stat_result:
        """What a file is, which is a plain one.

        Raises:
            CorruptCheckpoint: it is a link, a pipe, a device or a folder.
        """
        found = found or os.stat(self._inside(path), follow_symlinks=self.follow_links)
        if not stat.S_ISREG(found.st_mode):
            kind = next((name for fits, name in _KINDS if fits(found.st_mode)), "a special file")
            advice = ": copy the checkpoint with its links resolved (cp -rL) and use the copy" if kind == "a link" else ""
            raise CorruptCheckpoint(f"{path} of {self.root} is {kind}, and not a file{advice}")
        return found

    def _open(self, path: str) -> int:
        """A descriptor to read a plain file by; the same errors."""
        try:
            descriptor = os.open(self._inside(path), _READ | (0 if self.follow_links else _NO_LINK))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # a link or a socket, perhaps
                self._plain(path)
            raise
        try:
            self._plain(path, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


_KINDS = ((stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


class _Writer:
    """Direct writes as long as the file system takes them; a file system may refuse at `open` or at the first write."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._offset = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY
        self._direct = bool(_DIRECT)
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if not _DIRECT or error.errno != errno.EINVAL:
                raise
            # Linux makes the file before it refuses the flag.
            self._descriptor = os.open(path, flags & ~os.O_EXCL, 0o666)
            self._direct = False
        try:
            _reserve(self._descriptor, size)
        except BaseException:
            self.abort()
            raise

    def write(self, data: memoryview) -> None:
        if self._direct and (len(data) % ALIGNMENT or self._offset % ALIGNMENT):
            self._buffered()
        try:
            _write_all(self._descriptor, data)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            self._buffered()
            _write_all(self._descriptor, data)
        self._offset += len(data)

    def _buffered(self) -> None:
        os.close(self._descriptor)
        self._descriptor = os.open(self._path, os.O_WRONLY | _BINARY)
        os.lseek(self._descriptor, self._offset, os.SEEK_SET)
        self._direct = False

    def close(self, size: int) -> None:
        if self._offset != size:
            os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        _sync_folder(self._path.parent)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._path.unlink(missing_ok=True)


def _reserve(descriptor: int, size: int) -> None:
    """Have the file system set the file's blocks aside: it lays them side by side, and says at once when they are too many.

    Where it cannot, nothing is done. The C library's `posix_fallocate` would write every block instead.
    """
    call = _fallocate()
    if call is None or size == 0:
        return
    if call(descriptor, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(number, f"{os.strerror(number)}: {size:,} bytes could not be set aside")


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2), on Linux."""
    if sys.platform != "linux":
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    call.restype = ctypes.c_int
    return cast(Callable[[int, int, int, int], int], call)


def _write_all(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        n = os.write(descriptor, data[done:])
        if n == 0:
            raise OSError(errno.EIO, "the file system takes no more bytes")
        done += n


def _sync_folder(folder: Path) -> None:
    """Make a folder's entries durable. Windows cannot open a folder, some network file systems refuse its fsync."""
    if os.name == "nt":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that may be written to and not be read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EACCES, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
