"""Policies within engines: large groups in bounded time and records, and when a policy is asked."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import ClassVar

import pytest

from kafka_marshal.engine.claims.placement import FIRST_CLAIMS, Placement, PolicyView
from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.policies import (
    Balanced,
    Cycle,
    Greedy,
    MaxClaims,
    Partitions,
    Policy,
    ReleaseIfBehind,
    View,
    WholeTopic,
    Wishes,
)
from rationalizer import ClaimingPartition, ReleaseGroup, ReleasingPartition, Tick, route_lease
from tests.engine.harness import HI, Member, Net

LATENCY = 30.0


class Distant(Member):
    """A member whose replica is always a little behind."""

    def visible(self, cp: int) -> int:
        log, seen = self.net.logs[cp], len(self.net.logs[cp])
        while seen > self.worlds[cp].next_offset and log[seen - 1][0] + LATENCY > self.net.now:
            seen -= 1
        return seen


def fleet(net: Net, names: list[str], policy: Policy | None = None) -> list[Member]:
    members: list[Member] = []
    for name in names:
        members.append(Distant(net, name))
        net.members.append(members[-1])
    for member in members:
        member.consumer("t", policy=policy)
    return members


def is_even(net: Net, members: list[Member]) -> bool:
    counts = [len(m.held()) for m in members]
    return sum(counts) == len(net.data) and max(counts) - min(counts) <= 1


def kinds(net: Net, since: float) -> Counter[str]:
    return Counter(type(r).__name__ for r in net.records(since=int(since)))


@pytest.mark.slow
def test_twenty_members_and_two_hundred_partitions() -> None:
    """All start at once, then five die, then five join: even shares within a few HI, with few records."""
    net = Net(cps=8, step_ms=20.0, rounds=1)
    net.topic("t", 200)
    members = fleet(net, [f"m{i:02}" for i in range(20)])
    began = net.now
    took = net.run_until(lambda: is_even(net, members))
    start = kinds(net, began)
    assert took <= 2 * HI
    assert start["ClaimingPartition"] <= 20 * 200 + 400, "nobody knows of the others yet: each tries each once"
    assert start["ReleasingPartition"] <= 400
    net.run(3 * HI)
    began = net.now
    net.run(5 * HI)
    rest = kinds(net, began)
    assert rest["ClaimingPartition"] == rest["ReleasingPartition"] == 0
    assert rest.total() <= 20 * 8 * 5 * 3.8, "a record per member, CP and third of HI at most"
    began = net.now
    for member in members[:5]:
        member.kill()
    del members[:5]
    took = net.run_until(lambda: is_even(net, members))
    assert took <= 4 * HI
    assert kinds(net, began)["ClaimingPartition"] <= 50 * 6
    began = net.now
    members += fleet(net, [f"n{i}" for i in range(5)])
    took = net.run_until(lambda: is_even(net, members))
    joined = kinds(net, began)
    assert took <= 6 * HI
    assert joined["ReleasingPartition"] <= 70, "50 have to move"
    assert joined["ClaimingPartition"] <= 400


def test_claims_are_not_followed_by_more_than_they_ask_for() -> None:
    """One newcomer among ten, at a distance: its share moves, once."""
    net = Net(cps=4)
    net.topic("t", 44)
    members = fleet(net, [f"m{i}" for i in range(10)])
    net.run_until(lambda: is_even(net, members))
    net.run(4 * HI)
    began = net.now
    members += fleet(net, ["new"])
    net.run_until(lambda: is_even(net, members))
    net.run(5 * HI)
    assert kinds(net, began)["ReleasingPartition"] == 4
    assert is_even(net, members)


def test_a_rolling_restart_moves_nothing() -> None:
    """Each member restarts with its client_id within HI: takeovers, no releases, no claims (C7)."""
    net = Net(cps=2)
    net.topic("t", 12)
    members = fleet(net, ["a", "b", "c"])
    net.run_until(lambda: is_even(net, members))
    net.run(3 * HI)
    before = {m.client_id: m.held() for m in members}
    began = net.now
    for place, member in enumerate(list(members)):
        member.kill()
        net.run(0.2 * HI)
        [members[place]] = fleet(net, [member.client_id])
        net.run(0.5 * HI)
    net.run(3 * HI)
    assert {m.client_id: m.held() for m in members} == before
    assert kinds(net, began)["ReleasingPartition"] == kinds(net, began)["ClaimingPartition"] == 0


def test_a_standby_takes_over_when_a_holder_dies() -> None:
    """More members than partitions: those without one are silent and take over when needed."""
    net = Net(cps=1)
    net.topic("t", 2)
    members = fleet(net, ["a", "b", "c", "d"])
    net.run(10 * HI)
    began = net.now
    net.run(10 * HI)
    assert kinds(net, began)["ClaimingPartition"] == 0
    holders = [m for m in members if m.held()]
    holders[0].kill()
    members.remove(holders[0])
    net.run_until(lambda: sum(len(m.held()) for m in members) == 2, 3 * HI)
    assert all(len(m.held()) <= 1 for m in members)


def test_different_subscriptions_end_at_rest() -> None:
    """The member that reads all gives each specialist partitions of its topic and keeps what no other wants."""
    net = Net(cps=2)
    for topic in ("t", "u", "v"):
        net.topic(topic, 4)
    everything = net.member("all")
    everything.consumer("^[tuv]$")
    net.run(100)
    for topic in ("t", "u"):
        net.member(f"only-{topic}").consumer(topic)
    net.run(25 * HI)
    began = net.now
    net.run(20 * HI)
    assert kinds(net, began)["ReleasingPartition"] == kinds(net, began)["ClaimingPartition"] == 0
    assert sum(len(m.held()) for m in net.members) == 12
    assert all(len(m.held()) >= 2 for m in net.members)
    assert {key[0] for key in everything.held()} >= {"v"}


def test_max_claims_in_a_group_leaves_the_rest_to_the_others() -> None:
    net = Net(cps=1)
    net.topic("t", 9)
    small, large = net.member("small"), net.member("large")
    small.consumer("t", policy=Balanced() & MaxClaims(2))
    large.consumer("t")
    net.run(15 * HI)
    began = net.now
    net.run(10 * HI)
    assert (len(small.held()), len(large.held())) == (2, 7)
    assert kinds(net, began)["ReleasingPartition"] == 0


def test_max_claims_holds_while_something_is_in_flight_of_what_is_released() -> None:
    """Simulation, seed 6161: a lease was claimed in place of one that was still held."""
    net = Net(cps=1)
    net.topic("t", 3, end=10)
    member = net.member("a")
    consumer = member.consumer("t", policy=MaxClaims(2))
    net.run(HI)
    assert len(member.held()) == 2
    member.fetch()
    run = member.take(1)
    assert run is not None
    consumer.revocation.revoke(run.assignment, "a test wants it", net.now)
    for _ in range(100):
        net.run(HI / 20)
        assert len(member.held()) == 2
    assert run.assignment.key in member.held()
    consumer.delivery.done_run(run, net.now)
    net.run(HI)
    assert len(member.held()) == 2
    assert run.assignment.key not in member.held()


def test_max_claims_counts_claims_under_way_where_the_group_is_paused() -> None:
    """Simulation, seed 5005970: claims waited for answers, their CP was paused, and as many went to the other CP."""
    net = Net(cps=2)
    net.topic("t", 8)
    member = net.member("a")
    member.drop_if = lambda record: isinstance(record, ClaimingPartition)  # no answer for an HI
    member.consumer("t", policy=MaxClaims(2))
    net.tick()
    wanted = set(member.engine.book.leases)
    assert len(wanted) == 2
    net.write(ReleaseGroup("x-1", "x", "g", int(net.now + 5 * HI)), route_lease(*min(wanted), 2))
    for _ in range(20):
        net.tick()
        assert set(member.engine.book.leases) == wanted


def test_whole_topics_are_shared_out() -> None:
    net = Net(cps=2)
    for topic, partitions in (("t", 6), ("u", 1), ("v", 3), ("w", 2)):
        net.topic(topic, partitions)
    members = [net.member(name) for name in "ab"]
    for member in members:
        member.consumer("^[tuvw]$", policy=Balanced() & WholeTopic())
    net.run(15 * HI)
    began = net.now
    net.run(10 * HI)
    assert kinds(net, began)["ReleasingPartition"] == 0
    assert [len({topic for topic, _ in m.held()}) for m in members] == [2, 2]
    assert sum(len(m.held()) for m in members) == 12


def test_release_if_behind_measures_by_the_second_and_releases() -> None:
    """End offsets come with fetches; a member that handles nothing is behind after three cycles."""
    net = Net(cps=1)
    net.topic("t", 2, end=100_000)
    slow = net.member("slow")
    consumer = slow.consumer("t", policy=Greedy() & ReleaseIfBehind(max_lag=10_000, cycles=3))
    net.run(100)
    for _ in range(45):
        net.data["t", 0].end += 1_000
        net.data["t", 1].end += 1
        for key in list(consumer.assignments):
            consumer.log_ends(key, net.data[key].end, net.now)
        slow.settle()
        net.run(HI / 10)
    assert slow.callbacks.count((Callback.REVOKE, ("t", 0))) >= 1
    first = net.records(ReleasingPartition)[0]
    assert isinstance(first, ReleasingPartition)
    assert first.partition == 0


def test_cycles_hold_lag_speed_and_growth_per_second() -> None:
    net = Net(cps=1)
    net.topic("t", 1, end=1_000)
    member = net.member("a", hi=2_000)
    consumer = member.consumer("t")
    net.run(50)
    placement = member.engine.leases.sources[consumer.number].placement
    assignment = consumer.assignments["t", 0]
    consumer.log_ends(assignment.key, 1_000, net.now)
    assignment.tracker.done.through(99)
    consumer.log_ends(assignment.key, 1_200, net.now + 1_000)  # half a cycle: too early
    consumer.log_ends(assignment.key, 1_400, net.now + 2_000)
    assert placement._shown._cycles["t", 0] == (Cycle(lag=1_300, speed=50.0, growth=200.0),)


def test_a_policy_is_asked_when_something_changed_and_not_all_the_time() -> None:
    asked: list[float] = []

    class Curious(Policy):
        def wishes(self, view: View, own: tuple[tuple[str, int], ...], now: float) -> Wishes:
            asked.append(now)
            return Balanced().wishes(view, own, now)

    net = Net(cps=1)
    net.topic("t", 4)
    member = net.member("a")
    member.consumer("t", policy=Curious())
    net.run(10 * HI)
    settled = len(asked)
    net.run(100 * HI)
    assert len(asked) <= settled + 2
    other = net.member("b")
    other.consumer("t")
    net.run(5 * HI)
    assert len(asked) > settled + 2
    assert len(member.held()) == 2


def test_who_has_asked_and_left_is_not_waited_for() -> None:
    """Its claim is not yet forgotten when it releases its last lease: others take over at once, not after an HI."""
    net = Net(cps=4)
    net.topic("t", 44)
    members = fleet(net, [f"m{i}" for i in range(10)])
    net.run_until(lambda: is_even(net, members))
    members += fleet(net, ["brief"])
    net.run_until(lambda: is_even(net, members))
    began = net.now
    members.pop().close()
    took = net.run_until(lambda: is_even(net, members))
    assert took <= 4 * LATENCY
    assert kinds(net, began)["ClaimingPartition"] == 4, "dealt out: no claim in another's way"


def test_a_holder_that_came_after_our_claim_is_asked_at_once() -> None:
    """A starting member knows no claims; the waiting one sees it take all, and claims again before HI is over."""
    net = Net(cps=1)
    net.topic("t", 4)
    first = net.member("first")
    first.consumer("t", policy=Greedy())
    net.run(100)
    waits = net.member("waits")
    waits.consumer("t")
    net.run(50)
    wishes = net.records(ClaimingPartition, "waits")
    assert len(wishes) == 1
    newcomer = net.member("newcomer")
    waits.stalled = True
    first.close()
    first.kill()
    newcomer.consumer("t")
    net.run_until(lambda: len(newcomer.held()) == 4)
    net.run(0.15 * HI)
    waits.stalled = False
    took = net.run_until(lambda: len(waits.held()) == 2)
    assert took <= 50
    net.run(0.3 * HI)
    assert len(net.records(ClaimingPartition, "waits")) == 4, "asked twice, and claimed two"


def test_while_a_claim_is_under_way_there_is_no_other() -> None:
    net = Net(cps=1)
    net.topic("t", 6)
    fleet(net, ["a"])
    net.run(200)
    [newcomer] = fleet(net, ["b"])
    for _ in range(2):
        net.tick(LATENCY / 4)
        newcomer.consumers[0].source.look_again()
        newcomer.settle()
    assert len(net.records(ClaimingPartition, "b")) == 1


def test_surplus_is_taken_back_as_soon_as_there_is_need() -> None:
    """A lease released for a member that then left is claimed back without waiting 2 HI."""
    net = Net(cps=2)
    net.topic("t", 6)
    a = net.member("a")
    a.consumer("t")
    net.run(100)
    b = net.member("b")
    b.consumer("t")
    net.run_until(lambda: len(b.held()) == 3)
    b.close()
    assert net.run_until(lambda: len(a.held()) == 6) <= 50


def test_what_a_policy_gives_up_for_other_reasons_is_left_alone() -> None:
    """If no other member takes it, we do, after 2 HI."""

    class Drops(Balanced):
        dropped: ClassVar[list[float]] = []

        def wishes(self, view: View, own: tuple[tuple[str, int], ...], now: float) -> Wishes:
            if len(own) == 2 and not self.dropped:
                self.dropped.append(now)
                return Wishes(release=own[:1])
            return Balanced.wishes(self, view, own, now)

    net = Net(cps=1)
    net.topic("t", 2)
    a = net.member("a")
    a.consumer("t", policy=Drops())
    net.run_until(lambda: Drops.dropped)
    net.run(1.9 * HI)
    assert len(a.held()) == 1
    net.run_until(lambda: len(a.held()) == 2, 0.2 * HI)


def test_a_member_alone_claims_a_few_first_and_then_ever_more() -> None:
    """So that others that start with it see it in time, while thousands still take less than seconds."""
    net = Net(cps=4)
    net.topic("t", 900)
    [member] = fleet(net, ["a"])
    waves = [net.count()]
    assert waves == [FIRST_CLAIMS]
    while len(member.held()) < 900:
        before = net.count()
        net.run(LATENCY)
        waves.append(net.count() - before)
        # Four answers per further claim: with two, the first of ten had up to 200 of 900 before it saw the others.
        assert waves[-1] <= FIRST_CLAIMS + sum(waves) // 4, waves
    assert len(waves) <= 25
    assert len(net.records(ClaimingPartition)) == 900


def test_a_wave_goes_to_as_few_parts_of_the_log_as_it_can() -> None:
    """Each CP that gets one costs a request, and a fetch of every replica."""
    net = Net(cps=8)
    net.topic("t", 8 * 3 * FIRST_CLAIMS)
    [member] = fleet(net, ["a"])
    first = net.records(ClaimingPartition)
    assert len(first) == FIRST_CLAIMS
    assert len({route_lease(x.topic, x.partition, 8) for x in first if isinstance(x, ClaimingPartition)}) == 1
    net.run_until(lambda: len(member.held()) == len(net.data))


def test_claims_go_out_in_waves() -> None:
    """Answers arrive one by one; the next claims are sent together when half of the answers have arrived."""

    class Slow(Member):
        heard = 0

        def visible(self, cp: int) -> int:
            return min(len(self.net.logs[cp]), self.heard)

        def turn(self) -> None:
            self.heard += 1
            super().turn()

    net = Net(cps=1, step_ms=1.0, rounds=1)
    net.topic("t", 150)
    member = Slow(net, "a")
    net.members.append(member)
    member.consumer("t")
    waves = [net.count()]
    while len(member.held()) < 150:
        before = net.count()
        net.tick()
        if net.count() > before:
            waves.append(net.count() - before)
    assert sum(waves) == 150
    assert all(wave >= FIRST_CLAIMS // 2 for wave in waves[:-1]), waves


@pytest.mark.parametrize("seed", range(6))
def test_what_a_policy_is_shown_is_kept_up_to_date(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An incremental view equals a complete one, through crashes, pauses and losses.

    (Except silent holders, which are searched when the first may be due.)
    """
    looked: list[int] = []
    look = PolicyView.look

    def look_and_compare(self: PolicyView, now: float, *, anew: bool) -> None:
        partial = bool(self.touched) and not anew
        look(self, now, anew=anew)
        at = self.look_at
        for key in self._work.subscription.partitions:
            fresh = self._view(key, now, {})
            shown = self.partitions.get(key)
            if fresh != shown:
                lease = self._peers.lease(key)
                assert fresh is not None and fresh.holder is None and lease is not None and lease.held, (key, shown)
        self.look_at = at
        counts = Partitions(self.partitions)
        assert (+self.partitions.counts, set(self.partitions.free)) == (counts.counts, set(counts.free))
        looked.append(partial)

    monkeypatch.setattr(PolicyView, "look", look_and_compare)
    rng, net = Random(seed), Net(cps=2)
    net.topic("t", 6)
    for number in range(40):
        member = rng.choice(net.members) if len(net.members) > 1 else None
        match rng.choice(["join", "kill", "stop", "lose", "pause", "well", "well"]):
            case "join" if len(net.members) < 5:
                member = None
            case "kill" if member is not None:
                member.kill()
            case "stop" if member is not None:
                member.paused = not member.paused
            case "lose" if member is not None:
                member.drop_appends = True
            case "pause":
                net.pause(rng.choice([0, 3 * HI]))
            case "well" if member is not None:
                member.paused = member.drop_appends = False
        if member is None:
            policy = rng.choice([Balanced(), Balanced() & MaxClaims(3), Greedy()])
            net.member(f"m{number}").consumer("t", policy=policy)
        net.run(rng.uniform(0, 2 * HI))
        for each in [one for one in net.members if one.engine.failure is not None]:
            each.kill()
    assert sum(looked) > 3, "most of the time only what changed was looked at"


def test_a_policy_never_sees_what_can_t_be_worked_on() -> None:
    """Paused, stopped and blocked partitions are not in the view."""
    seen: list[set[tuple[str, int]]] = []

    class Looks(Policy):
        def wishes(self, view: View, own: tuple[tuple[str, int], ...], now: float) -> Wishes:
            seen.append(set(view.partitions))
            assert set(own) <= set(view.partitions)
            return Greedy().wishes(view, own, now)

    net = Net(cps=1)
    net.topic("t", 2)
    member = net.member("a")
    consumer = member.consumer("t", policy=Looks())
    net.run(100)
    assert seen[-1] == {("t", 0), ("t", 1)}
    consumer.positions.blocked.add(("t", 0))
    consumer.source.look_again()
    member.settle()
    assert seen[-1] == {("t", 1)}


def test_a_tick_is_no_reason_to_check_all_and_a_lease_gone_stale_by_it_is() -> None:
    """A starting member writes a Tick to each CP (T3): ten members of one process checked 900 partitions each time."""
    looked: list[int] = []

    class Looks(Placement):
        def _look(self, now: float) -> None:
            looked.append(len(self._shown.touched))
            super()._look(now)

    net = Net(cps=1)
    net.topic("t", 6)
    member, other = net.member("a"), net.member("b")
    member.engine.leases.sources[member.consumer("t").number].placement.__class__ = Looks
    other.consumer("t")
    net.run(3 * HI)
    assert len(member.held()) == len(other.held()) == 3
    looked.clear()
    net.write(Tick("x", "x", "x"), 0)
    net.run(50)
    assert not looked
    other.kill()
    net.stamp_shift = 3 * HI
    net.write(Tick("x", "x", "x"), 0)
    assert net.run_until(lambda: len(member.held()) == 6) <= HI / 2, "the log's time shows it, not the own clock"
