"""Every wrong flag is answered at once, in words, before torch is imported; the published command parses."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

import holdfast
from holdfast.errors import UsageError
from holdfast.recipes.flux_dreambooth import Config

COMMAND = """--pretrained_model_name_or_path {model} --instance_data_dir {photos} --output_dir {out}
 --mixed_precision=bf16 --instance_prompt="a photo of sks girl" --resolution=512 --train_batch_size=1 --guidance_scale=1
 --gradient_accumulation_steps=4 --optimizer=prodigy --learning_rate=1. --lr_scheduler=constant --lr_warmup_steps=0
 --max_train_steps=1000 --checkpointing_steps=500 --seed=0"""


def parse(arguments: list[str]) -> Config:
    return tyro.cli(Config, args=arguments, use_underscores=True)


def command(flux_folder: Path, photo_folder: Path, out: Path) -> list[str]:
    return shlex.split(COMMAND.format(model=flux_folder, photos=photo_folder, out=out))


@pytest.fixture
def valid(flux_folder: Path, photo_folder: Path, tmp_path: Path) -> dict[str, object]:
    return {
        "pretrained_model_name_or_path": str(flux_folder),
        "instance_data_dir": str(photo_folder),
        "output_dir": str(tmp_path / "out"),
        "instance_prompt": "a photo of sks girl",
        "resolution": 32,
    }


def test_the_published_command_parses_and_is_valid(flux_folder, photo_folder, tmp_path):
    config = parse(command(flux_folder, photo_folder, tmp_path))
    config.validate()
    assert (config.learning_rate, config.instance_prompt) == (1.0, "a photo of sks girl")
    assert (config.mixed_precision, config.guidance_scale) == ("bf16", 1.0)
    assert (config.gradient_checkpointing, config.cpu_fsdp) == (False, False)


def test_dashes_and_flags_without_a_value(flux_folder, photo_folder, tmp_path):
    more = [
        "--gradient-checkpointing",
        "--cpu_fsdp",
        "--checkpoints-total-limit",
        "2",
        "--resume_from_checkpoint=latest",
    ]
    config = parse([*command(flux_folder, photo_folder, tmp_path), *more])
    assert config.gradient_checkpointing
    assert config.cpu_fsdp
    assert (config.checkpoints_total_limit, config.resume_from_checkpoint) == (2, "latest")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_batch_size": 0}, "--train_batch_size is 0; it has to be at least 1"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps is 0"),
        ({"max_train_steps": 0}, "--max_train_steps is 0"),
        ({"checkpointing_steps": -1}, "--checkpointing_steps is -1"),
        ({"checkpoints_total_limit": 0}, "--checkpoints_total_limit is 0"),
        ({"learning_rate": -1.0}, "--learning_rate is -1.0; it has to be above 0"),
        ({"learning_rate": float("nan")}, "--learning_rate is nan"),
        ({"adam_beta2": 1.0}, "--adam_beta2 is 1.0; it has to be at least 0 and below 1"),
        ({"optimizer": "sgd"}, "--optimizer is 'sgd'; choose one of adamw, prodigy"),
        ({"variant": "fp16/.."}, "--variant is 'fp16/..'"),
        ({"instance_prompt": " "}, "--instance_prompt is empty"),
        ({"max_sequence_length": 513}, "--max_sequence_length is 513; it has to be from 1 to 512"),
        ({"resolution": 33}, "--resolution is 33; this model needs a multiple of 2"),
        ({"instance_data_dir": "/no/such/folder"}, "--instance_data_dir /no/such/folder: there is no such folder"),
        ({"resume_from_checkpoint": "checkpoint-7"}, "--resume_from_checkpoint checkpoint-7: there is no such"),
        ({"pretrained_model_name_or_path": "/no/such/model"}, "/no/such/model: there is no such folder"),
        ({"pretrained_model_name_or_path": "./model"}, "model: there is no such folder, and it is no repository name"),
    ],
)
def test_one_wrong_flag(valid, change, message):
    with pytest.raises(UsageError) as caught:
        Config(**{**valid, **change}).validate()
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_wrong_flags_in_one_message(valid, tmp_path):
    (tmp_path / "file").write_text("")
    wrong = {"seed": -1, "output_dir": str(tmp_path / "file"), "optimizer": "lion", "instance_data_dir": str(tmp_path)}
    with pytest.raises(UsageError) as caught:
        Config(**{**valid, **wrong}).validate()
    for part in ("4 thing(s)", "--seed is -1", "is a file; name a folder", "'lion'", "holds no image files"):
        assert part in str(caught.value)


def broken(flux_folder: Path, folder: Path, how: str) -> Path:
    base = shutil.copytree(flux_folder, folder / "base")
    if how == "index":
        (base / "model_index.json").unlink()
    elif how == "class":
        index = json.loads((base / "model_index.json").read_text())
        index["transformer"] = ["diffusers", "SD3Transformer2DModel"]
        (base / "model_index.json").write_text(json.dumps(index))
    elif how == "part":
        shutil.rmtree(base / "vae")
    elif how == "weights":
        (base / "text_encoder_2/model.safetensors").unlink()
    elif how == "shard":
        listed = {"weight_map": {"a": "diffusion_pytorch_model-00002-of-00002.safetensors"}}
        (base / "transformer/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(listed))
    return base


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("index", "is no diffusers pipeline: it has no readable model_index.json"),
        ("class", "gives SD3Transformer2DModel as its transformer, where FluxTransformer2DModel is needed"),
        ("part", "lacks the folder vae/"),
        ("weights", "text_encoder_2 has no safetensors weights"),
        ("shard", "names files that are not there: diffusion_pytorch_model-00002-of-00002.safetensors"),
    ],
)
def test_base_folder_that_is_not_a_whole_flux_pipeline(valid, flux_folder, tmp_path, how, message):
    valid["pretrained_model_name_or_path"] = str(broken(flux_folder, tmp_path, how))
    with pytest.raises(UsageError) as caught:
        Config(**valid).validate()
    assert message in str(caught.value)


def test_output_into_the_base_folder_is_refused(valid, flux_folder):
    with pytest.raises(UsageError, match="--output_dir is the base pipeline's own folder"):
        Config(**{**valid, "output_dir": str(flux_folder)}).validate()


def test_wrong_flags_need_no_torch(flux_folder, photo_folder, tmp_path):
    script = (
        "import sys, tyro\n"
        "from holdfast.recipes.flux_dreambooth import Config\n"
        "from holdfast.errors import UsageError\n"
        "try: tyro.cli(Config, args=sys.argv[1:], use_underscores=True).validate()\n"
        "except UsageError as error: print(error)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    arguments = [*command(flux_folder, photo_folder, tmp_path), "--train_batch_size=0"]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--train_batch_size is 0" in done.stdout


@pytest.mark.parametrize(
    ("change", "images", "ranks", "steps"),
    [
        ({"max_train_steps": 7}, 5, 2, 7),
        ({"num_train_epochs": 4, "train_batch_size": 1}, 5, 2, 10),
        ({"num_train_epochs": 1, "train_batch_size": 2, "gradient_accumulation_steps": 2}, 9, 2, 2),
        ({"num_train_epochs": 1, "train_batch_size": 8}, 5, 3, 1),
    ],
)
def test_total_steps(valid, change, images, ranks, steps):
    config = Config(**{**valid, **change})
    loader = holdfast.DataLoader(range(images), config.train_batch_size, rank=0, world_size=ranks)
    assert config.total_steps(loader.batches) == steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpointing_steps": 10}, "No checkpoint will be written before the end"),
        ({"optimizer": "Prodigy"}, "--learning_rate 0.0001 is very low for Prodigy"),
        ({"lr_warmup_steps": 3}, "--lr_warmup_steps has no effect"),
    ],
)
def test_flags_that_will_not_do_what_was_expected(valid, change, message):
    fine = {"checkpointing_steps": 5}
    assert not list(Config(**{**valid, **fine}).warnings(total_steps=10))
    (line,) = Config(**{**valid, **fine, **change}).warnings(total_steps=10)
    assert message in line
