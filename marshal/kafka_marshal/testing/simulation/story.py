"""Runs a scenario: processes, faults, a supervisor, and the recovery."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from random import Random

from kafka_marshal import guard
from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.adapters.opening import announced
from kafka_marshal.errors import MarshalError
from kafka_marshal.logs import RateLimit
from kafka_marshal.node.coordination_topic import required_settings
from kafka_marshal.testing.simulation.batch_checks import BatchChecks, is_waiting
from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.clients import Clients
from kafka_marshal.testing.simulation.data import Data
from kafka_marshal.testing.simulation.faults import PAUSE_INTERVALS, Faults
from kafka_marshal.testing.simulation.in_checkpoints import PLANNED
from kafka_marshal.testing.simulation.interrupting import interrupted_between
from kafka_marshal.testing.simulation.network import Network, SimulatedCluster
from kafka_marshal.testing.simulation.outputs import OUTPUT_PARTITIONS, OUTPUTS
from kafka_marshal.testing.simulation.patched_stdlib import simulated_stdlib
from kafka_marshal.testing.simulation.process import BOOTSTRAP, Job, Process, Worker
from kafka_marshal.testing.simulation.recorded import Judge
from kafka_marshal.testing.simulation.scenario import Client, Fault, Scenario
from kafka_marshal.testing.simulation.scheduler import Scheduler
from kafka_marshal.testing.simulation.stall_detector import failing_on_hangs
from kafka_marshal.testing.simulation.violation import Violation
from kafka_marshal.testing.simulation.workers import HAND_PARTITIONS, HAND_TOPIC
from kafka_marshal.topic_names import snapshots_topic
from kafka_marshal.types import Key
from rationalizer import ConfigureGroup, Record, Upgrade, encode, outcome, route_group, snapshot_log, world
from rationalizer.levels import CHECKPOINTS_LEVEL, GROUPS_LEVEL, SHARING_LEVEL
from rationalizer.marker import marker
from rationalizer.wire.records import Kind
from rationalizer.wire.unpacking import Message

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
    with quiet(), decoded_once(), _snapshots_every(scenario.snapshots):
        story = _Story(scenario, worker, judge)
        try:
            with (
                announced(BOOTSTRAP, story.open_cluster),
                simulated_stdlib(story.scheduler, worker),
                interrupted_between(story.scheduler.interrupt),
                failing_on_hangs(story.scheduler, story.checks),
                failing_on_errors(story.scheduler, story.checks),
            ):
                story.run()
                story.scheduler.close()
        finally:
            story.scheduler.close()
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


class _Story:
    def __init__(self, scenario: Scenario, worker: Worker | None, judge: Judge | None = None) -> None:
        self.scenario = scenario
        self.hi = float(scenario.heartbeat_interval_ms)
        self.scheduler = Scheduler()
        self.checks = (BatchChecks if scenario.sharing else Checks)(scenario, self.scheduler, judge)
        self.broker = MemoryBroker(lambda: self.network.broker_clock())
        self.network = Network(self.scheduler, self.broker, scenario.topic)
        self.network.on_record = self.checks.record
        self.network.on_snapshot = self.checks.snapshot
        self.scheduler.on_spin = lambda task: self.checks.fail(
            "busy waiting", f"a thread ({task.name}) of {getattr(task.process, 'name', '')} goes round and round"
        )
        self.checks.accounts.outputs.broker = self.broker
        self.network.on_ended = self.checks.accounts.outputs.committed
        self.data = Data(scenario, self.scheduler, self.broker, self.network)
        self.checks.end_of = self.data.end_if_any
        self.data.on_message = self.checks.accounts.published
        self.clients = Clients(scenario, self.network, self.checks, worker)
        self.checks.accounts.counted.states.files = self.clients.store.files
        self.faults = Faults(scenario, self.network, self.checks, self.clients, self.data)

    # Setting up.

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
            if scenario.strategy is not None or scenario.parks or scenario.sharing:
                level = GROUPS_LEVEL if scenario.checkpoints is None else CHECKPOINTS_LEVEL
                level = SHARING_LEVEL if scenario.parks or scenario.sharing else level
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
        accounts = self.checks.accounts
        return accounts.counted.is_settled and accounts.parking.is_settled(self.checks.log.worlds)

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
        return Result(
            self.scenario,
            self.checks.broken,
            tuple(self.checks.events),
            self.scheduler.now / self.hi,
            self.checks.counts,
            self.checks.log.kinds,
        )
