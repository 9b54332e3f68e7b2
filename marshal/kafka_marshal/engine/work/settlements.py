"""Sends what one consumer wants the log to show of open messages, and reports what the log answers (U1 to U4)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from kafka_marshal.engine.plane import Settles
from kafka_marshal.engine.settings import Why
from kafka_marshal.engine.work.assignment import Assignment, Deliveries, Mover, Run
from kafka_marshal.engine.work.grants import Grants
from kafka_marshal.engine.work.in_lanes import InLanes
from kafka_marshal.engine.work.open_messages import (
    GROWS_MS,
    MOST_WARY,
    SettleRequests,
    Try,
    Wary,
    log_waiting,
    waits_until,
)
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.errors import KeyRangeError
from kafka_marshal.types import Key
from rationalizer import Progress, codes
from rationalizer.limits import MANY_HOLES, MAX_HOLES

#: A warning about entries that the log rejected comes at most this often (ms).
WARNED_EVERY_MS = 60_000.0

#: Why a message is set aside of which as many tries have begun as it may have, and none has ended.
CRASHED = "CRASHED"

#: An owner logs first tries for this many heartbeat intervals after a takeover: by then it has reached what the one
#: before had done and not reported.
WARY_INTERVALS = 2

#: From this number of tries on, begun by earlier owners, a message is tried alone.
ALONE = 2

#: How many kinds of messages that are set aside are counted by themselves; all others are one.
MOST_KINDS = 32

#: In place of a code: the program gave a batch back often.
GIVEN_BACK = "GIVEN_BACK"

#: In place of a code: the client sends no message that is to be set aside, as the CP has too many open ones.
CROWDED = "CROWDED"

#: Code → what it means for the messages; others are sent again, and say nothing.
_MEANS = {
    codes.DUPLICATE_COMMIT: "was settled by another client before (an operator?); nothing is lost",
    codes.MAX_INDIVIDUAL_COMMIT_REACHED: (
        f"can't be set aside: {MAX_HOLES:,} messages of this partition are open, which is the limit. Nothing more of "
        "it is handed out until some are settled. Nothing is lost; other partitions continue. Redrive or discard them: "
        "kafka-marshal open-messages"
    ),
    codes.INDIVIDUAL_COMMIT_NOT_ALLOWED: (
        "can't be set aside: the group's setting accept_individual_commit is off. It stays as it is, and progress does "
        "not pass it. Switch the setting on, or run without park and durable"
    ),
}

#: The same, and what is dropped here, too: it was done before.
_TELLS = {
    **_MEANS,
    CROWDED: (
        f"can't be set aside: {MANY_HOLES:,} messages, of all groups, are open in this partition's part of the "
        "coordination topic, and workers add no more. Nothing more of the partition is handed out until some are "
        "settled. Nothing is lost; other partitions continue. Redrive or discard some: kafka-marshal open-messages"
    ),
    GIVEN_BACK: (
        "and what was delivered with it were given back again and again, and nothing of the partition was done "
        "between. Nothing is lost, and nothing is set aside for that: they come again, here after a pause of up to a "
        "heartbeat interval. Is what the handler needs away? What can't be handled: batch.park(message, why)"
    ),
    codes.INDIVIDUAL_COMMIT_TOO_OLD: (
        "can't be set aside or tried again: it was done before (everything up to offset {} is). It is dropped, and "
        "nothing is lost"
    ),
}


class Deliverer(Deliveries, Protocol):
    """The delivery of a consumer, as far as its open messages need it."""

    @property
    def in_lanes(self) -> InLanes: ...

    @property
    def grants(self) -> Grants: ...

    def set_aside(
        self, assignment: Assignment, offset: int, key_hash: int, attempts: int, reason: str, now: float
    ) -> bool:
        """Set a message in flight aside."""


class Settler(Mover, Protocol):
    """A consumer, as Settlements sees it."""

    @property
    def delivery(self) -> Deliverer: ...


class Settlements:
    """The open messages of one consumer. Called under the shell's lock."""

    def __init__(self, consumer: Settler, gaps: list[tuple[Key, int, int]]) -> None:
        """gaps: takes what is gone from the log, as (key, first, last)."""
        self._consumer = consumer
        self._gaps = gaps
        #: Code → when a warning was last given (own clock, ms).
        self._warned: dict[str, float] = {}
        #: After takeovers: until when (own clock, ms) first tries are logged.
        self._wary_until: dict[Key, float] = {}
        #: CP → when its holes were last counted (own clock, ms), and whether there are too many.
        self._counted: dict[int, tuple[float, bool]] = {}
        #: Reason → how many messages were set aside and not reported, which was the last, and the last report (ms).
        self._parked: dict[str, tuple[int, str, float]] = {}

    def applied(self, assignment: Assignment, entries: Settles, answers: Sequence[str] | None, now: float) -> None:
        """A record with these entries was applied. answers: of our own record, what the log says of each."""
        progress, keys = self._consumer.source.view.whole_progress(assignment.key), assignment.lease.keys
        opened = assignment.opened
        opened.applied(progress, entries, lambda key: keys is None or keys.has(key))
        if answers and self._consumer.at_most_once:
            self._consumer.delivery.grants.settled(assignment, entries, answers)
            answers = None
        for offset, code in opened.refused(entries, answers) if answers else ():
            if code in _MEANS:
                self._consumer.delivery.in_lanes.lanes.admit(assignment, offset)  # it is tried without that
            self.refused(assignment, offset, code, now)
        self.report(assignment)

    def refused(self, assignment: Assignment, offset: int, code: str, now: float) -> None:
        """The log refused to settle this message: a warning for each code, once a minute."""
        if code not in _TELLS or now < self._warned.get(code, -inf) + WARNED_EVERY_MS:
            return
        self._warned[code] = now
        stable = self._consumer.known_stable(assignment.key)
        topic, partition = assignment.key
        text = f"{topic} [{partition}]: offset {offset} {_TELLS[code].format(stable)}"
        self._consumer.warn(text)
        if code in (codes.MAX_INDIVIDUAL_COMMIT_REACHED, CROWDED) and Why.UNREADABLE in self._consumer.settings.raises:
            self._consumer.errors.append(KeyRangeError(text, kip_number=92))

    def parked(self, assignment: Assignment, offset: int, attempts: int, reason: str, now: float) -> None:
        """A message is to be set aside. Always reported: one warning a reason and minute, with their number."""
        if reason not in self._parked and len(self._parked) >= MOST_KINDS:
            reason = "other reasons"
        number, _, since = self._parked.get(reason, (0, "", -inf))
        last = f"{assignment.key[0]} [{assignment.key[1]}] offset {offset}, delivered or tried {attempts} times"
        self._parked[reason] = number + 1, last, since
        self.look(now)

    def look(self, now: float) -> None:
        """Report what was set aside, if it is time."""
        for reason, (number, last, since) in list(self._parked.items()):
            if number and now >= since + WARNED_EVERY_MS:
                self._parked[reason] = 0, last, now
                one = f"{last}, is being set aside"
                what = f"{number:,} messages are being set aside, the last of them {last}" if number > 1 else one
                means = " No handler has ended its tries: its process may die of it." if reason == CRASHED else ""
                self._consumer.warn(
                    f"{what} ({reason}).{means} The others continue. Once the log shows it, no worker gets it until "
                    "you decide: kafka-marshal open-messages --parked, then redrive or discard"
                )

    def look_after(self, run: Run, now: float) -> Wary | None:
        """Log the first tries after a takeover before they begin: an earlier owner may have died of one (U1).

        What two owners have begun is tried alone; what was begun too often is set aside. None: nothing of the run is.
        """
        assignment, in_lanes = run.assignment, self._consumer.delivery.in_lanes
        if assignment.wary == 0 or not in_lanes.is_durable or self._is_early(run, now):
            return None
        if assignment.wary is None:
            assignment.wary = MOST_WARY if assignment.origin.after_death else in_lanes.lanes.concurrency
            self._wary_until[assignment.key] = now + WARY_INTERVALS * assignment.lease.heartbeat_interval_ms
            assignment.opened.grows_at = now + GROWS_MS
        if assignment.origin.after_death and now >= self._wary_until.get(assignment.key, -inf):
            assignment.wary = 0
            return None
        chosen = run.messages[: assignment.wary]
        assignment.wary -= len(chosen)
        opened, most = assignment.opened, in_lanes.lanes.most_tries
        hashes = in_lanes.hashes(chosen)
        before = {offset: opened.tried.get(offset, 0) for offset in map(offset_of, chosen)}
        crashed = {offset for offset, count in before.items() if most is not None and count >= most}
        alone = [offset for offset, count in before.items() if count >= ALONE and offset not in crashed]
        run.into_lanes()
        opened.ahead.update(dict.fromkeys(alone, False))  # they are logged right before they begin (log_alone)
        for (offset, count), hashed in zip(before.items(), hashes, strict=True):
            if offset in crashed:
                self._crashed(assignment, offset, hashed, count, now)
            elif offset not in alone:
                opened.waiting.append(Try(offset, count + 1, hashed))
        self._log_waiting(assignment)
        return Wary({offset: count for offset, count in before.items() if offset not in crashed}, alone, crashed)

    def _is_early(self, run: Run, now: float) -> bool:
        """Whether it is a message that waits for its time: no earlier owner can have died of it since it does."""
        until = waits_until(run.assignment.open, offset_of(run.messages[0])) if run.is_open else None
        return until is not None and until > self._consumer.source.view.log_time(run.assignment.lease.cp, now)

    def _crashed(self, assignment: Assignment, offset: int, key_hash: int, attempts: int, now: float) -> None:
        self._consumer.delivery.set_aside(assignment, offset, key_hash, attempts, CRASHED, now)

    def log_alone(self, now: float) -> None:
        """Log the tries that may begin next after a death, and that of the next message that is tried alone."""
        for key in list(self._wary_until):
            assignment = self._consumer.assignments.get(key)
            if assignment is None or (assignment.wary == 0 and not assignment.opened.waiting):
                del self._wary_until[key]
            elif assignment.opened.waiting:
                assignment.opened.log_tries(self._consumer.delivery.in_lanes.tries(assignment))  # they have ended
                if now >= assignment.opened.grows_at:
                    is_over = now >= self._wary_until[key]
                    assignment.opened.window = inf if is_over else 2 * assignment.opened.window
                    assignment.opened.grows_at = now + GROWS_MS
                if self._log_waiting(assignment):
                    self.send(assignment, now)
        found = self._consumer.delivery.in_lanes.lanes.next_alone(now)
        assignment = None if found is None else self._consumer.assignments.get((found[0], found[1]))
        if found is not None and assignment is not None and assignment.opened.log_next(*found[2:]):
            self.send(assignment, now)

    def _log_waiting(self, assignment: Assignment) -> bool:
        lanes = self._consumer.delivery.in_lanes.lanes
        return log_waiting(assignment.opened, lanes.concurrency, assignment.tracker.run_at)

    def note(self, assignment: Assignment, *, ends: bool = False) -> None:
        """Have tries in the log. ends: in order, so that those that have not ended count for nothing (U1)."""
        if tries := self._consumer.delivery.in_lanes.tries(assignment, ends=ends):
            assignment.opened.log_tries(tries)

    def send(self, assignment: Assignment, now: float, *, ends: bool = False) -> None:
        """Send what the log does not show, with a heartbeat or before a release."""
        self.note(assignment, ends=ends)
        opened = assignment.open
        if opened is None or not len(opened.settling):
            if opened is not None:
                opened.is_full = False
            return
        progress = self._consumer.source.view.whole_progress(assignment.key)
        opened.look(progress)
        held = self.held(assignment, opened.settling, progress, now)
        opened.is_full = bool(held)
        entries = opened.settling.entries(progress, now, assignment.lease.heartbeat_interval_ms, held)
        if entries is not None:
            self._consumer.positions.marks.ahead(assignment, now)
            self._consumer.source.reports.settle(assignment.lease, entries, now)

    def held(self, assignment: Assignment, wanted: SettleRequests, progress: Progress | None, now: float) -> list[int]:
        """The offsets of which nothing is sent: the partition, or its CP, has too many open messages. Says so."""
        full = wanted.beyond_limit(progress)
        if full:
            self.refused(assignment, full[0], codes.MAX_INDIVIDUAL_COMMIT_REACHED, now)
        parks = wanted.new_parks(progress)
        if not parks:
            return full
        cp = assignment.lease.cp
        if self._counted.get(cp, (-inf, False))[0] != now:
            self._counted[cp] = now, self._consumer.source.view.hole_count(cp) >= MANY_HOLES
        if not self._counted[cp][1]:
            return full
        self.refused(assignment, parks[0], CROWDED, now)
        return [*full, *(each for each in parks if each not in full)]

    def report(self, assignment: Assignment) -> None:
        """Report open messages that are gone from the log."""
        opened = assignment.open
        for first, last in () if opened is None else opened.gone:
            self._gaps.append((assignment.key, first, last))
            which = f"offset {first}" if first == last else f"offsets {first} to {last}"
            topic, partition = assignment.key
            self._consumer.warn(
                f"{topic} [{partition}]: {which}, open until now, can't be fetched any more (retention, deletion or "
                "compaction): it counts as done"
            )
        if opened is not None:
            opened.gone.clear()
