"""A stranger's checkpoint: whatever its documents say, it loads or is refused with a clear error; nothing else happens.

The stranger signs what he wrote: digests and hashes are those of the changed documents. So nothing stands between a number in
them and the code that uses it but the checks of that code. It runs with half a gigabyte of memory to spare.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compat import make_fixture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.core.documents import digest
from holdfast.core.manifest import BLOCK
from holdfast.engine import restore
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.collect import Registered
from holdfast.engine.plan import STATE_TENSOR
from holdfast.engine.verify import verify
from holdfast.errors import HoldfastError, IncompatibleCheckpoint, NoUsableCheckpoint
from holdfast.storage import LocalFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

ROOM = 512 << 20
V1 = Path(__file__).parents[1] / "compat" / "v1"


class Memory(LocalFolder):
    """A folder of a checkpoint's files that are nowhere but here; it notes what is asked for beside them."""

    def __init__(self, folder: str, files: dict[str, bytes]) -> None:
        super().__init__("/nowhere")
        self.folder, self.files, self.strange = folder, files, set[str]()

    def get(self, path: str) -> bytes:
        folder, _, name = path.partition("/")
        if folder != self.folder or name not in self.files:
            self.strange.add(path)
            raise FileNotFoundError(path)
        return self.files[name]

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        data = self.get(path)[offset : offset + len(target)]
        if len(data) < len(target):
            raise EOFError(path)
        target[:] = data

    @contextmanager
    def opened(self, path: str) -> Iterator[None]:
        self.get(path)
        yield

    def size(self, path: str) -> int:
        return len(self.get(path))

    def names(self, folder: str) -> list[str]:
        return list(self.files)


PARTS = ("manifest", "receipt", "layout", "header", "state")
"""The documents of a checkpoint; of those that each rank has, rank 0's."""


class Signed:
    """A checkpoint taken apart: its documents as they are, and a way to put it together of changed ones with good digests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.name
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        manifest = json.loads(files["manifest.json"])
        self.layout_name = next(name for name in files if name.startswith("layout-"))
        self.receipt_name = f"rank-00000-{manifest['attempt']}.json"
        self.file_name = f"rank-00000-{manifest['attempt']}.safetensors"
        file = files[self.file_name]
        length = 8 + int.from_bytes(file[:8], "little")
        header, self.data = json.loads(file[8:length]), file[length:]
        self.span = slice(*header[STATE_TENSOR]["data_offsets"])
        self.documents: dict[str, Any] = {
            "manifest": manifest,
            "receipt": json.loads(files[self.receipt_name]),
            "layout": json.loads(files[self.layout_name]),
            "header": header,
            "state": json.loads(self.data[self.span]),
        }
        self.files = files

    def put_together(self, changed: str, text: bytes) -> Memory:
        """The document `changed` is `text`; every digest is right, but those in that document itself."""
        texts = {part: json.dumps(document).encode() for part, document in self.documents.items()} | {changed: text}
        files, data = dict(self.files), self.data
        if changed == "state":
            size = self.span.stop - self.span.start
            data = data[: self.span.start] + text.ljust(size)[:size] + data[self.span.stop :]
        header = texts["header"].ljust(-(-(8 + len(texts["header"])) // 4096) * 4096 - 8)
        files[self.file_name] = file = len(header).to_bytes(8, "little") + header + data
        layouts = [digest(texts["layout"])]
        files[f"layout-{layouts[0]}.json"] = texts["layout"]
        receipts = []
        for rank in range(self.documents["manifest"]["world_size"]):
            name = self.receipt_name.replace("rank-00000", f"rank-{rank:05d}")
            receipt = json.loads(files[name]) | {"layout": layouts[0]}
            if rank == 0:
                blocks = [digest(file[i : i + BLOCK]) for i in range(0, len(file), BLOCK)]
                receipt |= {"size": len(file), "blocks": blocks}
            files[name] = text if (rank, changed) == (0, "receipt") else json.dumps(receipt).encode()
            receipts.append(digest(files[name]))
        manifest = self.documents["manifest"] | {"layouts": layouts, "receipts": receipts}
        files["manifest.json"] = text if changed == "manifest" else json.dumps(manifest).encode()
        return Memory(self.folder, files)


NESTED: Any = [1]
for _ in range(300):
    NESTED = [NESTED]
VALUES = [
    "../../etc/passwd", "/etc/passwd", "..", "", "a\0b", "x" * 5000, "model.0.weight", "F64", "0" * 32, "nan", "Infinity",
    -1, 0, 1, 3, 255, 1 << 31, 1 << 36, (1 << 62) - 1, 1 << 62, 1 << 64, 10**400, -(10**30), 0.5, 1e308, True, None, [], {}, [[]], [{}], {"$": "tuple"},
    {"$": "tensor"}, {"$": "odict", "v": [[1]]}, {"$": "tensor", "v": "nothing"}, [-1], [1 << 40], [1 << 40, 1 << 40], [0] * 70, [0, 1 << 62], NESTED,
]  # fmt: skip
CHANGES = ("set", "set", "set", "add", "remove", "rename", "twice", "no number")


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    found = [path] if path else []
    items = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def change(document: Any, place: tuple[Any, ...], how: str, value: Any) -> bytes:
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    last = place[-1]
    if how == "remove":
        del inner[last]
    elif how == "add" and isinstance(inner, list):
        inner.insert(last, value)
    elif how == "rename" and isinstance(inner, dict):
        inner[value if isinstance(value, str) else f"key {value}"[:50]] = inner.pop(last)
    elif how in ("twice", "no number"):
        inner[last] = "MARK"
        text = json.dumps(copy)
        if how == "twice" and isinstance(inner, dict):
            return text.replace('"MARK"', f"1, {json.dumps(last)}: 2", 1).encode()
        return text.replace('"MARK"', random.Random(str(value)).choice(["NaN", "Infinity", "-Infinity", "1e999"]), 1).encode()
    else:
        inner[last] = value
    return json.dumps(copy).encode()


@contextmanager
def little_memory() -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def load(storage: LocalFolder, folder: str, registered: Registered) -> None:
    plan = restore.match(Checkpoint(storage, folder), registered)
    restore.read(plan)
    restore.install(plan)


def attack(checkpoint: Path, registered: Registered) -> Counter[tuple[str, str]]:
    """How many changes of each document were refused, and with how many it loaded."""
    signed = Signed(checkpoint)
    load(signed.put_together("state", json.dumps(signed.documents["state"]).encode()), signed.folder, registered)
    at = {part: places(signed.documents[part]) for part in PARTS}
    outcomes: Counter[tuple[str, str]] = Counter()

    @settings(max_examples=1200, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(PARTS), st.integers(0, 10**6), st.sampled_from(CHANGES), st.sampled_from(VALUES))
    def try_one(part: str, where: int, how: str, value: Any) -> None:
        storage = signed.put_together(part, change(signed.documents[part], at[part][where % len(at[part])], how, value))
        with suppress(IncompatibleCheckpoint):  # of another version
            verify(storage, signed.folder)
        try:
            load(storage, signed.folder, registered)
        except HoldfastError:
            outcomes[part, "refused"] += 1
        else:
            outcomes[part, "loaded"] += 1
        assert all(path.startswith(f"{signed.folder}/") and path.count("/") == 1 for path in storage.strange), storage.strange

    with little_memory():
        try_one()
    return outcomes


class Own:
    """State with a bit of everything that a tree can hold."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"n": 1, "t": torch.arange(5), "nested": {"a": [1, (2, 3)], "b": b"xyz"}, "c": 1j, "s": {1}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def make(folder: Path, **options: Any) -> holdfast.Checkpointer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return holdfast.Checkpointer(folder, model=model, optimizer=optimizer, extra={"own": Own()}, **options)


def attack_own(folder: Path) -> Counter[tuple[str, str]]:
    with make(folder) as checkpointer:
        checkpointer.save(1)
    return attack(folder / "checkpoint-1", checkpointer._registered)


def attack_another_sharding(folder: Path) -> Counter[tuple[str, str]]:
    """What two ranks of FSDP2 wrote, read by one process."""
    model, optimizer, counters = make_fixture.build(sharded=False)
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer, extra={"counters": counters}) as checkpointer:
        pass
    return attack(V1 / "checkpoint-2", checkpointer._registered)


@pytest.mark.parametrize("attacker", [attack_own, attack_another_sharding])
def test_a_signed_checkpoint_with_anything_in_it(pool: RankPool, tmp_path: Path, attacker: Any) -> None:
    (outcomes,) = pool.run(attacker, 1, tmp_path, timeout=120)
    assert all(outcomes[part, "refused"] > 20 for part in PARTS), outcomes
    assert outcomes["state", "loaded"] > 20, outcomes  # another number in somebody's own state is no fault


def kinds_of_files(folder: Path) -> dict[str, Path]:
    endings = {"manifest": "manifest.json", "layout": "layout-*.json", "receipt": "rank-*.json", "file": "*.safetensors"}
    return {kind: next(folder.glob(pattern)) for kind, pattern in endings.items()}


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a socket", "a folder"])
@pytest.mark.parametrize("which", ["manifest", "layout", "receipt", "file"])
def test_nothing_but_plain_files_is_read(tmp_path: Path, which: str, kind: str) -> None:
    """A link to the very same bytes elsewhere, and what a reader would wait for."""
    with make(tmp_path / "out") as checkpointer:
        checkpointer.save(1)
    victim = kinds_of_files(tmp_path / "out" / "checkpoint-1")[which]
    elsewhere = tmp_path / "elsewhere"
    victim.rename(elsewhere)
    make_special(victim, kind, elsewhere)
    storage = LocalFolder(tmp_path / "out")
    with pytest.raises(HoldfastError, match=rf"{victim.name} of .* is {kind}, and not a file"):
        load(storage, "checkpoint-1", checkpointer._registered)
    assert any(f"is {kind}, and not a file" in str(damage) for damage in verify(storage, "checkpoint-1"))
    before = elsewhere.read_bytes()
    if which == "manifest" and kind != "a folder":  # it is made anew of the receipts, in its place
        with make(tmp_path / "out") as again:
            assert again.resume() == 1
    else:
        with pytest.raises(NoUsableCheckpoint, match=f"is {kind}, and not a file"), make(tmp_path / "out") as again:
            again.resume()
    assert elsewhere.read_bytes() == before


def make_special(path: Path, kind: str, target: Path) -> None:
    if kind == "a link":
        path.symlink_to(target)
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        import socket

        with socket.socket(socket.AF_UNIX) as server:
            here = os.getcwd()
            os.chdir(path.parent)  # a socket's path is short
            try:
                server.bind(path.name)
            finally:
                os.chdir(here)


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "a//b", "a\\b", "c:x", "a\0b", "./a"])
def test_a_name_leads_nowhere_else(tmp_path: Path, path: str) -> None:
    with pytest.raises(HoldfastError, match="leads out of"):
        LocalFolder(tmp_path).get(path)


def test_a_link_to_the_newest_is_no_second_checkpoint(tmp_path: Path) -> None:
    """`latest -> checkpoint-1`: nothing is removed through it, though only one is to be kept; it can be resumed from."""
    out = tmp_path / "out"
    with make(out) as checkpointer:
        checkpointer.save(1)
    (out / "latest").symlink_to("checkpoint-1")
    with make(out, keep_last=1) as checkpointer:
        assert checkpointer.resume("latest") == 1
        checkpointer.save(1)
    assert verify(LocalFolder(out), "checkpoint-1") == []
    with make(out, keep_last=1) as checkpointer:
        checkpointer.save(2)
    assert verify(LocalFolder(out), "checkpoint-2") == []
    assert not (out / "checkpoint-1").exists()


def test_what_a_linked_folder_holds_stays(tmp_path: Path) -> None:
    """A checkpoint that was moved to another disk: it is resumed from, and is nobody's to remove."""
    out, moved = tmp_path / "out", tmp_path / "moved"
    with make(out) as checkpointer:
        checkpointer.save(1)
    shutil.move(out / "checkpoint-1", moved)
    (out / "checkpoint-1").symlink_to(moved)
    before = {path.name: path.read_bytes() for path in moved.iterdir()}
    with make(out, keep_last=1) as checkpointer:
        assert checkpointer.resume() == 1
        checkpointer.save(2)
    assert {path.name: path.read_bytes() for path in moved.iterdir()} == before
    assert sorted(p.name for p in out.glob("check*")) == ["checkpoint-1", "checkpoint-2"]
