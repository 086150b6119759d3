"""The flags that all diffusion recipes share, named as in diffusers' training scripts.

A field is a flag (`--output_dir`, `--output-dir`), its docstring is what `--help` shows. Nothing here imports torch:
a wrong flag is answered before anything heavy is loaded, and all wrong flags are answered at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from holdfast.training.flags.data import DataFlags, PriorFlags
from holdfast.training.flags.hub import HubFlags
from holdfast.training.flags.lora import LoraFlags
from holdfast.training.flags.model import ModelFlags
from holdfast.training.flags.optimizer import AverageFlags, FlowMatchingFlags, OptimizerFlags
from holdfast.training.flags.run import RunFlags
from holdfast.training.flags.validation import ValidationFlags


@dataclass(kw_only=True)
class DiffusionConfig(
    HubFlags, ValidationFlags, AverageFlags, LoraFlags, FlowMatchingFlags, OptimizerFlags, RunFlags, PriorFlags, DataFlags, ModelFlags
):
    """Flags of every diffusion recipe."""

    breaking: ClassVar[frozenset[str]] = frozenset(
        {
            "optimizer", "use_8bit_adam", "rank", "lora_alpha", "lora_layers", "use_ema", "seed",
            "repeats", "with_prior_preservation", "use_aspect_ratio_buckets", "aspect_ratio_buckets",
        }
    )  # fmt: skip
    """Flags without which a continued run would not be the same: other state, or another order of the samples."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        base = Path(self.pretrained_model_name_or_path)
        if not base.is_dir() and (base.is_absolute() or len(base.parts) != 2 or base.parts[0] in (".", "..")):
            yield (
                f"--pretrained_model_name_or_path {base}: there is no such folder, and it is no repository name "
                "(owner/name) either."
            )
        if base.is_dir() and Path(self.output_dir).resolve() == base.resolve():
            yield "--output_dir is the base pipeline's own folder; name another one."

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if self.rank is None:
            yield from self.idle(("upcast_before_saving",), "without --rank: the whole model is exported in fp32 anyway")

    @property
    def adapter_dtype(self) -> str:
        """In which dtype a LoRA is exported."""
        if self.export_dtype is not None or self.upcast_before_saving:
            return self.export_dtype or "fp32"
        return {"fp16": "fp16", "bf16": "bf16"}.get(self.mixed_precision or "no", "fp32")
