"""The flow matching objective that the Flux family is trained with.

With latents x and noise eps, sigma in [0, 1] is drawn and the model sees x_t = (1 - sigma) x + sigma eps at time
t = 1000 sigma. Its target is the velocity eps - x. (Esser et al. 2024, https://arxiv.org/abs/2403.03206: equations 12 to
14 for the target, section 3.1 for the densities and weights, whose formulas are diffusers' own functions.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from holdfast.training.config import DiffusionConfig

if TYPE_CHECKING:
    from diffusers import FlowMatchEulerDiscreteScheduler


def draw_times(
    config: DiffusionConfig, scheduler: FlowMatchEulerDiscreteScheduler, count: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws `count` places on the scheduler's grid from the rank's global CPU generator.

    Returns (t, sigma), each of shape (count,) in fp32, t from 0 to the scheduler's number of train timesteps.
    """
    density = compute_density_for_timestep_sampling(
        weighting_scheme=config.weighting_scheme,
        batch_size=count,
        logit_mean=config.logit_mean,
        logit_std=config.logit_std,
        mode_scale=config.mode_scale,
    )
    grid = int(scheduler.config.num_train_timesteps)
    # The density may be exactly 1 after rounding, one place past the grid's end.
    places = (density * grid).long().clamp(0, grid - 1)
    return scheduler.timesteps[places].to(device), scheduler.sigmas[places].to(device)


def noised(latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """x_t for latents of shape (batch, …) and sigmas of shape (batch,), in the latents' dtype."""
    sigmas = _per_sample(sigmas, latents).to(latents.dtype)
    return (1.0 - sigmas) * latents + sigmas * noise


def flow_matching_errors(
    prediction: torch.Tensor, latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor, weighting_scheme: str
) -> torch.Tensor:
    """Each sample's weighted mean squared error, of shape (batch,), in fp32."""
    weights = compute_loss_weighting_for_sd3(weighting_scheme=weighting_scheme, sigmas=sigmas.float())
    errors = (prediction.float() - (noise - latents).float()) ** 2
    return (_per_sample(weights, errors) * errors).flatten(1).mean(1)


def _per_sample(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, *(1,) * (like.ndim - 1))
