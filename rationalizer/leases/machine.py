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
(`Lease.is_held_by`), then against the shares (`sharing.share_of`), and a rejected record changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rationalizer import codes
from rationalizer.leases.canonical import load_leases
from rationalizer.leases.fast_path import BeatsFastPath
from rationalizer.leases.lease import Lease
from rationalizer.leases.sharing import (
    SharingRecords,
    beat_share,
    end_shares,
    refusal,
    release_share,
    share_of,
)
from rationalizer.limits import HEAD_FIELDS
from rationalizer.plane import ApplyContext, Bounds, FastPath
from rationalizer.routing import are_routed_to, route_lease
from rationalizer.snapshot import LEASES
from rationalizer.state import LEASE
from rationalizer.wire.records import Belongs, Kind
from rationalizer.wire.unpacking import Message

#: Of a batch of more entries, the leases are not looked up before they are hashed: above this that only costs.
FEW_ENTRIES: Final = 256


class LeasePlane(SharingRecords):
    """The leases of one CP. `leases` is keyed by (group_id, topic, partition)."""

    __slots__ = ("_partition", "_partitions", "fast_path", "part")

    def __init__(self, partition: int, partitions: int) -> None:
        super().__init__()
        self.part = LEASES
        self.fast_path: FastPath = BeatsFastPath(self.leases).run
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

    def generation(self, group_id: str) -> None:
        """A claimed group has none."""

    def checkpoint(self, group_id: str) -> tuple[None, None]:
        """A claimed group takes none."""
        return None, None

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
        return lease.progress.reposition(last_offset)
    return lease.progress.through(last_offset)
