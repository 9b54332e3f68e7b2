"""Messages a second through ``consumer.run(handle, batch=100)``, beside a loop over ``consume(100)``, and one by one.

Keys are 1,000 equal ones on four partitions. Handlers count, or take a millisecond for each call beside that, as one
request to a database does. Each pair runs in turns, in this process:

    python -m benchmarks.lists [--records N] [--rounds N] [--only TEXT] [--json FILE]

The bare loop has one thread, keeps no order of keys besides, tries nothing again, and commits nothing.
"""

from __future__ import annotations

import argparse
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sized
from functools import partial

from benchmarks.common import bench_kafka, in_turns, new_log, paired, report
from benchmarks.run_rate import KEYS, PARTITIONS, raw
from benchmarks.throughput import fill
from kafka_marshal import Marshal

BATCH, CONCURRENCY = 100, 4


class Handler:
    """It counts, takes this long (s) for each call, and notes when the first and the last message came."""

    def __init__(self, call_s: float, records: int) -> None:
        self._lock = threading.Lock()
        self._call_s = call_s
        self._left = self._records = records
        self.began = self.ended = 0.0
        self.stop: Callable[[], object] = bool

    def several(self, messages: Sized) -> None:
        self._count(len(messages))

    def one(self, _: object) -> None:
        self._count(1)

    def _count(self, messages: int) -> None:
        self.began = self.began or time.perf_counter()
        if self._call_s:
            time.sleep(self._call_s)
        with self._lock:
            self._left -= messages
            if self._left == 0:
                self.ended = time.perf_counter()
                self.stop()

    @property
    def rate(self) -> float:
        return self._records / (self.ended - self.began)


def bare(bootstrap: str, topic: str, call_s: float, records: int) -> float:
    """``consume(100)`` in a loop."""
    handler = Handler(call_s, records)
    for messages in raw(bootstrap, topic, handler, BATCH):
        if messages:
            handler.several(messages)
    return handler.rate


def run(bootstrap: str, log: str, topic: str, batch: int | None, call_s: float, records: int) -> float:
    """``consumer.run``; batch: how many messages a call has, None: one by one."""
    handler = Handler(call_s, records)
    with (
        Marshal(bootstrap, group_id=f"g-{uuid.uuid4().hex[:8]}", client_id="c", topic=log) as marshal,
        marshal.consumer([topic]) as consumer,
    ):
        handler.stop = consumer.stop
        if batch is None:
            consumer.run(handler.one, concurrency=CONCURRENCY)
        else:
            consumer.run(handler.several, batch=batch, concurrency=CONCURRENCY)
    return handler.rate


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rows = []
    with bench_kafka() as bootstrap:
        topic, log = fill(bootstrap, PARTITIONS, args.records, KEYS), new_log(bootstrap, 8)
        beside = {
            f"consume({BATCH})": partial(bare, bootstrap, topic),
            "run, one by one": partial(run, bootstrap, log, topic, None),
        }
        for call_s in (0.0, 0.001):
            for name, baseline in beside.items():
                row = f"run(batch={BATCH}) ÷ {name}, {call_s * 1000:g} ms a call"
                if args.only in row:
                    ours = partial(run, bootstrap, log, topic, BATCH, call_s, args.records)
                    pairs = in_turns(args.rounds, ours, partial(baseline, call_s, args.records))
                    rows.append(paired(row, pairs, None, "messages/s"))
    report("lists", rows, args.json, records=args.records, rounds=args.rounds)


if __name__ == "__main__":
    main()
