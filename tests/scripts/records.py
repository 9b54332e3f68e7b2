"""Records in the words of scripts: what a command appends, and what stands in a log.

    claims flights:0 [hi=1000]          ClaimingPartition
    beats flights:0 [done=5]            Heartbeat with the lease's present epoch
    takes over flights:0 [done=5]       Heartbeat with epoch nil
    beats batch flights:0>5 flights:1   HeartbeatBatch: done>offset; flights:0>5#3 has epoch 3
    releases flights:0 [done=5]         ReleasingPartition
    claims messages flights:0 to=9      ClaimingMessages
    commits flights:0 4-6 9-9           CommitRanges; singles=10..20 are 10, 12 … 20, each for itself
    pauses until=+5000                  ReleaseGroup, its expiry counted from the clock; until=900 is a time
    forgets, ticks, upgrades level=2    ForgetGroup, Tick, Upgrade

and those of coordinated groups as `group_records.py` has them, those about shares and open messages as
`sharing_records.py`. Each may have epoch= and group= (else g).
"""

from __future__ import annotations

from collections.abc import Callable

from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Lease,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    Upgrade,
)
from tests.scripts.group_records import Groups, group_record_of, group_words_of
from tests.scripts.sharing_records import Sharing, hole_words, share_words, sharing_record_of, sharing_words_of

#: The present epoch of (group, topic, partition); 0 if it was never held.
Epoch = Callable[[tuple[str, str, int]], int]

OF_TWO_WORDS = (
    "takes over",
    "claims messages",
    "beats batch",
    "joins again",
    "commits offsets",
    "lets go",
    "rolls back",
    "settles offsets",
)
NO_GROUPS = Groups()
NO_SHARING = Sharing()
MANY_RANGES = 6
#: Offsets from here on say which topic the position is of (P12).
FIRST_MARK = 1 << 62
#: And that Kafka's committed offset counts (M3).
MARKS = {(1 << 63) - 1: "that Kafka counts"}


def options_of(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """What stands by itself, and what has the form name=value."""
    return [word for word in words if "=" not in word], dict(word.split("=", 1) for word in words if "=" in word)


def record_of(
    sender: tuple[str, str],
    words: list[str],
    options: dict[str, str],
    now: int,
    epoch: Epoch,
    groups: Groups = NO_GROUPS,
    sharing: Sharing = NO_SHARING,
) -> Record:
    """The record that (instance, client) appends; what it needs of the options is taken out of them."""
    length = 2 if " ".join(words[:2]) in OF_TWO_WORDS else 1
    verb, about = " ".join(words[:length]), words[length:]
    ids = (*sender, group := options.pop("group", "g"))
    match verb:
        case "ticks":
            return Tick(*ids)
        case "forgets":
            return ForgetGroup(*ids)
        case "upgrades":
            return Upgrade(*ids, int(options.pop("level")))
        case "pauses":
            until = options.pop("until")
            return ReleaseGroup(*ids, now + int(until) if until[0] == "+" else int(until))
        case "beats batch":
            return HeartbeatBatch(*ids, tuple(_entry(group, word, epoch) for word in about))
    record = sharing_record_of(ids, verb, about, options, sharing) or group_record_of(ids, verb, about, options, groups)
    if record is not None:
        return record
    if not about:
        raise ValueError(f"there is no verb {verb!r}, or something is missing behind it")
    name = lease_name(about[0])
    if verb == "claims":
        return ClaimingPartition(*ids, *name, int(options.pop("hi", "1000")))
    done = _number(options.pop("done", "nil"))
    if verb == "takes over":
        return Heartbeat(*ids, *name, None, done)
    token = int(options.pop("epoch", epoch((group, *name))))
    match verb:
        case "beats":
            return Heartbeat(*ids, *name, token, done)
        case "releases":
            return ReleasingPartition(*ids, *name, token, done)
        case "claims messages":
            return ClaimingMessages(*ids, *name, token, int(options.pop("to")))
        case "commits":
            ranges = (*map(_range, about[1:]), *_singles(options.pop("singles", "")))
            return CommitRanges(*ids, *name, token, ranges)
    raise ValueError(f"there is no verb {verb!r}")


def words_of(record: Record, epoch: Epoch, began: int, groups: Groups = NO_GROUPS) -> str:
    """The same the other way: an epoch is named where it is not the lease's present one; times count from `began`."""
    ids = "" if record.group_id == "g" else f" group={record.group_id}"

    def of(topic: str, partition: int, token: int | None) -> str:
        is_present = token is None or token == epoch((record.group_id, topic, partition))
        return ids if is_present else f" epoch={token}{ids}"

    match record:
        case ClaimingPartition(topic=topic, partition=partition):
            return f"claims {topic}:{partition} hi={record.heartbeat_interval_ms}{ids}"
        case Heartbeat(topic=topic, partition=partition, epoch=token):
            verb = "takes over" if token is None else "beats"
            return f"{verb} {topic}:{partition}{_done(record.last_offset)}{of(topic, partition, token)}"
        case ReleasingPartition(topic=topic, partition=partition, epoch=token):
            return f"releases {topic}:{partition}{_done(record.last_offset)}{of(topic, partition, token)}"
        case ClaimingMessages(topic=topic, partition=partition, epoch=token):
            return f"claims messages {topic}:{partition} to={record.proposed_last_offset}{of(topic, partition, token)}"
        case CommitRanges(topic=topic, partition=partition, epoch=token):
            ranges = [
                MARKS.get(first, "its topic") if first >= FIRST_MARK else f"{first}-{last}"
                for first, last in record.ranges
            ]
            return f"commits {topic}:{partition} {' '.join(ranges)}{of(topic, partition, token)}"
        case HeartbeatBatch():
            return (
                f"beats batch {' '.join(_entry_words(entry, record.group_id, epoch) for entry in record.entries)}{ids}"
            )
        case ReleaseGroup():
            return f"pauses until={max(0, record.msg_expire_time - began)}{ids}"
        case Upgrade():
            return f"upgrades level={record.level}{ids}"
        case ForgetGroup():
            return f"forgets{ids}"
        case Tick():
            return f"ticks{ids}"
    words = sharing_words_of(record) or group_words_of(record, groups)
    if words is not None:
        return f"{words}{ids}"
    raise AssertionError(f"no words for {type(record).__name__}")


def lease_words(
    lease: Lease, log_time: int, holder: str, name_of: Callable[[str, str], str] = lambda instance, client: client
) -> str:
    """flights:0 a1 fresh age=0 epoch=0 hi=1000 stable=5 ranges=8-9 granted=5"""
    progress = lease.progress
    words = [f"{lease.topic}:{lease.partition}", holder, lease.freshness(log_time)]
    if lease.was_held:
        words += [f"age={lease.age(log_time)}", f"epoch={lease.epoch}", f"hi={lease.heartbeat_interval_ms}"]
    words.append("stable=none" if progress.stable < 0 else f"stable={progress.stable}")
    ranges = progress.ranges
    if ranges:
        several = ",".join(f"{first}-{last}" for first, last in ranges)
        words.append(f"ranges={several}" if len(ranges) <= MANY_RANGES else f"ranges={len(ranges)} of them")
    if progress.granted >= 0:
        words.append(f"granted={progress.granted}")
    words += [*share_words(lease, log_time, name_of), *hole_words(progress)]
    return " ".join(word for word in words if word)


def spans(offsets: list[int]) -> str:
    """0-4,9"""
    found: list[list[int]] = []
    for offset in offsets:
        if found and found[-1][1] == offset - 1:
            found[-1][1] = offset
        else:
            found.append([offset, offset])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def lease_name(word: str) -> tuple[str, int]:
    """flights:0"""
    topic, _, partition = word.partition(":")
    return topic, int(partition)


def _entry(group: str, word: str, epoch: Epoch) -> BeatEntry:
    text, _, token = word.partition("#")
    text, _, done = text.partition(">")
    name = lease_name(text)
    return BeatEntry(*name, int(token or epoch((group, *name))), _number(done or "nil"))


def _entry_words(entry: BeatEntry, group: str, epoch: Epoch) -> str:
    done = "" if entry.last_offset is None else f">{entry.last_offset}"
    is_present = entry.epoch == epoch((group, entry.topic, entry.partition))
    return f"{entry.topic}:{entry.partition}{done}{'' if is_present else f'#{entry.epoch}'}"


def _done(last_offset: int | None) -> str:
    return "" if last_offset is None else f" done={last_offset}"


def _number(word: str) -> int | None:
    return None if word == "nil" else int(word)


def _range(word: str) -> tuple[int, int]:
    first, last = word.split("-")
    return int(first), int(last)


def _singles(word: str) -> list[tuple[int, int]]:
    if not word:
        return []
    first, last = map(int, word.split(".."))
    return [(offset, offset) for offset in range(first, last + 1, 2)]
