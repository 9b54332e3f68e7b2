"""Where a replica starts (S3): it has the state of the whole log, or it refuses to start."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.admin import Admin, PrunePlan
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.errors import (
    AdminError,
    AuthorizationError,
    ConfigurationError,
    KafkaUnavailableError,
    LogCutError,
    SnapshotDifferenceError,
    TopicChangedError,
    TopicMissingError,
)
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.ports import TopicInfo
from kafka_marshal.snapshots.prune import carry_out, make_plan
from rationalizer import ForgetGroup, ReleasingPartition, Tick, World, encode, snapshot_log
from rationalizer.log_hash import LogHash, encode_hash
from tests.snapshots.conftest import SNAPSHOTS, TIMEOUT_S, TOPIC, WHO, Story
from tests.stored_snapshot import encode_snapshot


def check(story: Story, begun_at: int, *wrong: int, begin: Begin = Begin.SNAPSHOT) -> Replica:
    """Check that the replica began there, has the correct state, and names these places."""
    replica = story.replica(begin)
    assert replica.worlds[0].snapshot() == story.truth.snapshot()
    assert replica.starts[0].begun_at == begun_at
    assert sorted({found.next_offset for found in replica.differences}) == sorted(wrong)
    return replica


def test_s3_it_starts_from_the_second_newest_and_compares_at_the_newest(story: Story) -> None:
    for _ in range(3):
        story.beat(10)
        last = story.snapshot()
    story.beat(5)
    replica = check(story, last - 10)
    assert replica.starts[0].agreed.keys() == {last}
    assert replica.target_records == replica.records_read == 15


def test_s3_newest_means_the_largest_next_offset_not_the_latest_written(story: Story) -> None:
    story.beat(10)
    late = encode_snapshot(story.truth)
    story.beat(10)
    middle = story.snapshot()
    story.beat(10)
    story.snapshot()
    story.store(*late)
    check(story, middle)


def test_s3_without_snapshots_it_starts_from_the_beginning(story: Story) -> None:
    story.beat(10)
    check(story, 0)


def test_q29_a_single_one_is_only_compared_with(story: Story) -> None:
    story.beat(10)
    place = story.snapshot()
    story.beat(10)
    assert check(story, 0).starts[0].agreed.keys() == {place}


def test_s2_a_start_notes_each_place_after_its_first_though_k_falls_meanwhile(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One left out would make the snapshot of another member there an alarm: at a place that is not due."""
    monkeypatch.setattr(snapshot_log, "SNAPSHOT_INTERVAL", 10)
    for partition in range(11):
        story.claim(partition)
    for lease in list(story.truth.leases()):
        story.append(ReleasingPartition(*WHO, "t", lease.partition, lease.epoch, None))
        assert story.end != 20 or story.truth.listed > 10  # K is 20
    story.append(ForgetGroup(*WHO))
    story.beat(42)
    noted: list[int] = []
    with contextlib.closing(Replica(story.cluster, TOPIC, TIMEOUT_S, due=lambda _, at, *__: noted.append(at))) as it:
        it.catch_up(TIMEOUT_S)
    assert noted == [20, 30, 40, 50, 60]


def test_s3_one_written_twice_is_one(story: Story) -> None:
    story.beat(10)
    story.snapshot()
    story.snapshot()
    check(story, 0)


def test_s3_a_log_that_ends_at_the_newest(story: Story) -> None:
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    story.snapshot()
    check(story, first)


def test_s3_a_newest_that_lies_sends_it_further_back_and_is_named(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    places = []
    for _ in range(3):
        story.beat(10)
        places.append(story.snapshot())
    story.beat(10)
    lie = story.lie()
    story.beat(1)
    with caplog.at_level(logging.ERROR):
        check(story, places[-2], lie)
    assert [f"at offset {lie}" in record.getMessage() for record in caplog.records] == [True], "an alarm"


def test_q30_a_second_newest_that_lies_is_found_by_the_newest(story: Story) -> None:
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    lie = story.lie()
    story.beat(10)
    story.snapshot()
    check(story, first, lie)


def test_s3_beside_a_lie_at_the_same_place_the_truth_counts(story: Story) -> None:
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    second = story.snapshot()
    assert story.lie() == second
    check(story, first, second)
    story.beat(10)
    story.snapshot()
    check(story, second, second)


def test_s3_where_all_lie_it_starts_from_the_beginning(story: Story) -> None:
    lies = []
    for _ in range(4):
        story.beat(10)
        lies.append(story.lie())
    check(story, 0, *lies)


def test_s3_damaged_and_half_written_ones_are_passed_over(story: Story) -> None:
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    story.snapshot()
    story.beat(10)
    damaged = story.damage()
    story.store(b"", b"junk", b"\xc0")
    for number in range(2_000):
        story.claim(number, ("1", "c" * 255, "g" * 250))
    parts = encode_snapshot(story.truth)
    assert len(parts) == 2
    story.store(parts[0])  # its writer was killed
    check(story, first, damaged)
    story.store(parts[1])  # finished by another
    story.beat(1)
    check(story, damaged - 10, damaged)


def test_s3_many_records_that_are_none_are_gone_back_through(story: Story) -> None:
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    story.snapshot()
    story.store(*[b"junk"] * 1_000)
    check(story, first)


def test_q31_one_beyond_the_end_of_the_log_is_a_lie(story: Story) -> None:
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    story.snapshot()
    lie = story.lie(story.end + 5)
    check(story, first, lie)


def test_q31_one_written_while_the_end_is_looked_up_is_not_wrong(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's end is looked up beside its snapshots: one that covers later records is not wrong."""
    story.beat(10)
    second = story.snapshot()
    asked, marks, info = threading.Event(), story.cluster.watermarks, story.cluster.topic_info

    def ends(partitions: Iterable[tuple[str, int]], timeout_s: float) -> dict[tuple[str, int], tuple[int, int]]:
        keys = list(partitions)
        found = marks(keys, timeout_s)
        if keys == [(TOPIC, 0)] and not asked.is_set():
            story.beat(10)
            story.snapshot()
            asked.set()
        return found

    def look(names: Iterable[str], timeout_s: float) -> dict[str, TopicInfo]:
        assert asked.wait(TIMEOUT_S)
        return info(names, timeout_s)

    monkeypatch.setattr(story.cluster, "watermarks", ends)
    monkeypatch.setattr(story.cluster, "topic_info", look)
    check(story, second)


def test_s3_one_of_a_place_where_no_record_ends_is_a_lie(story: Story) -> None:
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    story.snapshot()
    story.broker.skip(TOPIC, 0, 10)  # as a transaction's marker does
    lie = story.lie(story.end - 5)
    replica = story.replica()
    assert replica.caught_up
    assert replica.worlds[0].snapshot() == story.truth.snapshot()
    assert [found.next_offset for found in replica.differences] == [lie]
    assert replica.starts[0].begun_at == first
    story.beat(10)
    check(story, first, lie)


def test_l1_a_log_cut_at_the_second_newest_will_do(story: Story) -> None:
    story.beat(10)
    story.snapshot()
    story.beat(10)
    second = story.snapshot()
    story.beat(10)
    story.snapshot()
    story.beat(10)
    story.cut(second)
    check(story, second)
    check(story, second, begin=Begin.HISTORY)


@pytest.mark.parametrize("snapshots", [0, 1, 2])
def test_q32_a_log_cut_too_far_is_refused(story: Story, snapshots: int) -> None:
    for _ in range(snapshots):
        story.beat(10)
        last = story.snapshot()
    story.beat(10)
    story.cut(last if snapshots else 5)  # of two, the newest is still reachable, but nothing proves it
    with pytest.raises(LogCutError, match=r"partition\(s\) \[0\].*nothing was claimed.*init"):
        story.replica()
    with pytest.raises(LogCutError):
        story.member("worker")


def test_s3_a_cut_log_with_a_newest_that_lies_refuses_to_guess(story: Story) -> None:
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    lie = story.lie()
    story.beat(10)
    story.cut(first)
    with pytest.raises(SnapshotDifferenceError, match=f"offset {lie}"):
        story.replica()
    with pytest.raises(SnapshotDifferenceError):
        story.member("worker")
    story.snapshot()  # by a member that still works
    check(story, first, lie)


def test_s3_a_cut_log_with_one_more_snapshot_stands_a_lie(story: Story) -> None:
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    story.snapshot()
    story.beat(10)
    lie = story.lie()
    story.beat(10)
    story.cut(first)
    check(story, first, lie)


def test_q28_a_log_of_snapshots_with_another_number_of_partitions_is_not_used(story: Story) -> None:
    story.beat(10)
    story.snapshot()
    story.beat(10)
    story.snapshot()
    story.broker.grow_topic(SNAPSHOTS, 3)
    replica = check(story, 0)
    assert "3 partitions" in replica.start.lacks_snapshots


@pytest.mark.parametrize("leases", [0, 1, 60])
def test_l2_partitions_added_to_both_topics_are_found(story: Story, leases: int) -> None:
    for number in range(leases):
        story.claim(number)
    for _ in range(2):
        for _ in range(3):
            story.broker.produce(TOPIC, 0, encode(Tick(*WHO)))
        story.catch_up()
        story.snapshot()
    story.broker.grow_topic(TOPIC, 2)
    story.broker.grow_topic(SNAPSHOTS, 2)
    with pytest.raises(TopicChangedError, match="made with 1"):
        story.replica()


def test_s3_without_the_topic_it_starts_from_the_beginning(story: Story) -> None:
    story.broker.delete_topic(SNAPSHOTS)
    story.beat(10)
    assert SNAPSHOTS in check(story, 0).start.lacks_snapshots


class Closed(MemoryCluster):
    """A cluster where the snapshots topic can't be described."""

    def topic_info(self, names: Iterable[str], timeout_s: float, max_age_s: float = 0.0) -> dict[str, TopicInfo]:
        names = list(names)
        if SNAPSHOTS in names:
            raise AuthorizationError(f"{SNAPSHOTS!r} must not be looked at")
        return super().topic_info(names, timeout_s)


def test_s3_without_the_right_to_read_them_it_starts_from_the_beginning(
    story: Story, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafka_marshal.node.topics.METADATA_INTERVAL_MS", 20.0)
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    story.snapshot()
    cluster = Closed(broker=story.broker, client="closed")
    with caplog.at_level(logging.WARNING):
        member = Marshal.on_cluster(cluster, group_id="g", client_id="x", topic=TOPIC)
        story.members.append(member)
        assert member._driver.replica.starts[0].begun_at == 0
        # (None is planned during a poll.)
        assert member.world.wait_for(lambda _: 0 < member._driver.upkeep.topics.next_at < inf, 10)
        before = member._driver.upkeep.topics.next_at
        assert member.world.wait_for(lambda _: before < member._driver.upkeep.topics.next_at < inf, 10)
        assert member.claim("u", 0).valid
    assert [SNAPSHOTS in record.getMessage() for record in caplog.records] == [True], "said once"
    story.cut(first)
    with pytest.raises(AuthorizationError):
        Replica(Closed(broker=story.broker, client="late"), TOPIC, TIMEOUT_S, Begin.SNAPSHOT)


def test_s3_a_cut_log_whose_snapshots_have_no_leader_is_no_reason_for_a_new_topic(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.beat(10)
    first = story.snapshot()
    story.beat(10)
    story.snapshot()
    story.cut(first)
    ask = story.cluster.watermarks
    monkeypatch.setattr(
        story.cluster,
        "watermarks",
        lambda keys, timeout_s: ask([key for key in keys if key[0] != SNAPSHOTS], timeout_s),
    )
    with pytest.raises(KafkaUnavailableError, match="no leader at the moment"):
        story.replica()


def test_s3_history_is_read_from_the_beginning(story: Story) -> None:
    for _ in range(3):
        story.beat(10)
        story.snapshot()
    check(story, 0, begin=Begin.HISTORY)


def test_s3_a_check_compares_with_all(story: Story) -> None:
    story.beat(10)
    story.snapshot()
    story.beat(10)
    lie = story.lie()
    story.beat(10)
    story.snapshot()
    replica = check(story, 0, lie, begin=Begin.CHECK)
    assert len(replica.starts[0].agreed) == 2


def test_s3_many_partitions_start_each_by_itself() -> None:
    from kafka_marshal.node.coordination_topic import create_topic

    cluster = MemoryCluster()
    create_topic(cluster, TOPIC, 3, TIMEOUT_S)
    worlds = {cp: World(cp, 3) for cp in range(3)}
    for cp, world in worlds.items():
        log = cluster.broker.log(TOPIC, cp)
        assert log is not None
        for _ in range(cp * 10):
            cluster.broker.produce(TOPIC, cp, encode(Tick("i", "c", "g")))
        for message in log.messages:
            world.apply(message.offset(), message.timestamp()[1], message.value())
            if cp > 0 and world.next_offset % 5 == 0:
                cluster.broker.produce(SNAPSHOTS, cp, encode_snapshot(world)[0])
    replica = Replica(cluster, TOPIC, TIMEOUT_S, Begin.SNAPSHOT)
    replica.catch_up(TIMEOUT_S)
    assert {cp: start.begun_at for cp, start in replica.starts.items()} == {0: 0, 1: 5, 2: 15}
    assert {cp: world.digest() for cp, world in replica.worlds.items()} == {
        cp: world.digest() for cp, world in worlds.items()
    }


@settings(max_examples=150)
@given(
    deeds=st.lists(st.sampled_from(["beat", "snapshot", "lie", "damage", "junk", "claim"]), min_size=1, max_size=25),
    cut_at=st.none() | st.integers(0, 10),
)
def test_s3_whatever_is_there_the_state_is_true_or_the_start_is_refused(deeds: list[str], cut_at: int | None) -> None:
    story = Story()
    true_places, lies = [], []
    for number, deed in enumerate(deeds):
        story.beat()  # each at a different place
        match deed:
            case "snapshot":
                true_places.append(story.snapshot())
            case "lie":
                lies.append(story.lie())
            case "damage":
                lies.append(story.damage())
            case "junk":
                story.store(b"junk")
            case "claim":
                story.claim(number + 1)
            case _:
                pass
    if cut_at is not None and true_places:
        cut = true_places[cut_at % len(true_places)]
        story.cut(cut)
        if len(true_places) - cut_at % len(true_places) < 2:
            with pytest.raises((LogCutError, SnapshotDifferenceError)):
                story.replica()
            return
    replica = story.replica()
    assert replica.worlds[0].snapshot() == story.truth.snapshot()
    assert {found.next_offset for found in replica.differences} <= set(lies)


# -- Old log and old snapshots are removed together, up to a checked snapshot, never further (L1, S2, S3) ---------


def prune(story: Story, **options: object) -> PrunePlan:
    admin = Admin.on_cluster(lambda: story.cluster.connect("admin"), topic=TOPIC)
    return admin.prune(timeout=TIMEOUT_S, **options)  # type: ignore[arg-type]


def log_start(story: Story, topic: str = TOPIC) -> int:
    log = story.broker.log(topic, 0)
    assert log is not None
    return log.start


def snapshots(story: Story, count: int) -> list[int]:
    places = []
    for _ in range(count):
        story.beat(10)
        places.append(story.snapshot())
    return places


def starts_true(story: Story) -> int:
    """Check that a replica can start with the correct state; returns where it began."""
    replica = story.replica()
    assert replica.worlds[0].snapshot() == story.truth.snapshot()
    return replica.starts[0].begun_at


def test_l1_it_cuts_the_log_at_the_oldest_of_those_kept(story: Story) -> None:
    places = snapshots(story, 6)
    story.beat(3)
    plan = prune(story)
    (each,) = plan.partitions
    assert each.checked == tuple(places)
    assert each.cut == places[-3]
    assert (plan.records_removed, plan.snapshots_removed) == (places[-3], 3)
    assert log_start(story) == places[-3]
    assert [place for place, _ in story.stored()] == places[-3:]
    assert starts_true(story) == places[-2]


@pytest.mark.parametrize("keep", [2, 4])
def test_s3_it_keeps_what_a_start_needs(story: Story, keep: int) -> None:
    places = snapshots(story, 6)
    prune(story, keep=keep)
    assert log_start(story) == places[-keep]
    assert len(story.stored()) == keep
    assert starts_true(story) == places[-2]


@pytest.mark.parametrize("keep", [1, 0, -1])
def test_s3_fewer_than_two_are_refused(story: Story, keep: int) -> None:
    snapshots(story, 4)
    with pytest.raises(ConfigurationError, match=r"Nothing was (removed|changed)"):
        prune(story, keep=keep)
    assert log_start(story) == 0


def test_a_dry_run_removes_nothing(story: Story) -> None:
    places = snapshots(story, 5)
    assert prune(story, dry_run=True).partitions[0].cut == places[-3]
    assert (log_start(story), len(story.stored())) == (0, 5)


def test_with_too_few_snapshots_nothing_goes(story: Story) -> None:
    snapshots(story, 2)
    plan = prune(story)
    assert plan.records_removed == 0
    assert "2 checked" in plan.partitions[0].why
    assert log_start(story) == 0


def test_it_continues_from_where_it_was_cut(story: Story) -> None:
    snapshots(story, 5)
    prune(story)
    before = log_start(story)
    again = prune(story)
    assert (again.records_removed, again.snapshots_removed) == (0, 0)
    assert (again.partitions[0].checked[0], again.partitions[0].why) == (before, "it was pruned as far already")
    places = snapshots(story, 4)
    assert prune(story).partitions[0].log_start == before
    assert log_start(story) == places[-3]
    assert starts_true(story) == places[-2]


def test_s4_never_past_records_that_were_changed(story: Story) -> None:
    """Every snapshot matches the log: the change leads to the same states."""
    places = [0, *snapshots(story, 6)]
    story.store(*(encode_hash(story.hash_of(since, end)) for since, end in pairwise(places)))
    assert prune(story, dry_run=True).differences == ()
    since, end = places[2], places[3]
    lie = LogHash(0, since, end, "0" * 32)
    story.store(encode_hash(lie))
    plan = prune(story)
    (found,) = plan.differences
    assert (found.since, found.next_offset, found.theirs) == (since, end, lie.digest)
    assert found.ours == story.hash_of(since, end).digest
    assert log_start(story) == since
    assert "the hash of the log" in str(found.error(TOPIC, SNAPSHOTS))
    again = prune(story, dry_run=True)
    assert [each.since for each in again.differences] == [since]
    assert f"the stored hash of offsets {since} to {end - 1} contradicts the log" in again.partitions[0].why
    prune(story, force=True)
    assert log_start(story) == places[-3]
    assert prune(story).differences == ()


@pytest.mark.parametrize("where", range(1, 6))
def test_q33_never_past_a_forged_one(story: Story, where: int) -> None:
    places = []
    for number in range(6):
        story.beat(10)
        places.append(story.lie() if number == where else story.snapshot())
    plan = prune(story)
    assert [found.next_offset for found in plan.differences] == [places[where]]
    assert places[where] not in plan.partitions[0].checked
    assert log_start(story) < places[where]
    cut = plan.partitions[0].cut
    assert cut is None or cut in plan.partitions[0].checked
    assert starts_true(story) >= log_start(story)
    assert places[where] in dict(story.stored()), "what was found stays to be looked at"


def test_s2_forced_it_goes_past_a_forged_one_to_a_checked_one(story: Story) -> None:
    snapshots(story, 1)
    story.beat(10)
    lie = story.lie()
    places = snapshots(story, 4)
    plan = prune(story, force=True)
    assert [found.next_offset for found in plan.differences] == [lie]
    assert log_start(story) == places[-3]
    assert prune(story).differences == ()


def test_s2_damaged_ones_do_not_count(story: Story) -> None:
    places = snapshots(story, 3)
    story.beat(10)
    story.damage()
    plan = prune(story)
    assert plan.partitions[0].checked == tuple(places)
    assert log_start(story) == places[0]
    assert starts_true(story) == places[1]


def test_l1_a_log_cut_by_another_is_not_cut_further(story: Story) -> None:
    snapshots(story, 5)
    story.cut(5)  # at no snapshot: nothing proves its beginning
    plan = prune(story)
    assert plan.records_removed == plan.snapshots_removed == 0
    assert "proven by nothing" in plan.partitions[0].why
    assert log_start(story) == 5


def test_l1_a_log_cut_too_far_can_not_be_pruned(story: Story) -> None:
    snapshots(story, 2)
    story.beat(10)
    story.cut(story.end - 3)
    with pytest.raises(LogCutError):
        prune(story)


def test_l1_a_contradicted_snapshot_is_not_used(story: Story) -> None:
    """The log was cut at a forged snapshot."""
    story.beat(10)
    lie = story.lie()
    snapshots(story, 4)
    story.cut(lie)
    plan = prune(story)
    assert plan.records_removed == plan.snapshots_removed == 0
    assert log_start(story) == lie
    assert len(plan.differences) == 4


def test_snapshots_written_late_do_not_lose_their_place(story: Story) -> None:
    story.beat(10)
    story.snapshot()
    late = encode_snapshot(story.truth)
    places = snapshots(story, 4)
    story.store(*late)
    prune(story)
    assert set(places[-3:]) <= dict(story.stored()).keys()
    assert starts_true(story) == places[-2]


def test_members_continue_meanwhile(story: Story) -> None:
    snapshots(story, 5)
    member = story.member("a")
    lease = member.claim("u", 7)
    prune(story)
    assert log_start(story) > 0
    lease.heartbeat(3)
    member.world.wait_for(lambda view: (found := view.lease("u", 7)) is not None and found.stable == 3, 10)
    assert lease.valid
    other = story.member("b")
    found = other.world.lease("u", 7)
    assert found is not None
    assert found.holder == "a"


def test_what_was_left_half_done_is_finished(story: Story) -> None:
    places = snapshots(story, 5)
    story.cut(places[-3])  # it was killed before it removed the snapshots
    assert starts_true(story) == places[-2]
    plan = prune(story)
    assert (plan.records_removed, plan.snapshots_removed) == (0, 2)
    assert [place for place, _ in story.stored()] == places[-3:]


def test_without_a_log_of_snapshots_it_says_no(story: Story) -> None:
    story.broker.delete_topic(SNAPSHOTS)
    with pytest.raises(TopicMissingError, match="init"):
        prune(story)


def test_a_topic_recreated_meanwhile_is_not_touched(story: Story) -> None:
    snapshots(story, 5)
    plan = make_plan(story.cluster, TOPIC, TIMEOUT_S)
    story.broker.delete_topic(SNAPSHOTS)
    story.broker.create_topic(SNAPSHOTS, 1)
    with pytest.raises(TopicChangedError, match="Nothing was removed"):
        carry_out(story.cluster, plan, TIMEOUT_S)
    assert log_start(story) == 0


def test_a_broker_that_cuts_less_is_found_out(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots(story, 5)
    plan = make_plan(story.cluster, TOPIC, TIMEOUT_S)
    monkeypatch.setattr(story.cluster, "delete_records", lambda before, timeout_s: dict.fromkeys(before, 0))
    with pytest.raises(AdminError, match="No snapshot was removed"):
        carry_out(story.cluster, plan, TIMEOUT_S)


def test_history_begins_where_the_log_does(story: Story) -> None:
    places = snapshots(story, 5)
    prune(story)
    story.beat(5)
    seen: list[int] = []
    from kafka_marshal.node.replica import Replica

    replica = Replica(story.cluster, TOPIC, TIMEOUT_S, Begin.HISTORY)
    replica.catch_up(TIMEOUT_S, applied=lambda cp, offset, outcome: seen.append(offset))
    assert seen == list(range(places[-3], story.end))
    assert replica.worlds[0].snapshot() == story.truth.snapshot()
