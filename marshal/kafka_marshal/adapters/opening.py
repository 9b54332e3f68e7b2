"""Which Cluster a list of bootstrap servers means: Kafka, or what a test has announced under that name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kafka_marshal.ports import Cluster

__all__ = ["announced", "open_cluster"]

Opener = Callable[[Mapping[str, object]], Cluster]

_announced: dict[str, Opener] = {}


@contextmanager
def announced(bootstrap_servers: str, opener: Opener) -> Iterator[None]:
    """Inside the block, opener makes the cluster for exactly these bootstrap servers, from a config."""
    _announced[bootstrap_servers] = opener
    try:
        yield
    finally:
        del _announced[bootstrap_servers]


def open_cluster(bootstrap_servers: str, config: Mapping[str, object]) -> Cluster:
    """A new connection; raises ConfigurationError for settings that can't work."""
    opener = _announced.get(bootstrap_servers)
    if opener is not None:
        return opener(config)
    # Imported here so that what needs no Kafka (replaying a dump) does not load librdkafka.
    from kafka_marshal.adapters.kafka import KafkaCluster

    return KafkaCluster(bootstrap_servers, config)
