"""The options of a consumer, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, get_args

from kafka_marshal import arguments
from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.policies import Balanced, Policy
from kafka_marshal.engine.settings import (
    REVOKE_RANGES_TIMEOUT_MS,
    REVOKE_TIMEOUT_MS,
    CheckpointOptions,
    ConsumerSettings,
    GroupOptions,
    Why,
)
from kafka_marshal.engine.work.stuck import UNREADABLE
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.guard import report
from kafka_marshal.topic_names import DEFAULT_TOPIC, is_topic_name, snapshots_topic
from kafka_marshal.types import Delivery, Start, Strategy, WhenStuck
from rationalizer.limits import MAX_SESSION_TIMEOUT_MS, MIN_SESSION_TIMEOUT_MS

#: The default of ``transaction_timeout`` (s), and the least; the brokers' ``transaction.max.timeout.ms`` is the most.
TRANSACTION_TIMEOUT_S = 60.0
LEAST_TRANSACTION_TIMEOUT_S = 1.0

#: The default of ``max_transactional_producers``: 256 threads, 512 descriptors and 32 MB.
MOST_TRANSACTIONAL_PRODUCERS = 64

#: Why no offset is one.
_NO_OFFSET = (
    " (an offset belongs to one partition, and the group's positions to all members: set them with kafka-marshal "
    "release-group)"
)

#: Enough for 20 ms of a fast backlog, and no more than what librdkafka itself stores.
DEFAULT_BYTES_IN_FLIGHT = 64_000_000


@dataclass(frozen=True, slots=True)
class TransactionOptions:
    """How a consumer processes in transactions."""

    #: The brokers end a transaction that is open for longer.
    timeout_s: float
    most_producers: int


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """A consumer's options, checked."""

    topics: tuple[str, ...]
    #: The options in the form that the engine uses.
    settings: ConsumerSettings
    #: The user's functions by the names of their arguments; None: not given.
    callbacks: Mapping[str, Any]
    #: Iterating marks a message done when the next one is asked for.
    auto_done: bool
    #: None: progress goes to the log alone.
    transactions: TransactionOptions | None = None
    #: The user's functions of a group that takes checkpoints, by the names of their arguments; None: not given.
    state_callbacks: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        topics: tuple[str, ...],
        *,
        delivery: str,
        start: Start,
        handler_timeout: float | None,
        revoke_timeout: float | None,
        position_lost: WhenStuck,
        callbacks: Mapping[str, Any],
        policy: Policy | None = None,
        batch_size: int = 1,
        auto_done: bool = False,
        claim_ahead: bool = False,
        max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
        partition_stuck: WhenStuck = "leave",
        group: GroupOptions | None = None,
        ranges: bool = False,
        transactions: TransactionOptions | None = None,
        state_callbacks: Mapping[str, Any] | None = None,
    ) -> ConsumerOptions:
        """Raises ConfigurationError for options that can't work."""
        policy = Balanced() if policy is None else policy
        arguments.one_of("delivery", delivery, get_args(Delivery))
        _check_start(start)
        arguments.an_instance("policy", policy, Policy, "a Policy such as Balanced()")
        if type(policy).wishes is Policy.wishes and type(policy).refine is Policy.refine:
            raise arguments.wrong("policy", "of a class that overrides wishes()", policy)
        batch_size = arguments.a_whole("batch_size", batch_size, 1)
        for name, seconds in (("handler_timeout", handler_timeout), ("revoke_timeout", revoke_timeout)):
            if seconds is not None:
                arguments.seconds(name, seconds, above=0)
        arguments.a_flag("auto_done", auto_done)
        if arguments.a_flag("claim_ahead", claim_ahead) and delivery != "at-most-once":
            raise ConfigurationError(
                "claim_ahead=True is for delivery='at-most-once': at least once nothing is claimed before it is handled"
            )
        max_bytes_in_flight = arguments.a_whole("max_bytes_in_flight", max_bytes_in_flight, 1)
        for name, value in (("position_lost", position_lost), ("partition_stuck", partition_stuck)):
            arguments.one_of(name, value, get_args(WhenStuck))
        for name, callback in callbacks.items():
            check_callback(name, callback)
        lost = frozenset({Why.POSITION}) if position_lost == "raise" else frozenset[Why]()
        if revoke_timeout is None:
            revoke_timeout = handler_timeout
        default_revoke_ms = REVOKE_RANGES_TIMEOUT_MS if ranges else REVOKE_TIMEOUT_MS
        settings = ConsumerSettings(
            at_most_once=delivery == "at-most-once",
            policy=policy,
            start=start,
            batch_size=batch_size,
            handler_timeout_ms=None if handler_timeout is None else handler_timeout * 1000,
            callbacks=frozenset(Callback(name) for name, callback in callbacks.items() if callback is not None),
            ranges=ranges,
            raises=lost | UNREADABLE if partition_stuck == "raise" else lost,
            policy_raised=partial(report, f"the policy {type(policy).__name__}"),
            claim_ahead=claim_ahead,
            max_bytes_in_flight=max_bytes_in_flight,
            group=group,
            transactions=transactions is not None,
            revoke_timeout_ms=default_revoke_ms if revoke_timeout is None else revoke_timeout * 1000,
        )
        if transactions is not None:
            _check_transactional(settings)
        return cls(topics, settings, callbacks, auto_done, transactions, state_callbacks or {})


def checked_transactions(wanted: bool, timeout: float, most_producers: int, group_id: str) -> TransactionOptions | None:
    """How to process in transactions; None: not at all. Raises ConfigurationError for options that can't work."""
    timeout = arguments.seconds("transaction_timeout", timeout)
    if timeout < LEAST_TRANSACTION_TIMEOUT_S:
        raise arguments.wrong("transaction_timeout", "at least 1 second", timeout)
    most = arguments.a_whole("max_transactional_producers", most_producers, 1)
    if not arguments.a_flag("transactions", wanted):
        return None
    if not group_id.isascii():
        raise ConfigurationError(
            f"transactions=True needs a group id of ASCII characters: librdkafka commits no offsets in "
            f"transactions for group {group_id!r}. Nothing was claimed. Use another group id, or no transactions"
        )
    return TransactionOptions(timeout, most)


def _check_start(start: object) -> None:
    if isinstance(start, int) and not isinstance(start, bool):
        raise arguments.wrong("start", f"'earliest', 'latest' or a datetime{_NO_OFFSET}", start)
    if not isinstance(start, datetime):
        arguments.one_of("start", start, ("earliest", "latest"), "'earliest', 'latest' or a datetime")
    elif start.tzinfo is None:
        raise ConfigurationError(f"start {start!r} has no time zone; say which moment is meant")


def _check_transactional(settings: ConsumerSettings) -> None:
    """Raises ConfigurationError for options that contradict transactions (M8)."""
    if settings.at_most_once:
        raise ConfigurationError(
            "transactions=True is for delivery='at-least-once', which is the default: with it, each message has its "
            "effect exactly once. At most once, a crash loses messages instead. Nothing was claimed"
        )
    if settings.group is not None and settings.group.allow_key_share:
        raise ConfigurationError(
            "transactions=True is for whole partitions: Kafka keeps one offset for a partition, not one for some of "
            "its keys. Nothing was claimed. Leave out allow_key_share=True; run(…, order='key', transactions=True) "
            "handles many keys of a partition at a time"
        )


def checked_group(
    strategy: str,
    session_timeout_ms: int,
    allow_key_share: bool,
    checkpoints: CheckpointOptions | None = None,
) -> GroupOptions:
    """How a member joins its group; raises ConfigurationError for options that can't work."""
    arguments.one_of("strategy", strategy, get_args(Strategy))
    session = arguments.a_whole(
        "session_timeout_ms", session_timeout_ms, MIN_SESSION_TIMEOUT_MS, MAX_SESSION_TIMEOUT_MS
    )
    share = arguments.a_flag("allow_key_share", allow_key_share)
    return GroupOptions(strategy, session, share, checkpoints)


def checked_isolation(config: Mapping[str, object]) -> bool:
    """Whether ranges end at the last stable offset; raises ConfigurationError for an unknown level."""
    level = config.get("isolation.level", "read_committed")
    if level not in ("read_committed", "read_uncommitted"):
        raise ConfigurationError(f"isolation.level must be read_committed or read_uncommitted, not {level!r}")
    return level == "read_committed"


def check_callback(name: str, callback: object) -> None:
    """Raises ConfigurationError for a callback that can't be called (None is allowed)."""
    if callback is not None:
        arguments.a_function(name, callback, "consumer, partitions")


def checked_topics(topics: Sequence[str], coordination_topic: str) -> tuple[str, ...]:
    """Names and ^patterns that can be read; raises ConfigurationError for others."""
    wanted = "a list of names or ^patterns"
    names = arguments.several("topics", topics, wanted)
    if not names or isinstance(topics, Mapping):
        raise arguments.wrong("topics", wanted, topics)
    for name in names:
        _check_topic(name, coordination_topic)
    return tuple(names)


def check_log_name(topic: object) -> str:
    """A name that a coordination topic can have; raises ConfigurationError for others."""
    name = arguments.text("topic", topic)
    if not is_topic_name(name):
        wanted = "a name that a topic can have (1 to 249 ASCII letters, digits, dots, underscores and hyphens)"
        raise arguments.wrong("topic", wanted, name, "Nothing was sent")
    if name == snapshots_topic(DEFAULT_TOPIC):
        raise arguments.wrong(
            "topic", f"a coordination topic; this one is the log of snapshots of {DEFAULT_TOPIC!r}", name
        )
    return name


def _check_topic(topic: object, coordination_topic: str) -> None:
    if isinstance(topic, tuple | list):
        raise ConfigurationError(
            f"topics must be a list of names or ^patterns; {topic!r} names a partition, and partitions are shared out "
            "among the members. Nothing was claimed. Name the topic; marshal.claim(topic, partition) claims one by hand"
        )
    if not isinstance(topic, str):
        raise ConfigurationError(f"topics must be a list of names or ^patterns; {topic!r} is no string")
    if topic.startswith("^"):
        try:
            re.compile(topic)
        except re.error as error:
            raise ConfigurationError(f"topics: the pattern {topic!r} is no regular expression: {error}") from error
    elif not is_topic_name(topic):
        raise ConfigurationError(
            f"topics: no topic can be called {topic!r}, so nobody would ever get a message of it. Names have 1 to 249 "
            "ASCII letters, digits, dots, underscores and hyphens; a pattern begins with ^"
        )
    elif topic in (coordination_topic, snapshots_topic(coordination_topic)):
        raise ConfigurationError(
            f"topics: {topic!r} holds the records by which members coordinate, not messages to share out. Nothing was "
            "claimed. kafka-marshal log shows what is in it"
        )
