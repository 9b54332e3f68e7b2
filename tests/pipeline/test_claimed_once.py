"""At most once in Spark: a batch is granted, then read once (C12, C13)."""

from __future__ import annotations

import pytest
from pyspark import SparkConf
from pyspark.sql import DataFrame, SparkSession

from kafka_marshal import ConfigurationError, Delivery, Marshal
from kafka_marshal.errors import AlreadyReadError
from kafka_marshal.pipeline import claimed
from kafka_marshal.pipeline.claimed import ClaimedBatch, ClaimedBatches
from kafka_marshal.pipeline.reading import Gate
from tests.client.conftest import Scene
from tests.pipeline.conftest import wait_until_takeable
from tests.pipeline.test_claimed import Seen, everything, evict, slow, stables

AMO: Delivery = "at-most-once"


def granted(member: Marshal) -> list[int | None]:
    return [lease.granted for lease in member.world.leases()]


def test_a_batch_is_granted_before_it_is_read_and_read_once(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(2, 60)
    member, seen = scene.member("a"), Seen()
    before: list[tuple[int | None, int]] = []

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:  # a round has the partitions whose position is known by then
        is_granted = granted(member)
        before.extend((is_granted[given.partition], given.last) for given in batch.ranges)
        seen(df, batch)

    with ClaimedBatches(spark, member, [topic], delivery=AMO, max_records_per_batch=40) as batches:
        wait_until_takeable(batches._consumer, 2)
        batches.foreach_batch(fn, available_now=True)
    assert [found for found, _ in before] == [last for _, last in before]
    assert len(seen.batches) >= 3
    assert sorted(seen.rows) == everything(2, 60)
    assert batches.unprocessed == []


READS = {
    "the same frame": lambda df: df.collect(),
    "another frame made of it": lambda df: df.selectExpr("offset + 1").groupBy().count().collect(),
    "a view": lambda df: df.createOrReplaceTempView("once") or df.sparkSession.sql("select * from once").collect(),
    "its RDD": lambda df: df.select("offset").rdd.count(),
    "another split of it": lambda df: df.coalesce(1).select("offset").collect(),
}
DAILY = ("another frame made of it", "its RDD")


@pytest.mark.parametrize("again", [x if x in DAILY else pytest.param(x, marks=pytest.mark.campaign) for x in READS])
def test_a_second_action_is_an_error_whatever_its_way(spark: SparkSession, scene: Scene, again: str) -> None:
    topic = scene.topic(2, 20)
    member, seen = scene.member("a"), Seen()

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        seen(df, batch)
        READS[again](df)

    with ClaimedBatches(spark, member, [topic], delivery=AMO, max_records_per_batch=20) as batches:
        wait_until_takeable(batches._consumer, 2)
        with pytest.raises(AlreadyReadError, match=r"was read already.*continues behind it"):
            batches.foreach_batch(fn, available_now=True)
        batches.foreach_batch(seen, available_now=True)
    assert sorted(seen.rows) == everything(2, 20), "the failed batch was out, and does not come again"
    assert batches.unprocessed == []


def test_a_cache_of_the_users_own_may_be_read_as_often_as_he_likes(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(2, 20)
    counts: list[int] = []

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        cached = df.cache()
        counts.extend((cached.count(), cached.where("partition = 0").count()))
        cached.unpersist()

    with ClaimedBatches(spark, scene.member("a"), [topic], delivery=AMO) as batches:
        wait_until_takeable(batches._consumer, 2)
        batches.foreach_batch(fn, available_now=True)
    assert counts == [40, 20]


def test_a_frame_kept_beyond_its_batch_reads_nothing(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(1, 20)
    kept: list[DataFrame] = []
    with ClaimedBatches(spark, scene.member("a"), [topic], delivery=AMO) as batches:
        batches.foreach_batch(lambda df, batch: kept.append(df), available_now=True)
        with pytest.raises(Exception, match="its time is over"):
            kept[0].collect()


def test_splitting_a_partition_among_tasks_reads_each_part_once(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(1, 200)
    seen = Seen()
    options = {"minPartitions": "4"}
    with ClaimedBatches(spark, scene.member("a"), [topic], delivery=AMO, options=options) as batches:
        batches.foreach_batch(seen, available_now=True)
    assert sorted(seen.rows) == everything(1, 200)


def test_what_was_granted_and_never_reached_fn_is_reported(
    spark: SparkSession, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = scene.topic(1, 30)
    seen = Seen()

    def broken(*_: object) -> DataFrame:
        raise RuntimeError("no frame")

    with ClaimedBatches(spark, scene.member("a"), [topic], delivery=AMO, max_records_per_batch=10) as batches:
        with monkeypatch.context() as patch:
            patch.setattr(claimed, "read_ranges", broken)
            with pytest.raises(RuntimeError, match="no frame"):
                batches.foreach_batch(seen, available_now=True)
        assert batches.unprocessed == [(topic, 0, 0, 9)]
        batches.foreach_batch(seen, available_now=True)
    assert seen.rows == [(0, offset) for offset in range(10, 30)]


def test_a_lost_lease_stops_the_job_and_repeats_nothing(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(1, 40)
    member, seen = scene.member("a"), Seen()
    began: list[str] = []

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        began.append(batch.id)
        if len(began) == 1:
            evict(scene, topic, 0)
            slow(df)
        seen(df, batch)

    with ClaimedBatches(spark, member, [topic], delivery=AMO, max_records_per_batch=20) as batches:
        totals = batches.foreach_batch(fn, available_now=True)
    assert totals.records == 20
    assert seen.rows == [(0, offset) for offset in range(20, 40)]
    assert stables(member) == [39]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spark.master": "local[2]", "spark.speculation": "true"}, "spark.speculation"),
        ({"spark.master": "local[2,4]"}, "4 tries"),
        ({"spark.master": "spark://somewhere:7077"}, "4 tries"),
        ({"spark.master": "yarn", "spark.task.maxFailures": "2"}, "2 tries"),
        ({"spark.master": "local-cluster[2,1,1024]"}, "4 tries"),
        ({"spark.master": "local[2]", "spark.task.maxFailures": "8"}, None),  # Spark ignores it there
        ({"spark.master": "local"}, None),
        ({"spark.master": "local[*]"}, None),
        ({"spark.master": "local[*, 1]"}, None),
        ({"spark.master": "spark://somewhere:7077", "spark.task.maxFailures": "1"}, None),
    ],
)
def test_settings_under_which_spark_reads_twice_are_refused(settings: dict[str, str], words: str | None) -> None:
    class Context:
        master = settings["spark.master"]

        @staticmethod
        def getConf() -> SparkConf:
            conf = SparkConf(loadDefaults=False)
            for name, value in settings.items():
                conf.set(name, value)
            return conf

    class Session:
        sparkContext = Context()

    if words is None:
        claimed._check_at_most_once(Session())  # type: ignore[arg-type]
    else:
        with pytest.raises(ConfigurationError, match=words):
            claimed._check_at_most_once(Session())  # type: ignore[arg-type]


def test_the_gate_lets_each_part_of_an_open_batch_in_once(spark: SparkSession) -> None:
    gate = Gate(spark)
    try:
        assert not gate.admit("b", "1/0")
        with gate.letting_in("b"):
            assert [gate.admit("b", "1/0"), gate.admit("b", "1/0"), gate.admit("b", "2/0")] == [True, False, True]
            assert not gate.admit("c", "1/0")
        assert not gate.admit("b", "3/0")
    finally:
        gate.close()


def test_the_gate_answers_no_one_without_its_secret(spark: SparkSession) -> None:
    import socket

    gate = Gate(spark)
    try:
        with gate.letting_in("b"), socket.create_connection(gate._server.server_address[:2], 10) as stranger:  # type: ignore[arg-type]
            stranger.sendall(b"0" * 32 + b"\0\x05b/1/0")
            assert stranger.recv(1) == b""
    finally:
        gate.close()
