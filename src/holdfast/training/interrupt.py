"""Ctrl-C: the first one ends the training and lets the pending save be finished, another one ends the process at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

SAME_S = 1.0
"""A terminal sends the signal to all processes, and a launcher in between passes its own on: that is one Ctrl-C."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first SIGINT raises KeyboardInterrupt and the next one leaves with 130. On other threads: nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: float | None = None

    def handler(_number: int, _frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            logger.warning("interrupted: what is being saved is finished first; Ctrl-C again leaves at once")
            raise KeyboardInterrupt
        if now - first > SAME_S:
            os._exit(128 + signal.SIGINT)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
