"""How long the preparation of 200 photos takes on one rank and on two, and again when all is there (a table and a line of JSON).

    OMP_NUM_THREADS=1 python benchmarks/preparation.py [--photos 200] [--ranks 1 2]

The photos are JPEG files of 1600 × 1066 and about, made of real ones by small turns and shifts of colour, so that each has content
of its own; a caption for each. Preparing is what the recipe does: every image is read, hashed and decoded; captions and images
(cut to 256 × 256) are encoded and cached. The VAE is a real `AutoencoderKL` with a few channels, the captions' encoder one linear
layer. The ranks are processes with a gloo group, on the cores of this machine; the time is the slowest rank's, without the start of
the processes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIDE = 256


def make_photos(folder: Path, count: int) -> None:
    """JPEG files and their captions, the same each time."""
    from PIL import Image, ImageEnhance

    from holdfast.testing.models import photos

    originals = [Image.open(path).convert("RGB") for path in sorted(photos(folder / "originals").glob("*.png"))]
    lines = []
    for number in range(count):
        photo = originals[number % len(originals)].resize((1600, 1066), Image.Resampling.BICUBIC)
        photo = ImageEnhance.Color(photo.rotate(number / count * 20)).enhance(0.5 + number / count)
        photo.save(folder / f"{number:04}.jpg", quality=92)
        lines.append({"file_name": f"{number:04}.jpg", "text": f"a photo of sks thing number {number}"})
    shutil.rmtree(folder / "originals")
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))


def prepare(photos: str, out: str) -> dict[str, Any]:
    """On one rank: what is done before the models of the training are loaded."""
    from diffusers import AutoencoderKL

    from holdfast.recipes.flux_dreambooth import Config
    from holdfast.training.cache import Cache, key_of
    from holdfast.training.data import TrainingData
    from holdfast.training.samples import instance_samples

    torch.set_num_threads(1)
    if dist.is_initialized():
        dist.barrier()
    begun = time.perf_counter()
    config = Config(
        pretrained_model_name_or_path="a/b", instance_prompt="a photo", instance_data_dir=photos, output_dir=out, resolution=SIDE
    )
    samples = instance_samples(config, None)
    data = TrainingData(config, samples, [], 16)
    looked = time.perf_counter()
    encoded = {"images": 0, "captions": 0}

    def text_encoder() -> Any:
        layer = torch.nn.Linear(512, 512)

        def encode(caption: str) -> dict[str, torch.Tensor]:
            encoded["captions"] += 1
            values = torch.zeros(77, 512)
            values[: len(caption), : len(caption)] = 1.0
            return {"sequence": layer(values).to(torch.bfloat16)}

        return encode

    def vae() -> Any:
        torch.manual_seed(0)
        model: Any = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, block_out_channels=(16, 16, 16),
            latent_channels=16, norm_num_groups=8,
        ).eval()  # fmt: skip

        def encode(pixels: torch.Tensor) -> torch.Tensor:
            encoded["images"] += 1
            return model.encode(pixels).latent_dist.parameters

        return encode

    Cache(Path(out), "embeddings").prepare({key_of("text", prompt): prompt for prompt in data.prompts}, text_encoder)
    data.cache_latents(Cache(Path(out), "latents"), ["vae"], vae)
    ended = time.perf_counter()
    return {"looked_s": looked - begun, "encoded_s": ended - looked, "all_s": ended - begun, **encoded}


@dataclass
class Row:
    ranks: int
    run: str
    looked_s: float
    encoded_s: float
    all_s: float
    images: int
    captions: int


def measure(photos: Path, out: Path, ranks: int, run: str) -> Row:
    """Start the ranks, and put together what they tell."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank_of", str(ranks), "--told", folder, "--photos_in", str(photos), "--out", str(out)]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(ranks)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a rank failed")
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    slowest = max(told, key=lambda each: each["all_s"])
    counts = {name: sum(each[name] for each in told) for name in ("images", "captions")}
    return Row(ranks, run, slowest["looked_s"], slowest["encoded_s"], slowest["all_s"], **counts)


def one_rank(options: argparse.Namespace) -> None:
    if options.rank_of > 1:
        meeting = f"file://{options.told}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=options.rank, world_size=options.rank_of)
    (Path(options.told) / f"{options.rank}.json").write_text(json.dumps(prepare(options.photos_in, options.out)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    for name in ("rank_of", "rank"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    for name in ("told", "photos_in", "out"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        one_rank(options)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_photos(folder / "photos", options.photos)
        rows = [
            measure(folder / "photos", folder / f"out-{ranks}", ranks, run) for ranks in options.ranks for run in ("first", "second")
        ]
    print(f"{'ranks':>5}  {'run':6}  {'look s':>7}  {'encode s':>8}  {'in all s':>8}  {'images':>6}  {'captions':>8}")
    for row in rows:
        print(f"{row.ranks:5}  {row.run:6}  {row.looked_s:7.2f}  {row.encoded_s:8.2f}  {row.all_s:8.2f}  {row.images:6}  {row.captions:8}")
    first = {row.ranks: row.all_s for row in rows if row.run == "first"}
    again = {row.ranks: row.all_s for row in rows if row.run == "second"}
    base = first[min(first)]
    print(json.dumps({
        "photos": options.photos,
        "of_one_rank": {ranks: round(seconds / base, 3) for ranks, seconds in first.items()},
        "second_of_first": {ranks: round(again[ranks] / first[ranks], 3) for ranks in first},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
