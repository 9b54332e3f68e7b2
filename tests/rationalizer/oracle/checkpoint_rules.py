"""The rules of section 7 (X3 to X10), each as a function from a group to a verdict."""

from __future__ import annotations

from dataclasses import replace

from tests.rationalizer.oracle.checkpoints import (
    END,
    MOST_PINNED,
    MOST_STATES,
    NO_STATES,
    PASSING,
    PERIODIC,
    PIN,
    PINNED,
    REFUSED,
    RETIRE,
    Answer,
    Barrier,
    Checkpoints,
    Kept,
    Version,
    saved,
)
from tests.rationalizer.oracle.groups import Group, Member, rebalance
from tests.rationalizer.oracle.judging import (
    ACCEPTED,
    Entry,
    Moment,
    Verdict,
    beaten,
    code_of_all,
    gone_with,
    progress_after,
    refusal_of,
    sender_of,
    whole_group_is_late,
)
from tests.rationalizer.oracle.keyed import KeyedProgress
from tests.rationalizer.oracle.layout import Judged
from tests.rationalizer.oracle.progress import LARGEST_HASH

#: P12: offsets from here on are marks.
MARKS = 2**62


def settled(group: Group) -> Group:
    """X2, X3: progress is what the newest checkpoint sees; an answer goes with its member."""
    known = group.checkpoints
    if known is None:
        return group
    if known.barrier is not None:
        slots = {member.slot for member in group.members}
        answers = {slot: given for slot, given in known.barrier.answers.items() if slot in slots}
        known = replace(known, barrier=replace(known.barrier, answers=answers))
    known = known.tidy()
    return replace(group, checkpoints=known, progress=known.progress())


# X3: the barrier's end needs a witness.


def after_the_barrier(group: Group | None, record: Judged, moment: Moment) -> Group | None:
    """X3: the state on which a record is judged: as though the barrier had been closed before it, or as it is."""
    if group is None or group.checkpoints is None or group.checkpoints.barrier is None:
        return group
    of_admin = record.type == "CommitOffsets" and record.fields[0] == ""
    sender = None if of_admin or not has_a_sender(record) else sender_of(group, record)
    if not (record.type == "JoinGroup" or of_admin or sender is not None):
        return group
    lost = [
        member
        for member in would_go(group, sender, record, moment, of_admin)
        if any(piece.owner == member.slot for piece in group.all_pieces())
    ]
    if lost or group.checkpoints.barrier.is_over(moment.log_time):
        return closed(group, moment)
    return group


def has_a_sender(record: Judged) -> bool:
    """G6, X: 23, 25 and 27 have none."""
    return record.type in (
        "JoinGroup",
        "GroupHeartbeat",
        "LeaveGroup",
        "CommitOffsets",
        "TopicsChanged",
        "AnswerBarrier",
    )


def would_go(group: Group, sender: Member | None, record: Judged, moment: Moment, of_admin: bool) -> list[Member]:
    """X3: the members that the record would remove or replace, asked of the state before the closing."""
    if of_admin:  # "G21 where all are overdue"
        overdue = [member for member in group.members if member.is_overdue(moment.log_time)]
        return overdue if len(overdue) == len(group.members) else []
    found = gone_with(group, sender, moment.log_time)
    if record.type == "LeaveGroup" and sender is not None:
        found.append(sender)
    if record.type == "JoinGroup" and sender is not None and record.fields[0] == "":
        another = sender.instance != record.instance
        if another and sender.joined < record.fields[1]:  # "a join that G11 does not call REPLACED"
            found.append(sender)
    return found


# X6: closing.


def owners(group: Group) -> set[int]:
    """The slots that own a piece."""
    return {piece.owner for piece in group.all_pieces()}


def closed_if_due(group: Group, moment: Moment) -> Group:
    """X6, after an accepted BeginCheckpoint, or an answer that was noted."""
    known = group.checkpoints
    assert known is not None
    assert known.barrier is not None
    answers = known.barrier.answers
    refused = any(slot in answers and answers[slot].answer == REFUSED for slot in owners(group))
    if owners(group) <= set(answers) or (known.hold and refused):
        return closed(group, moment)
    return group


def closed(group: Group, moment: Moment) -> Group:
    """X6. What it asks of the record's rebalance is noted in the group."""
    known = group.checkpoints
    assert known is not None
    barrier = known.barrier
    assert barrier is not None
    reached = {slot for slot, given in barrier.answers.items() if given.answer != REFUSED}
    mine = owners(group)
    if (mine and not mine & reached) or (known.hold and not mine <= reached):
        return settled(replace(group, checkpoints=known.ended()))
    known = known.completed(barrier.id, moment.log_time, PASSING if barrier.passing else PERIODIC)
    let_go = set()
    for place, pieces in group.pieces.items():
        states = known.as_seen(place, barrier.id).states
        for piece in pieces:
            given = barrier.answers.get(piece.owner)
            if piece.revoked is None or given is None or given.answer == REFUSED:
                continue
            of_this_barrier = all(
                state == barrier.id for low, high, state in states if low <= piece.high and piece.low <= high
            )
            if given.generation >= piece.revoked and of_this_barrier:
                let_go.add((place, piece))
    leaving = [m for m in group.members if m.slot in barrier.answers and barrier.answers[m.slot].answer == 2]
    after = replace(
        group.without(leaving),
        checkpoints=known,
        let_go=frozenset(let_go),
        left=frozenset(member.slot for member in leaving),
    )
    return settled(after)


# X4.


def begin(group: Group | None, record: Judged, moment: Moment) -> Verdict:
    """X4: type 23."""
    after, timeout_ms, keep, hold = record.fields
    known = None if group is None else group.checkpoints
    if group is None or after != (0 if known is None else known.newest):
        return Verdict(False, "UNKNOWN_CHECKPOINT", group)
    if known is None:
        if group.members:
            return Verdict(False, "GROUP_ACTIVE", group)
        if any(progress.holes for progress in group.progress.values()):  # section 7b
            return Verdict(False, "WRONG_MODE", group)
        first = Checkpoints(
            keep or 1,
            hold,
            (Kept(moment.offset, moment.log_time, PINNED),),
            initial={place: progress.initial for place, progress in group.progress.items()},
            versions={
                place: (Version(moment.offset, NO_STATES, replace(progress, initial=-1, again=-1)),)
                for place, progress in group.progress.items()
            },
        )
        return Verdict(True, "OK", settled(replace(group, checkpoints=first)))
    if known.barrier is not None:
        return Verdict(False, "BARRIER_OPEN", group)
    barrier = Barrier(moment.offset, moment.log_time, timeout_ms, passing=keep == 0)
    opened = replace(group, checkpoints=replace(known, keep=keep or known.keep, barrier=barrier))
    return Verdict(True, "OK", closed_if_due(opened, moment))


# X5.


def answer(group: Group | None, record: Judged, moment: Moment) -> Verdict:
    """X5: type 24."""
    sender = sender_of(group, record)
    if group is None or sender is None:
        return Verdict(False, "UNKNOWN_CONSUMER", group)
    if record.fields[1] > group.generation:
        return Verdict(False, "ILLEGAL_GENERATION", group)
    # who the overdue are is decided before what it says, which comes before they go
    gone, all_late = gone_with(group, sender, moment.log_time), whole_group_is_late(group, sender, moment.log_time)
    code, entries, after = answered(group, sender, record, moment)
    after = after.without([member for member in after.members if member.slot in {each.slot for each in gone}])
    if all_late:
        after = replace(after, members=tuple(replace(each, last_beat=moment.log_time) for each in after.members))
    if gone or after.asks_for_a_rebalance():
        after = rebalance(after, moment.offset)
    if after.member(sender.slot) is not None:  # unless it left
        after = beaten(after, sender.slot, moment.log_time)
    return Verdict(True, code, settled(after), entries=entries)


def answered(group: Group, sender: Member, record: Judged, moment: Moment) -> tuple[str, tuple[str, ...] | None, Group]:
    """X5: what an answer says; nothing is removed but by the closing."""
    _, generation, barrier_id, what, entries = record.fields
    known = group.checkpoints
    if known is None or known.barrier is None or known.barrier.id != barrier_id:
        return "NO_SUCH_BARRIER", None, group
    if sender.slot in known.barrier.answers:
        return "ALREADY_ANSWERED", None, group
    codes, after = [], group
    for fields in entries:
        code, after = answer_entry(after, sender.slot, generation, barrier_id, Entry(*fields))
        codes.append(code)
    if code_of_all(codes) == "PARTIAL":
        return "PARTIAL", tuple(codes), group
    noted = after.checkpoints
    assert noted is not None
    assert noted.barrier is not None
    answers = {**noted.barrier.answers, sender.slot: Answer(generation, what)}
    after = replace(after, checkpoints=replace(noted, barrier=replace(noted.barrier, answers=answers)))
    return "OK", tuple(codes), closed_if_due(after, moment)


def answer_entry(group: Group, slot: int, generation: int, barrier_id: int, entry: Entry) -> tuple[str, Group]:
    """X5: one entry, against the partition's version of this barrier."""
    known = group.checkpoints
    assert known is not None
    if entry.action != 0 or entry.place not in group.progress:
        return "NOT_ASSIGNED", group
    refused = refusal_of(group, slot, generation, entry)
    if refused is not None:
        return refused, group
    # "the first entry of a partition makes it, as a copy of what the newest checkpoint sees"
    mine = known.as_seen(entry.place, barrier_id)
    code, progress = progress_after(mine.progress, group.settings, False, entry)
    if code not in ACCEPTED:
        return code, group
    states = saved(mine.states, entry.low, entry.high, barrier_id)
    if len(states) > MOST_STATES and len(states) > len(mine.states):  # G15
        return "MAX_INDIVIDUAL_COMMIT_REACHED", group
    version = Version(barrier_id, states, progress.noted(entry.metadata))
    return code, replace(group, checkpoints=known.with_version(entry.place, version))


# X8, X9.


def roll_back(group: Group | None, record: Judged, moment: Moment) -> Verdict:
    """X8: type 25."""
    generation, checkpoint = record.fields
    if group is None or group.checkpoints is None:
        return Verdict(False, "UNKNOWN_CHECKPOINT", group)
    known = group.checkpoints
    if generation != group.generation:
        return Verdict(False, "ILLEGAL_GENERATION", group)
    target = checkpoint or known.newest
    if not known.is_kept(target):
        return Verdict(False, "UNKNOWN_CHECKPOINT", group)
    known = known.ended()
    known = known.without([kept for kept in known.kept if kept.id > target])
    after = settled(replace(group, checkpoints=known))
    return Verdict(True, "OK", rebalance(after, moment.offset, all_go_back=True))


def keep(group: Group | None, record: Judged) -> Verdict:
    """X9: type 27."""
    checkpoint, action = record.fields
    known = None if group is None else group.checkpoints
    if group is None or known is None or not known.is_kept(checkpoint):
        return Verdict(False, "UNKNOWN_CHECKPOINT", group)
    [mine] = [kept for kept in known.kept if kept.id == checkpoint]
    is_newest = checkpoint == known.newest
    if action == RETIRE:
        if is_newest:
            return Verdict(False, "NEWEST_CHECKPOINT", group)
        return Verdict(True, "OK", settled(replace(group, checkpoints=known.without([mine]))))
    if action == PIN:
        pinned = [kept for kept in known.kept if kept.kind == PINNED]
        if mine.kind != PINNED and len(pinned) >= MOST_PINNED:
            return Verdict(False, "TOO_MANY_CHECKPOINTS", group)
        kept = tuple(replace(each, kind=PINNED) if each == mine else each for each in known.kept)
        return Verdict(True, "OK", settled(replace(group, checkpoints=replace(known, kept=kept))))
    assert action == END
    if not is_newest:
        return Verdict(False, "UNKNOWN_CHECKPOINT", group)
    if group.members:
        return Verdict(False, "GROUP_ACTIVE", group)
    return Verdict(True, "OK", replace(group, checkpoints=None, progress=known.ended().progress()))


# X10: G21 in a group that takes checkpoints.


def set_positions(group: Group, entries: list[Entry], moment: Moment) -> tuple[tuple[str, ...], Group]:
    """X10: the entries, each against what those before it left; their codes, and the group."""
    known = group.checkpoints
    assert known is not None
    known = known.ended()
    codes, through = [], dict[tuple[str, int], int]()
    written = False
    for entry in entries:
        if entry.action != 0 or (entry.low, entry.high) != (0, LARGEST_HASH) or entry.ranges:
            codes.append("NOT_ASSIGNED")
            continue
        before = known.as_seen(entry.place, moment.offset)
        progress = before.progress if entry.through is None else before.progress.repositioned(entry.through)
        same = (before.progress.through, before.progress.ranges) == (progress.through, progress.ranges)
        codes.append("OK" if same else "REPOSITIONED")
        if entry.through is None and entry.metadata is None:
            continue
        written = True
        if entry.through is not None:
            through[entry.place] = entry.through
        version = Version(moment.offset, before.states, progress.noted(entry.metadata))
        known = known.with_version(entry.place, version)
    if written:
        beyond = [
            kept
            for kept in known.kept
            if any(does_see_above(known.as_seen(place, kept.id).progress, last) for place, last in through.items())
        ]
        left = tuple(kept for kept in known.kept if kept not in beyond)
        known = replace(known, kept=left).completed(moment.offset, moment.log_time, PERIODIC)
    return tuple(codes), settled(replace(group, checkpoints=known))


def does_see_above(progress: KeyedProgress, last: int) -> bool:
    """X10: something is done above this offset; those from 2^62 on do not count."""
    first_above = last + 1
    if first_above >= MARKS:
        return False
    if any(offset >= first_above for _, _, offset in progress.through):
        return True
    return any(max(first, first_above) <= min(final, MARKS - 1) for first, final in progress.ranges)
