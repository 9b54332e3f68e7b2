"""Commits transactions: those of batches, and what the handlers of ``run`` have finished (M4 to M6).

A batch is one transaction, which a caller's block ends. Of a run the engine chooses the blocks::

    workers             report finished messages, with what these hold back
    the engine          collects them: :mod:`kafka_marshal.engine.work.in_lanes`
    committers          our threads: each takes a block of one partition, and commits it as one transaction

One committer at a time waits for the next block. When it has one, another takes its place. A dead letter goes into the
transaction of its message (M6).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from math import inf
from random import Random
from types import TracebackType
from typing import Any, Self, cast

from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.batch import Batch
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.client.handling import MOST_ATTEMPTS, Fate, Retry, fate_of
from kafka_marshal.client.transactions import ABORTED, Headers, Output, TransactionalProducers, dropped, output
from kafka_marshal.client.tries import Held, Letters, Tries, held_back
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.in_lanes import BLOCK_MESSAGES, Block, Finished, Purgatory
from kafka_marshal.engine.work.lane import HeldBack, Lane
from kafka_marshal.errors import ConfigurationError, LeaseLostError, ProduceError, TransactionError
from kafka_marshal.logs import log
from kafka_marshal.node.serving import Reply
from kafka_marshal.types import Key


class LettersInTransactions(Letters):
    """Dead letters of a run with transactions: each goes into the transaction of its message (M6)."""

    def _send(self, lane: Lane, attempt: Attempt, error: Exception, with_trace: bool) -> None:
        self._tries.settled(lane, self.finished(attempt, error, with_trace))

    def finished(self, attempt: Attempt, error: Exception, with_trace: bool) -> Finished:
        """A message with its dead letter as its output."""
        return held_back(attempt, (self.letter(attempt, error, with_trace),), error, with_trace)


#: A transaction that waits for earlier ones checks this often (s) whether its caller is still there.
WAIT_S = 0.2

#: One that has waited this long (s) says so: perhaps its own thread has an earlier batch.
SAY_AFTER_S = 10.0

#: At most this many transactions at a time, each of another partition.
COMMITTERS = 8

#: A committer that waits for nothing in particular checks this often (s) whether there is something.
LOOK_S = 0.1

#: The engine hears at once of output that is more than this share of the limit.
UNHEARD_SHARE = 0.1

#: At its end a run waits this long (s) for its transactions, if its handlers have used up ``drain_timeout``.
LAST_COMMITS_S = 5.0

#: The pauses between two tries of a transaction.
PAUSES = Retry(backoff=(0.2, 10.0))


class Transacting:
    """Commits one block after the other, and deals with failures. Called by several threads."""

    def __init__(
        self,
        tries: Tries,
        transactions: TransactionalProducers,
        letters: LettersInTransactions | None,
        pause: Callable[[float], None],
    ) -> None:
        """pause: waits this long (s), or until the run has ended."""
        self._consumer = tries.consumer
        self._tries = tries
        self._transactions = transactions
        self._letters = letters
        #: How often a transaction is tried whose record could not be written, though that may change.
        self._attempts = tries.options.retry.attempts or MOST_ATTEMPTS
        self._pause = pause
        self._rng: Random = tries.runtime.random()
        #: Transactions under way, and since when (ms, own clock). A partition that was lost and is held again may have
        #: two: that of the lost lease waits for an answer of the brokers.
        self.under_way: dict[Run, float] = {}
        #: Partition → how often its transaction failed in a row, when it was first begun, and why it failed last.
        self._failed: dict[Key, tuple[int, float, str]] = {}

    def begin(self, block: Block, now: float) -> None:
        """The transaction of this block begins."""
        self.under_way[block.run] = now

    def held_back(self, now: float, longer_than: float) -> list[HeldBack]:
        """Partitions whose transaction has been under way, or has failed, for this long (ms)."""
        found = []
        for run, began in self.under_way.copy().items():
            key, offset = run.assignment.key, run.first
            _, since, why = self._failed.get(key, (0, began, ""))
            if now >= since + longer_than:
                text = f"its transaction{why and f', which failed: {why}'}"
                found.append(HeldBack(*key, offset, None, now - since, 0, why=text))
        return found

    def commit(self, block: Block) -> None:
        """Commit a block (*blocking*)."""
        run = block.run
        key, tracker = run.assignment.key, run.assignment.tracker
        held = [cast("Held", each.held) for each in block.finished]
        outputs = [output for each in held for output in each.outputs]

        try:
            self._transactions.commit(run, outputs, lambda: tracker.has(run))
        except Exception as error:  # noqa: BLE001 - it is tried again, or ends the run
            self._settle(block, error)
        else:
            self._failed.pop(key, None)
            with self._consumer._driver.lock.locked():
                self._consumer._take(self._purgatory.committed, run)
            for each in held:
                if each.error is not None and self._letters is not None:
                    self._tries.note_letter(each.attempt, each.error, self._letters.topic)
        del self.under_way[run]

    def _settle(self, block: Block, error: Exception) -> None:
        """A transaction failed: its messages wait for another one, or come again, or the run ends."""
        run, held = block.run, [cast("Held", each.held) for each in block.finished]
        key = run.assignment.key
        is_here = run.assignment.tracker.has(run) and not run.assignment.over
        failures, since, _ = self._failed.get(key, (0, self.under_way[run], ""))
        self._failed[key] = failures + 1, since, str(error)
        most, letter = 0, None
        if not is_here:
            self._log(key, error)
        elif isinstance(error, LeaseLostError):
            most = len(held)  # in doubt for now: the next try waits until it is proven again
        elif isinstance(error, ProduceError) and not error.retry:
            most, letter = self._refused(held, error)
        elif _may_pass(error) and not (isinstance(error, ProduceError) and failures + 1 >= self._attempts):
            self._log(key, error)
            self._pause(PAUSES.delay(failures + 1, self._rng))
            most = len(held)
        else:
            self._tries.end(error)
        with self._consumer._driver.lock.locked():
            self._consumer._take(self._purgatory.failed, run, most)
            if letter is not None:
                self._consumer._take(self._consumer._engine.delivery.finish, [letter])

    @property
    def _purgatory(self) -> Purgatory:
        return self._consumer._engine.delivery.in_lanes.purgatory

    def _refused(self, held: list[Held], error: ProduceError) -> tuple[int, Finished | None]:
        """A record of these messages can't be written.

        Returns how many of them the next transaction has at most, and a dead letter in place of what it was.
        """
        letters = self._letters
        if len(held) > 1:
            return len(held) // 2, None  # the message is found by halves; those before it are committed
        (each,) = held
        topic = each.attempt.message.topic()
        if letters is not None and (each.error is None or each.has_trace):
            if each.error is None:
                self._consumer._handled.failed(topic, error)
                self._tries.failures.failed(each.attempt, error)
            return 1, letters.finished(each.attempt, each.error or error, with_trace=each.error is None)
        if each.error is not None:
            error.__context__ = each.error  # the run raises both
        self._tries.note(each.attempt, error)
        self._tries.end(error)
        return 0, None

    def _log(self, key: Key, error: Exception) -> None:
        log(
            logging.WARNING,
            "transaction_failed",
            "%s [%d]: a transaction failed: %s",
            *key,
            str(error).removeprefix(f"{key[0]} [{key[1]}]: "),
            topic=key[0],
            partition=key[1],
        )


class Committers:
    """The threads that commit the transactions of one run."""

    def __init__(
        self, tries: Tries, transactions: TransactionalProducers, letters: LettersInTransactions | None
    ) -> None:
        self._consumer = tries.consumer
        self._tries = tries
        self._transacting = Transacting(tries, transactions, letters, self._pause)
        self._driver = tries.consumer._driver
        self._runtime = tries.runtime
        #: Guards what follows.
        self._news = self._runtime.condition()
        self._threads = self._idle = 0
        #: About how many bytes of output the engine does not know of yet.
        self._unheard = 0
        self._has_leader = self._is_waiting = False
        #: Take what there is; nothing is left to take; take nothing more.
        self._is_urgent = self._is_empty = self._is_over = False

    def start(self) -> None:
        """Begin to commit (the feeder)."""
        with self._driver.lock.locked(step=False):
            consumer = self._consumer._engine
            self._driver.engine.take(consumer.number, consumer.delivery.in_lanes.purgatory.open)
        self._start_one()

    def _start_one(self) -> None:
        self._threads += 1
        self._runtime.start(self._serve, f"kafka-marshal-transactions-{self._threads}")

    def heard(self, size: int) -> None:
        """A message that holds back this many bytes is finished (any thread)."""
        self._unheard += size  # not exactly: threads may overwrite each other's
        most = self._consumer._delivery.memory.half_bytes * UNHEARD_SHARE
        is_much = self._unheard > most or len(self._consumer._inbox) >= BLOCK_MESSAGES
        if self._is_waiting or is_much:
            with self._news:
                self._is_waiting = False
                self._news.notify_all()

    def end(self, timeout: float, *, is_abandoned: bool = False) -> None:
        """Commit what is left and can be committed, and end (*blocking*; the feeder)."""
        until = self._runtime.monotonic() + (0.0 if is_abandoned else max(timeout, LAST_COMMITS_S))
        with self._news:
            self._is_urgent = True
            self._news.notify_all()
            while not self._is_empty and self._threads and not self._driver.is_over:
                left = until - self._runtime.monotonic()
                if left <= 0:
                    break
                self._news.wait(min(left, LOOK_S))
            self._is_over = True
            self._news.notify_all()
        with self._driver.lock.locked():
            self._consumer._drain()
            self._consumer._take(self._consumer._engine.delivery.in_lanes.purgatory.close)

    def held_back(self, now: float, longer_than: float) -> list[HeldBack]:
        """Partitions whose transaction has been under way, or has failed, for this long (ms)."""
        return self._transacting.held_back(now, longer_than)

    # The threads.

    def _serve(self) -> None:
        try:
            while (block := self._next()) is not None:
                self._transacting.commit(block)
                with self._news:
                    self._news.notify_all()
        except BaseException as error:  # noqa: BLE001 - without this thread nothing is committed
            self._tries.end(error)
        with self._news:
            self._threads -= 1
            self._news.notify_all()

    def _next(self) -> Block | None:
        """Wait for the next block, after those that wait already; None: there is none, and will be none."""
        with self._news:
            self._idle += 1
            while self._has_leader and not self._is_over:
                self._news.wait()
            self._idle -= 1
            self._has_leader = True
        try:
            found = self._await_block()
        finally:
            with self._news:
                self._has_leader = False
                self._news.notify_all()
                if not self._idle and self._threads < COMMITTERS and not self._is_over:
                    with suppress(RuntimeError):  # the limit of threads: this one takes the next block
                        self._start_one()
        return found

    def _await_block(self) -> Block | None:
        while not self._is_over:  # checked without the lock: it is late by at most LOOK_S
            is_last, self._unheard = self._is_urgent and not self._transacting.under_way, 0
            with self._driver.lock.locked(step=False):
                self._consumer._drain()
                purgatory = self._consumer._engine.delivery.in_lanes.purgatory
                found = self._consumer._take(purgatory.next_block, self._is_urgent)
                if isinstance(found, Block):
                    self._transacting.begin(found, self._driver.now_ms())
                    return found
            if found is None:  # the consumer is closed
                break
            with self._news:
                self._is_empty = is_last  # nothing was under way before there was no block
                if self._is_empty:
                    self._news.notify_all()
                self._is_waiting = found == inf
                if not (self._is_waiting and self._consumer._inbox):
                    self._news.wait(min(LOOK_S, max(0.0, (found - self._driver.now_ms()) / 1000)))
                self._is_waiting = False
        return None

    def _pause(self, seconds: float) -> None:
        until = self._runtime.monotonic() + seconds
        with self._news:
            while not self._is_over and (left := until - self._runtime.monotonic()) > 0:
                self._news.wait(left)


def _may_pass(error: Exception) -> bool:
    """Whether the same transaction may succeed later."""
    return error.retry if isinstance(error, TransactionError) else fate_of(error) is Fate.RETRIED


class Transaction:
    """A transaction of one batch; use it in ``with``. Made by :meth:`Consumer.transaction`.

    Leaving the block commits what was produced, and that the batch is done, as one. An exception in the block ends it
    with nothing committed and nothing produced: the batch comes again, and so do later ones of its partition.
    """

    __slots__ = ("_ask", "_batch", "_consumer", "_outputs", "_run")

    def __init__(self, consumer: FetchingConsumer[Any], batch: Batch, ask: Callable[..., Reply[None]]) -> None:
        """ask: has a function called with these arguments by a thread of the library."""
        self._consumer = consumer
        self._ask = ask
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
        if not self._run.assignment.tracker.has(self._run):
            raise dropped(self._run.assignment.key)
        self._outputs = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        answer = self._ask(*self.end(error))
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
