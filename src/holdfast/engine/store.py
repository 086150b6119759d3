"""The key-value store that the ranks of a job share, and the handshake that makes one attempt out of them.

Every rank has a connection of its own (`clone`): a blocking request of one thread must not block another's. A `set` returns
before the server has it; an `add` that follows on the same connection does not, so `publish` is a `set` and an `add`.

The store outlives restarts of the ranks, so keys of an earlier attempt may be there. Nothing is believed but what lies below
the run's nonce, and a rank believes a nonce only from an answer that repeats the random token it has just made.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from holdfast.engine.deadlines import POLL, Deadlines, poll_of
from holdfast.errors import DeadlineExceeded, UsageError

_instances = 0
"""Checkpointers made in this process; ranks make them in the same order, so the n-th of each rank belong together."""

AT_ONCE = 1024
"""Keys of one request: its answer should not keep the store's only thread from others for long."""


class Store(Protocol):
    """What the engine asks of the store."""

    def publish(self, key: str, value: bytes) -> None:
        """Set a key; returns when the server has it."""
        ...

    def look(self, key: str) -> bytes | None:
        """The value of a key, or None where it is not set; never waits for it."""
        ...

    def gather(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are known to be set, in as few requests as the store can."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        ...

    def claim(self, key: str, value: bytes) -> bytes:
        """Set a key if nobody has; returns what it holds then."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key; not an error when it is not set."""
        ...


class LocalStore:
    """The store of a job of one rank: a dict."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def publish(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def look(self, key: str) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def gather(self, keys: Sequence[str]) -> list[bytes]:
        with self._lock:
            return [self._values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total

    def claim(self, key: str, value: bytes) -> bytes:
        with self._lock:
            return self._values.setdefault(key, value)

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)


class SharedStore:
    """A connection of its own to the store of the default process group, below a prefix."""

    def __init__(self, prefix: str, timeout: float) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        default = _get_default_store()
        connection = default
        if hasattr(default, "clone"):
            connection = clone(default, timedelta(seconds=timeout))
        self._host = default  # the server may live in it: rank 0 must not lose it while others still ask
        self._store = dist.PrefixStore(prefix, connection)  # type: ignore[attr-defined]
        self._lock = threading.Lock()

    def publish(self, key: str, value: bytes) -> None:
        with self._lock:
            self._store.set(key, value)  # type: ignore[arg-type]  # bytes are fine
            self._store.add("published", 1)

    def look(self, key: str) -> bytes | None:
        with self._lock:
            return bytes(self._store.get(key)) if self._store.check([key]) else None

    def gather(self, keys: Sequence[str]) -> list[bytes]:
        found: list[bytes] = []
        for start in range(0, len(keys), AT_ONCE):
            some = list(keys[start : start + AT_ONCE])
            with self._lock:
                several = self._store.has_extended_api()  # type: ignore[attr-defined]
                found += map(bytes, self._store.multi_get(some) if several else map(self._store.get, some))
        return found

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            return int(self._store.add(key, amount))

    def claim(self, key: str, value: bytes) -> bytes:
        with self._lock:
            return bytes(self._store.compare_set(key, "", value.decode()))

    def delete(self, key: str) -> None:
        with self._lock:
            self._store.delete_key(key)


def clone(default: Any, timeout: timedelta) -> Any:
    """A connection of its own. To a host that is gone it would be tried for as long as the job's collectives may take."""
    usual = default.timeout
    default.set_timeout(timeout)
    try:
        return default.clone()
    finally:
        default.set_timeout(usual)


class Below:
    """A store seen below a prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def publish(self, key: str, value: bytes) -> None:
        self._store.publish(f"{self._prefix}/{key}", value)

    def look(self, key: str) -> bytes | None:
        return self._store.look(f"{self._prefix}/{key}")

    def gather(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.gather([f"{self._prefix}/{key}" for key in keys])

    def add(self, key: str, amount: int) -> int:
        return self._store.add(f"{self._prefix}/{key}", amount)

    def claim(self, key: str, value: bytes) -> bytes:
        return self._store.claim(f"{self._prefix}/{key}", value)

    def delete(self, key: str) -> None:
        self._store.delete(f"{self._prefix}/{key}")


class Connections:
    """Of this process's next Checkpointer: each thread gets one of its own."""

    def __init__(self, world_size: int, timeout: float) -> None:
        global _instances
        _instances += 1
        self._prefix, self._timeout = f"holdfast/{_instances}", timeout
        self._local = LocalStore() if world_size == 1 else None

    def another(self) -> Store:
        return self._local or SharedStore(self._prefix, self._timeout)


@dataclass(frozen=True, slots=True)
class Run:
    """What the ranks agree on when they meet: rank 0's word."""

    nonce: str
    run_sequence: int
    folder: str
    homes: tuple[int, ...] = ()
    """Where they write to several folders: for each rank the lowest one that writes to the same, which leads there."""

    @classmethod
    def begin(cls, run_sequence: int, folder: str, nonce: str | None = None) -> Run:
        return cls(nonce or secrets.token_hex(8), run_sequence, folder)

    def home(self, rank: int) -> int:
        """The rank that leads in the folder of `rank`: the lowest that writes there."""
        return self.homes[rank] if self.homes else 0

    @property
    def leaders(self) -> list[int]:
        return sorted(set(self.homes)) or [0]


def shake_hands(store: Store, rank: int, world_size: int, run: Run | None, deadlines: Deadlines) -> Run:
    """Meet the other ranks of this very attempt.

    Rank 0 answers every rank's fresh token with its `run`; the ranks go on when they have its answer, rank 0 when it has all
    acknowledgements. What rank 0 has to do before anybody saves, it does before it comes here.

    Raises:
        DeadlineExceeded: ranks did not come; rank 0 names them.
    """
    end = time.monotonic() + deadlines.handshake
    if rank == 0:
        assert run is not None
        return _welcome(store, world_size, run, end, deadlines)
    token = secrets.token_hex(8)
    hello = {"token": token, "host": socket.gethostname(), "pid": os.getpid()}
    store.publish(f"hello/{rank}", json.dumps(hello).encode())
    while True:
        answer = json.loads(store.look(f"welcome/{rank}") or b"{}")
        if answer.get("token") == token and "error" in answer:
            raise UsageError(f"rank 0 cannot begin: {answer['error']}")
        if answer.get("token") == token:
            store.publish(f"{answer['nonce']}/met/{rank}", b"1")
            return Run(answer["nonce"], answer["run_sequence"], answer["folder"])
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"rank {rank} on {hello['host']}: rank 0 did not answer within {deadlines.handshake:.0f} s; "
                "every rank has to make its Checkpointer: look into rank 0's log for what stopped it"
            )
        time.sleep(poll_of(rank, world_size))


def _welcome(store: Store, world_size: int, run: Run, end: float, deadlines: Deadlines) -> Run:
    answered: dict[int, str] = {}
    missing = set(range(1, world_size))
    while missing:
        for rank in sorted(missing):
            hello = json.loads(store.look(f"hello/{rank}") or b"{}")
            if hello and answered.get(rank) != hello["token"]:
                answer = {"token": hello["token"], "nonce": run.nonce, "run_sequence": run.run_sequence, "folder": run.folder}
                store.publish(f"welcome/{rank}", json.dumps(answer).encode())
                answered[rank] = hello["token"]
            if store.look(f"{run.nonce}/met/{rank}") is not None:
                missing.discard(rank)
        if missing and time.monotonic() > end:
            raise DeadlineExceeded(
                f"rank 0 on {socket.gethostname()}: {name_ranks(missing)} did not make a Checkpointer within "
                f"{deadlines.handshake:.0f} s; look into their logs, and make it on all ranks"
            )
        if missing:
            time.sleep(POLL)
    return run


TURNED_AWAY = 5.0
"""Seconds for which rank 0, which cannot begin, still answers the others; who comes later runs into the handshake's deadline."""


def turn_away(store: Store, world_size: int, error: BaseException) -> None:
    """On rank 0: tell the ranks that come why there will be no run, so that nobody waits for it."""
    message = str(error.args[0]) if error.args else repr(error)
    end = time.monotonic() + TURNED_AWAY
    while time.monotonic() < end:  # a hello that is there may be an earlier attempt's: the rank itself may still come
        for rank in range(1, world_size):
            hello = json.loads(store.look(f"hello/{rank}") or b"{}")
            if hello:
                answer = {"token": hello["token"], "error": message}
                store.publish(f"welcome/{rank}", json.dumps(answer).encode())
        time.sleep(POLL)


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 1, 2 and 5`, with the tail of a long list counted."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    shown = [str(r) for r in ordered[:12]]
    if len(ordered) > len(shown):
        return f"ranks {', '.join(shown)} and {len(ordered) - len(shown)} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
