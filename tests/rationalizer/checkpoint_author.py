"""What the tests of checkpoints write into a log: barriers, answers, rollbacks; right, late, doubled and wrong ones.

`CheckpointHand` writes for a `GroupAuthor`, whose records continue between its own: members come, die and are replaced
while a barrier is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tests.rationalizer.oracle import shortest
from tests.rationalizer.oracle.checkpoints import Checkpoints
from tests.rationalizer.oracle.groups import Group, Member, Piece
from tests.rationalizer.oracle.progress import LARGEST_HASH
from tests.rationalizer.oracle.world import Who

if TYPE_CHECKING:
    from tests.rationalizer.group_author import GroupAuthor

TIMEOUTS = (100, 100, 150, 1_000, 30_000, 3_600_000)
LARGEST = 2**63 - 1
#: P12.
MARK = 2**62
#: Barriers that stay open, on which everything else falls; and such as are complete within a few records.
TEMPERS = ("brisk", "brisk", "slow", "hostile")


class CheckpointHand:
    """Writes the records of section 7 about the groups of its author's log."""

    def __init__(self, author: GroupAuthor) -> None:
        self.author = author
        self.choose = author.choose
        self.temper = author.choose(TEMPERS)
        self.hold = author.choose((True, False, False))
        #: Records of these types, for those that come twice or late.
        self.earlier: list[bytes] = []

    def value(self) -> bytes | None:
        """A record that makes progress, or one that should not."""
        again: bool = self.choose((True,) + (False,) * 24)
        if self.earlier and again:
            return self.choose(self.earlier[-12:])
        value = self.choose(self.writers(self.author.known()))()
        self.earlier.append(value)
        return value

    def odd(self) -> bytes:
        """Whatever the state of the group, of any kind."""
        group = self.choose((self.author.known(), Group(self.author.claimed)))
        return self.choose((self.begin, self.answer, self.go_back, self.keep))(group)

    def is_slow(self) -> bool:
        """Whether the log's time is to reach the end of a barrier that is open."""
        return self.temper == "slow" and bool(self.author.barriers())

    def writers(self, group: Group) -> Sequence[Callable[[], bytes]]:
        """What fits the state of the group: some weight for all else, too."""
        author, known = self.author, group.checkpoints
        odd: tuple[Callable[[], bytes], ...] = (
            lambda: self.begin(group),
            lambda: self.answer(group),
            lambda: self.keep(group),
        )
        odd += (self.choose((odd[2], lambda: self.go_back(group))),)
        if group.name not in author.world.groups:
            return (*(lambda: self.mark(group),) * 10, *odd)
        if known is None:
            return (*(author.leave,) * 8, *odd) if group.members else (*(odd[0],) * 12, *odd)
        few = 1 if self.temper != "hostile" else 4
        begins = 1 if known.barrier is not None or not group.members else 6
        more = (*(odd[0],) * begins, *odd * few)
        if known.barrier is not None:
            more = (*more, *(lambda: self.answer_of_an_owner(group),) * (16 if self.temper == "brisk" else 4))
            more = (*more, author.beat, author.topics_changed, author.joins_again)
            more = (*more, lambda: self.late_restart(group), *(lambda: self.idle(group),) * 2)
            if author.world.pause(group.name) and all(m.is_overdue(author.world.log_time) for m in group.members):
                more = (*more, *(author.reposition,) * 12, author.forget)
        if any(place not in group.progress for place in group.pieces):
            more = (*more, *(lambda: self.start(group),) * 6)
        if not group.members:
            paused = author.world.pause(group.name) is not None
            more = (*more, *(author.newcomer,) * 9, author.pause)
            more = (*more, *(author.reposition,) * 12, author.forget) if paused else more
        return more

    def takes_none_yet(self) -> bool:
        """Most of the log is to be about a group that takes checkpoints."""
        group = self.author.world.groups.get(self.author.home[0])
        return group is None or group.checkpoints is None

    def mark(self, group: Group) -> bytes:
        """Type 21 that makes the group, so that its first checkpoint can begin."""
        return shortest([2, 21, "1", "admin", group.name, {}])

    def record(self, kind: int, who: Who, group: str, *fields: object) -> bytes:
        """Mostly version 3; from level 3 on, versions 1 and 2 mean the same."""
        return shortest([self.choose((3,) * 5 + (2, 1)), kind, who[1], who[0], group, *fields])

    def anybody(self, group: Group) -> Who:
        """A member's ids or an admin's: no rule asks for them."""
        return self.choose((self.author.sender(group)[0], self.author.admin_of(group.name)))

    def id_near(self, known: Checkpoints | None, right: int) -> int:
        """Mostly the right one; else one that is kept, or was, or is still to come."""
        near = [0, right + 1, max(0, right - 1), self.author.world.next_offset]
        if known is not None:
            near += [*(kept.id for kept in known.kept), known.newest]
            near += [] if known.barrier is None else [known.barrier.id]
        return self.choose((right,) * 3 * len(near) + (*near,))

    def begin(self, group: Group) -> bytes:
        """Type 23."""
        known = group.checkpoints
        after = self.id_near(known, 0 if known is None else known.newest)
        hold = self.hold if known is None else self.choose((True, False))
        keep = self.choose((0, 0, 0, 1, 1, 2, 2, 3, 5, 64))
        return self.record(23, self.anybody(group), group.name, after, self.choose(TIMEOUTS), keep, hold)

    def answer(self, group: Group) -> bytes:
        """Type 24 of a member, or of a client that would be one."""
        who, member_id = self.author.sender(group)
        member = next((member for member in group.members if member.member_id == member_id), None)
        return self.answer_of(group, who, member_id, member)

    def answer_of_an_owner(self, group: Group) -> bytes:
        """Type 24 of an owner that has not answered, if there is one: so barriers come to their end."""
        known = group.checkpoints
        assert known is not None
        assert known.barrier is not None
        owners = {piece.owner for piece in group.all_pieces()} - set(known.barrier.answers)
        waiting = [member for member in group.members if member.slot in owners]
        if not waiting:
            return self.answer(group)
        member = self.choose(waiting)
        return self.answer_of(group, (member.client, member.instance), member.member_id, member)

    def idle(self, group: Group) -> bytes:
        """Of a member that owns nothing: it answers all the same, and then leaves or is replaced."""
        known = group.checkpoints
        owners = {piece.owner for piece in group.all_pieces()}
        idle = [member for member in group.members if member.slot not in owners]
        if not idle or known is None or known.barrier is None:
            return self.author.newcomer()
        member = self.choose(idle)
        who: Who = (member.client, member.instance)
        if member.slot not in known.barrier.answers:
            what = self.choose((1, 0, 2))
            return self.record(24, who, group.name, member.member_id, group.generation, known.barrier.id, what, [])
        if self.choose((True, False)):
            return self.author.record(18, who, group.name, member.member_id, group.generation)
        return self.author.restart_of(group, member, self.author.seen(member))

    def late_restart(self, group: Group) -> bytes:
        """Of an instance that did not see its successor, which closes no barrier."""
        if not group.members:
            return self.author.newcomer()
        member = self.choose(group.members)
        return self.author.restart_of(group, member, self.choose((0, member.joined, member.joined + 1)))

    def answer_of(self, group: Group, who: Who, member_id: str, member: Member | None) -> bytes:
        """Type 24."""
        known = group.checkpoints
        right = 0 if known is None or known.barrier is None else known.barrier.id
        what = self.choose((1,) * 9 + (2, 2, 0, 0))
        slot = -1 if member is None else member.slot
        entries = self.cuts(group, slot)
        if what == 0:
            entries = entries[: self.choose((0,) * 9 + (1,))]
        generation = self.author.generation(group)
        if self.choose((True, True, False)):
            generation = group.generation
        barrier = right if self.choose((True,) * 6 + (False,)) else self.id_near(known, right)
        return self.record(24, who, group.name, member_id, generation, barrier, what, entries)

    def cuts(self, group: Group, slot: int) -> list[Any]:
        """Entries of an answer: of each piece of the member, as it should be; or any."""
        mine = [
            (place, piece) for place in sorted(group.pieces) for piece in group.pieces[place] if piece.owner == slot
        ]
        manner = self.choose(("all",) * 8 + ("some",) * 3 + ("none", "none", "any", "any"))
        if manner == "none":
            return []
        if manner == "any":
            return [self.author.entry_of(group, slot) for _ in range(self.choose((1, 2, 3)))]
        cuts = [self.cut(group, place, piece) for place, piece in mine]
        if manner == "some":
            cuts = [cut for cut in cuts if self.choose((True, False))]
            twice: bool = self.choose((True, False))
            cuts += [self.cut(group, *self.choose(mine))] if mine and twice else []
        return cuts

    def cut(self, group: Group, place: tuple[str, int], piece: Piece) -> list[Any]:
        """What is done of a piece."""
        low, high = piece.low, piece.high
        if self.choose((True,) + (False,) * 9):
            low, high = self.author.hashes(piece)
        metadata = self.choose((None,) * 6 + ("", "v2"))
        manner = self.choose(("through",) * 6 + ("ranges",) * 2 + ("nothing", "nothing", "mark", "parts"))
        through: int | None = self.author.near(group, place)
        ranges: list[list[int]] = []
        if manner == "parts":  # a sharer may save parts of its piece
            middle = (low + high) // 2
            low, high = self.choose(((low, middle), (middle, high)))
        if manner == "ranges":
            ranges = self.author.some_ranges(group, place)
        if manner == "mark":
            first = MARK + self.choose((-1, 0, 7))
            ranges = [[first, first + self.choose((0, 1))]]
        if manner not in ("through", "parts"):
            through = None
        return [*place, low, high, 0, through, ranges, metadata]

    def start(self, group: Group) -> bytes:
        """Type 19 of an owner of a piece of a partition without progress: action 2, of all of them."""
        places = [place for place in sorted(group.pieces) if place not in group.progress]
        owner = group.member(self.choose(group.pieces[self.choose(places)]).owner)
        if owner is None:
            return self.author.commit()
        mine = [place for place in places if any(piece.owner == owner.slot for piece in group.pieces[place])]
        entries: list[Any] = [
            [*place, 0, LARGEST_HASH, 2, self.choose((-1, 0, 9, 9)), [], self.choose((None, "m"))] for place in mine
        ]
        who = (owner.client, owner.instance)
        return self.record(19, who, group.name, owner.member_id, self.author.generation(group), False, entries)

    def go_back(self, group: Group) -> bytes:
        """Type 25."""
        known = group.checkpoints
        generation = self.author.generation(group)
        if self.choose((True, False)):
            generation = group.generation
        kept = [0] if known is None else [0, known.newest, *(each.id for each in known.kept)]
        return self.record(25, self.anybody(group), group.name, generation, self.id_near(known, self.choose(kept)))

    def keep(self, group: Group) -> bytes:
        """Type 27."""
        known = group.checkpoints
        kept = [0] if known is None else [each.id for each in known.kept]
        action = self.choose((0, 0, 1, 1, 1, 2))
        right = kept[-1] if action == 2 else self.choose(kept)
        return self.record(27, self.anybody(group), group.name, self.id_near(known, right), action)
