"""Every error that Holdfast raises on purpose, classed by what the person who sees it can do next.

An error tells what happened, on which rank, and what to type next. Its `code` is stable and keyed in
`docs/troubleshooting.md`; its `exit_code` is what the command line ends with.
"""

from __future__ import annotations


class HoldfastError(Exception):
    """The root of the tree: catch this one to catch all of them."""

    code = "HF000"
    exit_code = 1

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.code}]"


class UsageError(HoldfastError, ValueError):
    """What was asked for cannot be done as it stands: correct the call, the flag or the file, and start again."""

    code = "HF100"
    exit_code = 2


class UnsupportedState(UsageError):
    """The state to be saved holds something that a checkpoint cannot carry; the message has its path."""

    code = "HF101"


class CheckpointError(HoldfastError):
    """A checkpoint cannot be used: take another one, or repair this one."""

    code = "HF200"


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was asked for."""

    code = "HF201"
    exit_code = 2


class IncompatibleCheckpoint(CheckpointError):
    """The checkpoint is whole, but of another model, another optimizer or a state that cannot be resharded."""

    code = "HF202"
    exit_code = 2


class CorruptCheckpoint(CheckpointError):
    """Bytes are missing or are not those that were written."""

    code = "HF203"


class NoUsableCheckpoint(CheckpointError):
    """There are checkpoints, and none of them can be used: the job must not start over silently."""

    code = "HF204"
    exit_code = 4


class SaveFailed(HoldfastError):
    """A save did not become a complete checkpoint; the ones before it are untouched and training may go on."""

    code = "HF300"


class DeadlineExceeded(SaveFailed, TimeoutError):
    """Somebody was waited for too long; the message names the ranks, their hosts and what to do."""

    code = "HF301"


class TrainingDiverged(HoldfastError):
    """The loss or the gradients are no finite numbers any more: take the last checkpoint and change something."""

    code = "HF400"
    exit_code = 5


class CacheDamaged(HoldfastError):
    """An encoded image or caption is gone or damaged, though it was there when the training began: start again, and it is made anew."""

    code = "HF500"
