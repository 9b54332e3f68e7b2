"""Metrics of a Marshal: what they are, and how Prometheus and OpenTelemetry get them.

``rows``         what :meth:`Marshal.metrics` returns, and the names under which it is exported
``measure``      reads it, and the lag of the whole group
``prometheus``   a collector for prometheus-client (extra ``[prometheus]``)
``otel``         instruments and traces of OpenTelemetry (extra ``[opentelemetry]``)
``server``       ``/metrics``, probes and ``/lag`` over HTTP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafka_marshal.metrics.rows import (
    Failures,
    MessageCounts,
    Metrics,
    OutcomeCount,
    PartitionMetrics,
    Processing,
    RecordCount,
    TopicCount,
)
from rationalizer.later import later

if TYPE_CHECKING:
    from kafka_marshal.metrics.otel import instrument, trace_hooks
    from kafka_marshal.metrics.prometheus import MarshalCollector
    from kafka_marshal.metrics.server import MetricsServer

__all__ = [
    "Failures",
    "MarshalCollector",
    "MessageCounts",
    "Metrics",
    "MetricsServer",
    "OutcomeCount",
    "PartitionMetrics",
    "Processing",
    "RecordCount",
    "TopicCount",
    "instrument",
    "trace_hooks",
]

#: Imported at their first use: they need an extra, or few use them.
_LATER = {"otel": "instrument trace_hooks", "prometheus": "MarshalCollector", "server": "MetricsServer"}

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__, _LATER)
