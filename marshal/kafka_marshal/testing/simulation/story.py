"""Runs a scenario: processes, faults, a supervisor, and the wait for everything to be well again."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from hashlib import sha256
from random import Random

from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.adapters.opening import announced
from kafka_marshal.admin.prune import DEFAULT_KEEP, LEAST_KEEP
from kafka_marshal.errors import MarshalError
from kafka_marshal.node.coordination_topic import required_settings, snapshots_topic
from kafka_marshal.testing.simulation.checks import Checks, Judge, Violation
from kafka_marshal.testing.simulation.decoding import decoded_once
from kafka_marshal.testing.simulation.interrupting import interrupted_between
from kafka_marshal.testing.simulation.logs import overheard
from kafka_marshal.testing.simulation.network import Network, SimulatedCluster, Trouble
from kafka_marshal.testing.simulation.patched_stdlib import surroundings
from kafka_marshal.testing.simulation.process import BOOTSTRAP, Host, Job, Process, Store, Worker, is_expected
from kafka_marshal.testing.simulation.scenario import Fault, Scenario
from kafka_marshal.testing.simulation.scheduler import Scheduler
from kafka_marshal.testing.simulation.stall_detector import noticed_when_hanging
from kafka_marshal.testing.simulation.workers import HAND_PARTITIONS, HAND_TOPIC, built_in, host_of
from kafka_marshal.types import Key
from rationalizer import encode, snapshot_log
from rationalizer.marker import marker

__all__ = ["Result", "simulate_one"]

#: When the faults are over: a dead holder's 2 · HI, the end of a pause, some rounds of wishes.
RECOVERY_INTERVALS = 30
#: What does not get shorter with HI: topics are looked at every 5 s, a look-up may take 5 s (ms).
RECOVERY_MS = 12_000
#: For what there is left to do, beside the time that the work itself takes.
DRAIN_INTERVALS = 60
#: A worker that has ended is started again after so many HI.
RESTART_INTERVALS = 0.5
#: Messages that come together, on the average.
BURST = 12
#: How many HI's messages are there at the start.
AT_START = 7
#: How long a story goes on, in shares of the faulty time, if it is well again by then: a hundred HI, usually.
CALM_AFTER = 1.14
#: How much longer it may go on until the log has its records, in the same shares: one slow member may hold all.
FILLED_AFTER = 4.0
#: How long an admin's pause lasts where nobody ends it, at most (HI).
PAUSE_INTERVALS = 10
#: Offsets without a message, one after the other.
MARKERS = 3
#: Who ends without a release and is back within this takes over what he had.
SOON_INTERVALS = 0.2

#: How long Kafka may be silent for somebody who prunes.
PRUNE_TIMEOUT_S = 2.0


#: What is waited for, by the name of the condition.
_AIMS = {"_is_owned": "everything owned", "_is_drained": "everything done", "_is_balanced": "everybody's share even"}


@dataclass(frozen=True, slots=True)
class Result:
    """What one run has shown."""

    scenario: Scenario
    violation: Violation | None
    #: What happened, in order; empty where it was thrown away.
    events: tuple[tuple[object, ...], ...]
    #: Virtual time, in HI.
    intervals: float
    counts: dict[str, int] = field(default_factory=dict)
    outcomes: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def history_digest(self) -> str:
        """Of everything that happened, in order: the same for the same scenario and code, byte for byte."""
        digest = sha256()
        for event in self.events:
            digest.update(repr(event).encode())
        return digest.hexdigest()

    def history(self) -> Iterator[str]:
        """What happened, a line each."""
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
    """Run one scenario; worker: what its clients "yours" run; judge: a second opinion on each record of the log.

    Raises nothing for a broken promise: see the result.
    """
    with quiet(), decoded_once(), _snapshots_every(scenario.snapshots):
        story = _Story(scenario, worker, judge)
        try:
            with (
                announced(BOOTSTRAP, story.open_cluster),
                surroundings(story.scheduler, worker),
                interrupted_between(story.scheduler.interrupt),
                noticed_when_hanging(story.scheduler, story.checks),
                overheard(story.scheduler, story.checks),
            ):
                story.run()
                story.scheduler.close()
        finally:
            story.scheduler.close()
    return story.result()


@contextmanager
def _snapshots_every(records: int) -> Iterator[None]:
    """A story's log is short: with the protocol's own number (S2) there would never be a snapshot."""
    name = "SNAPSHOT_INTERVAL"
    before = getattr(snapshot_log, name)
    setattr(snapshot_log, name, records or before)
    try:
        yield
    finally:
        setattr(snapshot_log, name, before)


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings of simulated trouble are nobody's business, and garbage is collected between runs, not in them."""
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
        self.checks = Checks(scenario, self.scheduler, judge)
        self.broker = MemoryBroker(lambda: self.network.broker_clock())
        self.network = Network(self.scheduler, self.broker, scenario.topic)
        self.network.on_record = self.checks.record
        self.checks.end_of = self._end_if_any
        self.network.on_snapshot = self.checks.snapshot
        self.scheduler.on_spin = lambda task: self.checks.fail(
            "busy waiting", f"a thread ({task.name}) of {getattr(task.process, 'name', '')} goes round and round"
        )
        self._worker = worker
        self._store = Store()
        self._clients = {client.name: client for client in scenario.clients}
        self._hosts = {client.name: host_of(client, self.hi) for client in scenario.clients}
        for name, host in self._hosts.items():
            host.is_interrupted = scenario.is_interrupted(name)
        self._admin_host = Host("admin", is_admin=True)
        self._processes: list[Process] = []
        #: Faults that last, by client.
        self._active: dict[str, list[Fault]] = {client.name: [] for client in scenario.clients}
        self._started: dict[str, int] = {}
        #: Until when (virtual ms) a client is not started again.
        self._away: dict[str, float] = {}
        self._is_faulty = True
        #: Messages that come in all.
        self._published = 0

    # Setting up.

    def _make_topics(self) -> None:
        scenario = self.scenario
        cps = scenario.coordination_partitions
        self.broker.create_topic(scenario.topic, cps, 1, required_settings(1))
        if scenario.snapshots:
            self.broker.create_topic(snapshots_topic(scenario.topic), cps, 1, required_settings(1))
        init = Process("init", self._admin_host, self.network, self.checks, scenario.seed)
        for cp in range(cps):
            self.network.arrive(scenario.topic, cp, encode(marker("init", cps)), init, 0.0)
        for topic, partitions in scenario.data_topics.items():
            self.broker.create_topic(topic, partitions)
        self.broker.create_topic(HAND_TOPIC, HAND_PARTITIONS)
        rng = Random(f"{scenario.seed}/messages")
        # In the order of time, so that a story that ends sooner has the same beginning.
        at, last, rate = 0.0, 0.95 * scenario.intervals, scenario.messages
        while at < last:
            burst = int(rng.expovariate(1 / BURST)) + 1
            self.scheduler.call_at(min(at, last) * self.hi, partial(self._publish, rng.random(), burst))
            if self._published > AT_START * rate:
                at += rng.expovariate(rate / burst)
            self._published += burst
        if (missing := int(0.95 * rate * scenario.intervals) - self._published) > 0:
            self.scheduler.call_at(last * self.hi, partial(self._publish, rng.random(), missing))
            self._published += missing

    def _publish(self, chance: float, burst: int) -> None:
        keys = self._keys()
        for _ in range(burst):
            self.network.publish(*keys[int(chance * len(keys))], b"")

    def _partitions(self, topic: str) -> int:
        return self.broker.existing[topic].info.partitions

    def open_cluster(self, config: object) -> SimulatedCluster:
        """What Marshal("simulation://kafka") gets in the process that asks."""
        task = self.scheduler.current
        if task is None or not isinstance(task.process, Process):
            raise MarshalError("simulation://kafka is there for the processes of a simulation only")
        return task.process.cluster()

    # Processes.

    def _new_process(self, host: Host) -> Process:
        number = self._started[host.name] = self._started.get(host.name, 0) + 1
        interval_ms = self.scenario.interval_of(host.name, number)
        process = Process(f"{host.name}#{number}", host, self.network, self.checks, self.scenario.seed, interval_ms)
        self._processes.append(process)
        return process

    def start(self, name: str) -> None:
        """Start a client's worker, unless one runs, or it is to stay away."""
        if self.running(name) is not None or self.scheduler.now < self._away.get(name, 0.0):
            return
        client = self._clients[name]
        process = self._new_process(self._hosts[name])
        job = process.work.job = Job(process, self.scenario, self._store)
        job.slowness = self._slowness(name)
        worker = self._worker if client.worker == "yours" and self._worker is not None else built_in(client)
        self._note("start", process.name)
        process.run(lambda: worker(job), lambda: self._ended(process, name))

    def _ended(self, process: Process, name: str) -> None:
        self._note("end", process.name, type(process.end.error).__name__)
        if not is_expected(process.end.error):
            self.checks.fail("worker", f"{process.name} raised {process.end.error!r}")
        self.checks.forget(process)
        self._later(RESTART_INTERVALS, lambda: self.start(name))

    def running(self, name: str) -> Process | None:
        """A client's process that has not died, ended or been stopped; the newest."""
        alive = [p for p in self._processes if p.client_id == name and not p.dead and not p.end.ended]
        return next((p for p in reversed(alive) if p.stopped_until <= self.scheduler.now or not p.end.replaced), None)

    def _kill(self, process: Process) -> None:
        process.kill()
        self.checks.forget(process)

    def _later(self, intervals: float, function: Callable[[], object]) -> None:
        self.scheduler.call_at(self.scheduler.now + intervals * self.hi, function)

    def _note(self, name: str, *what: object) -> None:
        self.checks.events.append((name, self.scheduler.now, *what))

    # Faults.

    def _befall(self, fault: Fault) -> None:
        if not self._is_faulty:
            return
        self._note("fault", fault.kind, fault.client, fault.intervals, fault.size, fault.partition)
        process = self.running(fault.client) if fault.client else None
        match fault.kind:
            case "crash" | "term" | "stop" | "zombie":
                if process is not None:
                    self._strike(process, fault)
            case "grow":
                topics = list(self.scenario.data_topics.items())
                topic, before = topics[fault.partition % len(topics)]
                if self._partitions(topic) < before + 4:
                    self.broker.grow_topic(topic, self._partitions(topic) + 1)
            case "pause" | "forget":
                self._pause(fault)
            case "prune":
                self._prune(fault)
            case "retention":
                self._cut(fault)
            case "markers":
                key = self._keys()[fault.partition % len(self._keys())]
                self.checks.no_messages(key, range(self._end(key), self._end(key) + MARKERS))
                self.network.skip(*key, MARKERS)
            case "clock":
                cp = fault.partition % self.scenario.coordination_partitions
                shift = self.network.clock_shift
                shift[cp] = shift.get(cp, 0.0) + fault.size * self.hi
            case _:
                for name in [fault.client] if fault.client else list(self._active):
                    if name in self._active:
                        self._active[name].append(fault)
                        self._refresh(name)
                        self._later(fault.intervals, partial(self._heal, name, fault))

    def _cut(self, fault: Fault) -> None:
        """Old messages go, handled or not (P9)."""
        keys, turn = self._keys(), int(fault.at) if self.scenario.other_partitions else 0
        topic, partition = key = keys[(fault.partition + turn) % len(keys)]
        log = self.broker.existing[topic].partitions[partition]
        before = log.start + round(fault.size * (log.end - log.start))
        self.network.cut_below(*key, before)
        self.checks.left_out.cut(key, before)

    def _strike(self, process: Process, fault: Fault) -> None:
        name, back = process.client_id, partial(self.start, process.client_id)
        if fault.kind == "crash":
            self._kill(process)
            self._later(fault.intervals, back)
        elif fault.kind == "term":
            if not process.send_sigterm():
                self._kill(process)
            self._away[name] = self.scheduler.now + fault.intervals * self.hi
            self._later(fault.intervals, back)
        else:
            process.stopped_until = max(process.stopped_until, self.scheduler.now + fault.intervals * self.hi)
            if fault.kind == "zombie":
                process.end.replaced = True
                self._later(0.1, lambda: self.start(name))

    def _heal(self, name: str, fault: Fault) -> None:
        if fault in self._active[name]:
            self._active[name].remove(fault)
            self._refresh(name)

    def _refresh(self, name: str) -> None:
        """A host's trouble is what its faults make of it."""
        trouble, fresh = self._hosts[name].trouble, Trouble()
        for fault in self._active[name]:
            match fault.kind:
                case "lost":
                    fresh.loss = max(fresh.loss, fault.size)
                case "unacknowledged":
                    fresh.ack_loss = max(fresh.ack_loss, fault.size)
                case "duplicated":
                    fresh.duplicates = max(fresh.duplicates, fault.size)
                case "late":
                    fresh.late = max(fresh.late, fault.size / 2)
                case "slow network":
                    fresh.latency_ms = max(fresh.latency_ms, fault.size * self.hi)
                case "deaf":
                    cp = fault.partition % self.scenario.coordination_partitions
                    fresh.deaf_until[cp] = self.scheduler.now + fault.intervals * self.hi
                case "interrupts":
                    fresh.interrupts = max(fresh.interrupts, fault.size / 4)
                case "torn reads":
                    fresh.torn_reads = max(fresh.torn_reads, fault.size / 2)
                case "cut off" | "outage":
                    fresh.is_cut_off = True
        for part in fields(Trouble):
            setattr(trouble, part.name, getattr(fresh, part.name))
        for process in self._processes:
            if process.client_id == name and process.work.job is not None:
                process.work.job.slowness = self._slowness(name)

    def _slowness(self, name: str) -> float:
        slow = [fault.size for fault in self._active[name] if fault.kind == "slow handler"]
        return 1.0 + 2 * self.hi / self.scenario.handling_ms * max(slow, default=0.0) / 10

    def _pause(self, fault: Fault) -> None:
        """An admin pauses the group for a while; it may die of it, and the pause ends by itself then.

        It moves positions (C11), or has the group forgotten (C16).
        """
        process = self._new_process(self._admin_host)
        job = Job(process, self.scenario, self._store)
        rng = Random(f"{self.scenario.seed}/{process.name}")

        def work() -> None:
            admin = job.admin(client_id=process.name.replace("#", "-"))
            expires_s = PAUSE_INTERVALS * self.hi / 1000
            with admin.pause(job.group_id, expires_in=expires_s) as pause:
                job.sleep(fault.intervals * self.hi / 1000 / 2)
                pause.wait_released(timeout=expires_s / 2)
                if fault.kind == "forget":
                    self.checks.counts["forgotten"] += pause.forget()
                elif fault.size > 0.5:
                    parts = self.scenario.data_topics.items()
                    keys = [(topic, p) for topic, count in parts for p in range(count) if rng.random() < 0.3]
                    targets: list[int | str] = ["earliest", "latest", self._middle(rng)]
                    wanted = {key: rng.choice(targets) for key in keys}
                    pause.reposition(wanted, force=True)
                    self._note("moved", process.name)
                    self._check_moved(process, wanted)

        self._administer(fault.kind, process, work, fault)

    def _prune(self, fault: Fault) -> None:
        """An admin removes what a start does not need any more; members may be far behind, and he may die of it."""
        process = self._new_process(self._admin_host)
        job = Job(process, self.scenario, self._store)

        def work() -> None:
            plan = job.admin().prune(keep=LEAST_KEEP if fault.size < 0.5 else DEFAULT_KEEP, timeout=PRUNE_TIMEOUT_S)
            self.checks.counts["pruned"] += plan.records_removed
            self._note("pruned", process.name, plan.records_removed, plan.snapshots_removed)
            for found in plan.differences:
                self.checks.fail("snapshots", f"a prune found a snapshot that the log does not bear out: {found}")

        self._administer("prune", process, work, fault)

    def _administer(self, name: str, process: Process, work: Callable[[], None], fault: Fault) -> None:
        def ended() -> None:
            self._note("end", process.name, type(process.end.error).__name__)
            if not is_expected(process.end.error):
                self.checks.fail("admin", f"{process.name} raised {process.end.error!r}")
            self.checks.forget(process)

        self._note(name, process.name)
        process.run(work, ended)
        if fault.size > 0.9 or fault.size < 0.1:
            self._later(fault.intervals, lambda: self._kill(process))

    def _check_moved(self, process: Process, wanted: dict[Key, int | str]) -> None:
        """What an admin says that he moved is where he wants it (C11), as long as nobody works."""
        for key, target in wanted.items():
            position = self.broker.existing[key[0]].partitions[key[1]].start if target == "earliest" else target
            if isinstance(position, int) and self.checks.stable(key) != position - 1:
                at = self.checks.stable(key) + 1
                self.checks.fail("moved", f"{process.name} put {key} at {target}, and the group goes on at {at} (C11)")

    def _middle(self, rng: Random) -> int:
        return rng.randint(0, int(20 * self.scenario.messages / self.scenario.data_partitions) + 1)

    # The course of events.

    def run(self) -> None:
        """Faults for so many intervals; then everything must be owned, and drained, in time."""
        self._make_topics()
        rng = Random(f"{self.scenario.seed}/start")
        for name in self._clients:
            self._later(rng.random() + self._clients[name].joins, partial(self.start, name))
        for fault in self.scenario.faults:
            self.scheduler.call_at(fault.at * self.hi, partial(self._befall, fault))
        self.scheduler.run_until(self.scenario.intervals * self.hi)
        if not self.scenario.recovers:
            return
        self._mend()
        fixed = RECOVERY_MS / self.hi
        times = 1 + sum(fault.kind == "forget" for fault in self.scenario.faults)
        backlog = times * self._published * self.scenario.handling_ms * 2 / self.hi
        self._wait(self._is_owned, RECOVERY_INTERVALS + PAUSE_INTERVALS + fixed)
        self._wait(self._is_drained, DRAIN_INTERVALS + backlog)
        self._wait(self._is_owned, RECOVERY_INTERVALS)
        self._wait(self._is_balanced, RECOVERY_INTERVALS)
        if self.scenario.clocks_are_trusted:
            self.checks.manners.calm_since = self.scheduler.now
        self.scheduler.run_until(max(self.scheduler.now, CALM_AFTER * self.scenario.intervals * self.hi))
        self._fill()
        if self.checks.broken is None:
            self._look_back()

    def _mend(self) -> None:
        """Faults are over; what was stopped goes on, what died is there again."""
        self._is_faulty = False
        self._away.clear()
        self._note("mended")
        for name in self._clients:
            self._active[name].clear()
            self._refresh(name)
        for process in self._processes:
            if process.stopped_until > self.scheduler.now:
                process.stopped_until = self.scheduler.now
                self.scheduler.go_on(process)
        for name in self._clients:
            self._later(RESTART_INTERVALS, partial(self.start, name))

    def _come_as_far(self) -> None:
        """What an admin has put beyond the end of a log waits for messages: now they come, to the last one at least."""
        for key in self._keys():
            for _ in range(self._end(key), self.checks.stable(key) + 1):
                self.network.publish(*key, b"")
                self._published += 1

    def _set_lost_positions(self) -> None:
        """An operator sets what members leave alone (P11), to where the group stands: its messages have come by now."""
        consumers = [consumer for process, consumer in self.checks.consumers.values() if process.is_running]
        lost = {(one.topic, one.partition) for consumer in consumers for one in consumer.positions.stuck.lost}
        if not lost or any(process.host.is_admin and process.is_running for process in self._processes):
            return
        job = Job(process := self._new_process(self._admin_host), self.scenario, self._store)
        wanted = {key: self.checks.stable(key) + 1 for key in sorted(lost)}

        def work() -> None:
            with job.admin().pause(job.group_id, PAUSE_INTERVALS * self.hi / 1000) as pause:
                pause.wait_released(timeout=PAUSE_INTERVALS * self.hi / 2000)
                pause.reposition(wanted, force=True)

        self._administer("pause", process, work, Fault(self.scheduler.now / self.hi, "pause", "", 0.0, 0.5))

    def _wait(self, condition: Callable[[], bool], intervals: float) -> None:
        shift = max((abs(x) for x in self.network.clock_shift.values()), default=0.0)
        until = self.scheduler.now + intervals * self.scenario.longest_interval_ms + shift
        while not condition() and self.checks.broken is None:
            self._come_as_far()
            self._set_lost_positions()
            if self.scheduler.now >= until:
                late = f"not {_AIMS[condition.__name__]} within {intervals:.0f} HI after the last fault"
                self.checks.fail("liveness", f"{late} (partition: holder, done/messages): {self._state()}")
                return
            self.scheduler.run_until(self.scheduler.now + self.hi / 4)

    def _fill(self) -> None:
        """Go on, calmly, until the log has its records; a worker that has ended all it does may leave it short."""
        until = self.scheduler.now + FILLED_AFTER * self.scenario.intervals * self.hi
        while self.checks.counts["records"] < self.scenario.records and self.scheduler.now < until:
            if self.checks.broken is not None:
                return  # time stands still
            self.scheduler.run_until(self.scheduler.now + self.hi)

    def _keys(self) -> list[Key]:
        return [(topic, part) for topic in self.scenario.data_topics for part in range(self._partitions(topic))]

    def _end(self, key: Key) -> int:
        return self.broker.existing[key[0]].partitions[key[1]].end

    def _end_if_any(self, key: Key) -> int | None:
        """None: it is a name that somebody claimed, and no topic has it."""
        topic = self.broker.existing.get(key[0])
        return topic.partitions[key[1]].end if topic is not None and key[1] < len(topic.partitions) else None

    def _is_owned(self) -> bool:
        return all(map(self.checks.owners().get, self._keys()))

    def _is_balanced(self) -> bool:
        """Where everybody shares evenly, nobody holds two more than anybody else; a topic that is whole has one holder.

        Two processes of one client_id, which a zombie's return leaves, count as one, and are not asked.
        """
        names = [process.client_id for process in self._processes if process.is_running and not process.host.is_admin]
        if len(names) > len(set(names)):
            return True
        others = [x for x in self.scenario.clients if x.worker != "by-hand"]
        if self.scenario.other_partitions and any(x.reads for x in others):
            return True  # who may have what is another question there
        whole = all(x.policy == "whole-topic" for x in others)
        if any(x.policy != "balanced" or x.worker == "yours" for x in others) and not whole:
            return True
        held = dict.fromkeys((x.name for x in others), 0)
        by_topic: dict[str, set[str]] = {topic: set() for topic in self.scenario.data_topics}
        for key, owners in self.checks.owners().items():
            for process, _ in owners:
                if key[0] in by_topic:
                    held[process.client_id] += 1
                    by_topic[key[0]].add(process.client_id)
        if whole:
            return all(len(holders) == 1 for holders in by_topic.values())
        return max(held.values()) - min(held.values()) <= 1

    def _is_drained(self) -> bool:
        return all(self.checks.stable(key) >= self._end(key) - 1 for key in self._keys())

    def _state(self) -> str:
        owners = self.checks.owners()
        return "; ".join(
            f"{key[0]} {key[1]}: {[p.name for p, _ in owners.get(key, [])]} "
            f"{self.checks.stable(key) + 1}/{self._end(key)}"
            for key in self._keys()
        )

    def _look_back(self) -> None:
        """What can be said when all is done."""
        self.checks.manners.check_in_hand(self.checks.consumers.values())
        back = [x for x in self.scenario.faults if x.kind == "term" and x.intervals < SOON_INTERVALS]
        if (
            back
            and all(x.worker == "terminates" for x in self.scenario.clients)
            and not self.checks.counts["takeovers"]
        ):
            self.checks.fail("takeover", f"nobody took over from himself, in {len(back)} restarts within HI (C7)")
        if self.scenario.at_most_once:
            # One that was ended by an error may not have seen any more what it had been granted.
            alive = [p for p in self._processes if not p.dead and p.end.error is None]
            self.checks.check_granted(alive, {key: self._end(key) for key in self._keys()})
            return
        self.checks.check_gaps(self._keys())
        if all(client.worker == "fenced" for client in self.scenario.clients):
            self.checks.check_sink({key: self._end(key) for key in self._keys()})

    def result(self) -> Result:
        """What has come of it."""
        return Result(
            self.scenario,
            self.checks.broken,
            tuple(self.checks.events),
            self.scheduler.now / self.hi,
            self.checks.counts,
            self.checks.outcomes,
        )
