"""What ends a run early, and what counts when it is continued: other flags, signals, numbers that are none."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from diffusers import FluxTransformer2DModel
from recipe_jobs import ADAMW, EVERY, FSDP, PRODIGY, STEPS, Job, flags_for, numbers, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from holdfast.errors import HoldfastError, TrainingDiverged, UsageError
from holdfast.recipes.flux_dreambooth import PARTS, RECIPE, Config
from holdfast.testing import RankPool
from holdfast.training.continuation import continuation, fingerprints
from holdfast.training.metrics import read_lines

CONSTANT = {"optimizer": "AdamW", "learning_rate": 1e-3}


def outcome(job: Job) -> tuple[str, int, str]:
    """How the run ended: the error's name, its exit code, its text."""
    try:
        run(job)
    except HoldfastError as error:
        return type(error).__name__, error.exit_code, str(error)
    except KeyboardInterrupt:
        return "KeyboardInterrupt", 130, ""
    return "", 0, ""


def test_a_longer_run_goes_on_as_if_it_had_been_meant_so(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "whole", **CONSTANT, report_to="tensorboard")
    pool.run(run, 1, Job(flags))
    again = {**flags, "output_dir": str(tmp_path / "longer"), "resume_from_checkpoint": "latest"}
    pool.run(run, 1, Job({**again, "max_train_steps": 3}))
    pool.run(run, 1, Job(again))
    assert numbers(tmp_path / "longer") == numbers(tmp_path / "whole")

    # One run in the tracker, too: one folder, each step once, the flags of the first start.
    assert [path.name for path in (tmp_path / "longer/logs").iterdir()] == [RECIPE]
    events = EventAccumulator(str(tmp_path / "longer/logs" / RECIPE))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))
    assert len(list((tmp_path / "longer/logs").rglob("events.out.tfevents.*"))) == 3  # two starts, and the flags' own
    assert json.loads((tmp_path / "longer/run.json").read_text())["flags"]["max_train_steps"] == STEPS


def test_flags_that_are_given_now_count(pool: RankPool, flux_folder, photo_folder, tmp_path):
    out = tmp_path / "out"
    flags = flags_for(flux_folder, photo_folder, out, **CONSTANT, max_train_steps=EVERY)
    pool.run(run, 1, Job(flags))
    more = {"learning_rate": 5e-4, "adam_weight_decay": 0.5, "max_train_steps": STEPS, "lr_scheduler": "linear", "lr_warmup_steps": 0}
    look = Job({**flags, **more, "resume_from_checkpoint": "latest"}, look_before=EVERY + 1)
    (result,) = pool.run(run, 1, look)
    assert result["state"]["group"]["weight_decay"] == 0.5
    rates = [line["lr"] for line in read_lines(out / "metrics.jsonl")]
    assert rates == pytest.approx([1e-3] * EVERY + [5e-4 * (STEPS - step) / STEPS for step in range(EVERY, STEPS)])


def test_the_changed_flags_are_shown(valid: dict[str, Any], flux_folder: Path):
    config = Config(**valid)
    base = fingerprints(flux_folder, PARTS, None)
    begin(config, base)
    changed = Config(**{**valid, "learning_rate": 5e-4, "max_train_steps": 9, "resume_from_checkpoint": "latest"})
    found = continuation(changed, RECIPE, base)
    assert found.describe().splitlines()[1:] == ["  --max_train_steps 4 -> 9", "  --learning_rate 0.0001 -> 0.0005"]
    assert "what is given now counts" in found.describe()
    assert found.run_id == json.loads((Path(config.output_dir) / "run.json").read_text())["id"]
    assert continuation(config, RECIPE, base).changes == []  # not resumed: another run


@pytest.fixture
def valid(flux_folder: Path, photo_folder: Path, tmp_path: Path) -> dict[str, Any]:
    return flags_for(flux_folder, photo_folder, tmp_path / "out", max_train_steps=4)


def begin(config: Config, base: dict[str, str]) -> None:
    """As if a run with these flags had left a checkpoint."""
    (Path(config.output_dir) / "checkpoint-2").mkdir(parents=True)
    (Path(config.output_dir) / "checkpoint-2/manifest.json").write_text("{}")
    continuation(config, RECIPE, base).write(config)


@pytest.mark.parametrize(
    ("then", "now", "reason"),
    [
        ({}, {"optimizer": "prodigy"}, "it had --optimizer adamw, now it is prodigy"),
        ({"rank": 4}, {"rank": 8}, "it had --rank 4, now it is 8"),
        ({"rank": 4}, {}, "it had --rank 4, now it is None"),
        ({"rank": 4}, {"rank": 4, "lora_alpha": 9}, "it had --lora_alpha 4, now it is 9"),
        ({}, {"train_text_encoder": True}, "it had --train_text_encoder False, now it is True"),
        ({}, {"use_ema": True}, "it had --use_ema False"),
        ({"seed": 1}, {"seed": 2}, "it had --seed 1, now it is 2"),
        ({}, {"repeats": 2}, "it had --repeats 1"),
    ],
)
def test_a_flag_that_would_make_it_another_run_is_refused(valid, flux_folder, then, now, reason):
    base = fingerprints(flux_folder, PARTS, None)
    begin(Config(**{**valid, **then}), base)
    with pytest.raises(UsageError) as caught:
        continuation(Config(**{**valid, **now, "resume_from_checkpoint": "latest"}), RECIPE, base)
    assert reason in str(caught.value)
    assert "another --output_dir for a new run" in str(caught.value)


def test_another_model_is_refused_wherever_it_lies_and_the_same_is_not(pool: RankPool, valid, flux_folder, tmp_path):
    pool.run(run, 1, Job({**valid, "max_train_steps": 1}))
    moved = shutil.copytree(flux_folder, tmp_path / "moved")
    again = {**valid, "resume_from_checkpoint": "latest", "pretrained_model_name_or_path": str(moved)}
    assert pool.run(outcome, 1, Job({**again, "max_train_steps": 2})) == [("", 0, "")]
    model = FluxTransformer2DModel.from_pretrained(moved / "transformer")
    model.proj_out.weight.data += 1
    model.save_pretrained(moved / "transformer")
    ((name, code, text),) = pool.run(outcome, 1, Job({**again, "max_train_steps": 3}))
    assert (name, code) == ("UsageError", 2)
    assert "its base model had another transformer than" in text


@pytest.mark.parametrize("what", ["nan", "gradients"])
def test_numbers_that_are_none_stop_all_ranks_and_are_never_saved(pool: RankPool, flux_folder, photo_folder, tmp_path, what):
    out = tmp_path / "out"
    flags = flags_for(flux_folder, photo_folder, out, **PRODIGY, cpu_fsdp=True, max_grad_norm=0.0, checkpoints_total_limit=1)
    bad = 2 * EVERY  # where a checkpoint is due
    results = pool.run(outcome, 2, Job(flags, FSDP, spoil=(bad, 1, what)))
    for name, code, text in results:
        assert (name, code) == ("TrainingDiverged", TrainingDiverged.exit_code)
        assert f"Step {bad}: the loss is" in text
        assert f"of step {EVERY}, is kept" in text
        assert ("rank 1" in text) == (what == "nan")
    assert sorted(path.name for path in out.glob("checkpoint-*")) == [f"checkpoint-{EVERY}"]
    assert not (out / "model_index.json").exists()
    assert pool.run(outcome, 2, Job({**flags, "resume_from_checkpoint": "latest"}, FSDP)) == [("", 0, "")] * 2
    assert [line["step"] for line in read_lines(out / "metrics.jsonl")] == list(range(1, STEPS + 1))


def test_sigterm_ends_all_ranks_with_a_checkpoint_of_one_step(pool: RankPool, flux_folder, photo_folder, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    flags = flags_for(flux_folder, photo_folder, out, **ADAMW, max_train_steps=12, checkpointing_steps=1000, train_batch_size=1)
    pool.run(run, 2, Job({**flags, "output_dir": str(whole)}))
    assert pool.run(outcome, 2, Job(flags, signal_before=(3, signal.SIGTERM))) == [("", 0, "")] * 2
    (checkpoint,) = out.glob("checkpoint-*/manifest.json")
    assert 3 <= json.loads(checkpoint.read_text())["step"] < 12
    assert not (out / "model_index.json").exists()
    pool.run(run, 2, Job({**flags, "resume_from_checkpoint": "latest"}))
    assert numbers(out) == numbers(whole)


def test_ctrl_c_finishes_the_pending_save(pool: RankPool, flux_folder, photo_folder, tmp_path):
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", **ADAMW)
    job = Job(flags, signal_before=(EVERY + 1, signal.SIGINT))  # the save of the step before has just been asked for
    assert pool.run(outcome, 1, job) == [("KeyboardInterrupt", 130, "")]
    assert [path.parent.name for path in (tmp_path / "out").glob("*/manifest.json")] == [f"checkpoint-{EVERY}"]
    saves = read_lines(tmp_path / "out/saves.jsonl")
    assert [save["step"] for save in saves] in ([], [EVERY])


SLOW_END = """
import time
from holdfast.training.interrupt import interruptible
with interruptible():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("finishing", flush=True)
        time.sleep(60)
"""


def test_a_second_ctrl_c_leaves_at_once():
    process = subprocess.Popen([sys.executable, "-c", SLOW_END], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "finishing\n"
    process.send_signal(signal.SIGINT)  # a launcher's copy of the same
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.2)
    then = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    assert time.monotonic() - then < 2
    process.stdout.close()
