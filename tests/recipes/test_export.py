"""The export: cut into files of a given size, free of variants, whole or not there at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file

import holdfast
from holdfast.errors import CorruptCheckpoint
from holdfast.recipes.flux_dreambooth import PARTS
from holdfast.training.export import export_pipeline
from holdfast.training.pipeline_folder import pipeline_problems

TRAINED = {"transformer": ""}
STEM = "diffusion_pytorch_model"


def trained(flux_folder: Path, folder: Path, factor: float) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of the base's transformer with all weights multiplied by `factor`, and these weights."""
    model = FluxTransformer2DModel.from_pretrained(flux_folder / "transformer")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    with holdfast.Checkpointer(folder, model=model) as checkpointer:
        checkpointer.save(1)
    return folder / "checkpoint-1", model.state_dict()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_files_stay_below_the_size_and_load_as_one_model(flux_folder, tmp_path):
    checkpoint, weights = trained(flux_folder, tmp_path / "run", 2)
    largest = max(tensor.nbytes for tensor in weights.values())
    export_pipeline(flux_folder, tmp_path / "out", PARTS, TRAINED, checkpoint, "fp32", None, None, largest)
    folder = tmp_path / "out/transformer"
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"{STEM}-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    for name in files:
        assert sum(tensor.nbytes for tensor in load_file(folder / name).values()) <= largest
    index = json.loads((folder / f"{STEM}.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert_equal(FluxTransformer2DModel.from_pretrained(folder).state_dict(), weights)


def test_an_export_replaces_an_earlier_one_of_other_files(flux_folder, tmp_path):
    checkpoint, _ = trained(flux_folder, tmp_path / "a", 1)
    export_pipeline(flux_folder, tmp_path / "out", PARTS, TRAINED, checkpoint, "fp32", None, None, 10_000)
    checkpoint, doubled = trained(flux_folder, tmp_path / "b", 2)
    export_pipeline(flux_folder, tmp_path / "out", PARTS, TRAINED, checkpoint, "fp32", None)
    assert [path.name for path in (tmp_path / "out/transformer").glob("*.safetensors*")] == [f"{STEM}.safetensors"]
    assert_equal(FluxPipeline.from_pretrained(tmp_path / "out").transformer.state_dict(), doubled)


def test_a_base_with_variants_becomes_a_plain_pipeline(flux_folder, tmp_path):
    base = tmp_path / "base"
    FluxPipeline.from_pretrained(flux_folder).save_pretrained(base, variant="fp16", max_shard_size="20KB")
    assert list((base / "text_encoder").glob("*index.fp16.json"))
    assert not list(pipeline_problems(base, PARTS, "fp16"))
    checkpoint, weights = trained(flux_folder, tmp_path / "run", 2)
    export_pipeline(base, tmp_path / "out", PARTS, TRAINED, checkpoint, "fp32", "fp16")
    assert not [path for path in (tmp_path / "out").rglob("*") if "fp16" in path.name]
    loaded, original = FluxPipeline.from_pretrained(tmp_path / "out"), FluxPipeline.from_pretrained(flux_folder)
    assert_equal(loaded.transformer.state_dict(), weights)
    for part in ("vae", "text_encoder", "text_encoder_2"):
        assert_equal(getattr(loaded, part).state_dict(), getattr(original, part).state_dict())


def test_an_export_of_a_damaged_checkpoint_leaves_no_pipeline_behind(flux_folder, tmp_path):
    """Not even the one that was there: half of its files are others by then."""
    checkpoint, weights = trained(flux_folder, tmp_path / "run", 2)
    export_pipeline(flux_folder, tmp_path / "out", PARTS, TRAINED, checkpoint, "fp32", None)
    (file,) = checkpoint.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[content.index(weights["proj_out.weight"].numpy().tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        export_pipeline(flux_folder, tmp_path / "out", PARTS, TRAINED, checkpoint, "fp32", None)
    assert not (tmp_path / "out/model_index.json").exists()
    assert not list((tmp_path / "out/transformer").glob("*.safetensors"))
