"""DreamBooth for Flux: the transformer, or a LoRA in it, learns one subject from a few photos and one prompt.

Read from `main` down: the model, the data, the loss, the pictures, what is exported. What all recipes share (sharding,
adapters, the loop, checkpoints) is in `holdfast.training`. Heavy imports stand inside the functions, so that `--help` and
wrong flags need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.training.config import DiffusionConfig
from holdfast.training.flags.optimizer import TextEncoderFlags
from holdfast.training.pipeline_folder import pipeline_problems

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import nn

    from holdfast.training.adapters import Adapter
    from holdfast.training.loop import Training
    from holdfast.training.parts import Autoencoder, Parts
    from holdfast.training.prior import Draw

RECIPE = "flux-dreambooth"
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
# The layers that a LoRA is put beside, by the ends of their names: attention and feed-forward of the double blocks' two
# streams, and attention of the single blocks; of the CLIP text encoder, attention.
LORA_LAYERS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj",
    "attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip
TEXT_ENCODER_LORA_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(kw_only=True)
class Config(TextEncoderFlags, DiffusionConfig):
    """Fine-tuning of the Flux transformer, or of a LoRA in it, on photos of one subject."""

    breaking = DiffusionConfig.breaking | {"train_text_encoder"}

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
        yield from config.side_problems(side)


def main(config: Config) -> None:
    """Trains, and writes checkpoints and in the end a FluxPipeline, or a LoRA for it, to `config.output_dir`."""
    config.validate()
    from holdfast.training.run import run

    run(config, RECIPE, PARTS, base_problems, prepare, lambda *written: export(*written))


def prepare(parts: Parts[Config]) -> tuple[Training, dict[str, Adapter]]:
    """The data, the models and the loss; and the LoRA of each part that gets one."""
    from diffusers import AutoencoderKL

    from holdfast.training.adapters import adapter_of
    from holdfast.training.data import make_loader
    from holdfast.training.ema import average_of
    from holdfast.training.loop import Training
    from holdfast.training.models import prepare_model, prepare_text_encoder
    from holdfast.training.parts import Autoencoder
    from holdfast.training.run import encoded_data
    from holdfast.training.validation import Validation

    config, accelerator = parts.config, parts.accelerator

    def build() -> nn.Module:
        return build_transformer(parts.base, config.enable_npu_flash_attention)

    adapters = {}
    if (adapter := adapter_of(config, LORA_LAYERS, build)) is not None:
        adapters["transformer"] = adapter

    text, vae = Text(parts), Autoencoder(parts, AutoencoderKL)
    data = encoded_data(parts, text, vae, lambda dtype: base_pipeline(parts, vae, text, dtype))

    models = {"transformer": prepare_model(accelerator, build, *parts.folder("transformer"), config.gradient_checkpointing, adapter)}
    if config.train_text_encoder:
        if adapter is not None:
            adapters["text_encoder"] = adapter = adapter.elsewhere(TEXT_ENCODER_LORA_LAYERS)
        text.trained = models["text_encoder"] = prepare_text_encoder(
            accelerator, lambda: build_text_encoder(parts.base), *parts.folder("text_encoder"), adapter
        )
    average = average_of(config, accelerator, models["transformer"], build, adapters.get("transformer"))
    draw = make_draw(parts, models["transformer"], vae, text, parts.dtype)
    validation = Validation(config, accelerator, list(models.values()), average, draw)
    loss = make_loss(parts, models["transformer"], vae, text)
    return Training(models, make_loader(config, accelerator, data), loss, average, validation), adapters


def build_transformer(base: Path, npu_attention: bool = False) -> nn.Module:
    """The transformer of `base` without its weights."""
    from diffusers import FluxTransformer2DModel

    model: Any = FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(base / "transformer"))
    if npu_attention:
        model.set_attention_backend("_native_npu")
    return model  # type: ignore[no-any-return]


def build_text_encoder(base: Path) -> nn.Module:
    """The CLIP text encoder of `base` without its weights."""
    from transformers import CLIPTextConfig, CLIPTextModel

    model: nn.Module = CLIPTextModel(CLIPTextConfig.from_pretrained(base / "text_encoder"))
    return model


class Text:
    """Encoded prompts, as `FluxPipeline.encode_prompt` gives them.

    `trained` is the CLIP text encoder if it is trained along: then it encodes anew at each use.
    """

    def __init__(self, parts: Parts[Config]) -> None:
        from transformers import CLIPTokenizer

        from holdfast.training.encoders import Captions

        settings = [parts.prints["text_encoder"], parts.prints["text_encoder_2"], parts.config.max_sequence_length, str(parts.dtype)]
        self.parts, self.trained = parts, None
        self.captions = Captions(parts, settings, lambda: prompt_encoder(parts))
        self.encode = self.captions.encode
        self.tokenizer = CLIPTokenizer.from_pretrained(parts.base / "tokenizer")

    trained: nn.Module | None

    def __call__(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, max_sequence_length, T5's width) and (batch, CLIP's width), on the device."""
        encoded = self.captions(prompts)
        sequence, pooled = encoded["sequence"], encoded["pooled"]
        if self.trained is not None:
            tokens = self.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt").input_ids
            pooled = self.trained(tokens.to(self.parts.device)).pooler_output.to(pooled.dtype)
        return sequence, pooled


def prompt_encoder(parts: Parts[Config]) -> Callable[[str], dict[str, torch.Tensor]]:
    """Both text encoders, whole on this rank."""
    import torch
    from diffusers import FluxPipeline
    from transformers import T5Config, T5EncoderModel

    from holdfast.training.encoders import encoder_dtype, open_encoder

    device, dtype = parts.accelerator.device, parts.dtype
    t5 = T5Config.from_pretrained(parts.base / "text_encoder_2")
    builds = {"text_encoder": lambda: build_text_encoder(parts.base), "text_encoder_2": lambda: T5EncoderModel(t5)}
    encoders = {name: open_encoder(parts, name, build, encoder_dtype(dtype)) for name, build in builds.items()}
    pipeline = FluxPipeline.from_pretrained(parts.base, transformer=None, vae=None, **encoders)

    def encode(prompt: str) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            sequence, pooled, _ = pipeline.encode_prompt(
                prompt, device=device, max_sequence_length=parts.config.max_sequence_length
            )
        return {"sequence": sequence[0].to(dtype), "pooled": pooled[0].to(dtype)}

    return encode


def make_loss(parts: Parts[Config], transformer: nn.Module, vae: Autoencoder, text: Text) -> Callable[[dict[str, Any]], torch.Tensor]:
    """The loss of a batch of `holdfast.training.data`.

    Every call draws, from the rank's global generators and in this order: the latents from the VAE's posterior, the noise,
    the times.
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    from holdfast.engine.names import unwrap
    from holdfast.training.flow_matching import draw_times, flow_matching_errors, noised
    from holdfast.training.prior import preserved

    config, dtype, device = parts.config, parts.dtype, parts.accelerator.device
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(parts.base, subfolder="scheduler")
    inner: Any = unwrap(transformer)
    guided = inner.config.guidance_embeds

    def loss(batch: dict[str, Any]) -> torch.Tensor:
        moments = batch["moments"].to(device) if "moments" in batch else vae.moments(batch["images"])
        latents = DiagonalGaussianDistribution(moments).sample()
        latents = ((latents - vae.config["shift_factor"]) * vae.config["scaling_factor"]).to(dtype)
        count, channels, height, width = latents.shape
        noise = torch.randn_like(latents)
        times, sigmas = draw_times(config, scheduler, count, device)
        sequence, pooled = text(batch["prompts"])
        prediction = transformer(
            hidden_states=FluxPipeline._pack_latents(noised(latents, noise, sigmas), count, channels, height, width),
            timestep=times / 1000,
            guidance=torch.full((count,), config.guidance_scale, device=device) if guided else None,
            pooled_projections=pooled,
            encoder_hidden_states=sequence,
            txt_ids=torch.zeros(sequence.shape[1], 3, device=device, dtype=dtype),
            img_ids=FluxPipeline._prepare_latent_image_ids(count, height // 2, width // 2, device, dtype),
            return_dict=False,
        )[0]
        prediction = FluxPipeline._unpack_latents(prediction, height * vae.scale_factor, width * vae.scale_factor, vae.scale_factor)
        errors = flow_matching_errors(prediction, latents, noise, sigmas, config.weighting_scheme)
        return preserved(errors, batch["classes"], config.prior_loss_weight)

    return loss


def base_pipeline(parts: Parts[Config], vae: Autoencoder, text: Text, dtype: torch.dtype) -> Draw:
    """What draws pictures with the model as it was before the training, in `dtype`."""
    from holdfast.training.models import prepare_frozen

    transformer = prepare_frozen(parts.accelerator, lambda: build_transformer(parts.base), *parts.folder("transformer"), dtype)
    return make_draw(parts, transformer, vae, text, dtype)


def make_draw(parts: Parts[Config], transformer: nn.Module, vae: Autoencoder, text: Text, dtype: torch.dtype) -> Draw:
    """What draws a picture of `--resolution` for each of some generators. All ranks of a sharded model call it together."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    from holdfast.training.models import forward_of

    kind: Any = type("Pipeline", (FluxPipeline,), {"_execution_device": parts.accelerator.device})  # wherever shards are kept
    nothing = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(parts.base, subfolder="scheduler")
    pipeline = kind(scheduler=scheduler, transformer=forward_of(transformer), **nothing)
    pipeline.vae_scale_factor = vae.scale_factor
    pipeline.set_progress_bar_config(disable=True)
    side = parts.config.resolution - parts.config.resolution % vae.side

    def draw(prompt: str, generators: list[torch.Generator]) -> list[Image.Image]:
        sequence, pooled = (embedding.to(dtype) for embedding in text([prompt] * len(generators)))
        packed = pipeline(
            prompt_embeds=sequence, pooled_prompt_embeds=pooled, height=side, width=side, generator=generators, output_type="latent"
        ).images
        latents = FluxPipeline._unpack_latents(packed, side, side, vae.scale_factor)
        decoded = vae.decode(latents / vae.config["scaling_factor"] + vae.config["shift_factor"])
        return pipeline.image_processor.postprocess(decoded, output_type="pil")  # type: ignore[no-any-return]

    return draw


def export(
    config: Config, base: Path, checkpoint: Path, training: Training, adapters: dict[str, Adapter], repository: str | None
) -> None:
    """Writes the FluxPipeline, or the LoRA, of the final checkpoint; rank 0 calls this, nobody waits for it."""
    from holdfast.training.export import export_pipeline
    from holdfast.training.publish import export_lora, upload, write_card

    if adapters:
        export_lora(config, checkpoint, training, adapters, repository, "FluxPipeline", ("flux", "text-to-image"))
        return
    output, name = Path(config.output_dir), config.pretrained_model_name_or_path
    trained = {part: training.key(part) for part in training.models}
    average = "transformer" if config.use_ema else None
    export_pipeline(base, output, PARTS, trained, checkpoint, config.export_dtype or "fp32", config.variant, average)
    use = f'from diffusers import FluxPipeline\n\npipeline = FluxPipeline.from_pretrained("{repository or output}")'
    write_card(config, name, "Full fine-tuning of the transformer", use, ("flux", "text-to-image", "diffusers-training"))
    if repository is not None:
        upload(config, repository, ["model_index.json", *(f"{part}/*" for part in PARTS)])
