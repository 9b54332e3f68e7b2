"""Messages a second through a Consumer, divided by a raw assign + consume loop with the best settings.

Both touch value and offset of every 100-byte record, on the same broker, interleaved, medians of the rounds:

    python -m benchmarks.throughput [--records N] [--rounds N] [--json FILE]

Rows: batches() on one partition and on four (with 1, 2 and 4 threads), iteration, and at most once with batches of
10,000, all three ways.
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from statistics import median

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer, TopicPartition

from benchmarks.common import Row, bench_kafka, new_log, report
from kafka_marshal import Claims, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.client.consumer import Consumer

RECORD = b"x" * 100

#: Settings of the raw loop, and of our reader: those that matter, as measured.
RAW_CONFIG: dict[str, object] = {
    "enable.auto.commit": False,
    "auto.offset.reset": "error",
    "fetch.queue.backoff.ms": 1,
    "fetch.min.bytes": 1,
    "queued.min.messages": 20_000,
    "group.id": "raw",
}

RAW_BATCH = 5_000

AMO_BATCH = 10_000

AMO: dict[str, object] = {"delivery": "at-most-once", "batch_size": AMO_BATCH}

#: Small batches, where the wait for a grant counts most; with and without a request ahead.
SMALL: dict[str, object] = {"delivery": "at-most-once", "batch_size": 100}

#: Time of a handler that waits for another system (s), which a request ahead overlaps.
HANDLER_S = 0.001


def fill(bootstrap: str, partitions: int, records: int, keys: int = 0) -> str:
    """A topic with that many records, evenly spread; keys: how many they have."""
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    cluster = KafkaCluster(bootstrap, {})
    cluster.create_topic(topic, partitions, 1, {}, 10)
    cluster.close()
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for number in range(records):
        key = b"k%d" % (number % keys) if keys else None
        producer.produce(topic, RECORD, key=key, partition=number % partitions)
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    return topic


def raw(bootstrap: str, topic: str, partitions: int, records: int) -> float:
    """Seconds for the raw loop, from the first message to the last."""
    consumer = RawConsumer({**RAW_CONFIG, "bootstrap.servers": bootstrap})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    seen = total = 0
    began = 0.0
    while seen < records:
        messages = consumer.consume(min(RAW_BATCH, records - seen), 1.0)
        if messages and not began:
            began = time.perf_counter()
        for message in messages:
            total += len(message.value() or b"") + (message.offset() or 0)
        seen += len(messages)
    took = time.perf_counter() - began
    consumer.close()
    return took


def by_batches(consumer: Consumer, records: int, size: int = RAW_BATCH) -> float:
    seen = total = 0
    began = 0.0
    for batch in consumer.batches(max_messages=size, timeout=0.0):
        began = began or time.perf_counter()
        for message in batch.messages:
            total += len(message.value() or b"") + (message.offset() or 0)
        batch.done()
        seen += len(batch)
        if seen >= records:
            break
    return time.perf_counter() - began


def by_slow_batches(consumer: Consumer, records: int) -> float:
    """Simulate sending each batch to another system."""
    seen, began = 0, 0.0
    for batch in consumer.batches(max_messages=100, timeout=0.0):
        began = began or time.perf_counter()
        time.sleep(HANDLER_S * len(batch) / 100)
        seen += len(batch)
        if seen >= records:
            break
    return time.perf_counter() - began


def by_whole_batches(consumer: Consumer, records: int) -> float:
    return by_batches(consumer, records, AMO_BATCH)


def by_threads(threads: int) -> Callable[[Consumer, int], float]:
    """Several threads that take batches from one consumer."""

    def loop(consumer: Consumer, records: int) -> float:
        seen, began, ended = [0] * threads, [0.0] * threads, threading.Event()

        def work(number: int) -> None:
            for batch in consumer.batches(max_messages=RAW_BATCH, timeout=0.0):
                began[number] = began[number] or time.perf_counter()
                sum(len(message.value() or b"") + (message.offset() or 0) for message in batch.messages)
                batch.done()
                seen[number] += len(batch)
                if sum(seen) >= records:
                    ended.set()
                if ended.is_set():
                    break

        workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
        for worker in workers:
            worker.start()
        ended.wait()
        return time.perf_counter() - min(filter(None, began))

    return loop


def by_iteration(consumer: Consumer, records: int) -> float:
    total = 0
    began = 0.0
    for seen, message in enumerate(consumer, 1):
        began = began or time.perf_counter()
        total += len(message.value() or b"") + (message.offset() or 0)
        if seen >= records:
            break
    return time.perf_counter() - began


def marshalled(
    bootstrap: str,
    coordination: str,
    topic: str,
    records: int,
    loop: Callable[[Consumer, int], float],
    **options: object,
) -> float:
    """Seconds of one way of reading through a Consumer."""
    with (
        Marshal(bootstrap, group_id=f"g-{uuid.uuid4().hex[:8]}", topic=coordination) as marshal,
        marshal.consumer([topic], **options) as consumer,  # type: ignore[call-overload]
    ):
        return loop(consumer, records)


def claimed_ahead(bootstrap: str, coordination: str, topic: str, records: int, rounds: int) -> Iterator[Row]:
    """At most once in batches of 100: with the next one requested ahead, beside without."""
    for name, loop in (("no work", by_batches), (f"{HANDLER_S * 1000:g} ms of work", by_slow_batches)):
        times = [
            [
                marshalled(bootstrap, coordination, topic, records, loop, **SMALL, mode=Claims(claim_ahead=ahead))
                for ahead in (True, False)
            ]
            for _ in range(rounds)
        ]
        ours, baseline = (records / median(column) for column in zip(*times, strict=True))
        ratio = median(without / ahead for ahead, without in times)
        title = f"AMO batches of 100, {name}, claimed ahead ÷ not"
        yield Row(title, ours, baseline, ratio, target=None, unit="records/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=600_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    cases: list[tuple[str, int, Callable[[Consumer, int], float], dict[str, object], float]] = [
        ("ALO batches(), 1 partition", 1, by_batches, {}, 0.95),
        ("ALO batches(), 4 partitions", 4, by_batches, {}, 0.88),
        ("ALO batches(), 4 partitions, 2 threads", 4, by_threads(2), {}, 0.0),
        ("ALO batches(), 4 partitions, 4 threads", 4, by_threads(4), {}, 0.0),
        ("ALO iteration, 1 partition", 1, by_iteration, {}, 0.85),
        ("AMO batches(), handed out in halves", 1, by_batches, AMO, 0.80),
        ("AMO batches(), handed out whole", 1, by_whole_batches, AMO, 0.80),
        ("AMO iteration", 1, by_iteration, AMO, 0.80),
    ]
    with bench_kafka() as bootstrap:
        coordination = new_log(bootstrap, 8)
        topics = {partitions: fill(bootstrap, partitions, args.records) for partitions in (1, 4)}
        times: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for name, partitions, loop, options, _ in cases:
                topic = topics[partitions]
                times.setdefault(f"raw {name}", []).append(raw(bootstrap, topic, partitions, args.records))
                took = marshalled(bootstrap, coordination, topic, args.records, loop, **options)
                times.setdefault(name, []).append(took)
        rows = [
            Row(
                name,
                ours=args.records / median(times[name]),
                baseline=args.records / median(times[f"raw {name}"]),
                ratio=median(b / a for a, b in zip(times[name], times[f"raw {name}"], strict=True)),
                target=target or None,
                unit="records/s",
            )
            for name, _, _, _, target in cases
        ]
        rows.extend(claimed_ahead(bootstrap, coordination, topics[1], args.records // 10, args.rounds))
    report("throughput", rows, args.json, records=args.records, rounds=args.rounds)


if __name__ == "__main__":
    main()
