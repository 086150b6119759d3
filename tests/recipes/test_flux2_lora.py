"""The Flux2 recipe on real ranks: killed and resumed, cut anew, with caches and without, exported, and seen in a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import load_dataset
from diffusers import Flux2Pipeline
from PIL import Image
from recipe_jobs import (
    ADAMW,
    EVERY,
    FLUX2,
    FSDP,
    LORA,
    STEPS,
    Job,
    check_killed_and_resumed,
    flags_for,
    fsdp1_environment,
    numbers,
    run,
)
from safetensors import safe_open
from safetensors.torch import load_file

from holdfast.engine.export import Request, export_checkpoint
from holdfast.testing import RankPool

LENGTH = 48  # the system's message has 32 tokens
FLAGS = {
    **ADAMW, "lr_warmup_steps": 0, "learning_rate": 1e-2, "rank": 3, "lora_alpha": 6, "max_sequence_length": LENGTH, "guidance_scale": 1.0,
    "instance_prompt": "", "instance_data_dir": None, "image_column": "output", "caption_column": "instruction",
}  # fmt: skip
PAIRS = {"cond_image_column": "file_name"}
SHARDED = {"cpu_fsdp": True, "fsdp_text_encoder": True, "cache_latents": True, "offload": True}
PROMPT = "turn day into night"


def flags(base: Path, data: Path, out: Path, **more: Any) -> dict[str, Any]:
    return flags_for(base, data, out, **{**FLAGS, "dataset_name": str(data), **more})


def given_image(pairs: Path, path: Path) -> Path:
    """The condition image of the first pair, large enough for the pipeline."""
    row = load_dataset(str(pairs), split="train").with_format("arrow")[0]["file_name"][0].as_py()
    Image.open(io.BytesIO(row["bytes"])).convert("RGB").resize((64, 64)).save(path)
    return path


def entries(out: Path, kind: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "cache" / kind).rglob("*.safetensors")}


@pytest.mark.parametrize(("version", "with_image"), [(2, True), (2, False), (1, True)])
def test_a_run_as_the_command_has_it_is_killed_resumed_and_seen(pool: RankPool, flux2_folder, pair_folder, tmp_path, version, with_image):
    """A sharded text encoder, cached latents, `--offload`, image pairs or images alone; then the LoRA in diffusers' own pipeline."""
    environment = FSDP if version == 2 else fsdp1_environment(tmp_path)
    image = given_image(pair_folder, tmp_path / "given.png") if with_image else None
    more = {**FLAGS, **(PAIRS if with_image else {}), **SHARDED, "dataset_name": str(pair_folder), "lora_dropout": 0.1}
    check_killed_and_resumed(pool, flux2_folder, pair_folder, tmp_path, 2, environment, more, (LORA,), FLUX2)

    out = tmp_path / "killed"
    assert len(entries(out, "embeddings")) == 5  # six captions, two alike
    assert len(entries(out, "latents")) == (12 if with_image else 6)
    stored = {name for path in (out / f"checkpoint-{STEPS}").glob("*.safetensors") for name in load_file(path)}
    assert {name for name in stored if ".lora_" not in name} == {"holdfast.state"}
    export_checkpoint(Request(out / f"checkpoint-{STEPS}", tmp_path / "offline", "diffusers", lora_alpha=6, dtype="bf16"))
    exported, offline = load_file(out / LORA), load_file(tmp_path / "offline" / LORA)
    assert exported.keys() == offline.keys()
    assert all(torch.equal(tensor, offline[name]) for name, tensor in exported.items())

    pipeline = Flux2Pipeline.from_pretrained(flux2_folder, dtype=torch.float32)
    plain = picture(pipeline, image)
    pipeline.load_lora_weights(out)
    assert not torch.allclose(picture(pipeline, image), plain, atol=1e-4)
    pipeline.set_adapters(pipeline.get_active_adapters(), 0.0)
    assert torch.allclose(picture(pipeline, image), plain, atol=1e-6)


def picture(pipeline: Any, image: Path | None, kind: str = "latent", steps: int = 2) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    given = {"image": Image.open(image)} if image is not None else {"height": 16, "width": 16}
    return pipeline(
        prompt=PROMPT, generator=torch.Generator().manual_seed(0), num_inference_steps=steps, output_type=kind, max_sequence_length=LENGTH,
        **given,
    ).images  # fmt: skip


@pytest.mark.parametrize("with_image", [True, False])
def test_a_picture_of_the_end_is_the_pipelines_own(pool: RankPool, flux2_folder, pair_folder, tmp_path, with_image):
    """In fp32, what the recipe draws is what its LoRA draws in diffusers' pipeline: from an image on ranks that shard, from text on one."""
    image = given_image(pair_folder, tmp_path / "given.png") if with_image else None
    more = {**PAIRS, "validation_image": str(image), "cpu_fsdp": True} if image is not None else {}
    asked = {"final_validation_prompt": PROMPT, "num_validation_images": 1, "mixed_precision": "no", "max_train_steps": 2}
    out = tmp_path / "out"
    job = Job(flags(flux2_folder, pair_folder, out, **more, **asked), FSDP if with_image else {}, recipe=FLUX2)
    pool.run(run, 2 if with_image else 1, job)
    pipeline = Flux2Pipeline.from_pretrained(flux2_folder, dtype=torch.float32)
    pipeline.load_lora_weights(out)
    ours = np.asarray(Image.open(out / "final/step-000002/0.png"), dtype=int)
    theirs = np.asarray(picture(pipeline, image, "pil", 50)[0], dtype=int)
    assert ours.shape == ((64, 64, 3) if with_image else (16, 16, 3))
    assert np.abs(ours - theirs).max() <= 1
    assert ours.std() > 1


def test_a_checkpoint_goes_on_on_any_ranks_and_under_any_sharding(pool: RankPool, flux2_folder, pair_folder, tmp_path):
    """One more step with a rate that changes nothing: the adapter that each way has read, trained and written is the same file."""
    sharded, out = {**PAIRS, "cpu_fsdp": True, "repeats": 2, "gradient_accumulation_steps": 1}, tmp_path / "out"
    first = flags(flux2_folder, pair_folder, out, **sharded, max_train_steps=EVERY)
    pool.run(run, 2, Job(first, FSDP, recipe=FLUX2))
    again = {**first, "max_train_steps": EVERY + 1, "learning_rate": 1e-30, "resume_from_checkpoint": str(out / f"checkpoint-{EVERY}")}
    fsdp1 = fsdp1_environment(tmp_path)
    ways = {
        "one": (1, {}), "ddp": (2, {}), "fsdp1": (2, fsdp1), "fsdp1-orig": (3, {**fsdp1, "FSDP_USE_ORIG_PARAMS": "true"}), "fsdp2": (4, FSDP),
    }  # fmt: skip
    states = {}
    for name, (ranks, environment) in ways.items():
        more = {**again, "output_dir": str(tmp_path / name), "cpu_fsdp": bool(environment)}
        look = None if name.startswith("fsdp1") else 1  # no parameter of its own to look at there
        seen = pool.run(run, ranks, Job(more, environment, look_before=look, recipe=FLUX2))
        states |= {name: seen[0]["state"]} if look else {}
        assert (tmp_path / name / LORA).read_bytes() == (tmp_path / "out" / LORA).read_bytes(), name
    assert len([key for key in states["one"] if key.endswith("exp_avg_sq")]) > 20
    assert states["ddp"] == states["one"] == states["fsdp2"]


def test_caches_change_nothing_and_a_second_run_encodes_nothing(pool: RankPool, flux2_folder, pair_folder, tmp_path):
    """Two ranks, buckets, several passes: losses with cached latents are those of the VAE at each step, bit for bit."""
    buckets = {"aspect_ratio_buckets": "16,16;16,24;24,16", "train_batch_size": 2}
    lines = {}
    for name, cached in (("cached", True), ("plain", False)):
        job = flags(flux2_folder, pair_folder, tmp_path / name, **PAIRS, **buckets, cache_latents=cached)
        seen = pool.run(run, 2, Job(job, recipe=FLUX2))
        lines[name] = numbers(tmp_path / name)
        channels = {shape[1] for rank in seen for shape in rank["shapes"]}
        assert channels == ({8} if cached else {3})  # mean and deviation of 4 channels, or pixels
    assert lines["cached"] == lines["plain"]
    assert len(lines["plain"]) == STEPS
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cached/cache").rglob("*.safetensors")}
    pool.run(run, 2, Job(flags(flux2_folder, pair_folder, tmp_path / "cached", **PAIRS, **buckets, cache_latents=True), recipe=FLUX2))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cached/cache").rglob("*.safetensors")} == before


def test_what_describes_the_lora(pool: RankPool, flux2_folder, pair_folder, tmp_path):
    more = {"lora_layers": "attn.to_q,ff.linear_in", "max_train_steps": 1, "upcast_before_saving": True}
    pool.run(run, 1, Job(flags(flux2_folder, pair_folder, tmp_path / "out", **PAIRS, **more), recipe=FLUX2))
    with safe_open(tmp_path / "out" / LORA, "pt") as file:
        names, described = set(file.keys()), file.metadata()["lora_adapter_metadata"]
    assert '"transformer.r": 3' in described
    assert {name.split(".lora_")[0].split(".", 3)[-1] for name in names} == {"attn.to_q", "ff.linear_in"}
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "out" / LORA).values()} == {"torch.float32"}
    card = (tmp_path / "out/README.md").read_text()
    assert "Flux2Pipeline" in card
    assert "image-to-image" in card
