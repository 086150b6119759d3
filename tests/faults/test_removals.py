"""The removal of an old checkpoint, killed at each of its operations: the newer one stays, and the old one never comes back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import holdfast
from holdfast.engine.resume import survey, tidy
from holdfast.storage import LocalFolder
from holdfast.testing.faults import Fault, FaultyFolder
from holdfast.testing.pool import Died

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

REMOVAL = [
    "put removed", "remove manifest", "remove rank-00000", "remove layout", "remove adapter", "remove_folder adapter",
    "remove trainer_state", "remove removed", "remove_folder checkpoint-1",
]  # fmt: skip
"""What a removal does, in groups; files that somebody else has put beside ours go, too."""


def save_twice(folder: Path, operation: str, action: Any) -> list[str]:
    """The second save removes the first, and the process is killed meanwhile."""
    model = torch.nn.Linear(3, 3)
    storage = FaultyFolder(folder, Fault("checkpoint-1", operation, action))
    with holdfast.Checkpointer(storage, model=model, keep_last=1) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        (folder / "checkpoint-1" / "trainer_state.json").write_text("{}")
        (folder / "checkpoint-1" / "adapter").mkdir()
        checkpointer.save(2)
    return storage.operations


def test_what_a_removal_does(pool: RankPool, tmp_path: Path) -> None:
    """The tests below strike all of it; the mark comes first and goes when nothing else is left."""
    (done,) = pool.run(save_twice, 1, tmp_path, "nothing", "fail")
    removal = done[done.index("put manifest.json") + 1 :]
    assert [next(r for r in REMOVAL if name.startswith(r)) for name in removal][:2] == REMOVAL[:2]
    assert [next(r for r in REMOVAL if name.startswith(r)) for name in removal][-2:] == REMOVAL[-2:]
    assert {next(r for r in REMOVAL if name.startswith(r)) for name in removal} == set(REMOVAL)
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("operation", REMOVAL)
def test_killed_after_it(pool: RankPool, tmp_path: Path, operation: str) -> None:
    assert pool.run(save_twice, 1, tmp_path, operation, "kill after", expect_death=True) == [Died(9)]
    storage = LocalFolder(tmp_path)
    tidy(storage)
    # After the mark alone it still has its manifest, and counts.
    left = ["checkpoint-2", "checkpoint-1"] if operation == "put removed" else ["checkpoint-2"]
    assert [c.folder for c in survey(storage).complete] == left
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == sorted(left)
