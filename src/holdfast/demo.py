"""`holdfast demo`: a run that is killed and resumed, beside one that is left alone.

A tiny random Flux, five real photos and two FSDP2 ranks on the CPU, started by `holdfast launch` as a user would. The
second run has all its processes SIGKILLed a few steps after its first checkpoint, is resumed and finishes; then every
loss and every exported byte of the two runs is compared. The exported pipeline is loaded and draws a picture.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module, util
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.errors import HoldfastError, UsageError

PROMPT = "a photo of sks girl"
STEPS, CHECKPOINT_EVERY = 20, 5
# The kill comes this many steps after the first checkpoint, so that work is really lost.
STEPS_LOST = 2
RUN_DEADLINE_S = 240.0
POLL_S = 0.01
NEEDED = ("accelerate", "diffusers", "matplotlib", "psutil", "skimage", "sklearn", "transformers")
MARKER = ".holdfast-demo"

CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: true
"""


@dataclass
class Story:
    """What happened to the run that was killed, for the table."""

    checkpoint: int = 0
    killed_at: int = 0
    lost: dict[int, float] = field(default_factory=dict)


def run(output_dir: Path) -> int:
    """Do all of it inside `output_dir`; returns 0 if the two runs are equal bit for bit, else 1."""
    console, begin = Console(highlight=False), time.monotonic()
    _prepare(output_dir)

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - begin:5.1f} s[/dim]  {line}")

    say("making a tiny Flux pipeline and five photos")
    _make_inputs(output_dir)
    reference, interrupted = output_dir / "reference", output_dir / "interrupted"
    say(f"training {STEPS} steps on 2 FSDP2 ranks (CPU), left alone")
    _finish(_start(output_dir, reference), reference)
    say("training the same again, to be killed")
    story = _kill_in_the_middle(output_dir, interrupted)
    say(f"SIGKILLed all ranks after step {story.killed_at}; resuming from checkpoint-{story.checkpoint}")
    _finish(_start(output_dir, interrupted, "--resume_from_checkpoint", "latest"), interrupted)
    say("loading the exported pipeline and drawing a picture")
    _draw_picture(interrupted, output_dir / "picture.png")
    _draw_losses(_losses(reference), _losses(interrupted), story, output_dir / "losses.png")
    equal, same_weights = _compare(reference, interrupted)
    console.print(_table(output_dir, story, equal, same_weights, time.monotonic() - begin))
    return 0 if equal and same_weights else 1


def _prepare(output_dir: Path) -> None:
    """An empty folder, or that of an earlier demo, which is emptied; nothing else is ever deleted."""
    missing = [name for name in NEEDED if util.find_spec(name) is None]
    if missing:
        raise UsageError(f"The demo needs {', '.join(missing)}: pip install 'holdfast[demo]'")
    if output_dir.exists() and any(output_dir.iterdir()):
        if not (output_dir / MARKER).exists():
            raise UsageError(f"{output_dir} is not empty and not from an earlier demo: give another --output_dir")
        shutil.rmtree(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / MARKER).touch()


def _make_inputs(output_dir: Path) -> None:
    from holdfast.testing.models import photos, tiny_flux

    for library in ("diffusers", "transformers"):
        logging: Any = import_module(f"{library}.utils.logging")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    tiny_flux(output_dir / "base")
    photos(output_dir / "photos")
    (output_dir / "accelerate.yaml").write_text(CONFIG)


def _start(output_dir: Path, folder: Path, *more: str) -> subprocess.Popen[bytes]:
    from holdfast.integrations.launch import VISIBILITY

    flags = {
        "pretrained_model_name_or_path": output_dir / "base",
        "instance_data_dir": output_dir / "photos",
        "output_dir": folder,
        "instance_prompt": PROMPT,
        "resolution": 64,
        "train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "guidance_scale": 1,
        "optimizer": "prodigy",
        "learning_rate": 1,
        "max_train_steps": STEPS,
        "checkpointing_steps": CHECKPOINT_EVERY,
        "seed": 0,
    }
    command = [sys.executable, "-m", "holdfast", "launch", "--config_file", str(output_dir / "accelerate.yaml")]
    command += ["train", "flux-dreambooth", "--cpu_fsdp"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    # The demo is about CPU ranks, wherever it runs: accelerators are hidden, and one thread each keeps sums in order.
    environment = os.environ | dict.fromkeys(VISIBILITY.values(), "") | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with _log(folder).open("ab") as log:
        return subprocess.Popen([*command, *more], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _log(folder: Path) -> Path:
    return folder.with_suffix(".log")


def _wait(process: subprocess.Popen[bytes], folder: Path, until: Callable[[], bool]) -> None:
    """Wait until the run has come that far, or has ended; a run that is too slow is ended, and is an error."""
    deadline = time.monotonic() + RUN_DEADLINE_S
    while process.poll() is None and not until():
        if time.monotonic() > deadline:
            _kill(process)
            raise HoldfastError(f"A run of the demo took more than {RUN_DEADLINE_S:.0f} s: see {_log(folder)}")
        time.sleep(POLL_S)


def _finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    try:
        _wait(process, folder, lambda: False)
    except BaseException:
        _kill(process)
        raise
    if process.returncode:
        tail = "\n".join(_log(folder).read_text(errors="replace").splitlines()[-30:])
        raise HoldfastError(
            f"A run of the demo ended with exit code {process.returncode}; {_log(folder)} ends so:\n{tail}"
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the launcher and its ranks, which are in process groups of their own."""
    psutil: Any = import_module("psutil")
    with contextlib.suppress(psutil.NoSuchProcess):
        for victim in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
    process.wait()


def _kill_in_the_middle(output_dir: Path, folder: Path) -> Story:
    """Start the run and kill it when it is a few steps past its first complete checkpoint."""
    manifest = folder / f"checkpoint-{CHECKPOINT_EVERY}" / "manifest.json"
    process = _start(output_dir, folder)
    try:
        _wait(
            process,
            folder,
            lambda: manifest.exists() and max(_losses(folder), default=0) >= CHECKPOINT_EVERY + STEPS_LOST,
        )
    finally:
        _kill(process)
    if process.returncode >= 0:
        _finish(process, folder)  # tells of a run that failed by itself
        raise HoldfastError("The run was over before it could be killed: start the demo again on a less busy machine")
    losses = _losses(folder)
    # More than one checkpoint may be complete by now: the run will continue from the last.
    return Story(max(_checkpoints(folder)), max(losses), losses)


def _losses(folder: Path) -> dict[int, float]:
    """Step -> loss, with all digits; the last line may have been cut by the kill."""
    losses = {}
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            losses[int(values["step"])] = float(values["loss"])
    return losses


def _checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoint-*/manifest.json"))


def _compare(reference: Path, interrupted: Path) -> tuple[bool, bool]:
    """Whether all losses, and all exported weights, are the same bit for bit."""
    expected, losses = _losses(reference), _losses(interrupted)
    weights = _weights(interrupted)
    return list(losses) == list(range(1, STEPS + 1)) and losses == expected, bool(weights) and weights == _weights(
        reference
    )


def _weights(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "transformer").glob("*.safetensors"))]


def _draw_picture(folder: Path, path: Path) -> None:
    import torch

    diffusers: Any = import_module("diffusers")
    pipeline = diffusers.FluxPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    pipeline(PROMPT, height=128, width=128, num_inference_steps=8, generator=generator).images[0].save(path)


def _draw_losses(expected: dict[int, float], losses: dict[int, float], story: Story, path: Path) -> None:
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(list(expected), list(expected.values()), color="0.75", linewidth=6, label="left alone")
    axes.plot(
        list(story.lost), list(story.lost.values()), color="tab:red", label=f"killed after step {story.killed_at}"
    )
    resumed = {step: loss for step, loss in losses.items() if step > story.checkpoint}
    axes.plot(list(resumed), list(resumed.values()), color="tab:blue", label=f"resumed from step {story.checkpoint}")
    axes.axvline(story.killed_at, color="tab:red", linestyle=":")
    axes.set(xlabel="step", ylabel="loss", xlim=(1, STEPS))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    figure.savefig(path, dpi=120)


def _table(output_dir: Path, story: Story, equal: bool, same_weights: bool, seconds: float) -> Table:
    interrupted = output_dir / "interrupted"
    lines = (interrupted / "saves.jsonl").read_text().splitlines()
    saves = [json.loads(line) for line in lines]
    blocked = [f"{1000 * save['blocked_s']:.1f}" for save in saves]
    yes = {True: "[green]true[/green]", False: "[red]false[/red]"}
    table = Table(title="holdfast demo", show_header=False)
    table.add_row("steps", f"{STEPS}, by 2 FSDP2 ranks on the CPU")
    table.add_row("checkpoints", ", ".join(map(str, _checkpoints(interrupted))))
    table.add_row("killed (SIGKILL, all ranks)", f"after step {story.killed_at}, resumed from step {story.checkpoint}")
    table.add_row("losses equal", f"{yes[equal]} (bit for bit, all {STEPS} steps)")
    table.add_row("exported weights equal", f"{yes[same_weights]} (bit for bit)")
    table.add_row("training blocked per save", f"{', '.join(blocked)} ms")
    table.add_row("pipeline", str(interrupted))
    table.add_row("picture", str(output_dir / "picture.png"))
    table.add_row("loss curve", str(output_dir / "losses.png"))
    table.add_row("time", f"{seconds:.0f} s")
    return table
