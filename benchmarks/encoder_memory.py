"""Memory and time of a text encoder that is cut over 1, 2, 4 and 8 ranks while it encodes 200 captions (a table and a line of JSON).

    OMP_NUM_THREADS=1 python benchmarks/encoder_memory.py [--captions 200] [--width 320] [--ranks 1 2 4 8]

What runs is the Flux2 recipe's own encoding with `--fsdp_text_encoder`, with a random Mistral3 in fp32 (of whose 32 layers it reads
30). The ranks are processes with a gloo group on the cores of this machine. A rank's peak is its resident memory at the highest beyond
what it had before, when it had encoded a caption with a tiny encoder, which loads all libraries; the table has the highest rank's, and what of it is not the rank's share
of the encoder: gathered layers, activations, buffers. Seconds are the slowest rank's, the reading of the encoder included. Then the
same is done again in the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from save_rank import reset_peak, resident

LENGTH = 48  # tokens of a caption; the system's message has 32 of them
MB = 1e6
# Else glibc's heap keeps much of what has been freed, and the peak is of that.
UNKEPT = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def one_rank(warm: Path, base: Path, out: Path, count: int, told: Path) -> None:
    """What one rank does: a caption with the tiny encoder in `warm`, then all of them with that of `base`."""
    import torch

    from holdfast.engine.meta import parameters_on_meta
    from holdfast.recipes import flux2_lora as recipe
    from holdfast.training.continuation import fingerprints
    from holdfast.training.flux2 import family_of
    from holdfast.training.flux2_text import build_encoder, captions_of
    from holdfast.training.parts import Parts, give_back_memory
    from holdfast.training.setup import configure_logging, make_accelerator

    configure_logging()
    family = family_of(base)

    def parts(base: Path, out: Path) -> Parts[Any]:
        config = recipe.Config(
            pretrained_model_name_or_path=str(base), output_dir=str(out), fsdp_text_encoder=True, mixed_precision="no", report_to="none",
            max_sequence_length=LENGTH,
        )  # fmt: skip
        return Parts(config, make_accelerator(config), base, fingerprints(base, family.parts, None))

    here = parts(base, out)
    with parameters_on_meta():
        encoder = build_encoder(base, max(family.layers))
    size = sum(parameter.numel() for parameter in encoder.parameters()) * torch.float32.itemsize
    del encoder
    captions_of(parts(warm, told / "warm"), family).encode(["warm"])
    give_back_memory()
    texts = [f"picture {number}" for number in range(count)]
    reset_peak()
    before, begun = resident("VmRSS"), time.perf_counter()
    made = captions_of(here, family).encode(texts)
    row = {"seconds": time.perf_counter() - begun, "peak": resident("VmHWM") - before, "encoder": size, "encoded": made}
    (told / f"{here.accelerator.process_index}.json").write_text(json.dumps(row), encoding="utf-8")
    here.accelerator.state.destroy_process_group()


def start_ranks(command: list[str], ranks: int, environment: dict[str, str]) -> None:
    """Run `command` as that many ranks of one job, with more in its environment, and wait for it. One rank alone has no group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        group = {**where, **{name: str(value) for name, value in place.items()}} if ranks > 1 else {}
        processes.append(subprocess.Popen(command, env={**os.environ, **environment, **group}))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"a rank failed: exit codes {codes}")


def measure(warm: Path, base: Path, out: Path, count: int, ranks: int, told: Path) -> dict[str, Any]:
    """Start the ranks, and put together what they tell."""
    told.mkdir()
    command = [sys.executable, __file__, "--captions", str(count), "--as_rank", str(told), str(warm), str(base), str(out)]
    start_ranks(command, ranks, UNKEPT)
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in told.glob("*.json")]
    # Every rank tells how many were missing in the whole job.
    return {name: max(row[name] for row in rows) for name in rows[0]} | {"entries": len(list(out.rglob("*.safetensors")))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=int, default=200)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--as_rank", nargs=4, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        told, warm, base, out = options.as_rank
        one_rank(warm, base, out, options.captions, told)
        return
    from holdfast.testing.models_flux2 import tiny_flux2

    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HOLDFAST_CACHE"] = str(folder / "digests")
        warm, base = tiny_flux2(folder / "warm"), tiny_flux2(folder / "base", text_width=options.width)
        for ranks in options.ranks:
            first, second = (
                measure(warm, base, folder / f"out-{ranks}", options.captions, ranks, folder / f"{ranks}-{run}") for run in (1, 2)
            )
            rows[ranks] = {**first, "share": first["encoder"] / ranks, "again": second["encoded"], "again_seconds": second["seconds"]}
    columns = f"{'ranks':>5}  {'share MB':>9}  {'peak MB':>8}  {'beyond share MB':>15}  {'seconds':>8}  {'encoded':>8}  {'entries':>8}"
    print(f"an encoder of {next(iter(rows.values()))['encoder'] / MB:.0f} MB\n{columns}  {'encoded again':>13}  {'seconds':>8}")
    for ranks, row in rows.items():
        beyond = row["peak"] - row["share"]
        print(
            f"{ranks:5}  {row['share'] / MB:9.1f}  {row['peak'] / MB:8.1f}  {beyond / MB:15.1f}  {row['seconds']:8.1f}  {row['encoded']:8}  "
            f"{row['entries']:8}  {row['again']:13}  {row['again_seconds']:8.2f}"
        )
    print(json.dumps({"captions": options.captions, "peak_mb": {ranks: round(row["peak"] / MB, 1) for ranks, row in rows.items()}}))


if __name__ == "__main__":
    main()
