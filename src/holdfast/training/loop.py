"""The training loop of all diffusion recipes: they bring models, data and loss, it does the rest.

One optimizer step is `gradient_accumulation_steps` micro steps of `train_batch_size` samples on each rank. Checkpoints
are taken between optimizer steps, on every rank at the same ones, and copied beside the next forward and backward. A step
whose loss or gradients are no finite numbers is never saved. All randomness comes from the ranks' global generators and
the loader's position, which are part of the checkpoint.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.errors import SaveFailed, TrainingDiverged
from holdfast.training.config import DiffusionConfig
from holdfast.training.continuation import Continuation
from holdfast.training.ema import KEY, Average
from holdfast.training.interrupt import interruptible
from holdfast.training.models import clip_gradients
from holdfast.training.optimizers import apply_changed_flags, make_lr_scheduler, make_optimizer
from holdfast.training.reporter import Reporter

logger = logging.getLogger(__name__)

Loss = Callable[[Any], torch.Tensor]
Validate = Callable[[Reporter, str, int], None]


@dataclass
class Training:
    """What a recipe brings. `models` are trained (prepared), by the part of the pipeline that they are.

    `loss` gives the mean loss (0-dim) of one collated batch of `loader`, which is a `holdfast.DataLoader`.
    `validate(reporter, phase, step)` makes pictures, on all ranks together.
    """

    models: dict[str, nn.Module]
    loader: holdfast.DataLoader
    loss: Loss
    average: Average | None = None
    validate: Validate | None = None

    @property
    def registered(self) -> nn.Module | dict[str, nn.Module]:
        """The models for the Checkpointer: a single one has no key."""
        if len(self.models) == 1 and self.average is None:
            return next(iter(self.models.values()))
        return self.models if self.average is None else {**self.models, KEY: self.average.model}

    def key(self, part: str) -> str:
        """Under which key the checkpoint has a part."""
        return "" if isinstance(self.registered, nn.Module) else part


def train(config: DiffusionConfig, accelerator: Accelerator, run: Continuation, training: Training) -> Path | None:
    """Trains until `config`'s last step; returns the folder of the final, complete checkpoint, None after a stop by a signal.

    Raises:
        TrainingDiverged: on every rank after the same step.
    """
    world_size = accelerator.num_processes
    total = config.total_steps(training.loader.batches)
    for line in config.warnings(total) if accelerator.is_main_process else ():
        logger.warning(line)
    optimizer = accelerator.prepare_optimizer(make_optimizer(config, training.models, world_size), device_placement=False)
    # Not prepared: Accelerate would step it once for each process.
    scheduler = make_lr_scheduler(config, optimizer.optimizer, total)
    set_seed(config.seed, device_specific=True)
    checkpointer = holdfast.Checkpointer(
        config.output_dir,
        model=training.registered,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        dataloader=training.loader,
        scaler=accelerator.scaler,
        overlap=True,
        keep_last=config.checkpoints_total_limit,
        stop_signals=[signal.SIGTERM],
    )
    if training.average is not None:
        training.average.watch(checkpointer)
    with interruptible(), checkpointer:
        start = _resume(config, checkpointer, accelerator)
        if start and run.changes:
            apply_changed_flags(config, training.models, optimizer.optimizer, scheduler, run.changed, world_size)
            if accelerator.is_main_process:
                logger.warning("%s", run.describe())
        if accelerator.is_main_process:
            run.write(config)
        if start >= total and accelerator.is_main_process:
            logger.info("all %d steps are done: there is nothing left to train", total)
        with closing(Reporter(config, accelerator, run.recipe, run.run_id, checkpointer, start, total)) as reporter:
            epoch = training.loader.epoch
            for step, losses, norm in _steps(accelerator, config, training, optimizer, start, total):
                rates = _rates(training, scheduler)
                skipped = accelerator.optimizer_step_was_skipped  # fp16: an overflow
                loss, size = _finite(accelerator, step, losses, None if skipped else norm, checkpointer)
                if not skipped:
                    scheduler.step()
                if training.average is not None:
                    training.average.update(step)
                if step % config.checkpointing_steps == 0 or step == total:
                    checkpointer.save(step)
                shown = {"loss": loss, **rates} | ({"grad_norm": size} if size is not None and config.max_grad_norm > 0 else {})
                reporter.step(step, shown, optimizer, training.loader.epoch)
                epoch, before = training.loader.epoch, epoch
                if training.validate is not None and (phase := _phase(config, step == total, before, epoch)):
                    training.validate(reporter, phase, step)
                if step < total and checkpointer.should_stop:
                    logger.warning("stopped by a signal after step %d; to continue: --resume_from_checkpoint latest", step)
                    return None
            _finish(checkpointer)
    done = config.checkpoint_path()  # a resumed run with nothing left to do has written nothing
    return done if done is not None and start >= total else Path(config.output_dir) / f"checkpoint-{max(start, total)}"


def _rates(training: Training, scheduler: torch.optim.lr_scheduler.LambdaLR) -> dict[str, float]:
    """The learning rates by the name that `metrics.jsonl` has for them."""
    names = ("lr", *(f"lr_{part}" for part in list(training.models)[1:]))
    return {name: float(rate) for name, rate in zip(names, scheduler.get_last_lr(), strict=True)}


def _phase(config: DiffusionConfig, last: bool, before: int, epoch: int) -> str | None:
    """Which pictures are due after a step: those of the end, those of every so many passes over the samples, or none."""
    if last and config.last_prompt is not None:
        return "final"
    due = epoch // config.validation_epochs > before // config.validation_epochs
    return "validation" if due and config.validation_prompt is not None else None


def _finite(
    accelerator: Accelerator, step: int, losses: torch.Tensor, norm: Any, checkpointer: holdfast.Checkpointer
) -> tuple[float, float | None]:
    """The mean loss over all ranks and the gradients' norm. Every rank gets the same numbers: all of them stop here or none.

    Raises:
        TrainingDiverged: one of them is no finite number.
    """
    mean = float(accelerator.reduce(losses, reduction="mean").item())
    size = None
    if norm is not None:
        size = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if math.isfinite(mean) and (size is None or math.isfinite(size)):
        return mean, size
    each: Any = accelerator.gather(losses.reshape(1))
    ranks = [str(rank) for rank, value in enumerate(each.tolist()) if not math.isfinite(value)]
    what = f"the loss is {mean} (rank {', '.join(ranks)})" if ranks else f"the loss is {mean}, the gradients' norm {size}"
    good = [save.step for save in checkpointer.saves if save.state != "failed"]
    last = f"The last checkpoint before it, of step {good[-1]}, is kept" if good else "There is no checkpoint of this start before it"
    raise TrainingDiverged(
        f"Step {step}: {what}. Training stops on all ranks, and this step is not saved. {last}. Look at the data and at "
        "--learning_rate, --max_grad_norm and --mixed_precision, and continue with --resume_from_checkpoint latest."
    )


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
    training: Training,
    optimizer: Any,
    start: int,
    total: int,
) -> Iterator[tuple[int, torch.Tensor, Any]]:
    """Yields (step, this rank's mean loss, gradient norm or None) after each optimizer step."""
    batches, models = _endless(training.loader), list(training.models.values())
    for step in range(start + 1, total + 1):
        losses, norm = torch.zeros((), device=accelerator.device), None
        saved = step % config.checkpointing_steps == 0 or step == total
        for _ in range(config.gradient_accumulation_steps):
            batch = next(batches)
            with accelerator.accumulate(*models):
                value = training.loss(batch)
                accelerator.backward(value)
                if accelerator.sync_gradients and (config.max_grad_norm > 0 or saved):
                    norm = clip_gradients(accelerator, models, config.max_grad_norm or math.inf)
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
