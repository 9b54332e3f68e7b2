"""Shares by batches, one situation after the other, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest

from kafka_marshal.engine.claims.keys import ShareLease
from kafka_marshal.engine.effects import Effect, StartFetch
from kafka_marshal.engine.settings import SharingOptions
from kafka_marshal.engine.shares.consumer import BatchRun, SharedAssignment, SharedConsumer
from kafka_marshal.engine.shares.desk import Desk, Shelf
from kafka_marshal.engine.shares.taking import LINGER_MS
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.watchdog.parent import LastWill
from rationalizer import (
    ClaimingPartition,
    ClaimingShare,
    Heartbeat,
    HeartbeatBatch,
    ReleasingPartition,
    SettlingMessages,
    World,
)
from rationalizer.holes import NO_OWNER, Hole
from tests.engine.harness import HI, Member, Net
from tests.engine.sharers import (
    TOPIC,
    Books,
    BrokenError,
    Sharer,
    Story,
    begins_what_it_gave_back,
    passes_a_settle_before_it_is_accepted,
    shared_net,
)

T0 = (TOPIC, 0)


def sharer(net: Net, name: str, **options: object) -> Member:
    member = net.member(name)
    member.consumer(TOPIC, sharing=SharingOptions(**options))  # type: ignore[arg-type]
    return member


def of(member: Member) -> SharedConsumer:
    return cast("SharedConsumer", member.consumers[0])


def batch(net: Net, member: Member) -> BatchRun:
    """The next batch that this member gets."""
    found: list[Any] = []

    def got() -> bool:
        member.fetch(50)
        found.append(member.take(1_000))
        member.settle()
        return found[-1] is not None

    net.run_until(got)
    return cast("BatchRun", found[-1])


def holes(net: Net, key: tuple[str, int] = T0) -> list[Hole]:
    return net.world(key).progress.open


def offsets(run: BatchRun) -> list[int]:
    return [offset_of(message) for message in run.messages]


def test_a_batch_has_a_token_and_counts_deliveries() -> None:
    net = shared_net(end=10)
    a = sharer(net, "a")
    run = batch(net, a)
    assert (offsets(run), run.attempts) == (list(range(10)), 1)
    assert [(x.first, x.last, x.since, x.attempts) for x in holes(net)] == [(0, 9, run.token, 1)]
    a.done_run(run)
    net.run(HI)
    assert (holes(net), net.world(T0).progress.stable) == ([], 9)


def test_what_a_killed_sharer_had_comes_again_with_a_larger_token() -> None:
    net = shared_net(end=10)
    a, b = sharer(net, "a"), sharer(net, "b")
    first = batch(net, a)
    a.kill()
    second = batch(net, b)
    assert set(offsets(second)) <= set(offsets(first))
    assert (second.attempts, second.token > first.token) == (2, True)


def test_after_an_outage_of_all_nothing_comes_again() -> None:
    net = shared_net(end=40)
    sharers = [sharer(net, name) for name in ("a", "b")]
    runs = [batch(net, member) for member in sharers]
    for member in sharers:
        member.drop_appends = True
    net.run(5 * HI)
    assert [member.can_hand_out(T0) for member in sharers] == [False, False], "T4"
    for member in sharers:
        member.drop_appends = False
    for member, run in zip(sharers, runs, strict=True):
        member.done_run(run)
    net.run(2 * HI)
    assert all(hole.attempts == 1 for hole in holes(net))
    assert set(offsets(runs[0])).isdisjoint(offsets(runs[1]))
    again = {offset for hole in holes(net) for offset in range(hole.first, hole.last + 1)}
    assert again.isdisjoint(offsets(runs[0]) + offsets(runs[1]))


def test_a_stopped_sharer_whose_batch_was_taken_reports_nothing_and_shares_again() -> None:
    net = shared_net(end=10)
    a, b = sharer(net, "a"), sharer(net, "b")
    run = batch(net, a)
    a.paused = True
    again = batch(net, b)
    a.paused = False
    a.turn()
    a.done_run(run)
    net.run(HI)
    held = {x.owner for x in holes(net) if x.first <= offsets(again)[0] <= x.last}
    assert held == {b.lease(T0).epoch}, "the late done has no effect"
    net.run_until(lambda: a.held() == [T0])


def test_what_is_given_back_counts_no_delivery_and_comes_again() -> None:
    net = shared_net(end=3)
    a = sharer(net, "a")
    run = batch(net, a)
    a.engine.take(of(a).number, of(a).delivery.give_back_run, run, a.clock())
    a.settle()
    assert a.take() is None, "it is not begun before the log shows that it is free"
    assert batch(net, a).attempts == 1


def test_a_parked_message_is_set_aside_with_its_reason_and_the_rest_is_done() -> None:
    net = shared_net(end=5)
    a = sharer(net, "a")
    run = batch(net, a)
    of(a).delivery.park(run, 2, 77, "Bad", a.clock())
    for message in [message for message in run.messages if offset_of(message) != 2]:
        a.done(message)
    net.run(HI)
    assert [(x.first, x.last, x.key_hash, x.reason) for x in holes(net)] == [(2, 2, 77, "Bad")]


def test_after_two_takers_messages_come_one_by_one_and_alone_and_after_five_they_are_set_aside() -> None:
    net = shared_net(end=2)
    for number in (1, 2):
        a = sharer(net, f"a{number}")
        run = batch(net, a)
        assert (len(run.messages), run.attempts) == (2, number)
        a.paused = True
    a = sharer(net, "a3")
    alone = batch(net, a)
    assert (offsets(alone), alone.attempts) == ([0], 3)
    net.data[T0].end = 30
    net.run(HI)
    a.fetch()
    assert a.take() is None, "nothing else is in flight with it"
    for number in (4, 5):
        a.paused = True
        a = sharer(net, f"a{number}")
        while offsets(alone := batch(net, a)) != [0]:
            a.done_run(alone)
        assert alone.attempts == number
    a.paused = True
    a = sharer(net, "a6")
    while not any(x.is_parked for x in holes(net)):
        net.data[T0].end += 1
        assert net.data[T0].end < 300
        a.done_run(batch(net, a))
    assert [(x.first, x.reason) for x in holes(net) if x.is_parked] == [(0, "CRASHED")]


def test_at_its_end_a_sharer_settles_what_is_done_and_gives_back_what_has_not_begun() -> None:
    net = shared_net(end=200)
    a = sharer(net, "a")
    run = batch(net, a)
    while len(of(a).assignments[T0].desk.given) < 2:  # type: ignore[attr-defined]
        net.tick()
        a.fetch(50)
        a.settle()
    a.done_run(run)
    a.close()
    net.run(HI)
    assert net.world(T0).shares is None
    assert [(x.owner, x.attempts) for x in holes(net)] == [(-1, 0)], "the batch taken ahead was never begun"
    kinds = [type(record) for record in net.records(client_id="a")]
    assert kinds.index(ReleasingPartition) > max(i for i, kind in enumerate(kinds) if kind is SettlingMessages)


def test_a_lost_last_settle_is_sent_again_before_the_release() -> None:
    net = shared_net(end=10)
    a = sharer(net, "a")
    a.done_run(batch(net, a))
    a.drop_if = lambda record: isinstance(record, SettlingMessages)
    a.close()
    net.run(HI / 4)
    assert net.records(ReleasingPartition) == []
    a.drop_if = lambda record: False
    net.run(2 * HI)
    assert (holes(net), net.world(T0).shares) == ([], None)


def test_a_pause_of_the_group_ends_the_shares_and_they_begin_again() -> None:
    net = shared_net(end=10)
    a = sharer(net, "a")
    a.done_run(batch(net, a))
    net.pause(4 * HI)
    net.run_until(lambda: not a.held())
    assert (holes(net), net.world(T0).shares) == ([], None)
    net.pause(0)
    net.data[T0].end = 20
    assert offsets(batch(net, a)) == list(range(10, 20))


def test_a_drained_sharer_gives_back_its_batches_and_claims_no_more() -> None:
    net = shared_net(end=10)
    a = sharer(net, "a")
    net.run_until(lambda: a.held())
    a.engine.leases.drain("operator")
    net.run(3 * HI)
    assert (a.held(), net.world(T0).shares) == ([], None)


def test_one_that_holds_the_partition_whole_is_waited_for_and_named_once() -> None:
    net = shared_net(end=10)
    other = net.member("whole")
    other.consumer(TOPIC)
    net.run_until(lambda: other.held() == [T0])
    a = sharer(net, "a")
    net.run(4 * HI)
    assert a.held() == []
    assert [text for text in a.warnings if "without mode=Batches()" in text] == a.warnings[:1]
    assert len(net.records(ClaimingPartition, "a")) == 0
    other.close()
    net.run_until(lambda: a.held() == [T0])


def test_keys_at_different_places_are_waited_for_and_claimed_at_once_when_they_are_at_one() -> None:
    net = shared_net(end=10)
    cp = 0
    claim = net.write(ClaimingShare("w-1", "w", "g", *T0, HI, 0, 9, None), cp)
    net.write(Heartbeat("w-1", "w", "g", *T0, claim, 5), cp)
    net.write(ReleasingPartition("w-1", "w", "g", *T0, claim, None), cp)
    a = sharer(net, "a")
    net.run(40 * HI)
    assert a.held() == []
    assert len(net.records(ClaimingShare, "a")) <= 5
    assert [text for text in a.warnings if "at different places" in text] == a.warnings
    whole = net.write(ClaimingPartition("w-2", "w", "g", *T0, HI), cp)
    net.write(ReleasingPartition("w-2", "w", "g", *T0, whole, 9), cp)
    net.run(HI / 2)
    assert a.held() == [T0]


def test_all_shares_beat_in_one_record_and_there_are_at_most_so_many() -> None:
    net = shared_net(partitions=6)
    a = sharer(net, "a", max_shares=4)
    b = sharer(net, "b", max_shares=4)
    net.run(4 * HI)
    assert [len(member.held()) for member in (a, b)] == [6, 6], "twice the partitions for each worker"
    assert {len(record.entries) for record in net.records(HeartbeatBatch, "a", since=int(net.now) - HI)} == {6}  # type: ignore[attr-defined]


def test_idle_shares_move_to_where_all_sharers_have_work_and_no_partition_is_left_alone() -> None:
    """U7: more partitions than a member has shares of, and one of them has all the messages."""
    net = shared_net(partitions=6)
    members = [sharer(net, name, max_shares=1) for name in "abcdef"]
    net.run(4 * HI)
    busy = max(net.data, key=lambda key: (len(sharers_of(net, key)), key))
    before = sharers_of(net, busy)
    assert len(before) < len(members)
    net.data[busy].end = 100_000
    for _ in range(200):
        for member in members:
            member.fetch(50)
            if (run := member.take(1_000)) is not None:
                member.done_run(run)
            member.settle()
        net.run(HI / 20)
    assert len(sharers_of(net, busy)) > len(before)
    assert all(sharers_of(net, key) for key in net.data)
    released = net.records(ReleasingPartition)
    assert 0 < len(released) < len(members) * 12, "shares move, and not at each check"


def sharers_of(net: Net, key: tuple[str, int]) -> list[str]:
    lease = net.world(key)
    return [] if lease.shares is None else [share.client_id for share in lease.shares]


def test_the_group_begins_where_start_says_and_only_once() -> None:
    net = shared_net(end=100)
    a = net.member("a")
    a.consumer(TOPIC, sharing=SharingOptions(), start="latest")
    net.run_until(lambda: a.held())
    assert [record.start for record in net.records(ClaimingShare)] == [100]  # type: ignore[attr-defined]
    net.data[T0].end = 105
    assert offsets(batch(net, a)) == [100, 101, 102, 103, 104]


def test_what_retention_took_is_settled_and_reported() -> None:
    net = shared_net(end=10)
    a = sharer(net, "a")
    a.done_run(batch(net, a))
    net.run(HI)
    a.close()
    net.run(HI)
    net.data[T0].start = net.data[T0].end = 50
    net.data[T0].end = 60
    b = sharer(net, "b")
    run = batch(net, b)
    while offsets(run) and offsets(run)[0] < 50:
        run = batch(net, b)
    assert offsets(run)[0] == 50
    assert of(b).positions.gaps == [(T0, 10, 49)]
    b.done_run(run)
    net.run(HI)
    assert [x for x in holes(net) if x.last < 50] == []


def test_offsets_that_kafka_never_delivers_are_settled_with_their_batch() -> None:
    net = shared_net(end=10, missing=[0, 4, 9])
    a = sharer(net, "a")
    net.run_until(lambda: a.held())
    run = batch(net, a)
    assert offsets(run) == [1, 2, 3, 5, 6, 7, 8]
    a.engine.take(None, a.engine.step, a.clock())
    a.done_run(run)
    net.run(HI)
    left = [(x.first, x.last) for x in holes(net)]
    assert left in ([], [(9, 9)]), "the last offset is known as missing when the reader passes it"


def test_at_most_once_what_the_log_gives_is_done_and_what_is_not_delivered_is_reported() -> None:
    net = shared_net(end=10)
    a = sharer(net, "a", at_most_once=True)
    run = batch(net, a)
    assert offsets(run) == list(range(10))
    assert (holes(net), net.world(T0).progress.stable) == ([], 9)
    net.data[T0].end = 20
    a.done_run(run)
    while net.world(T0).progress.stable < 19:
        net.tick()
        a.fetch(50)
        a.settle()
    a.close()
    net.run(HI)
    assert of(a).delivery.grants.unprocessed == [(*T0, 10, 19)]


def test_at_most_once_a_handler_that_takes_too_long_loses_the_share_for_nothing_of_it_comes_back() -> None:
    net = shared_net(end=5)
    a = net.member("a")
    a.consumer(TOPIC, sharing=SharingOptions(at_most_once=True), handler_timeout_ms=2.0 * HI)
    batch(net, a)
    epoch = a.lease(T0).epoch
    net.run_until(lambda: not a.held() or a.lease(T0).epoch != epoch)
    assert (of(a).delivery.left_behind, holes(net), net.world(T0).progress.stable) == ([], [], 4)


def test_a_take_that_was_lost_is_repeated_and_one_that_was_written_twice_takes_once() -> None:
    net = shared_net(end=10)
    a = sharer(net, "a")
    net.run_until(lambda: a.held())
    a.drop_if = lambda record: isinstance(record, SettlingMessages)
    a.fetch()
    net.run(HI)
    a.drop_if = lambda record: False
    a.duplicate = True
    run = batch(net, a)
    assert offsets(run) == list(range(10))
    assert len(holes(net)) == 1


def test_a_batch_that_takes_too_long_is_given_to_others_and_what_is_reported_later_has_no_effect() -> None:
    net = shared_net(end=5)
    a = net.member("a")
    a.consumer(TOPIC, sharing=SharingOptions(), handler_timeout_ms=2.0 * HI)
    b = sharer(net, "b")
    net.run_until(lambda: b.held() and a.held())
    hung = batch(net, a)
    found: list[Any] = []

    def is_given_again() -> bool:
        for member in (a, b):
            member.fetch(50)
            found.extend(run for run in (member.take(1_000),) if run is not None)
            member.settle()
        return bool(found)

    epoch = a.lease(T0).epoch
    net.run_until(is_given_again)
    [again] = found
    assert (offsets(again)[0], again.attempts) == (0, 2)
    assert "0 to 4: with a handler" in a.warnings[-1], "it is named"
    assert a.lease(T0).epoch == epoch, "another thread takes batches: the share stays"
    assert (of(a).delivery.has(hung), of(a).delivery.has(again) or of(b).delivery.has(again)) == (False, True)
    [left] = of(a).delivery.left_behind
    assert (left.first, left.last) == (0, 4)
    a.done_run(hung)
    net.run(HI)
    assert of(a).delivery.left_behind == [], "it has returned"
    assert sum(hole.last - hole.first + 1 for hole in holes(net)) == 5, "the late done has no effect"


def test_a_late_report_does_not_settle_what_the_same_member_was_given_again() -> None:
    net = shared_net(end=3)
    a = net.member("a")
    a.consumer(TOPIC, sharing=SharingOptions(), handler_timeout_ms=HI)
    hung = batch(net, a)
    again = batch(net, a)
    assert (offsets(again)[0], again.attempts) == (0, 2)
    a.done_run(hung)
    net.run(HI / 4)
    assert sum(hole.last - hole.first + 1 for hole in holes(net)) == len(hung.messages)


def test_a_member_whose_only_thread_hangs_takes_nothing_until_it_comes_back() -> None:
    net = shared_net(end=5)
    a = net.member("a")
    a.consumer(TOPIC, sharing=SharingOptions(), handler_timeout_ms=2.0 * HI)
    hung = batch(net, a)
    net.run(4 * HI)
    net.data[T0].end = 50
    net.run(4 * HI)
    assert (a.held(), {hole.owner for hole in holes(net)}) == ([], {NO_OWNER})
    a.done_run(hung)
    assert batch(net, a).attempts in (1, 2)


def test_a_batch_is_done_or_given_back_but_for_what_was_set_aside_of_it() -> None:
    net = shared_net(end=10)
    a = sharer(net, "a")
    run = batch(net, a)
    of(a).delivery.park(run, 4, 77, "Bad", a.clock())
    a.done_run(run)
    net.run(HI)
    assert [(hole.first, hole.last, hole.reason) for hole in holes(net)] == [(4, 4, "Bad")]
    net.data[T0].end = 20
    run = batch(net, a)
    of(a).delivery.park(run, 14, 77, "Bad", a.clock())
    a.engine.take(of(a).number, of(a).delivery.give_back_run, run, a.clock())
    a.settle()
    again = batch(net, a)
    assert (offsets(again), again.attempts) == ([10, 11, 12, 13], 1)


def test_a_watchdog_would_release_the_share_and_no_longer_once_it_is_over() -> None:
    net = shared_net(end=5)
    a = sharer(net, "a")
    will = LastWill(a.engine.ids)
    will.worlds, will.partitions = a.worlds, 1
    net.run_until(lambda: a.held())
    will.look(0, T0)
    assert list(will.leases) == [T0]
    a.close()
    net.run(HI)
    will.look(0, T0)
    assert will.leases == {}


def test_what_is_given_back_is_sent_again_until_the_log_shows_it() -> None:
    net = shared_net(end=3)
    a = sharer(net, "a")
    run = batch(net, a)
    a.drop_appends = True
    a.engine.take(of(a).number, of(a).delivery.give_back_run, run, a.clock())
    a.settle()
    b = sharer(net, "b")
    net.run_until(lambda: b.held())
    net.data[T0].end = 6
    assert offsets(batch(net, b)) == [3, 4, 5]
    a.drop_appends = False
    net.run(2 * HI)
    [first, *_] = holes(net)
    assert (first.first, first.attempts, first.since != run.token) == (0, 1, True)


@pytest.mark.parametrize("is_shown", [True, False])
def test_what_is_done_between_messages_that_are_given_back_is_not_given_back(is_shown: bool) -> None:
    """Handlers that finish in any order leave gaps, and the log may not show yet what is done."""
    net = shared_net(end=4)
    a = sharer(net, "a")
    run = batch(net, a)
    run.into_lanes()
    a.drop_appends = not is_shown
    a.engine.take(of(a).number, of(a).delivery.done, [run.messages[0], run.messages[2]], a.clock())
    a.settle()
    net.run(0.6 * HI)
    a.engine.take(of(a).number, of(a).delivery.give_back_run, run, a.clock())
    a.drop_appends = False
    found = [batch(net, a)]
    a.done_run(found[0])
    found.append(batch(net, a))
    a.done_run(found[1])
    net.run(HI)
    assert ([offsets(each) for each in found], holes(net)) == ([[1], [3]], [])


def test_what_a_sharer_leaves_at_its_end_is_taken_at_once() -> None:
    net = shared_net(end=3)
    a, b = sharer(net, "a"), sharer(net, "b")
    batch(net, a)
    net.run_until(lambda: b.held())
    a.close()
    before = net.now
    assert batch(net, b).attempts == 1
    assert net.now < before + HI


def test_what_is_settled_in_a_pause_proves_nothing_as_it_is_no_beat() -> None:
    """H3, T4: its share may be stale when the pause ends, and another one takes what it has."""
    net = shared_net(end=400)
    a, b = sharer(net, "a", max_messages=5), sharer(net, "b", max_messages=5)
    first, second = batch(net, a), batch(net, a)
    batch(net, b)
    a.drop_appends = True
    net.run(1.3 * HI)
    a.drop_appends = False
    net.pause(0.9 * HI)
    net.run(0.1 * HI)
    a.done_run(first)
    net.run(0.2 * HI)
    assert first.token not in {hole.since for hole in holes(net)}, "it is accepted"
    [share] = [x for x in net.world(T0).shares or () if x.client_id == "a"]
    lease = cast("ShareLease", second.assignment.lease)
    assert lease.valid_until <= share.last_beat + 2 * HI


def test_only_a_lone_sharer_takes_what_would_wait_for_a_handler() -> None:
    """U8: what the log shows of others is late, and they may begin it now."""
    net = shared_net(end=0)
    a = sharer(net, "a")
    net.run_until(lambda: a.held() == [T0])
    net.data[T0].end = 3
    a.fetch(3)
    taking = of(a).taking
    taking._begins = 1, True
    assert taking._most_free(list(of(a).takers()), net.now) is not None
    b = sharer(net, "b")
    net.run_until(lambda: b.held() == [T0])
    for share in of(a).takers():
        share.look(net.now)
    taking._begins = 1, True
    assert taking._most_free(list(of(a).takers()), net.now) is None
    taking._begins = 1, False
    assert taking._most_free(list(of(a).takers()), net.now) is not None


def test_a_lone_sharer_takes_each_new_message_at_once() -> None:
    net = shared_net(end=0)
    a = sharer(net, "a")
    net.run_until(lambda: a.held() == [T0])
    for offset in range(8):
        net.data[T0].end, written = offset + 1, net.now
        run = batch(net, a)
        assert net.now < written + LINGER_MS, "it does not linger"
        assert [(hole.first, hole.last) for hole in holes(net)] == [(offset, offset)]
        a.done_run(run)
        net.run_until(lambda: not holes(net))


@pytest.mark.parametrize("at_most_once", [False, True])
def test_a_batch_that_is_asked_for_at_the_close_is_given_back_or_reported(at_most_once: bool) -> None:
    net = shared_net(end=0)
    a = sharer(net, "a", at_most_once=at_most_once)
    net.run_until(lambda: a.held() == [T0])
    net.data[T0].end = 10

    def is_asked() -> bool:
        a.fetch(50)
        a.settle()
        return of(a).taking.asked is not None

    net.run_until(is_asked)
    a.close()
    net.run(HI)
    assert net.world(T0).progress.stable == 9
    left = [(x.first, x.last, x.owner, x.attempts) for x in holes(net)]
    assert (left, of(a).delivery.grants.unprocessed) == (
        ([], [(*T0, 0, 9)]) if at_most_once else ([(0, 9, NO_OWNER, 0)], [])
    )


# Sharers with the faults of a seed: one owner for each message, none lost; and planted bugs, which that finds.


#: Seeds and virtual time of the short form.
SEEDS, MS = range(2), 2_000.0


def told(seed: int, ms: float = MS) -> None:
    Story(seed).run(ms)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_message_has_one_owner_and_none_is_lost(seed: int) -> None:
    told(seed)


def test_without_faults_each_message_is_begun_once() -> None:
    story = Story(7, faults=False)
    story.run(1_000.0)
    assert set(story.books.begun.values()) == {1}


def test_what_a_member_gave_back_and_got_again_is_of_the_new_batch() -> None:
    """The old batch has messages in flight all the time; its end takes nothing of the new one."""
    net = shared_net(end=10)
    member = net.member("a")
    consumer = member.consumer(TOPIC, sharing=SharingOptions())
    taken: list[Run] = []

    def next_run(most: int) -> Run:
        def takes() -> bool:
            member.fetch(50)
            taken.extend(filter(None, [member.take(most)]))
            return bool(taken)

        net.run_until(takes)
        return taken.pop()

    old = next_run(4)
    share = consumer.assignments[TOPIC, 0]
    assert isinstance(share, SharedAssignment)
    desk = share.desk
    [old_token] = desk.given
    desk.give_back_rest()
    share.report(member.clock())
    member.settle()
    net.run_until(lambda: (member.fetch(50), len(desk.given) == 2)[1])
    first = next_run(2)
    assert isinstance(first, BatchRun)
    assert first.token > old_token
    member.engine.take(consumer.number, consumer.delivery.done_run, old, member.clock())
    net.run_until(lambda: old_token not in desk.given)
    assert [message.offset() for run in (first, next_run(10)) for message in run.messages] == [4, 5, 6, 7, 8, 9]


def test_messages_that_are_redriven_are_read_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one take; but the reader need not go to the end and back for each."""
    net, books, end = shared_net(end=100), Books(), 100
    sharer = Sharer(net, books, "w", Random(1), 1.0)
    world = World(0, 1)

    def holes() -> list[Hole]:
        world.apply_many((offset, *net.logs[0][offset]) for offset in range(world.next_offset, len(net.logs[0])))
        lease = world.lease("g", TOPIC, 0)
        return [] if lease is None else [hole for hole in lease.progress.open if hole.is_parked]

    def works_until(condition: Callable[[], bool]) -> None:
        while not condition():
            net.tick()
            sharer.turn()

    sharer.parks = 1.0
    works_until(lambda: len(holes()) == end)
    sharer.parks = 0.0
    opened = tuple((offset, offset, None, 0) for offset in range(0, end, 2))
    net.write(SettlingMessages("op-1", "op", "g", TOPIC, 0, None, world.next_offset, (), opened), 0)
    starts: list[Effect] = []
    carry_out = Member.carry_out

    def counted(self: Member, what: Effect) -> None:
        starts.append(what)
        carry_out(self, what)

    monkeypatch.setattr(Member, "carry_out", counted)
    works_until(lambda: len(books.handled) == end / 2)
    assert sum(isinstance(each, StartFetch) for each in starts) <= 2


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_seeds(seed: int) -> None:
    told(seed, 8_000.0)


def _trusts_its_share_for_ever(patch: pytest.MonkeyPatch) -> None:
    """No T4: messages are handed out though nothing has proven the share lately."""
    patch.setattr(SharedAssignment, "is_open", lambda self, now: self.stage == "active" and self.lease.held)


def _reports_what_was_only_read(patch: pytest.MonkeyPatch) -> None:
    """A batch counts as done when it is read."""
    fill = Desk._fill

    def planted(self: Desk, given: Any) -> None:
        fill(self, given)
        self._done(given.first, given.last)

    patch.setattr(Desk, "_fill", planted)


def _forgets_the_tail_of_a_batch(patch: pytest.MonkeyPatch) -> None:
    """What was read ahead is dropped one offset too far, and counts as never delivered."""
    trim = Shelf.trim

    def planted(self: Shelf, below: int) -> None:
        trim(self, below)
        if self.messages and offset_of(self.messages[0]) % 7 == 0:
            self.messages.popleft()

    patch.setattr(Shelf, "trim", planted)


PLANTED: list[Callable[[pytest.MonkeyPatch], None]] = [
    begins_what_it_gave_back,
    _trusts_its_share_for_ever,
    passes_a_settle_before_it_is_accepted,
    _reports_what_was_only_read,
    _forgets_the_tail_of_a_batch,
]


@pytest.mark.campaign
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(BrokenError):
        for seed in range(40):
            told(seed, 8_000.0)
