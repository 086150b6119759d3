"""From a checkpoint into the live objects, in three stages: match, read, install.

*Match* compares names, shapes and dtypes and finds the pieces of every tensor in the ranks' files, before any memory is
touched. *Read* fills parameters, buffers and the optimizer state that is there in place, and what is not there into new tensors,
file by file. *Install* hands the optimizers their state and the other objects theirs. No other rank is asked, and no optimizer
makes a step.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from holdfast.engine import fsdp1, rng, statetree
from holdfast.engine.base import origin_of
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.collect import Registered, encode_stateful, held_of
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.engine.fsdp1 import FlatPiece
from holdfast.engine.memory import without_collecting
from holdfast.engine.names import NamedState, extra_state_modules, join, named_state
from holdfast.engine.reading import Restore as Restore
from holdfast.engine.restore_optimizer import first_few, match_optimizer
from holdfast.errors import IncompatibleCheckpoint

log = logging.getLogger("holdfast")


@without_collecting()
def match(checkpoint: Checkpoint, registered: Registered) -> Restore:
    """Find where everything that this rank needs lies.

    Raises:
        IncompatibleCheckpoint: another model or optimizer, or a state that cannot go to this number of ranks.
        CorruptCheckpoint: the checkpoint's documents do not hold.
    """
    same_world = checkpoint.manifest.world_size == registered.world_size
    small = checkpoint.small(registered.rank if same_world else checkpoint.first)
    plan = Restore(checkpoint, registered, small, same_world)
    names = named_state(registered.models, registered.homes)
    _match_models(plan, names)
    for key, optimizer in registered.optimizers.items():
        if join("optimizer", key) not in checkpoint.left:
            match_optimizer(plan, key, optimizer, names)
    for key, value in registered.stateful.items():
        if key not in checkpoint.left:
            _match_stateful(plan, key, value)
    _match_modules(plan)
    _generators(plan)
    return plan


def read(plan: Restore) -> int:
    """Read all parts into their tensors; returns the bytes read from files.

    Raises:
        CorruptCheckpoint: a block is not what was written.
        IncompatibleCheckpoint: what should be one number in several files is not.
    """
    done = sum(plan.checkpoint.read(source, parts) for source, parts in sorted(plan.parts.items()))
    for check in plan.checks:
        check()
    return done


def install(plan: Restore) -> None:
    """Give the optimizers and the other objects what was read, and put the generators back."""
    for action in plan.install:
        action()
    for model in plan.registered.models.values():
        for module in model.modules():
            if isinstance(module, FSDPModule):  # a forward before the load has left its root unsharded, with the old values
                module.reshard()
        for root in model.modules():
            if isinstance(root, FullyShardedDataParallel):
                fsdp1.reshard(root)
    restore_rng(plan)
    saved, now = plan.checkpoint.manifest.world_size, plan.registered.world_size
    if plan.registered.rank == 0 and now > saved:
        new = f"rank {saved} is" if now == saved + 1 else f"ranks {saved} to {now - 1} are"
        log.info("%s new: their generators begin with a seed made of the saved one, the step and the rank", new)


def restore_rng(plan: Restore) -> None:
    """This rank's generators as they were saved; those of a rank that the saved run did not have, or not here, begin anew."""
    state = _generators(plan)
    if not isinstance(state, int):
        rng.put(state)
        return
    log.debug("rank %d: generators begin with seed %d", plan.registered.rank, state)
    rng.reseed(state)


def _generators(plan: Restore) -> rng.Generators | int:
    """The states of this rank's generators, or the seed that they begin with."""
    checkpoint, rank = plan.checkpoint, plan.registered.rank
    if rank in checkpoint.here:
        small = plan.small if plan.same_world else checkpoint.small(rank)
        return rng.parse(small["rng"], f"{checkpoint.where}: generators of rank {rank}")
    first = checkpoint.first
    what = f"{checkpoint.where}: generators of rank {first}"
    return rng.seed_for(checkpoint.small(first)["rng"], checkpoint.manifest.step, rank, what)


def _match_models(plan: Restore, names: NamedState) -> None:
    saved, where = plan.checkpoint.tensors, plan.checkpoint.where
    needed = {name: tensor for name, tensor in names.tensors.items() if name not in plan.checkpoint.left}
    source = {name: plan.saved_name(name) for name in needed}
    missing = [name for name, found in source.items() if found is None]
    known = {*names.tensors, *names.aliases}
    extra = [name for name in saved if name.partition(".")[0] == "model" and name not in known]
    if missing or extra:
        raise IncompatibleCheckpoint(
            f"{where} is a checkpoint of another model: "
            + "; ".join(f"{what} {first_few(odd)}" for what, odd in (("it lacks", missing), ("the model lacks", extra)) if odd)
        )
    found = {name: stored for name, stored in source.items() if stored is not None}
    differing = []
    for name, tensor in needed.items():
        spec, shape = plan.spec(found[name]), plan.saved_shape(found[name])
        if shape != tuple(tensor.shape) or DTYPE_OF[spec.dtype] != tensor.dtype:
            differing.append(f"{name}: {spec.dtype} {list(shape)} there, {str(tensor.dtype)[6:]} {list(tensor.shape)} here")
    if differing:
        raise IncompatibleCheckpoint(f"{where} does not fit the model: {first_few(differing)}")
    held = _held_by_base(plan, names, found)
    for name, tensor in needed.items():
        plan.add(found[name], plan.targets(name, tensor), kept=name in held)


def _held_by_base(plan: Restore, names: NamedState, found: dict[str, str]) -> set[str]:
    """The tensors that need no reading where the checkpoint names the base: they are what it holds. Tells the checkpoint where its
    base files are, as far as the model was loaded from them.

    Raises:
        IncompatibleCheckpoint: the model was loaded from another base.
    """
    bases, checkpoint = plan.registered.bases, plan.checkpoint
    held: set[str] = set()
    for name in found:
        tensor = names.tensors[name]
        named, origin = plan.spec(found[name]).base, origin_of(*names.places[name])
        if named is None or origin is None:
            continue
        if not checkpoint.rests_on_base(found[name], [box for box, _ in plan.targets(name, tensor)]):
            continue
        try:
            here = None if origin.size != named.file.size else bases.named(origin)
        except (OSError, EOFError):  # the folder is gone: the base may still be where the checkpoint knows it
            continue
        if here is None or (here.file.sha256, here.tensor) != (named.file.sha256, named.tensor):
            is_there = f"{named.file.file} of {checkpoint.base_files.noted} (sha256 {named.file.sha256[:12]}…)"
            told = f"sha256 {here.file.sha256[:12]}…" if here is not None else f"{origin.size:,} bytes, not {named.file.size:,}"
            raise IncompatibleCheckpoint(
                f"{checkpoint.where} rests on another base than the model: {name} is that of {is_there}, and was loaded from "
                f"{origin.file} of {origin.storage.describe()} ({told}). Load the model from the base that it was trained on"
            )
        checkpoint.base_files.know(named.file, origin.storage, origin.file)
        whole = not isinstance(tensor, FlatPiece) or tensor.part == (tensor.start, tensor.stop)
        if whole and bases.unchanged(origin, held_of(name, tensor)):
            held.add(name)
    return held


def _match_modules(plan: Restore) -> None:
    """What modules keep beside parameters and buffers (`get_extra_state`)."""
    saved = plan.small.get("state", {}).get("modules", {})
    for name, module in extra_state_modules(plan.registered.models).items():
        if name in plan.checkpoint.left:
            continue
        if name not in saved:
            raise IncompatibleCheckpoint(f"{plan.checkpoint.where} has no extra state of the module {name}")
        value = statetree.decode(saved[name], f"{plan.checkpoint.where}: extra state of {name}", plan.resolver())
        plan.install.append(partial(module.set_extra_state, value))


def _match_stateful(plan: Restore, key: str, value: Any) -> None:
    document = plan.small.get("state", {}).get(key)
    if key not in plan.small.get("state", {}):
        raise IncompatibleCheckpoint(f"{plan.checkpoint.where} has no state for {key}: it was saved without it")
    if not plan.same_world and key.partition(".")[0] == "dataloader" and not getattr(value, "any_world_size", False):
        raise IncompatibleCheckpoint(
            f"{plan.checkpoint.where} was saved by {plan.checkpoint.manifest.world_size} ranks, and the position of a "
            f"{type(value).__name__} is of one rank: continue on as many ranks, or use holdfast.DataLoader, whose position is global"
        )
    current: dict[str, torch.Tensor] = {}
    encode_stateful(key, value, current.__setitem__)
    in_place = not hasattr(value, "load_state_dict")
    decoded: Any = statetree.decode(document, f"{plan.checkpoint.where}: {key}", plan.resolver(current, in_place))
    kind = dict if isinstance(value, dict) else list
    if in_place and not issubclass(type(decoded), kind):
        raise IncompatibleCheckpoint(f"{plan.checkpoint.where} has a {type(decoded).__name__} for {key}, which is a {kind.__name__}")

    def install_value() -> None:
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(decoded)
        elif isinstance(value, dict):
            value.clear()
            value.update(decoded)
        else:
            value[:] = decoded

    plan.install.append(install_value)
