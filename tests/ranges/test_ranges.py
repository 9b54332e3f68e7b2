"""RangeConsumer on a real broker: ranges, progress, hand-over, retention, transactions."""

from __future__ import annotations

import logging
import uuid

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kafka_marshal import ConfigurationError, OffsetRange, PositionLostError
from tests.client.conftest import HI, Scene, wait_until
from tests.ranges.conftest import drain, offsets


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
    member = scene.member("a", heartbeat_interval_ms=60_000)
    consumer = member.ranges([topic])
    consumer.done(consumer.take(40, timeout=20), flush=True)
    assert member.world.wait_for(lambda world: world.lease(topic, 0).stable == 39, 5)  # type: ignore[union-attr]


def test_p6_what_is_done_beyond_a_gap_is_left_out_and_only_gaps_are_committed(scene: Scene) -> None:
    topic = scene.topic(1, 100)
    with scene.member("a").ranges([topic]) as consumer:
        parts = [consumer.take(10, timeout=20)[0] for _ in range(5)]
        consumer.done([parts[1], parts[3]])
    lease = scene.members[0].world.lease(topic, 0)
    assert lease is not None
    assert (lease.stable, lease.ranges) == (None, ((10, 19), (30, 39)))
    with scene.member("b").ranges([topic]) as consumer:
        (found,) = consumer.take(1_000, timeout=20)
        assert (found.first, found.last, found.done, found.count) == (0, 99, ((10, 19), (30, 39)), 80)
        consumer.give_back([found])
        (short,) = consumer.take(15, timeout=20)
        assert (short.first, short.last, short.done, short.count) == (0, 24, ((10, 19),), 15)
        consumer.done([short])
        (rest,) = consumer.take(1_000, timeout=20)
        assert (rest.first, rest.last, rest.done) == (25, 99, ((30, 39),))
        consumer.done([rest])
    found_by_a = scene.members[0].world
    assert found_by_a.wait_for(lambda world: [(x.stable, x.ranges) for x in world.leases()] == [(99, ())], 10)


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


def test_two_members_share_and_the_second_gets_its_part_at_a_handover(scene: Scene) -> None:
    topic = scene.topic(4, 200)
    revoked: list[int] = []
    slowly = {"heartbeat_interval_ms": 2_000}  # so that a busy machine does not lose the lease
    a = scene.member("a", **slowly).ranges(
        [topic], on_revoke=lambda _, partitions: revoked.extend(x[1] for x in partitions)
    )
    wait_until(lambda: len(a.assignment()) == 4)
    in_hand = a.take(80, timeout=20)
    b = scene.member("b", **slowly).ranges([topic])
    wait_until(lambda: len(revoked) == 2, what="a lets go of its part")
    assert all(a.is_valid(given) for given in in_hand)
    assert b.take(10, timeout=0.3) == [], "what is in hand at a is not handed over"
    found = a.done(in_hand)
    assert found == in_hand, "in-flight ranges of a partition that is let go still count"
    wait_until(lambda: len(b.assignment()) == 2)
    taken = b.take(1_000, timeout=20)
    assert offsets(taken).isdisjoint(offsets(in_hand))
    epochs = {given.partition: given.epoch for given in in_hand}
    assert all(given.epoch > epochs[given.partition] for given in taken)


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


def test_p9_a_log_that_begins_above_zero_is_no_gap_for_a_new_group(scene: Scene) -> None:
    topic = scene.topic(1, 100)
    delete_before(scene, topic, 0, 40)
    member = scene.member("a")
    consumer = member.ranges([topic])
    assert [(x.first, x.last) for x in consumer.take(10, timeout=20)] == [(40, 49)]
    assert consumer.gaps == []
    assert member.world.lease(topic, 0).stable == 39  # type: ignore[union-attr]


def test_p11_a_position_beyond_the_log_delivers_nothing(scene: Scene) -> None:
    topic = scene.topic(1, 50)
    with scene.member("a") as member, member.claim(topic, 0) as lease:
        lease.heartbeat(99)
    consumer = scene.member("b").ranges([topic], position_lost="raise")
    with pytest.raises(PositionLostError, match="continues at offset 100"):
        consumer.take(10, timeout=20)
    assert consumer.take(10, timeout=0.3) == []


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


def test_lost_leases_ranges_commit_nothing_and_are_counted(scene: Scene) -> None:
    topic = scene.topic(1, 100)
    lost: list[int] = []
    member = scene.member("a")
    consumer = member.ranges([topic], on_lost=lambda _, partitions: lost.extend(x.partition for x in partitions))
    taken = consumer.take(10, timeout=20)
    assert consumer.is_valid(taken[0])
    _evict(scene, topic, taken[0])
    wait_until(lambda: lost == [0])
    assert not consumer.is_valid(taken[0])
    assert consumer.done(taken) == []
    assert consumer.ignored_done == 1
    again = consumer.take(10, timeout=20)
    assert (again[0].first, again[0].last) == (0, 9)
    assert again[0].epoch > taken[0].epoch
    assert consumer.done(taken) == [], "the old epoch's range is not the new one"
    assert consumer.done(again) == again
    assert consumer.done(again) == []
    assert consumer.ignored_done == 3


def _evict(scene: Scene, topic: str, given: OffsetRange) -> None:
    from kafka_marshal.admin import Admin

    with Admin(scene.bootstrap, topic=scene.coordination) as admin:
        admin.evict(scene.group, topic, given.partition, force=True)


def test_amo_grants_first_and_never_delivers_twice(scene: Scene) -> None:
    topic = scene.topic(2, 100)
    member = scene.member("a")
    consumer = member.ranges([topic], delivery="at-most-once")
    wait_until(lambda: len(consumer.assignment()) == 2)
    taken = consumer.take(40, timeout=20)
    assert {given.partition: given.last for given in taken} == {0: 19, 1: 19}
    assert [lease.granted for lease in member.world.leases()] == [19, 19], "granted before it is handed out"
    member.terminate()  # as in a crash: nothing is released or done
    again = scene.member("b").ranges([topic], delivery="at-most-once")
    found: list[OffsetRange] = []
    while len(offsets(found)) < 160:
        found.extend(again.take(1_000, timeout=20))
        assert again.done(found[-1:])
    assert offsets(found).isdisjoint(offsets(taken))


def test_amo_what_was_granted_and_given_back_is_reported(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    topic = scene.topic(1, 100)
    consumer = scene.member("a").ranges([topic], delivery="at-most-once")
    taken = consumer.take(40, timeout=20)
    with caplog.at_level(logging.WARNING, "kafka_marshal"):
        consumer.give_back(taken)
    assert consumer.unprocessed == [(topic, 0, 0, 39)]
    assert "granted and not handed out" in caplog.text
    assert consumer.take(10, timeout=20)[0].first == 40


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
