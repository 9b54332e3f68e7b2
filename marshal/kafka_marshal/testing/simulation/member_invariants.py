"""Invariants of members that the log does not show, checked as they apply records and deliver messages.

=====================  =========================================================================================
doubt                  no lease is trusted if log time in the member's replica ran ahead of its clock since its last
                       heartbeat, until one sent later is applied as accepted (T5)
replaced               an instance ends when it sees a later one take over its lease (C7), and a member of a
                       coordinated group when a later one of its client_id joins (G20)
trust                  no lease is trusted for longer than 2 HI less the margin, by the member's clock, after it sent
                       the last heartbeat that its replica has applied as accepted (T4)
pause                  a member begins no message an HI after its replica has shown an admin's pause (C10)
``let go``             an unwanted grant is released in the same step (C17), and no lease is released while a message
                       of it is in flight, unless the member closes or lost it (C14)
beats                  when all is well, each lease has at least two heartbeats in HI (T4, C14), and each member of a
                       coordinated group two in its session (G20)
limit                  no member holds more than its policy allows (``MaxClaims``)
``in hand``            at the end, a member's count of messages in flight is exact: with too high a count it would
                       stop fetching for ever
snapshots              each equals the state at the offset it names, one exists wherever one is due, and no member
                       reports a correct one as corrupt (S2); hashes of the log match its records (S4)
=====================  =========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING

from kafka_marshal.engine.claims.leases import LeaseState
from kafka_marshal.engine.effects import Append
from kafka_marshal.engine.plane import Loss
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.node.driver import Driver
from kafka_marshal.testing.simulation.holdings import (
    Held,
    holdings,
    last_proof,
    longest_trust_ms,
    margin_ms,
    member,
    name_of,
)
from kafka_marshal.testing.simulation.recorded import Recorded
from kafka_marshal.types import Key
from rationalizer import (
    ClaimingPartition,
    ClaimingShare,
    Heartbeat,
    HeartbeatBatch,
    JoinGroup,
    LeaveGroup,
    Outcome,
    ReleasingPartition,
    SettlingMessages,
    World,
    codes,
)
from rationalizer.history import LeaseKey
from rationalizer.log_hash import decode_hash
from rationalizer.snapshot_log import MalformedPartError, decode_part

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.living import Living
    from kafka_marshal.testing.simulation.scenario import Scenario
    from kafka_marshal.testing.simulation.scheduler import Scheduler

#: HI for which a member may continue once its replica shows a pause.
PAUSE_GRACE_INTERVALS = 1.0
#: HI after which a release that the log does not show must have been sent again.
REPEATED_INTERVALS = 1.5
#: HI by which log time must run ahead: more than the margin, as a member may know only an older heartbeat.
DOUBT_INTERVALS = 1.0
#: When all is well, no lease is older than this share of HI.
OLDEST_BEAT = 0.5
#: Time of a record from the engine to the network, and of a message from the lease's check to the worker (ms).
SLACK_MS = 2.0
#: How long a list waits for more, at most (HI); it counts from its first message.
MOST_LINGER = 0.5

#: In place of a partition: the heartbeat of a coordinated group's member covers all its partitions.
_ALL: Key = ("", -1)
#: (when sent, log time) if there was no heartbeat.
_NEVER = (-inf, 0)
#: (when seen, epoch) if there was no grant.
_NO_GRANT = (-inf, -1)


class MemberInvariants:
    """Records what members of one story know, and checks them."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, fail: Callable[[str, str], None]) -> None:
        #: Called with each release that the log accepted.
        self.on_released: Callable[[Living, Key, Callable[[int], bool]], object] = lambda *_: None
        self._scenario = scenario
        self._scheduler = scheduler
        self._fail = fail
        #: A broker's clock is set: what members trust is checked with every record, not only with their messages.
        self.checks_every_record: bool = any(fault.kind == "clock" for fault in scenario.faults)
        self._limits = {x.name: 3 for x in scenario.clients if x.policy == "max-claims" and x.worker != "yours"}
        #: By CP and offset: when (virtual ms) the record was sent.
        self._sent: dict[tuple[int, int], float] = {}
        #: (process, partition) → when the newest of its heartbeats that its replica applied was sent, and log time.
        self._beats: dict[tuple[str, Key], tuple[float, int]] = {}
        #: (process, CP) → begin and end (virtual ms) of another process's pause, as it sees it.
        self._pauses: dict[tuple[str, int], tuple[float, float]] = {}
        #: (process, partition) → offset in flight → since when.
        self._in_hand: dict[tuple[str, Key], dict[int, float]] = {}
        #: Process and partition → how often it has asked for a producer, and when that was last seen to grow.
        self._opened: dict[tuple[str, Key], tuple[int, float]] = {}
        #: (process, partition) → when it last lost the lease.
        self._lost: dict[tuple[str, Key], float] = {}
        #: When it was lost by the log, which the member's clock may have ended in the same moment (T4).
        self._fenced: dict[tuple[str, Key], float] = {}
        #: (process, partition) → since when its lease is in doubt: until a later heartbeat is applied (T5).
        self._doubts: dict[tuple[str, Key], float] = {}
        #: (process, partition) → when its replica last showed a grant that it still wanted, and the epoch.
        self._grants: dict[tuple[str, Key], tuple[float, int]] = {}
        #: Lease → epoch → the instance that it was granted to, by the log.
        self._holders: dict[LeaseKey, dict[int, str]] = {}
        self._is_coordinated = scenario.strategy is not None
        #: Processes whose replica showed them as members of the coordinated group.
        self._were_members: set[str] = set()
        #: Client → number of its newest process that joined, and the offset of that.
        self._newest: dict[str, tuple[int, int]] = {}
        #: Since when everything is well.
        self.calm_since: float | None = None

    # Records.

    def sent(self, cp: int, offset: int, sent_at: float, outcome: Outcome) -> None:
        """A record is in the log."""
        self._sent[cp, offset] = sent_at
        record = outcome.record
        if outcome.accepted and outcome.epoch == offset and record is not None and outcome.lease is not None:
            self._holders.setdefault(outcome.lease, {})[offset] = record.instance_id
        if isinstance(record, JoinGroup) and outcome.accepted:
            self._check_successor(record, offset)

    def applied(self, process: Living, driver: Driver, cp: int, offset: int, outcome: Outcome) -> None:
        """A member's replica and its engine have applied a record."""
        if alarms := driver.upkeep.snapshots.alarms:
            self._fail("snapshots", f"{process.name} raised an alarm about a true one: {alarms[0]}")
        message, engine = outcome.message, driver.engine
        if message is None or engine.failure is not None:
            return
        settings = engine.settings
        self._check_repeated(process, driver)
        if self._is_coordinated:
            self._check_member(process, driver, offset, outcome)
        takes_over = outcome.accepted and outcome.epoch == offset and outcome.is_a(Heartbeat)
        holders = self._holders[outcome.lease] if takes_over and outcome.lease is not None else {}
        over = max((epoch for epoch in holders if epoch < offset), default=-1)
        if holders.get(over) == settings.instance_id:
            # Not one that had released it or withdrawn its claim before the grant: it releases such a lease.
            key = (message.topic, message.partition)
            lost_at = self._lost.get((process.name, key), -inf)
            fenced_now = self._fenced.get((process.name, key)) == self._scheduler.now
            granted_at, epoch = self._grants.get((process.name, key), _NO_GRANT)
            if epoch == over and (fenced_now or granted_at > lost_at):
                self._fail(
                    "replaced",
                    f"{process.name} saw {name_of(key)} taken over by {message.instance_id}, and continues (C7)",
                )
        if message.group_id != settings.group_id:
            return
        pause = driver.replica.worlds[cp].pause(settings.group_id)
        if pause is None or pause.client_id == settings.client_id:
            self._pauses.pop((process.name, cp), None)
        else:
            now = self._scheduler.now
            began = self._pauses.get((process.name, cp), (now, now))[0]
            self._pauses[process.name, cp] = began, now + pause.expires - outcome.log_time
        if (message.instance_id, message.client_id) != (settings.instance_id, settings.client_id):
            return
        is_beat = pause is None or pause.client_id == settings.client_id or not outcome.is_a(SettlingMessages)
        for key in [_ALL] if self._is_coordinated and outcome.of_group else _beaten(outcome) if is_beat else []:
            if not outcome.accepted or outcome.is_a(LeaveGroup):
                break
            sent_at = self._sent.get((cp, offset), 0.0)
            if sent_at >= self._doubts.get((process.name, key), inf):
                del self._doubts[process.name, key]
            self._beats[process.name, key] = max(
                self._beats.get((process.name, key), (0.0, 0)), (sent_at, outcome.log_time)
            )
        if outcome.accepted and offset in (outcome.epoch, outcome.share):
            self._granted(process, driver, offset, outcome)

    def _check_successor(self, record: JoinGroup, offset: int) -> None:
        """An accepted JoinGroup is not of a former member that has seen its successor join (G20)."""
        name = record.instance_id.rpartition(".")[0]
        number, (newest, joined) = int(name.rpartition("#")[2]), self._newest.get(record.client_id, (0, -1))
        if number < newest and name in self._were_members and joined < record.seen:
            self._fail("replaced", f"{name} joins again, though {record.client_id}#{newest} has taken its place (G20)")
        self._newest[record.client_id] = number, offset  # one that arrives after its successor left is the newest

    def _check_member(self, process: Living, driver: Driver, offset: int, outcome: Outcome) -> None:
        """A member of the coordinated group and its engine have applied a record."""
        message, source = outcome.message, member(driver)
        if message is None or source is None or message.group_id != self._scenario.group_id:
            return
        if source.member.joined:
            self._were_members.add(process.name)
        if outcome.is_a(JoinGroup) and message.instance_id == driver.engine.settings.instance_id:
            self._grants[process.name, _ALL] = self._scheduler.now, offset
        for key, piece in source.pieces.items():
            if self._grants.get((process.name, key), _NO_GRANT)[1] != piece.epoch:
                self._grants[process.name, key] = self._scheduler.now, piece.epoch

    def was_granted(self, process: Living, key: Key) -> bool:
        """Whether a process ever saw this lease granted to it."""
        return (process.name, key) in self._grants

    def _granted(self, process: Living, driver: Driver, epoch: int, outcome: Outcome) -> None:
        if (named := outcome.lease) is None:
            return
        key, book = named[1:], driver.engine.book
        self._doubts.pop((process.name, key), None)
        lease = book.leases.get(key)
        if lease is not None and lease.epoch == epoch:
            self._grants[process.name, key] = self._scheduler.now, epoch
            logged = driver.replica.worlds[lease.cp].lease(self._scenario.group_id, *key)
            own, said = lease.heartbeat_interval_ms, logged.heartbeat_interval_ms if logged is not None else -1
            if logged is not None and logged.epoch == epoch and own != said:
                self._fail(
                    "trust", f"{process.name} takes the HI of {name_of(key)} to be {own} ms, the log says {said} (C7)"
                )
        if lease is None or lease.epoch != epoch:
            wanted = (*key, epoch)
            if not any(
                isinstance(effect, Append)
                and isinstance(effect.record, ReleasingPartition)
                and (effect.record.topic, effect.record.partition, effect.record.epoch) == wanted
                for effect in driver.engine.outbox.effects
            ):
                self._fail(
                    "let go",
                    f"{process.name} was granted {name_of(key)} (epoch {epoch}), and neither uses nor releases it",
                )
        limit = self._limits.get(process.client_id)
        held = sum(lease.held for lease in book.leases.values())
        if limit is not None and held > limit:
            self._fail("limit", f"{process.name} holds {held} leases, and its policy allows {limit}")

    def _check_repeated(self, process: Living, driver: Driver) -> None:
        """A release that the log does not show is sent again after HI (C17)."""
        source = member(driver) if self._is_coordinated else None
        pieces = source.pieces.values() if source is not None and not source.member.leaving else ()
        sent = [(x.key, x.letting_go.sent_at, x.heartbeat_interval_ms, "G18") for x in pieces if x.letting_go]
        for key, lease in driver.engine.book.leases.items():
            if lease.state is LeaseState.RELEASING:
                sent.append((key, lease.pending.release_sent_at, lease.heartbeat_interval_ms, "C17"))
        for key, sent_at, hi, rule in sent:
            late = driver.now_ms() - sent_at
            if late > REPEATED_INTERVALS * hi and -inf < sent_at and self._scheduler.now > process.stopped_until + hi:
                what = f"{process.name} released {name_of(key)} {late:.0f} ms ago, and not again ({rule})"
                self._fail("let go", what)

    def read(self, process: Living, driver: Driver) -> None:
        """A member's replica and its engine have applied a batch."""
        self.check_trust([(process, driver)], has_compared=False)
        if not self.checks_every_record:
            return
        for key, lease in holdings(driver).items():
            if last_proof(driver, lease)[0] == -inf:
                continue  # nothing is trusted: the ack of its join, say, did not arrive
            if lease.held and self._ahead(process, driver, lease) > DOUBT_INTERVALS * lease.heartbeat_interval_ms:
                self._doubts.setdefault((process.name, self._proven_with(key)), self._scheduler.now)

    def _proven_with(self, key: Key) -> Key:
        """The key of the heartbeats that keep this partition."""
        return _ALL if self._is_coordinated else key

    def _ahead(self, process: Living, driver: Driver, held: Held) -> float:
        """How far log time ran ahead of a member's clock since its last heartbeat (T5)."""
        sent_at, log_time = self._beats.get((process.name, self._proven_with(held.key)), _NEVER)
        elapsed: float = (self._scheduler.now - sent_at) * process.runtime.rate
        return driver.replica.worlds[held.cp].log_time - log_time - elapsed

    def released(
        self, process: Living, key: Key, sent_at: float, concerns: Callable[[int], bool] = lambda _: True
    ) -> None:
        """A release was accepted; a message in flight when it was sent must have had ``revoke_timeout``.

        concerns: whether an offset's key was released.
        """
        self.on_released(process, key, concerns)
        lost_at = self._lost.get((process.name, key), -1.0)
        if process.host.is_admin or self._scenario.at_most_once or _closes(process):
            return
        in_hand = self._in_hand.get((process.name, key), {})
        self._note_producer(process, key)
        opened_at = self._opened.get((process.name, key), (0, -1.0))[1]
        after = max(lost_at, opened_at)
        since = {offset: begun for offset, begun in in_hand.items() if after < begun < sent_at and concerns(offset)}
        if not since:
            return
        slack_ms = SLACK_MS + MOST_LINGER * self._scenario.longest_interval_ms * self._scenario.lists
        if (sent_at - min(since.values())) * process.runtime.rate >= _revoke_ms(process) - slack_ms:
            self._lost[process.name, key] = sent_at  # abandoned: the release waits for this one at most
            return
        where = f"{process.name} released {name_of(key)} at {sent_at:.1f} ms"
        self._fail("let go", f"{where}, with offset {next(iter(since))} in flight")

    def lost(self, process: Living, key: Key, reason: str) -> None:
        """A member has lost a lease."""
        again_ms = self._scheduler.now - self._lost.get((process.name, key), -inf)
        is_late = process.host.in_lanes and reason == Loss.HANDLER_TIMEOUT
        left_at, now = self._lost.get((process.name, _ALL)), self._scheduler.now
        if is_late and self._is_coordinated:  # one handler costs it all pieces: those after the first are not judged
            self._lost[process.name, _ALL] = now
        if is_late and again_ms < process.heartbeat_interval_ms and left_at != now:
            what = f"{process.name} lost {name_of(key)}, which it had lost {again_ms:.0f} ms ago"
            self._fail("let go", f"{what}, to a handler whose timeout can't have passed since")
        self._lost[process.name, key] = self._scheduler.now
        if reason == Loss.FENCED:
            self._fenced[process.name, key] = self._scheduler.now
        if not self._is_coordinated:
            self._doubts.pop((process.name, key), None)

    @property
    def is_calm(self) -> bool:
        """Whether nothing has gone wrong for two HI."""
        since = self.calm_since
        return since is not None and self._scheduler.now >= since + 2 * self._scenario.longest_interval_ms

    def check_beats(self, world: World, running: dict[str, Driver]) -> None:
        """When all is well: check the age of last heartbeats."""
        group = world.group(self._scenario.group_id)
        for one in group.members.values() if group is not None and world.pause(group.group_id) is None else ():
            driver = running.get(one.instance_id.rpartition(".")[0])
            source = None if driver is None else member(driver)
            if source is not None and source.member.me is not None and source.member.me.joined == one.joined:
                joined_at = self._grants.get((one.instance_id.rpartition(".")[0], _ALL), _NO_GRANT)[0]
                silent = min(world.log_time - one.last_beat, self._scheduler.now - joined_at)
                if silent > OLDEST_BEAT * one.session_timeout_ms:
                    self._fail("beats", f"{one.instance_id} has not beaten for {silent:.0f} ms of log time (G20)")
        for lease in world.leases():
            name = (lease.instance_id or "").rpartition(".")[0]
            driver = running.get(name)
            if driver is None or not lease.held or world.pause(lease.group_id) is not None:
                continue
            key = (lease.topic, lease.partition)
            own = driver.engine.book.leases.get(key)
            # The first heartbeat is due from when the member saw the grant.
            seen = self._scheduler.now - self._grants.get((name, key), _NO_GRANT)[0]
            age = min(lease.age(world.log_time), seen)
            if age <= OLDEST_BEAT * lease.heartbeat_interval_ms:
                continue
            if own is not None and own.held and own.epoch == lease.epoch:
                self._fail(
                    "beats",
                    f"{lease.instance_id} has not beaten {name_of(key)} for {age:.0f} ms of log time",
                )

    # Messages.

    def begins(self, process: Living, key: Key, offset: int) -> None:
        """A worker begins to handle a message."""
        now = self._scheduler.now
        self._note_producer(process, key)
        self._in_hand.setdefault((process.name, key), {})[offset] = now
        for driver in process.drivers:
            if (lease := holdings(driver).get(key)) is not None:
                self._check_trust(process, driver.now_ms(), key, lease)
                if process.host.begins_at_once:
                    self._check_late(process, key, f"offset {offset}", lease)
        if not process.host.begins_at_once or self._scenario.at_most_once:
            return  # other workers may have had it in flight for a while
        hi = self._scenario.longest_interval_ms
        for driver in process.drivers:
            lease = holdings(driver).get(key)
            if lease is None:
                continue
            began, ends = self._pauses.get((process.name, lease.cp), (now, now))
            late = now - max(began, process.stopped_until)
            if now < ends and late > PAUSE_GRACE_INTERVALS * hi:
                self._fail("pause", f"{process.name} begins {name_of(key)} offset {offset}, {late:.0f} ms into a pause")

    def received(self, process: Living, key: Key) -> None:
        """A worker received messages, possibly collected for a while."""
        for driver in process.drivers:
            if (lease := holdings(driver).get(key)) is not None:
                self._check_late(process, key, "messages", lease)

    def _check_late(self, process: Living, key: Key, what: str, held: Held) -> None:
        """Granted or not, no message is delivered when the lease may be over (T4)."""
        sent_at, _ = self._beats.get((process.name, self._proven_with(key)), _NEVER)
        elapsed = (self._scheduler.now - sent_at) * process.runtime.rate
        if elapsed > longest_trust_ms(held) + SLACK_MS:
            self._fail(
                "trust",
                f"{process.name} gets {name_of(key)} {what}, {elapsed:.0f} ms by its clock after it sent "
                "its last beat that was accepted (T4)",
            )

    # What a member trusts.

    def check_trust(self, members: Iterable[tuple[Living, Driver]], *, has_compared: bool = True) -> None:
        """Check all members that may deliver messages now. has_compared: the engine knows log time."""
        for process, driver in members:
            if process.is_running:
                now = driver.now_ms()
                for key, lease in holdings(driver).items():
                    if now < lease.hand_out_until:
                        self._check_trust(process, now, key, lease)
                        if self.checks_every_record and has_compared:
                            self._check_ahead(process, driver, now, lease)

    def _check_ahead(self, process: Living, driver: Driver, now: float, lease: Held) -> None:
        """A trusted lease lies no further behind log time than the margin, by the member's own proof (T5)."""
        sent_at, log_time = last_proof(driver, lease)
        ahead = driver.replica.worlds[lease.cp].log_time - log_time - (now - sent_at)
        if ahead > margin_ms(lease) + SLACK_MS:
            self._fail(
                "doubt", f"{process.name} trusts {name_of(lease.key)}, and log time is {ahead:.0f} ms ahead (T5)"
            )

    def _check_trust(self, process: Living, now: float, key: Key, lease: Held) -> None:
        """Check the lease's age; now: by the process's own clock."""
        if not lease.held or lease.hand_out_until <= now:
            return
        sent_at, _ = self._beats.get((process.name, self._proven_with(key)), _NEVER)
        longest = longest_trust_ms(lease)
        trusted = (self._scheduler.now - sent_at) * process.runtime.rate + lease.hand_out_until - now
        if trusted > longest + SLACK_MS:
            self._fail(
                "trust",
                f"{process.name} trusts {name_of(key)} for {trusted:.0f} ms by its clock after it sent the last beat "
                f"that was accepted; 2 · HI less the margin is {longest:.0f} (T4)",
            )
        if self._doubts and (process.name, self._proven_with(key)) in self._doubts:
            self._fail(
                "doubt",
                f"{process.name} trusts {name_of(key)}, though log time ran ahead of its clock, and no beat "
                "that it sent after that is accepted yet (T5)",
            )

    def _note_producer(self, process: Living, key: Key) -> None:
        """A new producer is needed: the fate of a commit is not known, and what was in flight is dropped (M2)."""
        consumers = [each for driver in process.drivers for each in driver.engine.consumers.values()]
        taking = [each.assignments[key].taking for each in consumers if key in each.assignments]
        asked = max((each.attempt for each in taking), default=0)
        last, _ = self._opened.get((process.name, key), (0, 0.0))
        if asked > last or (self._scenario.transactions and not all(each.is_done for each in taking)):
            self._opened[process.name, key] = (asked, self._scheduler.now)

    def handled(self, process: Living, key: Key, offset: int) -> None:
        """A worker has handled a message."""
        self._in_hand.get((process.name, key), {}).pop(offset, None)

    # Snapshots.

    def snapshot(self, cp: int, value: bytes, log: Recorded) -> None:
        """A part of a snapshot or a hash of the log was written; log: the authoritative one."""
        if (stored := decode_hash(value)) is not None:
            if stored != log.hash(cp, stored.since, stored.next_offset):
                self._fail("snapshots", f"the hash of offsets {stored.since} to {stored.next_offset - 1} is wrong")
            return
        try:
            part = decode_part(value)
        except MalformedPartError as error:
            self._fail("snapshots", f"a member wrote no snapshot: {error}")
            return
        if part.partition != cp or part.next_offset % self._scenario.snapshots:
            self._fail(
                "snapshots", f"one of partition {part.partition} at offset {part.next_offset}: none is due there"
            )
        elif log.digests[cp].get(part.next_offset) != part.digest:
            self._fail(
                "snapshots", f"the one of partition {cp} at offset {part.next_offset} differs from the state there"
            )

    def check_in_hand(self, consumers: Iterable[tuple[Living, ConsumerEngine]]) -> None:
        """At the end: the count of messages in flight equals the sum over runs."""
        for process, consumer in consumers:
            for assignment in consumer.assignments.values() if process.is_running else ():
                tracker = assignment.tracker
                tracker.follow()
                has = sum(run.size - run.done_count for run in tracker.runs.values())
                if tracker.in_hand != has:
                    where = f"{process.name} counts {tracker.in_hand} messages of {name_of(assignment.key)}"
                    self._fail("in hand", f"{where} as in flight, and has delivered {has}")
                    return


def _beaten(outcome: Outcome) -> list[Key]:
    """The leases whose last heartbeat this record moved."""
    is_grant = outcome.is_a(ClaimingPartition, ClaimingShare) and outcome.code == codes.OK
    is_beat = outcome.is_a(Heartbeat, HeartbeatBatch, SettlingMessages) and not outcome.by_operator
    return [lease[1:] for lease, _ in outcome.leases] if is_grant or is_beat else []


def _revoke_ms(process: Living) -> float:
    """The shortest ``revoke_timeout`` of its consumers (ms)."""
    consumers = [consumer for driver in process.drivers for consumer in driver.engine.consumers.values()]
    return min((consumer.settings.revoke_timeout_ms for consumer in consumers), default=inf)


def _closes(process: Living) -> bool:
    """Whether one of its consumers closes: messages in flight then stay undone."""
    engines = [driver.engine for driver in process.drivers]
    return (
        process.end.ended
        or not any(consumer for engine in engines for consumer in engine.consumers.values())
        or any(consumer.closing for engine in engines for consumer in engine.consumers.values())
    )
