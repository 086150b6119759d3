"""What the reproductions share: start ranks, wait for their end, and read what the followers noted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = HERE.parent / "tests" / "scripts"


@dataclass
class Run:
    """How a job ended: its exit code, seconds, output, and where each rank was stuck: the last that its follower noted."""

    code: int
    seconds: float
    output: str
    stuck: dict[int, dict[str, object]]

    @property
    def error(self) -> str:
        """The first time-out or lost connection that a rank told of."""
        found = re.search(r"(Timed out waiting \d+ms[^\n]{0,60}|Connection closed by peer|watchdog[^\n]{0,80})", self.output)
        return found[1] if found else "no time-out"


def start(how: str, ranks: int, limit: float, folder: Path, script: str, *arguments: str, fsdp: dict[str, str], timeout: float) -> Run:
    """Run a script of `tests/scripts` on CPU ranks, as it is ("plain") or with the engine behind it ("holdfast")."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*.jsonl"):
        old.unlink()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true", **fsdp}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", str(ranks)]
    command = [*launcher, str(HERE / "traced.py"), how, str(limit), str(folder), str(SCRIPTS / script), *arguments]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    stuck = {}
    for trace in sorted(folder.glob("rank-*.jsonl")):
        noted = json.loads(trace.read_text().splitlines()[-1])
        stuck[noted["rank"]] = noted
    return Run(done.returncode, time.monotonic() - begun, done.stdout, stuck)


def side_by_side(run: Run, columns: int = 2, steps: int = 11) -> str:
    """The ways of the stuck ranks into their collectives, next to each other."""
    shown = [run.stuck[r] for r in sorted(run.stuck)][:columns]
    if not shown:
        return "  no rank was stuck"
    rows = [[f"rank {s['rank']}" for s in shown], *[[""] * len(shown) for _ in range(steps)]]
    for column, noted in enumerate(shown):
        way = list(dict.fromkeys(noted["way"]))  # type: ignore[call-overload]
        if len(way) > steps:
            way = [*way[: steps // 2], "...", *way[-(steps - steps // 2 - 1) :]]
        for row, step in enumerate(way):
            rows[row + 1][column] = step
    rows.append([f"=> {s['collective']}, number {s['number']}" for s in shown])
    width = max(len(cell) for row in rows for cell in row) + 3
    return "\n".join("  " + "".join(cell.ljust(width) for cell in row).rstrip() for row in rows)


def completed(folder: Path) -> list[str]:
    """The checkpoints below `folder` that are complete."""
    return sorted(str(m.parent.relative_to(folder)) for m in folder.rglob("manifest.json"))
