"""In which order a script's prepared loaders give their samples, so that a resumed epoch goes on in the order that it had begun with.

Accelerate draws an epoch's order from the sampler's own generator, a one-process run from torch's, a seedable sampler from the
epoch's number. A checkpoint in the middle of an epoch has the generators as they stood before it; one after the last batch of an
epoch has them as they are, and the number of the next. A script that skips the batches that are done then sees no sample twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

State = dict[str, bytes | None]
"""The sampler's generator, and torch's where an epoch is under way; None where there is none to put back."""


class Orders:
    """Of the loaders that one accelerator has prepared, by their number. All methods belong to the training thread."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._begun: dict[int, tuple[Any, State]] = {}
        self._resumed: dict[int, bytes] = {}

    @contextmanager
    def epoch(self, number: int, loader: Any) -> Iterator[None]:
        """Around one pass over a loader, or over what is left of it."""
        generator = self._resumed.pop(number, None)
        if generator is not None:
            torch.set_rng_state(_tensor(generator))
        self._begun[number] = loader, {"generator": _state(_generator(loader)), "torch": _bytes(torch.get_rng_state())}
        try:
            yield
        finally:
            self._begun.pop(number, None)
        prepared = self._accelerator._dataloaders[number]
        if loader is not prepared and hasattr(prepared, "iteration"):  # what was left of an epoch ends that epoch
            prepared.iteration = loader.iteration

    def state(self) -> list[dict[str, Any]]:
        """Of each loader: the number of the epoch that a resumed run is in, and its generators."""
        return [self._state(number, loader) for number, loader in enumerate(self._accelerator._dataloaders)]

    def _state(self, number: int, prepared: Any) -> dict[str, Any]:
        loader, begun = self._begun.get(number, (prepared, None))
        epoch = int(getattr(loader, "iteration", 0))
        if begun is not None and not _is_at_its_end(loader):
            return {"epoch": epoch, **begun}
        return {"epoch": epoch + (begun is not None), "generator": _state(_generator(loader)), "torch": None}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Nothing, where there are other loaders than there were."""
        loaders = self._accelerator._dataloaders
        if len(states) != len(loaders):
            return
        for number, (loader, state) in enumerate(zip(loaders, states, strict=True)):
            if hasattr(loader, "iteration"):
                loader.iteration = state["epoch"]
            generator = _generator(loader)
            if generator is not None and state["generator"] is not None:
                generator.set_state(_tensor(state["generator"]))
            if state["torch"] is not None:
                self._resumed[number] = state["torch"]


def _generator(loader: Any) -> torch.Generator | None:
    """The one that the order of the samples is drawn from, if it is not torch's."""
    found = getattr(loader, "synchronized_generator", None)
    if found is None:
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) and found.device.type == "cpu" else None


def _is_at_its_end(loader: Any) -> bool:
    """Whether the batch that is being trained on is the last one: accelerate reads one ahead."""
    return bool(getattr(loader, "end_of_dataloader", False))


def _state(generator: torch.Generator | None) -> bytes | None:
    return None if generator is None else _bytes(generator.get_state())


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
