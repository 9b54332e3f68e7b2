"""One member of the search: the real engine as bytes, and the pure functions that move it.

A member is frozen between two moves: its engine is pickled, its replica is a snapshot (S1). A move thaws it, passes the
engine what the shell would pass (:mod:`kafka_marshal.node.driver`), carries the effects out on paper, and freezes it
again. As the engine has no clock, no random source and no I/O, one member and one input make one outcome, which is
worked out once and remembered.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Any, Final
from weakref import WeakValueDictionary

from kafka_marshal.adapters.memory.broker import MemoryMessage
from kafka_marshal.engine.claims.leases import LeaseState
from kafka_marshal.engine.effects import (
    Append,
    Call,
    Callback,
    CheckpointCompleted,
    CloseProducer,
    Effect,
    LookUp,
    Note,
    RestoreState,
    SaveState,
    StartFetch,
    StopFetch,
    TakeOver,
    Warn,
)
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.policies import Balanced
from kafka_marshal.engine.settings import ConsumerSettings, EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import Stage
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.lane import LoopKeys
from kafka_marshal.engine.work.pull import AwaitGrant, Fetch, Take, Wanted
from kafka_marshal.ports import Message, TopicInfo
from kafka_marshal.types import Start
from rationalizer import Heartbeat, Outcome, World, encode

GROUP: Final = "g"
TOPIC: Final = "t"
PARTITIONS: Final = (0, 1)
#: Messages of each partition.
LENGTH: Final = 3
HI: Final = 300
#: Cached outcomes of moves.
_REMEMBERED: Final = 60_000

MESSAGES: Final = {
    (partition, offset): MemoryMessage(TOPIC, partition, offset, None, b"", (1, 0))
    for partition in PARTITIONS
    for offset in range(LENGTH)
}

#: (offset, the broker's stamp in ms, value)
Entry = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True)
class Shape:
    """Common settings of a scenario's members."""

    at_most_once: bool = False
    #: Where the group begins (P9).
    start: Start = "earliest"
    #: Whether there are callbacks, which return at any time.
    callbacks: bool = False


@dataclass(frozen=True, slots=True)
class Belief:
    """A lease as its member sees it: until when (its own clock, ms) it is proven (T4)."""

    partition: int
    epoch: int
    proven_until: float


@dataclass(frozen=True, slots=True)
class HandedOut:
    """A message that an instance delivered or marked as done under an epoch."""

    instance: str
    epoch: int
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Member:
    """One process between two moves; equal where the digests are."""

    shape: Shape
    client: str
    instance: str
    #: The engine, and its user's messages.
    state: bytes
    #: Its replica, canonical (S1), and the next offset it waits for.
    world: bytes
    applied: int
    digest: bytes
    #: Deadline of its engine (ms).
    deadline: float
    beliefs: tuple[Belief, ...]
    #: Messages in flight, oldest first.
    in_hand: tuple[tuple[int, int], ...]
    #: Whether a user's thread might get a message.
    has_more: bool
    #: Callbacks that run.
    calls: int
    #: Granted and given up, as it was reported: (partition, first, last offset) (C13).
    reported: tuple[tuple[int, int, int], ...]

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Member) and self.digest == other.digest


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of a move of one member."""

    member: Member
    #: (token, value) of what it appends, in order.
    sent: tuple[tuple[int, bytes], ...] = ()
    handed_out: HandedOut | None = None
    done: tuple[int, int] | None = None


@dataclass(slots=True)
class _Live:
    """A member that is moving."""

    shape: Shape
    engine: Engine
    world: World
    #: Messages that a user's thread has taken and not marked as done.
    hands: list[MemoryMessage] = field(default_factory=list)
    #: Callbacks that run, in their order.
    calls: list[Call] = field(default_factory=list)
    sent: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def consumer(self) -> ConsumerEngine:
        """Its only one."""
        return next(iter(self.engine.consumers.values()))


#: Effects by kind, and moves: how often each was computed.
reached: Counter[str] = Counter()


class _NoChance(Random):
    """Always the upper end: the search varies the order of events, not chance."""

    def uniform(self, a: float, b: float) -> float:
        return b


# Freezing and thawing. Constants and texts are numbered, not pickled, so that equal states have equal bytes, however
# they were reached.

_CHANCE, _POLICY = _NoChance(0), Balanced()
_WORLD, _SETTINGS, _CONSUMER_SETTINGS = -1, -2, -3
_THINGS: list[Any] = [_CHANCE, _POLICY, *MESSAGES.values(), *Stage, *LeaseState, *Callback]
_KEYS = {(TOPIC, partition): -10 - partition for partition in PARTITIONS}
_NUMBER_OF = {id(thing): number for number, thing in enumerate(_THINGS)}
_TEXTS: dict[str, int] = {}


#: Of a class of this project: its attributes, in order; (): it is pickled as it is.
_ATTRIBUTES: dict[type, tuple[str, ...]] = {}


def _attributes(thing: object) -> tuple[str, ...]:
    kind = type(thing)
    found = _ATTRIBUTES.get(kind)
    if found is None:
        is_ours = kind.__module__.startswith(("kafka_marshal.", "rationalizer.")) and not issubclass(kind, dict | type)
        slots = [x for base in kind.__mro__ for x in getattr(base, "__slots__", ()) if x != "__weakref__"]
        found = _ATTRIBUTES[kind] = tuple(getattr(thing, "__dict__", slots)) if is_ours else ()
        _NUMBER_OF[id(kind)] = len(_THINGS)
        _THINGS.append(kind)
    return found


def _fill(thing: object, values: tuple[Any, ...]) -> None:
    for name, value in zip(_ATTRIBUTES[type(thing)], values, strict=True):
        object.__setattr__(thing, name, value)


#: Makes an object without calling what sets it up.
_NEW: Final = getattr(copyreg, "__newobj__")  # noqa: B009 - it is not in the stubs
_NUMBER_OF[id(_fill)] = len(_THINGS)
_THINGS.append(_fill)


class _Freezer(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """The values of such an object without their names: half of what there would be to write."""
        if type(obj) is LoopKeys:  # figures, and no state
            return LoopKeys, ()
        names = _attributes(obj)
        if not names or len(getattr(obj, "__dict__", names)) != len(names):
            return NotImplemented
        return _NEW, (type(obj),), tuple([getattr(obj, name) for name in names]), None, None, _fill

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        if kind is str:
            number = _TEXTS.get(obj)
            if number is None:
                number = _TEXTS[obj] = len(_THINGS)
                _THINGS.append(obj)
            return number
        if kind is tuple:
            return _KEYS.get(obj) if len(obj) == 2 and obj[0] == TOPIC and type(obj[1]) is int else None
        if kind is World:
            return _WORLD
        if kind is EngineSettings:
            return _SETTINGS
        if kind is ConsumerSettings:
            return _CONSUMER_SETTINGS
        return _NUMBER_OF.get(id(obj))


class _Thawer(pickle.Unpickler):
    def __init__(self, state: bytes, named: dict[int, Any]) -> None:
        super().__init__(io.BytesIO(state))
        self._named = named

    def persistent_load(self, pid: int) -> Any:
        return _THINGS[pid] if pid >= 0 else self._named[pid]


@lru_cache(maxsize=256)
def _settings(client: str, instance: str) -> EngineSettings:
    return EngineSettings(GROUP, client, instance, 1, HI)


@lru_cache(maxsize=256)
def _consumer_settings(shape: Shape) -> ConsumerSettings:
    callbacks = frozenset(Callback) if shape.callbacks else frozenset[Callback]()
    return ConsumerSettings(shape.at_most_once, _POLICY, shape.start, 1, None, callbacks)


#: One object for all equal ones.
_members: WeakValueDictionary[bytes, Member] = WeakValueDictionary()


def _thaw(member: Member) -> _Live:
    world = World.restore(member.world, 1)
    named: dict[int, Any] = {
        _WORLD: world,
        _SETTINGS: _settings(member.client, member.instance),
        _CONSUMER_SETTINGS: _consumer_settings(member.shape),
        **{number: key for key, number in _KEYS.items()},
    }
    engine, hands, calls = _Thawer(member.state, named).load()
    return _Live(member.shape, engine, world, hands, calls)


def _freeze(live: _Live, now: int) -> Member:
    buffer = io.BytesIO()
    _Freezer(buffer, protocol=5).dump((live.engine, live.hands, live.calls))
    state, world = buffer.getvalue(), live.world.snapshot()
    whose = f"{live.shape} {live.engine.settings.instance_id} {len(state)} ".encode()
    digest = blake2b(whose + state + world, digest_size=16).digest()
    if (known := _members.get(digest)) is not None:
        return known
    settings, consumer = live.engine.settings, live.consumer
    delivery = consumer.delivery
    _members[digest] = member = Member(
        shape=live.shape,
        client=settings.client_id,
        instance=settings.instance_id,
        state=state,
        world=world,
        applied=live.world.next_offset,
        digest=digest,
        deadline=live.engine.deadline(now),
        beliefs=tuple(
            Belief(key[1], lease.epoch, lease.proven_until)
            for key, lease in sorted(live.engine.book.leases.items())
            if lease.proven_until > 0
        ),
        in_hand=tuple((message.partition(), message.offset()) for message in live.hands),
        has_more=bool(
            delivery.grants.granted is not None
            or delivery.grants.proposed is not None
            or any(assignment.buffer.size for assignment in consumer.assignments.values())
        ),
        calls=len(live.calls),
        reported=tuple((partition, first, last) for _, partition, first, last in delivery.grants.unprocessed),
    )
    return member


# The shell (driver.py, consumer.py), simulated.


def _carry_out(live: _Live, now: int) -> None:
    """Carry out effects until there are none: fetches and look-ups are answered at once."""
    while effects := live.engine.take_effects():
        for effect in effects:
            _carry_out_one(live, effect, now)


def _carry_out_one(live: _Live, effect: Effect, now: int) -> None:
    match effect:
        case Append(record=record, token=token):
            is_takeover = isinstance(record, Heartbeat) and record.epoch is None
            reached[f"Append {type(record).__name__}{' (takeover)' if is_takeover else ''}"] += 1
            live.sent.append((token, encode(record)))
            return
        case StartFetch(key=(_, partition), offset=offset):
            messages: list[Message] = [MESSAGES[partition, at] for at in range(offset, LENGTH)]
            if messages:
                live.consumer.delivery.fetched((TOPIC, partition), messages, now)
        case LookUp(start=start):
            live.engine.located(effect, 0, LENGTH, LENGTH - 1 if start == "latest" else 0, now)
        case Call(callback=callback):
            live.calls.extend(replace(effect, pieces=(piece,)) for piece in effect.pieces)
            reached[f"Call {callback}"] += 1
            return
        case Note(event="lost", reason=message) | Warn(message=message):
            reached[f"Warn: {next(why for sign, why in _WARNINGS if sign in message)}"] += 1
            return
        case StopFetch():
            pass
        case TakeOver() | CloseProducer() | SaveState() | RestoreState() | CheckpointCompleted():
            raise AssertionError("no scenario has transactions, or a coordinated group")
    reached[type(effect).__name__] += 1


#: Text of a warning → its subject.
_WARNINGS = (
    ("not confirmed within", "not proven in time"),
    ("another holder or epoch", "fenced"),
    ("were granted and not handed out", "granted, not handed out"),
    ("", "something else"),
)


def _settle(live: _Live, now: int) -> None:
    """As `Driver.settle` does after any input."""
    live.engine.step(now)
    _carry_out(live, now)


def _moved(live: _Live, now: int, handed_out: HandedOut | None = None, done: tuple[int, int] | None = None) -> Moved:
    member = _freeze(live, now)
    return Moved(member, tuple(live.sent), handed_out, done)


@lru_cache(maxsize=_REMEMBERED)
def begun(shape: Shape, client: str, instance: str, log: tuple[Entry, ...], now: int) -> Moved:
    """A process starts: its replica reads the log to the end, then it makes a consumer."""
    world = World(0, 1)
    world.apply_many(log)
    engine = Engine(_settings(client, instance), {0: world}, _CHANCE)
    engine.caught_up(now)
    consumer = engine.add_consumer(Subscription([TOPIC], "__marshal"), _consumer_settings(shape))
    engine.metadata({TOPIC: TopicInfo(TOPIC, len(PARTITIONS), "one")}, now)
    live = _Live(shape, engine, world)
    assert live.consumer is consumer
    _settle(live, now)
    return _moved(live, now)


@lru_cache(maxsize=_REMEMBERED)
def read(member: Member, entries: tuple[Entry, ...], answers: tuple[tuple[int, int | None], ...], now: int) -> Moved:
    """One turn of the background thread: these records of the log, then these answers of the broker, then the clock."""
    live = _thaw(member)
    for offset, stamp, value in entries:
        outcome: Outcome = live.world.apply(offset, stamp, value)
        live.engine.applied(0, offset, outcome, now)
    for token, told in answers:
        live.engine.acked(token, told, now)
    _settle(live, now)
    return _moved(live, now)


@lru_cache(maxsize=_REMEMBERED)
def called(member: Member, now: int) -> Moved:
    """The callback that runs returns."""
    live = _thaw(member)
    live.engine.called(live.calls.pop(0), now)
    _settle(live, now)
    return _moved(live, now)


@lru_cache(maxsize=_REMEMBERED)
def done(member: Member, place: int, now: int) -> Moved:
    """A user's thread has got a message done, the one at this place of those in flight."""
    live = _thaw(member)
    message = live.hands.pop(place)
    live.consumer.delivery.done([message], now)
    _carry_out(live, now)
    return _moved(live, now, done=(message.partition(), message.offset()))


@lru_cache(maxsize=_REMEMBERED)
def taken(member: Member, now: int) -> Moved | None:
    """A user's thread asks for a message; None: there is none now, and nothing has changed."""
    live = _thaw(member)
    if member.shape.at_most_once:
        return _taken_at_most_once(live, now)
    step = live.engine.take(live.consumer.number, live.consumer.pull.next, Wanted(1), now)
    if not isinstance(step, Take):
        return None
    run = step.run
    message = MESSAGES[run.assignment.key[1], run.first]
    live.hands.append(message)
    return _handed_out(live, message, run.assignment.epoch, now)


def _handed_out(live: _Live, message: MemoryMessage, epoch: int, now: int) -> Moved:
    _carry_out(live, now)
    instance = live.engine.settings.instance_id
    return _moved(live, now, HandedOut(instance, epoch, message.partition(), message.offset()))


def _taken_at_most_once(live: _Live, now: int) -> Moved | None:
    """As `Consumer.poll` goes about it, as far as a wait; what can be read has come already."""
    grants, pull = live.consumer.delivery.grants, live.consumer.pull
    is_news, came = False, None
    while True:
        before = grants.granted, grants.proposed
        step = live.engine.take(live.consumer.number, live.consumer.pull.next, Wanted(1, came=came), now)
        is_news = is_news or before != (grants.granted, grants.proposed)
        came = 0
        match step:
            case Take(run):
                run.since = now
                (message,) = run.take(1)
                message = MESSAGES[message.partition() or 0, message.offset() or 0]
                return _handed_out(live, message, run.assignment.epoch, now)
            case AwaitGrant(grant) if grant.is_answered:
                pull.answered(grant, now)
                is_news, came = True, None
            case Fetch():
                pass
            case _:
                break
    if not is_news:
        return None
    _carry_out(live, now)
    return _moved(live, now)


def forget() -> None:
    """Remember nothing: what is worked out from here on is counted again."""
    for function in (begun, read, called, done, taken):
        function.cache_clear()
    reached.clear()
