"""A small seeded simulation: members that crash, hang and restart, a network that delays, loses and repeats.

One seed is one run, the same on every machine. At every step, at most one member can be handed messages of a
partition, and epochs of hand-outs never go back (unless the broker's clock is set). At least once: what the log calls
done is in a sink that refuses older epochs. At most once: nothing is handed out twice, and what the log granted to a
member that lived is handed out or reported. When faults end, all is owned, drained and at rest within a bounded time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kafka_marshal.engine.effects import Append
from kafka_marshal.engine.policies import Balanced, Greedy, MaxClaims, Policy, ReleaseIfBehind
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.consumer import ConsumerEngine
from rationalizer import ClaimingMessages, World, decode, encode
from tests.engine.harness import DataLog, FakeMessage, Key, Member, Net

STEPS_PER_INTERVAL = 50
#: After the faults: a dead holder's 2 · HI, a pause's end, a few rounds of wishes.
RECOVERY_INTERVALS = 25
#: Members with nothing to do and nothing to fear leave each other in peace.
QUIET_INTERVALS = 40
#: However much there is left to do.
DRAIN_INTERVALS = 300


FAULTS = ("crash", "start", "stop", "deaf", "loss", "loss", "slow", "well", "well", "pause", "grow", "clock")


class Broken(AssertionError):
    """A promise was broken."""


@dataclass
class Trouble:
    """How bad the network is for one member at the moment."""

    loss: float = 0.0
    latency_ms: float = 5.0
    #: The tail of a CP stands still until then.
    deaf_until: dict[int, float] = field(default_factory=dict)


class SimMember(Member):
    """A process in the simulation, with its user."""

    def __init__(self, sim: Simulation, client_id: str, policy: Policy) -> None:
        self.sim = sim
        self.trouble = Trouble()
        self._rng = Random(sim.rng.random())
        self._base, self._offset = sim.net.now, self._rng.uniform(0, 1e6)
        self._arrivals: dict[int, float] = {}
        self.acks_due: list[tuple[float, int, int | None]] = []
        self.stopped_until = 0.0
        #: At least once: (finish time, run) of what is being handled.
        self.handling: list[tuple[float, Run]] = []
        sim.count += 1
        instance = f"{client_id}#{sim.count}"
        super().__init__(sim.net, client_id, instance, sim.hi, rate=1 + self._rng.uniform(-1, 1) * sim.drift)
        self.instance = instance
        claim_ahead = self._rng.random() < 0.3
        self.main: ConsumerEngine = self.consumer(
            "t",
            policy=policy,
            at_most_once=sim.at_most_once,
            batch_size=self._rng.choice([1, 5, 20]),
            handler_timeout_ms=self._rng.choice([None, None, 8.0 * sim.hi]),
            claim_ahead=claim_ahead,
        )

    def clock(self) -> float:
        return self._offset + (self.net.now - self._base) * self.rate

    # The network.

    def visible(self, cp: int) -> int:
        log, world = self.net.logs[cp], self.worlds[cp]
        if not self.consumers:
            return len(log)  # at start it reads to the end (C15)
        if self.net.now < self.trouble.deaf_until.get(cp, 0.0):
            return world.next_offset
        seen, delay = len(log), self.trouble.latency_ms
        while seen > world.next_offset and self.sim.written[cp][seen - 1] + delay > self.net.now:
            seen -= 1
        return seen

    def send(self, append: Append) -> None:
        rng, net = self._rng, self.net
        lost = rng.random() < self.trouble.loss
        late = rng.random() < 0.02 * (self.trouble.loss > 0)
        arrival = (
            net.now + rng.uniform(0.2, 2) * self.trouble.latency_ms + (rng.uniform(0, 3) * self.sim.hi if late else 0)
        )
        if not late:  # a producer keeps the order of a partition; only what it gave up on arrives out of it
            arrival = self._arrivals[append.cp] = max(arrival, self._arrivals.get(append.cp, 0.0))
        copies = 0 if lost else 2 if rng.random() < 0.1 * self.trouble.loss else 1
        failed = lost or late or (self.trouble.loss > 0 and rng.random() < 0.1)
        value = encode(append.record)
        for copy in range(copies):
            at = arrival + copy * rng.uniform(0, self.sim.hi)
            self.sim.later(at, self._arrive(append, value, None if failed or copy else append.token))
        if failed:
            self.acks_due.append((net.now + self.sim.hi, append.token, None))

    def _arrive(self, append: Append, value: bytes, token: int | None) -> Callable[[], None]:
        def arrive() -> None:
            offset = self.sim.write(append.cp, value)
            if token is not None and self._rng.random() >= self.trouble.loss / 2:
                blank = self._rng.random() < 0.05 * (self.trouble.loss > 0)
                due = self.net.now + self._rng.uniform(0.2, 2) * self.trouble.latency_ms
                self.acks_due.append((due, token, None if blank else offset))

        return arrive

    def turn(self) -> None:
        if self.paused:
            return
        acks_first = self._rng.random() < 0.5
        if acks_first:
            self._poll_acks()
        super().turn()
        if not acks_first:
            self._poll_acks()

    def _poll_acks(self) -> None:
        due = [ack for ack in self.acks_due if ack[0] <= self.net.now]
        if due:
            self.acks_due = [ack for ack in self.acks_due if ack[0] > self.net.now]
            for _, token, offset in due:
                self.engine.acked(token, offset, self.net.now)
            self.settle()

    # The user.

    def use(self) -> None:
        """Let the user do something."""
        if self.paused or self.engine.failure is not None:
            return
        if self.sim.at_most_once:
            for message in self.work_granted(self._rng.choice([1, 3, 100])):
                self.sim.handed_out_once(message, self.instance)
            return
        self._handle()
        self.fetch(self._rng.choice([1, 3, 10]))
        if len(self.handling) < 3:
            run = self.take(self._rng.choice([1, 4, 30]), iterating=self._rng.random() < 0.5)
            if run is not None:
                self.sim.handed_out(run.assignment.key, run.assignment.epoch, self.client_id)
                slow = self._rng.random() < 0.02
                self.handling.append((self.net.now + self._rng.expovariate(1 / (3 * self.sim.hi if slow else 30)), run))

    def _handle(self) -> None:
        finished = [entry for entry in self.handling if entry[0] <= self.net.now]
        self.handling = [entry for entry in self.handling if entry[0] > self.net.now]
        for _, run in finished:
            if run.iterating:
                self._iterate(run)
                continue
            key, epoch = run.assignment.key, run.assignment.epoch
            if not self.sim.sink_takes(key, epoch, [m.offset() for m in run.messages]):  # type: ignore[misc]
                continue
            if self._rng.random() < 0.5:
                self.done_run(run)
            else:
                for message in self._rng.sample(run.messages, len(run.messages)):
                    self.done(message)

    def _iterate(self, run: Run) -> None:
        """As the shell does: the clock is compared before each message; what is before the cursor is done."""
        key, epoch = run.assignment.key, run.assignment.epoch
        for index, message in enumerate(run.messages):
            if index and self.clock() >= run.assignment.lease.hand_out_until:
                break
            if index:
                self.sim.handed_out(key, epoch, self.client_id)
            if not self.sim.sink_takes(key, epoch, [message.offset()]):  # type: ignore[list-item]
                break
            run.cursor = index + 1
            if self._rng.random() < 0.02:
                break
        self.leave_run(run)


class Simulation:
    """One run of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.hi = rng.choice([500, 1_000, 3_000])
        #: T4 allows for what the margin covers: a tenth of HI within 2 · HI.
        self.drift = rng.choice([0.0, 0.04])
        self.at_most_once = rng.random() < 0.4
        self.clock_is_set = rng.random() < 0.15
        self.net = Net(cps=rng.choice([1, 2, 3]))
        self.written: dict[int, list[float]] = {cp: [] for cp in self.net.logs}
        self.count = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self.sink: dict[Key, tuple[int, set[int]]] = {}
        self.epochs: dict[Key, tuple[int, str]] = {}
        self.once: dict[tuple[Key, int], str] = {}
        #: Instances that did not live to the end: what they were granted may be lost.
        self.died: set[str] = set()
        self.reports: dict[str, ConsumerEngine] = {}
        self._owners: dict[Key, list[str]] = {}
        self._owners_since = 0.0
        self.net.topic("t", rng.randint(1, 8), end=rng.randint(0, 30), missing=range(0, 1000, rng.choice([7, 2_000])))
        self.clients = [f"c{i}" for i in range(rng.randint(2, 5))]
        for client in self.clients:
            self.start(client)

    # What happens.

    def later(self, at: float, event: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (at, self._numbers, event))

    def write(self, cp: int, value: bytes) -> int:
        self.written[cp].append(self.net.now)
        return self.net.append(cp, value)

    def start(self, client_id: str) -> None:
        policy = self.rng.choice([Balanced(), Balanced(), Balanced() & MaxClaims(3), Balanced() & ReleaseIfBehind()])
        if client_id == self.clients[0]:
            policy = self.rng.choice([Balanced(), Balanced(), Greedy()])  # somebody without a limit
        member = SimMember(self, client_id, policy)
        self.net.members.append(member)
        self.reports[member.instance] = member.main

    def members(self) -> list[SimMember]:
        return [m for m in self.net.members if isinstance(m, SimMember)]

    def kill(self, member: SimMember) -> None:
        self.died.add(member.instance)
        member.kill()

    def step(self) -> None:
        until = self.net.now + self.hi / STEPS_PER_INTERVAL
        while self._events and self._events[0][0] <= until:
            at, _, event = heapq.heappop(self._events)
            self.net.now = max(self.net.now, at)
            event()
        self.net.now = until
        for member in self.members():
            if member.paused and self.net.now >= member.stopped_until:
                member.paused = False
            member.turn()
            self.check_owners()
            member.use()
            if member.engine.failure is not None:
                self.kill(member)
        self.check_owners()

    def fault(self) -> None:
        """One more thing goes wrong, or gets well again."""
        rng, hi, now = self.rng, self.hi, self.net.now
        alive = self.members()
        member = rng.choice(alive) if alive else None
        kind = rng.choice(
            ["crash", "start", "stop", "deaf", "loss", "loss", "slow", "well", "well", "pause", "grow", "clock"]
        )
        if member is None or kind == "start":
            running = {m.client_id for m in alive if not m.paused}
            self.start(rng.choice([c for c in self.clients if c not in running] or [f"x{self.count}"]))
        elif kind == "crash":
            self.kill(member)
            if rng.random() < 0.5:
                self.start(member.client_id)
        elif kind == "stop":
            member.paused, member.stopped_until = True, now + rng.uniform(0.1, 4) * hi
        elif kind == "deaf":
            member.trouble.deaf_until[rng.choice(list(self.net.logs))] = now + rng.uniform(0.1, 4) * hi
        elif kind == "loss":
            member.trouble.loss = rng.choice([0.1, 0.5, 1.0])
        elif kind == "slow":
            member.trouble.latency_ms = rng.choice([0.3, 1.0, 1.7]) * hi * rng.random()
        elif kind == "well":
            member.trouble = Trouble()
        elif kind == "pause":
            length = rng.choice([0, 0.5, 3]) * hi
            for cp in self.net.logs:
                self.net.pause(length) if cp == 0 else None
                self.written[cp].append(now)
        elif kind == "grow" and len(self.net.data) < 12:
            self.net.data["t", len(self.net.data)] = DataLog()
            self.net.tell_topics()
        elif kind == "clock" and self.clock_is_set:
            self.net.stamp_shift += rng.uniform(-3, 3) * hi

    def run(self, faulty_intervals: int = 60) -> None:
        """The whole story; raises Broken where a promise is broken."""
        faults_end = self.net.now + faulty_intervals * self.hi
        next_fault = self.net.now
        while self.net.now < faults_end:
            if self.net.now >= next_fault:
                self.fault()
                next_fault = self.net.now + self.rng.expovariate(1 / (1.5 * self.hi))
            if self.rng.random() < 0.2:
                self.net.data[self.rng.choice(sorted(self.net.data))].end += self.rng.randint(1, 10)
            self.step()
            if self.rng.random() < 0.01:
                self.check_done()
        self.recover()
        self.check_done()
        self.check_granted()

    def recover(self) -> None:
        for member in self.members():
            member.trouble, member.stopped_until = Trouble(), 0.0
        if not any(m.client_id == self.clients[0] for m in self.members()):
            self.start(self.clients[0])
        self.wait(self.is_owned, RECOVERY_INTERVALS)
        self.wait(self.is_drained, DRAIN_INTERVALS)
        self.wait(self.is_owned, RECOVERY_INTERVALS)
        self.wait(self.is_quiet, QUIET_INTERVALS)

    def is_quiet(self) -> bool:
        """No partition has changed hands for a while."""
        owners = self.net.owners()
        if owners != self._owners:
            self._owners, self._owners_since = owners, self.net.now
        return self.net.now - self._owners_since > 8 * self.hi

    def wait(self, condition: Callable[[], bool], intervals: float) -> None:
        until = self.net.now + intervals * self.hi + max(0.0, -self.net.stamp_shift)
        while not condition():
            if self.net.now > until:
                raise Broken(f"no {condition.__name__} within {intervals} HI after the last fault: {self.state()}")
            self.step()

    # What must hold.

    def check_owners(self) -> None:
        """Of one client, two instances may overlap: the older one ends when it sees that it was replaced (C7)."""
        if not self.clock_is_set:
            for key, owners in self.net.owners().items():
                if len(set(owners)) > 1:
                    raise Broken(f"{key} could be handed out by {owners}")

    def handed_out(self, key: Key, epoch: int, client_id: str) -> None:
        newest, holder = self.epochs.get(key, (-1, ""))
        if epoch < newest and client_id != holder and not self.clock_is_set:
            raise Broken(f"{key} was handed out by {client_id} under epoch {epoch} after {newest} by {holder}")
        self.epochs[key] = max((epoch, client_id), (newest, holder))

    def handed_out_once(self, message: FakeMessage, instance: str) -> None:
        if (message.of, message.at) in self.once:
            raise Broken(f"{message} went to {self.once[message.of, message.at]} and again to {instance}")
        self.once[message.of, message.at] = instance

    def sink_takes(self, key: Key, epoch: int, offsets: list[int]) -> bool:
        """Whether the sink, which refuses older epochs, took them (C9)."""
        newest, taken = self.sink.setdefault(key, (-1, set()))
        if epoch < newest:
            return False
        taken.update(offsets)
        self.sink[key] = (epoch, taken)
        return True

    def replica(self) -> dict[int, World]:
        worlds = {cp: World(cp, self.net.cps) for cp in self.net.logs}
        for cp, world in worlds.items():
            world.apply_many((offset, ts, value) for offset, (ts, value) in enumerate(self.net.logs[cp]))
        return worlds

    def check_done(self) -> None:
        """At least once: what the log says is done is in the sink."""
        for world in self.replica().values() if not self.at_most_once else ():
            for lease in world.leases():
                key = (lease.topic, lease.partition)
                taken = self.sink.get(key, (-1, set[int]()))[1]
                for offset in self.net.data[key].offsets(0, 1 << 30):
                    if lease.progress.is_done(offset) and offset not in taken:
                        raise Broken(f"{key} {offset} is done by the log and was never handled")

    def check_granted(self) -> None:
        """At most once: what the log granted to an instance that lived was handed out or reported by it."""
        for cp, log in self.net.logs.items() if self.at_most_once else ():
            world = World(cp, self.net.cps)
            for offset, (ts, value) in enumerate(log):
                record = decode(value)
                before = -1
                if isinstance(record, ClaimingMessages) and (lease := world.lease("g", record.topic, record.partition)):
                    before = lease.progress.stable
                if not world.apply(offset, ts, value).accepted or not isinstance(record, ClaimingMessages):
                    continue
                key = (record.topic, record.partition)
                reports = self.reports[record.instance_id].delivery.grants.unprocessed
                for at in self.net.data[key].offsets(before + 1, record.proposed_last_offset - before):
                    reported = any((t, p) == key and first <= at <= last for t, p, first, last in reports)
                    if (
                        at <= record.proposed_last_offset
                        and record.instance_id not in self.died
                        and (key, at) not in self.once
                        and not reported
                    ):
                        raise Broken(f"{key} {at} was granted to {record.instance_id}, not handed out, not reported")

    def is_owned(self) -> bool:
        return all(len(owners) == 1 for owners in self.net.owners().values())

    def is_drained(self) -> bool:
        for key, log in self.net.data.items():
            if self.stable(key) < max(log.offsets(0, 1 << 30), default=-1):
                return False
        grants = [m.main.delivery.grants for m in self.members()]
        return not any(each.proposed or each.granted for each in grants)

    def stable(self, key: Key) -> int:
        lease = self.members()[0].engine.peers.lease(key)
        return -1 if lease is None else lease.progress.stable

    def state(self) -> dict[Key, object]:
        return {key: (owners, self.stable(key), self.net.data[key].end) for key, owners in self.net.owners().items()}
