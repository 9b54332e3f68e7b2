"""The seam between the log and the state machines that live in it.

A *plane* is one state machine: it owns some record types and the state that they change. What holds for all
records (log time, routing, pauses, levels, kinds, forgetting a group) is the World's. `world.py` lists the planes of
this release: the partition plane (`leases/`, section 3), and from level 2 on the group plane (`groups/`, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rationalizer.levels import FIRST_LEVEL, REDO_LEVEL
from rationalizer.limits import NO_RECORD
from rationalizer.wire.records import KINDS, Kind
from rationalizer.wire.unpacking import Message

if TYPE_CHECKING:
    from rationalizer.leases.lease import Lease


@dataclass(frozen=True, slots=True)
class PausedGroup:
    """A group that one client has paused (C10): in force while log time < expires (ms of log time)."""

    group_id: str
    client_id: str
    expires: int


#: A record as a log has it: (offset, timestamp in ms, value).
Entry = tuple[int, int, "bytes | None"]
Entries = Iterator[Entry]


class ApplyContext:
    """Where a record stands in the log, and what holds there besides the plane's own state.

    `offset` and `log_time` are the record's. `pausing`: its client has its group paused at this log time (C11);
    `paused`: another client has.
    `level`: the CP's. `silent`: what the record's plane says of members that it found overdue (D2).
    One context serves a World's whole life: read it while the record is judged, don't keep it.
    """

    __slots__ = ("level", "log_time", "offset", "paused", "pausing", "silent")

    def __init__(self) -> None:
        self.offset = 0
        self.log_time = 0
        self.pausing = False
        self.paused = False
        self.silent: tuple[tuple[str, int], ...] = ()
        self.level = FIRST_LEVEL

    @property
    def again(self) -> int:
        """What a position that replaces progress is noted as (R1)."""
        return self.offset if self.level >= REDO_LEVEL else NO_RECORD


class Verdict(NamedTuple):
    """What a handler answers where the code alone does not say all of it (G9)."""

    code: str
    accepted: bool
    #: Codes of a record's entries.
    entries: tuple[str, ...] | None = None
    #: The member that an accepted JoinGroup is about (D2).
    member: str | None = None
    #: The epoch of the share that a ClaimingShare is about (D2).
    share: int | None = None
    #: What a SettlingMessages took (D2).
    taken: tuple[int, int] | None = None


class Bounds(NamedTuple):
    """What a snapshot says besides the planes' rows, which they must agree with."""

    partition: int
    partitions: int
    next_offset: int
    log_time: int
    level: int


#: A handler judges one well-formed record that belongs here and that no pause rejects. It changes the plane's
#: state or not at all, and answers with the code; with a tuple of codes for a record of several entries; or with all.
Handler = Callable[[Message, ApplyContext], "str | tuple[str, ...] | Verdict"]


class Plane(Protocol):
    """One state machine in the log of one CP."""

    #: Which part of the canonical state its rows are (S1).
    part: int

    def belongs(self, kind: Kind, message: Message) -> bool:
        """Whether a record of one of its types belongs to this CP (L3)."""

    def knows(self, group_id: str) -> bool:
        """Whether the group is of this plane's kind: there is something of it here (G1)."""

    def is_active(self, group_id: str, context: ApplyContext) -> bool:
        """Whether the group is at work here, so that it must not be forgotten (C16)."""

    def size(self) -> int:
        """How many things a snapshot lists, which its place is chosen by (S2)."""

    def hole_count(self) -> int:
        """How many holes there are (H1). Any thread."""

    def forget(self, group_id: str) -> None:
        """Drop everything about the group (C16)."""

    def rows(self, level: int) -> Sequence[Any]:
        """Its part of the canonical state (S1) of a CP at this level: what a later level added is left out."""

    def load(self, rows: Sequence[Any], bounds: Bounds) -> None:
        """Take over these rows of a snapshot. Raises SnapshotError if no replay leads there."""


def handlers_of(owner: object) -> dict[int, Handler]:
    """The handler of each record type that this plane, or the World, owns: the method that `Kind.handler` names."""
    found = {kind.type: getattr(owner, kind.handler, None) for kind in KINDS.values()}
    return {number: handler for number, handler in found.items() if handler is not None}


class LogHead(Protocol):
    """What a fast path moves besides its plane's state."""

    next_offset: int
    log_time: int

    def count(self, code: str, accepted: bool, records: int = 1) -> None:
        """Count outcomes."""


#: (group_id, client_id, instance_id) of a sender → (log time, offset) of its last record.
Heard = dict[tuple[str, str, str], tuple[int, int]]


#: All pauses by group, also those that are over.
Pauses = Mapping[str, PausedGroup]

#: Each lease that a record beat, with its last_offset.
Beaten = list["tuple[Lease, int | None]"]

#: Is given each heartbeat record: its offset, the log time, and the leases.
SeeBeats = Callable[[int, int, Beaten], object]
