"""When the background thread reads the log in steps: in a large group, while its member waits for nothing.

Each record ends the waiting fetch of every reader, so that the broker's work grows with the square of the members. A
member that waits for nothing lets records gather at the broker instead, and reads them with one fetch a step. It reads
at once while it waits for anything, and shortly before it does what is due by time. So what it decides, it decides on a
log as fresh as without steps; only what others want of it may be seen a step late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from math import inf

from kafka_marshal.engine.awaited import Awaited, awaited
from kafka_marshal.engine.effects import Append, Effect
from kafka_marshal.node.engine_lock import EngineLock
from kafka_marshal.ports import TailBatch
from kafka_marshal.runtime import Condition, Runtime
from rationalizer import (
    CommitOffsets,
    CommitRanges,
    GroupHeartbeat,
    Heartbeat,
    HeartbeatBatch,
    Outcome,
    SettleOffsets,
    SettlingMessages,
)

#: The longest step (ms): with what is read at once, five fetches a second.
LONGEST_STEP_MS = 333.0

#: Up to this number of members there are no steps. With sessions of 10 s they append four records a second, fewer than
#: the fetches that steps would save.
FREE_MEMBERS = 12

#: Each further member makes the step this much longer (ms), so that 54 are the first with the longest one.
MEMBER_STEP_MS = 8.0

#: No step is longer than this share of a session, or of the 2·HI of leases where there may be any: a third of the
#: margin of T4 of a session.
LONGEST_SHARE = 1 / 30

#: Members are those from which a record came within this time, or twice as long (ms): beats come every third of a
#: session, so those with long sessions, which cost less, count less.
HEARD_MS = 5_000.0

#: Steps from this number of members on, if all that this process does is to share partitions by batches.
FEW_SHARERS = 2

#: It reads at once this long (ms) before anything is due by time: a fetch, and a busy machine.
FRESH_MS = 10.0

#: After a record that others answer it reads at once for this long (ms): they see it within a step, and their answer
#: takes a round trip. What takes longer (a message in flight) is seen a step late.
ANSWER_MS = 500.0

#: If a step brought this many records, the reader may be behind: it reads on at once.
MANY_RECORDS = 256

#: It does not rest for less than this (ms).
SHORTEST_MS = 1.0

#: What a member appends by time or by its work, and no other member answers.
_ROUTINE = (Heartbeat, HeartbeatBatch, GroupHeartbeat, CommitOffsets, CommitRanges, SettleOffsets, SettlingMessages)


class Waits(StrEnum):
    """What this process waits for, beside what its member does (``engine.awaited``)."""

    START = "the end of the log, as it was at the start"
    CALL = "what a call of the program or of an admin waits for"
    RECORD = "a record that is known to be in the log: an own one, or one that the leader has reported"
    ANSWER = "what others do about a record of this member"
    REST = "the rest of the log: there is more than a fetch brings"


class Steps:
    """One reader's steps. The lock is held for all methods but those of reading."""

    def __init__(self, runtime: Runtime, lock: EngineLock, is_owed: Callable[[], bool]) -> None:
        """is_owed: whether a record is known to be in the log that was not read yet."""
        self._lock = lock
        self._now_ms = runtime.now_ms
        self._bell: Condition = runtime.condition()
        self.is_owed = is_owed
        #: Calls that wait for the log now.
        self.callers: int = 0
        #: When (own clock, ms) others have answered our last record.
        self.answered_by: float = 0.0
        #: The last read brought so much that there may be more.
        self.is_behind: bool = False
        #: When the next step begins, with a read.
        self._next_read = 0.0
        #: The present step (ms), and how long the rest that begins may take.
        self._step = 0.0
        self._left = 0.0
        self._is_resting = self._is_rung = False
        #: Senders of records: since the time below, and in the HEARD_MS before it.
        self._heard: set[str] = set()
        self._heard_before = 0
        self._heard_since = 0.0

    # What is heard.

    def heard(self, outcome: Outcome) -> None:
        """A record was applied."""
        if (message := outcome.message) is not None:
            self._heard.add(message.instance_id)

    def appended(self, wanted: Append) -> None:
        """A record is appended."""
        if not isinstance(wanted.record, _ROUTINE):
            self.answered_by = self._now_ms() + ANSWER_MS
        self.ring()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A call waits for what the log will show."""
        self.callers += 1
        self.ring()
        try:
            yield
        finally:
            self.callers -= 1

    # How long.

    def step_ms(self, now: float) -> float:
        """The present step; 0: there is none."""
        if now >= self._heard_since + HEARD_MS:
            self._heard_since, self._heard_before = now, len(self._heard)
            self._heard = set()
        members = max(len(self._heard), self._heard_before)
        engine = self._lock.engine
        schedules = [] if members < FEW_SHARERS else [consumer.schedule for consumer in engine.consumers.values()]
        harmless = min((schedule.harmless_step_ms for schedule in schedules), default=0.0)
        if members <= FREE_MEMBERS and not harmless:
            return 0.0
        patience = [client.session_timeout_ms for client in engine.groups.values()]
        if not patience or engine.book.leases or engine.consumers.keys() - engine.groups.keys():
            patience.append(2 * engine.settings.heartbeat_interval_ms)
        return max(step_ms(members, min(patience)), min(harmless, min(patience) * LONGEST_SHARE))

    def reason(self, now: float) -> Waits | Awaited | None:
        """Why it reads at once; None: it waits for nothing."""
        found = next((what for what, is_awaited in WAITS.items() if is_awaited(self, now)), None)
        return found or awaited(self._lock.engine, now)

    # Reading.

    def begin_rest(self, wait_s: float, due_at: float) -> bool:
        """Whether to ``wait`` instead of reading: the next step has not begun, and nothing is waited for.

        wait_s: the background thread has to turn again after this. due_at: when something is due by time.
        """
        now = self._now_ms()
        with self._lock.condition:
            self._step = self.step_ms(now)
            self._next_read = min(self._next_read, now + self._step, due_at - FRESH_MS)
            self._left = min(self._next_read - now, wait_s * 1000)
            self._is_resting = self._left >= SHORTEST_MS and self.reason(now) is None
            return self._is_resting

    def wait(self) -> bool:
        """Wait until the rest is over (*blocking*). Returns whether it is time to read."""
        with self._bell:
            if not self._is_rung:
                self._bell.wait(self._left / 1000)
            is_time = self._is_rung or self._now_ms() >= self._next_read
            self._is_resting = self._is_rung = False
            return is_time

    def read(self, batch: TailBatch) -> bool:
        """This was read. Returns whether a step has begun, unless something in it is a reason to read at once."""
        self.is_behind = sum(map(len, batch.records.values())) >= MANY_RECORDS
        if not batch.records or self._step <= 0:
            return False
        now = self._now_ms()
        with self._lock.condition:
            self._next_read = now + self._step
            return self.reason(now) is None

    def ring(self) -> None:
        """End the rest: there is something to wait for now, or the background thread is to end."""
        if self._is_resting:
            with self._bell:
                self._is_rung = True
                self._bell.notify_all()


def step_ms(members: int, session_ms: float) -> float:
    """The step of a group of this size, with this session or 2·HI; 0: it reads at once."""
    wanted = (members - FREE_MEMBERS) * MEMBER_STEP_MS
    return max(0.0, min(wanted, LONGEST_STEP_MS, session_ms * LONGEST_SHARE))


#: By what is waited for: whether it is.
WAITS: Mapping[Waits, Callable[[Steps, float], bool]] = {
    Waits.START: lambda steps, now: not steps._lock.started,
    Waits.CALL: lambda steps, now: steps.callers > 0,
    Waits.RECORD: lambda steps, now: steps.is_owed(),
    Waits.ANSWER: lambda steps, now: now < steps.answered_by,
    Waits.REST: lambda steps, now: steps.is_behind,
}


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
