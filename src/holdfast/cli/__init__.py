"""The `holdfast` command: subcommands and their flags, no logic. Help and wrong flags are answered without torch."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import tyro

from holdfast import __version__
from holdfast.cli.convert import Export, Import, run_export, run_import
from holdfast.cli.inspect import Repair, Verify, run_repair, run_verify
from holdfast.cli.run import Run, run_script
from holdfast.cli.run import split as split_run
from holdfast.errors import HoldfastError, UsageError
from holdfast.recipes import RECIPES

Options = TypeVar("Options")

DESCRIPTION = f"""Holdfast {__version__}: fine-tuning under FSDP whose checkpoints hold.

holdfast train RECIPE --help shows a recipe's flags."""


@dataclass
class Launch:
    """Start the ranks that an accelerate config describes, each with the command that follows:
    holdfast launch --config_file C train RECIPE ..."""

    config_file: Path
    """The accelerate config (YAML); it is checked before any rank starts."""

    num_processes: int | None = None
    """Ranks on all machines together. Default: what the config says."""

    nproc_per_node: int | None = None
    """Ranks on each machine, the same in torchrun's words."""


@dataclass
class Demo:
    """Train a tiny Flux on two CPU ranks, kill it, resume it, and compare it with a run that was left alone."""

    output_dir: Path = Path("out/demo")
    """Where everything goes: runs, checkpoints, pipeline, picture, loss curve."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; returns its exit code: 0, an error's own, or 2 for a wrong call."""
    try:
        return _dispatch(sys.argv[1:] if arguments is None else arguments)
    except HoldfastError as error:
        rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        print(f"holdfast: {rank}{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _dispatch(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"holdfast {__version__}")
        return 0
    match arguments[:1]:
        case ["launch"]:
            return _launch(arguments[1:])
        case ["train"] if len(arguments) > 1 and not arguments[1].startswith("-"):
            name, config = _recipe(arguments[1:])
            import_module(RECIPES[name]).main(config)
            return 0
        case ["run"]:
            return _run(arguments[1:])
        case ["demo"]:
            options = _parse(Demo, "holdfast demo", arguments[1:])
            from holdfast.demo import run

            return run(options.output_dir)
        case ["import"]:
            return run_import(_parse(Import, "holdfast import", arguments[1:]))
        case ["export"]:
            return run_export(_parse(Export, "holdfast export", arguments[1:]))
        case ["verify"]:
            return run_verify(_parse(Verify, "holdfast verify", arguments[1:]))
        case ["repair"]:
            return run_repair(_parse(Repair, "holdfast repair", arguments[1:]))
    _parse_commands(arguments)
    return 0


def _parse_commands(arguments: list[str]) -> None:
    """Answers `--help` of the command itself and of `train`, and anything that is no command."""

    def train(recipe: Annotated[str, tyro.conf.Positional]) -> None:
        """Train by a recipe: holdfast train RECIPE ..."""

    train.__doc__ = f"Train by a recipe, one of: {', '.join(RECIPES)}. Its flags: holdfast train RECIPE --help"
    commands: dict[str, Callable[..., Any]] = {"train": train, "run": Run, "launch": Launch, "demo": Demo, "import": Import, "export": Export, "verify": Verify, "repair": Repair}
    tyro.extras.subcommand_cli_from_dict(
        commands, prog="holdfast", description=DESCRIPTION, args=arguments, use_underscores=True
    )


def _recipe(arguments: list[str]) -> tuple[str, Any]:
    """The recipe that is named first, and its config from the flags after it, validated."""
    name = arguments[0]
    if name not in RECIPES:
        raise UsageError(f"There is no recipe {name!r}. Recipes: {', '.join(RECIPES)}")
    module = import_module(RECIPES[name])
    own = getattr(module, "parse", None)  # of a recipe whose flags are another library's
    config = own(arguments[1:]) if own is not None else _parse(module.Config, f"holdfast train {name}", arguments[1:])
    config.validate()
    return name, config


def _parse(options: type[Options], prog: str, arguments: list[str]) -> Options:
    """The flags of one command as its dataclass. Unknown ones are named with the nearest known, whatever else is wrong."""
    known = {flag for field in fields(cast(Any, options)) for flag in (field.name, f"no_{field.name}")}
    unknown = []
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and argument != "--help" and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            unknown.append(f"unknown flag --{name}" + (f"; did you mean --{near[0]}?" if near else "."))
    if unknown:
        listed = "\n".join(f"  - {line}" for line in unknown)
        raise UsageError(f"{prog} was called with flags that it does not have (all of them: {prog} --help):\n{listed}")
    return tyro.cli(options, prog=prog, args=_switches(options, arguments), use_underscores=True)


_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _switches(options: type[Any], arguments: list[str]) -> list[str]:
    """The arguments with `--flag=False` and `--flag False` as `--no_flag`: other tools want a word where here is a switch."""
    switches = {name for name, kind in get_type_hints(options).items() if kind is bool}
    result, position = [], 0
    while position < len(arguments):
        name, equals, word = arguments[position].partition("=")
        flag = name.removeprefix("--").replace("-", "_")
        position += 1
        if not name.startswith("--") or flag not in switches:
            result.append(arguments[position - 1])
            continue
        if not equals and position < len(arguments) and arguments[position].lower() in _WORDS:
            word = arguments[position]
            position += 1
        if word and word.lower() not in _WORDS:
            raise UsageError(f"{arguments[position - 1]}: say --{flag} or --no-{flag.replace('_', '-')}")
        result.append(f"--{flag}" if _WORDS.get(word.lower(), True) else f"--no_{flag}")
    return result


def _run(arguments: list[str]) -> int:
    own, script = split_run(arguments)
    return run_script(_parse(Run, "holdfast run", own), script)


def _launch(arguments: list[str]) -> int:
    own, command = _split(arguments)
    options = _parse(Launch, "holdfast launch", own)
    if not command:
        raise UsageError("What are the ranks to do? As in: holdfast launch --config_file C train RECIPE ..., or run SCRIPT ...")
    from holdfast.integrations import launch

    # The ranks' own flags are looked at here, so that a wrong one is answered once and before they start.
    cpu_fsdp = command[0] == "train" and bool(_recipe(command[1:])[1].cpu_fsdp)
    if command[0] == "run":
        flags, script = split_run(command[1:])
        cpu_fsdp = _parse(Run, "holdfast run", flags).cpu_fsdp
        if not script or not Path(script[0]).is_file():
            raise UsageError(f"There is no script {script[0] if script else ''}: holdfast launch --config_file C run SCRIPT ...")
    plan = launch.plan(options.config_file, options.num_processes, options.nproc_per_node, cpu_fsdp)
    return launch.start(plan, command)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's own options, each with one value, and what begins with the first word that is neither."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        takes_next = arguments[position] not in ("-h", "--help") and "=" not in arguments[position]
        position += 2 if takes_next else 1
    return arguments[:position], arguments[position:]
