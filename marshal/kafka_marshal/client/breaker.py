"""Notices that what is behind the handlers of a run is away: then all tries fail, and no message is the reason.

One that succeeds, of whichever key, partition or member, says that the messages are the reason.
"""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Any

from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.types import Key

#: More failures in a row than this, of several messages, are an outage.
MOST_FAILED = 50

#: While it is open, the next try of a partition begins this long (ms) after the one before: at first, and at most. Each
#: ``MOST_FAILED`` failures double it. What fails by then is tried again as often, too.
PACE_MS, SLOWEST_PACE_MS = 10.0, 1_000.0

#: Meanwhile a message is set aside after this number of failures in a row; the next one after twice as many, at most …
PROBE_AFTER, PROBE_AT_MOST = 20, 1_000

#: While it is open for longer than this (ms), health and log say so: a burst of bad messages is over by then.
SAID_AFTER_MS = 2_000.0

FAILING = (
    f"more than {MOST_FAILED} tries of run(…) in a row failed, and none succeeded, here or at another member: of each "
    "partition it tries one message at a time, new ones first, at least one in a second, and sets next to none aside, "
    "until one succeeds. Nothing is lost. Find out what the handlers need that is away, or what the last deployment "
    "changed"
)


class Breaker:
    """The last tries of one run. Hold ``lock`` to call it."""

    def __init__(self, lock: Any = None) -> None:
        self.lock: Any = lock or Lock()
        #: How many have failed in a row.
        self.in_a_row: int = 0
        #: The first message of them, and whether there are others.
        self._first: Hashable = None
        self._are_several = False
        #: After this number in a row, one message is set aside all the same: it may be the one that stops all others.
        self._probe_at = PROBE_AFTER
        self._failed_alone = 0

    @property
    def is_open(self) -> bool:
        """Whether nothing succeeds: nothing is set aside."""
        return self.in_a_row > MOST_FAILED and self._are_several

    @property
    def pace_ms(self) -> float | None:
        """How long after the one before the next try of a partition begins; None: it is not open."""
        if not self.is_open:
            return None
        return min(SLOWEST_PACE_MS, PACE_MS * 2.0 ** min(self.in_a_row // MOST_FAILED - 1, 16))

    def failed(self, message: Hashable) -> None:
        """A try of this message has failed."""
        if not self.in_a_row:
            self._first, self._are_several = message, False
        self._are_several = self._are_several or message != self._first
        self.in_a_row += 1
        self._failed_alone += 1

    def succeeded(self) -> None:
        """A message was handled."""
        self.in_a_row = self._failed_alone = 0
        self._probe_at = PROBE_AFTER

    def probes(self) -> bool:
        """Whether to set a message aside although it is open: nothing succeeds, perhaps since that one comes first.

        The next time it takes twice as many failures, so an outage costs next to nothing.
        """
        if self._failed_alone < self._probe_at:
            return False
        self._probe_at, self._failed_alone = min(2 * self._probe_at, PROBE_AT_MOST), 0
        return True


def done_elsewhere(consumer: ConsumerEngine) -> dict[Key, tuple[int, int]]:
    """Of each partition that others work on: how many offsets are done, and how many open (under the shell's lock)."""
    found = {}
    for key in consumer.subscription.partitions:
        ours, progress = consumer.assignments.get(key), consumer.source.view.whole_progress(key)
        is_shared = ours is None or consumer.settings.sharing is not None or ours.lease.keys is not None
        if progress is None or not is_shared:
            continue
        holes = [hole.last - hole.first + 1 for hole in progress.open if hole.last <= progress.stable]
        found[key] = progress.stable + 1 - sum(holes), sum(holes)
    return found


class Elsewhere:
    """Whether other members have done messages, and not only passed them: markers and gaps are, beside opened ones.

    The first that they report of a partition they may have done before nothing succeeded here: it does not count.
    """

    def __init__(self) -> None:
        self._before: dict[Key, tuple[int, int]] = {}
        self._reported: set[Key] = set()

    def has_succeeded(self, now: dict[Key, tuple[int, int]]) -> bool:
        """now: of ``done_elsewhere``; empty: something succeeds here."""
        before, self._before = self._before, now
        pairs = [(before[key], now[key]) for key in self._reported & now.keys()]
        both = before.keys() & now.keys()
        self._reported = {key for key in both if key in self._reported or before[key] != now[key]}
        done = sum(new[0] - old[0] for old, new in pairs)
        return done > 2 * max(0, sum(new[1] - old[1] for old, new in pairs))
