"""`make faults`: every operation of a 3-rank save, interrupted in every way on every rank, as one table.

    make faults            all of it
    make faults EVERY=5    every fifth case; FROM=1 to FROM=4 beside it, the others

Ranks save at steps 2 and 4; something happens while step 4 is saved; the job is started again. *mixed*: the resumed run is not
the uninterrupted one to the bit. *silent*: bytes that are not those that were written were loaded. *hung*: a call took longer
than its deadline.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import jobs
from jobs import Job, Result, differing

from holdfast.testing.faults import Fault
from holdfast.testing.pool import RankFailure, RankPool

RANKS, DEADLINE = 3, 60.0
OPERATIONS = ["make_folder", "create", "write", "close", "put layout", "put rank", "put manifest"]
EVERYBODY = -1


@dataclass(frozen=True)
class Case:
    action: str
    operation: str
    who: int
    error: int = errno.EIO

    @property
    def faults(self) -> dict[int, Fault]:
        ranks = range(RANKS) if self.who == EVERYBODY else [self.who]
        fault = Fault("checkpoint-4", self.operation, self.action, self.error, seconds=1.0)  # type: ignore[arg-type]
        return dict.fromkeys(ranks, fault)


def cases() -> list[Case]:
    kills = [Case(*c) for c in product(("kill before", "kill after"), OPERATIONS, (EVERYBODY, *range(RANKS)))]
    errors = [Case("fail", o, w, e) for o, w, e in product(OPERATIONS, range(RANKS), (errno.ENOSPC, errno.EIO, errno.EROFS))]
    stalls = [Case("stall", o, w) for o, w in product(OPERATIONS, range(RANKS))]
    return kills + errors + stalls


def continued(pool: RankPool, job: Job, whole: list[Result]) -> str:
    """What the next run of the job comes to."""
    results: list[Result] = pool.run(jobs.train, RANKS, replace(job, faults={}), timeout=DEADLINE)
    begun = results[0].begun_at
    for result, expected in zip(results, whole, strict=True):
        tail = {s: loss for s, loss in expected.losses.items() if s > begun}
        if result.begun_at != begun or result.losses != tail or differing(result.final, expected.final):
            return "mixed"
    return f"step {begun}"


def interrupted(pool: RankPool, case: Case, whole: list[Result]) -> str:
    with tempfile.TemporaryDirectory(prefix="holdfast-faults-") as folder:
        job = Job(Path(folder) / "out", save_at=(2, 4), settle=(2,), stop=6, faults=case.faults)
        pool.run(jobs.survive, RANKS, job, timeout=DEADLINE, expect_death=True)
        return continued(pool, job, whole)


def damaged(pool: RankPool, whole: list[Result], part: slice) -> Counter[str]:
    """One bit flipped in each file of the newest checkpoint, and each cut at three places, one after the other."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="holdfast-faults-") as folder:
        job = Job(Path(folder), save_at=(2, 4), settle=(2, 4), stop=4)
        pool.run(jobs.train, RANKS, job, timeout=DEADLINE)
        newest = Path(folder) / "checkpoint-4"
        originals = {p: p.read_bytes() for p in sorted(newest.iterdir()) if p.is_file()}
        changes: list[tuple[Path, bytes]] = []
        for path, data in originals.items():
            middle = len(data) // 2
            changes.append((path, data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]))
            changes += [(path, data[: len(data) * quarters // 4]) for quarters in (0, 1, 3)]
        for path, data in changes[part]:
            for original, content in originals.items():
                original.write_bytes(content)
            path.write_bytes(data)
            before = continued(pool, replace(job, save_at=(), stop=6), whole)
            outcomes["silent" if before == "mixed" else before] += 1
    return outcomes


def main() -> int:
    part = slice(int(os.environ.get("FROM", "0")), None, int(os.environ.get("EVERY", "1")))
    rows: dict[str, Counter[str]] = {}
    longest = 0.0
    with RankPool() as pool, tempfile.TemporaryDirectory(prefix="holdfast-faults-") as folder:
        whole: list[Result] = pool.run(jobs.train, RANKS, Job(Path(folder), save_at=(2, 4), stop=6), timeout=DEADLINE)
        chosen = cases()[part]
        for number, case in enumerate(chosen, 1):
            start = time.monotonic()
            try:
                outcome = interrupted(pool, case, whole)
            except RankFailure as error:
                outcome = "hung" if "LATE" in str(error) else "failed"
                print(error, file=sys.stderr)
            longest = max(longest, time.monotonic() - start)
            rows.setdefault(case.action, Counter())[outcome] += 1
            if sys.stderr.isatty():
                print(f"\r{number} of {len(chosen)}", end="", file=sys.stderr)
        rows["damaged file"] = damaged(pool, whole, part)
    show(rows, longest)
    bad = sum(row[kind] for row in rows.values() for kind in ("mixed", "silent", "hung", "failed"))
    return 1 if bad else 0


def show(rows: dict[str, Counter[str]], longest: float) -> None:
    kinds = ["step 2", "step 4", "mixed", "silent", "hung", "failed"]
    print(f"\n{'what happened':<16}{'cases':>8}" + "".join(f"{k:>10}" for k in kinds))
    total: Counter[Any] = Counter()
    for name, row in rows.items():
        total.update(row)
        print(f"{name:<16}{sum(row.values()):>8}" + "".join(f"{row[k]:>10}" for k in kinds))
    print(f"longest case, both runs together: {longest:.1f} s")
    print(f"{total['mixed']} mixed, {total['silent']} silent, {total['hung']} hung")


if __name__ == "__main__":
    raise SystemExit(main())
