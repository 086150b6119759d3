"""A forward of a sharded model on one rank only: seen before its first collective, and skipped.

Forwards in training mode with gradients are the training's own. Before any other of a sharded model the ranks find out whether all of
them come there (`presence`); once they do, they may make more until the next training forward. A forward that one rank makes alone
would wait in an all-gather for the others until a watchdog ends the job. It raises `ForwardSkipped` instead, and what called it is
left:

- the script's function around it: the outermost one that is not on the way to the training loop (`log_validation`, say) ends with
  None. For that the functions of the script's own modules are wrapped when it prepares its models;
- else the diffusers pipeline around it, which returns one black picture.

Where there is neither, the run ends with a message.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from holdfast.engine.names import unwrap
from holdfast.errors import HoldfastError
from holdfast.integrations.presence import Presence
from holdfast.integrations.shared_forward import SharedForwards

logger = logging.getLogger("holdfast")

_LIBRARIES = tuple({str(Path(p).resolve()) for p in (*site.getsitepackages(), *sysconfig.get_paths().values())})
_OWN = str(Path(__file__).resolve().parent.parent)


class ForwardSkipped(HoldfastError):
    """One rank alone came to a forward of a sharded model; caught around it."""


class _Survivors(threading.local):
    """Per thread: how many wrapped functions or pipelines around the current frame would catch a skipped forward."""

    functions = 0
    pipelines = 0


_around = _Survivors()


class LoneForwards:
    """Watches the sharded models of one accelerator."""

    def __init__(self) -> None:
        self.presence: Presence | None = None
        self.shared: SharedForwards | None = None
        """Where all ranks are to take part in what one does alone."""

        self.training: set[CodeType] = set()
        """The code of the functions that the training loop is in, from its own up to the script."""

        self.skipped: list[str] = []
        self._handles: list[Any] = []
        self._depth = 0
        self._is_shared = False

    def watch(self, model: nn.Module) -> None:
        """Look at every forward that enters this sharded model from outside, through its wrapper or past it."""
        for module in {id(m): m for m in (model, unwrap(model))}.values():
            self._handles += [
                module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._after, always_call=True),
            ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self.presence is None or (self.shared is not None and self.shared.active):
            return
        if module.training and torch.is_grad_enabled():
            self.presence.forward()
            if self.shared is not None:
                self.shared.meet()
        elif not self.presence.together():
            if self.shared is not None and self.shared.possible(module) and self.shared.begin(module, args, kwargs):
                self._is_shared = True
                return
            self._depth = 0  # what raises in a pre-hook comes to no post-hook
            self._skip(module)

    def mark(self) -> None:
        """The ranks come to something else in which they wait for each other."""
        if self.presence is not None:
            self.presence.mark()
        if self.shared is not None:
            self.shared.meet()

    def end(self) -> None:
        if self.presence is not None:
            self.presence.end()
        if self.shared is not None:
            self.shared.end()

    def _after(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        self._is_shared = self._is_shared and self._depth > 0

    def past_the_wrapper(self) -> bool:
        """Whether a forward that all ranks make for one has come to a model from outside, and not through what wraps it."""
        return self._is_shared and self._depth == 1

    def _skip(self, module: nn.Module) -> None:
        name = type(unwrap(module)).__name__
        rank = self.presence.rank if self.presence is not None else 0
        where = f"rank {rank}: a forward of the sharded {name} on this rank alone"
        if _around.functions or _around.pipelines:
            raise ForwardSkipped(where)
        raise HoldfastError(
            f"{where} would wait for the other ranks for ever, and nothing around it can be skipped: put it into a function of its own, "
            "or let all ranks take part"
        )

    def note_training_loop(self) -> None:
        """Called in an optimizer's step: whoever called it is on the way to the training loop."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            self.training.add(frame.f_code)
            frame = frame.f_back

    @property
    def in_function(self) -> bool:
        """Whether a function of the script is around that a skipped forward may end."""
        return _around.functions > 0

    def left(self, what: str) -> None:
        """One line for each thing that was left, the first time."""
        if what not in self.skipped:
            self.skipped.append(what)
            logger.warning("holdfast run: skipped %s: it runs a sharded model on one rank only", what)

    @contextlib.contextmanager
    def surviving_pipeline(self) -> Iterator[None]:
        _around.pipelines += 1
        try:
            yield
        finally:
            _around.pipelines -= 1

    def wrap_script(self) -> None:
        """Wrap the functions of the modules of the script that is calling: those on the stack that are no library's."""
        frame: FrameType | None = sys._getframe()
        running: set[CodeType] = set()
        names: set[str] = set()
        while frame is not None:
            running.add(frame.f_code)
            if not _is_library(frame.f_code.co_filename):
                names.add(frame.f_globals.get("__name__", ""))
            frame = frame.f_back
        for name in names:
            module = sys.modules.get(name)
            if module is not None:
                self._wrap_module(module, running)

    def _wrap_module(self, module: ModuleType, running: set[CodeType]) -> None:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ == module.__name__ and self._may_wrap(value, running):
                setattr(module, name, self._surviving(value))
            elif isinstance(value, type) and value.__module__ == module.__name__ and not issubclass(value, _CALLED_BY_LIBRARIES):
                for attribute, method in list(vars(value).items()):
                    if isinstance(method, FunctionType) and not attribute.startswith("__") and self._may_wrap(method, running):
                        setattr(value, attribute, self._surviving(method))

    def _may_wrap(self, function: FunctionType, running: set[CodeType]) -> bool:
        odd = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)
        return not odd and function.__code__ not in running and not hasattr(function, "__wrapped__")

    def _surviving(self, function: FunctionType) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _around.functions or function.__code__ in self.training:
                return function(*args, **kwargs)  # the outermost one catches
            _around.functions += 1
            try:
                return function(*args, **kwargs)
            except ForwardSkipped:
                self.left(f"{function.__qualname__}() of {Path(function.__code__.co_filename).name}")
                return None
            finally:
                _around.functions -= 1

        return call


_CALLED_BY_LIBRARIES: tuple[type, ...] = (nn.Module, torch.utils.data.Dataset, torch.optim.Optimizer, torch.autograd.Function, tuple)


def _is_library(filename: str) -> bool:
    if filename.startswith("<"):
        return True
    path = str(Path(filename).resolve())
    return path.startswith(_LIBRARIES) or path.startswith(_OWN)
