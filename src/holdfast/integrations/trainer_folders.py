"""Which of a Trainer's folders is the last one that is whole. Nothing here imports torch's or transformers' training code."""

from __future__ import annotations

import os
import re
from pathlib import Path

from holdfast.core.manifest import MANIFEST_FILE, RANK_NAME
from holdfast.engine.resume import survey
from holdfast.storage import LocalFolder

STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def newest_foreign(root: Path) -> Path | None:
    """The newest checkpoint that a Trainer wrote itself, where the engine has none: its state file is the last that it writes."""
    if survey(LocalFolder(root)).complete:
        return None
    steps = {int(m[1]): path for path in root.iterdir() if (m := _NAME.fullmatch(path.name)) and _is_foreign(path)}
    return steps[max(steps)] if steps else None


def _is_foreign(path: Path) -> bool:
    if not (path / STATE).is_file():
        return False
    return not any(RANK_NAME.fullmatch(p.name) or p.name == MANIFEST_FILE for p in path.iterdir())


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """transformers' function of this name, which takes the highest number: this one takes the newest that is whole."""
    root = Path(folder)
    complete = survey(LocalFolder(root)).complete
    if complete:
        return os.path.join(folder, complete[0].folder)
    foreign = newest_foreign(root)
    return os.path.join(folder, foreign.name) if foreign is not None else None
