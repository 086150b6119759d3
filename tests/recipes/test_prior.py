"""Class images: each made by one rank, once, also after a kill; and their part of the loss."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from holdfast.errors import UsageError
from holdfast.recipes.flux_dreambooth import Config
from holdfast.testing import Died, RankPool
from holdfast.training.flow_matching import flow_matching_errors
from holdfast.training.prior import make_class_images, preserved


@dataclass
class Ranks:
    process_index: int
    is_main_process: bool
    device: Any


def make(folder: str, die_at: int | None = None, prompt: str = "a dog") -> tuple[int, list[int], int]:
    """Returns how many were missing, how many pictures each call drew, and how often the model was opened."""
    rank = dist.get_rank()
    config = Config(
        pretrained_model_name_or_path="a/b", instance_prompt="x", with_prior_preservation=True, class_data_dir=folder, class_prompt=prompt,
        num_class_images=11, sample_batch_size=2, seed=3,
    )  # fmt: skip
    drawn: list[int] = []
    opened: list[torch.dtype] = []

    def draw(prompt: str, generators: list[torch.Generator]) -> list[Image.Image]:
        dist.barrier()  # as a sharded model: all ranks or none
        if len(drawn) == die_at:
            time.sleep(0.2 if rank == 0 else 0)
            os.kill(os.getpid(), signal.SIGKILL)
        drawn.append(len(generators))
        return [Image.fromarray(torch.randint(0, 256, (8, 8, 3), generator=g).numpy().astype(np.uint8)) for g in generators]

    def model(dtype: torch.dtype) -> Any:
        opened.append(dtype)
        return draw

    try:
        made = make_class_images(config, Ranks(rank, rank == 0, torch.device("cpu")), model)  # type: ignore[arg-type]
    except UsageError as error:
        return str(error)  # type: ignore[return-value]
    return made, drawn, len(opened)


def pixels(folder: Path) -> dict[str, bytes]:
    return {path.name: Image.open(path).tobytes() for path in sorted(folder.glob("*.png"))}


def test_class_images_are_the_same_on_any_ranks_killed_or_not(pool: RankPool, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert pool.run(make, 3, str(whole)) == [(11, [2, 2], 1)] * 3  # 12 drawn for 11
    assert list(pixels(whole)) == [f"class-{number:05d}.png" for number in range(11)]
    assert len(set(pixels(whole).values())) == 11

    assert pool.run(make, 2, str(cut), die_at=1, expect_death=True) == [Died(signal.SIGKILL)] * 2
    assert len(pixels(cut)) == 4
    assert [made for made, _, _ in pool.run(make, 2, str(cut))] == [7, 7]
    assert pixels(cut) == pixels(whole)
    assert pool.run(make, 2, str(cut)) == [(0, [], 0)] * 2  # the model is not even opened
    for text in pool.run(make, 2, str(cut), prompt="a cat"):
        assert "was generated for the prompt 'a dog', --class_prompt is 'a cat'" in text
    assert not list(tmp_path.rglob("*.new"))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
def test_each_half_is_weighted_by_its_own_times(batch: int, scheme: str) -> None:
    """Against the formula, sample by sample: the mean over the subject's samples, and weight x that over the class's."""
    generator = torch.Generator().manual_seed(batch)
    prediction, latents, noise = (torch.randn(2 * batch, 2, 3, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    sigmas = torch.rand(2 * batch, generator=generator) * 0.8 + 0.1
    weights = {"none": lambda s: 1.0, "sigma_sqrt": lambda s: s**-2, "cosmap": lambda s: 2 / (np.pi * (1 - 2 * s + 2 * s * s))}[scheme]
    each = [
        weights(float(s)) * float(((p - (n - x)) ** 2).mean()) for p, x, n, s in zip(prediction, latents, noise, sigmas, strict=True)
    ]
    expected = np.mean(each[:batch]) + 0.7 * np.mean(each[batch:])
    errors = flow_matching_errors(prediction, latents, noise, sigmas, scheme)
    assert float(preserved(errors, batch, 0.7)) == pytest.approx(expected, rel=1e-5)
    assert float(preserved(errors, 0, 0.7)) == pytest.approx(np.mean(each), rel=1e-5)
