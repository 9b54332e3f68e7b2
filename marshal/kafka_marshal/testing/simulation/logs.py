"""What a story's processes log: nobody reads it, but for what should never be there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kafka_marshal import guard
from kafka_marshal.repeats import Repeats
from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.scheduler import Scheduler

__all__ = ["RAISED", "overheard"]

#: The promise that such a line breaks.
RAISED = "raised"


class _Ear(logging.Handler):
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
def overheard(scheduler: Scheduler, checks: Checks) -> Iterator[None]:
    """A policy or a callback that raised, or a thread of the library's own, fails the story; all else is dropped."""
    logger = logging.getLogger("kafka_marshal")
    before = logger.level, logger.propagate, logger.handlers, guard._repeats
    logger.setLevel(logging.ERROR)
    logger.propagate, logger.handlers = False, [_Ear(scheduler, checks)]
    guard._repeats = Repeats(guard.SAID_EVERY_S)  # another story's lines hold back none of this one's
    try:
        yield
    finally:
        level, logger.propagate, logger.handlers, guard._repeats = before
        logger.setLevel(level)
