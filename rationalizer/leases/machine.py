"""The partition plane: leases, earliest claim wins (section 3).

The life of a lease, as the log moves it:

                   ClaimingPartition (C3)
        +------+ ------------------------> +------+ --+ Heartbeat, batch entry (C5): last beat, progress
        | free |                           | held |   | Heartbeat with epoch nil by a new instance of the
        +------+ <------------------------ +------+ <-+   same client, while fresh (C7): holder, epoch, beat
                   ReleasingPartition (C8)     |          ClaimingMessages, while not stale (C12): granted
                                               |          CommitRanges (P3): ranges
                                               +--> ClaimingPartition once stale (C3): holder, epoch, HI

`transitions.py` has all of it as one table. Stale is no state but a matter of log time (C1): a late beat revives
a lease that no other client took (C6). Every record that carries an epoch is judged against the holder first
(`Lease.is_held_by`), and a rejected record changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rationalizer import codes
from rationalizer.leases.canonical import load_leases
from rationalizer.leases.fast_path import BeatsFastPath
from rationalizer.leases.lease import Lease
from rationalizer.limits import HEAD_FIELDS
from rationalizer.plane import ApplyContext, Bounds, FastPath
from rationalizer.routing import are_routed_to, route_lease
from rationalizer.snapshot import LEASES
from rationalizer.state import LEASE
from rationalizer.wire.records import Belongs, Kind
from rationalizer.wire.unpacking import Message

LeaseKey = tuple[str, str, int]

#: Of a batch of more entries, the leases are not looked up before they are hashed: above this that only costs.
FEW_ENTRIES: Final = 256


class LeasePlane:
    """The leases of one CP. `leases` is keyed by (group_id, topic, partition)."""

    __slots__ = ("_keys_of_group", "_partition", "_partitions", "fast_path", "leases", "part")

    def __init__(self, partition: int, partitions: int) -> None:
        self.part = LEASES
        self.leases: dict[LeaseKey, Lease] = {}
        self.fast_path: FastPath = BeatsFastPath(self.leases).run
        self._keys_of_group: dict[str, list[LeaseKey]] = {}
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
        """The epoch of the one lease that a record names (D2)."""
        if kind.belongs is not Belongs.LEASE:
            return None
        lease = self.leases.get((message[4], message[HEAD_FIELDS], message[HEAD_FIELDS + 1]))
        return None if lease is None else lease.epoch

    def generation(self, group_id: str) -> None:
        """A claimed group has none."""

    def checkpoint(self, group_id: str) -> tuple[None, None]:
        """A claimed group takes none."""
        return None, None

    def knows(self, group_id: str) -> bool:
        """Whether there is a lease of the group (G1)."""
        return group_id in self._keys_of_group

    def size(self) -> int:
        """How many leases there are (S2)."""
        return len(self.leases)

    def rows(self, level: int) -> list[Sequence[Any]]:
        """All leases, sorted by (group, topic, partition)."""
        return LEASE.rows([self.leases[key] for key in sorted(self.leases)], level)

    def load(self, rows: Sequence[Any], bounds: Bounds) -> None:
        """Take over the leases of a snapshot."""
        for lease in load_leases(rows, bounds):
            self.add(lease)

    def is_active(self, group_id: str, context: ApplyContext) -> bool:
        """Whether a lease of the group is held and not stale (C16)."""
        return any(
            self.leases[key].held and not self.leases[key].is_stale(context.log_time)
            for key in self._keys_of_group.get(group_id, ())
        )

    def forget(self, group_id: str) -> None:
        """Drop the group's leases (C16)."""
        for key in self._keys_of_group.pop(group_id, ()):
            del self.leases[key]

    def add(self, lease: Lease) -> None:
        """Take in a lease that is not there yet."""
        key = (lease.group_id, lease.topic, lease.partition)
        self.leases[key] = lease
        self._keys_of_group.setdefault(lease.group_id, []).append(key)

    # -- record by record ------------------------------------------------------------------------------

    def _claiming_partition(self, message: Message, context: ApplyContext) -> str:
        """C3: granted where the lease is free or stale."""
        _, _, instance_id, client_id, group_id, topic, partition, heartbeat_interval_ms = message
        lease = self.leases.get((group_id, topic, partition))
        if lease is None:
            lease = Lease(group_id, topic, partition)
            self.add(lease)
        elif lease.held and not lease.is_stale(context.log_time):
            mine = lease.client_id == client_id and lease.instance_id == instance_id
            return codes.ALREADY_HELD if mine else codes.HELD
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
                answer(_refusal(lease))
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
            return _refusal(lease)
        lease.client_id = None
        lease.instance_id = None
        return _record_offset(lease, last_offset, context)

    def _claiming_messages(self, message: Message, context: ApplyContext) -> str:
        """C12: grant the sender what is not done up to the proposal."""
        _, _, instance_id, client_id, group_id, topic, partition, epoch, proposal = message
        lease = self.leases.get((group_id, topic, partition))
        if lease is None or not lease.is_held_by(instance_id, client_id, epoch):
            return _refusal(lease)
        if lease.is_stale(context.log_time):
            return codes.STALE
        return lease.progress.grant(proposal)

    def _commit_ranges(self, message: Message, context: ApplyContext) -> str:
        """P3-P5, by a holder that may be stale (C6)."""
        _, _, instance_id, client_id, group_id, topic, partition, epoch, ranges = message
        lease = self.leases.get((group_id, topic, partition))
        if lease is None or not lease.is_held_by(instance_id, client_id, epoch):
            return _refusal(lease)
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


def _refusal(lease: Lease | None) -> str:
    """Why a record that carries an epoch is rejected where `Lease.is_held_by` says no (C5)."""
    return codes.NOT_HELD if lease is None or lease.client_id is None else codes.FENCED


def _beat(
    lease: Lease | None, instance_id: str, client_id: str, epoch: int, last_offset: int | None, context: ApplyContext
) -> str:
    """One heartbeat, by itself or in a batch (C5)."""
    if lease is None or not lease.is_held_by(instance_id, client_id, epoch):
        return _refusal(lease)
    lease.last_beat = context.log_time
    return _record_offset(lease, last_offset, context)


def _record_offset(lease: Lease, last_offset: int | None, context: ApplyContext) -> str:
    """What an accepted beat's or release's last_offset does to the progress (E5, C5, C11)."""
    if last_offset is None:
        return codes.OK
    if context.pausing:
        return lease.progress.reposition(last_offset)
    return lease.progress.through(last_offset)
