"""``run`` and asyncio with shared batches, on a cluster in memory."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from kafka_marshal import Attempt, Batches, Marshal, Retry, aio
from kafka_marshal.adapters.memory import MemoryCluster
from rationalizer.holes import Hole
from tests.client.conftest import wait_until
from tests.faults.stories import TOPIC, member, memory_cluster

MESSAGES = 200


class Team:
    """Members that run one handler."""

    def __init__(
        self,
        cluster: MemoryCluster,
        names: str,
        handle: Callable[[Any], object],
        handler_timeout: float | None = None,
        **options: Any,
    ) -> None:
        self.members = [member(cluster, name) for name in names]
        about: dict[str, Any] = {"mode": Batches(), "handler_timeout": handler_timeout}
        self.consumers = [each.consumer([TOPIC], **about) for each in self.members]
        self._threads = [
            threading.Thread(target=consumer.run, args=(handle,), kwargs=options) for consumer in self.consumers
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for each in self.members:
            each.stop()
        for thread in self._threads:
            thread.join(20)
        for each in self.members:
            each.close()


def open_in(marshal: Marshal) -> list[Hole]:
    with marshal._driver.condition:
        return [hole for lease in marshal._driver.replica.worlds[0].leases() for hole in lease.progress.open]


def test_several_members_run_each_message_once_with_many_handlers() -> None:
    cluster, handled = memory_cluster(1, MESSAGES), Counter[int]()
    team = Team(cluster, "ab", lambda message: handled.update([message.offset()]), concurrency=4, order="none")
    wait_until(lambda: len(handled) == MESSAGES)
    team.close()
    assert handled == Counter(range(MESSAGES))


def test_run_sets_aside_what_fails_and_the_rest_is_done() -> None:
    cluster, handled = memory_cluster(1, 40), set[int]()

    def handle(message: Any) -> None:
        if message.offset() == 7:
            raise ValueError("bad")
        handled.add(message.offset())

    team = Team(cluster, "a", handle, retry=Retry(attempts=2, backoff=(0.0, 0.0)), park=True)
    marshal = team.members[0]
    wait_until(lambda: [(hole.first, hole.reason) for hole in open_in(marshal)] == [(7, "ValueError")])
    team.close()
    assert handled == set(range(40)) - {7}


def test_a_message_that_hangs_is_given_to_others_and_all_else_continues() -> None:
    """U11: one message costs one handler, and what that reports later has no effect."""
    cluster, handled, gate = memory_cluster(1, 40), Counter[int](), threading.Event()
    attempts: list[Attempt] = []

    def begins(message: Any) -> bool:
        """Whether it hangs."""
        is_first = message.offset() == 7 and not attempts
        if is_first:
            attempts.append(Attempt.current())
        return is_first

    def handle(message: Any) -> None:
        if begins(message):
            gate.wait(30)
        handled[message.offset()] += 1

    team = Team(cluster, "a", handle, handler_timeout=0.3, concurrency=2)
    [marshal], [consumer] = team.members, team.consumers
    wait_until(lambda: set(handled) == set(range(40)))
    assert handled[7] == 1, "by another handler"
    assert not attempts[0].is_held
    assert "offset 7 (key" in str(marshal.health())
    assert len(consumer.assignment()) == 1, "the share stays"
    for _ in range(20):
        cluster.broker.produce(TOPIC, 0, b"x")
    wait_until(lambda: len(handled) == 60)
    gate.set()
    wait_until(lambda: handled[7] == 2)
    wait_until(lambda: marshal.health().ok)
    wait_until(lambda: open_in(marshal) == [])
    team.close()
    assert handled == Counter({**dict.fromkeys(range(60), 1), 7: 2})


def test_a_slow_message_keeps_one_handler_and_the_others_get_what_comes() -> None:
    """U8: also if the slow one is all that its batch has."""
    cluster, begun, gate = memory_cluster(1, 0), set[int](), threading.Event()

    def handle(message: Any) -> None:
        begun.add(message.offset())
        gate.wait(30)

    team = Team(cluster, "a", handle, concurrency=4)
    try:
        for number in range(4):
            cluster.broker.produce(TOPIC, 0, b"x")
            wait_until(lambda number=number: len(begun) > number, 15)  # type: ignore[misc]
    finally:
        gate.set()
        team.close()


def stable_of(marshal: Marshal) -> int:
    with marshal._driver.condition:
        return max(lease.progress.stable for lease in marshal._driver.replica.worlds[0].leases())


class Gate:
    """A handler that hangs with each message below ``opens_at``."""

    def __init__(self, opens_at: int) -> None:
        self.opens_at, self.begun, self.open = opens_at, list[int](), threading.Event()

    def __call__(self, message: Any) -> None:
        self.begun.append(message.offset())
        if message.offset() < self.opens_at:
            self.open.wait(30)


def test_a_lone_sharer_takes_the_next_batch_while_all_handlers_are_busy() -> None:
    """U8: no handler that is free waits for the log."""
    cluster, handle = memory_cluster(1, 4), Gate(100)
    team = Team(cluster, "a", handle, concurrency=4)
    try:
        wait_until(lambda: len(handle.begun) == 4)
        for _ in range(8):
            cluster.broker.produce(TOPIC, 0, b"x")
        wait_until(lambda: stable_of(team.members[0]) >= 7, 10)
        assert set(handle.begun) == set(range(4))
    finally:
        handle.open.set()
        team.close()


def test_what_was_taken_ahead_is_given_back_to_a_second_sharer_uncounted() -> None:
    """U11: it would wait for a handler that hangs."""
    cluster, handle = memory_cluster(1, 1), Gate(1)
    team = Team(cluster, "a", handle, concurrency=1)
    other = Team(cluster, "", handle)
    try:
        wait_until(lambda: handle.begun == [0])
        for _ in range(3):
            cluster.broker.produce(TOPIC, 0, b"x")
        wait_until(lambda: stable_of(team.members[0]) >= 1, 10)
        attempts: list[int] = []

        def counts(message: Any) -> None:
            attempts.append(Attempt.current().number)
            handle(message)

        other = Team(cluster, "b", counts, concurrency=1)
        wait_until(lambda: sorted(handle.begun) == [0, 1, 2, 3], 10)
        assert attempts == [1, 1, 1]
    finally:
        handle.open.set()
        other.close()
        team.close()


def test_a_busy_sharer_takes_nothing_ahead_that_an_idle_one_may_begin() -> None:
    cluster, handle = memory_cluster(1, 0), Gate(1)
    team = Team(cluster, "ab", handle, concurrency=1)
    try:
        wait_until(lambda: all(len(consumer.assignment()) == 1 for consumer in team.consumers))
        for number in range(12):
            cluster.broker.produce(TOPIC, 0, b"x")
            wait_until(lambda number=number: len(handle.begun) > number, 10)  # type: ignore[misc]
        assert handle.begun == list(range(12)), "the other one has them all, while the first is in a handler"
        taken = [consumer._engine.taking.given["new"] for consumer in team.consumers]
        assert min(taken) == 1, "the first took nothing but what it has in its handler"
    finally:
        handle.open.set()
        team.close()


def test_batches_in_asyncio() -> None:
    cluster = memory_cluster(1, 30)

    async def main() -> list[int]:
        found: list[int] = []
        marshal = aio.Marshal.on_cluster(cluster.connect("a"), group_id="g", client_id="a", heartbeat_interval=0.3)
        async with marshal, marshal.consumer([TOPIC], mode=Batches()) as consumer:
            async for batch in consumer.batches():
                found += [message.offset() for message in batch]
                batch.done()
                if len(found) >= 30:
                    break
        return found

    assert sorted(asyncio.run(main())) == list(range(30))
