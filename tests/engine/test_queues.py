"""The queue of a lock: members that wait for it win in the order of their first requests in the log."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from kafka_marshal.engine.claims.leases import ManualLease
from rationalizer import ClaimingPartition, ReleasingPartition, decode
from rationalizer.levels import SUPPORTED_LEVEL
from tests.engine.harness import HI, Member, Net

KEY = ("lock:x", 0)
#: One place in the queue.
TURN = HI / 8


def ask(member: Member) -> ManualLease:
    manual = member.engine.take(None, member.engine.leases.claim, KEY, member.clock())
    member.settle()
    return manual


def give_back(member: Member, manual: ManualLease) -> None:
    member.engine.take(None, manual.release, None, member.clock())
    member.settle()


def queue_of(net: Net, names: str, apart_ms: float = 30) -> tuple[list[Member], list[ManualLease]]:
    """The first holds it, the others ask for it one after the other; all of them have known each other for long."""
    members = [net.member(name) for name in names]
    net.run(2 * HI)
    asked = []
    for member in members:
        asked.append(ask(member))
        net.run(apart_ms)
    assert asked[0].is_proven
    return members, asked


def holders(net: Net) -> list[str]:
    """Who got it, in the order of the log."""
    found: list[str] = []
    held = ""
    for record in net.records():
        if isinstance(record, ClaimingPartition) and not held:
            held = record.client_id
            found.append(held)
        elif isinstance(record, ReleasingPartition) and record.client_id == held:
            held = ""
    return found


@pytest.mark.parametrize("waited", [50, HI / 2, 3.3 * HI])
def test_members_win_in_the_order_of_their_first_requests_however_long_they_have_waited(waited: float) -> None:
    net = Net(cps=1)
    members, asked = queue_of(net, "adbec")
    net.run(waited)
    for member, manual in zip(members, asked, strict=True):
        assert net.run_until(partial(getattr, manual, "is_proven"), 2 * HI) <= 30, "it is claimed at once"
        net.run(100)
        give_back(member, manual)
    assert "".join(holders(net)) == "adbec"


def test_one_that_has_had_it_asks_again_behind_those_that_wait() -> None:
    net = Net(cps=1)
    (a, b, c), (first, second, third) = queue_of(net, "abc")
    give_back(a, first)
    net.run(0.1)
    again = ask(a)
    net.run_until(lambda: second.is_proven, HI)
    give_back(b, second)
    net.run_until(lambda: third.is_proven, HI)
    give_back(c, third)
    net.run_until(lambda: again.is_proven, HI)
    assert "".join(holders(net)) == "abca"


def test_a_newcomer_that_finds_it_free_does_not_pass_those_that_wait() -> None:
    net = Net(cps=1)
    d = net.member("d")
    (a, b, _), (first, second, third) = queue_of(net, "abc")
    b.stalled = True  # it hears of the release a little late
    give_back(a, first)
    net.tick()
    newcomer = ask(d)
    net.run(TURN / 3)
    b.stalled = False
    net.run_until(lambda: second.is_proven, TURN)
    assert not (third.is_proven or newcomer.is_proven)
    assert "".join(holders(net)) == "ab"


def test_one_that_has_just_started_stands_behind_those_whose_requests_it_has_not_seen() -> None:
    net = Net(cps=1)
    (a, _), (first, second) = queue_of(net, "ab")
    net.run(HI / 4)
    late = net.member("0")
    net.members.insert(0, net.members.pop())  # it is the faster one
    asked = ask(late)
    net.run(HI / 4)
    assert asked.refusal == "HELD"
    give_back(a, first)
    net.run_until(lambda: second.is_proven or asked.is_proven, HI)
    assert second.is_proven


@pytest.mark.parametrize("how", ["dies", "gives up"])
def test_one_that_dies_or_gives_up_in_the_queue_delays_the_next_by_one_turn_at_most(how: str) -> None:
    net = Net(cps=1)
    (a, b, _), (first, second, third) = queue_of(net, "abc")
    if how == "dies":
        b.kill()
    else:
        give_back(b, second)
    give_back(a, first)
    assert net.run_until(lambda: third.is_proven, HI) <= TURN + 30


def test_one_that_died_is_forgotten_after_two_heartbeat_intervals() -> None:
    net = Net(cps=1)
    (a, b, _), (first, _, third) = queue_of(net, "abc")
    b.kill()
    net.run(2.1 * HI)
    give_back(a, first)
    assert net.run_until(lambda: third.is_proven, HI) <= 30


def test_one_that_comes_when_all_that_waited_are_gone_has_it_at_once() -> None:
    net = Net(cps=1)
    d = net.member("d")
    (a, b, c), (first, _, _) = queue_of(net, "abc")
    b.kill()
    c.kill()
    net.run(2.1 * HI)
    give_back(a, first)
    net.tick()
    asked = ask(d)
    assert net.run_until(lambda: asked.is_proven, HI) <= 30


def test_a_holder_that_dies_is_followed_by_the_first_in_the_queue() -> None:
    net = Net(cps=1)
    (a, *_), (_, second, third) = queue_of(net, "acb")
    a.kill()
    took = net.run_until(lambda: second.is_proven, 4 * HI)
    assert took <= 2 * HI + 50
    assert not third.is_proven
    assert net.world(KEY).client_id == "c"


def test_a_free_lock_that_nobody_waits_for_is_had_at_once_also_by_one_that_has_just_started() -> None:
    net = Net(cps=1)
    a = net.member("a")
    give_back(a, ask(a))
    net.run(50)
    first = ask(a)
    assert net.run_until(lambda: first.is_proven, HI) <= 30
    give_back(a, first)
    net.run(50)
    second = ask(net.member("b"))
    assert net.run_until(lambda: second.is_proven, HI) <= 30


@pytest.mark.parametrize("apart_ms", range(50, 1_000, 100))
def test_requests_that_are_repeated_do_not_win_out_of_turn(apart_ms: float) -> None:
    """The holder has died, and the first in the queue is slow: the second one waits for its turn all the same."""
    net = Net(cps=1)
    (a, b, c), (_, _, third) = queue_of(net, "abc", apart_ms)
    a.kill()
    net.run(HI)
    opens_at = c.engine.leases.peers.opens_at(KEY, c.clock())
    b.drop_appends = True
    net.run_until(lambda: third.is_proven, 4 * HI)
    assert net.now >= opens_at + 0.8 * TURN


def test_a_free_lock_is_no_partition_without_a_holder_in_the_figures() -> None:
    net = Net(cps=1)
    a = net.member("a")
    for _ in range(2):
        manual = ask(a)
        net.run_until(partial(getattr, manual, "is_proven"), HI)
        give_back(a, manual)
        net.run(20 * HI)
    assert a.engine.leases.claim_times.read().count == 2
    assert a.engine.leases.gaps.read().count == 0


def test_members_wait_for_the_end_of_a_pause_and_one_wins_then() -> None:
    net = Net(cps=1)
    (a, *_), (first, second, third) = queue_of(net, "abc")
    net.pause(4 * HI)
    net.run(3 * HI)
    assert first.loss, "its beats were rejected"
    assert second.refusal == "PAUSED"
    assert a.clock() >= first.lease.hand_out_until
    net.run_until(lambda: second.is_proven or third.is_proven, 3 * HI)
    net.run(HI)
    assert second.is_proven != third.is_proven


@pytest.mark.parametrize("seed", range(20))
def test_turns_are_those_of_the_log_whatever_members_do(seed: int) -> None:
    """Only a request that was under way when the lock fell free passes others; and there is one holder at a time."""
    rng, net = Random(seed), Net(cps=1)
    members = [net.member(name) for name in "abcdef"]
    net.run(2 * HI)
    asked: dict[Member, ManualLease] = {}
    for _ in range(300):
        member = rng.choice(members)
        manual = asked.get(member)
        if manual is None:
            asked[member] = ask(member)
        elif manual.is_proven or rng.random() < 0.1:
            give_back(member, manual)
            del asked[member]
        assert sum(x.is_proven and m.clock() < x.lease.hand_out_until for m, x in asked.items()) <= 1
        net.run(rng.choice([10, 20, 100, 300]))
    assert out_of_turn(net) == []


def out_of_turn(net: Net) -> list[tuple[str, str]]:
    """(winner, another that had its place before it), as the log says. Who has not asked for two HI has no place."""
    queue: dict[str, int] = {}  # in the order of first requests → the last one
    held, found, free_since = "", [], 0
    for stamp, value in net.logs[0]:
        record = decode(value, SUPPORTED_LEVEL)
        queue = {client: at for client, at in queue.items() if at >= stamp - 2 * HI}
        if isinstance(record, ReleasingPartition) and record.client_id == held:
            held, free_since = "", stamp
        elif isinstance(record, ClaimingPartition):
            who = record.client_id
            if held:
                queue[who] = stamp
                continue
            before = [client for client in queue if client != who]
            if who in queue:
                before = before[: list(queue).index(who)]
            if before and stamp < free_since + TURN:
                found.append((who, before[0]))
            queue.pop(who, None)
            held = who
    return found
