"""A worker that sets messages aside. A line more than those of an account: ``s OK TEXT``, what ``health()`` says."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from kafka_marshal import Attempt, Consumer, Group, LeaseLostError, Marshal, Retry
from tests.campaigns.process import Process

#: Values of messages. Until the folder has a file ``calm``: it fails always, or twice; it takes longer than a heartbeat
#: interval. (POISON kills its process.)
BAD, FLAKY, SLOW = b"bad", b"flaky", b"slow"


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
        if self.job["kind"] == "run":
            return marshal.consumer([self.job["topic"]])
        session = 4 * self.job["hi_ms"]
        return marshal.consumer([self.job["topic"]], mode=Group(session_timeout=session / 1000, allow_key_share=True))

    def tell_health(self, marshal: Marshal) -> None:
        while not self.is_over.wait(0.3):
            if (self.folder / "tell").exists():
                health = marshal.health()
                is_well = health.ok and not health.stuck and not health.held_back
                self.say("s", int(is_well), str(health).replace("\n", " "))

    def handle(self, message: Any) -> None:
        """The handler of ``run``."""
        attempt = Attempt.current()
        place = self.job["kind"], message.partition(), message.offset()
        self.say("b", *place, time.monotonic())
        failure: Exception | None = None
        try:
            self.work_on(message, attempt.number)
        except Exception as error:  # noqa: BLE001 - raised when it is written down
            failure = error
        ended = time.monotonic()
        try:
            attempt.require()
        except LeaseLostError:
            self.say("x", *place, ended)
            raise
        if failure is not None:
            self.say("p" if attempt.is_last else "f", *place, ended)
            raise failure
        self.say("h", *place, ended)

    def work_on(self, message: Any, number: int) -> None:
        value, release = message.value(), self.job["release"]
        is_calm = self.calm.exists()
        self.take_time(value, is_calm)
        if value == SLOW and not is_calm:
            time.sleep(1.2 * self.job["hi_ms"] / 1000)
        if (self.folder / "away").exists():
            raise ConnectionError("what is behind the handlers is away")
        if (value == BAD and not is_calm) or release == "all" or (release == "third" and message.offset() % 3 == 0):
            raise BadMessageError("it fails in this release")
        if value == FLAKY and not is_calm and number <= 2:
            raise ValueError("it works when it is tried again")
