"""The parts of `holdfast run` in one process: the table of replacements, the guard, presence, hooks, and `attach`."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration

import holdfast
from holdfast.cli import main
from holdfast.engine.resume import survey
from holdfast.engine.store import LocalStore
from holdfast.errors import CheckpointNotFound, HoldfastError, UsageError
from holdfast.integrations import drop_in, replacements
from holdfast.integrations import presence as presence_module
from holdfast.integrations.accelerate import attach
from holdfast.integrations.deletion import Guard
from holdfast.integrations.lone_forward import LoneForwards
from holdfast.integrations.presence import Presence
from holdfast.storage import LocalFolder


@pytest.fixture
def undone() -> Iterator[None]:
    """Everything as it was before, for the tests that follow in this process."""
    yield
    for attached in drop_in.everybody:
        attached.abandon()
    drop_in.everybody.clear()
    drop_in.replaced.undo()
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def checkpoints(folder: Path, *steps: int) -> None:
    model = torch.nn.Linear(2, 2)
    with holdfast.Checkpointer(folder, model=model) as checkpointer:
        for step in steps:
            checkpointer.save(step)
            checkpointer.wait()


# -- the table


def test_explain_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)")
    assert main(["run", "--explain", str(script)]) == 0
    said = capsys.readouterr().out
    assert f"accelerate.Accelerator.save_state  (accelerate {accelerate.__version__})" in said
    assert all(row.does in said for row in replacements.TABLE)


def test_wrong_calls_are_answered_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path / "none.py")]) == 2
    assert main(["run"]) == 2
    assert main(["run", "--explian", "x.py"]) == 2
    said = capsys.readouterr().err
    assert "there is no script" in said
    assert "Which script?" in said
    assert "did you mean --explain?" in said


def test_the_exit_code_of_a_script_is_its_own(tmp_path: Path, undone: None) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit(7)")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(script)])
    assert ended.value.code == 7
    script.write_text("import sys\nassert sys.argv[1:] == ['--a', '1'] and __name__ == '__main__'")
    assert main(["run", str(script), "--a", "1"]) == 0
    drop_in.take_all = False


def test_what_cannot_be_replaced_stops_before_the_training(monkeypatch: pytest.MonkeyPatch, undone: None) -> None:
    original = Accelerator.save_state
    monkeypatch.setattr(Accelerator, "save_state", lambda self, folder: None)
    monkeypatch.delattr(Accelerator, "end_training")
    with pytest.raises(UsageError, match=r"(?s)save_state has no parameter output_dir.*end_training is not there"):
        drop_in.install()
    assert Accelerator.load_state.__module__ == "accelerate.accelerator"
    assert not hasattr(Accelerator.load_state, "__wrapped__")
    monkeypatch.setattr(Accelerator, "save_state", original)


def test_a_release_that_was_never_tried_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replacements.never_tried("accelerate") is None
    monkeypatch.setattr(replacements, "version_of", lambda package: "9.1.0")
    assert "never tried with accelerate 9.1.0 (tried: 1.15)" in str(replacements.never_tried("accelerate"))


def test_replacements_can_be_taken_out_again(undone: None) -> None:
    before = Accelerator.save_state, shutil.rmtree
    drop_in.install()
    assert Accelerator.save_state is not before[0]
    assert shutil.rmtree is not before[1]
    drop_in.replaced.undo()
    assert (Accelerator.save_state, shutil.rmtree) == before


# -- the guard


def test_the_last_complete_checkpoint_stays_until_a_newer_one_is_there(tmp_path: Path) -> None:
    checkpoints(tmp_path, 1, 2)
    known = {tmp_path / "checkpoint-1": False, tmp_path / "checkpoint-2": False}
    guard = Guard(lambda: known)
    guard.rmtree(shutil.rmtree, tmp_path / "checkpoint-1")
    assert not (tmp_path / "checkpoint-1").exists()
    guard.rmtree(shutil.rmtree, str(tmp_path / "checkpoint-2"))
    guard.rmtree(shutil.rmtree, tmp_path)  # nor with the folder around it
    assert [c.step for c in survey(LocalFolder(tmp_path)).complete] == [2]
    known[tmp_path / "checkpoint-3"] = True
    (tmp_path / "checkpoint-3").mkdir()
    guard.settle()  # 3 is still being written
    guard.rmtree(shutil.rmtree, tmp_path / "checkpoint-3")
    assert (tmp_path / "checkpoint-2").exists() and (tmp_path / "checkpoint-3").exists()
    checkpoints(tmp_path, 3)
    known[tmp_path / "checkpoint-3"] = False
    guard.settle()
    assert not (tmp_path / "checkpoint-2").exists()
    assert [c.step for c in survey(LocalFolder(tmp_path)).complete] == [3]


def test_the_checkpoint_of_another_program_stays_until_there_is_one_of_ours(tmp_path: Path) -> None:
    foreign = tmp_path / "checkpoint-1"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"weights")
    guard = Guard(lambda: {foreign: False, tmp_path / "checkpoint-2": False})
    guard.rmtree(shutil.rmtree, foreign)
    assert foreign.exists()
    checkpoints(tmp_path, 2)
    guard.settle()
    assert not foreign.exists()


def test_several_ranks_may_delete_the_same_folder_at_once(tmp_path: Path) -> None:
    checkpoints(tmp_path, 1, 2)
    guards = [Guard(lambda: {tmp_path / f"checkpoint-{n}": False for n in (1, 2)}) for _ in range(2)]
    for guard in guards:
        guard.rmtree(shutil.rmtree, tmp_path / "checkpoint-1")  # the second finds nothing, and raises nothing
    with pytest.raises(FileNotFoundError):
        guards[0].rmtree(shutil.rmtree, tmp_path / "elsewhere")


# -- presence


class Two:
    """Two ranks of one process, over one store."""

    def __init__(self) -> None:
        store = LocalStore()
        self.ranks = [Presence(store, store, rank, 2) for rank in range(2)]

    def __enter__(self) -> list[Presence]:
        return self.ranks

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.close()


def at_once(*calls: Any) -> list[Any]:
    answers: list[Any] = [None] * len(calls)

    def ask(i: int) -> None:
        answers[i] = calls[i]()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return answers


def test_ranks_that_come_to_the_same_forward_go_on_together() -> None:
    with Two() as (a, b):
        for rank in (a, b):
            rank.forward()
        assert at_once(a.together, b.together) == [True, True]
        assert a.together()  # and again, without asking
        a.mark()
        b.mark()
        assert at_once(a.together, b.together) == [True, True]


@pytest.mark.parametrize("elsewhere", ["forward", "mark", "end"])
def test_a_rank_that_others_have_passed_by_is_alone(elsewhere: str) -> None:
    with Two() as (a, b):
        getattr(b, elsewhere)()
        assert a.together() is False
        if elsewhere == "mark":  # who comes there later hears the same
            a.mark()
            assert at_once(a.together, b.together) == [True, True]


def test_a_rank_that_comes_late_hears_what_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "PATIENCE", 0.3)
    with Two() as (a, b):
        assert a.together() is False
        assert b.together() is False


def test_a_rank_that_begins_later_is_waited_for() -> None:
    store = LocalStore()
    a = Presence(store, store, 0, 2)
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(a.together()))
    asking.start()
    asking.join(0.3)
    assert (asking.is_alive(), answers) == (True, [])
    b = Presence(store, store, 1, 2)
    assert b.together() is True
    asking.join(5)
    assert answers == [True]
    for rank in (a, b):
        rank.close()


def test_a_barrier_waits_for_all() -> None:
    with Two() as (a, b):
        done: list[str] = []
        waiting = threading.Thread(target=lambda: (a.barrier(), done.append("a")))
        waiting.start()
        waiting.join(0.3)
        assert done == []
        b.barrier()
        waiting.join(5)
        assert done == ["a"]


def test_a_barrier_waits_for_a_rank_as_long_as_its_heart_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "SILENCE", 0.8)
    store = LocalStore()
    rank = Presence(store, store, 0, 2)
    waiting = threading.Thread(target=rank.barrier)
    waiting.start()
    for beat in range(16):  # twice the silence
        store.publish("beat/1", str(beat).encode())
        waiting.join(0.1)
        assert waiting.is_alive()
    waiting.join(5)
    assert not waiting.is_alive()
    rank.close()


def test_barriers_leave_no_keys_behind() -> None:
    with Two() as (a, b):
        for _ in range(5):
            at_once(a.barrier, b.barrier)
        assert {key.split("/")[2] for key in a._ask._values if key.startswith("script/barrier/")} == {"4", "5"}


# -- a forward on one rank alone


class Alone:
    """Stands for the other ranks, which do not come."""

    rank = 0

    def forward(self) -> None:
        pass

    def together(self) -> bool:
        return False


@pytest.fixture
def watched() -> tuple[LoneForwards, torch.nn.Module]:
    model = torch.nn.Linear(2, 2)
    forwards = LoneForwards()
    forwards.presence = Alone()  # type: ignore[assignment]
    forwards.watch(model)
    return forwards, model


def test_the_outermost_function_that_is_not_the_training_is_left(watched: tuple[LoneForwards, torch.nn.Module]) -> None:
    forwards, model = watched
    reached: list[str] = []

    def picture() -> torch.Tensor:
        with torch.no_grad():
            return model(torch.ones(1, 2))  # type: ignore[no-any-return]

    picture = forwards._surviving(picture)  # type: ignore[arg-type]

    def log_validation() -> list[torch.Tensor]:
        images = [picture()]
        reached.append("logged")
        return images

    validate = forwards._surviving(log_validation)  # type: ignore[arg-type]

    def train() -> str:
        model(torch.ones(1, 2)).sum().backward()
        assert validate() is None
        model(torch.ones(1, 2)).sum().backward()
        return "trained"

    forwards.training.add(train.__code__)
    assert forwards._surviving(train)() == "trained"  # type: ignore[arg-type]
    assert reached == []
    assert [line.rpartition("<locals>.")[2] for line in forwards.skipped] == ["log_validation() of test_drop_in.py"]


def test_without_anything_around_it_the_run_ends_with_a_message(watched: tuple[LoneForwards, torch.nn.Module]) -> None:
    _, model = watched
    with torch.no_grad(), pytest.raises(HoldfastError, match="a forward of the sharded Linear on this rank alone"):
        model(torch.ones(1, 2))


def test_a_pipeline_returns_a_black_picture(
    watched: tuple[LoneForwards, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards, model = watched

    class Pipeline:
        components: ClassVar[dict[str, Any]] = {"unet": model}

        def __call__(self) -> Any:
            with torch.no_grad():
                return self.components["unet"](torch.ones(1, 2))

    class Owner:
        def owns(self, module: Any) -> bool:
            return module is model

    owner: Any = Owner()
    owner.forwards = forwards
    monkeypatch.setattr(drop_in, "everybody", [owner])
    drop_in._survive(Pipeline)
    assert Pipeline()().images[0].getextrema() == ((0, 0), (0, 0), (0, 0))
    assert forwards.skipped == ["a call of Pipeline (a black picture stands for its result)"]


# -- attach


class Position:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def training(folder: Path, steps: int, resume: bool = False, engine: bool = True, shuffle: bool = False) -> tuple[list[float], int, list[torch.Tensor]]:
    """Two models with an optimizer each, a registered object, and accelerate's own names for checkpoints."""
    settings = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=settings)
    torch.manual_seed(3)
    models = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in models]
    loader = torch.utils.data.DataLoader(torch.arange(24.0).reshape(8, 3) / 24, batch_size=1, shuffle=shuffle)
    position = Position()
    accelerator.register_for_checkpointing(position)
    a, b, first, second, batches = accelerator.prepare(*models, *optimizers, loader)
    attached = attach(accelerator) if engine else None
    if resume:
        accelerator.load_state()
    losses = []
    for batch in accelerator.skip_first_batches(batches, position.value):
        if position.value == steps:
            break
        loss = (b(a(batch)) - torch.randn(1)).square().sum()
        accelerator.backward(loss)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        position.value += 1
        losses.append(loss.item())
        if position.value % 2 == 0:
            accelerator.save_state()
    accelerator.end_training()
    assert attached is None or attached.failed is None
    return losses, position.value, [p.detach().clone() for m in models for p in m.parameters()]


def again() -> None:
    drop_in.everybody.clear()
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def test_attach_keeps_everything_that_was_registered_and_the_order_of_a_shuffled_epoch(tmp_path: Path, undone: None) -> None:
    whole = training(tmp_path / "whole", 6, shuffle=True)
    again()
    part = training(tmp_path / "part", 4, shuffle=True)
    again()
    rest = training(tmp_path / "part", 6, resume=True, shuffle=True)
    assert part[0] + rest[0] == whole[0]
    assert rest[1] == 6
    assert all(torch.equal(x, y) for x, y in zip(rest[2], whole[2], strict=True))
    # total_limit 1, counted on after the resume, and never none
    assert [c.folder for c in survey(LocalFolder(tmp_path / "part" / "checkpoints")).complete] == ["checkpoint_2"]


def test_attach_goes_on_from_what_accelerate_has_saved(tmp_path: Path, undone: None) -> None:
    whole = training(tmp_path / "whole", 6)
    again()
    drop_in.replaced.undo()
    training(tmp_path / "part", 4, engine=False)
    assert (tmp_path / "part" / "checkpoints" / "checkpoint_1" / "model_1.safetensors").exists()
    again()
    rest = training(tmp_path / "part", 6, resume=True)
    assert rest[0] == whole[0][4:]
    assert all(torch.equal(x, y) for x, y in zip(rest[2], whole[2], strict=True))
    assert [c.folder for c in survey(LocalFolder(tmp_path / "part" / "checkpoints")).complete] == ["checkpoint_2"]


def test_weights_that_only_a_hook_of_the_script_has_written_are_told(tmp_path: Path, undone: None) -> None:
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    torch.save({"step": 2}, folder / "random_states_0.pkl")
    (folder / "net").mkdir()
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
    accelerator.register_load_state_pre_hook(lambda models, input_dir: models.clear())
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attach(accelerator)
    with pytest.raises(CheckpointNotFound, match="a save hook of the script has written the weights in a form of its own"):
        accelerator.load_state(str(folder))
    assert folder.exists()


def test_deepspeed_is_left_alone(monkeypatch: pytest.MonkeyPatch, undone: None, caplog: pytest.LogCaptureFixture) -> None:
    class Engine:
        class distributed_type:
            value = "DEEPSPEED"

    monkeypatch.setattr(drop_in, "take_all", True)
    with caplog.at_level("WARNING", logger="holdfast"):
        assert [drop_in._prepare(lambda self: "prepared", Engine()) for _ in range(1)] == ["prepared"]
    assert "DEEPSPEED keeps its own state" in caplog.text
