"""Steps per second and time to the first step: the recipes beside diffusers' and transformers' own scripts (a table and a line of JSON).

    OMP_NUM_THREADS=1 python benchmarks/recipe_speed.py --flux train_dreambooth_flux.py --lm run_clm.py [--ranks 1 2] [--rounds 3]

The scripts are not part of this repository: give the paths of your copies. What they import and this environment lacks (torchvision,
evaluate) has to be on PYTHONPATH. Both get the same model, data, flags and launcher (`torchrun`, data parallel CPU ranks) and run in turn (A B A B). Times are those of the trackers' own events, which both write with TensorBoard: to the first step
from the start of the launcher, and the median distance of two steps after the first ten.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

WARM_STEPS = 10
DEADLINE_S = 280.0


@dataclass(frozen=True)
class Pair:
    """A recipe, the script that it stands beside, what both get, and the tag of their loss in TensorBoard."""

    recipe: str
    script: str
    flags: list[str]
    tag: str


def pairs(options: argparse.Namespace, folder: Path) -> list[Pair]:
    """Make the models and the data for the scripts that were given."""
    from holdfast.testing import models

    found = []
    if options.flux:
        flux, photos = models.tiny_flux(folder / "flux"), models.photos(folder / "photos")
        flags = f"--pretrained_model_name_or_path {flux} --instance_data_dir {photos} --instance_prompt=sks --resolution 64"
        flags += " --train_batch_size 1 --gradient_accumulation_steps 1 --learning_rate 1e-4 --lr_scheduler constant --seed 0"
        flags += f" --max_sequence_length 32 --max_train_steps {options.steps} --checkpointing_steps 100000 --report_to tensorboard"
        found.append(Pair("flux-dreambooth", options.flux, flags.split(), "loss"))
    if options.lm:
        llama = models.tiny_llama(folder / "llama")
        (folder / "texts.txt").write_text("\n".join(models.SENTENCES * 2_000))
        flags = f"--model_name_or_path {llama} --train_file {folder / 'texts.txt'} --block_size 128 --per_device_train_batch_size 4"
        flags += f" --do_train --max_steps {options.steps} --save_strategy no --logging_steps 1 --report_to tensorboard"
        found.append(Pair("causal-lm", options.lm, [*flags.split(), "--validation_split_percentage", "5"], "train/loss"))
    return found


def events(folder: Path, tag: str) -> list[float]:
    """When each step was logged, in seconds since the epoch."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    times: list[float] = []
    for path in folder.rglob("events.out.tfevents.*"):
        read = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        if tag in read.Tags()["scalars"]:
            times += [event.wall_time for event in read.Scalars(tag)]
    return sorted(times)


def run(command: Sequence[str], pair: Pair, ranks: int, folder: Path) -> dict[str, float]:
    """One run: seconds to its first logged step, and steps per second after `WARM_STEPS`."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *command]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    begun = time.time()
    done = subprocess.run(
        [*launch, *pair.flags, "--output_dir", str(folder / "out")],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    ended = time.time()
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    times = events(folder / "out", pair.tag)
    if len(times) <= WARM_STEPS + 1:
        raise SystemExit(f"{' '.join(command)} logged {len(times)} steps under {pair.tag}")
    apart = [later - earlier for earlier, later in zip(times[WARM_STEPS:], times[WARM_STEPS + 1 :], strict=False)]
    return {"first_step_s": times[0] - begun, "steps_per_s": 1 / statistics.median(apart), "whole_run_s": ended - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flux", metavar="SCRIPT", type=os.path.abspath, help="diffusers' train_dreambooth_flux.py")
    parser.add_argument("--lm", metavar="SCRIPT", type=os.path.abspath, help="transformers' run_clm.py")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if not options.flux and not options.lm:
        parser.error("give --flux or --lm, the path of a script to stand beside")
    readings: dict[str, list[dict[str, float]]] = {}
    table = Table("recipe", "ranks", "who", "to the first step", "steps per second", "whole run", title=f"{options.rounds} rounds, medians")
    with tempfile.TemporaryDirectory() as folder:
        for pair in pairs(options, Path(folder)):
            sides = {"holdfast": ["-m", "holdfast", "train", pair.recipe], Path(pair.script).name: [pair.script]}
            for ranks in options.ranks:
                for _ in range(options.rounds):
                    for who, command in sides.items():
                        with tempfile.TemporaryDirectory() as own:
                            readings.setdefault(f"{pair.recipe} {ranks} {who}", []).append(run(command, pair, ranks, Path(own)))
                medians = {
                    who: {key: statistics.median(r[key] for r in readings[f"{pair.recipe} {ranks} {who}"]) for key in ("first_step_s", "steps_per_s", "whole_run_s")}
                    for who in sides
                }
                ours, theirs = medians.values()
                for who, found in medians.items():
                    table.add_row(pair.recipe, str(ranks), who, f"{found['first_step_s']:.1f} s", f"{found['steps_per_s']:.1f}", f"{found['whole_run_s']:.1f} s")
                ratios = (f"{theirs['first_step_s'] / ours['first_step_s']:.2f} ×", f"{ours['steps_per_s'] / theirs['steps_per_s']:.2f} ×")
                table.add_row("", "", "faster by", *ratios, f"{theirs['whole_run_s'] / ours['whole_run_s']:.2f} ×", end_section=True)
    Console(width=110).print(table)
    print(json.dumps(readings))


if __name__ == "__main__":
    main()
