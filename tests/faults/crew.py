"""Threads that share a consumer, and a record of each one's messages."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from kafka_marshal import Consumer, Delivery, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from tests.faults.stories import PARTITIONS, TOPIC, Key, answer, held_throughout, member, memory_cluster, offsets
from tests.interrupts import run_within

#: Long enough that no lease is in doubt even if the machine stops for a while: then no grant is lost, either.
PATIENT_HI = 5_000

#: Combinations of ways in which threads get messages.
WAYS: tuple[tuple[str, ...], ...] = (
    ("poll",),
    ("poll",) * 2,
    ("poll",) * 4,
    ("consume",) * 2,
    ("poll", "poll", "consume", "steer"),
    ("dip", "dip", "dip"),
)

#: Time-out of a whole test.
WITHIN_S = 180.0


class Crew:
    """A user's threads that get messages of one consumer."""

    def __init__(self, consumer: Consumer, expected: set[Key], quiet_s: float) -> None:
        self.consumer = consumer
        self.expected = expected
        self.quiet_s = quiet_s
        #: Each thread's messages, in order.
        self.got: list[list[Key]] = []
        self.errors: list[BaseException] = []
        self._all: set[Key] = set()
        self._lock = threading.Lock()
        self._news_at = time.monotonic()

    def note(self, mine: list[Key], message: Any) -> None:
        key = (message.partition(), message.offset())
        mine.append(key)
        with self._lock:
            self._all.add(key)
            self._news_at = time.monotonic()

    @property
    def missing(self) -> set[Key]:
        return self.expected - self._all

    @property
    def is_complete(self) -> bool:
        return self._all >= self.expected

    @property
    def is_over(self) -> bool:
        return self.is_complete or time.monotonic() - self._news_at > self.quiet_s

    def work(self, ways: Sequence[str]) -> None:
        threads = []
        self.ways = ways
        for number, way in enumerate(ways):
            mine: list[Key] = []
            self.got.append(mine)
            rng = random.Random(number)
            threads.append(
                threading.Thread(target=self._run, args=(way, mine, rng), name=f"user-{number}", daemon=True)
            )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, way: str, mine: list[Key], rng: random.Random) -> None:
        try:
            while not self.is_over:
                getattr(self, f"_{way}")(mine, rng)
        except BaseException as error:  # noqa: BLE001  check() reports it
            self.errors.append(error)

    def _poll(self, mine: list[Key], _rng: random.Random) -> None:
        message = self.consumer.poll(0.05)
        if message is not None:
            self.note(mine, message)
            self.consumer.done(message)

    def _dip(self, mine: list[Key], _rng: random.Random) -> None:
        """Polls without waiting: messages arrive in between, for this thread or another."""
        message = self.consumer.poll(0.0)
        if message is not None:
            self.note(mine, message)
            self.consumer.done(message)

    def _consume(self, mine: list[Key], rng: random.Random) -> None:
        messages = self.consumer.consume(rng.randint(1, 20), 0.02)
        for message in messages:
            self.note(mine, message)
        for message in rng.sample(messages, len(messages)):
            self.consumer.done(message)

    def _steer(self, _mine: list[Key], _rng: random.Random) -> None:
        self.consumer.pause()
        self.consumer.assignment()
        self.consumer.resume()
        threading.Event().wait(0.005)

    def check(self, marshal: Marshal, topic: str, partitions: int, *, at_most_once: bool) -> None:
        """End consumer and marshal, and check the messages."""
        answer("a call of another thread", self.consumer.assignment)
        answer("Consumer.close()", self.consumer.close)
        leases = {p: marshal.world.lease(topic, p) for p in range(partitions)}
        answer("Marshal.close()", marshal.close)
        assert not self.errors, f"a thread's call raised: {self.errors[0]!r}"
        seen = Counter(key for mine in self.got for key in mine)
        unprocessed = {(p, x) for _, p, first, last in self.consumer.unprocessed for x in range(first, last + 1)}
        below: set[Key] = set()
        for partition, info in leases.items():
            assert info is not None
            end = info.granted if at_most_once else info.stable
            below |= {(partition, x) for x in range(-1 if end is None else end + 1)}
        lost = below - seen.keys() - unprocessed
        assert not lost, f"done or granted in the log, and neither handed out nor reported: {offsets(lost)}"
        missing = self.expected - seen.keys() - unprocessed
        assert not missing, f"never handed out: {offsets(missing)}"
        if at_most_once:
            twice = [key for key, times in seen.items() if times > 1]
            assert not twice, f"handed out to two threads, or twice to one: {offsets(twice)}"
        # A partition lost meanwhile (the machine stopped) begins again; a message that a pause takes back from a thread
        # that had not got it yet comes later, maybe to one that has got what follows it.
        for partition in () if "steer" in self.ways else held_throughout(leases):
            for number, mine in enumerate(self.got):
                order = list(dict.fromkeys(offset for at, offset in mine if at == partition))
                wrong = [(partition, x) for before, x in pairwise(order) if x < before]
                assert not wrong, f"thread {number} got these after later ones: {offsets(wrong)}"


@contextmanager
def restless() -> Iterator[None]:
    """Switch threads every 10 µs, so that they interleave everywhere."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _feed(cluster: MemoryCluster, messages: int) -> None:
    """Publish a few at a time."""
    for first in range(0, messages, 5):
        for partition in range(PARTITIONS):
            for number in range(first, min(first + 5, messages)):
                cluster.broker.produce(TOPIC, partition, b"%d" % number)
            threading.Event().wait(0.001)


def share(ways: Sequence[str], delivery: Delivery) -> None:
    """Threads of one consumer on a cluster in memory; a partition's messages take several reads."""
    is_fed = "dip" in ways
    messages = 400 if is_fed else 2_000
    with restless():
        cluster = memory_cluster(messages=0 if is_fed else messages)
        marshal = member(cluster, hi=PATIENT_HI)
        consumer = marshal.consumer([TOPIC], delivery=delivery, batch_size=50)
        if is_fed:
            threading.Thread(target=_feed, args=(cluster, messages), name="feed", daemon=True).start()
        expected = {(partition, offset) for partition in range(PARTITIONS) for offset in range(messages)}
        crew = Crew(consumer, expected, quiet_s=15.0)
        run_within(WITHIN_S, lambda: crew.work(ways), "the threads' work")
        assert crew.is_complete, f"only in unprocessed, or nowhere: {offsets(crew.missing)}"
        crew.check(marshal, TOPIC, PARTITIONS, at_most_once=delivery == "at-most-once")
