"""From flags and the accelerate config to an Accelerator. What the device or the config cannot do is refused here."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import diffusers
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration

from holdfast.errors import UsageError
from holdfast.integrations import cpu_ranks
from holdfast.training.config import DiffusionConfig

logger = logging.getLogger(__name__)

_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_BROADCASTS = ("FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_SYNC_MODULE_STATES")


def configure_logging() -> None:
    """Shows the package's log on stderr: all of it on rank 0, warnings elsewhere. Quiets what is no news to a user."""
    # True of every block of a diffusion transformer; none of them writes into what it got.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    transformers.logging.set_verbosity_error()
    diffusers.logging.disable_progress_bar()
    if os.environ.get("RANK", "0") != "0":
        diffusers.logging.set_verbosity_error()
    package = logging.getLogger("holdfast")
    if not package.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        rank = os.environ.get("RANK", "0")
        handler.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(message)s", "%H:%M:%S"))
        package.addHandler(handler)
        package.setLevel(logging.INFO if rank == "0" else logging.WARNING)


def make_accelerator(config: DiffusionConfig) -> Accelerator:
    """The run's Accelerator, as the accelerate config or the launcher's environment describes it.

    Raises UsageError for what Accelerate would refuse with a traceback or silently ignore.
    """
    cpu_ranks.join_without_accelerator()
    if cpu_ranks.requested(config.cpu_fsdp):
        cpu_ranks.enable()
    switched_off = [name for name in _BROADCASTS if _is_true(name)]
    for name in switched_off:
        os.environ[name] = "false"
    logging_dir = Path(config.output_dir) / config.logging_dir
    try:
        accelerator = Accelerator(
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            mixed_precision=config.mixed_precision,
            log_with=None if config.report_to == "none" else config.report_to,
            project_config=ProjectConfiguration(project_dir=config.output_dir, logging_dir=str(logging_dir)),
        )
    except (ValueError, ImportError) as error:
        raise UsageError(f"Accelerate cannot serve this configuration: {error}") from error
    _refuse_precision(accelerator)
    _refuse_device(config, accelerator)
    _refuse_ignored_fsdp(accelerator)
    if config.cpu_fsdp and accelerator.distributed_type != DistributedType.FSDP:
        logger.warning(
            "--cpu_fsdp has no effect: nothing asks for FSDP (an accelerate config with distributed_type: FSDP)"
        )
    if switched_off:
        names = " and ".join(name.lower() for name in switched_off)
        logger.info("%s switched off: each rank reads its own part of the weights from disk", names)
    return accelerator


def _refuse_precision(accelerator: Accelerator) -> None:
    precision, device = accelerator.mixed_precision, accelerator.device.type
    if precision not in _DTYPES or (precision == "fp16" and device == "cpu"):
        raise UsageError(
            f"Mixed precision {precision} is not possible here (device: {device}). Use --mixed_precision=bf16, or no."
        )


def _refuse_device(config: DiffusionConfig, accelerator: Accelerator) -> None:
    """Flags that need a device which is not here; those that set something in torch, set it."""
    device = accelerator.device.type
    lines = []
    if config.allow_tf32:
        if device == "cuda" and torch.cuda.get_device_capability()[0] >= 8:
            torch.backends.cuda.matmul.allow_tf32 = True
        else:
            lines.append(f"--allow_tf32 needs an NVIDIA GPU that has TF32 (Ampere or newer); this device is {device}. Leave it out.")
    if config.enable_npu_flash_attention and device != "npu":
        lines.append(f"--enable_npu_flash_attention needs an Ascend NPU; this device is {device}. Leave it out.")
    if config.use_8bit_adam and not config.is_prodigy:
        if device == "cpu":
            lines.append("--use_8bit_adam needs a GPU; this device is cpu. Leave it out.")
        elif accelerator.distributed_type == DistributedType.FSDP:
            lines.append("--use_8bit_adam does not work with FSDP, which shards the state itself. Leave one of them out.")
    if lines:
        raise UsageError("\n".join(lines))


def _refuse_ignored_fsdp(accelerator: Accelerator) -> None:
    if not _is_true("ACCELERATE_USE_FSDP") or accelerator.distributed_type == DistributedType.FSDP:
        return
    if accelerator.num_processes == 1:
        logger.warning("FSDP was asked for with one process: there is nothing to shard, so it has no effect")
        return
    raise UsageError(
        f"FSDP was asked for, but Accelerate ignores it on {accelerator.device.type} ranks and would train a whole copy "
        "of the model in each. Add --cpu_fsdp (or set HOLDFAST_CPU_FSDP=1) to shard over CPU ranks; on a machine with "
        "accelerators set `use_cpu: false` in the accelerate config."
    )


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "y", "t", "on")


def compute_dtype(accelerator: Accelerator) -> torch.dtype:
    """The dtype of frozen parts and of the model's inputs, as mixed precision says."""
    return _DTYPES[accelerator.mixed_precision]
