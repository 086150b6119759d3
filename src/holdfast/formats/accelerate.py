"""Folders of `accelerator.save_state` and of the transformers Trainer, which adds a few files and other names.

                    plain, DDP                  FSDP, FULL                FSDP, SHARDED (DCP)     FSDP, one file per rank
    model           model.safetensors or        pytorch_model_fsdp.bin    pytorch_model_fsdp_0/   pytorch_model_fsdp_0_rank0.bin
                    pytorch_model.bin
    optimizer       optimizer.bin (Trainer:     optimizer.bin             optimizer_0/            optimizer_0_rank0.bin
                    optimizer.pt), no names
    generators      random_states_0.pkl … of every rank (Trainer: rng_state_0.pth, or rng_state.pth of a single one)
    others          scheduler.bin, scaler.pt, sampler.bin, dl_state_dict.bin, custom_checkpoint_0.pkl; trainer_state.json

A second model or optimizer has its number in its names. Pickles are read under `formats.pickles`' rules: what holds more
than data is left out and named, unless the checkpoint is nothing without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.errors import CheckpointNotFound, CorruptCheckpoint, IncompatibleCheckpoint
from holdfast.formats.dcp import METADATA, DcpFolder
from holdfast.formats.dcp_state import model_of, optimizer_of
from holdfast.formats.foreign import (
    Foreign,
    ForeignModel,
    ForeignOptimizer,
    key_of,
    of_optimizer_state,
    of_state_dict,
    step_of,
)
from holdfast.formats.peft import ADAPTER_FILES, adapter_of
from holdfast.formats.per_rank import merge_model, merge_optimizer
from holdfast.formats.pickles import load_pickle
from holdfast.formats.weights import weights_of_file, weights_of_folder


def read_accelerate(folder: Path, kind: str, base: Path | None = None, alone: bool = False) -> Foreign:
    """Everything in the folder; tensors are read when they are asked for.

    Args:
        base: the pretrained model that the adapter in a Trainer's PEFT checkpoint was trained on.
        alone: give such an adapter without it.

    Raises:
        CheckpointNotFound: there is no model in it.
        CorruptCheckpoint, IncompatibleCheckpoint: model or optimizer cannot be read; the message names the file.
    """
    foreign = Foreign(kind, folder)
    foreign.rng = [_generators(path, rank) for rank, path in enumerate(_rng_files(folder))]
    foreign.models = list(_models(folder, base, alone))
    if not foreign.models:
        raise CheckpointNotFound(
            f"{folder} holds no model that is read: neither model.safetensors, pytorch_model.bin, pytorch_model_fsdp.bin nor "
            "pytorch_model_fsdp_0/. DeepSpeed and Megatron folders are converted with their own tools first"
        )
    foreign.optimizers = list(_optimizers(folder))
    if not foreign.optimizers:
        foreign.left_out.append("no optimizer state is in the folder: the optimizer begins anew")
    schedulers = list(_numbered(folder, "scheduler", (".bin", ".pt")))
    for i, path in enumerate(schedulers):
        _take(foreign, key_of("lr_scheduler", i, len(schedulers)), path)
    if (folder / "scaler.pt").is_file():
        _take(foreign, "scaler", folder / "scaler.pt")
    loaders = list(_numbered(folder, "dl_state_dict", (".bin",)))
    for i, path in enumerate(loaders):
        _take(foreign, key_of("dataloader", i, len(loaders)), path)
    for path in sorted(folder.glob("sampler*.bin")):
        _take(foreign, f"extra.{path.stem}", path)
    for path in sorted(folder.glob("custom_checkpoint_*.pkl")):
        _take(foreign, f"extra.{path.stem}", path)
    foreign.step = _step(foreign)
    if (folder / "training_args.bin").is_file():
        foreign.left_out.append("training_args.bin: a pickle of the Trainer's own class, and not state")
    return foreign


def _take(foreign: Foreign, key: str, path: Path) -> None:
    try:
        foreign.stateful[key] = load_pickle(path)
    except (CorruptCheckpoint, IncompatibleCheckpoint) as error:
        foreign.left_out.append(str(error.args[0]))


def _numbered(folder: Path, stem: str, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """`stem.bin`, `stem_1.bin`, … as long as they are there."""
    for i in range(1 << 20):
        number = f"_{i}" if i else ""
        found = [path for suffix in suffixes if (path := folder / f"{stem}{number}{suffix}").is_file()]
        if not found:
            return
        yield found[0]


def _models(folder: Path, base: Path | None, alone: bool) -> Iterator[ForeignModel]:
    for i in range(1 << 20):
        number = f"_{i}" if i else ""
        sharded = folder / f"pytorch_model_fsdp_{i}"
        if (sharded / METADATA).is_file():
            yield model_of(DcpFolder(sharded), ("model",))
        elif (full := folder / f"pytorch_model_fsdp{number}.bin").is_file():
            yield of_state_dict(load_pickle(full))
        elif files := _rank_files(folder, f"pytorch_model_fsdp_{i}") or _rank_files(folder, f"pytorch_model_fsdp{number}"):
            yield merge_model(files)
        elif i == 0 and (adapter := next((f for n in ADAPTER_FILES if (f := folder / n).is_file()), None)) is not None:
            yield adapter_of(adapter, base, alone)
        elif i == 0 and any(folder.glob("*model*.index.json")):
            yield weights_of_folder(folder)
        else:
            names = [f"model{number}.safetensors", f"pytorch_model{number}.bin"]
            found = [path for name in names if (path := folder / name).is_file()]
            if not found:
                return
            yield weights_of_file(found[0])


def _optimizers(folder: Path) -> Iterator[ForeignOptimizer]:
    for i in range(1 << 20):
        number = f"_{i}" if i else ""
        if (folder / f"optimizer_{i}" / METADATA).is_file():
            yield optimizer_of(DcpFolder(folder / f"optimizer_{i}"), ("optimizer",))
        elif files := _rank_files(folder, f"optimizer_{i}"):
            yield merge_optimizer(files)
        else:
            found = [path for suffix in (".bin", ".pt") if (path := folder / f"optimizer{number}{suffix}").is_file()]
            if not found:
                return
            yield of_optimizer_state(load_pickle(found[0]))


def _rank_files(folder: Path, stem: str) -> list[Path]:
    """The files of all ranks in their order, or none.

    Raises:
        CorruptCheckpoint: one is missing.
    """
    found = {int(path.stem.rpartition("_rank")[2]): path for path in folder.glob(f"{stem}_rank*.bin")}
    if sorted(found) != list(range(len(found))):
        raise CorruptCheckpoint(f"{folder}: of {stem}_rank*.bin only those of ranks {sorted(found)} are there")
    return [found[rank] for rank in range(len(found))]


def _rng_files(folder: Path) -> list[Path]:
    for pattern in (r"random_states_(\d+)\.pkl", r"rng_state_(\d+)\.pth"):
        found = {int(m[1]): path for path in folder.iterdir() if (m := re.fullmatch(pattern, path.name))}
        if found:
            # Of a folder that is not shared by all hosts only some are there: those after the first gap begin anew.
            return [found[rank] for rank in range(len(found)) if all(r in found for r in range(rank))]
    single = folder / "rng_state.pth"
    return [single] if single.is_file() else []


def _generators(path: Path, rank: int) -> dict[str, Any]:
    state = load_pickle(path)
    found = {"python": state.get("random_state", state.get("python"))}
    found["numpy"] = state.get("numpy_random_seed", state.get("numpy"))
    found["torch"] = state.get("torch_manual_seed", state.get("cpu"))
    device = next((v for k, v in state.items() if _is_device_state(k)), None)
    if isinstance(device, list | tuple):  # of all devices that the process saw; a rank uses the one of its local number
        device = device[rank % len(device)] if device else None
    found["device"] = device
    return {kind: value for kind, value in found.items() if value is not None}


_is_device_state: Callable[[str], Any] = re.compile(
    r"torch_(cuda|xpu|mlu|musa|sdaa|hpu|neuron)_manual_seed|cuda|npu|hpu|mlu|musa|xpu"
).fullmatch


def _step(foreign: Foreign) -> int | None:
    """Optimizer steps done: the Trainer's count, else the folder's name, else the optimizer's own counter."""
    state = foreign.folder / "trainer_state.json"
    if state.is_file():
        try:
            document = json.loads(state.read_text(encoding="utf-8"))
            foreign.stateful["extra.trainer_state"] = document
            return int(document["global_step"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(f"{state} has no global_step: {error}") from error
    return step_of(foreign)
