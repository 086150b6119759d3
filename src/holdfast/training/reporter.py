"""What a run shows while it goes on: progress bar, tracker, `metrics.jsonl`, pictures. Rank 0 shows, all ranks call.

A resumed run goes on in the same tracker's run: the same folder for tensorboard, whose points after the resume's step are
taken back; the same id for the others.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from tqdm import tqdm

import holdfast
from holdfast.training.metrics import RunLog

if TYPE_CHECKING:
    from PIL import Image

    from holdfast.training.config import DiffusionConfig


class Reporter:
    """Made on every rank. `run_id` is the tracker's name of the run, `start` the steps that were done before."""

    def __init__(
        self,
        config: DiffusionConfig,
        accelerator: Accelerator,
        name: str,
        run_id: str,
        checkpointer: holdfast.Checkpointer,
        start: int,
        total: int,
    ) -> None:
        self.accelerator, self.checkpointer = accelerator, checkpointer
        self.is_main = accelerator.is_main_process
        self.log = RunLog(Path(config.output_dir), start) if self.is_main else None
        if config.report_to != "none":
            continued = {
                "tensorboard": {"purge_step": start + 1},
                "wandb": {"id": run_id, "resume": "allow"},
                "comet_ml": {"experiment_key": run_id},
            }
            accelerator.init_trackers(name, config=shown_flags(config) if start == 0 else None, init_kwargs=continued)
        # A log file gets a line now and then instead of a bar that redraws itself.
        interval = 0.1 if sys.stderr.isatty() else 30.0
        self.bar = tqdm(total=total, initial=start, disable=not self.is_main, mininterval=interval, desc="steps")
        self.then, self.shown = time.perf_counter(), ""

    def step(self, step: int, values: dict[str, Any], optimizer: Any, epoch: int) -> None:
        """Shows one optimizer step; `values` are the same on all ranks, `loss` among them."""
        if "d" in (group := optimizer.param_groups[0]):
            values["d"] = float(group["d"])
        now = time.perf_counter()
        values["step_s"], self.then = now - self.then, now
        self.accelerator.log(values, step=step)
        if self.log is not None:
            self.log.step(step=step, **values, epoch=epoch)
            self.log.saves(self.checkpointer.saves)
        self.shown = f"loss {values['loss']:.4f}, {values['step_s']:.2f} s a step, "
        self._show_checkpoint()
        self.bar.update()

    def pictures(self, phase: str, step: int, pictures: list[Image.Image], prompt: str) -> None:
        """Shows pictures of one prompt in the tracker; on rank 0."""
        import numpy as np

        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard":
                stack = np.stack([np.asarray(picture) for picture in pictures])
                tracker.writer.add_images(phase, stack, step, dataformats="NHWC")
            elif tracker.name == "wandb":
                tracker.log_images({phase: pictures}, step=step)
        self.then = time.perf_counter()  # the next step's time is its own

    def _show_checkpoint(self) -> None:
        saves = self.checkpointer.saves
        state = f"{saves[-1].step} {saves[-1].state}" if saves else "none yet"
        self.bar.set_postfix_str(f"{self.shown}checkpoint {state}", refresh=False)

    def close(self) -> None:
        self._show_checkpoint()
        self.bar.close()
        if self.log is not None:
            self.log.saves(self.checkpointer.saves)
            self.log.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()  # not end_training: the process group is needed until the checkpointer is closed


def shown_flags(config: DiffusionConfig) -> dict[str, Any]:
    """The flags as plain values, without secrets."""
    plain = {key: value for key, value in vars(config).items() if isinstance(value, int | float | str | bool)}
    plain.pop("hub_token", None)
    return plain
