"""The memory that an optimizer's state has already, so that a load fills it instead of making it anew.

New memory has to be touched page by page, which takes longer than filling it, and until the old state is let go the state is
there twice. A tensor is taken only where it is what would be made in its place. Each memory is taken once, and none that a
parameter lies in: tensors that share their memory here need not be equal in the checkpoint.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from holdfast.engine.fsdp1 import FlatPiece
from holdfast.engine.names import NamedState

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class LiveState:
    """The state tensors of one optimizer before a load. It only looks at them: filling them is for after the ranks' vote."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: NamedState) -> None:
        self._state = optimizer.state
        self._taken = {_memory(t.local if isinstance(t, FlatPiece) else t) for t in names.tensors.values()}

    def take(self, param: torch.Tensor, key: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """What the state of `param` has at `key`, if `torch.empty_like(like, dtype=dtype)` would be no different."""
        there: torch.Tensor | None = self._state[param].get(key) if param in self._state else None
        if there is None or type(there) is not (DTensor if isinstance(like, DTensor) else torch.Tensor) or there.requires_grad:
            return None
        if _layout(there) != _layout(like):
            return None
        if (there.shape, there.stride(), there.dtype) != (like.shape, like.stride(), dtype):
            return None
        mine, its = _local(there), _local(like)
        if (mine.shape, mine.stride(), mine.dtype, mine.device) != (its.shape, its.stride(), dtype, its.device):
            return None
        dense = mine.is_contiguous() or mine.is_contiguous(memory_format=_CHANNELS_LAST.get(mine.ndim, torch.contiguous_format))
        memory = _memory(mine)
        if not dense or memory in self._taken:
            return None
        self._taken.add(memory)
        return there


def _layout(tensor: torch.Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _memory(tensor: torch.Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()
