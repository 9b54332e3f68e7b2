"""TLS, SASL and ACLs from one librdkafka configuration: the marshal, Spark's connector, and executors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.pipeline.claimed import ClaimedBatch, ClaimedBatches
from kafka_marshal.pipeline.source import register
from kafka_marshal.testing import LocalBroker
from tests.pipeline.queries import begun
from tests.secured import Config, broker_properties, certified, key_store, login, password_of
from tests.security.rights import PAGE, give, roles_of

pytestmark = [pytest.mark.broker, pytest.mark.slow]

MESSAGES = 30

#: Least rights of docs/security.md.
RIGHTS = roles_of(PAGE.read_text(encoding="utf-8"))["spark"]
EVERYTHING = [(partition, offset) for partition in (0, 1) for offset in range(MESSAGES)]


@dataclass(frozen=True, slots=True)
class Secured:
    """A broker with TLS and passwords, where ann may only read the topic t and be a member."""

    bootstrap: str
    ca: Path

    def login(self, user: str) -> Config:
        return {**login(user, protocol="SASL_SSL"), "ssl.ca.location": str(self.ca)}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    store, ca = certified(tmp_path_factory.mktemp("tls"))
    properties = {
        **broker_properties("ann", protocol="SASL_SSL"),
        **key_store(store),
    }
    root = Secured("", ca).login("root")
    with LocalBroker(properties=properties, client_config=root) as broker:
        cluster = KafkaCluster(broker.bootstrap_servers, root)
        create_topic(cluster, "__marshal", 2, 30)
        cluster.create_topic("t", 2, 1, {}, 30)
        cluster.close()
        rights = [replace(right, name=right.name.replace("orders", "t")) for right in RIGHTS]
        give(broker.bootstrap_servers, {"ann": rights}, root)
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, **root})
        for partition, offset in EVERYTHING:
            producer.produce("t", b"%d" % offset, partition=partition)
        assert producer.flush(30) == 0
        yield Secured(broker.bootstrap_servers, ca)


def plan_of(df: DataFrame) -> str:
    """All its plans, as shown in Spark's UI and log."""
    return str(df._jdf.queryExecution().toString())


def test_claimed_batches_read_what_the_marshal_may(spark: SparkSession, secured: Secured) -> None:
    rows: list[tuple[int, int]] = []

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        assert password_of("ann") not in plan_of(df)
        rows.extend((row.partition, row.offset) for row in df.select("partition", "offset").collect())

    config = secured.login("ann")
    with (
        Marshal(secured.bootstrap, group_id="claimed", config=config) as marshal,
        ClaimedBatches(spark, marshal, ["t"]) as batches,
    ):
        while len(rows) < len(EVERYTHING):
            batches.foreach_batch(fn, available_now=True)
        assert [lease.stable for lease in marshal.world.leases()] == [MESSAGES - 1] * 2
    assert sorted(rows) == EVERYTHING


def test_the_stream_source_logs_in_from_its_own_process(spark: SparkSession, secured: Secured, tmp_path: Path) -> None:
    register(spark)
    rows: list[tuple[int, int]] = []

    def see(df: DataFrame, number: int) -> None:
        assert password_of("ann") not in plan_of(df)
        rows.extend((row.partition, row.offset) for row in df.select("partition", "offset").collect())

    options = {f"kafka.{name}": str(value) for name, value in secured.login("ann").items()}

    def start() -> StreamingQuery:
        stream = spark.readStream.format("kafka_marshal").options(bootstrap_servers=secured.bootstrap, **options)
        frame = stream.options(group_id="streamed", topics="t").load()
        return frame.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).foreachBatch(see).start()

    query = begun(start)
    try:
        while len(rows) < len(EVERYTHING):
            assert query.isActive, query.exception()
            query.processAllAvailable()
        shown = [*query.recentProgress, query.status, query._jsq.toString()]
        assert password_of("ann") not in str(shown)
    finally:
        query.stop()
    assert sorted(rows) == EVERYTHING
    kept = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert kept
    assert [path for path in kept if password_of("ann").encode() in path.read_bytes()] == []
