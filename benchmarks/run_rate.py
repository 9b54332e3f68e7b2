"""Messages a second through ``consumer.run`` with a handler that only counts, beside what one writes by hand.

Keys are 1,000 equal ones on four partitions; each row's baseline, on a raw consumer, runs in turns with it:

    python -m benchmarks.run_rate [--records N] [--rounds N] [--only TEXT] [--json FILE]

Threads are compared with ``ThreadPoolExecutor.map`` of as many threads, coroutines with tasks behind a ``Semaphore``.
Those keep no order, try nothing again, and know of no message whether it is done.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import TopicPartition

from benchmarks.common import bench_kafka, in_turns, new_log, paired, report
from benchmarks.throughput import fill
from kafka_marshal import Marshal

PARTITIONS, KEYS, READ = 4, 1_000, 500


class Ends(Protocol):
    """A handler that notes when all messages have come."""

    ended: float


class Counter:
    """The handler: it counts, and notes when the first and the last message came."""

    def __init__(self, records: int) -> None:
        self._numbers = itertools.count(1)
        self._records = records
        self.began = self.ended = 0.0
        self.stop: Callable[[], object] = bool

    def __call__(self, message: object) -> None:
        number = next(self._numbers)
        if number == 1:
            self.began = time.perf_counter()
        elif number == self._records:
            self.ended = time.perf_counter()
            self.stop()

    async def coroutine(self, message: object) -> None:
        self(message)

    @property
    def rate(self) -> float:
        return self._records / (self.ended - self.began)


def raw(bootstrap: str, topic: str, counter: Ends, at_once: int = READ) -> Iterator[list[Any]]:
    """The messages of a plain consumer, as they come, until all are counted."""
    config = {"bootstrap.servers": bootstrap, "enable.auto.commit": False, "group.id": "raw"}
    consumer = RawConsumer({**config, "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    while not counter.ended:
        yield consumer.consume(at_once, 0.1)
    consumer.close()


def pool(bootstrap: str, topic: str, records: int, concurrency: int) -> float:
    """A pool of threads."""
    counter = Counter(records)
    with ThreadPoolExecutor(concurrency) as executor:
        for messages in raw(bootstrap, topic, counter):
            list(executor.map(counter, messages))
    return counter.rate


def tasks(bootstrap: str, topic: str, records: int, concurrency: int) -> float:
    """A task for each message, behind a semaphore."""
    counter, limit = Counter(records), asyncio.Semaphore(concurrency)

    async def handle(message: object) -> None:
        async with limit:
            await counter.coroutine(message)

    async def consume() -> None:
        for messages in raw(bootstrap, topic, counter):
            await asyncio.gather(*map(handle, messages))

    asyncio.run(consume())
    return counter.rate


def run(bootstrap: str, log: str, topic: str, records: int, concurrency: int, order: Any, is_async: bool) -> float:
    """``consumer.run``."""
    counter = Counter(records)
    with (
        Marshal(bootstrap, group_id=f"g-{uuid.uuid4().hex[:8]}", client_id="c", topic=log) as marshal,
        marshal.consumer([topic]) as consumer,
    ):
        counter.stop = consumer.stop
        consumer.run(counter.coroutine if is_async else counter, concurrency=concurrency, order=order)
    return counter.rate


#: Name, handlers, order, whether they are coroutines, and the target of the ratio.
ROWS: list[tuple[str, int, str, bool, float]] = [
    ("16 threads, by key", 16, "key", False, 0.9),
    ("16 threads, no order", 16, "none", False, 1.0),
    ("one thread, by key", 1, "key", False, 1.0),
    ("16 coroutines, by key", 16, "key", True, 1.0),
]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rows = []
    with bench_kafka() as bootstrap:
        topic, log = fill(bootstrap, PARTITIONS, args.records, KEYS), new_log(bootstrap, 8)
        for name, concurrency, order, is_async, target in [row for row in ROWS if args.only in row[0]]:
            ours = partial(run, bootstrap, log, topic, args.records, concurrency, order, is_async)
            baseline = partial(tasks if is_async else pool, bootstrap, topic, args.records, concurrency)
            rows.append(paired(name, in_turns(args.rounds, ours, baseline), target, "messages/s"))
    report("run_rate", rows, args.json, records=args.records, rounds=args.rounds)


if __name__ == "__main__":
    main()
