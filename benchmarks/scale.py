"""One rank and the committing rank of a job of up to thousands of ranks, simulated on one machine, beside DCP's planner.

    python benchmarks/scale.py --out out/scale
    python benchmarks/scale.py --models flux --ranks 8 2816 --parts ranks

Plans, receipts, manifests, commits and the planning of resumes are the engine's own, on the real shapes of a 12B diffusion transformer
and a 70B language model without their bytes (`scale_rank.py`). The store's requests are counted in the engine's threads, and a real
TCPStore is put under the clients of a job (`scale_store.py`). Written to `out`: `scale.json`, `scale.txt`, `scale.png`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import scale_dcp
import scale_store
import torch
from rich.console import Console
from rich.table import Table
from scale_rank import (
    ATTEMPT,
    FOLDER,
    Case,
    Files,
    collected_for_save,
    first_without_state,
    of_another_rank,
    plan_of,
    readers_sources,
    simulated_rank,
)

from holdfast.core.manifest import MANIFEST_FILE, Announcement, Receipt, rank_file, receipt_file
from holdfast.engine import restore
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.commit import write_manifest
from holdfast.engine.deadlines import poll_of
from holdfast.engine.repair import finish
from holdfast.storage import LocalFolder

RANKS = (8, 64, 512, 1152, 2816, 16384)
Row = dict[str, Any]


class CountingFolder(LocalFolder):
    """Counts what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bytes, self.files = 0, set[str]()

    def get(self, path: str) -> bytes:
        data = super().get(path)
        self.bytes += len(data)
        self.files.add(path)
        return data

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        super().read_into(path, offset, target)
        self.bytes += len(target)
        self.files.add(path)


def timed(call: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """CPU seconds of the fastest of a few calls: the machine has other work, and the files are in its page cache."""
    best, value = float("inf"), None
    for _ in range(times):
        begun = time.thread_time()
        value = call()
        best = min(best, time.thread_time() - begun)
    return best, value


def measure(case: Case, world_size: int, work: Path) -> Row:
    """Everything of one case at one world size."""
    rank, base = world_size // 2 + 1, work / "base"
    shutil.rmtree(work, ignore_errors=True)
    (work / FOLDER).mkdir(parents=True)
    row: Row = {"case": str(case), "model": case.model, "version": case.version, "lora": case.lora, "ranks": world_size}
    with simulated_rank(case, rank, world_size, base) as registered:
        begun = time.thread_time()
        collected, small = collected_for_save(registered)
        plan = plan_of(registered, collected, small)
        layout = plan.layout.encoded
        row |= {"first_plan_s": time.thread_time() - begun, "tensors": len(plan.specs), "layout_bytes": len(layout)}
        row["later_plan_s"], _ = timed(lambda: plan_of(registered, collected_for_save(registered)[0], small, plan))
        row |= {"header_bytes": len(plan.header), "image_bytes": plan.image_size, "small_bytes": len(small)}
        plans = {rank: plan} | {
            r: plan_of(registered, of_another_rank(collected, r), small, rank=r) for r in {0, world_size - 1}
        }
        tail = first_without_state(collected, world_size) if case.version == 1 else world_size
    row["real_ranks"] = prove(case, world_size, base, {r: p for r, p in plans.items() if r != rank})
    row["layouts"] = len({p.layout.digest for p in plans.values()})
    storage = LocalFolder(work)
    files = Files(storage, world_size)
    for made in plans.values():
        files.put_layout(made)
    receipts = {r: files.receipt(r, p, None) for r, p in plans.items()}
    every = [receipts.get(r) or replace(receipts[rank if r < tail else world_size - 1], rank=r) for r in range(world_size)]
    put_files(storage, every)
    write_manifest(storage, FOLDER, [Announcement.of(r) for r in every], 1, 1)
    checkpoint = Checkpoint(storage, FOLDER)
    readers = {"same": (rank, world_size), "half": (rank // 2, max(1, world_size // 2))}
    for r, n in readers.values():
        with simulated_rank(case, r, n, base) as reader:
            for source in readers_sources(reader, checkpoint):
                made = plan_of(registered, of_another_rank(collected, source), small, rank=source)
                every[source] = files.receipt(source, made, small)
    put_files(storage, every, only_receipts=True)
    row |= committed(storage, every) | {"receipt_bytes": len(every[rank].encoded())}
    for what, (r, n) in readers.items():
        with simulated_rank(case, r, n, base) as reader:
            seconds = []
            for _ in range(3):
                counting = CountingFolder(work)
                begun = time.thread_time()
                found = restore.match(Checkpoint(counting, FOLDER), reader)
                seconds.append(time.thread_time() - begun)
            row[f"resume_{what}_s"] = min(seconds)
            row |= {f"resume_{what}_bytes": counting.bytes, f"resume_{what}_files": len(counting.files)}
            assert n != world_size or sum(map(len, found.parts.values())) > 0
    row["listing_s"], names = timed(lambda: storage.names(FOLDER))
    row["files"] = len(names)
    row["tidy_s"], _ = timed(lambda: finish(storage, FOLDER), times=1)
    return row


def prove(case: Case, world_size: int, base: Path, plans: dict[int, Any]) -> list[int]:
    """That the plans made for other ranks are those that these ranks make for themselves."""
    for rank, expected in plans.items():
        with simulated_rank(case, rank, world_size, base) as registered:
            collected, small = collected_for_save(registered)
            own = plan_of(registered, collected, small)
            assert (own.header, own.layout.digest) == (expected.header, expected.layout.digest), (
                str(case),
                world_size,
                rank,
            )
    return sorted(plans)


def put_files(storage: LocalFolder, receipts: list[Receipt], only_receipts: bool = False) -> None:
    """Receipts, and empty files in the place of ranks' that nobody opens. Without fsync: this is not what is measured."""
    folder = storage.root / FOLDER
    for receipt in receipts:
        (folder / receipt_file(receipt.rank, ATTEMPT)).write_bytes(receipt.encoded())
        if not only_receipts:
            (folder / rank_file(receipt.rank, ATTEMPT)).touch()


def committed(storage: LocalFolder, receipts: list[Receipt]) -> Row:
    """What rank 0 does with the announcements that it has gathered: seconds, and memory beside the announcements' bytes."""
    told = [Announcement.of(r).encoded() for r in receipts]

    def commit() -> None:
        write_manifest(storage, FOLDER, [Announcement.parse(t, f"rank {i}") for i, t in enumerate(told)], 1, 1)

    begun = time.perf_counter()
    commit()
    seconds = time.perf_counter() - begun  # with the manifest's fsync
    tracemalloc.start()
    commit()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = storage.size(f"{FOLDER}/{MANIFEST_FILE}")
    return {
        "commit_s": seconds,
        "commit_peak_bytes": peak + sum(map(len, told)),
        "manifest_bytes": size,
        "announcements_bytes": sum(map(len, told)),
    }


def dcp_rows(case: Case, ranks: list[int], work: Path) -> list[Row]:
    """DCP's planner for the same state: parameters and both moments of AdamW are DTensors, the step counters are not."""
    with simulated_rank(case, ranks[0] // 2 + 1, ranks[0], work / "base") as registered:
        tensors = model_tensors(registered)
        plan, _, _ = scale_dcp.local_plan(tensors)
        shapes = {name: t.shape for name, t in tensors.items()}
        mine = scale_dcp.plan_of_rank(shapes, registered.rank, ranks[0])
        assert [(i.index, i.tensor_data.chunk) for i in plan.items] == [
            (i.index, i.tensor_data.chunk) for i in mine.items
        ]  # type: ignore[union-attr]
    rows = []
    for world_size in ranks:
        with simulated_rank(case, world_size // 2 + 1, world_size, work / "base") as registered:
            _, seconds, size = scale_dcp.local_plan(model_tensors(registered))
        some = max(1, min(20, 12_000 // world_size))  # by memory and time
        large = {name: shape for name, shape in shapes.items() if shape[0] >= world_size} or shapes
        rows.append(
            {"local_plan_s": seconds, "local_plan_bytes": size}
            | scale_dcp.planning(large, world_size, len(shapes), some)
        )
    return rows


def model_tensors(registered: Any) -> dict[str, torch.Tensor]:
    found = dict(registered.models[""].named_parameters())
    for name, p in list(found.items()):
        state = registered.optimizers[""].state.get(p, {})
        found |= {f"optimizer.{name}.{key}": value for key, value in state.items() if value.ndim}
    return found


def store_rows(ranks: list[int], clients: list[int], work: Path) -> dict[str, list[Row]]:
    counted = []
    for world_size in ranks:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        counted.append(
            {"ranks": world_size} | scale_store.count_save(world_size, work) | scale_store.count_steps(world_size)
        )
    driven = []
    for n in clients:
        driven.append(scale_store.drive(n, poll_of(1, n)))
    return {"counted": counted, "driven": driven}


# -- what is shown


def bars(results: Row) -> list[tuple[str, str, str, bool]]:
    rows: list[Row] = results["ranks"]
    found: list[tuple[str, str, str, bool]] = []
    if not rows:
        return found
    cases = sorted({r["case"] for r in rows})
    least, most = min(r["ranks"] for r in rows), max(r["ranks"] for r in rows)

    def of(case: str, ranks: int) -> Row:
        return next(r for r in rows if (r["case"], r["ranks"]) == (case, ranks))

    growth = max(
        of(c, most)["header_bytes"]
        + of(c, most)["layout_bytes"]
        - of(c, least)["header_bytes"]
        - of(c, least)["layout_bytes"]
        for c in cases
    )
    found.append(
        (
            f"a rank's plan (layout, header), {least} to {most} ranks",
            "does not grow",
            f"{growth:+,} bytes at most",
            growth < 64 * 1024,
        )
    )
    per_rank = max((of(c, most)["manifest_bytes"] - of(c, least)["manifest_bytes"]) / (most - least) for c in cases)
    found.append(
        ("manifest, for each rank", "one file name (70 bytes)", f"{per_rank:.1f} bytes (a digest)", per_rank <= 70)
    )
    slowest = max(r["later_plan_s"] for r in rows)
    first = max(r["first_plan_s"] for r in rows)
    found.append(
        (
            "finding the state and planning, any size",
            "(no bar)",
            f"first {first:.2f} s, then {slowest * 1e3:.0f} ms",
            True,
        )
    )
    at = 2816 if any(r["ranks"] == 2816 for r in rows) else most
    commits = [r for r in rows if r["ranks"] == at]
    seconds, peak = max(r["commit_s"] for r in commits), max(r["commit_peak_bytes"] for r in commits)
    found.append(
        (f"commit at {at} ranks", "1 s, 100 MB", f"{seconds:.2f} s, {peak / 1e6:.1f} MB", seconds < 1 and peak < 100e6)
    )
    for what in ("same", "half"):
        slow = max(rows, key=lambda r: r[f"resume_{what}_s"])
        name = f"resume's plan, {what} number of ranks"
        found.append(
            (
                name,
                "1 s at any size",
                f"{slow[f'resume_{what}_s']:.2f} s ({slow['case']}, {slow['ranks']} ranks)",
                slow[f"resume_{what}_s"] < 1,
            )
        )
    return found


def tables(results: Row) -> list[Table]:
    shown = [Table(title="Bars"), Table(title="One rank, and the committing rank")]
    for column in ("what", "bar", "reading", "held"):
        shown[0].add_column(column)
    for what, bar, reading, held in bars(results):
        shown[0].add_row(what, bar, reading, "yes" if held else "NO")
    for column in ("case", "ranks", "tensors", "layout kB", "header kB", "receipt kB", "first plan s", "later ms", "commit s", "commit MB", "manifest kB",
                   "resume same s", "reads MB", "files", "resume half s", "reads MB", "files", "in folder", "listing ms", "tidy s"):  # fmt: skip
        shown[1].add_column(column, justify="right")
    for r in results["ranks"]:
        shown[1].add_row(
            r["case"], f"{r['ranks']:,}", f"{r['tensors']:,}", f"{r['layout_bytes'] / 1e3:.0f}", f"{r['header_bytes'] / 1e3:.0f}", f"{r['receipt_bytes'] / 1e3:.1f}",
            f"{r['first_plan_s']:.2f}", f"{r['later_plan_s'] * 1e3:.0f}", f"{r['commit_s']:.3f}", f"{r['commit_peak_bytes'] / 1e6:.1f}", f"{r['manifest_bytes'] / 1e3:.0f}",
            f"{r['resume_same_s']:.2f}", f"{r['resume_same_bytes'] / 1e6:.1f}", str(r["resume_same_files"]),
            f"{r['resume_half_s']:.2f}", f"{r['resume_half_bytes'] / 1e6:.1f}", str(r["resume_half_files"]),
            f"{r['files']:,}", f"{r['listing_s'] * 1e3:.1f}", f"{r['tidy_s']:.2f}",
        )  # fmt: skip
    for title, key in (
        ("The store: requests", "counted"),
        ("A real TCPStore under waiting clients", "driven"),
        ("DCP's planner", "dcp"),
    ):
        found: list[Row] = results.get(key, [])
        if found:
            table = Table(title=title)
            columns = [k for k in found[0] if not isinstance(found[0][k], dict)]
            for column in columns:
                table.add_column(column.replace("_", " "), justify="right")
            for r in found:
                table.add_row(
                    *(
                        r[c] if isinstance(r[c], str) else f"{r[c]:,}" if isinstance(r[c], int) else f"{r[c]:,.4g}"
                        for c in columns
                    )
                )
            shown.append(table)
    return shown


def picture(results: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(14, 8))
    curves = {"first_plan_s": "a rank's first plan, s", "commit_s": "commit, s", "resume_same_s": "a resume's plan, same ranks, s",
              "resume_half_s": "a resume's plan, from twice the ranks, s", "manifest_bytes": "manifest, bytes"}  # fmt: skip
    for axis, (field, title) in zip(axes.flat, curves.items(), strict=False):
        for case in dict.fromkeys(r["case"] for r in results["ranks"]):
            points = [(r["ranks"], r[field]) for r in results["ranks"] if r["case"] == case]
            axis.plot(*zip(*points, strict=True), marker=".", label=case)
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log")
    axes[0][0].legend(fontsize=7) if results["ranks"] else None
    last = axes[1][2]
    for name in dict.fromkeys(r["case"] for r in results.get("dcp", [])):
        points = [(r["ranks"], r["carried_on_s"]) for r in results["dcp"] if r["case"] == name]
        last.plot(*zip(*points, strict=True), marker=".", color="tab:gray", label=f"DCP's rank 0, {name}")
    slowest = {
        n: max(r["commit_s"] for r in results["ranks"] if r["ranks"] == n)
        for n in sorted({r["ranks"] for r in results["ranks"]})
    }
    last.plot(list(slowest), list(slowest.values()), marker=".", color="tab:blue", label="Holdfast's rank 0, commit")
    last.set(xscale="log", yscale="log")
    last.set_title("rank 0 in a save, s", fontsize=10)
    last.legend(fontsize=7)
    figure.suptitle("Against the number of ranks, simulated on one machine")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/scale"))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--models", nargs="+", choices=("flux", "llama"), default=["flux", "llama"])
    parser.add_argument("--fsdp", type=int, nargs="+", choices=(1, 2), default=[2, 1])
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--parts", nargs="+", choices=("ranks", "store", "dcp"), default=["ranks", "store", "dcp"])
    parser.add_argument("--add", action="store_true", help="to the readings that are in `out`")
    args = parser.parse_args()
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    args.out.mkdir(parents=True, exist_ok=True)
    work, kept = args.out.absolute() / f"work-{os.getpid()}", args.out / "scale.json"
    results: Row = json.loads(kept.read_text()) if args.add and kept.exists() else {"ranks": [], "dcp": []}
    try:
        for model in args.models if "ranks" in args.parts else ():
            for case in (Case(model, version, lora) for version in args.fsdp for lora in (False, True)):
                for world_size in args.ranks:
                    results["ranks"].append(measure(case, world_size, work))
                    kept.write_text(json.dumps(results, indent=1))
                    print(f"{case}, {world_size} ranks", flush=True)
        for model in args.models if "dcp" in args.parts else ():
            case = Case(model, 2, False)
            results["dcp"] += [
                {"case": str(case)} | row for row in dcp_rows(case, [n for n in args.ranks if n <= 2816], work)
            ]
        if "store" in args.parts:
            results |= store_rows(args.ranks, args.clients, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        kept.write_text(json.dumps(results, indent=1))
    console = Console(record=True, width=220)
    for table in tables(results):
        console.print(table)
    (args.out / "scale.txt").write_text(console.export_text())
    picture(results, args.out / "scale.png")


if __name__ == "__main__":
    main()
