"""What a save keeps of the one before: found again where nothing was replaced, and never a stale tensor where something was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from holdfast.engine import collect as collecting
from holdfast.engine.collect import Collected, Registered, collect
from holdfast.engine.plan import SavePlan, make_plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def registered_with(model: nn.Module, optimizer: torch.optim.Optimizer, **stateful: object) -> Registered:
    return Registered({"": model}, {"": optimizer}, dict(stateful), 0, 1)


@pytest.fixture
def state() -> Registered:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return registered_with(model, optimizer, extra={"count": 1})


def values(collected: Collected) -> dict[str, torch.Tensor]:
    return {name: held.local.detach().clone() for name, held in collected.tensors.items()}


def agree(registered: Registered) -> None:
    """What the binding gives is what a rank that knows nothing finds: the same names, places, bytes and small state."""
    bound, afresh = collect(registered), collect(Registered(registered.models, registered.optimizers, registered.stateful, 0, 1))
    assert {n: h.spec for n, h in bound.tensors.items()} == {n: h.spec for n, h in afresh.tensors.items()}
    there, here = values(afresh), values(bound)
    assert all(torch.equal(there[n], here[n]) and there[n].dtype == here[n].dtype for n in there)
    for field in ("elsewhere", "aliases", "volatile", "small", "based", "origins"):
        assert getattr(bound, field) == getattr(afresh, field), field


def searches(monkeypatch: pytest.MonkeyPatch, registered: Registered) -> int:
    """How often the next collect walks the whole state."""
    found: list[None] = []
    walk = collecting._find
    with monkeypatch.context() as patch:
        patch.setattr(collecting, "_find", lambda r: (found.append(None), walk(r))[1])
        collect(registered)
    return len(found)


def plan_of(registered: Registered, last: SavePlan | None) -> SavePlan:
    return make_plan(collect(registered), registered.bases, 0, 1, 100, last)


def test_steps_keep_the_binding_and_their_values_are_seen(state: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    before = values(collect(state))
    plan = plan_of(state, None)
    for _ in range(3):
        step(state.models[""], state.optimizers[""])
        state.optimizers[""].param_groups[0]["lr"] *= 0.5
        state.stateful["extra"]["count"] += 1
        assert searches(monkeypatch, state) == 0
        agree(state)
        assert plan_of(state, plan) is plan
    after = values(collect(state))
    assert not torch.equal(before["model.scale"], after["model.scale"])
    assert not torch.equal(before["optimizer.model.scale.exp_avg"], after["optimizer.model.scale.exp_avg"])
    assert after["optimizer.model.scale.step"].item() == 4


def replace_parameter(model: Net, _: torch.optim.Optimizer) -> None:
    model.layers[1].bias = nn.Parameter(torch.full((4,), 7.0))


def assign(model: Net, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.scale.data = torch.full((4,), 3.0)


def transpose(model: Net, _: torch.optim.Optimizer) -> None:
    model.layers[0].weight.data = model.layers[0].weight.data.t()


def widen(model: Net, _: torch.optim.Optimizer) -> None:
    model.double()


def replace_buffer(model: Net, _: torch.optim.Optimizer) -> None:
    model.layers[1].running_mean = torch.full((4,), 5.0)


def unpersist(model: Net, _: torch.optim.Optimizer) -> None:
    model.layers[1].register_buffer("running_var", model.layers[1].running_var, persistent=False)


def add_buffer(model: Net, _: torch.optim.Optimizer) -> None:
    model.register_buffer("seen", torch.arange(3))


def add_module(model: Net, _: torch.optim.Optimizer) -> None:
    model.layers.append(nn.Linear(4, 2).requires_grad_(False))


def remove_module(model: Net, optimizer: torch.optim.Optimizer) -> None:
    del model.layers[1]
    optimizer.state.clear()
    optimizer.param_groups[0]["params"] = list(model.parameters())


def tie(model: Net, _: torch.optim.Optimizer) -> None:
    model.layers[0].bias = model.scale


def rename(model: Net, _: torch.optim.Optimizer) -> None:
    model._parameters["other"] = model._parameters.pop("scale")


def replace_state(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.scale]["exp_avg"] = torch.full((4,), 9.0)


def swap_states(model: Net, optimizer: torch.optim.Optimizer) -> None:
    mine, other = optimizer.state[model.scale], optimizer.state[model.layers[0].bias]
    mine["exp_avg"], other["exp_avg"] = other["exp_avg"], mine["exp_avg"]


def new_state(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.scale]["extra"] = torch.ones(4)


def load_optimizer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    saved = optimizer.state_dict()
    saved["state"] = {k: {n: v + 1 for n, v in s.items()} for k, s in saved["state"].items()}
    optimizer.load_state_dict(saved)


def load_model(model: Net, _: torch.optim.Optimizer) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)


def regroup(model: Net, optimizer: torch.optim.Optimizer) -> None:
    last = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [last], "lr": 0.5})


def clear_state(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


CHANGES = [
    assign, transpose, widen, replace_buffer, unpersist, add_buffer, add_module, remove_module, rename, replace_state,
    swap_states, new_state, load_optimizer, regroup, clear_state,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_whatever_is_replaced_is_found(
    change: Callable[[Net, torch.optim.Optimizer], None], state: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(state)
    assert searches(monkeypatch, state) == 0
    change(state.models[""], state.optimizers[""])
    agree(state)
    assert searches(monkeypatch, state) == 0, "and the new ones are bound in turn"


@pytest.mark.parametrize("change", [replace_parameter, tie, load_model], ids=lambda c: c.__name__)
def test_a_parameter_that_is_replaced_below_its_optimizer_is_found(change: Callable[..., None], state: Registered) -> None:
    model = state.models[""]
    state.optimizers.clear()
    collect(state)
    change(model, None)
    agree(state)


def test_a_number_in_the_state_that_becomes_a_tensor_is_found(state: Registered) -> None:
    model, optimizer = state.models[""], state.optimizers[""]
    own = optimizer.state[model.scale]
    own["count"] = 1
    collect(state)
    own["count"] = 2
    agree(state)
    assert collect(state).small["optimizer"]["values"]["model.scale"] == {"count": 2}
    own["count"] = torch.tensor(3.0)
    agree(state)
    assert "optimizer.model.scale.count" in collect(state).tensors
    own["count"] = 4
    agree(state)
    assert "optimizer.model.scale.count" not in collect(state).tensors


def test_a_tensor_in_the_small_state_makes_a_new_plan_and_is_read_anew(state: Registered) -> None:
    plan = plan_of(state, None)
    state.stateful["extra"]["ema"] = torch.zeros(2)
    other = plan_of(state, plan)
    assert other is not plan and "extra.ema" in other.entries
    state.stateful["extra"]["ema"] = torch.ones(2)
    agree(state)
    assert plan_of(state, other) is other
    state.stateful["extra"]["ema"] = torch.ones(3)
    agree(state)
    assert plan_of(state, other) is not other


def test_what_is_replaced_is_not_kept_alive(state: Registered) -> None:
    model, optimizer = state.models[""], state.optimizers[""]
    collect(state)
    binding = state.binding
    assert binding is not None and binding.found is not None
    gone = weakref.ref(optimizer.state[model.scale]["exp_avg"])
    optimizer.state[model.scale]["exp_avg"] = torch.ones(4)
    gc.collect()
    assert gone() is None and binding.found is None, "neither the tensor nor its memory"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_shard_of_fsdp2_that_is_replaced_is_found(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = Net()
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    state = registered_with(model, optimizer)
    collect(state)
    step(model, optimizer)
    assert searches(monkeypatch, state) == 0
    agree(state)
    with torch.no_grad():
        model(torch.randn(8, 4))  # leaves the root's whole parameters in its place
    agree(state)
    model.reshard()
    agree(state)
    assert searches(monkeypatch, state) == 0
    local = model.scale._local_tensor
    model.scale._local_tensor = torch.full_like(local, 8.0)
    agree(state)
    assert torch.equal(collect(state).tensors["model.scale"].local, torch.full((4,), 8.0))
    model.scale._local_tensor.data = torch.full((4,), 6.0)
    agree(state)
    group = model._get_fsdp_state()._fsdp_param_groups[0]
    param = next(p for p in group.fsdp_params if p._module_info.param_name == "scale")
    param.sharded_param = nn.Parameter(param.to_sharded_dtensor(torch.full((4,), 2.0)))
    optimizer.param_groups[0]["params"] = [param.sharded_param if p is model.scale else p for p in optimizer.param_groups[0]["params"]]
    optimizer.state[param.sharded_param] = optimizer.state.pop(model.scale)
    agree(state)
    assert torch.equal(collect(state).tensors["model.scale"].local, torch.full((4,), 2.0))


def test_a_shard_that_fsdp2_takes_from_the_module_only_later_is_found(one_rank: None) -> None:
    """Assigned before the first forward, which is when FSDP2 looks at what the modules show."""
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    state = registered_with(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state.optimizers.clear()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    collect(state)
    model(torch.randn(8, 4)).sum().backward()
    with torch.no_grad():
        model.scale.fill_(5.0)
    agree(state)
    assert torch.equal(collect(state).tensors["model.scale"].local, torch.full((4,), 5.0))


@pytest.mark.parametrize("originals", [True, False])
def test_a_shard_of_fsdp1_that_is_replaced_is_found(one_rank: None, originals: bool) -> None:
    model = FullyShardedDataParallel(Net(), use_orig_params=originals, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    state = registered_with(model, optimizer)
    collect(state)
    step(model, optimizer)
    agree(state)
    flat = model._handle.flat_param
    moved = torch.full_like(flat._local_shard, 4.0) if hasattr(flat, "_local_shard") else torch.full_like(flat, 4.0)
    flat.data = moved
    if hasattr(flat, "_local_shard"):
        flat._local_shard = moved
    agree(state)
    assert torch.equal(collect(state).tensors["model.scale"].local, torch.full((4,), 4.0))
