"""The account: states against a plain count of the topic, and what was repeated, from what the workers wrote down."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rationalizer import key_hash
from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.chaos.lines import read_lines
from tests.campaigns.frame import Violation

#: Key → how many messages, and a sum over their offsets.
Counts = dict[str, list[int]]

#: Where in the log some keys (lo … hi) of a partition went back, as their owner was lost or a client put them back.
Back = tuple[int, int, int]

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
    #: How long members drained (s), for each completion that one heard.
    drains: list[float] = field(default_factory=list)
    #: Restored while a bad release was at work: pieces, and how many of them had a wrong state or wrong rows.
    spoilt: int = 0
    wrong: int = 0
    #: Partitions whose rows were compared right after a deploy was undone.
    undone: int = 0


@dataclass(slots=True, eq=False)
class _Tenure:
    """A piece under one fencing token: what was restored, and what was handled."""

    partition: int
    epoch: int
    why: str
    checkpoint: int
    at: float
    position: int
    ranges: list[tuple[int, int]]
    #: (lo, hi, id) of each part: where its state was saved.
    states: list[tuple[int, int, int]]
    state: Counts
    #: What the sink has then; None: there is no sink.
    rows: Counts | None
    #: Its key hashes; (lo, hi, token) of each part; and (lo, hi, offset) where some keys are done further than others.
    lo: int
    hi: int
    tokens: list[tuple[int, int, int]]
    through: list[tuple[int, int, int]]
    of: Lines
    handled: Counter[int] = field(default_factory=Counter)
    #: Cut → when it was taken; those whose saving failed; and the newest that its owner heard was complete.
    cuts: dict[int, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    complete: int = 0

    def token(self, key: int) -> int:
        """Since when its owner has this key hash."""
        return next((token for lo, hi, token in self.tokens if lo <= key <= hi), self.epoch)

    def done_below(self, key: int) -> int:
        """The offset below which all was done of the messages with this key hash when it was restored."""
        return max([self.position, *(through + 1 for lo, hi, through in self.through if lo <= key <= hi)])

    def has(self, offset: int, key: int) -> bool:
        """Whether a message was done when it was restored."""
        return offset < self.done_below(key) or any(lo <= offset <= hi for lo, hi in self.ranges)

    def saved(self, keys: Iterable[int]) -> int:
        """The oldest cut of which the state of one of these keys is."""
        return min(number for key in keys for lo, hi, number in self.states if lo <= key <= hi)

    def __str__(self) -> str:
        is_part = (self.lo, self.hi) != (0, MAX_KEY_HASH)
        share = f" keys {self.lo:016x}…{self.hi:016x}" if is_part else ""
        of = f"{self.of.path.stem}, {self.why}, checkpoint {self.checkpoint}"
        return f"[{self.partition}]{share} under {self.epoch} ({of})"


class _Plain:
    """The topic's messages of one partition, counted."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._by_key: dict[str, tuple[list[int], list[int]]] = {}
        self._keys = {each.offset: each.key for each in inputs}
        self._offsets = [each.offset for each in inputs]
        #: Key → its hash.
        self.keys: dict[str, int] = {}
        for each in inputs:
            self.keys[each.key] = key_hash(each.key.encode(), each.offset)
            offsets, sums = self._by_key.setdefault(each.key, ([], [0]))
            offsets.append(each.offset)
            sums.append((sums[-1] + _mark(each.offset)) % _MODULUS)

    def key_at(self, offset: int) -> str | None:
        """The key of a message; None: no reader of committed messages finds it."""
        return self._keys.get(offset)

    def held(self, lo: int, hi: int) -> list[str]:
        """The keys whose hashes are among these."""
        return [key for key, at in self.keys.items() if lo <= at <= hi]

    def counts(self, below: Mapping[str, int], ranges: Iterable[tuple[int, int]]) -> Counts:
        """Of all below an offset, by key, and in these ranges."""
        found: Counts = {}
        for key, end in below.items():
            offsets, sums = self._by_key[key]
            if number := bisect_left(offsets, end):
                found[key] = [number, sums[number]]
        for lo, hi in ranges:
            for offset in self._offsets[bisect_left(self._offsets, lo) : bisect_left(self._offsets, hi + 1)]:
                key = self._keys[offset]
                if key in below and offset >= below[key]:
                    add(found, key, offset)
        return found

    def of(self, keys: Iterable[str], since: int) -> list[tuple[int, int]]:
        """(offset, key hash) of all messages with these keys from this offset on."""
        found = []
        for key in keys:
            offsets, _ = self._by_key[key]
            found += [(offset, self.keys[key]) for offset in offsets[bisect_left(offsets, since) :]]
        return sorted(found)


class _Checker:
    def __init__(
        self,
        inputs: Mapping[int, Sequence[Input]],
        went_back: Mapping[int, Sequence[Back]],
        rollbacks: Collection[int],
        hold: bool,
        spoilt: Collection[tuple[int, int]],
    ) -> None:
        self.plain = {partition: _Plain(each) for partition, each in inputs.items()}
        self.went_back = went_back
        self.rollbacks = rollbacks
        self.hold = hold
        self.spoilt = spoilt
        self.account = Account()
        self.tenures: list[_Tenure] = []

    def say(self, promise: str, text: str) -> None:
        self.account.violations.append(Violation(promise, text))

    def read(self, of: Lines) -> None:
        """What one process wrote down."""
        #: Its newest tenure of each partition, and of each under a token.
        mine: dict[int, _Tenure] = {}
        under: dict[tuple[int, int], _Tenure] = {}
        for what, at, *fields in read_lines(of.path):
            match what:
                case "restored":
                    self._restored(of, at, fields, mine)
                    tenure = mine[fields[0]]
                    under[tenure.partition, tenure.epoch] = tenure
                case "handled":
                    partition, epoch, offset = fields
                    self.account.handled += 1
                    if (held := under.get((partition, epoch))) is None:
                        self.say("one owner", f"{of.path.stem} handled {fields} without having restored it")
                    else:
                        held.handled[offset] += 1
                case "torn":
                    self.say("in flight", f"{of.path.stem}: restored while a message was in flight: {fields}")
                case "cut" | "store error":
                    self._cut(what, at, fields[0], [mine[x] for x in fields[1] if x in mine])
                case "completed":
                    self.account.completed += 1
                    self.account.drains.append(fields[1])
                    for tenure in mine.values():
                        if fields[0] in tenure.cuts and fields[0] not in tenure.failed:
                            tenure.complete = max(tenure.complete, fields[0])
                case "undone":
                    self._undone(*fields)

    def _restored(self, of: Lines, at: float, fields: list[Any], mine: dict[int, _Tenure]) -> None:
        partition, epoch, why, checkpoint, position, ranges, states, state, rows, (lo, hi, tokens), through = fields
        spans = [(first, last) for first, last in ranges]
        parts = [(first, last, number or 0) for first, last, number in states]
        further = [(first, last, offset) for first, last, offset in through if offset >= position]
        of_keys = lo, hi, [(first, last, token) for first, last, token in tokens], further, of
        tenure = _Tenure(partition, epoch, why, checkpoint, at, position, spans, parts, state, rows, *of_keys)
        before = mine.get(partition)
        mine[partition] = tenure
        if before is not None and (before.epoch, before.lo, before.hi) == (epoch, lo, hi):
            if before.handled:
                self.say("one owner", f"{tenure} was restored before as {before}")
            self.tenures.remove(before)
        self.tenures.append(tenure)

    def _undone(self, partition: int, position: int, ranges: list[list[int]], rows: Counts) -> None:
        """The rows of a partition right after the recipe that undoes a deploy."""
        self.account.undone += 1
        plain = self.plain[partition]
        if rows != plain.counts(dict.fromkeys(plain.keys, position), [(lo, hi) for lo, hi in ranges]):
            text = f"[{partition}] at {position} {ranges}: its rows are not those of a plain count"
            self.say("undo", f"after a deploy was undone, {text}")

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
        """Each key of each partition from owner to owner."""
        by_partition: dict[int, list[_Tenure]] = defaultdict(list)
        for tenure in self.tenures:
            by_partition[tenure.partition].append(tenure)
        for partition, plain in self.plain.items():
            tenures = by_partition[partition]
            for tenure in tenures:
                self._is_exact(plain, tenure)
            moves: dict[tuple[_Tenure, int, _Tenure, int], list[str]] = defaultdict(list)
            for key, at in plain.keys.items():
                owners = sorted((x.token(at), x.at, n) for n, x in enumerate(tenures) if x.lo <= at <= x.hi)
                for (before, _, n), (after, _, m) in pairwise(owners):
                    moves[tenures[n], before, tenures[m], after].append(key)
                last = tenures[owners[-1][2]] if owners else None
                lost = [offset for offset, _ in plain.of([key], 0) if last is None or not last.has(offset, at)]
                if lost:
                    self.say("lost", f"[{partition}] {key}: {len(lost)}, from {lost[0]}, are not in the last state")
            for move, keys in moves.items():
                self._between(plain, *move, keys)

    def _is_spoilt(self, tenure: _Tenure) -> bool:
        return any(since < tenure.epoch < until for since, until in self.spoilt)

    def _is_exact(self, plain: _Plain, tenure: _Tenure) -> None:
        below = {key: tenure.done_below(plain.keys[key]) for key in plain.held(tenure.lo, tenure.hi)}
        expected = plain.counts(below, tenure.ranges)
        of_keys = {offset: plain.key_at(offset) for offset in tenure.handled}
        strange = [offset for offset, key in of_keys.items() if key not in below]
        if strange:
            self.say("one owner", f"{tenure} handled what has other keys, or was not committed: {sorted(strange)[:8]}")
        hashes = {offset: plain.keys[key] for offset, key in of_keys.items() if key is not None}
        twice = [x for x, at in hashes.items() if tenure.handled[x] > 1 or tenure.has(x, at)]
        if twice:
            self.say("twice", f"{tenure} at {tenure.position} {tenure.ranges} counted again: {sorted(twice)[:8]}")
        if self._is_spoilt(tenure):
            self.account.spoilt += 1
            self.account.wrong += tenure.state != expected or tenure.rows not in (None, expected)
            return
        if tenure.state != expected:
            wrong = sorted(key for key in {*expected, *tenure.state} if expected.get(key) != tenure.state.get(key))
            those = [(key, tenure.state.get(key), expected.get(key)) for key in wrong]
            self.say("state", f"{tenure} at {tenure.position} {tenure.ranges}: state, plain count: {those[:4]}")
        if tenure.rows not in (None, expected):
            self.say("sink", f"{tenure} at {tenure.position} {tenure.ranges}: its rows are not those of a plain count")

    def _between(
        self, plain: _Plain, before: _Tenure, since: int, after: _Tenure, until: int, keys: Sequence[str]
    ) -> None:
        """These keys went from one tenure, under this token, to the next."""
        account, hashes = self.account, [plain.keys[key] for key in keys]
        if since == until and before.of is not after.of:
            self.say("one owner", f"{after} was restored before as {before}")
            return
        messages = plain.of(keys, min(before.position, after.position))
        done = {x for x, at in messages if x in before.handled or before.has(x, at)}
        skipped = [x for x, at in messages if x not in done and after.has(x, at)]
        if skipped:
            what = f"{len(skipped)} that no worker handled, from {skipped[0]}"
            self.say("lost", f"{after} skips {what}; before: {before}")
        repeated = [x for x, at in messages if x in done and not after.has(x, at)]
        back = {
            x
            for x, lo, hi in self.went_back[before.partition]
            if since < x <= until and any(lo <= at <= hi for at in hashes)
        }
        why, is_exact = self._why(before, after, back)
        account.restored[why] += 1
        account.repeated[why] += len(repeated)
        if is_exact and repeated:
            self.say("repeats", f"{after} repeats {len(repeated)} from {repeated[0]} on; before: {before}")
        if why != "lost":
            return
        saved = after.saved(hashes)
        account.losses.append((len(repeated), (after.at - before.cuts.get(saved, before.at)) / 1000))
        if not any(since < x <= until for x in self.rollbacks) and saved < before.complete:
            self.say("cut", f"{after} goes back to {saved}, not to {before.complete}, which is complete")
        if not before.of.faulty and not self.hold and len(back) == 1:
            account.unexplained.append(f"{after}; before: {before}")

    def _why(self, before: _Tenure, after: _Tenure, back: Collection[int]) -> tuple[str, bool]:
        """Why these keys were restored, and whether nothing of them may come again."""
        why = after.why
        if back:
            return (f"lost or put back before it was restored, then {why}" if why in EXACT else why), False
        if why not in EXACT or (before.of is after.of and (before.lo, before.hi) != (after.lo, after.hi)):
            why = "share cut again"  # other keys of the piece came otherwise
        if before.cuts and max(before.cuts) in before.failed:
            return f"{why}, its last state not saved", False
        return why, True


def check(
    inputs: Mapping[int, Sequence[Input]],
    files: Collection[Lines],
    went_back: Mapping[int, Sequence[Back]],
    rollbacks: Collection[int],
    *,
    hold: bool,
    spoilt: Collection[tuple[int, int]] = (),
) -> Account:
    """The last process restores all at the end, and handles nothing.

    inputs: all of the topic, by partition. went_back: by partition, where in the log its owner was lost, or a client
    put it back. rollbacks: where in the log. spoilt: from where to where in the log a bad release was at work, until
    its deploy was undone.
    """
    checker = _Checker(inputs, went_back, rollbacks, hold, spoilt)
    for each in files:
        if each.path.exists():
            checker.read(each)
    checker.follow()
    return checker.account
