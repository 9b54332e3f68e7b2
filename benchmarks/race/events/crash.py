"""A worker dies or hangs: time until another one gets the first record of its partition."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from random import Random
from time import monotonic, sleep
from typing import ClassVar

from confluent_kafka import Consumer, TopicPartition

from benchmarks.race.contestants import (
    CLASSIC,
    GROUP,
    KIP848,
    KIP848_FAST,
    MARSHAL,
    MARSHAL_FAST,
    MARSHAL_WATCHED,
    SHARE,
    SHARE_FAST,
    Contestant,
    Side,
    has_watchdog,
)
from benchmarks.race.events.base import Aim, Event, Samples
from benchmarks.race.events.handover import PARTITIONS, settled_pair
from benchmarks.race.grounds import CPS, Grounds, new_name
from benchmarks.race.hosts import Host, RaceError
from rationalizer import ClaimingPartition, World, decode

__all__ = ["Killed", "Stopped"]

FEED_S = 0.01

#: If a timeout of seconds decides, this number of groups of two lose a member at once: figures are equal, and ten
#: rounds do not take an hour. If milliseconds count, there is one.
PAIRS = 5

PHASE_S = (0.2, 1.4)

AGE = "log time from the last beat to the takeover ÷ 2·HI"


class _Crash(Event):
    """Base of kill -9 and SIGSTOP. Both workers have their own process."""

    number: ClassVar[signal.Signals]

    #: Contestants that notice a death within milliseconds: one group at a time.
    one_by_one: Sequence[Contestant] = ()

    def __init__(self, contestants: Sequence[Contestant], aims: Sequence[Aim]) -> None:
        self._chance = Random(6)
        self._coordination: dict[str, str] = {}
        at_once = f"{PAIRS}, or 1 where a watchdog or the broker tells"
        super().__init__(contestants, aims, {"groups that lose a member at once": at_once})

    def round(self, grounds: Grounds, contestant: Contestant) -> Samples:
        """New topics, new groups."""
        if contestant.side is Side.SHARE:
            return {self.name: [self._share(grounds, contestant)]}
        pairs = 1 if contestant in self.one_by_one else PAIRS
        if contestant.side is Side.MARSHAL and grounds.bootstrap not in self._coordination:
            self._coordination[grounds.bootstrap] = grounds.coordination()
        coordination = self._coordination.get(grounds.bootstrap, "")
        topics = [grounds.topic(PARTITIONS) for _ in range(pairs)]
        groups = [new_name("group") for _ in range(pairs)]
        with ExitStack() as stack:
            victim, survivor = stack.enter_context(Host()), stack.enter_context(Host())
            stack.enter_context(
                grounds.feed([(topic, p) for topic in topics for p in range(PARTITIONS)], FEED_S * pairs)
            )
            for number in range(pairs):
                for host, name in ((victim, f"a{number}"), (survivor, f"b{number}")):
                    host.open(
                        contestant,
                        name,
                        grounds.bootstrap,
                        topics=[topics[number]],
                        group=groups[number],
                        coordination=coordination,
                    )
            lost = [
                settled_pair(victim, survivor, (f"a{number}", f"b{number}"))[f"a{number}"] for number in range(pairs)
            ]
            sleep(self._chance.uniform(*PHASE_S))
            for number, partition in enumerate(lost):
                survivor.watch(f"b{number}", [partition])
            struck = victim.signal(self.number)
            seen = [float(survivor.wait("seen", f"b{number}")["at"]) for number in range(pairs)]
        found = {self.name: [(at - struck) * 1000 for at in seen]}
        if contestant.side is Side.MARSHAL and not contestant.member:
            leases = list(zip(groups, topics, lost, strict=True))
            found[AGE] = list(takeover_ages(grounds.bootstrap, coordination, leases))
        return found

    def _share(self, grounds: Grounds, contestant: Contestant) -> float:
        """The victim holds records that it never acknowledges; time stops when the survivor gets one of them."""
        topic, group = grounds.topic(1), new_name("group")
        with Host() as victim, Host() as survivor:
            started: set[str] = set()
            for host, name in ((victim, "a"), (survivor, "b")):
                host.open(
                    contestant,
                    name,
                    grounds.bootstrap,
                    topics=[topic],
                    group=group,
                    coordination="",
                    hold=name == "a",
                )
                feed_until(grounds, topic, host, name)
                started.add(name)
            sleep(self._chance.uniform(*PHASE_S))
            survivor.watch("b", None)
            struck = victim.signal(self.number)
            return (float(survivor.wait("first", "b")["at"]) - struck) * 1000


def feed_until(grounds: Grounds, topic: str, host: Host, worker: str) -> None:
    """Produce single records until the worker has received one (a share group begins at the end)."""
    deadline = monotonic() + 60
    while monotonic() < deadline:
        grounds.fill(topic, 1, 3)
        try:
            host.wait("first", worker, 0.3)
        except RaceError:
            continue
        return
    raise RaceError(f"{worker}: the share group delivered nothing")


Lease = tuple[str, str, int]


def takeover_ages(bootstrap: str, coordination: str, leases: Sequence[Lease]) -> Iterator[float]:
    """Age (÷ 2·HI, log time) of each lease's last heartbeat when another member was granted it, by replay."""
    worlds = {cp: World(cp, CPS) for cp in range(CPS)}
    ages: dict[Lease, float] = {}
    wanted = set(leases)
    for cp, offset, stamp, value in read_log(bootstrap, coordination):
        world = worlds[cp]
        record = _claim(value)
        key = None if record is None else (record.group_id, record.topic, record.partition)
        before = None if record is None or key not in wanted else world.lease(*key)
        held = before is not None and before.held
        last_beat, interval = (before.last_beat, before.heartbeat_interval_ms) if before is not None else (0, 1)
        outcome = world.apply(offset, stamp, value)
        if held and key is not None and outcome.accepted and outcome.code == "OK":
            ages[key] = (outcome.log_time - last_beat) / (2 * interval)
    return (ages[key] for key in leases if key in ages)


def _claim(value: bytes | None) -> ClaimingPartition | None:
    try:
        record = decode(value) if value is not None else None
    except ValueError:
        return None
    return record if isinstance(record, ClaimingPartition) else None


def read_log(bootstrap: str, topic: str) -> Iterator[tuple[int, int, int, bytes | None]]:
    """(CP, offset, timestamp, value) of everything in a coordination topic now."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "race", "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, cp, 0) for cp in range(CPS)])
    left = set(range(CPS))
    try:
        while left:
            for message in consumer.consume(1_000, 0.1):
                cp = message.partition() or 0
                if message.error() is not None:
                    left.discard(cp)
                elif cp in left:
                    yield cp, message.offset() or 0, message.timestamp()[1], message.value()
    finally:
        consumer.close()


class Killed(_Crash):
    """kill -9."""

    name = "kill"
    units: ClassVar = {"kill": "ms", AGE: "×"}
    title = "kill -9 of one worker → first record of its partition at another"
    number = signal.SIGKILL

    def __init__(self) -> None:
        watched = (MARSHAL_WATCHED,) if has_watchdog() else ()
        self.one_by_one = watched
        aims = [Aim(AGE, MARSHAL.name, "", 1.05)]
        aims += [Aim("kill", each.name, SHARE.name, 1.0) for each in watched]
        peers = (CLASSIC, KIP848, KIP848_FAST, SHARE, SHARE_FAST)
        super().__init__((MARSHAL, MARSHAL_FAST, GROUP, *watched, *peers), aims)


class Stopped(_Crash):
    """SIGSTOP: a machine that hangs. No process is informed."""

    name = "stop"
    units: ClassVar = {"stop": "ms", AGE: "×"}
    title = "SIGSTOP of one worker → first record of its partition at another"
    number = signal.SIGSTOP

    def __init__(self) -> None:
        aims = [Aim(AGE, MARSHAL.name, "", 1.05)]
        super().__init__((MARSHAL, MARSHAL_FAST, GROUP, CLASSIC, KIP848, KIP848_FAST, SHARE, SHARE_FAST), aims)
