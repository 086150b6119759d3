"""The recipe as a whole, on real ranks and a tiny Flux: what is trained, killed, continued and exported.

The demo's and the user's command runs `main`; so do these tests, with a watcher around the loss that can look at the run
between two micro steps, or end it there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, FluxPipeline  # noqa: F401 (what ranks need is imported once, before they are forked)
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import CLIPTextModel, T5EncoderModel  # noqa: F401

from holdfast.engine.extract import open_checkpoint, read_whole
from holdfast.errors import UsageError
from holdfast.integrations import accelerate_config
from holdfast.recipes import flux_dreambooth as recipe
from holdfast.testing import Died, RankPool
from holdfast.training import loop, models
from holdfast.training.metrics import read_lines

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
    """One run of the recipe: its flags, the launcher's environment, and what to do before a step's first micro step."""

    flags: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    look_before: int | None = None
    die_before: int | None = None
    stop_before: int | None = None


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
    seen: dict[str, Any] = field(default_factory=lambda: {"samples": [], "generators": [], "state": None})

    def install(self) -> None:
        prepare, optimizer, make_loss = models.prepare_model, loop.make_optimizer, recipe.make_loss_and_picture

        def keep(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
            def made(*args: Any, **kwargs: Any) -> Any:
                setattr(self, name, make(*args, **kwargs))
                return getattr(self, name)

            return made

        models.prepare_model = keep("model", prepare)
        loop.make_optimizer = keep("optimizer", optimizer)

        def watched_loss(*args: Any) -> Any:
            loss, picture = make_loss(*args)
            return self.around(loss), picture

        recipe.make_loss_and_picture = watched_loss

    def around(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def watched(pixels: torch.Tensor) -> torch.Tensor:
            step, micro = divmod(self.micro_steps, ACCUMULATION)
            self.micro_steps += 1
            if micro == 0:
                self.before(step + 1)
            self.seen["samples"] += [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in pixels]
            self.seen["generators"].append(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())
            return loss(pixels)

        return watched

    def before(self, step: int) -> None:
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


TOPOLOGIES = {
    "one process": (1, {}, {**ADAMW, "checkpoints_total_limit": 1}),
    "2 ranks DDP": (2, {}, ADAMW),
    "2 ranks FSDP2": (2, FSDP, {**PRODIGY, "cpu_fsdp": True}),
    "3 ranks FSDP2": (3, FSDP, {**PRODIGY, "cpu_fsdp": True}),
}


def fsdp1_environment(folder: Path) -> dict[str, str]:
    """What `accelerate launch` and `holdfast launch` make of the config."""
    (folder / "config.yaml").write_text(FSDP1_CONFIG)
    return accelerate_config.read(folder / "config.yaml").environment()


def test_fsdp1_is_killed_resumed_and_exported(pool: RankPool, flux_folder, photo_folder, tmp_path):
    """The config without a version, with Prodigy: the same numbers after a kill, a pipeline at the end, other ranks after it."""
    environment = fsdp1_environment(tmp_path)
    assert (environment["FSDP_VERSION"], environment["FSDP_USE_ORIG_PARAMS"]) == ("1", "false")
    check_killed_and_resumed(pool, flux_folder, photo_folder, tmp_path, 2, environment, {**PRODIGY, "cpu_fsdp": True})

    pipeline = FluxPipeline.from_pretrained(tmp_path / "killed", dtype=torch.float32)
    saved = load_file(tmp_path / "killed/transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(value.float(), saved[name].float()) for name, value in pipeline.transformer.state_dict().items())
    base = load_file(flux_folder / "transformer/diffusion_pytorch_model.safetensors")
    assert saved.keys() == base.keys()
    assert any(not torch.equal(saved[name].float(), base[name].float()) for name in base)

    # From there on under FSDP2, on another number of ranks: the same weights in the loop.
    again = flags_for(flux_folder, photo_folder, tmp_path / "killed", **PRODIGY, cpu_fsdp=True, resume_from_checkpoint="latest")
    look = Job({**again, "max_train_steps": STEPS + 1}, FSDP, look_before=1, stop_before=1)
    checkpoint = open_checkpoint(tmp_path / "killed" / f"checkpoint-{STEPS}")
    for result in pool.run(run, 3, look):
        for name in base:
            assert result["state"][name] == digest(read_whole(checkpoint, f"model.{name}")), name


def numbers(out: Path) -> list[tuple[Any, ...]]:
    """What two equal runs have in common, bit for bit: everything but the times."""
    return [tuple(v for k, v in line.items() if k != "step_s") for line in read_lines(out / "metrics.jsonl")]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_killed_and_resumed_run_is_the_uninterrupted_run(
    pool: RankPool, flux_folder, photo_folder, tmp_path, topology
):
    check_killed_and_resumed(pool, flux_folder, photo_folder, tmp_path, *TOPOLOGIES[topology])


def check_killed_and_resumed(pool, flux_folder, photo_folder, tmp_path, ranks, environment, more):
    def flags(out: str, **changes: Any) -> dict[str, Any]:
        return flags_for(flux_folder, photo_folder, tmp_path / out, **{**more, **changes})

    whole = pool.run(run, ranks, Job(flags("whole"), environment))
    died = pool.run(run, ranks, Job(flags("killed"), environment, die_before=DYING_STEP), expect_death=True)
    assert died == [Died(signal.SIGKILL)] * ranks
    assert not (tmp_path / "killed/model_index.json").exists()
    resumed = pool.run(run, ranks, Job(flags("killed", resume_from_checkpoint="latest"), environment))

    assert [line["step"] for line in read_lines(tmp_path / "killed/metrics.jsonl")] == list(range(1, STEPS + 1))
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    for rank in range(ranks):
        for key in ("samples", "generators"):
            assert resumed[rank][key] == whole[rank][key][EVERY * ACCUMULATION :]
    exported = "transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "killed" / exported).read_bytes() == (tmp_path / "whole" / exported).read_bytes()
    if more.get("checkpoints_total_limit") == 1:
        assert [path.name for path in (tmp_path / "whole").glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]
    saves = read_lines(tmp_path / "whole/saves.jsonl")
    assert [(save["step"], save["state"]) for save in saves] == [(step, "complete") for step in (2, 4, 5)]


def test_learning_rate_counts_optimizer_steps_on_any_number_of_ranks(
    pool: RankPool, flux_folder, photo_folder, tmp_path
):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", **ADAMW)
    pool.run(run, 2, Job(flags))
    expected = [0.0, 0.5e-3, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3]
    assert [line["lr"] for line in read_lines(tmp_path / "out/metrics.jsonl")] == pytest.approx(expected)


def test_ranks_see_different_samples_and_draw_different_noise(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", **ADAMW)
    first, second = pool.run(run, 2, Job(flags))
    stream = [sample for pair in zip(first["samples"], second["samples"], strict=True) for sample in pair]
    assert len(stream) == 2 * ACCUMULATION * STEPS
    for epoch in range(4):  # of five photos each
        assert len(set(stream[5 * epoch : 5 * epoch + 5])) == 5
    assert stream[:5] != stream[5:10]
    assert not set(first["generators"]) & set(second["generators"])


def test_resume_on_other_numbers_of_ranks_has_the_same_state(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", **PRODIGY)
    sharded = {**flags, "cpu_fsdp": True}
    (saved, _) = pool.run(run, 2, Job(sharded, FSDP, look_before=EVERY + 1, stop_before=EVERY + 2))
    assert len(saved["state"]) > 100
    again = {"resume_from_checkpoint": f"checkpoint-{EVERY}"}
    look = {"look_before": 1, "stop_before": 1}
    for ranks, environment, changed in ((3, FSDP, sharded), (1, {}, flags), (2, {}, flags)):
        results = pool.run(run, ranks, Job({**changed, **again}, environment, **look))
        for result in results:
            assert result["state"] == saved["state"], f"{ranks} ranks"


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_export_is_a_flux_pipeline_with_the_trained_weights(
    pool: RankPool, flux_folder, photo_folder, tmp_path, dtype, torch_dtype
):
    out = tmp_path / "out"
    flags = flags_for(flux_folder, photo_folder, out, **PRODIGY, export_dtype=dtype, max_train_steps=3)
    (result,) = pool.run(run, 1, Job(flags))
    assert result["checkpoint"] == "checkpoint-3"
    exported = load_file(out / "transformer/diffusion_pytorch_model.safetensors")
    base = load_file(flux_folder / "transformer/diffusion_pytorch_model.safetensors")
    assert exported.keys() == result["weights"].keys() == base.keys()
    for name, trained in result["weights"].items():
        assert torch.equal(exported[name], trained.to(torch_dtype)), name
    assert any(not torch.equal(exported[name], base[name].to(torch_dtype)) for name in base)

    pipeline = FluxPipeline.from_pretrained(out, dtype=torch_dtype)
    arguments = {"height": 16, "width": 16, "num_inference_steps": 1, "output_type": "np"}
    picture = pipeline("a photo of sks girl", **arguments).images[0]
    assert picture.shape == (16, 16, 3)
    for part in ("vae", "text_encoder", "text_encoder_2"):
        name = next(path.name for path in (flux_folder / part).glob("*.safetensors"))
        assert (out / part / name).read_bytes() == (flux_folder / part / name).read_bytes()


def test_export_from_ranks_equals_their_shards_put_together(pool: RankPool, flux_folder, photo_folder, tmp_path):
    out = tmp_path / "out"
    flags = flags_for(flux_folder, photo_folder, out, **PRODIGY, cpu_fsdp=True, max_train_steps=3)
    pool.run(run, 3, Job(flags, FSDP))
    exported = load_file(out / "transformer/diffusion_pytorch_model.safetensors")
    shards = [load_file(path) for path in sorted((out / "checkpoint-3").glob("rank-*.safetensors"))]
    assert len(shards) == 3
    for name, tensor in exported.items():
        pieces = [shard[f"model.{name}"] for shard in shards if f"model.{name}" in shard]
        assert torch.equal(tensor, torch.cat(pieces)), name


def refused(flags: dict[str, Any], environment: dict[str, str]) -> tuple[int, str]:
    os.environ.update(environment)
    try:
        recipe.main(recipe.Config(**flags))
    except UsageError as error:
        return error.exit_code, str(error)
    return 0, ""


def test_fsdp_that_accelerate_would_ignore_is_a_mistake(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out")
    for code, text in pool.run(refused, 2, flags, FSDP):
        assert code == 2
        assert "FSDP was asked for, but Accelerate ignores it on cpu ranks" in text
        assert "--cpu_fsdp" in text
    assert not (tmp_path / "out").exists()


def test_half_precision_that_the_device_lacks_is_a_mistake(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", mixed_precision="fp16")
    ((code, text),) = pool.run(refused, 1, flags, {"ACCELERATE_USE_CPU": "true"})
    assert code == 2
    assert "Mixed precision fp16 is not possible here (device: cpu). Use --mixed_precision=bf16" in text


def test_tracker_and_metrics_without_a_token(pool: RankPool, flux_folder, photo_folder, tmp_path):
    out = tmp_path / "out"
    secret = "hf_thisisthetokenofsomebody"
    pool.run(
        run, 1, Job(flags_for(flux_folder, photo_folder, out, **ADAMW, report_to="tensorboard"), {"HF_TOKEN": secret})
    )
    assert list((out / "logs").rglob("events.out.tfevents.*"))
    first = read_lines(out / "metrics.jsonl")[0]
    assert first.keys() == {"step", "loss", "lr", "grad_norm", "step_s", "epoch"}
    assert first["loss"] > 0
    written = [path for path in out.rglob("*") if path.is_file()]
    assert not [path for path in written if secret.encode() in path.read_bytes()]
    assert json.loads((out / "model_index.json").read_text())["_class_name"] == "FluxPipeline"
