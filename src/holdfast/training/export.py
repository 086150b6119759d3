"""Writes the trained pipeline: a folder that `from_pretrained` loads, beside the checkpoints.

The trained weights are read from the final checkpoint, tensor by tensor from the files of all its ranks, by one process:
no rank gathers the model or waits for it. They are written as plain safetensors files of at most 5 GB with an index; one
file's tensors are in memory at a time. The base pipeline's other files are copied. `model_index.json` is written last, so
a folder that has it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from holdfast.core.boxes import Box
from holdfast.engine.blocks import Part, read_parts
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.errors import CorruptCheckpoint
from holdfast.storage import LocalFolder
from holdfast.training.pipeline_folder import INDEX, part_files, weight_variant, without_variant

# What the Hub's own tools write, too.
MAX_FILE_BYTES = 5 * 10**9
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def export_pipeline(
    base: Path,
    output_dir: Path,
    parts: Iterable[str],
    trained: str,
    weights: NamedTensors,
    dtype: torch.dtype,
    variant: str | None,
) -> None:
    """Writes `parts` of the pipeline `base` to `output_dir`, the part `trained` with `weights` in `dtype`.

    To be called by one process. Tensors that are not floating point keep their dtype.
    """
    (output_dir / INDEX).unlink(missing_ok=True)
    for part in parts:
        target = output_dir / part
        target.mkdir(parents=True, exist_ok=True)
        for stale in [path for path in target.iterdir() if weight_variant(path.name) is not None]:
            stale.unlink()  # a former export may have had other file names
        for source in part_files(base, part, variant):
            if part != trained or weight_variant(source.name) is None:
                _copy(source, target / without_variant(source.name))
    write_weights(output_dir / trained, "diffusion_pytorch_model", weights, dtype)
    _copy(base / INDEX, output_dir / INDEX)


def checkpoint_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors in a checkpoint with one model, by name: whole, on the CPU, in the dtype they were trained in.

    Raises CorruptCheckpoint where a file is missing or is not what was written; every block that is read is checked.
    """
    checkpoint = Checkpoint(LocalFolder(folder.parent), folder.name)
    for name, spec in sorted(checkpoint.tensors.items()):
        if not name.startswith("model."):
            continue
        if spec.shape is None:
            raise CorruptCheckpoint(f"{folder}: {name} differs from rank to rank, so it has no place in an export")
        whole = Box.whole(spec.shape)
        tensor = torch.empty(spec.shape, dtype=DTYPE_OF[spec.dtype])
        parts: dict[int, list[Part]] = {}
        for rank, box, entry in checkpoint.pieces(name, spec, whole):
            target = tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
            parts.setdefault(rank, []).append(Part(name, spec.dtype, entry, box, box, target))
        for rank, of_rank in parts.items():
            read_parts(checkpoint.file(rank), of_rank)
        yield name.removeprefix("model."), tensor


def write_weights(
    folder: Path, stem: str, weights: NamedTensors, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Writes `stem.safetensors`, or `stem-00001-of-0000N.safetensors` … and an index where one file is too small."""
    folder.mkdir(parents=True, exist_ok=True)
    groups: list[list[str]] = []
    total = 0
    for number, group in enumerate(_by_size(weights, dtype, max_file_bytes)):
        save_file(group, folder / f".part-{number}", metadata={"format": "pt"})
        groups.append(list(group))
        total += sum(tensor.nbytes for tensor in group.values())
    if len(groups) == 1:
        os.replace(folder / ".part-0", folder / f"{stem}.safetensors")
        return
    names = [f"{stem}-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    for number, name in enumerate(names):
        os.replace(folder / f".part-{number}", folder / name)
    where = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _by_size(weights: NamedTensors, dtype: torch.dtype, max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    group: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        # A copy, so that no two names share memory, which safetensors refuses.
        tensor = (
            tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
        )
        if group and size + tensor.nbytes > max_bytes:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    yield group


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
