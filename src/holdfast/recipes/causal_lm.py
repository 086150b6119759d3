"""`holdfast train causal-lm`: a causal language model on texts, by transformers' Trainer with the engine behind it.

The flags are those of transformers' run_clm.py and of its TrainingArguments. Model: `training.text_model`. Data: `training.text_data`,
`training.text_stream`. Loss: the model's own.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.integrations import cpu_ranks
from holdfast.training.text_flags import (
    OWN,
    DataFlags,
    HereFlags,
    ModelFlags,
    flags_of,
    help_text,
    in_current_words,
    value_of,
    without,
)

logger = logging.getLogger("holdfast")

PROG = "holdfast train causal-lm"
_BROADCASTS = ("FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_SYNC_MODULE_STATES")
"""Ways to load on one rank for all: here each rank reads its own part."""

_FORMATS = ("csv", "json", "jsonl", "parquet", "txt")


@dataclass
class Config:
    """The flags: `trainer` are those that the Trainer takes, as they were given, in today's spelling."""

    model: ModelFlags
    data: DataFlags
    cpu_fsdp: bool
    trainer: list[str]
    warnings: list[str]

    def given(self, flag: str) -> str | None:
        return value_of(self.trainer, flag)

    def is_on(self, flag: str) -> bool:
        return (self.given(flag) or "false").lower() in ("true", "1", "yes")

    @property
    def trains(self) -> bool:
        return self.is_on("do_train")

    @property
    def evaluates(self) -> bool:
        strategy = self.given("eval_strategy")
        return self.is_on("do_eval") or strategy not in (None, "no")

    def validate(self) -> None:
        """Raises one UsageError with every problem, before anything is loaded."""
        if found := [*self._model_problems(), *self._data_problems(), *self._run_problems()]:
            lines = "\n".join(f"  - {line}" for line in found)
            raise UsageError(f"{len(found)} thing(s) to correct before training can start:\n{lines}")

    def _model_problems(self) -> Iterator[str]:
        m = self.model
        if m.model_name_or_path is None and not (m.model_type or m.config_name):
            yield "--model_name_or_path is missing (or, for a new model, --model_type or --config_name)."
        if m.model_name_or_path is None and m.tokenizer_name is None:
            yield "A new model needs a --tokenizer_name."
        if m.config_overrides and (m.config_name or m.model_name_or_path):
            yield "--config_overrides is for a new model: leave out --config_name and --model_name_or_path."
        for name in ("model_name_or_path", "tokenizer_name", "config_name"):
            path = Path(getattr(m, name) or ".")
            if not path.is_dir() and (path.is_absolute() or len(path.parts) > 2 or path.parts[0] in (".", "..")):
                yield f"--{name} {path}: there is no such folder, and it is no repository name (owner/name) either."

    def _data_problems(self) -> Iterator[str]:
        d = self.data
        if d.dataset_name is None and d.train_file is None and d.validation_file is None:
            yield "There is no data: --dataset_name, or --train_file and --validation_file."
        suffixes = set()
        for name in ("train_file", "validation_file"):
            path = getattr(d, name)
            if path is not None and not Path(path).is_file():
                yield f"--{name} {path}: there is no such file."
            elif path is not None and Path(path).suffix[1:] not in _FORMATS:
                yield f"--{name} {path}: its name should end in one of {', '.join(_FORMATS)}."
            suffixes |= {Path(path).suffix} if path is not None else set()
        if len(suffixes) > 1:
            yield f"--train_file and --validation_file are of different kinds ({', '.join(sorted(suffixes))})."
        floors = {"block_size": 1, "max_train_samples": 1, "max_eval_samples": 1, "shuffle_buffer_size": 0, "preprocessing_num_workers": 1}
        for name, floor in floors.items():
            value = getattr(d, name)
            if value is not None and value < floor:
                yield f"--{name} is {value}; it has to be at least {floor}."
        if not 0 <= d.validation_split_percentage < 100:
            yield f"--validation_split_percentage is {d.validation_split_percentage}; it has to be from 0 to 99."

    def _run_problems(self) -> Iterator[str]:
        d = self.data
        if not self.trains and not self.evaluates:
            yield "There is nothing to do: --do_train, --do_eval, or both."
        try:
            steps = int(self.given("max_steps") or -1)
        except ValueError:
            steps = 1  # told when the Trainer's flags are read
        if d.streaming and self.trains and steps < 1:
            yield "--streaming needs --max_steps: a stream does not say how long it is."
        if d.streaming and self.evaluates and d.validation_file is None and d.max_eval_samples is None:
            yield "--streaming with an evaluation needs --max_eval_samples, or all of the stream would be read for it."
        resume = self.given("resume_from_checkpoint")
        if resume is not None and resume.lower() not in ("true", "false") and not Path(resume).is_dir():
            yield f"--resume_from_checkpoint {resume}: there is no such folder. Without a path it takes the newest in --output_dir."
        if (path := Path(self.given("output_dir") or "trainer_output")).exists() and not path.is_dir():
            yield f"--output_dir {path} is a file; name a folder."


def parse(arguments: list[str]) -> Config:
    """The config of a command line; answers `--help`. Imports no torch.

    Raises:
        UsageError: a flag is unknown, or has another kind of value.
    """
    if "--help" in arguments or "-h" in arguments:
        print(help_text(PROG))
        raise SystemExit(0)
    spelled, warnings = in_current_words(flags_of(arguments, PROG))
    model, data, here, rest = _parser(OWN).parse_args_into_dataclasses(
        spelled, return_remaining_strings=True, look_for_args_file=False
    )
    assert isinstance(model, ModelFlags)
    assert isinstance(data, DataFlags)
    assert isinstance(here, HereFlags)
    return Config(model, data, here.cpu_fsdp, list(rest), warnings)


def _parser(groups: Any) -> Any:
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):  # type: ignore[misc, unused-ignore]
        def error(self, message: str) -> Any:
            raise UsageError(f"{PROG}: {message} (all flags: {PROG} --help)")

    return Parser(groups, allow_abbrev=False, add_help=False)


def training_arguments(config: Config) -> Any:
    """The Trainer's arguments on this machine, with what it has not left out.

    Raises:
        UsageError: what the Trainer itself finds wrong, or FSDP on CPU ranks without the flag for it.
    """
    import torch
    from transformers import TrainingArguments

    words, device = config.trainer, torch.accelerator.current_accelerator(check_available=True)
    cpu_ranks.join_without_accelerator()
    if cpu_ranks.requested(config.cpu_fsdp):
        cpu_ranks.enable()
    for name in _BROADCASTS:  # of an accelerate config
        if os.environ.get(name) is not None:
            os.environ[name] = "false"
    if device is None and not config.is_on("use_cpu"):
        words = [*words, "--use_cpu", "True"]
    if config.is_on("tf32") and (device is None or device.type != "cuda"):
        config.warnings.append("--tf32 has no effect: this machine has no NVIDIA GPU.")
        words = without(words, "tf32")
    try:
        (args,) = _parser((TrainingArguments,)).parse_args_into_dataclasses(words, look_for_args_file=False)
    except (ValueError, ImportError, OSError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"the Trainer refuses these flags: {error}") from error
    sharded = config.given("fsdp") is not None
    if sharded and device is None and args.world_size > 1 and not cpu_ranks.requested(config.cpu_fsdp):
        raise UsageError("Accelerate ignores FSDP on CPU ranks and would train a whole copy of the model in each: add --cpu_fsdp")
    if config.data.streaming and args.dataloader_num_workers:
        config.warnings.append("--dataloader_num_workers has no effect with --streaming.")
    if args.process_index == 0:
        for line in config.warnings:
            logger.warning("%s", line)
    return args


def main(config: Config) -> None:
    """Train, evaluate, and leave a model that `from_pretrained` loads in `--output_dir`."""
    args = training_arguments(config)
    import transformers
    from transformers import default_data_collator, set_seed

    from holdfast.integrations import trainer as engine
    from holdfast.training import text_data
    from holdfast.training.setup import configure_logging
    from holdfast.training.text_model import Pretrained
    from holdfast.training.text_trainer import TextTrainer

    configure_logging()
    if args.should_log:
        transformers.utils.logging.set_verbosity_warning()
    set_seed(args.seed)
    data = config.data
    texts = text_data.load_texts(data, config.model, config.trains, config.evaluates)
    pretrained = Pretrained(config.model)
    size = text_data.block_size(data, pretrained.tokenizer, pretrained.config)
    train: Any = None
    evaluation: Any = None
    stream = None
    if config.trains and data.streaming:
        stream = text_data.training_stream(texts, pretrained.tokenizer, size, data, args)
    elif config.trains:
        train = text_data.packed(texts, texts.train, pretrained.tokenizer, size, data.max_train_samples, data, training=True)
    if config.evaluates and data.streaming:
        evaluation = text_data.validation_blocks(texts, pretrained.tokenizer, size, data.max_eval_samples)
    elif config.evaluates:
        evaluation = text_data.packed(texts, texts.validation, pretrained.tokenizer, size, data.max_eval_samples, data, training=False)
    bare = pretrained.on_meta()
    model = bare if bare is not None else pretrained.whole()
    sharded = config.given("fsdp") is not None or args.fsdp_plugin_args is not None or _fsdp_of_launcher()
    if bare is not None and not sharded:
        pretrained.fill(bare)
    trainer = TextTrainer(
        model, args, pretrained=pretrained if bare is not None and sharded else None, stream=stream, train_dataset=train,
        eval_dataset=evaluation, processing_class=pretrained.tokenizer, data_collator=default_data_collator,
        compute_metrics=_accuracy if evaluation is not None else None,
        preprocess_logits_for_metrics=_likeliest if evaluation is not None else None,
    )  # fmt: skip
    if config.trains:
        _train(trainer, args)
    if args.do_eval:
        _evaluate(trainer, evaluation, already=config.trains)
    engine.finish()
    if engine.failures:
        raise engine.failures[0]
    if args.push_to_hub:
        trainer.push_to_hub(finetuned_from=config.model.model_name_or_path, tasks="text-generation")


def _fsdp_of_launcher() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes")


def _train(trainer: Any, args: Any) -> None:
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    metrics = result.metrics | {"train_samples": trainer.state.global_step * trainer.get_total_train_batch_size(args)}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()


def _evaluate(trainer: Any, evaluation: Any, already: bool) -> None:
    if not already:
        trainer.load()
    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(evaluation)
    loss = metrics["eval_loss"]
    metrics["perplexity"] = math.exp(loss) if loss < 700 else math.inf
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def _likeliest(logits: Any, labels: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def _accuracy(prediction: Any) -> dict[str, float]:
    found, wanted = prediction.predictions[:, :-1].reshape(-1), prediction.label_ids[:, 1:].reshape(-1)
    return {"accuracy": float((found == wanted).mean())}
