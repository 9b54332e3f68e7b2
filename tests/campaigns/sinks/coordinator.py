"""Who may write what: it gives out strictly growing tokens, knows the rightful one of each key, and draws the work.

It stands in for Kafka and the log: messages that are not known to be done are given out again, to the rightful owner of
their keys. In between, writers get orders with tokens that are over, as if they had not noticed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.sinks.member import Order, Result, hash_of, is_hole

#: Tokens that are over and still used, for each partition.
REMEMBERED = 30


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys lo … hi of a partition, owned by a member since a token."""

    lo: int
    hi: int
    token: int
    owner: int

    @property
    def part(self) -> tuple[int, int, int]:
        """As orders have it."""
        return self.lo, self.hi, self.token


@dataclass(slots=True)
class Round:
    """What happened between two rewinds."""

    #: Up to here all was done before.
    since: int
    #: Offsets that a writer said are done.
    done: set[int] = field(default_factory=set)


class Shared:
    """One partition."""

    def __init__(self, number: int, window: int) -> None:
        self.number = number
        #: Messages are given out from the first that is not done on, as far as this.
        self.reach = window
        self.rounds = [Round(-1)]
        #: Everything up to here is done.
        self.stable = -1
        #: No message lies beyond; None: there are always more.
        self.end: int | None = None
        self.pieces: list[Piece] = []
        #: Orders that may come again with a token that is over.
        self.old: deque[Order] = deque(maxlen=REMEMBERED)
        #: Tokens by which the group was repositioned.
        self.repositions: list[int] = []
        #: A rewind is under way: no work is given out.
        self.rewinding = False
        #: Messages of orders under way.
        self.out: Counter[int] = Counter()

    @property
    def round(self) -> int:
        """The number of the current one."""
        return len(self.rounds) - 1

    @property
    def now(self) -> Round:
        """The current one."""
        return self.rounds[-1]

    @property
    def is_finished(self) -> bool:
        """Whether all messages are done."""
        return self.end is not None and self.stable >= self.end and not self.rewinding

    def took(self, offsets: tuple[int, ...]) -> int:
        """These are in the sink; how many were not known to be."""
        fresh = {offset for offset in offsets if offset > self.now.since} - self.now.done
        self.now.done |= fresh
        while (self.stable + 1 in self.now.done or is_hole(self.number, self.stable + 1)) and (
            self.end is None or self.stable < self.end
        ):
            self.stable += 1
        return len(fresh)

    def window(self) -> range:
        """The offsets that may be given out."""
        end = self.stable + self.reach if self.end is None else min(self.end, self.stable + self.reach)
        return range(self.stable + 1, end + 1)

    def is_rightful(self, order: Order) -> bool:
        """Whether no newer token was ever given for the keys of this order."""
        if order.round != self.round or self.rewinding or order.form == "nap":
            return False
        if order.form == "transaction":  # which is of all keys
            return len(self.pieces) == 1 and self.pieces[0].part in order.parts
        for offset in order.offsets:
            key, part = hash_of(self.number, offset), order.part_of(offset)
            if part is not None and not any(x.lo <= key <= x.hi and x.token == part[2] for x in self.pieces):
                return False
        return True

    def run(self, piece: Piece) -> tuple[tuple[int, int, int], ...]:
        """The parts of the owner's keys around a piece."""
        at = last = self.pieces.index(piece)
        while at and self.pieces[at - 1].owner == piece.owner:
            at -= 1
        while last + 1 < len(self.pieces) and self.pieces[last + 1].owner == piece.owner:
            last += 1
        return tuple(each.part for each in self.pieces[at : last + 1])


class Coordinator:
    """All partitions, all tokens, all orders."""

    def __init__(self, partitions: int, members: int, window: int, longest_pause_s: float, random: Random) -> None:
        self.partitions = [Shared(number, window) for number in range(partitions)]
        self.members = members
        #: Within a transaction.
        self.longest_pause_s = longest_pause_s
        self.faults = True
        self.counted: Counter[str] = Counter()
        self.violations: list[str] = []
        self._random = random
        self._token = 0
        self._orders = 0
        self._out: dict[int, Order] = {}
        #: The token that was used last of those that are over.
        self._same: Order | None = None
        #: What was done when ``progress`` was asked for.
        self._known: dict[int, list[tuple[int, list[int]]]] = {}
        for shared in self.partitions:
            self._grant(shared, [(0, MAX_KEY_HASH)])

    # Tokens.

    def token(self) -> int:
        """A new one, larger than all before."""
        self._token += self._random.randint(1, 3)
        return self._token

    def _grant(self, shared: Shared, ranges: list[tuple[int, int]], owner: int | None = None) -> None:
        """All keys again, with one token."""
        token = self.token()
        self._over(shared, shared.pieces)
        shared.pieces = [
            Piece(lo, hi, token, self._random.randrange(self.members) if owner is None else owner) for lo, hi in ranges
        ]

    def _over(self, shared: Shared, pieces: list[Piece]) -> None:
        for each in pieces:
            for parts in {(each.part,), shared.run(each)}:
                shared.old.append(Order(0, "nap", shared.number, shared.round, parts, stable=shared.stable))

    def rebalance(self, owner: int | None = None) -> None:
        """Cut a partition's keys in another way; owner: of all keys that change hands."""
        shared = self._random.choice(self.partitions)
        if shared.rewinding or not shared.pieces:
            return
        how = self._random.choice(("whole", "cut", "split", "split", "merge", "move", "move", "move", "shift"))
        at = self._random.randrange(len(shared.pieces))
        piece = shared.pieces[at]
        new = owner if owner is not None else self._random.randrange(self.members)
        before, after = shared.pieces[:at], shared.pieces[at + 1 :]
        if how == "whole":
            self._grant(shared, [(0, MAX_KEY_HASH)], owner)
        elif how == "cut":
            cuts = sorted({self._cut(shared, 0, MAX_KEY_HASH) for _ in range(self._random.randint(1, 4))})
            los, his = [0, *(cut + 1 for cut in cuts)], [*cuts, MAX_KEY_HASH]
            self._grant(shared, list(zip(los, his, strict=True)), owner)
        elif how == "split":
            cut = self._cut(shared, piece.lo, piece.hi)
            if piece.lo <= cut < piece.hi:
                kept, given = replace(piece, hi=cut), Piece(cut + 1, piece.hi, self.token(), new)
                if self._random.random() < 0.5:
                    kept, given = Piece(piece.lo, cut, given.token, new), replace(piece, lo=cut + 1)
                self._over(shared, [piece])
                shared.pieces = [*before, kept, given, *after]
        elif how == "move":
            self._over(shared, [piece])
            shared.pieces = [*before, Piece(piece.lo, piece.hi, self.token(), new), *after]
        elif after:
            other = after.pop(0)
            self._over(shared, [piece, other])
            if how == "merge":
                shared.pieces = [*before, Piece(piece.lo, other.hi, self.token(), new), *after]
            else:  # a part of one goes to the owner of the other, which then has two pieces
                cut = self._cut(shared, piece.lo, piece.hi)
                if piece.lo <= cut < piece.hi:
                    middle = Piece(cut + 1, piece.hi, self.token(), other.owner)
                    shared.pieces = [*before, replace(piece, hi=cut), middle, other, *after]
                else:
                    shared.pieces = [*before, piece, other, *after]
        self.counted["rebalances"] += 1

    def _cut(self, shared: Shared, lo: int, hi: int) -> int:
        """The last hash of the left part; mostly at the hash of a key, or one before it."""
        inside = [key for key in (hash_of(shared.number, at) for at in shared.window()) if lo <= key <= hi]
        if not inside or self._random.random() < 0.1:
            return self._random.randint(lo, max(lo, hi - 1))
        return min(max(lo, self._random.choice(inside) - self._random.randint(0, 1)), MAX_KEY_HASH - 1)

    # Rewinds.

    def begin_rewind(self) -> tuple[Shared, int, int] | None:
        """The group is repositioned: (partition, last offset that stays done, token of the reposition)."""
        shared = self._random.choice(self.partitions)
        if shared.rewinding or shared.stable < 0:
            return None
        self._over(shared, shared.pieces)
        shared.pieces, shared.rewinding = [], True
        return shared, max(-1, shared.stable - self._random.randint(0, shared.reach)), self.token()

    def rewound(self, shared: Shared, position: int, token: int) -> None:
        """The sink has it: work begins again after the position."""
        shared.rounds.append(Round(position))
        shared.repositions.append(token)
        shared.stable, shared.rewinding = position, False
        shared.took(())
        shared.out.clear()
        self._grant(shared, [(0, MAX_KEY_HASH)])
        self.counted["rewinds"] += 1

    # Orders.

    def order(self, member: int) -> Order:
        """The next one for a thread of a member."""
        self._orders += 1
        made = replace(self._drawn(member), number=self._orders)
        self._out[made.number] = made
        if made.form not in ("nap", "progress") and made.round == self.partitions[made.partition].round:
            self.partitions[made.partition].out.update(made.offsets)
        return made

    def _drawn(self, member: int) -> Order:
        draw = self._random.random()
        if self.faults and draw < 0.25 and (late := [x for shared in self.partitions for x in shared.old]):
            # The same one several times: its first transaction may do the harm, and a later one show it.
            if self._random.random() < 0.3 or self._same not in late:
                self._same = self._random.choice(late)
            return self._late(self._same)
        if draw < 0.27:
            self._known[self._orders] = [
                (x.round, [at for at in x.window() if at in x.now.done]) for x in self.partitions
            ]
            return Order(0, "progress")
        mine = [(shared, piece) for shared in self.partitions for piece in shared.pieces if piece.owner == member]
        self._random.shuffle(mine)
        for shared, piece in mine:
            parts = shared.run(piece) if self._random.random() < 0.5 else (piece.part,)
            if offsets := self._offsets(shared, parts[0][0], parts[-1][1]):
                return self._work(shared, parts, offsets)
        return Order(0, "nap", pause_s=0.005)

    def _offsets(self, shared: Shared, lo: int, hi: int) -> list[int]:
        """Some messages with these keys that are not done; now and then some that are, or that another writer has."""
        again = self._random.random()
        found = [
            offset
            for offset in shared.window()
            if not is_hole(shared.number, offset)
            and lo <= hash_of(shared.number, offset) <= hi
            and (offset not in shared.now.done or (self.faults and again < 0.1))
            and (shared.out[offset] == 0 or again < 0.3)
        ]
        most = self._random.choice((1, 3, shared.reach // 30, shared.reach // 5))
        if self._random.random() < 0.5:
            return found[:most]
        return self._random.sample(found, min(most, len(found)))

    def _work(self, shared: Shared, parts: tuple[tuple[int, int, int], ...], offsets: list[int]) -> Order:
        made = Order(
            0,
            "record" if len(offsets) < 4 and self._random.random() < 0.5 else "records",
            shared.number,
            shared.round,
            parts,
            tuple(offsets),
            stable=shared.stable if self._random.random() < 0.5 else -1,
        )
        following = [at for at in shared.window() if not is_hole(shared.number, at)][: len(offsets)]
        if made.is_whole and self._random.random() < 0.15:
            made = replace(made, form="transaction", offsets=tuple(following))
        return self._troubled(made)

    def _late(self, old: Order) -> Order:
        """With a token that is over, on messages of its keys that are done or not."""
        shared = self.partitions[old.partition]
        found = [
            offset
            for offset in range(max(0, old.stable - 20), old.stable + shared.reach)
            if not is_hole(old.partition, offset)
            and old.part_of(offset) is not None
            and (shared.end is None or offset <= shared.end)
        ]
        if not found:
            return Order(0, "nap")
        offsets = tuple(self._random.sample(found, min(len(found), self._random.choice((1, 3, 20)))))
        form = self._random.choice(("record", "records")) if len(offsets) < 4 else "records"
        self.counted["late orders"] += 1
        return self._troubled(replace(old, form=form, offsets=offsets))  # type: ignore[arg-type]

    def _troubled(self, order: Order) -> Order:
        if not self.faults:
            return order
        draw, sums = self._random.random(), self._random.random()
        return replace(
            order,
            fault="die" if draw < 0.004 else "raise" if draw < 0.03 else "all" if draw < 0.07 else "",
            pause_s=self._random.random() * self.longest_pause_s if self._random.random() < 0.15 else 0.0,
            sums="up" if sums < 0.15 else "mixed" if sums < 0.25 else "",
            by_new_sink=self._random.random() < 0.03,
        )

    # Results.

    def ended(self, result: Result) -> None:
        """Judge how an order ended, by what its writer could not know."""
        order = self._out.pop(result.number)
        shared = self.partitions[order.partition]
        self._back(order)
        self.counted[f"{order.form}: {result.outcome}"] += 1
        self.counted["retries"] += result.retries
        rightful = shared.is_rightful(order)
        if order.form == "progress":
            self._compare(order, result)
        elif order.round == shared.round and not shared.rewinding:
            self.counted["records"] += shared.took(result.done)
        else:  # before the rewind: the account looks for these rows, too
            at = shared.rounds[order.round]
            at.done.update(offset for offset in result.done if offset > at.since)
        if result.outcome == "failed":
            self._break(f"an error that may not be: {result.text}", order)
        elif result.outcome == "stale" and rightful:
            self._break(f"the rightful owner is refused: {result.text}", order)
        elif result.outcome == "refused" and not (order.fault == "all" or order.form == "transaction"):
            self._break(f"refused: {result.text}", order)

    def lost(self, number: int) -> None:
        """Its writer was killed."""
        self._back(self._out.pop(number))

    def _back(self, order: Order) -> None:
        shared = self.partitions[order.partition]
        if order.form not in ("nap", "progress") and order.round == shared.round:
            shared.out.subtract(order.offsets)

    def _compare(self, order: Order, result: Result) -> None:
        """What ``progress`` shows has all that was done before it was asked for, and is in order."""
        known = self._known.pop(order.number)
        for number, last, intervals in result.progress:
            shared = self.partitions[number]
            round_, done = known[number]
            missing = [x for x in done if x > last and not any(first <= x <= end for first, end in intervals)]
            if missing and round_ == shared.round and not shared.rewinding:
                self._break(f"progress of partition {number} has no {missing[:5]}: {last}, {intervals}", order)
            ends = [last, *(place for interval in intervals for place in interval)]
            if ends != sorted(ends):
                self._break(f"progress of partition {number}: {last}, {intervals}", order)

    def _break(self, what: str, order: Order) -> None:
        self.violations.append(f"{what[:600]} | {str(order)[:600]}")

    # The end.

    def drain(self) -> None:
        """No more faults; what was given out is to be finished."""
        self.faults = False
        for shared in self.partitions:
            if shared.end is None:
                shared.end = max([shared.stable, *shared.now.done, *shared.out])

    @property
    def is_finished(self) -> bool:
        """Whether all is done."""
        return all(shared.is_finished for shared in self.partitions)

    def unfinished(self) -> Iterator[str]:
        """For people."""
        for shared in self.partitions:
            if not shared.is_finished:
                yield f"partition {shared.number}: {shared.stable} of {shared.end}, {shared.pieces}"
