"""A real Kafka for tests.

- :class:`LocalBroker`, :class:`LocalCluster`: brokers on this machine that can be killed, paused and restarted.
- :func:`open_kafka`: a Kafka named by KAFKA_MARSHAL_TEST_BOOTSTRAP, in a container, or local.
- :class:`TcpProxy`: a proxy before a broker that cuts, delays or drops connections.
- The pytest plugin (installed with the package) offers the fixtures ``kafka_broker``, ``kafka_bootstrap``,
  ``kafka_cluster3``, ``topic_factory`` and ``coordination_topic``; nothing is started before a test asks for it.

Needs the extra ``kafka-marshal[broker]`` (jar resolver and Java), unless a Kafka is named or runs in a container.
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
