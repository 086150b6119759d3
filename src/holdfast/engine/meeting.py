"""How the ranks of a run come together on a folder: rank 0 takes its lease and tidies it, then all shake hands."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.engine.deadlines import Deadlines
from holdfast.engine.lease import Lease
from holdfast.engine.registration import usable_folder
from holdfast.engine.resume import survey, tidy
from holdfast.engine.store import Run, Store, shake_hands, turn_away
from holdfast.storage import Storage


def meet(
    folder: str | os.PathLike[str] | Storage, store: Store, rank: int, world_size: int, deadlines: Deadlines
) -> tuple[Storage, Run, Lease | None]:
    """Resolve the folder and meet the other ranks; rank 0 holds the lease afterwards. An absolute path is each rank's own.

    Raises:
        UsageError: the folder cannot be used, or another job owns it; all ranks are told.
        DeadlineExceeded: not all ranks came.
    """
    own: Storage | None = None
    if not isinstance(folder, str | os.PathLike):
        own = folder
    elif rank == 0 or Path(folder).is_absolute():
        own = usable_folder(Path(folder).absolute())
    run, lease = None, None
    if rank == 0:
        assert own is not None
        lease = Lease(own)
        try:
            run = _take(own, lease)
        except BaseException as error:
            lease.release()
            if world_size > 1:
                turn_away(store, world_size, error)
            raise
    try:
        run = shake_hands(store, rank, world_size, run, deadlines)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    return own if own is not None else usable_folder(Path(run.folder)), run, lease


def _take(storage: Storage, lease: Lease) -> Run:
    """Take the folder over, and tidy it before the others are answered: nobody else can be writing yet."""
    run = lease.take(survey(storage).complete, storage.describe())
    tidy(storage)
    return run
