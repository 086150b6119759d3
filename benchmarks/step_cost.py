"""What a Checkpointer costs each step when nothing is saved: hooks, heartbeat, and the look of `one_caller` (one line of JSON).

    torchrun --nproc_per_node 2 benchmarks/step_cost.py --folder DIR

Steps of an optimizer whose parameters have no gradients take some microseconds, so that what the hooks add shows. The arms follow
each other round by round (bare, hooks, one_caller), so that a change of the machine's mood meets all; an arm is its median. The
heartbeat runs beside the steps of all but the bare arm; its own processor time is taken while the ranks sleep, per second of a run.
All numbers are of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

ARMS: dict[str, dict[str, bool] | None] = {"bare": None, "hooks": {}, "one_caller": {"one_caller": True}}


def stepping(arm: str, folder: Path, steps: int) -> tuple[float, float]:
    """Seconds of a step, and processor seconds of a second in which nothing is done."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = ARMS[arm]
    context = nullcontext() if options is None else holdfast.Checkpointer(folder, model=model, optimizer=optimizer, **options)
    with context:
        for _ in range(50):
            optimizer.step()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.step()
        taken = (time.perf_counter() - start) / steps
        used, start = time.process_time(), time.perf_counter()
        time.sleep(4.2)  # two heartbeats
        idle = (time.process_time() - used) / (time.perf_counter() - start)
        dist.barrier()
    return taken, idle


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    readings: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for number in range(args.rounds):
        for arm in ARMS:
            readings[arm].append(stepping(arm, args.folder / f"{number}-{arm}", args.steps))
    step = {arm: statistics.median(taken for taken, _ in found) for arm, found in readings.items()}
    idle = {arm: statistics.median(used for _, used in found) for arm, found in readings.items()}
    if dist.get_rank() == 0:
        beside = {"hooks": "heartbeat_us_per_s", "one_caller": "heartbeat_and_looks_us_per_s"}
        row = {"bare_step_us": round(step["bare"] * 1e6, 1)}
        row |= {f"{arm}_add_us": round((step[arm] - step["bare"]) * 1e6, 1) for arm in beside}
        row |= {name: round((idle[arm] - idle["bare"]) * 1e6) for arm, name in beside.items()}
        print(json.dumps(row), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
