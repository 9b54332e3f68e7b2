"""kafka_marshal.aio: the same guarantees with tasks of an event loop. In memory, except the last tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal import (
    Attempt,
    ClosedError,
    ConfigurationError,
    Group,
    MemberPiece,
    Message,
    MessagesFailedError,
    Retry,
    TopicPartition,
)
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.aio import Consumer, Marshal
from kafka_marshal.node.coordination_topic import create_topic
from rationalizer import Upgrade, encode

TOPIC, MESSAGES = "t", 20


@pytest.fixture
def cluster() -> MemoryCluster:
    made = MemoryCluster()
    create_topic(made, "__marshal", 1, 10)
    made.broker.produce("__marshal", 0, encode(Upgrade("x", "admin", "any", 2)))
    made.broker.create_topic(TOPIC, 2)
    for number in range(MESSAGES):
        made.broker.produce(TOPIC, number % 2, str(number).encode(), key=f"k{number % 4}".encode())
    return made


def member(cluster: MemoryCluster, client: str = "w") -> Marshal:
    return Marshal.on_cluster(MemoryCluster(broker=cluster.broker, client=client), group_id="g", client_id=client)


def number_of(message: Message) -> int:
    return int(message.value() or b"")


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def left_for_the_next(cluster: MemoryCluster) -> list[int]:
    """Messages that another process of the group still gets."""
    async with member(cluster) as marshal, marshal.consumer([TOPIC], auto_done=False) as consumer:
        found = []
        while (message := await consumer.poll(0.3)) is not None:
            found.append(number_of(message))
        return sorted(found)


async def test_iterating_delivers_all_and_leaves_the_one_in_flight(cluster: MemoryCluster) -> None:
    seen = []
    async with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        async for message in consumer:
            seen.append(number_of(message))
            await asyncio.sleep(0)
            if len(seen) == MESSAGES:
                break
    assert sorted(seen) == list(range(MESSAGES))
    assert await left_for_the_next(cluster) == [seen[-1]]


async def test_stop_ends_the_loop_between_two_messages(cluster: MemoryCluster) -> None:
    seen = []
    async with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        async for message in consumer:
            seen.append(number_of(message))
            if len(seen) == 3:
                marshal.stop()
    assert len(seen) == 3
    assert len(await left_for_the_next(cluster)) == MESSAGES - 3


async def test_a_cancelled_loop_loses_nothing(cluster: MemoryCluster) -> None:
    seen: list[int] = []

    async def work(consumer: Consumer[Any]) -> None:
        async for message in consumer:
            seen.append(number_of(message))
            if len(seen) == 5:
                await asyncio.Event().wait()

    async with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        task = asyncio.create_task(work(consumer))
        await until(lambda: len(seen) == 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await left_for_the_next(cluster) == sorted(set(range(MESSAGES)) - set(seen[:4]))


async def test_poll_consume_and_batches(cluster: MemoryCluster) -> None:
    async with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        first = await consumer.poll(10)
        assert first is not None
        more = await consumer.consume(4, 10)
        for message in (first, *more):
            consumer.done(message)
        count = 5
        async for batch in consumer.batches(100, 0.2):
            count += len(batch)
            batch.done()
            if count == MESSAGES:
                break
        assert [(x.partition, x.offset) for x in await consumer.assignment()] == [(0, 10), (1, 10)]
    assert await left_for_the_next(cluster) == []


async def test_run_in_this_loop_with_order_and_retry(cluster: MemoryCluster) -> None:
    handled: list[int] = []
    at_work: set[bytes | None] = set()

    async def handle(message: Message) -> None:
        assert asyncio.get_running_loop() is loop
        assert message.key() not in at_work, "two of one key at a time"
        at_work.add(message.key())
        await asyncio.sleep(0.002)
        at_work.remove(message.key())
        if number_of(message) == 6 and Attempt.current().number == 1:
            raise ValueError
        handled.append(number_of(message))
        if len(handled) == MESSAGES:
            marshal.stop()

    loop = asyncio.get_running_loop()
    async with member(cluster) as marshal, marshal.consumer([TOPIC], mode=Group()) as consumer:
        await consumer.run(handle, concurrency=8, retry=Retry(2, (0.01, 0.01)))
        assert [x for x in handled if x % 4 == 2] == [2, 6, 10, 14, 18]
        assert await consumer.state() == "PART_OF_GROUP"
    assert sorted(handled) == list(range(MESSAGES))


async def test_run_with_lists_in_this_loop_keeps_order_and_tries_what_is_named_again(cluster: MemoryCluster) -> None:
    """What follows a failed message of its key in its list is named, too, and comes after it."""
    done: dict[bytes | str | None, list[int]] = {}
    busy: set[bytes | str | None] = set()
    sizes, bad, loop = list[int](), {2, 9}, asyncio.get_running_loop()

    async def handle(messages: list[Message]) -> None:
        assert asyncio.get_running_loop() is loop
        keys = {message.key() for message in messages}
        assert not busy & keys, "two lists at a time share a key"
        busy.update(keys)
        await asyncio.sleep(0.002)
        busy.difference_update(keys)
        failed: list[tuple[Message, Exception]] = []
        for message in messages:
            is_bad = number_of(message) in bad and Attempt.of(message).number == 1
            if is_bad or message.key() in {each.key() for each, _ in failed}:
                failed.append((message, ValueError("not now")))
            else:
                done.setdefault(message.key(), []).append(number_of(message))
        sizes.append(len(messages))
        if sum(map(len, done.values())) == MESSAGES:
            marshal.stop()
        if failed:
            raise MessagesFailedError(failed)

    async with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        await consumer.run(handle, batch=6, linger=0.2, concurrency=2, retry=Retry(3, (0.001, 0.002)))
    assert done == {f"k{key}".encode(): list(range(key, MESSAGES, 4)) for key in range(4)}
    assert max(sizes) == 6
    assert await left_for_the_next(cluster) == []


async def test_a_cancelled_run_lets_handlers_end_first(cluster: MemoryCluster) -> None:
    begun: list[int] = []
    ended: list[int] = []
    goes_on = asyncio.Event()

    async def handle(message: Message) -> None:
        begun.append(number_of(message))
        await goes_on.wait()
        ended.append(number_of(message))

    async with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        running = asyncio.create_task(consumer.run(handle, concurrency=3))
        await until(lambda: len(begun) == 3)
        running.cancel()
        await asyncio.sleep(0.05)
        assert not running.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len(begun) == 3
    assert begun == ended
    assert await left_for_the_next(cluster) == sorted(set(range(MESSAGES)) - set(ended))


async def test_what_ends_a_run_is_raised_from_it(cluster: MemoryCluster) -> None:
    async def handle(message: Message) -> None:
        raise ValueError(message.value())

    async with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        with pytest.raises(ValueError, match="'") as raised:
            await consumer.run(handle, retry=None)
        assert "not done" in raised.value.__notes__[0]
    assert await left_for_the_next(cluster) == list(range(MESSAGES))


async def test_functions_run_in_threads_and_the_loop_continues(cluster: MemoryCluster) -> None:
    handled: list[int] = []

    def handle(message: Message) -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)  # it is not blocked
        handled.append(number_of(message))
        if len(handled) == MESSAGES:
            marshal.stop()

    loop = asyncio.get_running_loop()
    async with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        await consumer.run(handle, concurrency=4)
    assert sorted(handled) == list(range(MESSAGES))


async def test_callbacks_may_be_coroutine_functions(cluster: MemoryCluster) -> None:
    told: list[tuple[str, object]] = []

    async def on_assign(consumer: object, pieces: list[MemberPiece]) -> None:
        await asyncio.sleep(0)
        told.extend(("assigned", (consumer, piece.partition)) for piece in pieces)

    def on_revoke(consumer: object, pieces: list[MemberPiece]) -> None:
        told.extend(("revoked", (consumer, piece.partition)) for piece in pieces)

    async with member(cluster) as marshal:
        async with marshal.consumer([TOPIC], mode=Group(), on_assign=on_assign, on_revoke=on_revoke) as consumer:
            await until(lambda: len(told) == 2)
        assert set(told) == {(kind, (consumer, x)) for kind in ("assigned", "revoked") for x in (0, 1)}


async def test_pause_seek_and_position(cluster: MemoryCluster) -> None:
    async with member(cluster) as marshal, marshal.consumer([TOPIC], auto_done=False) as consumer:
        while len(await consumer.assignment()) < 2:
            await asyncio.sleep(0.01)
        await consumer.pause([(TOPIC, 0)])
        await consumer.seek(TOPIC, 1, 7)
        got = await consumer.consume(3, 5)
        assert [(x.partition(), x.offset()) for x in got] == [(1, 7), (1, 8), (1, 9)]
        await consumer.resume()
        assert (await consumer.poll(5)) is not None
        assert [x[:3] for x in await consumer.assignment() if x.partition == 1] == [TopicPartition(TOPIC, 1, 10, 0)[:3]]


async def test_a_second_close_does_nothing_and_what_is_closed_says_so(cluster: MemoryCluster) -> None:
    async with member(cluster) as marshal, marshal.consumer([TOPIC]) as consumer:
        await marshal.close()
        await marshal.close()
        with pytest.raises(ClosedError):
            await consumer.poll(0.1)


async def test_what_is_not_open_says_so(cluster: MemoryCluster) -> None:
    marshal = member(cluster)
    with pytest.raises(ConfigurationError, match="async with"):
        marshal.consumer([TOPIC])
    async with marshal:
        consumer = marshal.consumer([TOPIC])
        with pytest.raises(ConfigurationError, match="async with"):
            await consumer.poll(0)
        with pytest.raises(ConfigurationError, match="at-least-once"):
            async with marshal.consumer([TOPIC], delivery="at-most-once") as once:
                await once.run(lambda _: None)
    with pytest.raises(ConfigurationError, match="entered before"):
        await marshal.__aenter__()


async def test_a_cancelled_entry_leaves_no_member_behind(cluster: MemoryCluster) -> None:
    entering = asyncio.ensure_future(member(cluster).__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    async with member(cluster) as marshal:  # the same client_id
        assert marshal.health().ok
