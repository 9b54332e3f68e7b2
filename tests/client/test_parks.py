"""Messages that are set aside, and tries that survive their owner, on a real broker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kafka_marshal import (
    Admin,
    Attempt,
    Batches,
    Consumer,
    Group,
    GroupConsumer,
    Keys,
    Marshal,
    Retry,
    ShareConsumer,
    aio,
)
from kafka_marshal.errors import AdminError
from kafka_marshal.testing import LocalBroker
from rationalizer import ConfigureGroup, Upgrade, key_hash
from rationalizer.levels import SHARING_LEVEL
from tests.cli.conftest import command, environment
from tests.cli.harness import Command
from tests.client.conftest import HI, Scene, Worker, wait_until
from tests.client.running import HOW, KINDS, QUICK, Crew, Handlers, Running, done_of, places, publish
from tests.client.test_group import CPS

__all__ = ["command", "environment"]


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


# Messages set aside where keys of a partition are split in a coordinated group, and in asyncio, on a real broker.


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


# Open messages of a topic that was recreated, or compacted: no message is taken for another one. On a real broker.


Made = Callable[[Marshal, str], Consumer]


def in_claims(marshal: Marshal, topic: str) -> Consumer:
    made: Consumer = marshal.consumer([topic])
    return made


def in_a_group(marshal: Marshal, topic: str) -> Consumer:
    made: Consumer = marshal.consumer([topic], mode=Group())
    return made


def by_batches(marshal: Marshal, topic: str) -> Consumer:
    made: Consumer = marshal.consumer([topic], mode=Batches())
    return made


def by_keys(marshal: Marshal, topic: str) -> Consumer:
    return marshal.consumer(mode=Keys({(topic, 0): [(0, 2**63 - 1)]}))


def admin_of(scene: Scene) -> Admin:
    return Admin(scene.bootstrap, topic=scene.coordination)


def work(consumer: Consumer, count: int, aside: int | None = None) -> list[int]:
    """Handle messages until there were this many; one of them is set aside."""
    found: list[int] = []
    while len(found) < count:
        if isinstance(consumer, ShareConsumer):
            batch: Any = next(consumer.batches())
            for message in batch:
                if message.offset() == aside:
                    batch.park(message, "bad")
            found += [message.offset() for message in batch]
            batch.done()
            continue
        polled: Any = consumer.poll(1.0)
        if polled is None:
            continue
        if polled.offset() == aside:
            consumer.park(polled, "bad")
        else:
            consumer.done(polled)
        found.append(polled.offset())
    return found


def recreate(scene: Scene, topic: str, messages: int) -> None:
    admin = AdminClient({"bootstrap.servers": scene.bootstrap})
    admin.delete_topics([topic])[topic].result(20)
    wait_until(lambda: topic not in scene.cluster.topic_info([topic], 10))
    wait_until(lambda: admin.create_topics([NewTopic(topic, 1)])[topic].exception(20) is None)
    publish(scene, topic, [f"new {number}" for number in range(messages)])


def states(scene: Scene) -> list[tuple[int, str]]:
    return [(each.offset, each.state) for each in admin_of(scene).open_messages(scene.group)]


@pytest.mark.parametrize("made", [in_claims, in_a_group, by_batches, by_keys])
@pytest.mark.parametrize("is_redriven", [False, True])
def test_what_a_recreated_topic_has_at_that_offset_is_not_given_in_its_place(
    crew: Crew, command: Command, made: Made, is_redriven: bool
) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a", "bad", "c"])
    with crew.member("w") as member, made(member, topic) as consumer:
        work(consumer, 3, aside=1)
        wait_until(lambda: states(crew) == [(1, "parked")])
    admin = admin_of(crew)
    if is_redriven:
        assert admin.redrive(crew.group, "all").messages == ((topic, 0, 1),)
    recreate(crew, topic, 10)

    (found,) = admin.open_messages(crew.group)
    assert found.key is None
    assert found.value is None
    assert found.unread == (
        "position lost: the topic was deleted and recreated, and other messages have these offsets now"
    )
    ran = command("--bootstrap", crew.bootstrap, "--topic", crew.coordination, "open-messages", crew.group)
    assert "new 1" not in ran.out
    assert f"{topic} [0]: position lost: the topic was deleted and recreated" in ran.err
    if not is_redriven:
        with pytest.raises(AdminError, match=r"recreated. Its open messages can't be delivered. Nothing was changed"):
            admin.redrive(crew.group, "all")

    with crew.member("w2") as member, made(member, topic) as consumer:
        wait_until(lambda: consumer.lost_positions or _gives_nothing(consumer))
    assert states(crew) == [(1, "waiting" if is_redriven else "parked")]
    assert admin.discard(crew.group, [(topic, 0, 1)]).messages == ((topic, 0, 1),)
    assert states(crew) == []


def _gives_nothing(consumer: Consumer) -> bool:
    assert isinstance(consumer, ShareConsumer) or consumer.poll(0.1) is None, "another message was delivered"
    return False


@pytest.fixture(scope="module")
def compacting() -> Iterator[str]:
    """A broker that compacts often."""
    often = {"log.cleaner.backoff.ms": "200", "log.segment.delete.delay.ms": "100"}
    with LocalBroker(properties=often) as broker:
        yield broker.bootstrap_servers


@pytest.mark.campaign
@pytest.mark.parametrize("made", [in_claims, in_a_group, by_batches, by_keys])
def test_what_compaction_took_counts_as_done_when_it_is_redriven(
    compacting: str, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    """Its successor under the same key is delivered as any message is; nothing comes in its place."""

    def new_topic(partitions: int, settings: dict[str, str] | None = None, **_: Any) -> str:
        name = f"compacted-{made.__name__}"
        admin = AdminClient({"bootstrap.servers": compacting})
        admin.create_topics([NewTopic(name, partitions, 1, config=settings or {})])[name].result(20)
        return name

    scene = Crew(compacting, new_topic)
    settings: dict[str, Any] = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.0", "segment.ms": "200"}
    topic = scene.topic(1, **settings)
    publish(scene, topic, ["a", "bad", "c"])
    member = scene.member("w")
    consumer = made(member, topic)
    work(consumer, 3, aside=1)
    wait_until(lambda: states(scene) == [(1, "parked")])
    publish(scene, topic, ["bad"])
    assert work(consumer, 1) == [3]
    producer = Producer({"bootstrap.servers": compacting})
    ended = 4

    def is_compacted() -> bool:
        """Segments roll when something is written."""
        nonlocal ended
        producer.produce(topic, b"x", f"filler {ended}")
        producer.flush(10)
        ended += 1
        work(consumer, 1)
        (found,) = admin_of(scene).open_messages(scene.group, parked=True)
        return found.gone

    wait_until(is_compacted, 180)
    done = admin_of(scene).redrive(scene.group, "all")
    assert (*done.messages, *done.gone) == ((topic, 0, 1),)
    publish(scene, topic, ["last"])
    assert work(consumer, 1) == [ended]
    wait_until(lambda: not _gives_nothing(consumer) and states(scene) == [])
    if made is not by_batches:  # there it is settled without a word, as all that was never delivered
        assert "offset 1, open until now, can't be fetched any more" in caplog.text
    scene.close()
