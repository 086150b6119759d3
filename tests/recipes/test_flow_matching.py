"""The training step against a reference written by hand: from pixels to the loss, for every weighting scheme."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline
from transformers import CLIPTextModel, T5EncoderModel  # noqa: F401

from holdfast.recipes.flux_dreambooth import Config
from holdfast.testing import RankPool

SCHEMES = ["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"]
BATCH = 3


def config_for(flux_folder: Path, photo_folder: Path, out: Path, **changes: object) -> Config:
    return Config(
        pretrained_model_name_or_path=str(flux_folder),
        instance_data_dir=str(photo_folder),
        output_dir=str(out),
        instance_prompt="a photo of sks girl",
        resolution=16,
        mixed_precision="no",
        report_to="none",
        **changes,
    )


def reference_sigmas(config: Config) -> torch.Tensor:
    if config.weighting_scheme == "logit_normal":
        u = 1 / (1 + torch.exp(-torch.normal(config.logit_mean, config.logit_std, size=(BATCH,))))
    else:
        u = torch.rand(BATCH)
        if config.weighting_scheme == "mode":
            u = 1 - u - config.mode_scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)
    return torch.tensor([(1000 - math.floor(1000 * float(value))) / 1000 for value in u])


def reference_weight(scheme: str, sigma: float) -> float:
    if scheme == "sigma_sqrt":
        return sigma**-2
    if scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    return 1.0


def tokens(image: torch.Tensor) -> torch.Tensor:
    """Latents of shape (channels, height, width) as a sequence of 2 x 2 patches."""
    channels, height, width = image.shape
    rows = []
    for y in range(0, height, 2):
        for x in range(0, width, 2):
            places = [(c, y + dy, x + dx) for c in range(channels) for dy in (0, 1) for dx in (0, 1)]
            rows.append(torch.stack([image[place] for place in places]))
    return torch.stack(rows)


def reference_loss(config: Config, pixels: torch.Tensor, guidance: float | None) -> float:
    pipeline = FluxPipeline.from_pretrained(config.pretrained_model_name_or_path)
    torch.manual_seed(5)
    with torch.no_grad():
        posterior = pipeline.vae.encode(pixels).latent_dist
        latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape)
        latents = (latents - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
        noise = torch.randn(latents.shape)
        sigmas = reference_sigmas(config)
        sequence, pooled, _ = pipeline.encode_prompt(config.instance_prompt, max_sequence_length=77)
        half = latents.shape[-1] // 2
        losses = []
        for x, eps, sigma in zip(latents, noise, sigmas, strict=True):
            prediction = pipeline.transformer(
                hidden_states=tokens((1 - sigma) * x + sigma * eps)[None],
                timestep=sigma[None],
                guidance=None if guidance is None else torch.tensor([guidance]),
                pooled_projections=pooled,
                encoder_hidden_states=sequence,
                txt_ids=torch.zeros(77, 3),
                img_ids=torch.tensor([[0.0, y, x] for y in range(half) for x in range(half)]),
            ).sample[0]
            squares = (prediction - tokens(eps - x)) ** 2
            losses.append(reference_weight(config.weighting_scheme, float(sigma)) * squares.mean())
    return float(sum(losses) / BATCH)


def recipe_loss(config: Config, pixels: torch.Tensor, precision: str) -> float:

    from holdfast.recipes import flux_dreambooth as recipe
    from holdfast.training.continuation import fingerprints
    from holdfast.training.models import prepare_model
    from holdfast.training.parts import Autoencoder, Parts
    from holdfast.training.setup import make_accelerator

    accelerator = make_accelerator(dataclasses.replace(config, mixed_precision=precision))
    base = Path(config.pretrained_model_name_or_path)
    parts = Parts(config, accelerator, base, fingerprints(base, recipe.PARTS, None))
    text = recipe.Text(parts)
    text.encode([config.instance_prompt])
    transformer = prepare_model(
        accelerator, lambda: recipe.build_transformer(base), base / "transformer", None, checkpointing=False
    )
    assert {parameter.dtype for parameter in transformer.parameters()} == {torch.float32}
    loss = recipe.make_loss(parts, transformer, Autoencoder(parts, AutoencoderKL), text)
    torch.manual_seed(5)
    return float(loss({"images": pixels, "prompts": [config.instance_prompt] * BATCH, "classes": 0}))


def both(config: Config, guidance: float | None = 2.5, precision: str = "no") -> tuple[float, float]:
    from holdfast.training.images import Cut, find_images, open_image

    cut, paths = Cut(config.resolution, config.resolution), find_images(Path(str(config.instance_data_dir)))
    pixels = torch.from_numpy(np.stack([cut.pixels(open_image(path.read_bytes())) for path in paths[:BATCH]]))
    return recipe_loss(config, pixels, precision), reference_loss(config, pixels, guidance)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loss_is_that_of_the_reference(pool: RankPool, flux_folder, photo_folder, tmp_path, scheme):
    density = {"logit_mean": 0.4, "logit_std": 0.7, "mode_scale": 0.9}
    config = config_for(flux_folder, photo_folder, tmp_path, weighting_scheme=scheme, guidance_scale=2.5, **density)
    ((ours, reference),) = pool.run(both, 1, config)
    assert ours == pytest.approx(reference, rel=1e-5)
    assert ours > 0


def test_bf16_is_the_same_step_in_less_precise_numbers(pool: RankPool, flux_folder, photo_folder, tmp_path):
    config = config_for(flux_folder, photo_folder, tmp_path, guidance_scale=2.5)
    ((ours, reference),) = pool.run(both, 1, config, precision="bf16")
    assert ours != reference
    assert ours == pytest.approx(reference, rel=0.02)


def without_guidance(config: Config, folder: str) -> tuple[float, float]:
    pipeline = FluxPipeline.from_pretrained(config.pretrained_model_name_or_path)
    kind, values = type(pipeline.transformer), dict(pipeline.transformer.config)
    torch.manual_seed(0)
    pipeline.transformer = kind.from_config({**values, "guidance_embeds": False})
    pipeline.save_pretrained(folder)
    return both(dataclasses.replace(config, pretrained_model_name_or_path=folder), guidance=None)


def test_a_model_without_guidance_embedding_gets_none(pool: RankPool, flux_folder, photo_folder, tmp_path):
    config = config_for(flux_folder, photo_folder, tmp_path, guidance_scale=2.5)
    ((ours, reference),) = pool.run(without_guidance, 1, config, str(tmp_path / "schnell"))
    assert ours == pytest.approx(reference, rel=1e-5)
