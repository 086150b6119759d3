"""Machines without a shared file system: each keeps the part of its ranks, and no checkpoint counts that one of them lacks."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
import pytest
import torch
import torch.distributed as dist
from jobs import Job, Result, differing
from safetensors import safe_open

import holdfast
from holdfast.cli import main
from holdfast.core.layout import Layout
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.deadlines import Deadlines
from holdfast.engine.verify import verify
from holdfast.errors import CorruptCheckpoint, HoldfastError
from holdfast.storage import LocalFolder
from holdfast.testing.faults import Fault
from holdfast.testing.pool import Died

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

NODES = ("a", "a", "b", "b")


def twice(job: Job) -> list[Result]:
    """The run, and one that goes on from what it has saved."""
    return [jobs.train(job), jobs.train(job)]


def elsewhere(folders: list[Path]) -> list[Result]:
    """What other ranks, under another sharding, load from each folder."""
    return [jobs.train(Job(folder, "fsdp2", stop=2, save_at=())) for folder in folders]


@pytest.mark.parametrize(
    ("sharding", "nodes", "copies"),
    [("ddp", NODES, 2), ("hsdp", NODES, 2), ("fsdp1-hybrid", NODES, 2), ("fsdp1-flat", ("a", "b"), 1)],
)
def test_a_run_goes_on_bit_for_bit_from_what_each_node_has(
    pool: RankPool, tmp_path: Path, sharding: str, nodes: tuple[str, ...], copies: int
) -> None:
    """The files of all nodes together are a checkpoint for any number of ranks; so are those of one that has a copy of everything."""
    job = Job(tmp_path / "apart", sharding, stop=4, save_at=(2,), nodes=nodes)
    runs: list[list[Result]] = pool.run(twice, len(nodes), job)
    for node in "ab":
        names = [p.name for p in (job.folder / node / "checkpoint-2").glob("*.safetensors")]
        assert sorted(int(n[5:10]) for n in names) == [rank for rank, own in enumerate(nodes) if own == node]
        assert verify(LocalFolder(job.folder / node), "checkpoint-2") == []
    manifests = [(job.folder / node / "checkpoint-2" / "manifest.json").read_bytes() for node in "ab"]
    assert manifests[0] == manifests[1]
    assert json.loads(manifests[0])["homes"] == [nodes.index(node) for node in nodes]
    sizes = assert_written(job.folder, copies)
    assert max(sizes) < 2.2 * min(sizes)  # copies on one node share the work

    for uninterrupted, after in runs:
        assert after.begun_at == 2
        assert after.losses == {s: loss for s, loss in uninterrupted.losses.items() if s > 2}
        assert differing(after.final, uninterrupted.final) == []
        assert after.collectives == 0

    together = tmp_path / "together"
    for node in "ab":
        shutil.copytree(job.folder / node / "checkpoint-2", together / "checkpoint-2", dirs_exist_ok=True)
    assert verify(LocalFolder(together), "checkpoint-2") == []
    folders = [together, *([job.folder / "b"] if copies == 2 else [])]
    for results in pool.run(elsewhere, 3, folders):
        for result in results:
            assert result.begun_at == 2
            assert differing(result.loaded, runs[0][1].loaded) == []


def assert_written(folder: Path, times: int) -> list[int]:
    """Each tensor of the model is written so many times over all folders; returns the elements in each file."""
    elements: Counter[str] = Counter()
    sizes = []
    for file in sorted(folder.glob("*/checkpoint-2/*.safetensors")):
        with safe_open(file, "pt") as stored:
            mine = {name: stored.get_tensor(name).numel() for name in stored.keys() if name.startswith("model.")}  # noqa: SIM118
        sizes.append(sum(mine.values()))
        elements.update(mine)
    layout = Layout.parse(next(folder.glob("*/checkpoint-2/layout-*.json")).read_bytes(), "")
    for name, spec in layout.tensors.items():
        if spec.shape is not None and name.startswith("model."):
            assert elements[name] == times * prod(spec.shape), name
    return sizes


def resumes(runs: list[tuple[Path, tuple[str, ...]]]) -> list[str]:
    """For each: the step that a run on these folders begins at, or why it does not."""
    told = []
    for folder, nodes in runs:
        root = folder / nodes[dist.get_rank()]
        root.mkdir(exist_ok=True)
        model = jobs.build("fsdp2")
        optimizer = jobs.make_optimizer("adamw", model)
        objects: dict[str, Any] = {
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
            "dataloader": holdfast.DataLoader(jobs.Numbers(), batch_size=2, seed=3),
            "extra": {"counters": {}},
        }
        with holdfast.Checkpointer(root, model=model, optimizer=optimizer, **objects, deadlines=Job(folder).deadlines) as checkpointer:
            try:
                told.append(str(checkpointer.resume()))
            except HoldfastError as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


def test_what_does_not_fit_is_named_on_all_ranks_and_nothing_starts_over(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ("a", "a", "b")
    pool.run(jobs.train, 3, Job(tmp_path / "out", "fsdp2", stop=4, save_at=(2, 4), nodes=nodes))
    shutil.copytree(tmp_path / "out", tmp_path / "older")
    shutil.rmtree(tmp_path / "older" / "a" / "checkpoint-4")
    runs = [(tmp_path / "out", ("b", "b", "a")), (tmp_path / "out", ("a", "a", "empty")), (tmp_path / "older", nodes)]
    for moved, unmounted, older in pool.run(resumes, 3, runs):
        # Ranks on other machines than before.
        assert moved.startswith("NoUsableCheckpoint: ")
        assert "checkpoint-4 has the files of rank 2 of 3, and those of ranks 0 and 1 were written into another folder" in moved
        assert "start the ranks on the machines that they ran on, or copy the files of all folders into each" in moved
        # C29: a disk that is not mounted: the folder is there, and empty.
        assert unmounted.startswith("NoUsableCheckpoint: ")
        assert "checkpoint-4 is not complete in the folder of rank 2 (it is in that of rank 0; the ranks see 2 folders)" in unmounted
        # One machine's disk is newer: the newest that all have.
        assert older == "2"
    with pytest.raises(CorruptCheckpoint, match=r"has the files of ranks 0 and 1 of 3, and those of rank 2 were"):
        Checkpoint(LocalFolder(tmp_path / "out" / "a"), "checkpoint-2").receipt(2)

    # Each part is verified by itself, and what a folder should have and has not is missed.
    assert main(["verify", str(tmp_path / "out" / "b")]) == 0
    assert "whole   checkpoint-4: what rank 2 of 3 wrote; the others wrote into other folders" in capsys.readouterr().out
    next((tmp_path / "out" / "a" / "checkpoint-4").glob("rank-00001-*.json")).unlink()
    assert main(["verify", str(tmp_path / "out" / "a" / "checkpoint-4")]) == 1
    assert "rank-00001-" in capsys.readouterr().out
    for file in (tmp_path / "out" / "b" / "checkpoint-4").glob("rank-*"):
        file.unlink()
    assert main(["verify", str(tmp_path / "out" / "b" / "checkpoint-4")]) == 1
    assert "has a manifest.json, and the files of no rank" in capsys.readouterr().out


@pytest.fixture(scope="module")
def whole(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    results: list[Result] = pool.run(jobs.train, 3, Job(tmp_path_factory.mktemp("whole"), "fsdp2", stop=5, save_at=(2, 4)))
    return results


@pytest.mark.parametrize(
    ("who", "action", "operation", "expected"),
    [
        (1, "kill after", "put manifest", 4),
        (0, "kill before", "put manifest", 4),
        (2, "kill before", "put rank", 2),
    ],
)
def test_killed_while_the_folders_are_completed(
    pool: RankPool, tmp_path: Path, whole: list[Result], capsys: pytest.CaptureFixture[str], who: int, action: Any, operation: str, expected: int
) -> None:
    """The manifest is in one folder, or in none: with all receipts the next run completes it, else its files go everywhere."""
    job = Job(
        tmp_path / "out", "fsdp2", stop=5, save_at=(2, 4), settle=(2,), nodes=("a", "b", "b"),
        faults={who: Fault("checkpoint-4", operation, action)}, deadlines=Deadlines(commit=4, goodbye=1),
    )  # fmt: skip
    assert pool.run(jobs.survive, 3, job, expect_death=True)[who] == Died(9)
    if expected == 4:  # one folder alone cannot tell, and leaves it as it is
        assert main(["repair", str(job.folder / "a")]) == 0
        assert "left checkpoint-4 as it is: a part of a save into several folders" in capsys.readouterr().out
    resumed: list[Result] = pool.run(jobs.train, 3, replace(job, faults={}, deadlines=Job(tmp_path).deadlines))
    for after, uninterrupted in zip(resumed, whole, strict=True):
        assert after.begun_at == expected
        assert after.losses == {s: loss for s, loss in uninterrupted.losses.items() if s > expected}
        assert differing(after.final, uninterrupted.final) == []
    manifests = [(job.folder / node / "checkpoint-4" / "manifest.json").read_bytes() for node in "ab"]
    assert manifests[0] == manifests[1]
    left = [p.name for node in "ab" for p in (job.folder / node / "checkpoint-4").glob("rank-*.json")]
    assert len({name[11:] for name in left}) == 1  # of one attempt
    assert len(left) == 3


def test_a_disk_that_fails_on_one_node_fails_the_save_on_all(pool: RankPool, tmp_path: Path) -> None:
    """The manifest cannot be put into one folder; the next save is complete in both, and old ones go from both."""
    fault = {1: Fault("checkpoint-4", "put manifest", "fail")}
    job = Job(tmp_path, "ddp", stop=7, save_at=(2, 4, 6), settle=(2,), keep_last=1, nodes=("a", "b"), faults=fault)
    for result in pool.run(jobs.train, 2, job):
        assert [(step, state) for step, state, _ in result.saves] == [(2, "complete"), (4, "failed"), (6, "complete")]
        assert "the save of step 4 failed on rank 1 (" in result.failures[0]
        assert "in phase 'commit': OSError: [Errno 5]" in result.failures[0]
    for node in "ab":
        assert (tmp_path / node / "checkpoint-6" / "manifest.json").exists()
        assert not list((tmp_path / node).glob("checkpoint-[24]/manifest.json"))
