"""`holdfast run`: its own flags stand before the script, whatever comes after it is the script's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UsageError


@dataclass
class Run:
    """Run an unmodified accelerate script with the engine behind its saving and loading: holdfast run SCRIPT [its arguments].
    On several ranks: holdfast launch --config_file C run SCRIPT ..., or accelerate launch, or torchrun, with -m holdfast run SCRIPT ..."""

    explain: bool = False
    """Only say what would be replaced."""

    cpu_fsdp: bool = False
    """Shard over CPU ranks, on a machine without accelerators. HOLDFAST_CPU_FSDP=1 says the same."""


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The flags before the script, and the script with its arguments: none of ours takes a value."""
    position = next((i for i, a in enumerate(arguments) if not a.startswith("-")), len(arguments))
    return arguments[:position], arguments[position:]


def run_script(options: Run, script: list[str]) -> int:
    if not script:
        raise UsageError("Which script? As in: holdfast run SCRIPT [its arguments]")
    from holdfast.integrations import script as runner

    if options.explain:
        print("\n".join(runner.explain(Path(script[0]))))
        return 0
    return runner.run(Path(script[0]), script[1:], options.cpu_fsdp)
