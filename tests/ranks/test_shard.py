"""holdfast.shard: one utility for encoders and denoisers, under both versions of FSDP, from the meta device to a training step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import T5EncoderModel

import holdfast
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool


def on_meta(kind: Any, folder: Path) -> nn.Module:
    config = kind.load_config(folder) if hasattr(kind, "load_config") else kind.config_class.from_pretrained(folder)
    with torch.device("meta"):
        return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)


def held(model: nn.Module) -> int:
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())


def encode(folder: Path, version: int, options: dict[str, Any]) -> dict[str, Any]:
    """A frozen encoder: sharded, filled, run; beside it the whole one."""
    if options.pop("hybrid", False):
        world_size = dist.get_world_size()
        options["mesh"] = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    dtype = options.get("dtype", torch.float32)
    whole = T5EncoderModel.from_pretrained(folder).to(dtype).eval()
    model = on_meta(T5EncoderModel, folder).requires_grad_(False).eval()
    model = holdfast.load_pretrained(holdfast.shard(model, version=version, **options), folder)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        same = torch.equal(model(input_ids=ids)[0], whole(input_ids=ids)[0])
    modules = [m for m in model.modules() if isinstance(m, FSDPModule | FullyShardedDataParallel)]
    kinds = {type(getattr(m, "_fsdp_wrapped_module", m)).__name__.removeprefix("FSDP") for m in modules}
    return {"same": same, "held": held(model), "whole": held(whole), "kinds": kinds, "types": {p.dtype for p in model.parameters()}}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("ranks", "options", "kinds"),
    [
        (2, {}, {"T5EncoderModel", "T5Block"}),
        (3, {"dtype": torch.bfloat16, "offload": True}, {"T5EncoderModel", "T5Block"}),
        (2, {"layer_classes": ["T5LayerFF"]}, {"T5EncoderModel", "T5LayerFF"}),
        (4, {"hybrid": True}, {"T5EncoderModel", "T5Block"}),
    ],
    ids=["defaults", "bf16 offloaded", "layer classes", "hybrid"],
)
def test_an_encoder_encodes_as_a_whole_one(
    pool: RankPool, flux_folder: Path, version: int, ranks: int, options: dict[str, Any], kinds: set[str]
) -> None:
    for result in pool.run(encode, ranks, flux_folder / "text_encoder_2", version, options):
        assert result["same"]
        assert result["kinds"] == kinds
        assert result["types"] == {options.get("dtype", torch.float32)}
        parts = ranks // 2 if "hybrid" in options else ranks
        assert result["held"] < 1.8 * result["whole"] / parts  # uneven rows, padding: the tensors are tiny


def step(folder: Path, version: int, use_orig_params: bool) -> tuple[list[float], set[torch.dtype]]:
    """Losses of two steps in bf16 over fp32 parameters, and the dtypes of the parameters."""
    model = on_meta(FluxTransformer2DModel, folder)
    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "version": version, "use_orig_params": use_orig_params}
    model = holdfast.load_pretrained(holdfast.shard(model, layer_classes=["FluxTransformerBlock"], **options), folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(2, 6, 4, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 32, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.arange(18.0).reshape(6, 3),
        "txt_ids": torch.zeros(5, 3),
        "guidance": torch.ones(2),
    }
    losses = []
    for _ in range(3):
        output = model(**{k: v.bfloat16() for k, v in inputs.items()})[0]
        assert output.dtype == torch.bfloat16
        loss = output.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {p.dtype for p in model.parameters()}


@pytest.mark.parametrize(("version", "use_orig_params"), [(1, True), (1, False), (2, True)])
def test_a_denoiser_trains(pool: RankPool, flux_folder: Path, version: int, use_orig_params: bool) -> None:
    results = pool.run(step, 2, flux_folder / "transformer", version, use_orig_params)
    (losses, types), _ = results
    assert types == {torch.float32}
    assert losses[2] < losses[0]


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        holdfast.shard(nn.Sequential(nn.Linear(2, 2)), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": 3}, r"version=3.*versions 1 and 2"),
        ({"layer_classes": ["Block"]}, r"Sequential has no Block among its layers; it is made of Linear, Sequential"),
        ({}, r"keeps its layers in no ModuleList: name them with layer_classes"),
    ],
)
def test_what_cannot_be_cut_is_said(options: dict[str, Any], message: str) -> None:
    assert re.search(message, refused(options))


def test_one_process_keeps_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert holdfast.shard(model, layer_classes=[nn.Linear], dtype=torch.bfloat16) is model
    assert model[0].weight.dtype == torch.bfloat16
