"""What the start of a fleet costs one member: processor time until its group is even.

    python -m benchmarks.start_fleet [--members 250,500,1000] [--partitions N] [--over SECONDS] [--json FILE]

One real member in its own process, and phantoms (`benchmarks.phantoms`), which join evenly within ten seconds. "Even":
all are members, each partition is with its target and has a start. The member joins first, in the middle, or last. Its
time is that of its process beyond its imports, by threads: Python's, and librdkafka's own. `rules`: what the rules
alone take of it, measured where the phantoms apply the same records. `idle`: its share of a core afterwards, of a group
that only beats.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.phantoms import Phantoms
from kafka_marshal import Group, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing.broker import LocalBroker
from kafka_marshal.testing.simulate import where_it_ran

CPS = 8
TICKS = os.sysconf("SC_CLK_TCK")
#: The member's place among the joins, in shares of the time in which all join.
PLACES = {"first": 0.0, "middle": 0.5, "last": 1.0}
#: The aim (s of processor, until the group is even).
AIM_S = 3.0
LIMIT_S = 180.0


@dataclass(frozen=True)
class Start:
    """One member's part in one start. Times of processor in s."""

    members: int
    partitions: int
    place: str
    records: int
    python_s: float
    librdkafka_s: float
    rules_s: float
    #: The slowest record, for the rules (ms).
    slowest_ms: float
    #: From the first join until the group is even (wall clock).
    even_s: float
    #: Of a core, while all are idle afterwards, and the records a second meanwhile.
    idle: float
    idle_records: float

    @property
    def total_s(self) -> float:
        """Processor time of the member."""
        return self.python_s + self.librdkafka_s

    def line(self) -> str:
        """For people."""
        return (
            f"{self.members:7,} {self.partitions:10,}  {self.place:6} {self.records:8,} {self.total_s:8.2f} "
            f"{self.python_s:8.2f} {self.librdkafka_s:11.2f} {self.rules_s:7.2f} {self.slowest_ms:9.1f} "
            f"{self.even_s:7.1f} {self.idle:7.2%} {self.idle_records:7.0f}"
        )


def member(bootstrap: str, coordination: str, group: str, topics: Sequence[str]) -> None:
    """The real one: it joins when a line comes, and works until it is killed."""
    print("ready", flush=True)
    sys.stdin.readline()
    with (
        Marshal(bootstrap, group_id=group, client_id="real", topic=coordination) as marshal,
        marshal.consumer(topics, mode=Group()),
    ):
        sys.stdin.readline()


def spent(pid: int) -> tuple[float, float]:
    """Processor seconds of a process so far: of Python's threads, and of librdkafka's."""
    found = [0.0, 0.0]
    for task in Path(f"/proc/{pid}/task").iterdir():
        head, _, rest = (task / "stat").read_text().rpartition(")")
        user, system = rest.split()[11:13]
        found["(rdk" in head] += (int(user) + int(system)) / TICKS
    return found[0], found[1]


def measure(
    bootstrap: str, members: int, topics: dict[str, int], place: str, over_s: float, session_ms: int, idle_s: float
) -> Start:
    """One start, in its own log."""
    group, coordination = f"fleet-{uuid.uuid4().hex[:8]}", f"__marshal-{uuid.uuid4().hex[:8]}"
    cluster = KafkaCluster(bootstrap, {})
    create_topic(cluster, coordination, CPS, 60)
    cluster.close()
    about = json.dumps([bootstrap, coordination, group, list(topics)])
    command = [sys.executable, "-m", "benchmarks.start_fleet", "--member", about]
    real = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert real.stdin is not None
    assert real.stdout is not None
    phantoms = Phantoms(bootstrap, coordination, CPS, group, topics, members - 1, over_s=over_s, session_ms=session_ms)
    try:
        assert real.stdout.readline() == "ready\n", "the member has ended"
        before = spent(real.pid)
        joins_ms = PLACES[place] * over_s * 1000
        if place == "first":
            _go(real, phantoms, joins_ms)
            while (group_now := phantoms.world.group(group)) is None or "real" not in group_now.clients:
                phantoms.turn()
            joins_ms = float("inf")
        phantoms.start()
        while not phantoms.is_even(members):
            phantoms.turn()
            if phantoms.now_ms() >= joins_ms:
                _go(real, phantoms, joins_ms)
                joins_ms = float("inf")
            if phantoms.now_ms() > LIMIT_S * 1000:
                raise RuntimeError("the group was not even in time")
        even_s = phantoms.now_ms() / 1000
        after = spent(real.pid)
        records, rules_s, slowest_s = phantoms.records, phantoms.rules_s, phantoms.slowest_s
        idle, idle_records = _idle(real.pid, phantoms, idle_s) if idle_s else (0.0, 0.0)
    finally:
        real.kill()
        real.wait()
        phantoms.close()
    python_s, librdkafka_s = (late - early for early, late in zip(before, after, strict=True))
    return Start(
        members,
        sum(topics.values()),
        place,
        records,
        python_s,
        librdkafka_s,
        rules_s,
        slowest_s * 1000,
        even_s,
        idle,
        idle_records,
    )


def _idle(pid: int, phantoms: Phantoms, idle_s: float) -> tuple[float, float]:
    """The member's share of a core meanwhile, and the records a second."""
    begun, used, records = phantoms.now_ms(), sum(spent(pid)), phantoms.records
    while phantoms.now_ms() < begun + idle_s * 1000:
        phantoms.turn()
    took_s = (phantoms.now_ms() - begun) / 1000
    return (sum(spent(pid)) - used) / took_s, (phantoms.records - records) / took_s


def _go(real: subprocess.Popen[str], phantoms: Phantoms, joins_ms: float) -> None:
    assert real.stdin is not None
    real.stdin.write("join\n")
    real.stdin.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and say it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="250,500,1000")
    parser.add_argument("--partitions", type=int, help="of all topics; default: as many as members")
    parser.add_argument("--topics", type=int, default=1)
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--over", type=float, default=10.0, help="seconds in which all join")
    parser.add_argument("--session", type=int, default=10_000)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds to measure afterwards")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.member:
        member(*json.loads(args.member))
        return
    rows = []
    print(
        "members partitions  joins   records  total s python s librdkafka s rules s slowest ms  even s    idle  rec./s"
    )
    with LocalBroker() as broker:
        for members in map(int, args.members.split(",")):
            for place in args.places.split(","):
                each = (args.partitions or members) // args.topics
                topics = {f"of-{each}-{number:02}": each for number in range(args.topics)}
                cluster = KafkaCluster(broker.bootstrap_servers, {})
                for name in topics.keys() - cluster.topics(10).keys():
                    cluster.create_topic(name, each, 1, {}, 60)
                cluster.close()
                rows.append(
                    measure(broker.bootstrap_servers, members, topics, place, args.over, args.session, args.idle)
                )
                print(rows[-1].line(), flush=True)
    if args.json:
        found = {"benchmark": "start_fleet", "machine": where_it_ran(), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
