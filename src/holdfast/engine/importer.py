"""A foreign checkpoint into a native one, offline and by one process; any number of ranks then resumes from it.

An optimizer's state that the file keeps by position needs the parameters' names in the optimizer's order. They come from
the caller (`order`), from a live `model` and `optimizer`, or, for one group over all of a model whose order the file kept,
from there; every piece of state is then held against its parameter's shape, so that a wrong order is refused.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.core.documents import Json
from holdfast.core.layout import OptimizerSlot
from holdfast.engine import rng, statetree
from holdfast.engine.assemble import Part, write_checkpoint
from holdfast.engine.names import join, named_state
from holdfast.engine.resume import folder_of
from holdfast.errors import IncompatibleCheckpoint, UsageError
from holdfast.formats.foreign import Foreign, ForeignModel, ForeignOptimizer, Source
from holdfast.formats.read import read_foreign
from holdfast.storage import LocalFolder

log = logging.getLogger("holdfast")

Order = Callable[[Foreign], list[list[str]] | None]
"""Gives the parameter names of each of the optimizer's groups, in their order; None where it cannot tell."""


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
    content = _Content()
    for i, model in enumerate(foreign.models):
        content.add_model(join("model", _key(i, foreign.models)), model)
    for i, optimizer in enumerate(foreign.optimizers):
        _name_parameters(foreign, i, order)
        content.add_optimizer(_key(i, foreign.optimizers), optimizer, _model_key(foreign, i))
    for key, value in foreign.stateful.items():
        try:
            content.add_value(key, value)
        except UsageError as error:
            foreign.left_out.append(str(error.args[0]))
    generators = [_generators(state) for state in foreign.rng] or [rng.capture()]
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


def _model_key(foreign: Foreign, index: int) -> str:
    """Of which model an optimizer holds the parameters: the one of its own number, as FSDP assumes, or the only one."""
    if len(foreign.models) == 1:
        return "model"
    return join("model", _key(index, foreign.models))


class _Content:
    """What is written: tensors by name, aliases, and the small state."""

    def __init__(self) -> None:
        self.tensors: dict[str, Part] = {}
        self.aliases: dict[str, str] = {}
        self.small: dict[str, Json] = {}

    def add_model(self, prefix: str, model: ForeignModel) -> None:
        for name, source in model.tensors.items():
            self.tensors[join(prefix, name)] = Part(source)
        for alias, name in model.aliases.items():
            self.aliases[join(prefix, alias)] = join(prefix, name)

    def add_optimizer(self, key: str, optimizer: ForeignOptimizer, model: str) -> None:
        values: dict[str, Json] = {}
        for param, state in optimizer.state.items():
            name = self._stored(join(model, str(param)))
            rest = {}
            for state_key, value in state.items():
                if isinstance(value, Source):
                    slot = OptimizerSlot(key, name, state_key)
                    self.tensors[join("optimizer", key, name, state_key)] = Part(value, slot)
                else:
                    rest[state_key] = value
            if rest:
                values[name] = self._encode(rest, join("optimizer", key, name))
        groups = []
        for i, (params, group) in enumerate(optimizer.groups):
            encoded = self._encode(group, f"{join('optimizer', key)}.param_groups[{i}]")
            groups.append({"params": [self._stored(join(model, str(p))) for p in params], "values": encoded})
        self.small[join("optimizer", key)] = {"groups": groups, "values": values}

    def add_value(self, key: str, value: object) -> None:
        self.small[key] = self._encode(value, key)

    def _stored(self, name: str) -> str:
        name = self.aliases.get(name, name)
        if name not in self.tensors:
            raise IncompatibleCheckpoint(f"the optimizer speaks of a parameter {name.partition('.')[2]} that the model does not have")
        return name

    def _encode(self, value: object, where: str) -> Json:
        found: dict[str, torch.Tensor] = {}
        document = statetree.encode(value, where, where, found)
        self.tensors |= {name: Part(Source.of(tensor.detach())) for name, tensor in found.items()}
        return document


def _name_parameters(foreign: Foreign, index: int, order: Order | None) -> None:
    """Replace the positions in an optimizer's state by names."""
    optimizer = foreign.optimizers[index]
    if optimizer.named:
        return
    model = foreign.models[index if len(foreign.models) == len(foreign.optimizers) else 0]
    groups = order(foreign) if order is not None else None
    if groups is None and model.ordered and len(optimizer.groups) == 1 and len(optimizer.groups[0][0]) == len(model.tensors):
        groups = [list(model.tensors)]
    if groups is None:
        raise UsageError(
            f"{foreign.folder}: the optimizer's file knows its parameters by number only, and the model's does not keep their order. "
            "Give the folder of the model's config.json with --base FOLDER; for an optimizer with groups of your own, call "
            "holdfast.engine.importer.import_checkpoint(folder, output_dir, order=order_of(model, optimizer))"
        )
    sizes, expected = [len(g) for g in groups], [len(params) for params, _ in optimizer.groups]
    if sizes != expected:
        raise IncompatibleCheckpoint(
            f"{foreign.folder}: the optimizer's groups have {expected} parameters, the model's order gives {sizes}: this is another "
            "model, or another way to group its parameters"
        )
    name_of: dict[str | int, str] = {}
    for (params, _), names in zip(optimizer.groups, groups, strict=True):
        name_of |= dict(zip(params, names, strict=True))
    for position, state in optimizer.state.items():
        name = name_of[position]
        source = model.tensors.get(model.aliases.get(name, name))
        odd = [v.shape for k, v in state.items() if isinstance(v, Source) and k in _LIKE_PARAMETER and source and v.shape != source.shape]
        if source is None or odd:
            what = f"has state of shape {list(odd[0])} for it" if odd else "names it, the model has none such"
            raise IncompatibleCheckpoint(f"{foreign.folder}: {name} is parameter {position} in this order, but the optimizer {what}")
    optimizer.groups = [([name_of[p] for p in params], values) for params, values in optimizer.groups]
    optimizer.state = {name_of[p]: values for p, values in optimizer.state.items()}


_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "square_avg", "sum")
"""State that always has its parameter's shape."""


def _generators(state: dict[str, Any]) -> Json:
    """One rank's generators as `engine.rng` writes them; those of this process stand in for what is not there."""
    document = statetree.decode(rng.capture(), "rng", _no_tensors)
    assert isinstance(document, dict)
    if "python" in state:
        version, internal, gauss = state["python"]
        document["python"] = version, array("I", internal).tobytes(), gauss
    for kind in ("torch", "device"):
        if kind in state:
            document[kind] = bytes(state[kind].tolist())
    if "numpy" in state:
        document["numpy"] = state["numpy"]
    return statetree.encode(document, "rng", "rng", {})


def _no_tensors(name: str) -> torch.Tensor:
    raise KeyError(name)
