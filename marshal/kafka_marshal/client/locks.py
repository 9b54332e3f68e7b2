"""Locks and leaders: leases on a name instead of a partition."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, MutableSet
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.client.closing import DEFAULT_TIMEOUT_S, calling
from kafka_marshal.client.lease import ClaimedLease, serve_claim
from kafka_marshal.client.one_process import OneProcess, WithBlock
from kafka_marshal.engine.claims.client import EVICTED_INTERVALS
from kafka_marshal.engine.plane import Loss
from kafka_marshal.errors import ClaimTimeoutError, ConfigurationError, GroupPausedError, HeldError, LeaseLostError
from kafka_marshal.guard import report
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.topic_names import LOCK, named

LeaderCallback = Callable[["Leader"], object]

#: A lease's topic has at most 249 bytes, and LOCK is a part of it.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,244}")

#: A campaign asks for the lease again after this time (s), and keeps its place in the queue.
_AGAIN_S = 3600.0


def lock_topic(name: object) -> str:
    """The name under which the log keeps a lock."""
    if not _NAME.fullmatch(arguments.text("name", name)):
        raise ConfigurationError(
            f"{name!r} can't name a lock: 1 to 244 of A-Z, a-z, 0-9, '.', '_' and '-' can. Nothing was claimed"
        )
    return f"{LOCK}{name}"


def checked_wait(timeout: object) -> float | None:
    """How long to wait for a lock (s); None: without a limit."""
    return None if timeout is None else arguments.seconds("timeout", timeout)


def serve_lead(
    is_gone: Callable[[], bool],
    driver: Driver,
    topic: str,
    timeout: float | None,
    callbacks: tuple[LeaderCallback | None, LeaderCallback | None],
    leaders: MutableSet[Leader],
) -> Leader:
    """Carry out ``Marshal.lead`` on one of our threads. is_gone: the caller has left. Raises what a claim raises."""
    leader = Leader(driver, serve_claim(is_gone, driver, topic, 0, timeout), callbacks, leaders)
    leaders.add(leader)
    try:
        driver.cluster.runtime.start(leader._campaign, "kafka-marshal-lead")
    except BaseException:  # the system has no further thread
        leader._leave()
        raise
    return leader


class Leader(OneProcess, WithBlock):
    """A leadership that was won. It campaigns again after a loss, until it is resigned. Made by :meth:`Marshal.lead`.

    ``on_win`` and ``on_loss`` are called on one thread of the library, once each for every term. If the term ends by
    ``resign`` or by the Marshal's ``close``, ``on_loss`` is called *before* another member can win. They must return:
    the next callback, and the release, wait for that.
    """

    def __init__(
        self,
        driver: Driver,
        first: ClaimedLease,
        callbacks: tuple[LeaderCallback | None, LeaderCallback | None],
        leaders: MutableSet[Leader],
    ) -> None:
        self.name: str = first.topic.removeprefix(LOCK)
        self._driver = driver
        self._lease = first
        self._on_win, self._on_loss = callbacks
        self._leaders = leaders
        self._resigned = False
        #: Its Marshal, kept alive by this reference.
        self._keeps: object = None

    @property
    def leading(self) -> bool:
        """Whether this process certainly leads, by its own clock. If not, do not begin anything in its name."""
        return not self._is_ending() and self._lease.valid

    @property
    def token(self) -> int:
        """The fencing token of this term; it grows with each term. Raises LeaseLostError unless it certainly leads."""
        lease = self._lease
        if self._is_ending():
            why = "resigned" if self._resigned else "over, as its Marshal has ended, or hands over"
            raise LeaseLostError(f"{named(lease.topic, 0)}: this leadership is {why}. End the work that was under it")
        lease.require()
        return lease.epoch

    def resign(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Release the leadership, after ``on_loss`` has returned, and do not campaign again.

        Waits for that up to timeout seconds (None: without a limit), except in ``on_win`` and ``on_loss``.
        """
        if timeout is not None:
            timeout = arguments.seconds("timeout", timeout)
        self._resigned = True
        self._driver.call(self._await_end, 0.0 if calling.get() is self else timeout)

    def _end_soon(self) -> None:
        """Resign, on a thread of the library, and wait for nothing."""
        self._resigned = True
        self._await_end(0.0)

    def _await_end(self, timeout: float | None) -> None:
        with self._driver.condition:
            self._driver.condition.notify_all()  # its thread waits
            if self._driver.wait_for(lambda: self not in self._leaders, timeout) or timeout == 0.0:
                return
        if not self._driver.is_over:
            text = "%s: on_loss, or the log, has not returned for %g s: the leadership is released when it has"
            log(logging.WARNING, "resign_late", text, named(self._lease.topic, 0), timeout)

    # The campaign's thread.

    def _campaign(self) -> None:
        calling.set(self)
        is_won = True
        try:
            while is_won and not self._is_ending():
                self._call("on_win", self._on_win)
                with self._driver.condition:
                    self._driver.lock.wait_for(lambda: self._is_ending() or self._lease._is_over, None)
                self._call("on_loss", self._on_loss)
                is_won = self._win()
        finally:
            self._leave()

    def _leave(self) -> None:
        try:
            if not self._driver.is_over:
                self._lease.release()  # no effect if it is over
        finally:
            with self._driver.condition:
                self._leaders.discard(self)
                self._driver.condition.notify_all()

    def _is_ending(self) -> bool:
        engine = self._driver.engine
        return self._resigned or self._driver.is_over or engine.failure is not None or engine.leases.draining

    def _win(self) -> bool:
        if self._lease._manual.loss == Loss.EVICTED:  # others have it first (C18)
            hi_s = self._driver.engine.settings.heartbeat_interval_ms / 1000
            with self._driver.condition:
                self._driver.lock.wait_for(self._is_ending, EVICTED_INTERVALS * hi_s)
        while not self._is_ending():
            try:
                self._lease = serve_claim(self._is_ending, self._driver, self._lease.topic, 0, _AGAIN_S)
            except (HeldError, ClaimTimeoutError, GroupPausedError):
                continue
            except Exception as error:  # noqa: BLE001 - closed, or the log needs a newer release
                if not self._is_ending():
                    text = "%s: this member does not campaign any more: %s"
                    log(logging.ERROR, "campaign_ended", text, named(self._lease.topic, 0), error)
                return False
            return True
        return False

    def _call(self, what: str, function: LeaderCallback | None) -> None:
        if function is not None:
            try:
                arguments.a_result(what, function(self))
            except BaseException as error:  # noqa: BLE001 - sys.exit() in a callback must not end the campaign
                report(f"{what} of {named(self._lease.topic, 0)}", error)

    def __exit__(self, *_: object) -> None:
        self.resign()

    def __repr__(self) -> str:
        return f"Leader({self.name!r}, {'leading' if self.leading else 'not leading'})"


class Locking:
    """The part of a Marshal that gets locks."""

    #: How it ends: it knows its leaders.
    _ending: Any
    _get: Callable[..., Any]

    def lock(self, name: str, timeout: float | None = 5.0) -> ClaimedLease:
        """Take a lock of the group, as a lease on its name; wait up to timeout seconds (None: without a limit).

        Use it in a ``with`` block. ``token`` of the result is the fencing token. Raises what :meth:`claim` raises.
        Members that wait win in the order of their first requests in the log.
        """
        lease: ClaimedLease = self._get(serve_claim, ClaimedLease.release, lock_topic(name), 0, checked_wait(timeout))
        return lease

    def lead(
        self,
        name: str,
        timeout: float | None = 5.0,
        *,
        on_win: LeaderCallback | None = None,
        on_loss: LeaderCallback | None = None,
    ) -> Leader:
        """Win a leadership within timeout seconds (None: without a limit), and again after each loss, until resigned.

        Use it in a ``with`` block. It is the lock of this name, with a campaign. Raises what :meth:`claim` raises. The
        callbacks get the :class:`Leader`, which says when they are called.
        """
        topic, wait = lock_topic(name), checked_wait(timeout)
        for each, function in (("on_win", on_win), ("on_loss", on_loss)):
            if function is not None:
                arguments.a_function(each, function, "leader")
        about = topic, wait, (on_win, on_loss), self._ending.leaders
        leader: Leader = self._get(serve_lead, Leader._end_soon, *about)
        return leader
