"""`holdfast run`: a script runs unchanged with the engine behind its Accelerator, and says at its end what was saved."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import HoldfastError, UsageError
from holdfast.integrations import cpu_ranks, replacements

logger = logging.getLogger("holdfast")

_OUTPUT = ("--output_dir", "--output-dir")


def run(script: Path, arguments: list[str], cpu_fsdp: bool = False, validate_on_all_ranks: bool = False, resume: str | None = None) -> int:
    """Run the script as `python SCRIPT ARGUMENTS` would; returns the exit code.

    `resume` is what a Trainer takes that the script tells of no checkpoint: `latest`, or a path.

    Raises:
        UsageError: there is no such script, or what has to be replaced is not there; nothing was run.
        HoldfastError: the script ended well, and its last checkpoint did not become complete.
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}: holdfast run SCRIPT [its arguments]")
    if resume not in (None, "latest") and not Path(resume).is_dir():
        raise UsageError(f"--resume_from_checkpoint {resume}: there is no such folder; `latest` takes the newest one of the output folder")
    _log_lines()
    cpu_ranks.join_without_accelerator()
    if cpu_ranks.requested(cpu_fsdp):
        cpu_ranks.enable()
    from holdfast.integrations import drop_in, trainer

    drop_in.take_all, drop_in.validate_on_all_ranks = True, validate_on_all_ranks
    drop_in.folder = _output_folder(arguments)
    drop_in.install()
    trainer.install()
    trainer.resume_where_not_told = resume
    with _as_main(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                _abandon()
                raise
        except BaseException:
            _abandon()
            raise
    return _finish()


def _output_folder(arguments: list[str]) -> Path | None:
    """Where the script says that it writes to, for accelerators without a project folder."""
    for position, argument in enumerate(arguments):
        name, is_given, value = argument.partition("=")
        if name in _OUTPUT:
            return Path(value if is_given else "".join(arguments[position + 1 : position + 2])).absolute()
    return None


@contextmanager
def _as_main(script: Path, arguments: list[str]) -> Iterator[None]:
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before[0], before[1]


def _abandon() -> None:
    from holdfast.integrations import drop_in, trainer

    trainer.abandon()
    for attached in drop_in.everybody:
        attached.abandon()


def _finish() -> int:
    """Close what the script did not, and report."""
    from holdfast.integrations import drop_in, trainer

    if trainer.resume_where_not_told is not None and not trainer.asked:
        logger.warning("holdfast run: --resume_from_checkpoint had no effect: it is for a Trainer that is told of no checkpoint; use the script's own flag")
    lines = trainer.finish()
    for attached in drop_in.everybody:
        attached.close()
        lines += attached.report()
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            logger.warning("holdfast run: %s", line)
    failed = next((f for f in (*trainer.failures, *(a.failed for a in drop_in.everybody)) if f is not None), None)
    if failed is not None:
        raise HoldfastError(f"the script has ended, and a save of it failed: {failed.args[0]}") from failed
    return 0


def _log_lines() -> None:
    """The engine's lines on standard error, whatever the script does with its logging."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("HOLDFAST_LOG", "INFO").upper())
        logger.propagate = False


def explain(script: Path) -> list[str]:
    """What `run` would replace for this script, in lines for people; runs nothing of it.

    Raises:
        UsageError: there is no such script.
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}: holdfast run --explain SCRIPT")
    from holdfast.integrations import trainer

    return [f"{script}: these would be replaced if the script imports their library", *replacements.explain(), *trainer.explain()]
