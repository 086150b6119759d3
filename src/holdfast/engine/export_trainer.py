"""What the transformers Trainer looks for beside accelerate's files, so that it goes on from an export of one of its own runs.

    trainer_state.json    steps, epoch, history, callbacks
    scheduler.pt          accelerate's scheduler.bin
    optimizer.pt          accelerate's optimizer.bin, where nothing is sharded
    rng_state[_N].pth     each rank's generators, under its own keys
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.export_dcp import small_value
from holdfast.formats.pickles import load_pickle

TRAINER_STATE = "extra.trainer_state"
"""Where a Trainer's run keeps its own state."""

OWN = "holdfast_"
"""What begins so in that state is not the Trainer's."""

_GENERATORS = {"random_state": "python", "numpy_random_seed": "numpy", "torch_manual_seed": "cpu", "torch_cuda_manual_seed": "cuda"}
"""accelerate's keys, and the Trainer's."""


def write_trainer_files(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Nothing for a checkpoint of another loop; returns lines for people."""
    if TRAINER_STATE not in checkpoint.small(checkpoint.first)["state"]:
        return []
    state: Any = small_value(checkpoint, TRAINER_STATE)
    own = {key: value for key, value in state.items() if not key.startswith(OWN)}
    (folder / "trainer_state.json").write_text(json.dumps(own, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for there, here in (("scheduler.bin", "scheduler.pt"), ("optimizer.bin", "optimizer.pt")):
        if (folder / there).is_file():
            _under_both_names(folder / there, folder / here)
    ranks = checkpoint.manifest.world_size
    for rank in range(ranks):
        generators: Any = load_pickle(folder / f"random_states_{rank}.pkl")
        renamed = {name: generators[key] for key, name in _GENERATORS.items() if key in generators}
        torch.save(renamed, folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"))
    return [f"the Trainer goes on from it with resume_from_checkpoint={folder}"]


def _under_both_names(path: Path, other: Path) -> None:
    try:
        os.link(path, other)
    except OSError:  # a file system without: the Trainer's name, then
        os.replace(path, other)
