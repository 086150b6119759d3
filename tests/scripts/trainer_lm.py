"""Trains a causal language model on lines of text with transformers' Trainer, in the shape of the public scripts.

It knows nothing of Holdfast, but that `--mixin` shows the form for those who may edit their script. `--die_at N` ends the process after
step N, once its checkpoint is whole; `--signal_at N` sends SIGTERM to one rank after it, and `--main_only` asks for the model on the
main process alone, `--model_at N` in the middle of the training.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class Arguments:
    model_name_or_path: str
    train_file: str
    streaming: bool = False
    lora: bool = False
    mixin: bool = False
    newest: bool = False
    mask: float = 0.15
    die_at: int = -1
    signal_at: int = -1
    model_at: int = -1
    main_only: bool = False
    block: int = field(default=16)
    seen: str | None = None


class Dies(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            while not Path(args.output_dir, f"checkpoint-{self.step}", "trainer_state.json").is_file():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


class IsSignalled(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.1)  # steps as long as those of a model that is not tiny
        if state.global_step == self.step and not state.is_world_process_zero:
            os.kill(os.getpid(), signal.SIGTERM)


class SavesModel(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and state.is_world_process_zero:
            self.trainer.save_model()


def main() -> None:
    own, args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path, attention_dropout=0.1)
    if own.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    data = load_dataset("text", data_files={"train": own.train_file}, streaming=own.streaming)["train"]

    def encode(batch):
        numbers = [int(text.split()[1].rstrip(":")) for text in batch["text"]]
        return {**tokenizer(batch["text"], padding="max_length", truncation=True, max_length=own.block), "number": numbers}

    data = data.map(encode, batched=True, batch_size=8, remove_columns=["text"])

    def collate(rows):  # draws from the global generator, as masking does
        ids = torch.tensor([row["input_ids"] for row in rows])
        labels = ids.clone()
        if own.seen:
            with open(own.seen, "a") as file:
                file.writelines(f"{row['number']}\n" for row in rows)
        if own.mask > 0:
            labels[torch.rand(ids.shape) < own.mask] = -100
        return {"input_ids": ids, "labels": labels}

    trainer_type = Trainer
    if own.mixin:
        from holdfast.integrations.trainer import HoldfastTrainerMixin

        class MyTrainer(HoldfastTrainerMixin, Trainer):
            pass

        trainer_type = MyTrainer
    trainer = trainer_type(
        model,
        args,
        train_dataset=data,
        eval_dataset=None if own.streaming or args.eval_strategy == "no" else data.select(range(8)),
        processing_class=tokenizer,
        data_collator=collate,
        callbacks=[kind(step) for kind, step in ((Dies, own.die_at), (IsSignalled, own.signal_at), (SavesModel, own.model_at)) if step >= 0],
    )
    SavesModel.trainer = trainer
    resume = get_last_checkpoint(args.output_dir) if own.newest else args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero() or not own.main_only:
        trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
