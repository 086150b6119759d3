"""What each flag does: a value that it sets, a line that says that it does nothing, a refusal."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_jobs import ADAMW, PIPELINE, Job, flags_for, run
from safetensors.torch import load_file
from torch import nn

from holdfast.errors import UsageError
from holdfast.recipes.flux_dreambooth import Config
from holdfast.testing import RankPool
from holdfast.training.metrics import read_lines
from holdfast.training.optimizers import make_lr_scheduler, make_optimizer

BARE: dict[str, Any] = {"pretrained_model_name_or_path": "owner/flux", "instance_data_dir": "photos", "instance_prompt": "a photo"}


def config(**flags: Any) -> Config:
    return Config(**{**BARE, **flags})


# ------------------------------------------------------------------------------------------ refused before anything is loaded


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"use_8bit_adam": True}, "--use_8bit_adam needs bitsandbytes, which is not installed: pip install bitsandbytes"),
        ({"enable_npu_flash_attention": True}, "torch_npu, which is not installed: pip install torch-npu"),
        ({"report_to": "wandb"}, "--report_to wandb: wandb is not installed. pip install wandb"),
        ({"report_to": "comet_ml"}, "comet_ml is not installed. pip install comet-ml"),
        ({"rank": 0}, "--rank is 0; it has to be at least 1"),
        ({"rank": 1, "lora_dropout": 1.0}, "--lora_dropout is 1.0"),
        ({"rank": 1, "lora_alpha": 0}, "--lora_alpha is 0"),
        ({"rank": 1, "lora_layers": " , "}, "--lora_layers names no layer"),
        ({"ema_decay": 1.0}, "--ema_decay is 1.0"),
        ({"text_encoder_lr": 0.0}, "--text_encoder_lr is 0.0; it has to be above 0"),
        ({"num_validation_images": 0}, "--num_validation_images is 0"),
        ({"validation_epochs": 0}, "--validation_epochs is 0"),
        ({"with_prior_preservation": True, "class_prompt": "a girl"}, "--with_prior_preservation needs --class_data_dir"),
        ({"with_prior_preservation": True, "class_data_dir": "x"}, "--with_prior_preservation needs --class_prompt"),
        ({"dataset_name": "owner/data"}, "both of --instance_data_dir and --dataset_name given"),
        ({"instance_data_dir": None}, "neither of --instance_data_dir and --dataset_name given"),
        ({"repeats": 0}, "--repeats is 0"),
        ({"aspect_ratio_buckets": "512;512,512"}, "--aspect_ratio_buckets: '512' is no height,width"),
        ({"lr_scheduler": "polynomial", "learning_rate": 1e-8}, "polynomial ends at 1e-7"),
    ],
)
def test_what_is_refused(flags: dict[str, Any], message: str, photo_folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        config(**{"instance_data_dir": str(photo_folder), **flags}).validate()
    assert message in str(caught.value)
    assert "1 thing(s)" in str(caught.value)


def refused_by_the_device(flags: dict[str, Any]) -> str:
    from holdfast.training.setup import make_accelerator

    with pytest.raises(UsageError) as caught:
        make_accelerator(config(**flags, report_to="none"))
    return str(caught.value)


def test_what_the_device_lacks_is_refused_all_at_once(pool: RankPool) -> None:
    flags = {"allow_tf32": True, "use_8bit_adam": True, "enable_npu_flash_attention": True}
    (text,) = pool.run(refused_by_the_device, 1, flags)
    for part in ("--allow_tf32 needs an NVIDIA GPU", "--use_8bit_adam needs a GPU", "--enable_npu_flash_attention needs an Ascend NPU"):
        assert part in text


# ------------------------------------------------------------------------------------------------- accepted, and of no effect

PRIOR = {"class_data_dir": "x", "class_prompt": "x", "num_class_images": 3, "prior_loss_weight": 0.5, "sample_batch_size": 1,
         "prior_generation_precision": "fp32"}  # fmt: skip
IDLE: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, f"--{name} has no effect without --with_prior_preservation") for name, value in PRIOR.items()),
    ({"prodigy_beta3": 0.9}, "--prodigy_beta3 has no effect with --optimizer AdamW"),
    ({"prodigy_decouple": False}, "--prodigy_decouple has no effect"),
    ({"prodigy_use_bias_correction": False}, "--prodigy_use_bias_correction has no effect"),
    ({"prodigy_safeguard_warmup": False}, "--prodigy_safeguard_warmup has no effect"),
    ({"optimizer": "prodigy", "learning_rate": 1.0, "use_8bit_adam": True}, "--use_8bit_adam has no effect with --optimizer prodigy"),
    ({"lr_num_cycles": 2}, "--lr_num_cycles has no effect with --lr_scheduler constant"),
    ({"lr_power": 2.0}, "--lr_power has no effect"),
    ({"logit_mean": 1.0}, "--logit_mean has no effect with --weighting_scheme none"),
    ({"logit_std": 2.0}, "--logit_std has no effect"),
    ({"mode_scale": 1.0}, "--mode_scale has no effect"),
    ({"text_encoder_lr": 1e-3}, "--text_encoder_lr has no effect without --train_text_encoder"),
    ({"adam_weight_decay_text_encoder": 0.0}, "--adam_weight_decay_text_encoder has no effect"),
    ({"lora_alpha": 8}, "--lora_alpha has no effect without --rank, which turns LoRA on"),
    ({"lora_dropout": 0.1}, "--lora_dropout has no effect"),
    ({"lora_layers": "attn.to_q"}, "--lora_layers has no effect"),
    ({"upcast_before_saving": True}, "--upcast_before_saving has no effect without --rank"),
    ({"rank": 1, "export_dtype": "bf16", "upcast_before_saving": True}, "--upcast_before_saving has no effect beside --export_dtype"),
    ({"ema_decay": 0.9}, "--ema_decay has no effect without --use_ema"),
    ({"validation_epochs": 3}, "--validation_epochs has no effect without --validation_prompt"),
    ({"num_validation_images": 3}, "--num_validation_images has no effect"),
    ({"skip_final_inference": True}, "--skip_final_inference has no effect"),
    ({"validation_prompt": "x", "final_validation_prompt": "y", "skip_final_inference": True}, "--final_validation_prompt has no effect"),
    ({"hub_model_id": "a/b"}, "--hub_model_id has no effect without --push_to_hub"),
    ({"hub_token": "x"}, "--hub_token has no effect"),
    ({"report_to": "none", "logging_dir": "x"}, "--logging_dir has no effect with --report_to none"),
    ({"max_train_steps": 10, "num_train_epochs": 3}, "--num_train_epochs has no effect beside --max_train_steps"),
    ({"dataset_config_name": "x"}, "--dataset_config_name has no effect without --dataset_name"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), IDLE)
def test_a_flag_without_effect_is_told(flags: dict[str, Any], message: str) -> None:
    (line,) = config(**{"checkpointing_steps": 5, **flags}).warnings(total_steps=10)
    assert message in line


# ----------------------------------------------------------------------------------------------------- optimizer and schedule


def groups(**flags: Any) -> list[dict[str, Any]]:
    models = {"transformer": nn.Linear(2, 2), "text_encoder": nn.Linear(2, 2)}
    models["transformer"].bias.requires_grad_(False)
    optimizer = make_optimizer(config(train_text_encoder=True, **flags), models, world_size=3)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
    return optimizer.param_groups


@pytest.mark.parametrize(
    ("flags", "key", "values"),
    [
        ({"learning_rate": 0.5}, "lr", (0.5, 5e-6)),
        ({"text_encoder_lr": 0.25}, "lr", (1e-4, 0.25)),
        ({"learning_rate": 0.5, "scale_lr": True, "train_batch_size": 2, "gradient_accumulation_steps": 5}, "lr", (15.0, 5e-6)),
        ({"adam_beta1": 0.5}, "betas", ((0.5, 0.999),) * 2),
        ({"adam_beta2": 0.5}, "betas", ((0.9, 0.5),) * 2),
        ({"adam_weight_decay": 0.5}, "weight_decay", (0.5, 1e-3)),
        ({"adam_weight_decay_text_encoder": 0.5}, "weight_decay", (1e-4, 0.5)),
        ({"adam_epsilon": 0.5}, "eps", (0.5, 0.5)),
        ({"optimizer": "Prodigy", "learning_rate": 1.0}, "lr", (1.0, 1.0)),
        ({"optimizer": "prodigy", "prodigy_beta3": 0.5}, "beta3", (0.5, 0.5)),
        ({"optimizer": "prodigy", "prodigy_decouple": False}, "decouple", (False, False)),
        ({"optimizer": "prodigy", "prodigy_use_bias_correction": False}, "use_bias_correction", (False, False)),
        ({"optimizer": "prodigy", "prodigy_safeguard_warmup": False}, "safeguard_warmup", (False, False)),
    ],
)
def test_what_a_flag_sets_in_the_optimizer(flags: dict[str, Any], key: str, values: tuple[Any, ...]) -> None:
    assert tuple(group[key] for group in groups(**flags)) == values


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, lambda step: 1.0),
        ({"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 4}, lambda step: min(1.0, step / 4)),
        ({"lr_scheduler": "linear", "lr_warmup_steps": 0}, lambda step: 1 - step / 8),
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 0}, lambda step: (1 + math.cos(math.pi * step / 8)) / 2),
        (
            {"lr_scheduler": "cosine_with_restarts", "lr_warmup_steps": 0, "lr_num_cycles": 2},
            lambda step: (1 + math.cos(math.pi * (step / 4 % 1))) / 2,
        ),
        ({"lr_scheduler": "polynomial", "lr_warmup_steps": 0, "lr_power": 2.0}, lambda step: (1 - step / 8) ** 2),
    ],
)
def test_what_the_schedule_flags_make_of_the_rate(flags: dict[str, Any], expected: Any) -> None:
    settings = config(learning_rate=1.0, **flags)
    optimizer = make_optimizer(settings, {"transformer": nn.Linear(1, 1)}, 1)
    scheduler = make_lr_scheduler(settings, optimizer, total_steps=8)
    rates = []
    for _ in range(8):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([expected(step) for step in range(8)], abs=1e-6)


# ------------------------------------------------------------------------------------------------------- seen in a whole run


def first_loss(pool: RankPool, flux_folder: Path, photo_folder: Path, out: Path, **flags: Any) -> float:
    pool.run(run, 1, Job(flags_for(flux_folder, photo_folder, out, **{**ADAMW, "max_train_steps": 1, **flags})))
    return float(read_lines(out / "metrics.jsonl")[0]["loss"])


def test_flags_that_change_the_loss(pool: RankPool, flux_folder: Path, photo_folder: Path, tmp_path: Path) -> None:
    def loss(name: str, **flags: Any) -> float:
        return first_loss(pool, flux_folder, photo_folder, tmp_path / name, **flags)

    plain = loss("plain")
    assert loss("checkpointed", gradient_checkpointing=True) == pytest.approx(plain, rel=1e-3)
    assert loss("offloaded", offload=True) == plain
    changed = {
        "guidance": {"guidance_scale": 1.0},
        "length": {"max_sequence_length": 9},
        "precision": {"mixed_precision": "no"},
        "seed": {"seed": 1},
        "density": {"weighting_scheme": "logit_normal", "logit_mean": 3.0},
    }
    losses = {name: loss(name, **flags) for name, flags in changed.items()}
    assert all(value != plain for value in losses.values()), losses
    assert len(set(losses.values())) == len(losses)


def test_clipping_makes_steps_smaller_or_is_left_out(pool: RankPool, flux_folder: Path, photo_folder: Path, tmp_path: Path) -> None:
    weights, lines = {}, {}
    for norm in (1.0, 1e-9, 0.0):
        out = tmp_path / str(norm)
        first_loss(pool, flux_folder, photo_folder, out, max_grad_norm=norm, lr_warmup_steps=0)
        weights[norm] = load_file(out / PIPELINE)
        lines[norm] = read_lines(out / "metrics.jsonl")[0]
    base = load_file(flux_folder / PIPELINE)
    moved = {norm: sum(float((tensor - base[name]).abs().sum()) for name, tensor in found.items()) for norm, found in weights.items()}
    assert moved[1e-9] < 0.1 * moved[1.0]  # AdamW minds the size only where it nears its epsilon
    assert lines[1.0]["grad_norm"] == lines[1e-9]["grad_norm"] > 1.0
    assert "grad_norm" not in lines[0.0]


def look_at(folder: str, checkpointing: bool) -> dict[str, Any]:
    """What the model and the VAE are like, in one process."""
    from accelerate import Accelerator

    from holdfast.engine.names import unwrap
    from holdfast.recipes.flux_dreambooth import build_transformer
    from holdfast.training.models import clip_gradients, on_device, prepare_model

    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator(cpu=True)
    model: Any = prepare_model(
        accelerator, lambda: build_transformer(Path(folder)), Path(folder) / "transformer", None, checkpointing
    )
    places: list[str] = []

    class Part(nn.Module):
        def to(self, device: Any) -> Any:  # type: ignore[override]
            places.append(str(device))
            return self

    for offload in (True, False):
        with on_device(Part(), torch.device("meta"), offload):
            places.append("used")
    pair: list[nn.Module] = [nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)]
    for module, value in zip(pair, (3.0, 4.0), strict=True):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, value)
    norm = float(clip_gradients(accelerator, pair, 1.0))
    after = math.sqrt(sum(float(p.grad.square().sum()) for m in pair for p in m.parameters() if p.grad is not None))
    return {"checkpointing": unwrap(model).is_gradient_checkpointing, "places": places, "norms": (norm, after)}


def test_flags_that_change_how_it_is_computed(pool: RankPool, flux_folder: Path) -> None:
    for checkpointing in (True, False):
        (seen,) = pool.run(look_at, 1, str(flux_folder), checkpointing)
        assert seen["checkpointing"] is checkpointing
    assert seen["places"] == ["meta", "used", "cpu", "meta", "used"]
    assert seen["norms"] == pytest.approx((math.sqrt(4 * 9 + 2 * 16), 1.0), rel=1e-4)


def test_the_last_pictures_have_a_prompt_of_their_own_or_are_left_out(
    pool: RankPool, flux_folder: Path, photo_folder: Path, tmp_path: Path
) -> None:
    more = {"final_validation_prompt": "a photo of a small dog", "num_validation_images": 1, "logging_dir": "board", "report_to": "tensorboard"}
    first_loss(pool, flux_folder, photo_folder, tmp_path / "own", **more)
    assert [path.name for path in (tmp_path / "own/final/step-000001").iterdir()] == ["0.png"]
    assert list((tmp_path / "own/board").rglob("events.out.tfevents.*"))
    first_loss(pool, flux_folder, photo_folder, tmp_path / "none", validation_prompt="sks", skip_final_inference=True)
    assert not (tmp_path / "none/final").exists()
