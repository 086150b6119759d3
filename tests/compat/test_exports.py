"""What `holdfast export` writes is loaded by the library that it is for, and is equal to the bit."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compat import foreign
from compat.foreign import State
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.engine.export import Request, export_checkpoint
from holdfast.engine.extract import cuts
from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint, UsageError
from holdfast.testing.pool import RankPool


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n]) or found[n].dtype != expected[n].dtype] == []


def save(folder: Path, model: torch.nn.Module, **registered: object) -> Path:
    with holdfast.Checkpointer(folder, model=model, **registered) as checkpointer:
        checkpointer.save(1)
    return folder / "checkpoint-1"


def disturbed(model: torch.nn.Module) -> torch.nn.Module:
    """Other weights than the base's, so that a copy of the base is noticed."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def llama(pool: RankPool, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A Llama that two ranks trained: its output folder and its weights."""
    folder = tmp_path_factory.mktemp("llama") / "out"
    return folder, pool.run(foreign.write_native_llama, 2, folder, llama_folder)[0]


def test_transformers(llama: tuple[Path, dict], llama_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, weights = llama
    export_checkpoint(Request(folder, tmp_path / "out", "transformers", base=llama_folder, max_shard_bytes=200_000))
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 220_000 for path in files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_equal(dict(loaded.named_parameters()), weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_another_dtype(llama: tuple[Path, dict], llama_folder: Path, tmp_path: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    export_checkpoint(Request(llama[0] / "checkpoint-2", tmp_path / "out", "transformers", base=llama_folder, dtype=dtype))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # in the dtype that its config names
    assert_equal(dict(loaded.named_parameters()), {name: t.to(kind) for name, t in llama[1].items()})


@pytest.mark.parametrize("with_weights", [True, False], ids=["base", "config"])
@pytest.mark.parametrize("config_ties", [True, False])
def test_tied_weights(llama_folder: Path, tmp_path: Path, config_ties: bool, with_weights: bool) -> None:
    """Stored once where the library ties them itself, else under both names."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(llama_folder, tie_word_embeddings=config_ties, num_hidden_layers=1)
    model = LlamaForCausalLM(config)
    (model if with_weights else config).save_pretrained(tmp_path / "base")
    model.lm_head.weight = model.model.embed_tokens.weight
    checkpoint = save(tmp_path / "run", disturbed(model))
    export_checkpoint(Request(checkpoint, tmp_path / "out", "transformers", base=tmp_path / "base"))
    assert ("lm_head.weight" in load_file(tmp_path / "out/model.safetensors")) is not config_ties
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_equal(loaded.state_dict(), model.state_dict())


class Averages:
    """An EMA that keeps its tensors in a list, as diffusers' EMAModel does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow_params = [p.detach() + 3 for p in model.parameters()]

    def state_dict(self) -> dict[str, object]:
        return {"decay": 0.9, "shadow_params": self.shadow_params}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("form", ["dict", "list", "averaged"])
def test_averaged_weights(llama_folder: Path, tmp_path: Path, form: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    expected = {name: p.detach() + 3 for name, p in model.named_parameters()}
    ema: object = {"dict": dict(expected), "list": Averages(model)}.get(form)
    if form == "averaged":
        ema = torch.optim.swa_utils.AveragedModel(model)
        with torch.no_grad():
            for p in ema.parameters():
                p.add_(3)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = save(tmp_path / "run", model, optimizer=optimizer, extra={"ema": ema})
    lines = export_checkpoint(Request(checkpoint, tmp_path / "out", "transformers", base=llama_folder, ema=True))
    assert any("averaged weights of extra.ema" in line for line in lines)
    assert_equal(dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters()), expected)


def test_diffusers_pipeline_and_model(flux_folder: Path, tmp_path: Path) -> None:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    model = disturbed(FluxTransformer2DModel.from_pretrained(flux_folder / "transformer"))
    checkpoint = save(tmp_path / "run", model)
    export_checkpoint(Request(checkpoint, tmp_path / "pipeline", "diffusers", base=flux_folder))
    pipeline, base = FluxPipeline.from_pretrained(tmp_path / "pipeline"), FluxPipeline.from_pretrained(flux_folder)
    assert_equal(pipeline.transformer.state_dict(), model.state_dict())
    for part in ("vae", "text_encoder", "text_encoder_2"):
        assert_equal(getattr(pipeline, part).state_dict(), getattr(base, part).state_dict())
    export_checkpoint(Request(checkpoint, tmp_path / "model", "diffusers", base=flux_folder / "transformer"))
    assert_equal(FluxTransformer2DModel.from_pretrained(tmp_path / "model").state_dict(), model.state_dict())
    (tmp_path / "run/transformer").mkdir()  # as a finished recipe leaves it: no --base is needed then
    (tmp_path / "run/transformer/config.json").write_bytes((flux_folder / "transformer/config.json").read_bytes())
    export_checkpoint(Request(tmp_path / "run", tmp_path / "found", "diffusers"))
    assert_equal(FluxTransformer2DModel.from_pretrained(tmp_path / "found").state_dict(), model.state_dict())


def test_peft(llama_folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(llama_folder)
    config = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(base, config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    checkpoint = save(tmp_path / "run", model)
    with pytest.raises(UsageError, match="--lora_alpha"):
        export_checkpoint(Request(checkpoint, tmp_path / "out", "peft"))
    export_checkpoint(Request(checkpoint, tmp_path / "out", "peft", lora_alpha=12))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama_folder), tmp_path / "out")
    assert_equal(get_peft_model_state_dict(loaded), get_peft_model_state_dict(model))
    ids = torch.arange(3, 15).view(2, 6)
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    with pytest.raises(UsageError, match="--to peft"):
        export_checkpoint(Request(checkpoint, tmp_path / "no", "transformers", base=llama_folder))


def test_diffusers_lora(flux_folder: Path, tmp_path: Path) -> None:
    from diffusers import FluxPipeline
    from peft import LoraConfig, get_peft_model_state_dict

    pipeline = FluxPipeline.from_pretrained(flux_folder)
    pipeline.transformer.add_adapter(LoraConfig(r=2, lora_alpha=5, target_modules=["to_q", "to_k"]))
    with torch.no_grad():
        for p in pipeline.transformer.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    checkpoint = save(tmp_path / "run", pipeline.transformer)
    export_checkpoint(Request(checkpoint, tmp_path / "out", "diffusers", lora_alpha=5))
    fresh = FluxPipeline.from_pretrained(flux_folder)
    fresh.load_lora_weights(tmp_path / "out", adapter_name="default")
    assert_equal(get_peft_model_state_dict(fresh.transformer), get_peft_model_state_dict(pipeline.transformer))
    scales = {name: m.scaling for name, m in pipeline.transformer.named_modules() if hasattr(m, "scaling")}
    assert scales
    assert {name: m.scaling for name, m in fresh.transformer.named_modules() if hasattr(m, "scaling")} == scales


@pytest.fixture(scope="module")
def native(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[State]]:
    """A small model that two ranks trained: its checkpoint and each rank's state."""
    folder = tmp_path_factory.mktemp("native") / "out"
    states = pool.run(foreign.write_native, 2, folder)
    return folder / "checkpoint-3", states


def test_dcp(pool: RankPool, native: tuple[Path, list[State]], tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    checkpoint, states = native
    export_checkpoint(Request(checkpoint, tmp_path / "out", "dcp"))
    for found in pool.run(foreign.load_dcp, 3, tmp_path / "out"):
        assert_equal(found, states[0].tensors)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")
    content = torch.load(tmp_path / "all.pt", weights_only=True)
    assert content["step"] == 3
    weights = {name: t for name, t in states[0].tensors.items() if "/" not in name}
    assert_equal(content["model"], weights)
    assert content["optimizer"]["param_groups"][0]["params"] == list(weights)


def test_what_fsdp1_saved_flat(pool: RankPool, tmp_path: Path) -> None:
    states: list[State] = pool.run(foreign.write_native, 3, tmp_path / "run", "fsdp1")
    export_checkpoint(Request(tmp_path / "run", tmp_path / "out", "dcp"))
    for found in pool.run(foreign.load_dcp, 2, tmp_path / "out"):
        assert_equal(found, states[0].tensors)


@pytest.mark.parametrize(
    ("to", "version", "ranks"),
    [("accelerate", "", 2), ("accelerate-fsdp", "1", 2), ("accelerate-fsdp", "2", 2)],
    ids=["ddp", "fsdp1", "fsdp2"],
)
def test_accelerate(
    pool: RankPool, native: tuple[Path, list[State]], tmp_path: Path, to: str, version: str, ranks: int
) -> None:
    checkpoint, states = native
    export_checkpoint(Request(checkpoint, tmp_path / "out", to))
    loaded: list[State] = pool.run(foreign.load_accelerate, ranks, tmp_path / "out", version)
    for rank in range(ranks):
        assert_equal(loaded[rank].tensors, states[0].tensors)
        assert loaded[rank].draws == states[rank].draws
        assert loaded[rank].lr == states[rank].lr


def test_what_cannot_be_exported(llama: tuple[Path, dict], llama_folder: Path, flux_folder: Path, tmp_path: Path) -> None:
    folder = llama[0]
    with pytest.raises(UsageError, match="--base"):
        export_checkpoint(Request(folder, tmp_path / "a", "transformers"))
    with pytest.raises(UsageError, match="not empty"):
        export_checkpoint(Request(folder, folder, "transformers", base=llama_folder))
    with pytest.raises(UsageError, match="averaged"):
        export_checkpoint(Request(folder, tmp_path / "b", "transformers", base=llama_folder, ema=True))
    with pytest.raises(UsageError, match="--dtype"):
        export_checkpoint(Request(folder, tmp_path / "c", "dcp", dtype="bf16"))
    with pytest.raises(IncompatibleCheckpoint, match="named otherwise"):
        export_checkpoint(Request(folder, tmp_path / "d", "transformers", base=flux_folder / "text_encoder"))
    assert sorted(path.name for path in tmp_path.iterdir()) == []


def test_a_resized_model_needs_its_own_config(llama_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    model.resize_token_embeddings(333)
    checkpoint = save(tmp_path / "run", model)
    with pytest.raises(IncompatibleCheckpoint, match="has shape"):
        export_checkpoint(Request(checkpoint, tmp_path / "out", "transformers", base=llama_folder))


def test_a_flipped_bit_ends_the_export(llama_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = save(tmp_path / "run", AutoModelForCausalLM.from_pretrained(llama_folder))
    (file,) = checkpoint.glob("rank-*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="not what was written"):
        export_checkpoint(Request(checkpoint, tmp_path / "out", "transformers", base=llama_folder))
    assert not (tmp_path / "out").exists()


@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from([1, 4, 8]), st.integers(8, 200))
def test_cuts_are_consecutive_bounded_and_complete(shape: list[int], item: int, limit: int) -> None:
    """Against the plainest oracle: the elements' numbers, taken out box by box, count up."""
    elements = torch.arange(math.prod(shape)).view(shape)
    taken = []
    for box in cuts(tuple(shape), item, limit):
        assert box.numel * item <= limit
        part = elements[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
        assert tuple(part.shape) == box.size
        taken += part.flatten().tolist()
    assert taken == list(range(math.prod(shape)))


BOUND = 100 << 20
"""The documented bound on what an export takes beside Python and torch."""

MEASURE = """
import sys
from pathlib import Path
from holdfast.engine.export import Request, export_checkpoint
import holdfast.engine.export_dcp
def peak():  # not getrusage, whose number a child inherits from the process that started it
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
before = peak()
export_checkpoint(Request(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], base=Path(sys.argv[4]) if sys.argv[4] else None))
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_memory_is_bounded(tmp_path: Path) -> None:
    """A checkpoint more than four times as large as the bound, one tensor of it larger than the bound.

    Of the optimizer's state accelerate wants a pickle, for which a tensor of it is mapped at a time.
    """
    from holdfast.core.boxes import Box
    from holdfast.core.layout import OptimizerSlot
    from holdfast.engine import rng, statetree
    from holdfast.engine.assemble import write_checkpoint
    from holdfast.engine.foreign import Held
    from holdfast.formats.foreign import Source
    from holdfast.storage import LocalFolder

    def ones(n: int, slot: OptimizerSlot | None = None) -> Held:
        shape = (n, 1024)
        return Held(Source(torch.float32, shape, lambda wanted: [(Box.whole(shape), lambda: torch.ones(shape))]), slot)

    rows = [40_000] + 8 * [5_000]
    tensors = {f"model.w{i}": ones(n) for i, n in enumerate(rows)}
    trained = list(tensors)[1:]
    tensors |= {f"optimizer.{name}.exp_avg": ones(5_000, OptimizerSlot("", name, "exp_avg")) for name in trained}
    group = {"params": trained, "values": statetree.encode({"lr": 0.1}, "", "", {})}
    state = {"optimizer": {"groups": [group], "values": {}}}
    small = {"state": state, "rng": rng.capture(), "step": 1, "rank": 0}
    nbytes = write_checkpoint(LocalFolder(tmp_path), "checkpoint-1", 1, tensors, {}, [small])
    assert nbytes > 4 * BOUND
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps({"model_type": "none"}))
    mapped = 5_000 * 1024 * 4
    for to, base, bound in (("transformers", str(tmp_path / "base"), BOUND), ("dcp", "", BOUND), ("accelerate", "", BOUND + mapped)):
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "checkpoint-1"), str(tmp_path / to), to, base]
        peak = 1024 * int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
        print(f"{to}: {peak:,} bytes beside {nbytes:,} exported")
        assert peak < bound
        shutil.rmtree(tmp_path / to)
