"""The cost of the Kafka adapter, beside bare confluent-kafka with the best settings, on the same broker:

- *append to tail*: from append() until the tail returns the record, ÷ a bare produce/consume pair; each after
  10 ms of idleness, interleaved;
- *tail*: draining a log of small records into log entries, ÷ a bare loop that reads value, offset and timestamp;
- *reader*: draining user data, ÷ a bare consume loop; both touch value and offset.

    python -m benchmarks.adapters [--rounds N] [--records N] [--drains N] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Callable
from statistics import median, quantiles

from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.common import Row, bench_kafka, report
from benchmarks.pair import IDLE_S, RawPair
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.ports import Appender, Tail

WARM_UP = 20
CPS = 8
BATCH = 5_000
LOG_TIME = {"message.timestamp.type": "LogAppendTime"}

BARE: dict[str, str | int | float | bool] = {
    "group.id": "bare",
    "enable.auto.commit": False,
    "auto.offset.reset": "error",
    "fetch.queue.backoff.ms": 1,
}


def own_round_trip(appender: Appender, tail: Tail, number: int) -> float:
    """Seconds until our tail returns a record of 75 bytes."""
    began = time.perf_counter()
    appender.append(number % CPS, b"x" * 75)
    while not tail.read(1.0).records:
        pass
    took = time.perf_counter() - began
    appender.poll()
    return took


def latency(bootstrap: str, rounds: int) -> list[Row]:
    """Round trips, interleaved."""
    cluster = KafkaCluster(bootstrap)
    log, topic = (f"bench-{uuid.uuid4().hex[:8]}" for _ in range(2))
    cluster.create_topic(log, CPS, 1, LOG_TIME, 10)
    cluster.create_topic(topic, 1, 1, {}, 10)
    raw = RawPair(bootstrap, topic)
    tail = cluster.tail(log, dict.fromkeys(range(CPS), 0))
    appender = cluster.appender(log, delivery_timeout_ms=3_000)
    bare: list[float] = []
    ours: list[float] = []
    for number in range(rounds + WARM_UP):
        time.sleep(IDLE_S)
        trip = raw.round_trip()
        time.sleep(IDLE_S)
        own = own_round_trip(appender, tail, number)
        if number >= WARM_UP:
            bare.append(trip * 1000)
            ours.append(own * 1000)
    appender.close(1.0)
    tail.close()
    raw.close()
    cluster.close()
    p95 = quantiles(ours, n=20)[-1], quantiles(bare, n=20)[-1]
    return [
        Row("append to tail, p50", median(ours), median(bare), median(ours) / median(bare), 1.2, "ms", at_most=True),
        Row("append to tail, p95", *p95, p95[0] / p95[1], None, "ms", at_most=True),
    ]


def fill(bootstrap: str, partitions: int, records: int, size: int) -> str:
    """A topic with that many records, evenly spread."""
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    cluster = KafkaCluster(bootstrap)
    cluster.create_topic(topic, partitions, 1, LOG_TIME, 10)
    cluster.close()
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 2_000_000})
    value = b"x" * size
    for number in range(records):
        producer.produce(topic, value, b"", number % partitions)
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    return topic


def drain_bare(bootstrap: str, topic: str, partitions: int, records: int, *, stamps: bool) -> float:
    """Seconds of the bare loop, from the first message to the last."""
    consumer = Consumer({**BARE, "bootstrap.servers": bootstrap})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    seen = 0
    began = 0.0
    while seen < records:
        messages = consumer.consume(min(BATCH, records - seen), 1.0)  # it waits until it has that number
        began = began or time.perf_counter()
        if stamps:
            for message in messages:
                message.value()
                message.offset()
                message.timestamp()
        else:
            for message in messages:
                message.value()
                message.offset()
        seen += len(messages)
    took = time.perf_counter() - began
    consumer.close()
    return took


def drain_tail(bootstrap: str, topic: str, partitions: int, records: int) -> float:
    """Seconds of our tail."""
    cluster = KafkaCluster(bootstrap)
    tail = cluster.tail(topic, dict.fromkeys(range(partitions), 0))
    seen = 0
    began = 0.0
    while seen < records:
        batch = tail.read(1.0)
        began = began or time.perf_counter()
        seen += sum(map(len, batch.records.values()))
    took = time.perf_counter() - began
    tail.close()
    cluster.close()
    return took


def drain_reader(bootstrap: str, topic: str, partitions: int, records: int) -> float:
    """Seconds of our data reader."""
    cluster = KafkaCluster(bootstrap)
    reader = cluster.data_reader("bench", {})
    reader.assign({(topic, partition): 0 for partition in range(partitions)})
    seen = 0
    began = 0.0
    while seen < records:
        messages, _ = reader.read(BATCH, 1.0)
        began = began or time.perf_counter()
        for message in messages:
            message.value()
            message.offset()
        seen += len(messages)
    took = time.perf_counter() - began
    reader.close()
    cluster.close()
    return took


def compare(
    name: str, ours: Callable[[], float], bare: Callable[[], float], records: int, drains: int, target: float
) -> Row:
    """Interleaved, with alternating order; the ratio is the median of the rounds' ratios."""
    pairs = []
    for number in range(drains):
        if number % 2:
            own, raw = ours(), bare()
        else:
            raw, own = bare(), ours()
        pairs.append((records / own, records / raw))
    ratio = median(own / raw for own, raw in pairs)
    return Row(name, median(own for own, _ in pairs), median(raw for _, raw in pairs), ratio, target, "records/s")


def throughput(bootstrap: str, records: int, drains: int) -> list[Row]:
    """Drains, interleaved."""
    rows = []
    log = fill(bootstrap, CPS, records, 60)
    rows.append(
        compare(
            f"tail, {CPS} partitions",
            lambda: drain_tail(bootstrap, log, CPS, records),
            lambda: drain_bare(bootstrap, log, CPS, records, stamps=True),
            records,
            drains,
            0.85,
        )
    )
    for partitions in (1, 4):
        topic = fill(bootstrap, partitions, records, 100)
        rows.append(
            compare(
                f"reader, {partitions} partition{'s' * (partitions > 1)}",
                lambda topic=topic, partitions=partitions: drain_reader(bootstrap, topic, partitions, records),  # type: ignore[misc]
                lambda topic=topic, partitions=partitions: drain_bare(  # type: ignore[misc]
                    bootstrap, topic, partitions, records, stamps=False
                ),
                records,
                drains,
                0.97,
            )
        )
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--drains", type=int, default=9)
    parser.add_argument("--json")
    args = parser.parse_args()
    with bench_kafka() as bootstrap:
        rows = latency(bootstrap, args.rounds) + throughput(bootstrap, args.records, args.drains)
    report("adapters", rows, args.json, rounds=args.rounds, records=args.records, drains=args.drains)


if __name__ == "__main__":
    main()
