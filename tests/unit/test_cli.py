"""The command line as a user meets it: quick help, exit codes, messages, and no torch where none is needed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import __version__, cli
from holdfast.errors import UsageError
from holdfast.recipes import RECIPES

FLAGS = ["--pretrained_model_name_or_path", "base", "--instance_data_dir", "photos", "--instance_prompt", "a photo"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
    )


def test_help_takes_under_half_a_second() -> None:
    """Of CPU time, which is what it waits for on a machine that does nothing else: the other tests are no part of it."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert 0.05 < min(times) < 0.5


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["train", "--help"], 0),
        *((["train", recipe, "--help"], 0) for recipe in RECIPES),
        (["train", "flux-dreambooth", *FLAGS, "--max_train_steps", "0"], 2),
        (["launch", "--help"], 0),
        (["launch", "--config_file", "missing.yaml"], 2),
        (["demo", "--help"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_no_torch_is_imported_before_it_is_needed(arguments: list[str], code: int) -> None:
    program = (
        "import sys\n"
        "from holdfast.cli import main\n"
        "try:\n"
        "    code = main(sys.argv[1:])\n"
        "except SystemExit as error:\n"
        "    code = error.code or 0\n"
        "heavy = [name for name in ('torch', 'accelerate', 'diffusers', 'transformers') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"holdfast {__version__}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "flux-dreambooth", *FLAGS, "--learning_rat", "1"], "did you mean --learning_rate?"),
        (["train", "flux-dreambooth", *FLAGS, "--max-train-step=3"], "did you mean --max_train_steps?"),
        (["train", "flux-dreambooth", "--max-train-step=3"], "did you mean --max_train_steps?"),
        (["launch", "--confg_file", "x", "train"], "did you mean --config_file?"),
        (["demo", "--output_dri", "x"], "did you mean --output_dir?"),
        (["train", "flux-dreamboth"], "Recipes: flux-dreambooth"),
        (["launch", "--config_file", "x"], "holdfast launch --config_file C train RECIPE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_names_the_right_one(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["tarin"], ["train"], ["train", "flux-dreambooth", "--seed", "x"]], ids=str)
def test_a_call_that_is_none_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "holdfast" in capsys.readouterr().err


def test_every_problem_of_the_flags_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(
        [
            "train",
            "flux-dreambooth",
            *FLAGS,
            "--output_dir",
            str(tmp_path),
            "--max_train_steps",
            "0",
            "--optimizer",
            "x",
        ]
    )
    message = capsys.readouterr().err
    assert code == 2
    assert all(part in message for part in ("--max_train_steps", "--optimizer", "--instance_data_dir", "photos"))


def test_hyphens_and_underscores_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    messages = []
    for change in (str, lambda flag: flag.replace("_", "-") if flag.startswith("--") else flag):
        assert cli.main(["train", "flux-dreambooth", *map(change, FLAGS), change("--max_train_steps"), "0"]) == 2
        messages.append(capsys.readouterr().err)
    assert messages[0] == messages[1]


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli, "_recipe", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "flux-dreambooth"])


def test_on_ranks_a_message_names_the_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("holdfast: rank 1: ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--use_ema"], True),
        (["--no-use-ema"], False),
        (["--use_ema=False"], False),
        (["--use-ema", "True"], True),
        (["--use_ema=true", "--no_use_ema"], False),
        ([], False),
    ],
)
def test_switches_take_a_word_too(given: list[str], expected: bool) -> None:
    from holdfast.cli import _parse
    from holdfast.recipes.flux_dreambooth import Config

    needed = ["--pretrained_model_name_or_path=a/b", "--instance_prompt=p", "--rank", "1"]
    config = _parse(Config, "holdfast train", [*needed, *given])
    assert (config.use_ema, config.rank) == (expected, 1)


def test_a_switch_with_another_word_is_refused() -> None:
    from holdfast.cli import _parse
    from holdfast.recipes.flux_dreambooth import Config

    with pytest.raises(UsageError, match="say --use_ema or --no-use-ema"):
        _parse(Config, "holdfast train", ["--use_ema=maybe"])
