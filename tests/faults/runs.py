"""A call of ``consumer.run`` on a cluster in memory: handled messages, its exception, and its dead letters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from kafka_marshal import Consumer, Marshal, Retry
from tests.faults.stories import TOPIC, member, memory_cluster

DEAD = "dead"
HOW = ("threads", "coroutines")

#: Ten times longer than any run of these tests.
WITHIN_S = 15.0

TWICE = Retry(attempts=2, backoff=(0.0, 0.0))


class Bench:
    """One partition whose messages have different keys, and a member that reads it."""

    def __init__(self, messages: int = 6, hi: int = 300, **options: Any) -> None:
        self.cluster = memory_cluster(1, 0)
        self.cluster.broker.create_topic(DEAD, 1)
        for number in range(messages):
            self.cluster.broker.produce(TOPIC, 0, b"%d" % number, b"k%d" % number)
        self.marshal: Marshal = member(self.cluster, hi=hi)
        self.consumer: Consumer = self.marshal.consumer([TOPIC], **options)
        self.handled: list[int] = []
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.marshal.close(timeout=1.0)

    @property
    def letters(self) -> list[bytes | None]:
        """Values of the dead letters."""
        return [letter.value() for letter in self.cluster.broker.existing[DEAD].partitions[0].messages]

    def start(self, handle: Any, **options: Any) -> None:
        """Call ``run`` in a separate thread."""
        options = {"concurrency": 2, "retry": TWICE, "dead_letters": DEAD, "drain_timeout": 2.0, **options}
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(handle, options), daemon=True)
        self._thread.start()

    def _run(self, handle: Any, options: dict[str, Any]) -> None:
        try:
            self.consumer.run(handle, **options)
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            self.error = error

    @property
    def is_over(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds or the run has ended."""
        until = time.monotonic() + WITHIN_S
        while not (condition() or self.is_over):
            assert time.monotonic() < until, f"not within {WITHIN_S:g} s: {what}"
            time.sleep(0.002)

    def ended(self) -> BaseException | None:
        """What it raised."""
        assert self._thread is not None
        self._thread.join(WITHIN_S)
        assert self.is_over, "run() stands still"
        return self.error

    def run(self, handle: Any, is_enough: Callable[[], object], **options: Any) -> BaseException | None:
        """A whole run: it is stopped when ``is_enough``, unless it ends before."""
        self.start(handle, **options)
        self.wait(is_enough, "what is wanted of the run")
        if not self.is_over:
            self.marshal.stop()
        return self.ended()


def as_handler(how: str, act: Callable[[Any], Any]) -> Any:
    """A handler that calls act, in threads or as a coroutine function."""

    async def handle(message: Any) -> Any:
        return act(message)

    return handle if how == "coroutines" else act
