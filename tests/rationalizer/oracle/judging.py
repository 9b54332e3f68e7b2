"""What the rules of coordinated groups share: a record's moment and verdict, its sender, the overdue, and entries."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from tests.rationalizer.oracle.assigning import TopicPartition
from tests.rationalizer.oracle.groups import Group, Member, Piece, Settings
from tests.rationalizer.oracle.keyed import KeyedProgress, commit_ranges, commit_through
from tests.rationalizer.oracle.layout import Judged


@dataclass(frozen=True)
class Moment:
    """A record's place in the log, and what its rules need of the rest of the CP."""

    cp: int
    offset: int
    log_time: int
    #: Partitions that the other groups of this CP subscribe to (G11).
    other_partitions: int = 0
    #: Whether the record's client_id has the group paused in this CP (C10, G21).
    pausing: bool = False
    level: int = 1


@dataclass(frozen=True)
class Verdict:
    """The effect of a record, and the group after it (None: the CP knows no such group)."""

    accepted: bool
    code: str
    group: Group | None
    member: str | None = None
    entries: tuple[str, ...] | None = None


def sender_of(group: Group | None, record: Judged) -> Member | None:
    """G6."""
    if group is None:
        return None
    member_id = record.fields[0]
    for member in group.members:
        if record.type == "JoinGroup" and member_id == "":
            if member.client == record.client:
                return member
        elif (member.member_id, member.client, member.instance) == (member_id, record.client, record.instance):
            return member
    return None


# G8, G9: the overdue.


def whole_group_is_late(group: Group, sender: Member | None, now: int) -> bool:
    """G8: every member is overdue and the sender is one of them."""
    return sender is not None and all(member.is_overdue(now) for member in group.members)


def gone_with(group: Group, sender: Member | None, now: int) -> list[Member]:
    """G8: the members as though gone when a record of `sender` (None: of no member) is judged."""
    if whole_group_is_late(group, sender, now):
        return []
    return [member for member in group.members if member.is_overdue(now) and member != sender]


def bury(group: Group, sender: Member | None, now: int) -> Group:
    """G9: the overdue go; the rebalance is the caller's. If none goes since all are late: all beats now."""
    if whole_group_is_late(group, sender, now):
        return replace(group, members=tuple(replace(member, last_beat=now) for member in group.members))
    return group.without(gone_with(group, sender, now))


def beaten(group: Group, slot: int, now: int) -> Group:
    """G9: the sender's last beat is the log time (unless it left)."""
    sender = group.member(slot)
    assert sender is not None
    return group.with_member(replace(sender, last_beat=now))


# G14: entries.


@dataclass(frozen=True)
class Entry:
    """One of type 19."""

    topic: str
    partition: int
    low: int
    high: int
    action: int
    through: int | None
    ranges: list[list[int]]
    metadata: str | None

    @property
    def place(self) -> TopicPartition:
        """The partition that it is about."""
        return (self.topic, self.partition)


ACCEPTED = ("OK", "OFFSET_REGRESSION", "DUPLICATE_COMMIT", "REPOSITIONED")


def code_of_all(codes: Collection[str]) -> str:
    """G14: OK if all entries are accepted, else PARTIAL."""
    return "OK" if all(code in ACCEPTED for code in codes) else "PARTIAL"


def touched_by(group: Group, entry: Entry) -> list[Piece]:
    """The pieces that have a key of [lo, hi]."""
    pieces = group.pieces.get(entry.place, ())
    return [piece for piece in pieces if piece.low <= entry.high and entry.low <= piece.high]


def refusal_of(group: Group, slot: int, generation: int, entry: Entry) -> str | None:
    """G14: why an entry with action 0 or 1 is rejected whatever it says."""
    touched = touched_by(group, entry)
    if not all_keys_are_owned(touched, slot, entry.low, entry.high):
        return "NOT_ASSIGNED"
    if any(piece.since > generation for piece in touched):
        return "ILLEGAL_GENERATION"
    if entry.action == 1 and any(piece.revoked is not None and piece.revoked > generation for piece in touched):
        return "ILLEGAL_GENERATION"
    return None


def progress_after(
    before: KeyedProgress, settings: Settings, in_order: bool, entry: Entry
) -> tuple[str, KeyedProgress]:
    """G14: what an entry's through or ranges do, and the code; metadata aside."""
    most = settings.max_individual_commits
    if entry.ranges:
        return commit_ranges(before, entry.ranges, settings.accept_individual_commit, in_order, most)
    if entry.through is not None:
        return commit_through(before, entry.low, entry.high, entry.through, most)
    return "OK", before


def all_keys_are_owned(touched: Collection[Piece], slot: int, low: int, high: int) -> bool:
    """G14: whether every key of low … high has the sender as owner."""
    following = low
    for piece in sorted(touched):
        if piece.low > following or piece.owner != slot:
            return False
        following = piece.high + 1
    return following > high
