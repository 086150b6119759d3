"""Adapters on a frozen base: every rank's slice is kept, what was saved is what is resumed, and types stay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lora_jobs import step, whole
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import holdfast

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

LLAMA = LlamaConfig(
    vocab_size=32, hidden_size=20, intermediate_size=30, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
)


def tune(folder: Path, version: int | None, resume: bool) -> dict[str, Any]:
    """Two steps and a save, or a resume; then the adapters as they are on this rank, put together, and the next loss."""
    torch.manual_seed(0)
    model: nn.Module = get_peft_model(LlamaForCausalLM(LLAMA), LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    if version is not None:  # without original parameters FSDP1 wants units that are frozen or not, so it keeps them
        model = holdfast.shard(model, version=version)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    count = len(optimizer.param_groups[0]["params"])
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        if resume:
            assert checkpointer.resume() == 2
        else:
            for _ in range(2):
                step(model, optimizer)
            checkpointer.save(2)
    assert len([p for p in model.parameters() if p.requires_grad]) == count  # the same, and no second adapter beside them
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return {"adapters": {n: p for n, p in whole(model).items() if "lora_" in n}, "loss": step(model, optimizer)}


@pytest.mark.parametrize("version", [1, 2])
def test_adapters_are_kept_whole_and_resumed_anywhere(pool: RankPool, tmp_path: Path, version: int) -> None:
    saved = pool.run(tune, 2, tmp_path, version, False)
    assert any(value.abs().sum() > 0 for name, value in saved[0]["adapters"].items() if "lora_B" in name)
    for ranks, other in ((2, version), (3, 3 - version), (1, None)):
        for result in pool.run(tune, ranks, tmp_path, other, True):
            assert result["adapters"].keys() == saved[0]["adapters"].keys()
            for name, value in result["adapters"].items():
                assert torch.equal(value, saved[0]["adapters"][name]), name
            assert result["loss"] == pytest.approx(saved[0]["loss"], rel=1e-5)
