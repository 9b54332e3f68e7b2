"""The partition plane: leases, earliest claim wins (section 3), held whole by one instance or in parts by many (7b).

The life of a lease, as the log moves it:

                   ClaimingPartition (C3)
        +------+ ------------------------> +------+ --+ Heartbeat, batch entry (C5): last beat, progress
        | free |                           | held |   | Heartbeat with epoch nil by a new instance of the
        +------+ <------------------------ +------+ <-+   same client, while fresh (C7): holder, epoch, beat
                   ReleasingPartition (C8)     |          ClaimingMessages, while not stale (C12): granted
                                               |          CommitRanges (P3): ranges
                                               +--> ClaimingPartition once stale (C3): holder, epoch, HI

`tests/tables/leases.py` has all of it as a table. Stale is no state but a matter of log time (C1): a late beat revives
a lease that no other client took (C6). Every record that carries an epoch is judged against the holder first
(`Lease.is_held_by`), then against the shares (`share_of`), and a rejected record changes nothing.

`fast_path` is the short cut through most of a log: heartbeats, single or in batches, that move nothing but numbers.
It leaves out what the lease they meet has proved already. Where a lease is found by the three names, they are well
formed and routed here; where its holder is the sender, the sender's ids are well formed; and fields that are all of
known types hold nothing that E2 forbids. The first three bytes say: an array of nine (six), version 1, type 1 (6).
Whatever is not that simple goes the long way, from its start. In a long run of simple records not even that is asked
again: a beat of the same lease by the same holder differs in its last field alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgpack import unpackb
from msgpack.exceptions import UnpackException

from rationalizer import codes
from rationalizer.holes import NO_KEY
from rationalizer.leases.canonical import load_leases
from rationalizer.leases.lease import Lease
from rationalizer.leases.shares import Share, Shares
from rationalizer.levels import REDO_LEVEL
from rationalizer.limits import HEAD_FIELDS, MAX_ID_BYTES, MAX_KEY_PIECES, MAX_OFFSET, MAX_TIME_MS, MAX_TOPIC_BYTES
from rationalizer.plane import (
    ApplyContext,
    Beaten,
    Bounds,
    Entries,
    Entry,
    Heard,
    LogHead,
    PausedGroup,
    Pauses,
    SeeBeats,
    Verdict,
)
from rationalizer.progress import Progress
from rationalizer.routing import are_routed_to, route_lease
from rationalizer.settling import Reach, Settling, take
from rationalizer.snapshot import LEASES
from rationalizer.state import LEASE
from rationalizer.wire.records import Belongs, Kind, Take
from rationalizer.wire.unpacking import Message

LeaseKey = tuple[str, str, int]

#: Each share can cut done_through twice.
_CUTS_OF_A_SHARE = 2

_OPERATOR = Reach(None)
_REDO = Reach(None, redoes=True, redoes_unkeyed=True)
_REDO_BY_KEY = Reach(None, redoes=True)
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
    return _record_offset_of(lease, share, last_offset)


def release_share(lease: Lease, share: Share, last_offset: int | None) -> str:
    """A release ends the share, stale or not."""
    end_shares(lease, [share])
    return _record_offset_of(lease, share, last_offset)


def _record_offset_of(lease: Lease, share: Share, last_offset: int | None) -> str:
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
        version, _, instance_id, client_id, group_id, topic, partition, epoch, seen, done, opened, parked, taking = (
            message
        )
        key = (group_id, topic, partition)
        lease = self.leases.get(key)
        if epoch is None:
            progress = Progress() if lease is None else lease.progress
            reach = _reach_of_operator(lease, version)
            answers = Settling(progress, reach, context.offset, seen).settle(done, opened, parked)
            if codes.ACCEPTED.isdisjoint(answers):
                return Verdict(codes.FENCED, False, answers)
            self._with_more.add(key)
            return Verdict(codes.of_entries(answers), True, answers)
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
        code = codes.of_entries(answers)
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


def _reach_of_operator(lease: Lease | None, version: int) -> Reach:
    """H2, and from version 5 on R2: what is done opens, too; without key hashes unless a share is by keys."""
    if version < REDO_LEVEL:
        return _OPERATOR
    by_keys = lease is not None and lease.shares is not None and not lease.shares.by_batches
    return _REDO_BY_KEY if by_keys else _REDO


def _reach_of(share: Share) -> Reach:
    if share.by_batches:
        return Reach((), share.epoch)
    return Reach(((share.lo, share.hi),), makes=True)


#: How a Heartbeat, and a HeartbeatBatch, of version 1 begin in the shortest form.
_HEARTBEAT: Final = b"\x99\x01\x01"
_BATCH: Final = b"\x96\x01\x06"

#: No well-formed Heartbeat in the shortest form is longer; what is longer could make unpacking expensive.
_MAX_HEARTBEAT_BYTES: Final = 3 + 3 * (2 + MAX_ID_BYTES) + (2 + MAX_TOPIC_BYTES) + 5 + 9 + 9

#: The same for batches: what they hold at most, within these bytes, takes 3 MB while it is unpacked.
_MAX_BATCH_BYTES: Final = 4_096
_MAX_BATCH_ENTRIES: Final = 256

#: How an offset of four bytes begins. Above 65,535 none is shorter, up to 2^32−1 a longer one has 0 in this place.
_FOUR_BYTES: Final = 0xCE

#: Simple records in a row after which more of them are to be expected.
_LONG_RUN: Final = 100

_NOT_SIMPLE = (ValueError, KeyError, TypeError, UnpackException)  # TypeError: a list is no key

#: Of a batch of more entries, the leases are not looked up before they are hashed: above this that only costs.
FEW_ENTRIES: Final = 256


class LeasePlane(SharingRecords):
    """The leases of one CP. `leases` is keyed by (group_id, topic, partition)."""

    __slots__ = ("_partition", "_partitions", "part")

    def __init__(self, partition: int, partitions: int) -> None:
        super().__init__()
        self.part = LEASES
        self._partition = partition
        self._partitions = partitions

    # -- as a plane ------------------------------------------------------------------------------------

    def belongs(self, kind: Kind, message: Message) -> bool:
        """L3, by topic and partition. A lease that exists here was routed here at its first claim: no need to hash."""
        group_id, known = message[4], self.leases
        if kind.belongs is Belongs.LEASE:
            topic, partition = message[HEAD_FIELDS], message[HEAD_FIELDS + 1]
            if (group_id, topic, partition) in known:
                return True
            return route_lease(topic, partition, self._partitions) == self._partition
        entries: Sequence[tuple[str, int, int, int | None]] = message[HEAD_FIELDS]
        # A member's batch has some dozen entries, of leases that exist. Of a hundred thousand, most do not.
        if len(entries) <= FEW_ENTRIES and all((group_id, entry[0], entry[1]) in known for entry in entries):
            return True
        return are_routed_to(self._partition, entries, self._partitions)

    def epoch(self, kind: Kind, message: Message) -> int | None:
        """The epoch of the one lease that a record names (D2); None: it never had a holder."""
        if kind.belongs is not Belongs.LEASE:
            return None
        lease = self.leases.get((message[4], message[HEAD_FIELDS], message[HEAD_FIELDS + 1]))
        return None if lease is None or not lease.heartbeat_interval_ms else lease.epoch

    def knows(self, group_id: str) -> bool:
        """Whether there is a lease of the group (G1)."""
        return group_id in self._keys_of_group

    def size(self) -> int:
        """How many leases, shares and holes there are (S2)."""
        return len(self.leases) + self.shares_and_holes()

    def rows(self, level: int) -> list[Sequence[Any]]:
        """All leases, sorted by (group, topic, partition)."""
        return LEASE.rows([self.leases[key] for key in sorted(self.leases)], level)

    def load(self, rows: Sequence[Any], bounds: Bounds) -> None:
        """Take over the leases of a snapshot."""
        for lease in load_leases(rows, bounds):
            self.add(lease)

    def is_active(self, group_id: str, context: ApplyContext) -> bool:
        """Whether a lease of the group has a holder, or a share, that is not stale (C16)."""
        return any(self.leases[key].is_taken(context.log_time) for key in self._keys_of_group.get(group_id, ()))

    def forget(self, group_id: str) -> None:
        """Drop the group's leases (C16)."""
        for key in self._keys_of_group.pop(group_id, ()):
            del self.leases[key]

    # -- record by record ------------------------------------------------------------------------------

    def _claiming_partition(self, message: Message, context: ApplyContext) -> str:
        """C3: granted if the lease is free or stale, and all shares of it are (B4)."""
        _, _, instance_id, client_id, group_id, topic, partition, heartbeat_interval_ms = message
        lease = self.leases.get((group_id, topic, partition))
        if lease is None:
            lease = Lease(group_id, topic, partition)
            self.add(lease)
        elif lease.held and not lease.is_stale(context.log_time):
            mine = lease.client_id == client_id and lease.instance_id == instance_id
            return codes.ALREADY_HELD if mine else codes.HELD
        elif lease.shares is not None:
            if not lease.shares.all_stale(context.log_time):
                return codes.HELD
            end_shares(lease, list(lease.shares))
        lease.client_id = client_id
        lease.instance_id = instance_id
        lease.epoch = context.offset
        lease.heartbeat_interval_ms = heartbeat_interval_ms
        lease.last_beat = context.log_time
        return codes.OK

    def _heartbeat(self, message: Message, context: ApplyContext) -> str:
        """C5, or C7 where the epoch is nil."""
        _, _, instance_id, client_id, group_id, topic, partition, epoch, last_offset = message
        if epoch is None:
            return self._take_over(message, context)
        lease = self.leases.get((group_id, topic, partition))
        return _beat(lease, instance_id, client_id, epoch, last_offset, context)

    def _heartbeat_batch(self, message: Message, context: ApplyContext) -> tuple[str, ...]:
        """As many Heartbeats, in order (type 6)."""
        _, _, instance_id, client_id, group_id, entries = message
        ok, not_held, log_time = codes.OK, codes.NOT_HELD, context.log_time
        answers: list[str] = []
        answer = answers.append
        # Entries may be a hundred thousand, and many in a row of one lease: what is so for all of a row is checked
        # once, and what `_beat` says most often is said here, without a call.
        topic_before, partition_before = "", -1
        lease: Lease | None = None
        for topic, partition, epoch, last_offset in entries:
            if partition != partition_before or topic != topic_before:
                topic_before, partition_before = topic, partition
                lease = self.leases.get((group_id, topic, partition))
                if lease is not None:
                    mine = lease.is_held_by(instance_id, client_id, lease.epoch)
                    progress = lease.progress
                    simple = not context.pausing and progress.pieces is None and not progress.intervals.firsts
            if lease is None:
                answer(not_held)
            elif not mine or epoch != lease.epoch:
                answer(_beat(lease, instance_id, client_id, epoch, last_offset, context))
            elif last_offset is None or not simple or last_offset < progress.stable:
                lease.last_beat = log_time
                answer(_record_offset(lease, last_offset, context))
            else:
                lease.last_beat = log_time
                progress.stable = last_offset
                answer(ok)
        return tuple(answers)

    def _releasing_partition(self, message: Message, context: ApplyContext) -> str:
        """C8: free at once, stale or not; nothing but the holder goes."""
        _, _, instance_id, client_id, group_id, topic, partition, epoch, last_offset = message
        lease = self.leases.get((group_id, topic, partition))
        if lease is None or not lease.is_held_by(instance_id, client_id, epoch):
            share = share_of(lease, instance_id, client_id, epoch)
            if lease is None or share is None:
                return refusal(lease)
            return release_share(lease, share, last_offset)
        lease.client_id = None
        lease.instance_id = None
        return _record_offset(lease, last_offset, context)

    def _claiming_messages(self, message: Message, context: ApplyContext) -> str:
        """C12: grant the sender what is not done up to the proposal."""
        _, _, instance_id, client_id, group_id, topic, partition, epoch, proposal = message
        lease = self.leases.get((group_id, topic, partition))
        if lease is None or not lease.is_held_by(instance_id, client_id, epoch):
            if share_of(lease, instance_id, client_id, epoch) is not None:
                return codes.WRONG_MODE
            return refusal(lease)
        if lease.is_stale(context.log_time):
            return codes.STALE
        return lease.progress.grant(proposal)

    def _commit_ranges(self, message: Message, context: ApplyContext) -> str:
        """P3-P5, by a holder, or a share, that may be stale (C6, B2)."""
        _, _, instance_id, client_id, group_id, topic, partition, epoch, ranges = message
        lease = self.leases.get((group_id, topic, partition))
        if lease is None or not (
            lease.is_held_by(instance_id, client_id, epoch)
            or share_of(lease, instance_id, client_id, epoch) is not None
        ):
            return refusal(lease)
        return lease.progress.commit(ranges)

    def _take_over(self, message: Message, context: ApplyContext) -> str:
        """C7: a restarted client takes its fresh lease over from its earlier instance."""
        _, _, instance_id, client_id, group_id, topic, partition, _, last_offset = message
        lease = self.leases.get((group_id, topic, partition))
        if lease is None or lease.client_id is None:
            return codes.NOT_HELD
        if lease.client_id != client_id or lease.instance_id == instance_id:
            return codes.FENCED
        if lease.freshness(context.log_time) != "fresh":
            return codes.NOT_FRESH
        lease.instance_id = instance_id
        lease.epoch = context.offset
        lease.last_beat = context.log_time
        return _record_offset(lease, last_offset, context)

    # -- the short cut ---------------------------------------------------------------------------------

    def fast_path(
        self, records: Entries, log: LogHead, pauses: Pauses, heard: Heard | None = None, see: SeeBeats | None = None
    ) -> Entry | None:
        """Apply records for as long as they are simple; the first that is not, None: there is none left.

        heard: gets the last record of each sender. see: is called after each record.
        """
        heartbeat, max_offset, max_time = _HEARTBEAT, MAX_OFFSET, MAX_TIME_MS
        next_offset, log_time = log.next_offset, log.log_time
        # By all bytes of a simple beat but the five of its last_offset. Until a record is not simple, no holder and no
        # pause changes, and no lease gets ranges or pieces: what these bytes were judged by stays as it is.
        known: dict[bytes, Lease] = {}
        beats = 0
        watched = heard is not None or see is not None
        try:
            for record in records:
                offset, timestamp_ms, value = record
                if (
                    type(value) is not bytes
                    or type(offset) is not int
                    or type(timestamp_ms) is not int
                    or not next_offset <= offset <= max_offset
                    or timestamp_ms > max_time
                ):
                    return record
                start = value[:3]
                if start == heartbeat and len(value) <= _MAX_HEARTBEAT_BYTES:
                    same = known.get(value[:-5]) if known else None
                    if same is not None and value[-5] == _FOUR_BYTES:
                        lease, done = same, int.from_bytes(value[-4:], "big")
                        if done < lease.progress.stable:
                            return record
                    else:
                        beat = self._simple_beat(value, pauses)
                        if beat is None:
                            return record
                        lease, done = beat
                        if beats >= _LONG_RUN and value[-5] == _FOUR_BYTES and 0xFFFF < done <= 0xFFFF_FFFF:
                            known[value[:-5]] = lease
                    lease.progress.stable = done
                    if timestamp_ms > log_time:
                        log.log_time = log_time = timestamp_ms
                    lease.last_beat = log_time
                elif start == _BATCH and len(value) <= _MAX_BATCH_BYTES:
                    beaten = self._simple_batch(value, pauses)
                    if not beaten:
                        return record
                    if timestamp_ms > log_time:
                        log.log_time = log_time = timestamp_ms
                    for lease, moved in beaten:
                        lease.last_beat = log_time
                        if moved is not None and moved > lease.progress.stable:
                            lease.progress.stable = moved
                else:
                    return record
                log.next_offset = next_offset = offset + 1
                beats += 1
                if watched:
                    if heard is not None:
                        heard[lease.group_id, lease.client_id or "", lease.instance_id or ""] = log_time, offset
                    if see is not None:
                        see(offset, log_time, beaten if start == _BATCH else [(lease, done)])
            return None
        finally:
            if beats:
                log.count(codes.OK, True, beats)

    def _simple_beat(self, value: bytes, pauses: Pauses) -> tuple[Lease, int] | None:
        """The lease of a simple Heartbeat and its last_offset; nothing is changed."""
        try:
            fields: list[Any] = unpackb(value)
            _, _, instance_id, client_id, group_id, topic, partition, epoch, done = fields
            lease: Lease = self.leases[group_id, topic, partition]
        except _NOT_SIMPLE:
            return None
        progress = lease.progress
        if (
            type(partition) is not int  # True == 1 == 1.0, also as keys
            or type(epoch) is not int
            or type(done) is not int
            or client_id is None  # as the holder of a free lease is
            or lease.epoch != epoch
            or lease.instance_id != instance_id
            or lease.client_id != client_id
            or (pauses and group_id in pauses)
            or not progress.stable <= done <= MAX_OFFSET
            or progress.pieces is not None
            or progress.intervals.firsts
        ):
            return None
        return lease, done

    def _simple_batch(self, value: bytes, pauses: Mapping[str, PausedGroup]) -> Beaten:
        """Each entry's lease and its last_offset, if all entries are simple; nothing is changed."""
        leases, max_offset = self.leases, MAX_OFFSET
        found: Beaten = []
        try:
            _, _, instance_id, client_id, group_id, entries = unpackb(value, max_array_len=_MAX_BATCH_ENTRIES)
            if client_id is None or (pauses and group_id in pauses) or type(entries) is not list:
                return []
            for topic, partition, epoch, done in entries:
                lease = leases[group_id, topic, partition]
                progress = lease.progress
                if (
                    type(partition) is not int
                    or type(epoch) is not int
                    or lease.epoch != epoch
                    or lease.instance_id != instance_id
                    or lease.client_id != client_id
                    or progress.pieces is not None
                    or progress.intervals.firsts
                    or (done is not None and (type(done) is not int or not -1 <= done <= max_offset))
                ):
                    return []
                found.append((lease, done))
        except _NOT_SIMPLE:
            return []
        return found


def _beat(
    lease: Lease | None, instance_id: str, client_id: str, epoch: int, last_offset: int | None, context: ApplyContext
) -> str:
    """One heartbeat, by itself or in a batch (C5)."""
    if lease is None or not lease.is_held_by(instance_id, client_id, epoch):
        share = share_of(lease, instance_id, client_id, epoch)
        if lease is None or share is None:
            return refusal(lease)
        return beat_share(lease, share, last_offset, context.log_time)
    lease.last_beat = context.log_time
    return _record_offset(lease, last_offset, context)


def _record_offset(lease: Lease, last_offset: int | None, context: ApplyContext) -> str:
    """What an accepted beat's or release's last_offset does to the progress (E5, C5, C11)."""
    if last_offset is None:
        return codes.OK
    if context.pausing:
        return lease.progress.reposition(last_offset, context.again)
    return lease.progress.through(last_offset)
