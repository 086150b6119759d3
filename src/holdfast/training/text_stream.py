"""A stream of texts as batches of token blocks, with a position that a run goes on from exactly.

    source, in order  ->  training's part of it  ->  this rank's share  ->  chunks, shuffled inside  ->  tokens  ->  blocks

Texts are put end to end and cut into blocks; what is left over begins the next block, so that no token is lost. The position is the
source's own at the start of a chunk, how many texts of the chunk are used up, how many blocks the next text has given already,
and the tokens left over (less than a block). A resume reads at most one chunk of texts again, and tokenises one. After the last
text it begins anew: ranks whose shares differ in length never wait for each other.

The position is of one rank: a run goes on with as many ranks as it had.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from holdfast.errors import UsageError

CHUNK = 256
"""Texts between two notes of the source's position, where nothing is shuffled."""


@dataclass
class _Place:
    epoch: int
    source: Any
    index: int = 0
    """Texts of the source before the chunk."""
    trained: int = 0
    """Those among them that are training's."""
    done: int = 0
    """Texts of the chunk that are used up."""
    cut: int = 0
    """Blocks that were cut from the text after them."""
    blocks: int = 0
    """Blocks of this rank in this epoch."""
    left: list[int] = field(default_factory=list)
    """Tokens before that text."""


class TextStream:
    """Batches of one rank: `input_ids` and `labels`, both of shape (batch_size, block_size), without end.

    Args:
        source: a datasets.IterableDataset, or what iterates over dicts and has `state_dict` and `load_state_dict` as it has.
        column: where the text is.
        encode: text to token ids.
        is_trained: whether the text at an index of the source is training's.
        buffer: texts that are shuffled with each other; 0 keeps the order.
        limit: blocks of this rank, after which it begins anew; None for all.
    """

    draws_nothing = True
    """It leaves the global generators alone."""

    def __init__(
        self, source: Any, column: str, encode: Callable[[str], list[int]], *, block_size: int, batch_size: int, rank: int = 0,
        world_size: int = 1, is_trained: Callable[[int], bool] = lambda index: True, seed: int = 0, buffer: int = 0,
        limit: int | None = None,
    ) -> None:  # fmt: skip
        self._source, self._column, self._encode, self._is_trained = source, column, encode, is_trained
        self._block_size, self._batch_size, self._limit = block_size, batch_size, limit
        self._rank, self._world_size, self._seed, self._buffer = rank, world_size, seed, buffer
        self._beginning = copy.deepcopy(source.state_dict())
        self._place = _Place(0, self._beginning)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        blocks = self._blocks()
        while True:
            ids = torch.tensor([next(blocks) for _ in range(self._batch_size)])
            yield {"input_ids": ids, "labels": ids.clone()}

    def _blocks(self) -> Iterator[list[int]]:
        while True:
            place, size = self._place, self._block_size
            read = 0
            for chunk, following in self._chunks():
                while place.done < len(chunk):
                    tokens = place.left + self._encode(chunk[place.done])
                    read += len(tokens)
                    count = len(tokens) // size
                    while place.cut < count and place.blocks != self._limit:
                        place.cut, place.blocks = place.cut + 1, place.blocks + 1
                        yield tokens[(place.cut - 1) * size : place.cut * size]
                    if place.blocks == self._limit:
                        break
                    place.left, place.cut, place.done = tokens[count * size :], 0, place.done + 1
                if place.blocks == self._limit:
                    break
                place.source, place.index, place.trained, place.done = *following, 0
            if not read and place.index == 0:
                raise UsageError(f"rank {self._rank} of {self._world_size} found no text in the stream: take fewer ranks, or more texts")
            left = [] if place.blocks == self._limit else place.left
            self._place = _Place(place.epoch + 1, self._beginning, left=left)

    def _chunks(self) -> Iterator[tuple[list[str], tuple[Any, int, int]]]:
        """Chunks of this rank's texts from its place on, each with the place behind it."""
        place, size = self._place, self._buffer or CHUNK
        self._source.load_state_dict(copy.deepcopy(place.source))
        texts = iter(self._source)
        index, trained, first = place.index, place.trained, place.index
        while True:
            chunk: list[str] = []
            for row in texts:
                mine = self._is_trained(index)
                if mine and trained % self._world_size == self._rank:
                    chunk.append(row[self._column])
                index, trained = index + 1, trained + mine
                if len(chunk) == size:
                    break
            if not chunk:
                return
            if self._buffer:
                random.Random(f"{self._seed} {place.epoch} {first} {self._rank}").shuffle(chunk)
            first = index
            yield chunk, (copy.deepcopy(self._source.state_dict()), index, trained)

    def _kind(self) -> dict[str, int]:
        return {"block_size": self._block_size, "seed": self._seed, "shuffle_buffer_size": self._buffer}

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self._kind(), "place": asdict(self._place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` stood.

        Raises:
            UsageError: the blocks were cut or shuffled otherwise.
        """
        for name, mine in self._kind().items():
            if state["kind"][name] != mine:
                raise UsageError(
                    f"--{name} is {mine}, and was {state['kind'][name]} when the checkpoint was saved: the stream would be another one; "
                    "give the old value, or begin a new run"
                )
        self._place = _Place(**copy.deepcopy(state["place"]))
