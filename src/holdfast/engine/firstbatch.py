"""Something to do just before a loop gets its next batch, for any iterable.

Making an iterator and starting workers may draw from the global generators, which the uninterrupted run did long before; so
a resume that only puts them back beforehand differs at its first step. Samples may draw as well, and in the uninterrupted run
they do so after the checkpoint. So the generators are put back between the two: after the iterator is made, before its first
batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any


def before_first_batch(loader: Any, action: Callable[[], None]) -> None:
    """Call `action` once, between the making of `loader`'s next iterator and that of its first batch.

    A loader whose `__iter__` is a generator function makes its inner iterator only when asked for the first batch (Accelerate's
    do, and read one batch ahead): there the action comes after that batch, unless the loader says that it `draws_nothing`.

    The object itself takes part: for one iteration it is of a subclass whose `__iter__` does so.
    """
    kind = type(loader)

    def iterate(self: Any) -> Iterator[Any]:
        become(self, kind)
        iterator = iter(self)
        late = isinstance(getattr(iterator, "inner", iterator), GeneratorType) and not getattr(self, "draws_nothing", False)
        if not late:
            action()
        for batch in iterator:
            if late:
                action()
                late = False
            yield batch
        if late:
            action()

    become(loader, type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__}))


def become(loader: Any, kind: type) -> None:
    """Make `loader` an object of `kind`, though it may show another class than its own (Accelerate's loaders do)."""
    vars(object)["__class__"].__set__(loader, kind)
