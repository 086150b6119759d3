"""The recipe with `--rank`: what a checkpoint holds, what is exported, and that a pipeline with it makes other pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from recipe_jobs import (
    ADAMW,
    EVERY,
    FSDP,
    LORA,
    STEPS,
    Job,
    check_killed_and_resumed,
    flags_for,
    fsdp1_environment,
    run,
)
from safetensors import safe_open
from safetensors.torch import load_file

from holdfast.engine.export import Request, export_checkpoint
from holdfast.engine.extract import open_checkpoint, read_whole
from holdfast.errors import UsageError
from holdfast.recipes import flux_dreambooth as recipe
from holdfast.testing import RankPool

FLAGS = {**ADAMW, "lr_warmup_steps": 0, "learning_rate": 1e-2, "rank": 3, "lora_alpha": 6, "lora_dropout": 0.1}


def picture(flux_folder: Path, lora: Path | None, scale: float = 1.0) -> torch.Tensor:
    pipeline = FluxPipeline.from_pretrained(flux_folder, dtype=torch.float32)
    if lora is not None:
        pipeline.load_lora_weights(lora)
        pipeline.set_adapters(pipeline.get_active_adapters(), scale)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    arguments: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "latent"}
    images: torch.Tensor = pipeline("a photo of sks girl", generator=generator, **arguments).images
    return images


@pytest.mark.parametrize("way", ["one process", "2 ranks FSDP1", "3 ranks FSDP2"])
def test_a_lora_is_killed_resumed_exported_and_seen(pool: RankPool, flux_folder, photo_folder, tmp_path, way):
    environment = {"2 ranks FSDP1": fsdp1_environment(tmp_path), "3 ranks FSDP2": FSDP}.get(way, {})
    ranks = 1 if way == "one process" else int(way[0])
    more = {**FLAGS, "cpu_fsdp": bool(environment), "upcast_before_saving": True}
    check_killed_and_resumed(pool, flux_folder, photo_folder, tmp_path, ranks, environment, more, (LORA,))

    exported = load_file(tmp_path / "killed" / LORA)
    checkpoint = open_checkpoint(tmp_path / f"killed/checkpoint-{STEPS}")
    for name, tensor in exported.items():
        path, _, matrix = name.removeprefix("transformer.").removesuffix(".weight").rpartition(".")
        assert torch.equal(tensor, read_whole(checkpoint, f"model.{path}.{matrix}.default.weight")), name
    written = [name for path in (tmp_path / f"killed/checkpoint-{STEPS}").glob("*.safetensors") for name in load_file(path)]
    assert written
    assert {name for name in written if ".lora_" not in name} == {"holdfast.state"}  # the adapter and its optimizer, and not the base
    with safe_open(tmp_path / "killed" / LORA, "pt") as file:
        described = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (described["transformer.r"], described["transformer.lora_alpha"]) == (3, 6)
    if ranks == 1:
        offline = Request(tmp_path / f"killed/checkpoint-{STEPS}", tmp_path / "offline", "diffusers", lora_alpha=6)
        export_checkpoint(offline)
        again = load_file(tmp_path / "offline" / LORA)
        assert again.keys() == exported.keys()
        assert all(torch.equal(tensor, again[name]) for name, tensor in exported.items())
        plain, adapted = picture(flux_folder, None), picture(flux_folder, tmp_path / "killed")
        assert not torch.allclose(plain, adapted, atol=1e-4)
        assert torch.allclose(plain, picture(flux_folder, tmp_path / "killed", scale=0.0), atol=1e-6)


def test_alpha_layers_and_dtype_of_a_lora(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(
        flux_folder, photo_folder, tmp_path / "out", **FLAGS, lora_layers="attn.to_q, proj_mlp", max_train_steps=1, train_text_encoder=True
    )
    pool.run(run, 1, Job(flags))
    exported = load_file(tmp_path / "out" / LORA)
    layers = {name.rpartition(".lora_")[0] for name in exported}
    assert {name for name in layers if name.startswith("transformer.")} == {
        *(f"transformer.transformer_blocks.{n}.attn.to_q" for n in (0, 1)),
        *(f"transformer.single_transformer_blocks.{n}.{end}" for n in (0, 1) for end in ("attn.to_q", "proj_mlp")),
    }
    assert len({name for name in layers if name.startswith("text_encoder.")}) == 2 * 4
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}  # --mixed_precision, without --upcast_before_saving
    picture(flux_folder, tmp_path / "out")


def test_a_lora_goes_on_with_the_same_state_on_other_ranks(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", **FLAGS)
    sharded = {**flags, "cpu_fsdp": True}
    (saved, _) = pool.run(run, 2, Job(sharded, FSDP, look_before=EVERY + 1, stop_before=EVERY + 2))
    assert len([name for name in saved["state"] if name.endswith("exp_avg")]) == len([n for n in saved["state"] if n.endswith(".weight")])
    assert all(".lora_" in name for name in saved["state"] if name != "group")
    again = {"resume_from_checkpoint": f"checkpoint-{EVERY}"}
    for ranks, environment, changed in ((3, FSDP, sharded), (1, {}, flags), (2, {}, flags)):
        for result in pool.run(run, ranks, Job({**changed, **again}, environment, look_before=1, stop_before=1)):
            assert result["state"] == saved["state"], f"{ranks} ranks"


@pytest.mark.parametrize("way", ["2 ranks FSDP1", "2 ranks FSDP2"])
def test_the_average_of_a_lora_is_exported(pool: RankPool, flux_folder, photo_folder, tmp_path, way):
    environment = {"2 ranks FSDP1": fsdp1_environment(tmp_path), "2 ranks FSDP2": FSDP}[way]
    ranks = 2
    more = {**FLAGS, "cpu_fsdp": bool(environment), "use_ema": True, "upcast_before_saving": True, "max_train_steps": EVERY}
    out = tmp_path / "out"
    pool.run(run, ranks, Job(flags_for(flux_folder, photo_folder, out, **more), environment))
    checkpoint = open_checkpoint(out / f"checkpoint-{EVERY}")
    averages = {name for name in checkpoint.tensors if name.startswith("model.ema.")}
    assert averages == {n.replace("transformer", "ema", 1) for n in checkpoint.tensors if n.startswith("model.tr") and ".lora_" in n}
    exported = load_file(out / LORA)
    assert len(exported) == len(averages)
    for name, tensor in exported.items():
        path, _, matrix = name.removeprefix("transformer.").removesuffix(".weight").rpartition(".")
        assert torch.equal(tensor, read_whole(checkpoint, f"model.ema.{path}.{matrix}.default.weight")), name


def test_an_unknown_layer_is_told_with_its_nearest(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", **{**FLAGS, "lora_layers": "attn.toq,to_k,ff.net.9.proj"})
    ((code, text),) = pool.run(refused, 1, flags)
    assert code == 2
    assert "no layer of FluxTransformer2DModel ends in 'attn.toq'; nearest: attn.to_q" in text
    assert "'ff.net.9.proj'; nearest: ff.net.0.proj" in text
    assert "to_k'" not in text
    assert not (tmp_path / "out").exists()


def refused(flags: dict[str, Any]) -> tuple[int, str]:
    try:
        recipe.main(recipe.Config(**flags))
    except UsageError as error:
        return error.exit_code, str(error)
    return 0, ""
