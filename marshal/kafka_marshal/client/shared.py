"""Consumers that share partitions with others: by batches, and by keys that the program names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kafka_marshal import arguments, ports
from kafka_marshal.client.base import check_partitions
from kafka_marshal.client.batch import Batch
from kafka_marshal.client.consumer import Consumer
from kafka_marshal.engine.shares.consumer import BatchRun, SharedConsumer
from kafka_marshal.engine.work.open_messages import Goal
from kafka_marshal.engine.work.pull import Pull
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.types import BatchToken
from rationalizer import key_hash
from rationalizer.levels import SHARING_LEVEL
from rationalizer.limits import MAX_REASON_BYTES

if TYPE_CHECKING:
    from kafka_marshal.engine.work.assignment import Run


def _aside_of(run: BatchRun) -> set[int]:
    """The offsets of its messages that the program has set aside."""
    assignment = run.assignment
    found = {each.last for each in assignment.desk.settling if each.kind is Goal.PARKED}
    lease = assignment.consumer.source.lease_of(assignment.key)
    holes = [] if lease is None else lease.progress.open
    found |= {hole.first for hole in holes if hole.is_parked and hole.since > run.token}
    return found & {offset_of(message) for message in run.messages}


class SharedBatch(Batch):
    """A batch of a partition that several members share: messages that the log has given to this member alone.

    Attributes (besides those of ``Batch``):
        first, last: the offsets that it has in the log.
        token: of the messages, the same as ``epoch``: larger than that of anyone who had them before.
        delivery_count: how many members have been given them, with this one.
    """

    __slots__ = ("_consumer", "delivery_count", "first", "last", "token")

    _run: BatchRun

    def __init__(self, consumer: ShareConsumer, run: BatchRun) -> None:
        messages = list(run.messages)
        super().__init__(consumer._say, run, messages, *consumer._about())
        self._consumer = consumer
        self.first: int = run.batch_first
        self.last: int = run.batch_last
        self.token: BatchToken = run.token
        self.epoch: int = self.token  # that of the share would refuse other members' batches
        self.delivery_count: int = run.attempts

    @property
    def is_held(self) -> bool:
        """Whether this process can prove by its own clock that the batch is its own; at most once: always True.

        Not after ``handler_timeout``: others have it then.
        """
        return super().is_held and cast("SharedConsumer", self._consumer._engine).delivery.has(self._run)

    @property
    def stable(self) -> int:
        """Everything of the partition up to this offset is done in the group, or open; −1: nothing is."""
        return self._run.assignment.consumer.known_stable((self.topic, self.partition))

    def done(self, messages: Iterable[ports.Message] | None = None) -> None:
        """All of it is done, or these messages; the rest stays in flight. It is reported with the next heartbeat.

        After its share of the partition ended (this process was stopped for too long), this reports nothing.
        """
        if messages is None:
            self._done(self._run)
            return
        for message in arguments.several("messages", list(messages), "messages of this batch"):
            self._consumer._say(cast("Any", message))

    def park(self, message: ports.Message, reason: str) -> None:
        """Set a message aside until an operator decides (kafka-marshal redrive, or discard); all others continue.

        ``reason``: 1 to 64 bytes for people, such as the class of an exception.
        """
        arguments.text("reason", reason)
        if not 0 < len(reason.encode()) <= MAX_REASON_BYTES or not reason.isprintable():
            raise arguments.wrong("reason", f"1 to {MAX_REASON_BYTES} bytes that can be printed", reason)
        offset, key = message.offset(), message.key()
        if offset is None:
            raise arguments.wrong("message", "a message of this batch", message)
        of = key_hash(key.encode() if isinstance(key, str) else key, offset)
        consumer, delivery = self._consumer, cast("SharedConsumer", self._consumer._engine).delivery
        consumer._say(partial(consumer._take, delivery.park, self._run, offset, of, reason))
        consumer._tell()

    def _aside(self) -> set[int]:
        return set() if self._look is None else self._look.read(lambda: _aside_of(self._run), set())

    def give_back(self) -> None:
        """Have others take what is not done of it; that counts as no delivery, and nothing is set aside for it.

        This member takes nothing of the partition for 100 ms then, twice as long each time in a row, at most a
        heartbeat interval.
        """
        consumer, delivery = self._consumer, cast("SharedConsumer", self._consumer._engine).delivery
        consumer._say(partial(consumer._take, delivery.give_back_run, self._run))
        consumer._tell()

    def __repr__(self) -> str:
        where = f"{self.topic!r}, {self.partition}, {self.first}…{self.last}"
        return f"SharedBatch({where}, token={self.token}, delivery_count={self.delivery_count})"


class ShareConsumer(Consumer):
    """Delivers batches of the partitions that it shares. Made by ``marshal.consumer(…, mode=Batches())``."""

    def _enter(self, *of: Any) -> None:
        self._driver.upkeep.scope.read_all()
        level = min((world.level for world in self._driver.replica.worlds.values()), default=SHARING_LEVEL)
        if level < SHARING_LEVEL:
            raise ConfigurationError(
                f"mode=Batches() needs level {SHARING_LEVEL} of the coordination topic "
                f"{self._driver.replica.topic!r}, which is at level {level}. Nothing was claimed. Raise it, once all "
                "members run a release that knows it: kafka-marshal upgrade"
            )
        super()._enter(*of)

    # Reports (any thread).

    def _say(self, what: Any) -> None:
        super()._say(what)
        is_much = len(self._inbox) >= cast("SharedConsumer", self._engine).taking.news_at
        if is_much or isinstance(what, BatchRun):
            self._tell()

    def _tell(self) -> None:
        if not self._nudged:
            self._nudged = True
            self._driver.post(self._hear)

    # Getting batches.

    def batches(self, max_messages: int = 500, timeout: float = 1.0) -> Iterator[SharedBatch]:
        """Batches that the log has given to this member alone, of at most max_messages, in no order.

        How large they are follows from how fast they are handled and how much is free for how many: about a quarter of
        a second's work, and less where others wait for work. A batch is in flight until ``done()``, ``park`` or
        ``give_back()``, or until nothing refers to it, in any thread; if this process ends, others get it, with a
        ``delivery_count`` that is one higher. ``timeout``: a batch is delivered whole, or what is read of it after this
        many seconds. Ends after ``stop()`` or ``close()``.
        """
        max_messages = arguments.a_whole("max_messages", max_messages, 1)
        timeout = arguments.seconds("timeout", timeout)
        return cast("Iterator[SharedBatch]", self._batches(max_messages, timeout))

    def _batch_of(self, run: Run) -> SharedBatch:
        return SharedBatch(self, cast("BatchRun", run))

    def _serve_batch(self, is_gone: Callable[[], bool], max_messages: int, timeout: float) -> Run | None:
        with self._driver.lock.locked(step=False):
            self._take(cast("SharedConsumer", self._engine).wants, max_messages, timeout * 1000)
        return self._pull(Pull(self._engine), is_gone, max_messages)

    # What is not possible with shares.

    def __iter__(self) -> NoReturn:
        raise self._not_shared("iterating")

    def poll(self, timeout: float | None = None) -> NoReturn:
        """Refuse (ConfigurationError): what is shared comes in batches."""
        raise self._not_shared("poll()")

    def consume(self, num_messages: int = 1, timeout: float | None = None) -> NoReturn:
        """Refuse (ConfigurationError): what is shared comes in batches."""
        raise self._not_shared("consume()")

    def seek(self, topic: str, partition: int, offset: int, *, force: bool = False) -> NoReturn:
        """Refuse (ConfigurationError): the position is that of all sharers."""
        raise self._not_shared("seek()")

    @staticmethod
    def _not_shared(what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{what} is not possible with mode=Batches(): the log gives batches to members. Nothing was "
            "delivered or changed. Use batches(), or run(handle, order='none')"
        )


class AssignedConsumer(Consumer):
    """Its partitions, or their keys, are named by the program. Made by ``marshal.consumer(mode=Keys({…}))``."""

    def _enter(self, *of: Any) -> None:
        self._driver.upkeep.scope.read_all()
        self._require_sharing_level("mode=Keys(…)")
        super()._enter(*of)
        subscription = self._engine.subscription
        exist = {topic for topic, _ in subscription.partitions}
        try:
            named = self._options.settings.keys or ()
            check_partitions(subscription, [(topic, number) for topic, number, _ in named if topic in exist])
        except ConfigurationError:
            self._free()
            raise
