"""From the samples to batches: pixels or cached latents, prompts, and with prior preservation an image of the class for each.

A batch is a dict: `images` of shape (batch, 3, height, width) or, with `--cache_latents`, `moments`, what the VAE made of each;
with image pairs `cond_images` or `cond_moments`, cut as the images are; `prompts`, one for each; and `classes`, how many of them,
at the end, are of the class.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import holdfast
from holdfast.training.buckets import Size, nearest_bucket, parse_buckets, usual_buckets
from holdfast.training.cache import Cache, Entry, key_of
from holdfast.training.images import Cut, cut_of, scaled
from holdfast.training.samples import Sample

if TYPE_CHECKING:
    import numpy as np
    from accelerate import Accelerator
    from numpy.typing import NDArray

    from holdfast.training.config import DiffusionConfig

logger = logging.getLogger(__name__)

Batch = dict[str, Any]

KEPT_BYTES = 1 << 30
"""Of cut images that stay in memory. They are the same at each pass, and a photo takes longer to decode than a step may take."""

UNLIKE = 0.02
"""Ratios of sides that differ by less do so by rounding."""


@dataclass(frozen=True)
class Picture:
    """A sample's image, cut to a size."""

    sample: Sample
    cut: Cut

    @property
    def condition(self) -> Picture | None:
        return Picture(self.sample.condition, self.cut) if self.sample.condition is not None else None

    def pixels(self) -> torch.Tensor:
        return torch.from_numpy(self.cut.pixels(self.sample.image()))

    def key(self, settings: Sequence[Any]) -> str:
        """Of what an encoder with these settings makes of it."""
        cut = self.cut
        return key_of("latents", self.sample.digest, [cut.height, cut.width, *cut.centre, cut.mirrored, cut.interpolation], *settings)


class Item(NamedTuple):
    """One image with its condition image, as pixels or as what the VAE made of them, and its prompt."""

    image: torch.Tensor
    condition: torch.Tensor | None
    prompt: str


class TrainingData:
    """Item i: instance image i and, with prior preservation, a class image; the shorter of both sets is begun anew.

    `multiple` is what heights and widths have to be multiples of. A condition image has the size and the cut of its target.
    """

    def __init__(self, config: DiffusionConfig, instances: list[Sample], classes: list[Sample], multiple: int) -> None:
        self.instances, self.classes = instances, classes
        self.sizes = _sizes(config, instances, multiple)
        self._config = config
        self._latents: Cache | None = None
        self._settings: Sequence[Any] = ()
        self._kept: dict[str, NDArray[np.uint8]] = {}
        self._kept_bytes = 0
        _tell_of_unlike_pairs(instances)

    def __len__(self) -> int:
        return max(len(self.instances), len(self.classes))

    def size(self, index: int) -> Size:
        """Height and width of all images of item `index`."""
        return self.sizes[index % len(self.instances)]

    @property
    def prompts(self) -> list[str]:
        """Each distinct prompt once."""
        return sorted({sample.caption for sample in [*self.instances, *self.classes]})

    def pictures(self, index: int) -> list[Picture]:
        """Of item `index`: the instance's and, with prior preservation, one of the class."""
        number = index % len(self.instances)
        found = [Picture(self.instances[number], cut_of(self._config, number, *self.sizes[number]))]
        if self.classes:
            number = index % len(self.classes)
            found.append(Picture(self.classes[number], cut_of(self._config, number, *self.size(index))))
        return found

    def cache_latents(self, cache: Cache, settings: Sequence[Any], encoder: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> int:
        """Encode every picture once, on all ranks together; returns how many were missing. Items have `moments` from then on."""
        wanted: dict[str, Picture] = {}
        for index in range(len(self)):
            for picture in self.pictures(index):
                for each in (picture, picture.condition):
                    if each is not None:
                        wanted[each.key(settings)] = each

        def entry_encoder() -> Callable[[torch.Tensor], Entry]:
            encode = encoder()
            return lambda pixels: {"moments": encode(pixels[None])[0]}

        made = cache.prepare(wanted, entry_encoder, read=Picture.pixels)
        self._latents, self._settings = cache, settings
        return made

    def __getitem__(self, index: int) -> list[Item]:
        return [self._item(picture) for picture in self.pictures(index)]

    def _item(self, picture: Picture) -> Item:
        condition = picture.condition
        return Item(self._image(picture), None if condition is None else self._image(condition), picture.sample.caption)

    def _image(self, picture: Picture) -> torch.Tensor:
        return self._pixels(picture) if self._latents is None else self._latents[picture.key(self._settings)]["moments"]

    def _pixels(self, picture: Picture) -> torch.Tensor:
        """Those of `picture.pixels`, decoded once while there is room to keep them."""
        key = picture.key(())
        if (part := self._kept.get(key)) is None:
            part = picture.cut.part(picture.sample.image())
            if self._kept_bytes + part.nbytes <= KEPT_BYTES:
                self._kept[key] = part
                self._kept_bytes += part.nbytes
        return torch.from_numpy(scaled(part))

    def collate(self, items: list[list[Item]]) -> Batch:
        """The instances first, then as many of the class."""
        flat = [item for column in zip(*items, strict=True) for item in column]
        kind = "images" if self._latents is None else "moments"
        batch: Batch = {kind: torch.stack([item.image for item in flat]), "prompts": [item.prompt for item in flat]}
        if conditions := [item.condition for item in flat if item.condition is not None]:
            batch[f"cond_{kind}"] = torch.stack(conditions)
        return {**batch, "classes": len(items) if self.classes else 0}


def make_loader(config: DiffusionConfig, accelerator: Accelerator, data: TrainingData) -> Any:
    """The loader of a run: one global order of the samples, of which each rank gets its part."""
    rank, ranks = accelerator.process_index, accelerator.num_processes
    if len(data) < ranks * config.train_batch_size and accelerator.is_main_process:
        logger.warning(
            "%d sample(s) for %d rank(s) with %d each: a batch holds samples of more than one pass", len(data), ranks, config.train_batch_size
        )
    more: dict[str, Any] = {"seed": config.seed, "num_workers": config.dataloader_num_workers, "collate_fn": data.collate}
    if config.buckets:
        more["buckets"] = [data.size(index) for index in range(len(data))]
    dataset: Any = data
    return holdfast.DataLoader(dataset, batch_size=config.train_batch_size, rank=rank, world_size=ranks, **more)


def _sizes(config: DiffusionConfig, samples: list[Sample], multiple: int) -> list[Size]:
    if not config.buckets:
        return [(config.resolution, config.resolution)] * len(samples)
    buckets = parse_buckets(config.aspect_ratio_buckets) if config.aspect_ratio_buckets else usual_buckets(config.resolution, multiple)
    return [nearest_bucket(*sample.size, buckets) for sample in samples]


def _tell_of_unlike_pairs(samples: list[Sample]) -> None:
    """Parts that are cut off at other places do not show the same any more."""
    unlike = []
    for sample in samples:
        if sample.condition is not None:
            (height, width), (other_height, other_width) = sample.size, sample.condition.size
            if abs(height * other_width / (width * other_height) - 1) > UNLIKE:
                unlike.append(sample.name)
    if unlike and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%d of %d pairs are of unlike shapes (%s, …): both images are scaled and cut to the target's size",
            len(unlike), len(samples), unlike[0],
        )  # fmt: skip


def class_samples(config: DiffusionConfig) -> list[Sample]:
    """The images of the class, at least `num_class_images`, which have been generated by now; none without prior preservation."""
    from holdfast.training.samples import of_folder, survey_folder
    from holdfast.training.survey import readable

    if not config.with_prior_preservation:
        return []
    found = of_folder(Path(str(config.class_data_dir)), str(config.class_prompt))
    return readable(found, config.skip_unreadable_images, survey_folder(config))
