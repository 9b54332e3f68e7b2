"""From produce() until a handler begins, at a steady rate, for each form of reading, beside a raw consumer:

    python -m benchmarks.latency [--rate N] [--seconds N] [--rounds N] [--only TEXT] [--json FILE]

Four partitions, one member, all forms in turns on one broker. And from an append until the own replica has applied it,
beside a bare producer and consumer, each after 10 ms of idleness: the whole way through engine, encoding, producer,
broker, tail, decoding, replay, and waking the waiting thread.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer, TopicPartition

from benchmarks.common import Row, bench_kafka, new_log, paired, report
from benchmarks.pair import COORDINATION_PARTITIONS, beside_raw_pair
from kafka_marshal import Batches, Group, Keys, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from rationalizer import Outcome, Tick
from rationalizer.limits import MAX_KEY_HASH

PARTITIONS, KEYS, HANDLERS = 4, 50, 8

#: Not counted: of a form that has just begun (s).
WARM_UP_S = 1.0

#: The last message may come this long after it was produced (s).
LATEST_S = 30.0

#: A handler.
Note = Callable[[Any], object]


class OwnRoundTrip:
    """Appends Ticks through a Marshal's driver and waits for its replica."""

    def __init__(self, marshal: Marshal) -> None:
        self._driver = marshal._driver
        self._seen = 0
        self._driver.listeners.append(self._applied)

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        if outcome.type == "Tick":
            self._seen += 1

    def __call__(self, number: int) -> float:
        """Seconds until a Tick is applied and the waiting thread knows."""
        wanted = self._seen + 1
        began = time.perf_counter()
        with self._driver.lock.locked() as engine:
            engine.outbox.append(number % COORDINATION_PARTITIONS, Tick(*engine.ids))
        with self._driver.condition:
            self._driver.wait_for(lambda: self._seen >= wanted, 10)
        return time.perf_counter() - began


def loop(consumer: Any, note: Note) -> None:
    for message in consumer:
        note(message)


def batches(consumer: Any, note: Note, **options: Any) -> None:
    for batch in consumer.batches(**options):
        for message in batch:
            note(message)
        batch.done()


def run(consumer: Any, note: Note, order: str = "key") -> None:
    consumer.run(note, concurrency=HANDLERS, order=order)


def coroutines(consumer: Any, note: Note) -> None:
    async def handle(message: object) -> None:
        note(message)

    consumer.run(handle, concurrency=HANDLERS)


#: How it is read, and what the consumer is made with. Keys of all partitions: they are named with the topic.
FORMS: dict[str, tuple[Callable[[Any, Note], None], dict[str, Any]]] = {
    "loop": (loop, {}),
    "batches()": (batches, {}),
    "batches(timeout=0)": (partial(batches, timeout=0), {}),
    "loop, at most once": (loop, {"delivery": "at-most-once"}),
    "run, threads": (run, {}),
    "run, coroutines": (coroutines, {}),
    "group, loop": (loop, {"mode": Group()}),
    "by keys, loop": (loop, {"mode": Keys}),
    "shared by batches, batches()": (batches, {"mode": Batches()}),
    "shared by batches, run": (partial(run, order="none"), {"mode": Batches()}),
}


def raw(bootstrap: str, topic: str, note: Note, stops: list[Callable[[], object]]) -> None:
    """A plain consumer, until it is stopped."""
    ended = threading.Event()
    stops.append(ended.set)
    consumer = RawConsumer({"bootstrap.servers": bootstrap, "group.id": "raw", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    while not ended.is_set():
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            note(message)
    consumer.close()


def ours(name: str, log: str, bootstrap: str, topic: str, note: Note, stops: list[Callable[[], object]]) -> None:
    """One member, which reads so."""
    read, options = FORMS[name]
    topics: list[list[str]] = [[topic]]
    if options.get("mode") is Keys:
        spans = {(topic, number): [(0, MAX_KEY_HASH)] for number in range(PARTITIONS)}
        topics, options = [], {"mode": Keys(spans)}
    with Marshal(bootstrap, group_id=f"g-{topic}", client_id="c", topic=log) as marshal:
        stops.append(marshal.stop)
        with marshal.consumer(*topics, **options) as consumer:
            read(consumer, note)


def measure(bootstrap: str, rate: float, seconds: float, read: Callable[..., None]) -> tuple[float, float]:
    """Milliseconds from produce() to the handler: the median and the 99th percentile."""
    topic, found, stops = f"t-{uuid.uuid4().hex[:8]}", list[float](), list[Callable[[], object]]()
    cluster = KafkaCluster(bootstrap, {})
    cluster.create_topic(topic, PARTITIONS, 1, {}, 10)
    cluster.close()

    def note(message: Any) -> None:
        found.append((time.perf_counter() - float(message.value())) * 1000)

    reader = threading.Thread(target=read, args=(bootstrap, topic, note, stops))
    reader.start()
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})

    def produce(number: int) -> None:
        value, key = repr(time.perf_counter()).encode(), b"%d" % (number % KEYS)
        producer.produce(topic, value, key, partition=number % PARTITIONS)
        producer.poll(0)

    while len(found) < PARTITIONS:
        assert reader.is_alive()
        produce(len(found))
        time.sleep(0.1)
    time.sleep(WARM_UP_S)
    found.clear()
    due, count = time.perf_counter(), int(rate * seconds)
    for number in range(count):
        produce(number)
        due += 1 / rate
        time.sleep(max(0.0, due - time.perf_counter()))
    producer.flush(5)
    until = time.perf_counter() + LATEST_S
    while len(found) < count and time.perf_counter() < until:
        time.sleep(0.05)
    stops[0]()
    reader.join()
    assert len(found) >= count, f"{len(found)} of {count} messages came"
    return median(found), quantiles(found, n=100)[-1]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    names = [name for name in FORMS if args.only in name]
    came: dict[str, list[tuple[float, float]]] = {name: [] for name in ("raw", *names)}
    with bench_kafka() as bootstrap:
        log = new_log(bootstrap, COORDINATION_PARTITIONS)
        for number in range(args.rounds):
            for name in came if number % 2 else reversed(came):
                read = raw if name == "raw" else partial(ours, name, log)
                came[name].append(measure(bootstrap, args.rate, args.seconds, read))
    rows = []
    for name, (at, what) in itertools.product(names, enumerate(("p50", "p99"))):
        pairs = [(mine[at], bare[at]) for mine, bare in zip(came[name], came["raw"], strict=True)]
        rows.append(paired(f"{name}, {what}", pairs, None, "ms", at_most=True))
    if args.only in "produce to applied":
        trips = beside_raw_pair(int(args.rate * args.seconds), OwnRoundTrip)
        for what, at, target in (("p50", 49, 2.0), ("p95", 94, None)):
            mine, bare = (quantiles(each, n=100)[at] for each in trips)
            rows.append(Row(f"produce to applied, {what}", mine, bare, mine / bare, target, "ms", at_most=True))
    conditions = {"rate": args.rate, "seconds": args.seconds, "rounds": args.rounds}
    report("latency", rows, args.json, **conditions)


if __name__ == "__main__":
    main()
