"""Memory limits; one message is always allowed."""

from __future__ import annotations

import pytest

from kafka_marshal.engine.work.tracker import FIRST_READ, InFlight, mean_bytes
from tests.engine.harness import FakeMessage


@pytest.mark.parametrize("at_most_once", [False, True])
@pytest.mark.parametrize("limit", [1, 500, 999, 1_001])
def test_one_message_may_wait_and_one_be_in_flight_however_large_it_is(limit: int, at_most_once: bool) -> None:
    memory = InFlight(limit, at_most_once=at_most_once)
    assert memory.room(0) == FIRST_READ
    memory.read(1, mean_bytes([FakeMessage(("t", 0), 0)]))
    assert memory.room(0) == 1
    assert memory.room(1) == 0
    assert memory.most_in_hand >= 1
