"""The Trainer of text recipes: the engine's checkpoints, a stream that keeps its place, a model that no rank ever holds whole."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer

from holdfast.integrations.trainer import HoldfastTrainerMixin, engine_of
from holdfast.training.text_model import Pretrained, cut
from holdfast.training.text_stream import TextStream


class TextTrainer(HoldfastTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer; `pretrained` where the model has no memory yet, `stream` where the data is one."""

    model: Any
    model_wrapped: Any
    optimizer: Any

    def __init__(self, model: nn.Module, args: Any, *, pretrained: Pretrained | None, stream: TextStream | None, **rest: Any) -> None:
        self._pretrained, self._stream = pretrained, stream
        args.remove_unused_columns = False  # there are none; and FSDP1's wrapper would hide which are used
        super().__init__(model, args, **rest)

    def get_train_dataloader(self) -> Any:
        return self._stream if self._stream is not None else super().get_train_dataloader()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self._pretrained is None or engine_of(self) is not None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self.load()
        self.create_optimizer(self.model)
        self.optimizer = self.accelerator.prepare_optimizer(self.optimizer, device_placement=False)
        self.create_scheduler(num_training_steps=max_steps)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def load(self) -> None:
        """Cut the model and read this rank's part of its weights, if that is still to be done."""
        if self._pretrained is not None and engine_of(self) is None:
            self.model = self.model_wrapped = self._pretrained.fill(cut(self.accelerator, self.model))
