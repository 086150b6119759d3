"""A sharded model's whole weights on one rank, with no collective: all ranks hand their shards over through the folder.

    save of the models alone, which any rank may ask for  ->  one plain file, streamed  ->  tensors mapped from it

The mapped file has lost its name by the time the tensors are given out, so it goes when they do. Memory: what an export takes, and the
pages of the file that are looked at, which the kernel may drop again. Disk: twice the weights, for the time of the hand-over.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from holdfast.core.layout import stored_as
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.checkpointer import Checkpointer
from holdfast.engine.export_weights import choose_weights
from holdfast.engine.extract import stream
from holdfast.engine.names import clean_modules, unwrap
from holdfast.engine.service import Save
from holdfast.errors import DeadlineExceeded
from holdfast.formats.safetensors_out import write_file
from holdfast.storage import LocalFolder

logger = logging.getLogger("holdfast")

FOLDER = ".holdfast-handover"
"""Below the run's folder; what a killed run leaves there is removed by the next."""


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP has cut this module or one inside it."""
    return any(isinstance(m, FullyShardedDataParallel | FSDPModule) for m in model.modules())


def name_as_before(model: nn.Module) -> None:
    """Give the class that FSDP2 has made of a model's the name of the model's own: libraries write it into their configs."""
    kind = type(unwrap(model))
    if issubclass(kind, FSDPModule):
        own = kind.__mro__[2]  # FSDP2's class has FSDPModule and the model's own as bases
        kind.__name__, kind.__qualname__, kind.__module__ = own.__name__, own.__qualname__, own.__module__


def find(models: dict[str, nn.Module], module: nn.Module) -> tuple[str, str] | None:
    """Which registered model `module` is or is in: its key, and the clean name of the place."""
    for key, model in models.items():
        for name, inner in clean_modules(model):
            if inner is module:
                return key, name
    return None


_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean(name: str) -> str:
    """A name without the wrappers in it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_between_wrappers(model: nn.Module) -> Callable[[str], str]:
    """From a tensor's clean name to the one that it has among the wrappers that are in `model` now."""
    inside = {clean(name): name for name, _ in model.named_modules()}  # of a wrapper and what it wraps, the inner one

    def name_now(name: str) -> str:
        module, _, leaf = name.rpartition(".")
        place = inside.get(module, module)
        return f"{place}.{leaf}" if place else leaf

    return name_now


class HandOver:
    """Full state dicts of the models of one Checkpointer whose storage is `storage`; each is waited for `patience` seconds.

    Ranks that ask together share what rank 0 asks for; any other rank that wants the tensors itself asks for its own.
    """

    def __init__(self, checkpointer: Checkpointer, storage: LocalFolder, rank: int, patience: float) -> None:
        self._checkpointer, self._storage, self._rank, self._patience = checkpointer, storage, rank, patience
        self._asked: Counter[int] = Counter()

    def join(self, step: int) -> Save:
        """Hand over this rank's part to rank 0."""
        return self._ask(step, f"{FOLDER}/{self._next(step)}")

    def state_dict(self, key: str, place: str, step: int) -> dict[str, torch.Tensor]:
        """The whole tensors of the module at `place` in the model `key`, by the names that its own `state_dict` gives them.

        Any rank may ask; all the others have to be alive.

        Raises:
            SaveFailed: a rank could not hand over its part, or not in time.
        """
        folder = f"{FOLDER}/{self._next(step)}" + (f"-{self._rank}" if self._rank else "")
        save = self._ask(step, folder)
        try:
            if not save.finished.wait(self._patience):
                raise DeadlineExceeded(f"the weights of step {step} were not handed over within {self._patience:.0f} s; look into the ranks' logs")
            if save.error is not None:
                raise save.error
            return self._assembled(Checkpoint(self._storage, folder), key, place)
        finally:
            self._storage.remove_folder(folder)

    def _next(self, step: int) -> str:
        """A name of its own for each time that the ranks ask at one step: the last one may be removed while they ask again."""
        self._asked[step] += 1
        return f"{step}.{self._asked[step]}"

    def _ask(self, step: int, folder: str) -> Save:
        (self._storage.root / FOLDER).mkdir(exist_ok=True)
        return self._checkpointer.save(step, folder=folder, weights_only=True)

    def _assembled(self, checkpoint: Checkpoint, key: str, place: str) -> dict[str, torch.Tensor]:
        weights = choose_weights(checkpoint, key, ema=False)
        prefix = place + "." if place else ""
        tensors = {n: t for n, t in weights.tensors.items() if any(a.startswith(prefix) for a in weights.tied[n])}
        described = [(n, *stored_as(t.dtype, t.shape)) for n, t in tensors.items()]
        name = f"{checkpoint.folder}/whole.safetensors"
        order = [tensors[n] for n, *_ in described]
        write_file(self._storage, name, described, (piece for _, _, piece in stream(checkpoint, order)))
        path = Path(self._storage.root, name)
        loaded = load_file(path)
        path.unlink()  # what is mapped stays
        return {
            alias.removeprefix(prefix): loaded[n] for n in tensors for alias in weights.tied[n] if alias.startswith(prefix)
        }


@contextlib.contextmanager
def state_dict_of(module: nn.Module, state: dict[str, torch.Tensor]) -> Iterator[None]:
    """While this lasts, `module.state_dict()` is `state`."""

    def state_dict(*args: object, destination: dict[str, torch.Tensor] | None = None, prefix: str = "", **kwargs: object) -> dict[str, torch.Tensor]:
        found = {prefix + name: tensor for name, tensor in state.items()}
        if destination is None:
            return found
        destination.update(found)
        return destination

    state_dict.given = True  # type: ignore[attr-defined]
    with put_in(module, "state_dict", state_dict):
        yield


def is_given(module: nn.Module) -> bool:
    """Whether this is inside `state_dict_of` for the module."""
    return getattr(module.__dict__.get("state_dict"), "given", False)


@contextlib.contextmanager
def put_in(module: nn.Module, name: str, function: Callable[..., object]) -> Iterator[None]:
    """While this lasts, `function` is the module's method of that name."""
    before = module.__dict__.get(name)
    module.__dict__[name] = function
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before
