"""Unmodified scripts under `holdfast run`: they save, validate and export on the main process only, are killed and go on."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from holdfast.engine.extract import open_checkpoint, read_whole

SCRIPTS = Path(__file__).parent.parent / "scripts"
CONFIG = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: {version}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: 'no'
num_machines: 1
num_processes: {ranks}
use_cpu: true
"""


def run(folder: Path, script: str, *arguments: str, own: tuple[str, ...] = (), version: int = 2, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    (folder / "config.yaml").write_text(CONFIG.format(version=version, ranks=ranks))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))}
    clean |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", "HOLDFAST_CPU_FSDP": "1"}
    command = [sys.executable, "-m", "holdfast", "launch", "--config_file", "config.yaml", "run", *own, str(SCRIPTS / script), *arguments]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=120)


def losses(folder: Path, rank: int) -> dict[str, float]:
    return dict(json.loads((folder / f"losses-{rank}.json").read_text()))


def picture_of(state: dict[str, torch.Tensor]) -> float:
    """What the script's validation sees of a model with these weights."""
    model = runpy.run_path(str(SCRIPTS / "main_process_saves.py"))["Denoiser"]()
    if any("lora_" in name for name in state):
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["up", "down"]), model)
    model.load_state_dict(state)
    with torch.no_grad():
        return float(model.eval()(torch.ones(1, 6)).sum())


@pytest.mark.parametrize(("version", "flags"), [(2, ["--state_dict", "--gather_in_hook", "--seedable"]), (1, ["--lora"])])
def test_main_process_only(version: int, flags: list[str], tmp_path: Path) -> None:
    """Saves on rank 0 alone, also at the last step and after deleting; a slow export on rank 0 alone; the same run after a kill,
    or after a signal to one rank.

    The validation on rank 0 is made by all ranks in the run that is left alone, which changes nothing of it.
    """
    steps = ["--max_train_steps", "12", "--limit", "1", "--shuffle", "--plain", *flags]
    own = ("--validate", "all-ranks")
    alone = run(tmp_path, "main_process_saves.py", "--output_dir", "alone", "--slow", "2", *steps, own=own, version=version)
    assert alone.returncode == 0, alone.stderr
    assert "6 saves, 6 complete" in alone.stderr
    assert "skipped" not in alone.stderr
    pictures = [float(line.partition(":")[2]) for line in alone.stdout.splitlines() if line.startswith("validation:")]
    assert len(pictures) == 3
    assert [d.name for d in (tmp_path / "alone").glob("checkpoint*")] == ["checkpoint-12"]
    checkpoint = open_checkpoint(tmp_path / "alone" / "checkpoint-12")
    assert (checkpoint.manifest.world_size, checkpoint.manifest.step) == (2, 12)
    expected = {n.removeprefix("model."): read_whole(checkpoint, n) for n in checkpoint.tensors if n.startswith("model.")}
    plain = torch.load(tmp_path / "alone" / "plain.pt", weights_only=True)
    assert plain.keys() == expected.keys() and all(torch.equal(plain[n], t) for n, t in expected.items())
    assert pictures[-1] == pytest.approx(picture_of(plain), rel=1e-5)
    if "--lora" in flags:
        found = load_file(tmp_path / "alone" / "adapter.safetensors")
        expected = {n.replace(".default", ""): t for n, t in expected.items() if "lora_" in n}
        assert len(found) == 8  # A and B of up and down in two blocks
    else:
        found = load_file(tmp_path / "alone" / "final" / "diffusion_pytorch_model.safetensors")
        whole = torch.load(tmp_path / "alone" / "whole.pt", weights_only=True)
        assert whole.keys() == expected.keys() and all(torch.equal(whole[n], t) for n, t in expected.items())
        assert json.loads((tmp_path / "alone" / "final" / "config.json").read_text())["_class_name"] == "Denoiser"
        assert "the save hook gathering_hook is left before its end: it wants the whole weights" in alone.stderr
        assert not (tmp_path / "alone" / "checkpoint-12" / "gathered.pt").exists()
    assert found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())
    assert (tmp_path / "alone" / "checkpoint-12" / "hook.txt").read_text() == "1 models"

    end = ("--kill_at", "7") if version == 2 else ("--signal_at", "3", "--pause", "0.2")
    ended = run(tmp_path, "main_process_saves.py", "--output_dir", "again", *end, "--kill_rank", "1", *steps, version=version)
    last = open_checkpoint(tmp_path / "again").manifest.step
    if version == 2:
        assert (ended.returncode != 0, last) == (True, 6)
    else:
        assert ended.returncode == 0, ended.stderr
        assert f"stopped by a signal after step {last}" in ended.stderr
        assert 3 < last < 12
        assert (tmp_path / "again" / f"checkpoint-{last}" / "hook.txt").read_text() == "1 models"
        assert not (tmp_path / "again" / "adapter.safetensors").exists()
    resumed = run(tmp_path, "main_process_saves.py", "--output_dir", "again", "--resume_from_checkpoint", "latest", *steps, version=version)
    assert resumed.returncode == 0, resumed.stderr
    assert f"at step {last} in" in resumed.stderr
    assert "skipped log_validation()" in resumed.stderr
    for rank in range(2):
        before, after = losses(tmp_path / "alone", rank), losses(tmp_path / "again", rank)
        assert after == {step: loss for step, loss in before.items() if int(step) > last}
        assert list(after) == [str(s) for s in range(last + 1, 13)]
    again = open_checkpoint(tmp_path / "again" / "checkpoint-12")
    for name in checkpoint.tensors:
        assert torch.equal(read_whole(checkpoint, name), read_whole(again, name)), name


def test_all_ranks_save_and_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """A flattened context x shard mesh with offload, ignored modules and adapters; a name of the script's own around the checkpoint."""
    flags = ["--save_path", "out", "--cp", "2", "--lora"]
    alone = run(tmp_path, "all_ranks_trainer.py", *flags)
    assert alone.returncode == 0, alone.stderr
    assert "3 saves, 3 complete" in alone.stderr
    final = open_checkpoint(tmp_path / "out" / "final" / "accelerator")
    adapter = torch.load(tmp_path / "out" / "final" / "adapter.pt", weights_only=True)
    for name in ("adapter.lora_A.weight", "adapter.lora_B.weight"):
        assert torch.equal(adapter[name], read_whole(final, f"model.{name}"))
    expected = {name: read_whole(final, name) for name in final.tensors}

    part = next((tmp_path / "out" / "step-4" / "accelerator").glob("rank-00001-*.safetensors"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    damaged = run(tmp_path, "all_ranks_trainer.py", *flags, "--resume")
    assert damaged.returncode == 1
    assert "is called unusable-step-4 now: start again" in damaged.stderr
    assert "rank 1" in damaged.stderr
    again = run(tmp_path, "all_ranks_trainer.py", *flags, "--resume")
    assert again.returncode == 0, again.stderr
    assert "resumed at 2" in again.stdout
    final = open_checkpoint(tmp_path / "out" / "final" / "accelerator")
    for name, tensor in expected.items():
        assert torch.equal(tensor, read_whole(final, name)), name


def test_a_rank_that_fails_in_the_middle_of_a_load_is_named_and_nobody_waits(tmp_path: Path) -> None:
    """C03: an object of the script's own raises on rank 1; both ranks end in seconds, and the checkpoint is as it was."""
    assert run(tmp_path, "all_ranks_trainer.py", "--save_path", "out", "--steps", "2").returncode == 0
    folder = tmp_path / "out" / "step-2" / "accelerator"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    begun = time.monotonic()
    failed = run(tmp_path, "all_ranks_trainer.py", "--save_path", "out", "--resume", "--fault", "load")
    assert failed.returncode == 1
    assert time.monotonic() - begun < 60
    assert "ValueError: there is no shard 3 of the data here" in failed.stderr  # rank 1's own
    assert re.search(r"could not be resumed: .*there is no shard 3 of the data here \(rank 1 on ", failed.stderr)  # rank 0's
    assert "resumed at" not in failed.stdout
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
