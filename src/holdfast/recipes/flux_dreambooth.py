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
from holdfast.training.pipeline_folder import part_variant, pipeline_problems

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

    from holdfast.training.adapters import Adapter
    from holdfast.training.loop import Training
    from holdfast.training.validation import Picture

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
# Reading a text encoder of 10 GB from a slow disk.
ENCODING_DEADLINE_S = 3600.0


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
        if config.resolution % side:
            yield f"--resolution is {config.resolution}; this model needs a multiple of {side}."


def main(config: Config) -> None:
    """Trains, and writes checkpoints and in the end a FluxPipeline, or a LoRA for it, to `config.output_dir`."""
    config.validate()
    from holdfast.errors import UsageError
    from holdfast.training.continuation import continuation, fingerprints
    from holdfast.training.hub import fetch_pipeline
    from holdfast.training.loop import train
    from holdfast.training.publish import repository_for
    from holdfast.training.setup import configure_logging, make_accelerator

    configure_logging()
    accelerator = make_accelerator(config)
    name = config.pretrained_model_name_or_path
    base = fetch_pipeline(name, PARTS, config.revision, config.variant, config.cache_dir)
    if found := list(base_problems(config, base)):
        raise UsageError("\n".join(found))
    run = continuation(config, RECIPE, fingerprints(base, PARTS, config.variant))
    repository = repository_for(config)

    training, adapters = prepare(config, accelerator, base)
    checkpoint = train(config, accelerator, run, training)
    if checkpoint is not None and accelerator.is_main_process:
        export(config, base, checkpoint, training, adapters, repository)
    accelerator.state.destroy_process_group()


def prepare(config: Config, accelerator: Accelerator, base: Path) -> tuple[Training, dict[str, Adapter]]:
    """The models, the data and the loss; and the LoRA of each part that gets one."""
    import holdfast
    from holdfast.training.adapters import adapter_of
    from holdfast.training.ema import average_of
    from holdfast.training.images import ImageFolder
    from holdfast.training.loop import Training
    from holdfast.training.models import prepare_model, prepare_text_encoder
    from holdfast.training.setup import compute_dtype
    from holdfast.training.validation import Validation

    images: Any = ImageFolder(str(config.instance_data_dir), config.resolution)
    prompts = {config.instance_prompt, config.validation_prompt, config.last_prompt} - {None}
    texts = encode_prompts(config, accelerator, base, sorted(map(str, prompts)), compute_dtype(accelerator))

    adapters = {}
    if (adapter := adapter_of(config, LORA_LAYERS)) is not None:
        adapters["transformer"] = adapter
    variant = part_variant(base, "transformer", config.variant)
    models = {
        "transformer": prepare_model(
            accelerator,
            lambda: build_transformer(base, config.enable_npu_flash_attention),
            base / "transformer",
            variant,
            config.gradient_checkpointing,
            adapter,
        )
    }
    if config.train_text_encoder:
        if adapter is not None:
            adapters["text_encoder"] = adapter = adapter.elsewhere(TEXT_ENCODER_LORA_LAYERS)
        variant = part_variant(base, "text_encoder", config.variant)
        models["text_encoder"] = prepare_text_encoder(
            accelerator, lambda: build_text_encoder(base), base / "text_encoder", variant, adapter
        )
    average = average_of(config, accelerator, models["transformer"], lambda: build_transformer(base), adapters.get("transformer"))
    loss, picture = make_loss_and_picture(config, accelerator, base, models, texts)
    loader = holdfast.DataLoader(
        images,
        batch_size=config.train_batch_size,
        seed=config.seed,
        num_workers=config.dataloader_num_workers,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    validation = Validation(config, accelerator, list(models.values()), average, picture)
    return Training(models, loader, len(images), loss, average, validation), adapters


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


@dataclass
class Text:
    """Encoded prompts, as `FluxPipeline.encode_prompt` gives them: one row each."""

    sequence: dict[str, torch.Tensor]  # (max_sequence_length, T5's width)
    pooled: dict[str, torch.Tensor]  # (CLIP's width,)


def encode_prompts(config: Config, accelerator: Accelerator, base: Path, prompts: list[str], dtype: torch.dtype) -> Text:
    """Encodes each prompt once in the whole run, on rank 0, and hands it to all; the encoders are gone afterwards."""
    import gc

    import torch
    from accelerate.utils import broadcast
    from diffusers import FluxPipeline
    from transformers import CLIPTextConfig, T5Config, T5EncoderModel

    from holdfast.training.models import load_frozen
    from holdfast.training.once import once

    t5_config = T5Config.from_pretrained(base / "text_encoder_2")
    width = CLIPTextConfig.from_pretrained(base / "text_encoder").hidden_size
    device = accelerator.device
    sequence = torch.empty(len(prompts), config.max_sequence_length, t5_config.d_model, device=device, dtype=dtype)
    pooled = torch.empty(len(prompts), width, device=device, dtype=dtype)
    encoder_dtype = torch.bfloat16 if dtype == torch.float16 else dtype  # T5's activations are beyond fp16

    def encode() -> str:
        parts: dict[str, Any] = {"transformer": None, "vae": None}
        builds = {"text_encoder": lambda: build_text_encoder(base), "text_encoder_2": lambda: T5EncoderModel(t5_config)}
        for name, build in builds.items():
            variant = part_variant(base, name, config.variant)
            parts[name] = load_frozen(build, base / name, variant, encoder_dtype).to(device)
        pipeline = FluxPipeline.from_pretrained(base, **parts)
        with torch.no_grad():
            for row, prompt in enumerate(prompts):
                t5_output, clip_output, _ = pipeline.encode_prompt(
                    prompt, device=device, max_sequence_length=config.max_sequence_length
                )
                sequence[row], pooled[row] = t5_output[0], clip_output[0]
        return ""

    once(encode, "run", ENCODING_DEADLINE_S)
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    sequence, pooled = broadcast(sequence), broadcast(pooled)
    return Text(dict(zip(prompts, sequence, strict=True)), dict(zip(prompts, pooled, strict=True)))


def make_loss_and_picture(
    config: Config, accelerator: Accelerator, base: Path, models: dict[str, nn.Module], text: Text
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Picture]:
    """The loss of a batch of pixels of shape (batch, 3, height, width), each from -1 to 1; and what makes a picture.

    Every call of the loss draws, from the rank's global generators and in this order: the latents from the VAE's posterior,
    the noise, the times.
    """
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import CLIPTokenizer

    from holdfast.engine.names import unwrap
    from holdfast.training.flow_matching import draw_times, flow_matching_loss, noised
    from holdfast.training.models import forward_of, load_frozen, on_device
    from holdfast.training.setup import compute_dtype

    dtype, device, transformer = compute_dtype(accelerator), accelerator.device, models["transformer"]
    vae_config = AutoencoderKL.load_config(base / "vae")
    variant = part_variant(base, "vae", config.variant)
    vae: Any = load_frozen(lambda: AutoencoderKL.from_config(vae_config), base / "vae", variant, dtype)
    scale_factor = 2 ** (len(vae.config.block_out_channels) - 1)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(base, subfolder="scheduler")
    inner: Any = unwrap(transformer)
    guided = inner.config.guidance_embeds
    kind: Any = type("Pipeline", (FluxPipeline,), {"_execution_device": device})  # wherever the VAE is kept
    pipeline = kind(
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(scheduler.config),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=forward_of(transformer),
    )
    pipeline.set_progress_bar_config(disable=True)
    tokenizer = CLIPTokenizer.from_pretrained(base / "tokenizer")

    def encoded(prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and pooled embedding, a row for each prompt; the latter of the text encoder as it is, where it is trained."""
        sequence = torch.stack([text.sequence[prompt] for prompt in prompts])
        if not config.train_text_encoder:
            return sequence, torch.stack([text.pooled[prompt] for prompt in prompts])
        tokens = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt").input_ids
        return sequence, models["text_encoder"](tokens.to(device)).pooler_output.to(dtype)

    def loss(pixels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), on_device(vae, device, config.offload):
            latents = vae.encode(pixels.to(device, dtype)).latent_dist.sample()
        latents = ((latents - vae.config.shift_factor) * vae.config.scaling_factor).to(dtype)
        batch, channels, height, width = latents.shape
        noise = torch.randn_like(latents)
        times, sigmas = draw_times(config, scheduler, batch, device)
        sequence, pooled = encoded([config.instance_prompt] * batch)
        prediction = transformer(
            hidden_states=FluxPipeline._pack_latents(noised(latents, noise, sigmas), batch, channels, height, width),
            timestep=times / 1000,
            guidance=torch.full((batch,), config.guidance_scale, device=device) if guided else None,
            pooled_projections=pooled,
            encoder_hidden_states=sequence,
            txt_ids=torch.zeros(sequence.shape[1], 3, device=device, dtype=dtype),
            img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, device, dtype),
            return_dict=False,
        )[0]
        prediction = FluxPipeline._unpack_latents(prediction, height * scale_factor, width * scale_factor, scale_factor)
        return flow_matching_loss(prediction, latents, noise, sigmas, config.weighting_scheme)

    def picture(prompt: str, generator: torch.Generator) -> Any:
        sequence, pooled = encoded([prompt])
        side = config.resolution
        packed = pipeline(
            prompt_embeds=sequence, pooled_prompt_embeds=pooled, height=side, width=side, generator=generator, output_type="latent"
        ).images
        latents = FluxPipeline._unpack_latents(packed, side, side, scale_factor)
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        with on_device(vae, device, config.offload):
            decoded = vae.decode(latents.to(dtype), return_dict=False)[0]
        return pipeline.image_processor.postprocess(decoded.float(), output_type="pil")[0]

    return loss, picture


def export(
    config: Config, base: Path, checkpoint: Path, training: Training, adapters: dict[str, Adapter], repository: str | None
) -> None:
    """Writes the FluxPipeline, or the LoRA, of the final checkpoint; rank 0 calls this, nobody waits for it."""
    from holdfast.training.adapters import export_adapters
    from holdfast.training.export import export_pipeline
    from holdfast.training.publish import upload, write_card

    output, name = Path(config.output_dir), config.pretrained_model_name_or_path
    average = "transformer" if config.use_ema else None
    if adapters:
        parts = {part: (training.key(part), adapter) for part, adapter in adapters.items()}
        written = export_adapters(checkpoint, output, parts, config.adapter_dtype, average)
        what = "A LoRA"
        use = f'pipeline = FluxPipeline.from_pretrained("{name}")\npipeline.load_lora_weights("{repository or output}")'
        files = [written.name]
    else:
        trained = {part: training.key(part) for part in training.models}
        export_pipeline(base, output, PARTS, trained, checkpoint, config.export_dtype or "fp32", config.variant, average)
        what = "Full fine-tuning of the transformer"
        use = f'pipeline = FluxPipeline.from_pretrained("{repository or output}")'
        files = ["model_index.json", *(f"{part}/*" for part in PARTS)]
    tags = ("flux", "text-to-image", "diffusers-training", *(["lora"] if adapters else []))
    write_card(config, name, what, f"from diffusers import FluxPipeline\n\n{use}", tags)
    if repository is not None:
        upload(config, repository, files)
