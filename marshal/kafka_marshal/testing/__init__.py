"""A Kafka for tests: in memory, or a real one.

- :class:`MemoryKafka`: a Kafka in memory (the fixture ``memory_marshal``), on which workers are killed and paused.
- :class:`LocalBroker`, :class:`LocalCluster`: brokers on this machine that can be killed, paused and restarted.
- :func:`open_kafka`: a Kafka named by KAFKA_MARSHAL_TEST_BOOTSTRAP, in a container, or local.
- :class:`TcpProxy`: a proxy before a broker that cuts, delays or drops connections.
- The pytest plugin (installed with the package) offers the fixtures ``kafka_broker``, ``kafka_bootstrap``,
  ``kafka_cluster3``, ``topic_factory``, ``coordination_topic`` and ``memory_marshal``; nothing is started before a
  test asks for it.

A real one needs the extra ``kafka-marshal[broker]`` (jar resolver and Java), unless a Kafka is
named or runs in a container.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rationalizer.later import later

if TYPE_CHECKING:
    from kafka_marshal.testing.broker import LocalBroker, LocalCluster
    from kafka_marshal.testing.errors import (
        BrokerDiedError,
        JarsMissingError,
        JavaMissingError,
        LocalBrokerError,
        PortTakenError,
    )
    from kafka_marshal.testing.memory import MemoryKafka, MemoryWorker
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
    "MemoryKafka",
    "MemoryWorker",
    "PortTakenError",
    "RunningKafka",
    "TcpProxy",
    "open_kafka",
    "run_broker",
]

#: Imported at their first use: a test without a broker pays for none.
_LATER = {
    "broker": "LocalBroker LocalCluster",
    "errors": "BrokerDiedError JarsMissingError JavaMissingError LocalBrokerError PortTakenError",
    "memory": "MemoryKafka MemoryWorker",
    "proxy": "Direction TcpProxy",
    "select_broker": "ExternalKafka RunningKafka open_kafka run_broker",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__, _LATER)
