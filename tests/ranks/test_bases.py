"""Frozen weights that came from a folder are named, not copied: under every sharding, whenever the adapter came in, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lora_jobs import step, whole
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import holdfast
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.extract import read_whole
from holdfast.engine.meta import parameters_on_meta
from holdfast.engine.verify import verify
from holdfast.storage import LocalFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

TINY = {"vocab_size": 32, "hidden_size": 20, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2}
MEDIUM = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INTO_LORA = {rf"^(.*\.(?:{'|'.join(LAYERS)}))\.(weight)$": r"base_model.model.\1.base_layer.\2", r"^(.*)$": r"base_model.model.\1"}


def make_base(folder: Path, size: dict[str, int]) -> Path:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**size)).save_pretrained(folder)
    return folder


def build(base: Path, form: str, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    """A LoRA on `base`, and what its Checkpointer has to be told."""
    config, lora = LlamaConfig.from_pretrained(base), LoraConfig(r=rank, target_modules=LAYERS)
    torch.manual_seed(1)
    if form == "adapter first":  # put in on the meta device, cut, then filled
        with parameters_on_meta():
            model: nn.Module = get_peft_model(LlamaForCausalLM(config), lora, low_cpu_mem_usage=True)
        holdfast.shard(model)
        return holdfast.load_pretrained(model, base, key_mapping=INTO_LORA, initial=first_value), {}
    if form in ("claimed", "ddp"):
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
        return DistributedDataParallel(model) if form == "ddp" else model, {"base": base}
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = get_peft_model(holdfast.load_pretrained(model, base), lora)
    if form == "none":
        return model, {}
    return holdfast.shard(model, version=2 if form == "fsdp2" else 1, use_orig_params=form != "fsdp1 whole"), {}


def first_value(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    if "lora_" not in name:
        return None
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(shape, generator=generator) / 10 if "lora_A" in name else torch.zeros(shape)


def tune(folder: Path, base: Path, form: str, resume: bool, spoil: str = "", rank: int = 3) -> dict[str, Any]:
    """Two steps and a save, or a resume; then all weights whole, the next loss, and the size of this rank's adapter and optimizer."""
    model, told = build(base, form, rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if spoil == "all":
        with torch.no_grad():
            for p in model.parameters():
                p.data.zero_()
    with holdfast.Checkpointer(folder, model=model, optimizer=optimizer, **told) as checkpointer:
        if resume:
            assert checkpointer.resume() == 2
        else:
            for _ in range(2):
                step(model, optimizer)
            if spoil == "a shard":  # of this rank alone, past every counter of versions
                norm = next(p for name, p in model.named_parameters() if name.endswith("model.norm.weight"))
                assert isinstance(norm, DTensor)
                if torch.distributed.get_rank() == 0:
                    norm.to_local().data.fill_(7.0)
            checkpointer.save(2)
    weights = whole(model)
    return {"weights": weights, "loss": step(model, optimizer), "bytes": checkpointer.saves[0].bytes if not resume else 0}


def stored_names(folder: Path) -> set[str]:
    """The model's tensors that are in the ranks' files."""
    checkpoint = Checkpoint(LocalFolder(folder), "checkpoint-2")
    ranks = range(checkpoint.manifest.world_size)
    return {n for r in ranks for n in checkpoint.header(r) if n.startswith("model.")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny", TINY)


FORMS = [("none", 1), ("claimed", 1), ("ddp", 2), ("fsdp2", 2), ("adapter first", 3), ("fsdp1", 2), ("fsdp1 whole", 3)]
ELSEWHERE = {"none": ("fsdp1 whole", 2), "claimed": ("none", 1), "ddp": ("fsdp2", 3), "fsdp2": ("fsdp1", 3), "adapter first": ("ddp", 2),
             "fsdp1": ("claimed", 1), "fsdp1 whole": ("adapter first", 2)}  # fmt: skip


@pytest.mark.parametrize(("form", "ranks"), FORMS)
def test_only_the_adapter_is_written_and_any_ranks_go_on(pool: RankPool, tmp_path: Path, tiny: Path, form: str, ranks: int) -> None:
    saved = pool.run(tune, ranks, tmp_path, tiny, form, False)[0]
    names = stored_names(tmp_path)
    assert names and all("lora_" in name for name in names)
    assert verify(LocalFolder(tmp_path), "checkpoint-2") == []
    checkpoint = Checkpoint(LocalFolder(tmp_path), "checkpoint-2")
    for name, value in saved["weights"].items():  # as an export reads it
        assert torch.equal(read_whole(checkpoint, f"model.{name}"), value), name
    other, others = ELSEWHERE[form]
    for spoil in ("", "all"):
        for result in pool.run(tune, others, tmp_path, tiny, other, True, spoil):
            assert result["weights"].keys() == saved["weights"].keys()
            for name, value in result["weights"].items():
                assert torch.equal(value, saved["weights"][name]), (spoil, name)
            assert result["loss"] == pytest.approx(saved["loss"], rel=1e-5)


def test_a_shard_that_was_changed_is_written_by_its_rank_alone(pool: RankPool, tmp_path: Path, tiny: Path) -> None:
    saved = pool.run(tune, 2, tmp_path, tiny, "fsdp2", False, "a shard")[0]
    name = "base_model.model.model.norm.weight"
    assert saved["weights"][name].tolist() == [7.0] * 10 + [1.0] * 10
    checkpoint = Checkpoint(LocalFolder(tmp_path), "checkpoint-2")
    assert [f"model.{name}" in checkpoint.header(rank) for rank in (0, 1)] == [True, False]
    assert {n for n in stored_names(tmp_path) if "lora_" not in n} == {f"model.{name}"}
    for form, ranks in (("fsdp2", 2), ("fsdp1 whole", 3), ("none", 1)):
        for result in pool.run(tune, ranks, tmp_path, tiny, form, True):
            assert torch.equal(result["weights"][name], saved["weights"][name])


@pytest.mark.parametrize(("form", "ranks"), [("claimed", 1), ("fsdp2", 2), ("fsdp1 whole", 2)])
def test_a_checkpoint_is_as_large_as_adapter_and_optimizer(pool: RankPool, tmp_path: Path, form: str, ranks: int) -> None:
    """Of an adapter of more than 10 MB, within 5 %."""
    base = make_base(tmp_path / "base", MEDIUM)
    saved = pool.run(tune, ranks, tmp_path / "out", base, form, False, "", 96)
    adapter = sum(v.nbytes for n, v in saved[0]["weights"].items() if "lora_" in n)
    frozen = sum(v.nbytes for n, v in saved[0]["weights"].items() if "lora_" not in n)
    assert adapter > 10e6 and frozen > 40e6
    size = sum(path.stat().st_size for path in (tmp_path / "out" / "checkpoint-2").iterdir())
    assert 3 * adapter < size < 1.05 * 3 * adapter
