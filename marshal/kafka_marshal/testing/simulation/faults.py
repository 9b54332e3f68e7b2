"""The clients and the data topics of a story, and the faults that befall a client, its host, the log or the group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from random import Random

from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.admin.redo import RedoPlan
from kafka_marshal.snapshots.prune import DEFAULT_KEEP, LEAST_KEEP
from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.in_batches import settle_by_hand
from kafka_marshal.testing.simulation.in_redos import RedoOperator
from kafka_marshal.testing.simulation.living import Host, Trouble
from kafka_marshal.testing.simulation.network import Network
from kafka_marshal.testing.simulation.process import Contents, Job, Process, Worker, is_expected
from kafka_marshal.testing.simulation.scenario import Fault, Scenario
from kafka_marshal.testing.simulation.scheduler import Scheduler
from kafka_marshal.testing.simulation.workers import built_in, host_of
from kafka_marshal.types import Key
from rationalizer import Rollback, encode, route_group

#: An ended worker is restarted after this many HI.
RESTART_INTERVALS = 0.5


class Clients:
    """All processes of a story, of workers and of admins."""

    def __init__(self, scenario: Scenario, network: Network, checks: Checks, worker: Worker | None) -> None:
        self._scenario = scenario
        self._hi = float(scenario.heartbeat_interval_ms)
        self._scheduler = network.scheduler
        self._network = network
        self._checks = checks
        self._worker = worker
        self.store: Contents = Contents()
        self._clients = {client.name: client for client in scenario.clients}
        self.hosts: dict[str, Host] = {client.name: host_of(client, self._hi) for client in scenario.clients}
        for name, host in self.hosts.items():
            host.is_interrupted = scenario.is_interrupted(name)
        self.processes: list[Process] = []
        self._started: dict[str, int] = {}
        #: Virtual time (ms) until which a client is not restarted.
        self.away: dict[str, float] = {}
        #: Current slowdown of a client's work (1: none).
        self.slowness: Callable[[str], float] = lambda _: 1.0

    def new_process(self, host: Host) -> Process:
        """A new process on a host."""
        number = self._started[host.name] = self._started.get(host.name, 0) + 1
        interval_ms = self._scenario.interval_of(host.name, number)
        process = Process(f"{host.name}#{number}", host, self._network, self._checks, self._scenario.seed, interval_ms)
        self.processes.append(process)
        return process

    def start(self, name: str) -> None:
        """Start a client's worker unless one runs or the client must stay away."""
        if self.running(name) is not None or self._scheduler.now < self.away.get(name, 0.0):
            return
        client = self._clients[name]
        process = self.new_process(self.hosts[name])
        job = process.work.job = Job(process, self._scenario, self.store)
        job.slowness = self.slowness(name)
        job.on_death = self._dies
        worker = (
            self._worker
            if client.worker == "yours" and self._worker is not None
            else built_in(client, self._scenario.checkpoints)
        )
        self.note("start", process.name)
        process.run(lambda: worker(job), lambda: self._ended(process, name))

    def _ended(self, process: Process, name: str) -> None:
        self.note("end", process.name, type(process.end.error).__name__)
        if not is_expected(process.end.error):
            self._checks.fail("worker", f"{process.name} raised {process.end.error!r}")
        self._checks.forget(process)
        self.later(RESTART_INTERVALS, lambda: self.start(name))

    def running(self, name: str) -> Process | None:
        """The newest process of a client that has not died, ended or been stopped."""
        alive = [p for p in self.processes if p.client_id == name and not p.dead and not p.end.ended]
        return next((p for p in reversed(alive) if p.stopped_until <= self._scheduler.now or not p.end.replaced), None)

    def _dies(self, process: Process) -> None:
        """A message kills it; it is restarted."""
        self.note("dies", process.name)
        self.kill(process)
        self.later(RESTART_INTERVALS, lambda: self.start(process.client_id))

    def kill(self, process: Process) -> None:
        """kill -9."""
        process.kill()
        self._checks.forget(process)

    def later(self, intervals: float, function: Callable[[], object]) -> None:
        """Call this after ``intervals`` HI."""
        self._scheduler.call_at(self._scheduler.now + intervals * self._hi, function)

    def note(self, name: str, *what: object) -> None:
        """Add a line to the story's history."""
        self._checks.events.append((name, self._scheduler.now, *what))


#: Mean number of messages in a burst.
BURST = 12
#: The messages of this many HI exist at the start.
AT_START = 7
#: In stories with lanes: message keys and their weights.
MESSAGE_KEYS: dict[bytes | None, float] = {None: 1.0, b"a": 4.0, b"b": 2.0, b"c": 1.3, b"d": 1.0, b"e": 0.8}


class Data:
    """The data topics of one story."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, broker: MemoryBroker, network: Network) -> None:
        self._scenario = scenario
        self._scheduler = scheduler
        self._broker = broker
        self._network = network
        #: Number of messages of the whole story.
        self.published: int = 0
        #: Called with each message's partition, offset and key.
        self.on_message: Callable[[Key, int, bytes | None], object] = lambda *_: None
        #: Random source of keys.
        self._rng = Random(f"{scenario.seed}/keys")

    def plan(self) -> None:
        """Create the topics and schedule their messages."""
        scenario, hi = self._scenario, float(self._scenario.heartbeat_interval_ms)
        for topic, partitions in scenario.data_topics.items():
            self._broker.create_topic(topic, partitions)
        if not scenario.messages:
            return
        rng = Random(f"{scenario.seed}/messages")
        # In order of time, so that a shorter story has the same beginning.
        at, last, rate = 0.0, 0.95 * scenario.intervals, scenario.messages
        while at < last:
            burst = int(rng.expovariate(1 / BURST)) + 1
            self._scheduler.call_at(min(at, last) * hi, partial(self._publish, rng.random(), burst))
            if self.published > AT_START * rate:
                at += rng.expovariate(rate / burst)
            self.published += burst
        if (missing := int(0.95 * rate * scenario.intervals) - self.published) > 0:
            self._scheduler.call_at(last * hi, partial(self._publish, rng.random(), missing))
            self.published += missing

    def _publish(self, drawn: float, burst: int) -> None:
        keys = self.all_partitions()
        for _ in range(burst):
            self._add(keys[int(drawn * len(keys))])

    def _add(self, key: Key) -> None:
        """Publish one message to a partition."""
        has_key = self._scenario.order is not None
        drawn = self._rng.choices(list(MESSAGE_KEYS), list(MESSAGE_KEYS.values()))[0] if has_key else None
        self.on_message(key, self._network.publish(*key, b"", drawn), drawn)

    def fill_up_to(self, key: Key, end: int) -> None:
        """Publish messages until a partition ends at ``end``."""
        for _ in range(self.end(key), end):
            self._add(key)
            self.published += 1

    def count(self, topic: str) -> int:
        """The present number of a topic's partitions."""
        return self._broker.existing[topic].info.partitions

    def all_partitions(self) -> list[Key]:
        """All partitions of all data topics."""
        return [(topic, part) for topic in self._scenario.data_topics for part in range(self.count(topic))]

    def start(self, key: Key) -> int:
        """The offset of the first retained message."""
        return self._broker.existing[key[0]].partitions[key[1]].start

    def end(self, key: Key) -> int:
        """The offset after the last message."""
        return self._broker.existing[key[0]].partitions[key[1]].end

    def end_if_any(self, key: Key) -> int | None:
        """The end offset; None if the partition is only a claimed name without a topic."""
        topic = self._broker.existing.get(key[0])
        return topic.partitions[key[1]].end if topic is not None and key[1] < len(topic.partitions) else None

    def grow(self, topic: str, most: int) -> None:
        """Add a partition, up to ``most``."""
        if self.count(topic) < most:
            self._broker.grow_topic(topic, self.count(topic) + 1)


#: Longest duration of an admin's pause if no one ends it (HI).
PAUSE_INTERVALS = 10
#: Consecutive offsets without a message.
MARKERS = 3
#: Another program commits an offset that is away from the group's by up to half of this.
FOREIGN = 20
#: Time-out of an admin's requests while it prunes.
PRUNE_TIMEOUT_S = 2.0
#: Time-out of an operator's rollback.
TIMEOUT_S = 5.0


class FaultInjector:
    """The faults of one story."""

    def __init__(self, scenario: Scenario, network: Network, checks: Checks, clients: Clients, data: Data) -> None:
        self._scenario = scenario
        self._hi = float(scenario.heartbeat_interval_ms)
        self._scheduler = network.scheduler
        self._network = network
        self._checks = checks
        self._clients = clients
        self._data = data
        self.admin_host: Host = Host("admin", is_admin=True)
        #: Active faults by client.
        self._active: dict[str, list[Fault]] = {client.name: [] for client in scenario.clients}
        self._are_over = False
        clients.slowness = self._slowness

    def befall(self, fault: Fault) -> None:
        """Inject a fault now unless the time of faults is over."""
        if self._are_over:
            return
        self._clients.note("fault", fault.kind, fault.client, fault.intervals, fault.size, fault.partition)
        process = self._clients.running(fault.client) if fault.client else None
        match fault.kind:
            case "crash" | "term" | "stop" | "zombie":
                if process is not None:
                    self._strike(process, fault)
            case "hang":
                if process is not None and process.work.job is not None:
                    process.work.job.hangs_next = True
            case "grow":
                topics = list(self._scenario.data_topics.items())
                topic, before = topics[fault.partition % len(topics)]
                self._data.grow(topic, before + 4)
            case "go back":
                if process is not None and process.work.job is not None:
                    process.work.job.goes_back = True
            case "deploy" | "rollback" | "late rollback":
                self._of_checkpoints(fault)
            case "pause" | "forget" | "brief pause":
                self._pause(fault)
            case "prune":
                self._prune(fault)
            case "evict":
                self._evict(fault)
            case "settles":
                self._settle(fault)
            case "redoes":
                self._redo(fault, [])
            case "retention":
                self._cut(fault)
            case "markers":
                key = self._data.all_partitions()[fault.partition % len(self._data.all_partitions())]
                self._checks.accounts.no_messages(key, range(self._data.end(key), self._data.end(key) + MARKERS))
                self._network.skip(*key, MARKERS)
            case "foreign commit" | "dropped offset":
                keys = self._data.all_partitions()
                self._change_offset(keys[fault.partition % len(keys)], fault)
            case "clock":
                cp = fault.partition % self._scenario.coordination_partitions
                shift = self._network.clock_shift
                shift[cp] = shift.get(cp, 0.0) + fault.size * self._hi
            case _:
                for name in [fault.client] if fault.client else list(self._active):
                    if name in self._active:
                        self._active[name].append(fault)
                        self._refresh(name)
                        self._clients.later(fault.intervals, partial(self._heal, name, fault))

    def _of_checkpoints(self, fault: Fault) -> None:
        """All clients are restarted in turn; or an operator takes the group back, perhaps by a view that is old."""
        if fault.kind == "deploy":
            for number, name in enumerate(self._active):
                self._clients.later(number * fault.intervals, partial(self.befall, Fault(fault.at, "term", name, 0.3)))
            return
        process = self._clients.new_process(self.admin_host)
        job = Job(process, self._scenario, self._clients.store)
        home = route_group(job.group_id, self._scenario.coordination_partitions)
        group = self._checks.log.worlds[home].group(job.group_id)
        if group is None or group.checkpoints is None:
            return
        kept = [each.id for each in group.checkpoints.kept]
        to = kept[int(fault.size * len(kept))]
        if fault.kind == "late rollback":
            process.end.ended = True  # what it sent is on its way
            record = Rollback(f"{process.name}.0", process.client_id, job.group_id, group.generation, to)
            write = partial(self._network.arrive, self._scenario.topic, home, encode(record), process, 0.0)
            self._clients.later(fault.intervals, write)
            return
        admin = partial(job.admin, client_id=process.name.replace("#", "-"))
        self.administer("rollback", process, lambda: admin().rollback(job.group_id, to, timeout=TIMEOUT_S), fault)

    def _change_offset(self, key: Key, fault: Fault) -> None:
        """What Kafka's consumer group of the same name has committed is replaced by another program, or dropped."""
        committed, group_id = self._network.broker.committed, self._scenario.group_id
        offset, _ = committed.get(group_id, {}).get(key, (0, ""))
        if fault.kind == "foreign commit":
            other = max(0, offset + round((fault.size - 0.5) * FOREIGN))
            self._network.broker.transactions.commit_plainly(group_id, {key: (other, "")})
        elif offset == self._checks.stable(key) + 1:  # otherwise what the log does not know yet would be repeated
            committed.get(group_id, {}).pop(key, None)

    def _cut(self, fault: Fault) -> None:
        """Delete old messages, handled or not (P9)."""
        keys, turn = self._data.all_partitions(), int(fault.at) if self._scenario.other_partitions else 0
        key = keys[(fault.partition + turn) % len(keys)]
        start, end = self._data.start(key), self._data.end(key)
        before = start + round(fault.size * (end - start))
        self._network.cut_below(*key, before)
        self._checks.excused.cut(key, before)

    def _strike(self, process: Process, fault: Fault) -> None:
        name, back = process.client_id, partial(self._clients.start, process.client_id)
        if fault.kind == "crash":
            self._clients.kill(process)
            self._clients.later(fault.intervals, back)
        elif fault.kind == "term":
            if not process.send_sigterm():
                self._clients.kill(process)
            self._clients.away[name] = self._scheduler.now + fault.intervals * self._hi
            self._clients.later(fault.intervals, back)
        else:
            process.stopped_until = max(process.stopped_until, self._scheduler.now + fault.intervals * self._hi)
            if fault.kind == "zombie":
                process.end.replaced = True
                self._clients.later(0.1, lambda: self._clients.start(name))

    def _heal(self, name: str, fault: Fault) -> None:
        if fault in self._active[name]:
            self._active[name].remove(fault)
            self._refresh(name)

    def _refresh(self, name: str) -> None:
        """Recompute a host's trouble from its active faults."""
        trouble, fresh = self._clients.hosts[name].trouble, Trouble()
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
                    fresh.latency_ms = max(fresh.latency_ms, fault.size * self._hi)
                case "deaf":
                    cp = fault.partition % self._scenario.coordination_partitions
                    fresh.deaf_until[cp] = self._scheduler.now + fault.intervals * self._hi
                case "interrupts":
                    fresh.interrupts = max(fresh.interrupts, fault.size / 4)
                case "torn reads":
                    fresh.torn_reads = max(fresh.torn_reads, fault.size / 2)
                case "cut off" | "outage":
                    fresh.is_cut_off = True
        for part in fields(Trouble):
            setattr(trouble, part.name, getattr(fresh, part.name))
        for process in self._clients.processes:
            if process.client_id == name and process.work.job is not None:
                process.work.job.slowness = self._slowness(name)

    def _slowness(self, name: str) -> float:
        slow = [fault.size for fault in self._active[name] if fault.kind == "slow handler"]
        return 1.0 + 2 * self._hi / self._scenario.handling_ms * max(slow, default=0.0) / 10

    def _pause(self, fault: Fault) -> None:
        """An admin pauses the group for a while. If it dies meanwhile, the pause expires.

        It moves positions (C11) or forgets the group (C16).
        """
        process = self._clients.new_process(self.admin_host)
        job = Job(process, self._scenario, self._clients.store)
        rng = Random(f"{self._scenario.seed}/{process.name}")

        def work() -> None:
            admin = job.admin(client_id=process.name.replace("#", "-"))
            expires_s = PAUSE_INTERVALS * self._hi / 1000
            with admin.pause(job.group_id, expires_in=expires_s) as pause:
                job.sleep(fault.intervals * self._hi / 1000 / 2)
                if fault.kind == "brief pause":
                    return
                pause.wait_released(timeout=expires_s / 2)
                if fault.kind == "forget":
                    self._checks.counts["forgotten"] += pause.forget()
                elif fault.size > 0.5 and self._is_known():
                    parts = self._scenario.data_topics.items()
                    keys = [(topic, p) for topic, count in parts for p in range(count) if rng.random() < 0.3]
                    targets: list[int | str] = ["earliest", "latest", self._middle(rng)]
                    wanted = {key: rng.choice(targets) for key in keys}
                    pause.reposition(wanted, force=True)
                    self._clients.note("moved", process.name)
                    self._check_moved(process, wanted)

        self.administer(fault.kind, process, work, fault)

    def _is_known(self) -> bool:
        """Whether positions can be set: one of a group that was forgotten would be of a claimed group."""
        scenario, worlds = self._scenario, self._checks.log.worlds
        home = worlds[route_group(scenario.group_id, scenario.coordination_partitions)]
        return scenario.strategy is None or home.group(scenario.group_id) is not None

    def _evict(self, fault: Fault) -> None:
        """An operator evicts a member of a coordinated group, which may be alive (G20)."""
        process = self._clients.new_process(self.admin_host)
        job = Job(process, self._scenario, self._clients.store)
        admin = partial(job.admin, client_id=process.name)  # a generated id would differ between runs
        self.administer("evict", process, lambda: admin().evict(job.group_id, fault.client, force=True), fault)

    def _settle(self, fault: Fault) -> None:
        """An operator redrives, discards or sets aside some open messages."""
        process = self._clients.new_process(self.admin_host)
        job = Job(process, self._scenario, self._clients.store)
        rng = Random(f"{self._scenario.seed}/{process.name}")
        admin = partial(job.admin, client_id=process.name.replace("#", "-"))

        def work() -> None:
            self._clients.note("settled", process.name, *settle_by_hand(admin(), job.group_id, rng))

        self.administer("settles", process, work, fault)

    def _redo(self, fault: Fault, plans: list[RedoPlan]) -> None:
        """An operator opens done messages. If it dies meanwhile, another process carries on from its plan."""
        if self._are_over:
            return
        process = self._clients.new_process(self.admin_host)
        job = Job(process, self._scenario, self._clients.store)
        operator = RedoOperator(process, job, self._scenario, self._checks, self._clients.later)
        if operator.is_late and not plans:
            process.end.ended = True  # what it sent is on its way
            operator.send_late()
            return
        admin = partial(job.admin, client_id=process.name.replace("#", "-"))

        def work() -> None:
            self._clients.note("redone", process.name, *operator.redo(admin(), plans))

        self.administer("redoes", process, work, fault)
        self._clients.later(fault.intervals + 1.0, partial(self._carry_on, process, fault, plans))

    def _carry_on(self, process: Process, fault: Fault, plans: list[RedoPlan]) -> None:
        if process.dead and not process.end.ended and plans:
            self._redo(fault, plans)

    def _prune(self, fault: Fault) -> None:
        """An admin prunes the log while members may be far behind; it may be killed meanwhile."""
        process = self._clients.new_process(self.admin_host)
        job = Job(process, self._scenario, self._clients.store)

        def work() -> None:
            admin = job.admin(client_id=process.name.replace("#", "-"))  # a generated id would differ between runs
            plan = admin.prune(keep=LEAST_KEEP if fault.size < 0.5 else DEFAULT_KEEP, timeout=PRUNE_TIMEOUT_S)
            self._checks.counts["pruned"] += plan.records_removed
            self._clients.note("pruned", process.name, plan.records_removed, plan.snapshots_removed)
            for found in plan.differences:
                self._checks.fail("snapshots", f"a prune found a snapshot that the log does not bear out: {found}")

        self.administer("prune", process, work, fault)

    def administer(self, name: str, process: Process, work: Callable[[], object], fault: Fault) -> None:
        """Run ``work`` in an admin's process, which may be killed meanwhile."""

        def ended() -> None:
            self._clients.note("end", process.name, type(process.end.error).__name__)
            if not is_expected(process.end.error):
                self._checks.fail("admin", f"{process.name} raised {process.end.error!r}")
            self._checks.forget(process)

        self._clients.note(name, process.name)
        process.run(work, ended)
        if fault.size > 0.9 or fault.size < 0.1:
            self._clients.later(fault.intervals, lambda: self._clients.kill(process))

    def _check_moved(self, process: Process, wanted: dict[Key, int | str]) -> None:
        """Positions that an admin reports as moved are where it wanted them while no member works (C11)."""
        for key, target in wanted.items():
            position = self._data.start(key) if target == "earliest" else target
            if isinstance(position, int) and self._checks.stable(key) != position - 1:
                at = self._checks.stable(key) + 1
                self._checks.fail(
                    "moved", f"{process.name} put {key} at {target}, and the group continues at {at} (C11)"
                )

    def _middle(self, rng: Random) -> int:
        return rng.randint(0, int(20 * self._scenario.messages / self._scenario.data_partitions) + 1)

    def end(self) -> None:
        """End all faults: stopped processes continue, dead ones are restarted."""
        self._are_over = True
        self._clients.away.clear()
        self._clients.note("mended")
        for name in self._active:
            self._active[name].clear()
            self._refresh(name)
        for process in self._clients.processes:
            if process.stopped_until > self._scheduler.now:
                process.stopped_until = self._scheduler.now
                self._scheduler.go_on(process)
        for name in self._active:
            self._clients.later(RESTART_INTERVALS, partial(self._clients.start, name))
