"""RangeConsumer on a real broker: ranges, progress, hand-over, retention, transactions."""

from __future__ import annotations

import logging
import uuid

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kafka_marshal import ConfigurationError
from tests.client.conftest import HI, Scene, wait_until
from tests.ranges.conftest import drain


def delete_before(scene: Scene, topic: str, partition: int, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": scene.bootstrap})
    for future in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        future.result(10)


def test_ranges_run_from_done_to_the_high_watermark_and_are_capped_and_fair(scene: Scene) -> None:
    topic = scene.topic(3, 100)
    consumer = scene.member("a").ranges([topic])
    wait_until(lambda: len(consumer.assignment()) == 3)
    first = consumer.take(30, timeout=20)
    assert sorted((x.partition, x.first, x.last) for x in first) == [(0, 0, 9), (1, 0, 9), (2, 0, 9)]
    second = consumer.take(1_000, timeout=20)
    assert sorted((x.partition, x.first, x.last) for x in second) == [(0, 10, 99), (1, 10, 99), (2, 10, 99)]
    assert consumer.take(10, timeout=0.2) == []
    consumer.done([*first, *second])
    scene.publish(topic, 1, 5)
    assert [(x.partition, x.first, x.last) for x in consumer.take(10, timeout=20)] == [(0, 100, 104)]


def test_done_travels_with_the_beats_and_the_next_holder_continues(scene: Scene) -> None:
    topic = scene.topic(2, 100)
    with scene.member("a").ranges([topic]) as consumer:
        drain(consumer, 200)
        taken = []
    world = scene.members[0].world
    assert [lease.stable for lease in world.leases()] == [99, 99]
    assert [lease.client_id for lease in world.leases()] == [None, None]
    with scene.member("b").ranges([topic]) as consumer:
        taken = consumer.take(10, timeout=0.5)
    assert taken == []


def test_flush_commits_at_once(scene: Scene) -> None:
    topic = scene.topic(1, 100)
    member = scene.member("a", heartbeat_interval=60.0)
    consumer = member.ranges([topic])
    consumer.done(consumer.take(40, timeout=20), flush=True)
    assert member.world.wait_for(lambda world: world.lease(topic, 0).stable == 39, 5)  # type: ignore[union-attr]


def test_ranges_and_messages_share_one_progress(scene: Scene) -> None:
    topic = scene.topic(1, 60)
    with scene.member("a").consumer([topic]) as messages:
        for _ in range(20):
            message = messages.poll(10)
            assert message is not None
            messages.done(message)
    with scene.member("b").ranges([topic]) as ranges:
        (found,) = ranges.take(30, timeout=20)
        assert (found.first, found.last) == (20, 49)
        ranges.done([found])
    with scene.member("c").consumer([topic]) as messages:
        message = messages.poll(10)
        assert message is not None
        assert message.offset() == 50


def test_available_ends_bound_what_is_taken(scene: Scene) -> None:
    topic = scene.topic(2, 50)
    consumer = scene.member("a").ranges([topic])
    ends = consumer.ends()
    assert ends == {(topic, 0): 50, (topic, 1): 50}
    scene.publish(topic, 2, 50)
    wait_until(lambda: len(consumer.assignment()) == 2)
    taken = consumer.take(1_000, ends, timeout=20)
    assert {given.last for given in taken} == {49}
    assert consumer.take(1_000, {(topic, 1): 60}, timeout=20)[0].last == 59
    assert not consumer.is_done(ends)
    consumer.done(taken, flush=True)
    wait_until(lambda: consumer.wait_done(ends, 5))


def test_a_full_round_is_planned_ahead_without_asking_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = scene.topic(2, 100)
    consumer = scene.member("a").ranges([topic])
    wait_until(lambda: len(consumer.assignment()) == 2)
    consumer.done(consumer.take(20, timeout=20))
    consumer.look_ahead()
    ahead = consumer._marks.ahead
    assert ahead is not None
    ahead.result(20)
    monkeypatch.setattr(consumer._marks, "_ask", None)  # further questions fail
    assert sum(given.count for given in consumer.take(100, timeout=0)) == 100
    monkeypatch.undo()
    assert sum(given.count for given in consumer.take(1_000, timeout=20)) == 80, "not full: the leaders are asked"


def test_p9_latest_and_what_retention_took(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    topic = scene.topic(1, 100)
    consumer = scene.member("a", group_id="late").ranges([topic], start="latest")
    assert consumer.take(10, timeout=0.5) == []
    scene.publish(topic, 1, 3)
    assert [(x.first, x.last) for x in consumer.take(10, timeout=20)] == [(100, 102)]

    other = scene.member("b").ranges([topic])
    other.done(other.take(10, timeout=20))
    delete_before(scene, topic, 0, 40)
    with caplog.at_level(logging.WARNING, "kafka_marshal"):
        (found,) = other.take(10, timeout=20)
    assert (found.first, found.last) == (40, 49)
    assert other.gaps == [(topic, 0, 10, 39)]
    assert "offsets 10 to 39 are gone" in caplog.text


@pytest.mark.parametrize("level", ["read_committed", "read_uncommitted"])
def test_ranges_end_at_the_last_stable_offset_under_read_committed(scene: Scene, level: str) -> None:
    topic = scene.topic(1, 10)
    producer = Producer({"bootstrap.servers": scene.bootstrap, "transactional.id": uuid.uuid4().hex})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(20)
    consumer = scene.member("a").ranges([topic], config={"isolation.level": level})
    (found,) = consumer.take(100, timeout=20)
    assert found.last == (9 if level == "read_committed" else 10)
    consumer.done([found])
    producer.commit_transaction(20)
    (rest,) = consumer.take(100, timeout=20)
    assert (rest.first, rest.last) == (found.last + 1, 11), "the marker is an offset like another"


def test_what_cannot_work_is_said_at_once(scene: Scene) -> None:
    topic = scene.topic(1, 1)
    member = scene.member("a")
    with pytest.raises(ConfigurationError, match=r"isolation\.level"):
        member.ranges([topic], config={"isolation.level": "serializable"})
    consumer = member.ranges([topic])
    with pytest.raises(ConfigurationError, match="max_records"):
        consumer.take(0)
    with pytest.raises(ConfigurationError, match="another consumer"):
        member.consumer([topic])


def test_stop_ends_a_wait_and_close_ends_a_wait(scene: Scene) -> None:
    import threading

    topic = scene.topic(1, 0)
    for end in ("stop", "close"):
        member = scene.member(f"m-{end}")
        consumer = member.ranges([topic])
        threading.Timer(0.3, member.stop if end == "stop" else consumer.close).start()
        assert consumer.take(10) == []


def test_an_idle_member_costs_the_log_only_beats(scene: Scene) -> None:
    topic = scene.topic(1, 10)
    consumer = scene.member("a").ranges([topic])
    drain(consumer, 10)
    watcher = scene.member("w")
    before = sum(world.next_offset for world in watcher._driver.replica.worlds.values())
    assert consumer.take(10, timeout=2 * HI / 1000) == []
    after = sum(world.next_offset for world in watcher._driver.replica.worlds.values())
    assert after - before < 20
