"""The image of a rank's file in a window smaller than the file: where memory is short, copy and write alternate.

Holds the bytes that `Staging` would hold, a window at a time, in the file's order. The state must not change until the last
window has been taken, so the gate stays closed while the file is written.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Iterator, Mapping

import torch
import xxhash

from holdfast.core.safetensors import Entry
from holdfast.engine.collect import Held
from holdfast.engine.plan import SavePlan


class Windows:
    """At most `size` bytes (a multiple of the file's alignment) of the image at a time."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._plan: SavePlan | None = None
        self._tensors: Mapping[str, Held] = {}
        self._order: list[tuple[int, str, Entry]] = []
        self._small = b""

    def prepare(self, plan: SavePlan, tensors: Mapping[str, Held]) -> None:
        """What the windows show from now on. The tensors themselves are kept until the next save."""
        if plan is not self._plan:
            self._order = sorted((entry.start, name, entry) for name, entry in plan.entries.items() if entry.nbytes)
        self._plan, self._tensors = plan, tensors

    def put_small(self, data: bytes) -> None:
        """The small state, padded with spaces to its room."""
        assert self._plan is not None
        self._small = data.ljust(self._plan.state_entry.nbytes)

    def pieces(self, length: int) -> Iterator[memoryview]:
        """The image from its beginning, rounded up to whole blocks of the disk; a piece holds until the next is asked for."""
        assert self._plan is not None
        window = memoryview(self._memory)
        for begin in range(0, self._plan.buffer_size, len(window)):
            filled = min(len(window), self._plan.buffer_size - begin)
            self._fill(begin, begin + filled)
            for start in range(0, filled, length):
                yield window[start : min(start + length, filled)]

    def _fill(self, begin: int, end: int) -> None:
        plan = self._plan
        assert plan is not None
        self._put(begin, end, 0, memoryview(plan.header))
        self._put(begin, end, plan.state_entry.start, memoryview(self._small))
        self._put(begin, end, plan.image_size, memoryview(bytes(plan.buffer_size - plan.image_size)))
        first = max(0, bisect.bisect_right(self._order, (begin, "\U0010ffff")) - 1)
        with torch.no_grad():
            for start, name, entry in self._order[first:]:
                if start >= end:
                    break
                low, high = max(start, begin), min(entry.stop, end)
                if low < high:
                    source = _flat_bytes(self._tensors[name].local)[low - start : high - start]
                    self._bytes[low - begin : high - begin].copy_(source)

    def _put(self, begin: int, end: int, start: int, data: memoryview) -> None:
        """Where `data`, which stands at `start` in the image, falls into the window from `begin` to `end`."""
        low, high = max(start, begin), min(start + len(data), end)
        if low < high:
            self._memory[low - begin : high - begin] = data[low - start : high - start]

    def plain_digest(self) -> str:
        """As of `Staging`: one digest over the per-rank tensors: names, shapes and bytes."""
        assert self._plan is not None
        hasher = xxhash.xxh3_128()
        for name in self._plan.plain:
            entry = self._plan.entries[name]
            hasher.update(f"{name} {entry.dtype} {entry.shape}".encode())
            hasher.update(_flat_bytes(self._tensors[name].local).cpu().numpy().data)
        return hasher.hexdigest()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in row-major order, where they are; copied once if it is not contiguous."""
    detached = tensor.detach().contiguous()
    if detached.is_complex():
        detached = torch.view_as_real(detached)
    return detached.reshape(-1).view(torch.uint8)
