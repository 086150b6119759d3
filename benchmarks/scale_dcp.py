"""What torch.distributed.checkpoint plans for the same tensors: one rank's local plan, and what rank 0 does with all of them.

Rank 0's work is linear in the tensors for a given number of ranks (shown by twice as many), so it is measured with a few tensors of the
model for thousands of ranks, and carried on to all of them.
"""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from holdfast.core.boxes import chunk


def local_plan(tensors: Mapping[str, torch.Tensor]) -> tuple[SavePlan, float, int]:
    """A rank's plan for what it holds, the seconds for it, and the bytes that it sends to rank 0."""
    begun = time.perf_counter()
    plan = create_default_local_save_plan(dict(tensors), is_coordinator=False)
    return plan, time.perf_counter() - begun, len(pickle.dumps(plan))


def plan_of_rank(shapes: Mapping[str, torch.Size], rank: int, world_size: int) -> SavePlan:
    """The local plan of any rank for tensors that are cut along their first dimension, as `create_default_local_save_plan` makes it."""
    items = []
    for name, shape in shapes.items():
        start, length = chunk(shape[0], world_size, rank)
        if length == 0:
            start = shape[0]
        zeros = [0] * (len(shape) - 1)
        written = ChunkStorageMetadata(offsets=torch.Size([start, *zeros]), sizes=torch.Size([length, *shape[1:]]))
        data = TensorWriteData(chunk=written, properties=TensorProperties(dtype=torch.float32), size=shape)
        items.append(WriteItem(MetadataIndex(name, written.offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def rank_0(shapes: Mapping[str, torch.Size], world_size: int) -> dict[str, float]:
    """Seconds of each part of rank 0's work for so many ranks, and the bytes of the metadata that it pickles."""
    sent = [pickle.dumps(plan_of_rank(shapes, rank, world_size)) for rank in range(world_size)]
    done: dict[str, float] = {}

    def lap(what: str, begun: float) -> float:
        done[what] = time.perf_counter() - begun
        return time.perf_counter()

    at = time.perf_counter()
    plans = [pickle.loads(plan) for plan in sent]
    at = lap("unpickle", at)
    plans, metadata = create_default_global_save_plan(plans)
    at = lap("plan", at)
    _validate_global_plan(plans, metadata)
    at = lap("validate", at)
    for plan in plans:
        pickle.dumps(plan)
    at = lap("pickle plans", at)
    size = len(pickle.dumps(metadata))
    lap("pickle metadata", at)
    return done | {"metadata_bytes": size, "received_bytes": sum(map(len, sent))}


def planning(shapes: Mapping[str, torch.Size], world_size: int, tensors: int, some: int) -> dict[str, Any]:
    """Rank 0's work with `some` of the model's largest tensors, and what that means for `tensors` of them."""
    chosen = dict(sorted(shapes.items(), key=lambda item: -item[1].numel())[: 2 * some])
    half = rank_0(dict(list(chosen.items())[::2]), world_size)
    whole = rank_0(chosen, world_size)
    seconds = {k: v for k, v in whole.items() if not k.endswith("bytes")}
    # Linear in the tensors, with what does not depend on them: from the two readings.
    slope = max(0.0, sum(whole[k] - half[k] for k in seconds) / some)
    fixed = max(0.0, sum(seconds.values()) - slope * 2 * some)
    return {
        "ranks": world_size,
        "measured_tensors": 2 * some,
        "measured_s": sum(seconds.values()),
        "measured_half_s": sum(half[k] for k in seconds),
        "parts_s": {k: v * tensors / (2 * some) for k, v in seconds.items()},
        "tensors": tensors,
        "carried_on_s": fixed + slope * tensors if slope else sum(seconds.values()) * tensors / (2 * some),
        "metadata_bytes": whole["metadata_bytes"] * tensors / (2 * some),
        "received_bytes": whole["received_bytes"] * tensors / (2 * some),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
