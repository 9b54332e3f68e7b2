"""``run(handle, batch=…)``: lists of messages, each settled by itself. On a cluster in memory."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import groupby
from random import Random
from typing import Any

import pytest

from kafka_marshal import (
    Attempt,
    Batches,
    CheckpointPolicy,
    ConfigurationError,
    Consumer,
    Group,
    Hooks,
    MessagesFailedError,
    Retry,
)
from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.client.dead_letters import DeadLetter
from kafka_marshal.client.in_batches import Gathered
from kafka_marshal.sinks import SqliteSink, fence, fence_tables
from kafka_marshal.types import BatchToken
from tests.client.conftest import wait_until
from tests.client.plant import DEAD, IN, OUT, Plant
from tests.client.running import HOW, LONG_S, QUICK, Running

Place = tuple[int, int]


def place(message: Any) -> Place:
    return message.partition(), message.offset()


class Lists:
    """A handler of lists that records them, and fails as wanted; ``handle`` is passed to ``run``."""

    def __init__(self, how: str = "threads", act: Callable[[Any], object] = lambda messages: None) -> None:
        """act: called with each list; it may raise."""
        self._act = act
        self._lock = threading.Lock()
        self._busy: Counter[Any] = Counter()
        #: Each list that was begun, and all messages of lists that are done, in order.
        self.lists: list[list[Place]] = []
        self.done: list[tuple[Any, Place]] = []
        self.overlaps: list[Any] = []
        self.handle: Any = self._awaited if how == "coroutines" else self._called

    def _begin(self, messages: list[Any]) -> set[Any]:
        keys = {(x.partition(), x.key()) for x in messages}
        with self._lock:
            self.overlaps += [key for key in keys if self._busy[key]]
            self._busy.update(keys)
            self.lists.append([place(x) for x in messages])
        return keys

    def _end(self, keys: set[Any], messages: list[Any], failed: Sequence[Any]) -> None:
        with self._lock:
            self._busy.subtract(keys)
            self.done += [((x.partition(), x.key()), place(x)) for x in messages if x not in failed]

    def _called(self, messages: list[Any]) -> None:
        keys = self._begin(messages)
        threading.Event().wait(0.001)
        self._finish(keys, messages)

    async def _awaited(self, messages: list[Any]) -> None:
        keys = self._begin(messages)
        await asyncio.sleep(0.001)
        self._finish(keys, messages)

    def _finish(self, keys: set[Any], messages: list[Any]) -> None:
        failed: list[Any] = messages
        try:
            self._act(messages)
            failed = []
        except MessagesFailedError as error:
            failed = [messages[x] for x in error.failed] if isinstance(error.failed, dict) else []
            raise
        finally:
            self._end(keys, messages, failed)

    def await_done(self, count: int) -> None:
        wait_until(lambda: len(self.done) >= count, 30, f"{count} messages")

    def check(self, places: set[Place], most: int, *, in_order: bool = True) -> None:
        """Each message is done once, no key was in two lists at a time, and each list and key is in order."""
        assert Counter(where for _, where in self.done) == Counter(places)
        assert all(1 <= len(each) <= most and each == sorted(each) for each in self.lists)
        if in_order:
            assert self.overlaps == []
            for key in {key for key, _ in self.done}:
                mine = [where for each, where in self.done if each == key]
                assert mine == sorted(mine), key


def of_keys(count: int, keys: int, first: int = 0) -> str:
    return "".join(chr(ord("a") + number % keys) for number in range(first, first + count))


def plain(plant: Plant, **options: Any) -> tuple[Any, Consumer]:
    return plant.consumer(transactions=False, **options)


def fail_once(*offsets: int) -> Callable[[Any], None]:
    """Names these messages of partition 0 the first time."""
    left = set(offsets)

    def act(messages: list[Any]) -> None:
        bad = [x for x, each in enumerate(messages) if each.partition() == 0 and each.offset() in left]
        left.difference_update(messages[x].offset() for x in bad)
        if bad:
            raise MessagesFailedError({x: ValueError("named") for x in bad})

    return act


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("order", ["key", "partition", "none"])
def test_each_message_is_in_one_list_and_each_key_in_order(plant: Plant, how: str, order: Any) -> None:
    plant.put(of_keys(400, 7))
    plant.put(of_keys(100, 3), 1)
    lists = Lists(how)
    member, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=20, concurrency=4, order=order)
    lists.await_done(500)
    running.stop(member)
    lists.check({(0, x) for x in range(400)} | {(1, x) for x in range(100)}, 20, in_order=order != "none")
    assert max(map(len, lists.lists)) == 20, "also with few keys: several messages of one"
    wait_until(lambda: stable(member) == 399)


def stable(member: Any, partition: int = 0) -> int | None:
    info = member.world.lease(IN, partition)
    return None if info is None else info.stable


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("order", ["key", "partition"])
def test_named_messages_are_tried_again_and_the_others_are_done(plant: Plant, how: str, order: Any) -> None:
    plant.put(of_keys(200, 5))
    failed = range(0, 200, 23)
    lists = Lists(how, fail_once(*failed))
    member, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=20, concurrency=4, order=order, retry=QUICK)
    lists.await_done(200)
    running.stop(member)
    assert Counter(x for _, x in lists.done) == Counter((0, x) for x in range(200))
    assert lists.overlaps == []
    begun = Counter(x for each in lists.lists for x in each)
    assert {x for (_, x), count in begun.items() if count == 2} == set(failed)
    assert set(begun.values()) == {1, 2}
    wait_until(lambda: stable(member) == 199)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("given", ["messages", "copies", "places of Kafka"])
def test_failed_messages_are_named_in_pairs_too(plant: Plant, how: str, given: str) -> None:
    plant.put(of_keys(12, 3))
    left, begun = {3, 8}, Counter[int]()

    def named(message: Any) -> Any:
        where = message.topic(), message.partition(), message.offset()
        copied = MemoryMessage(*where, None, b"", (1, 0))
        return {"messages": message, "copies": copied, "places of Kafka": where}[given]

    def act(messages: list[Any]) -> None:
        begun.update(each.offset() for each in messages)
        bad = [each for each in messages if each.offset() in left]
        left.difference_update(each.offset() for each in bad)
        if bad:
            raise MessagesFailedError((named(each), ValueError("named")) for each in bad)

    lists = Lists(how, act)
    member, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=12, linger=0.2, retry=QUICK)
    wait_until(lambda: stable(member) == 11)
    running.stop(member)
    assert begun == Counter({**dict.fromkeys(range(12), 1), 3: 2, 8: 2})


def test_later_messages_of_a_key_wait_for_one_that_was_named_before_them(plant: Plant) -> None:
    """Those of its list were done with it; all others wait for its next try."""
    plant.put("aaa")
    lists = Lists(act=fail_once(0))
    member, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=3, concurrency=4, linger=0.2, retry=Retry(5, (0.5, 0.5)))
    wait_until(lambda: len(lists.lists) == 1)
    plant.put("aabbb")
    lists.await_done(8)
    running.stop(member)
    mine = [x for (_, key), (_, x) in lists.done if key == b"a"]
    assert mine == [1, 2, 0, 3, 4]
    assert lists.overlaps == []


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("order", ["key", "partition", "none"])
def test_a_list_that_fails_as_a_whole_is_tried_again_message_by_message(plant: Plant, how: str, order: Any) -> None:
    plant.put(of_keys(20, 3))
    numbers: list[int] = []

    def act(messages: list[Any]) -> None:
        numbers.extend(Attempt.of(each).number for each in messages)
        if any(x.offset() == 7 for x in messages):
            raise ValueError("a row is bad")

    lists, failures = Lists(how, act), list[tuple[int, float]]()
    member, consumer = plain(plant)
    hooks = Hooks(failed=lambda attempt, seconds, error: failures.append((attempt.message.offset(), seconds)))
    options: dict[str, Any] = {"retry": Retry(attempts=1), "dead_letters": DEAD, "hooks": hooks}
    running = Running(consumer, lists.handle, batch=20, linger=0.5, concurrency=2, order=order, **options)
    lists.await_done(19)
    wait_until(lambda: stable(member) == 19)
    running.stop(member)
    lists.check({(0, x) for x in range(20)} - {(0, 7)}, 20, in_order=order != "none")
    assert [len(each) for each in lists.lists] == [20] + [1] * 20, "one call for all, then one for each"
    assert set(numbers) == {1}, "the try of the list does not count"
    (letter,) = plant.seen(DEAD)
    found = DeadLetter.of(letter)
    assert found is not None
    assert (found.offset, found.delivery_count, found.reason) == (7, 1, "a row is bad")
    assert Counter(x for x, _ in failures) == Counter({**dict.fromkeys(range(20), 1), 7: 2})
    assert consumer._handled.read()[2] == {IN: 1}


def test_the_messages_of_a_failed_list_are_tried_in_order_and_without_delay(plant: Plant) -> None:
    """Each waits for the one before it, not for the next check."""
    plant.put("a" * 100)

    def act(messages: list[Any]) -> None:
        if len(messages) > 1:
            raise ValueError("all of them")

    lists = Lists(act=act)
    member, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=100, linger=LONG_S, concurrency=4)
    began = time.monotonic()
    lists.await_done(100)
    assert time.monotonic() - began < LONG_S / 4, "a tenth of a second for each would be ten"
    running.stop(member)
    lists.check({(0, x) for x in range(100)}, 100)


@pytest.mark.parametrize("how", HOW)
def test_a_list_waits_for_more_until_it_is_full_or_linger_is_over(plant: Plant, how: str) -> None:
    lists = Lists(how)
    member, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=6, linger=LONG_S, concurrency=4)
    wait_until(lambda: len(consumer.assignment()) == 2)
    for _ in range(3):
        plant.put("ab")
    lists.await_done(6)
    assert [len(each) for each in lists.lists] == [6], "few messages are not spread over many lists"
    plant.put("abc")
    wait_until(lambda: consumer._delivery.in_lanes.lanes.running == 3)
    assert len(lists.lists) == 1
    running.stop(member)
    assert [len(each) for each in lists.lists] == [6, 3], "what has begun is handled at the end"
    wait_until(lambda: stable(member) == 8)


def test_without_linger_a_message_is_handled_at_once(plant: Plant) -> None:
    lists = Lists()
    member, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=100, linger=0, concurrency=4)
    for number in range(3):
        plant.put("a")
        lists.await_done(number + 1)
    running.stop(member)
    assert [len(each) for each in lists.lists] == [1, 1, 1]


@pytest.mark.parametrize("how", HOW)
def test_what_fails_for_the_last_time_is_set_aside_and_its_key_continues(plant: Plant, how: str) -> None:
    plant.put(of_keys(30, 3))
    numbers: list[int] = []

    def act(messages: list[Any]) -> None:
        if bad := {x: ValueError("no") for x, each in enumerate(messages) if each.offset() == 7}:
            numbers.extend(Attempt.of(messages[x]).number for x in bad)
            raise MessagesFailedError(bad)

    lists = Lists(how, act)
    member, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=5, concurrency=2, park=True, retry=Retry(3, (0.001, 0.002)))
    lists.await_done(29)
    with member._driver.condition:
        worlds = member._driver.replica.worlds

    def parked() -> list[tuple[int, str]]:
        with member._driver.condition:
            return [(x.first, x.reason) for lease in worlds[0].leases() for x in lease.progress.open if x.reason]

    wait_until(lambda: parked() == [(7, "ValueError")])
    running.stop(member)
    assert numbers == [1, 2, 3]
    assert {x for _, (_, x) in lists.done} == set(range(30)) - {7}


@pytest.mark.parametrize("how", HOW)
def test_a_message_that_cannot_be_deserialized_fails_alone(plant: Plant, how: str) -> None:
    """What follows it of its key comes after it."""
    plant.put("ababab")
    tries: Counter[int] = Counter()
    values: list[list[int]] = []

    def deserialize(message: Any) -> int:
        tries[message.offset()] += 1
        assert Attempt.current().message is message
        if message.offset() == 2 and tries[2] == 1:
            raise ValueError("not a number")
        return int(message.value() or b"")

    def handle(found: list[int]) -> None:
        values.append(found)

    async def handle_later(found: list[int]) -> None:
        values.append(found)

    member, consumer = plain(plant)
    handler = handle_later if how == "coroutines" else handle
    running = Running(consumer, handler, batch=6, linger=0.5, deserialize=deserialize, retry=QUICK)
    wait_until(lambda: sum(map(len, values)) == 6)
    wait_until(lambda: stable(member) == 5)
    running.stop(member)
    assert values[0] == [0, 1, 3, 5]
    assert [x for each in values[1:] for x in each] == [2, 4]
    assert tries == Counter({0: 1, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1})


@pytest.mark.parametrize(
    "named",
    [
        *({99: ValueError()}, {-1: ValueError()}, {"a": ValueError()}, {0: "no exception"}, {0: SystemExit()}),
        *([0], [(0, ValueError())], [(object(), ValueError())], [((IN, 0, 99), ValueError())], [([], ValueError())]),
        lambda messages: {messages[0]: ValueError()},  # Kafka's messages can't be keys, nor can those in memory
    ],
)
def test_a_handler_that_names_what_it_was_not_given_ends_the_run_and_nothing_is_done(plant: Plant, named: Any) -> None:
    plant.put("abab")
    lists = Lists(act=lambda messages: _raise(MessagesFailedError(named(messages) if callable(named) else named)))
    lists._finish = lambda keys, messages: lists._act(messages)  # type: ignore[method-assign,assignment]
    _, consumer = plain(plant)
    error = Running(consumer, lists.handle, batch=4, linger=0.2).ended()
    assert isinstance(error, ConfigurationError)
    assert "No message of this batch is done" in str(error)
    assert consumer._delivery.in_lanes.lanes.running == 0
    again = Lists()
    running = Running(consumer, again.handle, batch=4, linger=0.2)
    again.await_done(4)
    consumer.stop()
    assert running.ended() is None
    again.check({(0, x) for x in range(4)}, 4)


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [SystemExit(3), ConfigurationError("wrong program")])
@pytest.mark.parametrize("how", HOW)
def test_an_error_that_is_no_failure_ends_the_run_and_all_of_its_list_come_again(
    plant: Plant, how: str, error: BaseException
) -> None:
    plant.put("ababcd")
    lists = Lists(how, lambda messages: _raise(error))
    _, consumer = plain(plant)
    found = Running(consumer, lists.handle, batch=6, linger=0.2).ended()
    assert found is error
    assert any("offset 0, try 1 of 5: this ends run" in each for each in found.__notes__)
    assert (len(lists.lists), consumer._delivery.in_lanes.lanes.running) == (1, 0)
    again = Lists(how)
    running = Running(consumer, again.handle, batch=6, linger=0.2)
    again.await_done(6)
    consumer.stop()
    assert running.ended() is None
    again.check({(0, x) for x in range(6)}, 6)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("place", ["prepare", "end", "add"])
def test_an_exception_beside_the_handler_ends_the_run_and_leaves_nothing_with_a_handler(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, how: str, place: str
) -> None:
    plant.put("aabbcc")
    right = getattr(Gathered, place)

    def broken(self: Gathered, *args: Any) -> Any:
        if place == "add":
            right(self, *args)
        raise MemoryError(place)

    monkeypatch.setattr(Gathered, place, broken)
    lists = Lists(how)
    _, consumer = plain(plant)
    error = Running(consumer, lists.handle, batch=6, concurrency=2, linger=0.2).ended()
    assert isinstance(error, MemoryError)
    lanes = consumer._delivery.in_lanes.lanes
    assert lanes.running == sum(len(x.running) for x in lanes._partitions.values()) == 0
    monkeypatch.undo()
    again = Lists(how)
    running = Running(consumer, again.handle, batch=6, linger=0.2)
    again.await_done(6)
    consumer.stop()
    assert running.ended() is None
    again.check({(0, x) for x in range(6)}, 6)


def test_a_settlement_that_raises_ends_the_run_and_the_rest_of_its_list_is_settled(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant.put("abcd")
    lists = Lists()
    _, consumer = plain(plant)
    say = consumer._say

    def broken(what: Any) -> None:
        if getattr(what, "offset", int)() == 2:
            raise MemoryError
        say(what)

    monkeypatch.setattr(consumer, "_say", broken)
    assert isinstance(Running(consumer, lists.handle, batch=4, linger=0.5).ended(), MemoryError)
    assert consumer._delivery.in_lanes.lanes.running == 0
    monkeypatch.undo()
    again = Lists()
    running = Running(consumer, again.handle, batch=4, linger=0)
    again.await_done(1)
    consumer.stop()
    assert running.ended() is None
    assert [where for _, where in again.done] == [(0, 2)]


@pytest.mark.parametrize("how", HOW)
def test_attempts_are_those_of_messages(plant: Plant, how: str) -> None:
    plant.put("ab")
    found: list[tuple[int, int]] = []
    errors: list[str] = []

    def act(messages: list[Any]) -> None:
        for each in messages:
            attempt = Attempt.of(each)
            attempt.require()
            found.append((attempt.message.offset(), attempt.number))
        for wrong in (Attempt.current, lambda: Attempt.of(object())):  # type: ignore[arg-type]
            try:
                wrong()
            except ConfigurationError as error:
                errors.append(str(error))

    lists = Lists(how, act)
    member, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=2, linger=LONG_S)
    lists.await_done(2)
    running.stop(member)
    assert found == [(0, 1), (1, 1)]
    assert "Attempt.of(message)" in errors[0]
    assert "no attempt of this message here" in errors[1]


def test_a_failure_of_a_list_is_logged_once(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    plant.put("abcdef")

    def act(messages: list[Any]) -> None:
        if len(messages) > 1:
            raise ValueError("all of them")

    lists = Lists(act=act)
    member, consumer = plain(plant)
    with caplog.at_level(logging.INFO, "kafka_marshal"):
        running = Running(consumer, lists.handle, batch=6, linger=0.5)
        lists.await_done(6)
        running.stop(member)
    assert len([x for x in caplog.records if "ValueError" in x.getMessage() and "handler" in x.getMessage()]) == 1


def test_a_list_that_takes_too_long_is_cancelled_and_its_messages_are_tried_alone(plant: Plant) -> None:
    plant.put("abca")
    lists, errors = Lists("coroutines"), list[BaseException]()

    async def handle(messages: list[Any]) -> None:
        if len(messages) > 1:
            await asyncio.sleep(3_600)
        await lists.handle(messages)

    member, consumer = plain(plant, handler_timeout=3.0)
    hooks = Hooks(failed=lambda attempt, seconds, error: errors.append(error))
    running = Running(consumer, handle, batch=4, linger=0.9, concurrency=2, hooks=hooks)
    lists.await_done(4)
    running.stop(member)
    lists.check({(0, x) for x in range(4)}, 1)
    assert [type(each) for each in errors] == [TimeoutError] * 4


def test_a_thread_that_hangs_with_a_list_is_replaced_by_one(plant: Plant) -> None:
    plant.put("aabc")
    gate, handled = threading.Event(), set[tuple[int, int]]()

    def handle(messages: list[Any]) -> None:
        if messages[0].partition() == 0 and not gate.is_set():
            gate.wait(LONG_S)
        handled.update(place(each) for each in messages)

    member, consumer = plain(plant, handler_timeout=0.3)
    running = Running(consumer, handle, batch=4, concurrency=1, linger=0)
    wait_until(lambda: (lanes := consumer._delivery.in_lanes.lanes).running == 4 and lanes.handlers is not None)
    lanes = consumer._delivery.in_lanes.lanes
    assert lanes.handlers is not None
    handlers = lanes.handlers
    wait_until(lambda: handlers.count == (2, 2))
    plant.put("xy", 1)
    wait_until(lambda: {(1, 0), (1, 1)} <= handled)
    assert handlers.count == (2, 2), "one handler hangs, and not four"
    gate.set()
    wait_until(lambda: {(0, x) for x in range(4)} <= handled)
    running.stop(member)


@pytest.mark.parametrize("how", HOW)
def test_in_transactions_the_output_of_each_message_goes_with_it(plant: Plant, how: str) -> None:
    plant.put(of_keys(60, 4))
    failed, failed_lists = set[int](), list[list[Attempt]]()

    def act(messages: list[Any]) -> None:
        bad = {x for x, each in enumerate(messages) if each.offset() % 10 == 3 and each.offset() not in failed}
        for x, each in enumerate(messages):
            Attempt.of(each).produce(OUT, f"{each.offset()}{' of a failed try' * (x in bad)}")
        failed.update(messages[x].offset() for x in bad)
        if 40 in {x.offset() for x in messages} and len(messages) > 1:
            failed_lists.append([Attempt.of(each) for each in messages])
            raise ValueError("all of them")
        if bad:
            raise MessagesFailedError({x: ValueError("named") for x in bad})

    lists = Lists(how, act)
    member, consumer = plant.consumer()
    running = Running(consumer, lists.handle, batch=8, concurrency=3, retry=QUICK)
    plant.await_position(60)
    running.stop(member)
    assert plant.outputs() == [str(x) for x in range(60)]
    for attempt in failed_lists[0]:
        with pytest.raises(ConfigurationError, match="produce"):
            attempt.produce(OUT, b"by what a failed list has left behind")
    assert lists.overlaps == []
    assert max(map(len, lists.lists)) == 8


@pytest.mark.parametrize("how", HOW)
def test_members_that_share_a_partition_by_batches_get_lists(plant: Plant, how: str) -> None:
    plant.put(of_keys(200, 5))
    failed, tokens = set[int](), set[type]()

    def act(messages: list[Any]) -> None:
        tokens.update({type(Attempt.of(each).epoch) for each in messages})
        if any(x.offset() == 77 for x in messages):
            raise ValueError("a row is bad")
        bad = [x for x, each in enumerate(messages) if each.offset() % 20 == 3 and each.offset() not in failed]
        failed.update(messages[x].offset() for x in bad)
        if bad:
            raise MessagesFailedError({x: ValueError("named") for x in bad})

    lists = Lists(how, act)
    made = [plain(plant, client_id=name, mode=Batches()) for name in "ab"]
    options: dict[str, Any] = {"retry": Retry(2, (0.001, 0.002)), "park": True}
    running = [Running(consumer, lists.handle, batch=10, concurrency=2, **options) for _, consumer in made]
    lists.await_done(199)
    for each, (member, _) in zip(running, made, strict=True):
        each.stop(member)
    lists.check({(0, x) for x in range(200)} - {(0, 77)}, 10, in_order=False)
    assert max(map(len, lists.lists)) == 10
    assert tokens == {BatchToken}, "sinks store rows by it"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("order", ["key", "none"])
def test_rows_of_lists_are_in_a_sink_once_however_lists_fail(plant: Plant, tmp_path: Any, how: str, order: Any) -> None:
    plant.put(of_keys(120, 4))
    plant.put(of_keys(40, 4), 1)
    path, chance, failed = tmp_path / "rows.db", Random(7), set[Place]()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE rows (partition INTEGER, at INTEGER)")

    def act(messages: list[Any]) -> None:
        bad = {x for x, each in enumerate(messages) if each.offset() % 10 == 3 and place(each) not in failed}
        for _, some in groupby(enumerate(messages), lambda each: each[1].partition()):
            if good := [each for x, each in some if x not in bad]:
                with sink.records(good) as tx:
                    for each in tx.new:
                        tx.execute("INSERT INTO rows VALUES (?, ?)", place(each))
            if len(messages) > 1 and chance.random() < 0.1:
                raise ValueError("all of them")
        failed.update(place(messages[x]) for x in bad)
        if bad:
            raise MessagesFailedError({x: ValueError("named") for x in bad})

    with SqliteSink(path) as sink:
        lists = Lists(how, act)
        member, consumer = plain(plant)
        running = Running(consumer, lists.handle, batch=15, concurrency=3, order=order, retry=QUICK)
        wait_until(lambda: (stable(member), stable(member, 1)) == (119, 39))
        running.stop(member)
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT * FROM rows ORDER BY 1, 2").fetchall()
    assert rows == [*((0, x) for x in range(120)), *((1, x) for x in range(40))]
    assert any(len(each) > 1 for each in lists.lists)


@pytest.mark.parametrize("how", HOW)
def test_rows_in_the_programs_own_transaction_are_written_once(plant: Plant, tmp_path: Any, how: str) -> None:
    """A block for each message, so that one that fails takes back its own rows; or one for those of a partition."""
    plant.put("abcdefgh" * 15)
    plant.put("xy" * 20, partition=1)
    path, failed, chance = str(tmp_path / "rows.db"), set[Place](), Random(3)
    with closing(sqlite3.connect(path)) as connection:
        for statement in [*fence_tables("sqlite"), "CREATE TABLE rows (part INTEGER, at INTEGER)"]:
            connection.execute(statement)

    def write(connection: sqlite3.Connection, messages: list[Any]) -> list[tuple[Any, Exception]]:
        bad: list[tuple[Any, Exception]] = []
        if chance.random() < 0.3:
            for _, some in groupby(messages, lambda each: each.partition()):
                with fence(connection, list(some)) as tx:
                    connection.executemany("INSERT INTO rows VALUES (?, ?)", map(place, tx.new))
            return []
        for each in messages:
            try:
                with fence(connection, each) as tx:
                    if not tx.is_done:
                        connection.execute("INSERT INTO rows VALUES (?, ?)", place(each))
                        if each.offset() % 10 == 3 and place(each) not in failed:
                            failed.add(place(each))
                            raise ValueError("not today")
            except ValueError as error:
                bad.append((each, error))
        return bad

    def act(messages: list[Any]) -> None:
        with closing(sqlite3.connect(path, timeout=LONG_S)) as connection, connection:
            bad = write(connection, messages)
            if chance.random() < 0.1:
                raise ValueError("all of them")
        if bad:
            raise MessagesFailedError(bad)

    lists = Lists(how, act)
    member, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=15, concurrency=3, retry=QUICK)
    wait_until(lambda: (stable(member), stable(member, 1)) == (119, 39))
    running.stop(member)
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT * FROM rows ORDER BY 1, 2").fetchall()
    assert rows == [*((0, x) for x in range(120)), *((1, x) for x in range(40))]
    assert len(failed) > 3


def test_a_list_waits_for_no_more_once_its_partition_is_to_be_released(plant: Plant) -> None:
    plant.put("ab")
    plant.put("ab", 1)
    lists = Lists()
    _, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=100, linger=4 * LONG_S)
    wait_until(lambda: consumer._delivery.in_lanes.lanes.running == 4)
    _, other = plain(plant, client_id="b")
    lists.await_done(4)
    wait_until(lambda: len(other.assignment()) == 1)
    consumer.stop()
    assert running.ended(2 * LONG_S) is None


@pytest.mark.parametrize("how", HOW)
def test_a_list_waits_for_no_more_once_the_run_ends(plant: Plant, how: str) -> None:
    plant.put("ab")
    lists = Lists(how)
    _, consumer = plain(plant)
    running = Running(consumer, lists.handle, batch=100, linger=4 * LONG_S)
    wait_until(lambda: consumer._delivery.in_lanes.lanes.running == 2)
    consumer.stop()
    assert running.ended(2 * LONG_S) is None
    assert lists.lists == [[(0, 0), (0, 1)]]


@pytest.mark.parametrize("how", HOW)
def test_without_an_order_lists_of_one_key_are_handled_at_the_same_time(plant: Plant, how: str) -> None:
    plant.put("aaaa")
    begun: list[list[Place]] = []

    def both() -> bool:
        return len(begun) > 1

    def handle(messages: list[Any]) -> None:
        begun.append([place(each) for each in messages])
        wait_until(both, LONG_S)

    async def handle_later(messages: list[Any]) -> None:
        begun.append([place(each) for each in messages])
        async with asyncio.timeout(LONG_S):
            while not both():
                await asyncio.sleep(0.005)

    member, consumer = plain(plant)
    handler = handle_later if how == "coroutines" else handle
    running = Running(consumer, handler, batch=2, linger=0.2, concurrency=2, order="none", retry=Retry(attempts=1))
    wait_until(lambda: stable(member) == 3)
    running.stop(member)
    assert sorted(x for each in begun for x in each) == [(0, x) for x in range(4)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"linger": 1.0}, "there is no batch="),
        ({"batch": 0}, "batch"),
        ({"batch": True}, "batch"),
        ({"batch": 10, "linger": -1}, "linger"),
    ],
)
def test_refusals(plant: Plant, options: dict[str, Any], text: str) -> None:
    _, consumer = plain(plant)
    with pytest.raises(ConfigurationError, match=text):
        consumer.run(lambda messages: None, **options)


def test_a_linger_that_is_as_long_as_a_handler_may_take_is_refused(plant: Plant) -> None:
    _, consumer = plain(plant, handler_timeout=1.0)
    with pytest.raises(ConfigurationError, match="not shorter than handler_timeout"):
        consumer.run(lambda messages: None, batch=10, linger=1.0)


def test_a_group_that_takes_checkpoints_is_refused(plant: Plant) -> None:
    policy = CheckpointPolicy(on_checkpoint=lambda _: b"", on_restore=lambda _: None)
    _, consumer = plain(plant, mode=Group(), checkpoints=policy)
    with pytest.raises(ConfigurationError, match="a group that takes checkpoints"):
        consumer.run(lambda messages: None, batch=10)
