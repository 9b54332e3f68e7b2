"""Metrics and traces for OpenTelemetry (extra ``[opentelemetry]``). The API alone: SDK and exporters are the user's.

::

    from kafka_marshal.metrics.otel import instrument, trace_hooks

    instrument(marshal)
    consumer.run(handle, hooks=[trace_hooks()])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from functools import partial
from time import monotonic
from typing import NamedTuple

from opentelemetry import context, metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

from kafka_marshal.adapters.message import headers_of
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.dead_letters import class_name
from kafka_marshal.client.handled import ErrorTypes
from kafka_marshal.client.handling import Hooks
from kafka_marshal.engine.figures import BUCKETS_S, Distribution
from kafka_marshal.instance import release
from kafka_marshal.metrics.rows import CATALOGUE, Measured, Metric, Metrics

_SCOPE = "kafka_marshal"

#: Instruments of one collection share a measurement: it is reused for this long (s).
SAME_READING_S = 0.2

#: Recorded as a histogram, by ``trace_hooks``.
DURATION = "messaging.process.duration"

Headers = Sequence[tuple[str, bytes | None]]


class _Reading:
    """The metrics of a Marshal, measured once for all instruments of a collection."""

    def __init__(self, marshal: Measured) -> None:
        self._marshal = marshal
        self._found: tuple[float, Metrics] | None = None

    def get(self) -> Metrics:
        found, now = self._found, monotonic()
        if found is None or now - found[0] > SAME_READING_S:
            self._found = found = now, self._marshal.metrics()
        return found[1]


def instrument(marshal: Measured, meter_provider: MeterProvider | None = None) -> None:
    """Observe the metrics of a Marshal whenever a reader of meter_provider (None: the global one) collects.

    A histogram becomes two counters, of values (``….count``) and of their sum in seconds (``….sum``): the API observes
    no histograms. ``trace_hooks`` records ``messaging.process.duration`` as one.
    """
    meter = (meter_provider or metrics.get_meter_provider()).get_meter(_SCOPE, release())
    reading = _Reading(marshal)
    for metric in CATALOGUE:
        if metric.kind == "gauge":
            meter.create_observable_gauge(metric.name, [partial(_observe, metric, reading)], metric.unit, metric.help)
        elif metric.kind == "counter":
            meter.create_observable_counter(metric.name, [partial(_observe, metric, reading)], metric.unit, metric.help)
        elif metric.name != DURATION:
            for part, unit in (("count", "{value}"), ("sum", metric.unit)):
                observe = partial(_observe, metric, reading, part=part)
                meter.create_observable_counter(f"{metric.name}.{part}", [observe], unit, metric.help)


def _observe(metric: Metric, reading: _Reading, options: CallbackOptions, part: str = "") -> Iterable[Observation]:
    for labels, value in metric.read(reading.get()):
        if isinstance(value, Distribution):
            value = value.count if part == "count" else value.total
        yield Observation(value, {name: label for name, label in zip(metric.labels, labels, strict=True) if label})


# Traces.


class _Headers(Getter[Headers]):
    """Reads propagated fields from a message's headers; of two with the same name the last one counts."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        found = [value for name, value in carrier if name.lower() == key and value is not None]
        return [found[-1].decode("utf-8", "replace")] if found else None

    def keys(self, carrier: Headers) -> list[str]:
        return [name for name, _ in carrier]


class _Open(NamedTuple):
    """The span of the handler in this thread or task."""

    span: Span
    token: Token[Context]


_open: ContextVar[_Open | None] = ContextVar("kafka_marshal_span", default=None)


def trace_hooks(
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    *,
    parent: bool = True,
) -> Hooks:
    """Hooks for ``run`` that give each try a span ``process TOPIC``, current while its handler runs.

    The span is linked to the context in the message's headers (``traceparent``, by the global propagator), and is its
    child, so that one trace leads from the producer through the handler; parent=False: a new trace with the link only.
    A try that raises ends with an error. Durations go to the histogram ``messaging.process.duration``. Works for
    handlers in threads and for coroutines.
    """
    tracer = (tracer_provider or trace.get_tracer_provider()).get_tracer(_SCOPE, release())
    durations = (
        (meter_provider or metrics.get_meter_provider())
        .get_meter(_SCOPE, release())
        .create_histogram(
            DURATION,
            "s",
            "How long handlers of run() take.",
            explicit_bucket_boundaries_advisory=list(BUCKETS_S),
        )
    )

    def before(attempt: Attempt) -> None:
        _leave()  # what a cancelled handler has left
        carried = propagate.extract(headers_of(attempt.message) or (), getter=_HEADERS)
        origin = trace.get_current_span(carried).get_span_context()
        span = tracer.start_span(
            f"process {attempt.message.topic()}",
            context=carried if parent else Context(),
            kind=SpanKind.CONSUMER,
            attributes=_attributes(attempt),
            links=[Link(origin)] if origin.is_valid else (),
        )
        _open.set(_Open(span, context.attach(trace.set_span_in_context(span, carried))))

    def after(attempt: Attempt, seconds: float) -> None:
        _leave()
        durations.record(seconds, _common(attempt))

    errors = ErrorTypes()

    def failed(attempt: Attempt, seconds: float, error: BaseException) -> None:
        name = class_name(error)
        if (found := _open.get()) is not None:
            found.span.record_exception(error)
            found.span.set_attribute("error.type", name)
            found.span.set_status(Status(StatusCode.ERROR, str(error)))
        _leave()
        durations.record(seconds, {**_common(attempt), "error.type": errors.bounded(name)})

    def lost(attempt: Attempt, seconds: float, error: BaseException) -> None:
        if (found := _open.get()) is not None:
            found.span.set_attribute("kafka_marshal.lease_lost", value=True)
        _leave()
        durations.record(seconds, {**_common(attempt), "error.type": class_name(error)})

    return Hooks(before=before, after=after, failed=failed, lost=lost)


_HEADERS = _Headers()


def _leave() -> None:
    """End the span of this thread or task, if there is one."""
    if (found := _open.get()) is not None:
        _open.set(None)
        context.detach(found.token)
        found.span.end()


def _common(attempt: Attempt) -> Mapping[str, str]:
    return {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.consumer.group.name": attempt.group_id,
        "messaging.destination.name": attempt.message.topic(),
    }


def _attributes(attempt: Attempt) -> Mapping[str, str | int]:
    message = attempt.message
    found: dict[str, str | int] = {
        **_common(attempt),
        "messaging.operation.type": "process",
        "messaging.destination.partition.id": str(message.partition()),
        "messaging.kafka.offset": message.offset(),
        "kafka_marshal.attempt": attempt.number,
        "kafka_marshal.epoch": int(attempt.epoch),
    }
    key = message.key()
    if key is not None:
        found["messaging.kafka.message.key"] = key.decode("utf-8", "replace")
    if message.value() is None:
        found["messaging.kafka.message.tombstone"] = True
    return found
