"""A Trainer's model in the layout that `from_pretrained` loads: whole weights of a sharded model, with no collective.

    save of the models alone, by all ranks  ->  rank 0 streams plain files out of it  ->  they are moved to their place, config last

The other ranks wait for rank 0's word in the store, as long as its heart beats: a slow disk is no reason for a collective's time
limit to end the run.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule

from holdfast.engine.checkpointer import Checkpointer
from holdfast.engine.deadlines import POLL
from holdfast.engine.export import Request, export_checkpoint
from holdfast.engine.names import unwrap
from holdfast.engine.store import Store
from holdfast.errors import DeadlineExceeded, SaveFailed

FOLDER = ".holdfast-model"
"""Below the run's folder: the small files of the model, and what is on its way. The next run starts it anew."""

PATIENCE = 300.0
"""Seconds in which all ranks have to call for a model during the training: less than the limit of the collective that they would be in."""

SILENCE = 120.0
"""Seconds without a heartbeat after which rank 0 is not waited for any more."""

_WEIGHTS = ("model", "adapter_model", "pytorch_model")
_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def is_adapter(model: Any) -> bool:
    """Whether PEFT has put an adapter around it."""
    return hasattr(unwrap(model), "peft_config")


def write_small_files(trainer: Any, folder: Path) -> None:
    """What belongs to the model beside its weights: configs and tokenizer. Rank 0 calls this."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model: Any = unwrap(trainer.model)
    if is_adapter(model):
        adapter = copy.copy(model.peft_config[model.active_adapters[0]])
        adapter.save_pretrained(str(folder))
    if getattr(model, "config", None) is not None and hasattr(model.config, "save_pretrained"):
        config = copy.deepcopy(model.config)
        kind = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
        if not is_adapter(model):
            config.architectures = [kind.__name__]
        config.save_pretrained(str(folder))
    if not is_adapter(model) and getattr(model, "can_generate", lambda: False)():
        model.generation_config.save_pretrained(str(folder))
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def write_sharded(
    trainer: Any, checkpointer: Checkpointer, root: Path, target: Path, number: int, patience: float, in_training: bool
) -> None:
    """Write the whole model to `target`; every rank calls this, and returns when it is there. After the training, rank 0 alone may.

    Raises:
        SaveFailed: a rank could not hand over its part, or rank 0 could not write; on all ranks.
        DeadlineExceeded: a rank that has to call this did not.
    """
    rank, store = int(trainer.args.process_index), checkpointer.peers()
    store.publish(f"script/model/{number}/{rank}", b"1")
    if in_training:
        _meet(store, number, int(trainer.args.world_size))
    folder, key = f"{FOLDER}/shards-{number}", f"script/model/{number}"
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    save = checkpointer.save(int(trainer.state.global_step), folder=folder, weights_only=True)
    if rank != 0:
        _await(store, key, rank)
        return
    try:
        if not save.finished.wait(patience):
            raise DeadlineExceeded(f"the weights were not handed over within {patience:.0f} s; look into the ranks' logs")
        if save.error is not None:
            raise save.error
        _export(trainer, root, root / folder, target)
    except Exception as error:
        store.publish(key, json.dumps({"problem": f"{type(error).__name__}: {error}"}).encode())
        raise
    store.publish(key, b"{}")
    shutil.rmtree(root / folder, ignore_errors=True)


def _meet(store: Store, number: int, world_size: int) -> None:
    """Until all ranks have called for the model as often.

    Raises:
        DeadlineExceeded: some have not; it names them, and what to do.
    """
    missing, end = list(range(world_size)), time.monotonic() + PATIENCE
    while missing := [r for r in missing if store.look(f"script/model/{number}/{r}") is None]:
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"save_model() was called here, and not on rank {', '.join(map(str, missing[:5]))} within {PATIENCE:.0f} s: during the training all "
                "ranks have to call it, outside of `if trainer.is_world_process_zero()`; after it rank 0 alone may"
            )
        time.sleep(POLL)


def _export(trainer: Any, root: Path, shards: Path, target: Path) -> None:
    base, whole = root / FOLDER / "base", root / FOLDER / "whole"
    write_small_files(trainer, base)
    shutil.rmtree(whole, ignore_errors=True)
    export_checkpoint(Request(shards, whole, "peft" if is_adapter(trainer.model) else "transformers", base=base))
    for path in base.iterdir():
        if not (whole / path.name).exists() and not (is_adapter(trainer.model) and path.name == "config.json"):
            shutil.copyfile(path, whole / path.name)
    target.mkdir(parents=True, exist_ok=True)
    written = {path.name for path in whole.iterdir()}
    for path in sorted(whole.iterdir(), key=lambda p: p.name == "config.json"):
        os.replace(path, target / path.name)
    for path in target.iterdir():  # weights of another run, in other files
        stem = path.name.partition(".")[0].partition("-")[0]
        if stem in _WEIGHTS and path.name.endswith(_SUFFIXES) and path.name not in written:
            path.unlink()
    whole.rmdir()


def _await(store: Store, key: str, rank: int) -> None:
    beat, end = None, time.monotonic() + SILENCE
    while True:
        has_ended = store.look("goodbye/0") is not None
        if (word := store.look(key)) is not None:
            break
        if (now := store.look("beat/0")) != beat:
            beat, end = now, time.monotonic() + SILENCE
        if has_ended:
            raise SaveFailed(f"rank {rank}: save_model() was called here and never on rank 0, which has ended: it is rank 0 that writes the model")
        if time.monotonic() > end:
            raise DeadlineExceeded(f"rank {rank}: rank 0 writes the model and has been silent for {SILENCE:.0f} s; look into its log")
        time.sleep(5 * POLL)
    problem = json.loads(word).get("problem")
    if problem:
        raise SaveFailed(f"rank {rank}: rank 0 could not write the model: {problem}")


