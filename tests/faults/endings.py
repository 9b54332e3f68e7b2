"""close() from a callback, a predicate, a loop or many threads: it returns, and everything else ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kafka_marshal import ClosedError, Consumer, Delivery, Marshal
from tests.faults.stories import ANSWER_S, TOPIC, answer, await_assigned, is_ours, member, memory_cluster
from tests.interrupts import stacks

#: Callbacks that call close(): of an assignment, of Consumer.close(), of Marshal.close().
CALLBACKS = ("on_assign", "on_revoke", "on_revoke of Marshal.close()")
#: What is closed.
WHAT = ("consumer", "marshal")


class Background:
    """A user's thread that gets messages until its loop ends."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="user", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001  end() reports it
            self.error = error

    def has_ended_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self) -> None:
        """Check that it ends by itself without an exception."""
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive(), f"the user's loop has not ended\n{stacks(first=self._thread)}"
        if self.error is not None:
            raise AssertionError(f"the user's loop raised {self.error!r}") from self.error


@contextmanager
def opened() -> Iterator[Marshal]:
    """A member whose threads must all end when it is closed."""
    before = set(threading.enumerate())
    made = member(memory_cluster())
    yield made
    answer("Marshal.close()", made.close)
    until = time.monotonic() + ANSWER_S
    while left := [each.name for each in set(threading.enumerate()) - before if is_ours(each)]:
        assert time.monotonic() < until, f"threads are left {ANSWER_S:g} s after close(): {left}"
        time.sleep(0.002)


def iterate(consumer: Consumer) -> None:
    for _ in consumer:
        pass


def poll(consumer: Consumer) -> None:
    with suppress(ClosedError):  # a call that begins after close()
        while consumer.poll() is not None:
            pass


def consume(consumer: Consumer) -> None:
    with suppress(ClosedError):
        while consumer.consume(100):
            pass


def batches(consumer: Consumer) -> None:
    for batch in consumer.batches(4, 0.01):
        batch.done()


LOOPS = (iterate, poll, consume, batches)
DELIVERIES: tuple[Delivery, ...] = ("at-least-once", "at-most-once")


def closed_at_once(marshal: Marshal, loop: Callable[[Consumer], None], what: str, delivery: Delivery) -> None:
    """Four threads close while two work."""
    consumer = marshal.consumer([TOPIC], delivery=delivery, batch_size=4)
    users = [Background(lambda: loop(consumer)) for _ in range(2)]
    closers = [Background(consumer.close if what == "consumer" else marshal.close) for _ in range(4)]
    for each in (*closers, *users):
        each.end()
    answer("a second Consumer.close()", consumer.close)
    answer("a second Marshal.close()", marshal.close)


def a_callback_closes(marshal: Marshal, callback: str, what: str) -> None:
    """It does not wait for itself."""
    called: list[str] = []

    def close(consumer: Consumer, _partitions: Any) -> None:
        called.append("begun")
        (consumer if what == "consumer" else marshal).close()
        called.append("ended")

    options: dict[str, Any] = {callback.split()[0]: close}
    consumer = marshal.consumer([TOPIC], **options)
    user = Background(lambda: iterate(consumer))
    if callback != "on_assign":
        await_assigned(consumer)
        answer(*(("Consumer.close()", consumer.close) if callback == "on_revoke" else ("close()", marshal.close)))
    user.end()
    answer("another Consumer.close()", consumer.close)
    answer("Marshal.close()", marshal.close)
    until = time.monotonic() + ANSWER_S
    while called[-1:] != ["ended"]:
        assert time.monotonic() < until, f"the callback has not ended: {called}\n{stacks()}"
        time.sleep(0.002)
