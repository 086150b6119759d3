"""Connections to the job's store, whose host may be gone."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from holdfast.engine.store import clone


def test_a_connection_to_a_host_that_is_gone_gives_up_in_time() -> None:
    """Ranks whose launcher was killed would try for as long as a collective may take, half an hour by default."""
    usual = timedelta(seconds=1800)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    default = dist.PrefixStore("job", dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=usual))
    clone(default, timedelta(seconds=30)).set("key", "value")
    assert default.get("key") == b"value"
    assert default.timeout == usual
    del server
    begun = time.monotonic()
    with pytest.raises(RuntimeError):
        clone(default, timedelta(seconds=2))
    assert time.monotonic() - begun < 15
    assert default.timeout == usual
