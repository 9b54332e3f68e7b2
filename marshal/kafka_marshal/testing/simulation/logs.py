"""Fails a story whose processes log an exception; drops everything else they log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kafka_marshal import guard
from kafka_marshal.rate_limit import RateLimit
from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.scheduler import Scheduler

__all__ = ["RAISED", "failing_on_errors"]

#: The promise that such a line breaks.
RAISED = "raised"


class _ErrorHandler(logging.Handler):
    def __init__(self, scheduler: Scheduler, checks: Checks) -> None:
        super().__init__(logging.ERROR)
        self._scheduler = scheduler
        self._checks = checks

    def emit(self, record: logging.LogRecord) -> None:
        if not self._scheduler.over and (record.exc_info or " raised " in record.getMessage()):
            what = f" ({record.exc_info[1]!r})" if record.exc_info else ""
            task = self._scheduler.current
            process = getattr(task and task.process, "name", "")
            self._checks.fail(RAISED, f"{process} logged: {record.getMessage()}{what}")


@contextmanager
def failing_on_errors(scheduler: Scheduler, checks: Checks) -> Iterator[None]:
    """Fail the story if a policy, a callback or a thread of the library logs an exception; drop all else."""
    logger = logging.getLogger("kafka_marshal")
    before = logger.level, logger.propagate, logger.handlers, guard._repeats
    logger.setLevel(logging.ERROR)
    logger.propagate, logger.handlers = False, [_ErrorHandler(scheduler, checks)]
    guard._repeats = RateLimit(guard.SAID_EVERY_S)  # lines of another story suppress none of this one
    try:
        yield
    finally:
        level, logger.propagate, logger.handlers, guard._repeats = before
        logger.setLevel(level)
