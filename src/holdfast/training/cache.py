"""What is encoded once and kept on disk: latents of images, embeddings of captions.

    output_dir/cache/<kind>/<first two digits>/<key>.safetensors        one file an entry; the key is a hash of content and settings

An entry is looked up by what it is of, never by when it is needed: every rank, order, epoch and resume finds the same one, and
what was encoded with other settings has another key. Each file holds a hash of its tensors and is written under another name
first. It is not forced to the disk: one that a crash of the machine has left damaged is found by its hash and made anew.

Preparing takes two rounds, both shared out among the ranks (`holdfast.training.sharing`): what is there is read and checked,
then what is missing is encoded, each entry by one rank. A preparation that was killed goes on where it was, and one that is done
opens no encoder. On an accelerator contents are read and entries written on threads, beside the encoding; on the CPU they
would only take its cores.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from holdfast.engine.fingerprint import HOST, fingerprints
from holdfast.errors import CacheDamaged
from holdfast.training.sharing import Crew, crew_for

logger = logging.getLogger(__name__)

Entry = dict[str, torch.Tensor]

_AHEAD = 4
_APPEARS_S = 30.0
"""For so long a network folder may hide what another node has written."""


class Cache:
    """The entries of one kind in the folder of a run. `remembered` of those that were read last stay in memory."""

    def __init__(self, output_dir: Path, kind: str, remembered: int = 64) -> None:
        self.folder, self.kind = output_dir / "cache" / kind, kind
        self._read = lru_cache(maxsize=remembered)(self._load)

    def prepare(
        self,
        wanted: Mapping[str, Any],
        encoder: Callable[[], Callable[[Any], Entry]],
        *,
        read: Callable[[Any], Any] = lambda content: content,
        in_step: bool = False,
    ) -> int:
        """Make every entry of `wanted` (key -> content) that is missing; returns how many that were, on all ranks together.

        `encoder()` gives what encodes one content, after `read` has made it ready, without gradients; it is called only on ranks
        that have something to do. With `in_step` it is called on all ranks or on none, and all encode at the same times, as an
        encoder wants that is sharded over them; a rank that has nothing left repeats something. Every rank calls this with the
        same keys, and returns when all entries are there.
        """
        keys = sorted(wanted)
        crew = crew_for(self.folder)
        missing = self._missing(crew, keys)
        turns = max(len(numbers) for numbers in missing) if missing else 0
        mine = [keys[number] for number in missing[crew.crews.index(crew.mine)]]
        if not turns:
            return 0
        logger.info("%s: %d to be encoded, %d are there", self.kind, len(mine), len(keys) - len(mine))
        begun, opened = time.monotonic(), _Opened(encoder)
        what = f"the encoding of {self.kind}"
        with torch.no_grad(), ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(_AHEAD)) if torch.accelerator.is_available() else None
            if in_step:
                # A crew that lacks less than another goes along with what it has.
                listed = [*mine, *(keys[:1] * (turns - len(mine)))]
                steps = stack.enter_context(crew.in_step(len(listed), what))
                jobs: Iterable[tuple[str, bool]] = ((listed[number], number < len(mine) and own) for number, own in steps)
            else:
                numbers = stack.enter_context(crew.share(len(mine), what))
                jobs = ((mine[number], True) for number in numbers)
            writes: deque[Future[None]] = deque()
            for (key, own), content in _read_ahead(pool, jobs, lambda job: read(wanted[job[0]])):
                entry = {name: tensor.detach().cpu().contiguous() for name, tensor in opened.encode(content).items()}
                if own and pool is None:
                    self._write(key, entry)
                elif own and pool is not None:
                    writes.append(pool.submit(self._write, key, entry))
                while writes and (len(writes) > _AHEAD or writes[0].done()):
                    writes.popleft().result()
            for write in writes:
                write.result()
        logger.info("%s: encoded in %.1f s", self.kind, time.monotonic() - begun)
        return turns

    def __getitem__(self, key: str) -> Entry:
        """One entry, on the CPU; not to be changed.

        Raises:
            CacheDamaged: it is gone or damaged; the next start makes it anew.
        """
        return self._read(key)

    def _missing(self, crew: Crew, keys: list[str]) -> list[list[int]]:
        """For each crew the numbers of the keys that it lacks; damaged entries are removed."""
        lacking = []
        with crew.share(len(keys), f"the check of cached {self.kind}") as numbers:
            for number in numbers:
                path = self._path(keys[number])
                try:
                    if _checked(path) is None:
                        lacking.append(number)
                except _Damaged as error:
                    logger.warning("%s is damaged (%s): made anew", path, error)
                    path.unlink(missing_ok=True)
                    lacking.append(number)
        told = crew.tell_all(lambda: lacking)
        return [sorted(number for rank in ranks for number in told[rank]) for ranks in crew.crews]

    def _load(self, key: str) -> Entry:
        path, until = self._path(key), time.monotonic() + _APPEARS_S
        try:
            while (entry := _checked(path)) is None:
                if time.monotonic() > until:
                    raise CacheDamaged(f"{path} is gone. Start again with --resume_from_checkpoint latest: it is encoded anew.")
                time.sleep(0.5)
        except _Damaged as error:
            raise CacheDamaged(
                f"{path} is damaged ({error}). Start again with --resume_from_checkpoint latest: it is encoded anew."
            ) from error
        return entry

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"

    def _write(self, key: str, entry: Entry) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{key[:12]}.{uuid.uuid4().hex[:8]}.new")
        try:
            new.write_bytes(save(entry, {"xxh3": _hash(entry)}))
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


class _Opened:
    """An encoder that is opened when it is first needed."""

    def __init__(self, encoder: Callable[[], Callable[[Any], Entry]]) -> None:
        self._encoder = encoder
        self._encode: Callable[[Any], Entry] | None = None

    def encode(self, content: Any) -> Entry:
        if self._encode is None:
            self._encode = self._encoder()
        return self._encode(content)


class _Damaged(Exception):
    pass


def _checked(path: Path) -> Entry | None:
    """The entry of a file, None where there is none."""
    try:
        with safe_open(path, framework="pt") as file:
            entry = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            told = (file.metadata() or {}).get("xxh3")
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError) as error:
        raise _Damaged(str(error)) from error
    if told != _hash(entry):
        raise _Damaged("its hash is another")
    return entry


def _hash(entry: Entry) -> str:
    names = sorted(entry)
    tensors = [entry[name] for name in names]
    prints = fingerprints(tensors, [HOST] * len(names))
    rows = [[name, str(t.dtype), list(t.shape), found] for name, t, found in zip(names, tensors, prints, strict=True)]
    return xxhash.xxh3_128_hexdigest(json.dumps(rows).encode())


def _read_ahead(
    pool: ThreadPoolExecutor | None, jobs: Iterable[Any], read: Callable[[Any], Any]
) -> Iterator[tuple[Any, Any]]:
    """Each job with what was read for it, some jobs ahead of the one that is given out."""
    if pool is None:
        yield from ((job, read(job)) for job in jobs)
        return
    waiting: deque[tuple[Any, Future[Any]]] = deque()
    for job in jobs:
        waiting.append((job, pool.submit(read, job)))
        if len(waiting) > _AHEAD:
            first, content = waiting.popleft()
            yield first, content.result()
    for first, content in waiting:
        yield first, content.result()


def key_of(*what: Any) -> str:
    """A hash of plain values: content, model and settings of one entry."""
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:40]
