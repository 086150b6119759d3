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
from collections.abc import Iterable
from pathlib import Path

from holdfast.engine.export import DTYPES, MAX_SHARD_BYTES, write_weights
from holdfast.engine.export_weights import choose_weights
from holdfast.engine.extract import open_checkpoint
from holdfast.training.pipeline_folder import INDEX, part_files, weight_variant, without_variant

logger = logging.getLogger(__name__)


def export_pipeline(
    base: Path,
    output_dir: Path,
    parts: Iterable[str],
    trained: str,
    checkpoint: Path,
    dtype: str,
    variant: str | None,
    max_file_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes `parts` of the pipeline `base` to `output_dir`, the part `trained` with the weights of `checkpoint`.

    To be called by one process. `dtype` is one of `DTYPES`; tensors that are not floating point keep theirs. Raises
    CorruptCheckpoint where a file is missing or is not what was written; every block that is read is checked.
    """
    source = open_checkpoint(checkpoint)
    weights = choose_weights(source, "", ema=False)
    for note in weights.notes:
        logger.warning("%s", note)
    (output_dir / INDEX).unlink(missing_ok=True)
    for part in parts:
        target = output_dir / part
        target.mkdir(parents=True, exist_ok=True)
        for stale in [path for path in target.iterdir() if weight_variant(path.name) is not None]:
            stale.unlink()  # a former export may have had other file names
        for file in part_files(base, part, variant):
            if part != trained or weight_variant(file.name) is None:
                _copy(file, target / without_variant(file.name))
    write_weights(
        source, output_dir / trained, "diffusion_pytorch_model", weights.tensors, DTYPES[dtype], max_file_bytes
    )
    _copy(base / INDEX, output_dir / INDEX)


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
