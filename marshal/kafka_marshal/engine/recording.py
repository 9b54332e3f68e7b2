"""Writes down the run of one engine: every input, what was read from user threads meanwhile, and the effects.

One line each, with a checksum: ``crc JSON``. First the header, then in order::

    [consumer, function, arguments, readings, error]    a take; error: the class that it raised, or null
    {"effects": […]}                 the result of take_effects()
    {"state": […]}                   the engine's state, about every second and at the end

A replay feeds them in again (HACKING.md).
"""

from __future__ import annotations

import json
from _thread import get_ident
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from random import Random
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from kafka_marshal.engine.claims.manual import ManualLease
from kafka_marshal.engine.effects import Effect
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.inputs import GIVEN
from kafka_marshal.engine.notation import in_stretches, is_ours, to_json
from kafka_marshal.engine.policies import Policy, View, Wishes
from kafka_marshal.engine.readings import READERS, reading
from kafka_marshal.engine.states import state_of
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import Assignment, Grant
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.lanes import Lanes
from kafka_marshal.engine.work.pull import AwaitGrant, GrantedPull, Pull, Take
from kafka_marshal.engine.work.purgatory import Block
from kafka_marshal.engine.work.run import Run
from kafka_marshal.ports import Message
from kafka_marshal.types import Key
from rationalizer import World, encode
from rationalizer.levels import SUPPORTED_LEVEL

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


class Recorder:
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
            case "fetched", (key, messages, now):
                return [*key, in_stretches(message.offset() or 0 for message in messages), now]
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
                return {"lanes": [self._number(thing), thing.order, *thing.logging]}
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
