"""A coordination topic damaged while members work, and a broker's clock that is set back: members report it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from kafka_marshal import Group, Marshal
from kafka_marshal.adapters.kafka.errors import Troubles
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.errors import LogCutError
from kafka_marshal.logs import RateLimitedLog
from kafka_marshal.node import jobs
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.observe.view import LiveView
from tests.client.conftest import wait_until
from tests.faults.stories import GROUP, HI, TOPIC, answer, member, memory_cluster

LOG = "__marshal"


@pytest.fixture(params=["claimed", "coordinated"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def working(cluster: MemoryCluster, kind: str) -> tuple[Marshal, Any]:
    """A member that has handled everything."""
    marshal = member(cluster)
    consumer = (
        marshal.consumer([TOPIC]) if kind == "claimed" else marshal.consumer([TOPIC], mode=Group(session_timeout=1.5))
    )
    done = 0
    while done < 12:
        for message in consumer.consume(100, 0.1):
            consumer.done(message)
            done += 1
    return marshal, consumer


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[int]:
    return [record.levelno for record in caplog.records if getattr(record, "event", "") == event]


def says(marshal: Marshal, text: str) -> bool:
    return any(text in problem for problem in marshal.health().problems)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SHORTEST_MS", 100.0)
    monkeypatch.setattr(jobs, "SAVE_EVERY_MS", 100.0)


@pytest.mark.usefixtures("impatient")
def test_a_log_that_is_emptied_is_reported_and_the_positions_are_kept(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = memory_cluster()
    marshal, consumer = working(cluster, kind)
    assert not says(marshal, "harmed")
    cluster.broker.delete_records(LOG, 0, cluster.broker.existing[LOG].partitions[0].end)
    wait_until(lambda: says(marshal, "partition 0 was emptied up to offset"))
    wait_until(lambda: told(caplog, "topic_harmed") == [logging.ERROR])
    assert says(marshal, "import-group") and says(marshal, "convert-group") == (kind == "claimed")
    assert not says(marshal, "Nothing is lost") and not marshal.health().needs_restart
    with pytest.raises(LogCutError, match="stop none of them"):
        Replica(cluster.connect("new"), LOG, 5, Begin.SNAPSHOT)
    wait_until(lambda: cluster.broker.committed.get(GROUP, {}).get((TOPIC, 1)) == (6, ""))
    cluster.broker.produce(TOPIC, 0, b"more")
    wait_until(lambda: [consumer.done(message) for message in consumer.consume(1, 0.1)])  # it works on
    wait_until(lambda: cluster.broker.committed[GROUP].get((TOPIC, 0)) == (7, ""), what="what is done is kept, too")
    answer("Marshal.close()", marshal.close)


@pytest.mark.parametrize(
    ("setting", "value", "right"), [("retention.ms", "2000", "-1"), ("max.message.bytes", "20", "2097152")]
)
@pytest.mark.usefixtures("impatient")
def test_a_setting_is_reported_with_its_remedy_and_so_is_its_end(
    setting: str, value: str, right: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = memory_cluster()
    marshal, _ = working(cluster, "claimed")
    cluster.broker.alter_topic(LOG, {setting: value})
    wait_until(lambda: says(marshal, f"{setting} is {value}"))
    assert says(marshal, "Nothing is lost yet. Mend its settings: kafka-marshal init says how")
    assert not says(marshal, "Members that run continue") and not says(marshal, "NEW-NAME")
    cluster.broker.alter_topic(LOG, {setting: right})
    wait_until(lambda: told(caplog, "topic_mended") == [logging.WARNING])
    assert told(caplog, "topic_harmed") == [logging.ERROR] and not says(marshal, setting)
    answer("Marshal.close()", marshal.close)


def test_a_clock_that_is_set_back_is_reported_with_its_step(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster = memory_cluster()
    marshal, _ = working(cluster, kind)
    view = LiveView(cluster.connect("check"), LOG, 5)
    view.catch_up(lambda read, there: None)
    cluster.broker.clock = lambda: int(1000 * (time.time() - 60))
    wait_until(lambda: says(marshal, "was set back by 6") or says(marshal, "was set back by 5"))
    assert not marshal.health().needs_restart
    view.follow(5.0, until=lambda: bool(view.notes_on_clocks()))  # as `check` does
    assert "was set back by" in "".join(view.notes_on_clocks())
    cluster.broker.clock = lambda: int(1000 * (time.time() + 1))
    wait_until(lambda: told(caplog, "clock_back") and not says(marshal, "was set back"))
    assert set(told(caplog, "clock_set_back")) == {logging.ERROR} and set(told(caplog, "clock_back")) == {
        logging.WARNING
    }
    view.follow(5.0, until=lambda: not view.notes_on_clocks())
    assert view.notes_on_clocks() == []
    view.replica.close()
    answer("Marshal.close()", marshal.close)


# -- Log lines of an outage: one when Kafka becomes unreachable, one when it is back ------------------------------


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
