"""The authoritative log of a story: its replica, the outcome of each record, an independent judge; a broken promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rationalizer import Outcome, World
from rationalizer.log_hash import Entry, LogHash, RunningHash


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise."""

    #: Which one: "two owners", "lost", "repeated" …
    promise: str
    message: str
    at_ms: float

    def __str__(self) -> str:
        return f"{self.promise}: {self.message} (at {self.at_ms:.1f} ms)"


def state_of(world: World) -> tuple[object, ...]:
    """(next offset, log time, level, pauses, rows of each plane); of what is mutable a copy."""
    return world.next_offset, world.log_time, world.level, world.pauses(), world.rows()


class Judge(Protocol):
    """An implementation of the rules that shares nothing with the one under test.

    The replicas of a story all run the same rationalizer, so they agree even if it breaks a rule. Each story has one
    judge, which gets each record once, in the log's order.
    """

    def judge(self, cp: int, offset: int, timestamp_ms: int, value: bytes, outcome: Outcome, world: World) -> str:
        """What is wrong with the outcome or with the world after this record; "" if nothing is."""


class Recorded:
    """All records of a story, by CP."""

    def __init__(self, cps: int, snapshots_every: int, judge: Judge | None) -> None:
        self.worlds: dict[int, World] = {cp: World(cp, cps) for cp in range(cps)}
        self._snapshots_every = snapshots_every
        self._judge = judge
        #: CP → state after each offset, and the digest at those where a snapshot is due.
        self.states: dict[int, list[tuple[object, ...]]] = {cp: [] for cp in range(cps)}
        self.digests: dict[int, dict[int, str]] = {cp: {} for cp in range(cps)}
        self.outcomes: dict[int, list[Outcome]] = {cp: [] for cp in range(cps)}
        self._entries: dict[int, list[Entry]] = {cp: [] for cp in range(cps)}
        #: Record types and outcomes that occurred.
        self.kinds: dict[tuple[str, str], int] = {}

    def take(self, cp: int, offset: int, stamp: int, value: bytes) -> Outcome:
        """A record is in the log."""
        world = self.worlds[cp]
        outcome = world.apply(offset, stamp, value)
        self.states[cp].append(state_of(world))
        if self._snapshots_every and world.next_offset % self._snapshots_every == 0:
            self.digests[cp][world.next_offset] = world.digest()
        self.outcomes[cp].append(outcome)
        self._entries[cp].append((offset, stamp, value))
        kind = (outcome.type or "-", outcome.code)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        return outcome

    def hash(self, cp: int, since: int, next_offset: int) -> LogHash:
        """The hash of the records of this range (S4)."""
        running = RunningHash(since)
        running.take([entry for entry in self._entries[cp] if since <= entry[0] < next_offset])
        return running.at(cp, next_offset)

    def wrong(self, cp: int, offset: int, stamp: int, value: bytes, outcome: Outcome) -> str:
        """The judge's objection; "" for none."""
        return self._judge.judge(cp, offset, stamp, value, outcome, self.worlds[cp]) if self._judge is not None else ""
