"""The format as its page tells it: the reader and the check that stand in docs/format.md are run as they stand there.

They know nothing of Holdfast. What they read is compared with the live objects that were saved, under every way of laying
out a tensor, and with the hashes of committed checkpoints of layout versions 1 and 2.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
import pytest
import torch
from compat import make_fixture, make_fixture_v2
from jobs import Job, Result
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import holdfast

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
V1 = Path(__file__).parent / "v1"
V1_MANIFEST = "56170e9858036cfacd2b8db0b001d2da"
V1_TENSORS = {
    "model.calls": "int64 [] d86e8112f3c4c444",
    "model.embed.weight": "float32 [5, 4] 99843ed8e3acdfef",
    "model.frozen": "float32 [4] c63c3010101a79fd",
    "model.gate.bias": "float32 [1] e054343a3fba3fee",
    "model.gate.weight": "float32 [1, 4] 2e239d612f91a60b",
    "model.scale": "bfloat16 [4] 341127b6ed889b3e",
    "optimizer.model.embed.weight.exp_avg": "float32 [5, 4] dc9d1ef200d7e651",
    "optimizer.model.embed.weight.exp_avg_sq": "float32 [5, 4] d8f26240ad45647e",
    "optimizer.model.embed.weight.step": "float32 [] d88c86f15bbea365",
    "optimizer.model.gate.bias.exp_avg": "float32 [1] c0ffa405a4daf10f",
    "optimizer.model.gate.bias.exp_avg_sq": "float32 [1] 1db06f0ce455259f",
    "optimizer.model.gate.bias.step": "float32 [] d88c86f15bbea365",
    "optimizer.model.gate.weight.exp_avg": "float32 [1, 4] 8f66257b2745aa8f",
    "optimizer.model.gate.weight.exp_avg_sq": "float32 [1, 4] 45a5a92741955bda",
    "optimizer.model.gate.weight.step": "float32 [] d88c86f15bbea365",
}

V2 = Path(__file__).parent / "v2"
V2_TENSORS = {
    "model.adapter.weight": "float32 [3, 4] 5cde964f0a913680",
    "model.body.changed.bias": "float32 [4] ef5bd072e10525a9",
    "model.body.changed.weight": "float32 [4, 5] 6a9a958e1d1b9e7b",
    "model.body.kept.bias": "bfloat16 [5] 4e6fcbaebae9bc93",
    "model.body.kept.weight": "bfloat16 [5, 4] be7356552f604ac4",
    "optimizer.model.adapter.weight.exp_avg": "float32 [3, 4] 31adba8dc565a68f",
    "optimizer.model.adapter.weight.exp_avg_sq": "float32 [3, 4] 8eef4bbb92137f06",
    "optimizer.model.adapter.weight.step": "float32 [] d88c86f15bbea365",
}
V2_NEXT_LOSS = 3.702514410018921


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's Python defines: `read` and `verify`."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec("\n".join(blocks), names)
    return names


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    """An output folder with a copy of the committed checkpoint."""
    shutil.copytree(V1, tmp_path / "v1")
    return tmp_path / "v1"


@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [("none", 1), ("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("flat", 4), ("fsdp1", 3), ("fsdp1-hybrid-flat", 4)],
)
@pytest.mark.parametrize("optimizer", ["adamw", "prodigy"])
def test_the_page_reads_what_ranks_wrote(
    pool: RankPool, tmp_path: Path, page: dict[str, Any], sharding: str, ranks: int, optimizer: str
) -> None:
    """Parameters and optimizer state that were saved are those of the live objects, bit for bit, and no more are there."""
    results: list[Result] = pool.run(jobs.train, ranks, Job(tmp_path, sharding, optimizer, stop=4))
    folder = tmp_path / "checkpoint-4"
    page["verify"](folder)
    tensors: dict[str, torch.Tensor] = page["read"](folder)

    live = {name: value for name, value in results[0].final.items() if isinstance(value, torch.Tensor)}
    for name, value in live.items():
        parameter, _, key = name.partition("/")
        if parameter.startswith("group ") or (sharding == "fsdp1" and not value.numel()):
            continue
        stored = tensors[f"optimizer.model.{parameter}.{key}" if key else f"model.{parameter}"]
        assert (stored.dtype, stored.shape) == (value.dtype, value.shape), name
        assert torch.equal(stored, value), name
    parameters = {name for name, value in live.items() if "/" not in name and (value.numel() or sharding != "fsdp1")}
    stored_models = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    assert stored_models - parameters == {"seen.running_mean", "seen.running_var", "seen.num_batches_tracked"}


def test_the_page_reads_odd_tensors(tmp_path: Path, page: dict[str, Any]) -> None:
    """complex128, which has to be stored as something else, bf16, a scalar, an empty one."""
    module = nn.Module()
    values = {
        "c": torch.tensor([1 + 2j, -3j], dtype=torch.complex128),
        "b": torch.arange(6.0).view(2, 3).to(torch.bfloat16),
        "s": torch.tensor(7),
        "e": torch.zeros(0, 3),
    }
    for name, value in values.items():
        module.register_buffer(name, value)
    with holdfast.Checkpointer(tmp_path, model=module) as checkpointer:
        checkpointer.save(1)
    page["verify"](tmp_path / "checkpoint-1")
    tensors = page["read"](tmp_path / "checkpoint-1")
    assert tensors.keys() == {f"model.{name}" for name in values}
    for name, value in values.items():
        stored = tensors[f"model.{name}"]
        assert stored.dtype == value.dtype and torch.equal(stored, value), name


def test_the_page_reads_weights_that_are_named(tmp_path: Path, page: dict[str, Any]) -> None:
    """What is frozen and unchanged is in the base's file only, converted on the way; what was changed is in the rank's file."""
    torch.manual_seed(0)
    stored = nn.ModuleDict({"kept": nn.Linear(6, 4), "changed": nn.Linear(4, 4), "trained": nn.Linear(4, 1)})
    base = tmp_path / "base"
    base.mkdir()
    save_file(stored.state_dict(), base / "model.safetensors")
    model = nn.ModuleDict({"kept": nn.Linear(6, 4), "changed": nn.Linear(4, 4), "trained": nn.Linear(4, 1)}).requires_grad_(False)
    model["kept"].to(torch.bfloat16)
    model["trained"].requires_grad_(True)
    holdfast.load_pretrained(model, base)
    model["changed"].weight.add_(1.0)
    optimizer = torch.optim.SGD(model["trained"].parameters(), lr=0.1)
    with holdfast.Checkpointer(tmp_path / "out", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(1)
    folder = tmp_path / "out" / "checkpoint-1"
    layout = json.loads(next(folder.glob("layout-*.json")).read_bytes())
    assert layout["version"] == 2
    with safe_open(next(folder.glob("rank-*.safetensors")), "pt") as file:
        names = set(file.keys())
    assert {n for n in names if n.startswith("model.")} == {"model.changed.weight", "model.trained.weight", "model.trained.bias"}
    tensors = page["read"](folder, bases=[base])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], tensor), name
        assert tensors[f"model.{name}"].dtype == tensor.dtype
    assert page["verify"](folder)


def test_the_page_finds_damage_in_any_file(v1: Path, page: dict[str, Any]) -> None:
    for path in sorted((v1 / "checkpoint-2").iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises((AssertionError, json.JSONDecodeError)):
            page["verify"](v1 / "checkpoint-2")
        path.write_bytes(data)
    assert page["verify"](v1 / "checkpoint-2") == V1_MANIFEST


def test_the_page_reads_version_1(v1: Path, page: dict[str, Any]) -> None:
    tensors = page["read"](v1 / "checkpoint-2")
    assert {name: make_fixture.fingerprint(value) for name, value in tensors.items()} == V1_TENSORS


@pytest.mark.parametrize("ranks", [1, 2])
def test_version_1_loads(pool: RankPool, v1: Path, ranks: int) -> None:
    """On the ranks that wrote it, and in one process: every tensor, and the caller's own state with its types."""
    resume: Callable[..., Any] = make_fixture.resume
    for step, tensors, counters in pool.run(resume, ranks, v1, ranks > 1):
        assert step == 2
        assert tensors == V1_TENSORS
        assert counters == {"images": 2, ("odd", 1): float("inf"), "order": [3, 1, None]}


def test_the_page_reads_version_2(page: dict[str, Any]) -> None:
    """Layouts of version 2 name base files. Of the body only the changed bias is in the ranks' files."""
    tensors = page["read"](V2 / "checkpoint-2", bases=[V2 / "base"])
    assert {name: make_fixture.fingerprint(value) for name, value in tensors.items()} == V2_TENSORS
    page["verify"](V2 / "checkpoint-2")
    written: set[str] = set()
    for path in (V2 / "checkpoint-2").glob("rank-*.safetensors"):
        with safe_open(path, "pt") as file:
            written |= set(file.keys())
    assert {name for name in written if "body" in name} == {"model.body.changed.bias"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_version_2_is_resumed(pool: RankPool, tmp_path: Path, ranks: int) -> None:
    """The base lies elsewhere than when it was saved. Every tensor is what it was, and the next loss is that of the run."""
    shutil.copytree(V2, tmp_path / "v2")
    resume: Callable[..., Any] = make_fixture_v2.resume
    results = pool.run(resume, ranks, tmp_path / "v2", tmp_path / "v2" / "base", ranks > 1)
    assert results == [(2, V2_TENSORS, V2_NEXT_LOSS)] * ranks
