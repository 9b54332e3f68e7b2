"""Section 7b, B1 to B5, and the rules of sections 3 and 4 once more for a lease that shares or holes have touched.

From its first accepted record of types 22 or 28 on, a lease is such a value, and each change another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.rationalizer.oracle import holes as of_holes
from tests.rationalizer.oracle.holes import Hole, Settler, done_for, in_one_form, settle, without
from tests.rationalizer.oracle.keyed import KeyedProgress, commit_ranges
from tests.rationalizer.oracle.layout import Judged
from tests.rationalizer.oracle.progress import Span

#: B3: pieces of done_through, and twice the shares.
MOST_PARTS = 2_000
#: P5, for leases.
MOST_INTERVALS = 60_000


@dataclass(frozen=True)
class Share:
    """B1. keys: None by batches."""

    epoch: int
    client: str
    instance: str
    heartbeat_interval_ms: int
    last_beat: int
    keys: Span | None

    def is_stale(self, now: int) -> bool:
        """C1."""
        return now - self.last_beat > 2 * self.heartbeat_interval_ms

    def freshness(self, now: int) -> str:
        """C1."""
        age = now - self.last_beat
        if age < self.heartbeat_interval_ms:
            return "fresh"
        return "stale" if self.is_stale(now) else "unknown"

    def row(self) -> list[Any]:
        """S1."""
        low, high = self.keys or (-1, -1)
        return [self.epoch, self.client, self.instance, self.heartbeat_interval_ms, self.last_beat, low, high]

    def shown(self, now: int) -> dict[str, Any]:
        """D3."""
        return {
            "epoch": self.epoch,
            "holder": {"client": self.client, "instance": self.instance},
            "heartbeat_interval_ms": self.heartbeat_interval_ms,
            "last_beat": self.last_beat,
            "freshness": self.freshness(now),
            "keys": None if self.keys is None else list(self.keys),
        }


@dataclass(frozen=True)
class SharedLease:
    """A lease. heartbeat_interval_ms 0: it never had a holder."""

    holder: tuple[str, str] | None = None
    epoch: int = 0
    heartbeat_interval_ms: int = 0
    last_beat: int = 0
    progress: KeyedProgress = field(default_factory=KeyedProgress)
    granted: int = -1
    shares: tuple[Share, ...] = ()

    def is_stale(self, now: int) -> bool:
        """C1, of its holder."""
        return now - self.last_beat > 2 * self.heartbeat_interval_ms

    def share(self, record: Judged, epoch: int | None) -> Share | None:
        """B2: the sender's share with this epoch."""
        mine = [share for share in self.shares if (share.client, share.instance) == (record.client, record.instance)]
        return next((share for share in mine if share.epoch == epoch), None)

    def ended(self, ends: Sequence[Share]) -> SharedLease:
        """B4: these shares end; their holes have no owner, "else as they were"."""
        epochs = {share.epoch for share in ends}
        freed = [replace(hole, owner=None) if hole.owner in epochs else hole for hole in self.progress.holes]
        shares = tuple(share for share in self.shares if share not in ends)
        return replace(self, shares=shares, progress=replace(self.progress, holes=in_one_form(freed)))

    def stale_shares(self, now: int) -> list[Share]:
        """In the order of epochs."""
        return [share for share in self.shares if share.is_stale(now)]

    def beaten(self, share: Share | None, now: int) -> SharedLease:
        """C6 of the holder (None) or of a share; B4, silence."""
        if share is None:
            return replace(self, last_beat=now)
        silent = all(other.is_stale(now) for other in self.shares)
        return replace(
            self,
            shares=tuple(replace(other, last_beat=now) if silent or other == share else other for other in self.shares),
        )


@dataclass(frozen=True)
class At:
    """A record's place: its offset, the log time, and C10's pause."""

    offset: int
    now: int
    #: Its sender has the group paused.
    pausing: bool
    #: Another client has the group paused.
    paused_by_another: bool
    level: int


@dataclass(frozen=True)
class Answer:
    """The effect of a record, and the lease after it (None: the CP knows no such lease)."""

    accepted: bool
    code: str
    lease: SharedLease | None
    share: int | None = None
    taken: tuple[int, int] | None = None
    entries: tuple[str, ...] | None = None


def refusal(lease: SharedLease | None, record: Judged, epoch: int) -> str | None:
    """B2, which has C5."""
    if lease is None or (lease.holder is None and not lease.shares):
        return "NOT_HELD"
    if lease.holder == (record.client, record.instance) and lease.epoch == epoch:
        return None
    return "FENCED" if lease.share(record, epoch) is None else None


# Section 3.


def claim(lease: SharedLease, record: Judged, at: At) -> Answer:
    """C3, with "HELD while a share is not stale"; B4: it overlaps all shares."""
    who = (record.client, record.instance)
    if lease.holder is not None and not lease.is_stale(at.now):
        return Answer(True, "ALREADY_HELD", lease) if lease.holder == who else Answer(False, "HELD", lease)
    if len(lease.stale_shares(at.now)) < len(lease.shares):
        return Answer(False, "HELD", lease)
    after = lease.ended(lease.shares)
    interval = record.fields[2]
    return Answer(
        True,
        "OK",
        replace(after, holder=who, epoch=at.offset, heartbeat_interval_ms=interval, last_beat=at.now),
    )


def heartbeat(lease: SharedLease, record: Judged, at: At, epoch: int | None, last_offset: int | None) -> Answer:
    """C5, C7, B2."""
    if epoch is None:
        return take_over(lease, record, at, last_offset)
    refused = refusal(lease, record, epoch)
    if refused is not None:
        return Answer(False, refused, lease)
    share = lease.share(record, epoch)
    code, after = position(lease.beaten(share, at.now), epoch if share else None, at, last_offset)
    return Answer(True, code, after)


def take_over(lease: SharedLease, record: Judged, at: At, last_offset: int | None) -> Answer:
    """C7; "a share is never taken over (epoch nil: NOT_HELD)"."""
    if lease.holder is None:
        return Answer(False, "NOT_HELD", lease)
    client, instance = lease.holder
    if client != record.client or instance == record.instance:
        return Answer(False, "FENCED", lease)
    if at.now - lease.last_beat >= lease.heartbeat_interval_ms:
        return Answer(False, "NOT_FRESH", lease)
    after = replace(lease, holder=(record.client, record.instance), epoch=at.offset, last_beat=at.now)
    code, after = position(after, None, at, last_offset)
    return Answer(True, code, after)


def position(lease: SharedLease, share_epoch: int | None, at: At, last_offset: int | None) -> tuple[str, SharedLease]:
    """What a last_offset does: of a share (B2), of the pausing client (C11), of a holder (C5)."""
    if last_offset is None:
        return "OK", lease
    share = next((share for share in lease.shares if share.epoch == share_epoch), None)
    if share is not None and share.keys is None:
        return "OK", lease
    before = lease.progress
    if share is None and at.pausing:
        after, granted = before.repositioned(last_offset), -1
        same = (before.through, before.ranges, before.holes, lease.granted) == (
            after.through,
            after.ranges,
            after.holes,
            granted,
        )
        if not same and at.level >= 5:  # R1
            after = replace(after, again=at.offset)
        return "OK" if same else "REPOSITIONED", replace(lease, progress=after, granted=granted)
    if last_offset < before.stable:
        return "OFFSET_REGRESSION", lease
    low, high = of_holes.EVERY_KEY if share is None or share.keys is None else share.keys
    return "OK", replace(lease, progress=before.raised(low, high, last_offset))


def release(lease: SharedLease, record: Judged, at: At) -> Answer:
    """C8; of a share: it ends."""
    _, _, epoch, last_offset = record.fields
    refused = refusal(lease, record, epoch)
    if refused is not None:
        return Answer(False, refused, lease)
    share = lease.share(record, epoch)
    code, after = position(lease, epoch if share else None, at, last_offset)
    return Answer(True, code, after.ended([share]) if share else replace(after, holder=None))


def grant(lease: SharedLease, record: Judged, at: At) -> Answer:
    """C12; of a share: WRONG_MODE."""
    _, _, epoch, proposal = record.fields
    refused = refusal(lease, record, epoch)
    if refused is not None:
        return Answer(False, refused, lease)
    if lease.share(record, epoch) is not None:
        return Answer(False, "WRONG_MODE", lease)
    if lease.is_stale(at.now):
        return Answer(False, "STALE", lease)
    if proposal <= lease.granted or proposal <= lease.progress.stable:
        return Answer(False, "PROPOSAL_TOO_LOW", lease)
    low, high = of_holes.EVERY_KEY
    return Answer(True, "OK", replace(lease, progress=lease.progress.raised(low, high, proposal), granted=proposal))


def commit(lease: SharedLease, record: Judged) -> Answer:
    """Type 7: P3 to P5."""
    _, _, epoch, spans = record.fields
    refused = refusal(lease, record, epoch)
    if refused is not None:
        return Answer(False, refused, lease)
    code, after = commit_ranges(lease.progress, spans, allowed=True, in_order=False, most_intervals=MOST_INTERVALS)
    return Answer(code in ("OK", "DUPLICATE_COMMIT"), code, replace(lease, progress=after))


# B3.


def overlap(one: Share, other: Share) -> bool:
    """B3, its second sentence."""
    if one.keys is not None and other.keys is not None:
        return one.keys[0] <= other.keys[1] and other.keys[0] <= one.keys[1]
    if one.keys is None and other.keys is None:
        return (one.client, one.instance) == (other.client, other.instance)
    return True


def claim_share(known: SharedLease | None, record: Judged, at: At) -> Answer:
    """B3."""
    _, _, interval, low, high, start = record.fields
    lease = known if known is not None else SharedLease()
    if lease.holder is not None and not lease.is_stale(at.now):
        return Answer(False, "HELD", known)
    claimed = Share(at.offset, record.client, record.instance, interval, at.now, None if low is None else (low, high))
    overlapping = [share for share in lease.shares if overlap(share, claimed)]
    alive = [share for share in overlapping if not share.is_stale(at.now)]
    if alive:
        first = alive[0]
        mine = (first.client, first.instance, first.keys) == (claimed.client, claimed.instance, claimed.keys)
        return Answer(True, "ALREADY_HELD", known, first.epoch) if mine else Answer(False, "HELD", known)
    if claimed.keys is not None and any(hole.key_hash is None for hole in lease.progress.holes):
        return Answer(False, "WRONG_MODE", known)
    if claimed.keys is None and len(lease.progress.through) > 1:
        return Answer(False, "WRONG_MODE", known)
    stale = lease.stale_shares(at.now)
    pieces, live = len(lease.progress.through), len(lease.shares) - len(stale)
    if pieces + 2 * (live + 1) > MOST_PARTS:
        return Answer(False, "GROUP_FULL", known)
    silent = len(stale) == len(lease.shares)
    after = replace(lease, holder=None).ended(overlapping)
    others = after.stale_shares(at.now)
    if pieces + 2 * (live + 1 + len(others)) > MOST_PARTS:
        after = after.ended(others)
    if silent:  # B4: "by a claim, not of those of its client_id"
        beaten = [
            share if share.client == claimed.client else replace(share, last_beat=at.now) for share in after.shares
        ]
        after = replace(after, shares=tuple(beaten))
    if known is None and start is not None:
        after = replace(after, progress=after.progress.repositioned(start - 1))
    return Answer(True, "OK", replace(after, shares=(*after.shares, claimed)), claimed.epoch)


# H3, B5.


def settle_messages(known: SharedLease | None, record: Judged, at: At) -> Answer:
    """Type 28."""
    _, _, epoch, seen, done, open_, parked, take = record.fields
    seen = min(seen, at.offset)
    if epoch is None:
        return _by_an_operator(known, at, seen, done, open_, parked, record.version)
    refused = refusal(known, record, epoch)
    if refused is not None or known is None:
        return Answer(False, refused or "NOT_HELD", known)
    share = known.share(record, epoch)
    if take is not None and (share is None or share.keys is not None):
        return Answer(False, "WRONG_MODE", known)
    lease = known if at.paused_by_another else known.beaten(share, at.now)
    codes, progress = settle(lease.progress, done, open_, parked, _settler(share, seen, at))
    lease = replace(lease, progress=progress)
    taken = None
    if take is not None:
        assert share is not None
        lease, taken = _take(lease, share.epoch, seen, at, *take)
    code = "OK"
    if any(each not in ("OK", "DUPLICATE_COMMIT") for each in codes):
        code = "PARTIAL"
    elif take is not None and taken is None:
        code = "NOTHING_TO_TAKE"
    return Answer(True, code, lease, taken=taken, entries=codes)


def _by_an_operator(
    known: SharedLease | None,
    at: At,
    seen: int,
    done: list[Any],
    open_: list[Any],
    parked: list[Any],
    version: int,
) -> Answer:
    lease = known if known is not None else SharedLease()
    by_keys = any(share.keys is not None for share in lease.shares)

    def redoes(progress: KeyedProgress, key_hash: int | None) -> bool:
        return key_hash is not None or (len(progress.through) == 1 and not by_keys)

    by = Settler(lambda hole: hole.owner is None, lambda _: False, seen, at.offset)
    if version >= 5:
        by = replace(by, redoes=redoes)
    codes, progress = settle(lease.progress, done, open_, parked, by)
    fine = [code in ("OK", "DUPLICATE_COMMIT") for code in codes]
    if not any(fine):
        return Answer(False, "FENCED", known, entries=codes)
    return Answer(True, "OK" if all(fine) else "PARTIAL", replace(lease, progress=progress), entries=codes)


def _settler(share: Share | None, seen: int, at: At) -> Settler:
    """H2 and H3 of the exclusive holder (None), a share by batches, a share by keys."""
    if share is None:
        return Settler(lambda hole: hole.owner is None, lambda _: True, seen, at.offset)
    if share.keys is None:
        return Settler(lambda hole: hole.owner == share.epoch, lambda _: False, seen, at.offset)
    low, high = share.keys

    def has(key_hash: int | None) -> bool:
        return key_hash is not None and low <= key_hash <= high

    return Settler(lambda hole: hole.owner is None and has(hole.key_hash), has, seen, at.offset, [share.keys])


def _take(
    lease: SharedLease, epoch: int, seen: int, at: At, count: int, up_to: int, at_most_once: bool
) -> tuple[SharedLease, tuple[int, int] | None]:
    """B5."""
    if any(hole.owner == epoch and hole.since >= seen for hole in lease.progress.holes):
        return lease, None
    lease = lease.ended(lease.stale_shares(at.now))
    free = [hole for hole in lease.progress.holes if hole.is_free]
    if at_most_once:
        free = [hole for hole in free if hole.attempts == 0]
    if not free:
        return _take_new(lease, epoch, at, count, up_to, at_most_once)
    most = count if free[0].attempts < 2 else 1
    last = min(free[0].last, free[0].first + most - 1)
    after = _given(lease, free[0], last, epoch, at, at_most_once)
    if _fits(lease, after):
        return after, (free[0].first, last)
    for hole in free:  # H5: "the lowest free hole that it can give whole"
        length = hole.last - hole.first + 1
        if length <= (count if hole.attempts < 2 else 1):
            return _given(lease, hole, hole.last, epoch, at, at_most_once), (hole.first, hole.last)
    return lease, None


def _fits(before: SharedLease, after: SharedLease) -> bool:
    """H5."""
    left = len(after.progress.holes)
    return left <= of_holes.MOST_HOLES or left <= len(before.progress.holes)


def _given(lease: SharedLease, hole: Hole, last: int, epoch: int, at: At, at_most_once: bool) -> SharedLease:
    """The first offsets of a free hole."""
    progress = lease.progress
    rest = without(progress.holes, hole.first, last)
    if at_most_once:
        left = replace(progress, holes=in_one_form(rest))
        keys = of_holes.EVERY_KEY if hole.key_hash is None else (hole.key_hash, hole.key_hash)
        spans = [
            (low, high) for low, high, _ in of_holes.parts(hole.first, last, left) if not done_for(left, keys, low)
        ]
        return replace(lease, progress=left.committed(spans))
    mine = replace(hole, last=last, owner=epoch, since=at.offset, attempts=hole.attempts + 1)
    return replace(lease, progress=replace(progress, holes=in_one_form([*rest, mine])))


def _take_new(
    lease: SharedLease, epoch: int, at: At, count: int, up_to: int, at_most_once: bool
) -> tuple[SharedLease, tuple[int, int] | None]:
    """B5, "Else the lowest offset above stable that is in no range and no hole"."""
    progress = lease.progress
    taken = sorted([*progress.ranges, *((hole.first, hole.last) for hole in progress.holes)])
    first = progress.stable + 1
    for low, high in taken:
        if low <= first <= high:
            first = high + 1
    last = min([first + count - 1, up_to, *(low - 1 for low, _ in taken if low > first)])
    if last < first:
        return lease, None
    raised = progress.raised(*of_holes.EVERY_KEY, last)
    if at_most_once:
        return replace(lease, progress=raised), (first, last)
    mine = Hole(first, last, epoch, at.offset, 1, None, None)
    after = replace(lease, progress=replace(raised, holes=in_one_form([*raised.holes, mine])))
    return (after, (first, last)) if _fits(lease, after) else (lease, None)
