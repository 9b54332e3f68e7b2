"""For the workers of ``consumer.run``: the next try of a lane, and what follows its result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple, Protocol, cast

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt, Handling, current
from kafka_marshal.client.batch import Look
from kafka_marshal.client.breaker import SLOWEST_PACE_MS, Breaker
from kafka_marshal.client.dead_letters import headers_of
from kafka_marshal.client.failures import RunFailures, shortened
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.client.handling import Fate, RetryAfter, RunOptions, fate_of
from kafka_marshal.client.transactions import Output
from kafka_marshal.engine.work.assignment import stable_of
from kafka_marshal.engine.work.in_lanes import Finished
from kafka_marshal.engine.work.lane import Handlers, Lane
from kafka_marshal.engine.work.lanes import Lanes
from kafka_marshal.engine.work.open_messages import hash_of
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.guard import report
from kafka_marshal.logs import log
from kafka_marshal.runtime import Condition, Runtime
from kafka_marshal.secret import values_of

#: While a thread waits for others, it checks this often (s) whether a lease has ended, or the run stops.
LOOK_S = 0.1

#: What the feeder waits for.
NOTHING, FEW_READY, ANY_REPORT = range(3)

#: The log says "parked" where a dead letter names its topic.
PARKED = "the log (parked)"


#: Memory of an output besides its key, value and headers (bytes).
OUTPUT_BYTES = 300


class Held(NamedTuple):
    """What one finished message holds back."""

    attempt: Attempt
    outputs: tuple[Output, ...]
    #: The failure that has made it a dead letter, which is its only output; None: it is handled.
    error: Exception | None = None
    #: The dead letter has a traceback, without which it is smaller.
    has_trace: bool = False


def held_back(
    attempt: Attempt, outputs: tuple[Output, ...], error: Exception | None = None, has_trace: bool = False
) -> Finished:
    """A finished message, for the engine."""
    size = sum(OUTPUT_BYTES + _size_of(each) for each in outputs)
    return Finished(attempt.message, size, Held(attempt, outputs, error, has_trace))


def _size_of(each: Output) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in each.headers)
    return len(each.value or b"") + len(each.key or b"") + headers


class Workers(Handlers, Protocol):
    """They call the handlers: threads, or tasks of an event loop."""

    def start(self) -> None: ...

    def wake(self, count: int) -> None:
        """Lanes that were put may begin only now: this many (any thread)."""

    def look(self, now: float) -> None:
        """Cancel or replace handlers that take too long (now: ms, own clock; the feeder calls)."""

    def end(self, timeout: float) -> None:
        """End the workers: no lane gets ready any more (*blocking*, at most timeout seconds)."""


class Letters:
    """Puts aside messages whose last try has failed."""

    def __init__(self, topic: str, tries: Tries) -> None:
        self.topic: str = topic
        self._tries = tries

    def send(self, lane: Lane, attempt: Attempt, error: Exception, with_trace: bool = True) -> None:
        """Put a message aside; its lane continues once that is certain (any thread)."""
        if attempt.is_held:
            self._send(lane, attempt, error, with_trace)
        else:  # another member may have the partition now, and decides about the message
            self._tries.given_back(lane)

    def _send(self, lane: Lane, attempt: Attempt, error: Exception, with_trace: bool) -> None:
        raise NotImplementedError

    def letter(self, attempt: Attempt, error: Exception, with_trace: bool) -> Output:
        """A message's dead letter: as it is in Kafka, with why it failed."""
        headers = headers_of(
            attempt.message,
            attempt.group_id,
            attempt.epoch,
            attempt.number,
            error,
            own=attempt._headers or (),
            secrets=self._tries.failures.secrets,
            with_trace=with_trace,
        )
        return Output(self.topic, attempt._value, attempt._key, tuple(headers))

    def close(self) -> None:
        """The run has ended."""


class RunCall:
    """One call of ``run``, for the user's thread, which may be interrupted anywhere: it only sets flags."""

    def __init__(self) -> None:
        #: No new handling begins.
        self.is_ending: bool = False
        #: Do not wait for handlers any more.
        self.is_abandoned: bool = False
        #: Whether a thread of the library has begun to carry it out, and whether it has finished.
        self.has_begun = self.is_over = False

    def stop(self, *, abandon: bool = False) -> None:
        """Begin nothing more, and return when what is in flight has ended. abandon: do not wait for that."""
        self.is_abandoned = self.is_abandoned or abandon
        self.is_ending = True


class Tries:
    """The tries of one call of ``run``, and the threads that they wake."""

    workers: Workers
    #: Takes messages whose last try has failed; None: such a failure ends the run.
    letters: Letters | None = None
    #: In a run with transactions: hears how many bytes a finished message holds back; None: what is finished is done.
    heard: Callable[[int], object] | None = None

    def __init__(
        self,
        consumer: FetchingConsumer[Any],
        options: RunOptions,
        call: RunCall,
        lanes: Lanes,
        ready_wanted: int,
        give_back: Callable[[], None],
    ) -> None:
        """give_back: gives back messages in flight that no handler has. (Called if one fails after the run's end.)"""
        self.options = options
        self.call = call
        self.lanes = lanes
        self.ready_wanted = ready_wanted
        self.runtime: Runtime = consumer._driver.cluster.runtime
        self.handler_timeout_ms: float | None = consumer._options.settings.handler_timeout_ms
        self.consumer = consumer
        self._give_back = give_back
        self._rng: Random = self.runtime.random()
        secrets = values_of({**consumer._marshal.config, **consumer._fetcher.config})
        ids = consumer._driver.engine.settings
        self.failures: RunFailures = RunFailures(
            self.runtime.now_ms, self.runtime.lock(), secrets, group=ids.group_id, client=ids.client_id
        )
        self._breaker = Breaker(self.runtime.lock())
        #: Guards nothing: it wakes the feeder and the timer.
        self.news: Condition = self.runtime.condition()
        #: What the feeder waits for.
        self._awaited = NOTHING
        #: The error that ends the run; None: there is none.
        self.error: BaseException | None = None
        #: Lane → what ``not_before``, ``rate`` or ``priority`` raised for its message, which fails.
        self.faults: dict[Lane, Exception] = {}
        self._timer_runs = False
        group_id, kind, *_ = consumer._about()
        self._handling = Handling(
            attempts=options.retry.attempts,
            group_id=group_id,
            kind=kind,
            order=options.order,
            keeps_headers=options.dead_letters is not None or options.retry.attempts != 1,
            is_in_transaction=consumer._transactions is not None,
            leaves_open=options.is_durable,
            now_ms=self.runtime.now_ms,
            done_of=Look(consumer._driver, consumer._engine).done_of,
        )

    # The feeder.

    @property
    def are_few_ready(self) -> bool:
        """Whether more messages are to be read, since workers may soon have none."""
        return self.lanes.ready < self.ready_wanted / 2

    def wait(self, *, for_any: bool) -> bool:
        """Wait, at most LOOK_S, until few lanes are ready, or for any report of the workers; whether it came."""
        with self.news:
            self._awaited = ANY_REPORT if for_any else FEW_READY
            came = (not for_any and self.are_few_ready) or self.call.is_ending or self.news.wait(LOOK_S)
            self._awaited = NOTHING
            return came

    def _wake(self) -> None:
        with self.news:
            self._awaited = NOTHING  # once is enough: the feeder may take a while to wake up
            self.news.notify_all()

    def end(self, error: BaseException) -> None:
        """End the run with this error, unless another one has ended it before."""
        if self.error is None:
            self.error = error
        self.call.is_ending = True
        self._wake()

    # Workers. An exception anywhere in here ends the run (``broken``), but no lane is lost.

    def begin(self, lane: Lane, now: float) -> Attempt | None:
        """A worker begins a ready lane; None: there is nothing to handle."""
        message = self.lanes.begin(lane, now, self.call)
        if self._awaited and self.are_few_ready:
            self._wake()
        if message is None or (self.options.not_before is not None and self._is_early(lane, message, now)):
            return None
        attempt = self.attempt(lane, message)
        if self.faults and (error := self.faults.pop(lane, None)) is not None:
            self.failed(lane, attempt, now, error)
            return None
        return attempt

    def attempt(self, lane: Lane, message: object) -> Attempt:
        """The try of a lane that has begun."""
        number, epoch = lane.before + lane.number, lane.assignment.epoch if lane.token is None else lane.token
        message = cast("Message", message)
        attempt = Attempt(self._handling, message, number, epoch, stable_of(lane.assignment), lane)
        current.set(attempt)
        if self.options.hooks:
            self._call_hooks("before", attempt)
        return attempt

    def _is_early(self, lane: Lane, found: object, now: float) -> bool:
        """Whether this try has to wait for its time, or has failed with ``not_before``: its handler is free."""
        not_before, message = cast("Callable[[Message], object]", self.options.not_before), cast("Message", found)
        if lane.due is not None:
            return False
        from kafka_marshal.client import waiting  # not for a worker without

        log_time = self.consumer._engine.source.view.log_time(lane.assignment.lease.cp, now)
        try:
            wait_ms = waiting.wait_of(not_before, message, log_time)
        except Exception as error:  # noqa: BLE001 - of this message: others continue
            self.faults[lane] = error
            return False
        if wait_ms <= 0:
            return False
        if wait_ms > waiting.IN_MEMORY_S * 1000:
            if (refusal := waiting.why_not_logged(self.consumer, wait_ms)) is not None:
                raise refusal
            waiting.log_it(self.consumer, lane, message, wait_ms, lane.before)
        self._returned(lane, self.lanes.failed(lane, now + wait_ms, self.call, waits=True, has_begun=False))
        self._wake_timer()
        return True

    def done(self, lane: Lane, attempt: Attempt, began: float) -> bool:
        """A handler has returned; whether its lane is ready again: then the caller takes it or puts it back."""
        attempt._restore_topic(lane.assignment.key[0])
        if self.options.park:
            self.succeeded()
        if (by_key := self.options.order == "key") or self.options.hooks:
            now = self.runtime.now_ms()
            if by_key:
                self.lanes.hot.note(lane.assignment.key, attempt.message.key(), (now - began) / attempt._at_once, now)
            if self.options.hooks:
                self._call_hooks("after", attempt, (now - began) / 1000)
        if self.heard is None:
            return self._settle(lane, attempt.message)
        return self._settle(lane, held_back(attempt, attempt._take_outputs()))

    def settled(self, lane: Lane, what: Message | Finished) -> None:
        """A message is done, or waits for its transaction: handled, or put aside."""
        if self._settle(lane, what):
            self.workers.put((lane,))

    def _settle(self, lane: Lane, what: Message | Finished) -> bool:
        self.consumer._say(what)  # before the lane continues: a partition's release waits for it
        if self.heard is not None and isinstance(what, Finished):
            self.heard(what.size)
        is_ready = self.lanes.done(lane, self.call)
        if self.options.batch is not None:
            self.workers.put(self.lanes.freed(self.runtime.now_ms()))
        if self._awaited == ANY_REPORT or self.call.is_ending:
            self._wake()
        return is_ready

    def failed(self, lane: Lane, attempt: Attempt, began: float, error: BaseException) -> None:
        """A handler has raised: its message is tried again, comes again, is a dead letter, or ends the run."""
        fate, took = fate_of(error), (self.runtime.now_ms() - began) / 1000
        attempt._take_outputs()  # a failed try leaves nothing
        attempt._restore(lane.assignment.key[0])
        if not attempt.is_held:
            self._call_hooks("lost", attempt, took, error)
            if fate is Fate.ENDS:
                self.give_up(lane, attempt, error)
            else:
                self.given_back(lane)
            return
        self._call_hooks("failed", attempt, took, error)
        if self.options.order == "key":
            ms = took * 1000 / attempt._at_once
            self.lanes.hot.note(lane.assignment.key, attempt.message.key(), ms, self.runtime.now_ms())
        topic = attempt.message.topic()
        self.consumer._handled.failed(topic, error)
        is_asked = isinstance(error, RetryAfter)  # what the handler asks for is no outage, and no warning
        if isinstance(error, Exception) and not (is_asked and not attempt.is_last):
            self.failures.failed(attempt, error)
        is_outage = self.options.park and not is_asked and fate is not Fate.ENDS and self._is_outage(attempt)
        if fate is Fate.ENDS:
            self.give_up(lane, attempt, error)
        elif is_outage or (not attempt.is_last and self.options.retry.is_worth(error, fate)):
            delay_ms = self.options.retry.checked_delay(attempt.number, self._rng, error) * 1000
            if is_outage:
                delay_ms = min(delay_ms, SLOWEST_PACE_MS)
            is_long = False
            if is_asked or self.options.retry.after is not None:
                from kafka_marshal.client import waiting  # not for a worker without

                is_long = delay_ms > waiting.IN_MEMORY_S * 1000
            if is_long:
                if (refusal := waiting.why_not_logged(self.consumer, delay_ms)) is not None:
                    refusal.__cause__ = error
                    self.give_up(lane, attempt, refusal, sets_aside=True)
                    return
                waiting.log_it(self.consumer, lane, attempt.message, delay_ms, attempt.number)
            self.consumer._handled.retried(topic)
            due = self.runtime.now_ms() + delay_ms
            self._returned(lane, self.lanes.failed(lane, due, self.call, waits=is_long))
            self._wake_timer()
        elif self.letters is not None and isinstance(error, Exception) and fate is Fate.FAILED:
            self.letters.send(lane, attempt, error)
        elif self.options.park and isinstance(error, Exception) and fate is Fate.FAILED:
            self._park(lane, attempt, error)
        else:
            self.give_up(lane, attempt, error)

    def succeeded(self) -> None:
        """A message was handled, here or by another member: what fails now is the reason itself (any thread)."""
        if not self._breaker.in_a_row:
            return
        with self._breaker.lock:
            was_open = self._breaker.is_open
            self._breaker.succeeded()
            self.lanes.pace(None, 0.0)
        if was_open:
            self._wake()

    def _is_outage(self, attempt: Attempt) -> bool:
        """A try has failed; whether its message is not to be set aside, since what all of them need is away."""
        message, breaker = attempt.message, self._breaker
        with breaker.lock:
            breaker.failed((message.topic(), message.partition(), message.offset()))
            self.lanes.pace(breaker.pace_ms, self.runtime.now_ms())
            return breaker.is_open and not (attempt.is_last and breaker.probes())

    def _park(self, lane: Lane, attempt: Attempt, error: Exception) -> None:
        """Set a message aside in the log; its key continues."""
        assignment, reason = lane.assignment, shortened(type(error).__name__)
        place = (assignment.key, assignment.epoch, offset_of(attempt.message), hash_of(attempt.message))
        self.failures.put_aside(attempt, error, PARKED)
        park = self.consumer._engine.park
        self.consumer._say(partial(self.consumer._take, park, *place, attempt.number, reason))
        self._returned(lane, self.lanes.done(lane, self.call))

    def _call_hooks(self, name: Literal["before", "after", "failed", "lost"], attempt: Attempt, *of: object) -> None:
        for hooks in self.options.hooks:
            if (function := getattr(hooks, name)) is not None:
                try:
                    arguments.a_result(f"the hook {name!r} of run(…)", function(attempt, *of))
                except BaseException as error:  # noqa: BLE001 - what watches a handler must not end it
                    report(f"the hook {name!r} of run(…)", error)

    def note_letter(self, attempt: Attempt, error: BaseException, topic: str) -> None:
        """Count a dead letter that the cluster has, and log it."""
        self.consumer._handled.put_aside(attempt.message.topic())
        self.failures.put_aside(attempt, error, topic)

    def give_up(self, lane: Lane, attempt: Attempt, error: BaseException, *, sets_aside: bool = False) -> None:
        """The run ends with this error, and the message comes again. sets_aside: setting it aside is no way round."""
        self.end(error)
        sets_aside = sets_aside or self.options.park or self.letters is not None or not isinstance(error, Exception)
        self.note(attempt, error, sets_aside)
        self._put_aside(lane, None)

    def given_back(self, lane: Lane) -> None:
        """This try does not count: its partition is not proven to be ours, or the run is over."""
        self._returned(lane, self.lanes.give_back(lane, self.call))

    def _put_aside(self, lane: Lane, due: float | None) -> None:
        self._returned(lane, self.lanes.failed(lane, due, self.call))

    def _returned(self, lane: Lane, is_ready: bool) -> None:
        """A try has ended, and its message is not done. is_ready: its lane continues."""
        if is_ready:
            self.workers.put((lane,))
        if self.options.batch is not None:
            self.workers.put(self.lanes.freed(self.runtime.now_ms()))
        self.consumer._nudge()
        if self.lanes.is_ended:
            self.consumer._driver.post(self._give_back)
        if self._awaited == ANY_REPORT or self.call.is_ending:
            self._wake()

    def broken(self, lane: Lane, turn: int, error: BaseException) -> None:
        """This error was raised while a try began or ended: the run ends with it, and the message comes again.

        turn: the lane's turn of that try. A failure that was being handled is the error's ``__context__``.
        """
        self.end(error)
        self.lanes.abandon(lane, turn)
        self._returned(lane, is_ready=False)
        report("what follows a handler of run(…)", error, "the run ends, and the message comes again")

    @contextmanager
    def secured(self, lane: Lane) -> Iterator[None]:
        """A try ends in this block, on another thread than its handler's: an exception ends the run."""
        turn = lane.turn
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the run ends with it
            self.broken(lane, turn, error)

    @staticmethod
    def note(attempt: Attempt, error: BaseException, sets_aside: bool = True) -> None:
        """Say in an error which message ends the run."""
        message = attempt.message
        text = (
            f"{message.topic()} [{message.partition()}] offset {message.offset()}, try {attempt._count}: "
            "this ends run(…). The message is not done, and comes again, here or elsewhere"
        )
        if not sets_aside:
            text += ". With park=True, or dead_letters, it would be set aside, and the others would continue"
        try:
            error.add_note(text)
        except Exception:  # noqa: BLE001 - a frozen exception takes no note, and is raised all the same
            log(logging.ERROR, "run_ends", "%s (%s)", text, type(error).__name__)

    # The timer.

    def _wake_timer(self) -> None:
        self.lanes.has_due = False
        with self.news:
            if not self._timer_runs:
                try:
                    self.runtime.start(self._time, "kafka-marshal-retries")
                    self._timer_runs = True
                except RuntimeError as error:  # the limit of threads
                    self.end(error)
            self.news.notify_all()

    def _time(self) -> None:
        """Give failed messages their next try, until the run ends."""
        try:
            while not (self.call.is_over or self.lanes.is_ended):
                now = self.runtime.now_ms()
                self.workers.put([*self.lanes.due(now, self.call), *self.lanes.reopened(now)])
                with self.news:
                    due, pace_ms = self.lanes.next_due, self.lanes.pace_ms
                    wait = LOOK_S if due is None else min(LOOK_S, (due - self.runtime.now_ms()) / 1000)
                    wait = wait if pace_ms is None else min(LOOK_S, pace_ms / 1000)
                    if wait > 0:
                        self.news.wait(wait)
        except BaseException as error:  # noqa: BLE001 - without this thread nothing is tried again
            self.end(error)


def cancelled(error: BaseException) -> BaseException:
    """Turn a CancelledError of a handler that was not cancelled into a failure like others."""
    if not isinstance(error, asyncio.CancelledError):
        return error
    failure = CancelledError("something that the handler waited for was cancelled, not the handler itself")
    failure.__cause__ = error
    return failure
