"""Bytes that are nearly a state, and records that are nearly a part of one, against the oracle (S2, Q23 to Q27)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rationalizer import World
from tests.rationalizer.forged_parts import parts_differ
from tests.rationalizer.forged_states import restore_differs
from tests.rationalizer.oracle import is_state, shortest
from tests.rationalizer.strategies import TEST_TIMEOUT_S, many

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

SEEDS = many(40)


@pytest.mark.parametrize("differs", [restore_differs, parts_differ])
@pytest.mark.parametrize("begin", range(0, SEEDS, 20))
def test_what_is_taken_is_right_and_what_is_refused_is_not(differs: Callable[[int], str], begin: int) -> None:
    assert list(filter(None, map(differs, range(begin, begin + 20)))) == []


def test_the_oracle_takes_what_a_replay_leads_to_and_nothing_beside_it() -> None:
    state = World(0, 1).snapshot()
    assert is_state(state, 1)
    assert not is_state(state, 0)
    assert not is_state(state + b"\xc0", 1)
    assert not is_state(shortest([1, 0, 0, 0, 1, [], [], [[]]]), 1)
