"""What `status` and `lag` compute: speed, the broker's time, lag."""

from __future__ import annotations

from kafka_marshal.cli.meter import BrokerClock, Meter, beyond
from kafka_marshal.cli.rows import LeaseRow
from rationalizer import ClaimingPartition, CommitRanges, Heartbeat, ReleaseGroup, Tick, World, encode

A = ("a1", "a", "g")
KEY = ("g", "t", 0)


class Metered:
    """A world of one lease, sampled after each record."""

    def __init__(self, window_ms: int = 10_000) -> None:
        self.world = World(0, 1)
        self.meter = Meter(window_ms)
        self.add(ClaimingPartition(*A, "t", 0, 100_000), 0)

    def add(self, record: ClaimingPartition | Heartbeat | CommitRanges | ReleaseGroup | Tick, at: int) -> None:
        assert self.world.apply(self.world.next_offset, at, encode(record)).accepted
        self.meter.sample(self.world)

    def beat(self, last_offset: int | None, at: int) -> None:
        self.add(Heartbeat(*A, "t", 0, 0, last_offset), at)

    def speed(self) -> float | None:
        return self.meter.per_second(KEY)


def test_speed_is_what_was_done_over_log_time() -> None:
    metered = Metered()
    assert metered.speed() is None
    metered.beat(99, 1_000)
    assert metered.speed() == 100.0
    metered.beat(99, 2_000)
    assert metered.speed() == 50.0


def test_what_is_done_beyond_a_gap_counts() -> None:
    metered = Metered()
    metered.add(CommitRanges(*A, "t", 0, 0, ((10, 19),)), 1_000)
    assert metered.speed() == 10.0
    metered.beat(9, 2_000)  # the gap is closed: 20 in all
    assert metered.speed() == 10.0


def test_only_the_window_counts() -> None:
    metered = Metered(window_ms=2_000)
    metered.beat(999, 1_000)
    for second in range(2, 8):
        metered.beat(999, second * 1_000)
    assert metered.speed() == 0.0


def test_a_repositioned_lease_begins_anew() -> None:
    metered = Metered()
    metered.beat(999, 1_000)
    metered.add(ReleaseGroup("x", "a", "g", 50_000), 1_500)
    metered.beat(-1, 1_600)
    assert metered.speed() is None
    metered.beat(100, 2_600)
    assert metered.speed() == 101.0


def test_unknown_leases_have_no_speed() -> None:
    assert Meter(1_000).per_second(KEY) is None


def test_the_brokers_time_is_learned_from_fresh_records() -> None:
    local = 1_000_000.0
    clock = BrokerClock(lambda: local)
    assert (str(clock.source), clock.now_ms(), clock.local_is_behind_ms) == ("local", 1_000_000, 0)
    clock.heard(1_060_000)
    assert (clock.source, clock.now_ms()) == ("traffic", 1_060_000)
    assert clock.local_is_behind_ms == 60_000
    local += 500
    assert clock.now_ms() == 1_060_500
    clock.heard(1_060_100)  # took longer on its way: says less
    assert clock.now_ms() == 1_060_500
    clock.heard(1_060_700, "tick")
    assert (clock.source, clock.now_ms()) == ("tick", 1_060_700)


def test_a_clock_that_runs_ahead_of_the_broker_is_corrected() -> None:
    clock = BrokerClock(lambda: 1_000_000.0)
    clock.heard(900_000)
    assert clock.now_ms() == 900_000
    assert clock.local_is_behind_ms == 0


def test_the_brokers_time_is_never_before_a_stamp_that_was_seen() -> None:
    clock = BrokerClock(lambda: 1_000.0)
    clock.at_least(5_000)
    assert (clock.source, clock.now_ms()) == ("local", 5_000)
    assert clock.local_is_behind_ms == 4_000


def row(**known: int | str | None) -> LeaseRow:
    return LeaseRow(group="g", topic="t", partition=0, **known)  # type: ignore[arg-type]


def test_lag() -> None:
    assert row(log_start=0, log_end=100, stable=39).lag == 60
    assert row(log_start=0, log_end=100).lag == 100
    assert row(log_start=0, log_end=0).lag == 0
    assert row(log_start=50, log_end=100, stable=9).lag == 50, "what retention took can't be done any more"
    assert row(log_start=0, log_end=100, stable=39, beyond=10).lag == 50
    assert row(log_start=0, log_end=10, stable=39).lag == 0, "a topic made anew"
    assert row(stable=39).lag is None, "no such partition"


def test_overdue() -> None:
    assert not row(heartbeat_interval_ms=1000, silence_ms=2000).overdue
    assert row(heartbeat_interval_ms=1000, silence_ms=2001).overdue
    assert not row(heartbeat_interval_ms=1000).overdue, "nobody holds it"


def test_beyond_and_in_flight() -> None:
    world = World(0, 1)
    world.apply(0, 0, encode(ClaimingPartition(*A, "t", 0, 1000)))
    world.apply(1, 1, encode(CommitRanges(*A, "t", 0, 0, ((2, 3), (7, 7)))))
    (lease,) = world.leases()
    assert beyond(lease) == 3
