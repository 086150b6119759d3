"""Ranks that all call `save_state`, and a planning rank that is slow, is killed, or waits for a late one.

usage: python benchmarks/reproduce_planning_rank.py [--ranks 8] [--limit 12] [--folder out/reproduce]

The script is `tests/scripts/all_ranks_trainer.py`: FSDP2 with CPU offload over a flattened context x shard mesh, ignored frozen parts. A
save of torch.distributed.checkpoint gathers the plans of all ranks on rank 0, which plans for all of them in Python and scatters the
result. Whoever waits for it waits in one collective, and the limit on that is the process group's (1,800 s by default): here a few
seconds, and what goes wrong lasts longer. Every case runs with accelerate alone and under `holdfast run`.
"""

from __future__ import annotations

import argparse
import math
import pickle
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


def planning_seconds(ranks: int, tensors: int = 200) -> dict[str, float]:
    """What rank 0 does for so many ranks, each with a shard of so many tensors: the functions that a save calls, run alone."""
    import torch
    from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    size, properties = torch.Size([ranks, 8]), TensorProperties(dtype=torch.float32)

    def item(name: str, rank: int) -> WriteItem:
        chunk = ChunkStorageMetadata(offsets=torch.Size([rank, 0]), sizes=torch.Size([1, 8]))
        return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size))

    sent = [pickle.dumps(SavePlan([item(f"t{t}", rank) for t in range(tensors)])) for rank in range(ranks)]
    seconds = {}
    begun = time.perf_counter()
    plans = [pickle.loads(plan) for plan in sent]
    seconds["unpickle"] = time.perf_counter() - begun
    begun = time.perf_counter()
    plans, metadata = create_default_global_save_plan(plans)
    seconds["plan"] = time.perf_counter() - begun
    begun = time.perf_counter()
    _validate_global_plan(plans, metadata)
    seconds["validate"] = time.perf_counter() - begun
    begun = time.perf_counter()
    for plan in plans:
        pickle.dumps(plan)
    seconds["pickle"] = time.perf_counter() - begun
    return seconds


def arithmetic(tensors: int = 200) -> list[str]:
    """Measured at sizes that fit here, carried on to those that do not: by the growth that was seen from each size to the next."""
    sizes = (64, 128, 256)
    measured = {ranks: planning_seconds(ranks, tensors) for ranks in sizes}
    lines = [
        f"  {ranks} ranks, {tensors} tensors each: " + ", ".join(f"{what} {s:.2f} s" for what, s in seconds.items()) + " on rank 0"
        for ranks, seconds in measured.items()
    ]
    last, before = measured[256], measured[128]
    growth = {what: max(1.0, math.log2(last[what] / before[what])) for what in last}
    lines.append("  growth with the number of ranks: " + ", ".join(f"{what} as its power {power:.1f}" for what, power in growth.items()))
    for ranks, shown in ((1152, 3000), (2816, 3000)):
        seconds = {what: s * (ranks / 256) ** growth[what] * shown / tensors for what, s in last.items()}
        lines.append(
            f"  carried on to {ranks} ranks with {shown} tensors: {sum(seconds.values()):,.0f} s in one process "
            f"({', '.join(f'{what} {s:,.0f}' for what, s in seconds.items())}), {ranks * shown:,} items of metadata"
        )
    lines.append("  the engine plans nothing for others: rank 0 reads one announcement of a few hundred bytes for each rank")
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
