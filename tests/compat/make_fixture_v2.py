"""Makes the committed checkpoint whose layout is of version 2: an adapter on a frozen base that is named, on 2 FSDP2 ranks.

    python tests/compat/make_fixture_v2.py FOLDER BASE

BASE is made, too; its path stands in the receipts. Like `v1`, what is committed is never made anew.
"""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import torch
from compat.make_fixture import fingerprint
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.testing.pool import RankPool

STEP = 2


class Adapted(nn.Module):
    """A frozen body whose weight is kept in bf16 and has an uneven number of rows, one part of it that was changed, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"kept": nn.Linear(4, 5), "changed": nn.Linear(5, 4)})
        self.body.requires_grad_(False)
        self.body["kept"].to(torch.bfloat16)
        self.adapter = nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.adapter(self.body["changed"](self.body["kept"](x.to(torch.bfloat16)).float()))
        return y


def make_base(folder: Path) -> None:
    folder.mkdir(parents=True)
    rows = {"kept.weight": (5, 4), "kept.bias": (5,), "changed.weight": (4, 5), "changed.bias": (4,)}
    tensors = {name: torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape) for name, shape in rows.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def build(base: Path, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Adapted()
    nn.init.constant_(model.adapter.weight, 0.25)
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for part in (*model.body.values(), model):
            fully_shard(part, mesh=mesh)
    holdfast.load_pretrained(model.body, base)
    return model, torch.optim.AdamW(model.adapter.parameters(), lr=0.01)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.linspace(-2, 2, 8).view(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(folder: Path, base: Path) -> None:
    """On each of two ranks: two steps, one save."""
    socket.gethostname = lambda: "host"
    model, optimizer = build(base, sharded=True)
    with torch.no_grad():
        model.body["changed"].bias.mul_(2.0)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        for _ in range(STEP):
            step_of(model, optimizer)
        checkpointer.save(STEP)


def resume(folder: Path, base: Path, sharded: bool) -> tuple[int, dict[str, str], float]:
    """Load the checkpoint; its step, the hash of every tensor as it is in the live objects, and the loss of the next step."""
    model, optimizer = build(base, sharded)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        step = checkpointer.resume()
    names = {id(p): f"model.{name}" for name, p in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {names[id(p)]: p for p in model.parameters()}
    for p, state in optimizer.state.items():
        tensors |= {f"optimizer.{names[id(p)]}.{key}": value for key, value in state.items()}
    return step, {name: fingerprint(tensor) for name, tensor in tensors.items()}, step_of(model, optimizer)


def main(folder: Path, base: Path) -> None:
    make_base(base)
    with RankPool() as pool:
        pool.run(train, 2, folder, base)
        step, prints, loss = pool.run(resume, 2, folder, base, True)[0]
    shutil.rmtree(folder / ".holdfast")
    shutil.copytree(base, folder / "base")
    print(f"step {step}, next loss {loss!r}")
    for name, value in sorted(prints.items()):
        print(f'    "{name}": "{value}",')


if __name__ == "__main__":
    from compat import (
        make_fixture_v2,  # ranks are told functions by module and name, and `__main__` is another one there
    )

    make_fixture_v2.main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
