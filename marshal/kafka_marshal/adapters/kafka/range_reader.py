"""Reads one range of offsets, once, from its first to its last: what a Spark executor does for the stream source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, cast

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as KafkaMessage
from confluent_kafka import TopicPartition as KafkaPartition

from kafka_marshal.adapters.kafka import settings
from kafka_marshal.adapters.kafka.errors import LOGGER, Troubles, fault_kind, marshal_error
from kafka_marshal.adapters.kafka.readers import Reading
from kafka_marshal.adapters.kafka.settings import Role
from kafka_marshal.engine.work.stuck import STUCK_AFTER_MS, larger, unreadable
from kafka_marshal.errors import KafkaUnavailableError, PartitionStuckError, RangeGoneError, grant
from kafka_marshal.ports import FaultKind, Message
from kafka_marshal.secret import values_of

#: Messages of one step: enough that a step's own cost does not matter, few enough to stay in the processor's caches.
STEP = 10_000

#: Nothing came for so long of a range that is in the log: it is opened again.
DEAF_S = 10.0

#: A wait for messages looks up this often.
WAIT_S = 0.5

_ERROR = KafkaMessage.error


class LogMessage(Message, Protocol):
    """A message as it lies in the log."""

    def timestamp(self) -> tuple[int, int]: ...
    def headers(self) -> list[tuple[str, bytes | None]] | None: ...


def read_range(
    bootstrap_servers: str,
    config: Mapping[str, object],
    topic: str,
    partition: int,
    first: int,
    last: int,
    *,
    timeout_s: float = 60.0,
) -> Iterator[Sequence[LogMessage]]:
    """Messages with offsets first … last (inclusive), in order, in lists of up to 10,000.

    Fewer than there are offsets where Kafka has none (compaction, transactions). ``config``: as for a Marshal;
    ``isolation.level`` must be the one that the range was found with. ``timeout_s``: how long nothing may come.

    Raises:
        RangeGoneError: a part of the range is not in the log (any more): nothing is skipped silently (P9).
        PartitionStuckError: a batch can't be read, or is larger than the client may receive.
        KafkaUnavailableError: no broker answered in time.
    """
    settings.check(config)
    troubles = Troubles(secrets=values_of(config))
    extra = {
        "enable.partition.eof": True,
        # What lies beyond the range is not needed.
        "queued.min.messages": max(1, min(last - first + 1, 100_000)),
        "group.id": "kafka-marshal",
        "logger": troubles,
        "error_cb": troubles,
    }
    own = {name: value for name, value in config.items() if name not in ("logger", "error_cb")}
    properties = settings.properties(Role.DATA, bootstrap_servers, own, extra)
    span = _Span(
        lambda: Reading("range reader", properties, troubles), bootstrap_servers, topic, partition, first, last
    )
    try:
        span.assign()
        yield from span.steps(timeout_s)
    except KafkaException as error:
        raise marshal_error(error, f"reading {topic} [{partition}]", bootstrap_servers, troubles) from error
    finally:
        span.reading.close()


class _Span:
    """One range on its way."""

    def __init__(
        self, client: Callable[[], Reading], bootstrap_servers: str, topic: str, partition: int, first: int, last: int
    ) -> None:
        self._client = client
        self.reading = client()
        self.bootstrap_servers = bootstrap_servers
        self.topic, self.partition, self.last = topic, partition, last
        #: The first offset that has not come yet.
        self.next = first
        #: The last known end of the log, None: unknown.
        self.end: int | None = None
        #: The offset at which reading failed, since when (monotonic), and the client's first error.
        self.failed: tuple[int, float, str] = (-1, 0.0, "")
        #: How often it was opened again since anything came.
        self._tries = 0

    def assign(self) -> None:
        """Read from the first offset that has not come yet."""
        place = KafkaPartition(self.topic, self.partition, self.next)
        self.reading.use(lambda: self.reading.consumer.assign([place]))

    def _listen_again(self) -> None:
        """Nothing comes, though the range is in the log: librdkafka may have stopped fetching for good.

        First the partition is assigned again, then each time a new client reads on.
        """
        self._tries += 1
        what = "read again from there" if self._tries == 1 else "a new client reads on"
        text = "%s [%d]: nothing has come for %g s, from offset %d of %d: %s"
        LOGGER.warning(text, self.topic, self.partition, DEAF_S, self.next, self.last, what)
        if self._tries > 1:
            old, self.reading = self.reading, self._client()
            threading.Thread(target=old.close, daemon=True).start()  # it may be stuck as a whole
        self.assign()

    def steps(self, timeout_s: float) -> Iterator[Sequence[LogMessage]]:
        deadline = time.monotonic() + timeout_s
        listened_at = time.monotonic()
        while self.next <= self.last:
            got = self.reading.read(STEP, WAIT_S)
            messages = self._without_errors(got) if any(map(_ERROR, got)) else got
            if messages:
                wanted = self._wanted(messages)
                if wanted:
                    yield cast("Sequence[LogMessage]", wanted)
                # The caller that took the messages may have been slow.
                deadline = time.monotonic() + timeout_s
                listened_at = time.monotonic()
                self._tries = 0
                continue
            for kind, text in self.reading.troubles.take_faults():
                if kind is FaultKind.TOO_LARGE:
                    raise self._stuck(larger(self.topic, self.partition, self.next, text, "GROUP"))
                if kind in (FaultKind.FATAL, FaultKind.REFUSED):
                    raise KafkaUnavailableError(self._stopped(text))
            if time.monotonic() > deadline and self.next <= self.last:
                raise self._too_late(timeout_s)
            if time.monotonic() > listened_at + DEAF_S and self.next <= self.last:
                self._listen_again()
                listened_at = time.monotonic()

    def _wanted(self, messages: list[KafkaMessage]) -> list[KafkaMessage]:
        newest = messages[-1].offset()
        assert newest is not None
        self.next = max(self.next, newest + 1)
        if newest <= self.last:
            return messages
        return [message for message in messages if (message.offset() or 0) <= self.last]

    def _without_errors(self, got: list[KafkaMessage]) -> list[KafkaMessage]:
        messages = []
        for message in got:
            error = message.error()
            if error is None:
                messages.append(message)
            else:
                self._judge(error, message)
        return messages

    def _judge(self, error: KafkaError, message: KafkaMessage) -> None:
        """The log's end settles what the rest of the range holds (markers of transactions): nothing. Others raise."""
        if error.code() == KafkaError._PARTITION_EOF:
            self.end = message.offset() or 0
            if self.end > self.last:
                self.next = self.end
            return
        kind = fault_kind(error)
        self._note_failure(kind, error.str())
        if kind in (FaultKind.OUT_OF_RANGE, FaultKind.UNKNOWN_TOPIC):
            raise self._gone(error.str())
        if kind in (FaultKind.REFUSED, FaultKind.FATAL):
            raise marshal_error(
                error,
                f"reading {self.topic} [{self.partition}]",
                self.bootstrap_servers,
                self.reading.troubles,
                needs=grant("READ", "topic", [self.topic]),
            )

    def _note_failure(self, kind: FaultKind, text: str) -> None:
        """Raise where reading fails at one offset again and again. (A corrupt batch may throw it out of range.)"""
        offset, since, first_text = self.failed
        is_again = offset == self.next
        if kind is FaultKind.OTHER and not is_again:
            self.failed = (self.next, time.monotonic(), text)
        elif is_again and (kind is FaultKind.OUT_OF_RANGE or time.monotonic() >= since + STUCK_AFTER_MS / 1000):
            raise self._stuck(unreadable(self.topic, self.partition, self.next, first_text, "GROUP"))

    def _stuck(self, text: str) -> PartitionStuckError:
        return PartitionStuckError(
            f"{text}. Nothing of this batch is committed", topic=self.topic, partition=self.partition, offset=self.next
        )

    def _gone(self, why: str) -> RangeGoneError:
        return RangeGoneError(
            f"{self.topic} [{self.partition}]: offsets {self.next} to {self.last} were claimed to be read, but a part "
            f"of them is not in the log any more ({why}). Nothing is skipped silently: nothing of this batch is "
            "committed. Check why retention (or DeleteRecords) was faster than the work; a restart continues "
            "where the log begins now, and the gap is reported",
            gone=[(self.topic, self.partition, self.next, self.last)],
        )

    def _too_late(self, timeout_s: float) -> RangeGoneError | KafkaUnavailableError:
        if self.end is not None:
            return self._gone(f"it ends at {self.end}, and nothing more came for {timeout_s:.0f} s")
        reason = self.reading.troubles.recent()
        why = f" ({reason.str()})" if reason is not None else ""
        return KafkaUnavailableError(
            self._stopped(f"no message from {self.bootstrap_servers} for {timeout_s:.0f} s{why}")
        )

    def _stopped(self, why: str) -> str:
        return (
            f"{self.topic} [{self.partition}]: reading stopped at offset {self.next} of {self.last}: {why}. Nothing of "
            "this batch is committed; it comes again. See whether the brokers run, can be reached from this machine, "
            "and let it in"
        )
