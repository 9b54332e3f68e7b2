"""A worker's process of a campaign: ``python -m tests.campaigns.process MODULE JOB``, where MODULE has its Worker.

It appends a line for each thing at once, so that it survives a kill; times are the monotonic clock, in seconds. Of a
message, or of a batch, the lines are those of :mod:`tests.campaigns.account`, and of all workers:

| line | meaning |
|---|---|
| ``n`` | the poison message of this process comes next: kill -9 |
| ``e TEXT`` | the worker ends by this error |
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from kafka_marshal import Marshal

#: A message that kills its process, until the folder has a file ``calm``.
POISON = b"poison"


class Process:
    """Started with its job, as JSON."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.rng = Random(job["seed"])
        self.calm = Path(job["calm"])

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
            heartbeat_interval=(job["hi_ms"]) / 1000,
            watchdog=job["watchdog"],
        )
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        return marshal

    def live(self) -> None:
        """From the Marshal's constructor to the end."""
        raise NotImplementedError

    def take_time(self, value: bytes | str | None, is_calm: bool) -> None:
        """The work of a message; the poison message kills the process."""
        if value == POISON and not is_calm:
            self.say("n")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.job["work_ms"]:
            time.sleep(self.job["work_ms"] / 1000)


def main(module: str, job: str) -> None:
    """The process: an error that ends it is written down."""
    worker: Process = import_module(module).Worker(json.loads(job))
    try:
        worker.live()
    except BaseException as error:
        worker.say("e", f"{type(error).__name__}: {error}".replace("\n", " "))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
