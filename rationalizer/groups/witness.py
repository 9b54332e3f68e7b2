"""What an accepted record brings besides its own effect: who is found dead (G8), and a barrier that is closed (X3)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from rationalizer.groups.barriers import Closing, closing_of
from rationalizer.groups.group import Group, Member
from rationalizer.plane import ApplyContext

NOBODY_GOES: Final[frozenset[int]] = frozenset()


class Witness(NamedTuple):
    """What a record brings besides its own effect, if it is accepted."""

    #: The barrier is closed before the record is judged; None: it stays as it is.
    closing: Closing | None
    #: The overdue that go, as the group is then.
    gone: frozenset[int]
    #: All are overdue, the sender is one of them: the log itself was silent.
    silent: bool

    @property
    def absent(self) -> frozenset[int]:
        """All that are members no longer when the record is judged."""
        return self.gone if self.closing is None else self.gone | self.closing.left

    def removes(self, member: Member) -> bool:
        """Whether the closing does: then it is a member no longer when the record is judged."""
        return self.closing is not None and member.slot in self.closing.left


NOTHING: Final = Witness(None, NOBODY_GOES, False)


def witness_of(group: Group, sender: Member | None, log_time: int, leaving: frozenset[int] = NOBODY_GOES) -> Witness:
    """`leaving`: slots that the record itself removes or replaces. Changes nothing."""
    late = group.overdue(log_time)
    checkpoints = group.checkpoints
    if checkpoints is None or checkpoints.barrier is None:
        return Witness(None, *_who_goes(group, sender, late, NOBODY_GOES)) if late else NOTHING
    gone, silent = _who_goes(group, sender, late, NOBODY_GOES)
    if not checkpoints.barrier.is_over(log_time) and checkpoints.owners.isdisjoint(gone | leaving):
        return Witness(None, gone, silent)
    closing = closing_of(checkpoints)
    if sender is not None and sender.slot in closing.left:
        sender = None
    return Witness(closing, *_who_goes(group, sender, late, closing.left))


def witness_of_positions(group: Group, log_time: int) -> Witness | None:
    """Of a pausing client's CommitOffsets (G21); None: members are at work."""
    checkpoints, late = group.checkpoints, frozenset(group.overdue(log_time))
    left, closing = NOBODY_GOES, None
    if checkpoints is not None and checkpoints.barrier is not None:
        buries = len(late) == len(group.members) and not checkpoints.owners.isdisjoint(late)
        if buries or checkpoints.barrier.is_over(log_time):
            closing = closing_of(checkpoints)
            left = closing.left
    gone = late - left
    return None if len(gone) < len(group.members) - len(left) else Witness(closing, gone, False)


def _who_goes(
    group: Group, sender: Member | None, late: AbstractSet[int], left: AbstractSet[int]
) -> tuple[frozenset[int], bool]:
    """The slots that an accepted record of this sender buries, and whether the log itself was silent (G8).

    `left`: members that have left by then.
    """
    late = frozenset(late - left)
    if sender is None or sender.slot not in late:
        return late, False
    if len(late) == len(group.members) - len(left):
        return NOBODY_GOES, True
    return late - {sender.slot}, False


def bury(group: Group, gone: AbstractSet[int], silent: bool, context: ApplyContext) -> None:
    """The overdue are members no longer; or, after a silence of the whole log, all sessions begin again (G8)."""
    log_time = context.log_time
    if gone:
        late = [member for slot, member in group.members.items() if slot in gone]
        context.silent = tuple([(member.client_id, log_time - member.last_beat) for member in late])
        group.remove(gone)
    if silent:
        for member in group.members.values():
            group.beat(member, log_time)
