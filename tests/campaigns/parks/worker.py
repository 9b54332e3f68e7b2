"""One worker of the campaign, as a user writes one: python -m tests.campaigns.parks.worker '{"bootstrap": …}'.

It appends a line for each thing at once, so that it survives a kill; times are the monotonic clock, in seconds:

| line | meaning |
|---|---|
| ``b PARTITION OFFSET TRY LAST TIME`` | a try begins (LAST: 1 if a failure is final) |
| ``h PARTITION OFFSET TRY LAST TIME`` | it is handled, and the member could prove after TIME that it has the message |
| ``f PARTITION OFFSET TRY LAST TIME`` | it failed |
| ``x PARTITION OFFSET TRY LAST TIME`` | it has no effect: the member could not prove that |
| ``n`` | the message kills this process next: kill -9 |
| ``s OK TEXT`` | what ``health()`` says, when it was asked |
| ``e TEXT`` | the worker ends by this error |
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from kafka_marshal import Attempt, Consumer, LeaseLostError, Marshal, Retry
from tests.campaigns.process import Process

__all__ = ["BAD", "FLAKY", "KILLER", "SLOW", "Worker"]

#: Values of messages. Until the folder has a file ``calm``: it kills its process; it fails always, or twice; it takes
#: longer than a heartbeat interval.
KILLER, BAD, FLAKY, SLOW = b"killer", b"bad", b"flaky", b"slow"


class BadMessageError(Exception):
    """The message is bad."""


class Worker(Process):
    """All of a process."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.folder = Path(job["folder"])
        self.is_over = threading.Event()

    def live(self) -> None:
        """From the Marshal's constructor to the end."""
        job = self.job
        with self.marshal() as marshal:
            threading.Thread(target=self.tell_health, args=(marshal,), daemon=True).start()
            with self.consumer(marshal) as consumer:
                retry = Retry(job["attempts"], tuple(job["backoff"]))
                consumer.run(self.handle, concurrency=8, order="key", retry=retry, park=True, drain_timeout=5.0)
        self.is_over.set()

    def consumer(self, marshal: Marshal) -> Consumer:
        if self.job["kind"] == "claimed":
            return marshal.consumer([self.job["topic"]])
        session = 4 * self.job["hi_ms"]
        return marshal.group_consumer([self.job["topic"]], session_timeout_ms=session, allow_key_share=True)

    def tell_health(self, marshal: Marshal) -> None:
        while not self.is_over.wait(0.3):
            if (self.folder / "tell").exists():
                health = marshal.health()
                is_well = health.ok and not health.stuck and not health.held_back
                self.say("s", int(is_well), str(health).replace("\n", " "))

    def handle(self, message: Any) -> None:
        """The handler of ``run``."""
        attempt = Attempt.current()
        place = message.partition(), message.offset(), attempt.number, int(attempt.is_last)
        self.say("b", *place, time.monotonic())
        try:
            self.work_on(message, attempt.number)
            now = time.monotonic()
            attempt.require()
        except LeaseLostError:
            self.say("x", *place, time.monotonic())
            raise
        except Exception:
            self.say("f", *place, time.monotonic())
            raise
        self.say("h", *place, now)

    def work_on(self, message: Any, number: int) -> None:
        value, release = message.value(), self.job["release"]
        is_calm = (self.folder / "calm").exists()
        if value == KILLER and not is_calm:
            self.say("n")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.job["work_ms"]:
            time.sleep(self.job["work_ms"] / 1000)
        if value == SLOW and not is_calm:
            time.sleep(1.2 * self.job["hi_ms"] / 1000)
        if (self.folder / "away").exists():
            raise ConnectionError("what is behind the handlers is away")
        if (value == BAD and not is_calm) or release == "all" or (release == "third" and message.offset() % 3 == 0):
            raise BadMessageError("it fails in this release")
        if value == FLAKY and not is_calm and number <= 2:
            raise ValueError("it works when it is tried again")


if __name__ == "__main__":
    Worker.main()
