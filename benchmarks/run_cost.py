"""What checkpoints add to a whole run: 200 real steps on CPU ranks, saving every 20, against the same run without (one line of JSON).

    torchrun --nproc_per_node 2 benchmarks/run_cost.py --engine holdfast --folder DIR

12 layers of 1024 × 1024 with AdamW (150 MB of state), batches of 64. Forward, backward and reduce-scatter are real, so the
writing competes with the training for the same two cores, as it would not beside a device. Three runs of the loop follow each
other in one process: to warm up (20 steps), without saves, with saves; the last save is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from engines import ENGINES, Engine
from states import bare_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, LAYERS, BATCH = 1024, 12, 64


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, every: int, engine: Engine | None) -> float:
    generator = torch.Generator().manual_seed(dist.get_rank())
    saved = 0
    dist.barrier()
    start = time.perf_counter()
    for step in range(1, steps + 1):
        model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if engine is not None and step % every == 0:
            if saved:
                engine.wait()
            saved += 1
            engine.save(saved)
    if engine is not None:
        engine.wait()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        shutil.rmtree(args.folder, ignore_errors=True)
        args.folder.mkdir(parents=True)
    dist.barrier()
    model = bare_model("dense", WIDTH, LAYERS)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = ENGINES[args.engine](args.folder, model, optimizer)
    run(model, optimizer, args.every, args.every, None)
    plain = run(model, optimizer, args.steps, args.every, None)
    saving = run(model, optimizer, args.steps, args.every, engine)
    if dist.get_rank() == 0:
        print(json.dumps({"engine": args.engine, "plain_s": plain, "extra_s": saving - plain}), flush=True)
    dist.barrier()
    engine.close()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
