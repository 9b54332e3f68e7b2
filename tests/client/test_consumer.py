"""Consumers, on a real broker: delivery, done, and the distribution of partitions."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import pytest

from kafka_marshal import (
    ConfigurationError,
    Consumer,
    Delivery,
    PositionLostError,
    TopicPartition,
)
from kafka_marshal.client.closing import CLOSE_TIMEOUT_S
from kafka_marshal.node import effects, topics
from tests.client.conftest import HI, Scene, take, wait_until


def test_iteration_delivers_everything_in_order(scene: Scene) -> None:
    topic = scene.topic(3, 200)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with scene.member("a") as a, a.consumer([topic]) as consumer:
        for message in consumer:
            seen[message.partition() or 0].append(message.offset() or 0)
            if sum(map(len, seen.values())) == 600:
                break
    assert seen == {partition: list(range(200)) for partition in range(3)}


def test_c14_what_is_done_is_in_the_log_and_the_message_at_break_is_not(scene: Scene) -> None:
    topic = scene.topic(1, 20)
    with scene.member("a") as a, a.consumer([topic]) as consumer:
        for message in consumer:
            if message.offset() == 9:
                break
    with scene.member("b") as b:
        assert b.world.lease(topic, 0).stable == 8  # type: ignore[union-attr]
        with b.consumer([topic]) as consumer:
            assert take(consumer, 1) == [(0, 9)]


def test_the_message_at_an_exception_comes_again(scene: Scene) -> None:
    topic = scene.topic(1, 5)
    with scene.member("a") as a, a.consumer([topic]) as consumer:
        with pytest.raises(ZeroDivisionError):
            for message in consumer:
                if message.offset() == 2:
                    raise ZeroDivisionError
        assert [m.offset() for m in islice(consumer, 3)] == [2, 3, 4]


def test_batches_are_of_one_partition_and_done_when_said(scene: Scene) -> None:
    topic = scene.topic(2, 100)
    a = scene.member("a")
    with a.consumer([topic]) as consumer:
        seen: Counter[int] = Counter()
        for batch in consumer.batches(max_messages=30, timeout=0.2):
            assert {m.partition() for m in batch} == {batch.partition}
            assert 1 <= len(batch) <= 30
            assert batch.epoch == a.world.lease(topic, batch.partition).epoch  # type: ignore[union-attr]
            seen[batch.partition] += len(batch)
            batch.done()
            if seen.total() == 200:
                break
    assert seen == {0: 100, 1: 100}
    assert [lease.stable for lease in a.world.leases()] == [99, 99]


def test_a_batch_whose_lease_ended_while_it_was_waited_for_is_not_handed_out(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process had been stopped between the library's thread and the caller's."""
    topic = scene.topic(1, 10)
    with scene.member("a") as a, a.consumer([topic]) as consumer:
        may_leave, refused = consumer._may_leave, list[Any]()

        def stopped_once(run: Any, now: float) -> bool:
            if not refused:
                refused.append(run)
                return may_leave(run, run.assignment.lease.hand_out_until)
            return may_leave(run, now)

        monkeypatch.setattr(consumer, "_may_leave", stopped_once)
        batch = next(iter(consumer.batches(max_messages=10, timeout=5)))
        assert batch._run is not refused[0]
        assert batch.first_offset == 0


def test_of_a_batch_that_is_dropped_what_is_done_does_not_come_again(scene: Scene) -> None:
    topic = scene.topic(1, 10)
    with scene.member("a") as a, a.consumer([topic]) as consumer:
        batch = next(iter(consumer.batches(max_messages=10, timeout=5)))
        for offset in range(4):
            consumer.done(batch.messages[offset])
        first, last = batch.first_offset, batch.last_offset
        del batch
        assert take(consumer, last - 3) == [(0, offset) for offset in range(first + 4, last + 1)]


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_lists_of_messages_are_the_callers_own(scene: Scene, delivery: Delivery) -> None:
    """Sorting or clearing a list changes neither what is done nor a batch's offsets."""
    topic = scene.topic(1, 60)
    a = scene.member("a")
    with a.consumer([topic], delivery=delivery) as consumer:
        batch = next(iter(consumer.batches(max_messages=20, timeout=5)))
        batch.messages.reverse()
        assert (batch.first_offset, batch.last_offset) == (0, 19)
        batch.messages.clear()
        assert (batch.first_offset, batch.last_offset) == (0, 19)
        batch.done()
        messages = consumer.consume(20, 10)
        several = list(messages)
        messages.reverse()
        for message in several[:10]:
            consumer.done(message)
        messages.clear()
        for message in several[10:]:
            consumer.done(message)
        assert take(consumer, 20) == [(0, offset) for offset in range(40, 60)]
    assert [lease.stable for lease in a.world.leases()] == [59]


def test_close_returns_when_all_callbacks_have(scene: Scene) -> None:
    """Including that of a lease lost just before: what it uses may not exist after the block."""
    lost, go = threading.Event(), threading.Event()

    def on_lost(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        lost.set()
        go.wait(20)

    consumer = scene.member("a").consumer([scene.topic(1, 5)], handler_timeout=0.3, on_lost=on_lost)
    assert consumer.poll(10) is not None
    assert lost.wait(10)
    closing = threading.Thread(target=consumer.close)
    closing.start()
    closing.join(CLOSE_TIMEOUT_S + 0.5)
    assert closing.is_alive()
    go.set()
    closing.join(20)
    assert not closing.is_alive()


@pytest.mark.parametrize("callback", ["on_assign", "on_revoke", "on_lost"])
def test_a_callback_may_close_its_consumer(scene: Scene, callback: str) -> None:
    """It does not wait for itself."""
    closed = threading.Event()

    def close(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.close()
        closed.set()

    topic = scene.topic(2, 5)
    consumer = scene.member("a").consumer([topic], handler_timeout=1.0, **{callback: close})  # type: ignore[call-overload]
    if callback == "on_revoke":
        take(consumer, 1)
        _kept = scene.member("b").consumer([topic])
    elif callback == "on_lost":
        assert consumer.poll(10) is not None
    assert closed.wait(10)


def test_beats_continue_while_a_handler_takes_long(scene: Scene) -> None:
    topic = scene.topic(1, 2)
    a, b = scene.member("a"), scene.member("b")
    consumer, other = a.consumer([topic]), None
    message = consumer.poll(10)
    assert message is not None
    other = b.consumer([topic])
    began = a.world.log_time
    assert a.world.wait_for(lambda world: world.log_time > began + 6 * HI, 30)
    assert other.assignment() == []
    consumer.done(message)
    assert take(consumer, 1) == [(0, 1)]


def test_stop_from_a_signal_handler_ends_the_loop(scene: Scene) -> None:
    topic = scene.topic(1, 3)
    a = scene.member("a")
    before = signal.signal(signal.SIGUSR1, lambda *_: a.stop())
    try:
        seen = 0
        with a.consumer([topic]) as consumer:
            for _ in consumer:
                seen += 1
                if seen == 3:
                    os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == 3
    assert a.world.lease(topic, 0).stable == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(("delivery", "returned"), [("at-least-once", 3), ("at-most-once", 6)])
def test_consume_does_not_wait_for_more_with_what_is_to_be_released(
    scene: Scene, delivery: Delivery, returned: int
) -> None:
    """At least once, another member got the partition at the time-out; at most once, before granted messages of it
    had been returned (seed 8001209)."""
    topic = scene.topic(2, 3)
    consumer = scene.member("a").consumer([topic], delivery=delivery)
    got: list[tuple[int, int]] = []

    def consume() -> None:
        got.extend((m.partition() or 0, m.offset() or 0) for m in consumer.consume(1_000, 60))

    waiting = threading.Thread(target=consume)
    waiting.start()
    wait_until(lambda: [x.offset for x in consumer.assignment()] == [3, 3])
    other = scene.member("b").consumer([topic], delivery=delivery)
    wait_until(lambda: len(other.assignment()) == 1)
    waiting.join(10)
    assert len(got) == returned
    if delivery == "at-least-once":
        assert sorted(got + take(other, 3)) == [(partition, offset) for partition in (0, 1) for offset in range(3)]


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize("way", ["iterate", "poll", "batches"])
def test_nothing_comes_of_a_paused_partition_until_it_is_resumed(scene: Scene, delivery: Delivery, way: str) -> None:
    """Not even messages fetched, granted or begun before the pause; and none is missing afterwards."""
    topic = scene.topic(2, 30)
    consumer = scene.member("a").consumer([topic], delivery=delivery, batch_size=10)
    seen: list[tuple[int, int]] = []
    held: int | None = None
    for found in one_by_one(consumer, way):
        assert found[0] != held
        seen.append(found)
        if len(seen) == 7:
            held = found[0]
            consumer.pause([(topic, held)])
        elif held is not None and sum(partition != held for partition, _ in seen) == 30:
            held = None
            consumer.resume()
        if len(seen) == 60:
            break
    assert sorted(seen) == [(partition, offset) for partition in range(2) for offset in range(30)]
    assert [x for x in seen if x[0] == 0] == [(0, offset) for offset in range(30)], "in order"


def one_by_one(consumer: Consumer, way: str) -> Iterator[tuple[int, int]]:
    """(partition, offset) of each message, done when the next one is requested."""
    if way == "iterate":
        for message in consumer:
            yield message.partition() or 0, message.offset() or 0
    elif way == "poll":
        while True:
            yield from take(consumer, 1)
    else:
        for batch in consumer.batches(1):
            yield batch.partition, batch.last_offset
            batch.done()


def test_a_seek_beyond_the_logs_end_is_refused_unless_forced(scene: Scene) -> None:
    topic = scene.topic(1, 10)
    a = scene.member("a")
    consumer = a.consumer([topic])
    take(consumer, 1)
    with pytest.raises(ConfigurationError, match=r"log ends at 10.*force=True"):
        consumer.seek(topic, 0, 11)
    consumer.seek(topic, 0, 10)  # a sink that already has everything
    consumer.seek(topic, 0, 12, force=True)
    consumer.close()
    assert a.world.lease(topic, 0).stable == 11  # type: ignore[union-attr]


@pytest.mark.parametrize(("seen_ms", "first"), [(1, 0), (3_600_000, 3)])
def test_q38_a_member_that_did_not_see_a_topic_grow_begins_with_its_new_partitions_first_message(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, seen_ms: int, first: int
) -> None:
    """No member ran when the topic grew. (A group younger than seen_ms can't know, and begins at the end.)"""
    monkeypatch.setattr(effects, "GROWTH_SEEN_MS", seen_ms)
    topic = scene.topic(1, 10)
    a = scene.member("a")
    consumer = a.consumer([topic], start="latest")
    assert a.world.wait_for(lambda world: (x := world.lease(topic, 0)) and x.stable == 9, 10)
    consumer.close()
    scene.grow(topic, 2)
    scene.publish(topic, 2, 3)
    b = scene.member("b")
    again = b.consumer([topic], start="latest")
    if first:
        assert b.world.wait_for(lambda world: (x := world.lease(topic, 1)) and x.stable == first - 1, 10)
    scene.publish(topic, 2, 1)
    expected = [(0, offset) for offset in range(10, 14)] + [(1, offset) for offset in range(first, 4)]
    assert sorted(take(again, len(expected))) == expected


def test_q38_a_grown_topic_is_seen_before_that_is_taken_for_granted() -> None:
    assert effects.GROWTH_SEEN_MS > topics.METADATA_INTERVAL_MS * (1 + topics.METADATA_JITTER)


def test_p9_start_at_a_moment(scene: Scene) -> None:
    topic = scene.topic(1, 5)
    moment = datetime.now(UTC)
    wait_until(lambda: datetime.now(UTC) > moment)
    scene.publish(topic, 1, 2)
    consumer = scene.member("a").consumer([topic], start=moment)
    assert take(consumer, 2) == [(0, 5), (0, 6)]


def test_p11_a_position_beyond_the_log_is_reported_not_looped_on(scene: Scene) -> None:
    topic = scene.topic(1, 5)
    a = scene.member("a")
    a.claim(topic, 0).release(99)
    lost = threading.Event()
    consumer = a.consumer([topic], on_lost=lambda *_: lost.set(), position_lost="raise")
    with pytest.raises(PositionLostError, match=rf"--partition {topic}:0=") as caught:
        consumer.poll(20)
    assert (caught.value.topic, caught.value.partition, caught.value.offset) == (topic, 0, 100)
    assert lost.wait(5)
    assert consumer.poll(0.5) is None


def test_p11_a_lost_position_ends_no_loop(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    topic = scene.topic(2, 5)
    scene.member("a").claim(topic, 0).release(99)
    for first, name in ((0, "b"), (5, "c")):  # a worker and its successor
        told = threading.Event()
        with scene.member(name) as member, member.consumer([topic], on_lost=lambda *_: told.set()) as consumer:  # noqa: B023
            assert take(consumer, 5) == [(1, offset) for offset in range(first, first + 5)]
            while not told.is_set():
                consumer.poll(0.1)
            assert [one[:4] for one in consumer.lost_positions] == [(topic, 0, 100, "position lost")]
            health = member.health()
            assert not health.ok and not health.needs_restart and "position lost" in health.problems[0]
            assert str(health).count("position lost") == 1 and member.metrics().stuck == 1
        scene.publish(topic, 2, 5)
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 2 and all(f"--partition {topic}:0=" in line for line in said)


def test_topics_by_pattern_and_topics_made_later(scene: Scene) -> None:
    topic = scene.topic(1, 2)
    consumer = scene.member("a").consumer([f"^{topic}.*"])
    assert take(consumer, 2) == [(0, 0), (0, 1)]
    scene.cluster.create_topic(f"{topic}-later", 2, 1, {}, 10)
    scene.publish(f"{topic}-later", 2, 1)
    assert sorted(take(consumer, 2, 30)) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("topic", ["no such topic!", "", "..", "x" * 250, "flüge", "^[", 7])
def test_a_name_that_no_topic_can_have_is_refused(scene: Scene, topic: str) -> None:
    """The consumer would wait for it silently for ever."""
    with pytest.raises(ConfigurationError, match="topics"):
        scene.member("a").consumer([topic])
    scene.member("b").consumer(["fine-here_1.0", "^fine.*"])
