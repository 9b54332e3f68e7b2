"""Log lines of an outage: one when Kafka becomes unreachable, one when it is back."""

from __future__ import annotations

import logging

import pytest

from kafka_marshal import Group
from kafka_marshal.adapters.kafka.errors import Troubles
from kafka_marshal.logs import RateLimitedLog
from tests.client.conftest import wait_until
from tests.faults.stories import HI, TOPIC, answer, member, memory_cluster


@pytest.mark.parametrize("kind", ["claimed", "coordinated"])
def test_one_line_when_it_is_away_and_one_when_it_is_back(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kafka_marshal")
    cluster = memory_cluster()
    marshal = member(cluster)
    consumer = (
        marshal.consumer([TOPIC]) if kind == "claimed" else marshal.consumer([TOPIC], mode=Group(session_timeout=0.9))
    )
    assert consumer.poll(5) is not None
    caplog.clear()
    cluster.broker.set_reachable("a", False)
    wait_until(lambda: marshal._driver.effects.appends.failures.failing is not None)
    begun = marshal._driver.now_ms()
    wait_until(lambda: marshal._driver.now_ms() > begun + 8 * HI)
    cluster.broker.set_reachable("a", True)
    wait_until(lambda: marshal.health().ok)
    answer("Marshal.close()", marshal.close)
    events = [str(getattr(record, "event", "")) for record in caplog.records]
    assert events.count("kafka_away") == events.count("kafka_back") == 1
    of_work = {"joined", "claimed", "released", "lost", "left", "member", "warning"}
    assert [event for event in events if event not in of_work] == ["kafka_away", "kafka_back"]


def test_an_idle_member_is_well_again_when_kafka_is_back_though_it_appends_nothing() -> None:
    cluster = memory_cluster(partitions=1)
    a, b = member(cluster, "a"), member(cluster, "b")
    consumers = a.consumer([TOPIC]), b.consumer([TOPIC])
    wait_until(lambda: any(each.assignment() for each in consumers))
    idle = b if consumers[0].assignment() else a
    idle._driver.effects.appends.failures.hear("Message timed out", idle._driver.now_ms())
    assert not idle.health().ok
    wait_until(lambda: idle.health().ok)
    assert idle._driver.effects.appends.failures.failing is not None  # nothing was appended since
    for each in a, b:
        each.terminate()


def test_what_fails_while_something_else_is_answered_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kafka_marshal")
    told = RateLimitedLog(lambda: 0.0)
    told.unanswered("append_failed", "append", "an append failed")
    told.is_outage = lambda: True
    told.unanswered("append_failed", "append", "an append failed")
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.DEBUG]


def test_librdkafkas_lines_are_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kafka_marshal")
    own = logging.getLogger("of.a.user")
    for troubles in (Troubles(), Troubles(logger=own)):
        troubles.log(logging.ERROR, "%s [%s] %s", "FAIL", "c#1", "[thrd:x]: Connection refused")
        troubles.log(logging.WARNING, "%s [%s] %s", "CONFWARN", "c#1", "[thrd:x]: no such setting")
    levels = [(record.name, record.levelno) for record in caplog.records]
    ours = "kafka_marshal.librdkafka"
    assert levels == [(ours, logging.DEBUG), (ours, logging.WARNING), ("of.a.user", 40), ("of.a.user", 30)]


def test_what_ends_a_transactional_producer_is_raised_by_it_and_no_line_for_people(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "kafka_marshal")
    for troubles in (Troubles(), Troubles()):
        if caplog.records:
            troubles.keep_ends_quiet()
        troubles.log(logging.CRITICAL, "%s [%s] %s", "FATAL", f"c#{id(troubles)}", f"[thrd:x]: fenced {id(troubles)}")
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL, logging.DEBUG]
