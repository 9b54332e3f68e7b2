"""Feeds a recording (`kafka_marshal.engine.recording`) to a new engine, which must do and come to the same."""

from __future__ import annotations

import json
from _thread import get_ident
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from typing import Any
from zlib import crc32

from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.inputs import GIVEN, READERS
from kafka_marshal.engine.policies import Balanced
from kafka_marshal.engine.recording import (
    FORMAT,
    NotedPolicy,
    RecordedError,
    from_json,
    made_of,
    offsets_in,
    state_of,
    to_json,
)
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import Assignment, Grant
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.in_lanes import Finished, InLanes
from kafka_marshal.engine.work.lanes import Lanes
from kafka_marshal.engine.work.pull import AwaitGrant, GrantedPull, Pull
from kafka_marshal.engine.work.run import Run
from kafka_marshal.types import Key
from rationalizer import World, decode
from rationalizer.levels import SUPPORTED_LEVEL

#: Inputs that are methods of nothing, by name.
FUNCTIONS = {each.__name__: each for each in GIVEN if "." not in each.__qualname__}

#: At most this many characters of an entry are shown if a replay differs.
SHOWN = 300


class RecordingError(ValueError):
    """The file is not a recording, is damaged, or is from another release."""


class ReplayDiffersError(AssertionError):
    """The engine did not do the same as in the recorded run."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The entries of a recording."""

    header: Mapping[str, Any]
    entries: list[Any] = field(default_factory=list)
    #: Whether the last line is incomplete: the process was killed, or the disk was full.
    is_cut: bool = False


def read_lines(data: bytes, release: str) -> Lines:
    """The entries of a recording, up to its last whole line. Raises RecordingError.

    release: this one. It must be the one that recorded, since another release may decide differently.
    """
    lines = data.split(b"\n")
    is_cut = bool(lines.pop())
    found = []
    for number, line in enumerate(lines, 1):
        crc, _, text = line.partition(b" ")
        if crc != b"%08x" % crc32(text):
            if number == 1:
                raise RecordingError("this is not a recording of KAFKA_MARSHAL_RECORD: its first line has no checksum")
            raise RecordingError(
                f"line {number} of {len(lines)} is damaged: its checksum is another one. Nothing after it can be "
                f"replayed; the {number - 1} lines before it can (head -n {number - 1})"
            )
        found.append(json.loads(text))
    if not found:
        raise RecordingError("the recording is empty: the worker ended before it had written anything")
    header, *entries = found
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RecordingError("this is not a recording of this form: its first line is no header")
    if header["release"] != release or header["level"] != SUPPORTED_LEVEL:
        raise RecordingError(
            f"it was recorded with release {header['release']}, protocol level {header['level']}; this is release "
            f"{release}, level {SUPPORTED_LEVEL}, whose engine may decide otherwise. Replay it with that release"
        )
    return Lines(header, entries, is_cut)


class _Message:
    """Stands for a message, of which a recording keeps only topic, partition and offset."""

    __slots__ = ("_place",)

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        self._place = topic, partition, offset

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int:
        return self._place[2]

    def key(self) -> None:
        return None

    def value(self) -> None:
        return None


class Replay:
    """One recording, fed to an engine."""

    def __init__(self, lines: Lines) -> None:
        settings, state = lines.header["settings"], from_json(lines.header["random"], self._own)
        rng = Random()
        rng.setstate(state)
        self.worlds: dict[int, World] = {}
        self.engine: Engine = Engine(EngineSettings(*settings), self.worlds, rng)
        self._lines = lines
        self._partitions = self.engine.settings.coordination_partitions
        #: Number in the recording → the engine's own object; id of the object → that number.
        self._numbered: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._grants: dict[int, Grant] = {}
        self._readings: deque[Any] = deque()
        self._at = 0
        #: The number of inputs taken, and of effects and states compared.
        self.inputs: int = 0
        self.effects: int = 0
        self.states: int = 0

    def run(self) -> None:
        """Feed all entries. Raises ReplayDiffersError if the engine does something else."""
        for at, entry in enumerate(self._lines.entries, 2):
            self._at = at
            if isinstance(entry, list):
                self._take(*entry)
            elif "effects" in entry:
                self.effects += len(entry["effects"])
                made = [to_json(effect, _unknown) for effect in self.engine.take_effects()]
                self._compare("effect", entry["effects"], json.loads(json.dumps(made)))
            else:
                self.states += 1
                self._compare("state", entry["state"], state_of(self.engine))

    def _compare(self, what: str, recorded: list[Any], made: list[Any]) -> None:
        for place in range(max(len(recorded), len(made))):
            old, new = (each[place] if place < len(each) else "nothing" for each in (recorded, made))
            if old != new:
                raise self._differs(f"{what} {place + 1} is {str(new)[:SHOWN]}; it was {str(old)[:SHOWN]}")

    def _differs(self, text: str) -> ReplayDiffersError:
        return ReplayDiffersError(f"line {self._at} of the recording: {text}")

    def _take(self, number: int | None, name: Any, written: list[Any], readings: list[Any], error: str | None) -> None:
        self.inputs += 1
        function, of = self._function(number, name), self._arguments(number, name, written)
        self._readings = deque(readings)
        thread, raised, result = get_ident(), None, None
        READERS[thread] = self
        try:
            result = self.engine.take(number, function, *of)
        except ReplayDiffersError:
            raise
        except Exception as found:
            if error is None:
                raise
            raised = type(found).__name__
        finally:
            del READERS[thread]
        if raised != error:
            raise self._differs(f"{name} raised {raised}; it was {error}")
        if self._readings:
            raise self._differs(f"{name} did not read {self._readings[0][0]}, as it had")
        for made in made_of(result):
            self._number(len(self._numbered) + 1, made)
        if isinstance(result, AwaitGrant):
            self._grants[self._numbers[id(result.grant.run)]] = result.grant

    def _number(self, number: int, thing: object) -> Any:
        if id(thing) not in self._numbers:  # all objects are kept, so that no id is reused
            self._numbers[id(thing)], self._numbered[number] = number, thing
        return thing

    # Reading what was written.

    def _function(self, number: int | None, name: str | dict[str, Any]) -> Callable[..., Any]:
        if isinstance(name, dict):
            ((of_it, written),) = name.items()
            found: Callable[..., Any] = getattr(from_json(written, self._own), of_it)
            return found
        owner = self.engine if number is None else self.engine.consumers[number]
        return FUNCTIONS.get(name) or attrgetter(name)(owner)

    def _arguments(self, number: int | None, name: str, written: list[Any]) -> list[Any]:
        match name, written:
            case "applied", (cp, offset, timestamp_ms, value, now):
                value = None if value is None else b64decode(value)
                return [cp, offset, self.worlds[cp].apply(offset, timestamp_ms, value), now]
            case "caught_up", (cps, new, now):
                self._restore(cps, new)
                return [now]
            case "outbox.append", (cp, record):
                return [cp, decode(b64decode(record), SUPPORTED_LEVEL)]
            case (("delivery.fetched" | {"come": _}), (topic, partition, stretches, *rest)):
                messages = [_Message(topic, partition, each) for each in offsets_in(stretches)]
                return [(topic, partition), messages, *(from_json(each, self._own) for each in rest)]
            case "delivery.finish", (groups, sizes, now):
                found = zip(self._all(number, groups), sizes, strict=True)
                return [[Finished(*each, None) for each in found], now]
            case "delivery.done", (groups, now):
                return [self._all(number, groups), now]
        return [from_json(each, self._own) for each in written]

    def _all(self, number: int | None, groups: list[Any]) -> list[Any]:
        consumer = self.engine.consumers[number or 0]
        return [each for group in groups for each in self._found(consumer, *group)]

    def _restore(self, cps: list[int], new: list[tuple[int, str, int | None, dict[str, int]]]) -> None:
        for cp in self.worlds.keys() - set(cps):
            del self.worlds[cp]
        for cp, snapshot, required_level, went_back in new:
            self.worlds[cp] = World.restore(b64decode(snapshot), self._partitions)
            self.worlds[cp].required_level = required_level
            for group in self.worlds[cp].groups():
                if group.checkpoints is not None:
                    group.checkpoints.went_back_to = went_back.get(group.group_id, 0)

    def _own(self, kind: str, written: Any) -> Any:
        match kind:
            case "made":
                return self._numbered[written]
            case "grant":
                return self._grants[written]
            case "lanes":
                number, order, *logging = written
                lanes = self._numbered.get(number) or self._number(number, Lanes(order, nullcontext(), [], 0.0))
                lanes.is_durable, lanes.concurrency, lanes.most_tries, *most = logging
                lanes.most_waiting = most[0] if most else None
                return lanes
            case "pull":
                number, *made = written
                return self._number(number, self._pull(*made))
            case "consumer":
                return self.engine.consumers[written]
            case "subscription":
                return Subscription(written, "__marshal")
            case "policy":
                return NotedPolicy(Balanced())
        raise RecordingError(f"line {self._at}: unknown form {kind!r}")

    def _pull(
        self, number: int, is_granted: bool, is_shared: bool, deadline: float, fill_s: float, collected: list[int]
    ) -> Pull:
        consumer = self.engine.consumers[number]
        hand, runs = consumer.hand if is_shared else None, [self._numbered[each] for each in collected]
        if is_granted:
            return GrantedPull(consumer, hand, deadline=deadline, collected=runs)
        return Pull(consumer, hand, deadline=deadline, fill_s=fill_s, collected=runs)

    def _found(
        self, consumer: ConsumerEngine, topic: str, partition: int, where: int | None, stretches: Any
    ) -> Iterator[Any]:
        """The messages in flight under the recorded assignment, or stand-ins with the same offsets."""
        under = _under(consumer, (topic, partition), where)
        for offset in offsets_in(stretches):
            yield _Message(topic, partition, offset) if under is None else _at(under, offset)

    # Readings.

    def reading(self, name: str, read: Callable[[], Any], of: tuple[Any, ...]) -> Any:
        """Answer with what was read in the recorded run."""
        if not self._readings:
            raise self._differs(f"it reads {name}, which it had not")
        recorded, found = self._readings.popleft()
        if recorded != name:
            raise self._differs(f"it reads {name}; it had read {recorded}")
        if isinstance(found, dict):
            answer = from_json(found, self._own)
            if isinstance(answer, RecordedError):
                raise answer
            return answer
        if not isinstance(found, list):
            return found
        if isinstance(of[0], Run):
            return [of[0].messages[of[0].index(offset) or 0] for offset in found]
        if name in ("with_handlers", "hashes"):
            return found
        if name in ("recall", "leave"):
            return [_at(of[1], offset) for offset in found]
        return [self._dropped(of[0], *each) for each in found]

    @staticmethod
    def _dropped(
        lanes: InLanes, topic: str, partition: int, where: int | None, offset: int, is_same: bool
    ) -> tuple[Assignment, Any]:
        consumer: Any = lanes._consumer
        assignment = _under(consumer, (topic, partition), where)
        if assignment is None:  # its assignment is gone
            return Assignment((topic, partition), consumer), _Message(topic, partition, offset)
        return assignment, _at(assignment, offset) if is_same else _Message(topic, partition, offset)


def _under(consumer: ConsumerEngine, key: Key, where: int | None) -> Assignment | None:
    if where is None:
        return None
    return consumer.assignments[key] if where < 0 else consumer.delivery.owed.found[where][0]


def _at(assignment: Assignment, offset: int) -> Any:
    run = assignment.tracker.run_at(offset)
    place = None if run is None else run.index(offset)
    return _Message(*assignment.key, offset) if run is None or place is None else run.messages[place]


def _unknown(thing: object) -> Any:
    raise TypeError(f"{type(thing).__name__} has no form in a recording")
