"""The training samples: images with captions, out of a folder or a dataset. All that is wrong with them is told before training.

    a folder of images                 every image has the instance prompt
    … with metadata.jsonl              {"file_name": "a.jpg", "text": "…"} a line: captions of its images
    a dataset (`--dataset_name`)       of the Hub, or a folder that `datasets` loads; its split `train`. With a condition column
                                       a sample is a pair: the image that is given, and the one that is to come out

No torch at the top: a folder is looked through among the flags.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import UsageError
from holdfast.training.images import find_images, open_image

if TYPE_CHECKING:
    from PIL import Image

    from holdfast.training.config import DiffusionConfig
    from holdfast.training.survey import Facts

logger = logging.getLogger(__name__)

METADATA = "metadata.jsonl"
CAPTIONS = "text"  # the column of captions where none is named
SHOWN = 5
# Downloading and unpacking a large dataset.
DATASET_DEADLINE_S = 6 * 3600.0


@dataclass(frozen=True)
class Sample:
    """An image and its caption, and with image pairs the condition's image. `read` gives the file's bytes, `name` is for messages.

    `identity` tells this content from any other without reading it: where it is and when it was changed. `facts` are there
    once the image has been looked at.
    """

    name: str
    caption: str
    read: Callable[[], bytes]
    identity: Callable[[], str]
    condition: Sample | None = None
    facts: Facts | None = None

    def image(self) -> Image.Image:
        """The image, turned as it is meant, in RGB."""
        return open_image(self.read())

    @property
    def size(self) -> tuple[int, int]:
        """Height and width as the image is meant."""
        assert self.facts is not None
        return self.facts.height, self.facts.width

    @property
    def digest(self) -> str:
        """A hash of the file's content."""
        assert self.facts is not None
        return self.facts.digest


def instance_samples(config: DiffusionConfig, cache_dir: str | None) -> list[Sample]:
    """The samples that the flags name, those that can be read, `repeats` times each. Every rank calls this, before any model is loaded.

    Raises:
        UsageError: there are none or fewer than ranks, a column is missing, captions are empty, or images cannot be read.
    """
    from holdfast.training.survey import readable

    if config.dataset_name is not None:
        found = _of_dataset(config, cache_dir)
    else:
        found = of_folder(Path(str(config.instance_data_dir)), config.instance_prompt, config.caption_column)
    empty = [sample.name for sample in found if not sample.caption.strip()]
    if empty:
        raise UsageError(f"{len(empty)} caption(s) are empty: {_some(empty)}. Fill them in, or take these images out.")
    samples = readable(found, config.skip_unreadable_images, survey_folder(config)) * config.repeats
    _refuse_too_few(config, len(samples))
    return samples


def survey_folder(config: DiffusionConfig) -> Path:
    """Where it is kept what is known of the images."""
    return Path(config.output_dir) / "cache" / "survey"


def _refuse_too_few(config: DiffusionConfig, count: int) -> None:
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    longest = max(count, config.num_class_images if config.with_prior_preservation else 0)
    if longest < ranks:
        raise UsageError(
            f"{count} sample(s) for {ranks} ranks: a step takes one at least for each rank. Start at most {count} rank(s), or let "
            f"each image come more often in a pass: --repeats {-(-ranks // max(1, count // config.repeats))}"
        )


def folder_problems(folder: Path, column: str | None) -> Iterator[str]:
    """Yields what keeps a folder from being training data, as far as that is seen without reading images."""
    if not folder.is_dir():
        yield f"--instance_data_dir {folder}: there is no such folder."
        return
    try:
        if not of_folder(folder, "", column):
            yield f"--instance_data_dir {folder} holds no image files. Put the training images directly into it."
    except UsageError as error:
        yield str(error.args[0])


def of_folder(folder: Path, caption: str, column: str | None = None) -> list[Sample]:
    """The images directly inside `folder` by name, and those that `metadata.jsonl` names; without a caption there they have `caption`.

    Raises:
        UsageError: `metadata.jsonl` is none, or lacks `column`.
    """
    captions: dict[str, str | None] = {}
    if (folder / METADATA).is_file():
        captions = _captions(folder / METADATA, column)
    elif column is not None:
        raise UsageError(f"--caption_column {column}: {folder} has no {METADATA} that could hold captions.")
    names = dict.fromkeys([*(path.name for path in find_images(folder)), *sorted(captions)])
    texts = {name: text for name in names if (text := captions.get(name)) is not None}
    return [_of_file(folder / name, texts.get(name, caption)) for name in names]


def _of_file(path: Path, caption: str) -> Sample:
    def identity() -> str:
        status = path.stat()
        return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"

    return Sample(str(path), caption, path.read_bytes, identity)


def _captions(path: Path, column: str | None) -> dict[str, str | None]:
    """The caption, if there is one, of each file that the lines of `metadata.jsonl` name."""
    captions: dict[str, str | None] = {}
    problems, others = [], set()
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            name = os.path.normpath(line["file_name"])
        except (ValueError, KeyError, TypeError):
            problems.append(f"line {number} is no JSON object with a file_name")
            continue
        if not (path.parent / name).is_file():
            problems.append(f"line {number}: there is no {name} in {path.parent}")
        elif name in captions:
            problems.append(f"line {number}: {name} comes twice")
        elif column is not None and column not in line:
            problems.append(f"--caption_column {column}: line {number} has only {', '.join(sorted(line))}")
        caption = line.get(column or CAPTIONS)
        captions[name] = None if caption is None and column is None else str(caption or "")
        others |= line.keys() - {"file_name"}
    if problems:
        raise UsageError(f"{path}: {'; '.join(problems[:SHOWN])}" + (f"; and {len(problems) - SHOWN} more." if len(problems) > SHOWN else "."))
    if column is None and others and CAPTIONS not in others:
        raise UsageError(f"{path} has no captions under {CAPTIONS!r}: name them with --caption_column, one of {', '.join(sorted(others))}.")
    return captions


def _of_dataset(config: DiffusionConfig, cache_dir: str | None) -> list[Sample]:
    import datasets

    from holdfast.training.once import once

    name, condition = str(config.dataset_name), getattr(config, "cond_image_column", None)

    def load() -> Any:
        try:
            return datasets.load_dataset(name, config.dataset_config_name, cache_dir=cache_dir)
        except Exception as error:  # of many libraries
            raise UsageError(f"--dataset_name {name} cannot be loaded: {error}") from error

    def prepare() -> str:
        load()
        return ""

    once(prepare, "node", DATASET_DEADLINE_S)
    loaded = load()  # what has been prepared by now
    if "train" not in loaded:
        raise UsageError(f"--dataset_name {name} has no split train, only {', '.join(loaded)}.")
    rows = loaded["train"]
    columns = {"image_column": config.image_column, "caption_column": config.caption_column, "cond_image_column": condition}
    missing = [f"--{flag} {column}" for flag, column in columns.items() if column is not None and column not in rows.column_names]
    if missing:
        raise UsageError(f"{', '.join(missing)}: {name} has no such column. It has: {', '.join(rows.column_names)}.")
    targets = _images(rows, "image_column", config.image_column, name)
    given = _images(rows, "cond_image_column", condition, name) if condition is not None else [None] * len(rows)
    captions = rows[config.caption_column] if config.caption_column else [config.instance_prompt] * len(rows)
    return [
        Sample(f"{name}, row {row}", str(caption or ""), target.read, target.identity, conditions)
        for row, (caption, target, conditions) in enumerate(zip(captions, targets, given, strict=True))
    ]


def _images(rows: Any, flag: str, column: str, name: str) -> list[Sample]:
    """The images of one column, still encoded, without captions."""
    import datasets

    try:
        images = rows.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    except Exception as error:
        raise UsageError(f"--{flag} {column} of {name} holds no images: {error}") from error
    folder = Path(name) if Path(name).is_dir() else Path()
    print_ = rows._fingerprint

    def sample(row: int) -> Sample:
        def read() -> bytes:
            stored = images[row][column] or {}
            if stored.get("bytes"):
                return bytes(stored["bytes"])
            return (folder / stored["path"]).read_bytes() if stored.get("path") else b""

        return Sample(f"{name}, row {row}, column {column}", "", read, lambda: f"{print_} {column} {row}")

    return [sample(row) for row in range(len(rows))]


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
