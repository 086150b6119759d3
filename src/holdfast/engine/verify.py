"""Reads a whole checkpoint back and says what does not hold: which rank's file, which block, which tensors.

Every document by its digest, every block of every file by its hash, every base file that it names by its content; one buffer of
a block for each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from holdfast.core.documents import digest
from holdfast.core.safetensors import Entry, header_length, parse_header
from holdfast.engine.blocks import WORKERS, BlockFile
from holdfast.engine.checkpoint import Checkpoint
from holdfast.errors import CheckpointError, CorruptCheckpoint
from holdfast.storage import Storage


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that does not hold; `tensors` are those that lie in the bad bytes."""

    rank: int | None
    what: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(self.tensors[:5]) + (f" and {len(self.tensors) - 5} more" if len(self.tensors) > 5 else "")
        return (f"rank {self.rank}: " if self.rank is not None else "") + self.what + (f" (in {names})" if names else "")


def bad_blocks(file: BlockFile) -> Iterator[int]:
    """The blocks of a file that are not what was written, in order.

    Raises:
        CorruptCheckpoint: the file ends early.
        OSError: it cannot be read.
    """
    assert file.hashes is not None
    size = file.block_size
    buffer = memoryview(bytearray(min(size, file.size)))
    for start in range(0, file.size, size):
        piece = buffer[: min(size, file.size - start)]
        try:
            file.storage.read_into(file.path, start, piece)
        except EOFError as error:
            raise CorruptCheckpoint(f"{file.path} is cut short: {error}") from error
        for offset in range(0, len(piece), file.block_size):
            index = (start + offset) // file.block_size
            if digest(piece[offset : offset + file.block_size]) != file.hashes[index]:
                yield index


def verify(storage: Storage, folder: str, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
    """Everything that is wrong with a checkpoint; empty when it is whole. Of one that lies in several folders, with what is here.

    `progress(done, total)` is told of files of ranks.

    Raises:
        CheckpointNotFound: there is none.
    """
    try:
        checkpoint = Checkpoint(storage, folder)
        ranks = sorted(checkpoint.here)
        _ = checkpoint.layouts
    except CorruptCheckpoint as error:
        return [Damage(None, str(error.args[0]))]
    found: list[Damage] = []
    with ThreadPoolExecutor(WORKERS, "holdfast-verify") as pool:
        for done, damages in enumerate(pool.map(lambda rank: _verify_rank(checkpoint, rank), ranks), 1):
            found += damages
            if progress is not None:
                progress(done, len(ranks))
    return found + _verify_bases(checkpoint)


def _verify_bases(checkpoint: Checkpoint) -> list[Damage]:
    """Without its base a checkpoint cannot be resumed, so one that is missing counts as damage, too."""
    found = []
    for file in checkpoint.bases:
        try:
            problem = checkpoint.base_files.damaged(file)
        except (CheckpointError, OSError, EOFError) as error:
            problem = str(error.args[0] if isinstance(error, CheckpointError) else error)
        if problem is not None:
            inside = tuple(sorted(n for n, s in checkpoint.tensors.items() if s.base is not None and s.base.file == file))
            found.append(Damage(None, problem, inside))
    return found


def _header(file: BlockFile) -> dict[str, Entry]:
    """The file's header, for telling people what lies where: it may be in a bad block itself, so it is not relied on."""
    first = bytearray(8)
    try:
        file.storage.read_into(file.path, 0, memoryview(first))
        text = bytearray(header_length(bytes(first), file.size, file.path))
        file.storage.read_into(file.path, 0, memoryview(text))
        return parse_header(bytes(text), file.size, file.path)[0]
    except (CheckpointError, OSError, EOFError):
        return {}


def _verify_rank(checkpoint: Checkpoint, rank: int) -> list[Damage]:
    try:
        file = checkpoint.file(rank)
        bad = list(bad_blocks(file))
    except (CheckpointError, OSError) as error:
        return [Damage(rank, str(error.args[0] if isinstance(error, CheckpointError) else error))]
    header = _header(file) if bad else {}
    damages = []
    for index in bad:
        start, stop = index * file.block_size, (index + 1) * file.block_size
        inside = tuple(name for name, e in header.items() if e.start < stop and e.stop > start)
        damages.append(Damage(rank, f"block {index} of {file.path} (bytes from {start:,}) is not what was written", inside))
    return damages
