"""One worker beside a plain consumer of the same partitions: its memory, and a thousand partitions.

    python -m benchmarks.one_worker [--partitions N] [--backlog MB] [--rounds N] [--only TEXT] [--json FILE]

Each in a separate process, in turns on one broker. Memory is what is resident: at rest; with a handler that hangs
before a backlog of 1 kB messages; the most while it works the backlog off. Partitions: from the constructor's call
until it has handled a message of each; processor at rest; and from `stop()` until another worker, which waits for the
same partitions (`mode=Keys`), has all of them (its baseline is the start of a plain consumer).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer, TopicPartition

from benchmarks.common import Row, bench_kafka, in_turns, new_log, paired, report
from benchmarks.start_fleet import spent
from kafka_marshal import Claims, Keys, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster

FEW = 4
REST_S, IDLE_S = 5.0, 30.0
#: What is resident has settled if it grows by less than this (MB) in a second.
SETTLED_MB = 2.0


class Job(NamedTuple):
    """What a process works on."""

    bootstrap: str
    log: str
    topic: str
    partitions: int
    #: raw, claims, or the group that works by keys.
    how: str
    #: After this many messages its handler hangs.
    hangs_after: int = sys.maxsize


def raw(job: Job, stops: list[Callable[[], object]]) -> Iterator[Any]:
    """The messages of a plain consumer."""
    consumer = RawConsumer({"bootstrap.servers": job.bootstrap, "group.id": "raw", "enable.auto.commit": False})
    consumer.assign([TopicPartition(job.topic, number, 0) for number in range(job.partitions)])
    while True:
        yield from consumer.consume(500, 0.1)


def ours(job: Job, stops: list[Callable[[], object]]) -> Iterator[Any]:
    """Those of a worker."""
    mode: Any
    if job.how == "claims":
        group, topics, mode = str(os.getpid()), [[job.topic]], Claims()
    else:
        keys: dict[tuple[str, int], list[tuple[int, int]]] = {(job.topic, at): [] for at in range(job.partitions)}
        group, topics, mode = job.how, [], Keys(keys)
    with Marshal(job.bootstrap, group_id=group, topic=job.log) as marshal:
        stops.append(marshal.stop)
        with marshal.consumer(*topics, mode=mode) as consumer:
            if topics:
                yield from consumer
            while len(consumer.assignment()) < job.partitions:
                time.sleep(0.02)
            print("all", flush=True)
            while not marshal.stopping:
                time.sleep(0.02)


def work(job: Job) -> None:
    """Begin at a line, and stop at another; report when each partition was met, and when the handler hangs."""
    logging.disable(logging.CRITICAL)
    print("up", flush=True)
    sys.stdin.readline()
    stops: list[Callable[[], object]] = []
    threading.Thread(target=lambda: sys.stdin.readline() and stops[0](), daemon=True).start()
    met: set[int] = set()
    for count, message in enumerate((raw if job.how == "raw" else ours)(job, stops), 1):
        if len(met) < job.partitions:
            met.add(message.partition())
            if len(met) == job.partitions:
                print("all", flush=True)
        if count == job.hangs_after:
            print("hangs", flush=True)
            time.sleep(3_600)


class Worker:
    """A process with one worker."""

    def __init__(self, stack: ExitStack, job: Job) -> None:
        command = [sys.executable, "-m", "benchmarks.one_worker", "--job", json.dumps(job)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)
        self.pid = self._process.pid
        self.wait("up")
        self.began = time.perf_counter()
        self.say()

    def say(self) -> None:
        """Let it begin, or stop."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def wait(self, word: str) -> None:
        """Wait until it says this."""
        out: IO[str] | None = self._process.stdout
        assert out is not None
        assert out.readline() == f"{word}\n", f"a worker has ended before {word!r}"

    def resident(self, most: bool = False) -> float:
        """MB; most: so far."""
        found = re.search(rf"{'VmHWM' if most else 'VmRSS'}:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1000


def fill(bootstrap: str, topic: str, partitions: int, count: int, size: int = 100) -> None:
    """Messages, the same number in each partition."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.kbytes": 1_000_000})
    for number in range(count):
        producer.produce(topic, bytes(size), partition=number % partitions)
        while len(producer) > 50_000:
            producer.poll(0.01)
    producer.flush()


def new_topic(bootstrap: str, partitions: int, count: int, size: int = 100) -> str:
    """A filled topic."""
    topic = f"t-{uuid.uuid4().hex[:8]}"
    cluster = KafkaCluster(bootstrap, {})
    cluster.create_topic(topic, partitions, 1, {}, 60)
    cluster.close()
    fill(bootstrap, topic, partitions, count, size)
    return topic


def at_rest(job: Job) -> float:
    with ExitStack() as stack:
        worker = Worker(stack, job)
        worker.wait("all")
        time.sleep(REST_S)
        return worker.resident()


def hung(job: Job) -> float:
    with ExitStack() as stack:
        worker = Worker(stack, job._replace(hangs_after=1))
        worker.wait("hangs")
        before = 0.0
        while (now := worker.resident()) > before + SETTLED_MB:
            before = now
            time.sleep(1)
        return now


def worked_off(job: Job, count: int) -> float:
    with ExitStack() as stack:
        worker = Worker(stack, job._replace(hangs_after=count))
        worker.wait("all")
        worker.wait("hangs")
        return worker.resident(most=True)


def many(job: Job) -> tuple[float, float]:
    """Milliseconds of a start, and the processor's share at rest (% of a core)."""
    with ExitStack() as stack:
        worker = Worker(stack, job)
        worker.wait("all")
        took_s = time.perf_counter() - worker.began
        time.sleep(REST_S)
        used, began = sum(spent(worker.pid)), time.perf_counter()
        time.sleep(IDLE_S)
        return took_s * 1000, (sum(spent(worker.pid)) - used) / (time.perf_counter() - began) * 100


def handed_over(job: Job) -> float:
    """Milliseconds from `stop()` of a worker until another one has all partitions."""
    with ExitStack() as stack:
        first = Worker(stack, job)
        first.wait("all")
        second = Worker(stack, job)
        time.sleep(REST_S)
        began = time.perf_counter()
        first.say()
        second.wait("all")
        return (time.perf_counter() - began) * 1000


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--backlog", type=int, default=800, help="MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        work(Job(*json.loads(args.job)))
        return
    rows: list[Row] = []
    with bench_kafka() as bootstrap:
        log = new_log(bootstrap, 8)

        def both(name: str, measure: Callable[[Job], float], job: Job) -> None:
            if args.only in name:
                mine, bare = (partial(measure, job._replace(how=how)) for how in ("claims", "raw"))
                rows.append(paired(name, in_turns(args.rounds, mine, bare), None, "MB", at_most=True))

        both("memory, at rest", at_rest, Job(bootstrap, log, new_topic(bootstrap, FEW, FEW), FEW, ""))
        if args.only in "memory, with a backlog":
            count = args.backlog * 1_000
            job = Job(bootstrap, log, new_topic(bootstrap, FEW, count, 1_000), FEW, "")
            both("memory, with a backlog: the handler hangs", hung, job)
            both("memory, with a backlog: worked off", partial(worked_off, count=count), job)
        if args.only in "partitions":
            n, found = args.partitions, dict[str, list[tuple[float, ...]]]()
            job = Job(bootstrap, log, new_topic(bootstrap, n, n), n, "")
            for number in range(args.rounds):
                for how in ("claims", "raw"):
                    found.setdefault(how, []).append(many(job._replace(how=how)))
                found.setdefault("keys", []).append((handed_over(job._replace(how=f"keys-{number}")),))
            for name, how, at, unit in (
                ("start", "claims", 0, "ms"),
                ("at rest", "claims", 1, "%"),
                ("hand-over", "keys", 0, "ms"),
            ):
                pairs = [(mine[at], bare[at]) for mine, bare in zip(found[how], found["raw"], strict=True)]
                rows.append(paired(f"{n:,} partitions, {name}", pairs, None, unit, at_most=True))
    report("one_worker", rows, args.json, partitions=args.partitions, backlog=args.backlog, rounds=args.rounds)


if __name__ == "__main__":
    main()
