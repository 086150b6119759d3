"""The recipe as a whole, on real ranks and a tiny Flux: what is trained, killed, continued and exported."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from recipe_jobs import (
    ACCUMULATION,
    ADAMW,
    EVERY,
    FSDP,
    PRODIGY,
    STEPS,
    Job,
    check_killed_and_resumed,
    digest,
    flags_for,
    fsdp1_environment,
    run,
)
from safetensors.torch import load_file

from holdfast.engine.extract import open_checkpoint, read_whole
from holdfast.errors import UsageError
from holdfast.recipes import flux_dreambooth as recipe
from holdfast.testing import RankPool
from holdfast.training.metrics import read_lines

TOPOLOGIES = {
    "one process": (1, {}, {**ADAMW, "checkpoints_total_limit": 1}),
    "2 ranks DDP": (2, {}, ADAMW),
    "2 ranks FSDP2": (2, FSDP, {**PRODIGY, "cpu_fsdp": True}),
    "3 ranks FSDP2": (3, FSDP, {**PRODIGY, "cpu_fsdp": True}),
}


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


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_killed_and_resumed_run_is_the_uninterrupted_run(
    pool: RankPool, flux_folder, photo_folder, tmp_path, topology
):
    check_killed_and_resumed(pool, flux_folder, photo_folder, tmp_path, *TOPOLOGIES[topology])


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


def test_layers_that_the_model_does_not_have_are_a_mistake(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", cpu_fsdp=True)
    for version in ("1", "2"):
        wrong = {**FSDP, "FSDP_VERSION": version, "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
        for code, text in pool.run(refused, 2, flags, wrong):
            assert code == 2
            assert "fsdp_transformer_layer_cls_to_wrap does not fit" in text
            assert "LlamaDecoderLayer" in text


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
