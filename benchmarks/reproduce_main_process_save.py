"""Two ranks, and a script that saves on the main process only: where it hangs, and the same script under `holdfast run`.

usage: python benchmarks/reproduce_main_process_save.py [--limit 20] [--step 500] [--folder out/reproduce]

The limit on collectives is 600 s by default where this was seen on accelerators; here it is scaled down.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from reproduction import Run, completed, side_by_side, start


def script(how: str, folder: Path, limit: float, step: int) -> Run:
    output = folder / how
    shutil.rmtree(output, ignore_errors=True)
    # Sixteen samples for two ranks and batches of two: step 500 ends an epoch, and the rank that goes on begins the next one.
    arguments = ("--output_dir", str(output), "--every", str(step), "--max_train_steps", str(step + 5), "--shuffle", "--no_validation")
    fsdp = {"FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    return start(how, 2, limit, folder, "main_process_saves.py", *arguments, fsdp=fsdp, timeout=step + 10 * limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=20)
    parser.add_argument("--step", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path("out/reproduce"))
    options = parser.parse_args()
    folder = options.folder.absolute() / "main_process_save"

    plain = script("plain", folder, options.limit, options.step)
    print(f"accelerate alone: save_state on the main process only, at step {options.step}\n")
    print(side_by_side(plain))
    print(f"\n  the job died after {plain.seconds:.0f} s with exit code {plain.code}: {plain.error}\n")
    with_engine = script("holdfast", folder, options.limit, options.step)
    print("the same script under holdfast run\n")
    print("\n".join("  " + line for line in with_engine.output.splitlines() if line.startswith("holdfast run:")))
    found = completed(folder / "holdfast")
    print(f"\n  exit code {with_engine.code} after {with_engine.seconds:.0f} s; complete: {', '.join(found)}\n")

    apart = {(s["collective"], s["number"]) for s in plain.stuck.values()}
    numbers = {s["number"] for s in plain.stuck.values()}
    hung = plain.code != 0 and len(plain.stuck) == 2 and len(apart) == 2
    solved = with_engine.code == 0 and f"checkpoint-{options.step}" in found and not with_engine.stuck
    same = "the same number" if len(numbers) == 1 else "different numbers"
    print(f"VERDICT: alone {'it hangs: two ranks in two collectives with ' + same if hung else 'it was not seen to hang'}; "
          f"under holdfast run {'every save is complete and the script ends' if solved else 'it FAILED'}")  # fmt: skip
    return 0 if hung and solved else 1


if __name__ == "__main__":
    sys.exit(main())
