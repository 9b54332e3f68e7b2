"""Who claims what: policies are pure functions of (view, own leases, now) to wishes.

A policy sees the subscription's partitions and who holds them, and answers which it would like to claim, which to
let go, and which held one to *ask for*: a claim on a held partition is a visible wish (C4), on which the holder
may act. Nothing here talks to Kafka; the engine turns wishes into records, one claim under way per partition.

Policies combine with ``&``: ``Balanced() & MaxClaims(4)``. Each one refines the wishes of those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import xxhash

from kafka_marshal import arguments
from kafka_marshal.types import Key

__all__ = [
    "MAX_CYCLES",
    "Balanced",
    "Cycle",
    "Greedy",
    "MaxClaims",
    "PartitionView",
    "Partitions",
    "Policy",
    "ReleaseIfBehind",
    "View",
    "WholeTopic",
    "Wishes",
]


#: How many cycles a view remembers: more than any sensible ``ReleaseIfBehind(cycles=…)``.
MAX_CYCLES = 20


@dataclass(frozen=True, slots=True)
class Cycle:
    """How we kept up with one partition during one HI."""

    #: Log end minus what is done, in messages.
    lag: int
    #: Messages a second that we handled.
    speed: float
    #: Messages a second that were appended.
    growth: float


@dataclass(frozen=True, slots=True)
class PartitionView:
    """One partition of the subscription, as far as a policy cares."""

    #: client_id of the holder; None: free, or silent for so long that a claim would win (C3).
    holder: str | None
    #: Our own clock's time (ms) since when nobody holds it; None while somebody does.
    free_since: float | None = None
    #: How we kept up, oldest first, one entry every HI, at most :data:`MAX_CYCLES`. Only for own leases.
    cycles: tuple[Cycle, ...] = ()


class Partitions(dict[Key, PartitionView]):
    """The partitions of a view, with what would take a look at each of them to know: there may be thousands."""

    __slots__ = ("counts", "free")

    def __init__(self, partitions: Mapping[Key, PartitionView]) -> None:
        super().__init__(partitions)
        #: How many partitions each holder has; holders without any may be listed with 0.
        self.counts: Counter[str] = Counter()
        #: Partitions that nobody holds.
        self.free: dict[Key, None] = {}
        for key, partition in partitions.items():
            self._count(key, partition)

    def _count(self, key: Key, partition: PartitionView) -> None:
        if partition.holder is None:
            self.free[key] = None
        else:
            self.counts[partition.holder] += 1

    def take_out(self, key: Key) -> None:
        """Show a partition no more."""
        old = self.pop(key, None)
        if old is None:
            return
        if old.holder is None:
            del self.free[key]
        else:
            self.counts[old.holder] -= 1

    def show(self, key: Key, partition: PartitionView) -> None:
        """Show a partition, or show it anew."""
        self.take_out(key)
        self[key] = partition
        self._count(key, partition)

    def snapshot(self) -> Partitions:
        """A copy that stays as it is."""
        copy = Partitions({})
        copy.update(self)
        dict.update(copy.counts, self.counts)
        copy.free.update(self.free)
        return copy


@dataclass(frozen=True, slots=True)
class View:
    """The subscription as one client sees it: a snapshot, equal for all clients up to what is under way."""

    client_id: str
    heartbeat_interval_ms: int
    #: All partitions of the subscription that can be worked on.
    partitions: Mapping[Key, PartitionView]
    #: Clients that asked for a held partition within the last 2 · HI (C4), with the topics they asked for.
    waiting: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: Held partitions that were asked for, most recent last.
    asked_for: tuple[Key, ...] = ()
    #: Own ones that were claimed, and the log has not answered.
    pending: frozenset[Key] = frozenset()
    #: Whether others see us among those that wait.
    asking: bool = False
    #: What our policy let go lately, and not as surplus: it is neither claimed nor asked for now.
    left_alone: frozenset[Key] = frozenset()
    #: What we took lately because it lay idle: nobody else was to have it, so it is not let go now.
    taken_up: frozenset[Key] = frozenset()
    #: Other own ones, which count all the same: being let go, held until what is in hand is done and the log shows the
    #: release; or in a part of the log where the group is paused now (C10).
    letting_go: frozenset[Key] = frozenset()
    #: Where each partition stands in an order that is the same for all members (:func:`standing`); empty: by its hash.
    order: Mapping[Key, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a policy would like. Order is preference."""

    claim: tuple[Key, ...] = ()
    release: tuple[Key, ...] = ()
    #: Held by others; claimed to be seen waiting: one of each topic, and again after HI or of a holder that came since.
    ask: tuple[Key, ...] = ()
    #: What of release is merely more than our share: we may claim it again at once should we come to lack some. The
    #: rest we leave alone for 2 · HI.
    surplus: frozenset[Key] = frozenset()
    #: What of claim lay idle. Who claims it in the same moment, and comes second, is not one who lacks something: for
    #: 3 · HI, an HI longer than it is taken for one who waits, this is in ``View.taken_up``.
    idle: frozenset[Key] = frozenset()


class Policy:
    """Base of all policies. Write your own by overriding :meth:`wishes`."""

    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        """What we would like, given the view, our own leases (sorted, without those being released), and now (ms)."""
        return self.refine(Wishes(), view, own, now)

    def refine(self, wishes: Wishes, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        """Change the wishes of the policies before this one (for ``&``). By default: replace them."""
        return self.wishes(view, own, now)

    def narrow(self, view: View, own: tuple[Key, ...]) -> tuple[View, tuple[Key, ...]]:
        """What the policies before this one get to see (for ``&``). By default: everything."""
        return view, own

    def __and__(self, other: Policy) -> Policy:
        arguments.an_instance("what stands behind &", other, Policy, "a Policy such as MaxClaims(4)")
        return _Both(self, other)


@dataclass(frozen=True, slots=True)
class _Both(Policy):
    first: Policy
    second: Policy

    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        return self.second.refine(self.first.wishes(*self.second.narrow(view, own), now), view, own, now)

    def narrow(self, view: View, own: tuple[Key, ...]) -> tuple[View, tuple[Key, ...]]:
        return self.first.narrow(*self.second.narrow(view, own))

    def refine(self, wishes: Wishes, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        return self.second.refine(self.first.refine(wishes, *self.second.narrow(view, own), now), view, own, now)


def _affinity(client_id: str, key: Key) -> int:
    """Rendezvous hash: newcomers reach for different partitions first, so that few claims collide."""
    return xxhash.xxh64_intdigest(f"{client_id}\0{key[0]}\0{key[1]}".encode())


def _free(view: View) -> list[Key]:
    return sorted(
        (key for key, partition in view.partitions.items() if partition.holder is None),
        key=lambda key: _affinity(view.client_id, key),
    )


@dataclass(frozen=True, slots=True)
class Greedy(Policy):
    """Claim everything that is free or expired; release nothing, ask for nothing."""

    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        mine = set(own)
        return Wishes(claim=tuple(key for key in _free(view) if key not in mine))


#: Idle partitions are first up to one member each, for this share of HI, then up to everybody.
IDLE_TURN = 0.5

#: What is free and has been left by those whom it was dealt to, for this share of HI, is up to whoever lacks some. Less
#: than HI: it comes before those who have their share, who would let it go again for them.
LEFT_OVER_TURN = 0.75


_HASH_BITS = 64


@lru_cache(maxsize=1 << 16)
def _hash(key: Key) -> int:
    return xxhash.xxh64_intdigest(f"{key[0]}\0{key[1]}".encode())


def standing(key: Key, cp: int) -> int:
    """Where a partition stands in the order in which all members deal out what is free: by CP, then by its hash.

    So each member's leases lie in few CPs: its claims and releases are few requests, its beats few records.
    """
    return cp << _HASH_BITS | _hash(key)


def _order(view: View) -> Callable[[Key], int]:
    return view.order.__getitem__ if view.order else _hash


@dataclass(frozen=True, slots=True)
class Balanced(Policy):
    """Everyone ends with ⌊P/n⌋ or ⌈P/n⌉ of the P partitions, and as few as possible move.

    The n members are the holders, those who asked lately, and ourselves. Who holds most now keeps the larger share.

    What is free is dealt out: in an order that is the same for all, the first ones to the first member below its share,
    and so on, those who asked before the others. Everybody works out the same, so that everybody claims its own part
    at once and no two claims collide; what is claimed meanwhile changes nobody else's part.

    One below its share for whom too little is free asks (C4: one visible wish for each topic, no more than it lacks,
    again after a heartbeat interval, and at once of a holder that came since and can't know). The holders above their
    share release as many as are missing, at once, those with most first, of the topics that were asked for. Nothing is
    released for claims that the log has not answered: they may be refused.

    A partition that stayed free lies idle: a member that counts cannot take it (a limit, another subscription, dead).
    It is claimed by those who are below their share, after three quarters of a heartbeat interval; after a whole one
    by one of those who have theirs, after half of one more by any of them. Members that read other topics see other
    shares: two may take it for theirs, and the second looks like one who waits. The first keeps it all the same;
    released for a member that wants nothing it would lie idle again, for ever.
    """

    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        partitions = view.partitions if isinstance(view.partitions, Partitions) else Partitions(view.partitions)
        counts = self._counts(view, own, partitions)
        shares = self._shares(counts, len(partitions))
        mine = set(own)
        free = [key for key in partitions.free if key not in mine]
        missing = shares[view.client_id] - len(own)
        if missing > 0:
            claim = self._dealt(view, free, counts, shares)
            if len(claim) < missing:
                claim += self._left_over(view, free, claim, now)[: missing - len(claim)]
            return Wishes(claim=claim, ask=self._ask(view, counts, shares)[: missing - len(claim)])
        idle = self._idle(view, free, counts, shares, now)
        release = () if idle else self._release(view, own, counts, shares, len(free))
        return Wishes(claim=idle, release=release, surplus=frozenset(release), idle=frozenset(idle))

    @staticmethod
    def _counts(view: View, own: tuple[Key, ...], partitions: Partitions) -> dict[str, int]:
        counts = dict.fromkeys(sorted(view.waiting), 0)
        counts.update(sorted((holder, count) for holder, count in partitions.counts.items() if count > 0))
        counts[view.client_id] = len(own)
        return counts

    @staticmethod
    def _shares(counts: Mapping[str, int], partitions: int) -> dict[str, int]:
        base, larger = divmod(partitions, len(counts))
        order = sorted(counts, key=lambda client: (-counts[client], client))
        return {client: base + (1 if place < larger else 0) for place, client in enumerate(order)}

    @staticmethod
    def _dealt(view: View, free: list[Key], counts: Mapping[str, int], shares: Mapping[str, int]) -> tuple[Key, ...]:
        """Our part of what is free, beginning at a place of our own: not everybody may know of everybody yet."""
        waiting = {*view.waiting, view.client_id} if view.asking else view.waiting
        first = 0
        for client in sorted(counts, key=lambda client: (client not in waiting, client)):
            if client == view.client_id:
                break
            first += max(0, shares[client] - counts[client])
        part = sorted(free, key=_order(view))[first : first + shares[view.client_id] - counts[view.client_id]]
        begin = _hash((view.client_id, -1)) * len(part) >> _HASH_BITS
        return tuple(part[begin:] + part[:begin])

    @staticmethod
    def _left_over(view: View, free: list[Key], dealt: tuple[Key, ...], now: float) -> tuple[Key, ...]:
        """What was dealt to others who did not claim it: of another subscription, they can't."""
        until = now - LEFT_OVER_TURN * view.heartbeat_interval_ms
        lies = {key for key in free if (since := view.partitions[key].free_since) is not None and since < until}
        rest = sorted(lies.difference(dealt, view.left_alone), key=_order(view))
        begin = _hash((view.client_id, -1)) * len(rest) >> _HASH_BITS
        return tuple(rest[begin:] + rest[:begin])

    @staticmethod
    def _idle(
        view: View, free: list[Key], counts: Mapping[str, int], shares: Mapping[str, int], now: float
    ) -> tuple[Key, ...]:
        """What of the free ones lies idle, and is up to us."""
        hi = view.heartbeat_interval_ms
        found: list[Key] = []
        takers = [client for client in sorted(counts) if counts[client] >= shares[client]]
        for key in sorted(free, key=_order(view)):
            since = view.partitions[key].free_since
            if since is None or now - since <= hi:
                continue
            if now - since > (1 + IDLE_TURN) * hi or takers[_hash(key) % len(takers)] == view.client_id:
                found.append(key)
        return tuple(found)

    @staticmethod
    def _ask(view: View, counts: Mapping[str, int], shares: Mapping[str, int]) -> tuple[Key, ...]:
        """A held partition of each topic, of whoever holds most, where that is more than its share."""
        above = {client: count for client, count in counts.items() if count > shares[client]}
        found: dict[str, tuple[int, Key]] = {}
        for key, partition in view.partitions.items() if above else ():
            count = above.get(partition.holder or "", 0)
            if count > found.get(key[0], (0, key))[0] and key not in view.left_alone:
                found[key[0]] = (count, key)
        return tuple(key for _, key in sorted(found.values(), key=lambda entry: (-entry[0], entry[1])))

    @staticmethod
    def _release(
        view: View, own: tuple[Key, ...], counts: Mapping[str, int], shares: Mapping[str, int], free: int
    ) -> tuple[Key, ...]:
        """Our part of what those who asked are missing: every holder above its share works it out alike."""
        wanted = sum(max(0, shares[client] - counts[client]) for client in view.waiting if client in counts) - free
        mine = [key for key in own if key not in view.pending and key not in view.taken_up]
        if wanted <= 0 or len(mine) <= shares[view.client_id]:
            return ()
        topics = frozenset[str]().union(*view.waiting.values())
        able = {partition.holder for key, partition in view.partitions.items() if key[0] in topics}
        left = {client: counts[client] for client in counts if counts[client] > shares[client] and client in able}
        quota = 0
        while wanted > 0 and left:
            giver = min(left, key=lambda client: (-left[client], client))
            left[giver] -= 1
            wanted -= 1
            if giver == view.client_id:
                quota += 1
            if left[giver] <= shares[giver]:
                del left[giver]
        quota = min(quota, len(mine) - shares[view.client_id])
        held, asked_for = set(mine), set(view.asked_for)
        asked = [key for key in view.asked_for if key in held]
        others = [key for key in mine if key[0] in topics and key not in asked_for]
        # Of the CPs in which we hold least: what stays lies together.
        order = _order(view)
        crowds = Counter(order(key) >> _HASH_BITS for key in own)
        rest = sorted(others, key=lambda key: (crowds[order(key) >> _HASH_BITS], order(key)))
        return tuple((asked + rest)[:quota])


@dataclass(frozen=True, slots=True)
class MaxClaims(Policy):
    """At most this many partitions in all; above it the last ones are released. Alone, it is Greedy up to the limit.

    One that is being released counts until the log shows its release: nothing else is claimed in its place before.
    """

    limit: int

    def __post_init__(self) -> None:
        arguments.a_whole("MaxClaims: limit", self.limit, 1)

    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        return self.refine(Greedy().wishes(view, own, now), view, own, now)

    def refine(self, wishes: Wishes, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        kept = [key for key in own if key not in set(wishes.release)]
        if len(kept) <= self.limit:
            room = max(0, self.limit - len(own) - len(view.letting_go))
            claim = tuple(key for key in wishes.claim if key not in view.left_alone)[:room]
            return replace(wishes, claim=claim, ask=wishes.ask[: room - len(claim)])  # what is asked for may be granted
        return Wishes(release=wishes.release + tuple(kept[self.limit :]), surplus=wishes.surplus)


@dataclass(frozen=True, slots=True)
class WholeTopic(Policy):
    """A topic as one piece: partition 0 is its key. Its holder claims the rest; others release what they hold of it.

    ``Balanced() & WholeTopic()`` shares topics out evenly, however many partitions they have. All members of a group
    have to use it, and none may have a limit (MaxClaims) below a topic's size: else the rest of a topic may lie idle.
    """

    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        return self.refine(Greedy().wishes(*self.narrow(view, own), now), view, own, now)

    def narrow(self, view: View, own: tuple[Key, ...]) -> tuple[View, tuple[Key, ...]]:
        """The topics' keys: a decision about one is a decision about its topic."""
        partitions = {key: partition for key, partition in view.partitions.items() if key[1] == 0}
        asked_for = tuple(key for key in view.asked_for if key[1] == 0)
        return replace(view, partitions=partitions, asked_for=asked_for), tuple(key for key in own if key[1] == 0)

    def refine(self, wishes: Wishes, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        letting_go = {topic for topic, partition in wishes.release if partition == 0}
        topics = {topic for topic, partition in own if partition == 0} - letting_go
        mine = set(own)
        keys = [key for key in wishes.claim if key[1] == 0]
        rest = [key for key in _free(view) if key[0] in topics and key[1] != 0 and key not in mine]
        orphans = tuple(key for key in own if key[0] not in topics and key[1] != 0)
        release = tuple(key for key in wishes.release if key[1] == 0) + orphans
        return Wishes(
            claim=tuple(keys + rest),
            release=tuple(dict.fromkeys(release)),
            ask=tuple(key for key in wishes.ask if key[1] == 0),
            surplus=wishes.surplus.union(orphans),
            idle=wishes.idle,
        )


@dataclass(frozen=True, slots=True)
class ReleaseIfBehind(Policy):
    """Give up what we cannot keep up with.

    A partition is unhealthy in a cycle (one heartbeat interval) when more is appended than we handle and the lag
    predicted two cycles ahead is above ``max_lag`` messages. After ``cycles`` unhealthy cycles in a row it is
    released; equal speeds are healthy. Alone, it claims like :class:`Balanced`.
    """

    max_lag: int = 1_000
    cycles: int = 3

    def __post_init__(self) -> None:
        arguments.a_whole("ReleaseIfBehind: max_lag", self.max_lag)
        arguments.a_whole("ReleaseIfBehind: cycles", self.cycles, 1)

    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        return self.refine(Balanced().wishes(view, own, now), view, own, now)

    def refine(self, wishes: Wishes, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        behind = tuple(key for key in own if key in view.partitions and self._is_behind(view.partitions[key], view))
        return replace(wishes, release=tuple(dict.fromkeys(wishes.release + behind))) if behind else wishes

    def _is_behind(self, partition: PartitionView, view: View) -> bool:
        recent = partition.cycles[-self.cycles :]
        two_cycles_s = 2 * view.heartbeat_interval_ms / 1000
        return len(recent) == self.cycles and all(
            cycle.growth > cycle.speed and cycle.lag + (cycle.growth - cycle.speed) * two_cycles_s > self.max_lag
            for cycle in recent
        )
