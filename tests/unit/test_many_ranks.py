"""What must not grow with the ranks, or only by one request, one name, one look for each of them: for as many as no test can start."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast.core.boxes import Box, Mesh, Placement
from holdfast.core.documents import digest
from holdfast.core.flat import Flat
from holdfast.core.layout import Layout, OptimizerSlot, TensorSpec
from holdfast.core.manifest import Announcement, Manifest, layout_file, rank_file, receipt_file
from holdfast.engine import repair
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.commit import write_manifest
from holdfast.engine.deadlines import CROWD, POLL, poll_of
from holdfast.engine.store import AT_ONCE, LocalStore, SharedStore
from holdfast.engine.watch import beat_of, say_goodbye
from holdfast.errors import UnsupportedState
from holdfast.storage import LocalFolder

MANY = 16_384
ATTEMPT = "5ca1e5ca1e5ca1e5-1"


class Counting(LocalStore):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[int | None] = Counter()

    def look(self, key: str) -> bytes | None:
        self.calls[threading.current_thread().ident] += 1
        return super().look(key)

    def add(self, key: str, amount: int) -> int:
        self.calls[threading.current_thread().ident] += 1
        return super().add(key, amount)


def test_ranks_that_wait_ask_no_more_together_than_a_few_would() -> None:
    for world_size in (2, CROWD, 512, 2816, MANY):
        assert poll_of(0, world_size) == POLL  # one rank's looks are no burden
        assert world_size / poll_of(1, world_size) <= CROWD / POLL + 1e-6
        assert world_size / beat_of(world_size) <= 1024 + 1e-6
    assert poll_of(1, CROWD) == POLL


@pytest.mark.parametrize("rank", [0, 7])
def test_a_goodbye_asks_for_no_other_rank_by_name(rank: int) -> None:
    store = Counting()
    for other in range(MANY):
        if other != rank:
            store.publish(f"goodbye/{other}", b"1")
    LocalStore.add(store, "goodbyes", MANY - 1)
    if rank:
        threading.Timer(0.2, store.publish, ("all gone", b"1")).start()
    begun = time.monotonic()
    say_goodbye(store, rank, MANY, patience=30.0, waits=True)
    assert store.look("all gone") == b"1"
    assert store.calls[threading.current_thread().ident] < 20
    assert LocalStore.add(store, "waiting", 0) == 0
    assert time.monotonic() - begun < 2 * poll_of(1, MANY) + 2


def test_who_is_missing_is_waited_for_by_rank_0_as_long_as_its_heart_beats(caplog: pytest.LogCaptureFixture) -> None:
    store = Counting()
    store.publish("goodbye/1", b"1")
    store.add("goodbyes", 1)
    beating = threading.Event()

    def beat() -> None:
        for number in range(12):
            store.publish("beat/2", b'{"host": "h", "step": %d, "phase": "training", "for_s": 1, "saving": null}' % number)
            time.sleep(0.1)
        beating.set()

    threading.Thread(target=beat).start()
    begun = time.monotonic()
    say_goodbye(store, 0, 3, patience=0.5, waits=True)
    assert beating.is_set()
    assert time.monotonic() - begun > 1.2
    assert "1 others have not said goodbye: rank 2 (h, last seen at step 11" in caplog.text
    assert store.look("all gone") == b"1"


def layout_of(names: Sequence[str], world_size: int, dtype: str = "F32") -> Layout:
    mesh = Mesh((1, world_size), tuple(range(world_size)))
    tensors = {name: TensorSpec(dtype, (world_size, 8), Flat(mesh, 0, 8), 0, OptimizerSlot("", name, "exp_avg")) for name in names}
    return Layout(world_size, tensors, {})


def announce(storage: LocalFolder, layouts: Sequence[str]) -> list[Announcement]:
    for rank in range(len(layouts)):
        for name in (rank_file(rank, ATTEMPT), receipt_file(rank, ATTEMPT)):
            (storage.root / "checkpoint-1" / name).touch()
    return [Announcement(r, ATTEMPT, 1, d, digest(b""), digest(b"%d" % r)) for r, d in enumerate(layouts)]


def test_a_commit_compares_layouts_and_not_ranks(tmp_path: Path) -> None:
    ranks = 4096
    storage = LocalFolder(tmp_path)
    storage.make_folder("checkpoint-1")
    names = [f"t{i}" for i in range(400)]
    # A rank without state in a flat unit does not know of the others'.
    found = [layout_of(names, ranks), layout_of(names[:200], ranks), layout_of(names[:1], ranks, "BF16")]
    for layout in found:
        storage.put(f"checkpoint-1/{layout_file(layout.digest)}", layout.encoded)
    announcements = announce(storage, [found[rank >= 4000].digest for rank in range(ranks)])
    begun = time.perf_counter()
    manifest = write_manifest(storage, "checkpoint-1", announcements, 1, 1)
    assert time.perf_counter() - begun < 5.0  # one look for every tensor and rank takes longer, and a gigabyte
    assert manifest.layouts == tuple(sorted(layout.digest for layout in found[:2]))
    announcements = [*announcements[:-1], Announcement(ranks - 1, ATTEMPT, 1, found[2].digest, digest(b""), digest(b"x"))]
    with pytest.raises(UnsupportedState, match=r"t0 is laid out differently on rank (0|4000|4095) "):
        write_manifest(storage, "checkpoint-1", announcements, 1, 1)


def test_one_writer_is_found_without_the_others() -> None:
    mesh = Mesh((MANY * 8,), tuple(range(MANY * 8)))
    placed = TensorSpec("F32", (MANY * 8, 4), Placement(mesh, (0,)))
    flat = TensorSpec("F32", (MANY * 8, 4), Flat(Mesh((1, MANY * 8), mesh.ranks), 0, 4))
    checkpoint = object.__new__(Checkpoint)
    begun = time.perf_counter()
    for _ in range(1000):
        assert next(checkpoint.writers(placed)) == next(checkpoint.writers(flat)) == 0
    assert time.perf_counter() - begun < 2.0
    assert list(checkpoint.writers(placed, Box((5, 0), (2, 4)))) == [5, 6]


class Reads(LocalFolder):
    read: list[str]

    def get(self, path: str) -> bytes:
        self.read.append(path)
        return super().get(path)


def test_tidying_reads_no_receipt_of_a_complete_checkpoint(tmp_path: Path) -> None:
    storage = Reads(tmp_path)
    storage.read = []
    storage.make_folder("checkpoint-1")
    layout = layout_of(["t"], 8)
    storage.put(f"checkpoint-1/{layout_file(layout.digest)}", layout.encoded)
    write_manifest(storage, "checkpoint-1", announce(storage, [layout.digest] * 8), 1, 1)
    storage.read.clear()
    assert repair.finish(storage, "checkpoint-1") is None
    assert storage.read == ["checkpoint-1/manifest.json"]


def test_the_manifest_has_one_digest_for_each_rank() -> None:
    sizes = {}
    for ranks in (8, MANY):
        every = [Announcement(r, ATTEMPT, 1, digest(b"l"), digest(b""), digest(b"%d" % r)) for r in range(ranks)]
        sizes[ranks] = len(Manifest.of(every, 1, 1).encoded())
    assert (sizes[MANY] - sizes[8]) / (MANY - 8) < 36


@pytest.mark.parametrize("extended", [True, False])
def test_many_keys_are_gathered_in_their_order(extended: bool, tmp_path: Path) -> None:
    store = object.__new__(SharedStore)
    inner = dist.HashStore() if extended else dist.FileStore(str(tmp_path / "store"), 1)
    store._store, store._lock = dist.PrefixStore("p", inner), threading.Lock()  # type: ignore[attr-defined]
    count = AT_ONCE + 5 if extended else 5
    for number in range(count):
        store.publish(f"k/{number}", b"%d" % number)
    assert store.gather([f"k/{number}" for number in range(count)]) == [b"%d" % number for number in range(count)]
    assert store.gather([]) == []
