"""From the samples to batches: pixels or cached latents, prompts, and with prior preservation an image of the class for each.

A batch is a dict: `images` of shape (batch, 3, height, width) or, with `--cache_latents`, `moments`, the parameters of the
VAE's posterior; `prompts`, one for each; and `classes`, how many of them, at the end, are of the class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import holdfast
from holdfast.training.buckets import BucketLoader, Size, nearest_bucket, parse_buckets, usual_buckets
from holdfast.training.cache import Cache, Entry, key_of
from holdfast.training.images import Cut, cut_of
from holdfast.training.samples import Sample

if TYPE_CHECKING:
    from accelerate import Accelerator

    from holdfast.training.config import DiffusionConfig

logger = logging.getLogger(__name__)

Batch = dict[str, Any]


@dataclass(frozen=True)
class Picture:
    """A sample's image, cut to a size."""

    sample: Sample
    cut: Cut

    def pixels(self) -> torch.Tensor:
        return torch.from_numpy(self.cut.pixels(self.sample.image()))


class TrainingData:
    """Item i: instance image i and, with prior preservation, a class image; the shorter of both sets is begun anew.

    `multiple` is what heights and widths have to be multiples of.
    """

    def __init__(self, config: DiffusionConfig, instances: list[Sample], classes: list[Sample], multiple: int) -> None:
        self.instances, self.classes = instances, classes
        self.sizes = _sizes(config, instances, multiple)
        self.pictures = [Picture(s, cut_of(config, n, *self.sizes[n])) for n, s in enumerate(instances)]
        self._config = config
        self._latents: Cache | None = None
        self._keys: dict[tuple[int, Size | None], str] = {}

    def __len__(self) -> int:
        return max(len(self.instances), len(self.classes))

    def size(self, index: int) -> Size:
        return self.sizes[index % len(self.instances)]

    @property
    def prompts(self) -> list[str]:
        """Each distinct prompt once."""
        return sorted({sample.caption for sample in [*self.instances, *self.classes]})

    def _all(self) -> dict[tuple[int, Size | None], Picture]:
        """Every picture that is needed, by number: the instances', and for each size that they come with the classes'."""
        found: dict[tuple[int, Size | None], Picture] = {(n, None): picture for n, picture in enumerate(self.pictures)}
        if self.classes:
            for index in range(len(self)):
                number, size = index % len(self.classes), self.size(index)
                found[number, size] = self._class_picture(number, size)
        return found

    def _class_picture(self, number: int, size: Size) -> Picture:
        return Picture(self.classes[number], cut_of(self._config, number, *size))

    def cache_latents(self, cache: Cache, settings: Sequence[Any], encoder: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> int:
        """Encode every picture once, on all ranks together; returns how many were missing. Items have `moments` from then on."""
        wanted: dict[str, Picture] = {}
        digests: dict[str, str] = {}
        for place, picture in self._all().items():
            name = picture.sample.name
            digests[name] = digests.get(name) or picture.sample.digest()
            cut = picture.cut
            shape = [cut.height, cut.width, *cut.centre, cut.mirrored, cut.interpolation]
            self._keys[place] = key = key_of("latents", digests[name], shape, *settings)
            wanted[key] = picture

        def entry_encoder() -> Callable[[Picture], Entry]:
            encode = encoder()
            return lambda picture: {"moments": encode(picture.pixels()[None])[0]}

        self._latents = cache
        return cache.prepare(wanted, entry_encoder)

    def __getitem__(self, index: int) -> list[tuple[torch.Tensor, str]]:
        number = index % len(self.instances)
        item = [(self._image((number, None), self.pictures[number]), self.instances[number].caption)]
        if self.classes:
            number, size = index % len(self.classes), self.size(index)
            item.append((self._image((number, size), self._class_picture(number, size)), self.classes[number].caption))
        return item

    def _image(self, place: tuple[int, Size | None], picture: Picture) -> torch.Tensor:
        return picture.pixels() if self._latents is None else self._latents[self._keys[place]]["moments"]

    def collate(self, items: list[list[tuple[torch.Tensor, str]]]) -> Batch:
        """The instances first, then as many of the class."""
        columns = list(zip(*items, strict=True))
        pairs = [pair for column in columns for pair in column]
        kind = "images" if self._latents is None else "moments"
        classes = len(items) if self.classes else 0
        return {kind: torch.stack([image for image, _ in pairs]), "prompts": [prompt for _, prompt in pairs], "classes": classes}


def make_loader(config: DiffusionConfig, accelerator: Accelerator, data: TrainingData) -> Any:
    """The loader of a run: one global order of the samples, of which each rank gets its part."""
    rank, ranks = accelerator.process_index, accelerator.num_processes
    if len(data) < ranks * config.train_batch_size and accelerator.is_main_process:
        logger.warning(
            "%d sample(s) for %d rank(s) with %d each: a batch holds samples of more than one pass", len(data), ranks, config.train_batch_size
        )
    more: dict[str, Any] = {"seed": config.seed, "num_workers": config.dataloader_num_workers, "collate_fn": data.collate}
    if config.buckets:
        sizes = [data.size(index) for index in range(len(data))]
        return BucketLoader(data, sizes, config.train_batch_size, rank=rank, world_size=ranks, **more)
    dataset: Any = data
    return holdfast.DataLoader(dataset, batch_size=config.train_batch_size, rank=rank, world_size=ranks, **more)


def _sizes(config: DiffusionConfig, samples: list[Sample], multiple: int) -> list[Size]:
    if not config.buckets:
        return [(config.resolution, config.resolution)] * len(samples)
    buckets = parse_buckets(config.aspect_ratio_buckets) if config.aspect_ratio_buckets else usual_buckets(config.resolution, multiple)
    known: dict[str, Size] = {}
    for sample in samples:
        if sample.name not in known:
            height, width = sample.size()
            known[sample.name] = nearest_bucket(height, width, buckets)
    return [known[sample.name] for sample in samples]


def class_samples(config: DiffusionConfig) -> list[Sample]:
    """The images of the class, at least `num_class_images`, which have been generated by now; none without prior preservation."""
    from holdfast.training.samples import of_folder, readable

    if not config.with_prior_preservation:
        return []
    return readable(of_folder(Path(str(config.class_data_dir)), str(config.class_prompt)), config.skip_unreadable_images)
