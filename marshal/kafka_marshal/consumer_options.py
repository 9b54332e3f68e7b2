"""What a consumer can be made with, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from kafka_marshal.engine.consumer import ConsumerSettings
from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.policies import Policy
from kafka_marshal.engine.stuck import UNREADABLE, Why
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.guard import report

__all__ = ["DEFAULT_BYTES_IN_FLIGHT", "ConsumerOptions"]

#: Enough for 20 ms of a fast backlog, and little beside what librdkafka itself stores (as much again).
DEFAULT_BYTES_IN_FLIGHT = 64_000_000

#: What a broker takes as a topic's name, but for "." and "..".
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """A consumer's options, checked."""

    topics: tuple[str, ...]
    at_most_once: bool
    policy: Policy
    start: str | datetime
    batch_size: int
    handler_timeout_ms: float | None
    #: Iterating marks a message done when the next one is asked for.
    auto_done: bool
    #: At most once: claim a batch while the one before it is handled.
    claim_ahead: bool
    #: Bytes of message values that are fetched, and in hand, at a time.
    max_bytes_in_flight: int
    #: Which partitions that stand still are raised.
    raises: frozenset[Why]

    @classmethod
    def checked(
        cls,
        topics: Sequence[str],
        delivery: str,
        policy: Policy,
        start: str | datetime,
        batch_size: int,
        handler_timeout: float | None,
        auto_done: bool,
        claim_ahead: bool = False,
        max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
        *,
        position_lost: str = "leave",
        partition_stuck: str = "leave",
    ) -> ConsumerOptions:
        """Raises ConfigurationError for what can't work."""
        if isinstance(topics, str) or not topics or not all(topics):
            raise ConfigurationError(f"topics must be a list of names or ^patterns, not {topics!r}")
        for topic in topics:
            _check_topic(topic)
        if delivery not in ("at-least-once", "at-most-once"):
            raise ConfigurationError(f"delivery must be 'at-least-once' or 'at-most-once', not {delivery!r}")
        if not isinstance(start, datetime) and start not in ("earliest", "latest"):
            raise ConfigurationError(f"start must be 'earliest', 'latest' or a datetime, not {start!r}")
        if isinstance(start, datetime) and start.tzinfo is None:
            raise ConfigurationError(f"start {start!r} has no time zone; say which moment is meant")
        if not isinstance(policy, Policy):
            raise ConfigurationError(f"policy must be a Policy such as Balanced(), not {policy!r}")
        if batch_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1, not {batch_size}")
        if handler_timeout is not None and handler_timeout <= 0:
            raise ConfigurationError(f"handler_timeout must be above 0 seconds, not {handler_timeout}")
        if claim_ahead and delivery != "at-most-once":
            raise ConfigurationError(
                "claim_ahead=True is for delivery='at-most-once': at least once nothing is claimed before it is handled"
            )
        if max_bytes_in_flight < 1:
            raise ConfigurationError(f"max_bytes_in_flight must be at least 1 byte, not {max_bytes_in_flight!r}")
        for name, value in (("position_lost", position_lost), ("partition_stuck", partition_stuck)):
            if value not in ("leave", "raise"):
                raise ConfigurationError(f"{name} must be 'leave' or 'raise', not {value!r}")
        lost = frozenset({Why.POSITION}) if position_lost == "raise" else frozenset[Why]()
        timeout_ms = None if handler_timeout is None else handler_timeout * 1000
        at_most_once = delivery == "at-most-once"
        return cls(
            tuple(topics),
            at_most_once,
            policy,
            start,
            batch_size,
            timeout_ms,
            auto_done,
            claim_ahead,
            max_bytes_in_flight,
            lost | UNREADABLE if partition_stuck == "raise" else lost,
        )

    def settings(self, callbacks: Mapping[str, object], *, ranges: bool = False) -> ConsumerSettings:
        """What the engine is told; callbacks: those that are not None will be called. ranges: instead of messages."""
        return ConsumerSettings(
            at_most_once=self.at_most_once,
            policy=self.policy,
            start=self.start,
            batch_size=self.batch_size,
            handler_timeout_ms=self.handler_timeout_ms,
            callbacks=frozenset(Callback(name) for name, callback in callbacks.items() if callback is not None),
            ranges=ranges,
            raises=self.raises,
            policy_raised=partial(report, f"the policy {type(self.policy).__name__}"),
        )


def _check_topic(topic: object) -> None:
    if not isinstance(topic, str):
        raise ConfigurationError(f"topics must be a list of names or ^patterns; {topic!r} is no string")
    if topic.startswith("^"):
        try:
            re.compile(topic)
        except re.error as error:
            raise ConfigurationError(f"topics: the pattern {topic!r} is no regular expression: {error}") from error
    elif not _TOPIC_NAME.fullmatch(topic) or topic in (".", ".."):
        raise ConfigurationError(
            f"topics: no topic can be called {topic!r}, so nobody would ever get a message of it. Names have 1 to 249 "
            "ASCII letters, digits, dots, underscores and hyphens; a pattern begins with ^"
        )
