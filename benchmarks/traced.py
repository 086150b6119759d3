"""One rank of a reproduction: a script as it is, or under `holdfast run`, with short limits on collectives and a follower.

usage, under torchrun: traced.py plain|holdfast LIMIT_S TRACE_FOLDER SCRIPT ARGUMENTS

The follower looks at the main thread twice a second. When it has been inside one collective for three seconds, it notes which one, its
number in the default process group, and the way from the script to it.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

SHOWN = ("/accelerate/", "/torch/distributed/", "/transformers/", "/diffusers/")


def shorten(limit: float) -> None:
    """Every process group of this process gets this limit, in seconds."""
    c10d = dist.distributed_c10d

    def limited(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **(kwargs | {"timeout": timedelta(seconds=limit)}))

        return call

    for name in ("init_process_group", "new_group"):
        replacement = limited(getattr(c10d, name))
        setattr(c10d, name, replacement)
        setattr(dist, name, replacement)


begun = ""
"""The last functional collective that this rank began: those are waited for elsewhere."""


def note_functional() -> None:
    from torch.distributed import _functional_collectives as functional

    def noting(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            global begun
            begun = name
            return original(*args, **kwargs)

        return call

    names = ("all_gather_single", "all_gather_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce", "broadcast")
    for name in names:
        if hasattr(functional, name):  # some were renamed in torch 2.13
            setattr(functional, name, noting(name, getattr(functional, name)))


def follow(script: str, folder: Path) -> None:
    main, rank = threading.main_thread().ident, int(os.environ["RANK"])
    last: tuple[str, int] | None = None
    since = time.monotonic()
    while True:
        time.sleep(0.5)
        frame = sys._current_frames().get(main or 0)
        way, collective = [], ""
        while frame is not None:
            name, file = frame.f_code.co_name, frame.f_code.co_filename
            if file.endswith(("distributed_c10d.py", "_functional_collectives.py")) and not collective:
                collective = f"{begun} (waited for)" if "wait" in name else name
            if file.endswith(Path(script).name) or any(part in file for part in SHOWN):
                way.append(f"{Path(file).name}:{name}")
            frame = frame.f_back
        if not collective or not dist.is_initialized():
            last = None
            continue
        now = collective, dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
        if now != last:
            last, since = now, time.monotonic()
        elif since and time.monotonic() - since > 3:
            shown = [step for step in reversed(way) if step.partition(":")[2] not in ("wrapper", "decorate_context", "_fn", "inner")]
            line = {"rank": rank, "collective": collective, "number": now[1], "way": shown}
            with (folder / f"rank-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            since = 0.0


if __name__ == "__main__":
    how, limit, folder, script, *arguments = sys.argv[1:]
    shorten(float(limit))
    note_functional()
    threading.Thread(target=follow, args=(script, Path(folder)), daemon=True).start()
    from holdfast.integrations import cpu_ranks

    if how == "holdfast":
        from holdfast.integrations.script import run

        sys.exit(run(Path(script), arguments, cpu_fsdp=True))
    cpu_ranks.join_without_accelerator()
    cpu_ranks.enable()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
