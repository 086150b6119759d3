"""load_pretrained: what from_pretrained gives, to the bit, read by every rank for its own shards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from transformers import (
    CLIPTextModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    T5EncoderModel,
)

import holdfast
from holdfast.engine.meta import parameters_on_meta
from holdfast.engine.pretrained import PAGE, load_pretrained
from holdfast.errors import CheckpointNotFound, IncompatibleCheckpoint, UsageError
from holdfast.storage import LocalFolder

if TYPE_CHECKING:
    from holdfast.testing.pool import RankPool

KINDS: dict[str, Any] = {
    "transformer": FluxTransformer2DModel,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": T5EncoderModel,
    "llama": LlamaForCausalLM,
}


def on_meta(kind: Any, folder: Path) -> nn.Module:
    config = kind.load_config(folder) if hasattr(kind, "load_config") else kind.config_class.from_pretrained(folder)
    with torch.device("meta"):
        return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)


def inputs(kind: str) -> dict[str, Any]:
    ids = torch.arange(10).reshape(2, 5)
    if kind != "transformer":
        return {"input_ids": ids}
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(2, 6, 4, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 32, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.arange(18.0).reshape(6, 3),
        "txt_ids": torch.zeros(5, 3),
        "guidance": torch.ones(2),
    }


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Blocks one by one, the rest (tied embeddings included) with the root."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    for name, blocks in lists:
        if not any(name.startswith(f"{outer}.") for outer, _ in lists):
            for block in blocks:
                fully_shard(block, **options)
    return fully_shard(model, **options)


class CountingFolder(LocalFolder):
    """A folder that adds up the bytes that are read, headers included."""

    read = 0

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        super().read_into(path, offset, target)
        self.read += len(target)


def differences(model: nn.Module, reference: nn.Module) -> list[str]:
    """Names of parameters and buffers (persistent or not) that differ in value, dtype or ties."""
    expected = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    got = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if got.keys() != expected.keys():
        return sorted(got.keys() ^ expected.keys())
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in got.items()}
    return [n for n, t in whole.items() if t.dtype != expected[n].dtype or not torch.equal(t, expected[n])]


def load_on_ranks(kind: str, folder: Path, how: str = "rows") -> dict[str, Any]:
    reference = KINDS[kind].from_pretrained(folder).eval()
    world = dist.get_world_size()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (world,))}
    if how == "columns":
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1 if p.shape[-1] % world == 0 else 0)
    elif how == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    elif how == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = shard(on_meta(KINDS[kind], folder).eval(), **options)

    source = CountingFolder(folder)
    state = torch.get_rng_state()
    with CommDebugMode() as traffic:
        assert load_pretrained(model, source) is model
    calls, undisturbed = traffic.get_total_counts(), torch.equal(state, torch.get_rng_state())
    different = differences(model, reference)
    with torch.no_grad():
        output, expected = model(**inputs(kind))[0], reference(**inputs(kind))[0]
    model(**inputs(kind))[0].float().square().mean().backward()  # the shards are FSDP2's: it can reduce into them
    ranks = {id(p): p for p in model.parameters()}
    return {
        "different": different,
        "forward": torch.equal(output, expected),
        "calls": calls,
        "undisturbed": undisturbed,
        "gradients": all(p.grad is not None for p in ranks.values() if p.requires_grad),
        "read": source.read,
        "names": len(list(model.named_parameters(remove_duplicate=False))),
        "ties": len(list(model.named_parameters(remove_duplicate=False))) - len(ranks),
    }


@pytest.fixture(scope="session")
def folders(flux_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Flux's three models, and a Llama with tied embeddings whose vocabulary is no multiple of 2 or 3."""
    llama = tmp_path_factory.mktemp("pretrained") / "llama"
    config = LlamaConfig(
        vocab_size=97, hidden_size=24, intermediate_size=50, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(llama)
    return {"llama": llama, **{kind: flux_folder / kind for kind in KINDS if kind != "llama"}}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_those_of_from_pretrained(
    pool: RankPool, folders: dict[str, Path], kind: str, world_size: int
) -> None:
    for result in pool.run(load_on_ranks, world_size, kind, folders[kind]):
        assert result["different"] == []
        assert result["forward"]
        assert result["calls"] == 0
        assert result["undisturbed"]
        assert result["gradients"]
        assert result["ties"] == {"llama": 1, "text_encoder_2": 1}.get(kind, 0)


@pytest.mark.parametrize(("how", "world_size"), [("columns", 2), ("offload", 2), ("hsdp", 4)])
def test_however_it_is_sharded(pool: RankPool, folders: dict[str, Path], how: str, world_size: int) -> None:
    for result in pool.run(load_on_ranks, world_size, "llama", folders["llama"], how):
        assert (result["different"], result["forward"], result["calls"]) == ([], True, 0)


def count_bytes(folder: Path) -> int:
    source = CountingFolder(folder)
    load_pretrained(shard(on_meta(LlamaForCausalLM, folder)), source)
    return source.read


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_reads_its_own_bytes(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    """Its share of the file, and beside it the header and at most a page at either end of each tensor's rows."""
    config = LlamaConfig(
        vocab_size=3000, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    size, tensors = file.stat().st_size, len(load_file(file))
    slack = 64 * 1024 + tensors * 2 * 4096
    assert slack < size / 20
    for read in pool.run(count_bytes, world_size, tmp_path):
        assert size / world_size * 0.95 < read <= size / world_size + slack


# ---------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_without_sharding(folders: dict[str, Path], kind: str) -> None:
    reference = KINDS[kind].from_pretrained(folders[kind]).eval()
    model = load_pretrained(on_meta(KINDS[kind], folders[kind]).eval(), folders[kind])
    assert differences(model, reference) == []
    assert torch.equal(model(**inputs(kind))[0], reference(**inputs(kind))[0])


def test_wrappers_change_no_name(folders: dict[str, Path]) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = on_meta(LlamaForCausalLM, folders["llama"])
    apply_activation_checkpointing(model, check_fn=lambda m: m in list(model.model.layers))
    load_pretrained(torch.compile(model), folders["llama"])
    reference = LlamaForCausalLM.from_pretrained(folders["llama"])
    for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)


def test_what_an_optimizer_refers_to_stays_the_models(folders: dict[str, Path]) -> None:
    model = on_meta(LlamaForCausalLM, folders["llama"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_pretrained(model, folders["llama"])
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_a_model_with_memory_is_filled_in_place(folders: dict[str, Path]) -> None:
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folders["llama"]))
    pointers = [p.data_ptr() for p in model.parameters()]
    load_pretrained(model, folders["llama"])
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert differences(model, LlamaForCausalLM.from_pretrained(folders["llama"])) == []


@pytest.mark.parametrize("kind", ["transformer", "text_encoder"])
def test_values_are_converted_on_the_way(folders: dict[str, Path], kind: str) -> None:
    option = "torch_dtype" if kind == "transformer" else "dtype"
    reference = KINDS[kind].from_pretrained(folders[kind], **{option: torch.bfloat16})
    model = load_pretrained(on_meta(KINDS[kind], folders[kind]), folders[kind], dtype=torch.bfloat16)
    assert differences(model, reference) == []
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def convert_on_ranks(folder: Path) -> tuple[list[str], bool]:
    model = shard(on_meta(LlamaForCausalLM, folder))
    load_pretrained(model, folder, dtype=torch.bfloat16)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    different = differences(model, reference)
    return different, torch.equal(model(**inputs("llama"))[0], reference(**inputs("llama"))[0])


def refill_after_forward(folder: Path) -> tuple[list[str], bool]:
    """FSDP2 has initialised itself, and a forward without gradients has left the root's parameters whole."""
    torch.manual_seed(1)
    model = shard(LlamaForCausalLM(LlamaConfig.from_pretrained(folder))).eval()
    with torch.no_grad():
        model(**inputs("llama"))
    load_pretrained(model, folder)
    reference = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        same = torch.equal(model(**inputs("llama"))[0], reference(**inputs("llama"))[0])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return differences(model, reference), same


def test_a_model_that_ran_is_filled_anew(pool: RankPool, folders: dict[str, Path]) -> None:
    assert pool.run(refill_after_forward, 2, folders["llama"]) == [([], True)] * 2


def test_shards_are_converted_too(pool: RankPool, folders: dict[str, Path]) -> None:
    assert pool.run(convert_on_ranks, 2, folders["llama"]) == [([], True)] * 2


def test_several_files_and_variants(folders: dict[str, Path], tmp_path: Path) -> None:
    reference = FluxTransformer2DModel.from_pretrained(folders["transformer"])
    reference.save_pretrained(tmp_path / "cut", max_shard_size="60KB", variant="fp32")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    model = load_pretrained(on_meta(FluxTransformer2DModel, tmp_path / "cut"), tmp_path / "cut", variant="fp32")
    assert differences(model, reference) == []
    with pytest.raises(CheckpointNotFound, match=r"variant 'fp16'.*choose one of these by `variant`"):
        load_pretrained(model, tmp_path / "cut", variant="fp16")


def rewritten(source: Path, target: Path, rename: Callable[[str], str | None]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    save_file({n: t for n, t in renamed.items() if n is not None}, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_leading_part_may_stand_on_one_side(folders: dict[str, Path], tmp_path: Path) -> None:
    # CLIP's text model had everything below `text_model` before transformers 5.
    older = rewritten(folders["text_encoder"], tmp_path / "clip", lambda name: f"text_model.{name}")
    model = load_pretrained(on_meta(CLIPTextModel, older), older)
    assert differences(model, CLIPTextModel.from_pretrained(folders["text_encoder"])) == []
    # The body of a model with a head, and a (tied) head on a folder of the body.
    body = load_pretrained(on_meta(LlamaModel, folders["llama"]), folders["llama"])
    whole = LlamaForCausalLM.from_pretrained(folders["llama"])
    assert differences(body, whole.model) == []
    body.save_pretrained(tmp_path / "body")
    assert differences(load_pretrained(on_meta(LlamaForCausalLM, folders["llama"]), tmp_path / "body"), whole) == []


def test_buffers_in_older_folders_are_passed_over(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["llama"], tmp_path / "older")
    tensors = load_file(tmp_path / "older" / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    save_file(tensors, tmp_path / "older" / "model.safetensors", {"format": "pt"})
    model = load_pretrained(on_meta(LlamaForCausalLM, tmp_path / "older"), tmp_path / "older")
    assert differences(model, LlamaForCausalLM.from_pretrained(folders["llama"])) == []


def test_names_that_differ_by_more_are_mapped(tmp_path: Path) -> None:
    config = Mistral3Config(
        text_config={
            "model_type": "mistral", "vocab_size": 60, "hidden_size": 16, "intermediate_size": 37, "head_dim": 4,
            "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        },
        vision_config={
            "model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
            "intermediate_size": 37, "image_size": 30, "patch_size": 6, "num_channels": 3,
        },
        image_token_index=3, vision_feature_layer=-1,
    )  # fmt: skip
    reference = Mistral3ForConditionalGeneration(config)
    reference.save_pretrained(tmp_path)
    model = on_meta(Mistral3ForConditionalGeneration, tmp_path)
    with pytest.raises(IncompatibleCheckpoint, match=r"missing there.*unknown to the model.*key_mapping"):
        load_pretrained(model, tmp_path)
    mapping = {
        r"^language_model\.lm_head": "lm_head",
        r"^language_model\.model": "model.language_model",
        r"^(vision_tower|multi_modal_projector)": r"model.\1",
    }
    load_pretrained(model, tmp_path, key_mapping=mapping)
    assert differences(model, reference) == []


class Positions(nn.Module):
    """No config; a buffer and a plain tensor that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("scale", torch.arange(3.0), persistent=False)
        self.register_buffer("count", torch.tensor(7))
        self.table = torch.arange(4)


def test_buffers_without_file_and_without_config(tmp_path: Path) -> None:
    reference = Positions()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Positions()
    with pytest.raises(UsageError, match=r"table.*pass build=lambda: Positions") as caught:
        load_pretrained(model, tmp_path)
    assert caught.value.exit_code == 2
    assert model.linear.weight.is_meta

    load_pretrained(model, tmp_path, build=Positions)
    with parameters_on_meta():
        direct = Positions()
    assert direct.linear.weight.is_meta
    for other in (model, load_pretrained(direct, tmp_path)):
        assert differences(other, reference) == []
        assert torch.equal(other.table, reference.table)


# --------------------------------------------------------------------------------------------------------------- refusals


def test_weights_that_lost_their_tie_are_told(folders: dict[str, Path]) -> None:
    model = on_meta(LlamaForCausalLM, folders["llama"])
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    with pytest.raises(
        IncompatibleCheckpoint, match=r"lm_head\.weight should be the same parameter as model\.embed_tokens"
    ):
        load_pretrained(model, folders["llama"])


def fsdp1_on_ranks(kind: str, folder: Path, use_orig_params: bool) -> dict[str, Any]:
    reference = KINDS[kind].from_pretrained(folder).eval()
    model = holdfast.shard(on_meta(KINDS[kind], folder).eval(), version=1, use_orig_params=use_orig_params)
    source = CountingFolder(folder)
    before = jobs.collectives()
    assert load_pretrained(model, source) is model
    calls = jobs.collectives() - before
    buffers = dict(reference.named_buffers())
    odd = [n for n, b in model.named_buffers() if not torch.equal(b, buffers[n.replace("_fsdp_wrapped_module.", "")])]
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad():
        output, expected = model(**inputs(kind))[0], reference(**inputs(kind))[0]
    with FullyShardedDataParallel.summon_full_params(model):
        got = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters(remove_duplicate=False)}
        for name, parameter in reference.named_parameters(remove_duplicate=False):
            if not torch.equal(got[name], parameter):
                odd.append(name)
    model(**inputs(kind))[0].float().square().mean().backward()
    return {
        "different": odd,
        "forward": torch.equal(output, expected),
        "calls": calls,
        "read": source.read,
        "held": held,
        "units": len(FullyShardedDataParallel.fsdp_modules(model)),
    }


@pytest.mark.parametrize(("kind", "world_size", "original"), [
    ("llama", 2, True), ("llama", 3, False), ("transformer", 2, False), ("text_encoder_2", 2, False), ("text_encoder", 1, True),
])  # fmt: skip
def test_flat_shards_are_those_of_from_pretrained(
    pool: RankPool, folders: dict[str, Path], kind: str, world_size: int, original: bool
) -> None:
    """FSDP1, from the meta device on: every rank reads its own flat shards, ties and buffers included."""
    for result in pool.run(fsdp1_on_ranks, world_size, kind, folders[kind], original):
        assert result["different"] == []
        assert result["forward"]
        assert result["calls"] == 0
        assert result["units"] > 2
        assert result["read"] < result["held"] + 200 * PAGE  # headers, and up to a page at either end of each stretch


def change_dtype_under_fsdp1(folder: Path) -> str:
    model = holdfast.shard(on_meta(LlamaForCausalLM, folder), version=1)
    with pytest.raises(UsageError) as caught:
        load_pretrained(model, folder, dtype=torch.bfloat16)
    load_pretrained(holdfast.shard(on_meta(LlamaForCausalLM, folder), version=1, dtype=torch.bfloat16), folder)
    return str(caught.value)


def test_fsdp1_takes_its_types_when_it_wraps(pool: RankPool, folders: dict[str, Path]) -> None:
    assert "before FSDP1 wraps it" in pool.run(change_dtype_under_fsdp1, 2, folders["llama"])[0]
