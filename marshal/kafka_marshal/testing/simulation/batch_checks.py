"""Invariants of partitions that many share by batches, in place of those of one owner.

=====================  =========================================================================================
one hand               no message begins in a process while another one may begin it too, each by its own clock (T4);
                       what a process begins is its own by the log, under the token that it knows (B5)
tokens grow            with each member that is given a message, also where a partition is held whole in between
beats                  a share is ended as silent only if something kept its member from beating (B4)
little repeated        a message that was handled comes again only after its share was ended so; of a member that was
                       killed or stopped, those of its last two batches at most
nothing set aside      that no worker has failed with, unless more members were given it than may be (U10): then it is
                       begun no more; beside a message that kills, only what others of them did not finish either
=====================  =========================================================================================

Nothing is lost, progress, owners of whole partitions, trust and all else: as in :mod:`checks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kafka_marshal.engine.settings import SharingOptions
from kafka_marshal.engine.shares.consumer import SharedAssignment
from kafka_marshal.engine.shares.desk import ALONE_AFTER
from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.engine.work.settlements import CRASHED
from kafka_marshal.ports import Message
from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.holdings import in_flight_of, name_of, place_of
from kafka_marshal.testing.simulation.ledger import NOT_NEEDED, LeaseSeen
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.testing.simulation.recorded import Judge
from kafka_marshal.testing.simulation.scenario import Fault, Scenario
from kafka_marshal.testing.simulation.scheduler import Scheduler
from kafka_marshal.types import Key
from rationalizer import Lease, Record, ReleasingPartition, SettlingMessages, World, codes, route_lease
from rationalizer.holes import Hole

Place = tuple[Key, int]

#: What can keep a member from beating, and what loses its reports, too; and for how long after it (HI).
SILENCING = frozenset(
    {"crash", "stop", "zombie", "lost", "unacknowledged", "late", "slow network", "deaf", "cut off", "outage", "clock"}
)
LOSING = frozenset({"lost", "unacknowledged", "late", "slow network", "deaf", "cut off", "outage", "clock"})
PAUSING = frozenset({"pause", "brief pause", "forget"})
AFTER_INTERVALS, AFTER_PAUSE = 5.0, 15.0
#: In place of who handled a message.
NOBODY = (NOT_NEEDED[0], -1, -1)
#: Batches of a member that died whose messages may come again.
LAST_BATCHES = 2


class HandedOut(NamedTuple):
    """What a message is in flight with."""

    assignment: Assignment
    #: The fencing token.
    token: int


@dataclass(slots=True)
class Books:
    """What was begun, and under which token."""

    #: Who has a message with a handler.
    in_hand: dict[Place, list[tuple[Living, Message, HandedOut | None]]] = field(default_factory=dict)
    #: The largest token under which a message was begun, and by whom.
    tokens: dict[Place, tuple[int, Living]] = field(default_factory=dict)
    #: (process, token, epoch) of who handled a message last.
    handled: dict[Place, tuple[Living, int, int]] = field(default_factory=dict)
    #: How many shares ended that had a message, of processes that no message killed.
    ended: dict[Place, int] = field(default_factory=dict)
    #: A worker failed with it, or an operator set it aside.
    failed: set[Place] = field(default_factory=set)
    #: Partition → epoch → instance of each share, and what it has, by the last record.
    shares: dict[Key, dict[int, tuple[str, list[Hole]]]] = field(default_factory=dict)
    #: (partition, epoch) of shares that were ended as silent.
    silent: set[tuple[Key, int]] = field(default_factory=set)
    #: Partition → offset of the last record that replaced its progress.
    reset: dict[Key, int] = field(default_factory=dict)


class BatchChecks(Checks):
    """The checks of a story whose partitions are shared by batches, or held whole."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, judge: Judge | None = None) -> None:
        super().__init__(scenario, scheduler, judge)
        self.books: Books = Books()

    # Records.

    def _judge_lease(self, world: World, key: Key, code: str, record: Record, sender: Living, sent_at: float) -> None:
        lease, before = world.lease(self._scenario.group_id, *key), self.accounts.seen.get(key)
        gone = () if lease is None or before is None else before.open.difference(_open(lease))
        if isinstance(record, SettlingMessages) and record.epoch is None:  # an operator gave these up
            self._need_not(key, gone)
            self.books.failed.update((key, entry[0]) for entry in record.parked)
        super()._judge_lease(world, key, code, record, sender, sent_at)
        if lease is None:
            return
        if code == codes.REPOSITIONED:
            self.books.reset[key] = world.next_offset - 1
            self._need_not(key, (offset for offset in gone if offset <= lease.progress.stable))
        self._check_shares(key, lease, record)
        self._check_set_aside(key, lease)

    def _need_not(self, key: Key, offsets: Iterable[int]) -> None:
        """An operator or an admin gave these up."""
        ledger = self.accounts.ledger(key)
        for offset in offsets:
            ledger.handled[offset] = NOT_NEEDED
            ledger.ever.add(offset)

    def _forgotten(self, cp: int) -> None:
        super()._forgotten(cp)
        for key in [key for key in self.accounts.seen if route_lease(*key, len(self.log.worlds)) == cp]:
            self.books.reset[key] = self.log.worlds[cp].next_offset - 1
            self.books.shares.pop(key, None)
            self.accounts.seen[key] = LeaseSeen(-1, -1, ())  # a share's lease has no epoch

    def _check_shares(self, key: Key, lease: Lease, record: Record) -> None:
        """Which shares this record ended."""
        epoch_of = record.epoch if isinstance(record, ReleasingPartition) else None
        now = {} if lease.shares is None else {each.epoch: each.instance_id for each in lease.shares}
        for epoch, (instance, had) in self.books.shares.get(key, {}).items():
            if epoch not in now:
                self._left(key, instance, had)
            if epoch not in now and epoch != epoch_of:
                self._ended(key, epoch, instance, had)
        holes = lease.progress.holes
        self.books.shares[key] = {
            epoch: (instance, [] if holes is None else holes.of(epoch)) for epoch, instance in now.items()
        }

    def _left(self, key: Key, instance: str, had: list[Hole]) -> None:
        """A share ended, perhaps before what it had was finished."""
        if instance.rpartition(".")[0] not in self.accounts.parking.killed:
            for place in ((key, offset) for hole in had for offset in range(hole.first, hole.last + 1)):
                self.books.ended[place] = self.books.ended.get(place, 0) + 1

    def _ended(self, key: Key, epoch: int, instance: str, had: list[Hole]) -> None:
        """A share was ended as silent."""
        self.books.silent.add((key, epoch))
        name = instance.rpartition(".")[0]
        client = name.rpartition("#")[0]
        lives = any(process.name == name and not process.end.ended for process, _ in self._watched)
        if lives and not self._was_in(SILENCING, client):
            self.fail(
                "beats", f"the share of {name} of {name_of(key)} was ended, and nothing kept it from beating (B4)"
            )
        repeated = {
            hole.since
            for hole in had
            for offset in range(hole.first, hole.last + 1)
            if self.books.handled.get((key, offset), NOBODY)[1:] == (hole.since, epoch)
        }
        if len(repeated) > LAST_BATCHES and not self._was_in(LOSING, client):
            what = f"{len(repeated)} batches of {name_of(key)} that it had handled and not reported"
            self.fail("repeated", f"the share of {name} was ended with {what}")

    def _was_in(self, kinds: frozenset[str], client: str) -> bool:
        """Whether such a fault befell this client, or the group was paused, until a little before now."""
        scenario, now = self._scenario, self._scheduler.now
        hi, longest = float(scenario.heartbeat_interval_ms), scenario.longest_interval_ms

        def covers(fault: Fault, after: float) -> bool:
            return fault.at * hi <= now <= (fault.at + fault.intervals) * hi + after * longest

        return any(
            (fault.kind in kinds and fault.client in ("", client) and covers(fault, AFTER_INTERVALS))
            or (fault.kind in PAUSING and covers(fault, AFTER_PAUSE))
            for fault in scenario.faults
        )

    def _check_set_aside(self, key: Key, lease: Lease) -> None:
        for hole in lease.progress.holes or ():
            most, killing = SharingOptions().max_deliveries, self.accounts.parking.killing
            is_crashed = hole.reason == CRASHED and hole.attempts > most
            if killing is not None and (key, hole.first) != killing:  # the first takers may have died of that one
                is_crashed = is_crashed and self.books.ended.get((key, hole.first), 0) >= most - ALONE_AFTER
            if hole.is_parked and not is_crashed and (key, hole.first) not in self.books.failed:
                self.fail("set aside", f"{name_of(key)} offset {hole.first} is, and no worker failed with it: {hole}")

    # Work.

    def begins(self, process: Living, message: Message) -> None:
        """A worker begins to handle a message."""
        key, offset = place_of(message)
        place = (key, offset)
        held = _in_hand(process, key, message)
        if held is not None and _is_sure(process, held) and self._terms.are_clocks_trusted:
            self._check_hand(process, place, held)
            self._check_log(process, place, held)
        if held is not None:
            self.books.tokens[place] = max(
                self.books.tokens.get(place, (-1, process)), (held.token, process), key=_token
            )
        self.books.in_hand.setdefault(place, []).append((process, message, held))
        super().begins(process, message)

    def _check_hand(self, process: Living, place: Place, held: HandedOut) -> None:
        """No other process may begin it now, and tokens grow."""
        for other, message, _ in self.books.in_hand.get(place, ()):
            its = _in_hand(other, place[0], message)
            if its is not None and _is_sure(other, its):
                where = f"{name_of(place[0])} offset {place[1]}"
                self.fail("one hand", f"{where} is begun by {process.name}, and {other.name} has it in flight (T4)")
        token, by = self.books.tokens.get(place, (-1, process))
        if token > held.token or (token == held.token and by is not process):
            what = f"under the token {held.token}, after {by.name} under {token}"
            self.fail("tokens", f"{process.name} begins {name_of(place[0])} offset {place[1]} {what}")

    def _check_log(self, process: Living, place: Place, held: HandedOut) -> None:
        """By the log, too, it is this process's."""
        (key, offset), assignment = place, held.assignment
        lease = self.log.worlds[assignment.lease.cp].lease(self._scenario.group_id, *key)
        if lease is None or self.books.reset.get(key, -1) > held.token:
            return
        hole = None if lease.progress.holes is None else lease.progress.holes.at(offset)
        if isinstance(assignment, SharedAssignment):
            is_its = hole is not None and (hole.owner, hole.since) == (assignment.epoch, held.token)
        else:
            is_its = lease.held and lease.epoch == assignment.epoch
        where = f"{process.name} begins {name_of(key)} offset {offset}"
        if not is_its:
            self.fail("one hand", f"{where}, and by the log it is not its own")
        elif process.host.shares and hole is not None and hole.attempts > SharingOptions().max_deliveries:
            self.fail("set aside", f"{where}, which {hole.attempts - 1} members were given and did not finish (U10)")

    def handled(self, process: Living, message: Message, *, in_vain: bool = False) -> None:
        """A worker has handled a message; in_vain: its handler failed."""
        place = place_of(message)
        mine = [each for each in self.books.in_hand.get(place, ()) if each[0] is process and each[1] is message]
        for each in mine[:1]:
            self.books.in_hand[place].remove(each)
            ends_late = _in_hand(process, place[0], message) is None  # after a drain's time-out, say
            if each[2] is not None and not in_vain and not ends_late:
                self.books.handled[place] = (process, each[2].token, int(each[2].assignment.epoch))
        if in_vain:
            self.books.failed.add(place)
        super().handled(process, message, in_vain=in_vain)

    def _begins_again(self, process: Living, key: Key, offset: int, assignment: Assignment | None) -> None:
        super()._begins_again(process, key, offset, assignment)
        before = self.accounts.ledger(key).handled.get(offset)
        former, token, epoch = self.books.handled.get((key, offset), NOBODY)
        if assignment is None or before is None or former is not before[0] or self.books.reset.get(key, -1) > token:
            return
        is_share = former.host.shares
        if is_share and (key, epoch) not in self.books.silent:
            where = f"{name_of(key)} offset {offset} was handled by {former.name} at {before[1]:.1f} ms"
            self.fail("repeated", f"{where}, whose share was not ended as silent; {process.name} handles it again")


def _token(of: tuple[int, Living]) -> int:
    return of[0]


def _open(lease: Lease) -> set[int]:
    return {offset for hole in lease.progress.holes or () for offset in range(hole.first, hole.last + 1)}


def _in_hand(process: Living, key: Key, message: Message) -> HandedOut | None:
    """What this message is in flight with; None: it is not, or was given to others."""
    assignment = in_flight_of(process, key, message)
    if not isinstance(assignment, SharedAssignment):
        return None if assignment is None else HandedOut(assignment, int(assignment.epoch))
    given = assignment.desk.at(message.offset() or 0)
    return None if given is None else HandedOut(assignment, given.token)


def _is_sure(process: Living, held: HandedOut) -> bool:
    """Whether it may begin it now, by its own clock."""
    if not process.is_running or process.end.replaced:
        return False
    now: float = process.runtime.now_ms()
    return now < held.assignment.lease.hand_out_until


def is_waiting(worlds: Iterable[World], group_id: str) -> bool:
    """Whether messages are open that are not set aside."""
    return any(
        not hole.is_parked
        for world in worlds
        for lease in world.leases()
        if lease.group_id == group_id
        for hole in lease.progress.holes or ()
    )
