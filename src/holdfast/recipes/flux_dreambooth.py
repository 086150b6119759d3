"""DreamBooth for Flux: the whole transformer learns one subject from a few photos and one prompt.

Read from `main` down: the model, the data, the loss. What all recipes share (sharding, the loop, checkpoints, the
export) is in `holdfast.training`. Heavy imports stand inside the functions, so that `--help` and wrong flags need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.training.config import DiffusionConfig
from holdfast.training.pipeline_folder import part_variant, pipeline_problems

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

# The parts of a FluxPipeline, and the class that each has to be of.
PARTS: dict[str, str | None] = {
    "transformer": "FluxTransformer2DModel",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "T5EncoderModel",
    "tokenizer": None,
    "tokenizer_2": None,
    "scheduler": None,
}
# Reading a text encoder of 10 GB from a slow disk.
ENCODING_DEADLINE_S = 3600.0


@dataclass(kw_only=True)
class Config(DiffusionConfig):
    """Full fine-tuning of the Flux transformer on photos of one subject."""

    max_sequence_length: int = 77
    """Tokens of the prompt that T5 reads, 512 at most."""

    guidance_scale: float = 3.5
    """The guidance that the model is told; has no effect on a model without guidance embedding."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not 1 <= self.max_sequence_length <= 512:
            yield f"--max_sequence_length is {self.max_sequence_length}; it has to be from 1 to 512."
        base = Path(self.pretrained_model_name_or_path)
        if base.is_dir():
            yield from base_problems(self, base)


def base_problems(config: Config, base: Path) -> Iterator[str]:
    """Yields what keeps the folder `base` from being the pipeline that is trained here with this `config`."""
    import json

    found = list(pipeline_problems(base, PARTS, config.variant))
    yield from found
    if not found:
        levels = len(json.loads((base / "vae/config.json").read_text(encoding="utf-8"))["block_out_channels"])
        side = 2**levels  # the VAE halves its input between levels, packing halves it once more
        if config.resolution % side:
            yield f"--resolution is {config.resolution}; this model needs a multiple of {side}."


def main(config: Config) -> None:
    """Trains, and writes checkpoints and in the end a FluxPipeline to `config.output_dir`."""
    config.validate()
    from holdfast.errors import UsageError
    from holdfast.training.hub import fetch_pipeline
    from holdfast.training.images import ImageFolder
    from holdfast.training.loop import train
    from holdfast.training.models import prepare_model
    from holdfast.training.setup import compute_dtype, configure_logging, make_accelerator

    configure_logging()
    accelerator = make_accelerator(config)
    base = fetch_pipeline(config.pretrained_model_name_or_path, PARTS, config.revision, config.variant)
    if found := list(base_problems(config, base)):
        raise UsageError("\n".join(found))

    images = ImageFolder(str(config.instance_data_dir), config.resolution)
    text = encode_prompt(config, accelerator, base, compute_dtype(accelerator))
    variant = part_variant(base, "transformer", config.variant)
    transformer = prepare_model(
        accelerator, lambda: build_transformer(base), base / "transformer", variant, config.gradient_checkpointing
    )
    loss = make_loss(config, accelerator, base, transformer, text)
    checkpoint = train(config, accelerator, "flux-dreambooth", transformer, images, loss)
    if accelerator.is_main_process:
        export(config, base, checkpoint)
    accelerator.state.destroy_process_group()


def build_transformer(base: Path) -> nn.Module:
    """The transformer of `base` without its weights."""
    from diffusers import FluxTransformer2DModel

    model: nn.Module = FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(base / "transformer"))
    return model


@dataclass
class Text:
    """The encoded prompt, as `FluxPipeline.encode_prompt` gives it: one row that serves every sample."""

    sequence: torch.Tensor  # (1, max_sequence_length, T5's width)
    pooled: torch.Tensor  # (1, CLIP's width)
    ids: torch.Tensor  # (max_sequence_length, 3), zeros


def encode_prompt(config: Config, accelerator: Accelerator, base: Path, dtype: torch.dtype) -> Text:
    """Encodes the prompt once in the whole run, on rank 0, and hands it to all; the encoders are gone afterwards."""
    import gc

    import torch
    from accelerate.utils import broadcast
    from diffusers import FluxPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from holdfast.training.models import load_frozen
    from holdfast.training.once import once

    clip_config = CLIPTextConfig.from_pretrained(base / "text_encoder")
    t5_config = T5Config.from_pretrained(base / "text_encoder_2")
    device = accelerator.device
    sequence = torch.empty(1, config.max_sequence_length, t5_config.d_model, device=device, dtype=dtype)
    pooled = torch.empty(1, clip_config.hidden_size, device=device, dtype=dtype)
    encoder_dtype = torch.bfloat16 if dtype == torch.float16 else dtype  # T5's activations are beyond fp16

    def encode() -> str:
        parts: dict[str, Any] = {"transformer": None, "vae": None}
        for name, build in (
            ("text_encoder", lambda: CLIPTextModel(clip_config)),
            ("text_encoder_2", lambda: T5EncoderModel(t5_config)),
        ):
            variant = part_variant(base, name, config.variant)
            parts[name] = load_frozen(build, base / name, variant, encoder_dtype).to(device)
        pipeline = FluxPipeline.from_pretrained(base, **parts)
        with torch.no_grad():
            t5_output, clip_output, _ = pipeline.encode_prompt(
                config.instance_prompt, device=device, max_sequence_length=config.max_sequence_length
            )
        sequence.copy_(t5_output)
        pooled.copy_(clip_output)
        return ""

    once(encode, "run", ENCODING_DEADLINE_S)
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return Text(broadcast(sequence), broadcast(pooled), torch.zeros(sequence.shape[1], 3, device=device, dtype=dtype))


def make_loss(
    config: Config, accelerator: Accelerator, base: Path, transformer: nn.Module, text: Text
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The loss of a batch of pixels of shape (batch, 3, height, width), each from -1 to 1.

    Every call draws, from the rank's global generators and in this order: the latents from the VAE's posterior, the noise,
    the times.
    """
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline

    from holdfast.training.flow_matching import draw_times, flow_matching_loss, noised
    from holdfast.training.models import load_frozen

    dtype, device = text.sequence.dtype, accelerator.device
    vae_config = AutoencoderKL.load_config(base / "vae")
    variant = part_variant(base, "vae", config.variant)
    vae: Any = load_frozen(lambda: AutoencoderKL.from_config(vae_config), base / "vae", variant, dtype).to(device)
    scale_factor = 2 ** (len(vae.config.block_out_channels) - 1)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(base, subfolder="scheduler")
    guided = accelerator.unwrap_model(transformer).config.guidance_embeds

    def loss(pixels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            latents = vae.encode(pixels.to(device, dtype)).latent_dist.sample()
        latents = ((latents - vae.config.shift_factor) * vae.config.scaling_factor).to(dtype)
        batch, channels, height, width = latents.shape
        noise = torch.randn_like(latents)
        times, sigmas = draw_times(config, scheduler, batch, device)
        prediction = transformer(
            hidden_states=FluxPipeline._pack_latents(noised(latents, noise, sigmas), batch, channels, height, width),
            timestep=times / 1000,
            guidance=torch.full((batch,), config.guidance_scale, device=device) if guided else None,
            pooled_projections=text.pooled.expand(batch, -1),
            encoder_hidden_states=text.sequence.expand(batch, -1, -1),
            txt_ids=text.ids,
            img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, device, dtype),
            return_dict=False,
        )[0]
        prediction = FluxPipeline._unpack_latents(prediction, height * scale_factor, width * scale_factor, scale_factor)
        return flow_matching_loss(prediction, latents, noise, sigmas, config.weighting_scheme)

    return loss


def export(config: Config, base: Path, checkpoint: Path) -> None:
    """Writes the FluxPipeline with the transformer of the final checkpoint; rank 0 calls this, nobody waits for it."""
    import logging

    from holdfast.training.export import export_pipeline

    output = Path(config.output_dir)
    export_pipeline(base, output, PARTS, "transformer", checkpoint, config.export_dtype or "fp32", config.variant)
    logging.getLogger(__name__).info("%s is a FluxPipeline now, its transformer in %s", output, config.export_dtype or "fp32")
