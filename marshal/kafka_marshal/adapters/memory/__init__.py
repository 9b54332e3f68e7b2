"""A Kafka in memory: the same interface, no broker, no threads, and every fault on request.

:class:`MemoryCluster` is what a client holds, as it would hold a KafkaCluster; ``connect()`` gives further clients of
the same log. :class:`MemoryBroker` (``cluster.broker``) is the other side: it fills data topics, deletes, cuts and
grows them, and holds the faults to be injected (:class:`Faults`).

With a given clock (a function that returns milliseconds) nothing ever waits: a read returns what is there, and the same
calls give the same results on every run. Without one it keeps the time of day, and reads wait for new records.

==================  ==================================================================================
``broker``          topics, partitions and their entries; everything happens under its one lock
``faults``          what can be made to go wrong
``appender``        the coordination topic's appender, the producer of data, and which partition a key goes to
``readers``         its tail, and the reader of data
``transactions``    the broker's side of transactions: what is open, pending and fenced
``transactional``   the producer of one transactional id
``cluster``         :class:`MemoryCluster`: look-ups, and the factory of the others
==================  ==================================================================================
"""

from kafka_marshal.adapters.memory.broker import MemoryBroker, MemoryMessage
from kafka_marshal.adapters.memory.cluster import MemoryCluster
from kafka_marshal.adapters.memory.faults import AppendFate, Faults

__all__ = ["AppendFate", "Faults", "MemoryBroker", "MemoryCluster", "MemoryMessage"]
