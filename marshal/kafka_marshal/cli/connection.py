"""The cluster that the options of a command name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kafka_marshal.cli.options import Options
from kafka_marshal.cli.output import warnings_from_the_library
from kafka_marshal.errors import MarshalError, TopicMissingError
from kafka_marshal.node.coordination_topic import snapshots_topic
from kafka_marshal.observe.names import near
from kafka_marshal.ports import Cluster

__all__ = ["connected", "name_the_topic"]


@contextmanager
def connected(options: Options) -> Iterator[Cluster]:
    """The cluster that the options name. Nobody is asked anything yet."""
    servers, properties = options.connection()
    from kafka_marshal.adapters.kafka import KafkaCluster

    with warnings_from_the_library(options.debug):
        cluster = KafkaCluster(servers, properties)
        try:
            yield cluster
        except TopicMissingError as error:
            name_the_topic(error, cluster, options)
            raise
        finally:
            cluster.close()


def name_the_topic(error: TopicMissingError, cluster: Cluster, options: Options) -> None:
    """Add the topic that may be meant: a second coordination topic beside the first would share out the work twice."""
    try:
        topics = cluster.topics(options.timeout)
    except MarshalError:
        return
    hint = near(options.topic, topics.keys() - {snapshots_topic(name) for name in topics})
    if hint:
        error.add_note(f"There is a topic of a similar name{hint}")
