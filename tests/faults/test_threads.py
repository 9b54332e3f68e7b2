"""Threads that share a consumer, and tasks that give up waiting: nothing lost or repeated, each partition in order."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from kafka_marshal import Consumer, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.testing.interrupts import run_within
from tests.client.conftest import Scene
from tests.faults.stories import AGAIN_S, PARTITIONS, TOPIC, Key, answer, member, memory_cluster, offsets

pytestmark = pytest.mark.flaky(reruns=1, only_rerun=["BrokerDiedError"])

#: The whole of a test, before it counts as stuck.
WITHIN_S = 60.0


class Crew:
    """Threads of a user's that get messages of one consumer."""

    def __init__(self, consumer: Consumer, expected: set[Key], quiet_s: float) -> None:
        self.consumer = consumer
        self.expected = expected
        self.quiet_s = quiet_s
        #: What each thread got, in order.
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
    def is_over(self) -> bool:
        return self._all >= self.expected or time.monotonic() - self._news_at > self.quiet_s

    def work(self, ways: list[str]) -> None:
        threads = []
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
        """Ends the consumer, and the marshal."""
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
        # A lease that was lost meanwhile (a machine that stood still) has another epoch, and begins again.
        for partition in [p for p, info in leases.items() if info is not None and info.epoch == 1]:
            for number, mine in enumerate(self.got):
                order = list(dict.fromkeys(offset for at, offset in mine if at == partition))
                wrong = [(partition, x) for before, x in pairwise(order) if x < before]
                assert not wrong, f"thread {number} got these after later ones: {offsets(wrong)}"


@pytest.fixture
def _restless() -> Iterator[None]:
    """Threads take turns after 10 µs, at every place sooner or later."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_restless")
@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize(
    "ways",
    [
        ["poll"],
        ["poll"] * 2,
        ["poll"] * 4,
        ["consume"] * 2,
        ["poll", "poll", "consume", "steer"],
    ],
    ids="+".join,
)
def test_threads_share_a_consumer(ways: list[str], delivery: str) -> None:
    messages = 2_000  # several reads
    cluster = memory_cluster(messages=messages)
    marshal = member(cluster)
    consumer = marshal.consumer([TOPIC], delivery=delivery, batch_size=50)
    expected = {(partition, offset) for partition in range(PARTITIONS) for offset in range(messages)}
    crew = Crew(consumer, expected, quiet_s=3.0)
    run_within(WITHIN_S, lambda: crew.work(ways), "the threads' work")
    crew.check(marshal, TOPIC, PARTITIONS, at_most_once=delivery == "at-most-once")


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_share_a_consumer_of_a_broker(scene: Scene, threads: int, delivery: str) -> None:
    messages = 3_000
    topic = scene.topic(2, messages)
    marshal = scene.member("a")
    consumer = marshal.consumer([topic], delivery=delivery, batch_size=200)
    expected = {(partition, offset) for partition in range(2) for offset in range(messages)}
    crew = Crew(consumer, expected, quiet_s=4.0)
    run_within(WITHIN_S, lambda: crew.work(["poll"] * threads), "the threads' work")
    crew.check(marshal, topic, 2, at_most_once=delivery == "at-most-once")


# asyncio: a task that is cancelled leaves its thread in poll(), and what that returns is dropped.


async def give_up_again_and_again(cluster: MemoryCluster, consumer: Consumer, messages: int) -> set[int]:
    seen: set[int] = set()
    until = time.monotonic() + 8 * AGAIN_S
    sent = cancelled = 0
    while len(seen) < messages and time.monotonic() < until:
        if sent < messages:
            cluster.broker.produce(TOPIC, 0, str(sent).encode())
            sent += 1
        # The last ones are got by somebody who waits, so that the test ends.
        patience_s = 0.05 if cancelled < messages else 6.0
        try:
            message = await asyncio.wait_for(asyncio.to_thread(consumer.poll, 5), patience_s)
        except TimeoutError:
            cancelled += 1
            continue
        if message is not None:
            seen.add(message.offset() or 0)
            consumer.done(message)
        if sent > 3:
            await asyncio.sleep(0.06)
    return seen


def test_q42_what_a_cancelled_task_dropped_comes_again() -> None:
    messages = 12
    cluster = memory_cluster(1, 0)
    marshal = member(cluster)
    consumer = marshal.consumer([TOPIC])

    def run() -> set[int]:
        async def main() -> set[int]:
            with ThreadPoolExecutor(4) as pool:
                asyncio.get_running_loop().set_default_executor(pool)
                # One thread polls already, and nobody will hear what it gets.
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.to_thread(consumer.poll, 5), 0.05)
                return await give_up_again_and_again(cluster, consumer, messages)

        return asyncio.run(main())

    seen = run_within(2 * WITHIN_S, run, "the tasks")
    answer("Consumer.close()", consumer.close)
    lease = marshal.world.lease(TOPIC, 0)
    answer("Marshal.close()", marshal.close)
    done = set(range(-1 if lease is None or lease.stable is None else lease.stable + 1))
    assert not done - seen, f"done in the log and never seen: {offsets((0, x) for x in done - seen)}"
    missing = set(range(messages)) - seen
    assert not missing, f"dropped, and not handed out again: {offsets((0, x) for x in missing)}"
