"""Prodigy: bit for bit the library's on one process, and one `d` for the whole model however it is cut."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import prodigyopt
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from holdfast.training.prodigy import Prodigy

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

STEPS = 20
TOLERANCE = 1e-5  # of `d`, relative, to one process: what the module promises


class Uneven(nn.Module):
    """First dimensions 7, 5 and 1: not divisible by 2 or 3, and fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.second = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(1, 5))
        self.zero = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale + self.zero


def make_model(dtype: torch.dtype = torch.float32) -> Uneven:
    torch.manual_seed(0)
    return Uneven().to(dtype)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=generator).to(dtype)
    return (model(x) - torch.stack([x.sum(1), x[:, 0], x[:, 1] ** 2, x[:, 2], x[:, 3]], 1)).square().mean()


def groups_of(model: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": weights, **settings}, {"params": rest, "weight_decay": 0.0}]


def numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


# ---------------------------------------------------------------------------------------------------------- one process

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decoupled_decay": {"weight_decay": 0.1},
    "coupled_decay": {"weight_decay": 0.1, "decouple": False},
    "bias_correction": {"use_bias_correction": True, "safeguard_warmup": True},
    "beta3_and_growth": {"beta3": 0.9, "growth_rate": 1.5, "d_coef": 2.0},
    "no_momentum": {"betas": (0.0, 0.99), "eps": 1e-6},
    "sliced": {"slice_p": 3, "d0": 1e-5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_one_process_is_the_library_bit_for_bit(settings: dict[str, Any], dtype: torch.dtype) -> None:
    models = [make_model(dtype), make_model(dtype)]
    decay = settings.get("weight_decay", 0.0)
    optimizers = [
        kind(groups_of(model, weight_decay=decay), **settings)
        for kind, model in zip((prodigyopt.Prodigy, Prodigy), models, strict=True)
    ]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step, dtype).backward()
            optimizer.step()
        assert numbers(optimizers[0]) == numbers(optimizers[1]), step
        for theirs, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(theirs, ours), step
            expected, got = optimizers[0].state[theirs], optimizers[1].state[ours]
            assert expected.keys() == got.keys()
            for name in expected.keys() - {"step"}:
                flat = got[name].flatten()  # the library's are flat, and `p0` one number where all are 0
                assert torch.equal(expected[name].flatten().expand_as(flat), flat), (step, name)
    if dtype == torch.float32:  # bf16 at a `d` of 1e-6 may round every move away, and then there is nothing to learn
        assert optimizers[0].param_groups[0]["d"] > optimizers[0].param_groups[0]["d0"]


def test_a_schedule_a_frozen_group_and_hooks() -> None:
    """A warm-up whose first rate is 0, a group that is held still, and step hooks: as the library does."""
    models = [make_model(), make_model()]
    seen: list[str] = []
    runs = []
    for kind, model in zip((prodigyopt.Prodigy, Prodigy), models, strict=True):
        optimizer = kind(groups_of(model), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: min(1.0, step / 4), lambda step: 0.0])
        runs.append((model, optimizer, schedule))
    runs[1][1].register_step_pre_hook(lambda *_: seen.append("before"))
    runs[1][1].register_step_post_hook(lambda *_: seen.append("after"))
    for step in range(STEPS):
        for model, optimizer, schedule in runs:

            def closure(model: nn.Module = model, optimizer: Any = optimizer, step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
            schedule.step()
        assert numbers(runs[0][1]) == numbers(runs[1][1]), step
    for theirs, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(theirs, ours)
    assert seen == ["before", "after"] * STEPS


def test_continues_from_the_state_of_the_library() -> None:
    """`s` and `p0` are flat there, and `p0` one number for a parameter that began at 0."""
    model = make_model()
    library = prodigyopt.Prodigy(model.parameters())
    for step in range(5):
        library.zero_grad()
        loss_of(model, step).backward()
        library.step()
    twin = copy.deepcopy(model)
    ours = Prodigy(twin.parameters())
    ours.load_state_dict(copy.deepcopy(library.state_dict()))
    for step in range(5, 10):
        for net, optimizer in ((model, library), (twin, ours)):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
    assert numbers(library) == numbers(ours)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_learning_rates_that_differ_are_refused() -> None:
    model = make_model()
    optimizer = Prodigy(groups_of(model, lr=0.5))
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="one learning rate"):
        optimizer.step()


# ---------------------------------------------------------------------------------------------------------------- ranks


def train(model: nn.Module, **settings: Any) -> tuple[Prodigy, list[tuple[float, float, float]]]:
    """The same batch on every rank, so that the averaged gradient is that of one process; (d, numerator, denominator)."""
    optimizer = Prodigy(groups_of(model), **settings)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        group = optimizer.param_groups[0]
        assert [type(group[name]) for name in ("d", "d_max", "d_hat", "d_numerator", "d_denom")] == [float] * 5
        history.append((group["d"], group["d_numerator"], group["d_denom"]))
    return optimizer, history


def wrapped(kind: str) -> nn.Module:
    model, world = make_model(), dist.get_world_size()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (world,))}
    if kind.startswith("fsdp1"):
        flat: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": "original" in kind}
        if "hybrid" in kind:
            flat["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
            flat["device_mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        elif "whole" in kind:
            flat["sharding_strategy"] = ShardingStrategy.NO_SHARD
        model.first = FSDP1(model.first, **flat)
        return FSDP1(model, **flat)
    if kind == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    fully_shard(model.first, **options)
    return fully_shard(model, **options)


def run_ranks(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    model = wrapped(kind)
    optimizer, history = train(model, **settings)
    placed_as_parameter, weights = True, {}
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        weights[name.removeprefix("module.")] = whole.detach().clone()
        for key in ("s", "p0", "exp_avg", "exp_avg_sq"):
            if not param.numel():
                continue  # an original parameter of FSDP1 of which this rank holds nothing
            tensor = optimizer.state[param][key]
            placed_as_parameter &= type(tensor) is type(param.data) and tensor.shape == param.shape
            if isinstance(param, DTensor):
                placed_as_parameter &= tensor.placements == param.placements and tensor.device_mesh == param.device_mesh
    return {"history": history, "weights": weights, "placed_as_parameter": placed_as_parameter}


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("ddp", 2), ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 3), ("offload", 2), ("hsdp", 4), ("fsdp1", 2), ("fsdp1", 3),
        ("fsdp1 original", 2), ("fsdp1 hybrid", 4), ("fsdp1 hybrid original", 4), ("fsdp1 whole", 2),
        ("fsdp1 whole original", 2),
    ],
)  # fmt: skip
def test_d_is_that_of_one_process(pool: RankPool, kind: str, world_size: int) -> None:
    # A flat parameter of FSDP1 is of one param group only: there, no decay that differs between the two.
    settings = {"weight_decay": 0.0 if kind.startswith("fsdp1") else 0.01, "use_bias_correction": True, "d0": 1e-5}
    model = make_model()
    _, expected = train(model, **settings)
    results = pool.run(run_ranks, world_size, kind, settings)

    assert expected[-1][0] > 100 * settings["d0"]  # `d` moved: equality means something
    for result in results:
        assert result["history"] == results[0]["history"]  # to the bit, on every rank, at every step
        for got, one in zip(result["history"], expected, strict=True):
            assert got[0] == pytest.approx(one[0], rel=TOLERANCE)
            assert got[1] == pytest.approx(one[1], rel=TOLERANCE)
            assert got[2] == pytest.approx(one[2], rel=TOLERANCE)
        assert result["placed_as_parameter"]
    if not kind.startswith("fsdp1"):
        for name, param in model.named_parameters():
            torch.testing.assert_close(results[0]["weights"][name], param.detach(), rtol=1e-4, atol=1e-6)


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shapes = [(7, 5), (1, 4), (3,), (2, 7)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def step_on_given_gradients(
    cuts: list[int] | None, settings: dict[str, Any]
) -> tuple[list[float], list[torch.Tensor], int]:
    """Parameters cut along the given dimensions; returns every `d`, the whole parameters, and the last step's calls."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if cuts else None
    params = []
    for index, start in enumerate(gradients(1000)):
        whole = start if cuts is None else distribute_tensor(start, mesh, [Shard(cuts[index])])
        params.append(nn.Parameter(whole))
    optimizer, history, calls = Prodigy(params, **settings), [], 0
    for step in range(STEPS):
        for index, (param, grad) in enumerate(zip(params, gradients(step % 3), strict=True)):
            param.grad = grad if cuts is None else distribute_tensor(grad, mesh, [Shard(cuts[index])])
        with CommDebugMode() as traffic:
            optimizer.step()
        calls = traffic.get_total_counts()
        history.append(optimizer.param_groups[0]["d"])
    return history, [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in params], calls


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_dimension_may_be_cut_and_one_all_reduce_serves_all_parameters(pool: RankPool, world_size: int) -> None:
    settings = {"d0": 1e-3, "safeguard_warmup": True, "beta3": 0.95}
    expected, weights, none = step_on_given_gradients(None, settings)
    assert none == 0
    assert expected[-1] > settings["d0"]
    results = pool.run(step_on_given_gradients, world_size, [1, 1, 0, 1], settings)
    for history, whole, calls in results:
        assert calls == 1
        assert history == results[0][0]
        assert history == pytest.approx(expected, rel=TOLERANCE)
        for got, one in zip(whole, weights, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-6)


def gradient_on_the_last_rank_only() -> tuple[float, float]:
    """The first rank's rows have a gradient of 0, then no gradient at all: it must neither stop early nor hang the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]))
    optimizer = Prodigy([param], d0=1e-3)
    for _ in range(4):
        param.grad = distribute_tensor(torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]), mesh, [Shard(0)])
        optimizer.step()
    if dist.get_rank() == 0:
        param.grad = None
    optimizer.step()
    return optimizer.param_groups[0]["d"], optimizer.param_groups[0]["d_denom"]


def test_a_rank_without_gradient_takes_part(pool: RankPool) -> None:
    results = pool.run(gradient_on_the_last_rank_only, 2)
    assert results[0] == results[1]
    assert results[0][0] > 1e-3
