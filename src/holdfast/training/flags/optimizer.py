"""Optimizer, learning rate, and what the loss looks like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from holdfast.training.flags.base import Flags, installed

LRScheduler = Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"]
Weighting = Literal["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"]

OPTIMIZERS = ("adamw", "prodigy")
_PRODIGY = ("prodigy_beta3", "prodigy_decouple", "prodigy_use_bias_correction", "prodigy_safeguard_warmup")
# The schedulers that each of these flags belongs to.
_WARM_UP = ("constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")


@dataclass(kw_only=True)
class OptimizerFlags(Flags):
    """The optimizer and its schedule."""

    optimizer: str = "AdamW"
    """`AdamW` or `prodigy`, in capitals or not."""

    use_8bit_adam: bool = False
    """AdamW with 8-bit state, of bitsandbytes; needs a GPU, and not FSDP."""

    learning_rate: float = 1e-4
    """Peak learning rate. Prodigy finds its own: give it 1."""

    scale_lr: bool = False
    """Multiply the learning rate by ranks, micro steps and batch size."""

    lr_scheduler: LRScheduler = "constant"
    """Shape of the learning rate over the optimizer steps."""

    lr_warmup_steps: int = 500
    """Optimizer steps of warm-up, for the schedulers that have one."""

    lr_num_cycles: int = 1
    """Restarts of `cosine_with_restarts`."""

    lr_power: float = 1.0
    """Power of `polynomial`."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""

    adam_beta1: float = 0.9
    """First beta of AdamW and Prodigy."""

    adam_beta2: float = 0.999
    """Second beta of AdamW and Prodigy."""

    adam_weight_decay: float = 1e-4
    """Weight decay of AdamW and Prodigy."""

    adam_epsilon: float = 1e-8
    """Epsilon of AdamW and Prodigy."""

    prodigy_beta3: float | None = None
    """Prodigy's beta for its step size. Default: the square root of `adam_beta2`."""

    prodigy_decouple: bool = True
    """Prodigy: weight decay apart from the gradient, as AdamW has it."""

    prodigy_use_bias_correction: bool = True
    """Prodigy: Adam's bias correction."""

    prodigy_safeguard_warmup: bool = True
    """Prodigy: keep the learning rate out of the estimate's denominator, against trouble during a warm-up."""

    @property
    def is_prodigy(self) -> bool:
        return self.optimizer.lower() == "prodigy"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.below({"lr_warmup_steps": 0, "lr_num_cycles": 1, "lr_power": 0, "max_grad_norm": 0, "adam_weight_decay": 0})
        for name in ("learning_rate", "adam_epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                yield f"--{name} is {getattr(self, name)}; it has to be above 0."
        if self.lr_scheduler == "polynomial" and self.learning_rate <= 1e-7:
            yield f"--learning_rate is {self.learning_rate}; polynomial ends at 1e-7 and needs a higher one."
        for name in ("adam_beta1", "adam_beta2", "prodigy_beta3"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                yield f"--{name} is {value}; it has to be at least 0 and below 1."
        if self.optimizer.lower() not in OPTIMIZERS:
            yield f"--optimizer is {self.optimizer!r}; choose one of {', '.join(OPTIMIZERS)}."
        elif self.use_8bit_adam and not self.is_prodigy and not installed("bitsandbytes"):
            yield "--use_8bit_adam needs bitsandbytes, which is not installed: pip install bitsandbytes, or leave the flag out."

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if self.is_prodigy:
            if self.learning_rate <= 0.1:
                yield f"--learning_rate {self.learning_rate} is very low for Prodigy, which is meant to run with 1."
            yield from self.idle(("use_8bit_adam",), "with --optimizer prodigy")
        else:
            yield from self.idle(_PRODIGY, "with --optimizer AdamW")
        if self.lr_scheduler not in _WARM_UP and self.lr_warmup_steps not in (0, 500):
            yield f"--lr_warmup_steps has no effect with --lr_scheduler={self.lr_scheduler}; constant_with_warmup has a warm-up."
        if self.lr_scheduler != "cosine_with_restarts":
            yield from self.idle(("lr_num_cycles",), f"with --lr_scheduler {self.lr_scheduler}")
        if self.lr_scheduler != "polynomial":
            yield from self.idle(("lr_power",), f"with --lr_scheduler {self.lr_scheduler}")


@dataclass(kw_only=True)
class FlowMatchingFlags(Flags):
    """Where on the way from noise to picture the model is trained, and what the errors there weigh."""

    weighting_scheme: Weighting = "none"
    """How sigma is drawn (`logit_normal`, `mode`; else uniform) and the loss weighted (`sigma_sqrt`, `cosmap`; else 1)."""

    logit_mean: float = 0.0
    """Mean of `logit_normal`."""

    logit_std: float = 1.0
    """Standard deviation of `logit_normal`."""

    mode_scale: float = 1.29
    """Scale of `mode`."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.below({"logit_std": 0})

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if self.weighting_scheme != "logit_normal":
            yield from self.idle(("logit_mean", "logit_std"), f"with --weighting_scheme {self.weighting_scheme}")
        if self.weighting_scheme != "mode":
            yield from self.idle(("mode_scale",), f"with --weighting_scheme {self.weighting_scheme}")


@dataclass(kw_only=True)
class AverageFlags(Flags):
    """The moving average of the trained weights."""

    use_ema: bool = False
    """Keep an exponential moving average of the trained weights, sharded as they are, and export it."""

    ema_decay: float = 0.9999
    """What the average keeps of itself at each step, once it is warmed up: (1 + step) / (10 + step) until then."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not 0 <= self.ema_decay < 1:
            yield f"--ema_decay is {self.ema_decay}; it has to be at least 0 and below 1."

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if not self.use_ema:
            yield from self.idle(("ema_decay",), "without --use_ema")


@dataclass(kw_only=True)
class TextEncoderFlags(Flags):
    """The text encoder that is trained along."""

    train_text_encoder: bool = False
    """Train the CLIP text encoder, too; the other text encoders stay as they are."""

    text_encoder_lr: float = 5e-6
    """Learning rate of the text encoder; Prodigy has one for both, `learning_rate`."""

    adam_weight_decay_text_encoder: float = 1e-3
    """Weight decay of the text encoder."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.below({"adam_weight_decay_text_encoder": 0})
        if not 0 < self.text_encoder_lr < float("inf"):
            yield f"--text_encoder_lr is {self.text_encoder_lr}; it has to be above 0."

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if not self.train_text_encoder:
            yield from self.idle(("text_encoder_lr", "adam_weight_decay_text_encoder"), "without --train_text_encoder")
