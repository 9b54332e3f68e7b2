"""Large groups: from a change to even shares in a bounded number of rounds and records, the same every time.

In a round, all members read the log and react to it: two round trips to the broker. All members share one replica here,
which each reads record by record as its own: with 100 members, separate replicas would take most of the time, and they
are tested elsewhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from statistics import mean

import pytest

from kafka_marshal.engine.effects import Append, Call, Callback
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.policies import Balanced
from kafka_marshal.engine.settings import ConsumerSettings, EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.ports import TopicInfo
from rationalizer import Outcome, Record, World, encode, route_lease

HI = 3_000
ROUND_MS = 5.0
CPS = 8
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Heard(Outcome):
    """An outcome with its record built once for all members."""

    built: Record | None = None

    @property
    def record(self) -> Record | None:
        return self.built


@dataclass
class Seat:
    """One member."""

    engine: Engine
    consumer: ConsumerEngine
    due: float = 0.0

    def held(self) -> frozenset[Key]:
        return frozenset(key for key, lease in self.engine.book.leases.items() if lease.held)


@dataclass
class Hall:
    """The whole group, and the log."""

    partitions: int
    now: float = 1_000_000.0
    seats: dict[str, Seat] = field(default_factory=dict)
    #: Records by type and code, except heartbeats.
    records: Counter[str] = field(default_factory=Counter)
    worlds: dict[int, World] = field(default_factory=lambda: {cp: World(cp, CPS) for cp in range(CPS)})
    _log: list[tuple[int, int, bytes]] = field(default_factory=list)
    _ends: Counter[int] = field(default_factory=Counter)

    def join(self, *client_ids: str) -> None:
        for client_id in client_ids:
            settings = EngineSettings("g", client_id, f"{client_id}-{self.now}", CPS, HI)
            engine = Engine(settings, self.worlds, Random(client_id))
            engine.caught_up(self.now)
            consumer = engine.add_consumer(
                Subscription(["t"], "__marshal"),
                ConsumerSettings(False, Balanced(), "earliest", 10, None, frozenset(Callback)),
            )
            engine.metadata({"t": TopicInfo("t", self.partitions, "id")}, self.now)
            self.seats[client_id] = Seat(engine, consumer)
            self._settle(self.seats[client_id])

    def leave(self, client_id: str) -> None:
        """Close: everything is released, and its engine stops."""
        seat = self.seats.pop(client_id)
        seat.consumer.close(self.now)
        self._settle(seat)

    def round(self) -> None:
        self.now += ROUND_MS
        news, self._log = self._log, []
        for cp, offset, value in news:
            out = self.worlds[cp].apply(offset, int(self.now), value)
            heard = Heard(
                out.accepted,
                out.code,
                out.type,
                out.epoch,
                out.log_time,
                out.entries,
                _read=out._read,
                built=out.record,
            )
            for seat in self.seats.values():
                seat.engine.applied(cp, offset, heard, self.now)
            if not str(out.type).startswith("Heartbeat"):
                self.records[f"{out.type} {out.code}"] += 1
        for seat in self.seats.values():
            if news or self.now >= seat.due:
                self._settle(seat)

    def _settle(self, seat: Seat) -> None:
        engine = seat.engine
        engine.step(self.now)
        while effects := engine.take_effects():
            for effect in effects:
                if isinstance(effect, Append):
                    offset = self._ends[effect.cp]
                    self._ends[effect.cp] += 1
                    self._log.append((effect.cp, offset, encode(effect.record)))
                    engine.acked(effect.token, offset, self.now)
                elif isinstance(effect, Call):
                    engine.called(effect, self.now)
        seat.due = engine.deadline(self.now)

    def is_even(self) -> bool:
        low, more = divmod(self.partitions, len(self.seats))
        sizes = [len(seat.held()) for seat in self.seats.values()]
        return sum(sizes) == self.partitions and all(low <= size <= low + bool(more) for size in sizes)

    def rounds_until_even(self, limit: int = 200) -> int:
        for number in range(limit):
            if self.is_even():
                return number
            self.round()
        raise AssertionError(f"not even: {sorted(len(seat.held()) for seat in self.seats.values())}")

    def take_records(self) -> Counter[str]:
        """Records appended since the last call, except heartbeats."""
        taken, self.records = self.records, Counter()
        return taken

    def rest(self, intervals: float) -> Counter[str]:
        """Let time pass; returns the records appended meanwhile, except heartbeats."""
        self.take_records()
        until = self.now + intervals * HI
        while self.now < until:
            due = min(seat.due for seat in self.seats.values())
            if not self._log:
                self.now = max(self.now, min(due, until) - ROUND_MS)
            self.round()
        return self.take_records()


def changes(members: int, partitions: int, rest: float) -> tuple[list[int], list[Counter[str]], list[int]]:
    """All start at once, one leaves, one joins: for each, rounds until even, records, and partitions moved.

    After each, nothing moves and no member claims for ``rest`` HI.
    """
    hall = Hall(partitions)
    rounds, records, moved = [], [], []
    for change in ("start", "leave", "join"):
        before = {name: seat.held() for name, seat in hall.seats.items()}
        if change == "start":
            hall.join(*(f"m{number:03}" for number in range(members)))
        elif change == "leave":
            hall.leave("m000")
        else:
            hall.join("newcomer")
        rounds.append(hall.rounds_until_even())
        records.append(hall.take_records())
        stayed = sum(len(held & hall.seats[name].held()) for name, held in before.items() if name in hall.seats)
        moved.append(partitions - stayed)
        assert not hall.rest(rest), "nothing moves any more, nobody asks"
        assert hall.is_even()
    return rounds, records, moved


def total(records: Counter[str], kind: str) -> int:
    return sum(count for name, count in records.items() if name.startswith(kind))


def test_ten_members_and_900_partitions() -> None:
    rounds, records, moved = changes(10, 900, rest=2.5)
    assert rounds[0] <= 5
    assert records[0]["ClaimingPartition OK"] == 900, "nothing was claimed to be let go again"
    assert records[0]["ClaimingPartition HELD"] <= 45, "those that do not know of each other collide, once"
    assert total(records[0], "Releasing") == 0
    assert rounds[1] <= 3
    assert records[1] == {"ReleasingPartition OK": 90, "ClaimingPartition OK": 90}, "nobody in another's way"
    assert rounds[2] <= 6
    assert records[2].pop("Tick OK", 0) <= CPS, "how late it is, where no beat has told the newcomer yet (T3)"
    assert records[2] == {"ClaimingPartition HELD": 1, "ReleasingPartition OK": 90, "ClaimingPartition OK": 90}
    assert moved[1:] == [90, 90], "as few as possible"


@pytest.mark.campaign
def test_100_members_and_5000_partitions() -> None:
    rounds, records, moved = changes(100, 5_000, rest=0.2)
    assert rounds[0] <= 5
    assert records[0]["ClaimingPartition OK"] <= 5_050
    assert records[0]["ClaimingPartition HELD"] <= 500, "a third of the first claims, when nobody knew of anybody"
    assert total(records[0], "Releasing") <= 50
    assert rounds[1] <= 3
    assert records[1] == {"ReleasingPartition OK": 50, "ClaimingPartition OK": 50}
    assert rounds[2] <= 5
    assert total(records[2], "Claiming") == 51
    assert total(records[2], "Releasing") == 50
    assert moved[1:] == [50, 50]


def test_each_member_s_leases_lie_in_few_parts_of_the_log() -> None:
    """So its heartbeats are few records, all of which every member reads."""
    hall = Hall(900)
    hall.join(*(f"m{number}" for number in range(10)))
    hall.rounds_until_even()
    assert mean(len(parts(seat)) for seat in hall.seats.values()) <= 3, "its share's, and where its first claims went"
    hall.leave("m3")
    hall.rounds_until_even()
    assert mean(len(parts(seat)) for seat in hall.seats.values()) <= 3.5
    before = {name: len(parts(seat)) for name, seat in hall.seats.items()}
    hall.join("newcomer")
    hall.rounds_until_even()
    assert all(len(parts(hall.seats[name])) <= count for name, count in before.items()), "what stays lies together"


def parts(seat: Seat) -> set[int]:
    return {route_lease(topic, partition, CPS) for topic, partition in seat.held()}


def test_the_same_every_time() -> None:
    assert changes(7, 200, rest=1) == changes(7, 200, rest=1)
