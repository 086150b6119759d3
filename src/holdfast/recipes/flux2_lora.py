"""A LoRA for Flux2 or Flux2 Klein, from text to an image or, with `--cond_image_column`, from an image and a text to an image.

Read from `main` down: the model, the data, the loss, the pictures, what is exported. What Flux2 is made of (latents, text,
pictures) is in `holdfast.training.flux2*`; what all recipes share (sharding, adapters, the loop, checkpoints) beside it. Heavy
imports stand inside the functions, so that `--help` and wrong flags need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.training.config import DiffusionConfig
from holdfast.training.flags.base import installed
from holdfast.training.flux2 import PARTS, Family, build_transformer, family_of, family_problems, lora_layers, vae_side

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

    from holdfast.training.adapters import Adapter
    from holdfast.training.encoders import Captions
    from holdfast.training.flux2_latents import Flux2Autoencoder
    from holdfast.training.loop import Training
    from holdfast.training.parts import Parts
    from holdfast.training.prior import Draw

RECIPE = "flux2-lora"
SMALLEST_CONDITION = 64
"""Pixels of each side that a pipeline wants of a condition image."""
FP8_CAPABILITY = (8, 9)


@dataclass(kw_only=True)
class Config(DiffusionConfig):
    """A LoRA in the transformer of Flux2 or Flux2 Klein, for images of captions, or images made of other images."""

    breaking = DiffusionConfig.breaking | {"cond_image_column", "text_encoder_out_layers", "do_fp8_training"}

    output_dir: str = "flux2-lora"
    """Where checkpoints, `metrics.jsonl`, the tracker's logs and in the end the LoRA go."""

    rank: int | None = 4
    """Rank of the LoRA."""

    instance_prompt: str = ""
    """The prompt of all images without a caption, with a rare word for the subject: "a photo of sks girl"."""

    cond_image_column: str | None = None
    """Column of the images that are given: a LoRA from image to image is trained. Needs `--dataset_name`."""

    validation_image: str | None = None
    """The image that is given for the pictures, with `--cond_image_column`."""

    max_sequence_length: int = 512
    """Tokens of the caption and the system's message before it, 512 at most."""

    text_encoder_out_layers: tuple[int, ...] | None = None
    """Layers of the text encoder whose outputs are the text. Default: 10 20 30, for Klein 9 18 27."""

    guidance_scale: float = 3.5
    """The guidance that the model is told; has no effect on a model without guidance embedding (Klein)."""

    fsdp_text_encoder: bool = False
    """Cut the text encoder over all ranks, for one that fits no device. With `--offload` its parts stay in host memory."""

    remote_text_encoder: bool = False
    """Have captions encoded by Hugging Face's server for Flux2, which wants a token: HF_TOKEN or `--hub_token`."""

    do_fp8_training: bool = False
    """Multiply in float8 in the frozen layers; needs torchao and an NVIDIA GPU that has it."""

    bnb_quantization_config_path: str | None = None
    """A quantised base, by bitsandbytes; not possible here."""

    text_encoder_lr: float = 5e-6
    """Has no effect: the text encoder is not trained. There for scripts that name it."""

    adam_weight_decay_text_encoder: float = 1e-3
    """Has no effect: the text encoder is not trained. There for scripts that name it."""

    local_rank: int = -1
    """Has no effect: the launcher says in the environment which rank this is. There for scripts that name it."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not 1 <= self.max_sequence_length <= 512:
            yield f"--max_sequence_length is {self.max_sequence_length}; it has to be from 1 to 512."
        if self.rank is None:
            yield "--rank is None; a LoRA is what is trained here: give it a number from 1 on."
        yield from self._condition_problems()
        yield from self._encoder_problems()
        if self.bnb_quantization_config_path is not None:
            yield (
                "--bnb_quantization_config_path: a base that bitsandbytes has quantised can neither be cut over ranks nor be read in "
                "slices, and checkpoints could not name it. Leave it out; FSDP and --offload make room instead."
            )
        if self.do_fp8_training and not installed("torchao"):
            yield "--do_fp8_training needs torchao, which is not installed: pip install torchao, or leave the flag out."
        base = Path(self.pretrained_model_name_or_path)
        if base.is_dir():
            yield from base_problems(self, base)

    def _condition_problems(self) -> Iterator[str]:
        if self.cond_image_column is None:
            return
        if self.dataset_name is None:
            yield "--cond_image_column is a column of a dataset: give --dataset_name (a folder with a parquet file will do)."
        if self.with_prior_preservation:
            yield "--with_prior_preservation makes class images of a prompt alone; it does not go with --cond_image_column."
        if self.validation_image is None and (self.validation_prompt or self.last_prompt):
            yield "--validation_prompt with --cond_image_column needs --validation_image, the image to start from."
        if self.validation_image is not None:
            from holdfast.training.images import Unreadable, examine

            try:
                height, width = examine(Path(self.validation_image).read_bytes())
                if min(height, width) < SMALLEST_CONDITION:
                    yield f"--validation_image {self.validation_image} is {width} x {height}; each side needs {SMALLEST_CONDITION} pixels."
            except OSError as error:
                yield f"--validation_image {self.validation_image}: {error.strerror}."
            except Unreadable as error:
                yield f"--validation_image {self.validation_image} cannot be read as an image ({error})."

    def _encoder_problems(self) -> Iterator[str]:
        if not self.remote_text_encoder:
            return
        from huggingface_hub import get_token

        if not (self.hub_token or get_token()):
            yield "--remote_text_encoder needs a token of a Hugging Face account: `hf auth login`, HF_TOKEN, or leave the flag out."
        for name in ("fsdp_text_encoder", "text_encoder_out_layers", "max_sequence_length"):
            if self.changed(name):
                yield f"--{name} does not go with --remote_text_encoder: the server encodes in its own way."

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        yield from self.idle(("text_encoder_lr", "adam_weight_decay_text_encoder"), "here: the text encoder is not trained")
        if self.cond_image_column is None:
            yield from self.idle(("validation_image",), "without --cond_image_column")


def base_problems(config: Config, base: Path) -> Iterator[str]:
    """Yields what keeps the folder `base` from being the pipeline that is trained here with this `config`."""
    found = list(family_problems(base, config.variant, config.text_encoder_out_layers))
    yield from found
    if not found:
        yield from config.side_problems(vae_side(base))
        if config.remote_text_encoder and family_of(base).klein:
            yield "--remote_text_encoder encodes for Flux2, not for Klein. Leave the flag out."


def main(config: Config) -> None:
    """Trains, and writes checkpoints and in the end a LoRA for the pipeline to `config.output_dir`."""
    config.validate()
    from holdfast.training.run import run

    run(config, RECIPE, PARTS, base_problems, prepare, lambda *written: export(*written))


def prepare(parts: Parts[Config]) -> tuple[Training, dict[str, Adapter]]:
    """The data, the model and the loss; and the LoRA."""
    from holdfast.training.adapters import adapter_of
    from holdfast.training.data import make_loader
    from holdfast.training.ema import average_of
    from holdfast.training.flux2_latents import Flux2Autoencoder, make_draw
    from holdfast.training.flux2_text import captions_of
    from holdfast.training.images import open_image
    from holdfast.training.loop import Training
    from holdfast.training.models import prepare_model
    from holdfast.training.run import encoded_data
    from holdfast.training.validation import Validation

    config, accelerator, family = parts.config, parts.accelerator, family_of(parts.base)
    refuse_fp8(config, accelerator)

    def build() -> nn.Module:
        return build_transformer(parts.base, config.enable_npu_flash_attention, config.do_fp8_training)

    adapter = adapter_of(config, lora_layers(parts.base), build)
    assert adapter is not None
    text, vae = captions_of(parts, family), Flux2Autoencoder(parts, family)
    # Klein's pictures are guided by a prediction without a prompt.
    pictures = config.validation_prompt or config.last_prompt or config.with_prior_preservation
    unprompted = [""] if family.klein and pictures else []
    data = encoded_data(parts, text, vae, lambda dtype: base_pipeline(parts, family, vae, text, dtype), unprompted)

    model = prepare_model(accelerator, build, *parts.folder("transformer"), config.gradient_checkpointing, adapter)
    average = average_of(config, accelerator, model, build, adapter)
    given = config.validation_image if config.cond_image_column else None
    condition = open_image(Path(given).read_bytes()) if given else None
    validation = Validation(config, accelerator, [model], average, make_draw(parts, family, model, vae, text, parts.dtype, condition))
    loss = make_loss(parts, family, model, vae, text)
    return Training({"transformer": model}, make_loader(config, accelerator, data), loss, average, validation), {"transformer": adapter}


def refuse_fp8(config: Config, accelerator: Accelerator) -> None:
    """Raises UsageError where `--do_fp8_training` was given for a device that has no float8."""
    import torch

    from holdfast.errors import UsageError

    device = accelerator.device.type
    if config.do_fp8_training and (device != "cuda" or torch.cuda.get_device_capability() < FP8_CAPABILITY):
        raise UsageError(f"--do_fp8_training needs an NVIDIA GPU with float8 (Ada, Hopper or newer); this device is {device}. Leave it out.")


def make_loss(
    parts: Parts[Config], family: Family, transformer: nn.Module, vae: Flux2Autoencoder, text: Captions
) -> Callable[[dict[str, Any]], torch.Tensor]:
    """The loss of a batch of `holdfast.training.data`.

    Every call draws, from the rank's global generators and in this order: the noise, the times.
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler

    from holdfast.engine.names import unwrap
    from holdfast.training.flow_matching import draw_times, flow_matching_errors, noised
    from holdfast.training.prior import preserved

    config, device, kind = parts.config, parts.device, family.kind
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(parts.base, subfolder="scheduler")
    inner: Any = unwrap(transformer)
    guided = inner.config.guidance_embeds

    def clean(batch: dict[str, Any], which: str) -> torch.Tensor:
        moments = batch[f"{which}moments"].to(device) if f"{which}moments" in batch else vae.moments(batch[f"{which}images"])
        return vae.latents(moments)

    def loss(batch: dict[str, Any]) -> torch.Tensor:
        latents, sequence = clean(batch, ""), text(batch["prompts"])["sequence"]
        noise = torch.randn_like(latents)
        count = len(latents)
        times, sigmas = draw_times(config, scheduler, count, device)
        tokens, ids = kind._pack_latents(noised(latents, noise, sigmas)), kind._prepare_latent_ids(latents).to(device)
        seen, seen_ids = tokens, ids
        if config.cond_image_column is not None:
            condition = clean(batch, "cond_")
            condition_ids = kind._prepare_image_ids([condition[:1]]).to(device).expand(count, -1, -1)
            seen = torch.cat([tokens, kind._pack_latents(condition)], dim=1)
            seen_ids = torch.cat([ids, condition_ids], dim=1)
        prediction = transformer(
            hidden_states=seen,
            timestep=times / 1000,
            guidance=torch.full((count,), config.guidance_scale, device=device) if guided else None,
            encoder_hidden_states=sequence,
            txt_ids=kind._prepare_text_ids(sequence).to(device),
            img_ids=seen_ids,
            return_dict=False,
        )[0]
        prediction = kind._unpack_latents_with_ids(prediction[:, : tokens.shape[1]], ids)
        errors = flow_matching_errors(prediction, latents, noise, sigmas, config.weighting_scheme)
        return preserved(errors, batch["classes"], config.prior_loss_weight)

    return loss


def base_pipeline(parts: Parts[Config], family: Family, vae: Flux2Autoencoder, text: Captions, dtype: torch.dtype) -> Draw:
    """What draws pictures with the model as it was before the training, in `dtype`."""
    from holdfast.training.flux2_latents import make_draw
    from holdfast.training.models import prepare_frozen

    transformer = prepare_frozen(parts.accelerator, lambda: build_transformer(parts.base), *parts.folder("transformer"), dtype)
    return make_draw(parts, family, transformer, vae, text, dtype)


def export(
    config: Config, base: Path, checkpoint: Path, training: Training, adapters: dict[str, Adapter], repository: str | None
) -> None:
    """Writes the LoRA of the final checkpoint, and its card; rank 0 calls this, nobody waits for it."""
    from holdfast.training.publish import export_lora

    family = family_of(base)
    kind = "text-to-image" if config.cond_image_column is None else "image-to-image"
    export_lora(config, checkpoint, training, adapters, repository, family.pipeline, ("flux2-klein" if family.klein else "flux2", kind))
