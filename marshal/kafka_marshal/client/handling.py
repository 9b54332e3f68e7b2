"""The options of ``consumer.run``: retries, hooks, their limits; and what an error of a handler means for its message.

The library's own errors mean that a program is wrong, a cluster does not answer, or another member has the lease. The
message is not the reason, so none of them makes a dead letter. docs/handlers.md has the same table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from inspect import iscoroutinefunction
from random import Random
from typing import TYPE_CHECKING, Any, TypedDict, get_args

from kafka_marshal import arguments, errors
from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.options import ConsumerOptions, check_names
from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.topic_names import is_topic_name
from rationalizer.travel import Travels

if TYPE_CHECKING:
    from kafka_marshal.client.rates import Rate, Rates

#: A partition with this number of lanes that wait for a rate, or by priority, for a first try is not delivered further:
#: others are, however much waits of it.
MOST_WAITING = 1_000


class Fate(IntEnum):
    """What follows an error. Of a group of exceptions, the strongest counts: the one with the lowest number."""

    #: The run ends at once, and the message comes again.
    ENDS = 0
    #: It is tried again, even if ``Retry.on`` lacks it; after the last try the run ends, and the message comes again.
    RETRIED = 1
    #: The message has failed: it is tried again. After the last try it is a dead letter, or ends the run.
    FAILED = 2


#: Class → fate; a class that is not here has the fate of its nearest base class.
FATES: dict[type[errors.MarshalError], Fate] = {
    errors.MarshalError: Fate.ENDS,
    errors.KafkaUnavailableError: Fate.RETRIED,
    errors.AuthenticationError: Fate.ENDS,
    errors.AuthorizationError: Fate.ENDS,
    errors.LeaseError: Fate.RETRIED,
    errors.AdminError: Fate.RETRIED,
    errors.SinkError: Fate.FAILED,
    errors.StaleEpochError: Fate.RETRIED,
    errors.WrongEpochKindError: Fate.ENDS,
}


def fate_of(error: BaseException) -> Fate:
    """The fate of an error; of a group, the strongest fate in it."""
    if isinstance(error, BaseExceptionGroup):
        return min(fate_of(each) for each in error.exceptions)
    if not isinstance(error, Exception):
        return Fate.ENDS
    if not isinstance(error, errors.MarshalError):
        return Fate.FAILED
    if isinstance(error, errors.SinkError | errors.ProduceError | errors.TransactionError) and error.retry:
        return Fate.RETRIED
    return next(FATES[kind] for kind in type(error).__mro__ if kind in FATES)


#: Each thread costs memory, and the system limits their number; a task of an event loop costs a few kB.
MOST_THREADS = 1_000
MOST_TASKS = 100_000

#: More messages than this in one call of a handler are a mistake.
MOST_IN_A_BATCH = 10_000

#: More tries of one message than this are a mistake: with the default back-off they take weeks.
MOST_ATTEMPTS = 100_000

#: Jitter: a back-off is drawn between this share of it and all of it, so that keys do not retry at the same time.
JITTER = 0.5

Handler = Callable[[Any], object] | Callable[[Any], Awaitable[object]]


class RetryAfter(Travels, Exception):  # noqa: N818 - a handler raises it to ask for something
    """Raised by a handler: this try has failed, and the next one begins after this many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds: float = arguments.seconds("RetryAfter", seconds)
        super().__init__(f"to be tried again after {self.seconds:g} s")


@dataclass(frozen=True, slots=True)
class Retry:
    """When a message whose handler failed is tried again, in its place: later messages of its key wait.

    The n-th retry begins backoff[0] · 2ⁿ⁻¹ seconds after the failure, at most backoff[1], less a random part of up to
    half of that.
    """

    #: How often a message is tried at most, the first try included; None: until it succeeds.
    attempts: int | None = 5
    #: Seconds before the second try, and the most between two.
    backoff: tuple[float, float] = (0.1, 30.0)
    #: Failures that are retried; others are final at once, as after the last try.
    on: tuple[type[Exception], ...] = (Exception,)
    #: Exceptions to ``on``: failures that are final at once.
    not_on: tuple[type[Exception], ...] = ()
    #: Tries that wait are logged, so they survive handovers and restarts: ``Attempt.number`` counts all owners' tries.
    durable: bool = False
    #: after(error, attempt): the seconds before the next try, instead of ``backoff``; attempt: 1 after the first try.
    after: Callable[[BaseException, int], float] | None = None

    def __post_init__(self) -> None:
        if self.attempts is not None:
            arguments.a_whole("attempts", self.attempts, 1, MOST_ATTEMPTS)
        arguments.a_flag("durable", self.durable)
        if self.after is not None:
            arguments.a_function("after", self.after, "error, attempt")
        _check_backoff(self.backoff)
        object.__setattr__(self, "on", _kinds("on", self.on))
        object.__setattr__(self, "not_on", _kinds("not_on", self.not_on))

    def is_worth(self, error: BaseException, fate: Fate) -> bool:
        """Whether to retry a failure. (Temporary errors of this library are retried, unless ``not_on`` has them.)"""
        is_kind = fate is Fate.RETRIED or isinstance(error, (RetryAfter, *self.on))
        return is_kind and not isinstance(error, self.not_on)

    def delay(self, failures: int, rng: Random) -> float:
        """How long to wait (s) after this number of failures of a message."""
        first, most = self.backoff
        longest = min(most, first * 2.0 ** min(failures - 1, 64))
        return longest * rng.uniform(1 - JITTER, 1)

    def checked_delay(self, failures: int, rng: Random, error: BaseException | None = None) -> float:
        """How long to wait (s): as the error says, or ``after``, or ``delay``, which a subclass may override.

        Raises ConfigurationError if it is invalid.
        """
        if isinstance(error, RetryAfter):
            return error.seconds
        if self.after is not None and error is not None:
            return arguments.seconds("what Retry(after=…) returns", self.after(error, failures))
        return arguments.seconds(f"what {type(self).__name__}.delay() returns", self.delay(failures, rng))


def _check_backoff(given: object) -> None:
    wanted = "(seconds before the second try, most seconds between two)"
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise arguments.wrong("backoff", wanted, given)
    first, most = (arguments.seconds("backoff", each) for each in given)
    if first > most:
        raise arguments.wrong("backoff", f"{wanted}, the first no longer than the second", given)


def _kinds(name: str, given: object) -> tuple[type[Exception], ...]:
    kinds = given if isinstance(given, tuple) else (given,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise arguments.wrong(name, "a tuple of exception classes, each a subclass of Exception", given)
    return kinds


#: Without ``retry``, the first failure is final.
ONCE = Retry(attempts=1)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions called around each try, in the handler's thread or task; what they raise is only logged.

    Context variables that ``before`` sets are visible to the handler and to the other functions.
    """

    #: before(attempt)
    before: Callable[[Attempt], object] | None = None
    #: after(attempt, seconds): the handler has returned.
    after: Callable[[Attempt, float], object] | None = None
    #: failed(attempt, seconds, error): the handler has raised, or ``deserialize`` has.
    failed: Callable[[Attempt, float, BaseException], object] | None = None
    #: lost(attempt, seconds, error): it has raised when this process could not prove its lease any more, by its own
    #: clock: the failure does not count, and the message comes again. Called instead of ``failed``.
    lost: Callable[[Attempt, float, BaseException], object] | None = None

    def __post_init__(self) -> None:
        takes = {"before": "attempt", "after": "attempt, seconds", "failed": "attempt, seconds, error"}
        takes["lost"] = takes["failed"]
        for name, wanted in takes.items():
            if (function := getattr(self, name)) is not None:
                arguments.a_function(name, function, wanted)


class RunSettings(TypedDict, total=False):
    """The options of ``run``, except the handler and ``deserialize``."""

    concurrency: int
    order: Order
    retry: Retry | None
    dead_letters: str | None
    drain_timeout: float
    hooks: Sequence[Hooks]
    park: bool
    batch: int | None
    linger: float
    not_before: Callable[[Message], datetime | None] | None
    rate: Rates | None
    priority: Callable[[Message], int] | None


#: How long ``run`` waits at its end for handlers that have begun (s).
DRAIN_TIMEOUT_S = 30.0

#: The default of each.
RUN: RunSettings = {
    "concurrency": 16,
    "order": "key",
    "retry": Retry(),
    "dead_letters": None,
    "drain_timeout": DRAIN_TIMEOUT_S,
    "hooks": (),
    "park": False,
    "batch": None,
    "linger": 0.05,
    "not_before": None,
    "rate": None,
    "priority": None,
}

#: Members that share partitions by batches keep no other.
_ORDER_OF_SHARES: RunSettings = {"order": "none"}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``run``, checked."""

    handle: Handler
    concurrency: int
    order: Order
    retry: Retry
    dead_letters: str | None
    drain_timeout: float
    hooks: tuple[Hooks, ...]
    deserialize: Callable[[Message], Any] | None
    park: bool = False
    #: The handler gets a list of at most this many; None: one message.
    batch: int | None = None
    linger: float = 0.0
    not_before: Callable[[Message], datetime | None] | None = None
    #: Topic ("": all) → its rate; and 0 … 9 for each message.
    rates: Mapping[str, Rate] = field(default_factory=dict)
    priority: Callable[[Message], int] | None = None
    is_async: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_async", is_async(self.handle))

    @classmethod
    def checked(
        cls,
        consumer: ConsumerOptions,
        handle: Handler,
        deserialize: Callable[[Message], Any] | None,
        given: RunSettings,
    ) -> RunOptions:
        """Raises ConfigurationError for options that can't work."""
        check_names("Consumer.run", RunSettings, given)
        if consumer.settings.at_most_once:
            raise ConfigurationError(
                "run(…) is for delivery='at-least-once': it tries again what failed, and reports each message by "
                "itself, which a batch that was claimed as a whole does not allow. Nothing was handed out. Iterate "
                "over the consumer, or take batches"
            )
        if not is_async(handle):
            arguments.a_function("handle", handle, "message")
        found: RunSettings = {**RUN, **(_ORDER_OF_SHARES if consumer.settings.sharing is not None else {}), **given}
        most = MOST_TASKS if is_async(handle) else MOST_THREADS
        concurrency = arguments.a_whole("concurrency", found["concurrency"], 1, most)
        order, retry, dead_letters, hooks = found["order"], found["retry"], found["dead_letters"], found["hooks"]
        arguments.one_of("order", order, get_args(Order))
        if retry is not None:
            arguments.an_instance("retry", retry, Retry, "a Retry(…), or None: the first failure is final")
        if dead_letters is not None and not is_topic_name(arguments.text("dead_letters", dead_letters)):
            raise arguments.wrong("dead_letters", "a name that a topic can have", dead_letters)
        if dead_letters is not None and dead_letters in consumer.topics:
            raise ConfigurationError(
                f"dead_letters={dead_letters!r} is a topic that this consumer reads: its dead letters would come back "
                "to it for ever. Nothing was handed out. Name another topic"
            )
        drain_timeout = arguments.seconds("drain_timeout", found["drain_timeout"])
        if isinstance(hooks, Hooks):
            hooks = [hooks]
        for each in arguments.several("hooks", hooks, "a list of Hooks"):
            arguments.an_instance("hooks", each, Hooks, "a list of Hooks")
        if deserialize is not None:
            arguments.a_function("deserialize", deserialize, "message")
        if (not_before := found["not_before"]) is not None:
            arguments.a_function("not_before", not_before, "message")
        made, hooked = retry or ONCE, tuple(hooks)
        park = arguments.a_flag("park", found["park"])
        if consumer.settings.sharing is not None:
            _check_shared(order, made, at_most_once=consumer.settings.sharing.at_most_once)
        check_park(consumer, made, park=park, dead_letters=dead_letters)
        batch, linger = found["batch"], arguments.seconds("linger", found["linger"])
        _check_batch(consumer, batch, linger if "linger" in given else None, waits=not_before is not None)
        rates, priority = _rates(found["rate"]), found["priority"]
        if priority is not None:
            arguments.a_function("priority", priority, "message")
        if rates or priority is not None:
            _check_paced(consumer, batch, "rate" if rates else "priority", waits=not_before is not None)
        of_run = (handle, concurrency, order, made, dead_letters, drain_timeout, hooked, deserialize)
        return cls(*of_run, park, batch, linger, not_before, rates, priority)

    @property
    def is_paced(self) -> bool:
        """Whether lanes wait for a rate, or have priorities."""
        return bool(self.rates) or self.priority is not None

    @property
    def most_waiting(self) -> int | None:
        """How many lanes of a partition may wait; None: as many as may be in flight, for some may need no token."""
        return MOST_WAITING if self.is_paced and all(x.key is None for x in self.rates.values()) else None

    @property
    def is_durable(self) -> bool:
        """Whether tries are logged."""
        return self.park or self.retry.durable


def _check_shared(order: str, retry: Retry, *, at_most_once: bool) -> None:
    """Raises ConfigurationError for what members that share a partition by batches can't keep."""
    if at_most_once:
        raise ConfigurationError(
            "run(…) is for delivery='at-least-once': what the log gives at most once is done, and no try follows a "
            "failure. Nothing was delivered. Take batches()"
        )
    if order != "none":
        raise ConfigurationError(
            f"order={order!r} is not possible with mode=Batches(): several members work on one partition, "
            "and neighbours of a message may be at another one. Nothing was delivered. Use order='none', or a "
            "consumer that holds its partitions whole"
        )
    if retry.durable:
        raise ConfigurationError(
            "Retry(durable=True) is not possible with mode=Batches(): the log counts how many members were "
            "given a message (delivery_count), not the tries of each. Nothing was delivered. Leave it out"
        )


def _check_batch(consumer: ConsumerOptions, batch: int | None, linger: float | None, *, waits: bool) -> None:
    """Raises ConfigurationError if the handler can't get lists, or not as wanted."""
    if batch is None:
        if linger is not None:
            raise ConfigurationError(
                "linger=… is how long run(…, batch=…) waits for more messages, and there is no batch=. Nothing was "
                "delivered. Give batch=100, or leave linger out"
            )
        return
    arguments.a_whole("batch", batch, 1, MOST_IN_A_BATCH)
    if waits:
        raise ConfigurationError(
            "run(…, batch=…) does not work with not_before=: a list would wait for the latest of its messages. Nothing "
            "was delivered. Leave one of them out, or let the handler name those that are too early: raise "
            "MessagesFailedError({place: RetryAfter(seconds)})"
        )
    group, timeout_ms = consumer.settings.group, consumer.settings.handler_timeout_ms
    if linger is not None and timeout_ms is not None and linger * 1000 >= timeout_ms:
        raise ConfigurationError(
            f"linger={linger:g} is not shorter than handler_timeout ({timeout_ms / 1000:g} s), which begins with the "
            "first message of a list: its time would be over before the handler is called. Nothing was delivered. Give "
            "a shorter linger, such as 0.05, or a longer handler_timeout"
        )
    if group is not None and group.checkpoints is not None:
        raise ConfigurationError(
            "run(…, batch=…) does not work in a group that takes checkpoints: a cut would wait for whole lists. "
            "Nothing was delivered. Leave batch out, or use a group without checkpoints"
        )


def _rates(given: Rates | None) -> dict[str, Rate]:
    if given is None:
        return {}
    from kafka_marshal.client.rates import checked_rates  # not for other runs

    return checked_rates(given)


def _check_paced(consumer: ConsumerOptions, batch: int | None, name: str, *, waits: bool) -> None:
    """Raises ConfigurationError if what begins can't wait for rates or priorities. waits: ``not_before`` is given."""
    if waits and name == "rate":
        raise ConfigurationError(
            "run(…, not_before=…) and rate= exclude each other: a message that has to wait would take a token when it "
            "is asked for its time. Nothing was delivered. Leave one of them out, or raise RetryAfter in the handler"
        )
    if batch is not None:
        raise ConfigurationError(
            f"run(…, batch=…) and {name}= exclude each other: a rate and a priority are for one message. Nothing was "
            "delivered. Leave one of them out"
        )
    if consumer.settings.group is not None and consumer.settings.group.checkpoints is not None:
        raise ConfigurationError(
            f"run(…, {name}=…) does not work in a group that takes checkpoints: a cut would wait for what is to begin "
            "later. Nothing was delivered. Leave it out, or use a group without checkpoints"
        )


def check_park(
    consumer: ConsumerOptions, retry: Retry, *, park: bool, dead_letters: str | None, call: str = ""
) -> None:
    """Raises ConfigurationError if messages can't be set aside, or tries logged, as wanted."""
    if not (park or retry.durable):
        return
    name = "park=True" if park else "Retry(durable=True)"
    call = call or f"run(…, {name})"
    if consumer.settings.at_most_once:
        raise ConfigurationError(
            f"{call} is for delivery='at-least-once': at most once, a message counts as done before it is delivered. "
            "Nothing was changed. Leave it out, or make the consumer without delivery='at-most-once'"
        )
    if park and dead_letters is not None:
        raise ConfigurationError(
            f"park=True and dead_letters={dead_letters!r} exclude each other: after its last try a message is set "
            "aside in the log, or goes to that topic. Nothing was delivered. Leave one of them out"
        )
    if consumer.transactions is not None:
        raise ConfigurationError(
            f"{call} does not work with exactly_once=: their progress can't pass an open message. Nothing "
            "was handed out. Use dead_letters=…, which goes into the same transaction"
        )
    group = consumer.settings.group
    if group is not None and group.checkpoints is not None:
        raise ConfigurationError(
            f"{call} does not work in a group that takes checkpoints: what is open is in no checkpoint. "
            "Nothing was delivered. Use dead_letters=…, or a group without checkpoints"
        )


def is_async(handle: object) -> bool:
    """Whether it is a coroutine function, a partial of one, or an object whose ``__call__`` is one."""
    return iscoroutinefunction(handle) or iscoroutinefunction(arguments.function_of(handle))


def check_result(result: object) -> None:
    """Raises ConfigurationError for a result whose work has not run: its message is not done."""
    if what := arguments.unfinished(result):
        arguments.drop(result)
        raise ConfigurationError(
            f"the handler has returned {what}: its work has not run, or not to its end, so its message is not done and "
            "comes again. Give run(…) a function that does the work, or the coroutine function itself instead of a "
            "function that calls it; wait for the result of a future"
        )


def deserialized(deserialize: Callable[[Message], Any], message: Message) -> Any:
    """What the handler gets. Raises ConfigurationError if it would have to be awaited first."""
    value = deserialize(message)
    if arguments.is_awaited(value):
        arguments.drop(value)
        raise ConfigurationError(
            "deserialize has returned something that must be awaited, and run(…) awaits it nowhere. Its message is not "
            "done. Give a function that returns the value, or deserialize in the handler"
        )
    return value
