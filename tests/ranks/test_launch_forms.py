"""The launchers of others give the ranks of one run, sharded where that was asked for. (`holdfast launch`: test_launch.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FSDP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: true
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: true
"""
MULTI_CPU = """\
distributed_type: MULTI_CPU
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""
# What a recipe does first, in place of `python -m holdfast` on the ranks.
RANK = r"""
import sys
from holdfast.errors import HoldfastError
from holdfast.integrations import cpu_ranks
try:
    cpu_ranks.join_without_accelerator()
    if cpu_ranks.requested("--cpu_fsdp" in sys.argv):
        cpu_ranks.enable()
except HoldfastError as error:
    sys.exit(f"refused: {error}")
from accelerate import Accelerator
accelerator = Accelerator()
sys.stdout.write(f"{accelerator.process_index} of {accelerator.num_processes}, {accelerator.distributed_type.value}\n")
sys.stdout.flush()
accelerator.wait_for_everyone()  # or the first to leave closes its connections before the other has made them
accelerator.end_training()
"""
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file", "config.yaml", "--main_process_port", "0"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", "2"]


def start(folder: Path, config: str, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.yaml").write_text(config)
    (folder / "rank.py").write_text(RANK)
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))
    }
    clean |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=100
    )


def test_accelerate_launch_with_fsdp_on_the_cpu(tmp_path: Path) -> None:
    """Accelerate starts the ranks, but forgets to tell them that they are on the CPU."""
    done = start(tmp_path, FSDP, [*ACCELERATE, "rank.py", "--cpu_fsdp"])
    assert done.returncode == 0, done.stderr
    assert "0 of 2, FSDP" in done.stdout
    assert "1 of 2, FSDP" in done.stdout


def test_torchrun_without_a_config(tmp_path: Path) -> None:
    done = start(tmp_path, "", [*TORCHRUN, "rank.py", "--cpu_fsdp"])
    assert done.returncode == 0, done.stderr
    assert "0 of 2, MULTI_CPU" in done.stdout
    assert "1 of 2, MULTI_CPU" in done.stdout
    assert "no `distributed_type: FSDP`: no effect" in done.stderr


def test_the_one_process_that_accelerate_starts_for_several_refuses(tmp_path: Path) -> None:
    done = start(tmp_path, MULTI_CPU, [*ACCELERATE, "rank.py"])
    assert done.returncode != 0
    assert "holdfast launch --config_file C" in done.stderr
