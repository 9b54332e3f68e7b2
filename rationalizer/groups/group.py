"""A coordinated group as its home knows it (G3): members, topics, pieces, progress.

Who may change what: `machine.py` the members and settings, `rebalance` the generation, topics and pieces, `commits.py`
the progress and what a member releases.

`reconcile` goes from the targets of pieces to their owners, the second half of a rebalance (G16):

where owners and targets cut a partition into parts        owner          since          revoked
no member owns the part, or its owner is gone or replaced  the target     generation     none
... and it has no target                                   the part vanishes
owner and target are the same                              stays          stays          none
they differ                                                stays          stays          stays, else generation
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from operator import ne
from typing import Final, Literal, NamedTuple

from rationalizer.done_through import KeyPiece
from rationalizer.groups.assignors import NOBODY, Target, compute_targets
from rationalizer.groups.checkpoints import NOT_SAVED, Checkpoints, Key, Version
from rationalizer.groups.pieces import NEVER, Piece, TopicPieces
from rationalizer.limits import MAX_INTERVALS, MAX_KEY_HASH, NOTHING_DONE
from rationalizer.progress import Progress
from rationalizer.wire.records import Topics


def reconcile(topic: TopicPieces, targets: list[Target], gone: AbstractSet[int], generation: int) -> None:
    """Give the topic's partitions these targets, at this generation.

    `targets`: by partition; what lies beyond them has none. `gone`: slots whose pieces go to the targets at once, of
    members that are no more and of one that was replaced (G11).
    """
    topic.grow(len(targets))
    rest = len(topic.owners) - len(targets)
    wanted: list[Target] = targets + [NOBODY] * rest if rest else targets
    touched: AbstractSet[int] = set()
    if wanted != topic.targets:
        touched = set(itertools.compress(range(len(wanted)), map(ne, wanted, topic.targets)))
    if topic.cut:
        touched = touched | topic.cut.keys()
    if gone:
        touched = touched | {p for p, owner in enumerate(topic.owners) if owner in gone}
    owners, cut = topic.owners, topic.cut
    for partition in touched:
        target = wanted[partition]
        if type(target) is not int or partition in cut:
            topic.put(partition, _parts(topic[partition], target, gone, generation))
            continue
        owner = owners[partition]
        topic.targets[partition] = target
        if owner == NOBODY or owner in gone:
            owners[partition] = target
            topic.since[partition] = NEVER if target == NOBODY else generation
            topic.revoked[partition] = NEVER
        elif owner == target:
            topic.revoked[partition] = NEVER
        elif topic.revoked[partition] == NEVER:
            topic.revoked[partition] = generation


def let_go(topic: TopicPieces, partition: int, lo: int, hi: int, generation: int) -> list[Piece]:
    """Every revoked piece that lies within lo … hi goes to its target, or vanishes (G14).

    Returns those of a partition that was cut.
    """
    if partition not in topic.cut:
        if topic.revoked[partition] != NEVER and lo == 0 and hi == MAX_KEY_HASH:
            target = topic.targets[partition]
            topic.owners[partition] = target
            topic.since[partition] = NEVER if target == NOBODY else generation
            topic.revoked[partition] = NEVER
        return []
    left, right = topic.touched(partition, lo, hi)
    pieces: list[Piece] = []
    gone: list[Piece] = []
    for piece in topic.cut[partition][left:right]:
        if piece.revoked == NEVER or piece.lo < lo or hi < piece.hi:
            pieces.append(piece)
            continue
        gone.append(piece)
        if piece.target != NOBODY:
            pieces.append(Piece(piece.lo, piece.hi, piece.target, generation, piece.target, NEVER))
    if gone:
        topic.replace(partition, left, right, pieces)
    return gone


def _parts(before: object, target: Target, gone: AbstractSet[int], generation: int) -> list[Piece]:
    """The parts of one partition, where some are cut."""
    assert isinstance(before, (list, tuple))
    wanted = ((0, MAX_KEY_HASH, target),) if type(target) is int else target
    assert type(wanted) is tuple
    # Every place where an owner's or a target's part begins, or ends.
    begins = {0, *(piece.lo for piece in before), *(piece.hi + 1 for piece in before)}
    begins |= {lo for lo, _, _ in wanted} | {hi + 1 for _, hi, _ in wanted}
    edges = sorted({*begins, MAX_KEY_HASH + 1})
    parts: list[Piece] = []
    have, want = iter(before), iter(wanted)
    piece: Piece | None = next(have, None)
    part: tuple[int, int, int] | None = next(want, None)
    for lo, end in itertools.pairwise(edges):
        while piece is not None and piece.hi < lo:
            piece = next(have, None)
        while part is not None and part[1] < lo:
            part = next(want, None)
        slot = part[2] if part is not None and part[0] <= lo else NOBODY
        old = piece if piece is not None and piece.lo <= lo else None
        if old is None or old.owner in gone:
            if slot != NOBODY:
                parts.append(Piece(lo, end - 1, slot, generation, slot, NEVER))
        elif old.owner == slot:
            parts.append(Piece(lo, end - 1, slot, old.since, slot, NEVER))
        else:
            revoked = generation if old.revoked == NEVER else old.revoked
            parts.append(Piece(lo, end - 1, old.owner, old.since, slot, revoked))
    return parts


GroupState = Literal["READY", "PREPARE_FOR_REBALANCE", "STEADY"]

#: What a group allows by default (G19).
DEFAULT_MAX_SESSION_TIMEOUT_MS: Final = 1_800_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What ConfigureGroup sets (G19); `accept_range_fetch`: topics that may be shared by key, sorted.

    `strategy`: the group's, whatever members name; None: the one that they name (R6).
    """

    accept_individual_commit: bool = True
    accept_range_fetch: tuple[str, ...] = ()
    max_session_timeout_ms: int = DEFAULT_MAX_SESSION_TIMEOUT_MS
    max_individual_commits: int = MAX_INTERVALS
    strategy: str | None = None


class Member:
    """One member (G3). Live state: read it, don't write it.

    `slot`: the offset of the JoinGroup that made it, which a restart keeps. `joined`: that of its last accepted
    JoinGroup. `topics`: its own, as it reported them. `last_beat` in log time, `session_timeout_ms` its own.
    """

    __slots__ = (
        "allow_key_share",
        "client_id",
        "instance_id",
        "joined",
        "last_beat",
        "member_id",
        "pattern",
        "session_timeout_ms",
        "slot",
        "topics",
        "watched",
    )

    def __init__(self, slot: int, client_id: str) -> None:
        self.slot = slot
        self.client_id = client_id
        self.instance_id = ""
        self.member_id = ""
        self.session_timeout_ms = 0
        self.allow_key_share = False
        self.pattern = ""
        self.topics: frozenset[str] = frozenset()
        self.last_beat = 0
        self.joined = slot
        #: The deadline under which its group watches it; its own may be later by now. −1: it is not watched.
        self.watched = -1

    @property
    def deadline(self) -> int:
        """The last log time at which it is not overdue (G8)."""
        return self.last_beat + self.session_timeout_ms

    def is_overdue(self, log_time: int) -> bool:
        """Whether it has been silent for longer than its session (G8)."""
        return log_time - self.last_beat > self.session_timeout_ms

    @property
    def heartbeat_interval_ms(self) -> int:
        """Half of its session: as of a lease, it is silent for too long after two of them."""
        return (self.session_timeout_ms + 1) // 2

    def freshness(self, log_time: int) -> str:
        """How it stands at this log time, as a lease's holder does."""
        if self.is_overdue(log_time):
            return "stale"
        return "fresh" if log_time - self.last_beat <= self.heartbeat_interval_ms else "unknown"

    def __repr__(self) -> str:
        return f"Member({self.slot}, {self.client_id}/{self.instance_id}, last_beat={self.last_beat})"


class PartitionProgress:
    """What is done of a partition (P1-P10), where its first owner began, and what members keep beside it."""

    __slots__ = ("initial", "metadata", "progress")

    def __init__(self) -> None:
        self.progress = Progress()
        #: −1: no start was set.
        self.initial = NOTHING_DONE
        self.metadata: str | None = None


class Assigned(NamedTuple):
    """A partition of a group, as its state lists it.

    `versions` None: the group takes no checkpoints. Else `initial` None: the partition has no start.
    """

    topic: str
    partition: int
    pieces: Sequence[Piece]
    progress: PartitionProgress | None
    initial: int | None = None
    versions: Sequence[Version] | None = None


class Group:
    """One group. `generation` is 0 before the first rebalance, and where this CP is not its home (G2)."""

    __slots__ = (
        "_deadlines",
        "_views",
        "checkpoints",
        "clients",
        "counts",
        "generation",
        "group_id",
        "late",
        "members",
        "pieces",
        "progress",
        "reports",
        "settings",
        "strategy",
        "weight",
    )

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.generation = 0
        self.strategy: str | None = None
        self.settings = Settings()
        #: Partitions of each topic that a member subscribes to.
        self.counts: dict[str, int] = {}
        #: What its topics count against MAX_GROUP_PARTITIONS: their partitions, a topic without any as one (G11).
        self.weight = 0
        #: By slot, oldest first: a slot is an offset, so a newcomer's is the largest.
        self.members: dict[int, Member] = {}
        self.clients: dict[str, Member] = {}
        self.pieces: dict[str, TopicPieces] = {}
        #: Of a group that takes checkpoints: what the newest of them sees (X2).
        self.progress: dict[str, dict[int, PartitionProgress]] = {}
        #: None: it takes none (X1).
        self.checkpoints: Checkpoints | None = None
        #: Slots that were overdue when last asked, until they beat or go.
        self.late: set[int] = set()
        #: (deadline, slot) of every member that is not late (`Member.watched`); those that have beaten since are put
        #: back when their time comes.
        self._deadlines: list[tuple[int, int]] = []
        #: What members reported as their own topics, and the slots of those that reported just this. Most report the
        #: same: so a thousand members of ten thousand topics cost little more than one.
        self._views: dict[frozenset[str], tuple[frozenset[str], set[int]]] = {}
        #: How many of these a topic is in, by topic.
        self.reports: dict[str, int] = {}

    # -- reading ---------------------------------------------------------------------------------------

    def state(self, log_time: int) -> GroupState:
        """What the group is doing, by name only (G7)."""
        if not self.members:
            return "READY"
        if self.overdue(log_time) or any(topic.any_revoked() for topic in self.pieces.values()):
            return "PREPARE_FOR_REBALANCE"
        return "STEADY"

    def sender(self, member_id: str, client_id: str, instance_id: str) -> Member | None:
        """The member whose three ids these are (G6)."""
        member = self.clients.get(client_id)
        if member is None or member.member_id != member_id or member.instance_id != instance_id:
            return None
        return member

    def overdue(self, log_time: int) -> AbstractSet[int]:
        """The slots of all members that are overdue (G8)."""
        deadlines, late, members = self._deadlines, self.late, self.members
        while deadlines and deadlines[0][0] < log_time:
            watched, slot = heappop(deadlines)
            member = members.get(slot)
            if member is None or member.watched != watched:
                continue
            member.watched = -1
            if member.is_overdue(log_time):
                late.add(slot)
            else:
                self._watch(member)
        return late

    def subscriptions(self) -> dict[str, list[int]]:
        """The slots that subscribe to each topic, ascending (G12). Topics may share a list."""
        if len(self._views) == 1:  # nearly always: then all subscribe to the same, with a pattern or without
            everybody = sorted(self.members)
            return {topic: everybody if topic in self.reports else [] for topic in self.counts}
        by_pattern: dict[str, dict[frozenset[str], None]] = {}
        for member in self.members.values():
            if member.pattern:
                by_pattern.setdefault(member.pattern, {})[member.topics] = None
        seen = {pattern: frozenset[str]().union(*views) for pattern, views in by_pattern.items()}
        alike: dict[frozenset[str], list[int]] = {}
        for slot, member in self.members.items():
            alike.setdefault(seen[member.pattern] if member.pattern else member.topics, []).append(slot)
        where: dict[str, list[int]] = {topic: [] for topic in self.counts}
        for number, topics in enumerate(alike):
            for topic in topics:
                where[topic].append(number)
        slots = list(alike.values())
        joined: dict[tuple[int, ...], list[int]] = {(number,): each for number, each in enumerate(slots)}
        found: dict[str, list[int]] = {}
        for topic, numbers in where.items():
            key = tuple(numbers)
            if key not in joined:
                joined[key] = sorted(chain.from_iterable([slots[number] for number in numbers]))
            found[topic] = joined[key]
        return found

    def assigned(self) -> Iterator[Assigned]:
        """All that have pieces or progress, sorted, with both."""
        checkpoints = self.checkpoints
        versions = None if checkpoints is None else checkpoints.all_versions()
        for topic, partition in self.partitions():
            of_topic = self.pieces.get(topic)
            pieces = () if of_topic is None else tuple(of_topic[partition])  # a copy (World.rows)
            kept = self.kept(topic, partition)
            if checkpoints is None or versions is None:
                yield Assigned(topic, partition, pieces, kept)
                continue
            key = (topic, partition)
            initial = None if kept is None or key in checkpoints.unset else kept.initial
            yield Assigned(topic, partition, pieces, kept, initial, versions.get(key, ()))

    def versions(self, key: Key) -> Sequence[Version]:
        """All versions of a partition's progress, ascending; none where the group takes no checkpoints (X2)."""
        return () if self.checkpoints is None else self.checkpoints.versions(key)

    def states(self, key: Key) -> list[KeyPiece]:
        """Where the state of a partition is saved that belongs to its progress: (lo, hi, checkpoint); 0: nowhere."""
        version = None if self.checkpoints is None else self.checkpoints.seen.get(key)
        return [(0, MAX_KEY_HASH, NOT_SAVED)] if version is None else version.states

    def partitions(self) -> list[tuple[str, int]]:
        """All that have pieces or progress, sorted."""
        names = sorted({*self.pieces, *self.progress})
        found: list[tuple[str, int]] = []
        for name in names:
            numbers = self.pieces[name].partitions() if name in self.pieces else []
            done = self.progress.get(name)
            found += [(name, number) for number in (sorted({*numbers, *done}) if done else numbers)]
        return found

    # -- members and what they report ------------------------------------------------------------------

    def beat(self, member: Member, log_time: int) -> None:
        """The member lives."""
        member.last_beat = log_time
        if member.watched < 0:
            self.late.discard(member.slot)
            self._watch(member)

    def add(self, member: Member) -> None:
        """Take in a newcomer: nothing is known of it but its slot and client."""
        self.members[member.slot] = member
        self.clients[member.client_id] = member

    def remove(self, slots: AbstractSet[int]) -> None:
        """These are members no longer; their pieces go with the next rebalance."""
        for slot in slots:
            member = self.members.pop(slot)
            del self.clients[member.client_id]
            self._take_back(slot, member.topics)
            if self.checkpoints is not None:
                self.checkpoints.forget_answer(slot)
        self.late -= slots

    def report(self, member: Member, topics: frozenset[str]) -> None:
        """These are the member's own topics from now on (G12)."""
        if topics not in self._views:
            self._views[topics] = (topics, set())
            for topic in topics:
                self.reports[topic] = self.reports.get(topic, 0) + 1
        before = member.topics
        member.topics, slots = self._views[topics]
        slots.add(member.slot)
        if before != topics:
            self._take_back(member.slot, before)

    def _take_back(self, slot: int, topics: frozenset[str]) -> None:
        _, slots = self._views.get(topics, (topics, {slot}))
        slots.discard(slot)
        if slots or topics not in self._views:  # a newcomer has reported nothing yet
            return
        del self._views[topics]
        for topic in topics:
            if self.reports[topic] == 1:
                del self.reports[topic]
            else:
                self.reports[topic] -= 1

    def renew(self, member: Member, session_timeout_ms: int, log_time: int) -> None:
        """The member beats, under this session timeout."""
        member.session_timeout_ms = session_timeout_ms
        self.beat(member, log_time)
        if member.deadline < member.watched:
            self._watch(member)

    def raise_counts(self, topics: Topics) -> bool:
        """Subscribed topics have at least these numbers of partitions (G12). Whether any has more now."""
        grown = False
        for topic, count in topics:
            if topic in self.reports and count > self.counts.get(topic, -1):
                self.counts[topic] = count
                grown = True
        return grown

    def restore_counts(self, counts: dict[str, int]) -> None:
        """These are the topics, with their numbers of partitions."""
        self.counts = counts
        self.weight = sum(max(1, count) for count in counts.values())

    def weight_after(self, leaving: AbstractSet[int], reported: Topics, raised: Topics = ()) -> int:
        """What the group's topics would count against MAX_GROUP_PARTITIONS (G11).

        If the members `leaving` took their topics with them, a member reported `reported`, and the counts of `raised`
        went up. A record may be rejected for this again and again: it costs what the leaving reported, and no more.
        """
        fewer: dict[str, int] = {}
        for topics in {self.members[slot].topics for slot in leaving}:
            if self._views[topics][1] <= leaving:
                for topic in topics:
                    fewer[topic] = fewer.get(topic, 0) + 1
        gone = {topic for topic, views in fewer.items() if views == self.reports[topic]}
        known, after = self.counts, dict[str, int]()
        for topic, count in reported:
            after[topic] = max(count, after.get(topic, 0), known.get(topic, 0))
        for topic, count in raised:
            if topic in after or (topic in known and topic not in gone):
                after[topic] = max(count, after.get(topic, 0), known.get(topic, 0))
        before = sum([max(1, known[topic]) for topic in gone | (known.keys() & after.keys())])
        return self.weight - before + sum([max(1, count) for count in after.values()])

    def size(self) -> int:
        """How many members, partitions with pieces or progress, holes, checkpoints and versions there are (S2)."""
        dated = 0 if self.checkpoints is None else self.checkpoints.size()
        return len(self.members) + len(self.partitions()) + self.hole_count() + dated

    def hole_count(self) -> int:
        """How many holes all its partitions have (any thread)."""
        kept = [each for of_topic in list(self.progress.values()) for each in list(of_topic.values())]
        return sum([len(holes) for each in kept if (holes := each.progress.holes) is not None])

    def _watch(self, member: Member) -> None:
        member.watched = member.deadline
        heappush(self._deadlines, (member.watched, member.slot))

    # -- the rebalance ---------------------------------------------------------------------------------

    def rebalance(self, generation: int, gone: AbstractSet[int]) -> None:
        """Compute all targets again, and hand over what can be (G16).

        `gone`: slots whose pieces go to their targets at once.
        """
        self.generation = generation
        self.restore_counts({topic: count for topic, count in self.counts.items() if topic in self.reports})
        if not self.members:
            self.strategy = None
            self.pieces.clear()
            return
        assert self.strategy is not None
        shared = set(self.settings.accept_range_fetch) if self.settings.accept_individual_commit else set[str]()
        targets = compute_targets(
            self.strategy,
            self.subscriptions(),
            self.counts,
            {slot for slot, member in self.members.items() if member.allow_key_share} if shared else set(),
            shared,
            {name: topic.before() for name, topic in self.pieces.items()},
            self._lowest_targets,
        )
        for name in [*self.counts, *(self.pieces.keys() - self.counts.keys())]:
            topic = self.pieces.get(name)
            if topic is None:
                topic = self.pieces[name] = TopicPieces()
            reconcile(topic, targets.get(name, []), gone, generation)
            if name not in self.counts and not topic.partitions():
                del self.pieces[name]

    def _lowest_targets(self, name: str) -> dict[int, int]:
        topic = self.pieces.get(name)
        return {} if topic is None else topic.lowest_targets()

    def keep(self, topic: str, partition: int) -> PartitionProgress:
        """The progress of a partition, which it has from now on."""
        of_topic = self.progress.setdefault(topic, {})
        kept = of_topic.get(partition)
        if kept is None:
            kept = of_topic[partition] = PartitionProgress()
        return kept

    def kept(self, topic: str, partition: int) -> PartitionProgress | None:
        """The progress of a partition, or None where it has none."""
        of_topic = self.progress.get(topic)
        return None if of_topic is None else of_topic.get(partition)

    def all_progress(self) -> Iterator[tuple[str, int, PartitionProgress]]:
        """(topic, partition, progress), sorted."""
        for topic in sorted(self.progress):
            for partition in sorted(self.progress[topic]):
                yield topic, partition, self.progress[topic][partition]


def pieces_of(group: Group, topic: str, partition: int) -> Sequence[Piece]:
    """The pieces of a partition, ascending; none if no member has it."""
    of_topic = group.pieces.get(topic)
    return () if of_topic is None else of_topic[partition]


def done_in(group: Group, topic: str, partition: int, lo: int, hi: int) -> int:
    """The largest offset up to which all is done for the keys lo … hi; −1: nothing is."""
    kept = group.kept(topic, partition)
    if kept is None:
        return NOTHING_DONE
    if kept.progress.pieces is None or (lo == 0 and hi == MAX_KEY_HASH):
        return kept.progress.stable
    return min(done for low, high, done in kept.progress.done_through if low <= hi and lo <= high)
