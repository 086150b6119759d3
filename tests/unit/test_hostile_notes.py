"""What lies in `.holdfast` may be torn, strange or made up: a new run begins in finite time, with a number that its checkpoints can have."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.manifest import MAX_SEQUENCE, Announcement, Manifest
from holdfast.engine import lease
from holdfast.engine.lease import Lease
from holdfast.engine.retention import Complete
from holdfast.errors import CorruptCheckpoint, UsageError
from holdfast.storage import LocalFolder

D = "0123456789abcdef" * 2
MANIFEST = Manifest("00aa11bb-3", 2, 3, 500, 1, (D,), (D,), True)

WHATEVER = st.sampled_from(["", "x" * 300, "../a", "\0", -1, 0, 1, 1 << 31, 1 << 63, 10**30, 0.5, True, None, [], {}, [[{}]]])
NOTE = st.fixed_dictionaries(
    {},
    optional={
        "run_sequence": WHATEVER | st.integers(0, 10**20),
        "nonce": WHATEVER,
        "host": WHATEVER | st.just(socket.gethostname()),
        "pid": WHATEVER | st.integers(-(10**20), 10**20),
        "namespace": WHATEVER | st.just(lease._namespace()),
        "beat": WHATEVER,
        "released": WHATEVER,
    },
)
TEXT = NOTE.map(lambda note: json.dumps(note).encode()) | st.binary(max_size=60) | st.just(b"[" * 10**5)


@settings(max_examples=150)
@given(note=TEXT, claim=TEXT, number=st.integers(0, 10**18 - 1))
def test_any_note_lets_a_run_begin(tmp_path_factory: pytest.TempPathFactory, note: bytes, claim: bytes, number: int) -> None:
    home = tmp_path_factory.mktemp("out") / ".holdfast"
    home.mkdir()
    (home / "run.json").write_bytes(note)
    (home / f"claim-{number}").write_bytes(claim)
    before, sequence, refusal = lease.PATIENCE, 0, ""
    lease.PATIENCE = 0.0
    try:
        sequence = Lease(LocalFolder(home.parent)).await_free([])
    except UsageError as error:
        refusal = str(error)
    finally:
        lease.PATIENCE = before
    if refusal:  # a note with this very process in it, or the highest number
        assert "close() it first" in refusal or "no number is left" in refusal
        return
    assert Manifest.parse(replace(MANIFEST, run_sequence=sequence).encoded(), "it").run_sequence == sequence


def test_a_folder_without_a_number_left_is_refused(tmp_path: Path) -> None:
    """A stranger's manifest with the highest number there can be."""
    last = Complete("checkpoint-1", (MAX_SEQUENCE, 1), 1)
    with pytest.raises(UsageError, match="no number is left for another run"):
        Lease(LocalFolder(tmp_path)).await_free([last])
    with pytest.raises(CorruptCheckpoint, match="'run_sequence' is out of range"):
        Manifest.parse(replace(MANIFEST, run_sequence=MAX_SEQUENCE + 1).encoded(), "it")


@given(st.dictionaries(st.sampled_from(["rank", "attempt", "step", "layout", "plain", "receipt", "metric", "groups"]), WHATEVER | st.just(D)))
def test_a_strange_announcement_is_refused_or_whole(document: dict[str, Any]) -> None:
    try:
        found = Announcement.parse(json.dumps(document).encode(), "it")
    except CorruptCheckpoint:
        return
    assert Announcement.parse(found.encoded(), "it") == found
