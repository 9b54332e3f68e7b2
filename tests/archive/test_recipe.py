"""Keep the history (docs/operating.md), on a real broker: archive, then prune, and who answers of a time before."""

from __future__ import annotations

import re
from pathlib import Path

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.observe.log import Log
from kafka_marshal.observe.text import time_text
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import ClaimingPartition, Heartbeat, ReleasingPartition, World, encode
from tests.cli.conftest import kafka, log_topic
from tests.cli.harness import Command
from tests.stored_snapshot import encode_snapshot

__all__ = ["kafka", "log_topic"]

PAGE = Path(__file__).parents[2] / "docs" / "operating.md"


def test_archive_first_then_prune(kafka: Command, kafka_bootstrap: str, log_topic: str, tmp_path: Path) -> None:
    assert kafka("init", "--partitions", 1).status == 0
    cluster = KafkaCluster(kafka_bootstrap, {})

    def append(topic: str, *values: bytes) -> World:
        """Returns the state after them."""
        appender = cluster.appender(topic, delivery_timeout_ms=10_000)
        for value in values:
            appender.append(0, value)
        assert appender.flush(10) == 0
        appender.close()
        world = World(0, 1)
        for _, entries in Log(cluster, log_topic, 10).read():
            world.apply_many(entries)
        return world

    times = []
    for client in ("early", "second", "third", "late"):
        who = (f"host/1/1.0/{client}", client, "g")
        held = append(log_topic, encode(ClaimingPartition(*who, "t", 0, 600_000)))
        times.append(held.log_time)
        lease = held.lease("g", "t", 0)
        assert lease is not None
        beats = [encode(Heartbeat(*who, "t", 0, lease.epoch, done)) for done in range(5)]
        world = append(log_topic, *beats, encode(ReleasingPartition(*who, "t", 0, lease.epoch, 5)))
        append(snapshots_topic(log_topic), *encode_snapshot(world))
    cluster.close()
    place = str(tmp_path / "archive")
    asked = ("who", "g", "t", 0, "--json", "--at", time_text(times[0]))
    before = kafka(*asked)
    assert before.json["answer"]["holder"]["client"] == "early"

    [recipe] = re.findall(r"^0 2 \* \* \* +(.*) \|\| notify", PAGE.read_text(), re.MULTILINE)
    for line in recipe.split(" && "):
        program, *args = line.replace("s3://audit/marshal", place).split()
        assert program == "kafka-marshal"
        ran = kafka(*args)
        assert ran.status == 0, ran.err
    assert kafka("archive", "--to", place, "--json").json["records"] == 0
    assert kafka(*asked).out != before.out, "the log alone begins later"
    after = kafka(*asked, "--archive", place)
    assert (after.status, after.err, after.out) == (0, before.err, before.out)
    assert kafka("archive", "--to", place, "--verify").status == 0
