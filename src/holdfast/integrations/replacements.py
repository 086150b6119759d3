"""What `holdfast run` puts in the place of other libraries' functions: one table, one way in, one way out.

Each row names a public function, the parameters that the replacement relies on, and the releases with which the tests have run.
A row whose function is not there, or lacks a parameter, is an error before the training begins; a release that was never tried
is said in one line. Rows of a library that the script does not import are left out. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from holdfast.errors import UsageError

logger = logging.getLogger("holdfast")

Function = Callable[..., Any]


@dataclass(frozen=True)
class Replacement:
    """`name` is `module:attribute` or `module:Class.method`; `needs` are parameters that it has to have."""

    name: str
    needs: tuple[str, ...]
    does: str

    @property
    def package(self) -> str:
        return self.name.partition(".")[0].partition(":")[0]


TRIED = {
    "accelerate": ("1.15",),
    "diffusers": ("0.42",),
    "peft": ("0.21",),
    "shutil": (),
    "transformers": ("5.24",),
}
"""Releases that the tests have run with; the standard library has none of its own."""

_WHOLE = "weights of a sharded model come whole from what all ranks hand over, with no collective"

TABLE = (
    Replacement("accelerate:Accelerator.prepare", (), "what is prepared is noted; loaders and sharded models are watched"),
    Replacement("accelerate:Accelerator.save_state", ("output_dir",), "a checkpoint of all ranks, whoever calls; returns when the state is copied"),
    Replacement("accelerate:Accelerator.load_state", ("input_dir",), "each rank reads its own part; other programs' folders are read, too"),
    Replacement("accelerate:Accelerator.get_state_dict", ("model", "unwrap"), _WHOLE),
    Replacement("accelerate:Accelerator.wait_for_everyone", (), "waits for ranks that live, however long, before the barrier"),
    Replacement("accelerate:Accelerator.end_training", (), "hands over shards until all ranks have come here"),
    Replacement("accelerate:Accelerator.skip_first_batches", ("dataloader",), "generators go back to where they stood after the first batch"),
    Replacement("accelerate.optimizer:AcceleratedOptimizer.step", (), "the ranks meet before their first step"),
    Replacement("diffusers:ModelMixin.save_pretrained", ("save_directory",), _WHOLE),
    Replacement("diffusers:DiffusionPipeline.register_modules", (), "a pipeline around a sharded model that one rank alone calls is skipped"),
    Replacement("transformers:PreTrainedModel.save_pretrained", ("save_directory", "state_dict"), _WHOLE),
    Replacement("peft:PeftModel.save_pretrained", ("save_directory",), _WHOLE),
    Replacement("peft:get_peft_model_state_dict", ("model", "state_dict"), _WHOLE),
    Replacement("shutil:rmtree", ("path",), "the last complete checkpoint stays until a newer one is complete"),
)


@dataclass
class Replaced:
    """What is in place now; `undo` takes it out again."""

    done: dict[str, list[tuple[Any, str, Any]]] = field(default_factory=dict)

    def undo(self) -> None:
        for places in self.done.values():
            for owner, attribute, original in places:
                setattr(owner, attribute, original)
        self.done.clear()


def version_of(package: str) -> str | None:
    """The installed release; None where there is none. Of the standard library: Python's."""
    if package in sys.stdlib_module_names:
        return sys.version.split()[0]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def never_tried(package: str) -> str | None:
    """One line where the installed release of `package` is none that the tests have run with."""
    version, tried = version_of(package), TRIED[package]
    if version is None or not tried or version.startswith(tuple(f"{t}." for t in tried)):
        return None
    return f"never tried with {package} {version} (tried: {', '.join(tried)}); if something fails: pip install '{package}~={tried[-1]}.0'"


def explain(table: tuple[Replacement, ...] = TABLE) -> list[str]:
    """What would be replaced, in lines for people."""
    lines = []
    for row in table:
        version = version_of(row.package)
        state = "not installed, nothing to do" if version is None else f"{row.package} {version}"
        lines.append(f"{row.name.replace(':', '.')}  ({state})\n    {row.does}")
    lines += [line for line in map(never_tried, sorted({row.package for row in table})) if line]
    return lines


def install(
    replaced: Replaced, functions: Mapping[str, Function], packages: tuple[str, ...], table: tuple[Replacement, ...] = TABLE
) -> None:
    """Put the functions of the table's rows of `packages` in place: `functions[name](original, *args, **kwargs)` is called.

    What was imported by name elsewhere is replaced there, too. Packages that nobody has imported are left alone; a second call
    does what was not done yet.

    Raises:
        UsageError: a function is not there, or not what it should be: all of them at once.
    """
    problems: list[str] = []
    found: list[tuple[Replacement, Any, str, Any]] = []
    for row in table:
        if row.package not in packages or row.name in replaced.done or row.package not in sys.modules:
            continue
        try:
            owner, attribute = _locate(row.name)
            original = getattr(owner, attribute)
            missing = [p for p in row.needs if p not in inspect.signature(original).parameters]
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            problems.append(f"{row.name.replace(':', '.')} is not there: {error}")
            continue
        if missing:
            problems.append(f"{row.name.replace(':', '.')} has no parameter {', '.join(missing)}")
        found.append((row, owner, attribute, original))
    if problems:
        versions = ", ".join(f"{p} {version_of(p)}" for p in packages if version_of(p) and TRIED[p])
        listed = "\n".join(f"  - {p}" for p in problems)
        raise UsageError(f"this script cannot be run with the engine behind it ({versions}):\n{listed}\n(tried: {TRIED})")
    for row, owner, attribute, original in found:
        function = _around(functions[row.name], original)
        places = [(owner, attribute)] if isinstance(owner, type) else _everywhere(attribute, original)
        replaced.done[row.name] = [(o, a, original) for o, a in places]
        for o, a in places:
            setattr(o, a, function)
    for line in filter(None, map(never_tried, sorted({row.package for row, *_ in found}))):
        logger.warning("holdfast run: %s", line)


def _around(function: Function, original: Function) -> Function:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replacement


def _locate(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(":")
    owner: Any = import_module(module)
    *inner, attribute = path.split(".")
    for part in inner:
        owner = getattr(owner, part)
    return owner, attribute


def _everywhere(attribute: str, original: Any) -> list[tuple[Any, str]]:
    """Every module that has this very function under its name, the script's own included."""
    return [(m, attribute) for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(attribute) is original]
