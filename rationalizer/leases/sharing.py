"""The records about shares and holes of a lease (section 7b): what each is judged by, and what it does (H3, B2-B5)."""

from __future__ import annotations

from rationalizer import codes
from rationalizer.holes import NO_KEY
from rationalizer.leases.lease import Lease
from rationalizer.leases.shares import Share, Shares
from rationalizer.limits import MAX_KEY_PIECES, MAX_OFFSET
from rationalizer.plane import ApplyContext, Verdict
from rationalizer.progress import Progress
from rationalizer.settling import Reach, Settling, take
from rationalizer.wire.records import Take
from rationalizer.wire.unpacking import Message

LeaseKey = tuple[str, str, int]

#: Each share can cut done_through twice.
_CUTS_OF_A_SHARE = 2

_OPERATOR = Reach(None)
_HOLDER = Reach(None, makes=True, makes_unkeyed=True)


def refusal(lease: Lease | None) -> str:
    """Why a record that carries an epoch is rejected, if neither the holder nor a share is its sender's (C5, B2)."""
    if lease is None or (lease.client_id is None and lease.shares is None):
        return codes.NOT_HELD
    return codes.FENCED


def share_of(lease: Lease | None, instance_id: str, client_id: str, epoch: int) -> Share | None:
    """The sender's share that an epoch names (B2)."""
    if lease is None or lease.shares is None:
        return None
    return lease.shares.of(instance_id, client_id, epoch)


def beat_share(lease: Lease, share: Share, last_offset: int | None, log_time: int) -> str:
    """One heartbeat of a share, by itself or in a batch (B2)."""
    assert lease.shares is not None
    lease.shares.beat(share, log_time)
    return _record_offset(lease, share, last_offset)


def release_share(lease: Lease, share: Share, last_offset: int | None) -> str:
    """A release ends the share, stale or not."""
    end_shares(lease, [share])
    return _record_offset(lease, share, last_offset)


def _record_offset(lease: Lease, share: Share, last_offset: int | None) -> str:
    """What a share's last_offset does to the progress; the pausing client's, too."""
    if last_offset is None or share.by_batches:
        return codes.OK
    # B3 has left room for all pieces.
    return lease.progress.commit_key_range(share.lo, share.hi, last_offset, MAX_OFFSET)


def end_shares(lease: Lease, ended: list[Share]) -> None:
    """These shares end; their holes have no owner from now on (B4)."""
    shares, holes = lease.shares, lease.progress.holes
    assert shares is not None
    for share in ended:
        shares.remove(share)
        if holes is not None:
            holes.disown(share.epoch)
    if not len(shares):
        lease.shares = None


class SharingRecords:
    """Judges types 22 and 28. `leases` is keyed by (group_id, topic, partition)."""

    __slots__ = ("_keys_of_group", "_with_more", "leases")

    def __init__(self) -> None:
        self.leases: dict[LeaseKey, Lease] = {}
        self._keys_of_group: dict[str, list[LeaseKey]] = {}
        #: Leases that have a share or a hole, and some that had one.
        self._with_more: set[LeaseKey] = set()

    def add(self, lease: Lease) -> None:
        """Take in a lease that is not there yet."""
        key = (lease.group_id, lease.topic, lease.partition)
        self.leases[key] = lease
        self._keys_of_group.setdefault(lease.group_id, []).append(key)
        if lease.shares is not None or lease.progress.holes is not None:
            self._with_more.add(key)

    def shares_and_holes(self) -> int:
        """How many there are of all leases (S2)."""
        found = 0
        for key in list(self._with_more):
            lease = self.leases.get(key)
            if lease is None or (lease.shares is None and lease.progress.holes is None):
                self._with_more.remove(key)
                continue
            found += 0 if lease.shares is None else len(lease.shares)
        return found + self.hole_count()

    def hole_count(self) -> int:
        """How many holes all leases have (H1). Any thread."""
        leases = [self.leases.get(key) for key in list(self._with_more)]
        return sum([len(holes) for each in leases if each is not None and (holes := each.progress.holes) is not None])

    def _claiming_share(self, message: Message, context: ApplyContext) -> Verdict:
        """B3: some keys, or batches, of a lease that has no other mode."""
        _, _, instance_id, client_id, group_id, topic, partition, heartbeat_interval_ms, lo, hi, start = message
        key, log_time = (group_id, topic, partition), context.log_time
        lo, hi = (NO_KEY, NO_KEY) if lo is None else (lo, hi)
        known = self.leases.get(key)
        lease = Lease(group_id, topic, partition) if known is None else known
        if lease.held and not lease.is_stale(log_time):
            return Verdict(codes.HELD, False)
        shares = Shares() if lease.shares is None else lease.shares
        overlapped = shares.overlapping(instance_id, client_id, lo, hi)
        for share in overlapped:
            if not share.is_stale(log_time):
                if share.is_of(instance_id, client_id) and (share.lo, share.hi) == (lo, hi):
                    return Verdict(codes.ALREADY_HELD, True, None, None, share.epoch)
                return Verdict(codes.HELD, False)
        progress = lease.progress
        if lo == NO_KEY:
            wrong = progress.piece_count > 1
        else:
            wrong = progress.holes is not None and progress.holes.has_unkeyed()
        if wrong:
            return Verdict(codes.WRONG_MODE, False)
        room = (MAX_KEY_PIECES - progress.piece_count) // _CUTS_OF_A_SHARE
        left, stale = len(shares) - len(overlapped), list[Share]()
        if left + 1 > room:
            gone = {share.epoch for share in overlapped}
            stale = [share for share in shares.stale(log_time) if share.epoch not in gone]
            if left - len(stale) + 1 > room:
                return Verdict(codes.GROUP_FULL, False)

        if known is None:
            self.add(lease)
            if start is not None:
                progress.stable = start - 1
        lease.client_id = None
        lease.instance_id = None
        if lease.shares is not None:
            silent = shares.all_stale(log_time)
            end_shares(lease, overlapped + stale)
            if silent and lease.shares is not None:
                shares.revive(log_time, client_id)
        if lease.shares is None:
            lease.shares = Shares()
        lease.shares.add(Share(context.offset, client_id, instance_id, heartbeat_interval_ms, log_time, lo, hi))
        self._with_more.add(key)
        return Verdict(codes.OK, True, None, None, context.offset)

    def _settling_messages(self, message: Message, context: ApplyContext) -> Verdict:
        """H3: entries that settle messages, and the next batch (B5)."""
        _, _, instance_id, client_id, group_id, topic, partition, epoch, seen, done, opened, parked, taking = message
        key = (group_id, topic, partition)
        lease = self.leases.get(key)
        if epoch is None:
            progress = Progress() if lease is None else lease.progress
            answers = Settling(progress, _OPERATOR, context.offset, seen).settle(done, opened, parked)
            if codes.ACCEPTED.isdisjoint(answers):
                return Verdict(codes.FENCED, False, answers)
            return Verdict(_code_of(answers), True, answers)
        share = share_of(lease, instance_id, client_id, epoch)
        if lease is None or (share is None and not lease.is_held_by(instance_id, client_id, epoch)):
            return Verdict(refusal(lease), False)
        if taking is not None and (share is None or not share.by_batches):
            return Verdict(codes.WRONG_MODE, False)
        if not context.paused:
            if share is None:
                lease.last_beat = context.log_time
            else:
                beat_share(lease, share, None, context.log_time)
        reach = _HOLDER if share is None else _reach_of(share)
        answers = Settling(lease.progress, reach, context.offset, seen).settle(done, opened, parked)
        code = _code_of(answers)
        taken = None
        if taking is not None:
            assert share is not None
            taken = _take(lease, share, seen, taking, context)
            if taken is None and code == codes.OK:
                code = codes.NOTHING_TO_TAKE
        self._with_more.add(key)
        return Verdict(code, True, answers, None, None, taken)


def _take(lease: Lease, share: Share, seen: int, taking: Take, context: ApplyContext) -> tuple[int, int] | None:
    """B5: the next batch, unless the record repeats one that gave it."""
    assert lease.shares is not None
    holes = lease.progress.holes
    if holes is not None and holes.latest_of(share.epoch) >= min(seen, context.offset):
        return None
    stale = lease.shares.stale(context.log_time)
    if stale:
        end_shares(lease, stale)
    return take(lease.progress, share.epoch, context.offset, *taking)


def _reach_of(share: Share) -> Reach:
    if share.by_batches:
        return Reach((), share.epoch)
    return Reach(((share.lo, share.hi),), makes=True)


def _code_of(answers: tuple[str, ...]) -> str:
    return codes.OK if codes.ACCEPTED.issuperset(answers) else codes.PARTIAL
