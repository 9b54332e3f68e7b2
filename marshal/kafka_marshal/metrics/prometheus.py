"""Metrics for Prometheus (extra ``[prometheus]``): a collector that reads only when it is scraped.

::

    from prometheus_client import REGISTRY
    from kafka_marshal.metrics.prometheus import MarshalCollector

    REGISTRY.register(MarshalCollector(marshal))
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kafka_marshal.engine.figures import Distribution
from kafka_marshal.metrics.rows import CATALOGUE, Measured, Metric, Metrics, prometheus_label


class MarshalCollector(Collector):
    """The metrics of these Marshals, for a registry of prometheus-client."""

    def __init__(self, *marshals: Measured) -> None:
        self._marshals = marshals

    def collect(self) -> Iterator[Family]:
        """The present metrics."""
        found = [marshal.metrics() for marshal in self._marshals]
        for metric in CATALOGUE:
            yield _family(metric, found)

    def describe(self) -> Iterator[Family]:
        """The metrics without values: registering does not measure."""
        for metric in CATALOGUE:
            yield _family(metric, [])


def _family(metric: Metric, found: list[Metrics]) -> Family:
    labels = [prometheus_label(name) for name in metric.labels]
    rows = [row for metrics in found for row in metric.read(metrics)]
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.prometheus, metric.help, labels=labels)
        for values, seconds in rows:
            assert isinstance(seconds, Distribution)
            ends = [*map(floatToGoString, seconds.bounds), "+Inf"]
            histogram.add_metric(values, list(zip(ends, accumulate(seconds.counts), strict=True)), seconds.total)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.prometheus, metric.help, labels=labels)
    for values, value in rows:
        assert not isinstance(value, Distribution)
        family.add_metric(values, value)
    return family


def exposition(marshal: Measured, accept: str) -> tuple[bytes, str]:
    """The text for a scrape, and its content type; accept: the request's header."""
    registry = CollectorRegistry()
    registry.register(MarshalCollector(marshal))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
