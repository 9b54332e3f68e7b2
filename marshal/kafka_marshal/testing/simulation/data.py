"""The data topics: created, filled in bursts, with their start and end offsets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.testing.simulation.network import Network
from kafka_marshal.testing.simulation.scenario import Scenario
from kafka_marshal.testing.simulation.scheduler import Scheduler
from kafka_marshal.types import Key

#: Mean number of messages in a burst.
BURST = 12
#: The messages of this many HI exist at the start.
AT_START = 7
#: In stories with lanes: message keys and their weights.
MESSAGE_KEYS: dict[bytes | None, float] = {None: 1.0, b"a": 4.0, b"b": 2.0, b"c": 1.3, b"d": 1.0, b"e": 0.8}


class Data:
    """The data topics of one story."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, broker: MemoryBroker, network: Network) -> None:
        self._scenario = scenario
        self._scheduler = scheduler
        self._broker = broker
        self._network = network
        #: Number of messages of the whole story.
        self.published: int = 0
        #: Called with each message's partition, offset and key.
        self.on_message: Callable[[Key, int, bytes | None], object] = lambda *_: None
        #: Random source of keys.
        self._rng = Random(f"{scenario.seed}/keys")

    def plan(self) -> None:
        """Create the topics and schedule their messages."""
        scenario, hi = self._scenario, float(self._scenario.heartbeat_interval_ms)
        for topic, partitions in scenario.data_topics.items():
            self._broker.create_topic(topic, partitions)
        rng = Random(f"{scenario.seed}/messages")
        # In order of time, so that a shorter story has the same beginning.
        at, last, rate = 0.0, 0.95 * scenario.intervals, scenario.messages
        while at < last:
            burst = int(rng.expovariate(1 / BURST)) + 1
            self._scheduler.call_at(min(at, last) * hi, partial(self._publish, rng.random(), burst))
            if self.published > AT_START * rate:
                at += rng.expovariate(rate / burst)
            self.published += burst
        if (missing := int(0.95 * rate * scenario.intervals) - self.published) > 0:
            self._scheduler.call_at(last * hi, partial(self._publish, rng.random(), missing))
            self.published += missing

    def _publish(self, drawn: float, burst: int) -> None:
        keys = self.all_partitions()
        for _ in range(burst):
            self._add(keys[int(drawn * len(keys))])

    def _add(self, key: Key) -> None:
        """Publish one message to a partition."""
        has_key = self._scenario.order is not None
        drawn = self._rng.choices(list(MESSAGE_KEYS), list(MESSAGE_KEYS.values()))[0] if has_key else None
        self.on_message(key, self._network.publish(*key, b"", drawn), drawn)

    def fill_up_to(self, key: Key, end: int) -> None:
        """Publish messages until a partition ends at ``end``."""
        for _ in range(self.end(key), end):
            self._add(key)
            self.published += 1

    def count(self, topic: str) -> int:
        """The present number of a topic's partitions."""
        return self._broker.existing[topic].info.partitions

    def all_partitions(self) -> list[Key]:
        """All partitions of all data topics."""
        return [(topic, part) for topic in self._scenario.data_topics for part in range(self.count(topic))]

    def start(self, key: Key) -> int:
        """The offset of the first retained message."""
        return self._broker.existing[key[0]].partitions[key[1]].start

    def end(self, key: Key) -> int:
        """The offset after the last message."""
        return self._broker.existing[key[0]].partitions[key[1]].end

    def end_if_any(self, key: Key) -> int | None:
        """The end offset; None if the partition is only a claimed name without a topic."""
        topic = self._broker.existing.get(key[0])
        return topic.partitions[key[1]].end if topic is not None and key[1] < len(topic.partitions) else None

    def grow(self, topic: str, most: int) -> None:
        """Add a partition, up to ``most``."""
        if self.count(topic) < most:
            self._broker.grow_topic(topic, self.count(topic) + 1)
