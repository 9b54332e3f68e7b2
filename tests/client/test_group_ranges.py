"""Members of a coordinated group that take ranges of offsets in rounds; in a group with checkpoints, a round is a cut.

On a cluster in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import pytest

from kafka_marshal import CheckpointPolicy, ConfigurationError, Group, GroupConsumer, GroupRangeConsumer
from tests.client.conftest import wait_until
from tests.client.test_checkpoints import ON_DEMAND, PARTITIONS, Team, Worker, settled
from tests.faults.stories import TOPIC, member, memory_cluster


class At(NamedTuple):
    """A message, as far as counting needs it."""

    number: int
    place: int

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return self.place

    def key(self) -> None:
        return None


def rounds(consumer: GroupConsumer, handle: Callable[[Any], object], size: int = 20) -> None:
    """Round after round; one that lost a partition counts for nothing."""
    ranges = cast("GroupRangeConsumer", consumer)
    while not ranges.stopping:
        given = ranges.take(size, timeout=0.02)
        for each in given:
            for offset in range(each.first, each.last + 1):
                if ranges.holds(each):  # Spark's jobs are cancelled then
                    handle(At(each.partition, offset))
        if given and not ranges.done(given, together=True):
            ranges.give_back(given)


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team()
    yield made
    made.close()


def start(team: Team, name: str, policy: CheckpointPolicy = ON_DEMAND, **options: Any) -> Worker:
    return team.start(name, rounds, policy, ranges=True, **options)


def await_checkpoint(worker: Worker) -> None:
    """Begin one, and wait until it is complete."""
    before = worker.consumer.checkpoints.newest
    worker.consumer.checkpoint()
    wait_until(lambda: worker.consumer.checkpoints.newest != before)


def test_joins_and_leaves_of_members_in_rounds_repeat_nothing(team: Team) -> None:
    a = start(team, "a")
    team.produce(30)
    team.await_counted(a)
    b = start(team, "b")
    team.produce(30)
    settled(a, b)
    team.await_counted(a, b)
    a.leave()
    team.produce(5)
    wait_until(lambda: b.owns() == set(range(PARTITIONS)))
    team.await_counted(b)
    assert set(team.handled().values()) == {1}
    assert {why for why, _ in b.restored()} == {"handed_over"}


def test_a_cut_waits_for_the_end_of_the_round_though_drain_is_over(team: Team) -> None:
    a = start(team, "a", CheckpointPolicy(every=None, drain=0.01, timeout=30))
    reached, go_on = threading.Event(), threading.Event()
    before = a.consumer.checkpoints.newest

    def handle(message: Any) -> None:
        a.ledger.handle(message)
        reached.set()
        go_on.wait(20)

    a.handle = handle
    team.produce(3)
    reached.wait(20)
    a.consumer.checkpoint()
    wait_until(lambda: a.consumer.checkpoints.state == "DRAINING")
    wait_until(lambda: a.consumer.checkpoints.drain_seconds == 0.0)
    go_on.set()
    wait_until(lambda: a.consumer.checkpoints.newest != before)
    team.await_counted(a)
    saved = {number for what, more in a.said if what == "saved" for number in more["partitions"]}
    assert next(more["partition"] for what, more in a.said if what == "handled") in saved
    assert set(team.handled().values()) == {1}


def test_a_rollback_drops_the_round_at_work_and_the_next_begins_at_the_logs_positions(team: Team) -> None:
    a = start(team, "a")
    team.produce(10)
    team.await_counted(a)
    await_checkpoint(a)
    ranges = cast("GroupRangeConsumer", a.consumer)
    ignored = ranges.ignored_done
    handle = a.handle

    def back(message: Any) -> None:
        a.handle = handle
        handle(message)
        a.consumer.rollback()
        wait_until(lambda: any(what == "dropped" for what, _ in a.said))

    a.handle = back
    team.produce(10)
    team.await_counted(a)
    assert {why for why, _ in a.restored()} == {"joined", "rollback"}
    assert ranges.ignored_done == ignored, "the round was reported together, and none of it counted"
    assert max(team.handled().values()) == 2


def test_a_lost_member_costs_its_partitions_since_their_last_cut(team: Team) -> None:
    a, b = start(team, "a"), start(team, "b")
    settled(a, b)
    team.produce(10)
    team.await_counted(a, b)
    await_checkpoint(a)
    theirs = b.owns()
    team.produce(5)
    team.await_counted(a, b)
    b.die()
    wait_until(lambda: a.owns() == set(range(PARTITIONS)))
    team.await_counted(a)
    repeated = {at for at, times in team.handled().items() if times > 1}
    assert repeated == {(partition, offset) for partition in theirs for offset in range(10, 15)}


def test_to_wait_until_all_is_done_takes_the_checkpoint_that_shows_it(team: Team) -> None:
    a = start(team, "a")
    team.produce(10)
    team.await_counted(a)
    ranges = cast("GroupRangeConsumer", a.consumer)
    ends = dict.fromkeys(((TOPIC, number) for number in range(PARTITIONS)), 10)
    assert not ranges.is_done(ends)
    wait_until(lambda: ranges.wait_done(ends, 0.1))
    assert [kept.kind for kept in ranges.checkpoints.kept].count("periodic") == 1


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_without_checkpoints_progress_is_committed_and_moves_with_the_partition(delivery: Any) -> None:
    cluster = memory_cluster(2, 10)
    a, b = member(cluster, "a"), member(cluster, "b")
    seen: list[tuple[int, int]] = []
    with a, b, a.ranges([TOPIC], mode=Group(session_timeout=0.6), delivery=delivery) as ours:
        while len(seen) < 12:
            given = ours.take(4, timeout=5)
            seen += [(each.partition, offset) for each in given for offset in range(each.first, each.last + 1)]
            assert ours.done(given) == given
        ours.commit()
        with b.ranges([TOPIC], mode=Group(session_timeout=0.6), delivery=delivery) as theirs:
            wait_until(lambda: len(ours.pieces()) == len(theirs.pieces()) == 1)
            while len(seen) < 20:
                for each in (ours, theirs):
                    given = each.take(10, timeout=0.05)
                    seen += [(x.partition, offset) for x in given for offset in range(x.first, x.last + 1)]
                    each.done(given)
    assert sorted(seen) == [(partition, offset) for partition in range(2) for offset in range(10)]


def test_what_cannot_work_is_refused() -> None:
    with member(memory_cluster(1, 0)) as marshal:
        for options, words in (
            ({"checkpoints": CheckpointPolicy(), "delivery": "at-most-once"}, "at-least-once"),
            ({"config": {"isolation.level": "none"}}, "read_committed or read_uncommitted"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                marshal.ranges([TOPIC], mode=Group(), **options)
