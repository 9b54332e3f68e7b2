"""The seam between the log and the state machines that live in it.

A *plane* is one state machine: it owns some record types and the state that they change. What holds for all
records (log time, routing, pauses, levels, forgetting a group) is the World's. The partition plane
(`claims.py`, section 3) is the only plane of level 1. The group plane (types 16-27, sections 5-7) will be a
second one beside it, at level 2: its rows in `records.KINDS`, its handlers here, its part of the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from rationalizer.unpacking import Message


class Moment:
    """Where a record stands in the log, and what holds there besides the plane's own state.

    `offset` and `log_time` are the record's. `pausing`: its client has its group paused at this log time (C11).
    One Moment serves a World's whole life: read it while the record is judged, don't keep it.
    """

    __slots__ = ("log_time", "offset", "pausing")

    def __init__(self) -> None:
        self.offset = 0
        self.log_time = 0
        self.pausing = False


#: A handler judges one well-formed record that belongs here and that no pause rejects. It changes the plane's
#: state or not at all, and answers with the code; with a tuple of codes for a record of several entries.
Handler = Callable[[Message, Moment], "str | tuple[str, ...]"]


class Plane(Protocol):
    """One state machine in the log."""

    def handlers(self) -> Mapping[int, Handler]:
        """The handler of each record type that the plane owns."""

    def is_active(self, group_id: str, log_time: int) -> bool:
        """Whether the group is at work here, so that it must not be forgotten (C16)."""

    def forget(self, group_id: str) -> None:
        """Drop everything about the group (C16)."""
