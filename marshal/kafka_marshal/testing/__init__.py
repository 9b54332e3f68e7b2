"""A real Kafka for tests: yours as well as ours.

- :class:`LocalBroker`, :class:`LocalCluster`: brokers on this machine, to be killed, paused and restarted at will.
- :func:`open_kafka`: a Kafka, wherever it comes from: named by KAFKA_MARSHAL_TEST_BOOTSTRAP, in a container, or local.
- :class:`TcpProxy`: stands before a broker and cuts, delays or swallows what passes.
- The pytest plugin (installed with the package) offers the fixtures ``kafka_broker``, ``kafka_bootstrap``,
  ``kafka_cluster3``, ``topic_factory`` and ``coordination_topic``; nothing is started before a test asks for it.

Needs the extra ``kafka-marshal[broker]`` (jar resolver and Java), unless Kafka is named or runs in a container.
"""

from __future__ import annotations

from kafka_marshal.testing.broker import LocalBroker, LocalCluster
from kafka_marshal.testing.errors import (
    BrokerDiedError,
    JarsMissingError,
    JavaMissingError,
    LocalBrokerError,
    PortTakenError,
)
from kafka_marshal.testing.proxy import Direction, TcpProxy
from kafka_marshal.testing.select_broker import ExternalKafka, RunningKafka, open_kafka, run_broker

__all__ = [
    "BrokerDiedError",
    "Direction",
    "ExternalKafka",
    "JarsMissingError",
    "JavaMissingError",
    "LocalBroker",
    "LocalBrokerError",
    "LocalCluster",
    "PortTakenError",
    "RunningKafka",
    "TcpProxy",
    "open_kafka",
    "run_broker",
]
