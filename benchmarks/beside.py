"""Does the writing leave the training its interpreter? Iterations per second while 20,000 tensors are saved (one line of JSON).

    torchrun --nproc_per_node 1 benchmarks/beside.py --folder DIR

One process, so that the second core is free for the service thread: what is measured is the interpreter's lock, not the cores.
The loop is of tiny steps (a matrix of 16 × 16), each a few dozen calls into torch; it is timed undisturbed and for as long as a
save is under way, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from states import make_optimizer, set_gradients, sharded_model


def iterations(until: Callable[[int], bool]) -> float:
    """Tiny steps per second for as long as `until(iterations done)` does not hold."""
    weight = torch.randn(16, 16, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    done, start = 0, time.perf_counter()
    while not until(done):
        for _ in range(10):
            (weight @ weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        done += 10
    return done / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    from holdfast import Checkpointer

    model = sharded_model("small", "fsdp2")
    optimizer = make_optimizer("small", model)
    checkpointer = Checkpointer(args.folder, model=model, optimizer=optimizer, overlap=True)
    set_gradients(model)
    optimizer.step()
    time.sleep(1.0)
    calm, busy, stalls = [], [], []
    for i in range(1, args.rounds + 1):
        calm.append(iterations(lambda done: done >= 1000))
        save = checkpointer.save(i)
        busy.append(iterations(lambda _, save=save: save.finished.is_set()))
        stalls.append(save.blocked_s)
        checkpointer.wait()
    row = {"calm_per_s": statistics.median(calm), "busy_per_s": statistics.median(busy)}
    row["kept"] = statistics.median(b / c for b, c in zip(busy, calm, strict=True))
    print(json.dumps(row | {"stall_s": statistics.median(stalls)}), flush=True)
    checkpointer.close()
    os._exit(0)


if __name__ == "__main__":
    main()
