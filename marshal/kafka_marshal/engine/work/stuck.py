"""Partitions that are stuck though there is something to read, and why: reported once, then repeated rarely.

If a batch is corrupt, a record too large to receive, or a leader gone, Kafka's client retries forever, with a log line
each time. To a caller that polls for messages, such a partition looks idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import NamedTuple

from kafka_marshal.engine.effects import StartFetch, Warn
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.settings import Why
from kafka_marshal.engine.work.assignment import Assignment, Mover, Stage, is_out_of_room
from kafka_marshal.errors import PartitionStuckError, PositionLostError
from kafka_marshal.ports import TopicInfo
from kafka_marshal.types import Key

#: A failed read is retried, and mostly succeeds: report it only after it has failed this long (ms).
STUCK_AFTER_MS = 1_000.0

#: A partition is silent after this long without the messages its log holds (ms): longer than an election or slow fetch.
SILENT_AFTER_MS = 10_000.0

#: A connection that broke at too large an answer explains partitions that are stuck within this time only (ms).
TOO_LARGE_FOR_MS = 10_000.0

#: How often a stuck partition is reported again, in the log only (ms).
SAID_EVERY_MS = 600_000.0

#: How long not to ask the leader again after it confirmed that our position is in its log (ms).
LOOK_UP_AGAIN_MS = 1_000.0


#: Reasons that last until someone acts. (They end a loop only on request: the next worker's loop would end, too.)
UNREADABLE = frozenset({Why.UNREADABLE, Why.TOO_LARGE})

#: Reasons that do not end because the position moves.
_OWN_END = frozenset({Why.NO_LEADER, Why.NO_ROOM})


class Stuck(NamedTuple):
    """A partition that is stuck."""

    topic: str
    partition: int
    #: The offset that comes next, once it continues.
    offset: int
    #: "unreadable", "too large", "silent", "no leader", "position lost", "no transaction" or "no room".
    why: str
    #: What happened, what it means, and what to do.
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class _Told:
    stuck: Stuck
    since: float
    said_at: float


class StuckPartitions:
    """The stuck partitions of one consumer. Called under the shell's lock, with our own clock's now (ms)."""

    def __init__(self, consumer: Mover, group_id: str) -> None:
        self._consumer = consumer
        self._group_id = group_id
        self._told: dict[Key, _Told] = {}
        #: Failing reads: the offset, since when, and the reader's first message about it.
        self._failed: dict[Key, tuple[int, float, str]] = {}
        #: Since when a partition has had no leader.
        self._leaderless: dict[Key, float] = {}
        #: The assignment whose leader was asked where its log ends.
        self._asked: Assignment | None = None
        #: When a connection last broke because an answer was too large, and the reader's message.
        self._too_large: tuple[float, str] = (float("-inf"), "")

    @property
    def lost(self) -> list[Stuck]:
        """Stuck partitions whose position is lost. Any thread may call this, without the lock."""
        return [one for one in self.found if one.why == Why.POSITION]

    @property
    def found(self) -> list[Stuck]:
        """All stuck partitions, by topic and partition. Any thread may call this, without the lock."""
        return sorted([told.stuck for told in list(self._told.values())], key=lambda one: (one.topic, one.partition))

    # Reports about partitions.

    @given
    def failed(self, key: Key, text: str, now: float, is_forbidden: bool = False) -> None:
        """Reading a partition failed at its next offset; is_forbidden: an ACL forbids it."""
        assignment = self._consumer.assignments.get(key)
        if assignment is None or assignment.stage not in (Stage.ASSIGNING, Stage.ACTIVE):
            return
        if is_forbidden:  # the reader reports it once, and it lasts until READ is granted
            at = assignment.fetch_from
            self._tell(key, Why.UNREADABLE, at, forbidden(*key, at, text), now)
            return
        offset, since, first_text = self._failed.get(key, (-1, 0.0, ""))
        if offset != assignment.fetch_from:
            self._failed[key] = (assignment.fetch_from, now, text)
            self._consumer.warn(f"{key[0]} [{key[1]}]: {text}")
        elif now >= since + STUCK_AFTER_MS and not assignment.buffer.size:  # what is ahead of it is delivered first
            text = unreadable(*key, offset, first_text, self._group_id)
            self._tell(key, Why.UNREADABLE, offset, text, now)

    @given
    def too_large(self, text: str, now: float) -> None:
        """A connection broke because an answer was too large for the reader; the partition is unknown."""
        self._too_large = (now, text)

    def leaders(self, topics: Mapping[str, TopicInfo], now: float) -> None:
        """The cluster reported which partitions have no leader."""
        without = {
            (topic, partition)
            for topic, info in topics.items()
            for partition in info.leaderless
            if (topic, partition) in self._consumer.assignments
        }
        self._leaderless = {key: self._leaderless.get(key, now) for key in without}
        for key in [key for key, told in self._told.items() if told.stuck.why == Why.NO_LEADER and key not in without]:
            self._goes_on(key, now)

    def position_lost(self, key: Key, offset: int, text: str, now: float) -> None:
        """The group's position is invalid in the partition's present log."""
        self._tell(key, Why.POSITION, offset, text, now)

    def no_transaction(self, assignment: Assignment, text: str, now: float) -> None:
        """It can't be processed in transactions at present (M2)."""
        self._tell(assignment.key, Why.TRANSACTION, assignment.fetch_from, text, now)

    def _look_at_room(self, key: Key, assignment: Assignment, now: float) -> None:
        told, at = self._told.get(key), assignment.tracker.done.stable + 1
        if assignment.lease.held and is_out_of_room(assignment):
            self._tell(key, Why.NO_ROOM, at, self._out_of_room(assignment, at), now)
        elif told is not None and told.stuck.why == Why.NO_ROOM:
            self._goes_on(key, now)

    def _out_of_room(self, assignment: Assignment, at: int) -> str:
        (topic, partition), most = assignment.key, assignment.lease.most_intervals
        return (
            f"{topic} [{partition}]: done beyond gaps is as much as the log keeps ({most:,} intervals, the topic's "
            f"mark included). Nothing more of it is delivered until offset {at} is done or given back; then it "
            "continues. Nothing is lost; what is done beyond that would come again after a crash. Call done() in "
            f"order, or raise the limit: kafka-marshal group {quote(self._group_id)} --set max_individual_commits=N"
        )

    def has_transactions(self, key: Key, now: float) -> None:
        """It can be processed in transactions again."""
        if (told := self._told.get(key)) is not None and told.stuck.why == Why.TRANSACTION:
            self._goes_on(key, now)

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget partitions that are no longer ours, or whose positions an admin has set."""
        for key in keys:
            self._told.pop(key, None)
            self._failed.pop(key, None)
            self._leaderless.pop(key, None)

    def let_go(self, key: Key) -> None:
        """An assignment has ended: forget it, unless its position is lost, which blocks every member of the group."""
        if (told := self._told.get(key)) is None or told.stuck.why != Why.POSITION:
            self.forget([key])

    # Every heartbeat interval.

    def look(self, now: float, drained_at: float) -> None:
        """Check for stuck partitions. drained_at: when a read last took all messages that had arrived."""
        for key, assignment in self._consumer.assignments.items():
            told = self._told.get(key)
            if told is not None and assignment.fetch_from > told.stuck.offset and told.stuck.why not in _OWN_END:
                self._goes_on(key, now)
            self._look_at_room(key, assignment, now)
            if not assignment.over:
                self._look_at(key, assignment, now, drained_at)
        for told in self._told.values():
            if now >= told.said_at + SAID_EVERY_MS:
                told.said_at = now
                self._say(f"{told.stuck.text} (so for {(now - told.since) / 60_000:.0f} minutes)")

    def _look_at(self, key: Key, assignment: Assignment, now: float, drained_at: float) -> None:
        at = assignment.fetch_from
        if now >= self._leaderless.get(key, now) + SILENT_AFTER_MS:
            self._tell(key, Why.NO_LEADER, at, self._no_leader(key), now)
            return
        end = max(assignment.watch.log_end or 0, assignment.watch.asked_end)
        if assignment.buffer.is_given_up:
            assignment.watch.quiet = (at, now)
            return
        if assignment.watch.quiet is None or assignment.watch.quiet[0] != at:
            assignment.watch.asked_at = now  # it has moved: the log end known from the reader is recent
            assignment.watch.quiet = (at, now)
            return
        if end <= at:
            assignment.watch.quiet = (at, now)
            self._ask(assignment, now, drained_at)
            return
        since, told = assignment.watch.quiet[1], self._told.get(key)
        if assignment.buffer.size or assignment.user_paused or assignment.stage is not Stage.ACTIVE:
            return
        broken_at, text = self._too_large
        if now < broken_at + TOO_LARGE_FOR_MS and drained_at >= since + STUCK_AFTER_MS:
            self._tell(key, Why.TOO_LARGE, at, larger(*key, at, text, self._group_id), now)
        elif drained_at >= since + SILENT_AFTER_MS and (told is None or told.stuck.why == Why.SILENT):
            assignment.watch.quiet = (at, now)
            self._tell(key, Why.SILENT, at, self._silent(key, at, end), now)
            # The reader may never resume by itself, for example after a change of leader.
            self._consumer.outbox.add(StartFetch(self._consumer.number, key, at))

    def _ask(self, assignment: Assignment, now: float, drained_at: float) -> None:
        """Ask the leader whether its log holds more than the reader knows: one partition at a time, each seldom."""
        is_read = (
            drained_at >= now - SILENT_AFTER_MS and assignment.stage is Stage.ACTIVE and not assignment.buffer.size
        )
        if self._asked is not None and not self._asked.over and now < self._asked.watch.asked_at + SAID_EVERY_MS:
            return
        if is_read and not assignment.user_paused and now >= assignment.watch.asked_at + SILENT_AFTER_MS:
            assignment.watch.asked_at, self._asked = now, assignment
            self._consumer.positions.look_up(assignment)

    def answered(self, assignment: Assignment, end: int) -> None:
        """The leader reported where the log ends."""
        assignment.watch.asked_end = end
        if assignment is self._asked:
            self._asked = None

    # Reporting.

    def _tell(self, key: Key, why: Why, offset: int, text: str, now: float) -> None:
        told = self._told.get(key)
        if told is not None and (told.stuck.why, told.stuck.offset) == (why, offset):
            return
        self._told[key] = _Told(Stuck(*key, offset, str(why), text), now if told is None else told.since, now)
        self._say(text)
        if why in self._consumer.settings.raises:
            kind = PositionLostError if why is Why.POSITION else PartitionStuckError
            self._consumer.errors.append(kind(text, topic=key[0], partition=key[1], offset=offset))

    def _say(self, text: str) -> None:
        self._consumer.outbox.add(Warn(text, is_error=True))

    def _goes_on(self, key: Key, now: float) -> None:
        told = self._told.pop(key)
        self._failed.pop(key, None)
        self._consumer.warn(f"{key[0]} [{key[1]}]: goes on, after {(now - told.since) / 1000:.0f} s ({told.stuck.why})")

    @staticmethod
    def _silent(key: Key, offset: int, end: int) -> str:
        return (
            f"{key[0]} [{key[1]}]: nothing has come for {SILENT_AFTER_MS / 1000:.0f} s, though the log holds offsets "
            f"{offset} to {end - 1}. Nothing is lost; it is fetched again, and continues by itself. Is a transaction "
            "open there (kafka-marshal check names it)? Can the broker that leads this partition be reached from here, "
            "is the group throttled by a quota?"
        )

    @staticmethod
    def _no_leader(key: Key) -> str:
        return (
            f"{key[0]} [{key[1]}]: has had no leader for {SILENT_AFTER_MS / 1000:.0f} s: nobody can read or write it. "
            "Nothing of it is handed out until one is elected; then it goes on by itself. Are brokers with a replica "
            "of it down? (kafka-topics --describe --unavailable-partitions names them)"
        )


def unreadable(topic: str, partition: int, offset: int, text: str, group_id: str) -> str:
    """The message for a corrupt batch; text is the reader's message."""
    return (
        f"{topic} [{partition}]: offset {offset} can't be read: {text}. From there on nothing of this partition is "
        "handed out; nothing is lost, and other partitions go on. If the brokers' copies are all so, leave out "
        f"what can't be read: kafka-marshal skip {quote(group_id)} {topic}:{partition} (it finds the next offset that "
        "can be, and says how many are left out)"
    )


def unrepresentable(topic: str, partition: int, offset: int, stamp: int, group_id: str) -> str:
    """The message for a record whose timestamp (ms) Spark and datetime can't represent."""
    return (
        f"{topic} [{partition}]: offset {offset} has the timestamp {stamp} ms, beyond the year 9999 or before the year "
        "1, which Spark and Python's datetime can't represent (a producer that counts nanoseconds?). With claimed "
        f"batches, handle what lies before it: foreach_batch(fn, until={{({topic!r}, {partition}): {offset}}}); then "
        f"leave the record out: kafka-marshal skip {quote(group_id)} {topic}:{partition}. The stream source reads it, "
        "with timestamp null"
    )


def forbidden(topic: str, partition: int, offset: int, text: str) -> str:
    """The message for a partition that an ACL forbids to read; text names the missing right."""
    return (
        f"{topic} [{partition}]: this worker may not read it, from offset {offset} on: {text}. Nothing of it "
        "is handed out and nothing is lost; it goes on once it is allowed"
    )


def larger(topic: str, partition: int, offset: int, text: str, group_id: str) -> str:
    """The message for an answer that is larger than the reader may receive; text is the reader's message."""
    return (
        f"{topic} [{partition}]: what comes at offset {offset}, or beside it from the same broker, is larger than this "
        f"reader may receive: {text}. Nothing of this partition is handed out; nothing is lost. Raise "
        "receive.message.max.bytes in the config, or leave the record out: kafka-marshal skip "
        f"{quote(group_id)} {topic}:{partition} --to {offset + 1}"
    )
