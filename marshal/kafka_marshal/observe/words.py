"""Records and outcomes in words: the request, its result, and why.

All results may contain text from the log: callers pass it through ``visible`` before they print it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.observe.checkpoints import waits_for
from kafka_marshal.observe.rows import place_text
from kafka_marshal.observe.text import count, listed, span, time_text
from rationalizer import (
    AnswerBarrier,
    BeginCheckpoint,
    ClaimingMessages,
    ClaimingPartition,
    ClaimingShare,
    CommitOffsets,
    CommitRanges,
    ConfigureGroup,
    ForgetGroup,
    GroupHeartbeat,
    Heartbeat,
    HeartbeatBatch,
    JoinGroup,
    KeepCheckpoint,
    Lease,
    LeaveGroup,
    Outcome,
    RejectedValueError,
    ReleaseGroup,
    ReleasingPartition,
    Rollback,
    SettleOffsets,
    SettlingMessages,
    Tick,
    TopicsChanged,
    Upgrade,
    codes,
    decode,
    route_group,
    route_lease,
)
from rationalizer.levels import CHECKPOINTS_LEVEL
from rationalizer.limits import MAX_KEY_HASH, is_later
from rationalizer.marker import said_by
from rationalizer.wire.records import KINDS, Belongs, LeaseRecord
from rationalizer.wire.wellformed import END, LET_GO, PIN, REACHED_AND_LEAVES, REFUSED, START

if TYPE_CHECKING:
    from rationalizer import BeatEntry, CommitEntry, Group, Record, World
    from rationalizer.groups.history import Rebalance
    from rationalizer.history import Span
    from rationalizer.log_hash import LogHash

_MEANS = {row.code: row.means for row in codes.TABLE}


def _is_of_group(record: Record) -> bool:
    """Whether it is about a coordinated group."""
    return KINDS[record.TYPE].belongs is Belongs.GROUP or isinstance(record, ConfigureGroup)


def is_beat(outcome: Outcome, record: Record | None) -> bool:
    """Whether it is only a sign of life: a Tick, or a heartbeat without any remark."""
    if isinstance(record, AnswerBarrier):
        return record.barrier == 0 and outcome.accepted and not outcome.silent
    if outcome.code != codes.OK or outcome.silent:
        return False
    if isinstance(record, Heartbeat):
        return record.epoch is not None
    if isinstance(record, (SettlingMessages, SettleOffsets)):
        return not (record.done or record.open or record.parked or getattr(record, "take", None))
    if isinstance(record, CommitOffsets):
        return bool(record.member_id) and all(entry.action not in (LET_GO, START) for entry in record.entries)
    return isinstance(record, (HeartbeatBatch, GroupHeartbeat, Tick))


# -- the request -----------------------------------------------------------------------------------------------


def what(record: Record | None, value: bytes | None, log_time: int) -> str:
    """The record in words, at that log time; of a value that is not a record, its size."""
    if record is None:
        return "no value" if value is None else f"{count(len(value), 'byte')}, not a record"
    if isinstance(record, ReleaseGroup) and record.msg_expire_time <= log_time:
        return "lets the group go on"
    return _WORDS[type(record)](record)


def _at(topic: str, partition: int) -> str:
    return f"{topic}/{partition}"


def _done(last_offset: int | None) -> str:
    if last_offset is None:
        return ""
    return ", done to " + (str(last_offset) if last_offset >= 0 else "nothing")


def _heartbeat(record: Heartbeat) -> str:
    verb = "restarts on" if record.epoch is None else "beats for"
    return f"{verb} {_at(record.topic, record.partition)}{_done(record.last_offset)}"


def _claim(record: ClaimingPartition) -> str:
    return f"claims {_at(record.topic, record.partition)} (beats every {span(record.heartbeat_interval_ms)} or sooner)"


def _release(record: ReleasingPartition) -> str:
    return f"releases {_at(record.topic, record.partition)}{_done(record.last_offset)}"


def _messages(record: ClaimingMessages) -> str:
    return f"takes messages of {_at(record.topic, record.partition)} up to {record.proposed_last_offset}, at most once"


def _pause(record: ReleaseGroup) -> str:
    return f"pauses the group until {time_text(record.msg_expire_time)}"


def _batch(record: HeartbeatBatch) -> str:
    def one(entry: BeatEntry) -> str:
        end = "" if entry.last_offset is None else f"={entry.last_offset}"
        return f"{_at(entry.topic, entry.partition)}{end}"

    return f"beats for {listed([one(entry) for entry in record.entries])}"


def _commit(record: CommitRanges) -> str:
    found = split(record.ranges)
    at = _at(record.topic, record.partition)
    if not found.ranges and found.kafka_counts:
        return f"says that {at} is processed in transactions: Kafka's offset counts"
    if not found.ranges:
        return f"says which topic the position in {at} is of"
    ranges = [*map(_range, found.ranges)]
    return f"has done {listed(ranges)} of {at}"


def _forget(record: ForgetGroup) -> str:
    return "forgets the group"


def _tick(record: Tick) -> str:
    count = said_by(record)
    return "tells the time" if count is None else f"fixes the number of partitions of the log at {count}"


def _upgrade(record: Upgrade) -> str:
    return f"raises the log to level {record.level}"


def _join(record: JoinGroup) -> str:
    verb = "joins again" if record.member_id else "joins"
    named = [topic for topic, _ in record.topics]
    topics = f"topics like {record.pattern} ({listed(named) or 'none yet'})" if record.pattern else listed(named)
    share = ", may share partitions by key" if record.allow_key_share else ""
    return f"{verb} for {topics}: {record.strategy}, session {span(record.session_timeout_ms)}{share}"


def _leave(record: LeaveGroup) -> str:
    return f"leaves the group, knows generation {record.generation}"


def _entry(entry: CommitEntry) -> str:
    at = f"{entry.topic}/{place_text(entry.partition, entry.lo, entry.hi)}"
    if entry.through is not None:
        done = f"{at}={entry.through if entry.through >= 0 else 'nothing'}"
    elif entry.ranges:
        found = split(entry.ranges)
        ranges = listed([*map(_range, found.ranges)])
        done = f"{at}: {ranges or ('in transactions' if found.kafka_counts else 'its topic')}"
    else:
        done = at
    return done if entry.metadata is None else f"{done} (with metadata)"


def _offsets(record: CommitOffsets) -> str:
    entries = record.entries
    if not record.member_id:
        return f"sets positions: {listed([_entry(entry) for entry in entries])}"
    parts = []
    for verb, wanted in (("starts", (START,)), ("has done", (0,)), ("lets go of", (LET_GO,))):
        chosen = [_entry(entry) for entry in entries if entry.action in wanted]
        if chosen:
            parts.append(f"{verb} {listed(chosen)}")
    return "; ".join(parts) + (", in order" if record.in_order else "")


def _topics(record: TopicsChanged) -> str:
    seen = [f"{topic} ({count})" for topic, count in record.topics]
    return f"sees topics: {listed(seen) or 'none'}"


def _configure(record: ConfigureGroup) -> str:
    if not record.settings:
        return "makes it a coordinated group"
    sets = [f"{name}={setting_text(value)}" for name, value in record.settings if value is not None]
    unsets = [name for name, value in record.settings if value is None]
    return "; ".join(f"{verb} {listed(some)}" for verb, some in (("sets", sets), ("unsets", unsets)) if some)


def _begin(record: BeginCheckpoint) -> str:
    if record.after == 0:
        kind = ", of all members at one moment" if record.hold else ""
        return f"begins the first checkpoint of the group{kind}, keeps {max(1, record.keep)}"
    what_for = f"keeps {record.keep}" if record.keep else "for a hand-over"
    return f"begins a checkpoint after {record.after}: {what_for}, waits for {span(record.timeout_ms)} at most"


def _answer(record: AnswerBarrier) -> str:
    if record.barrier == 0:
        return f"beats, knows generation {record.generation}"
    if record.answer == REFUSED:
        return f"can't take checkpoint {record.barrier}"
    entries = listed([_entry(entry) for entry in record.entries]) or "nothing new"
    leaves = "; leaves" if record.answer == REACHED_AND_LEAVES else ""
    return f"hands in for checkpoint {record.barrier}: {entries}{leaves}"


def _rollback(record: Rollback) -> str:
    to = f"checkpoint {record.checkpoint}" if record.checkpoint else "the newest checkpoint"
    return f"puts the group back to {to}, knows generation {record.generation}"


def _keep(record: KeepCheckpoint) -> str:
    if record.action == END:
        return f"ends the checkpoints of the group, the newest is {record.checkpoint}"
    return f"{'pins' if record.action == PIN else 'retires'} checkpoint {record.checkpoint}"


def setting_text(value: object) -> str:
    """A setting as in `group NAME --set`."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return ""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _claim_share(record: ClaimingShare) -> str:
    """A ClaimingShare."""
    at = _at(record.topic, record.partition)
    beats = f"(beats every {span(record.heartbeat_interval_ms)} or sooner)"
    if record.lo is None or record.hi is None:
        return f"claims a share of {at}, by batches {beats}"
    keys = "all keys" if (record.lo, record.hi) == (0, MAX_KEY_HASH) else f"key hashes {record.lo} to {record.hi}"
    return f"claims a share of {at}, {keys} {beats}"


def _settling(record: SettlingMessages) -> str:
    """A SettlingMessages."""
    parts = _settled(record, record.epoch is None)
    if record.take is not None:
        count, _, at_most_once = record.take
        parts.append(f"takes up to {count} messages{', at most once' if at_most_once else ''}")
    at = _at(record.topic, record.partition)
    return f"{'as an operator, ' if record.epoch is None else ''}of {at}: {'; '.join(parts) or 'beats'}"


def _settle_offsets(record: SettleOffsets) -> str:
    """A SettleOffsets."""
    parts = _settled(record, not record.member_id)
    at = _at(record.topic, record.partition)
    return f"{'' if record.member_id else 'as an operator, '}of {at}: {'; '.join(parts) or 'beats'}"


def _settled(record: SettlingMessages | SettleOffsets, by_operator: bool) -> list[str]:
    done, opened, parked = record.done, record.open, record.parked
    frees = "opens again" if record.redo else "redrives"
    parts = [f"{'discards' if by_operator else 'has done'} {listed([*map(_range, done)])}"] if done else []
    for attempts in dict.fromkeys(entry[3] for entry in opened):
        spans = listed([_range(entry) for entry in opened if entry[3] == attempts])
        tried = "again" if attempts == 0 else f"after {attempts} deliver{'y' if attempts == 1 else 'ies'}"
        parts.append(f"{frees} {spans}" if by_operator and attempts == 0 else f"opens {spans} {tried}")
    by_reason: dict[str, list[str]] = {}
    for offset, _, _, reason in parked:
        by_reason.setdefault(reason, []).append(str(offset))
    for reason, offsets in by_reason.items():
        parts.append(f"{'has wait' if is_later(reason) else 'parks'} {listed(offsets)} ({reason})")
    return parts


def _range(entry: Sequence[object]) -> str:
    return str(entry[0]) if entry[0] == entry[1] else f"{entry[0]}-{entry[1]}"


_WORDS: dict[type[Record], Callable[..., str]] = {
    Heartbeat: _heartbeat,
    ClaimingPartition: _claim,
    ReleasingPartition: _release,
    ClaimingMessages: _messages,
    ReleaseGroup: _pause,
    HeartbeatBatch: _batch,
    CommitRanges: _commit,
    ForgetGroup: _forget,
    JoinGroup: _join,
    GroupHeartbeat: lambda record: f"beats, knows generation {record.generation}",
    LeaveGroup: _leave,
    CommitOffsets: _offsets,
    TopicsChanged: _topics,
    ConfigureGroup: _configure,
    BeginCheckpoint: _begin,
    AnswerBarrier: _answer,
    Rollback: _rollback,
    KeepCheckpoint: _keep,
    ClaimingShare: _claim_share,
    SettlingMessages: _settling,
    SettleOffsets: _settle_offsets,
    Tick: _tick,
    Upgrade: _upgrade,
}


def is_routine(outcome: Outcome) -> bool:
    """Whether it only says how far a member is: of its messages some are done, or tried; none is set aside."""
    if outcome.code != codes.OK or outcome.silent or not outcome.is_a(SettlingMessages, SettleOffsets):
        return False
    return not outcome.by_operator and not outcome.message.parked


# -- the result ----------------------------------------------------------------------------------------------


def reason(
    outcome: Outcome,
    record: Record | None,
    value: bytes | None,
    world: World,
    before: Span | None,
    overdue: Sequence[tuple[str, int]] | None = None,
) -> str:
    """Why the record had this outcome. `world`: after the record; `before`: `Fold.before`; `overdue`: `Fold.silent`."""
    if record is None:
        return _unreadable(value, world.level)
    found = outcome.silent if overdue is None else overdue
    silent = [f"{client} was silent for {span(silence_ms)}" for client, silence_ms in found]
    return "; ".join(filter(None, (_reason(outcome, record, world, before), *silent)))


def _reason(outcome: Outcome, record: Record, world: World, before: Span | None) -> str:
    lease = None
    if isinstance(record, LeaseRecord):
        lease = world.lease(record.group_id, record.topic, record.partition)
    match outcome.code:
        case codes.OK | codes.REPOSITIONED:
            return _ok(outcome, record, world, before)
        case codes.WRONG_PARTITION:
            return _wrong_partition(record, world)
        case codes.PAUSED:
            pause = world.pause(record.group_id)
            by = f"{pause.client_id} has the group paused until {time_text(pause.expires)}" if pause else ""
            return by or _MEANS[outcome.code]
        case codes.NOTHING_TO_TAKE:
            return "nothing was free to take"
        case codes.PARTIAL:
            return _partial(outcome, record)
        case codes.WRONG_KIND:
            return _wrong_kind(record)
        case codes.GROUP_ACTIVE:
            overdue_too = KINDS[record.TYPE].level == CHECKPOINTS_LEVEL
            return _active(world.group(record.group_id), world, overdue_too=overdue_too)
        case _ if _is_of_group(record):
            return _about_group(outcome, record, world)
        case _ if lease is not None:
            if isinstance(record, SettlingMessages) and record.epoch is None:
                return _reason_of_settling(outcome, record)
            evicts = isinstance(record, ReleasingPartition) and record.epoch == lease.epoch
            return _about_lease(outcome.code, lease, world, evicts=evicts and record.client_id != lease.client_id)
        case codes.NOT_HELD:
            return "nobody holds it"
        case _:
            return _MEANS.get(outcome.code, "")


def _unreadable(value: bytes | None, level: int) -> str:
    if value is None:
        return "a record without a value"
    try:
        decode(value, level)
    except RejectedValueError as error:
        return str(error).partition(": ")[2].partition(". ")[0]
    return ""


def _ok(outcome: Outcome, record: Record, world: World, before: Span | None) -> str:
    match record:
        case SettlingMessages() | SettleOffsets():
            return _reason_of_settling(outcome, record)
        case ClaimingShare():
            return f"granted, epoch {outcome.share}"
        case ClaimingPartition():
            text = f"granted, epoch {outcome.epoch}"
            if before is not None and before.held:
                text += f"; {before.client_id} was silent for {span(outcome.log_time - before.last_beat)}"
            return text
        case Heartbeat(epoch=None):
            silent = "" if before is None else f", silent for {span(outcome.log_time - before.last_beat)}"
            return f"took over from its earlier instance{silent}; epoch {outcome.epoch}"
        case _ if outcome.code == codes.REPOSITIONED:
            return "the position was replaced"
        case _ if _is_of_group(record):
            return _about_group(outcome, record, world)
        case _:
            return ""


def _reason_of_settling(outcome: Outcome, record: SettlingMessages | SettleOffsets) -> str:
    """What came of the entries, and of the take."""
    offsets = [
        *map(_range, record.done),
        *map(_range, record.open),
        *(str(entry[0]) for entry in record.parked),
    ]
    refused = [
        f"{at} {code}" for at, code in zip(offsets, outcome.entries or (), strict=False) if code not in codes.ACCEPTED
    ]
    parts = [listed(refused)] if refused else []
    if outcome.taken is not None:
        parts.append(f"took {_range(outcome.taken)}")
    elif outcome.accepted and isinstance(record, SettlingMessages) and record.take is not None:
        parts.append("nothing was free to take")
    return "; ".join(parts)


def _holders_of(lease: Lease) -> str:
    """Whose shares a lease has."""
    names = list(dict.fromkeys(share.client_id for share in lease.shares or ()))
    return f"{listed(names)} {'share' if len(names) > 1 else 'shares'} it" if names else "it is free"


def _wrong_partition(record: Record, world: World) -> str:
    if isinstance(record, HeartbeatBatch):
        return "not all of its leases belong to this partition of the log"
    if isinstance(record, LeaseRecord):
        home = route_lease(record.topic, record.partition, world.partitions)
    else:
        home = route_group(record.group_id, world.partitions)
    return f"it belongs to partition {home} of the log"


def _partial(outcome: Outcome, record: Record) -> str:
    if isinstance(record, (SettlingMessages, SettleOffsets)):
        return _reason_of_settling(outcome, record)
    if not isinstance(record, (HeartbeatBatch, CommitOffsets, AnswerBarrier)) or outcome.entries is None:
        return _MEANS[codes.PARTIAL]
    entries: tuple[BeatEntry | CommitEntry, ...] = record.entries
    bad = [
        f"{_at(entry.topic, entry.partition)} {code}"
        for entry, code in zip(entries, outcome.entries, strict=True)
        if code != codes.OK
    ]
    return listed(bad)


def _wrong_kind(record: Record) -> str:
    has, to = ("claimed", "coordinated") if _is_of_group(record) else ("coordinated", "claimed")
    return f"it is a {has} group: kafka-marshal convert-group --to {to} makes it another"


def _active(group: Group | None, world: World, *, overdue_too: bool) -> str:
    if group is None:
        return "somebody holds a lease of the group and is not stale"
    late = frozenset[int]() if overdue_too else group.overdue(world.log_time)
    there = [member.client_id for slot, member in group.members.items() if slot not in late]
    return f"members are there: {listed(there)}" if there else "its sender has not paused it"


def _about_group(outcome: Outcome, record: Record, world: World) -> str:
    """The result of a record of a coordinated group, or why it was rejected."""
    group = world.group(record.group_id)
    if group is None:
        return "there is no such group" if outcome.code == codes.UNKNOWN_CONSUMER else _MEANS.get(outcome.code, "")
    others = listed([member.client_id for member in group.members.values() if member.client_id != record.client_id])
    is_rebalance = group.generation == world.next_offset - 1
    home = route_group(record.group_id, world.partitions)
    match outcome.code:
        case codes.OK if isinstance(record, ConfigureGroup) and home != world.partition:
            return f"only says so: the group is kept in partition {home} of the log"
        case codes.OK if is_rebalance:
            left = f", {count(len(group.members), 'member')}"
            return f"generation {group.generation}{left}"
        case codes.OK if isinstance(record, (BeginCheckpoint, AnswerBarrier)):
            waits = listed(waits_for(group))
            return f"waits for {waits}" if waits else ""
        case codes.OK:
            return ""
        case codes.NO_SUCH_BARRIER | codes.BARRIER_OPEN if group.checkpoints is not None:
            barrier = group.checkpoints.barrier
            return "no checkpoint is being taken" if barrier is None else f"{barrier.id} is being taken"
        case codes.UNKNOWN_CHECKPOINT if group.checkpoints is not None:
            return f"the newest is {group.checkpoints.newest}"
        case codes.ALREADY_MEMBER:
            return f"nothing changed, generation {group.generation}"
        case codes.ILLEGAL_GENERATION if outcome.accepted or isinstance(record, Rollback):
            return f"the generation is {group.generation} by now"
        case codes.ILLEGAL_GENERATION:
            return f"the generation is {group.generation}, and was never above"
        case codes.UNKNOWN_CONSUMER:
            return _no_sender(group, record)
        case codes.REPLACED:
            member = group.clients[record.client_id]
            return f"its successor {member.instance_id} joined at {member.joined}"
        case codes.INCONSISTENT_PARTITIONING_STRATEGY:
            return f"{others} have {group.strategy}"
        case codes.SESSION_TIMEOUT_TOO_HIGH:
            return f"the group allows {span(group.settings.max_session_timeout_ms)}"
        case _:
            return _MEANS.get(outcome.code, "")


def _no_sender(group: Group, record: Record) -> str:
    if isinstance(record, CommitOffsets) and not record.member_id:
        return "it has not paused the group"
    member = group.clients.get(record.client_id)
    if member is None and isinstance(record, LeaveGroup):
        for each in group.members.values():
            if each.member_id == record.member_id:
                return f"an operator evicts {each.client_id}"
    if member is None:
        return "it is no member"
    if isinstance(record, LeaveGroup) and record.member_id == member.member_id:
        return "an operator asks the member to hand over, and to leave"
    return f"the member is {member.instance_id}, {member.member_id}"


def _about_lease(code: str, lease: Lease, world: World, *, evicts: bool) -> str:
    holder, age = lease.client_id, span(lease.age(world.log_time))
    progress = lease.progress
    match code:
        case codes.HELD | codes.FENCED | codes.ALREADY_HELD if lease.shares is not None:
            return _holders_of(lease)
        case codes.HELD:
            return f"{holder} holds it, epoch {lease.epoch}, last beat {age} before"
        case codes.FENCED:
            return f"{holder} holds it, epoch {lease.epoch}" + ("; an operator evicts it" if evicts else "")
        case codes.NOT_HELD:
            return "nobody holds it"
        case codes.ALREADY_HELD:
            return f"holds it already, epoch {lease.epoch}"
        case codes.NOT_FRESH | codes.STALE:
            return f"last beat {age} before, at an interval of {span(lease.heartbeat_interval_ms)}"
        case codes.OFFSET_REGRESSION:
            return f"all is done to {progress.stable} already: the position stays, the rest counts"
        case codes.INDIVIDUAL_COMMIT_TOO_OLD:
            return f"all is done to {progress.stable} already"
        case codes.PROPOSAL_TOO_LOW:
            return f"all is done, or given out, to {progress.stable} already"
        case _:
            return _MEANS.get(code, "")


# -- why a group was rebalanced -----------------------------------------------------------------------------


def why_rebalanced(each: Rebalance) -> Iterator[str]:
    """The causes of a rebalance, in words."""
    for names, verb in ((each.joined, "joined"), (each.restarted, "restarted"), (each.left, "left")):
        if names:
            yield f"{', '.join(names)} {verb}"
    for client, by in each.evicted:
        yield f"{client} was evicted by {by}"
    for client, silence_ms in each.silent:
        yield f"{client} was silent for {span(silence_ms)}"
    for client in each.changed:
        yield f"{client} changed what it reads"
    if each.configured:
        yield "settings changed"
    if each.rolled_back is not None:
        yield f"{each.rolled_back[1]} put the group back to checkpoint {each.rolled_back[0]}"
    if each.checkpoint:
        yield f"checkpoint {each.checkpoint} was complete"


def dump_changed(found: LogHash) -> str:
    """A message: a range of records in a dump does not have its hash."""
    return (
        f"partition {found.partition}, offsets {found.since} to {found.next_offset - 1}: the dump was changed after it "
        "was written: records were removed, added, altered or moved. What is shown is of the changed one. Dump the log "
        "again, or audit it: kafka-marshal audit"
    )
