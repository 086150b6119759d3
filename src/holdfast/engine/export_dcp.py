"""DCP out: a folder that `torch.distributed.checkpoint.load` and `dcp_to_torch_save` read, nested as torch's state dicts are.

    {"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}, "param_groups": [{"params": [names], …}]}, …}

torch's own writer writes the folder; a planner of ours describes the tensors in advance and reads each piece when the writer
asks for it, so that one piece is in memory at a time.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.core.boxes import Box
from holdfast.core.layout import item_size
from holdfast.engine import statetree
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.engine.extract import Stored, cuts, read_whole, stored, stream
from holdfast.engine.names import join

KeyPath = tuple[str | int, ...]
Tensors = dict[KeyPath, Stored]
Values = dict[KeyPath, object]


def export_dcp(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """The model (or models), optimizers, schedulers and the step of a checkpoint as one DCP folder."""
    tensors: Tensors = {}
    values: Values = {("step",): checkpoint.manifest.step}
    for path, tensor in model_tensors(checkpoint, "model").items():
        tensors["model", *path] = tensor
    for key in checkpoint.small(checkpoint.first)["state"]:
        kind, _, index = key.partition(".")
        root: KeyPath = (kind, index) if index else (kind,)
        if kind == "optimizer":
            of_optimizer, groups = optimizer_state(checkpoint, index)
            tensors |= {(*root, *path): tensor for path, tensor in of_optimizer.items()}
            values |= {(*root, *path): value for path, value in groups.items()}
        elif kind in ("lr_scheduler", "scaler"):
            values[root] = small_value(checkpoint, key)
    write_dcp(checkpoint, folder, tensors, values)
    return [f"{len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()):,} bytes"]


def model_tensors(checkpoint: Checkpoint, prefix: str) -> Tensors:
    """The tensors below `prefix` by name, a copy under each further name of a tied one, as a state dict has them."""
    start = prefix + "."
    names = {name: name for name in checkpoint.tensors} | dict(checkpoint.aliases)
    return {(n.removeprefix(start),): stored(checkpoint, source) for n, source in sorted(names.items()) if n.startswith(start)}


def optimizer_state(checkpoint: Checkpoint, key: str) -> tuple[Tensors, Values]:
    """An optimizer as torch's `get_optimizer_state_dict` gives it: named by parameter."""
    from holdfast.engine.export import optimizer_tensors

    document = checkpoint.small(checkpoint.first)["state"][join("optimizer", key)]
    tensors: Tensors = {
        ("state", name.removeprefix("model."), state_key): tensor for name, state_key, tensor in optimizer_tensors(checkpoint, key)
    }
    values: Values = {}
    resolve = _resolver(checkpoint)
    for name, encoded in document["values"].items():
        decoded = statetree.decode(encoded, name, resolve)
        assert isinstance(decoded, dict)
        values |= {("state", name.removeprefix("model."), k): v for k, v in decoded.items()}
    for i, group in enumerate(document["groups"]):
        decoded = statetree.decode(group["values"], f"param_groups[{i}]", resolve)
        assert isinstance(decoded, dict)
        values["param_groups", i, "params"] = [name.removeprefix("model.") for name in group["params"]]
        values |= {("param_groups", i, k): v for k, v in decoded.items()}
    return tensors, values


def small_value(checkpoint: Checkpoint, key: str) -> object:
    """The state of one registered object."""
    return statetree.decode(checkpoint.small(checkpoint.first)["state"][key], key, _resolver(checkpoint))


def _resolver(checkpoint: Checkpoint) -> Any:
    return lambda name: read_whole(checkpoint, name)


def write_dcp(checkpoint: Checkpoint, folder: Path, tensors: Tensors, values: Values) -> None:
    """Write one DCP folder of these tensors and values."""
    # Threads of the writer would ask for pieces out of order, and reading ahead would keep several.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group: there is none to be had offline
        save({}, storage_writer=writer, planner=_Planner(checkpoint, tensors, values), no_dist=True)


class _Planner(DefaultSavePlanner):
    """Plans pieces of tensors that lie in a checkpoint, and reads each when it is written."""

    def __init__(self, checkpoint: Checkpoint, tensors: Tensors, values: Values) -> None:
        super().__init__()
        self._tensors = {".".join(map(str, path)): tensor for path, tensor in tensors.items()}
        self._values = {".".join(map(str, path)): value for path, value in values.items()}
        self._paths = {".".join(map(str, path)): path for path in (*tensors, *values)}
        self._pieces: Iterator[tuple[Stored, Box, torch.Tensor]] = stream(checkpoint, self._tensors.values())

    def set_up_planner(self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._values]
        for key, tensor in self._tensors.items():
            for number, box in enumerate(cuts(tensor.shape, item_size(tensor.dtype))):
                chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
                data = TensorWriteData(chunk, TensorProperties(DTYPE_OF[tensor.dtype]), torch.Size(tensor.shape))
                items.append(WriteItem(MetadataIndex(key, box.offset, number), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return all_plans  # one process, no copies; and deduplicating would keep no order

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self._values[write_item.index.fqn], data)
            return data
        # The writer holds on to the last piece of every tensor without looking at it again: they all are the same memory.
        tensor, box, piece = next(self._pieces)
        assert tensor is self._tensors[write_item.index.fqn]
        assert torch.Size(box.offset) == write_item.index.offset
        return piece

