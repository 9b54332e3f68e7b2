"""The limit of open messages of a partition (H5), lowered: what a worker, its health and `check` say of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kafka_marshal import Admin, Consumer, KeyRangeError, Marshal
from kafka_marshal.client import health
from kafka_marshal.engine.work import open_messages
from kafka_marshal.observe import problems
from rationalizer.limits import MAX_HOLES
from tests.cli.conftest import command, environment
from tests.cli.harness import Command
from tests.client.conftest import wait_until
from tests.client.running import Crew, publish
from tests.rationalizer.small_limits import small_limits

__all__ = ["command", "environment"]

LIMIT = 4


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert MAX_HOLES == 10_000
    import tests.rationalizer.oracle  # noqa: F401 - its limits are lowered, too

    small_limits(monkeypatch, MAX_HOLES=LIMIT)
    for module in (health, problems, open_messages):  # the client knows the limit as the log does
        monkeypatch.setattr(module, "MAX_HOLES", LIMIT)
    yield


def check(command: Command, crew: Crew) -> tuple[int, str]:
    ran = command("--bootstrap", crew.bootstrap, "--topic", crew.coordination, "check")
    return ran.status, ran.out


def park_next(consumer: Consumer) -> int:
    message: Any = wait_until(lambda: consumer.poll(1.0))
    consumer.park(message, "bad")
    return int(message.offset())


def open_in(marshal: Marshal, topic: str) -> int:
    info = marshal.world.lease(topic, 0)
    return 0 if info is None else len(info.open)


@pytest.mark.parametrize("stuck", ["leave", "raise"])
def test_a_partition_that_is_full_is_named_before_it_is_and_then_waits_for_the_operator(
    crew: Crew, command: Command, caplog: pytest.LogCaptureFixture, stuck: str
) -> None:
    """The fifth can't be set aside: it waits, nothing behind it is delivered, and one that is discarded ends that."""
    topic = crew.topic(2)
    publish(crew, topic, [f"k{number}" for number in range(5)])
    member, consumer = crew.consumer("a", topic, partition_stuck=stuck)
    for _ in range(2):
        park_next(consumer)
    wait_until(lambda: open_in(member, topic) == 2)
    assert (member.health().ok, member.health().crowded) == (True, ())

    park_next(consumer)
    wait_until(lambda: open_in(member, topic) == 3)
    (near,) = member.health().crowded
    assert member.health().ok
    assert (near.topic, near.partition, near.open, near.most, near.is_full) == (topic, 0, 3, LIMIT, False)
    assert f"{topic} [0] has 3 of the 4 open messages that it may have: at the limit nothing more" in str(
        member.health()
    )

    park_next(consumer)
    wait_until(lambda: open_in(member, topic) == LIMIT)
    assert not member.health().ok
    (problem,) = member.health().problems
    assert "4 of the 4 open messages" in problem
    assert "can't be set aside any more" in problem
    assert f"kafka-marshal open-messages {crew.group}" in problem
    assert "Nothing is lost" in problem
    status, said = check(command, crew)
    assert status == 1
    assert "4 of 4 open messages that a partition may have. What fails for good can't be set aside" in said

    assert park_next(consumer) == 4
    wait_until(lambda: "offset 4 can't be set aside" in caplog.text, what="the worker says so")
    publish(crew, topic, ["k5", "k6"])
    publish(crew, topic, ["x"], 1)
    if stuck == "raise":
        with pytest.raises(KeyRangeError) as raised:
            wait_until(lambda: consumer.poll(1.0))
        assert raised.value.kip_number == 92
    other = wait_until(lambda: consumer.poll(1.0))
    assert other.partition() == 1  # others continue
    consumer.done(other)
    assert (again := consumer.poll(0.5)) is None or again.partition() == 1  # if a busy machine lost its lease

    Admin(crew.bootstrap, topic=crew.coordination).discard(crew.group, [(topic, 0, 0)])
    message = wait_until(lambda: consumer.poll(1.0))
    assert (message.partition(), message.offset()) == (0, 5)
    wait_until(lambda: open_in(member, topic) == LIMIT, what="the fifth is set aside")
    figures = {each.outcome: each.count for each in member.metrics().settled}
    assert figures == {"parked": 5, "redriven": 0, "discarded": 1}
