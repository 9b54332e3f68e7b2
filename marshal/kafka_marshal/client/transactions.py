"""The transactional producers of one consumer: taking over with them, and committing (M1, M2, M4).

The engine decides when a partition is taken over, and in which order its transactions are committed
(:mod:`kafka_marshal.engine.work.taking_over`). Here is what talks to Kafka, on threads that may block.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kafka_marshal import arguments
from kafka_marshal.client.modes import Transactions
from kafka_marshal.engine.effects import TakeOver, TakeOverStep
from kafka_marshal.engine.figures import Distribution, Histogram
from kafka_marshal.engine.inputs import Ts
from kafka_marshal.engine.work.assignment import Assignment, Run
from kafka_marshal.engine.work.taking_over import TakeOvers, metadata_of
from kafka_marshal.errors import (
    AuthorizationError,
    ConfigurationError,
    KafkaUnavailableError,
    LeaseLostError,
    MarshalError,
    TransactionError,
    TransactionFencedError,
    TransactionLostError,
)
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.ports import TransactionalProducer
from kafka_marshal.runtime import Lock
from kafka_marshal.topic_names import is_topic_name
from kafka_marshal.types import Key

#: How a transaction ended. Unknown: the brokers have not answered; the producer that follows finds out.
COMMITTED, ABORTED, FENCED, UNKNOWN = "committed", "aborted", "fenced", "unknown"


class Transacted:
    """Any thread may add, under a lock that guards nothing else, and read without it: each figure is one value."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._counts: Counter[str] = Counter()
        self._seconds = Histogram()
        self._waiting: set[object] = set()

    @contextmanager
    def wait(self) -> Iterator[None]:
        """A transaction waits for earlier ones, or for a producer. What it raises ends it, with nothing committed."""
        one = object()
        self._waiting.add(one)
        try:
            yield
        except BaseException:
            self.ended(ABORTED)
            raise
        finally:
            self._waiting.discard(one)

    @property
    def waiting(self) -> int:
        """How many transactions wait."""
        return len(self._waiting)

    def committed(self, seconds: float) -> None:
        """A transaction was committed, this long after its begin."""
        with self._lock:
            self._counts[COMMITTED] += 1
            self._seconds.observe(seconds)

    def ended(self, outcome: str) -> None:
        """A transaction ended otherwise."""
        with self._lock:
            self._counts[outcome] += 1

    def read(self) -> tuple[Counter[str], Distribution]:
        """How many ended in each way, and how long the commits took."""
        return self._counts.copy(), self._seconds.read()


#: How long a producer's begin, or reading Kafka's committed offset, may take (s); then it is tried again.
STEP_TIMEOUT_S = 10.0

#: How many partitions are taken over at a time.
MOST_AT_A_TIME = 8

#: One producer's threads, descriptors and memory (MB).
COST = 4, 8, 0.5


class Output(NamedTuple):
    """A record to produce."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    #: None: the one that Java's producer chooses for the key; without a key, any.
    partition: int | None = None


Headers = Mapping[str, bytes | str | None] | Sequence[tuple[str, bytes | str | None]]


def output(
    topic: str,
    value: bytes | str | None,
    key: bytes | str | None = None,
    headers: Headers = (),
    partition: int | None = None,
) -> Output:
    """A record to produce, checked. Text becomes UTF-8. Raises ConfigurationError for what Kafka can't take."""
    if not is_topic_name(arguments.text("topic", topic)):
        raise arguments.wrong("topic", "a name that a topic can have", topic)
    if partition is not None:
        partition = arguments.a_whole("partition", partition, 0, arguments.MOST_PARTITION)
    named = () if headers == () else _headers(headers)
    return Output(topic, _bytes("value", value), _bytes("key", key), named, partition)


def _headers(headers: Headers) -> tuple[tuple[str, bytes | None], ...]:
    pairs: Any = headers.items() if isinstance(headers, Mapping) else headers
    if isinstance(pairs, str | bytes):
        raise arguments.wrong("headers", "a mapping, or (name, value) pairs", headers)
    try:
        return tuple((arguments.text("a header's name", name), _bytes("a header", each)) for name, each in pairs)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise arguments.wrong("headers", "a mapping, or (name, value) pairs", headers) from None


def _bytes(name: str, given: object) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    raise arguments.wrong(name, "bytes, text or None", given)


class _Kept:
    """The producer of one partition."""

    __slots__ = ("attempt", "is_busy", "is_over", "producer", "token")

    def __init__(self, producer: TransactionalProducer, token: int, attempt: int) -> None:
        self.producer = producer
        self.token = token
        self.attempt = attempt
        #: A thread uses it: that thread closes it, if it is over by then.
        self.is_busy = True
        self.is_over = False


class TransactionalProducers:
    """At most ``max_producers`` producers, one for each partition; the least recently used is closed for another."""

    def __init__(self, driver: Driver, options: Transactions, config: Mapping[str, object]) -> None:
        self._driver = driver
        self._options = options
        self._config = config
        self._group_id, self._log_name = driver.engine.settings.group_id, driver.engine.settings.log_name
        runtime = driver.cluster.runtime
        self._threads = runtime.executor(MOST_AT_A_TIME, "kafka-marshal-transactions")
        self.figures: Transacted = Transacted(runtime.lock())
        #: Guards what follows. Whoever holds it never takes the engine's lock.
        self._news = runtime.condition()
        #: Partition → its producer, the least recently used one first.
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        #: Partitions for whose producer a commit waits.
        self._awaited: set[Key] = set()
        #: Producers that are kept no longer, to be closed without a lock: that may take a while.
        self._retired: deque[TransactionalProducer] = deque()
        self._is_over = False
        self._is_said = False

    # Taking over (effects of the engine; its lock is held).

    def take_over(self, asked: TakeOver) -> None:
        """Carry out a step of taking over, on a thread of its own."""
        if not self._is_over:
            self._threads.submit(self._take_over, asked)

    def close_producer(self, key: Key, token: int) -> None:
        """The holding with this token is over: its producer is closed, once a commit in progress has ended."""
        with self._news:
            if (kept := self._kept.get(key)) is not None and kept.token == token:
                self._retire(key, kept)
        if self._retired and not self._is_over:
            self._threads.submit(self._close_retired)

    # On the threads of this class.

    def _take_over(self, asked: TakeOver) -> None:
        try:
            if self._is_over or self._driver.is_over or not self._driver.engine.is_asked(asked):
                return
            self._warn_of_many(asked.consumer)
            found = self._step(asked)
        except MarshalError as error:
            is_theirs = isinstance(error, ConfigurationError | AuthorizationError)
            self._answer(asked, lambda found: found.failed, asked, str(error), error if is_theirs else None)
        except Exception as error:  # noqa: BLE001 - logged with its traceback; it is tried again
            log(logging.ERROR, "take_over_failed", "taking over a partition for transactions failed", error=error)
            self._answer(asked, lambda found: found.failed, asked, f"{type(error).__name__}: {error}", None)
        else:
            self._answer(asked, lambda found: found.answered, asked, *found)

    def _answer(self, asked: TakeOver, function: Callable[[TakeOvers], Callable[[*Ts, float], None]], *of: *Ts) -> None:
        driver = self._driver
        with driver.condition:
            if not driver.is_over and (consumer := driver.engine.consumers.get(asked.consumer)) is not None:
                take_overs = consumer.positions.take_overs
                driver.engine.take(consumer.number, function(take_overs), *of, driver.now_ms())
                driver.lock.settle()

    def _step(self, asked: TakeOver) -> tuple[int | None, str]:
        """Returns Kafka's committed offset, if it was read and there is one, and its metadata."""
        match asked.step:
            case TakeOverStep.OPEN:
                self._open(asked)
            case TakeOverStep.READ | TakeOverStep.SET:
                found = self._driver.cluster.committed_offset(self._group_id, asked.key, STEP_TIMEOUT_S)
                if asked.step is TakeOverStep.SET:
                    self._set(asked)
                return found or (None, "")
        return None, ""

    def _open(self, asked: TakeOver) -> None:
        """Make the partition's producer, which fences its predecessor."""
        topic, partition = asked.key
        with self._news:
            if (old := self._kept.get(asked.key)) is not None:
                self._retire(asked.key, old)
            self._make_room(asked)
            kept = _Kept(self._made(f"{self._group_id}/{topic}/{partition}"), asked.token, asked.attempt)
            self._kept[asked.key] = kept
        try:
            kept.producer.init(STEP_TIMEOUT_S)
        except BaseException:
            with self._news:
                self._retire(asked.key, kept)
            raise
        finally:
            self._leave(kept)

    def _made(self, transactional_id: str) -> TransactionalProducer:
        timeout_ms = round(self._options.timeout * 1000)
        make = self._driver.cluster.transactional_producer
        return make(transactional_id, self._config, transaction_timeout_ms=timeout_ms)

    def _make_room(self, asked: TakeOver) -> None:
        """Close the least recently used producer that no thread needs, if there are too many; wait for one."""
        until = self._driver.monotonic() + STEP_TIMEOUT_S
        while len(self._kept) >= self._options.max_producers:
            idle = next((x for x in self._kept.items() if self._is_idle(asked.consumer, *x)), None)
            if idle is not None:
                self._retire(*idle)
                continue
            left_s = until - self._driver.monotonic()
            if left_s <= 0 or self._is_over:
                raise KafkaUnavailableError(
                    f"all {self._options.max_producers} transactional producers of this consumer are in use "
                    "(max_producers)"
                )
            self._news.wait(min(left_s, 0.1))

    def _is_idle(self, number: int, key: Key, kept: _Kept) -> bool:
        consumer = self._driver.engine.consumers.get(number)
        assignment = None if consumer is None else consumer.assignments.get(key)
        is_begun = assignment is None or assignment.epoch != kept.token or assignment.taking.is_done
        return is_begun and not kept.is_busy and key not in self._awaited

    def _set(self, asked: TakeOver) -> None:
        """Commit an offset alone (M3)."""
        kept = self._use(asked.key, asked.token, asked.attempt)
        if kept is None:
            raise TransactionError("its producer was closed meanwhile", retry=True)
        try:
            kept.producer.begin()
            metadata = metadata_of(asked.token, self._log_name)
            kept.producer.commit(self._group_id, asked.key, asked.offset, metadata, self._options.timeout)
        finally:
            self._leave(kept)

    def _warn_of_many(self, number: int) -> None:
        consumer = self._driver.engine.consumers.get(number)
        held = 0 if consumer is None else len(consumer.assignments)
        most = self._options.max_producers
        if held <= most or self._is_said:
            return
        self._is_said = True
        threads, descriptors, megabytes = COST
        log(
            logging.WARNING,
            "transactional_producers",
            "this consumer works on %d partitions and keeps at most %d transactional producers: to commit one of the "
            "others takes about 0.1 s longer, since its producer is made again. Nothing is lost. Share the partitions "
            "among more processes, or raise Transactions(max_producers=…) (each costs %d threads, %d descriptors and "
            "%g MB)",
            held,
            most,
            threads,
            descriptors,
            megabytes,
        )

    # Keeping producers.

    def _use(self, key: Key, token: int, attempt: int) -> _Kept | None:
        """The partition's producer, for this thread alone until ``_leave``; None: it was closed."""
        with self._news:
            kept = self._kept.get(key)
            if kept is None or kept.is_busy or (kept.token, kept.attempt) != (token, attempt):
                return None
            kept.is_busy = True
            self._kept.move_to_end(key)
            return kept

    def _leave(self, kept: _Kept) -> None:
        with self._news:
            kept.is_busy = False
            if kept.is_over:
                self._retired.append(kept.producer)
            self._news.notify_all()
        self._close_retired()

    def _retire(self, key: Key, kept: _Kept) -> None:
        """Keep it no longer; its user, if there is one, closes it. ``_news`` is held."""
        if self._kept.get(key) is kept:
            del self._kept[key]
        if not kept.is_over:
            kept.is_over = True
            if not kept.is_busy:
                self._retired.append(kept.producer)
        self._news.notify_all()

    def _close_retired(self) -> None:
        while True:
            try:
                self._retired.popleft().close()
            except IndexError:
                return
            except Exception as error:  # noqa: BLE001 - logged with its traceback; nothing depends on it any more
                log(logging.ERROR, "close_failed", "closing a transactional producer failed", error=error)

    def end(self) -> None:
        """Close all producers; those in use are closed when their commits have ended."""
        with self._driver.condition:
            self._is_over = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._news:
            for key, kept in list(self._kept.items()):
                self._retire(key, kept)
        self._close_retired()

    # Committing (on a thread of the library).

    def commit(self, run: Run, outputs: Sequence[Output], is_current: Callable[[], bool]) -> None:
        """Commit these records, and that all is done up to the run's end, as one transaction (*blocking*).

        The caller sees to the order (M5), and reports the messages as done when this has returned. is_current: asked
        under the engine's lock, right before: whether the run is still in flight.

        Raises, with nothing committed: TransactionLostError; TransactionError (retry: what was in flight comes again,
        and may succeed then); AuthorizationError and others of the producer. Raises TransactionFencedError, or
        TransactionError with retry, if another producer has fenced this one, or the outcome is not known: then the
        partition is taken over again, and what Kafka shows as committed does not come again.
        """
        assignment = run.assignment
        with self.figures.wait():
            kept = self._producer_of(assignment, is_current)
            try:
                self._check_lease(assignment)
            except LeaseLostError:
                self._leave(kept)
                raise
        try:
            self._produce(kept, run, outputs)
        finally:
            self._leave(kept)

    def _produce(self, kept: _Kept, run: Run, outputs: Sequence[Output]) -> None:
        producer, assignment = kept.producer, run.assignment
        timeout_s, began = self._options.timeout, self._driver.monotonic()
        try:
            producer.begin()
            for each in outputs:
                producer.send(*each)
            metadata = metadata_of(assignment.epoch, self._log_name)
            producer.commit(self._group_id, assignment.key, run.last + 1, metadata, timeout_s)
        except Exception as error:
            try:
                producer.abort(STEP_TIMEOUT_S)
            except Exception:  # noqa: BLE001 - whatever it was: the outcome is not known, and Kafka is asked
                self.figures.ended(FENCED if isinstance(error, TransactionFencedError) else UNKNOWN)
                self._replace(kept, assignment)
                raise self._unknown(assignment.key, error) from error
            self.figures.ended(ABORTED)
            if not getattr(error, "retry", False):
                with self._news:  # librdkafka counts a refused record: the next one would be out of sequence
                    self._retire(assignment.key, kept)
            if type(error) is KafkaUnavailableError:  # an outage: what comes again may be committed
                raise TransactionError(str(error), retry=True) from error
            raise
        self.figures.committed(self._driver.monotonic() - began)

    def _replace(self, kept: _Kept, assignment: Assignment) -> None:
        """The producer is of no use any more: take the partition over again, with another."""
        with self._news:
            self._retire(assignment.key, kept)
        with self._driver.lock.locked():
            self._untake(assignment, False)

    def _untake(self, assignment: Assignment, is_known: bool) -> None:
        engine = self._driver.engine
        if (consumer := engine.consumers.get(assignment.consumer.number)) is not None:
            of = assignment.key, assignment.epoch, is_known, self._driver.now_ms()
            engine.take(consumer.number, consumer.untake, *of)

    def _unknown(self, key: Key, error: Exception) -> Exception:
        topic, partition = key
        again = (
            "The partition is taken over again if it is still this member's; what Kafka shows as committed is done, "
            "and the rest comes again, here or at another member"
        )
        if isinstance(error, TransactionFencedError):
            text = f"{topic} [{partition}]: the producer is fenced: {str(error).rstrip('.')}"
            return TransactionFencedError(f"{text}. {again}", retry=True)
        if isinstance(error, AuthorizationError):
            return error
        # The error says whether it may be committed.
        text = f"{topic} [{partition}]: a transaction failed, and its producer is closed: {str(error).rstrip('.')}"
        return TransactionError(f"{text}. {again}", retry=True)

    def _producer_of(self, assignment: Assignment, is_current: Callable[[], bool]) -> _Kept:
        """The partition's producer; if it was closed for another, it is made again (M2)."""
        key, epoch, taking = assignment.key, assignment.epoch, assignment.taking
        try:
            while True:
                with self._driver.lock.locked():
                    self._driver.lock.check()
                    if assignment.over:
                        raise self._lost(assignment)
                    if not is_current():
                        raise dropped(key)
                    if taking.is_done:
                        if (kept := self._use(key, epoch, taking.attempt)) is not None:
                            return kept
                        self._awaited.add(key)
                        self._untake(assignment, True)
                with self._driver.condition:
                    self._driver.wait_for(lambda: taking.is_done or assignment.over or not is_current(), None)
        finally:
            self._awaited.discard(key)

    def _check_lease(self, assignment: Assignment) -> None:
        """By our own clock, right before the transaction: it may have taken long to get here (M4)."""
        if self._driver.now_ms() >= assignment.lease.proven_until:
            raise self._lost(assignment)

    @staticmethod
    def _lost(assignment: Assignment) -> TransactionLostError:
        topic, partition = assignment.key
        return TransactionLostError(
            f"{topic} [{partition}]: the lease is over, or not proven by this process's own clock: nothing was "
            "committed, and nothing produced. The messages come again, here or at another member"
        )


def dropped(key: Key) -> TransactionError:
    """The error of a transaction that began after one that failed (M5)."""
    topic, partition = key
    return TransactionError(
        f"{topic} [{partition}]: nothing was committed, and nothing produced: an earlier transaction of this partition "
        "failed, or the partition was taken over again meanwhile. The messages come again, in order",
        retry=True,
    )
