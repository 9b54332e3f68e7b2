"""From kill -9 of a worker with a watchdog to the first record of its partition at a member that waits for it.

    python -m benchmarks.crash [--rounds N] [--plain-rounds N] [--json FILE]

The baseline is the same without a watchdog: the lease must go stale first (2 · HI; the clock starts at the kill, up
to HI/3 after the last heartbeat). benchmarks/race compares other group protocols.
Also reported: the cost of a watchdog.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from statistics import median, quantiles

from confluent_kafka import Producer

from benchmarks.common import Row, bench_kafka, report
from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic

#: Between two records of the topic, so that the successor has one to deliver when it is ready.
FEED_S = 0.005

IDLE_S = 5.0


def victim(arguments: dict[str, str]) -> None:
    """The worker that will be killed: reports when it has started, then works."""
    marshal = Marshal(
        arguments["bootstrap"],
        group_id="bench",
        client_id="victim",
        topic=arguments["coordination"],
        watchdog=bool(arguments["watchdog"]),
    )
    said = False
    for _ in marshal.consumer([arguments["topic"]]):
        watchdog = marshal.watchdog
        if not said and (watchdog is None or watchdog.is_ready):
            print(json.dumps(watchdog and watchdog.pid), flush=True)
            said = True


class Feed:
    """A steady trickle of records."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
        self._topic = topic
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(FEED_S):
            self._producer.produce(self._topic, b"x")
            self._producer.poll(0)

    def stop(self) -> None:
        """End it."""
        self._ended.set()
        self._thread.join()
        self._producer.flush(5)


def takeover_ms(bootstrap: str, coordination: str, cluster: KafkaCluster, watchdog: bool) -> float:
    """One crash, with its own topic."""
    topic = f"crash-{uuid.uuid4().hex[:8]}"
    cluster.create_topic(topic, 1, 1, {}, 10)
    feed = Feed(bootstrap, topic)
    arguments = {
        "bootstrap": bootstrap,
        "coordination": coordination,
        "topic": topic,
        "watchdog": (watchdog and "yes") or "",
    }
    command = [sys.executable, "-m", "benchmarks.crash", "--victim", json.dumps(arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with (
            Marshal(bootstrap, group_id="bench", client_id="heir", topic=coordination) as heir,
            heir.consumer([topic]) as consumer,
        ):
            assert consumer.poll(1.0) is None  # it waits: another member has the only partition
            began = time.perf_counter()
            process.kill()
            assert consumer.poll(30) is not None
            return (time.perf_counter() - began) * 1000
    finally:
        process.kill()
        process.communicate()
        feed.stop()


def cost(bootstrap: str, coordination: str) -> tuple[float, float]:
    """(MB of proportional memory, percent of a core while idle) of a watchdog with 100 leases."""
    with Marshal(bootstrap, group_id="cost", topic=coordination, watchdog=True) as marshal:
        watchdog = marshal.watchdog
        assert watchdog is not None
        for partition in range(100):
            marshal.claim("cost", partition)
        while not watchdog.is_ready:
            time.sleep(0.01)
        process = Path(f"/proc/{watchdog.pid}")
        before, began = cpu_ns(process), time.monotonic_ns()
        time.sleep(IDLE_S)
        used = (cpu_ns(process) - before) / (time.monotonic_ns() - began)
        [pss] = [x for x in (process / "smaps_rollup").read_text().splitlines() if x.startswith("Pss:")]
        return int(pss.split()[1]) / 1024, used * 100


def cpu_ns(process: Path) -> int:
    """Processor time of all threads of a process so far."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in (process / "task").iterdir())


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--plain-rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--victim", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.victim:
        victim(json.loads(args.victim))
        return
    with bench_kafka() as bootstrap:
        cluster = KafkaCluster(bootstrap, {})
        coordination = f"__marshal-{uuid.uuid4().hex[:8]}"
        create_topic(cluster, coordination, 8, 10)
        takeover_ms(bootstrap, coordination, cluster, watchdog=True)  # the broker's first
        watched = [takeover_ms(bootstrap, coordination, cluster, watchdog=True) for _ in range(args.rounds)]
        plain = [takeover_ms(bootstrap, coordination, cluster, watchdog=False) for _ in range(args.plain_rounds)]
        pss_mb, cpu = cost(bootstrap, coordination)
        cluster.close()
    p95 = quantiles(watched, n=20)[-1]
    rows = [
        Row(
            "kill -9 to first record, p50", median(watched), median(plain), median(watched) / median(plain), None, "ms"
        ),
        Row("kill -9 to first record, p95", p95, max(plain), p95 / max(plain), None, "ms"),
        Row("watchdog's memory (PSS) of 32 MB", pss_mb, 32.0, pss_mb / 32.0, 1.0, "MB", at_most=True),
        Row("watchdog's CPU of 0.1 % of a core", cpu, 0.1, cpu / 0.1, 1.0, "%", at_most=True),
    ]
    report("crash", rows, args.json, rounds=args.rounds, heartbeat_interval_ms=3_000, baseline="no watchdog")


if __name__ == "__main__":
    main()
