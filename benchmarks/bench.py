"""Holdfast beside its peers and beside the limits of memory and disk: one table of medians, with ratios and the bars to reach.

    make bench            # in an environment of its own, with the peers
    python benchmarks/bench.py --rounds 2 --out out/bench

Every engine runs in jobs of its own, in turn (A B C … A B C …), so that a change of the machine's mood meets all of them. Written
to `out`: `results.json` (every reading), `table.md`, `saves.png`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
OURS = ("holdfast", "holdfast overlap")
PEERS = (
    "dcp.save",
    "dcp.async_save thread",
    "dcp.async_save process",
    "torch_checkpointing",
    "accelerate sharded",
    "accelerate full",
    "torch.save full",
)
FRACTIONS = {"dense": 604_000_000, "small": 102_400_000}
"""About the bytes of one of two ranks."""

Row = dict[str, Any]


@dataclass
class Bench:
    out: Path
    rounds: int
    readings: list[Row]

    def job(self, script: str, ranks: int, **options: object) -> Row:
        """Run a job of `ranks` ranks; its one line of JSON, with what was asked for, is kept."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(HERE / script)]
        for name, value in options.items():
            if value is True:
                command.append(f"--{name}")
            else:
                command += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        what = {"script": script, "ranks": ranks} | {k: v for k, v in options.items() if k != "folder"}
        row = what | (json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]})
        self.readings.append(row)
        (self.out / "results.json").write_text(json.dumps(self.readings, indent=1))
        print(f"{script} {options.get('engine', '')} {options.get('case', '')}: {'done' if lines else 'FAILED'}", flush=True)
        return row

    def folder(self, name: str) -> Path:
        return self.out / "work" / name.replace(" ", "_")


# -- what is measured


def saves(bench: Bench, case: str, engines: Iterable[str]) -> None:
    for _ in range(bench.rounds):
        bench.job("limits.py", 2, bytes=FRACTIONS.get(case, 100_000_000), folder=bench.folder("limits"), rounds=3)
        for engine in engines:
            bench.job("save_rank.py", 2, engine=engine, case=case, folder=bench.folder("save"))
            shutil.rmtree(bench.folder("save"), ignore_errors=True)


def loads(bench: Bench) -> None:
    for engine in ("holdfast", "dcp.save", "torch_checkpointing"):
        kept = bench.folder(f"kept-{engine}")
        bench.job("save_rank.py", 2, engine=engine, case="dense", folder=kept, kinds=["plain"], keep=True)
    for _ in range(bench.rounds):
        for engine in ("holdfast", "dcp.save", "torch_checkpointing"):
            bench.job("load_rank.py", 2, engine=engine, case="dense", folder=bench.folder(f"kept-{engine}"), step=1)
    kept = bench.folder("kept-holdfast")

    def again(ranks: int) -> None:
        for _ in range(bench.rounds):
            bench.job("load_rank.py", ranks, engine="holdfast", case="dense", folder=kept, step=1)
        shutil.rmtree(kept)

    again(3)
    bench.job("save_rank.py", 4, engine="holdfast", case="dense", folder=kept, kinds=["plain"], keep=True)
    again(1)
    bench.job("save_rank.py", 2, engine="holdfast", case="dense", wrap="fsdp1", folder=kept, kinds=["plain"], keep=True)
    again(2)
    shutil.rmtree(bench.folder("."), ignore_errors=True)


def runs(bench: Bench) -> None:
    for _ in range(bench.rounds):
        for engine in (*OURS, "dcp.async_save thread", "torch_checkpointing"):
            bench.job("run_cost.py", 2, engine=engine, folder=bench.folder("run"))
        bench.job("beside.py", 1, folder=bench.folder("beside"))
        bench.job("step_cost.py", 2, folder=bench.folder("steps"))


# -- what is shown


def median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else float("nan")


def save_figure(bench: Bench, engine: str, case: str, kind: str, field: str, later: bool = True) -> float:
    """Median of one figure of one kind of save; without the first save of each job, unless it is the first that is asked for."""
    rows = [r for r in bench.readings if r["script"] == "save_rank.py" and (r.get("engine"), r.get("case")) == (engine, case)]
    rows = [r for r in rows if "saves" in r and len(r["saves"]) > 1]
    if not later:
        return median(r["saves"][0][field] for r in rows)
    return median(s[field] for r in rows for s in r["saves"][1:] if s["kind"] == kind)


def limit(bench: Bench, case: str, field: str) -> float:
    size = FRACTIONS.get(case, 100_000_000)
    return median(r[field] for r in bench.readings if r["script"] == "limits.py" and r.get("bytes", 0) // 1_000_000 == size // 1_000_000)


def peers_table(bench: Bench, case: str, engines: Iterable[str]) -> Table:
    table = Table(title=f"One save of {case!r}, 2 FSDP2 ranks, medians")
    for column in ("engine", "first stall s", "stall s", "durable s", "CPU s", "memory MB", "on disk MB", "durable / ours"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    ours = save_figure(bench, "holdfast", case, "plain", "durable_s")
    for engine in engines:
        get = lambda kind, field, later=True, engine=engine: save_figure(bench, engine, case, kind, field, later)  # noqa: E731
        durable = get("plain", "durable_s")
        table.add_row(
            engine, f"{get('calm', 'stall_s', False):.3f}", f"{get('calm', 'stall_s'):.4f}", f"{durable:.3f}",
            f"{get('plain', 'cpu_s'):.2f}", f"{get('plain', 'memory') / 1e6:.0f}", f"{get('plain', 'bytes') / 1e6:.0f}",
            f"{durable / ours:.1f} ×",
        )  # fmt: skip
    if case in FRACTIONS:
        table.add_row("bare prototype", "", f"{limit(bench, case, 'memcpy_s'):.4f} (memcpy)", f"{limit(bench, case, 'prototype_s'):.3f}",
                      f"{limit(bench, case, 'prototype_cpu_s'):.2f}", "", "", f"{limit(bench, case, 'prototype_s') / ours:.1f} ×")  # fmt: skip
    return table


@dataclass
class Bar:
    what: str
    bar: str
    reading: str
    held: bool


def bars(bench: Bench) -> list[Bar]:
    def get(engine: str, case: str, kind: str, field: str, later: bool = True) -> float:
        return save_figure(bench, engine, case, kind, field, later)

    def load(engine: str, ranks: int, field: str, after: int = 0) -> float:
        """Of that many rounds; `after` so many other jobs of as many ranks."""
        rows = [r for r in bench.readings if r["script"] == "load_rank.py" and r.get("engine") == engine and r["ranks"] == ranks]
        return median(r[field] for r in rows[after : after + bench.rounds] if field in r)

    def best(case: str, kind: str, field: str) -> float:
        found = [get(peer, case, kind, field) for peer in PEERS]
        return min((v for v in found if v == v), default=float("nan"))

    memcpy = median(r["memcpy_s"] for r in bench.readings if r.get("case") == "dense" and r.get("memcpy_s") and r.get("engine") in OURS)
    prototype = limit(bench, "dense", "prototype_s")
    stall, calm = get("holdfast", "dense", "calm", "own_blocked_s"), get("holdfast overlap", "dense", "calm", "own_blocked_s")
    durable, cpu = get("holdfast", "dense", "plain", "durable_s"), get("holdfast", "dense", "plain", "cpu_s")
    size = get("holdfast", "dense", "plain", "bytes") / 1e9
    rows: list[tuple[str, str, str, bool]] = []

    def bar(what: str, limit_text: str, reading: str, held: bool) -> None:
        rows.append((what, limit_text, reading, held))

    peer = best("dense", "calm", "stall_s")
    bar("blocked, overlap=True", "under 2 ms, 1/100 of the best peer", f"{calm * 1e3:.2f} ms; best peer {peer * 1e3:.0f} ms", calm < 2e-3 and calm * 100 <= peer)
    bar("blocked, default", "1.3 × memcpy, less than every peer", f"{stall / memcpy:.2f} × memcpy ({stall:.3f} s)", stall <= 1.3 * memcpy and get("holdfast", "dense", "calm", "stall_s") < peer)
    once = get("holdfast overlap", "dense", "at_once", "own_blocked_s")
    bar("blocked, overlap=True, a step at once", "1.5 × memcpy", f"{once / memcpy:.2f} × memcpy", once <= 1.5 * memcpy)
    bar("durable", "1.3 × the bare prototype", f"{durable / prototype:.2f} × ({durable:.3f} s)", durable <= 1.3 * prototype)
    for name, factor in (("dcp.save", 6), ("torch_checkpointing", 3)):
        ratio = get(name, "dense", "plain", "durable_s") / durable
        bar(f"durable, against {name}", f"{factor} × faster", f"{ratio:.1f} ×", ratio >= factor)
    peer_cpu = best("dense", "plain", "cpu_s")
    bar("CPU seconds per GB", "0.25, a fifth of the best peer", f"{cpu / size:.2f}; best peer {peer_cpu / size:.2f}", cpu / size <= 0.25 and 5 * cpu <= peer_cpu)
    first = get("holdfast", "dense", "calm", "own_blocked_s", False)
    bar("first save", "2 × a later one", f"{first / stall:.2f} ×", first <= 2 * stall)
    cold, warm = load("holdfast", 2, "cold_s"), load("holdfast", 2, "warm_s")
    reading = limit(bench, "dense", "read_s")
    bar("load, cold", "1.25 × sequential read", f"{cold / reading:.2f} × ({cold:.3f} s)", cold <= 1.25 * reading)
    ratio = load("dcp.save", 2, "warm_s") / warm
    bar("load, warm, against dcp.load", "3 × faster", f"{ratio:.1f} × ({warm:.3f} s)", ratio >= 3)
    for what, ranks, after in (("2 → 3 ranks", 3, 0), ("4 → 1 rank", 1, 0), ("FSDP1 → FSDP2", 2, bench.rounds)):
        other = load("holdfast", ranks, "warm_s", after) * (min(1.0, ranks / 2))  # one rank reads twice as much as one of two
        bar(f"load, {what}", "1.5 × the same ranks", f"{other / warm:.2f} ×", other <= 1.5 * warm)
    extra = load("holdfast", 2, "memory")
    bar("memory of a load", "one block (1 MiB)", f"{extra / 2**20:.1f} MiB", extra <= 1.25 * 2**20)
    staged = get("holdfast", "dense", "plain", "memory") / (size * 1e9 / 2)
    bar("memory of a save", "the rank's state", f"{staged:.2f} × the state", staged <= 1.05)
    many, slow = get("holdfast overlap", "small", "calm", "own_blocked_s"), get("dcp.save", "small", "plain", "durable_s")
    fast = get("holdfast", "small", "plain", "durable_s")
    bar("many small tensors, blocked", "under 20 ms", f"{many * 1e3:.0f} ms", many < 0.02)
    bar("many small tensors, durable", "5 × faster than dcp.save", f"{slow / fast:.1f} ×", slow >= 5 * fast)
    extra_s = {e: median(r["extra_s"] for r in bench.readings if r["script"] == "run_cost.py" and r.get("engine") == e and "extra_s" in r) for e in (*OURS, "dcp.async_save thread", "torch_checkpointing")}
    ours, theirs = min(extra_s[e] for e in OURS), min(v for e, v in extra_s.items() if e not in OURS)
    bar("whole run, extra time", "half of the best peer's", f"{ours:.1f} s; best peer {theirs:.1f} s", ours < 0.5 * theirs)
    steps = [r for r in bench.readings if r["script"] == "step_cost.py" and "hooks_add_us" in r]
    each, asked, beat = (median(r[field] for r in steps) for field in ("hooks_add_us", "one_caller_add_us", "heartbeat_us_per_s"))
    told = f"{each:.0f} µs, heartbeat {beat / 1e4:.2f} % of a core (with one_caller {asked:.0f} µs: one look into the store)"
    bar("heartbeat and hooks, each step", "under 50 µs", told, each < 50)
    kept = median(r["kept"] for r in bench.readings if r["script"] == "beside.py" and "kept" in r)
    bar("tiny steps beside a save", "85 % of undisturbed", f"{kept:.0%}", kept >= 0.85)
    return [Bar(*row) for row in rows]


def bars_table(rows: list[Bar]) -> Table:
    table = Table(title="Bars")
    for column in ("what", "bar", "reading", "held"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.what, row.bar, row.reading, "yes" if row.held else "NO")
    return table


def picture(bench: Bench, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    engines = [*OURS, *PEERS]
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), sharey=True)
    titles = {"stall_s": "training thread blocked, s", "durable_s": "request to durable, s", "cpu_s": "CPU seconds, all ranks"}
    for axis, (field, title) in zip(axes, titles.items(), strict=True):
        kind = "calm" if field == "stall_s" else "plain"
        values = [save_figure(bench, engine, "dense", kind, field) for engine in engines]
        axis.barh(engines, values, color=["tab:blue" if e in OURS else "tab:gray" for e in engines])
        axis.set_title(title, fontsize=10)
        for place, value in enumerate(values):
            axis.text(value, place, f" {value:.3g}", va="center", fontsize=8)
        axis.margins(x=0.2)
    axes[0].invert_yaxis()
    figure.suptitle("One save of 1.2 GB, 2 FSDP2 ranks on CPU")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def machine() -> str:
    names = ("torch", "accelerate", "torch_checkpointing", "xxhash")
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in names)
    return f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=("saves", "loads", "runs"), default=["saves", "loads", "runs"])
    parser.add_argument("--show", action="store_true", help="show the table of the readings that are there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "results.json"
    bench = Bench(args.out.absolute(), args.rounds, json.loads(kept.read_text()) if args.show else [])
    quick = ("holdfast", "holdfast overlap", "dcp.save", "dcp.async_save thread", "torch_checkpointing")
    parts: dict[str, Callable[[], None]] = {
        "saves": lambda: (saves(bench, "dense", [*OURS, *PEERS]), saves(bench, "small", quick[:3]), saves(bench, "lora", quick))[0],
        "loads": lambda: loads(bench),
        "runs": lambda: runs(bench),
    }
    if not args.show:
        for name in args.only:
            parts[name]()
    console = Console(record=True, width=140)
    console.print(machine())
    console.print(peers_table(bench, "dense", [*OURS, *PEERS]))
    console.print(peers_table(bench, "lora", quick))
    console.print(peers_table(bench, "small", quick[:3]))
    console.print(bars_table(bars(bench)))
    (args.out / "table.txt").write_text(console.export_text())
    picture(bench, args.out / "saves.png")


if __name__ == "__main__":
    main()
