"""`holdfast run`: its own flags stand before the script, whatever comes after it is the script's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.errors import UsageError

_TAKE_A_VALUE = ("--validate", "--resume_from_checkpoint", "--resume-from-checkpoint")


@dataclass
class Run:
    """Run an unmodified accelerate script with the engine behind its saving and loading: holdfast run SCRIPT [its arguments].
    On several ranks: holdfast launch --config_file C run SCRIPT ..., or accelerate launch, or torchrun, with -m holdfast run SCRIPT ..."""

    explain: bool = False
    """Only say what would be replaced."""

    validate: Literal["skip", "all-ranks"] = "skip"
    """What becomes of a forward of a sharded model that one rank makes alone: skipped, or made by all ranks where that is possible."""

    resume_from_checkpoint: str | None = None
    """For scripts whose Trainer is told of no checkpoint: `latest` takes the newest one that is whole, if there is one; or a path."""

    cpu_fsdp: bool = False
    """Shard over CPU ranks, on a machine without accelerators. HOLDFAST_CPU_FSDP=1 says the same."""


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The flags before the script, and the script with its arguments."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        position += 2 if arguments[position] in _TAKE_A_VALUE else 1
    return arguments[:position], arguments[position:]


def run_script(options: Run, script: list[str]) -> int:
    if not script:
        raise UsageError("Which script? As in: holdfast run SCRIPT [its arguments]")
    from holdfast.integrations import script as runner

    if options.explain:
        print("\n".join(runner.explain(Path(script[0]))))
        return 0
    return runner.run(
        Path(script[0]), script[1:], options.cpu_fsdp, options.validate == "all-ranks", options.resume_from_checkpoint
    )
