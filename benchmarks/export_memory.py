"""How much memory an export takes: a large checkpoint (nothing but zeros, so that it takes no room itself) to each target.

    python benchmarks/export_memory.py [--gb 10] [--folder FOLDER] [--to transformers --to dcp ...]

Each export runs in a process of its own: what is printed is the peak of its resident memory, and how much of that it had before
the export began (Python, torch and this package). The export itself takes its full size on the disk and is removed again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGETS = ("transformers", "dcp", "accelerate", "accelerate-fsdp")
ROWS, COLUMNS = 4096, 8192
"""Of a weight: 128 MiB."""


def write_zeros(folder: Path, gb: float, world_size: int = 2) -> int:
    """`folder/checkpoint-1` with a model and AdamW's state of it, `gb` GB in all, in sparse files; returns the bytes of tensors."""
    import torch

    from holdfast.core.boxes import one_rank
    from holdfast.core.documents import canonical, digest
    from holdfast.core.layout import Layout, OptimizerSlot, TensorSpec
    from holdfast.core.manifest import BLOCK, Announcement, Receipt, attempt_name, layout_file, rank_file, receipt_file
    from holdfast.core.safetensors import build_header
    from holdfast.engine import rng, statetree
    from holdfast.engine.commit import write_manifest
    from holdfast.engine.plan import STATE_TENSOR
    from holdfast.storage import LocalFolder

    weights = max(1, round(gb * 1e9 / (3 * 4 * ROWS * COLUMNS)))
    tensors: dict[str, TensorSpec] = {}
    for i in range(weights):
        name, shape, at = f"model.layers.{i}.weight", (ROWS, COLUMNS), one_rank(i % world_size)
        tensors[name] = TensorSpec("F32", shape, at)
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{name}.{key}"] = TensorSpec("F32", shape, at, 0, OptimizerSlot("", name, key))
    layout = Layout(world_size, tensors, {})
    storage, name, attempt = LocalFolder(folder), "checkpoint-1", attempt_name("ab" * 8, 1)
    storage.make_folder(name)
    storage.put(f"{name}/{layout_file(layout.digest)}", layout.encoded)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Zeros"]}))
    parameters = [n for n in tensors if n.startswith("model.")]
    values = statetree.encode({"lr": 1e-3, "betas": (0.9, 0.999)}, "", "", {})
    state = {"optimizer": {"groups": [{"params": parameters, "values": values}], "values": {}}}
    zeros = digest(bytes(BLOCK))
    announcements = []
    for rank in range(world_size):
        small = canonical({"state": state, "rng": rng.capture(), "step": 1, "rank": rank})
        mine = [(n, "F32", spec.shape or ()) for n, spec in tensors.items() if spec.placement == one_rank(rank)]
        header, entries = build_header([*mine, (STATE_TENSOR, "U8", (len(small),))], {"format": "pt", "holdfast": "1"})
        path, size = folder / name / rank_file(rank, attempt), entries[STATE_TENSOR].stop
        with path.open("wb") as file:
            file.write(header)
            file.truncate(size)
            file.seek(entries[STATE_TENSOR].start)
            file.write(small)
        hashes = [zeros] * -(-size // BLOCK)
        with path.open("rb") as file:
            for index in {*range(-(-len(header) // BLOCK)), *range(entries[STATE_TENSOR].start // BLOCK, len(hashes))}:
                file.seek(index * BLOCK)
                hashes[index] = digest(file.read(BLOCK))
        receipt = Receipt(
            attempt=attempt, run_sequence=1, save_index=1, step=1, rank=rank, world_size=world_size, layout=layout.digest, size=size,
            block_size=BLOCK, blocks=tuple(hashes), plain=digest(b""), host="", captured_s=0.0, written_s=0.0,
        )  # fmt: skip
        storage.put(f"{name}/{receipt_file(rank, attempt)}", receipt.encoded())
        announcements.append(Announcement.of(receipt))
    write_manifest(storage, name, announcements, 1, 1)
    return sum(torch.Size(spec.shape or ()).numel() * 4 for spec in tensors.values())


def export(checkpoint: Path, out: Path, to: str) -> None:
    """In a process of its own: one line of JSON."""
    import torch.distributed.checkpoint  # noqa: F401  (some exports need it; it is no memory of theirs)

    from holdfast.engine.export import Request, export_checkpoint

    before = _resident("VmRSS")
    start = time.perf_counter()
    export_checkpoint(Request(checkpoint, out, to))
    print(json.dumps({"seconds": time.perf_counter() - start, "before": before, "peak": _resident("VmHWM")}))


def _resident(field: str) -> int:
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=10.0, help="size of the checkpoint in GB")
    parser.add_argument("--folder", type=Path, help="where to work; default: the system's folder for temporary files")
    parser.add_argument("--to", choices=TARGETS, action="append")
    parser.add_argument("--only", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        export(*options.only, options.to[0])
        return 0
    with tempfile.TemporaryDirectory(prefix="holdfast-export-", dir=options.folder) as root:
        size = write_zeros(Path(root), options.gb)
        print(f"a checkpoint of {size / 1e9:.1f} GB\n{'to':<18}{'written GB':>12}{'seconds':>10}{'peak MB':>10}{'before MB':>11}{'its own MB':>12}")
        worst = 0
        for to in options.to or TARGETS:
            out = Path(root) / "out"
            command = [sys.executable, __file__, "--only", root, str(out), "--to", to]
            told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
            written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            shutil.rmtree(out)
            own = told["peak"] - told["before"]
            worst = max(worst, told["peak"])
            print(
                f"{to:<18}{written / 1e9:>12.1f}{told['seconds']:>10.1f}{told['peak'] / 1e6:>10.0f}{told['before'] / 1e6:>11.0f}"
                f"{own / 1e6:>12.0f}", flush=True,
            )  # fmt: skip
    print(f"largest peak: {worst / 1e6:.0f} MB")
    return 0 if worst < 1e9 else 1


if __name__ == "__main__":
    sys.exit(main())
