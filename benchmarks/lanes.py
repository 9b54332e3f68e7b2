"""Many handlers on one partition: consumer.run() beside peers, each key in order.

    python -m benchmarks.lanes [--short] [--rounds N] [--only NAME,…] [--json FILE]

One partition, 16 handlers of 5 ms, on the same records of the same broker, in turns; medians of the rounds. Keys are
drawn by Zipf's law from 1,000, or equally from 20: with a key for each record there would be no order to keep.

    alone       16 handlers sleep, without Kafka: losses there are the machine's
    possible    min(16, 1 ÷ share of the most frequent key) handlers work all the time
    disturbed   one record is never done, 2 % fail once: the rate of all other keys, ÷ the same undisturbed
    no-op       a handler that only counts
    memory      records pass one that is never done: peak memory of the process
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from confluent_kafka import Producer

from benchmarks.common import bench_kafka, new_log
from benchmarks.lane_peers.alone import of_coroutines, of_threads
from benchmarks.lane_peers.launch import MissingError, Outcome, Starter
from benchmarks.lane_peers.work import Order
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.testing.simulate import where_it_ran

HANDLERS = 16
WORK_MS = 5.0
ZIPF_KEYS, EQUAL_KEYS = 1_000, 20
FAIL_EVERY = 50
VALUE_BYTES = 100

#: After this time without a record (s), a contestant has stopped.
QUIET_S = 4.0

#: A contestant is ended after this multiple of the possible time.
PATIENCE = 3.0

#: Longest measurement of handlers that do nothing (s).
NO_OP_S = 10.0

CONTESTANTS = {
    "run, threads": "threads",
    "run, coroutines": "coroutines",
    "by batches, 16 members": "shared",
    "Parallel Consumer 0.5.3": "parallel",
    "pyrallel-consumer 1.0.0": "pyrallel",
    "share group": "share",
    "pool, hash buckets": "pool",
}
OURS = ("threads", "coroutines")

RATIO_AIM = 0.95
NO_OP_AIMS_US = {"threads": 10.0, "coroutines": 15.0}
MEMORY_AIM_MB = 200.0


@dataclass(frozen=True)
class Records:
    """A topic of one partition."""

    name: str
    topic: str
    keys: list[str]
    #: A record that is never done: the first of a key that is neither rare nor the most frequent.
    stuck: int

    @property
    def others(self) -> int:
        """Number of records without the stuck key."""
        return len(self.keys) - self.keys.count(self.keys[self.stuck])

    @property
    def possible_s(self) -> float:
        """The shortest possible time for all of them."""
        most = max(Counter(self.keys).values())
        return max(most, len(self.keys) / HANDLERS) * WORK_MS / 1000


@dataclass
class Row:
    """One line of the table."""

    scene: str
    name: str
    #: records/s, µs or MB.
    unit: str
    samples: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    inversions: int = 0
    note: str = ""
    #: Target of the median of the ratios, or else of the samples; None for a peer.
    aim: float | None = None

    @property
    def missed(self) -> bool:
        """Whether the aim is missed."""
        if self.aim is None:
            return False
        return median(self.ratios) < self.aim if self.ratios else not self.samples or median(self.samples) > self.aim

    def line(self) -> str:
        """For people, 80 columns."""
        value = spread = ratio = "-"
        if self.samples:
            value = f"{median(self.samples):,.1f}" if self.unit == "µs" else f"{median(self.samples):,.0f}"
        if self.ratios:
            ratio, spread = f"{median(self.ratios):.3f}", f"{min(self.ratios):.2f}-{max(self.ratios):.2f}"
        elif self.samples:
            spread = f"{min(self.samples):.3g}-{max(self.samples):.3g}"
        note = " ".join(filter(None, ["MISSED" * self.missed, self.note]))
        return f"{self.name:27}{value:>7} {ratio:>6} {spread:>10} {self.inversions:6,} {note}"[:80].rstrip()


def fill(bootstrap: str, name: str, keys: list[str], stuck: int) -> Records:
    """A topic with these records: each has the offset of its key's previous one."""
    topic = f"lanes-{uuid.uuid4().hex[:8]}"
    cluster = KafkaCluster(bootstrap, {})
    cluster.create_topic(topic, 1, 1, {}, 10)
    cluster.close()
    config = {"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000}
    producer = Producer({**config, "enable.idempotence": True})
    last: dict[str, int] = {}
    for offset, key in enumerate(keys):
        value = b"%-10d" % last.get(key, -1) + b"x" * (VALUE_BYTES - 10)
        last[key] = offset
        while True:
            try:
                producer.produce(topic, value, key=key, partition=0)
                break
            except BufferError:
                producer.poll(0.1)
        if offset % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    return Records(name, topic, keys, stuck)


def zipf(count: int) -> list[str]:
    """Keys by Zipf's law: the n-th is as frequent as 1 / n."""
    weights = [1 / (1 + number) for number in range(ZIPF_KEYS)]
    return [f"k{number}" for number in Random(1).choices(range(ZIPF_KEYS), weights, k=count)]


def equal(count: int) -> list[str]:
    """Equally frequent keys."""
    return [f"k{number}" for number in Random(2).choices(range(EQUAL_KEYS), k=count)]


class Bench:
    """The measurements, on one broker."""

    def __init__(self, starter: Starter, bootstrap: str, only: Sequence[str], rounds: int) -> None:
        self._starter = starter
        self._bootstrap = bootstrap
        self._rounds = rounds
        self._contestants = {name: side for name, side in CONTESTANTS.items() if not only or side in only}
        self._coordination = new_log(bootstrap, 8)

    def _order(
        self, side: str, records: Records, work_ms: float, limit_s: float, concurrency: int, *, disturbed: bool = False
    ) -> Order:
        return Order(
            side=side,
            bootstrap=self._bootstrap,
            topic=records.topic,
            group=f"g-{uuid.uuid4().hex[:8]}",
            coordination=self._coordination,
            records=len(records.keys),
            others=records.others if disturbed else len(records.keys),
            work_ms=work_ms,
            concurrency=concurrency,
            stuck=records.stuck if disturbed else -1,
            stuck_key=records.keys[records.stuck] if disturbed else "",
            fail_every=FAIL_EVERY if disturbed and work_ms else 0,
            quiet_s=QUIET_S,
            limit_s=limit_s,
        )

    def _measured(self, row: Row, order: Order) -> Outcome | None:
        """The outcome, or None with a note in the row."""
        if sys.stderr.isatty():
            print(f"\r\033[K  {row.scene}: {row.name} …", end="", file=sys.stderr)
        try:
            found = self._starter.run(order)
        except MissingError as error:
            row.note = str(error)
            return None
        row.inversions = max(row.inversions, found.inversions)
        if found.done < order.others:
            row.note = f"only {found.done / order.others:.0%} done"
        return found

    def alone(self) -> Iterator[Row]:
        """Sleeping without Kafka."""
        for name, measure in (("threads", of_threads), ("coroutines", of_coroutines)):
            row = Row("sleeping alone, of possible", name, "records/s")
            for _ in range(self._rounds):
                row.ratios.append(measure(HANDLERS, WORK_MS / 1000))
                row.samples.append(row.ratios[-1] * HANDLERS * 1000 / WORK_MS)
            yield row

    def work(self, records: Records) -> Iterator[Row]:
        """Undisturbed, then disturbed."""
        plain, disturbed = (
            {
                side: Row(scene, name, "records/s", aim=RATIO_AIM if side in OURS else None)
                for name, side in self._contestants.items()
            }
            for scene in (f"{records.name}, of possible", f"{records.name}, disturbed, of undisturbed")
        )
        limit_s = PATIENCE * records.possible_s + QUIET_S
        possible = len(records.keys) / records.possible_s
        for _ in range(self._rounds):
            for side, row in plain.items():
                found = self._measured(row, self._order(side, records, WORK_MS, limit_s, HANDLERS))
                if found is None:
                    continue
                row.samples.append(found.rate)
                row.ratios.append(found.rate / possible)
                order = self._order(side, records, WORK_MS, limit_s, HANDLERS, disturbed=True)
                if (others := self._measured(disturbed[side], order)) is not None:
                    undisturbed = found.rate * records.others / len(records.keys)
                    disturbed[side].samples.append(others.rate)
                    disturbed[side].ratios.append(others.rate / undisturbed if undisturbed else 0.0)
        for one in (plain, disturbed):
            yield from one.values()

    def no_op(self, records: Records) -> Iterator[Row]:
        """µs a record: ours with one handler, all with 16."""
        cases = [(name, side, 1, NO_OP_AIMS_US[side]) for name, side in self._contestants.items() if side in OURS]
        cases += [(name, side, HANDLERS, None) for name, side in self._contestants.items()]  # type: ignore[misc]
        rows = [Row(f"{records.name}, no-op, µs a record", f"{x[0]}, {x[2]}", "µs", aim=x[3]) for x in cases]
        for _ in range(self._rounds):
            for row, (_, side, concurrency, _) in zip(rows, cases, strict=True):
                found = self._measured(row, self._order(side, records, 0.0, NO_OP_S, concurrency))
                if found is not None and found.done:
                    row.samples.append(1e6 * found.seconds / found.done)
                    row.note = ""  # its rate is known from what it did within the time
        yield from rows

    def memory(self, records: Records) -> Iterator[Row]:
        """Records pass one that is never done."""
        for name, side in self._contestants.items():
            if side in OURS:
                row = Row(f"{len(records.keys):,} records pass one that is stuck, MB", name, "MB", aim=MEMORY_AIM_MB)
                found = self._measured(row, self._order(side, records, 0.0, 600.0, HANDLERS, disturbed=True))
                if found is not None:
                    row.samples.append(found.peak_mb)
                    row.note = row.note or f"{1e6 * found.seconds / found.done:.1f} µs a record"
                yield row


def table(rows: Sequence[Row]) -> str:
    """For people, 80 columns."""
    lines, scene = [f"{'':27}{'median':>7} {'ratio':>6} {'min-max':>10} {'invers.':>6} note"], ""
    for row in rows:
        if row.scene != scene:
            scene = row.scene
            lines.append(f"-- {scene}")
        lines.append(row.line())
    return "\n".join(lines)


def write(path: Path, rows: Sequence[Row], **conditions: object) -> None:
    """Write the rows as JSON, with every sample."""
    found = [{**asdict(row), "reached": not row.missed} for row in rows]
    whole = {"benchmark": "lanes", "conditions": conditions, "machine": where_it_ran(), "rows": found}
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and say it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a tenth of it, once: does it run")
    parser.add_argument("--rounds", type=int, help="3; short: 1")
    parser.add_argument("--only", default="", help=f"of {', '.join(CONTESTANTS.values())}")
    parser.add_argument("--scenes", default="work,no-op,memory", help="work,no-op,memory")
    parser.add_argument("--pass-by", type=int, help="records that pass the stuck one (10,000,000; short: 2,000,000)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    size = 10 if args.short else 1
    rounds = args.rounds or (1 if args.short else 3)
    passing = args.pass_by or (2_000_000 if args.short else 10_000_000)
    only = [name for name in args.only.split(",") if name]
    scenes = args.scenes.split(",")
    rows: list[Row] = []
    with bench_kafka() as bootstrap, Starter.in_a_folder() as starter:
        bench = Bench(starter, bootstrap, only, rounds)
        if "work" in scenes:
            rows += bench.alone()
        for name, draw, count in (("Zipf", zipf, 7_500), ("20 keys", equal, 16_000)):
            if "work" in scenes:
                keys = draw(count // size)
                rows += bench.work(fill(bootstrap, name, keys, keys.index("k9")))
            if "no-op" in scenes:
                keys = draw(200_000 // size)
                rows += bench.no_op(fill(bootstrap, name, keys, keys.index("k9")))
        if "memory" in scenes:
            keys = ["stuck", *equal(passing)]
            rows += bench.memory(fill(bootstrap, "memory", keys, 0))
    print(f"lanes: 1 partition, {HANDLERS} handlers of {WORK_MS:g} ms, {rounds} round(s)")
    print(table(rows))
    if args.json:
        write(args.json, rows, rounds=rounds, short=args.short)


if __name__ == "__main__":
    main()
