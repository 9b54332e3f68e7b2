"""A Kafka in memory for tests of workers: no Java, no Docker, milliseconds (the fixture ``memory_marshal``)."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kafka_marshal import arguments
from kafka_marshal.adapters.memory import AppendFate, MemoryBroker, MemoryCluster
from kafka_marshal.adapters.opening import announced
from kafka_marshal.admin import Admin
from kafka_marshal.client.closing import cut_off
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.logs import LOGGER
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.life import place_of
from kafka_marshal.testing.stoppable import Doing, Killed, StoppableRuntime, Time, is_of_the_living
from kafka_marshal.types import T

if TYPE_CHECKING:
    from kafka_marshal.ports import Message

#: Waits check their condition this often, and have members report what is done that often (s).
LOOK_S, REPORT_S = 0.002, 0.02
#: The longest wait (s) for a worker that opens its Marshal or ends, and for members to do what is due by then.
PATIENCE_S = 5.0
#: Time is put forward by this part of a heartbeat interval at a time, so that living members keep their leases.
STEPS_PER_INTERVAL = 8

_numbers = itertools.count(1)


class MemoryWorker:
    """A worker of a test: a function in a thread, in place of a process. ``MemoryKafka.start`` makes it.

    Attributes:
        name: for people.
        bootstrap_servers: the address of its Marshals; no other worker has it.
    """

    def __init__(self, kafka: MemoryKafka, name: str, work: Callable[..., Any], given: Sequence[object]) -> None:
        self.name = name
        self.bootstrap_servers: str = f"memory://{next(_numbers)}/{name}"
        self._kafka = kafka
        self._work, self._given = work, given
        self._error: BaseException | None = None
        #: The test has seen it.
        self._is_seen = False
        self._runtime = StoppableRuntime(kafka._time)
        self._clients: list[str] = []
        #: Of a coroutine function.
        self._task: asyncio.Task[None] | None = None
        run = partial(self._runtime.run, self._run)
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        kafka._stack.enter_context(announced(self.bootstrap_servers, self._open_cluster))

    def _open_cluster(self, _: Mapping[str, object]) -> MemoryCluster:
        if self._runtime.state is Doing.KILLED:
            raise Killed
        self._clients.append(f"{self.bootstrap_servers}/{len(self._clients)}")
        cluster = MemoryCluster(broker=self._kafka._broker, client=self._clients[-1])
        cluster.runtime = self._runtime
        return cluster

    def _run(self) -> None:
        async def awaited() -> None:
            self._task = asyncio.current_task()
            await self._work(self.bootstrap_servers, *self._given)

        try:
            if inspect.iscoroutinefunction(self._work):
                asyncio.run(awaited())
            else:
                arguments.a_result("work", self._work(self.bootstrap_servers, *self._given))
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            if self._runtime.state is not Doing.KILLED:
                self._error = error

    @property
    def is_alive(self) -> bool:
        """Whether it was not killed, and its function has not returned."""
        return self._runtime.state is not Doing.KILLED and self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What its function has raised. A test that neither asks for it nor calls ``stop`` fails with it."""
        self._is_seen = True
        return self._error

    def kill(self) -> None:
        """End it as ``kill -9`` does: nothing more is sent, begun, reported or released.

        A handler that runs continues until it returns (a coroutine is cancelled), and is not reported as done.
        """
        self._check_alive("killed")
        self._end()

    def _end(self) -> None:
        with self._kafka._broker.changed:
            self._kafka._dead.update(self._clients)
        for driver in self._runtime.drivers:
            cut_off(driver)
        self._runtime.change(Doing.KILLED)
        self._kafka._broker.wake()
        for driver in self._runtime.drivers:
            driver.shut_down()
        if self._task is not None:
            loop = self._task.get_loop()
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(loop.set_exception_handler, lambda *_: None)
                loop.call_soon_threadsafe(self._task.cancel)

    def pause(self) -> None:
        """Stop it as ``SIGSTOP`` does, until ``resume``: no heartbeat, no further message; its clock continues.

        A handler that runs continues until it returns.
        """
        self._check_alive("paused")
        self._runtime.change(Doing.PAUSED)

    def resume(self) -> None:
        """Let it continue, as ``SIGCONT`` does."""
        self._check_alive("resumed")
        self._runtime.change(Doing.RUNNING)
        self._runtime.wake()

    def stop(self, timeout: float = 10.0) -> None:
        """Call ``stop()`` of its Marshals, as for a SIGTERM, and wait for its function. Fails with what that raises."""
        if self._runtime.state is Doing.PAUSED:
            raise ConfigurationError(
                f"worker {self.name!r} is paused: it can't end before resume(). Nothing was changed"
            )
        until = time.monotonic() + arguments.seconds("timeout", timeout)
        while self._thread.is_alive():
            for driver in list(self._runtime.drivers):  # each time: it may be about to make its Marshal
                if (marshal := driver.life.owner()) is not None:
                    marshal.stop()
            self._kafka._broker.wake()  # a read lasts up to 0.2 s
            self._thread.join(LOOK_S)
            if time.monotonic() >= until:
                raise AssertionError(f"worker {self.name!r} has not ended {timeout:g} s after stop(){self._place}")
        self._raise()

    @property
    def _is_open(self) -> bool:
        return any(driver.lock.started for driver in list(self._runtime.drivers))

    @property
    def _place(self) -> str:
        return place_of(self._thread.ident)

    def _check_alive(self, what: str) -> None:
        if not self.is_alive:
            how = "was killed" if self._runtime.state is Doing.KILLED else "has ended"
            raise ConfigurationError(f"worker {self.name!r} {how}: it can't be {what}. Nothing was changed")

    def _raise(self) -> None:
        if self._error is not None and not self._is_seen:
            self._is_seen = True
            raise AssertionError(f"worker {self.name!r} ended with {self._error!r}") from self._error


class MemoryKafka:
    """A Kafka in memory with a coordination topic, and workers on it: the value of the fixture ``memory_marshal``.

    Attributes:
        bootstrap_servers: for a Marshal or an Admin of the test itself. Each worker gets its own address.
        admin: an Admin, for open messages, dead letters, redrive, pauses.
    """

    def __init__(self) -> None:
        self._stack, self._time, self._broker = ExitStack(), Time(), MemoryBroker()
        self._broker.clock = self._time.of_day_ms
        #: Clients of killed workers: nothing of them arrives.
        self._dead: set[str] = set()
        LOGGER.addFilter(is_of_the_living)
        self._stack.callback(LOGGER.removeFilter, is_of_the_living)
        self._broker.faults.append = self._broker.faults.request = self._fate
        self._test = MemoryWorker(self, "test", lambda _: None, ())
        #: The test itself comes last.
        self._workers: list[MemoryWorker] = [self._test]
        self.bootstrap_servers: str = self._test.bootstrap_servers
        self.admin: Admin = Admin(self.bootstrap_servers)
        self.admin.init(2)
        self._producer = self._test._open_cluster({}).producer({})

    def _fate(self, client: str, *_: object) -> AppendFate:
        return AppendFate.FATAL if client in self._dead else AppendFate.WRITTEN

    def create_topic(self, topic: str, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """Create a topic."""
        self._broker.create_topic(topic, arguments.a_whole("partitions", partitions, 1), 1, settings)

    def produce(
        self,
        topic: str,
        *values: bytes | str | None,
        key: bytes | str | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> None:
        """Append messages with this key, which decides on the partition as in Java's client; without one, in turn."""
        for value in values:
            answers: list[Exception | None] = []
            self._producer.send(topic, _bytes(value), _bytes(key), headers, answers.append)
            self._producer.poll(0.0)
            for error in filter(None, answers):
                raise error

    def messages(self, topic: str) -> list[Message]:
        """What the topic holds now, by partition."""
        with self._broker.changed:
            return [message for log in self._broker.existing[topic].partitions for message in log.messages]

    def committed(self, group_id: str, topic: str) -> dict[int, int]:
        """Partition → the position of the group, that is, what it reads next. What it never held is left out."""
        found: dict[int, int] = {}
        for info in self.admin.progress(group_id):
            if info.topic == topic:
                position = 0 if info.stable is None else info.stable + 1
                found[info.partition] = min(position, found.get(info.partition, position))
        return found

    def start(self, work: Callable[..., object], *given: object, name: str = "") -> MemoryWorker:
        """Run ``work(bootstrap_servers, *given)`` as a worker: your function that makes a Marshal.

        It runs in a thread, a coroutine function in its own event loop. Returns when a Marshal of it is open, or after
        five seconds. name: for people.
        """
        if not callable(work):
            raise arguments.wrong("work", "a function that takes (bootstrap_servers)", work)
        worker = MemoryWorker(self, name or f"worker-{len(self._workers)}", work, given)
        self._workers.insert(-1, worker)
        worker._thread.start()
        until = time.monotonic() + PATIENCE_S
        while worker.is_alive and not worker._is_open and time.monotonic() < until:
            time.sleep(LOOK_S)
        return worker

    def wait_until(self, condition: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
        """Wait for a condition, and return its value. Fails after ``timeout`` seconds, or if a worker fails."""
        until = time.monotonic() + arguments.seconds("timeout", timeout)
        while not (value := condition()):
            for worker in self._workers:
                worker._raise()
            if time.monotonic() >= until:
                raise AssertionError(f"not within {timeout:g} s: {what or condition}. {self._state()}")
            time.sleep(LOOK_S)
        return value

    def wait_until_done(self, topic: str, group_id: str, timeout: float = 10.0) -> None:
        """Wait until the group has done, or set aside, all messages of a topic, and reported it: no crash repeats them.

        Members report at once, not with their next heartbeats, or take a checkpoint. Fails as ``wait_until`` does.
        """
        report_at = 0.0

        def is_done() -> bool:
            nonlocal report_at
            if time.monotonic() < report_at:
                return False
            for driver in self._running():
                with driver.lock.locked() as engine:
                    engine.take(None, engine.last_words, driver.now_ms())
                consumers: list[Any] = list(driver.lock.ports.values())
                for consumer in consumers:
                    if consumer._engine.source.takes_checkpoints:
                        consumer.checkpoint()  # progress moves with it only
            report_at = time.monotonic() + REPORT_S
            return self._is_done(topic, group_id)

        self.wait_until(is_done, timeout, f"group {group_id!r} has done all of {topic!r}")

    def _is_done(self, topic: str, group_id: str) -> bool:
        infos = [info for info in self.admin.progress(group_id) if info.topic == topic]
        with self._broker.changed:
            ends = [log.offsets[-1] if log.offsets else -1 for log in self._broker.existing[topic].partitions]
        for partition, last in enumerate(ends):
            done = [-1 if info.stable is None else info.stable for info in infos if info.partition == partition]
            if min(done, default=-1) < last:
                return False
        return all(each.is_parked for info in infos for each in info.open)

    def _running(self) -> list[Driver]:
        runtimes = [worker._runtime for worker in self._workers if worker._runtime.state is Doing.RUNNING]
        return [driver for runtime in runtimes for driver in runtime.drivers if not driver.is_over]

    def _state(self) -> str:
        owners = [driver.life.owner() for driver in self._running()]
        found = "; ".join(f"{owner.client_id}: {owner.health()}" for owner in owners if owner is not None)
        return found or "No Marshal is open: does the worker use the address that it is given?"

    def advance(self, seconds: float) -> None:
        """Put the clocks of brokers and workers forward: heartbeats, leases, retries and time-outs of the library.

        Living members keep their leases meanwhile, silent ones lose them. ``time.time``, ``time.sleep`` and
        ``asyncio.sleep``, which handlers may use, know nothing of it.
        """
        end = self._time.added + arguments.seconds("seconds", seconds, above=0)
        while self._time.added < end:
            drivers = self._running()
            interval = min((x.engine.settings.heartbeat_interval_ms / 1000 for x in drivers), default=end)
            self._time.added = min(end, self._time.added + interval / STEPS_PER_INTERVAL)
            until, is_settled = time.monotonic() + PATIENCE_S, False
            while not is_settled and time.monotonic() < until:
                self._wake()  # each time: a thread may have read the clock before, and wait since
                time.sleep(LOOK_S / 10)
                is_settled = all(map(_is_settled, drivers))

    def _wake(self) -> None:
        self._broker.wake()
        for worker in self._workers:
            if worker._runtime.state is Doing.RUNNING:
                worker._runtime.wake()

    def end(self) -> None:
        """Kill all workers. Fails with the error of a worker that the test has not seen."""
        for worker in self._workers:
            worker._end()
        until = time.monotonic() + PATIENCE_S
        for worker in self._workers[:-1]:
            worker._thread.join(max(0.0, until - time.monotonic()))
            if worker._thread.is_alive():
                text = f"worker {worker.name!r} still runs after the end of the test{worker._place}"
                warnings.warn(text, ResourceWarning, stacklevel=2)
        self._stack.close()
        for worker in self._workers:
            worker._raise()


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _is_settled(driver: Driver) -> bool:
    """Whether a member has done what was due by now, and has read the whole log."""
    with driver.condition:
        if driver.is_over or not driver.lock.started:
            return driver.is_over
        ends = driver.replica.tail.log_ends()
        if any(world.next_offset < ends.get(cp, 0) for cp, world in driver.replica.worlds.items()):
            return False
        now = driver.now_ms()
        return driver.engine.take(None, driver.engine.deadline, now) > now
