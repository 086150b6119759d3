"""A checkpoint of another program by its folder: recognised, then read by the reader of its kind."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import CheckpointNotFound, UsageError
from holdfast.formats.accelerate import read_accelerate
from holdfast.formats.dcp_state import read_dcp
from holdfast.formats.foreign import Foreign
from holdfast.formats.recognise import ACCELERATE, DCP, NATIVE, TRAINER, WEIGHTS, recognise
from holdfast.formats.weights import weights_of_folder
from holdfast.storage import LocalFolder


def read_foreign(folder: Path, base: Path | None = None, alone: bool = False) -> Foreign:
    """Everything that is read of the checkpoint in `folder`; `base` is the pretrained model below an adapter, unless it is wanted
    `alone`.

    Raises:
        CheckpointNotFound: there is none, or none of a kind that is known.
        UsageError: it is a Holdfast checkpoint already, or an adapter without `base`.
        CorruptCheckpoint, IncompatibleCheckpoint: its model or optimizer cannot be read; the message names the file.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        raise CheckpointNotFound(f"there is no folder {folder}")
    kind = recognise(LocalFolder(folder.parent), folder.name)
    if kind == NATIVE:
        raise UsageError(f"{folder} is a Holdfast checkpoint already: resume from it as it is")
    if kind in (ACCELERATE, TRAINER):
        return read_accelerate(folder, kind, base, alone)
    if kind == DCP:
        return read_dcp(folder)
    if kind == WEIGHTS:
        return Foreign(WEIGHTS, folder, [weights_of_folder(folder)], step=0, left_out=["weights only: the run begins at step 0"])
    inside = sorted(path.name for path in folder.iterdir())
    nested = [name for name in inside if (folder / name).is_dir() and recognise(LocalFolder(folder), name) is not None]
    if nested:
        raise CheckpointNotFound(f"{folder} holds checkpoints and is none itself: give one of {', '.join(nested[:5])}")
    raise CheckpointNotFound(f"{folder} is no checkpoint of a known kind; it holds {', '.join(inside[:5]) or 'nothing'}")
