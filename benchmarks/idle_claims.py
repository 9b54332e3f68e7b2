"""What idle claims of a fleet cost: the coordination log, its broker, and each worker.

    python -m benchmarks.idle_claims [--workers 5,10,20] [--leases 100] [--hi MS] [--seconds N] [--json FILE]

Real workers (ten a process) of a claimed group with `--leases` empty partitions each, so they only renew leases. Bytes
are those of the coordination topic's segments. The broker's share is what it has beyond a broker without workers. Every
worker reads every coordination partition, so their cost for the broker grows with the square of the workers. The line
for 100 workers is a fit through the sizes measured: of a straight line; the broker's of a parabola without a constant.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.start_fleet import spent
from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing.broker import LocalBroker
from kafka_marshal.testing.simulate import where_it_ran

A_PROCESS, CPS = 10, 8
GROUP, TOPIC, COORDINATION = "all", "idle", "__marshal"
DAY_S = 86_400
LIMIT_S = 300.0


@dataclass(frozen=True)
class Cost:
    """The cost of this number of workers, a second."""

    workers: int
    leases: int
    records: float
    disk_kb: float
    #: Of one core.
    broker: float
    worker: float

    def line(self) -> str:
        """For people."""
        return (
            f"{self.workers:7,} {self.leases:7,} {self.records:10,.0f} {self.disk_kb:9,.1f} "
            f"{self.disk_kb * DAY_S / 1e6:9,.2f} {self.broker:9.1%} {self.worker:11.2%}"
        )


def hold(bootstrap: str, first: int, count: int, each: int, hi_ms: int) -> None:
    """Run this number of workers until standard input ends."""
    with ExitStack() as stack:
        consumers = []
        for number in range(first, first + count):
            marshal = Marshal(
                bootstrap,
                group_id=GROUP,
                client_id=f"w-{number:04}",
                topic=COORDINATION,
                heartbeat_interval=hi_ms / 1000,
            )
            consumers.append(stack.enter_context(stack.enter_context(marshal).consumer([TOPIC])))
        print("ready", flush=True)
        until = time.monotonic() + LIMIT_S
        while any(len(consumer.assignment()) != each for consumer in consumers) and time.monotonic() < until:
            time.sleep(0.2)
        print("even" if time.monotonic() < until else "uneven", flush=True)
        sys.stdin.read()


def on_disk(folder: Path) -> int:
    """Bytes of the coordination topic's records there."""
    return sum(file.stat().st_size for file in folder.rglob(f"{COORDINATION}-[0-9]*/*.log"))


def measure(workers: int, each: int, hi_ms: int, seconds: float) -> Cost:
    """With this number of workers, on a separate broker."""
    with LocalBroker() as broker, ExitStack() as stack:
        bootstrap, pid = broker.bootstrap_servers, broker.pid_of(1)
        cluster = KafkaCluster(bootstrap, {})
        create_topic(cluster, COORDINATION, CPS, 60)
        cluster.create_topic(TOPIC, workers * each, 1, {}, 120)
        time.sleep(seconds / 2)
        used, began = sum(spent(pid)), time.monotonic()
        time.sleep(seconds / 2)
        bare = (sum(spent(pid)) - used) / (time.monotonic() - began)
        ours = []
        for first in range(0, workers, A_PROCESS):
            about = json.dumps([bootstrap, first, min(A_PROCESS, workers - first), each, hi_ms])
            command = [sys.executable, "-m", "benchmarks.idle_claims", "--hold", about]
            ours.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stack.callback(ours[-1].wait)
            stack.callback(ours[-1].kill)
        for expected in ("ready\n", "even\n"):
            for process in ours:
                assert process.stdout is not None
                assert process.stdout.readline() == expected, "a process of workers has ended, or shares are uneven"
        time.sleep(2 * hi_ms / 1000)

        def so_far() -> tuple[float, float, float, float]:
            marks = cluster.watermarks([(COORDINATION, cp) for cp in range(CPS)], 30)
            in_workers = sum(sum(spent(process.pid)) for process in ours)
            return sum(end for _, end in marks.values()), on_disk(broker.folder), sum(spent(pid)), in_workers

        begin, began = so_far(), time.monotonic()
        time.sleep(seconds)
        end, took = so_far(), time.monotonic() - began
        cluster.close()
    records, disk, in_broker, in_workers = ((after - before) / took for before, after in zip(begin, end, strict=True))
    return Cost(workers, workers * each, records, disk / 1000, in_broker - bare, in_workers / workers)


def fitted(costs: Sequence[Cost], workers: int) -> Cost:
    """For this number of workers."""
    sizes = [cost.workers for cost in costs]
    each = costs[0].leases // costs[0].workers

    def line(name: str) -> float:
        values = [getattr(cost, name) for cost in costs]
        mean, level = sum(sizes) / len(sizes), sum(values) / len(values)
        slope = sum((x - mean) * (y - level) for x, y in zip(sizes, values, strict=True))
        return float(level + slope / sum((x - mean) ** 2 for x in sizes) * (workers - mean))

    def parabola(name: str) -> float:
        """a·n + b·n², by least squares."""
        values = [getattr(cost, name) for cost in costs]
        s2, s3, s4 = (sum(x**power for x in sizes) for power in (2, 3, 4))
        y1, y2 = (sum(y * x**power for x, y in zip(sizes, values, strict=True)) for power in (1, 2))
        a, b = (y1 * s4 - y2 * s3) / (s2 * s4 - s3 * s3), (s2 * y2 - s3 * y1) / (s2 * s4 - s3 * s3)
        return float(a * workers + b * workers**2)

    return Cost(
        workers,
        workers * each,
        line("records"),
        line("disk_kb"),
        parabola("broker"),
        line("worker"),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and say it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="5,10,20")
    parser.add_argument("--leases", type=int, default=100, help="of each worker")
    parser.add_argument("--hi", type=int, default=3_000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.hold:
        hold(*json.loads(args.hold))
        return
    print("workers  leases  records/s  disk kB/s  GB a day   broker  one worker    load")
    costs: list[Cost] = []
    for workers in map(int, args.workers.split(",")):
        costs.append(measure(workers, args.leases, args.hi, args.seconds))
        print(costs[-1].line(), f"{os.getloadavg()[0]:7.1f}", flush=True)
    if len(costs) > 2:
        costs.append(fitted(costs, 100))
        print(costs[-1].line(), "(a fit)")
    if args.json:
        rows = {"benchmark": "idle_claims", "machine": where_it_ran(), "rows": [asdict(cost) for cost in costs]}
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
