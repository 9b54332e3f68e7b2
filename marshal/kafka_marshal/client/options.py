"""The options of consumers: one table, of which each maker has a part.

``OPTIONS`` has the default and the check of each option. The classes before it say who has it, and of which type: a
maker takes ``**options: Unpack[…]`` of its class. :meth:`kafka_marshal.Marshal.consumer` and the other makers describe
them. :class:`ConsumerOptions` is what a consumer gets: all of them, checked as a whole.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial, wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypedDict, TypeVar, get_args

from kafka_marshal import arguments
from kafka_marshal.client.modes import MODES, Batches, Claims, Group, Keys, Mode, Transactions
from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.policies import Balanced
from kafka_marshal.engine.settings import (
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
from kafka_marshal.types import Delivery, P, Start, T, WhenStuck

if TYPE_CHECKING:
    from kafka_marshal.checkpoints import CheckpointPolicy

F = TypeVar("F")
M = TypeVar("M", bound=Callable[..., object])

# -- who has which ------------------------------------------------------------------------------------------------


class RangesArguments(TypedDict, Generic[F], total=False):
    """The options of ``Marshal.ranges``, beside the mode: what every consumer takes; F: its callbacks."""

    delivery: Delivery
    start: Start
    handler_timeout: float | None
    revoke_timeout: float | None
    position_lost: WhenStuck
    checkpoints: CheckpointPolicy | None
    on_assign: F | None
    on_revoke: F | None
    on_lost: F | None
    config: Mapping[str, object] | None


class ConsumerArguments(RangesArguments[F], Generic[F], total=False):
    """The options of ``Marshal.consumer``, beside the mode."""

    batch_size: int
    auto_done: bool
    max_bytes_in_flight: int
    partition_stuck: WhenStuck
    exactly_once: Transactions | None


# -- the table ----------------------------------------------------------------------------------------------------

#: Callbacks for checkpoints → what they take, for people.
TAKES: Final[Mapping[str, str]] = {"on_checkpoint": "checkpoint", "on_restore": "restore", "on_completed": "id"}

#: Callbacks about partitions.
CALLBACKS: Final = ("on_assign", "on_revoke", "on_lost")

DEFAULT_BATCH_SIZE = 1_000

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


def _seconds_or_none(name: str, value: object) -> object:
    if value is not None:
        arguments.seconds(name, value, above=0)
    return value


def _checkpoints(name: str, value: object) -> object:
    if value is not None:
        from kafka_marshal.checkpoints import CheckpointPolicy  # not for a worker without

        arguments.an_instance(name, value, CheckpointPolicy, "a CheckpointPolicy, such as CheckpointPolicy()")
    return value


def _exactly_once(name: str, value: object) -> object:
    if value is not None:
        arguments.an_instance(name, value, Transactions, "Transactions(…), or None: progress goes to the log alone")
    return value


def check_callback(name: str, callback: T) -> T:
    """Raises ConfigurationError for a callback that can't be called (None is allowed)."""
    if callback is not None:
        arguments.a_function(name, callback, "consumer, partitions")
    return callback


class Option(NamedTuple):
    """One option of some makers."""

    default: object
    #: Name, value → the value that counts. Raises ConfigurationError for one that can't work.
    check: Callable[[str, Any], object]


#: They are checked in this order.
OPTIONS: Final[Mapping[str, Option]] = {
    "delivery": Option("at-least-once", _one_of(Delivery)),
    "start": Option("earliest", _start),
    "batch_size": Option(DEFAULT_BATCH_SIZE, _from(1)),
    "handler_timeout": Option(None, _seconds_or_none),
    "revoke_timeout": Option(None, _seconds_or_none),
    "auto_done": Option(True, arguments.a_flag),
    "max_bytes_in_flight": Option(DEFAULT_BYTES_IN_FLIGHT, _from(1)),
    "position_lost": Option("leave", _one_of(WhenStuck)),
    "partition_stuck": Option("leave", _one_of(WhenStuck)),
    "checkpoints": Option(None, _checkpoints),
    "exactly_once": Option(None, _exactly_once),
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


#: Names of before → what is given instead.
_OLD: Final[Mapping[str, str]] = {
    "policy": "mode=Claims(policy=…)",
    "claim_ahead": "mode=Claims(claim_ahead=…)",
    "group": "mode=Group(…)",
    "strategy": "mode=Group(strategy=…)",
    "session_timeout_ms": "mode=Group(session_timeout=…), in seconds",
    "allow_key_share": "mode=Group(allow_key_share=…)",
    "mirror_offsets": "mode=Group(mirror_offsets=…)",
    "shared_batches": "mode=Batches()",
    "max_shares": "mode=Batches(max_shares=…)",
    "transactions": "exactly_once=Transactions() of the consumer",
    "transaction_timeout": "exactly_once=Transactions(timeout=…)",
    "max_transactional_producers": "exactly_once=Transactions(max_producers=…)",
    "on_checkpoint": "checkpoints=CheckpointPolicy(on_checkpoint=…)",
    "on_restore": "checkpoints=CheckpointPolicy(on_restore=…)",
    "on_completed": "checkpoints=CheckpointPolicy(on_completed=…)",
    "heartbeat_interval_ms": "heartbeat_interval=…, in seconds",
    "auto_offset_reset": "start=…",
    "group_consumer": "consumer(topics, mode=Group(…))",
    "group_ranges": "ranges(topics, mode=Group(…))",
    "assign": "consumer(mode=Keys({…}))",
    "position": "assignment()",
}


def _instead(name: str) -> str:
    return f"; it is {_OLD[name]} now" if name in _OLD else ""


def check_names(maker: str, kind: Any, given: Mapping[str, object]) -> None:
    """Raises TypeError, as a call does, for an option that a kind does not have."""
    refuse_unknown(maker, kind.__annotations__, given)


def refuse_unknown(function: str, known: Container[str], given: Mapping[str, object]) -> None:
    """Raises TypeError, as a call does, for an argument that is not known; it says what an old one is now."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{_instead(name)}")


def says_new(function: Callable[P, T]) -> Callable[P, T]:
    """Has a call with an argument of before say what it is now."""
    known = signature(function).parameters

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> T:
        refuse_unknown(function.__qualname__, known, named)
        return function(*given, **named)

    return call


class Renamed:
    """What it had under another name before says so."""

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{_instead(name)}")


def checked(maker: str, kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a kind, each checked by itself: as given, or the default."""
    check_names(maker, kind, given)
    known = kind.__annotations__
    return {name: x.check(name, given.get(name, x.default)) for name, x in OPTIONS.items() if name in known}


# -- all of them, checked together --------------------------------------------------------------------------------


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
    transactions: Transactions | None = None
    #: The user's functions of a group that takes checkpoints, by the names of their arguments; None: not given.
    state_callbacks: Mapping[str, Any] = field(default_factory=dict)
    #: Progress is also committed to the Kafka group of the same name.
    mirror_offsets: bool = False
    #: Ranges end at the last stable offset, as for a read_committed reader.
    committed: bool = True

    @classmethod
    def of(cls, topics: tuple[str, ...], found: Mapping[str, Any], group_id: str, mode: Mode, *, ranges: bool) -> Self:
        """Of what ``checked`` has found. Raises ConfigurationError for options that contradict each other."""
        callbacks, at_most_once = {name: found[name] for name in CALLBACKS}, found["delivery"] == "at-most-once"
        claims = mode if isinstance(mode, Claims) else None
        group = mode if isinstance(mode, Group) else None
        transactions: Transactions | None = found.get("exactly_once")
        if claims and claims.claim_ahead and not at_most_once:
            raise ConfigurationError(
                "claim_ahead=True is for delivery='at-most-once': at least once nothing is claimed before it is handled"
            )
        if transactions and not group_id.isascii():
            raise ConfigurationError(
                f"exactly_once= needs a group id of ASCII characters: librdkafka commits no offsets in transactions "
                f"for group {group_id!r}. Nothing was claimed. Use another group id, or no transactions"
            )
        handler_s, revoke_s = found["handler_timeout"], found["revoke_timeout"]
        revoke_s = handler_s if revoke_s is None else revoke_s
        default_revoke_ms = REVOKE_RANGES_TIMEOUT_MS if ranges else REVOKE_TIMEOUT_MS
        lost = frozenset({Why.POSITION}) if found["position_lost"] == "raise" else frozenset[Why]()
        policy = (claims and claims.policy) or Balanced()
        takes = _checked_checkpoints(found["checkpoints"], ranges=ranges)
        keys = mode.partitions.items() if isinstance(mode, Keys) else None
        settings = ConsumerSettings(
            at_most_once=at_most_once and not isinstance(mode, Batches),
            policy=policy,
            start=found["start"],
            batch_size=found.get("batch_size", 1),
            handler_timeout_ms=None if handler_s is None else handler_s * 1000,
            callbacks=frozenset(Callback(name) for name, callback in callbacks.items() if callback is not None),
            ranges=ranges,
            raises=lost | UNREADABLE if found.get("partition_stuck") == "raise" else lost,
            policy_raised=partial(report, f"the policy {type(policy).__name__}"),
            claim_ahead=bool(claims and claims.claim_ahead),
            max_bytes_in_flight=found.get("max_bytes_in_flight", DEFAULT_BYTES_IN_FLIGHT),
            group=None
            if group is None
            else GroupOptions(group.strategy, group.session_timeout_ms, group.allow_key_share, takes, group.beats),
            sharing=SharingOptions(mode.max_shares, at_most_once=at_most_once) if isinstance(mode, Batches) else None,
            keys=None if keys is None else tuple((*key, tuple(spans)) for key, spans in keys),
            transactions=transactions is not None,
            revoke_timeout_ms=default_revoke_ms if revoke_s is None else revoke_s * 1000,
        )
        if transactions is not None:
            _check_with_transactions(settings)
        if takes is not None:
            _check_with_checkpoints(settings)
        mirrors = group is not None and group.mirror_offsets
        if mirrors and transactions is not None:
            raise ConfigurationError(
                "mirror_offsets=True is for progress that is in the log alone. With exactly_once=, the offsets in "
                "Kafka are exact already, and a mirror could overwrite them. Nothing was claimed. Leave it out"
            )
        state = {name: getattr(found["checkpoints"], name, None) for name in TAKES}
        return cls(
            topics, settings, callbacks, found.get("auto_done", False), found["config"], transactions, state, mirrors
        )


def _checked_checkpoints(policy: CheckpointPolicy | None, *, ranges: bool) -> CheckpointOptions | None:
    """How a member takes checkpoints; None: not at all. Raises ConfigurationError for what can't work.

    ranges: it takes ranges of offsets, and a cut waits for their end for as long as the barrier allows.
    """
    if policy is None:
        return None
    for name, wanted in TAKES.items():
        if (callback := getattr(policy, name)) is not None:
            arguments.a_function(name, callback, wanted)
    if policy.on_checkpoint is not None and policy.on_restore is None:
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
        has_callback=policy.on_checkpoint is not None,
    )


def _check_with_transactions(settings: ConsumerSettings) -> None:
    """Raises ConfigurationError for options that contradict transactions (M8)."""
    if settings.at_most_once:
        raise ConfigurationError(
            "exactly_once= is for delivery='at-least-once', which is the default: with it, each message has its "
            "effect exactly once. At most once, a crash loses messages instead. Nothing was claimed"
        )
    if settings.group is not None and settings.group.allow_key_share:
        raise ConfigurationError(
            "exactly_once= is for whole partitions: Kafka keeps one offset for a partition, not one for some of its "
            "keys. Nothing was claimed. Leave out allow_key_share=True; run(…, order='key') handles many keys of a "
            "partition at a time"
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
            "output to Kafka, once for read_committed readers: exactly_once= alone"
        )


# -- modes --------------------------------------------------------------------------------------------------------


def check_mode(mode: object, found: Mapping[str, Any], *, ranges: bool) -> None:
    """Raises ConfigurationError for what is no mode, and for options that are not possible with it."""
    wanted = "Claims(…) or Group(…)" if ranges else MODES
    arguments.an_instance("mode", mode, get_args(Claims | Group if ranges else Mode), wanted)
    for name in () if not ranges else ("claim_ahead", "allow_key_share", "mirror_offsets"):
        if getattr(mode, name, False):
            raise ConfigurationError(
                f"{name}=True is not possible for ranges: partitions are taken whole. Nothing was claimed. Leave it out"
            )
    for name, why in mode.cannot.items():  # type: ignore[attr-defined]
        value = found.get(name)
        if value is not None and value != "at-least-once":
            shown = f"{name}={value!r}" if isinstance(value, str) else f"{name}="
            raise ConfigurationError(
                f"{shown} is not possible with mode={type(mode).__name__}(…): {why}. Nothing was claimed"
            )


def check_shared(ordered: frozenset[str], topics: Sequence[str], mode: Mode) -> None:
    """Raises KeyRangeError (89) if this mode shares a partition whose order counts."""
    if isinstance(mode, Keys):
        check_order(ordered, mode.topics_in_part, "Keys(…) with ranges")
    elif isinstance(mode, Batches):
        check_order(ordered, topics, "mode=Batches()")
    elif isinstance(mode, Group) and mode.allow_key_share:
        check_order(ordered, topics, "allow_key_share=True")


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
