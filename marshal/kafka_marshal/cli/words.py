"""Records and outcomes in words: what somebody asked for, what the log made of it, and why.

Everything returned may hold text from the log: it goes through ``text.clean`` before it reaches a terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kafka_marshal.cli.text import count, span, time_text
from kafka_marshal.engine.work.topic_mark import split
from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Lease,
    Outcome,
    Record,
    RejectedValueError,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    Upgrade,
    World,
    codes,
    decode,
    route_group,
    route_lease,
)
from rationalizer.marker import said_by

__all__ = ["Seen", "is_beat", "reason", "remember", "what"]

#: The most leases or ranges that are listed one by one.
_LISTED = 5

_MEANS = {row.code: row.means for row in codes.TABLE}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a lease was before a record: who held it, since which beat, with which HI."""

    client: str | None
    instance: str | None
    last_beat: int
    heartbeat_interval_ms: int


def remember(lease: Lease) -> Seen:
    """The lease as it is now."""
    return Seen(lease.client_id, lease.instance_id, lease.last_beat, lease.heartbeat_interval_ms)


def is_beat(outcome: Outcome, record: Record | None) -> bool:
    """Whether this is only a sign of life: a Tick, or a heartbeat that took effect as it stands."""
    if outcome.code != codes.OK:
        return False
    if isinstance(record, Heartbeat):
        return record.epoch is not None
    return isinstance(record, (HeartbeatBatch, Tick))


# -- what was asked for --------------------------------------------------------------------------------------


def what(record: Record | None, value: bytes | None, log_time: int) -> str:
    """What the record says, in words, at that log time; for one that is none, how large it is."""
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

    return f"beats for {_some([one(entry) for entry in record.entries])}"


def _commit(record: CommitRanges) -> str:
    found = split(record.ranges)
    at = _at(record.topic, record.partition)
    if not found.ranges:
        return f"says which topic the position in {at} is of"
    ranges = [str(first) if first == last else f"{first}-{last}" for first, last in found.ranges]
    return f"has done {_some(ranges)} of {at}"


def _forget(record: ForgetGroup) -> str:
    return "forgets the group"


def _tick(record: Tick) -> str:
    count = said_by(record)
    return "tells the time" if count is None else f"fixes the number of partitions of the log at {count}"


def _upgrade(record: Upgrade) -> str:
    return f"raises the log to level {record.level}"


def _some(items: list[str]) -> str:
    more = len(items) - _LISTED
    return ", ".join(items[:_LISTED]) + (f" and {more:,} more" if more > 0 else "")


_WORDS: dict[type[Record], Callable[..., str]] = {
    Heartbeat: _heartbeat,
    ClaimingPartition: _claim,
    ReleasingPartition: _release,
    ClaimingMessages: _messages,
    ReleaseGroup: _pause,
    HeartbeatBatch: _batch,
    CommitRanges: _commit,
    ForgetGroup: _forget,
    Tick: _tick,
    Upgrade: _upgrade,
}


# -- what became of it ---------------------------------------------------------------------------------------


def reason(outcome: Outcome, record: Record | None, value: bytes | None, world: World, before: Seen | None) -> str:
    """Why the record ended so. `world`: after it; `before`: its lease before it, where it names one."""
    if record is None:
        return _unreadable(value, world.level)
    lease = None
    if isinstance(record, (Heartbeat, ClaimingPartition, ReleasingPartition, ClaimingMessages, CommitRanges)):
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
        case codes.PARTIAL:
            return _partial(outcome, record)
        case _ if lease is not None:
            return _about_lease(outcome.code, lease, world)
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


def _ok(outcome: Outcome, record: Record, world: World, before: Seen | None) -> str:
    match record:
        case ClaimingPartition():
            text = f"granted, epoch {outcome.epoch}"
            if before is not None and before.client is not None:
                text += f"; {before.client} was silent for {span(outcome.log_time - before.last_beat)}"
            return text
        case Heartbeat(epoch=None):
            silent = "" if before is None else f", silent for {span(outcome.log_time - before.last_beat)}"
            return f"took over from its earlier instance{silent}; epoch {outcome.epoch}"
        case _ if outcome.code == codes.REPOSITIONED:
            return "the position was replaced"
        case _:
            return ""


def _wrong_partition(record: Record, world: World) -> str:
    if isinstance(record, HeartbeatBatch):
        return "not all of its leases belong to this partition of the log"
    if isinstance(record, (Heartbeat, ClaimingPartition, ReleasingPartition, ClaimingMessages, CommitRanges)):
        home = route_lease(record.topic, record.partition, world.partitions)
    else:
        home = route_group(record.group_id, world.partitions)
    return f"it belongs to partition {home} of the log"


def _partial(outcome: Outcome, record: Record) -> str:
    if not isinstance(record, HeartbeatBatch) or outcome.entries is None:
        return _MEANS[codes.PARTIAL]
    bad = [
        f"{_at(entry.topic, entry.partition)} {code}"
        for entry, code in zip(record.entries, outcome.entries, strict=True)
        if code != codes.OK
    ]
    return _some(bad)


def _about_lease(code: str, lease: Lease, world: World) -> str:
    holder, age = lease.client_id, span(lease.age(world.log_time))
    progress = lease.progress
    match code:
        case codes.HELD:
            return f"{holder} holds it, epoch {lease.epoch}, last beat {age} before"
        case codes.FENCED:
            return f"{holder} holds it, epoch {lease.epoch}"
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
