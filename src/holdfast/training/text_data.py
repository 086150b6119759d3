"""Texts of a dataset or of files, cut into blocks of tokens: all of them before the training, or as a stream beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import Dataset

from holdfast.errors import UsageError
from holdfast.training.once import once
from holdfast.training.text_flags import DataFlags, ModelFlags
from holdfast.training.text_stream import TextStream

logger = logging.getLogger(__name__)

TOKENISING_DEADLINE_S = 24 * 3600.0
LONGEST_DEFAULT = 1024
"""Tokens of a block where tokenizer and model would take more: what their activations take grows with it."""

_FORMATS = {"txt": "text", "csv": "csv", "json": "json", "jsonl": "json", "parquet": "parquet"}


@dataclass
class Texts:
    """`train` and `validation` are None where they are not wanted, or (a stream's) of the whole split: `is_trained` parts it."""

    train: Any
    validation: Any
    column: str
    is_trained: Callable[[int], bool]
    parted: bool
    """Whether one split is both: then the texts for which `is_trained` is false are the validation."""


def load_texts(data: DataFlags, model: ModelFlags, train: bool, evaluate: bool) -> Texts:
    """The splits that are wanted; every rank calls this.

    Raises:
        UsageError: there are none, or they cannot be read.
    """
    splits = _load(data, model)
    if train and "train" not in splits:
        raise UsageError("--do_train needs texts to train on, and the data has no train split: --train_file, or another dataset")
    parted = "validation" not in splits and data.validation_split_percentage > 0 and "train" in splits
    if evaluate and "validation" not in splits and not parted:
        raise UsageError("--do_eval needs texts: a --validation_file, or a --validation_split_percentage above 0")
    percentage = data.validation_split_percentage
    held = splits["train"] if "train" in splits else splits["validation"]
    names = list(held.features or next(iter(held)))
    column = "text" if "text" in names else names[0]
    validation = splits["train"] if parted else splits.get("validation")
    return Texts(
        splits.get("train") if train else None,
        validation if evaluate else None,
        column,
        (lambda index: index % 100 >= percentage) if parted else _always,
        parted,
    )


def _always(index: int) -> bool:
    return True


def _load(data: DataFlags, model: ModelFlags) -> Any:
    try:
        if data.dataset_name is not None:
            return datasets.load_dataset(
                data.dataset_name, data.dataset_config_name, cache_dir=model.cache_dir, token=model.token, streaming=data.streaming
            )
        files = {"train": data.train_file, "validation": data.validation_file}
        given = {name: path for name, path in files.items() if path is not None}
        kind = _FORMATS[Path(next(iter(given.values()))).suffix[1:]]
        more = {"keep_linebreaks": data.keep_linebreaks} if kind == "text" else {}
        return datasets.load_dataset(kind, data_files=given, cache_dir=model.cache_dir, streaming=data.streaming, **more)
    except (FileNotFoundError, ValueError, datasets.exceptions.DatasetsError) as error:
        what = data.dataset_name or data.train_file or data.validation_file
        raise UsageError(f"the dataset {what} cannot be read: {error}") from error


def block_size(data: DataFlags, tokenizer: Any, config: Any) -> int:
    """Tokens of a block: what was asked for, as far as tokenizer and model take it."""
    longest = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length)
    wanted = data.block_size or min(longest, LONGEST_DEFAULT)
    if wanted > longest:
        logger.warning("--block_size %d is more than the model takes: blocks have %d tokens", wanted, longest)
    return int(min(wanted, longest))


class PackedTexts(Dataset[dict[str, torch.Tensor]]):
    """Tokenised texts, put end to end and cut into blocks; only the last, incomplete one is left out.

    The tokens stay where `datasets` has mapped them, and a block costs what its own tokens do, however long the texts are.
    """

    def __init__(self, tokenised: Any, size: int, limit: int | None) -> None:
        self._tokenised, self._size = tokenised.flatten_indices() if len(tokenised) else None, size
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        count = int(self._ends[-1]) // size if len(self._ends) else 0
        self._count = min(count, limit) if limit is not None else count

    @cached_property
    def _parts(self) -> list[Any]:
        """The texts' tokens as Arrow holds them, some texts in each array."""
        return [chunk.flatten() for chunk in self._tokenised.data.column("input_ids").chunks] if self._tokenised is not None else []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_parts"}  # a worker maps them for itself

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        start, stop = index * self._size, (index + 1) * self._size
        found, number = [], int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end, part = int(self._ends[number]), self._parts[number]
            piece = part.slice(start - (end - len(part)), min(stop, end) - start)
            found.append(piece.to_numpy())
            start, number = start + len(piece), number + 1
        block = torch.from_numpy(np.concatenate(found).astype(np.int64))
        return {"input_ids": block, "labels": block.clone()}


def packed(texts: Texts, split: Any, tokenizer: Any, size: int, limit: int | None, data: DataFlags, training: bool) -> PackedTexts:
    """The blocks of a split; one process of each node tokenises, the others take what it has kept."""
    rows = split
    if texts.parted:
        rows = split.select([i for i in range(len(split)) if texts.is_trained(i) == training])

    def tokenise() -> Any:
        return rows.map(
            _Tokenise(tokenizer, texts.column), batched=True, num_proc=data.preprocessing_num_workers, remove_columns=rows.column_names,
            load_from_cache_file=not data.overwrite_cache, desc="tokenising",
        )  # fmt: skip

    def first() -> str:
        tokenise()
        return ""

    once(first, "node", TOKENISING_DEADLINE_S)
    blocks = PackedTexts(tokenise(), size, limit)
    if not len(blocks):
        raise UsageError(f"the {'training' if training else 'validation'} texts have fewer tokens than one block of {size}: give a smaller --block_size")
    return blocks


class _Tokenise:
    """A batch of texts to tokens; an object, so that its cache is found again."""

    def __init__(self, tokenizer: Any, column: str) -> None:
        self._tokenizer, self._column = tokenizer, column

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        return {"input_ids": self._tokenizer(batch[self._column], verbose=False)["input_ids"]}


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    return encode


def training_stream(texts: Texts, tokenizer: Any, size: int, data: DataFlags, args: Any) -> TextStream:
    """This rank's share of a stream. A source that falls into as many parts as there are ranks is read in parts."""
    rank, world_size = args.process_index, args.world_size
    source, limit = texts.train, None
    if data.max_train_samples is not None:
        limit = data.max_train_samples // world_size + (rank < data.max_train_samples % world_size)
        if limit == 0:
            raise UsageError(f"--max_train_samples {data.max_train_samples} is less than one block for each of {world_size} ranks")
    if not texts.parted and world_size > 1 and source.num_shards % world_size == 0:
        source, rank, world_size = source.shard(num_shards=world_size, index=rank), 0, 1
    return TextStream(
        source, texts.column, encoder(tokenizer), block_size=size, batch_size=args.per_device_train_batch_size, rank=rank,
        world_size=world_size, is_trained=texts.is_trained, seed=args.seed, buffer=data.shuffle_buffer_size, limit=limit,
    )  # fmt: skip


def validation_blocks(texts: Texts, tokenizer: Any, size: int, limit: int | None) -> list[dict[str, torch.Tensor]]:
    """The first blocks of a stream's validation texts, all of them without a limit."""
    encode = encoder(tokenizer)

    def blocks() -> Iterator[dict[str, torch.Tensor]]:
        left: list[int] = []
        for index, row in enumerate(texts.validation):
            if texts.parted and texts.is_trained(index):
                continue
            left += encode(row[texts.column])
            while len(left) >= size:
                block, left = torch.tensor(left[:size]), left[size:]
                yield {"input_ids": block, "labels": block.clone()}

    found = list(islice(blocks(), limit))
    if not found:
        raise UsageError(f"the validation texts have fewer tokens than one block of {size}: give a smaller --block_size")
    return found
