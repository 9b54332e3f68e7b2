"""A worker's process of a campaign: what it writes down, its Marshal, and how long a message takes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from kafka_marshal import Marshal

__all__ = ["POISON", "PoisonedProcess", "Process"]

#: A message that kills its process, until the folder has a file ``calm``.
POISON = b"poison"


class Process:
    """Started with its job, as JSON."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, *what: object) -> None:
        """Write a line at once: it survives a kill."""
        os.write(self.out, (" ".join(map(str, what)) + "\n").encode())

    def marshal(self) -> Marshal:
        """Its Marshal; SIGTERM ends the process in order."""
        job = self.job
        marshal = Marshal(
            job["bootstrap"],
            group_id=job["group"],
            client_id=job["name"],
            topic=job["log"],
            heartbeat_interval_ms=job["hi_ms"],
            watchdog=job["watchdog"],
        )
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        return marshal

    def live(self) -> None:
        """From the Marshal's constructor to the end."""
        raise NotImplementedError

    @classmethod
    def main(cls) -> None:
        """The process: an error that ends it is written down."""
        worker = cls(json.loads(sys.argv[1]))
        try:
            worker.live()
        except BaseException as error:
            worker.say("e", f"{type(error).__name__}: {error}".replace("\n", " "))
            raise


class PoisonedProcess(Process):
    """One that meets POISON."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.rng = Random(job["seed"])
        self.calm = Path(job["calm"])

    def take_time(self, value: bytes | str | None, is_calm: bool) -> None:
        """The work of a message; the poison message kills the process."""
        if value == POISON and not is_calm:
            self.say("n")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.job["work_ms"]:
            time.sleep(self.job["work_ms"] / 1000)
