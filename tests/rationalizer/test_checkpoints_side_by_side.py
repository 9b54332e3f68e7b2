"""Checkpoints: the real world and the oracle conclude the same from the same log, record by record.

KAFKA_MARSHAL_THOROUGH=<factor> raises the number of logs.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rationalizer import World, limits
from tests.rationalizer.checkpoint_stories import CHECKPOINT_STORIES, LONG
from tests.rationalizer.group_author import write_group_log
from tests.rationalizer.group_sides import forged, in_one_go, record_by_record, restored, same_bytes
from tests.rationalizer.group_stories import Story
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.oracle.checkpoint_rules import MARKS
from tests.rationalizer.oracle.checkpoint_states import MOST_KEPT
from tests.rationalizer.oracle.checkpoints import MOST_PINNED, MOST_STATES, MOST_WEIGHT
from tests.rationalizer.oracle.compare import same_counts, same_outcome, same_state
from tests.rationalizer.small_limits import small_limits
from tests.rationalizer.strategies import TEST_TIMEOUT_S, THOROUGH, by_draw, effort, many

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

LENGTH = 150


@pytest.mark.parametrize("seed", range(many(12)))
def test_after_each_record(seed: int) -> None:
    record_by_record(seed, LENGTH, takes=True)


@pytest.mark.parametrize("seed", range(1_000_000, 1_000_000 + many(8)))
def test_where_limits_are_met(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch)
    record_by_record(seed, LENGTH, takes=True)


@pytest.mark.parametrize("seed", range(2_000_000, 2_000_000 + many(4)))
def test_in_one_go(seed: int) -> None:
    in_one_go(seed, LENGTH, takes=True)


@pytest.mark.parametrize("seed", range(4_000_000, 4_000_000 + many(4)))
def test_forged_states(seed: int) -> None:
    forged(seed, 60, takes=True)


@given(data=st.data())
@effort(12)
def test_each_record_of_a_log(data: st.DataObject) -> None:
    """Short logs, which Hypothesis makes shorter where they differ."""
    log, wanted = write_group_log(by_draw(data.draw), data.draw(st.integers(5, 40), "length"), takes=True)
    real, oracle = World(0, 1), OracleWorld(0, 1)
    for entry in log:
        same_outcome(real.apply(*entry), oracle.apply(*entry))
        same_bytes(real, oracle)
    same_state(real, wanted)


@cache
def told(name: str) -> tuple[Story, OracleWorld]:
    """A story, and the oracle's world after it."""
    story, world = CHECKPOINT_STORIES[name](), OracleWorld(0, 1)
    for entry in story[0]:
        world.apply(*entry)
    return story, world


def test_the_limits_are_those_of_the_contract() -> None:
    """Which small ones take the place of in logs, and only long stories meet."""
    assert (limits.MAX_PINNED, limits.MAX_KEPT) == (MOST_PINNED, MOST_KEPT) == (16, 64)
    assert limits.MAX_OLD_WEIGHT == MOST_WEIGHT == 1_000_000
    assert limits.MAX_KEY_PIECES == MOST_STATES == 2_000
    assert limits.FIRST_MARK == MARKS == 2**62


@pytest.mark.parametrize("name", [name for name in CHECKPOINT_STORIES if THOROUGH or name not in LONG])
def test_what_stands_at_a_limit(name: str) -> None:
    (log, codes), wanted = told(name)
    assert [outcome.code for outcome in wanted.outcomes][-len(codes) :] == codes
    one_by_one, at_once = World(0, 1), World(0, 1)
    for entry, expected in zip(log, wanted.outcomes, strict=True):
        same_outcome(one_by_one.apply(*entry), expected)
        one_by_one = restored(one_by_one) if name not in LONG else one_by_one
    at_once.apply_many(log)
    for real in (one_by_one, at_once):
        same_state(real, wanted)
    same_counts(at_once, wanted)
