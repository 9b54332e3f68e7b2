"""Messages a second in an event loop, divided by the same in a thread; for ours and for confluent-kafka's AIOConsumer.

    python -m benchmarks.aio [--records N] [--rounds N] [--json FILE]

100-byte messages of one partition: an `async for` beside a `for`, batches of 5,000 both ways, and for the peer
`await consume(500)` beside a loop of `consume(500)`, and `await poll()` beside `poll()`. Interleaved, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from statistics import median
from typing import Any

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.aio import AIOConsumer

from benchmarks.common import Row, bench_kafka, in_turns, new_log, report
from benchmarks.throughput import RAW_BATCH, RAW_CONFIG, by_batches, by_iteration, fill, marshalled
from kafka_marshal.aio import Marshal

#: AIOConsumer passes each call to a thread pool: polling single messages is so slow that fewer records suffice.
POLL_SHARE = 10

PEER_BATCH = 500
TARGET = 0.8

Run = Callable[[str, str, int], float]


async def _iterate(consumer: Any, records: int) -> float:
    seen, total, began = 0, 0, 0.0
    async for message in consumer:
        began = began or time.perf_counter()
        total += len(message.value() or b"") + (message.offset() or 0)
        seen += 1
        if seen >= records:
            break
    return time.perf_counter() - began


async def _batches(consumer: Any, records: int) -> float:
    seen, total, began = 0, 0, 0.0
    async for batch in consumer.batches(max_messages=RAW_BATCH, timeout=0.0):
        began = began or time.perf_counter()
        for message in batch.messages:
            total += len(message.value() or b"") + (message.offset() or 0)
        batch.done()
        seen += len(batch)
        if seen >= records:
            break
    return time.perf_counter() - began


def in_loop(work: Callable[[Any, int], Coroutine[Any, Any, float]], coordination: str) -> Run:
    async def main(bootstrap: str, topic: str, records: int) -> float:
        async with (
            Marshal(bootstrap, group_id=f"g-{uuid.uuid4().hex[:8]}", topic=coordination) as marshal,
            marshal.consumer([topic]) as consumer,
        ):
            return await work(consumer, records)

    return lambda bootstrap, topic, records: asyncio.run(main(bootstrap, topic, records))


def in_thread(work: Callable[[Any, int], float], coordination: str) -> Run:
    return lambda bootstrap, topic, records: marshalled(bootstrap, coordination, topic, records, work)


def _settings(bootstrap: str, topic: str) -> tuple[dict[str, Any], list[TopicPartition]]:
    return {**RAW_CONFIG, "bootstrap.servers": bootstrap}, [TopicPartition(topic, 0, 0)]


def peer_thread(batch: int) -> Run:
    def run(bootstrap: str, topic: str, records: int) -> float:
        settings, start = _settings(bootstrap, topic)
        consumer, seen, began = RawConsumer(settings), 0, 0.0
        consumer.assign(start)
        while seen < records:
            found = consumer.consume(batch, 1.0) if batch > 1 else [x for x in [consumer.poll(1.0)] if x is not None]
            if found:
                began = began or time.perf_counter()
            seen += len(found)
        took = time.perf_counter() - began
        consumer.close()
        return took

    return run


def peer_loop(batch: int) -> Run:
    async def main(bootstrap: str, topic: str, records: int) -> float:
        settings, start = _settings(bootstrap, topic)
        consumer, seen, began = AIOConsumer(settings), 0, 0.0
        await consumer.assign(start)
        while seen < records:
            if batch > 1:
                found = await consumer.consume(batch, timeout=1.0)
            else:
                found = [x for x in [await consumer.poll(timeout=1.0)] if x is not None]
            if found:
                began = began or time.perf_counter()
            seen += len(found)
        took = time.perf_counter() - began
        await consumer.close()
        return took

    return lambda bootstrap, topic, records: asyncio.run(main(bootstrap, topic, records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=600_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    with bench_kafka() as bootstrap:
        coordination = new_log(bootstrap, 1)
        topic = fill(bootstrap, 1, args.records)
        cases: list[tuple[str, int, Run, Run, float | None]] = [
            ("async for ÷ for", 1, in_loop(_iterate, coordination), in_thread(by_iteration, coordination), TARGET),
            ("batches", 1, in_loop(_batches, coordination), in_thread(by_batches, coordination), TARGET),
            ("AIOConsumer.consume ÷ Consumer.consume", 1, peer_loop(PEER_BATCH), peer_thread(PEER_BATCH), None),
            ("AIOConsumer.poll ÷ Consumer.poll", POLL_SHARE, peer_loop(1), peer_thread(1), None),
        ]
        for name, share, in_a_loop, in_a_thread, target in cases:
            records = args.records // share
            runs = [partial(run, bootstrap, topic, records) for run in (in_a_loop, in_a_thread)]
            times = in_turns(args.rounds, *runs)
            ours, baseline = (records / median(column) for column in zip(*times, strict=True))
            ratio = median(thread / loop for loop, thread in times)
            rows.append(Row(name, ours, baseline, ratio, target, "msg/s"))
    report("aio", rows, args.json, records=args.records, rounds=args.rounds)


if __name__ == "__main__":
    main()
