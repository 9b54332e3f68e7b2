"""close() from anywhere: a callback, a loop, another thread, twice, at once. It ends, and so does everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kafka_marshal import Consumer, Marshal
from kafka_marshal.errors import ClosedError
from kafka_marshal.testing.interrupts import run_within
from tests.faults.endings import (
    CALLBACKS,
    DELIVERIES,
    LOOPS,
    WHAT,
    Background,
    a_callback_closes,
    closed_at_once,
    opened,
)
from tests.faults.stories import AGAIN_S, TOPIC, answer

pytestmark = pytest.mark.flaky(reruns=0)


@pytest.fixture
def marshal() -> Iterator[Marshal]:
    with opened() as made:
        yield made


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("loop", LOOPS)
def test_another_thread_closes(marshal: Marshal, loop: Callable[[Consumer], None], what: str, delivery: str) -> None:
    consumer = marshal.consumer([TOPIC], delivery=delivery, batch_size=4)
    user = Background(lambda: loop(consumer))
    assert marshal.world.wait_for(lambda world: len(world.leases()) == 2, AGAIN_S)
    answer(f"{what}.close()", consumer.close if what == "consumer" else marshal.close)
    user.end()


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("loop", LOOPS)
def test_many_threads_close_at_once(
    marshal: Marshal, loop: Callable[[Consumer], None], what: str, delivery: str
) -> None:
    closed_at_once(marshal, loop, what, delivery)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_callback_closes(marshal: Marshal, callback: str, what: str) -> None:
    a_callback_closes(marshal, callback, what)


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("what", WHAT)
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
