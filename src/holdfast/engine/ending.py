"""What is left of a run when the interpreter ends: a script that never closed its Checkpointer still finishes what it asked for."""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from typing import TYPE_CHECKING, Any

from holdfast.errors import SaveFailed

if TYPE_CHECKING:
    from holdfast.engine.checkpointer import Checkpointer


def close_at_exit(checkpointer: Checkpointer) -> Any:
    """At interpreter exit, finish the own part of what was requested: a thread that still copies then would abort the process."""
    reference = weakref.ref(checkpointer)

    def finish() -> None:
        alive = reference()
        if alive is None or alive._closed:
            return
        if alive._calls is not None and not hasattr(sys, "last_type"):  # a script that ended well: others may still ask for a save
            with contextlib.suppress(SaveFailed):
                alive.wait()
            alive._part()
        alive._stop(patience=alive._deadlines.goodbye)

    atexit.register(finish)
    return finish
