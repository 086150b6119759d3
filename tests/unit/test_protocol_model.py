"""The protocols hold in every interleaving, and the model notices when one of their rules is broken."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.engine.protocol_model import Commit, Requests, explore, report

BROKEN: list[tuple[Any, str]] = [
    (Requests(2, 3, ((0, 1), (0, 3)), fault="no acknowledgement"), "a rank was past the step"),
    (Requests(2, 3, ((0, 1), (0, 3)), fault="early look"), "a rank was past the step"),
    (Requests(2, 3, ((0, 1), (0, 3)), fault="no wait for the device"), "a rank was past the step"),
    (Requests(2, 3, ((0, 1), (0, 3)), fault="leave early"), "a request was never served"),
    (Requests(2, 3, ((0, 1), (0, 3)), fault="stale keys"), "captured what nobody asked for"),
    (Requests(2, 4, (), stop=True, fault="stop one step ahead"), "not all ranks stopped"),
    (Requests(2, 4, (), stop=True, fault="stop unheard"), "not all ranks stopped"),
    (Commit(2, fault="remove after announcing"), "a manifest names a file"),
    (Commit(2, fault="receipt first"), "a manifest names a file"),
    (Commit(2, fault="commit early"), "a manifest names a file"),
    (Commit(2, fault="tidy beside a job"), "a manifest names a file"),
]


def test_nothing_is_wrong_and_every_planted_fault_is_noticed() -> None:
    lines: list[str] = []
    assert report(lines.append)
    assert "interleavings" in lines[0]
    assert lines[1] == "as it is: nothing wrong"
    assert not any("NOT NOTICED" in line for line in lines)


@pytest.mark.parametrize(("machine", "complaint"), BROKEN, ids=lambda v: str(getattr(v, "fault", "")))
def test_a_broken_rule_is_noticed(machine: Any, complaint: str) -> None:
    assert any(complaint in found for found in explore(machine).wrong)


def test_every_run_of_a_tiny_machine_is_counted() -> None:
    """One rank, one step, no wish: compute, meet, step, serve, go: there is one way."""
    explored = explore(Requests(1, 1, ()))
    assert (explored.states, explored.transitions, explored.interleavings) == (6, 5, 1)
