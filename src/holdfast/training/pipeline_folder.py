"""A pipeline in diffusers' layout: which of its files count, and whether they are all there. No torch in here.

    model_index.json        which class each part is of
    transformer/            config.json and weights: one safetensors file, or several and an index
    vae/, text_encoder/ …   the same; scheduler/ and tokenizer/ have no weights

A weight file may carry a variant (`model.fp16.safetensors`, `model.safetensors.index.fp16.json`,
`model.fp16-00001-of-00002.safetensors`): with `--variant` a part's variant files count, or its plain ones if it has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

INDEX = "model_index.json"
# Weights in forms that are not read here: pickles, and other frameworks'.
OTHER_WEIGHTS = (".bin", ".ckpt", ".pt", ".pth", ".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf")
_SHARD = re.compile(r"-\d{5}-of-\d{5}")


def weight_variant(name: str) -> str | None:
    """The variant in the name of a safetensors file or index, "" for a plain one, None if `name` is neither."""
    words = _SHARD.sub("", name).split(".")
    if "safetensors" not in words[1:]:
        return None
    rest = [word for word in words[1:] if word not in ("safetensors", "index", "json")]
    return ".".join(rest)


def without_variant(name: str) -> str:
    """`model.fp16-00001-of-00002.safetensors` -> `model-00001-of-00002.safetensors`."""
    variant = weight_variant(name)
    return name.replace(f".{variant}", "", 1) if variant else name


def choose_files(names: Iterable[str], parts: Iterable[str], variant: str | None) -> list[str]:
    """Those of a pipeline's files (paths relative to it, with `/`) that belong to `parts` and to `variant`."""
    wanted = set(parts)
    by_part: dict[str, list[str]] = {}
    for name in names:
        path = PurePosixPath(name)
        if len(path.parts) == 2 and path.parts[0] in wanted and path.suffix not in OTHER_WEIGHTS:
            by_part.setdefault(path.parts[0], []).append(path.name)
    chosen = [INDEX]
    for part, files in sorted(by_part.items()):
        variants = {weight_variant(file) for file in files}
        take = variant if variant and variant in variants else ""
        chosen += [f"{part}/{file}" for file in sorted(files) if weight_variant(file) in (None, take)]
    return chosen


def part_variant(folder: Path, part: str, variant: str | None) -> str | None:
    """`variant` if that part has weights of it, else None for its plain ones."""
    return variant if variant in {weight_variant(path.name) for path in part_files(folder, part, variant)} else None


def part_files(folder: Path, part: str, variant: str | None) -> list[Path]:
    """The files of one part of a pipeline on disk."""
    names = [f"{part}/{path.name}" for path in (folder / part).iterdir() if path.is_file()]
    return [folder / name for name in choose_files(names, [part], variant) if name != INDEX]


def pipeline_problems(folder: Path, parts: dict[str, str | None], variant: str | None) -> Iterator[str]:
    """Yields what keeps `folder` from being the pipeline that a recipe needs.

    `parts` maps each part to the class that it has to be of; None leaves the class open (tokenizers, schedulers).
    """
    classes = _read_json(folder / INDEX)
    if classes is None:
        yield f"{folder} is no diffusers pipeline: it has no readable {INDEX}."
        return
    for part, wanted in parts.items():
        entry = classes.get(part)
        found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if found is None or (wanted is not None and found != wanted):
            yield f"{folder / INDEX} gives {found or 'nothing'} as its {part}, where {wanted or 'one'} is needed."
        elif not (folder / part).is_dir():
            yield f"{folder} lacks the folder {part}/."
        elif wanted is not None:
            yield from _weight_problems(folder, part, variant)


def _weight_problems(folder: Path, part: str, variant: str | None) -> Iterator[str]:
    if _read_json(folder / part / "config.json") is None:
        yield f"{folder / part} has no readable config.json."
    files = part_files(folder, part, variant)
    weights = [path for path in files if path.suffix == ".safetensors"]
    if not weights:
        yield f"{folder / part} has no safetensors weights{f' (variant {variant})' if variant else ''}."
    for index in (path for path in files if weight_variant(path.name) is not None and path.suffix == ".json"):
        listed = set(((_read_json(index) or {}).get("weight_map") or {}).values())
        if missing := sorted(listed - {path.name for path in weights}):
            yield f"{index} names files that are not there: {', '.join(missing)}."


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
