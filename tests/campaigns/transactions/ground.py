"""The topics of a campaign, what is written into them, what a read_committed reader finds: plain confluent-kafka."""

from __future__ import annotations

import json
import threading
import uuid
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from tests.campaigns.transactions.check import Input, Output, Read

#: The handler of every n-th input fails for good.
FAILS_EVERY = 41

#: Shares of bursts that are written in a transaction, and of those that are aborted: holes in the log.
IN_TRANSACTION, ABORTED = 0.3, 0.2

BURST = 12

#: Brokers die: librdkafka's lines about that are of no use.
QUIET: dict[str, Any] = {"log_level": 0}
KEYS = 6


@dataclass(frozen=True, slots=True)
class Ground:
    """Names on one broker."""

    bootstrap: str
    coordination: str
    group: str
    topic: str
    partitions: int
    ordered: str
    second: str
    letters: str


class Writer:
    """A thread that writes numbered inputs, with holes between their offsets."""

    def __init__(self, ground: Ground, messages_a_second: float, rng: Random) -> None:
        self._ground = ground
        self._pause_s = BURST / messages_a_second
        self._rng = rng
        self._numbers = [0] * ground.partitions
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def written(self) -> int:
        """Inputs so far, those of aborted transactions included."""
        return sum(self._numbers)

    def _run(self) -> None:
        while not self._end.wait(self._pause_s):
            partition = self._rng.randrange(self._ground.partitions)
            draw = self._rng.random()
            with suppress(KafkaException):  # the broker dies from time to time: what was written is read at the end
                self._burst(partition, draw < IN_TRANSACTION, draw < IN_TRANSACTION * ABORTED)

    def _burst(self, partition: int, transaction: bool, aborted: bool) -> None:
        more: dict[str, Any] = {"transactional.id": f"inputs-{uuid.uuid4().hex[:8]}"} if transaction else {}
        producer = Producer(
            {"bootstrap.servers": self._ground.bootstrap, "acks": "all", "linger.ms": 2, **QUIET, **more}
        )
        if transaction:
            producer.init_transactions(10)
            producer.begin_transaction()
        for _ in range(BURST):
            self._write(producer, partition)
        producer.flush(10)
        if transaction and aborted:
            producer.abort_transaction(10)
        elif transaction:
            producer.commit_transaction(10)

    def _write(self, producer: Producer, partition: int, *, last: bool = False) -> None:
        number = self._numbers[partition]
        self._numbers[partition] += 1
        fails = number % FAILS_EVERY == FAILS_EVERY // 2 and not last
        value = json.dumps({"partition": partition, "number": number, "fails": fails})
        producer.produce(self._ground.topic, value.encode(), key=str(number % KEYS).encode(), partition=partition)

    def close(self) -> None:
        """The last input of each partition is one whose handler does not fail: with its output all is done."""
        self._end.set()
        self._thread.join()
        producer = Producer(
            {"bootstrap.servers": self._ground.bootstrap, "acks": "all", "enable.idempotence": True, **QUIET}
        )
        for partition in range(self._ground.partitions):
            self._write(producer, partition, last=True)
        if producer.flush(30):
            raise AssertionError("the last inputs were not written within 30 s")

    @property
    def last(self) -> dict[int, int]:
        """Partition → the number of its last input."""
        return {partition: self._numbers[partition] - 1 for partition in range(self._ground.partitions)}


class Reader:
    """A read_committed reader of outputs and inputs, from the beginning."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.ordered: dict[int, list[Output]] = defaultdict(list)
        #: When each of these was produced (ms).
        self.times: dict[int, list[int]] = defaultdict(list)
        self.second: list[Output] = []
        self._letters: list[dict[str, Any]] = []
        self.inputs: dict[int, list[Input]] = defaultdict(list)
        #: (partition, number) → offset of an input.
        self._offsets: dict[tuple[int, int], int] = {}
        #: Partition → the number of its last input; empty: not written yet.
        self.last: dict[int, int] = {}
        self._consumer = Consumer(
            {
                "bootstrap.servers": ground.bootstrap,
                "group.id": f"check-{uuid.uuid4().hex[:8]}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 50,
                **QUIET,
            }
        )
        topics = [ground.topic, ground.ordered, ground.second, ground.letters]
        known = self._consumer.list_topics(timeout=20).topics
        self._consumer.assign([TopicPartition(topic, p, 0) for topic in topics for p in known[topic].partitions])

    def read(self, timeout_s: float) -> int:
        """Take what is there; returns how many records came."""
        came = 0
        for message in self._consumer.consume(2_000, timeout_s):
            if (error := message.error()) is not None:
                if error.code() not in (KafkaError._PARTITION_EOF, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
                    raise KafkaException(error)
                continue
            came += 1
            self._take(message)
        return came

    def _take(self, message: Any) -> None:
        ground, value = self._ground, json.loads(message.value())
        match message.topic():
            case ground.topic:
                self.inputs[message.partition()].append(Input(message.offset(), value["fails"]))
                self._offsets[value["partition"], value["number"]] = message.offset()
            case ground.ordered:
                self.ordered[message.partition()].append(Output(**value))
                self.times[message.partition()].append(message.timestamp()[1])
            case ground.second:
                self.second.append(Output(**value))
            case _:
                self._letters.append(value)

    def found(self) -> Read:
        """All of it."""
        letters = [
            Output(value["partition"], self._offsets.get((value["partition"], value["number"]), -1))
            for value in self._letters
        ]
        return Read(self.ordered, self.second, letters)

    @property
    def behind(self) -> list[int]:
        """Input partitions whose last output is not that of the last input."""
        return [
            partition
            for partition in range(self._ground.partitions)
            if not self.ordered[partition]
            or self.ordered[partition][-1].offset != self._offsets.get((partition, self.last[partition]))
        ]

    def close(self) -> None:
        self._consumer.close()


class Offsets:
    """Kafka's offsets of the group, as another program sees and changes them: a consumer that never joins."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._consumer = Consumer({"bootstrap.servers": ground.bootstrap, "group.id": ground.group, **QUIET})

    def committed(self) -> dict[int, int]:
        """Partition → the next offset."""
        places = [TopicPartition(self._ground.topic, partition) for partition in range(self._ground.partitions)]
        return {each.partition: each.offset for each in self._consumer.committed(places, 10) if each.offset >= 0}

    def drop(self) -> None:
        """Forget all of them."""
        admin = AdminClient({"bootstrap.servers": self._ground.bootstrap, **QUIET})
        admin.delete_consumer_groups([self._ground.group], request_timeout=10)[self._ground.group].result()

    def set(self, partition: int, offset: int) -> None:
        """As ``kafka-consumer-groups --reset-offsets`` does."""
        place = TopicPartition(self._ground.topic, partition, offset)
        for each in self._consumer.commit(offsets=[place], asynchronous=False) or ():
            if each.error is not None:
                raise KafkaException(each.error)

    def close(self) -> None:
        self._consumer.close()
