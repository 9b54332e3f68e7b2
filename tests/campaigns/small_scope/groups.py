"""Small scope of coordinated groups: every order of what two members of one group and an admin could append.

Two clients, one of which has been restarted and its earlier instance may still write; a topic of one partition, which
may become two, and may be shared by key; deaths, pauses, settings, positions, a claim of the same group. Members are
called by their ids if they have one; commits carry any generation that makes a difference. The invariants of each step
are written here independently of the searched code. (For claims see :mod:`.records`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice

from rationalizer import (
    ClaimingPartition,
    ForgetGroup,
    Outcome,
    Record,
    ReleaseGroup,
    Tick,
    Upgrade,
    World,
    codes,
    encode,
    state,
)
from rationalizer.groups.group import Group, Member
from rationalizer.groups.pieces import NEVER
from rationalizer.levels import GROUPS_LEVEL, SUPPORTED_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.records import (
    KINDS,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    GroupHeartbeat,
    JoinGroup,
    LeaveGroup,
    SettleOffsets,
    TopicsChanged,
)
from rationalizer.wire.wellformed import COMMIT, LET_GO, START
from tests.campaigns.small_scope.search import BrokenError, Explored, Part, State, search, transitions
from tests.rationalizer.samples import other_records

GROUP, TOPIC = "g", "t"
SESSION = 100
START_MS = 1_000_000
#: Records in a row by default: more than a million states.
GROUP_DEPTH = 7
#: (client, instance): two members; the first has been restarted.
MEMBERS = (("a", "a1"), ("a", "a2"), ("b", "b1"))
ADMIN = ("z1", "z", GROUP)
#: Progress is followed up to here.
LAST_OFFSET = 1
HALF = MAX_KEY_HASH // 2
#: Key hashes of which owners are compared: those of both halves' ends, between which nothing is cut but by mistake.
SAMPLES = (0, HALF, HALF + 1, MAX_KEY_HASH)

#: Transitions out of reach of these clients.
_ELSEWHERE = frozenset(
    [
        codes.MALFORMED,
        codes.UNSUPPORTED_VERSION,
        codes.UNKNOWN_TYPE,
        codes.WRONG_PARTITION,
        codes.GROUP_FULL,
        codes.TOO_MANY_PARTITIONS,
        codes.UNKNOWN_PARTITIONING_STRATEGY,
        codes.SESSION_TIMEOUT_TOO_HIGH,
        codes.DUPLICATE_COMMIT,
        codes.NO_SUCH_BARRIER,
    ]
)
_NAMES = [kind.name for kind in KINDS.values() if kind.level == GROUPS_LEVEL]


class GroupScope:
    """Records about one group in one CP, for :mod:`.search`: each state follows from a snapshot and one record."""

    def records(self, world: World) -> Iterator[tuple[Record, int]]:
        """What can come next, each with the log time that passes before it."""
        raise NotImplementedError

    def check(self, before: World, after: World, record: Record, outcome: Outcome) -> None:
        """Raises BrokenError where a rule is broken."""
        raise NotImplementedError

    def key(self, world: World) -> bytes:
        """A state without what makes no difference."""
        raise NotImplementedError

    def steps(self, state: State, part: Part) -> Iterator[tuple[bytes, int, State]]:
        """Every record that may come."""
        snapshot, _, path = state
        before = World.restore(snapshot, 1)
        rows, world = _rows(before), World.restore(snapshot, 1)
        for choice, (record, waits_ms) in enumerate(self.records(before)):
            try:
                outcome = world.apply(world.next_offset, before.log_time + waits_ms, encode(record))
                self.check(before, world, record, outcome)
                if not outcome.accepted and _rows(world) != rows:
                    raise BrokenError(f"a record that was rejected has changed something (E3): {record}")
            except Exception as error:
                error.add_note(self._trail(path + bytes([choice])))
                raise
            part.steps += 1
            part.transitions[type(record).__name__, outcome.code] += 1
            for code in outcome.entries or ():
                part.transitions[f"entry of {type(record).__name__}", code] += 1
            if outcome.accepted:  # else it is the same state
                yield self.key(world), 1, (world.snapshot(), None, path + bytes([choice]))
                world = World.restore(snapshot, 1)

    def first(self) -> tuple[bytes, State]:
        """The first state, and its key."""
        raise NotImplementedError

    def _trail(self, path: bytes) -> str:
        """The records that these choices are, with their outcomes, one a line."""
        _, (snapshot, _, _) = self.first()
        world = World.restore(snapshot, 1)
        lines = []
        for choice in path:
            record, waits_ms = next(islice(self.records(world), choice, None))
            offset = world.next_offset
            outcome = world.apply(offset, world.log_time + waits_ms, encode(record))
            entries = f" {outcome.entries}" if outcome.entries else ""
            lines.append(f"  offset {offset}, {outcome.log_time - START_MS:>4} ms: {record}: {outcome.code}{entries}")
        return "\n".join(lines)


class _Groups(GroupScope):
    wanted = transitions([*_NAMES, "entry of CommitOffsets", "ForgetGroup", "ReleaseGroup"], _ELSEWHERE) | {
        ("ClaimingPartition", codes.WRONG_KIND)
    }

    def __init__(self, shared: bool) -> None:
        """shared: begin with a group whose topic may be shared by key, which takes a record otherwise."""
        self.shared = shared

    def first(self) -> tuple[bytes, State]:
        """A CP of the highest level, with no members."""
        world = World(0, 1)
        world.apply(0, START_MS, encode(Upgrade(*ADMIN, SUPPORTED_LEVEL)))
        if self.shared:
            world.apply(1, START_MS, encode(ConfigureGroup(*ADMIN, (("accept_range_fetch", (TOPIC,)),))))
        return _key(world), (world.snapshot(), None, b"")

    def records(self, world: World) -> Iterator[tuple[Record, int]]:
        return _records(world)

    def check(self, before: World, after: World, record: Record, outcome: Outcome) -> None:
        _check(before, after, record, outcome)

    def key(self, world: World) -> bytes:
        return _key(world)


def explore_groups(
    depth: int = GROUP_DEPTH, most: int | None = None, jobs: int = 1, *, shared: bool = False
) -> Explored:
    """Visit every state up to a depth, or at most a number of them. Raises BrokenError where a rule is broken."""
    return search(_Groups(shared), depth, most, jobs)


def _records(world: World) -> Iterator[tuple[Record, int]]:
    """What can come next, each with the log time that passes before it."""
    group = world.group(GROUP)
    for waits_ms in (SESSION // 2, SESSION + 1):
        yield Tick(*ADMIN), waits_ms
    for client, instance in MEMBERS:
        ids = (instance, client, GROUP)
        for count in (1, 2):
            yield _join(ids, world.next_offset, count), 0
        if client == "a":
            yield _join(ids, 0, 2), 0  # it has not seen the members that came since
        member = None if group is None else group.clients.get(client)
        if member is not None and member.instance_id == instance:
            assert group is not None
            yield from ((record, 0) for record in _of_member(ids, group, member))
        elif instance == "a1":
            yield from ((record, 0) for record in _of_nobody((*ids, f"{GROUP}-gone")))
    yield from ((record, 0) for record in _of_admin(world, group))


def _join(ids: tuple[str, str, str], seen: int, count: int, strategy: str = "sticky") -> JoinGroup:
    pattern = "^t" if ids[1] == "b" else ""
    return JoinGroup(*ids, "", seen, SESSION, strategy, True, pattern, ((TOPIC, count),))


def _of_nobody(ids: tuple[str, str, str, str]) -> Iterator[Record]:
    """With an id that no member has any more."""
    yield JoinGroup(*ids, 0, SESSION, "sticky", True, "", ((TOPIC, 1),))
    yield GroupHeartbeat(*ids, 0)
    yield LeaveGroup(*ids, 0)
    yield CommitOffsets(*ids, 0, False, (CommitEntry(TOPIC, 0, through=0),))
    yield TopicsChanged(*ids, ((TOPIC, 1),))


def _of_member(ids: tuple[str, str, str], group: Group, member: Member) -> Iterator[Record]:
    of = (*ids, member.member_id)
    generations = _generations(group)
    yield GroupHeartbeat(*of, group.generation)
    yield GroupHeartbeat(*of, generations[0])
    yield GroupHeartbeat(*of, group.generation + 1)
    yield LeaveGroup(*of, group.generation)
    if member.client_id == "a":
        yield LeaveGroup(*of, group.generation + 1)
        yield CommitOffsets(*of, group.generation + 1, False, (CommitEntry(TOPIC, 0, through=0),))
    if member.pattern:
        yield TopicsChanged(*of, ((TOPIC, 2),))
        yield TopicsChanged(*of, ())
        yield _join(ids, group.generation, 1, "range")
    for partition in range(min(2, group.counts.get(TOPIC, 0))):
        kept = group.kept(TOPIC, partition)
        done = -1 if kept is None else kept.progress.stable
        following = min(done + 1, LAST_OFFSET)
        for generation in generations:
            entry = CommitEntry(TOPIC, partition, action=LET_GO, through=following)
            yield CommitOffsets(*of, generation, False, (entry,))
        yield CommitOffsets(*of, group.generation, False, (CommitEntry(TOPIC, partition, action=START, through=0),))
        quarter = CommitEntry(TOPIC, partition, HALF + 1, HALF + HALF // 2, LET_GO)
        yield CommitOffsets(*of, group.generation, False, (quarter,))
        for lo, hi in ((0, HALF), (HALF + 1, MAX_KEY_HASH)):
            entries = tuple(CommitEntry(TOPIC, partition, lo, hi, action, following) for action in (COMMIT, LET_GO))
            yield CommitOffsets(*of, group.generation, False, entries)
        if partition == 0:
            ranges = ((LAST_OFFSET + 1, LAST_OFFSET + 1),)
            yield CommitOffsets(*of, group.generation, False, (CommitEntry(TOPIC, 0, ranges=ranges),))
            yield CommitOffsets(*of, group.generation, True, (CommitEntry(TOPIC, 0, ranges=ranges),))
            if group.settings.max_individual_commits == 1:
                yield CommitOffsets(*of, group.generation, False, (CommitEntry(TOPIC, 0, ranges=((4, 4), (6, 6))),))
            if done > 0:
                yield CommitOffsets(*of, group.generation, False, (CommitEntry(TOPIC, 0, through=0, ranges=()),))
                yield CommitOffsets(*of, group.generation, False, (CommitEntry(TOPIC, 0, ranges=((0, 0),)),))


def _generations(group: Group) -> list[int]:
    """Ascending: the group's, and the last before each piece was got, or revoked."""
    pieces = [piece for topic in group.pieces.values() for p in topic.partitions() for piece in topic[p]]
    edges = {piece.since - 1 for piece in pieces} | {piece.revoked - 1 for piece in pieces if piece.revoked != NEVER}
    return sorted({group.generation, *edges} - {-1})


def _of_admin(world: World, group: Group | None) -> Iterator[Record]:
    yield ReleaseGroup(*ADMIN, world.log_time + 3 * SESSION)
    yield ReleaseGroup(*ADMIN, 0)
    yield ReleaseGroup("y1", "y", GROUP, world.log_time + 3 * SESSION)
    yield ForgetGroup(*ADMIN)
    yield ClaimingPartition(*ADMIN, TOPIC, 0, SESSION)
    yield CommitOffsets(*ADMIN, "", 0, False, (CommitEntry(TOPIC, 0, through=0),))
    yield ConfigureGroup(*ADMIN, (("accept_range_fetch", (TOPIC,)),))
    yield ConfigureGroup(*ADMIN, (("max_individual_commits", 1),))
    yield from other_records(ADMIN)
    if group is not None and group.settings.accept_range_fetch:
        yield ConfigureGroup(*ADMIN, (("accept_individual_commit", not group.settings.accept_individual_commit),))


# Invariants, written independently.


def _check(before: World, after: World, record: Record, outcome: Outcome) -> None:
    pause = before.pause(GROUP)
    paused_by = pause.client_id if pause is not None and after.log_time < pause.expires else None
    passes = isinstance(record, LeaveGroup | CommitOffsets | SettleOffsets | Tick)
    if paused_by not in (None, record.client_id) and not passes and outcome.code != codes.PAUSED:
        raise BrokenError(f"the group is paused by {paused_by} (C10), and {record} was {outcome.code}")
    was, now = before.group(GROUP), after.group(GROUP)
    if now is not None and after.lease(GROUP, TOPIC, 0) is not None:
        raise BrokenError(f"the group is claimed, and coordinated (G1): {record}")
    if now is None:
        if was is not None and not (isinstance(record, ForgetGroup) and outcome.accepted):
            raise BrokenError(f"the group is gone, and nobody forgot it (C16): {record}")
        if was is not None and any(not member.is_overdue(after.log_time) for member in was.members.values()):
            raise BrokenError(f"a group with members was forgotten (C16): {record}")
        return
    _check_shape(now, record)
    was = Group(GROUP) if was is None else was
    if now.generation != was.generation and now.generation != after.next_offset - 1:
        raise BrokenError(f"a generation that is no offset (G5): {record}")
    _check_members(was, now, record, outcome, after.log_time)
    _check_owners(was, now, record, outcome)
    _check_progress(was, now, record, outcome, record.client_id == paused_by)


def _check_shape(group: Group, record: Record) -> None:
    """G4, K4, G12."""
    if (group.strategy is None) != (not group.members) or (group.pieces and not group.members):
        raise BrokenError(f"a strategy, or pieces, of nobody (G16): {record}")
    for name, count in group.counts.items():
        for partition in range(count):
            at = 0
            for piece in group.pieces[name][partition]:
                if piece.lo != at:
                    raise BrokenError(f"keys that nobody owns, or two do (K4): {record}")
                at = piece.hi + 1
                if piece.owner not in group.members or piece.target not in group.members:
                    raise BrokenError(f"an owner or a target who is no member (G16): {record}")
                if (piece.owner == piece.target) != (piece.revoked == NEVER):
                    raise BrokenError(f"revoked, and its owner's, or not revoked, and another's (G4): {record}")
                if max(piece.since, piece.revoked) > group.generation:
                    raise BrokenError(f"since or revoked is still to come (G4): {record}")
            if at != MAX_KEY_HASH + 1:
                raise BrokenError(f"keys that nobody owns (K4): {record}")


def _check_members(was: Group, now: Group, record: Record, outcome: Outcome, log_time: int) -> None:
    """G6, G8: living members stay, and dead ones go with the first accepted record of another member."""
    for slot, member in was.members.items():
        leaves = isinstance(record, LeaveGroup) and outcome.accepted and record.client_id == member.client_id
        is_overdue = member.is_overdue(log_time)
        if slot not in now.members and not leaves and not is_overdue:
            raise BrokenError(f"a member is gone that was not overdue (G8): {record}")
        if slot not in now.members and not outcome.accepted:
            raise BrokenError(f"a record that was rejected has buried somebody (G8): {record}")
    speaks = isinstance(record, JoinGroup | GroupHeartbeat | LeaveGroup | CommitOffsets) and outcome.accepted
    everybody = was.members and all(member.is_overdue(log_time) for member in was.members.values())
    if speaks and not isinstance(record, TopicsChanged):
        late = [m for m in now.members.values() if m.is_overdue(log_time)]
        if late and not everybody:
            raise BrokenError(f"the dead are still there (G8): {record}")
    if isinstance(record, GroupHeartbeat) and outcome.accepted and now.clients[record.client_id].last_beat != log_time:
        raise BrokenError(f"a beat does not count (G9): {record}")


def _check_owners(was: Group, now: Group, record: Record, outcome: Outcome) -> None:
    """G4, G5, G11, G16: an owner continues until it releases, or is no member, or was replaced; tokens grow."""
    for partition in range(2):
        for sample in SAMPLES:
            old, new = _piece_at(was, partition, sample), _piece_at(now, partition, sample)
            if old is None or new is None:
                continue
            owner, since, revoked, lo, hi = old
            replaced = isinstance(record, JoinGroup) and new[1] == now.generation and new[1] != was.generation
            if new[:2] == (owner, since):
                continue
            if new[1] <= since:
                raise BrokenError(f"a token that does not grow (G5): {record}")
            if owner not in now.members:
                continue
            member = was.members[owner]
            if member.client_id != record.client_id:
                raise BrokenError(f"an owner lost keys by another's record, and lives (G16): {record}")
            let_go = revoked != NEVER and outcome.accepted and _lets_go(record, partition, lo, hi)
            other = replaced and member.instance_id != record.instance_id
            if not let_go and not other:
                raise BrokenError(f"an owner lost keys that it has not let go (G14): {record}")


def _lets_go(record: Record, partition: int, lo: int, hi: int) -> bool:
    """Whether it releases this whole piece."""
    return isinstance(record, CommitOffsets) and any(
        entry.action == LET_GO and entry.partition == partition and entry.lo <= lo and hi <= entry.hi
        for entry in record.entries
    )


def _piece_at(group: Group, partition: int, sample: int) -> tuple[int, int, int, int, int] | None:
    topic = group.pieces.get(TOPIC)
    for piece in () if topic is None else topic[partition]:
        if piece.lo <= sample <= piece.hi:
            return piece.owner, piece.since, piece.revoked, piece.lo, piece.hi
    return None


def _check_progress(was: Group, now: Group, record: Record, outcome: Outcome, pausing: bool) -> None:
    """P2, P8, G14: progress grows, by commits of owners, for keys that they own; the pausing client may move it."""
    for topic, partition, kept in was.all_progress():
        after = now.kept(topic, partition)
        if after is None:
            raise BrokenError(f"progress is gone (G3): {record}")
        moved = [kept.progress.is_done(o, s) for o in range(3) for s in SAMPLES] != [
            after.progress.is_done(o, s) for o in range(3) for s in SAMPLES
        ]
        if moved and not (isinstance(record, CommitOffsets) and outcome.accepted):
            raise BrokenError(f"progress moved without a commit (G14): {record}")
        if isinstance(record, CommitOffsets) and not record.member_id and pausing:
            continue
        if after.initial != kept.initial:
            raise BrokenError(f"a second start (P9): {record}")
        for sample in SAMPLES:
            for offset in range(LAST_OFFSET + 2):
                done = after.progress.is_done(offset, sample)
                if kept.progress.is_done(offset, sample) and not done:
                    raise BrokenError(f"what was done is not any more (P2): {record}")
                if done and not kept.progress.is_done(offset, sample) and not _owns(was, record, partition, sample):
                    raise BrokenError(f"somebody committed for keys of another (G14): {record}")


def _owns(group: Group, record: Record, partition: int, sample: int) -> bool:
    owner = _piece_at(group, partition, sample)
    sender = group.clients.get(record.client_id)
    # Ranges count for every key: their sender owns some.
    return sender is not None and (owner is None or owner[0] == sender.slot or bool(_entry(record).ranges))


def _entry(record: Record) -> CommitEntry:
    assert isinstance(record, CommitOffsets)
    return record.entries[0]


def _rows(world: World) -> object:
    return world.rows(), world._pauses


# States that are one.


def _added(group: Group) -> list[object]:
    """What later levels added: all of it makes a difference, unless it is put in another form here."""
    found = list[object](state.GROUP.added(group))
    for member in group.members.values():
        found += state.MEMBER.added(member)
    for each in group.assigned():
        found += state.PARTITION.added(each)
        found += [] if each.progress is None else state.PROGRESS.added(each.progress)
    return found


def _key(world: World) -> bytes:
    """A state without what makes no difference: offsets, beyond their order, and ages of the dead."""
    log_time = world.log_time
    pause = world.pause(GROUP)
    told: list[object] = [None if pause is None else (pause.client_id, pause.expires - log_time)]
    told += [(lease.client_id, min(log_time - lease.last_beat, 2 * SESSION + 1)) for lease in world.leases()]
    group = world.group(GROUP)
    if group is not None:
        topic = group.pieces.get(TOPIC)
        pieces = {p: topic[p] for p in topic.partitions()} if topic is not None else {}
        offsets = {group.generation, -1}
        for of in pieces.values():
            for piece in of:
                offsets |= {piece.since, piece.revoked}
        for member in group.members.values():
            offsets |= {member.slot, member.joined}
        # A commit may carry the generation before any of these: whether that is one of them makes a difference.
        rank = {each: place for place, each in enumerate(sorted(offsets))}
        told.append((rank[group.generation], group.strategy, group.settings, sorted(group.counts.items())))
        for member in group.members.values():
            age = min(log_time - member.last_beat, SESSION + 1)
            told.append((member.instance_id, rank[member.slot], rank[member.joined], age, sorted(member.topics)))
        for partition, of in pieces.items():
            told += [(partition, p.lo, p.hi, rank[p.owner], rank[p.since], rank[p.target], rank[p.revoked]) for p in of]
        told += [(p, kept.initial, repr(kept.progress)) for _, p, kept in group.all_progress()]
        told += _added(group)
    return blake2b(repr(told).encode(), digest_size=16).digest()
