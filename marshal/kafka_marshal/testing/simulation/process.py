"""Simulated processes, and the :class:`Job` of a worker in one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from kafka_marshal.admin import Admin
from kafka_marshal.checkpoints import Checkpoint, Restore
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.errors import MarshalError, StaleEpochError
from kafka_marshal.node.driver import Driver
from kafka_marshal.ports import Message
from kafka_marshal.testing.simulation.holdings import place_of
from kafka_marshal.testing.simulation.interrupting import Interrupted, Interrupting
from kafka_marshal.testing.simulation.living import Host, ProcessEnd
from kafka_marshal.testing.simulation.network import (
    Network,
    SimulatedAppender,
    SimulatedCluster,
    SimulatedTail,
)
from kafka_marshal.testing.simulation.runtime import SimulatedRuntime
from kafka_marshal.types import Key, T

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.checks import Checks
    from kafka_marshal.testing.simulation.parking import Parking
    from kafka_marshal.testing.simulation.scenario import Scenario
    from kafka_marshal.testing.simulation.scheduler import Scheduler, Task


#: Bootstrap servers of Marshal("…") and Admin("…") in a simulation.
BOOTSTRAP = "simulation://kafka"


@dataclass(slots=True)
class Links:
    """Open connections of a process."""

    appenders: list[SimulatedAppender] = field(default_factory=list)
    tails: list[SimulatedTail] = field(default_factory=list)


@dataclass(slots=True)
class ProcessWork:
    """What runs in a process."""

    job: Job | None = None
    main: Task | None = None
    marshals: list[Marshal] = field(default_factory=list)
    #: Signal number → the worker's handler.
    handlers: dict[int, Any] = field(default_factory=dict)


class Process:
    """A simulated process: its clock, its network, its threads. It may be stopped or killed."""

    def __init__(
        self, name: str, host: Host, network: Network, checks: Checks, seed: int, heartbeat_interval_ms: int = 0
    ) -> None:
        scheduler = network.scheduler
        #: Unique for ever.
        self.name = name
        self.client_id: str = host.name
        self.host = host
        #: 0: the story's.
        self.heartbeat_interval_ms = heartbeat_interval_ms
        self.dead: bool = False
        self.stopped_until: float = 0.0
        self.end: ProcessEnd = ProcessEnd()
        self.rng: Random = Random(f"{seed}/{name}")
        self.interrupting: Interrupting = Interrupting(scheduler, host.trouble, Random(f"{seed}/{name}/interrupts"))
        self.interrupting.on_raised = lambda what: checks.raised(self, what)
        self.runtime: SimulatedRuntime = SimulatedRuntime(scheduler, self, Random(f"{seed}/{name}/runtime"), host.rate)
        self.network = network
        self.checks = checks
        self.links: Links = Links()
        self.drivers: list[Driver] = []
        self.work: ProcessWork = ProcessWork()

    @property
    def scheduler(self) -> Scheduler:
        """Whose time it lives in."""
        return self.network.scheduler

    def travel_ms(self) -> float:
        """Latency of one message between this process and a broker (ms)."""
        return self.host.trouble.latency_ms * (0.3 + 1.4 * self.rng.random())

    def reaches_at(self) -> float:
        """When something that a broker sends now arrives."""
        at = self.scheduler.now + self.travel_ms()
        return self.host.fetch_ms * ceil(at / self.host.fetch_ms) if self.host.fetch_ms > 0 else at

    def next_ack(self) -> float:
        """Virtual time at which the next acknowledgement arrives."""
        return min([appender.next_due() for appender in self.links.appenders], default=inf)

    def next_due(self, tail: SimulatedTail) -> float:
        """Virtual time at which a task that waits at this tail for an acknowledgement has something else to do."""
        now = self.runtime.now_ms()
        for driver in self.drivers:
            if driver.replica.tail.tail is tail:
                return self.scheduler.now + (driver.pacing.looks_until - now) / self.runtime.rate
        return -inf

    def joined(self, driver: Driver) -> None:
        """A Marshal, or an Admin's session, begins to read the log."""
        self.drivers.append(driver)
        self.checks.watch(self, driver)

    def cluster(self) -> SimulatedCluster:
        """The cluster as this process reaches it."""
        return SimulatedCluster(self.network, self)

    def sleep(self, seconds: float) -> None:
        """Let time pass in the current task of this process."""
        scheduler = self.scheduler
        if scheduler.current is not None:
            scheduler.current.turns = 0  # a task that works or sleeps is not spinning
        scheduler.park(scheduler.now + max(0.002, seconds * 1000))

    def run(self, function: Callable[[], object], ended: Callable[[], object]) -> None:
        """Run this in the process's main thread; ended is called when it has returned or raised."""

        def main() -> None:
            try:
                function()
            except SystemExit:
                pass  # a regular end
            except Exception as error:  # noqa: BLE001 - whatever it is, the story judges it
                self.end.error = error
            self.end.ended = True
            ended()

        self.work.main = self.scheduler.spawn(self, "main", main)

    def kill(self) -> None:
        """kill -9: none of its tasks gets another turn. What it sent still arrives."""
        self.dead = True

    def send_sigterm(self) -> bool:
        """Call the worker's handler, or else stop() of its Marshals. False: it has neither and would be killed."""
        self.end.asked_at = min(self.end.asked_at, self.scheduler.now)
        handler = self.work.handlers.get(signal.SIGTERM, signal.SIG_DFL)
        if callable(handler):
            self.scheduler.spawn(self, "SIGTERM", lambda: self._handle(handler))
        elif handler is not signal.SIG_IGN:
            for marshal in self.work.marshals:
                marshal.stop()
            return bool(self.work.marshals)
        return True

    def _handle(self, handler: Callable[[int, None], object]) -> None:
        try:
            handler(signal.SIGTERM, None)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised in the main thread
            if self.work.main is not None:
                self.scheduler.raise_in(self.work.main, error)

    @property
    def is_running(self) -> bool:
        """Whether it is neither dead, ended nor stopped."""
        return not self.dead and not self.end.ended and self.scheduler.now >= self.stopped_until


class Job:
    """A worker's argument: its Kafka, its identity and its work.

    A worker is a function of one Job. It makes a Marshal and a consumer and handles messages, as in the README.
    ``handle`` stands for the work itself; the simulator checks each call.
    """

    def __init__(self, process: Process, scenario: Scenario, store: Contents) -> None:
        self.bootstrap_servers = BOOTSTRAP
        self.group_id: str = scenario.group_id
        self.client_id: str = process.client_id
        #: The topic to handle.
        self.topic: str = scenario.data_topic
        #: All topics to handle.
        self.topics: list[str] = scenario.topics_of(process.client_id)
        self.coordination_topic: str = scenario.topic
        self.heartbeat_interval_ms: int = process.heartbeat_interval_ms or scenario.heartbeat_interval_ms
        #: The strategy for ``Group`` in a coordinated group; None: the group claims its partitions.
        self.strategy = scenario.strategy
        #: "at-least-once" or "at-most-once".
        self.delivery = scenario.delivery
        #: A database that refuses older epochs (C9).
        self.database: Database = Database(store, process.checks, process)
        #: Random source, the same on every run of a seed.
        self.random: Random = Random(f"{scenario.seed}/{process.name}/job")
        self._process = process
        self._scenario = scenario
        #: Slowdown of the work (1: none).
        self.slowness: float = 1.0
        #: The next handler hangs.
        self.hangs_next: bool = False
        #: The program is to roll its group back.
        self.goes_back: bool = False
        #: What is set aside, and which messages fail.
        self.parking: Parking = process.checks.accounts.parking
        #: Kills the process; it is restarted.
        self.on_death: Callable[[Process], object] = lambda _: None
        #: Where states are saved.
        self.files: dict[str, bytes] = store.files

    @property
    def session_timeout(self) -> float:
        """The session timeout (s) of a coordinated group's members."""
        return 2 * self.heartbeat_interval_ms / 1000

    def marshal(self, **options: Any) -> Marshal:
        """``Marshal(bootstrap_servers, group_id=…, client_id=…, heartbeat_interval=…)`` of this job.

        Its ``stop()`` is called when the simulation sends a SIGTERM.
        """
        options = {
            "group_id": self.group_id,
            "client_id": self.client_id,
            "topic": self.coordination_topic,
            "heartbeat_interval": self.heartbeat_interval_ms / 1000,
            **options,
        }
        marshal = self.again(partial(Marshal, self.bootstrap_servers, **options))
        self._process.work.marshals.append(marshal)
        return marshal

    def admin(self, **options: Any) -> Admin:
        """An Admin of the same log."""
        options = {"topic": self.coordination_topic, "heartbeat_interval": self.heartbeat_interval_ms / 1000, **options}
        return Admin(self.bootstrap_servers, **options)

    def received(self, messages: Iterable[Message]) -> None:
        """Report messages right after ``consume`` or a batch returned them: their leases are checked now (T4)."""
        self._process.checks.received(self._process, messages)

    def handle(self, message: Message, seconds: float = 0.0) -> None:
        """Do a message's work, which takes a while (``seconds`` longer than usual) and can't be undone."""
        self._try(message, seconds)
        self.parking.handled(*place_of(message))
        self._process.checks.handled(self._process, message)

    def fail(self, message: Message, seconds: float = 0.0) -> None:
        """Do the work and fail: it counts as not begun. The handler must raise afterwards."""
        self._try(message, seconds)
        self._process.checks.handled(self._process, message, in_vain=True)

    def begin_together(self, messages: Iterable[Message]) -> None:
        """What begins next is one of these, in one list: none of it waits for another one."""
        self._process.checks.accounts.ordering.together = {place_of(message) for message in messages}

    def handle_list(self, messages: Sequence[Message], errors: Sequence[BaseException | None], seconds: float) -> None:
        """Do the work of a list; what has an error counts as not begun, and the handler must name it afterwards.

        ``begin_together`` comes first.
        """
        process = self._process
        for message in messages:
            process.checks.begins(process, message)
        self.begin_together(())
        self.sleep(seconds + self.random.expovariate(1000 / (self._scenario.handling_ms * self.slowness)))
        for message, error in zip(messages, errors, strict=True):
            if error is None:
                self.parking.handled(*place_of(message))
            process.checks.handled(process, message, in_vain=error is not None)

    def come_again(self, messages: Iterable[Message]) -> None:
        """These messages of a list that was handled begin as if for the first time: those before them come first."""
        for message in messages:
            self._process.checks.accounts.ordering.comes_again(*place_of(message))

    @property
    def in_lists(self) -> bool:
        """Whether handlers get lists."""
        return self._scenario.lists

    def list_options(self) -> tuple[int, float]:
        """How many messages a list has at most, and how long it waits for them (s)."""
        return self.random.choice((2, 5, 20)), self.random.choice((0.0, 0.1, 0.5)) * self.heartbeat_interval_ms / 1000

    def tries(self, attempt: Attempt) -> None:
        """Report that a try begins."""
        worlds = self._process.checks.log.worlds
        self.parking.tries(self._process, *place_of(attempt.message), attempt.epoch, attempt.number, worlds)
        self.parking.waits.begins(self._process, attempt)

    def failed(self, attempt: Attempt, error: BaseException) -> None:
        """Report that a try has failed, which raises this; after the last one the message is set aside."""
        message = attempt.message
        self.parking.waits.failed(self._process, attempt, error)
        about = (attempt.epoch, attempt.number)
        self.parking.failed(self._process, *place_of(message), *about, is_last=attempt.is_last)
        if attempt.is_last:
            key, offset = place_of(message)
            self._process.checks.accounts.ledger(key).ever.add(offset)

    def survives(self, message: Message) -> None:
        """Begin with this message, and kill the process, if it is the one that does."""
        if place_of(message) != self.parking.killing or self.is_calm:
            return
        self.parking.killed.add(self._process.name)
        self._process.checks.begins(self._process, message)
        self.begin_together(())
        self.on_death(self._process)
        self.sleep(1.0)  # no task of it gets another turn

    def _try(self, message: Message, seconds: float) -> None:
        self._process.checks.begins(self._process, message)
        if self.hangs_next:
            self._hang(message)
        self.sleep(seconds + self.random.expovariate(1000 / (self._scenario.handling_ms * self.slowness)))

    def _hang(self, message: Message) -> None:
        """Wait until the story ends the hang."""
        self.hangs_next, ordering, place = False, self._process.checks.accounts.ordering, place_of(message)
        ordering.hangs(*place)
        while ordering.waits(*place):
            self.sleep(self.heartbeat_interval_ms / 1000)

    def calls_back(self, given: Checkpoint | Restore | int) -> None:
        """Report that on_checkpoint, on_restore or on_completed is called."""
        counted = self._process.checks.accounts.counted
        match given:
            case Checkpoint():
                counted.cuts(self._process, given)
            case Restore():
                counted.restores(self._process, given)
            case _:
                counted.completed(self._process, given)

    def restored(self, restore: Restore) -> None:
        """Report that on_restore is about to return."""
        self._process.checks.accounts.counted.restored(self._process, restore)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self._process.sleep(seconds)

    @property
    def order(self) -> Order:
        """For ``consumer.run``."""
        return self._scenario.order or "key"

    @property
    def is_calm(self) -> bool:
        """Whether no worker should end any more: the time of faults is over, or a handler hangs."""
        is_over = self._process.scheduler.now >= self._scenario.intervals * self._scenario.heartbeat_interval_ms
        return is_over or bool(self._process.checks.accounts.ordering.hung)

    @property
    def is_interrupted(self) -> bool:
        """Whether ``call`` sometimes raises Interrupted."""
        return self._process.host.is_interrupted

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Call the library as a thread that signals interrupt: sometimes raises Interrupted."""
        return self._process.interrupting.call(function, *args)

    def again(self, function: Callable[..., T], *args: object) -> T:
        """The same, repeated after each interrupt."""
        while True:
            try:
                return self.call(function, *args)
            except Interrupted:
                continue

    def start(self, function: Callable[[], object]) -> None:
        """Run a function in another thread of this process. An error ends only that thread."""
        process = self._process

        def run() -> None:
            try:
                function()
            except SystemExit:
                pass
            except Exception as error:  # noqa: BLE001 - checked by the story, like the main thread's
                if not is_expected(error):
                    process.checks.fail("worker", f"a thread of {process.name} raised {error!r}")

        process.scheduler.spawn(process, "user", run)

    def monotonic(self) -> float:
        """This process's clock, in seconds."""
        return self._process.runtime.monotonic()


class FailedError(Exception):
    """A try of a built-in worker fails, and its message comes again; of a block in a transaction no output is seen."""


class LaterError(FailedError):
    """A try fails, and ``Retry(after=…)`` says when the next one begins."""

    seconds: float = 0.0


class Worker(Protocol):
    """A worker under test."""

    def __call__(self, job: Job, /) -> object: ...


class Contents:
    """The contents of a database, shared by its connections."""

    def __init__(self) -> None:
        self.rows: dict[Key, dict[int, int]] = {}
        self.epochs: dict[Key, int] = {}
        self.last_offsets: dict[Key, int] = {}
        #: States of groups that take checkpoints.
        self.files: dict[str, bytes] = {}


class Database:
    """A connection to a database that keeps, beside the rows, each partition's newest epoch and last offset (C9)."""

    def __init__(self, store: Contents, checks: Checks, process: Process) -> None:
        self._store = store
        self._checks = checks
        self._process = process

    @contextmanager
    def transaction(self) -> Iterator[DatabaseTransaction]:
        """Commit everything written in the block, or nothing if it raises."""
        transaction = DatabaseTransaction(self._store)
        yield transaction
        transaction.commit()
        self._checks.committed(self._process, transaction.rows)


class DatabaseTransaction:
    """A transaction under way."""

    def __init__(self, store: Contents) -> None:
        self.rows: list[Message] = []
        self._store = store
        self._epochs: dict[Key, int] = {}
        self._last: dict[Key, int] = {}

    def fence(self, topic: str, partition: int, epoch: int) -> int:
        """Raise the stored epoch and return the stored last offset; StaleEpochError if the epoch is older."""
        self._refuse_older(topic, partition, epoch)
        self._epochs[topic, partition] = epoch
        return self._store.last_offsets.get((topic, partition), -1)

    def _refuse_older(self, topic: str, partition: int, epoch: int) -> None:
        stored = self._store.epochs.get((topic, partition), -1)
        if epoch < stored:
            raise StaleEpochError(
                f"{topic} [{partition}]: epoch {epoch} is over, {stored} has written. Nothing of this transaction was",
                topic=topic,
                partition=partition,
                epoch=epoch,
                stored_epoch=stored,
            )

    def write(self, messages: Iterable[Message]) -> None:
        """Write a row for each message."""
        self.rows.extend(messages)

    def set_last(self, topic: str, partition: int, last_offset: int) -> None:
        """Store the partition's last offset unless it is behind the stored one: repeats come in other batches."""
        self._last[topic, partition] = max(last_offset, self._store.last_offsets.get((topic, partition), -1))

    def commit(self) -> None:
        """Commit everything or nothing (StaleEpochError if a newer epoch came first)."""
        for key, epoch in self._epochs.items():
            self._refuse_older(*key, epoch)
        self._store.epochs.update(self._epochs)
        self._store.last_offsets.update(self._last)
        for message in self.rows:
            rows = self._store.rows.setdefault((message.topic() or "", message.partition() or 0), {})
            rows[message.offset() or 0] = rows.get(message.offset() or 0, 0) + 1


def is_expected(error: BaseException | None) -> bool:
    """Whether faults alone can end a worker with this error, one that api.md names."""
    return error is None or isinstance(error, MarshalError)
