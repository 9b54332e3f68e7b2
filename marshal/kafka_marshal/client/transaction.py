"""Transaction: what one batch produces and its progress, committed together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from kafka_marshal.client.batch import Batch
from kafka_marshal.client.transactions import ABORTED, Headers, Output, TransactionalProducers, dropped, output
from kafka_marshal.engine.inputs import T, Ts
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.errors import ConfigurationError, TransactionError
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.serving import Reply

#: A transaction that waits for earlier ones checks this often (s) whether its caller is still there.
WAIT_S = 0.2

#: One that has waited this long (s) says so: perhaps its own thread has an earlier batch.
SAY_AFTER_S = 10.0


class TransactingConsumer(Protocol):
    """A consumer, as its transactions see it."""

    _driver: Driver
    _engine: ConsumerEngine
    _transactions: TransactionalProducers | None

    def _ask(self, function: Callable[..., None], *args: object) -> Reply[None]: ...

    def _take(self, function: Callable[[*Ts, float], T], *of: *Ts) -> T | None: ...


class Transaction:
    """A transaction of one batch; use it in ``with``. Made by :meth:`Consumer.transaction`.

    Leaving the block commits what was produced, and that the batch is done, as one. An exception in the block ends it
    with nothing committed and nothing produced: the batch comes again, and so do later ones of its partition.
    """

    __slots__ = ("_batch", "_consumer", "_outputs", "_run")

    def __init__(self, consumer: TransactingConsumer, batch: Batch) -> None:
        self._consumer = consumer
        #: Kept: a batch that the program drops comes again.
        self._batch = batch
        self._run: Run = batch._run
        #: None: it has ended, or not begun.
        self._outputs: list[Output] | None = None

    def produce(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> None:
        """Produce a record when the transaction commits; until then it is kept here. Any thread may call this.

        Text becomes UTF-8. ``partition``: None: the one that Java's producer chooses for the key; without a key, any.
        Raises ConfigurationError for what Kafka can't take, and outside of the ``with`` block.
        """
        if (outputs := self._outputs) is None:
            raise ConfigurationError("this transaction has ended, or was not entered: use it in `with`")
        outputs.append(output(topic, value, key, headers, partition))

    def __enter__(self) -> Self:
        self.begin()
        return self

    def begin(self) -> None:
        """What entering the block does."""
        if self._batch._is_used:
            raise ConfigurationError(
                "this batch has had its transaction, and can't have another. Nothing was committed. If it failed, the "
                "messages come again in another batch"
            )
        self._batch._is_used = True
        if self._run.assignment.tracker.runs.get(self._run.first) is not self._run:
            raise dropped(self._run.assignment.key)
        self._outputs = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        answer = self._consumer._ask(*self.end(error))
        try:
            answer.wait()
        finally:
            answer.receipt.left = True

    def end(self, error: BaseException | None) -> tuple[Callable[..., None], *tuple[object, ...]]:
        """What a thread of the library is to call, and its arguments: to commit or, after an error, to end it."""
        outputs, self._outputs = self._outputs or [], None
        return (self._commit, outputs) if error is None else (self._fail,)

    # On a thread of the library.

    def _commit(self, is_gone: Callable[[], bool], outputs: list[Output]) -> None:
        run, transactions = self._run, self._consumer._transactions
        assert transactions is not None
        try:
            with transactions.figures.wait():
                self._await_turn(is_gone)
            transactions.commit(run, outputs, lambda: self._turn() is True)
        except BaseException:
            self._abort(is_gone)
            raise
        with self._consumer._driver.lock.locked():
            self._consumer._take(self._consumer._engine.delivery.done_run, run)

    def _fail(self, is_gone: Callable[[], bool]) -> None:
        """The block raised."""
        transactions = self._consumer._transactions
        assert transactions is not None
        transactions.figures.ended(ABORTED)
        self._abort(is_gone)

    def _abort(self, is_gone: Callable[[], bool]) -> None:
        """It and all later batches of its partition that are in flight come again (M5)."""
        with self._consumer._driver.lock.locked():
            self._consumer._take(self._consumer._engine.positions.take_overs.abort, self._run)

    def _turn(self) -> bool | None:
        """Whether it may be committed now; None: it was dropped. The lock is held."""
        return self._consumer._take(self._consumer._engine.positions.take_overs.turn, self._run)

    def _await_turn(self, is_gone: Callable[[], bool]) -> None:
        """Wait until all earlier batches of the partition are committed; raises if one was not."""
        driver, key = self._consumer._driver, self._run.assignment.key
        say_at = driver.monotonic() + SAY_AFTER_S
        with driver.condition:
            while (turn := self._checked_turn()) is False:
                driver.lock.check()
                if driver.monotonic() >= say_at:
                    say_at = float("inf")
                    self._say_waiting()
                if is_gone():
                    raise TransactionError(f"{key[0]} [{key[1]}]: interrupted; nothing was committed", retry=True)
                driver.condition.wait(WAIT_S)
        if turn is None:
            raise dropped(key)

    def _say_waiting(self) -> None:
        topic, partition = self._run.assignment.key
        log(
            logging.WARNING,
            "transaction_waits",
            "%s [%d]: the transaction of offsets %d to %d has waited for %g s: earlier messages of this partition are "
            "in flight, and are committed first. Nothing is lost, and other partitions continue. Leave the blocks of a "
            "partition in the order of its batches. If a thread hangs in an earlier one, handler_timeout ends the wait",
            topic,
            partition,
            self._run.first,
            self._run.last,
            SAY_AFTER_S,
            topic=topic,
            partition=partition,
        )

    def _checked_turn(self) -> bool | None:
        with self._consumer._driver.lock.locked(step=False):
            return self._turn()
