"""The state of a coordinated group (G3, G4, G12), and its rebalance (G16).

A group is a plain value; each change returns another one.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from tests.rationalizer.oracle.assigning import Part, Question, TopicPartition, targets_of
from tests.rationalizer.oracle.checkpoints import (
    Checkpoints,
    checkpoints_row,
    shown_checkpoints,
    shown_versions,
    version_rows,
)
from tests.rationalizer.oracle.keyed import KeyedProgress
from tests.rationalizer.oracle.layout import HIGHEST_LEVEL, added_to_groups
from tests.rationalizer.oracle.progress import LARGEST_HASH

MEMBER_IDS = uuid.UUID("6ba7b812-9dad-11d1-80b4-00c04fd430c8")  # G6


@dataclass(frozen=True)
class Settings:
    """G19."""

    accept_individual_commit: bool = True
    accept_range_fetch: tuple[str, ...] = ()
    max_session_timeout_ms: int = 1_800_000
    max_individual_commits: int = 60_000
    #: R5.
    strategy: str | None = None

    def changed(self, settings: Mapping[str, Any]) -> Settings:
        """Missing keys stay as they are; topics are a set, here in their canonical order."""
        known = dict(settings)
        if "accept_range_fetch" in known:
            known["accept_range_fetch"] = tuple(in_order(known["accept_range_fetch"]))
        return replace(self, **known)


@dataclass(frozen=True)
class Member:
    """G3."""

    slot: int
    member_id: str
    client: str
    instance: str
    session_timeout_ms: int
    allow_key_share: bool
    pattern: str
    topics: tuple[str, ...]  # its own (G12), in canonical order
    last_beat: int
    joined: int

    def is_overdue(self, now: int) -> bool:
        """G8."""
        return now - self.last_beat > self.session_timeout_ms


class Piece(NamedTuple):
    """G4; None for no target, and for not revoked."""

    low: int
    high: int
    owner: int
    since: int
    target: int | None
    revoked: int | None


@dataclass(frozen=True)
class Group:
    """G3; a mark (G2) is a group like any other without members."""

    name: str
    generation: int = 0
    strategy: str | None = None
    settings: Settings = Settings()
    topics: Mapping[str, int] = field(default_factory=dict)
    members: tuple[Member, ...] = ()  # by slot
    pieces: Mapping[TopicPartition, tuple[Piece, ...]] = field(default_factory=dict)
    progress: Mapping[TopicPartition, KeyedProgress] = field(default_factory=dict)
    #: What levels above 2 added, by name; what is not in it has its default.
    added: Mapping[str, Any] = field(default_factory=dict)
    #: X1; None: it takes none. Then `progress` is what its newest checkpoint sees.
    checkpoints: Checkpoints | None = None
    #: Only within a record, between the closing of a barrier (X6) and the rebalance: what counts as having no owner,
    #: and the slots of those that left at the barrier.
    let_go: frozenset[tuple[TopicPartition, Piece]] = frozenset()
    left: frozenset[int] = frozenset()

    def asks_for_a_rebalance(self) -> bool:
        """X6: (3) or (4) found something."""
        return bool(self.let_go or self.left)

    def all_pieces(self) -> list[Piece]:
        """Of all partitions."""
        return [piece for pieces in self.pieces.values() for piece in pieces]

    def without_answer(self, slot: int) -> Group:
        """X3: an answer goes with its member when that is replaced."""
        known = self.checkpoints
        if known is None or known.barrier is None:
            return self
        answers = {other: given for other, given in known.barrier.answers.items() if other != slot}
        return replace(self, checkpoints=replace(known, barrier=replace(known.barrier, answers=answers)))

    def member(self, slot: int) -> Member | None:
        """The member with this slot."""
        return next((member for member in self.members if member.slot == slot), None)

    def with_member(self, changed: Member) -> Group:
        """`changed` in place of the member with its slot, or added."""
        others = [member for member in self.members if member.slot != changed.slot]
        return replace(self, members=tuple(sorted([*others, changed], key=lambda member: member.slot)))

    def without(self, gone: Collection[Member]) -> Group:
        """The members that are not gone; nothing else changes before the rebalance."""
        return replace(self, members=tuple(member for member in self.members if member not in gone))

    def subscribes(self, member: Member, topic: str) -> bool:
        """G12: its own topics; with a pattern, the union of what the members with the same pattern reported."""
        if topic in member.topics:
            return True
        if member.pattern == "":
            return False
        return any(topic in other.topics for other in self.members if other.pattern == member.pattern)

    def subscribers(self, topic: str) -> list[int]:
        """Slots, ascending."""
        return [member.slot for member in self.members if self.subscribes(member, topic)]

    def is_subscribed(self, topic: str) -> bool:
        """G12: some member subscribes to it. A topic that a member reported is in a member's own topics."""
        return any(topic in member.topics for member in self.members)

    def with_counts(self, reported: Iterable[list[Any]]) -> Group:
        """G12, G13: counts of topics that are subscribed to now never shrink; others are ignored."""
        counts = dict(self.topics)
        for topic, count in reported:
            if self.is_subscribed(topic):
                counts[topic] = max(counts.get(topic, 0), count)
        return replace(self, topics=counts)

    def partitions_subscribed_to(self) -> int:
        """G11: what counts towards TOO_MANY_PARTITIONS; a topic without partitions counts as one."""
        return sum(max(1, count) for topic, count in self.topics.items() if self.is_subscribed(topic))

    def state(self, now: int) -> str:
        """G7."""
        if not self.members:
            return "READY"
        revoked = any(piece.revoked is not None for pieces in self.pieces.values() for piece in pieces)
        if revoked or any(member.is_overdue(now) for member in self.members):
            return "PREPARE_FOR_REBALANCE"
        return "STEADY"

    def places(self) -> list[TopicPartition]:
        """S1: partitions with pieces or progress, in canonical order."""
        known = [place for place, pieces in self.pieces.items() if pieces] + list(self.progress)
        return sorted(set(known), key=lambda place: (place[0].encode(), place[1]))


def in_order(topics: Iterable[str]) -> list[str]:
    """S1: strings by UTF-8 bytes, each once."""
    return sorted(set(topics), key=lambda topic: topic.encode())


def member_id_of(group: str, cp: int, offset: int) -> str:
    """G6: of a newcomer whose JoinGroup stands there."""
    return f"{group}-{uuid.uuid5(MEMBER_IDS, f'{cp}:{offset}')}"


# Pieces (G4, G16).


def tidy(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """G4: in order, and neighbours that are equal in all four as one."""
    kept: list[Piece] = []
    for piece in sorted(pieces):
        if kept and kept[-1].high + 1 == piece.low and kept[-1][2:] == piece[2:]:
            kept[-1] = kept[-1]._replace(high=piece.high)
        else:
            kept.append(piece)
    return tuple(kept)


def the_same_for_every_key(pieces: Iterable[Piece], what: str) -> int | None:
    """The slot that is the owner (or target) of every key, if there is one."""
    covered, found = -1, set[int | None]()
    for piece in sorted(pieces):
        if piece.low != covered + 1:
            return None  # a key without a piece
        covered = piece.high
        found.add(getattr(piece, what))
    return found.pop() if covered == LARGEST_HASH and len(found) == 1 else None


def rebalance(group: Group, offset: int, replaced: int | None = None, all_go_back: bool = False) -> Group:
    """G16, at `offset`; `replaced` is the slot of a member that this record replaced (G11).

    all_go_back: it is a reset (X7) in any case; else where a hold group has lost a member.
    """
    all_go_back = all_go_back or is_reset(group, replaced)
    let_go, group = group.let_go, replace(group, let_go=frozenset(), left=frozenset())
    # "generation = r; G12's forgetting"
    topics = {topic: count for topic, count in group.topics.items() if group.is_subscribed(topic)}
    group = replace(group, generation=offset, topics=topics)
    # "Without members: strategy nil, no pieces."
    if not group.members:
        return replace(group, strategy=None, pieces={})
    # "from members, topics, settings, and pieces as they were"
    targets = targets_of(question_of(group, let_go))
    slots = {member.slot for member in group.members}
    pieces = {}
    for place in {*group.pieces, *targets}:
        mine = group.pieces.get(place, ())
        # X7: a reset is as if no member owned a piece; X6: what was handed in counts as having no owner
        owned = [piece for piece in mine if not all_go_back and (place, piece) not in let_go]
        parts = cut(owned, targets.get(place, []))
        kept = [part for part in (reassigned(*part, slots, offset, replaced) for part in parts) if part is not None]
        if kept:
            pieces[place] = tidy(kept)
    return replace(group, pieces=pieces)


def is_reset(group: Group, replaced: int | None) -> bool:
    """X7: in a hold group a member that owns a piece was removed, other than by X6, or replaced."""
    if group.checkpoints is None or not group.checkpoints.hold:
        return False
    slots = {member.slot for member in group.members}
    return any(
        piece.owner == replaced or (piece.owner not in slots and piece.owner not in group.left)
        for place, pieces in group.pieces.items()
        for piece in pieces
        if (place, piece) not in group.let_go
    )


def question_of(group: Group, let_go: Collection[tuple[TopicPartition, Piece]]) -> Question:
    """What the targets are computed from; `let_go` are those that count as having no owner (X6)."""
    targets, owners, any_targets = {}, {}, {}
    for place, pieces in group.pieces.items():
        target, owner = the_same_for_every_key(pieces, "target"), the_same_for_every_key(pieces, "owner")
        if target is not None:
            targets[place] = target
        if owner is not None and not any((place, piece) in let_go for piece in pieces):
            owners[place] = owner
        any_targets[place] = {piece.target for piece in pieces if piece.target is not None}
    assert group.strategy is not None
    return Question(
        strategy=group.strategy,
        subscribers={topic: group.subscribers(topic) for topic in in_order(group.topics)},
        counts=group.topics,
        opted_in={member.slot for member in group.members if member.allow_key_share},
        shared=group.settings.accept_range_fetch if group.settings.accept_individual_commit else (),
        targets=targets,
        owners=owners,
        any_targets=any_targets,
    )


def cut(pieces: Iterable[Piece], targets: Iterable[Part]) -> list[tuple[int, int, Piece | None, int | None]]:
    """G16: the parts into which owners and targets cut a partition: lo, hi, the piece and the target there."""
    pieces, targets = list(pieces), list(targets)
    edges = {0, LARGEST_HASH + 1}
    for low, high in [piece[:2] for piece in pieces] + [part[:2] for part in targets]:
        edges |= {low, high + 1}
    parts = []
    ordered = sorted(edges)
    for low, after in pairwise(ordered):
        piece = next((piece for piece in pieces if piece.low <= low <= piece.high), None)
        target = next((slot for first, last, slot in targets if first <= low <= last), None)
        parts.append((low, after - 1, piece, target))
    return parts


def reassigned(
    low: int,
    high: int,
    piece: Piece | None,
    target: int | None,
    slots: Collection[int],
    generation: int,
    replaced: int | None,
) -> Piece | None:
    """G16: one part after the rebalance; None: it vanishes, or there was and is nothing."""
    # "a part without an owner, or whose owner was removed → the target becomes owner (no target: the part vanishes)"
    if piece is None or piece.owner not in slots:
        return None if target is None else Piece(low, high, target, generation, target, None)
    # G11: "what the rebalance lets it keep gets since = this generation, all else goes to the targets at once"
    if piece.owner == replaced:
        return None if target is None else Piece(low, high, target, generation, target, None)
    # "owner = target → revoked none, since as it was"
    if piece.owner == target:
        return Piece(low, high, piece.owner, piece.since, target, None)
    # "else revoked as it was if it had one, else r"
    revoked = generation if piece.revoked is None else piece.revoked
    return Piece(low, high, piece.owner, piece.since, target, revoked)


# S1 and D3.


def _or_minus_one(number: int | None) -> int:
    return -1 if number is None else number


def added_row(group: Group, level: int) -> list[Any]:
    """What later levels added, without the defaults at its end."""
    fields = added_to_groups(level)
    row = [group.added.get(name, default) for name, (default, _) in fields.items()]
    defaults = [default for default, _ in fields.values()]
    while row and row[-1] == defaults[len(row) - 1]:
        row.pop()
    return row


def canonical(group: Group, level: int = HIGHEST_LEVEL) -> list[Any]:
    """S1."""
    settings = group.settings
    members = [
        [
            *(member.slot, member.member_id, member.client, member.instance),
            *(member.session_timeout_ms, member.allow_key_share, member.pattern),
            *(list(member.topics), member.last_beat, member.joined),
        ]
        for member in group.members
    ]
    partitions = []
    for topic, number in group.places():
        pieces = [
            [piece.low, piece.high, piece.owner, piece.since, _or_minus_one(piece.target), _or_minus_one(piece.revoked)]
            for piece in group.pieces.get((topic, number), ())
        ]
        progress = group.progress.get((topic, number))
        if group.checkpoints is not None:
            partitions.append([topic, number, pieces, *version_rows(group.checkpoints, (topic, number))])
        else:
            partitions.append([topic, number, pieces, None if progress is None else progress.canonical(level)])
    return [
        group.name,
        group.generation,
        group.strategy,
        [
            settings.accept_individual_commit,
            list(settings.accept_range_fetch),
            settings.max_session_timeout_ms,
            settings.max_individual_commits,
            *([settings.strategy] if level >= 5 else []),
        ],
        [[topic, group.topics[topic]] for topic in in_order(group.topics)],
        members,
        partitions,
        *added_row(group, level),
        *([] if group.checkpoints is None else [checkpoints_row(group.checkpoints)]),
    ]


def _or_null(number: int) -> int | None:
    return None if number == -1 else number


def shown(cp: int, group: Group, now: int) -> dict[str, Any]:
    """D3; `now` is the CP's log time."""
    members = [
        {
            "slot": member.slot,
            "member": member.member_id,
            "client": member.client,
            "instance": member.instance,
            "session_timeout_ms": member.session_timeout_ms,
            "allow_key_share": member.allow_key_share,
            "pattern": member.pattern,
            "topics": list(member.topics),
            "last_beat": member.last_beat,
            "overdue": member.is_overdue(now),
            "joined": member.joined,
        }
        for member in group.members
    ]
    settings = group.settings
    return {
        "partition": cp,
        "group": group.name,
        "state": group.state(now),
        "generation": group.generation,
        "strategy": group.strategy,
        "settings": {
            "accept_individual_commit": settings.accept_individual_commit,
            "accept_range_fetch": list(settings.accept_range_fetch),
            "max_session_timeout_ms": settings.max_session_timeout_ms,
            "max_individual_commits": settings.max_individual_commits,
            **({} if settings.strategy is None else {"strategy": settings.strategy}),
        },
        "topics": {topic: group.topics[topic] for topic in in_order(group.topics)},
        "members": members,
        "partitions": [_shown_partition(group, place) for place in group.places()],
        **({} if group.checkpoints is None else {"checkpoints": shown_checkpoints(group.checkpoints)}),
        **{name: value for name, value in group.added.items() if value != added_to_groups(HIGHEST_LEVEL)[name][0]},
    }


def _shown_partition(group: Group, place: TopicPartition) -> dict[str, Any]:
    progress = group.progress.get(place)
    shown_progress = None
    if progress is not None:
        shown_progress = {
            "initial": _or_null(progress.initial),
            "stable": _or_null(progress.stable),
            "done_through": [[low, high, _or_null(offset)] for low, high, offset in progress.through],
            "ranges": [list(span) for span in progress.ranges],
            "metadata": progress.metadata,
            **({"holes": [hole.shown() for hole in progress.holes]} if progress.holes else {}),
            **({} if progress.again == -1 else {"again": progress.again}),
        }
    return {
        "topic": place[0],
        "topic_partition": place[1],
        "pieces": [list(piece) for piece in group.pieces.get(place, ())],
        "progress": shown_progress,
        **({} if group.checkpoints is None else {"versions": shown_versions(group.checkpoints, place)}),
    }
