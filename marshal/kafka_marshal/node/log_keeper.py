"""Keeps the log as long as its topic says, and no longer (Q52, Q53): a job of each member, one CP at a time.

Members agree on who prunes without a word. Each draws a turn after something can go, within a tenth of the time for
which it is kept, and looks again then: the one that comes first removes it, and the others draw again. Should two come
at once, both have replayed the same log and remove the same; it costs only their time.

It replays beside the member's own work: on its own thread, for at most a tenth of that thread's time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import log as ln
from typing import Any, cast

from kafka_marshal.errors import (
    AuthorizationError,
    ClosedError,
    KafkaUnavailableError,
    MarshalError,
    TopicChangedError,
    grant,
)
from kafka_marshal.logs import log
from kafka_marshal.node.engine_lock import DriverPart, Shared
from kafka_marshal.node.jobs import LogGuard, LongJob
from kafka_marshal.node.kept import keep_of, removable, turn_ms
from kafka_marshal.node.life import Life
from kafka_marshal.node.log_reader import read_range
from kafka_marshal.ports import Cluster, Tail, TailBatch
from kafka_marshal.runtime import Runtime, time_of_day_ms
from kafka_marshal.snapshots.prune import DEFAULT_KEEP, OlderThan, carry_out, make_plan
from kafka_marshal.topic_names import snapshots_topic
from rationalizer.limits import SNAPSHOT_INTERVAL
from rationalizer.snapshot_log import interval

#: The part of one thread's time that a replay may take: heartbeats, handlers and the user's program come first.
SHARE = 0.1

#: The longest rest between two reads (s): a member that ends waits no longer for it.
LONGEST_REST_S = 0.5

#: How often a member looks whether something can go: often enough for its turn, and seldom enough to cost nothing (ms).
LOOKS_IN_A_TURN = 20
LONGEST_LOOK_MS = 3_600_000.0

#: Between two checks, at least, also after a failure (ms).
SHORTEST_LOOK_MS = 10_000.0

#: Records that are replayed before some are removed: if much has to go, each cut shows the others that one is at work.
STEP = 500_000

#: Up to this many members can draw a turn, and one or two come first (see :func:`_draw`).
MANY = 10_000

#: How long Kafka may be silent while a part of the log is replayed (s).
TIMEOUT_S = 30.0


def _draw(random: float) -> float:
    """When a member's turn comes, from 0 to 1, of a random number from 0 to 1.

    Of any number of members up to MANY, about one is early and the others follow at some distance (exponential timers
    of receivers that suppress each other's feedback, as in RFC 4654).
    """
    return max(0.0, 1 + ln(max(random, 1 / MANY)) / ln(MANY))


class LogKeeper(DriverPart, LongJob):
    """The upkeep of the log by one driver. ``failing`` and the figures may be read by any thread."""

    def __init__(self, shared: Shared, guard: LogGuard, wall_ms: Callable[[], float] = time_of_day_ms) -> None:
        """guard: knows how long the log is kept, if the driver is a member's; otherwise nothing is done."""
        super().__init__(shared)
        self._guard = guard
        self._life = shared.lock.life
        self._wall_ms = wall_ms
        self._look_at = 0.0
        #: CP → (log start and time to keep that the turn was drawn for, when it comes).
        self._turns: dict[int, tuple[tuple[int, int], float]] = {}
        self._said: set[str] = set()
        #: CP → (log start, stamp of the first record there: ms).
        self._oldest: dict[int, tuple[int, int]] = {}
        #: Why this member could not remove what is too old, for people; "": it could, or need not.
        self.failing: str = ""
        #: How many cuts this member has made.
        self.cuts: int = 0

    @property
    def oldest_age_s(self) -> float | None:
        """The age of the oldest record of the log (any thread); None: it is kept for ever, or not known yet."""
        stamps = [stamp for _, stamp in list(self._oldest.values())]
        return max(0.0, (self._wall_ms() - min(stamps)) / 1000) if stamps and self._guard.keep_ms is not None else None

    def _has_work(self, now: float) -> bool:
        return now >= self._look_at and self._guard.keep_ms is not None

    def run(self) -> None:
        """Look, and prune if it is our turn, on a separate thread; no caller sees what it raises."""
        try:
            self._cluster.runtime.start(super().run, "kafka-marshal-prune")
        except RuntimeError as error:  # the limit of threads
            log(logging.DEBUG, "prune_put_off", "no thread to look after the log: %s", error)
            self._ended()

    def _ended(self) -> None:
        keep_ms = self._guard.keep_ms
        most = LONGEST_LOOK_MS if keep_ms is None else min(turn_ms(keep_ms) / LOOKS_IN_A_TURN, LONGEST_LOOK_MS)
        turns = [at for _, at in self._turns.values()]
        now = self._now_ms()
        self._look_at = max(min([now + most, *turns]), now + SHORTEST_LOOK_MS)
        super()._ended()

    def _failed(self, error: Exception) -> None:
        """Say once why; the next turn tries again."""
        if isinstance(error, ClosedError | TopicChangedError):
            # The member ends, or another one has cut what was read here: look again.
            log(logging.DEBUG, "prune_put_off", "not pruned: %s", error)
            return
        if not isinstance(error, MarshalError):
            self.failing = f"a fault of the library ({type(error).__name__})"
            log(logging.ERROR, "prune_failed", "pruning the log failed; nothing else is affected", error=error)
            return
        self.failing = str(error)
        is_refused = isinstance(error, AuthorizationError)
        is_outage = isinstance(error, KafkaUnavailableError) and not is_refused  # the member reports it
        is_known = is_outage or self.failing in self._said
        self._said.add(self.failing)
        level = logging.DEBUG if is_known else logging.WARNING
        event = "prune_refused" if is_refused else "prune_put_off"
        log(
            level,
            event,
            "this member can't remove log of %r that is older than its topic asks for: %s. Nothing is lost; the log "
            "grows until another member, or kafka-marshal prune, removes it",
            self._replica.topic,
            error,
        )

    # Looking.

    def _work(self) -> None:
        """Look, and prune if it is our turn."""
        topic, keep_ms = self._replica.topic, self._guard.keep_ms
        if keep_ms is None:
            return
        keys = [(topic, cp) for cp in range(self._replica.info.partitions)]
        olds = self._cluster.offsets_for_time(keys, int(self._wall_ms() - keep_ms), TIMEOUT_S)
        marks = self._cluster.watermarks(keys, TIMEOUT_S)
        found = {cp: (*mark, olds[topic, cp]) for (_, cp), mark in marks.items() if (topic, cp) in olds}
        self._note_oldest({cp: (low, high) for cp, (low, high, _) in found.items()})
        now = self._now_ms()
        for cp, (low, high, old_below) in found.items():
            drawn_for = (low, keep_ms)
            if not removable(low, high, old_below, self._interval(cp), DEFAULT_KEEP):
                self._turns.pop(cp, None)
            elif cp not in self._turns or self._turns[cp][0] != drawn_for:
                self._draw(cp, drawn_for, now)
        if not self._turns:
            self.failing = ""
        for cp in sorted(cp for cp, (_, at) in self._turns.items() if at <= now):
            self._take_turn(cp)

    def _interval(self, cp: int) -> int:
        """Offsets between two snapshots; of a CP that is not read here, at least."""
        world = self._replica.worlds.get(cp)
        return SNAPSHOT_INTERVAL if world is None else interval(world.listed)

    def _draw(self, cp: int, drawn_for: tuple[int, int], now: float) -> None:
        random = self._cluster.runtime.random().random()
        self._turns[cp] = drawn_for, now + _draw(random) * turn_ms(drawn_for[1])

    def _note_oldest(self, marks: Mapping[int, tuple[int, int]]) -> None:
        """Read the first record of CPs whose log begins elsewhere than before."""
        new = {
            cp: (low, low + 1)
            for cp, (low, high) in marks.items()
            if low < high and self._oldest.get(cp, (-1, 0))[0] != low
        }
        for cp, entries in read_range(self._cluster, self._replica.topic, new, TIMEOUT_S):
            self._oldest[cp] = new[cp][0], entries[0][1]

    # Pruning.

    def _take_turn(self, cp: int) -> None:
        """Remove what is too old, if no other member has."""
        drawn_for, _ = self._turns[cp]
        key = (self._replica.topic, cp)
        if self._cluster.watermarks([key], TIMEOUT_S).get(key, (-1, -1))[0] != drawn_for[0]:
            del self._turns[cp]
            return
        self._draw(cp, drawn_for, self._now_ms())  # whatever happens now, not at once again
        self._check_rights()
        while self._prune(cp, drawn_for[1]):
            pass

    def _check_rights(self) -> None:
        """Raise AuthorizationError if this member may not remove records: it need not replay them then."""
        names = [self._replica.topic, snapshots_topic(self._replica.topic)]
        lacking = [
            name
            for name in names
            if (allowed := self._cluster.operations(name, TIMEOUT_S)) is not None and "DELETE" not in allowed
        ]
        if lacking:
            raise AuthorizationError(f"it may not remove records. {grant('DELETE', 'topic', lacking)}")

    def _prune(self, cp: int, keep_ms: int) -> bool:
        """Remove what a step has checked; whether there may be more."""
        topic = self._replica.topic
        gentle = cast("Cluster", _GentleCluster(self._cluster, self._life))
        plan = make_plan(gentle, topic, TIMEOUT_S, older_than=OlderThan(keep_ms, self._wall_ms()), only=[cp], step=STEP)
        (each,) = plan.partitions
        for found in plan.differences:
            text = str(found.error(topic, plan.snapshots_topic))
            log(logging.DEBUG if text in self._said else logging.ERROR, "snapshot_differs", "%s", text)
            self._said.add(text)
        if each.cut is None and not each.snapshots_removed:
            self.failing = f"partition {cp}: {each.why}" if plan.differences or not each.checked else ""
            return False
        if not carry_out(self._cluster, plan, TIMEOUT_S, lambda: self._is_wanted(keep_ms)):
            return False
        self.cuts += 1
        self._turns.pop(cp, None)
        self.failing = ""
        text = "removed from partition %d of %r what is older than %s h: %d records, up to offset %s; %d snapshots"
        hours, below = f"{keep_ms / 3_600_000:g}", each.log_start if each.cut is None else each.cut
        log(
            logging.INFO,
            "log_pruned",
            text,
            *(cp, topic, hours, each.records_removed, below, each.snapshots_removed),
            log_partition=cp,
        )
        return each.cut is not None

    def _is_wanted(self, keep_ms: int) -> bool:
        """Whether the topic asks for it now: this process may have been stopped for long (*blocking*)."""
        config = self._cluster.topic_config(self._replica.topic, TIMEOUT_S)
        now = None if config is None else keep_of(config.settings)
        return now is not None and now <= keep_ms and not self._life.ended


class PassThrough:
    """Passes everything else to the real one."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _GentleCluster(PassThrough):
    """A cluster whose tails leave time to others, and end with the member."""

    def __init__(self, real: Cluster, life: Life) -> None:
        super().__init__(real)
        self._life = life

    def tail(self, topic: str, positions: Mapping[int, int]) -> Tail:
        return cast("Tail", _GentleTail(self._real.tail(topic, positions), self._real.runtime, self._life))


class _GentleTail(PassThrough):
    def __init__(self, real: Tail, runtime: Runtime, life: Life) -> None:
        super().__init__(real)
        self._runtime = runtime
        self._life = life
        self._read_at = runtime.monotonic()

    def read(self, timeout_s: float) -> TailBatch:
        worked_s = self._runtime.monotonic() - self._read_at
        self._runtime.box().get(min(worked_s * (1 / SHARE - 1), LONGEST_REST_S))
        if self._life.ended:
            raise ClosedError("The member ends; nothing was removed.")
        batch: TailBatch = self._real.read(timeout_s)
        self._read_at = self._runtime.monotonic()
        return batch
