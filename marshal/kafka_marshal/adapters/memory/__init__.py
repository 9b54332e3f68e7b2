"""A Kafka in memory: the same interface, no broker, no threads, and every fault on request.

:class:`MemoryCluster` is what a client holds, as it would hold a KafkaCluster; ``connect()`` gives further clients of
the same log. :class:`MemoryBroker` (``cluster.broker``) is the other side: it fills data topics, deletes, cuts and
grows them, and holds the faults to be injected (:class:`Faults`).

With a given clock (a function that returns milliseconds) nothing ever waits: a read returns what is there, and the same
calls give the same results on every run. Without one it keeps the time of day, and reads wait for new records.

==================  ==================================================================================
``broker``          topics, partitions, entries, transactions: everything happens under its one lock; what can go wrong
``readers``         the coordination topic's tail, and the reader of data
``writers``         its appender, the producer of data, the producer of one transactional id
``cluster``         :class:`MemoryCluster`: look-ups, and the factory of the others
==================  ==================================================================================
"""

from kafka_marshal.adapters.memory.broker import AppendFate, Faults, MemoryBroker, MemoryMessage
from kafka_marshal.adapters.memory.cluster import MemoryCluster

__all__ = ["AppendFate", "Faults", "MemoryBroker", "MemoryCluster", "MemoryMessage"]
