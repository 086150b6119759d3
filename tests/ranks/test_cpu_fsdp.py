"""Accelerate with an FSDP plugin on CPU ranks: parameters are really sharded, and training does what one process does."""

from __future__ import annotations

import logging
import os

import accelerate
import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin

from holdfast.integrations import cpu_ranks
from holdfast.testing import RankPool

STEPS = 3
FEATURES = 7  # uneven over 2 and 3 ranks


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(FEATURES, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(step))


def accelerator_for(fsdp: dict[str, str], precision: str):
    """As a launched rank makes it: FSDP comes by the environment."""
    os.environ.update({"ACCELERATE_USE_FSDP": "true", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"})
    os.environ.update({"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"} | fsdp)
    cpu_ranks.enable()
    return Accelerator(mixed_precision=precision)


def train(fsdp: dict[str, str], precision: str) -> dict[str, object]:
    accelerator = accelerator_for(fsdp, precision)
    model = make_model()
    if fsdp["FSDP_VERSION"] == "1":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(STEPS):
        rows = batch(step).chunk(accelerator.num_processes)[accelerator.process_index]
        with accelerator.accumulate(model):
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    parameters = dict(model.named_parameters())
    return {
        "type": str(accelerator.distributed_type),
        "classes": {type(module).__name__ for module in model.modules()},
        "parameters": {type(parameter).__name__ for parameter in parameters.values()},
        "elements": sum(getattr(p, "_local_tensor", p).numel() for p in parameters.values()),
        "losses": losses,
    }


def train_alone() -> list[float]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


FSDP2 = {"FSDP_VERSION": "2"}
FSDP1 = {"FSDP_VERSION": "1", "FSDP_USE_ORIG_PARAMS": "false"}
OFFLOAD = {"FSDP_OFFLOAD_PARAMS": "true"}
CHECKPOINTING = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
EFFICIENT = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_SYNC_MODULE_STATES": "true"}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "fsdp",
    [FSDP2, FSDP2 | OFFLOAD | CHECKPOINTING | EFFICIENT, FSDP1, FSDP1 | OFFLOAD | CHECKPOINTING | EFFICIENT],
    ids=["fsdp2", "fsdp2-all", "fsdp1", "fsdp1-all"],
)
def test_ranks_shard_and_train_as_one_process_does(pool: RankPool, fsdp: dict[str, str], world_size: int) -> None:
    reports = pool.run(train, world_size, fsdp, "no")
    total = sum(parameter.numel() for parameter in make_model().parameters())
    padding = 3 * world_size if fsdp["FSDP_VERSION"] == "1" else 0  # FSDP1 pads each of its three units
    assert {report["type"] for report in reports} == {"DistributedType.FSDP"}
    assert total <= sum(report["elements"] for report in reports) <= total + padding
    assert all(report["elements"] < total for report in reports)
    if fsdp["FSDP_VERSION"] == "2":
        assert reports[0]["parameters"] == {"DTensor"}
    else:
        assert "FullyShardedDataParallel" in reports[0]["classes"]
    checkpointed = any(name.endswith("CheckpointWrapper") for name in reports[0]["classes"])
    assert checkpointed == ("FSDP_ACTIVATION_CHECKPOINTING" in fsdp)
    torch.testing.assert_close(reports[0]["losses"], train_alone(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fsdp", [FSDP2 | OFFLOAD, FSDP1 | OFFLOAD], ids=["fsdp2", "fsdp1"])
def test_mixed_precision_computes_in_bf16_and_keeps_fp32(pool: RankPool, fsdp: dict[str, str]) -> None:
    def relative(losses: list[float]) -> float:
        return max(abs(a - b) / b for a, b in zip(losses, train_alone(), strict=True))

    losses = pool.run(train, 2, fsdp, "bf16")[0]["losses"]
    assert 1e-5 < relative(losses) < 0.05


def silently_ddp() -> str:
    os.environ.update({"ACCELERATE_USE_CPU": "true"})
    return str(Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)).distributed_type)


def test_without_enable_accelerate_still_ignores_the_plugin(pool: RankPool) -> None:
    """When this fails, Accelerate has learned it, and the module can go."""
    assert pool.run(silently_ddp, 2) == ["DistributedType.MULTI_CPU"] * 2


def lines_of_offload(times: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    for _ in range(times):
        cpu_ranks.enable()
    FullyShardedDataParallelPlugin(fsdp_version=1, cpu_offload=True, cpu_ram_efficient_loading=True)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"
    return lines


def test_replacements_are_said_in_one_line_of_rank_0(pool: RankPool) -> None:
    first, second = pool.run(lines_of_offload, 2, 2)
    assert len(first) == 1
    assert "offloading is done" in first[0]
    assert "sync_module_states" in first[0]
    assert second == []


def lines_of_version(version: str) -> list[str]:
    accelerate.__version__ = version
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    cpu_ranks.enable()
    return lines


def test_a_release_never_tried_is_named(pool: RankPool) -> None:
    [lines] = pool.run(lines_of_version, 1, "9.1.0")
    assert len(lines) == 1
    assert "9.1.0" in lines[0]
    assert pool.run(lines_of_version, 1, "1.15.3") == [[]]


def ranks_of_torchrun() -> tuple[int, str]:
    cpu_ranks.join_without_accelerator()
    accelerator = Accelerator()
    return accelerator.num_processes, str(accelerator.distributed_type)


def test_plain_torchrun_ranks_are_one_run(pool: RankPool) -> None:
    assert pool.run(ranks_of_torchrun, 2) == [(2, "DistributedType.MULTI_CPU")] * 2
    assert pool.run(ranks_of_torchrun, 1) == [(1, "DistributedType.NO")]


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [(True, None, True), (False, None, False), (False, "1", True), (False, "0", False), (False, "true", True)],
)
def test_requested(monkeypatch: pytest.MonkeyPatch, flag: bool, value: str | None, expected: bool) -> None:
    monkeypatch.delenv(cpu_ranks.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(cpu_ranks.VARIABLE, value)
    assert cpu_ranks.requested(flag) is expected
