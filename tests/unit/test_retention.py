"""Which checkpoints go, as a pure function."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.retention import Complete, Retention
from holdfast.errors import UsageError


def made(*steps: int, metrics: dict[int, float] | None = None) -> list[Complete]:
    """One checkpoint per step, saved in this order."""
    rated = metrics or {}
    return [Complete(f"checkpoint-{s}", (1, i), s, rated.get(s)) for i, s in enumerate(steps)]


def gone(rule: Retention, complete: list[Complete], verified: set[str] | None = None) -> list[int]:
    return [c.step for c in rule.superfluous(complete, verified or set())]


def test_nothing_goes_without_a_rule() -> None:
    assert gone(Retention(), made(1, 2, 3)) == []


def test_the_newest_is_by_save_not_by_step() -> None:
    assert gone(Retention(keep_last=1), made(400, 600, 500)) == [400, 600]
    assert gone(Retention(keep_last=2), made(9900, 10000, 9950)) == [9900]


def test_the_last_one_that_was_read_back_stays() -> None:
    assert gone(Retention(keep_last=1), made(1, 2, 3, 4), {"checkpoint-1", "checkpoint-2"}) == [1, 3]


def test_every_and_best_add_to_the_last() -> None:
    metrics = {1: 0.5, 2: 0.1, 3: math.nan, 4: 0.3, 5: -math.inf, 6: 0.9}
    complete = made(1, 2, 3, 4, 5, 6, metrics=metrics)
    assert gone(Retention(keep_last=1, keep_every=2), complete) == [1, 3, 5]
    assert gone(Retention(keep_best=2), complete) == [1, 3, 4]
    assert gone(Retention(keep_best=2, best="max"), complete) == [2, 3, 4, 5]


def test_nan_never_wins() -> None:
    complete = made(1, 2, 3, metrics={1: math.nan, 2: 5.0})
    for best in ("min", "max"):
        assert gone(Retention(keep_best=1, best=best), complete) == [1]  # type: ignore[arg-type]


rules = st.builds(Retention, *(st.none() | st.integers(1, 4) for _ in range(3)), st.sampled_from(["min", "max"]))
checkpoints = st.lists(
    st.tuples(st.integers(0, 20), st.none() | st.floats()), min_size=1, max_size=8, unique_by=lambda t: t[0]
).map(lambda pairs: [Complete(f"checkpoint-{s}", (1, i), s, m) for i, (s, m) in enumerate(pairs)])


@given(rules, checkpoints, st.data())
def test_the_newest_and_a_verified_one_always_stay(rule: Retention, complete: list[Complete], data: st.DataObject) -> None:
    verified = set(data.draw(st.lists(st.sampled_from([c.folder for c in complete]))))
    left = {c.folder for c in complete} - {c.folder for c in rule.superfluous(complete, verified)}
    assert complete[-1].folder in left
    assert not verified or left & verified


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_every": -1}, {"keep_best": True}, {"best": "low"}])
def test_an_impossible_rule_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Retention(**options)  # type: ignore[arg-type]
