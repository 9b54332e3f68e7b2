"""``consumer.run``: many handlers at a time, each key in order (:mod:`kafka_marshal.engine.work.lanes`).

::

    user's thread       waits, as in any other call; an interrupt ends the run in order
    feeder              a thread of ours: reads, spreads messages over lanes, says which are ready
    workers             threads or tasks: take a ready lane, call the handler, say done, and the lane is ready again
    timer               gives failed messages their next try
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from random import Random
from typing import Protocol

from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt, current
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.client.handling import RunOptions
from kafka_marshal.engine.work.lanes import Lane, Lanes
from kafka_marshal.engine.work.pull import Fetch, Pull, Take, Wait, Wanted
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.guard import report
from kafka_marshal.logs import log
from kafka_marshal.runtime import is_ours

__all__ = ["Runner", "Workers"]

#: Messages that are spread over lanes at a time: the shell's lock is held meanwhile.
SPREAD = 1_000

#: So many lanes should be ready for each handler, and so many at least: with fewer more is read.
READY_EACH = 2
READY_LEAST = 64

#: While nothing more can be taken in, this often (s) it is looked whether a lease has ended, or somebody stops.
LOOK_S = 0.1

#: What holds a partition back is told of after so long (ms), and looked for this often.
HELD_BACK_MS = 30_000.0
HELD_BACK_LOOK_MS = 1_000.0


class Workers(Protocol):
    """What calls the handlers: threads, or tasks of an event loop."""

    def start(self) -> None: ...

    def put(self, lanes: Iterable[Lane]) -> None:
        """These are ready (any thread)."""

    def look(self, now: float) -> None:
        """See to handlers that take too long (ms, own clock; the feeder calls)."""

    def end(self, timeout: float) -> None:
        """No lane is ready any more: have them end (*blocking*, for so many seconds at most)."""


class Runner:
    """One call of ``run``."""

    def __init__(self, consumer: FetchingConsumer[object], options: RunOptions, workers: Callable[[Runner], Workers]):
        self.options = options
        self.driver = consumer._driver
        self.runtime = consumer._driver.cluster.runtime
        self._consumer = consumer
        self._rng: Random = self.runtime.random()
        #: Guards nothing: it wakes the feeder and the timer.
        self.news = self.runtime.condition()
        self._feeder_waits = False
        timeout = consumer._options.handler_timeout_ms
        self.handler_timeout_ms = timeout
        self.lanes = self._made(0.0 if timeout is None or not options.is_async else timeout)
        self._ready_wanted = max(READY_EACH * options.concurrency, READY_LEAST)
        #: What ends the run; None: nothing has, or it was asked to end.
        self.error: BaseException | None = None
        self.is_ending = False
        #: Handlers are not waited for any more.
        self._is_abandoned = False
        #: The feeder has done all that it will.
        self.is_over = False
        self._looked_at = 0.0
        self._told: set[tuple[str, int]] = set()
        self._timer_runs = False
        self._kind = "claimed" if consumer._options.group is None else "coordinated"
        self._group_id = consumer._marshal.group_id
        self.workers = workers(self)

    def _made(self, grace_ms: float) -> Lanes:
        """The lanes, which know of handlers that a run before has left behind."""
        consumer, order = self._consumer, self.options.order
        with self.driver.locked(step=False):
            before = consumer._delivery.lanes
            if before is not None and not before.is_ended:
                raise ConfigurationError("run(…) of this consumer is under way already. Nothing was changed")
            if before is not None and before.running and before.order != order:
                raise ConfigurationError(
                    f"{before.running} handler(s) of the run before, with order={before.order!r}, have not returned: "
                    f"with order={order!r} messages could not wait for them. Nothing was changed. Wait, or restart"
                )
            if before is None or not before.running:
                before = Lanes(order, self.runtime.lock(), consumer._marshal.stop_signal, grace_ms)
            before.is_ended = False
            consumer._delivery.lanes = before
            return before

    # The user's thread.

    def stop(self, *, abandon: bool = False) -> None:
        """Begin nothing more, and return when what is in hand has ended. abandon: do not wait for that."""
        self._is_abandoned = self._is_abandoned or abandon
        self.is_ending = True

    # The feeder.

    def feed(self, is_gone: Callable[[], bool]) -> None:
        """Until the end, which it sees to (a thread of ours; *blocking*)."""
        try:
            self.workers.start()
            pull, came, waited = Pull(self._consumer._engine), None, None
            while not (self.is_ending or is_gone()):
                now = self.runtime.now_ms()
                self.workers.put(self.lanes.reopened(now))
                self.workers.look(now)
                with self.driver.locked(step=False):
                    if self._consumer._is_over():
                        break
                    self._look(now)
                    is_enough = self.lanes.ready >= self._ready_wanted
                    wanted = Wanted(SPREAD, False, self.runtime.monotonic(), came, waited)
                    step = None if is_enough else pull.next(wanted, now)
                    if isinstance(step, Take):
                        self.workers.put(self._consumer._delivery.to_lanes(self.lanes, step.run))
                came = waited = None
                match step:
                    case None:
                        self._await(lambda: self.lanes.ready < self._ready_wanted / 2)
                    case Fetch(room, _):
                        came = self._consumer._fetcher.fill(room, lambda: self.is_ending)
                        if not came:
                            waited = self._read_on()
                    case Wait(_):
                        waited = self._read_on()
        except BaseException as error:  # noqa: BLE001 - it is raised when all that is in hand has ended
            self._end(error)
        finally:
            self._drain(is_gone)
        if self.error is not None:
            raise self.error

    def _read_on(self) -> float | None:
        """Nothing is there to be handed out: wait for messages, or for what is in hand."""
        if self._consumer._delivery.buffered and self.lanes.running:
            self._await(lambda: False)
            return None
        return self._consumer._fetcher.wait(float("inf"))

    def _await(self, is_enough: Callable[[], bool]) -> None:
        with self.news:
            self._feeder_waits = True
            if not (is_enough() or self.is_ending):
                self.news.wait(LOOK_S)
            self._feeder_waits = False

    def _look(self, now: float) -> None:
        """Note what is held back, and warn of it once (the shell's lock is held)."""
        if now < self._looked_at + HELD_BACK_LOOK_MS:
            return
        self._looked_at, delivery = now, self._consumer._delivery
        delivery.held_back = found = self.lanes.held_back(now, HELD_BACK_LOOK_MS)
        self._told.intersection_update(one[:2] for one in found)
        for one in found:
            assignment = self._consumer._engine.assignments.get((one.topic, one.partition))
            if assignment is not None and delivery.is_held_up(assignment) and one[:2] not in self._told:
                self._told.add(one[:2])
                self._consumer._engine.warn(
                    f"{one}: nothing more of this partition is handed out until that has ended, for {one.in_hand:,} of "
                    "its messages are in hand, which is the limit (50,000 a partition, and its share of "
                    "max_bytes_in_flight). Nothing is lost; other partitions go on"
                )

    def _drain(self, is_gone: Callable[[], bool]) -> None:
        """What is in hand ends, or is left behind; what waits is not in hand any more."""
        self.is_ending = self.lanes.is_ended = True
        with self.news:
            until = self.runtime.monotonic() + self.options.drain_timeout
            while self.lanes.running and not (self._is_abandoned or is_gone()):
                left = until - self.runtime.monotonic()
                if left <= 0 or self.driver.is_over:
                    break
                self.news.wait(min(left, LOOK_S))
        self.workers.end(0.0 if self._is_abandoned else max(LOOK_S, until - self.runtime.monotonic()))
        self._give_back()
        if self.lanes.running:
            log(
                logging.WARNING,
                "handlers_left_behind",
                "run() ends while %d handler(s) have not returned, after %g s: what they have in hand is done if they "
                "return while this member has the partition, and else comes again",
                self.lanes.running,
                self.options.drain_timeout,
            )
        self.is_over = True

    def _give_back(self) -> None:
        """What no handler has is not in hand any more: it comes again, here or elsewhere."""
        with self.driver.locked():
            consumer = self._consumer
            for assignment in list(consumer._engine.assignments.values()):
                consumer._delivery.recall(assignment, keep=assignment.is_kept)
                consumer._engine.revocation.try_finish(assignment, self.runtime.now_ms())
            consumer._delivery.held_back = ()

    def _end(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self.is_ending = True
        with self.news:
            self.news.notify_all()

    # Workers.

    def begin(self, lane: Lane, now: float) -> Attempt | None:
        """A worker takes up a ready lane; None: there is nothing to handle."""
        message = self.lanes.begin(lane, now)
        if self._feeder_waits and self.lanes.ready < self._ready_wanted / 2:
            self._wake()
        if message is None:
            return None
        epoch, attempts = lane.assignment.epoch, self.options.retry.attempts
        attempt = Attempt(
            message,  # type: ignore[arg-type]  # a reader made it
            lane.number,
            attempts,
            epoch,
            self._group_id,
            self._kind,  # type: ignore[arg-type]
            self.options.order,
        )
        current.set(attempt)
        for hooks in self.options.hooks:
            if hooks.before is not None:
                _hook("before", hooks.before, attempt)
        return attempt

    def done(self, lane: Lane, attempt: Attempt, began: float) -> None:
        """A handler has returned."""
        if self.options.hooks:
            took = (self.runtime.now_ms() - began) / 1000
            for hooks in self.options.hooks:
                if hooks.after is not None:
                    _hook("after", hooks.after, attempt, took)
        self.settled(lane, attempt.message)

    def settled(self, lane: Lane, message: Message) -> None:
        """A message is done: handled, or a dead letter."""
        self._consumer._say(message)  # before the lane goes on: what ends its partition waits for all that runs
        if self.lanes.done(lane):
            self.workers.put((lane,))
        if self._feeder_waits or self.is_ending:
            self._wake()

    def failed(self, lane: Lane, attempt: Attempt, began: float, error: BaseException) -> None:
        """A handler has raised: it is tried again, a dead letter, or the end of the run."""
        now = self.runtime.now_ms()
        for hooks in self.options.hooks:
            if hooks.failed is not None:
                _hook("failed", hooks.failed, attempt, (now - began) / 1000, error)
        retry, due = self.options.retry, None
        if not isinstance(error, Exception):
            self._give_up(attempt, error)
        elif not attempt.is_last and isinstance(error, retry.on):
            due = now + retry.delay(attempt.number, self._rng) * 1000
        elif lane.assignment.over:
            pass  # it comes again elsewhere
        else:
            self._give_up(attempt, error)
        self._put_aside(lane, due)
        if due is not None:
            self._wake_timer()

    def given_back(self, lane: Lane) -> None:
        """A handler was ended by us: its message comes again."""
        self._put_aside(lane, None)

    def _put_aside(self, lane: Lane, due: float | None) -> None:
        if self.lanes.failed(lane, due):
            self.workers.put((lane,))
        self._consumer._nudge()
        if self.lanes.is_ended:
            self.driver.post(self._give_back)
        if self._feeder_waits or self.is_ending:
            self._wake()

    def _give_up(self, attempt: Attempt, error: BaseException) -> None:
        message = attempt.message
        error.add_note(
            f"{message.topic()} [{message.partition()}] offset {message.offset()}, try {attempt.number} of "
            f"{attempt.attempts}: it ends run(…). The message is not done, and comes again, here or elsewhere; "
            "dead_letters=… would have put it aside"
        )
        self._end(error)

    def _wake(self) -> None:
        with self.news:
            self.news.notify_all()

    # The timer.

    def _wake_timer(self) -> None:
        with self.news:
            if not self._timer_runs:
                self._timer_runs = True
                self.runtime.start(self._time, "kafka-marshal-retries")
            self.news.notify_all()

    def _time(self) -> None:
        """Give failed messages their next try, until the end."""
        while not self.lanes.is_ended:
            self.workers.put(self.lanes.due(self.runtime.now_ms()))
            with self.news:
                due = self.lanes.next_due
                wait = LOOK_S if due is None else min(LOOK_S, (due - self.runtime.now_ms()) / 1000)
                if wait > 0:
                    self.news.wait(wait)
        self._timer_runs = False


def _hook(name: str, function: Callable[..., object], *args: object) -> None:
    try:
        function(*args)
    except BaseException as error:  # noqa: BLE001 - what watches a handler must not end it
        report(f"the hook {name!r} of run(…)", error)


class Threads:
    """Handlers called in threads, ``concurrency`` of them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._ready = runner.runtime.mailbox()
        #: How many there are, and how many there should be: one more for each that hangs.
        self._lock = runner.runtime.lock()
        self._threads = 0
        self._wanted = runner.options.concurrency

    def start(self) -> None:
        while self._threads < self._wanted:
            with self._lock:
                self._threads += 1
                number = self._threads
            self._runner.runtime.start(self._work, f"kafka-marshal-handler-{number}")

    def put(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self._ready.put(lane)

    def look(self, now: float) -> None:
        timeout = self._runner.handler_timeout_ms
        if timeout is None:
            return
        hanging = len(self._runner.lanes.hanging(now - timeout))
        if self._runner.options.concurrency + hanging > self._wanted:
            log(
                logging.WARNING,
                "handlers_hang",
                "%d handler(s) have taken longer than handler_timeout: their partitions are released, their threads "
                "are left behind, and others take their place",
                hanging,
            )
        self._wanted = self._runner.options.concurrency + hanging
        self.start()

    def end(self, timeout: float) -> None:
        self._wanted = 0
        for _ in range(self._threads):
            self._ready.put(None)

    def _work(self) -> None:
        """What a worker does until the end: no lock is held while the handler runs."""
        runner, handle, deserialize = self._runner, self._runner.options.handle, self._runner.options.deserialize
        get, now_ms = self._ready.get, runner.runtime.now_ms
        is_ours.set(False)
        while (lane := get()) is not None:
            began = now_ms()
            attempt = runner.begin(lane, began)
            if attempt is None:
                continue
            try:
                message = attempt.message
                result = handle(message if deserialize is None else deserialize(message))
                if result is not None:
                    _check_result(result)
            except BaseException as error:  # noqa: BLE001 - it is told, and may end the run
                runner.failed(lane, attempt, began, error)
            else:
                runner.done(lane, attempt, began)
            if self._threads > self._wanted and self._is_one_too_many():
                return
        with self._lock:
            self._threads -= 1

    def _is_one_too_many(self) -> bool:
        """Whether this thread was replaced while its handler hung, or the run has ended."""
        with self._lock:
            is_one = self._threads > self._wanted
            self._threads -= is_one
            return is_one


def _check_result(result: object) -> None:
    if hasattr(result, "__await__"):
        if hasattr(result, "close"):
            result.close()
        raise ConfigurationError(
            "the handler has returned something to be awaited, and nobody does: what it is for has not happened. Give "
            "run(…) the coroutine function itself, not a function that calls it"
        )
