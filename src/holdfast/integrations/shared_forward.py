"""`--validate all-ranks`: where one rank comes to a forward of a sharded model alone, the others make it with it, on its inputs.

For that the ranks meet, through the store, before everything in which they would otherwise wait for each other: each training forward,
each new round through a loader, each barrier. Who waits there looks for a forward that another rank wants to make, receives its inputs
by a broadcast, makes it without gradients, throws the result away and waits on. Generators and training mode are put back.

Costs each training step a meeting. Not possible where ranks have ended already. A forward past FSDP1's wrapper (of an unwrapped model, in
a pipeline) lacks what the wrapper does, the root's own parameters among it: it is led through the wrapper on all ranks.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_map

from holdfast.engine import rng
from holdfast.engine.names import unwrap
from holdfast.engine.store import Store
from holdfast.errors import DeadlineExceeded

POLL = 0.002
"""Seconds between two looks of a rank that meets the others: every training step waits for it."""


class SharedForwards:
    """One rank's part; `models` are the prepared ones, in the same order on all ranks. `patience` in seconds."""

    def __init__(self, store: Store, rank: int, world_size: int, models: list[nn.Module], patience: float) -> None:
        self._store, self.rank, self.world_size, self._models, self._patience = store, rank, world_size, models, patience
        self._meetings = self._shared = 0
        self.active = False
        """This rank is making another one's forward, or its own that the others make, too."""

    def meet(self) -> None:
        """Until all ranks have come to as many meetings; makes the forwards that others want meanwhile.

        Raises:
            DeadlineExceeded: they did not come.
        """
        self._meetings += 1
        key = f"script/meeting/{self._meetings}"
        self._store.publish(f"script/waiting/{self.rank}", str(self._meetings).encode())
        arrived = self._store.add(key, 1)
        end = time.monotonic() + self._patience
        while arrived < self.world_size:
            wanted = self._store.look(f"script/lone/{self._shared + 1}")
            if wanted is not None:
                self._join(json.loads(wanted))
                end = time.monotonic() + self._patience
            elif time.monotonic() > end:
                raise DeadlineExceeded(f"rank {self.rank}: {self.world_size - arrived} ranks did not come to the next step within {self._patience:.0f} s")
            time.sleep(POLL)
            arrived = self._store.add(key, 0)
        if self._meetings > 2 and self.rank == 0:
            self._store.delete(f"script/meeting/{self._meetings - 2}")

    def possible(self, module: nn.Module) -> bool:
        model = self._model_of(module)
        return model is not None and (model is module or getattr(module.forward, "leads", False))

    def _model_of(self, module: nn.Module) -> nn.Module | None:
        return next((m for m in self._models if module is m or module is unwrap(m)), None)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Have the others make this forward, too, once all of them wait in a meeting; False where they do not come."""
        end = time.monotonic() + self._patience
        waiting = 0
        while waiting < self.world_size - 1:
            told = [self._store.look(f"script/waiting/{r}") for r in range(self.world_size) if r != self.rank]
            if any(t == b"ended" for t in told) or time.monotonic() > end:
                return False
            waiting = sum(t is not None and int(t) > self._meetings for t in told)
            time.sleep(POLL)
        self._shared += 1
        index = next(i for i, m in enumerate(self._models) if m is self._model_of(module))
        wish = {"rank": self.rank, "model": index, "training": module.training}
        self._store.publish(f"script/lone/{self._shared}", json.dumps(wish).encode())
        dist.broadcast_object_list([_to(torch.device("cpu"), (args, kwargs))], src=self.rank)
        return True

    def _join(self, wish: dict[str, Any]) -> None:
        self._shared += 1
        module = self._models[wish["model"]]
        generators, training = rng.capture(), module.training
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=wish["rank"])
        device = next((p.device for p in module.parameters() if p.device.type != "meta"), torch.device("cpu"))
        accelerator = rng.accelerator()
        args, kwargs = _to(accelerator if accelerator is not None else device, received[0])
        self.active = True
        try:
            with torch.no_grad():
                module.train(wish["training"])
                module(*args, **kwargs)
        finally:
            self.active = False
            module.train(training)
            rng.restore(generators, "generators")

    def end(self) -> None:
        """This rank comes to no further meeting."""
        self._store.publish(f"script/waiting/{self.rank}", b"ended")


def lead_through_wrapper(wrapper: nn.Module, needed: Callable[[], bool]) -> None:
    """Have forwards of what FSDP1 wraps go through the wrapper where `needed` says so."""
    inner = unwrap(wrapper)
    if inner is wrapper or not isinstance(wrapper, FullyShardedDataParallel):
        return
    original = inner.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs) if needed() else original(*args, **kwargs)

    forward.leads = True  # type: ignore[attr-defined]
    inner.forward = forward


def _to(device: torch.device, values: Any) -> Any:
    return tree_map(lambda v: v.detach().to(device) if isinstance(v, torch.Tensor) else v, values)
