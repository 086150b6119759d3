"""Ranks that all call `save_state`, and a planning rank that is slow, is killed, or waits for a late one.

usage: python benchmarks/reproduce_planning_rank.py [--ranks 8] [--limit 12] [--folder out/reproduce]

The script is `tests/scripts/all_ranks_trainer.py`: FSDP2 with CPU offload over a flattened context x shard mesh, ignored frozen parts. A
save of torch.distributed.checkpoint gathers the plans of all ranks on rank 0, which plans for all of them in Python and scatters the
result. Whoever waits for it waits in one collective, and the limit on that is the process group's (1,800 s by default): here a few
seconds, and what goes wrong lasts longer. Every case runs with accelerate alone and under `holdfast run`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from reproduction import Run, completed, side_by_side, start

CASES = {
    "slow": "the planning rank takes longer than the limit",
    "killed": "the planning rank is killed while it plans, as for memory",
    "late": "one rank comes to the save later than the limit",
}


def script(how: str, case: str, folder: Path, ranks: int, limit: float) -> Run:
    output = folder / f"{how}-{case}"
    shutil.rmtree(output, ignore_errors=True)
    arguments = ["--save_path", str(output), "--cp", str(max(1, ranks // 2)), "--fault", case, "--delay", str(limit + 6)]
    fsdp = {"FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    return start(how, ranks, limit, folder, "all_ranks_trainer.py", *arguments, fsdp=fsdp, timeout=300)


def planning_seconds(ranks: int, tensors: int = 400) -> float:
    """What rank 0 takes to plan for so many ranks, each with a shard of so many tensors: the function that a save calls, run alone."""
    import torch
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    size, properties = torch.Size([ranks, 8]), TensorProperties(dtype=torch.float32)

    def item(name: str, rank: int) -> WriteItem:
        chunk = ChunkStorageMetadata(offsets=torch.Size([rank, 0]), sizes=torch.Size([1, 8]))
        return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size))

    plans = [SavePlan([item(f"t{t}", rank) for t in range(tensors)]) for rank in range(ranks)]
    begun = time.perf_counter()
    create_default_global_save_plan(plans)
    return time.perf_counter() - begun


def arithmetic() -> list[str]:
    """Measured at sizes that fit here, carried on to those that do not."""
    measured = {ranks: planning_seconds(ranks) for ranks in (32, 64, 128)}
    each = measured[128] / 128 / 400
    lines = [f"  planning for {r} ranks with 400 tensors each: {s:.2f} s on rank 0" for r, s in measured.items()]
    for ranks, tensors in ((1152, 3000), (2816, 3000)):
        lines.append(
            f"  carried on in proportion to ranks x tensors ({each * 1e6:.1f} us each) to {ranks} ranks with {tensors} tensors: {each * ranks * tensors:.0f} s, "
            f"before the check for overlaps, and {ranks * tensors:,} items of metadata in one process"
        )
        lines.append(f"  the engine at {ranks} ranks: nothing is planned for others; rank 0 reads {ranks} announcements of a few hundred bytes")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--limit", type=float, default=12)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, default=Path("out/reproduce"))
    options = parser.parse_args()
    folder = options.folder.absolute() / "planning_rank"
    verdicts, good = [], True
    for case in options.cases:
        print(f"{CASES[case]} (limit {options.limit:.0f} s)")
        plain = script("plain", case, folder, options.ranks, options.limit)
        print(side_by_side(plain, columns=2, steps=8))
        print(f"  alone: exit code {plain.code} after {plain.seconds:.0f} s, {plain.error}")
        engine = script("holdfast", case, folder, options.ranks, options.limit)
        found = completed(folder / f"holdfast-{case}")
        print(f"  under holdfast run: exit code {engine.code} after {engine.seconds:.0f} s; complete: {', '.join(found)}\n")
        died, saved = plain.code != 0, "step-4/accelerator" in found
        # A rank that is late for longer than the limit ends the training in its next collective, whoever saves: its save is complete.
        ended = engine.code == 0 or case == "late"
        good &= died and saved and ended
        verdicts.append(f"{case}: alone the job {'dies in the save' if died else 'was not seen to die'}, under holdfast run the save is "
                        f"{'complete' if saved else 'NOT complete'}{'' if engine.code == 0 else ', and the job ends in its next collective'}")  # fmt: skip
    print("the cost of a planning rank")
    print("\n".join(arithmetic()) + "\n")
    print("VERDICT: " + "\n         ".join(verdicts))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
