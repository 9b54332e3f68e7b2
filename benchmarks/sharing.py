"""Many workers on one partition by batches: what the log gets, and how much of 16 workers is used.

python -m benchmarks.sharing [--messages N] [--only log|workers] [--json FILE]

log      records of the log for 1,000 messages, in virtual time: 16 sharers with handlers of 5 ms, 5 ms from append
         to applied; from a backlog, and at some rates; beside docs/protocol/sharing.md (at most 1.3 of it)
workers  16 processes with a handler of 5 ms each on one partition of a broker, messages a second ÷ 16 × serial;
         from when all have begun to when the first finds nothing more
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from random import Random
from statistics import mean
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.common import Row, bench_kafka, new_log, report
from kafka_marshal import Batches, Marshal
from kafka_marshal.engine.settings import SharingOptions
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.run import offset_of
from rationalizer import SettlingMessages
from tests.engine.harness import Member, Net
from tests.engine.sharers import TOPIC, shared_net

SHARERS = 16
WORK_MS = 5.0
ANSWER_MS = 5.0

#: Messages a second (None: a backlog), how many are measured, and the records for 1,000 of them that were foreseen.
RATES: tuple[tuple[int | None, int, int], ...] = (
    (None, 16_000, 20),
    (2_900, 8_000, 100),
    (1_000, 3_000, 228),
    (200, 1_000, 415),
    (10, 150, 1_414),
)
MOST_TIMES = 1.3


class LateMember(Member):
    """Sees a record some time after it was appended."""

    def visible(self, cp: int) -> int:
        log = self.net.logs[cp]
        seen = len(log)
        while seen and log[seen - 1][0] > self.net.now - ANSWER_MS:
            seen -= 1
        return seen


class Worker:
    """A sharer in virtual time, which handles one message after the other."""

    def __init__(self, net: Net, name: str, rng: Random, born: dict[int, float]) -> None:
        self.member = LateMember(net, name, rng=Random(rng.random()), hi=3_000)
        net.members.append(self.member)
        self.number = self.member.consumer(TOPIC, sharing=SharingOptions()).number
        self._net, self._born = net, born
        self._run: Run | None = None
        self._place, self._until = 0, 0.0
        self.done = 0
        self.waits: list[float] = []

    def turn(self) -> None:
        net, member = self._net, self.member
        member.fetch(2_000)
        if self._run is None and (run := member.take(1_000)) is not None:
            self._run, self._place, self._until = run, 0, net.now + WORK_MS
            self._begin(run)
        while (found := self._run) is not None and net.now >= self._until:
            self._place += 1
            self._until += WORK_MS
            if self._place < len(found.messages):
                self._begin(found)
            else:
                self.done += self._place
                self._run = None
                member.done_run(found)
        if net.now >= member.due or member.engine.outbox.effects:
            member.settle()
        if int(net.now) % 3_000 == 0:
            end = net.data[TOPIC, 0].end
            member.engine.take(
                self.number, member.engine.consumers[self.number].log_ends, (TOPIC, 0), end, member.clock()
            )

    def _begin(self, run: Run) -> None:
        self.waits.append(self._net.now - self._born[offset_of(run.messages[self._place])])


def log_records(rate: int | None, messages: int) -> tuple[float, float]:
    """Records of the log for 1,000 messages, and the mean time (ms) from a message's write to its handler."""
    rng, born = Random(1), dict[int, float]()
    net = shared_net()
    net.step_ms, net.rounds = 1.0, 1
    workers = [Worker(net, f"w{number}", rng, born) for number in range(SHARERS)]

    def tick() -> None:
        net.tick()
        for worker in workers:
            worker.turn()

    while not all(worker.member.held() for worker in workers):
        tick()
    before, log, next_at = len(net.records(SettlingMessages)), net.data[TOPIC, 0], net.now
    if rate is None:
        log.end = 4 * messages  # its end is not measured: batches are smaller there
        born.update(dict.fromkeys(range(log.end), net.now))
    while (done := sum(worker.done for worker in workers)) < messages:
        while rate is not None and next_at <= net.now and log.end < messages:
            born[log.end] = next_at
            log.end += 1
            next_at += rng.expovariate(rate / 1000)
        tick()
    records = len(net.records(SettlingMessages)) - before
    return records * 1000 / done, mean(wait for worker in workers for wait in worker.waits)


def of_the_log() -> Iterator[Row]:
    """A row for each rate."""
    for rate, messages, foreseen in RATES:
        records, wait = log_records(rate, messages)
        name = "from a backlog" if rate is None else f"at {rate}/s (a message waits {wait:.0f} ms)"
        yield Row(f"log: {name}", records, foreseen, records / foreseen, MOST_TIMES, "records", at_most=True)


# Real workers.


def work(about: dict[str, Any]) -> None:
    """One worker process: it writes when it handled its first message, its last, and how many."""
    with (
        Marshal(about["bootstrap"], group_id=about["group"], client_id=about["name"], topic=about["log"]) as marshal,
        marshal.consumer([about["topic"]], mode=Batches()) as consumer,
    ):
        print("ready", flush=True)
        sys.stdin.readline()
        begun, taken = time.monotonic(), list[tuple[float, int]]()
        for batch in consumer.batches():
            for _ in batch:
                time.sleep(WORK_MS / 1000)
            taken.append((time.monotonic(), len(batch)))
            batch.done()
            if time.monotonic() > begun + about["seconds"]:
                break
    print(json.dumps(taken), flush=True)


def of_workers(seconds: float) -> Row:
    """How much of 16 workers is used: after each has had its first batch, until the first has finished its last."""
    with bench_kafka() as bootstrap:
        topic, log = f"t-{uuid.uuid4().hex[:8]}", new_log(bootstrap, 1)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(20)
        producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
        for number in range(int(SHARERS * (seconds + 5) * 1000 / WORK_MS)):
            producer.produce(topic, str(number).encode())
            producer.poll(0)
        producer.flush(60)
        about = {"bootstrap": bootstrap, "group": uuid.uuid4().hex, "log": log, "topic": topic, "seconds": seconds}
        command = [sys.executable, "-m", "benchmarks.sharing", "--worker"]
        processes = [
            subprocess.Popen(
                [*command, json.dumps({**about, "name": f"w{number}"})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(SHARERS)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        taken = [json.loads(process.communicate()[0]) for process in processes]
    first, last = max(batches[0][0] for batches in taken), min(batches[-1][0] for batches in taken)
    done = sum(count for batches in taken for at, count in batches if first < at <= last)
    started = time.monotonic()
    for _ in range(200):
        time.sleep(WORK_MS / 1000)
    serial = 200 / (time.monotonic() - started)
    rate, most = done / (last - first), SHARERS * serial
    return Row(f"{SHARERS} workers of {WORK_MS:g} ms on one partition", rate, most, rate / most, 0.95, "messages/s")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", choices=("log", "workers"))
    parser.add_argument("--json")
    parser.add_argument("--worker")
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        work(json.loads(chosen.worker))
        return 0
    rows = [] if chosen.only == "workers" else list(of_the_log())
    rows += [] if chosen.only == "log" else [of_workers(chosen.seconds)]
    report("sharing", rows, chosen.json, sharers=SHARERS, work_ms=WORK_MS, seconds=chosen.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
