"""Which images and captions, what is made of them, and the images of the class beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.training.flags.base import Flags

Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
PriorPrecision = Literal["no", "fp32", "fp16", "bf16"]


@dataclass(kw_only=True)
class DataFlags(Flags):
    """The training data: one of a folder and a dataset."""

    instance_data_dir: str | None = None
    """Folder of training images, with captions in `metadata.jsonl` if there is one. EXIF orientation is honoured."""

    dataset_name: str | None = None
    """Instead of a folder: a dataset of the Hugging Face Hub, or a folder that `datasets` can load."""

    dataset_config_name: str | None = None
    """Configuration of the dataset, if it has several."""

    image_column: str = "image"
    """Column of the images."""

    caption_column: str | None = None
    """Column of the captions. Default: every image has the instance prompt."""

    instance_prompt: str
    """The prompt of all images without a caption, with a rare word for the subject: "a photo of sks girl"."""

    repeats: int = 1
    """How often each image comes in one pass over the samples."""

    skip_unreadable_images: bool = False
    """Leave out images that cannot be read (they are named and counted) instead of refusing to start."""

    resolution: int = 512
    """Side of the training images in pixels; has no effect with buckets."""

    center_crop: bool = False
    """Cut the middle out of an image that does not fit; else a part that is drawn once for each sample."""

    random_flip: bool = False
    """Mirror half of the images; which is drawn once for each sample."""

    image_interpolation_mode: Interpolation = "lanczos"
    """How images are scaled."""

    use_aspect_ratio_buckets: bool = False
    """Train images in the shape that is nearest to their own, out of `aspect_ratio_buckets`."""

    aspect_ratio_buckets: str | None = None
    """Height and width of each bucket, as in 1024,1024;768,1360;1360,768. Default: shapes with about the area of
    `resolution` squared."""

    cache_latents: bool = False
    """Encode images once, before the training, and keep what comes out on disk; the VAE is needed no more then."""

    dataloader_num_workers: int = 0
    """Processes per rank that read images; 0 reads in the training process."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.below({"repeats": 1, "resolution": 1, "dataloader_num_workers": 0})
        if not self.instance_prompt.strip() and self.caption_column is None:
            yield "--instance_prompt is empty; describe the images, as in: a photo of sks girl"
        if (self.instance_data_dir is None) == (self.dataset_name is None):
            given = "neither" if self.dataset_name is None else "both"
            yield f"{given} of --instance_data_dir and --dataset_name given; the images come from one of them."
        elif self.instance_data_dir is not None:
            from holdfast.training.samples import folder_problems

            yield from folder_problems(Path(self.instance_data_dir), self.caption_column)
        if self.aspect_ratio_buckets is not None:
            yield from bucket_problems(self.aspect_ratio_buckets)

    def side_problems(self, multiple: int) -> Iterator[str]:
        """Yields what is wrong with the sizes of images for a model whose sides are multiples of `multiple`."""
        if self.aspect_ratio_buckets is not None:
            yield from bucket_problems(self.aspect_ratio_buckets, multiple)
        elif self.resolution % multiple:
            yield f"--resolution is {self.resolution}; this model needs a multiple of {multiple}."

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if self.dataset_name is None:
            yield from self.idle(("dataset_config_name",), "without --dataset_name")
        if self.aspect_ratio_buckets is not None:
            yield from self.idle(("resolution",), "on the training images with --aspect_ratio_buckets")

    @property
    def buckets(self) -> bool:
        """Whether images are trained in several shapes."""
        return self.use_aspect_ratio_buckets or self.aspect_ratio_buckets is not None


def bucket_problems(text: str, multiple: int = 1) -> Iterator[str]:
    """Yields what is wrong with `--aspect_ratio_buckets`, whose sides have to be multiples of `multiple`."""
    for part in text.split(";"):
        numbers = [number.strip() for number in part.split(",")]
        if len(numbers) != 2 or not all(number.isdigit() and int(number) > 0 for number in numbers):
            yield f"--aspect_ratio_buckets: {part.strip()!r} is no height,width; several are separated by semicolons."
        elif any(int(number) % multiple for number in numbers):
            yield f"--aspect_ratio_buckets: {part.strip()}: this model needs multiples of {multiple}."


@dataclass(kw_only=True)
class PriorFlags(Flags):
    """Prior preservation: images of the class that the base model makes, so that the training does not forget it."""

    with_prior_preservation: bool = False
    """Train on images of the class beside those of the subject."""

    class_data_dir: str | None = None
    """Folder of the class images; those that are missing are generated into it."""

    class_prompt: str | None = None
    """The prompt of the class images: "a photo of a girl"."""

    num_class_images: int = 100
    """Class images that there should be at least."""

    prior_loss_weight: float = 1.0
    """Weight of the class images' loss, which is added to that of the subject's."""

    sample_batch_size: int = 4
    """Class images that each rank generates at a time."""

    prior_generation_precision: PriorPrecision | None = None
    """Precision in which class images are generated. Default: fp16 on an accelerator, else fp32."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.below({"num_class_images": 1, "sample_batch_size": 1, "prior_loss_weight": 0})
        if self.with_prior_preservation:
            for name in ("class_data_dir", "class_prompt"):
                if not (getattr(self, name) or "").strip():
                    yield f"--with_prior_preservation needs --{name}."

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if not self.with_prior_preservation:
            names = ("class_data_dir", "class_prompt", "num_class_images", "prior_loss_weight", "sample_batch_size")
            yield from self.idle((*names, "prior_generation_precision"), "without --with_prior_preservation")
