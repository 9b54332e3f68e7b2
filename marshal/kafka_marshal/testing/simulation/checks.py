"""Invariants, checked with every record of the log and every message that is handled.

=====================  =========================================================================================
replicas agree         each replica has the same outcome of every record and, after each read, the same state as the
                       authoritative one (A2, S1), and skips no record
one owner              no two clients may deliver messages of a partition at the same time, each by its own clock
                       (T4); not checked if clocks differ by more than the margin or a broker's clock is set
epochs grow            with every new holder of a lease (C9), and each belongs to one process; in a coordinated group
                       the epoch is the generation since which its owner has the partition (G5)
progress               never goes back unless an admin sets it (C11)
nothing lost           at least once: what the log calls done was handled (C14)
little repeated        at least once: no message is delivered that the log called done when the lease was granted; a
                       worker that iterates gets none again that was handled before its last accepted heartbeat was
                       sent, or before it was asked to end (if nothing else goes wrong)
nothing repeated       at most once: no message is delivered twice (C12, C13)
nothing ungranted      at most once: no message is delivered that the log has not granted to the process (C12)
order                  of a key or a partition, as passed to ``consumer.run``: no message begins for the first time
                       before its predecessor was handled, and one process never handles two at a time
no work without lease  no message is begun that was delivered under a lease which the process knows to be over
fenced sink            has each message once, in order, whatever the clocks do (C9)
redo                   see :mod:`kafka_marshal.testing.simulation.redoing`
outputs                of each message are seen once, in order, by readers of committed records (M)
member invariants      see :mod:`kafka_marshal.testing.simulation.member_invariants`
rules                  an independent judge, if there is one, computes the same outcomes
=====================  =========================================================================================

Excused are messages that need not be handled: retention deleted them, or the group began behind them (P9).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from kafka_marshal.engine.claims.leases import HeldLease
from kafka_marshal.engine.groups.pieces import HeldPiece
from kafka_marshal.engine.plane import Loss
from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.replica import Listener
from kafka_marshal.ports import Message, TailBatch
from kafka_marshal.testing.simulation.holdings import (
    Held,
    holdings,
    holds,
    in_flight_of,
    member,
    name_of,
    overlap,
    place_of,
)
from kafka_marshal.testing.simulation.ledger import NOT_NEEDED, Accounts, Granted, Holders, LeaseSeen
from kafka_marshal.testing.simulation.member_invariants import MemberInvariants
from kafka_marshal.testing.simulation.recorded import Judge, Recorded, Violation, state_of
from kafka_marshal.testing.simulation.scenario import Scenario, Terms
from kafka_marshal.types import Key
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitEntry,
    CommitOffsets,
    ForgetGroup,
    GroupHeartbeat,
    Heartbeat,
    LeaveGroup,
    Outcome,
    Progress,
    Record,
    ReleasingPartition,
    Rollback,
    SettleOffsets,
    World,
    codes,
    route_group,
    route_lease,
)
from rationalizer.groups.group import pieces_of
from rationalizer.wire.wellformed import COMMIT, LET_GO, START

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.living import Living
    from kafka_marshal.testing.simulation.scenario import Scenario
    from kafka_marshal.testing.simulation.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The group's first lease of a partition."""

    epoch: int
    #: The end of its log then.
    end: int


class Excused:
    """Records them, and what members report of them."""

    def __init__(self, scenario: Scenario, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        #: Partitions of each topic at the start; later ones are read from their beginning.
        self._partitions = scenario.data_topics
        #: The group begins at the logs' ends.
        self._begins_late = any(client.worker == "latest" for client in scenario.clients)
        #: A user's worker may make it begin there, or at a timestamp, if it starts first.
        self.may_begin_late: bool = self._begins_late
        #: First offset of each log from which retention deleted something.
        self._starts: dict[Key, int] = {}
        self._beginnings: dict[Key, _Beginning] = {}
        #: End of each log of a coordinated group when it first had an owner.
        self._ends: dict[Key, int] = {}
        #: The group was forgotten: a young group cannot distinguish partitions that were added later (P9).
        self._was_forgotten = False

    def cut(self, key: Key, before: int) -> None:
        """Retention deleted everything below this offset."""
        self._starts[key] = max(before, self._starts.get(key, 0))

    def is_gone(self, key: Key, offset: int) -> bool:
        """Whether retention deleted it."""
        return offset < self._starts.get(key, 0)

    def granted(self, key: Key, epoch: int, end: int) -> None:
        """A record about a lease was accepted; end: the end of the partition's log."""
        self._beginnings.setdefault(key, _Beginning(epoch, end))

    def owned(self, key: Key, end: int) -> None:
        """A partition of a coordinated group has an owner: its start is resolved against the log's end from now on."""
        self._ends.setdefault(key, end)

    def started(self, key: Key, epoch: int) -> None:
        """A start was set (G14)."""
        self._beginnings.setdefault(key, _Beginning(epoch, self._ends.get(key, 0)))

    def forgotten(self, key: Key) -> None:
        """The group starts over."""
        self._beginnings.pop(key, None)
        self._ends.pop(key, None)
        self._was_forgotten = True

    def is_excused(self, key: Key, epoch: int, offset: int, stable: int) -> bool:
        """Whether a record of this epoch may call an unhandled offset done; stable: what was done before."""
        if self.is_gone(key, offset):
            return True
        began = self._beginnings.get(key)
        return (
            self.may_begin_late
            and (self._was_forgotten or key[1] < self._partitions.get(key[0], 0))
            and stable < 0
            and began is not None
            and began.epoch == epoch
        )

    def begins(self, key: Key, epoch: int, offset: int) -> None:
        """A message is delivered."""
        began = self._beginnings.get(key)
        late = self._begins_late and key[1] < self._partitions.get(key[0], 0)
        if late and began is not None and began.epoch == epoch and offset < began.end:
            self._fail("start", f"{key[0]} [{key[1]}]: offset {offset} was there before the group began (latest)")

    def check_reported(self, key: Key, reported: Iterable[tuple[int, int]], ever: Collection[int], stable: int) -> None:
        """At the end: what members reported as gone is gone, and what is gone and unhandled was reported (P9)."""
        start, spans = self._starts.get(key, 0), sorted(reported)
        for first, last in spans:
            if last >= start:
                self._fail(
                    "gaps", f"{key[0]} [{key[1]}]: {first} to {last} were reported as gone; the log begins at {start}"
                )
                return
        for offset in range(min(ever, default=0), min(start, stable + 1)):
            if offset not in ever and not any(first <= offset <= last for first, last in spans):
                self._fail(
                    "gaps",
                    f"{key[0]} [{key[1]}]: offset {offset} is gone, was never handled, and no member reported it",
                )
                return


#: HI for which a process may continue with its messages once it knows that a lease is lost.
GRACE_INTERVALS = 1.0
#: Offsets done beyond gaps are in the log after this many HI if gaps are the only fault.
RANGES_INTERVALS = 1.0
#: Between the end of a handler and done(), for a worker that iterates (ms).
DONE_SLACK_MS = 2.0


class Checks:
    """Keeps the books, and stops the simulation when a promise breaks."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, judge: Judge | None = None) -> None:
        self.log: Recorded = Recorded(scenario.coordination_partitions, scenario.snapshots, judge)
        self.broken: Violation | None = None
        #: The history of this run.
        self.events: list[tuple[object, ...]] = []
        #: Number of checks by kind.
        self.counts: dict[str, int] = dict.fromkeys(
            (
                *("records", "replicas", "states", "messages", "repeats", "transactions"),
                *("snapshots", "pruned", "forgotten", "takeovers", "interrupted", "torn"),
            ),
            0,
        )
        #: (process, consumer's engine) of every consumer of the story.
        self.consumers: dict[int, tuple[Living, ConsumerEngine]] = {}
        self._scenario = scenario
        self._scheduler = scheduler
        self._terms = Terms.of(scenario)
        self.members: MemberInvariants = MemberInvariants(scenario, scheduler, self.fail)
        self.excused: Excused = Excused(scenario, self.fail)
        #: The end offset of a partition.
        self.end_of: Callable[[Key], int | None] = lambda _: 0
        self._watched: list[tuple[Living, Driver]] = []
        self._holders = Holders()
        self.accounts: Accounts = Accounts.of(scenario, scheduler, self.fail)
        self._granted = Granted()
        self.members.on_released = self.accounts.released_of(self._terms, self._holders, self.log.worlds)
        #: Members that an operator evicted, or that a reset deprived (X7) → place of that record: they work until they
        #: read it (G20).
        self._evicted: dict[str, tuple[int, int]] = {}

    def fail(self, promise: str, message: str) -> None:
        """Record a broken promise; only the first one counts."""
        if self.broken is None:
            self.broken = Violation(promise, message, self._scheduler.now)
            self._scheduler.halt()

    # Members.

    def watch(self, process: Living, driver: Driver) -> None:
        """Check a member of this process, which reads the log from now on."""
        group = driver.engine.settings.group_id
        if group != self._scenario.group_id:
            asked = f"a story has one group, whose promises are checked: job.group_id, {self._scenario.group_id!r}"
            self.fail("worker", f"{process.name} has a Marshal of the group {group!r}; {asked}")
        self._watched.append((process, driver))
        replica, outcomes = driver.replica, self.log.outcomes
        apply, lose = replica.apply, driver.engine.book.lose

        def applied(cp: int, offset: int, outcome: Outcome) -> None:
            self.counts["replicas"] += 1
            if self._evicted.get(process.name) == (cp, offset):
                del self._evicted[process.name]
            if outcome != outcomes[cp][offset]:
                self.fail("replicas differ", f"{process.name} about partition {cp}, offset {offset}: {outcome.code}")
            for consumer in driver.engine.consumers.values():
                if id(consumer) not in self.consumers:
                    self.consumers[id(consumer)] = (process, consumer)
                    self._check_delivery(process, consumer)
                    self._watch_pieces(process, driver)
            self.members.applied(process, driver, cp, offset, outcome)

        def read_and_applied(batch: TailBatch, applied: Listener | None = None, *, history: bool = False) -> None:
            for cp, entries in batch.records.items():  # offsets have no gaps here
                due = replica.worlds[cp].next_offset
                if (entries[0][0], entries[-1][0]) != (due, due + len(entries) - 1):
                    self.fail("replicas differ", f"{process.name} passes over records of partition {cp} from {due} on")
            apply(batch, applied, history=history)
            if batch.records:
                self.members.read(process, driver)
            for cp in batch.records:
                world = replica.worlds[cp]
                self.counts["states"] += 1
                if state_of(world) != self.log.states[cp][world.next_offset - 1]:
                    self.fail("replicas differ", f"{process.name} after partition {cp}, offset {world.next_offset - 1}")

        def note_lost(lease: HeldLease, reason: str, now: float) -> None:
            self._is_lost(process, lease.key, reason)
            is_well = process.end.asked_at == inf and not process.dead  # the dead are unwound when a story ends
            if self._terms.is_orderly and reason == Loss.UNPROVEN and is_well:
                self.fail(
                    "beats", f"{process.name} lost {name_of(lease.key)} by its own clock, and nothing was wrong (T4)"
                )
            lose(lease, reason, now)

        driver.listeners.append(applied)
        replica.apply = read_and_applied  # type: ignore[method-assign]
        driver.engine.book.lose = note_lost  # type: ignore[method-assign]

    def _watch_pieces(self, process: Living, driver: Driver) -> None:
        """Record which pieces a member of a coordinated group loses."""
        source = member(driver)
        if source is None:
            return
        lose = source.holdings.lose

        def note_lost(piece: HeldPiece, reason: Loss, now: float) -> None:
            self._is_lost(process, piece.key, reason)
            if self._terms.is_orderly and reason == Loss.FENCED and process.end.asked_at == inf:
                self.fail("beats", f"{process.name} lost {name_of(piece.key)} to another, and nothing was wrong (G20)")
            lose(piece, reason, now)

        source.holdings.lose = note_lost  # type: ignore[method-assign]

    def _is_lost(self, process: Living, key: Key, reason: str) -> None:
        self._holders.lost[process.name, key] = self._scheduler.now
        self.members.lost(process, key, reason)

    def _check_delivery(self, process: Living, consumer: ConsumerEngine) -> None:
        """Reject a delivery other than the story's: a group that mixes both keeps neither promise."""
        self.excused.may_begin_late |= consumer.settings.start != "earliest"
        if consumer.at_most_once != self._scenario.at_most_once:
            asked = "at-most-once" if consumer.at_most_once else "at-least-once"
            self.fail(
                "worker",
                f"{process.name} has a consumer with delivery={asked!r} in a story of {self._scenario.delivery!r}, "
                f"whose promises are others; run it with --delivery {asked} (simulate(…, delivery={asked!r}))",
            )

    def owners(self) -> dict[Key, list[tuple[Living, Held]]]:
        """The processes that could deliver messages of a partition now, each by its own clock."""
        found: dict[Key, list[tuple[Living, Held]]] = {}
        for process, driver in self._watched:
            if process.is_running:
                now = driver.now_ms()
                for key, lease in holdings(driver).items():
                    if now < lease.hand_out_until:
                        found.setdefault(key, []).append((process, lease))
        return found

    def forget(self, process: Living) -> None:
        """A process has ended."""
        self._watched = [entry for entry in self._watched if entry[0] is not process]

    def _check_owners(self) -> None:
        if self.members.checks_every_record:
            self.members.check_trust(self._watched)
        if self._terms.are_clocks_trusted:
            seen: dict[Key, list[tuple[Living, Held]]] = {}
            for process, driver in self._watched:
                # A stopped process with a successor learns from the log that it is over; until then others may hold
                # its leases, which the successor released (C7: not two with one client_id).
                leases = holdings(driver)
                if not leases or not process.is_running or process.end.replaced or process.name in self._evicted:
                    continue
                now = driver.now_ms()
                for key, lease in leases.items():
                    if now < lease.hand_out_until:
                        for other, held in seen.setdefault(key, []):
                            if other.client_id != process.client_id and overlap(held, lease):
                                self.fail(
                                    "two owners", f"{name_of(key)} may be delivered by {other.name} and {process.name}"
                                )
                        seen[key].append((process, lease))

    # Records.

    def record(self, cp: int, offset: int, stamp: int, value: bytes, sender: Living, sent_at: float) -> None:
        """A record is in the log."""
        outcome, world = self.log.take(cp, offset, stamp, value), self.log.worlds[cp]
        self.counts["records"] += 1
        self.members.sent(cp, offset, sent_at, outcome)
        self.events.append(("record", self._scheduler.now, cp, offset, stamp, sender.name, value, outcome.code))
        if wrong := self.log.wrong(cp, offset, stamp, value, outcome):
            self.fail("rules", f"partition {cp}, offset {offset}: {wrong}")
        record = outcome.record
        if record is not None and (outcome.accepted or outcome.entries):
            self.accounts.settled(outcome, record, sender, offset)
            for key, first, last in self.accounts.redoing.granted_of(outcome, record, sender):
                self._grant(sender, record.instance_id, key, (first, last))
        if record is not None and outcome.accepted:
            self.counts["takeovers"] += isinstance(record, Heartbeat) and record.epoch is None
            for (_, topic, partition), code in outcome.leases:
                self._judge_lease(world, (topic, partition), code, record, sender, sent_at)
            if isinstance(record, LeaveGroup) and sender.host.is_admin:
                self._evicted[record.instance_id.rpartition(".")[0]] = cp, offset
            if outcome.of_group:
                self._judge_group(world, outcome, record, sender, sent_at)
            if isinstance(record, ReleasingPartition):
                self.members.released(sender, (record.topic, record.partition), sent_at)
            if isinstance(record, ForgetGroup) and record.group_id == self._scenario.group_id:
                self._forgotten(cp)
        if self.members.is_calm:
            self.members.check_beats(
                world, {process.name: driver for process, driver in self._watched if process.is_running}
            )
        self._check_owners()

    def snapshot(self, cp: int, value: bytes) -> None:
        """A snapshot or a part of one was written."""
        self.counts["snapshots"] += 1
        self.members.snapshot(cp, value, self.log)

    def _judge_lease(self, world: World, key: Key, code: str, record: Record, sender: Living, sent_at: float) -> None:
        lease = world.lease(self._scenario.group_id, *key)
        if lease is None:
            self.fail("progress", f"{name_of(key)} is not known after a record that was accepted")
            return
        if (end := self.end_of(key)) is not None:
            self.excused.granted(key, lease.epoch, end)
        before, now = self._move(key, lease.epoch, lease.progress)
        if code == codes.REPOSITIONED:
            self._repositioned(key, before.stable, now.stable)
            return
        if now.stable < before.stable:
            self.fail("progress", f"{name_of(key)} went from {before.stable} back to {now.stable}")
        # A release without an offset may be of an epoch that its holder had given up, with all it knew.
        # Any other confirms that everything done was reported.
        is_bare = (
            isinstance(record, ReleasingPartition)
            and record.last_offset is None
            and (sender.host.is_admin or (sender.name, key) in self._holders.lost)
        )
        if not is_bare and not isinstance(record, ClaimingPartition):
            self._beats(sender, key, now.epoch, sent_at)
        if isinstance(record, ClaimingMessages):
            self._grant(sender, record.instance_id, key, (before.stable + 1, record.proposed_last_offset))
        elif not self._scenario.at_most_once and end is not None:
            self._check_done(key, before, now, sender)

    def _judge_group(self, world: World, outcome: Outcome, record: Record, sender: Living, sent_at: float) -> None:
        """Check owners and positions after a record of the coordinated group."""
        group = world.group(self._scenario.group_id)
        if world.partition == route_group(self._scenario.group_id, self._scenario.coordination_partitions):
            self.accounts.counted.record(group, outcome)
            self._evicted |= dict.fromkeys(self.accounts.counted.deprived, (world.partition, world.next_offset - 1))
        if group is None or world.partition != route_group(group.group_id, self._scenario.coordination_partitions):
            return
        entries: dict[Key, list[tuple[CommitEntry, str]]] = {}
        if isinstance(record, CommitOffsets):
            for entry, code in zip(record.entries, outcome.entries or (), strict=True):
                if code in codes.ACCEPTED:
                    entries.setdefault((entry.topic, entry.partition), []).append((entry, code))
        for key in group.partitions():
            owned, kept = pieces_of(group, *key), group.kept(*key)
            former = self.accounts.seen.get(key) or LeaseSeen(-1, -1, ())
            epoch = max((piece.since for piece in owned), default=former.epoch)
            epoch = max(epoch, former.epoch) if self._scenario.shares else epoch  # of a piece without an owner
            if owned and (end := self.end_of(key)) is not None:
                self.excused.owned(key, end)
            before, now = self._move(key, epoch, Progress() if kept is None else kept.progress, with_it=True)
            said = entries.get(key, ())
            if any(code == codes.REPOSITIONED for _, code in said):
                self._repositioned(key, before.stable, now.stable)
                continue
            if now.stable < before.stable and not isinstance(record, Rollback):
                self.fail("progress", f"{name_of(key)} went from {before.stable} back to {now.stable}")
            if isinstance(record, GroupHeartbeat):  # progress is reported by commits
                self._beats(sender, key, before.epoch, sent_at)
            done = before.stable
            for entry, code in said:
                if entry.action == START and code != codes.ALREADY_STARTED and entry.through is not None:
                    self.excused.started(key, before.epoch)
                    done = self._began(key, before.epoch, entry.through)
                elif entry.action == COMMIT and entry.through is not None and self._scenario.at_most_once:
                    self._grant(sender, record.instance_id, key, (done + 1, entry.through))
                if entry.action == LET_GO:
                    self.members.released(sender, key, sent_at, self.accounts.parking.keys_of(key, entry.lo, entry.hi))
                is_bare = entry.through is None and (sender.name, key) in self._holders.lost
                if (entry.action == LET_GO and not is_bare) or (entry.action == COMMIT and entry.through is not None):
                    self._beats(sender, key, before.epoch, sent_at)
            is_said = said or isinstance(record, SettleOffsets)
            if is_said and not self._scenario.at_most_once and self.end_of(key) is not None:
                self._check_done(key, LeaseSeen(before.epoch, done, before.ranges), now, sender)

    def _began(self, key: Key, epoch: int, through: int) -> int:
        """The group begins behind this offset (P9): if it may begin late, what lies below need not be handled."""
        late = self.excused.is_excused(key, epoch, through, -1)
        return through if late or through < 0 else -1

    def _move(self, key: Key, epoch: int, progress: Progress, *, with_it: bool = False) -> tuple[LeaseSeen, LeaseSeen]:
        """Store a partition's new progress. with_it: what this record reports as done before a new epoch."""
        before = self.accounts.seen.get(key) or LeaseSeen(-1, -1, ())
        now = LeaseSeen(epoch, progress.stable, tuple(split(progress.ranges).ranges))
        if progress.holes is not None:
            now.open = frozenset(offset for hole in progress.holes for offset in range(hole.first, hole.last + 1))
        now.granted_open = now.open if now.epoch != before.epoch else now.open | before.granted_open
        self.accounts.seen[key] = now
        if now.epoch != before.epoch:
            source = now if with_it else before
            now.granted_stable, now.granted_ranges = source.stable, source.ranges
        else:
            now.granted_stable, now.granted_ranges = before.granted_stable, before.granted_ranges
        if now.epoch < before.epoch:
            self.fail("epochs", f"{name_of(key)} went from epoch {before.epoch} back to {now.epoch}")
        return before, now

    def _beats(self, sender: Living, key: Key, epoch: int, sent_at: float) -> None:
        self._holders.beaten[sender, key, epoch] = max(sent_at, self._holders.beaten.get((sender, key, epoch), 0.0))

    def _grant(self, sender: Living, instance_id: str, key: Key, span: tuple[int, int]) -> None:
        """The log granted these offsets to the sender (C12, G22)."""
        self.accounts.redoing.granted(sender, key, *span)
        self._granted.all.append((instance_id, key, *span, self._scheduler.now))
        self._granted.spans.setdefault((sender.name, key), []).append(span)

    def _check_done(self, key: Key, before: LeaseSeen, now: LeaseSeen, sender: Living) -> None:
        """At least once: what this record reports as done was handled."""
        if now.stable == before.stable and now.ranges == before.ranges and now.open == before.open:
            return
        ledger = self.accounts.ledger(key)
        # A sink skips what lies below its last offset, whichever process handled it, wherever an admin moved to.
        again = sender.host.is_admin or key in self.accounts.written
        handled = ledger.ever if again else ledger.handled
        for offset in now.done_since(before):
            if offset not in handled and not self.excused.is_excused(key, now.epoch, offset, before.stable):
                self.fail("lost", f"{name_of(key)} offset {offset} is done by the log, and no process handled it")
                return

    def _repositioned(self, key: Key, before: int, now: int) -> None:
        """From here on, offsets at or above the position are handled again, those below never."""
        ledger = self.accounts.ledger(key)
        for offset in [x for x in ledger.handled if x > now]:
            del ledger.handled[offset]
        for offset in [x for x in ledger.begun if x > now]:
            del ledger.begun[offset]
        for offset in range(before + 1, now + 1):
            if offset not in ledger.handled:
                ledger.handled[offset] = NOT_NEEDED
                ledger.passed_over.add(offset)
            ledger.ever.add(offset)
        self.accounts.repositioned(key, now + 1, self.log.worlds)
        self._holders.beaten = {at: sent for at, sent in self._holders.beaten.items() if at[1] != key}

    def _forgotten(self, cp: int) -> None:
        """The group starts over with the partitions whose leases are here (C16)."""
        cps = self._scenario.coordination_partitions
        home = route_group(self._scenario.group_id, cps) if self._scenario.strategy is not None else None
        for key, seen in self.accounts.seen.items():
            if (route_lease(*key, cps) if home is None else home) == cp:
                self._repositioned(key, seen.stable, -1)
                self.accounts.seen[key] = LeaseSeen(seen.epoch, -1, ())
                self.accounts.redoing.forgotten(key)
                self.excused.forgotten(key)

    # Work.

    def received(self, process: Living, messages: Iterable[Message]) -> None:
        """A worker received these just now."""
        for key in {place_of(message)[0] for message in messages}:
            self.members.received(process, key)

    def begins(self, process: Living, message: Message) -> None:
        """A worker begins to handle a message."""
        key, offset = place_of(message)
        self.counts["messages"] += 1
        self.events.append(("begins", self._scheduler.now, process.name, *key, offset))
        assignment = in_flight_of(process, key, message)
        self._holders.epochs[process, key] = -1 if assignment is None else assignment.epoch
        self.members.begins(process, key, offset)
        self.accounts.redoing.begins(process, key, message, assignment)
        self.accounts.ordering.begins(process, key, offset, self.accounts.ledger(key).ever)
        former = self.accounts.ledger(key).handled.get(offset)
        self.accounts.counted.begins(process, key, offset, self._holders.epochs[process, key], former)
        if assignment is not None:
            self.excused.begins(key, assignment.epoch, offset)
            hashed = self.accounts.parking.hash_of(key, message) or self.accounts.counted.hash_of(key, offset)
            self._holders.check_token(process, key, assignment.epoch, hashed, self.fail)
        if assignment is None and not self._scenario.at_most_once:  # a grant is never revoked (C12)
            lost_at = self._holders.lost.get((process.name, key))
            if not self.members.was_granted(process, key):
                self.fail(
                    "work without lease",
                    f"{process.name} begins {name_of(key)} offset {offset}, and never had its lease",
                )
            if lost_at is not None and not holds(process, key):
                late_ms = self._scheduler.now - max(lost_at, process.stopped_until)
                if late_ms > GRACE_INTERVALS * self._scenario.longest_interval_ms:
                    self.fail(
                        "work without lease",
                        f"{process.name} begins {name_of(key)} offset {offset}, {late_ms:.0f} ms after it learned "
                        "that the lease under which it got it is lost (on_lost, T4); another process may work on it",
                    )
        if self._scenario.at_most_once:
            self._begins_once(process, key, offset, assignment)
        else:
            self._begins_again(process, key, offset, assignment)
        self._check_owners()

    def _begins_once(self, process: Living, key: Key, offset: int, assignment: Assignment | None) -> None:
        begun = self.accounts.ledger(key).begun
        granted = self._granted.spans.get((process.name, key), ())
        if not any(first <= offset <= last for first, last in reversed(granted)):
            self.fail("not granted", f"{process.name} begins {name_of(key)} offset {offset}, which it was not granted")
        if assignment is None and key in self.accounts.moved:
            return  # possibly delivered before an admin moved the position: others may then get it again
        times = self._granted.begun[process.name, key, offset] = (
            self._granted.begun.get((process.name, key, offset), 0) + 1
        )
        # Granted again after an admin moved the position back: it may still continue with the earlier grant.
        again = begun.get(offset) is process or self.accounts.redoing.was_opened(key, offset)
        again = again and times <= sum(first <= offset <= last for first, last in granted)
        if offset in begun and not again:
            self.fail("repeated", f"{name_of(key)} offset {offset} went to {begun[offset].name} and to {process.name}")
        begun[offset] = process
        self.accounts.ledger(key).ever.add(offset)

    def _begins_again(self, process: Living, key: Key, offset: int, assignment: Assignment | None) -> None:
        before = self.accounts.ledger(key).handled.get(offset)
        if before is None:
            return
        self.counts["repeats"] += 1
        seen = self.accounts.seen.get(key)
        if assignment is None or seen is None or seen.epoch != assignment.epoch:
            return  # work that was under way when the lease ended
        if seen.was_done(offset):
            self.fail("repeated", f"{name_of(key)} offset {offset} was done when {process.name} got the lease")
        if self.accounts.counted.is_on or self.accounts.redoing.was_opened(key, offset):
            return  # progress moves at checkpoints, not with heartbeats; what was open is reported beside them
        former, handled_at, epoch = before
        if former is not process and former.host.defers and self._terms.is_heard:
            beaten = self._holders.beaten.get((former, key, epoch), 0.0)
            if beaten > handled_at + RANGES_INTERVALS * former.heartbeat_interval_ms:
                self.fail(
                    "repeated",
                    f"{name_of(key)} offset {offset} was done by {former.name} at {handled_at:.1f} ms, beyond a gap; "
                    f"until {beaten:.1f} ms it had not reported that, and {process.name} handles it again (P5)",
                )
        if former is not process and former.host.is_iterating and not former.host.is_interrupted:
            beaten = self._holders.beaten.get((former, key, epoch), 0.0)
            if self._terms.is_orderly and former.end.asked_at < inf:
                beaten = max(beaten, former.end.asked_at)  # a closing member reports first what is done
            if beaten > handled_at + DONE_SLACK_MS:
                self.fail(
                    "repeated",
                    f"{name_of(key)} offset {offset} was handled by {former.name} at {handled_at:.1f} ms; its beat "
                    f"sent at {beaten:.1f} ms did not report it, and {process.name} handles it again",
                )

    def raised(self, process: Living, what: str) -> None:
        """A worker's call was interrupted, or a read raised."""
        self.counts[what] += 1
        self.events.append((what, self._scheduler.now, process.name))

    def handled(self, process: Living, message: Message, *, in_vain: bool = False) -> None:
        """A worker has handled a message; in_vain: its handler failed."""
        key, offset = place_of(message)
        self.events.append(("failed" if in_vain else "handled", self._scheduler.now, process.name, *key, offset))
        self.members.handled(process, key, offset)
        self.accounts.ordering.ended(process, key, offset)
        self.accounts.counted.ends(process, key, offset)
        if not in_vain:
            self._is_handled(process, key, offset)

    def _is_handled(self, process: Living, key: Key, offset: int) -> None:
        ledger = self.accounts.ledger(key)
        self.accounts.redoing.handled(process, key, offset)
        ledger.handled[offset] = (process, self._scheduler.now, self._holders.epochs.get((process, key), -1))
        ledger.ever.add(offset)

    def committed(self, process: Living, rows: Iterable[Message]) -> None:
        """The fenced sink committed a transaction."""
        self.counts["transactions"] += 1
        for message in rows:
            key, offset = place_of(message)
            written = self.accounts.written.setdefault(key, set())
            if offset in written:
                self.fail("fenced sink", f"{name_of(key)} offset {offset} was written twice, now by {process.name}")
            written.add(offset)
            self.counts["messages"] += 1
            self._is_handled(process, key, offset)
            self.events.append(("written", self._scheduler.now, process.name, *key, offset))

    # In the end.

    def check_granted(self, alive: Iterable[Living], data: Mapping[Key, int]) -> None:
        """At most once: what the log granted to a surviving process was delivered or reported by it (C13)."""
        lived = {process.name for process in alive}
        reported: dict[tuple[str, Key], list[tuple[int, int]]] = {}
        for process, consumer in self.consumers.values():
            for topic, partition, first, last in consumer.delivery.grants.unprocessed:
                reported.setdefault((process.name, (topic, partition)), []).append((first, last))
            if process.end.ended:  # it closed before the log answered: what it requested may be granted or not
                for key, _, first, last in consumer.delivery.grants._given_up:
                    reported.setdefault((process.name, key), []).append((first, last))
        fresh = self._scheduler.now - 5 * self._scenario.longest_interval_ms - 1_000
        for instance, key, first, last, granted_at in self._granted.all:
            name = instance.rpartition(".")[0]
            if name not in lived or granted_at > fresh:
                continue
            ledger, spans = self.accounts.ledger(key), reported.get((name, key), [])
            for offset in range(first, min(last + 1, data.get(key, 0))):
                if (
                    (offset not in ledger.ever or self.accounts.redoing.awaits(name, key, offset, granted_at))
                    and not any(low <= offset <= high for low, high in spans)
                    and not self.excused.is_gone(key, offset)
                ):
                    self.fail(
                        "lost", f"{name_of(key)} offset {offset} was granted to {name}, neither delivered nor reported"
                    )
                    return

    def check_gaps(self, keys: Iterable[Key]) -> None:
        """At least once: what retention deleted is what members reported as gone."""
        reported: dict[Key, list[tuple[int, int]]] = {}
        for _, consumer in self.consumers.values():
            for key, first, last in consumer.positions.gaps:
                reported.setdefault(key, []).append((first, last))
        for key in keys:
            self.excused.check_reported(key, reported.get(key, ()), self.accounts.ledger(key).ever, self.stable(key))

    def check_sink(self, data: Mapping[Key, int]) -> None:
        """The fenced sink has each message that no admin skipped."""
        for key, end in data.items():
            written, passed_over = self.accounts.written.get(key, set()), self.accounts.ledger(key).passed_over
            for offset in range(end):
                if offset not in written and offset not in passed_over and not self.excused.is_gone(key, offset):
                    self.fail("fenced sink", f"{name_of(key)} offset {offset} was never written")
                    return

    def stable(self, key: Key) -> int:
        """The highest offset up to which everything is done, by the log."""
        seen = self.accounts.seen.get(key)
        return -1 if seen is None else seen.stable
