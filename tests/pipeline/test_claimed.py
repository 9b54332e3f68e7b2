"""Claimed batches: rounds, commits, cancelled jobs, failures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, inheritable_thread_target
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from kafka_marshal import ConfigurationError, Delivery, Marshal
from kafka_marshal.admin import Admin
from kafka_marshal.cli.app import run
from kafka_marshal.errors import (
    AlreadyReadError,
    LeaseLostError,
    PartitionStuckError,
    RangeGoneError,
    SparkSetupError,
    StaleEpochError,
    TopicAbsentError,
)
from kafka_marshal.pipeline import claimed
from kafka_marshal.pipeline.claimed import ClaimedBatch, ClaimedBatches
from kafka_marshal.pipeline.reading import Gate
from tests.client.conftest import Scene, wait_until
from tests.pipeline.conftest import wait_until_takeable
from tests.pipeline.test_source import ANY_TIME, NANOSECONDS, publish_at

Place = tuple[int, int]


class Seen:
    """Rounds passed to fn, and commits."""

    def __init__(self) -> None:
        self.rows: list[Place] = []
        self.batches: list[ClaimedBatch] = []

    def __call__(self, df: DataFrame, batch: ClaimedBatch) -> None:
        self.batches.append(batch)
        self.rows.extend((row.partition, row.offset) for row in df.select("partition", "offset").collect())


def everything(partitions: int, messages: int) -> list[Place]:
    return [(partition, offset) for partition in range(partitions) for offset in range(messages)]


def stables(member: Marshal) -> list[int | None]:
    return [lease.stable for lease in member.world.leases()]


def evict(scene: Scene, topic: str, partition: int) -> None:
    with Admin(scene.bootstrap, topic=scene.coordination) as admin:
        admin.evict(scene.group, topic, partition, force=True)


def test_rounds_read_everything_once_and_commit_through_the_log(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(3, 100)
    member, seen = scene.member("a"), Seen()
    with ClaimedBatches(spark, member, [topic], max_records_per_batch=90) as batches:
        wait_until_takeable(batches._consumer, 3)
        totals = batches.foreach_batch(seen, available_now=True)
        assert stables(member) == [99, 99, 99]
        assert (totals.batches, totals.records) == (len(seen.batches), 300)
        assert sorted(seen.rows) == everything(3, 100)
        assert all(batch.count <= 90 for batch in seen.batches)
        first = seen.batches[0]
        leases = {(lease.topic, lease.partition): lease.epoch for lease in member.world.leases()}
        assert first.epochs == leases
        assert sorted(first.leases) == [(topic, partition, leases[topic, partition], 29) for partition in range(3)]
        assert len({batch.id for batch in seen.batches}) == len(seen.batches)
        assert batches.foreach_batch(seen, available_now=True).batches == 0


def test_columns_keys_values_and_options_of_the_connector(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(1, 3)
    found: list[tuple[str, str]] = []

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        found.extend((row.topic, row.value.decode()) for row in df.collect())
        assert "headers" in df.columns

    with ClaimedBatches(spark, scene.member("a"), [topic], options={"includeHeaders": "true"}) as batches:
        batches.foreach_batch(fn, available_now=True)
    assert found == [(topic, "0"), (topic, "1"), (topic, "2")]


def test_p6_rows_that_are_done_are_filtered_out(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(2, 60)
    with scene.member("a").ranges([topic]) as consumer:
        wait_until_takeable(consumer, 2)
        rounds = [consumer.take(20, timeout=20) for _ in range(4)]
        consumer.done([*rounds[1], *rounds[3]])  # 10 … 19 and 30 … 39 of both
    seen = Seen()
    with ClaimedBatches(spark, scene.member("b"), [topic]) as batches:
        batches.foreach_batch(seen, available_now=True)
    done = {(partition, offset) for partition in range(2) for offset in [*range(10, 20), *range(30, 40)]}
    assert sorted(seen.rows) == sorted(set(everything(2, 60)) - done)


def test_what_fn_raises_goes_to_the_caller_and_the_range_comes_again(spark: SparkSession, scene: Scene) -> None:
    """The sink is down: nothing is committed; the next call gets the same batch with the same id."""
    topic = scene.topic(1, 50)
    member, seen = scene.member("a"), Seen()

    def down(df: DataFrame, batch: ClaimedBatch) -> None:
        seen(df, batch)
        raise ConnectionRefusedError("no database here")

    with ClaimedBatches(spark, member, [topic], max_records_per_batch=20) as batches:
        with pytest.raises(ConnectionRefusedError, match="no database here") as raised:
            batches.foreach_batch(down, available_now=True)
        assert "Nothing of it is committed" in raised.value.__notes__[0]
        assert stables(member) == [None]
        batches.foreach_batch(seen, available_now=True)
    assert [batch.id for batch in seen.batches[:2]] == [seen.batches[0].id] * 2
    assert sorted(seen.rows) == sorted([*everything(1, 20), *everything(1, 50)])
    assert stables(member) == [49]


def test_until_names_partitions_that_exist(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(1, 5)
    with ClaimedBatches(spark, scene.member("a"), [topic]) as batches:
        for key in ((topic, 1), ("elsewhere", 0)):
            with pytest.raises(ConfigurationError, match=r"would wait for ever\. Nothing was read"):
                batches.foreach_batch(Seen(), until={key: 1})


def test_a_misspelt_property_is_compared_with_those_of_the_client_that_reads(spark: SparkSession, scene: Scene) -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean 'fetch.max.bytes'"):
        ClaimedBatches(spark, scene.member("a"), [scene.topic(1, 1)], options={"kafka.fetch.max.bytez": "1"})


def test_stop_and_until(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(2, 50)
    member, seen = scene.member("a"), Seen()
    with ClaimedBatches(spark, member, [topic]) as batches:
        batches.foreach_batch(seen, until={(topic, 0): 10, (topic, 1): 20})
        assert sorted(seen.rows) == [*everything(1, 10), *((1, offset) for offset in range(20))]

        def last(df: DataFrame, batch: ClaimedBatch) -> None:
            seen(df, batch)
            member.stop()

        batches.foreach_batch(last)  # would never end by itself
    assert set(seen.rows) > {(0, 49), (1, 19)} or set(seen.rows) > {(0, 9), (1, 49)}


def test_a_lost_lease_cancels_the_job_and_nothing_of_the_round_is_committed(
    spark: SparkSession, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """The other partition's range, whose lease still holds, is repeated: its rows were part of a cancelled job."""
    topic = scene.topic(2, 40)
    member, seen = scene.member("a"), Seen()
    failures: list[str] = []
    spark_errors = (PySparkException, Py4JJavaError)

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        if not failures:
            evict(scene, topic, 0)
            try:
                slow(df)
            except spark_errors as error:
                failures.append(str(error))
                assert not batch.valid
                with pytest.raises(LeaseLostError, match=r"is lost"):
                    batch.require()
                with pytest.raises(spark_errors):  # another job of the round is cancelled, too
                    slow(df)
                raise
        seen(df, batch)

    with (
        ClaimedBatches(spark, member, [topic]) as batches,
        caplog.at_level(logging.WARNING, "kafka_marshal"),
    ):
        wait_until_takeable(batches._consumer, 2)
        batches.foreach_batch(fn, available_now=True)
    assert "cancelled" in failures[0].lower()
    assert "a lease of it was lost while it was at work. Nothing of it is committed" in caplog.text
    assert sorted(seen.rows) == everything(2, 40)
    assert stables(member) == [39, 39]


@pytest.mark.parametrize("by", ["batch", "spark"])
def test_jobs_of_threads_that_fn_starts_are_cancelled_too(spark: SparkSession, scene: Scene, by: str) -> None:
    topic = scene.topic(1, 20)
    failures: list[str] = []
    seen = Seen()

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        if failures:
            seen(df, batch)
            return

        def work() -> None:
            try:
                slow(df)
            except (PySparkException, Py4JJavaError) as error:
                failures.append(str(error))

        with ThreadPoolExecutor(1) as pool:
            pool.submit(len, "a thread that is older than its work").result()
            future = pool.submit(batch.tagged(work) if by == "batch" else inheritable_thread_target(spark)(work))
            wait_until(lambda: spark.sparkContext.statusTracker().getActiveJobsIds())
            evict(scene, topic, 0)
            future.result(30)
            if by == "batch":
                left = pool.submit(spark.sparkContext.getJobTags).result()
                assert not list(left), "the thread may serve another batch"

    with ClaimedBatches(spark, scene.member("a"), [topic]) as batches:
        batches.foreach_batch(fn, available_now=True)
    assert "cancelled" in failures[0].lower()
    assert sorted(seen.rows) == everything(1, 20)


def test_what_fn_raised_comes_first_when_it_has_stopped_spark_too(
    spark: SparkSession, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = scene.topic(1, 10)
    context = spark.sparkContext

    def stop(df: DataFrame, batch: ClaimedBatch) -> None:
        monkeypatch.setattr(context, "_jsc", None)  # as spark.stop() leaves it

    def stop_and_fail(df: DataFrame, batch: ClaimedBatch) -> None:
        stop(df, batch)
        raise ZeroDivisionError("fn's own")

    with ClaimedBatches(spark, scene.member("a"), [topic], max_records_per_batch=5) as batches:
        wait_until(lambda: batches.assignment())
        with pytest.raises(ZeroDivisionError, match="fn's own") as raised:
            batches.foreach_batch(stop_and_fail, available_now=True)
        assert raised.value.__context__ is None, "nothing before it, nothing around it"
        monkeypatch.undo()
        with pytest.raises(SparkSetupError, match=r"was stopped \(spark.stop"):
            batches.foreach_batch(stop, available_now=True)
        monkeypatch.undo()
        context.clearJobTags()
        assert batches.foreach_batch(Seen(), available_now=True).records == 5, "what was committed stays so"


def test_a_timestamp_that_spark_cannot_represent_is_named_and_there_is_a_way_past_it(
    spark: SparkSession, scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    topic = scene.topic(1, **ANY_TIME)
    publish_at(scene, topic, 1_000, 2_000, NANOSECONDS, 3_000, 1_764_181_740 * 10**6)
    member, seen = scene.member("a"), Seen()
    with ClaimedBatches(spark, member, [topic]) as batches:
        with pytest.raises(PartitionStuckError, match=r"offset 2 has the timestamp 1764181740000000000") as raised:
            batches.foreach_batch(seen, available_now=True)
        assert (raised.value.topic, raised.value.partition, raised.value.offset) == (topic, 0, 2)
        batches.foreach_batch(seen, until={(topic, 0): 2})
    skip = ["--bootstrap", scene.bootstrap, "--topic", scene.coordination, "skip", scene.group, f"{topic}:0", "--yes"]
    assert run(skip) == 0
    assert "offset 2 has the timestamp" in "".join(capfd.readouterr())
    assert stables(member) == [2]
    with ClaimedBatches(spark, member, [topic]) as batches:

        def all_columns(df: DataFrame, batch: ClaimedBatch) -> None:
            df.collect()

        with pytest.raises(ValueError, match="out of range") as noted:  # microseconds: valid in Spark, not in datetime
            batches.foreach_batch(all_columns, available_now=True)
        assert "offset 4 has the timestamp" in noted.value.__notes__[0]
        batches.foreach_batch(seen, available_now=True)
    assert sorted(seen.rows) == [(0, 0), (0, 1), (0, 3), (0, 4)]


def slow(df: DataFrame) -> None:
    """A job that lasts for a minute, unless it is cancelled."""

    def sleep(rows: Iterator[object]) -> None:
        import time

        for _ in rows:
            time.sleep(60)

    df.foreachPartition(sleep)


def test_fn_that_overlooks_the_loss_commits_nothing_either(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(1, 40)
    member, seen = scene.member("a"), Seen()
    epochs: list[int] = []

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        seen(df, batch)
        epochs.extend(batch.epochs.values())
        if len(epochs) == 1:
            evict(scene, topic, 0)
            wait_until(lambda: not batch.valid)

    with ClaimedBatches(spark, member, [topic]) as batches:
        totals = batches.foreach_batch(fn, available_now=True)
    assert totals.records == 40
    assert sorted(seen.rows) == sorted(everything(1, 40) * 2)
    assert epochs[1] > epochs[0]


def test_a_round_that_takes_too_long_is_cancelled_and_comes_again(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(1, 20)
    member, seen = scene.member("a"), Seen()
    began: list[int] = []

    def fn(df: DataFrame, batch: ClaimedBatch) -> None:
        began.append(batch.ranges[0].epoch)
        if len(began) == 1:
            slow(df)
        seen(df, batch)

    with ClaimedBatches(spark, member, [topic], handler_timeout=5.0) as batches:
        batches.foreach_batch(fn, available_now=True)
    assert began == sorted(set(began)), "each time under an epoch of its own"
    assert set(seen.rows) == set(everything(1, 20))
    assert stables(member) == [19]


def test_a_newer_epoch_in_the_sink_is_an_error_unless_the_lease_is_lost(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(1, 20)
    seen = Seen()

    def refuse(df: DataFrame, batch: ClaimedBatch) -> None:
        raise StaleEpochError("newer", topic=topic, partition=0, epoch=1, stored_epoch=2)

    def refuse_once(df: DataFrame, batch: ClaimedBatch) -> None:
        if not seen.batches:
            seen(df, batch)
            evict(scene, topic, 0)
            refuse(df, batch)
        seen(df, batch)

    with ClaimedBatches(spark, scene.member("a"), [topic]) as batches:
        with pytest.raises(StaleEpochError):
            batches.foreach_batch(refuse, until={(topic, 0): 10})
        assert batches.foreach_batch(refuse_once, until={(topic, 0): 10}).records == 10


def test_a_range_that_retention_takes_while_it_is_read_is_an_error_and_a_gap(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(1, 60)
    admin = AdminClient({"bootstrap.servers": scene.bootstrap})
    seen = Seen()

    def too_late(df: DataFrame, batch: ClaimedBatch) -> None:
        for future in admin.delete_records([TopicPartition(topic, 0, 25)]).values():
            future.result(10)
        seen(df, batch)

    with ClaimedBatches(spark, scene.member("a"), [topic]) as batches:
        with pytest.raises(RangeGoneError, match="offsets 0 to 24 went from the log") as raised:
            batches.foreach_batch(too_late, available_now=True)
        assert raised.value.gone == ((topic, 0, 0, 24),)
        assert isinstance(raised.value.__cause__, PySparkException | Py4JJavaError)
        assert seen.rows == []
        batches.foreach_batch(seen, available_now=True)
        assert batches.gaps == [(topic, 0, 0, 24)]
    assert seen.rows == [(0, offset) for offset in range(25, 60)]


def test_a_topic_that_is_not_there_is_an_error_at_once(spark: SparkSession, scene: Scene) -> None:
    with pytest.raises(TopicAbsentError, match="'nowhere' does not exist"):  # (a pattern waits for topics to appear)
        ClaimedBatches(spark, scene.member("a"), ["nowhere"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_records_per_batch": 0}, "at least 1"),
        ({"delivery": "exactly-once"}, "at-most-once"),
        ({"options": {"failOnDataLoss": "false"}}, "none may be skipped silently"),
        ({"options": {"startingOffsets": "earliest"}}, r"decided by the claims.* has start="),
        ({"options": {"subscribe": "t"}}, r"decided by the claims.* has its argument topics"),
        ({"options": {"kafka.isolation.level": "read_committed"}}, "isolation.level"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_claimed(
    spark: SparkSession, scene: Scene, options: dict[str, object], words: str
) -> None:
    topic = scene.topic(1, 1)
    member = scene.member("a")
    with pytest.raises(ConfigurationError, match=words):
        ClaimedBatches(spark, member, [topic], **options)  # type: ignore[arg-type]
    assert member.world.leases() == []


def test_the_next_round_is_looked_up_while_this_one_computes(spark: SparkSession, scene: Scene) -> None:
    topic = scene.topic(1, 100)
    seen = Seen()
    asked: list[bool] = []

    with ClaimedBatches(spark, scene.member("a"), [topic], max_records_per_batch=25) as batches:
        consumer = batches._consumer
        look_up = consumer._marks.look_up

        def fn(df: DataFrame, batch: ClaimedBatch) -> None:
            ahead = consumer._marks.ahead
            assert ahead is not None
            ahead.result(20)
            seen(df, batch)
            asked.clear()

        def looking(keys: list[tuple[str, int]]) -> dict[tuple[str, int], tuple[int, int]]:
            asked.append(threading.current_thread().name.startswith("kafka-marshal-ahead"))
            return look_up(keys)

        consumer._marks.look_up = looking  # type: ignore[method-assign,assignment]
        before: list[list[bool]] = []
        take = consumer.take

        def taking(*arguments: object, **more: object) -> object:
            found = take(*arguments, **more)  # type: ignore[arg-type]
            if found:
                before.append(list(asked))
            return found

        consumer.take = taking  # type: ignore[method-assign,assignment]
        batches.foreach_batch(fn, until={(topic, 0): 100})
    assert before[1:4] == [[], [], []], "rounds 2 to 4 were planned while the one before was at work"
    assert len(seen.batches) == 4


def test_a_session_that_cannot_cancel_is_refused(scene: Scene) -> None:
    class Remote:
        pass

    Remote.__module__ = "pyspark.sql.connect.session"
    with pytest.raises(ConfigurationError, match="Spark Connect"):
        ClaimedBatches(Remote(), scene.member("a"), ["t"])  # type: ignore[arg-type]


# -- At most once in Spark: a batch is granted, then read once (C12, C13) -----------------------------------------


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
