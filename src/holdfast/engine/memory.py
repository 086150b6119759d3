"""Memory: how much of the host's a rank may take for its staging, and where and when not to look for garbage.

Of the host's memory a rank takes what the machine and its control groups leave, shared by the host's ranks.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARE = 0.8
"""Of what is free now: the training itself grows a little, too."""

_UNLIMITED = 1 << 60
"""Control groups of version 1 write a number near 2^63 for no limit."""


def room_for_staging(world_size: int, root: Path = Path("/")) -> int:
    """Bytes that this rank may take: an equal part of the host's free memory; without bound where the platform does not tell.

    Launchers say how many ranks share a host (LOCAL_WORLD_SIZE); without their word all ranks may be on this one.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or world_size
    return int(SHARE * min(_free(root), default=sys.maxsize) / ranks)


def _free(root: Path) -> Iterator[int]:
    """What is free by each account that is kept: the kernel's, and that of every control group that the process is in."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    yield from (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for folder, names in _groups(root):
        try:
            limit, used = ((folder / name).read_text(encoding="ascii").strip() for name in names)
        except OSError:
            continue
        if limit != "max" and int(limit) < _UNLIMITED:
            yield max(0, int(limit) - int(used) + _reclaimable(folder))


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """The folders of the process's memory groups, from its own up to the root's, with the names of their limit and usage."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = Path(path.lstrip("/"))
        for part in (inside, *inside.parents):
            yield base / part, names


def _reclaimable(folder: Path) -> int:
    """Pages of files that the group counts as used and gives back at once."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))


@contextmanager
def without_collecting() -> Iterator[None]:
    """Put the garbage collector off: what is made here is many, lasts, and has no cycles.

    Each full collection walks over every object of the process, a framework's and its models' included, and some thousands of
    new ones call for it again and again.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def imports_set_aside() -> Iterator[None]:
    """Collect garbage of what is made from here on only: a framework is a million objects that last."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
