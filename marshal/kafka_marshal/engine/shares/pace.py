"""How fast this member handles messages, and how fast the log answers, as measured lately."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from kafka_marshal.engine.settings import SharingOptions
from kafka_marshal.engine.shares.timing import Speed

#: Before anything was measured: messages for each millisecond, and the time (ms) from append to applied.
FIRST_RATE: Final = 0.2
FIRST_ANSWER_MS: Final = 10.0

#: A measurement takes at least this long (ms), while something is in flight.
MEASURED_MS: Final = 20.0

#: The median of this many answers counts.
ANSWERS: Final = 15


class Pace:
    """Measures one consumer. Called under the shell's lock."""

    def __init__(self, options: SharingOptions) -> None:
        self._batch_ms = options.batch_ms
        #: The most messages of a batch.
        self.max_messages: int = options.max_messages
        self._rate = FIRST_RATE
        self._answers: deque[float] = deque([FIRST_ANSWER_MS], ANSWERS)
        self._looked_at = 0.0
        self._was_busy = False
        self._busy_ms = 0.0
        self._done_at_start = 0

    def look(self, done: int, in_hand: int, now: float) -> None:
        """done: messages ever done; in_hand: in flight now."""
        if self._was_busy:
            self._busy_ms += now - self._looked_at
        self._looked_at, self._was_busy = now, in_hand > 0
        found = done - self._done_at_start
        if self._busy_ms < MEASURED_MS or not found:
            if self._busy_ms * self._rate > 2 * (found + in_hand):  # a batch may be reported as a whole, at its end
                self._rate = max(1, found) / self._busy_ms
            return
        self._rate += (found / self._busy_ms - self._rate) / 2
        self._busy_ms, self._done_at_start = 0.0, done

    def begun(self, now: float) -> None:
        """Messages are in flight from now on."""
        if not self._was_busy:
            self._looked_at, self._was_busy = now, True

    def answered(self, took_ms: float) -> None:
        """The log answered a record after this time (ms)."""
        self._answers.append(took_ms)

    @property
    def speed(self) -> Speed:
        """The figures."""
        return Speed(self._rate, self.max_messages, self._batch_ms, median(self._answers))
