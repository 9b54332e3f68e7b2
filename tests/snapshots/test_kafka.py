"""Snapshots on a real Kafka: written, used for a start, pruned; writers killed with -9; the command's output."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from confluent_kafka import Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.admin import Admin
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.errors import LogCutError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.snapshots.reader import SnapshotReader
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import ClaimingPartition, Heartbeat, encode
from rationalizer.limits import SNAPSHOT_INTERVAL
from tests.campaigns.keeping import Campaign
from tests.cli.harness import process
from tests.snapshots.conftest import wait_until
from tests.stored_snapshot import encode_snapshot

K = SNAPSHOT_INTERVAL
ROOT = Path(__file__).parents[2]
WHO = ("1", "worker-1", "g")


class Logged:
    """A coordination topic of one partition, and its snapshots topic."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.topic = f"__marshal-{uuid.uuid4().hex[:8]}"
        self.snapshots = snapshots_topic(self.topic)
        self.cluster = KafkaCluster(bootstrap, {})
        create_topic(self.cluster, self.topic, 1, 10)
        self.members: list[Marshal] = []

    def fill(self, records: int, leases: int = 10, id_bytes: int = 0) -> None:
        """Write claims, then heartbeats in turn, up to ``records`` records including the marker."""
        end = self.end()
        producer = Producer(
            {"bootstrap.servers": self.bootstrap, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000}
        )
        who = (WHO[0], WHO[1] + "x" * id_bytes, WHO[2])
        for offset in range(end, records):
            number = (offset - 1) % leases
            record = (
                ClaimingPartition(*who, "t", number, 600_000)
                if offset <= leases
                else Heartbeat(*who, "t", number, number + 1, offset)
            )
            producer.produce(self.topic, encode(record), b"", 0)
        assert producer.flush(30) == 0

    def end(self) -> int:
        return self.cluster.watermarks([(self.topic, 0)], 10)[self.topic, 0][1]

    def start(self) -> int:
        return self.cluster.watermarks([(self.topic, 0)], 10)[self.topic, 0][0]

    def places(self) -> list[int]:
        """Next offsets of the complete, valid snapshots."""
        reader = SnapshotReader.find(self.cluster, self.snapshots, 10)
        assert reader is not None
        reader.read_newest(1_000)
        return sorted({place.next_offset for place in reader.partitions[0].sorted() if place.holds})

    def member(self, client_id: str) -> Marshal:
        member = Marshal(self.bootstrap, group_id="other", client_id=client_id, topic=self.topic)
        self.members.append(member)
        return member

    def digest(self, begin: Begin) -> tuple[int, str]:
        """(where the replay began, digest at its end)"""
        replica = Replica(self.cluster, self.topic, 10, begin)
        replica.catch_up(10)
        replica.close()
        return replica.starts[0].begun_at, replica.worlds[0].digest()

    def store(self, value: bytes) -> None:
        appender = self.cluster.appender(self.snapshots, delivery_timeout_ms=10_000)
        appender.append(0, value)
        assert appender.flush(10) == 0
        appender.close()

    def command(self, *args: str) -> subprocess.CompletedProcess[bytes]:
        return process("--bootstrap", self.bootstrap, "--topic", self.topic, *args)

    def close(self) -> None:
        for member in self.members:
            member.close()
        self.cluster.close()
        Probe(self.bootstrap).delete_topics([self.topic, self.snapshots])


@pytest.fixture
def logged(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Logged]:
    made = Logged(kafka_bootstrap)
    yield made
    made.close()


def test_s3_a_member_writes_and_the_next_starts_from_there(logged: Logged, at_once: Callable[[], None]) -> None:
    logged.fill(2 * K + 500)
    logged.member("a")
    wait_until(lambda: logged.places() == [K, 2 * K], "two snapshots")
    begun_at, digest = logged.digest(Begin.SNAPSHOT)
    assert begun_at == K
    assert (0, digest) == logged.digest(Begin.HISTORY)
    logged.fill(3 * K + 1)
    wait_until(lambda: logged.places() == [K, 2 * K, 3 * K], "one more, taken while the log runs")
    assert logged.digest(Begin.SNAPSHOT) == (2 * K, logged.digest(Begin.HISTORY)[1])
    assert logged.members[0].alarms == ()


def test_s2_a_writer_killed_between_two_parts_leaves_nothing_that_harms(
    logged: Logged, at_once: Callable[[], None]
) -> None:
    logged.fill(K + 100, leases=4_000, id_bytes=240)
    argv = [sys.executable, "-m", "tests.snapshots.dying", logged.bootstrap, logged.topic]
    dying = subprocess.Popen(argv, cwd=ROOT)
    assert dying.wait(60) == -signal.SIGKILL
    snapshots = logged.cluster.watermarks([(logged.snapshots, 0)], 10)[logged.snapshots, 0]
    assert snapshots == (0, 1), "one part of several"
    assert logged.places() == []
    assert logged.digest(Begin.SNAPSHOT)[0] == 0
    logged.member("next")
    wait_until(lambda: logged.places() == [K], "the next member writes it")
    logged.fill(2 * K + 100, leases=4_000, id_bytes=240)
    wait_until(lambda: logged.places() == [K, 2 * K], "and the next one")
    assert logged.digest(Begin.SNAPSHOT) == (K, logged.digest(Begin.HISTORY)[1])


def test_l1_prune_as_a_user_does_it(logged: Logged) -> None:
    whole = Replica(logged.cluster, logged.topic, 10)
    places = []
    for _ in range(5):
        logged.fill(logged.end() + 100)
        while whole.worlds[0].next_offset < logged.end():
            whole.apply(whole.read(0.2))
        logged.store(encode_snapshot(whole.worlds[0])[0])
        places.append(whole.worlds[0].next_offset)
    whole.close()
    assert logged.command("prune").returncode == 2, "nobody to ask"
    tried = logged.command("prune", "--dry-run")
    assert (tried.returncode, logged.start()) == (0, 0)
    assert f"{places[2]} records and 2 snapshots would be removed." in tried.stdout.decode()
    done = logged.command("prune", "--yes", "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert (report["removed"], report["records"], report["snapshots"]) == (True, places[2], 2)
    assert report["partitions"][0]["checked"] == places
    assert logged.start() == places[2]
    assert logged.places() == places[2:]
    assert b"nothing to remove" in logged.command("prune", "--yes").stdout

    # Everything continues with the rest.
    assert logged.command("init", "--check").returncode == 0
    assert logged.digest(Begin.SNAPSHOT) == (places[3], logged.digest(Begin.HISTORY)[1])
    status = logged.command("status", "--json")
    assert status.returncode == 0
    told = logged.command("who", "g", "t", "3")
    assert told.returncode == 0
    assert b"worker-1" in told.stdout
    assert f"0 before offset {places[2]}".encode() in told.stderr
    lines = logged.command("log").stdout.decode().splitlines()
    assert len(lines) - 1 == places[4] - places[2]
    assert logged.command("dump").returncode == 1
    lease = logged.member("a").claim("u", 0)
    assert lease.valid


def test_s2_prune_says_no_to_a_forged_one_and_names_it(logged: Logged) -> None:
    logged.fill(50)
    replica = Replica(logged.cluster, logged.topic, 10)
    replica.catch_up(10)
    replica.close()
    (value,) = encode_snapshot(replica.worlds[0])
    other = Logged(logged.bootstrap)
    try:
        other.fill(50)  # the same claims at other times: a valid state of another log
        other.store(value)
        ran = other.command("prune", "--yes", "--keep", "2")
    finally:
        other.close()
    assert ran.returncode == 1
    assert b"at offset 50" in ran.stderr
    assert b"nothing to remove" in ran.stdout


def test_l1_a_log_cut_too_far_refuses_members_and_the_command(logged: Logged) -> None:
    logged.fill(100)
    logged.cluster.delete_records({(logged.topic, 0): 60}, 10)
    with pytest.raises(LogCutError):
        logged.member("a")
    with pytest.raises(LogCutError):
        Admin(logged.bootstrap, topic=logged.topic).prune()
    ran = logged.command("prune", "--yes")
    assert ran.returncode == 1
    assert b"does not reach back" in ran.stderr
    assert logged.command("init", "--check").returncode == 1


def test_members_keep_the_log_and_are_killed_at_it(kafka_bootstrap: str) -> None:
    """The campaign's short form."""
    campaign = Campaign(kafka_bootstrap, interval=100, keep_ms=1_000, rate=500, members=3, rng=Random(3))
    found = campaign.run(records=1_000, kills=2)
    assert found.violations == []
    assert found.counts["cuts"] >= 2 and sum(found.kills.values()) >= 2 and found.counts["starts"]
