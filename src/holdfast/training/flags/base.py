"""What a group of flags is: a dataclass that knows what is wrong with its values, and which of them do nothing.

Groups are combined by inheritance. Each calls the next one's `problems` and `warnings` through `super()`, so that a config
of several groups tells all of them at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields

from holdfast.errors import UsageError


@dataclass(kw_only=True)
class Flags:
    """The root of all groups."""

    def problems(self) -> Iterator[str]:
        """Yields one line for each thing that is wrong; a group adds its own to those of the groups before it."""
        yield from ()

    def warnings(self, total_steps: int) -> Iterator[str]:
        """Yields one line for each flag that will not do what its owner may expect, in a run of `total_steps`."""
        yield from ()

    def validate(self) -> None:
        """Raises one UsageError with every problem, before anything is loaded."""
        if found := list(self.problems()):
            lines = "\n".join(f"  - {line}" for line in found)
            raise UsageError(f"{len(found)} thing(s) to correct before training can start:\n{lines}")

    def changed(self, name: str) -> bool:
        """Whether the flag has another value than by default."""
        field = next(field for field in fields(self) if field.name == name)
        return field.default is MISSING or bool(getattr(self, name) != field.default)

    def below(self, floors: dict[str, float]) -> Iterator[str]:
        """Yields a line for each of the named flags that is below its floor, or is no number."""
        for name, floor in floors.items():
            value = getattr(self, name)
            if value is not None and not floor <= value < float("inf"):
                yield f"--{name} is {value}; it has to be at least {floor}."

    def idle(self, names: tuple[str, ...], because: str) -> Iterator[str]:
        """Yields a line for each of the named flags that was given and does nothing."""
        for name in names:
            if self.changed(name):
                yield f"--{name} has no effect {because}."


def installed(module: str) -> bool:
    """Whether a library can be imported; it is not imported."""
    return importlib.util.find_spec(module) is not None
