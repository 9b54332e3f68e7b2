"""One story: a hostile log, replayed in three ways that must agree, and what each record of it cost."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgpack import packb, unpackb

from rationalizer import InvalidRecordError, RejectedValueError, SnapshotError, World, codes, decode, encode
from rationalizer.dump import DumpError, Replay
from rationalizer.snapshot_log import MalformedPartError, SnapshotParts, decode_part, encode_state
from tests.campaigns.fuzz.author import RAW, TELLING, WILD, Author
from tests.stored_snapshot import encode_snapshot

# The other things that are read and were written by anybody: the log of snapshots (S2) and dumps (section 9).


#: Attacks on each, a story.
PARTS: Final = 30
STATES: Final = 30
DUMPS: Final = 3
#: Records in a dump, at most.
LINES: Final = 60

#: Invalid JSON, or not what is wanted.
ODD_JSON: Final = (
    *("NaN", "Infinity", "-0", "1e5", "1" * 5_000, "-1", "9223372036854775808", "true", "null", '""', '"\\ud800"'),
    *("[]", "{}", "[" * 2_000, '{"a":' * 2_000, '"AA"', '"AAA="', '"AA==\\n"', '"\\u0000"', "0", "1", "8", '"é"'),
    *("", "{", "\ufeff{}"),
)


def _mutated(value: bytes, rng: random.Random) -> bytes:
    changed = bytearray(value)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                changed[at : at + 1] = bytes((rng.randrange(256),))
            case 1:
                changed[at : at + 1] = bytes((rng.choice(TELLING),))
            case 2:
                del changed[at : at + rng.randrange(1, 9)]
            case 3:
                del changed[at:]
            case _:
                changed[at:at] = rng.choice(RAW)
    return bytes(changed)


def attack_snapshots(world: World, partitions: int, rng: random.Random) -> int:
    """Parts and states that were tampered with; returns how many. AssertionError if an invalid one is taken.

    Each is a part, or is passed over (S2); each state with a digest that holds is one that a replay could have led to
    and is written in the same bytes again, or SnapshotError (S1). Anything else that is raised is a finding.
    """
    values = encode_snapshot(world)
    shelf = SnapshotParts(world.partition)
    for _ in range(PARTS):
        value: bytes | None = _mutated(rng.choice(values), rng)
        if rng.random() < 0.3:
            fields: list[Any] = list(unpackb(values[0]))
            fields[rng.randrange(len(fields))] = rng.choice(WILD)
            value = packb(fields, unicode_errors="surrogatepass")
        with contextlib.suppress(MalformedPartError):
            decode_part(value)
        whole = shelf.add(value)
        if whole is not None and whole.holds():
            _restore(whole.data, partitions)
    state = world.snapshot()
    for _ in range(STATES):
        forged = _forged(state, rng) if rng.random() < 0.6 else _mutated(state, rng)
        _restore(forged, partitions)
        if forged:
            (part, *_) = encode_state(world.partition, world.next_offset, forged)
            decode_part(part)
    return PARTS + STATES


def _forged(state: bytes, rng: random.Random) -> bytes:
    """The same state with one thing in it, however deep, put in another's place."""
    top = unpackb(state, strict_map_key=False)
    place, within = top, rng.randrange(len(top))
    while isinstance(place[within], list) and place[within] and rng.random() < 0.9:
        place = place[within]
        within = rng.randrange(len(place))
    match rng.randrange(4):
        case 0:
            place[within] = rng.choice(WILD)
        case 1:
            place.insert(within, place[rng.randrange(len(place))])
        case 2:
            del place[within]
        case _:
            number = place[within]
            place[within] = number + rng.choice((-1, 1)) if type(number) is int else rng.choice(WILD)
    forged: bytes = packb(top, unicode_errors="surrogatepass")
    return forged


def _restore(state: bytes, partitions: int) -> None:
    try:
        found = World.restore(state, partitions)
    except SnapshotError:
        return
    assert found.snapshot() == state, f"a state that is written otherwise was taken: {state[:200].hex()}"


def attack_dumps(records: Sequence[tuple[int, int, bytes | None]], cp: int, partitions: int, rng: random.Random) -> int:
    """Dumps of this log with lines that were tampered with; returns how many lines. Each replays, or DumpError."""
    lines = 0
    for _ in range(DUMPS):
        begin = rng.randrange(len(records))
        dump = [json.dumps({"topic": "__marshal", "partitions": partitions, "format": 1}).encode()]
        for offset, stamp, value in records[begin : begin + LINES]:
            if value is not None and len(value) > 4_096:
                continue
            text = None if value is None else base64.b64encode(value).decode()
            dump.append(
                json.dumps(
                    {"partition": cp, "offset": offset, "timestamp": max(-(2**63), stamp), "value": text}
                ).encode()
            )
        tampered = rng.randrange(len(dump)) if rng.random() < 0.8 else -1
        if tampered >= 0:
            dump[tampered] = _odd_line(dump[tampered], rng)
        lines += len(dump)
        for way in ("outcomes", "state"):
            try:
                replay = Replay(iter(dump))
                if way == "state":
                    json.dumps(replay.state())
                else:
                    for outcome in replay.outcomes():
                        json.dumps(outcome)
            except DumpError as error:
                if tampered < 0:
                    raise AssertionError(f"a dump that nobody touched is refused: {error}") from error
    return lines


def _odd_line(line: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return _mutated(line, rng)
    text = line.decode()
    found: dict[str, Any] = json.loads(text)
    name = rng.choice(list(found))
    odd = rng.choice(ODD_JSON)
    pairs = [f"{json.dumps(key)}: {odd if key == name else json.dumps(value)}" for key, value in found.items()]
    return ("{" + ", ".join(pairs) + "}").encode("utf-8", "surrogatepass")


Entry = tuple[int, int, bytes | None]

#: What a record may cost (B.2) up to 1 kB, and for each byte above, in seconds of the processor.
BASE_S: Final = 1e-3
BASE_BYTES: Final = 1_024
BYTE_S: Final = 60e-9
BoundSeconds = float

#: A record that took longer than it may is replayed this often: the best counts, for the machine has other work.
TRIES: Final = 7
#: This number of the slow ones of a story are tried again.
MOST_SLOW: Final = 20

#: One record in this number is checked more closely, before and after.
CLOSER_EVERY: Final = 64
#: Most records of one apply_many.
LONGEST_CUT: Final = 700


def bound_s(size: int) -> BoundSeconds:
    """Seconds that a value of this many bytes may cost."""
    return BASE_S + BYTE_S * max(0, size - BASE_BYTES)


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: the story, the record, and a description."""

    seed: int
    #: Which record of the story, from 0.
    index: int
    what: str
    #: The value, for a test.
    value: bytes | None

    def __str__(self) -> str:
        shown = "no value" if self.value is None else self.value[:400].hex() + (" …" if len(self.value) > 400 else "")
        return f"seed {self.seed}, record {self.index}: {self.what}\n  value: {shown}"


@dataclass(frozen=True, slots=True)
class Over:
    """A record that exceeded bound_s again when retried: the best ratio."""

    seed: int
    index: int
    size: int
    ratio: float
    #: The first bytes.
    front: bytes


@dataclass(slots=True)
class Story:
    """The result of a story, or the sum of many."""

    inputs: int = 0
    bytes: int = 0
    #: Values above 1 kB.
    large: int = 0
    #: Number of snapshots, parts of them, and lines of dumps that were read.
    stored: int = 0
    lines: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    #: Comparisons of digests.
    compared: int = 0
    #: Logs that ended at an Upgrade (E4).
    stopped: int = 0
    findings: list[Finding] = field(default_factory=list)
    #: Records that exceeded their limit, and those that did so again.
    slow: int = 0
    over: list[Over] = field(default_factory=list)
    #: The largest ratio of time to limit (the best of TRIES if above 1), up to 1 kB and above.
    worst: tuple[float, float] = (0.0, 0.0)
    #: Seconds of processor that applying took, each record by itself.
    applying_s: float = 0.0

    def add(self, other: Story) -> None:
        """Add another story's figures."""
        for name in ("inputs", "bytes", "large", "stored", "lines", "compared", "stopped", "slow", "applying_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.codes.update(other.codes)
        self.findings += other.findings
        self.over += other.over
        self.worst = (max(self.worst[0], other.worst[0]), max(self.worst[1], other.worst[1]))


def run_story(seed: int, inputs: int, large_every: int) -> Story:
    """Write a log of this many hostile records and replay it: one by one, in cuts, and with restarts from snapshots."""
    return _Run(seed, inputs, large_every).run()


class _Run:
    def __init__(self, seed: int, inputs: int, large_every: int) -> None:
        self.seed = seed
        self.inputs = inputs
        self.rng = random.Random(~seed)
        self.partitions = self.rng.choice((1, 1, 3, 8))
        self.cp = self.rng.randrange(self.partitions)
        self.author = Author(seed, self.cp, self.partitions, large_every=large_every)
        self.records: list[Entry] = []
        self.slow: list[int] = []
        self.story = Story()

    def found(self, what: str) -> None:
        """Record a finding about the last record."""
        value = self.records[-1][2] if self.records else None
        self.story.findings.append(Finding(self.seed, len(self.records) - 1, what, value))

    def run(self) -> Story:
        try:
            world = self.one_by_one()
            if not self.story.findings:
                self.otherwise(world)
                self.again()
                made = attack_snapshots(world, self.partitions, self.rng)
                lines = attack_dumps(self.records, self.cp, self.partitions, self.rng)
                self.story.stored, self.story.lines = made, lines
        except Exception as error:  # noqa: BLE001
            # Whatever it is: nothing in a record, a snapshot or a dump may raise anything but its own errors.
            self.found(f"uncaught {type(error).__name__}: {error}")
        return self.story

    def one_by_one(self) -> World:
        """Write the log and apply each record by itself, with the time that it takes."""
        author, records, story, clock = self.author, self.records, self.story, time.thread_time
        world = World(self.cp, self.partitions)
        offset = -1
        worst_small = worst_large = 0.0
        for index in range(self.inputs):
            value = author.next()
            offset += author.step()
            stamp = author.stamp()
            records.append((offset, stamp, value))
            size = 0 if value is None else len(value)
            before = world.snapshot() if index % CLOSER_EVERY == 0 and size <= BASE_BYTES else None
            began = clock()
            outcome = world.apply(offset, stamp, value)
            took = clock() - began
            story.applying_s += took
            story.bytes += size
            ratio = took / bound_s(size)
            if ratio > 1.0:
                self.slow.append(index)
            elif size <= BASE_BYTES:
                worst_small = max(worst_small, ratio)
            else:
                worst_large = max(worst_large, ratio)
            story.large += size > BASE_BYTES
            if before is not None:
                self.look_closer(before, world, offset, stamp, value)
            if outcome.code == codes.UPGRADE_REQUIRED:
                story.stopped += 1
                break
            author.hear(offset, outcome)
        story.inputs = len(records)
        story.worst = (worst_small, worst_large)
        story.codes = Counter(world.accepted) + Counter(world.rejected)
        return world

    def look_closer(self, before: bytes, world: World, offset: int, stamp: int, value: bytes | None) -> None:
        """A rejected record moves only log time (E3); one that can be read is the same when written again."""
        again = World.restore(before, self.partitions)
        outcome = again.apply(offset, stamp, value)
        if again.snapshot() != world.snapshot():
            self.found("applied to a state that was restored, it gives another state")
        if not outcome.accepted and outcome.code != codes.UPGRADE_REQUIRED:
            untouched = World.restore(before, self.partitions)
            untouched.next_offset = offset + 1
            untouched.log_time = max(untouched.log_time, stamp)
            if untouched.snapshot() != again.snapshot():
                self.found(f"rejected as {outcome.code}, it changed the state")
        try:
            record = decode(value, world.level)
        except (RejectedValueError, InvalidRecordError) as error:
            if isinstance(error, InvalidRecordError) or outcome.accepted:
                self.found(f"decode says {error}, apply {outcome.code}")
            return
        if outcome.code in (codes.MALFORMED, codes.UNKNOWN_TYPE, codes.UNSUPPORTED_VERSION):
            self.found(f"decode reads {record!r}, apply says {outcome.code}")
        if decode(encode(record), world.level) != record:
            self.found(f"{record!r} does not survive being written anew")

    def otherwise(self, world: World) -> None:
        """The same log in cuts, and in cuts with restarts: the same state, counts and stop."""
        cut, restarted = World(self.cp, self.partitions), World(self.cp, self.partitions)
        at = 0
        while at < len(self.records):
            end = min(len(self.records), at + 1 + self.rng.randrange(LONGEST_CUT))
            cut.apply_many(self.records[at:end])
            restarted.apply_many(iter(self.records[at:end]))
            at = end
            self.compare("cuts and restarts", cut.digest(), restarted.digest())
            if restarted.required_level is None:
                restarted = World.restore(restarted.snapshot(), self.partitions)
        self.compare("one by one and in cuts", world.digest(), cut.digest())
        self.compare("one by one and with restarts", world.digest(), restarted.digest())
        self.compare("counts", (world.accepted, world.rejected), (cut.accepted, cut.rejected))
        levels = {each.required_level for each in (world, cut, restarted)}
        if len(levels) > 1:
            self.found(f"not all stop before the same Upgrade: {levels}")

    def compare(self, what: str, left: object, right: object) -> None:
        self.story.compared += 1
        if left != right:
            self.found(f"{what} differ: {left}, {right}")

    # What takes long.

    def again(self) -> None:
        """Try slow records again, each on its original state."""
        self.story.slow = len(self.slow)
        world, at = World(self.cp, self.partitions), 0
        for index in self.slow[:MOST_SLOW]:
            world.apply_many(self.records[at:index])
            at = index
            self.try_again(world.snapshot(), index)

    def try_again(self, before: bytes, index: int) -> None:
        offset, stamp, value = self.records[index]
        size = 0 if value is None else len(value)
        best = float("inf")
        for _ in range(TRIES):
            world = World.restore(before, self.partitions)
            began = time.thread_time()
            world.apply(offset, stamp, value)
            best = min(best, time.thread_time() - began)
        ratio = best / bound_s(size)
        small, large = self.story.worst
        self.story.worst = (max(small, ratio), large) if size <= BASE_BYTES else (small, max(large, ratio))
        if ratio > 1.0:
            self.story.over.append(Over(self.seed, index, size, ratio, (value or b"")[:32]))
