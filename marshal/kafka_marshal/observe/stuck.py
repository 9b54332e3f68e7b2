"""Why partitions make no progress, as far as the log and the topics show it, without asking members."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kafka_marshal.errors import MarshalError
from kafka_marshal.observe.rows import NO_PROGRESS, WINDOW_MS, patience_ms, span_text, verdict
from kafka_marshal.observe.text import local_ms
from kafka_marshal.ports import FaultKind
from rationalizer.limits import MAX_INTERVALS

if TYPE_CHECKING:
    from kafka_marshal.observe.checkpoints import CheckpointsRow
    from kafka_marshal.observe.meter import RateMeter
    from kafka_marshal.observe.rows import LeaseRow
    from kafka_marshal.ports import Cluster, Message, TopicPartition

#: The most partitions whose next message is read, and the time for all of them (s).
PROBED_AT_MOST = 50
PROBE_S = 2.0

SLICE_S = 0.2

#: A first undone message holds back its partition after this long (ms), if later ones are done.
HELD_BACK_MS = 10_000

#: The most partitions whose log end of a minute ago is looked up.
ASKED_AT_MOST = 1_000

#: The most characters of a key that are shown.
KEY_SHOWN = 40

#: Fetches little, and detects damaged bytes in uncompressed batches, too.
CONFIG: dict[str, object] = {"check.crcs": True, "fetch.message.max.bytes": 65_536, "queued.max.messages.kbytes": 1_024}


def mark_stuck(cluster: Cluster, rows: list[LeaseRow], now_ms: int) -> list[LeaseRow]:
    """The rows, with the result of reading the next message of those that have messages and make no progress."""
    still: dict[TopicPartition, list[LeaseRow]] = {}
    for _, row in sorted(_in_turns(rows), key=lambda item: item[0]):
        if row.lag and not row.stuck and (row.idle_ms or 0) >= patience_ms(row.heartbeat_interval_ms):
            still.setdefault((row.topic, row.partition), []).append(row)
    if not still:
        return rows
    probed = dict(list(still.items())[:PROBED_AT_MOST])
    positions = {key: max(first.position, first.log_start or 0) for key, (first, *_) in probed.items()}
    unreadable, found = _probe(cluster, positions)
    missing = {key: at for key, at in positions.items() if key not in found and key not in unreadable}
    behind = behind_transactions(cluster, missing, now_ms) if missing else {}
    stamps = {key: _stamp(message) for key, message in found.items()}
    # A worker that is busy with one partition's backlog reaches the others later.
    at_work = {(row.group, row.instance) for row in rows if row.still_ms < patience_ms(row.heartbeat_interval_ms)}
    return [
        _with_reason(row, positions, unreadable, behind, stamps, now_ms, (row.group, row.instance) in at_work)
        for row in rows
    ]


def mark_held_back(
    cluster: Cluster, rows: list[LeaseRow], most: Mapping[str, int] = MappingProxyType({})
) -> list[LeaseRow]:
    """The rows, with the message that blocks a partition while later ones are done.

    most: how many intervals beyond gaps the log keeps, by group (P5).
    """
    waiting = {(row.topic, row.partition): row.position for row in rows if _is_held_back(row)}
    if not waiting:
        return rows
    _, found = _probe(cluster, dict(list(waiting.items())[:PROBED_AT_MOST]))
    return [
        _with_key(row, found.get((row.topic, row.partition)), most.get(row.group, MAX_INTERVALS))
        if _is_held_back(row)
        else row
        for row in rows
    ]


def _is_held_back(row: LeaseRow) -> bool:
    """Whether later messages of it are done; or, for longer, those of other partitions of its holder."""
    if not row.held or (row.stuck and not row.stuck.startswith(NO_PROGRESS)):
        return False
    if row.beyond:
        return (row.stable_ms or 0) >= HELD_BACK_MS
    # A holder that is busy with another partition's backlog usually reaches this one within the window.
    patience = max(WINDOW_MS, patience_ms(row.heartbeat_interval_ms))
    return not row.stuck and bool(row.lag) and min(row.still_ms, row.waiting_ms or 0) >= patience


def _with_key(row: LeaseRow, message: Message | None, most: int) -> LeaseRow:
    by = "" if message is None or message.offset() != row.position else f" by {_key_text(message.key())}"
    still_ms = min(row.still_ms, row.waiting_ms or 0)
    still = (still_ms, row.is_still_longer and still_ms == row.still_ms)
    if row.beyond:
        still = (row.stable_ms or 0, row.stable_at_least)
    others = "" if row.beyond else f", while {row.client} handles other partitions"
    text = f"held back at offset {row.position} for {span_text(*still)}{by}{others}"
    if len(row.ranges) >= max(1, most - 1):  # besides the mark
        text += f"; nothing above is delivered, as the log keeps no more intervals (max_individual_commits, {most:,})"
    return replace(row, held_back=text, stuck=f"{row.stuck} ({text})" if row.stuck else "")


def mark_verdicts(
    cluster: Cluster, rows: list[LeaseRow], meter: RateMeter, now_ms: int, timeout_s: float
) -> list[LeaseRow]:
    """The rows with their verdicts over the last minute (*blocking*)."""
    begin = now_ms - WINDOW_MS
    positions = {
        id(row): meter.track((row.group, row.topic, row.partition, row.lo)).positions_since(begin) for row in rows
    }
    asked = {(row.topic, row.partition) for row in rows if row.lag and row.held and positions[id(row)]}
    few = sorted(asked)[:ASKED_AT_MOST]
    ends = cluster.offsets_for_time(few, begin, timeout_s) if few else {}
    return [
        replace(
            row,
            verdict=verdict(
                row.lag,
                held=row.held,
                is_held_back=bool(row.held_back),
                still_ms=row.behind_ms or 0,
                positions=positions[id(row)],
                end_before=ends.get((row.topic, row.partition)),
            ),
        )
        for row in rows
    ]


def _key_text(key: bytes | str | None) -> str:
    """A key in words."""
    if key is None:
        return "a message without a key"
    text = key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else key
    return f"key {text[:KEY_SHOWN]}{'…' * (len(text) > KEY_SHOWN)}"


def _in_turns(rows: list[LeaseRow]) -> Iterator[tuple[int, LeaseRow]]:
    """(turn, row): each holder's first partition before any second one, since a hung holder shows in each."""
    turns: Counter[tuple[str, str | None]] = Counter()
    for row in rows:
        yield turns[row.group, row.instance], row
        turns[row.group, row.instance] += 1


def _with_reason(
    row: LeaseRow,
    positions: Mapping[TopicPartition, int],
    unreadable: Mapping[TopicPartition, str],
    behind: Mapping[TopicPartition, str],
    stamps: Mapping[TopicPartition, int],
    now_ms: int,
    is_at_work: bool,
) -> LeaseRow:
    key = (row.topic, row.partition)
    if row.stuck or not row.lag or positions.get(key) != max(row.position, row.log_start or 0):
        return row
    if key in unreadable:
        return replace(row, stuck=f"offset {positions[key]} can't be read: {unreadable[key]}")
    if key not in stamps:  # behind an open transaction, or not read in time
        return replace(row, stuck=behind.get(key, ""))
    # A message without a timestamp has waited since the position last moved.
    waiting_ms = (row.idle_ms or 0) if stamps[key] < 0 else max(0, now_ms - stamps[key] - row.as_of_ms)
    row = replace(row, waiting_ms=waiting_ms)
    done_nothing_ms = min(row.still_ms, waiting_ms)
    if not row.held or is_at_work or done_nothing_ms < patience_ms(row.heartbeat_interval_ms):
        return row
    still = span_text(done_nothing_ms, row.is_still_longer and done_nothing_ms == row.still_ms)
    return replace(row, stuck=f"{NO_PROGRESS} for {still} with messages waiting: see {row.client}'s log")


def with_checkpoints(row: LeaseRow, checkpoints: CheckpointsRow) -> LeaseRow:
    """A row of a group that takes checkpoints: what has no progress may wait for one, and its holder work."""
    is_unsaved = not checkpoints.hold and checkpoints.is_unsaved(row.client, row.instance)
    if is_unsaved:
        row = replace(row, held_back="")
    if not row.stuck.startswith(NO_PROGRESS) or not (is_unsaved or checkpoints.hold):
        return row
    still = row.stuck.removeprefix(NO_PROGRESS).partition(" with messages")[0]
    why = "its state is not saved" if is_unsaved else "it moves with a checkpoint of all members"
    return replace(row, stuck=f"{NO_PROGRESS}{still}: {why}; see check")


def _probe(
    cluster: Cluster, positions: Mapping[TopicPartition, int]
) -> tuple[dict[TopicPartition, str], dict[TopicPartition, Message]]:
    """Read the next message of each partition; the client's errors, and the messages that could be read."""
    reader = cluster.data_reader("kafka-marshal-status", CONFIG)
    failed: dict[TopicPartition, str] = {}
    found: dict[TopicPartition, Message] = {}
    left = set(positions)
    refused: set[TopicPartition] = set()
    try:
        reader.assign(positions)
        until = time.monotonic() + PROBE_S
        while left and time.monotonic() < until:
            messages, faults = reader.read(100, SLICE_S)
            for message in messages:
                found.setdefault((message.topic() or "", message.partition() or 0), message)
            for fault in faults:
                if fault.topic is not None and fault.partition is not None and fault.kind is FaultKind.OTHER:
                    failed.setdefault((fault.topic, fault.partition), fault.message)
                elif fault.topic is not None and fault.kind is FaultKind.REFUSED:
                    # Without READ on the topic there is nothing to wait for.
                    refused.update(key for key in left if key[0] == fault.topic)
            over = left & (found.keys() | failed.keys() | refused)
            left -= over
            if over:
                reader.unassign(over)
    finally:
        reader.close()
    return failed, found


def _stamp(message: Message) -> int:
    """The message's timestamp (ms); -1: it has none."""
    stamp: Callable[[], tuple[int, int]] | None = getattr(message, "timestamp", None)
    return -1 if stamp is None else stamp()[1]


# -- transactions of Kafka's that have not ended: read_committed readers get nothing of a partition behind one --------
#
# confluent-kafka cannot list or describe transactions. So the topic in which the brokers keep them is read, which takes
# the right READ on it. What is not read within the time, or may not be, is not named.

#: Its keys are transactional ids, its values TransactionLogValue of Kafka (versions 0 and 1).
STATE_TOPIC = "__transaction_state"

#: How long it is read (s).
READ_S = 5.0

#: Those that are ongoing, or whose end is not in all partitions yet.
_OPEN_STATES = (1, 2, 3)

#: The topic in which the brokers keep committed offsets.
_OFFSETS_TOPIC = "__consumer_offsets"


class OpenTransaction(NamedTuple):
    """A transaction that has not ended."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    #: When it began (ms since 1970, the coordinator's clock).
    since_ms: int
    partitions: frozenset[TopicPartition]


def behind_transactions(
    cluster: Cluster, positions: dict[TopicPartition, int], now_ms: int
) -> dict[TopicPartition, str]:
    """Those of these positions that an open transaction keeps from read_committed readers, in words (*blocking*)."""
    held: dict[TopicPartition, int] = {}
    with suppress(MarshalError):
        ends, stable = cluster.watermarks(positions, READ_S), cluster.committed_watermarks(positions, READ_S)
        held = {
            key: stable[key][1]
            for key, at in positions.items()
            if key in stable and key in ends and stable[key][1] <= at < ends[key][1]
        }
    found = open_transactions(cluster, held)
    return {key: _behind_text(key, at, found.get(key), now_ms) for key, at in held.items()}


def offsets_held_text(cluster: Cluster, group_id: str) -> str:
    """The transaction that most likely has an offset of this group, as one more sentence; "": none was found."""
    with suppress(MarshalError, KeyError):
        partitions = cluster.topic_info([_OFFSETS_TOPIC], READ_S)[_OFFSETS_TOPIC].partitions
        units, number = group_id.encode("utf-16-be"), 0
        for at in range(0, len(units), 2):  # as String.hashCode(): the partition is |hash| mod their number
            number = (31 * number + int.from_bytes(units[at : at + 2], "big")) & 0xFFFFFFFF
        key = _OFFSETS_TOPIC, min(number, 2**32 - number) % 2**31 % partitions
        if (found := open_transactions(cluster, [key]).get(key)) is not None:
            return f" It is most likely {_named(found, local_ms())}"
    return ""


def _named(found: OpenTransaction, now_ms: float) -> str:
    since = span_text(max(0, now_ms - found.since_ms), False)
    return (
        f"transactional id {found.transactional_id!r}, producer {found.producer_id}, epoch {found.producer_epoch}, "
        f"since {since}, transaction.timeout.ms {found.timeout_ms}"
    )


def _behind_text(key: TopicPartition, at: int, transaction: OpenTransaction | None, now_ms: int) -> str:
    tool, place = "kafka-transactions.sh --bootstrap-server ADDRESS", f"--topic {key[0]} --partition {key[1]}"
    named = f"{tool} describe-producers {place} names it"
    if transaction is not None:
        named = _named(transaction, now_ms)
    return (
        f"a transaction is open from offset {at} on ({named}): readers with read_committed get nothing behind it until "
        f"it ends. Start its program again, or wait for its timeout; if it never ends: {tool} abort {place} "
        f"--start-offset {at}"
    )


def open_transactions(
    cluster: Cluster, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, OpenTransaction]:
    """The oldest open transaction of each of these partitions, as far as it can be found (*blocking*)."""
    found: dict[TopicPartition, OpenTransaction] = {}
    if not partitions:
        return found
    with suppress(MarshalError):
        for each in sorted(_transactions(cluster), key=lambda one: one.since_ms):
            for key in each.partitions.intersection(partitions):
                found.setdefault(key, each)
    return found


def _transactions(cluster: Cluster) -> Iterator[OpenTransaction]:
    until = time.monotonic() + READ_S
    info = cluster.topic_info([STATE_TOPIC], READ_S).get(STATE_TOPIC)
    marks = cluster.watermarks([(STATE_TOPIC, number) for number in range(info.partitions if info else 0)], READ_S)
    left = {key: high for key, (low, high) in marks.items() if low < high}
    latest: dict[TopicPartition, dict[Any, Any]] = {key: {} for key in left}
    reader = cluster.data_reader("kafka-marshal-transactions", {"isolation.level": "read_uncommitted"})
    try:
        reader.assign({key: marks[key][0] for key in left})
        while left and time.monotonic() < until:
            for message in reader.read(1_000, 0.2)[0]:
                key = (STATE_TOPIC, message.partition() or 0)
                latest[key][message.key()] = message.value()
                if (message.offset() or 0) >= left.get(key, 0) - 1:
                    left.pop(key, None)
    finally:
        reader.close()
    for key, states in latest.items():
        for name, value in states.items() if key not in left else ():
            with suppress(ValueError, IndexError):
                if value is not None and (one := parse(name, value)) is not None:
                    yield one


def parse(key: bytes, value: bytes) -> OpenTransaction | None:
    """A record of the topic; None: the transaction has ended, or the record is of a version that is not known."""
    name, fields = _Fields(key), _Fields(value)
    if name.number(2) != 0 or (version := fields.number(2)) not in (0, 1):
        return None
    fields.is_compact = version == 1
    numbers = [fields.number(size) for size in (8, 2, 4)]
    if fields.number(1) not in _OPEN_STATES:
        return None
    partitions = set()
    for _ in range(fields.count()):
        topic = fields.string()
        partitions |= {(topic, fields.number(4)) for _ in range(fields.count())}
        fields.skip_tags()
    fields.number(8)
    return OpenTransaction(name.string(), numbers[0], numbers[1], numbers[2], fields.number(8), frozenset(partitions))


class _Fields:
    """Reads fields of Kafka's format from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        #: Lengths are varints, one more than they say; structs have tagged fields.
        self.is_compact = False

    def _take(self, size: int) -> bytes:
        self._at += size
        if size < 0 or self._at > len(self._data):
            raise ValueError("the record is cut")
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big", signed=True)

    def _varint(self) -> int:
        found = shift = 0
        while (byte := self._take(1)[0]) & 0x80:
            found, shift = found | (byte & 0x7F) << shift, shift + 7
        return found | byte << shift

    def count(self) -> int:
        """Of an array; none has 0."""
        return max(0, self._varint() - 1 if self.is_compact else self.number(4))

    def string(self) -> str:
        return self._take(self._varint() - 1 if self.is_compact else self.number(2)).decode("utf-8", "replace")

    def skip_tags(self) -> None:
        for _ in range(self._varint() if self.is_compact else 0):
            self._varint()
            self._take(self._varint())
