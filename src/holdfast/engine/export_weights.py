"""Which tensors of a checkpoint are a model's weights: of one model among several, trained or averaged, under clean names."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.documents import Json
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.extract import Stored, stored
from holdfast.engine.names import join
from holdfast.errors import IncompatibleCheckpoint, UsageError


@dataclass
class Weights:
    """`tensors` by the name in the model; `tied` gives for each all its names, its own first."""

    tensors: dict[str, Stored]
    tied: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> dict[str, str]:
        """Every name, further ones of tied tensors included, with the one that holds it."""
        return {alias: name for name, aliases in self.tied.items() for alias in aliases}

    @property
    def is_lora(self) -> bool:
        return any(".lora_" in name for name in self.tensors)

    @property
    def shown(self) -> str:
        return ", ".join(sorted(self.tensors)[:3])


def choose_weights(checkpoint: Checkpoint, model: str, ema: bool) -> Weights:
    """The weights of the model that was registered under the key `model` (the only one: "").

    Raises:
        UsageError: there is no such model, or no averaged weights.
    """
    weights = _below(checkpoint, join("model", model))
    if not weights.tensors:
        keys = sorted({name.split(".")[1] for name in checkpoint.tensors if name.startswith("model.")})
        raise UsageError(f"{checkpoint.where} has no model {model!r}; its tensors begin with {', '.join(keys[:8]) or 'nothing'}")
    if checkpoint.manifest.world_size > 1 and (odd := [n for n, t in weights.tensors.items() if t.rank is not None]):
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        weights.notes.append(f"{odd[0]}{more}: every rank has its own, which may differ; the export has those of rank {checkpoint.first}")
    return _averaged(checkpoint, weights) if ema else weights


def _below(checkpoint: Checkpoint, prefix: str) -> Weights:
    start = prefix + "."
    tensors = {n.removeprefix(start): stored(checkpoint, n) for n in sorted(checkpoint.tensors) if n.startswith(start)}
    tied = {name: [name] for name in tensors}
    for alias, name in sorted(checkpoint.aliases.items()):
        if name.startswith(start) and alias.startswith(start):
            tied[name.removeprefix(start)].append(alias.removeprefix(start))
    return Weights(tensors, tied)


def _averaged(checkpoint: Checkpoint, trained: Weights) -> Weights:
    """The same model with its averaged weights: of a second model `ema`, or of a registered object with that word in its key.

    Three forms are known: names as in the model (with `module.` before them, as torch's AveragedModel has), and diffusers'
    `shadow_params`, a list in the order of the optimizer's parameters.
    """
    keys = sorted(key for key in checkpoint.small(checkpoint.first).get("state", {}) if "ema" in key.lower() and key.startswith("extra."))
    if not keys and not any(name.startswith("model.ema.") for name in checkpoint.tensors):
        raise UsageError(
            f"{checkpoint.where} holds no averaged weights: register them as extra={{'ema': ...}} or as a model with the key 'ema'"
        )
    for prefix in ("model.ema", *keys):
        found = _below(checkpoint, prefix).tensors
        by_name = {name.removeprefix("module."): tensor for name, tensor in found.items()}
        if trained.tensors.keys() & by_name.keys():
            return _replaced(checkpoint, trained, by_name, prefix)
        shadows = {n: t for n, t in found.items() if n.startswith("shadow_params[")}
        if shadows:
            return _replaced(checkpoint, trained, _by_order(checkpoint, trained, shadows), prefix)
    raise UsageError(f"{checkpoint.where}: no tensor of {', '.join(keys)} is named like one of the model ({trained.shown})")


def _by_order(checkpoint: Checkpoint, trained: Weights, shadows: dict[str, Stored]) -> dict[str, Stored]:
    state = checkpoint.small(checkpoint.first)["state"]
    groups: list[Json] = next((d["groups"] for k, d in state.items() if k.partition(".")[0] == "optimizer"), [])
    names = [name.removeprefix("model.") for group in groups for name in group["params"]]
    if len(names) != len(shadows) or len(groups) != 1:
        raise UsageError(
            f"{checkpoint.where}: the averaged weights are a list of {len(shadows)} tensors without names, and no single group of the "
            f"optimizer has as many parameters ({len(names)} in {len(groups)}): register a dict of named tensors instead"
        )
    return {name: shadows[f"shadow_params[{i}]"] for i, name in enumerate(names)}


def _replaced(checkpoint: Checkpoint, trained: Weights, averaged: dict[str, Stored], prefix: str) -> Weights:
    tensors = dict(trained.tensors)
    for name in tensors.keys() & averaged.keys():
        if tensors[name].shape != averaged[name].shape:
            raise IncompatibleCheckpoint(
                f"{checkpoint.where}: {name} has shape {list(tensors[name].shape)}, its average in {prefix} {list(averaged[name].shape)}"
            )
        tensors[name] = averaged[name]
    same = sorted(tensors.keys() - averaged.keys())
    notes = [f"averaged weights of {prefix}"] + ([f"not averaged: {', '.join(same[:3])} … {len(same)} in all"] if same else [])
    return Weights(tensors, trained.tied, [*trained.notes, *notes])
