"""From any sharding to any other: some pairs of `make matrix`, what a load reads, and what it refuses before it touches anything."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
import matrix
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast.engine import restore
from holdfast.engine.blocks import BUFFER, Part
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.registration import register
from holdfast.errors import IncompatibleCheckpoint, UnsupportedState
from holdfast.storage import LocalFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

BLOCK = 1 << 20


@pytest.mark.parametrize("optimizer", matrix.OPTIMIZERS)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("fsdp1", 2), ("hsdp", 4)),
        (("hsdp", 4), ("fsdp1-flat", 3)),
        (("fsdp1-flat", 3), ("offload", 4)),
        (("offload", 4), ("none", 1)),
        (("ddp", 2), ("fsdp1", 2)),
    ],
    ids=lambda t: f"{t[0]}x{t[1]}",
)
def test_pairs_are_equal(
    pool: RankPool, tmp_path: Path, saved: tuple[str, int], loaded: tuple[str, int], optimizer: str
) -> None:
    """The whole state to the bit, the next three losses, no collective, memory for the readers' buffers only."""
    before = pool.run(matrix.save, saved[1], tmp_path, saved[0], optimizer)
    after = pool.run(matrix.load, loaded[1], tmp_path, loaded[0], optimizer)
    assert list(matrix.problems(before, after, same=saved == loaded)) == []
    for run in after:
        assert run.extra < matrix.WORKERS * BLOCK


# ------------------------------------------------------------------------------------------------- what is read


class Noting(LocalFolder):
    """A folder that notes which quarters of which blocks of which file are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.quarters: Counter[tuple[str, int]] = Counter()

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        super().read_into(path, offset, target)
        self.quarters.update((path, q) for q in range(offset // BUFFER, -(-(offset + len(target)) // BUFFER)))


def touched(path: str, part: Part) -> set[tuple[str, int]]:
    """The blocks that hold the wanted elements of a part: every element's address, the slow way."""
    item = part.entry.nbytes // max(1, part.piece.numel)
    addresses = part.entry.start + item * torch.arange(part.piece.numel).view(part.piece.size)
    inner = part.wanted.relative_to(part.piece)
    addresses = addresses[tuple(slice(o, o + n) for o, n in zip(inner.offset, inner.size, strict=True))]
    return {(path, int(b)) for b in torch.unique(torch.stack([addresses // BLOCK, (addresses + item - 1) // BLOCK]))}


def blocks_read(folder: Path, sharding: str, optimizer: str) -> tuple[int, list[str]]:
    """Load without installing; how many blocks were read, and what was read in vain or twice."""
    model = jobs.build(sharding, matrix.WIDTH)
    opt = jobs.make_optimizer(optimizer, model)
    storage = Noting(folder)
    plan = restore.match(Checkpoint(storage, "checkpoint-3"), register(model, opt, None, None, None, None, None))
    storage.quarters.clear()  # headers and small state have been read
    restore.read(plan)
    wanted: set[tuple[str, int]] = set()
    for rank, parts in plan.parts.items():
        wanted = wanted.union(*(touched(plan.checkpoint.file(rank).path, part) for part in parts))
    blocks = {(path, q * BUFFER // BLOCK) for path, q in storage.quarters}
    vain = [f"{path}: block {b}" for path, b in blocks - wanted]
    return len(blocks), vain + [f"{key} read {n} times" for key, n in storage.quarters.items() if n > 1]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(("fsdp1", 2), ("fsdp1", 2)), (("fsdp1-flat", 3), ("fsdp2", 2)), (("fsdp2", 3), ("fsdp1", 2)), (("hsdp", 4), ("ddp", 2))],
    ids=lambda t: f"{t[0]}x{t[1]}",
)
def test_only_blocks_that_are_needed_are_read_and_once(
    pool: RankPool, tmp_path: Path, saved: tuple[str, int], loaded: tuple[str, int]
) -> None:
    pool.run(matrix.save, saved[1], tmp_path, saved[0], "adamw")
    for count, wrong in pool.run(blocks_read, loaded[1], tmp_path, loaded[0], "adamw"):
        assert count > 3
        assert wrong == []


def bytes_written(folder: Path) -> list[int]:
    """How many bytes of tensors each rank's file has."""
    return [path.stat().st_size for path in sorted(folder.glob("checkpoint-3/rank-*.safetensors"))]


@pytest.mark.parametrize(("sharding", "ranks"), [("hsdp", 4), ("fsdp1-hybrid", 4), ("ddp", 2), ("fsdp1-whole", 2)])
def test_copies_are_written_once_and_evenly(pool: RankPool, tmp_path: Path, sharding: str, ranks: int) -> None:
    pool.run(matrix.save, 1, tmp_path / "one", "none", "adamw")
    pool.run(matrix.save, ranks, tmp_path / "many", sharding, "adamw")
    (whole,), parts = bytes_written(tmp_path / "one"), bytes_written(tmp_path / "many")
    overhead = 128 << 10  # header and small state of each file
    assert whole - overhead <= sum(parts) <= whole + ranks * overhead
    assert max(parts) - min(parts) < 0.35 * max(parts)  # of so few and large tensors; a flat shard is split to the element
    if sharding.startswith("fsdp1"):
        assert max(parts) - min(parts) < 0.02 * max(parts)


def looked_at_before(folder: Path, sharding: str, first: str) -> list[float]:
    """Losses after a resume, of a model that has been evaluated (or not) before it."""
    model = jobs.build(sharding).eval()
    optimizer = jobs.make_optimizer("adamw", model)
    if first == "evaluated":
        with torch.no_grad():
            model(torch.zeros(2, 6, dtype=torch.int64))
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        if first == "trained":
            jobs.one_step(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer), torch.arange(12).view(2, 6) % 7)
            checkpointer.save(1)
        else:
            checkpointer.resume()
    return [matrix._step(model, optimizer, step) for step in range(3)]


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp1-flat", "fsdp1-grad-op", "fsdp2"])
def test_a_forward_before_the_load_leaves_nothing_behind(pool: RankPool, tmp_path: Path, sharding: str) -> None:
    expected = pool.run(looked_at_before, 2, tmp_path, sharding, "trained")
    assert pool.run(looked_at_before, 2, tmp_path, sharding, "evaluated") == expected


def generators_after(folder: Path, seed: int | None) -> tuple[list[float], list[str]]:
    """Numbers drawn after a save with `seed`, or after a resume; and what the log said."""
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    logging.getLogger("holdfast").setLevel(logging.INFO)
    torch.manual_seed((seed or 0) + dist.get_rank())
    with holdfast.Checkpointer(folder, model=nn.Linear(2, 2)) as checkpointer:
        if seed is None:
            checkpointer.resume()
        else:
            checkpointer.save(7)
    return [torch.rand(()).item() for _ in range(3)], [line for line in lines if "new: their generators" in line]


def test_new_ranks_begin_with_the_saved_seed_and_their_rank(pool: RankPool, tmp_path: Path) -> None:
    saved = [numbers for numbers, _ in pool.run(generators_after, 2, tmp_path / "a", 5)]
    pool.run(generators_after, 2, tmp_path / "b", 6)
    first, again, other = (pool.run(generators_after, 4, tmp_path / folder, None) for folder in ("a", "a", "b"))
    drawn = [numbers for numbers, _ in first]
    assert drawn[:2] == saved
    assert len({tuple(numbers) for numbers in drawn}) == 4
    assert [numbers for numbers, _ in again] == drawn
    assert [numbers for numbers, _ in other][2:] != drawn[2:]
    assert ["ranks 2 to 3 are new" in line for line in first[0][1]] == [True]
    assert [lines for _, lines in first][1:] == [[], [], []]


# ---------------------------------------------------------------------------------------------- what cannot be cut anew


class Quantised(torch.optim.Optimizer):
    """Momentum in 8 bits with a scale for every four elements, as 8-bit optimizers keep it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                local = p.to_local() if isinstance(p, DTensor) else p
                grad = (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).flatten()
                blocks = torch.nn.functional.pad(grad, (0, -len(grad) % 4)).view(-1, 4)
                scale = blocks.abs().amax(1)
                state = self.state[p]
                state["codes"] = (blocks / scale.clamp(min=1e-9)[:, None] * 127).to(torch.int8).flatten()[: len(grad)]
                state["scale"], state["step"] = scale, torch.tensor(1.0)
                local.sub_(grad.view(local.shape), alpha=group["lr"])


def train_quantised(folder: Path, sharding: str, keep: bool = True) -> dict[str, Any]:
    """One step, saved; or what a resume gives."""
    model = jobs.build(sharding)
    if keep:
        optimizer: Any = Quantised([p for p in model.parameters() if p.requires_grad])
        with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
            jobs.one_step(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer), torch.arange(12).view(2, 6) % 7)
            checkpointer.save(1)
        return {"error": "", "untouched": True, "state": _raw(optimizer)}
    optimizer = Quantised([p for p in model.parameters() if p.requires_grad])
    before = [p.detach().clone() for p in model.parameters()]
    error = ""
    try:
        with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
            checkpointer.resume()
    except IncompatibleCheckpoint as refused:
        error = str(refused)
    local = [(a.to_local(), b.to_local()) if isinstance(a, DTensor) else (a, b) for a, b in zip(model.parameters(), before, strict=True)]
    untouched = all(torch.equal(a, b) for a, b in local) and not optimizer.state
    return {"error": error, "untouched": untouched, "state": _raw(optimizer)}


def _raw(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v.tolist() for k, v in optimizer.state[p].items()} for g in optimizer.param_groups for p in g["params"] if p in optimizer.state]


@pytest.mark.parametrize(("sharding", "other"), [("fsdp1-flat", "fsdp1"), ("fsdp1", "fsdp2"), ("fsdp2", "fsdp1-flat")])
def test_quantised_state_goes_back_to_the_same_ranks_only(pool: RankPool, tmp_path: Path, sharding: str, other: str) -> None:
    """Resumed where it was saved it is the same to the byte; elsewhere it is refused and nothing has changed."""
    saved = pool.run(train_quantised, 2, tmp_path, sharding)
    same = pool.run(train_quantised, 2, tmp_path, sharding, keep=False)
    for a, b in zip(saved, same, strict=True):
        assert b["error"] == ""
        assert a["state"] == b["state"]
    for ranks, where in ((2, other), (3, sharding), (1, "none")):
        for refused in pool.run(train_quantised, ranks, tmp_path, where, keep=False):
            assert re.search(r"(codes|scale) is not of its parameter's shape .*resume on 2 ranks with the sharding", refused["error"])
            assert refused["untouched"]


def warned_of(folder: Path) -> list[str]:
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    train_quantised(folder, "fsdp1")
    return [line for line in lines if "same sharding only" in line]


def test_a_save_says_that_its_state_is_for_the_same_ranks(pool: RankPool, tmp_path: Path) -> None:
    lines = pool.run(warned_of, 2, tmp_path)
    assert len(lines[0]) == 1 and "scale is not of its parameter's shape" in lines[0][0]
    assert lines[1] == []


def sliced_prodigy(folder: Path, sharding: str, save: bool, original: bool = False) -> str:
    """Save after a step, or resume and make one; the error, if any. `original` is prodigyopt's own."""
    from prodigyopt import Prodigy as Original

    from holdfast.training.prodigy import Prodigy

    model = jobs.build(sharding)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = (Original if original else Prodigy)(trained, slice_p=3, d0=1e-3)
    before = [jobs.whole(p) for p in trained]
    try:
        with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
            if not save:
                checkpointer.resume()
            jobs.one_step(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer), torch.arange(12).view(2, 6) % 7)
            checkpointer.save(1)
    except IncompatibleCheckpoint as refused:
        assert not optimizer.state
        assert all(torch.equal(jobs.whole(p), b) for p, b in zip(trained, before, strict=True))
        return str(refused)
    return ""


@pytest.mark.parametrize(
    ("sharding", "ranks", "original"),
    [("none", 1, False), ("fsdp2", 2, False), ("fsdp1-flat", 2, False), ("none", 1, True), ("ddp", 2, True)],
)
def test_sliced_prodigy_stays_where_it_is(pool: RankPool, tmp_path: Path, sharding: str, ranks: int, original: bool) -> None:
    """Its statistics are of every third element: into other pieces they are refused, before anything has changed."""
    assert pool.run(sliced_prodigy, ranks, tmp_path, sharding, save=True, original=original) == [""] * ranks
    assert pool.run(sliced_prodigy, ranks, tmp_path, sharding, save=False, original=original) == [""] * ranks
    for where, count in (("fsdp2", 3), ("fsdp1", 3)):
        for error in pool.run(sliced_prodigy, count, tmp_path, where, save=False, original=original):
            assert "is not of its parameter's shape" in error


# ------------------------------------------------------------------------------------------------- state that is not there


class Unused(nn.Module):
    """Two layers, of which one never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 5), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def with_unused(folder: Path, sharding: str, save: bool) -> tuple[str, set[str]]:
    """The error, if any, and the names of parameters that have optimizer state on this rank."""
    torch.manual_seed(0)
    model: nn.Module = Unused()
    if sharding.startswith("fsdp1"):
        options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": sharding == "fsdp1"}
        if sharding == "fsdp1":  # in a unit of its own; in one unit with others it would get a gradient of zeros
            model.unused = FullyShardedDataParallel(model.unused, **options)
        model = FullyShardedDataParallel(model, **options)
    elif sharding == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
            if save:
                model(torch.ones(2, 6)).sum().backward()
                optimizer.step()
                checkpointer.save(1)
            else:
                checkpointer.resume()
    except IncompatibleCheckpoint as refused:
        return str(refused), set()
    names = {id(p): jobs.clean(n) for n, p in model.named_parameters()}
    return "", {names[id(p)] for p in optimizer.state}


@pytest.mark.parametrize("saved", ["fsdp1", "fsdp2", "none"])
def test_a_parameter_without_gradient_has_no_state_anywhere(pool: RankPool, tmp_path: Path, saved: str) -> None:
    pool.run(with_unused, 1 if saved == "none" else 2, tmp_path, saved, save=True)
    checkpoint = Checkpoint(LocalFolder(tmp_path), "checkpoint-1")
    there = {spec.slot.param for name, spec in checkpoint.tensors.items() if spec.slot and checkpoint.exists(name)}
    assert there == {"model.used.weight", "model.used.bias"}
    for sharding, ranks in (("fsdp1", 3), ("fsdp2", 2), ("none", 1)):
        results = pool.run(with_unused, ranks, tmp_path, sharding, save=False)
        assert [error for error, _ in results] == [""] * ranks
        assert set().union(*(names for _, names in results)) == {"used.weight", "used.bias"}
    for error, _ in pool.run(with_unused, 2, tmp_path, "fsdp1-flat", save=False):  # one state for both is not to be had
        assert "has less state in optimizer than others that are in one flat parameter with it here" in error


# --------------------------------------------------------------------------------------------- refused at registration


def refused_at_registration(folder: Path, what: str) -> str:
    world_size = dist.get_world_size()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if what == "tensor parallel":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh["tp"], [Shard(0)]))
        model[0].bias = nn.Parameter(distribute_tensor(model[0].bias.detach(), mesh["tp"], [Shard(0)]))
        fully_shard(model, mesh=mesh["dp"])
    elif what == "experts":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("experts", "dp"))
        fully_shard(model[1], mesh=mesh["dp"])
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    elif what == "flat experts":
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model[1] = FullyShardedDataParallel(model[1], process_group=groups[dist.get_rank() // 2], device_id=torch.device("cpu"))
    elif what == "channels last":
        model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif what == "another torch":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        model._handle.flat_param._numels_with_padding = (*model._handle.flat_param._numels_with_padding, 5)
    elif what == "another field":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        del model._handle.flat_param._shard_param_infos
    with pytest.raises(UnsupportedState) as caught:
        holdfast.Checkpointer(folder, model=model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tensor parallel", r"model\.0\.weight is laid (out as|over)"),
        ("experts", r"model\.1\.weight is laid over 2 of the 4 ranks.*experts"),
        ("flat experts", r"no regular grid of all 4 ranks"),
        ("channels last", r"weight was not contiguous when FSDP1 flattened it.*contiguous_format"),
        ("another torch", r"keeps FSDP1's flat parameters in another way than was tried.*Nothing was read"),
        ("another field", r"in another way than was tried.*_shard_param_infos"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(pool: RankPool, tmp_path: Path, what: str, message: str) -> None:
    for text in pool.run(refused_at_registration, 4, tmp_path, what):
        assert re.search(message, text), text
