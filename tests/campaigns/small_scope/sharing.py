"""Small scope of shares and open messages: every order of a few records, in the product and in the oracle (chapter 7b).

A partition of a claimed group, or of a coordinated one, from several beginnings, with limits that a few records reach:
four holes, seven pieces. Two clients, one of which has been restarted, and an operator write what takes, opens, parks
and settles, as of now and as of before what they mean; shares and holders come, go and fall silent; an admin pauses,
repositions, forgets. After each record the product's outcome, state and digest are the oracle's, and each state is
restored from its snapshot before the next record.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from hashlib import blake2b

import pytest

from rationalizer import (
    BeginCheckpoint,
    ClaimingMessages,
    ClaimingPartition,
    ClaimingShare,
    CommitEntry,
    CommitOffsets,
    CommitRanges,
    ConfigureGroup,
    ForgetGroup,
    Heartbeat,
    JoinGroup,
    Lease,
    LeaveGroup,
    Outcome,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SettleOffsets,
    SettlingMessages,
    Tick,
    Upgrade,
    World,
    codes,
    encode,
)
from rationalizer.groups.group import Group, Member
from rationalizer.holes import NO_KEY, Hole
from rationalizer.leases.shares import Share
from rationalizer.levels import SHARING_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.records import Done, Opened, Parked, Take
from rationalizer.wire.wellformed import COMMIT, LET_GO, START
from tests.campaigns.small_scope.groups import GROUP, HALF, START_MS, TOPIC, GroupScope
from tests.campaigns.small_scope.search import BrokenError, Explored, Part, State, search, transitions
from tests.rationalizer.group_sides import same_bytes
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.oracle.compare import same_outcome
from tests.rationalizer.small_limits import small_limits

#: Records in a row by default.
SHARING_DEPTH = 5
HI = SESSION = 100
A, B, B2, ADMIN = ("a1", "a", GROUP), ("b1", "b", GROUP), ("b2", "b", GROUP), ("z1", "z", GROUP)
PLACE = (TOPIC, 0)
#: Offsets of messages are up to here. Keys: one of each half.
LAST = 5
KEYS = (0, MAX_KEY_HASH)
HALVES = ((0, HALF), (HALF + 1, MAX_KEY_HASH))
#: A replica that has seen everything; above a record's own offset it counts as that (E2).
NOW = 2**62
MOST_PIECES = 7

_ELSEWHERE = frozenset(
    [codes.MALFORMED, codes.UNSUPPORTED_VERSION, codes.UNKNOWN_TYPE, codes.WRONG_PARTITION, codes.WRONG_KIND]
)
_CLAIMED = ("ClaimingShare", "SettlingMessages", "entry of SettlingMessages")
_COORDINATED = ("SettleOffsets", "entry of SettleOffsets")


class Sharing(GroupScope):
    """One beginning, and what may come after it."""

    def __init__(self, begin: tuple[Record, ...], names: tuple[str, ...]) -> None:
        self.begin = begin
        self.wanted = transitions(names, _ELSEWHERE)

    def first(self) -> tuple[bytes, State]:
        """Where its records lead."""
        world, oracle = World(0, 1), OracleWorld(0, 1)
        for written in (Upgrade(*ADMIN, SHARING_LEVEL), *self.begin):
            record, group = written, world.group(GROUP)
            if group is not None and isinstance(written, CommitOffsets | SettleOffsets):
                member = group.clients[written.client_id]
                record = replace(written, member_id=member.member_id, generation=group.generation)
            entry = (world.next_offset, START_MS, encode(record))
            outcome = world.apply(*entry)
            same_outcome(outcome, oracle.apply(*entry))
            assert outcome.accepted, f"{record}: {outcome}"
        return key_of(world), (world.snapshot(), _forked(oracle), b"")

    def records(self, world: World) -> Iterator[tuple[Record, int]]:
        """What can come next, each with the log time that passes before it."""
        for waits_ms in (HI, 2 * HI + 1):
            yield Tick(*ADMIN), waits_ms
        group = world.group(GROUP)
        some = _of_leases(world) if group is None else _of_groups(world, group)
        yield from ((record, 0) for record in some)

    def steps(self, state: State, part: Part) -> Iterator[tuple[bytes, int, State]]:
        """Every record that may come, judged twice."""
        snapshot, oracle, path = state
        before, world = World.restore(snapshot, 1), World.restore(snapshot, 1)
        for choice, (record, waits_ms) in enumerate(self.records(before)):
            entry = (world.next_offset, before.log_time + waits_ms, encode(record))
            wanted = _forked(oracle)
            try:
                outcome = world.apply(*entry)
                _compare(outcome, world, wanted, entry)
            except AssertionError as error:
                broken = BrokenError(f"product and oracle differ: {record}: {error}")
                broken.add_note(self._trail(path + bytes([choice])))
                raise broken from error
            part.steps += 1
            part.transitions[type(record).__name__, outcome.code] += 1
            for code in outcome.entries or ():
                part.transitions[f"entry of {type(record).__name__}", code] += 1
            if outcome.accepted:  # else it is the same state
                yield key_of(world), 1, (world.snapshot(), wanted, path + bytes([choice]))
                world = World.restore(snapshot, 1)


def _compare(outcome: Outcome, world: World, wanted: OracleWorld, entry: tuple[int, int, bytes]) -> None:
    same_outcome(outcome, wanted.apply(*entry))
    same_bytes(world, wanted)


def _forked(oracle: OracleWorld) -> OracleWorld:
    """Another world in the same state, which says no more of how it got there."""
    fork = copy(oracle)
    fork.stamps, fork.offsets, fork.outcomes = [oracle.log_time], [oracle.next_offset - 1], []
    fork.facts = {key: list(facts) for key, facts in oracle.facts.items()}
    fork.shared, fork.groups, fork.pause_records = dict(oracle.shared), dict(oracle.groups), list(oracle.pause_records)
    return fork


# What may come, of a claimed group.


def _of_leases(world: World) -> Iterator[Record]:
    lease = world.lease(GROUP, *PLACE)
    for ids in (A, B):
        yield ClaimingPartition(*ids, *PLACE, HI)
        yield ClaimingShare(*ids, *PLACE, HI, start=None if lease is not None or ids == B else 2)
    yield ClaimingShare(*B2, *PLACE, HI)
    for ids, keys in ((A, HALVES[0]), (B, HALVES[1]), (B, (0, MAX_KEY_HASH)), (B2, (HALF // 2 + 1, HALF))):
        yield ClaimingShare(*ids, *PLACE, HI, *keys)
    yield Heartbeat(*B2, *PLACE, None, None)
    yield Heartbeat(*A, *PLACE, 0, None)
    yield SettlingMessages(*A, *PLACE, 0, NOW, take=(1, LAST, False))
    holes = [] if lease is None else lease.progress.open
    if lease is not None:
        for ids, epoch, share in _owners(lease):
            yield from _of_owner(ids, epoch, share, lease)
        if lease.client_id == ADMIN[1]:  # with the pause, it sets positions
            yield Heartbeat(*ADMIN, *PLACE, lease.epoch, 1)
            yield Heartbeat(*ADMIN, *PLACE, lease.epoch, LAST)
            yield ReleasingPartition(*ADMIN, *PLACE, lease.epoch, -1)
    for seen, done, opened, parked in _settles(holes, makes=(KEYS[0], None)):
        if done or opened or parked:
            yield SettlingMessages(*ADMIN, *PLACE, None, seen, done, opened, parked)
    yield from _of_admin(world)
    yield ClaimingPartition(*ADMIN, *PLACE, HI)


def _owners(lease: Lease) -> Iterator[tuple[tuple[str, str, str], int, Share | None]]:
    """Senders with their epochs, and their shares."""
    if lease.client_id is not None and lease.instance_id is not None and lease.client_id != ADMIN[1]:
        yield (lease.instance_id, lease.client_id, GROUP), lease.epoch, None
    for share in lease.shares or ():
        yield (share.instance_id, share.client_id, GROUP), share.epoch, share


def _of_owner(ids: tuple[str, str, str], epoch: int, share: Share | None, lease: Lease) -> Iterator[Record]:
    stable, holes = lease.progress.stable, lease.progress.open
    yield Heartbeat(*ids, *PLACE, epoch, None)
    yield Heartbeat(*ids, *PLACE, epoch, min(stable + 1, LAST))
    yield ReleasingPartition(*ids, *PLACE, epoch, None)
    yield CommitRanges(*ids, *PLACE, epoch, ((4, 4),))
    yield ClaimingMessages(*ids, *PLACE, epoch, 3)
    by_batches = share is not None and share.by_batches
    mine = [hole for hole in holes if hole.owner == epoch] if by_batches else holes
    for seen, done, opened, parked in _settles(mine, makes=(None,) if by_batches else (*KEYS, None)):
        yield SettlingMessages(*ids, *PLACE, epoch, seen, done, opened, parked)
    if by_batches:
        newest = max((hole.since for hole in mine), default=0)
        takes: list[tuple[int, Done, Take]] = [
            (NOW, (), (2, LAST, False)),
            (NOW, (), (1, LAST, True)),
            (newest, (), (2, LAST, False)),
            (NOW, tuple((hole.first, hole.last) for hole in mine), (9, LAST, False)),
        ]
        for seen, done, take in takes:
            yield SettlingMessages(*ids, *PLACE, epoch, seen, done, take=take)
    else:
        yield SettlingMessages(*ids, *PLACE, epoch, NOW, take=(1, LAST, False))


def _settles(holes: list[Hole], makes: tuple[int | None, ...]) -> Iterator[tuple[int, Done, Opened, Parked]]:
    """(seen, done, open, parked): of each hole, as it is now and as it was before; of all; of what has no hole."""
    for hole in holes:
        key = None if hole.key_hash == NO_KEY else hole.key_hash
        whole = ((hole.first, hole.last),)
        yield NOW, whole, (), ()
        yield hole.since, whole, (), ()
        yield NOW, (), ((hole.first, hole.last, key if hole.first == hole.last else None, 0),), ()
        yield NOW, (), ((hole.first, hole.first, key, min(hole.attempts + 1, 3)),), ()
        yield NOW, (), (), ((hole.last, KEYS[1] if key is None else key, 2, "R"),)
        if hole.first < hole.last:
            yield NOW, ((hole.first, hole.first),), (), ()
    yield NOW, ((0, LAST),), (), ()
    yield NOW, ((0, 0),), (), ()
    yield NOW, (), (), ((3, KEYS[0], 1, "R"),)
    for key in makes:
        yield NOW, (), ((LAST, LAST, key, 1),), ()
    if None in makes:
        yield NOW, (), ((1, 2, None, 1), (LAST, LAST, KEYS[1], 2)), ()


def _of_admin(world: World) -> Iterator[Record]:
    yield ReleaseGroup(*ADMIN, world.log_time + 5 * HI)
    yield ReleaseGroup(*ADMIN, 0)
    yield ForgetGroup(*ADMIN)


# Of a coordinated group.


def _of_groups(world: World, group: Group) -> Iterator[Record]:
    holes = [hole for _, _, kept in group.all_progress() for hole in kept.progress.open]
    yield BeginCheckpoint(*ADMIN, 0, SESSION, 1, False)
    if group.checkpoints is not None:
        yield SettleOffsets(*ADMIN, "", 0, NOW, *PLACE, ((0, LAST),))
        yield SettleOffsets(*A, "g-gone", 0, NOW, *PLACE, ((0, LAST),))
        return
    for ids in (A, B):
        member = group.clients.get(ids[1])
        yield JoinGroup(*ids, "", world.next_offset, SESSION, "sticky", True, "", ((TOPIC, 1),))
        if member is not None:
            yield from _of_member((*ids, member.member_id), group, member, holes)
    yield SettleOffsets(*A, "g-gone", 0, NOW, *PLACE, ((0, 1),))
    for seen, done, opened, parked in _settles(holes, makes=(KEYS[0], None)):
        yield SettleOffsets(*ADMIN, "", 0, seen, *PLACE, done, opened, parked)
    yield from _of_admin(world)
    for through in (0, LAST):
        yield CommitOffsets(*ADMIN, "", 0, False, (CommitEntry(*PLACE, through=through),))
    yield ConfigureGroup(*ADMIN, (("accept_individual_commit", not group.settings.accept_individual_commit),))


def _of_member(ids: tuple[str, str, str, str], group: Group, member: Member, holes: list[Hole]) -> Iterator[Record]:
    generation = group.generation
    yield LeaveGroup(*ids, generation)
    topic = group.pieces.get(TOPIC)
    pieces = [] if topic is None else [piece for piece in topic[0] if piece.owner == member.slot]
    for piece in pieces[:1]:
        for action in (COMMIT, LET_GO):
            yield CommitOffsets(*ids, generation, False, (CommitEntry(*PLACE, piece.lo, piece.hi, action, 1),))
        yield SettleOffsets(*ids, max(0, piece.since - 1), NOW, *PLACE, ((0, LAST),), ((4, 4, piece.lo, 1),))
    yield SettleOffsets(*ids, generation + 1, NOW, *PLACE, ((0, 0),))
    yield SettleOffsets(*ids, generation, NOW, *PLACE)
    for seen, done, opened, parked in _settles(holes, makes=(*KEYS, None)):
        yield SettleOffsets(*ids, generation, seen, *PLACE, done, opened, parked)


# Where it begins.


def _settled(*open_: tuple[int, int, int | None, int], parked: Parked = ()) -> SettlingMessages:
    """By a holder with epoch 1."""
    return SettlingMessages(*A, *PLACE, 1, NOW, (), open_, parked)


_WHOLE = (ClaimingPartition(*A, *PLACE, HI), Heartbeat(*A, *PLACE, 1, 1))
_RELEASE = ReleasingPartition(*A, *PLACE, 1, None)
_GROUP = (
    ConfigureGroup(*ADMIN, (("accept_range_fetch", (TOPIC,)),)),
    JoinGroup(*A, "", 0, SESSION, "sticky", True, "", ((TOPIC, 1),)),
    CommitOffsets(*A, "", 0, False, (CommitEntry(*PLACE, action=START, through=0),)),
)
#: By name: the records, and which types are of interest.
BEGINNINGS: dict[str, Sharing] = {
    "nothing": Sharing((), _CLAIMED),
    "whole, with tries": Sharing((*_WHOLE, _settled((3, 3, KEYS[0], 1), (4, 4, KEYS[1], 0))), _CLAIMED),
    "whole, at the limit": Sharing(
        (*_WHOLE, _settled((2, 2, 0, 1), (3, 3, 9, 0), parked=((5, 0, 1, "R"), (7, MAX_KEY_HASH, 1, "R")))), _CLAIMED
    ),
    "by batches": Sharing(
        (
            *(ClaimingShare(*A, *PLACE, HI, start=0), ClaimingShare(*B, *PLACE, HI)),
            SettlingMessages(*A, *PLACE, 1, NOW, take=(2, LAST, False)),
            SettlingMessages(*B, *PLACE, 2, NOW, take=(2, LAST, False)),
        ),
        _CLAIMED,
    ),
    "by batches, given back": Sharing(
        (*_WHOLE, _settled((2, 4, None, 1), (5, 5, None, 2)), _RELEASE, ClaimingShare(*B, *PLACE, HI)), _CLAIMED
    ),
    "by batches, at the limit": Sharing(
        (
            *(*_WHOLE, _settled((2, 3, None, 0), (4, 4, 0, 2), (6, 7, None, 1), parked=((9, 0, 1, "R"),)), _RELEASE),
            *(ClaimingShare(*A, *PLACE, HI), ClaimingShare(*B, *PLACE, HI)),
        ),
        _CLAIMED,
    ),
    "by keys": Sharing(
        (
            *(ClaimingShare(*A, *PLACE, HI, *HALVES[0]), ClaimingShare(*B, *PLACE, HI, *HALVES[1])),
            *(Heartbeat(*A, *PLACE, 1, 3), Heartbeat(*B, *PLACE, 2, 1)),
            SettlingMessages(*A, *PLACE, 1, NOW, open=((4, 4, KEYS[0], 1),)),
        ),
        _CLAIMED,
    ),
    "by keys, at the limit": Sharing(
        (
            *(ClaimingShare(*A, *PLACE, HI, 0, HALF // 2), ClaimingShare(*B, *PLACE, HI, *HALVES[1])),
            *(Heartbeat(*A, *PLACE, 1, 3), Heartbeat(*B, *PLACE, 2, 1)),
        ),
        _CLAIMED,
    ),
    "a group": Sharing(_GROUP, _COORDINATED),
    "a group of two": Sharing(
        (
            *_GROUP,
            SettleOffsets(*A, "", 0, NOW, *PLACE, (), ((1, 1, KEYS[0], 1), (2, 2, KEYS[1], 0))),
            JoinGroup(*B, "", 9, SESSION, "sticky", True, "", ((TOPIC, 1),)),
        ),
        _COORDINATED,
    ),
    "a group at the limit": Sharing(
        (
            *_GROUP,
            SettleOffsets(
                *(*A, "", 0, NOW, *PLACE, (), ((1, 1, KEYS[0], 1), (2, 2, KEYS[1], 0))),
                ((3, KEYS[1], 1, "R"), (4, KEYS[0], 1, "R")),
            ),
        ),
        _COORDINATED,
    ),
}


def explore_sharing(name: str, depth: int = SHARING_DEPTH, most: int | None = None, jobs: int = 1) -> Explored:
    """Visit every state up to a depth, or at most a number of them. Raises BrokenError where a rule is broken."""
    with pytest.MonkeyPatch.context() as patch:
        small_limits(patch, MAX_KEY_PIECES=MOST_PIECES)
        return search(BEGINNINGS[name], depth, most, jobs)


def tell_sharing(depth: int | None, most: int | None, jobs: int) -> tuple[str, list[tuple[str, str]]]:
    """Search from each beginning: for people, and what none has met. Raises BrokenError."""
    lines, missing = [], set[tuple[str, str]]()
    met: set[tuple[str, str]] = set()
    for name, scope in BEGINNINGS.items():
        found = explore_sharing(name, depth or SHARING_DEPTH, most, jobs)
        met |= set(found.transitions)
        missing |= scope.wanted
        lines.append(f"{name:26} depth {found.depth}: {found.states:>9,} states, {found.steps:>10,} records")
    return "\n".join(lines) + "\n", sorted(missing - met)


# States that are one.


def key_of(world: World) -> bytes:
    """A state without what makes no difference: offsets of records, beyond their order, and ages beyond staleness."""
    pause = world.pause(GROUP)
    told: list[object] = [None if pause is None else (pause.client_id, pause.expires - world.log_time)]
    lease, group = world.lease(GROUP, *PLACE), world.group(GROUP)
    if lease is not None:
        told += _lease_told(lease, world.log_time)
    if group is not None:
        told += _group_told(group, world)
    return blake2b(repr(told).encode(), digest_size=16).digest()


def _lease_told(lease: Lease, log_time: int) -> list[object]:
    shares, holes, progress = list(lease.shares or ()), lease.progress.open, lease.progress
    offsets = {-1, lease.epoch, *(share.epoch for share in shares), *(hole.since for hole in holes)}
    rank = {each: place for place, each in enumerate(sorted(offsets))}
    age = min(log_time - lease.last_beat, 2 * HI + 1) if lease.held else None
    told: list[object] = [(lease.client_id, lease.instance_id, rank[lease.epoch], lease.was_held, age)]
    told.append((progress.done_through, progress.ranges, progress.granted))
    for share in shares:
        age = min(log_time - share.last_beat, 2 * HI + 1)
        told.append((rank[share.epoch], share.client_id, share.instance_id, age, share.lo, share.hi))
    told += [_hole_told(hole, rank) for hole in holes]
    return told


def _hole_told(hole: Hole, rank: dict[int, int]) -> tuple[object, ...]:
    return hole._replace(owner=rank[hole.owner], since=rank[hole.since])


def _group_told(group: Group, world: World) -> list[object]:
    offsets = {-1, group.generation}
    topic = group.pieces.get(TOPIC)
    pieces = [] if topic is None else list(topic[0])
    holes = [(p, hole) for _, p, kept in group.all_progress() for hole in kept.progress.open]
    offsets |= {each for piece in pieces for each in (piece.since, piece.revoked)}
    offsets |= {each for member in group.members.values() for each in (member.slot, member.joined)}
    offsets |= {hole.since for _, hole in holes}
    rank = {each: place for place, each in enumerate(sorted(offsets))}
    told: list[object] = [(rank[group.generation], group.settings, sorted(group.counts.items()))]
    for member in group.members.values():
        age = min(world.log_time - member.last_beat, SESSION + 1)
        told.append((member.instance_id, rank[member.slot], rank[member.joined], age))
    told += [(p.lo, p.hi, rank[p.owner], rank[p.since], rank[p.target], rank[p.revoked]) for p in pieces]
    for _, number, kept in group.all_progress():
        progress = kept.progress
        told.append((number, kept.initial, progress.done_through, progress.ranges))
    told += [(number, *_hole_told(hole, rank)) for number, hole in holes]
    return [*told, group.checkpoints is not None]
