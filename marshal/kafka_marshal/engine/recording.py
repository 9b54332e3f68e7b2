"""Writes down the run of one engine: every input, what was read from user threads meanwhile, and the effects.

One line each, with a checksum: ``crc JSON``. First the header, then in order::

    [consumer, function, arguments, readings, error]    a take; error: the class that it raised, or null
    {"effects": […]}                 the result of take_effects()
    {"state": […]}                   the engine's state, about every second and at the end

It keeps topic, partition, offset and assignment of a message, without the user's keys and values; for a partition
shared by key, the hash of each key is a reading. Records of the coordination topic are kept whole. A replay feeds them
in again (HACKING.md), and both must agree on the engine's state, which is sorted text.
"""

from __future__ import annotations

import json
import re
from _thread import get_ident
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from enum import StrEnum
from operator import attrgetter
from random import Random
from typing import Any, cast
from weakref import WeakKeyDictionary
from zlib import crc32

from kafka_marshal.engine import effects, policies
from kafka_marshal.engine.claims.leases import ManualLease
from kafka_marshal.engine.effects import Effect
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.inputs import GIVEN, READERS, reading
from kafka_marshal.engine.policies import Policy, View, Wishes
from kafka_marshal.engine.settings import (
    CheckpointOptions,
    ConsumerSettings,
    EngineSettings,
    GroupOptions,
    SharingOptions,
    Why,
)
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import Assignment, Grant
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.in_lanes import Block
from kafka_marshal.engine.work.lane import HeldBack
from kafka_marshal.engine.work.lanes import Lanes
from kafka_marshal.engine.work.pull import AwaitGrant, GrantedPull, Pull, Take, Wanted
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.engine.work.run import Run
from kafka_marshal.ports import Message, TopicInfo
from kafka_marshal.types import Key
from rationalizer import World, decode, encode
from rationalizer.levels import SUPPORTED_LEVEL


def state_of(engine: Engine) -> list[str]:
    """A line for each CP, lease, consumer and partition; it contains nothing that user threads change."""
    return sorted(_lines(engine))


def _lines(engine: Engine) -> Iterator[str]:
    if engine.failure is not None:
        yield f"failed: {type(engine.failure).__name__}"
    for cp, world in engine.worlds.items():
        yield f"CP {cp}: next offset {world.next_offset}, level {world.level}"
    for key, lease in engine.book.leases.items():
        yield f"lease {key}: {lease.state}, epoch {lease.epoch}, proven until {lease.valid_until}, {lease.proven_until}"
    for number, member in engine.groups.items():
        yield f"member of consumer {number}: {member.member.member_id!r}, generation {member.member.generation}"
        for key, piece in member.pieces.items():
            yield f"piece {key} of consumer {number}: {piece.span}, epoch {piece.epoch}, until {piece.proven_until}"
            if member.takes_checkpoints:
                yield f"piece {key}: restored {piece.is_restored}, held up {piece.is_held_up}, cut at {piece.cut_at}"
        if (found := member.checkpoints) is not None:
            outcomes = sorted(found.figures.outcomes.items())
            yield f"checkpoints of consumer {number}: {found.state}, newest {found.newest}, {outcomes}"
    for number, consumer in engine.consumers.items():
        yield f"consumer {number}: {', '.join(_of(consumer))}"
        for key, x in consumer.assignments.items():
            tracker, grant = x.tracker, x.grant
            yield (
                f"partition {key} of consumer {number}: {x.stage}, {x.releasing or 'kept'}, next offset "
                f"{x.buffer.fetch_next}, {x.buffer.size} buffered, {tracker.in_hand} in flight from "
                f"{sorted(tracker.runs)}, done to {tracker.done.stable}, {list(tracker.done.ranges)}, grant "
                f"{None if grant is None else (grant.last_offset, grant.accepted)}, {x.callbacks_running} callbacks"
            )


def _of(consumer: ConsumerEngine) -> Iterator[str]:
    delivery = consumer.delivery
    yield f"{len(consumer.errors)} errors"
    yield f"callbacks {consumer.callbacks_running}"
    yield f"closing {consumer.closing}"
    yield f"buffered {delivery.buffered}"
    yield f"not committed {sorted(delivery.ignored_done.items())}"
    yield f"unprocessed {delivery.grants.unprocessed}"
    yield f"blocked {sorted(consumer.blocked)}"
    yield f"stuck {[one[:4] for one in consumer.positions.stuck.found]}"
    yield f"topics {sorted(consumer.subscription.counts())}"


#: A key of a user's message in a warning.
_KEY = re.compile(r"""key (?:None|b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*")""")


class RecordedError(Exception):
    """An exception from a recorded run: its class and text."""


def _named(*kinds: type) -> dict[str, type]:
    return {kind.__name__: kind for kind in kinds}


#: Name → class, for classes that are written field by field.
_ROWS: Mapping[str, type] = {
    name: kind
    for module in (effects, policies)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
} | _named(
    CheckpointOptions,
    ConsumerSettings,
    EngineSettings,
    GroupOptions,
    HeldBack,
    OffsetRange,
    SharingOptions,
    TopicInfo,
    Wanted,
)
_WORDS: Mapping[str, type[StrEnum]] = {
    "Callback": effects.Callback,
    "TakeOverStep": effects.TakeOverStep,
    "Why": Why,
}

#: Field that is not written → its value in a replay.
_INSTEAD: Mapping[str, object] = {"policy_raised": lambda error: None}


def without_keys(text: str) -> str:
    """A warning with message keys removed."""
    return _KEY.sub("key …", text)


def in_stretches(offsets: Iterable[int]) -> list[list[int]]:
    """Offsets as [first, last] of each stretch without a gap, in the same order."""
    found: list[list[int]] = []
    for offset in offsets:
        if found and offset == found[-1][1] + 1:
            found[-1][1] = offset
        else:
            found.append([offset, offset])
    return found


def offsets_in(stretches: Iterable[Sequence[int]]) -> list[int]:
    """The inverse of ``in_stretches``."""
    return [offset for first, last in stretches for offset in range(first, last + 1)]


def to_json(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value in JSON form. other: writes the engine's own objects, which have no form here."""
    if value is None or value.__class__ in (bool, int, float, str):
        return value
    name = type(value).__name__
    if name in _WORDS:
        return {name: str(value)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, effects.Append):
        return {name: [value.cp, b64encode(encode(value.record)).decode(), value.token]}
    if isinstance(value, effects.Warn):
        return {name: [without_keys(value.message), value.is_error]}
    if isinstance(value, HeldBack):
        value = value._replace(key=None)
    if _ROWS.get(name) is type(value):
        names = value._fields if hasattr(value, "_fields") else [each.name for each in fields(cast("Any", value))]
        return {name: [None if each in _INSTEAD else to_json(getattr(value, each), other) for each in names]}
    if isinstance(value, Mapping):
        return {"map": [[to_json(key, other), to_json(each, other)] for key, each in value.items()]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((to_json(each, other) for each in value), key=repr)}
    if isinstance(value, tuple):
        return {"tuple": [to_json(each, other) for each in value]}
    if isinstance(value, list):
        return [to_json(each, other) for each in value]
    if isinstance(value, datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, BaseException):
        return {"error": [name, without_keys(str(value))]}
    return other(value)


def from_json(value: Any, other: Callable[[str, Any], Any]) -> Any:
    """The inverse of ``to_json``. other: finds the engine's own objects, by kind and written form."""
    if isinstance(value, list):
        return [from_json(each, other) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, written),) = value.items()
    if name in _WORDS:
        return _WORDS[name](written)
    if name == "Append":
        cp, record, token = written
        return effects.Append(cp, decode(b64decode(record), SUPPORTED_LEVEL), token)
    if name in _ROWS:
        return _row(_ROWS[name], [from_json(each, other) for each in written])
    match name:
        case "map":
            return {from_json(key, other): from_json(each, other) for key, each in written}
        case "set":
            return frozenset(from_json(each, other) for each in written)
        case "tuple":
            return tuple(from_json(each, other) for each in written)
        case "datetime":
            return datetime.fromisoformat(written)
        case "error":
            return RecordedError(": ".join(written))
    return other(name, written)


def _row(kind: type, values: list[Any]) -> Any:
    if hasattr(kind, "_fields"):
        return kind(*values)
    names = [each.name for each in fields(cast("Any", kind))]
    return kind(*(_INSTEAD.get(name, value) for name, value in zip(names, values, strict=True)))


def is_ours(policy: Policy) -> bool:
    """Whether a policy is one of this library, or a combination of them: a replay can recreate it."""
    own = _ROWS.get(type(policy).__name__) is type(policy)
    parts = [getattr(policy, each.name) for each in fields(cast("Any", policy))] if own else []
    return own and all(is_ours(part) for part in parts if isinstance(part, Policy))


FORMAT = 2

#: What of an engine, and of one of its consumers, has functions that are inputs.
PARTS_OF_A_MEMBER = ("topic_ids", "leases", "outbox")
PARTS = (
    "delivery",
    "pull",
    "positions.stuck",
    "positions",
    "delivery.memory",
    "delivery.in_lanes",
    "delivery.in_lanes.purgatory",
    "delivery.grants",
    "ranges",
    "hand",
    "positions.take_overs",
    "positions.marks",
    "source.checkpoints",
)

#: The shortest time (own clock, ms) between two states.
STATE_EVERY_MS = 1_000.0


def line_of(entry: object) -> str:
    """A line of the file."""
    text = json.dumps(entry, separators=(",", ":"), ensure_ascii=False)
    return f"{crc32(text.encode()):08x} {text}\n"


def made_of(result: object) -> list[object]:
    """The engine's own objects in the result of a take, which later inputs may name."""
    match result:
        case Take(run):
            return [run]
        case AwaitGrant(grant):
            return [grant.run]
        case Block(run, _):
            return [run]
        case ManualLease():
            return [result]
        case list():
            return [each for each in result if isinstance(each, Run)]
    return []


class NotedPolicy(Policy):
    """A policy of the user. Its answer is a reading, so that a replay does not need the policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @reading
    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        return self._policy.wishes(view, own, now)


def went_back(world: World) -> dict[str, int]:
    """What of a world is in no snapshot: where groups went back to without members."""
    taking = [(group.group_id, group.checkpoints) for group in world.groups()]
    return {name: found.went_back_to for name, found in taking if found is not None and found.went_back_to}


class EngineRecorder:
    """The ``recorder`` of one engine; created before its first input."""

    def __init__(
        self,
        engine: Engine,
        rng: Random,
        write: Callable[[str], object],
        failed: Callable[[Exception], object],
        release: str,
    ) -> None:
        """rng: the engine's own, in its current state. write: takes whole lines. failed: called if an error ends it."""
        self._failed = failed
        self._engine = engine
        self._write = write
        #: Engine's own object → its number, in the order in which they were first returned or named.
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._count = 0
        self._readings: list[Any] = []
        self._cps: set[int] = set()
        self._record: tuple[int, bytes | None] = (0, None)
        self._state_at = float("-inf")
        engine.recorder = self
        settings = [getattr(engine.settings, each.name) for each in fields(engine.settings)]
        state = to_json(rng.getstate(), _no_form)
        self._note(
            {"format": FORMAT, "release": release, "level": SUPPORTED_LEVEL, "settings": settings, "random": state}
        )

    def record(self, timestamp_ms: int, value: bytes | None) -> None:
        """Set the record that is applied next."""
        self._record = timestamp_ms, value

    # What the engine calls.

    def take(self, consumer: int | None, function: Callable[..., Any], of: tuple[Any, ...]) -> Any:
        """Carry out one ``take``, and write it down."""
        engine = self._engine
        if getattr(function, "__self__", None) is engine:
            consumer = None  # what concerns a consumer, and others too
        if function == engine.forked:  # the file is the parent's
            engine.recorder = None
            return function(*of)
        if function == engine.add_consumer and not is_ours(of[1].policy):
            of = of[0], replace(of[1], policy=NotedPolicy(of[1].policy))
        try:
            written = [consumer, self._function(consumer, function), self._arguments(consumer, function.__name__, of)]
        except Exception as error:  # noqa: BLE001 - a fault of the recording must not stop the engine
            self._end(error)
            return function(*of)
        self._readings, thread = [], get_ident()
        failure: str | None = None
        READERS[thread] = self
        try:
            result = function(*of)
        except BaseException as raised:
            failure = type(raised).__name__
            raise
        finally:
            del READERS[thread]
            self._note([*written, self._readings, failure])
        for made in made_of(result):
            self._number(made)
        if function == engine.step and of[-1] >= self._state_at + STATE_EVERY_MS:
            self.state(of[-1])
        return result

    def effects(self, effects: list[Effect]) -> None:
        """Write down effects that are about to be carried out."""
        try:
            self._note({"effects": [to_json(effect, _no_form) for effect in effects]})
        except Exception as error:  # noqa: BLE001 - as in take
            self._end(error)

    def state(self, now: float) -> None:
        """Write down the engine's state."""
        self._state_at = now
        self._note({"state": state_of(self._engine)})

    def reading(self, name: str, read: Callable[[], Any], of: tuple[Any, ...]) -> Any:
        """Read what user threads change, and write it down."""
        thread = get_ident()
        del READERS[thread]  # nested readings belong to this one; another engine may take an input meanwhile
        try:
            found = read()
        except BaseException as error:
            self._readings.append([name, {"error": [type(error).__name__, ""]}])
            raise
        finally:
            READERS[thread] = self
        self._readings.append([name, self._found(of, found)])
        return found

    def _end(self, error: Exception) -> None:
        self._engine.recorder = None
        self._failed(error)

    # Forms.

    def _note(self, entry: object) -> None:
        self._write(line_of(entry))

    def _number(self, thing: object) -> int:
        number = self._numbers.get(thing)
        if number is None:
            self._count += 1
            number = self._numbers[thing] = self._count
        return number

    def _function(self, number: int | None, function: Callable[..., Any]) -> Any:
        """Its name: with the part of the engine or consumer, or with the object, that it belongs to."""
        if getattr(function, "__func__", function) not in GIVEN:
            raise TypeError(f"{function.__qualname__} is not marked as an input")
        owner: Any = self._engine if number is None else self._engine.consumers[number]
        of = getattr(function, "__self__", owner)
        if of is owner:
            return function.__name__
        parts = PARTS_OF_A_MEMBER if number is None else PARTS
        part = next((part for part in parts if attrgetter(part)(owner) is of), None)
        return {function.__name__: self._own(of)} if part is None else f"{part}.{function.__name__}"

    def _arguments(self, number: int | None, name: str, of: tuple[Any, ...]) -> Any:
        match name, of:
            case "applied", (cp, offset, _, now):
                timestamp_ms, value = self._record
                return [cp, offset, timestamp_ms, None if value is None else b64encode(value).decode(), now]
            case "caught_up", (now,):
                return [*self._worlds(self._engine.worlds), now]
            case "append", (cp, record):
                return [cp, b64encode(encode(record)).decode()]
            case "fetched" | "come", (key, messages, *rest):
                came = in_stretches(message.offset() or 0 for message in messages)
                return [*key, came, *(to_json(each, self._own) for each in rest)]
            case "finish", (finished, now):
                return [self._whose(number, [each.message for each in finished]), [each.size for each in finished], now]
            case "done", (messages, now):
                return [self._whose(number, messages), now]
        return [to_json(each, self._own) for each in of]

    def _worlds(self, worlds: Mapping[int, World]) -> Any:
        """All CPs that are read, and the state of those that were not read the last time."""
        new = [(cp, world) for cp, world in worlds.items() if cp not in self._cps]
        self._cps = set(worlds)
        return [list(worlds), [[cp, b64encode(x.snapshot()).decode(), x.required_level, went_back(x)] for cp, x in new]]

    def _own(self, thing: object) -> Any:
        """An object of the engine, by its number; the first time in full if the caller created it."""
        match thing:
            case Run() | ManualLease():
                return {"made": self._number(thing)}
            case Grant():
                return {"grant": self._number(thing.run)}
            case Lanes():
                logging = [thing.is_durable, thing.concurrency, thing.most_tries]
                logging += [] if thing.most_waiting is None else [thing.most_waiting]
                return {"lanes": [self._number(thing), thing.order, *logging]}
            case Pull():
                if thing in self._numbers:
                    return {"made": self._numbers[thing]}
                collected = [self._number(run) for run in thing.collected]
                made = [isinstance(thing, GrantedPull), thing.is_shared, thing.deadline, thing.fill_s, collected]
                return {"pull": [self._number(thing), thing.work.number, *made]}
            case ConsumerEngine():
                return {"consumer": thing.number}
            case Subscription():
                return {"subscription": [*sorted(thing.names), *(each.pattern for each in thing.patterns)]}
            case NotedPolicy():
                return {"policy": None}
        return _no_form(thing)

    def _whose(self, number: int | None, messages: Sequence[Message]) -> Any:
        """Messages by topic, partition and where the identical object is in flight, in order.

        null: nowhere; -1: under the current assignment; 0 and up: under an evicted one.
        """
        found: list[list[Any]] = []
        consumer = self._engine.consumers[number or 0]
        for message in messages:
            topic, partition, offset = message.topic() or "", message.partition() or 0, message.offset() or 0
            where: int | None = None
            now = consumer.assignments.get((topic, partition))
            before = [(place, x) for place, x in enumerate(consumer.delivery.owed)]
            for place, each in [*([(-1, now)] if now is not None else []), *before]:
                if _has(each, message, offset):
                    where = place
                    break
            if found and found[-1][:3] == [topic, partition, where]:
                found[-1][3].append(offset)
            else:
                found.append([topic, partition, where, [offset]])
        return [[*of, in_stretches(offsets)] for *of, offsets in found]

    def _found(self, of: tuple[Any, ...], found: Any) -> Any:
        """What was read: numbers as they are, messages by offset, messages dropped in lanes with their assignment."""
        if isinstance(found, Wishes | tuple):
            return to_json(found, _no_form)
        if not isinstance(found, list):
            return found
        if found and isinstance(found[0], tuple):
            consumer = of[0]._consumer
            evicted = list(consumer.delivery.owed)
            places = [-1 if consumer.assignments.get(x.key) is x else _place(x, evicted) for x, _ in found]
            offsets = [message.offset() for _, message in found]
            same = [_has(x, message, message.offset()) for x, message in found]
            return [[*x.key, *more] for (x, _), *more in zip(found, places, offsets, same, strict=True)]
        if found and isinstance(found[0], int):
            return found
        return [message.offset() for message in found if hasattr(message, "offset")]


def _place(assignment: Assignment, among: Sequence[Assignment]) -> int | None:
    return next((place for place, each in enumerate(among) if each is assignment), None)


def _has(assignment: Assignment, message: Message, offset: int) -> bool:
    run = assignment.tracker.run_at(offset)
    place = None if run is None else run.index(offset)
    return run is not None and place is not None and run.messages[place] is message


def _no_form(thing: object) -> Any:
    raise TypeError(f"{type(thing).__name__} has no form in a recording")
