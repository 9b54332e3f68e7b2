"""A rolling restart of ten workers, as a StatefulSet does it: how long each partition pauses.

    python -m benchmarks.rolling [--workers N] [--partitions N] [--rounds N] [--only NAME …] [--json FILE]

Worker processes with stable names, from the last to the first: SIGTERM, wait until it has ended, start it again
under its name, wait until it is ready, then the next; beside Kafka's own groups. Each partition gets a record every
25 ms. Its gap is the longest time between two of its records that any worker took, from the first SIGTERM until three
seconds after the last start; the floor is the same over the seconds before. Ready: the log is read and heartbeats go
out (ours); an assignment has arrived (Kafka's groups). Static: with group.instance.id, so that no other member gets a
closed member's partitions until it returns.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from confluent_kafka import Consumer, Producer

from benchmarks.common import bench_kafka
from benchmarks.race.contestants import BEST, BROKERS, CLASSIC, GROUP, KIP848, MARSHAL, Contestant, Side
from kafka_marshal import Claims, Group, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing.simulate import where_it_ran

#: Interval of a partition's records: the resolution of gaps.
FEED_S = 0.025
#: Time without restarts before the first SIGTERM, and the part of it that gives the floor.
SETTLE_S, FLOOR_S = 10.0, 5.0
#: Time after the last start in which gaps of a late rebalance count, too.
AFTER_S = 3.0

STATIC = Contestant("classic, static members", Side.GROUP, "delay 0", CLASSIC.config)
CONTESTANTS = (MARSHAL, GROUP, CLASSIC, STATIC, KIP848)


def worker(arguments: dict[str, Any]) -> None:
    """One worker: prints "ready"; at its end writes its records, one line each."""
    taken: list[tuple[float, int, int]] = []
    run = _ours if arguments["side"] == Side.MARSHAL else kafkas
    run(arguments, lambda message: taken.append((time.monotonic(), message.partition(), message.offset())))
    with Path(arguments["file"]).open("a", encoding="utf-8") as file:
        file.writelines(f"{at} {partition} {offset}\n" for at, partition, offset in taken)


def _ours(arguments: dict[str, Any], take: Callable[[Any], None]) -> None:
    with Marshal(
        arguments["bootstrap"],
        group_id=arguments["group"],
        client_id=arguments["name"],
        topic=arguments["coordination"],
        config={name: value for name, value in BEST.items() if name != "auto.offset.reset"},
        **arguments["options"],
    ) as marshal:
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        mode: Any = Group(**arguments["member"]) if arguments["member"] else Claims()
        with marshal.consumer([arguments["topic"]], mode=mode) as consumer:
            threading.Thread(target=_say_when_ready, args=(marshal,), daemon=True).start()
            for message in consumer:
                take(message)


def _say_when_ready(marshal: Marshal) -> None:
    while not marshal.health().ready:
        time.sleep(0.01)
    print("ready", flush=True)


def kafkas(arguments: dict[str, Any], take: Callable[[Any], None]) -> None:
    """A consumer of Kafka's own groups, until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    static = {"group.instance.id": arguments["name"]} if arguments["static"] else {}
    servers = {"bootstrap.servers": arguments["bootstrap"], "group.id": arguments["group"]}
    consumer = Consumer({**arguments["config"], **servers, **static})
    consumer.subscribe([arguments["topic"]], on_assign=lambda *_: print("ready", flush=True))
    while not ended.is_set():
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            take(message)
    consumer.close()


class Worker:
    """A process with a stable name."""

    def __init__(self, arguments: dict[str, Any], module: str = "benchmarks.rolling") -> None:
        """Start it; `wait` returns when it is ready. module: whose `--worker` it runs."""
        self._arguments = arguments
        self._module = module
        self.start()

    def start(self) -> None:
        """Start it, again."""
        command = [sys.executable, "-m", self._module, "--worker", json.dumps(self._arguments)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """Until it is ready."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", f"{self._arguments['name']} ended before it was ready"

    def signal(self) -> None:
        """Send SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Send SIGTERM and wait until it has ended."""
        self.signal()
        self.join()

    def join(self) -> None:
        """Wait until it has ended."""
        assert self._process.wait(30) == 0

    def kill(self) -> None:
        """What is left of it."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def feed(bootstrap: str, topic: str, partitions: int) -> Iterator[None]:
    """Produce a record to each partition every FEED_S seconds."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
    ended = threading.Event()

    def run() -> None:
        due = time.monotonic()
        while not ended.wait(max(0.0, due - time.monotonic())):
            due += FEED_S
            for partition in range(partitions):
                producer.produce(topic, b"x", partition=partition)
            producer.poll(0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        producer.flush(5)


@dataclass(frozen=True, slots=True)
class Result:
    """A rolling restart; gaps are the longest of each partition (ms)."""

    contestant: str
    floor_median_ms: float
    gap_median_ms: float
    gap_max_ms: float
    #: From the first SIGTERM until the last worker is ready again.
    restart_s: float
    #: Records that were delivered twice.
    repeated: int
    lost: int


def roll(contestant: Contestant, bootstrap: str, workers: int, partitions: int) -> Result:
    """One rolling restart, in its own topic and group."""
    name = f"rolling-{uuid.uuid4().hex[:8]}"
    cluster = KafkaCluster(bootstrap)
    with TemporaryDirectory() as folder, ExitStack() as fleet:
        create_topic(cluster, f"__{name}", 8, 10)
        cluster.create_topic(name, partitions, 1, {}, 10)
        arguments: dict[str, Any] = {
            "bootstrap": bootstrap,
            "group": name,
            "topic": name,
            "coordination": f"__{name}",
            "file": f"{folder}/taken",
            "side": contestant.side.value,
            "config": dict(contestant.config),
            "options": dict(contestant.options),
            "member": dict(contestant.member),
            "static": contestant is STATIC,
        }
        fleet.enter_context(feed(bootstrap, name, partitions))
        members = [Worker({**arguments, "name": f"worker-{number}"}) for number in range(workers)]
        for member in members:
            fleet.callback(member.kill)
            member.wait()
        time.sleep(SETTLE_S)
        began = time.monotonic()
        for member in reversed(members):
            member.end()
            member.start()
            member.wait()
        took = time.monotonic() - began
        time.sleep(AFTER_S)
        for member in members:
            member.end()
        lines = Path(arguments["file"]).read_text(encoding="utf-8").splitlines()
    taken = defaultdict(list)
    offsets = defaultdict(list)
    for at, partition, offset in map(str.split, lines):
        taken[int(partition)].append(float(at))
        offsets[int(partition)].append(int(offset))
    floor = [longest(taken[number], began - FLOOR_S, began) for number in range(partitions)]
    gaps = [longest(taken[number], began, began + took + AFTER_S) for number in range(partitions)]
    repeated = sum(len(each) - len(set(each)) for each in offsets.values())
    lost = sum(max(each) - min(each) + 1 - len(set(each)) for each in offsets.values())
    return Result(contestant.name, median(floor), median(gaps), max(gaps), took, repeated, lost)


def longest(moments: Sequence[float], begin: float, end: float) -> float:
    """The longest time between consecutive records between these moments (ms)."""
    inside = [begin, *sorted(at for at in moments if begin < at < end), end]
    return 1000 * max(later - earlier for earlier, later in pairwise(inside))


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--partitions", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[each.name for each in CONTESTANTS])
    parser.add_argument("--json", dest="json_path")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    wanted = [each for each in CONTESTANTS if each.name in options.only]
    results = []
    with bench_kafka(BROKERS["delay 0"]) as bootstrap:
        print(f"{'':32} {'floor':>7} {'gap, median':>12} {'gap, max':>9} {'restart':>8} {'repeated':>9} {'lost':>5}")
        for contestant in wanted * options.rounds:
            found = roll(contestant, bootstrap, options.workers, options.partitions)
            results.append(found)
            print(
                f"{found.contestant:32} {found.floor_median_ms:4.0f} ms {found.gap_median_ms:9.0f} ms "
                f"{found.gap_max_ms:6.0f} ms {found.restart_s:6.1f} s {found.repeated:9} {found.lost:5}",
                flush=True,
            )
    if options.json_path:
        document = {
            "benchmark": "rolling",
            "workers": options.workers,
            "partitions": options.partitions,
            "machine": where_it_ran(),
            "rows": [asdict(each) for each in results],
        }
        Path(options.json_path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
