"""Calls of user threads, carried out by threads of the library.

A user's thread can be interrupted between any two instructions: a signal's handler, a soft time limit or a debugger
raises there, and the user continues with the same consumer. So it never runs the engine, never holds one of our locks,
and never reads from Kafka. It leaves a job and waits for the answer; both are one call into C. The job continues
even if the caller is interrupted, and an answer that did not reach it is undone.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic

from kafka_marshal.errors import ClosedError, ForkedError
from kafka_marshal.logs import log
from kafka_marshal.runtime import EMPTY, Box, Runtime, is_ours
from kafka_marshal.types import T

#: The most idle threads that are kept for calls.
MOST_WAITING = 8

#: A caller that waits checks this often whether there is still a thread to answer it (s).
LOOK_S = 1.0
#: If the servants have ended, an answer in progress may take this long (s).
LAST_LOOK_S = 0.05


class EndedError(ClosedError):
    """The Marshal was closed while a call waited."""


class LateError(TimeoutError):
    """The answer has not come within the timeout; the job continues."""


class _Receipt:
    """The state of an answer. It uses atomic stores only, so any thread can read it at any time."""

    __slots__ = ("left", "out")

    def __init__(self) -> None:
        #: The value has reached the user. Set in the instruction before that.
        self.out: bool = False
        #: The caller has gone, with or without the value.
        self.left: bool = False


class Reply(Generic[T]):
    """The answer to come for one call. If it ends without ``receipt.out``, the value did not reach the caller."""

    __slots__ = ("__weakref__", "_box", "_servants", "receipt")

    def __init__(self, servants: Servants, box: Box | None = None) -> None:
        self._servants = servants
        self._box: Box = servants.runtime.box() if box is None else box
        self.receipt: _Receipt = _Receipt()

    def wait(self, timeout: float | None = None) -> T:
        """The value; raises what the job raised, or EndedError if no thread will carry it out (*blocking*).

        Raises LateError after timeout seconds (None: it waits without a limit).
        """
        servants = self._servants
        until = None if timeout is None else servants.runtime.monotonic() + timeout
        servants.check_pulse()
        while True:
            was_over = servants.over
            wait_s = LAST_LOOK_S if was_over else LOOK_S
            if until is not None:
                wait_s = min(wait_s, max(0.0, until - servants.runtime.monotonic()))
            if (found := self._box.get(wait_s)) is not EMPTY:
                break
            if was_over or not servants.over:  # otherwise a job in progress may still answer
                servants.check()
            if until is not None and servants.runtime.monotonic() >= until:
                raise LateError
            servants.check_pulse()
        value, error = found
        if error is not None:
            try:
                raise error
            finally:
                # Break the cycle of the error and its traceback: it would keep the frames of its callers alive.
                del found, error
        return value  # type: ignore[no-any-return]


class _Job:
    """One call to be carried out."""

    __slots__ = ("answer", "args", "box", "function", "receipt", "undo")

    def __init__(
        self,
        answer: Reply[Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        undo: Callable[[Any], object] | None,
    ) -> None:
        self.answer = weakref.ref(answer)
        self.box = answer._box
        self.receipt = answer.receipt
        self.function = function
        self.args = args
        self.undo = undo

    def is_gone(self) -> bool:
        """Whether the caller does not wait any more: an exception has ended its call."""
        return self.receipt.left or self.answer() is None


def have_done(runtime: Runtime, function: Callable[[], T]) -> T:
    """Have one of our threads call function, and wait for it (*blocking*): no signal can interrupt the function."""
    servants = Servants(runtime)

    def last(_: object) -> T:
        try:
            return function()
        finally:
            servants.end()

    try:
        servants.begin()
        answer = servants.ask(last)
    except BaseException:
        servants.end()
        raise
    return answer.wait()


class Servants:
    """Threads that carry out calls: one for each call in progress, and one that waits for the next."""

    def __init__(self, runtime: Runtime, check_pulse: Callable[[], object] = lambda: None) -> None:
        """check_pulse: callers that wait call it from time to time; it may block briefly."""
        self.runtime = runtime
        self.check_pulse = check_pulse
        self._jobs = runtime.mailbox()
        self._lock = runtime.lock()
        #: Held while values are undone, so that the next call finds them undone.
        self._undoing = runtime.lock()
        self._waiting = 0
        self._delivered: list[tuple[_Job, Any]] = []
        self._process_id = os.getpid()
        #: No further call is carried out.
        self.over: bool = False
        #: How many threads there are; ``refusal``: why the system refused to start another, "": it did not.
        self.threads: int = 0
        self.refusal: str = ""

    def begin(self) -> None:
        """Start the first thread (a user's thread may call this)."""
        self._start(self.runtime.launch)

    def _start(self, start: Callable[[Callable[[], object], str], object]) -> None:
        self._waiting += 1
        self.threads += 1
        try:
            start(self._serve, "kafka-marshal-call")
        except BaseException:
            self._waiting -= 1
            self.threads -= 1
            raise

    # User threads.

    def check(self) -> None:
        """Raise EndedError or ForkedError if no thread will answer any more."""
        if self.over:
            raise EndedError("this Marshal was closed by another thread; make a new one")
        if sys.is_finalizing():
            raise EndedError(
                "the interpreter ends, and has stopped the threads of this Marshal: its leases end after two "
                "heartbeat intervals. Close it before, best by a with block"
            )
        if os.getpid() != self._process_id:
            raise ForkedError(
                "this process was forked while a call of this Marshal was waiting, and its threads are those of the "
                "parent, which continues. Make a new Marshal in the child"
            )

    def ask(
        self,
        function: Callable[..., T],
        *args: object,
        undo: Callable[[T], object] | None = None,
        box: Box | None = None,
    ) -> Reply[T]:
        """Have ``function(is_gone, *args)`` carried out; undo takes its value back if it does not reach the caller.

        box: receives (value, error); None: the waiter is a thread.
        """
        answer: Reply[T] = Reply(self, box)
        self._jobs.put(_Job(answer, function, args, undo))
        return answer

    def post(self, function: Callable[[], object]) -> None:
        """Have function called soon; no thread waits for its result."""
        self._jobs.put(function)

    # Our own threads.

    def _serve(self) -> None:
        is_ours.set(True)
        try:
            self._serve_all()
        finally:
            with self._lock:
                self.threads -= 1

    def _serve_all(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                self._waiting -= 1
            if self.over:
                self._jobs.put(None)  # for the next one
                return
            with self._lock:
                refusal = self._start_another()
            if refusal:
                log(
                    logging.ERROR,
                    "no_thread",
                    "no further thread could be started to carry out calls (%s): a call waits until the one before has "
                    "ended. Nothing is lost. Raise the limit of threads of this process or container",
                    refusal,
                )
            self._carry_out(job)
            del job
            with self._lock:
                if self._waiting >= MOST_WAITING:
                    return
                self._waiting += 1

    def _start_another(self) -> str:
        """Ensure that a thread waits for the next call; the lock is held.

        Returns why none could be started, if that is not reported yet; "" otherwise.
        """
        if self._waiting:
            self.refusal = ""
            return ""
        try:
            self._start(self.runtime.start)
        except RuntimeError as error:
            before, self.refusal = self.refusal, str(error)
            return "" if before else self.refusal
        self.refusal = ""
        return ""

    def _carry_out(self, job: _Job | Callable[[], object]) -> None:
        try:
            self.undo_lost(job.args if isinstance(job, _Job) else ())
            if not isinstance(job, _Job):
                job()
                return
        except BaseException as failure:  # noqa: BLE001 - logged with its traceback
            text = "a call without a waiting caller failed; what it was about is done by time"
            log(logging.ERROR, "call_failed", text, error=failure)
            if not isinstance(job, _Job):
                return
        value, error = None, None
        try:
            value = job.function(job.is_gone, *job.args)
        except BaseException as raised:  # noqa: BLE001 - the caller gets it
            error = raised
        if job.undo is not None and error is None:
            with self._lock:
                self._delivered.append((job, value))
        job.box.put((value, error))
        del error  # as in Reply.wait

    def undo_lost(self, given_back: Sequence[object] = ()) -> None:
        """Undo the values that did not reach their callers, but those that a call gives back itself."""
        if not self._delivered:
            return
        with self._undoing:
            with self._lock:
                # In this order: the value may be out, and its caller gone, between the two questions.
                lost = [entry for entry in self._delivered if entry[0].is_gone() and not entry[0].receipt.out]
                self._delivered = [x for x in self._delivered if not x[0].receipt.out and not any(x is y for y in lost)]
            for job, value in lost:
                if job.undo is not None and not any(value is each for each in given_back):
                    job.undo(value)

    def end(self) -> None:
        """Carry out no further call; those in progress continue."""
        self.over = True
        self._jobs.put(None)
