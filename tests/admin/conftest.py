"""A working group on the session's real broker, and clusters that fail on request."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from kafka_marshal import Admin, Marshal, TopicPartition
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.replica import Replica
from kafka_marshal.ports import Ack
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    Heartbeat,
    Record,
    ReleasingPartition,
    World,
    decode,
    encode,
    route_lease,
)
from tests.client.conftest import HI, Scene, wait_until

__all__ = ["HI", "FaultyCluster", "Group", "Member", "Rule", "wait_until"]

Place = tuple[int, int]


class Member(threading.Thread):
    """A worker as a user writes one, in a thread; it records its messages and can be slowed down."""

    def __init__(self, marshal: Marshal, topic: str, **options: Any) -> None:
        super().__init__(daemon=True)
        self.marshal = marshal
        self.topic = topic
        self.options = options
        self.seen: list[Place] = []
        self.lost: list[TopicPartition] = []
        self.errors: list[Exception] = []
        #: Messages whose handler waits until let_go is set.
        self.hold: set[Place] = set()
        self.holding = threading.Event()
        self.let_go = threading.Event()

    def run(self) -> None:
        def on_lost(_consumer: object, partitions: list[TopicPartition]) -> None:
            self.lost.extend(partitions)

        with self.marshal.consumer([self.topic], on_lost=on_lost, **self.options) as consumer:
            while not self.marshal.stopping:
                try:
                    for message in consumer:
                        self.handle((message.partition() or 0, message.offset() or 0))
                except Exception as error:  # a worker that logs errors and continues
                    self.errors.append(error)
                    if len(self.errors) > 10:
                        raise

    def handle(self, place: Place) -> None:
        self.seen.append(place)
        if place in self.hold:
            self.holding.set()
            assert self.let_go.wait(30)

    def knows_of_pause(self) -> bool:
        """Whether its replica shows a pause everywhere; until then it may continue (C10)."""
        worlds = self.marshal._driver.replica.worlds.values()
        return all(world.pause(self.marshal.group_id) is not None for world in worlds)

    def end(self) -> None:
        self.let_go.set()
        self.marshal.stop()
        if self.ident is not None:
            self.join(20)
        self.marshal.close()


class Group(Scene):
    """A coordination topic, one data topic, and members of one group that work on it."""

    def __init__(self, bootstrap: str, new_topic: Callable[..., str]) -> None:
        super().__init__(bootstrap, new_topic)
        self.threads: list[Member] = []
        self.data = ""
        self.partitions = 0
        self.messages = 0

    def fill(self, partitions: int, messages: int, **settings: str) -> str:
        """Create the data topic with ``messages`` messages per partition."""
        self.data = self.topic(partitions, messages, **settings)
        self.partitions, self.messages = partitions, messages
        return self.data

    def start(self, client_id: str, *, hold: set[Place] | None = None, hi: int = HI, **options: Any) -> Member:
        member = Member(self.member(client_id, heartbeat_interval=hi / 1000), self.data, **options)
        member.hold = hold or set()
        self.threads.append(member)
        member.start()
        return member

    def admin(self, client_id: str | None = None, **options: Any) -> Admin:
        options = {"topic": self.coordination, "heartbeat_interval": HI / 1000, **options}
        return Admin(self.bootstrap, client_id=client_id, **options)

    def seen(self) -> Counter[Place]:
        """How often each message was delivered, over all members."""
        return Counter(place for member in self.threads for place in list(member.seen))

    def everything(self, times: int = 1) -> Counter[Place]:
        return Counter({(p, o): times for p in range(self.partitions) for o in range(self.messages)})

    def at_rest(self, expected: Counter[Place], timeout_s: float = 60.0) -> None:
        """Wait until exactly these were delivered and, by the log, every partition is done to its end."""
        wait_until(lambda: self.seen() == expected, timeout_s, "the expected messages")
        wait_until(lambda: set(self.stable().values()) == {self.messages - 1}, timeout_s, "stable at the end")
        assert self.seen() == expected

    def stable(self) -> dict[int, int | None]:
        """Partition of the data topic → stable, from a fresh replica."""
        return {x.partition: x.stable for x in self.admin().progress(self.group) if x.topic == self.data}

    def worlds(self) -> dict[int, World]:
        """The coordination log, replayed to its end."""
        replica = Replica(self.cluster, self.coordination, 10)
        try:
            replica.catch_up(10)
        finally:
            replica.close()
        return replica.worlds

    def append(self, *records: tuple[int, Record]) -> None:
        """Write raw records and wait for their acknowledgements."""
        errors: list[str | None] = []
        appender = self.cluster.appender(self.coordination, delivery_timeout_ms=10_000)
        for cp, record in records:
            appender.append(cp, encode(record), lambda ack: errors.append(ack.error))
        assert appender.flush(10) == 0
        appender.close()
        assert errors == [None] * len(records)

    def faulty_admin(self, rule: Rule, client_id: str | None = None) -> Admin:
        """An admin whose records are filtered by the rule."""
        return Admin.on_cluster(
            lambda: FaultyCluster(self.bootstrap, rule),
            topic=self.coordination,
            client_id=client_id,
            heartbeat_interval=HI / 1000,
        )

    def lay(self, progress: Mapping[int, tuple[int, int, list[tuple[int, int]]]]) -> None:
        """Set (stable, granted, ranges) of free partitions by raw records; they are free afterwards."""
        ids = ("raw-1", "raw", self.group)
        places = {partition: (route_lease(self.data, partition, 3), (self.data, partition)) for partition in progress}
        self.append(*((cp, ClaimingPartition(*ids, *key, 60_000)) for cp, key in places.values()))
        worlds = self.worlds()
        records: list[tuple[int, Record]] = []
        for partition, (stable, granted, ranges) in progress.items():
            cp, key = places[partition]
            lease = worlds[cp].lease(self.group, *key)
            assert lease is not None
            if granted >= 0:
                records.append((cp, ClaimingMessages(*ids, *key, lease.epoch, granted)))
            records.append((cp, Heartbeat(*ids, *key, lease.epoch, stable)))
            if ranges:
                records.append((cp, CommitRanges(*ids, *key, lease.epoch, tuple(ranges))))
            records.append((cp, ReleasingPartition(*ids, *key, lease.epoch, None)))
        self.append(*records)

    def progress(self) -> dict[int, tuple[int, int, list[tuple[int, int]]]]:
        """Partition → (stable, granted, ranges), from a replay of the log."""
        return {
            lease.partition: (lease.progress.stable, lease.progress.granted, lease.progress.ranges)
            for world in self.worlds().values()
            for lease in world.leases()
        }

    def close(self) -> None:
        for member in self.threads:
            member.end()
        super().close()


@pytest.fixture
def group(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Group]:
    made = Group(kafka_bootstrap, topic_factory)
    yield made
    made.close()


#: Called with each record for a CP: False loses it. May raise or end the process.
Rule = Callable[[int, Record], bool]


class FaultyAppender:
    """Passes on records that the rule accepts; others are lost without an answer, as on a broken connection."""

    def __init__(self, appender: Any, rule: Rule) -> None:
        self._appender = appender
        self._rule = rule

    def append(self, partition: int, value: bytes, on_ack: Callable[[Ack], None] | None = None) -> None:
        if self._rule(partition, decode(value)):
            self._appender.append(partition, value, on_ack)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._appender, name)


class FaultyCluster:
    """A real cluster whose appenders lose the records that the rule rejects."""

    def __init__(self, bootstrap: str, rule: Rule) -> None:
        self._cluster = KafkaCluster(bootstrap, {})
        self._rule = rule

    def appender(self, topic: str, *, delivery_timeout_ms: int) -> Any:
        return FaultyAppender(self._cluster.appender(topic, delivery_timeout_ms=delivery_timeout_ms), self._rule)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)
