"""How long the background thread waits for the log: it polls for acknowledgements, and reads beats in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from kafka_marshal.engine.effects import Append, Effect
from kafka_marshal.node.engine_lock import EngineLock
from kafka_marshal.node.steps import Steps
from rationalizer import Heartbeat, HeartbeatBatch

#: The background thread checks the clock at least this often: the most by which work that another thread made due is
#: late. With 100 leases a check costs a third of a millisecond.
MAX_WAIT_MS = 1_000.0

#: For ACK_WATCH_MS after an append, its acknowledgement is polled every ACK_WAIT_MS.
ACK_WATCH_MS = 50.0
ACK_WAIT_MS = 1.0

#: Beats of several CPs arrive one by one within a few milliseconds: wait this long to read them in one batch. A caller
#: that wants something meanwhile ends the wait.
BEATS_WAIT_S = 0.012


class Pacing:
    """What was sent and is not acknowledged yet, and when the background thread checks next."""

    def __init__(self, lock: EngineLock, now_ms: Callable[[], float], steps: Steps) -> None:
        self._lock = lock
        self.steps = steps
        self._now_ms = now_ms
        #: Appends that are not acknowledged yet; ``_appended_at``: when the last one was appended.
        self.unanswered: int = 0
        self._appended_at = 0.0
        #: The last effects were beats of several CPs, and nothing else waits for an answer.
        self.beats_sent: bool = False
        #: When something is due by time (own clock, ms).
        self.due_at: float = 0.0
        #: When the engine is asked again at the latest, even without an acknowledgement.
        self._settle_by = 0.0

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Note the effects that are carried out next; the lock is held."""
        self.beats_sent = self.unanswered == 0 and len(effects) > 1 and all(map(_is_beat, effects))

    def appended(self, wanted: Append) -> None:
        """A record is appended; the lock is held."""
        self.steps.appended(wanted)
        self.unanswered += 1
        self._appended_at = self._now_ms()

    def answered(self) -> None:
        """An acknowledgement has come; the lock is held."""
        self.unanswered -= 1

    def wait_s(self) -> float:
        """How long to wait for the log now."""
        now, lock = self._now_ms(), self._lock
        with lock.condition:
            # A grant counts once its append is acknowledged, and nothing wakes this thread for that.
            soon = self.unanswered > 0 and now - self._appended_at < ACK_WATCH_MS
            if not soon or now >= self._settle_by:
                deadline = lock.engine.take(None, lock.engine.deadline, now) if lock.started else inf
                self.due_at, self._settle_by = deadline, min(deadline, now + MAX_WAIT_MS)
            return max(0.0, min(ACK_WAIT_MS if soon else inf, self._settle_by - now)) / 1000

    def is_due(self) -> bool:
        """Whether the engine must be asked now, even if nothing has come."""
        return self._now_ms() >= self._settle_by

    @property
    def looks_until(self) -> float:
        """Until when (own clock, ms) only acknowledgements are polled."""
        return min(self._settle_by, self._appended_at + ACK_WATCH_MS)

    def let_beats_gather(self) -> None:
        """Wait briefly, to read the beats of several CPs in one batch."""
        with self._lock.condition:
            self.beats_sent = False
            self._lock.condition.wait(BEATS_WAIT_S)


def _is_beat(effect: Effect) -> bool:
    return isinstance(effect, Append) and isinstance(effect.record, Heartbeat | HeartbeatBatch)
