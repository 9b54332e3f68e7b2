"""What the tests of section 7b write into a log: shares, batches, tries, parks, redrives; right, late and wrong ones.

`SharingAuthor` writes about leases; `SettlingHand` writes type 29 for a `GroupAuthor`, between its own records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tests.rationalizer.oracle import OracleLease, OracleWorld, shortest
from tests.rationalizer.oracle.groups import Group
from tests.rationalizer.oracle.holes import Hole
from tests.rationalizer.oracle.keyed import KeyedProgress
from tests.rationalizer.oracle.shares import SharedLease
from tests.rationalizer.oracle.world import LeaseKey, Who
from tests.rationalizer.strategies import LARGEST, Author, Choose, Entry, record

if TYPE_CHECKING:
    from tests.rationalizer.group_author import GroupAuthor

HASHES = (0, 1, LARGEST // 4, LARGEST // 2, LARGEST // 2 + 1, LARGEST)
#: Ranges of keys that fit beside each other, and some that overlap them.
PARTS = (
    *((0, LARGEST // 2), (LARGEST // 2 + 1, LARGEST)) * 4,
    *((0, LARGEST // 4), (LARGEST // 4 + 1, LARGEST // 2)) * 2,
    (0, LARGEST),
    (1, 1),
    (LARGEST // 4, LARGEST // 2 + 1),
)
INTERVALS = (100, 100, 150, 1000)
REASONS = ("ValueError", "CRASHED", "r" * 64)
#: Marks lie above.
TOP = 2**62 - 1
CLIENTS = ("a", "b", "c", "d")


class Entries:
    """Entries of types 28 and 29, near everything that a partition's progress has."""

    def __init__(self, choose: Choose, *, with_spans: bool) -> None:
        self.choose = choose
        #: Whether most open entries are of several offsets without a key hash.
        self.with_spans = with_spans

    def near(self, progress: KeyedProgress) -> int:
        """An offset."""
        edges = {progress.stable, *(offset for _, _, offset in progress.through)}
        edges |= {edge for span in progress.ranges[:3] for edge in span}
        edges |= {edge for hole in progress.holes for edge in (hole.first, hole.last)}
        near = sorted({edge + step for edge in edges for step in (-1, 0, 1, 2)})
        return self.choose((*[offset for offset in near if 0 <= offset <= TOP] * 8, TOP, 0))

    def key_hash(self, hole: Hole | None) -> int:
        """Mostly the hole's."""
        some = HASHES if hole is None or hole.key_hash is None else (hole.key_hash,) * 12 + HASHES[:2]
        return self.choose(some)

    def span(self, progress: KeyedProgress, mine: Sequence[Hole]) -> tuple[int, int]:
        """A hole, a part of one, several, or anything."""
        of_mine: bool = self.choose((True, True, True, False))
        some = mine if mine and of_mine else progress.holes
        if not some or self.choose((False,) * 5 + (True,)):
            first = self.near(progress)
            return first, min(TOP, first + self.choose((0, 0, 0, 1, 3)))
        hole = self.choose(some)
        middle = (hole.first + hole.last) // 2
        return self.choose(
            (
                *((hole.first, hole.last),) * 6,
                *((hole.first, middle), (middle, hole.last), (middle, middle)) * 2,
                (hole.first, min(TOP, hole.last + 1)),
                (max(0, hole.first - 1), hole.last),
                (min(some[0].first, hole.first), hole.last),
            )
        )

    def done(self, progress: KeyedProgress, mine: Sequence[Hole]) -> list[Any]:
        """0 … 3."""
        return [list(self.span(progress, mine)) for _ in range(self.choose((0, 0, 1, 1, 1, 2, 3)))]

    def open(self, progress: KeyedProgress, mine: Sequence[Hole], *, again: bool) -> list[Any]:
        """0 … 3. again: half of them among what is done."""
        found = []
        for _ in range(self.choose((0, 0, 0, 1, 1, 2, 3))):
            first, last = self.span(progress, mine)
            of_done: bool = again and self.choose((True, False))
            if of_done:
                first = max(0, min(TOP, progress.stable) - self.choose((0, 1, 2, 5)))
                last = first + self.choose((0, 0, 1, 2))
            key_hash = None
            if not self.choose((True,) * (3 if self.with_spans else 1) + (False,) * (1 if self.with_spans else 5)):
                hole = next((hole for hole in progress.holes if hole.first <= first <= hole.last), None)
                last, key_hash = first, self.key_hash(hole)
            found.append([first, last, key_hash, self.choose((0, 1, 1, 2, 3, 1_000_000))])
        return found

    def parked(self, progress: KeyedProgress, mine: Sequence[Hole]) -> list[Any]:
        """0 … 2."""
        found = []
        for _ in range(self.choose((0, 0, 0, 0, 1, 1, 2))):
            first, _ = self.span(progress, mine)
            hole = next((hole for hole in progress.holes if hole.first <= first <= hole.last), None)
            found.append([first, self.key_hash(hole), self.choose((1, 5, 7)), self.choose(REASONS)])
        return found

    def all_three(self, progress: KeyedProgress, mine: Sequence[Hole], *, again: bool = False) -> list[Any]:
        """Of one record."""
        return [self.done(progress, mine), self.open(progress, mine, again=again), self.parked(progress, mine)]

    def seen(self, now: int, progress: KeyedProgress) -> int:
        """Mostly the present; or what a replica had that knows this hole, or not yet."""
        stale = [edge for hole in progress.holes for edge in (hole.since, hole.since + 1)]
        stale = [max(0, progress.again), progress.again + 1, *stale]
        return self.choose((now,) * 12 + (*stale[:6], 0, now + 5, LARGEST))


class SharingAuthor(Author):
    """Writes about leases that are held whole, by keys, by batches, in turns."""

    def __init__(self, choose: Choose, world: OracleWorld) -> None:
        super().__init__(choose, world)
        self.temper = choose(("whole", "keys", "keys", "batches", "batches", "batches", "mixed"))
        self.keys = self.keys[: choose((1, 1, 2))] + self.keys[2:3]
        self.entries = Entries(choose, with_spans=self.temper in ("batches", "mixed"))
        #: For those that come twice or late.
        self.earlier: list[bytes] = []

    # What there is.

    def key(self) -> LeaseKey:
        """Mostly the first."""
        return self.choose((*(self.keys[0],) * 20, *self.keys, self.elsewhere))

    def shared(self, key: LeaseKey) -> SharedLease:
        """Its state, as far as level 4 has one."""
        known = self.world.shared.get(key)
        if known is not None:
            return known
        lease = self.world.lease(key)
        if lease is None:
            return SharedLease()
        done = KeyedProgress(again=lease.again)
        progress = done.repositioned(lease.progress.stable).committed(lease.progress.ranges)
        return SharedLease(lease.holder, lease.epoch, lease.heartbeat_interval_ms, lease.last_beat, progress)

    def sender(self, key: LeaseKey) -> tuple[Who, int]:
        """The holder or a sharer, with its epoch; or nearly."""
        its = self.shared(key)
        some = [((share.client, share.instance), share.epoch) for share in its.shares]
        some += [] if its.holder is None else [(its.holder, its.epoch)]
        if not some:
            return (self.choose(CLIENTS), "1"), self.choose((0, self.world.next_offset))
        who, epoch = self.choose(some)
        wrong = [((who[0], "2"), epoch), (who, epoch + 1), (("z", who[1]), epoch), (who, some[0][1])]
        return self.choose([(who, epoch)] * 30 + wrong)

    def time_edges(self) -> list[int]:
        """Those of shares, too."""
        shares = [share for key in self.keys for share in self.shared(key).shares]
        ends = [share.last_beat + times * share.heartbeat_interval_ms for share in shares for times in (1, 2)]
        return sorted({*super().time_edges(), *(end + step for end in ends for step in (-1, 0, 1))})

    def stamp(self) -> int:
        """Mostly a small step; now and then near an end, or after all of them."""
        now = self.world.log_time
        manner = self.choose(("step",) * 16 + ("edge", "edge", "silence"))
        ahead = [edge for edge in self.time_edges() if now < edge < now + 100_000]
        if manner == "edge" and ahead:
            return self.choose(ahead)
        if manner == "silence" and ahead:
            return ahead[-1]
        return now + self.choose((0, 1, 5, 20))

    def write(self, kind: int, who: Who, group: str, *fields: object) -> bytes:
        """At level 4 all versions mean the same; at level 5, too, but 5 of type 28."""
        version = self.choose((4, 4, 4, 1, 3))
        if self.world.level >= 5 or self.choose((False,) * 40 + (True,)):
            version = self.choose((version, 5, 5) if kind == 28 else (version, version, 5))
        return shortest([version, kind, who[1], who[0], group, *fields])

    # Records.

    def claim_share(self) -> bytes:
        """Type 22."""
        key = self.key()
        group, topic, partition = key
        by_keys = self.temper == "keys" or (self.temper != "batches" and self.choose((True, False)))
        if self.choose((False,) * 15 + (True,)):
            by_keys = not by_keys
        keys = self.choose(PARTS) if by_keys else (None, None)
        shares = self.shared(key).shares
        comes_again: bool = self.choose((False,) * 5 + (True,))
        if shares and comes_again:
            again = self.choose(shares)
            who: Who = (again.client, self.choose((again.instance, again.instance, "2")))
            keys = again.keys or (None, None)
        else:
            who = (self.choose(CLIENTS), self.choose(("1", "1", "2")))
        start = self.choose((None, 0, 7, TOP))
        return self.write(22, who, group, topic, partition, self.choose(INTERVALS), *keys, start)

    def settle(self) -> bytes:
        """Type 28 with an epoch."""
        key = self.key()
        who, epoch = self.sender(key)
        its = self.shared(key)
        share = next((share for share in its.shares if share.epoch == epoch), None)
        by_batches = share is not None and share.keys is None
        mine = [hole for hole in its.progress.holes if hole.owner == epoch or (hole.owner is None and not by_batches)]
        entries = self.entries.all_three(its.progress, mine)
        take = None
        if self.choose((True, True, False) if by_batches else (True,) + (False,) * 11):
            up_to = self.choose((TOP, 60, self.entries.near(its.progress), its.progress.stable + 5))
            take = [self.choose((1, 2, 3, 8, 1_000_000)), up_to, self.choose((False,) * 5 + (True,))]
            entries = self.choose((entries, entries, [[], [], []]))
        seen = self.entries.seen(self.world.next_offset, its.progress)
        return self.write(28, who, key[0], *key[1:], epoch, seen, *entries, take)

    def operate(self) -> bytes:
        """Type 28 with epoch nil."""
        key = self.key()
        its = self.shared(key)
        free = [hole for hole in its.progress.holes if hole.owner is None]
        entries = self.entries.all_three(its.progress, free, again=self.world.level >= 5)
        seen = self.entries.seen(self.world.next_offset, its.progress)
        return self.write(28, ("admin", "1"), key[0], *key[1:], None, seen, *entries, None)

    def last(self, key: LeaseKey) -> int | None:
        """A last_offset."""
        return self.choose((None, None, self.entries.near(self.shared(key).progress), -1))

    def beat(self) -> bytes:
        """Type 1."""
        key = self.key()
        who, epoch = self.sender(key)
        return self.write(1, who, key[0], *key[1:], self.choose((epoch,) * 12 + (None,)), self.last(key))

    def let_go(self) -> bytes:
        """Type 3."""
        key = self.key()
        who, epoch = self.sender(key)
        return self.write(3, who, key[0], *key[1:], epoch, self.last(key))

    def ask(self) -> bytes:
        """Type 4."""
        key = self.key()
        who, epoch = self.sender(key)
        return self.write(4, who, key[0], *key[1:], epoch, self.entries.near(self.shared(key).progress))

    def commit(self) -> bytes:
        """Type 7."""
        key = self.key()
        who, epoch = self.sender(key)
        spans = [list(self.entries.span(self.shared(key).progress, ())) for _ in range(self.choose((1, 1, 2)))]
        return self.write(7, who, key[0], *key[1:], epoch, spans)

    def batch(self) -> bytes:
        """Type 6: one or two leases, or one twice."""
        key = self.key()
        who, epoch = self.sender(key)
        entries = [[*key[1:], epoch, self.last(key)]]
        other = self.choose(self.keys)
        if other[0] == key[0] and self.choose((True, False)):
            entries.append([*other[1:], self.sender(other)[1], self.last(other)])
        return self.write(6, who, key[0], entries)

    def claim(self) -> bytes:
        """Type 2."""
        key = self.key()
        return self.write(2, (self.choose((*CLIENTS, "admin")), "1"), key[0], *key[1:], self.choose(INTERVALS))

    def pause(self) -> bytes:
        """Type 5."""
        now = self.world.log_time
        expires = self.choose((0, now, now + 150, now + 5_000))
        return record(5, (self.choose(("admin", "admin", "a")), "1"), self.keys[0][0], max(0, expires))

    def position(self) -> bytes:
        """C11: of the pausing client, which holds the lease whole; its claim, if it has none."""
        key = self.keys[0]
        pause, its = self.world.pause(key[0]), self.shared(key)
        if pause is None:
            return self.pause()
        who: Who = (pause.client, "1")
        if its.holder != who:
            return self.write(2, who, key[0], *key[1:], 1000)
        return self.write(self.choose((1, 3)), who, key[0], *key[1:], its.epoch, self.entries.near(its.progress))

    def forget(self) -> bytes:
        """Type 8."""
        return record(8, ("admin", "1"), self.keys[0][0])

    def value(self) -> bytes | None:
        """In a mix that makes progress."""
        if self.world.level < 4 and self.choose((True, True, False)):
            return record(33, ("admin", "1"), "g", self.choose((5, 5, 5, 4, 4, 3)))
        if self.world.level == 4 and self.choose((True,) + (False,) * 60):
            return record(33, ("admin", "1"), "g", 5)
        is_late: bool = self.choose((True,) + (False,) * 20)
        if self.earlier and is_late:
            return self.choose(self.earlier[-10:])
        whole = self.temper in ("whole", "mixed")
        writers: Sequence[Callable[[], bytes | None]] = (
            *(self.claim_share,) * (1 if self.temper == "whole" else 6),
            *(self.claim,) * (4 if whole else 1),
            *(self.settle,) * 22,
            *(self.operate,) * (8 if self.world.level >= 5 else 4),
            *(self.beat,) * 4,
            *(self.let_go,) * 2,
            *(self.commit,) * 2,
            self.batch,
            self.choose((self.ask, self.batch)),
            self.choose((self.pause, self.position, self.beat)),
            self.position,
            self.choose((self.forget, self.tick, self.noise, self.takeover)),
        )
        value = self.choose(writers)()
        if value is not None:
            self.earlier.append(value)
        return value

    def takeover(self) -> bytes:
        """Type 1 with epoch nil."""
        key = self.key()
        lease: OracleLease | None = self.world.lease(key)
        client = lease.holder[0] if lease and lease.holder else "a"
        return self.write(1, (client, self.choose(("1", "2"))), key[0], *key[1:], None, self.last(key))


class SettlingHand:
    """Writes type 29 about the groups of its author's log."""

    def __init__(self, author: GroupAuthor) -> None:
        self.author = author
        self.entries = Entries(author.choose, with_spans=False)

    def value(self) -> bytes:
        """Of a member, of an operator, or of the pausing client."""
        author, choose = self.author, self.author.choose
        group = author.known()
        who, member_id = author.sender(group)
        generation = author.generation(group)
        if choose((False,) * (1 if author.world.level >= 5 else 4) + (True,)) or not group.members:
            who, member_id = author.admin_of(group.name), choose(("",) * 9 + (member_id,))
        slot = next((member.slot for member in group.members if member.member_id == member_id), -1)
        place = self.place(group, slot)
        progress = group.progress.get(place, KeyedProgress())
        mine = [piece for piece in group.pieces.get(place, ()) if piece.owner == slot]
        holes = [
            hole
            for hole in progress.holes
            if hole.key_hash is not None and any(piece.low <= hole.key_hash <= piece.high for piece in mine)
        ]
        entries = self.entries.all_three(progress, holes, again=author.world.level >= 5 and not member_id)
        seen = self.entries.seen(author.world.next_offset, progress)
        version = choose((4, 4, 4, 2)) if author.world.level < 5 else choose((5, 5, 5, 5, 4, 2))
        value = [version, 29, who[1], who[0], group.name, member_id, generation, seen, *place, *entries]
        return shortest(value)

    def place(self, group: Group, slot: int) -> tuple[str, int]:
        """A partition, mostly one of the member's, or one with holes."""
        places = sorted(group.pieces)
        mine = [place for place in places if any(piece.owner == slot for piece in group.pieces[place])]
        holes = [place for place in sorted(group.progress) if group.progress[place].holes]
        return self.author.choose((*mine * 4, *holes * 4, *places, ("t", 0)))


def write_sharing_log(choose: Choose, length: int, cp: int = 0, partitions: int = 1) -> tuple[list[Entry], OracleWorld]:
    """A log of `length` records and the oracle's world after it."""
    world = OracleWorld(cp, partitions)
    author = SharingAuthor(choose, world)
    log = []
    for _ in range(length):
        entry = author.entry()
        world.apply(*entry)
        log.append(entry)
    return log, world
