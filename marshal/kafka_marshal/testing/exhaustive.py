"""Small scope, all of it: every order of records and expiries of three clients and two partitions, to some depth.

``python -m kafka_marshal.testing.exhaustive --depth 8``. Two clients (each of which may have been restarted) and an
admin append any record that they could, with any epoch they ever had, in any order, and log time moves by one HI or
beyond staleness between any two of them: that is what delay, loss and repetition can make of a log. Every state that
comes of it is met once; states that differ only in names, in the size of epochs, or in ages beyond staleness are one.

The code that is explored is the rationalizer's own. Each state is restored from its snapshot before the next record,
so that S1 and S3 are tried, too. What must hold of each step is written down here once more, apart from that code.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Lease,
    Outcome,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    World,
    codes,
    encode,
)

__all__ = ["Explored", "explore", "main"]

GROUP, TOPIC = "g", "t"
HI = 100
PARTITIONS = (0, 1)
#: (client, instance): two workers, the second of which has a predecessor, and an admin.
WORKERS = (("a", "a1"), ("b", "b1"), ("b", "b2"))
ADMIN = ("z", "z1")
#: Progress is followed up to here; beyond it nothing new can happen.
LAST_OFFSET = 2
START = 1_000_000


class BrokenError(AssertionError):
    """A step that must not be."""


@dataclass(slots=True)
class Explored:
    """What was met."""

    depth: int = 0
    #: States that differ in more than which partition is which; and with those that do not.
    states: int = 1
    all_states: int = 1
    #: Records applied.
    steps: int = 0
    #: States first met at each depth.
    by_depth: list[int] = field(default_factory=lambda: [1])
    #: (record, outcome) → how often.
    transitions: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Every state there is was met: the next depth has no new one.
    is_all: bool = False

    def missing(self) -> list[tuple[str, str]]:
        """Transitions of the protocol's table that were not met."""
        return sorted(_transitions() - set(self.transitions))

    def tell(self) -> str:
        """For people."""
        lines = [f"depth {depth}: {states:>9,} new states" for depth, states in enumerate(self.by_depth)]
        lines += [f"{name:18} {code:26} {times:>10,}" for (name, code), times in sorted(self.transitions.items())]
        missing = ", ".join(f"{name} {code}" for name, code in self.missing())
        whole = "all there are" if self.is_all else f"to depth {self.depth}"
        lines.append(
            f"{self.all_states:,} states ({whole}; {self.states:,} where the partitions may change places), "
            f"{self.steps:,} records applied, "
            f"{len(_transitions() - set(self.missing()))} of {len(_transitions())} transitions"
            + (f"; not met: {missing}" if missing else "")
        )
        return "\n".join(lines)


#: What three clients with well-formed records of level 1 can't show.
_ELSEWHERE = frozenset(
    [
        codes.MALFORMED,
        codes.UNSUPPORTED_VERSION,
        codes.UNKNOWN_TYPE,
        codes.WRONG_PARTITION,
        codes.MAX_INDIVIDUAL_COMMIT_REACHED,
    ]
)
_NAMES = (
    "Heartbeat",
    "ClaimingPartition",
    "ReleasingPartition",
    "ClaimingMessages",
    "CommitRanges",
    "HeartbeatBatch",
    "ReleaseGroup",
    "ForgetGroup",
    "Tick",
)


def _transitions() -> set[tuple[str, str]]:
    """The protocol's table of outcomes, as (record, outcome)."""
    found: set[tuple[str, str]] = set()
    for row in codes.TABLE:
        names = _NAMES if row.records == "any" else [name.strip() for name in row.records.split(",")]
        if row.code not in _ELSEWHERE:
            found.update((name, row.code) for name in names)
    return found


#: One state: a CP's snapshot, and the epochs that each instance has had, by partition.
_State = tuple[bytes, tuple[tuple[tuple[str, int], tuple[int, ...]], ...]]


def explore(depth: int, most: int | None = None) -> Explored:
    """Meet every state up to a depth, or so many at most. Raises BrokenError where a rule is broken."""
    explored = Explored()
    begin: _State = (World(0, 1).snapshot(), ())
    seen = {_key(_canonical(World(0, 1), {}))}
    frontier = [begin]
    while frontier and explored.depth < depth:
        explored.depth += 1
        found: list[_State] = []
        for state in frontier:
            for after, world, epochs in _steps(state, explored):
                rows, pause = _canonical(world, epochs)
                key = _key((rows, pause))
                if key not in seen:
                    seen.add(key)
                    found.append(after)
                    explored.all_states += 1 if rows[0] == rows[1] else 2
            if most is not None and len(seen) >= most:
                break
        explored.by_depth.append(len(found))
        explored.states += len(found)
        frontier = found
        if most is not None and explored.states >= most:
            return explored
    explored.is_all = not frontier
    return explored


def _steps(state: _State, explored: Explored) -> Iterator[tuple[_State, World, dict[tuple[str, int], tuple[int, ...]]]]:
    snapshot, held = state
    epochs = dict(held)
    before = World.restore(snapshot, 1)
    for record, waits_ms in _records(before, epochs):
        world = World.restore(snapshot, 1)
        offset = world.next_offset
        outcome = world.apply(offset, max(START, world.log_time + waits_ms), encode(record))
        explored.steps += 1
        _count(record, outcome, explored.transitions)
        _check(before, world, record, outcome, offset)
        known = epochs
        if outcome.accepted and outcome.epoch == offset and hasattr(record, "partition"):
            place = (record.instance_id, record.partition)
            known = {**epochs, place: (*epochs.get(place, ()), offset)[-2:]}
        yield (world.snapshot(), tuple(sorted(known.items()))), world, known


def _count(record: Record, outcome: Outcome, transitions: Counter[tuple[str, str]]) -> None:
    transitions[type(record).__name__, outcome.code] += 1
    for code in outcome.entries or ():
        transitions["batch entry", code] += 1


def _records(world: World, epochs: dict[tuple[str, int], tuple[int, ...]]) -> Iterator[tuple[Record, int]]:
    """What can come next, each with the log time that passes before it."""
    admin = (ADMIN[1], ADMIN[0], GROUP)
    for waits_ms in (HI, 2 * HI + 1):
        yield Tick(*admin), waits_ms
    for client, instance in WORKERS:
        ids = (instance, client, GROUP)
        for partition in PARTITIONS:
            yield ClaimingPartition(*ids, TOPIC, partition, HI), 0
            if instance == "b2" and not epochs.get((instance, partition)):
                yield Heartbeat(*ids, TOPIC, partition, None, None), 0
            for epoch in epochs.get((instance, partition), ()):
                yield from ((record, 0) for record in _of_holder(ids, partition, epoch, world))
        if len(PARTITIONS) == sum(bool(epochs.get((instance, p))) for p in PARTITIONS):
            entries = tuple(BeatEntry(TOPIC, p, epochs[instance, p][-1], 0) for p in PARTITIONS)
            yield HeartbeatBatch(*ids, entries), 0
    yield from ((record, 0) for record in _of_admin(admin, world, epochs))


def _of_holder(ids: tuple[str, str, str], partition: int, epoch: int, world: World) -> Iterator[Record]:
    lease = world.lease(GROUP, TOPIC, partition)
    stable = -1 if lease is None else lease.progress.stable
    yield Heartbeat(*ids, TOPIC, partition, epoch, min(stable + 1, LAST_OFFSET))
    if stable >= 0:
        yield Heartbeat(*ids, TOPIC, partition, epoch, stable - 1)
    yield ReleasingPartition(*ids, TOPIC, partition, epoch, None if stable < 0 else stable - 1)
    yield CommitRanges(*ids, TOPIC, partition, epoch, ((LAST_OFFSET, LAST_OFFSET),))
    yield ClaimingMessages(*ids, TOPIC, partition, epoch, 1)


def _of_admin(
    ids: tuple[str, str, str], world: World, epochs: dict[tuple[str, int], tuple[int, ...]]
) -> Iterator[Record]:
    yield ReleaseGroup(*ids, max(START, world.log_time) + 5 * HI)
    yield ReleaseGroup(*ids, 0)
    yield ReleaseGroup("y1", "y", GROUP, max(START, world.log_time) + 5 * HI)  # another admin
    yield ForgetGroup(*ids)
    yield ForgetGroup("a1", "a", GROUP)
    for partition in PARTITIONS:
        yield ClaimingPartition(*ids, TOPIC, partition, HI)
        for epoch in epochs.get((ids[0], partition), ())[-1:]:
            yield ReleasingPartition(*ids, TOPIC, partition, epoch, 0)
            yield Heartbeat(*ids, TOPIC, partition, epoch, 0)
            yield HeartbeatBatch(*ids, (BeatEntry(TOPIC, partition, epoch, 1),))


# What must hold, written down once more.


def _check(before: World, after: World, record: Record, outcome: Outcome, offset: int) -> None:
    log_time = after.log_time
    if log_time < before.log_time:
        raise BrokenError(f"log time went back (T1): {record}")
    pause = before.pause(GROUP)
    paused_by = pause.client_id if pause is not None and log_time < pause.expires else None
    others = paused_by is not None and record.client_id != paused_by
    may = isinstance(record, ReleasingPartition | CommitRanges | Tick)
    if others and not may and outcome.code != codes.PAUSED:
        raise BrokenError(f"the group is paused by {paused_by} (C10), and {record} was {outcome.code}")
    if not isinstance(record, ForgetGroup) or not outcome.accepted:
        for partition in PARTITIONS:
            was, now = before.lease(GROUP, TOPIC, partition), after.lease(GROUP, TOPIC, partition)
            if was is not None or now is not None:
                _check_lease(was, now, record, outcome, offset, log_time, record.client_id == paused_by)
    elif any(lease.held and log_time - lease.last_beat <= 2 * HI for lease in before.leases()):
        raise BrokenError(f"a group at work was forgotten (C16): {record}")


def _check_lease(
    was: Lease | None, now: Lease | None, record: Record, outcome: Outcome, offset: int, log_time: int, pausing: bool
) -> None:
    if now is None:
        raise BrokenError(f"a lease is gone (C8): {record}")
    held = was is not None and was.held
    is_old = was is not None and log_time - was.last_beat > 2 * HI
    epoch, stable, granted = (-1, -1, -1) if was is None else (was.epoch, was.progress.stable, was.progress.granted)
    if now.epoch != epoch or (now.instance_id != (was.instance_id if was is not None else None) and now.held):
        if now.epoch != offset or now.epoch <= epoch or now.last_beat != log_time:
            raise BrokenError(f"a new holder has no new epoch, or no beat (C3, C9): {record}")
        fresh = was is not None and log_time - was.last_beat < HI
        took_over = (
            isinstance(record, Heartbeat)
            and record.epoch is None
            and fresh
            and record.client_id == (was.client_id if was is not None else None)
        )
        if not took_over and not (isinstance(record, ClaimingPartition) and (not held or is_old)):
            raise BrokenError(f"a lease went to another, and was neither free nor stale (C3, C7): {record}")
        if now.instance_id != record.instance_id:
            raise BrokenError(f"a lease went to somebody who did not ask (C3): {record}")
    is_refused = isinstance(record, ClaimingPartition) and outcome.code == codes.HELD
    if is_refused and getattr(record, "partition", None) == now.partition and (not held or is_old):
        raise BrokenError(f"a free or stale lease was refused (C3): {record}")
    if now.progress.stable < stable and not pausing:
        raise BrokenError(f"progress went back (C5): {record}")
    if now.progress.granted < granted and not pausing:
        raise BrokenError(f"what was granted is not any more (C12): {record}")
    if now.progress.granted > granted:
        ours = _is_holder(was, record)
        if not isinstance(record, ClaimingMessages) or not ours or is_old or now.progress.granted <= stable:
            raise BrokenError(f"messages were granted that must not be (C12): {record}")
    moved = was is None or now.last_beat != was.last_beat
    if moved and not isinstance(record, Heartbeat | HeartbeatBatch | ClaimingPartition):
        raise BrokenError(f"the last beat moved (C6): {record}")
    if isinstance(record, Heartbeat) and record.epoch is not None and record.partition == now.partition:
        ours = _is_holder(was, record)
        if outcome.accepted != (ours and outcome.code != codes.PAUSED):
            raise BrokenError(f"a beat counts from the holder, with its epoch, and from nobody else (C5): {record}")


def _is_holder(lease: Lease | None, record: Record) -> bool:
    """Whether a record comes from the holder, with its epoch."""
    if lease is None or lease.client_id is None:
        return False
    sender = (record.client_id, record.instance_id, getattr(record, "epoch", None))
    return sender == (lease.client_id, lease.instance_id, lease.epoch)


# States that are one.


def _key(state: tuple[list[str], str]) -> bytes:
    """Sixteen bytes that stand for a state."""
    return blake2b(repr(state).encode(), digest_size=16).digest()


def _canonical(world: World, epochs: dict[tuple[str, int], tuple[int, ...]]) -> tuple[list[str], str]:
    """A state without what makes no difference: offsets, beyond their order, and ages beyond staleness."""
    log_time = world.log_time
    leases = {lease.partition: lease for lease in world.leases()}
    rows = []
    for partition in PARTITIONS:
        lease = leases.get(partition)
        known = sorted({x for (_, p), held in epochs.items() if p == partition for x in held})
        held = tuple(
            (instance, tuple(known.index(x) for x in epochs.get((instance, partition), ())))
            for _, instance in (*WORKERS, ADMIN)
        )
        if lease is None:
            rows.append(repr(held))
            continue
        progress = lease.progress
        rows.append(
            repr(
                (
                    lease.instance_id,
                    known.index(lease.epoch) if lease.epoch in known else -1,
                    min(log_time - lease.last_beat, 2 * HI + 1),
                    progress.stable,
                    progress.granted,
                    progress.ranges,
                    held,
                )
            )
        )
    rows.sort()  # the partitions may change places
    pause = world.pause(GROUP)
    left = None if pause is None or pause.expires <= log_time else (pause.client_id, pause.expires - log_time)
    return rows, repr(left)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 where a rule is broken or a transition was not met."""
    parser = argparse.ArgumentParser(prog="python -m kafka_marshal.testing.exhaustive", description=__doc__)
    parser.add_argument("--depth", type=int, default=8, help="records and expiries in a row (8)")
    parser.add_argument("--most", type=int, help="stop at so many states")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        explored = explore(options.depth, options.most)
    except BrokenError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{explored.tell()}, {time.monotonic() - began:.0f} s\n")
    return int(bool(explored.missing()))


if __name__ == "__main__":
    sys.exit(main())
