"""Messages a second with metrics scraped over HTTP, divided by the same without.

Three ways to take 100-byte messages from a topic of four partitions: batches, a loop, and run() with 16 handlers in
threads, which is timed by marshal.timing() as well. Rounds with and without are interleaved; the ratio is the median of
the rounds' ratios. The scraper is a separate process that asks once a second, fifteen times as often as usual.

Each is measured by the clock, which includes other load of a shared machine, and as messages per second of this
process's processor time, which has the target.

    python -m benchmarks.metrics [--records N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

from benchmarks.common import Row, bench_kafka, in_turns, new_log, report
from benchmarks.throughput import by_batches, by_iteration, fill
from kafka_marshal import Marshal, Message
from kafka_marshal.client.consumer import Consumer

PARTITIONS = 4
SCRAPE_EVERY_S = 1.0
TARGET = 0.99

#: A program: python SCRAPER URL.
SCRAPER = f"""
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1]).read()
    time.sleep({SCRAPE_EVERY_S})
"""

#: run() handles messages one by one, so it gets fewer.
RUN_SHARE = 4

Loop = Callable[[Marshal, Consumer, int, bool], float]


@contextmanager
def scraped(marshal: Marshal) -> Iterator[None]:
    """Read /metrics repeatedly, as Prometheus does."""
    scraping = subprocess.Popen([sys.executable, "-S", "-c", SCRAPER, f"{marshal.serve(0).url}/metrics"])
    try:
        yield
    finally:
        scraping.kill()
        scraping.wait()


def by_handlers(marshal: Marshal, consumer: Consumer, records: int, timed: bool) -> float:
    """Seconds for run(), from its first message to its last."""
    left, began = records // RUN_SHARE, 0.0

    def handle(message: Message) -> None:
        nonlocal left, began
        began = began or time.perf_counter()
        left -= 1  # not exact among threads, equally on both sides
        if left <= 0:
            marshal.stop()

    consumer.run(handle, order="none", hooks=[marshal.timing()] if timed else ())
    return time.perf_counter() - began


LOOPS: dict[str, Loop] = {
    "batches(), scraped ÷ not": lambda _, consumer, records, __: by_batches(consumer, records),
    "iteration, scraped ÷ not": lambda _, consumer, records, __: by_iteration(consumer, records),
    "run(), scraped ÷ not": lambda marshal, consumer, records, _: by_handlers(marshal, consumer, records, False),
    "run(), scraped and timed ÷ not": by_handlers,
}


def measured(bootstrap: str, coordination: str, topic: str, records: int, loop: Loop, on: bool) -> tuple[float, float]:
    """Seconds by the clock, and of this process's processor time."""
    with (
        Marshal(bootstrap, group_id=f"g-{uuid.uuid4().hex[:8]}", topic=coordination) as marshal,
        marshal.consumer([topic]) as consumer,
    ):
        began = time.process_time()
        if not on:
            return loop(marshal, consumer, records, False), time.process_time() - began
        with scraped(marshal):
            return loop(marshal, consumer, records, True), time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_500_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    with bench_kafka() as bootstrap:
        coordination = new_log(bootstrap, 1)
        topic = fill(bootstrap, PARTITIONS, args.records)
        for name, loop in LOOPS.items():
            runs = [partial(measured, bootstrap, coordination, topic, args.records, loop, on) for on in (True, False)]
            times = in_turns(args.rounds, *runs)
            records = args.records // (RUN_SHARE if "run()" in name else 1)
            for place, unit in enumerate(("msg/s", "msg/CPU s")):
                pairs = [(with_it[place], without[place]) for with_it, without in times]
                ours, baseline = (records / median(column) for column in zip(*pairs, strict=True))
                ratio = median(without / with_it for with_it, without in pairs)
                target = TARGET if place and "timed" not in name else None
                rows.append(Row(name, ours, baseline, ratio, target, unit))
    report("metrics", rows, args.json, records=args.records, rounds=args.rounds, scrape_every_s=SCRAPE_EVERY_S)


if __name__ == "__main__":
    main()
