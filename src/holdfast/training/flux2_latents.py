"""The latents of Flux2, and pictures made of them (`holdfast.training.flux2` says what they are)."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from torch import nn

import holdfast
from holdfast.training.encoders import Captions
from holdfast.training.flux2 import Family, read_json
from holdfast.training.models import forward_of, on_device
from holdfast.training.parts import Autoencoder, Parts
from holdfast.training.prior import Draw

if TYPE_CHECKING:
    from PIL import Image

LARGEST_CONDITION = 1024 * 1024
"""Pixels of a condition image that a pipeline takes as it is."""


class Flux2Autoencoder(Autoencoder):
    """The VAE with the statistics of its latents."""

    def __init__(self, parts: Parts[Any], family: Family) -> None:
        super().__init__(parts, AutoencoderKLFlux2)
        self.family = family

    @cached_property
    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each channel of the patches, of shape (1, channels, 1, 1) in fp32, on the device."""
        holder = nn.ModuleDict({"bn": nn.BatchNorm2d(4 * int(self.config["latent_channels"]), affine=False)})
        folder, variant = self.parts.folder("vae")
        holdfast.load_pretrained(holder, folder, variant=variant, dtype=torch.float32, allow_unexpected=True)
        read = holder.state_dict()
        mean, variance = (read[f"bn.running_{what}"].view(1, -1, 1, 1).to(self.parts.device) for what in ("mean", "var"))
        return mean, torch.sqrt(variance + float(self.config["batch_norm_eps"]))

    def latents(self, moments: torch.Tensor) -> torch.Tensor:
        """x, of shape (batch, 4 c, height / 2, width / 2) in fp32, of what the VAE made of images, of shape (batch, 2 c, height, width)."""
        mean, deviation = self.statistics
        mode = DiagonalGaussianDistribution(moments.to(self.parts.device)).mode()
        latents: torch.Tensor = (self.family.kind._patchify_latents(mode) - mean) / deviation
        return latents

    def pixels(self, latents: torch.Tensor) -> torch.Tensor:
        """The images that latents of the shape of `latents` stand for, as the decoder gives them."""
        mean, deviation = self.statistics
        return self.decode(self.family.kind._unpatchify_latents(latents * deviation + mean))


def make_draw(
    parts: Parts[Any],
    family: Family,
    transformer: nn.Module,
    vae: Flux2Autoencoder,
    text: Captions,
    dtype: torch.dtype,
    condition: Image.Image | None = None,
) -> Draw:
    """What draws a picture for each of some generators: of `--resolution`, or with a condition image of that one's size.

    All ranks of a sharded model call it together.
    """
    nothing = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    kind: Any = type("Pipeline", (family.kind,), {"_execution_device": parts.device})  # wherever shards are kept
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(parts.base, subfolder="scheduler")
    if family.klein:
        nothing["is_distilled"] = bool(read_json(parts.base / "model_index.json").get("is_distilled", False))
    pipeline = kind(scheduler=scheduler, transformer=forward_of(transformer), **nothing)
    pipeline.vae_scale_factor = vae.scale_factor
    pipeline.image_processor = Flux2ImageProcessor(vae_scale_factor=vae.side)
    pipeline.set_progress_bar_config(disable=True)
    width = height = parts.config.resolution - parts.config.resolution % vae.side
    if condition is not None:
        if condition.width * condition.height > LARGEST_CONDITION:
            condition = Flux2ImageProcessor._resize_to_target_area(condition, LARGEST_CONDITION)
        width, height = (side - side % vae.side for side in condition.size)

    def draw(prompt: str, generators: list[torch.Generator]) -> list[Image.Image]:
        count = len(generators)
        arguments: dict[str, Any] = {"prompt_embeds": text([prompt] * count)["sequence"].to(dtype)}
        if family.klein:
            arguments["negative_prompt_embeds"] = text([""] * count)["sequence"].to(dtype)
        if condition is not None:
            arguments["image"] = condition
            pipeline.vae = vae.model
        at_hand = nullcontext() if condition is None else on_device(vae.model, parts.device, parts.config.offload)
        with at_hand:
            tokens = pipeline(height=height, width=width, generator=generators, output_type="latent", **arguments).images
        ids = kind._prepare_latent_ids(torch.empty(count, 1, height // vae.side, width // vae.side)).to(tokens.device)
        pixels = vae.pixels(kind._unpack_latents_with_ids(tokens, ids))
        return pipeline.image_processor.postprocess(pixels, output_type="pil")  # type: ignore[no-any-return]

    return draw
