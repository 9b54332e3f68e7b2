"""Why a transaction was not committed: what happened, what it means, what to do. The same for each cluster."""

from __future__ import annotations

from kafka_marshal.errors import (
    AuthenticationError,
    AuthorizationError,
    ClosedError,
    ConfigurationError,
    KafkaUnavailableError,
    TransactionError,
    TransactionFencedError,
    grant,
)
from kafka_marshal.ports import TopicPartition

_COMES_AGAIN = "Nothing of it is visible to read_committed readers, and its messages come again."
_LOOK = "Its messages come again unless Kafka's committed offset shows that it was committed."

#: A record is given up this much earlier than its transaction (ms).
_EARLIER_MS = 1_000


def delivery_timeout_ms(longest_ms: int, transaction_timeout_ms: int) -> int:
    """How long a record of a transaction may take: no longer than others, and less than the transaction."""
    return min(longest_ms, max(transaction_timeout_ms // 2, transaction_timeout_ms - _EARLIER_MS))


def fenced(transactional_id: str, why: str) -> TransactionFencedError:
    """A newer producer, or the broker, has ended it."""
    return TransactionFencedError(
        f"The producer of transactional id {transactional_id!r} is fenced ({why}): another member has taken the "
        f"partition over, or the transaction took longer than Transactions(timeout=…) and the broker ended it. {_LOOK} "
        "If it is frequent, handle fewer messages in a transaction, or raise the timeout."
    )


def failed(transactional_id: str, why: str, *, retry: bool) -> TransactionError:
    """The brokers refused: nothing is committed, or init() of a new producer decides."""
    return TransactionError(
        f"A transaction of {transactional_id!r} failed: {why}. {_LOOK} "
        + ("It is tried again." if retry else "Correct what the reason names; the broker's log may say more."),
        retry=retry,
    )


def in_doubt(transactional_id: str, why: str) -> KafkaUnavailableError:
    """A commit without an answer."""
    return KafkaUnavailableError(
        f"A transaction of {transactional_id!r} was to be committed, and no answer came in time ({why}). It may be "
        f"committed, or come to be. {_LOOK} Check that the brokers run."
    )


def not_committed(transactional_id: str, why: str) -> KafkaUnavailableError:
    """The brokers could not be reached before the commit was sent."""
    return KafkaUnavailableError(
        f"A transaction of {transactional_id!r} was not committed: no answer from the brokers in time ({why}). "
        f"{_COMES_AGAIN} Check that the brokers run and that all partitions have leaders."
    )


def unfinished(transactional_id: str, doing: str, why: str) -> KafkaUnavailableError:
    """init or abort had no answer in time."""
    return KafkaUnavailableError(
        f"While {doing} {transactional_id!r}: no answer from the brokers in time ({why}). A transaction that is open "
        "stays open, and holds back read_committed readers until their timeout. Check that the brokers run, that "
        "bootstrap_servers names their listener, and that __transaction_state has leaders."
    )


def shut_out(transactional_id: str, why: str) -> AuthenticationError:
    """The brokers do not let us in."""
    return AuthenticationError(
        f"The producer of transactional id {transactional_id!r} can't reach the brokers: the connection was refused "
        f"({why}). {_LOOK} Check security.protocol, the ssl.* and sasl.* settings and that the port is the listener "
        "for that protocol."
    )


def undecided(transactional_id: str) -> TransactionError:
    """abort() of what may be committed."""
    return TransactionError(
        f"A transaction of {transactional_id!r} can't be aborted: it may be committed. {_LOOK} Close this producer; "
        "init() of a new one decides it.",
        retry=True,
    )


def not_in_order(transactional_id: str, why: str) -> TransactionError:
    """Calls in the wrong order."""
    return TransactionError(
        f"The producer of transactional id {transactional_id!r} can't do that now: {why}. Nothing was sent. Call "
        "init() once, then begin(), send() and commit() or abort(), one after the other.",
        retry=False,
    )


def closed() -> ClosedError:
    """After close()."""
    return ClosedError("The transactional producer was closed; nothing was sent. Open a new one.")


def forbidden(transactional_id: str, why: str) -> AuthorizationError:
    """The right to the transactional id is missing."""
    group_id = transactional_id.rsplit("/", 2)[0]
    return AuthorizationError(
        f"The cluster forbids the use of transactional id {transactional_id!r} ({why}). {_COMES_AGAIN} "
        f"{grant('WRITE', 'transactional-id', [f'{group_id}/'], prefix=True)}."
    )


def group_forbidden(group_id: str, why: str) -> AuthorizationError:
    """The right to commit for the group is missing."""
    return AuthorizationError(
        f"The cluster forbids to commit offsets for the consumer group {group_id!r} ({why}). {_COMES_AGAIN} "
        f"{grant('READ', 'group', [group_id])}."
    )


def input_forbidden(topic: str, why: str) -> AuthorizationError:
    """The right to the topic whose offset is to be committed is missing."""
    return AuthorizationError(
        f"The cluster forbids to commit an offset of topic {topic!r} ({why}). {_COMES_AGAIN} "
        f"{grant('READ', 'topic', [topic])}."
    )


def outputs_forbidden(topics: list[str], why: str) -> AuthorizationError:
    """The right to a topic that was produced to is missing."""
    return AuthorizationError(
        f"The cluster forbids to produce in a transaction ({why}). {_COMES_AGAIN} {grant('WRITE', 'topic', topics)}."
    )


def pending(group_id: str, key: TopicPartition, why: str) -> KafkaUnavailableError:
    """An offset of a transaction that has not ended."""
    return KafkaUnavailableError(
        f"The committed offset of {key[0]} [{key[1]}] of the consumer group {group_id!r} did not come in time ({why}). "
        "A transaction that has sent an offset may not have ended. Nothing was changed. It is asked for again; if that "
        "takes longer than its timeout, check that the brokers run."
    )


class OffsetsPendingError(KafkaUnavailableError):
    """A group of Kafka's own has an offset in a transaction that has not ended."""


def offsets_pending(group_id: str) -> OffsetsPendingError:
    """The error that says so."""
    return OffsetsPendingError(
        f"The consumer group {group_id!r} has an offset in a transaction that has not ended, so Kafka does not say "
        "which offset counts. Nothing was changed. Do it again when the transaction has ended: once its program runs "
        "again, or its timeout has passed. (kafka-transactions.sh --bootstrap-server ADDRESS list names open ones)"
    )


def timeout_too_high(transaction_timeout_ms: int) -> ConfigurationError:
    """The brokers' limit is lower."""
    return ConfigurationError(
        f"The brokers do not allow a timeout of transactions of {transaction_timeout_ms / 1000:g} s. Nothing was sent. "
        "Set a lower one, or raise the brokers' transaction.max.timeout.ms."
    )


def old_brokers(why: str) -> ConfigurationError:
    """They lack what exactly once needs."""
    return ConfigurationError(
        f"The brokers are too old for transactions ({why}). Nothing was produced. Kafka 2.5 or newer is needed; "
        "without exactly_once= older ones do."
    )
