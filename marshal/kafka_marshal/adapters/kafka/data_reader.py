"""Fetches the user's messages from the partitions we hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as KafkaMessage
from confluent_kafka import TopicPartition as KafkaPartition

from kafka_marshal.adapters.kafka.errors import LOGGER, Troubles, fault_kind, is_of_groups, marshal_error
from kafka_marshal.adapters.kafka.reading import SHORTEST_WAIT_S, WARM_UP_TIMEOUT_S, Reading, partition_of
from kafka_marshal.adapters.kafka.topic_ids import TopicIds
from kafka_marshal.ports import DataFault, FaultKind, Message, TopicPartition

_ERROR = KafkaMessage.error


#: When a look-up of a topic that held up the reading thread, and had no answer, is due again.
WARM_UP_AGAIN_S = 10.0

#: How old a cached log end may grow while messages come: fresh enough to measure lag by, cheap enough not to matter.
LOOK_INTERVAL_S = 0.5


#: ``list_topics`` of a consumer, or of an admin client.
ListTopics = Callable[..., Any]


class KafkaDataReader:
    """A data reader over one librdkafka consumer that never joins a group and never commits."""

    def __init__(
        self, group_id: str, settings: dict[str, object], troubles: Troubles, list_topics: ListTopics | None = None
    ) -> None:
        """Open it; nothing is fetched before assign().

        list_topics: of a client that is connected already, and may see what this one may.
        """
        self._list_topics = list_topics
        settings = {**settings, "logger": troubles, "group.id": group_id, "error_cb": troubles}
        self._topic_ids = TopicIds(settings)
        troubles.takes_line = self._topic_ids.take
        self._bootstrap = str(settings["bootstrap.servers"])
        self._reading = Reading("data reader", settings, troubles)
        #: Where each partition was assigned.
        self._assigned: dict[TopicPartition, int] = {}
        #: Partitions that the commands carried out last were about.
        self._changed: set[TopicPartition] = set()
        self._log_ends: dict[TopicPartition, int] = {}
        #: Ends that reads have reached and no caller has taken.
        self._ends: dict[TopicPartition, int] = {}
        #: Partitions whose unknown log end a waiting command will look up.
        self._asked_for: set[TopicPartition] = set()
        #: Topics assigned whose leaders librdkafka may not know, and when we made it look them up (monotonic).
        self._new_topics: set[str] = set()
        #: Topics that were looked up without an answer, and when.
        self._unanswered: dict[str, float] = {}
        self._reading.before_wait = self._warm_up_new_topics
        self._reading.is_assigned = lambda: bool(self._assigned)
        self._next_look = 0.0
        #: Messages came since the last look-up of log ends. (One is due after the last of them too, if no more come.)
        self._look_owed = False

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        if positions:
            self._reading.enqueue_command(partial(self._reassign, dict(positions)))

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.enqueue_command(partial(self._remove, list(dict.fromkeys(partitions))))

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.enqueue_command(partial(self._set_paused, list(dict.fromkeys(partitions)), True))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.enqueue_command(partial(self._set_paused, list(dict.fromkeys(partitions)), False))

    # Commands, carried out with the consumer free.

    def _reassign(self, positions: dict[TopicPartition, int]) -> None:
        self._remove(list(positions))
        new_topics = self._new_topics_of(positions)
        try:
            self._reading.consumer.incremental_assign(
                [KafkaPartition(topic, partition, offset) for (topic, partition), offset in positions.items()]
            )
        except KafkaException as error:
            LOGGER.error("%s", marshal_error(error, f"assigning {_names(positions)}", self._bootstrap))
            return
        self._assigned.update(positions)
        self._changed.update(positions)
        self._new_topics.update(new_topics)

    def _new_topics_of(self, positions: Iterable[TopicPartition]) -> set[str]:
        """The topics of these whose leaders librdkafka does not know: it knows only those that it reads from.

        (Of a partition that such a topic has got since, it learns within a second, and no question makes it sooner.)
        """
        due = time.monotonic() - WARM_UP_AGAIN_S
        found = {topic for topic, _ in positions if self._unanswered.get(topic, due) <= due}
        return found.difference(topic for topic, _ in self._assigned) if found else found

    def _warm_up_new_topics(self) -> None:
        """Have the leaders of newly assigned topics looked up now (on the reading thread: it may wait for the broker).

        By itself librdkafka asks for a topic it does not know once a second: a first record would come a second late.
        """
        if self._new_topics:
            names, self._new_topics = self._new_topics, set()
            # If no broker answers, not again and again.
            self._unanswered.update(dict.fromkeys(names, time.monotonic()))
            self._warm_up(names)

    def _remove(self, partitions: list[TopicPartition]) -> None:
        known = [key for key in partitions if key in self._assigned]
        if known:
            for key in known:
                del self._assigned[key]
                self._log_ends.pop(key, None)
            self._changed.update(known)
            self._reading.consumer.incremental_unassign([KafkaPartition(*key) for key in known])

    def _set_paused(self, partitions: list[TopicPartition], paused: bool) -> None:
        known = [KafkaPartition(*key) for key in partitions if key in self._assigned]
        if known:
            (self._reading.consumer.pause if paused else self._reading.consumer.resume)(known)

    # Reading.

    def read(self, max_messages: int, timeout_s: float) -> tuple[list[Message], list[DataFault]]:
        messages = self._reading.read(max_messages, timeout_s, self._settle)
        faults: list[DataFault] = []
        if recreated := self._topic_ids.take_recreated():
            # Some may be of the old topic still: they are dropped, as their positions mean nothing any more.
            messages = [message for message in messages if message.topic() not in recreated]
            faults.extend(DataFault(FaultKind.RECREATED, topic, None, new) for topic, new in sorted(recreated.items()))
            self._reading.enqueue_command(lambda: self._remove([key for key in self._assigned if key[0] in recreated]))
        if any(map(_ERROR, messages)):
            messages = _without_errors(messages, faults, self._ends)
        if self._reading.troubles.pending:
            faults.extend(DataFault(kind, None, None, text) for kind, text in self._reading.troubles.take_faults())
        if messages:
            self._look_owed = True
        if self._look_owed and time.monotonic() >= self._next_look:
            self._reading.enqueue_command(self._look_at_log_ends)
        return cast("list[Message]", messages), faults

    def take_ends(self) -> dict[TopicPartition, int]:
        ends, self._ends = self._ends, {}
        return ends

    def _settle(self, messages: list[KafkaMessage], serve: Callable[[], None]) -> list[KafkaMessage]:
        """Carry out commands that came in while these messages were taken; drop what may be of an older assignment."""
        self._changed.clear()
        serve()
        changed = frozenset(self._changed)
        if not changed:
            return messages
        # Assigned (again) meanwhile: a message may have been fetched before or after; it is fetched again.
        if again := {key: self._assigned[key] for key in changed if key in self._assigned}:
            self._reassign(again)
        return [m for m in messages if (m.topic(), m.partition()) not in changed]

    def partition_counts(self, topics: Iterable[str], timeout_s: float) -> dict[str, int]:
        names = list(topics)
        if self._list_topics is None:
            return _counted(self._reading.consumer.list_topics, names, timeout_s)
        # This client, which is new, connects meanwhile: before it is assigned anything, mostly.
        self._reading.warm_up(partial(self._warm_up, names))
        return _counted(self._list_topics, names, timeout_s)

    def _warm_up(self, names: Iterable[str]) -> None:
        """Connect, and learn the leaders of these topics.

        By a question about one partition, whose leader is looked up with those of all. (list_topics would do, too, but
        creates an object for each partition while it holds the interpreter's lock; 900 can trigger a garbage
        collection.)
        """
        deadline = time.monotonic() + WARM_UP_TIMEOUT_S
        for topic in names:
            with contextlib.suppress(KafkaException):  # it retries by itself
                left_s = max(SHORTEST_WAIT_S, deadline - time.monotonic())
                self._reading.consumer.get_watermark_offsets(KafkaPartition(topic, 0), timeout=left_s)
                self._unanswered.pop(topic, None)

    def high_watermark(self, topic: str, partition: int) -> int | None:
        self._reading.check_open()
        key = (topic, partition)
        if key not in self._log_ends and key in self._assigned and key not in self._asked_for:
            # This one alone: a caller asks for the ends of a thousand new partitions one after the other.
            self._asked_for.add(key)
            self._reading.enqueue_command(partial(self._look_at_log_end, key))
        return self._log_ends.get(key)

    def look_at_ends(self) -> None:
        if time.monotonic() >= self._next_look:
            self._reading.enqueue_command(self._look_at_log_ends)

    def _look_at_log_ends(self) -> None:
        self._look_owed = False
        self._next_look = time.monotonic() + LOOK_INTERVAL_S
        for key in self._assigned:
            self._look_at_log_end(key)

    def _look_at_log_end(self, key: TopicPartition) -> None:
        self._asked_for.discard(key)
        if key not in self._assigned:
            return  # unassigned since it was asked for
        at = KafkaPartition(*key)
        try:
            _, high = self._reading.consumer.get_watermark_offsets(at, cached=True)
            (position,) = self._reading.consumer.position([at])
        except KafkaException:  # it never asked a broker about this partition
            return
        # A fetch may bring records that the end reported with it does not count yet.
        known = max(high, position.offset)
        if known >= 0:
            self._log_ends[key] = known

    def close(self) -> None:
        self._reading.close()


def _without_errors(
    messages: list[KafkaMessage], faults: list[DataFault], ends: dict[TopicPartition, int]
) -> list[KafkaMessage]:
    real = []
    for message in messages:
        error = message.error()
        if error is None:
            real.append(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            ends[cast("str", message.topic()), cast("int", message.partition())] = cast("int", message.offset())
        elif not is_of_groups(error):
            faults.append(DataFault(fault_kind(error), message.topic(), partition_of(message), error.str()))
    return real


def _names(partitions: Iterable[TopicPartition]) -> str:
    return ", ".join(f"{topic} [{partition}]" for topic, partition in sorted(partitions))


def _counted(list_topics: ListTopics, names: list[str], timeout_s: float) -> dict[str, int]:
    """How many partitions those of these topics have that are there (*blocking*)."""
    deadline = time.monotonic() + timeout_s
    found = {}
    with contextlib.suppress(KafkaException):  # the caller that asks for the ids gets the error, too
        for topic in names:
            described = list_topics(topic, timeout=max(0.001, deadline - time.monotonic())).topics[topic]
            if described.error is None:
                found[topic] = len(described.partitions)
    return found
