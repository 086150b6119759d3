"""Runs of the diffusion recipes on the ranks of a pool, watched: what the tests of the recipes share.

The demo's and the user's command runs `main`; so does `run`, with a watcher around the loss that can look at the run
between two micro steps, or end it there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, Flux2KleinPipeline, Flux2Pipeline, FluxPipeline  # noqa: F401 (imported once, before ranks are forked)
from torch.distributed.tensor import DTensor
from transformers import CLIPTextModel, MistralModel, Qwen3Model, T5EncoderModel  # noqa: F401

from holdfast.integrations import accelerate_config
from holdfast.testing import Died, RankPool
from holdfast.training import loop, models
from holdfast.training.metrics import read_lines

FLUX, FLUX2 = "holdfast.recipes.flux_dreambooth", "holdfast.recipes.flux2_lora"
STEPS, EVERY, ACCUMULATION = 5, 2, 2
DYING_STEP = 4  # two steps after the checkpoint that a resume finds

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
# A user's accelerate config as it stands: no fsdp_version means version 1.
FSDP1_CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: false
mixed_precision: bf16
num_machines: 1
num_processes: 2
enable_cpu_affinity: true
use_cpu: true
"""
PRODIGY = {"optimizer": "prodigy", "learning_rate": 1.0, "lr_warmup_steps": 0}
ADAMW = {"optimizer": "AdamW", "learning_rate": 1e-3, "lr_scheduler": "linear", "lr_warmup_steps": 2}


@dataclass(frozen=True)
class Job:
    """One run of a recipe: its flags, the launcher's environment, and what to do before a step's first micro step."""

    flags: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    look_before: int | None = None
    die_before: int | None = None
    stop_before: int | None = None
    spoil: tuple[int, int, str] | None = None
    """(step, rank, what): the loss of that step is `nan` there, or its gradients are."""

    signal_before: tuple[int, int] | None = None
    """(step, signal): sent to oneself."""

    recipe: str = FLUX

    @property
    def module(self) -> Any:
        return import_module(self.recipe)


class Stopped(Exception):
    """Ends a run at a chosen step."""


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(data).hexdigest()}"


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every parameter, everything the optimizer knows of it, and the param group, put together from all ranks."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        found["group"] = {key: value for key, value in group.items() if key not in ("params", "foreach", "fused")}
        for parameter in group["params"]:
            name = names[id(parameter)].replace("_checkpoint_wrapped_module.", "").removeprefix("module.")
            found[name] = digest(parameter)
            for key, value in optimizer.state[parameter].items():
                found[f"{name}/{key}"] = digest(value) if isinstance(value, torch.Tensor) else value
    return found


@dataclass
class Watch:
    """Stands around the loss of one rank's run and keeps what the test asks for."""

    job: Job
    model: Any = None
    optimizer: Any = None
    micro_steps: int = 0
    seen: dict[str, Any] = field(default_factory=lambda: {"samples": [], "shapes": [], "generators": [], "state": None})

    def install(self) -> None:
        recipe = self.job.module
        prepare, optimizer, make_loss = models.prepare_model, loop.make_optimizer, recipe.make_loss

        def keep(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
            def made(*args: Any, **kwargs: Any) -> Any:
                setattr(self, name, make(*args, **kwargs))
                return getattr(self, name)

            return made

        models.prepare_model = keep("model", prepare)
        loop.make_optimizer = keep("optimizer", optimizer)
        recipe.make_loss = lambda *args: self.around(make_loss(*args))

    def around(self, loss: Callable[[dict[str, Any]], torch.Tensor]) -> Callable[[dict[str, Any]], torch.Tensor]:
        def watched(batch: dict[str, Any]) -> torch.Tensor:
            images = batch.get("images", batch.get("moments"))
            step, micro = divmod(self.micro_steps, ACCUMULATION)
            self.micro_steps += 1
            if micro == 0:
                self.before(step + 1)
            self.seen["samples"] += [hashlib.sha256(image.float().numpy().tobytes()).hexdigest() for image in images]
            self.seen["shapes"].append(tuple(images.shape))
            self.seen["generators"].append(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())
            return self.spoilt(step + 1, loss(batch))

        return watched

    def spoilt(self, step: int, value: torch.Tensor) -> torch.Tensor:
        where, rank, what = self.job.spoil or (None, 0, "")
        if step != where or (dist.is_initialized() and dist.get_rank() != rank):
            return value
        if what == "nan":
            return value * float("nan")
        return value + (value - value).sqrt()  # 0, with a gradient that is no number

    def before(self, step: int) -> None:
        if self.job.signal_before is not None and step == self.job.signal_before[0]:
            os.kill(os.getpid(), self.job.signal_before[1])
        if step == self.job.look_before:
            self.seen["state"] = state_of(self.model, self.optimizer)
        if step == self.job.stop_before:
            raise Stopped
        if step == self.job.die_before:
            manifest = Path(self.job.flags["output_dir"]) / f"checkpoint-{EVERY}/manifest.json"
            until = time.monotonic() + 20
            while not manifest.exists() and time.monotonic() < until:
                time.sleep(0.01)
            assert manifest.exists()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def run(job: Job) -> dict[str, Any]:
    """On one rank: the recipe's `main`, watched."""
    os.environ.update(job.environment)
    watch = Watch(job)
    watch.install()
    recipe = job.module
    export = recipe.export

    def look_and_export(config: Any, base: Path, checkpoint: Path, *rest: Any) -> None:
        watch.seen["checkpoint"] = checkpoint.name
        export(config, base, checkpoint, *rest)

    recipe.export = look_and_export
    with contextlib.suppress(Stopped):
        recipe.main(recipe.Config(**job.flags))
    watch.seen["weights"] = {
        name.replace("_checkpoint_wrapped_module.", "").removeprefix("module."): parameter.detach().clone()
        for name, parameter in watch.model.named_parameters()
        if not isinstance(parameter, DTensor)
    }
    return watch.seen


def flags_for(flux_folder: Path, photo_folder: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "pretrained_model_name_or_path": str(flux_folder),
        "instance_data_dir": str(photo_folder),
        "output_dir": str(out),
        "instance_prompt": "a photo of sks girl",
        "resolution": 16,
        "train_batch_size": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_train_steps": STEPS,
        "checkpointing_steps": EVERY,
        "mixed_precision": "bf16",
        "report_to": "none",
        **more,
    }


def fsdp1_environment(folder: Path) -> dict[str, str]:
    """What `accelerate launch` and `holdfast launch` make of the config."""
    (folder / "config.yaml").write_text(FSDP1_CONFIG)
    return accelerate_config.read(folder / "config.yaml").environment()


def numbers(out: Path) -> list[tuple[Any, ...]]:
    """What two equal runs have in common, bit for bit: everything but the times."""
    return [tuple(v for k, v in line.items() if k != "step_s") for line in read_lines(out / "metrics.jsonl")]


PIPELINE = "transformer/diffusion_pytorch_model.safetensors"
LORA = "pytorch_lora_weights.safetensors"


def check_killed_and_resumed(
    pool: RankPool,
    flux_folder: Path,
    photo_folder: Path,
    tmp_path: Path,
    ranks: int,
    environment: dict[str, str],
    more: dict[str, Any],
    exported: tuple[str, ...] = (PIPELINE,),
    recipe: str = FLUX,
) -> None:
    """A run that is left alone, and one that is killed and continued, are the same: numbers, samples, generators, exports."""

    def flags(out: str, **changes: Any) -> dict[str, Any]:
        return flags_for(flux_folder, photo_folder, tmp_path / out, **{**more, **changes})

    whole = pool.run(run, ranks, Job(flags("whole"), environment, recipe=recipe))
    died = pool.run(run, ranks, Job(flags("killed"), environment, die_before=DYING_STEP, recipe=recipe), expect_death=True)
    assert died == [Died(signal.SIGKILL)] * ranks
    assert not (tmp_path / "killed/model_index.json").exists()
    resumed = pool.run(run, ranks, Job(flags("killed", resume_from_checkpoint="latest"), environment, recipe=recipe))

    assert [line["step"] for line in read_lines(tmp_path / "killed/metrics.jsonl")] == list(range(1, STEPS + 1))
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    for rank in range(ranks):
        assert resumed[rank]["generators"] == whole[rank]["generators"][EVERY * ACCUMULATION :]
        assert resumed[rank]["samples"] == whole[rank]["samples"][-len(resumed[rank]["samples"]) :]
    for name in exported:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    if more.get("checkpoints_total_limit") == 1:
        assert [path.name for path in (tmp_path / "whole").glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]
    saves = read_lines(tmp_path / "whole/saves.jsonl")
    assert [(save["step"], save["state"]) for save in saves] == [(step, "complete") for step in (2, 4, 5)]
