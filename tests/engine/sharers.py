"""Members that share partitions by batches, in virtual time, with the faults of a seed, and what must hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest

from kafka_marshal.engine.settings import SharingOptions
from kafka_marshal.engine.shares.consumer import BatchRun, SharedConsumer, SharedDelivery
from kafka_marshal.engine.work.open_messages import SettleRequests
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.settlements import CRASHED
from rationalizer import Record, SettlingMessages, Upgrade, World
from rationalizer.levels import SHARING_LEVEL
from tests.engine.harness import HI, Key, Member, Net

TOPIC = "t"


class BrokenError(AssertionError):
    """A promise was broken."""


@dataclass
class Books:
    """What was done with the messages of all partitions."""

    #: (partition, offset) → the sharers that handle it.
    in_hand: dict[tuple[int, int], list[Sharer]] = field(default_factory=dict)
    #: How often each was begun, and which were handled, or set aside.
    begun: dict[tuple[int, int], int] = field(default_factory=dict)
    handled: set[tuple[int, int]] = field(default_factory=set)
    parked: set[tuple[int, int]] = field(default_factory=set)


class Sharer:
    """One member and its user, who handles one batch at a time."""

    def __init__(self, net: Net, books: Books, name: str, rng: Random, ms_each: float, **options: object) -> None:
        self.member: Member = net.member(name, rng=Random(rng.random()))
        self.consumer: SharedConsumer = self.member.consumer(TOPIC, sharing=SharingOptions(**options))  # type: ignore[assignment, arg-type]
        self.net, self.books, self.rng, self.ms_each = net, books, rng, ms_each
        self.run: BatchRun | None = None
        self.finishes_at = 0.0
        #: The share of batches that the user gives back, and of messages that it sets aside.
        self.gives_back = self.parks = 0.0
        self.is_dead = False

    def turn(self) -> None:
        """The user works."""
        member = self.member
        if member.paused or self.is_dead:
            return
        member.fetch(50)
        if self.run is not None and self.net.now >= self.finishes_at:
            self._finish(self.run)
        if self.run is None and not self.consumer.closing:
            self._begin()
        member.settle()

    def _begin(self) -> None:
        run = self.member.take(1_000)
        if run is None:
            return
        assert isinstance(run, BatchRun)
        now = self.member.clock()
        if now >= run.assignment.lease.hand_out_until:
            raise BrokenError(f"{self.member.client_id} begins {self._name(run)} without a proof (T4)")
        for message in run.messages:
            key = (run.assignment.key[1], offset_of(message))
            for other in self.books.in_hand.get(key, ()):
                if other.is_sure:
                    raise BrokenError(f"{key} is in hand at {other.member.client_id} and {self.member.client_id}")
            self.books.in_hand.setdefault(key, []).append(self)
            self.books.begun[key] = self.books.begun.get(key, 0) + 1
        self.run = run
        self.finishes_at = self.net.now + self.ms_each * len(run.messages)

    @property
    def is_sure(self) -> bool:
        """Whether it could begin a message of its batch now."""
        run = self.run
        if run is None or self.is_dead or self.member.paused:
            return False
        return self.member.clock() < run.assignment.lease.hand_out_until

    def _name(self, run: BatchRun) -> str:
        return f"{run.assignment.key} {run.first} to {run.last}"

    def _finish(self, run: BatchRun) -> None:
        number, take, delivery = self.consumer.number, self.member.engine.take, self.consumer.delivery
        partition, now = run.assignment.key[1], self.member.clock()
        if self.rng.random() < self.gives_back:
            self._put_down(run)
            take(number, delivery.give_back_run, run, now)
            return
        done = []
        for message in run.messages:
            if self.rng.random() < self.parks:
                self.books.parked.add((partition, offset_of(message)))
                take(number, partial(delivery.park, run, offset_of(message), 1, "Bad", now))
            else:
                done.append(message)
        self.books.handled.update((partition, offset_of(message)) for message in done)
        self._put_down(run)
        if len(done) == len(run.messages):
            take(number, delivery.done_run, run, now)
        elif done:
            take(number, delivery.done, done, now)

    def _put_down(self, run: BatchRun) -> None:
        self.run = None
        for message in run.messages:
            self.books.in_hand[run.assignment.key[1], offset_of(message)].remove(self)

    def kill(self) -> None:
        self.is_dead = True
        self.member.kill()
        if self.run is not None:
            self._put_down(self.run)


def shared_net(partitions: int = 1, end: int = 0, **of: object) -> Net:
    """A net whose log knows shares."""
    net = Net(cps=1)
    net.write(Upgrade("init-1", "init", "g", SHARING_LEVEL), 0)
    net.topic(TOPIC, partitions, end=end, **of)  # type: ignore[arg-type]
    return net


class Story:
    """Some sharers and the faults of one seed."""

    def __init__(self, seed: int, faults: bool = True, sharers: int = 4, **options: object) -> None:
        self.rng = Random(f"sharers/{seed}")
        self.net = shared_net(self.rng.choice((1, 1, 2)), end=self.rng.randrange(0, 300))
        self.books = Books()
        self.sharers: list[Sharer] = []
        self.options = options
        self.count = 0
        self.faults = faults
        #: A replica of the whole log, which nothing harms.
        self.world = World(0, 1)
        for _ in range(sharers):
            self.join()

    def join(self) -> None:
        self.count += 1
        made = Sharer(
            self.net, self.books, f"w{self.count}", self.rng, self.rng.choice((0.5, 3.0, 10.0)), **self.options
        )
        if self.faults:
            made.gives_back = self.rng.choice((0.0, 0.0, 0.1))
            made.parks = self.rng.choice((0.0, 0.0, 0.01))
        self.sharers.append(made)

    def run(self, ms: float = 20_000.0) -> None:
        """Faults, then a calm time in which all must be done."""
        until = self.net.now + ms
        while self.net.now < until:
            if self.rng.random() < 0.1:
                self._publish()
            if self.faults and self.rng.random() < 0.02:
                self._befall()
            self._tick()
        self._recover()
        limit = self.net.now + 20_000.0
        while left := self._left():
            if self.net.now > limit:
                raise BrokenError(f"not done after 20 s without faults: {left}")
            self._tick()
        self._check_log()

    def _tick(self) -> None:
        self.net.tick()
        for sharer in list(self.sharers):
            sharer.turn()
        if self.rng.random() < 0.02:
            self._check_log()

    def _publish(self) -> None:
        for log in self.net.data.values():
            log.end += self.rng.choice((0, 1, 5, 40))

    def _befall(self) -> None:
        rng, sharer = self.rng, self.rng.choice(self.sharers)
        member = sharer.member
        match rng.choice(("kill", "stop", "stop", "deaf", "lost", "doubled", "late", "close", "outage")):
            case "kill" if len(self.sharers) > 1:
                sharer.kill()
                self.sharers.remove(sharer)
                self.join()
            case "stop":
                member.paused = not member.paused
            case "deaf":
                member.stalled = not member.stalled
            case "lost":
                member.drop_appends = not member.drop_appends
            case "doubled":
                member.duplicate = not member.duplicate
            case "late":
                member.acks = "late" if member.acks == "now" else "now"
                if member.late_acks and not member.paused:
                    member.deliver_acks()
            case "close" if not member.paused and not sharer.consumer.closing and len(self.sharers) > 1:
                member.close()
                self.join()
            case "outage":
                is_away = not member.drop_appends
                for each in self.sharers:
                    each.member.drop_appends = is_away
            case _:
                pass

    def _recover(self) -> None:
        for sharer in self.sharers:
            member = sharer.member
            member.paused = member.stalled = member.drop_appends = member.duplicate = False
            member.acks = "now"
            member.deliver_acks()
            sharer.gives_back = sharer.parks = 0.0
        if all(sharer.consumer.closing for sharer in self.sharers):
            self.join()

    def _read(self) -> World:
        log, world = self.net.logs[0], self.world
        world.apply_many((offset, *log[offset]) for offset in range(world.next_offset, len(log)))
        return world

    def _left(self) -> str:
        world = self._read()
        for key, log in self.net.data.items():
            lease = world.lease("g", *key)
            if log.end and lease is None:
                return f"{key} was never shared"
            if lease is None:
                continue
            if lease.progress.stable < log.end - 1:
                return f"{key}: {lease.progress.stable} of {log.end}"
            if open_now := [hole for hole in lease.progress.open if not hole.is_parked]:
                return f"{key}: {open_now}"
        return ""

    def _check_log(self) -> None:
        """What the log calls done was handled, and what it shows as parked was set aside."""
        world = self._read()
        for key in self.net.data:
            lease = world.lease("g", *key)
            if lease is None:
                continue
            progress = lease.progress
            for offset in range(progress.stable + 1):
                hole = None if progress.holes is None else progress.holes.at(offset)
                if hole is None and (key[1], offset) not in self.books.handled:
                    raise BrokenError(f"lost: {key} offset {offset} is done by the log, and nobody handled it")
                is_crashed = (
                    hole is not None and hole.reason == CRASHED and hole.attempts > SharingOptions().max_deliveries
                )
                if hole is not None and hole.is_parked and (key[1], offset) not in self.books.parked and not is_crashed:
                    raise BrokenError(f"{key} offset {offset} is parked, and nobody set it aside: {hole}")


def takes(net: Net) -> list[Record]:
    """The records that asked for a batch."""
    return [record for record in net.records(SettlingMessages) if record.take is not None]  # type: ignore[attr-defined]


__all__ = ["HI", "TOPIC", "Books", "BrokenError", "Key", "Sharer", "Story", "shared_net", "takes"]


def begins_what_it_gave_back(patch: pytest.MonkeyPatch) -> None:
    """A batch that was given back is delivered again before the log shows that no other member has it."""
    give_back = SharedDelivery.give_back_run

    def planted(self: SharedDelivery, run: Any, now: float) -> None:
        messages, covers_from = list(run.messages), run.covers_from
        give_back(self, run, now)
        run.assignment.buffer.put_back(messages, covers_from)
        run.assignment.has_more()

    patch.setattr(SharedDelivery, "give_back_run", planted)


def passes_a_settle_before_it_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """What was sent once counts as settled, whether the log has it or not."""
    entries = SettleRequests.entries

    def planted(self: SettleRequests, *of: Any) -> Any:
        found = entries(self, *of)
        for request in list(self):
            self.forget(request.first)
        return found

    patch.setattr(SettleRequests, "entries", planted)
