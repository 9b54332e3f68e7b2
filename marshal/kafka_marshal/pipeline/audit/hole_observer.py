"""Follows open messages by the outcomes alone (H1-H4, B5): checks who settles them, and writes rows of `holes`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from kafka_marshal.pipeline.audit.files import Row
from kafka_marshal.pipeline.audit.invariants import KEPT_ROWS, Breach, Notes, WatchedLease
from rationalizer import CommitOffsets, Group, SettleOffsets, codes
from rationalizer.history import BEFORE, LeaseKey
from rationalizer.holes import NO_KEY, NO_OWNER, Hole, Holes
from rationalizer.levels import REDO_LEVEL
from rationalizer.limits import NO_RECORD
from rationalizer.progress import Progress

#: How open messages ended → `what` of their rows in `progress`.
_DONE_AS: Final = {"done": "settled", "discarded": "discarded", "granted": "granted"}


class OpenRun(NamedTuple):
    """Open messages: the seven fields of `Hole`, and what happened to them since they were opened."""

    first: int
    last: int
    owner: int
    since: int
    attempts: int
    key_hash: int
    reason: str | None
    #: Offset and log time of the record that opened them; BEFORE: they were open where the replay began.
    opened: int
    opened_time: int
    #: Who took, opened or parked them last, operators aside; "": not known.
    client: str = ""
    instance: str = ""
    epoch: int | None = None
    #: Attempts before the last redrive.
    tries: int = 0
    parks: int = 0
    redrives: int = 0
    #: The last reason for which they were parked.
    why: str | None = None
    #: The operator who opened them though they were done (R2); "": nobody.
    redone_by: str = ""

    @property
    def is_free(self) -> bool:
        """As of a hole."""
        return self.owner == NO_OWNER and self.reason is None


class EndedRun(NamedTuple):
    """Messages that are open no more."""

    key: LeaseKey
    run: OpenRun
    until_offset: int
    until: int
    ended: str


class SettlingSender(NamedTuple):
    """Who settles messages, and what it may (H2, H3)."""

    client: str
    instance: str
    #: Of its lease or share; None: of a coordinated group, or an operator.
    epoch: int | None = None
    #: The epoch of its share by batches.
    owner: int = NO_OWNER
    #: Its key hashes; None: all.
    keys: Sequence[tuple[int, int]] | None = None
    #: Whether it may open messages that are in no hole: if it has their key, and without a key.
    makes: bool = False
    makes_unkeyed: bool = False
    is_operator: bool = False
    #: Whether its record opens what is done (R2).
    redoes: bool = False

    def has_key(self, key_hash: int) -> bool:
        """Whether a key hash is one of its."""
        return self.keys is None or any(lo <= key_hash <= hi for lo, hi in self.keys)

    def reaches(self, run: OpenRun, seen: int) -> bool:
        """H2."""
        if run.since >= seen:
            return False
        return self.has_key(run.key_hash) if run.owner == NO_OWNER else run.owner == self.owner

    def may_open(self, key_hash: int) -> bool:
        """Whether it may open a message that lies in no hole."""
        return self.makes and (self.makes_unkeyed if key_hash == NO_KEY else self.has_key(key_hash))

    def __str__(self) -> str:
        return f"{self.client}/{self.instance}{' as an operator' if self.is_operator else ''}"


def hole_row(key: LeaseKey, run: OpenRun, end: EndedRun | None) -> Row:
    """A row of `holes`; the writer adds its partition. end: None while they are open."""
    key_hash = None if run.key_hash == NO_KEY else run.key_hash
    begun = (None, None) if run.opened == BEFORE else (run.opened, run.opened_time)
    last = (None, None) if end is None else (end.until_offset, end.until)
    names = (*key, run.first, run.last, key_hash, run.client or None, run.instance or None, run.epoch)
    counts = (run.tries + run.attempts, run.parks, run.redrives, run.redone_by or None, run.why)
    return (*names, *begun, *last, *counts, "open" if end is None else end.ended)


def with_history(run: OpenRun, before: Sequence[OpenRun]) -> Iterator[OpenRun]:
    """A run, completed with what happened to it in earlier segments. before: the runs at their end, ascending."""
    if run.opened != BEFORE:
        yield run
        return
    for low, high, was in _parts(_runs(before), run.first, run.last):
        part = run._replace(first=low, last=high)
        if was is not None:
            names = part if part.client else was
            part = part._replace(
                opened=was.opened,
                opened_time=was.opened_time,
                client=names.client,
                instance=names.instance,
                epoch=names.epoch,
                tries=was.tries + part.tries,
                parks=was.parks + part.parks,
                redrives=was.redrives + part.redrives,
                why=part.why or was.why,
                redone_by=was.redone_by,
            )
        yield part


class HoleObserver:
    """The open messages of all partitions of one CP."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        #: By partition, of those that have open messages.
        self.open: dict[LeaseKey, Holes] = {}
        #: The record that last opened what was done, or replaced the position (R1).
        self._again: dict[LeaseKey, int] = {}
        #: Ended, and open where the replay began.
        self.ended: list[EndedRun] = []
        #: (first, last, how) of what the present record closed, and that is done with it.
        self._closed: list[tuple[int, int, str]] = []
        #: Offsets that the present record is about, to be compared with the state.
        self._touched: list[tuple[int, int]] = []

    def begin(self, key: LeaseKey, progress: Progress | None, owners: Mapping[int, tuple[str, str]]) -> None:
        """These messages are open where the replay begins. owners: (client, instance) by epoch."""
        runs = []
        for hole in () if progress is None or progress.holes is None else progress.holes:
            epoch = None if hole.owner == NO_OWNER else hole.owner
            names = owners.get(hole.owner, ("", ""))
            runs.append(OpenRun(*hole, BEFORE, BEFORE, *names, epoch, why=hole.reason))
        if runs:
            self.open[key] = _runs(runs)
        if progress is not None:
            self._again[key] = progress.again

    def now(self) -> dict[LeaseKey, list[OpenRun]]:
        """What is open, ascending."""
        return {key: cast("list[OpenRun]", list(runs)) for key, runs in self.open.items()}

    # -- record by record ------------------------------------------------------------------------------

    def name(self, message: Any) -> None:
        """Note the offsets that a settle names, accepted or not."""
        self._touched = list(message.done)
        self._touched += [(first, last) for first, last, *_ in message.open]
        self._touched += [(offset, offset) for offset, *_ in message.parked]

    def settle(self, key: LeaseKey, by: SettlingSender, message: Any, answers: Sequence[str], stable: int) -> None:
        """Entries of an accepted record. stable: what was done before it."""
        seen = min(message.seen, self._notes.offset)
        taken = iter(answers)
        for first, last in message.done:
            if next(taken) == codes.OK:
                self._close(key, by, first, last, seen)
        entries = [*((*entry, None) for entry in message.open)]
        entries += [(offset, offset, *rest) for offset, *rest in message.parked]
        for first, last, key_hash, attempts, reason in entries:
            if next(taken) in codes.ACCEPTED:
                self._make(key, by, (first, last), (key_hash, attempts, reason), seen, stable)
        if by.redoes and not codes.ACCEPTED.isdisjoint(answers[len(message.done) :][: len(message.open)]):
            self._again[key] = self._notes.offset

    def _close(self, key: LeaseKey, by: SettlingSender, first: int, last: int, seen: int) -> None:
        for low, high, was in _parts(self._holes(key), first, last):
            if was is None:
                continue
            if not by.reaches(was, seen):
                self._out_of_reach(key, by, "settled", was)
            run = was._replace(first=low, last=high)
            if by.is_operator:
                self._end(key, run, "discarded")
            else:
                self._end(key, run._replace(client=by.client, instance=by.instance, epoch=by.epoch), "done")
        self._put(key, first, last, [])

    def _make(
        self,
        key: LeaseKey,
        by: SettlingSender,
        span: tuple[int, int],
        said: tuple[int | None, int, str | None],
        seen: int,
        stable: int,
    ) -> None:
        """An open or parked entry (H3). said: key hash, attempts, reason."""
        key_hash, attempts, reason = NO_KEY if said[0] is None else said[0], *said[1:]
        at, made = self._notes.at, []
        for low, high, was in _parts(self._holes(key), *span):
            if was is None:
                is_again = by.redoes and reason is None and seen > self._again.get(key, NO_RECORD)
                if not is_again and (not by.may_open(key_hash) or low <= stable):
                    why = "are done" if low <= stable else "are not its own"
                    self._notes.report(
                        Breach.OUT_OF_REACH, key, f"{by} opened the offsets {low} … {high}, which {why} (H3, R2)"
                    )
                run = OpenRun(low, high, NO_OWNER, at[0], attempts, key_hash, reason, *at)
                run = run._replace(redone_by=by.client if is_again else "")
            else:
                if not by.reaches(was, seen):
                    self._out_of_reach(key, by, "parked" if reason else "opened", was)
                kept = was.key_hash if key_hash == NO_KEY else key_hash
                run = was._replace(first=low, last=high, owner=NO_OWNER, since=at[0], key_hash=kept)
                if was.reason is not None and reason is None:
                    run = run._replace(tries=was.tries + was.attempts, redrives=was.redrives + 1)
                run = run._replace(attempts=attempts, reason=reason)
            if reason is not None:
                run = run._replace(parks=run.parks + 1, why=reason)
            if not by.is_operator:
                run = run._replace(client=by.client, instance=by.instance, epoch=by.epoch)
            made.append(run)
        self._put(key, *span, made)

    def take(self, key: LeaseKey, by: SettlingSender, taken: tuple[int, int], for_good: bool, stable: int) -> None:
        """A sharer was given a batch (B5). for_good: at most once."""
        at = self._notes.at
        self._touched.append(taken)
        given = []
        for low, high, was in _parts(self._holes(key), *taken):
            run = OpenRun(low, high, by.owner, at[0], 1, NO_KEY, None, *at)
            if was is None and low <= stable:
                why = f"{by} took the offsets {low} … {high}, which are done (B5)"
                self._notes.report(Breach.OUT_OF_REACH, key, why)
            elif was is not None:
                if not was.is_free:
                    self._out_of_reach(key, by, "took", was)
                run = was._replace(first=low, last=high, owner=by.owner, since=at[0], attempts=was.attempts + 1)
                run = run._replace(reason=None)
            run = run._replace(client=by.client, instance=by.instance, epoch=by.epoch)
            if not for_good:
                given.append(run)
            elif was is not None:
                self._end(key, run, "granted")
        self._put(key, *taken, given)

    def disown(self, key: LeaseKey, epoch: int) -> None:
        """The share of this epoch ended: what it has is free (B4)."""
        holes = self.open.get(key)
        if holes is not None:
            self._touched += [(hole.first, hole.last) for hole in holes.of(epoch)]
            holes.disown(epoch)

    def reposition(self, key: LeaseKey, offset: int, level: int) -> None:
        """The position was replaced: what is parked at or below it stays (C11, G21)."""
        if level >= REDO_LEVEL:
            self._again[key] = self._notes.offset
        for run in self.now().get(key, ()):
            self._touched.append((run.first, run.last))
            if run.reason is None or run.first > offset:
                self._end(key, run, "repositioned")
                self._put(key, run.first, run.last, [])

    def forget(self, group_id: str) -> None:
        """C16."""
        self.take_checkpoints(group_id)
        for key in [key for key in self.open if key[0] == group_id]:
            for run in self.now()[key]:
                self._end(key, run, "forgotten")
            del self.open[key]

    def take_checkpoints(self, group_id: str) -> None:
        """Nothing of the group is opened again (R4)."""
        self._again = {key: offset for key, offset in self._again.items() if key[0] != group_id}

    # -- what is done ----------------------------------------------------------------------------------

    def not_open(self, key: LeaseKey, runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The parts of these runs that are not open."""
        holes = self.open.get(key)
        if holes is None:
            return list(runs)
        return [part[:2] for first, last in runs for part in _parts(holes, first, last) if part[2] is None]

    def write_done(self, watched: WatchedLease, by: Sequence[Any], what: str, runs: Iterable[Any]) -> None:
        """Rows of `progress`: by (client, instance, epoch) these runs are done; open messages are left out."""
        self._write(watched, by, what, self.not_open(watched.key, runs))

    def write_position(self, watched: WatchedLease, by: Sequence[Any], what: str) -> None:
        """A row of `progress`: the position was set."""
        self._write(watched, by, what, [(None, None)])

    def _write(self, watched: WatchedLease, by: Sequence[Any], what: str, runs: Iterable[tuple[Any, Any]]) -> None:
        names = (*watched.key, *by, *self._notes.at, what)
        self._notes.rows["progress"] += [(*names, *run, watched.stable, watched.granted) for run in runs]

    def made_done(self, watched: WatchedLease, progress: Progress, what: str) -> list[tuple[str, tuple[int, int]]]:
        """What the present record made done, or opened, each run with its `what`: else as given. `watched` follows."""
        closed, self._closed = self._closed, []
        found = [(how, part) for first, last, how in closed for part in watched.passed(first, last)]
        passed = watched.through(progress.stable)
        if progress.ranges:
            passed += watched.commit(tuple(progress.ranges))
        ends = Holes(Hole(first, last, NO_OWNER, 0, 0, NO_KEY, how) for first, last, how in sorted(closed))
        for first, last in passed:
            for low, high, hole in ends.parts(first, last):
                found.append((what if hole is None else hole.reason or "", (low, high)))
        return found

    # -- the world compared with the outcomes ----------------------------------------------------------

    def compare(self, key: LeaseKey, progress: Progress | None, *, whole: bool = False) -> None:
        """Compare the state's open messages where the record touched them; whole: all of the partition."""
        spans, self._touched = self._touched, []
        mine, theirs = self.open.get(key), None if progress is None else progress.holes
        if mine is None and theirs is None:
            return
        if whole or mine is None or theirs is None:
            spans = [(hole.first, hole.last) for holes in (mine, theirs) for hole in holes or ()]
        mine, theirs = mine or Holes(), theirs or Holes()
        for first, last in spans:
            for low, high, run in _parts(mine, first, last):
                there = [hole for _, _, hole in theirs.parts(low, high)]
                if run is None and not any(there):
                    continue
                if run is None:
                    why = f"the state has open messages in {low} … {high}; no record opened them"
                    self._notes.report(Breach.OUT_OF_REACH, key, why)
                elif None in there:
                    since = "since before the replay" if run.opened == BEFORE else f"since offset {run.opened}"
                    why = f"the offsets {low} … {high} were open {since}; no record closed them, and the state has none"
                    self._notes.report(Breach.LOST, key, why)
                elif len(there) > 1 or there[0] is None or there[0][2:7] != run[2:7]:
                    why = f"the state has {there[0]!r}, where the log says {Hole(low, high, *run[2:7])!r}"
                    self._notes.report(Breach.OUT_OF_REACH, key, why)
                else:
                    continue
                self._adopt(key, theirs)
                return

    def compare_group(self, group: Group | None, message: Any) -> None:
        """Compare the partitions of a coordinated group that a settle names, or a commit that sets positions."""
        if message.type == SettleOffsets.TYPE:
            places = {(message.topic, message.partition)}
        elif message.type == CommitOffsets.TYPE and self.open:
            places = {(entry[0], entry[1]) for entry in message.entries}
        else:
            return
        for place in places:
            progress = None if group is None else progress_of(group, *place)
            self.compare((message.group_id, *place), progress)

    def _adopt(self, key: LeaseKey, theirs: Iterable[Hole]) -> None:
        """Continue from the state, so that one fault is reported once."""
        mine, runs = self._holes(key), []
        for hole in theirs:
            for low, high, was in _parts(mine, hole.first, hole.last):
                _, _, owner, since, attempts, key_hash, reason = hole
                now = OpenRun(*hole, *self._notes.at) if was is None else was
                now = now._replace(owner=owner, since=since, attempts=attempts, key_hash=key_hash, reason=reason)
                runs.append(now._replace(first=low, last=high))
            self._put(key, hole.first, hole.last, [])
        for run in self.now().get(key, ()):
            self._end(key, run, "lost")
        self.open.pop(key, None)
        if runs:
            self.open[key] = _runs(runs)

    def _holes(self, key: LeaseKey) -> Holes:
        return self.open.get(key) or Holes()

    def _put(self, key: LeaseKey, first: int, last: int, runs: Sequence[OpenRun]) -> None:
        """These take the place of all within first … last."""
        holes = self.open.get(key)
        if holes is None:
            if runs:
                self.open[key] = _runs(runs)
            return
        edit, _ = holes.plan(first, last, cast("Sequence[Hole]", runs))
        holes.carry_out(edit)
        if not len(holes):
            del self.open[key]

    def _end(self, key: LeaseKey, run: OpenRun, ended: str) -> None:
        if ended in _DONE_AS:
            self._closed.append((run.first, run.last, _DONE_AS[ended]))
        end = EndedRun(key, run, *self._notes.at, ended)
        if run.opened == BEFORE:
            self.ended.append(end)
            return
        rows = self._notes.rows["holes"]
        rows.append(hole_row(key, run, end))
        if len(rows) >= KEPT_ROWS:  # one record may close 10,000 holes
            self._notes.flush(["holes"])

    def _out_of_reach(self, key: LeaseKey, by: SettlingSender, did: str, run: OpenRun) -> None:
        of = "free" if run.owner == NO_OWNER else f"of the share {run.owner}"
        why = f"the offsets {run.first} … {run.last}, {of}, key hash {run.key_hash}, changed at {run.since}"
        self._notes.report(Breach.OUT_OF_REACH, key, f"{by} {did} what it does not reach: {why} (H2)")


def progress_of(group: Group, topic: str, partition: int) -> Progress | None:
    """The state's progress of a partition of a coordinated group."""
    kept = group.kept(topic, partition)
    return None if kept is None else kept.progress


def _runs(runs: Iterable[OpenRun]) -> Holes:
    """A list of holes serves for runs, too: it merges, cuts and finds them by the same fields."""
    return Holes(cast("Iterable[Hole]", runs))


def _parts(holes: Holes, first: int, last: int) -> Iterator[tuple[int, int, OpenRun | None]]:
    """As `Holes.parts`."""
    return cast("Iterator[tuple[int, int, OpenRun | None]]", holes.parts(first, last))
