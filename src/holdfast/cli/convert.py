"""The flags of `holdfast import` and `holdfast export`, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from holdfast.errors import UsageError


@dataclass
class Import:
    """Make a Holdfast checkpoint of one that accelerate, the transformers Trainer or torch.distributed.checkpoint wrote, or
    of Hugging Face weights. One process; any number of ranks then resumes from it."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The foreign checkpoint."""

    output_dir: Annotated[Path, tyro.conf.Positional]
    """The training run's output folder; the checkpoint becomes checkpoint-<step> in it."""

    step: int | None = None
    """Optimizer steps done. Default: what the checkpoint says."""

    base: Path | None = None
    """The folder of the pretrained model (with config.json): for adapters, and for optimizers that know no names."""

    samples_seen: int | None = None
    """Begin a holdfast.DataLoader at this sample of the run; with --dataset_size and the loader's --seed."""

    dataset_size: int | None = None
    """Samples of the dataset."""

    seed: int = 0
    """The seed of the loader's order."""

    shuffle: bool = True
    """Whether the loader shuffles."""


def run_import(options: Import) -> int:
    """Import, and say what was taken over and what was not."""
    if (options.samples_seen is None) != (options.dataset_size is None):
        raise UsageError("--samples_seen and --dataset_size belong together: the position and the size of one order")
    from holdfast.engine.importer import import_checkpoint
    from holdfast.integrations.parameter_order import group_names

    stateful: dict[str, Any] = {}
    if options.samples_seen is not None:
        stateful["dataloader"] = {
            "samples_seen": options.samples_seen,
            "dataset_size": options.dataset_size,
            "seed": options.seed,
            "shuffle": options.shuffle,
        }
    imported = import_checkpoint(
        options.folder,
        options.output_dir,
        step=options.step,
        base=options.base,
        order=lambda foreign: group_names(foreign, options.base),
        stateful=stateful,
    )
    print(
        f"{imported.path}: {imported.kind} at step {imported.step}, {imported.tensors} tensors, {imported.nbytes:,} bytes, "
        f"generators of {imported.ranks} rank{'s' if imported.ranks > 1 else ''}"
    )
    for line in imported.left_out:
        print(f"  not taken over: {line}")
    return 0


@dataclass
class Export:
    """Write a Holdfast checkpoint in the layout of another library. One process; memory stays bounded, whatever its size."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint, or an output folder, whose newest checkpoint is taken."""

    output_dir: Annotated[Path, tyro.conf.Positional]
    """A new or empty folder."""

    to: Literal["diffusers", "transformers", "peft", "dcp", "accelerate", "accelerate-fsdp"]
    """The library that is to load it. accelerate: for load_state without FSDP; accelerate-fsdp: under FSDP, SHARDED."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Store floating-point weights so. Default: as they were trained. Not for dcp and accelerate, which continue a training."""

    ema: bool = False
    """Export the averaged weights in place of the trained ones."""

    base: Path | None = None
    """The folder of the pretrained model or pipeline, for config.json and the files beside the weights. Default: what lies
    beside the checkpoint."""

    model: str = ""
    """Which of several registered models: its key in the dict that the Checkpointer was given."""

    lora_alpha: float | None = None
    """The alpha that a LoRA was trained with, where no adapter_config.json in --base tells it."""

    max_shard_size_gb: float = 5.0
    """Files larger than this are cut, in GB of 10^9 bytes."""


def run_export(options: Export) -> int:
    """Export, and say what was written."""
    if options.max_shard_size_gb <= 0:
        raise UsageError(f"--max_shard_size_gb is {options.max_shard_size_gb}, should be greater than 0")
    from holdfast.engine.export import Request, export_checkpoint

    request = Request(
        options.checkpoint,
        options.output_dir,
        options.to,
        dtype=options.dtype,
        ema=options.ema,
        base=options.base,
        model=options.model,
        lora_alpha=options.lora_alpha,
        max_shard_bytes=int(options.max_shard_size_gb * 10**9),
    )
    for line in export_checkpoint(request):
        print(line)
    return 0
