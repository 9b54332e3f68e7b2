"""Messages that are set aside, and tries that survive their owner, on a real broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Admin, Attempt
from tests.client.conftest import Worker, wait_until
from tests.client.running import HOW, KINDS, QUICK, Crew, Handlers, Running, done_of, places, publish


class Bad:
    """A handler's act: messages with the key "bad" fail until it is fixed; which tries it saw of them."""

    def __init__(self, error: type[Exception] = ValueError) -> None:
        self.is_fixed = False
        self.numbers: list[int] = []
        self._error = error

    def __call__(self, message: Any) -> None:
        if message.key() == b"bad" and message.offset() == 1:
            self.numbers.append(Attempt.current().number)
            if not self.is_fixed:
                raise self._error("it never works")


def parked(crew: Crew, topic: str) -> list[tuple[int, int, str | None]]:
    found = Admin(crew.bootstrap, topic=crew.coordination).open_messages(crew.group)
    return [(each.offset, each.delivery_count, each.reason) for each in found if each.topic == topic]


@pytest.mark.parametrize(("how", "kind"), [*zip(HOW, KINDS, strict=True)])
def test_a_message_that_always_fails_is_set_aside_and_redriven(crew: Crew, how: str, kind: str) -> None:
    """Its key continues, the next owner leaves it alone, and a redrive brings it back, to be done then."""
    crew.kind = kind
    topic, bad = crew.topic(1), Bad()
    publish(crew, topic, ["a", "bad", "bad", "a", "b"])
    handlers = Handlers(how, bad)
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers, retry=QUICK, park=True)
    handlers.await_ended(places(5) - {(0, 1)})
    wait_until(lambda: parked(crew, topic) == [(1, 5, "ValueError")])
    assert bad.numbers == [1, 2, 3, 4, 5]
    if kind == "claims":
        wait_until(lambda: done_of(a, topic)[0] == 4, what="progress passes it")
    running.stop(a)
    a.close()

    bad.is_fixed = True
    publish(crew, topic, ["c"])
    again = Handlers(how, bad)
    b, consumer = crew.consumer("b", topic)
    running = Running(consumer, again, retry=QUICK, park=True)
    again.await_ended({(0, 5)})
    assert set(again.ended) == {(0, 5)}
    redriven = Admin(crew.bootstrap, topic=crew.coordination).redrive(crew.group, [(topic, 0, 1)])
    assert redriven.messages == ((topic, 0, 1),)
    again.await_ended({(0, 1)})
    assert bad.numbers[5:] == [1]
    wait_until(lambda: parked(crew, topic) == [], what="it is done")
    running.stop(b)


@pytest.mark.parametrize("way", ["poll", "loop", "batches"])
def test_a_program_sets_a_message_aside_by_hand(crew: Crew, way: str) -> None:
    """The others are done without it; redriven, it comes back by itself."""
    topic = crew.topic(1)
    publish(crew, topic, ["a", "b", "c"])
    a, consumer = crew.consumer("a", topic)
    got: list[int] = []

    def handle(message: Any) -> None:
        if message.offset() == 1 and 1 not in got:
            consumer.park(message, "odd")
        got.append(message.offset())

    def take(count: int) -> None:
        if way == "poll":
            for _ in range(count):
                message = wait_until(lambda: consumer.poll(1.0))
                handle(message)
                if got.count(message.offset()) != 1 or message.offset() != 1:
                    consumer.done(message)
        elif way == "loop":
            for message in consumer:
                handle(message)
                count -= 1
                if not count:
                    consumer.stop()
        else:
            for batch in consumer.batches(max_messages=3, timeout=0.5):
                for message in batch:
                    handle(message)
                batch.done()
                if batch.open or len(got) >= count:
                    break

    take(3)
    wait_until(lambda: parked(crew, topic) == [(1, 1, "odd")])
    wait_until(lambda: done_of(a, topic)[0] == 2)
    if way == "loop":
        a.close()
        _, consumer = crew.consumer("b", topic)
        wait_until(consumer.assignment)
    Admin(crew.bootstrap, topic=crew.coordination).redrive(crew.group, "all")
    take(1)
    wait_until(lambda: parked(crew, topic) == [])
    assert got == [0, 1, 2, 1]


@pytest.mark.parametrize("deaths", [2, pytest.param(6, marks=pytest.mark.campaign)])
def test_a_message_that_kills_its_process_is_set_aside_and_no_neighbour_is(
    crew: Crew, tmp_path: Path, deaths: int
) -> None:
    """A restarted worker takes its leases over at once, so each death costs a start of a process."""
    topic = crew.topic(1)
    publish(crew, topic, ["a", "killer", "b", "c"])

    def start() -> Worker:
        return Worker(crew, "w", topic, tmp_path, "run_worker.py", longest_s=0.6)

    for _ in range(deaths):
        worker = start()
        assert worker.process.wait(20) < 0
    if deaths == 2:
        assert (1, 1, None) in parked(crew, topic)  # the second try was logged before it began
        return
    worker = start()
    try:
        wait_until(lambda: parked(crew, topic) == [(1, 5, "CRASHED")])
    finally:
        worker.terminate()
