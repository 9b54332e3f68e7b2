"""close() from anywhere: a callback, a loop, another thread, twice, at once. It ends, and so does everything else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal import Consumer, Marshal
from kafka_marshal.errors import ClosedError
from kafka_marshal.testing.interrupts import run_within, stacks
from tests.faults.stories import AGAIN_S, ANSWER_S, TOPIC, answer, is_ours, member, memory_cluster

pytestmark = pytest.mark.flaky(reruns=0)


class Background:
    """A user's thread that gets messages until its loop ends."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="user", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001  end() reports it
            self.error = error

    def end(self) -> None:
        """It ends by itself, and raises nothing."""
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive(), f"the user's loop has not ended\n{stacks(first=self._thread)}"
        if self.error is not None:
            raise AssertionError(f"the user's loop raised {self.error!r}") from self.error


@pytest.fixture
def marshal() -> Iterator[Marshal]:
    before = set(threading.enumerate())
    made = member(memory_cluster())
    yield made
    answer("Marshal.close()", made.close)
    until = time.monotonic() + ANSWER_S
    while left := [each.name for each in set(threading.enumerate()) - before if is_ours(each)]:
        assert time.monotonic() < until, f"threads are left {ANSWER_S:g} s after close(): {left}"
        time.sleep(0.002)


def iterate(consumer: Consumer) -> None:
    for _ in consumer:
        pass


def poll(consumer: Consumer) -> None:
    while consumer.poll() is not None:
        pass


def consume(consumer: Consumer) -> None:
    while consumer.consume(100):
        pass


def batches(consumer: Consumer) -> None:
    for batch in consumer.batches(4, 0.01):
        batch.done()


LOOPS = [iterate, poll, consume, batches]
DELIVERIES = ["at-least-once", "at-most-once"]


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("what", ["consumer", "marshal"])
@pytest.mark.parametrize("loop", LOOPS)
def test_another_thread_closes(marshal: Marshal, loop: Callable[[Consumer], None], what: str, delivery: str) -> None:
    consumer = marshal.consumer([TOPIC], delivery=delivery, batch_size=4)
    user = Background(lambda: loop(consumer))
    assert marshal.world.wait_for(lambda world: len(world.leases()) == 2, AGAIN_S)
    answer(f"{what}.close()", consumer.close if what == "consumer" else marshal.close)
    user.end()


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("what", ["consumer", "marshal"])
@pytest.mark.parametrize("loop", LOOPS)
def test_many_threads_close_at_once(
    marshal: Marshal, loop: Callable[[Consumer], None], what: str, delivery: str
) -> None:
    consumer = marshal.consumer([TOPIC], delivery=delivery, batch_size=4)
    users = [Background(lambda: loop(consumer)) for _ in range(2)]
    closers = [Background(consumer.close if what == "consumer" else marshal.close) for _ in range(4)]
    for each in (*closers, *users):
        each.end()
    answer("a second Consumer.close()", consumer.close)
    answer("a second Marshal.close()", marshal.close)


@pytest.mark.parametrize("what", ["consumer", "marshal"])
@pytest.mark.parametrize("callback", ["on_assign", "on_revoke"])
def test_a_callback_closes(marshal: Marshal, callback: str, what: str) -> None:
    called: list[str] = []

    def close(consumer: Consumer, _partitions: Any) -> None:
        called.append("begun")
        (consumer if what == "consumer" else marshal).close()
        called.append("ended")

    options: dict[str, Any] = {callback: close}
    consumer = marshal.consumer([TOPIC], **options)
    user = Background(lambda: iterate(consumer))
    assert marshal.world.wait_for(lambda world: len(world.leases()) == 2, AGAIN_S)
    if callback == "on_revoke":
        answer("Consumer.close()", consumer.close)
    user.end()
    answer("another Consumer.close()", consumer.close)
    answer("Marshal.close()", marshal.close)
    until = time.monotonic() + ANSWER_S
    while called[-1:] != ["ended"]:
        assert time.monotonic() < until, f"the callback has not ended: {called}\n{stacks()}"
        time.sleep(0.002)


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("what", ["consumer", "marshal"])
def test_a_loop_closes_what_it_reads(marshal: Marshal, what: str, delivery: str) -> None:
    consumer = marshal.consumer([TOPIC], delivery=delivery, batch_size=4)

    def loop() -> None:
        for _ in consumer:
            (consumer if what == "consumer" else marshal).close()

    run_within(AGAIN_S, loop, "the loop")
    assert consumer.poll(0.1) is None if what == "consumer" else True


def test_a_lease_and_ranges_are_closed_beside_each_other(marshal: Marshal) -> None:
    ranges = marshal.ranges([TOPIC])
    user = Background(lambda: [ranges.done(ranges.take(3)) for _ in range(10_000) if not marshal.stopping])
    closers = [Background(marshal.close) for _ in range(2)]
    for each in (*closers, user):
        each.end()
    answer("RangeConsumer.close()", ranges.close)


@pytest.mark.parametrize("call", ["poll", "world", "claim", "consumer"])
def test_calls_after_close_answer(marshal: Marshal, call: str) -> None:
    """With a result or with an error of ours, at once."""
    consumer = marshal.consumer([TOPIC])
    answer("Marshal.close()", marshal.close)
    calls: dict[str, Callable[[], object]] = {
        "poll": lambda: consumer.poll(1.0),
        "world": lambda: marshal.world.leases(),
        "claim": lambda: _refused(lambda: marshal.claim(TOPIC, 0)),
        "consumer": lambda: _refused(lambda: marshal.consumer([TOPIC])),
    }
    answer(call, calls[call])


def _refused(call: Callable[[], object]) -> None:

    with pytest.raises(ClosedError):
        call()
