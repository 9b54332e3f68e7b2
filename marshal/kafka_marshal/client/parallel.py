"""``consumer.run``: many handlers at a time, each key in order (:mod:`kafka_marshal.engine.work.lanes`).

::

    user's thread       waits, as in any other call; an interrupt ends the run in order
    feeder              one of our threads: reads, spreads messages over lanes, reports ready lanes to the workers
    workers             threads or tasks: take a ready lane, call the handler, report done; then the lane is ready again
    timer               gives failed messages their next try (:mod:`.tries`)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from sys import maxsize
from typing import TYPE_CHECKING, Any

from kafka_marshal.client.breaker import FAILING, SAID_AFTER_MS, Elsewhere, done_elsewhere
from kafka_marshal.client.committing import Committers, LettersInTransactions
from kafka_marshal.client.dead_letter_writer import DeadLetterWriter, check_topic
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.client.handling import RunOptions
from kafka_marshal.client.transactions import TransactionalProducers
from kafka_marshal.client.tries import LOOK_S, RunCall, Tries
from kafka_marshal.client.workers import Tasks, Threads
from kafka_marshal.engine.work.lanes import HELD_BACK_MS, Lanes
from kafka_marshal.engine.work.pull import Fetch, Pull, Take, Wait, Wanted, hold_up_ahead, hold_up_stuck
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.logs import log

if TYPE_CHECKING:
    from kafka_marshal.client.pacing import Paced

#: A message of which this many tries have begun, and none has ended, is set aside (or more, as ``Retry`` says).
MAX_DELIVERIES = 5

#: Messages that are spread over lanes at a time, with the driver's lock held.
SPREAD = 1_000

#: How many lanes should be ready for each handler, and at least in total; with fewer, more messages are read.
READY_EACH = 2
READY_LEAST = 64
#: Batches of many handlers want no more lanes than this ready.
MOST_READY = 20_000

#: Fetched messages wait this long (s) for one of their partition in flight; then they are dropped, and fetched later.
STUCK_S = 1.0

#: While lanes wait for rates or priorities, messages of others are waited for this long (s) at a time.
BESIDE_S = 0.02

#: How often to check whether another run has ended (s).
SOON_S = 0.01


def carry_out(
    is_gone: Callable[[], bool],
    consumer: FetchingConsumer[Any],
    options: RunOptions,
    call: RunCall,
    loop: asyncio.AbstractEventLoop | None = None,
) -> None:
    """Carry out ``run``, from beginning to end (one of our threads; *blocking*).

    loop: where coroutines run; None: in a new one.
    """
    call.has_begun = True
    try:
        if not call.is_ending:
            Runner(consumer, options, call, loop).feed(is_gone)
    finally:
        lanes = consumer._delivery.in_lanes.lanes
        lanes.close(call)
        call.is_over = True


def finish(is_gone: Callable[[], bool], consumer: FetchingConsumer[Any], call: RunCall) -> None:
    """Wait until a run that is ending has ended; one that has not begun needs no wait (*blocking*)."""
    _wait(consumer, lambda: is_gone() or call.is_over or not call.has_begun)


def _wait(consumer: FetchingConsumer[Any], is_enough: Callable[[], bool]) -> None:
    news = consumer._driver.cluster.runtime.condition()
    while not is_enough():
        with news:
            news.wait(SOON_S)


class Runner:
    """One call of ``run``."""

    def __init__(
        self,
        consumer: FetchingConsumer[Any],
        options: RunOptions,
        call: RunCall,
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        self._options = options
        self._call = call
        self._consumer = consumer
        self._driver = consumer._driver
        self._runtime = consumer._driver.cluster.runtime
        if options.is_durable:
            consumer._require_sharing_level("run(…, park=True) and Retry(durable=True)")
        if options.is_paced:
            from kafka_marshal.client.rates import TopicPriorities, check_topics  # not for other runs

            check_topics(options.rates, consumer._engine.subscription)
            if isinstance(options.priority, TopicPriorities):
                check_topics(options.priority.levels, consumer._engine.subscription, "priority")
        self._lanes = lanes = self._made()
        ready = max(READY_EACH * options.concurrency, READY_LEAST)
        if options.is_paced:
            ready = maxsize  # lanes of one partition, however many, are no reason to read no other
        if options.batch is not None:
            ready = max(ready, min(options.batch * ready, MOST_READY))
        self._tries = Tries(consumer, options, call, lanes, ready, self._give_back)
        self._workers = self._tries.workers = Tasks(self._tries, loop) if options.is_async else Threads(self._tries)
        lanes.handlers = self._workers
        self._paced: Paced | None = None
        if options.is_paced:
            self._pace()
        self._committers: Committers | None = None
        if consumer._transactions is not None:
            self._prepare_transactions(consumer._transactions, options.dead_letters)
        elif options.dead_letters is not None:
            self._tries.letters = DeadLetterWriter(consumer, options.dead_letters, self._tries)
        self._looked_at = self._stuck_since = 0.0
        self._told: set[tuple[str, int]] = set()
        self._has_said_failing = False
        #: While nothing succeeds here: what other members had done.
        self._elsewhere = Elsewhere()

    def _pace(self) -> None:
        """Have lanes wait for rates, and begin by their priorities."""
        from kafka_marshal.client.pacing import Paced  # not for other runs

        self._workers._ready = self._paced = Paced(self._tries)

    def _prepare_transactions(self, transactions: TransactionalProducers, dead_letters: str | None) -> None:
        tries, letters = self._tries, None
        if dead_letters is not None:
            check_topic(self._consumer, dead_letters, self._call)
            tries.letters = letters = LettersInTransactions(dead_letters, tries)
        self._committers = Committers(tries, transactions, letters)
        tries.heard = self._committers.heard

    def _made(self) -> Lanes:
        """The lanes: those of the previous run, if it has left handlers behind."""
        consumer, order = self._consumer, self._options.order
        timeout = consumer._engine.settings.handler_timeout_ms
        in_lanes = consumer._delivery.in_lanes
        # The caller of the run before may be gone.
        _wait(consumer, lambda: (before := in_lanes.lanes.owner) is None or not before.is_ending)
        with self._driver.lock.locked(step=False):
            lanes = in_lanes.lanes
            if lanes.owner is not None:
                raise ConfigurationError("run(…) of this consumer is under way already. Nothing was changed")
            if lanes.running and lanes.order != order:
                raise ConfigurationError(
                    f"{lanes.running} handler(s) of the run before, with order={lanes.order!r}, have not returned: "
                    f"with order={order!r} messages could not wait for them. Nothing was changed. Wait, or restart"
                )
            if not lanes.running:
                consumer._take(in_lanes.returned)
                grace_ms = 0.0 if timeout is None or not self._options.is_async else timeout
                lanes = Lanes(order, self._runtime.lock(), consumer._stop_signal, grace_ms)
            options = self._options
            attempts = options.retry.attempts
            lanes.open(
                self._call,
                is_durable=options.is_durable,
                concurrency=options.concurrency * (options.batch or 1),
                most_tries=None if attempts is None else max(attempts, MAX_DELIVERIES),
                most_waiting=options.most_waiting,
            )
            self._driver.engine.take(consumer._engine.number, in_lanes.open, lanes)
            return lanes

    # The feeder.

    def feed(self, is_gone: Callable[[], bool]) -> None:
        """Run until the end, and clean up (one of our threads; *blocking*)."""
        try:
            self._workers.start()
            if self._paced is not None:
                self._paced.start()
            if self._committers is not None:
                self._committers.start()
            consumer, came, waited = self._consumer._engine, None, None
            pull = Pull(consumer)
            while not (self._call.is_ending or is_gone()):
                now = self._runtime.now_ms()
                self._workers.put(self._lanes.reopened(now))
                self._workers.look(now)
                self._tries.failures.look(now)
                if self._lanes.has_due:
                    self._tries._wake_timer()
                with self._driver.lock.locked(step=False):
                    if self._consumer._is_over():
                        break
                    self._look(now)
                    self._consumer._fetcher.look()
                    is_enough = self._lanes.ready >= self._tries.ready_wanted
                    if is_enough:
                        # Otherwise ``next`` shows that handlers are alive.
                        self._consumer._take(consumer.delivery.heard)
                    wanted = Wanted(SPREAD, False, self._runtime.monotonic(), came, waited)
                    step = None if is_enough else self._consumer._take(pull.next, wanted)
                    if isinstance(step, Take):
                        self._workers.put(self._consumer._take(consumer.spread, step.run) or ())
                came = waited = None
                match step:
                    case None:
                        self._tries.wait(for_any=False)
                    case Fetch(room, _):
                        came = self._consumer._fetcher.fill(room, lambda: self._call.is_ending)
                        if not came:
                            waited = self._read_on()
                    case Wait(_):
                        waited = self._read_on()
        except BaseException as error:  # noqa: BLE001 - it is raised when all that is in flight has ended
            self._tries.end(error)
        finally:
            self._drain(is_gone)
        if self._tries.error is not None:
            raise self._tries.error

    def _read_on(self) -> float | None:
        """Nothing can be delivered: wait for messages, or, if some wait for messages in flight, for those."""
        fetcher = self._consumer._fetcher
        with self._driver.lock.locked(step=False):
            delivery = self._consumer._delivery
            is_waiting, is_held_up = delivery.is_waiting, delivery.is_held_up(self._runtime.now_ms())
            fetcher.look()
        if self._paced is not None and (is_waiting or self._paced.is_waiting):
            fetcher.stop_fetching(hold_up_ahead)
            fetcher.pump(BESIDE_S)
            return None
        if not is_waiting:
            return fetcher.await_log(inf) if is_held_up else fetcher.wait(inf)
        if not fetcher.pump(0.0):
            now = self._runtime.monotonic()
            if self._tries.wait(for_any=True):
                self._stuck_since = now
            elif now > self._stuck_since + STUCK_S:
                fetcher.stop_fetching(hold_up_stuck)
        return None

    def _look(self, now: float) -> None:
        """Note which partitions are held back, and warn of each once (the driver's lock is held)."""
        if now < self._looked_at + HELD_BACK_MS:
            return
        self._looked_at, found = now, self._lanes.held_back(now, HELD_BACK_MS)
        self._look_at_failures(now)
        if self._committers is not None:
            committing = self._committers.held_back(now, HELD_BACK_MS)
            found = (*committing, *(x for x in found if x[:2] not in {each[:2] for each in committing}))
        if self._paced is not None:
            self._paced.divide(self._consumer)
        engine, consumer = self._driver.engine, self._consumer._engine
        full = engine.take(consumer.number, consumer.delivery.in_lanes.note, found) or ()
        self._told.intersection_update(one[:2] for one in found)
        for one in found:
            if one[:2] in full and one[:2] not in self._told:
                self._told.add(one[:2])
                text = (
                    f"{one}: nothing more of this partition is handed out until that has ended, for {one.in_hand:,} of "
                    "its messages are in hand, which is the limit (50,000 a partition, and its share of "
                    "max_bytes_in_flight). Nothing is lost; other partitions go on"
                )
                engine.take(consumer.number, consumer.warn, text)

    def _look_at_failures(self, now: float) -> None:
        """While nothing succeeds here: whether it does at other members; and say so (the driver's lock is held)."""
        lanes = self._lanes
        if self._elsewhere.has_succeeded({} if lanes.pace_ms is None else done_elsewhere(self._consumer._engine)):
            self._tries.succeeded()
        is_failing = lanes.pace_ms is not None and now >= lanes.failing_since + SAID_AFTER_MS
        if is_failing is not self._has_said_failing:
            self._has_said_failing = is_failing
            text = FAILING if is_failing else "tries of run(…) succeed again: it begins as many at a time as before"
            log(logging.WARNING, "handlers_fail", "%s", text)

    def _drain(self, is_gone: Callable[[], bool]) -> None:
        """End, or leave behind, what is in flight; give back what waits."""
        tries = self._tries
        until = self._runtime.monotonic() + self._options.drain_timeout
        self._close_gaps(is_gone, until)
        self._call.is_ending = self._lanes.is_ended = True
        with tries.news:
            while self._lanes.running and not (self._call.is_abandoned or is_gone()):
                left = until - self._runtime.monotonic()
                if left <= 0 or self._driver.is_over:
                    break
                tries.news.wait(min(left, LOOK_S))
        self._workers.end(0.0 if self._call.is_abandoned else max(LOOK_S, until - self._runtime.monotonic()))
        if tries.letters is not None:
            tries.letters.close()
        if self._committers is not None:
            self._committers.end(until - self._runtime.monotonic(), is_abandoned=self._call.is_abandoned)
        tries.failures.end()
        self._give_back()
        if self._lanes.running:
            log(
                logging.WARNING,
                "handlers_left_behind",
                "run() ends while %d handler(s) have not returned, after %g s: what they have in hand is done if they "
                "return while this member has the partition, and else comes again",
                self._lanes.running,
                self._options.drain_timeout,
            )

    def _close_gaps(self, is_gone: Callable[[], bool], until: float) -> None:
        """Handle what waits below what is done, where a checkpoint can't name that: it would come again (X13)."""
        tries = self._tries
        while tries.error is None and not (self._call.is_ending or is_gone() or self._driver.is_over):
            with self._driver.lock.locked(step=False):
                are_open = self._lanes.close_gaps()
            now = self._runtime.now_ms()
            if not are_open or self._runtime.monotonic() >= until:
                break
            self._workers.put(self._lanes.reopened(now))
            self._workers.look(now)
            tries.wait(for_any=True)

    def _give_back(self) -> None:
        """Give back messages in flight that no handler has: they come again, here or elsewhere."""
        with self._driver.lock.locked():
            self._consumer._take(self._consumer._engine.delivery.give_back)
