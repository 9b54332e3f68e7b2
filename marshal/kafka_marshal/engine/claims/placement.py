"""Asks the policy at the right moments, and shows it the world as a view.

A policy is asked when something changed that it may care about, and when a lease is about to open, a wish wants to be
renewed, or a free partition has lain idle for HI. In between nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Protocol

from kafka_marshal.engine.claims.peers import Peers
from kafka_marshal.engine.effects import Key
from kafka_marshal.engine.plane import Work
from kafka_marshal.engine.policies import (
    IDLE_TURN,
    LEFT_OVER_TURN,
    MAX_CYCLES,
    Cycle,
    Partitions,
    PartitionView,
    View,
    Wishes,
    standing,
)
from kafka_marshal.engine.settings import ConsumerSettings, EngineSettings

__all__ = ["Placement"]

#: Claims a member that wants many sends before it has seen an answer, and of how many answers each lets one more be
#: under way: who is alone has 5,000 within 20 round trips, who is not sees the others before it has too many.
FIRST_CLAIMS = 16
ANSWERS_PER_CLAIM = 4

#: HI for which what was taken up idle is kept: who came second with it is seen waiting for two of them.
TAKEN_UP_INTERVALS = 3

_NONE: frozenset[Key] = frozenset()


class Claimer(Protocol):
    """Who claims what an older instance of this client holds."""

    def is_taken(self, key: Key) -> bool: ...

    def claim(self, key: Key, now: float, *, take_over: bool = False) -> None: ...


class Placement:
    """When to ask the policy of one consumer, and what to show it.

    What it is shown is kept, and only what changed is looked at again: the log tells of every change but one, a holder
    that falls silent. When the first could be silent for too long, everything is looked at.
    """

    def __init__(
        self, work: Work, claimer: Claimer, peers: Peers, settings: EngineSettings, wanted: ConsumerSettings
    ) -> None:
        self._work = work
        self._claimer = claimer
        self._peers = peers
        self._settings = settings
        self._wanted = wanted
        #: Anything may have changed since the policy was last asked.
        self.dirty = True
        #: When it must be asked again though nothing changes.
        self.deadline = 0.0
        #: By topic, which held lease we asked for last.
        self._asked: dict[str, Key] = {}
        #: Claims sent since we last wanted none: answered ones let more go out (see _wave).
        self._claimed = 0
        self._let_go: dict[Key, float] = {}
        #: What we claimed since it lay idle, and until when it is kept.
        self._taken_up: dict[Key, float] = {}
        self._cycles: dict[Key, tuple[Cycle, ...]] = {}
        #: At the start of the present cycle: (epoch, time, done, log end).
        self._meters: dict[Key, tuple[int, float, int, int]] = {}
        self._shown = Partitions({})
        self._subscribed: frozenset[Key] = frozenset()
        self._by_cp: dict[int, list[Key]] = {}
        self._order: dict[Key, int] = {}
        self._closed: dict[int, float] = {}
        #: What is to be looked at again, and whether the policy wants to hear of it.
        self._touched: dict[Key, None] = {}
        self._ask_policy = False
        #: When all has to be looked at again: silent holders, idle partitions.
        self._look_at = 0.0

    def changed(self, key: Key) -> None:
        """Something changed about one partition (or about who waits for it)."""
        self._touched[key] = None
        self._ask_policy = True

    def log_time_moved(self, cp: int, now: float) -> None:
        """Somebody wants it known how late it is in a CP: leases there may have gone stale, or pauses ended (T3)."""
        for key in self._peers.opening(self._by_cp.get(cp, ()), cp, now, self._look_at):
            self.changed(key)
        self._ask_policy = self._ask_policy or cp in self._closed

    def touched(self, key: Key) -> None:
        """We did something about a partition on the policy's behalf: no reason to ask it again."""
        self._touched[key] = None

    def leave_alone(self, key: Key, now: float, intervals: int = 2) -> None:
        """We released this one: leave it to others, who take what is idle after an HI, unless none does by then."""
        self._let_go[key] = now + intervals * self._settings.heartbeat_interval_ms

    def measure(self, key: Key, epoch: int, done: int, log_end: int, now: float) -> None:
        """Close a cycle of a partition of ours where one HI has gone by (ReleaseIfBehind)."""
        of, since, old_done, old_end = self._meters.get(key, (-1, 0.0, 0, 0))
        if of != epoch:
            self._meters[key] = (epoch, now, done, log_end)
            return
        seconds = (now - since) / 1000
        if seconds * 1000 < self._settings.heartbeat_interval_ms:
            return
        self._meters[key] = (epoch, now, done, log_end)
        cycle = Cycle(max(0, log_end - done - 1), (done - old_done) / seconds, (log_end - old_end) / seconds)
        before = self._cycles.get(key, ())
        cycles = (*before, cycle)[-MAX_CYCLES:]
        if cycles != before:  # where nothing comes and nothing is done, there is nothing new to ask the policy about
            self._cycles[key] = cycles
            self.changed(key)

    def wishes(self, now: float) -> Wishes | None:
        """What the policy wants done now; None: nothing changed, or the group is paused."""
        if not (self.dirty or self._ask_policy) and now < self.deadline:
            return None
        under_way = sum(x.is_claiming for x in self._work.parts.values())
        if 2 * under_way > self._limit_of_claims(under_way) and now < self.deadline:
            return None  # the answers will be many at once: one look at them all, and then a wave of claims, not a drip
        self._look(now)
        if self._inherit(now):
            self._look(now)
        self.deadline = min((self._look_at, *self._closed.values(), *self._let_go.values(), *self._taken_up.values()))
        if not self._shown:
            return None
        parts = self._work.parts
        own = [(key, x) for key, x in parts.items() if x.is_kept]
        keys = tuple(sorted(key for key, _ in own if key in self._shown))
        waiting = self._peers.waiting(self._work.subscription.topics, now)
        view = View(
            client_id=self._settings.client_id,
            heartbeat_interval_ms=self._settings.heartbeat_interval_ms,
            partitions=self._shown.snapshot(),
            asking=waiting.pop(self._settings.client_id, None) is not None,
            waiting=waiting,
            asked_for=self._peers.asked_for(now),
            left_alone=frozenset(self._let_go),
            taken_up=frozenset(self._taken_up),
            pending=frozenset(key for key, x in own if x.is_claiming),
            letting_go=frozenset(parts).difference(keys) if len(keys) < len(parts) else _NONE,
            order=self._order,
        )
        wishes = self._answer(view, keys, now)
        if wishes is not None and self._work.owes:
            wishes = replace(wishes, claim=(), ask=(), idle=_NONE)  # C18
        return None if wishes is None else self._limit(wishes, now)

    def _answer(self, view: View, own: tuple[Key, ...], now: float) -> Wishes | None:
        """What the policy wishes of what it was shown; None: it raised, and is asked again after HI, or a change."""
        try:
            wishes = self._wanted.policy.wishes(view, own, now)
            if not isinstance(wishes, Wishes):
                raise TypeError(f"wishes() must return Wishes, not {type(wishes).__name__}")
            is_shown = self._shown.__contains__
            return Wishes(
                claim=tuple(filter(is_shown, wishes.claim)),
                release=tuple(filter(is_shown, wishes.release)),
                ask=tuple(filter(is_shown, wishes.ask)),
                surplus=frozenset(wishes.surplus),
                idle=frozenset(wishes.idle),
            )
        except BaseException as error:  # noqa: BLE001 - a policy is the user's; this thread keeps the leases
            self._wanted.policy_raised(error)
            self.deadline = min(self.deadline, now + self._settings.heartbeat_interval_ms)
            return None

    def _limit(self, wishes: Wishes, now: float) -> Wishes:
        """Leave to others what they are to have; ask for one held lease of a topic every HI, and of whoever is new."""
        claim = self._wave(tuple(key for key in wishes.claim if key not in self._let_go))
        for key in wishes.idle.intersection(claim):
            self._taken_up[key] = now + TAKEN_UP_INTERVALS * self._settings.heartbeat_interval_ms
        asks, hi = list[Key](), self._settings.heartbeat_interval_ms
        for key in wishes.ask:
            if key in self._work.parts or key in self._let_go:
                continue
            under_way = self._work.parts.get(self._asked.get(key[0], key))
            if under_way is not None and under_way.is_claiming:
                continue
            wished_at = self._peers.wished_at(key[0])
            if now >= wished_at + hi or self._peers.may_not_know(key, wished_at):
                self._asked[key[0]] = key
                asks.append(key)
            else:
                self.deadline = min(self.deadline, wished_at + hi)
        return replace(wishes, claim=(*claim, *asks), ask=())

    def _wave(self, wanted: tuple[Key, ...]) -> tuple[Key, ...]:
        """As many of these claims as may go out now: a few at first, then waves of ever more as the log answers.

        So members that start together see each other before each of them has claimed everything.
        """
        under_way = sum(x.is_claiming for x in self._work.parts.values())
        if not wanted:
            self._claimed = under_way
            return ()
        room = max(0, self._limit_of_claims(under_way) - under_way)
        wave = wanted if len(wanted) <= room else self._together(wanted)[:room]
        self._claimed += len(wave)
        self._ask_policy = self._ask_policy or len(wave) < len(wanted)
        return wave

    def _together(self, wanted: tuple[Key, ...]) -> tuple[Key, ...]:
        """Those of one CP next to each other: so a wave is one request or two, and one fetch of each replica."""
        by_cp: dict[int, list[Key]] = {}
        for key in wanted:
            by_cp.setdefault(self._peers.cp_of(key), []).append(key)
        return tuple(chain.from_iterable(by_cp.values()))

    def _limit_of_claims(self, under_way: int) -> int:
        return FIRST_CLAIMS + max(0, self._claimed - under_way) // ANSWERS_PER_CLAIM

    def _inherit(self, now: float) -> bool:
        """While starting: take over what an older instance of this client holds (C7)."""
        inherited = self._peers.inherited
        keys = [key for key in inherited if key in self._shown and not self._claimer.is_taken(key)]
        for key in keys:
            epoch = inherited.pop(key)
            lease = self._peers.lease(key)
            if lease is not None and lease.held and lease.epoch == epoch and self._peers.opens_at(key, now) > now:
                self._claimer.claim(key, now, take_over=True)
        return bool(keys)

    def _look(self, now: float) -> None:
        """Bring up to date what is shown, and when to look again."""
        self._let_go = {key: until for key, until in self._let_go.items() if until > now}
        self._taken_up = {key: until for key, until in self._taken_up.items() if until > now}
        closed = self._peers.closed_cps(now)
        partitions: Iterable[Key] = self._touched
        if self.dirty or now >= self._look_at or closed.keys() != self._closed.keys():
            partitions = self._work.subscription.partitions
            if self.dirty:
                self._subscribed = frozenset(partitions)
                self._by_cp = {}
                for key in partitions:
                    self._by_cp.setdefault(self._peers.cp_of(key), []).append(key)
                self._order = {key: standing(key, cp) for cp, keys in self._by_cp.items() for key in keys}
            self._shown = Partitions({})
            self._look_at = inf
        self.dirty = self._ask_policy = False
        self._closed = closed
        alike: dict[object, PartitionView] = {}  # one view for all that somebody holds, or let go of at one moment
        for key in partitions:
            shown = self._view(key, now, alike)
            if shown is None:
                self._shown.take_out(key)
            else:
                self._shown.show(key, shown)
        self._touched = {}

    def _view(self, key: Key, now: float, alike: dict[object, PartitionView]) -> PartitionView | None:
        """A partition of the subscription, where it can be worked on now."""
        peers, part = self._peers, self._work.parts.get(key)
        if (
            key not in self._subscribed
            or key in self._work.blocked
            or (self._closed and peers.cp_of(key) in self._closed)
        ):
            return None
        holder: str | None = self._settings.client_id
        if part is not None and not part.over:
            if cycles := self._cycles.get(key):
                return PartitionView(holder=holder, cycles=cycles)
        else:
            self._cycles.pop(key, None)
            opens_at, holder = peers.look(key, now, self._look_at)
            if opens_at > now:
                self._look_at = min(self._look_at, opens_at)
            elif part is None:
                return self._idle(key, now, alike)
            else:  # released by us, and not yet shown in the log
                holder = self._settings.client_id
        view = alike.get(holder)
        if view is None:
            view = alike[holder] = PartitionView(holder=holder)
        return view

    def _idle(self, key: Key, now: float, alike: dict[object, PartitionView]) -> PartitionView:
        """A partition that can be claimed."""
        hi = self._settings.heartbeat_interval_ms
        since = self._peers.free_since(key, now)
        view = alike.get(since)
        if view is None:
            view = alike[since] = PartitionView(holder=None, free_since=since)
            for share in (LEFT_OVER_TURN, 1, 1 + IDLE_TURN):
                if (due := since + share * hi + 1) > now:
                    self._look_at = min(self._look_at, due)
        return view
