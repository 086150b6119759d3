"""The training samples: images with captions, out of a folder or a dataset. All that is wrong with them is told before training.

    a folder of images                 every image has the instance prompt
    … with metadata.jsonl              {"file_name": "a.jpg", "text": "…"} a line: captions of its images
    a dataset (`--dataset_name`)       of the Hub, or a folder that `datasets` loads; its split `train`
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from holdfast.errors import UsageError
from holdfast.training.images import SHOWN_FAILURES, find_images, open_image, read_failure, size_of

if TYPE_CHECKING:
    from PIL import Image

    from holdfast.training.flags.data import DataFlags

logger = logging.getLogger(__name__)

METADATA = "metadata.jsonl"
CAPTIONS = "text"  # the column of captions where none is named


@dataclass(frozen=True)
class Sample:
    """An image and its caption. `read` gives the file's bytes, `name` is for messages."""

    name: str
    caption: str
    read: Callable[[], bytes]

    def image(self) -> Image.Image:
        """The image, turned as it is meant, in RGB."""
        return open_image(io.BytesIO(self.read()))

    def size(self) -> tuple[int, int]:
        """Height and width as the image is meant, from the file's header."""
        return size_of(io.BytesIO(self.read()))

    def digest(self) -> str:
        """A hash of its content."""
        return hashlib.sha256(self.read()).hexdigest()


def instance_samples(config: DataFlags, cache_dir: str | None) -> list[Sample]:
    """The samples that the flags name, those that can be read, `repeats` times each. Every rank calls this.

    Raises:
        UsageError: there are none, a column is missing, captions are empty, or images cannot be read.
    """
    if config.dataset_name is not None:
        found = _of_dataset(config, cache_dir)
    else:
        found = of_folder(Path(str(config.instance_data_dir)), config.instance_prompt, config.caption_column)
    empty = [sample.name for sample in found if not sample.caption.strip()]
    if empty:
        raise UsageError(f"{len(empty)} caption(s) are empty: {_some(empty)}. Fill them in, or take these images out.")
    return readable(found, config.skip_unreadable_images) * config.repeats


def of_folder(folder: Path, caption: str, column: str | None = None) -> list[Sample]:
    """The images directly inside `folder` by name; those without a line in `metadata.jsonl` have `caption`."""
    captions: dict[str, str] = {}
    if (folder / METADATA).is_file():
        captions = _captions(folder / METADATA, column)
    elif column is not None:
        raise UsageError(f"--caption_column {column}: {folder} has no {METADATA} that could hold captions.")
    return [Sample(str(path), captions.get(path.name, caption), path.read_bytes) for path in find_images(folder)]


def _captions(path: Path, column: str | None) -> dict[str, str]:
    captions = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            name = line["file_name"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path}, line {number}: no JSON object with a file_name.") from None
        if not (path.parent / name).is_file():
            raise UsageError(f"{path}, line {number}: there is no {name} in {path.parent}.")
        if column is not None and column not in line:
            raise UsageError(f"--caption_column {column}: {path}, line {number} has only {', '.join(sorted(line))}.")
        if (caption := line.get(column or CAPTIONS)) is not None:
            captions[name] = str(caption)
    return captions


def _of_dataset(config: DataFlags, cache_dir: str | None) -> list[Sample]:
    import datasets

    name = str(config.dataset_name)
    try:
        loaded: Any = datasets.load_dataset(name, config.dataset_config_name, cache_dir=cache_dir)
    except Exception as error:  # of many libraries
        raise UsageError(f"--dataset_name {name} cannot be loaded: {error}") from error
    if "train" not in loaded:
        raise UsageError(f"--dataset_name {name} has no split train, only {', '.join(loaded)}.")
    rows = loaded["train"]
    for flag, column in (("image_column", config.image_column), ("caption_column", config.caption_column)):
        if column is not None and column not in rows.column_names:
            raise UsageError(f"--{flag} {column}: {name} has no such column. It has: {', '.join(rows.column_names)}.")
    try:
        images = rows.cast_column(config.image_column, datasets.Image(decode=False))
    except Exception as error:
        raise UsageError(f"--image_column {config.image_column} of {name} holds no images: {error}") from error
    captions = rows[config.caption_column] if config.caption_column else [config.instance_prompt] * len(rows)
    return [
        Sample(f"{name}, row {row}", str(caption or ""), _row(images, row, config.image_column))
        for row, caption in enumerate(captions)
    ]


def _row(rows: Any, row: int, column: str) -> Callable[[], bytes]:
    def read() -> bytes:
        stored = rows[row][column] or {}
        if stored.get("bytes"):
            return bytes(stored["bytes"])
        return Path(stored["path"]).read_bytes() if stored.get("path") else b""

    return read


def readable(samples: Sequence[Sample], skip: bool) -> list[Sample]:
    """The samples whose images can be read, the same on all ranks: each looks at its part.

    Raises:
        UsageError: some cannot, and they are not to be skipped; or none can.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = {n: reason for n in range(rank, len(samples), ranks) if (reason := read_failure(samples[n].read)) is not None}
    parts: list[dict[int, str]] = [mine]
    if ranks > 1:
        parts = [{} for _ in range(ranks)]
        dist.all_gather_object(parts, mine)
    failures = {number: reason for part in parts for number, reason in part.items()}
    lines = [f"{samples[number].name} cannot be read as an image ({reason})." for number, reason in sorted(failures.items())]
    more = [f"{len(lines) - SHOWN_FAILURES} more cannot be read."] if len(lines) > SHOWN_FAILURES else []
    kept = [sample for number, sample in enumerate(samples) if number not in failures]
    if lines and not skip:
        hint = "Repair them, take them out, or leave them aside with --skip_unreadable_images."
        raise UsageError("\n".join([*lines[:SHOWN_FAILURES], *more, hint]))
    if lines and rank == 0:
        logger.warning("%d of %d image(s) are left out:\n%s", len(lines), len(samples), "\n".join([*lines[:SHOWN_FAILURES], *more]))
    if not kept:
        raise UsageError("There are no images to train on.")
    return kept


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
