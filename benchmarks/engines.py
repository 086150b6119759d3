"""Holdfast and its peers behind one small interface: request a save, wait until it is as durable as the engine makes it, load.

No peer is tuned down: each is used as its own documentation shows for training that goes on during a save where it can. What
differs in what they promise is said in the table: only Holdfast hashes what it writes, torch_checkpointing never calls fsync.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Engine:
    """`save(i)` returns when training may go on, `wait()` when that save is durable, `load(i)` when the state is back."""

    save: Callable[[int], None]
    wait: Callable[[], None]
    load: Callable[[int], None]
    close: Callable[[], None] = lambda: None
    blocked: Callable[[], float] | None = None
    """How long the last save blocked the training, by the engine's own clock."""


def _nothing() -> None:
    pass


def holdfast(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, overlap: bool = False) -> Engine:
    from holdfast import Checkpointer

    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer, overlap=overlap)

    def load(i: int) -> None:
        assert checkpointer.resume(f"checkpoint-{i}") == i

    return Engine(lambda i: _ignore(checkpointer.save(i)), checkpointer.wait, load, checkpointer.close, lambda: checkpointer.saves[-1].blocked_s)


def holdfast_overlap(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    return holdfast(folder, model, optimizer, overlap=True)


def _ignore(_: object) -> None:
    pass


def _dcp_load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def load(i: int) -> None:
        weights, state = get_state_dict(model, optimizer)
        whole = {"model": weights, "optim": state}
        dcp.load(whole, checkpoint_id=str(folder / str(i)))
        set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optim"])

    return load


def dcp_save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def save(i: int) -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=str(folder / str(i)))

    return Engine(save, _nothing, _dcp_load(folder, model, optimizer))


def _dcp_async(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, process: bool) -> Engine:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    group = dist.new_group(backend="gloo")
    running: list[Any] = []

    def save(i: int) -> None:
        weights, state = get_state_dict(model, optimizer)
        running[:] = [
            dcp.async_save(
                {"model": weights, "optim": state},
                checkpoint_id=str(folder / str(i)),
                process_group=group,
                async_checkpointer_type=kind,
            )
        ]

    def wait() -> None:
        running[0].result()

    return Engine(save, wait, _dcp_load(folder, model, optimizer))


def dcp_async_thread(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    return _dcp_async(folder, model, optimizer, process=False)


def dcp_async_process(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    return _dcp_async(folder, model, optimizer, process=True)


def torch_checkpointing(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    """Its CPU configuration: no pinned memory. Buffered, where its default direct write is refused by the file system."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    manager = CheckpointManager(
        CheckpointManager.Config(
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            save=AsyncCheckpointSaverConfig(staging_config=staging),
        )
    )
    running: list[Future[Any] | None] = []

    def save(i: int) -> None:
        weights, state = get_state_dict(model, optimizer)
        running[:] = [manager.save(str(folder / str(i)), {"model": weights, "optim": state})]

    def wait() -> None:
        if running[0] is not None:
            running[0].result()

    def load(i: int) -> None:
        weights, state = get_state_dict(model, optimizer)
        loaded = manager.load(str(folder / str(i)), into={"model": weights, "optim": state})
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])

    return Engine(save, wait, load, manager.close)


def torch_save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    """The full state gathered on rank 0 and pickled there."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save(i: int) -> None:
        weights, state = get_state_dict(model, optimizer, options=options)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"model": weights, "optim": state}, folder / f"{i}.pt")
        dist.barrier()

    def load(i: int) -> None:
        whole = torch.load(folder / f"{i}.pt", weights_only=True, mmap=True)
        set_state_dict(
            model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optim"], options=options
        )

    return Engine(save, _nothing, load)


def accelerate_sharded(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    return _accelerate(folder, model, optimizer, "SHARDED_STATE_DICT")


def accelerate_full(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    return _accelerate(folder, model, optimizer, "FULL_STATE_DICT")


def _accelerate(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> Engine:
    """`Accelerator.save_state` and `load_state` of a model that is sharded already; they see what they would have prepared."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from holdfast.integrations import cpu_ranks

    cpu_ranks.enable()
    os.environ["FSDP_VERSION"] = "2"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(fsdp_plugin=plugin)
    accelerator._models.append(model)
    accelerator._optimizers.append(optimizer)

    def save(i: int) -> None:
        accelerator.save_state(str(folder / str(i)))

    def load(i: int) -> None:
        accelerator.load_state(str(folder / str(i)))

    return Engine(save, _nothing, load)


ENGINES: dict[str, Callable[[Path, nn.Module, torch.optim.Optimizer], Engine]] = {
    "holdfast": holdfast,
    "holdfast overlap": holdfast_overlap,
    "dcp.save": dcp_save,
    "dcp.async_save thread": dcp_async_thread,
    "dcp.async_save process": dcp_async_process,
    "torch_checkpointing": torch_checkpointing,
    "accelerate sharded": accelerate_sharded,
    "accelerate full": accelerate_full,
    "torch.save full": torch_save,
}
