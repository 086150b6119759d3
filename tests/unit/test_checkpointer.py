"""The engine's door, in one process: what is kept, which checkpoint is taken, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

import holdfast
from holdfast.engine import lease
from holdfast.engine.capture import Staging
from holdfast.engine.deadlines import Deadlines
from holdfast.engine.verify import verify
from holdfast.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    HoldfastError,
    IncompatibleCheckpoint,
    NoUsableCheckpoint,
    SaveFailed,
    UnsupportedState,
    UsageError,
)
from holdfast.storage import LocalFolder
from holdfast.storage.local import _Writer


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every Checkpointer of a test is stopped at its end, whatever the test did with it."""
    made: list[holdfast.Checkpointer] = []
    original = holdfast.Checkpointer.__init__

    def remember(self: holdfast.Checkpointer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(holdfast.Checkpointer, "__init__", remember)
    yield
    for checkpointer in made:
        if not checkpointer._closed:
            checkpointer._stop(patience=5)


def linear(seed: int = 0) -> tuple[nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_one(folder: Path, at: int, seed: int = 0, **options: Any) -> dict[str, torch.Tensor]:
    """A run of one step that saves as step `at`; returns the weights it saved."""
    model, optimizer = linear(seed)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer, **options) as checkpointer:
        checkpointer.resume()
        step(model, optimizer)
        checkpointer.save(at)
    return {k: v.clone() for k, v in model.state_dict().items()}


def resumed(folder: Path, path: str | Path | None = None) -> tuple[int, dict[str, torch.Tensor]]:
    model, optimizer = linear(seed=99)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        return checkpointer.resume(path), model.state_dict()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -- what is kept


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
def test_every_dtype_and_shape(tmp_path: Path, overlap: bool) -> None:
    def make(fill: bool) -> nn.Module:
        module = nn.Module()
        for i, dtype in enumerate(DTYPES):
            for j, shape in enumerate([(), (0, 3), (5,), (3, 7)]):
                value = torch.randint(0, 2, shape).to(dtype) if fill else torch.zeros(shape).to(dtype)
                module.register_buffer(f"b{i}_{j}", value)
        module.register_parameter("p", nn.Parameter(torch.randn(4, 4).t() if fill else torch.zeros(4, 4)))
        return module

    saved = make(fill=True)
    with holdfast.Checkpointer(tmp_path, model=saved, overlap=overlap) as checkpointer:
        checkpointer.save(1)
    loaded = make(fill=False)
    with holdfast.Checkpointer(tmp_path, model=loaded) as checkpointer:
        assert checkpointer.resume() == 1
    for (name, a), b in zip(saved.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)), name


def test_models_optimizers_and_own_state_by_name(tmp_path: Path) -> None:
    class Average:
        def __init__(self, value: float) -> None:
            self.state: dict[str, Any] = {"mean": torch.full((3,), value), "count": int(value), "history": [value, (value,)]}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    def run(value: float, resume: bool) -> Any:
        models = {"student": nn.Linear(3, 2), "teacher": nn.Linear(2, 2)}
        optimizers = [torch.optim.SGD(m.parameters(), lr=value, momentum=0.9) for m in models.values()]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** int(value * 10))
        counters, seen = {"images": int(value), 7: np.float32(value)}, [value]
        average = Average(value)
        with holdfast.Checkpointer(
            tmp_path, model=models, optimizer=optimizers, scaler=scaler, extra={"c": counters, "seen": seen, "ema": average}
        ) as checkpointer:
            if resume:
                assert checkpointer.resume() == 3
            else:
                scaler.scale(models["teacher"](models["student"](torch.ones(1, 3))).sum()).backward()
                for optimizer in optimizers:
                    optimizer.step()
                checkpointer.save(3)
        momenta = [s["momentum_buffer"] for o in optimizers for s in o.state.values()]
        weights = [p.detach() for m in models.values() for p in m.parameters()]
        return weights + momenta, [o.param_groups[0]["lr"] for o in optimizers], scaler.state_dict(), counters, seen, average.state

    tensors, *rest, ema = run(0.5, resume=False)
    loaded, *others, other_ema = run(0.75, resume=True)
    assert all(map(torch.equal, tensors, loaded))
    assert others == rest
    assert type(others[2][7]) is np.float32
    assert torch.equal(ema.pop("mean"), other_ema.pop("mean"))
    assert ema == other_ema


def test_tied_weights_stay_tied_and_load_into_untied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            if tie:
                self.head.weight = self.embed.weight

    tied = Tied(tie=True)
    with holdfast.Checkpointer(tmp_path, model=tied) as checkpointer:
        checkpointer.save(1)
    assert (tmp_path / "checkpoint-1").stat()
    for tie in (True, False):
        model = Tied(tie)
        with holdfast.Checkpointer(tmp_path, model=model) as checkpointer:
            checkpointer.resume()
        assert (model.head.weight is model.embed.weight) is tie
        assert torch.equal(model.head.weight, tied.embed.weight)
        assert torch.equal(model.embed.weight, tied.embed.weight)


def test_param_groups_keep_every_value(tmp_path: Path) -> None:
    """C20: `initial_lr`, which a scheduler adds, and a caller's own keys come back."""
    model, optimizer = linear()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)
    optimizer.param_groups[0]["mine"] = ("x", {1: None})
    step(model, optimizer)
    scheduler.step()
    expected = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, lr_scheduler=scheduler) as checkpointer:
        checkpointer.save(1)
    model, optimizer = linear(seed=5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.7, total_steps=99)
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, lr_scheduler=scheduler) as checkpointer:
        checkpointer.resume()
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == expected
    assert scheduler.total_steps == 10


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    model, _ = linear()
    with (
        holdfast.Checkpointer(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1)) as checkpointer,
        pytest.raises(IncompatibleCheckpoint, match="optimizer was a AdamW, it is a SGD: continue with the same optimizer"),
    ):
        checkpointer.resume()


def test_moments_keep_the_strides_of_their_parameter(tmp_path: Path) -> None:
    """Fused kernels pair elements by their place in memory."""

    def run(stop: int, save_at: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
            begun = checkpointer.resume()
            for at in range(begun + 1, stop + 1):
                model(torch.linspace(-1, 1, 300).view(1, 3, 10, 10) * at).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if at == save_at:
                    checkpointer.save(at)
        assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride()
        return model.weight.detach().clone()

    whole = run(5, 0)
    run(2, 2)
    assert torch.equal(run(5, 0), whole)


def test_tensors_of_a_dict_are_filled_in_place(tmp_path: Path) -> None:
    """extra={"ema": dict(ema.state_dict())} shares its tensors with the module: the module must see what was loaded."""
    average = nn.Linear(3, 2)
    expected = average.weight.detach().clone()
    with holdfast.Checkpointer(tmp_path, model=nn.Linear(1, 1), extra={"ema": dict(average.state_dict())}) as checkpointer:
        checkpointer.save(1)
    other = nn.Linear(3, 2)
    with holdfast.Checkpointer(tmp_path, model=nn.Linear(1, 1), extra={"ema": dict(other.state_dict())}) as checkpointer:
        checkpointer.resume()
    assert torch.equal(other.weight, expected)


def test_extra_state_of_modules(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, Any]:
            return {"seen": self.seen, "mean": torch.full((2,), float(self.seen))}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"] + int(state["mean"].sum()) * 100

    model = nn.Sequential(Counting(2, 2), nn.Linear(2, 2))
    model[0].seen = 7
    with holdfast.Checkpointer(tmp_path, model=model) as checkpointer:
        checkpointer.save(1)
    model[0].seen = 0
    with holdfast.Checkpointer(tmp_path, model=model) as checkpointer:
        checkpointer.resume()
    assert model[0].seen == 7 + 1400


def test_a_tensor_learning_rate_is_that_of_the_save(tmp_path: Path, slow_copy: threading.Event) -> None:
    """With overlap the scheduler steps while parameters are still being copied."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, lr_scheduler=scheduler, overlap=True)
    step(model, optimizer)
    checkpointer.save(1)
    scheduler.step()
    slow_copy.set()
    checkpointer.close()
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, lr_scheduler=scheduler) as checkpointer:
        checkpointer.resume()
    assert float(optimizer.param_groups[0]["lr"]) == 1.0


def test_a_load_makes_no_step(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    model, optimizer = linear()
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.resume() == 1
    assert calls == []
    assert optimizer.state[model.weight]["step"].item() == 1


def test_state_of_frozen_parameters_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C21: what is dropped because a parameter trains no longer is said by name."""
    save_one(tmp_path, 1)
    model, _ = linear()
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.weight], lr=0.1)
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
    assert "dropped: it trains no longer: model.bias" in caplog.text
    assert set(optimizer.state) == {model.weight}


def test_a_deep_or_ambiguous_tree_is_refused_or_kept(tmp_path: Path) -> None:
    deep: Any = 0
    for _ in range(70):
        deep = {1: deep}
    with pytest.raises(UnsupportedState, match="is nested deeper than 64 levels"):
        holdfast.Checkpointer(tmp_path, model=nn.Linear(2, 2), extra={"x": deep})
    nested: Any = torch.ones(1)
    for _ in range(40):
        nested = {1: (nested,)} if _ % 2 else [nested]
    twins = {1: torch.ones(1), "1": torch.full((1,), 2.0), "a.b": torch.full((1,), 3.0), "a": {"b": torch.full((1,), 4.0)}}
    with holdfast.Checkpointer(tmp_path, model=nn.Linear(2, 2), extra={"twins": twins, "deep": [nested]}) as checkpointer:
        checkpointer.save(1)
    loaded: dict[Any, Any] = {}
    with holdfast.Checkpointer(tmp_path, model=nn.Linear(2, 2), extra={"twins": loaded, "deep": []}) as checkpointer:
        checkpointer.resume()
    assert [float(t) for t in (loaded[1], loaded["1"], loaded["a.b"], loaded["a"]["b"])] == [1, 2, 3, 4]


# -- which checkpoint is taken


def test_newest_is_by_run_and_save_not_by_step_name_or_time(tmp_path: Path) -> None:
    """C12: a run that went back to step 400 and saved 500 is newer than an abandoned 600, whatever the clock says."""
    save_one(tmp_path, 400, seed=1)
    save_one(tmp_path, 600, seed=2)
    newest = save_one(tmp_path, 500, seed=3)
    for at in (400, 600, 500):
        os.utime(tmp_path / f"checkpoint-{at}", (2e9 - at, 2e9 - at))
    os.utime(tmp_path / "checkpoint-500" / "manifest.json", (0, 0))
    at, weights = resumed(tmp_path)
    assert at == 500
    assert equal(weights, newest)
    assert resumed(tmp_path, "checkpoint-600")[0] == 600
    assert resumed(tmp_path, tmp_path / "checkpoint-400")[0] == 400


def test_steps_are_numbers_not_strings(tmp_path: Path) -> None:
    """C12: 9900 before 10000."""
    model, optimizer = linear()
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, keep_last=2) as checkpointer:
        for at in (9000, 9900, 10000):
            checkpointer.save(at)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-10000", "checkpoint-9900"]
    assert resumed(tmp_path)[0] == 10000


def test_an_incomplete_one_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C08: the save of step 2 was interrupted before its receipt; what it left is removed, since its job is dead."""
    whole = save_one(tmp_path, 1)
    save_one(tmp_path, 2)
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    next((tmp_path / "checkpoint-2").glob("rank-*.json")).unlink()
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "notes.txt").touch()
    (tmp_path / "checkpoint-latest").mkdir()
    at, weights = resumed(tmp_path)
    assert at == 1
    assert equal(weights, whole)
    assert "removed 2 files of interrupted saves from checkpoint-2" in caplog.text
    assert "passed over: checkpoint-3 is incomplete" in caplog.text
    assert not (tmp_path / "checkpoint-2").exists()
    assert (tmp_path / "checkpoint-3" / "notes.txt").exists()


def test_a_save_that_only_lacks_its_manifest_is_completed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The job died between the last receipt and the manifest: the next one writes the very bytes that it would have."""
    save_one(tmp_path, 1)
    newer = save_one(tmp_path, 2)
    manifest = tmp_path / "checkpoint-2" / "manifest.json"
    expected = manifest.read_bytes()
    manifest.unlink()
    at, weights = resumed(tmp_path)
    assert at == 2
    assert equal(weights, newer)
    assert manifest.read_bytes() == expected
    assert "completed checkpoint-2" in caplog.text


def test_a_file_that_shrank_is_not_completed(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    save_one(tmp_path, 2)
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    shard = next((tmp_path / "checkpoint-2").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert resumed(tmp_path)[0] == 1


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(p for p in checkpoint.iterdir() if p.is_file())


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
@pytest.mark.parametrize("index", range(4), ids=["layout", "manifest", "receipt", "shard"])
def test_no_damage_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture, index: int, damage: str) -> None:
    """C09: any file of the newest checkpoint is damaged: the older one is taken, and the log says why.

    A manifest that is gone is written again out of the receipts, which vouch for everything else.
    """
    older = save_one(tmp_path, 1)
    newer = save_one(tmp_path, 2)
    victim = files_of(tmp_path / "checkpoint-2")[index]
    data = victim.read_bytes()
    if damage == "flip":
        middle = len(data) // 2
        victim.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(data[: len(data) // 3] if damage == "truncate" else b"")
    at, weights = resumed(tmp_path)
    if index == 1 and at == 2:
        assert equal(weights, newer)
        assert "completed checkpoint-2" in caplog.text
    else:
        assert (at, equal(weights, older)) == (1, True)
        assert "passed over: " in caplog.text


def test_every_byte_of_a_shard_counts(tmp_path: Path) -> None:
    older = save_one(tmp_path, 1)
    save_one(tmp_path, 2)
    shard = next((tmp_path / "checkpoint-2").glob("*.safetensors"))
    data = shard.read_bytes()
    for place in (0, 9, 4095, 4096, 4100, len(data) - 1):
        shard.write_bytes(data[:place] + bytes([data[place] ^ 0x80]) + data[place + 1 :])
        at, weights = resumed(tmp_path)
        assert (at, equal(weights, older)) == (1, True), place


def test_with_none_left_nothing_starts_over(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    next((tmp_path / "checkpoint-1").glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(NoUsableCheckpoint, match="nothing was started over") as caught:
        resumed(tmp_path)
    assert caught.value.exit_code == 4


def test_saving_a_step_again(tmp_path: Path) -> None:
    """The complete checkpoint that is there stays whole until the new one replaces it in one rename."""
    save_one(tmp_path, 5, seed=1)
    before = {p.name for p in files_of(tmp_path / "checkpoint-5")}
    second = save_one(tmp_path, 5, seed=2)
    after = {p.name for p in files_of(tmp_path / "checkpoint-5")}
    assert len(after) == len(before) == 4
    assert len(after & before) == 2  # the manifest and the layout
    assert equal(resumed(tmp_path)[1], second)


def test_replacing_a_verified_checkpoint_reads_the_new_one_back_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 8: what was found whole stays until its successor was found whole, too."""
    good = save_one(tmp_path, 5)
    model, optimizer = linear(seed=9)
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer)
    assert checkpointer.resume() == 5
    step(model, optimizer)
    original = _Writer.close

    def close(writer: _Writer, size: int) -> None:
        original(writer, size)
        data = bytearray(writer._path.read_bytes())
        data[-100] ^= 1
        writer._path.write_bytes(data)

    monkeypatch.setattr(_Writer, "close", close)
    checkpointer.save(5)
    with pytest.raises(SaveFailed, match="does not read back"):
        checkpointer.wait()
    checkpointer.close()
    at, weights = resumed(tmp_path)
    assert (at, equal(weights, good)) == (5, True)


def test_trouble_after_the_commit_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_one(tmp_path, 1)
    model, optimizer = linear()
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, keep_last=1)

    def remove(self: LocalFolder, path: str) -> None:
        raise PermissionError(errno.EACCES, "is open elsewhere", path)

    monkeypatch.setattr(LocalFolder, "remove", remove)
    checkpointer.save(1)
    checkpointer.save(2)
    checkpointer.wait()
    assert [s.state for s in checkpointer.saves] == ["complete", "complete"]
    assert "is open elsewhere" in caplog.text


def test_another_versions_checkpoint_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run beside it begins, saves and resumes; with it alone nothing is started over silently."""
    save_one(tmp_path, 1)
    folder = tmp_path / "checkpoint-1"
    for file in folder.glob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2}))
    before = {p.name: p.read_bytes() for p in files_of(folder)}
    with pytest.raises(NoUsableCheckpoint, match="is of format version 2, this Holdfast reads version 1"):
        resumed(tmp_path)
    model, optimizer = linear()
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(2)
    assert resumed(tmp_path)[0] == 2
    assert {p.name: p.read_bytes() for p in files_of(folder)} == before


def test_a_foreign_checkpoint_is_recognised(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save({"a": torch.ones(2)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    with pytest.raises(UsageError, match=r"does not tell how many optimizer steps were done.*holdfast import .*dcp OUTPUT_DIR --step N"):
        resumed(tmp_path, "dcp")
    (tmp_path / "dcp").rename(tmp_path / "step-3")
    with pytest.raises(IncompatibleCheckpoint, match=r"step-3 is a checkpoint of another model: it lacks .*; the model lacks model\.a"):
        resumed(tmp_path, "step-3")


# -- what is refused


def refusals(folder: Path) -> dict[str, tuple[Any, type[HoldfastError], str]]:
    model, _ = linear()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)
    make = holdfast.Checkpointer
    loader = torch.utils.data.DataLoader([1, 2])  # type: ignore[arg-type]
    sparse, meta = nn.Module(), nn.Linear(2, 2, device="meta")
    sparse.register_buffer("s", torch.eye(3).to_sparse())
    return {
        "no model": (lambda: make(folder, model=None), UsageError, "needs a model"),  # type: ignore[arg-type]
        "wrong model": (lambda: make(folder, model=3), UsageError, "model is of type int, should be a torch.nn.Module"),  # type: ignore[arg-type]
        "wrong optimizer": (lambda: make(folder, model=model, optimizer=3), UsageError, "optimizer is a int"),
        "foreign parameters": (lambda: make(folder, model=model, optimizer=other), UsageError, "belongs to no registered model"),
        "loader": (lambda: make(folder, model=model, dataloader=loader), UsageError, "use holdfast.DataLoader"),
        "counter": (lambda: make(folder, model=model, extra={"n": 3}), UsageError, "filled in place"),
        "object": (lambda: make(folder, model=model, extra={"x": {"a": [object()]}}), UnsupportedState, r"extra\.x\.a\[0\] is a builtins.object"),
        "sparse": (lambda: make(folder, model=sparse), UnsupportedState, "model.s is a tensor of layout torch.sparse_coo"),
        "meta": (lambda: make(folder, model=meta), UnsupportedState, "model.weight is on the meta device"),
        "keep_last": (lambda: make(folder, model=model, keep_last=0), UsageError, "keep_last is 0"),
        "a file": (lambda: make(Path(__file__), model=model), UsageError, "cannot use"),
        "step": (lambda: make(folder, model=model).save(1.5), UsageError, "step is 1.5"),  # type: ignore[arg-type]
        "key": (lambda: make(folder, model={"a/b": model}), UsageError, "without '/' and '.'"),
        "dotted key": (lambda: make(folder, model={"a.b": model}), UsageError, "without '/' and '.'"),
        "zero": (lambda: make(folder, model=model, optimizer=_zero(model)), UsageError, "ZeroRedundancyOptimizer"),
    }  # fmt: skip


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Of that name: the real one wants a process group."""


def _zero(model: nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), lr=1)


@pytest.mark.parametrize("case", refusals(Path()))
def test_bad_input_is_one_clear_message(tmp_path: Path, case: str) -> None:
    call, kind, message = refusals(tmp_path)[case]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert caught.value.exit_code == 2


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    before = torch.randn(3)

    def resume(model: nn.Module, **options: Any) -> None:
        with holdfast.Checkpointer(tmp_path, model=model, **options) as checkpointer:
            checkpointer.resume()

    wider = nn.Linear(4, 2)
    with torch.no_grad():
        wider.weight[0, :3] = before
    with pytest.raises(IncompatibleCheckpoint, match=r"model.weight: F32 \[2, 3\] there, float32 \[2, 4\] here") as caught:
        resume(wider)
    assert caught.value.exit_code == 2
    assert torch.equal(wider.weight[0, :3], before)  # no memory was touched
    with pytest.raises(IncompatibleCheckpoint, match=r"it lacks model.0.bias, model.0.weight; the model lacks model.bias, model.weight"):
        resume(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(IncompatibleCheckpoint, match="bfloat16"):
        resume(nn.Linear(3, 2, dtype=torch.bfloat16))
    with pytest.raises(IncompatibleCheckpoint, match="it was saved without it"):
        resume(linear()[0], extra={"new": {}})
    model = linear()[0]
    two_groups = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])
    with pytest.raises(IncompatibleCheckpoint, match="had 1 parameter groups, it has 2"):
        resume(model, optimizer=two_groups)


def test_exactly_that_one_or_an_error(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    other = tmp_path / "of another run"
    save_one(other, 2)
    (other / "checkpoint-2" / "manifest.json").unlink()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    for path, message in {
        "checkpoint-7": "there is no checkpoint",
        other / "checkpoint-2": "is incomplete: it has 1 receipts and no manifest.json",
        "photos": r"is no Holdfast checkpoint: it has no manifest.json \(it holds cat.png\)",
    }.items():
        with pytest.raises(CheckpointNotFound, match=message) as caught:
            resumed(tmp_path, path)
        assert caught.value.exit_code == 2
    next((tmp_path / "checkpoint-1").glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(CorruptCheckpoint):
        resumed(tmp_path, "checkpoint-1")


def test_files_follow_the_umask_and_stay_inside(tmp_path: Path) -> None:
    """C41: no 0600 files, no temporary left behind, nothing above the folder."""
    old = os.umask(0o027)
    try:
        save_one(tmp_path / "out", 1)
    finally:
        os.umask(old)
    for file in files_of(tmp_path / "out" / "checkpoint-1"):
        assert file.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not list(tmp_path.rglob("*.tmp"))
    for path in ("../x", "a/../../x", "/etc/passwd", "a//b", "a\\b", "c:x"):
        with pytest.raises(CorruptCheckpoint, match="leads out of"):
            LocalFolder(tmp_path).get(path)


def test_two_jobs_on_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused while the first lives; a dead one's folder is taken over, at once where its death is known."""
    monkeypatch.setattr(lease, "BEAT", 0.1)
    monkeypatch.setattr(lease, "PATIENCE", 1.0)
    model, optimizer = linear()
    first = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match="this process already has a Checkpointer on"):
        save_one(tmp_path, 1)
    note = tmp_path / ".holdfast" / "run.json"
    monkeypatch.setattr(lease, "_namespace", lambda: "another container")
    with pytest.raises(UsageError, match=rf"another job \(process {os.getpid()} on .+\) is saving to") as caught:
        save_one(tmp_path, 1)
    assert caught.value.exit_code == 2
    first.close()
    assert json.loads(note.read_text())["released"] is True
    note.write_text(json.dumps(json.loads(note.read_text()) | {"released": False}))  # as a job that was killed leaves it
    start = time.perf_counter()
    save_one(tmp_path, 1)
    assert 0.9 < time.perf_counter() - start < 5
    assert json.loads(note.read_text())["run_sequence"] == 2


def test_who_lost_the_folder_commits_no_more(tmp_path: Path) -> None:
    model, optimizer = linear()
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer)
    note = tmp_path / ".holdfast" / "run.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"nonce": "ffff", "host": "elsewhere"}))
    checkpointer.save(1)
    with pytest.raises(SaveFailed, match=r"was taken over by process \d+ on elsewhere"):
        checkpointer.wait()
    assert not (tmp_path / "checkpoint-1" / "manifest.json").exists()


def test_retention_keeps_the_best(tmp_path: Path) -> None:
    model, optimizer = linear()
    with holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, keep_last=1, keep_best=1) as checkpointer:
        for at, metric in enumerate([0.5, 0.2, float("nan"), 0.9], 1):
            checkpointer.save(at, metric=metric)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


def test_read_back_finds_a_disk_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = _Writer.close

    def close(writer: _Writer, size: int) -> None:
        original(writer, size)
        data = bytearray(writer._path.read_bytes())
        data[-100] ^= 1
        writer._path.write_bytes(data)

    model, optimizer = linear()
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, read_back=True)
    checkpointer.save(1)
    checkpointer.wait()
    monkeypatch.setattr(_Writer, "close", close)
    checkpointer.save(2)
    with pytest.raises(SaveFailed, match="does not read back as it was written: 1 blocks differ, the first is 0"):
        checkpointer.wait()


def test_verify_names_the_tensor(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    storage = LocalFolder(tmp_path)
    assert verify(storage, "checkpoint-1") == []
    shard = next((tmp_path / "checkpoint-1").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (damage,) = verify(storage, "checkpoint-1")
    assert damage.rank == 0
    assert "model.weight" in damage.tensors
    assert "block 0 of checkpoint-1/rank-00000-" in str(damage)
    shard.write_bytes(data[:-1])
    assert f"has {len(data) - 1:,} bytes, its receipt says {len(data):,}" in str(verify(storage, "checkpoint-1")[0])
    with pytest.raises(CheckpointNotFound):
        verify(storage, "checkpoint-9")


# -- faults while saving


def copied(folder: Path, to: Path) -> Path:
    """The checkpoints of a folder without the lease of the run that is on it."""
    return Path(shutil.copytree(folder, to, ignore=shutil.ignore_patterns(".holdfast", to.name)))


class Faulty:
    """Writes that fail with an errno after so many bytes, as a full or broken disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, after: int = 0) -> None:
        self.number, self.left, self.broken = number, after, True
        original = _Writer.write

        def write(writer: _Writer, data: memoryview) -> None:
            if self.broken and self.left < len(data):
                original(writer, data[: self.left])
                raise OSError(self.number, os.strerror(self.number))
            self.left -= len(data)
            original(writer, data)

        monkeypatch.setattr(_Writer, "write", write)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("after", [0, 4096])
def test_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, after: int) -> None:
    """C11: the save fails with the cause, its files are removed, the older checkpoint stays, the next save works."""
    older = save_one(tmp_path, 1)
    model, optimizer = linear(seed=4)
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer)
    faulty = Faulty(monkeypatch, number, after)
    checkpointer.save(2)
    with pytest.raises(SaveFailed, match=rf"step 2 failed on rank 0 \(.+\) in phase 'write': .*{os.strerror(number)}"):
        checkpointer.wait()
    assert files_of(tmp_path / "checkpoint-2") == []
    faulty.broken = False
    assert equal(resumed(copied(tmp_path, tmp_path / "copy"))[1], older)
    step(model, optimizer)
    checkpointer.save(3)
    checkpointer.wait()
    checkpointer.close()
    assert [s.state for s in checkpointer.saves] == ["failed", "complete"]
    assert equal(resumed(tmp_path)[1], model.state_dict())


def test_too_little_room_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = linear()
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    checkpointer.save(1)
    with pytest.raises(SaveFailed, match=r"bytes are missing for a file of"):
        checkpointer.wait()
    assert files_of(tmp_path / "checkpoint-1") == []


# -- overlap


@pytest.fixture
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A copy of the state that goes on until the event is set."""
    go = threading.Event()
    original = Staging.enqueue

    def enqueue(self: Staging, names: Any, tensors: Any, begun: Any) -> Any:
        if threading.current_thread().name == "holdfast-service":
            go.wait(10)
        return original(self, names, tensors, begun)

    monkeypatch.setattr(Staging, "enqueue", enqueue)
    yield go
    go.set()


def test_the_next_step_waits_for_the_copy_and_changes_nothing_of_it(tmp_path: Path, slow_copy: threading.Event) -> None:
    model, optimizer = linear()
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, overlap=True)
    step(model, optimizer)
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    checkpointer.save(1)
    model(torch.ones(1, 3)).sum().backward()  # forward and backward go on beside the copy
    assert not checkpointer.saves[0].finished.is_set()
    threading.Timer(0.3, slow_copy.set).start()
    start = time.perf_counter()
    optimizer.step()
    assert time.perf_counter() - start > 0.25
    assert not equal(model.state_dict(), expected)
    checkpointer.close()
    assert checkpointer.saves[0].blocked_s > 0.25
    assert equal(resumed(tmp_path)[1], expected)


def test_mutating_waits_too_and_forbids_saving(tmp_path: Path, slow_copy: threading.Event) -> None:
    model, optimizer = linear()
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, overlap=True)
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    checkpointer.save(1)
    threading.Timer(0.3, slow_copy.set).start()
    with checkpointer.mutating():
        model.weight.data.zero_()
        with pytest.raises(UsageError, match=r"inside `with checkpointer\.mutating"):
            checkpointer.save(2)
    checkpointer.close()
    assert equal(resumed(tmp_path)[1], expected)


def test_a_copy_past_its_deadline_is_void(tmp_path: Path, slow_copy: threading.Event) -> None:
    """The training goes on, the save is reported as failed, and what was half copied is never completed."""
    model, optimizer = linear()
    checkpointer = holdfast.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, overlap=True, deadlines=Deadlines(capture=0.2)
    )
    checkpointer.save(1)
    start = time.perf_counter()
    step(model, optimizer)
    assert 0.15 < time.perf_counter() - start < 5
    slow_copy.set()
    with pytest.raises(SaveFailed, match="took longer than its deadline"):
        checkpointer.wait()
    assert not (tmp_path / "checkpoint-1" / "manifest.json").exists()


def test_an_optimizer_that_bypasses_its_hooks_is_refused(tmp_path: Path) -> None:
    model, optimizer = linear()
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, overlap=True)
    model(torch.ones(1, 3)).sum().backward()
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # as one fused into the backward does
    with pytest.raises(UsageError, match=r"has made 1 steps, and its step hooks have seen 0.*overlap=False"):
        checkpointer.save(1)


def test_loading_an_optimizer_is_no_bypass(tmp_path: Path) -> None:
    model, optimizer = linear()
    for _ in range(3):
        step(model, optimizer)
    state = optimizer.state_dict()
    model, optimizer = linear()
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer, overlap=True)
    optimizer.load_state_dict(state)
    step(model, optimizer)
    checkpointer.save(4)
    checkpointer.close()


def test_hooks_leave_with_the_checkpointer(tmp_path: Path) -> None:
    model, optimizer = linear()
    hooks = lambda: len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)  # noqa: E731
    before = hooks()
    checkpointer = holdfast.Checkpointer(tmp_path, model=model, optimizer=optimizer)
    assert hooks() > before
    checkpointer.close()
    checkpointer.close()
    assert hooks() == before
    with pytest.raises(UsageError, match="after close"):
        checkpointer.save(1)


def test_manifests_hold_no_times_and_no_hosts(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    manifest = json.loads((tmp_path / "checkpoint-1" / "manifest.json").read_text())
    assert sorted(manifest) == [
        "attempt", "format", "layouts", "plain_equal", "receipts", "run_sequence", "save_index", "step", "version", "world_size",
    ]  # fmt: skip
