"""``run(rate=…, priority=…)``: what begins, and when. On a Kafka in memory."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Batches, CheckpointPolicy, ConfigurationError, Group, Marshal, Rate, Retry, Transactions, aio
from kafka_marshal.client.handling import MOST_WAITING
from kafka_marshal.client.rates import TopicPriorities
from kafka_marshal.instance import release
from kafka_marshal.node.driver import RECORD
from kafka_marshal.testing import MemoryKafka
from tests.engine.replay import Replay, read_lines

HOW = ("threads", "coroutines")
GROUP = "billing"
CUTS = CheckpointPolicy(on_checkpoint=lambda _: b"", on_restore=lambda _: None)
MODES = {"claims": None, "group": Group(), "batches": Batches()}


class Program:
    """A worker of these topics, which notes what it handles."""

    def __init__(
        self,
        how: str,
        *topics: str,
        mode: Any = None,
        checkpoints: Any = None,
        exactly_once: Any = None,
        **options: Any,
    ) -> None:
        self.handled: list[tuple[str, str, bytes]] = []
        self.act: Callable[[Any], object] = lambda message: None
        self.marshals: dict[str, Marshal] = {}
        self._topics = topics or ("orders",)
        given = {"mode": mode, "checkpoints": checkpoints, "exactly_once": options.pop("exactly_once", None)}
        self._given: Any = {name: value for name, value in given.items() if value is not None}
        self._options = {"concurrency": 4, **options}
        self.work: Any = self._awaited if how == "coroutines" else self._called

    def _called(self, bootstrap_servers: str, client_id: str = "a") -> None:
        def handle(message: Any) -> None:
            self.act(message)
            self.handled.append((client_id, message.topic(), message.value()))

        with (
            Marshal(bootstrap_servers, group_id=GROUP, client_id=client_id, heartbeat_interval=1.0) as marshal,
            marshal.consumer(self._topics, **self._given) as consumer,
        ):
            self.marshals[client_id] = marshal
            consumer.run(handle, **self._options)

    async def _awaited(self, bootstrap_servers: str, client_id: str = "a") -> None:
        async def handle(message: Any) -> None:
            self.act(message)
            self.handled.append((client_id, message.topic(), message.value()))

        async with (
            aio.Marshal(bootstrap_servers, group_id=GROUP, client_id=client_id, heartbeat_interval=1.0) as marshal,
            marshal.consumer(self._topics, **self._given) as consumer,
        ):
            self.marshals[client_id] = marshal  # type: ignore[assignment]
            await consumer.run(handle, **self._options)

    def of(self, topic: str) -> int:
        return sum(each[1] == topic for each in self.handled)

    def limited(self, client_id: str = "a") -> tuple[Any, ...]:
        return self.marshals[client_id].health().rates if client_id in self.marshals else ()


def put(kafka: MemoryKafka, topic: str, count: int, keys: int = 20, partitions: int = 2) -> None:
    if topic not in kafka._broker.existing:
        kafka.create_topic(topic, partitions)
    for number in range(count):
        kafka.produce(topic, str(number), key=str(number % keys))


def listed(message: Any) -> Any:
    return [message.key()]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"priority": TopicPriorities({"order": 0})}, "priority= of run.* has the topic 'order', which"),
        ({"rate": {"order": 1}}, "has the topic 'order', which this consumer does not read; did you mean 'orders'"),
        ({"rate": "fast"}, "rate must be a number above 0"),
        ({"rate": {1: 1}}, "a topic of rate="),
        ({"priority": 5}, "priority must be a function"),
        ({"priority": lambda: 5}, "priority must be a function"),
        ({"rate": 5, "batch": 10}, "batch=…\\) and rate= exclude each other"),
        ({"priority": lambda message: 5, "batch": 10}, "batch=…\\) and priority= exclude each other"),
        ({"rate": 5, "not_before": lambda message: None}, "not_before=…\\) and rate= exclude each other"),
        ({"priority": lambda message: 10}, "must be at most 9, not 10"),
        ({"priority": lambda message: -1}, "must be at least 0, not -1"),
        ({"priority": lambda message: 1.0}, "what priority\\(…\\) of run\\(…\\) returns must be a whole number"),
        ({"priority": lambda message: None}, "must be a whole number"),
        ({"rate": Rate(1, key=listed)}, "unhashable"),
        ({"rate": 5, "mode": Group(), "checkpoints": CUTS}, "does not work in a group that takes"),
    ],
)
@pytest.mark.parametrize("how", HOW)
def test_what_can_not_work_ends_the_run_and_nothing_is_lost(
    memory_marshal: MemoryKafka, how: str, options: dict[str, Any], text: str
) -> None:
    put(memory_marshal, "orders", 5)
    program = Program(how, **options)
    worker = memory_marshal.start(program.work)
    error = memory_marshal.wait_until(lambda: worker.error)
    assert isinstance(error, ConfigurationError | TypeError)
    with pytest.raises(type(error), match=text):
        raise error
    memory_marshal.start(Program(how, mode=options.get("mode"), checkpoints=options.get("checkpoints")).work, "b")
    memory_marshal.wait_until_done("orders", GROUP)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["priority", "rate"])
def test_a_message_for_which_a_function_raises_fails_alone(memory_marshal: MemoryKafka, how: str, name: str) -> None:
    def number(message: Any) -> int:
        if message.value() == b"1":
            raise ValueError("no priority")
        return 5

    put(memory_marshal, "orders", 4)
    given = {"priority": number} if name == "priority" else {"rate": Rate(100, key=number)}
    program = Program(how, **given, park=True, retry=Retry(attempts=2, backoff=(0.0, 0.0)))
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until_done("orders", GROUP)
    assert [(x.state, x.delivery_count) for x in memory_marshal.admin.open_messages(GROUP)] == [("parked", 2)]
    assert worker.error is None


# Runs.


@pytest.mark.parametrize("order", ["key", "partition", "none"])
@pytest.mark.parametrize("how", HOW)
def test_a_rate_is_kept_while_time_passes_and_a_topic_without_one_is_not_held_up(
    memory_marshal: MemoryKafka, how: str, order: str
) -> None:
    put(memory_marshal, "orders", 400)
    put(memory_marshal, "live", 1)
    program = Program(how, "orders", "live", rate={"orders": Rate(10, burst=5)}, order=order)
    began = time.monotonic()
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: program.of("orders") >= 5)
    for second in range(1, 4):
        memory_marshal.advance(1.0)
        memory_marshal.wait_until(lambda second=second: program.of("orders") >= 10 * second)  # type: ignore[misc]
        put(memory_marshal, "live", 10)
        memory_marshal.wait_until(lambda second=second: program.of("live") == 1 + 10 * second)  # type: ignore[misc]
        assert program.of("orders") <= 5 + 10 * (second + time.monotonic() - began)
    memory_marshal.wait_until(program.limited)
    health = program.marshals["a"].health()
    assert health.ok
    assert "orders: limited by rate= of run(…), 10 a second" in str(health)
    assert health.held_back == ()
    assert health.handlers == health.handlers_wanted
    if how == "threads":
        metrics = program.marshals["a"].metrics()
        assert [each.topic for each in metrics.rate_limited] == ["orders"]
        assert metrics.handlers_running == 0
    until = time.monotonic() + 2
    worker.stop()
    assert time.monotonic() < until


@pytest.mark.parametrize("how", HOW)
def test_each_value_of_the_key_has_the_rate_for_itself(memory_marshal: MemoryKafka, how: str) -> None:
    for number in range(3_000):
        memory_marshal.produce("orders", str(number), key="flood") if number else put(memory_marshal, "orders", 1)
    for name in "abc":
        memory_marshal.produce("orders", name, key=name)
    program = Program(how, rate=Rate(0.01, burst=2, key=lambda message: message.key()), order="none")
    memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: {b"a", b"b", b"c"} <= {value for *_, value in program.handled})
    memory_marshal.wait_until(lambda: program.limited() and program.limited()[0].waiting == 2_997)
    memory_marshal.wait_until(lambda: len(program.handled) >= 6)
    assert len(program.handled) == 6
    [found] = program.limited()
    assert (found.values, found.value) == (1, repr(b"flood"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", HOW)
def test_members_share_a_rate_of_the_group_and_one_that_is_left_has_all(
    memory_marshal: MemoryKafka, how: str, mode: str
) -> None:
    put(memory_marshal, "orders", 2_000, keys=500, partitions=4)
    program = Program(how, mode=MODES[mode], rate=Rate(40, burst=4, of_group=True))

    def members(client_id: str) -> int:
        return max((each.members for each in program.limited(client_id)), default=0)

    memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: members("a") == 1)
    other = memory_marshal.start(program.work, "b")

    def are_two() -> bool:
        memory_marshal.advance(0.2)
        return members("a") == members("b") == 2

    memory_marshal.wait_until(are_two, 30)
    assert {each.per_second for name in "ab" for each in program.limited(name)} == {20.0}
    before, began = Counter(who for who, *_ in program.handled), time.monotonic()
    memory_marshal.advance(2.0)
    most = 4 + 20 * (2 + time.monotonic() - began)
    assert all(count - before[who] <= most for who, count in Counter(x for x, *_ in program.handled).items())
    other.kill()

    def is_one() -> bool:
        memory_marshal.advance(1.0)
        return members("a") == 1

    memory_marshal.wait_until(is_one, 30)


@pytest.mark.parametrize("how", HOW)
def test_the_highest_priority_begins_first(memory_marshal: MemoryKafka, how: str) -> None:
    gate, begun = threading.Event(), threading.Event()
    program = Program(how, concurrency=1, priority=lambda message: int(message.key()), order="none")

    def act(message: Any) -> None:
        if not begun.is_set():
            begun.set()
            gate.wait(20)

    program.act = act
    memory_marshal.create_topic("orders", 2)
    memory_marshal.produce("orders", "first", key="0")
    memory_marshal.start(program.work)
    assert begun.wait(20)
    for priority in (0, 5, 9, 3, 9, 0):
        memory_marshal.produce("orders", str(priority), key=str(priority))
    if how == "threads":  # otherwise the loop stands
        lanes = program.marshals["a"]._driver.engine.consumers
        ready = [each.delivery.in_lanes.lanes for each in lanes.values()]
        memory_marshal.wait_until(lambda: sum(each.ready for each in ready) == 6)
        gate.set()
        memory_marshal.wait_until_done("orders", GROUP)
        assert [int(value) for *_, value in program.handled[1:]] == [9, 9, 5, 3, 0, 0]
    else:
        gate.set()
        memory_marshal.wait_until_done("orders", GROUP)


@pytest.mark.parametrize("order", ["key", "partition", "none"])
def test_a_backfill_does_not_starve_live_messages_and_moves(memory_marshal: MemoryKafka, order: str) -> None:
    put(memory_marshal, "backfill", 6 * MOST_WAITING, keys=3 * MOST_WAITING, partitions=3)
    put(memory_marshal, "orders", 0)
    options: dict[str, Any] = {"concurrency": 2, "order": order, "priority": lambda x: 9 * (x.topic() == "orders")}
    program, gate = Program("threads", "orders", "backfill", **options), threading.Event()
    program.act = lambda message: gate.is_set() or (program.of("backfill") > 100 and gate.wait(20))
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: program.of("backfill") > 100)
    put(memory_marshal, "orders", 50)
    [engine] = program.marshals["a"]._driver.engine.consumers.values()

    def live() -> int:
        handlers: Any = engine.delivery.in_lanes.lanes.handlers
        lanes = {*handlers._ready._came.copy(), *handlers._ready._of.copy()}
        return sum(len(lane.line()) for lane in lanes if lane.assignment.key[0] == "orders")

    memory_marshal.wait_until(lambda: live() == 50, what="all that is live is ready, whatever else is")
    gate.set()
    memory_marshal.wait_until(lambda: program.of("orders") == 50)
    topics = [topic for _, topic, _ in program.handled]
    last = max(place for place, topic in enumerate(topics) if topic == "orders")
    assert last <= MOST_WAITING  # in turn, they would come after all that is ready: three times as much
    memory_marshal.wait_until(lambda: program.of("backfill") > 1_000)
    worker.stop()


@pytest.mark.parametrize("how", HOW)
def test_a_retry_takes_a_token_too_and_the_order_of_a_key_is_kept(memory_marshal: MemoryKafka, how: str) -> None:
    put(memory_marshal, "orders", 60, keys=3)
    tries = Counter[bytes]()
    program = Program(
        how,
        rate=Rate(200, burst=3),
        priority=lambda message: int(message.value()) % 10,
        retry=Retry(3, (0.0, 0.0)),
    )

    def act(message: Any) -> None:
        tries[message.value()] += 1
        if tries[message.value()] == 1 and int(message.value()) % 4 == 0:
            raise ValueError

    program.act = act
    began = time.monotonic()
    memory_marshal.start(program.work)
    memory_marshal.wait_until_done("orders", GROUP)
    assert tries.total() == 75
    assert time.monotonic() - began >= (75 - 3) / 200 - 0.01
    for key in range(3):
        mine = [int(value) for *_, value in program.handled if int(value) % 3 == key]
        assert mine == sorted(mine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", HOW)
def test_after_a_kill_nothing_that_waited_is_lost(memory_marshal: MemoryKafka, how: str, mode: str) -> None:
    put(memory_marshal, "orders", 300, keys=100)
    program = Program(how, mode=MODES[mode], rate=Rate(2_000, burst=5), priority=lambda x: int(x.value()) % 10)
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: len(program.handled) >= 20)
    worker.kill()
    memory_marshal.start(program.work, "b")
    memory_marshal.advance(10.0)
    memory_marshal.wait_until_done("orders", GROUP, 20.0)
    assert {int(value) for *_, value in program.handled} == set(range(300))


def test_partitions_move_while_their_messages_wait(memory_marshal: MemoryKafka) -> None:
    put(memory_marshal, "orders", 200, keys=100)
    program = Program("threads", mode=Group(), rate=Rate(0.001, burst=1))
    memory_marshal.start(program.work)
    memory_marshal.wait_until(program.limited)
    memory_marshal.start(program.work, "b")

    def have_both() -> bool:
        memory_marshal.advance(0.5)
        return bool(program.limited("a") and program.limited("b"))

    memory_marshal.wait_until(have_both)
    assert len(program.handled) == 2
    assert all(program.marshals[name].health().ok for name in "ab")


@pytest.mark.parametrize("how", HOW)
def test_rates_and_priorities_in_transactions(memory_marshal: MemoryKafka, how: str) -> None:
    put(memory_marshal, "orders", 200, keys=50)
    options = {"rate": Rate(2_000, burst=10), "priority": lambda message: int(message.value()) % 10}
    program = Program(how, exactly_once=Transactions(), **options)
    memory_marshal.start(program.work)
    memory_marshal.wait_until_done("orders", GROUP)
    assert {int(value) for *_, value in program.handled} == set(range(200))


def test_no_more_of_a_partition_is_delivered_or_fetched_than_a_rate_needs_for_a_while(
    memory_marshal: MemoryKafka,
) -> None:
    put(memory_marshal, "orders", 5 * MOST_WAITING, keys=5 * MOST_WAITING, partitions=1)
    program = Program("threads", rate=Rate(1_000, burst=100))
    memory_marshal.start(program.work)
    memory_marshal.wait_until(program.limited)
    driver = program.marshals["a"]._driver
    [consumer], [engine] = driver.lock.ports.values(), driver.engine.consumers.values()
    fetcher: Any = consumer._fetcher  # type: ignore[attr-defined]
    memory_marshal.wait_until(lambda: fetcher._held_up)
    assert sum(each.tracker.in_hand for each in engine.assignments.values()) <= 2 * MOST_WAITING + 100
    memory_marshal.advance(10.0)
    memory_marshal.wait_until_done("orders", GROUP, 30.0)
    assert len(program.handled) == 5 * MOST_WAITING


def test_a_recorded_run_is_replayed(
    memory_marshal: MemoryKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory_marshal, "orders", 2 * MOST_WAITING + 500, keys=2 * MOST_WAITING, partitions=1)
    monkeypatch.setenv(RECORD, str(tmp_path / "a"))
    program = Program("threads", rate=Rate(500, burst=50), priority=lambda message: int(message.value()) % 10)
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: len(program.handled) > 100)
    worker.stop()
    assert "are_enough" in (tmp_path / "a").read_text()
    replay = Replay(read_lines((tmp_path / "a").read_bytes(), release()))
    replay.run()
    assert replay.engine.consumers == {}


@pytest.fixture
def loaded() -> Iterator[None]:
    stop = threading.Event()

    def turn() -> None:
        while not stop.is_set():
            pass

    threads = [threading.Thread(target=turn, daemon=True) for _ in range(2)]
    for each in threads:
        each.start()
    yield
    stop.set()


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("how", HOW)
def test_no_worker_sleeps_while_there_are_tokens(memory_marshal: MemoryKafka, how: str) -> None:
    put(memory_marshal, "orders", 2_000, keys=400)
    program = Program(how, rate={"orders": Rate(100_000, burst=3, key=lambda message: int(message.value() or b"") % 7)})
    memory_marshal.start(program.work)
    memory_marshal.wait_until_done("orders", GROUP, 30.0)
