"""Marshal.metrics(): counters and gauges."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any, cast

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Metric
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from kafka_marshal import Batches, CheckpointPolicy, Group, Marshal, Message, Metrics, Retry
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.admin.pause import Pause
from kafka_marshal.engine.figures import BUCKETS_S, Histogram
from kafka_marshal.metrics import MarshalCollector, instrument, trace_hooks
from kafka_marshal.metrics.rows import CATALOGUE, CheckpointMetrics, PartitionMetrics, RecordCount
from rationalizer import (
    ClaimingPartition,
    ClaimingShare,
    Heartbeat,
    Record,
    ReleasingPartition,
    SettlingMessages,
    encode,
)
from tests.client.conftest import wait_until
from tests.faults.stories import GROUP, HI, TOPIC, member, memory_cluster
from tests.metrics.conftest import MESSAGES, PARTITIONS, get

ALL = PARTITIONS * MESSAGES


def counts(marshal: Marshal) -> tuple[int, int]:
    """Messages fetched, and done."""
    found = marshal.metrics().messages
    return sum(one.consumed for one in found), sum(one.processed for one in found)


def partition(marshal: Marshal, number: int = 0) -> PartitionMetrics:
    return next(one for one in marshal.metrics().partitions if one.partition == number)


def held(marshal: Marshal, count: int = PARTITIONS) -> None:
    wait_until(lambda: sum(one.lag is not None for one in marshal.metrics().partitions) == count)


def test_a_member_without_a_consumer(marshal: Marshal) -> None:
    found = marshal.metrics()
    assert (found.group_id, found.client_id) == (GROUP, "a")
    assert found.ready
    assert not (found.needs_restart or found.paused)
    assert (found.leases, found.lease_remaining_seconds, found.partitions, found.messages) == (0, None, (), ())
    assert (found.lag, found.lag_seconds, found.log_behind_records, found.replica_alarms) == (0, 0.0, 0, 0)
    assert 0 <= found.turned_ago_seconds < 1.5


def test_a_loop_is_counted_message_by_message(marshal: Marshal) -> None:
    """Although the engine learns of it only with the next heartbeat."""
    with marshal.consumer([TOPIC]) as consumer:
        held(marshal)
        done = 0
        for number, _ in enumerate(islice(consumer, ALL)):
            consumed, now_done = counts(marshal)
            assert consumed >= number + 1
            assert now_done == number
            assert now_done >= done, "a counter never goes back"
            done = now_done
            found = marshal.metrics()
            assert found.lag == ALL - number
            assert sum(one.in_hand for one in found.partitions) == 1
            assert sum(one.in_hand + one.buffered for one in found.partitions) <= ALL - number


def test_what_is_done_one_by_one_and_out_of_order_leaves_a_lag(marshal: Marshal) -> None:
    with marshal.consumer([TOPIC]) as consumer:
        messages = consumer.consume(ALL, 10)
        assert counts(marshal) == (ALL, 0)
        assert marshal.metrics().lag == ALL
        first = next(m for m in messages if (m.partition(), m.offset()) == (0, 0))
        for message in messages:
            if message is not first:
                consumer.done(message)
        wait_until(lambda: counts(marshal) == (ALL, ALL - 1))
        found = partition(marshal)
        assert (found.offset, found.log_end, found.lag, found.in_hand) == (0, MESSAGES, 1, 1)
        assert found.lag_seconds is not None
        assert found.lag_seconds > 0
        assert partition(marshal, 1)[2:6] == (MESSAGES, MESSAGES, 0, 0.0)
        consumer.done(first)
        wait_until(lambda: marshal.metrics().lag == 0)
        assert marshal.metrics().lag_seconds == 0.0


def test_batches_are_counted_when_they_are_done(marshal: Marshal) -> None:
    with marshal.consumer([TOPIC]) as consumer:
        batch = next(iter(consumer.batches(20, 0.5)))
        assert counts(marshal)[1] == 0
        batch.done()
        wait_until(lambda: counts(marshal)[1] == len(batch))


def test_at_most_once_what_was_delivered_is_processed(marshal: Marshal) -> None:
    with marshal.consumer([TOPIC], delivery="at-most-once", batch_size=10) as consumer:
        assert len(consumer.consume(ALL, 10)) == ALL
        assert consumer.poll(0.1) is None
        wait_until(lambda: counts(marshal) == (ALL, ALL))
        wait_until(lambda: marshal.metrics().lag == 0)


def test_counters_outlive_their_consumer_and_the_partition(marshal: Marshal) -> None:
    for _ in range(2):
        with marshal.consumer([TOPIC]) as consumer:
            for message in islice(consumer, 10):
                assert message is not None
    assert counts(marshal)[1] == 18, "one was in hand each time"
    before = counts(marshal)
    assert marshal.metrics().partitions == ()
    marshal.close()
    assert counts(marshal) == before
    assert not marshal.metrics().ready


def test_what_is_done_under_a_lease_that_is_over_is_not_processed(marshal: Marshal) -> None:
    with marshal.consumer([TOPIC], handler_timeout=0.2) as consumer:
        kept = consumer.poll(10)
        assert kept is not None
        wait_until(lambda: "handler_timeout" in str(marshal.health()) or marshal.metrics().leases < PARTITIONS)
        consumer.done(kept)
        wait_until(lambda: marshal.metrics().done_too_late == 1)
        assert counts(marshal)[1] == 0


@pytest.mark.parametrize("age_s", [0, 90])
def test_the_time_lag_is_the_age_of_the_next_message_that_is_not_done(age_s: int) -> None:
    cluster = memory_cluster(1, 0)
    for number in range(3):
        cluster.broker.produce(TOPIC, 0, b"", timestamp_ms=int((time.time() - age_s + number / 10) * 1000))
    marshal = member(cluster)
    with marshal, marshal.consumer([TOPIC]) as consumer:
        seen = []
        for _ in range(3):
            message = consumer.poll(10)
            assert message is not None
            found = partition(marshal)
            assert found.lag_seconds is not None
            stamp_s = message.timestamp()[1] / 1000
            assert found.lag_seconds == pytest.approx(max(0.0, time.time() - stamp_s), abs=0.5)
            seen.append(found.lag_seconds)
            consumer.done(message)
            consumer.assignment()  # reports progress to the engine
        assert consumer.poll(0.2) is None
        assert seen[0] >= seen[-1] - 0.5
        wait_until(lambda: partition(marshal).lag_seconds == 0.0)


def test_what_waits_to_be_fetched_gets_older(marshal: Marshal, cluster: MemoryCluster) -> None:
    """Nothing polls, so nothing is fetched: its age counts from when it was first seen."""
    with marshal.consumer([TOPIC]) as consumer:
        held(marshal)
        first = partition(marshal).lag_seconds
        assert first is not None
        wait_until(lambda: (partition(marshal).lag_seconds or 0.0) > first + 0.1)
        assert marshal.metrics().lag == ALL
        assert consumer.poll(10) is not None


def test_leases_and_how_long_they_are_proven(marshal: Marshal) -> None:
    with marshal.consumer([TOPIC]):
        held(marshal)
        found = marshal.metrics()
        assert (found.leases, found.members) == (PARTITIONS, 1)
        assert found.lease_remaining_seconds is not None
        assert 0 < found.lease_remaining_seconds <= 2 * HI / 1000
        assert {0 < one.lease_remaining_seconds <= 2 * HI / 1000 for one in found.partitions} == {True}
        assert found.claim_seconds.count == PARTITIONS
        assert found.handover_gap_seconds.count == 0, "nobody had them before"


def test_a_handover_gap_is_from_the_release_to_the_claim(cluster: MemoryCluster) -> None:
    first, second = member(cluster, "a"), member(cluster, "b")
    with second:
        with first, first.consumer([TOPIC]):
            held(first)
        with second.consumer([TOPIC]):
            wait_until(lambda: second.metrics().handover_gap_seconds.count == PARTITIONS)
            assert 0 < second.metrics().handover_gap_seconds.total < 10


def test_records_are_counted_by_type_and_outcome(cluster: MemoryCluster) -> None:
    first, second = member(cluster, "a"), member(cluster, "b")
    with first, second, first.consumer([TOPIC]):
        held(first)
        claims = RecordCount("ClaimingPartition", "OK", PARTITIONS)
        wait_until(lambda: claims in second.metrics().records)
        wait_until(lambda: any(one.type == "HeartbeatBatch" for one in second.metrics().records))
        assert second.metrics().members == 1
        assert second.metrics().log_behind_records == 0


class _Handling:
    """Handlers that fail, hang or count, depending on the message."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.done = 0

    def __call__(self, message: Message) -> None:
        number = int(message.value() or b"")
        if number == 3:
            raise ValueError(number)
        if number == 7:
            self.go_on.wait(20)
        self.done += 1


def test_run_counts_failures_retries_dead_letters_and_times_handlers(cluster: MemoryCluster) -> None:
    cluster.broker.create_topic("dead", 1)
    handle, marshal = _Handling(), member(cluster)
    with marshal, marshal.consumer([TOPIC]) as consumer:
        options: dict[str, Any] = {
            "retry": Retry(attempts=3, backoff=(0.01, 0.02)),
            "dead_letters": "dead",
            "hooks": marshal.timing(),
            "order": "partition",
        }
        running = threading.Thread(target=lambda: consumer.run(handle, **options))
        running.start()
        wait_until(lambda: marshal.metrics().handlers_running == PARTITIONS)
        wait_until(lambda: len(marshal.health().held_back) == PARTITIONS)
        found = marshal.metrics()
        assert (found.held_back, found.held_back_messages) == (PARTITIONS, ALL - 7 * PARTITIONS)
        assert {one.held_back for one in found.partitions} == {True}
        handle.go_on.set()
        wait_until(lambda: counts(marshal) == (ALL, ALL))
        marshal.stop()
        running.join(20)
        found = marshal.metrics()
        assert [(x.topic, x.error, x.count) for x in found.failures] == [(TOPIC, "ValueError", 3 * PARTITIONS)]
        assert [(x.topic, x.count) for x in found.retries] == [(TOPIC, 2 * PARTITIONS)]
        assert [(x.topic, x.count) for x in found.dead_letters] == [(TOPIC, PARTITIONS)]
        assert [(x.topic, x.error, x.seconds.count) for x in found.processing] == [
            (TOPIC, "", ALL - PARTITIONS),
            (TOPIC, "ValueError", 3 * PARTITIONS),
        ]
        assert found.processing[0].seconds.total > 1.0, "two waited for a second at least"


def test_ranges_have_a_lag_and_no_messages(marshal: Marshal) -> None:
    with marshal.ranges([TOPIC]) as consumer:
        found = consumer.take(10, timeout=10)
        assert found
        wait_until(lambda: marshal.metrics().lag == ALL)
        assert marshal.metrics().messages == ()


def test_it_waits_for_no_lock(marshal: Marshal) -> None:
    """While another thread holds the engine's lock."""
    with marshal.consumer([TOPIC]):
        held(marshal)
        with marshal._driver.condition:
            answers: list[Metrics] = []
            asking = threading.Thread(target=lambda: answers.append(marshal.metrics()))
            asking.start()
            asking.join(5)
            assert len(answers) == 1
            assert answers[0].leases == PARTITIONS


def test_a_histogram() -> None:
    made = Histogram()
    for seconds in (0.0, 0.005, 0.0051, 10.0, 11.0):
        made.observe(seconds)
    found = made.read()
    assert found.bounds == BUCKETS_S
    assert (found.counts[0], found.counts[1], found.counts[-2], found.counts[-1]) == (2, 1, 1, 1)
    assert found.count == 5
    assert found.total == pytest.approx(21.0101)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_the_checkpoints_of_a_member(marshal: Marshal) -> None:
    restored: list[str] = []
    assert marshal.metrics().checkpoints is None
    with marshal.consumer(
        [TOPIC],
        mode=Group(),
        start="earliest",
        checkpoints=CheckpointPolicy(
            every=0.1,
            timeout=5.0,
            drain=1.0,
            on_checkpoint=lambda checkpoint: None,
            on_restore=lambda restore: restored.append(restore.why),
        ),
    ) as consumer:
        message = consumer.poll(5)
        assert message is not None
        consumer.done(message)

        def read() -> CheckpointMetrics:
            found = marshal.metrics().checkpoints
            assert found is not None
            return found

        wait_until(lambda: dict(read().outcomes).get("complete", 0) > 0)
        found = read()
        assert dict(found.restores) == {"joined": PARTITIONS}
        assert found.restore_seconds.count == len(restored)
        assert found.save_seconds.count >= 1
        assert found.age_seconds is not None
        assert found.oldest_cut_seconds is not None
        assert 0 <= found.drain_seconds <= found.drain_seconds_max


def test_open_messages_of_held_and_shared_partitions(marshal: Marshal, cluster: MemoryCluster) -> None:
    """Left by another member: in partition 0 two are set aside; partition 1 is shared, with a batch and a free one."""
    raw = ("b/1", "b", GROUP)

    def append(record: Record) -> int:
        return cluster.broker.produce("__marshal", 0, encode(record))

    epoch = append(ClaimingPartition(*raw, TOPIC, 0, HI))
    append(SettlingMessages(*raw, TOPIC, 0, epoch, 99, parked=((1, 1, 5, "ValueError"), (2, 2, 5, "KeyError"))))
    append(Heartbeat(*raw, TOPIC, 0, epoch, MESSAGES - 1))
    append(ReleasingPartition(*raw, TOPIC, 0, epoch, None))
    share = append(ClaimingShare(*raw, TOPIC, 1, 600_000, start=0))
    append(SettlingMessages(*raw, TOPIC, 1, share, 99, take=(3, MESSAGES - 1, False)))
    append(SettlingMessages(*raw, TOPIC, 1, share, 99, open=((0, 0, None, 1),)))
    with marshal.consumer([TOPIC]):
        wait_until(lambda: any(one.partition == 0 for one in marshal.metrics().partitions))
        found = partition(marshal)
        assert (found.parked, found.waiting, found.acquired, found.shared) == (2, 0, 0, False)
    with marshal.consumer([TOPIC], mode=Batches()):
        wait_until(lambda: any(one.partition == 1 for one in marshal.metrics().partitions))
        found = partition(marshal, 1)
        assert (found.parked, found.waiting + found.acquired, found.shared) == (0, 3, True)


def test_takes_of_batches_are_counted_by_what_they_gave() -> None:
    """What a program has had for handler_timeout comes again."""
    cluster = memory_cluster(1, 40)
    with member(cluster) as marshal, marshal.consumer([TOPIC], mode=Batches(), handler_timeout=0.5) as consumer:
        batches = consumer.batches(max_messages=40, timeout=0.2)
        batch = next(batches)
        found = {one.outcome: one.count for one in marshal.metrics().acquires}
        assert (found["new"] >= 1, found["again"], marshal.metrics().redelivered_messages) == (True, 0, 0)
        size = len(batch)
        again = next(each for each in batches if each.delivery_count == 2)
        wait_until(lambda: marshal.metrics().redelivered_messages > 0)
        found = {one.outcome: one.count for one in marshal.metrics().acquires}
        assert found["again"] >= 1
        assert 0 < marshal.metrics().redelivered_messages <= size
        again.done()


def test_what_does_not_work_at_once_says_why(
    marshal: Marshal, cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """An absent topic, `async for` over a consumer whose calls block, a pause that nothing begins."""
    with marshal.consumer([TOPIC, "flihgts"]) as consumer:
        wait_until(lambda: not marshal.health().ok)
        (problem,) = marshal.health().problems
        assert problem.startswith("the cluster has no topic flihgts: nothing of it is read.")
        with pytest.raises(TypeError, match=r"Consumer is not for `async for` .* kafka_marshal.aio"):
            asyncio.run(_loop(consumer))
        cluster.broker.create_topic("flihgts", 1)
        wait_until(lambda: marshal.health().ok)
    with pytest.raises(TypeError, match=r"Marshal is not for .* kafka_marshal.aio"):
        asyncio.run(_enter(marshal))
    Pause(cast("Any", None), GROUP, "admin", 10.0)
    gc.collect()
    assert f"group '{GROUP}' is not paused: nothing has begun this Pause" in caplog.text


async def _loop(consumer: Any) -> None:
    async for _ in consumer:
        pass


async def _enter(marshal: Any) -> None:
    async with marshal:
        pass


# -- The text that Prometheus scrapes: names, types, and the values of Marshal.metrics() --------------------------


#: By OpenTelemetry's conventions where they exist; users' dashboards and alerts depend on them.
NAMES = {
    "kafka_consumer_group_lag",
    "kafka_consumer_group_members",
    "kafka_consumer_group_offset",
    "kafka_marshal_buffered_messages",
    "kafka_marshal_checkpoint_age_seconds",
    "kafka_marshal_checkpoints_total",
    "kafka_marshal_drain_seconds",
    "kafka_marshal_drain_seconds_max",
    "kafka_marshal_oldest_cut_seconds",
    "kafka_marshal_restore_seconds",
    "kafka_marshal_restores_total",
    "kafka_marshal_save_seconds",
    "kafka_marshal_claim_duration_seconds",
    "kafka_marshal_dead_letters_total",
    "kafka_marshal_done_too_late_total",
    "kafka_marshal_handler_failures_total",
    "kafka_marshal_handlers_running",
    "kafka_marshal_rate_limited",
    "kafka_marshal_runs_failing",
    "kafka_marshal_stuck_partitions",
    "kafka_marshal_handover_gap_seconds",
    "kafka_marshal_held_back_partitions",
    "kafka_marshal_in_hand_messages",
    "kafka_marshal_lease_remaining_seconds",
    "kafka_marshal_leases",
    "kafka_marshal_log_behind_records",
    "kafka_marshal_needs_restart",
    "kafka_marshal_held_back_messages",
    "kafka_marshal_hot_key_share",
    "kafka_marshal_shared_read_bytes",
    "kafka_marshal_shared_reads_total",
    "kafka_marshal_open_messages",
    "kafka_marshal_parked_messages",
    "kafka_marshal_shares",
    "kafka_marshal_acquires_total",
    "kafka_marshal_settled_messages_total",
    "kafka_marshal_redone_messages_total",
    "kafka_marshal_redelivered_messages_total",
    "kafka_marshal_paused",
    "kafka_marshal_processed_messages_total",
    "kafka_marshal_ready",
    "kafka_marshal_records_total",
    "kafka_marshal_replica_alarms_total",
    "kafka_marshal_log_records",
    "kafka_marshal_log_oldest_age_seconds",
    "kafka_marshal_log_not_pruned",
    "kafka_marshal_retries_total",
    "kafka_marshal_time_lag_seconds",
    "kafka_marshal_transaction_duration_seconds",
    "kafka_marshal_transactions_total",
    "kafka_marshal_transactions_waiting",
    "kafka_marshal_turned_ago_seconds",
    "messaging_client_consumed_messages_total",
    "messaging_process_duration_seconds",
}


def test_the_names() -> None:
    assert {metric.prometheus for metric in CATALOGUE} == NAMES
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert re.fullmatch(r"[a-z][a-z0-9_.]*", metric.name)
        assert metric.help.endswith(".")
        assert metric.name.startswith(("messaging.", "kafka.consumer_group.", "kafka_marshal."))


def scraped(marshal: Marshal, accept: str = "") -> dict[str, Family]:
    page = get(marshal.serve(0), "/metrics", Accept=accept)
    assert page.status == 200
    read = parse_openmetrics if "openmetrics" in page.headers["Content-Type"] else parse
    return {family.name: family for family in read(page.text)}


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_it_is_parsed_and_holds_what_metrics_says(marshal: Marshal, accept: str) -> None:
    with marshal.consumer([TOPIC]) as consumer:
        wait_until(lambda: sum(one.lag is not None for one in marshal.metrics().partitions) == PARTITIONS)
        for _ in islice(consumer, 20):
            pass
        found, now = scraped(marshal, accept), marshal.metrics()
        labels = {"group": GROUP, "client_id": "a"}

        def of(name: str) -> dict[str, float]:
            return {sample.labels["partition"]: sample.value for sample in found[name].samples}

        assert of("kafka_consumer_group_lag") == {str(one.partition): one.lag for one in now.partitions}
        assert found["kafka_marshal_leases"].samples[0].value == PARTITIONS
        assert found["kafka_marshal_leases"].samples[0].labels == labels
        consumed = found["messaging_client_consumed_messages"]
        assert consumed.type == "counter"
        assert sum(s.value for s in consumed.samples) == sum(one.consumed for one in now.messages)
        assert consumed.samples[0].labels.keys() == {
            "messaging_system",
            "messaging_operation_name",
            "messaging_consumer_group_name",
            "messaging_client_id",
            "messaging_destination_name",
            "messaging_destination_partition_id",
        }
        claims = {s.name.rpartition("_")[2]: s.value for s in found["kafka_marshal_claim_duration_seconds"].samples}
        assert claims["count"] == claims["bucket"] == PARTITIONS
        records = {(s.labels["type"], s.labels["outcome"]) for s in found["kafka_marshal_records"].samples}
        assert ("ClaimingPartition", "OK") in records
        series = {sample.name for family in found.values() for sample in family.samples}
        assert series <= {name for metric in CATALOGUE for name in metric.series}


def test_several_marshals_in_a_registry_of_one_s_own(cluster: MemoryCluster) -> None:
    first, second = member(cluster, "a"), member(cluster, "b")
    with first, second:
        registry = CollectorRegistry()
        registry.register(MarshalCollector(first, second))
        families = {family.name: family for family in parse(generate_latest(registry).decode())}
        assert {sample.labels["client_id"] for sample in families["kafka_marshal_ready"].samples} == {"a", "b"}


def test_registering_twice_is_refused(marshal: Marshal) -> None:
    registry = CollectorRegistry()
    registry.register(MarshalCollector(marshal))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(MarshalCollector(marshal))


# -- OpenTelemetry: instruments that observe the same figures, and spans that continue a message's trace ----------


TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
PRODUCER = 0x00F067AA0BA902B7
TRACEPARENT = f"00-{TRACE:032x}-{PRODUCER:016x}-01".encode()


def collected(reader: InMemoryMetricReader) -> dict[str, Metric]:
    data = reader.get_metrics_data()
    assert data is not None
    return {each.name: each for r in data.resource_metrics for s in r.scope_metrics for each in s.metrics}


def test_instruments_observe_what_metrics_says(marshal: Marshal) -> None:
    reader = InMemoryMetricReader()
    instrument(marshal, MeterProvider([reader]))
    with marshal.consumer([TOPIC]) as consumer:
        wait_until(lambda: sum(one.lag is not None for one in marshal.metrics().partitions) == PARTITIONS)
        assert consumer.poll(10) is not None
        found, now = collected(reader), marshal.metrics()
    lags = {point.attributes["partition"]: point.value for point in found["kafka.consumer_group.lag"].data.data_points}  # type: ignore[union-attr,index]
    assert lags == {str(one.partition): one.lag for one in now.partitions}
    assert found["kafka_marshal.leases"].data.data_points[0].value == PARTITIONS  # type: ignore[union-attr]
    consumed = found["messaging.client.consumed.messages"]
    assert consumed.unit == "{message}"
    assert consumed.data.is_monotonic  # type: ignore[union-attr]
    assert dict(consumed.data.data_points[0].attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "poll",
        "messaging.consumer.group.name": GROUP,
        "messaging.client.id": "a",
        "messaging.destination.name": TOPIC,
        "messaging.destination.partition.id": "0",
    }
    assert found["kafka_marshal.claim_duration.count"].data.data_points[0].value == PARTITIONS  # type: ignore[union-attr]
    known = {each.name for each in CATALOGUE} | {
        f"{each.name}.{part}" for each in CATALOGUE if each.kind == "histogram" for part in ("sum", "count")
    }
    assert found.keys() <= known


class Traced:
    """The spans of a run with trace_hooks."""

    def __init__(self, **options: Any) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.hooks = trace_hooks(provider, MeterProvider([self.reader], shutdown_on_exit=False), **options)
        #: The spans that were current in handlers, by the message's value.
        self.current: dict[str, trace.SpanContext] = {}

    def note(self, message: Message) -> None:
        name = (message.value() or b"").decode()
        self.current.setdefault(name, trace.get_current_span().get_span_context())
        if name == "bad":
            raise ValueError("no good")

    def run(self, handle: Callable[[Message], Any], spans: int) -> dict[str, list[ReadableSpan]]:
        """By the message's offset."""
        cluster = memory_cluster(1, 0)
        cluster.broker.create_topic("dead", 1)
        headers = {"traced": [("traceparent", TRACEPARENT)], "plain": [], "bad": [("TraceParent", TRACEPARENT)]}
        for name, carried in headers.items():
            cluster.broker.produce(TOPIC, 0, name.encode(), headers=carried)
        marshal = member(cluster)
        with marshal, marshal.consumer([TOPIC]) as consumer:
            retry = Retry(attempts=2, backoff=(0.01, 0.01))
            running = threading.Thread(
                target=lambda: consumer.run(handle, concurrency=2, retry=retry, dead_letters="dead", hooks=[self.hooks])
            )
            running.start()
            wait_until(lambda: len(self.exporter.get_finished_spans()) == spans)
            marshal.stop()
            running.join(20)
        found: dict[str, list[ReadableSpan]] = {}
        for span in self.exporter.get_finished_spans():
            offset = int((span.attributes or {})["messaging.kafka.offset"])  # type: ignore[arg-type]
            found.setdefault(list(headers)[offset], []).append(span)
        return found


@pytest.mark.parametrize("kind", ["threads", "coroutines"])
def test_the_trace_of_a_message_continues_in_its_handler(kind: str) -> None:
    traced = Traced()

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.01)
        traced.note(message)

    found = traced.run(handle if kind == "coroutines" else traced.note, 4)
    (one,) = found["traced"]
    assert one.name == f"process {TOPIC}"
    assert one.kind is SpanKind.CONSUMER
    assert one.context is not None
    assert one.parent is not None
    assert (one.context.trace_id, one.parent.span_id) == (TRACE, PRODUCER)
    assert [(link.context.trace_id, link.context.span_id) for link in one.links] == [(TRACE, PRODUCER)]
    assert traced.current["traced"].span_id == one.context.span_id, "it is current in the handler"
    attributes = dict(one.attributes or {})
    assert attributes["messaging.operation.type"] == "process"
    assert attributes["messaging.consumer.group.name"] == GROUP
    assert attributes["messaging.destination.name"] == TOPIC
    (plain,) = found["plain"]
    assert plain.parent is None
    assert plain.context is not None
    assert plain.context.trace_id != TRACE, "the context of the message before is gone"
    assert plain.links == ()
    first, second = found["bad"]
    for span in (first, second):
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "ValueError"
        assert [event.name for event in span.events] == ["exception"]
    assert [(span.attributes or {})["kafka_marshal.attempt"] for span in (first, second)] == [1, 2]
    data = collected(traced.reader)["messaging.process.duration"].data
    assert isinstance(data, HistogramData)
    points = data.data_points
    by_error = {(point.attributes or {}).get("error.type"): point for point in points}
    assert {name: point.count for name, point in by_error.items()} == {None: 2, "ValueError": 2}
    assert tuple(by_error[None].explicit_bounds) == BUCKETS_S


def test_a_separate_trace_that_is_only_linked() -> None:
    traced = Traced(parent=False)
    (one,) = traced.run(traced.note, 4)["traced"]
    assert one.parent is None
    assert [link.context.trace_id for link in one.links] == [TRACE]
