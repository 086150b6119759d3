"""Pictures of a model that is being trained: by all ranks together, each its own, and without a trace in the training.

A sharded model is whole only in a forward that all ranks do together. So picture i is made on rank i mod ranks, and a rank
that has none left makes one that nobody looks at. Each is drawn from a generator of its own, seeded by the run's seed and
its number, and the generators of the training are put back afterwards: losses are the same, bit for bit, with pictures and
without.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from holdfast.engine import rng
from holdfast.training.ema import Average
from holdfast.training.models import forget_whole_parameters
from holdfast.training.prior import Draw
from holdfast.training.reporter import Reporter

if TYPE_CHECKING:
    from holdfast.training.config import DiffusionConfig

logger = logging.getLogger(__name__)


@dataclass
class Validation:
    """Makes the pictures of a run. `draw(prompt, generators)` makes one for each with the `models` as they are; all ranks call it."""

    config: DiffusionConfig
    accelerator: Accelerator
    models: Iterable[nn.Module]
    average: Average | None
    draw: Draw

    def __call__(self, reporter: Reporter, phase: str, step: int) -> None:
        """Writes `output_dir/PHASE/step-N/I.png` and shows the pictures in the tracker. Every rank calls this."""
        config, accelerator = self.config, self.accelerator
        prompt = config.last_prompt if phase == "final" else config.validation_prompt
        assert prompt is not None
        count, ranks, rank = config.num_validation_images, accelerator.num_processes, accelerator.process_index
        mine = []
        average = self.average.in_place() if self.average is not None else nullcontext()
        with generators_put_back(), evaluating(self.models), average, torch.no_grad():
            for first in range(0, count, ranks):
                number = first + rank
                generator = torch.Generator(accelerator.device).manual_seed(config.seed + number)
                (picture,) = self.draw(prompt, [generator])
                if number < count:
                    mine.append((number, picture))
        pictures = [picture for _, picture in sorted(gather_object(mine), key=lambda pair: pair[0])]
        if accelerator.is_main_process:
            folder = Path(config.output_dir) / phase / f"step-{step:06d}"
            folder.mkdir(parents=True, exist_ok=True)
            for number, picture in enumerate(pictures):
                picture.save(folder / f"{number}.png")
            reporter.pictures(phase, step, pictures, prompt)
            logger.info("%d picture(s) of step %d in %s", count, step, folder)


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Whatever is drawn in here from the process's generators is not missed afterwards."""
    state = rng.capture()
    try:
        yield
    finally:
        rng.restore(state, "the state before the pictures")


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """No dropout in here, and nothing left whole afterwards."""
    before = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
        for model in models:
            forget_whole_parameters(model)
