"""Small scope: every order of records and expiries of three clients and two partitions, to some depth.

``python -m tests.campaigns.small_scope --depth 8``. Three workers (one of which has been restarted, and its
earlier instance may still write) and an admin append any record that they could, with any epoch they ever had, in any
order, and log time moves by one HI or beyond staleness between any two of them: that is what delay, loss and
repetition can produce. Every resulting state is visited once, and every record tried on it; states that differ only in
the order of partitions, in the size of epochs, or in ages beyond staleness are one.

The explored code is the rationalizer's. Each state is restored from its snapshot before the next record, so that S1 and
S3 are tested, too, and each Heartbeat is also replayed by the fast path. The invariants of each step are written here
independently of that code. ``--engine`` explores the members' logic (:mod:`tests.campaigns.small_scope.engine`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path

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
    Upgrade,
    World,
    codes,
    encode,
)
from rationalizer.state import LEASE
from rationalizer.wire.records import KINDS
from tests.campaigns.small_scope.search import BrokenError, Explored, Part, State, search, transitions
from tests.figures import keep_figures

__all__ = ["BrokenError", "Explored", "explore", "main"]

GROUP, TOPIC = "g", "t"
HI = 100
PARTITIONS = (0, 1)
#: (client, instance): three workers, the second of which has a predecessor, and an admin.
WORKERS = (("a", "a1"), ("b", "b1"), ("b", "b2"), ("c", "c1"))
ADMIN = ("z", "z1")
#: Progress is followed up to here; beyond it nothing new can happen.
LAST_OFFSET = 2
START = 1_000_000
#: Records in a row by default.
DEPTH = 8


#: By (instance, partition), the last two epochs that it had.
_Epochs = dict[tuple[str, int], tuple[int, ...]]


#: Transitions out of reach of three clients with well-formed records of level 1.
_ELSEWHERE = frozenset(
    [
        codes.MALFORMED,
        codes.UNSUPPORTED_VERSION,
        codes.UNKNOWN_TYPE,
        codes.WRONG_PARTITION,
        codes.WRONG_KIND,
        codes.MAX_INDIVIDUAL_COMMIT_REACHED,
        codes.WRONG_MODE,
    ]
)


class _Leases:
    """Claims of three clients and two partitions."""

    wanted = transitions(
        [*(kind.name for kind in KINDS.values() if kind.level == 1 and kind.type != Upgrade.TYPE), "batch entry"],
        _ELSEWHERE,
    )

    def first(self) -> tuple[bytes, State]:
        """An empty CP."""
        return _key(*_canonical(World(0, 1), _numbered({}))), (World(0, 1).snapshot(), (), b"")

    def steps(self, state: State, part: Part) -> Iterator[tuple[bytes, int, State]]:
        """Every record that may come."""
        return _steps(state, part)


def explore(depth: int, most: int | None = None, jobs: int = 1) -> Explored:
    """Visit every state up to a depth, or at most a number of them. Raises BrokenError where a rule is broken."""
    return search(_Leases(), depth, most, jobs)


def _steps(state: State, part: Part) -> Iterator[tuple[bytes, int, State]]:
    snapshot, held, path = state
    epochs = dict(held)
    before = World.restore(snapshot, 1)
    numbered = _numbered(epochs)
    offset = before.next_offset
    for choice, (record, waits_ms) in enumerate(_records(before, epochs)):
        entry = (offset, max(START, before.log_time + waits_ms), encode(record))
        world = World.restore(snapshot, 1)
        try:
            outcome = world.apply(*entry)
            _check(before, world, record, outcome, offset)
            after = world.snapshot()
            if isinstance(record, Heartbeat):
                _check_short_cut(snapshot, entry, after, record)
        except Exception as error:
            error.add_note(_trail(path + bytes([choice])))
            raise
        part.steps += 1
        _count(record, outcome, part.transitions)
        known, known_numbered, known_held = epochs, numbered, held
        if outcome.accepted and outcome.epoch == offset and hasattr(record, "partition"):
            place = (record.instance_id, record.partition)
            known = {**epochs, place: (*epochs.get(place, ()), offset)[-2:]}
            known_numbered, known_held = _numbered(known), tuple(sorted(known.items()))
        rows, pause = _canonical(world, known_numbered)
        yield _key(rows, pause), 1 if rows[0] == rows[1] else 2, (after, known_held, path + bytes([choice]))


def _trail(path: bytes) -> str:
    """The records that these choices are, with their outcomes, one a line."""
    world = World(0, 1)
    epochs: _Epochs = {}
    lines = []
    for choice in path:
        record, waits_ms = next(islice(_records(world, epochs), choice, None))
        offset = world.next_offset
        outcome = world.apply(offset, max(START, world.log_time + waits_ms), encode(record))
        lines.append(f"  offset {offset}, {outcome.log_time - START:>4} ms: {record}: {outcome.code}")
        if outcome.accepted and outcome.epoch == offset and hasattr(record, "partition"):
            place = (record.instance_id, record.partition)
            epochs = {**epochs, place: (*epochs.get(place, ()), offset)[-2:]}
    return "\n".join(lines)


def _count(record: Record, outcome: Outcome, transitions: Counter[tuple[str, str]]) -> None:
    transitions[type(record).__name__, outcome.code] += 1
    for code in outcome.entries or ():
        transitions["batch entry", code] += 1


def _records(world: World, epochs: _Epochs) -> Iterator[tuple[Record, int]]:
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


def _of_admin(ids: tuple[str, str, str], world: World, epochs: _Epochs) -> Iterator[Record]:
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


# Invariants, written independently.


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


def _check_short_cut(snapshot: bytes, entry: tuple[int, int, bytes], after: bytes, record: Record) -> None:
    world = World.restore(snapshot, 1)
    world.apply_many([entry])
    if world.snapshot() != after:
        raise BrokenError(f"the replay's short cut leads elsewhere (S1): {record}")


def _is_holder(lease: Lease | None, record: Record) -> bool:
    """Whether a record comes from the holder, with its epoch."""
    if lease is None or lease.client_id is None:
        return False
    sender = (record.client_id, record.instance_id, getattr(record, "epoch", None))
    return sender == (lease.client_id, lease.instance_id, lease.epoch)


# States that are one.


def _key(rows: list[str], pause: str) -> bytes:
    """Sixteen bytes that identify a state."""
    return blake2b(f"{rows} {pause}".encode(), digest_size=16).digest()


#: Of each partition: its epochs' places among all that are known, and who had which, by those places.
_Numbered = list[tuple[dict[int, int], list[list[int]]]]


def _numbered(epochs: _Epochs) -> _Numbered:
    found: _Numbered = []
    for partition in PARTITIONS:
        held = [epochs.get((instance, partition), ()) for _, instance in (*WORKERS, ADMIN)]
        places = {epoch: place for place, epoch in enumerate(sorted({epoch for of in held for epoch in of}))}
        found.append((places, [[places[epoch] for epoch in of] for of in held]))
    return found


def _canonical(world: World, numbered: _Numbered) -> tuple[list[str], str]:
    """A state without what makes no difference: offsets, beyond their order, and ages beyond staleness."""
    log_time = world.log_time
    rows = []
    for partition, (places, held) in zip(PARTITIONS, numbered, strict=True):
        lease = world.lease(GROUP, TOPIC, partition)
        if lease is None:
            rows.append(f"{held}")
            continue
        progress = lease.progress
        rows.append(
            f"{lease.instance_id} {places.get(lease.epoch, -1)} {min(log_time - lease.last_beat, 2 * HI + 1)} "
            f"{progress.stable} {progress.granted} {progress.ranges} {held} {list(LEASE.added(lease))}"
        )
    rows.sort()  # the partitions may change places
    pause = world.pause(GROUP)
    return rows, "" if pause is None else f"{pause.client_id} {pause.expires - log_time}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a rule is broken or a transition was not reached."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.small_scope", description=__doc__)
    parser.add_argument("--depth", type=int, help="records and expiries in a row (8); with --engine: moves (6 to 8)")
    parser.add_argument("--most", type=int, help="stop at so many states")
    parser.add_argument("--engine", action="store_true", help="explore real members, not the rationalizer alone")
    parser.add_argument("--groups", action="store_true", help="explore coordinated groups, not claims")
    parser.add_argument(
        "--checkpoints", action="store_true", help="explore groups that take checkpoints, from each beginning"
    )
    parser.add_argument(
        "--sharing", action="store_true", help="explore shares and open messages beside the oracle, from each beginning"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side (all processors)")
    parser.add_argument("--json", type=Path, help="write the figures to this file, each search to its part")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        if options.engine:
            from tests.campaigns.small_scope.engine.report import tell

            return tell(options.depth, options.most, options.jobs, options.json)
        if options.checkpoints:
            from tests.campaigns.small_scope.checkpoints import tell_all

            sys.stdout.write(tell_all(options.depth, options.most, options.jobs))
            return 0
        if options.sharing:
            from tests.campaigns.small_scope.sharing import tell_sharing

            told, missing = tell_sharing(options.depth, options.most, options.jobs)
            sys.stdout.write(told + "".join(f"not met: {name} {code}\n" for name, code in missing))
            return int(bool(missing))
        if options.groups:
            from tests.campaigns.small_scope.groups import GROUP_DEPTH, explore_groups

            depth = GROUP_DEPTH if options.depth is None else options.depth
            explored = explore_groups(depth, options.most, options.jobs)
        else:
            explored = explore(DEPTH if options.depth is None else options.depth, options.most, options.jobs)
    except BrokenError as error:
        sys.stdout.write("\n".join((str(error), *getattr(error, "__notes__", ()))) + "\n")
        return 1
    seconds = time.monotonic() - began
    sys.stdout.write(f"{explored.tell()}, {seconds:.0f} s\n")
    if options.json is not None:
        figures = {**explored.figures(), "processes": options.jobs, "seconds": round(seconds, 1)}
        keep_figures(options.json, "groups" if options.groups else "rationalizer", figures)
    return int(bool(explored.missing()))
