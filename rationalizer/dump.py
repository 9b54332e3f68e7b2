"""Dumps and their replay: one format for people, tests and other programs (section 9).

A dump is JSON Lines: a header, then one line a record, in the order in which it was read (D1). Writing gives
`header_line` and `record_line`; reading gives `DumpReader`; `Replay` gives what `kafka-marshal replay` prints:

    replay = Replay(open(path, "rb"), until={3: 17})      # reads the header: DumpError, UntilError
    for outcome in replay.outcomes():                      # D2, one dict a record; DumpError on a bad line
        print(json_of_outcome(outcome))
    print(json_of_state(replay.state()))                   # D3, after (or instead of) the outcomes
    replay.required_levels                                 # D4: {CP: level} where an Upgrade stopped it

Everything here works on lines of bytes and never on paths; nothing is kept but the state, so a dump may be
larger than memory. What was yielded before a DumpError means nothing (D1).
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

from rationalizer import codes
from rationalizer.limits import MAX_OFFSET, MAX_PARTITION, MAX_TIME_MS, SNAPSHOT_INTERVAL
from rationalizer.log_hash import Entry, LogHash, RunningHash, is_digest
from rationalizer.snapshot_log import due
from rationalizer.state import GROUP, LEASE, PAUSE
from rationalizer.travel import Travels
from rationalizer.wire.records import (
    AnswerBarrier,
    BeginCheckpoint,
    ClaimingShare,
    KeepCheckpoint,
    Rollback,
    SettlingMessages,
)
from rationalizer.world import World

FORMAT: Final = 1

#: Records that are replayed in one go if their outcomes are not asked for.
_CHUNK: Final = 4096


class DumpError(Travels, ValueError):
    """A line that is not one of a dump (D1): `line_number`, counted from 1, and `why`.

    The dump was cut or edited, or is of another format; what was concluded from it so far means nothing.
    """

    def __init__(self, line_number: int, why: str) -> None:
        super().__init__(f"line {line_number}: {why}. What was read before it means nothing; mend the dump.")
        self.line_number = line_number
        self.why = why


class UntilError(ValueError):
    """An `until` that names what the dump can't have: the caller's mistake, not the dump's (D4)."""


@dataclass(frozen=True, slots=True)
class DumpHeader:
    """The first line: the coordination topic's name and its number of CPs."""

    topic: str
    partitions: int
    #: For each CP the first offset that its log had, and the one behind the last; None: the dump does not say (D5).
    bounds: tuple[tuple[int, int], ...] | None = None


class DumpRecord(NamedTuple):
    """One record: its CP, its offset there, the broker's stamp in ms (−1 for none), its value or None."""

    partition: int
    offset: int
    timestamp_ms: int
    value: bytes | None


# -- writing ---------------------------------------------------------------------------------------------


def header_line(header: DumpHeader) -> str:
    """The first line of a dump, without its line end (D1)."""
    fields: dict[str, object] = {"topic": header.topic, "partitions": header.partitions, "format": FORMAT}
    if header.bounds is not None:
        fields["bounds"] = header.bounds
    return json.dumps(fields)


def record_line(record: DumpRecord, digest: str | None = None) -> str:
    """The line of one record, without its line end (D1). digest: the hash that it carries (D5)."""
    value = None if record.value is None else binascii.b2a_base64(record.value, newline=False).decode()
    fields: dict[str, object] = {
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "value": value,
    }
    if digest is not None:
        fields["hash"] = digest
    return json.dumps(fields)


class DumpLines:
    """The lines of one CP, with the hashes by which a reader sees that they are as they were written (D5).

    The last record waits until it is known whether it is the last: `take` all records, then `end`.
    """

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._running = RunningHash(0)
        self._waiting: Entry | None = None

    def take(self, entries: Iterable[Entry]) -> Iterator[str]:
        """Lines without their line ends. Iterate to the end."""
        for entry in entries:
            if self._waiting is not None:
                yield self._line(self._waiting, due(self._running.since, self._waiting[0] + 1, SNAPSHOT_INTERVAL))
            self._waiting = entry

    def end(self) -> Iterator[str]:
        """What is left, with the hash of it."""
        if self._waiting is not None:
            yield self._line(self._waiting, True)
            self._waiting = None

    def _line(self, entry: Entry, is_hashed: bool) -> str:
        self._running.take((entry,))
        digest = self._running.digest() if is_hashed else None
        if is_hashed:
            self._running = RunningHash(entry[0] + 1)
        return record_line(DumpRecord(self._partition, *entry), digest)


def json_of_outcome(outcome: Mapping[str, object]) -> str:
    """One outcome as `kafka-marshal replay` prints it: one line (D2)."""
    return json.dumps(outcome)


def json_of_state(state: Mapping[str, object]) -> str:
    """The state as `kafka-marshal replay --state` prints it (D3)."""
    return json.dumps(state, indent=1)


# -- reading ---------------------------------------------------------------------------------------------


class DumpReader:
    """A dump's records, checked line by line (D1). `lines` is a file opened in binary mode, or the like.

    The header is read at once (`header`); iterating gives the records. Both raise DumpError. `hashes`: those that the
    lines read so far carry, each with the CP and the offset behind it (D5).
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.hashes: list[tuple[int, int, str]] = []
        self._objects = _objects(lines)
        first = next(self._objects, None)
        if first is None:
            raise DumpError(1, "the dump is empty; its first line must be the header")
        self.header = _header(*first)

    def __iter__(self) -> Iterator[DumpRecord]:
        last: dict[int, int] = {}
        for number, found in self._objects:
            record = _record(number, found, self.header.partitions)
            if record.offset <= last.get(record.partition, -1):
                raise DumpError(
                    number,
                    f"offset {record.offset} of partition {record.partition} is not above "
                    f"{last[record.partition]}, which came before it",
                )
            last[record.partition] = record.offset
            if "hash" in found:
                self.hashes.append((record.partition, record.offset + 1, _hash(number, found)))
            yield record

    def checked(self, changed: list[LogHash]) -> Iterator[DumpRecord]:
        """The records; ranges that are not as they were written are added to `changed` (D5)."""
        running: dict[int, RunningHash] = {}
        for record in self:
            partition, offset, timestamp_ms, value = record
            if partition not in running:
                running[partition] = RunningHash(0)
            running[partition].take(((offset, timestamp_ms, value),))
            if self.hashes:
                _, next_offset, digest = self.hashes.pop()
                if running[partition].digest() != digest:
                    changed.append(LogHash(partition, running[partition].since, next_offset, digest))
                running[partition] = RunningHash(next_offset)
            yield record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _objects(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not empty. Lines end at a line feed and nowhere else."""
    for number, line in enumerate(lines, start=1):
        if not line.strip(b" \t\r\n"):
            continue
        try:
            found = _DECODER.decode(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise DumpError(number, "it is not UTF-8") from None
        except RecursionError:
            raise DumpError(number, "it is nested too deep") from None
        except ValueError as error:  # bad JSON, NaN, an int of thousands of digits
            raise DumpError(number, f"it is not JSON ({error})") from None
        if type(found) is not dict:
            raise DumpError(number, "it is no JSON object")
        yield number, found


def _int(number: int, found: dict[str, Any], name: str, low: int, high: int) -> int:
    value = found.get(name)
    if type(value) is not int or not low <= value <= high:  # a bool is no int
        raise DumpError(number, f'"{name}" must be an int, {low} … {high}')
    return value


def _header(number: int, found: dict[str, Any]) -> DumpHeader:
    form = found.get("format")
    if type(form) is not int or form != FORMAT:
        raise DumpError(number, f'the header must say "format": {FORMAT}')
    topic = found.get("topic")
    if type(topic) is not str:
        raise DumpError(number, 'the header must name the "topic"')
    partitions = _int(number, found, "partitions", 1, MAX_PARTITION)
    return DumpHeader(topic, partitions, _bounds(number, found, partitions))


def _bounds(number: int, found: dict[str, Any], partitions: int) -> tuple[tuple[int, int], ...] | None:
    if "bounds" not in found:
        return None
    bounds = found["bounds"]
    pairs = type(bounds) is list and all(type(each) is list and len(each) == 2 for each in bounds)
    if not pairs or len(bounds) != partitions or not all(type(at) is int for each in bounds for at in each):
        raise DumpError(number, '"bounds" must be an array of one [first, end] for each partition')
    return tuple((first, end) for first, end in bounds)


def _hash(number: int, found: dict[str, Any]) -> str:
    digest = found["hash"]
    if not is_digest(digest):
        raise DumpError(number, '"hash" must be 32 hex digits')
    return str(digest)


def _record(number: int, found: dict[str, Any], partitions: int) -> DumpRecord:
    return DumpRecord(
        _int(number, found, "partition", 0, partitions - 1),
        _int(number, found, "offset", 0, MAX_OFFSET),
        _int(number, found, "timestamp", -MAX_TIME_MS - 1, MAX_TIME_MS),
        _value(number, found),
    )


def _value(number: int, found: dict[str, Any]) -> bytes | None:
    text = found.get("value", ...)
    if text is None:
        return None
    if type(text) is not str:
        raise DumpError(number, '"value" must be base64 or null')
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # binascii.Error, and text that is not ASCII
        raise DumpError(number, '"value" is not base64') from None


# -- replaying -------------------------------------------------------------------------------------------


class Replay:
    """A dump, replayed: outcomes (D2), state (D3), and where it had to stop (D4).

    `lines`: as for DumpReader. `until`: for some CPs the last offset to replay; what lies above it is read
    and checked, and left out. Raises DumpError for the header, UntilError for an `until` that names no CP of
    this dump.
    """

    def __init__(self, lines: Iterable[bytes], until: Mapping[int, int] | None = None) -> None:
        reader = DumpReader(lines)
        self.header = reader.header
        self._until = dict(until or {})
        for partition in self._until:
            if not 0 <= partition < self.header.partitions:
                raise UntilError(f"until names partition {partition}; the dump has 0 … {self.header.partitions - 1}")
        #: Ranges of records that are not as they were when the dump was written (D5), as far as it is replayed.
        self.changed: list[LogHash] = []
        self._records = reader.checked(self.changed)
        self._worlds: dict[int, World] = {}

    def world(self, partition: int) -> World:
        """The world of this CP as far as the replay has come."""
        world = self._worlds.get(partition)
        if world is None:
            world = self._worlds[partition] = World(partition, self.header.partitions)
        return world

    @property
    def required_levels(self) -> dict[int, int]:
        """For each CP whose replay stopped at an Upgrade, the level it asks for (D4, E4)."""
        return {
            partition: world.required_level
            for partition, world in sorted(self._worlds.items())
            if world.required_level is not None
        }

    def outcomes(self) -> Iterator[dict[str, object]]:
        """One dict a record, with the keys of D2 in their order. Raises DumpError at a bad line."""
        for record in self._wanted():
            outcome = self.world(record.partition).apply(record.offset, record.timestamp_ms, record.value)
            if outcome.code == codes.UPGRADE_REQUIRED:
                continue
            line: dict[str, object] = {"partition": record.partition, "offset": record.offset, **outcome.shown()}
            if outcome.of_group and outcome.is_a(BeginCheckpoint, AnswerBarrier, Rollback, KeepCheckpoint):
                line["checkpoint"] = outcome.checkpoint
                line["barrier"] = outcome.barrier
            if outcome.judged and outcome.is_a(ClaimingShare):
                line["share"] = outcome.share
            if outcome.judged and outcome.is_a(SettlingMessages):
                line["taken"] = None if outcome.taken is None else list(outcome.taken)
            yield line

    def state(self) -> dict[str, object]:
        """The object of D3, after replaying what is left of the dump. Raises DumpError at a bad line."""
        chunks: dict[int, list[tuple[int, int, bytes | None]]] = {}
        waiting = 0
        for partition, offset, timestamp_ms, value in self._wanted():
            chunks.setdefault(partition, []).append((offset, timestamp_ms, value))
            waiting += 1
            if waiting == _CHUNK:
                self._apply(chunks)
                waiting = 0
        self._apply(chunks)
        return state(self.world(partition) for partition in range(self.header.partitions))

    def _apply(self, chunks: dict[int, list[tuple[int, int, bytes | None]]]) -> None:
        for partition, chunk in chunks.items():
            self.world(partition).apply_many(chunk)
        chunks.clear()

    def _wanted(self) -> Iterator[DumpRecord]:
        for record in self._records:
            if record.offset <= self._until.get(record.partition, MAX_OFFSET):
                yield record


def state(worlds: Iterable[World]) -> dict[str, object]:
    """The object of D3 for these worlds, which come in the order of their CPs."""
    partitions: list[dict[str, object]] = []
    leases: list[dict[str, object]] = []
    pauses: list[dict[str, object]] = []
    groups: list[dict[str, object]] = []
    for world in worlds:
        partitions.append(
            {
                "partition": world.partition,
                "next_offset": world.next_offset,
                "log_time": world.log_time,
                "level": world.level,
                "rejected": dict(world.rejected),
                "digest": world.digest(),
            }
        )
        here = {"partition": world.partition}
        leases += [here | LEASE.shown(lease, world.log_time) for lease in world.leases()]
        pauses += [here | PAUSE.shown(pause, world.log_time) for pause in world.pauses()]
        groups += [here | GROUP.shown(group, world.log_time) for group in world.groups()]
    return {"partitions": partitions, "leases": leases, "pauses": pauses, "groups": groups}
