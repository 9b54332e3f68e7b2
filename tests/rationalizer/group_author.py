"""What the tests of coordinated groups write into a log: members' lives and deaths, and what no client should append.

`GroupAuthor` generates the next record from the oracle's present world, as `Author` does for claims, whose records it
writes, too: claimed and coordinated groups share a CP and their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rationalizer.levels import SHARING_LEVEL
from tests.rationalizer import samples
from tests.rationalizer.group_values import edge_of
from tests.rationalizer.oracle import OracleWorld, shortest
from tests.rationalizer.oracle.checkpoints import Barrier, Checkpoints
from tests.rationalizer.oracle.groups import Group, Member, Piece
from tests.rationalizer.oracle.layout import HIGHEST_LEVEL, home_of_group
from tests.rationalizer.oracle.progress import LARGEST_HASH
from tests.rationalizer.oracle.world import LeaseKey, Who
from tests.rationalizer.sharers import SettlingHand
from tests.rationalizer.strategies import LARGEST, Author, Choose, Entry, home_keys, record

# What the tests of checkpoints write into a log: barriers, answers, rollbacks; right, late, doubled and wrong ones.


TIMEOUTS = (100, 100, 150, 1_000, 30_000, 3_600_000)
#: P12.
MARK = 2**62
#: Barriers that stay open, on which everything else falls; and such as are complete within a few records.
TEMPERS = ("brisk", "brisk", "slow", "hostile")


class CheckpointHand:
    """Writes the records of section 7 for a `GroupAuthor`, whose records continue between its own: members come, die
    and are replaced while a barrier is open.
    """

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


#: Those without a writer here.
OTHERS = [kind for kind in samples.OTHERS if kind.level > SHARING_LEVEL]
CLAIMED = "claims"
TOPICS = ("t", "u", "é")
PATTERNS = ("^t", "^[tu]$")
CLIENTS = ("a", "b", "c", "d", "e", "f")
MANY_CLIENTS = tuple("abcdefghijklmn")
INSTANCES = ("1", "2")
STRATEGIES = ("range", "roundrobin", "sticky")
SESSIONS = (100, 150, 1000, 1000, 30_000, 1_800_000)
LONG_SESSIONS = (1000, 30_000, 30_000, 1_800_000)
NOBODY = ("nobody", "1")


def groups_of(cp: int, partitions: int, at_home: bool, count: int) -> list[str]:
    """Names of groups at home in the CP, or elsewhere; with a single CP, any."""
    names = [f"g{number}" for number in range(200)]
    fitting = [name for name in names if (home_of_group(name, partitions) == cp) == at_home]
    return (fitting or names)[-count:]


class GroupAuthor(Author):
    """Writes the next record of a log of the highest level, given the present world."""

    def __init__(self, choose: Choose, world: OracleWorld, takes: bool | None = None) -> None:
        """takes: whether its groups take checkpoints (None: as is chosen)."""
        super().__init__(choose, world)
        cp, partitions = world.partition, world.partitions
        # Some logs are calm, so that groups grow; crowded, so that members share by key; or moving: many come, go, and
        # want other topics. In wild ones members die; in empty ones admins find no members.
        self.temper = choose(("calm", "crowded", "moving", "moving", "wild", "wild", "empty"))
        self.calm = self.temper not in ("wild", "empty")
        self.clients = MANY_CLIENTS if self.temper in ("crowded", "moving") else CLIENTS
        self.home = groups_of(cp, partitions, True, 8 if self.temper == "empty" else 2)
        self.away = groups_of(cp, partitions, False, 1)[0]
        pairs = [key[1:] for key in home_keys(cp, partitions) if key[0] == "g"]
        #: In logs about groups that take none, records of checkpoints are odd.
        self.takes = choose((True, False)) if takes is None else takes
        self.hand = CheckpointHand(self)
        self.settling = SettlingHand(self)
        self.claimed = CLAIMED
        self.keys: list[LeaseKey] = [(CLAIMED, *pair) for pair in pairs] + [(name, *pairs[0]) for name in self.home[:2]]

    # What there is.

    def paused_or_any(self) -> str:
        """A group, preferably a paused one."""
        paused = [pause.group for pause in self.world.pauses()]
        return self.choose((*paused * 3, self.name()))

    def name(self) -> str:
        """A group: mostly the first one of this CP, rarely a claimed one or one of another CP.

        Where groups are mostly empty there are more of them, for the records that make one.
        """
        return self.choose((self.home[0],) * 24 + tuple(self.home[1:]) * 6 + (self.away, CLAIMED))

    def known(self) -> Group:
        """A group as it is; an unknown one is empty."""
        name = self.name()
        return self.world.groups.get(name, Group(name))

    def member(self, group: Group) -> Member | None:
        """One of its members, preferably a silent one."""
        if not group.members:
            return None
        late = sorted(group.members, key=lambda member: member.last_beat)
        return self.choose((*late, *late[:2]))

    def record(self, kind: int, who: Who, group: str, *fields: object) -> bytes:
        """Mostly version 2; from level 2 on, version 1 means the same."""
        value = [self.choose((2, 2, 2, 1)), kind, who[1], who[0], group, *fields]
        return shortest(value)

    def sender(self, group: Group) -> tuple[Who, str]:
        """Ids of a member; now and then its id with other ids beside it, an id that is gone, or of no member."""
        member = self.member(group)
        if member is None:
            return (self.choose(self.clients), "1"), f"{group.name}-gone"
        who: Who = (member.client, member.instance)
        other = self.choose(group.members)
        wrong = (
            ((member.client, "9"), member.member_id),
            ((self.choose(self.clients), member.instance), member.member_id),
            (who, other.member_id),
            (who, member.member_id + "0"),
            (NOBODY, member.member_id),
        )
        return self.choose(((who, member.member_id),) * 40 + wrong)

    # Time.

    def stamp(self) -> int:
        """A step ahead, or to just before, at or after the moment at which a member or all are overdue."""
        now = self.world.log_time
        if self.takes and self.choose((True,) + (False,) * 49):  # silence: all members are overdue
            longest = max((m.session_timeout_ms for name in self.home for m in self.members(name)), default=0)
            return now + min(longest, 60_000) + 1
        if self.choose((True,) * (5 if self.hand.is_slow() else 80 if self.calm else 10) + (False,)):
            return now + self.choose((0, 1, 5, 5, 20))
        ends = [m.last_beat + m.session_timeout_ms for name in self.home for m in self.members(name)]
        ends += [pause.expires for pause in self.world.pauses() if pause.expires < 2**60]
        ends += [barrier.opened + barrier.timeout_ms for barrier in self.barriers()]
        edges = [end + step for end in ends for step in (-1, 0, 1) if now < end + step < now + 100_000]
        if self.choose((True, True, True, False)) and edges:
            return self.choose(sorted(edges))
        return super().stamp()

    def members(self, name: str) -> tuple[Member, ...]:
        """The members of a group that may not exist."""
        group = self.world.groups.get(name)
        return () if group is None else group.members

    def barriers(self) -> list[Barrier]:
        """Those that are open."""
        known = [self.world.groups[name].checkpoints for name in self.home if name in self.world.groups]
        return [each.barrier for each in known if each is not None and each.barrier is not None]

    # Joining.

    def topics(self) -> list[list[Any]]:
        """A few topics, sometimes one twice, or one that does not exist yet."""
        names = self.choose((("t",), ("t",), ("t", "u"), ("u",), TOPICS, ("t", "t")))
        counts: tuple[int, ...] = (1, 2, 2, 2, 3, 3, 4, 0)
        if self.temper == "crowded":
            counts = (1, 1, 2, 2, 3, 4)
        if self.temper == "moving":
            counts = (1, 3, 5, 8, 9)
            names = self.choose((("t",), ("u",), ("é",), ("t", "u"), ("u", "é"), TOPICS))
        return [[name, self.choose(counts)] for name in names]

    def join_fields(self, group: Group) -> list[Any]:
        """Everything after member_id and seen, for a newcomer."""
        most = group.settings.max_session_timeout_ms
        fitting = [session for session in (LONG_SESSIONS if self.calm else SESSIONS) if session <= most]
        session = self.choose((*fitting * 4, most, most + 1))
        mine = group.strategy or self.choose(STRATEGIES)
        strategy = self.choose((mine,) * 16 + (*STRATEGIES, "dice"))
        pattern = self.choose(("",) * 5 + PATTERNS)
        topics = self.topics()
        if self.choose((False,) * 20 + (True,)):  # too many in any case
            topics = [["huge", 100_000], ["t", 3]]
        if pattern and self.choose((True, False, False)):
            topics = []
        return [min(session, 2**31 - 1), strategy, self.choose((True,) * 4 + (False,)), pattern, topics]

    def newcomer(self) -> bytes:
        """Type 16 of a client: mostly a new one, possibly a restart."""
        group = self.known()
        who = (self.choose(self.clients), self.choose(INSTANCES))
        return self.record(16, who, group.name, "", self.seen(None), *self.join_fields(group))

    def seen(self, member: Member | None) -> int:
        """Mostly everything; sometimes so little that the replaced instance was not seen."""
        joined = member.joined if member else 0
        return self.choose((self.world.next_offset,) * 8 + (joined, joined + 1, max(0, joined - 1), 0))

    def joins_again(self) -> bytes:
        """Type 16 of a member: the same again, or changed in one field; with or without its id."""
        group = self.known()
        member = self.member(group)
        if member is None or group.strategy is None:
            if self.choose((True, False)):
                return self.newcomer()
            gone = (self.choose(self.clients), "1")  # with an id that no member has, or no more
            return self.record(16, gone, group.name, f"{group.name}-gone", self.seen(None), *self.join_fields(group))
        fields: list[Any] = [member.session_timeout_ms, group.strategy, member.allow_key_share, member.pattern]
        fields.append([[topic, group.topics.get(topic, 0)] for topic in member.topics])
        if self.choose((True, True, False)):
            place = self.choose(range(5))
            fields[place] = self.join_fields(group)[place]
        if not fields[3] and not fields[4]:
            fields[4] = [["t", 1]]
        who, member_id = self.sender(group)
        if self.choose((True, False)):  # its own ids, or none
            who, member_id = (member.client, member.instance), self.choose((member.member_id, ""))
        return self.record(16, who, group.name, member_id, self.seen(member), *fields)

    def restart(self) -> bytes:
        """Type 16 of another instance of a member's client."""
        group = self.known()
        member = self.member(group)
        if member is None:
            return self.newcomer()
        return self.restart_of(group, member, self.seen(member))

    def restart_of(self, group: Group, member: Member, seen: int) -> bytes:
        """Type 16 of another instance of this member's client."""
        who = (member.client, "2" if member.instance == "1" else "1")
        return self.record(16, who, group.name, "", seen, *self.join_fields(group))

    # What members do.

    def generation(self, group: Group) -> int:
        """Mostly the group's; else an older one near everything that it is compared with, or one above."""
        near = {group.generation - 1, 0}
        for pieces in group.pieces.values():
            for piece in pieces:
                near |= {piece.since, piece.since - 1, piece.revoked or 0, (piece.revoked or 0) - 1}
        older = sorted(number for number in near if 0 <= number <= group.generation)
        return self.choose((group.generation,) * 10 + (*older, group.generation, group.generation + 1))

    def beat(self) -> bytes:
        """Type 17."""
        group = self.known()
        who, member_id = self.sender(group)
        return self.record(17, who, group.name, member_id, self.generation(group))

    def leave(self) -> bytes:
        """Type 18."""
        group = self.known()
        who, member_id = self.sender(group)
        return self.record(18, who, group.name, member_id, self.generation(group))

    def topics_changed(self) -> bytes:
        """Type 20; rarely with more than a CP can take."""
        group = self.known()
        with_pattern = [member for member in group.members if member.pattern]
        who, member_id = self.sender(group)
        if self.choose((True, True, False)) and with_pattern:
            member = self.choose(with_pattern)
            who, member_id = (member.client, member.instance), member.member_id
        topics = self.choose((self.topics(), self.topics(), self.topics(), self.topics(), []))
        if group.is_subscribed("t") and group.is_subscribed("u") and self.choose((False,) * 8 + (True,)):
            topics = [["t", 100_000], ["u", 1]]  # never accepted, as it would take long
        return self.record(20, who, group.name, member_id, topics)

    def commit(self) -> bytes:
        """Type 19 of a member, or of a client that would be one; or, under a claim, type 7."""
        if self.choose((False,) * 12 + (True,)):
            return super().commit()
        group = self.known()
        who, member_id = self.sender(group)
        slot = next((member.slot for member in group.members if member.member_id == member_id), -1)
        entries = [self.entry_of(group, slot) for _ in range(self.choose((1, 1, 1, 2, 2, 3, 6)))]
        return self.record(
            19, who, group.name, member_id, self.generation(group), self.choose((False, False, False, True)), entries
        )

    def hand_over(self) -> bytes:
        """Type 19 with which an owner releases what was revoked, as it should or nearly so."""
        group = self.known()
        revoked = [
            (place, piece)
            for place, pieces in sorted(group.pieces.items())
            for piece in pieces
            if piece.revoked is not None
        ]
        if not revoked:
            return self.commit()
        place, piece = self.choose(revoked)
        owner = group.member(piece.owner)
        assert owner is not None
        low, high = self.hashes(piece)
        through = self.choose((None, None, self.near(group, place)))
        entry: list[Any] = [*place, low, high, 1, through, [], None]
        who = (owner.client, owner.instance)
        return self.record(19, who, group.name, owner.member_id, self.generation(group), False, [entry])

    def hashes(self, piece: Piece) -> tuple[int, int]:
        """Mostly the piece's range; or the whole space, a part of it, or one key more."""
        low, high = piece.low, piece.high
        middle = (low + high) // 2
        other = ((0, LARGEST), (low, middle), (middle, high), (low, low), (max(0, low - 1), high), (middle, LARGEST))
        return self.choose(((low, high),) * 8 + other)

    def near(self, group: Group, place: tuple[str, int]) -> int:
        """An offset near the edges of the partition's progress, or −1."""
        progress = group.progress.get(place)
        if progress is None:
            return self.choose((-1, 0, 5, 9))
        edges = {progress.stable, progress.stable + 3, *(offset for _, _, offset in progress.through)}
        edges |= {edge for span in (*progress.ranges[:2], *progress.ranges[-2:]) for edge in span}
        near = sorted({edge + step for edge in edges for step in (-1, 0, 1, 2)})
        return self.choose([offset for offset in near if -1 <= offset <= LARGEST] or [LARGEST])

    def some_ranges(self, group: Group, place: tuple[str, int]) -> list[list[int]]:
        """1 … 3 intervals, short, near the progress."""
        found = []
        for _ in range(self.choose((1, 1, 2, 3))):
            first = max(0, self.near(group, place) + self.choose((0, 0, 2, 4)))
            found.append([min(first, LARGEST), min(first + self.choose((0, 0, 1, 3)), LARGEST)])
        return found

    def entry_of(self, group: Group, slot: int) -> list[Any]:
        """An entry, mostly for a piece of the member with this slot."""
        places = sorted(group.pieces)
        mine = [(place, piece) for place in places for piece in group.pieces[place] if piece.owner == slot]
        anything = [(place, piece) for place in places for piece in group.pieces[place]]
        nothing = [((topic, 0), Piece(0, LARGEST, -1, 0, None, None)) for topic in (*TOPICS, "none")]
        place, piece = self.choose((*(mine or nothing) * 6, *anything, nothing[0]))
        low, high = self.hashes(piece)
        metadata = self.choose((None, None, None, "", "m\x00", "x" * 255))
        manner = self.choose(("through",) * 4 + ("ranges",) * 5 + ("start",) * 2 + ("nothing",))
        action = self.choose((0, 0, 0, 1))
        if manner == "start":
            return [*place, 0, LARGEST, 2, self.near(group, place), [], metadata]
        if manner == "ranges":
            return [*place, low, high, action, None, self.some_ranges(group, place), metadata]
        through = self.near(group, place) if manner == "through" else None
        return [*place, low, high, action, through, [], metadata]

    # Admins.

    def admin_of(self, name: str) -> Who:
        """Mostly the client that has paused the group."""
        pause = self.world.pause(name)
        client = pause.client if pause else "admin"
        return (self.choose((client,) * 6 + ("admin", "a")), self.choose(INSTANCES))

    def configure(self) -> bytes:
        """Type 21: a mark, a setting or two, or all of them."""
        settings = {
            "accept_individual_commit": self.choose((True,) * 6 + (False,)),
            "accept_range_fetch": self.choose(([], ["t"], ["t"], ["u", "t"], list(TOPICS), list(TOPICS), ["t", "t"])),
            "max_session_timeout_ms": self.choose((1_800_000, 1_800_000, 1_800_000, 30_000)),
            "max_individual_commits": self.choose((60_000, 60_000, 3, 1)),
        }
        if self.temper == "crowded" and self.choose((True,) * 9 + (False,)):
            settings["accept_range_fetch"] = list(TOPICS)
            return self.record(21, self.admin_of(self.home[0]), self.home[0], settings)
        names = self.choose(((), tuple(settings), tuple(settings)[:2], *((name,) for name in settings)))
        named = {name: settings[name] for name in names}
        who, name = self.admin_of(self.name()), self.name()
        if self.world.level < 5 or self.choose((False, False, True)):
            return self.record(21, who, name, named)
        named["strategy"] = self.choose((*STRATEGIES * 3, None, None, None, "", "mine", 7))
        return shortest([self.choose((5,) * 9 + (2,)), 21, who[1], who[0], name, named])

    def pause(self) -> bytes:
        """Type 5: a pause, a longer or shorter one, or its end."""
        now, name = self.world.log_time, self.name()
        # If nothing is calm, long enough for members to be overdue before it ends.
        longer = () if self.calm else (2_000, 2_000, 2_000)
        expires = now + self.choose((-now, 0, 0, 1, 20, 50, 50, 50, 200, 500, *longer))
        return record(5, self.admin_of(name), name, expires)

    def reposition(self) -> bytes:
        """Type 19 with member_id "", mostly of the pausing client."""
        name = self.paused_or_any()
        group = self.world.groups.get(name, Group(name))
        entries = []
        for _ in range(self.choose((1, 1, 2, 3))):
            place = self.choose((*sorted(group.progress), ("t", 0), ("t", 1), ("gone", 7)))
            entry: list[Any] = [*place, 0, LARGEST, 0, self.choose((None, -1, self.near(group, place))), [], None]
            wrong: list[tuple[int, Any]] = [(2, 1), (3, LARGEST - 1), (4, 1), (6, [[1, 2]])]
            at, what = self.choose([(7, "by hand"), (7, None), (7, None), (7, None), *wrong])
            entry[at] = what
            if at == 6:
                entry[5] = None
            entries.append(entry)
        generation = self.choose((0, group.generation, LARGEST))
        in_order = self.choose((True, False))
        return self.record(19, self.admin_of(group.name), group.name, "", generation, in_order, entries)

    def forget(self) -> bytes:
        """Type 8."""
        name = self.paused_or_any()
        return record(8, self.admin_of(name), name)

    def upgrade(self) -> bytes:
        """Type 33, to the highest level."""
        return record(33, ("admin", "1"), "g", self.choose((1, HIGHEST_LEVEL)))

    # Noise.

    def odd(self) -> bytes:
        """A valid record of section 5 with one field at or beyond a bound."""
        return edge_of(self.choose, self.known().name, self.sender(self.known())[0])

    def other(self) -> bytes:
        """A type without its own writer, mostly of a group that there is."""
        group, number = self.known(), self.choose([kind.type for kind in OTHERS])
        fields = samples.fields_of(number, self.choose)
        fields += self.choose(([],) * 9 + ([0],))  # one too many
        return self.record(number, self.sender(group)[0], group.name, *fields)

    def lease_record(self) -> bytes | None:
        """Types 1 to 8 on the claimed group, and sometimes on a coordinated one."""
        return self.choose((self.claim, self.heartbeat, self.takeover, self.release, self.grant, self.batch))()

    def batch(self) -> bytes:
        """Type 6, of one lease or two of one group."""
        _, *entry = key = self.key()
        lease = self.world.lease(key)
        entries = [[*entry, self.epoch(lease), self.last_offset(lease)]] * self.choose((1, 2))
        return record(6, self.who(key[0], lease), key[0], entries)

    def lease_commit(self) -> bytes:
        """Type 7."""
        return super().commit()

    def value(self) -> bytes | None:
        """Any of the above, in a mix that makes progress."""
        if self.world.level == 1 and self.choose((True, False, False)):
            return record(33, ("admin", "1"), "g", self.choose((HIGHEST_LEVEL, HIGHEST_LEVEL, HIGHEST_LEVEL - 1, 2)))
        if self.world.level in (2, HIGHEST_LEVEL - 1) and self.choose((True,) + (False,) * 19):
            return record(33, ("admin", "1"), "g", HIGHEST_LEVEL)
        if self.takes and self.world.level > 2 and self.choose((True, True, self.hand.takes_none_yet())):
            return self.hand.value()
        if self.world.level > 1 and self.choose((True,) + (False,) * 14):
            return self.hand.odd()
        settles = not self.takes and any(group.progress for group in self.world.groups.values())
        if self.world.level > 3 and self.choose((True,) + (False,) * (3 if settles else 80)):
            return self.settling.value()
        if OTHERS and self.world.level > 1 and self.choose((True,) + (False,) * 9):
            return self.other()
        empty = self.temper == "empty"
        if self.temper == "crowded" and self.world.kind(self.home[0]) is None and self.choose((True, False)):
            return self.configure()
        if self.temper == "moving" and self.world.level > 1 and self.choose((True, True, False)):
            moves = (self.newcomer, self.newcomer, self.joins_again, self.leave, self.hand_over, self.hand_over)
            return self.choose(moves)()
        writers: Sequence[Callable[[], bytes | None]] = (
            *(self.newcomer,) * (1 if empty else 12 if self.temper == "crowded" else 6),
            *(self.joins_again,) * 4,
            *(self.restart,) * 2,
            *(self.beat,) * 6,
            *(self.commit,) * (2 if empty else 14),
            *(self.hand_over,) * (2 if empty else 6),
            *(self.topics_changed,) * 3,
            *(self.leave,) * (1 if self.calm else 6 if empty else 2),
            *(self.configure,) * 2,
            *(self.pause,) * (1 if self.calm else 2),
            *(self.reposition,) * (1 if self.calm else 10 if empty else 2),
            self.choose((self.forget, self.beat)),
            *(self.lease_record,) * 2,
            self.choose((self.lease_commit, self.tick, self.upgrade, self.noise)),
            self.odd,
        )
        return self.choose(writers)()


def write_group_log(
    choose: Choose, length: int, cp: int = 0, partitions: int = 1, takes: bool | None = None
) -> tuple[list[Entry], OracleWorld]:
    """A log of `length` records and the oracle's world after it."""
    world = OracleWorld(cp, partitions)
    author = GroupAuthor(choose, world, takes)
    log = []
    for _ in range(length):
        entry = author.entry()
        world.apply(*entry)
        log.append(entry)
    return log, world
