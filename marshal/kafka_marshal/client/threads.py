"""Handlers that are functions, called in threads (:mod:`.parallel`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

from kafka_marshal.client.closing import calling
from kafka_marshal.client.ready import Ready, check_result, deserialized
from kafka_marshal.client.tries import Tries, cancelled
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.logs import log
from kafka_marshal.runtime import is_ours


class Threads:
    """Handlers called in threads, ``concurrency`` of them."""

    def __init__(self, tries: Tries) -> None:
        self._tries = tries
        self._ready = Ready()
        #: True for each lane that is ready, None for each thread that has to end.
        self._calls = tries.runtime.mailbox()
        #: How many there are, and how many there should be: one more for each that hangs.
        self._lock = tries.runtime.lock()
        self._threads = 0
        self._wanted = tries.options.concurrency

    def start(self) -> None:
        while self._threads < self._wanted:
            with self._lock:
                self._threads += 1
                number = self._threads
            self._tries.runtime.start(partial(self._work, number % 2 == 0), f"kafka-marshal-handler-{number}")

    def put(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self._ready.put(lane)
            self._calls.put(True)

    def look(self, now: float) -> None:
        timeout = self._tries.handler_timeout_ms
        if timeout is None:
            return
        hanging = len(self._tries.lanes.hanging(now - timeout))
        if self._tries.options.concurrency + hanging > self._wanted:
            log(
                logging.WARNING,
                "handlers_hang",
                "%d handler(s) have taken longer than handler_timeout: others get what they have, their threads are "
                "left behind, and new ones take their place",
                hanging,
            )
        self._wanted = self._tries.options.concurrency + hanging
        self.start()

    def end(self, timeout: float) -> None:
        self._wanted = 0
        for _ in range(self._threads):
            self._calls.put(None)

    @property
    def count(self) -> tuple[int, int]:
        return self._threads, self._wanted

    def _work(self, longest: bool) -> None:
        """Handle messages until the end (a worker)."""
        try:
            if self._handle_on(longest):
                return
        except BaseException as error:  # noqa: BLE001 - without this handler, the run must not seem complete
            self._tries.end(error)
        with self._lock:
            self._threads -= 1

    def _handle_on(self, longest: bool) -> bool:
        """Handle until the end; True: there was one thread too many. No lock is held while the handler runs."""
        tries, handle, deserialize = self._tries, self._tries.options.handle, self._tries.options.deserialize
        call, take, now_ms = self._calls.get, self._ready.take, tries.runtime.now_ms
        is_ours.set(False)
        calling.set(tries.consumer)
        is_called = False
        while is_called or call() is not None:
            is_called, lane = False, take(longest)
            if lane is None:
                continue
            began, turn = now_ms(), lane.turn
            try:
                attempt = tries.begin(lane, began)
                if attempt is None:
                    continue
                try:
                    message = attempt.message
                    result = handle(message if deserialize is None else deserialized(deserialize, message))
                    if result is not None:
                        check_result(result)
                except BaseException as error:  # noqa: BLE001 - it is reported, and may end the run
                    tries.failed(lane, attempt, began, cancelled(error))
                else:
                    is_called = tries.done(lane, attempt, began)
                    if is_called:  # this thread takes it: to wake another one costs more than all the rest
                        self._ready.put(lane)
            except BaseException as error:  # noqa: BLE001 - what follows a handler ends the run
                tries.broken(lane, turn + 1, error)
            if self._threads > self._wanted and self._is_one_too_many():
                if is_called:
                    self._calls.put(True)
                return True
        return False

    def _is_one_too_many(self) -> bool:
        """Whether this thread was replaced while its handler hung, or the run has ended."""
        with self._lock:
            is_one = self._threads > self._wanted
            self._threads -= is_one
            return is_one
