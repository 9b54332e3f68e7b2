"""A coordination log in memory with correct and wrong snapshots, and replicas that start from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import ClaimingPartition, Heartbeat, Record, World, encode
from rationalizer.log_hash import LogHash, RunningHash, decode_hash
from rationalizer.snapshot_log import SnapshotParts, encode_state
from tests.stored_snapshot import encode_snapshot

TOPIC = "__marshal"
SNAPSHOTS = snapshots_topic(TOPIC)
TIMEOUT_S = 10.0
HI = 3_000
WHO = ("1", "a", "g")


def wait_until(met: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < until, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)


class Story:
    """One CP. `truth` is the state after all records."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.broker = self.cluster.broker
        create_topic(self.cluster, TOPIC, 1, TIMEOUT_S)
        self.truth = World(0, 1)
        self.members: list[Marshal] = []
        self._taken = 0
        #: Digests of the truth at requested places.
        self.digests: dict[int, str] = {}
        self._asked_for: set[int] = set()
        self.catch_up()

    def catch_up(self) -> None:
        """Let the truth apply records that others appended."""
        log = self.broker.log(TOPIC, 0)
        assert log is not None
        for message in log.messages[self._taken :]:
            self.truth.apply(message.offset(), message.timestamp()[1], message.value())
            if self.truth.next_offset in self._asked_for:
                self.digests[self.truth.next_offset] = self.truth.digest()
        self._taken = len(log.messages)

    @property
    def end(self) -> int:
        log = self.broker.log(TOPIC, 0)
        assert log is not None
        return log.end

    def claim(self, partition: int = 0, who: tuple[str, str, str] = WHO) -> None:
        self.append(ClaimingPartition(*who, "t", partition, HI))

    def append(self, record: Record) -> None:
        self.broker.produce(TOPIC, 0, encode(record))
        self.catch_up()

    def beat(self, times: int = 1) -> None:
        """Heartbeats of partition 0, each with progress."""
        lease = self.truth.lease("g", "t", 0)
        if lease is None:
            self.claim()
            lease = self.truth.lease("g", "t", 0)
        assert lease is not None
        for _ in range(times):
            value = encode(Heartbeat(*WHO, "t", 0, lease.epoch, self.end))
            self.broker.produce(TOPIC, 0, value)
            self.catch_up()

    def up_to(self, next_offset: int) -> None:
        """Heartbeats until that place is reached or passed: members append records at any time."""
        self._asked_for.add(next_offset)
        while self.end < next_offset:
            self.beat()
        self.catch_up()

    # Snapshots.

    def store(self, *values: bytes) -> None:
        for value in values:
            self.broker.produce(SNAPSHOTS, 0, value)

    def snapshot(self) -> int:
        """Store a correct snapshot of now; returns its place."""
        self.store(*encode_snapshot(self.truth))
        return self.end

    def lie(self, next_offset: int | None = None) -> int:
        """Store a well-formed but wrong snapshot: another client holds another lease."""
        place = self.end if next_offset is None else next_offset
        lying = World(0, 1)
        lying.apply(place - 1, 1_000, encode(ClaimingPartition("9", "liar", "g", "t", 0, HI)))
        assert lying.next_offset == place
        self.store(*encode_snapshot(lying))
        return place

    def damage(self) -> int:
        """Store a snapshot whose bytes don't match its digest."""
        self.store(*encode_state(0, self.end, self.truth.snapshot()[:-1] + b"\xff", self.truth.digest()))
        return self.end

    def stored(self) -> list[tuple[int, str]]:
        """(next offset, digest) of all complete snapshots, as written."""
        log, parts = self.broker.log(SNAPSHOTS, 0), SnapshotParts(0)
        assert log is not None
        found = [whole for message in log.messages if (whole := parts.add(message.value())) is not None]
        return [(whole.next_offset, whole.digest) for whole in found]

    def hashes(self) -> list[LogHash]:
        """Hashes of the log stored beside them."""
        log = self.broker.log(SNAPSHOTS, 0)
        assert log is not None
        return [found for message in log.messages if (found := decode_hash(message.value())) is not None]

    def hash_of(self, since: int, next_offset: int) -> LogHash:
        """The hash of the present log."""
        log, running = self.broker.log(TOPIC, 0), RunningHash(since)
        assert log is not None
        entries = [(each.offset(), each.timestamp()[1], each.value()) for each in log.messages]
        running.take([entry for entry in entries if since <= entry[0] < next_offset])
        return running.at(0, next_offset)

    # Replicas.

    def cut(self, before: int) -> None:
        self.broker.delete_records(TOPIC, 0, before)

    def replica(self, begin: Begin = Begin.SNAPSHOT) -> Replica:
        """One that has caught up."""
        replica = Replica(self.cluster, TOPIC, TIMEOUT_S, begin)
        replica.catch_up(TIMEOUT_S)
        replica.close()
        self.catch_up()  # with members' records
        return replica

    def member(self, client_id: str) -> Marshal:
        cluster, before = self.cluster.connect(client_id), self.end
        member = Marshal.on_cluster(
            cluster, group_id="g", client_id=client_id, topic=TOPIC, heartbeat_interval=HI / 1000
        )
        self.members.append(member)
        if any(lease.held for lease in self.truth.leases()):
            # It writes a Tick (T3) after some milliseconds; the following code counts records.
            wait_until(lambda: self.end > before, "the member's Tick")
            self.catch_up()
        return member

    def close(self) -> None:
        for member in self.members:
            member.terminate()


@pytest.fixture
def story() -> Iterator[Story]:
    told = Story()
    yield told
    told.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Members write without jitter and poll often."""
    from kafka_marshal.snapshots import publisher

    def now() -> None:
        monkeypatch.setattr(publisher, "JITTER_MS", 0.0)
        monkeypatch.setattr(publisher, "LOOK_MS", 100.0)
        monkeypatch.setattr(publisher, "RETRY_MS", 100.0)

    now()
    return now
