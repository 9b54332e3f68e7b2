"""A member's events, for its operator: one line for all that happens together, not one per partition."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf
from typing import Any

from kafka_marshal.engine.effects import Note
from kafka_marshal.engine.plane import Loss
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.guard import Guard
from kafka_marshal.logs import Event, log
from kafka_marshal.topic_names import is_lock, named

#: Grants and releases become one line when none has come for QUIET_MS, at the latest after GATHER_MS.
QUIET_MS = 250.0
GATHER_MS = 1_000.0

#: Kafka counts as unreachable once requests have failed for this share of the heartbeat interval, and none succeeded.
AWAY_SHARE = 0.5

_LOSS_MEANS = "Messages in flight are not committed by this process any more; the next holder may get them again"
_LOSS_MEANS_LOCK = "Another member may have it: systems that check its token refuse what this process still writes"
_AGAIN = "What was done since is done again, on the state of then"
_AGAIN_FROM_CUT = "Others continue from its last cut: what was done since is done again, on the state of that cut"
#: If no holder follows.
_LOSS_MEANS_TOO = {
    Loss.POSITION.value: "No member works on it until its position is set; messages in flight are not committed",
    Loss.KAFKA_OFFSET.value: "This member delivers nothing of it; messages in flight are not committed",
    Loss.OPEN.value: "This member delivers nothing of it; messages in flight are not committed",
    Loss.TOPIC_GONE.value: "Messages in flight are not committed",
    Loss.RESET.value: _AGAIN,
}


class Events:
    """Gathers events of the driver, and logs them. The driver's lock is held, except for :meth:`tell`."""

    def __init__(self, settings: EngineSettings, now: float) -> None:
        self.group_id: str = settings.group_id
        self._interval_ms = settings.heartbeat_interval_ms
        self._who: dict[str, Any] = {"group": settings.group_id, "client": settings.client_id}
        #: What happened (a note without its partition), and the partitions, in order.
        self._notes: list[tuple[Note, set[int]]] = []
        #: When they are logged if no more come, and when at the latest.
        self._due = self._latest = inf
        #: The client that has paused the group; "": none.
        self.paused_by: str = ""
        #: When Kafka answered last (own clock, ms).
        self._heard_at = now
        #: Why it has not answered since, and since when that is known (own clock, ms).
        self._trouble, self._trouble_at = "", inf
        self._is_away = False
        #: What Kafka was asked for and has not answered yet, by what waits for it, for people. Read without a lock.
        self.waits: dict[Hashable, str] = {}
        #: Two threads may take the lines.
        self._lines: deque[partial[None]] = deque()

    def note(self, note: Note, now: float) -> None:
        """A lease, or a piece of a coordinated group, was granted, released or lost."""
        topic, partition = note.key
        self._latest = now if note.event == Event.LOST else min(self._latest, now + GATHER_MS)
        self._due = min(now + QUIET_MS, self._latest)
        kind = replace(note, key=(topic, -1))
        for noted, partitions in reversed(self._notes):
            if noted == kind:
                partitions.add(partition)
                return
            if noted.key == kind.key and partition in partitions:
                break  # it came, and went again: in that order
        self._notes.append((kind, {partition}))

    def heard(self, now: float) -> None:
        """Kafka answered."""
        silent_ms, self._heard_at, self._trouble_at = now - self._heard_at, now, inf
        if self._is_away:
            self._is_away = False
            seconds = round(silent_ms / 1000, 1)
            self._add_last(logging.WARNING, Event.KAFKA_BACK, f"Kafka is back after {seconds:g} s", seconds=seconds)

    def away(self, now: float) -> str:
        """That Kafka counts as unreachable, for people; "": it does not (any thread; no lock)."""
        return self._away(now) if self._is_away else ""

    def _away(self, now: float) -> str:
        return (
            f"Kafka has not answered for {round((now - self._heard_at) / 1000, 1):g} s ({self._trouble}). If that "
            "lasts, leases and sessions end, and nothing is delivered until it is back. Check the brokers and the "
            "network"
        )

    @property
    def in_trouble(self) -> bool:
        """Whether a request has failed since Kafka answered last."""
        return self._trouble_at < inf

    def is_silent(self, now: float) -> bool:
        """Whether Kafka has been silent long enough for the next trouble to be logged as an outage."""
        return self._is_away or now - self._heard_at >= AWAY_SHARE * self._interval_ms

    def trouble(self, why: str, now: float) -> None:
        """A request failed, or a broker can't be reached."""
        self._trouble, self._trouble_at = why, min(self._trouble_at, now)

    def _look_for_outage(self, now: float) -> None:
        if not self._is_away and now - self._trouble_at >= AWAY_SHARE * self._interval_ms:
            self._is_away = True
            seconds = round((now - self._heard_at) / 1000, 1)
            text = self._away(now)
            self._add_last(logging.WARNING, Event.KAFKA_AWAY, text, reason=self._trouble, seconds=seconds)

    def pause(self, by: str, until: int | None) -> None:
        """The client that has paused the group now ("": none), until when (log time, ms)."""
        before, self.paused_by = self.paused_by, by
        if by and not before:
            text = f"the group is paused by {by!r}: its partitions are released, and nothing is claimed"
            self._add_last(logging.INFO, Event.PAUSED, text, by=by, until=until)
        elif before and not by:
            self._add_last(logging.INFO, Event.RESUMED, "the group is not paused any more", by=before)

    def check(self, now: float) -> None:
        """Make lines of what is due."""
        self._look_for_outage(now)
        if now >= self._due:
            self.gather()

    def gather(self) -> None:
        """Make lines of all that was noted."""
        self._due = self._latest = inf
        notes, self._notes = self._notes, []
        for note, partitions in notes:
            event, (topic, _), reason = note.event, note.key, note.reason
            level = logging.WARNING if event == Event.LOST else logging.INFO
            usually = _LOSS_MEANS_LOCK if is_lock(topic) else _AGAIN_FROM_CUT if note.has_cuts else _LOSS_MEANS
            means = f". {_LOSS_MEANS_TOO.get(reason, usually)}" if event == Event.LOST else ""
            why = f": {reason}{means}" if reason else ""
            numbers = sorted(partitions)
            keys = "" if note.keys is None else f" keys {note.keys[0]} to {note.keys[1]} of"
            place = named(topic, 0) if is_lock(topic) else f"{topic} [{spans(numbers)}]"
            text = f"{note.words or event}{keys} {place}{why}"
            fields: dict[str, Any] = {"reason": reason} if reason else {}
            if note.keys is not None:
                fields["keys"] = list(note.keys)
            if len(numbers) == 1:
                fields["partition"] = numbers[0]
            self._add(level, event, text, topic=topic, partitions=numbers, **fields)

    def say(self, event: str, text: str, **fields: Any) -> None:
        """Log an event of this member at INFO, after earlier ones."""
        self._add_last(logging.INFO, event, text, **fields)

    def _add_last(self, level: int, event: str, text: str, **fields: Any) -> None:
        """Add a line after all that was noted before."""
        self.gather()
        self._add(level, event, text, **fields)

    def _add(self, level: int, event: str, text: str, **fields: Any) -> None:
        who = f"{self._who['client']} of group {self._who['group']}"
        self._lines.append(partial(log, level, event, "%s: %s", who, text, **{**self._who, **fields}))

    def write(self) -> None:
        """Log the lines. The lock is not held: a logging handler of the user may be slow. It may also raise."""
        with suppress(IndexError):
            while True:
                Guard("the log", self._lines.popleft())()


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers for people: ``0-3, 7``."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
