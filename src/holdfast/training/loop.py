"""The training loop of all diffusion recipes: they bring model, data and loss, it does the rest.

One optimizer step is `gradient_accumulation_steps` micro steps of `train_batch_size` samples on each rank. Checkpoints
are taken between optimizer steps, on every rank at the same ones, and copied beside the next forward and backward.
All randomness comes from the ranks' global generators and the loader's position, which are part of the checkpoint.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import holdfast
from holdfast.errors import SaveFailed
from holdfast.training.config import DiffusionConfig
from holdfast.training.metrics import RunLog
from holdfast.training.optimizers import make_lr_scheduler, make_optimizer

logger = logging.getLogger(__name__)

Loss = Callable[[Any], torch.Tensor]


def train(
    config: DiffusionConfig, accelerator: Accelerator, name: str, model: nn.Module, dataset: Any, loss: Loss
) -> Path:
    """Trains `model` (prepared) until `config`'s last step; returns the folder of the final, complete checkpoint.

    `loss` gives the mean loss (0-dim) of one collated batch of `dataset`. `name` is the tracker's project.
    """
    output_dir = Path(config.output_dir)
    loader = holdfast.DataLoader(
        dataset,
        batch_size=config.train_batch_size,
        seed=config.seed,
        num_workers=config.dataloader_num_workers,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    total = config.total_steps(len(dataset), accelerator.num_processes)
    for line in config.warnings(total) if accelerator.is_main_process else ():
        logger.warning(line)
    optimizer = accelerator.prepare_optimizer(make_optimizer(config, model.parameters()), device_placement=False)
    # Not prepared: Accelerate would step it once for each process.
    scheduler = make_lr_scheduler(config, optimizer.optimizer, total)
    set_seed(config.seed, device_specific=True)
    checkpointer = holdfast.Checkpointer(
        output_dir,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        dataloader=loader,
        scaler=accelerator.scaler,
        overlap=True,
        keep_last=config.checkpoints_total_limit,
    )
    with checkpointer:
        start = _resume(config, checkpointer, accelerator)
        if start >= total and accelerator.is_main_process:
            logger.info("all %d steps are done: there is nothing left to train", total)
        with closing(_Reporter(config, accelerator, name, checkpointer, start, total)) as reporter:
            for step, losses, norm in _steps(accelerator, config, model, optimizer, loader, loss, start, total):
                lr = float(scheduler.get_last_lr()[0])
                if not accelerator.optimizer_step_was_skipped:  # fp16: an overflow
                    scheduler.step()
                if step % config.checkpointing_steps == 0 or step == total:
                    checkpointer.save(step)
                reporter.report(step, losses, lr, norm, optimizer, loader.epoch)
            _finish(checkpointer)
    done = config.checkpoint_path()  # a resumed run with nothing left to do has written nothing
    return done if done is not None and start >= total else output_dir / f"checkpoint-{max(start, total)}"


def _resume(config: DiffusionConfig, checkpointer: holdfast.Checkpointer, accelerator: Accelerator) -> int:
    """The optimizer steps that are already done, with everything put back as it was after them."""
    if config.resume_from_checkpoint is None:
        if accelerator.is_main_process and any(Path(config.output_dir).glob("checkpoint-*/manifest.json")):
            logger.warning(
                "%s holds checkpoints; this run starts anew. To continue: --resume_from_checkpoint latest",
                config.output_dir,
            )
        return 0
    path = config.checkpoint_path()
    return checkpointer.resume() if path is None else checkpointer.resume(path)


def _steps(
    accelerator: Accelerator,
    config: DiffusionConfig,
    model: nn.Module,
    optimizer: Any,
    loader: holdfast.DataLoader,
    loss: Loss,
    start: int,
    total: int,
) -> Iterator[tuple[int, torch.Tensor, Any]]:
    """Yields (step, this rank's mean loss, gradient norm or None) after each optimizer step."""
    batches = _endless(loader)
    for step in range(start + 1, total + 1):
        losses, norm = torch.zeros((), device=accelerator.device), None
        for _ in range(config.gradient_accumulation_steps):
            batch = next(batches)
            with accelerator.accumulate(model):
                value = loss(batch)
                accelerator.backward(value)
                if accelerator.sync_gradients and config.max_grad_norm > 0:
                    norm = accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            losses += value.detach().float()
        yield step, losses / config.gradient_accumulation_steps, norm


def _endless(loader: holdfast.DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def _finish(checkpointer: holdfast.Checkpointer) -> None:
    """Waits for the last checkpoint. One that failed before it was reported then, and is of no more use now."""
    try:
        checkpointer.wait()
    except SaveFailed as error:
        if not checkpointer.saves or checkpointer.saves[-1].state != "complete":
            raise
        logger.warning("%s", error)


class _Reporter:
    """Progress bar, tracker and log of rank 0. Means over the ranks are its only collectives."""

    def __init__(
        self,
        config: DiffusionConfig,
        accelerator: Accelerator,
        name: str,
        checkpointer: holdfast.Checkpointer,
        start: int,
        total: int,
    ) -> None:
        self.accelerator, self.checkpointer = accelerator, checkpointer
        self.is_main = accelerator.is_main_process
        self.log = RunLog(Path(config.output_dir), start) if self.is_main else None
        if config.report_to != "none":
            plain = {key: value for key, value in vars(config).items() if isinstance(value, int | float | str | bool)}
            accelerator.init_trackers(name, config=plain)
        # A log file gets a line now and then instead of a bar that redraws itself.
        interval = 0.1 if sys.stderr.isatty() else 30.0
        self.bar = tqdm(total=total, initial=start, disable=not self.is_main, mininterval=interval, desc="steps")
        self.then, self.shown = time.perf_counter(), ""

    def report(self, step: int, losses: torch.Tensor, lr: float, norm: Any, optimizer: Any, epoch: int) -> None:
        """Shows one optimizer step; every rank calls this."""
        mean = self.accelerator.reduce(losses, reduction="mean").item()
        values: dict[str, Any] = {"loss": mean, "lr": lr}
        if norm is not None:
            values["grad_norm"] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if "d" in (group := optimizer.param_groups[0]):
            values["d"] = float(group["d"])
        now = time.perf_counter()
        values["step_s"], self.then = now - self.then, now
        self.accelerator.log(values, step=step)
        if self.log is not None:
            self.log.step(step=step, **values, epoch=epoch)
            self.log.saves(self.checkpointer.saves)
        self.shown = f"loss {mean:.4f}, {values['step_s']:.2f} s a step, "
        self._show_checkpoint()
        self.bar.update()

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
