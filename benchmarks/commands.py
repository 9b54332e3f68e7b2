"""How fast commands answer: the import, --help, and `status`, `lag`, `check` of ten groups on a long log:

    python -m benchmarks.commands [--records N] [--rounds N] [--json FILE]

Imports are divided by `import confluent_kafka`, both beyond the bare interpreter. Commands run as a user types them, in
a process each. Their figures are processor time, and for those that ask Kafka also the time until they end, beyond an
interpreter that only imports what they need. All take turns; figures are medians over the rounds.

The log: ten claimed groups of five members each, eight coordination partitions, heartbeats for all leases, snapshots
as members write them. Its members are gone, so that no record comes while it is read; or a member beats beside them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from statistics import median

from confluent_kafka import Producer

from benchmarks.common import Row, bench_kafka, in_turns, paired, report
from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.cli.app import COMMANDS
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.log_reader import read_range
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import BeatEntry, ClaimingPartition, HeartbeatBatch, World, encode, route_lease
from rationalizer.limits import SNAPSHOT_INTERVAL
from tests.stored_snapshot import encode_snapshot

GROUPS, MEMBERS, PARTITIONS, CPS = 10, 5, 30, 8
WAITING = 20
HEARTBEAT_INTERVAL_MS = 3_000

BARE = (sys.executable, "-c", "pass")
KAFKA = (sys.executable, "-c", "import confluent_kafka")
PACKAGE = (sys.executable, "-c", "import kafka_marshal")
MARSHAL = (sys.executable, "-c", "from kafka_marshal import Marshal")
#: What `status` imports, and no more.
STATUS = (
    sys.executable,
    "-c",
    "import kafka_marshal.cli.app, kafka_marshal.cli.status, kafka_marshal.observe.view, kafka_marshal.adapters.kafka",
)
COMMAND = (sys.executable, "-m", "kafka_marshal")


def run(command: Sequence[str], **environment: str) -> tuple[float, float]:
    """Processor time and time until it ended (ms)."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    took = time.perf_counter() - begun
    if process.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return (used.ru_utime + used.ru_stime) * 1000, took * 1000


class Log:
    """A long coordination log with snapshots, and the topics of its groups."""

    def __init__(self, bootstrap: str, records: int) -> None:
        self.bootstrap = bootstrap
        self.topic = f"__marshal-commands-{uuid.uuid4().hex[:8]}"
        self.data = [f"orders-{number}-{uuid.uuid4().hex[:8]}" for number in range(GROUPS)]
        probe = Probe(bootstrap)
        for name in self.data:
            probe.create_topic(name, PARTITIONS, 1, {})
        cluster = KafkaCluster(bootstrap, {})
        try:
            create_topic(cluster, self.topic, CPS, 30)
            self._fill(records)
            self._write_snapshots(cluster)
        finally:
            cluster.close()

    def _fill(self, records: int) -> None:
        """Claims, then one heartbeat batch for each member and CP, again and again."""
        tuned: dict[str, str | int | float | bool] = {
            "bootstrap.servers": self.bootstrap,
            "acks": "all",
            "linger.ms": 20,
            "batch.size": 1_000_000,
            "batch.num.messages": 10_000,
            "queue.buffering.max.messages": 1_000_000,
        }
        producer = Producer(tuned)

        def put(cp: int, value: bytes, heard: Callable[..., None] | None = None) -> None:
            while True:
                try:
                    return producer.produce(self.topic, value, partition=cp, on_delivery=heard)
                except BufferError:
                    producer.poll(0.05)

        epochs: dict[tuple[int, int], int] = {}
        for group, topic in enumerate(self.data):
            for number in range(PARTITIONS):
                claim = ClaimingPartition(*self._who(group, number), topic, number, HEARTBEAT_INTERVAL_MS)

                def heard(_: object, message: object, at: tuple[int, int] = (group, number)) -> None:
                    epochs[at] = message.offset()  # type: ignore[attr-defined]

                put(route_lease(topic, number, CPS), encode(claim), heard)
        if producer.flush(60) > 0:
            raise RuntimeError("the claims were not written in time")
        beats: list[list[bytes]] = [[] for _ in range(CPS)]
        for (group, member), cp in (
            (x, cp) for x in ((g, m) for g in range(GROUPS) for m in range(MEMBERS)) for cp in range(CPS)
        ):
            topic = self.data[group]
            held = [n for n in range(member, PARTITIONS, MEMBERS) if route_lease(topic, n, CPS) == cp]
            if held:
                entries = tuple(BeatEntry(topic, n, epochs[group, n], None) for n in held)
                beats[cp].append(encode(HeartbeatBatch(*self._who(group, member), entries)))
        # It ends half an interval behind the newest snapshot: neither the best nor the worst case.
        for at in range(records // CPS // SNAPSHOT_INTERVAL * SNAPSHOT_INTERVAL + SNAPSHOT_INTERVAL // 2):
            for cp in range(CPS):
                put(cp, beats[cp][at % len(beats[cp])])
            if at % 1_000 == 0:
                producer.poll(0)
        for topic in self.data:  # a few messages wait
            for number in range(PARTITIONS * WAITING):
                producer.produce(topic, b"order", partition=number % PARTITIONS)
        if producer.flush(600) > 0:
            raise RuntimeError("the log was not written in time")

    @staticmethod
    def _who(group: int, number: int) -> tuple[str, str, str]:
        member = number % MEMBERS
        return f"host-{group}/{member}/0.2.0/{group:08d}{member:08d}", f"worker-{group}-{member}", f"group-{group}"

    def _write_snapshots(self, cluster: KafkaCluster) -> None:
        """Write the two newest that are due, as members do: a state needs claims, and each lease's last heartbeat."""
        snapshots = cluster.appender(snapshots_topic(self.topic), delivery_timeout_ms=60_000)
        marks = cluster.watermarks([(self.topic, cp) for cp in range(CPS)], 30)
        for (_, cp), (_, end) in sorted(marks.items()):
            newest = end // SNAPSHOT_INTERVAL * SNAPSHOT_INTERVAL
            world = World(cp, CPS)
            for place in (2 + GROUPS * PARTITIONS, newest - SNAPSHOT_INTERVAL, newest):
                first = 0 if world.next_offset == 0 else place - 2 * GROUPS * MEMBERS
                world.next_offset = first
                for _, entries in read_range(cluster, self.topic, {cp: (first, place)}, 30):
                    world.apply_many(entries)
                if place >= SNAPSHOT_INTERVAL:
                    for part in encode_snapshot(world):
                        snapshots.append(cp, part, None)
        if snapshots.flush(60) > 0:
            raise RuntimeError("the snapshots were not written in time")
        snapshots.close()

    def delete(self) -> None:
        """Ten million records are a gigabyte."""
        Probe(self.bootstrap).delete_topics([self.topic, snapshots_topic(self.topic), *self.data])


def over_bare(command: Sequence[str]) -> Callable[[], float]:
    """Processor time beyond an interpreter that does nothing (ms)."""
    return lambda: max(0.1, run(command)[0] - run(BARE)[0])


def imports(rounds: int) -> list[Row]:
    """The package beside confluent-kafka, and what a worker imports."""
    rows = []
    for name, command, most in (
        ("import kafka_marshal", PACKAGE, 2.0),
        ("from kafka_marshal import Marshal", MARSHAL, None),
    ):
        pairs = in_turns(rounds, over_bare(command), over_bare(KAFKA))
        rows.append(paired(f"{name} / import confluent_kafka", pairs, most, "ms", at_most=True))
    return rows


def at_once(rounds: int) -> list[Row]:
    """What asks no broker: processor time, the interpreter's included, with 200 ms as the limit."""
    completing = {"_KAFKA_MARSHAL_COMPLETE": "bash_complete", "COMP_WORDS": "kafka-marshal st", "COMP_CWORD": "1"}
    asked: dict[str, Callable[[], float]] = {
        "--version": lambda: run((*COMMAND, "--version"))[0],
        "--help": lambda: run((*COMMAND, "--help"))[0],
        "completion of a command": lambda: run(COMMAND, **completing)[0],
    }
    rows = []
    for name, ask in asked.items():
        found = [ask() for _ in range(rounds)]
        rows.append(limit(name, found, 200.0, "ms of processor"))
    helps = {name: [run((*COMMAND, name, "--help"))[0] for _ in range(max(1, rounds // 4))] for name in COMMANDS}
    slowest = max(helps, key=lambda name: median(helps[name]))
    rows.append(limit(f"COMMAND --help, the slowest ({slowest})", helps[slowest], 200.0, "ms of processor"))
    return rows


def limit(name: str, found: Sequence[float], most: float, unit: str) -> Row:
    """The median of a figure beside its upper limit."""
    ratios = sorted(each / most for each in found)
    return Row(name, median(found), most, median(ratios), 1.0, unit, at_most=True, spread=(ratios[0], ratios[-1]))


def on_a_log(log: Log, words: str, rounds: int) -> list[Row]:
    """`status`, `lag` and `check`: time and processor time beyond the import of what they need."""
    rows = []
    for name in ("status", "lag", "check"):
        command = (*COMMAND, name, "--bootstrap", log.bootstrap, "--topic", log.topic)
        pairs = in_turns(rounds, lambda command=command: run(command), lambda: run(STATUS))  # type: ignore[misc]
        for index, what in ((1, ""), (0, ", of processor")):
            found = [ours[index] - imported[index] for ours, imported in pairs]
            rows.append(limit(f"{name}{words}", found, 700.0, f"ms{what}"))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    rows = [*imports(options.rounds), *at_once(options.rounds)]
    with bench_kafka() as bootstrap:
        log = Log(bootstrap, options.records)
        try:
            rows += on_a_log(log, ", members gone", options.rounds)
            with Marshal(bootstrap, group_id="live", topic=log.topic) as member:
                consumer = member.consumer(log.data[:1])
                consumer.poll(1.0)
                rows += on_a_log(log, ", a member alive", options.rounds)
        finally:
            log.delete()
    load = os.getloadavg()[0]
    report("commands", rows, options.json, records=f"{options.records:,}", rounds=options.rounds, load=f"{load:.1f}")


if __name__ == "__main__":
    main()
