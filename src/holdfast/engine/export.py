"""Exports: a checkpoint in the layout of another library, offline and in one process, streaming.

What is written into a folder comes in this order: weights in files of bounded size, their index, the files that are taken
over from the base, and `config.json` last. The output folder has to be new or empty; after a failure it is removed again.

Memory: `extract.PIECE` and the readers' and writer's buffers, 100 MB in all beside what Python and torch take, however large
the checkpoint; the documents of a checkpoint, about 100 bytes per tensor and MiB, come on top.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.dtypes import DTYPE_OF, NAME_OF
from holdfast.engine.export_weights import Weights, choose_weights
from holdfast.engine.extract import Stored, open_checkpoint, stored, stream
from holdfast.engine.names import join
from holdfast.errors import CheckpointError, IncompatibleCheckpoint, UsageError
from holdfast.formats.huggingface import stored_tensors
from holdfast.formats.safetensors_out import Described, cut_into_files, write_files
from holdfast.storage import LocalFolder

MAX_SHARD_BYTES = 5 * 10**9
"""What the Hub's own tools write, too."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STEM = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf", ".index.json")
_NOT_COPIED = ("config.json", "model_index.json", "trainer_state.json", "README.md")
"""The first is written here, the others are of another folder than this one."""


@dataclass(frozen=True)
class Request:
    """What is to be exported: see `holdfast export --help` for each field."""

    checkpoint: Path
    output_dir: Path
    to: str
    dtype: str | None = None
    ema: bool = False
    base: Path | None = None
    model: str = ""
    lora_alpha: float | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES


def export_checkpoint(request: Request) -> list[str]:
    """Write the export; returns what was done, in lines for people.

    Raises:
        CheckpointError: the checkpoint cannot be read; nothing is left in the output folder.
        UsageError: the request cannot be done as it stands.
    """
    checkpoint = open_checkpoint(request.checkpoint)
    if request.base is not None:
        checkpoint.base_files.folders.append(request.base.absolute())
    targets: dict[str, Callable[[Checkpoint, Request], list[str]]] = {
        "transformers": _export_pretrained, "diffusers": _export_diffusers, "peft": _export_peft,
        "dcp": _export_dcp, "accelerate": _export_accelerate, "accelerate-fsdp": _export_accelerate,
    }  # fmt: skip
    if request.to not in targets:
        raise UsageError(f"there is no export to {request.to!r}; choose one of {', '.join(targets)}")
    if request.to in ("dcp", "accelerate", "accelerate-fsdp"):
        base = request.base if not checkpoint.bases else None  # else it says where frozen weights are
        given = [flag for flag, is_set in (("--dtype", request.dtype), ("--ema", request.ema), ("--base", base)) if is_set]
        if given:
            raise UsageError(f"{', '.join(given)} has no place in an export to {request.to}, which keeps the state as it is for training")
    with _new_folder(request.output_dir) as made:
        lines = targets[request.to](checkpoint, request)
        made.keep()
    return [f"{request.output_dir}: step {checkpoint.manifest.step} of {checkpoint.where} for {request.to}", *lines]


class _new_folder:
    """The output folder, empty; taken back unless `keep` was called."""

    def __init__(self, path: Path) -> None:
        self._path, self._kept = path, False
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(f"{path} is not empty: give a new folder for the export")
        except OSError as error:
            raise UsageError(f"cannot write to {path}: {error.strerror or error}") from error

    def __enter__(self) -> _new_folder:
        return self

    def keep(self) -> None:
        self._kept = True

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            shutil.rmtree(self._path, ignore_errors=True)


def write_weights(
    checkpoint: Checkpoint,
    folder: Path,
    stem: str,
    named: dict[str, Stored],
    dtype: torch.dtype | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: dict[str, str] | None = None,
) -> int:
    """Write the tensors of `named` under its keys as `stem.safetensors`, or several files and an index; returns the bytes."""
    for name, tensor in named.items():
        if tensor.dtype == "C128":
            raise IncompatibleCheckpoint(f"{checkpoint.where}: {name} is complex128, which safetensors files cannot hold")
    described: list[Described] = [(name, _exported(t, dtype), t.shape) for name, t in named.items()]
    files = cut_into_files(described, stem, max_shard_bytes)
    order = [named[name] for _, tensors in files for name, _, _ in tensors]
    data = (piece.to(DTYPE_OF[_exported(tensor, dtype)]) for tensor, _, piece in stream(checkpoint, order))
    return write_files(LocalFolder(folder), "", stem, files, data, metadata)


def _exported(tensor: Stored, dtype: torch.dtype | None) -> str:
    """The dtype's name in the export: only floating point of two bytes and more is converted."""
    convert = dtype is not None and tensor.dtype in ("F64", "F32", "F16", "BF16")
    return NAME_OF[dtype] if convert and dtype is not None else tensor.dtype


def _dtype(request: Request) -> torch.dtype | None:
    if request.dtype is not None and request.dtype not in DTYPES:
        raise UsageError(f"dtype is {request.dtype!r}, should be one of {', '.join(DTYPES)}")
    return DTYPES[request.dtype] if request.dtype is not None else None


def _export_diffusers(checkpoint: Checkpoint, request: Request) -> list[str]:
    from holdfast.engine.export_lora import export_diffusers_lora

    weights = choose_weights(checkpoint, request.model, request.ema)
    if weights.is_lora:
        return export_diffusers_lora(checkpoint, request, weights, _dtype(request))
    base = _base(checkpoint, request)
    if not (base / "model_index.json").is_file():
        return _export_pretrained(checkpoint, request)
    part = _part_of_pipeline(base, weights, checkpoint)
    lines = _write_model(checkpoint, request, weights, base / part, request.output_dir / part)
    listed = json.loads((base / "model_index.json").read_text(encoding="utf-8"))
    for other in sorted(name for name in listed if name != part and (base / name).is_dir()):
        shutil.copytree(base / other, request.output_dir / other, copy_function=shutil.copyfile)
    shutil.copyfile(base / "model_index.json", request.output_dir / "model_index.json")  # a folder that has it is whole
    return [*lines, f"the other parts of the pipeline are those of {base}"]


def _part_of_pipeline(base: Path, weights: Weights, checkpoint: Checkpoint) -> str:
    """The folder of the pipeline whose tensors have the trained ones' names."""
    for folder in sorted(path for path in base.iterdir() if (path / "config.json").is_file()):
        if weights.tensors.keys() & _stored_shapes(folder).keys():
            return folder.name
    raise IncompatibleCheckpoint(
        f"no part of the pipeline {base} has tensors named like those of {checkpoint.where} ({weights.shown}): give the pipeline "
        "that was trained, with --base, or the trained model's key, with --model"
    )


def _export_pretrained(checkpoint: Checkpoint, request: Request) -> list[str]:
    weights = choose_weights(checkpoint, request.model, request.ema)
    if weights.is_lora:
        raise UsageError(f"{checkpoint.where} holds a LoRA: export it with --to peft, or merge it into its model first")
    return _write_model(checkpoint, request, weights, _base(checkpoint, request), request.output_dir)


def _write_model(checkpoint: Checkpoint, request: Request, weights: Weights, base: Path, folder: Path) -> list[str]:
    """One model: weights, the base's other files, config.json."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    named = _as_stored_there(checkpoint, weights, base, config)
    folder.mkdir(parents=True, exist_ok=True)
    total = write_weights(checkpoint, folder, _STEM[request.to], named, _dtype(request), request.max_shard_bytes)
    for source in sorted(base.iterdir()):
        keep = source.is_file() and not source.name.endswith(_WEIGHTS)
        if keep and not source.name.startswith(".") and source.name not in _NOT_COPIED:
            shutil.copyfile(source, folder / source.name)
    if request.to == "transformers":
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(_main_dtype(named, _dtype(request)))[6:]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [*weights.notes, f"{len(named)} tensors, {total:,} bytes; config.json as in {base}"]


def _main_dtype(named: dict[str, Stored], dtype: torch.dtype | None) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for tensor in named.values():
        kind = DTYPE_OF[_exported(tensor, dtype)]
        if kind.is_floating_point:
            sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
    return max(sizes, key=lambda kind: sizes[kind], default=torch.float32)


def _base(checkpoint: Checkpoint, request: Request) -> Path:
    """The folder with config.json (or model_index.json): the one given, or what lies beside the checkpoint, or what it was
    trained from."""
    if request.base is not None:
        if not any((request.base / name).is_file() for name in ("config.json", "model_index.json")):
            raise UsageError(f"--base {request.base} has neither config.json nor model_index.json: give the pretrained model's folder")
        return request.base
    output = Path(checkpoint.storage.describe())
    for folder in (output / checkpoint.folder, output, output / "transformer", output / "unet"):
        if (folder / "config.json").is_file():
            return folder
    for folder in checkpoint.base_files.folders_of(join("model", request.model)):
        if (folder / "config.json").is_file():
            return folder
    raise UsageError(
        f"an export to {request.to} needs the model's config.json, and none lies beside {checkpoint.where} or where the model was loaded "
        "from: give the folder of the pretrained model with --base FOLDER"
    )


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the base's own weights, where there are some in safetensors files."""
    if not any(".safetensors" in path.name for path in folder.iterdir()):
        return {}
    variants = [None, *sorted({p.name.split(".")[1] for p in folder.glob("*.*.safetensors")})]
    for variant in variants:
        try:
            return {name: tensor.entry.shape for name, tensor in stored_tensors(LocalFolder(folder, follow_links=True), variant).items()}
        except CheckpointError:
            continue
    return {}


def _as_stored_there(checkpoint: Checkpoint, weights: Weights, base: Path, config: dict[str, Any]) -> dict[str, Stored]:
    """The tensors under the names that the library stores them under.

    Of a tied tensor that is the name in the base's own files; where there are none, the first, and a copy under each other
    name unless the config says that the library ties them itself.

    Raises:
        IncompatibleCheckpoint: a shape is another one than in the base, so that the config would not fit.
    """
    there = _stored_shapes(base)
    if there and not there.keys() & weights.names.keys():
        raise IncompatibleCheckpoint(
            f"the weights of {base} are named otherwise than those of {checkpoint.where} ({weights.shown}): give the folder of the "
            "model that was trained, with --base, or the model's key, with --model"
        )
    named: dict[str, Stored] = {}
    for name, names in weights.tied.items():
        known = [n for n in names if n in there]
        copies = [] if there or config.get("tie_word_embeddings", True) else names
        for n in known or [name, *copies]:
            named[n] = weights.tensors[name]
    for name, tensor in named.items():
        if name in there and there[name] != tensor.shape:
            raise IncompatibleCheckpoint(
                f"{name} has shape {list(tensor.shape)} in {checkpoint.where} and {list(there[name])} in {base}, whose config.json would "
                "not fit: give a base with the trained shape (resize and save it first)"
            )
    return named


def _export_peft(checkpoint: Checkpoint, request: Request) -> list[str]:
    from holdfast.engine.export_lora import export_peft

    return export_peft(checkpoint, request, choose_weights(checkpoint, request.model, request.ema), _dtype(request))


def _export_dcp(checkpoint: Checkpoint, request: Request) -> list[str]:
    from holdfast.engine.export_dcp import export_dcp

    return export_dcp(checkpoint, request.output_dir)


def _export_accelerate(checkpoint: Checkpoint, request: Request) -> list[str]:
    from holdfast.engine.export_accelerate import export_accelerate

    return export_accelerate(checkpoint, request.output_dir, sharded=request.to == "accelerate-fsdp")


def optimizer_tensors(checkpoint: Checkpoint, key: str) -> Iterator[tuple[str, str, Stored]]:
    """(parameter, state key, tensor) of one optimizer's state."""
    for name, spec in sorted(checkpoint.tensors.items()):
        if spec.slot is not None and spec.slot.optimizer == key and checkpoint.exists(name):
            yield spec.slot.param, spec.slot.key, stored(checkpoint, name)
