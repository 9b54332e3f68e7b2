"""``consumer.run`` in transactions: what read_committed readers see, and in which order.

Most of it on a cluster in memory, whose transactions have passed the contract.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as ConfluentConsumer
from confluent_kafka import TopicPartition

from kafka_marshal import Attempt, ConfigurationError, Hooks, ProduceError, Retry, Transactions
from kafka_marshal.adapters.memory import AppendFate
from kafka_marshal.aio import Marshal as AsyncMarshal
from kafka_marshal.client.dead_letters import DeadLetter
from kafka_marshal.instance import release
from kafka_marshal.node.driver import RECORD
from tests.client.conftest import wait_until
from tests.client.plant import DEAD, IN, OUT, Plant, copy
from tests.client.running import HOW, KINDS, LONG_S, QUICK, Crew, Handlers, Running, done_of, publish
from tests.engine.replay import Replay, read_lines
from tests.faults.stories import GROUP


@pytest.mark.parametrize("how", HOW)
def test_what_handlers_produce_and_progress_appear_together_and_in_order(plant: Plant, how: str) -> None:
    plant.put("abcab" * 40)
    plant.put("de" * 30, partition=1)
    at: list[tuple[int, int | None]] = []
    append = plant.broker.transactions.end

    def end(*args: Any, **more: Any) -> None:
        append(*args, **more)
        out = plant.broker.log(OUT, 0)
        if out is not None and not out.open:  # that of the other partition hides what was written after its begin
            at.append((sum(m.value().startswith(b"a-") for m in plant.seen()), plant.position()))

    plant.broker.transactions.end = end  # type: ignore[method-assign]

    def act(message: Any) -> None:
        Attempt.current().produce(OUT, f"{'ab'[message.partition()]}-{message.offset()}", headers={"from": "test"})

    handlers = Handlers(how, act)
    member, consumer = plant.consumer()
    running = Running(consumer, handlers)
    plant.await_position(200)
    plant.await_position(60, 1)
    running.stop(member)
    handlers.check_order()
    for name, count in (("a", 200), ("b", 60)):
        assert [x for x in plant.outputs() if x.startswith(name)] == [f"{name}-{offset}" for offset in range(count)]
    assert plant.seen()[0].headers() == [("from", b"test")]
    assert all(count == (position or 0) for count, position in at)  # neither is ever seen without the other
    info = member.world.lease(IN, 0)
    assert info is not None
    wait_until(lambda: (member.world.lease(IN, 0) or info).stable == 199)


def test_a_key_that_is_slow_delays_what_is_visible_and_no_other_handler(plant: Plant) -> None:
    plant.put("abbbbb")
    handlers = Handlers(act=copy)
    gate = handlers.gate("a")
    member, consumer = plant.consumer()
    Running(consumer, handlers)
    handlers.await_ended({(0, offset) for offset in range(1, 6)})
    wait_until(lambda: member.health().held_back)
    wait_until(lambda: member.health().held_back[0].finished == 5)
    (held,) = member.health().held_back
    assert "held back at offset 0" in str(held)
    assert "5 later message(s) are handled" in str(held)
    assert held.finished_bytes > 5 * 100
    assert (plant.outputs(), plant.position()) == ([], 0)
    gate.set()
    plant.await_position(6)
    assert plant.outputs() == [str(offset) for offset in range(6)]


@pytest.mark.parametrize("how", HOW)
def test_a_failed_try_leaves_nothing_and_its_dead_letter_is_in_the_transaction(plant: Plant, how: str) -> None:
    plant.put("abc")
    seen: list[tuple[int, int | None]] = []
    attempts: list[Attempt] = []
    append = plant.broker.transactions.end

    def end(*args: Any, **more: Any) -> None:
        append(*args, **more)
        seen.append((len(plant.seen(DEAD)), plant.position()))

    plant.broker.transactions.end = end  # type: ignore[method-assign]

    def act(message: Any) -> None:
        attempt = Attempt.current()
        attempts.append(attempt)
        attempt.produce(OUT, f"{message.offset()} at try {attempt.number}")
        if message.offset() == 1 or attempt.number == 1:
            raise ValueError("no")

    _, consumer = plant.consumer()
    options: dict[str, Any] = {"retry": Retry(2, (0.001, 0.002)), "dead_letters": DEAD}
    Running(consumer, Handlers(how, act), **options)
    plant.await_position(3)
    assert plant.outputs() == ["0 at try 2", "2 at try 2"]
    (letter,) = plant.seen(DEAD)
    found = DeadLetter.of(letter)
    assert found is not None
    assert (found.offset, found.delivery_count, found.reason) == (1, 2, "no")
    assert all(letters == (0 if (position or 0) < 2 else 1) for letters, position in seen)
    assert consumer._handled.read()[2] == {IN: 1}
    for attempt in attempts:
        with pytest.raises(ConfigurationError, match="this try is over"):
            attempt.produce(OUT, b"late")


def test_without_dead_letters_a_failure_ends_the_run_and_what_precedes_it_is_committed(plant: Plant) -> None:
    plant.put("abcd")
    begun = threading.Barrier(4)

    def handle(message: Any) -> None:
        begun.wait(LONG_S)
        copy(message)
        if message.offset() == 2:
            raise ValueError("no")

    _, consumer = plant.consumer()
    error = Running(consumer, handle, retry=None, concurrency=4).ended()
    assert isinstance(error, ValueError)
    assert (plant.outputs(), plant.position()) == (["0", "1"], 2)
    again: list[int] = []

    def repeat(message: Any) -> None:
        again.append(message.offset())
        copy(message)

    Running(consumer, repeat)
    plant.await_position(4)
    assert sorted(again) == [2, 3]  # 3 was handled, and waited for 2
    assert plant.outputs() == ["0", "1", "2", "3"]


def test_a_transaction_that_no_broker_answers_is_tried_again_without_its_handlers_and_health_says_why(
    plant: Plant,
) -> None:
    plant.put("abc")
    is_away = True

    def request(client: str, transactional_id: str, what: str) -> AppendFate:
        is_lost = is_away and what == "send_offsets" and plant.position() == 0
        return AppendFate.LOST if is_lost else AppendFate.WRITTEN

    plant.broker.faults.request = request
    handlers = Handlers(act=copy)
    member, consumer = plant.consumer()
    Running(consumer, handlers)
    wait_until(lambda: member.health().held_back)
    (held,) = member.health().held_back
    assert (held.offset, held.in_hand) == (0, 3)
    assert "by its transaction, which failed: A transaction of 'g/in/0' was not committed" in str(held)
    is_away = False
    plant.await_position(3)
    assert (plant.outputs(), set(handlers.ended.values())) == (["0", "1", "2"], {1})


def test_the_message_with_a_record_that_no_broker_takes_is_found_and_fails(plant: Plant) -> None:
    plant.broker.alter_topic(OUT, {"max.message.bytes": "1000"})
    plant.put("abcdefgh")
    began = threading.Barrier(8)

    def handle(message: Any) -> None:
        if message.offset() < 8:
            began.wait(LONG_S)
        Attempt.current().produce(OUT, b"x" * 2_000 if message.offset() == 5 else message.value())

    _, consumer = plant.consumer()
    Running(consumer, handle, dead_letters=DEAD, concurrency=8)
    plant.await_position(8)
    assert plant.outputs() == ["0", "1", "2", "3", "4", "6", "7"]
    (letter,) = (DeadLetter.of(each) for each in plant.seen(DEAD))
    assert letter is not None
    assert (letter.offset, letter.error) == (5, "kafka_marshal.errors.ProduceError")
    assert consumer._handled.read()[0] == {(IN, "kafka_marshal.errors.ProduceError"): 1}


def test_without_dead_letters_it_ends_the_run_and_those_before_it_are_committed(plant: Plant) -> None:
    plant.broker.alter_topic(OUT, {"max.message.bytes": "1000"})
    plant.put("abcd")

    def handle(message: Any) -> None:
        Attempt.current().produce(OUT, b"x" * 2_000 if message.offset() == 2 else message.value())

    _, consumer = plant.consumer()
    error = Running(consumer, handle).ended()
    assert isinstance(error, ProduceError)
    assert any("offset 2" in note for note in error.__notes__)
    assert (plant.outputs(), plant.position()) == (["0", "1"], 2)


def test_a_topic_that_is_missing_ends_the_run_after_some_tries(plant: Plant) -> None:
    plant.put("a")
    _, consumer = plant.consumer()

    def handle(_message: Any) -> None:
        Attempt.current().produce("nowhere", b"x")

    error = Running(consumer, handle, retry=Retry(2)).ended()
    assert isinstance(error, ProduceError)
    assert plant.position() == 0


def test_what_handlers_hold_back_counts_as_memory_and_one_partition_leaves_room_for_others(plant: Plant) -> None:
    """Each output takes 300 times as much as its message: few are handled while the first one is not."""
    plant.put("a" + "b" * 150)
    plant.put("c" * 10, partition=1)

    def act(_message: Any) -> None:
        threading.Event().wait(0.005)  # it works
        Attempt.current().produce(OUT, b"x" * 150_000)

    handlers = Handlers(act=act)
    gate = handlers.gate("a")
    _, consumer = plant.consumer(max_bytes_in_flight=4_000_000)
    Running(consumer, handlers)
    plant.await_position(10, 1)
    lanes = consumer._delivery.in_lanes
    wait_until(lambda: lanes.holds_up(consumer._engine.assignments[IN, 0]))  # for good: the first one has not ended
    wait_until(lambda: not lanes.lanes.ready and lanes.lanes.running == 1)
    assert lanes.purgatory.size < 75 * 150_000  # a quarter of the limit, and what ends until the engine hears of it
    gate.set()
    plant.await_position(151)
    assert len(plant.outputs()) == 161


def test_hooks_see_each_try_and_deserialize_works(plant: Plant) -> None:
    plant.put("ab")
    calls: list[str] = []
    hooks = Hooks(before=lambda _: calls.append("before"), after=lambda *_: calls.append("after"))
    _, consumer = plant.consumer()

    def handle(number: int) -> None:
        Attempt.current().produce(OUT, str(number * 2))

    Running(consumer, handle, hooks=[hooks], deserialize=lambda message: int(message.value()))
    plant.await_position(2)
    assert plant.outputs() == ["0", "2"]
    assert sorted(calls) == ["after", "after", "before", "before"]


def test_a_recorded_run_is_the_same_when_it_is_fed_in_again(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORD, str(tmp_path / "a"))
    plant.broker.alter_topic(OUT, {"max.message.bytes": "1000"})
    plant.put("abcab" * 40)
    fates = [AppendFate.WRITTEN, AppendFate.UNACKNOWLEDGED, AppendFate.LOST]

    def request(client: str, transactional_id: str, what: str) -> AppendFate:
        return fates.pop(0) if what == "commit" and plant.outputs() and fates else AppendFate.WRITTEN

    plant.broker.faults.request = request
    member, consumer = plant.consumer()

    def handle(message: Any) -> None:
        Attempt.current().produce(OUT, b"x" * (2_000 if message.offset() == 77 else 9))

    running = Running(consumer, handle, dead_letters=DEAD)
    count = 200
    plant.await_position(count)
    while fates:
        plant.put("abc")
        count += 3
        plant.await_position(count)
    running.stop(member)
    consumer.close()
    member.close()
    replay = Replay(read_lines((tmp_path / "a").read_bytes(), release()))
    replay.run()
    assert replay.engine.consumers == {}, "it was recorded to its end"
    assert len(plant.outputs()) == count - 1


def test_in_an_event_loop(plant: Plant) -> None:
    plant.put("abc")

    async def main() -> None:
        cluster = plant.cluster.connect("a")
        async with (
            AsyncMarshal.on_cluster(cluster, group_id=GROUP, client_id="a", heartbeat_interval=1.0) as marshal,
            marshal.consumer([IN], exactly_once=Transactions()) as consumer,
        ):

            async def handle(message: Any) -> None:
                copy(message)
                if message.offset() == 2:
                    consumer.stop()

            await consumer.run(handle)

    asyncio.run(main())
    assert (plant.outputs(), plant.position()) == (["0", "1", "2"], 3)


@pytest.mark.broker
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_broker(crew: Crew, kind: str) -> None:
    crew.kind = kind
    topic, out, dead = crew.topic(2), crew.topic(1), crew.topic(1)
    for partition in range(2):
        publish(crew, topic, [f"k{number % 7}" for number in range(300)], partition)

    def handle(message: Any) -> None:
        attempt = Attempt.current()
        attempt.produce(out, f"{message.partition()}-{message.offset()}", message.key(), {"try": str(attempt.number)})
        if message.offset() % 100 == 50 or (attempt.number == 1 and message.offset() % 10 == 0):
            raise ValueError("no")

    a, consumer = crew.consumer("a", topic, exactly_once=Transactions())
    running = Running(consumer, handle, retry=QUICK, dead_letters=dead)
    reader = ConfluentConsumer(
        {"bootstrap.servers": crew.bootstrap, "group.id": "reader", "isolation.level": "read_committed"}
    )
    reader.assign([TopicPartition(name, 0, 0) for name in (out, dead)])
    seen: dict[str, list[Any]] = {out: [], dead: []}
    until = time.monotonic() + LONG_S
    while sum(map(len, seen.values())) < 600 and time.monotonic() < until:
        if (message := reader.poll(0.2)) is not None and message.error() is None:
            seen[str(message.topic())].append(message)
    reader.close()
    running.stop(a)
    failed = {50, 150, 250}
    for partition in range(2):
        values = [message.value().decode() for message in seen[out]]
        wanted = [f"{partition}-{offset}" for offset in range(300) if offset not in failed]
        assert [value for value in values if value.startswith(f"{partition}-")] == wanted
    letters = [DeadLetter.of(message) for message in seen[dead]]
    assert {(x.partition, x.offset) for x in letters if x} == {(p, o) for p in range(2) for o in failed}
    assert {dict(message.headers())["try"] for message in seen[out]} == {b"1", b"2"}
    wait_until(lambda: done_of(a, topic)[0] == 299 if kind == "claims" else True)


# Refused.


def test_produce_is_refused_where_no_transaction_follows(plant: Plant) -> None:
    plant.put("a")
    found: list[Attempt] = []
    member, consumer = plant.consumer(transactions=False)

    def handle(_message: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"produce\(\) before the handler returns"):
            Attempt.current().produce(OUT, b"x")
        member.stop()

    assert Running(consumer, handle).ended() is None
    consumer.close()
    member, consumer = plant.consumer("b")
    plant.put("a")

    def keep(_message: Any) -> None:
        found.append(Attempt.current())

    Running(consumer, keep)
    plant.await_position(2)
    with pytest.raises(ConfigurationError, match="this try is over"):
        found[0].produce(OUT, b"x")


def test_an_output_is_checked_when_it_is_produced(plant: Plant) -> None:
    plant.put("a")
    _, consumer = plant.consumer()
    wrong: list[Callable[[Attempt], None]] = [
        lambda attempt: attempt.produce("no topic", b"x"),
        lambda attempt: attempt.produce(OUT, 5),  # type: ignore[arg-type]
        lambda attempt: attempt.produce(OUT, b"x", partition=-1),
    ]

    def handle(_message: Any) -> None:
        for call in wrong:
            with pytest.raises(ConfigurationError):
                call(Attempt.current())

    Running(consumer, handle)
    plant.await_position(1)
    assert plant.outputs() == []
