"""The topic of a campaign, and what is written into it: plain confluent-kafka."""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.observe.checkpoints import CheckpointHistory, WentBack
from rationalizer import World, route_group
from tests.campaigns.chaos.log import read_topic, write_dump
from tests.campaigns.checkpoints.check import Input

__all__ = ["Ground", "Writer", "ends", "inputs", "losses", "make_ground"]

CPS = 2
KEYS = 12
BURST = 10

#: Share of bursts that are written in a transaction, and of those that are aborted: holes in the log.
IN_TRANSACTION, ABORTED = 0.2, 0.3

#: Brokers die: librdkafka's lines about that are of no use.
QUIET: dict[str, Any] = {"log_level": 0}


@dataclass(frozen=True, slots=True)
class Ground:
    """Names on one broker."""

    bootstrap: str
    coordination: str
    group: str
    topic: str
    partitions: int


def make_ground(bootstrap: str, partitions: int) -> Ground:
    """New topics on this broker."""
    name = uuid.uuid4().hex[:6]
    ground = Ground(bootstrap, f"__marshal-{name}", f"group-{name}", f"in-{name}", partitions)
    with closing(KafkaCluster(bootstrap)) as cluster:
        create_topic(cluster, ground.coordination, CPS, 20)
        cluster.create_topic(ground.topic, partitions, 1, {}, 20)
    return ground


class Writer:
    """A thread that writes messages with keys."""

    def __init__(self, ground: Ground, messages_a_second: float, rng: Random) -> None:
        self.written = 0
        self._ground = ground
        self._pause_s = BURST / messages_a_second
        self._rng = rng
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        config = {"bootstrap.servers": self._ground.bootstrap, "acks": "all", "linger.ms": 2, **QUIET}
        plain = Producer(config)
        while not self._end.wait(self._pause_s):
            draw = self._rng.random()
            with suppress(KafkaException, BufferError):  # the broker dies: what was written is read at the end
                if draw < IN_TRANSACTION:
                    self._in_transaction(config, aborts=draw < IN_TRANSACTION * ABORTED)
                else:
                    self._burst(plain)
                    plain.poll(0)
        plain.flush(30)

    def _burst(self, producer: Producer) -> None:
        partition = self._rng.randrange(self._ground.partitions)
        for _ in range(BURST):
            key = f"k{self._rng.randrange(KEYS)}".encode()
            producer.produce(self._ground.topic, b"%d" % self.written, key=key, partition=partition)
            self.written += 1

    def _in_transaction(self, config: dict[str, Any], *, aborts: bool) -> None:
        producer = Producer({**config, "transactional.id": f"inputs-{uuid.uuid4().hex[:8]}"})
        producer.init_transactions(10)
        producer.begin_transaction()
        self._burst(producer)
        producer.flush(10)
        (producer.abort_transaction if aborts else producer.commit_transaction)(10)

    def close(self) -> None:
        """Write nothing more."""
        self._end.set()
        self._thread.join()


def _consumer(ground: Ground) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": ground.bootstrap,
            "group.id": f"{ground.group}-plain",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": False,
            **QUIET,
        }
    )


def ends(ground: Ground) -> dict[int, int]:
    """Partition → the offset behind its last message, transactions' markers included."""
    consumer = _consumer(ground)
    try:
        return {
            partition: consumer.get_watermark_offsets(TopicPartition(ground.topic, partition), 10)[1]
            for partition in range(ground.partitions)
        }
    finally:
        consumer.close()


def inputs(ground: Ground) -> dict[int, list[Input]]:
    """All messages that a read_committed reader finds."""
    found: dict[int, list[Input]] = {partition: [] for partition in range(ground.partitions)}
    until = ends(ground)
    consumer = _consumer(ground)
    consumer.assign([TopicPartition(ground.topic, partition, 0) for partition in range(ground.partitions)])
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        for message in consumer.consume(5_000, 0.5):
            if message.error() is None:
                offset, key = message.offset() or 0, message.key() or b""
                found[message.partition() or 0].append(Input(offset, key.decode()))
        at = {each.partition: each.offset for each in consumer.position(consumer.assignment())}
        if all(at.get(partition, -1) >= end for partition, end in until.items() if end):
            break
    else:
        raise AssertionError(f"the topic could not be read to its end within 120 s: {until}")
    consumer.close()
    return found


def losses(ground: Ground, dump: Path) -> tuple[dict[int, list[int]], list[int]]:
    """By partition: where in the log it went back; and where rollbacks are. The log is kept in this file."""
    log = read_topic(ground.bootstrap, ground.coordination, range(CPS))
    write_dump(dump, log)
    home = route_group(ground.group, CPS)
    world, history = World(home, CPS), CheckpointHistory(ground.group)
    found: dict[int, list[int]] = {partition: [] for partition in range(ground.partitions)}
    rollbacks: list[int] = []
    for entry in log[home]:
        outcome = world.apply(*entry)
        group = world.group(ground.group)
        happened = [each for each in history.see(world, outcome) if isinstance(each, WentBack)]
        if not happened or group is None:
            continue
        offset = world.next_offset - 1
        rollbacks += [offset for each in happened if each.why == "rollback"]
        pieces = group.pieces.get(ground.topic)
        for partition in found:
            if pieces is None or any(piece.since in (offset, -1) for piece in pieces[partition]):
                found[partition].append(offset)
    return found, rollbacks
