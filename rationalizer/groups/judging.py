"""What records of coordinated groups are judged with: the groups of a CP, senders, rebalances."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from rationalizer import codes
from rationalizer.groups import barriers
from rationalizer.groups.group import Group, Member
from rationalizer.groups.lots import NOBODY
from rationalizer.groups.witness import NOBODY_GOES, NOTHING, Witness, bury, witness_of
from rationalizer.plane import ApplyContext, Verdict
from rationalizer.wire.unpacking import Message

#: Pieces that were released.
_OWNERLESS: Final = frozenset([NOBODY])


class Judging:
    """The coordinated groups of one CP, by group_id: those it is the home of, and marks of others (G2)."""

    __slots__ = ("_partition", "_partitions", "_weight", "groups")

    def __init__(self, partition: int, partitions: int) -> None:
        self.groups: dict[str, Group] = {}
        self._partition = partition
        self._partitions = partitions
        #: Partitions of all topics that all groups subscribe to (G11).
        self._weight = 0

    def _sender(
        self, message: Message, member_id: str, context: ApplyContext, leaves: bool = False
    ) -> tuple[Group, Member, Witness] | None:
        """A record's sender, and what it brings besides if it is accepted. leaves: the sender goes with it."""
        _, _, instance_id, client_id, group_id, *_ = message
        group = self.groups.get(group_id)
        sender = None if group is None else group.sender(member_id, client_id, instance_id)
        if group is None or sender is None:
            return None
        if not leaves:
            witness = witness_of(group, sender, context.log_time)
            if witness is NOTHING:
                return group, sender, witness
        else:
            witness = witness_of(group, sender, context.log_time, slots_of(sender))
        return None if witness.removes(sender) else (group, sender, witness)

    def _rebalance(
        self, group: Group, context: ApplyContext, lost: AbstractSet[int], others: AbstractSet[int] = NOBODY_GOES
    ) -> None:
        """`lost`: slots that were removed or replaced; `others`: those that left at a checkpoint, and NOBODY.

        What was released NOBODY owns.
        """
        gone = lost | others
        checkpoints = group.checkpoints
        if checkpoints is not None and checkpoints.hold and lost:
            owners = barriers.owners_of(group) if NOBODY in others else checkpoints.owners
            if not owners.isdisjoint(lost):
                gone = gone | group.members.keys()
        self._weight -= group.weight
        group.rebalance(context.offset, gone)
        barriers.note_owners(group)
        self._weight += group.weight

    def _lives(self, group: Group, sender: Member, witness: Witness, context: ApplyContext) -> None:
        """A record of types 17, 19 and 29 is accepted: the overdue go, with a rebalance, and the sender beats (G9)."""
        others = settle(group, witness, context)
        group.beat(sender, context.log_time)
        if witness.gone or others:
            self._rebalance(group, context, witness.gone, others)


def slots_of(sender: Member | None) -> frozenset[int]:
    """The sender's slot, if there is a sender."""
    return NOBODY_GOES if sender is None else frozenset([sender.slot])


def settle(group: Group, witness: Witness, context: ApplyContext) -> frozenset[int]:
    """A record is accepted: a barrier is closed, the overdue go. Whose pieces go at once besides theirs."""
    if witness is NOTHING:
        return NOBODY_GOES
    others = NOBODY_GOES if witness.closing is None else close(group, witness.closing, context)
    bury(group, witness.gone, witness.silent, context)
    return others


def close(group: Group, closing: barriers.Closing, context: ApplyContext) -> frozenset[int]:
    """The barrier is closed: the slots that leave with it, and NOBODY, if something was released."""
    handed = barriers.close(group, closing, context.log_time)
    group.remove(closing.left)
    return closing.left | _OWNERLESS if handed else closing.left


def of_entries(answers: tuple[str, ...]) -> Verdict:
    """What a record of entries with these codes is answered, once it is accepted."""
    return Verdict(codes.OK if codes.ACCEPTED.issuperset(answers) else codes.PARTIAL, True, answers)
