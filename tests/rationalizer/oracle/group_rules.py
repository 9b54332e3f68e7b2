"""The rules of section 5: G11 to G15, G19 and G21, each as a function from a group to a verdict.

E6 as far as the pause, and the kind (G1), are the world's; what comes here has passed them, and is at the group's
home (G2).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from tests.rationalizer.oracle.assigning import STRATEGIES, TopicPartition
from tests.rationalizer.oracle.checkpoint_rules import (
    after_the_barrier,
    answer,
    begin,
    keep,
    roll_back,
    set_positions,
    settled,
)
from tests.rationalizer.oracle.groups import Group, Member, Piece, in_order, member_id_of, rebalance, tidy
from tests.rationalizer.oracle.holes import Settler, settle
from tests.rationalizer.oracle.judging import (
    ACCEPTED,
    Entry,
    Moment,
    Verdict,
    beaten,
    bury,
    code_of_all,
    gone_with,
    progress_after,
    refusal_of,
    sender_of,
    touched_by,
)
from tests.rationalizer.oracle.keyed import KeyedProgress
from tests.rationalizer.oracle.layout import Judged
from tests.rationalizer.oracle.progress import LARGEST_HASH

MOST_MEMBERS = 1_000  # G11
MOST_PARTITIONS = 100_000  # G11


def judge_at_home(group: Group | None, record: Judged, moment: Moment) -> Verdict:
    """Types 16 to 21, and 23, 24, 25 and 27; X3 comes first."""
    verdict = judge_after_the_barrier(after_the_barrier(group, record, moment), record, moment)
    if not verdict.accepted or verdict.group is None:
        return replace(verdict, group=group)
    assert not verdict.group.asks_for_a_rebalance()
    return replace(verdict, group=settled(verdict.group))


def judge_after_the_barrier(group: Group | None, record: Judged, moment: Moment) -> Verdict:
    """On the state after X3."""
    if record.type == "BeginCheckpoint":
        return begin(group, record, moment)
    if record.type == "AnswerBarrier":
        return answer(group, record, moment)
    if record.type == "Rollback":
        return roll_back(group, record, moment)
    if record.type == "KeepCheckpoint":
        return keep(group, record)
    if record.type == "JoinGroup":
        return join(group, record, moment)
    if record.type == "ConfigureGroup":
        return configure(group, record, moment)
    if record.type == "CommitOffsets" and record.fields[0] == "":
        return reposition(group, record, moment)
    if record.type == "SettleOffsets":
        if group is None:
            return Verdict(False, "UNKNOWN_CONSUMER", group)
        if group.checkpoints is not None:
            return Verdict(False, "WRONG_MODE", group)
        if record.fields[0] == "":
            return settle_of_an_operator(group, record, moment)
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
    if record.type == "SettleOffsets":
        return settle_of_a_member(group, sender, record, moment)
    assert record.type == "CommitOffsets"
    return commit(group, sender, record, moment)


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
    if group.settings.strategy is not None:  # R6
        strategy = group.settings.strategy
    elif others and group.strategy != strategy:
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
        if gone or after.asks_for_a_rebalance():
            after = rebalance(after, moment.offset)
        return Verdict(True, "ALREADY_MEMBER", after, joined.member_id)
    replaced = sender is not None and sender.instance != record.instance
    if replaced:
        after = after.without_answer(joined.slot)
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
    if gone or changed or after.asks_for_a_rebalance():
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
    if gone_with(group, sender, moment.log_time) or after.asks_for_a_rebalance():
        after = rebalance(after, moment.offset)
    return beaten(after, sender.slot, moment.log_time)


def heartbeat(group: Group, sender: Member, record: Judged, moment: Moment) -> Verdict:
    """G13: OK if its generation is the group's by now; accepted all the same."""
    after = after_the_overdue(group, sender, moment)
    code = "OK" if record.fields[1] == after.generation else "ILLEGAL_GENERATION"
    return Verdict(True, code, after)


# G14, G15: CommitOffsets of a member.


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


def commit_entry(group: Group, slot: int, generation: int, in_order_: bool, entry: Entry) -> tuple[str, Group]:
    """G14: one entry."""
    if entry.action == 2:
        return start_entry(group, slot, generation, entry)
    if group.checkpoints is not None:  # X10, "before G14's checks"
        return "NO_SUCH_BARRIER", group
    touched = touched_by(group, entry)
    refused = refusal_of(group, slot, generation, entry)
    if refused is not None:
        return refused, group
    before = group.progress.get(entry.place, KeyedProgress())
    code, after = progress_after(before, group.settings, in_order_, entry)
    if code not in ACCEPTED:
        return code, group
    group = with_progress(group, entry, after.noted(entry.metadata))
    return code, let_go(group, touched, entry) if entry.action == 1 else group


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
    if group.checkpoints is not None:  # X2: "sets `initial` and nothing else (its metadata is ignored)"
        initial = {**group.checkpoints.initial, entry.place: entry.through}
        return "OK", settled(replace(group, checkpoints=replace(group.checkpoints, initial=initial)))
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


# H4.


def settle_of_a_member(group: Group, sender: Member, record: Judged, moment: Moment) -> Verdict:
    """H4, G9: a beat, and the overdue go; then the entries."""
    _, generation, seen, topic, partition, *entries = record.fields
    group = after_the_overdue(group, sender, moment)
    pieces = group.pieces.get((topic, partition), ())
    mine = [piece for piece in pieces if piece.owner == sender.slot]

    def refuses(hashes: Sequence[int], makes: bool) -> str | None:
        having = [[piece for piece in mine if piece.low <= key_hash <= piece.high] for key_hash in hashes]
        if not all(having):
            return "NOT_ASSIGNED"
        if any(piece.since > generation for some in having for piece in some):
            return "ILLEGAL_GENERATION"
        if makes and not group.settings.accept_individual_commit:
            return "INDIVIDUAL_COMMIT_NOT_ALLOWED"
        return None

    keys = [(piece.low, piece.high) for piece in mine] or [(0, LARGEST_HASH)]
    by = Settler(
        lambda _: True, lambda key_hash: key_hash is not None, min(seen, moment.offset), moment.offset, keys, refuses
    )
    codes, after = settle_entries(group, (topic, partition), entries, by)
    return Verdict(True, "OK" if all(settles(code) for code in codes) else "PARTIAL", after, entries=codes)


def settle_of_an_operator(group: Group, record: Judged, moment: Moment) -> Verdict:
    """H4, with ""; the pausing client makes holes, too, while the group has no member."""
    _, _, seen, topic, partition, *entries = record.fields
    may_make = moment.pausing and not group.members
    by = Settler(
        lambda _: True,
        lambda key_hash: may_make and key_hash is not None,
        min(seen, moment.offset),
        moment.offset,
    )
    if record.version >= 5:  # R2: "where the key hash is nil, if the record is a 28"
        by = replace(by, redoes=lambda _, key_hash: key_hash is not None)
    codes, after = settle_entries(group, (topic, partition), entries, by)
    if not any(map(settles, codes)):
        return Verdict(False, "FENCED", group, entries=codes)
    return Verdict(True, "OK" if all(map(settles, codes)) else "PARTIAL", after, entries=codes)


def settles(code: str) -> bool:
    """Whether an entry with this code is accepted."""
    return code in ("OK", "DUPLICATE_COMMIT")


def settle_entries(
    group: Group, place: TopicPartition, entries: list[list[Any]], by: Settler
) -> tuple[tuple[str, ...], Group]:
    """H3; "a hole gives its partition progress, as ranges do"."""
    before = group.progress.get(place, KeyedProgress())
    done, open_, parked = entries
    codes, after = settle(before, done, open_, parked, by)
    if after == before:
        return codes, group
    return codes, replace(group, progress={**group.progress, place: after})


# G19, G21, C16.


def configure(known: Group | None, record: Judged, moment: Moment) -> Verdict:
    """G19; type 21 buries no member (G8)."""
    if names_no_strategy(record):
        return Verdict(False, "UNKNOWN_PARTITIONING_STRATEGY", known)
    before = known if known is not None else Group(record.group)
    settings: dict[str, Any] = record.fields[0]
    after = replace(before, settings=before.settings.changed(settings))
    changed = (before.settings.accept_individual_commit, before.settings.accept_range_fetch) != (
        after.settings.accept_individual_commit,
        after.settings.accept_range_fetch,
    )
    if after.members and after.settings.strategy not in (None, after.strategy):  # R7
        after, changed = replace(after, strategy=after.settings.strategy), True
    if changed and after.members:
        after = rebalance(after, moment.offset)
    return Verdict(True, "OK", after)


def names_no_strategy(record: Judged) -> bool:
    """R5: "another name"."""
    return record.fields[0].get("strategy") not in (None, *STRATEGIES)


def reposition(known: Group | None, record: Judged, moment: Moment) -> Verdict:
    """G21: CommitOffsets with member_id ""."""
    if not moment.pausing:
        return Verdict(False, "UNKNOWN_CONSUMER", known)
    group = known if known is not None else Group(record.group)
    overdue = [member for member in group.members if member.is_overdue(moment.log_time)]
    if len(overdue) < len(group.members):
        return Verdict(False, "GROUP_ACTIVE", known)
    if overdue or group.asks_for_a_rebalance():
        group = rebalance(group.without(overdue), moment.offset)
    if group.checkpoints is not None:  # X10
        answers, group = set_positions(group, [Entry(*fields) for fields in record.fields[3]], moment)
        return Verdict(True, code_of_all(answers), group, entries=answers)
    codes = []
    for fields in record.fields[3]:
        code, group = reposition_entry(group, Entry(*fields), moment)
        codes.append(code)
    return Verdict(True, code_of_all(codes), group, entries=tuple(codes))


def reposition_entry(group: Group, entry: Entry, moment: Moment) -> tuple[str, Group]:
    """G21: one entry; through replaces the progress, as in C11."""
    if entry.action != 0 or (entry.low, entry.high) != (0, LARGEST_HASH) or entry.ranges:
        return "NOT_ASSIGNED", group
    before = group.progress.get(entry.place, KeyedProgress())
    after = before if entry.through is None else before.repositioned(entry.through)
    # C11: REPOSITIONED "where done_through, ranges or granted changed by it, else OK"
    was, now = ((each.through, each.ranges, each.holes) for each in (before, after))
    code = "OK" if was == now else "REPOSITIONED"
    if code == "REPOSITIONED" and moment.level >= 5:  # R1
        after = replace(after, again=moment.offset)
    return code, with_progress(group, entry, after.noted(entry.metadata))


def may_be_forgotten(group: Group, moment: Moment) -> bool:
    """C16, of a coordinated group."""
    return moment.pausing and all(member.is_overdue(moment.log_time) for member in group.members)
