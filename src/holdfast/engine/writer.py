"""One rank's file and receipt: written in one pass, hashed on the way, durable before anybody hears of it."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from holdfast.core.documents import digest
from holdfast.core.manifest import BLOCK, Receipt, layout_file, rank_file, receipt_file
from holdfast.engine.capture import Staging
from holdfast.engine.plan import SavePlan
from holdfast.engine.windows import Windows
from holdfast.storage import Storage

log = logging.getLogger("holdfast")

PIECE = 16 * BLOCK
"""Bytes of one write: large enough that direct I/O streams, small enough that an error shows soon."""


def write_image(storage: Storage, folder: str, name: str, plan: SavePlan, staging: Staging | Windows) -> tuple[str, ...]:
    """Write the staged image as `folder/name`, durably; returns the hash of each of its blocks.

    Raises:
        OSError: the storage could not take it; what was written is removed.
    """
    size, start = plan.image_size, 0
    hashes: list[str] = []
    file = storage.create(f"{folder}/{name}", size)
    try:
        for piece in staging.pieces(PIECE):
            known = min(len(piece), size - start)
            hashes += [digest(piece[offset : min(offset + BLOCK, known)]) for offset in range(0, known, BLOCK)]
            file.write(piece)
            start += len(piece)
        file.close(size)
    except BaseException:
        file.abort()
        raise
    return tuple(hashes)


TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY}
"""What a network file system or a busy device may say once. A full or read-only disk says the same thing again."""

RETRIES, PAUSE = 2, 0.5
"""How often something is tried again, and the seconds before the first time; each further pause is twice as long."""

T = TypeVar("T")


def persistently(write: Callable[[], T], what: str) -> T:
    """Call `write`, and again after an error that may pass. Whatever it made before has to be made anew by each call."""
    for attempt in range(RETRIES + 1):
        try:
            return write()
        except OSError as error:
            if error.errno not in TRANSIENT or attempt == RETRIES:
                raise
            log.warning("%s: %s; trying again", what, error)
            time.sleep(PAUSE * 2**attempt)
    raise AssertionError("unreachable")


def write_receipt(storage: Storage, folder: str, plan: SavePlan, receipt: Receipt) -> None:
    """Put the layout, if no other rank has, and then the receipt, which vouches for both files."""
    layout = f"{folder}/{layout_file(plan.layout.digest)}"
    if not storage.exists(layout):
        storage.put(layout, plan.layout.encoded)
    storage.put(f"{folder}/{receipt_file(receipt.rank, receipt.attempt)}", receipt.encoded())


def remove_attempt(storage: Storage, folder: str, rank: int, attempt: str) -> None:
    """Take back what a rank wrote in an attempt that failed."""
    storage.remove(f"{folder}/{receipt_file(rank, attempt)}")
    storage.remove(f"{folder}/{rank_file(rank, attempt)}")
