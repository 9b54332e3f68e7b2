"""Small scope of checkpoints: every order of what two members, their admin and an operator could append to a group.

The group takes checkpoints, by piece or `hold`, and its topic may be shared by key; one of its members has been
restarted. Barriers open, are answered in whole, in part or by an older order, refused, and left open; members leave
at them, without them, die and are replaced; the group goes back, is paused, and gets other positions. The invariants
are those of "Why this is right" (section 7), written independently of the searched code.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise, product

from rationalizer import Outcome, Record, ReleaseGroup, Tick, Upgrade, World, codes, encode
from rationalizer.groups.checkpoints import Checkpoints, Version
from rationalizer.groups.group import Group, Member
from rationalizer.groups.pieces import NEVER, Piece
from rationalizer.levels import CHECKPOINTS_LEVEL, SUPPORTED_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.records import (
    KINDS,
    AnswerBarrier,
    BeginCheckpoint,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    ForgetGroup,
    GroupHeartbeat,
    JoinGroup,
    KeepCheckpoint,
    LeaveGroup,
    Rollback,
)
from rationalizer.wire.wellformed import (
    END,
    PASSING,
    PIN,
    REACHED,
    REACHED_AND_LEAVES,
    REFUSED,
    RETIRE,
    START,
)
from tests.campaigns.small_scope.groups import ADMIN, GROUP, HALF, START_MS, TOPIC, GroupScope
from tests.campaigns.small_scope.search import BrokenError, Explored, State, search, transitions

#: Records in a row by default.
CHECKPOINT_DEPTH = 6
MEMBERS = (("a", "a1"), ("a", "a2"), ("b", "b1"))
OPERATOR = ("o1", "o", GROUP)
#: A barrier is over before a member is overdue.
TIMEOUT, SESSION = 100, 200
#: Progress is followed up to here.
LAST_OFFSET = 2
SAMPLES = (0, HALF, HALF + 1, MAX_KEY_HASH)

#: Out of reach of these clients.
_ELSEWHERE = frozenset(
    [
        codes.MALFORMED,
        codes.UNSUPPORTED_VERSION,
        codes.UNKNOWN_TYPE,
        codes.WRONG_PARTITION,
        codes.WRONG_KIND,
        codes.TOO_MANY_CHECKPOINTS,
        codes.PAUSED,
    ]
)
_NAMES = [kind.name for kind in KINDS.values() if kind.level == CHECKPOINTS_LEVEL]


class _Taking(GroupScope):
    wanted = transitions(_NAMES, _ELSEWHERE)

    def __init__(self, hold: bool, shared: bool, open_: bool) -> None:
        self.hold = hold
        self.shared = shared
        self.open = open_

    def first(self) -> tuple[bytes, State]:
        """A group that takes checkpoints, with a member that has started; or a second one, for which it has to cut."""
        world = World(0, 1)
        topics, count = ((TOPIC,), 1) if self.shared else ((), 2)

        def append(record: Record) -> Group:
            assert world.apply(world.next_offset, START_MS, encode(record)).code == codes.OK
            group = world.group(GROUP)
            assert group is not None
            return group

        world.apply(0, START_MS, encode(Upgrade(*ADMIN, SUPPORTED_LEVEL)))
        append(ConfigureGroup(*ADMIN, (("accept_range_fetch", topics),)))
        append(BeginCheckpoint(*ADMIN, 0, TIMEOUT, 1, self.hold))
        group = append(_join(("a1", "a", GROUP), 3, count))
        of = ("a1", "a", GROUP, group.clients["a"].member_id)
        starts = tuple(CommitEntry(TOPIC, p, action=START, through=0) for p in range(count))
        append(CommitOffsets(*of, group.generation, False, starts))
        if self.open:
            append(_join(("b1", "b", GROUP), 5, count))
            append(BeginCheckpoint(*ADMIN, 2, TIMEOUT, 0, False))
        return _key(world), (world.snapshot(), None, b"")

    def records(self, world: World) -> Iterator[tuple[Record, int]]:
        return _records(world)

    def check(self, before: World, after: World, record: Record, outcome: Outcome) -> None:
        _check(before, after, record, outcome)

    def key(self, world: World) -> bytes:
        return _key(world)


def explore_checkpoints(
    depth: int = CHECKPOINT_DEPTH,
    most: int | None = None,
    jobs: int = 1,
    *,
    hold: bool = False,
    shared: bool = False,
    opened: bool = False,
) -> Explored:
    """Visit every state up to a depth, or at most a number of them. Raises BrokenError where a rule is broken.

    opened: begin where two members are there, a piece is revoked, and the barrier for its hand-over is open.
    """
    return search(_Taking(hold, shared, opened), depth, most, jobs)


def tell_all(depth: int | None, most: int | None, jobs: int) -> str:
    """Search from each beginning; for people. Not every transition is in reach of one. Raises BrokenError."""
    lines = []
    for hold, shared, opened in product((False, True), repeat=3):
        found = explore_checkpoints(depth or CHECKPOINT_DEPTH, most, jobs, hold=hold, shared=shared, opened=opened)
        lines.append(f"hold={hold} shared={shared} opened={opened}: {found.steps:,} records, {found.states:,} states")
    return "\n".join(lines) + "\n"


# What may come.


def _records(world: World) -> Iterator[tuple[Record, int]]:
    """What can come next, each with the log time that passes before it."""
    group = world.group(GROUP)
    for waits_ms in (TIMEOUT + 1, SESSION + 1):
        yield Tick(*ADMIN), waits_ms
    for client, instance in MEMBERS:
        ids = (instance, client, GROUP)
        for count in (1, 2) if client == "b" else (1,):
            yield _join(ids, world.next_offset, count), 0
        if client == "a":
            yield _join(ids, 0, 1), 0  # it has not seen its successor
        member = None if group is None else group.clients.get(client)
        if group is not None and member is not None and member.instance_id == instance:
            yield from ((record, 0) for record in _of_member(ids, group, member))
    yield from ((record, 0) for record in _of_admin(world, group))


def _join(ids: tuple[str, str, str], seen: int, count: int) -> JoinGroup:
    return JoinGroup(*ids, "", seen, SESSION, "sticky", True, "", ((TOPIC, count),))


def _of_member(ids: tuple[str, str, str], group: Group, member: Member) -> Iterator[Record]:
    of = (*ids, member.member_id)
    known = group.checkpoints
    mine = [(p, piece) for p, piece in _pieces(group) if piece.owner == member.slot]
    yield GroupHeartbeat(*of, group.generation)
    yield LeaveGroup(*of, group.generation)
    yield CommitOffsets(*of, group.generation, False, (CommitEntry(TOPIC, 0, through=LAST_OFFSET),))
    for partition in {p for p, _ in mine if group.kept(TOPIC, p) is None}:
        start = CommitEntry(TOPIC, partition, action=START, through=0)
        yield CommitOffsets(*of, group.generation, False, (start,))
    barrier = 0 if known is None or known.barrier is None else known.barrier.id
    if not barrier:
        yield AnswerBarrier(*of, group.generation, barrier, REACHED, ())
        return
    cuts = tuple(_cut(group, p, piece.lo, piece.hi) for p, piece in mine)
    for answer in (REACHED, REACHED_AND_LEAVES):
        yield AnswerBarrier(*of, group.generation, barrier, answer, cuts)
    yield AnswerBarrier(*of, group.generation, barrier, REACHED, ())
    yield AnswerBarrier(*of, group.generation, barrier, REFUSED, ())
    yield AnswerBarrier(*of, group.generation, barrier, REACHED, (*cuts, _cut(group, 7, 0, MAX_KEY_HASH)))
    older = sorted({piece.revoked - 1 for _, piece in mine if piece.revoked != NEVER})
    for generation in (*older[:1], group.generation + 1):
        yield AnswerBarrier(*of, generation, barrier, REACHED, cuts)
    for p, piece in mine[:1]:
        half = _cut(group, p, piece.lo, (piece.lo + piece.hi) // 2)
        yield AnswerBarrier(*of, group.generation, barrier, REACHED, (half,))
        ranges = CommitEntry(TOPIC, p, piece.lo, piece.hi, ranges=((LAST_OFFSET, LAST_OFFSET),))
        yield AnswerBarrier(*of, group.generation, barrier, REACHED, (ranges,))


def _pieces(group: Group) -> list[tuple[int, Piece]]:
    of = group.pieces.get(TOPIC)
    return [] if of is None else [(p, piece) for p in of.partitions() for piece in of[p]]


def _cut(group: Group, partition: int, lo: int, hi: int) -> CommitEntry:
    kept = group.kept(TOPIC, partition)
    done = 0 if kept is None else kept.progress.stable
    return CommitEntry(TOPIC, partition, lo, hi, through=min(done + 1, LAST_OFFSET))


def _of_admin(world: World, group: Group | None) -> Iterator[Record]:
    known = None if group is None else group.checkpoints
    if group is None or known is None:
        yield BeginCheckpoint(*ADMIN, 0, TIMEOUT, 1, True)
        yield BeginCheckpoint(*ADMIN, 7, TIMEOUT, 1, True)
        yield Rollback(*OPERATOR, 0, 0)
        yield KeepCheckpoint(*OPERATOR, 2, RETIRE)
        yield AnswerBarrier(*OPERATOR, "nobody", 0, 0, REACHED, ())
    else:
        oldest = known.kept[0].id
        for keep in (0, 1):
            yield BeginCheckpoint(*ADMIN, known.newest, TIMEOUT, keep, False)
        yield BeginCheckpoint(*ADMIN, 0, TIMEOUT, 1, False)
        yield Rollback(*OPERATOR, group.generation, 0)
        yield Rollback(*OPERATOR, group.generation, oldest)
        yield Rollback(*OPERATOR, group.generation, oldest + 1)
        yield Rollback(*OPERATOR, max(0, group.generation - 1), 0)
        yield KeepCheckpoint(*OPERATOR, oldest, RETIRE)
        yield KeepCheckpoint(*OPERATOR, oldest - 1, RETIRE)
        yield KeepCheckpoint(*OPERATOR, known.newest, PIN)
        yield KeepCheckpoint(*OPERATOR, known.newest, END)
        yield AnswerBarrier(*OPERATOR, "nobody", 0, 0, REACHED, ())
    yield ReleaseGroup(*ADMIN, world.log_time + 3 * SESSION)
    yield CommitOffsets(*ADMIN, "", 0, False, (CommitEntry(TOPIC, 0, through=0),))
    yield ForgetGroup(*ADMIN)


# Invariants, written independently.


def _check(before: World, after: World, record: Record, outcome: Outcome) -> None:
    was, now = before.group(GROUP), after.group(GROUP)
    if now is not None and now.checkpoints is not None:
        _check_shape(now, now.checkpoints, record)
    if was is None or was.checkpoints is None or now is None or not outcome.accepted:
        return
    if now.checkpoints is None:
        if not isinstance(record, KeepCheckpoint) or _seen_by_all(now) != _seen_by_all(was):
            raise BrokenError(f"checkpoints ended, and not as X9 says: {record}")
        return
    _check_progress(was, now, record)
    _check_owners(was, now, record)


def _check_shape(group: Group, known: Checkpoints, record: Record) -> None:
    """X1, X2, X3, and that progress only grows along the checkpoints kept."""
    ids = [kept.id for kept in known.kept]
    if not ids or ids != sorted(set(ids)) or any(kept.kind == PASSING for kept in known.kept[:-1]):
        raise BrokenError(f"checkpoints that are none (X1): {record}")
    for partition in range(2):
        versions = list(group.versions((TOPIC, partition)))
        for version in versions:
            open_ = known.barrier is not None and version.checkpoint == known.barrier.id
            if not open_ and not any(_seen(versions, each) is version for each in ids):
                raise BrokenError(f"a version that no checkpoint sees (X2): {record}")
        for one, other in pairwise(ids):
            for sample in SAMPLES:
                if not _done(_seen(versions, one), sample) <= _done(_seen(versions, other), sample):
                    raise BrokenError(f"a rollback would go forward (X10): {record}")
    if known.barrier is not None:
        owners = {piece.owner for _, piece in _pieces(group)}
        if not owners - set(known.barrier.answers):
            raise BrokenError(f"a barrier is open, and all have answered (X6): {record}")
        if not set(known.barrier.answers) <= set(group.members):
            raise BrokenError(f"an answer of nobody (X3): {record}")


def _seen(versions: list[Version], checkpoint: int) -> Version | None:
    below = [version for version in versions if version.checkpoint <= checkpoint]
    return below[-1] if below else None


def _done(version: Version | None, sample: int) -> set[int]:
    """Offsets up to the last that count as done for this key. Without a version there is no more than the start."""
    if version is None:
        return set()
    through = next(done for lo, hi, done in version.done_through if lo <= sample <= hi)
    ranges = {offset for first, last in version.ranges for offset in range(first, min(last, LAST_OFFSET) + 1)}
    return set(range(min(through, LAST_OFFSET) + 1)) | ranges


def _state(version: Version | None, sample: int) -> int:
    return 0 if version is None else next(state for lo, hi, state in version.states if lo <= sample <= hi)


def _seen_by_all(group: Group) -> dict[int, str]:
    """What counts as progress."""
    return {p: repr(kept.progress) for _, p, kept in group.all_progress()}


def _check_progress(was: Group, now: Group, record: Record) -> None:
    """Nothing moves in between; a key that was cut has the state of its cut, another keeps what it had."""
    old, new = was.checkpoints, now.checkpoints
    assert old is not None
    assert new is not None
    if new.newest == old.newest:
        before, after = _seen_by_all(was), _seen_by_all(now)
        if any(after.get(p) != seen for p, seen in before.items()):
            raise BrokenError(f"progress moved without a checkpoint (X2): {record}")
        return
    if isinstance(record, CommitOffsets) and record.member_id == "":
        return
    for partition in range(2):
        old_versions, new_versions = list(was.versions((TOPIC, partition))), list(now.versions((TOPIC, partition)))
        if isinstance(record, Rollback):
            if repr(_seen(old_versions, new.newest)) != repr(_seen(new_versions, new.newest)):
                raise BrokenError(f"going back changed what a checkpoint sees (X8): {record}")
            continue
        seen, sees = _seen(old_versions, old.newest), _seen(new_versions, new.newest)
        cut = [sample for sample in SAMPLES if _state(sees, sample) == new.newest]
        for sample in SAMPLES:
            if sample not in cut and _state(sees, sample) != _state(seen, sample):
                raise BrokenError(f"a key that was not cut has another state: {record}")
            if not _done(seen, sample) <= _done(sees, sample):
                raise BrokenError(f"a checkpoint took back what was done: {record}")


def _check_owners(was: Group, now: Group, record: Record) -> None:
    """Hand-over is exact: an owner that stays loses a piece only if it named all of it, or by a reset."""
    old, new = was.checkpoints, now.checkpoints
    assert old is not None
    assert new is not None
    completed = old.barrier is not None and new.newest == old.barrier.id
    lost = {piece.owner for _, piece in _pieces(was)} - set(now.members)
    for partition, piece in _pieces(was):
        for sample in (piece.lo, piece.hi):
            holders = [p for q, p in _pieces(now) if q == partition and p.lo <= sample <= p.hi]
            holder = holders[0] if holders else piece
            if (holder.owner, holder.since) == (piece.owner, piece.since):
                continue
            if holder.since <= piece.since:
                raise BrokenError(f"a token that does not grow (G5): {record}")
            member, same = was.members[piece.owner], now.members.get(piece.owner)
            if same is None or same.member_id != member.member_id:
                continue
            reset = all(p.since == now.generation for _, p in _pieces(now))
            cut = completed and _state(_seen(list(now.versions((TOPIC, partition))), new.newest), sample) == new.newest
            if not cut and not (reset and (isinstance(record, Rollback) or old.hold)):
                raise BrokenError(f"an owner that stays lost keys that it had not cut (X6, X7): {record}")
    replaced = isinstance(record, JoinGroup) and any(
        now.members[slot].member_id != member.member_id and any(piece.owner == slot for _, piece in _pieces(was))
        for slot, member in was.members.items()
        if slot in now.members
    )
    is_loss = old.hold and (replaced or (lost and not completed))
    if is_loss and any(piece.since != now.generation for _, piece in _pieces(now)):
        raise BrokenError(f"a hold group lost a member, and some piece stays (X7): {record}")


# States that are one.


def _key(world: World) -> bytes:
    """A state without what makes no difference: offsets, beyond their order, and ages of the dead."""
    log_time = world.log_time
    pause = world.pause(GROUP)
    told: list[object] = [None if pause is None else (pause.client_id, pause.expires - log_time)]
    group = world.group(GROUP)
    if group is not None:
        told += _rows(group, log_time)
    return blake2b(repr(told).encode(), digest_size=16).digest()


def _rows(group: Group, log_time: int) -> list[object]:
    known = group.checkpoints
    offsets = {group.generation, -1, 0}
    for _, piece in _pieces(group):
        offsets |= {piece.since, piece.revoked}
    for member in group.members.values():
        offsets |= {member.slot, member.joined}
    versions = {p: list(group.versions((TOPIC, p))) for p in range(3)} if known is not None else {}
    for each in versions.values():
        for version in each:
            offsets |= {version.checkpoint, *(state for _, _, state in version.states)}
    if known is not None:
        offsets |= {kept.id for kept in known.kept}
        if known.barrier is not None:
            offsets |= {known.barrier.id, *(given.generation for given in known.barrier.answers.values())}
    rank = {each: place for place, each in enumerate(sorted(offsets))}
    told: list[object] = [(rank[group.generation], group.settings, sorted(group.counts.items()))]
    for member in group.members.values():
        age = min(log_time - member.last_beat, SESSION + 1)
        told.append((member.instance_id, rank[member.slot], rank[member.joined], age))
    for partition, p in _pieces(group):
        told.append((partition, p.lo, p.hi, rank[p.owner], rank[p.since], rank[p.target], rank[p.revoked]))
    told += [(p, kept.initial, repr(kept.progress)) for _, p, kept in group.all_progress()]
    if known is None:
        return told
    told.append((known.keep, known.hold, [(rank[kept.id], kept.kind) for kept in known.kept]))
    if (barrier := known.barrier) is not None:
        age = min(log_time - barrier.opened, barrier.timeout_ms + 1)
        answers = [(rank[slot], rank[given.generation], given.answer) for slot, given in barrier.answers.items()]
        told.append((rank[barrier.id], age, barrier.passing, sorted(answers)))
    for partition, each in versions.items():
        for version in each:
            states = [(lo, hi, rank[state]) for lo, hi, state in version.states]
            done = (list(version.done_through), list(version.ranges), version.metadata)
            told.append((partition, rank[version.checkpoint], states, done))
    return told
