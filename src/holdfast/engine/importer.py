"""A foreign checkpoint into a native one, offline and by one process; any number of ranks then resumes from it.

What the readers of `formats` give, `engine.foreign` puts into the form of a native checkpoint, `engine.assemble` writes. (A resume
reads the same without writing it: `engine.foreign_checkpoint`.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.engine import rng
from holdfast.engine.assemble import write_checkpoint
from holdfast.engine.foreign import Content, Order, generators_of
from holdfast.engine.names import join, named_state
from holdfast.engine.resume import folder_of
from holdfast.errors import UsageError
from holdfast.formats.read import read_foreign
from holdfast.storage import LocalFolder

log = logging.getLogger("holdfast")

@dataclass(frozen=True)
class Imported:
    """What an import wrote: `left_out` says what was not taken over, and why."""

    path: Path
    kind: str
    step: int
    tensors: int
    nbytes: int
    ranks: int
    left_out: list[str]


def import_checkpoint(
    folder: Path,
    output_dir: Path,
    *,
    step: int | None = None,
    base: Path | None = None,
    order: Order | None = None,
    stateful: dict[str, Any] | None = None,
) -> Imported:
    """Write `output_dir/checkpoint-<step>` from the checkpoint of another program in `folder`.

    Args:
        step: optimizer steps done; by default what the checkpoint says.
        base: the pretrained folder below an adapter.
        order: where the optimizer's file has no names; see above.
        stateful: further state by the key that a Checkpointer keeps it under, as `{"dataloader": {...}}`.

    Raises:
        CheckpointError: the checkpoint cannot be read; the message names the file.
        UsageError: something has to be said that the folder does not tell; the message says how.
    """
    foreign = read_foreign(folder, base)
    foreign.stateful |= stateful or {}
    steps = step if step is not None else foreign.step
    if steps is None:
        raise UsageError(f"{foreign.folder} does not tell how many optimizer steps were done: say it with --step N")
    target = folder_of(steps)
    if (output_dir / target).exists():
        raise UsageError(f"{output_dir / target} is there already: give another output folder")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {output_dir}: {error.strerror or error}") from error
    content = Content()
    models = [_key(i, foreign.models) for i in range(len(foreign.models))]
    content.add_models(foreign, models)
    for i in range(len(foreign.optimizers)):
        # Of which model it holds the parameters: the one of its own number, as FSDP assumes, or the only one.
        prefix = join("model", models[0] if len(models) == 1 else models[i])
        content.add_optimizer(_key(i, foreign.optimizers), foreign, i, prefix, order)
    for key, value in foreign.stateful.items():
        try:
            content.add_value(key, value)
        except UsageError as error:
            foreign.left_out.append(str(error.args[0]))
    generators = [generators_of(state) for state in foreign.rng] or [rng.capture()]
    if not foreign.rng:
        foreign.left_out.append("no generators are in the folder: those of this process were taken")
    small = [{"state": content.small, "rng": g, "step": steps, "rank": r} for r, g in enumerate(generators)]
    nbytes = write_checkpoint(LocalFolder(output_dir), target, steps, content.tensors, content.aliases, small)
    return Imported(
        output_dir / target, foreign.kind, steps, len(content.tensors), nbytes, len(small), list(foreign.left_out)
    )


def order_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Order:
    """The order of a live optimizer over a live model, built as in the run that was saved (its values do not matter)."""
    by_id = {id(p): name.removeprefix("model.") for name, p in named_state({"": model}).parameters.items()}
    groups = [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return lambda foreign: groups


def _key(index: int, values: Sequence[object]) -> str:
    return "" if len(values) == 1 else str(index)
