"""The plan of a save: the layout, and where each tensor that this rank writes lies in the image of its file.

Made once and kept: it changes only when a tensor appears, goes or changes its shape, so that a save of the same state
builds no header and no layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from holdfast.core.boxes import Shape
from holdfast.core.flat import Flat
from holdfast.core.layout import Layout, TensorSpec, spread_replicas, stored_as
from holdfast.core.safetensors import ALIGNMENT, ITEM_SIZE, Entry, build_header
from holdfast.engine.base import Bases, Origin
from holdfast.engine.collect import Collected

STATE_TENSOR = "holdfast.state"
"""The small state of a rank: JSON as bytes, padded with spaces, the last tensor of its file."""

_STATE_ROOM = 64 << 10
"""The small state's space grows in steps of this, so that a counter's next digit does not change the header."""


@dataclass(frozen=True)
class SavePlan:
    """`entries` are the tensors that this rank writes, in file order; `image_size` is the file's size in bytes."""

    signature: object
    world_size: int
    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    origins: Mapping[str, Origin]
    bases: Bases
    header: bytes
    entries: Mapping[str, Entry]
    state_entry: Entry
    plain: tuple[str, ...]
    """Names of the per-rank tensors of optimizers, whose common digest tells whether all ranks hold the same."""

    fits: list[object] = field(default_factory=list, compare=False)
    """The structure that was last found to be this plan's."""

    @cached_property
    def layout(self) -> Layout:
        """Waits for the digests of the base files, where there are any: for the service thread.

        Raises:
            OSError, EOFError: a base file can no longer be read.
        """
        named = {name: replace(self.specs[name], base=self.bases.named(origin)) for name, origin in self.origins.items()}
        return Layout(self.world_size, {**self.specs, **named}, dict(self.aliases))

    @property
    def image_size(self) -> int:
        return self.state_entry.stop

    @property
    def buffer_size(self) -> int:
        """The image rounded up, so that it can be written in whole blocks past the page cache."""
        return -(-self.image_size // ALIGNMENT) * ALIGNMENT


def make_plan(
    collected: Collected, bases: Bases, rank: int, world_size: int, small_bytes: int, last: SavePlan | None
) -> SavePlan:
    """The plan for what was collected; `last` itself where it still fits."""
    structure = (collected.structure, tuple(collected.named))
    fits = last is not None and small_bytes <= last.state_entry.nbytes
    if last is not None and fits and collected.structure is not None and last.fits == [structure]:
        return last
    named = {name: held.spec for name, held in collected.named.items()}
    tensors = {name: (held.spec, held.local.shape) for name, held in collected.tensors.items()}
    signature = tensors, collected.elsewhere, named, collected.origins, collected.based
    if last is not None and fits and last.signature == signature:
        last.fits[:] = [structure]
        return last
    every = {name: held.spec for name, held in collected.tensors.items()} | named | collected.elsewhere
    specs = spread_replicas(every, based=collected.based)
    mine: list[tuple[str, str, Shape]] = []
    for name, held in collected.tensors.items():
        if writes(specs[name], rank):
            mine.append((name, *stored_as(held.spec.dtype, tuple(held.local.shape))))
    # Step counters side by side: who reads a few rows of every tensor needs one block for all of them.
    mine.sort(key=lambda t: (-ITEM_SIZE[t[1]], prod(t[2]) == 1, t[0]))
    room = -(-(small_bytes + 1024) // _STATE_ROOM) * _STATE_ROOM
    header, entries = build_header([*mine, (STATE_TENSOR, "U8", (room,))], {"format": "pt", "holdfast": "1"})
    state_entry = entries.pop(STATE_TENSOR)
    plain = tuple(sorted(name for name in entries if specs[name].placement is None and specs[name].slot is not None))
    return SavePlan(
        signature, world_size, specs, dict(collected.aliases), collected.origins, bases, header, entries, state_entry, plain,
        [structure],
    )  # fmt: skip


def writes(spec: TensorSpec, rank: int) -> bool:
    """Whether `rank` writes what it holds of a tensor: its own, its part of a flat shard, of copies only the chosen one."""
    if spec.placement is None or isinstance(spec.placement, Flat):
        return True
    coordinate = spec.placement.mesh.coordinate(rank)
    return coordinate is not None and spec.placement.replica(coordinate) == spec.replica
