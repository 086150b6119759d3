"""Staging: the image of a rank's file in one aligned buffer, and the copy of the state into it.

The buffer is anonymous shared memory, page-aligned, allocated once and reused: a forked worker cannot break a direct write
from it, and writing it is one sequential pass. The copy is a few large calls that leave the GIL.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import torch
import xxhash

from holdfast.core.layout import stored_as
from holdfast.core.safetensors import Entry
from holdfast.engine import rng
from holdfast.engine.collect import Held
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.engine.plan import SavePlan

log = logging.getLogger("holdfast")

_LOCAL = attrgetter("local")


class Staging:
    """The image of the file that `plan` describes, and a view of it for every tensor."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._views: dict[str, torch.Tensor] = {}
        self._volatile: set[str] | None = None
        self._others: dict[str, torch.Tensor] = {}
        self._plan: SavePlan | None = None
        self._stream: torch.Stream | None = None
        """Where the copies from a device run, beside the compute stream."""

    def prepare(self, plan: SavePlan, tensors: Mapping[str, Held]) -> None:
        """Make room for `plan`; nothing is done when it is the last one."""
        if plan is self._plan:
            return
        if self._memory is None or len(self._memory) < plan.buffer_size:
            self._views, self._others = {}, {}
            self._bytes = torch.empty(0, dtype=torch.uint8)
            self._memory = mmap.mmap(-1, plan.buffer_size)
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
            _pin(self._bytes)
        self._memory[: len(plan.header)] = plan.header
        self._views = {name: self._view(name, entry, tensors[name]) for name, entry in plan.entries.items() if entry.nbytes}
        self._volatile = None
        self._plan = plan

    def warm(self, plan: SavePlan, tensors: Mapping[str, Held]) -> None:
        """Prepare ahead of the first save, and touch every page: the kernel hands memory out as it is first written."""
        self.prepare(plan, tensors)
        self._bytes[len(plan.header) :].zero_()

    def _view(self, name: str, entry: Entry, held: Held) -> torch.Tensor:
        dtype = held.spec.dtype
        assert (entry.dtype, entry.shape) == stored_as(dtype, tuple(held.local.shape)), name
        return self._bytes[entry.start : entry.stop].view(DTYPE_OF[dtype]).view(held.local.shape)

    def copy(self, names: Iterable[str], tensors: Mapping[str, Held]) -> None:
        """Copy these tensors into the image; returns when they are there."""
        ended = self.enqueue(names, tensors, None)
        if ended is not None:
            ended.synchronize()

    def enqueue(self, names: Iterable[str], tensors: Mapping[str, Held], begun: torch.Event | None) -> torch.Event | None:
        """Copy what is on the host, and enqueue the copies of what is on the device, after the event `begun`.

        Returns the event of the last copy; None where nothing was on a device, and everything is there already.
        """
        device = rng.accelerator()
        targets = self._targets(names)
        # The service thread makes these lists beside the training, whose interpreter it must leave alone: in as few loops as can be.
        sources = list(map(_LOCAL, map(tensors.__getitem__, targets)))
        views = list(targets.values())
        there: list[tuple[torch.Tensor, torch.Tensor]] = []
        if device is not None:
            pairs = list(zip(views, sources, strict=True))
            there = [pair for pair in pairs if pair[1].device.type == device.type]
            here = [pair for pair in pairs if pair[1].device.type != device.type]
            views, sources = [view for view, _ in here], [source for _, source in here]
        with torch.no_grad():
            if sources:
                torch._foreach_copy_(views, sources)
            if not there:
                return None
            stream = self._stream = self._stream or torch.Stream(device=device)
            if begun is None:
                begun = torch.accelerator.current_stream().record_event()
            stream.wait_event(begun)
            with stream:
                torch._foreach_copy_([view for view, _ in there], [source for _, source in there], non_blocking=True)
            return stream.record_event()

    def _targets(self, names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        if names is self._others:
            return self._others
        return {name: self._views[name] for name in names if name in self._views}

    def names_without(self, volatile: set[str]) -> Mapping[str, torch.Tensor]:
        """All but these, for `enqueue`; made once and kept for as long as they are the same."""
        if self._volatile != volatile:
            self._volatile = set(volatile)
            self._others = {name: view for name, view in self._views.items() if name not in volatile}
        return self._others

    def put_small(self, data: bytes) -> None:
        """Write the small state, padded with spaces to its room."""
        assert self._memory is not None and self._plan is not None
        entry = self._plan.state_entry
        self._memory[entry.start : entry.stop] = data.ljust(entry.nbytes)

    @property
    def names(self) -> list[str]:
        return list(self._views)

    @property
    def size(self) -> int:
        """Bytes that are allocated."""
        return len(self._memory) if self._memory is not None else 0

    def pieces(self, length: int) -> Iterator[memoryview]:
        """The whole buffer, header to last block, in pieces; the file ends at the plan's `image_size`."""
        assert self._memory is not None and self._plan is not None
        image = memoryview(self._memory)[: self._plan.buffer_size]
        for start in range(0, len(image), length):
            yield image[start : start + length]

    def plain_digest(self) -> str:
        """One digest over the per-rank tensors: names, shapes and bytes."""
        assert self._memory is not None and self._plan is not None
        image = memoryview(self._memory)
        hasher = xxhash.xxh3_128()
        for name in self._plan.plain:
            entry = self._plan.entries[name]
            hasher.update(f"{name} {entry.dtype} {entry.shape}".encode())
            hasher.update(image[entry.start : entry.stop])
        return hasher.hexdigest()


def _pin(memory: torch.Tensor) -> None:
    """Register the buffer with CUDA, so that copies into it run beside the compute. Torch's own pinned allocator would round its
    size up to a power of two. Elsewhere copies from a device stay pageable: right, but the host waits for them."""
    if torch.cuda.is_available() and torch.version.hip is None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(status) != 0:
            log.warning("the staging could not be pinned (CUDA error %d): the copies block the host", int(status))
