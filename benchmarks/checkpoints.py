"""What checkpoints cost: a coordinated group with them beside the same group without, in one run, in turns.

    python -m benchmarks.checkpoints [--rounds N] [--only throughput,log,…] [--beside REV] [--json FILE]

- throughput: messages of 100 bytes a second of one member with four partitions that counts them by partition, and saves
  the counts in a folder. In the window of every=30 s there is always one checkpoint (it is placed around it), so a
  longer run has less of their cost;
- standstill: handlers of 5 ms; from the end of the last one of a piece before its cut to the begin of the first one
  after it. In a plain loop (four members, a partition each) and in `run` (one member with four), and in `run` with
  nothing to save;
- hand-over: one of two members closes, and records come every 5 ms: how long the partitions that move pause;
- rollback: four processes, and eight partitions with a record every 5 ms each: the longest pause of any partition.
  Beside it a classic group of confluent-kafka: SIGTERM to all, offsets altered by its admin client when they have left,
  all started again;
- log: bytes that a member with four partitions writes in an hour, computed from the records of this run's log;
- replay: records of checkpoints and commits beside a bare decode; with --beside also claims and groups without
  checkpoints beside those of another commit.

Ratios are medians over the rounds, with the least and the greatest in parentheses. At most six minutes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from benchmarks.against import __main__ as against
from benchmarks.checkpoint_member import LOOPS, PATIENCE_S, Member, Place, slowly, stood_still, usual_gaps
from benchmarks.common import Row, bench_kafka, in_turns, new_log, paired, report
from benchmarks.group_log import GroupLog
from benchmarks.race.contestants import CLASSIC
from benchmarks.race.grounds import CPS, Grounds, new_name
from benchmarks.replay import decode_bare, replay
from benchmarks.rolling import Worker, kafkas, longest
from kafka_marshal.admin import Admin
from rationalizer import AnswerBarrier, BeginCheckpoint, CommitOffsets, GroupHeartbeat
from rationalizer.levels import CHECKPOINTS_LEVEL
from rationalizer.wire.codec import decode

PARTITIONS = 4
#: Messages for the fastest loop.
BACKLOG = 6_000_000
#: A window of throughput, and the time before it in which a loop gets going (s).
WINDOW_S, SETTLE_S = 3.0, 0.5
#: What a whole run of it takes (s).
RUN_S = 5.5
#: every → the least ratio to a group without checkpoints.
AIMS: Mapping[float, float] = {1.0: 0.9, 30.0: 0.98}

#: A handler, the checkpoints meanwhile, and how long (s).
WORK_S, OFTEN_S, STANDSTILL_S = 0.005, 0.2, 4.0

#: Between two records of a partition (s).
FEED_S = 0.005
#: Hand-overs vary more, so there are more rounds of them.
MORE = 2
#: When the leaver closes, a heartbeat's phase is anywhere.
PHASE_S = (0.2, 1.2)
#: The time after a hand-over or a rollback in which pauses count (s).
AFTER_S = 1.5

WORKERS, FED = 4, 8
#: How long a group of processes needs until it is at rest (s), and how many offsets a classic group goes back.
REST_S, BACK = 4.0, 200

#: Records of each replayed log.
RECORDS = 8_000

HOUR_S = 3600
#: Kafka's own bytes for a batch of one record.
A_BATCH = 70

SCENES = ("throughput", "standstill", "handover", "rollback", "log", "replay")


@dataclass(frozen=True, slots=True)
class Bench:
    """What all scenes share."""

    bootstrap: str
    log: str
    folder: Path
    rounds: int

    def place(self, topic: str, partitions: int = PARTITIONS) -> Place:
        """A new group."""
        return Place(self.bootstrap, self.log, topic, partitions, new_name("group"))

    def states(self) -> Path:
        """A new folder for states."""
        return self.folder / new_name("states")

    def backlog(self, records: int) -> str:
        """A topic with that many records: not compressed, else one fetch of a megabyte holds a whole partition."""
        topic = Grounds(self.bootstrap).topic(PARTITIONS)
        more = {"linger.ms": 20, "queue.buffering.max.messages": 1_000_000}
        producer = Producer({"bootstrap.servers": self.bootstrap, **more})
        for number in range(records):
            producer.produce(topic, b"x" * 100, partition=number % PARTITIONS)
            if number % 10_000 == 0:
                producer.poll(0)
        producer.flush()
        return topic


def until(met: Callable[[], bool], what: str) -> None:
    """Wait for this."""
    end = time.monotonic() + PATIENCE_S
    while not met():
        if time.monotonic() > end:
            raise AssertionError(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.01)


# Throughput.


def rate(member: Member, loop: str) -> tuple[float, int]:
    """Messages a second, and how many checkpoints were complete meanwhile."""
    member.begin(LOOPS[loop])
    until(lambda: member.is_at_work(range(PARTITIONS)), f"{loop} has begun on all partitions")
    time.sleep(SETTLE_S)
    counted, began = sum(member.counts.values()), time.monotonic()
    time.sleep(WINDOW_S)
    done, took = sum(member.counts.values()) - counted, time.monotonic() - began
    if sum(member.counts.values()) >= BACKLOG:
        raise AssertionError(f"{loop} has read all {BACKLOG:,} messages: the backlog is too small")
    member.close()
    return done / took, sum(began <= at < began + took for at in member.completed)


class Early:
    """A member that has joined in time: its first periodic checkpoint comes in the middle of its window."""

    def __init__(self, bench: Bench, topic: str, loop: str, every: float) -> None:
        self._bench, self._topic, self.loop, self._every = bench, topic, loop, every
        self._join()

    def _join(self) -> None:
        member = self._member = Member(self._bench.place(self._topic), self._every, self._bench.states())
        until(lambda: member.consumer.checkpoints.newest is not None, "the first checkpoint")
        [first] = member.consumer.checkpoints.kept
        self._begin = first.log_time / 1000 + self._every - WINDOW_S / 2 - SETTLE_S

    @property
    def is_near(self) -> bool:
        """Whether no other run fits in before."""
        return time.time() + RUN_S > self._begin

    def rate(self) -> float:
        """Messages a second, with one checkpoint."""
        while True:
            time.sleep(max(0.0, self._begin - time.time()))
            found, checkpoints = rate(self._member, self.loop)
            if checkpoints == 1:
                return found
            self._join()  # the machine was late


def throughput(bench: Bench) -> Iterator[Row]:
    """Rows for each loop and interval."""
    topic, (often, rare) = bench.backlog(BACKLOG), AIMS
    found: dict[tuple[str, float | None], list[float]] = defaultdict(list)
    early: deque[Early] = deque()

    def measure_early(*, all_of_them: bool) -> None:
        while early and (all_of_them or early[0].is_near):
            found[early[0].loop, rare].append(early[0].rate())
            early.popleft()

    for number in range(bench.rounds):
        for loop in LOOPS:
            early.append(Early(bench, topic, loop, rare))
            for every in (often, None) if number % 2 else (None, often):
                measure_early(all_of_them=False)
                member = Member(bench.place(topic), every, None if every is None else bench.states())
                found[loop, every].append(rate(member, loop)[0])
    measure_early(all_of_them=True)
    for loop in LOOPS:
        for every, aim in AIMS.items():
            pairs = list(zip(found[loop, every], found[loop, None], strict=True))
            yield paired(f"throughput, {loop}, every={every:g}", pairs, aim, "messages/s")


# Standstill.


def standstill(bench: Bench) -> Iterator[Row]:
    """Rows for a plain loop and for `run`."""
    topic = bench.backlog(40_000)
    for name, members, run, saves in (
        ("a plain loop", PARTITIONS, False, True),
        ("run", 1, True, True),
        ("run, nothing to save", 1, True, False),
    ):
        gaps, usual = [], []
        for _ in range(bench.rounds):
            place = bench.place(topic)
            states = bench.states() if saves else None
            with ExitStack() as stack:
                group = [stack.enter_context(Member(place, OFTEN_S, states, f"m{n}")) for n in range(members)]
                for member in group:
                    member.begin(slowly(WORK_S, run=run))
                share = PARTITIONS // members
                until(lambda: all(len(each.consumer.assignment()) == share for each in group), "equal shares")  # noqa: B023
                time.sleep(SETTLE_S)
                since = time.monotonic()
                time.sleep(STANDSTILL_S)
                measured = stood_still, usual_gaps
                until(lambda: all(any(found(each, since) for each in group) for found in measured), "a checkpoint")  # noqa: B023
            gaps.append([gap for member in group for gap in stood_still(member, since)])
            usual.append(median(gap for member in group for gap in usual_gaps(member, since)))
        for what, of in (("median", median), ("p99", p99)):
            found = [(of(each), WORK_S * 1000) for each in gaps]
            yield paired(f"standstill, {name}, {what} (beside a handler)", found, None, "ms", at_most=True)
        print(f"  {name}: {sum(map(len, gaps))} cuts; between two handlers {median(usual):.2f} ms", file=sys.stderr)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]


# Hand-over.


def note_into(taken: dict[int, list[float]]) -> Callable[[Member], None]:
    """A loop that notes when it took something of each partition."""

    def loop(member: Member) -> None:
        for message in member.consumer:
            partition = message.partition() or 0
            taken[partition].append(time.monotonic())
            member.counts[partition] += 1

    return loop


def hand_over(bench: Bench, every: float | None, phase_s: float) -> float:
    """Milliseconds: how long the partitions of the member that closes pause, on average."""
    grounds = Grounds(bench.bootstrap)
    place, states = bench.place(grounds.topic(PARTITIONS)), bench.states()
    taken: dict[int, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        stack.enter_context(grounds.feed([(place.topic, partition) for partition in range(PARTITIONS)], FEED_S))
        group = [stack.enter_context(Member(place, every, states, name)) for name in "ab"]
        for member in group:
            member.begin(note_into(taken))
        until(lambda: all(len(each.consumer.assignment()) == PARTITIONS // 2 for each in group), "equal shares")
        time.sleep(phase_s)
        moving = [each.partition for each in group[0].consumer.assignment()]
        began = time.monotonic()
        group[0].close()
        time.sleep(AFTER_S)
        ended = time.monotonic()
    return sum(longest(taken[partition], began - 0.1, ended) for partition in moving) / len(moving)


def handover(bench: Bench) -> Iterator[Row]:
    """One row."""
    draw = Random(5)
    pairs = in_turns(
        bench.rounds + MORE,
        lambda: hand_over(bench, 30.0, draw.uniform(*PHASE_S)),
        lambda: hand_over(bench, None, draw.uniform(*PHASE_S)),
    )
    yield paired("hand-over, pause of what moves", pairs, None, "ms", at_most=True)


# Rollback.


def worker(arguments: dict[str, Any]) -> None:
    """One process: prints "ready"; at its end writes when it took what."""
    taken: list[tuple[float, int]] = []

    def take(message: Any) -> None:
        taken.append((time.monotonic(), message.partition()))

    if arguments["side"] == "group":
        kafkas(arguments, take)
    else:
        ours(arguments, take)
    with Path(arguments["file"]).open("a", encoding="utf-8") as file:
        file.writelines(f"{at} {partition}\n" for at, partition in taken)


def ours(arguments: dict[str, Any], take: Callable[[Any], None]) -> None:
    """A member with checkpoints."""
    place, ended = Place(*arguments["place"]), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with Member(place, 1.0, Path(arguments["states"]), arguments["name"]) as member:
        member.begin(lambda member: deque(map(take, member.consumer), 0))
        until(lambda: bool(member.consumer.assignment()), "an assignment")
        print("ready", flush=True)
        ended.wait()


class Fleet:
    """Worker processes of one side, and how long each partition paused."""

    def __init__(self, bench: Bench, topic: str, side: str) -> None:
        self.place = bench.place(topic, FED)
        self._file = bench.folder / new_name("taken")
        self._file.touch()
        arguments = {
            "side": side,
            "place": [getattr(self.place, name) for name in Place.__slots__],
            "states": str(bench.states()),
            "file": str(self._file),
            "bootstrap": bench.bootstrap,
            "group": self.place.group,
            "topic": topic,
            "config": dict(CLASSIC.config),
            "static": False,
        }
        self.workers = [Worker({**arguments, "name": f"w{n}"}, "benchmarks.checkpoints") for n in range(WORKERS)]
        try:
            for each in self.workers:
                each.wait()
        except BaseException:
            self.kill()
            raise
        time.sleep(REST_S)

    def end(self) -> None:
        """SIGTERM to all, and wait for them."""
        for each in self.workers:
            each.signal()
        for each in self.workers:
            each.join()

    def kill(self) -> None:
        """What is left."""
        for each in self.workers:
            each.kill()

    def pauses(self, moments: Sequence[tuple[float, float]]) -> list[float]:
        """Milliseconds: the longest pause of any partition in each of these spans."""
        taken = defaultdict(list)
        for at, partition in map(str.split, self._file.read_text(encoding="utf-8").splitlines()):
            taken[int(partition)].append(float(at))
        return [max(longest(taken[number], *span) for number in range(FED)) for span in moments]


def rolled_back(bench: Bench, topic: str) -> list[float]:
    """Milliseconds of each rollback."""
    fleet, moments = Fleet(bench, topic, "marshal"), []
    try:
        admin = Admin(bench.bootstrap, topic=bench.log)
        for _ in range(bench.rounds):
            to = admin.checkpoint(fleet.place.group).id
            time.sleep(1.0)
            began = time.monotonic()
            admin.rollback(fleet.place.group, to)
            time.sleep(AFTER_S)
            moments.append((began - 0.1, time.monotonic()))
        fleet.end()
    finally:
        fleet.kill()
    return fleet.pauses(moments)


def reset(bench: Bench, topic: str) -> list[float]:
    """Milliseconds of each stop, reset and start of a classic group."""
    fleet, moments = Fleet(bench, topic, "group"), []
    admin = AdminClient({"bootstrap.servers": bench.bootstrap})
    try:
        for _ in range(bench.rounds):
            began = time.monotonic()
            fleet.end()
            go_back(bench, admin, fleet.place)
            for each in fleet.workers:
                each.start()
            for each in fleet.workers:
                each.wait()
            time.sleep(REST_S)
            moments.append((began - 0.1, time.monotonic()))
        fleet.end()
    finally:
        fleet.kill()
    return fleet.pauses(moments)


def go_back(bench: Bench, admin: AdminClient, place: Place) -> None:
    """Alter the offsets of a group that has no members."""
    reader = Consumer({"bootstrap.servers": bench.bootstrap, "group.id": place.group})
    committed = reader.committed([TopicPartition(place.topic, n) for n in range(FED)], 10)
    reader.close()
    to = [TopicPartition(each.topic, each.partition, max(0, each.offset - BACK)) for each in committed]
    for future in admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(place.group, to)]).values():
        future.result(30)


def rollback(bench: Bench) -> Iterator[Row]:
    """One row."""
    grounds = Grounds(bench.bootstrap)
    topic = grounds.topic(FED)
    with grounds.feed([(topic, partition) for partition in range(FED)], FEED_S):
        pairs = list(zip(rolled_back(bench, topic), reset(bench, topic), strict=True))
    yield paired("rollback, standstill of all (beside stop, reset, start)", pairs, 0.1, "ms", at_most=True)


# The log.


def log_bytes(bench: Bench) -> Iterator[Row]:
    """What a member writes in an hour, by the records that the other scenes have left."""
    beats, sizes = BeatRate(), defaultdict(list)
    for cp in range(CPS):
        for key, at, value in values(bench.bootstrap, bench.log, cp):
            record = decode(value, CHECKPOINTS_LEVEL)
            if isinstance(record, GroupHeartbeat):
                beats.saw(record.member_id, at)
            of = len(record.entries) if isinstance(record, (AnswerBarrier, CommitOffsets)) else 0
            sizes[type(record), of].append(len(value) + key + A_BATCH)
    each = {which: sum(found) / len(found) for which, found in sizes.items()}
    a_checkpoint = each[AnswerBarrier, PARTITIONS] + each[BeginCheckpoint, 0]
    commits = beats.an_hour * each[CommitOffsets, PARTITIONS]
    for every in AIMS:
        found = HOUR_S / every * a_checkpoint
        if every > 10:  # in between it only says that it is alive
            found += beats.an_hour * each[GroupHeartbeat, 0]
        yield Row(
            f"log of a member and hour, every={every:g}", found / 1000, commits / 1000, found / commits, None, "kB"
        )


class BeatRate:
    """How often members beat."""

    def __init__(self) -> None:
        self._at: dict[str, list[int]] = defaultdict(list)

    def saw(self, member: str, at_ms: int) -> None:
        self._at[member].append(at_ms)

    @property
    def an_hour(self) -> float:
        """The median of all intervals, as a rate."""
        gaps = [late - early for times in self._at.values() for early, late in pairwise(times)]
        return 1000 * HOUR_S / median(gaps)


def values(bootstrap: str, topic: str, partition: int) -> Iterator[tuple[int, int, bytes]]:
    """Length of the key, log time and value of each record."""
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "sizes", "enable.auto.commit": False})
    _, end = reader.get_watermark_offsets(TopicPartition(topic, partition), 10)
    reader.assign([TopicPartition(topic, partition, 0)])
    at = -1
    while at + 1 < end:
        for message in reader.consume(1_000, 0.5):
            if message.error() is None:
                at = message.offset() or 0
                yield len(message.key() or b""), message.timestamp()[1], message.value() or b""
    reader.close()


# Replay.


def replays(bench: Bench, beside: str | None) -> Iterator[Row]:
    """Records of checkpoints beside a bare decode; those without beside another commit."""
    for name, checkpoints in (("checkpoints", True), ("commits of a group without", False)):
        log = GroupLog(RECORDS, checkpoints=checkpoints)
        size = len(log.work)
        pairs = in_turns(
            bench.rounds,
            lambda: size / replay(log.begin, log.work, 0, 1),  # noqa: B023
            lambda: size / decode_bare(log.work),  # noqa: B023
        )
        yield paired(f"replay of {name} (beside a bare decode)", pairs, None, "records/s")
    if beside is not None:
        rounds = {"replay": 9, "replay-group": 9}
        for (name, _), each in against.compare(bench.bootstrap, beside, rounds).items():
            what = "claims" if name == "replay" else "a group without checkpoints"
            yield paired(f"replay of {what} (beside {beside[:8]})", each, 0.98, "records/s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(SCENES), help=f"of {', '.join(SCENES)} (log: with throughput)")
    parser.add_argument("--beside", metavar="REV", help="replay logs without checkpoints beside this commit, too")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    if options.worker is not None:
        worker(options.worker)
        return
    began = time.monotonic()
    with bench_kafka({"group.initial.rebalance.delay.ms": "0"}) as bootstrap, TemporaryDirectory() as folder:
        bench = Bench(bootstrap, new_log(bootstrap, CPS), Path(folder), options.rounds)
        scenes: dict[str, Callable[[Bench], Iterator[Row]]] = {
            "throughput": throughput,
            "standstill": standstill,
            "handover": handover,
            "rollback": rollback,
            "log": log_bytes,
            "replay": lambda bench: replays(bench, options.beside),
        }
        rows: list[Row] = []
        for name in options.only.split(","):
            rows += scenes[name](bench)
            print(f"{name}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
    report("checkpoints", rows, options.json, rounds=options.rounds, seconds=round(time.monotonic() - began))


if __name__ == "__main__":
    main()
