"""A LoRA instead of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.training.flags.base import Flags


@dataclass(kw_only=True)
class LoraFlags(Flags):
    """Which layers get an adapter, and how large."""

    rank: int | None = None
    """Rank of the LoRA. Default: no LoRA, the whole model is trained."""

    lora_alpha: int = 4
    """The adapter's output is scaled by `lora_alpha` / `rank`."""

    lora_dropout: float = 0.0
    """Part of an adapter's inputs that is dropped in training."""

    lora_layers: str | None = None
    """Layers that get an adapter, by the end of their names, separated by commas: "attn.to_k,attn.to_q". Default: those of
    attention and feed-forward."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.below({"rank": 1, "lora_alpha": 1})
        if not 0 <= self.lora_dropout < 1:
            yield f"--lora_dropout is {self.lora_dropout}; it has to be at least 0 and below 1."
        if self.lora_layers is not None and not self.lora_targets(()):
            yield "--lora_layers names no layer; give the ends of their names, as in: attn.to_k,attn.to_q"

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if self.rank is None:
            yield from self.idle(("lora_alpha", "lora_dropout", "lora_layers"), "without --rank, which turns LoRA on")

    def lora_targets(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """The ends of the names of the layers that get an adapter."""
        if self.lora_layers is None:
            return default
        return tuple(name for word in self.lora_layers.split(",") if (name := word.strip()))
