"""Hooks that scripts register with `register_save_state_pre_hook` and `register_load_state_pre_hook`.

They write the models in a form of the script's own, and take them out of the list that accelerate would write. The checkpoint holds
the models anyway, so a hook matters for what else it writes (averaged weights, say). It is run on whoever calls `save_state`, after
the copy, with a stand-in for the weights of sharded models. Where it wants those (`state_dict`, `get_state_dict`), it would gather
on one rank or write one rank's pieces: it is left at that point, what it wrote until then stays, and one line says so. A
`save_pretrained` of a sharded model inside of it writes nothing.

Load hooks read what save hooks wrote. They run for checkpoints in which all save hooks came to their end, and before the engine's own
load, which has the last word.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.manifest import MANIFEST_FILE
from holdfast.engine.names import unwrap
from holdfast.integrations import handover

if TYPE_CHECKING:
    from holdfast.integrations.accelerate import Attached

logger = logging.getLogger("holdfast")

MARK = "hooks.json"
"""In a checkpoint's folder, when all of the script's save hooks came to their end."""


class Touched(Exception):
    """A hook wanted what one rank alone does not have."""


class Hooks:
    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self.running = False
        self.said: list[str] = []

    def before_save(self, path: Path) -> None:
        hooks = list(self._attached.accelerator._save_model_state_pre_hook.values())
        if not hooks:
            return
        models = self._attached.accelerator._models
        whole = True
        for hook in hooks:
            weights = [_Untouchable() if handover.is_sharded(m) else m.state_dict() for m in models]
            whole &= self._run(hook, "save", models, weights, str(path))
        if whole:
            (path / MARK).write_text(json.dumps([_name(h) for h in hooks]), encoding="utf-8")

    def before_load(self, path: Path) -> None:
        hooks = list(self._attached.accelerator._load_model_state_pre_hook.values())
        ours = (path / MANIFEST_FILE).exists()
        if ours and not (path / MARK).exists():
            for hook in hooks:
                self._say(f"the load hook {_name(hook)} is not run: {path.name} holds nothing that a save hook wrote; its models are loaded from the checkpoint")
            return
        for hook in hooks:
            self._run(hook, "load", list(self._attached.accelerator._models), str(path))

    def _run(self, hook: Callable[..., Any], kind: str, models: list[Any], *args: Any) -> bool:
        sharded = [m for m in models if handover.is_sharded(m)]
        try:
            with self._watching(sharded):
                hook(list(models), *args)
        except Exception as error:
            if not sharded:
                raise
            why = str(error) if isinstance(error, Touched) else f"it fails on them with {type(error).__name__}: {error}"
            self._say(f"the {kind} hook {_name(hook)} is left before its end: {why}; the checkpoint itself holds the models")
            return False
        return True

    @contextmanager
    def _watching(self, sharded: list[Any]) -> Any:
        def touched(*_: Any, **__: Any) -> Any:
            raise Touched("it wants the whole weights of a sharded model")

        self.running = True
        with ExitStack() as stack:
            for module in {id(m): m for model in sharded for m in (model, unwrap(model))}.values():
                for name in ("state_dict", "load_state_dict"):
                    stack.enter_context(handover.put_in(module, name, touched))
            try:
                yield
            finally:
                self.running = False

    def _say(self, line: str) -> None:
        if line not in self.said:
            self.said.append(line)
            if self._attached.accelerator.is_main_process:
                logger.warning("holdfast run: %s", line)


class _Untouchable(dict[str, Any]):
    """Stands for a sharded model's weights in the list that hooks pop from."""

    def _refuse(self, *_: Any) -> Any:
        raise Touched("it reads the weights that it should only take out of the list")

    __getitem__ = items = values = keys = __iter__ = get = _refuse


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", repr(hook)).split("<locals>.")[-1]
