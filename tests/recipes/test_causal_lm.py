"""The causal-lm recipe: its flags, its stream, and runs on real ranks that are killed and go on."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.cli import main as command
from holdfast.errors import UsageError
from holdfast.recipes import causal_lm as recipe
from holdfast.testing import RankPool
from holdfast.testing.pool import Died
from holdfast.training import text_trainer  # noqa: F401 (what the ranks need is imported once, before they are forked)
from holdfast.training.text_data import PackedTexts
from holdfast.training.text_stream import TextStream

WORDS = ["what", "was", "learned", "is", "not", "lost", "while", "the", "run", "goes", "on", "from", "where", "it", "stood"]


def lines(count: int) -> list[str]:
    draw = random.Random(3)
    return [" ".join([str(i), *draw.choices(WORDS, k=draw.randrange(0, 12))]) for i in range(count)]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join(lines(700)) + "\n")
    return path


# -- blocks of tokens


@pytest.mark.parametrize("kept", [range(50), [*range(40, 50), *range(0, 30, 2)], []])
def test_blocks_are_the_texts_end_to_end(kept):
    rows = [[100 * i + j for j in range(i * 7 % 11)] for i in range(50)]
    parts = [datasets.Dataset.from_dict({"input_ids": rows[i : i + 20]}) for i in range(0, 50, 20)]
    texts = datasets.concatenate_datasets(parts).select(list(kept))
    expected = [token for i in kept for token in rows[i]]
    blocks = PackedTexts(texts, 8, None)
    assert len(blocks) == len(expected) // 8
    for read in (blocks, pickle.loads(pickle.dumps(blocks))):
        found = [read[i] for i in range(len(read))]
        assert [token for block in found for token in block["input_ids"].tolist()] == expected[: len(blocks) * 8]
        assert all(torch.equal(block["labels"], block["input_ids"]) and block["labels"].dtype == torch.int64 for block in found)
    with pytest.raises(IndexError):
        blocks[len(blocks)]
    assert len(PackedTexts(texts, 8, 2)) == min(2, len(blocks))


# -- the stream


def stream_of(path: Path, **changed: Any) -> TextStream:
    source = datasets.load_dataset("text", data_files={"train": str(path)}, streaming=True)["train"]
    defaults = {"block_size": 7, "batch_size": 3}
    return TextStream(source, "text", lambda text: [ord(c) for c in text + "\n"], **{**defaults, **changed})


def blocks_of(stream: TextStream, batches: int) -> list[list[int]]:
    found = iter(stream)
    return [row for _ in range(batches) for row in next(found)["input_ids"].tolist()]


@pytest.mark.parametrize("buffer", [0, 50])
def test_a_stream_goes_on_exactly_from_anywhere(text_file, buffer):
    expected = blocks_of(stream_of(text_file, buffer=buffer), 1200)  # more than one epoch
    text = sorted(chr(c) for row in expected for c in row)
    assert len(set(text)) > 20
    first = stream_of(text_file, buffer=buffer)
    batches, taken = iter(first), 0
    for count in (0, 1, 4, 300, 900):
        for _ in range(count - taken):
            next(batches)
        taken = count
        state = json.loads(json.dumps(first.state_dict()))
        other = stream_of(text_file, buffer=buffer)
        other.load_state_dict(state)
        assert blocks_of(other, 60) == expected[3 * count : 3 * (count + 60)], count


@pytest.mark.parametrize("buffer", [0, 50])
def test_ranks_share_the_texts_and_no_token_is_lost(text_file, buffer):
    """Each text is one rank's, in training or in validation, and their tokens are all there."""
    split = {"is_trained": lambda index: index % 100 >= 5}
    shares = []
    for rank in range(3):
        stream = stream_of(text_file, buffer=buffer, rank=rank, world_size=3, **split)
        mine = [line + "\n" for i, line in enumerate(line for j, line in enumerate(lines(700)) if j % 100 >= 5) if i % 3 == rank]
        size = sum(map(len, mine))
        tokens = [c for row in blocks_of(stream, size // 21) for c in row]
        text = "".join(map(chr, tokens))
        if not buffer:
            assert text == "".join(mine)[: len(text)]
        shares += [line + "\n" for line in text.split("\n")[:-1]]
        assert set(shares[-50:]) <= set(mine)
        assert size - len(tokens) < 21
    assert len(shares) == len(set(shares))
    assert len(shares) > 700 * 0.95 - 20


def test_a_stream_refuses_another_cut_and_no_text(text_file, tmp_path):
    state = stream_of(text_file).state_dict()
    with pytest.raises(UsageError, match="--block_size is 8, and was 7"):
        stream_of(text_file, block_size=8).load_state_dict(state)
    (tmp_path / "short.txt").write_text("a\nb\n")
    with pytest.raises(UsageError, match="rank 2 of 3 found no text"):
        next(iter(stream_of(tmp_path / "short.txt", rank=2, world_size=3)))


def test_a_limit_begins_the_stream_anew(text_file):
    limited = blocks_of(stream_of(text_file, limit=4), 4)
    assert limited[:4] == limited[4:8] == limited[8:12]


# -- flags


def test_help_and_wrong_flags_need_no_torch():
    """And what is wrong is told at once, all of it."""
    code = "import sys; from holdfast.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, "train", "causal-lm", *flags], capture_output=True, text=True, timeout=60)

    shown = run("--help")
    assert shown.returncode == 0
    for flag in ("--model_name_or_path", "--block_size", "--cpu_fsdp", "--save_total_limit", "--fsdp_config"):
        assert flag in shown.stdout
    wrong = run("--blok_size", "3", "--do_trian")
    assert wrong.returncode == 2
    assert "did you mean --block_size?" in wrong.stderr
    assert "did you mean --do_train?" in wrong.stderr
    many = run("--do_train", "--streaming", "--train_file", "nowhere.txt", "--config_overrides", "a=1", "--model_name_or_path", "/nowhere")
    assert many.returncode == 2
    for part in ("--config_overrides is for", "no such file", "/nowhere: there is no such folder", "needs --max_steps"):
        assert part in many.stderr
    assert "--block_size" in run("--block_size", "many").stderr


def test_the_old_spelling_is_read_and_warned_of(tmp_path):
    (tmp_path / "fsdp.json").write_text('{"version": 1}')
    config = recipe.parse(
        ["--do_train", "--fsdp", "full_shard auto_wrap", "--fsdp_transformer_layer_cls_to_wrap=LlamaDecoderLayer", "--fsdp_config", str(tmp_path / "fsdp.json")]
    )
    told = json.loads(config.given("fsdp_config"))
    nothing_synced = {"sync_module_states": False, "cpu_ram_efficient_loading": False}
    assert told == {"version": 1, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **nothing_synced}
    assert len(config.warnings) == 2
    (tmp_path / "flags.json").write_text(json.dumps({"do_train": True, "block_size": 8, "fsdp_config": {"version": 2}, "fsdp": True}))
    again = recipe.parse([str(tmp_path / "flags.json")])
    assert again.trains
    assert (again.data.block_size, json.loads(again.given("fsdp_config"))["version"], again.warnings) == (8, 2, [])


# -- runs


class Dies(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            while not Path(args.output_dir, "checkpoint-4/trainer_state.json").is_file():
                pass
            os.kill(os.getpid(), signal.SIGKILL)


def train(flags: list[str], dies: bool = False) -> dict[str, Any]:
    """The recipe on this rank; rank 0 returns what it logged."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    datasets.disable_progress_bars()
    if dies:
        transformers.trainer.DEFAULT_CALLBACKS.append(Dies)
    assert command(["train", "causal-lm", *flags]) == 0
    output = Path(flags[flags.index("--output_dir") + 1])
    if os.environ["RANK"] != "0" or not (output / "trainer_state.json").is_file():
        return {}
    return json.loads((output / "trainer_state.json").read_text())


def losses(state: dict[str, Any]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in state["log_history"] if "loss" in line}


def flags_for(model: Path, text: Path, output: Path) -> list[str]:
    """The command that people run, with sizes for a test."""
    return (
        f"--model_name_or_path {model} --train_file {text} --streaming --per_device_train_batch_size 2 "
        f"--gradient_accumulation_steps 1 --do_train --max_steps 6 --output_dir {output} --block_size 16 --save_steps 2 "
        "--save_total_limit 1 --tf32 True --bf16 True --gradient_checkpointing --logging_steps 1 --learning_rate 1e-2 "
        "--do_eval --max_eval_samples 4 --disable_tqdm True --cpu_fsdp"
    ).split()


def sharded(version: int, form: str) -> list[str]:
    config = {"version": version, "state_dict_type": form}
    return ["--fsdp", "full_shard auto_wrap", "--fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer", "--fsdp_config", json.dumps(config)]


def whole(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("version", [1, 2])
def test_killed_and_resumed(pool: RankPool, llama_folder, text_file, tmp_path, version):
    """FULL and SHARDED; the same losses and the same model as a run left alone. Kept are the last and the one that was resumed from."""
    alone = flags_for(llama_folder, text_file, tmp_path / "alone") + sharded(version, "FULL_STATE_DICT")
    expected = losses(pool.run(train, 2, alone)[0])
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert expected[6] < expected[1]
    assert [path.name for path in (tmp_path / "alone").glob("checkpoint-*")] == ["checkpoint-6"]
    model = whole(tmp_path / "alone")
    for form in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        output = tmp_path / form
        flags = flags_for(llama_folder, text_file, output) + sharded(version, form)
        assert Died(signal.SIGKILL) in pool.run(train, 2, flags, dies=True, expect_death=True)
        assert not (output / "model.safetensors").exists()
        assert losses(pool.run(train, 2, [*flags, "--resume_from_checkpoint"])[0]) == expected
        assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
        again = whole(output)
        assert again.keys() == model.keys()
        assert all(torch.equal(again[name], model[name]) for name in model)
        assert AutoTokenizer.from_pretrained(output).vocab_size > 200
        evaluated = [json.loads((folder / "eval_results.json").read_text()) for folder in (tmp_path / "alone", output)]
        assert evaluated[0]["eval_loss"] == evaluated[1]["eval_loss"] > 0


def test_one_process_over_files_with_an_evaluation(pool: RankPool, llama_folder, text_file, tmp_path):
    """Without FSDP and without a stream: blocks of all tokens, the validation's part among none of them."""
    flags = flags_for(llama_folder, text_file, tmp_path / "out")
    flags = [word for word in flags if word not in ("--streaming", "--cpu_fsdp")]
    state = pool.run(train, 1, flags)[0]
    assert sorted(losses(state)) == [1, 2, 3, 4, 5, 6]
    results = json.loads((tmp_path / "out/all_results.json").read_text())
    assert results["eval_samples"] == 4
    assert results["train_samples"] == 12
    assert results["perplexity"] == pytest.approx(2.718281828 ** results["eval_loss"], rel=1e-4)
    assert whole(tmp_path / "out").keys() == whole(llama_folder).keys()
