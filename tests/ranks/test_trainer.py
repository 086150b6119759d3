"""A Trainer script with the engine behind it, on real ranks: killed, resumed, and compared bit for bit with a run left alone."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import datasets
import peft  # noqa: F401 (what the ranks need is imported once, before they are forked)
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer  # noqa: F401

from holdfast.integrations import cpu_ranks
from holdfast.integrations import trainer as engine
from holdfast.testing import RankPool
from holdfast.testing.pool import Died

SCRIPT = Path(__file__).parents[1] / "scripts" / "trainer_lm.py"
LINES = 30


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("".join(f"line {i}: what was learned {i * i} times is not lost\n" for i in range(LINES)))
    return path


def run_script(flags: dict[str, Any], environment: dict[str, str], mode: str) -> list[dict[str, Any]]:
    """The script on this rank, `mode`: plain, mixin or install; returns what it logged."""
    os.environ.update(environment)
    os.environ.update(ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false")
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    cpu_ranks.enable()
    if mode == "install":
        engine.install()
    sys.argv = [str(SCRIPT), *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    if mode == "mixin":
        sys.argv += ["--mixin"]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    engine.finish()
    return json.loads(Path(flags["output_dir"], "trainer_state.json").read_text())["log_history"]


def flags_for(model: Path, text: Path, output: Path, **changed: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": model, "train_file": text, "output_dir": output, "use_cpu": True, "report_to": "none",
        "per_device_train_batch_size": 2, "max_steps": 6, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2,
        "disable_tqdm": True, **changed,
    }  # fmt: skip


def fsdp(version: int, form: str) -> dict[str, Any]:
    config = {
        "version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": form,
        "sync_module_states": False,
    }  # fmt: skip
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": json.dumps(config)}


def losses(history: list[dict[str, Any]]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in history if "loss" in line}


def whole(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def killed_and_resumed(pool: RankPool, ranks: int, flags: dict[str, Any], mode: str, tmp_path: Path, resume: Any) -> None:
    """A run left alone and one that is killed in step 5 give the same losses and the same final model."""
    alone = {**flags, "output_dir": tmp_path / "alone"}
    cut = {**flags, "output_dir": tmp_path / "cut"}
    expected = losses(pool.run(run_script, ranks, alone, {}, mode)[0])
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    died = pool.run(run_script, ranks, {**cut, "die_at": 4}, {}, mode, expect_death=True)
    assert Died(signal.SIGKILL) in died
    assert (tmp_path / "cut/checkpoint-4/manifest.json").is_file()
    again = losses(pool.run(run_script, ranks, {**cut, **resume}, {}, mode)[0])
    assert again == expected
    first, second = whole(tmp_path / "alone"), whole(tmp_path / "cut")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("version", [1, 2])
def test_killed_and_resumed(pool: RankPool, llama_folder, text_file, tmp_path, version):
    form = "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT"
    flags = flags_for(llama_folder, text_file, tmp_path, **fsdp(version, form))
    killed_and_resumed(pool, 2, flags, "install", tmp_path, {"resume_from_checkpoint": True})
