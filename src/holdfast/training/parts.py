"""The parts of a base pipeline in a run: where they are, and the autoencoder, which every diffusion recipe uses alike."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator

from holdfast.training.cache import Cache
from holdfast.training.config import DiffusionConfig
from holdfast.training.data import TrainingData
from holdfast.training.models import load_frozen, on_device
from holdfast.training.pipeline_folder import part_variant
from holdfast.training.setup import compute_dtype

ConfigT = TypeVar("ConfigT", bound=DiffusionConfig)


@dataclass
class Parts(Generic[ConfigT]):
    """A run's flags and Accelerator, the base's folder, and what tells its parts from others' (`continuation.fingerprints`)."""

    config: ConfigT
    accelerator: Accelerator
    base: Path
    prints: dict[str, str]

    @property
    def dtype(self) -> torch.dtype:
        """Of frozen parts and of the model's inputs."""
        return compute_dtype(self.accelerator)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    def folder(self, part: str) -> tuple[Path, str | None]:
        """Where a part's files are, and their variant."""
        return self.base / part, part_variant(self.base, part, self.config.variant)


class Autoencoder:
    """The VAE of a pipeline: read when it is first needed, and on the device while it is used with `--offload`, else always.

    `kind` is its class in diffusers.
    """

    def __init__(self, parts: Parts[Any], kind: Any) -> None:
        self.parts, self.kind = parts, kind
        self.config: dict[str, Any] = kind.load_config(parts.base / "vae")
        self.scale_factor = 2 ** (len(self.config["block_out_channels"]) - 1)
        self.side = 2 * self.scale_factor  # heights and widths are multiples of it: packing halves the latents once more

    @cached_property
    def model(self) -> Any:
        return load_frozen(lambda: self.kind.from_config(self.config), *self.parts.folder("vae"), self.parts.dtype)

    def moments(self, images: torch.Tensor) -> torch.Tensor:
        """The posterior's parameters for pixels of shape (batch, 3, height, width), an image at a time: as they are cached."""
        parts = self.parts
        with torch.no_grad(), on_device(self.model, parts.device, parts.config.offload):
            encoded = [self.model.encode(image[None].to(parts.device, parts.dtype)).latent_dist.parameters for image in images]
        return torch.cat(encoded)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels of latents as the decoder takes them, in fp32."""
        with torch.no_grad(), on_device(self.model, self.parts.device, self.parts.config.offload):
            pixels: torch.Tensor = self.model.decode(latents.to(self.parts.dtype), return_dict=False)[0].float()
        return pixels

    def cache(self, data: TrainingData) -> None:
        """Encode all images of the training, each once in the whole job; the model is let go afterwards."""
        cache = Cache(Path(self.parts.config.output_dir), "latents")
        data.cache_latents(cache, [self.parts.prints["vae"], str(self.parts.dtype)], lambda: self.moments)
        self.__dict__.pop("model", None)
        give_back_memory()


def give_back_memory() -> None:
    """To the device, after a part of the pipeline has been let go."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
