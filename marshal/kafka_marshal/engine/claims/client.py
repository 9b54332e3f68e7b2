"""One consumer's partitions by leases: claims as its policy decides, and the records that keep and commit them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import cast

from kafka_marshal.engine.claims.leases import HeldLease, LeaseBook
from kafka_marshal.engine.claims.peers import Peers
from kafka_marshal.engine.claims.placement import Placement
from kafka_marshal.engine.effects import Outbox, Warn
from kafka_marshal.engine.holding import Holding, Owner
from kafka_marshal.engine.plane import PASSING, PAUSED, SURPLUS, UNWANTED, Checkpointing, Loss, Settles, Work
from kafka_marshal.engine.settings import ConsumerSettings, EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import MarshalError
from kafka_marshal.types import Key, Start
from rationalizer import ClaimingMessages, CommitRanges, Progress, SettlingMessages
from rationalizer.holes import Hole


class Prior:
    """The leases of a group, by topic, at the time of creation."""

    def __init__(self, peers: Peers) -> None:
        #: Topic → (number of partitions, CP → offset of the oldest claim that is still a lease's epoch).
        self._topics: dict[str, tuple[int, dict[int, int]]] = {}
        held: dict[str, set[int]] = {}
        for topic, partition in peers.claimed:
            held.setdefault(topic, set()).add(partition)
        for topic, partitions in held.items():
            if len(partitions) == max(partitions) + 1:
                self._topics[topic] = len(partitions), self._oldest(peers, topic, partitions)

    @staticmethod
    def _oldest(peers: Peers, topic: str, partitions: set[int]) -> dict[int, int]:
        oldest: dict[int, int] = {}
        for partition in partitions:
            if (lease := peers.lease((topic, partition))) is not None:
                cp = peers.cp_of((topic, partition))
                oldest[cp] = min(lease.epoch, oldest.get(cp, lease.epoch))
        return oldest

    def claims_before(self, key: Key) -> Mapping[int, int]:
        """CP → offset of the topic's oldest claim, if the partition's number is above all that were ever held; else {}.

        If such a claim is older than a member needs to see that a topic has grown, the partition was added later.
        """
        count, oldest = self._topics.get(key[0], (0, {}))
        return oldest if 0 < count <= key[1] else {}


#: An evicted member leaves the partition to others for this many heartbeat intervals (C18).
EVICTED_INTERVALS = 3


def _lease(own: Holding) -> HeldLease:
    return cast("HeldLease", own)  # it comes from ``ClaimsClient.claim``


class LeaseView:
    """A :class:`~kafka_marshal.engine.plane.ReplicaView` of the leases of a group."""

    def __init__(self, peers: Peers, subscription: Subscription) -> None:
        self._peers = peers
        self._subscription = subscription

    def progress(self, key: Key) -> Progress | None:
        lease = self._peers.lease(key)
        return None if lease is None else lease.progress

    #: A lease is of all keys.
    whole_progress = progress

    def open(self, key: Key) -> Sequence[Hole]:
        progress = self.progress(key)
        return () if progress is None else progress.open

    def is_held(self, key: Key) -> bool:
        lease = self._peers.lease(key)
        return lease is not None and lease.held

    #: Who claims a lease that has a holder takes it over.
    is_left = is_held

    def is_first(self, key: Key) -> bool:
        return key not in self._peers.claimed

    def came_later(self, key: Key) -> bool:
        return key in self._subscription.grown

    def hole_count(self, cp: int) -> int:
        return self._peers.hole_count(cp)

    def log_time(self, cp: int, now: float) -> float:
        return self._peers.log_time(cp, now)

    def is_stopped(self, cp: int) -> bool:
        return self._peers.is_stopped(cp)

    def closed(self, cp: int, now: float) -> str:
        if self.is_stopped(cp):
            return "its part of the coordination topic needs a newer release"
        return "" if self._peers.paused_until(cp, now) is None else PAUSED


class LeaseReports:
    """A :class:`~kafka_marshal.engine.plane.PartitionReports` of leases."""

    needs_start = False

    def __init__(
        self,
        ids: tuple[str, str, str],
        book: LeaseBook,
        outbox: Outbox,
        peers: Peers,
        leave_alone: Callable[[Key, float], object] | None = None,
    ) -> None:
        """leave_alone: leaves a partition that we released to others for a while; None: they need not have it."""
        self._ids = ids
        self._peers = peers
        self._book = book
        self._outbox = outbox
        self._leave_alone = leave_alone

    def beat(self, own: Holding, last_offset: int, now: float) -> None:
        self._book.beat(_lease(own), last_offset, now)

    def prove(self, own: Holding, now: float) -> int:
        return self._book.beat(_lease(own), None, now)

    def commit(self, own: Holding, ranges: Sequence[tuple[int, int]]) -> None:
        self._outbox.append(own.cp, CommitRanges(*self._ids, *own.key, int(own.epoch), tuple(ranges)))

    def settle(self, own: Holding, entries: Settles, now: float) -> None:
        about = (*self._ids, *own.key, own.epoch, self._peers.next_offset(own.cp))
        self._outbox.append(own.cp, SettlingMessages(*about, entries.done, entries.open, entries.parked))

    def grant(self, own: Holding, last_offset: int, now: float) -> None:
        self._outbox.append(own.cp, ClaimingMessages(*self._ids, *own.key, own.epoch, last_offset))

    def let_go(self, own: Holding, last_offset: int | None, why: str, now: float) -> None:
        self._book.release(_lease(own), last_offset, now)
        # After a pause the first claim gets the partition.
        if self._leave_alone is not None and why not in (PAUSED, SURPLUS):
            self._leave_alone(own.key, now)

    def give_back(self, own: Holding, last_offset: int | None) -> None:
        self._book.release_epoch(own.key, own.cp, own.epoch, last_offset)


class ClaimsClient:
    """The source of a consumer's partitions: a :class:`~kafka_marshal.engine.plane.PartitionSource`."""

    def __init__(
        self,
        settings: EngineSettings,
        wanted: ConsumerSettings,
        subscription: Subscription,
        book: LeaseBook,
        peers: Peers,
        outbox: Outbox,
        lets_all_go: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._wanted = wanted
        self._book = book
        self._peers = peers
        self._outbox = outbox
        self.lets_all_go = lets_all_go
        self.view: LeaseView = LeaseView(peers, subscription)
        #: Whether this Marshal already holds or wants the lease.
        self.is_taken: Callable[[object], bool] = book.leases.__contains__
        self.failure: MarshalError | None = None
        self.checkpoints: Checkpointing | None = None
        self.takes_checkpoints: bool = False
        #: Only if the group does not start at the earliest offset, since it reads every lease of the group.
        self._prior = None if wanted.start == "earliest" else Prior(peers)

    def attach(self, work: Work) -> None:
        """Set the consumer; called once, before anything else."""
        self._work = work
        self.placement: Placement = Placement(work, self, self._peers, self._settings, self._wanted)
        about = self._settings.ids, self._book, self._outbox, self._peers
        self.reports: LeaseReports = LeaseReports(*about, self.placement.leave_alone)

    # Called by its consumer.

    def still_lets_go(self, own: Holding, why: str, now: float) -> bool:
        return why not in PASSING  # ``Placement.wishes`` asks the policy again

    def lose(self, own: Holding, reason: Loss, now: float) -> None:
        self._book.lose(_lease(own), reason, now)

    def drop(self, own: Holding) -> None:
        self._book.drop(_lease(own))

    @property
    def has_left(self) -> bool:
        """Whether the log has answered every claim, and shows a release of each unwanted grant."""
        return not self._book.unseen

    def look_again(self, key: Key | None = None) -> None:
        if key is None:
            self.placement.dirty = True
        else:
            self.placement.changed(key)

    def taken_away(self, key: Key, reason: str, now: float) -> bool:
        if reason == Loss.EVICTED:
            self.placement.leave_alone(key, now, EVICTED_INTERVALS)
        return reason == Loss.EVICTED

    def log_time_moved(self, cp: int, now: float) -> None:
        """Log time moved in a CP on a member's request (T3)."""
        self.placement.log_time_moved(cp, now)

    def measured(self, own: Holding, done: int, log_end: int, now: float) -> None:
        self.placement.measure(own.key, own.epoch, done, log_end, now)

    # Claiming.

    def claim(self, key: Key, now: float, *, take_over: bool = False) -> None:
        """Claim a lease."""
        cp = self._peers.cp_of(key)
        self._take_on(key, lambda owner: self._book.want(key, cp, owner, HeldLease))
        self._touched(key)
        self._book.claim(self._book.leases[key], now, take_over=take_over)

    def _take_on(self, key: Key, want: Callable[[Owner], Holding]) -> None:
        before = None if self._prior is None else self._prior.claims_before(key)
        self._work.take_on(key, self.view.is_first(key), want, before)

    def _touched(self, key: Key) -> None:
        self.placement.touched(key)

    def step(self, now: float) -> None:
        wishes = self.placement.wishes(now) if self.failure is None else None
        if wishes is None:
            return
        for key in wishes.release:
            self._work.let_go(key, SURPLUS if key in wishes.surplus else UNWANTED, now)
        for key in wishes.claim:
            if not self.is_taken(key):
                self.claim(key, now)

    def deadline(self, now: float) -> float:
        wants_none = self.failure is not None or not self._work.takes_on or self.lets_all_go()
        return inf if wants_none else self._next_claim()

    def _next_claim(self) -> float:
        return self.placement.deadline


class NamedClient(ClaimsClient):
    """A source without a policy: a partition is claimed as soon as the log, or a rest after a refusal, allows it."""

    #: Code of a refused claim → the warning, once for each partition.
    refusals: Mapping[str, str] = {}

    def attach(self, work: Work) -> None:
        self._work = work
        self.reports: LeaseReports = LeaseReports(self._settings.ids, self._book, self._outbox, self._peers)
        #: Partition → when (own clock, ms) it may be claimed.
        self._claim_at: dict[Key, float] = {}
        #: Partitions whose refusal was reported.
        self._told: set[Key] = set()
        self._is_dirty = True
        #: Our own clock's time (ms) of the last step.
        self.now: float = 0.0

    def start_for(self, key: Key) -> Start | None:
        """Where the group begins, to be looked up before the claim says it (B3); None: it is claimed at once."""
        raise NotImplementedError

    def claim_from(self, own: Holding, start: int | None, now: float) -> None:
        """Claim what is wanted of a partition; start: where the group begins if the log does not know the lease."""
        raise NotImplementedError

    def refused(self, key: Key, code: str, now: float) -> None:
        """The log refused a claim: wait until that may have changed, and say so once."""
        raise NotImplementedError

    def look_again(self, key: Key | None = None) -> None:
        self._is_dirty = True

    def log_time_moved(self, cp: int, now: float) -> None:
        self._is_dirty = True

    def measured(self, own: Holding, done: int, log_end: int, now: float) -> None:
        pass

    def granted(self, key: Key) -> None:
        """The log granted what is wanted of a partition."""
        self._told.discard(key)
        self._claim_at.pop(key, None)

    def _say(self, key: Key, code: str) -> None:
        if code in self.refusals:
            self._told.add(key)
            self._outbox.add(Warn(f"{key[0]} [{key[1]}]: {self.refusals[code]}"))

    def _touched(self, key: Key) -> None:
        pass

    def _next_claim(self) -> float:
        return min(self._claim_at.values(), default=inf)
