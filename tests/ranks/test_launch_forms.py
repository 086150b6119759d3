"""The launchers of others give the ranks of one run, sharded where that was asked for. (`holdfast launch`: test_launch, test_run_scripts.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from holdfast.engine.extract import open_checkpoint

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
# A script that knows nothing of Holdfast, and saves on the main process only.
SCRIPT = r"""
import sys
import torch
from accelerate import Accelerator
accelerator = Accelerator(project_dir="out")
sys.stdout.write(f"{accelerator.process_index} of {accelerator.num_processes}, {accelerator.distributed_type.value}, {sys.argv[1:]}\n")
sys.stdout.flush()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))  # accelerate cannot prepare one without a dot in its names
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(1, 4)).sum())
optimizer.step()
if accelerator.is_main_process:
    accelerator.save_state("out/checkpoint-1")
accelerator.end_training()
"""
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file", "config.yaml", "--main_process_port", "0"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", "2"]


def start(folder: Path, config: str, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.yaml").write_text(config)
    (folder / "script.py").write_text(SCRIPT)
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))
    }
    clean |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=100
    )


def test_accelerate_launch_with_fsdp_on_the_cpu(tmp_path: Path) -> None:
    """Accelerate starts the ranks, but forgets to tell them that they are on the CPU."""
    done = start(tmp_path, FSDP, [*ACCELERATE, "-m", "holdfast", "run", "--cpu_fsdp", "script.py", "--its", "own"])
    assert done.returncode == 0, done.stderr
    assert "0 of 2, FSDP, ['--its', 'own']" in done.stdout
    assert "1 of 2, FSDP, ['--its', 'own']" in done.stdout
    assert open_checkpoint(tmp_path / "out").manifest.world_size == 2


def test_torchrun_without_a_config(tmp_path: Path) -> None:
    done = start(tmp_path, "", [*TORCHRUN, "-m", "holdfast", "run", "--cpu_fsdp", "script.py"])
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "out").manifest.world_size == 2
    assert "0 of 2, MULTI_CPU" in done.stdout
    assert "1 of 2, MULTI_CPU" in done.stdout
    assert "no `distributed_type: FSDP`: no effect" in done.stderr


def test_the_one_process_that_accelerate_starts_for_several_refuses(tmp_path: Path) -> None:
    done = start(tmp_path, MULTI_CPU, [*ACCELERATE, "-m", "holdfast", "run", "script.py"])
    assert done.returncode != 0
    assert "holdfast launch --config_file C" in done.stderr
