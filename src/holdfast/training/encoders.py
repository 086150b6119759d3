"""Captions as a text encoder gives them: each encoded once in the whole job, kept on disk, and found by what it says.

An encoder that fits no device (`--fsdp_text_encoder`) is cut over all ranks:

    built on the meta device  ->  sharded, a layer a unit  ->  each rank reads its own slices  ->  encodes  ->  let go

No rank ever holds it whole, in host memory either: a forward gathers a layer at a time. So the ranks encode different captions
at the same time, in step; one that has none left encodes something again, and throws it away (`Cache.prepare(in_step=True)`).
Memory of a rank meanwhile: its part of the encoder, two gathered units (a layer, or the embeddings), and the activations of one
caption. It is gone before the model that is trained is loaded, and is not read at all where everything is on disk already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.training.cache import Cache, Entry, key_of
from holdfast.training.models import Build, load_frozen, load_sharded
from holdfast.training.parts import Parts, give_back_memory

Encode = Callable[[str], Entry]


class Captions:
    """The encoded captions of a run. `opened()` gives what encodes one caption; `settings` are what its result depends on.

    With `sharded` the encoder is cut over the ranks (`open_encoder`), and all of them encode in step.
    """

    def __init__(self, parts: Parts[Any], settings: list[Any], opened: Callable[[], Encode], sharded: bool = False) -> None:
        self.parts, self._settings, self._opened, self._sharded = parts, settings, opened, sharded
        self._keys: dict[str, str] = {}
        self.cache = Cache(Path(parts.config.output_dir), "embeddings")

    def encode(self, captions: Iterable[str]) -> int:
        """Have these captions encoded, by all ranks together, which all call this; returns how many were missing."""
        new = {text: key_of("embeddings", text, *self._settings) for text in sorted(set(captions) - self._keys.keys())}
        made = self.cache.prepare({key: text for text, key in new.items()}, self._opened, in_step=self._sharded)
        self._keys |= new
        if made:
            give_back_memory()
        return made

    def __call__(self, captions: list[str]) -> dict[str, torch.Tensor]:
        """What the encoder gave for each of these captions, stacked, on the device."""
        entries = [self.cache[self._keys[caption]] for caption in captions]
        return {name: torch.stack([entry[name] for entry in entries]).to(self.parts.device) for name in entries[0]}


def open_encoder(
    parts: Parts[Any],
    part: str,
    build: Build,
    dtype: torch.dtype,
    units: Iterable[str | type[nn.Module]] | None = None,
    names: Mapping[str, str] | None = None,
) -> nn.Module:
    """A text encoder, frozen, in `dtype`: whole on this rank's device, or with `units` cut over the ranks (in host memory with
    `--offload`), each module of these classes gathered by itself.

    With `names`, which translates those in its folder (`key_mapping` of `load_pretrained`), the folder may hold more than is built.
    """
    folder, variant = parts.folder(part)
    if units is not None:
        return load_sharded(build, folder, variant, dtype, parts.config.offload, units, names)
    return load_frozen(build, folder, variant, dtype, names).to(parts.device)


def encoder_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype text is encoded: the activations of large text encoders are beyond fp16."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


def can_shard() -> bool:
    """Whether there are other ranks to share an encoder with."""
    return dist.is_initialized() and dist.get_world_size() > 1


def folder_digest(folder: Path) -> str:
    """A hash of a folder's files: of a tokenizer with its chat template, on which an encoded caption depends."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]
