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
    Committed,
    ConfigurationError,
    Consumer,
    Delivery,
    HeldError,
    LeaseLostError,
    Marshal,
    OpenMessages,
    PositionLostError,
    TopicPartition,
)
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.client.closing import CLOSE_TIMEOUT_S
from kafka_marshal.errors import ClientReplacedError, ClosedError, ForkedError
from kafka_marshal.node import effects, topics
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.pacing import Pacing
from rationalizer import ClaimingPartition, ClaimingShare, Heartbeat, Record, SettlingMessages, encode
from rationalizer.limits import MAX_KEY_HASH
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


# -- Leases by hand, on a real broker -----------------------------------------------------------------------------


def test_c3_earliest_claim_wins_and_the_loser_learns_by_whom(scene: Scene) -> None:
    a, b = scene.member("a"), scene.member("b")
    lease = a.claim("t", 0)
    assert lease.valid
    with pytest.raises(HeldError) as refused:
        b.claim("t", 0, timeout=0)
    assert refused.value.holder == "a"
    assert refused.value.freshness == "fresh"
    assert refused.value.since > 0


def test_claim_waits_until_the_holder_releases(scene: Scene) -> None:
    a, b = scene.member("a"), scene.member("b")
    lease = a.claim("t", 0)
    threading.Timer(0.3, lambda: lease.release(41)).start()
    taken = b.claim("t", 0, timeout=20)
    assert taken.last_offset == 41
    assert taken.epoch > lease.epoch
    assert not lease.valid


def test_c5_c8_progress_is_reported_and_inherited(scene: Scene) -> None:
    a = scene.member("a")
    lease = a.claim("t", 0)
    seen = [lease.last_offset]
    lease.heartbeat(10)
    seen.append(lease.last_offset)
    assert seen == [None, 10]
    lease.release(12)
    again = a.claim("t", 0)
    assert again.last_offset == 12
    assert again.epoch > lease.epoch


def test_c12_grant_is_given_once(scene: Scene) -> None:
    a = scene.member("a")
    lease = a.claim("t", 0)
    lease.grant(9)
    assert a.world.lease("t", 0).granted == 9  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="granted or done before"):
        lease.grant(9)
    lease.grant(10)


def test_c8_a_released_lease_takes_no_more(scene: Scene) -> None:
    lease = scene.member("a").claim("t", 0)
    lease.release()
    lease.release()
    for action in (lease.require, lambda: lease.heartbeat(1), lambda: lease.grant(1)):
        with pytest.raises(LeaseLostError):
            action()


def test_c7_a_newer_instance_takes_over_and_the_older_ends(scene: Scene) -> None:
    old = scene.member("a")
    lease = old.claim("t", 0)
    lease.heartbeat(7)
    new = scene.member("a")
    taken = new.claim("t", 0, timeout=0)
    assert taken.epoch > lease.epoch
    assert taken.last_offset == 7
    wait_until(lambda: not lease.valid)
    with pytest.raises(ClientReplacedError, match="newer instance"):
        old.claim("t", 1)


def test_close_releases_by_hand_claims(scene: Scene) -> None:
    a, b = scene.member("a"), scene.member("b")
    a.claim("t", 0)
    a.close()
    a.close()
    assert b.claim("t", 0, timeout=0).valid
    with pytest.raises(ClosedError):
        a.claim("t", 1)


def test_the_same_lease_twice_is_refused(scene: Scene) -> None:
    a = scene.member("a")
    a.claim("t", 0)
    with pytest.raises(ConfigurationError, match="already"):
        a.claim("t", 0)


@pytest.mark.parametrize("topic, partition", [("", 0), ("t\x1b[31m", 0), ("t" * 250, 0), ("t", -1), ("t", 2**31)])
def test_e2_bad_names_are_refused_before_anything_is_sent(scene: Scene, topic: str, partition: int) -> None:
    a = scene.member("a")
    with pytest.raises(ConfigurationError):
        a.claim(topic, partition)


def test_a_forked_child_is_refused(scene: Scene) -> None:
    a = scene.member("a")
    lease = a.claim("t", 0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            a.claim("t", 1)
        except ForkedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    lease.heartbeat(1)


def test_who_wants_something_ends_the_wait_for_the_echo_of_beats(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    let_gather, waiting = Pacing.let_beats_gather, threading.Event()

    def let_gather_and_tell(pacing: Pacing) -> None:
        waiting.set()
        let_gather(pacing)

    a = scene.member("a")
    for partition in range(4):  # of several partitions of the log
        a.claim("t", partition)
    monkeypatch.setattr("kafka_marshal.node.pacing.BEATS_WAIT_S", 3600.0)
    monkeypatch.setattr(Pacing, "let_beats_gather", let_gather_and_tell)
    assert waiting.wait(20)
    assert a.claim("u", 1, timeout=5).valid


def test_beats_do_not_gather_while_something_else_waits_for_its_answer(scene: Scene) -> None:
    a = scene.member("a")
    for partition in range(4):
        a.claim("t", partition)
    driver = a._driver
    for others, gathers in ((0, True), (1, False)):
        with driver.condition:
            driver.wait_for(lambda: driver.pacing.unanswered == 0, 20)
            driver.pacing.unanswered += others
            driver.engine.book.beat_all(driver.now_ms())
            driver.effects.carry_out(driver.engine.take_effects())
            assert driver.pacing.beats_sent is gathers
            driver.pacing.unanswered -= others


# -- in memory: what others have left -----------------------------------------------------------------------


class Left:
    """A log in which another worker was at work, and a lease of it to claim."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        create_topic(self.cluster, "__marshal", 1, 10)
        self.cluster.broker.create_topic("t", 1)

    def append(self, record: Record) -> int:
        return self.cluster.broker.produce("__marshal", 0, encode(record))

    def marshal(self) -> Marshal:
        return Marshal.on_cluster(self.cluster, group_id="g", client_id="a", heartbeat_interval=HI / 1000)


B, PLACE, SEEN = ("b1", "b", "g"), ("t", 0), 2**62


def test_b4_a_lease_that_others_share_is_held_until_all_have_gone() -> None:
    left = Left()
    left.append(ClaimingShare(*B, *PLACE, 600_000, start=0))
    mine = left.append(ClaimingShare("c1", "c", "g", *PLACE, 100))
    with left.marshal() as marshal:
        with pytest.raises(HeldError, match="shared by 'b', and maybe others") as refused:
            marshal.claim("t", 0, timeout=0)
        assert refused.value.holder == "b"
        left.append(SettlingMessages("c1", "c", "g", *PLACE, mine, SEEN, take=(5, 9, False)))
        assert marshal.world.wait_for(lambda world: (x := world.lease("t", 0)) and x.open, 5)
        (batch,) = marshal.world.leases()[0].open
        assert (batch.first, batch.last, batch.holder, batch.delivery_count) == (0, 4, "c", 1)


@pytest.mark.parametrize("passed", [True, False])
def test_h1_what_is_set_aside_is_in_nobodys_way_and_what_is_open_is(passed: bool) -> None:
    """Above the position what is set aside would be handled, too."""
    left = Left()
    epoch = left.append(ClaimingPartition(*B, *PLACE, 100))
    left.append(SettlingMessages(*B, *PLACE, epoch, SEEN, open=((3, 4, None, 1),), parked=((5, 8, 5, "Bad"),)))
    left.append(Heartbeat(*B, *PLACE, epoch, 9 if passed else 2))
    with left.marshal() as marshal:
        with pytest.raises(ConfigurationError, match=r"open in it \(offsets 3 to 4") as refused:
            marshal.claim("t", 0, timeout=5)
        assert "kafka-marshal discard g t:0:3" in str(refused.value)
        left.append(SettlingMessages("o1", "o", "g", *PLACE, None, SEEN, ((3, 4),)))
        assert marshal.world.wait_for(lambda world: (x := world.lease("t", 0)) and len(x.open) == 1, 5)
        if passed:
            assert marshal.claim("t", 0, timeout=5).last_offset == 9
        else:
            with pytest.raises(ConfigurationError, match=r"open in it \(offset 5\)"):
                marshal.claim("t", 0, timeout=5)


def test_h1_a_claiming_consumer_sees_what_is_open_and_who_has_it() -> None:
    left = Left()
    mine = left.append(ClaimingShare(*B, *PLACE, 600_000, start=0))
    left.append(SettlingMessages(*B, *PLACE, mine, SEEN, take=(5, 9, False)))
    left.append(SettlingMessages(*B, *PLACE, mine, SEEN, ((0, 1),), parked=((2, 8, 1, "Bad"),)))
    with left.marshal() as marshal, marshal.consumer(["t"]) as consumer:
        (found,) = consumer.committed([PLACE], ranges=True)
        assert (found.offset, found.stable, found.keys, found.ranges) == (3, 4, ((0, MAX_KEY_HASH, 4),), ())
        assert found.open == (OpenMessages(2, 2, 1, None, "Bad", 8), OpenMessages(3, 4, 1, "b", None, None))
        assert consumer.committed([PLACE]) == [(*PLACE, 3, -1)]
        assert consumer.committed([("t", 7)], ranges=True) == [Committed(-1, None, (), ())]


def test_p9_a_group_has_not_begun_before_its_start_is_found() -> None:
    left = Left()
    epoch = left.append(ClaimingPartition(*B, *PLACE, 600_000))
    with left.marshal() as marshal, marshal.consumer(["t"]) as consumer:

        def offsets() -> tuple[int, int]:
            (alone,), (whole,) = consumer.committed([PLACE]), consumer.committed([PLACE], ranges=True)
            return alone.offset, whole.offset

        assert offsets() == (-1, -1), "the other member may start at the end"
        left.append(Heartbeat(*B, *PLACE, epoch, 0))
        wait_until(lambda: offsets() == (1, 1))


def test_p9_a_member_that_begins_at_the_earliest_offset_says_so() -> None:
    left = Left()
    with left.marshal() as marshal, marshal.consumer(["t"]) as consumer:
        assert consumer.poll(0) is None
        wait_until(lambda: consumer.assignment() and consumer.committed([PLACE])[0].offset == 0)
