"""What commands show of the state: partitions one by one, and together by member and by group.

One row serves both kinds of groups: a lease, or a piece of a partition with its owner's generation as epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kafka_marshal.engine.work.lost import POSITION_LOST
from kafka_marshal.instance import Instance
from kafka_marshal.observe.text import span
from kafka_marshal.observe.verdict import Verdict
from rationalizer.limits import MAX_KEY_HASH, STALE_AFTER_INTERVALS
from rationalizer.progress import lag

__all__ = [
    "DAY_MS",
    "NO_PROGRESS",
    "STATES",
    "GroupRow",
    "WorkerRow",
    "LeaseRow",
    "MemberRow",
    "PauseRow",
    "evicted_text",
    "key_share",
    "members_of",
    "partitions_held",
    "partitions_of",
    "place_text",
    "seen_text",
    "span_text",
    "state_of",
    "total",
]

#: What the reason begins with where a holder reports nothing done, and it is not known why.
NO_PROGRESS = "no progress"

#: What the reason begins with where there is nothing to be read from.
NO_TOPIC = "there is no such topic"

#: What a lease's freshness (C1) is called for people and programs.
STATES = {"free": "free", "fresh": "seen", "unknown": "silent", "stale": "gone"}

#: Nothing done for so long with messages waiting: looked into. Slow beats need longer: see :func:`patience_ms`.
STILL_MS = 10_000

DAY_MS = 86_400_000


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
    """The sum; None where one of them is not known: what is left would be a false number."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if known and len(known) == len(found) else None


def span_text(ms: float, at_least: bool) -> str:
    """A span in words; "over" where the log that was read does not reach back to its beginning."""
    return f"over {span(ms)}" if at_least else span(ms)


def key_share(amount: int, lo: int, hi: int) -> int:
    """What a range of key hashes has of an amount of messages, keys being spread evenly."""
    return amount * (hi - lo + 1) // (MAX_KEY_HASH + 1)


def place_text(partition: int, lo: int, hi: int) -> str:
    """A partition, and which share of its keys, in hundredths: 3, or 3 (0-33%)."""
    if lo == 0 and hi == MAX_KEY_HASH:
        return str(partition)
    first, last = (round(100 * at / (MAX_KEY_HASH + 1)) for at in (lo, hi + 1))
    return f"{partition} ({first}-{last}%)"


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease or piece, or one partition of a group's topic that nobody ever had (cp None)."""

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
    #: Done beyond a gap: (first, last), ascending.
    ranges: tuple[tuple[int, int], ...] = ()
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
    #: It did not move in all the log that was read: it may have stood still for longer.
    idle_at_least: bool = False
    #: How long its first message that is not done has been that; it may be longer.
    stable_ms: int | None = None
    stable_at_least: bool = False
    #: Which message all progress waits for, while later ones are done, or other partitions; "": none, or not for long.
    held_back: str = ""
    #: How its position went over the last minute, see :mod:`kafka_marshal.observe.verdict`; None: not known.
    verdict: Verdict | None = None
    #: How long its holder has had it.
    held_ms: int | None = None
    #: How long its next message has been waiting; None: not looked at.
    waiting_ms: int | None = None
    #: Kafka does not answer: how silent the holder is can't be known.
    outage: bool = False
    kind: str = "claimed"
    #: The key hashes that it is about: a part of them only where a coordinated group shares the partition.
    lo: int = 0
    hi: int = MAX_KEY_HASH
    #: The member that waits for it, while its owner finishes what is in hand.
    goes_to: str | None = None

    @property
    def place(self) -> str:
        """Its number, and which part of the keys."""
        return place_text(self.partition, self.lo, self.hi)

    @property
    def holder(self) -> str:
        """Who has it, and who gets it next."""
        if self.client is None:
            return "-"
        return self.client if self.goes_to is None else f"{self.client} → {self.goes_to}"

    @property
    def position(self) -> int:
        """The first offset that is not done."""
        return 0 if self.stable is None else self.stable + 1

    @property
    def next(self) -> int | None:
        """The offset to be read next; None where nobody ever claimed the partition."""
        return None if self.cp is None else self.position

    @property
    def beyond(self) -> int:
        """Messages done beyond a gap; of a part of the keys as many as it has on average."""
        return key_share(sum(last - first + 1 for first, last in self.ranges), self.lo, self.hi)

    @property
    def in_flight(self) -> int:
        """Not done, with something done beyond it: handed out, or given up."""
        return (
            key_share(lag(self.position, self.ranges[-1][1] + 1, self.ranges), self.lo, self.hi) if self.ranges else 0
        )

    @property
    def lost(self) -> bool:
        """The position means nothing in the log that is there."""
        return self.stuck.startswith(POSITION_LOST)

    @property
    def no_topic(self) -> bool:
        """The partition is not on the cluster."""
        return self.stuck.startswith(NO_TOPIC)

    @property
    def deleted(self) -> int:
        """Offsets that were deleted from the partition's log before they were done."""
        if self.stable is None or self.log_start is None or self.lost:
            return 0
        return max(0, self.log_start - self.position)

    @property
    def lag(self) -> int | None:
        """Offsets in the partition's log that are not done; of a part of the keys as many as it has on average."""
        if self.log_end is None or self.log_start is None or self.lost:
            return None
        return key_share(lag(max(self.position, self.log_start), self.log_end, self.ranges), self.lo, self.hi)

    @property
    def held(self) -> bool:
        """Whether the lease has a holder that may be alive."""
        return self.client is not None and self.state != "gone"

    @property
    def state(self) -> str:
        """See :func:`state_of`; "unknown" in an outage, "never claimed"."""
        if self.cp is None:
            return "never claimed" if self.kind == "claimed" else "not assigned"
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
    def is_still_longer(self) -> bool:
        """Whether that may be longer: it goes back to the first record that was read."""
        return self.idle_at_least and (self.held_ms or 0) >= (self.idle_ms or 0)

    @property
    def behind_ms(self) -> int | None:
        """How long there has been something to do without any progress; None: there is nothing to do, or no telling."""
        if not self.lag or self.idle_ms is None:
            return None
        return self.idle_ms if self.waiting_ms is None else min(self.idle_ms, self.waiting_ms)

    @property
    def is_behind_longer(self) -> bool:
        """Whether that may be longer: the position did not move in all the log that was read."""
        return self.idle_at_least and self.behind_ms == self.idle_ms

    @property
    def badness(self) -> tuple[int, int, int]:
        """What is wrong first sorts first."""
        order = ("seen", "unknown", "free", "never claimed", "not assigned", "silent", "gone").index(self.state)
        return (0 if self.lost else 1 if self.stuck else 2, -order, -(self.lag or 0))


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One run of one worker, as far as it holds anything in a group."""

    group: str
    client: str
    instance: str | None
    leases: list[LeaseRow]
    #: Since an operator asked it to hand over; None: nobody did in the minutes that were read.
    asked_ms: int | None = None
    #: What the last minutes of the log say of it beside; None: nothing.
    heard: WorkerRow | None = None

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
    def is_still_longer(self) -> bool:
        """Whether `no_progress_ms` may be longer, see :attr:`LeaseRow.is_still_longer`."""
        return any(row.is_still_longer and row.still_ms == self.no_progress_ms for row in self.leases)

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


def partitions_of(rows: Iterable[LeaseRow]) -> int:
    """How many partitions these are, however many owners share one."""
    return len({(row.group, row.topic, row.partition) for row in rows})


def partitions_held(rows: Iterable[LeaseRow]) -> int:
    """How many of them have an owner that is not gone, as far as that is known."""
    return partitions_of(row for row in rows if row.held or row.state == "unknown")


def members_of(rows: Iterable[LeaseRow]) -> list[MemberRow]:
    """The holders among these leases, by group and client."""
    found: dict[tuple[str, str, str], list[LeaseRow]] = {}
    for row in rows:
        if row.client is not None:
            found.setdefault((row.group, row.client, row.instance or ""), []).append(row)
    return [MemberRow(group, client, run or None, leases) for (group, client, run), leases in sorted(found.items())]


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The newest run of a worker that wrote something in the last minutes, whether it holds anything or not."""

    group: str
    client: str
    instance: str
    #: Since its last record. One that holds nothing, and asks for nothing, writes nothing.
    silence_ms: int
    #: Its last claim was refused. It repeats that, or is silent.
    waits: bool = False
    #: It gave up the last that it held so long ago; None: not that.
    released_ms: int | None = None
    #: Since an operator asked it to hand over.
    asked_ms: int | None = None
    #: Why the log refused its join, or its claim: a code.
    refused: str = ""
    #: It is a member of a coordinated group, which has no partition for it.
    is_member: bool = False
    #: Who evicted it, and when; "": nobody, or it has claimed since.
    evictor: str = ""
    evicted_ms: int | None = None
    #: It was alive when it was evicted, or is.
    was_alive: bool = False
    #: How often it makes itself heard while it waits (ms).
    interval_ms: int = 0

    @property
    def runs_at(self) -> Instance | None:
        """Host, process and release; None where its name does not say them."""
        return Instance.parse(self.instance)

    @property
    def is_waiting(self) -> bool:
        """It asks for a partition, and goes on asking."""
        return self.waits and self.silence_ms < patience_ms(self.interval_ms)

    @property
    def is_silent(self) -> bool:
        """It neither waits nor gave back what it held: others took that over."""
        is_told = self.asked_ms is not None or self.is_member or self.refused or self.evictor
        return not (is_told or self.is_waiting or self.released_ms is not None)

    @property
    def doing(self) -> str:
        """What it does without a partition, as far as its last records tell."""
        if self.evictor:
            return evicted_text(self)
        if self.asked_ms is not None:
            return f"asked to hand over {span(self.asked_ms)} ago: claims nothing until it is restarted"
        if self.is_member:
            return "a member; there is no partition for it"
        if self.refused:
            return f"the log rejected it: {self.refused}"
        if self.is_waiting:
            return "waits for a partition"
        if self.waits:
            return f"silent for {span(self.silence_ms)}; it waited for a partition"
        if self.released_ms is not None:
            return f"released all it held {span(self.released_ms)} ago"
        return f"silent for {span(self.silence_ms)}; others took over what it held"


def evicted_text(run: WorkerRow) -> str:
    """That an operator evicted it, and what it does now as far as that is known (C18, G20)."""
    text = f"evicted by {run.evictor} {span(run.evicted_ms or 0)} ago"
    if run.was_alive:
        return f"{text}; claims nothing until its handler returns"
    return f"{text}; silent for {span(run.silence_ms)}"


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
    #: Workers that wrote something in the last minutes, and members of a coordinated group.
    heard: list[WorkerRow] = field(default_factory=list)
    #: "claimed", "coordinated", or "" where nothing is known but a pause (G1).
    kind: str = "claimed"
    #: Of a coordinated group, by the broker's clock (G7): "READY", "PREPARE_FOR_REBALANCE", "STEADY".
    state: str | None = None
    generation: int | None = None
    strategy: str | None = None
    #: `silent_ms` may be longer: the log that was read does not reach back to it.
    silent_at_least: bool = False

    @property
    def worker_count(self) -> int:
        """Who holds something, or is a member, and is not gone."""
        return sum(member.state != "gone" for member in self.members) + sum(run.is_member for run in self.idle)

    @property
    def living(self) -> int:
        """Those, and who waits for a partition; one that holds nothing and asks for nothing does not show."""
        return self.worker_count + sum(run.is_waiting and not run.is_member for run in self.idle)

    @property
    def is_over(self) -> bool:
        """Nobody of it is left, and everything is done."""
        return not self.members and not self.living and self.lag == 0

    @property
    def moving(self) -> list[LeaseRow]:
        """Pieces that their owners are to let go of."""
        return [row for row in self.leases if row.goes_to is not None]

    @property
    def members(self) -> list[MemberRow]:
        """Who holds something."""
        heard = {(run.client, run.instance): run for run in self.heard}
        found = []
        for member in members_of(self.leases):
            run = heard.get((member.client, member.instance or ""))
            found.append(member if run is None else replace(member, asked_ms=run.asked_ms, heard=run))
        return found

    @property
    def idle(self) -> list[WorkerRow]:
        """Who was heard in the last minutes and holds nothing."""
        holders = {row.client for row in self.leases}
        return [run for run in self.heard if run.client not in holders]

    @property
    def lag(self) -> int | None:
        """Of all its partitions; None where that of one is not known."""
        return total(row.lag for row in self.leases)

    @property
    def known_lag(self) -> int:
        """Of its partitions whose lag is known."""
        return sum(row.lag or 0 for row in self.leases)

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
    def is_behind_longer(self) -> bool:
        """Whether that may be longer, see :attr:`LeaseRow.is_behind_longer`."""
        return any(row.is_behind_longer and row.behind_ms == self.behind_ms for row in self.leases)

    @property
    def is_dead(self) -> bool:
        """Nobody of it has given a sign of life for a day."""
        is_silent = self.silent_ms > DAY_MS and not any(row.held for row in self.leases)
        return is_silent and not self.worker_count and not self.pauses
