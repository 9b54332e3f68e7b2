"""Group planes that are each broken in one way, like the worlds of `broken.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rationalizer import CommitOffsets, Group, Lease, Outcome, World, codes
from rationalizer.groups.pieces import NEVER, Piece
from rationalizer.progress import Progress


class Meddler(World):
    """Applies records, then changes the group of the record."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = super().apply(offset, timestamp_ms, value)
        group = None if outcome.message is None else self.group(outcome.message.group_id)
        return outcome if group is None else self.meddle(outcome, group, offset)

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        """Do it."""
        raise NotImplementedError


def each_piece(group: Group, change: Callable[[Piece], Piece]) -> None:
    """Change every piece of the group."""
    for topic in group.pieces.values():
        for partition in topic.partitions():
            topic.put(partition, [change(piece) for piece in topic[partition]])


class Hasty(Meddler):
    """Gives revoked pieces to their target at once, while the owner continues (G16)."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.type == "JoinGroup":
            each_piece(
                group,
                lambda piece: (
                    piece if piece.revoked == NEVER else piece._replace(owner=piece.target, since=offset, revoked=NEVER)
                ),
            )
        return outcome


class Overlapping(Meddler):
    """Splits a partition into two overlapping pieces."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if len(group.members) == 2:
            first, second = group.members
            whole = group.pieces["t"][0][0]
            half = whole.hi // 2
            theirs = whole._replace(lo=half, owner=second, target=second, since=offset)
            mine = whole._replace(hi=half, owner=first, target=first, revoked=NEVER)
            topic = group.pieces["t"]
            topic.put(0, [mine, theirs])
        return outcome


class Unfencing(Meddler):
    """Gives a new owner its predecessor's token."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.type == "LeaveGroup":
            each_piece(group, lambda piece: piece._replace(since=1))
        return outcome


class Backwards(Meddler):
    """Accepts a position below stable (by P8, nothing changes)."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.entries == (codes.OFFSET_REGRESSION,) and outcome.message is not None:
            group.keep("t", 0).progress.reposition(outcome.message.entries[0][5])
        return outcome


class Leaky(Meddler):
    """Forgets offsets that one key has done beyond the others."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.entries == (codes.OFFSET_REGRESSION,):
            progress = group.keep("t", 0).progress
            progress.restore_pieces([(lo, hi, min(done, 8)) for lo, hi, done in progress.done_through])
        return outcome


class OutOfOrderLost(Meddler):
    """Forgets offsets done out of order when they are reported again."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.entries == (codes.DUPLICATE_COMMIT,):
            kept, stable = group.keep("t", 0), group.keep("t", 0).progress.stable
            kept.progress = Progress()
            kept.progress.through(stable)
        return outcome


class Haunted(Meddler):
    """Keeps the pieces of a member that left."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.type == "LeaveGroup":
            each_piece(group, lambda piece: piece._replace(owner=0))
        return outcome


class Timeless(Meddler):
    """Counts generations instead of using offsets."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.type == "LeaveGroup":
            group.generation = 1
        return outcome


class Restless(Meddler):
    """Begins a generation with a rejected record."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.code == codes.UNKNOWN_CONSUMER:
            group.generation = offset
        return outcome


class Credulous(Meddler):
    """Accepts a commit whose sender does not own the keys."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.entries == (codes.NOT_ASSIGNED,) and outcome.is_a(CommitOffsets) and outcome.message is not None:
            group.keep("t", 0).progress.through(outcome.message.entries[0][5] or 0)
            return replace(outcome, code=codes.OK, entries=(codes.OK,))
        return outcome


class Deaf(Meddler):
    """Accepts a commit of a sender that is no member."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.code == codes.UNKNOWN_CONSUMER and outcome.type == "CommitOffsets":
            return replace(outcome, accepted=True, code=codes.OK, entries=(codes.OK,))
        return outcome


class Ruthless(Meddler):
    """Removes a living member."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.type == "GroupHeartbeat" and outcome.accepted:
            newest = max(group.members)
            group.remove({newest})
            group.rebalance(offset, {newest})
        return outcome


class Faithful(Meddler):
    """Never buries anybody."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        for member in group.members.values():
            group.renew(member, 1_000_000_000, self.log_time)
        return outcome


class Amphibious(Meddler):
    """Keeps leases of a group that became coordinated."""

    def meddle(self, outcome: Outcome, group: Group, offset: int) -> Outcome:
        if outcome.code == codes.WRONG_KIND and outcome.message is not None:
            _, _, instance, client, group_id, topic, partition, interval = outcome.message
            lease = Lease(group_id, topic, partition)
            lease.client_id, lease.instance_id, lease.epoch = client, instance, offset
            lease.heartbeat_interval_ms, lease.last_beat = interval, self.log_time
            self._leases.leases[group_id, topic, partition] = lease
            return replace(outcome, accepted=True, code=codes.OK, epoch=offset)
        return outcome
