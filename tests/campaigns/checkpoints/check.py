"""The account: states against a plain count of the topic, and what was repeated, from what the workers wrote down."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.campaigns.chaos.lines import read_lines

__all__ = ["Account", "Counts", "Input", "Lines", "Violation", "add", "check"]

#: Key → how many messages, and a sum over their offsets.
Counts = dict[str, list[int]]

_MODULUS = (1 << 61) - 1

#: Why a piece is restored of which nothing may come again.
EXACT = ("joined", "handed_over")


def _mark(offset: int) -> int:
    return (offset * offset * 2_654_435_761 + offset * 40_503 + 1) % _MODULUS


def add(counts: Counts, key: str, offset: int) -> None:
    """Count a message."""
    of_key = counts.setdefault(key, [0, 0])
    of_key[0] += 1
    of_key[1] = (of_key[1] + _mark(offset)) % _MODULUS


@dataclass(frozen=True, slots=True)
class Input:
    """A message of the topic."""

    offset: int
    key: str


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept."""

    promise: str
    text: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.text}"


@dataclass(slots=True)
class Lines:
    """One process: what it wrote down, and how it ended."""

    path: Path
    #: It was stopped for a time, or killed.
    faulty: bool


@dataclass(slots=True)
class Account:
    """What came of it."""

    violations: list[Violation] = field(default_factory=list)
    #: Why → restored pieces, and messages that came again by them.
    restored: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    #: Of each loss of a piece: messages that came again, and seconds since the cut that it went back to.
    losses: list[tuple[int, float]] = field(default_factory=list)
    #: Lost by processes that were neither stopped nor killed.
    unexplained: list[str] = field(default_factory=list)
    cuts: int = 0
    store_errors: int = 0
    completed: int = 0
    handled: int = 0


@dataclass(slots=True)
class _Tenure:
    """A piece under one fencing token: what was restored, and what was handled."""

    partition: int
    epoch: int
    why: str
    checkpoint: int
    at: float
    position: int
    ranges: list[tuple[int, int]]
    saved: int
    state: Counts
    of: Lines
    #: What the sink has then; None: there is no sink.
    rows: Counts | None = None
    handled: Counter[int] = field(default_factory=Counter)
    first: float = 0.0
    #: Cut → when it was taken; those whose saving failed; and the newest that its owner heard was complete.
    cuts: dict[int, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    complete: int = 0

    def has(self, offset: int) -> bool:
        """Whether this message was done when it was restored."""
        return offset < self.position or any(lo <= offset <= hi for lo, hi in self.ranges)

    def __str__(self) -> str:
        return f"[{self.partition}] under {self.epoch} ({self.of.path.stem}, {self.why}, checkpoint {self.checkpoint})"


class _Plain:
    """The topic's messages of one partition, counted."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self.offsets = [each.offset for each in inputs]
        self._by_key: dict[str, tuple[list[int], list[int]]] = {}
        self._keys = {each.offset: each.key for each in inputs}
        for each in inputs:
            offsets, sums = self._by_key.setdefault(each.key, ([], [0]))
            offsets.append(each.offset)
            sums.append((sums[-1] + _mark(each.offset)) % _MODULUS)

    def counts(self, position: int, ranges: Iterable[tuple[int, int]]) -> Counts:
        """Of all below the position, and in these ranges."""
        found: Counts = {}
        for key, (offsets, sums) in self._by_key.items():
            if number := bisect_left(offsets, position):
                found[key] = [number, sums[number]]
        for lo, hi in ranges:
            for offset in self.between(max(lo, position), hi):
                add(found, self._keys[offset], offset)
        return found

    def between(self, lo: int, hi: int) -> list[int]:
        """Offsets lo … hi of messages."""
        return self.offsets[bisect_left(self.offsets, lo) : bisect_left(self.offsets, hi + 1)]


class _Checker:
    def __init__(
        self,
        inputs: Mapping[int, Sequence[Input]],
        went_back: Mapping[int, Sequence[int]],
        rollbacks: Collection[int],
        hold: bool,
    ) -> None:
        self.plain = {partition: _Plain(each) for partition, each in inputs.items()}
        self.went_back = went_back
        self.rollbacks = rollbacks
        self.hold = hold
        self.account = Account()
        self.tenures: dict[tuple[int, int], _Tenure] = {}

    def say(self, promise: str, text: str) -> None:
        self.account.violations.append(Violation(promise, text))

    def read(self, of: Lines) -> None:
        """What one process wrote down."""
        mine: dict[int, _Tenure] = {}
        for what, at, *fields in read_lines(of.path):
            match what:
                case "restored":
                    self._restored(of, at, fields, mine)
                case "handled":
                    partition, epoch, offset = fields
                    self.account.handled += 1
                    self.tenures[partition, epoch].handled[offset] += 1
                case "torn":
                    self.say("in flight", f"{of.path.stem}: restored while a message was in flight: {fields}")
                case "cut" | "store error":
                    self._cut(what, at, fields[0], [mine[x] for x in fields[1] if x in mine])
                case "completed":
                    self.account.completed += 1
                    for tenure in mine.values():
                        if fields[0] in tenure.cuts and fields[0] not in tenure.failed:
                            tenure.complete = max(tenure.complete, fields[0])

    def _restored(self, of: Lines, at: float, fields: list[Any], mine: dict[int, _Tenure]) -> None:
        partition, epoch, why, checkpoint, position, ranges, states, state, rows = fields
        spans = [(lo, hi) for lo, hi in ranges]
        tenure = _Tenure(partition, epoch, why, checkpoint, at, position, spans, states[0] or 0, state, of, rows)
        before = self.tenures.get((partition, epoch))
        if before is not None and (before.of is not of or before.handled):
            self.say("one owner", f"{tenure} was restored before as {before}")
            return
        self.tenures[partition, epoch] = mine[partition] = tenure

    def _cut(self, what: str, at: float, number: int, tenures: list[_Tenure]) -> None:
        if what == "cut":
            self.account.cuts += len(tenures)
            for tenure in tenures:
                if number in tenure.cuts:
                    self.say("one cut", f"{tenure} was cut twice for {number}")
                tenure.cuts[number] = at
            return
        self.account.store_errors += 1
        for tenure in tenures:
            tenure.failed.add(number)

    def follow(self) -> None:
        """Each partition from owner to owner."""
        by_partition: dict[int, list[_Tenure]] = defaultdict(list)
        for _, tenure in sorted(self.tenures.items()):
            by_partition[tenure.partition].append(tenure)
        for partition, tenures in by_partition.items():
            for tenure in tenures:
                self._is_exact(self.plain[partition], tenure)
            for before, after in pairwise(tenures):
                self._between(self.plain[partition], before, after)
        for partition, plain in self.plain.items():
            last = by_partition[partition][-1] if by_partition[partition] else None
            end = plain.offsets[-1] + 1 if plain.offsets else 0
            if last is None or last.position < end:
                self.say("lost", f"[{partition}] ends at {end}, the last state at {last and last.position}")

    def _is_exact(self, plain: _Plain, tenure: _Tenure) -> None:
        expected = plain.counts(tenure.position, tenure.ranges)
        if tenure.state != expected:
            wrong = sorted(key for key in {*expected, *tenure.state} if expected.get(key) != tenure.state.get(key))
            those = [(key, tenure.state.get(key), expected.get(key)) for key in wrong]
            self.say("state", f"{tenure} at {tenure.position} {tenure.ranges}: state, plain count: {those[:4]}")
        if tenure.rows not in (None, expected):
            self.say("sink", f"{tenure} at {tenure.position} {tenure.ranges}: its rows are not those of a plain count")
        twice = [offset for offset, times in tenure.handled.items() if times > 1 or tenure.has(offset)]
        if twice:
            self.say("twice", f"{tenure} at {tenure.position} {tenure.ranges} counted again: {sorted(twice)[:8]}")

    def _between(self, plain: _Plain, before: _Tenure, after: _Tenure) -> None:
        account = self.account
        done = [x for x in plain.offsets if before.has(x) or x in before.handled]
        skipped = [x for x in plain.offsets if after.has(x) and not before.has(x) and x not in before.handled]
        if skipped:
            what = f"{len(skipped)} that no worker handled, from {skipped[0]}"
            self.say("lost", f"{after} skips {what}; before: {before}")
        repeated = [x for x in done if not after.has(x)]
        back = [x for x in self.went_back[before.partition] if before.epoch < x <= after.epoch]
        why = after.why
        if why in EXACT and back:
            why = f"lost or put back before it was restored, then {why}"
        elif why in EXACT and before.cuts and max(before.cuts) in before.failed:
            why = f"{why}, its last state not saved"
        account.restored[why] += 1
        account.repeated[why] += len(repeated)
        if why in EXACT and repeated:
            self.say("repeats", f"{after} repeats {len(repeated)} from {repeated[0]} on; before: {before}")
        if after.why != "lost":
            return
        since = before.cuts.get(after.saved, before.at)
        account.losses.append((len(repeated), (after.at - since) / 1000))
        if not any(before.epoch < x <= after.epoch for x in self.rollbacks) and after.saved < before.complete:
            self.say("cut", f"{after} goes back to {after.saved}, not to {before.complete}, which is complete")
        if not before.of.faulty and not self.hold and len(back) == 1:
            account.unexplained.append(f"{after}; before: {before}")


def check(
    inputs: Mapping[int, Sequence[Input]],
    files: Collection[Lines],
    went_back: Mapping[int, Sequence[int]],
    rollbacks: Collection[int],
    *,
    hold: bool,
) -> Account:
    """The last process restores all at the end, and handles nothing.

    inputs: all of the topic, by partition. went_back: by partition, where in the log its owner was lost, or a client
    put it back. rollbacks: where in the log.
    """
    checker = _Checker(inputs, went_back, rollbacks, hold)
    for each in files:
        if each.path.exists():
            checker.read(each)
    checker.follow()
    return checker.account
