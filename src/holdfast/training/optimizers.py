"""The optimizers and learning rate schedules that the recipes offer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from diffusers.optimization import get_scheduler

from holdfast.training.config import DiffusionConfig


def make_optimizer(config: DiffusionConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `--optimizer` names, over the parameters that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer.lower() == "prodigy":
        from holdfast.training.prodigy import Prodigy

        return Prodigy(
            trained,
            lr=config.learning_rate,
            betas=betas,
            beta3=config.prodigy_beta3,
            weight_decay=config.adam_weight_decay,
            eps=config.adam_epsilon,
            decouple=True,
            use_bias_correction=config.prodigy_use_bias_correction,
            safeguard_warmup=config.prodigy_safeguard_warmup,
        )
    return torch.optim.AdamW(
        trained, lr=config.learning_rate, betas=betas, weight_decay=config.adam_weight_decay, eps=config.adam_epsilon
    )


def make_lr_scheduler(
    config: DiffusionConfig, optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule over optimizer steps: it is stepped once for each, whatever the number of ranks."""
    scheduler: torch.optim.lr_scheduler.LambdaLR = get_scheduler(
        config.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=total_steps,
        num_cycles=config.lr_num_cycles,
        power=config.lr_power,
    )
    return scheduler
