"""A look at every image before the training: whether it can be read, what its content is, and how large it is.

The ranks share the images out. What was found stays in a folder, by where an image is and when it was changed, so that an image
is read and decoded for this once, and a look that was killed goes on where it was:

    FOLDER/survey-<random>.json      {"<where and when>": ["<xxh3 of the bytes>", height, width], …}

Images that cannot be read are not kept: the next start looks at them again.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from holdfast.errors import UsageError
from holdfast.training.images import Unreadable, examine
from holdfast.training.sharing import crew_for

if TYPE_CHECKING:
    from holdfast.training.samples import Sample

logger = logging.getLogger(__name__)

SHOWN = 10
"""Of failures that are alike a reader needs the first few and the count."""
_KEEP_S = 20.0


@dataclass(frozen=True)
class Facts:
    """What is known of an image: a hash of its bytes, and its size as it is meant to be seen, in pixels."""

    digest: str
    height: int
    width: int


def readable(samples: Sequence[Sample], skip: bool, folder: Path) -> list[Sample]:
    """The samples whose images (condition images, too) can be read, with their facts; the same on all ranks, which all call this.

    Raises:
        UsageError: some cannot, and they are not to be skipped; or none can.
    """
    images = [image for sample in samples for image in (sample, sample.condition) if image is not None]
    found = dict(zip((id(image) for image in images), survey(images, folder), strict=True))
    failures = [(image, facts) for image in images if isinstance(facts := found[id(image)], str)]
    lines = [f"{image.name} cannot be read as an image ({reason})." for image, reason in failures]
    shown = lines[:SHOWN] + ([f"{len(lines) - SHOWN} more cannot be read."] if len(lines) > SHOWN else [])
    if lines and not skip:
        hint = "Repair them, take them out, or leave them aside with --skip_unreadable_images."
        raise UsageError("\n".join([f"{len(lines)} of {len(images)} image(s) cannot be read:", *shown, hint]))
    kept = []
    for sample in samples:
        facts, condition = found[id(sample)], sample.condition
        if condition is not None and isinstance(of_condition := found[id(condition)], Facts):
            condition = replace(condition, facts=of_condition)
        if isinstance(facts, Facts) and (condition is None or condition.facts is not None):
            kept.append(replace(sample, facts=facts, condition=condition))
    if lines and os.environ.get("RANK", "0") == "0":
        logger.warning("%d of %d sample(s) are left out:\n%s", len(samples) - len(kept), len(samples), "\n".join(shown))
    if not kept:
        raise UsageError("There are no images to train on: none can be read.")
    return kept


def survey(images: Sequence[Sample], folder: Path) -> list[Facts | str]:
    """For each image what is known of it, or why it cannot be read. Every rank calls this; each looks at its part."""
    crew = crew_for(folder)
    known, new = _kept(folder), _Kept(folder)
    mine: list[tuple[int, Any]] = []
    with crew.share(len(images), "the look at the images") as numbers:
        for number in numbers:
            try:
                identity = images[number].identity()
                row = known.get(identity)
                if row is None:
                    row = _look(images[number].read())
                    new.add(identity, row)
                mine.append((number, row))
            except Unreadable as error:
                mine.append((number, str(error)))
            except OSError as error:
                mine.append((number, error.strerror or str(error)))
        new.write()
    rows = dict(pair for part in crew.tell(lambda: mine) for pair in part)
    return [row if isinstance(row := rows[number], str) else Facts(*row) for number in range(len(images))]


def _look(content: bytes) -> list[Any]:
    height, width = examine(content)
    return [xxhash.xxh3_128_hexdigest(content), height, width]


class _Kept:
    """What this rank has found in this run, written from time to time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"survey-{uuid.uuid4().hex[:12]}.json"
        self._rows: dict[str, list[Any]] = {}
        self._written = time.monotonic()

    def add(self, identity: str, row: list[Any]) -> None:
        self._rows[identity] = row
        if time.monotonic() - self._written > _KEEP_S:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        if self._rows:
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._rows), encoding="utf-8")
            os.replace(new, self._path)


def _kept(folder: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for path in folder.glob("survey-*.json"):
        try:
            found.update({identity: [str(row[0]), int(row[1]), int(row[2])] for identity, row in json.loads(path.read_bytes()).items()})
        except (OSError, ValueError, AttributeError, LookupError, TypeError):
            logger.warning("%s cannot be read; its images are looked at anew", path)
    return found
