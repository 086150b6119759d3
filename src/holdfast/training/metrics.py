"""What a run leaves for machines to read, written by rank 0 into the output folder, one JSON object a line.

    metrics.jsonl   one line for each optimizer step: step, loss, lr, grad_norm, step_s, epoch (and d under Prodigy)
    saves.jsonl     one line for each finished save: step, state, blocked_s, durable_s, bytes

Numbers are written with all their digits, so two runs can be compared bit for bit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

METRICS, SAVES = "metrics.jsonl", "saves.jsonl"


class RunLog:
    """Appends to both files; lines of steps after `start_step` belong to a part of the run that is done anew and go."""

    def __init__(self, output_dir: Path, start_step: int) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_truncated(output_dir / METRICS, start_step)
        self._saves = _open_truncated(output_dir / SAVES, start_step)
        self._reported: set[int] = set()

    def step(self, **values: Any) -> None:
        """Writes one optimizer step."""
        self._metrics.write(json.dumps(values) + "\n")

    def saves(self, records: list[Any]) -> None:
        """Writes those of the checkpointer's records that have been decided since the last call."""
        for index, record in enumerate(records):
            if record.state != "writing" and index not in self._reported:
                self._reported.add(index)
                fields = ("step", "state", "blocked_s", "durable_s", "bytes")
                self._saves.write(json.dumps({name: getattr(record, name) for name in fields}) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._saves.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in such a file; a last line that a kill cut short is passed over."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _open_truncated(path: Path, start_step: int) -> Any:
    kept = [line for line in read_lines(path) if line["step"] <= start_step] if path.exists() else []
    new = path.with_name(f".{path.name}.new")
    new.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(new, path)
    return path.open("a", encoding="utf-8", buffering=1)  # each line is out at once: a killed run keeps its log
