"""Old log and old snapshots are removed together, up to a checked snapshot, never further (L1, S2, S3)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kafka_marshal.admin import Admin, PrunePlan
from kafka_marshal.errors import (
    AdminError,
    ConfigurationError,
    LogCutError,
    TopicChangedError,
    TopicMissingError,
)
from kafka_marshal.node.replica import Begin
from kafka_marshal.snapshots.prune import carry_out, make_plan
from rationalizer.log_hash import LogHash, encode_hash
from rationalizer.snapshot_log import encode_snapshot
from tests.snapshots.conftest import SNAPSHOTS, TIMEOUT_S, TOPIC, Story


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
