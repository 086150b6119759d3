"""One rank's file and receipt: written in one pass, hashed on the way, durable before anybody hears of it."""

from __future__ import annotations

from holdfast.core.documents import digest
from holdfast.core.manifest import BLOCK, Receipt, layout_file, rank_file, receipt_file
from holdfast.engine.capture import Staging
from holdfast.engine.plan import SavePlan
from holdfast.storage import Storage

PIECE = 16 * BLOCK
"""Bytes of one write: large enough that direct I/O streams, small enough that an error shows soon."""


def write_image(storage: Storage, folder: str, name: str, plan: SavePlan, staging: Staging) -> tuple[str, ...]:
    """Write the staged image as `folder/name`, durably; returns the hash of each of its blocks.

    Raises:
        OSError: the storage could not take it; what was written is removed.
    """
    image, size = staging.image(), plan.image_size
    hashes: list[str] = []
    file = storage.create(f"{folder}/{name}", size)
    try:
        for start in range(0, len(image), PIECE):
            piece = image[start : start + PIECE]
            for offset in range(start, min(start + PIECE, size), BLOCK):
                hashes.append(digest(image[offset : min(offset + BLOCK, size)]))
            file.write(piece)
        file.close(size)
    except BaseException:
        file.abort()
        raise
    return tuple(hashes)


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
