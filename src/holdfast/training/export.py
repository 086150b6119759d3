"""Writes the trained pipeline: a folder that `from_pretrained` loads, beside the checkpoints.

The trained weights are streamed from the final checkpoint's files of all ranks by one process (`engine.export`): no rank
gathers the model or waits for it. The base pipeline's other files are copied. `model_index.json` is written last, so a
folder that has it is whole.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.engine.export import DTYPES, MAX_SHARD_BYTES, write_weights
from holdfast.engine.export_weights import Weights, choose_weights
from holdfast.engine.extract import Stored, open_checkpoint
from holdfast.formats.huggingface import stored_tensors
from holdfast.storage import LocalFolder
from holdfast.training.pipeline_folder import INDEX, part_files, part_variant, weight_variant, without_variant

logger = logging.getLogger(__name__)


def export_pipeline(
    base: Path,
    output_dir: Path,
    parts: Iterable[str],
    trained: Mapping[str, str],
    checkpoint: Path,
    dtype: str,
    variant: str | None,
    averaged: str | None = None,
    max_file_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes `parts` of the pipeline `base` to `output_dir`, those in `trained` with the weights of `checkpoint`.

    `trained` gives the key of each part's model in the checkpoint; of the part `averaged` the moving average is taken. To be
    called by one process. `dtype` is one of `DTYPES`; tensors that are not floating point keep theirs. Raises
    CorruptCheckpoint where a file is missing or is not what was written; every block that is read is checked.
    """
    source = open_checkpoint(checkpoint)
    weights = {part: choose_weights(source, key, ema=part == averaged) for part, key in trained.items()}
    for note in (note for chosen in weights.values() for note in chosen.notes):
        logger.info("%s", note)
    (output_dir / INDEX).unlink(missing_ok=True)
    for part in parts:
        target = output_dir / part
        target.mkdir(parents=True, exist_ok=True)
        for stale in [path for path in target.iterdir() if weight_variant(path.name) is not None]:
            stale.unlink()  # a former export may have had other file names
        for file in part_files(base, part, variant):
            if part not in trained or weight_variant(file.name) is None:
                _copy(file, target / without_variant(file.name))
    for part, chosen in weights.items():
        named = _as_in_base(base, part, variant, chosen)
        write_weights(source, output_dir / part, _stem(base, part, variant), named, DTYPES[dtype], max_file_bytes)
    _copy(base / INDEX, output_dir / INDEX)


def _as_in_base(base: Path, part: str, variant: str | None, weights: Weights) -> dict[str, Stored]:
    """The tensors under the names that the base's files have for them: its library may have renamed them since."""
    there = stored_tensors(LocalFolder(base / part, follow_links=True), part_variant(base, part, variant)).keys()
    prefix = next((n.partition(".")[0] + "." for n in there if n.partition(".")[2] in weights.tensors), "")
    return {n if n in there or prefix + n not in there else prefix + n: tensor for n, tensor in weights.tensors.items()}


def _stem(base: Path, part: str, variant: str | None) -> str:
    """`model` or `diffusion_pytorch_model`, as the base's own files are called."""
    names = [path.name for path in part_files(base, part, variant) if weight_variant(path.name) is not None]
    return "diffusion_pytorch_model" if any(name.startswith("diffusion") for name in names) else "model"


def _copy(source: Path, target: Path) -> None:
    """Copies one file; an index has its variant taken out of the file names that it lists."""
    new = target.with_name(f".{target.name}.new")
    if weight_variant(source.name) and source.suffix == ".json":
        index = json.loads(source.read_text(encoding="utf-8"))
        index["weight_map"] = {name: without_variant(file) for name, file in index["weight_map"].items()}
        new.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(source, new)
    os.replace(new, target)
