"""What the tests of adapters have in common: a step of a small language model, and its parameters put together from all ranks."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One optimizer step on a fixed text; its loss."""
    ids = torch.arange(16).view(2, 8)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter by the name below all wrappers; all ranks call it."""
    with FullyShardedDataParallel.summon_full_params(model):
        found = {re.sub(r"_fsdp_wrapped_module\.|^module\.", "", n): p for n, p in model.named_parameters()}
        return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in found.items()}
