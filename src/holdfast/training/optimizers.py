"""The optimizers and learning rate schedules that the recipes offer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import nn

from holdfast.training.config import DiffusionConfig

TEXT_ENCODER = "text_encoder"


def make_optimizer(config: DiffusionConfig, models: Mapping[str, nn.Module], world_size: int) -> torch.optim.Optimizer:
    """The optimizer that `--optimizer` names, over what is trained in `models`; a text encoder is a group of its own."""
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad], **group_flags(config, part, world_size)}
        for part, model in models.items()
    ]
    defaults = group_flags(config, "", world_size)  # the polynomial schedule looks at them
    if config.is_prodigy:
        from holdfast.training.prodigy import Prodigy

        return Prodigy(
            groups,
            **defaults,
            beta3=config.prodigy_beta3,
            decouple=config.prodigy_decouple,
            use_bias_correction=config.prodigy_use_bias_correction,
            safeguard_warmup=config.prodigy_safeguard_warmup,
        )
    if config.use_8bit_adam:
        bitsandbytes: Any = import_module("bitsandbytes")
        optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(groups, **defaults)
        return optimizer
    return torch.optim.AdamW(groups, **defaults)


def group_flags(config: DiffusionConfig, part: str, world_size: int) -> dict[str, Any]:
    """What the flags say of the param group of one part of the pipeline."""
    rate, decay = config.learning_rate, config.adam_weight_decay
    if config.scale_lr:
        rate *= config.gradient_accumulation_steps * config.train_batch_size * world_size
    if part == TEXT_ENCODER:
        decay = getattr(config, "adam_weight_decay_text_encoder", decay)
        if not config.is_prodigy:  # which has one rate for all
            rate = getattr(config, "text_encoder_lr", rate)
    betas = (config.adam_beta1, config.adam_beta2)
    return {"lr": rate, "betas": betas, "weight_decay": decay, "eps": config.adam_epsilon}


# Which flag decides on what of a param group.
_DECIDES = {
    "learning_rate": "lr", "text_encoder_lr": "lr", "scale_lr": "lr", "adam_beta1": "betas", "adam_beta2": "betas",
    "adam_weight_decay": "weight_decay", "adam_weight_decay_text_encoder": "weight_decay", "adam_epsilon": "eps",
    "prodigy_beta3": "beta3", "prodigy_decouple": "decouple", "prodigy_use_bias_correction": "use_bias_correction",
    "prodigy_safeguard_warmup": "safeguard_warmup",
}  # fmt: skip


def apply_changed_flags(
    config: DiffusionConfig,
    models: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    changed: set[str],
    world_size: int,
) -> None:
    """After a resume, which has put back what was: what other flags than before say of the param groups and the schedule."""
    keys = {_DECIDES[flag] for flag in changed & _DECIDES.keys()}
    if config.scale_lr and changed & {"train_batch_size", "gradient_accumulation_steps"}:
        keys.add("lr")
    for part, group in zip(models, optimizer.param_groups, strict=True):
        flags = group_flags(config, part, world_size)
        flags |= {key: getattr(config, f"prodigy_{key}") for key in keys if key in group and key not in flags}
        for key in keys & group.keys():
            group[key if key != "lr" else "initial_lr"] = flags[key]
    scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    if keys or changed & {"lr_scheduler", "lr_warmup_steps", "lr_num_cycles", "lr_power", "max_train_steps", "num_train_epochs"}:
        rates = zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, base, shape in rates:
            group["lr"] = base * shape(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


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
