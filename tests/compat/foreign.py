"""Jobs that write checkpoints with accelerate and DCP alone, and a job that resumes one with Holdfast; for the ranks of a pool."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

SHAPES = (7, 12)
"""Uneven rows, so that ranks hold pieces of different sizes."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 12)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(12, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))


@dataclass
class State:
    """The whole state of a job by name, each rank's next random numbers, and the loss of the next step."""

    tensors: dict[str, Any]
    draws: list[float]
    lr: list[float]
    begun_at: int = 0


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def step(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    ids = torch.randint(0, 7, (4, 6))
    nn.functional.cross_entropy(model(ids).transpose(1, 2), ids.roll(-1, 1)).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def accelerator_for(version: str, state_dict_type: str) -> Any:
    """As `accelerate launch` has a rank make it; version "" is DDP."""
    from accelerate import Accelerator

    from holdfast.integrations import cpu_ranks

    os.environ["ACCELERATE_USE_CPU"] = "true"
    if not version:
        return Accelerator()
    os.environ.update(
        ACCELERATE_USE_FSDP="true", FSDP_VERSION=version, FSDP_STATE_DICT_TYPE=state_dict_type,
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", FSDP_TRANSFORMER_CLS_TO_WRAP="Block", FSDP_USE_ORIG_PARAMS="true",
        FSDP_RESHARD_AFTER_FORWARD="FULL_SHARD" if version == "1" else "true",
    )  # fmt: skip
    cpu_ranks.enable()
    return Accelerator()


def write_accelerate(folder: Path, version: str, form: str, custom: bool = False, safe: bool = True) -> State:
    """Three steps, then `save_state`; the state is read from the live objects by gathering it.

    `form` is a state dict type of FSDP, or PER_RANK for accelerate's files per rank.
    """
    state_dict_type = "SHARDED_STATE_DICT" if form == "PER_RANK" else form
    accelerator = accelerator_for(version, state_dict_type)
    model = build()
    if version == "1":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer_of(model))
        if state_dict_type == "FULL_STATE_DICT":  # torch crashes in a full state dict that is offloaded from CPU to CPU
            keep_on_device()
    else:
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, T_max=20))
    if custom:
        accelerator.register_for_checkpointing(Counter())
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(50 + accelerator.process_index)
    for _ in range(3):
        step(model, optimizer, scheduler)
    accelerator.save_state(str(folder), safe_serialization=safe)
    accelerator.wait_for_everyone()
    if form == "PER_RANK":
        write_per_rank(accelerator, model, optimizer, folder)
    expected = gathered(accelerator, model, optimizer)
    return State(expected, draws(), scheduler.scheduler.get_last_lr())


def write_per_rank(accelerator: Any, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Put the files that accelerate writes with `use_dcp=False` in the place of its DCP folders."""
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    plugin = accelerator.state.fsdp_plugin
    if accelerator.is_main_process:
        shutil.rmtree(folder / "pytorch_model_fsdp_0")
        shutil.rmtree(folder / "optimizer_0")
    accelerator.wait_for_everyone()
    save_fsdp_model(plugin, accelerator, model, str(folder), use_dcp=False)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder), use_dcp=False)
    accelerator.wait_for_everyone()


def keep_on_device() -> None:
    """FSDP1's full state dict without the copy to the CPU, which on CPU ranks frees what it copies from and crashes."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    original = FSDP.state_dict_type

    def state_dict_type(module: Any, state_dict_type: Any, *configs: Any, **named: Any) -> Any:
        for config in (*configs, *named.values()):
            config.offload_to_cpu = False
        return original(module, state_dict_type, *configs, **named)

    FSDP.state_dict_type = staticmethod(state_dict_type)


class Counter:
    def __init__(self) -> None:
        self.count = 41

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def gathered(accelerator: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights and optimizer state by name, gathered by torch's own functions."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True)
    found = {name: t.clone() for name, t in get_model_state_dict(model, options=options).items()}
    state = get_optimizer_state_dict(model, optimizer.optimizer, options=options)["state"]
    found |= {f"{name}/{key}": value.clone() for name, values in state.items() for key, value in values.items()}
    return found


def write_dcp(folder: Path, flattened: bool) -> State:
    """FSDP2 and `dcp.save`, nested as torch's tutorials do it or flattened as torchtitan does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    model, optimizer, scheduler = sharded()
    torch.manual_seed(50 + dist.get_rank())
    for _ in range(3):
        step(model, optimizer, scheduler)
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options)
    saved = {**weights, "optimizer": state} if flattened else {"model": weights, "optimizer": state, "step": 3}
    dcp.save(saved, checkpoint_id=folder)
    return State(snapshot(model, optimizer), [], scheduler.get_last_lr())


def sharded(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build().to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
    found = {names[id(p)]: whole(p) for p in model.parameters()}
    for p, values in optimizer.state.items():
        found |= {f"{names[id(p)]}/{key}": whole(value) for key, value in values.items()}
    return found


def resume(
    folder: Path, sharding: str = "fsdp2", with_scheduler: bool = True, path: Path | None = None, fails: bool = False
) -> State | str:
    """A Holdfast job on these ranks (plain on one) that continues what was imported, or `path`, and makes and saves a step of its own.

    With `fails` it gives the error, and whether anything was changed.
    """
    import holdfast
    from holdfast.errors import HoldfastError

    if dist.get_world_size() == 1:
        model: nn.Module = build()
    elif sharding.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        model = build()
        for i, block in enumerate(model.blocks):
            model.blocks[i] = FSDP(block, use_orig_params=sharding == "fsdp1", device_id=torch.device("cpu"))
        model = FSDP(model, use_orig_params=sharding == "fsdp1", device_id=torch.device("cpu"))
    elif sharding == "ddp":
        model = nn.parallel.DistributedDataParallel(build())
    else:
        model = sharded()[0]
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
    extra = {"lr_scheduler": scheduler} if with_scheduler else {}
    checkpointer = holdfast.Checkpointer(folder, model=model, optimizer=optimizer, **extra)
    if fails:
        try:
            checkpointer.resume(path)
        except HoldfastError as error:
            assert not optimizer.state
            assert all(bool((whole(p) == 7).all()) for p in model.parameters())
            return f"{type(error).__name__}: {error}"
        finally:
            checkpointer.close()
        return ""
    begun_at = checkpointer.resume(path)
    drawn = draws()
    state = whole_fsdp1(model, optimizer) if sharding.startswith("fsdp1") else snapshot(model, optimizer)
    state = State(state, drawn, scheduler.get_last_lr(), begun_at)
    step(model, optimizer, scheduler)
    checkpointer.save(begun_at + 1)
    checkpointer.close()
    return state


def whole_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and optimizer state of an FSDP1 model, gathered by torch."""
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    # Not offloaded: see `keep_on_device`.
    configs = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        found = {name: t.clone() for name, t in model.state_dict().items()}
        state = FSDP.optim_state_dict(model, optimizer)["state"]
    return found | {f"{name}/{key}": t.clone() for name, values in state.items() for key, t in values.items()}


def write_native_llama(folder: Path, base: Path) -> dict[str, torch.Tensor]:
    """A Llama under FSDP2, two steps, saved by Holdfast; returns its weights, gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    import holdfast

    model = AutoModelForCausalLM.from_pretrained(base)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for seed in (0, 1):
        ids = torch.randint(3, 300, (2, 8), generator=torch.Generator().manual_seed(seed))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    checkpointer = holdfast.Checkpointer(folder, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    checkpointer.save(2)
    checkpointer.close()
    return {name: whole(p) for name, p in model.named_parameters()}


def write_native(folder: Path, sharding: str = "fsdp2") -> State:
    """`Net` under FSDP2, or FSDP1 without its parameters' own names, three steps, saved by Holdfast."""
    import holdfast

    model, optimizer, scheduler = sharded()
    if sharding == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        model = FSDP(build(), use_orig_params=False, device_id=torch.device("cpu"))
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(70 + dist.get_rank())
    for _ in range(3):
        step(model, optimizer, scheduler)
    checkpointer = holdfast.Checkpointer(folder, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    checkpointer.save(3)
    checkpointer.close()
    drawn = draws()
    state = whole_fsdp1(model, optimizer) if sharding == "fsdp1" else snapshot(model, optimizer)
    return State(state, drawn, scheduler.get_last_lr())


def load_dcp(folder: Path) -> dict[str, Any]:
    """Read a DCP folder into a sharded model and its optimizer by torch's own functions."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    model, optimizer, _ = sharded()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    return snapshot(model, optimizer)


def load_accelerate(folder: Path, version: str) -> State:
    """Read a folder with `accelerator.load_state` alone."""
    accelerator = accelerator_for(version, "SHARDED_STATE_DICT")
    model = build()
    if version == "1":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer_of(model))
    else:
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, T_max=20))
    if version == "1":  # under FSDP1 accelerate 1.15 reads only what the optimizer has already, so nothing into a fresh one
        step(model, optimizer, scheduler)
    accelerator.load_state(str(folder))
    drawn = draws()
    state = gathered(accelerator, model, optimizer) if version else snapshot(model, optimizer.optimizer)
    return State(state, drawn, scheduler.scheduler.get_last_lr())


def write_two_models(folder: Path) -> list[dict[str, Any]]:
    """accelerate with two models and an optimizer for each, as GANs and distillation have them."""
    accelerator = accelerator_for("", "")
    models = [build(), nn.Linear(3, 2)]
    optimizers = [optimizer_of(model) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    for model in prepared[:2]:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    for optimizer in prepared[2:]:
        optimizer.step()
    accelerator.save_state(str(folder), safe_serialization=False)
    return [snapshot(model, optimizer.optimizer) for model, optimizer in zip(prepared[:2], prepared[2:], strict=True)]


def load_two_models(folder: Path) -> list[dict[str, Any]]:
    accelerator = accelerator_for("", "")
    models = [build(), nn.Linear(3, 2)]
    prepared = accelerator.prepare(*models, *[optimizer_of(model) for model in models])
    accelerator.load_state(str(folder))
    return [snapshot(model, optimizer.optimizer) for model, optimizer in zip(prepared[:2], prepared[2:], strict=True)]


def write_matrix(folder: Path, form: str) -> None:
    """A matrix of 8 MiB, as a DCP folder or in a safetensors file."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    model = matrix()
    if form == "dcp":
        dcp.save({"model": model.state_dict(), "step": 1}, checkpoint_id=folder)
    else:
        weight = model.weight.full_tensor()  # type: ignore[union-attr,operator]
        if dist.get_rank() == 0:
            folder.mkdir()
            save_file({"weight": weight}, folder / "model.safetensors")


def matrix() -> nn.Linear:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Linear(1024, 2048, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def read_matrix(folder: Path) -> tuple[int, int, bool]:
    """Resume from it: bytes read, bytes held, and whether they are those that were written."""
    import holdfast
    from holdfast.storage import LocalFolder

    model = matrix()
    local: torch.Tensor = model.weight.to_local()  # type: ignore[operator]
    expected = local.clone()
    with torch.no_grad():
        local.zero_()
    read = 0
    original = LocalFolder.read_into

    def counted(storage: LocalFolder, path: str, offset: int, target: memoryview) -> None:
        nonlocal read
        read += len(target)
        original(storage, path, offset, target)

    with holdfast.Checkpointer(folder.parent / "out", model=model) as checkpointer:
        LocalFolder.read_into = counted  # type: ignore[method-assign]
        try:
            checkpointer.resume(folder)
        finally:
            LocalFolder.read_into = original  # type: ignore[method-assign]
    return read, local.nbytes, torch.equal(local, expected)


def fsdp_trainer(llama_folder: Path, output: Path, version: str, form: str) -> Any:
    """The transformers Trainer under FSDP on CPU ranks, configured as `accelerate launch` or its own arguments do it."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from holdfast.integrations import cpu_ranks

    os.environ.update(ACCELERATE_USE_CPU="true", FSDP_STATE_DICT_TYPE=form)
    cpu_ranks.enable()
    config = {
        "version": int(version), "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": form,
        "use_orig_params": True,
    }  # fmt: skip
    arguments = TrainingArguments(
        str(output), max_steps=2, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True,
        learning_rate=1e-2, weight_decay=0.1, fsdp="full_shard auto_wrap", fsdp_config=config,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(3 + i, 11 + i), "labels": torch.arange(3 + i, 11 + i)} for i in range(9)]
    return Trainer(AutoModelForCausalLM.from_pretrained(llama_folder), arguments, train_dataset=rows)


def write_trainer(llama_folder: Path, output: Path, version: str, form: str) -> State:
    """Two steps; the Trainer saves by itself."""
    if version == "1" and form == "FULL_STATE_DICT":
        keep_on_device()
    trainer = fsdp_trainer(llama_folder, output, version, form)
    trainer.train()
    assert trainer.is_fsdp_enabled
    state = gathered(trainer.accelerator, trainer.model_wrapped, trainer.optimizer)
    return State(state, draws(), trainer.lr_scheduler.get_last_lr())


def resume_trainer(llama_folder: Path, folder: Path, sharding: str) -> tuple[State, int]:
    """The same model and optimizer without the Trainer, under Holdfast; also the step that the Trainer's own state speaks of."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, Trainer, get_linear_schedule_with_warmup

    import holdfast

    model: nn.Module = AutoModelForCausalLM.from_pretrained(llama_folder)
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    if sharding == "fsdp1":
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = FSDP(layer, use_orig_params=True, device_id=torch.device("cpu"))
        model = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    named = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
    with torch.no_grad():
        for _, p in named:
            p.fill_(7)
    groups = [{"params": [p for n, p in named if (n in decayed) is yes]} for yes in (True, False)]
    optimizer = torch.optim.AdamW(groups)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, 2)
    told: dict[str, Any] = {}
    extra = {"trainer_state": told}
    with holdfast.Checkpointer(folder.parent / "own", model=model, optimizer=optimizer, lr_scheduler=scheduler, extra=extra) as own:
        begun_at = own.resume(folder)
    drawn = draws()
    state = whole_fsdp1(model, optimizer) if sharding == "fsdp1" else snapshot(model, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    return State(state, drawn, scheduler.get_last_lr(), begun_at), told["global_step"]
