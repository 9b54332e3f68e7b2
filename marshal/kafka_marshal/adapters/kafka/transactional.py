"""Produces to topics of users in transactions that also commit the offset of an input partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from kafka_marshal.adapters import producing, transactions
from kafka_marshal.adapters.kafka.errors import (
    RETRY_CODES,
    Troubles,
    fault_kind,
    is_forbidden,
    is_of_groups,
    is_refusal,
    kafka_error,
)
from kafka_marshal.adapters.kafka.producer import ANY_PARTITION, CLOSED_CODES, TOO_LARGE_CODES, KafkaProducer
from kafka_marshal.adapters.kafka.sending import WARM_UP_S
from kafka_marshal.adapters.kafka.settings import LARGE_BATCH, SMALL_BATCH
from kafka_marshal.ports import DELIVERY_TIMEOUT_MS, FaultKind, TopicPartition

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


class Batches:
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
        batches: Batches,
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
                    return self._note(topic, producing.size_of(value, key, headers), None)
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

    def _note(self, topic: str, size: int, error: KafkaError | None) -> None:
        """Keep why the first record was not written; error: None: the queue stayed full."""
        if error is not None and error.code() in TOO_LARGE_CODES and self._has_large_batches and size < LARGE_BATCH:
            self._batches.are_small = self._is_outdated = True
            why = f"topic {topic!r} allows no batch of this size, and the next try has smaller ones"
            self._lost = transactions.failed(self._id, why, retry=True)
        if self._lost is None:
            is_fenced = error is not None and error.code() in _FENCED_CODES
            self._lost = self._fenced(error) if is_fenced and error else self._error(topic, size, error)

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
