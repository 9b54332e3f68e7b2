"""The fixture ``memory_marshal``: workers on a Kafka in memory, which are killed and paused at will."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal import Attempt, Batches, ConfigurationError, Group, Marshal, Retry, Transactions, aio
from kafka_marshal.errors import ProduceError
from kafka_marshal.testing import MemoryKafka

HOW = ("threads", "coroutines")
GROUP = "billing"


class Program:
    """A worker's program, once with functions and once with coroutines."""

    def __init__(self, how: str, act: Callable[[Any], object] = lambda message: None, **options: Any) -> None:
        self.handled: list[tuple[str, bytes]] = []
        self.act = act
        self.consumer_options = {
            name: options.pop(name) for name in ("mode", "delivery", "exactly_once") if name in options
        }
        self.options = {"concurrency": 2, **options}
        self.work: Any = self._awaited if how == "coroutines" else self._called

    def _called(self, bootstrap_servers: str, client_id: str = "a") -> None:
        def handle(message: Any) -> None:
            self.act(message)
            self.handled.append((client_id, message.value()))

        with (
            Marshal(bootstrap_servers, group_id=GROUP, client_id=client_id) as marshal,
            marshal.consumer(["orders"], **self.consumer_options) as consumer,
        ):
            if "delivery" in self.consumer_options:  # ``run`` is at least once
                for message in consumer:
                    handle(message)
            else:
                consumer.run(handle, **self.options)

    async def _awaited(self, bootstrap_servers: str, client_id: str = "a") -> None:
        async def handle(message: Any) -> None:
            self.act(message)
            self.handled.append((client_id, message.value()))

        async with (
            aio.Marshal(bootstrap_servers, group_id=GROUP, client_id=client_id) as marshal,
            marshal.consumer(["orders"], **self.consumer_options) as consumer,
        ):
            await consumer.run(handle, **self.options)

    @property
    def values(self) -> list[bytes]:
        return [value for _, value in self.handled]


@pytest.mark.parametrize("how", HOW)
def test_all_is_handled_and_reported_and_a_stop_ends_the_worker(memory_marshal: MemoryKafka, how: str) -> None:
    program = Program(how)
    memory_marshal.create_topic("orders", 2)
    memory_marshal.produce("orders", "1", b"2", "3", key="ann")
    memory_marshal.produce("orders", "4", None, "5")
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until_done("orders", GROUP)
    assert [value for value in program.values if value in (b"1", b"2", b"3")] == [b"1", b"2", b"3"]
    assert len(program.values) == 6
    assert sum(memory_marshal.committed(GROUP, "orders").values()) == 6
    assert len(memory_marshal.messages("orders")) == 6
    worker.stop()
    assert not worker.is_alive
    assert worker.error is None


MODES: dict[str, dict[str, Any]] = {
    "claims": {},
    "group": {"mode": Group()},
    "batches": {"mode": Batches()},
    "at most once": {"delivery": "at-most-once"},
    "transactions": {"exactly_once": Transactions()},
}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_works_and_is_taken_over_after_a_kill(memory_marshal: MemoryKafka, mode: str) -> None:
    program = Program("threads", **MODES[mode])
    memory_marshal.create_topic("orders", 2)
    memory_marshal.produce("orders", *"abcdefgh")
    first = memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: len(program.values) == 8)  # at most once they are done before that
    memory_marshal.wait_until_done("orders", GROUP)
    first.kill()
    memory_marshal.produce("orders", *"ij")
    memory_marshal.start(program.work, "b")
    memory_marshal.advance(30)
    memory_marshal.wait_until(lambda: len(program.values) >= 10)
    memory_marshal.wait_until_done("orders", GROUP)
    assert sorted(program.values) == [value.encode() for value in "abcdefghij"]
    assert {client for client, value in program.handled if value in (b"i", b"j")} == {"b"}


@pytest.mark.parametrize("how", HOW)
def test_a_killed_worker_reports_nothing_begins_nothing_and_releases_nothing(
    memory_marshal: MemoryKafka, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun, gate = threading.Event(), threading.Event()

    def hold(_message: Any) -> None:
        begun.set()
        assert gate.wait(20)

    program, other = Program(how, hold), Program(how)
    memory_marshal.create_topic("orders")
    memory_marshal.produce("orders", *"abc", key="k")
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until(begun.is_set)
    caplog.clear()
    worker.kill()
    gate.set()
    worker._thread.join(20)
    assert not worker._thread.is_alive()
    assert [line for line in caplog.messages if "Killed" in line or "run() ends" in line] == []
    assert program.values in ([], [b"a"]), "the handler that ran may return"
    assert memory_marshal.committed(GROUP, "orders") == {0: 0}
    [held] = memory_marshal.admin.progress(GROUP)
    assert held.client_id == "a", "nothing was released"
    memory_marshal.start(other.work, "b")
    memory_marshal.advance(6.5)
    memory_marshal.wait_until_done("orders", GROUP)
    assert other.values == [b"a", b"b", b"c"]


@pytest.mark.parametrize("how", HOW)
def test_a_paused_worker_loses_its_lease_and_continues_without_it(memory_marshal: MemoryKafka, how: str) -> None:
    program = Program(how)
    memory_marshal.create_topic("orders")
    memory_marshal.produce("orders", "a")
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until_done("orders", GROUP)
    worker.pause()
    memory_marshal.produce("orders", "b")
    memory_marshal.advance(3)
    assert program.values == [b"a"], "it has the lease, and does nothing"
    memory_marshal.start(program.work, "b")
    memory_marshal.advance(4)
    memory_marshal.wait_until_done("orders", GROUP)
    worker.resume()
    memory_marshal.produce("orders", "c")
    memory_marshal.wait_until_done("orders", GROUP)
    memory_marshal.advance(9)
    assert program.handled == [("a", b"a"), ("b", b"b"), ("b", b"c")]
    assert worker.is_alive


def test_a_pause_that_is_short_costs_nothing(memory_marshal: MemoryKafka) -> None:
    program = Program("threads")
    memory_marshal.create_topic("orders")
    memory_marshal.produce("orders", "a")
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until_done("orders", GROUP)
    [before] = memory_marshal.admin.progress(GROUP)
    worker.pause()
    memory_marshal.produce("orders", "b")
    memory_marshal.advance(2)
    worker.resume()
    memory_marshal.wait_until_done("orders", GROUP)
    [after] = memory_marshal.admin.progress(GROUP)
    assert (after.epoch, after.client_id) == (before.epoch, "a")


@pytest.mark.parametrize("how", HOW)
def test_a_retry_in_five_minutes_comes_when_the_time_is_put_forward(memory_marshal: MemoryKafka, how: str) -> None:
    tries = []

    def act(_message: Any) -> None:
        tries.append(Attempt.current().number)
        if len(tries) == 1:
            raise ConnectionError("the database is away")

    program = Program(how, act, retry=Retry(attempts=3, backoff=(300.0, 300.0)))
    memory_marshal.create_topic("orders")
    memory_marshal.produce("orders", "a")
    memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: tries)
    [before] = memory_marshal.admin.progress(GROUP)
    memory_marshal.advance(140)
    assert tries == [1]
    memory_marshal.advance(165)
    memory_marshal.wait_until_done("orders", GROUP)
    assert tries == [1, 2]
    [after] = memory_marshal.admin.progress(GROUP)
    assert after.epoch == before.epoch, "a living member keeps its lease"


def test_what_fails_for_good_is_seen_as_dead_letter_or_set_aside(memory_marshal: MemoryKafka) -> None:
    def act(message: Any) -> None:
        if message.value() == b"bad":
            raise ValueError("not an order")

    memory_marshal.create_topic("orders")
    memory_marshal.create_topic("dead")
    memory_marshal.produce("orders", "bad", "good")
    letters = Program("threads", act, retry=Retry(attempts=1), dead_letters="dead")
    first = memory_marshal.start(letters.work)
    memory_marshal.wait_until_done("orders", GROUP)
    assert [(letter.offset, letter.reason) for letter in memory_marshal.admin.dead_letters("dead")] == [
        (0, "not an order")
    ]

    aside = Program("threads", act, retry=Retry(attempts=1), park=True)
    first.stop()
    memory_marshal.produce("orders", "bad")
    memory_marshal.start(aside.work)
    memory_marshal.wait_until_done("orders", GROUP)
    [message] = memory_marshal.admin.open_messages(GROUP)
    assert (message.offset, message.state) == (2, "parked")


# Wrong use, and what goes wrong in a test.


def test_a_worker_that_fails_ends_the_wait_with_its_error(memory_marshal: MemoryKafka) -> None:
    def act(_message: Any) -> None:
        raise KeyError("a typo")

    memory_marshal.create_topic("orders")
    memory_marshal.produce("orders", "a")
    worker = memory_marshal.start(Program("threads", act, retry=Retry(attempts=1)).work)
    with pytest.raises(AssertionError, match=r"worker 'worker-1' ended with .*a typo"):
        memory_marshal.wait_until_done("orders", GROUP)
    assert not worker.is_alive


@pytest.mark.parametrize("how", HOW)
def test_a_failure_that_no_line_of_the_test_has_seen_fails_it_at_its_end(how: str) -> None:
    kafka = MemoryKafka()

    def broken(_: str) -> None:
        raise KeyError("a typo")

    async def broken_too(_: str) -> None:
        raise KeyError("a typo")

    work: Any = broken if how == "threads" else broken_too
    kafka.start(work)._thread.join(20)
    with pytest.raises(AssertionError, match="'worker-1' ended with KeyError"):
        kafka.end()
    kafka = MemoryKafka()
    worker = kafka.start(work)
    kafka.wait_until(lambda: isinstance(worker.error, KeyError))
    kafka.end()


def test_a_handler_that_hangs_is_named_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_marshal.testing.memory.PATIENCE_S", 0.01)
    kafka, gate, begun = MemoryKafka(), threading.Event(), threading.Event()

    def work(bootstrap_servers: str) -> None:
        with Marshal(bootstrap_servers, group_id=GROUP) as marshal:
            for _ in marshal.consumer(["orders"]):
                begun.set()
                gate.wait(20)

    kafka.create_topic("orders")
    kafka.produce("orders", "a")
    kafka.start(work)
    kafka.wait_until(begun.is_set)
    with pytest.warns(ResourceWarning, match="still runs after the end of the test .*test_memory_marshal.py:"):
        kafka.end()
    gate.set()


def test_a_wait_in_vain_says_how_the_workers_are(memory_marshal: MemoryKafka) -> None:
    memory_marshal.create_topic("orders")
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: never\. No Marshal is open: does the worker use"):
        memory_marshal.wait_until(lambda: False, 0.01, "never")
    program = Program("threads")
    memory_marshal.start(program.work)
    memory_marshal.produce("orders", "a")
    memory_marshal.wait_until(lambda: program.handled)
    with pytest.raises(AssertionError, match=r"a: .*1 lease"):
        memory_marshal.wait_until(lambda: False, 0.01)


def test_what_can_not_work_is_refused(memory_marshal: MemoryKafka) -> None:
    memory_marshal.create_topic("orders")
    with pytest.raises(ProduceError, match="order"):
        memory_marshal.produce("order", "a")
    with pytest.raises(ConfigurationError, match=r"work must be a function that takes \(bootstrap_servers\)"):
        memory_marshal.start("work")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="seconds must be"):
        memory_marshal.advance(0)
    program = Program("threads")
    worker = memory_marshal.start(program.work)
    memory_marshal.wait_until(lambda: memory_marshal.committed(GROUP, "orders"))
    worker.pause()
    with pytest.raises(ConfigurationError, match="is paused: it can't end before resume"):
        worker.stop()
    worker.kill()
    for what in (worker.kill, worker.pause, worker.resume):
        with pytest.raises(ConfigurationError, match="'worker-1' was killed: it can't be"):
            what()


def test_a_paused_worker_answers_nothing(memory_marshal: MemoryKafka) -> None:
    memory_marshal.create_topic("orders")
    made: list[Marshal] = []

    def work(bootstrap_servers: str) -> None:
        made.append(Marshal(bootstrap_servers, group_id=GROUP))
        list(made[0].consumer(["orders"]))
        made[0].close()

    worker = memory_marshal.start(work)
    memory_marshal.wait_until(lambda: made)
    worker.pause()
    with pytest.raises(RuntimeError, match="is paused, and answers nothing"):
        made[0].health()
    worker.resume()
    assert made[0].health().ok
    worker.stop()


def test_no_thread_is_left_behind(memory_marshal: MemoryKafka) -> None:
    before = set(threading.enumerate())
    kafka = MemoryKafka()
    kafka.create_topic("orders")
    kafka.produce("orders", *"abcdef")
    kafka.start(Program("threads", concurrency=8).work)
    kafka.wait_until_done("orders", GROUP)
    kafka.end()
    gc.collect()
    memory_marshal.wait_until(lambda: set(threading.enumerate()) <= before, what="all threads have ended")


def test_neither_java_nor_a_broker_is_imported() -> None:
    program = (
        "import sys\nfrom kafka_marshal.testing import MemoryKafka\nMemoryKafka().end()\n"
        "print(sorted(x for x in sys.modules if x.startswith(('kafka_marshal.testing.', 'confluent', 'pyspark'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "['kafka_marshal.testing.memory', 'kafka_marshal.testing.stoppable']\n"
