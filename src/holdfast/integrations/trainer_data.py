"""Where a resumed Trainer goes on in its data, and when its random generators are put back.

The Trainer skips the batches that are done. Its loader is Accelerate's, which reads one batch ahead. So in the run that was saved
after step N, batch N + 1 was fetched before that, and batch N + 2 after it:

    generators A   fetch N + 1   step N   save: generators S   fetch N + 2   step N + 1

A collator that draws (masks) draws the same again only if A is put back before the first fetch and S before the second. A is noted
before every fetch, and is part of the checkpoint. Loader workers have generators of their own, which nobody can put back.

A loader with a position of its own (`state_dict`, `load_state_dict`) is put there and skips nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from holdfast.core.documents import Json
from holdfast.engine import rng
from holdfast.engine.firstbatch import become

_WATCHED = "_holdfast_watched"


def has_position(loader: Any) -> bool:
    """Whether the loader keeps its own place, which Accelerate's does only when told to."""
    stateful = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
    return stateful and bool(getattr(loader, "use_stateful_dataloader", True))


class Continuation:
    """The data of one `train()` on one rank. `ahead` are the generators before the last fetch."""

    def __init__(self, keeps_position: bool) -> None:
        self.ahead: Json = None
        self._keeps_position = keeps_position
        self._first: Json = None
        self._then: Json = None

    def resumed(self, ahead: Json, generators: Json) -> None:
        """`ahead` as it was saved, None where it was not; `generators` as they were at the save."""
        self._first, self._then = ahead, generators

    def put_generators_back(self) -> None:
        """Once; a loader with a position of its own has had it done by the engine."""
        generators, self._then = self._then, None
        if generators is not None and not self._keeps_position:
            rng.restore(generators, "generators")

    @contextmanager
    def following(self, loader: Any) -> Iterator[None]:
        """While an epoch over `loader` lasts: its fetches are noted, and what is done is skipped in this way."""
        trainer: Any = import_module("transformers.trainer")
        original = trainer.skip_first_batches
        trainer.skip_first_batches = lambda loader, number=0: self._skip(original, loader, number)
        self._watch(loader, {})
        try:
            yield
        finally:
            trainer.skip_first_batches = original

    def _skip(self, original: Callable[..., Any], loader: Any, number: int) -> Any:
        if self._keeps_position:
            return loader
        rest = original(loader, number)
        # A stream is read from its beginning; of a map only the indices are.
        first = int(getattr(rest, "skip_batches", 0)) * _fetched_at_once(rest) + 1
        self._watch(rest, {first: self._put_first_back, first + _fetched_at_once(rest): self.put_generators_back})
        return rest

    def _put_first_back(self) -> None:
        generators, self._first = self._first, None
        if generators is not None:
            rng.restore(generators, "generators")

    def _watch(self, loader: Any, actions: dict[int, Callable[[], None]]) -> None:
        """Before every fetch do what is to be done before the fetch of that number, and note the generators."""
        sampler = getattr(getattr(loader, "base_dataloader", None), "batch_sampler", None)
        if sampler is None or loader.num_workers or self._keeps_position or _WATCHED in sampler.__dict__:
            return
        kind, at_once = type(sampler), _fetched_at_once(loader)

        def iterate(this: Any) -> Iterator[Any]:
            for count, batch in enumerate(kind.__iter__(this), 1):
                if count in actions:
                    actions.pop(count)()
                if (count - 1) % at_once == 0:
                    self.ahead = rng.capture()
                yield batch

        sampler.__dict__[_WATCHED] = True
        become(sampler, type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__}))


def _fetched_at_once(loader: Any) -> int:
    """Batches that make one step of all ranks, where rank 0 fetches for all."""
    fetches_for_all = hasattr(loader, "split_batches") and not loader.split_batches
    return int(loader.state.num_processes) if fetches_for_all else 1
