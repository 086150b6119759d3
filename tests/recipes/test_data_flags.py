"""The flags of the data, seen in whole runs: caches, buckets, datasets, images of the class."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from recipe_jobs import (
    ACCUMULATION,
    ADAMW,
    FSDP,
    PIPELINE,
    STEPS,
    Job,
    check_killed_and_resumed,
    flags_for,
    numbers,
    run,
)

from holdfast.errors import UsageError
from holdfast.recipes import flux_dreambooth as recipe
from holdfast.testing import RankPool
from holdfast.training.metrics import read_lines

BUCKETS = {"aspect_ratio_buckets": "16,16;16,24;24,16", "train_batch_size": 2}


def refused(flags: dict[str, Any]) -> str:
    try:
        recipe.main(recipe.Config(**flags))
    except UsageError as error:
        return str(error)
    return ""


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_lines(out / "metrics.jsonl")]


def test_cached_is_uncached_and_a_second_run_encodes_nothing(pool: RankPool, flux_folder, photo_folder, tmp_path):
    plain = flags_for(flux_folder, photo_folder, tmp_path / "plain", **ADAMW, cpu_fsdp=True, random_flip=True, repeats=2)
    pool.run(run, 2, Job(plain, FSDP))
    cached = {**plain, "output_dir": str(tmp_path / "cached"), "cache_latents": True}
    pool.run(run, 2, Job(cached, FSDP))
    assert numbers(tmp_path / "cached") == numbers(tmp_path / "plain")
    assert (tmp_path / "cached" / PIPELINE).read_bytes() == (tmp_path / "plain" / PIPELINE).read_bytes()

    entries = {path: path.stat().st_mtime_ns for path in (tmp_path / "cached/cache").rglob("*.safetensors")}
    assert len(entries) > 1
    pool.run(run, 1, Job({**cached, "cpu_fsdp": False, "max_train_steps": STEPS + 1, "resume_from_checkpoint": "latest"}))
    assert {path: path.stat().st_mtime_ns for path in entries} == entries


def test_buckets_are_killed_and_resumed_cached_or_not(pool: RankPool, flux_folder, photo_folder, tmp_path):
    more = {**ADAMW, **BUCKETS, "cpu_fsdp": True, "cache_latents": True}
    check_killed_and_resumed(pool, flux_folder, photo_folder, tmp_path, 2, FSDP, more)


def test_buckets_give_the_same_samples_in_their_own_shapes(pool: RankPool, flux_folder, photo_folder, tmp_path):
    folder = shutil.copytree(photo_folder, tmp_path / "photos")
    Image.open(next(folder.glob("*.png"))).resize((96, 144)).save(folder / "tall.png")  # beside a wide and a square one
    flags = flags_for(flux_folder, folder, tmp_path / "out", **ADAMW, **BUCKETS, num_train_epochs=2)
    flags |= {"max_train_steps": None, "gradient_accumulation_steps": 1}
    (result,) = pool.run(run, 1, Job(flags))
    epoch = result["samples"][:6]
    assert len(set(epoch)) == 6
    assert sorted(result["samples"][6:]) == sorted(epoch)  # and then the run ends, however many batches that took
    assert {shape[2:] for shape in result["shapes"]} == {(16, 16), (16, 24), (24, 16)}

    usual = {**flags, "aspect_ratio_buckets": None, "use_aspect_ratio_buckets": True, "resolution": 32}
    (result,) = pool.run(run, 1, Job({**usual, "output_dir": str(tmp_path / "usual")}))
    shapes = {shape[2:] for shape in result["shapes"]}
    assert len(shapes) > 1
    assert all(abs(height * width - 32 * 32) < 128 for height, width in shapes)


def dataset(folder: Path, photo_folder: Path) -> Path:
    """A folder that `datasets` loads: three images in parquet, with columns of other names."""
    import datasets

    paths = sorted(str(path) for path in photo_folder.glob("*.png"))[:3]
    rows = {"output": paths, "instruction": [f"a photo of sks {n}" for n in range(3)], "other": [1, 2, 3]}
    features = datasets.Features(
        {"output": datasets.Image(), "instruction": datasets.Value("string"), "other": datasets.Value("int64")}
    )
    folder.mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "train.parquet")
    return folder


def test_a_dataset_with_captions_and_what_it_lacks(pool: RankPool, flux_folder, photo_folder, tmp_path):
    data = dataset(tmp_path / "data", photo_folder)
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", **ADAMW, max_train_steps=1)
    flags |= {"instance_data_dir": None, "dataset_name": str(data), "image_column": "output", "cache_dir": str(tmp_path / "hub")}
    named = {**flags, "caption_column": "instruction", "dataset_config_name": "default"}
    pool.run(run, 1, Job(named))
    assert (tmp_path / "hub").is_dir()
    pool.run(run, 1, Job({**flags, "output_dir": str(tmp_path / "prompt")}))
    assert losses(tmp_path / "out") != losses(tmp_path / "prompt")

    for wrong, message in (
        ({"image_column": "image"}, "--image_column image: "),
        ({"caption_column": "text"}, "--caption_column text: "),
        ({"image_column": "other"}, "holds no images"),
        ({"dataset_config_name": "nothing"}, "cannot be loaded"),
        ({"dataset_name": str(tmp_path / "none")}, "cannot be loaded"),
    ):
        (text,) = pool.run(refused, 1, {**named, **wrong})
        assert message in text
        if "_column" in message:
            assert "It has: output, instruction, other" in text


def test_captions_of_a_folder_and_repeats(pool: RankPool, flux_folder, photo_folder, tmp_path):
    folder = shutil.copytree(photo_folder, tmp_path / "photos")
    names = sorted(path.name for path in folder.glob("*.png"))
    lines = [{"file_name": name, "text": "a portrait", "long": f"photo {n}"} for n, name in enumerate(names)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = flags_for(flux_folder, folder, tmp_path / "text", **ADAMW, max_train_steps=1)
    pool.run(run, 1, Job(flags))
    pool.run(run, 1, Job({**flags, "output_dir": str(tmp_path / "long"), "caption_column": "long"}))
    plain = {**flags, "output_dir": str(tmp_path / "plain"), "instance_data_dir": str(photo_folder), "repeats": 3}
    pool.run(run, 1, Job({**plain, "num_train_epochs": 1, "max_train_steps": None, "gradient_accumulation_steps": 1}))
    assert len({losses(tmp_path / name)[0] for name in ("text", "long", "plain")}) == 3
    assert len(losses(tmp_path / "plain")) == 3 * len(names)  # three times each in one pass
    (text,) = pool.run(refused, 1, {**flags, "caption_column": "none"})
    assert "has only file_name, long, text" in text


def test_flags_that_change_the_pixels(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", **ADAMW, max_train_steps=5)
    changes: list[dict[str, Any]] = [
        {}, {"center_crop": True}, {"random_flip": True}, {"image_interpolation_mode": "nearest"}, {"resolution": 24}
    ]  # fmt: skip
    seen = [tuple(pool.run(run, 1, Job({**flags, **change}, stop_before=4))[0]["samples"]) for change in changes]
    assert [len(samples) for samples in seen] == [3 * ACCUMULATION] * len(changes)
    assert len(set(seen)) == len(changes)


def test_unreadable_images_are_left_out_on_request_only(pool: RankPool, flux_folder, photo_folder, tmp_path):
    folder = shutil.copytree(photo_folder, tmp_path / "photos")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "empty.jpg").touch()
    flags = flags_for(flux_folder, folder, tmp_path / "out", **ADAMW, max_train_steps=1)
    (text,) = pool.run(refused, 1, flags)
    assert "broken.png cannot be read as an image" in text
    assert "empty.jpg cannot be read as an image" in text
    (result,) = pool.run(run, 1, Job({**flags, "skip_unreadable_images": True, "dataloader_num_workers": 1}))
    assert len(result["samples"]) == ACCUMULATION


PRIOR = {"with_prior_preservation": True, "class_prompt": "a photo of a small dog", "num_class_images": 5, "sample_batch_size": 2}


def test_class_images_are_made_by_all_ranks_once_and_trained_beside(pool: RankPool, flux_folder, photo_folder, tmp_path):
    classes = tmp_path / "classes"
    classes.mkdir()
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(classes / "own.png")
    flags = flags_for(flux_folder, photo_folder, tmp_path / "one", **ADAMW, **PRIOR, class_data_dir=str(classes), cpu_fsdp=True)
    (first, _) = pool.run(run, 2, Job(flags, FSDP))
    made = {path.name: path.read_bytes() for path in classes.glob("class-*.png")}
    assert sorted(made) == [f"class-{n:05d}.png" for n in range(4)]  # one was there
    assert len(set(made.values())) == 4
    assert len(first["samples"]) == STEPS * ACCUMULATION * 2  # an image of the class beside each

    # On one process: the same images, none made anew; a weight of 0 leaves the subject's loss, another one adds to it.
    for path in list(classes.glob("class-0000[13].png")):
        path.unlink()
    single = {**flags, "cpu_fsdp": False, "max_train_steps": 1, "train_batch_size": 2}
    found = []
    for weight in (0.0, 1.0, 3.0):
        pool.run(run, 1, Job({**single, "output_dir": str(tmp_path / f"{weight}"), "prior_loss_weight": weight}))
        found += losses(tmp_path / f"{weight}")
    assert {path.name: path.read_bytes() for path in classes.glob("class-*.png")}.keys() == made.keys()
    assert found[2] - found[0] == pytest.approx(3 * (found[1] - found[0]), rel=1e-3)
    assert found[1] > found[0]


def precision(asked: str | None) -> str:
    from accelerate import Accelerator

    from holdfast.training.prior import prior_dtype

    flags = {"pretrained_model_name_or_path": "a/b", "instance_prompt": "x", "prior_generation_precision": asked}
    try:
        return str(prior_dtype(recipe.Config(**flags), Accelerator(cpu=True)))
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [(None, "torch.float32"), ("no", "torch.float32"), ("fp32", "torch.float32"), ("bf16", "torch.bfloat16"), ("fp16", "not possible on the CPU")],
)
def test_precision_of_class_images(pool: RankPool, asked, dtype):
    (found,) = pool.run(precision, 1, asked)
    assert dtype in found
