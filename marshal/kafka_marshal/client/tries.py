"""What workers of ``consumer.run`` ask: what is there to do in this lane, and what becomes of it when it was tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Protocol, cast

from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt, current
from kafka_marshal.client.dead_letter_writer import DeadLetterWriter
from kafka_marshal.client.failures import Failures
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.client.handling import RunOptions
from kafka_marshal.engine.work.lanes import Lane, Lanes
from kafka_marshal.guard import report
from kafka_marshal.runtime import Condition, Runtime
from kafka_marshal.secret import values_of

__all__ = ["LOOK_S", "Call", "Tries", "Workers"]

#: While somebody waits for others, it is looked this often (s) whether a lease has ended, or somebody stops.
LOOK_S = 0.1


class Workers(Protocol):
    """What calls the handlers: threads, or tasks of an event loop."""

    def start(self) -> None: ...

    def put(self, lanes: Iterable[Lane]) -> None:
        """These are ready (any thread)."""

    def look(self, now: float) -> None:
        """See to handlers that take too long (ms, own clock; the feeder calls)."""

    def end(self, timeout: float) -> None:
        """No lane is ready any more: have them end (*blocking*, for so many seconds at most)."""


class Call:
    """One call of ``run``, as the user's thread has it, which may be interrupted anywhere: it stores, and no more."""

    def __init__(self) -> None:
        #: Nothing more is begun.
        self.is_ending: bool = False
        #: Handlers are not waited for any more.
        self.is_abandoned: bool = False
        #: A thread of ours carries it out, and has done all that it will.
        self.has_begun = self.is_over = False

    def stop(self, *, abandon: bool = False) -> None:
        """Begin nothing more, and return when what is in hand has ended. abandon: do not wait for that."""
        self.is_abandoned = self.is_abandoned or abandon
        self.is_ending = True


class Tries:
    """The tries of one call of ``run``, and whom they wake."""

    workers: Workers
    #: Where messages go whose last try has failed; None: it ends the run.
    letters: DeadLetterWriter | None = None

    def __init__(
        self,
        consumer: FetchingConsumer[Any],
        options: RunOptions,
        call: Call,
        lanes: Lanes,
        ready_wanted: int,
        give_back: Callable[[], None],
    ) -> None:
        """give_back: what is in hand, and no handler has, is so no more. (The run is over, and one has failed.)"""
        self.options = options
        self.call = call
        self.lanes = lanes
        self.ready_wanted = ready_wanted
        self.runtime: Runtime = consumer._driver.cluster.runtime
        self.handler_timeout_ms: float | None = consumer._options.handler_timeout_ms
        self.consumer = consumer
        self._handled = consumer._handled
        self._give_back = give_back
        self._rng: Random = self.runtime.random()
        secrets = values_of({**consumer._marshal.config, **consumer._fetcher.config})
        ids = consumer._driver.engine.settings
        self.failures: Failures = Failures(
            self.runtime.now_ms, self.runtime.lock(), secrets, group=ids.group_id, client=ids.client_id
        )
        #: Guards nothing: it wakes the feeder and the timer.
        self.news: Condition = self.runtime.condition()
        self._is_awaited = False
        #: What ends the run; None: nothing has, or it was asked to end.
        self.error: BaseException | None = None
        self._timer_runs = False
        self._about = consumer._marshal.group_id, consumer._kind, options.order

    # The feeder.

    def wait(self, is_enough: Callable[[], bool]) -> bool:
        """Wait for news of the workers, for a while; whether some came."""
        with self.news:
            self._is_awaited = True
            came = is_enough() or self.call.is_ending or self.news.wait(LOOK_S)
            self._is_awaited = False
            return came

    def _wake(self) -> None:
        with self.news:
            self.news.notify_all()

    def end(self, error: BaseException) -> None:
        """The run ends with this, unless something has ended it before."""
        if self.error is None:
            self.error = error
        self.call.is_ending = True
        self._wake()

    # Workers.

    def begin(self, lane: Lane, now: float) -> Attempt | None:
        """A worker takes up a ready lane; None: there is nothing to handle."""
        message = self.lanes.begin(lane, now, self.call)
        if self._is_awaited and self.lanes.ready < self.ready_wanted / 2:
            self._wake()
        if message is None:
            return None
        assignment, attempts = lane.assignment, self.options.retry.attempts
        stable = assignment.tracker.done.stable
        epoch, keep = assignment.epoch, self.letters is not None
        attempt = Attempt(cast("Message", message), lane.number, attempts, epoch, *self._about, stable, keep)
        current.set(attempt)
        for hooks in self.options.hooks:
            if hooks.before is not None:
                _hook("before", hooks.before, attempt)
        return attempt

    def done(self, lane: Lane, attempt: Attempt, began: float) -> bool:
        """A handler has returned; whether its lane is ready again, for the caller to see to."""
        if self.options.hooks:
            took = (self.runtime.now_ms() - began) / 1000
            for hooks in self.options.hooks:
                if hooks.after is not None:
                    _hook("after", hooks.after, attempt, took)
        return self._settle(lane, attempt.message)

    def settled(self, lane: Lane, message: Message) -> None:
        """A message is done: handled, or put aside."""
        if self._settle(lane, message):
            self.workers.put((lane,))

    def _settle(self, lane: Lane, message: Message) -> bool:
        self.consumer._say(message)  # before the lane goes on: what ends its partition waits for all that runs
        is_ready = self.lanes.done(lane, self.call)
        if self._is_awaited or self.call.is_ending:
            self._wake()
        return is_ready

    def failed(self, lane: Lane, attempt: Attempt, began: float, error: BaseException) -> None:
        """A handler has raised: it is tried again, a dead letter, or the end of the run."""
        now = self.runtime.now_ms()
        for hooks in self.options.hooks:
            if hooks.failed is not None:
                _hook("failed", hooks.failed, attempt, (now - began) / 1000, error)
        retry, due = self.options.retry, None
        topic = attempt.message.topic()
        self._handled.failed(topic, error)
        attempt._restore()
        if isinstance(error, Exception):
            self.failures.failed(attempt, error)
        if not isinstance(error, Exception):
            self._note(attempt, error)
            self.end(error)
        elif not attempt.is_last and isinstance(error, retry.on):
            due = now + retry.delay(attempt.number, self._rng) * 1000
            self._handled.retried(topic)
        elif lane.assignment.over:
            pass  # it comes again elsewhere
        elif self.letters is not None:
            self.letters.send(lane, attempt, error)
            return
        else:
            self._note(attempt, error)
            self.end(error)
        self._put_aside(lane, due)
        if due is not None:
            self._wake_timer()

    def put_aside(self, lane: Lane, attempt: Attempt, error: BaseException, topic: str) -> None:
        """A message is a dead letter, and the cluster has it."""
        self._handled.put_aside(attempt.message.topic())
        self.failures.put_aside(attempt, error, topic)
        self.settled(lane, attempt.message)

    def give_up(self, lane: Lane, attempt: Attempt, error: BaseException) -> None:
        """Its dead letter can't be written: the run ends, and it comes again."""
        self._note(attempt, error)
        self.end(error)
        self._put_aside(lane, None)

    def given_back(self, lane: Lane) -> None:
        """A handler was ended by us: its message comes again."""
        self._put_aside(lane, None)

    def _put_aside(self, lane: Lane, due: float | None) -> None:
        if self.lanes.failed(lane, due, self.call):
            self.workers.put((lane,))
        self.consumer._nudge()
        if self.lanes.is_ended:
            self.consumer._driver.post(self._give_back)
        if self._is_awaited or self.call.is_ending:
            self._wake()

    @staticmethod
    def _note(attempt: Attempt, error: BaseException) -> None:
        message = attempt.message
        error.add_note(
            f"{message.topic()} [{message.partition()}] offset {message.offset()}, try {attempt.number} of "
            f"{attempt.attempts}: this ends run(…). The message is not done, and comes again, here or elsewhere"
        )

    # The timer.

    def _wake_timer(self) -> None:
        with self.news:
            if not self._timer_runs:
                try:
                    self.runtime.start(self._time, "kafka-marshal-retries")
                    self._timer_runs = True
                except RuntimeError as error:  # the limit of threads
                    self.end(error)
            self.news.notify_all()

    def _time(self) -> None:
        """Give failed messages their next try, until the end."""
        while not (self.call.is_over or self.lanes.is_ended):
            self.workers.put(self.lanes.due(self.runtime.now_ms(), self.call))
            with self.news:
                due = self.lanes.next_due
                wait = LOOK_S if due is None else min(LOOK_S, (due - self.runtime.now_ms()) / 1000)
                if wait > 0:
                    self.news.wait(wait)


def _hook(name: str, function: Callable[..., object], *args: object) -> None:
    try:
        function(*args)
    except BaseException as error:  # noqa: BLE001 - what watches a handler must not end it
        report(f"the hook {name!r} of run(…)", error)
