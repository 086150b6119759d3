"""Makes the committed checkpoint of format version 1: a tiny model on 2 FSDP2 ranks, AdamW, two steps.

    python tests/compat/make_fixture.py FOLDER

What is committed is never made anew: it is proof that checkpoints of that version can be read for ever. A new version of the
format gets a folder of its own beside `v1`. Prints the hash of every tensor, for `test_format.py`.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.testing.pool import RankPool

STEP = 2


class Tiny(nn.Module):
    """Uneven rows (5), fewer rows than ranks (1), a tied weight, persistent buffers (one of bf16), a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.gate = nn.Linear(4, 1)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 4), requires_grad=False)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.bfloat16))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = (self.embed(ids) + self.frozen) * self.scale.float()
        self.calls += 1
        return self.head(x) * torch.sigmoid(self.gate(x))


def build(sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, object]]:
    """Model, optimizer and the caller's own state, as they are before the first step."""
    model = Tiny()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    groups = [{"params": list(model.embed.parameters())}, {"params": list(model.gate.parameters()), "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01), {"images": 0, ("odd", 1): float("inf"), "order": [3, 1, None]}


def train(folder: Path) -> None:
    """On each of two ranks: two steps, one save."""
    socket.gethostname = lambda: "host"  # the receipts name the host, and the fixture should not depend on it
    model, optimizer, counters = build(sharded=True)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer, extra={"counters": counters}) as checkpointer:
        for step in range(STEP):
            ids = torch.tensor([[step, 1, 4]])
            nn.functional.cross_entropy(model(ids).transpose(1, 2), ids.roll(-1, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            counters["images"] = step + 1
        checkpointer.save(STEP)


def resume(folder: Path, sharded: bool) -> tuple[int, dict[str, str], dict[str, object]]:
    """Load the newest checkpoint; its step, the hash of every tensor as it is in the live objects, the caller's own state."""
    model, optimizer, counters = build(sharded)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer, extra={"counters": counters}) as checkpointer:
        step = checkpointer.resume()
    names = {id(p): f"model.{name}" for name, p in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {names[id(p)]: p for p in model.parameters()}
    tensors |= {f"model.{name}": b for name, b in model.named_buffers()}
    for p, state in optimizer.state.items():
        tensors |= {f"optimizer.{names[id(p)]}.{key}": value for key, value in state.items()}
    return step, {name: fingerprint(tensor) for name, tensor in tensors.items()}, counters


def fingerprint(tensor: torch.Tensor) -> str:
    """Dtype, global shape and the first 16 digits of the SHA-256 of the whole tensor's bytes."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(whole.dtype)[6:]} {list(whole.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def main(folder: Path) -> None:
    with RankPool() as pool:
        pool.run(train, 2, folder)
        step, prints, counters = pool.run(resume, 2, folder, True)[0]
    shutil.rmtree(folder / ".holdfast")
    print(f"step {step}, {counters}")
    for name, value in sorted(prints.items()):
        print(f'    "{name}": "{value}",')


if __name__ == "__main__":
    import make_fixture  # ranks are told functions by module and name, and `__main__` is another one there

    make_fixture.main(Path(sys.argv[1]).absolute())
