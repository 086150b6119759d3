"""Checkpoint size and time per step of the Flux2 recipe beside diffusers' own training script, on one tiny model (a table and JSON).

    OMP_NUM_THREADS=1 python benchmarks/flux2_beside_diffusers.py train_dreambooth_lora_flux2_img2img.py [--steps 24] [--rounds 2]

The script is diffusers', unchanged, of the release that is installed, with what it needs (torchvision). Both are given the same
flags and the same environment: image pairs, a LoRA, two CPU ranks under FSDP2, a checkpoint at every eighth step; both log each step to
tensorboard, by whose clock a step takes the median of the times between two entries, steps with a checkpoint included. They run by
turns, so that both see the same machine. The size is that of the last checkpoint's folder. FSDP is switched on for the script as
for the recipe (`--cpu_fsdp`), since Accelerate ignores it on CPU ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import statistics
import sys
import tempfile
from pathlib import Path

from encoder_memory import start_ranks

EVERY = 8
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Flux2TransformerBlock,Flux2SingleTransformerBlock", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "HOLDFAST_CPU_FSDP": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
LAUNCH = "--as_theirs"


def as_theirs(script: str, flags: list[str]) -> None:
    """The script itself, in a process in which Accelerate shards over CPU ranks."""
    from holdfast.integrations import cpu_ranks

    cpu_ranks.join_without_accelerator()
    cpu_ranks.enable()
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


def flags_for(base: Path, pairs: Path, out: Path, steps: int) -> list[str]:
    values = {
        "pretrained_model_name_or_path": base, "dataset_name": pairs, "output_dir": out, "image_column": "output",
        "cond_image_column": "file_name", "caption_column": "instruction", "instance_prompt": "a photo", "resolution": 32,
        "train_batch_size": 1, "guidance_scale": 1, "learning_rate": "1e-5", "lr_scheduler": "constant", "lr_warmup_steps": 0,
        "max_train_steps": steps, "checkpointing_steps": EVERY, "rank": 16, "seed": 0, "max_sequence_length": 64, "report_to": "tensorboard",
        "mixed_precision": "no",
    }  # fmt: skip
    return [*(f"--{name}={value}" for name, value in values.items()), "--cache_latents", "--skip_final_inference"]


def seconds_a_step(out: Path) -> float:
    """The median time between two steps' losses in the tracker's log."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    times = {}
    for path in out.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
        events.Reload()
        if "loss" in events.Tags()["scalars"]:
            times |= {event.step: event.wall_time for event in events.Scalars("loss")}
    ordered = [times[step] for step in sorted(times)]
    return statistics.median(after - before for before, after in itertools.pairwise(ordered))


def checkpoint_bytes(out: Path, step: int) -> int:
    files = [path for path in (out / f"checkpoint-{step}").rglob("*") if path.is_file()]
    if not files:
        raise SystemExit(f"{out} has no checkpoint-{step}")
    return sum(path.stat().st_size for path in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()

    from holdfast.testing.models_flux2 import image_pairs, tiny_flux2

    steps = options.steps - options.steps % EVERY
    seconds: dict[str, list[float]] = {"diffusers": [], "holdfast": []}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HOLDFAST_CACHE"] = str(folder / "digests")
        base, pairs = tiny_flux2(folder / "base"), image_pairs(folder / "pairs")
        index = base / "model_index.json"  # the script reads the tokenizer's folder as a processor, and says so to diffusers
        index.write_text(index.read_text(encoding="utf-8").replace("PreTrainedTokenizerFast", "PixtralProcessor"), encoding="utf-8")
        commands = {
            "diffusers": [sys.executable, __file__, LAUNCH, str(options.script)],
            "holdfast": [sys.executable, "-m", "holdfast", "train", "flux2-lora"],
        }
        for turn in range(options.rounds):
            for who, command in commands.items():
                out = folder / f"{who}-{turn}"
                start_ranks([*command, *flags_for(base, pairs, out, steps)], 2, FSDP)
                seconds[who].append(seconds_a_step(out))
                sizes[who] = checkpoint_bytes(out, steps)
        model = sum(path.stat().st_size for path in (base / "transformer").glob("*.safetensors"))
    print(f"a transformer of {model / 1e3:.0f} kB in fp32\n{'':10}  {'checkpoint kB':>13}  {'s a step':>9}  of each round")
    for who in commands:
        shown = " ".join(f"{value:.3f}" for value in seconds[who])
        print(f"{who:10}  {sizes[who] / 1e3:13.1f}  {statistics.median(seconds[who]):9.3f}  {shown}")
    ratios = {
        "checkpoint": sizes["holdfast"] / sizes["diffusers"],
        "seconds": statistics.median(seconds["holdfast"]) / statistics.median(seconds["diffusers"]),
    }
    print(json.dumps({name: round(ratio, 3) for name, ratio in ratios.items()}))


if __name__ == "__main__":
    if sys.argv[1:2] == [LAUNCH]:
        as_theirs(sys.argv[2], sys.argv[3:])
    else:
        main()
