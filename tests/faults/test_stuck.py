"""Stuck partitions on a real broker: reported once, shown by the commands, and skipped on request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kafka_marshal import Consumer, MarshalError, PartitionStuckError, PositionLostError
from kafka_marshal.adapters.kafka.range_reader import read_range
from kafka_marshal.testing import RunningKafka
from tests.cli.harness import Command
from tests.client.conftest import Scene, take, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.slow]

#: Offset of a stored batch's records, which its checksum covers.
RECORDS_AT = 75


@pytest.fixture
def kafka(scene: Scene, command: Command) -> Command:
    command.before = ("--bootstrap", scene.bootstrap, "--topic", scene.coordination)
    return command


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which a partition counts as stuck."""
    monkeypatch.setattr("kafka_marshal.engine.work.stuck.SILENT_AFTER_MS", 1_500.0)
    monkeypatch.setattr("kafka_marshal.observe.rows.STILL_MS", 1_500)


def published(scene: Scene, topic: str, batches: int, **config: Any) -> None:
    """Publish batches of ten records each."""
    producer = Producer({"bootstrap.servers": scene.bootstrap, "linger.ms": 1_000, **config})
    producer.list_topics(topic, timeout=10)  # else the first record may go alone
    for batch in range(batches):
        for number in range(10):
            producer.produce(topic, f"record {10 * batch + number} ".encode() * 20, partition=0)
        assert producer.flush(20) == 0


def spoil(kafka: RunningKafka, topic: str, batch: int) -> None:
    """Flip bits in one stored batch, as a disk may."""
    folder: Path | None = getattr(kafka, "folder", None)
    if folder is None:
        pytest.skip("the disk of a broker that somebody else runs is not ours to spoil")
    (segment,) = folder.glob(f"broker-1/data/{topic}-0/00000000000000000000.log")
    data, at, bounds = segment.read_bytes(), 0, []
    while at < len(data):
        size = 12 + int.from_bytes(data[at + 8 : at + 12], "big")
        bounds.append((at, at + size))
        at += size
    begin, end = bounds[batch]
    with segment.open("r+b") as file:
        for place in range(begin + RECORDS_AT, min(end - 2, begin + 110)):
            file.seek(place)
            file.write(bytes([data[place] ^ 0x5A]))


def taken(
    consumer: Consumer, until: Callable[[], object], raised: list[MarshalError], within_s: float = 30
) -> list[int]:
    """Offsets delivered until a condition holds; the consumer's exceptions are added to raised."""
    got: list[int] = []
    deadline = time.monotonic() + within_s
    while not until():
        assert time.monotonic() < deadline, f"not within {within_s} s: {got} came, {raised} was raised"
        try:
            message = consumer.poll(0.1)
        except MarshalError as error:
            raised.append(error)
            continue
        if message is not None:
            got.append(message.offset() or 0)
            consumer.done(message)
    return got


@pytest.mark.parametrize("codec, config", [("gzip", {}), ("none", {"check.crcs": True})])
def test_a_corrupt_batch_is_one_error_and_skip_leads_past_it(
    scene: Scene,
    kafka: Command,
    kafka_broker: RunningKafka,
    impatient: None,
    caplog: pytest.LogCaptureFixture,
    codec: str,
    config: dict[str, object],
) -> None:
    topic = scene.topic()
    published(scene, topic, 3, **{"compression.type": codec})
    spoil(kafka_broker, topic, 1)
    raised: list[MarshalError] = []
    with scene.member().consumer([topic], config=config, partition_stuck="raise") as consumer:
        got = taken(consumer, lambda: raised, raised)
        until = time.monotonic() + 3
        got += taken(consumer, lambda: time.monotonic() > until, raised)
        [error] = raised
        assert isinstance(error, PartitionStuckError)
        assert (got, error.topic, error.partition, error.offset) == (list(range(10)), topic, 0, 10)
        assert [(one.why, one.offset) for one in consumer.stuck] == [("unreadable", 10)]
        ours = [record for record in caplog.records if record.name == "kafka_marshal"]
        assert len([record for record in ours if record.levelno >= logging.ERROR]) == 1
        assert len(ours) <= 4, [record.getMessage() for record in ours]

        shown = kafka("status", "--group", scene.group, "--json").json["leases"][0]["stuck"]
        assert shown.startswith("offset 10 can't be read")
        planned = kafka("skip", scene.group, f"{topic}:0", "--dry-run", "--json")
        assert [(move["before"], move["after"]) for move in planned.json["moves"]] == [(10, 20)]
        assert kafka("skip", scene.group, f"{topic}:0", "--yes").status == 0
        assert take(consumer, 10) == [(0, offset) for offset in range(20, 30)]
        wait_until(lambda: not consumer.stuck)
    again = kafka("skip", scene.group, f"{topic}:0", "--yes")
    assert again.status == 1 and "nothing stands in the way" in again.err


def test_one_partition_that_can_not_be_read_ends_no_loop(scene: Scene, kafka_broker: RunningKafka) -> None:
    """Raised in one worker's loop after another, it would stop all of them."""
    topic = scene.topic(2)
    published(scene, topic, 3, **{"compression.type": "gzip"})
    spoil(kafka_broker, topic, 1)
    raised: list[MarshalError] = []
    with scene.member().consumer([topic]) as consumer:
        assert taken(consumer, lambda: consumer.stuck, raised) == list(range(10))
        producer = Producer({"bootstrap.servers": scene.bootstrap})
        producer.produce(topic, b"other", partition=1)
        assert producer.flush(20) == 0
        assert take(consumer, 1) == [(1, 0)]
        assert [(one.partition, one.why) for one in consumer.stuck] == [(0, "unreadable")]
    assert raised == []


def test_a_reader_that_is_replaced_continues_where_the_old_one_was(scene: Scene) -> None:
    topic = scene.topic(2, 20)
    with scene.member().consumer([topic]) as consumer:
        seen = take(consumer, 10)
        wait_until(lambda: len(consumer.assignment()) == 2)
        consumer.pause([(topic, 1)])
        before = consumer._fetcher.reader
        consumer._fetcher.monitor._tries[topic, 0] = 1  # reading again did not help …
        consumer._fetcher.monitor.missing = lambda: [] if consumer._fetcher.reader is not before else [(topic, 0)]  # type: ignore[method-assign]
        scene.publish(topic, 2, 5)
        wanted = {(0, offset) for offset in range(25)}
        seen += take(consumer, len(wanted.difference(seen)))
        assert consumer._fetcher.reader is not before
        assert wanted <= set(seen)
        assert consumer.poll(0.5) is None, "the pause holds for the new one, too"
        consumer.resume()
        seen += take(consumer, 50 - len(seen))
        each_once = [(partition, offset) for partition in range(2) for offset in range(25)]
        assert sorted(seen) == each_once


def test_the_reader_of_ranges_says_what_can_not_be_read(scene: Scene, kafka_broker: RunningKafka) -> None:
    topic = scene.topic()
    published(scene, topic, 3, **{"compression.type": "gzip"})
    spoil(kafka_broker, topic, 1)
    came = 0
    with pytest.raises(PartitionStuckError, match="offset 10 can't be read: Decompression") as caught:
        for messages in read_range(scene.bootstrap, {}, topic, 0, 0, 29, timeout_s=20):
            came += len(messages)
    assert (came, caught.value.offset) == (10, 10)


def test_a_record_larger_than_the_consumer_may_receive_is_one_error(scene: Scene, kafka: Command) -> None:
    settings: dict[str, Any] = {"max.message.bytes": "4000000"}
    topic = scene.topic(messages=5, **settings)
    producer = Producer({"bootstrap.servers": scene.bootstrap, "message.max.bytes": 3_500_000})
    producer.produce(topic, bytes(3_000_000))
    producer.produce(topic, b"after")
    assert producer.flush(20) == 0
    raised: list[MarshalError] = []
    small = {"fetch.max.bytes": 1_000_000, "receive.message.max.bytes": 1_100_000, "message.max.bytes": 1_000_000}
    with scene.member().consumer([topic], config=small, partition_stuck="raise") as consumer:
        assert taken(consumer, lambda: raised, raised) == [0, 1, 2, 3, 4]
        assert isinstance(raised[0], PartitionStuckError)
        assert "receive.message.max.bytes" in str(raised[0]) and f"skip {scene.group} {topic}:0 --to 6" in str(
            raised[0]
        )
        assert [one.why for one in consumer.stuck] == ["too large"]
        assert kafka("skip", scene.group, f"{topic}:0", "--to", "6", "--yes").status == 0
        assert take(consumer, 1) == [(0, 6)]
        assert len(raised) == 1


@pytest.mark.parametrize("second", [4, 25])
def test_p12_a_topic_recreated_while_no_member_ran(scene: Scene, kafka: Command, second: int) -> None:
    """Shorter than the position, and longer: nothing is skipped, and lag does not claim that all is done."""
    topic = scene.topic(messages=10)
    with scene.member("w") as member, member.consumer([topic]) as consumer:
        take(consumer, 10)
    admin = AdminClient({"bootstrap.servers": scene.bootstrap})
    admin.delete_topics([topic])[topic].result(20)
    wait_until(lambda: not scene.cluster.topic_info([topic], 10))
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(20)
    scene.publish(topic, 1, second)
    raised: list[MarshalError] = []
    with scene.member("w") as member, member.consumer([topic], position_lost="raise") as consumer:
        assert taken(consumer, lambda: raised, raised) == []
        assert isinstance(raised[0], PositionLostError) and "recreated" in str(raised[0])
        [row] = kafka("lag", "--group", scene.group, "--json").json["partitions"]
        assert (row["lag"], row["stuck"]) == (None, "position lost: the topic was deleted and recreated")
        assert kafka("release-group", scene.group, "--partition", f"{topic}:0=earliest", "--yes").status == 0
        assert take(consumer, second) == [(0, offset) for offset in range(second)]
    with scene.member("w") as member, member.consumer([topic]) as consumer:
        scene.publish(topic, 1, 1)
        assert take(consumer, 1) == [(0, second)]
