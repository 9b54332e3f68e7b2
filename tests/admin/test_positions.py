"""Targets as users write them become offsets; and restoring any progress, on the core alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal import AdminError, ConfigurationError, Move
from kafka_marshal.admin.positions import moves_to, resolve
from kafka_marshal.admin.repositioning import _add, _Done
from kafka_marshal.admin.session import progress_in
from kafka_marshal.types import Target
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    World,
    encode,
)

Key = tuple[str, int]


class Logs:
    """A cluster of two partitions: the first has offsets 10 to 19, one per second; the second is empty."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def watermarks(self, partitions: Iterable[Key], timeout_s: float) -> dict[Key, tuple[int, int]]:
        marks = {("t", 0): (10, 20), ("t", 1): (0, 0)}
        return {key: marks[key] for key in partitions if key in marks}

    def offsets_for_time(self, partitions: Iterable[Key], timestamp_ms: int, timeout_s: float) -> dict[Key, int]:
        self.asked.append(timestamp_ms)
        return {key: min(20, 10 + timestamp_ms // 1000) if key[1] == 0 else 0 for key in partitions}


def at(positions: dict[Key, Target], force: bool = False) -> dict[Key, int]:
    return resolve(Logs(), positions, lambda _: 12, force=force)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "offset"),
    [
        ("earliest", 10),
        ("latest", 20),
        (10, 10),
        (15, 15),
        (20, 20),
        (datetime.fromtimestamp(3, UTC), 13),
        (datetime.fromtimestamp(3, timezone(timedelta(hours=9))), 13),
        (datetime(1950, 1, 1, tzinfo=UTC), 10),
        (datetime(2100, 1, 1, tzinfo=UTC), 20),
    ],
)
def test_targets(target: Target, offset: int) -> None:
    assert at({("t", 0): target}) == {("t", 0): offset}


def test_one_question_for_each_moment_and_milliseconds_are_exact() -> None:
    logs = Logs()
    moment = datetime(2026, 11, 21, 3, 14, 15, 926_535, UTC)
    found = resolve(logs, {("t", 1): moment, ("t", 0): moment}, lambda _: 0, force=False)  # type: ignore[arg-type]
    assert list(found) == [("t", 0), ("t", 1)]
    assert logs.asked == [int(moment.timestamp()) * 1000 + 926]


@pytest.mark.parametrize("offset", [0, 9, 21, 2**63 - 1])
def test_offsets_outside_the_log_are_refused_unless_forced(offset: int) -> None:
    with pytest.raises(AdminError, match=rf"offset {offset} is outside the log, which holds 10 to 19"):
        at({("t", 0): offset})
    assert at({("t", 0): offset}, force=True) == {("t", 0): offset}


def test_partitions_that_are_not_there_are_refused_also_by_force() -> None:
    with pytest.raises(AdminError, match=r"t \[2\], u \[0\]: not on this cluster.*Nothing was changed"):
        at({("u", 0): 3, ("t", 0): 15, ("t", 2): "latest"}, force=True)


@pytest.mark.parametrize(
    "target",
    [-1, 2**63, True, 1.5, None, "newest", "15", datetime(2026, 11, 21, tzinfo=UTC).replace(tzinfo=None), b""],
    ids=repr,
)
def test_what_can_not_be_meant_is_refused(target: Any) -> None:
    with pytest.raises(ConfigurationError, match="Nothing was changed"):
        at({("t", 0): target})


@pytest.mark.parametrize(
    "key", ["t", ("t",), ("t", -1), ("", 0), ("t", "0"), (0, "t"), ("a\nb", 0), ("t", True)], ids=repr
)
def test_what_names_no_partition_is_refused(key: Any) -> None:
    with pytest.raises(ConfigurationError, match="Nothing was changed"):
        at({key: 15})


def test_nothing_asked_is_nothing_done() -> None:
    assert at({}) == {}


def test_moves_say_what_they_forget() -> None:
    world = World(0, 1)
    apply = _Script(world)
    apply(ClaimingPartition("i", "c", "g", "t", 0, 1_000))
    assert moves_to({("t", 0): 0, ("u", 3): 7}, lambda key: progress_in({0: world}, "g", key)) == [
        Move("t", 0, before=0, after=0),
        Move("u", 3, before=None, after=7),
    ]
    apply(CommitRanges("i", "c", "g", "t", 0, 0, ((5, 6), (9, 9))))
    (move,) = moves_to({("t", 0): 2}, lambda key: progress_in({0: world}, "g", key))
    assert (move.before, move.done_ahead, move.last_offset) == (0, 3, 1)
    assert str(Move("u", 3, None, 7)) == "u [3]: new → 7"


class _Script:
    """Applies records, one per millisecond."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.epoch = 0

    def __call__(self, record: Record) -> str:
        offset = self.world.next_offset
        return self.world.apply(offset, 1_000 + offset, encode(record)).code


class _Lease:
    """Stands in for a lease of the admin: its records go straight into the world, in order."""

    ids = ("i2", "ops", "g")

    def __init__(self, script: _Script, epoch: int) -> None:
        self.script = script
        self.key = ("t", 0, epoch)
        self.codes: list[str] = []

    def beat(self, last_offset: int, now: float) -> None:
        self.codes.append(self.script(Heartbeat(*self.ids, *self.key, last_offset)))

    def grant(self, last_offset: int, now: float) -> None:
        self.codes.append(self.script(ClaimingMessages(*self.ids, *self.key, last_offset)))

    def commit_ranges(self, ranges: tuple[tuple[int, int], ...]) -> None:
        self.codes.append(self.script(CommitRanges(*self.ids, *self.key, ranges)))


class _Engine:
    """Stands in for the admin's engine."""

    def take(self, consumer: None, function: Callable[..., object], *of: object) -> None:
        function(*of)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), st.integers(-1, 60)),
        st.tuples(st.just("grant"), st.integers(0, 60)),
        st.tuples(
            st.just("commit"), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 6)), min_size=1, max_size=4)
        ),
    ),
    max_size=12,
)


@given(STEPS, st.integers(-1, 90))
def test_any_progress_can_be_put_back_in_full(steps: list[tuple[str, Any]], elsewhere: int) -> None:
    """C11: a heartbeat, a grant and ranges restore the complete old progress, whatever the present one is."""
    world = World(0, 1)
    script = _Script(world)
    worker = ("i", "c", "g", "t", 0)
    script(ClaimingPartition(*worker, 60_000))
    for name, value in steps:
        if name == "beat":
            script(Heartbeat(*worker, 0, value))
        elif name == "grant":
            script(ClaimingMessages(*worker, 0, value))
        else:
            script(CommitRanges(*worker, 0, tuple((first, first + more) for first, more in value)))
    script(ReleasingPartition(*worker, 0, None))
    before = _Done.of(world.lease("g", "t", 0))

    script(ReleaseGroup(*_Lease.ids, 1_000_000))
    for _ in range(2):  # the move, and then the way back
        epoch = world.next_offset
        assert script(ClaimingPartition(*_Lease.ids, "t", 0, 60_000)) == "OK"
        lease = _Lease(script, epoch)
        if _ == 0:
            script(ReleasingPartition(*_Lease.ids, "t", 0, epoch, elsewhere))
        else:
            lease.beat(before.first_beat, 0.0)
            _add(_Engine(), lease, before, 0.0)  # type: ignore[arg-type]
            assert set(lease.codes) <= {"OK", "REPOSITIONED"}
            script(ReleasingPartition(*_Lease.ids, "t", 0, epoch, None))
    assert _Done.of(world.lease("g", "t", 0)) == before
