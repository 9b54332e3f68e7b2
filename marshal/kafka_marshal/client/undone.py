"""Notices a program that gets messages and never says of any that it is done: nothing it holds is ever handed over."""

from __future__ import annotations

from collections.abc import Iterable

from kafka_marshal.engine.work.assignment import Run

__all__ = ["Undone"]

#: So many messages handed out, and none of them done: that is meant for once, or forgotten.
MANY = 1_000

#: Fewer are no news before another call for messages is this long ago (ms): a handler may take its time.
LONG_MS = 60_000.0


class Undone:
    """The messages of one consumer, until the first is done."""

    def __init__(self) -> None:
        self._is_told = False
        #: When a second call for messages was seen, with nothing done (own clock, ms).
        self._since: float | None = None

    def look(self, runs: Iterable[Run], dropped: int, now: float) -> str:
        """What to say of it, once; "": nothing. dropped: messages that the program had, and has dropped."""
        if self._is_told:
            return ""
        handed_out = dropped
        calls: set[int] = set()
        for run in runs:
            handed_out += run.left
            calls.update(id(taken.out) for taken in run.taken if taken.out[0])
        if self._since is None and (dropped or len(calls) > 1):
            self._since = now
        if handed_out < MANY and (self._since is None or now < self._since + LONG_MS):
            return ""
        self._is_told = True
        return (
            f"poll(), consume() or batches() have handed out {handed_out:,} message(s), and none was ever reported as "
            "done: their partitions are never handed over to another member, and all of it is repeated after a "
            "restart. Call consumer.done(message), or batch.done(), once it is handled; or iterate over the consumer, "
            'or use delivery="at-most-once"'
        )
