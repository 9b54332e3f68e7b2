"""All members, the log between them and the network, at one moment; and every move that can come next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from math import ceil, inf
from typing import Final, TypeVar

from kafka_marshal.engine.work.topic_mark import split
from rationalizer import World
from tests.campaigns.small_scope.engine import member as members
from tests.campaigns.small_scope.engine.member import (
    GROUP,
    HI,
    PARTITIONS,
    TOPIC,
    Belief,
    Entry,
    HandedOut,
    Member,
    Moved,
    Shape,
)

T = TypeVar("T")

#: The broker's clock when all members' clocks are at 0 (ms).
START: Final = 1_000_000
#: Messages that one user's thread has in flight at most.
MAX_IN_HAND: Final = 2


class MoveKind(StrEnum):
    """What can happen next."""

    LAND = "what it sent is written, and acknowledged"
    LAND_UNTOLD = "what it sent is written, and the acknowledgement is lost"
    LOSE = "what it sent is lost"
    TURN = "its background thread takes a turn"
    READ = "it reads one record"
    HEAR = "it hears one acknowledgement"
    TAKE = "its user asks for a message"
    DONE = "its user has done the oldest message in hand"
    DONE_LAST = "its user has done the newest message in hand"
    RETURN = "its callback returns"
    RESTART = "it is killed and started again"
    LATE = "what a killed process had sent is written"
    DUE = "time goes by until the next member has something to do"
    TRUST = "time goes by until the next lease is not trusted any more"
    STALE = "time goes by until the next lease is stale"


@dataclass(frozen=True, slots=True)
class Move:
    """One of them; who: the member's place."""

    kind: MoveKind
    who: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """A lease by the log."""

    partition: int
    client: str | None
    instance: str | None
    epoch: int
    #: The broker's clock (ms).
    last_beat: int
    stable: int
    granted: int
    ranges: tuple[tuple[int, int], ...]

    def is_done(self, offset: int) -> bool:
        """Whether the log says that a message is done."""
        return offset <= self.stable or any(first <= offset <= last for first, last in self.ranges)


@dataclass(frozen=True, slots=True)
class Truth:
    """What is so after a prefix of the log, for every reader: canonical state, and the leases in it."""

    state: bytes
    #: The last record: (its name, outcome); ("", "") before any.
    last: tuple[str, str]
    leases: tuple[Standing, ...]

    def lease(self, partition: int) -> Standing | None:
        """The lease of a partition; None if it was never claimed."""
        return next((lease for lease in self.leases if lease.partition == partition), None)


@lru_cache(maxsize=60_000)
def _after(state: bytes, entry: Entry) -> Truth:
    world = World.restore(state, 1)
    outcome = world.apply(*entry)
    return Truth(
        world.snapshot(),
        (outcome.type or "", outcome.code),
        tuple(
            Standing(
                lease.partition,
                lease.client_id,
                lease.instance_id,
                lease.epoch,
                lease.last_beat,
                lease.progress.stable,
                lease.progress.granted,
                tuple(split(lease.progress.ranges).ranges),
            )
            for partition in PARTITIONS
            if (lease := world.lease(GROUP, TOPIC, partition)) is not None
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """One moment. All clocks have the same rate."""

    shape: Shape
    #: Whether a turn reads everything, and all sent records land together; else one by one.
    is_coarse: bool
    #: Everybody's own clock (ms).
    now: int
    log: tuple[Entry, ...]
    #: What is so before each record of the log, and after the last.
    truths: tuple[Truth, ...]
    members: tuple[Member, ...]
    #: By member: (token, value) sent and neither written nor lost yet; (token, offset or None) on its way back.
    sending: tuple[tuple[tuple[int, bytes], ...], ...]
    answers: tuple[tuple[tuple[int, int | None], ...], ...]
    #: Records that killed processes had sent.
    strays: tuple[bytes, ...] = ()
    #: Delivered and done messages, as far as they still matter.
    handed_out: frozenset[HandedOut] = frozenset()
    done: frozenset[tuple[int, int]] = frozenset()
    #: How often something may still be lost or a process killed, and how often time may pass.
    faults: int = 0
    waits: int = 0

    @property
    def log_time(self) -> int:
        """The broker's clock (ms)."""
        return START + self.now

    @staticmethod
    def own_time(log_time: int) -> int:
        """The members' clock (ms) when the broker's showed this."""
        return log_time - START

    @property
    def truth(self) -> Truth:
        """What is so now, for a reader of all of the log."""
        return self.truths[-1]

    def key(self) -> bytes:
        """Sixteen bytes that identify the situation."""
        rest = (
            self.now,
            self.log[min((x.applied for x in self.members), default=0) :],
            self.sending,
            self.answers,
            self.strays,
            sorted(map(repr, self.handed_out)),
            sorted(self.done),
            self.faults,
            self.waits,
        )
        parts = (*(x.digest for x in self.members), self.truth.state, repr(rest).encode())
        return blake2b(b"".join(parts), digest_size=16).digest()


def begin(shape: Shape, is_coarse: bool) -> Situation:
    """An empty log, without members."""
    world = World(0, 1)
    return Situation(shape, is_coarse, 0, (), (Truth(world.snapshot(), ("", ""), ()),), (), (), ())


def joined(situation: Situation, client: str) -> Situation:
    """A first process of a client has started."""
    moved = members.begun(situation.shape, client, f"{client}1", situation.log, situation.now)
    return replace(
        situation,
        members=(*situation.members, moved.member),
        sending=(*situation.sending, moved.sent),
        answers=(*situation.answers, ()),
    )


def moves(situation: Situation) -> Iterator[Move]:
    """Everything that can happen next."""
    for who in range(len(situation.members)):
        yield from (Move(kind, who) for kind in _of_member(situation, who))
    if situation.strays:
        yield Move(MoveKind.LATE)
    if situation.waits:
        yield from (Move(kind) for kind, moment in _moments(situation).items() if moment is not None)


def _of_member(situation: Situation, who: int) -> Iterator[MoveKind]:
    member = situation.members[who]
    if situation.sending[who]:
        yield MoveKind.LAND
        if situation.faults:
            yield MoveKind.LAND_UNTOLD
            yield MoveKind.LOSE
    is_behind, is_answered = member.applied < len(situation.log), bool(situation.answers[who])
    is_due = situation.now >= member.deadline
    if is_due or (situation.is_coarse and (is_behind or is_answered)):
        yield MoveKind.TURN
    if not situation.is_coarse:
        if is_behind:
            yield MoveKind.READ
        if is_answered:
            yield MoveKind.HEAR
    if member.has_more and len(member.in_hand) < MAX_IN_HAND:
        yield MoveKind.TAKE
    if member.in_hand:
        yield MoveKind.DONE
        if len(member.in_hand) > 1:
            yield MoveKind.DONE_LAST
    if member.calls:
        yield MoveKind.RETURN
    if situation.faults:
        yield MoveKind.RESTART


def _moments(situation: Situation) -> dict[MoveKind, int | None]:
    """When time goes by, until when: the first moments at which something ends or is due (ms)."""
    now = situation.now
    due = (x.deadline for x in situation.members if x.deadline < inf)
    trust = (belief.proven_until for x in situation.members for belief in x.beliefs)
    stale = (x.last_beat + 2 * HI + 1 - START for x in situation.truth.leases if x.client is not None)
    found: dict[MoveKind, int | None] = {}
    for kind, ends in ((MoveKind.DUE, due), (MoveKind.TRUST, trust), (MoveKind.STALE, stale)):
        moment = min((ceil(end) for end in ends if end > now), default=None)
        found[kind] = None if moment in found.values() else moment
    return found


def carry_out(situation: Situation, move: Move) -> tuple[Situation, Moved | None]:
    """The situation after a move, and the moved engine's result, if any; the same situation if nothing changes."""
    who, now = move.who, situation.now
    match move.kind:
        case MoveKind.DUE | MoveKind.TRUST | MoveKind.STALE:
            return replace(situation, now=_moments(situation)[move.kind] or now, waits=situation.waits - 1), None
        case MoveKind.LATE:
            landed = _landed(situation, situation.strays[:1])
            return replace(landed, strays=situation.strays[1:]), None
        case MoveKind.LAND | MoveKind.LAND_UNTOLD | MoveKind.LOSE:
            return _network(situation, move), None
        case MoveKind.RESTART:
            return _restarted(situation, who)
    return _member_moved(situation, move)


def _landed(situation: Situation, values: tuple[bytes, ...]) -> Situation:
    log, truths = situation.log, situation.truths
    for value in values:
        entry = (len(log), situation.log_time, value)
        log, truths = (*log, entry), (*truths, _after(truths[-1].state, entry))
    return replace(situation, log=log, truths=truths)


def _network(situation: Situation, move: Move) -> Situation:
    who = move.who
    count = len(situation.sending[who]) if situation.is_coarse else 1
    sent, left = situation.sending[who][:count], situation.sending[who][count:]
    first = len(situation.log)
    told = [first + place if move.kind is MoveKind.LAND else None for place in range(len(sent))]
    after = situation if move.kind is MoveKind.LOSE else _landed(situation, tuple(value for _, value in sent))
    answers = (*situation.answers[who], *((token, offset) for (token, _), offset in zip(sent, told, strict=True)))
    return replace(
        after,
        sending=_with(situation.sending, who, left),
        answers=_with(situation.answers, who, answers),
        faults=situation.faults - (move.kind is not MoveKind.LAND),
    )


def _with(things: tuple[T, ...], place: int, thing: T) -> tuple[T, ...]:
    return (*things[:place], thing, *things[place + 1 :])


def _restarted(situation: Situation, who: int) -> tuple[Situation, Moved]:
    old = situation.members[who]
    number = int(old.instance.removeprefix(old.client)) + 1
    moved = members.begun(situation.shape, old.client, f"{old.client}{number}", situation.log, situation.now)
    after = replace(
        situation,
        members=_with(situation.members, who, moved.member),
        sending=_with(situation.sending, who, moved.sent),
        answers=_with(situation.answers, who, ()),
        strays=situation.strays + tuple(value for _, value in situation.sending[who]),
        faults=situation.faults - 1,
    )
    return after, moved


def _member_moved(situation: Situation, move: Move) -> tuple[Situation, Moved | None]:
    who, now = move.who, situation.now
    member, answers = situation.members[who], situation.answers[who]
    moved: Moved | None
    match move.kind:
        case MoveKind.TURN if situation.is_coarse:
            moved, answers = members.read(member, situation.log[member.applied :], answers, now), ()
        case MoveKind.TURN:
            moved = members.read(member, (), (), now)
        case MoveKind.READ:
            moved = members.read(member, situation.log[member.applied : member.applied + 1], (), now)
        case MoveKind.HEAR:
            moved, answers = members.read(member, (), answers[:1], now), answers[1:]
        case MoveKind.TAKE:
            moved = members.taken(member, now)
        case MoveKind.RETURN:
            moved = members.called(member, now)
        case _:
            moved = members.done(member, 0 if move.kind is MoveKind.DONE else -1, now)
    if moved is None:
        return situation, None
    after = replace(
        situation,
        members=_with(situation.members, who, moved.member),
        sending=_with(situation.sending, who, situation.sending[who] + moved.sent),
        answers=_with(situation.answers, who, answers),
    )
    return after, moved


def trusted(situation: Situation) -> list[tuple[Member, Belief]]:
    """The members that believe at this moment that they may deliver messages of a partition."""
    return [(x, belief) for x in situation.members for belief in x.beliefs if situation.now < belief.proven_until]


def forget() -> None:
    """Clear the cache."""
    members.forget()
    _after.cache_clear()
