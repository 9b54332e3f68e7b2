"""OpenTelemetry: instruments that observe the same figures, and spans that continue a message's trace."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Metric
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kafka_marshal import Marshal, Message, Retry
from kafka_marshal.engine.figures import BUCKETS_S
from kafka_marshal.metrics import instrument, trace_hooks
from kafka_marshal.metrics.rows import CATALOGUE
from tests.client.conftest import wait_until
from tests.faults.stories import GROUP, TOPIC, member, memory_cluster
from tests.metrics.conftest import PARTITIONS

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
