"""Where samples come from, what is wrong with them, and that each image is looked at once."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from holdfast.errors import UsageError
from holdfast.recipes.flux_dreambooth import Config
from holdfast.testing import RankPool
from holdfast.training import data as data_module
from holdfast.training import survey as survey_module
from holdfast.training.buckets import nearest_bucket, usual_buckets
from holdfast.training.cache import Cache
from holdfast.training.data import TrainingData, make_loader
from holdfast.training.samples import Sample, folder_problems, instance_samples, of_folder
from holdfast.training.survey import readable


@dataclass(kw_only=True)
class PairConfig(Config):
    cond_image_column: str | None = None


def config(out: Path, **flags: Any) -> PairConfig:
    return PairConfig(
        **{"pretrained_model_name_or_path": "a/b", "instance_prompt": "a photo", "output_dir": str(out), "resolution": 16, **flags}
    )


def picture(path: Path, height: int = 16, width: int = 16, shade: int = 100) -> Path:
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows * 255 // height, columns * 255 // width, np.full_like(rows, shade)], -1)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def metadata(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(line) for line in lines))


def test_metadata_gives_captions_and_files_in_folders(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("a.png", "b.png", "more/c.png"):
        picture(tmp_path / name)
    metadata(tmp_path, {"file_name": "more/c.png", "text": "see"}, {"file_name": "a.png", "text": "ay"})
    found = [(Path(sample.name).name, sample.caption) for sample in of_folder(tmp_path, "a photo")]
    assert found == [("a.png", "ay"), ("b.png", "a photo"), ("c.png", "see")]


@pytest.mark.parametrize(
    ("lines", "column", "message"),
    [
        ([{"text": "x"}], None, "line 1 is no JSON object with a file_name"),
        ([{"file_name": "no.png", "text": "x"}], None, "line 1: there is no no.png in"),
        ([{"file_name": "a.png", "text": "x"}] * 2, None, "line 2: a.png comes twice"),
        ([{"file_name": "a.png", "long": "x"}], "short", "--caption_column short: line 1 has only file_name, long"),
        ([{"file_name": "a.png", "long": "x", "short": "y"}], None, "name them with --caption_column, one of long, short"),
        (None, "text", "has no metadata.jsonl that could hold captions"),
    ],
)
def test_what_is_wrong_with_metadata_is_told_before_anything_is_read(
    tmp_path: Path, lines: list[dict[str, Any]] | None, column: str | None, message: str
) -> None:
    picture(tmp_path / "a.png")
    if lines is not None:
        metadata(tmp_path, *lines)
    (problem,) = folder_problems(tmp_path, column)
    assert message in problem


def test_an_empty_caption_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        picture(folder / name)
    metadata(folder, {"file_name": "a.png", "text": " "}, {"file_name": "b.png", "text": "bee"})
    with pytest.raises(UsageError, match=r"1 caption\(s\) are empty: .*a.png"):
        instance_samples(config(tmp_path / "out", instance_data_dir=str(folder)), None)


def test_the_first_unreadable_images_are_named_and_all_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    picture(folder / "z.png")
    for number in range(survey_module.SHOWN + 3):
        (folder / f"{number:02}.jpg").write_text("no image")
    with pytest.raises(UsageError) as raised:
        readable(of_folder(folder, "a photo"), False, tmp_path / "survey")
    text = str(raised.value)
    assert text.startswith("13 of 14 image(s) cannot be read:")
    assert "00.jpg cannot be read as an image (not a known image format)." in text
    assert "3 more cannot be read." in text
    kept = readable(of_folder(folder, "a photo"), True, tmp_path / "survey")
    assert [Path(sample.name).name for sample in kept] == ["z.png"]


def look(folder: str, out: str) -> tuple[list[str], list[tuple[str, int, int]]]:
    examined: list[str] = []
    real = survey_module.examine
    survey_module.examine = lambda content: examined.append(str(len(content))) or real(content)
    try:
        samples = readable(of_folder(Path(folder), "a photo"), False, Path(out))
    finally:
        survey_module.examine = real
    return examined, [(sample.digest, *sample.size) for sample in samples]


def test_each_image_is_looked_at_once_in_the_job_and_again_only_when_it_changed(pool: RankPool, photo_folder, tmp_path: Path) -> None:
    folder = shutil.copytree(photo_folder, tmp_path / "photos")
    first = pool.run(look, 2, str(folder), str(tmp_path / "survey"))
    assert sum(len(examined) for examined, _ in first) == 5
    assert first[0][1] == first[1][1]
    assert [row[2] for row in first[0][1]] == [128] * 5
    second = pool.run(look, 3, str(folder), str(tmp_path / "survey"))
    assert [examined for examined, _ in second] == [[]] * 3
    assert second[0][1] == first[0][1]
    picture(sorted(folder.glob("*.png"))[2], 20, 30)
    third = pool.run(look, 2, str(folder), str(tmp_path / "survey"))
    assert sum(len(examined) for examined, _ in third) == 1
    assert third[1][1][2][1:] == (20, 30)


def refused(flags: dict[str, Any], out: str) -> str:
    try:
        instance_samples(config(Path(out), **flags), None)
    except UsageError as error:
        return str(error)
    return ""


def test_fewer_samples_than_ranks(pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        picture(folder / name)
    texts = pool.run(refused, 3, {"instance_data_dir": str(folder)}, str(tmp_path / "out"))
    assert all("2 sample(s) for 3 ranks" in text and "--repeats 2" in text for text in texts)
    assert pool.run(refused, 3, {"instance_data_dir": str(folder), "repeats": 2}, str(tmp_path / "out")) == [""] * 3


def pair_dataset(folder: Path, sizes: list[tuple[tuple[int, int], tuple[int, int]]]) -> Path:
    import datasets

    (folder / "images").mkdir(parents=True)
    rows: dict[str, list[str]] = {"output": [], "file_name": [], "instruction": []}
    for number, (target, condition) in enumerate(sizes):
        rows["output"].append(str(picture(folder / f"images/{number}-out.png", *target, shade=10 + number)))
        rows["file_name"].append(str(picture(folder / f"images/{number}-in.png", *condition, shade=200 + number)))
        rows["instruction"].append(f"make {number}")
    features = datasets.Features(
        {"output": datasets.Image(), "file_name": datasets.Image(), "instruction": datasets.Value("string")}
    )
    (folder / "data").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "data/train.parquet")
    return folder / "data"


@dataclass
class Ranks:
    process_index: int = 0
    num_processes: int = 1
    is_main_process: bool = True


def test_pairs_are_cut_alike_and_cached_by_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = pair_dataset(tmp_path, [((32, 48), (32, 48)), ((48, 32), (96, 64)), ((32, 48), (16, 16))])
    flags = config(
        tmp_path / "out", dataset_name=str(data), image_column="output", cond_image_column="file_name", caption_column="instruction",
        aspect_ratio_buckets="16,24;24,16", random_flip=True, train_batch_size=2, repeats=2,
    )  # fmt: skip
    samples = instance_samples(flags, str(tmp_path / "hub"))
    training = TrainingData(flags, samples, [], 8)
    assert "2 of 6 pairs are of unlike shapes" in caplog.text
    assert training.sizes == [(16, 24), (24, 16), (16, 24)] * 2
    assert any(training.pictures(n)[0].cut.mirrored != training.pictures(n + 3)[0].cut.mirrored for n in range(3))
    for index in (0, 1):  # the same picture but for its blue channel: so must the cuts be
        (item,) = training[index]
        assert item.condition is not None
        assert item.image.shape == item.condition.shape == (3, *training.sizes[index])
        torch.testing.assert_close(item.image[:2], item.condition[:2], atol=0.05, rtol=0)
        assert (item.condition[2] - item.image[2]).min() > 1
    assert training.prompts == ["make 0", "make 1", "make 2"]

    def batches() -> list[dict[str, Any]]:
        loader = make_loader(flags, Ranks(), training)  # type: ignore[arg-type]
        return [*loader, *loader]

    plain = batches()
    seen: list[torch.Tensor] = []

    def encoder() -> Any:
        return lambda pixels: seen.append(pixels) or pixels * 2

    assert training.cache_latents(Cache(tmp_path / "out", "latents"), ["vae"], encoder) == 12  # each comes twice, cut in two ways
    assert len(seen) == 12
    cached = batches()
    assert [batch["prompts"] for batch in cached] == [batch["prompts"] for batch in plain]
    for with_cache, without in zip(cached, plain, strict=True):
        assert torch.equal(with_cache["moments"], without["images"] * 2)
        assert torch.equal(with_cache["cond_moments"], without["cond_images"] * 2)
    assert training.cache_latents(Cache(tmp_path / "out", "latents"), ["vae"], encoder) == 0
    assert training.cache_latents(Cache(tmp_path / "out", "latents"), ["another vae"], encoder) == 12


def test_a_condition_that_cannot_be_read_takes_its_pair_along(tmp_path: Path) -> None:
    data = pair_dataset(tmp_path, [((16, 16), (16, 16))] * 2)
    import datasets

    rows = datasets.load_dataset(str(data), cache_dir=str(tmp_path / "hub"))["train"].cast_column("file_name", datasets.Image(decode=False))
    broken = rows.map(lambda row, n: {"file_name": {"bytes": b"", "path": None} if n == 1 else row["file_name"]}, with_indices=True)
    broken.cast_column("file_name", datasets.Image()).to_parquet(data / "train.parquet")
    flags = {"dataset_name": str(data), "image_column": "output", "cond_image_column": "file_name", "caption_column": "instruction"}
    with pytest.raises(UsageError, match="row 1, column file_name cannot be read as an image"):
        instance_samples(config(tmp_path / "out", **flags), str(tmp_path / "hub2"))
    kept = instance_samples(config(tmp_path / "out", **flags, skip_unreadable_images=True), str(tmp_path / "hub2"))
    assert [sample.caption for sample in kept] == ["make 0"]
    with pytest.raises(UsageError, match=r"--cond_image_column input: .* It has: output, file_name, instruction"):
        instance_samples(config(tmp_path / "out", **{**flags, "cond_image_column": "input"}), str(tmp_path / "hub2"))


@pytest.mark.parametrize("room", [0, 2 * 64 * 64 * 3, 1 << 30])
def test_an_image_is_decoded_once_while_there_is_room(photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(data_module, "KEPT_BYTES", room)
    flags = config(tmp_path / "out", instance_data_dir=str(photo_folder), resolution=64, random_flip=True)
    read: list[str] = []

    def counted(sample: Sample) -> Sample:
        return replace(sample, read=lambda: (read.append(sample.name), sample.read())[1])

    training = TrainingData(flags, [counted(sample) for sample in instance_samples(flags, None)], [], 16)
    expected = [training.pictures(index)[0].pixels() for index in range(5)]
    read.clear()
    for _ in range(3):
        for index in range(5):
            assert torch.equal(training[index][0].image, expected[index])
    kept = min(room // (64 * 64 * 3), 5)
    assert len(read) == 5 + 2 * (5 - kept)


def test_the_shorter_of_both_sets_is_begun_anew() -> None:
    def samples(kind: str, count: int) -> list[Sample]:
        return [Sample(f"{kind}{n}", kind, bytes, str) for n in range(count)]

    for subject, classes in ((2, 5), (5, 2)):
        training = TrainingData(config(Path("out")), samples("subject", subject), samples("class", classes), 16)
        pairs = [[picture.sample.name for picture in training.pictures(index)] for index in range(len(training))]
        assert len(pairs) == 5
        assert {pair[0] for pair in pairs} == {f"subject{n}" for n in range(subject)}
        assert {pair[1] for pair in pairs} == {f"class{n}" for n in range(classes)}


def test_the_nearest_bucket() -> None:
    buckets = usual_buckets(1024, 16)
    assert nearest_bucket(800, 800, buckets) == (1024, 1024)
    assert nearest_bucket(1080, 1920, buckets)[0] < nearest_bucket(1080, 1920, buckets)[1]
    assert all(height % 16 == width % 16 == 0 and 0.9 < height * width / 1024**2 < 1.1 for height, width in buckets)
    assert nearest_bucket(500, 500, [(1024, 1024), (512, 512)]) == (512, 512)


