"""16 workers on one partition by batches, beside a share group (KIP-932) on the same broker, in turns.

python -m benchmarks.share_race [--rounds N] [--seconds S] [--workers N] [--only NAME,…] [--json FILE]

full       handlers of 5 ms, a backlog: messages a second, ÷ 16 × serial
disturbed  the same, one message is never done and 2 % fail once: all others a second, ÷ 15 of 16 undisturbed workers
light      200 messages a second: time from produce to handler, median and 99th percentile (ms)
kill       kill -9 of a worker whose handler has a message: time until another has it, ÷ the share group's lock (15 s,
           the least that its broker allows without other settings; its default is 30 s)
log        bytes in __marshal for 1,000 messages, from a backlog, beside __share_group_state
lone       one worker by batches, ``run`` with 4 handlers of 0.2 s: messages a second ÷ the same with whole partitions
keys       4 processes with ranges of keys as even as they can be (``assign``), a backlog: messages a second until all
           are done, ÷ min(4, 1 ÷ part of the most frequent key) × serial; no share group keeps an order

Both sides are Python, one process a worker, one message after the other. The share group has explicit
acknowledgements, and max.poll.records below the record locks of a partition (2,000) ÷ workers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from confluent_kafka import AcknowledgeType, Consumer, Producer, ShareConsumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from benchmarks.common import Row, bench_kafka, in_turns, new_log, paired, report
from kafka_marshal import Attempt, Batches, Keys, Marshal, Retry
from rationalizer import key_hash

WORKERS = 16
BY_KEYS = 4
KEYS = 1_000
WORK_MS = 5.0
LIGHT_RATE = 200.0
HANDLERS = 4
SLOW_MS = 200.0
LOCK_MS = 15_000
FAILS_EVERY = 50

#: Broker settings of the share group: locks as short as they may be.
BROKER = {"group.share.record.lock.duration.ms": str(LOCK_MS)}

#: So that no batch of the topic is larger than a poll: a share group acquires whole ones.
SMALL_BATCHES = {"linger.ms": 5, "batch.num.messages": 50}


class BadError(Exception):
    """The handler fails, once."""


class Handler:
    """What a worker does with a message; it writes ``b OFFSET TIME`` and ``e OFFSET TIME`` (monotonic, s)."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self.lines: list[str] = []

    def __call__(self, message: Any, times: int = 0) -> None:
        """times: how often it was delivered; 0: ``run`` knows."""
        about, offset = self._about, message.offset()
        self.say("b", offset)
        if offset == about["stuck"]:
            while True:
                time.sleep(60)
        time.sleep(about["work_ms"] / 1000)
        if about["fails"] and offset % FAILS_EVERY == 0 and (times or Attempt.current().number) == 1:
            raise BadError
        self.say("e", offset)

    def say(self, what: str, offset: int) -> None:
        line = f"{what} {offset} {time.monotonic():.6f}\n"
        if self._about["at_once"]:
            os.write(1, line.encode())
        else:
            self.lines.append(line)

    def write(self) -> None:
        """Write down the rest (before the client's close, which may take long)."""
        sys.stdout.write("".join(self.lines))
        sys.stdout.flush()


def ours(about: dict[str, Any], handler: Handler) -> None:
    """One of our workers, until SIGTERM."""
    with Marshal(
        about["bootstrap"],
        group_id=about["group"],
        client_id=about["name"],
        topic=about["log"],
        watchdog=about["watchdog"],
    ) as marshal:
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        with marshal.consumer([about["topic"]], mode=Batches()) as consumer:
            os.write(1, b"ready\n")
            if about["fails"]:
                consumer.run(handler, concurrency=1, retry=Retry(attempts=3, backoff=(0.01, 0.1)))
            for batch in consumer.batches():
                for message in batch:
                    handler(message)
                batch.done()
            handler.write()


def in_run(about: dict[str, Any], handler: Handler) -> None:
    """A worker with several handlers, by batches or with whole partitions, until SIGTERM."""
    sharing: dict[str, Any] = {"mode": Batches()} if about["side"] == "run" else {"start": "earliest"}
    with (
        Marshal(about["bootstrap"], group_id=about["group"], client_id=about["name"], topic=about["log"]) as marshal,
        marshal.consumer([about["topic"]], **sharing) as consumer,
    ):
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        os.write(1, b"ready\n")
        consumer.run(handler, concurrency=HANDLERS, order="none")


def by_keys(about: dict[str, Any], handler: Handler) -> None:
    """One of our workers, with its ranges of keys, until SIGTERM."""
    ranges = about["ranges"][int(about["name"][1:])]
    with (
        Marshal(about["bootstrap"], group_id=about["group"], client_id=about["name"], topic=about["log"]) as marshal,
        marshal.consumer(mode=Keys({(about["topic"], 0): ranges})) as consumer,
    ):
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        os.write(1, b"ready\n")
        consumer.run(handler, concurrency=1, order="key")
        handler.write()


def share_group(about: dict[str, Any], handler: Handler) -> None:
    """A worker of a share group, until SIGTERM."""
    ending: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    settings = {"share.acknowledgement.mode": "explicit", "max.poll.records": 100, "socket.nagle.disable": True}
    consumer = ShareConsumer({"bootstrap.servers": about["bootstrap"], "group.id": about["group"], **settings})
    consumer.subscribe([about["topic"]])
    os.write(1, b"ready\n")
    while not ending:
        messages = [message for message in consumer.poll(0.05) if message.error() is None]
        for message in messages:
            try:
                handler(message, message.delivery_count() or 1)
            except BadError:
                consumer.acknowledge(message, AcknowledgeType.RELEASE)
            else:
                consumer.acknowledge(message)
        if messages:
            consumer.commit_async()
    handler.write()
    consumer.close()


SIDES: dict[str, Callable[[dict[str, Any], Handler], None]] = {
    "ours": ours,
    "by keys": by_keys,
    "run": in_run,
    "run, whole": in_run,
    "share group": share_group,
}


@dataclass
class Crew:
    """The processes of one side on a new topic, and what they have written down."""

    topic: str
    processes: list[subprocess.Popen[bytes]]
    #: Whether each line is written at once.
    at_once: bool
    #: Worker → its lines.
    lines: list[list[tuple[str, int, float]]] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)

    def read(self) -> None:
        """Read on in threads."""
        for process in self.processes:
            lines: list[tuple[str, int, float]] = []
            self.lines.append(lines)
            self._readers.append(threading.Thread(target=self._read, args=(process, lines), daemon=True))
            self._readers[-1].start()

    @staticmethod
    def _read(process: subprocess.Popen[bytes], lines: list[tuple[str, int, float]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            what, offset, at = line.split()
            lines.append((what.decode(), int(offset), float(at)))

    def end(self) -> None:
        """Have them write down the rest, and end."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL if self.at_once else signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:  # its handler has the message that is never done
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.join(10)
        for process in self.processes:
            if process.stdout is not None:
                process.stdout.close()

    def of(self, what: str) -> Iterator[tuple[int, float]]:
        """All lines of a kind: (offset, time)."""
        return ((offset, at) for lines in self.lines for kind, offset, at in list(lines) if kind == what)


class Ground:
    """A broker."""

    def __init__(self, bootstrap: str, seconds: float) -> None:
        self.bootstrap, self.seconds = bootstrap, seconds
        self.admin = AdminClient({"bootstrap.servers": bootstrap})
        self.log = new_log(bootstrap, 1)

    @contextmanager
    def crew(self, side: str, workers: int, partitions: int = 1, **about: object) -> Iterator[Crew]:
        """Workers on a new topic."""
        topic, group = f"t-{uuid.uuid4().hex[:8]}", f"g-{uuid.uuid4().hex[:8]}"
        self.admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(20)
        resource = ConfigResource(ConfigResource.Type.GROUP, group)
        resource.add_incremental_config(
            ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
        )
        self.admin.incremental_alter_configs([resource])[resource].result(20)
        order: dict[str, object] = {
            "bootstrap": self.bootstrap,
            "log": self.log,
            "topic": topic,
            "group": group,
            "side": side,
        }
        order |= {"work_ms": WORK_MS, "stuck": -1, "fails": False, "at_once": False, "watchdog": False, **about}
        command = [sys.executable, "-m", "benchmarks.share_race", "--worker"]
        processes = [
            subprocess.Popen([*command, json.dumps({**order, "name": f"w{number}"})], stdout=subprocess.PIPE)
            for number in range(workers)
        ]
        crew = Crew(topic, processes, bool(order["at_once"]))
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            crew.read()
            yield crew
        finally:
            crew.end()

    def fill(
        self, topic: str, messages: int, rate: float | None = None, keys: Sequence[bytes | None] = (None,)
    ) -> list[float]:
        """Produce them; returns when each was produced (monotonic, s). rate: messages a second; keys: in turns."""
        settings = SMALL_BATCHES if rate is None else {"linger.ms": 0}
        producer, times, began = Producer({"bootstrap.servers": self.bootstrap, **settings}), [], time.monotonic()
        for number in range(messages):
            while rate is not None and time.monotonic() < began + number / rate:
                producer.poll(max(0.0, began + number / rate - time.monotonic()))
            times.append(time.monotonic())
            producer.produce(topic, f"{number}f".encode(), keys[number % len(keys)], partition=0)
            producer.poll(0)
        producer.flush(60)
        return times

    def bytes_of(self, topic: str) -> float:
        """What the records of a topic took, each in its own batch (61 bytes, and some 10 for the record).

        The broker prunes what it keeps of a share group: what is gone counts as much as the mean of what is left.
        """
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "bytes", "enable.partition.eof": True})
        left = set(consumer.list_topics(topic, 20).topics[topic].partitions)
        marks = {number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=20) for number in left}
        consumer.assign([TopicPartition(topic, number, low) for number, (low, _) in marks.items()])
        sizes = []
        while left:
            for message in consumer.consume(1_000, 1.0):
                is_end = message.error() is not None  # never reported while a record comes with each fetch
                if not is_end:
                    sizes.append(71 + len(message.key() or b"") + len(message.value() or b""))
                if is_end or (message.offset() or 0) + 1 >= marks[message.partition()][1]:
                    left.discard(message.partition())
        consumer.close()
        return sum(end for _, end in marks.values()) * (sum(sizes) / max(1, len(sizes)))


def rate_of(crew: Crew, seconds: float) -> float:
    """Messages a second that all workers finished, from when each has begun one."""
    done = sorted(at for _, at in crew.of("e"))
    begun = max(min(at for _, _, at in lines) for lines in crew.lines if lines)
    return sum(begun < at <= begun + seconds for at in done) / seconds


def at_full(ground: Ground, side: str, **about: bool | int) -> float:
    """Messages a second from a backlog."""
    with ground.crew(side, WORKERS, **about) as crew:
        ground.fill(crew.topic, int(WORKERS * (ground.seconds + 6) * 1000 / WORK_MS))
        time.sleep(ground.seconds + 4)
    return rate_of(crew, ground.seconds)


def at_light_load(ground: Ground, workers: int, side: str) -> tuple[float, float]:
    """Time (ms) from produce to handler: median, and 99th percentile."""
    with ground.crew(side, workers, at_once=True) as crew:
        warm = 0
        while any(len(lines) < 2 for lines in list(crew.lines)):  # a member of a share group joins within seconds
            warm += len(ground.fill(crew.topic, 100, LIGHT_RATE))
        while sum(1 for _ in crew.of("e")) < warm:
            time.sleep(0.1)
        times = ground.fill(crew.topic, int(ground.seconds * LIGHT_RATE), LIGHT_RATE)
        while sum(1 for _ in crew.of("e")) < warm + len(times):
            time.sleep(0.1)
    waits = sorted((at - times[offset - warm]) * 1000 for offset, at in crew.of("b") if offset >= warm)
    return median(waits), waits[int(len(waits) * 0.99)]


def at_lone(ground: Ground, partitions: int, size: int, side: str) -> float:
    """Messages a second of one worker with slow handlers, from a backlog."""
    with ground.crew(side, 1, partitions, work_ms=SLOW_MS, at_once=True) as crew:
        producer = Producer({"bootstrap.servers": ground.bootstrap})
        for number in range(int(HANDLERS * (ground.seconds + 4) * 1000 / SLOW_MS)):
            producer.produce(crew.topic, b"x" * size, partition=number % partitions)
        producer.flush(60)
        time.sleep(ground.seconds + 1)
    begun, *done = sorted(at for _, at in crew.of("e"))
    return sum(at <= begun + ground.seconds for at in done) / ground.seconds


def after_a_kill(ground: Ground, side: str, watchdog: bool) -> float:
    """Time (s) from kill -9 of a worker whose handler has a message until another has it."""
    with ground.crew(side, 4, at_once=True, stuck=20, watchdog=watchdog) as crew:
        ground.fill(crew.topic, 400)
        found = first_of(crew, 20)
        struck = time.monotonic()
        crew.processes[found].kill()
        crew.lines[found] = []
        first_of(crew, 20, without=found)
        (at,) = [at for offset, at in crew.of("b") if offset == 20]
    return at - struck


def first_of(crew: Crew, offset: int, without: int = -1) -> int:
    """Wait until a worker has begun a message: its number."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for number, lines in enumerate(crew.lines):
            if number != without and any(each[1] == offset for each in list(lines)):
                return number
        time.sleep(0.002)
    raise TimeoutError(f"no worker has begun {offset}")


def log_bytes(ground: Ground, side: str) -> float:
    """Bytes that the log has got for 1,000 messages of a backlog."""
    topic, messages = {"ours": ground.log, "share group": "__share_group_state"}[side], 16_000
    with ground.crew(side, WORKERS) as crew:
        before = ground.bytes_of(topic)
        ground.fill(crew.topic, messages)
        time.sleep(messages * WORK_MS / 1000 / WORKERS + 3)
        found = ground.bytes_of(topic) - before
    done = sum(1 for _ in crew.of("e"))
    return found * 1000 / done


def keys_drawn(messages: int, top: float) -> list[bytes]:
    """The key of each message: equal parts, but for the key with the lowest hash, which has this part."""
    keys = sorted((b"k%d" % number for number in range(KEYS)), key=lambda key: key_hash(key, 0))
    often = round(messages * top)
    drawn = [keys[0]] * often + [keys[number % KEYS] for number in range(messages - often)]
    random.Random(1).shuffle(drawn)
    return drawn


def ranges_of(keys: Sequence[bytes]) -> list[list[tuple[int, int]]]:
    """Hashes cut for each worker, with messages as equal as keys allow."""
    counts, ranges = Counter(key_hash(key, 0) for key in keys), list[list[tuple[int, int]]]()
    low, here, left = 0, 0, len(keys)
    for found in sorted(counts):
        here += counts[found]
        if len(ranges) < BY_KEYS - 1 and here >= left / (BY_KEYS - len(ranges)):
            ranges.append([(low, found)])
            low, here, left = found + 1, 0, left - here
    return [*ranges, [(low, 2**63 - 1)]]


def at_keys(ground: Ground, top: float) -> float:
    """Messages a second from when all workers have begun until all messages are done."""
    keys = keys_drawn(int(ground.seconds * 1000 / WORK_MS * min(BY_KEYS, 1 / max(top, 1 / BY_KEYS))), top)
    with ground.crew("by keys", BY_KEYS, ranges=ranges_of(keys)) as crew:
        ground.fill(crew.topic, len(keys), keys=keys)
        time.sleep(ground.seconds * 1.2 + 3)
    assert sum(1 for _ in crew.of("e")) == len(keys), "not all are done"
    begun = max(lines[0][2] for lines in crew.lines)
    done = sorted(at for _, at in crew.of("e") if at > begun)
    return len(done) / (done[-1] - begun)


def serial() -> float:
    """Messages a second of one handler that no library calls."""
    began = time.monotonic()
    for _ in range(200):
        time.sleep(WORK_MS / 1000)
    return 200 / (time.monotonic() - began)


def race(ground: Ground, only: Sequence[str], rounds: int, workers: int) -> Iterator[Row]:
    """A row for each measurement."""

    def beside(measure: Callable[[Ground, str], float]) -> list[tuple[float, float]]:
        return in_turns(rounds, lambda: measure(ground, "ours"), lambda: measure(ground, "share group"))

    full: list[tuple[float, float]] = []
    if {"full", "disturbed"} & set(only):
        most = WORKERS * serial()
        full = beside(at_full)
        yield paired(f"full: {WORKERS} workers ÷ {WORKERS} × serial", [(each, most) for each, _ in full], 0.95, "/s")
        yield paired("full: a share group ÷ the same", [(each, most) for _, each in full], None, "/s")
    if "disturbed" in only:
        disturbed = beside(lambda ground, side: at_full(ground, side, stuck=2_000, fails=True))
        fair = (WORKERS - 1) / WORKERS
        for number, name, aim in ((0, "ours", 0.95), (1, "a share group", None)):
            pairs = [(each[number], all_of[number] * fair) for each, all_of in zip(disturbed, full, strict=True)]
            yield paired(f"disturbed: {name} ÷ undisturbed", pairs, aim, "/s")
    if "light" in only:
        waits = in_turns(rounds, *(partial(at_light_load, ground, workers, side) for side in ("ours", "share group")))
        for number, name in enumerate(("median", "99th percentile")):
            pairs = [(mine[number], theirs[number]) for mine, theirs in waits]
            yield paired(
                f"light: {LIGHT_RATE:.0f}/s, {workers} workers, {name} ÷ a share group's",
                pairs,
                None,
                "ms",
                at_most=True,
            )
    if "lone" in only:
        for name, partitions, size in (("1 partition", 1, 10), ("20 partitions", 20, 10), ("100 kB", 1, 100_000)):
            measure = partial(at_lone, ground, partitions, size)
            pairs = in_turns(rounds, partial(measure, "run"), partial(measure, "run, whole"))
            yield paired(f"lone: {name}, by batches ÷ whole", pairs, 0.95, "/s")
    if "kill" in only:
        lock = LOCK_MS / 1000
        for name, has in (("with a watchdog", True), ("without", False)):
            pairs = [(after_a_kill(ground, "ours", has), lock) for _ in range(rounds)]
            yield paired(f"kill: {name} ÷ the lock of a share group", pairs, None, "s", at_most=True)
        pairs = [(after_a_kill(ground, "share group", False), lock) for _ in range(rounds)]
        yield paired("kill: a share group ÷ its lock", pairs, None, "s", at_most=True)
    if "log" in only:
        yield paired("log: bytes for 1,000 messages ÷ a share group's", beside(log_bytes), None, "bytes", at_most=True)
    if "keys" in only:
        for name, top in ((f"{KEYS:,} equal keys", 0.0), ("a key of 40 %", 0.4)):
            pairs = in_turns(rounds, partial(at_keys, ground, top), serial)
            pairs = [(each, alone * min(BY_KEYS, 1 / max(top, 1 / BY_KEYS))) for each, alone in pairs]
            yield paired(f"keys: {BY_KEYS} processes, {name} ÷ possible", pairs, 0.95, "/s")


NAMES = ("full", "disturbed", "light", "lone", "kill", "log", "keys")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.share_race", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=WORKERS, help="of the row `light`")
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--json")
    parser.add_argument("--worker")
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        about = json.loads(chosen.worker)
        SIDES[about["side"]](about, Handler(about))
        return 0
    rows = []
    with bench_kafka(BROKER) as bootstrap:
        for row in race(Ground(bootstrap, chosen.seconds), chosen.only.split(","), chosen.rounds, chosen.workers):
            print(f"{row.name}: {row.ours:,.2f} {row.unit}", file=sys.stderr)
            rows.append(row)
    report("beside a share group", rows, chosen.json, workers=WORKERS, work_ms=WORK_MS, seconds=chosen.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
