"""How long, how large the steps, where to, and from where on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.training.flags.base import Flags, installed

ExportDtype = Literal["fp32", "fp16", "bf16"]
Tracker = Literal["tensorboard", "wandb", "comet_ml", "all", "none"]

# What each tracker needs: the module, and what pip calls it.
_TRACKERS = {"tensorboard": ("tensorboard", "tensorboard"), "wandb": ("wandb", "wandb"), "comet_ml": ("comet_ml", "comet-ml")}


@dataclass(kw_only=True)
class RunFlags(Flags):
    """The run as such: steps, checkpoints, outputs."""

    output_dir: str = "flux-dreambooth"
    """Where checkpoints, `metrics.jsonl`, the tracker's logs and in the end what was trained go."""

    train_batch_size: int = 4
    """Samples per rank and micro step."""

    gradient_accumulation_steps: int = 1
    """Micro steps per optimizer step."""

    num_train_epochs: int = 1
    """Passes over the samples; has no effect beside `max_train_steps`."""

    max_train_steps: int | None = None
    """Optimizer steps in all, those before a resume included. Default: what `num_train_epochs` comes to."""

    checkpointing_steps: int = 500
    """Optimizer steps between two checkpoints; one more is written at the end."""

    checkpoints_total_limit: int | None = None
    """How many checkpoints to keep. Default: all."""

    resume_from_checkpoint: str | None = None
    """`latest` for the newest complete checkpoint in `output_dir` (a new run where there is none), or the path of one
    checkpoint folder, which then has to be usable."""

    seed: int = 0
    """Seed of the run. Ranks draw different noise; the order of the samples is one for all ranks."""

    report_to: Tracker = "tensorboard"
    """Where losses and pictures are shown; `none` leaves them in `output_dir` only."""

    logging_dir: str = "logs"
    """The tracker's folder inside `output_dir`."""

    export_dtype: ExportDtype | None = None
    """Dtype of the trained weights in what is exported. Default: fp32, bit for bit that of the training; for a LoRA that of
    the mixed precision."""

    upcast_before_saving: bool = False
    """Export a LoRA in fp32, as it is trained, and not in the dtype of the mixed precision."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.below(
            {
                "train_batch_size": 1, "gradient_accumulation_steps": 1, "num_train_epochs": 1, "max_train_steps": 1,
                "checkpointing_steps": 1, "checkpoints_total_limit": 1, "seed": 0,
            }
        )  # fmt: skip
        if Path(self.output_dir).exists() and not Path(self.output_dir).is_dir():
            yield f"--output_dir {self.output_dir} is a file; name a folder."
        if (path := self.checkpoint_path()) is not None and not path.is_dir():
            yield (
                f"--resume_from_checkpoint {self.resume_from_checkpoint}: there is no such checkpoint folder. "
                "Give its path, its name inside --output_dir, or `latest`."
            )
        module, package = _TRACKERS.get(self.report_to, ("", ""))
        if module and not installed(module):
            yield f"--report_to {self.report_to}: {module} is not installed. pip install {package}, or --report_to none."

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if self.checkpointing_steps >= total_steps:
            yield (
                f"No checkpoint will be written before the end: --checkpointing_steps is {self.checkpointing_steps} "
                f"and the run has {total_steps} step(s). A run that dies has to start over."
            )
        if self.max_train_steps is not None:
            yield from self.idle(("num_train_epochs",), "beside --max_train_steps")
        if self.report_to == "none":
            yield from self.idle(("logging_dir",), "with --report_to none")
        if self.export_dtype is not None:
            yield from self.idle(("upcast_before_saving",), "beside --export_dtype")

    def checkpoint_path(self) -> Path | None:
        """The one checkpoint that `--resume_from_checkpoint PATH` names: as a path, or by its name in `output_dir`."""
        if self.resume_from_checkpoint in (None, "latest"):
            return None
        given = Path(str(self.resume_from_checkpoint))
        inside = Path(self.output_dir) / given
        return inside if not given.exists() and inside.exists() else given

    def total_steps(self, batches: Callable[[int], int]) -> int:
        """Optimizer steps of the whole run; `batches` gives how many micro batches a rank gets in so many epochs."""
        if self.max_train_steps is not None:
            return self.max_train_steps
        return -(-batches(self.num_train_epochs) // self.gradient_accumulation_steps)
