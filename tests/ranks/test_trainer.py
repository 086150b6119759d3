"""A Trainer script with the engine behind it, on real ranks: killed, resumed, and compared bit for bit with a run left alone."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer  # noqa: F401

from holdfast.engine.export import Request, export_checkpoint
from holdfast.integrations import cpu_ranks, trainer_model
from holdfast.integrations import trainer as engine
from holdfast.integrations.stopping import StoppedBySignal
from holdfast.testing import RankPool
from holdfast.testing.pool import Died, RankFailure

SCRIPT = Path(__file__).parents[1] / "scripts" / "trainer_lm.py"
LINES = 30


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("".join(f"line {i}: what was learned {i * i} times is not lost\n" for i in range(LINES)))
    return path


def run_script(flags: dict[str, Any], environment: dict[str, str], mode: str) -> list[dict[str, Any]]:
    """The script on this rank, `mode`: plain, mixin or install; rank 0 returns what it logged."""
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
    if os.environ["RANK"] != "0":
        return []
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
    """A run left alone and one that is killed in step 5 give the same losses and the same final model.

    The first one writes that on the main process alone.
    """
    alone = {**flags, "output_dir": tmp_path / "alone", "main_only": True}
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


def run_until_signalled(flags: dict[str, Any]) -> tuple[int | None, list[dict[str, Any]]]:
    """As `holdfast run --resume_from_checkpoint latest`: the script itself tells the Trainer of no checkpoint."""
    engine.resume_where_not_told = "latest"
    try:
        return None, run_script(flags, {}, "install")
    except StoppedBySignal as stopped:
        step, code = stopped.step, stopped.code
    engine.finish()
    assert (code, engine.failures) == (0, [])
    return step, []


def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_next_start_goes_on_by_itself(pool: RankPool, llama_folder, text_file, tmp_path):
    flags = flags_for(llama_folder, text_file, tmp_path / "cut", **fsdp(2, "SHARDED_STATE_DICT"), max_steps=20, save_steps=100)
    stopped = pool.run(run_until_signalled, 2, {**flags, "signal_at": 2})
    step = stopped[0][0]
    assert step is not None and 2 < step < 20
    assert stopped[1][0] == step
    assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert json.loads((tmp_path / f"cut/checkpoint-{step}/trainer_state.json").read_text())["global_step"] == step
    assert not (tmp_path / "cut/model.safetensors").exists()
    resumed = pool.run(run_until_signalled, 2, flags)
    expected = pool.run(run_script, 2, {**flags, "output_dir": tmp_path / "alone"}, {}, "install")
    assert losses(resumed[0][1]) == losses(expected[0])
    assert list(losses(expected[0])) == list(range(1, 21))


def save_model_impatiently(flags: dict[str, Any]) -> None:
    trainer_model.PATIENCE = 0.5
    run_script(flags, {}, "install")


def test_a_model_that_rank_0_alone_asks_for_in_the_middle_is_refused(pool: RankPool, llama_folder, text_file, tmp_path):
    flags = flags_for(llama_folder, text_file, tmp_path, **fsdp(1, "FULL_STATE_DICT"), max_steps=3, model_at=2)
    with pytest.raises(RankFailure, match=r"save_model\(\) was called here, and not on rank 1 within 0 s: during the training all ranks"):
        pool.run(save_model_impatiently, 2, flags)


def test_stream_and_accumulation_with_the_script_choosing_its_last_checkpoint(pool: RankPool, llama_folder, text_file, tmp_path):
    """By the mixin, in one process: an incomplete folder with a higher number is not taken, nor is a damaged one."""
    more = {"streaming": True, "gradient_accumulation_steps": 2, "save_steps": 1, "newest": True}
    flags = flags_for(llama_folder, text_file, tmp_path, **more)
    killed_and_resumed(pool, 1, flags, "mixin", tmp_path, {})
    again = tmp_path / "cut"
    (again / "checkpoint-99").mkdir()
    (again / f"checkpoint-99/rank-00000-{'0' * 16}-1.safetensors").write_bytes(b"")
    history = pool.run(run_script, 1, {**flags, "output_dir": again, "max_steps": 7}, {}, "mixin")[0]  # by the script's own get_last_checkpoint
    assert sorted(losses(history)) == [1, 2, 3, 4, 5, 6, 7]
    assert (again / "checkpoint-7/manifest.json").is_file()
    (again / "checkpoint-7/manifest.json").unlink()
    assert engine.get_last_checkpoint(again) == str(again / "checkpoint-6")
    (again / "checkpoint-6/manifest.json").unlink()
    assert engine.get_last_checkpoint(again) == str(again / "checkpoint-5")


def test_a_damaged_newest_checkpoint_is_passed_over_and_the_limit_holds(pool: RankPool, llama_folder, text_file, tmp_path):
    flags = flags_for(llama_folder, text_file, tmp_path / "cut", **fsdp(2, "SHARDED_STATE_DICT"), save_steps=1, save_total_limit=2)
    expected = losses(pool.run(run_script, 2, flags, {}, "install")[0])
    folders = sorted(path.name for path in (tmp_path / "cut").glob("checkpoint-*"))
    assert folders == ["checkpoint-5", "checkpoint-6"]
    assert json.loads((tmp_path / "cut/checkpoint-6/trainer_state.json").read_text())["global_step"] == 6
    rank_file = next((tmp_path / "cut/checkpoint-6").glob("rank-00001-*.safetensors"))
    data = bytearray(rank_file.read_bytes())
    data[len(data) // 2] ^= 1
    rank_file.write_bytes(data)
    history = pool.run(run_script, 2, {**flags, "resume_from_checkpoint": True}, {}, "install")[0]
    assert losses(history) == expected
    assert json.loads((tmp_path / "cut/checkpoint-6/trainer_state.json").read_text())["global_step"] == 6


def test_the_best_model_is_loaded_at_the_end(pool: RankPool, llama_folder, text_file, tmp_path):
    """Where a high loss is best: the best checkpoint is the first, stays beside the last, and is what is written at the end."""
    more = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2, "greater_is_better": True}
    flags = flags_for(llama_folder, text_file, tmp_path / "out", **fsdp(2, "FULL_STATE_DICT"), **more)
    history = pool.run(run_script, 2, flags, {}, "mixin")[0]
    metrics = {line["step"]: line["eval_loss"] for line in history if "eval_loss" in line}
    best = max(metrics, key=lambda step: metrics[step])
    assert best != 6
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-6"}
    export_checkpoint(Request(tmp_path / f"out/checkpoint-{best}", tmp_path / "best", "transformers"))
    expected, found = whole(tmp_path / "best"), whole(tmp_path / "out")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("version", [1, 2])
def test_adapter(pool: RankPool, llama_folder, text_file, tmp_path, version):
    """Killed and resumed; the frozen base is named and not copied, and the end is an adapter that PEFT loads."""
    flags = flags_for(llama_folder, text_file, tmp_path, **fsdp(version, "SHARDED_STATE_DICT"), lora=True)
    alone, cut = {**flags, "output_dir": tmp_path / "alone"}, {**flags, "output_dir": tmp_path / "cut"}
    expected = losses(pool.run(run_script, 2, alone, {}, "install")[0])
    pool.run(run_script, 2, {**cut, "die_at": 4}, {}, "install", expect_death=True)
    assert losses(pool.run(run_script, 2, {**cut, "resume_from_checkpoint": tmp_path / "cut/checkpoint-4"}, {}, "install")[0]) == expected
    base = sum(path.stat().st_size for path in llama_folder.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in (tmp_path / "cut/checkpoint-6").glob("rank-*.safetensors")) < base / 2
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("alone", "cut"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama_folder), tmp_path / "cut")
    tuned = {name.replace(".default.", "."): value for name, value in loaded.state_dict().items() if "lora_" in name}
    assert all(torch.equal(tuned[name], second[name]) for name in second)


@pytest.mark.parametrize(("ranks", "more", "to"), [(2, fsdp(2, "SHARDED_STATE_DICT"), "accelerate-fsdp"), (1, {}, "accelerate")])
def test_begun_without_it_and_gone_on_without_it(pool: RankPool, llama_folder, text_file, tmp_path, ranks, more, to):
    """The Trainer's own two steps, two of the engine, and two of the Trainer from an export: the losses of the Trainer alone."""
    flags = flags_for(llama_folder, text_file, tmp_path / "plain", **more, mask=0)
    expected = losses(pool.run(run_script, ranks, flags, {}, "plain")[0])
    shutil.copytree(tmp_path / "plain/checkpoint-2", tmp_path / "out/checkpoint-2")
    resumed = {**flags, "output_dir": tmp_path / "out", "resume_from_checkpoint": True}
    pool.run(run_script, ranks, {**resumed, "die_at": 4}, {}, "install", expect_death=True)
    assert (tmp_path / "out/checkpoint-4/manifest.json").is_file()
    state = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())
    assert losses(state["log_history"]) == {step: expected[step] for step in (1, 2, 3, 4)}
    lines = export_checkpoint(Request(tmp_path / "out/checkpoint-4", tmp_path / "exported/checkpoint-4", to))
    assert not [line for line in lines if line.startswith("not written")]
    last = {**flags, "output_dir": tmp_path / "last", "resume_from_checkpoint": tmp_path / "exported/checkpoint-4"}
    assert losses(pool.run(run_script, ranks, last, {}, "plain")[0]) == expected


def test_save_only_model_writes_what_is_loaded_at_once(pool: RankPool, llama_folder, text_file, tmp_path):
    more = {"save_only_model": True, "save_total_limit": 1}
    flags = flags_for(llama_folder, text_file, tmp_path / "out", **fsdp(1, "FULL_STATE_DICT"), **more)
    pool.run(run_script, 2, flags, {}, "install")
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-6"]
    found, last = whole(tmp_path / "out/checkpoint-6"), whole(tmp_path / "out")
    assert all(torch.equal(found[name], last[name]) for name in last)
    assert any(not torch.equal(last[name], value) for name, value in whole(llama_folder).items())


def test_other_ranks_go_on_at_the_sample(pool: RankPool, llama_folder, text_file, tmp_path):
    """Two ranks, then one, with other batches: no sample of the epoch is lost or seen twice."""
    flags = flags_for(llama_folder, text_file, tmp_path / "out", remove_unused_columns=False)
    pool.run(run_script, 2, {**flags, "die_at": 2}, {}, "install", expect_death=True)
    state = json.loads((tmp_path / "out/checkpoint-2/trainer_state.json").read_text())
    assert state["global_step"] == 2
    more = {"max_steps": 13, "resume_from_checkpoint": True, "seen": tmp_path / "seen"}
    history = pool.run(run_script, 1, {**flags, **more}, {}, "install")[0]
    assert sorted(losses(history)) == list(range(1, 14))
    whole_epoch = {**flags, "output_dir": tmp_path / "whole", "max_steps": 15, "seen": tmp_path / "whole-seen"}
    pool.run(run_script, 1, whole_epoch, {}, "install")
    order = (tmp_path / "whole-seen").read_text().split()
    assert sorted(map(int, order)) == list(range(LINES))
    assert (tmp_path / "seen").read_text().split() == order[8:]
