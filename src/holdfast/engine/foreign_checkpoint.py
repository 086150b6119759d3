"""Another program's checkpoint as a source that a resume reads like one of its own, rank by rank and without a collective.

Its tensors are found under the names of the live objects, which also give what the file does not say: which model is the
first, and in which order an optimizer holds its parameters. Every rank reads the documents, and of the tensors the bytes that its
own shards need: ranges of safetensors and DCP files, pages of mapped pickles. What the folder does not hold stays as it is and
is told; what cannot be read is told with the file and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from holdfast.core.boxes import Box, one_rank
from holdfast.core.documents import Json, canonical, digest
from holdfast.core.layout import BaseFile, TensorSpec, item_size, stored_as
from holdfast.core.manifest import Manifest
from holdfast.core.safetensors import Entry
from holdfast.engine import dtypes, rng
from holdfast.engine.base_files import PAGE, BaseFiles
from holdfast.engine.blocks import BlockFile, Part, read_parts
from holdfast.engine.checkpoint import Checkpoint, Piece
from holdfast.engine.collect import Registered
from holdfast.engine.foreign import Content, generators_of
from holdfast.engine.fsdp1 import FlatPiece
from holdfast.engine.names import NamedState, extra_state_modules, join, named_state
from holdfast.engine.optimizers import known_params
from holdfast.errors import IncompatibleCheckpoint, UsageError
from holdfast.formats.foreign import Foreign, Loader, Stretch
from holdfast.formats.read import read_foreign
from holdfast.formats.recognise import NATIVE, WEIGHTS, recognise
from holdfast.storage import LocalFolder, Storage

_LOADED = 0
"""The source of pieces that the format's own reader gives; files are the sources from 1 on."""


def is_foreign(storage: Storage, folder: str) -> bool:
    """Whether it is a checkpoint of another program, by the names in it."""
    return isinstance(storage, LocalFolder) and recognise(storage, folder) not in (None, NATIVE)


def identity_of(storage: Storage, folder: str) -> str:
    """What ranks compare to know that they see the same folder: the names and sizes of all files in it, two levels deep."""
    assert isinstance(storage, LocalFolder)
    storage = LocalFolder(storage.root, follow_links=True)
    found: dict[str, Json] = {}
    for name in storage.names(folder):
        inside = storage.names(f"{folder}/{name}")
        for path in [f"{name}/{n}" for n in inside] or [name]:
            plain = storage.exists(f"{folder}/{path}")  # a folder, empty or deeper down, counts by its name
            found[path] = storage.size(f"{folder}/{path}") if plain else None
    return digest(canonical(found))


class ForeignCheckpoint(Checkpoint):
    """One folder of another program, for the objects in `registered`.

    `left` are the keys and names of what it does not hold and what stays as it is, `left_out` says so in words.

    Raises:
        CheckpointNotFound, CorruptCheckpoint, IncompatibleCheckpoint: it cannot be read, or is of another model; the message names the
            file.
        UsageError: it does not tell how many steps were done.
    """

    native = False

    def __init__(self, storage: LocalFolder, folder: str, registered: Registered) -> None:
        self.storage, self.folder = storage, folder
        self.where = f"{storage.describe()}/{folder}"
        self.digest = identity_of(storage, folder)
        self.base_files = BaseFiles(self.where, tuple)
        foreign = read_foreign(storage.root / folder, alone=True)
        if foreign.step is None:
            raise UsageError(
                f"{self.where} does not tell how many optimizer steps were done: make a Holdfast checkpoint of it and say it there: "
                f"holdfast import {self.where} OUTPUT_DIR --step N"
            )
        self.left_out = foreign.left_out
        self._registered, self._foreign = registered, foreign
        self._names = named_state(registered.models)
        self._content = Content()
        self._left: set[str] = set()
        self._files: dict[tuple[str, str], int] = {}
        self._blocks: list[BlockFile] = []
        self._loaders: dict[tuple[str, Box], Loader] = {}
        self._take_models()
        self._take_optimizers()
        self._take_stateful()
        # Without generators in the folder each rank keeps its own.
        ranks = len(foreign.rng) or registered.world_size
        self.manifest = Manifest("", 0, 0, foreign.step, ranks, (), (), True)

    # ------------------------------------------------------------------------------------------- what a restore asks for

    @property
    def left(self) -> set[str]:
        return self._left

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec(dtypes.NAME_OF[part.source.dtype], part.source.shape, one_rank(), 0, part.slot)
            for name, part in self._content.tensors.items()
        }

    @cached_property
    def aliases(self) -> dict[str, str]:
        return self._content.aliases

    @cached_property
    def bases(self) -> list[BaseFile]:
        return []

    def small(self, rank: int) -> dict[str, Json]:
        generators = generators_of(self._foreign.rng[rank]) if self._foreign.rng else rng.capture()
        return {"state": self._content.small, "rng": generators, "step": self.manifest.step, "rank": rank}

    def pieces(self, name: str, spec: TensorSpec, wanted: Box) -> Iterator[Piece]:
        for box, at in self._content.tensors[name].source.pieces(wanted):
            if box.intersect(wanted) is None:
                continue
            if isinstance(at, Stretch):
                yield Piece(self._source(at), box, box, at.entry, spec.dtype)
            else:
                self._loaders[name, box] = at
                yield Piece(_LOADED, box, box, Entry(*stored_as(spec.dtype, box.size), 0, box.numel * item_size(spec.dtype)), spec.dtype)

    def _source(self, at: Stretch) -> int:
        key = at.storage.describe(), at.path
        if key not in self._files:
            self._blocks.append(BlockFile(at.storage, at.path, at.size, block_size=PAGE))
            self._files[key] = len(self._blocks)
        return self._files[key]

    def read(self, source: int, parts: Sequence[Part]) -> int:
        if source != _LOADED:
            return read_parts(self._blocks[source - 1], parts)
        done = 0
        with torch.no_grad():
            for (name, box), group in groupby(parts, key=lambda part: (part.name, part.piece)):
                piece = self._loaders[name, box]()
                for part in group:
                    part.target.copy_(piece[part.wanted.relative_to(box).slices()])
                    done += part.target.nbytes
        return done

    # ------------------------------------------------------------------------------------ the live objects' names for it

    def _take_models(self) -> None:
        foreign, keys = self._foreign, list(self._registered.models)
        if len(foreign.models) != len(keys):
            raise IncompatibleCheckpoint(f"{self.where} holds {len(foreign.models)} models, the Checkpointer was given {len(keys)}")
        if foreign.kind == WEIGHTS:
            self._refuse_other_types(foreign)
        self._content.add_models(foreign, keys)
        stored, needed = self._content.tensors, self._names.tensors
        for alias, name in self._names.aliases.items():  # of a tied tensor the file may keep another name than its first one
            if alias in stored and name not in stored:
                self._content.aliases.setdefault(name, alias)
        partial = [join("model", key) for key, model in zip(keys, foreign.models, strict=True) if model.partial]
        for name, tensor in needed.items():
            trained = tensor.trained if isinstance(tensor, FlatPiece) else tensor.requires_grad
            known = name in stored or name in self._content.aliases
            if not known and not trained and any(name.startswith(f"{prefix}.") for prefix in partial):
                self._left.add(name)
        self._left |= extra_state_modules(self._registered.models).keys()

    def _refuse_other_types(self, foreign: Foreign) -> None:
        """Weights alone are often published in another type than the one to train in."""
        for key, model in zip(self._registered.models, foreign.models, strict=True):
            for name, source in model.tensors.items():
                live = self._names.tensors.get(join("model", key, name))
                if live is not None and live.dtype != source.dtype and tuple(live.shape) == source.shape:
                    raise IncompatibleCheckpoint(
                        f"{self.where}: {name} is {source.dtype} there and {live.dtype} here, and a resume converts nothing: begin with "
                        "these weights by holdfast.load_pretrained(model, folder), which does"
                    )

    def _take_optimizers(self) -> None:
        foreign, optimizers = self._foreign, self._registered.optimizers
        if not foreign.optimizers or not optimizers:
            self._left |= {join("optimizer", key) for key in optimizers}
            return
        if len(foreign.optimizers) != len(optimizers):
            raise IncompatibleCheckpoint(
                f"{self.where} holds the state of {len(foreign.optimizers)} optimizers, the Checkpointer was given {len(optimizers)}"
            )
        for index, (key, optimizer) in enumerate(optimizers.items()):
            groups = _order(key, optimizer, self._names)
            prefixes = [join("model", k) for k in self._registered.models]
            whole = (p for p in prefixes if all(name.startswith(f"{p}.") for names in groups for name in names))
            prefix = next(whole, "")
            if prefix:
                groups = [[name.removeprefix(f"{prefix}.") for name in names] for names in groups]
            self._content.add_optimizer(key, foreign, index, prefix, lambda _, groups=groups: groups)  # type: ignore[misc]

    def _take_stateful(self) -> None:
        found = self._foreign.stateful
        by_kind: dict[str, list[str]] = {}
        for key in found:
            by_kind.setdefault(key.partition(".")[0], []).append(key)
        count: dict[str, int] = {}
        for key, value in self._registered.stateful.items():
            kind = key.partition(".")[0]
            index = count[kind] = count.get(kind, -1) + 1
            theirs = key if kind == "extra" else next(iter(by_kind.get(kind, [])[index : index + 1]), None)
            if theirs not in found:
                self._leave(key, "is not in the folder")
            elif kind == "dataloader" and getattr(value, "any_world_size", False):
                self._leave(key, "has an order of its own, in which the position of another loader means nothing")
            elif kind == "dataloader" and len(self._foreign.rng) not in (0, self._registered.world_size):
                self._leave(key, f"cannot take the position of one rank of {len(self._foreign.rng)}")
            else:
                self._take_value(key, found[theirs])

    def _take_value(self, key: str, value: Any) -> None:
        try:
            self._content.add_value(key, value)
        except UsageError as error:
            self._leave(key, str(error.args[0]))

    def _leave(self, key: str, why: str) -> None:
        self._left.add(key)
        self.left_out.append(f"{key} {why}: it stays as it is")


def _order(key: str, optimizer: torch.optim.Optimizer, names: NamedState) -> list[list[str]]:
    """The names of the parameters in each of an optimizer's groups; those of a flat unit in the model's order."""
    known = known_params(key, optimizer, names)
    position = {name: i for i, name in enumerate(names.parameters)}
    groups = []
    for group in optimizer.param_groups:
        found = [known[id(p)] for p in group["params"]]
        listed = [name for k in found for name in k.names]
        groups.append(sorted(listed, key=position.__getitem__) if any(k.unit is not None for k in found) else listed)
    return groups
