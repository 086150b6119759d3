"""One rank of a measured load: puts a saved checkpoint back, cold and warm, and prints the seconds (rank 0, one line of JSON).

    torchrun --nproc_per_node 2 benchmarks/load_rank.py --engine holdfast --case dense --folder DIR --step 5

`folder` holds what `save_rank.py --keep` left there, of any number of ranks and any sharding that the engine takes. Cold: the
files were pushed out of the page cache before; warm: they were read before. The slowest rank counts. `memory`: resident bytes
of a rank at the peak beyond those before the load, after a first load that touches code and allocators.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from engines import ENGINES
from save_rank import reset_peak, resident
from states import CASES, make_optimizer, set_gradients, sharded_model


def evict(folder: Path) -> None:
    """Push the files of `folder` out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def touch(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--wrap", choices=("fsdp2", "fsdp1", "none"), default="fsdp2")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    model = sharded_model(args.case, args.wrap)
    optimizer = make_optimizer(args.case, model)
    set_gradients(model)
    optimizer.step()
    engine = ENGINES[args.engine](args.folder, model, optimizer)
    engine.load(args.step)
    times: dict[str, list[float]] = {"cold_s": [], "warm_s": []}
    memory = []
    for _ in range(args.rounds):
        for name, prepare in (("cold_s", evict), ("warm_s", touch)):
            if rank == 0:
                prepare(args.folder)
            dist.barrier()
            reset_peak()
            before, start = resident("VmRSS"), time.perf_counter()
            engine.load(args.step)
            row = torch.tensor([time.perf_counter() - start, resident("VmHWM") - before], dtype=torch.float64)
            dist.all_reduce(row, op=dist.ReduceOp.MAX)
            times[name].append(row[0].item())
            memory.append(row[1].item())
    if rank == 0:
        medians = {name: statistics.median(t) for name, t in times.items()}
        what = {"engine": args.engine, "case": args.case, "wrap": args.wrap, "ranks": dist.get_world_size()}
        print(json.dumps(what | medians | {"memory": statistics.median(memory)}), flush=True)
    dist.barrier()
    engine.close()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
