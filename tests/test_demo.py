"""The demo, shortened: kill, resume and comparison are real, and so are the pipeline, the picture and the exit code."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from PIL import Image

from holdfast import demo
from holdfast.errors import HoldfastError, UsageError


def test_the_demo_ends_with_equal_losses_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "STEPS", 6)
    monkeypatch.setattr(demo, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(demo, "STEPS_LOST", 1)
    assert demo.run(tmp_path / "demo") == 0
    shown = capsys.readouterr().out
    assert "losses equal" in shown
    assert "false" not in shown
    assert Image.open(tmp_path / "demo" / "picture.png").size == (128, 128)
    assert Image.open(tmp_path / "demo" / "losses.png").size[0] > 500
    # A loss or a byte that differs would have been seen.
    reference, interrupted = tmp_path / "demo" / "reference", tmp_path / "demo" / "interrupted"
    metrics = interrupted / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[-1]["loss"] = math.nextafter(lines[-1]["loss"], 0.0)
    metrics.write_text("\n".join(map(json.dumps, lines)))
    assert demo._compare(reference, interrupted) == (False, True)
    metrics.write_text((reference / "metrics.jsonl").read_text())
    [weights] = (interrupted / "transformer").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert demo._compare(reference, interrupted) == (True, False)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="not empty"):
        demo.run(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    demo._prepare(tmp_path / "demo")
    (tmp_path / "demo" / "accelerate.yaml").write_text(demo.CONFIG)
    with pytest.raises(HoldfastError, match=r"exit code 2(.|\n)*photos: there is no such folder"):
        demo._finish(demo._start(tmp_path / "demo", tmp_path / "demo" / "run"), tmp_path / "demo" / "run")
