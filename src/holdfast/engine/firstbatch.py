"""Something to do just before a loop gets its next batch, for any iterable.

Making an iterator, starting workers and reading ahead may draw from the global generators, so a resume that only puts them
back beforehand differs from the uninterrupted run at its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def before_first_batch(loader: Any, action: Callable[[], None]) -> None:
    """Call `action` once, after `loader` has made its next batch and before the loop gets it.

    The object itself takes part: for one iteration it is of a subclass whose `__iter__` does so.
    """
    kind = type(loader)

    def iterate(self: Any) -> Iterator[Any]:
        self.__class__ = kind
        iterator = iter(self)
        try:
            first = next(iterator)
        except StopIteration:
            action()
            return
        action()
        yield first
        yield from iterator

    loader.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__})
