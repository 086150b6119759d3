"""Entries are made once in the whole job, found again by content, checked, and made anew where they are damaged."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.errors import CacheDamaged
from holdfast.testing import Died, RankPool
from holdfast.training.cache import Cache, key_of

COUNT = 23  # no multiple of the ranks


def wanted(count: int = COUNT) -> dict[str, str]:
    return {key_of("words", f"word {number}", "model"): f"word {number}" for number in range(count)}


class Encoder:
    """Counts what it is asked for; `die_at` ends the process there."""

    def __init__(self, die_at: int | None = None, pause: float = 0.0) -> None:
        self.opened, self.seen, self.die_at, self.pause = 0, [], die_at, pause

    def __call__(self) -> Any:
        self.opened += 1
        return self.encode

    def encode(self, word: str) -> dict[str, torch.Tensor]:
        if len(self.seen) == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(word)
        time.sleep(self.pause)
        values = torch.arange(3.0) + len(word)
        return {"sequence": values.to(torch.bfloat16), "pooled": torch.tensor(float(word.split()[1]))}


def prepare(folder: str, die: bool = False, in_step: bool = False) -> dict[str, Any]:
    rank = dist.get_rank()
    slow = rank == 0  # it hosts the store, so it dies last
    encoder = Encoder(die_at=(8 if slow else 3) if die else None, pause=0.05 * slow)
    cache = Cache(Path(folder), "words")
    made = cache.prepare(wanted(), encoder, in_step=in_step)
    read = [cache[key]["pooled"].item() for key in wanted()]
    return {"made": made, "seen": encoder.seen, "opened": encoder.opened, "read": read}


@pytest.mark.parametrize("in_step", [False, True])
def test_each_entry_is_made_once_in_the_whole_job_and_never_again(pool: RankPool, tmp_path: Path, in_step: bool) -> None:
    first = pool.run(prepare, 3, str(tmp_path), in_step=in_step)
    words = [word for result in first for word in result["seen"]]
    assert set(words) == set(wanted().values())
    assert len(words) == (24 if in_step else COUNT)  # in step every rank makes as many
    assert [result["made"] for result in first] == [COUNT] * 3
    assert [result["read"] for result in first] == [[float(n) for n in range(COUNT)]] * 3
    second = pool.run(prepare, 2, str(tmp_path), in_step=in_step)
    assert [(result["made"], result["seen"], result["opened"]) for result in second] == [(0, [], 0)] * 2
    assert second[0]["read"] == first[0]["read"]
    assert not list(tmp_path.rglob("*.new"))


def test_a_killed_preparation_goes_on_where_it_was(pool: RankPool, tmp_path: Path) -> None:
    killed = pool.run(prepare, 2, str(tmp_path), die=True, expect_death=True)
    assert killed == [Died(signal.SIGKILL)] * 2
    there = len(list(tmp_path.rglob("*.safetensors")))
    assert there == 11
    results = pool.run(prepare, 2, str(tmp_path))
    assert sum(len(result["seen"]) for result in results) == COUNT - there
    assert results[0]["made"] == COUNT - there
    assert results[0]["read"] == [float(n) for n in range(COUNT)]


@pytest.mark.parametrize("how", ["flipped", "cut", "emptied"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    encoder, cache = Encoder(), Cache(tmp_path, "words")
    assert cache.prepare(wanted(), encoder) == COUNT
    key = key_of("words", "word 7", "model")
    (path,) = tmp_path.rglob(f"{key}.safetensors")
    whole = path.read_bytes()
    damaged = {"flipped": whole[:-1] + bytes([whole[-1] ^ 1]), "cut": whole[:-3], "emptied": b""}[how]
    path.write_bytes(damaged)
    with pytest.raises(CacheDamaged, match=r"is damaged .* Start again"):
        Cache(tmp_path, "words")[key]
    again = Encoder()
    assert Cache(tmp_path, "words").prepare(wanted(), again) == 1
    assert again.seen == ["word 7"]
    assert f"{path} is damaged" in caplog.text
    assert path.read_bytes() == whole


def test_other_settings_and_content_are_other_entries(tmp_path: Path) -> None:
    keys = {key_of("latents", content, settings) for content in ("a", "b") for settings in ({"dtype": "bf16"}, {"dtype": "fp32"})}
    assert len(keys) == 4
    assert key_of("a", ["b"]) == key_of("a", ("b",))


def own_disks(folder: str) -> int:
    """Ranks 0 and 1 share a disk, rank 2 has its own."""
    rank = dist.get_rank()
    encoder = Encoder()
    cache = Cache(Path(folder) / ("a" if rank < 2 else "b"), "words")
    cache.prepare(wanted(), encoder)
    assert [cache[key]["pooled"].item() for key in wanted()] == [float(n) for n in range(COUNT)]
    return len(encoder.seen)


def test_a_node_with_a_disk_of_its_own_makes_all_for_itself(pool: RankPool, tmp_path: Path) -> None:
    seen = pool.run(own_disks, 3, str(tmp_path))
    assert seen[0] + seen[1] == COUNT == seen[2]
