"""What the last collect found, kept for the next save, and the proof that it still holds.

To find, name and describe every tensor costs some microseconds each, and of a state of many tensors next to nothing changes
between two saves. So the tensors are bound once; a later save reads through the same places (the dicts of every module, the
optimizers' groups and state) and compares what is there with what was there, list by list, in the interpreter's own loops.
Anything that differs, and the state is collected anew. Nothing is believed from memory: an object counts as the same only if it
is at the same address and has not died since, and its storage, shape, dtype and device are compared, too.

FSDP2 keeps its shards beside the modules, and takes a new one only from what a module shows (`reset_sharded_param`). So nothing is
bound unless the modules show just those shards, and then it is enough to see that they still do.

A tensor that its owner lets go is not kept alive: what is held of it is its local data, and the death of the owner (a
parameter, a buffer, a tensor of an optimizer's state) drops the binding at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, call, eq, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.core.layout import TensorSpec
from holdfast.engine.base import ATTRIBUTE, Origin
from holdfast.engine.names import fsdp2_groups

if TYPE_CHECKING:
    from holdfast.engine.collect import Held, Registered

_LOCAL, _SPEC = attrgetter("_local_tensor"), attrgetter("_spec")
_META = (attrgetter("shape"), attrgetter("dtype"), attrgetter("device"))


@dataclass
class Found:
    """The tensors of the models and optimizers of one rank, as `Collected` has them."""

    tensors: dict[str, Held] = field(default_factory=dict)
    elsewhere: dict[str, TensorSpec] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    volatile: set[str] = field(default_factory=set)
    owners: list[torch.Tensor] = field(default_factory=list)
    """For each of `tensors`, in order, the tensor that the model or the optimizer has there. Emptied by `bind`."""

    others: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    """By optimizer, whose each entry of its `state` is that has more than tensors, by its place there."""

    groups: dict[str, list[list[str]]] = field(default_factory=dict)
    """By optimizer and group, the names of its parameters."""

    modules: dict[str, weakref.ref[nn.Module]] = field(default_factory=dict)
    """The modules that keep state of their own kind, by clean name."""

    small: dict[str, tuple[TensorSpec, torch.Size]] = field(default_factory=dict)
    """Of the tensors in the small state of the last save."""

    structure: object = field(default_factory=object)
    """Stands for all names, specs and shapes: the same object, the same plan."""

    def settle_small(self, fresh: Mapping[str, Held]) -> None:
        """Take in which tensors the small state has, and give `structure` anew if they are others."""
        found = {name: (held.spec, held.local.shape) for name, held in fresh.items()}
        if found != self.small:
            self.small, self.structure = found, object()


class Binding:
    """`found` and what has to be as it was for it to hold. Drops `found` when any of the owners dies."""

    def __init__(self, registered: Registered, found: Found) -> None:
        self.found: Found | None = found
        me = weakref.ref(self)

        def drop(_: object) -> None:
            binding = me()
            if binding is not None:
                binding.release()

        modules = _modules(registered)
        watched = [*modules, *registered.optimizers.values(), *found.owners, *_parameters(registered)]
        self._modules: list[weakref.ref[nn.Module]] = [weakref.ref(m) for m in modules]
        self._alive = [weakref.ref(o, drop) for o in {id(o): o for o in watched}.values()]
        self._sharded: list[weakref.ref[DTensor]] = []
        self._plain: list[weakref.ref[torch.Tensor]] = []
        for owner in found.owners:
            if isinstance(owner, DTensor):
                self._sharded.append(weakref.ref(owner))
            else:
                self._plain.append(weakref.ref(owner))
        # Held, as `found` holds the local data anyway: an object that lives is told by its address.
        self._locals = [owner._local_tensor for owner in found.owners if isinstance(owner, DTensor)]
        self._specs = [owner._spec for owner in found.owners if isinstance(owner, DTensor)]
        found.owners = []
        self._seen = _look(registered, modules)
        known: dict[object, object] = {}
        self._tensors = [[known.setdefault(value, value) for value in column] for column in _columns(self._locals, self._owners(self._plain))]

    def release(self) -> None:
        self.found, self._alive, self._tensors, self._seen, self._locals, self._specs = None, [], [], [], [], []

    def holds(self, registered: Registered) -> Found | None:
        """What was found, if everything is as it was; else None, and this binding is of no more use."""
        found, seen = self.found, self._seen
        if found is None:
            return None
        modules = [m for m in (r() for r in self._modules) if m is not None]
        if len(modules) == len(self._modules) and _look(registered, modules) == seen and self._same():
            return found
        self.release()
        return None

    def _same(self) -> bool:
        locals_, specs, tensors = self._locals, self._specs, self._tensors
        sharded, plain = self._owners(self._sharded), self._owners(self._plain)
        if (len(sharded), len(plain)) != (len(locals_), len(self._plain)):
            return False
        local = list(map(_LOCAL, sharded))
        if not all(map(is_, local, locals_)) or not all(map(is_, map(_SPEC, sharded), specs)):
            return False
        # Compared as they come: lists of 20,000 new shapes would call the garbage collector, which takes longer than all this.
        return all(all(map(eq, now, then)) for now, then in zip(_columns(local, plain), tensors, strict=True))

    @staticmethod
    def _owners(references: list[weakref.ref[Any]]) -> list[Any]:
        return [owner for owner in map(call, references) if owner is not None]


def _columns(local: list[torch.Tensor], plain: list[torch.Tensor]) -> Iterator[Iterable[Any]]:
    """Of all tensors shape, dtype and device; of plain ones where they lie."""
    for tensors in (local, plain):
        for get in _META:
            yield map(get, tensors)
    yield map(torch.Tensor.data_ptr, plain)
    yield map(torch.Tensor.stride, plain)


def shows_its_shards(registered: Registered) -> bool:
    """Whether the modules show the shards that FSDP2 has of them: after a forward without gradients they may show others."""
    groups = (group for module in _modules(registered) for group in fsdp2_groups(module))
    for managed in chain.from_iterable(group.fsdp_params for group in groups):
        info = managed._module_info
        places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
        if any(module._parameters.get(name) is not managed.sharded_param for module, name in places):
            return False
    return True


def _modules(registered: Registered) -> list[nn.Module]:
    return list({id(m): m for model in registered.models.values() for m in model.modules()}.values())


def _parameters(registered: Registered) -> Iterable[torch.Tensor]:
    """What the modules show, which FSDP2 may change for a while, and all tensors in the optimizers."""
    for module in _modules(registered):
        yield from (t for d in (module._parameters, module._buffers) for t in d.values() if t is not None)
    for optimizer in registered.optimizers.values():
        yield from (p for group in optimizer.param_groups for p in group["params"])
        yield from (v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))


def _look(registered: Registered, modules: list[nn.Module]) -> list[Any]:
    """Everything that decides which tensors there are and what they are called, as lists that compare fast."""
    dicts = [d for m in modules for d in (m._modules, m._parameters, m._buffers)]
    seen: list[Any] = [
        [(key, id(model)) for key, model in registered.models.items()],
        [(key, id(optimizer)) for key, optimizer in registered.optimizers.items()],
        list(map(len, dicts)),
        list(chain.from_iterable(dicts)),
        list(map(id, chain.from_iterable(d.values() for d in dicts))),
        [frozenset(m._non_persistent_buffers_set) for m in modules if m._buffers],
        # An abstract class, for which isinstance would call Python for every module.
        [frozenset(vars(m)["parameters_to_ignore"]) for m in modules if nn.parallel.DistributedDataParallel in type(m).__mro__],
    ]
    for module in modules:
        if origins := module.__dict__.get(ATTRIBUTE):
            trained = [p.requires_grad for p in module._parameters.values() if p is not None]
            seen.append((list(origins), list(origins.values()), trained))
    for optimizer in registered.optimizers.values():
        states = list(optimizer.state.values())
        seen += [
            [list(map(id, group["params"])) for group in optimizer.param_groups],
            list(map(id, optimizer.state)),
            list(map(len, states)),
            list(chain.from_iterable(states)),
            # A number that becomes a tensor, or the other way round, differs; a number that becomes another does not.
            [id(v) if isinstance(v, torch.Tensor) else None for state in states for v in state.values()],
        ]
    return seen
