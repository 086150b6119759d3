"""accelerate out: a folder that `accelerator.load_state` reads.

    one process, or DDP                                       FSDP, SHARDED_STATE_DICT
    model.safetensors                                         pytorch_model_fsdp_0/     (DCP)
    optimizer.bin           state by position                 optimizer_0/              (DCP)
    scheduler.bin, scaler.pt, random_states_0.pkl … of every rank, custom_checkpoint_0.pkl …

What accelerate keeps as pickles is written by `torch.save`, and holds tensors, numbers, containers and NumPy's generator.

Memory: bounded as in `engine.export`; the tensors of `optimizer.bin` pass through a file that is mapped while torch writes it, so that
pages of that file as large as the largest tensor are resident for a moment. They are clean: the system can take them back.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, BinaryIO

import torch

from holdfast.core.documents import Json
from holdfast.core.safetensors import build_header
from holdfast.engine import rng
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.engine.export_dcp import model_tensors, optimizer_state, small_value, write_dcp
from holdfast.engine.export_trainer import TRAINER_STATE, write_trainer_files
from holdfast.engine.extract import Stored, stream
from holdfast.engine.names import join
from holdfast.errors import UsageError
from holdfast.formats.safetensors_out import Described, cut_into_files, write_file
from holdfast.storage import LocalFolder

_PIECE = 8 << 20
"""Bytes after which mapped pages are given back."""


def export_accelerate(checkpoint: Checkpoint, folder: Path, sharded: bool) -> list[str]:
    """Write everything of a checkpoint that accelerate knows; returns lines that say what was not written."""
    state = checkpoint.small(checkpoint.first)["state"]
    models = _keys(checkpoint, state)
    optimizers = sorted((key.partition(".")[2] for key in state if key.partition(".")[0] == "optimizer"), key=_number)
    for i, key in enumerate(models):
        prefix = join("model", key)
        tensors = model_tensors(checkpoint, prefix)
        if sharded:
            write_dcp(checkpoint, folder / f"pytorch_model_fsdp_{i}", {("model", *path): t for path, t in tensors.items()}, {})
        else:
            _write_model(checkpoint, folder / _numbered("model", i, ".safetensors"), prefix, tensors)
    for i, key in enumerate(optimizers):
        named, values = optimizer_state(checkpoint, key)
        if sharded:
            paths = {("optimizer", *path): t for path, t in named.items()}
            write_dcp(checkpoint, folder / f"optimizer_{i}", paths, {("optimizer", *path): v for path, v in values.items()})
        else:
            _write_optimizer(checkpoint, folder / _numbered("optimizer", i, ".bin"), named, values)
    lines = _write_small(checkpoint, folder, state)
    for rank in range(checkpoint.manifest.world_size):
        _write_generators(checkpoint.small(rank)["rng"], folder / f"random_states_{rank}.pkl")
    return lines + write_trainer_files(checkpoint, folder)


def _keys(checkpoint: Checkpoint, state: dict[str, Json]) -> list[str]:
    """The models' keys: of several they are the numbers of a list, or accelerate could not tell which is which."""
    optimizers = [key for key in state if key.partition(".")[0] == "optimizer"]
    heads = {name.split(".")[1] for name in checkpoint.tensors if name.startswith("model.")}
    if len(optimizers) > 1 and heads and all(head.isdecimal() for head in heads) and len(heads) == len(optimizers):
        return sorted(heads, key=int)
    if len(optimizers) > 1:
        raise UsageError(f"{checkpoint.where} has several optimizers and models that are not a list: accelerate numbers them")
    return [""]


def _number(key: str) -> int:
    return int(key) if key.isdecimal() else 0


def _numbered(stem: str, index: int, suffix: str) -> str:
    return f"{stem}{f'_{index}' if index else ''}{suffix}"


def _write_model(checkpoint: Checkpoint, path: Path, prefix: str, tensors: dict[Any, Stored]) -> None:
    """One safetensors file, which is all that accelerate reads; one name for each tied tensor."""
    named = {name: tensor for (name,), tensor in tensors.items() if tensor.name == join(prefix, name)}
    described: list[Described] = [(name, t.dtype, t.shape) for name, t in named.items()]
    ((_, ordered),) = cut_into_files(described, "model", 1 << 62)
    data = (piece for _, _, piece in stream(checkpoint, [named[name] for name, _, _ in ordered]))
    write_file(LocalFolder(path.parent), path.name, ordered, data)


def _write_optimizer(checkpoint: Checkpoint, path: Path, named: dict[Any, Stored], values: dict[Any, object]) -> None:
    """torch's own form: positions in place of names, counted through the groups."""
    groups: dict[int, dict[str, Any]] = {}
    for (kind, index, *rest), value in values.items():
        if kind == "param_groups":
            groups.setdefault(index, {})[rest[0]] = value
    ordered = [groups[i] for i in sorted(groups)]
    position: dict[str, int] = {}
    for group in ordered:
        for name in group["params"]:
            position[name] = len(position)
        group["params"] = [position[name] for name in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for (kind, name, *rest), value in values.items():
        if kind == "state":
            state.setdefault(position[name], {})[rest[0]] = value
    scratch = path.with_suffix(".tmp")
    try:
        memory, tensors = _mapped(checkpoint, scratch, named)
        for (_, name, key), tensor in tensors.items():
            state.setdefault(position[name], {})[key] = tensor
        with path.open("wb") as file:
            torch.save({"state": dict(sorted(state.items())), "param_groups": ordered}, _LettingGo(file, memory))  # type: ignore[arg-type]
    finally:
        scratch.unlink(missing_ok=True)


class _LettingGo:
    """A file for `torch.save` that gives mapped pages back once they are written: they would stay until the memory is short."""

    def __init__(self, file: BinaryIO, memory: mmap.mmap) -> None:
        self._file, self._memory, self._since = file, memory, 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            self._since += self._file.write(view[start : start + _PIECE])
            if self._since >= _PIECE and hasattr(mmap, "MADV_DONTNEED"):
                self._memory.madvise(mmap.MADV_DONTNEED)
                self._since = 0
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def _mapped(checkpoint: Checkpoint, scratch: Path, named: dict[Any, Stored]) -> tuple[mmap.mmap, dict[Any, torch.Tensor]]:
    """All tensors, written to a file and mapped from there; and the mapping."""
    names = {str(number): path for number, path in enumerate(named)}
    described: list[Described] = [(number, named[path].dtype, named[path].shape) for number, path in names.items()]
    ((_, ordered),) = cut_into_files(described, "all", 1 << 62)
    data = (piece for _, _, piece in stream(checkpoint, [named[names[number]] for number, _, _ in ordered]))
    write_file(LocalFolder(scratch.parent), scratch.name, ordered, data)
    _, entries = build_header(ordered, {"format": "pt"})
    with open(scratch, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = {}
    for number, entry in entries.items():
        dtype = DTYPE_OF[entry.dtype]
        if entry.nbytes:
            flat = torch.frombuffer(memory, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=entry.start)
        else:
            flat = torch.empty(0, dtype=dtype)
        found[names[number]] = flat.view(entry.shape)
    return memory, found


def _write_small(checkpoint: Checkpoint, folder: Path, state: dict[str, Json]) -> list[str]:
    """Schedulers, scaler, loaders with a state, and what came from `register_for_checkpointing` in an import."""
    left = []
    for kind, stem in (("lr_scheduler", "scheduler"), ("dataloader", "dl_state_dict")):
        for i, key in enumerate(sorted((k for k in state if k.partition(".")[0] == kind), key=lambda k: _number(k.partition(".")[2]))):
            torch.save(small_value(checkpoint, key), folder / _numbered(stem, i, ".bin"))
    if "scaler" in state:
        torch.save(small_value(checkpoint, "scaler"), folder / "scaler.pt")
    for key in state:
        name = key.removeprefix("extra.")
        if key.startswith("extra.custom_checkpoint_"):
            torch.save(small_value(checkpoint, key), folder / f"{name}.pkl")
        elif key.startswith("extra.") and key != TRAINER_STATE:
            left.append(f"not written: {key}, which accelerate has no place for")
    return left


def _write_generators(document: Json, path: Path) -> None:
    state = rng.parse(document, "rng")
    states: dict[str, Any] = {"step": 0, "random_state": state.python, "torch_manual_seed": state.cpu}
    if state.numpy is not None:
        states["numpy_random_seed"] = state.numpy
    if state.device is not None and torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = [state.device] * torch.cuda.device_count()
    torch.save(states, path)
