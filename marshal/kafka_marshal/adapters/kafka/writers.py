"""What writes to Kafka: to the coordination topic, to topics of users, and to these in transactions.

All of them are a :class:`Sending`: acks are put aside, a flush survives a fatal error, a close is safe.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as KafkaMessage
from confluent_kafka import TopicPartition as KafkaPartition

from kafka_marshal.adapters import producing, transactions
from kafka_marshal.adapters.kafka.errors import (
    RETRY_CODES,
    UNKNOWN_CODES,
    Troubles,
    configuration_error,
    fault_kind,
    is_forbidden,
    is_of_groups,
    is_refusal,
    kafka_error,
)
from kafka_marshal.adapters.kafka.settings import LARGE_BATCH, SMALL_BATCH
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import DELIVERY_TIMEOUT_MS, Ack, FaultKind, TopicPartition

#: The longest that the first record waits for the first connection; see _warm_up().
WARM_UP_S = 0.05

#: The longest one wait of a flush before the deadline is checked.
FLUSH_SLICE_S = 0.1

#: Shared between threads: acks to be called.
_Due: TypeAlias = deque[Callable[[], object]]

#: What an acknowledgement says of a record.
A = TypeVar("A")

#: librdkafka's answer: (why it was not written, the record; None: it was not even queued).
_Answer: TypeAlias = Callable[[KafkaError | None, KafkaMessage | None], A]

#: librdkafka has no room for a record.
QUEUE_FULL = KafkaError(KafkaError._QUEUE_FULL)


class Sending:
    """An idempotent librdkafka producer, and the acks of what it sends.

    librdkafka's delivery callbacks only put acks aside; they are called from within poll(), flush() and close(), also
    if a full queue makes a sender let librdkafka work to find room.
    """

    #: Completes "The … was closed".
    what = "producer"

    def __init__(
        self,
        settings: dict[str, object],
        troubles: Troubles,
        *,
        delivery_timeout_ms: int,
        producer: Callable[[dict[str, object]], Producer] = Producer,
    ) -> None:
        """Open it; it connects in the background. The first record has a few milliseconds' patience with that."""
        self._troubles = troubles
        self._due: _Due = deque()
        self._closing = threading.Lock()
        self._closed = False
        self._denied = False
        self._counting = threading.Lock()
        #: Records handed to librdkafka that it has not answered for. (Its own count includes what it has to say.)
        self._under_way = 0
        settings = {
            **settings,
            "logger": troubles,
            "message.timeout.ms": delivery_timeout_ms,
            "error_cb": troubles,
        }

        def make() -> Producer:
            try:
                made = producer(settings)
            except (KafkaException, ValueError, TypeError) as error:
                raise configuration_error(error) from error
            return made

        self._make = make
        self._producer = make()
        self._warming = threading.Thread(target=self._warm_up, daemon=True)
        self._warming.start()
        #: Whether a record need not wait for that any more.
        self._is_warm = False

    def _warm_up(self) -> None:
        """Connect before the first produce (on a separate thread, beside a start).

        A record that comes earlier makes it look up the topic before it has its producer id; it then asks for that only
        500 ms later. With this wait of some milliseconds the first record is acknowledged after 15 ms.
        """
        with suppress(KafkaException):  # no broker yet: it retries by itself
            self._producer.cluster_id(WARM_UP_S)

    def _await_warmth(self) -> None:
        if not self._is_warm:
            self._warming.join(WARM_UP_S)
            self._is_warm = True

    def _queue(
        self,
        produce: Callable[[_Answer[None]], None],
        on_ack: Callable[[A], object] | None,
        means: _Answer[A],
    ) -> None:
        """Pass a record to librdkafka. on_ack: due once there is an answer, with what that means."""

        def answered(error: KafkaError | None, message: KafkaMessage | None) -> None:
            if on_ack is not None:
                self._due.append(partial(on_ack, means(error, message)))

        def delivered(error: KafkaError | None, message: KafkaMessage | None) -> None:
            with self._counting:
                self._under_way -= 1
            answered(error, message)

        try:
            try:
                produce(delivered)
            except BufferError:
                # librdkafka's queue is full: let it call back for what is delivered, then try once more.
                self._serve(partial(self._producer.poll, 0))
                produce(delivered)
            with self._counting:
                self._under_way += 1
        except BufferError:
            answered(QUEUE_FULL, None)
        except KafkaException as error:
            answered(kafka_error(error), None)

    def _serve(self, work: Callable[[], object]) -> None:
        """Let librdkafka work. If it raises it has failed for good, which the acks of all records then report."""
        try:
            work()
        except KafkaException as error:
            self._failed(error)
            self._producer.purge()

    def _failed(self, error: KafkaException) -> None:
        """Note what ends the producer for good; raise anything else."""
        cause = kafka_error(error)
        if not cause.fatal():
            raise error
        self._troubles(cause)
        self._denied = self._denied or is_forbidden(cause)

    @property
    def _fatal(self) -> bool:
        return self._troubles.fatal is not None

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve acks that are due; wait for the first up to timeout_s."""
        self._check_open()
        self._serve(partial(self._producer.poll, 0 if self._due else timeout_s))
        self._call()

    def flush(self, timeout_s: float) -> int:
        """Wait for all answers; returns how many records are still under way."""
        self._check_open()
        left = self._flush(timeout_s)
        self._call()
        return left

    def _flush(self, timeout_s: float) -> int:
        """How many records are still under way when all are done, or the time is up.

        Not by Producer.flush: if a fatal error comes up in it, it continues and calls callbacks with an exception set.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_answered() and (left_s := deadline - time.monotonic()) > 0:
            self._serve(partial(self._producer.poll, min(left_s, FLUSH_SLICE_S)))
        self._serve(partial(self._producer.poll, 0))
        return self._left()

    def _left(self) -> int:
        """How many records are under way."""
        return self._under_way

    def _is_answered(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self._left() == 0

    def close(self, timeout_s: float = 0.0) -> None:
        """Flush for up to timeout_s, drop the rest, free the connection. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._warming.join()  # it is in librdkafka, of which nothing is left afterwards
        if self._flush(timeout_s) > 0:
            self._producer.purge()
            self._flush(1.0)  # serves the callbacks of what was purged; nothing is sent any more
        try:
            self._free()
        except KafkaException as error:  # it came up only now; librdkafka has freed everything before it raised
            self._failed(error)
        self._call()

    def _free(self) -> None:
        """Free the connection; nothing is under way."""
        self._producer.close()

    def _call(self) -> None:
        """Call the acks that are due, each once, whichever thread comes first."""
        while True:
            try:
                ack = self._due.popleft()
            except IndexError:
                return
            ack()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"The {self.what} was closed; nothing was sent. Open a new one.")


class KafkaAppender(Sending):
    """An appender over an idempotent librdkafka producer (L1)."""

    what = "appender"

    def __init__(
        self,
        topic: str,
        settings: dict[str, object],
        troubles: Troubles,
        *,
        delivery_timeout_ms: int,
        producer: Callable[[dict[str, object]], Producer] = Producer,
    ) -> None:
        """delivery_timeout_ms: a record that is late is worth nothing; its sender stopped counting on it (L1, T4)."""
        super().__init__(settings, troubles, delivery_timeout_ms=delivery_timeout_ms, producer=producer)
        self._topic = topic

    def append(self, partition: int, value: bytes, on_ack: Callable[[Ack], None] | None = None) -> None:
        self._check_open()
        self._await_warmth()
        self._queue(
            lambda answer: self._producer.produce(self._topic, value, b"", partition, answer), on_ack, self._ack_of
        )

    def _ack_of(self, error: KafkaError | None, message: KafkaMessage | None) -> Ack:
        if error is None:
            offset = None if message is None else message.offset()
            # A retry that found its record written already is acknowledged without the offset (C17).
            return Ack(offset if offset is not None and offset >= 0 else None)
        # Reported for the record, or for the producer as a whole.
        is_denied, reason, text = self._denied or is_forbidden(error), self._troubles.recent(), error.str()
        if message is None:
            if error is QUEUE_FULL:
                text = "the client's queue of records to be sent is full; this one was not sent"
            # A client that failed for good says "fatal error" of all that follows.
            return Ack(None, self._troubles.fatal or text, self._fatal, is_denied)
        if reason is not None and error.code() == KafkaError._MSG_TIMED_OUT:
            text = f"{text} ({reason.str()})"
        elif error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            # Without numbers: the same reason is reported once for all records.
            text = f"{text}: max.message.bytes of {self._topic} is too small; kafka-marshal init --check says what "
            text += "it must be"
        elif self._troubles.fatal is not None:
            text = self._troubles.fatal
        return Ack(None, text, self._fatal or error.fatal(), is_denied, refused=error.code() > 0)


#: The partitioner decides.
ANY_PARTITION = -1

#: The broker takes none of this size.
TOO_LARGE_CODES = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})

#: librdkafka has dropped the record.
CLOSED_CODES = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})

#: What passes by itself, and did not in time.
_TIMEOUT_CODES = RETRY_CODES | {KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND}


class KafkaProducer(Sending):
    """An idempotent producer. After a fatal error it fails what is under way, and begins again with the next record."""

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        on_ack: Callable[[Exception | None], None] | None = None,
    ) -> None:
        self._check_open()
        self._await_warmth()
        self._begin_again()
        size = producing.size_of(value, key, headers)
        # The producer is looked up when it is used: what another thread has given up takes no record.
        self._queue(
            lambda answer: self._producer.produce(topic, value, key, ANY_PARTITION, answer, headers=list(headers)),
            on_ack,
            lambda error, _: None if error is None else self._error(topic, size, error),
        )

    def _begin_again(self) -> None:
        """A producer that has failed for good is replaced once all that it had is answered for."""
        if self._fatal and self._under_way == 0:
            with self._closing:
                if self._fatal:
                    self._producer = self._make()
                    self._denied = False
                    self._troubles.fatal = None

    def _error(self, topic: str, size: int, error: KafkaError) -> Exception:
        if error is QUEUE_FULL:
            return producing.queue_full(topic)
        code, text = error.code(), error.str()
        if self._denied or is_forbidden(error):
            return producing.forbidden(topic, self._troubles.fatal or text)
        if self._fatal or error.fatal():
            return producing.refused(topic, self._troubles.fatal or text, retry=True)
        if code in CLOSED_CODES:
            return producing.closed(topic)
        if code in TOO_LARGE_CODES:
            return producing.too_large(topic, size)
        if code in UNKNOWN_CODES:
            return producing.missing(topic)
        reason = self._troubles.recent()
        if code in _TIMEOUT_CODES or error.retriable() or fault_kind(error) is FaultKind.UNREACHABLE:
            if reason is not None and is_refusal(reason):
                return producing.shut_out(topic, reason.str())
            return self._unacknowledged(topic, text if reason is None else f"{text}; {reason.str()}")
        return producing.refused(topic, text)

    def _unacknowledged(self, topic: str, why: str) -> Exception:
        return producing.unacknowledged(topic, why)


_FENCED_CODES = frozenset(
    {
        KafkaError._FENCED,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
    }
)

_OLD_CODES = frozenset({KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION})

#: The longest one wait for room in the queue before the deadline is checked.
ROOM_SLICE_S = 0.1

#: The longest that init() waits for the first connection (s).
CONNECT_S = 1.0

#: If the offset is refused, the records are waited for this long (s): one of them may be why, and says more.
REASON_S = 0.5


class BatchSize:
    """How large batches of a cluster's transactional producers are.

    The broker refuses a batch as a whole: for a topic whose max.message.bytes is below its default, small records
    could then never be written. After the first refusal new producers have small batches; then a record is refused for
    its own size only.
    """

    def __init__(self) -> None:
        self.are_small = False

    def settings(self, settings: dict[str, object]) -> dict[str, object]:
        """Those of a new producer."""
        is_ours = settings["batch.size"] == LARGE_BATCH
        return {**settings, "batch.size": SMALL_BATCH} if self.are_small and is_ours else settings


class KafkaTransactionalProducer(KafkaProducer):
    """One transactional id, by a librdkafka producer. After a fatal error, or a commit in doubt, it only closes."""

    what = "transactional producer"

    def __init__(
        self,
        transactional_id: str,
        settings: dict[str, object],
        troubles: Troubles,
        *,
        transaction_timeout_ms: int,
        group_metadata: Callable[[str], Any],
        batches: BatchSize,
        producer: Callable[[dict[str, object]], Producer] = Producer,
    ) -> None:
        """group_metadata: of a consumer of a group that never joined."""
        self._id = transactional_id
        #: The input's: metadata of one topic are asked for, not those of a whole cluster.
        self._any_topic = transactional_id.rsplit("/", 2)[-2]
        self._transaction_timeout_ms = transaction_timeout_ms
        self._group_metadata = group_metadata
        self._batches = batches
        settings = batches.settings(settings)
        self._has_large_batches = settings["batch.size"] == LARGE_BATCH
        #: It is of no use: another one writes what it can't.
        self._is_outdated = False
        delivery_timeout_ms = transactions.delivery_timeout_ms(DELIVERY_TIMEOUT_MS, transaction_timeout_ms)
        self._delivery_timeout_s = delivery_timeout_ms / 1000
        settings = {
            **settings,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": transaction_timeout_ms,
            "delivery.report.only.error": True,
            # Requests are given up before the transaction is, as librdkafka demands.
            "socket.timeout.ms": min(int(str(settings["socket.timeout.ms"])), delivery_timeout_ms),
        }
        troubles.keep_ends_quiet()
        super().__init__(settings, troubles, delivery_timeout_ms=delivery_timeout_ms, producer=producer)
        self._is_open = False
        #: Of the transaction: its topics, why the first record was not written, whether librdkafka dropped any.
        self._topics: set[str] = set()
        self._lost: Exception | None = None
        self._is_purged = False
        #: A commit was sent, and it is not known whether it took place.
        self._in_doubt = False

    def _warm_up(self) -> None:
        """Connect to a broker, not only to a bootstrap address, whose connection ends at once (on a separate thread).

        An init() that comes earlier finds no broker, and asks for its coordinator 500 ms later.
        """
        until = time.monotonic() + CONNECT_S
        while not self._closed and time.monotonic() < until:
            with suppress(KafkaException):
                if self._producer.list_topics(self._any_topic, WARM_UP_S).orig_broker_id >= 0:
                    return

    def init(self, timeout_s: float) -> None:
        self._check_open()
        self._warming.join(timeout_s)
        doing = "taking over the transactional id"
        self._call_broker(lambda: self._producer.init_transactions(timeout_s), partial(self._unfinished, doing))

    def begin(self) -> None:
        self._check_open()
        if self._is_open or self._in_doubt:
            raise transactions.not_in_order(self._id, "a transaction is open")
        self._call_broker(self._producer.begin_transaction, partial(self._unfinished, "beginning a transaction of"))
        self._is_open, self._lost, self._is_purged = True, None, False
        self._topics.clear()

    def send(  # type: ignore[override]
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
    ) -> None:
        self._check_in_transaction()
        self._topics.add(topic)
        place = ANY_PARTITION if partition is None else partition
        copied: Any = list(headers) if headers else None
        deadline = None
        while True:
            try:
                # One callback for all, and for failures only: a transaction has thousands of records.
                return self._producer.produce(topic, value, key, place, self._refused, headers=copied)
            except BufferError:
                deadline = deadline or time.monotonic() + self._delivery_timeout_s
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return self._note(topic, producing.size_of(value, key, headers), QUEUE_FULL)
                self._serve(partial(self._producer.poll, min(left_s, ROOM_SLICE_S)))
            except KafkaException as error:
                return self._note(topic, producing.size_of(value, key, headers), kafka_error(error))

    def _refused(self, error: KafkaError | None, message: Any) -> None:
        """A record was not written (librdkafka's delivery callback)."""
        if error is None:
            return
        if error.code() in CLOSED_CODES:
            self._is_purged = True
        else:
            size = producing.size_of(message.value(), message.key(), message.headers() or ())
            self._note(message.topic() or "", size, error)

    def _note(self, topic: str, size: int, error: KafkaError) -> None:
        """Keep why the first record was not written."""
        if error.code() in TOO_LARGE_CODES and self._has_large_batches and size < LARGE_BATCH:
            self._batches.are_small = self._is_outdated = True
            why = f"topic {topic!r} allows no batch of this size, and the next try has smaller ones"
            self._lost = transactions.failed(self._id, why, retry=True)
        if self._lost is None:
            is_fenced = error.code() in _FENCED_CODES
            self._lost = self._fenced(error) if is_fenced else self._error(topic, size, error)

    def _unacknowledged(self, topic: str, why: str) -> Exception:
        return self._not_committed(f"a record for topic {topic!r} was not acknowledged: {why}")

    def _begin_again(self) -> None:
        """A new librdkafka producer would fence its successor: only a new init() may make one."""

    def _left(self) -> int:
        return len(self._producer)

    def _is_answered(self) -> bool:
        # After a failure librdkafka holds the other records back until the transaction is aborted.
        return (self._lost is not None and not self._closed) or super()._is_answered()

    def commit(self, group_id: str, key: TopicPartition, offset: int, metadata: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._check_in_transaction()
        where, group = [KafkaPartition(*key, offset, metadata)], self._group_metadata(group_id)

        def send_offset() -> None:
            self._producer.send_offsets_to_transaction(where, group, _left_s(deadline))

        is_sent = False
        with suppress(KafkaException):
            send_offset()  # while the records are under way
            is_sent = True
        # Here, since from a commit that is under way there is no way back.
        left = self._flush(_left_s(deadline) if is_sent else min(REASON_S, _left_s(deadline)))
        self._check_lost()
        if self._is_purged or not is_sent:  # once more: now it says why
            self._call_broker(send_offset, self._not_committed, group_id=group_id, topic=key[0])
            left = self._flush(_left_s(deadline))
            self._check_lost()
        if left > 0 and not self._fatal:
            raise self._not_committed(f"{left:,} records have no answer")
        if self._is_purged:
            raise transactions.failed(self._id, "records were not sent", retry=True)
        # Whatever this ends with, but success: the brokers may have it.
        self._in_doubt = True
        self._call_broker(
            lambda: self._producer.commit_transaction(_left_s(deadline)), partial(transactions.in_doubt, self._id)
        )
        self._in_doubt = self._is_open = False

    def _check_lost(self) -> None:
        if self._lost is not None and not self._fatal:
            raise self._lost

    def abort(self, timeout_s: float) -> None:
        self._check_open()
        if self._in_doubt:
            raise transactions.undecided(self._id)
        if self._is_outdated and self._lost is not None:
            raise self._lost
        if self._is_open:
            late = partial(self._unfinished, "aborting a transaction of")
            self._call_broker(lambda: self._producer.abort_transaction(timeout_s), late)
            self._is_open = False

    def _free(self) -> None:
        """By the last reference: Producer.close() would first abort the transaction, and wait for a broker to do it."""
        del self._producer

    def _check_open(self) -> None:
        if self._closed:
            raise transactions.closed()

    def _check_in_transaction(self) -> None:
        self._check_open()
        if not self._is_open or self._in_doubt:
            raise transactions.not_in_order(self._id, "no transaction is open")

    # Errors.

    def _unfinished(self, doing: str, why: str) -> Exception:
        return transactions.unfinished(self._id, doing, why)

    def _not_committed(self, why: str) -> Exception:
        return transactions.not_committed(self._id, why)

    def _call_broker(
        self, call: Callable[[], object], late: Callable[[str], Exception], *, group_id: str = "", topic: str = ""
    ) -> None:
        """Call librdkafka; late: the error if no answer came in time."""
        try:
            call()
        except KafkaException as error:
            raise self._translated(kafka_error(error), late, group_id, topic) from error

    def _fenced(self, error: KafkaError) -> Exception:
        return transactions.fenced(self._id, self._troubles.without_secrets(error).str())

    def _translated(self, error: KafkaError, late: Callable[[str], Exception], group_id: str, topic: str) -> Exception:
        code, text = error.code(), self._troubles.without_secrets(error).str()
        if code in _FENCED_CODES:
            return self._fenced(error)
        if is_forbidden(error) or is_of_groups(error):
            return self._forbidden(code, text, group_id, topic)
        if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return transactions.timeout_too_high(self._transaction_timeout_ms)
        if code in _OLD_CODES:
            return transactions.old_brokers(text)
        if error.txn_requires_abort():
            return transactions.failed(self._id, text, retry=True)
        if error.retriable() or code in RETRY_CODES or fault_kind(error) is FaultKind.UNREACHABLE:
            reason = self._troubles.recent()
            if reason is not None and is_refusal(reason):
                return transactions.shut_out(self._id, reason.str())
            return late(text if reason is None else f"{text}; {reason.str()}")
        return transactions.failed(self._id, text, retry=error.fatal())

    def _forbidden(self, code: int, text: str, group_id: str, topic: str) -> Exception:
        if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            # What could not be added to the transaction is purged by librdkafka.
            if self._is_purged or not topic:
                return transactions.outputs_forbidden(sorted(self._topics), text)
            return transactions.input_forbidden(topic, text)
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return transactions.group_forbidden(group_id, text)
        return transactions.forbidden(self._id, text)


def _left_s(deadline: float) -> float:
    """Seconds left; librdkafka takes none for no limit."""
    return max(0.001, deadline - time.monotonic())
