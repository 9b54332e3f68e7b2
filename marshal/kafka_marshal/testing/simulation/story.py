"""Runs a scenario: processes, faults, a supervisor, and the recovery.

A worker has simulated clocks, sleep and signals; it can't start threads.

Tasks run one at a time, so one that waits for a real lock, or loops without entering the simulation, stops them all:
its turn never ends. Only real time shows it (``failing_on_hangs``); histories don't depend on it.
"""

from __future__ import annotations

import gc
import logging
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from random import Random
from types import FrameType
from typing import Any

from kafka_marshal import guard
from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.adapters.opening import announced
from kafka_marshal.errors import MarshalError
from kafka_marshal.logs import RateLimit
from kafka_marshal.node.coordination_topic import required_settings
from kafka_marshal.testing.simulation.batch_checks import BatchChecks, is_waiting
from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.faults import PAUSE_INTERVALS, Clients, Data, FaultInjector
from kafka_marshal.testing.simulation.in_checkpoints import PLANNED
from kafka_marshal.testing.simulation.interrupting import interrupted_between
from kafka_marshal.testing.simulation.ledger import OUTPUT_PARTITIONS, OUTPUTS
from kafka_marshal.testing.simulation.network import BROKER_EPOCH_MS, Network, SimulatedCluster
from kafka_marshal.testing.simulation.process import BOOTSTRAP, Job, Process, Worker
from kafka_marshal.testing.simulation.recorded import Judge, Violation
from kafka_marshal.testing.simulation.scenario import Client, Fault, Scenario
from kafka_marshal.testing.simulation.scheduler import Over, Scheduler
from kafka_marshal.testing.simulation.waits import logging_waits
from kafka_marshal.testing.simulation.workers import HAND_PARTITIONS, HAND_TOPIC
from kafka_marshal.topic_names import snapshots_topic
from kafka_marshal.types import Key
from rationalizer import ConfigureGroup, Record, Upgrade, encode, outcome, route_group, snapshot_log, world
from rationalizer.levels import CHECKPOINTS_LEVEL, GROUPS_LEVEL, REDO_LEVEL, SHARING_LEVEL
from rationalizer.marker import marker
from rationalizer.wire.records import Kind
from rationalizer.wire.unpacking import Message

#: The promise that such a turn breaks.
HANGS = "hangs"
#: Real time between two checks; a turn found by two of them hangs. Turns take milliseconds, and an overloaded or
#: sleeping machine must not be taken for a worker that hangs.
LOOK_AFTER_S = 15.0


@contextmanager
def failing_on_hangs(scheduler: Scheduler, checks: Checks) -> Iterator[None]:
    """End a turn that takes 15 to 30 s of real time, and fail the story.

    Has no effect outside the main thread, or if SIGALRM already has a handler.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
        yield
        return
    seen: tuple[object, ...] = ()

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        task = scheduler.current
        before, seen = seen, (scheduler.now, task, task and task.token)
        if task is None or seen != before:
            return
        who = f"a thread ({task.name}) of {getattr(task.process, 'name', '')}"
        checks.fail(
            HANGS,
            f"{who} lets no virtual time pass: it goes round and round, or waits for a lock or queue that is not the "
            f"simulation's ({_where(frame)}); job.sleep lets others run",
        )
        raise Over

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_AFTER_S, LOOK_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _where(frame: FrameType | None) -> str:
    """The innermost line outside libraries, usually of the worker."""
    stack = traceback.extract_stack(frame)
    library = sysconfig.get_path("stdlib")
    own = [line for line in stack if not line.filename.startswith(library)] or stack
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}"


_NS = 1_000_000_000


@contextmanager
def simulated_stdlib(scheduler: Scheduler, worker: Worker | None) -> Iterator[None]:
    """Within simulated processes, ``time``, ``signal`` and ``threading`` are simulated; all other code gets the real.

    Functions that the worker's module imported from these (``from time import sleep``) are replaced, too.
    """
    thread = threading.get_ident()

    def process() -> Process | None:
        # Other threads of this process are not simulated, such as those of a library.
        task = scheduler.current if threading.get_ident() == thread else None
        return task.process if task is not None and isinstance(task.process, Process) else None

    simulated = {**_clocks(process, scheduler), (signal, "signal"): _signal(process)}
    with ExitStack() as stack:
        theirs = _globals_of(worker)
        for (module, name), function in simulated.items():
            real = getattr(module, name)
            places = [(vars(module), name), *((theirs, taken) for taken, value in theirs.items() if value is real)]
            for where, known_as in places:
                stack.callback(where.__setitem__, known_as, real)
                where[known_as] = function
        stack.callback(setattr, threading.Thread, "start", threading.Thread.start)
        setattr(threading.Thread, "start", _no_thread(process))  # noqa: B010 - a method is not assigned otherwise
        yield


def _globals_of(worker: Worker | None) -> dict[str, Any]:
    found = getattr(worker, "__globals__", None)
    return found if isinstance(found, dict) else {}


def _clocks(
    process: Callable[[], Process | None], scheduler: Scheduler
) -> Mapping[tuple[Any, str], Callable[..., object]]:
    def sleep(seconds: float) -> None:
        if (mine := process()) is not None:
            mine.sleep(seconds)
        else:
            real_sleep(seconds)

    def clock(name: str, seconds: Callable[[Process], float]) -> Callable[[], float]:
        real = getattr(time, name)

        def simulated() -> float:
            mine = process()
            if mine is None:
                found: float = real()
                return found
            return int(seconds(mine) * _NS) if name.endswith("_ns") else seconds(mine)

        return simulated

    def own(mine: Process) -> float:
        return mine.runtime.monotonic()

    def of_day(_: Process) -> float:
        return (BROKER_EPOCH_MS + scheduler.now) / 1000

    real_sleep = time.sleep
    clocks = {"monotonic": own, "perf_counter": own, "time": of_day}
    names = [(name + end, seconds) for name, seconds in clocks.items() for end in ("", "_ns")]
    return {(time, "sleep"): sleep, **{(time, name): clock(name, seconds) for name, seconds in names}}


def _signal(process: Callable[[], Process | None]) -> Callable[[int, Any], Any]:
    """Keep a worker's signal handler for the simulation, which calls it."""
    real = signal.signal

    def simulated(number: int, handler: Any) -> Any:
        mine = process()
        if mine is None:
            return real(number, handler)
        before = mine.work.handlers.get(number, signal.SIG_DFL)
        mine.work.handlers[number] = handler
        return before

    return simulated


def _no_thread(process: Callable[[], Process | None]) -> Callable[[threading.Thread], None]:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if process() is not None:
            raise RuntimeError(
                "a worker in the simulation started a thread, which has no place in virtual time. Nothing of it ran; "
                "job.start(function) runs a function beside the others"
            )
        real(self)

    return start


#: The promise that such a line breaks.
RAISED = "raised"


class _ErrorHandler(logging.Handler):
    def __init__(self, scheduler: Scheduler, checks: Checks) -> None:
        super().__init__(logging.ERROR)
        self._scheduler = scheduler
        self._checks = checks

    def emit(self, record: logging.LogRecord) -> None:
        if PLANNED in record.getMessage():
            return  # a save that fails, as the story has it
        if not self._scheduler.over and (record.exc_info or " raised " in record.getMessage()):
            what = f" ({record.exc_info[1]!r})" if record.exc_info else ""
            task = self._scheduler.current
            process = getattr(task and task.process, "name", "")
            self._checks.fail(RAISED, f"{process} logged: {record.getMessage()}{what}")


@contextmanager
def failing_on_errors(scheduler: Scheduler, checks: Checks) -> Iterator[None]:
    """Fail the story if a policy, a callback or a thread of the library logs an exception; drop all else."""
    logger = logging.getLogger("kafka_marshal")
    before = logger.level, logger.propagate, logger.handlers, guard._repeats
    logger.setLevel(logging.ERROR)
    logger.propagate, logger.handlers = False, [_ErrorHandler(scheduler, checks)]
    guard._repeats = RateLimit(guard.SAID_EVERY_S)  # lines of another story suppress none of this one
    try:
        yield
    finally:
        level, logger.propagate, logger.handlers, guard._repeats = before
        logger.setLevel(level)


#: Capacity of the cache.
READ_CACHE = 512


@contextmanager
def decoded_once() -> Iterator[None]:
    """Decode each value once for all replicas; decoding has no state (E6)."""
    with ExitStack() as stack:
        for module, name, keep in ((world, "read", lru_cache(READ_CACHE)), (outcome, "build", _built_once)):
            function = getattr(module, name)
            setattr(module, name, keep(function))
            stack.callback(setattr, module, name, function)
        yield


def _built_once(build: Callable[[Kind, Message], Record]) -> Callable[[Kind, Message], Record]:
    """Cached by the message's identity, which replicas share: hashing it costs as much as building the record."""
    built: dict[int, tuple[Message, Record]] = {}

    def keep(kind: Kind, message: Message) -> Record:
        found = built.get(id(message))
        if found is None:
            if len(built) >= READ_CACHE:
                built.clear()
            found = built[id(message)] = (message, build(kind, message))
        return found[1]

    return keep


#: Recovery after the last fault (HI): a dead holder's 2 · HI, the end of a pause, some rounds of claims.
RECOVERY_INTERVALS = 30
#: Part of the recovery that does not scale with HI (ms): topics are polled every 5 s, a look-up may take 5 s.
RECOVERY_MS = 12_000
#: HI to drain the backlog, beside the time that the work itself takes.
DRAIN_INTERVALS = 60
#: Length of a story that has recovered, in shares of the faulty time: usually a hundred HI.
CALM_AFTER = 1.14
#: HI in which members may still hand over partitions once their shares are even.
REST_INTERVALS = 8
#: Longest extension until the log has its records, in the same shares: one slow member may hold everything.
FILLED_AFTER = 4.0
#: A client that ends without a release and is back within this takes over its leases (HI).
SOON_INTERVALS = 0.2


#: Description of each condition that is waited for.
_AIMS = {
    "_is_owned": "everything owned",
    "_is_handled": "everything handled that does not wait for a handler that hangs",
    "_is_drained": "everything done",
    "_is_settled": "every piece with its target, and nothing waiting for another try",
    "_is_balanced": "everybody's share even",
}


@dataclass(frozen=True, slots=True)
class Result:
    """What one run has shown."""

    scenario: Scenario
    violation: Violation | None
    #: The history; empty if it was dropped.
    events: tuple[tuple[object, ...], ...]
    #: Virtual time, in HI.
    intervals: float
    counts: dict[str, int] = field(default_factory=dict)
    outcomes: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def history_digest(self) -> str:
        """Digest of the history: identical for the same scenario and code."""
        digest = sha256()
        for event in self.events:
            digest.update(repr(event).encode())
        return digest.hexdigest()

    def history(self) -> Iterator[str]:
        """The history, a line per event."""
        for name, at, *rest in self.events:
            shown = [value.hex() if isinstance(value, bytes) else str(value) for value in rest]
            yield f"{at:12.3f} {name:8} {' '.join(shown)}"

    def tell(self) -> str:
        """One line for people."""
        what = "ok" if self.violation is None else f"BROKEN {self.violation}"
        return (
            f"seed {self.scenario.seed}: {what}; {self.intervals:.0f} HI, {len(self.scenario.faults)} faults, "
            f"{self.counts.get('records', 0)} records, {self.counts.get('messages', 0)} messages, "
            f"history {self.history_digest[:16]}"
        )


def simulate_one(scenario: Scenario, worker: Worker | None = None, judge: Judge | None = None) -> Result:
    """Run one scenario; worker: run by its clients "yours"; judge: an independent judge of the log.

    A broken promise is in the result, not raised.
    """
    story = SimulatedStory(scenario, worker, judge)
    story.play()
    return story.result()


@contextmanager
def _snapshots_every(records: int) -> Iterator[None]:
    """Reduce the records per snapshot: a story's log is too short for the protocol's number (S2)."""
    name = "SNAPSHOT_INTERVAL"
    before = getattr(snapshot_log, name)
    setattr(snapshot_log, name, records or before)
    try:
        yield
    finally:
        setattr(snapshot_log, name, before)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of simulated trouble, and collect garbage between runs, not in them."""
    logger = logging.getLogger("kafka_marshal")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        logger.setLevel(level)
        if collects:
            gc.enable()


class SimulatedStory:
    """One run of a scenario; :meth:`play` runs it, once."""

    def __init__(self, scenario: Scenario, worker: Worker | None, judge: Judge | None = None) -> None:
        self.scenario: Scenario = scenario
        self.hi: float = float(scenario.heartbeat_interval_ms)
        self.scheduler: Scheduler = Scheduler()
        self.checks: Checks = self.checks_of(judge)
        self.broker: MemoryBroker = MemoryBroker(lambda: self.network.broker_clock())
        self.network: Network = Network(self.scheduler, self.broker, scenario.topic)
        self.network.on_record = self.checks.record
        self.network.on_snapshot = self.checks.snapshot
        self.scheduler.on_spin = lambda task: self.checks.fail(
            "busy waiting", f"a thread ({task.name}) of {getattr(task.process, 'name', '')} goes round and round"
        )
        self.checks.accounts.outputs.broker = self.broker
        self.network.on_ended = self.checks.accounts.outputs.committed
        self.data: Data = Data(scenario, self.scheduler, self.broker, self.network)
        self.checks.end_of = self.data.end_if_any
        self.data.on_message = self.checks.accounts.published
        self._worker = worker
        self.clients: Clients = Clients(scenario, self.network, self.checks, worker)
        self.checks.accounts.counted.states.files = self.clients.store.files
        self.faults: FaultInjector = FaultInjector(scenario, self.network, self.checks, self.clients, self.data)

    # Setting up.

    def checks_of(self, judge: Judge | None) -> Checks:
        """What checks its promises."""
        return (BatchChecks if self.scenario.sharing else Checks)(self.scenario, self.scheduler, judge)

    def _make_topics(self) -> None:
        scenario = self.scenario
        cps = scenario.coordination_partitions
        self.broker.create_topic(scenario.topic, cps, 1, required_settings(1))
        if scenario.snapshots:
            self.broker.create_topic(snapshots_topic(scenario.topic), cps, 1, required_settings(1))
        init = Process("init", self.faults.admin_host, self.network, self.checks, scenario.seed)
        for cp in range(cps):
            first = marker("init", cps)
            self.network.arrive(scenario.topic, cp, encode(first), init, 0.0)
            if scenario.strategy is not None or scenario.parks or scenario.sharing or scenario.redoes:
                level = GROUPS_LEVEL if scenario.checkpoints is None else CHECKPOINTS_LEVEL
                level = SHARING_LEVEL if scenario.parks or scenario.sharing else level
                level = REDO_LEVEL if scenario.redoes else level
                upgrade = Upgrade(first.instance_id, first.client_id, first.group_id, level)
                self.network.arrive(scenario.topic, cp, encode(upgrade), init, 0.0)
        self._share(init)
        self.data.plan()
        self.broker.create_topic(HAND_TOPIC, HAND_PARTITIONS)
        if scenario.transactions:
            self.broker.create_topic(OUTPUTS, OUTPUT_PARTITIONS)

    def _share(self, init: Process) -> None:
        """Have the partitions shared by key, if this story does."""
        scenario = self.scenario
        if scenario.shares or (scenario.checkpoints is not None and scenario.checkpoints.shares):
            ids = marker("init", scenario.coordination_partitions)
            settings = (("accept_range_fetch", (scenario.data_topic,)),)
            configure = ConfigureGroup(ids.instance_id, ids.client_id, scenario.group_id, settings)
            home = route_group(scenario.group_id, scenario.coordination_partitions)
            self.network.arrive(scenario.topic, home, encode(configure), init, 0.0)

    def open_cluster(self, config: object) -> SimulatedCluster:
        """The cluster of Marshal("simulation://kafka") in the calling process."""
        task = self.scheduler.current
        if task is None or not isinstance(task.process, Process):
            raise MarshalError("simulation://kafka is there for the processes of a simulation only")
        return task.process.cluster()

    # The course of events.

    def play(self) -> None:
        """Run it in a simulated world, and leave that."""
        with quiet(), decoded_once(), _snapshots_every(self.scenario.snapshots), logging_waits(self.scenario):
            try:
                with (
                    announced(BOOTSTRAP, self.open_cluster),
                    simulated_stdlib(self.scheduler, self._worker),
                    interrupted_between(self.scheduler.interrupt),
                    failing_on_hangs(self.scheduler, self.checks),
                    failing_on_errors(self.scheduler, self.checks),
                ):
                    self.run()
                    self.scheduler.close()
            finally:
                self.scheduler.close()

    def run(self) -> None:
        """Run with faults for ``intervals``; then everything must be owned and drained in time."""
        self._make_topics()
        rng = Random(f"{self.scenario.seed}/start")
        for client in self.scenario.clients:
            self.clients.later(rng.random() + client.joins, partial(self.clients.start, client.name))
        for fault in self.scenario.faults:
            self.scheduler.call_at(fault.at * self.hi, partial(self.faults.befall, fault))
        self.scheduler.run_until(self.scenario.intervals * self.hi)
        if not self.scenario.recovers:
            return
        self.faults.end()
        self.network.slow_share = 0.0
        fixed = RECOVERY_MS / self.hi
        times = 1 + sum(fault.kind == "forget" for fault in self.scenario.faults)
        backlog = times * self.data.published * self.scenario.handling_ms * 2 / self.hi
        self._wait(self._is_owned, RECOVERY_INTERVALS + PAUSE_INTERVALS + fixed)
        if any(fault.kind == "hang" for fault in self.scenario.faults):
            self._wait(self._is_handled, DRAIN_INTERVALS + backlog)
            self.checks.accounts.ordering.hung.clear()
        self._wait(self._is_drained, DRAIN_INTERVALS + backlog)
        self._wait(self._is_owned, RECOVERY_INTERVALS)
        self._wait(self._is_settled, RECOVERY_INTERVALS + fixed)
        self._wait(self._is_balanced, RECOVERY_INTERVALS)
        if self.scenario.clocks_are_trusted:
            self.checks.members.calm_since = self.scheduler.now
        self._rest(CALM_AFTER * self.scenario.intervals * self.hi)
        self._fill()
        if self.checks.broken is None:
            self._look_back()

    def _set_lost_positions(self) -> None:
        """Set positions that members don't touch (P11) to where the group is: those messages exist by now."""
        consumers = [consumer for process, consumer in self.checks.consumers.values() if process.is_running]
        lost = {(one.topic, one.partition) for consumer in consumers for one in consumer.positions.stuck.lost}
        if not lost or any(process.host.is_admin and process.is_running for process in self.clients.processes):
            return
        job = Job(process := self.clients.new_process(self.faults.admin_host), self.scenario, self.clients.store)
        wanted = {key: self.checks.stable(key) + 1 for key in sorted(lost)}

        def work() -> None:
            admin = job.admin(client_id=process.name.replace("#", "-"))  # a generated id would differ between runs
            with admin.pause(job.group_id, PAUSE_INTERVALS * self.hi / 1000) as pause:
                pause.wait_released(timeout=PAUSE_INTERVALS * self.hi / 2000)
                pause.reposition(wanted, force=True)

        self.faults.administer("pause", process, work, Fault(self.scheduler.now / self.hi, "pause", "", 0.0, 0.5))

    def _wait(self, condition: Callable[[], bool], intervals: float) -> None:
        shift = max((abs(x) for x in self.network.clock_shift.values()), default=0.0)
        intervals += self.checks.accounts.parking.patience(self.checks.log.worlds)
        until = self.scheduler.now + intervals * self.scenario.longest_interval_ms + shift
        while not condition() and self.checks.broken is None:
            for key in (
                self.data.all_partitions()
            ):  # positions that an admin set beyond a log's end wait for messages: publish them
                self.data.fill_up_to(key, self.checks.stable(key) + 1)
            self._set_lost_positions()
            if self.scheduler.now >= until:
                late = f"not {_AIMS[condition.__name__]} within {intervals:.0f} HI after the last fault"
                self.checks.fail("liveness", f"{late} (partition: holder, done/messages): {self._state()}")
                return
            self.scheduler.run_until(self.scheduler.now + self.hi / 4)

    def _rest(self, until: float) -> None:
        """Continue without faults: once shares are even, no partition moves to another member."""
        rests_from = self.scheduler.now + REST_INTERVALS * self.scenario.longest_interval_ms
        holders, moved = self._holders(), list[Key]()
        while self.scheduler.now < until and self.checks.broken is None:
            self.scheduler.run_until(min(until, self.scheduler.now + self.hi))
            found = self._holders()
            moved = [key for key, names in found.items() if names.isdisjoint(holders.get(key, names))]
            if moved and self.scheduler.now > rests_from and self._is_shared_evenly():
                self.checks.fail("liveness", f"{moved[0]} moved although shares were even: {self._state()}")
            holders |= found

    def _holders(self) -> dict[Key, set[str]]:
        owners = self.checks.owners()
        return {key: {x.client_id for x, _ in owners[key]} for key in self.data.all_partitions() if owners.get(key)}

    def _fill(self) -> None:
        """Continue without faults until the log has its records; a worker that has finished may leave it short."""
        until = self.scheduler.now + FILLED_AFTER * self.scenario.intervals * self.hi
        while self.checks.counts["records"] < self.scenario.records and self.scheduler.now < until:
            if self.checks.broken is not None:
                return  # time does not advance
            self.scheduler.run_until(self.scheduler.now + self.hi)

    def _is_owned(self) -> bool:
        return all(map(self.checks.owners().get, self.data.all_partitions()))

    def _is_balanced(self) -> bool:
        """No client holds two partitions more than another; a topic that is whole has one holder."""
        if not self._is_shared_evenly():
            return True
        others = self._sharing
        held = dict.fromkeys((x.name for x in others), 0)
        by_topic: dict[str, set[str]] = {topic: set() for topic in self.scenario.data_topics}
        for key, owners in self.checks.owners().items():
            for process, _ in owners:
                if key[0] in by_topic:
                    held[process.client_id] += 1
                    by_topic[key[0]].add(process.client_id)
        if others[0].policy == "whole-topic":
            return all(len(holders) == 1 for holders in by_topic.values())
        # `range` assigns each topic separately (G17).
        most = len(by_topic) if self.scenario.strategy == "range" else 1
        return max(held.values()) - min(held.values()) <= most

    def _is_settled(self) -> bool:
        """In a group that takes checkpoints, no piece waits for a hand-over; nothing waits for another try."""
        accounts, worlds = self.checks.accounts, self.checks.log.worlds
        parts = accounts.parking, accounts.redoing
        return accounts.counted.is_settled and all(part.is_settled(worlds) for part in parts)

    @property
    def _sharing(self) -> list[Client]:
        return [x for x in self.scenario.clients if x.worker != "by-hand"]

    def _is_shared_evenly(self) -> bool:
        """Whether each client's share can be said: all want the same, and each is one process (no zombie is back)."""
        if self.scenario.sharing:  # each has a share of every partition, or what the others leave
            return False
        running = [x.client_id for x in self.clients.processes if x.is_running and not x.host.is_admin]
        if len(running) > len(set(running)) or (self.scenario.other_partitions and any(x.reads for x in self._sharing)):
            return False
        kinds = {(x.policy, x.worker == "yours") for x in self._sharing}
        return kinds == {("balanced", False)} or {policy for policy, _ in kinds} == {"whole-topic"}

    def _is_handled(self) -> bool:
        """Everything is handled except the lanes of hanging handlers."""
        waits = self.checks.accounts.ordering.waits
        return all(
            offset in self.checks.accounts.ledger(key).ever or waits(key, offset)
            for key in self.data.all_partitions()
            for offset in range(self.data.start(key), self.data.end(key))
        )

    def _is_drained(self) -> bool:
        if self.scenario.sharing and is_waiting(self.checks.log.worlds.values(), self.scenario.group_id):
            return False
        return all(self.checks.stable(key) >= self.data.end(key) - 1 for key in self.data.all_partitions())

    def _state(self) -> str:
        owners = self.checks.owners()
        return "; ".join(
            f"{key[0]} {key[1]}: {[p.name for p, _ in owners.get(key, [])]} "
            f"{self.checks.stable(key) + 1}/{self.data.end(key)}"
            for key in self.data.all_partitions()
        )

    def _look_back(self) -> None:
        """Checks that are possible at the end."""
        self.checks.members.check_in_hand(self.checks.consumers.values())
        back = [x for x in self.scenario.faults if x.kind == "term" and x.intervals < SOON_INTERVALS]
        if (
            back
            and all(x.worker == "terminates" for x in self.scenario.clients)
            and not self.checks.counts["takeovers"]
        ):
            self.checks.fail("takeover", f"no process took over from itself, in {len(back)} restarts within HI (C7)")
        self.checks.accounts.redoing.check()
        if self.scenario.at_most_once:
            # A process that ended with an error may not have seen its last grant.
            alive = [p for p in self.clients.processes if not p.dead and p.end.error is None]
            self.checks.check_granted(alive, {key: self.data.end(key) for key in self.data.all_partitions()})
            return
        self.checks.check_gaps(self.data.all_partitions())
        ends = {key: self.data.end(key) for key in self.data.all_partitions()}
        self.checks.accounts.parking.check(ends, self.checks.log.worlds)
        if self.scenario.transactions:
            self.checks.accounts.outputs.check_complete(self.data.all_partitions())
            self.checks.counts["outputs"] = self.checks.accounts.outputs.count
        if all(client.worker == "fenced" for client in self.scenario.clients):
            self.checks.check_sink({key: self.data.end(key) for key in self.data.all_partitions()})

    def result(self) -> Result:
        """What has come of it."""
        if self.checks.accounts.counted.is_on:
            self.checks.counts["checkpoints"] = self.checks.accounts.counted.states.completed
        if self.checks.accounts.redoing.is_on:
            self.checks.counts["opened"] = self.checks.accounts.redoing.opened
        self.checks.counts |= self.checks.accounts.parking.waits.counts
        return Result(
            self.scenario,
            self.checks.broken,
            tuple(self.checks.events),
            self.scheduler.now / self.hi,
            self.checks.counts,
            self.checks.log.kinds,
        )
