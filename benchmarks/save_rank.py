"""One rank of a measured job: saves a few times with one engine and prints what each cost (rank 0, one line of JSON).

    torchrun --nproc_per_node 2 benchmarks/save_rank.py --engine "dcp.save" --case dense --folder DIR

A step is a sleep (a device computes, the CPU is free) and a real optimizer step. Every save is one of three kinds:
calm     the next optimizer step follows after the sleep: how long is the training thread blocked?
at_once  the next optimizer step follows at once: the worst case for a copy that runs beside the training
plain    nothing but the save: how long until it is durable, and how much CPU time, on all ranks and their helpers, does it take?

Printed for each: stall_s (blocked in the request and, beyond an undisturbed step, in the optimizer step after it), durable_s
(request to the end of the engine's own waiting), own_blocked_s (by the engine's own clock where it has one: without what
the writing beside it takes from a step on a machine that has no core to spare), cpu_s, bytes on disk, memory (resident bytes of a rank and its helpers at the
peak, beyond the same process before the engine was made and after its first step), and memcpy_s: one copy of the rank's state,
on all ranks at the same time, into memory that was touched before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from engines import ENGINES, Engine
from states import CASES, make_optimizer, set_gradients, sharded_model, write_base

KINDS = ("calm", "at_once", "plain")


def cpu_seconds() -> float:
    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in [me, *me.children(recursive=True)])


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process and VmRSS of its helpers, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        own = next(int(line.split()[1]) for line in status if line.startswith(field + ":")) * 1024
    return own + sum(p.memory_info().rss for p in psutil.Process().children(recursive=True))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--wrap", choices=("fsdp2", "fsdp1", "none"), default="fsdp2")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["calm", "plain", "calm", "plain", "calm", "plain", "at_once"])
    parser.add_argument("--think", type=float, default=1.0, help="seconds that the device computes after a request")
    parser.add_argument("--keep", action="store_true", help="keep the last save")
    return parser.parse_args()


def memcpy_seconds(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One copy of all that a rank holds, into memory that exists: what a capture cannot be faster than."""
    held = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in held]
    targets = [torch.empty_like(t).copy_(t) for t in local]
    times = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        with torch.no_grad():
            torch._foreach_copy_(targets, local)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def one_save(engine: Engine, i: int, kind: str, optimizer: torch.optim.Optimizer, think: float) -> tuple[float, float]:
    """(stall, durable) in seconds."""
    start = time.perf_counter()
    engine.save(i)
    blocked = time.perf_counter() - start
    if kind == "plain":
        engine.wait()
        return blocked, time.perf_counter() - start
    if kind == "calm":
        time.sleep(think)
    now = time.perf_counter()
    optimizer.step()
    step = time.perf_counter() - now
    engine.wait()
    durable = time.perf_counter() - start
    now = time.perf_counter()
    optimizer.step()
    return blocked + max(0.0, step - (time.perf_counter() - now)), durable


def clear(folder: Path) -> None:
    for old in folder.iterdir():
        if old.name != ".holdfast":
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def main() -> None:
    args = parse()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    base = args.folder.with_name("base") if args.case == "lora" else None
    if rank == 0:
        shutil.rmtree(args.folder, ignore_errors=True)
        args.folder.mkdir(parents=True)
        if base is not None:
            write_base(base)
    dist.barrier()
    model = sharded_model(args.case, args.wrap, base)
    optimizer = make_optimizer(args.case, model)
    set_gradients(model)
    optimizer.step()
    memcpy = memcpy_seconds(model, optimizer)
    before = resident("VmRSS")
    engine = ENGINES[args.engine](args.folder, model, optimizer)
    optimizer.step()
    saves = []
    for i, kind in enumerate(args.kinds, 1):
        time.sleep(3.0 if i == 1 else 0.3)  # a run saves for the first time long after its first step, when its staging is there
        dist.barrier()
        reset_peak()
        cpu = cpu_seconds()
        stall, durable = one_save(engine, i, kind, optimizer, args.think)
        sums = torch.tensor([cpu_seconds() - cpu, resident("VmHWM") - before], dtype=torch.float64)
        worst = torch.tensor([stall, durable], dtype=torch.float64)
        dist.all_reduce(sums)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if rank == 0:
            written = sum(f.stat().st_size for f in args.folder.rglob("*") if f.is_file())
            own = engine.blocked() if engine.blocked is not None else stall
            row = {"kind": kind, "own_blocked_s": own, "stall_s": worst[0].item(), "durable_s": worst[1].item(), "cpu_s": sums[0].item()}
            saves.append(row | {"memory": sums[1].item() / world_size, "bytes": written})
            if not (args.keep and i == len(args.kinds)):
                clear(args.folder)
        dist.barrier()
    if rank == 0:
        print(json.dumps({"engine": args.engine, "case": args.case, "memcpy_s": memcpy, "saves": saves}), flush=True)
    dist.barrier()
    engine.close()
    dist.barrier()
    os._exit(0)  # a peer's helper processes and threads end with it


if __name__ == "__main__":
    main()
