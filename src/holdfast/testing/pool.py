"""Runs a test function on several real ranks, cheaply enough to do it hundreds of times.

One *rank server* process per pool imports torch, and later every test file it is asked for, once. A call forks the
ranks from it: a rank is a fresh process that needs no second to start, inherits nothing of the call before, and costs
nothing when a test kills it. Ranks have the environment of a launched process, a gloo process group of their own on a
fresh port, and one thread for torch. They end by `os._exit`, since FSDP2 with gloo now and then aborts at interpreter
exit.

Every call has a deadline. When a rank raises, dies or is late, all are asked for their stacks (faulthandler), stopped,
and shown: a hang is as loud as an exception. Needs `os.fork`, so Linux (macOS untested).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Ranks that fail together fail within a moment of each other; past it the others are only waiting for the dead one.
GRACE_AFTER_FAILURE_S = 1.0
# For importing torch, or a test file with diffusers on top of it, while other work keeps the cores busy.
IMPORT_DEADLINE_S = 120.0
LOG_LINES_SHOWN = 80


@dataclasses.dataclass(frozen=True)
class Died:
    """What `RankPool.run(expect_death=True)` returns for a rank that a signal ended."""

    signal: int


class RankFailure(Exception):
    """At least one rank raised, died or was late; the message holds every rank's traceback, stacks and log."""


@dataclasses.dataclass
class Outcome:
    """How one rank ended: `status` is its exit status (negative: a signal), None while it runs."""

    rank: int
    pid: int
    folder: Path
    status: int | None = None
    late: bool = False

    def result(self) -> tuple[str, Any] | None:
        """What the rank left behind: ("returned", value), ("raised", traceback), or None."""
        path = self.folder / f"rank-{self.rank}.result"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def log(self) -> str:
        path = self.folder / f"rank-{self.rank}.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(["..."] * (len(lines) > LOG_LINES_SHOWN) + lines[-LOG_LINES_SHOWN:])

    def stop(self, number: int) -> None:
        """Send a signal to the rank, and a final one to its own children too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)


class RankPool:
    """A source of ranks for tests. Close it, or use it as a context manager; one call at a time."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        expect_death: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on `world_size` ranks; return what each returned, by rank.

        `function` stands at the top level of a file; it and its arguments travel by pickle. `timeout` is in seconds and
        counts from the start of the ranks. With `expect_death` a rank that a signal ended gives `Died` and the others
        go on; without it, as for an exception in any rank, `RankFailure` is raised.
        """
        folder = Path(tempfile.mkdtemp(prefix="holdfast-ranks-"))
        try:
            outcomes = self._start(function, world_size, (args, kwargs), folder)
            try:
                self._watch(outcomes, time.monotonic() + timeout, expect_death)
            finally:
                self._stop_running(outcomes)
            return _results(outcomes, expect_death, f"{function.__qualname__} on {world_size} ranks", timeout)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Stop the rank server; the next call of `run` would start another one."""
        if self._connection is not None:
            self._connection.close()  # its end of file is the server's signal to leave
        if self._server is not None:
            try:
                self._server.wait(5)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._server = self._connection = None

    # -- the rank server ------------------------------------------------------------------------------------------

    def _connect(self) -> Connection:
        if self._server is not None and self._server.poll() is not None:
            self.close()
        if self._connection is None:
            here, there = multiprocessing.Pipe()
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            command = [sys.executable, "-m", "holdfast.testing.rank_server", str(there.fileno())]
            self._server = subprocess.Popen(
                command, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL
            )
            there.close()
            self._connection = here
        return self._connection

    def _start(self, function: Callable[..., Any], world_size: int, call: object, folder: Path) -> list[Outcome]:
        connection = self._connect()
        request = {
            "file": str(Path(inspect.getfile(function)).resolve()),
            "module": function.__module__,
            "name": function.__qualname__,
            "call": pickle.dumps(call),
            "world_size": world_size,
            "folder": str(folder),
            "environment": dict(os.environ),
            "cwd": os.getcwd(),
            "path": list(sys.path),
        }
        try:
            connection.send(request)
            if not connection.poll(IMPORT_DEADLINE_S):
                raise TimeoutError(f"{request['file']} was not imported within {IMPORT_DEADLINE_S:.0f} s")
            kind, value = connection.recv()
        except (EOFError, OSError, TimeoutError) as error:
            if self._server is not None:
                self._server.kill()
            self.close()
            raise RankFailure(f"The rank server did not start {function.__qualname__}: {error!r}") from error
        if kind == "failed":
            raise RankFailure(f"{request['file']} cannot be imported on the ranks:\n{value}")
        return [Outcome(rank, pid, folder) for rank, pid in enumerate(value)]

    def _await_exit(self, outcomes: list[Outcome], deadline: float) -> Outcome | None:
        """The next rank that ends before the deadline."""
        connection = self._connect()
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                rank, status = connection.recv()
                ended: Outcome = outcomes[rank]
                ended.status = status
                return ended
        except (EOFError, OSError) as error:
            for outcome in outcomes:
                outcome.stop(signal.SIGKILL)
            self.close()
            raise RankFailure(f"The rank server died: {error!r}") from error
        return None

    def _watch(self, outcomes: list[Outcome], deadline: float, expect_death: bool) -> None:
        """Wait until all ranks have ended, or until one has failed and the others had a moment to follow."""
        while any(outcome.status is None for outcome in outcomes):
            outcome = self._await_exit(outcomes, deadline)
            if outcome is None:
                for running in (o for o in outcomes if o.status is None):
                    running.late = True
                return
            result = outcome.result()
            killed = outcome.status is not None and outcome.status < 0
            good = result[0] == "returned" if result else killed and expect_death
            if not good:
                deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)

    def _stop_running(self, outcomes: list[Outcome]) -> None:
        """Ask the ranks that still run for their stacks, then end them and whatever any rank left behind."""
        running = [outcome for outcome in outcomes if outcome.status is None]
        for outcome in running:
            outcome.stop(signal.SIGUSR1)
        if running:
            time.sleep(0.3)  # faulthandler writes within milliseconds; a stopped process never answers
        for outcome in outcomes:
            outcome.stop(signal.SIGKILL)
        late = {outcome.rank for outcome in running}
        while any(outcome.status is None for outcome in outcomes):
            if self._await_exit(outcomes, time.monotonic() + 10) is None:
                raise RankFailure(f"Ranks {sorted(late)} did not end within 10 s of SIGKILL (uninterruptible sleep?)")


def _results(outcomes: list[Outcome], expect_death: bool, what: str, timeout: float) -> list[Any]:
    values: list[Any] = []
    verdicts: list[str] = []
    for outcome in outcomes:
        result = outcome.result()
        if result is not None and result[0] == "returned":
            values.append(result[1])
            verdicts.append("returned")
        elif result is not None:
            verdicts.append(f"RAISED\n{result[1]}")
        elif outcome.late:
            verdicts.append(f"LATE: still running after {timeout:g} s; its stacks are at the end of its log")
        elif outcome.status is not None and outcome.status < 0:
            values.append(Died(-outcome.status))
            verdicts.append(f"DIED of {signal.Signals(-outcome.status).name}")
        else:
            verdicts.append(f"LEFT without a result, exit code {outcome.status}")
    died_well = expect_death and len(values) == len(outcomes)
    if died_well or all(verdict == "returned" for verdict in verdicts):
        for outcome in outcomes:
            if log := outcome.log():
                print(f"--- log of rank {outcome.rank}\n{log}")  # pytest shows it if the test fails later
        return values
    parts = [f"{what}: a rank failed"]
    for outcome, verdict in zip(outcomes, verdicts, strict=True):
        parts.append(f"=== rank {outcome.rank} (pid {outcome.pid}) {verdict}")
        if log := outcome.log():
            parts.append(f"--- log of rank {outcome.rank}\n{log}")
    raise RankFailure("\n".join(parts))
