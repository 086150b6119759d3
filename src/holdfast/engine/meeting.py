"""How the ranks of a run come together on a folder: rank 0 takes its lease, all shake hands, and it is found out who sees whose."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from holdfast.engine.deadlines import Deadlines
from holdfast.engine.folders import Neighbours, leave_token, name_folders, remove_tokens, sees_rank_0
from holdfast.engine.lease import Lease
from holdfast.engine.registration import usable_folder
from holdfast.engine.resume import survey, tidy
from holdfast.engine.store import Below, Run, Store, shake_hands, turn_away
from holdfast.storage import Storage

log = logging.getLogger("holdfast")

Folder = str | os.PathLike[str] | Storage


def meet(folder: Folder, store: Store, rank: int, world_size: int, deadlines: Deadlines) -> tuple[Storage, Run, Lease | None]:
    """Resolve the folder and meet the other ranks. An absolute path is each rank's own, a relative one is rank 0's.

    The lowest rank of each folder (rank 0, where all share one) holds its lease afterwards, and it has been tidied.

    Raises:
        UsageError: the folder cannot be used, or another job owns it; all ranks are told.
        DeadlineExceeded: not all ranks came.
    """
    lease: Lease | None = None
    neighbours: Neighbours | None = None
    try:
        if rank == 0:
            storage, lease, run = _begin(folder, store, world_size)
            neighbours = Neighbours(Below(store, run.nonce), rank, world_size, deadlines.handshake)
            shake_hands(store, rank, world_size, run, deadlines)
            strangers = neighbours.await_strangers()
            if not strangers:
                remove_tokens(storage)
                tidy(storage)
            neighbours.tell("strangers", strangers)
        else:
            run = shake_hands(store, rank, world_size, None, deadlines)
            neighbours = Neighbours(Below(store, run.nonce), rank, world_size, deadlines.handshake)
            storage = _resolve(folder, run.folder)
            neighbours.say_whether(sees_rank_0(storage, run.nonce))
            strangers = neighbours.strangers()
        if strangers:
            homes = neighbours.find_homes(storage, run.nonce, strangers)
            if rank in homes and lease is None:
                lease = Lease(storage)
            run = _settle(neighbours, storage, replace(run, homes=homes), lease)
        return storage, run, lease
    except BaseException as error:
        if neighbours is not None:
            neighbours.fail(error)
        if lease is not None:
            lease.release()
        raise


def _resolve(folder: Folder, rank_0s: str | None = None) -> Storage:
    if not isinstance(folder, str | os.PathLike):
        return folder
    path = Path(folder)
    return usable_folder(path.absolute() if rank_0s is None or path.is_absolute() else Path(rank_0s))


def _begin(folder: Folder, store: Store, world_size: int) -> tuple[Storage, Lease, Run]:
    """Rank 0 takes its folder, and leaves what the others will look for."""
    lease: Lease | None = None
    try:
        storage = _resolve(folder)
        lease = Lease(storage)
        run = lease.take(survey(storage).complete, storage.describe())
        if world_size > 1:
            leave_token(storage, run.nonce, 0)
    except BaseException as error:
        if lease is not None:
            lease.release()
        if world_size > 1:
            turn_away(store, world_size, error)
        raise
    return storage, lease, run


def _settle(neighbours: Neighbours, storage: Storage, run: Run, lease: Lease | None) -> Run:
    """The ranks write to several folders: those that lead take them, and finish together what dead jobs have left there."""
    rank, homes = neighbours.rank, run.homes
    if lease is not None:
        if rank != 0:
            run = replace(lease.take(survey(storage).complete, run.folder, run.run_sequence, run.nonce), homes=homes)
        neighbours.tell("sequence", run.run_sequence)
    run = replace(run, run_sequence=neighbours.highest(homes))
    if lease is not None:
        lease.advance(run.run_sequence)
        neighbours.complete_together(storage, homes)
        tidy(storage, together=True)
        remove_tokens(storage)
    neighbours.all_ready(homes)
    if rank == 0:
        log.warning(
            "the ranks write to %d folders: %s. Each keeps the part of its ranks, and a resume needs the same ranks on the same "
            "machines, or all files copied together. If all should see one folder, look for a disk that is not mounted",
            len(run.leaders), name_folders(neighbours, homes),
        )  # fmt: skip
    return run
