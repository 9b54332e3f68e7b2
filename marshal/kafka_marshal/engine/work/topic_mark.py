"""The id of a data topic, kept in the log beside the group's progress in it.

A position is valid only in the topic where it was reached: the same name may be another topic tomorrow. So a holder
commits a one-offset range, made from the topic's id, at an offset that no partition ever reaches. Replicas need not
know of it, and snapshots carry it. Repositioning the group drops it with the progress it belongs to.

A second mark says that the group processes the partition in transactions (M3): Kafka's committed offset counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from kafka_marshal.engine.inputs import given

if TYPE_CHECKING:
    from kafka_marshal.engine.plane import PartitionSource
    from kafka_marshal.engine.subscription import Subscription
    from kafka_marshal.engine.work.assignment import Assignment
    from kafka_marshal.ports import TopicInfo
    from kafka_marshal.types import Key
    from rationalizer import Progress

#: Each reason begins with this.
POSITION_LOST = "position lost"


def why_lost(topic: TopicInfo, progress: Progress, log_end: int | None) -> str:
    """Why the position is not in this topic's log; "": it is. log_end None: unknown."""
    ranges, topic_marks, _ = split(progress.ranges)
    mark = mark_of(topic.topic_id)
    if topic_marks and mark is not None and topic_marks != {mark}:
        return f"{POSITION_LOST}: the topic was deleted and recreated"
    done_to = max([progress.stable, progress.granted, *(last for _, last in ranges)])
    if log_end is not None and done_to >= log_end:
        return f"{POSITION_LOST}: done up to {done_to}, but the log ends at {log_end}"
    return ""


#: Marks are the offsets from here to 2^63 − 1. At a million records a second, a log reaches them in 146,000 years.
FIRST_MARK = 2**62

#: The mark of a partition that is processed in transactions: its committed offset in Kafka counts (M3).
KAFKA_COUNTS = 2**63 - 1

#: The most assignments checked, and marks sent, at a time: a member with thousands must not flood the log at its start.
LOOKED_AT = 200
SENT_AT_ONCE = 50

#: The id that brokers without topic ids return.
NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"


def mark_of(topic_id: str) -> int | None:
    """The mark of a topic id that the cluster reported; None: it reported no id."""
    if topic_id in ("", NO_ID):
        return None
    return FIRST_MARK + (xxhash.xxh64_intdigest(topic_id.encode()) >> 2)


class Marked(NamedTuple):
    """A progress's ranges, split into ranges and marks."""

    #: The ranges done beyond a gap.
    ranges: Sequence[tuple[int, int]]
    #: The marks of the topics where it was done: one, unless something is wrong.
    marks: frozenset[int]
    #: Whether Kafka's committed offset counts (M3).
    kafka_counts: bool = False


def split(ranges: Sequence[tuple[int, int]]) -> Marked:
    """Split the marks off a progress's ranges, which must ascend."""
    if not ranges or ranges[-1][1] < FIRST_MARK:
        return Marked(ranges, frozenset())
    marks = frozenset(mark for first, last in ranges if first >= FIRST_MARK for mark in {first, last})
    found = [(first, last) for first, last in ranges if first < FIRST_MARK]
    return Marked(found, marks - {KAFKA_COUNTS}, KAFKA_COUNTS in marks)


def kafka_counts(progress: Progress | None) -> bool:
    """Whether this progress is of transactions: Kafka's committed offset counts, and may be ahead of the log (M3)."""
    return progress is not None and split(progress.ranges).kafka_counts


def counts_in(topic_id: str, progress: Progress) -> bool:
    """Whether the log marks this progress as done in the topic with this id. (Also if nothing is done, or no id.)"""
    mark = mark_of(topic_id)
    return mark is None or progress.stable < 0 or split(progress.ranges).marks == {mark}


class TopicMarks:
    """The topics where one consumer's positions are valid: compared before a partition begins, committed later."""

    def __init__(self, source: PartitionSource, subscription: Subscription, want_ids: Callable[[], object]) -> None:
        self._source = source
        self._subscription = subscription
        self._want_ids = want_ids
        #: Assignments whose topic has no mark in the log yet.
        self._unmarked: deque[Assignment] = deque()
        #: Those of which the first messages have come.
        self._come: list[Assignment] = []

    def begun(self, assignment: Assignment) -> None:
        """A lease was granted."""
        self._id_of(assignment)
        self._unmarked.append(assignment)

    def come(self, assignment: Assignment) -> None:
        """Messages of it are there: have the log say of which topic, before it says what of them is done."""
        if not assignment.told.has_come:
            assignment.told.has_come = True
            self._come.append(assignment)

    def _id_of(self, assignment: Assignment) -> str | None:
        """The id of the topic in which it began, once that is known."""
        if assignment.told.topic_id is None:
            assignment.told.topic_id = self._subscription.topic_id(assignment.key[0])
        return assignment.told.topic_id

    def identified(self) -> None:
        """The cluster has reported the ids of topics."""
        for assignment in self._unmarked:
            self._id_of(assignment)

    def _known(self, key: Key) -> frozenset[int]:
        progress = self._source.view.progress(key)
        return frozenset() if progress is None else split(progress.ranges).marks

    @given
    def lacking(self) -> set[str]:
        """Topics with work done whose ids are known neither from the log nor from the cluster."""
        return {
            assignment.key[0]
            for assignment in self._unmarked
            if assignment.is_at_work
            and assignment.done_through() >= 0
            and self._id_of(assignment) is None
            and not self._known(assignment.key)
        }

    @given
    def learn(self, topics: Mapping[str, TopicInfo]) -> None:
        """Store the ids of some topics that were looked up outside the regular refresh."""
        self._subscription.learn(topics)

    def is_made_anew(self, key: Key) -> bool | None:
        """Whether the position was reached in another topic of this name.

        None: not known yet. So it is too if the log has no mark: what is done would be marked as of a later topic.
        """
        marks, topic_id = self._known(key), self._subscription.topic_id(key[0])
        if topic_id is None:
            return None
        mark = mark_of(topic_id)
        return bool(marks) and mark is not None and marks != {mark}

    def step(self, now: float) -> None:
        """Commit the marks of partitions whose first messages have come: all, since what is done of them follows."""
        while self._come:
            assignment = self._come.pop()
            if self._id_of(assignment) is None:
                self._want_ids()  # ``send`` has it later
            elif assignment.lease.held:
                self.ahead(assignment, now)

    def send(self, now: float) -> None:
        """Commit some of the marks that the log lacks."""
        sent = 0
        for _ in range(min(len(self._unmarked), LOOKED_AT)):
            assignment = self._unmarked.popleft()
            if assignment.over or self._known(assignment.key):
                continue
            self._unmarked.append(assignment)
            sent += sent < SENT_AT_ONCE and self._send_if_due(assignment, now)

    def _send_if_due(self, assignment: Assignment, now: float) -> bool:
        progress, sent_at = self._source.view.progress(assignment.key), assignment.told.mark_sent_at
        if progress is None or not assignment.is_at_work:
            return False
        if sent_at is not None and now < sent_at + assignment.lease.heartbeat_interval_ms:
            return False
        # If nothing is done, any topic of this name will do.
        is_due = assignment.told.has_come or progress.stable >= 0 or bool(progress.ranges)
        return is_due and self._send(assignment, now)

    def ahead(self, assignment: Assignment, now: float, *, again: bool = False) -> None:
        """Its progress is about to be reported: mark it now if no mark was sent before. again: also if one was."""
        if again or assignment.told.mark_sent_at is None:
            if not self._known(assignment.key):
                self._send(assignment, now)
            elif assignment.told.mark_sent_at is None:
                assignment.told.mark_sent_at = now

    def _send(self, assignment: Assignment, now: float) -> bool:
        mark = mark_of(self._id_of(assignment) or "")
        if mark is None:
            return False
        assignment.told.mark_sent_at = now
        self._source.reports.commit(assignment.lease, [(mark, mark)])
        return True


class TopicIds:
    """Whether to look up the ids of topics, for all consumers of a member."""

    def __init__(self) -> None:
        #: Whether ``Engine.metadata`` with ids is needed soon.
        self.wanted: bool = False

    def want(self) -> None:
        """Request the ids: an assignment can't begin before they are known."""
        self.wanted = True

    @given
    def take_wanted(self) -> bool:
        """Whether ids are wanted; resets the request, so the caller must fetch them."""
        wanted, self.wanted = self.wanted, False
        return wanted

    def has_marks(self, topics: Iterable[str], progress: Callable[[Key], Progress | None]) -> bool:
        """Whether the log has a mark for one of these topics, judged by partition 0.

        (If only other partitions have marks, those request the ids themselves.) progress: of a partition, as our
        replica knows it.
        """
        known = (progress((topic, 0)) for topic in topics)
        return any(found is not None and split(found.ranges).marks for found in known)
