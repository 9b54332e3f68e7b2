"""Which member claims which partition: policies are pure functions of (view, own leases, now) to :class:`Wishes`.

A policy sees the subscription's partitions and their holders. It returns which partitions to claim, which to release,
and which held ones to *ask for*: all members see a claim on a held partition, and its holder may release it. Nothing
here talks to Kafka; the engine turns the answer into records, with one claim in flight per partition.

Policies combine with ``&``: ``Balanced() & MaxClaims(4)``. Each one refines the answer of the policies before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import xxhash

from kafka_marshal import arguments
from kafka_marshal.types import Key

#: How many cycles a view keeps: more than any sensible ``ReleaseIfBehind(cycles=…)``.
MAX_CYCLES = 20


@dataclass(frozen=True, slots=True)
class Cycle:
    """How we kept up with one partition during one heartbeat interval."""

    #: Lag at the end of the cycle, in messages.
    lag: int
    #: Messages handled per second.
    speed: float
    #: Messages appended per second.
    growth: float


@dataclass(frozen=True, slots=True)
class PartitionView:
    """One partition of the subscription, as a policy sees it."""

    #: client_id of the holder; None: free, or the holder was silent for long enough that a claim would win.
    holder: str | None
    #: Since when (own clock, ms) it has no holder; None: it has one.
    free_since: float | None = None
    #: How we kept up: one entry per heartbeat interval, oldest first, at most :data:`MAX_CYCLES`; only for own leases.
    cycles: tuple[Cycle, ...] = ()


class Partitions(dict[Key, PartitionView]):
    """The partitions of a view, with totals kept up to date, since there may be thousands of partitions."""

    __slots__ = ("counts", "free")

    def __init__(self, partitions: Mapping[Key, PartitionView]) -> None:
        super().__init__(partitions)
        #: Holder → number of its partitions; holders without any may be listed with 0.
        self.counts: Counter[str] = Counter()
        #: Partitions without a holder; an ordered set.
        self.free: dict[Key, None] = {}
        for key, partition in partitions.items():
            self._count(key, partition)

    def _count(self, key: Key, partition: PartitionView) -> None:
        if partition.holder is None:
            self.free[key] = None
        else:
            self.counts[partition.holder] += 1

    def take_out(self, key: Key) -> None:
        """Remove a partition."""
        old = self.pop(key, None)
        if old is None:
            return
        if old.holder is None:
            del self.free[key]
        else:
            self.counts[old.holder] -= 1

    def show(self, key: Key, partition: PartitionView) -> None:
        """Add or replace a partition."""
        self.take_out(key)
        self[key] = partition
        self._count(key, partition)

    def snapshot(self) -> Partitions:
        """A copy that later changes do not affect."""
        copy = Partitions({})
        copy.update(self)
        dict.update(copy.counts, self.counts)
        copy.free.update(self.free)
        return copy


@dataclass(frozen=True, slots=True)
class View:
    """The subscription as one client sees it: a snapshot, equal for all clients except for records in flight."""

    client_id: str
    heartbeat_interval_ms: int
    #: All partitions of the subscription that can be worked on.
    partitions: Mapping[Key, PartitionView]
    #: Clients that asked for a held partition within the last two heartbeat intervals → the topics they asked for.
    waiting: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: Held partitions that others asked for, most recent last.
    asked_for: tuple[Key, ...] = ()
    #: Own partitions whose claims the log has not answered.
    pending: frozenset[Key] = frozenset()
    #: Whether others see us among the waiting clients.
    asking: bool = False
    #: Partitions that we recently released, and not as surplus: they are neither claimed nor asked for now.
    left_alone: frozenset[Key] = frozenset()
    #: Partitions that we recently claimed because they were idle: no other member took them, so they are kept now.
    taken_up: frozenset[Key] = frozenset()
    #: Other own partitions, which count all the same: those being released, until messages in flight are done and the
    #: log shows the release; and those in a part of the log where the group is paused now.
    letting_go: frozenset[Key] = frozenset()
    #: Partition → its place in an order that is the same for all members (:func:`standing`); empty: by hash.
    order: Mapping[Key, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a policy wants, in order of preference."""

    claim: tuple[Key, ...] = ()
    release: tuple[Key, ...] = ()
    #: Held by others: we claim one per topic and heartbeat interval, at once if the holder is new, to be seen waiting.
    ask: tuple[Key, ...] = ()
    #: Those of ``release`` that merely exceed our share: we may claim them again at once. We leave the others alone for
    #: two heartbeat intervals.
    surplus: frozenset[Key] = frozenset()
    #: Those of ``claim`` that were idle. A member whose claim comes second counts as waiting for two heartbeat
    #: intervals, although it lacks nothing. So these stay in ``View.taken_up`` for three.
    idle: frozenset[Key] = frozenset()


class Policy:
    """Base of all policies. Write your own by overriding :meth:`wishes`."""

    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        """What we want. own: our leases, sorted, without those being released; now: own clock, ms."""
        return self.refine(Wishes(), view, own, now)

    def refine(self, wishes: Wishes, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        """Change the answer of the policies before this one (for ``&``). By default: replace it."""
        return self.wishes(view, own, now)

    def narrow(self, view: View, own: tuple[Key, ...]) -> tuple[View, tuple[Key, ...]]:
        """What the policies before this one see (for ``&``). By default: everything."""
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
    """Rendezvous hash: new members claim different partitions first, so that few claims collide."""
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


#: An idle partition is reserved for one member for this share of HI; then any member may claim it.
IDLE_TURN = 0.5

#: A partition that was free for this share of HI, since the member it was dealt to did not claim it, goes to any member
#: below its share. Less than HI: members that have their share claim later, and would only release it again.
LEFT_OVER_TURN = 0.75


_HASH_BITS = 64


@lru_cache(maxsize=1 << 16)
def _hash(key: Key) -> int:
    return xxhash.xxh64_intdigest(f"{key[0]}\0{key[1]}".encode())


def standing(key: Key, cp: int) -> int:
    """The place of a partition in the order in which all members deal out free ones: by CP (int), then by hash.

    So the leases of a member lie in few CPs: its claims and releases are few requests, its heartbeats few records.
    """
    return cp << _HASH_BITS | _hash(key)


def _order(view: View) -> Callable[[Key], int]:
    return view.order.__getitem__ if view.order else _hash


@dataclass(frozen=True, slots=True)
class Balanced(Policy):
    """Each member ends with ⌊P/n⌋ or ⌈P/n⌉ of the P partitions, and as few as possible move.

    The n members are the holders, the clients that asked recently, and this one. The largest holders keep the larger
    shares.

    Free partitions are dealt out in an order that is the same for all members: the first ones to the first member below
    its share, and so on; members that asked come first. All members compute the same result. So each claims its own
    part at once, no two claims collide, and a claim does not change the parts of others.

    A member below its share asks for held partitions if too few are free: one visible claim per topic and heartbeat
    interval, no more than it lacks, and at once to a holder that came since. Holders above their share then release as
    many as are missing, the largest first, at once, from the topics that were asked for. No partition is released for
    a claim that the log has not answered, since the claim may be refused.

    A partition that stays free is idle: a member that counts cannot take it (a limit, another subscription, dead).
    Members below their share claim it after three quarters of a heartbeat interval. Of the members that have their
    share, one claims it after a whole interval, and any after half an interval more. Members with other topics see
    other shares, so two may claim it, and the second then seems to wait for it. The first keeps it anyway: the second
    wants nothing, so a released partition would be idle again, for ever.
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
        """Our part of the free ones, rotated differently per member, since members may not know each other yet."""
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
        """Partitions dealt to members that did not claim them: with another subscription they cannot."""
        until = now - LEFT_OVER_TURN * view.heartbeat_interval_ms
        lies = {key for key in free if (since := view.partitions[key].free_since) is not None and since < until}
        rest = sorted(lies.difference(dealt, view.left_alone), key=_order(view))
        begin = _hash((view.client_id, -1)) * len(rest) >> _HASH_BITS
        return tuple(rest[begin:] + rest[:begin])

    @staticmethod
    def _idle(
        view: View, free: list[Key], counts: Mapping[str, int], shares: Mapping[str, int], now: float
    ) -> tuple[Key, ...]:
        """The idle ones of the free partitions that we may claim now."""
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
        """One held partition per topic: that of its largest holder above its share, if there is one."""
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
        """Our part of what waiting members lack: every holder above its share computes the same."""
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
        # From the CPs in which we hold least first, so that the rest lies in few CPs.
        order = _order(view)
        crowds = Counter(order(key) >> _HASH_BITS for key in own)
        rest = sorted(others, key=lambda key: (crowds[order(key) >> _HASH_BITS], order(key)))
        return tuple((asked + rest)[:quota])


@dataclass(frozen=True, slots=True)
class MaxClaims(Policy):
    """Hold at most this many partitions; beyond it the last ones are released. Alone, it is Greedy up to the limit.

    A partition that is being released counts until the log shows its release: no other is claimed before that.
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
            return replace(wishes, claim=claim, ask=wishes.ask[: room - len(claim)])  # what we ask for may be granted
        return Wishes(release=wishes.release + tuple(kept[self.limit :]), surplus=wishes.surplus)


@dataclass(frozen=True, slots=True)
class WholeTopic(Policy):
    """Claim topics as a whole: the holder of partition 0 claims the rest, and others release theirs.

    ``Balanced() & WholeTopic()`` shares topics out evenly, however many partitions they have. All members of a group
    must use it, and none may have a limit (MaxClaims) below a topic's size: otherwise the rest of a topic may be idle.
    """

    def wishes(self, view: View, own: tuple[Key, ...], now: float) -> Wishes:
        return self.refine(Greedy().wishes(*self.narrow(view, own), now), view, own, now)

    def narrow(self, view: View, own: tuple[Key, ...]) -> tuple[View, tuple[Key, ...]]:
        """Only partitions 0: a decision about one applies to its topic."""
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
    """Release partitions that we cannot keep up with.

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
