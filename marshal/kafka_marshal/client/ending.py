"""How a Marshal ends: once, with a release of everything or without, and within its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kafka_marshal.client.base import AnyConsumer
from kafka_marshal.client.closing import (
    CLOSE_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    Limit,
    calling,
    carry_out,
    cut_off,
    end_all,
    late_text,
)
from kafka_marshal.logs import Event
from kafka_marshal.node.driver import Driver
from kafka_marshal.runtime import Runtime
from kafka_marshal.watchdog import Watchdog

if TYPE_CHECKING:
    from kafka_marshal.client.view import WorldView
    from kafka_marshal.metrics.measure import Meter
    from kafka_marshal.metrics.server import MetricsServer


class Opened(NamedTuple):
    """What a Marshal has open."""

    driver: Driver
    watchdog: Watchdog | None
    world: WorldView
    meter: Meter

    def undo(self) -> None:
        """End it again: it did not reach the caller."""
        self.driver.shut_down()
        if self.watchdog is not None:
            self.watchdog.close()


class Ending:
    """The end of one Marshal: it happens once, however often it is asked for."""

    def __init__(self, runtime: Runtime) -> None:
        self._limit = Limit(runtime)
        self._lock = runtime.lock()
        self._has_ended = False
        #: All consumers ever made, closed ones included.
        self.consumers: list[AnyConsumer[Any]] = []
        #: Closed last: they answer until the end.
        self.servers: list[MetricsServer] = []

    def stop_all(self) -> None:
        """Ask all loops to end (any thread, and a signal's handler)."""
        for consumer in self.consumers:
            consumer.stop()

    def run(self, driver: Driver, watchdog: Watchdog | None, release: bool, timeout: float | None) -> None:
        """End everything (*blocking*), on one of our threads; a warning names what takes longer than timeout."""
        self._limit.lower(timeout)
        in_callback = calling.get() is not None
        carry_out(
            driver,
            lambda: self._carry_out(driver, watchdog, release, in_callback),
            timeout,
            lambda: _cut_off(driver, timeout),
        )

    @property
    def has_begun(self) -> bool:
        """Whether it ends, or has ended (any thread, without a lock)."""
        return self._has_ended

    def end_dropped(self, driver: Driver, watchdog: Watchdog | None) -> None:
        """End everything: nothing refers to the Marshal any more (*blocking*; on one of our threads)."""
        self._limit.lower(DEFAULT_TIMEOUT_S)
        self._carry_out(driver, watchdog, True, False)

    def _carry_out(self, driver: Driver, watchdog: Watchdog | None, release: bool, in_callback: bool) -> None:
        with driver.condition:
            driver.condition.notify_all()  # threads that wait may have a shorter limit now
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            try:
                if release:
                    self._release_all(driver, in_callback)
                else:
                    _call_off(watchdog)  # it would release what must be kept
                    for consumer in self.consumers:
                        consumer._leaving.abandon()
                    with driver.locked() as engine:
                        engine.take(None, engine.last_words, driver.now_ms())
                driver.flush(CLOSE_TIMEOUT_S)
                if release and self._release_unseen(driver):
                    driver.flush(CLOSE_TIMEOUT_S)
                for consumer in self.consumers:
                    consumer._leaving.await_answers()
            finally:
                for consumer in self.consumers:
                    consumer._free()
                how = "left" if release else "left without releasing; a restart takes its partitions over"
                driver.say(Event.LEFT, how)
                driver.shut_down()
                _call_off(watchdog)
                for server in self.servers:
                    server.close()

    @staticmethod
    def _release_unseen(driver: Driver) -> bool:
        """Release what the log may grant after this: no heartbeat follows that would. Whether there was any."""
        with driver.locked() as engine:
            return engine.failure is None and bool(engine.take(None, engine.release_unseen, driver.now_ms()))

    def _release_all(self, driver: Driver, in_callback: bool) -> None:
        consumers = [consumer for consumer in self.consumers if not consumer._closed]
        for consumer in consumers:
            consumer._limit.join(self._limit)
        for consumer in consumers if not in_callback else ():
            consumer._leaving.end_work(consumer._limit)
        for consumer in consumers:
            consumer._leaving.identify()
        with driver.locked() as engine:
            for consumer in consumers:
                consumer._leaving.begin(consumer._limit, in_callback)
            manual = list(engine.leases.manual.values())
            for lease in manual:
                engine.take(None, lease.release, None, driver.now_ms())
        end_all(driver, consumers, in_callback, manual, for_good=True)
        for consumer in consumers:
            consumer._leaving.end(consumer._limit)


def _cut_off(driver: Driver, timeout: float | None) -> str:
    """The end is late: stop heartbeats and all waiting calls, leave the rest to the background; returns a text."""
    text = late_text(driver, "close() of a Marshal", timeout)
    cut_off(driver)
    return (
        f"{text} It goes on in the background, and no heartbeat is sent any more: leases that are not released end "
        "after two heartbeat intervals, and what was not reported as done is repeated by others"
    )


def _call_off(watchdog: Watchdog | None) -> None:
    if watchdog is not None:
        watchdog.close()
