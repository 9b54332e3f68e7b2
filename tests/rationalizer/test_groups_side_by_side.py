"""Coordinated groups: the real world and the oracle conclude the same from the same log, record by record.

KAFKA_MARSHAL_THOROUGH=<factor> raises the number of logs.
"""

from __future__ import annotations

import pytest

from rationalizer import World
from rationalizer.levels import SUPPORTED_LEVEL
from tests.rationalizer.dumps import replay_differs
from tests.rationalizer.group_sides import forged, in_one_go, record_by_record, some_group_dump
from tests.rationalizer.group_stories import SLOW, STORIES, told
from tests.rationalizer.oracle.compare import same_counts, same_outcome, same_state
from tests.rationalizer.strategies import TEST_TIMEOUT_S, many

pytestmark = [
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.skipif(SUPPORTED_LEVEL < 2, reason="this release replays no coordinated groups"),
]

LENGTH = 150


def seeds(count: int, first: int = 0) -> range:
    return range(first, first + many(count))


@pytest.mark.parametrize("seed", seeds(16))
def test_after_each_record(seed: int) -> None:
    record_by_record(seed, LENGTH)


@pytest.mark.parametrize("seed", seeds(3, first=1_000_000))
def test_in_long_logs(seed: int) -> None:
    record_by_record(seed, 4 * LENGTH, every=10)


@pytest.mark.parametrize("seed", seeds(8, first=2_000_000))
def test_in_one_go(seed: int) -> None:
    in_one_go(seed, LENGTH)


@pytest.mark.parametrize("seed", seeds(4, first=3_000_000))
def test_dumps(seed: int) -> None:
    """D2 and D3."""
    assert not replay_differs(some_group_dump(seed, 60))


@pytest.mark.parametrize("seed", seeds(8, first=4_000_000))
def test_forged_states(seed: int) -> None:
    forged(seed, 60)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in STORIES])
def test_what_stands_at_a_limit(name: str) -> None:
    """The oracle, which takes its time here, is asked at the end only."""
    (log, _), wanted = told(name)
    one_by_one, at_once = World(0, 1), World(0, 1)
    for entry, expected in zip(log, wanted.outcomes, strict=True):
        same_outcome(one_by_one.apply(*entry), expected)
    at_once.apply_many(log)
    for real in (one_by_one, at_once):
        same_state(real, wanted)
        same_counts(real, wanted)
