"""A small training job that uses everything a checkpoint has to carry, under every sharding. Runs on the ranks of a pool."""

from __future__ import annotations

import os
import random
import re
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import holdfast
from holdfast.engine.deadlines import Deadlines
from holdfast.errors import SaveFailed
from holdfast.testing.faults import Fault, FaultyFolder

SAMPLES = 23
"""No multiple of any world size here: batches straddle the ends of epochs."""


@dataclass
class Job:
    """What to run. `sharding`: none, ddp, fsdp2, offload, mixed, hsdp, flat (a flattened cp x shard mesh), or a key of FSDP1."""

    folder: Path
    sharding: str = "fsdp2"
    optimizer: str = "adamw"
    stop: int = 8
    save_at: tuple[int, ...] = (4,)
    overlap: bool = False
    resume: bool = True
    compiled: bool = False
    keep_last: int | None = None
    nodes: tuple[str, ...] = ()
    """By rank, the name of the folder below `folder` that it sees, as on machines with disks of their own."""

    settle: tuple[int, ...] = ()
    """Saves that are waited for before the training goes on."""

    kill: tuple[int, int] | None = None
    """(rank, step): that rank kills itself before that step; rank -1 stands for all."""

    faults: dict[int, Fault] = field(default_factory=dict)
    """By rank: what happens on its storage."""

    deadlines: Deadlines = field(default_factory=lambda: Deadlines(handshake=20, agreement=20, capture=20, commit=10, goodbye=10))


@dataclass
class Result:
    """`losses` of the steps made here, this rank's `samples`; the whole state after the load and at the end, by name."""

    begun_at: int
    losses: dict[int, float]
    samples: list[int]
    loaded: dict[str, Any]
    final: dict[str, Any]
    collectives: int
    """c10d calls of this rank in resume, save, wait and close together."""

    saves: list[Any]
    failures: list[str] = field(default_factory=list)


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"index": torch.tensor(index), "ids": torch.randint(0, 7, (6,), generator=generator)}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Net(nn.Module):
    """Uneven shapes (7 rows), fewer rows than ranks (1), a tied weight, a frozen one, buffers of both kinds."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.module = nn.Sequential(Block(width), Block(width))  # a user's own attribute of that name
        self.seen = nn.BatchNorm1d(width, affine=False)
        self.scale = nn.Linear(width, 1)
        self.frozen = nn.Parameter(torch.linspace(0, 1, width), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)  # FSDP2 reduces no empty gradient
        self.single = nn.Parameter(torch.tensor([0.5]))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(float(width)), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.frozen + 0.01 * self.table
        x = self.seen(self.module(x).flatten(0, 1)).view(*ids.shape, -1)
        return self.head(x) * torch.sigmoid(self.scale(x)) * self.single


FSDP1: dict[str, dict[str, Any]] = {
    "fsdp1": {"use_orig_params": True},
    "fsdp1-flat": {"use_orig_params": False},
    "fsdp1-frozen": {"use_orig_params": False, "frozen": True},
    "fsdp1-grad-op": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "checkpointed": True},
    "fsdp1-mixed": {
        "use_orig_params": False,
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True),
        "checkpointed": True,
    },
    "fsdp1-hybrid": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "fsdp1-hybrid-flat": {"use_orig_params": False, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "fsdp1-whole": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
    "fsdp1-whole-flat": {"use_orig_params": False, "sharding_strategy": ShardingStrategy.NO_SHARD},
}


def wrap(model: Net, checkpointed: bool = False, frozen: bool = False, **options: Any) -> nn.Module:
    """FSDP version 1: a unit for each block and one for the rest. Without original parameters, a unit is frozen or is not."""
    model.module[0].requires_grad_(not frozen)
    world_size = dist.get_world_size()
    options["device_id"] = torch.device("cpu")
    if options.get("sharding_strategy") == ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    if not options["use_orig_params"]:
        options["ignored_states"] = [model.frozen, model.empty]
    for i, block in enumerate(model.module):
        inner = checkpoint_wrapper(block) if checkpointed else block
        model.module[i] = FullyShardedDataParallel(inner, **options)
    return FullyShardedDataParallel(model, **options)


def build(sharding: str, width: int = 12) -> nn.Module:
    torch.manual_seed(0)
    model = Net(width)
    world_size = dist.get_world_size()
    if sharding == "none":
        return model
    if sharding == "ddp":
        # DDP puts its buckets into another order after its first backward, a resumed run one step earlier than the run it resumes. Of
        # two gradients the sum is the same in any order; of more it is where the buckets stay as they are.
        return DistributedDataParallel(model, find_unused_parameters=world_size > 2)
    if sharding in FSDP1:
        return wrap(model, **FSDP1[sharding])
    options: dict[str, Any] = {}
    if sharding == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    elif sharding == "flat":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp_shard", "cp"))
        options["mesh"] = mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
    else:
        options["mesh"] = init_device_mesh("cpu", (world_size,))
    if sharding == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if sharding == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.module:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = {clean(n): p for n, p in model.named_parameters() if p.requires_grad}
    decayed = [p for n, p in trained.items() if n.startswith("module.")]  # by module: a flat parameter has one group
    rest = [p for n, p in trained.items() if not n.startswith("module.")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "note": ("the rest", None)}]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=1e-2)
    if name == "prodigy":
        from holdfast.training.prodigy import Prodigy

        return Prodigy(groups, lr=1.0, d0=1e-3, use_bias_correction=True)
    raise ValueError(name)


def whole(value: torch.Tensor) -> torch.Tensor:
    """The full value of a sharded tensor. A collective: for comparing only, never inside a save."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state by clean name, as an independent reading of the live objects."""
    state: dict[str, Any] = {}
    if isinstance(model, FullyShardedDataParallel):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torchs = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, *torchs)
            persistent = model.state_dict()
            optimized = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        tied = {"head.weight"}
        buffers = {clean(n) for n, _ in model.named_buffers()}
        state |= {n: whole(v) for n, v in persistent.items() if n not in tied | buffers}
        for name, values in optimized.items():
            state |= {f"{name}/{k}": whole(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    else:
        names = {id(p): clean(name) for name, p in model.named_parameters()}
        state |= {clean(name): whole(p) for name, p in model.named_parameters()}
        for p, values in optimizer.state.items():
            state |= {f"{names[id(p)]}/{k}": whole(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    for i, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                state[f"group {i}/{key}"] = value
    return state


def clean(name: str) -> str:
    """A parameter's name in `Net`, whatever wraps it."""
    for wrapper in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.") if re.match(r"module\.(module\.|[a-z])", name) else name


def collectives() -> int:
    """How many collectives this rank has begun so far, in all process groups and all threads."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


class Counted:
    """Adds the collectives begun inside to `total`."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        before = collectives()
        try:
            return call(*args)
        finally:
            self.total += collectives() - before


def train(job: Job) -> Result:
    rank = dist.get_rank()
    model = build(job.sharding)
    called = torch.compile(model, backend="eager") if job.compiled else model
    optimizer = make_optimizer(job.optimizer, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    loader = holdfast.DataLoader(Numbers(), batch_size=2, seed=3)
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)
    counters = {"samples": 0, ("odd", 1): float("inf")}
    counted = Counted()
    root = job.folder / job.nodes[rank] if job.nodes else job.folder
    root.mkdir(parents=True, exist_ok=True)
    folder = FaultyFolder(root, job.faults.get(rank)) if job.faults else root
    checkpointer = holdfast.Checkpointer(
        folder, model=called, optimizer=optimizer, lr_scheduler=scheduler, dataloader=loader,
        extra={"counters": counters}, overlap=job.overlap, keep_last=job.keep_last, deadlines=job.deadlines,
    )  # fmt: skip
    step = counted(checkpointer.resume) if job.resume else 0
    result = Result(step, {}, [], snapshot(model, optimizer) if step else {}, {}, 0, [])
    while step < job.stop:
        for batch in loader:
            if job.kill in ((rank, step), (-1, step)):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = one_step(called, optimizer, scheduler, batch["ids"])
            step += 1
            counters["samples"] += len(batch["index"])
            result.losses[step] = loss
            result.samples += batch["index"].tolist()
            if step in job.save_at:
                counted(checkpointer.save, step)
            if step in job.settle:
                counted(checkpointer.wait)
            if step == job.stop:
                break
    while True:  # a save that failed is reported once, and the run goes on
        try:
            counted(checkpointer.wait)
            break
        except SaveFailed as error:
            result.failures.append(str(error))
    result.final = snapshot(model, optimizer) | {"counters": dict(counters), "lr": scheduler.get_last_lr()}
    result.saves = [(s.step, s.state, s.blocked_s) for s in checkpointer.saves]
    counted(checkpointer.close)
    result.collectives = counted.total
    return result


def one_step(model: nn.Module, optimizer: Any, scheduler: Any, ids: torch.Tensor) -> float:
    noise = 1 + 0.1 * torch.rand(ids.shape) + 0.01 * random.random() + 0.01 * float(np.random.rand())
    logits = model(ids).float()
    loss = (nn.functional.cross_entropy(logits.transpose(1, 2), ids.roll(-1, 1), reduction="none") * noise).mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names whose values are not equal to the bit."""
    names = sorted(a.keys() ^ b.keys(), key=str)
    for name in a.keys() & b.keys():
        x, y = a[name], b[name]
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            same = x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
        else:
            same = type(x) is type(y) and x == y
        if not same:
            names.append(name)
    return names


def survive(job: Job) -> Result | str:
    """`train` on a rank whose peers may die: its result, or the error that their death gives it."""
    job.folder.mkdir(exist_ok=True)
    try:
        return train(job)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
