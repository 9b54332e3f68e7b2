"""Messages set aside where keys of a partition are split in a coordinated group, and in asyncio, on a real broker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal import Admin, Attempt, GroupConsumer, Retry, aio
from rationalizer import ConfigureGroup, Upgrade, key_hash
from rationalizer.levels import SHARING_LEVEL
from tests.client.conftest import HI, wait_until
from tests.client.running import Crew, Running, publish
from tests.client.test_group import CPS
from tests.client.test_parks import parked

MESSAGES = 40
KEYS = [f"k{number}" for number in range(MESSAGES)]
TRIES = Retry(2, (0.01, 0.01))


def shared(crew: Crew) -> tuple[str, list[GroupConsumer]]:
    """A topic of one partition, and two members that have half of its keys each."""
    topic = crew.topic(1)
    for cp in range(CPS):
        crew.write(Upgrade("x", "admin", "any", SHARING_LEVEL), cp)
    crew.write(ConfigureGroup("x", "admin", crew.group, (("accept_range_fetch", (topic,)),)))
    members = [crew.joined(name, topic, allow_key_share=True) for name in ("a", "b")]
    consumers = [member.consumer for member in members]
    wait_until(lambda: all(consumer.pieces() for consumer in consumers))
    publish(crew, topic, KEYS)
    return topic, consumers


def one_of(consumer: GroupConsumer) -> int:
    """An offset whose key this member has."""
    (piece,) = consumer.pieces()
    return next(at for at, key in enumerate(KEYS) if piece.lo <= key_hash(key.encode(), at) <= piece.hi)


def redrive(crew: Crew, topic: str, offsets: set[int]) -> None:
    admin = Admin(crew.bootstrap, topic=crew.coordination)
    assert len(admin.redrive(crew.group, [(topic, 0, offset) for offset in offsets]).messages) == len(offsets)


def test_run_of_members_with_different_keys_parks_and_the_same_member_gets_it_again(crew: Crew) -> None:
    topic, consumers = shared(crew)
    bad = {one_of(consumer) for consumer in consumers}
    assert len(bad) == 2
    handled: list[tuple[int, int, int]] = []
    is_mended = False

    def handle_of(number: int) -> Callable[[Any], None]:
        def handle(message: Any) -> None:
            if message.offset() in bad and not is_mended:
                raise ValueError("poison")
            handled.append((number, message.offset(), Attempt.current().number))

        return handle

    runs = [
        Running(consumer, handle_of(number), retry=TRIES, park=True, concurrency=4)
        for number, consumer in enumerate(consumers)
    ]
    wait_until(lambda: len(handled) == MESSAGES - 2)
    wait_until(lambda: parked(crew, topic) == [(offset, 2, "ValueError") for offset in sorted(bad)])
    is_mended = True
    redrive(crew, topic, bad)
    wait_until(lambda: len(handled) == MESSAGES)
    wait_until(lambda: not parked(crew, topic))
    assert {(number, offset, tries) for number, offset, tries in handled if offset in bad} == {
        (number, one_of(consumer), 1) for number, consumer in enumerate(consumers)
    }
    for consumer, run in zip(consumers, runs, strict=True):
        consumer.stop()
        assert run.ended() is None
    assert Counter(offset for _, offset, _ in handled) == Counter(range(MESSAGES))


def test_park_by_hand_of_members_with_different_keys(crew: Crew) -> None:
    topic, consumers = shared(crew)
    bad = {one_of(consumer) for consumer in consumers}
    got: list[tuple[int, int]] = []

    def poll(count: int) -> None:
        while len(got) < count:
            for number, consumer in enumerate(consumers):
                message: Any = consumer.poll(0.05)
                if message is None:
                    continue
                if message.offset() in bad and (number, message.offset()) not in got:
                    consumer.park(message, "odd")
                else:
                    consumer.done(message)
                got.append((number, message.offset()))

    poll(MESSAGES)
    wait_until(lambda: parked(crew, topic) == [(offset, 1, "odd") for offset in sorted(bad)])
    redrive(crew, topic, bad)
    poll(MESSAGES + 2)
    wait_until(lambda: not parked(crew, topic))
    again = [each for each, times in Counter(got).items() if times == 2]
    assert sorted(again) == [(number, one_of(consumer)) for number, consumer in enumerate(consumers)]
    assert {offset for _, offset in got} == set(range(MESSAGES))


@pytest.mark.parametrize("way", ["run", "poll"])
def test_in_asyncio_a_message_is_set_aside_redriven_and_handled_once_more(crew: Crew, way: str) -> None:
    topic, got, tries = crew.topic(1), Counter[int](), list[int]()
    publish(crew, topic, KEYS)
    made: dict[str, Any] = {"group_id": crew.group, "topic": crew.coordination, "heartbeat_interval": HI / 1000}

    async def until(condition: Callable[[], Any]) -> None:
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)

    async def handle(message: Any) -> None:
        got[message.offset()] += 1
        if message.offset() == 3:
            tries.append(Attempt.current().number)
            if got[3] <= 2:
                raise ValueError("poison")

    async def poll(consumer: aio.Consumer[Any], count: int) -> None:
        while got.total() < count:
            message = await consumer.poll(1.0)
            if message is None:
                continue
            got[message.offset() or 0] += 1
            if message.offset() == 3 and got[3] == 1:
                consumer.park(message, "odd")
            else:
                consumer.done(message)

    async def work() -> None:
        async with aio.Marshal(crew.bootstrap, client_id="a", **made) as marshal, marshal.consumer([topic]) as consumer:
            running = asyncio.ensure_future(consumer.run(handle, retry=TRIES, park=True)) if way == "run" else None
            if running is None:
                await poll(consumer, MESSAGES)
            await until(lambda: running is None or len(got) == MESSAGES)
            await until(lambda: parked(crew, topic) == [(3, 2, "ValueError") if running else (3, 1, "odd")])
            await asyncio.to_thread(redrive, crew, topic, {3})
            if running is None:
                await poll(consumer, MESSAGES + 1)
            await until(lambda: not parked(crew, topic))
            if running is not None:
                consumer.stop()
                await running

    asyncio.run(asyncio.wait_for(work(), 60))
    assert got == Counter({**dict.fromkeys(range(MESSAGES), 1), 3: 3 if way == "run" else 2})
    assert tries == ([1, 2, 1] if way == "run" else [])
