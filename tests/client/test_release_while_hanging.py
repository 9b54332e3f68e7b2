"""A partition to be released while a handler hangs: it stays if the reason ends, or is released in time."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.client.conftest import HI, wait_until
from tests.client.running import HOW, KINDS, Crew, Handlers, Running, places, publish


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_a_pause_that_ends_leaves_a_partition_with_a_stuck_key_at_work(crew: Crew, how: str, kind: str) -> None:
    crew.kind = kind
    topic = crew.topic(1)
    publish(crew, topic, ["a", "stuck", "a", "stuck"])
    handlers = Handlers(how)
    gate = handlers.gate("stuck")
    calls: list[str] = []
    about: dict[str, Any] = {name: lambda *_, name=name: calls.append(name) for name in ("on_assign", "on_revoke")}
    a, consumer = crew.consumer("a", topic, **about)
    running = Running(consumer, handlers)
    handlers.await_ended({(0, 0), (0, 2)})
    crew.pause(60_000)
    wait_until(lambda: "on_revoke" in calls)
    if kind == "group":  # claims get no heartbeat during a pause, so this would take too long
        (held,) = wait_until(lambda: [x for x in a.health().held_back if x.releasing])
        assert (held.offset, held.key, held.releasing) == (1, b"stuck", "the group is paused")
    crew.pause(0)
    publish(crew, topic, ["a", "b"])
    handlers.await_ended({(0, 4), (0, 5)})
    assert calls == ["on_assign", "on_revoke", "on_assign"]
    wait_until(lambda: [x.releasing for x in a.health().held_back] == [""])
    gate.set()
    handlers.await_ended(places(6))
    running.stop(a)
    handlers.check_order()
    assert set(handlers.ended.values()) == {1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_a_stuck_key_keeps_a_partition_from_others_no_longer_than_revoke_timeout(
    crew: Crew, how: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    crew.kind = kind
    topic = crew.topic(2)
    for partition in (0, 1):
        publish(crew, topic, ["a", "stuck", "a"], partition)
    hung, well = Handlers(how), Handlers(how)
    gate = hung.gate("stuck")
    a, consumer = crew.consumer("a", topic, revoke_timeout=1.0)
    first = Running(consumer, hung, drain_timeout=0.1)
    hung.await_ended({(partition, offset) for partition in (0, 1) for offset in (0, 2)})
    b, other = crew.consumer("b", topic)
    second = Running(other, well)
    wait_until(lambda: well.of("end", "stuck"), 2 * HI / 1000 + 15)
    ((moved, _),) = well.of("end", "stuck")
    publish(crew, topic, ["a"], moved)
    well.await_ended({(moved, 1), (moved, 3)})
    errors = [x.getMessage() for x in caplog.records if x.levelno == logging.ERROR]
    (error,) = [text for text in errors if "revoke_timeout" in text]
    assert f"{topic} [{moved}] is released" in error
    assert "offset 1 (key b'stuck')" in error
    gate.set()
    wait_until(lambda: consumer.ignored_done == 1)
    a.stop()
    b.stop()
    assert (first.ended(), second.ended()) == (None, None)
