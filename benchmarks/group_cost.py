"""The cost of a coordinated group's members for the broker and for each other: all read the group's home partition.

    python -m benchmarks.group_cost [--members 10,50,100] [--seconds N] [--json FILE]

Real members (ten a process) of a group with one empty partition each, so they only send heartbeats. Each
record is sent to every member, so the group's traffic grows with the square of its members. The line for 1,000 is
computed from the first and the last one measured: a member's share grows with their number, the broker's with its
square, which is an upper bound: a late fetch returns several records.
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

from confluent_kafka import Consumer, TopicPartition

from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing.broker import LocalBroker
from kafka_marshal.testing.simulate import where_it_ran
from rationalizer.routing import route_group

A_PROCESS = 10
CPS = 8
GROUP, TOPIC, COORDINATION = "all", "idle", "__marshal"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """The cost of this number of members per second."""

    members: int
    records: float
    record_bytes: float
    #: Of one core.
    broker: float
    member: float

    @property
    def sent_kb(self) -> float:
        """Data that the broker sends to all of them (kB)."""
        return self.records * self.record_bytes * self.members / 1000

    @property
    def a_record_us(self) -> float:
        """Processor time of the broker for a record and one of its readers (µs)."""
        return 1e6 * self.broker / (self.records * self.members)

    def line(self) -> str:
        """For people."""
        return (
            f"{self.members:7,} {self.records:10,.1f} {self.sent_kb:14,.1f} {self.broker:11.1%} {self.member:11.2%} "
            f"{self.a_record_us:10,.0f}"
        )


def hold(bootstrap: str, first: int, count: int) -> None:
    """Run this number of members until standard input ends."""
    consumers = []
    with ExitStack() as stack:
        for number in range(first, first + count):
            marshal = stack.enter_context(
                Marshal(bootstrap, group_id=GROUP, client_id=f"m-{number:04}", topic=COORDINATION)
            )
            consumers.append(stack.enter_context(marshal.group_consumer([TOPIC])))
        while not all(consumer.assignment() for consumer in consumers):
            time.sleep(0.1)
        print("ready", flush=True)
        sys.stdin.read()


def spent(pid: int) -> float:
    """Processor seconds of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


def sizes(bootstrap: str, partition: int, first: int, last: int) -> float:
    """Mean bytes of the records there."""
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "sizes", "enable.auto.commit": False})
    reader.assign([TopicPartition(COORDINATION, partition, first)])
    found: list[int] = []
    while len(found) < last - first:
        found += [len(x.value() or b"") for x in reader.consume(last - first - len(found), 10) if not x.error()]
    reader.close()
    return sum(found) / len(found)


def measure(members: int, seconds: float) -> Cost:
    """With this number of members, on a separate broker."""
    with LocalBroker() as broker, ExitStack() as stack:
        bootstrap, home = broker.bootstrap_servers, route_group(GROUP, CPS)
        cluster = KafkaCluster(bootstrap, {})
        create_topic(cluster, COORDINATION, CPS, 10)
        cluster.create_topic(TOPIC, members, 1, {}, 10)
        ours = []
        for first in range(0, members, A_PROCESS):
            count = min(A_PROCESS, members - first)
            command = [sys.executable, "-m", "benchmarks.group_cost", "--hold", f"{bootstrap},{first},{count}"]
            ours.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stack.callback(ours[-1].kill)
        for process in ours:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "a process of members has ended"
        time.sleep(seconds / 2)  # joins are over; benchmarks.groups measures their cost
        pids = [process.pid for process in ours]

        def so_far() -> tuple[int, float, float]:
            _, end = cluster.watermarks([(COORDINATION, home)], 10)[COORDINATION, home]
            return end, spent(broker.pid_of(1)), sum(map(spent, pids))

        begin, began = so_far(), time.monotonic()
        time.sleep(seconds)
        end = so_far()
        took = time.monotonic() - began
        size = sizes(bootstrap, home, begin[0], end[0])
        cluster.close()
        records, in_broker, in_members = ((after - before) / took for before, after in zip(begin, end, strict=True))
        return Cost(members, records, size, in_broker, in_members / members)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and say it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", default="10,50,100")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.hold:
        bootstrap, first, count = args.hold.split(",")
        hold(bootstrap, int(first), int(count))
        return
    costs = [measure(int(members), args.seconds) for members in args.members.split(",")]
    first, last = costs[0], costs[-1]
    if last.members > first.members:
        reads, times = 1_000**2, 1_000 / last.members
        a_read = (last.broker - first.broker) / (last.members**2 - first.members**2)
        a_member = (last.member - first.member) / (last.members - first.members)
        broker = last.broker + a_read * (reads - last.members**2)
        member = last.member + a_member * (1_000 - last.members)
        costs.append(Cost(1_000, last.records * times, last.record_bytes, broker, member))
    print("members  records/s sent to all, kB/s      broker  one member  µs a record and reader")
    print("\n".join(cost.line() for cost in costs))
    print("the line for 1,000 is computed, the broker's share is an upper bound: see the benchmark's first lines")
    if args.json:
        found = {"benchmark": "group_cost", "machine": where_it_ran(), "rows": [asdict(cost) for cost in costs]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
