"""Processor time that a coordinated group costs each replica, with its bound:

    python -m benchmarks.groups [--rounds N] [--json FILE]

Targets: `compute_targets`, for 1,000 members and 10,000 partitions. Each replica computes them within a record, and for
each member that joins: a fleet that starts costs a thousand of them. Members subscribe to all of 10 topics, or
("unequal subscriptions") each to a random half of 100. From nothing: there were no targets before. Times are medians.

Records: the time of `World.apply` for one whole record, at 1,000 members and 10,000 partitions with progress; for the
longest commits, over partitions in a thousand pieces and more; for invalid joins, in nanoseconds per byte. A fleet:
1,000 joins in sequence, and one member that restarts repeatedly.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from statistics import median

from benchmarks.common import Row, report
from rationalizer import Record, Upgrade, World, encode
from rationalizer.groups.assignors import STRATEGIES, Before, Target, compute_targets
from rationalizer.limits import MAX_KEY_HASH, MAX_KEY_PIECES
from rationalizer.wire.records import (
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    GroupHeartbeat,
    JoinGroup,
    LeaveGroup,
    Topics,
)
from rationalizer.wire.wellformed import COMMIT, LET_GO

MEMBERS = 1_000
PARTITIONS = 10_000

#: Slots are offsets: neither small nor consecutive.
SLOTS = [1_000_000 + 17 * n for n in range(MEMBERS + 1)]

Subscribers = Mapping[str, Sequence[int]]


def bounded(name: str, bound_ms: float, rounds: int, work: Callable[[], object]) -> Row:
    """Milliseconds of processor time of this work, with its upper bound."""
    spent = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        spent.append((time.thread_time() - start) * 1000)
    ours = median(spent)
    return Row(name, ours, bound_ms, ours / bound_ms, 1.0, "ms", at_most=True)


def targets(rounds: int) -> list[Row]:
    """Rows of compute_targets."""
    equal = _counts(10)
    rows = []
    for strategy in STRATEGIES:
        rows += _start_and_join(strategy, dict.fromkeys(equal, SLOTS), equal, (20, 2.5), rounds)
    chance = random.Random(75)
    halves = _counts(100)
    subscribers = {topic: [slot for slot in SLOTS if chance.random() < 0.5] for topic in halves}
    return rows + _start_and_join("sticky", subscribers, halves, (100, 100), rounds, ", unequal subscriptions")


def _counts(topics: int) -> dict[str, int]:
    return {f"topic-{n:03}": PARTITIONS // topics for n in range(topics)}


def _start_and_join(
    strategy: str,
    subscribers: Subscribers,
    counts: Mapping[str, int],
    bounds_ms: tuple[float, float],
    rounds: int,
    how: str = "",
) -> list[Row]:
    """From nothing, and with the last slot joining the others."""
    others = {topic: [slot for slot in slots if slot != SLOTS[-1]] for topic, slots in subscribers.items()}

    def rebalance(subscribers: Subscribers, before: Mapping[str, Before]) -> dict[str, list[Target]]:
        return compute_targets(strategy, subscribers, counts, set(), set(), before, lambda topic: {})

    before = {}
    for topic, found in rebalance(others, {}).items():
        slots = [target for target in found if isinstance(target, int)]
        before[topic] = Before(slots, slots.copy())
    return [
        bounded(f"{strategy}{how}: from nothing", bounds_ms[0], rounds, lambda: rebalance(others, {})),
        bounded(f"{strategy}{how}: one joins", bounds_ms[1], rounds, lambda: rebalance(subscribers, before)),
    ]


# -- records, applied ----------------------------------------------------------------------------------------

GROUP = "orders"
#: Log time does not advance here, so no session expires.
NOW_MS = 1_700_000_000_000
SESSION_MS = 30_000
TEN_TOPICS: Topics = tuple((topic, 1_000) for topic in _counts(10))
#: Most restores of a large state, which are slow.
MOST_RESTORES = 7


class Fleet:
    """A world of one CP with one group, and its members' records."""

    def __init__(self, world: World | None = None) -> None:
        self.world = World(0, 1) if world is None else world
        if world is None:
            self.append(Upgrade("1", "admin", GROUP, 2))

    def append(self, record: Record | bytes) -> float:
        """Apply a record; returns its processor time (ms)."""
        value = record if isinstance(record, bytes) else encode(record)
        offset, start = self.world.next_offset, time.thread_time()
        self.world.apply(offset, NOW_MS, value)
        return (time.thread_time() - start) * 1000

    def ids(self, number: int) -> tuple[str, str, str, str]:
        """The ids at the beginning of a member's records."""
        group = self.world.group(GROUP)
        assert group is not None
        member = group.clients[f"worker-{number:04}"]
        return member.instance_id, member.client_id, GROUP, member.member_id

    @property
    def generation(self) -> int:
        """The group's."""
        group = self.world.group(GROUP)
        assert group is not None
        return group.generation

    def commit(self, number: int, entries: Iterable[CommitEntry]) -> CommitOffsets:
        """A commit of a member."""
        return CommitOffsets(*self.ids(number), self.generation, False, tuple(entries))

    def owned(self, number: int, action: int, through: int) -> list[CommitEntry]:
        """An entry for each of a member's partitions."""
        group = self.world.group(GROUP)
        assert group is not None
        slot = group.clients[f"worker-{number:04}"].slot
        return [
            CommitEntry(topic, partition, piece.lo, piece.hi, action, through)
            for topic, pieces in group.pieces.items()
            for partition, piece in pieces.owned_by(slot)
        ]


def join(
    number: int, topics: Topics = TEN_TOPICS, instance: str = "1", seen: int = 0, strategy: str = "sticky"
) -> JoinGroup:
    """A join of this worker, with sharing by key if allowed."""
    client = f"worker-{number:04}"
    return JoinGroup(instance, client, GROUP, "", seen, SESSION_MS, strategy, True, "", topics)


@cache
def grown() -> tuple[bytes, list[float]]:
    """A group of 1,000 members with 10 partitions and some progress each, and the time of each join (ms)."""
    fleet = Fleet()
    took = [fleet.append(join(number)) for number in range(MEMBERS)]
    fleet.append(fleet.commit(0, fleet.owned(0, LET_GO, 5)))
    for number in range(MEMBERS):
        fleet.append(fleet.commit(number, fleet.owned(number, COMMIT, 6)))
    assert set(fleet.world.accepted) == {"OK"}
    assert not fleet.world.rejected
    return fleet.world.snapshot(), took


@cache
def cut() -> bytes:
    """One partition in nearly 1,000 pieces, which the first of 1,000 members owns and must release."""
    fleet = Fleet()
    fleet.append(ConfigureGroup("1", "admin", GROUP, (("accept_range_fetch", ("t",)),)))
    for number in range(MEMBERS):
        fleet.append(join(number, (("t", 1),)))
    return fleet.world.snapshot()


@cache
def in_key_pieces() -> bytes:
    """One partition with the maximum of done_through pieces."""
    fleet = Fleet()
    fleet.append(join(0, (("t", 1),)))
    fleet.append(fleet.commit(0, [_keys(place, place, 10 + place) for place in range(MAX_KEY_PIECES - 1)]))
    return fleet.world.snapshot()


def _keys(first: int, last: int, through: int, action: int = COMMIT) -> CommitEntry:
    step = MAX_KEY_HASH // MAX_KEY_PIECES
    return CommitEntry("t", 0, first * step, min(MAX_KEY_HASH, (last + 1) * step - 1), action, through)


def applied(name: str, bound: float, rounds: int, state: bytes, write: Callable[[Fleet], Record]) -> Row:
    """Milliseconds that one record takes on this state."""
    spent = []
    for _ in range(min(rounds, MOST_RESTORES)):
        fleet = Fleet(World.restore(state, 1))
        spent.append(fleet.append(encode(write(fleet))))
    ours = median(spent)
    return Row(name, ours, bound, ours / bound, 1.0, "ms", at_most=True)


def records(rounds: int) -> list[Row]:
    """Rows of single records, and of a fleet."""
    state, joins = grown()
    ours = max(joins)
    return [
        Row("1,000 members join: the slowest join", ours, 60.0, ours / 60.0, 1.0, "ms", at_most=True),
        Row("1,000 members join: each", sum(joins) / MEMBERS, 5.0, sum(joins) / MEMBERS / 5.0, 1.0, "ms", at_most=True),
        applied("one leaves 1,000", 5.0, rounds, state, lambda fleet: LeaveGroup(*fleet.ids(7), 0)),
        applied("one joins 999", 5.0, rounds, _without_the_last(state), lambda fleet: join(MEMBERS - 1)),
        applied("one restarts", 5.0, rounds, state, lambda fleet: join(7, TEN_TOPICS, "2", fleet.world.next_offset)),
        *_many(rounds, state),
        *_commits(rounds),
        *_hostile_joins(rounds, state),
        _memory(state),
    ]


def _without_the_last(state: bytes) -> bytes:
    fleet = Fleet(World.restore(state, 1))
    fleet.append(LeaveGroup(*fleet.ids(MEMBERS - 1), 0))
    return fleet.world.snapshot()


def _many(rounds: int, state: bytes) -> Iterator[Row]:
    """Microseconds per record: heartbeats and commits of all members, one member's restarts for a minute."""
    fleet = Fleet(World.restore(state, 1))
    beats = [encode(GroupHeartbeat(*fleet.ids(number), fleet.generation)) for number in range(MEMBERS)]
    commits = [encode(fleet.commit(number, fleet.owned(number, COMMIT, 9))) for number in range(MEMBERS)]
    for name, values, bound in (("heartbeats", beats, 20.0), ("commits of 10 partitions", commits, 100.0)):
        spent = []
        for _ in range(rounds):
            at, start = fleet.world.next_offset, time.thread_time()
            fleet.world.apply_many([(at + place, NOW_MS, value) for place, value in enumerate(values)])
            spent.append((time.thread_time() - start) / len(values) * 1e6)
        ours = median(spent)
        yield Row(f"{name} of 1,000 members: each", ours, bound, ours / bound, 1.0, "us", at_most=True)
    spent = [
        fleet.append(join(7, TEN_TOPICS, f"run {number}", fleet.world.next_offset)) for number in range(20 * rounds)
    ]
    share = sum(spent) / len(spent) / 50 * 100  # one every 50 ms
    yield Row("one restarts 20 times a second: of a processor", share, 10.0, share / 10.0, 1.0, "%", at_most=True)


def over_keys() -> dict[str, list[CommitEntry]]:
    """Commits of 10,000 entries over `in_key_pieces`, by their peculiarity."""
    chance, many = random.Random(75), MAX_KEY_PIECES
    places = [chance.randrange(many) for _ in range(10_000)]
    return {
        "one piece each": [_keys(place % many, place % many, 5_000 + place) for place in range(10_000)],
        "one piece each, at random": [_keys(place, place, chance.randrange(10**6)) for place in places],
        "three pieces each, at random": [_keys(place, place + 2, chance.randrange(10**6)) for place in places],
        "all that are below": [_keys(0, many - 2, 5) for _ in range(10_000)],
        "as far as the last": [_keys(0, place, chance.randrange(10**6)) for place in places],
    }


def over_cut(state: bytes) -> dict[str, list[CommitEntry]]:
    """The same over `cut`."""
    group = World.restore(state, 1).group(GROUP)
    assert group is not None
    pieces = group.pieces["t"][0]
    each = [CommitEntry("t", 0, piece.lo, piece.hi, LET_GO, 5) for piece in pieces]
    return {
        "lets all go": [CommitEntry("t", 0, 0, MAX_KEY_HASH, LET_GO, 5)] * 10_000,
        "lets each go": each * (10_000 // len(pieces)),
        "spans all": [CommitEntry("t", 0, 1, MAX_KEY_HASH, COMMIT, place) for place in range(10_000)],
    }


def _commits(rounds: int) -> Iterator[Row]:
    """10,000 entries each."""
    for name, entries in over_keys().items():
        write = _commit_of(entries)
        yield applied(f"commit over 2,000 pieces of done_through: {name}", 100.0, rounds, in_key_pieces(), write)
    for name, entries in over_cut(cut()).items():
        yield applied(f"commit over a partition in many pieces: {name}", 100.0, rounds, cut(), _commit_of(entries))


def _commit_of(entries: Sequence[CommitEntry]) -> Callable[[Fleet], Record]:
    return lambda fleet: fleet.commit(0, entries)


def hostile_joins() -> dict[str, JoinGroup]:
    """Rejected joins, by reason."""
    new: Topics = tuple((f"other-{number:05}", 0) for number in range(9_999))
    return {
        "another strategy": join(MEMBERS, new, strategy="range"),
        "no strategy": join(MEMBERS, new, strategy="dice"),
        "too many partitions, of a member": join(7, (*new, ("huge", 100_000))),
        "too many partitions, short": join(7, (("huge", 100_000),)),
    }


def _hostile_joins(rounds: int, state: bytes) -> Iterator[Row]:
    """Nanoseconds per byte of rejected joins, beyond the millisecond allowed for any record."""
    for name, record in hostile_joins().items():
        size = len(encode(record))
        row = applied("", 1.0, rounds, state, lambda _, record=record: record)  # type: ignore[misc]
        ours = row.ours * 1e6 / (size + 1e6 / 170.0)
        yield Row(f"a join that is rejected: {name}", ours, 170.0, ours / 170.0, 1.0, "ns/byte", at_most=True)


def _memory(state: bytes) -> Row:
    """Megabytes of the whole state in memory."""
    gc.collect()
    tracemalloc.start()
    world = World.restore(state, 1)
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    assert world.group(GROUP) is not None
    return Row("1,000 members, 10,000 partitions with progress: memory", taken, 20.0, taken / 20.0, 1.0, "MB", True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    rows = targets(options.rounds) + records(options.rounds)
    report("groups", rows, options.json, rounds=options.rounds, members=MEMBERS, partitions=PARTITIONS)


if __name__ == "__main__":
    main()
