"""LoRA on the tiny Flux, under every sharding: what is trained, in which dtype, from which first values, and what is exported."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast.recipes.flux_dreambooth import build_transformer
from holdfast.testing import RankPool
from holdfast.training.adapters import Adapter
from holdfast.training.config import DiffusionConfig

ADAPTER = Adapter(rank=2, alpha=4, dropout=0.0, targets=("attn.to_q", "attn.to_out.0", "ff.net.2"), seed=3)
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
FSDP1 = {**FSDP2, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
WAYS: dict[str, tuple[int, dict[str, str]]] = {
    "one process": (1, {}),
    "DDP": (2, {}),
    "FSDP2": (3, FSDP2),
    "FSDP1, flat": (2, {**FSDP1, "FSDP_USE_ORIG_PARAMS": "false"}),
    "FSDP1, original": (2, {**FSDP1, "FSDP_USE_ORIG_PARAMS": "true"}),
}


def inputs(model: Any, batch: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, 4, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 5, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 32, generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "guidance": torch.ones(batch),
        "txt_ids": torch.zeros(5, 3),
        "img_ids": torch.zeros(4, 3),
    }


def tune(flux_folder: Path, out: Path, environment: dict[str, str], precision: str) -> dict[str, Any]:
    """Two steps of the adapter and a checkpoint; what the checkpoint then says of the model."""
    import holdfast
    from holdfast.training.models import clip_gradients, prepare_model
    from holdfast.training.setup import make_accelerator

    os.environ.update(environment)
    config = DiffusionConfig(
        pretrained_model_name_or_path=str(flux_folder), instance_data_dir="", instance_prompt="", output_dir=str(out),
        mixed_precision=precision, cpu_fsdp=bool(environment), report_to="none",
    )  # fmt: skip
    accelerator = make_accelerator(config)
    model = prepare_model(
        accelerator, lambda: build_transformer(flux_folder), flux_folder / "transformer", None, False, ADAPTER
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(trained, lr=1e-2), device_placement=False)
    losses, norms, halves = [], [], []
    with holdfast.Checkpointer(out, model=model, optimizer=optimizer.optimizer) as checkpointer:
        for step in range(3):
            if step == 0:
                checkpointer.save(0)
            loss = model(**inputs(model), return_dict=False)[0].square().mean()
            accelerator.backward(loss)
            norms.append(float(clip_gradients(accelerator, [model], 1.0)))
            whole = float(clip_gradients(accelerator, [model], math.inf))
            clip_gradients(accelerator, [model], whole / 2)
            halves.append(float(clip_gradients(accelerator, [model], math.inf)) / whole)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        checkpointer.save(3)
    return {"losses": losses, "norms": norms, "halves": halves, "dtypes": {p.dtype for p in trained}, "trained": sum(p.numel() for p in trained)}


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_is_trained_alone_and_the_same_however_the_base_is_cut(
    pool: RankPool, flux_folder: Path, tmp_path: Path, way: str
) -> None:
    from holdfast.engine.extract import open_checkpoint, read_whole

    ranks, environment = WAYS[way]
    results = pool.run(tune, ranks, flux_folder, tmp_path, environment, "no")
    (single,) = pool.run(tune, 1, flux_folder, tmp_path / "single", {}, "no") if ranks > 1 else results
    base = load_file(flux_folder / "transformer/diffusion_pytorch_model.safetensors")
    begun, done = open_checkpoint(tmp_path / "checkpoint-0"), open_checkpoint(tmp_path / "checkpoint-3")
    adapters = [name for name in begun.tensors if ".lora_" in name and name.startswith("model.")]
    assert len(adapters) == 2 * (2 * 2 + 2 * 1 + 2)  # to_q in four blocks, to_out and ff in the two double ones
    for name in adapters:
        first = read_whole(begun, name)
        expected = ADAPTER.initial(name.removeprefix("model."), tuple(first.shape))
        assert torch.equal(first, expected), name
        assert not torch.equal(first, read_whole(done, name)), name
    for result in results:
        assert result["dtypes"] == {torch.float32}
        assert result["losses"] == pytest.approx(single["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(single["norms"], rel=1e-4)
        assert result["halves"] == pytest.approx([0.5] * 3, rel=1e-3)
    assert base.keys()
