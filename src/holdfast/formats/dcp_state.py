"""Model and optimizer in a DCP folder: torch's own state dicts, nested or flattened, as accelerate and torchtitan save them.

    {"model": {name: tensor}, "optimizer": {"state": {name: {key: …}}, "param_groups": [{"params": [names], …}]}}

Flattened (torchtitan), an optimizer has `state.<name>.<key>` and `param_groups.<name>.<key>` for every parameter. A folder
without any such part is a model whose names are the keys themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.errors import CorruptCheckpoint
from holdfast.formats.dcp import DcpFolder
from holdfast.formats.foreign import Foreign, ForeignModel, ForeignOptimizer, Source, clean, step_of
from holdfast.formats.recognise import DCP

_MODEL = ("model", "state_dict", "module")
_OPTIMIZER = ("optimizer", "optim", "optimizers")
_SCHEDULER = ("lr_scheduler", "scheduler")
_STEP = ("step", "global_step")
_GROUPS = "param_groups"
KeyPath = tuple[str | int, ...]


def read_dcp(folder: Path) -> Foreign:
    """Whatever of a training run is in the folder. Raises as `DcpFolder` does."""
    dcp = DcpFolder(folder)
    paths = {key: _parts(dcp, key) for key in dcp.entries}
    inside = ("app",) if {p[0] for p in paths.values()} == {"app"} else ()  # the name that torch's tutorials use
    at = len(inside)
    first = {str(p[at]) for p in paths.values() if len(p) > at}
    foreign = Foreign(DCP, folder)
    optimizer = next((name for name in _OPTIMIZER if name in first), None)
    model = next((name for name in _MODEL if name in first), None)
    others = first - {optimizer, model}
    if model is None:  # torchtitan puts the model's own names beside the other parts
        known = {*_SCHEDULER, *_STEP, "train_state", "dataloader", "ft_manager", "extra"}
        foreign.models = [model_of(dcp, inside, {key for key, p in paths.items() if str(p[at]) in others - known})]
    else:
        foreign.models = [model_of(dcp, (*inside, model))]
    if optimizer is not None:
        foreign.optimizers = [optimizer_of(dcp, (*inside, optimizer))]
    for key, path in paths.items():
        if str(path[at]) in _SCHEDULER and key in dcp.values:
            _set(foreign.stateful.setdefault("lr_scheduler", {}), path[at + 1 :], dcp.value(key))
        elif path[-1] in _STEP and key in dcp.values and str(path[at]) not in (model, optimizer):
            foreign.step = _number(dcp.value(key), foreign.step)
    if foreign.step is None:
        foreign.step = step_of(foreign)
    left = others - {*_SCHEDULER, *_STEP} if model is not None else others & {"dataloader", "train_state", "ft_manager", "extra"}
    foreign.left_out += [f"{part}: not known what it is" for part in sorted(left)]
    return foreign


def _parts(dcp: DcpFolder, key: str) -> KeyPath:
    """The path of a key; a flat key is cut at the dots that divide the outer parts."""
    path = dcp.path(key)
    if len(path) > 1 or path != (key,):
        return path
    head, dot, rest = key.partition(".")
    return (head, rest) if dot and head in (*_MODEL, *_OPTIMIZER, *_SCHEDULER, "train_state", "app") else path


def _number(value: Any, otherwise: int | None) -> int | None:
    return int(value) if isinstance(value, int | float) or (hasattr(value, "numel") and value.numel() == 1) else otherwise


def _set(target: dict[Any, Any], path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        target = target.setdefault(part, {})
    target[path[-1] if path else ""] = value


def model_of(dcp: DcpFolder, prefix: KeyPath, keys: Iterable[str] | None = None) -> ForeignModel:
    """The tensors below `prefix` (or of `keys`) by name.

    Raises:
        CorruptCheckpoint: there are none.
    """
    model = ForeignModel({})
    chosen = set(dcp.tensors if keys is None else keys) & dcp.tensors.keys()
    for key in sorted(chosen):
        path = _parts(dcp, key)
        if path[: len(prefix)] == prefix and len(path) > len(prefix):
            name = clean(".".join(str(part) for part in path[len(prefix) :]))
            model.tensors[name] = _source(dcp, key)
    if not model.tensors:
        raise CorruptCheckpoint(f"{dcp.folder} holds no model under {'.'.join(map(str, prefix)) or 'any key'}")
    return model


def _source(dcp: DcpFolder, key: str) -> Source:
    return Source(*dcp.tensors[key], lambda wanted: dcp.pieces(key, wanted))


def optimizer_of(dcp: DcpFolder, prefix: KeyPath) -> ForeignOptimizer:
    """The optimizer below `prefix`."""
    tree: dict[Any, Any] = {}
    for key in dcp.entries:
        path = _parts(dcp, key)
        if path[: len(prefix)] == prefix:
            _set(tree, _unflattened(path[len(prefix) :]), _source(dcp, key) if key in dcp.tensors else dcp.value(key))
    state: dict[str | int, dict[str, Any]] = {clean(str(name)): dict(values) for name, values in tree.get("state", {}).items()}
    groups = tree.get(_GROUPS, {})
    if groups and all(isinstance(index, int) for index in groups):
        listed = [groups[index] for index in sorted(groups)]
        return ForeignOptimizer([_group(g) for g in listed], state)
    return ForeignOptimizer(_grouped(groups, state), state)


def _group(group: dict[str, Any]) -> tuple[list[str | int], dict[str, Any]]:
    params = group["params"]
    names = [params[i] for i in sorted(params)] if isinstance(params, dict) else params
    values = {key: _read(value) for key, value in group.items() if key != "params"}
    return [clean(str(name)) for name in names], values


def _grouped(by_name: dict[str, dict[str, Any]], state: dict[str | int, Any]) -> list[tuple[list[str | int], dict[str, Any]]]:
    """Groups from values that are kept for every parameter: those with equal values are one group."""
    groups: list[tuple[list[str | int], dict[str, Any]]] = []
    for name in by_name or map(str, state):
        values = {key: _read(value) for key, value in by_name.get(name, {}).items()}
        for params, known in groups:
            if known.keys() == values.keys() and all(_same(known[k], values[k]) for k in known):
                params.append(clean(name))
                break
        else:
            groups.append(([clean(name)], values))
    return groups


def _same(a: Any, b: Any) -> bool:
    return bool((a == b).all()) if hasattr(a, "all") and hasattr(b, "all") else type(a) is type(b) and a == b


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, Source) else value


def _unflattened(path: KeyPath) -> KeyPath:
    """`("state.layer.weight.exp_avg",)` and `("param_groups.layer.weight.lr",)` as torch flattens them, nested again."""
    if len(path) == 1 and isinstance(path[0], str) and path[0].count(".") > 1:
        part, _, rest = path[0].partition(".")
        name, _, key = rest.rpartition(".")
        if part in ("state", _GROUPS):
            return part, name, key
    return path
