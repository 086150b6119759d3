"""What may be added to a run: a moving average, the text encoder, pictures. Killed and resumed, and on real ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from recipe_jobs import (
    ADAMW,
    EVERY,
    FSDP,
    PIPELINE,
    PRODIGY,
    STEPS,
    Job,
    check_killed_and_resumed,
    flags_for,
    fsdp1_environment,
    numbers,
    run,
)
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from holdfast.engine.extract import open_checkpoint, read_whole
from holdfast.testing import RankPool
from holdfast.training.metrics import read_lines

CLIP = "text_encoder/model.safetensors"
MORE = {**ADAMW, "lr_warmup_steps": 0, "use_ema": True, "train_text_encoder": True, "text_encoder_lr": 1e-2}


@pytest.mark.parametrize("way", ["2 ranks DDP", "2 ranks FSDP1", "2 ranks FSDP2"])
def test_average_and_text_encoder_are_killed_resumed_and_exported(
    pool: RankPool, flux_folder: Path, photo_folder: Path, tmp_path: Path, way: str
) -> None:
    environment = {"FSDP1": fsdp1_environment(tmp_path), "FSDP2": FSDP}.get(way.split()[-1], {})
    ranks = int(way[0])
    more = {**MORE, "cpu_fsdp": bool(environment)}
    check_killed_and_resumed(pool, flux_folder, photo_folder, tmp_path, ranks, environment, more, (PIPELINE, CLIP))

    out = tmp_path / "killed"
    checkpoints = [open_checkpoint(out / f"checkpoint-{step}") for step in (EVERY, STEPS)]
    base = load_file(flux_folder / PIPELINE)
    exported, text_encoder = load_file(out / PIPELINE), load_file(out / CLIP)
    for name, tensor in exported.items():
        average = read_whole(checkpoints[1], f"model.ema.{name}")
        assert torch.equal(tensor, average), name
    moved = [n for n in base if not torch.equal(exported[n], read_whole(checkpoints[1], f"model.transformer.{n}"))]
    assert len(moved) > len(base) // 2
    base_clip = load_file(flux_folder / CLIP)
    assert text_encoder.keys() == base_clip.keys()
    assert any(not torch.equal(text_encoder[name], base_clip[name].float()) for name in base_clip)


@pytest.mark.parametrize("more", [{}, {"rank": 2, "lora_alpha": 8}], ids=["whole", "lora"])
def test_a_run_is_the_same_however_it_is_cut(
    pool: RankPool, flux_folder: Path, photo_folder: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    """Transformer and text encoder together, several samples a batch, accumulated: losses and norms of DDP are FSDP's."""
    flags = {**MORE, "learning_rate": 1e-2, "mixed_precision": "no", "train_batch_size": 2, **more}
    ways = {"ddp": {}, "fsdp1": fsdp1_environment(tmp_path), "fsdp2": FSDP}
    seen = {}
    for name, environment in ways.items():
        environment = {key: value for key, value in environment.items() if key != "ACCELERATE_MIXED_PRECISION"}
        out = tmp_path / name
        pool.run(run, 2, Job(flags_for(flux_folder, photo_folder, out, **flags, cpu_fsdp=bool(environment)), environment))
        seen[name] = [(line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]
    assert len({loss for loss, _ in seen["ddp"]}) == STEPS
    for name in ("fsdp1", "fsdp2"):
        for mine, theirs in zip(seen[name], seen["ddp"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4), name


def follow(flags: dict[str, Any]) -> dict[str, Any]:
    """One process: the weights after every step, from the saves' own models."""
    from holdfast.training import ema

    seen: list[dict[str, torch.Tensor]] = []
    update = ema.Average.update

    def watched(self: Any, step: int) -> None:
        seen.append(copy.deepcopy({n: p.detach() for n, p in self._of.named_parameters()}))
        update(self, step)

    ema.Average.update = watched  # type: ignore[method-assign]
    run(Job(flags))
    return {"weights": seen}


def test_the_average_is_what_its_formula_says(pool: RankPool, flux_folder: Path, photo_folder: Path, tmp_path: Path) -> None:
    flags = flags_for(flux_folder, photo_folder, tmp_path / "out", **ADAMW, use_ema=True, ema_decay=0.3)
    ((result),) = pool.run(follow, 1, flags)
    average = load_file(flux_folder / PIPELINE)
    for step, weights in enumerate(result["weights"], start=1):
        decay = min(0.3, (1 + step) / (10 + step))
        average = {name: decay * value + (1 - decay) * weights[name] for name, value in average.items()}
    exported = load_file(tmp_path / "out" / PIPELINE)
    for name, value in average.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-5, atol=1e-7)


def images_of(out: Path, tag: str) -> list[int]:
    """Steps of the pictures in the tracker's log."""
    (folder,) = {path.parent for path in out.rglob("events.out.tfevents.*") if path.parent.name == "flux-dreambooth"}
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    return [event.step for event in events.Images(tag)] if tag in events.Tags()["images"] else []


@pytest.mark.parametrize("way", ["2 ranks FSDP1", "3 ranks FSDP2"])
def test_pictures_leave_no_trace_in_the_training(
    pool: RankPool, flux_folder: Path, photo_folder: Path, tmp_path: Path, way: str
) -> None:
    environment = {"FSDP1": fsdp1_environment(tmp_path), "FSDP2": FSDP}.get(way.split()[-1], {})
    ranks = int(way[0])
    flags = flags_for(
        flux_folder, photo_folder, tmp_path / "plain", **PRODIGY, cpu_fsdp=bool(environment), use_ema=True, train_text_encoder=True
    )
    pool.run(run, ranks, Job(flags, environment))
    pictures = {
        "output_dir": str(tmp_path / "shown"), "validation_prompt": "a photo of sks girl", "num_validation_images": 2,
        "validation_epochs": 3, "report_to": "tensorboard",
    }  # fmt: skip
    pool.run(run, ranks, Job({**flags, **pictures}, environment))
    assert numbers(tmp_path / "shown") == numbers(tmp_path / "plain")
    assert (tmp_path / "shown" / PIPELINE).read_bytes() == (tmp_path / "plain" / PIPELINE).read_bytes()

    per_step = ranks * 2
    due = [step for step in range(1, STEPS) if step * per_step // 15 > (step - 1) * per_step // 15]
    assert due
    found = sorted(path.relative_to(tmp_path / "shown").as_posix() for path in (tmp_path / "shown").rglob("step-*/*.png"))
    assert found == [f"final/step-{STEPS:06d}/{n}.png" for n in (0, 1)] + [
        f"validation/step-{step:06d}/{n}.png" for step in due for n in (0, 1)
    ]
    first, second = (Image.open(tmp_path / "shown" / f"final/step-{STEPS:06d}/{n}.png") for n in (0, 1))
    assert first.size == (16, 16)
    assert first.tobytes() != second.tobytes()
    assert images_of(tmp_path / "shown", "final") == [STEPS]
    assert images_of(tmp_path / "shown", "validation") == due
