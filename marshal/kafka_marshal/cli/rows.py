"""What commands show of the state: leases one by one, and together by member and by group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kafka_marshal.cli.text import span
from kafka_marshal.engine.work.lost import POSITION_LOST
from kafka_marshal.instance import Instance
from rationalizer.limits import STALE_AFTER_INTERVALS

__all__ = ["STATES", "GroupRow", "LeaseRow", "MemberRow", "PauseRow", "members_of", "seen_text", "total"]

#: What the reason begins with where a holder reports nothing done, and it is not known why.
NO_PROGRESS = "no progress"

#: What a lease's freshness (C1) is called for people and programs.
STATES = {"free": "free", "fresh": "seen", "unknown": "silent", "stale": "gone"}

#: Nothing done for so long with messages waiting: looked into. Slow beats need longer: see :func:`patience_ms`.
STILL_MS = 10_000

_DAY_MS = 86_400_000


def patience_ms(heartbeat_interval_ms: int | None) -> int:
    """How long a holder that beats may report no progress before that is worth a word."""
    return max(STILL_MS, 3 * (heartbeat_interval_ms or 0))


def state_of(silence_ms: int | None, heartbeat_interval_ms: int | None) -> str:
    """Free, seen, silent (longer than its heartbeat interval) or gone (than two: it can be replaced)."""
    if silence_ms is None:
        return "free"
    interval = heartbeat_interval_ms or 0
    if silence_ms > STALE_AFTER_INTERVALS * interval:
        return "gone"
    return "silent" if silence_ms > interval else "seen"


def seen_text(state: str, silence_ms: int | None) -> str:
    """A holder's last sign of life in words."""
    if silence_ms is None:
        return state
    return f"{span(silence_ms)} ago" if state == "seen" else f"{state} {span(silence_ms)}"


def total(values: Iterable[int | None]) -> int | None:
    """The sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease, or one partition of a group's topic that nobody ever claimed (cp None)."""

    group: str
    topic: str
    partition: int
    cp: int | None = None
    client: str | None = None
    instance: str | None = None
    epoch: int | None = None
    heartbeat_interval_ms: int | None = None
    #: Log time.
    last_beat: int | None = None
    #: By the broker's clock; None where nobody holds it.
    silence_ms: int | None = None
    #: The largest offset up to which all is done; None: nothing is.
    stable: int | None = None
    #: Done beyond a gap.
    beyond: int = 0
    #: Not done, but something beyond it is: handed out, or given up.
    in_flight: int = 0
    granted: int | None = None
    #: The data partition's; None: there is no such partition (any more).
    log_start: int | None = None
    log_end: int | None = None
    #: Messages a second; None: not known.
    speed: float | None = None
    #: Why nothing of it is handed out though there is something to read; "": nothing is known against it.
    stuck: str = ""
    #: How long its position has not moved, as far back as the log was read.
    idle_ms: int | None = None
    #: How long its holder has had it.
    held_ms: int | None = None
    #: How long its next message has been waiting; None: not looked at.
    waiting_ms: int | None = None
    #: Kafka does not answer: how silent the holder is can't be known.
    outage: bool = False

    @property
    def position(self) -> int:
        """The first offset that is not done."""
        return 0 if self.stable is None else self.stable + 1

    @property
    def next(self) -> int | None:
        """The offset to be read next; None where nobody ever claimed the partition."""
        return None if self.cp is None else self.position

    @property
    def lost(self) -> bool:
        """The position means nothing in the log that is there."""
        return self.stuck.startswith(POSITION_LOST)

    @property
    def lag(self) -> int | None:
        """Offsets in the partition's log that are not done."""
        if self.log_end is None or self.log_start is None or self.lost:
            return None
        return max(0, self.log_end - max(self.position, self.log_start) - self.beyond)

    @property
    def held(self) -> bool:
        """Whether the lease has a holder that may be alive."""
        return self.client is not None and self.state != "gone"

    @property
    def state(self) -> str:
        """See :func:`state_of`; "unknown" in an outage, "never claimed"."""
        if self.cp is None:
            return "never claimed"
        if self.client is not None and self.outage:
            return "unknown"
        return state_of(self.silence_ms, self.heartbeat_interval_ms)

    @property
    def seen(self) -> str:
        """The state for people."""
        return "not known" if self.state == "unknown" else seen_text(self.state, self.silence_ms)

    @property
    def still_ms(self) -> int:
        """How long its holder has had it without getting anything done."""
        return min(self.idle_ms or 0, self.held_ms or 0)

    @property
    def behind_ms(self) -> int | None:
        """How long there has been something to do without any progress; None: there is nothing to do, or no telling."""
        if not self.lag or self.idle_ms is None:
            return None
        return self.idle_ms if self.waiting_ms is None else min(self.idle_ms, self.waiting_ms)

    @property
    def badness(self) -> tuple[int, int, int]:
        """What is wrong first sorts first."""
        order = ("seen", "unknown", "free", "never claimed", "silent", "gone").index(self.state)
        return (0 if self.lost else 1 if self.stuck else 2, -order, -(self.lag or 0))


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One run of one worker, as far as it holds anything in a group."""

    group: str
    client: str
    instance: str | None
    leases: list[LeaseRow]

    @property
    def runs_at(self) -> Instance | None:
        """Host, process and release; None where its name does not say them."""
        return Instance.parse(self.instance)

    @property
    def lag(self) -> int | None:
        """Of all that it holds."""
        return total(row.lag for row in self.leases)

    @property
    def silence_ms(self) -> int:
        """Since its last beat, by the broker's clock."""
        return min(row.silence_ms or 0 for row in self.leases)

    @property
    def heartbeat_interval_ms(self) -> int:
        """The longest it claimed with."""
        return max(row.heartbeat_interval_ms or 0 for row in self.leases)

    @property
    def state(self) -> str:
        """As of a lease: seen, silent, gone, or unknown in an outage."""
        if any(row.outage for row in self.leases):
            return "unknown"
        return state_of(self.silence_ms, self.heartbeat_interval_ms)

    @property
    def no_progress_ms(self) -> int | None:
        """How long it has had messages waiting and reported none of them done; None: no sign of that."""
        waits = [row.waiting_ms for row in self.leases if row.lag and row.waiting_ms is not None]
        if not waits:
            return None
        return min(max(waits), *(row.still_ms for row in self.leases))

    @property
    def is_hung(self) -> bool:
        """It beats, has something to do, and gets nothing done."""
        waited = self.no_progress_ms
        return self.state == "seen" and waited is not None and waited >= patience_ms(self.heartbeat_interval_ms)

    @property
    def badness(self) -> tuple[int, int, int]:
        """What is wrong first sorts first."""
        order = ("seen", "unknown", "silent", "gone").index(self.state)
        return (-int(self.is_hung), -order, -(self.lag or 0))


def members_of(rows: Iterable[LeaseRow]) -> list[MemberRow]:
    """The holders among these leases, by group and client."""
    found: dict[tuple[str, str, str], list[LeaseRow]] = {}
    for row in rows:
        if row.client is not None:
            found.setdefault((row.group, row.client, row.instance or ""), []).append(row)
    return [MemberRow(group, client, run or None, leases) for (group, client, run), leases in sorted(found.items())]


@dataclass(frozen=True, slots=True)
class PauseRow:
    """A pause of a group, in all the parts of the log in which it is in force at log time."""

    group: str
    client: str
    #: Broker's time, ms: when the last of them ends.
    expires: int
    left_ms: int
    #: Parts of the log → when it ends there.
    where: dict[int, int]

    @property
    def is_over(self) -> bool:
        """Its time has passed, and only because nobody writes to the log it is still in force there."""
        return self.left_ms <= 0


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group: all its leases, those never claimed among them, its members and pauses."""

    group: str
    leases: list[LeaseRow]
    pauses: list[PauseRow] = field(default_factory=list)
    silent_ms: int = 0

    @property
    def members(self) -> list[MemberRow]:
        """Who holds something."""
        return members_of(self.leases)

    @property
    def lag(self) -> int | None:
        """Of all its partitions whose lag is known."""
        return total(row.lag for row in self.leases)

    @property
    def lost(self) -> list[LeaseRow]:
        """Partitions whose position is lost."""
        return [row for row in self.leases if row.lost]

    @property
    def stuck(self) -> list[LeaseRow]:
        """Partitions of which nothing is handed out for another reason."""
        return [row for row in self.leases if row.stuck and not row.lost]

    @property
    def unheld(self) -> list[LeaseRow]:
        """Partitions that nobody works on, while no pause says that it shall be so."""
        return [] if self.is_paused else [row for row in self.leases if not row.held and not row.outage]

    @property
    def is_paused(self) -> bool:
        """Whether a pause is in force, also by the broker's clock."""
        return any(not pause.is_over for pause in self.pauses)

    @property
    def behind_ms(self) -> int | None:
        """The longest that one of its partitions has had messages waiting without progress."""
        return max((row.behind_ms for row in self.leases if row.behind_ms is not None), default=None)

    @property
    def is_dead(self) -> bool:
        """Nobody of it has given a sign of life for a day."""
        return self.silent_ms > _DAY_MS and not any(row.held for row in self.leases) and not self.pauses
