"""What the members of a large, idle coordinated group cost the broker and themselves, with and without steps.

    python -m benchmarks.idle_fleet [--members 50,100,200] [--seconds N] [--rounds N]
        [--data-wait MS] [--json FILE]

Real members (ten a process) of a group with one empty partition each, so they only send heartbeats. All read the
group's home. *At once*: each record wakes each reader, as before there were steps; *in steps*: as it is. Both run in
turns, each on a separate broker, whose own share with no member is taken off. The line for 1,000 is a fit of a straight
line (at once: of a parabola) through the sizes measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from kafka_marshal import Group, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node import pacing
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing.broker import LocalBroker
from kafka_marshal.testing.simulate import where_it_ran
from rationalizer.routing import route_group

A_PROCESS = 10
CPS = 8
GROUP, TOPIC, COORDINATION = "all", "idle", "__marshal"
TICKS = os.sysconf("SC_CLK_TCK")

#: Statistics of one member's reader, of librdkafka: this often (ms).
LOOK_MS = 1_000

#: How long a member's start may wait (s): all start at once, on two cores.
START_S = 120.0

#: As brokers run in production: with the JVM's second compiler, which a local broker does without to start sooner.
JVM = ["-XX:TieredStopAtLevel=4"]


@dataclass(frozen=True)
class Cost:
    """The cost of this number of members."""

    members: int
    in_steps: bool
    #: A second.
    records: float
    #: Of one core: of the broker beyond its own, for each member; and of a member.
    broker: float
    member: float
    #: Fetches of a member's reader of the log, and what it gets (kB), a second.
    fetches: float = 0.0
    read_kb: float = 0.0

    def line(self) -> str:
        """For people."""
        how = "in steps" if self.in_steps else "at once"
        return (
            f"{self.members:7,} {how:9} {self.records:10,.1f} {self.fetches:10,.1f} {self.read_kb:9,.1f} "
            f"{self.broker:15.3%} {self.broker * self.members:9.1%} {self.member:11.2%}"
        )


class Reader:
    """Follows the statistics of one member's reader of the log."""

    def __init__(self) -> None:
        self.seen: tuple[float, int, int] = (0.0, 0, 0)

    def __call__(self, text: str) -> None:
        """Take statistics; those of other clients have no coordination topic that is fetched."""
        found = json.loads(text)
        if found["type"] == "consumer" and COORDINATION in found["topics"]:
            fetches = sum(broker.get("req", {}).get("Fetch", 0) for broker in found["brokers"].values())
            self.seen = (time.monotonic(), fetches, found["rx_bytes"])


def hold(bootstrap: str, first: int, count: int, in_steps: bool, data_wait_ms: str) -> None:
    """Run this number of members until standard input ends; a line in it asks for a reader's figures."""
    common = {"fetch.wait.max.ms": data_wait_ms} if data_wait_ms else {}
    if not in_steps:
        pacing.LONGEST_STEP_MS = 0.0
    reader = Reader()
    looked = {"stats_cb": reader, "statistics.interval.ms": LOOK_MS}
    consumers = []
    with ExitStack() as stack:
        for number in range(first, first + count):
            config = {**common, **(looked if number == 0 else {})}
            name = f"m-{number:04}"
            marshal = Marshal(
                bootstrap, group_id=GROUP, client_id=name, topic=COORDINATION, config=config, timeout=START_S
            )
            consumers.append(stack.enter_context(stack.enter_context(marshal).consumer([TOPIC], mode=Group())))
        while not all(consumer.assignment() for consumer in consumers):
            time.sleep(0.1)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(reader.seen), flush=True)


def spent(pid: int) -> float:
    """Processor seconds of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


def worked(pid: int) -> float:
    """Processor seconds of a JVM so far, without its compilers: a broker has compiled all after some hours."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            total += 0 if "CompilerThre" in name else sum(map(int, rest.split()[11:13]))
    return total / TICKS


def measure(members: int, seconds: float, in_steps: bool, data_wait_ms: str = "") -> Cost:
    """With this number of members, on a separate broker."""
    with LocalBroker(jvm_options=JVM) as broker, ExitStack() as stack:
        bootstrap, home = broker.bootstrap_servers, route_group(GROUP, CPS)
        cluster = KafkaCluster(bootstrap, {})
        create_topic(cluster, COORDINATION, CPS, START_S)
        cluster.create_topic(TOPIC, members, 1, {}, START_S)
        time.sleep(seconds / 4)
        bare, began = worked(broker.pid_of(1)), time.monotonic()
        time.sleep(seconds / 2)
        bare = (worked(broker.pid_of(1)) - bare) / (time.monotonic() - began)
        ours = []
        for first in range(0, members, A_PROCESS):
            count = min(A_PROCESS, members - first)
            about = f"{bootstrap},{first},{count},{int(in_steps)},{data_wait_ms}"
            command = [sys.executable, "-m", "benchmarks.idle_fleet", "--hold", about]
            ours.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stack.callback(ours[-1].wait)
            stack.callback(ours[-1].kill)
            assert ours[-1].stdout is not None
            assert ours[-1].stdout.readline() == "ready\n", "a process of members has ended"
        time.sleep(seconds)  # joins are over, and the JVM is warm; benchmarks.groups measures their cost
        pids = [process.pid for process in ours]

        def so_far() -> tuple[int, float, float]:
            _, end = cluster.watermarks([(COORDINATION, home)], START_S)[COORDINATION, home]
            return end, worked(broker.pid_of(1)), sum(map(spent, pids))

        def read_so_far() -> tuple[float, int, int]:
            asked, answers = ours[0].stdin, ours[0].stdout
            assert asked is not None
            assert answers is not None
            asked.write("\n")
            asked.flush()
            at, fetches, got = json.loads(answers.readline())
            return at, fetches, got

        seen, begin, began = read_so_far(), so_far(), time.monotonic()
        time.sleep(seconds)
        end, took = so_far(), time.monotonic() - began
        looked_s, fetches, got = (after - before for before, after in zip(seen, read_so_far(), strict=True))
        cluster.close()
        records, in_broker, in_members = ((after - before) / took for before, after in zip(begin, end, strict=True))
        return Cost(
            members,
            in_steps,
            records,
            (in_broker - bare) / members,
            in_members / members,
            fetches / looked_s,
            got / looked_s / 1000,
        )


def middle(found: Sequence[Cost]) -> Cost:
    """The median of each figure."""
    names = ("records", "broker", "member", "fetches", "read_kb")
    return Cost(found[0].members, found[0].in_steps, *(median(getattr(each, name) for each in found) for name in names))


def fitted(costs: Sequence[Cost], members: int) -> Cost:
    """For this number of members, on a straight line through the sizes measured: of each figure of one member."""
    sizes = [cost.members for cost in costs]
    mean = sum(sizes) / len(sizes)

    def at(name: str) -> float:
        values = [getattr(cost, name) for cost in costs]
        level = sum(values) / len(values)
        slope = sum((x - mean) * (y - level) for x, y in zip(sizes, values, strict=True))
        return float(level + slope / sum((x - mean) ** 2 for x in sizes) * (members - mean))

    return Cost(members, costs[0].in_steps, *map(at, ("records", "broker", "member", "fetches", "read_kb")))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and say it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", default="50,100,200")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=("steps", "at-once"))
    parser.add_argument("--data-wait", default="", help="fetch.wait.max.ms of the members' config")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.hold:
        bootstrap, first, count, in_steps, data_wait = args.hold.split(",")
        hold(bootstrap, int(first), int(count), in_steps == "1", data_wait)
        return
    print("members how        records/s  fetches/s  read kB/s  broker, a member     broker  one member   load")
    found: list[Cost] = []
    for members in map(int, args.members.split(",")):
        of_size: dict[bool, list[Cost]] = {True: [], False: []}
        for number in range(args.rounds):
            for in_steps in (True, False) if number % 2 else (False, True):
                if args.only is None or in_steps == (args.only == "steps"):
                    of_size[in_steps].append(measure(members, args.seconds, in_steps, args.data_wait))
                    print(of_size[in_steps][-1].line(), f"{os.getloadavg()[0]:6.1f}", flush=True)
        found += [middle(costs) for costs in of_size.values() if costs]
    print("medians; and of three sizes or more, 1,000 by a straight line through each figure of one member")
    for in_steps in (False, True):
        costs = [cost for cost in found if cost.in_steps is in_steps]
        if len(costs) > 2:  # two sizes have no line that could fail
            costs.append(fitted(costs, 1_000))
        for cost in costs:
            print(cost.line())
    if args.json:
        rows = {"benchmark": "idle_fleet", "machine": where_it_ran(), "rows": [asdict(cost) for cost in found]}
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
