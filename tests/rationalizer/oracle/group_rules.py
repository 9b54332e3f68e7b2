"""The rules of section 5: G8 to G15, G19 and G21, each as a function from a group to a verdict.

E6 as far as the pause, and the kind (G1), are the world's; what comes here has passed them, and is at the group's
home (G2).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from tests.rationalizer.oracle.assigning import STRATEGIES, TopicPartition
from tests.rationalizer.oracle.groups import Group, Member, Piece, in_order, member_id_of, rebalance, tidy
from tests.rationalizer.oracle.keyed import KeyedProgress, commit_ranges, commit_through
from tests.rationalizer.oracle.layout import Judged
from tests.rationalizer.oracle.progress import LARGEST_HASH

MOST_MEMBERS = 1_000  # G11
MOST_PARTITIONS = 100_000  # G11


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


@dataclass(frozen=True)
class Verdict:
    """The effect of a record, and the group after it (None: the CP knows no such group)."""

    accepted: bool
    code: str
    group: Group | None
    member: str | None = None
    entries: tuple[str, ...] | None = None


def judge_at_home(group: Group | None, record: Judged, moment: Moment) -> Verdict:
    """Types 16 to 21."""
    if record.type == "JoinGroup":
        return join(group, record, moment)
    if record.type == "ConfigureGroup":
        return configure(group, record, moment)
    if record.type == "CommitOffsets" and record.fields[0] == "":
        return reposition(group, record, moment)
    # The rest is for a member alone: "no sender: UNKNOWN_CONSUMER" (G10, G13)
    sender = sender_of(group, record)
    if group is None or sender is None:
        return Verdict(False, "UNKNOWN_CONSUMER", group)
    if record.type == "TopicsChanged":
        return topics_changed(group, sender, record, moment)
    # G10: a generation above the group's, as it was before this record
    if record.fields[1] > group.generation:
        return Verdict(False, "ILLEGAL_GENERATION", group)
    if record.type == "LeaveGroup":
        return leave(group, sender, moment)
    if record.type == "GroupHeartbeat":
        return heartbeat(group, sender, record, moment)
    assert record.type == "CommitOffsets"
    return commit(group, sender, record, moment)


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


# G11: JoinGroup.


def join(known: Group | None, record: Judged, moment: Moment) -> Verdict:
    """G11, and the order of G9: the checks; the overdue go; the effect; one rebalance, if anything asks for it."""
    member_id, seen, session, strategy, *_ = record.fields
    group = known if known is not None else Group(record.group)
    sender = sender_of(known, record)
    if member_id != "" and sender is None:
        return Verdict(False, "UNKNOWN_CONSUMER", known)
    if member_id == "" and sender is not None and sender.instance != record.instance and sender.joined >= seen:
        return Verdict(False, "REPLACED", known)
    if strategy not in STRATEGIES:
        return Verdict(False, "UNKNOWN_PARTITIONING_STRATEGY", known)
    gone = gone_with(group, sender, moment.log_time)
    others = [member for member in group.members if member != sender and member not in gone]
    if others and group.strategy != strategy:
        return Verdict(False, "INCONSISTENT_PARTITIONING_STRATEGY", known)
    if session > group.settings.max_session_timeout_ms:
        return Verdict(False, "SESSION_TIMEOUT_TOO_HIGH", known)
    if len(others) >= MOST_MEMBERS:
        return Verdict(False, "GROUP_FULL", known)
    before = bury(group, sender, moment.log_time)
    joined = joining(sender, record, moment)
    after = replace(before.with_member(joined), strategy=strategy).with_counts(record.fields[6])
    if after.partitions_subscribed_to() + moment.other_partitions > MOST_PARTITIONS:
        return Verdict(False, "TOO_MANY_PARTITIONS", known)
    if is_the_same_join(before, after, sender, joined):
        if gone:
            after = rebalance(after, moment.offset)
        return Verdict(True, "ALREADY_MEMBER", after, joined.member_id)
    replaced = sender is not None and sender.instance != record.instance
    after = rebalance(after, moment.offset, joined.slot if replaced else None)
    return Verdict(True, "OK", after, joined.member_id)


def joining(sender: Member | None, record: Judged, moment: Moment) -> Member:
    """G11: a newcomer, a member that joins again, or one that is replaced; G6: slots and ids."""
    _, _, session, _, allow_key_share, pattern, topics = record.fields
    slot = moment.offset if sender is None else sender.slot
    member_id = member_id_of(record.group, moment.cp, moment.offset)
    if sender is not None and sender.instance == record.instance:  # joins again
        member_id = sender.member_id
    return Member(
        slot,
        member_id,
        record.client,
        record.instance,
        session,
        allow_key_share,
        pattern,
        tuple(in_order(topic for topic, _ in topics)),
        last_beat=moment.log_time,
        joined=moment.offset,
    )


def is_the_same_join(before: Group, after: Group, sender: Member | None, joined: Member) -> bool:
    """G11: the same instance, and strategy, session, allow_key_share, pattern, own topics and all counts as before."""
    if sender is None or sender.instance != joined.instance:
        return False
    if (before.strategy, dict(before.topics)) != (after.strategy, dict(after.topics)):
        return False
    return (sender.session_timeout_ms, sender.allow_key_share, sender.pattern, sender.topics) == (
        joined.session_timeout_ms,
        joined.allow_key_share,
        joined.pattern,
        joined.topics,
    )


# G13.


def topics_changed(group: Group, sender: Member, record: Judged, moment: Moment) -> Verdict:
    """G13; its order is that of JoinGroup (G9)."""
    reported = record.fields[1]
    gone = gone_with(group, sender, moment.log_time)
    before = bury(group, sender, moment.log_time)
    after = beaten(before, sender.slot, moment.log_time)
    if sender.pattern != "":
        own = tuple(in_order(topic for topic, _ in reported))
        after = after.with_member(replace(sender, topics=own, last_beat=moment.log_time))
    after = after.with_counts(reported)
    if after.partitions_subscribed_to() + moment.other_partitions > MOST_PARTITIONS:
        return Verdict(False, "TOO_MANY_PARTITIONS", group)
    own_before, own_after = before.member(sender.slot), after.member(sender.slot)
    assert own_before is not None
    assert own_after is not None
    changed = own_before.topics != own_after.topics or dict(before.topics) != dict(after.topics)
    if gone or changed:
        after = rebalance(after, moment.offset)
    return Verdict(True, "OK", after)


def leave(group: Group, sender: Member, moment: Moment) -> Verdict:
    """G13: removes the sender and asks for a rebalance; an older generation will do."""
    after = bury(group, sender, moment.log_time)
    after = after.without([member for member in after.members if member.slot == sender.slot])
    return Verdict(True, "OK", rebalance(after, moment.offset))


def after_the_overdue(group: Group, sender: Member, moment: Moment) -> Group:
    """G9, types 17 and 19: the overdue go, with a rebalance if there were any; the sender has beaten."""
    after = bury(group, sender, moment.log_time)
    if gone_with(group, sender, moment.log_time):
        after = rebalance(after, moment.offset)
    return beaten(after, sender.slot, moment.log_time)


def heartbeat(group: Group, sender: Member, record: Judged, moment: Moment) -> Verdict:
    """G13: OK if its generation is the group's by now; accepted all the same."""
    after = after_the_overdue(group, sender, moment)
    code = "OK" if record.fields[1] == after.generation else "ILLEGAL_GENERATION"
    return Verdict(True, code, after)


# G14, G15: CommitOffsets of a member.


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


def commit(group: Group, sender: Member, record: Judged, moment: Moment) -> Verdict:
    """G14: the entries in order, each against what those before it left."""
    _, generation, in_order_, entries = record.fields
    after = after_the_overdue(group, sender, moment)
    codes = []
    for fields in entries:
        entry = Entry(*fields)
        code, after = commit_entry(after, sender.slot, generation, in_order_, entry)
        codes.append(code)
    return Verdict(True, code_of_all(codes), after, entries=tuple(codes))


ACCEPTED = ("OK", "OFFSET_REGRESSION", "DUPLICATE_COMMIT", "REPOSITIONED")


def code_of_all(codes: Collection[str]) -> str:
    """G14: OK if all entries are accepted, else PARTIAL."""
    return "OK" if all(code in ACCEPTED for code in codes) else "PARTIAL"


def commit_entry(group: Group, slot: int, generation: int, in_order_: bool, entry: Entry) -> tuple[str, Group]:
    """G14: one entry."""
    if entry.action == 2:
        return start_entry(group, slot, generation, entry)
    touched = [
        piece for piece in group.pieces.get(entry.place, ()) if piece.low <= entry.high and entry.low <= piece.high
    ]
    if not all_keys_are_owned(touched, slot, entry.low, entry.high):
        return "NOT_ASSIGNED", group
    if any(piece.since > generation for piece in touched):
        return "ILLEGAL_GENERATION", group
    if entry.action == 1 and any(piece.revoked is not None and piece.revoked > generation for piece in touched):
        return "ILLEGAL_GENERATION", group
    known = group.progress.get(entry.place)
    before = known if known is not None else KeyedProgress()
    code, after = "OK", before
    most = group.settings.max_individual_commits
    if entry.ranges:
        allowed = group.settings.accept_individual_commit
        code, after = commit_ranges(before, entry.ranges, allowed, in_order_, most)
    elif entry.through is not None:
        code, after = commit_through(before, entry.low, entry.high, entry.through, most)
    if code not in ACCEPTED:
        return code, group
    group = with_progress(group, entry, after.noted(entry.metadata))
    return code, let_go(group, touched, entry) if entry.action == 1 else group


def all_keys_are_owned(touched: Collection[Piece], slot: int, low: int, high: int) -> bool:
    """G14: whether every key of low … high has the sender as owner."""
    following = low
    for piece in sorted(touched):
        if piece.low > following or piece.owner != slot:
            return False
        following = piece.high + 1
    return following > high


def start_entry(group: Group, slot: int, generation: int, entry: Entry) -> tuple[str, Group]:
    """G14, action 2."""
    mine = [piece for piece in group.pieces.get(entry.place, ()) if piece.owner == slot]
    if not mine:
        return "NOT_ASSIGNED", group
    if not any(piece.since <= generation for piece in mine):
        return "ILLEGAL_GENERATION", group
    if entry.place in group.progress:
        return "ALREADY_STARTED", group
    assert entry.through is not None
    return "OK", with_progress(group, entry, KeyedProgress().started(entry.through).noted(entry.metadata))


def with_progress(group: Group, entry: Entry, progress: KeyedProgress) -> Group:
    """G14: a partition has progress from its first accepted start, through, ranges or metadata on."""
    says_nothing = entry.through is None and not entry.ranges and entry.metadata is None
    if says_nothing and entry.place not in group.progress:
        return group
    return replace(group, progress={**group.progress, entry.place: progress})


def let_go(group: Group, touched: Collection[Piece], entry: Entry) -> Group:
    """G14, action 1: each of the touched pieces that is revoked and lies within [lo, hi] goes to its target."""
    kept = []
    for piece in group.pieces[entry.place]:
        within = entry.low <= piece.low and piece.high <= entry.high
        if piece not in touched or piece.revoked is None or not within:
            kept.append(piece)  # "all else stays"
        elif piece.target is not None:  # "it vanishes if it has none"
            kept.append(Piece(piece.low, piece.high, piece.target, group.generation, piece.target, None))
    pieces = {**group.pieces, entry.place: tidy(kept)}
    return replace(group, pieces={place: parts for place, parts in pieces.items() if parts})


# G19, G21, C16.


def configure(known: Group | None, record: Judged, moment: Moment) -> Verdict:
    """G19; type 21 buries no member (G8)."""
    before = known if known is not None else Group(record.group)
    settings: dict[str, Any] = record.fields[0]
    after = replace(before, settings=before.settings.changed(settings))
    changed = (before.settings.accept_individual_commit, before.settings.accept_range_fetch) != (
        after.settings.accept_individual_commit,
        after.settings.accept_range_fetch,
    )
    if changed and after.members:
        after = rebalance(after, moment.offset)
    return Verdict(True, "OK", after)


def reposition(known: Group | None, record: Judged, moment: Moment) -> Verdict:
    """G21: CommitOffsets with member_id ""."""
    if not moment.pausing:
        return Verdict(False, "UNKNOWN_CONSUMER", known)
    group = known if known is not None else Group(record.group)
    overdue = [member for member in group.members if member.is_overdue(moment.log_time)]
    if len(overdue) < len(group.members):
        return Verdict(False, "GROUP_ACTIVE", known)
    if overdue:
        group = rebalance(group.without(overdue), moment.offset)
    codes = []
    for fields in record.fields[3]:
        code, group = reposition_entry(group, Entry(*fields))
        codes.append(code)
    return Verdict(True, code_of_all(codes), group, entries=tuple(codes))


def reposition_entry(group: Group, entry: Entry) -> tuple[str, Group]:
    """G21: one entry; through replaces the progress, as in C11."""
    if entry.action != 0 or (entry.low, entry.high) != (0, LARGEST_HASH) or entry.ranges:
        return "NOT_ASSIGNED", group
    before = group.progress.get(entry.place, KeyedProgress())
    after = before if entry.through is None else before.repositioned(entry.through)
    # C11: REPOSITIONED "where done_through, ranges or granted changed by it, else OK"
    code = "OK" if (before.through, before.ranges) == (after.through, after.ranges) else "REPOSITIONED"
    return code, with_progress(group, entry, after.noted(entry.metadata))


def may_be_forgotten(group: Group, moment: Moment) -> bool:
    """C16, of a coordinated group."""
    return moment.pausing and all(member.is_overdue(moment.log_time) for member in group.members)
