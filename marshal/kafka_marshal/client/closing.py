"""How consumers and Marshals end: within a time limit, even if callbacks or our own threads do not return.

A handle that nothing refers to any more is closed, with a warning: a notebook cell that runs again drops one. Otherwise
threads of the library would work for it for ever, and keep its leases. So they never refer to the user's object: to a
Marshal only weakly, to a consumer by a twin that shares its state. The garbage collector may run anywhere, with any
lock held; what it calls here takes no lock, and leaves the rest to a thread of the library.

A program whose main() returns drops its handles, too, just before the interpreter ends. That is no mistake: the thread
waits for a moment, and the interpreter's end releases everything without a warning.
"""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from math import inf
from typing import Protocol

from kafka_marshal.client.health import examine
from kafka_marshal.engine.claims.leases import ManualLease
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.errors import MarshalError
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.effects import UserCall
from kafka_marshal.node.engine_lock import under_lock
from kafka_marshal.node.life import exiting, say
from kafka_marshal.node.serving import EndedError, LateError
from kafka_marshal.runtime import THREADS, Runtime, is_ours

#: A dropped handle is closed after this time (s), as the interpreter may be about to end.
GRACE_S = 1.0


def close_if_dropped(handle: object, driver: Driver, is_closed: Callable[[], bool], end: Callable[[], object]) -> None:
    """If nothing refers to an open handle any more, have a thread of the library warn, and call end().

    is_closed and end must not refer to the handle. It has no effect in a simulation, where a process ends as if killed.
    """
    if driver.cluster.runtime is THREADS:
        weakref.finalize(handle, _dropped, driver, is_closed, end, repr(handle)).atexit = False


def _dropped(driver: Driver, is_closed: Callable[[], bool], end: Callable[[], object], name: str) -> None:
    """The collector has taken the handle (any thread, any lock may be held)."""
    if not (is_closed() or driver.is_over or driver.life.forked or exiting or sys.is_finalizing()):
        driver.servants.post(partial(_close, driver, is_closed, end, name))


def _close(driver: Driver, is_closed: Callable[[], bool], end: Callable[[], object], name: str) -> None:
    until = driver.monotonic() + GRACE_S
    with driver.condition:
        while not (is_closed() or driver.is_over) and (left := until - driver.monotonic()) > 0:
            driver.condition.wait(left)
    if is_closed() or driver.is_over or exiting:
        return
    text = (
        f"{name} was dropped without close(): nothing in this program refers to it any more. What it holds is released "
        "now; what was handed out and is not done comes again, here or at another member. Close it, best by a with "
        "block, or keep a reference as long as it is to work"
    )
    log(logging.WARNING, "dropped", "%s", text)
    try:
        warnings.warn(text, ResourceWarning, stacklevel=1)
    except ResourceWarning:  # a filter turns it into an error, but there is no caller to get it; the log has it
        log(logging.DEBUG, "dropped", "%s: as an error, it reaches nobody", name)
    end()


#: How long close() waits for callbacks that have not returned (s), as other clients of Kafka do.
DEFAULT_TIMEOUT_S = 30.0

#: A close() may last longer than its timeout by this much (s).
CLOSE_TIMEOUT_S = 1.0

#: How long it then waits for the log to show its releases (s). They are sent in any case. The rest of CLOSE_TIMEOUT_S
#: is for the steps that follow: with no broker to answer, close() is to end, not to be given up.
RELEASE_S = 0.8

#: The steps after the release may last this much longer than the limit (s); it is part of CLOSE_TIMEOUT_S.
LAST_S = 0.5

#: How long close() may take to look up the ids of topics that are not known yet (s).
IDENTIFY_TIMEOUT_S = 0.5

#: The timeout of the close at the interpreter's end, if close() was never called (s).
EXIT_TIMEOUT_S = 1.0

#: The consumer whose callback this thread is in: it must not wait for itself.
calling: ContextVar[object] = ContextVar("calling", default=None)


class Releasing:
    """How one consumer releases what it holds."""

    def __init__(self, driver: Driver, engine: ConsumerEngine) -> None:
        self._driver = driver
        self._engine = engine
        #: Called first, with the limit of the wait: ends what works on its messages (*blocking*).
        self.settle: Callable[[Limit], object] = lambda limit: None
        #: Called before anything is released; the lock is held.
        self.before: Callable[[], object] = lambda: None
        #: Called once the log shows all released, with how long it may take (s).
        self.after: Callable[[float], object] = lambda timeout_s: None
        #: False: the state that handlers keep is not known, so no checkpoint can have it (X16).
        self.is_state_known: bool = True

    def identify(self) -> None:
        """Look up the ids of topics with done messages that the log and the cluster have not given yet (P12)."""
        with self._driver.lock.locked():
            names = self._driver.engine.take(self._engine.number, self._engine.positions.marks.lacking)
        if names:
            try:
                infos = self._driver.cluster.topic_info(names, IDENTIFY_TIMEOUT_S)
            except MarshalError as error:
                text = "positions are released without saying which topic they are of: %s"
                log(logging.DEBUG, "topics_not_found", text, error)
                return
            with self._driver.lock.locked():
                self._driver.engine.take(self._engine.number, self._engine.positions.marks.learn, infos)

    def begin(self, limit: Limit, in_callback: bool) -> None:
        """Begin to release everything; the lock is held.

        A member that takes checkpoints leaves at one, within the limit. in_callback: the caller is a callback, and none
        that would save its state can run before that one returns.
        """
        if not self._engine.closing:
            self.before()
            left_s = limit.left_s if self.is_state_known and not in_callback else -inf
            now = self._driver.now_ms()
            leave_by = inf if left_s is None else now + left_s * 1000
            self._driver.engine.take(self._engine.number, self._engine.close, now, leave_by)

    @property
    def callbacks_running(self) -> int:
        """Callbacks that were called, or are to be, and have not returned; the lock is held."""
        return self._engine.callbacks_running

    def end_work(self, limit: Limit) -> None:
        """Have what works on its messages end, and wait for it (*blocking*).

        A member that takes checkpoints only begins no more: its leaving waits for what is in flight, piece by piece.
        """
        if not self._engine.source.takes_checkpoints:
            self.settle(limit)
            return
        now = Limit(self._driver.cluster.runtime)
        now.lower(0.0)
        self.settle(now)

    @property
    def waits_for_checkpoint(self) -> bool:
        """Whether it is to leave at a checkpoint, and has not yet; the lock is held."""
        source = self._engine.source
        return source.takes_checkpoints and self.is_state_known and not source.has_left

    @property
    def is_released(self) -> bool:
        """Whether the log shows all released, except what a callback still works on; the lock is held."""
        left = self._engine.assignments.values()
        return all(x.callbacks_running for x in left) and (bool(left) or self._engine.source.has_left)

    def end(self, limit: Limit) -> None:
        """After the wait for releases: do what follows them (*blocking*). limit: of the wait for callbacks."""
        with self._driver.condition:
            is_released = self.is_released and self._driver.engine.failure is None
        if is_released:  # otherwise Kafka does not answer, and time is short
            left_s = limit.left_s
            self.after(inf if left_s is None else left_s + LAST_S)

    def abandon(self) -> None:
        """Stop delivering, without a release (terminate)."""
        with self._driver.lock.locked():
            self._driver.engine.take(self._engine.number, self._engine.abandon, self._driver.now_ms())

    def await_answers(self) -> None:
        """After ``abandon``, with all sent: wait for last grants, to report what they lose (C13)."""
        with self._driver.condition:
            self._driver.wait_for(lambda: not self._engine.delivery.grants.awaited, CLOSE_TIMEOUT_S)


class Limit:
    """Until when to wait for callbacks; of several calls of close(), the earliest limit counts."""

    def __init__(self, runtime: Runtime) -> None:
        self._monotonic = runtime.monotonic
        self._own = inf
        #: That of the Marshal, which ends, too; None: it does not end yet.
        self._whole: Limit | None = None

    def lower(self, timeout: float | None) -> None:
        """One call waits this long (s); None: without a limit."""
        if timeout is not None:
            self._own = min(self._own, self._monotonic() + max(0.0, timeout))

    def join(self, whole: Limit) -> None:
        """The Marshal ends, too: its limit counts as well, also if it is lowered."""
        self._whole = whole

    @property
    def _until(self) -> float:
        return self._own if self._whole is None else min(self._own, self._whole._until)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self._monotonic() >= self._until

    @property
    def left_s(self) -> float | None:
        """The time left (s); None: no limit."""
        until = self._until
        return None if until == inf else max(0.0, until - self._monotonic())


class Closable(Protocol):
    """What the end needs of a consumer."""

    _leaving: Releasing
    _limit: Limit
    _closed: bool


def carry_out(driver: Driver, end: Callable[[], object], timeout: float | None, late: Callable[[], str]) -> None:
    """Have one of our threads carry out end(), and wait for it (*blocking*).

    Waits for timeout and CLOSE_TIMEOUT_S at most. If end() has not returned by then, it continues in the background,
    and the text of late() is logged. While the interpreter finalizes, nothing is done.
    """
    if sys.is_finalizing():
        return  # our threads are frozen and may hold the lock; leases end by themselves
    if is_ours.get():  # a destructor of the user's, run here by the garbage collector
        driver.post(end)
    elif under_lock.get() or driver.is_over:
        end()
    else:
        try:
            driver.servants.ask(lambda _: end()).wait(None if timeout is None else max(0.0, timeout) + CLOSE_TIMEOUT_S)
        except LateError:
            say(driver.cluster.runtime, logging.WARNING, "close_late", late())
        except EndedError:
            _if_possible(driver, end)


def _if_possible(driver: Driver, end: Callable[[], object]) -> None:
    """Another close() was faster; the rest needs none of our threads."""
    if driver.is_over and not sys.is_finalizing():
        end()


def late_text(driver: Driver, what: str, timeout: float | None) -> str:
    """Why a close() is late, for people."""
    problems = "; ".join(examine(driver, closed=False).problems) or "the brokers, or this machine, are slow"
    return f"{what} has not ended {CLOSE_TIMEOUT_S:g} s after its timeout of {timeout or 0.0:g} s: {problems}."


def cut_off(driver: Driver) -> None:
    """End it without its lock, which a thread may hold: heartbeats stop, and no call waits (any thread)."""
    driver.life.ended = True
    driver.servants.over = True


def end_all(
    driver: Driver,
    consumers: Sequence[Closable],
    in_callback: bool,
    manual: Sequence[ManualLease] = (),
    *,
    for_good: bool = False,
) -> None:
    """Wait until what these consumers hold, and these leases, are released (on one of our threads).

    Each consumer is waited for within its limit: one whose own close() has used it up is not waited for again.
    in_callback: the caller is a user's callback, so callbacks are not waited for. for_good: the Marshal ends, too.
    """
    with driver.condition:
        left = "" if in_callback else _await_callbacks(driver, consumers, for_good)
        driver.wait_for(
            lambda: (
                all(c._closed or c._leaving.is_released for c in consumers)
                and all(x.is_released or x.loss for x in manual)
                and not driver.engine.book.unseen
            ),
            RELEASE_S,
        )
    if left:
        log(logging.WARNING, "close_late", "%s", left)


def _await_callbacks(driver: Driver, consumers: Sequence[Closable], for_good: bool) -> str:
    """Wait until all callbacks have returned, or the limits are over; returns what is left (the lock is held)."""

    def running() -> list[Closable]:
        at_work = [c for c in consumers if c._leaving.callbacks_running or c._leaving.waits_for_checkpoint]
        return [c for c in at_work if not c._closed]  # another thread has closed it, and the engine has forgotten it

    def awaited() -> list[Limit]:
        return [c._limit for c in running() if not c._limit.is_over]

    def is_cut_off() -> bool:
        return driver.is_over or driver.engine.failure is not None

    while (limits := awaited()) and not is_cut_off():
        left = [limit.left_s for limit in limits]
        driver.wait_for(lambda: not awaited(), min((each for each in left if each is not None), default=None))
    now = driver.now_ms()
    if is_cut_off() or not (running() or _hung(driver, consumers, now)):
        return ""
    dropped = driver.effects.callbacks.drop(consumers)
    with driver.lock.locked():
        for call in dropped:
            if call.dropped is not None:
                call.dropped(now)
    hung = _hung(driver, consumers, now)
    if hung is not None:
        return (
            f"close() does not wait any longer: {hung.described(now)}. The member leaves its group without that, and "
            "others continue from the last cuts of its pieces: what was done since is done again"
        )
    return _left_text(driver, [call.named for call in dropped], for_good)


def _hung(driver: Driver, consumers: Sequence[Closable], now: float) -> UserCall | None:
    """A callback about checkpoints that has not returned for long: a member leaves its group without it."""
    call = driver.effects.callbacks.running
    if call is None or now - call.began_at <= driver.engine.settings.heartbeat_interval_ms:
        return None
    port: object = call.port
    is_theirs = any(port is consumer for consumer in consumers)
    return call if is_theirs and call.named.startswith(("on_checkpoint", "on_restore", "on_completed")) else None


def _patience(driver: Driver) -> str:
    """How long other members wait for a silent member, for people."""
    session_ms = max((member.session_timeout_ms for member in driver.engine.groups.values()), default=0)
    if session_ms:
        return f"this member's session ({session_ms / 1000:g} s)"
    return f"two heartbeat intervals ({2 * driver.engine.settings.heartbeat_interval_ms / 1000:g} s)"


def _left_text(driver: Driver, dropped: list[str], for_good: bool) -> str:
    """Which callbacks were not waited for, and what that means, for people."""
    told = []
    if (call := driver.effects.callbacks.running) is not None:
        kept = (
            "The leases of its partitions are not released: they end by themselves after "
            f"{_patience(driver)}, and others go on there then. What it writes later than that may be written twice, "
            "unless the sink refuses older epochs"
            if for_good
            else "The leases of its partitions stay with this Marshal, and are released when it returns"
        )
        told.append(f"close() does not wait any longer: {call.described(driver.now_ms())}. {kept}")
    if dropped:
        told.append(
            f"not called any more, for none begins before that one returns: {'; '.join(dropped)}. Partitions were "
            "released with what is done; what these callbacks would have reported as done is repeated by others"
        )
    return ". ".join(told)
