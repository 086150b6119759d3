"""Work that one process does for the others: a download for its node, a text encoder for the whole run.

The others wait for a word in the process group's store and not in a collective, whose time limit is made for training
steps: a slow disk must not end the run. An error of the working process becomes an error of every rank within a second,
and names that rank and its host.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from holdfast.engine.store import SharedStore
from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError

POLL_S = 0.2
_REQUEST_S = 60.0  # one request to the store
_FAREWELL_S = 5.0

T = TypeVar("T")


def once(work: Callable[[], str], per: Literal["rank", "node", "run"], deadline_s: float) -> str:
    """Calls `work` in the first process of each node or of the run, or on every rank; returns this node's (or the run's) result.

    Every rank calls this and waits for all the workers. On a worker an error of `work` is raised as it is; on the other
    ranks as UsageError if it was one, else as HoldfastError. DeadlineExceeded where a worker stays silent.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    rank = dist.get_rank()
    works = {"run": rank == 0, "node": int(os.environ.get("LOCAL_RANK", "0")) == 0, "rank": True}[per]
    store, _, everybody = meet((socket.gethostname(), works))
    workers = {index: host for index, (host, worker) in enumerate(everybody) if worker}
    if works:
        try:
            result = work()
        except Exception as error:
            usage = isinstance(error, UsageError)
            store.publish(str(rank), encoded({"problem": error.args[0] if usage else repr(error), "usage": usage}))
            let_others_hear(store)
            raise
        store.publish(str(rank), encoded({"result": result}))
    results = _await(store, workers, deadline_s)
    return results[max(index for index in workers if index <= rank)]


def meet(word: T) -> tuple[SharedStore, str, list[T]]:
    """A part of the store that these ranks, in this attempt, have for themselves; its name; and every rank's word."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (word, uuid.uuid4().hex))
    # The token of rank 0 keeps words of an earlier attempt, in a store that outlived it, from being believed.
    token = everybody[0][1]
    return SharedStore(f"holdfast/once/{token}", _REQUEST_S), token, [told for told, _ in everybody]


def _await(store: SharedStore, workers: dict[int, str], deadline_s: float) -> dict[int, str]:
    results: dict[int, str] = {}
    until = time.monotonic() + deadline_s
    while True:
        for index in sorted(workers.keys() - results.keys()):
            found = store.look(str(index))
            if found is None:
                continue
            word = json.loads(found)
            if "problem" in word:
                raised = UsageError if word["usage"] else HoldfastError
                store.add("heard", 1)
                raise raised(f"{word['problem']}\n(rank {index} on {workers[index]})")
            results[index] = word["result"]
        silent = sorted(workers.keys() - results.keys())
        if not silent:
            return results
        if time.monotonic() > until:
            names = ", ".join(f"rank {index} on {workers[index]}" for index in silent)
            raise DeadlineExceeded(
                f"No word after {deadline_s:.0f} s from {names}, which the other ranks wait for. Look at its log."
            )
        time.sleep(POLL_S)


def let_others_hear(store: SharedStore) -> None:
    """The store may live in this process, which is about to end; a rank that is at work still is not waited for long."""
    until = time.monotonic() + _FAREWELL_S
    while store.add("heard", 0) < dist.get_world_size() - 1 and time.monotonic() < until:
        time.sleep(POLL_S)


def encoded(word: dict[str, object]) -> bytes:
    return json.dumps(word).encode()
