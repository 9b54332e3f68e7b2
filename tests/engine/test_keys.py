"""Partitions, and keys of them, that the program names (U12): each message has one owner, and a standby takes over."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kafka_marshal.engine.work.assignment import Stage
from kafka_marshal.types import Key
from rationalizer import ClaimingPartition, ClaimingShare, ReleasingPartition, SettlingMessages, key_hash
from rationalizer.limits import MAX_KEY_HASH
from tests.engine.harness import HI, FakeMessage, Member, Net
from tests.engine.sharers import TOPIC, shared_net

KEY: Key = (TOPIC, 0)
HALF = MAX_KEY_HASH // 2
LOW, HIGH = (0, HALF), (HALF + 1, MAX_KEY_HASH)
Span = tuple[int, int]


def pod(net: Net, name: str, *spans: Span, start: str = "earliest") -> Member:
    """A member that assigns itself these keys of the one partition; none: all of it."""
    made = net.member(name)
    made.consumer(TOPIC, keys=((TOPIC, 0, spans),), start=start)
    return made


def offsets_of(member: Member) -> list[int]:
    return [message.offset() for message in member.handled]


def are_in(offsets: list[int], *spans: Span) -> bool:
    return all(any(lo <= key_hash(None, offset) <= hi for lo, hi in spans) for offset in offsets)


def work(net: Net, *members: Member, ms: float = 500.0) -> None:
    until = net.now + ms
    while net.now < until:
        net.tick()
        for member in members:
            member.work()


def test_u12_two_pods_with_halves_do_each_message_once_each_those_of_its_keys() -> None:
    net = shared_net(end=60)
    low, high = pod(net, "low", LOW), pod(net, "high", HIGH)
    work(net, low, high)
    assert Counter(offsets_of(low) + offsets_of(high)) == Counter(range(60))
    assert offsets_of(low) and are_in(offsets_of(low), LOW)
    assert offsets_of(high) and are_in(offsets_of(high), HIGH)
    work(net, ms=HI)
    assert net.world(KEY).progress.stable == 59


def test_u12_a_standby_waits_and_takes_over_at_once_when_the_first_closes() -> None:
    net = shared_net(end=30)
    first = pod(net, "first", LOW)
    work(net, first)
    standby = pod(net, "standby", LOW)
    net.data[KEY].end = 60
    work(net, first, standby, ms=6 * HI)
    assert not standby.handled
    assert len(net.records(ClaimingShare, "standby")) == 0, "what its own replica shows as held is not claimed"
    assert any("this member waits" in warning for warning in standby.warnings)
    first.close()
    net.data[KEY].end = 90
    work(net, standby, ms=100)
    assert Counter(offsets_of(first) + offsets_of(standby)) == Counter(x for x in range(90) if are_in([x], LOW))
    assert are_in(offsets_of(standby), LOW)


def test_u12_a_standby_takes_over_two_heartbeat_intervals_after_a_death() -> None:
    net = shared_net(end=30)
    first = pod(net, "first", LOW)
    standby = pod(net, "standby", LOW)
    work(net, first, standby)
    first.kill()
    net.data[KEY].end = 60
    took = net.run_until(lambda: standby.stage(KEY) is Stage.ACTIVE)
    assert HI < took < 2.2 * HI
    work(net, standby)
    assert Counter(offsets_of(first) + offsets_of(standby)) == Counter(x for x in range(60) if are_in([x], LOW))


def test_u12_pods_that_overlap_never_both_work() -> None:
    net = shared_net(end=30)
    left = pod(net, "left", (0, 3 * HALF // 2))
    right = pod(net, "right", (HALF, MAX_KEY_HASH))
    work(net, left, right, ms=3 * HI)
    assert bool(left.handled) != bool(right.handled)


def test_u12_several_ranges_of_a_partition_are_a_share_each_and_worked_on_when_all_are_granted() -> None:
    third = MAX_KEY_HASH // 3
    ends, middle = [(0, third), (2 * third + 1, MAX_KEY_HASH)], (third + 1, 2 * third)
    net = shared_net(end=60)
    outer, inner = pod(net, "outer", *ends), pod(net, "inner", middle)
    work(net, outer, inner)
    assert len(net.records(ClaimingShare, "outer")) == 2
    assert Counter(offsets_of(outer) + offsets_of(inner)) == Counter(range(60))
    assert are_in(offsets_of(outer), *ends) and are_in(offsets_of(inner), middle)
    work(net, ms=HI)
    assert net.world(KEY).progress.stable == 59

    other = pod(net, "other", (0, third), middle)  # each of the others has one of them
    inner.close()
    work(net, outer, ms=3 * HI)
    world = net.world(KEY)
    assert world.shares is not None
    assert {share.client_id for share in world.shares} == {"outer"}, "who waits for one part keeps no other"
    outer.close()
    net.data[KEY].end = 90
    work(net, other, ms=HI)
    assert [x for x in range(60, 90) if are_in([x], (0, third), middle)] == offsets_of(other)


def test_u12_an_empty_list_is_the_whole_lease_which_waits_for_shares_and_they_for_it() -> None:
    net = shared_net(end=30)
    whole = pod(net, "whole")
    work(net, whole)
    assert offsets_of(whole) == list(range(30))
    part = pod(net, "part", LOW)
    net.data[KEY].end = 60
    work(net, whole, part, ms=3 * HI)
    assert not part.handled
    assert not net.records(ClaimingShare)
    whole.close()
    again = pod(net, "again")
    net.data[KEY].end = 90
    work(net, part, again, ms=3 * HI)
    assert bool(part.handled) != bool(again.handled)


def test_t4_a_pod_that_was_stopped_starts_nothing_more_and_what_it_reports_late_does_not_count() -> None:
    net = shared_net(end=30)
    zombie, standby = pod(net, "zombie", LOW), pod(net, "standby", LOW)
    net.run_until(lambda: zombie.stage(KEY) is Stage.ACTIVE)
    zombie.fetch(30)
    run = zombie.take(3)
    assert run is not None
    zombie.paused = True
    work(net, standby, ms=3 * HI)
    assert offsets_of(standby) == [x for x in range(30) if are_in([x], LOW)]
    zombie.paused = False
    assert zombie.take(3) is None, "T4: before it has read anything"
    zombie.done_run(run)
    work(net, zombie, standby, ms=4 * HI)
    assert not zombie.handled
    assert zombie.stage(KEY) is None


def cut_off() -> None:
    """A pod is cut off from the log, and continues to read its partition; another one waits for its keys."""
    net = shared_net(end=30)
    first, standby = pod(net, "first", LOW), pod(net, "standby", LOW)
    work(net, first, standby)
    first.stalled = first.drop_appends = True
    while standby.stage(KEY) is not Stage.ACTIVE:
        net.data[KEY].end += 1
        work(net, first, standby, ms=50)
    assert not first.can_hand_out(KEY)
    first.handled.clear()
    work(net, first, standby)
    assert not first.handled


def test_t4_a_pod_that_is_cut_off_stops_before_another_one_has_its_keys() -> None:
    cut_off()


def test_b4_when_kafka_was_away_for_long_the_first_beat_back_revives_and_nothing_is_repeated() -> None:
    net = shared_net(end=30)
    low, high = pod(net, "low", LOW), pod(net, "high", HIGH)
    work(net, low, high)
    for member in (low, high):
        member.drop_appends = True
    work(net, low, high, ms=4 * HI)
    net.data[KEY].end = 60
    assert not any(member.can_hand_out(KEY) for member in (low, high))
    for member in (low, high):
        member.drop_appends = False
    work(net, low, high, ms=2 * HI)
    assert Counter(offsets_of(low) + offsets_of(high)) == Counter(range(60))
    assert len(net.records(ClaimingShare)) == 2


@pytest.mark.parametrize("start", ["latest", "earliest"])
def test_b3_the_first_claim_says_where_the_group_begins_for_all_keys(start: str) -> None:
    net = shared_net(end=30)
    low = pod(net, "low", LOW, start=start)
    net.tick()
    net.data[KEY].end = 60
    high = pod(net, "high", HIGH, start=start)
    work(net, low, high)
    assert Counter(offsets_of(low) + offsets_of(high)) == Counter(range(30 if start == "latest" else 0, 60))


def test_p9_what_retention_took_before_the_group_began_is_no_gap() -> None:
    net = shared_net(end=60, start=20)
    low, high = pod(net, "low", LOW), pod(net, "high", HIGH)
    work(net, low, high, ms=HI)
    assert Counter(offsets_of(low) + offsets_of(high)) == Counter(range(20, 60))
    assert not low.consumers[0].positions.gaps + high.consumers[0].positions.gaps


def test_a_pod_that_closes_while_its_claim_is_under_way_leaves_nothing_behind() -> None:
    net = shared_net(end=30)
    one = pod(net, "one", LOW)
    one.close()
    net.run(100)
    world = net.world(KEY)
    assert world.shares is None
    assert one.consumers[0].closed


def test_c10_a_pause_releases_the_shares_and_they_are_claimed_again_after_it() -> None:
    net = shared_net(end=30)
    low = pod(net, "low", LOW)
    work(net, low)
    net.pause(2 * HI)
    work(net, low, ms=HI)
    assert net.world(KEY).shares is None
    assert [type(record) for record in net.records(ReleasingPartition, "low")] == [ReleasingPartition]
    net.data[KEY].end = 60
    work(net, low, ms=4 * HI)
    assert offsets_of(low) == [x for x in range(60) if are_in([x], LOW)]


def test_c18_an_evicted_pod_leaves_its_keys_to_others_for_a_while() -> None:
    net = shared_net(end=30)
    low = pod(net, "low", LOW)
    work(net, low)
    share = next(iter(net.world(KEY).shares or ()))
    cp = low.lease(KEY).cp
    net.write(ReleasingPartition(share.instance_id, share.client_id, "g", *KEY, share.epoch, None), cp)
    work(net, low, ms=2 * HI)
    assert low.stage(KEY) is None
    work(net, low, ms=2 * HI)
    assert low.stage(KEY) is Stage.ACTIVE


def test_h2_of_a_pod_with_several_ranges_each_share_settles_the_holes_of_its_keys() -> None:
    third = MAX_KEY_HASH // 3
    ends = [(0, third), (2 * third + 1, MAX_KEY_HASH)]
    net = shared_net(end=60)
    outer = pod(net, "outer", *ends)
    net.run_until(lambda: outer.stage(KEY) is Stage.ACTIVE)
    outer.fetch(60)
    run = outer.take(60)
    assert run is not None
    consumer, now = outer.consumers[0], outer.clock()
    aside = [message for message in run.messages if isinstance(message, FakeMessage)][:6]
    for message in aside:
        consumer.delivery.set_aside(run.assignment, message.at, key_hash(None, message.at), 1, "Bad", now)
    outer.done_run(run)
    work(net, outer, ms=HI)
    parked = [hole.first for hole in net.world(KEY).progress.open]
    assert parked == [message.at for message in aside]
    epochs = {record.epoch for record in net.records(SettlingMessages) if isinstance(record, SettlingMessages)}
    assert epochs == {share.epoch for share in net.world(KEY).shares or ()}
    assert {any(lo <= key_hash(None, at) <= hi for at in parked) for lo, hi in ends} == {True}


def test_wrong_mode_what_a_batch_left_open_is_named_with_the_remedy() -> None:
    net = shared_net(end=30)
    cp = 0
    claim = net.write(ClaimingShare("w-1", "w", "g", *KEY, HI, None, None, None), cp)
    net.write(SettlingMessages("w-1", "w", "g", *KEY, claim, claim + 1, take=(5, 29, False)), cp)
    net.write(ReleasingPartition("w-1", "w", "g", *KEY, claim, None), cp)
    low = pod(net, "low", LOW)
    work(net, low, ms=40 * HI)
    assert not low.handled
    assert len(net.records(ClaimingShare, "low")) <= 5, "its own replica shows when that ends"
    assert any("shared it by batches" in warning for warning in low.warnings)
    whole = pod(net, "whole")
    work(net, low, whole, ms=HI)
    whole.close()
    net.data[KEY].end = 60
    work(net, low, ms=HI)
    assert sorted(offsets_of(low) + offsets_of(whole)) == [x for x in range(60) if x < 30 or are_in([x], LOW)]


class Story:
    """Some pods with overlapping ranges, and faults: no message is in flight twice, and none is lost."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(f"pods/{seed}")
        self.net = shared_net(end=50)
        self.live: list[Member] = []
        self.count = 0
        self.done: set[int] = set()
        cuts = sorted(rng.sample(range(1, MAX_KEY_HASH), 5))
        self.cuts = [0, *cuts, MAX_KEY_HASH + 1]
        for _ in range(5):
            self.join()

    def join(self) -> None:
        rng, pieces = self.rng, len(self.cuts) - 1
        self.count += 1
        if rng.random() < 0.15:
            spans: list[Span] = []
        else:
            chosen = sorted(rng.sample(range(pieces), rng.randint(1, 3)))
            spans = [(self.cuts[at], self.cuts[at + 1] - 1) for at in chosen]
        self.live.append(pod(self.net, f"p{self.count}", *spans))

    def turn(self) -> None:
        net, rng = self.net, self.rng
        net.tick(rng.choice((5.0, 20.0, 60.0)))
        net.data[KEY].end += rng.choice((0, 0, 1, 3))
        for member in self.live:
            if member.paused:
                continue
            member.fetch(5)
            owners = [each for each in self.live if each is not member and not each.paused and each.can_hand_out(KEY)]
            run = member.take(4)
            if run is None:
                continue
            keys = run.assignment.lease.keys
            for message in run.messages:
                offset = message.offset()
                assert offset is not None
                assert member.clock() < run.assignment.lease.hand_out_until
                for other in owners:
                    theirs = other.assignment(KEY).lease
                    assert theirs.keys is not None and keys is not None and not theirs.keys.has(key_hash(None, offset))
                self.done.add(offset)
            member.done_run(run)
        if rng.random() < 0.05:
            self.fault(rng.choice(self.live))

    def fault(self, member: Member) -> None:
        match self.rng.randrange(6):
            case 0 if len(self.live) > 3:
                member.kill()
                self.live.remove(member)
                self.join()
            case 1 if len(self.live) > 3:
                member.close()
                self.live.remove(member)
                self.join()
            case 2:
                member.paused = not member.paused
            case 3:
                member.drop_appends = not member.drop_appends
            case 4:
                member.duplicate = not member.duplicate
            case 5:
                member.stalled = member.drop_appends = not member.stalled  # cut off; it continues to read

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()
        for member in self.live:
            member.paused = member.drop_appends = member.stalled = False
        for member in self.live:
            member.close()
        self.net.run(3 * HI)
        last = pod(self.net, "last")
        work(self.net, last, ms=2 * HI)
        end = self.net.data[KEY].end
        assert self.done | set(offsets_of(last)) == set(range(end))
        assert self.net.world(KEY).progress.stable == end - 1


@pytest.mark.parametrize("seed", range(4))
def test_overlapping_pods_with_faults(seed: int) -> None:
    Story(seed).run(250)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_overlapping_pods_with_faults(seed: int) -> None:
    Story(seed).run(600)


def test_it_claims_a_whole_lease_as_ever() -> None:
    net = shared_net(end=5)
    pod(net, "whole")
    net.run(50)
    assert [type(record) for record in net.records(client_id="whole")][:1] == [ClaimingPartition]
