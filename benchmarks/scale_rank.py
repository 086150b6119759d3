"""One rank of a job of thousands, simulated: its state on the meta device, its plan, its file with a header and holes for data.

A process group of torch's "fake" backend says which rank of how many this is. Under FSDP2 every parameter is a DTensor whose local
tensor is as long as `fully_shard` makes it; FSDP1 is torch's own wrapper. The state has shapes and no bytes; everything that the
engine makes of it (layout, header, receipt, manifest, plan of a resume) is made by the engine, and is what a run would have.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Shard

from holdfast.core.boxes import chunk
from holdfast.core.documents import canonical, digest
from holdfast.core.flat import Flat
from holdfast.core.layout import BaseFile, Named
from holdfast.core.manifest import BLOCK, BaseNote, Receipt, attempt_name, layout_file, rank_file
from holdfast.core.safetensors import build_header
from holdfast.engine import rng
from holdfast.engine.base import Bases, Origin, leave_origin
from holdfast.engine.collect import Collected, Held, Registered, collect
from holdfast.engine.plan import SavePlan, make_plan
from holdfast.engine.shard import _layers, trained_units
from holdfast.storage import LocalFolder

ATTEMPT = attempt_name("5ca1e5ca1e5ca1e5", 1)
FOLDER = "checkpoint-500"
LORA_RANK = 16

# FSDP1 asks for the module of its device; none is asked for anything but this here.
torch.meta = types.SimpleNamespace(current_device=lambda: torch.device("meta"), is_available=lambda: True)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Case:
    """What is trained: `model` is flux (12B) or llama (70B), `version` of FSDP, adapters only or everything."""

    model: str
    version: int
    lora: bool

    def __str__(self) -> str:
        return f"{self.model} FSDP{self.version} {'LoRA' if self.lora else 'full'}"


def bare_model(case: Case) -> nn.Module:
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    with torch.device("meta"):
        if case.model == "flux":
            from diffusers import FluxTransformer2DModel

            model: nn.Module = FluxTransformer2DModel(guidance_embeds=True)  # its defaults are Flux's shapes
            targets = ["to_q", "to_k", "to_v", "to_out.0"]
        else:
            from transformers import LlamaConfig, LlamaForCausalLM

            model = LlamaForCausalLM(
                LlamaConfig(hidden_size=8192, num_hidden_layers=80, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
                            vocab_size=128256)
            )  # fmt: skip
            targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        if case.lora:
            model.requires_grad_(False).to(torch.bfloat16)
            inject_adapter_in_model(LoraConfig(r=LORA_RANK, target_modules=targets), model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
    return model


def cut(model: nn.Module, version: int, rank: int, world_size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world_size,))
    if version == 1:
        layers = list(_layers(model, None))
        units = {id(layer) for layer in layers} | trained_units(model, layers)
        return FullyShardedDataParallel(
            model, auto_wrap_policy=CustomPolicy(lambda module: id(module) in units), device_mesh=mesh, device_id=torch.device("meta"),
            param_init_fn=lambda module: None, use_orig_params=True,
        )  # fmt: skip
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                local = torch.empty(
                    (chunk(p.shape[0], world_size, rank)[1], *p.shape[1:]), device="meta", dtype=p.dtype
                )
                whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
                module._parameters[name] = nn.Parameter(whole, p.requires_grad)
    return model


class KnownBases(Bases):
    """Bases whose digest and fingerprints are taken for known: their weights, which nobody has, are unchanged."""

    def named(self, origin: Origin) -> Named:
        return Named(BaseFile(origin.file, origin.size, f"{0:064x}"), origin.name)

    def unchanged(self, origin: Origin, held: Held) -> bool:
        return True

    def settle(self, collected: Collected) -> None:
        for name in set(collected.origins) & set(collected.tensors):
            collected.named[name] = collected.tensors.pop(name)


def claim_base(model: nn.Module, folder: Path) -> None:
    """Every frozen parameter was read from one safetensors file, which has its header and no bytes."""
    frozen = [
        (n, m, a, p)
        for n, m in model.named_modules()
        for a, p in m._parameters.items()
        if p is not None and not p.requires_grad
    ]
    folder.mkdir(parents=True, exist_ok=True)
    header, entries = build_header([(f"{n}.{a}", "BF16", tuple(p.shape)) for n, _, a, p in frozen], {"format": "pt"})
    size = max(e.stop for e in entries.values())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(size)
    for n, module, attribute, _ in frozen:
        leave_origin(
            module,
            attribute,
            Origin(LocalFolder(folder), "model.safetensors", size, f"{n}.{attribute}", entries[f"{n}.{attribute}"]),
        )


@contextlib.contextmanager
def simulated_rank(case: Case, rank: int, world_size: int, base: Path) -> Iterator[Registered]:
    """What a Checkpointer on that rank would be given, after a step of AdamW."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        model = bare_model(case)
        if case.lora:
            claim_base(model, base)
        model = cut(model, case.version, rank, world_size)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        for p in trained:
            if case.version == 2 or p.numel():  # FSDP1: a rank that holds nothing of a parameter has no state of it
                moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                optimizer.state[p] = {"step": torch.tensor(1.0), **moments}
        registered = Registered({"": model}, {"": optimizer}, {}, rank, world_size)
        registered.bases = KnownBases(rank)
        registered.bases.notes = (BaseNote("model", str(base)),) if case.lora else ()
        yield registered
    finally:
        dist.destroy_process_group()


def collected_for_save(registered: Registered) -> tuple[Collected, bytes]:
    """As `Saver` does it."""
    collected = collect(registered)
    small = canonical({"state": collected.small, "rng": rng.capture(), "step": 500, "rank": registered.rank})
    registered.bases.settle(collected)
    return collected, small


def of_another_rank(collected: Collected, rank: int) -> Collected:
    """What another rank of that job collects: the same tensors, each as long as its placement says (`scale.py` proves it by real ones)."""
    specs = {name: held.spec for name, held in (collected.tensors | collected.named).items()} | collected.elsewhere
    other = replace(collected, tensors={}, named={}, elsewhere={}, structure=None)
    for name, spec in sorted(
        specs.items(), key=lambda item: item[1].placement is None
    ):  # step counters last: where moments are
        if spec.placement is None or spec.shape is None:
            assert spec.slot is not None
            if f"optimizer.{spec.slot.param}.exp_avg" in other.tensors:
                other.tensors[name] = Held(spec, torch.tensor(1.0))
            else:
                other.elsewhere[name] = spec
            continue
        coordinate = spec.placement.mesh.coordinate(rank)
        assert coordinate is not None
        if isinstance(spec.placement, Flat):
            start, stop = spec.placement.written(prod(spec.shape), coordinate)
            size: tuple[int, ...] = (stop - start,)
            if start == stop:
                other.elsewhere[name] = spec
                continue
        else:
            size = spec.placement.box(spec.shape, coordinate).size
        into = other.named if name in collected.origins else other.tensors
        into[name] = Held(spec, torch.empty(size, device="meta"))
    if not any(held.spec.slot for held in other.tensors.values()):  # it has no state to tell others' from
        other.elsewhere = {name: spec for name, spec in other.elsewhere.items() if spec.slot is None}
    return other


@dataclass
class Files:
    """The files of one checkpoint, written as far as they are read: header and small state are there, tensors are holes."""

    storage: LocalFolder
    world_size: int
    hole: str = field(default=digest(bytes(BLOCK)))

    def receipt(self, rank: int, plan: SavePlan, small: bytes | None) -> Receipt:
        """A rank's receipt; with its small state, its file is written, too."""
        size, blocks = plan.image_size, -(-plan.image_size // BLOCK)
        hashes = [self.hole] * blocks
        tail = size - (blocks - 1) * BLOCK
        hashes[-1] = digest(bytes(tail))
        if small is not None:
            path = self.storage.root / FOLDER / rank_file(rank, ATTEMPT)
            begin = plan.state_entry.start
            with path.open("wb") as file:
                file.write(plan.header)
                file.seek(begin)
                file.write(small.ljust(size - begin))
            for index in {*range(-(-len(plan.header) // BLOCK)), *range(begin // BLOCK, blocks)}:
                with path.open("rb") as file:
                    file.seek(index * BLOCK)
                    hashes[index] = digest(file.read(BLOCK))
        return Receipt(
            attempt=ATTEMPT, run_sequence=1, save_index=1, step=500, rank=rank, world_size=self.world_size, layout=plan.layout.digest,
            size=size, block_size=BLOCK, blocks=tuple(hashes), plain=digest(b""), host="node-0000", captured_s=0.1, written_s=1.0,
            groups=digest(b"groups"), bases=plan.bases.notes,
        )  # fmt: skip

    def put_layout(self, plan: SavePlan) -> None:
        (self.storage.root / FOLDER / layout_file(plan.layout.digest)).write_bytes(plan.layout.encoded)


def plan_of(
    registered: Registered, collected: Collected, small: bytes, last: SavePlan | None = None, rank: int | None = None
) -> SavePlan:
    """The plan of this rank, or of another one for what `of_another_rank` says that it collects."""
    return make_plan(
        collected, registered.bases, registered.rank if rank is None else rank, registered.world_size, len(small), last
    )


def first_without_state(collected: Collected, world_size: int) -> int:
    """The first of the last ranks, which hold nothing of any trained flat unit: the world size where there are none."""
    return bisect.bisect_left(
        range(world_size), True, key=lambda rank: not any(h.spec.slot for h in of_another_rank(collected, rank).tensors.values())
    )


def readers_sources(registered: Registered, checkpoint: Any) -> set[int]:
    """The ranks whose files a resuming rank will open, by the engine's own arithmetic."""
    from holdfast.engine.names import named_state
    from holdfast.engine.reading import Restore

    plan = Restore(checkpoint, registered, {}, checkpoint.manifest.world_size == registered.world_size)
    found = {registered.rank if plan.same_world else 0, registered.rank}
    for name, tensor in named_state(registered.models).tensors.items():
        boxes = [box for box, _ in plan.targets(name, tensor) if box.numel]
        spec = plan.spec(name)
        ranks = {r for box in boxes for r in checkpoint.writers(spec, box)}
        found |= ranks or {next(iter(checkpoint.writers(spec)))}
    return found
