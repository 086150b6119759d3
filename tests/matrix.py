"""Every sharding into every other: `make matrix`, and the functions that the tests use for some of the pairs.

For each optimizer a run of three steps is saved under every sharding and loaded under every one, its own included. All ranks
see the same batch, so that every sharding computes the same function, and the whole state (weights, optimizer state, param
groups) is compared to the bit with that of the live objects that were saved, put together by torch's own all-gathers. The
next three losses are those of the run that went on: to the bit under the same sharding, else within `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.engine.blocks import BUFFER, WORKERS
from holdfast.engine.names import named_state
from holdfast.storage import LocalFolder
from holdfast.testing.pool import RankFailure, RankPool

SHARDINGS = [
    ("none", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp1-flat", 3), ("fsdp2", 2), ("fsdp2", 3), ("offload", 4), ("hsdp", 4),
]  # fmt: skip
OPTIMIZERS = ["adamw", "prodigy"]
WIDTH = 768
"""Two weights of 2.25 MiB: several hash blocks each."""
STEPS = 3
TOLERANCE = 1e-5
"""Of a loss, relative: other ranks add up the same fp32 numbers in another order."""


class CountingFolder(LocalFolder):
    """A folder that adds up what is read."""

    read = 0

    def get(self, path: str) -> bytes:
        data = super().get(path)
        self.read += len(data)
        return data

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        super().read_into(path, offset, target)
        self.read += len(target)


@dataclass
class Run:
    """What one rank did: digests of the whole state, and losses. After a load also bytes and memory."""

    begun_at: int
    state: dict[str, Any]
    losses: list[float]
    collectives: int = 0
    read: int = 0
    """Bytes from files, documents and headers included."""
    held: int = 0
    """Bytes of this rank's own part of the state."""
    extra: int = 0
    """Bytes by which the process grew at its peak beyond what it had before and the new optimizer state."""


def save(folder: Path, sharding: str, optimizer: str, width: int = WIDTH) -> Run:
    """Train, save, note the state, go on."""
    model, opt, checkpointer = _begin(folder, sharding, optimizer, width)
    with checkpointer:
        for step in range(STEPS):
            _step(model, opt, step)
        checkpointer.save(STEPS)
    return Run(0, _digests(model, opt), [_step(model, opt, step) for step in range(STEPS, 2 * STEPS)])


def load(folder: Path, sharding: str, optimizer: str, width: int = WIDTH) -> Run:
    """Resume, note the state, go on."""
    storage = CountingFolder(folder)
    model, opt, checkpointer = _begin(storage, sharding, optimizer, width)
    checkpointer.resume()  # code and documents that a process touches for the first time count in its resident size
    opt.state.clear()
    before, calls, already = _peak_memory(reset=True), jobs.collectives(), storage.read
    step = checkpointer.resume()
    calls = jobs.collectives() - calls
    state = sum(_nbytes(v) for values in opt.state.values() for v in values.values() if isinstance(v, torch.Tensor))
    extra = _peak_memory() - before - state
    held = state + sum(_nbytes(getattr(p, "local", p)) for p in named_state({"": model}).tensors.values())
    run = Run(step, _digests(model, opt), [], calls, storage.read - already, held, max(0, extra))
    run.losses = [_step(model, opt, s) for s in range(step, step + STEPS)]
    checkpointer.close()
    return run


def _begin(
    folder: Path | LocalFolder, sharding: str, optimizer: str, width: int
) -> tuple[nn.Module, Any, holdfast.Checkpointer]:
    model = jobs.build(sharding, width).eval()  # dropout would draw from each rank's own generator
    opt = jobs.make_optimizer(optimizer, model)
    return model, opt, holdfast.Checkpointer(folder, model=model, optimizer=opt)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    ids = torch.randint(0, 7, (4, 6), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(ids).float().transpose(1, 2), ids.roll(-1, 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    def digest(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        data = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
        return str(value.dtype), tuple(value.shape), hashlib.sha256(data.numpy().tobytes()).hexdigest()

    return {name: digest(value) for name, value in jobs.snapshot(model, optimizer).items()}


def _nbytes(value: torch.Tensor) -> int:
    return (value.to_local() if isinstance(value, DTensor) else value).nbytes


def _peak_memory(reset: bool = False) -> int:
    """The largest resident size of this process since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def problems(saved: list[Run], loaded: list[Run], same: bool) -> Iterator[str]:
    """What is wrong with a pair; nothing, if it is equal."""
    for rank, run in enumerate(loaded):
        odd = sorted(n for n in run.state.keys() | saved[0].state.keys() if run.state.get(n) != saved[0].state.get(n))
        if odd:
            yield f"rank {rank}: {', '.join(odd[:3])} differ"
        if run.begun_at != STEPS or run.collectives:
            yield f"rank {rank} began at {run.begun_at} after {run.collectives} collectives"
        pairs = list(zip(run.losses, saved[0].losses, strict=True))
        if any(a != b if same else abs(a - b) > TOLERANCE * abs(b) for a, b in pairs):
            yield f"rank {rank}: losses {run.losses}, should be {saved[0].losses}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append")
    parser.add_argument("--width", type=int, default=2 * WIDTH, help="of the two square weights; the rest is small")
    options = parser.parse_args()
    # What a rank frees goes back to the system at once, so that memory is seen and not what the allocator keeps of it.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 << 10)
    wrong, pairs = [], 0
    with tempfile.TemporaryDirectory(prefix="holdfast-matrix-") as root, RankPool() as pool:
        for optimizer in options.optimizer or OPTIMIZERS:
            print(f"\n{optimizer:<14}{'':<16}state and losses      read MiB   own MiB   amplification   extra MiB   (largest rank)")
            for sharding, ranks in SHARDINGS:
                folder = Path(root) / optimizer
                folder.mkdir()
                with contextlib.redirect_stdout(None):
                    saved = pool.run(save, ranks, folder, sharding, optimizer, options.width, timeout=120)
                for other, world_size in SHARDINGS:
                    pairs += 1
                    found, figures = [], ""
                    try:
                        with contextlib.redirect_stdout(None):
                            loaded = pool.run(load, world_size, folder, other, optimizer, options.width, timeout=120)
                    except RankFailure as failure:
                        found = [str(failure)]
                    else:
                        found = list(problems(saved, loaded, (sharding, ranks) == (other, world_size)))
                        figures = _figures(loaded)
                    name = f"{sharding} x{ranks}", f"{other} x{world_size}"
                    print(f"{name[0]:<14}> {name[1]:<14}{'DIFFERENT' if found else 'equal':<20}{figures}", flush=True)
                    wrong += [f"{optimizer}, {name[0]} > {name[1]}: {line}" for line in found]
                shutil.rmtree(folder)
    print(f"\n{pairs - len({w.partition(':')[0] for w in wrong})} of {pairs} pairs are equal. {WORKERS} readers have a buffer of {BUFFER >> 10} KiB each.")
    print("\n".join(wrong))
    return 1 if wrong else 0


def _figures(runs: list[Run]) -> str:
    most = max(runs, key=lambda run: run.read)
    mib = float(1 << 20)
    extra = max(run.extra for run in runs)
    return f"{most.read / mib:>10.2f}{most.held / mib:>10.2f}{most.read / most.held:>16.2f}{extra / mib:>12.1f}"


if __name__ == "__main__":
    import matrix  # by its name, under which the ranks find it, too

    sys.exit(matrix.main())
