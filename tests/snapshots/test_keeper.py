"""Taking snapshots, and comparing with those of other members (S2)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random

import pytest

from kafka_marshal.adapters.memory.broker import MemoryMessage
from kafka_marshal.errors import SnapshotDifferenceError
from kafka_marshal.runtime import THREADS
from kafka_marshal.snapshots.publisher import JITTER_MS, LOOK_MS, RETRY_MS, SnapshotKeeper
from kafka_marshal.snapshots.reader import SnapshotReader
from rationalizer.limits import SNAPSHOT_INTERVAL
from rationalizer.log_hash import encode_hash
from rationalizer.snapshot_log import encode_snapshot
from tests.snapshots.conftest import SNAPSHOTS, TIMEOUT_S, TOPIC, Story, wait_until

K = SNAPSHOT_INTERVAL


def keeper_of(story: Story, client: str = "keeper") -> SnapshotKeeper:
    cluster = story.cluster.connect(client)
    reader = SnapshotReader.find(cluster, SNAPSHOTS, 0.05)
    assert reader is not None
    reader.read_newest(2)
    return SnapshotKeeper(cluster, reader, SNAPSHOTS, Random(1), 0.0)


# -- members -----------------------------------------------------------------------------------------------


def test_s2_a_member_writes_the_last_two_that_a_start_needs(story: Story, at_once: Callable[[], None]) -> None:
    for place in range(K, 5 * K, K):
        story.up_to(place)
    story.beat(7)
    story.member("a")
    wait_until(lambda: len(story.stored()) == 2, "two snapshots")
    assert dict(story.stored()) == {place: story.digests[place] for place in (3 * K, 4 * K)}
    replica = story.replica()
    assert replica.starts[0].begun_at == 3 * K
    assert replica.worlds[0].snapshot() == story.truth.snapshot()


def test_s2_it_is_taken_where_the_next_offset_is_exactly_a_multiple_while_the_log_runs(
    story: Story, at_once: Callable[[], None]
) -> None:
    story.up_to(K - 20)
    members = [story.member(name) for name in "ab"]
    values = [(K, 0), (2 * K, 3)]
    for place, more in values:
        story.up_to(place)
        story.beat(more)
    wait_until(lambda: {K, 2 * K} <= dict(story.stored()).keys(), "both snapshots")
    assert set(story.stored()) == {(place, story.digests[place]) for place in (K, 2 * K)}
    assert [member.alarms for member in members] == [(), ()]


def test_s2_one_that_lies_is_an_alarm_that_names_the_offset(
    story: Story, at_once: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    story.up_to(K - 5)
    member = story.member("a")
    story.broker.create_topic("data", 1)
    with caplog.at_level(logging.ERROR), member.consumer(["data"]) as consumer:
        story.up_to(K)
        story.lie()
        wait_until(lambda: member.alarms, "the alarm")
        with pytest.raises(SnapshotDifferenceError, match=f"at offset {K}"):
            for _ in range(100):
                consumer.poll(0.1)
        assert consumer.poll(0.0) is None, "told once; work goes on"
    assert [type(alarm) for alarm in member.alarms] == [SnapshotDifferenceError]
    assert story.digests[K] in str(member.alarms[0])
    assert sum(f"at offset {K}" in record.getMessage() for record in caplog.records) == 1
    wait_until(lambda: (K, story.digests[K]) in story.stored(), "the truth is written beside the lie")


def test_s2_one_between_two_places_is_an_alarm_though_no_member_stores_one_there(
    story: Story, at_once: Callable[[], None]
) -> None:
    """Two equal wrong snapshots deceive a start, and a forger would write them where no member compares."""
    story.up_to(K - 5)
    member = story.member("a")
    story.up_to(K + 7)
    lie = story.lie()
    assert K < lie < 2 * K
    story.up_to(2 * K + 3)
    wait_until(lambda: member.alarms, "the alarm")
    assert [f"at offset {lie}" in str(alarm) for alarm in member.alarms] == [True]
    assert "not due for a snapshot" in str(member.alarms[0])


def test_s2_one_that_lay_there_at_start_is_an_alarm(story: Story, at_once: Callable[[], None]) -> None:
    story.beat(10)
    lie = story.lie()
    story.beat(10)
    story.snapshot()
    story.beat(5)
    member = story.member("a")
    assert [f"at offset {lie}" in str(alarm) for alarm in member.alarms] == [True]


def test_s2_without_the_topic_members_work_and_say_so_once(
    story: Story, at_once: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    story.broker.delete_topic(SNAPSHOTS)
    with caplog.at_level(logging.WARNING):
        member = story.member("a")
        story.up_to(K)
        lease = member.claim("u", 0)
        assert lease.valid
    said = [record.getMessage() for record in caplog.records if SNAPSHOTS in record.getMessage()]
    assert len(said) == 1
    assert "kafka-marshal init" in said[0]
    assert member.alarms == ()


def test_s4_a_member_stores_the_hash_of_what_it_has_read_between_two_snapshots(
    story: Story, at_once: Callable[[], None]
) -> None:
    story.up_to(K - 20)
    members = [story.member(name) for name in "ab"]
    for place in (K, 2 * K):
        story.up_to(place)
        story.beat(3)
    wait_until(lambda: len(story.hashes()) >= 2, "both hashes")
    assert set(story.hashes()) == {story.hash_of(0, K), story.hash_of(K, 2 * K)}
    assert [member.alarms for member in members] == [(), ()]


def test_s4_a_start_notices_that_the_log_was_changed_since_it_was_read(
    story: Story, at_once: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A changed timestamp leads to the same state; a member of an earlier release has stored the other snapshot."""
    for place in (K, 2 * K):
        story.up_to(place)
        story.snapshot()
    read = story.hash_of(K, 2 * K)
    story.store(encode_hash(read))
    log = story.broker.log(TOPIC, 0)
    assert log is not None
    at = next(at for at, each in enumerate(log.messages) if each.offset() == K + 5)
    kind, stamp = log.messages[at].timestamp()
    log.messages[at] = MemoryMessage(TOPIC, 0, K + 5, None, log.messages[at].value(), (kind, stamp - 1))
    assert story.hash_of(K, 2 * K) != read
    member = story.member("a")
    wait_until(lambda: member.alarms, "the alarm")
    (alarm,) = member.alarms
    assert f"the hash of the log that is stored for partition 0 of {TOPIC!r}, offsets {K} to {2 * K - 1}" in str(alarm)
    assert read.digest in str(alarm)
    assert "removed, added, altered or moved in time" in str(alarm)


def test_s4_members_of_an_earlier_release_store_none_without_an_alarm(
    story: Story, at_once: Callable[[], None]
) -> None:
    for place in (K, 2 * K):
        story.up_to(place)
        story.snapshot()
    member = story.member("a")
    story.up_to(3 * K)
    wait_until(lambda: len(story.hashes()) == 2, "the hashes since its start")
    assert story.hashes() == [story.hash_of(K, 2 * K), story.hash_of(2 * K, 3 * K)]
    assert member.alarms == ()


# -- the keeper by itself ------------------------------------------------------------------------------------


def test_s2_nothing_is_written_before_its_jitter_is_over(story: Story) -> None:
    keeper = keeper_of(story)
    story.beat(10)
    keeper.note(0, story.end, story.truth.snapshot(), 1_000.0)
    due_at = keeper.due_at()
    assert 1_000.0 <= due_at <= 1_000.0 + JITTER_MS
    assert keeper.work(due_at - 1.0, [0]) == []
    assert story.stored() == []
    keeper.work(due_at, [0])
    assert story.stored() == [(story.end, story.truth.digest())]
    assert keeper.due_at() == due_at + LOOK_MS


def test_s2_jitters_of_different_members_differ(story: Story) -> None:
    story.beat(10)
    waits = []
    for seed in range(20):
        keeper = keeper_of(story)
        keeper._rng = Random(seed)
        keeper.note(0, story.end, story.truth.snapshot(), 0.0)
        waits.append(keeper.due_at())
    assert max(waits) - min(waits) > JITTER_MS / 2


def test_s2_they_are_written_in_the_order_of_their_places(story: Story) -> None:
    for seed in range(20):
        keeper = keeper_of(story)
        keeper._rng = Random(seed)
        places = []
        for _ in range(2):
            story.beat(10)
            places.append(story.end)
            keeper.note(0, story.end, story.truth.snapshot(), 0.0)
        while keeper.due_at() <= JITTER_MS:
            keeper.work(keeper.due_at(), [0])
        assert [place for place, _ in story.stored()][-2:] == places


@pytest.mark.parametrize("seen_at_start", [True, False])
def test_s2_a_writer_skips_one_that_is_there_already(story: Story, seen_at_start: bool) -> None:
    story.beat(10)
    if seen_at_start:
        story.snapshot()
    keeper = keeper_of(story)
    if not seen_at_start:
        story.snapshot()
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    assert keeper.work(JITTER_MS, [0]) == []
    assert len(story.stored()) == 1


def test_s2_half_a_snapshot_is_not_one_that_is_there(story: Story) -> None:
    for number in range(2_000):
        story.claim(number, ("1", "c" * 255, "g" * 250))
    first, second = encode_snapshot(story.truth)
    story.store(first)
    keeper = keeper_of(story)
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    keeper.work(JITTER_MS, [0])
    assert (story.end, story.truth.digest()) in story.stored()
    story.store(second)
    assert keeper.work(2 * JITTER_MS, [0]) == []


def test_s2_a_difference_is_found_in_either_order(story: Story) -> None:
    keeper = keeper_of(story)
    story.beat(10)
    story.lie()
    assert keeper.work(0.0, [0]) == [], "nothing of ours to compare with yet"
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    (found,) = keeper.work(0.0, [0])
    assert (found.cp, found.next_offset, found.ours) == (0, story.end, story.truth.digest())
    assert keeper.is_news(found)
    assert not keeper.is_news(found)


def test_q27_a_damaged_one_is_reported(story: Story) -> None:
    keeper = keeper_of(story)
    story.beat(10)
    story.damage()
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    (found,) = keeper.work(0.0, [0])
    assert "damaged" in found.why


def test_s2_an_outage_is_no_news_and_made_up_for(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    keeper = keeper_of(story, "cut off")
    story.beat(10)
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    story.broker.set_reachable("cut off", False)
    with caplog.at_level(logging.DEBUG, "kafka_marshal"):
        assert keeper.work(JITTER_MS, [0]) == []
        assert keeper.work(2 * JITTER_MS, [0]) == []
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]  # the member logs it once
    assert keeper.due_at() == 2 * JITTER_MS + RETRY_MS
    story.broker.set_reachable("cut off", True)
    keeper.work(keeper.due_at(), [0])
    assert story.stored() == [(story.end, story.truth.digest())]


def test_s2_old_snapshots_may_be_removed_while_it_follows(story: Story) -> None:
    keeper = keeper_of(story)
    for _ in range(3):
        story.beat(10)
        story.snapshot()
    story.broker.delete_records(SNAPSHOTS, 0, 2)
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    assert keeper.work(JITTER_MS, [0]) == []
    assert len(story.stored()) == 1


def test_s2_it_follows_a_recreated_snapshots_topic(story: Story) -> None:
    story.beat(10)
    story.store(*[b"junk"] * 10)
    keeper = keeper_of(story)
    story.broker.delete_topic(SNAPSHOTS)
    story.broker.create_topic(SNAPSHOTS, 1)
    story.lie()
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    assert [found.next_offset for found in keeper.work(JITTER_MS, [0])] == [story.end]
    assert story.stored()[-1] == (story.end, story.truth.digest())


def test_q51_of_what_is_not_read_nothing_is_written_nor_compared(story: Story) -> None:
    """Q51: a member of a coordinated group leaves them to others; a CP that is read again is followed from there on."""
    keeper = keeper_of(story)
    story.beat(10)
    keeper.note(0, story.end, story.truth.snapshot(), 0.0)
    story.lie()
    assert keeper.work(JITTER_MS, []) == []
    assert (story.end, story.truth.digest()) not in story.stored()
    assert keeper.due_at() == JITTER_MS + LOOK_MS, "it does not wait to be written"
    assert keeper.work(2 * JITTER_MS, [0]) == [], "a start compares what was there before"
    story.lie()
    (found,) = keeper.work(3 * JITTER_MS, [0])
    assert found.ours == story.truth.digest()


def test_s2_only_the_two_youngest_states_are_kept_until_they_are_written(story: Story) -> None:
    keeper = keeper_of(story)
    for _ in range(5):
        story.beat(10)
        keeper.note(0, story.end, story.truth.snapshot(), THREADS.now_ms())
    keeper.work(THREADS.now_ms() + JITTER_MS, [0])
    assert [place for place, _ in story.stored()] == [story.end - 10, story.end]


def test_the_log_of_snapshots_is_read_in_time(story: Story) -> None:
    """A reader that gets only irrelevant records ends nevertheless."""
    story.store(*[b"junk"] * 100)
    reader = SnapshotReader.find(story.cluster, SNAPSHOTS, TIMEOUT_S)
    assert reader is not None
    reader.read_newest(2)
    assert not reader.read_older(0)
    assert reader.partitions[0].junk == 100
    assert SnapshotReader.find(story.cluster, TOPIC + "x", TIMEOUT_S) is None
