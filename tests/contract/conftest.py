"""Each contract test runs twice: on the log in memory and on a real broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.sides import KafkaSide, MemorySide, Side


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.broker)])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    """One implementation, new for each test; the broker is the session's."""
    made: Side
    if request.param == "memory":
        made = MemorySide()
    else:
        kafka = request.getfixturevalue("kafka_broker")
        made = KafkaSide(kafka.bootstrap_servers, kafka.client_config)
    yield made
    made.close()
