"""The store's part: requests of one rank in a save and in a step, counted in the engine's own threads, and a real TCPStore under
the clients of a job whose ranks all wait for rank 0."""

from __future__ import annotations

import heapq
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.core.documents import canonical
from holdfast.core.manifest import Announcement, attempt_name, rank_file, receipt_file
from holdfast.engine.capture import Staging
from holdfast.engine.collect import Registered, collect
from holdfast.engine.deadlines import POLL, Deadlines, poll_of
from holdfast.engine.plan import make_plan
from holdfast.engine.service import Job, Save, Service
from holdfast.engine.store import AT_ONCE, LocalStore, Run, SharedStore, Store
from holdfast.engine.watch import IDLE, Watcher, beat_of
from holdfast.storage import LocalFolder

RUN = Run("5ca1e5ca1e5ca1e5", 1, "")


class Counting:
    """A store that counts what a `SharedStore` would ask of the TCPStore."""

    def __init__(self, store: LocalStore) -> None:
        self._store, self.requests = store, Counter[str]()

    def publish(self, key: str, value: bytes) -> None:
        self.requests["publish"] += 2  # set, and the add that makes sure of it
        self._store.publish(key, value)

    def look(self, key: str) -> bytes | None:
        found = self._store.look(key)
        self.requests["look"] += 1 if found is None else 2  # check, get
        return found

    def gather(self, keys: Sequence[str]) -> list[bytes]:
        self.requests["gather"] += 2 * -(-len(keys) // AT_ONCE)  # wait, multi_get
        return self._store.gather(keys)

    def add(self, key: str, amount: int) -> int:
        self.requests["add"] += 1
        return self._store.add(key, amount)

    def claim(self, key: str, value: bytes) -> bytes:
        self.requests["claim"] += 1
        return self._store.claim(key, value)

    def delete(self, key: str) -> None:
        self.requests["delete"] += 1
        self._store.delete(key)


class SharedFolder(LocalFolder):
    """A folder in which the other ranks' files are seen."""

    others: list[str] = []  # noqa: RUF012 - set once by the only user

    def names(self, folder: str) -> list[str]:
        return [*super().names(folder), *self.others]


def _job(rank: int, world_size: int) -> Job:
    registered = Registered({"": nn.Linear(4, 4)}, {}, {}, rank, world_size)
    collected = collect(registered)
    small = canonical({"state": collected.small})
    plan, staging = make_plan(collected, registered.bases, rank, world_size, len(small), None), Staging()
    staging.prepare(plan, collected.tensors)
    staging.copy(staging.names, collected.tensors)
    staging.put_small(small)
    return Job(Save(1, 1, "checkpoint-1", attempt_name(RUN.nonce, 1)), plan, collected, staging, None)


def count_save(world_size: int, folder: Path) -> dict[str, Any]:
    """Requests of rank 0 and of another rank in one save, in the services of both; the other ranks have announced before."""
    storage, shared = SharedFolder(folder), LocalStore()
    attempt = attempt_name(RUN.nonce, 1)
    storage.others = [name(r, attempt) for r in range(2, world_size) for name in (rank_file, receipt_file)]
    stores = [Counting(shared), Counting(shared)]
    services = [
        Service(
            storage,
            store,
            RUN,
            rank,
            world_size,
            Deadlines(),
            before_commit=lambda: None,
            after_commit=lambda save: None,
            read_back=False,
        )
        for rank, store in enumerate(stores)
    ]
    jobs = [_job(rank, world_size) for rank in (0, 1)]
    services[1].submit(jobs[1])
    while shared.look("1/receipt/1") is None:
        time.sleep(POLL / 4)
    own = Announcement.parse(shared.look("1/receipt/1") or b"", "own")
    for rank in range(2, world_size):
        shared.publish(f"1/receipt/{rank}", replace(own, rank=rank).encoded())
        shared.add("1/receipts", 1)
    begun = time.perf_counter()
    services[0].submit(jobs[0])
    finished = [job.save.finished.wait(120) and job.save.state == "complete" for job in jobs]
    assert all(finished), [job.save.error for job in jobs]
    for service in services:
        service.stop(10)
    return {
        "rank 0": sum(stores[0].requests.values()),
        "another rank": sum(stores[1].requests.values()),
        "commit_s": time.perf_counter() - begun,
        "announcement_bytes": len(own.encoded()),
        "waiting, requests per second of all ranks": 2 * world_size / poll_of(1, world_size),
        "the same at a look every 20 ms": 2 * world_size / POLL,
    }


def count_steps(world_size: int, steps: int = 20) -> dict[str, float]:
    """Requests of one rank's watcher: for each step with one caller, and per second of training."""
    store = Counting(LocalStore())
    idle = min(beat_of(world_size), IDLE * max(1, world_size // 64))
    watcher = Watcher(
        store, 1, Deadlines(), on_look=lambda: None, step=lambda: 0, saving=lambda: None, idle=3600.0, beat=3600.0
    )
    watcher.start()
    watcher.look_now()
    before = sum(store.requests.values())
    for _ in range(steps):
        watcher.look_now()
    watcher.stop()
    look = (sum(store.requests.values()) - before) / steps
    beat = 2 / beat_of(world_size)
    return {
        "per step, one_caller": look,
        "per second, one_caller": look / idle + beat,
        "per second": look / beat_of(world_size) + beat,
        "all ranks, per second": world_size * (look / beat_of(world_size) + beat),
    }


# -- a real store

LONGEST = 30.0
"""Seconds for which a client looks: a store that does not keep up must not hold the benchmark up for ever."""


class Client(SharedStore):
    """One connection of its own, as each thread of the engine has."""

    def __init__(self, connection: dist.Store) -> None:
        import threading

        self._host = connection
        self._store, self._lock = dist.PrefixStore("holdfast/1/nonce", connection), threading.Lock()  # type: ignore[attr-defined]


def clients_main(port: int, clients: int, first: int, poll: float, announcement: bytes) -> None:
    """In a process of its own: ranks `first`, ... announce, and look for the end of the save every `poll` seconds."""
    connection = dist.TCPStore(
        "localhost", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=120)
    )
    stores: list[Store] = [Client(connection.clone()) for _ in range(clients)]
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    for i, store in enumerate(stores):
        store.publish(f"1/receipt/{first + i}", announcement)
        store.add("1/receipts", 1)
    announced, asked = time.perf_counter() - begun, 0
    now = time.monotonic()
    due = [(now + poll * i / clients, i) for i in range(clients)]
    heapq.heapify(due)
    while due and time.perf_counter() - begun < LONGEST:
        at, i = heapq.heappop(due)
        time.sleep(max(0.0, at - time.monotonic()))
        stores[i].look("1/failed")
        asked += 2
        if stores[i].look("1/complete") is None:
            heapq.heappush(due, (max(at + poll, time.monotonic()), i))
    print(json.dumps({"announced_s": announced, "asked": asked, "seconds": time.perf_counter() - begun}), flush=True)


def drive(clients: int, poll: float, seconds: float = 2.0, processes: int = 2) -> dict[str, float]:
    """Rank 0 beside so many waiting clients: how long one of its requests takes, and its gathering of all announcements."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    announcement = b"x" * 330
    share = clients // processes
    command = [sys.executable, __file__, str(server.port), str(share)]
    crowd = [
        subprocess.Popen(
            [*command, str(p * share), str(poll)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        for p in range(processes)
    ]
    rank0 = Client(server.clone())
    try:
        for process in crowd:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in crowd:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        begun = time.perf_counter()
        while rank0.add("1/receipts", 0) < share * processes:
            time.sleep(POLL)
        announced = time.perf_counter() - begun
        waits, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            rank0.add("1/receipts", 0)
            waits.append(time.perf_counter() - start)
            time.sleep(0.005)
        start = time.perf_counter()
        found = rank0.gather([f"1/receipt/{r}" for r in range(share * processes)])
        gathered = time.perf_counter() - start
        assert set(found) == {announcement}
        rank0.publish("1/complete", b"1")
        told = [json.loads(process.communicate(timeout=60)[0]) for process in crowd]
    finally:
        for process in crowd:
            process.kill()
    waits.sort()
    return {
        "clients": share * processes,
        "poll_s": poll,
        "all_announced_s": announced,
        "request_median_s": statistics.median(waits),
        "request_p99_s": waits[int(len(waits) * 0.99)],
        "gather_s": gathered,
        "requests_per_s": sum(t["asked"] for t in told) / max(t["seconds"] for t in told),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    clients_main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), b"x" * 330)
