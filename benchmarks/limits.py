"""What memory and disk allow: the same bytes as a rank's part of a save, without any engine (one line of JSON from rank 0).

    torchrun --nproc_per_node 2 benchmarks/limits.py --bytes 604000000 --folder DIR

All ranks work at the same time, each on a file of its own. Medians over the rounds, the slower rank counts:
memcpy_s      copy the bytes into memory that exists
write_s       write them past the page cache, 16 MiB at a time, and fsync
prototype_s   the bare save: copy, xxh3-128 of every MiB, direct write, fsync; prototype_cpu_s: CPU seconds of all ranks in it
read_s        read them from the disk past the page cache, 16 MiB at a time
read_warm_s   read them from the page cache
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

PIECE, BLOCK = 16 << 20, 1 << 20


def write(path: Path, image: mmap.mmap, hashed: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0))
    view = memoryview(image)
    for start in range(0, len(image), PIECE):
        piece = view[start : start + PIECE]
        for offset in range(0, len(piece) if hashed else 0, BLOCK):
            xxhash.xxh3_128_hexdigest(piece[offset : offset + BLOCK])
        os.write(descriptor, piece)
    os.fsync(descriptor)
    os.close(descriptor)


def read(path: Path, image: mmap.mmap, direct: bool) -> None:
    descriptor = os.open(path, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0))
    view = memoryview(image)
    for start in range(0, len(image), PIECE):
        os.preadv(descriptor, [view[start : start + PIECE]], start)
    os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    size = -(-args.bytes // 4096) * 4096
    path = args.folder / f"limit-{dist.get_rank()}"
    args.folder.mkdir(parents=True, exist_ok=True)
    image = mmap.mmap(-1, size)
    staging = torch.frombuffer(image, dtype=torch.uint8)
    state = torch.randint(0, 255, (size,), dtype=torch.uint8)
    staging.copy_(state)

    def prototype() -> None:
        staging.copy_(state)
        write(path, image, hashed=True)

    work: dict[str, Callable[[], object]] = {
        "memcpy_s": lambda: staging.copy_(state),
        "write_s": lambda: write(path, image, hashed=False),
        "prototype_s": prototype,
        "read_s": lambda: read(path, image, direct=True),
        "read_warm_s": lambda: read(path, image, direct=False),
    }
    times: dict[str, list[float]] = {name: [] for name in [*work, "prototype_cpu_s"]}
    for _ in range(args.rounds):
        for name, call in work.items():
            if name == "read_warm_s":
                read(path, image, direct=False)
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            call()
            row = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
            dist.all_reduce(row, op=dist.ReduceOp.MAX)
            dist.all_reduce(used)
            times[name].append(row.item())
            if name == "prototype_s":
                times["prototype_cpu_s"].append(used.item())
    path.unlink()
    if dist.get_rank() == 0:
        print(json.dumps({"bytes": size} | {name: statistics.median(t) for name, t in times.items()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
