"""The same steps with worker processes in plain Python: no Spark, no dead letters, no audit; one worker joins."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flights.job import Job
from flights.options import ProcessSettings, WorkerSettings
from flights.process import WORKERS
from flights.publish import Scene

__all__ = ["PlainJob"]


class PlainJob(Job):
    """One run, with plain workers."""

    STEPS = 5
    MANNER = WORKERS
    BAD_RECORDS = False
    CHECK = "Check: the file is added up by itself and compared; the coordination log is replayed"
    COMMANDS: tuple[tuple[str, str], ...] = (
        ("kafka-marshal replay coordination.jsonl", "every record, with its outcome"),
        ("kafka-marshal replay --state coordination.jsonl", "the state at the end, with a digest"),
        ("sqlite3 delays.sqlite 'SELECT * FROM batches'", "every transaction: offsets, epoch, worker"),
    )

    def _check_setup(self) -> None:
        """Plain Python needs nothing more."""

    def _crew_text(self) -> str:
        size, pace = self.options.crew_size, self.options.pace
        text = f"{size} worker{'s' if size > 1 else ''}{f', {pace:,} rows a second each' if pace else ''}"
        return f"{text}; one will be killed, one added"

    def _settings(self, scene: Scene, common: dict[str, Any]) -> ProcessSettings:
        return WorkerSettings(**common, pace=self.options.pace)

    def _begin_audit(self, scene: Scene) -> AbstractContextManager[None]:
        """It needs Spark."""
        return nullcontext()
