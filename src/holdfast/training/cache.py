"""What is encoded once and kept on disk: latents of images, embeddings of captions.

    output_dir/cache/<kind>/<key>.safetensors        one file an entry; the key is a hash of content and settings

An entry is looked up by what it is of, never by when it is needed: every rank, order, epoch and resume finds the same one, and
what was encoded with other settings has another key. The ranks share out what is missing, each its part, and write each file
under another name first, so that a file that is there is whole: a preparation that was killed goes on where it was, and one
that is done finds nothing to do.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from holdfast.training.once import once

logger = logging.getLogger(__name__)

Entry = dict[str, torch.Tensor]

# Encoding ten thousand images on a slow device.
PREPARATION_DEADLINE_S = 6 * 3600.0


class Cache:
    """The entries of one kind in the folder of a run."""

    def __init__(self, output_dir: Path, kind: str) -> None:
        self.folder, self.kind = output_dir / "cache" / kind, kind
        self._read = lru_cache(maxsize=64)(self._load)

    def prepare(self, wanted: Mapping[str, Any], encoder: Callable[[], Callable[[Any], Entry]]) -> int:
        """Make every entry of `wanted` (key -> content) that is missing; returns how many that were, on all ranks together.

        `encoder()` gives what encodes one content; it is called on ranks that have something to do. Every rank calls this
        with the same keys, and returns when all entries are there.
        """
        missing = _told_by_rank_0(sorted(key for key in wanted if not self._path(key).exists()))
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = missing[rank::ranks]

        def work() -> str:
            if mine:
                self.folder.mkdir(parents=True, exist_ok=True)
                encode = encoder()
                for key in mine:
                    self._write(key, encode(wanted[key]))
            return ""

        if missing:
            once(work, "rank", PREPARATION_DEADLINE_S)
            if rank == 0:
                logger.info("encoded %d %s, %d were there", len(missing), self.kind, len(wanted) - len(missing))
        return len(missing)

    def __getitem__(self, key: str) -> Entry:
        """One entry, on the CPU. KeyError where nobody has prepared it."""
        return self._read(key)

    def _load(self, key: str) -> Entry:
        path = self._path(key)
        if not path.exists():
            raise KeyError(f"{path} is gone: start again, and it is encoded anew")
        return load_file(path)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _write(self, key: str, entry: Entry) -> None:
        new = self.folder / f".{key}.{os.getpid()}.new"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in entry.items()}, new)
        os.replace(new, self._path(key))


def key_of(*what: Any) -> str:
    """A hash of plain values: content, model and settings of one entry."""
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:40]


def _told_by_rank_0(keys: Sequence[str]) -> list[str]:
    """One list for all: while a rank looks, another may be writing already."""
    told = [list(keys)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(told)
    return told[0]
