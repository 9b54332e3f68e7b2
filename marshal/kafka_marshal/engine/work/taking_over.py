"""Taking over a partition that is processed in transactions (M2, M3), and the order of its transactions (M5).

::

    OPENING ─▶ PROVING ─▶ READING ─────────────────▶ (at the larger of Kafka's offset and the log's)
    producer   heartbeat  Kafka's offset
    begins     after it      │ no mark in the log
                             └─▶ SETTING ─▶ MARKING ─▶ (at the log's)
                                 Kafka's    the log

The producer's begin fences that of the predecessor. The heartbeat, sent after it and accepted, shows that the partition
was still ours then, so no newer owner is fenced for long. Any failure begins again with a new producer.
"""

from __future__ import annotations

import re
from math import inf

from kafka_marshal.engine.effects import StopFetch, TakeOver, TakeOverStep, Warn
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.work.assignment import Assignment, Mover, Run, Stage, TakingStep
from kafka_marshal.engine.work.topic_mark import KAFKA_COUNTS, kafka_counts, split
from kafka_marshal.topic_names import DEFAULT_TOPIC

#: How long (ms) to wait after a failure; doubled with each further one, up to the longest.
FIRST_RETRY_MS = 200.0
LONGEST_RETRY_MS = 10_000.0

#: A failure that has lasted for this number of tries makes the partition count as stuck.
STUCK_AFTER = 2

#: The stages in which a partition may be worked on.
_AT_WORK = (Stage.ASSIGNING, Stage.ACTIVE)

_METADATA = re.compile(r"kafka-marshal ([0-9]{1,19})(?: ([a-zA-Z0-9._-]+))?")


def metadata_of(epoch: int, log_name: str) -> str:
    """What is committed beside an offset in Kafka (M4)."""
    return f"kafka-marshal {epoch} {log_name}".rstrip()


def other_log(metadata: str, log_name: str, unnamed: str = "") -> str:
    """The coordination topic on which a group of this name committed an offset; "": ours, or it is not known.

    unnamed: what metadata without a topic's name stands for.
    """
    found = _METADATA.fullmatch(metadata)
    named = "" if found is None else found[2] or unnamed
    return "" if named == log_name else named


def is_ours(metadata: str, epoch: int, log_name: str) -> bool:
    """Whether this group committed an offset, on this coordination topic, where its epochs only grow (M7)."""
    found = _METADATA.fullmatch(metadata)
    return found is not None and int(found[1]) <= epoch and not other_log(metadata, log_name)


class TakeOvers:
    """Takes over the partitions of one consumer. Called under the shell's lock."""

    def __init__(self, consumer: Mover, log_name: str) -> None:
        self._consumer = consumer
        self._log_name = log_name

    # Taking over.

    def is_needed(self, assignment: Assignment) -> bool:
        """Whether it must be taken over before anything of it is delivered."""
        return self._consumer.settings.transactions and not assignment.taking.is_done

    def begin(self, assignment: Assignment) -> None:
        """Take it over, from the next step on; or wait for the end of one that has begun."""
        self._consumer.enter(assignment, Stage.TAKING_OVER)
        if assignment.taking.step is None:
            self._wait(assignment, TakingStep.PAUSING, -inf)

    def _begin(self, assignment: Assignment, now: float) -> None:
        keys = assignment.lease.keys
        if keys is not None and keys.is_part:
            self._refuse(assignment, "other members have keys of it", "remove accept_range_fetch from the group", now)
        elif assignment.lease.most_intervals < 2:
            why = "the group keeps no individual commits, and so no mark"
            self._refuse(assignment, why, "raise max_individual_commits", now)
        else:
            self._open(assignment)

    def _refuse(self, assignment: Assignment, why: str, remedy: str, now: float) -> None:
        topic, partition = assignment.key
        text = (
            f"{topic} [{partition}] can't be processed in transactions: {why}. Nothing of it is handed out, and "
            f"nothing is lost. {remedy[0].upper()}{remedy[1:]} (kafka-marshal group), or process "
            "it without exactly_once="
        )
        self._consumer.positions.stuck.no_transaction(assignment, text, now)
        self._wait(assignment, TakingStep.PAUSING, now + LONGEST_RETRY_MS)

    def _open(self, assignment: Assignment) -> None:
        assignment.taking.attempt += 1
        self._wait(assignment, TakingStep.OPENING)
        self._ask(assignment, TakeOverStep.OPEN)

    def _ask(self, assignment: Assignment, step: TakeOverStep, offset: int = 0) -> None:
        taking, number = assignment.taking, self._consumer.number
        self._consumer.outbox.add(TakeOver(number, assignment.key, assignment.epoch, taking.attempt, step, offset))

    def _wait(self, assignment: Assignment, step: TakingStep, due: float = inf) -> None:
        assignment.taking.step, assignment.taking.due = step, due
        self._consumer.schedule.look_after(assignment)

    def _asked(self, asked: TakeOver) -> Assignment | None:
        assignment = self._consumer.assignments.get(asked.key)
        if assignment is None or assignment.over or assignment.epoch != asked.token:
            return None
        return assignment if assignment.taking.attempt == asked.attempt else None

    @given
    def answered(self, asked: TakeOver, offset: int | None, metadata: str, now: float) -> None:
        """A step is done. offset, metadata: what Kafka's committed offset is; None: there is none."""
        assignment = self._asked(asked)
        if assignment is None or not assignment.lease.held:
            return
        match asked.step:
            case TakeOverStep.OPEN if assignment.taking.step is TakingStep.OPENING:
                assignment.taking.beat = self._consumer.source.reports.prove(assignment.lease, now)
                self._wait(assignment, TakingStep.PROVING)
                self._consumer.revocation.try_finish(assignment, now)
            case TakeOverStep.READ if assignment.taking.step is TakingStep.READING:
                self._read(assignment, offset, metadata, now)
            case TakeOverStep.SET if assignment.taking.step is TakingStep.SETTING:
                other = other_log(metadata, self._log_name, DEFAULT_TOPIC if self._log_name else "")
                if other and offset is not None:
                    self._warn_of_other_log(assignment, offset, other)
                self._mark(assignment, now)
            case _:
                pass

    def step(self, assignment: Assignment, now: float) -> None:
        """Do what is due: the log may show what is waited for, or time is up."""
        taking = assignment.taking
        if not assignment.lease.held:
            return
        if taking.step is TakingStep.PROVING and assignment.lease.proven_by >= taking.beat:
            progress = self._consumer.source.view.progress(assignment.key)
            if kafka_counts(progress):
                self._wait(assignment, TakingStep.READING)
                self._ask(assignment, TakeOverStep.READ)
            else:
                self._wait(assignment, TakingStep.SETTING)
                self._ask(assignment, TakeOverStep.SET, self._consumer.known_stable(assignment.key) + 1)
        elif taking.step is TakingStep.MARKING and kafka_counts(self._consumer.source.view.progress(assignment.key)):
            self._finish(assignment, self._consumer.known_stable(assignment.key) + 1, now)
        elif now >= taking.due and taking.step is TakingStep.MARKING:
            self._mark(assignment, now)
        elif now >= taking.due and taking.step is TakingStep.PAUSING:
            self._begin(assignment, now)

    def _read(self, assignment: Assignment, offset: int | None, metadata: str, now: float) -> None:
        position = self._consumer.known_stable(assignment.key) + 1
        if offset is not None and not is_ours(metadata, assignment.epoch, self._log_name):
            assignment.taking.step = None
            other = other_log(metadata, self._log_name)
            self._consumer.positions.foreign_offset(assignment, offset, metadata, other, now)
            return
        self._finish(assignment, position if offset is None else max(position, offset), now)

    def _warn_of_other_log(self, assignment: Assignment, offset: int, other: str) -> None:
        (topic, partition), position = assignment.key, self._consumer.known_stable(assignment.key) + 1
        text = (
            f"{topic} [{partition}]: a group of this name on the coordination topic {other} has committed offset "
            f"{offset} in Kafka, and this one begins at its own position ({position}). If both process the topic, "
            "outputs are produced twice, and the other one stops: give this group another name. If the group was "
            "moved here, end its workers there; what lies between the two positions comes again"
        )
        self._consumer.outbox.add(Warn(text, is_error=True))

    def _mark(self, assignment: Assignment, now: float) -> None:
        progress = self._consumer.source.view.progress(assignment.key)
        found = split(() if progress is None else progress.ranges)
        if len(found.ranges) + 2 > assignment.lease.most_intervals:  # the topic's mark, and this one
            why = f"the log keeps {assignment.lease.most_intervals} individual commits, and the mark is one too many"
            self._refuse(assignment, why, "raise max_individual_commits", now)
            return
        self._consumer.positions.marks.ahead(assignment, now)
        self._consumer.source.reports.commit(assignment.lease, [(KAFKA_COUNTS, KAFKA_COUNTS)])
        self._wait(assignment, TakingStep.MARKING, now + assignment.lease.heartbeat_interval_ms)

    def _finish(self, assignment: Assignment, start: int, now: float) -> None:
        """It begins at start, the offset that counts."""
        taking = assignment.taking
        taking.step, taking.due, taking.failures, taking.is_done = None, inf, 0, True
        self._consumer.positions.stuck.has_transactions(assignment.key, now)
        if assignment.stage is not Stage.TAKING_OVER:
            if start > assignment.done_through() + 1:  # otherwise only the producer is another one
                self.untake(assignment, False, now)
        elif start > self._consumer.known_stable(assignment.key) + 1:
            self._consumer.positions.start_at(assignment, start, now)
        else:
            self._consumer.positions.begin(assignment)
            self._consumer.positions.assign(assignment)

    @given
    def failed(self, asked: TakeOver, text: str, error: Exception | None, now: float) -> None:
        """A step failed: wait, and begin again with a new producer. error: the user's next call raises it."""
        assignment = self._asked(asked)
        if assignment is None:
            return
        taking, (topic, partition) = assignment.taking, assignment.key
        taking.failures += 1
        wait_ms = min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2.0 ** min(taking.failures - 1, 10))
        self._wait(assignment, TakingStep.PAUSING, now + wait_ms)
        if error is not None or taking.failures >= STUCK_AFTER:
            text = (
                f"{topic} [{partition}] can't be taken over for transactions: {text.rstrip('.')}. Nothing of it is "
                "handed out, and nothing is lost; it is tried again, and other partitions continue"
            )
            self._consumer.positions.stuck.no_transaction(assignment, text, now)
        if error is not None and str(error) not in map(str, self._consumer.errors):
            self._consumer.errors.append(error)
        self._consumer.revocation.try_finish(assignment, now)

    # A new producer.

    def untake(self, assignment: Assignment, is_known: bool, now: float) -> None:
        """Its producer is gone: take it over again.

        is_known: no transaction was in progress. What is in flight stays so unless Kafka's offset turns out to be
        another. Otherwise it is dropped, and comes again.
        """
        taking = assignment.taking
        if assignment.over or not taking.is_done:
            return
        taking.is_done = False
        if is_known and assignment.stage in (*_AT_WORK, Stage.REVOKING, Stage.LOCATING):
            self._open(assignment)
            return
        self._consumer.delivery.drop(assignment, 0)
        if assignment.stage in _AT_WORK:
            self._consumer.outbox.add(StopFetch(self._consumer.number, assignment.key))
            assignment.buffer.clear()
            self.begin(assignment)
        self._consumer.revocation.try_finish(assignment, now)

    # The order of transactions.

    @given
    def turn(self, run: Run, now: float) -> bool | None:
        """Whether a run may be committed: all before it is done. None: it was dropped; False: it waits."""
        assignment = run.assignment
        tracker = assignment.tracker
        if not tracker.has(run):
            return None
        tracker.follow()
        if tracker.done.stable + 1 >= run.covers_from:
            return True
        if tracker.open_from() < run.covers_from:
            self.abort(run, now)  # something before it is not in flight any more
            return None
        return False

    @given
    def abort(self, run: Run, now: float) -> None:
        """Drop a run and all later ones of its partition: they come again, in order (M5)."""
        assignment = run.assignment
        if assignment.tracker.has(run):
            self._consumer.delivery.drop(assignment, run.first)
            self._consumer.revocation.try_finish(assignment, now)
