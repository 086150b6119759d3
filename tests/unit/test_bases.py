"""Frozen weights that are named, in one process: what is believed of them, how their base is found again, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import holdfast
from holdfast.core.documents import canonical, digest
from holdfast.core.layout import BaseFile, Layout
from holdfast.core.manifest import BaseNote, Receipt, layout_file
from holdfast.engine import digests
from holdfast.engine.base import note_of
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.export import Request, export_checkpoint
from holdfast.engine.extract import read_whole
from holdfast.engine.fingerprint import DEVICE, HOST, ROW, fingerprints
from holdfast.engine.verify import verify
from holdfast.errors import IncompatibleCheckpoint, UsageError
from holdfast.storage import LocalFolder

WIDTH = 16


class Net(nn.Module):
    """A frozen body with a persistent buffer, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.body.register_buffer("scale", torch.ones(WIDTH))
        self.body.requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.adapter(self.body(x.to(self.body.weight.dtype)).float() * self.body.scale)
        return y


def make_base(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {"weight": torch.randn(WIDTH, WIDTH, generator=generator), "bias": torch.randn(WIDTH, generator=generator),
               "scale": torch.rand(WIDTH, generator=generator)}  # fmt: skip
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


def from_base(folder: Path | None, dtype: torch.dtype | None = None) -> Net:
    torch.manual_seed(5)
    net = Net()
    if folder is not None:
        holdfast.load_pretrained(net.body, folder, dtype=dtype)
    return net


def run(out: Path, net: Net, save: bool, change: Callable[[Net], None] | None = None, **options: Any) -> int:
    optimizer = torch.optim.AdamW(net.adapter.parameters(), lr=0.1)
    with holdfast.Checkpointer(out, model=net, optimizer=optimizer, **options) as checkpointer:
        if not save:
            return checkpointer.resume()
        net(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        if change is not None:
            change(net)
        checkpointer.save(1)
    return 1


def written(out: Path) -> set[str]:
    header = Checkpoint(LocalFolder(out), "checkpoint-1").header(0)
    return {name.removeprefix("model.") for name in header if name.startswith("model.")}


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# -- what is named


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_loaded_is_named_in_the_dtype_it_has(tmp_path: Path, base: Path, dtype: torch.dtype | None, overlap: bool) -> None:
    net = from_base(base, dtype)
    assert net.body.weight.dtype == (dtype or torch.float32)
    run(tmp_path / "out", net, save=True, overlap=overlap)
    assert written(tmp_path / "out") == {"adapter.weight"}
    again = from_base(base, dtype)
    assert run(tmp_path / "out", again, save=False) == 1
    assert same(net, again)
    blank = from_base(None)  # nothing is known of where it is from: it is read from the folder that was noted
    blank.body.to(dtype)
    assert run(tmp_path / "out", blank, save=False) == 1
    assert same(net, blank)


CHANGES: dict[str, tuple[Callable[[Net], None], set[str]]] = {
    "in place": (lambda net: net.body.bias.data.mul_(2), {"body.bias"}),
    "one number": (lambda net: net.body.weight.data.view(-1)[77:78].neg_(), {"body.weight"}),
    "replaced": (lambda net: setattr(net.body, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)), {"body.weight"}),
    "data": (lambda net: setattr(net.body.weight, "data", torch.ones(WIDTH, WIDTH)), {"body.weight"}),
    "a buffer": (lambda net: net.body.scale.zero_(), {"body.scale"}),
    "unfrozen": (lambda net: net.body.requires_grad_(True), {"body.weight", "body.bias"}),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_since_is_written(tmp_path: Path, base: Path, change: str) -> None:
    net = from_base(base)
    run(tmp_path / "out", net, save=True, change=CHANGES[change][0])
    assert written(tmp_path / "out") == {"adapter.weight"} | CHANGES[change][1]
    again = from_base(base)
    run(tmp_path / "out", again, save=False)
    assert same(net, again)


def test_a_claim_is_believed_as_far_as_it_is_true(tmp_path: Path, base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    save_file({f"body.{name}": value for name, value in tensors.items()}, base / "model.safetensors")
    net = from_base(None)
    net.body.load_state_dict(tensors)
    run(tmp_path / "a", net, save=True, base=base)
    assert written(tmp_path / "a") == {"adapter.weight"}
    net.body.bias.data[3] += 1e-6
    run(tmp_path / "b", net, save=True, base=base)
    assert written(tmp_path / "b") == {"adapter.weight", "body.bias"}
    unclaimed = from_base(None)
    unclaimed.body.load_state_dict(tensors)
    run(tmp_path / "c", unclaimed, save=True)
    assert written(tmp_path / "c") == {"adapter.weight", "body.weight", "body.bias", "body.scale"}
    for wrong, message in (({"x": base}, "there is no such model"), (7, "is a int, should be the folder")):
        with pytest.raises(UsageError, match=message):
            run(tmp_path / "d", net, save=True, base=wrong)
    other = tmp_path / "other"
    other.mkdir()
    save_file({"nothing.of.it": torch.ones(2)}, other / "model.safetensors")
    with pytest.raises(UsageError, match="has no tensor named like one of the Net"):
        run(tmp_path / "d", net, save=True, base=other)


def test_without_its_folder_a_base_is_copied(tmp_path: Path, base: Path) -> None:
    net = from_base(base)
    shutil.rmtree(base)
    out = tmp_path / "out"
    with holdfast.Checkpointer(out, model=net) as checkpointer:
        for thread in threading.enumerate():
            if thread.name == "holdfast-digests":  # until it is known that there will be no digest
                thread.join(10)
        checkpointer.save(1)
    assert written(out) == {"adapter.weight", "body.weight", "body.bias", "body.scale"}
    blank = from_base(None)
    assert run_model(out, blank) == 1
    assert same(net, blank)


def run_model(out: Path, net: Net) -> int:
    with holdfast.Checkpointer(out, model=net) as checkpointer:
        return checkpointer.resume()


# -- where the base is found again


def test_another_base_is_refused_before_anything_is_touched(tmp_path: Path, base: Path) -> None:
    run(tmp_path / "out", from_base(base), save=True)
    other = make_base(tmp_path / "other", seed=1)
    net = from_base(other)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(IncompatibleCheckpoint, match="rests on another base than the model") as refused:
        run(tmp_path / "out", net, save=False)
    assert str(base) in str(refused.value) and str(other) in str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_same_content_elsewhere_will_do(tmp_path: Path, base: Path) -> None:
    net = from_base(base)
    run(tmp_path / "out", net, save=True)
    moved = tmp_path / "moved"
    base.rename(moved)
    again = from_base(moved)
    assert run(tmp_path / "out", again, save=False) == 1
    assert same(net, again)
    with pytest.raises(IncompatibleCheckpoint, match=r"is not there.*Give the folder of that base"):
        run(tmp_path / "out", from_base(None), save=False)


def test_no_note_is_followed_to_what_is_not_the_file(tmp_path: Path, base: Path) -> None:
    """A stranger's checkpoint may note any path: a pipe, which would never end, is not even opened."""
    run(tmp_path / "out", from_base(base), save=True)
    trap = tmp_path / "trap"
    trap.mkdir()
    os.mkfifo(trap / "model.safetensors")
    checkpoint = Checkpoint(LocalFolder(tmp_path / "out"), "checkpoint-1")
    receipt = checkpoint.receipt(0)
    assert receipt.bases == (BaseNote("model", str(base)),)
    forge(checkpoint, Receipt(**{**{f: getattr(receipt, f) for f in receipt.__slots__}, "bases": (BaseNote("model", str(trap)),)}))
    with pytest.raises(IncompatibleCheckpoint, match="is not there"):
        run(tmp_path / "out", from_base(None), save=False)
    (trap / "model.safetensors").unlink()
    shutil.copyfile(make_base(tmp_path / "wrong", 2) / "model.safetensors", trap / "model.safetensors")
    with pytest.raises(IncompatibleCheckpoint, match="is another file"):
        run(tmp_path / "out", from_base(None), save=False)


def forge(checkpoint: Checkpoint, receipt: Receipt) -> None:
    """Put another receipt under a manifest that vouches for it."""
    folder = Path(checkpoint.where)
    next(folder.glob("rank-00000-*.json")).write_bytes(receipt.encoded())
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["receipts"] = [digest(receipt.encoded())]
    (folder / "manifest.json").write_bytes(canonical(manifest))


def test_a_named_tensor_that_is_another_is_corruption(tmp_path: Path, base: Path) -> None:
    run(tmp_path / "out", from_base(base), save=True)
    folder = tmp_path / "out" / "checkpoint-1"
    path = next(folder.glob("layout-*.json"))
    whole = path.read_bytes()
    for tensor, message in (("gone", "does not have"), ("bias", r"is of shape \[16, 16\]")):
        document = json.loads(whole)
        document["tensors"]["model.body.weight"]["base"][1] = tensor
        forged = canonical(document)
        (folder / layout_file(digest(forged))).write_bytes(forged)
        checkpoint = Checkpoint(LocalFolder(tmp_path / "out"), "checkpoint-1")
        checkpoint.layouts = {"": Layout.parse(forged, "it")}
        with pytest.raises(holdfast.errors.CorruptCheckpoint, match=message):
            read_whole(checkpoint, "model.body.weight")


# -- digests


def test_the_hubs_own_digest_is_taken(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its cache a snapshot's files are links to blobs that are called by their content."""
    name = digests.compute_sha256(LocalFolder(base), "model.safetensors")
    repository = tmp_path / "hub" / "models--owner--net"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots" / "abc123" / "body").mkdir(parents=True)
    shutil.move(base / "model.safetensors", repository / "blobs" / name)
    (repository / "snapshots" / "abc123" / "body" / "model.safetensors").symlink_to(repository / "blobs" / name)
    monkeypatch.setattr(digests, "compute_sha256", None)
    folder = repository / "snapshots" / "abc123" / "body"
    assert digests.sha256_of(LocalFolder(folder), "model.safetensors") == name
    assert note_of("model", LocalFolder(folder)) == BaseNote("model", str(folder), "owner/net", "abc123")
    run(tmp_path / "out", from_base(folder), save=True)
    checkpoint = Checkpoint(LocalFolder(tmp_path / "out"), "checkpoint-1")
    assert checkpoint.bases == [BaseFile("model.safetensors", (repository / "blobs" / name).stat().st_size, name)]
    assert "owner/net at revision abc123" in checkpoint.base_files.noted


def test_a_digest_is_computed_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, real, calls = LocalFolder(base), digests.compute_sha256, []

    def counted(storage: Any, path: str) -> str:
        calls.append(path)
        return real(storage, path)

    monkeypatch.setattr(digests, "compute_sha256", counted)
    first = digests.sha256_of(storage, "model.safetensors")
    assert [digests.sha256_of(storage, "model.safetensors") for _ in range(2)] == [first, first] and len(calls) == 1
    data = bytearray((base / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (base / "model.safetensors").write_bytes(data)
    assert digests.sha256_of(storage, "model.safetensors") != first and len(calls) == 2


# -- verify and export


def test_verify_reads_the_base_too(tmp_path: Path, base: Path) -> None:
    run(tmp_path / "out", from_base(base), save=True)
    storage, path = LocalFolder(tmp_path / "out"), base / "model.safetensors"
    assert verify(storage, "checkpoint-1") == []
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # size and time are as they were: the kept digest says nothing
    found = verify(storage, "checkpoint-1")
    assert ["is not what it was" in str(damage) for damage in found] == [True]
    assert found[0].tensors == ("model.body.bias", "model.body.scale", "model.body.weight")
    path.unlink()
    assert ["was not found" in str(damage) for damage in verify(storage, "checkpoint-1")] == [True]


def test_exports_read_the_base_where_it_is(tmp_path: Path, base: Path) -> None:
    net = from_base(base)
    run(tmp_path / "out", net, save=True)
    (base / "config.json").write_text("{}")
    expected = net.state_dict()

    def exported(name: str, given: Path | None) -> dict[str, torch.Tensor]:
        export_checkpoint(Request(tmp_path / "out", tmp_path / name, "accelerate", base=given))
        return load_file(tmp_path / name / "model.safetensors")

    moved = tmp_path / "moved"
    for name, folder in (("noted", None), ("given", moved)):
        found = exported(name, folder)
        assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
        if folder is None:
            base.rename(moved)
    with pytest.raises(IncompatibleCheckpoint, match="--base for an export"):
        exported("no", None)
    assert not (tmp_path / "no").exists()


def test_an_export_takes_the_config_from_where_the_model_was_loaded(tmp_path: Path, llama_folder: Path) -> None:
    """Before the run has ended, and for weights that are all trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(llama_folder))
    holdfast.load_pretrained(model, llama_folder)
    with holdfast.Checkpointer(tmp_path / "run", model=model) as checkpointer:
        checkpointer.save(1)
    export_checkpoint(Request(tmp_path / "run", tmp_path / "model", "transformers"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert same(model, loaded)


# -- fingerprints


@pytest.mark.parametrize("kind", [HOST, DEVICE])
@given(st.integers(1, 3 * ROW * 8 + 5), st.randoms(use_true_random=False))
def test_a_fingerprint_sees_any_byte_and_no_stride(kind: str, length: int, random: Any) -> None:
    data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    before = fingerprints([data], [kind])
    padded = torch.zeros(length + 3, dtype=torch.uint8)
    padded[3:] = data
    assert fingerprints([padded[3:]], [kind]) == before
    assert fingerprints([torch.stack([data, data], 1)[:, 1]], [kind]) == before
    changed = data.clone()
    changed[random.randrange(length)] ^= 1 << random.randrange(8)
    assert fingerprints([changed], [kind]) != before
    assert fingerprints([data ^ 128], [kind]) != before


@pytest.mark.parametrize("kind", [HOST, DEVICE])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex128, torch.bool, torch.float8_e4m3fn])
def test_fingerprints_of_several_are_those_of_each(kind: str, dtype: torch.dtype) -> None:
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape in [(), (0, 3), (2000, 9), (7,)]]
    together = fingerprints(tensors, [kind] * 4)
    assert together == [fingerprints([t], [kind])[0] for t in tensors]
    if dtype.is_floating_point and dtype != torch.float8_e4m3fn:
        assert fingerprints([-(tensors[2] + 1)], [kind]) != fingerprints([tensors[2] + 1], [kind])
        rows = torch.arange(18000.0).view(2000, 9).to(dtype)
        assert fingerprints([rows], [kind]) != fingerprints([rows.flip(0)], [kind])
