"""Why a record was not produced: what happened, what it means for the data, what to do. The same for each cluster."""

from __future__ import annotations

from collections.abc import Sequence

from kafka_marshal.errors import (
    AuthenticationError,
    AuthorizationError,
    ClosedError,
    KafkaUnavailableError,
    ProduceError,
    grant,
)

_COMES_AGAIN = "The message it stands for is not done and comes again."

Headers = Sequence[tuple[str, bytes | None]]


def size_of(value: bytes | None, key: bytes | None, headers: Headers) -> int:
    """The bytes of a record, but for what the format adds."""
    return len(value or b"") + len(key or b"") + sum(len(name.encode()) + len(text or b"") for name, text in headers)


def missing(topic: str) -> ProduceError:
    """No topic of that name."""
    return ProduceError(
        f"A record was not produced: topic {topic!r} does not exist. {_COMES_AGAIN} Create the topic, or correct its "
        "name.",
        topic=topic,
        retry=True,
    )


def too_large(topic: str, size: int) -> ProduceError:
    """The broker takes none of this size."""
    return ProduceError(
        f"A record of {size:,} bytes was not produced: it is larger than topic {topic!r} allows. {_COMES_AGAIN} Raise "
        "the topic's max.message.bytes.",
        topic=topic,
        retry=False,
    )


def forbidden(topic: str, why: str) -> AuthorizationError:
    """An ACL is missing."""
    return AuthorizationError(
        f"A record was not produced to topic {topic!r}: the cluster forbids it ({why}). {_COMES_AGAIN} "
        f"{grant('WRITE', 'topic', [topic])}."
    )


def shut_out(topic: str, why: str) -> AuthenticationError:
    """The brokers do not let us in."""
    return AuthenticationError(
        f"A record was not produced to topic {topic!r}: the connection was refused ({why}). {_COMES_AGAIN} Check "
        "security.protocol, the ssl.* and sasl.* settings and that the port is the listener for that protocol."
    )


def unacknowledged(topic: str, why: str) -> KafkaUnavailableError:
    """No answer in time."""
    return KafkaUnavailableError(
        f"A record for topic {topic!r} was not acknowledged in time ({why}). It may be in the topic all the same, and "
        f"may come to be there twice. {_COMES_AGAIN} Check that the brokers run, that the topic exists and that its "
        "partitions have leaders."
    )


def queue_full(topic: str) -> KafkaUnavailableError:
    """More records wait to be sent than the client keeps."""
    return KafkaUnavailableError(
        f"A record was not produced to topic {topic!r}: the client's queue of records to be sent is full. "
        f"{_COMES_AGAIN} Check that the brokers keep up, or set queue.buffering.max.messages higher."
    )


def refused(topic: str, why: str, *, retry: bool = False) -> ProduceError:
    """The broker refused, for any other reason."""
    return ProduceError(
        f"A record was not produced to topic {topic!r}: {why}. {_COMES_AGAIN} Correct what the reason names; the "
        "broker's log may say more.",
        topic=topic,
        retry=retry,
    )


def closed(topic: str) -> ClosedError:
    """The producer was closed with the record unanswered."""
    return ClosedError(
        f"The producer was closed before a record for topic {topic!r} was acknowledged. It may be in the topic all the "
        f"same. {_COMES_AGAIN} Close later, or with a longer timeout."
    )
