"""Reads the state of a Marshal for metrics: from any thread, without a lock.

It uses atomic loads only, since other threads change the state meanwhile. Counters never count twice and never go down.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, TypedDict, cast

from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.dead_letters import class_name
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.client.handled import ProcessTimes
from kafka_marshal.client.handling import Hooks
from kafka_marshal.client.health import Health, examine, held_back, hot_keys
from kafka_marshal.client.shared_reads import SharedReader, kept_bytes
from kafka_marshal.engine.claims.keys import KeyParts, ShareLease, ShareSource
from kafka_marshal.engine.claims.peers import holders
from kafka_marshal.engine.figures import Histogram
from kafka_marshal.engine.work.assignment import Assignment, Run, Stage, Tracker
from kafka_marshal.engine.work.lane import RateLimited
from kafka_marshal.engine.work.tracker import Buffer
from kafka_marshal.errors import KafkaUnavailableError, MarshalError
from kafka_marshal.metrics.rows import (
    CheckpointMetrics,
    Failures,
    MessageCounts,
    Metrics,
    OutcomeCount,
    PartitionMetrics,
    Processing,
    RecordCount,
    TopicCount,
)
from kafka_marshal.types import Key, Start
from rationalizer import Progress, intervals
from rationalizer.holes import NO_OWNER, Hole, lag_of

if TYPE_CHECKING:
    from kafka_marshal.client.base import AnyConsumer
    from kafka_marshal.engine.shares.consumer import SharedConsumer
    from kafka_marshal.engine.work.consumer import ConsumerEngine
    from kafka_marshal.node.driver import Driver
    from kafka_marshal.ports import Message

#: In these stages the position is known.
_BEGUN = (Stage.ASSIGNING, Stage.ACTIVE, Stage.REVOKING)


#: What a request for a batch gives.
_GIVEN = ("new", "again", "nothing")


def _shared_reads(consumers: Iterable[AnyConsumer[Any]]) -> dict[str, Any]:
    """What members of this process read together (U13)."""
    found = [each._fetcher.reader for each in consumers if isinstance(each, FetchingConsumer)]
    readers = [each for each in found if isinstance(each, SharedReader)]
    if not readers:
        return {}
    hits, misses = sum(each.hits for each in readers), sum(each.misses for each in readers)
    return {
        "shared_read_bytes": kept_bytes(),
        "shared_reads": (OutcomeCount("hit", hits), OutcomeCount("miss", misses)),
    }


class MarshalMeter:
    """Measures one Marshal."""

    def __init__(self, driver: Driver, consumers: Sequence[AnyConsumer[Any]]) -> None:
        """consumers: all consumers so far; the list grows."""
        self.driver = driver
        self._consumers = consumers
        self._times = ProcessTimes(driver.cluster.runtime.lock())
        #: The last numbers of messages done: an early reading never lowers them.
        self._processed: dict[Key, int] = {}
        #: Partition → (first undone offset, since when it waits: s, wall clock). Replaced, never changed.
        self._oldest: dict[Key, tuple[int, float]] = {}

    def timing(self) -> Hooks:
        """Hooks for ``run`` that measure the time of handlers."""
        note = self._times.note

        def failed(attempt: Attempt, seconds: float, error: BaseException) -> None:
            note(attempt.message.topic(), class_name(error), seconds)

        return Hooks(
            after=lambda attempt, seconds: note(attempt.message.topic(), "", seconds), failed=failed, lost=failed
        )

    def health(self, *, closed: bool) -> Health:
        """The Marshal's health; closed: it was closed, or closes."""
        return examine(self.driver, closed=closed or self.driver.is_over)

    def read(self, *, closed: bool) -> Metrics:
        """Measure (any thread; never waits)."""
        driver = self.driver
        engine, now = driver.engine, driver.now_ms()
        health = self.health(closed=closed)
        open_now = [each for each in list(self._consumers) if not each._closed]
        failures, retries, dead_letters = self._handled()
        engines = [each._engine for each in list(self._consumers)]
        taking = [cast("SharedConsumer", each).taking for each in engines if isinstance(each.source, ShareSource)]
        lanes = [each._engine.delivery.in_lanes.lanes for each in open_now]
        return Metrics(
            group_id=engine.settings.group_id,
            client_id=engine.settings.client_id,
            ready=health.ready,
            needs_restart=health.needs_restart,
            turned_ago_seconds=health.turned_ago_ms / 1000,
            leases=health.leases,
            lease_remaining_seconds=min((max(0.0, until - now) / 1000 for until in _proven(driver)), default=None),
            members=_members(driver),
            paused=bool(driver.effects.events.paused_by),
            claim_seconds=engine.leases.claim_times.read(),
            handover_gap_seconds=engine.leases.gaps.read(),
            records=tuple(RecordCount(*what, count) for what, count in driver.upkeep.tally.read()),
            log_behind_records=driver.replica.log_behind,
            replica_alarms=len(driver.upkeep.snapshots.alarms),
            log_records=driver.upkeep.guard.records,
            log_oldest_age_seconds=driver.upkeep.keeper.oldest_age_s,
            log_not_pruned=bool(health.log_not_pruned),
            partitions=self._partitions(open_now, now),
            messages=self._messages(),
            done_too_late=sum(sum(list(each._engine.delivery.ignored_done.values())) for each in list(self._consumers)),
            held_back=len(health.held_back),
            held_back_messages=sum(one.in_hand for one in health.held_back),
            handlers_running=sum(each.running for each in lanes),
            rate_limited=tuple(TopicCount(*one) for one in _waiting(health.rates)),
            stuck=len(health.stuck),
            runs_failing=sum(each.pace_ms is not None for each in lanes),
            failures=tuple(Failures(*what, count) for what, count in sorted(failures.items())),
            retries=tuple(TopicCount(topic, count) for topic, count in sorted(retries.items())),
            dead_letters=tuple(TopicCount(topic, count) for topic, count in sorted(dead_letters.items())),
            processing=tuple(Processing(*what, seconds) for what, seconds in self._times.read()),
            checkpoints=_checkpoints(driver, now),
            acquires=tuple(OutcomeCount(what, sum(each.given[what] for each in taking)) for what in _GIVEN if taking),
            redelivered_messages=sum(x.again for each in engines for x in list(each.delivery.moved.values())),
            settled=tuple(OutcomeCount(what, count) for what, count in driver.upkeep.tally.settled.copy().items()),
            redone=driver.upkeep.tally.redone,
            **_shared_reads(list(self._consumers)),
            **self._transactions(),
        )

    def _handled(self) -> tuple[Counter[tuple[str, str]], Counter[str], Counter[str]]:
        failures: Counter[tuple[str, str]] = Counter()
        retries: Counter[str] = Counter()
        dead_letters: Counter[str] = Counter()
        for consumer in list(self._consumers):
            if isinstance(consumer, FetchingConsumer):
                found = consumer._handled.read()
                failures += found[0]
                retries += found[1]
                dead_letters += found[2]
        return failures, retries, dead_letters

    def _transactions(self) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        seconds = Histogram().read()
        waiting = 0
        for consumer in list(self._consumers):
            if isinstance(consumer, FetchingConsumer) and consumer._transactions is not None:
                figures = consumer._transactions.figures
                more, took = figures.read()
                counts += more
                seconds += took
                waiting += figures.waiting
        found = tuple(OutcomeCount(outcome, count) for outcome, count in sorted(counts.items()))
        return {"transactions": found, "transactions_waiting": waiting, "transaction_seconds": seconds}

    def _messages(self) -> tuple[MessageCounts, ...]:
        consumed: Counter[Key] = Counter()
        processed: Counter[Key] = Counter()
        for consumer in list(self._consumers):
            engine = consumer._engine
            if engine.ranges is not None:
                continue  # it handles no messages
            for key, moved in list(engine.delivery.moved.items()):
                consumed[key] += moved.fetched
                processed[key] += (
                    moved.done
                )  # first: messages that a loop reports meanwhile are missed, not counted twice
            for key, assignment in list(engine.assignments.items()):
                if not assignment.over:
                    processed[key] += sum(_unreported(assignment.tracker))
        for key, count in processed.items():
            self._processed[key] = max(count, self._processed.get(key, 0))
        return tuple(MessageCounts(*key, consumed[key], self._processed[key]) for key in sorted(consumed))

    def _partitions(self, consumers: Iterable[AnyConsumer[Any]], now: float) -> tuple[PartitionMetrics, ...]:
        wall, oldest = time.time(), {}
        found = []
        for consumer in consumers:
            engine = consumer._engine
            waiting = {one[:2] for one in held_back(engine, now)}
            hot = {(one.topic, one.partition): one.share for one in hot_keys(engine, now)}
            if isinstance(consumer, FetchingConsumer):
                with suppress(MarshalError):  # it closes
                    consumer._look_at_ends()
            for key, assignment in list(engine.assignments.items()):
                lease = assignment.lease
                if not lease.held:
                    continue
                offset, end, lag = _lag(assignment, _log_end(consumer, key), engine.source.view.open(key))
                progress = engine.source.view.progress(key)
                holes = [] if progress is None else progress.open
                since = None if lag is None else self._since(key, assignment, offset, lag, wall)
                if since is not None and lag:
                    oldest[key] = (offset, since)
                in_hand, ahead = _in_hand(assignment.tracker)
                found.append(
                    PartitionMetrics(
                        *key,
                        offset=offset,
                        log_end=end,
                        lag=lag,
                        lag_seconds=0.0 if lag == 0 else None if since is None else max(0.0, wall - since),
                        in_hand=in_hand,
                        buffered=assignment.buffer.size + ahead,
                        lease_remaining_seconds=max(0.0, lease.proven_until - now) / 1000,
                        held_back=key in waiting,
                        parked=sum(hole.is_parked for hole in holes),
                        later=sum(hole.is_later for hole in holes),
                        waiting=sum(hole.last - hole.first + 1 for hole in holes if hole.is_free),
                        acquired=sum(hole.last - hole.first + 1 for hole in holes if hole.owner != NO_OWNER),
                        shared=isinstance(lease, ShareLease | KeyParts),
                        hot_key_share=hot.get(key),
                    )
                )
        self._oldest = oldest
        return tuple(sorted(found))

    def _since(self, key: Key, assignment: Assignment, offset: int, lag: int, wall: float) -> float | None:
        """Since when (s, wall clock) messages have waited: the timestamp of the next undone message.

        If it is not fetched yet: the last known time, or now.
        """
        if lag == 0:
            return None
        message = next_undone(assignment.tracker, assignment.buffer, at_most_once=assignment.at_most_once)
        if message is not None:
            return stamp_of(message)
        known = self._oldest.get(key)
        return known[1] if known is not None and known[0] == offset else wall


def _proven(driver: Driver) -> Iterator[float]:
    """For each lease or piece held: until when it is proven (ms, own clock)."""
    for lease in list(driver.engine.book.leases.values()):
        if lease.held:
            yield lease.proven_until
    for member in list(driver.engine.groups.values()):
        for piece in list(member.pieces.values()):
            if piece.held:
                yield piece.proven_until


def _members(driver: Driver) -> int:
    for member in list(driver.engine.groups.values()):
        group = member.member.group
        return 0 if group is None else len(group.members)
    return holders(driver.engine.peers)


def _checkpoints(driver: Driver, now: float) -> CheckpointMetrics | None:
    for member in list(driver.engine.groups.values()):
        found = member.checkpoints
        if found is None:
            continue
        kept, figures, cut_at = list(found.kept), found.figures, found.oldest_cut()
        return CheckpointMetrics(
            outcomes=tuple(sorted(figures.outcomes.copy().items())),
            age_seconds=max(0, found.shown.log_time - kept[-1][1]) / 1000 if kept else None,
            oldest_cut_seconds=None if cut_at is None else max(0.0, now - cut_at) / 1000,
            save_seconds=figures.saving,
            restores=tuple(sorted(figures.restores.copy().items())),
            restore_seconds=figures.restoring,
            drain_seconds=figures.drain_seconds,
            drain_seconds_max=figures.drain_seconds_max,
        )
    return None


def _unreported(tracker: Tracker) -> Iterator[int]:
    """For each run: messages done by loops and not yet reported to the engine."""
    for run in list(tracker.runs.values()):
        if run.iterating:
            done = run.done_count
            yield max(0, run.cursor - done)


def _in_hand(tracker: Tracker) -> tuple[int, int]:
    """Messages delivered and not done, and messages of the same runs not yet delivered."""
    ahead = sum(len(run.messages) - run.handed_out for run in list(tracker.runs.values()))
    return max(0, tracker.in_hand - ahead - sum(_unreported(tracker))), max(0, ahead)


def _log_end(consumer: AnyConsumer[Any], key: Key) -> int | None:
    with suppress(MarshalError):  # it closes
        return consumer._log_end(key)
    return None


def _lag(assignment: Assignment, log_end: int | None, holes: Sequence[Hole]) -> tuple[int, int | None, int | None]:
    """The position, the log end, and the lag."""
    tracker = assignment.tracker
    end = log_end if log_end is not None else assignment.watch.log_end
    if assignment.stage not in _BEGUN:
        return -1, end, None
    offset = assignment.done.stable + 1
    if end is None:
        return offset, None, None
    end = max(end, assignment.watch.asked_end, assignment.buffer.fetch_next, offset)
    ranges = list(ranges_of(assignment.done))
    lag = intervals.lag(offset, end, ranges) + lag_of(holes, 0, end, offset - 1, ranges)
    return offset, end, max(0, lag - sum(_unreported(tracker)))


def ranges_of(done: Progress) -> Iterator[tuple[int, int]]:
    """Ranges done beyond a gap (any thread: the engine may have changed only one of the lists)."""
    return zip(list(done.intervals.firsts), list(done.intervals.lasts), strict=False)


def next_undone(tracker: Tracker, buffer: Buffer, *, at_most_once: bool) -> Message | None:
    """The first fetched message that is not done; None: there is none."""
    found = [message for run in list(tracker.runs.values()) if (message := _first(run, at_most_once)) is not None]
    if found:
        return min(found, key=lambda message: message.offset() or 0)
    return buffer.peek()


def _first(run: Run, at_most_once: bool) -> Message | None:
    if run.iterating:
        place = run.cursor
    elif at_most_once:
        place = max(0, run.handed_out - 1)
    else:
        place = run.marks.find(0)
    return run.messages[place] if 0 <= place < len(run.messages) else None


def stamp_of(message: Message) -> float | None:
    """A message's timestamp (s, wall clock); None: it has none."""
    kind, stamp_ms = message.timestamp() if hasattr(message, "timestamp") else (0, -1)
    return stamp_ms / 1000 if kind and stamp_ms >= 0 else None


# -- the lag of a whole group, from any of its members: for autoscalers --------------------------------------

#: Requests within this time (s) reuse the last log ends.
SAME_ENDS_S = 5.0

#: How long the brokers have to answer (s), and how long another request waits for them.
ASK_TIMEOUT_S = 3.0


class PartitionLag(TypedDict):
    """One partition."""

    topic: str
    partition: int
    #: Offsets that are neither done nor set aside; None: the partition has no leader.
    lag: int | None
    #: Of partitions that this member holds: the age of the next undone message; None: not known.
    lag_seconds: float | None


class Lag(TypedDict):
    """All partitions of the topics that this member's consumers read, with any holder."""

    group: str
    lag: int
    #: The largest of this member's partitions.
    lag_seconds: float
    partitions: list[PartitionLag]


class GroupLag:
    """Log ends from the brokers, at most every five seconds, and positions from the replica."""

    def __init__(self, meter: MarshalMeter) -> None:
        self._meter = meter
        self._asking = Lock()
        self._known: tuple[float, dict[Key, tuple[int, int]]] | None = None

    def read(self, *, closed: bool) -> Lag:
        """The lag now (*blocking*, for at most twice ASK_TIMEOUT_S). Raises MarshalError if no broker answers."""
        driver = self._meter.driver
        metrics = self._meter.read(closed=closed)
        own = {(one.topic, one.partition): one for one in metrics.partitions}
        wanted = {key: each for each in list(driver.engine.consumers.values()) for key in each.subscription.partitions}
        ends = self._ends(wanted)
        found = list(_lags(wanted, own, ends))
        return Lag(
            group=metrics.group_id,
            lag=sum(one["lag"] or 0 for one in found),
            lag_seconds=round(metrics.lag_seconds, 3),
            partitions=found,
        )

    def _ends(self, wanted: dict[Key, ConsumerEngine]) -> dict[Key, tuple[int, int]]:
        if not wanted:
            return {}
        if not self._asking.acquire(timeout=ASK_TIMEOUT_S):
            raise KafkaUnavailableError("the brokers have not said in time where the partitions' logs end")
        try:
            known, now = self._known, monotonic()
            if known is not None and now - known[0] < SAME_ENDS_S and known[1].keys() >= wanted.keys():
                return known[1]
            ends = self._meter.driver.cluster.watermarks(wanted, ASK_TIMEOUT_S)
            if not ends:
                raise MarshalError("no partition has a leader that says where its log ends")
            self._known = now, ends
            return ends
        finally:
            self._asking.release()


def _lags(
    wanted: dict[Key, ConsumerEngine], own: dict[Key, PartitionMetrics], ends: dict[Key, tuple[int, int]]
) -> Iterator[PartitionLag]:
    for key, consumer in sorted(wanted.items(), key=lambda item: item[0]):
        topic, partition = key
        one = own.get(key)
        known = None if one is None or one.lag is None else one.lag
        marks = ends.get(key)
        found = known if known is not None or marks is None else _from_log(consumer, key, *marks)
        seconds = None if one is None or one.lag_seconds is None else round(one.lag_seconds, 3)
        yield PartitionLag(topic=topic, partition=partition, lag=found, lag_seconds=seconds)


def _from_log(consumer: ConsumerEngine, key: Key, low: int, end: int) -> int:
    """The lag of a partition that this member does not hold, from its position in the log."""
    done = consumer.source.view.progress(key)
    if done is None or done.stable < 0:
        start: Start = consumer.settings.start
        return intervals.lag(low, end) if start == "earliest" else 0
    ranges = list(ranges_of(done))
    found = intervals.lag(max(low, done.stable + 1), end, ranges)
    return max(0, found + lag_of(done.open, low, end, done.stable, ranges))


def _waiting(rates: Sequence[RateLimited]) -> list[tuple[str, int]]:
    """Topic → how many messages wait for its rate; two consumers may each have a rate of all their topics."""
    found: Counter[str] = Counter()
    for one in rates:
        found[one.topic] += one.waiting
    return sorted(found.items())
