"""A worker as users write them, in its own process, beside a flood.

``python -m tests.campaigns.fuzz.worker JSON``. It consumes one topic at least once and another at most once,
claims leases by hand from time to time to measure how long that takes, and writes JSON lines to a file. SIGTERM ends it
cleanly.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from typing import Any

from kafka_marshal.client.marshal import Marshal
from kafka_marshal.errors import LeaseError, MarshalError
from rationalizer import Outcome
from tests.campaigns.fuzz.campaign import rss_mb
from tests.client.program import Program

#: A replica records its digest at the first record at or above each multiple of this offset.
DIGEST_EVERY = 5_000
#: Seconds between two reads of the memory, and between two claims by hand.
MEMORY_S = 0.5
CLAIM_S = 0.1


class _Errors(logging.Handler):
    """Writes logged errors to the notes."""

    def __init__(self, notes: Program) -> None:
        super().__init__(logging.ERROR)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.say("error", text=record.getMessage())


class Worker:
    """Two consumers, a thread that claims by hand, and a listener that notes digests."""

    def __init__(self) -> None:
        self.notes = Program()
        self.arguments = self.notes.arguments
        self.done = threading.Event()
        logging.getLogger("kafka_marshal").addHandler(_Errors(self.notes))

    def run(self) -> None:
        """Work until SIGTERM."""
        with self.notes.marshal() as marshal:
            signal.signal(signal.SIGTERM, lambda *_: self.done.set())
            marshal._driver.listeners.append(self._note_digests(marshal))
            threads = [
                threading.Thread(target=self._guarded, args=(self._consume, marshal, delivery))
                for delivery in ("at-least-once", "at-most-once")
            ]
            threads.append(threading.Thread(target=self._guarded, args=(self._claim, marshal)))
            for thread in threads:
                thread.start()
            while not self.done.wait(MEMORY_S):
                self.notes.say("memory", mb=rss_mb(), threads=threading.active_count())
            marshal.stop()
            for thread in threads:
                thread.join()
            for alarm in marshal.alarms:
                self.notes.say("error", text=str(alarm))
        self.notes.say("closed")

    def _guarded(self, work: Any, *arguments: object) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - recorded and judged
            self.notes.say("error", text=f"{type(error).__name__}: {error}")

    def _note_digests(self, marshal: Marshal) -> Any:
        worlds = marshal._driver.replica.worlds
        due = {cp: (world.next_offset // DIGEST_EVERY + 1) * DIGEST_EVERY for cp, world in worlds.items()}

        def listen(cp: int, offset: int, _: Outcome) -> None:
            if offset + 1 >= due[cp]:
                due[cp] = ((offset + 1) // DIGEST_EVERY + 1) * DIGEST_EVERY
                self.notes.say("digest", cp=cp, offset=offset, digest=worlds[cp].digest())

        return listen

    def _consume(self, marshal: Marshal, delivery: str) -> None:
        at_most = delivery == "at-most-once"

        def lost(_: object, partitions: Any) -> None:
            for each in partitions:
                self.notes.say("lost", topic=each.topic, partition=each.partition)

        topic = self.arguments["amo" if at_most else "alo"]
        with marshal.consumer(
            [topic], delivery="at-most-once" if at_most else "at-least-once", on_lost=lost
        ) as consumer:
            for message in consumer:
                self.notes.say("handled", topic=topic, partition=message.partition(), offset=message.offset())

    def _claim(self, marshal: Marshal) -> None:
        """Leases that no other client wants, one after the other, on all CPs."""
        number = 0
        while not self.done.wait(CLAIM_S):
            number += 1
            began = time.monotonic()
            with contextlib.suppress(LeaseError):
                lease = marshal.claim(f"probe-{self.arguments['client_id']}", number % 64, timeout=10.0)
                self.notes.say("claimed", ms=(time.monotonic() - began) * 1000)
                lease.release()
                continue
            self.notes.say("refused", ms=(time.monotonic() - began) * 1000)


def main() -> int:
    """Returns the exit status."""
    worker = Worker()
    try:
        worker.run()
    except MarshalError as error:
        worker.notes.say("error", text=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
