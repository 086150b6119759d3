"""Accelerate configs and `holdfast launch`: each mistake has its message before any rank starts; ranks are started as
`accelerate launch` would start them, and their signals and exit codes come through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.integrations import accelerate_config, launch

GOOD = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 2
enable_cpu_affinity: true
use_cpu: true
"""
# As it is found pasted in forums: the block's indentation is lost.
PASTED = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
fsdp_activation_checkpointing: true
fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
fsdp_backward_prefetch: BACKWARD_PRE
fsdp_cpu_ram_efficient_loading: true
fsdp_forward_prefetch: true
fsdp_offload_params: true
fsdp_sharding_strategy: FULL_SHARD
fsdp_state_dict_type: SHARDED_STATE_DICT
fsdp_sync_module_states: true
fsdp_use_orig_params: false
mixed_precision: bf16
num_machines: 1
num_processes: 2
enable_cpu_affinity: true
use_cpu: true
"""
WRITTEN_BY_ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: FluxTransformerBlock,FluxSingleTransformerBlock
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
DYNAMO_AND_PARALLELISM = """\
distributed_type: FSDP
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_use_dynamic: true
fsdp_config:
  version: 2
  reshard_after_forward: true
parallelism_config:
  parallelism_config_dp_shard_size: 2
mixed_precision: fp16
num_machines: 1
num_processes: 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "accelerate.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, **flags: object) -> str:
    with pytest.raises(UsageError) as error:
        launch.plan(write(folder, text), **flags)  # type: ignore[arg-type]
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch):
    """Two CUDA devices, as far as `torch.accelerator` can tell."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


def test_the_pasted_config_is_refused_with_its_lines_and_the_remedy(tmp_path: Path) -> None:
    message = refusal(tmp_path, PASTED, cpu_fsdp=True)
    assert "1 thing(s) to correct" in message
    assert "lines 4-13: these keys belong under `fsdp_config:` (line 3)" in message
    remedy = message.split("Write:\n")[1].split("[HF100]")[0]
    fixed = PASTED.replace(PASTED[PASTED.index("fsdp_config:") : PASTED.index("mixed_precision")], "") + "\n".join(
        line[6:] for line in remedy.splitlines()
    )
    launch.plan(write(tmp_path, fixed), cpu_fsdp=True)  # what the message says to write is right


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("mixed_precision: bf16", "mixed_precison: bf16", "line 10: unknown key `mixed_precison`; did you mean `mixed_precision`?"),
        ("  fsdp_version: 2", "  fsdp_verson: 2", "line 9: unknown key `fsdp_verson` in `fsdp_config`; did you mean `fsdp_version`?"),
        ("num_processes: 2", "num_processes: two", "line 12: `num_processes` is 'two'; it has to be a whole number."),
        ("num_processes: 2", "num_processes: 0", "line 12: the number of ranks is 0"),
        ("use_cpu: true", "use_cpu: maybe", "line 14: `use_cpu` is 'maybe'; it has to be true or false."),
        ("fsdp_version: 2", "fsdp_version: 3", "line 9: `fsdp_version` is 3; it has to be one of 1, 2."),
        ("mixed_precision: bf16", "mixed_precision: bf61", "line 10: `mixed_precision` is 'bf61'"),
        ("distributed_type: FSDP\n", "", "`distributed_type` is missing"),
        ("distributed_type: FSDP", "distributed_type: DEEPSPEED", "accelerate launch --config_file"),
        ("distributed_type: FSDP", "distributed_type: FSPD", "line 2: `distributed_type` is 'FSPD'"),
        ("distributed_type: FSDP", "distributed_type: NO", "line 2: `distributed_type: NO` means one process"),
        ("num_machines: 1", "num_machines: 2", "`main_process_ip` is missing"),
        ("num_machines: 1", "num_machines: 3", "2 ranks cannot be split evenly over 3 machines"),
        ("num_machines: 1", "num_machines: 1\nnum_machines: 2", "line 12: `num_machines` stands on line 11 already"),
        ("use_cpu: true", "use_cpu: false", "line 14: no accelerator is visible on this machine"),
        ("fsdp_version: 2", "fsdp_sync_module_states: false", "leaves every rank but 0 without weights"),
        ("fsdp_config:", "fsdp_config: [", "is no YAML: line"),
        (GOOD, "- a\n- b\n", "holds no keys"),
        (GOOD, "", "holds no keys"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_line_and_remedy(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    assert says in refusal(tmp_path, GOOD.replace(old, new), cpu_fsdp=True)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = PASTED.replace("num_processes: 2", "num_processes: two").replace("mixed_precision", "mixed_precison")
    message = refusal(tmp_path, text, num_processes=2, nproc_per_node=2)
    for part in ("lines 4-13", "mixed_precison", "'two'", "give one of them", "--cpu_fsdp"):
        assert part in message, part


@pytest.mark.parametrize(
    "line",
    [
        "mixed_precision: no",
        "dynamo_backend: NO",
        "dynamo_config: {dynamo_backend: no}",
        "fsdp_config: {version: 2, reshard_after_forward: false}",
    ],
)
def test_a_bare_no_is_a_word(tmp_path: Path, line: str) -> None:
    config = accelerate_config.read(write(tmp_path, f"distributed_type: FSDP\nnum_processes: 2\n{line}\n"))
    assert config.problems == []
    environment = config.environment()
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == ("false" if "reshard" in line else "true")


def test_a_missing_file_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        launch.plan(tmp_path / "none.yaml")


def test_fsdp_on_cpu_ranks_has_to_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_CPU_FSDP", raising=False)
    assert "Add --cpu_fsdp (or set HOLDFAST_CPU_FSDP=1)" in refusal(tmp_path, GOOD)
    monkeypatch.setenv("HOLDFAST_CPU_FSDP", "1")
    launch.plan(write(tmp_path, GOOD))


@pytest.mark.usefixtures("devices")
def test_use_cpu_beside_accelerators_is_named_as_a_mistake(tmp_path: Path) -> None:
    message = refusal(tmp_path, GOOD)
    assert "line 14: `use_cpu: true` is a mistake on this machine, which has 2 cuda device(s)" in message
    assert "Set `use_cpu: false`" in message


@pytest.mark.usefixtures("devices")
def test_with_accelerators(tmp_path: Path) -> None:
    gpu = GOOD.replace("use_cpu: true", "use_cpu: false")
    planned = launch.plan(write(tmp_path, gpu))
    assert "ACCELERATE_USE_CPU" not in planned.environment
    assert "--nproc_per_node=2" in planned.options
    assert launch.plan(write(tmp_path, gpu + "gpu_ids: 0,1\n")).environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "2 cuda device(s) are visible" in refusal(tmp_path, gpu, num_processes=4)
    assert "Leave it out" in refusal(tmp_path, gpu, cpu_fsdp=True)


@pytest.mark.parametrize(
    ("flags", "ranks"), [({}, 2), ({"num_processes": 3}, 3), ({"nproc_per_node": 4}, 4), ({"num_processes": 1}, 1)]
)
def test_the_number_of_ranks(tmp_path: Path, flags: dict[str, int], ranks: int) -> None:
    planned = launch.plan(write(tmp_path, GOOD), cpu_fsdp=True, **flags)
    assert f"--nproc_per_node={ranks}" in planned.options
    assert planned.environment["ACCELERATE_USE_CPU"] == "true"


def test_several_machines(tmp_path: Path) -> None:
    text = GOOD.replace("num_machines: 1", "num_machines: 2\nmachine_rank: 1") + (
        "main_process_ip: 10.0.0.7\nmain_process_port: 29501\nsame_network: true\n"
    )
    options = launch.plan(write(tmp_path, text), cpu_fsdp=True, nproc_per_node=2).options
    assert options[:3] == ("--nproc_per_node=2", "--nnodes=2", "--node_rank=1")
    assert "--master_addr=10.0.0.7" in options
    assert "--master_port=29501" in options
    assert "has to be from 0 to 1" in refusal(
        tmp_path, text.replace("machine_rank: 1", "machine_rank: 2"), cpu_fsdp=True
    )


def test_keys_without_effect_are_warned_of(tmp_path: Path) -> None:
    text = GOOD.replace("  fsdp_version: 2", "  fsdp_version: 2\n  fsdp_use_orig_params: false")
    warnings = accelerate_config.read(write(tmp_path, text)).warnings
    assert any("FSDP2 has no use for fsdp_use_orig_params" in line for line in warnings)
    warnings = accelerate_config.read(write(tmp_path, GOOD.replace("e: FSDP", "e: MULTI_CPU"))).warnings
    assert any("no effect beside `distributed_type: MULTI_CPU`" in line for line in warnings)


@pytest.mark.parametrize(
    "text", [GOOD, WRITTEN_BY_ACCELERATE, DYNAMO_AND_PARALLELISM], ids=["good", "written", "dynamo and parallelism"]
)
def test_the_environment_is_that_of_accelerate_launch(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = write(tmp_path, text)
    command = ["--config_file", str(path), "--main_process_port", "0", "-m", "holdfast"]
    monkeypatch.setattr(sys, "argv", ["accelerate", *command])
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    before = dict(os.environ)
    theirs = {name: value for name, value in prepare_multi_gpu_env(arguments).items() if before.get(name) != value}
    config = accelerate_config.read(path)
    assert config.problems == []
    ours = config.environment()
    for name in ("ACCELERATE_USE_CPU", "OMP_NUM_THREADS"):  # ours on purpose; the launcher's own
        ours.pop(name, None)
        theirs.pop(name, None)
    assert ours == theirs


# -- really started -------------------------------------------------------------------------------------------------

# A stand-in for `python -m holdfast` on the ranks: this folder's package comes first on their path.
RANK = r"""import os, signal, sys, time
words = sys.argv[1:]
sys.stdout.write(f"rank {os.environ['RANK']} {os.environ['WORLD_SIZE']} {os.environ['FSDP_VERSION']} {words}\n")
sys.stdout.flush()
if words[1] == "exit" and os.environ["RANK"] == words[2]:
    sys.exit(int(words[3]))
if words[1] == "die" and os.environ["RANK"] == words[2]:
    os.kill(os.getpid(), signal.SIGKILL)
if words[1] == "wait":
    def leave(number, frame):
        sys.stdout.write(f"rank {os.environ['RANK']} got {number}\n")
        sys.stdout.flush()
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, object]:
    """Arguments of Popen for the real launcher, whose ranks run the stand-in instead of holdfast."""
    package = tmp_path / "path" / "holdfast"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(RANK)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from holdfast.integrations import launch\n"
        f"planned = launch.plan(Path({str(write(tmp_path, GOOD))!r}), cpu_fsdp=True)\n"
        f"os.environ['PYTHONPATH'] = {str(tmp_path / 'path')!r}\n"
        "sys.exit(launch.start(planned, sys.argv[1:]))\n"
    )
    return {
        "args": [sys.executable, "-c", program, "run"],
        "cwd": tmp_path,
        "env": os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("words", "code"),
    [(["end"], 0), (["exit", "1", "4"], 4), (["die", "0"], 128 + signal.SIGKILL)],
    ids=["end", "exit", "die"],
)
def test_ranks_get_their_words_and_their_exit_code_comes_back(stand_in: dict, words: list[str], code: int) -> None:
    stand_in["args"] += words
    returned, out, err = finish(subprocess.Popen(**stand_in))
    assert returned == code, err
    for rank in (0, 1):
        assert f"rank {rank} 2 2 {['run', *words]}" in out
    if code:
        assert f"with exit code {code}" in err
        assert "Traceback" not in err


def test_signals_go_through(stand_in: dict) -> None:
    stand_in["args"].append("wait")
    process = subprocess.Popen(**stand_in)
    assert process.stdout is not None
    waiting = 0
    for line in process.stdout:  # ends with the process, and the process with its ranks' 60 s
        waiting += line.startswith("waiting")
        if waiting == 2:
            break
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert code == 128 + signal.SIGTERM
    assert "rank 0 got 15" in out
    assert "rank 1 got 15" in out
