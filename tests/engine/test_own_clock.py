"""T3, T4 and T5: a member stops in time by its own clock, whatever the log and the broker's clock do."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from kafka_marshal.engine.claims.leases import ManualLease
from kafka_marshal.engine.holding import Proofs
from kafka_marshal.engine.settings import EXPIRY_JITTER_SHARE, FIRST_TICK_SHARE
from rationalizer import ClaimingPartition, Heartbeat, HeartbeatBatch, Record, ReleasingPartition, Tick, decode
from tests.engine.harness import HI, MARGIN, Key, Member, Net

T0 = ("t", 0)
ENDS = 2 * HI - MARGIN
#: Members of a fleet, its HI (the default), and the time of a record from one member to the others (ms).
FLEET, FLEET_HI, JOURNEY = 100, 3_000, 5.0


def is_beat(record: Record) -> bool:
    return isinstance(record, Heartbeat | HeartbeatBatch)


def holding(partitions: int = 1, **options: object) -> tuple[Net, Member]:
    """A member that holds all of topic t and has messages to deliver."""
    net = Net(cps=1)
    net.topic("t", partitions, end=100)
    member = net.member("a", **options)
    member.consumer("t")
    net.run_until(lambda: len(member.held()) == partitions and member.can_hand_out(T0))
    member.fetch()
    return net, member


def claiming(*, deaf: bool = False, acks: str = "now") -> tuple[Net, Member]:
    """A member about to claim the only partition of topic t."""
    net = Net(cps=1)
    net.topic("t", end=100)
    member = net.member("a")
    member.stalled, member.acks = deaf, acks
    member.consumer("t")
    return net, member


def last_sent(net: Net, key: Key = T0) -> float:
    """When the last record that moved the last heartbeat was sent (clocks agree in these tests)."""
    return float(net.world(key).last_beat)


# -- T3 -----------------------------------------------------------------------------------------------------------


def test_t3_a_starting_client_ticks_where_there_are_holders() -> None:
    """A dead holder looks fresh in a silent log; the starting client's Tick shows its age (T3)."""
    net, first = holding()
    first.kill()
    net.now += 10 * HI
    second = net.member("b")
    second.consumer("t")
    took = net.run_until(lambda: second.held() == [T0])
    assert isinstance(net.records(client_id="b")[0], Tick)
    assert took <= 50 + FIRST_TICK_SHARE * HI, "the log shows that the holder is stale: no heartbeat is waited for"


def test_t3_a_member_that_starts_among_living_ones_appends_no_tick() -> None:
    """The next record of any member shows log time (T3): a fleet that starts together needs no Ticks."""
    net, _ = holding()
    net.member("b")
    net.write(Tick("x", "x", "x"), 0)
    net.run(HI)
    assert not [r for r in net.records(client_id="b") if isinstance(r, Tick)]


def test_t3_without_ticks_a_claim_is_what_moves_log_time() -> None:
    """No traffic after the holder's death: a waiting member claims when 2 · HI are over by its own clock (T3)."""
    net, first = holding()
    second = net.member("b")
    second.consumer("t")
    last = last_sent(net)
    first.kill()
    net.run_until(lambda: second.held() == [T0])
    assert 2 * HI < net.now - last <= 2 * HI + 100
    assert net.world(T0).client_id == "b"


class Distant(Member):
    """Receives records after a delay: if all received them at once, one would always be first, jitter or not."""

    def visible(self, cp: int) -> int:
        log, seen = self.net.logs[cp], self.worlds[cp].next_offset
        while seen < len(log) and log[seen][0] + JOURNEY <= self.net.now:
            seen += 1
        return seen


def fleet(net: Net) -> list[Member]:
    """FLEET members that start at the same moment and want what another member holds."""
    members: list[Member] = [Distant(net, f"w{number}", hi=FLEET_HI) for number in range(FLEET)]
    net.members.extend(members)
    for member in members:
        member.consumer("t")
    return members


def until_takeover(net: Net, waiting: list[Member], last: float) -> list[tuple[float, str]]:
    """Records between a dead holder's last heartbeat and the takeover: time since the heartbeat, and the record."""
    while not any(member.held() for member in waiting):
        assert net.now < last + 3 * FLEET_HI
        net.tick(1.0)
    net.run(2 * JOURNEY, step=1.0)  # what is under way
    return [(stamp - last, type(decode(value)).__name__) for stamp, value in net.logs[0] if stamp > last]


def few(window: float) -> float:
    """Upper limit of members that append at moments spread over ``window`` ms.

    A member that receives the first one's record before its own moment appends nothing. So in the mean, those append
    whose moment is within one journey (and a step of the clock); chance may double their number.
    """
    return 2 * FLEET * (JOURNEY + 1) / window


def test_t3_of_a_fleet_that_waits_few_append() -> None:
    """100 members see the same holder go silent: a few claims after 2 · HI, and no other record (T3)."""
    net, first = holding(hi=FLEET_HI)
    net.rounds = 1
    waiting = fleet(net)
    net.run(2 * FLEET_HI)
    first.kill()
    appended = until_takeover(net, waiting, last_sent(net))
    window = EXPIRY_JITTER_SHARE * FLEET_HI
    counts = Counter(name for _, name in appended)
    assert counts.keys() == {"ClaimingPartition"}, counts
    assert counts.total() <= few(window), counts
    assert all(2 * FLEET_HI < after <= 2 * FLEET_HI + window + 2 * JOURNEY for after, _ in appended)


def test_t3_of_a_fleet_that_starts_in_the_silence_few_append() -> None:
    """100 members start at once, and log time is unknown: a few Ticks, later a few claims, and nothing else (T3)."""
    net, first = holding(hi=FLEET_HI)
    net.rounds = 1
    last = last_sent(net)
    first.kill()
    net.now += FLEET_HI / 2
    appended = until_takeover(net, fleet(net), last)
    counts = Counter(name for _, name in appended)
    assert counts.keys() == {"Tick", "ClaimingPartition"}, counts
    assert counts["Tick"] <= few(FIRST_TICK_SHARE * FLEET_HI), counts
    assert counts["ClaimingPartition"] <= few(EXPIRY_JITTER_SHARE * FLEET_HI), counts
    assert all(after > 2 * FLEET_HI for after, name in appended if name == "ClaimingPartition")


# -- T4 -----------------------------------------------------------------------------------------------------------


def test_t4_beats_go_out_every_third_of_hi_and_earlier() -> None:
    net, member = holding()
    net.run(10 * HI)
    stamps = [ts for ts, _ in net.logs[0]][1:]
    gaps = [later - earlier for earlier, later in pairwise(stamps)]
    assert max(gaps) <= HI / 3 + 10
    assert len(set(gaps)) > 2, "beats are jittered"
    assert member.held() == [T0]


def test_t4_a_lagging_replica_does_not_mistake_an_older_claim_for_the_newest() -> None:
    """Two claims in transit, as the log was late: the grant belongs to the first one, sent earlier (T4)."""
    net, member = claiming(deaf=True, acks="late")
    first_sent = net.now
    net.run_until(lambda: len(net.records(ClaimingPartition)) == 2)
    member.stalled = False
    net.tick()
    net.run(100)
    lease = member.engine.book.leases.get(T0)
    assert lease is None or lease.hand_out_until <= first_sent + ENDS, "the sending of the second claim counted"


def test_t4_the_grant_of_a_claim_that_was_given_up_is_proven_by_its_own_sending() -> None:
    """As above, with acknowledgements: the offset shows that it was the first sending."""
    net, member = claiming(deaf=True)
    first_sent = net.now
    net.run_until(lambda: len(net.records(ClaimingPartition)) == 2)
    member.stalled = False
    member.drop_if = is_beat
    net.tick()
    assert member.lease(T0).hand_out_until == first_sent + ENDS


def test_t4_a_grant_that_nothing_proves_is_given_back() -> None:
    """The time of neither the claim nor any heartbeat is known: the lease is not kept in limbo."""
    net, member = claiming(acks="lost")
    net.run(20)
    assert member.held() == [T0]
    net.run_until(lambda: net.records(ReleasingPartition), 1.5 * HI)
    assert not member.can_hand_out(T0)


def test_t4_copies_written_by_a_retry_prove_no_more_than_the_original() -> None:
    """Each record is in the log twice; the acknowledgement names the first copy (C17, T4)."""
    net, member = holding()
    member.duplicate = True
    net.run(4 * HI)
    assert member.held() == [T0]
    sent = last_sent(net)
    assert member.lease(T0).valid_until == sent + ENDS


def test_t4_the_margin_allows_for_clocks_whose_rates_differ() -> None:
    """A client whose clock runs 4 % slow stops before 2 · HI of the broker's time are over."""
    net, member = holding(rate=0.96)
    sent = last_sent(net)
    member.drop_appends = True
    net.run_until(lambda: not member.can_hand_out(T0))
    assert net.now - sent < 2 * HI


def test_t4_a_lease_by_hand_ends_by_the_same_clock() -> None:
    net = Net(cps=1)
    net.topic("t")
    member = net.member("a")
    manual: ManualLease = member.engine.leases.claim(T0, member.clock())
    member.settle()
    net.run_until(lambda: manual.is_proven)
    sent = last_sent(net)
    member.drop_appends = True
    net.run(ENDS - (net.now - sent) - 10)
    assert manual.loss == ""
    net.run(20)
    assert "not confirmed" in manual.loss
    assert not member.can_hand_out(T0)


def test_proofs_too_old_to_prove_anything_are_forgotten() -> None:
    """Missing acknowledgements, and records without one, do not pile up."""
    net, member = holding()
    for acks in ("lost", "blank", "now"):
        member.acks = acks
        net.run(10 * HI)
    proofs: Proofs = member.engine.book._proofs
    assert len(proofs._sent) + len(proofs._acked) + len(proofs._applied) <= 4 * 3 * 2


@pytest.mark.parametrize("how", ["evicted", "replaced", "handed back", "closed", "clock"])
def test_t4_an_iterating_thread_sees_the_end_of_its_lease_before_its_next_message(how: str) -> None:
    """It reads only these two numbers, without a lock: however a lease ends, they are 0 from then on."""
    net, member = holding()
    run = member.take(5, iterating=True)
    assert run is not None
    lease = run.assignment.lease
    assert member.clock() < lease.hand_out_until == lease.proven_until
    match how:
        case "evicted":
            net.write(ReleasingPartition(*member.engine.ids, *T0, lease.epoch, None), lease.cp)
            net.tick()
        case "replaced":
            net.write(Heartbeat("a-newer", "a", "g", *T0, None, None), lease.cp)
            net.tick()
        case "handed back":
            member.engine.book.release(member.engine.book.leases[T0], None, member.clock())
        case "closed":
            member.close()
        case "clock":
            member.stalled = True
            net.run(ENDS)
    assert lease.hand_out_until == lease.proven_until == 0.0


def test_t4_an_idle_member_is_woken_for_its_beats_and_for_nothing_else() -> None:
    """Progress beyond gaps is committed together with heartbeats: a separate timer would double the wake-ups."""
    net, member = holding()
    began, until, wakes = int(net.now) + 1, net.now + 10 * HI, 0
    while net.now < until:
        net.tick(max(1.0, member.due - net.now))
        wakes += 1
    beats = [record for record in net.records(since=began) if is_beat(record)]
    assert len(beats) >= 29
    assert wakes <= len(beats) + 2


# -- T5 -----------------------------------------------------------------------------------------------------------


def test_t5_records_of_others_after_the_jump_do_not_prolong_the_doubt() -> None:
    """The heartbeat sent at the jump ends the doubt, however busy the CP: there is one jump, not one per record."""
    net, member = holding()
    net.run(100)
    net.stamp_shift = 3 * HI
    net.write(Tick("x", "x", "x"), 0)
    for cp in member.worlds:
        member.apply(cp)
    member.acks = "late"
    member.settle()
    for _ in range(5):
        net.now += 1
        net.write(Tick("x", "x", "x"), 0)
        for cp in member.worlds:
            member.apply(cp)
        member.settle()
    member.deliver_acks()
    assert member.can_hand_out(T0)


def test_t5_a_broker_that_runs_fast_for_long_costs_time_but_not_the_lease() -> None:
    """10 % fast is beyond the margin: delivery pauses between heartbeats, leases stay."""
    net, member = holding()
    handed_out = 0
    for _ in range(400):
        net.stamp_shift += 1
        net.tick()
        handed_out += member.can_hand_out(T0)
    assert member.held() == [T0]
    assert handed_out > 300
