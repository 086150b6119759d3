"""The flags that all diffusion recipes share, named as in diffusers' training scripts.

A field is a flag (`--output_dir`, `--output-dir`), its docstring is what `--help` shows. Nothing here imports torch:
a wrong flag is answered before anything heavy is loaded, and all wrong flags are answered at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.errors import UsageError

Precision = Literal["no", "fp16", "bf16"]
ExportDtype = Literal["fp32", "fp16", "bf16"]
LRScheduler = Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"]
Weighting = Literal["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"]
Tracker = Literal["tensorboard", "wandb", "comet_ml", "all", "none"]

OPTIMIZERS = ("adamw", "prodigy")


@dataclass(kw_only=True)
class DiffusionConfig:
    """Flags of every diffusion recipe."""

    pretrained_model_name_or_path: str
    """The base pipeline: a folder in diffusers' layout, or the name of a repository on the Hugging Face Hub."""

    revision: str | None = None
    """Revision of the repository: a branch, a tag or a commit."""

    variant: str | None = None
    """Variant of the weight files, such as fp16 for `model.fp16.safetensors`; a part without it uses its plain files."""

    instance_data_dir: str
    """Folder of training images. EXIF orientation is honoured; every image is scaled and cut to a centred square."""

    output_dir: str = "flux-dreambooth"
    """Where checkpoints, `metrics.jsonl`, the tracker's logs and in the end the trained pipeline go."""

    resolution: int = 512
    """Side of the training images in pixels."""

    train_batch_size: int = 4
    """Images per rank and micro step."""

    gradient_accumulation_steps: int = 1
    """Micro steps per optimizer step."""

    num_train_epochs: int = 1
    """Passes over the images; has no effect beside `max_train_steps`."""

    max_train_steps: int | None = None
    """Optimizer steps in all, those before a resume included. Default: what `num_train_epochs` comes to."""

    checkpointing_steps: int = 500
    """Optimizer steps between two checkpoints; one more is written at the end."""

    checkpoints_total_limit: int | None = None
    """How many checkpoints to keep. Default: all."""

    resume_from_checkpoint: str | None = None
    """`latest` for the newest complete checkpoint in `output_dir` (a new run where there is none), or the path of one
    checkpoint folder, which then has to be usable."""

    optimizer: str = "AdamW"
    """`AdamW` or `prodigy`, in capitals or not."""

    learning_rate: float = 1e-4
    """Peak learning rate. Prodigy finds its own: give it 1."""

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
    """Decoupled weight decay of AdamW and Prodigy."""

    adam_epsilon: float = 1e-8
    """Epsilon of AdamW and Prodigy."""

    prodigy_beta3: float | None = None
    """Prodigy's beta for its step size. Default: the square root of `adam_beta2`."""

    prodigy_use_bias_correction: bool = True
    """Prodigy: Adam's bias correction."""

    prodigy_safeguard_warmup: bool = True
    """Prodigy: keep the learning rate out of the estimate's denominator, against trouble during a warm-up."""

    weighting_scheme: Weighting = "none"
    """How sigma is drawn (`logit_normal`, `mode`; else uniform) and the loss weighted (`sigma_sqrt`, `cosmap`; else 1)."""

    logit_mean: float = 0.0
    """Mean of `logit_normal`."""

    logit_std: float = 1.0
    """Standard deviation of `logit_normal`."""

    mode_scale: float = 1.29
    """Scale of `mode`."""

    mixed_precision: Precision | None = None
    """Precision of the arithmetic; the trained weights are kept in fp32. Default: what the accelerate config says."""

    gradient_checkpointing: bool = False
    """Compute activations anew in the backward pass instead of keeping them: slower, smaller."""

    dataloader_num_workers: int = 0
    """Processes per rank that read images; 0 reads in the training process."""

    seed: int = 0
    """Seed of the run. Ranks draw different noise; the order of the images is one for all ranks."""

    report_to: Tracker = "tensorboard"
    """Where losses are shown; `none` leaves them in `metrics.jsonl` only."""

    logging_dir: str = "logs"
    """The tracker's folder inside `output_dir`."""

    export_dtype: ExportDtype = "fp32"
    """Dtype of the trained weights in the exported pipeline. fp32 is that of the weights in training: bit for bit."""

    cpu_fsdp: bool = False
    """Let FSDP run on CPU ranks, for tests and dry runs (Accelerate ignores FSDP there). Also: HOLDFAST_CPU_FSDP=1."""

    def problems(self) -> Iterator[str]:
        """Yields one line for each thing that is wrong; a recipe adds its own."""
        yield from self._number_problems()
        yield from self._choice_problems()
        yield from self._path_problems()

    def validate(self) -> None:
        """Raises one UsageError with every problem, before anything is loaded."""
        if found := list(self.problems()):
            lines = "\n".join(f"  - {line}" for line in found)
            raise UsageError(f"{len(found)} thing(s) to correct before training can start:\n{lines}")

    def _number_problems(self) -> Iterator[str]:
        at_least = {
            "train_batch_size": 1, "gradient_accumulation_steps": 1, "num_train_epochs": 1, "max_train_steps": 1,
            "checkpointing_steps": 1, "checkpoints_total_limit": 1, "resolution": 1, "lr_num_cycles": 1,
            "lr_warmup_steps": 0, "max_grad_norm": 0, "adam_weight_decay": 0, "dataloader_num_workers": 0,
            "logit_std": 0, "seed": 0,
        }  # fmt: skip
        for name, floor in at_least.items():
            value = getattr(self, name)
            if value is not None and not value >= floor:
                yield f"--{name} is {value}; it has to be at least {floor}."
        for name in ("learning_rate", "adam_epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                yield f"--{name} is {getattr(self, name)}; it has to be above 0."
        for name in ("adam_beta1", "adam_beta2", "prodigy_beta3"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                yield f"--{name} is {value}; it has to be at least 0 and below 1."

    def _choice_problems(self) -> Iterator[str]:
        if self.optimizer.lower() not in OPTIMIZERS:
            yield f"--optimizer is {self.optimizer!r}; choose one of {', '.join(OPTIMIZERS)}."
        if self.variant is not None and not self.variant.replace("_", "").replace("-", "").isalnum():
            yield f"--variant is {self.variant!r}; give the word inside the file names, such as fp16."

    def _path_problems(self) -> Iterator[str]:
        from holdfast.training.images import image_problems

        yield from image_problems(Path(self.instance_data_dir))
        if Path(self.output_dir).exists() and not Path(self.output_dir).is_dir():
            yield f"--output_dir {self.output_dir} is a file; name a folder."
        if (path := self.checkpoint_path()) is not None and not path.is_dir():
            yield (
                f"--resume_from_checkpoint {self.resume_from_checkpoint}: there is no such checkpoint folder. "
                "Give its path, its name inside --output_dir, or `latest`."
            )

    def checkpoint_path(self) -> Path | None:
        """The one checkpoint that `--resume_from_checkpoint PATH` names: as a path, or by its name in `output_dir`."""
        if self.resume_from_checkpoint in (None, "latest"):
            return None
        given = Path(str(self.resume_from_checkpoint))
        inside = Path(self.output_dir) / given
        return inside if not given.exists() and inside.exists() else given

    def total_steps(self, images: int, world_size: int) -> int:
        """Optimizer steps of the whole run. The stream of images has no gaps: an epoch may end inside a batch."""
        if self.max_train_steps is not None:
            return self.max_train_steps
        per_step = world_size * self.train_batch_size * self.gradient_accumulation_steps
        return -(-self.num_train_epochs * images // per_step)

    def warnings(self, total_steps: int) -> Iterator[str]:
        """Yields one line for each flag that will not do what its owner may expect."""
        if self.checkpointing_steps >= total_steps:
            yield (
                f"No checkpoint will be written before the end: --checkpointing_steps is {self.checkpointing_steps} "
                f"and the run has {total_steps} step(s). A run that dies has to start over."
            )
        if self.optimizer.lower() == "prodigy" and self.learning_rate <= 0.1:
            yield f"--learning_rate {self.learning_rate} is very low for Prodigy, which is meant to run with 1."
        if self.lr_scheduler == "constant" and self.lr_warmup_steps not in (0, 500):
            yield "--lr_warmup_steps has no effect with --lr_scheduler=constant; constant_with_warmup has a warm-up."
