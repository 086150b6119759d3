"""The process that ranks are forked from: `python -m holdfast.testing.rank_server FD`, started by `RankPool`.

It reads one request at a time from the connection FD, imports the file that holds the function, forks the ranks,
answers with their process ids, then with (rank, exit status) as each one ends. It never computes anything and never
starts a thread, so that forking is safe. When the other end closes, it ends its ranks and leaves.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# A collective that somebody is missing from fails within the test's patience, not within gloo's 30 minutes.
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=20)
POLL_S = 0.01


def serve(connection: Connection) -> None:
    import torch.distributed
    import torch.distributed.fsdp  # noqa: F401 (what nearly every rank needs is imported once, before the fork)

    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            sys.path[:] = request["path"]
            function = resolve(request["file"], request["module"], request["name"])
        except BaseException:
            connection.send(("failed", traceback.format_exc()))
            continue
        ranks = fork_ranks(function, request, connection)
        connection.send(("started", list(ranks)))
        if not report_exits(ranks, connection):
            return


def resolve(file: str, module_name: str, qualified_name: str) -> Callable[..., Any]:
    """The function of that name in that file, under the module name it has in the test process.

    Test files are no packages under `--import-mode=importlib`: the file is loaded by path, and known by its name so
    that its classes can be pickled both ways.
    """
    module = sys.modules.get(module_name)
    if module is None:
        for parent in [module_name.rsplit(".", n)[0] for n in range(module_name.count("."), 0, -1)]:
            try:
                importlib.import_module(parent)
            except ImportError:
                sys.modules[parent] = types.ModuleType(parent)
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    target: Any = module
    for part in qualified_name.split("."):
        target = getattr(target, part)
    return target  # type: ignore[no-any-return]


class Barrier:
    """A pipe inherited by all ranks: `wait` returns when every other process has passed by or is dead."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def pass_by(self) -> None:
        os.close(self.writer)

    def wait(self) -> None:
        os.read(self.reader, 1)


def fork_ranks(function: Callable[..., Any], request: dict[str, Any], connection: Connection) -> dict[int, int]:
    """Fork the ranks of one call; returns {pid: rank} in the order of the ranks."""
    listener = socket.create_server(("127.0.0.1", 0))
    # Two barriers that the kernel keeps, whoever is killed: a pipe is at its end when nobody holds its writing end.
    joining, left = Barrier(), Barrier()
    ranks: dict[int, int] = {}
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                connection.close()
                status = run_rank(function, rank, request, listener, joining, left)
            finally:
                os._exit(status)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # here too, so that the group exists whoever comes first
        ranks[pid] = rank
    listener.close()
    for barrier in (joining, left):
        barrier.pass_by()
        os.close(barrier.reader)
    return ranks


def report_exits(ranks: dict[int, int], connection: Connection) -> bool:
    """Tell the other side of each rank that ends. False when the other side is gone; the ranks are ended then."""
    running = dict(ranks)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            connection.send((running.pop(pid), os.waitstatus_to_exitcode(status)))
        elif connection.poll(POLL_S):
            # Nothing is asked while ranks run, so this is the end of file.
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return False
    return True


def run_rank(
    function: Callable[..., Any],
    rank: int,
    request: dict[str, Any],
    listener: socket.socket,
    joining: Barrier,
    left: Barrier,
) -> int:
    """In the new process: become the rank, call the function, leave the result in a file; returns the exit code."""
    folder = Path(request["folder"])
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    try:
        join_group(rank, request, listener)
        joining.pass_by()
        joining.wait()  # or a rank that dies at once would take the others' rendezvous with it
        args, kwargs = pickle.loads(request["call"])
        result = pickle.dumps(("returned", function(*args, **kwargs)))
        status = 0
    except BaseException:
        result = pickle.dumps(("raised", traceback.format_exc()))
        status = 1
    path = folder / f"rank-{rank}.result"
    path.with_suffix(".part").write_bytes(result)
    path.with_suffix(".part").replace(path)
    if status == 0:
        if rank == 0:
            left.pass_by()
            left.wait()  # it hosts the store, so it leaves last
        leave_group()
    return status


def join_group(rank: int, request: dict[str, Any], listener: socket.socket) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port, world_size = listener.getsockname()[1], request["world_size"]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    os.chdir(request["cwd"])
    torch.set_num_threads(1)
    # The listening socket exists since before the fork: no port is ever taken by somebody else in between.
    descriptor = listener.detach()
    if rank == 0:
        store = TCPStore(
            "127.0.0.1", port, world_size, True, COLLECTIVE_TIMEOUT, wait_for_workers=False, master_listen_fd=descriptor
        )
    else:
        os.close(descriptor)
        store = TCPStore("127.0.0.1", port, world_size, False, COLLECTIVE_TIMEOUT, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


def leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    # Ctrl-C is for the test process; the server leaves when that one closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
