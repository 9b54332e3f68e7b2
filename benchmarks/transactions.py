"""Consume, transform, produce exactly once: ours beside confluent-kafka's own loop with KIP-447, on the same broker.

    python -m benchmarks.transactions [--records N] [--rounds N] [--handovers N] [--only rate|gap] [--json FILE]

Rates: records of 1 KB through one process, in batches of 100 and 1,000, from when all partitions have a committed
transaction; medians of rounds in turns, after one that is not counted. Gaps: two processes share four partitions with a
record every 5 ms each; one gets SIGTERM, and a read_committed reader measures the longest time between two outputs of
each partition that moves. KIP-447's loop is that of its design: one producer, ``send_offsets_to_transaction`` with the
consumer's group metadata, and Kafka's group protocol as named.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from benchmarks.common import Row, bench_kafka, in_turns, new_log, report
from benchmarks.race.contestants import BEST, CLASSIC
from benchmarks.race.grounds import Grounds
from kafka_marshal import Marshal, Transactions
from kafka_marshal.adapters.kafka import KafkaCluster

RECORD = b"x" * 1024
PARTITIONS = 4
BATCHES = (100, 1_000)
#: Records that may be handled before all partitions are taken over.
BEFORE = 60_000

#: Of a partition's records at a handover.
FEED_S = 0.005
#: A batch at a handover: what came within this time, or at most this number of messages.
WAIT_S, MOST = 0.02, 100

#: Kafka's group protocols: name → properties.
PROTOCOLS: Mapping[str, Mapping[str, object]] = {
    "classic": CLASSIC.config,
    "cooperative": {**CLASSIC.config, "partition.assignment.strategy": "cooperative-sticky"},
    "KIP-848": {**BEST, "group.protocol": "consumer"},
}
#: The one that the target names: the default of clients.
DEFAULT = "classic"


def transform(value: bytes | None) -> bytes:
    """What is done to each record."""
    return (value or b"")[::-1]


# KIP-447, with what confluent-kafka has.


class Kip447:
    """One consumer of a group, one transactional producer."""

    def __init__(
        self, bootstrap: str, group: str, topic: str, out: str, name: str, config: Mapping[str, object]
    ) -> None:
        servers = {"bootstrap.servers": bootstrap}
        more = {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_committed"}
        self.consumer = Consumer({**config, "auto.offset.reset": "earliest", **servers, **more})
        own = {"transactional.id": f"{group}-{name}-{uuid.uuid4().hex[:6]}", "compression.type": "lz4"}  # as ours
        self.producer = Producer({**servers, **own})
        self.producer.init_transactions(30)
        self.consumer.subscribe([topic])
        self.out = out
        self.aborted = 0

    def take(self, most: int, wait_s: float) -> list[Any]:
        """A batch: of all partitions of this consumer."""
        return [message for message in self.consumer.consume(most, wait_s) if message.error() is None]

    def handle(self, batch: list[Any], value: Callable[[bytes | None], bytes] = transform) -> None:
        """One transaction; an aborted one is consumed again."""
        self.producer.begin_transaction()
        ends: dict[tuple[str, int], int] = {}
        for message in batch:
            while True:
                try:
                    self.producer.produce(self.out, value(message.value()), partition=message.partition())
                    break
                except BufferError:
                    self.producer.poll(0.01)
            ends[message.topic(), message.partition()] = message.offset() + 1
        try:
            offsets = [TopicPartition(*place, end) for place, end in ends.items()]
            self.producer.send_offsets_to_transaction(offsets, self.consumer.consumer_group_metadata(), 30)
            self.producer.commit_transaction(30)
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            self.aborted += 1
            self.producer.abort_transaction(30)
            for place in self.consumer.committed(self.consumer.assignment(), 30):
                self.consumer.seek(TopicPartition(place.topic, place.partition, max(0, place.offset)))

    def close(self) -> None:
        self.consumer.close()


@contextmanager
def our_consumer(bootstrap: str, group: str, topic: str, log: str, name: str, **config: object) -> Iterator[Any]:
    """Ours: of a claimed group."""
    with (
        Marshal(bootstrap, group_id=group, client_id=name, topic=log, config=config) as marshal,
        marshal.consumer([topic], exactly_once=Transactions()) as consumer,
    ):
        yield consumer


# Rates.


def fill(bootstrap: str, records: int) -> str:
    """A topic with that many records, evenly spread."""
    topic = new_topic(bootstrap)
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for number in range(records):
        producer.produce(topic, RECORD, partition=number % PARTITIONS)
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    return topic


def new_topic(bootstrap: str) -> str:
    """An empty one."""
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    with closing(KafkaCluster(bootstrap, {})) as cluster:
        cluster.create_topic(topic, PARTITIONS, 1, {}, 10)
    return topic


class Meter:
    """Counts records from when each partition has a committed transaction: without rebalance and take-over."""

    def __init__(self, records: int) -> None:
        self._missing = set(range(PARTITIONS))
        self._left, self._records = records, records
        self._began = 0.0
        self.rate = 0.0

    def is_enough(self, partitions: Iterable[int], records: int) -> bool:
        """After each commit: whether the rate is known."""
        if self._missing:
            self._missing.difference_update(partitions)
            self._began = time.perf_counter()
            return False
        self._left -= records
        self.rate = (self._records - self._left) / (time.perf_counter() - self._began)
        return self._left <= 0


def their_rate(bootstrap: str, topic: str, records: int, size: int) -> float:
    """Records a second."""
    loop, meter = Kip447(bootstrap, f"g-{uuid.uuid4().hex[:8]}", topic, new_topic(bootstrap), "a", BEST), Meter(records)
    batch: list[Any] = []
    while not (batch and meter.is_enough({message.partition() for message in batch}, len(batch))):
        if batch := loop.take(size, 0.5):
            loop.handle(batch)
    loop.close()
    return meter.rate


def our_rate(bootstrap: str, topic: str, log: str, records: int, size: int) -> float:
    """Records a second."""
    out, group, meter = new_topic(bootstrap), f"g-{uuid.uuid4().hex[:8]}", Meter(records)
    with our_consumer(bootstrap, group, topic, log, "a") as consumer:
        for batch in consumer.batches(max_messages=size, timeout=0.5):
            with consumer.transaction(batch) as tx:
                for message in batch:
                    tx.produce(out, value=transform(message.value()), partition=message.partition())
            if meter.is_enough([batch.partition], len(batch)):
                break
    return meter.rate


def rates(bootstrap: str, records: int, rounds: int) -> list[Row]:
    """A row for each size of batches; more records are there than are counted, so that no batch waits to be full."""
    topic, log = fill(bootstrap, records + BEFORE), new_log(bootstrap, 4)
    rows = []
    for size in BATCHES:
        our_rate(bootstrap, topic, log, records, size)  # the broker's first thousands of requests are slow
        their_rate(bootstrap, topic, records, size)
        pairs = in_turns(
            rounds,
            lambda size=size: our_rate(bootstrap, topic, log, records, size),  # type: ignore[misc]
            lambda size=size: their_rate(bootstrap, topic, records, size),  # type: ignore[misc]
        )
        ours, theirs = median(x for x, _ in pairs), median(y for _, y in pairs)
        ratio = median(x / y for x, y in pairs)
        rows.append(Row(f"batches of {size}", ours, theirs, ratio, 0.8, "records/s"))
    return rows


# Gaps.


def worker(arguments: dict[str, str]) -> None:
    """One worker process, until SIGTERM: its name is what it produces."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    bootstrap, group, topic, out = (arguments[x] for x in ("bootstrap", "group", "topic", "out"))
    name = arguments["name"]
    if arguments["protocol"]:
        loop = Kip447(bootstrap, group, topic, out, name, PROTOCOLS[arguments["protocol"]])
        while not ended.is_set():
            if batch := loop.take(MOST, WAIT_S):
                loop.handle(batch, lambda _: name.encode())
        loop.close()
        return
    best = {key: value for key, value in BEST.items() if key != "auto.offset.reset"}
    with our_consumer(bootstrap, group, topic, arguments["log"], name, **best) as consumer:
        for batch in consumer.batches(max_messages=MOST, timeout=WAIT_S):
            with consumer.transaction(batch) as tx:
                for message in batch:
                    tx.produce(out, value=name.encode(), partition=message.partition())
            if ended.is_set():
                break


class Reader:
    """A read_committed reader of the outputs, in a thread: partition → (time, worker) of each."""

    def __init__(self, bootstrap: str, out: str) -> None:
        self.seen: dict[int, list[tuple[float, str]]] = defaultdict(list)
        config = {"bootstrap.servers": bootstrap, "group.id": "nobody", "enable.auto.commit": False}
        self._consumer = Consumer({**BEST, **config, "isolation.level": "read_committed"})
        self._consumer.assign([TopicPartition(out, partition, 0) for partition in range(PARTITIONS)])
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            found: list[Any] = self._consumer.consume(500, 0.02)
            for message in found:
                if message.error() is None:
                    self.seen[message.partition()].append((time.monotonic(), message.value().decode()))

    def by(self, since: float) -> dict[int, set[str]]:
        """Whose outputs came since then."""
        return {p: {name for at, name in list(self.seen[p]) if at >= since} for p in range(PARTITIONS)}

    def gap_ms(self, partition: int, since: float) -> float:
        """The longest time between two outputs since then."""
        times = [at for at, _ in list(self.seen[partition]) if at >= since]
        return 1000 * max((late - early for early, late in pairwise(times)), default=float("inf"))

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._consumer.close()


def settled(reader: Reader, within_s: float = 90.0, steady_s: float = 1.5) -> list[int]:
    """Wait until each of two workers produces for two partitions; returns those of the first."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        time.sleep(0.1)
        found = reader.by(time.monotonic() - steady_s)
        if sorted(map(sorted, found.values())) == [["a"], ["a"], ["b"], ["b"]]:
            return [partition for partition, names in found.items() if names == {"a"}]
    raise AssertionError(f"two workers did not come to two partitions each: {found}")


def gaps(bootstrap: str, log: str, protocol: str, phase_s: float) -> float:
    """Milliseconds: the mean of the moved partitions' longest gaps."""
    topic, out = new_topic(bootstrap), new_topic(bootstrap)
    job = {"bootstrap": bootstrap, "topic": topic, "out": out, "log": log, "protocol": protocol}
    job["group"] = f"g-{uuid.uuid4().hex[:8]}"
    reader = Reader(bootstrap, out)
    processes = []
    try:
        with Grounds(bootstrap).feed([(topic, partition) for partition in range(PARTITIONS)], FEED_S):
            for name in ("a", "b"):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.transactions",
                    "--worker",
                    json.dumps({**job, "name": name}),
                ]
                processes.append(subprocess.Popen(command))
            moving = settled(reader)
            time.sleep(phase_s)
            began = time.monotonic()
            processes[0].send_signal(signal.SIGTERM)
            until = began + 60
            while any("b" not in reader.by(began)[partition] for partition in moving) and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(1.0)
        return sum(reader.gap_ms(partition, began - 0.2) for partition in moving) / len(moving)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        reader.close()


def handovers(bootstrap: str, rounds: int) -> list[Row]:
    """A row for each of Kafka's protocols."""
    log, draw = new_log(bootstrap, 4), Random(5)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for protocol in ("", *PROTOCOLS):
            found[protocol].append(gaps(bootstrap, log, protocol, draw.uniform(0.5, 2.5)))
    ours = median(found[""])
    return [
        Row(f"gap, {protocol}", ours, median(found[protocol]), ours / median(found[protocol]), target, "ms", True)
        for protocol in PROTOCOLS
        for target in (0.2 if protocol == DEFAULT else None,)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--handovers", type=int, default=5)
    parser.add_argument("--only", choices=("rate", "gap"))
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    rows: list[Row] = []
    with bench_kafka({"group.initial.rebalance.delay.ms": "0"}) as bootstrap:
        if options.only != "gap":
            rows += rates(bootstrap, options.records, options.rounds)
        if options.only != "rate":
            rows += handovers(bootstrap, options.handovers)
    conditions = {"records": options.records, "bytes": len(RECORD), "partitions": PARTITIONS, "rounds": options.rounds}
    report("transactions", rows, options.json, **conditions, handovers=options.handovers)


if __name__ == "__main__":
    main()
