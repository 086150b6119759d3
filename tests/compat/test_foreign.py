"""Folders that accelerate, a Trainer and DCP wrote by themselves: imported offline, resumed on real ranks, equal to the bit."""

from __future__ import annotations

import json
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compat import foreign
from compat.foreign import State, build, optimizer_of

import holdfast
from holdfast import cli
from holdfast.engine.export import Request, export_checkpoint
from holdfast.engine.importer import import_checkpoint, order_of
from holdfast.errors import CheckpointNotFound, CorruptCheckpoint, IncompatibleCheckpoint, UsageError
from holdfast.formats.recognise import ACCELERATE, DCP, NATIVE, TRAINER, WEIGHTS, recognise
from holdfast.storage import LocalFolder
from holdfast.testing.pool import RankPool


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n]) or found[n].dtype != expected[n].dtype] == []


FORMS = [("1", "FULL_STATE_DICT"), ("1", "SHARDED_STATE_DICT")]
FORMS += [("2", "FULL_STATE_DICT"), ("2", "SHARDED_STATE_DICT"), ("2", "PER_RANK")]


@pytest.mark.parametrize(("version", "form"), [*FORMS, ("", "bin")])
def test_accelerate_imported_and_as_it_is(pool: RankPool, tmp_path: Path, version: str, form: str) -> None:
    """On the same ranks everything goes on where it stood, the generators too; on others all but theirs.

    A FULL checkpoint of FSDP1 was written without sync_module_states, which nobody needs here.
    """
    written: list[State] = pool.run(foreign.write_accelerate, 2, tmp_path / "foreign", version, form, safe=form != "bin")
    assert recognise(LocalFolder(tmp_path), "foreign") == ACCELERATE
    same: list[State] = pool.run(foreign.resume, 2, tmp_path / "a", f"fsdp{version}" if version else "ddp", path=tmp_path / "foreign")
    for rank in (0, 1):
        assert (same[rank].begun_at, same[rank].lr) == (3, written[rank].lr)
        assert same[rank].draws == written[rank].draws
        assert_equal(same[rank].tensors, written[0].tensors)
    assert recognise(LocalFolder(tmp_path / "a"), "checkpoint-4") == NATIVE  # and goes on as one of our own
    for state in pool.run(foreign.resume, 3, tmp_path / "b", "fsdp1-flat" if version else "fsdp2", path=tmp_path / "foreign"):
        assert_equal(state.tensors, written[0].tensors)
    imported = import_checkpoint(tmp_path / "foreign", tmp_path / "out")
    assert (imported.step, imported.ranks, imported.left_out) == (3, 2, [])
    (one,) = pool.run(foreign.resume, 1, tmp_path / "out")
    assert one.draws == written[0].draws
    assert_equal(one.tensors, written[0].tensors)


@pytest.mark.parametrize("form", ["PER_RANK", "LOCAL_STATE_DICT"])
def test_files_per_rank_of_fsdp1_are_refused(pool: RankPool, tmp_path: Path, form: str) -> None:
    """They hold a class whose unpickling runs code and asks the other ranks: told with the file, on every rank, nothing touched."""
    pool.run(foreign.write_accelerate, 2, tmp_path / "foreign", "1", form)
    with pytest.raises(IncompatibleCheckpoint, match=r"rank0\.bin is refused.*ShardedTensor"):
        import_checkpoint(tmp_path / "foreign", tmp_path / "out")
    for error in pool.run(foreign.resume, 2, tmp_path / "out", "fsdp1", path=tmp_path / "foreign", fails=True):
        assert re.search(r"IncompatibleCheckpoint: .*rank0\.bin is refused.*ShardedTensor", error)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_accelerate_under_ddp(pool: RankPool, tmp_path: Path, safe: bool) -> None:
    """The optimizer knows its parameters by number: names come from a live model, or from a file that kept their order."""
    written: list[State] = pool.run(foreign.write_accelerate, 2, tmp_path / "foreign", "", "", True, safe)
    model = build()
    order = order_of(model, optimizer_of(model)) if safe else None
    if safe:
        with pytest.raises(UsageError, match="--base FOLDER"):
            import_checkpoint(tmp_path / "foreign", tmp_path / "out")
    imported = import_checkpoint(tmp_path / "foreign", tmp_path / "out", order=order)
    assert (imported.step, imported.ranks, imported.left_out) == (3, 2, [])
    resumed: list[State] = pool.run(foreign.resume, 2, tmp_path / "out")
    for rank in (0, 1):
        assert resumed[rank].draws == written[rank].draws
        assert_equal(resumed[rank].tensors, written[0].tensors)
    counter = foreign.Counter()
    counter.count = 0
    with holdfast.Checkpointer(tmp_path / "out", model=model, extra={"custom_checkpoint_0": counter}) as checkpointer:
        checkpointer.resume("checkpoint-3")
    assert counter.count == 41


def test_two_models_and_back(pool: RankPool, tmp_path: Path) -> None:
    """Imported, resumed as lists, exported for accelerate again and loaded there."""
    (written,) = pool.run(foreign.write_two_models, 1, tmp_path / "foreign")
    import_checkpoint(tmp_path / "foreign", tmp_path / "out")
    models = [build(), torch.nn.Linear(3, 2)]
    optimizers = [optimizer_of(model) for model in models]
    with holdfast.Checkpointer(tmp_path / "out", model=models, optimizer=optimizers) as checkpointer:
        assert checkpointer.resume() == 1
    for model, optimizer, expected in zip(models, optimizers, written, strict=True):
        assert_equal(foreign.snapshot(model, optimizer), expected)
    export_checkpoint(Request(tmp_path / "out", tmp_path / "back", "accelerate"))
    (loaded,) = pool.run(foreign.load_two_models, 1, tmp_path / "back")
    for found, expected in zip(loaded, written, strict=True):
        assert_equal(found, expected)


def test_a_wrong_order_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(foreign.write_accelerate, 2, tmp_path / "foreign", "", "")
    names = [name for name, _ in build().named_parameters()]
    with pytest.raises(IncompatibleCheckpoint, match="has state of shape"):
        import_checkpoint(tmp_path / "foreign", tmp_path / "out", order=lambda _: [names[::-1]])
    with pytest.raises(IncompatibleCheckpoint, match=r"have \[11\] parameters, the model's order gives \[2\]"):
        import_checkpoint(tmp_path / "foreign", tmp_path / "out", order=lambda _: [names[:2]])
    assert not list(tmp_path.glob("out/*/manifest.json"))


@pytest.mark.parametrize("flattened", [False, True], ids=["nested", "flattened"])
def test_dcp(pool: RankPool, tmp_path: Path, flattened: bool) -> None:
    """As torch's tutorials save, and as torchtitan does."""
    written: list[State] = pool.run(foreign.write_dcp, 2, tmp_path / "foreign", flattened)
    assert recognise(LocalFolder(tmp_path), "foreign") == DCP
    imported = import_checkpoint(tmp_path / "foreign", tmp_path / "out")
    assert imported.step == 3  # of the optimizer, where it is not told
    (result,) = pool.run(foreign.resume, 1, tmp_path / "out", "fsdp2", False)
    assert_equal(result.tensors, written[0].tensors)
    for result in pool.run(foreign.resume, 3, tmp_path / "new", "fsdp1", True, tmp_path / "foreign"):
        assert (result.begun_at, result.lr) == (3, [1e-2])  # there is no scheduler in it: the one here stays as it is
        assert_equal(result.tensors, written[0].tensors)


def test_trainer(llama_folder: Path, tmp_path: Path) -> None:
    """A Llama that the Trainer trained goes on under Holdfast, by the command line, with the Trainer's two groups."""
    trainer = llama_trainer(llama_folder, tmp_path / "trainer")
    trainer.train()
    folder = tmp_path / "trainer/checkpoint-2"
    (folder / "samples").mkdir()
    (folder / "runs/december/first").mkdir(parents=True)  # as scripts leave them
    assert recognise(LocalFolder(folder.parent), folder.name) == TRAINER
    position = ["--samples_seen", "4", "--dataset_size", "9", "--seed", "7"]
    assert cli.main(["import", str(folder), str(tmp_path / "out"), *position]) == 0
    fresh = llama_trainer(llama_folder, tmp_path / "fresh")
    fresh.create_optimizer_and_scheduler(3)
    state: dict[str, Any] = {}
    with holdfast.Checkpointer(
        tmp_path / "new", model=fresh.model, optimizer=fresh.optimizer, lr_scheduler=fresh.lr_scheduler, extra={"trainer_state": state},
    ) as checkpointer:  # fmt: skip
        assert checkpointer.resume(folder) == 2
    assert_as_the_trainer(fresh, trainer, folder)
    assert state["global_step"] == 2
    fresh = llama_trainer(llama_folder, tmp_path / "fresh")
    fresh.create_optimizer_and_scheduler(3)
    loader = holdfast.DataLoader(list(range(9)), batch_size=2, seed=7)
    state = {}
    with holdfast.Checkpointer(
        tmp_path / "out", model=fresh.model, optimizer=fresh.optimizer, lr_scheduler=fresh.lr_scheduler,
        dataloader=loader, extra={"trainer_state": state},
    ) as checkpointer:  # fmt: skip
        assert checkpointer.resume() == 2
    assert_as_the_trainer(fresh, trainer, folder)
    assert loader.samples_seen == 4
    assert state["global_step"] == 2


def assert_as_the_trainer(fresh: Any, trainer: Any, folder: Path) -> None:
    assert_equal(fresh.model.state_dict(), trainer.model.state_dict())
    for p, q in zip(fresh.model.parameters(), trainer.model.parameters(), strict=True):
        assert_equal(fresh.optimizer.state[p], trainer.optimizer.optimizer.state[q])
    assert fresh.lr_scheduler.get_last_lr() == trainer.lr_scheduler.get_last_lr()
    saved = torch.load(folder / "rng_state.pth", weights_only=False)
    assert torch.equal(torch.get_rng_state(), saved["cpu"])
    assert random.getstate() == saved["python"]


def llama_trainer(llama_folder: Path, output: Path, adapter: bool = False) -> Any:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    if adapter:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    rows = [{"input_ids": torch.arange(3 + i, 11 + i), "labels": torch.arange(3 + i, 11 + i)} for i in range(9)]
    arguments = TrainingArguments(
        str(output), max_steps=2, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True,
        learning_rate=1e-2, weight_decay=0.1,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=rows)


@pytest.mark.parametrize(("version", "form"), [FORMS[0], FORMS[2], FORMS[3]])
def test_trainer_under_fsdp(pool: RankPool, llama_folder: Path, tmp_path: Path, version: str, form: str) -> None:
    """What the Trainer itself has saved goes on as it is: on its ranks with its generators, and under other shardings."""
    written: list[State] = pool.run(foreign.write_trainer, 2, llama_folder, tmp_path / "trainer", version, form)
    folder = tmp_path / "trainer/checkpoint-2"
    assert recognise(LocalFolder(folder.parent), folder.name) == TRAINER
    same: list[tuple[State, int]] = pool.run(foreign.resume_trainer, 2, llama_folder, folder, f"fsdp{version}")
    for rank, (state, global_step) in enumerate(same):
        assert (state.begun_at, global_step, state.lr, state.draws) == (2, 2, written[0].lr, written[rank].draws)
        assert_equal(state.tensors, written[0].tensors)
    if (version, form) == ("1", "FULL_STATE_DICT"):
        for state, _ in pool.run(foreign.resume_trainer, 3, llama_folder, folder, "fsdp2"):
            assert_equal(state.tensors, written[0].tensors)


def test_trainer_with_an_adapter(llama_folder: Path, tmp_path: Path) -> None:
    """The Trainer keeps the adapter alone; the weights below it come from the base."""
    trainer = llama_trainer(llama_folder, tmp_path / "trainer", adapter=True)
    trainer.train()
    folder = tmp_path / "trainer/checkpoint-2"
    assert cli.main(["import", str(folder), str(tmp_path / "out")]) == 2
    assert cli.main(["import", str(folder), str(tmp_path / "out"), "--base", str(llama_folder)]) == 0
    for where, path in (("out", None), ("new", folder)):  # as it is, it needs no base: the live model has it
        fresh = llama_trainer(llama_folder, tmp_path / "fresh", adapter=True)
        fresh.create_optimizer_and_scheduler(3)
        with holdfast.Checkpointer(tmp_path / where, model=fresh.model, optimizer=fresh.optimizer) as checkpointer:
            assert checkpointer.resume(path) == 2
        assert_as_trained_with_adapter(fresh, trainer)


def assert_as_trained_with_adapter(fresh: Any, trainer: Any) -> None:
    assert_equal(fresh.model.state_dict(), trainer.model.state_dict())
    for p, q in zip(fresh.model.parameters(), trainer.model.parameters(), strict=True):
        assert p.dtype == q.dtype
        assert p.requires_grad == q.requires_grad
        assert_equal(fresh.optimizer.state.get(p, {}), trainer.optimizer.optimizer.state.get(q, {}))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_hugging_face_weights_in_several_files(llama_folder: Path, tmp_path: Path, form: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    if form == "safetensors":
        model.save_pretrained(tmp_path / "weights", max_shard_size="100KB")
    else:  # as transformers wrote it before version 5
        (tmp_path / "weights").mkdir()
        where = {}
        for i, name in enumerate(model.state_dict()):
            where[name] = f"pytorch_model-{i % 2 + 1:05d}-of-00002.bin"
        for file in set(where.values()):
            torch.save({n: t for n, t in model.state_dict().items() if where[n] == file}, tmp_path / "weights" / file)
        (tmp_path / "weights/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    assert len(list(tmp_path.glob(f"weights/*.{form}"))) > 1
    assert recognise(LocalFolder(tmp_path), "weights") == WEIGHTS
    imported = import_checkpoint(tmp_path / "weights", tmp_path / "out")
    assert imported.step == 0
    assert recognise(LocalFolder(tmp_path / "out"), "checkpoint-0") == NATIVE
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    for where, path in (("out", None), ("new", tmp_path / "weights")):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        optimizer = torch.optim.AdamW(model.parameters())  # which begins anew
        with holdfast.Checkpointer(tmp_path / where, model=model, optimizer=optimizer if path else None) as checkpointer:
            assert checkpointer.resume(path) == 0
        assert_equal(model.state_dict(), expected)
    message = r"float32 there and torch\.bfloat16 here.*load_pretrained"
    with holdfast.Checkpointer(tmp_path / "half", model=model.bfloat16()) as half, pytest.raises(IncompatibleCheckpoint, match=message):
        half.resume(tmp_path / "weights")


class Evil:
    """What a stranger's pickle may hold: a call that unpickling makes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("evil-was-here"),)


def single(folder: Path, **state: Any) -> Path:
    """A folder like accelerate's of one process."""
    folder.mkdir()
    model = build()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer_of(model).state_dict(), folder / "optimizer.bin")
    torch.save({"step": 0, "random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}, folder / "random_states_0.pkl")
    for name, value in state.items():
        torch.save(value, folder / name)
    return folder


def test_pickles_that_could_run_code_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = single(tmp_path / "a", **{"custom_checkpoint_0.pkl": Evil(), "sampler.bin": Evil()})
    imported = import_checkpoint(folder, tmp_path / "out", step=5)
    assert imported.step == 5
    assert len(imported.left_out) == 2
    assert all("is refused" in line and ("sampler.bin" in line or "custom_checkpoint_0.pkl" in line) for line in imported.left_out)
    torch.save({"a": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(IncompatibleCheckpoint, match=r"pytorch_model\.bin is refused"):
        import_checkpoint(folder, tmp_path / "out2", step=5)
    dcp = tmp_path / "dcp"
    dcp.mkdir()


    (dcp / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(IncompatibleCheckpoint, match=r"\.metadata is refused"):
        import_checkpoint(dcp, tmp_path / "out3", step=5)
    assert not (tmp_path / "evil-was-here").exists()


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="there is no folder"):
        import_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match="no checkpoint of a known kind"):
        import_checkpoint(tmp_path / "empty", tmp_path / "out")
    folder = single(tmp_path / "runs")
    with pytest.raises(UsageError, match="--step N"):
        import_checkpoint(folder, tmp_path / "out")
    with pytest.raises(CheckpointNotFound, match=r"give one of .*runs"):
        import_checkpoint(tmp_path, tmp_path / "out")
    data = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptCheckpoint, match=r"pytorch_model\.bin cannot be read"):
        import_checkpoint(folder, tmp_path / "out", step=1)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointNotFound, match="holds no model that is read"):
        import_checkpoint(folder, tmp_path / "out", step=1)


def test_a_damaged_dcp_folder_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(foreign.write_dcp, 2, tmp_path / "foreign", False)
    (first, *_) = sorted((tmp_path / "foreign").glob("*.distcp"))
    first.write_bytes(first.read_bytes()[:2000])
    with pytest.raises(CorruptCheckpoint, match="cut short"):
        import_checkpoint(tmp_path / "foreign", tmp_path / "out")
    for error in pool.run(foreign.resume, 2, tmp_path / "new", path=tmp_path / "foreign", fails=True):
        assert re.search(rf"CorruptCheckpoint: .*{first.name} is cut short.*", error)  # though rank 1 needs nothing of it
    first.unlink()
    with pytest.raises(CorruptCheckpoint, match="missing"):
        import_checkpoint(tmp_path / "foreign", tmp_path / "out")
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_a_rank_reads_its_own_part_only(pool: RankPool, tmp_path: Path, form: str) -> None:
    """Of 8 MiB in one matrix, written by 2 ranks, each of 3 reads a third, and pages and descriptions beside it."""
    pool.run(foreign.write_matrix, 2, tmp_path / "foreign", form)
    for rank, (read, held, equal) in enumerate(pool.run(foreign.read_matrix, 3, tmp_path / "foreign")):
        assert equal, rank
        assert held > 2 << 20
        assert held <= read < held + (64 << 10)


def test_exporting_a_foreign_checkpoint_says_to_import_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = single(tmp_path / "a")
    assert cli.main(["export", str(folder), str(tmp_path / "out"), "--to", "dcp"]) == 2
    assert f"holdfast import {folder}" in capsys.readouterr().err
