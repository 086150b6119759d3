"""Folders that accelerate and DCP wrote by themselves: imported offline, resumed on real ranks, equal to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compat import foreign
from compat.foreign import State

from holdfast.engine.importer import import_checkpoint
from holdfast.testing.pool import RankPool


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n]) or found[n].dtype != expected[n].dtype] == []


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_accelerate_under_fsdp(pool: RankPool, tmp_path: Path, version: str, form: str) -> None:
    written: list[State] = pool.run(foreign.write_accelerate, 2, tmp_path / "foreign", version, form)
    imported = import_checkpoint(tmp_path / "foreign", tmp_path / "out")
    assert (imported.step, imported.ranks, imported.left_out) == (3, 2, [])
    same: list[State] = pool.run(foreign.resume, 2, tmp_path / "out")
    for rank in (0, 1):
        assert same[rank].begun_at == 3
        assert same[rank].draws == written[rank].draws
        assert same[rank].lr == written[rank].lr
        assert_equal(same[rank].tensors, written[0].tensors)
