"""The options of consumers: one table, of which each maker has a part.

``OPTIONS`` has the default and the check of each option. The classes before it say who has it, and of which type: a
maker takes ``**options: Unpack[…]`` of its class. :meth:`kafka_marshal.Marshal.consumer` and the other makers describe
them. :class:`ConsumerOptions` is what a consumer gets: all of them, checked as a whole.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, Final, Generic, NamedTuple, Self, TypedDict, TypeVar, get_args

from kafka_marshal import arguments
from kafka_marshal.checkpoints import Checkpoint, CheckpointPolicy, Restore
from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.key_share import Span
from kafka_marshal.engine.policies import Balanced, Policy
from kafka_marshal.engine.settings import (
    MAX_SHARES,
    REVOKE_RANGES_TIMEOUT_MS,
    REVOKE_TIMEOUT_MS,
    CheckpointOptions,
    ConsumerSettings,
    GroupOptions,
    SharingOptions,
    Why,
)
from kafka_marshal.engine.work.stuck import UNREADABLE
from kafka_marshal.errors import ConfigurationError, KeyRangeError
from kafka_marshal.guard import report
from kafka_marshal.logs import log
from kafka_marshal.topic_names import DEFAULT_TOPIC, is_topic_name, snapshots_topic
from kafka_marshal.types import Delivery, Key, Start, Strategy, WhenStuck
from rationalizer.limits import MAX_KEY_HASH, MAX_SESSION_TIMEOUT_MS, MIN_SESSION_TIMEOUT_MS

F = TypeVar("F")
T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., object])

# -- who has which ------------------------------------------------------------------------------------------------


class OfEach(TypedDict, Generic[F], total=False):
    """What every consumer takes; F: its callbacks."""

    start: Start
    handler_timeout: float | None
    revoke_timeout: float | None
    position_lost: WhenStuck
    on_assign: F | None
    on_revoke: F | None
    on_lost: F | None
    config: Mapping[str, object] | None


class OfMessages(TypedDict, total=False):
    """What only consumers of messages take."""

    batch_size: int
    auto_done: bool
    max_bytes_in_flight: int
    partition_stuck: WhenStuck


class OfTransactions(TypedDict, total=False):
    """What only consumers take that may process in transactions."""

    transactions: bool
    transaction_timeout: float
    max_transactional_producers: int


class OfGroup(TypedDict, total=False):
    """What only members of coordinated groups take."""

    strategy: Strategy
    session_timeout_ms: int
    checkpoints: CheckpointPolicy | None
    on_checkpoint: Callable[[Checkpoint], object] | None
    on_restore: Callable[[Restore], object] | None
    on_completed: Callable[[int], object] | None


class RangesArguments(OfEach[F], Generic[F], total=False):
    """The options of ``Marshal.ranges``."""

    delivery: Delivery
    policy: Policy | None


class ConsumerArguments(RangesArguments[F], OfMessages, OfTransactions, Generic[F], total=False):
    """The options of ``Marshal.consumer``, except ``shared_batches``."""

    claim_ahead: bool
    max_shares: int


class GroupRangesArguments(OfEach[F], OfGroup, Generic[F], total=False):
    """The options of ``Marshal.group_ranges``."""

    delivery: Delivery


class GroupArguments(GroupRangesArguments[F], OfMessages, OfTransactions, Generic[F], total=False):
    """The options of ``Marshal.group_consumer``."""

    allow_key_share: bool
    mirror_offsets: bool


class AssignArguments(OfEach[F], OfMessages, Generic[F], total=False):
    """The options of ``Marshal.assign``."""


# -- the table ----------------------------------------------------------------------------------------------------

#: Callbacks for checkpoints → what they take, for people.
TAKES: Final[Mapping[str, str]] = {"on_checkpoint": "checkpoint", "on_restore": "restore", "on_completed": "id"}

#: Callbacks about partitions.
CALLBACKS: Final = ("on_assign", "on_revoke", "on_lost")

DEFAULT_BATCH_SIZE = 1_000

#: A little longer than two heartbeat intervals of a lease: after a death, its member's partitions move.
DEFAULT_SESSION_TIMEOUT_MS = 10_000

#: The default of ``transaction_timeout`` (s), and the least; the brokers' ``transaction.max.timeout.ms`` is the most.
TRANSACTION_TIMEOUT_S = 60.0
LEAST_TRANSACTION_TIMEOUT_S = 1.0

#: The default of ``max_transactional_producers``: 256 threads, 512 descriptors and 32 MB.
MOST_TRANSACTIONAL_PRODUCERS = 64

#: Enough for 20 ms of a fast backlog, and no more than what librdkafka itself stores.
DEFAULT_BYTES_IN_FLIGHT = 64_000_000

#: Why no offset is one.
_NO_OFFSET = (
    " (an offset belongs to one partition, and the group's positions to all members: set them with kafka-marshal "
    "release-group)"
)


def _one_of(kind: object) -> Callable[[str, object], str]:
    return lambda name, value: arguments.one_of(name, value, get_args(kind))


def _from(least: int, most: int = arguments.MOST_OFFSET) -> Callable[[str, object], int]:
    return lambda name, value: arguments.a_whole(name, value, least, most)


def _start(name: str, value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        raise arguments.wrong(name, f"'earliest', 'latest' or a datetime{_NO_OFFSET}", value)
    if not isinstance(value, datetime):
        arguments.one_of(name, value, ("earliest", "latest"), "'earliest', 'latest' or a datetime")
    elif value.tzinfo is None:
        raise ConfigurationError(f"{name} {value!r} has no time zone; say which moment is meant")
    return value


def _policy(name: str, value: object) -> Policy:
    policy = Balanced() if value is None else value
    if not isinstance(policy, Policy):
        raise arguments.wrong(name, "a Policy such as Balanced()", policy)
    if type(policy).wishes is Policy.wishes and type(policy).refine is Policy.refine:
        raise arguments.wrong(name, "of a class that overrides wishes()", policy)
    return policy


def _seconds_or_none(name: str, value: object) -> object:
    if value is not None:
        arguments.seconds(name, value, above=0)
    return value


def _transaction_timeout(name: str, value: object) -> float:
    timeout = arguments.seconds(name, value)
    if timeout < LEAST_TRANSACTION_TIMEOUT_S:
        raise arguments.wrong(name, "at least 1 second", timeout)
    return timeout


def check_callback(name: str, callback: T) -> T:
    """Raises ConfigurationError for a callback that can't be called (None is allowed)."""
    if callback is not None:
        arguments.a_function(name, callback, "consumer, partitions")
    return callback


def _with_others(name: str, value: object) -> object:
    """What is checked together with other options."""
    return value


class Option(NamedTuple):
    """One option of some makers."""

    default: object
    #: Name, value → the value that counts. Raises ConfigurationError for one that can't work.
    check: Callable[[str, Any], object]


#: They are checked in this order.
OPTIONS: Final[Mapping[str, Option]] = {
    "delivery": Option("at-least-once", _one_of(Delivery)),
    "start": Option("earliest", _start),
    "policy": Option(None, _policy),
    "strategy": Option("sticky", _one_of(Strategy)),
    "session_timeout_ms": Option(DEFAULT_SESSION_TIMEOUT_MS, _from(MIN_SESSION_TIMEOUT_MS, MAX_SESSION_TIMEOUT_MS)),
    "allow_key_share": Option(False, arguments.a_flag),
    "mirror_offsets": Option(False, arguments.a_flag),
    "batch_size": Option(DEFAULT_BATCH_SIZE, _from(1)),
    "handler_timeout": Option(None, _seconds_or_none),
    "revoke_timeout": Option(None, _seconds_or_none),
    "auto_done": Option(True, arguments.a_flag),
    "claim_ahead": Option(False, arguments.a_flag),
    "max_bytes_in_flight": Option(DEFAULT_BYTES_IN_FLIGHT, _from(1)),
    "position_lost": Option("leave", _one_of(WhenStuck)),
    "partition_stuck": Option("leave", _one_of(WhenStuck)),
    "transactions": Option(False, arguments.a_flag),
    "transaction_timeout": Option(TRANSACTION_TIMEOUT_S, _transaction_timeout),
    "max_transactional_producers": Option(MOST_TRANSACTIONAL_PRODUCERS, _from(1)),
    "max_shares": Option(MAX_SHARES, _with_others),
    "checkpoints": Option(None, _with_others),
    "on_checkpoint": Option(None, _with_others),
    "on_restore": Option(None, _with_others),
    "on_completed": Option(None, _with_others),
    "on_assign": Option(None, check_callback),
    "on_revoke": Option(None, check_callback),
    "on_lost": Option(None, check_callback),
    "config": Option(None, arguments.a_mapping),
}

DEFAULTS: Final[Mapping[str, object]] = {name: option.default for name, option in OPTIONS.items()}


def takes(kind: Any, defaults: Mapping[str, object] = DEFAULTS) -> Callable[[M], M]:
    """Has ``help()``, and all that shows signatures, show the options of a kind instead of ``**options``."""

    def signed(maker: M) -> M:
        own = signature(maker)
        shown = [each for each in own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        for name in [name for name in defaults if name in kind.__annotations__]:
            of = getattr(kind.__annotations__[name], "__forward_arg__", Parameter.empty)
            shown.append(Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=of))
        maker.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        return maker

    return signed


def check_names(maker: str, kind: Any, given: Mapping[str, object]) -> None:
    """Raises TypeError, as a call does, for an option that a kind does not have."""
    for name in given:
        if name not in kind.__annotations__:
            raise TypeError(f"{maker}() got an unexpected keyword argument {name!r}")


def checked(maker: str, kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a kind, each checked by itself: as given, or the default."""
    check_names(maker, kind, given)
    known = kind.__annotations__
    return {name: x.check(name, given.get(name, x.default)) for name, x in OPTIONS.items() if name in known}


# -- all of them, checked together --------------------------------------------------------------------------------


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
    #: Settings of librdkafka for this consumer, beside those of its Marshal.
    config: Mapping[str, object]
    #: None: progress goes to the log alone.
    transactions: TransactionOptions | None = None
    #: The user's functions of a group that takes checkpoints, by the names of their arguments; None: not given.
    state_callbacks: Mapping[str, Any] = field(default_factory=dict)
    #: Progress is also committed to the Kafka group of the same name.
    mirror_offsets: bool = False
    #: Ranges end at the last stable offset, as for a read_committed reader.
    committed: bool = True

    @classmethod
    def of(cls, topics: tuple[str, ...], found: Mapping[str, Any], group_id: str, *, ranges: bool) -> Self:
        """Of what ``checked`` has found. Raises ConfigurationError for options that contradict each other."""
        policy, callbacks = found.get("policy") or Balanced(), {name: found[name] for name in CALLBACKS}
        at_most_once, claim_ahead = found.get("delivery") == "at-most-once", found.get("claim_ahead", False)
        if claim_ahead and not at_most_once:
            raise ConfigurationError(
                "claim_ahead=True is for delivery='at-most-once': at least once nothing is claimed before it is handled"
            )
        transactions = _checked_transactions(found, group_id)
        handler_s, revoke_s = found["handler_timeout"], found["revoke_timeout"]
        revoke_s = handler_s if revoke_s is None else revoke_s
        default_revoke_ms = REVOKE_RANGES_TIMEOUT_MS if ranges else REVOKE_TIMEOUT_MS
        lost = frozenset({Why.POSITION}) if found["position_lost"] == "raise" else frozenset[Why]()
        settings = ConsumerSettings(
            at_most_once=at_most_once,
            policy=policy,
            start=found["start"],
            batch_size=found.get("batch_size", 1),
            handler_timeout_ms=None if handler_s is None else handler_s * 1000,
            callbacks=frozenset(Callback(name) for name, callback in callbacks.items() if callback is not None),
            ranges=ranges,
            raises=lost | UNREADABLE if found.get("partition_stuck") == "raise" else lost,
            policy_raised=partial(report, f"the policy {type(policy).__name__}"),
            claim_ahead=claim_ahead,
            max_bytes_in_flight=found.get("max_bytes_in_flight", DEFAULT_BYTES_IN_FLIGHT),
            group=_checked_group(found, ranges=ranges) if "strategy" in found else None,
            transactions=transactions is not None,
            revoke_timeout_ms=default_revoke_ms if revoke_s is None else revoke_s * 1000,
        )
        if transactions is not None:
            _check_with_transactions(settings)
        if settings.group is not None and settings.group.checkpoints is not None:
            _check_with_checkpoints(settings)
        auto_done, mirrors = found.get("auto_done", False), found.get("mirror_offsets", False)
        if mirrors and transactions is not None:
            raise ConfigurationError(
                "mirror_offsets=True is for progress that is in the log alone. With transactions=True, the offsets in "
                "Kafka are exact already, and a mirror could overwrite them. Nothing was claimed. Leave it out"
            )
        state = {name: found.get(name) for name in TAKES}
        return cls(topics, settings, callbacks, auto_done, found["config"], transactions, state, mirrors)


def _checked_transactions(found: Mapping[str, Any], group_id: str) -> TransactionOptions | None:
    """How to process in transactions; None: not at all."""
    if not found.get("transactions"):
        return None
    if not group_id.isascii():
        raise ConfigurationError(
            f"transactions=True needs a group id of ASCII characters: librdkafka commits no offsets in "
            f"transactions for group {group_id!r}. Nothing was claimed. Use another group id, or no transactions"
        )
    return TransactionOptions(found["transaction_timeout"], found["max_transactional_producers"])


def _checked_group(found: Mapping[str, Any], *, ranges: bool) -> GroupOptions:
    """How a member joins its group."""
    takes = _checked_checkpoints(found["checkpoints"], {name: found[name] for name in TAKES}, ranges=ranges)
    return GroupOptions(found["strategy"], found["session_timeout_ms"], found.get("allow_key_share", False), takes)


def _checked_checkpoints(
    policy: CheckpointPolicy | None, callbacks: Mapping[str, Any], *, ranges: bool
) -> CheckpointOptions | None:
    """How a member takes checkpoints; None: not at all. Raises ConfigurationError for what can't work.

    ranges: it takes ranges of offsets, and a cut waits for their end for as long as the barrier allows.
    """
    given = {name: callback for name, callback in callbacks.items() if callback is not None}
    for name, callback in given.items():
        arguments.a_function(name, callback, TAKES[name])
    if policy is None:
        if given:
            raise ConfigurationError(
                f"{' and '.join(given)} would never be called: this consumer takes no checkpoints. Nothing was "
                "claimed. Add checkpoints=CheckpointPolicy()"
            )
        return None
    arguments.an_instance("checkpoints", policy, CheckpointPolicy, "a CheckpointPolicy, such as CheckpointPolicy()")
    if "on_checkpoint" in given and "on_restore" not in given:
        log(
            logging.WARNING,
            "no_restore",
            "on_checkpoint saves state that nothing takes up: this consumer has no on_restore. After a hand-over, a "
            "loss or a rollback it continues at the checkpoint's position with whatever state is in memory then",
        )
    return CheckpointOptions(
        every_ms=None if policy.every is None else policy.every * 1000,
        keep=policy.keep,
        drain_ms=(policy.timeout if ranges else policy.drain) * 1000,
        timeout_ms=round(policy.timeout * 1000),
        hold=policy.hold,
        save_all=policy.save == "all",
        adopt=policy.adopt,
        has_callback="on_checkpoint" in given,
    )


def _check_with_transactions(settings: ConsumerSettings) -> None:
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


def _check_with_checkpoints(settings: ConsumerSettings) -> None:
    """Raises ConfigurationError for options that contradict checkpoints (X11, X20)."""
    if settings.at_most_once:
        raise ConfigurationError(
            "checkpoints are for delivery='at-least-once', which is the default: with state that goes back with the "
            "position each message counts once. At most once, progress moves before a message is handled, so no state "
            "would fit it. Nothing was claimed. Leave out delivery='at-most-once'"
        )
    if settings.transactions:
        raise ConfigurationError(
            "a group takes checkpoints or processes in transactions, not both: Kafka's offset moves with each "
            "transaction, and can't go back with a loss. Nothing was claimed. For state: checkpoints= alone. For "
            "output to Kafka, once for read_committed readers: transactions=True alone"
        )


# -- modes --------------------------------------------------------------------------------------------------------


def checked_sharing(options: ConsumerOptions, given: Mapping[str, Any]) -> ConsumerOptions:
    """The options of a consumer that shares its partitions; raises ConfigurationError for some that contradict that."""
    settings = options.settings
    if options.transactions is not None:
        raise ConfigurationError(
            "transactions=True is not possible with shared_batches=True: Kafka keeps one offset for a partition, and "
            "sharers are at many places. Nothing was claimed. Leave out one of them"
        )
    if given.get("policy") is not None:
        raise ConfigurationError(
            "policy= is not possible with shared_batches=True: each member has a share of every partition. Nothing was "
            "claimed. Leave out policy=; max_shares= limits the partitions of a member"
        )
    if settings.claim_ahead:
        raise ConfigurationError(
            "claim_ahead=True is not possible with shared_batches=True: the next batch is taken ahead in any case. "
            "Nothing was claimed. Leave it out"
        )
    most = arguments.a_whole("max_shares", given.get("max_shares", MAX_SHARES), 1)
    sharing = SharingOptions(max_shares=most, at_most_once=settings.at_most_once)
    return replace(options, settings=replace(settings, at_most_once=False, sharing=sharing))


#: What has another form: argument → why, and what to do instead.
_ELSEWHERE = {
    "policy": "assign(…) names the partitions, and a policy would choose them. Leave out policy=; consumer(topics, "
    "policy=…) has one",
    "transactions": "Kafka keeps one offset for a partition, not one for some of its keys. Use consumer(topics, "
    "transactions=True), which holds partitions whole; run(…, order='key', transactions=True) handles many keys of one",
    "shared_batches": "keys and batches are two ways to share a partition, and exclude each other. Use "
    "consumer(topics, shared_batches=True)",
    "claim_ahead": "it is for delivery='at-most-once', which consumer(topics) has. Leave it out",
}


def _refused(what: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{what} is not possible with assign(…): {why}. Nothing was claimed")


def checked_of_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``assign``, each checked by itself; raises ConfigurationError for what it can't have."""
    own = {name: value for name, value in given.items() if name != "delivery" and name not in _ELSEWHERE}
    check_names("assign", AssignArguments, own)
    if _one_of(Delivery)("delivery", given.get("delivery", "at-least-once")) == "at-most-once":
        raise _refused("delivery='at-most-once'", "a batch is claimed of a whole partition. Use consumer(topics)")
    for name, why in _ELSEWHERE.items():
        if given.get(name):
            raise _refused(f"{name}=", why)
    return checked("assign", AssignArguments, own)


def checked_ranges(partitions: object) -> dict[Key, tuple[Span, ...]]:
    """Ranges by partition, ascending; raises ConfigurationError for what can't be claimed."""
    wanted = "a mapping from (topic, partition) to a list of ranges (lo, hi) of key hashes, [] for the whole partition"
    if not isinstance(partitions, Mapping) or not partitions:
        raise arguments.wrong("partitions", wanted, partitions, "Nothing was claimed")
    found: dict[Key, tuple[Span, ...]] = {}
    for key, ranges in partitions.items():
        ((topic, number),) = arguments.partitions("partitions", [key])
        if not isinstance(ranges, Sequence) or isinstance(ranges, str | bytes):
            raise arguments.wrong("partitions", wanted, partitions, "Nothing was claimed")
        found[topic, number] = _disjoint((topic, number), sorted(_checked(each) for each in ranges))
    return found


def _checked(span: object) -> Span:
    if not isinstance(span, Sequence) or isinstance(span, str | bytes) or len(span) != 2:
        raise arguments.wrong("a range of key hashes", "(lo, hi), both included", span, "Nothing was claimed")
    lo, hi = (arguments.a_whole("a key hash", each, 0, MAX_KEY_HASH) for each in span)
    if lo > hi:
        raise arguments.wrong("a range of key hashes", "(lo, hi) with lo ≤ hi", span, "Nothing was claimed")
    return lo, hi


def _disjoint(key: Key, spans: list[Span]) -> tuple[Span, ...]:
    for before, span in pairwise(spans):
        if span[0] <= before[1]:
            raise ConfigurationError(
                f"{key[0]} [{key[1]}]: the ranges {before} and {span} have keys in common: this process would wait for "
                "itself. Nothing was claimed. Both ends of a range are included: (0, 9), (10, 19)"
            )
    return tuple(spans)


def check_order(ordered: frozenset[str], topics: Sequence[str], what: str) -> None:
    """Raises KeyRangeError (89) if one of these topics, or of those that a pattern matches, keeps the order."""
    patterns = [topic for topic in topics if topic.startswith("^")]
    kept = sorted(name for name in ordered if name in topics or any(re.match(each, name) for each in patterns))
    if kept:
        raise KeyRangeError(
            f"{what} is not possible for {', '.join(kept)}: Marshal(ordered_topics=…) says that the order of its "
            "partitions counts, and members that share one keep it by key at most. Nothing was claimed. Hold "
            "partitions whole (consumer(topics)), or take the topic out of ordered_topics",
            kip_number=89,
        )


# -- names --------------------------------------------------------------------------------------------------------


def checked_isolation(config: Mapping[str, object]) -> bool:
    """Whether ranges end at the last stable offset; raises ConfigurationError for an unknown level."""
    level = config.get("isolation.level", "read_committed")
    if level not in ("read_committed", "read_uncommitted"):
        raise ConfigurationError(f"isolation.level must be read_committed or read_uncommitted, not {level!r}")
    return level == "read_committed"


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
