"""What is in another program's checkpoint, under the names and in the form that a native one has it.

An optimizer's state that the file keeps by position needs the parameters' names in the optimizer's order. They come from
the caller (`order`), or, for one group over all of a model whose order the file kept, from there; every piece of state is then
held against its parameter's shape, so that a wrong order is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.documents import Json
from holdfast.core.layout import OptimizerSlot
from holdfast.engine import rng, statetree
from holdfast.engine.names import join
from holdfast.errors import IncompatibleCheckpoint, UsageError
from holdfast.formats.foreign import Foreign, ForeignModel, Source

Order = Callable[[Foreign], list[list[str]] | None]
"""Gives the parameter names of each of the optimizer's groups, in their order; None where it cannot tell."""

_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "square_avg", "sum")
"""State that always has its parameter's shape."""


@dataclass(frozen=True)
class Held:
    """A tensor of the checkpoint; `slot` says of which parameter it is the optimizer's state."""

    source: Source
    slot: OptimizerSlot | None = None


class Content:
    """Tensors by name, aliases, and the small state that all ranks have in common."""

    def __init__(self) -> None:
        self.tensors: dict[str, Held] = {}
        self.aliases: dict[str, str] = {}
        self.small: dict[str, Json] = {}

    def add_models(self, foreign: Foreign, keys: Sequence[str]) -> None:
        for key, model in zip(keys, foreign.models, strict=True):
            self._add_model(join("model", key), model)

    def _add_model(self, prefix: str, model: ForeignModel) -> None:
        for name, source in model.tensors.items():
            self.tensors[join(prefix, name)] = Held(source)
        for alias, name in model.aliases.items():
            self.aliases[join(prefix, alias)] = join(prefix, name)

    def add_optimizer(self, key: str, foreign: Foreign, index: int, prefix: str, order: Order | None) -> None:
        """The optimizer of that index, whose parameters are those that begin with `prefix`, which stands in no name of its own.

        Raises:
            UsageError: its parameters have no names, and `order` gives none.
            IncompatibleCheckpoint: it does not fit the model.
        """
        optimizer = foreign.optimizers[index]
        if not optimizer.named:
            self._name_parameters(foreign, index, prefix, order)
        values: dict[str, Json] = {}
        for param, state in optimizer.state.items():
            name = self._stored(join(prefix, str(param)))
            rest = {}
            for state_key, value in state.items():
                if isinstance(value, Source):
                    slot = OptimizerSlot(key, name, state_key)
                    self.tensors[join("optimizer", key, name, state_key)] = Held(value, slot)
                else:
                    rest[state_key] = value
            if rest:
                values[name] = self._encode(rest, join("optimizer", key, name))
        groups = []
        for i, (params, group) in enumerate(optimizer.groups):
            encoded = self._encode(group, f"{join('optimizer', key)}.param_groups[{i}]")
            groups.append({"params": [self._stored(join(prefix, str(p))) for p in params], "values": encoded})
        self.small[join("optimizer", key)] = {"groups": groups, "values": values}

    def add_value(self, key: str, value: object) -> None:
        """Raises UsageError for a value that no checkpoint can hold."""
        self.small[key] = self._encode(value, key)

    def _stored(self, name: str) -> str:
        name = self.aliases.get(name, name)
        if name not in self.tensors:
            raise IncompatibleCheckpoint(f"the optimizer speaks of a parameter {name.partition('.')[2]} that the model does not have")
        return name

    def _encode(self, value: object, where: str) -> Json:
        found: dict[str, torch.Tensor] = {}
        document = statetree.encode(value, where, where, found)
        self.tensors |= {name: Held(Source.of(tensor.detach())) for name, tensor in found.items()}
        return document

    def _name_parameters(self, foreign: Foreign, index: int, prefix: str, order: Order | None) -> None:
        """Replace the positions in an optimizer's state by names."""
        optimizer = foreign.optimizers[index]
        model = foreign.models[index if len(foreign.models) == len(foreign.optimizers) else 0]
        groups = order(foreign) if order is not None else None
        if groups is None and model.ordered and len(optimizer.groups) == 1 and len(optimizer.groups[0][0]) == len(model.tensors):
            groups = [list(model.tensors)]
        if groups is None:
            raise UsageError(
                f"{foreign.folder}: the optimizer's file knows its parameters by number only, and the model's does not keep their order. "
                "Give the folder of the model's config.json with --base FOLDER; for an optimizer with groups of your own, resume from "
                "this folder as it is (holdfast.Checkpointer.resume), or call "
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
            self._check_shapes(foreign, prefix, name_of[position], position, state)
        optimizer.groups = [([name_of[p] for p in params], values) for params, values in optimizer.groups]
        optimizer.state = {name_of[p]: values for p, values in optimizer.state.items()}

    def _check_shapes(self, foreign: Foreign, prefix: str, name: str, position: str | int, state: dict[str, Any]) -> None:
        full = join(prefix, name)
        part = self.tensors.get(self.aliases.get(full, full))
        if part is None:
            what = "names it, the model has none such"
        else:
            shape = part.source.shape
            odd = [v.shape for k, v in state.items() if isinstance(v, Source) and k in _LIKE_PARAMETER and v.shape != shape]
            if not odd:
                return
            what = f"has state of shape {list(odd[0])} for it"
        raise IncompatibleCheckpoint(f"{foreign.folder}: {name} is parameter {position} in this order, but the optimizer {what}")


def generators_of(state: dict[str, Any]) -> Json:
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
