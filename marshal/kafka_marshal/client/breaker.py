"""Notices that most tries of a run fail: then what is behind the handlers is away, and no message is the reason."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import Any

#: How many tries count, and more failures among them than this are an outage.
COUNTED, MOST_FAILED = 100, 50

#: While it is open, a message is set aside after this number of failures in a row; the next one after twice as many.
PROBE_AFTER = 20

FAILING = (
    f"more than {MOST_FAILED} of the last {COUNTED} tries of run(…) failed: it tries one message at a time, with "
    "back-off, and sets next to none aside, until fewer fail. Nothing is lost. Find out what the handlers need that is "
    "away, or what the last deployment changed"
)


class Breaker:
    """The last tries of one run. Any thread may call it."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or nullcontext()
        #: Whether each of the last tries failed.
        self._last: deque[bool] = deque(maxlen=COUNTED)
        self._failed = 0
        #: Most of them failed: nothing is set aside.
        self.is_open: bool = False
        #: How many have failed in a row.
        self.in_a_row: int = 0
        #: After this number in a row, one message is set aside all the same: it may be the one that stops all others.
        self._probe_at = PROBE_AFTER
        self._failed_alone = 0
        self._is_probing = False

    def note(self, failed: bool) -> bool:
        """A try has ended. Returns whether ``is_open`` has changed."""
        with self._lock:
            if len(self._last) == COUNTED:
                self._failed -= self._last[0]
            self._last.append(failed)
            self._failed += failed
            self.in_a_row = self.in_a_row + 1 if failed else 0
            self._failed_alone = self._failed_alone + 1 if failed else 0
            if not failed and self._is_probing:  # what follows a message that was set aside works: it was the message
                self._last.clear()
                self._failed = 0
            before, self.is_open = self.is_open, self._failed > MOST_FAILED
            if not self.is_open:
                self._probe_at, self._is_probing = PROBE_AFTER, False
            return before is not self.is_open

    def probes(self) -> bool:
        """Whether to set a message aside although it is open: nothing succeeds, perhaps since that one comes first.

        The next time it takes twice as many failures, at most ``COUNTED``, so an outage costs next to nothing.
        """
        with self._lock:
            if self._failed_alone < self._probe_at:
                return False
            self._probe_at, self._failed_alone, self._is_probing = min(2 * self._probe_at, COUNTED), 0, True
            return True
