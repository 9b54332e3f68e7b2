"""Targets of a move, resolved to offsets of the data partitions' logs; and the positions before it, in a file."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self, cast
from urllib.parse import quote

from kafka_marshal import arguments
from kafka_marshal.engine.work.topic_mark import split, why_lost
from kafka_marshal.errors import AdminError, ConfigurationError
from kafka_marshal.files import read_json, write_json
from kafka_marshal.ports import Cluster, FaultKind, TopicPartition
from kafka_marshal.runtime import is_moment
from kafka_marshal.types import Placed, Target
from rationalizer import BeatEntry, InvalidRecordError, Progress
from rationalizer.limits import MAX_OFFSET

WORDS = ("earliest", "latest", "readable")

LOOKUP_TIMEOUT_S = 10.0

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_FORMAT: Final = "kafka-marshal release-group 1"


@dataclass(frozen=True, slots=True)
class Move(Placed):
    """One partition's position before and after a move. Both are the offset to read next."""

    topic: str
    partition: int
    #: None: the group never held this partition, a consumer's ``start=`` decides.
    before: int | None
    after: int
    #: Offsets from ``after`` on that are done already, out of order, and will be repeated.
    done_ahead: int = 0
    #: Why ``before`` is not a position in the log; "": it is one. Set in planned moves.
    lost: str = ""
    #: Ranges (first, last) above ``after`` that stay done; only claimed groups can keep them.
    kept: tuple[tuple[int, int], ...] = ()
    #: Ranges (first, last) above ``before`` that are done now.
    ranges: tuple[tuple[int, int], ...] = ()
    #: The group takes checkpoints: the states of its members stay as they are. A rollback takes them along.
    keeps_state: bool = False
    #: Open messages below ``after`` that count as done then: they wait for their next try, or are in a batch. Of a lost
    #: position all, also those set aside: the topic does not have them any more.
    closed: tuple[tuple[int, int], ...] = ()
    #: Messages below ``after`` that were set aside, and stay so.
    parked: tuple[int, ...] = ()
    #: Open messages that an import brings along: they are set aside, or wait for their next try, as before.
    restored: tuple[int, ...] = ()
    #: The epoch of the move, for ``sink.rewind``: everything granted before has a lower one. None: only planned.
    epoch: int | None = None

    @property
    def last_offset(self) -> int:
        """The last_offset that sets this position; −1: nothing is done."""
        return self.after - 1

    def __str__(self) -> str:
        return f"{self.topic} [{self.partition}]: {'new' if self.before is None else self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays done above a new position, in addition to what is done above the old one."""

    ranges: tuple[tuple[int, int], ...] = ()
    #: Everything from here up to the old position, too; None: nothing.
    since: int | None = None

    def above(self, after: int, progress: Progress | None) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The position, which these ranges may move further, and the ranges above it."""
        ranges = list(self.ranges)
        if progress is not None:
            ranges += split(progress.ranges).ranges
            if self.since is not None and progress.stable >= self.since:
                ranges.append((self.since, progress.stable))
            # What is not done stays so; what was set aside stays set aside.
            for hole in progress.open:
                if hole.reason is None:
                    ranges = [part for each in ranges for part in without(each, hole.first, hole.last)]
        stable, kept = interval_union(after - 1, ranges)
        return stable + 1, kept


def without(span: tuple[int, int], first: int, last: int) -> list[tuple[int, int]]:
    """What is left of a span of offsets without these."""
    parts = [(span[0], min(span[1], first - 1)), (max(span[0], last + 1), span[1])]
    return [part for part in parts if part[0] <= part[1]]


def interval_union(stable: int, ranges: Iterable[tuple[int, int]]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """``stable`` and these ranges in one form: the offset up to which all is done, and the ranges above it."""
    kept: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if first <= stable + 1:
            stable = max(stable, last)
        elif kept and first <= kept[-1][1] + 1:
            kept[-1] = (kept[-1][0], max(kept[-1][1], last))
        else:
            kept.append((first, last))
    return stable, tuple(kept)


def check_targets(positions: Mapping[TopicPartition, Target]) -> None:
    """Raise ConfigurationError for invalid targets."""
    if not isinstance(positions, Mapping):
        raise arguments.wrong("positions", "a mapping of (topic, partition) to a position", positions)
    for key, target in positions.items():
        check_name(key)
        where = f"{key[0]} [{key[1]}]"
        if isinstance(target, datetime):
            if target.tzinfo is None:
                raise ConfigurationError(
                    f"{where}: {target} has no time zone; say which moment is meant. Nothing was changed"
                )
        elif isinstance(target, bool) or not isinstance(target, (int, str)):
            raise ConfigurationError(
                f"{where}: {target!r} is no position: an offset (to be read next), {', '.join(map(repr, WORDS))} or a "
                "datetime is. Nothing was changed"
            )
        elif isinstance(target, str) and target not in WORDS:
            raise ConfigurationError(f"{where}: {target!r} is none of {', '.join(WORDS)}. Nothing was changed")
        elif isinstance(target, int) and not 0 <= target <= MAX_OFFSET:
            raise ConfigurationError(f"{where}: {target} is no offset: 0 … 2^63−1 are. Nothing was changed")


def check_name(key: TopicPartition) -> None:
    """Raise ConfigurationError if this is not a partition that could be claimed."""
    try:
        topic, partition = key
        BeatEntry(topic, partition, 0, None)
    except (InvalidRecordError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{key!r} is no (topic, partition). Nothing was changed. {error}") from error


def resolve(
    cluster: Cluster,
    positions: Mapping[TopicPartition, Target],
    stands_at: Callable[[TopicPartition], int],
    *,
    force: bool,
) -> dict[TopicPartition, int]:
    """The offset to read next of each partition, sorted by topic and partition (*blocking*).

    stands_at: the offset that the group would read next now.
    Raises AdminError for missing partitions and, without force, for offsets outside the log.
    """
    check_targets(positions)
    marks = cluster.watermarks(sorted(positions), LOOKUP_TIMEOUT_S)
    missing = [f"{topic} [{partition}]" for topic, partition in sorted(positions) if (topic, partition) not in marks]
    if missing:
        raise AdminError(
            f"{', '.join(missing)}: not on this cluster, or without a leader at the moment. Nothing was changed. "
            "Check topic and partition, or try again when the brokers are back"
        )
    at_time = _offsets_at(cluster, positions)
    found: dict[TopicPartition, int] = {}
    for key in sorted(positions):
        target = positions[key]
        low, high = marks[key]
        if isinstance(target, datetime):
            found[key] = at_time.get(key, high)
        elif target == "readable":
            found[key] = first_readable(cluster, key, max(low, stands_at(key)), high)
        elif isinstance(target, str):
            found[key] = low if target == "earliest" else high
        else:
            found[key] = target
            if not force and not low <= target <= high:
                raise AdminError(
                    f"{key[0]} [{key[1]}]: offset {target} is outside the log, which holds {low} to {high - 1} and "
                    f"goes on at {high}. Nothing was changed. Choose {low} ('earliest') to {high} ('latest'), or "
                    "force it"
                )
    return found


def _offsets_at(cluster: Cluster, positions: Mapping[TopicPartition, Target]) -> dict[TopicPartition, int]:
    moments: dict[int, list[TopicPartition]] = {}
    for key, target in sorted(positions.items(), key=lambda item: item[0]):
        if isinstance(target, datetime):
            moments.setdefault((target - _EPOCH) // timedelta(milliseconds=1), []).append(key)
    found: dict[TopicPartition, int] = {}
    for timestamp_ms, keys in moments.items():
        found.update(cluster.offsets_for_time(keys, max(0, timestamp_ms), LOOKUP_TIMEOUT_S))
    return found


def stands_at(progress: Progress | None) -> int:
    """The offset that a group with this progress reads next; the first one without progress."""
    return 0 if progress is None else progress.stable + 1


def lost_positions(
    cluster: Cluster, partitions: Iterable[TopicPartition], progress_of: Callable[[TopicPartition], Progress | None]
) -> dict[TopicPartition, str]:
    """The partitions whose position is lost, and why (*blocking*)."""
    found = {key: progress for key in partitions if (progress := progress_of(key)) is not None}
    topics = cluster.topic_info({topic for topic, _ in found}, LOOKUP_TIMEOUT_S)
    marks = cluster.watermarks(sorted(found), LOOKUP_TIMEOUT_S)
    reasons = {
        key: why_lost(topics[key[0]], progress, marks[key][1])
        for key, progress in found.items()
        if key[0] in topics and key in marks
    }
    return {key: why for key, why in reasons.items() if why}


def moves_to(
    targets: Mapping[TopicPartition, int],
    progress_of: Callable[[TopicPartition], Progress | None],
    lost: Mapping[TopicPartition, str] = MappingProxyType({}),
    keeps: Mapping[TopicPartition, Keep] = MappingProxyType({}),
) -> list[Move]:
    """The moves to these offsets.

    lost: of :func:`lost_positions`. keeps: what stays done above.
    """
    moves = []
    for key, after in targets.items():
        progress = progress_of(key)
        why_not = lost.get(key, "")
        before = None if progress is None else progress.stable + 1
        ranges = () if progress is None else tuple((first, last) for first, last in split(progress.ranges).ranges)
        kept: tuple[tuple[int, int], ...] = ()
        if key in keeps and not why_not:
            after, kept = keeps[key].above(after, progress)
        ahead = 0 if kept else sum(last - max(first, after) + 1 for first, last in ranges if last >= after)
        closed, parked = open_at(progress, after, why_not)
        moves.append(Move(*key, before, after, ahead, why_not, kept, ranges, closed=closed, parked=parked))
    return moves


def open_at(
    progress: Progress | None, after: int, why_lost: str = ""
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """What of the open messages will count as done if this offset is read next, and what stays set aside.

    In a topic that was recreated none stays.
    """
    most = MAX_OFFSET if why_lost else after - 1
    holes = [] if progress is None else [hole for hole in progress.open if hole.first <= most]
    closed = tuple((hole.first, min(hole.last, most)) for hole in holes if why_lost or hole.reason is None)
    return closed, tuple(hole.first for hole in holes if hole.reason is not None and not why_lost)


# -- the positions before a move, in a file --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Replaced(Placed):
    """One partition: the position before (None: none), what was done above it, and the position after."""

    topic: str
    partition: int
    before: int | None
    after: int
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The positions of one group that a move replaced."""

    group: str
    #: The coordination topic.
    log: str
    #: When (ms since 1970, by the clock of the machine that moved them).
    time: int
    replaced: tuple[_Replaced, ...]

    @classmethod
    def of(cls, group: str, log: str, moves: Iterable[Move]) -> Self:
        """moves: as planned, under the pause."""
        replaced = tuple(_Replaced(*move.key, move.before, move.after, move.ranges) for move in moves if not move.lost)
        return cls(group, log, int(time.time() * 1000), replaced)

    @property
    def targets(self) -> dict[TopicPartition, int]:
        """The targets of an undo; without partitions that had no position."""
        return {each.key: each.before for each in self.replaced if each.before is not None}

    @property
    def keeps(self) -> dict[TopicPartition, Keep]:
        """What is done above those: before the move, and since."""
        return {each.key: Keep(each.ranges, each.after) for each in self.replaced if each.before is not None}

    @property
    def left_out(self) -> list[TopicPartition]:
        """Partitions that an undo does not move."""
        return [each.key for each in self.replaced if each.before is None]

    def write(self, path: Path) -> None:
        """Write it to a file, atomically. Raises ConfigurationError."""
        refused = (
            "the positions as they were can't be saved there ({}). Nothing was moved, and the group continues. Name "
            "another file (--plan)"
        )
        write_json(path, _FORMAT, asdict(self), refused)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read it from a file. Raises ConfigurationError."""
        try:
            found = read_json(Path(path), _FORMAT)
            replaced = tuple(
                _Replaced(**{**each, "ranges": tuple((first, last) for first, last in each["ranges"])})
                for each in found.pop("replaced")
            )
            return cls(**found, replaced=replaced)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{os.fspath(path)} is no plan that release-group wrote ({error}). Nothing was changed"
            ) from error

    def check(self, group: str, log: str) -> None:
        """Raise ConfigurationError if it is of another group or coordination topic."""
        if (self.group, self.log) != (group, log):
            raise ConfigurationError(
                f"this plan is of group {self.group!r} of {self.log!r}, not of {group!r} of {log!r}. Nothing was "
                "changed"
            )


def plan_path(group: str, of: str = "release") -> Path:
    """The default file of a plan: in the working directory, or that of temporary files."""
    folder = Path.cwd() if os.access(".", os.W_OK) else Path(tempfile.gettempdir())
    name = f"kafka-marshal-{of}-{quote(group, safe='')}-{time.strftime('%Y%m%dT%H%M%S')}"
    names = (f"{name}{(number and f'-{number}') or ''}.json" for number in count())
    return next(path for each in names if not (path := folder / each).exists())


# -- what can't be read ----------------------------------------------------------------------------------------------


#: How long one try may take before the partition counts as unreachable (s).
TRY_S = 10.0

SLICE_S = 0.2

#: Messages of one read.
STEP = 1_000

#: How a read of damaged bytes ends: librdkafka may take some of them for an offset, and be refused there.
FAILED = (FaultKind.OTHER, FaultKind.OUT_OF_RANGE)

#: Detects damaged bytes in uncompressed batches, too.
CONFIG: dict[str, object] = {"check.crcs": True}


def first_readable(cluster: Cluster, key: TopicPartition, first: int, end: int) -> int:
    """The first readable offset from ``first`` on; ``end``, the log's, if there is none (*blocking*).

    The end of a corrupt batch can't be seen in its bytes: it is searched for in doubling steps, and then by bisection.
    A batch is read as a whole or not at all. Raises AdminError if no broker answers.
    """
    if first >= end or _can_read(cluster, key, first):
        return min(first, end)
    bad, step = first, 1
    while (good := min(bad + step, end)) < end and not _can_read(cluster, key, good):
        bad, step = good, 2 * step
    while good - bad > 1:
        middle = (bad + good) // 2
        if _can_read(cluster, key, middle):
            good = middle
        else:
            bad = middle
    return good


def first_with_a_moment(cluster: Cluster, key: TopicPartition, first: int, end: int) -> tuple[int, list[int]]:
    """The offset of the first record from first on whose timestamp Spark can represent, and earlier timestamps (ms).

    ``end`` if there is none (*blocking*). A record that can't be read ends the search at its offset.
    """
    wrong: list[int] = []
    reader = cluster.data_reader("kafka-marshal-skip", CONFIG)
    try:
        reader.assign({key: first})
        for _ in range(int(TRY_S / SLICE_S)):
            messages, faults = reader.read(STEP, SLICE_S)
            for message in messages:
                kind, stamp = cast("Any", message).timestamp()  # of the in-memory log, too
                if not kind or is_moment(stamp):
                    return cast("int", message.offset()), wrong
                wrong.append(stamp)
                first = cast("int", message.offset()) + 1
            if faults or first >= end or reader.take_ends():
                break
    finally:
        reader.close()
    return first, wrong


def _can_read(cluster: Cluster, key: TopicPartition, offset: int) -> bool:
    # A new reader: a late error about one offset could come while it reads the next.
    reader = cluster.data_reader("kafka-marshal-skip", CONFIG)
    try:
        reader.assign({key: offset})
        for _ in range(int(TRY_S / SLICE_S)):
            messages, faults = reader.read(1, SLICE_S)
            if messages or reader.take_ends():
                return True
            if any((x.topic, x.partition) == key and x.kind in FAILED for x in faults):
                return False
    finally:
        reader.close()
    raise AdminError(
        f"{key[0]} [{key[1]}]: nothing was read at offset {offset} within {TRY_S:g} s, and no fault was reported. "
        "Nothing was changed. Can the broker that leads it be reached from here? Is a record larger than "
        "receive.message.max.bytes?"
    )
