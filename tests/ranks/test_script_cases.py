"""Failures that people have reported of scripts under FSDP, each in a few steps of a loop with the engine behind its Accelerator."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from safetensors.torch import load_file

from holdfast.engine.extract import open_checkpoint, read_whole
from holdfast.integrations import cpu_ranks
from holdfast.integrations.accelerate import attach
from holdfast.testing import RankPool

SCRIPT = Path(__file__).parents[1] / "scripts" / "main_process_saves.py"


class Loop:
    """A sharded model, its optimizer and a scheduler that warms up, attached; `more` are objects to register."""

    def __init__(self, folder: Path, version: int = 2, lora: bool = False, more: tuple[Any, ...] = ()) -> None:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        cpu_ranks.enable()
        torch.manual_seed(3 + dist.get_rank())
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False, sync_module_states=False, use_orig_params=True, state_dict_type="SHARDED_STATE_DICT",
        )  # fmt: skip
        self.accelerator = Accelerator(fsdp_plugin=plugin, project_dir=str(folder))
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = runpy.run_path(str(SCRIPT))["Denoiser"]()
            if lora:
                model.requires_grad_(False)
                peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False), model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
        self.accelerator.register_for_checkpointing(*more)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.attached = attach(self.accelerator)

    def step(self) -> tuple[float, float]:
        """One optimizer step on what this rank draws; its loss, and the rate that it was made with."""
        rate = float(self.schedule.get_last_lr()[0])
        loss = (self.model(torch.rand(2, 6)) - torch.rand(2, 6)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item(), rate

    def local(self) -> list[torch.Tensor]:
        return [p.detach().to_local() for p in self.model.parameters()]  # type: ignore[attr-defined]


# -- another run after the resume than before


class Average:
    """As scripts keep it: of a rank's own shards, swapped in for a validation."""

    def __init__(self) -> None:
        self.updates, self.shadow = 0, []  # type: ignore[var-annotated]

    def update(self, shards: list[torch.Tensor]) -> None:
        self.updates += 1
        self.shadow = [0.5 * s + 0.5 * p for s, p in zip(self.shadow or shards, shards, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.shadow = state["updates"], list(state["shadow"])


@torch.no_grad()
def swapped(loop: Loop, average: Average) -> None:
    shards = loop.local()
    kept = [p.clone() for p in shards]
    for p, s in zip(shards, average.shadow, strict=True):
        p.copy_(s)
    time.sleep(0.2)  # a validation
    for p, k in zip(shards, kept, strict=True):
        p.copy_(k)


def average_and_swap(folder: Path, resume: bool) -> tuple[list[tuple[float, float]], int, list[list[float]]]:
    average = Average()
    loop = Loop(folder, more=(average,))
    if resume:
        loop.accelerator.load_state(str(folder / "checkpoint-2"))
    made = []
    for step in range(3 if resume else 1, 5):
        made.append(loop.step())
        average.update(loop.local())
        if step == 2:
            loop.accelerator.save_state(str(folder / "checkpoint-2"))
            swapped(loop, average)
    loop.accelerator.end_training()
    return made, average.updates, [s.flatten().tolist() for s in average.shadow]


def test_rates_averages_and_draws_go_on_and_no_average_is_taken_for_the_weights(pool: RankPool, tmp_path: Path) -> None:
    alone = pool.run(average_and_swap, 2, tmp_path, False)
    again = pool.run(average_and_swap, 2, tmp_path, True)
    for before, after in zip(alone, again, strict=True):
        assert after[0] == before[0][2:]
        assert after[1:] == before[1:]
    assert alone[0][2] != alone[1][2]


def draw(folder: Path, resume: bool) -> float:
    loop = Loop(folder)
    if resume:
        loop.accelerator.load_state(str(folder / "checkpoint-1"))
    else:
        loop.step()
        loop.accelerator.save_state(str(folder / "checkpoint-1"))
    drawn = torch.rand(1).item()
    loop.accelerator.end_training()
    return drawn


def test_ranks_that_were_not_there_draw_numbers_of_their_own(pool: RankPool, tmp_path: Path) -> None:
    two = pool.run(draw, 2, tmp_path, False)
    three = pool.run(draw, 3, tmp_path, True)
    assert three[:2] == two
    assert len(set(three)) == 3
    assert pool.run(draw, 3, tmp_path, True) == three


# -- adapters, and the model at the end


def resume_adapter_and_export(folder: Path, version: int) -> None:
    loop = Loop(folder, version, lora=True)
    trained = [p for group in loop.optimizer.param_groups for p in group["params"]]
    before = [(id(p), p.dtype, tuple(p.shape)) for p in trained]
    for _ in range(2):
        loop.step()
    if loop.accelerator.is_main_process:
        loop.accelerator.save_state(str(folder / "checkpoint-2"))
    loop.accelerator.wait_for_everyone()
    for _ in range(2):
        loop.step()
    loop.attached.ready().wait()
    loop.accelerator.load_state(str(folder / "checkpoint-2"))
    after = [p for group in loop.optimizer.param_groups for p in group["params"]]
    assert [(id(p), p.dtype, tuple(p.shape)) for p in after] == before
    assert sum(p.requires_grad for p in loop.model.parameters()) == len(before)
    model = loop.accelerator.unwrap_model(loop.model)
    if loop.accelerator.is_main_process:
        torch.save(peft.get_peft_model_state_dict(model), folder / "adapter.pt")
    model.save_pretrained(str(folder / f"final-{dist.get_rank()}"))  # on all ranks: one of them writes
    loop.accelerator.end_training()


@pytest.mark.parametrize("version", [1, 2])
def test_an_adapter_resumes_as_it_was_and_what_is_exported_is_whole(pool: RankPool, tmp_path: Path, version: int) -> None:
    """No parameter is another, of another type or added; every exported tensor has its full shape, from sharded checkpoints."""
    pool.run(resume_adapter_and_export, 2, tmp_path, version)
    checkpoint = open_checkpoint(tmp_path / "checkpoint-2")
    whole = {n.removeprefix("model."): read_whole(checkpoint, n) for n in checkpoint.tensors if n.startswith("model.")}
    adapter = torch.load(tmp_path / "adapter.pt", weights_only=True)
    expected = {n.replace(".default", ""): t for n, t in whole.items() if "lora_" in n}
    assert adapter.keys() == expected.keys() and len(adapter) == 8
    assert all(torch.equal(adapter[n], t) for n, t in expected.items())
    final = load_file(tmp_path / "final-0" / "diffusion_pytorch_model.safetensors")
    assert final.keys() == whole.keys() and all(torch.equal(final[n], t) for n, t in whole.items())
    assert (tmp_path / "final-0" / "config.json").exists()
    assert not (tmp_path / "final-1").exists()
