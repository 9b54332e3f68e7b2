"""The topic of a campaign, and what is written into it: plain confluent-kafka."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from kafka_marshal.observe.checkpoint_history import CheckpointHistory, CompleteCheckpoint, Ended, Happened, WentBack
from rationalizer import Group, World, route_group
from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.chaos.log import read_topic, write_dump
from tests.campaigns.checkpoints.check import Back, Input

CPS = 2
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
    #: Of a partition's messages.
    keys: int


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
            key = f"k{self._rng.randrange(self._ground.keys)}".encode()
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


@dataclass(slots=True)
class Story:
    """What the log shows about a group's checkpoints."""

    #: By partition: where in the log which keys of it went back; and where rollbacks are.
    went_back: dict[int, list[Back]]
    rollbacks: list[int] = field(default_factory=list)
    #: How long (ms) each complete one took, and when (log time) it was complete, those without some members among them;
    #: and why the others ended.
    took_ms: list[int] = field(default_factory=list)
    taken_at: list[int] = field(default_factory=list)
    without_some: int = 0
    handed_over: int = 0
    ended: Counter[str] = field(default_factory=Counter)

    def see(self, happened: Sequence[Happened], group: Group, topic: str, offset: int) -> None:
        """A record did this."""
        for each in happened:
            match each:
                case Ended(why=why):
                    self.ended[why] += 1
                case CompleteCheckpoint() if each.owners:
                    self.took_ms.append(each.took_ms)
                    self.taken_at.append(each.log_time)
                    self.without_some += bool(each.missing)
                    self.handed_over += each.handed_over
                case WentBack(why="rollback"):
                    self.rollbacks.append(offset)
        if not any(isinstance(each, WentBack) for each in happened):
            return
        pieces = group.pieces.get(topic)
        for partition, found in self.went_back.items():
            if pieces is None:
                found.append((offset, 0, MAX_KEY_HASH))
                continue
            found += [(offset, part.lo, part.hi) for part in pieces[partition] if part.since in (offset, -1)]


def story_of(ground: Ground, dump: Path) -> Story:
    """Read the log, and keep it in this file."""
    log = read_topic(ground.bootstrap, ground.coordination, range(CPS))
    write_dump(dump, log)
    home = route_group(ground.group, CPS)
    world, history = World(home, CPS), CheckpointHistory(ground.group)
    story = Story({partition: [] for partition in range(ground.partitions)})
    for entry in log[home]:
        happened = history.see(world, world.apply(*entry))
        if happened and (group := world.group(ground.group)) is not None:
            story.see(happened, group, ground.topic, world.next_offset - 1)
    return story
