"""What CPU ranks cannot show, on one accelerator in a few minutes: python tests/device/check_device.py [FOLDER]

* gate in streams: the saved weights are those of the save although the host has enqueued steps far ahead;
* pinned staging: the copies run beside the compute, so that `save` returns at once and a step is held up less than a copy takes;
* the default mode: `save` returns with the state copied, and changes right after it do not reach the checkpoint;
* one caller: two ranks on the one device (gloo), saved by rank 0 alone, each with its own state of that step.

Prints one line a check and ends with exit code 1 if one failed. Not part of the test command: it needs an accelerator.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import holdfast

WIDTH, LAYERS, AHEAD = 4096, 12, 30
failures: list[str] = []


def check(what: str, good: bool, note: str = "") -> None:
    print(f"{'ok    ' if good else 'FAILED'} {what}{f' ({note})' if note else ''}", flush=True)
    if not good:
        failures.append(what)


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_weights(folder: Path, device: torch.device) -> list[torch.Tensor]:
    model, optimizer = build(device)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
    return [p.detach().clone() for p in model.parameters()]


def overlap(folder: Path, device: torch.device, mode: bool) -> None:
    model, optimizer = build(device)
    x = torch.randn(512, WIDTH, device=device)
    checkpointer = holdfast.Checkpointer(folder, model=model, optimizer=optimizer, overlap=mode)
    for _ in range(3):
        step(model, optimizer, x)
    checkpointer.save(1)
    checkpointer.wait()
    for _ in range(AHEAD):  # the host is far ahead of the device now
        step(model, optimizer, x)
    expected = [p.detach().clone() for p in model.parameters()]
    start = time.perf_counter()
    save = checkpointer.save(2)
    returned = time.perf_counter() - start
    for _ in range(AHEAD):
        step(model, optimizer, x)
    torch.accelerator.synchronize()
    checkpointer.close()
    name = "overlap" if mode else "default"
    good = all(map(torch.equal, saved_weights(folder, device), expected))
    check(f"{name}: the checkpoint is the state of the save", good)
    note = f"returned after {returned * 1e3:.2f} ms, blocked {save.blocked_s * 1e3:.2f} ms, copied in {save.captured_s * 1e3:.1f} ms"
    check(f"{name}: timing", returned < 0.05 if mode else True, note)
    if mode and device.type == "cuda":
        check("overlap: the staging is pinned", checkpointer._saver._staging._bytes.is_pinned())


def one_caller(rank: int, folder: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = {"sum": 0.0}
    checkpointer = holdfast.Checkpointer(folder, model=model, optimizer=optimizer, extra={"own": own}, one_caller=True)
    for number in range(1, 41):
        loss = model(torch.randn(64, 256, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        own["sum"] = number
        if rank == 0 and number in (10, 40):
            checkpointer.save(number)
    checkpointer.close()
    states = [(s.step, s.state) for s in checkpointer.saves]
    assert states == [(10, "complete"), (40, "complete")], states
    dist.destroy_process_group()


def main() -> int:
    if not torch.accelerator.is_available():
        print("there is no accelerator here")
        return 2
    device = torch.accelerator.current_accelerator()
    assert device is not None
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="holdfast-device-"))
    print(f"torch {torch.__version__}, {device}", flush=True)
    try:
        for mode in (True, False):
            overlap(folder / str(mode), device, mode)
        try:
            mp.spawn(one_caller, (str(folder / "one"), 29571), nprocs=2)  # type: ignore[no-untyped-call]
            check("one caller: both ranks' states of steps 10 and 40", True)
        except Exception as error:
            check("one caller: both ranks' states of steps 10 and 40", False, str(error).strip().splitlines()[-1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
