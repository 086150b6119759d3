"""A load fills the optimizer state that is there, after all is found and not before; what does not fit is made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import holdfast
from holdfast.engine import restore
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.restore_optimizer import _clear_padding
from holdfast.storage import LocalFolder

State = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def vectors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]


def copies(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [local(v).clone() for v in vectors(optimizer)]


def equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(local(a), local(b)) for a, b in zip(ones, others, strict=True))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain() -> nn.Module:
    return Net()


def channels_last() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (5, 1, 1)), nn.Conv2d(5, 3, 1), nn.Flatten(1)).to(memory_format=torch.channels_last)


def fsdp2() -> nn.Module:
    model = Net()
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    return model


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))


def fsdp1_flat() -> nn.Module:
    return FullyShardedDataParallel(Net(), use_orig_params=False, device_id=torch.device("cpu"))


@pytest.mark.parametrize("make", [plain, channels_last, fsdp2, fsdp1, fsdp1_flat], ids=lambda m: m.__name__)
def test_a_load_fills_what_is_there(one_rank: None, tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        saved = copies(optimizer)
        step(model, optimizer)
        later, there = copies(optimizer), vectors(optimizer)
        plan = restore.match(Checkpoint(LocalFolder(tmp_path), "checkpoint-1"), checkpointer._registered)
        assert equal(there, later) and not equal(there, saved), "nothing is touched before the vote"
        restore.read(plan)
        assert equal(there, saved)
        step(model, optimizer)
        assert checkpointer.resume() == 1
        assert equal(vectors(optimizer), saved)
        assert all(a is b for a, b in zip(vectors(optimizer), there, strict=True))
        step(model, optimizer)


def shared(state: State, other: State) -> None:
    other["exp_avg"] = state["exp_avg"]


def of_the_parameter(state: State, other: State) -> None:
    state["exp_avg"] = next(iter(MODEL)).data


def overlapping(state: State, other: State) -> None:
    state["exp_avg"] = torch.zeros(1).expand(3)


def strided(state: State, other: State) -> None:
    state["exp_avg"] = torch.zeros(6)[::2]


def of_another_dtype(state: State, other: State) -> None:
    state["exp_avg"] = state["exp_avg"].double()


def of_another_shape(state: State, other: State) -> None:
    state["exp_avg"] = torch.zeros(4)


def wanting_gradients(state: State, other: State) -> None:
    state["exp_avg"].requires_grad_()


def gone(state: State, other: State) -> None:
    state.clear()


MODEL: list[nn.Parameter] = []


@pytest.mark.parametrize(
    "change",
    [shared, of_the_parameter, overlapping, strided, of_another_dtype, of_another_shape, wanting_gradients, gone],
    ids=lambda c: c.__name__,
)
def test_what_does_not_fit_is_made_anew(tmp_path: Path, change: Callable[[State, State], None]) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    one, two = optimizer.state[model.first.bias], optimizer.state[model.second.bias]
    saved = copies(optimizer), [p.detach().clone() for p in model.parameters()]
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        step(model, optimizer)
        MODEL[:] = [model.first.bias]
        change(one, two)
        assert checkpointer.resume() == 1
    assert equal(vectors(optimizer), saved[0])
    assert equal(list(model.parameters()), saved[1])
    memories = [v.untyped_storage().data_ptr() for v in vectors(optimizer)] + [p.data_ptr() for p in model.parameters()]
    assert len(set(memories)) == len(memories)
    assert all(v.is_contiguous() and not v.requires_grad for v in vectors(optimizer))


def test_what_lies_between_the_pieces_of_a_flat_unit_becomes_zero() -> None:
    filled = [torch.ones(9), torch.full((9,), 2.0)]
    _clear_padding(filled, [slice(5, 7), slice(1, 3)])
    assert [v.tolist() for v in filled] == [[0, 1, 1, 0, 0, 1, 1, 0, 0], [0, 2, 2, 0, 0, 2, 2, 0, 0]]
    _clear_padding(filled, [])
    assert not any(v.any() for v in filled), "a shard of nothing but padding"
