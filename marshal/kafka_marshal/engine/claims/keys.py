"""Partitions, or some keys of them, that the program names itself (U12): claimed one by one, and kept.

A partition's ranges of keys are a share each (B1), claimed in ascending order. It is worked on when the log has granted
all of them. If one is refused, those granted are released: so no two members wait for each other.
Shares by batches (U7) are claimed, kept and reported in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf
from typing import NamedTuple, Protocol, cast

from kafka_marshal.engine.claims.client import EVICTED_INTERVALS, LeaseReports, LeaseView, NamedClient
from kafka_marshal.engine.claims.leases import HeldLease, LeaseBook, LeaseState
from kafka_marshal.engine.claims.peers import Peers
from kafka_marshal.engine.holding import HandIn, Holding, Owner
from kafka_marshal.engine.key_share import KeyShare, Span
from kafka_marshal.engine.plane import Loss, Settles, Work
from kafka_marshal.engine.settings import MAX_SHARES
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.types import Key, SharedEpoch, Start
from rationalizer import ClaimingShare, Lease, Progress, Record, SettlingMessages, codes
from rationalizer.holes import Hole, Holes
from rationalizer.leases.shares import Share
from rationalizer.limits import NOTHING_DONE
from rationalizer.wire.records import Done, Opened, Parked, Take

#: In heartbeat intervals: what another mode has left is claimed when our replica shows that it is done, or after this.
WRONG_MODE_REST = 10.0

#: How many partitions each member has shares of, of those that it would have alone.
SHARED_BY = 2


class ShareLease(HeldLease):
    """A part of a lease, by batches. It outlasts silence: until another member ends it, its beats are accepted (B4)."""

    __slots__ = ("start",)

    is_share = True
    is_claimed_with_start = True

    #: Where the group begins, if the log does not know the lease; None: at offset 0.
    start: int | None

    @property
    def claim_expires(self) -> float:
        return inf if self.pending.claim_sent_at is None else super().claim_expires

    @property
    def ends_at(self) -> float:
        return inf  # nothing is delivered past ``hand_out_until``; what is settled late counts (C6)

    def claim(self, ids: tuple[str, str, str], heartbeat_interval_ms: int) -> Record:
        return ClaimingShare(*ids, *self.key, heartbeat_interval_ms, None, None, self.start)

    def is_ours_in(self, lease: Lease | None, ids: tuple[str, str, str]) -> bool:
        return (
            lease is not None and lease.shares is not None and lease.shares.of(ids[0], ids[1], self.epoch) is not None
        )


class ShareView(LeaseView):
    """Open messages are what sharers work on: none stands in the way."""

    def open(self, key: Key) -> Sequence[Hole]:
        return ()


#: Why a share is released although the member could keep it.
MOVES = "it has nothing to do here, and messages wait in other partitions"


class _Seen(Protocol):
    """What a share knows of its partition."""

    #: A record may have changed that.
    is_dirty: bool

    @property
    def is_idle(self) -> bool:
        """Whether it has no batch, and nothing is free."""


def _share(own: Holding) -> ShareLease:
    return cast("ShareLease", own)  # it comes from ``ShareSource.claim``


#: Code of a refused claim → the warning.
_REFUSED_SHARE = {
    codes.HELD: (
        "another member works on it without mode=Batches(), or on some of its keys; this one waits until it has "
        "released it. Nothing is lost. Let all members of the group share batches, or none"
    ),
    codes.WRONG_MODE: (
        "members have worked on different keys of it, and are at different places, so it can't be shared by batches "
        "yet. Nothing is lost. Let a member hold it whole until all keys are at one place, or set its position"
    ),
    codes.GROUP_FULL: "it has as many sharers as the log keeps. This member waits, and works on other partitions",
}


class ShareSource(NamedClient):
    """The source of a consumer that shares its partitions by batches."""

    refusals: Mapping[str, str] = _REFUSED_SHARE

    def attach(self, work: Work) -> None:
        super().attach(work)
        self.view: ShareView = ShareView(self._peers, work.subscription)
        #: Partitions that are held in another mode.
        self._held: set[Key] = set()
        #: Partitions whose keys are at different places, as the log said when it refused a claim.
        self._scattered: set[Key] = set()
        #: Shares that had nothing to do at the last check, and when (own clock, ms) the next one is.
        self._idle: set[Key] = set()
        self._check_at = 0.0

    # What its consumer reads.

    def lease_of(self, key: Key) -> Lease | None:
        """The lease, as our replica has it."""
        return self._peers.lease(key)

    def next_offset(self, own: Holding) -> int:
        """The next offset of our replica of its CP."""
        return self._peers.next_offset(own.cp)

    def silent_in(self, share: Share, cp: int, now: float) -> float:
        """In how many ms a share will be silent, as far as we know; below 0: the next take ends it (U8)."""
        return share.deadline - self._peers.log_time(cp, now)

    # What its consumer sends.

    def start_for(self, key: Key) -> Start | None:
        if self.lease_of(key) is not None:
            return None
        return "earliest" if self.view.came_later(key) else self._wanted.start

    def claim_from(self, own: Holding, start: int | None, now: float) -> None:
        lease = _share(own)
        lease.start = start
        self._book.claim(lease, now)

    def settle(self, own: Holding, entries: Settles | None, taking: Take | None, now: float) -> None:
        """Settle messages, and take the next ones."""
        lease = _share(own)
        seen = self._peers.next_offset(lease.cp)
        record = SettlingMessages(*self._settings.ids, *lease.key, lease.epoch, seen, take=taking)
        if entries is not None:
            record = replace(record, done=entries.done, open=entries.open, parked=entries.parked)
        self._book.send(lease, record, now)

    # Claiming.

    def look_again(self, key: Key | None = None) -> None:
        super().look_again()
        for part in self._work.parts.values() if key is None else [self._work.parts.get(key)]:
            if part is not None:
                cast("_Seen", part).is_dirty = True

    def refused(self, key: Key, code: str, now: float) -> None:
        self._claim_at[key] = now + self._settings.heartbeat_interval_ms / 2
        if code == codes.HELD:
            self._held.add(key)
            self._claim_at[key] = max(self._claim_at[key], self._peers.opens_at(key, now))
        if code == codes.WRONG_MODE:
            self._scattered.add(key)
            self._claim_at[key] = now + WRONG_MODE_REST * self._settings.heartbeat_interval_ms
        if key not in self._told:
            self._say(key, code)

    def granted(self, key: Key) -> None:
        super().granted(key)
        self._held.discard(key)
        self._scattered.discard(key)

    def _may_claim(self, key: Key, now: float) -> bool:
        if now >= self._claim_at.get(key, 0.0):
            return True
        lease = self._peers.lease(key)
        if key in self._scattered and lease is not None and lease.progress.piece_count == 1:
            self._scattered.discard(key)
            return True
        return (
            key in self._held
            and lease is not None
            and not lease.held
            and (lease.shares is None or lease.shares.by_batches)
        )

    def taken_away(self, key: Key, reason: str, now: float) -> bool:
        if reason == Loss.EVICTED:
            self._claim_at[key] = now + 3 * self._settings.heartbeat_interval_ms
        return False  # messages in flight come again as a batch, at the member that takes it

    def step(self, now: float) -> None:
        self.now = now
        if self.failure is not None:
            return
        if self._is_limited and now >= self._check_at:
            self._check_at = now + self._settings.heartbeat_interval_ms
            self._move(now)
        if not (self._is_dirty or now >= super()._next_claim()):
            return
        self._is_dirty = False
        parts, blocked = self._work.parts, self._work.blocked
        open_now = [
            key
            for key in self._work.subscription.partitions
            if key not in parts and key not in blocked and not self.is_taken(key) and self._may_claim(key, now)
        ]
        self._claim_at = {key: at for key, at in self._claim_at.items() if at > now}
        room = self._most() - len(parts)
        for key in sorted(open_now, key=self._preference)[: max(0, room)]:
            if self.view.closed(self._peers.cp_of(key), now):
                self._claim_at[key] = now + self._settings.heartbeat_interval_ms / 2
                continue
            self.want(key, now)

    def _move(self, now: float) -> None:
        """Release one share that was idle at the last two checks, if messages wait where this member has none."""
        parts, partitions = self._work.parts, self._work.subscription.partitions
        if len(parts) < self._most():
            return
        idle = {key for key, part in parts.items() if cast("_Seen", part).is_idle and self._sharers(key) > 1}
        still_idle, self._idle = idle & self._idle, idle
        if still_idle and any(key not in parts and self._waits(key) for key in partitions):
            self._work.let_go(max(still_idle, key=self._sharers), MOVES, now)

    def _waits(self, key: Key) -> bool:
        """Whether messages seem to wait there: all of its sharers have batches."""
        lease = self._peers.lease(key)
        if lease is None or lease.shares is None or lease.progress.holes is None:
            return False
        return {share.epoch for share in lease.shares} <= set(lease.progress.holes.owners())

    def _preference(self, key: Key) -> tuple[bool, int]:
        return not self._waits(key), self._sharers(key)

    def want(self, key: Key, now: float) -> None:
        """Register that a share is wanted; its consumer has it claimed once it knows where the group begins."""
        cp = self._peers.cp_of(key)
        self._take_on(key, lambda owner: self._book.want(key, cp, owner, ShareLease))

    def _most(self) -> int:
        """How many partitions to have shares of."""
        partitions = self._work.subscription.partitions
        if len(partitions) <= self._wanted_shares:
            return len(partitions)
        workers = {share.client_id for key in partitions for share in self._shares(key)} | {self._settings.client_id}
        return max(self._wanted_shares, ceil(SHARED_BY * len(partitions) / len(workers)))

    @property
    def _wanted_shares(self) -> int:
        sharing = self._wanted.sharing
        return MAX_SHARES if sharing is None else sharing.max_shares

    def _shares(self, key: Key) -> Sequence[Share]:
        lease = self._peers.lease(key)
        return () if lease is None or lease.shares is None else list(lease.shares)

    def _sharers(self, key: Key) -> int:
        return len(self._shares(key))

    def _next_claim(self) -> float:
        return min(super()._next_claim(), self._check_at) if self._is_limited else super()._next_claim()

    @property
    def _is_limited(self) -> bool:
        """Whether there are more partitions than a member has shares of."""
        return len(self._work.subscription.partitions) > self._wanted_shares


#: In heartbeat intervals: how long a partition is left alone after a claim was refused, and after one was as HELD: our
#: replica shows when that ends.
REST, HELD_REST = 0.5, 0.1

#: Reasons for which the log has ended one of our shares; the others are still ours then.
_OF_THE_LOG = (Loss.FENCED, Loss.EVICTED)


class KeyLease(ShareLease):
    """A part of a lease: some keys."""

    __slots__ = ("hi", "lo", "parts", "told")

    def __init__(self, key: Key, cp: int, heartbeat_interval_ms: int, parts: KeyParts, span: Span) -> None:
        self.parts: KeyParts = parts
        self.lo: int = span[0]
        self.hi: int = span[1]
        #: The last_offset of its newest accepted beat that had one.
        self.told: int | None = None
        super().__init__(key, cp, heartbeat_interval_ms, _PartOwner(parts, self))

    @property
    def span(self) -> Span:
        return self.lo, self.hi

    @property
    def slot(self) -> Key:
        topic, partition = self.key
        return self.key if self.lo == self.parts.keys.lo else (f"{topic}\0{self.lo}", partition)

    def has(self, key: int) -> bool:
        """Whether it has a key hash."""
        return self.lo <= key <= self.hi

    def claim(self, ids: tuple[str, str, str], heartbeat_interval_ms: int) -> Record:
        return ClaimingShare(*ids, *self.key, heartbeat_interval_ms, self.lo, self.hi, self.parts.start)

    def refresh(self) -> None:
        """Of all parts, too."""
        super().refresh()
        self.parts.refresh()


class _PartOwner:
    """An :class:`~kafka_marshal.engine.holding.Owner` of one share: passes on what concerns all of them."""

    def __init__(self, parts: KeyParts, lease: KeyLease) -> None:
        self._parts = parts
        self._lease = lease

    def granted(self, now: float) -> None:
        self._parts.granted(now)

    def refused(self, code: str, now: float) -> None:
        if not self._parts.over:
            self._parts.owner.refused(code, now)

    def lost(self, reason: str, now: float) -> None:
        self._parts.lost(reason, now)

    def released(self, now: float) -> None:
        self._parts.released(now)

    def handed_in(self, hand_in: HandIn) -> None:
        if not self._parts.over:
            self._parts.owner.handed_in(hand_in)

    def beaten(self, last_offset: int | None, accepted: bool, now: float) -> None:
        if accepted and last_offset is not None:
            self._lease.told = last_offset
        self._parts.beaten(last_offset, accepted, now)

    def answered(self, last_offset: int, accepted: bool, code: str, now: float) -> None:
        """No share answers: it takes no type 4 (B2)."""

    def settled(self, taken: tuple[int, int] | None, now: float) -> None:
        self._parts.owner.settled(taken, now)

    def progress_to_report(self) -> int | None:
        return self._parts.owner.progress_to_report()


class KeyParts(Holding):
    """The shares of one partition."""

    keys: KeyShare
    is_claimed_with_start = True

    def __init__(self, key: Key, cp: int, keys: KeyShare, owner: Owner, book: LeaseBook, heartbeat_interval_ms: int):
        super().__init__(key, cp, heartbeat_interval_ms, owner)
        self.keys = keys
        #: Where the group begins, if the log does not know the lease (B3); None: at offset 0.
        self.start: int | None = None
        #: It was lost, or is not wanted any more: what follows of its shares has no effect.
        self.over: bool = False
        self._book = book
        self.leases: list[KeyLease] = []
        for span in keys.spans:
            self.leases.append(KeyLease(key, cp, heartbeat_interval_ms, self, span))
        for lease in self.leases:
            book.leases.add(lease)

    @property
    def epoch(self) -> SharedEpoch:
        """The newest of the shares' epochs; of each share its own."""
        parts = [(lease.lo, lease.hi, lease.epoch) for lease in self.leases]
        return SharedEpoch(max(epoch for _, _, epoch in parts), parts[0][0], parts[-1][1], parts)

    @property
    def held(self) -> bool:
        return all(lease.held for lease in self.leases)

    @property
    def proven_by(self) -> int:
        return min(lease.proven_by for lease in self.leases)

    @property
    def claim_expires(self) -> float:
        return min(lease.claim_expires for lease in self.leases)

    def may_hand_over(self, now: float) -> bool:
        return all(lease.may_hand_over(now) for lease in self.leases)

    def is_proven_until(self) -> float:
        return min([lease.proven_until for lease in self.leases], default=0.0)

    # Its shares.

    def claim_next(self, now: float) -> None:
        """Claim the next share."""
        self._book.claim(next(lease for lease in self.leases if lease.state is LeaseState.WANTED), now)

    def granted(self, now: float) -> None:
        """The log granted a share."""
        if self.held:
            self.owner.granted(now)
        else:
            self.claim_next(now)

    def drop(self, now: float) -> None:
        """It is not wanted any more, or a share was refused: release those that were granted."""
        self.over = True
        for lease in self.leases:
            if lease.state is LeaseState.WANTED:
                self._book.drop(lease)
            elif lease.held:
                self._book.release(lease, None, now)

    def lost(self, reason: str, now: float) -> None:
        """A share is over, and we did not release it: so is the rest."""
        if self.over:
            return
        self.over = True
        last_offset = self.owner.progress_to_report()
        self.owner.lost(reason, now)
        for lease in self.leases:
            if lease.state is LeaseState.WANTED:
                self._book.drop(lease)
            elif reason in _OF_THE_LOG and lease.held:
                self._book.release(lease, last_offset, now)
            elif lease.held:
                self._book.lose(lease, reason, now)

    def released(self, now: float) -> None:
        """The log shows the release of a share."""
        if not self.over and not any(lease.state is LeaseState.RELEASING for lease in self.leases):
            self.over = True
            self.owner.released(now)

    def beaten(self, last_offset: int | None, accepted: bool, now: float) -> None:
        """A beat of one share was applied: the start is reported when all have reported it."""
        if last_offset is None or all(lease.told == last_offset for lease in self.leases):
            self.owner.beaten(last_offset, accepted, now)


class KeyView(LeaseView):
    """A partition of which we have some keys is as if there were no others."""

    def __init__(self, peers: Peers, subscription: Subscription, ranges: Mapping[Key, Sequence[Span]]) -> None:
        super().__init__(peers, subscription)
        #: Partition → our keys; those of which we want all are left out.
        self.keys: dict[Key, KeyShare] = {}
        for key, spans in ranges.items():
            if spans:
                self.keys[key] = KeyShare(spans, partial(self.whole_progress, key))

    def progress(self, key: Key) -> Progress | None:
        keys = self.keys.get(key)
        return self.whole_progress(key) if keys is None else keys.progress()

    def whole_progress(self, key: Key) -> Progress | None:
        lease = self._peers.lease(key)
        return None if lease is None else lease.progress

    def open(self, key: Key) -> Sequence[Hole]:
        keys = self.keys.get(key)
        return super().open(key) if keys is None else keys.open()

    def is_held(self, key: Key) -> bool:
        lease = self._peers.lease(key)
        return lease is not None and (lease.held or lease.shares is not None)

    is_left = is_held

    def is_first(self, key: Key) -> bool:
        if key not in self.keys:
            return super().is_first(key)
        progress = self.progress(key)  # others may have claimed other keys before
        return progress is None or (progress.stable == NOTHING_DONE and not progress.ranges)


class _Entries(NamedTuple):
    """A :class:`~kafka_marshal.engine.plane.Settles`."""

    done: Done
    open: Opened
    parked: Parked


class KeyReports(LeaseReports):
    """Writes for each share what concerns its keys, and for a whole lease what others do."""

    def beat(self, own: Holding, last_offset: int, now: float) -> None:
        for lease in _leases(own):
            self._book.beat(lease, last_offset, now)

    def prove(self, own: Holding, now: float) -> int:
        return min(self._book.beat(lease, None, now) for lease in _leases(own))

    def settle(self, own: Holding, entries: Settles, now: float) -> None:
        if not isinstance(own, KeyParts):
            super().settle(own, entries, now)
            return
        seen = self._peers.next_offset(own.cp)
        for lease, of in self._by_share(own, entries):
            about = (*self._ids, *own.key, lease.epoch, seen)
            self._outbox.append(own.cp, SettlingMessages(*about, of.done, of.open, of.parked))

    def _by_share(self, own: KeyParts, entries: Settles) -> Iterator[tuple[KeyLease, Settles]]:
        """The entries, each with the share that has its key: no other may settle it (H2)."""
        if len(own.leases) == 1:
            yield own.leases[0], entries
            return
        done = [hole for hole in own.keys.open() if any(first <= hole.first <= last for first, last in entries.done)]
        for lease in own.leases:
            found = _Entries(
                tuple((hole.first, hole.last) for hole in done if lease.has(hole.key_hash)),
                tuple(each for each in entries.open if each[2] is not None and lease.has(each[2])),
                tuple(each for each in entries.parked if lease.has(each[1])),
            )
            if any(found):
                yield lease, found

    def let_go(self, own: Holding, last_offset: int | None, why: str, now: float) -> None:
        for lease in _leases(own):
            self._book.release(lease, last_offset, now)

    def give_back(self, own: Holding, last_offset: int | None) -> None:
        for lease in _leases(own):
            self._book.release_epoch(lease.key, lease.cp, lease.epoch, last_offset)


def _leases(own: Holding) -> Sequence[HeldLease]:
    return own.leases if isinstance(own, KeyParts) else [own]  # type: ignore[list-item]  # from ``KeySource``


#: Code of a refused claim → the warning.
_REFUSED = {
    codes.HELD: (
        "another member has it, or some of the keys that this one wants; this member waits, and takes over when it is "
        "released, or silent for two heartbeat intervals. Nothing is lost"
    ),
    codes.WRONG_MODE: (
        "members have shared it by batches, and some are not finished, so it can't be shared by keys yet. Nothing is "
        "lost. Let a worker with consumer([topic]) hold it whole until kafka-marshal open-messages shows no more of "
        "them, or settle them: kafka-marshal discard"
    ),
    codes.GROUP_FULL: "it has as many sharers, or pieces of keys, as the log keeps. This member waits",
}


class KeySource(NamedClient):
    """The source of a consumer whose partitions, and keys of them, the program has named."""

    refusals: Mapping[str, str] = _REFUSED

    def attach(self, work: Work) -> None:
        assert self._wanted.keys is not None
        super().attach(work)
        #: Partition → its ranges of key hashes; (): the whole partition.
        self.ranges: Mapping[Key, Sequence[Span]] = {
            (topic, number): spans for topic, number, spans in self._wanted.keys
        }
        self.view: KeyView = KeyView(self._peers, work.subscription, self.ranges)
        self.reports: KeyReports = KeyReports(self._settings.ids, self._book, self._outbox, self._peers)
        #: Partition → until when (own clock, ms) it is left alone, whatever changes.
        self._rests: dict[Key, float] = {}
        #: Partitions of which batches are open, as the log said when it refused a claim.
        self._left_open: set[Key] = set()

    # What its consumer asks.

    def start_for(self, key: Key) -> Start | None:
        is_known = self._peers.lease(key) is not None or self.view.came_later(key)
        return None if is_known or self._wanted.start == "earliest" else self._wanted.start

    def claim_from(self, own: Holding, start: int | None, now: float) -> None:
        assert isinstance(own, KeyParts)
        own.start = start
        own.claim_next(now)

    def drop(self, own: Holding) -> None:
        if isinstance(own, KeyParts):
            own.drop(self.now)
        else:
            super().drop(own)

    def lose(self, own: Holding, reason: Loss, now: float) -> None:
        self._book.lose(own.leases[0] if isinstance(own, KeyParts) else _leases(own)[0], reason, now)

    def taken_away(self, key: Key, reason: str, now: float) -> bool:
        if reason == Loss.EVICTED:
            self._rests[key] = now + EVICTED_INTERVALS * self._settings.heartbeat_interval_ms
        return reason == Loss.EVICTED

    def refused(self, key: Key, code: str, now: float) -> None:
        share = {codes.HELD: HELD_REST, codes.WRONG_MODE: WRONG_MODE_REST}.get(code, REST)
        if code == codes.WRONG_MODE:
            self._left_open.add(key)
        self._rests[key] = now + share * self._settings.heartbeat_interval_ms
        self._is_dirty = True
        if code != codes.HELD or key not in self._told:
            self._say(key, code)

    # Claiming.

    def step(self, now: float) -> None:
        self.now = now
        if self.failure is not None or not (self._is_dirty or now >= self.deadline(now)):
            return
        self._is_dirty = False
        for key in self.ranges:
            if key not in self._work.parts and self._work.subscription.has(key) and key not in self._work.blocked:
                self._claim_if_open(key, now)
            else:
                self._claim_at.pop(key, None)

    def _claim_if_open(self, key: Key, now: float) -> None:
        if self._book.leases.all_of(key):
            return  # the log is to show our release
        lease = self._peers.lease(key)
        if key in self._left_open and lease is not None and not (lease.progress.holes or Holes()).has_unkeyed():
            self._left_open.discard(key)
            self._rests.pop(key, None)
        opens_at = self._opens_at(key, now)
        if opens_at > now and key not in self._told:
            self._say(key, codes.HELD)
        if self.view.closed(self._peers.cp_of(key), now) or self._work.owes:
            opens_at = now + REST * self._settings.heartbeat_interval_ms
        opens_at = max(opens_at, self._rests.get(key, 0.0))
        if opens_at > now:
            self._claim_at[key] = opens_at
            return
        self._claim_at.pop(key, None)
        self._rests.pop(key, None)
        if key in self.view.keys:
            self._want(key)
        else:
            self.claim(key, now)

    def _want(self, key: Key) -> None:
        """Register that some keys are wanted; its consumer has them claimed once it knows where the group begins."""
        cp, hi = self._peers.cp_of(key), self._settings.heartbeat_interval_ms
        keys = self.view.keys[key]
        self._take_on(key, lambda owner: KeyParts(key, cp, keys, owner, self._book, hi))

    def _opens_at(self, key: Key, now: float) -> float:
        """When (own clock, ms) a claim is worth sending: at once, or when the last one in the way is stale."""
        lease = self._peers.lease(key)
        if lease is None or lease.shares is None or not self.ranges[key]:
            return self._peers.opens_at(key, now)
        ids, log_time = self._settings.ids, self._peers.log_time(self._peers.cp_of(key), now)
        found = [share for lo, hi in self.ranges[key] for share in lease.shares.overlapping(ids[0], ids[1], lo, hi)]
        deadline = max([share.deadline for share in found], default=-inf)
        if deadline < log_time:
            return 0.0
        hi = self._settings.heartbeat_interval_ms
        return now + deadline - log_time + 1 + self._peers.jitter(key, hi)
