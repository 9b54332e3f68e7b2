"""Log lines for operators: events with fields, one line for simultaneous events, an outage from end to end."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Admin
from kafka_marshal.engine.effects import Note
from kafka_marshal.engine.plane import Loss
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.logs import Event
from kafka_marshal.node.events import GATHER_MS, QUIET_MS, Events, spans
from kafka_marshal.testing import LocalBroker
from tests.client.conftest import Scene, wait_until

HI = 3_000


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Events:
    caplog.set_level(logging.INFO, "kafka_marshal")
    return Events(EngineSettings("delays", "worker-1", "i", 8, HI), 0.0)


def told(events: Events, caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """(event, partitions) of the lines logged since the last call."""
    events.write()
    lines = [(getattr(line, "event", ""), spans(getattr(line, "partitions", []))) for line in caplog.records]
    caplog.clear()
    return lines


def test_many_partitions_claimed_at_once_are_one_line(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for partition in range(200):
        events.note(Note("claimed", ("flights", partition)), float(partition))
        events.check(float(partition))
    assert told(events, caplog) == []
    events.check(199 + QUIET_MS)
    events.write()
    [line] = caplog.records
    assert line.getMessage() == "worker-1 of group delays: claimed flights [0-199]"
    found = [getattr(line, name) for name in ("event", "group", "client", "topic", "partitions")]
    assert found == ["claimed", "delays", "worker-1", "flights", list(range(200))]


def test_one_partition_is_named_as_one(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    events.note(Note("claimed", ("flights", 7)), 0.0)
    events.gather()
    events.write()
    assert getattr(caplog.records[0], "partition", None) == 7


def test_some_keys_of_a_partition_are_named(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for partition in range(2):
        events.note(Note("claimed", ("flights", partition), keys=(0, 9)), 0.0)
    events.note(Note("claimed", ("flights", 0), keys=(20, 29)), 0.0)
    events.gather()
    events.write()
    text = "worker-1 of group delays: claimed keys "
    assert [line.getMessage() for line in caplog.records] == [
        f"{text}0 to 9 of flights [0-1]",
        f"{text}20 to 29 of flights [0]",
    ]
    assert [getattr(line, "keys", None) for line in caplog.records] == [[0, 9], [20, 29]]


def test_claims_that_never_rest_are_logged_nevertheless(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for now in range(0, int(GATHER_MS) + 1, 100):
        events.note(Note("claimed", ("flights", now // 100)), float(now))
        events.check(float(now))
    assert told(events, caplog) == [("claimed", "0-10")]


def test_a_loss_is_reported_at_once_with_its_reason(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for partition in (3, 1, 2):
        events.note(Note("lost", ("flights", partition), "the topic was deleted"), 5.0)
    events.check(5.0)
    events.write()
    [line] = caplog.records
    assert line.levelname == "WARNING"
    assert "lost flights [1-3]: the topic was deleted. Messages in flight are not committed" in line.getMessage()
    assert getattr(line, "reason", None) == "the topic was deleted"


@pytest.mark.parametrize("why", Loss)
def test_a_loss_promises_no_next_holder_where_there_is_none(
    events: Events, caplog: pytest.LogCaptureFixture, why: Loss
) -> None:
    events.note(Note("lost", ("flights", 1), why), 5.0)
    events.check(5.0)
    events.write()
    assert ("next holder" in caplog.text) is (
        why not in (Loss.POSITION, Loss.KAFKA_OFFSET, Loss.TOPIC_GONE, Loss.RESET, Loss.OPEN)
    )


def test_what_came_and_went_is_reported_in_that_order(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for event, partition in (("claimed", 1), ("claimed", 2), ("released", 1), ("claimed", 3), ("claimed", 1)):
        events.note(Note(event, ("flights", partition)), 0.0)
    events.gather()
    assert told(events, caplog) == [("claimed", "1-3"), ("released", "1"), ("claimed", "1")]


def test_an_outage_is_reported_from_end_to_end(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    events.heard(1_000.0)
    events.trouble("1/3 brokers are down", 2_000.0)
    events.heard(2_100.0)
    events.check(9_000.0)
    assert told(events, caplog) == [], "others answered"
    events.trouble("no broker", 10_000.0)
    events.check(10_100.0)
    assert told(events, caplog) == []
    for now in (11_500.0, 12_000.0):
        events.trouble("no broker", now)
        events.check(now)
    events.write()
    [line] = caplog.records
    assert (line.levelname, line.event, line.reason, line.seconds) == ("WARNING", "kafka_away", "no broker", 9.4)  # type: ignore[attr-defined]
    caplog.clear()
    events.heard(14_100.0)
    events.heard(14_200.0)
    events.write()
    [line] = caplog.records
    assert (line.levelname, line.event, line.seconds) == ("WARNING", "kafka_back", 12.0)  # type: ignore[attr-defined]


def test_a_handler_that_raises_stops_nothing(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if getattr(record, "event", "") == "claimed":
                raise RuntimeError("disk full")

    logger, handler = logging.getLogger("kafka_marshal"), Broken()
    logger.addHandler(handler)
    try:
        events.note(Note("claimed", ("flights", 1)), 0.0)
        events.say(Event.LEFT, "left")
        events.write()
    finally:
        logger.removeHandler(handler)
    assert [line.event for line in caplog.records] == ["callback_failed", "left"]  # type: ignore[attr-defined]


@pytest.mark.broker
def test_a_members_life_is_reported(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kafka_marshal")
    topic = scene.topic(24)

    def seen(event: str) -> list[Any]:
        return [line for line in caplog.records if getattr(line, "event", "") == event and line.client == "worker-1"]  # type: ignore[attr-defined]

    def partitions(event: str) -> set[int]:
        return {partition for line in seen(event) for partition in line.partitions}

    marshal = scene.member("worker-1")
    with marshal.consumer([topic]):
        wait_until(lambda: partitions("claimed") == set(range(24)), what="24 partitions claimed, and told")
        assert len(seen("claimed")) <= 3
        with Admin(scene.bootstrap, topic=scene.coordination).pause(scene.group) as pause:
            wait_until(lambda: seen("paused"), what="the pause told")
            pause.wait_released(20)
            wait_until(lambda: partitions("released") == set(range(24)), what="24 partitions released, and told")
        wait_until(lambda: seen("resumed"), what="the end of the pause told")
        assert seen("paused")[0].by == seen("resumed")[0].by
    marshal.close()
    for event in ("joined", "left"):
        [line] = seen(event)
        assert line.group == scene.group
    told_events = [getattr(line, "event", "") for line in caplog.records if line.name == "kafka_marshal"]
    assert "" not in told_events, "each line has its event"


# -- outages ------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, logging, signal, sys
from kafka_marshal import Marshal

class Lines(logging.Handler):
    def emit(self, record):
        fields = {key: getattr(record, key, None) for key in ("event", "partitions", "seconds")}
        print(json.dumps({**fields, "text": record.getMessage()}), flush=True)

logging.getLogger("kafka_marshal").addHandler(Lines())
logging.getLogger("kafka_marshal").setLevel("INFO")
with Marshal(sys.argv[1], group_id="g", client_id="w", heartbeat_interval=int(sys.argv[3]) / 1000) as marshal:
    signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
    with marshal.consumer([sys.argv[2]]) as consumer:
        for message in consumer:
            pass
"""


class LoggedWorker:
    """A worker process and its log."""

    def __init__(self, broker: LocalBroker, topic: str, out: Path) -> None:
        self._out = out
        with out.open("w") as lines:
            command = [sys.executable, "-c", PROGRAM, broker.bootstrap_servers, topic, str(HI)]
            self.process = subprocess.Popen(command, stdout=lines)

    def events(self) -> list[Any]:
        return [json.loads(line)["event"] for line in self._out.read_text().split("\n")[:-1]]

    def ends_within(self, seconds: float) -> float:
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(seconds) == 0
        return time.monotonic() - began


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker() as running:
        yield running


@pytest.fixture
def work(broker: LocalBroker, tmp_path: Path) -> Iterator[Callable[[], LoggedWorker]]:
    from kafka_marshal.adapters.probe import Probe

    Admin(broker.bootstrap_servers).init(2)
    Probe(broker.bootstrap_servers).create_topic("t", 6, 1, {})
    started: list[LoggedWorker] = []

    def start() -> LoggedWorker:
        started.append(LoggedWorker(broker, "t", tmp_path / f"{len(started)}.jsonl"))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait()


@pytest.mark.broker
def test_in_an_outage_a_worker_says_so_and_ends_in_time(broker: LocalBroker, work: Callable[[], LoggedWorker]) -> None:
    """SIGTERM within 8 s: with leases held, after they are lost, and when the broker never returns."""
    worker = work()
    wait_until(lambda: "claimed" in worker.events(), what="claims")
    broker.pause()
    worker.ends_within(8.0)
    broker.resume()

    worker = work()
    wait_until(lambda: "claimed" in worker.events(), what="claims")
    broker.pause()
    wait_until(lambda: {"kafka_away", "lost"} <= set(worker.events()), what="the outage told")
    broker.resume()
    wait_until(lambda: worker.events()[-1] == "claimed", what="claims after the outage")
    assert "kafka_back" in worker.events()
    told = worker.events().count("lost")  # in one line or several: parts of the log end at different times
    broker.pause()
    wait_until(lambda: worker.events().count("lost") > told, what="the second outage told")
    worker.ends_within(8.0)
    broker.resume()

    worker = work()
    wait_until(lambda: "claimed" in worker.events(), what="claims")
    broker.kill()
    worker.ends_within(8.0)
