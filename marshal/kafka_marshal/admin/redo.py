"""Redo: just these done messages of a group are opened again, while it works on (R1 to R10).

What is done becomes a hole with no tries, and its owner handles it as it handles what was set aside. Each record is a
compare-and-set by ``seen``: copies open nothing twice, and what others opened, or set back, since the operator looked
is not opened on top. So a plan's file holds each record before it is appended, and a plan that was interrupted anywhere
is carried out again from its file.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from shlex import quote
from typing import Any, Final, NamedTuple, Self

from kafka_marshal import arguments
from kafka_marshal.admin.base import AdminBase
from kafka_marshal.admin.open_messages import MOST_ENTRIES, Place, Settled, places_of, settle_places, state_of
from kafka_marshal.admin.positions import LOOKUP_TIMEOUT_S, check_name, check_targets, lost_positions, resolve, without
from kafka_marshal.admin.session import Session, group_in, kind_in, never, progress_in
from kafka_marshal.engine.work.topic_mark import kafka_counts, split
from kafka_marshal.errors import AdminError, ConfigurationError
from kafka_marshal.files import read_json, write_json
from kafka_marshal.observe.holes import read_at
from kafka_marshal.observe.text import names_of, no_group
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.types import Placed, Target
from rationalizer import (
    Progress,
    Record,
    SettleOffsets,
    SettlingMessages,
    World,
    codes,
    decode,
    key_hash,
    route_group,
    route_lease,
)
from rationalizer.holes import NO_KEY
from rationalizer.levels import REDO_LEVEL, SUPPORTED_LEVEL

#: Messages open at once beyond what is worked off, at most: for live traffic, and the limit of open messages (R3).
DEFAULT_RATE: Final = 1_000

#: No member works off what was opened for this long (s).
STILL_S = 60.0

#: How often to look for messages that were worked off (s).
_LOOK_S = 0.2

_FORMAT: Final = "kafka-marshal redo 1"

#: Offsets or times, from the first up to the second: offsets inclusive, times exclusive.
Span = tuple[Target, Target]


class RedoSpan(NamedTuple):
    """Offsets first … last of a partition, which are done. key_hash: of the one offset; None: for every key."""

    first: int
    last: int
    key_hash: int | None


class ShownMessage(NamedTuple):
    """The first or the last message of a plan: its offset, its time (ms), its key."""

    offset: int
    time: int
    key: bytes | None


@dataclass(frozen=True, slots=True)
class RedoPartition(Placed):
    """What a plan found of one partition."""

    topic: str
    partition: int
    #: What is done, and will be opened.
    spans: tuple[RedoSpan, ...]
    #: Messages (without reading their keys: offsets) in them.
    messages: int
    #: Not touched: they wait for a try, or are in a batch; they are set aside (``redrive``); they are not done yet.
    open: int = 0
    parked: int = 0
    ahead: int = 0
    #: Retention or compaction took them.
    gone: int = 0
    #: Of ``messages``: those before the group's start, which were never handled.
    skipped: int = 0
    #: It is delivered at most once: of ``messages``, those granted last may still be in flight.
    may_be_in_hand: bool = False
    first: ShownMessage | None = None
    last: ShownMessage | None = None


@dataclass(slots=True)
class _Written:
    """One record of a plan, as it is appended, again too."""

    topic: str
    partition: int
    seen: int
    spans: tuple[RedoSpan, ...]
    #: Its offset in the log, once it was accepted.
    offset: int | None = None

    @property
    def key(self) -> TopicPartition:
        return self.topic, self.partition


@dataclass(slots=True)
class RedoPlan:
    """The messages of one group to be done again; and each record for it, written here before it is appended."""

    group: str
    #: The coordination topic.
    log: str
    #: When it was made (ms since 1970).
    time: int
    partitions: tuple[RedoPartition, ...]
    records: list[_Written] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """How many are opened in all."""
        return sum(each.messages for each in self.partitions)

    @property
    def offsets(self) -> dict[TopicPartition, list[int]]:
        """All of them, by partition: what ``sink.rewind(plan.group, redone=…)`` takes, before they are opened."""
        return {
            each.key: [offset for span in each.spans for offset in range(span.first, span.last + 1)]
            for each in self.partitions
            if each.spans
        }

    def write(self, path: Path) -> None:
        """Write it to a file, whole or not at all. Raises ConfigurationError."""
        rows = asdict(self)
        for each in rows["partitions"]:
            each["first"] = each["last"] = None
        refused = "the plan can't be saved there ({}). Nothing more was opened. Name another file (--plan)"
        write_json(path, _FORMAT, rows, refused)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read it from a file. Raises ConfigurationError."""
        try:
            found = read_json(Path(path), _FORMAT)
            partitions = tuple(
                RedoPartition(**{**each, "spans": _spans(each["spans"])}) for each in found.pop("partitions")
            )
            records = [_Written(**{**each, "spans": _spans(each["spans"])}) for each in found.pop("records")]
            return cls(**found, partitions=partitions, records=records)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{os.fspath(path)} is no plan that redo wrote ({error}). Nothing was changed"
            ) from error

    def check(self, group: str, log: str) -> None:
        """Raise ConfigurationError if it is of another group or coordination topic."""
        if (self.group, self.log) != (group, log):
            raise ConfigurationError(
                f"this plan is of group {self.group!r} of {self.log!r}, not of {group!r} of {log!r}. Nothing was "
                "changed"
            )

    def left_of(self, key: TopicPartition) -> list[RedoSpan]:
        """What no record of it has yet."""
        spans = [span for each in self.partitions if each.key == key for span in each.spans]
        for record in self.records:
            for used in record.spans if record.key == key else ():
                spans = [
                    RedoSpan(first, last, span.key_hash)
                    for span in spans
                    for first, last in without((span.first, span.last), used.first, used.last)
                ]
        return spans


def _spans(rows: Iterable[Sequence[Any]]) -> tuple[RedoSpan, ...]:
    return tuple(RedoSpan(_whole(a), _whole(b), None if hashed is None else _whole(hashed)) for a, b, hashed in rows)


def _key(key: object) -> bytes:
    if not isinstance(key, bytes | str):
        raise arguments.wrong("keys", "keys of messages, each bytes or a str", key)
    return key.encode() if isinstance(key, str) else key


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no number")
    return value


@dataclass(frozen=True, slots=True)
class Redone:
    """What was opened, or would be (``dry_run``)."""

    plan: RedoPlan
    #: Messages that were opened; of a dry run: none.
    opened: int = 0
    #: Of these: those that are done again already.
    worked_off: int = 0
    #: Spans that were left as they are, and why: others opened them, or set the partition back, meanwhile.
    left: Mapping[tuple[str, int, int, int], str] = field(default_factory=dict)


class GroupRedo(AdminBase):
    """Methods of :class:`~kafka_marshal.admin.Admin` about done messages that are to be done again."""

    def plan_redo(
        self,
        group: str,
        partitions: Mapping[TopicPartition, Span | None],
        *,
        keys: Iterable[bytes | str] | None = None,
        messages: Iterable[Place] = (),
    ) -> RedoPlan:
        """What of these offsets is done, and can be opened again; nothing is appended.

        ``partitions``: (topic, partition) → (first, last) offsets, both included, or (from, until) datetimes; None: all
        that is done of it.

        ``keys``: only messages with one of these keys (a str: in UTF-8).

        ``messages``: these, too: (topic, partition, offset) of each.

        Messages are read where their keys are needed: with ``keys``, in coordinated groups, and where a claimed
        partition is shared by key, or may be.

        Raises ConfigurationError below level 5 of the log; AdminError if the group is unknown, takes checkpoints
        (``rollback`` takes the states along), processes in transactions, or a partition was recreated or is gone.
        """
        self._check_group(group)
        arguments.an_instance("partitions", partitions, Mapping, "a mapping of (topic, partition) to offsets or times")
        single = places_of(messages)
        if not partitions and not single:
            raise ConfigurationError("say which messages: partitions= or messages=. Nothing was changed")
        for key, bounds in partitions.items():
            check_name(key)
            if bounds is not None:
                first, last = bounds
                check_targets({key: first})
                check_targets({key: last})
        wanted = None if keys is None else frozenset(map(_key, arguments.several("keys", keys, "keys of messages")))
        return self._look(
            lambda cluster, replica: _Finder(cluster, replica.worlds, self.topic, group, wanted).plan(
                partitions, single
            )
        )

    def redo(
        self,
        plan: RedoPlan,
        *,
        path: Path | None = None,
        rate: int = DEFAULT_RATE,
        progress: Callable[[int, int], None] | None = None,
    ) -> Redone:
        """Open the messages of a plan: their owners handle them again, while the group works on.

        ``path``: the plan's file, written before each record; to carry on after an interruption read it from there.

        ``rate``: at most this number is open at once beyond what was worked off.

        ``progress`` is called with (messages opened, messages in all).

        Raises AdminError if the log does not answer, or no member works off what was opened for 60 s: the plan is at
        what its file says, and can be carried on.
        """
        self._check_group(plan.group)
        arguments.an_instance("plan", plan, RedoPlan, "one of plan_redo, or of its file")
        rate = arguments.a_whole("rate", rate, 1)
        plan.check(plan.group, self.topic)
        return self._act(plan.group, lambda session: _Redo(session, plan, path, rate, progress).carry_out())

    def undo_redo(self, plan: RedoPlan, *, dry_run: bool = False) -> Settled:
        """Count what is still open of a plan's messages as done again; what was handled since stays so.

        ``dry_run``: only return what would be done.
        """
        self._check_group(plan.group)
        plan.check(plan.group, self.topic)

        def undo(session: Session) -> Settled:
            for record in [each for each in plan.records if each.offset is None]:
                with session.locked():
                    end = session.worlds[_cp(session, record.key)].next_offset
                record.offset = _copy_of(session, plan, record, end)
            with session.locked():
                places = tuple(_still_open(session, plan))
            return settle_places(session, "discard", places, dry_run=dry_run)

        return self._act(plan.group, undo)


# -- what is found -----------------------------------------------------------------------------------------------------


class _Finder:
    def __init__(
        self, cluster: Cluster, worlds: Mapping[int, World], log: str, group: str, keys: frozenset[bytes] | None
    ) -> None:
        self._cluster = cluster
        self._worlds = worlds
        self._log = log
        self._group = group
        self._keys = keys
        self._is_claimed = kind_in(worlds, group) == "claimed"

    def plan(self, partitions: Mapping[TopicPartition, Span | None], single: Sequence[Place]) -> RedoPlan:
        offsets: dict[TopicPartition, set[int]] = {}
        for topic, partition, offset in single:
            offsets.setdefault((topic, partition), set()).add(offset)
        self._check(sorted({*partitions, *offsets}))
        bounds = self._bounds(partitions)
        found = tuple(
            self._partition(key, range(*bounds[key][:2]), bounds[key][2])
            if key in bounds
            else self._partition(key, sorted(offsets[key]), 0)
            for key in sorted({*partitions, *offsets})
        )
        return RedoPlan(self._group, self._log, int(time.time() * 1000), found)

    def _check(self, keys: Sequence[TopicPartition]) -> None:
        """Raises if something of it can't be done again by this."""
        name, worlds = self._group, self._worlds
        if kind_in(worlds, name) is None:
            raise AdminError(f"{no_group(name, names_of(worlds.values()))} Nothing was changed")
        level = min(world.level for world in worlds.values())
        if level < REDO_LEVEL:
            raise ConfigurationError(
                f"redo: level {REDO_LEVEL} of the coordination topic is needed, which is at level {level}. Nothing was "
                "changed. Once all members have this release, raise it: kafka-marshal upgrade"
            )
        group = group_in(worlds, name)
        if group is not None and group.checkpoints is not None:
            raise AdminError(
                f"group {name!r} takes checkpoints: what is done again would count twice in the states of its members. "
                f"Nothing was changed. kafka-marshal rollback {quote(name)} takes the states along"
            )
        # A position that was set takes its partition's mark away until the next member comes.
        marked = {topic for topic, progress in self._all_progress() if kafka_counts(progress)}
        for key in keys:
            if key[0] in marked:
                raise AdminError(
                    f"{key[0]} [{key[1]}]: group {name!r} processes in transactions, in which no message can be open "
                    "by itself. Nothing was changed. Set the partition back, and all since with it: "
                    f"kafka-marshal release-group {quote(name)} --partition "
                    f"{quote(f'{key[0]}:{key[1]}=OFFSET')}"
                )
        lost = lost_positions(self._cluster, keys, self._progress)
        if lost:
            (topic, partition), why = min(lost.items())
            raise AdminError(
                f"{topic} [{partition}]: {why}, and other messages have these offsets now. Nothing was changed"
            )

    def _progress(self, key: TopicPartition) -> Progress | None:
        return progress_in(self._worlds, self._group, key)

    def _all_progress(self) -> Iterator[tuple[str, Progress]]:
        """By topic, of each partition of the group."""
        group = group_in(self._worlds, self._group)
        if group is not None:
            yield from ((topic, kept.progress) for topic, _, kept in group.all_progress())
        leases = (lease for world in self._worlds.values() for lease in world.leases() if group is None)
        yield from ((lease.topic, lease.progress) for lease in leases if lease.group_id == self._group)

    def _bounds(self, partitions: Mapping[TopicPartition, Span | None]) -> dict[TopicPartition, tuple[int, int, int]]:
        """(first offset, offset behind the last, offsets of them below the log's begin), of each partition."""
        froms = {key: "earliest" if span is None else span[0] for key, span in partitions.items()}
        ends = {key: "latest" if span is None else span[1] for key, span in partitions.items()}
        marks = self._cluster.watermarks(sorted(partitions), LOOKUP_TIMEOUT_S)
        first = resolve(self._cluster, froms, lambda _: 0, force=True)
        behind = resolve(self._cluster, ends, lambda _: 0, force=True)
        found = {}
        for key in partitions:
            end = behind[key] + (not isinstance(ends[key], datetime | str))
            low, high = marks[key]
            begin = min(max(first[key], low), max(end, low))
            found[key] = begin, min(max(end, begin), high), max(0, min(end, low) - first[key])
        return found

    def _partition(self, key: TopicPartition, wanted: Sequence[int], deleted: int) -> RedoPartition:
        progress = self._progress(key)
        if progress is None:
            return RedoPartition(*key, (), 0, ahead=len(wanted))
        if self._needs_keys(key, progress) or not isinstance(wanted, range):
            found = self._by_key(key, progress, wanted)
        else:
            found = self._whole(key, progress, wanted.start, wanted.stop)
        is_granted = any(span.last <= progress.granted for span in found.spans)
        return replace(found, gone=found.gone + deleted, may_be_in_hand=is_granted)

    def _needs_keys(self, key: TopicPartition, progress: Progress) -> bool:
        """R2 takes no range without a key hash there; or the next one may share it by keys, which that would bar."""
        if self._keys is not None or not self._is_claimed or progress.piece_count > 1:
            return True
        lease = self._worlds[route_lease(*key, len(self._worlds))].lease(self._group, *key)
        return lease is None or lease.client_id is None or any(share.lo != NO_KEY for share in lease.shares or ())

    def _by_key(self, key: TopicPartition, progress: Progress, wanted: Sequence[int]) -> RedoPartition:
        reads = read_at(
            self._cluster, {key: wanted} if wanted else {}, lambda m: (m.timestamp()[1], m.key()), LOOKUP_TIMEOUT_S
        )
        if why := reads.unread.get(key):
            raise AdminError(f"{key[0]} [{key[1]}]: its messages could not be read ({why}). Nothing was changed")
        spans: list[RedoSpan] = []
        shown: list[ShownMessage] = []
        is_open = is_parked = ahead = skipped = 0
        start = self._start(key)
        for (_, _, offset), (moment, name) in sorted(reads.found.items()):
            if self._keys is not None and name not in self._keys:
                continue
            hashed = key_hash(name, offset)
            hole = None if progress.holes is None else progress.holes.at(offset)
            if hole is not None:
                is_parked += state_of(hole) == "parked"
                is_open += state_of(hole) != "parked"
            elif not progress.has_passed(offset, hashed):
                ahead += 1
            else:
                skipped += offset <= start
                spans.append(RedoSpan(offset, offset, hashed))
                shown.append(ShownMessage(offset, moment, name))
        return RedoPartition(
            *key,
            tuple(spans),
            len(spans),
            is_open,
            is_parked,
            ahead,
            0 if self._keys is not None else len(reads.gone),
            skipped,
            first=shown[0] if shown else None,
            last=shown[-1] if shown else None,
        )

    def _start(self, key: TopicPartition) -> int:
        """The offset before the group's first, of a coordinated one; −1: its beginning, or the log does not say."""
        group = group_in(self._worlds, self._group)
        kept = None if group is None else group.kept(*key)
        return -1 if kept is None else kept.initial

    def _whole(self, key: TopicPartition, progress: Progress, first: int, end: int) -> RedoPartition:
        last = end - 1
        ranges = [(0, progress.stable), *split(progress.ranges).ranges]
        spans = [(max(low, first), min(high, last)) for low, high in ranges if max(low, first) <= min(high, last)]
        ahead = end - first - sum(high - low + 1 for low, high in spans)
        is_open = is_parked = 0
        for hole in progress.open:
            low, high = max(hole.first, first), min(hole.last, last)
            if low <= high:
                is_parked += high - low + 1 if state_of(hole) == "parked" else 0
                is_open += high - low + 1 if state_of(hole) != "parked" else 0
                spans = [part for each in spans for part in without(each, low, high)]
        wanted = {key: {spans[0][0], spans[-1][1]}} if spans else {}
        reads = read_at(self._cluster, wanted, lambda m: (m.timestamp()[1], m.key()), LOOKUP_TIMEOUT_S)
        shown = [ShownMessage(place[2], *found) for place, found in sorted(reads.found.items())]
        return RedoPartition(
            *key,
            tuple(RedoSpan(*each, None) for each in spans),
            sum(high - low + 1 for low, high in spans),
            is_open,
            is_parked,
            ahead,
            first=shown[0] if shown else None,
            last=shown[-1] if shown else None,
        )


# -- what is done ------------------------------------------------------------------------------------------------------

#: Called after each record that was saved, and before it is saved that the log has shown it. For tests.
passed: Callable[[], None] = lambda: None  # noqa: E731


def _still_open(session: Session, plan: RedoPlan) -> Iterator[Place]:
    """What is still open of what its records opened, and not set aside; the lock is held."""
    records = [each for each in plan.records if each.offset is not None]
    for key in sorted({each.key for each in records}):
        progress = session.progress(key)
        if progress is None:
            continue
        ours = {each.offset for each in records if each.key == key}
        spans = sorted(span[:2] for each in records if each.key == key for span in each.spans)
        for hole in progress.open:
            # Its owner changes `since`, too, by another try or a batch; another operator opens only what is done.
            is_ours = hole.since in ours or hole.since < progress.again or progress.again in ours
            if hole.is_parked or not is_ours:
                continue
            at = max(0, bisect_right(spans, hole.first, key=itemgetter(0)) - 1)
            while at < len(spans) and spans[at][0] <= hole.last:
                within = range(max(spans[at][0], hole.first), min(spans[at][1], hole.last) + 1)
                yield from ((*key, offset) for offset in within)
                at += 1


def _cp(session: Session, key: TopicPartition) -> int:
    count = len(session.worlds)
    return route_lease(*key, count) if session.kind() == "claimed" else route_group(session.group_id, count)


def _copy_of(session: Session, plan: RedoPlan, written: _Written, before: int) -> int | None:
    """The offset of an earlier copy of a record, from before an interruption, that was accepted; None: none was."""
    wanted = plan.group, *written.key
    with session.locked():
        progress = session.progress(written.key)
        again = -1 if progress is None else progress.again
        place = plan.log, _cp(session, written.key)
    reads = read_at(session.cluster, {place: range(written.seen, before)}, _redo_in, LOOKUP_TIMEOUT_S)
    for (_, _, offset), found in sorted(reads.found.items()):
        if found is not None and found[:3] == wanted:
            # Another's came first, so ours is behind it; or a new position did (R1), and this opened nothing.
            is_ours = found[3:] == (written.seen, tuple((*span, 0) for span in written.spans))
            return offset if is_ours and again >= offset else None
    return None


class _Redo:
    """Carries out a plan, record by record."""

    def __init__(
        self,
        session: Session,
        plan: RedoPlan,
        path: Path | None,
        rate: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._session = session
        self._plan = plan
        self._path = path
        self._rate = rate
        self._progress = progress
        self._left: dict[tuple[str, int, int, int], str] = {}

    def carry_out(self) -> Redone:
        self._save()
        for record in [each for each in self._plan.records if each.offset is None]:
            self._append(record)
        while chunks := list(self._chunks()):
            for key, spans in chunks:
                self._wait_for_room(sum(span.last - span.first + 1 for span in spans))
                with self._session.locked():
                    seen = self._session.worlds[_cp(self._session, key)].next_offset
                record = _Written(*key, seen, tuple(spans))
                self._plan.records.append(record)
                self._save()
                passed()
                self._append(record)
        return Redone(self._plan, self._opened(), self._opened() - self._open_now(), self._left)

    def _save(self) -> None:
        if self._path is not None:
            self._plan.write(self._path)

    def _chunks(self) -> Iterator[tuple[TopicPartition, list[RedoSpan]]]:
        """The next record of each partition: as many messages as may be open at once."""
        for key in sorted({each.key for each in self._plan.partitions}):
            room = self._rate
            spans: list[RedoSpan] = []
            for first, last, hashed in self._plan.left_of(key):
                if room > 0 and len(spans) < MOST_ENTRIES:
                    spans.append(RedoSpan(first, min(last, first + room - 1), hashed))
                    room -= spans[-1].last - first + 1
            if spans:
                yield key, spans

    def _opened(self) -> int:
        spans = [span for each in self._plan.records if each.offset is not None for span in each.spans]
        return sum(span.last - span.first + 1 for span in spans)

    def _open_now(self) -> int:
        with self._session.locked():
            return sum(1 for _ in _still_open(self._session, self._plan))

    def _wait_for_room(self, messages: int) -> None:
        """Wait until this number more may be open. Raises AdminError if nothing is worked off for STILL_S."""
        session, before, since = self._session, -1, self._session.now_ms()
        while (now := self._open_now()) and now + messages > self._rate:
            if now != before:
                before, since = now, session.now_ms()
            elif session.now_ms() - since > STILL_S * 1000:
                raise AdminError(
                    f"no member has worked off any of {now:,} messages that were opened for {STILL_S:g} s; "
                    f"{self._opened():,} of {self._plan.messages:,} are opened. Is a worker of group "
                    f"{self._plan.group!r} alive? Carry on from the plan's file, or undo it"
                )
            session.wait_for(never, session.now_ms() + _LOOK_S * 1000)

    def _append(self, written: _Written) -> None:
        session, key = self._session, written.key
        opened = tuple((span.first, span.last, span.key_hash, 0) for span in written.spans)
        record: Record
        if session.kind() == "claimed":
            record = SettlingMessages(*session.ids, *key, None, written.seen, open=opened, redo=True)
        else:
            record = SettleOffsets(*session.ids, "", 0, written.seen, *key, open=opened, redo=True)
        (asked,) = session.ask((_cp(session, key), record))
        passed()
        if asked.outcome is None or asked.outcome.entries is None:
            why = "did not show the record in time" if asked.outcome is None else f"refused it ({asked.outcome.code})"
            raise AdminError(
                f"{key[0]} [{key[1]}]: the log {why}. {self._opened():,} of {self._plan.messages:,} messages were "
                "opened before that. Carry on from the plan's file: nothing is opened twice"
            )
        entries = asked.outcome.entries
        if codes.OK not in entries and codes.FENCED in entries:
            earlier = _copy_of(session, self._plan, written, asked.offset)
            if earlier is not None:
                asked.offset, entries = earlier, (codes.OK,) * len(entries)
        refused = [(span, code) for span, code in zip(written.spans, entries, strict=True) if code != codes.OK]
        written.offset = asked.offset
        written.spans = tuple(span for span, code in zip(written.spans, entries, strict=True) if code == codes.OK)
        for span, code in refused:
            why = (
                "its partition has as many open messages as it may have: carry on later"
                if code == codes.MAX_INDIVIDUAL_COMMIT_REACHED
                else "it was opened, or set back, by another operator meanwhile, or is no longer done: look again"
            )
            self._left[*key, span.first, span.last] = why
        self._strike(key, [span for span, _ in refused])
        self._save()
        if self._progress is not None:
            self._progress(self._opened(), self._plan.messages)

    def _strike(self, key: TopicPartition, spans: Sequence[RedoSpan]) -> None:
        """These are not wanted any more."""
        partitions = []
        for each in self._plan.partitions:
            kept = list(each.spans)
            for gone in spans if each.key == key else ():
                kept = [
                    RedoSpan(first, last, span.key_hash)
                    for span in kept
                    for first, last in without((span.first, span.last), gone.first, gone.last)
                ]
            messages = sum(span.last - span.first + 1 for span in kept)
            partitions.append(
                each if len(kept) == len(each.spans) else replace(each, spans=tuple(kept), messages=messages)
            )
        self._plan.partitions = tuple(partitions)


def _redo_in(message: Any) -> tuple[object, ...] | None:
    """(group, topic, partition, seen, open) of a record that opens what is done; None: of another one."""
    try:
        record = decode(message.value(), SUPPORTED_LEVEL)
    except ValueError:  # no record
        return None
    if not isinstance(record, SettlingMessages | SettleOffsets) or not record.redo:
        return None
    return record.group_id, record.topic, record.partition, record.seen, record.open
