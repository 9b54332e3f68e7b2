"""Random logs of workers, and a naive account of them: every record in the order of the whole log.

The account compares the worlds' holders before and after each record, and draws its own conclusions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kafka_marshal.client.view import holdings
from kafka_marshal.ports import LogEntry
from rationalizer import (
    BeatEntry,
    ClaimingPartition,
    CommitEntry,
    Heartbeat,
    HeartbeatBatch,
    LeaveGroup,
    Outcome,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    World,
    encode,
    route_group,
    route_lease,
)
from tests.fleet import Fleet, let_go, started

CPS = 3
HI = 1_000
SESSION = 2_000
PARTITIONS = 6

#: (group, topic, partition, first key) → (client, instance, epoch, last beat, next offset)
Holders = dict[tuple[str, str, int, int], tuple[str, str, int, int, int]]

#: Log time, coordination partition, offset.
Place = tuple[int, int, int]


@dataclass(frozen=True)
class Step:
    """One record, with holders before and after it in its CP, and members' last heartbeats."""

    place: Place
    stamp: int
    value: bytes
    record: Record
    outcome: Outcome
    before: Holders
    after: Holders
    members: dict[tuple[str, str], tuple[str, str, int]]


def holders(world: World) -> Holders:
    found: Holders = {}
    for info, _ in holdings(world):
        names = (info.client_id or "", info.instance_id or "")
        key = (info.group_id, info.topic, info.partition, info.lo)
        done = 0 if info.stable is None else info.stable + 1
        found[key] = (*names, info.epoch, info.last_beat if names[0] else 0, done)
    return found


def members(world: World) -> dict[tuple[str, str], tuple[str, str, int]]:
    """(group, client) → (instance, member id, last beat)"""
    return {
        (group.group_id, each.client_id): (each.instance_id, each.member_id, each.last_beat)
        for group in world.groups()
        for each in group.members.values()
        if world.partition == route_group(group.group_id, CPS)
    }


class Lives:
    """Workers a, b, c of the claimed group g, and x, y, z of the coordinated group h."""

    def __init__(self, seed: int, begin: int, length: int) -> None:
        self.rng = random.Random(seed)
        self.now = begin
        self.worlds = {cp: World(cp, CPS) for cp in range(CPS)}
        self.steps: list[Step] = []
        self.instances = {client: f"host/1/1.0/{client}0" for client in "abc"}
        self.fleet = Fleet("h", CPS, self.add)
        self.generation = 0
        self.runs = 0
        for cp in range(CPS):
            self.add(Tick("i", "init", f"partitions={CPS}"), cp)
        self.fleet.upgrade()
        while len(self.steps) < length:
            self.now += self.rng.choice((5, 20, 100, 300, 300, 700, 2_500))
            self.rng.choice(self.moves)()

    def add(self, record: Record, cp: int) -> int:
        world = self.worlds[cp]
        before, known = holders(world), members(world)
        value = encode(record)
        outcome = world.apply(world.next_offset, self.now, value)
        place = (world.log_time, cp, world.next_offset - 1)
        self.steps.append(Step(place, self.now, value, record, outcome, before, holders(world), known))
        return place[2]

    @property
    def moves(self) -> list[Callable[[], None]]:
        claimed = [self.claim] * 4 + [self.beat] * 6 + [self.beat_one] * 2 + [self.release] * 2
        steered = [self.evict, self.ask, self.pause, self.restart]
        grouped = [self.join] * 2 + [self.group_beat] * 5 + [self.commit] * 4 + [self.leave, self.evict_member]
        return [*claimed, *steered, *grouped, self.ask_member]

    # -- claimed ---------------------------------------------------------------------------------------------

    def ids(self, client: str) -> tuple[str, str, str]:
        return self.instances[client], client, "g"

    def held(self, client: str) -> dict[int, dict[int, tuple[int, int]]]:
        """CP → partition → (epoch, next offset) of this run."""
        found: dict[int, dict[int, tuple[int, int]]] = {}
        for cp, world in self.worlds.items():
            for lease in world.leases():
                if (lease.client_id, lease.instance_id) == (client, self.instances[client]):
                    found.setdefault(cp, {})[lease.partition] = (lease.epoch, lease.progress.stable + 1)
        return found

    def one(self) -> str:
        return self.rng.choice("abc")

    def claim(self) -> None:
        number = self.rng.randrange(PARTITIONS)
        self.add(ClaimingPartition(*self.ids(self.one()), "t", number, HI), route_lease("t", number, CPS))

    def done(self, position: int) -> int | None:
        return self.rng.choice((None, position - 1, position + self.rng.randrange(5)))

    def beat(self) -> None:
        client = self.one()
        for cp, held in self.held(client).items():
            entries = [BeatEntry("t", number, epoch, self.done(at)) for number, (epoch, at) in sorted(held.items())]
            if self.rng.random() < 0.1:
                entries[0] = BeatEntry("t", entries[0].partition, 0, None)  # of an epoch that it does not hold: PARTIAL
            self.add(HeartbeatBatch(*self.ids(client), tuple(entries)), cp)

    def _any(self, client: str) -> tuple[int, int, int, int] | None:
        held = [(cp, number, *at) for cp, of in self.held(client).items() for number, at in of.items()]
        return self.rng.choice(held) if held else None

    def beat_one(self) -> None:
        client = self.one()
        if (found := self._any(client)) is not None:
            cp, number, epoch, at = found
            self.add(Heartbeat(*self.ids(client), "t", number, epoch, self.done(at)), cp)

    def release(self) -> None:
        client = self.one()
        if (found := self._any(client)) is not None:
            cp, number, epoch, at = found
            self.add(ReleasingPartition(*self.ids(client), "t", number, epoch, at), cp)

    def evict(self) -> None:
        client = self.one()
        if (found := self._any(client)) is not None:
            cp, number, epoch, _ = found
            self.add(ReleasingPartition("op/1", "operator", "g", "t", number, epoch, None), cp)
            self.add(ReleasingPartition(*self.ids(client), "t", number, epoch, None), cp)

    def ask(self) -> None:
        client = self.one()
        if (found := self._any(client)) is not None:
            cp, number, epoch, _ = found
            self.add(ReleasingPartition("op/1", client, "g", "t", number, epoch, None), cp)

    def pause(self) -> None:
        until = self.now + self.rng.choice((0, 1_500))
        for cp in range(CPS):
            self.add(ReleaseGroup("op/2", "admin", self.rng.choice("gh"), until), cp)

    def restart(self) -> None:
        client = self.one()
        found = self._any(client)
        self.runs += 1
        self.instances[client] = f"host/1/1.0/{client}{self.runs}"
        if found is not None:
            self.add(Heartbeat(*self.ids(client), "t", found[1], None, None), found[0])

    # -- coordinated -----------------------------------------------------------------------------------------

    def member(self) -> str | None:
        """A client that believes to be a member."""
        return self.rng.choice(sorted(self.fleet.members)) if self.fleet.members else None

    @property
    def group_generation(self) -> int:
        group = self.worlds[self.fleet.home].group("h")
        return 0 if group is None else group.generation

    def join(self) -> None:
        self.runs += 1
        client = self.rng.choice("xyz")
        if client not in self.fleet.members or self.rng.random() < 0.2:
            self.fleet.join(client, {"u": 3}, instance=f"host/2/1.0/{client}{self.runs}", session=SESSION)

    def group_beat(self) -> None:
        if (client := self.member()) is not None:
            self.fleet.beat(client, self.group_generation)

    def commit(self) -> None:
        if (client := self.member()) is None:
            return
        known = holders(self.worlds[self.fleet.home])
        mine = [key[2] for key, at in known.items() if at[0] == client and key[0] == "h"]
        if not mine:
            return
        number = self.rng.choice(mine)
        at = known["h", "u", number, 0][4]
        entries = {
            "start": started("u", number),
            "refresh": [CommitEntry("u", number, through=at - 1)],
            "on": [CommitEntry("u", number, through=at + self.rng.randrange(4))],
            "go": [let_go("u", number)],
        }
        self.fleet.commit(client, self.group_generation, *entries[self.rng.choice(sorted(entries))])

    def leave(self) -> None:
        if (client := self.member()) is not None:
            self.fleet.leave(client, self.group_generation)
            del self.fleet.members[client]

    def evict_member(self) -> None:
        if (client := self.member()) is not None:
            instance, _, group, member_id = self.fleet.ids(client)
            for names in (("op/1", "operator"), (instance, client)):
                self.add(LeaveGroup(*names, group, member_id, self.group_generation), self.fleet.home)

    def ask_member(self) -> None:
        if (client := self.member()) is not None:
            _, _, group, member_id = self.fleet.ids(client)
            self.add(LeaveGroup("op/1", client, group, member_id, self.group_generation), self.fleet.home)

    # -- as a log ----------------------------------------------------------------------------------------------

    def entries(self, cp: int) -> list[LogEntry]:
        return [(step.place[2], step.stamp, step.value) for step in self.steps if step.place[1] == cp]

    def in_order(self) -> list[Step]:
        """By log time; ties by partition and offset."""
        return sorted(self.steps, key=lambda step: step.place)


@dataclass
class Life:
    """The state of one run of a worker at some moment."""

    instance: str
    first: Place
    heard: Place
    #: Its last claim or join: when, whether it was rejected, and the code.
    claimed: Place | None = None
    refused: str = ""
    #: Its last loss: when, and how.
    lost: Place | None = None
    how: str = ""
    evicted: Place | None = None
    evictor: str = ""
    heard_before: Place | None = None
    asked: Place | None = None


@dataclass
class Account:
    """The naive account: record by record in the order of the whole log."""

    lives: dict[tuple[str, str, str], Life] = field(default_factory=dict)
    #: Lease (with its epoch) or member (with its id) → the client that asked for its removal in its own name.
    _accusers: dict[tuple[object, ...], str] = field(default_factory=dict)

    def newest(self) -> dict[tuple[str, str], Life]:
        found: dict[tuple[str, str], Life] = {}
        for (group, client, _), life in self.lives.items():
            if (group, client) not in found or life.first > found[group, client].first:
                found[group, client] = life
        return found

    def take(self, step: Step) -> None:
        record, outcome, place = step.record, step.outcome, step.place
        if isinstance(record, (Tick, ReleaseGroup)) or record.instance_id == "u":
            return
        group = record.group_id
        named = isinstance(record, (ReleasingPartition, LeaveGroup))
        life = self.lives.get((group, record.client_id, record.instance_id))
        is_eviction = self._losses(step)
        if named and not outcome.accepted:
            self._request(step)
        if is_eviction or (named and life is None):
            return
        if life is None:
            life = self.lives[group, record.client_id, record.instance_id] = Life(record.instance_id, place, place)
        life.heard = place
        if isinstance(record, ClaimingPartition) or type(record).__name__ == "JoinGroup":
            life.claimed, life.refused = place, "" if outcome.accepted else outcome.code

    def _request(self, step: Step) -> None:
        record = step.record
        if isinstance(record, ReleasingPartition):
            client, instance, epoch, *_ = step.before[record.group_id, record.topic, record.partition, 0]
            if epoch != record.epoch or not client:
                return
            if client != record.client_id:
                self._accusers[record.group_id, record.topic, record.partition, epoch] = record.client_id
            elif instance != record.instance_id:
                self.lives[record.group_id, client, instance].asked = step.place
        elif isinstance(record, LeaveGroup):
            for (group, client), (instance, member_id, _) in step.members.items():
                if (group, member_id) != (record.group_id, record.member_id):
                    continue
                if client != record.client_id:
                    self._accusers[group, member_id] = record.client_id
                elif instance != record.instance_id:
                    self.lives[group, client, instance].asked = step.place

    def _losses(self, step: Step) -> bool:
        """Clients that lost something by this record, and whether an operator caused it."""
        evicts = False
        for key, (client, instance, epoch, _, _) in step.before.items():
            now = step.after.get(key, ("", "", -1, 0, 0))
            if not client or now[:3] == (client, instance, epoch):
                continue
            how, by = self._how(step, key, client, epoch)
            evicts = evicts or how == "evicted"
            self._lose(step, key[0], client, instance, how, by)
        if step.outcome.of_group:
            there = self._members_after(step)
            for (group, client), (instance, member_id, _) in step.members.items():
                if (group, client) in there:
                    continue
                left = isinstance(step.record, LeaveGroup) and step.record.member_id == member_id
                by = self._accusers.get((group, member_id), "") if left else ""
                evicts = evicts or bool(by)
                self._lose(step, group, client, instance, "evicted" if by else "left" if left else "replaced", by)
        return evicts

    def _members_after(self, step: Step) -> set[tuple[str, str]]:
        gone = {(step.record.group_id, client) for client, _ in step.outcome.silent}
        if isinstance(step.record, LeaveGroup) and step.outcome.accepted:
            gone.add((step.record.group_id, step.record.client_id))
        return set(step.members) - gone

    def _how(self, step: Step, key: tuple[str, str, int, int], client: str, epoch: int) -> tuple[str, str]:
        record = step.record
        if isinstance(record, ReleasingPartition):
            by = self._accusers.get((*key[:3], epoch), "") if record.last_offset is None else ""
            return ("evicted", by) if by else ("released", "")
        if isinstance(record, ClaimingPartition):
            return "replaced", ""
        if isinstance(record, Heartbeat):
            return "restarted", ""
        return "released", ""  # a piece: former members are found by that

    def _lose(self, step: Step, group: str, client: str, instance: str, how: str, by: str) -> None:
        life = self.lives.get((group, client, instance))
        if life is None:
            return
        if how == "released" and step.outcome.of_group and client != step.record.client_id:
            how = "replaced"
        life.lost, life.how = step.place, how
        if how == "evicted":
            life.evicted, life.evictor, life.heard_before = step.place, by, life.heard


def accounts(lives: Lives) -> Iterator[tuple[Step, Account]]:
    """The account after each record of the whole log, in its order."""
    account = Account()
    for step in lives.in_order():
        account.take(step)
        yield step, account
