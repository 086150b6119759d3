"""The export: cut into files of a given size, free of variants, whole or not there at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file

import holdfast
from holdfast.errors import CorruptCheckpoint
from holdfast.recipes.flux_dreambooth import PARTS
from holdfast.training.export import checkpoint_weights, export_pipeline, write_weights
from holdfast.training.pipeline_folder import pipeline_problems

STEM = "diffusion_pytorch_model"


@pytest.fixture
def weights(flux_folder: Path) -> dict[str, torch.Tensor]:
    return load_file(flux_folder / f"transformer/{STEM}.safetensors")


def test_files_stay_below_the_size_and_load_as_one_model(flux_folder, weights, tmp_path):
    shutil.copy(flux_folder / "transformer/config.json", tmp_path)
    largest = max(tensor.nbytes for tensor in weights.values())
    write_weights(tmp_path, STEM, weights.items(), torch.float32, max_file_bytes=largest)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"{STEM}-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    for name in files:
        assert sum(tensor.nbytes for tensor in load_file(tmp_path / name).values()) <= largest
    index = json.loads((tmp_path / f"{STEM}.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    loaded = FluxTransformer2DModel.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_an_export_replaces_an_earlier_one_of_other_files(flux_folder, weights, tmp_path):
    write_weights(tmp_path / "transformer", STEM, weights.items(), torch.float32, max_file_bytes=10_000)
    doubled = {name: tensor * 2 for name, tensor in weights.items()}
    export_pipeline(flux_folder, tmp_path, PARTS, "transformer", doubled.items(), torch.float32, None)
    assert [path.name for path in (tmp_path / "transformer").glob("*.safetensors*")] == [f"{STEM}.safetensors"]
    loaded = FluxPipeline.from_pretrained(tmp_path).transformer.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in doubled.items())


def test_a_base_with_variants_becomes_a_plain_pipeline(flux_folder, weights, tmp_path):
    base = tmp_path / "base"
    FluxPipeline.from_pretrained(flux_folder).save_pretrained(base, variant="fp16", max_shard_size="20KB")
    assert list((base / "text_encoder").glob("*index.fp16.json"))
    assert not list(pipeline_problems(base, PARTS, "fp16"))
    export_pipeline(base, tmp_path / "out", PARTS, "transformer", weights.items(), torch.float32, "fp16")
    assert not [path for path in (tmp_path / "out").rglob("*") if "fp16" in path.name]
    loaded, original = FluxPipeline.from_pretrained(tmp_path / "out"), FluxPipeline.from_pretrained(flux_folder)
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        expected = getattr(original, part).state_dict()
        for name, tensor in getattr(loaded, part).state_dict().items():
            assert torch.equal(tensor, expected[name]), f"{part}: {name}"


def test_an_export_that_fails_leaves_no_pipeline_behind(flux_folder, weights, tmp_path):
    export_pipeline(flux_folder, tmp_path, PARTS, "transformer", weights.items(), torch.float32, None)

    def broken():
        yield next(iter(weights.items()))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        export_pipeline(flux_folder, tmp_path, PARTS, "transformer", broken(), torch.float32, None)
    assert not (tmp_path / "model_index.json").exists()


def test_weights_of_a_damaged_checkpoint_are_not_exported(tmp_path):
    model = torch.nn.Linear(4, 3)
    checkpointer = holdfast.Checkpointer(tmp_path, model=model)
    checkpointer.save(1)
    checkpointer.close()
    found = dict(checkpoint_weights(tmp_path / "checkpoint-1"))
    assert torch.equal(found["weight"], model.weight)
    assert torch.equal(found["bias"], model.bias)
    (file,) = (tmp_path / "checkpoint-1").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[content.index(model.weight.detach().numpy().tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        dict(checkpoint_weights(tmp_path / "checkpoint-1"))
