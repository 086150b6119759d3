"""A scheduler's signal to a program that is not a recipe: one checkpoint of one step on all ranks, and the program ends there."""

from __future__ import annotations

import signal
import threading


class StoppedBySignal(SystemExit):
    """Raised on every rank after the same step, whose checkpoint is asked for. Whoever does not catch it ends with exit code 0."""

    def __init__(self, step: int) -> None:
        super().__init__(0)
        self.step = step


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, unless the program answers to it itself."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return []
    return [signal.SIGTERM]
