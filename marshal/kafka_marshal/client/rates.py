"""``run(rate=…)``: how many tries may begin in a second (:mod:`.pacing` keeps to it)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import ConfigurationError

#: Priorities are 0 … 9, and 9 is first.
LEVELS = 10

#: Without ``burst``, a bucket has the tokens of this time (s), at least one.
BURST_S = 0.1


@dataclass(frozen=True, slots=True)
class Rate:
    """At most burst + per_second · t tries begin in any t seconds. Retries count."""

    per_second: float
    #: How many may begin at once after a pause; None: those of a tenth of a second, at least one.
    burst: int | None = None
    #: key(message): each value has the rate for itself. None: all messages share it.
    key: Callable[[Message], Hashable] | None = None
    #: The rate is that of the group: each member has its part, by the number of members that have partitions of the
    #: topic. For up to a second after it changes, and until a dead member's leases end, the sum is more or less.
    of_group: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_second", arguments.a_rate("per_second", self.per_second))
        if self.burst is not None:
            arguments.a_whole("burst", self.burst, 1)
        if self.key is not None:
            arguments.a_function("key", self.key, "message")
        arguments.a_flag("of_group", self.of_group)


#: What ``run(rate=…)`` takes.
Rates = float | Rate | Mapping[str, "float | Rate"]


def checked_rates(given: Rates) -> dict[str, Rate]:
    """Topic → its rate; "": of all topics. Raises ConfigurationError for what is no rate."""
    if isinstance(given, Mapping):
        if not given:
            raise arguments.wrong("rate", "a rate, or rates by topic", given, "Nothing was delivered")
        return {arguments.text("a topic of rate=", name): _a_rate(f"rate of {name!r}", x) for name, x in given.items()}
    return {"": _a_rate("rate", given)}


def _a_rate(name: str, given: object) -> Rate:
    return given if isinstance(given, Rate) else Rate(arguments.a_rate(name, given))


@dataclass(frozen=True, slots=True)
class TopicPriorities:
    """A function for ``run(priority=…)`` that other processes can be sent: by topic; others have 9."""

    levels: Mapping[str, int]

    def __call__(self, message: Message) -> int:
        return self.levels.get(message.topic() or "", LEVELS - 1)


def check_topics(given: Collection[str], subscription: Subscription, name: str = "rate") -> None:
    """Raises ConfigurationError for a topic in a parameter that the consumer does not read."""
    for topic in filter(None, given):
        if not (topic in subscription.names or any(each.match(topic) for each in subscription.patterns)):
            raise ConfigurationError(
                f"{name}= of run(…) has the topic {topic!r}, which this consumer does not read"
                f"{arguments.near(topic, subscription.topics)} Nothing was delivered. Name topics of consumer([…])"
            )
