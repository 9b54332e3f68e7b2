"""A topic to read, one to write, and a group that processes in transactions, on a cluster in memory."""

from __future__ import annotations

from typing import Any

from kafka_marshal import Attempt, Consumer, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.node.coordination_topic import create_topic
from tests.client.conftest import wait_until
from tests.faults.stories import GROUP, member
from tests.modes import options_of

IN, OUT, DEAD = "in", "out", "dead"


class Plant:
    """A topic to read, one to write, and a group that does."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.broker = self.cluster.broker
        create_topic(self.cluster, "__marshal", 1, 10)
        self.broker.create_topic(IN, 2)
        self.broker.create_topic(OUT, 1)
        self.broker.create_topic(DEAD, 1)
        self._members: list[Marshal] = []

    def put(self, keys: str, partition: int = 0) -> None:
        """A message for each letter, which is its key; its value is its offset."""
        for key in keys:
            log = self.broker.log(IN, partition)
            assert log is not None
            self.broker.produce(IN, partition, str(log.end).encode(), key.encode())

    def consumer(self, client_id: str = "a", hi: int = 1_000, **options: Any) -> tuple[Marshal, Consumer]:
        made = member(self.cluster, client_id, hi)
        self._members.append(made)
        return made, made.consumer([IN], **options_of({"transactions": True} | options))

    def seen(self, topic: str = OUT) -> list[Any]:
        """What a reader with read_committed sees."""
        log = self.broker.log(topic, 0)
        assert log is not None
        return [message for message in log.messages if message.offset() < log.stable_end]

    def outputs(self) -> list[str]:
        return [message.value().decode() for message in self.seen()]

    def position(self, partition: int = 0) -> int | None:
        """Kafka's committed offset."""
        found = self.broker.committed.get(GROUP, {}).get((IN, partition))
        return None if found is None else found[0]

    def await_position(self, offset: int, partition: int = 0) -> None:
        wait_until(lambda: self.position(partition) == offset, what=f"a committed offset of {offset}")

    def close(self) -> None:
        for each in self._members:
            each.close(5.0)


def copy(message: Any) -> None:
    """One output for each message."""
    Attempt.current().produce(OUT, message.value(), message.key())
