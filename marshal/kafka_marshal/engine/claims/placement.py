"""Asks the policy at the right moments, and shows it the group as a view.

A policy is asked if something changed that may matter to it, if a lease is about to open, if a request must be
repeated, or if a free partition was idle for HI. Nothing is computed in between. The view is kept, and only changed
partitions are checked again. The log shows every change but one: a holder that falls silent. When the first holder may
have been silent for too long, all partitions are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Protocol

from kafka_marshal.engine.claims.peers import Peers
from kafka_marshal.engine.plane import SURPLUS, UNWANTED, SourcePart, Work
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
from kafka_marshal.types import Key
from rationalizer.intervals import lag


class PolicyView:
    """The partitions of one consumer, as shown to its policy."""

    def __init__(self, work: Work, peers: Peers, settings: EngineSettings) -> None:
        self._work = work
        self._peers = peers
        self._settings = settings
        self._cycles: dict[Key, tuple[Cycle, ...]] = {}
        #: At the start of the current cycle: (epoch, time, done, log end).
        self._meters: dict[Key, tuple[int, float, int, int]] = {}
        self.partitions: Partitions = Partitions({})
        self._subscribed: frozenset[Key] = frozenset()
        self._by_cp: dict[int, list[Key]] = {}
        self.order: dict[Key, int] = {}
        #: CP of which nothing is shown → until when (own clock, ms).
        self.closed: dict[int, float] = {}
        #: Partitions to check again; an ordered set.
        self.touched: dict[Key, None] = {}
        #: When (own clock, ms) to check all partitions again, for silent holders and idle partitions.
        self.look_at: float = 0.0

    def opening(self, cp: int, now: float) -> list[Key]:
        """Leases that may have opened in a CP whose log time is now known (T3)."""
        return list(self._peers.opening(self._by_cp.get(cp, ()), cp, now, self.look_at))

    def measure(self, key: Key, epoch: int, done: int, log_end: int, now: float) -> bool:
        """Close a cycle of our partition if it is one HI old (ReleaseIfBehind). Returns whether the cycles changed."""
        of, since, old_done, old_end = self._meters.get(key, (-1, 0.0, 0, 0))
        if of != epoch:
            self._meters[key] = (epoch, now, done, log_end)
            return False
        seconds = (now - since) / 1000
        if seconds * 1000 < self._settings.heartbeat_interval_ms:
            return False
        self._meters[key] = (epoch, now, done, log_end)
        cycle = Cycle(lag(done + 1, log_end), (done - old_done) / seconds, (log_end - old_end) / seconds)
        before = self._cycles.get(key, ())
        cycles = (*before, cycle)[-MAX_CYCLES:]
        if cycles != before:  # a partition without traffic gives the policy nothing new
            self._cycles[key] = cycles
            return True
        return False

    def look(self, now: float, *, anew: bool) -> None:
        """Update what is shown, and when to check again. ``anew``: the subscription may have changed."""
        closed = self._peers.closed_cps(now)
        partitions: Iterable[Key] = self.touched
        if anew or now >= self.look_at or closed.keys() != self.closed.keys():
            partitions = self._work.subscription.partitions
            if anew:
                self._subscribed = frozenset(partitions)
                self._by_cp = {}
                for key in partitions:
                    self._by_cp.setdefault(self._peers.cp_of(key), []).append(key)
                self.order = {key: standing(key, cp) for cp, keys in self._by_cp.items() for key in keys}
            self.partitions = Partitions({})
            self.look_at = inf
        self.closed = closed
        alike: dict[object, PartitionView] = {}  # by holder, or by time of release: partitions share one view
        for key in partitions:
            shown = self._view(key, now, alike)
            if shown is None:
                self.partitions.take_out(key)
            else:
                self.partitions.show(key, shown)
        self.touched = {}

    def _view(self, key: Key, now: float, alike: dict[object, PartitionView]) -> PartitionView | None:
        """One partition of the subscription; None: it cannot be worked on now."""
        peers, part = self._peers, self._work.parts.get(key)
        if (
            key not in self._subscribed
            or key in self._work.blocked
            or (self.closed and peers.cp_of(key) in self.closed)
        ):
            return None
        holder: str | None = self._settings.client_id
        if part is not None and not part.over:
            if cycles := self._cycles.get(key):
                return PartitionView(holder=holder, cycles=cycles)
        else:
            self._cycles.pop(key, None)
            opens_at, holder = peers.look(key, now, self.look_at)
            if opens_at > now:
                self.look_at = min(self.look_at, opens_at)
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
                    self.look_at = min(self.look_at, due)
        return view


#: Claims in flight before the first answer, and answers for each further claim in flight. So a single member has
#: 5,000 within 20 round trips, and one of several sees the others before it has too many.
FIRST_CLAIMS = 16
ANSWERS_PER_CLAIM = 4

#: HI for which a claimed idle partition is kept: a member whose claim came second counts as waiting for two.
TAKEN_UP_INTERVALS = 3

_NONE: frozenset[Key] = frozenset()


class Claimer(Protocol):
    """Claims what an older instance of this client holds."""

    def is_taken(self, key: Key) -> bool: ...

    def claim(self, key: Key, now: float, *, take_over: bool = False) -> None: ...


class Placement:
    """When to ask the policy of one consumer, and what to do with its answer."""

    def __init__(
        self, work: Work, claimer: Claimer, peers: Peers, settings: EngineSettings, wanted: ConsumerSettings
    ) -> None:
        self._work = work
        self._claimer = claimer
        self._peers = peers
        self._settings = settings
        self._wanted = wanted
        #: Whether anything may have changed since the policy was last asked.
        self.dirty: bool = True
        #: When (own clock, ms) to ask it again although nothing changed.
        self.deadline: float = 0.0
        #: Topic → the held lease that we last asked for.
        self._asked: dict[str, Key] = {}
        #: Claims sent since we last wanted none: answered claims permit more (see ``_wave``).
        self._claimed = 0
        #: Partition that we released → until when (own clock, ms) we leave it to others.
        self._let_go: dict[Key, float] = {}
        #: Partition that we claimed idle → until when (own clock, ms) we keep it.
        self._taken_up: dict[Key, float] = {}
        #: Whether the policy is to be asked about changed partitions.
        self._ask_policy = False
        self._shown = PolicyView(work, peers, settings)

    def changed(self, key: Key) -> None:
        """One partition, or the clients waiting for it, changed."""
        self._shown.touched[key] = None
        self._ask_policy = True

    def log_time_moved(self, cp: int, now: float) -> None:
        """Log time moved in a CP on a member's request (T3): leases may have gone stale there, or pauses ended."""
        for key in self._shown.opening(cp, now):
            self.changed(key)
        self._ask_policy = self._ask_policy or cp in self._shown.closed

    def touched(self, key: Key) -> None:
        """We acted on a partition for the policy: no reason to ask the policy again."""
        self._shown.touched[key] = None

    def leave_alone(self, key: Key, now: float, intervals: int = 2) -> None:
        """Leave a partition that we released to others until then: they claim idle ones after one HI."""
        self._let_go[key] = now + intervals * self._settings.heartbeat_interval_ms

    def measure(self, key: Key, epoch: int, done: int, log_end: int, now: float) -> None:
        """Record how far our partition is, and where its log ends (ReleaseIfBehind)."""
        if self._shown.measure(key, epoch, done, log_end, now):
            self.changed(key)

    def wishes(self, now: float) -> Wishes | None:
        """What the policy wants now; None: nothing to do, for example because nothing changed."""
        if not (self.dirty or self._ask_policy) and now < self.deadline:
            return None
        under_way = sum(x.is_claiming for x in self._work.parts.values())
        if 2 * under_way > self._limit_of_claims(under_way) and now < self.deadline:
            return None  # many answers come together: then check once and send a wave of claims
        self._look(now)
        if self._inherit(now):
            self._look(now)
        self.deadline = min(
            (self._shown.look_at, *self._shown.closed.values(), *self._let_go.values(), *self._taken_up.values())
        )
        if not self._shown.partitions:
            return None
        parts = self._work.parts
        own = [(key, x) for key, x in parts.items() if x.is_kept]
        keys = tuple(sorted(key for key, _ in own if key in self._shown.partitions))
        view = self._view(keys, own, now)
        if kept := self._to_keep(view, keys, now):
            for key in kept:
                self._work.let_go(key, "", now)
                self.changed(key)
            return None
        wishes = self._answer(view, keys, now)
        if wishes is not None and self._work.owes:
            wishes = replace(wishes, claim=(), ask=(), idle=_NONE)  # C18
        return None if wishes is None else self._limit(wishes, now)

    def _view(self, keys: tuple[Key, ...], own: list[tuple[Key, SourcePart]], now: float) -> View:
        parts = self._work.parts
        waiting = self._peers.waiting(self._work.subscription.topics, now)
        return View(
            client_id=self._settings.client_id,
            heartbeat_interval_ms=self._settings.heartbeat_interval_ms,
            partitions=self._shown.partitions.snapshot(),
            asking=waiting.pop(self._settings.client_id, None) is not None,
            waiting=waiting,
            asked_for=self._peers.asked_for(now),
            left_alone=frozenset(self._let_go),
            taken_up=frozenset(self._taken_up),
            pending=frozenset(key for key, x in own if x.is_claiming),
            letting_go=frozenset(parts).difference(keys) if len(keys) < len(parts) else _NONE,
            order=self._shown.order,
        )

    def _to_keep(self, view: View, own: tuple[Key, ...], now: float) -> tuple[Key, ...]:
        """Partitions that wait to be released for the policy, but that it would keep now: others have their share."""
        going = [
            key
            for key, x in self._work.parts.items()
            if x.releasing in (SURPLUS, UNWANTED) and not x.over and key in self._shown.partitions
        ]
        if not going:
            return ()
        self.deadline = min(self.deadline, now + self._settings.heartbeat_interval_ms)
        as_if_kept = replace(view, letting_go=view.letting_go.difference(going))
        wishes = self._answer(as_if_kept, tuple(sorted((*own, *going))), now)
        if wishes is None:
            return ()
        spare = [key for key in sorted(going) if key not in wishes.release]
        return tuple(spare[: max(0, len(going) - len(wishes.release))])

    def _answer(self, view: View, own: tuple[Key, ...], now: float) -> Wishes | None:
        """The policy's answer, for partitions it was shown. None: it raised; it is asked again after HI or a change."""
        try:
            wishes = self._wanted.policy.wishes(view, own, now)
            if not isinstance(wishes, Wishes):
                raise TypeError(f"wishes() must return Wishes, not {type(wishes).__name__}")
            is_shown = self._shown.partitions.__contains__
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
        """Leave others their partitions. Ask for one held lease per topic and HI, at once if the holder is new."""
        claim = self._wave(tuple(key for key in wishes.claim if key not in self._let_go))
        for key in wishes.idle.intersection(claim):
            self._taken_up[key] = now + TAKEN_UP_INTERVALS * self._settings.heartbeat_interval_ms
        asks, hi = list[Key](), self._settings.heartbeat_interval_ms
        if wishes.release:  # a release waits for messages in flight; the policy may want it back
            self.deadline = min(self.deadline, now + hi)
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
        """The claims to send now: a few at first, then growing waves as the log answers.

        So members that start together see each other before one has claimed everything.
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
        """Sorted by CP, so that a wave is one or two requests, and one fetch per replica."""
        by_cp: dict[int, list[Key]] = {}
        for key in wanted:
            by_cp.setdefault(self._peers.cp_of(key), []).append(key)
        return tuple(chain.from_iterable(by_cp.values()))

    def _limit_of_claims(self, under_way: int) -> int:
        return FIRST_CLAIMS + max(0, self._claimed - under_way) // ANSWERS_PER_CLAIM

    def _inherit(self, now: float) -> bool:
        """While starting: take over what an older instance of this client holds (C7)."""
        inherited = self._peers.inherited
        keys = [key for key in inherited if key in self._shown.partitions and not self._claimer.is_taken(key)]
        for key in keys:
            epoch = inherited.pop(key)
            lease = self._peers.lease(key)
            if lease is not None and lease.held and lease.epoch == epoch and self._peers.opens_at(key, now) > now:
                self._claimer.claim(key, now, take_over=True)
        return bool(keys)

    def _look(self, now: float) -> None:
        self._let_go = {key: until for key, until in self._let_go.items() if until > now}
        self._taken_up = {key: until for key, until in self._taken_up.items() if until > now}
        self._shown.look(now, anew=self.dirty)
        self.dirty = self._ask_policy = False
