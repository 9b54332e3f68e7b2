"""Calls the user's functions so that nothing they raise gets into the code that called them.

An exception out of a callback of librdkafka's costs data: the messages taken so far are dropped, and the call that
took them raises. So it ends here: it is logged, with its traceback the first time, then at most every ten seconds.

A signal's handler may raise while a callback is at work on the main thread: Ctrl-C, an alarm, SIGTERM with sys.exit().
Such an exception is not the callback's. It is caught like any other, and the signal is raised again a moment later,
when the callback has returned: the handler runs once more, and raises where exceptions are expected.
"""

from __future__ import annotations

import _thread
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import cast

from kafka_marshal import arguments
from kafka_marshal.logs import RateLimit, log

#: An exception that is raised again and again is logged this often.
SAID_EVERY_S = 10.0

#: What happens to the rest when a user's function raises, by default.
_GOES_ON = "continuing without what it would have done"

#: This long after a callback was interrupted its signal is raised again: callbacks return within microseconds.
RING_AGAIN_S = 0.01

_repeats = RateLimit(SAID_EVERY_S)


class Guard:
    """A function of the user's that never raises: it returns None instead."""

    __slots__ = ("_call", "_what")

    def __init__(self, what: str, call: Callable[..., object]) -> None:
        """what: its name in the log, such as stats_cb."""
        self._what = what
        self._call = call

    def __call__(self, *args: object) -> object:
        try:
            return arguments.a_result(self._what, self._call(*args))
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a callback must not end this thread
            report(self._what, error)
            return None


def report(what: str, error: BaseException, then: str = _GOES_ON) -> None:
    """Log what a function of the user's raised; what a signal raised is raised in the main thread. Never raises."""
    try:
        if _pass_on(error):
            text = "a signal interrupted %s; it is raised again now that this has returned"
            log(logging.INFO, "interrupted", text, what)
        else:
            _log(what, error, then)
    except BaseException as another:  # noqa: BLE001 - a handler of the user's log raises, too, or is interrupted
        _last_resort(what, error, another)


def _log(what: str, error: BaseException, then: str) -> None:
    place = traceback.extract_tb(error.__traceback__, limit=-1)
    held_back = _repeats.due((what, type(error), *((at.filename, at.lineno) for at in place)), time.monotonic())
    if held_back is None:
        return
    named = type(error).__name__
    with suppress(Exception):  # a user's class may fail to say what it is
        named = f"{named}: {error}".rstrip(": ")
    if held_back == 0:
        text = "%s raised %s; %s"
        log(logging.ERROR, "callback_failed", text, what, named, then, error=error)
    else:
        text = "%s raised %s (%d more since this was said last)"
        log(logging.ERROR, "callback_failed", text, what, named, held_back)


def _last_resort(what: str, error: BaseException, another: BaseException) -> None:
    """The log can't be written: stderr is what logging itself uses then."""
    try:
        if not _pass_on(another) and logging.raiseExceptions and sys.stderr is not None:
            sys.stderr.write(f"kafka-marshal: {what} raised, and so does logging ({another!r}):\n")
            traceback.print_exception(error)
    except BaseException:  # noqa: BLE001, S110 - no log is left
        pass


def _pass_on(error: BaseException) -> bool:
    """Whether a signal's handler raised this: it runs once more, in a moment."""
    number = _signal_behind(error)
    if number is not None:
        threading.Thread(target=_ring_again, args=(number,), name="kafka-marshal-signal", daemon=True).start()
    return number is not None


def _signal_behind(error: BaseException) -> int | None:
    """The signal whose handler raised this; None: none did. Handlers run on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handlers: dict[CodeType, int] = {}
    for number in signal.valid_signals():
        if (code := _code_of(signal.getsignal(number))) is not None:
            handlers[code] = number
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in handlers:
            return handlers[frame.f_code]
    # Python's own handler of Ctrl-C has no frame.
    is_interrupt = isinstance(error, KeyboardInterrupt) and callable(signal.getsignal(signal.SIGINT))
    return signal.SIGINT if is_interrupt else None


def _code_of(handler: object) -> CodeType | None:
    """What a function, a method, a partial or a callable object runs."""
    while isinstance(handler, partial):
        handler = handler.func
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if callable(handler) else None


def _ring_again(number: int) -> None:
    time.sleep(RING_AGAIN_S)
    if hasattr(signal, "pthread_kill") and callable(signal.getsignal(number)):
        signal.pthread_kill(threading.main_thread().ident or 0, number)  # ends its wait, which the other way does not
    else:
        _thread.interrupt_main(cast("signal.Signals", number))  # some have a number only
