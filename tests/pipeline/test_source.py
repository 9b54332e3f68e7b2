"""The stream source: claims decide which partitions, the log decides where."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from kafka_marshal.admin import Admin
from kafka_marshal.errors import StaleEpochError
from kafka_marshal.pipeline.source import IS_TOLD_OF_AVAILABLE_NOW, leases_of, register, to_arrow
from kafka_marshal.runtime import LEAST_STAMP_MS, MOST_STAMP_MS, is_moment
from kafka_marshal.sinks import SqliteSink
from tests.broker.helpers import children_of
from tests.client.conftest import HI, Scene, wait_until
from tests.pipeline.queries import begun

Place = tuple[int, int]

#: Settings of a topic that accepts any timestamp, as brokers before 3.6 do.
ANY_TIME: dict[str, Any] = {"message.timestamp.after.max.ms": str(2**63 - 1)}
NANOSECONDS = 1_764_181_740 * 10**9


def publish_at(scene: Scene, topic: str, *stamps: int) -> None:
    """Publish a message for each of these timestamps (ms)."""
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    for stamp in stamps:
        producer.produce(topic, b"v", partition=0, timestamp=stamp)
        assert producer.flush(20) == 0


class Stream:
    """Queries of one group, and their rows."""

    def __init__(self, spark: SparkSession, scene: Scene, topic: str, folder: Path) -> None:
        register(spark)
        self.spark, self.scene, self.topic, self.folder = spark, scene, topic, folder
        self.rows: list[Place] = []
        self.batches: list[list[Place]] = []
        self.queries: list[StreamingQuery] = []
        self.watcher = scene.member("watcher")

    def frame(self, **options: object) -> DataFrame:
        settings = {
            "bootstrap_servers": self.scene.bootstrap,
            "group_id": self.scene.group,
            "client_id": "query",
            "topics": self.topic,
            "coordination_topic": self.scene.coordination,
            "heartbeat_interval": HI / 1000,
            **options,
        }
        made: DataFrame = (
            self.spark.readStream.format("kafka_marshal").options(**{k: str(v) for k, v in settings.items()}).load()
        )
        return made

    def start(
        self, each: Callable[[DataFrame, int], None] | None = None, checkpoint: str = "checkpoint", **options: object
    ) -> StreamingQuery:
        def some(df: DataFrame, number: int) -> None:
            if each is not None and not df.isEmpty():  # a query's first batch may be empty
                each(df, number)

        def start() -> StreamingQuery:
            writer = self.frame(**options).writeStream.option("checkpointLocation", str(self.folder / checkpoint))
            self.queries.append(writer.foreachBatch(self.see if each is None else some).start())
            return self.queries[-1]

        return begun(start)

    def see(self, df: DataFrame, number: int) -> None:
        rows = [(row.partition, row.offset) for row in df.select("partition", "offset").collect()]
        self.batches.append(sorted(rows))
        self.rows.extend(rows)

    def stables(self) -> dict[int, int | None]:
        return {lease.partition: lease.stable for lease in self.watcher.world.leases()}

    def holders(self) -> dict[int, str | None]:
        return {lease.partition: lease.client_id for lease in self.watcher.world.leases()}

    def wait_for(self, event: threading.Event, query: StreamingQuery) -> None:
        """Wait until the query's batch has got there."""

        asked = count()

        def there() -> bool:
            assert next(asked) % 50 or query.exception() is None, query.exception()
            return event.is_set()

        wait_until(there, 180, "the batch has got there")

    def wait_stable(self, last: int, partitions: int, query: StreamingQuery | None = None) -> None:
        """Wait until, by the log, all is done up to last."""

        asked = count()

        def reached() -> bool:
            if query is not None and next(asked) % 50 == 0:  # a question costs both processes some milliseconds
                assert query.exception() is None, query.exception()
            return self.stables() == dict.fromkeys(range(partitions), last)

        wait_until(reached, 180, f"{self.stables()}")


def everything(partitions: int, messages: int, first: int = 0) -> list[Place]:
    return [(partition, offset) for partition in range(partitions) for offset in range(first, messages)]


@pytest.fixture
def stream(spark: SparkSession, scene: Scene, tmp_path: Path) -> Iterator[Callable[[str], Stream]]:
    made: list[Stream] = []

    def make(topic: str) -> Stream:
        made.append(Stream(spark, scene, topic, tmp_path))
        return made[-1]

    yield make
    for each in made:
        for query in each.queries:
            query.stop()


def test_everything_is_read_once_and_committed_through_the_log(scene: Scene, stream: Any) -> None:
    topic = scene.topic(3, 100)
    s = stream(topic)
    query = s.start(max_records_per_batch=120)
    s.wait_stable(99, 3, query)
    assert sorted(s.rows) == everything(3, 100)
    assert all(len(batch) <= 120 for batch in s.batches)
    scene.publish(topic, 3, 10)
    s.wait_stable(109, 3, query)
    assert sorted(s.rows) == everything(3, 110)
    query.stop()
    wait_until(lambda: set(s.holders().values()) == {None}, 60, "the query's leases are released when it ends")


def test_columns_headers_and_transactions(scene: Scene, stream: Any, spark: SparkSession) -> None:
    topic = scene.topic(1)
    producer = Producer({"bootstrap.servers": scene.bootstrap, "transactional.id": scene.group})
    producer.init_transactions()
    for commit, value in ((True, b"kept"), (False, b"aborted"), (True, None)):
        producer.begin_transaction()
        producer.produce(topic, value, key=b"k", headers=[("h", b"1"), ("h", None)], timestamp=1_356_998_400_123)
        producer.flush(20)
        (producer.commit_transaction if commit else producer.abort_transaction)()
    rows: list[Any] = []
    s = stream(topic)

    def keep(df: DataFrame, number: int) -> None:
        rows.extend(df.collect())
        assert leases_of(df) == [(topic, 0, rows[0].epoch, 4)]
        assert df.rdd.getNumPartitions() == 3

    query = s.start(keep, include_headers="true", min_partitions=3)
    s.wait_stable(5, 1, query)
    assert [(row.offset, row.key, row.value) for row in rows] == [(0, b"k", b"kept"), (4, b"k", None)]
    [epoch] = {lease.epoch for lease in s.watcher.world.leases()}
    row = rows[0]
    assert (row.topic, row.partition, row.epoch) == (topic, 0, epoch)
    assert row.timestamp.timestamp() == 1_356_998_400.123
    assert [(h.key, h.value) for h in row.headers] == [("h", b"1"), ("h", None)]
    assert row.timestampType == 0
    assert dict(s.frame(include_headers="true").dtypes)["timestamp"] == "timestamp"


def test_a_timestamp_in_nanoseconds_is_null_and_stops_nothing(scene: Scene, stream: Any) -> None:
    topic = scene.topic(1, **ANY_TIME)
    publish_at(scene, topic, 1_000, NANOSECONDS)
    rows: list[Any] = []
    s = stream(topic)
    query = s.start(lambda df, number: rows.extend(df.collect()), include_headers="true")
    s.wait_stable(1, 1, query)
    assert [(row.offset, row.timestamp is None, row.headers) for row in rows] == [(0, False, None), (1, True, None)]


def test_when_checkpoint_and_log_disagree_the_log_wins(scene: Scene, stream: Any, tmp_path: Path) -> None:
    topic = scene.topic(2, 50)
    s = stream(topic)
    query = s.start()
    s.wait_stable(49, 2, query)
    query.stop()
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "stale")

    # Without a checkpoint: continues at the log's position.
    s.rows.clear()
    scene.publish(topic, 2, 50)
    query = s.start(checkpoint="none")
    s.wait_stable(99, 2, query)
    query.stop()
    assert sorted(s.rows) == everything(2, 100, 50)

    # An older checkpoint: nothing is repeated.
    s.rows.clear()
    scene.publish(topic, 2, 20)
    query = s.start(checkpoint="stale")
    s.wait_stable(119, 2, query)
    query.stop()
    assert sorted(s.rows) == everything(2, 120, 100)

    # A checkpoint ahead of the log, as the group was set back: those messages are repeated.
    s.rows.clear()
    with Admin(scene.bootstrap, topic=scene.coordination).pause(scene.group, expires_in=60) as pause:
        pause.wait_released(timeout=30)
        pause.reposition({(topic, 0): 110, (topic, 1): 115})
    wait_until(lambda: s.stables() == {0: 109, 1: 114}, 60, "the group is set back")
    query = s.start(checkpoint="stale")
    s.wait_stable(119, 2, query)
    assert sorted(s.rows) == [(0, offset) for offset in range(110, 120)] + [(1, offset) for offset in range(115, 120)]


@pytest.mark.campaign
def test_a_batch_that_failed_comes_again(scene: Scene, stream: Any) -> None:
    """Restarted with its checkpoint, Spark asks for the stored batch: it is empty, and the next has everything."""
    topic = scene.topic(2, 40)
    s = stream(topic)

    def fail(df: DataFrame, number: int) -> None:
        s.see(df, number)
        raise ZeroDivisionError("as planned")

    query = s.start(fail, max_records_per_batch=60)
    with pytest.raises(StreamingQueryException, match="as planned"):
        query.awaitTermination(60)
    assert set(s.stables().values()) <= {-1, None}, "nothing is done"
    assert 40 <= len(s.rows) <= 60, "of one partition, or of both where both were claimed by then"
    s.batches, s.rows = [], []
    scene.publish(topic, 2, 10)
    query = s.start(max_records_per_batch=60)
    s.wait_stable(49, 2, query)
    assert s.batches[0] == []
    assert sorted(s.rows) == everything(2, 50)


def test_two_queries_share_the_partitions_and_one_takes_over(scene: Scene, stream: Any) -> None:
    topic = scene.topic(4, 20)
    s = stream(topic)
    before = source_workers()
    one = s.start(checkpoint="one", client_id="one")
    wait_until(lambda: "one" in s.holders().values(), 180, "the first query holds partitions")
    [worker] = source_workers() - before
    two = s.start(checkpoint="two", client_id="two")
    wait_until(lambda: sorted(map(str, s.holders().values())) == ["one"] * 2 + ["two"] * 2, 180, "two each")
    scene.publish(topic, 4, 20)
    s.wait_stable(39, 4, one)
    # Kill Spark's worker of this query, as the kernel does when memory runs out.
    os.kill(worker, signal.SIGKILL)
    scene.publish(topic, 4, 20)
    s.wait_stable(59, 4, two)
    assert set(s.holders().values()) == {"two"}
    assert sorted(set(s.rows)) == everything(4, 60)
    wait_until(lambda: one.exception() is not None, 90, "the query whose worker is gone says so")


def source_workers() -> set[int]:
    """Processes that our Spark JVM has started for stream sources."""
    while True:
        with suppress(OSError):  # a thread ended meanwhile
            children = {pid for jvm in children_of(os.getpid()) for pid in children_of(jvm)}
            return {pid for pid in children if b"streaming_source_runner" in command_of(pid)}


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_lease_lost_during_a_batch_is_refused_by_the_sink_and_not_committed(
    scene: Scene, stream: Any, tmp_path: Path
) -> None:
    topic = scene.topic(1, 10)
    sink = SqliteSink(tmp_path / "results.db")
    reached, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    s = stream(topic)

    def slow(df: DataFrame, number: int) -> None:
        leases = leases_of(df)
        reached.set()
        go_on.wait(60)
        try:
            with sink.transaction(scene.group, leases):
                pass
        except StaleEpochError as error:
            errors.append(error)
            raise

    before = source_workers()
    query = s.start(slow, heartbeat_interval=2.0)  # no lease may end while a busy machine runs Spark's first job
    s.wait_for(reached, query)
    # The member stops for longer than its lease, as on a swapping machine; the batch continues.
    [worker] = source_workers() - before
    os.kill(worker, signal.SIGSTOP)
    lease = scene.member("other").claim(topic, 0, timeout=20)
    with sink.transaction(scene.group, [(topic, 0, lease.epoch, 4)]) as tx:
        assert tx.last_offset(topic, 0) == -1
    os.kill(worker, signal.SIGCONT)
    go_on.set()
    with pytest.raises(StreamingQueryException, match="newer than ours"):
        query.awaitTermination(60)
    assert len(errors) == 1
    assert sink.progress(scene.group)[topic, 0].last_offset == 4
    assert set(s.stables().values()) <= {-1, None}, "the batch is not committed"
    sink.close()


def test_offsets_that_retention_took_are_not_skipped_silently(scene: Scene, stream: Any) -> None:
    topic = scene.topic(1, 30)
    admin = AdminClient({"bootstrap.servers": scene.bootstrap})
    s = stream(topic)

    def late(df: DataFrame, number: int) -> None:
        [future] = admin.delete_records([TopicPartition(topic, 0, 10)]).values()
        future.result(20)
        s.see(df, number)

    query = s.start(late)
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(60)
    assert "not in the log any more" in str(caught.value)
    assert s.rows == []
    assert set(s.stables().values()) <= {-1, None}


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("topics", "", "needs the option 'topics'"),
        ("max_records_per_batch", "many", "must be a whole number, at least 1"),
        ("start", "yesterday", "must be earliest, latest or a time"),
        ("startingOffsets", "earliest", "'startingoffsets' is an option of Spark's own Kafka source.* has start"),
        ("subscribe", "flights", "'subscribe' is an option of Spark's own Kafka source.* has topics"),
        ("kafka.group.id", "mine", "has group_id"),
        ("topic", "flights", "has no option 'topic'; did you mean 'topics'"),
        ("position_lost", "skip", "must be raise or leave"),
        ("kafka.auto.offset.reset", "earliest", "config may not set 'auto.offset.reset'"),
        ("policy", "mine", "policy must be one of balanced, greedy"),
        ("include_headers", "perhaps", "must be true or false"),
    ],
)
def test_options_that_cannot_work_are_named(scene: Scene, stream: Any, option: str, value: str, says: str) -> None:
    with pytest.raises(PySparkException, match=says):
        stream("flights").frame(**{option: value}).isStreaming  # noqa: B018


def test_a_batch_whose_lease_was_lost_is_not_committed_though_it_went_well(scene: Scene, stream: Any) -> None:
    """Without a fenced sink: what the query wrote stays, but by the log it is not done."""
    topic = scene.topic(1, 10)
    reached, go_on = threading.Event(), threading.Event()
    s = stream(topic)

    def slow(df: DataFrame, number: int) -> None:
        s.see(df, number)
        reached.set()
        go_on.wait(60)

    before = source_workers()
    query = s.start(slow, heartbeat_interval=2.0)
    s.wait_for(reached, query)
    [worker] = source_workers() - before
    os.kill(worker, signal.SIGSTOP)
    lease = scene.member("other").claim(topic, 0, timeout=20)
    os.kill(worker, signal.SIGCONT)
    go_on.set()
    wait_until(lambda: query.lastProgress is not None, 180, "Spark's batch is over")
    lease.release(3)
    s.wait_stable(9, 1, query)
    assert s.rows == everything(1, 10) + everything(1, 10, 4)


@pytest.mark.skipif(IS_TOLD_OF_AVAILABLE_NOW, reason="from Spark 4.2 on a Python source is told of availableNow")
def test_before_spark_4_2_available_now_delivers_nothing(scene: Scene, stream: Any) -> None:
    """Its first question comes when this member has its leases: at once after a kill, as the same name takes over."""
    topic = scene.topic(1, 100)
    s = stream(topic)
    killed = scene.member("query")
    _kept = killed.consumer([topic])
    wait_until(lambda: s.holders() == {0: "query"}, 60, "it has held the partition")
    killed.terminate()
    writer = s.frame().writeStream.trigger(availableNow=True).option("checkpointLocation", str(s.folder / "c"))
    query = begun(writer.foreachBatch(s.see).start)
    s.queries.append(query)
    assert query.awaitTermination(60)
    assert s.rows == [], "none of it would ever be committed"


def test_available_now_reads_what_is_there_commits_it_and_ends(scene: Scene, stream: Any) -> None:
    reason = "before Spark 4.2 a Python source can't know of availableNow"
    pytest.importorskip("pyspark.sql.streaming.datasource", reason=reason)
    topic = scene.topic(3, 100)
    s = stream(topic)

    def see(df: DataFrame, number: int) -> None:
        if number == 0:
            scene.publish(topic, 3, 10)
        s.see(df, number)

    def run() -> StreamingQuery:
        writer = s.frame(max_records_per_batch=120).writeStream.trigger(availableNow=True)
        query: StreamingQuery = begun(
            writer.option("checkpointLocation", str(s.folder / "checkpoint")).foreachBatch(see).start
        )
        s.queries.append(query)
        assert query.awaitTermination(60)
        assert query.exception() is None
        return query

    query = run()
    assert sorted(s.rows) == everything(3, 100), "what came later is left"
    assert all(len(batch) <= 120 for batch in s.batches)
    s.wait_stable(99, 3)
    assert query.lastProgress is not None
    ends = json.loads(query.lastProgress.sources[0].latestOffset)
    assert ends == {topic: {"0": 110, "1": 110, "2": 110}}
    run()
    assert sorted(s.rows) == everything(3, 110)
    s.wait_stable(109, 3)
    s.batches.clear()
    run()
    assert not any(s.batches), "with nothing new it ends at once"


# Messages as rows of the stream source: values outside a column's type are null, as in Spark's Kafka source.


#: librdkafka's timestamp types.
NONE, CREATED, APPENDED = 0, 1, 2


class Stored:
    """A message of the log."""

    def __init__(self, stamp: tuple[int, int], headers: object = None, key: bytes | None = b"k") -> None:
        self.stamp, self.given, self.bytes = stamp, headers, key

    def key(self) -> bytes | None:
        return self.bytes

    def value(self) -> bytes | None:
        return self.bytes

    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        return self.stamp

    def headers(self) -> Any:
        return self.given


def rows(*messages: Stored, headers: bool = True) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = to_arrow(messages, "t", 3, 5, headers=headers).to_pylist()  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("stamp", [1764181740 * 10**9, 1764181740 * 10**6, 2**63 - 1, -(2**63), MOST_STAMP_MS + 1])
def test_a_timestamp_that_spark_cannot_represent_is_null_and_its_type_stays(stamp: int) -> None:
    good, wrong = rows(Stored((APPENDED, 1_000)), Stored((CREATED, stamp)))
    assert (good["timestamp"], good["timestampType"]) == (datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), 1)
    assert (wrong["timestamp"], wrong["timestampType"]) == (None, 0)


def test_the_outermost_timestamps_are_moments_in_every_time_zone() -> None:
    assert is_moment(LEAST_STAMP_MS)
    assert is_moment(MOST_STAMP_MS)
    assert not is_moment(LEAST_STAMP_MS - 1)
    assert not is_moment(MOST_STAMP_MS + 1)
    first, last = rows(Stored((CREATED, LEAST_STAMP_MS)), Stored((CREATED, MOST_STAMP_MS)))
    assert first["timestamp"] == datetime(1, 1, 2, tzinfo=UTC)
    assert last["timestamp"] == datetime(9999, 12, 30, 23, 59, 59, 999_000, tzinfo=UTC)


def test_what_is_not_there_is_null() -> None:
    [row] = rows(Stored((NONE, -1), None, None))
    assert (row["key"], row["value"], row["timestamp"], row["timestampType"]) == (None, None, None, -1)
    assert row["headers"] is None, "not an empty list: Spark's own source has null, too"
    assert [row["timestamp"] for row in rows(Stored((CREATED, -1_000)))] == [
        datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)
    ]


def test_headers_may_have_no_value() -> None:
    [row] = rows(Stored((CREATED, 0), [("h", b"1"), ("h", None)]))
    assert row["headers"] == [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]
