"""Ranges of offsets instead of messages: delivered, given back, and reported to the log (P6, C12 … C14)."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal.engine.work.assignment import Assignment, Stage
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.ranges import MAX_LEFT_OUT, OffsetRange, RangeDelivery, RangeRun, fair_shares
from kafka_marshal.engine.work.tracker import Tracker
from rationalizer import ClaimingMessages, CommitRanges, Heartbeat, ReleasingPartition
from tests.engine.harness import HI, Member, Net
from tests.engine.scenes import LOST, T0, calls, evict


def working(end: int = 100, partitions: int = 1, **options: object) -> tuple[Net, Member, ConsumerEngine]:
    net = Net(cps=1)
    net.topic("t", partitions, end=end)
    member = net.member("a")
    consumer = member.consumer("t", ranges=True, **options)  # type: ignore[arg-type]
    net.run_until(lambda: len(member.held()) == partitions and member.can_hand_out(T0))
    return net, member, consumer


def delivery(consumer: ConsumerEngine) -> RangeDelivery:
    assert consumer.ranges is not None
    return consumer.ranges


def take(net: Net, member: Member, consumer: ConsumerEngine, count: int) -> list[RangeRun]:
    marks = {key: (log.start, log.end) for key, log in net.data.items()}
    runs = delivery(consumer).take(marks, count, member.clock())
    member.settle()
    return runs


def done(member: Member, consumer: ConsumerEngine, *ranges: OffsetRange) -> list[bool]:
    found = [delivery(consumer).done_range(each, member.clock()) for each in ranges]
    member.settle()
    return found


def places(runs: list[RangeRun]) -> list[tuple[int, int, int]]:
    return sorted((run.assignment.key[1], run.first, run.last) for run in runs)


# -- Delivery -----------------------------------------------------------------------------------------------------


def test_from_done_to_the_end_shared_fairly_and_nothing_is_fetched() -> None:
    net, member, consumer = working(partitions=3)
    net.data["t", 1].end = 4
    assert places(take(net, member, consumer, 30)) == [(0, 0, 12), (1, 0, 3), (2, 0, 12)]
    assert places(take(net, member, consumer, 1_000)) == [(0, 13, 99), (2, 13, 99)]
    assert take(net, member, consumer, 10) == []
    net.data["t", 1].end = 6
    assert places(take(net, member, consumer, 10)) == [(1, 4, 5)]


def test_fewer_records_than_partitions_go_round_in_turn() -> None:
    net, member, consumer = working(partitions=3)
    found = [places(take(net, member, consumer, 1)) for _ in range(6)]
    assert sorted(found) == [[(p, o, o)] for p in range(3) for o in range(2)]
    assert {places[0][0] for places in found[:3]} == {0, 1, 2}


def test_c14_done_goes_into_the_log_with_the_next_beat() -> None:
    net, member, consumer = working()
    (run,) = take(net, member, consumer, 40)
    before = len(net.records(Heartbeat))
    assert done(member, consumer, run.offsets()) == [True]
    assert len(net.records(Heartbeat)) == before
    net.run(HI)
    assert net.world(T0).progress.stable == 39


def test_p6_done_out_of_order_commits_the_gaps_only() -> None:
    net, member, consumer = working()
    runs = [take(net, member, consumer, 10)[0] for _ in range(5)]
    done(member, consumer, runs[1].offsets(), runs[3].offsets())
    net.run(HI)
    assert net.world(T0).progress.ranges == [(10, 19), (30, 39)]
    done(member, consumer, runs[0].offsets(), runs[2].offsets())
    net.run(HI)
    assert (net.world(T0).progress.stable, net.world(T0).progress.ranges) == (39, [])
    commits = [r.ranges for r in net.records(CommitRanges) if isinstance(r, CommitRanges)]
    assert commits == [((10, 19), (30, 39))]


def test_what_is_given_back_comes_first_and_only_it_where_the_next_is_in_flight() -> None:
    net, member, consumer = working()
    first, second = take(net, member, consumer, 10)[0], take(net, member, consumer, 10)[0]
    delivery(consumer).give_back_range(first.offsets(), member.clock())
    assert places(take(net, member, consumer, 50)) == [(0, 0, 9)], "11 … 19 are in hand"
    assert places(take(net, member, consumer, 50)) == [(0, 20, 69)]
    assert done(member, consumer, first.offsets()) == [True], "it is the very range that is in hand again"
    assert done(member, consumer, second.offsets()) == [True]


def test_the_next_holder_leaves_out_what_is_done() -> None:
    net, member, consumer = working()
    runs = [take(net, member, consumer, 10)[0] for _ in range(4)]
    done(member, consumer, runs[1].offsets(), runs[3].offsets())
    member.close()
    net.run(HI)
    other = net.member("b")
    again = other.consumer("t", ranges=True)
    net.run_until(lambda: other.can_hand_out(T0))
    (run,) = take(net, other, again, 25)
    assert run.offsets() == OffsetRange("t", 0, 0, 44, other.lease(T0).epoch, ((10, 19), (30, 39)))
    assert run.offsets().count == 25


def test_a_range_leaves_out_no_more_than_a_hundred_intervals() -> None:
    net, member, consumer = working(end=1_000)
    tracker = member.assignment(T0).tracker
    tracker.done.commit([(offset, offset) for offset in range(1, 1_000, 2)])
    (run,) = take(net, member, consumer, 10_000)
    assert (run.first, run.last) == (0, 2 * MAX_LEFT_OUT)
    assert len(run.left_out) == MAX_LEFT_OUT
    (more,) = take(net, member, consumer, 10_000)
    assert more.first == 2 * MAX_LEFT_OUT + 2


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 200))
def test_shares_are_fair(available: list[int], limit: int) -> None:
    shares = fair_shares(available, limit)
    assert all(0 <= share <= there for share, there in zip(shares, available, strict=True))
    if limit >= len(available):
        assert sum(shares) == min(limit, sum(available)), "nothing is left lying"
        short = [share for share, there in zip(shares, available, strict=True) if share < there]
        assert not short or max(shares) - min(short) <= 1, "who could use more has as much as anybody"
    else:
        assert sum(shares) <= limit


@given(st.integers(0, 2**32))
def test_whatever_order_every_offset_is_open_in_flight_or_done(seed: int) -> None:
    """Against plain sets of offsets."""
    rng = Random(seed)
    net, member, consumer = working(end=60)
    handed: dict[OffsetRange, set[int]] = {}
    finished: set[int] = set()
    for _ in range(30):
        match rng.randrange(3):
            case 0:
                for run in take(net, member, consumer, rng.randrange(1, 20)):
                    of_it = {o for o in range(run.first, run.last + 1) if not any(a <= o <= b for a, b in run.left_out)}
                    assert of_it.isdisjoint(finished.union(*handed.values()))
                    lower = set(range(run.first)) - finished.union(*handed.values())
                    assert not lower, "the lowest open offset comes first"
                    handed[run.offsets()] = of_it
            case 1 if handed:
                given_back = rng.choice(sorted(handed, key=lambda each: each.first))
                delivery(consumer).give_back_range(given_back, member.clock())
                del handed[given_back]
            case _ if handed:
                finished_range = rng.choice(sorted(handed, key=lambda each: each.first))
                assert done(member, consumer, finished_range) == [True]
                finished |= handed.pop(finished_range)
        tracker = member.assignment(T0).tracker
        assert {o for o in range(60) if tracker.done.is_done(o)} == finished
    net.run(2 * HI)
    progress = net.world(T0).progress
    assert {o for o in range(60) if progress.is_done(o)} == finished


# -- Leases --------------------------------------------------------------------------------------------------------


def test_t4_nothing_is_delivered_when_the_lease_is_not_proven() -> None:
    net, member, consumer = working()
    member.drop_appends = True
    net.run(2 * HI)
    assert take(net, member, consumer, 10) == []


def test_a_lost_lease_commits_nothing_and_is_counted_in_ranges() -> None:
    net, member, consumer = working()
    (run,) = take(net, member, consumer, 10)
    given_out = run.offsets()
    evict(net, member)
    net.run(HI)
    assert LOST in calls(member)
    assert done(member, consumer, given_out) == [False]
    assert consumer.delivery.ignored_done == {T0: 1}
    assert net.world(T0).progress.stable == -1


def test_a_handover_waits_for_what_is_in_flight() -> None:
    net, member, consumer = working(partitions=2)
    runs = take(net, member, consumer, 20)
    other = net.member("b")
    other.consumer("t", ranges=True)
    net.run_until(lambda: any(x.stage is Stage.REVOKING for x in consumer.assignments.values()))
    net.run(3 * HI)
    assert not net.records(ReleasingPartition)
    assert done(member, consumer, *(run.offsets() for run in runs)) == [True, True]
    net.run_until(lambda: len(other.held()) == 1)
    (released,) = [r for r in net.records(ReleasingPartition) if isinstance(r, ReleasingPartition)]
    assert released.last_offset == 9 or net.world(("t", released.partition)).progress.stable == 9


def test_closing_releases_what_is_done_and_not_what_is_in_flight() -> None:
    net, member, consumer = working()
    first, _ = take(net, member, consumer, 10)[0], take(net, member, consumer, 10)[0]
    done(member, consumer, first.offsets())
    member.close()
    net.run(HI)
    assert consumer.closed
    assert net.world(T0).progress.stable == 9


def test_a_handler_that_takes_too_long_costs_the_lease() -> None:
    net, member, consumer = working(handler_timeout_ms=5 * HI)
    take(net, member, consumer, 10)
    net.run(4 * HI)
    assert LOST not in calls(member)
    net.run(2 * HI)
    assert LOST in calls(member)


def test_p9_retention_below_the_position_is_reported_once_something_was_delivered() -> None:
    net, member, consumer = working()
    done(member, consumer, take(net, member, consumer, 10)[0].offsets())
    net.data[T0].start = 30
    assert take(net, member, consumer, 10) == []
    net.run(HI)
    assert places(take(net, member, consumer, 10)) == [(0, 30, 39)]
    assert consumer.positions.gaps == [(T0, 10, 29)]


def test_p11_a_position_beyond_the_end_is_lost() -> None:
    net, member, consumer = working()
    done(member, consumer, take(net, member, consumer, 50)[0].offsets())
    net.data[T0].end = 20
    delivery(consumer).beyond_end({T0: 20}, member.clock())
    member.settle()
    assert [type(error).__name__ for error in consumer.errors] == ["PositionLostError"]
    assert take(net, member, consumer, 10) == []


# -- At most once --------------------------------------------------------------------------------------------------


def grants(net: Net) -> list[int]:
    return [r.proposed_last_offset for r in net.records(ClaimingMessages) if isinstance(r, ClaimingMessages)]


def test_c13_each_range_is_proposed_and_delivered_when_its_own_replica_says_so() -> None:
    net, member, consumer = working(at_most_once=True)
    (run,) = take(net, member, consumer, 10)
    assert grants(net) == [9]
    assert not delivery(consumer).is_answered(run)
    assert take(net, member, consumer, 10) == [], "one proposal at a time"
    net.tick()
    assert delivery(consumer).is_answered(run)
    assert delivery(consumer).collect_range(run, member.clock())
    assert net.world(T0).progress.granted == 9
    (more,) = take(net, member, consumer, 10)
    assert (more.first, more.last) == (10, 19)


def test_c13_granted_and_never_collected_is_reported() -> None:
    net, member, consumer = working(at_most_once=True)
    (run,) = take(net, member, consumer, 10)
    net.tick()
    evict(net, member)
    net.run(HI)
    assert not delivery(consumer).collect_range(run, member.clock())
    assert delivery(consumer).grants.unprocessed == [("t", 0, 0, 9)]


def test_c13_a_grant_that_comes_after_it_was_given_up_is_reported_too() -> None:
    net, member, consumer = working(at_most_once=True)
    take(net, member, consumer, 10)
    member.close()
    net.run(HI)
    assert delivery(consumer).grants.unprocessed == [("t", 0, 0, 9)]


def test_given_back_at_most_once_is_reported_and_not_repeated() -> None:
    net, member, consumer = working(at_most_once=True)
    (run,) = take(net, member, consumer, 10)
    net.tick()
    delivery(consumer).collect_range(run, member.clock())
    delivery(consumer).give_back_range(run.offsets(), member.clock())
    assert delivery(consumer).grants.unprocessed == [("t", 0, 0, 9)]
    assert places(take(net, member, consumer, 10)) == [(0, 10, 19)]


def test_c13_given_back_after_its_lease_was_over_is_reported_too_and_once() -> None:
    """Found by the simulation: it was granted for good, never handled, and never reported."""
    net, member, consumer = working(at_most_once=True)
    (run,) = take(net, member, consumer, 10)
    net.tick()
    assert delivery(consumer).collect_range(run, member.clock())
    given = run.offsets()
    evict(net, member)
    net.run(HI)
    assert delivery(consumer).find(given) is None
    assert delivery(consumer).grants.unprocessed == [], "it may be at work still"
    for _ in range(2):
        delivery(consumer).give_back_range(given, member.clock())
    assert delivery(consumer).grants.unprocessed == [("t", 0, 0, 9)]


def test_c13_done_after_its_lease_was_over_is_not_reported() -> None:
    net, member, consumer = working(at_most_once=True)
    (run,) = take(net, member, consumer, 10)
    net.tick()
    assert delivery(consumer).collect_range(run, member.clock())
    evict(net, member)
    net.run(HI)
    assert not delivery(consumer).done_range(run.offsets(), member.clock())
    delivery(consumer).give_back_range(run.offsets(), member.clock())
    assert delivery(consumer).grants.unprocessed == []


@pytest.mark.parametrize(("stable", "held", "open_from"), [(-1, [], 0), (4, [(5, 9)], 10), (4, [(7, 9)], 5)])
def test_the_lowest_open_offset(stable: int, held: list[tuple[int, int]], open_from: int) -> None:
    _, member, _ = working()
    tracker: Tracker[Assignment] = Tracker(stable, ())
    for first, last in held:
        tracker.hand_out(RangeRun(member.assignment(T0), first, last, (), 0.0))
    assert tracker.open_from() == open_from
