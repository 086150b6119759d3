"""Which flags count when a run is continued: those that are given now. `run.json` in the output folder keeps what was given before.

    {"recipe": "flux-dreambooth", "id": "…", "base": {"transformer": "<hash>", …}, "flags": {"rank": 4, …}}

A change is printed, as `--learning_rate 0.001 -> 0.0005`. One that would make another run of it (another model, optimizer,
LoRA, order of the samples) is refused before anything is loaded. No torch in here.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import UsageError
from holdfast.training.pipeline_folder import part_files, weight_variant

if TYPE_CHECKING:
    from holdfast.training.config import DiffusionConfig

RUN_FILE = "run.json"
# Where outputs go and how this start was asked for: no part of what the run is.
_OF_THIS_START = {"output_dir", "resume_from_checkpoint", "hub_token", "pretrained_model_name_or_path", "cache_dir", "revision"}
_SAMPLE = 4096


@dataclass
class Continuation:
    """What the run is, and what was given before: `changes` are (flag, then, now), empty for a new run."""

    recipe: str
    run_id: str
    base: dict[str, str]
    changes: list[tuple[str, Any, Any]]

    @property
    def changed(self) -> set[str]:
        return {name for name, _, _ in self.changes}

    def describe(self) -> str:
        listed = "\n".join(f"  --{name} {then} -> {now}" for name, then, now in self.changes)
        return f"{len(self.changes)} flag(s) differ from those of the run that is continued; what is given now counts:\n{listed}"

    def write(self, config: DiffusionConfig) -> None:
        """On rank 0, once the run has begun: these flags are what the next start is compared with."""
        output_dir = Path(config.output_dir)
        new = output_dir / f".{RUN_FILE}.new"
        document = {"recipe": self.recipe, "id": self.run_id, "base": self.base, "flags": _flags(config)}
        new.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        os.replace(new, output_dir / RUN_FILE)


def continuation(config: DiffusionConfig, recipe: str, base: dict[str, str]) -> Continuation:
    """What this start is to the run in its folder. `base` is what `fingerprints` gives for the pipeline.

    Raises:
        UsageError: it would not be the same run; all reasons are told.
    """
    then = _previous(config)
    if then is None:
        return Continuation(recipe, uuid.uuid4().hex, base, [])
    now = _flags(config)
    reasons = []
    if then.get("recipe") != recipe:
        reasons.append(f"it was started with the recipe {then.get('recipe')}, this is {recipe}")
    if other := sorted(part for part, value in base.items() if then.get("base", {}).get(part, value) != value):
        reasons.append(f"its base model had another {', '.join(other)} than {config.pretrained_model_name_or_path}")
    flags = then.get("flags", {})
    changes = [(name, flags[name], value) for name, value in now.items() if name in flags and flags[name] != value]
    for name, before, after in changes:
        if name in config.breaking:
            reasons.append(f"it had --{name} {before}, now it is {after}")
    if reasons:
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        raise UsageError(
            f"The run in {_folder(config)} cannot be continued like this:\n{listed}\n"
            "Give what it was started with, or another --output_dir for a new run."
        )
    return Continuation(recipe, str(then.get("id") or uuid.uuid4().hex), base, changes)


def fingerprints(base: Path, parts: dict[str, str | None], variant: str | None) -> dict[str, str]:
    """What tells each part's weights from others: a hash of config, tensor names, sizes and a sample of the values.

    The same for the same files wherever they lie.
    """
    found = {}
    for part, kind in parts.items():
        if kind is None:
            continue
        digest = hashlib.sha256((base / part / "config.json").read_bytes())
        for path in sorted(part_files(base, part, variant)):
            if weight_variant(path.name) is not None and path.suffix == ".safetensors":
                digest.update(_sample(path))
        found[part] = digest.hexdigest()[:32]
    return found


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
        parts = [length, header]
        for place in (8 + len(header), (8 + len(header) + size) // 2, max(0, size - _SAMPLE)):
            file.seek(place)
            parts.append(file.read(_SAMPLE))
    return b"".join(parts) + str(size).encode()


def _folder(config: DiffusionConfig) -> Path:
    """Where the run lies that is continued: the checkpoint's own folder, or the output folder."""
    path = config.checkpoint_path()
    return Path(config.output_dir) if path is None else path.absolute().parent


def _previous(config: DiffusionConfig) -> dict[str, Any] | None:
    """`run.json` of the run that is continued; None for a new run, or for one that is older than that file."""
    folder = _folder(config)
    if config.resume_from_checkpoint is None or not any(folder.glob("checkpoint-*/manifest.json")):
        return None
    try:
        found = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _flags(config: DiffusionConfig) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _OF_THIS_START}
    values["optimizer"] = config.optimizer.lower()  # in capitals or not
    return values
