"""The state as rows: one for each partition, member and group.

One row type serves both kinds of groups: a lease, or a piece of a partition with its owner's generation as epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from kafka_marshal.engine.work.topic_mark import POSITION_LOST
from kafka_marshal.instance import Instance
from kafka_marshal.observe.text import span
from kafka_marshal.topic_names import is_lock
from rationalizer import intervals
from rationalizer.holes import first_open, lag_of
from rationalizer.limits import MAX_KEY_HASH, STALE_AFTER_INTERVALS

if TYPE_CHECKING:
    from kafka_marshal.observe.checkpoints import CheckpointsRow
    from kafka_marshal.types import OpenMessages, Sharer

#: How the reason begins if a holder reports no progress and the cause is not known.
NO_PROGRESS = "no progress"

#: In the reason, if Kafka's offset of a group that processes in transactions is not the group's own (M7).
FOREIGN_COMMIT = "another program has committed"

#: How the reason begins if the partition does not exist.
NO_TOPIC = "there is no such topic"

#: A lease's freshness (C1) in the words of text and JSON.
STATES = {"free": "free", "fresh": "seen", "unknown": "silent", "stale": "gone"}

#: No progress for this long with messages waiting is examined. Long heartbeat intervals: see :func:`patience_ms`.
STILL_MS = 10_000

DAY_MS = 86_400_000


def patience_ms(heartbeat_interval_ms: int | None) -> int:
    """How long (ms) a holder that beats may report no progress before it is a problem."""
    return max(STILL_MS, 3 * (heartbeat_interval_ms or 0))


def state_of(silence_ms: int | None, heartbeat_interval_ms: int | None) -> str:
    """Free, seen, silent (for more than one heartbeat interval) or gone (for more than two: it can be replaced)."""
    if silence_ms is None:
        return "free"
    interval = heartbeat_interval_ms or 0
    if silence_ms > STALE_AFTER_INTERVALS * interval:
        return "gone"
    return "silent" if silence_ms > interval else "seen"


def seen_text(state: str, silence_ms: int | None) -> str:
    """A holder's last heartbeat in words."""
    if silence_ms is None:
        return state
    return f"{span(silence_ms)} ago" if state == "seen" else f"{state} {span(silence_ms)}"


def total(values: Iterable[int | None]) -> int | None:
    """The sum; None if one value is not known, since the rest would be a wrong number."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if known and len(known) == len(found) else None


def span_text(ms: float, at_least: bool) -> str:
    """A span in words; with "over" if it may have begun before the log that was read."""
    return f"over {span(ms)}" if at_least else span(ms)


def key_share(amount: int, lo: int, hi: int) -> int:
    """The share of a range of key hashes in an amount of messages, if keys are spread evenly."""
    return amount * (hi - lo + 1) // (MAX_KEY_HASH + 1)


def place_text(partition: int, lo: int, hi: int) -> str:
    """A partition and its share of the keys, in hundredths: 3, or 3 (0-33%)."""
    if lo == 0 and hi == MAX_KEY_HASH:
        return str(partition)
    first, last = (round(100 * at / (MAX_KEY_HASH + 1)) for at in (lo, hi + 1))
    return f"{partition} ({first}-{last}%)"


#: A lasting silence of all members counts as an outage for this long (ms); then they are gone, whatever the cause.
LONGEST_MS = 600_000


@dataclass(frozen=True, slots=True)
class AllSilent:
    """All members of a group have been silent since the same moment, and so has their log."""

    #: The last record of any of them, log time (ms), and how long ago that is.
    since: int
    ms: int
    members: int
    #: Those with a longer silence (ms) were gone before.
    most_ms: int
    #: How long (ms) Kafka took to answer this command's look-ups; None: it asked nothing.
    kafka_ms: float | None

    @property
    def may_live(self) -> bool:
        """Whether they may all be at work: of one alone, or after long, the log says what it says of a dead one."""
        return self.members > 1 and self.ms < LONGEST_MS


#: The window of verdicts (ms).
WINDOW_MS: Final = 60_000


class PartitionVerdict(StrEnum):
    """The health of a partition over the window."""

    #: There is no lag, or it fell, or it was 0 in between.
    OK = "ok"
    #: The position moves, but the lag did not fall over the window.
    BEHIND = "behind"
    #: The position moved back (an operator moved it), and has not caught up.
    REWOUND = "rewound"
    #: One message blocks it, while later ones or other partitions of its holder are done.
    HELD_BACK = "held_back"
    #: Its holder beats, but makes no progress.
    STALLED = "stalled"
    #: There is lag, and no live holder.
    STOPPED = "stopped"


def verdict(
    lag: int | None,
    *,
    held: bool,
    is_held_back: bool,
    still_ms: int,
    positions: Sequence[int],
    end_before: int | None,
) -> PartitionVerdict | None:
    """The verdict on one partition, in one word and without a threshold to configure; None: its lag is not known.

    The rules follow Burrow. No lag is always ok. Otherwise, the worst first: no live holder; the position does not
    move; it moved back; it moves, but the lag does not fall. The only past figure they need comes from brokers.

    still_ms: how long messages have waited without progress. positions: the next offsets within the window, the first
    one at its beginning. end_before: its log end at that time; None: not known.
    """
    if lag is None:
        return None
    if lag == 0:
        return PartitionVerdict.OK
    if not held:
        return PartitionVerdict.STOPPED
    if is_held_back:
        return PartitionVerdict.HELD_BACK
    if still_ms >= WINDOW_MS:
        return PartitionVerdict.STALLED
    if positions and positions[-1] < max(positions):
        return PartitionVerdict.REWOUND
    if end_before is None or not positions:
        return PartitionVerdict.OK
    return PartitionVerdict.BEHIND if 0 < intervals.lag(positions[0], end_before) <= lag else PartitionVerdict.OK


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease or piece, or one partition of a group's topic that was never claimed (cp None)."""

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
    #: By the broker's clock (ms); None: it is free.
    silence_ms: int | None = None
    #: For how much of that (ms) the log was silent: it counts for no member.
    stood_ms: int = 0
    #: All members of its group are silent, or were just now: the longest silence (ms) that makes none gone; 0: neither.
    with_all_ms: int = 0
    #: The largest offset up to which all is done; None: nothing is done.
    stable: int | None = None
    #: Done beyond a gap: (first, last), ascending.
    ranges: tuple[tuple[int, int], ...] = ()
    granted: int | None = None
    #: Of the data partition; None: it does not exist (any more).
    log_start: int | None = None
    log_end: int | None = None
    #: Messages per second; None: not known.
    speed: float | None = None
    #: Why it makes no progress although there are messages; "": no reason is known.
    stuck: str = ""
    #: How long (ms) its position has not moved, within the log that was read.
    idle_ms: int | None = None
    #: It did not move in all the log that was read, so it may be longer.
    idle_at_least: bool = False
    #: How long (ms) its first undone message has been the same; it may be longer.
    stable_ms: int | None = None
    stable_at_least: bool = False
    #: The message that blocks all progress while later ones or other partitions are done; "": none.
    held_back: str = ""
    #: None: not known.
    verdict: PartitionVerdict | None = None
    #: How long (ms) its holder has had it.
    held_ms: int | None = None
    #: How long (ms, less `as_of_ms`) its next message has been waiting; None: it was not read.
    waiting_ms: int | None = None
    #: Kafka does not answer, so the holder's silence is not known.
    outage: bool = False
    kind: str = "claimed"
    #: The key hashes that it covers: a part only if the partition is shared by keys.
    lo: int = 0
    hi: int = MAX_KEY_HASH
    #: The member that waits for it while its owner finishes its messages in flight.
    goes_to: str | None = None
    #: Of a group that takes checkpoints: the one for which it was cut last (0: none yet); None: the group takes none.
    cut: int | None = None
    #: What was done in this time (ms) is not in the log: progress moves at checkpoints only. Spans above are less it.
    as_of_ms: int = 0
    #: Messages that are open though progress has passed them, of these keys.
    open: tuple[OpenMessages, ...] = ()
    #: Those that share it; then `client` is the one of them that was heard last.
    sharers: tuple[Sharer, ...] = ()

    @property
    def is_lock(self) -> bool:
        """Whether it is a lease on a name, not on a partition."""
        return is_lock(self.topic)

    @property
    def place(self) -> str:
        """Its number and its part of the keys."""
        is_part = self.sharers and self.hi - self.lo < MAX_KEY_HASH  # its keys are an average, to share what waits
        return f"{self.partition} (by batches)" if is_part else place_text(self.partition, self.lo, self.hi)

    @property
    def holder(self) -> str:
        """Its holder, and the next one; or those that share it."""
        if len(self.sharers) > 1:
            return names_of(self.sharers)
        if self.client is None:
            return "-"
        return self.client if self.goes_to is None else f"{self.client} → {self.goes_to}"

    @property
    def position(self) -> int:
        """The first offset that is not done."""
        return 0 if self.stable is None else self.stable + 1

    @property
    def next(self) -> int | None:
        """The offset to read next, maybe of a message that is open; None: it was never claimed."""
        return None if self.cp is None else first_open(self.position, self.open)

    @property
    def beyond(self) -> int:
        """Messages done beyond a gap; for a part of the keys, its average share."""
        return key_share(sum(last - first + 1 for first, last in self.ranges), self.lo, self.hi)

    @property
    def in_flight(self) -> int:
        """Messages not done with later ones done: in flight, or given up."""
        return (
            key_share(intervals.lag(self.position, self.ranges[-1][1] + 1, self.ranges), self.lo, self.hi)
            if self.ranges
            else 0
        )

    @property
    def lost(self) -> bool:
        """Whether the position lies outside the log, or is of a deleted topic."""
        return self.stuck.startswith(POSITION_LOST)

    @property
    def no_topic(self) -> bool:
        """Whether the partition is not on the cluster."""
        return self.stuck.startswith(NO_TOPIC)

    @property
    def deleted(self) -> int:
        """Offsets that retention deleted before they were done."""
        if self.stable is None or self.log_start is None or self.lost:
            return 0
        return max(0, self.log_start - self.position)

    @property
    def lag(self) -> int | None:
        """Offsets in the log that are neither done nor set aside; for a part of the keys, its average share."""
        if self.log_end is None or self.log_start is None or self.lost:
            return None
        share = key_share(
            intervals.lag(max(self.position, self.log_start), self.log_end, self.ranges), self.lo, self.hi
        )
        more = lag_of(self.open, self.log_start, self.log_end, self.position - 1, self.ranges) if self.open else 0
        return max(0, share + more)

    @property
    def open_messages(self) -> int:
        """How many messages are open though progress has passed them, or may, and are not set aside."""
        return sum(each.last - each.first + 1 for each in self.open if not each.is_parked)

    @property
    def parked(self) -> int:
        """How many messages are set aside."""
        return sum(each.is_parked for each in self.open)

    @property
    def awaits_tries(self) -> bool:
        """Whether messages of it were tried, or left by a member that lost them, and wait for their next try."""
        return any(each.holder is None and not each.is_parked for each in self.open)

    @property
    def held(self) -> bool:
        """Whether it has a holder that may be alive."""
        return self.client is not None and self.state != "gone"

    @property
    def state(self) -> str:
        """See :func:`state_of`; "unknown" in an outage, "never claimed"."""
        if self.cp is None:
            return "never claimed" if self.kind == "claimed" else "not assigned"
        if self.client is not None and self.outage:
            return "unknown"
        if self.silence_ms is None:
            return "free"
        found = state_of(self.silence_ms - self.stood_ms, self.heartbeat_interval_ms)
        return "silent" if found == "gone" and self.silence_ms <= self.with_all_ms else found

    @property
    def seen(self) -> str:
        """The state for people."""
        return "not known" if self.state == "unknown" else seen_text(self.state, self.silence_ms)

    @property
    def still_ms(self) -> int:
        """How long (ms) its holder has had it without progress."""
        return min(self.idle_ms or 0, self.held_ms or 0)

    @property
    def is_still_longer(self) -> bool:
        """Whether `still_ms` may be longer: it reaches the first record that was read."""
        return self.idle_at_least and (self.held_ms or 0) >= (self.idle_ms or 0)

    @property
    def behind_ms(self) -> int | None:
        """How long (ms) messages have waited without progress; None: there are none, or it is not known."""
        if not self.lag or self.idle_ms is None:
            return None
        return self.idle_ms if self.waiting_ms is None else min(self.idle_ms, self.waiting_ms)

    @property
    def is_behind_longer(self) -> bool:
        """Whether `behind_ms` may be longer: the position did not move in all the log that was read."""
        return self.idle_at_least and self.behind_ms == self.idle_ms

    @property
    def badness(self) -> tuple[int, int, int]:
        """Sort key: problems first."""
        order = ("seen", "unknown", "free", "never claimed", "not assigned", "silent", "gone").index(self.state)
        return (0 if self.lost else 1 if self.stuck else 2, -order, -(self.lag or 0))


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One instance of one worker that holds partitions in a group."""

    group: str
    client: str
    instance: str | None
    leases: list[LeaseRow]
    #: Since an operator asked it to hand over (ms); None: not in the log that was read.
    asked_ms: int | None = None
    #: The worker in the last minutes of the log; None: it was not heard.
    heard: WorkerRow | None = None
    #: Why it has no progress is another thing: a checkpoint of all members, or its states are not saved.
    is_excused: bool = False

    @property
    def runs_at(self) -> Instance | None:
        """Host, process and release; None if its instance_id does not contain them."""
        return Instance.parse(self.instance)

    @property
    def lag(self) -> int | None:
        """The lag of all its partitions."""
        return total(row.lag for row in self.leases)

    @property
    def silence_ms(self) -> int:
        """Since its last heartbeat, by the broker's clock (ms)."""
        return self.last_heard.silence_ms or 0

    @property
    def last_heard(self) -> LeaseRow:
        """The row of its last heartbeat."""
        return min(self.leases, key=lambda row: row.silence_ms or 0)

    @property
    def heartbeat_interval_ms(self) -> int:
        """The longest of its leases (ms)."""
        return max(row.heartbeat_interval_ms or 0 for row in self.leases)

    @property
    def state(self) -> str:
        """Seen, silent or gone, as a lease; unknown in an outage."""
        if any(row.outage for row in self.leases):
            return "unknown"
        return replace(self.last_heard, heartbeat_interval_ms=self.heartbeat_interval_ms).state

    @property
    def no_progress_ms(self) -> int | None:
        """How long (ms) messages have waited while it reported none of them done; None: not known."""
        waits = [row.waiting_ms for row in self.leases if row.lag and row.waiting_ms is not None]
        if not waits:
            return None
        return min(max(waits), *(row.still_ms for row in self.leases))

    @property
    def is_still_longer(self) -> bool:
        """Whether `no_progress_ms` may be longer, see :attr:`LeaseRow.is_still_longer`."""
        return any(row.is_still_longer and row.still_ms == self.no_progress_ms for row in self.leases)

    @property
    def is_still(self) -> bool:
        """Whether it beats and has messages waiting, but makes no progress."""
        waited = self.no_progress_ms
        return self.state == "seen" and waited is not None and waited >= patience_ms(self.heartbeat_interval_ms)

    @property
    def is_hung(self) -> bool:
        """Whether that may be its own fault; in a hold group it may be any member's."""
        return self.is_still and not self.is_excused

    @property
    def awaits_tries(self) -> bool:
        """Whether messages of its partitions wait for their next try."""
        return any(row.awaits_tries for row in self.leases)

    @property
    def hung_text(self) -> str:
        """What is said of one that gets nothing done; if tries fail, it does not hang."""
        still = span_text(self.no_progress_ms or 0, self.is_still_longer)
        return f"no progress for {still}, {'messages wait for their next try' if self.awaits_tries else 'hung?'}"

    @property
    def badness(self) -> tuple[int, int, int]:
        """Sort key: problems first."""
        order = ("seen", "unknown", "silent", "gone").index(self.state)
        return (-int(self.is_hung), -order, -(self.lag or 0))


def partitions_of(rows: Iterable[LeaseRow]) -> int:
    """The number of partitions; a shared one counts once, a lock does not count."""
    return len({(row.group, row.topic, row.partition) for row in rows if not row.is_lock})


def partitions_held(rows: Iterable[LeaseRow]) -> int:
    """The number of partitions whose owner is not known to be gone."""
    return partitions_of(row for row in rows if row.held or row.state == "unknown")


def members_of(rows: Iterable[LeaseRow]) -> list[MemberRow]:
    """The holders of these leases, by group and client."""
    found: dict[tuple[str, str, str], list[LeaseRow]] = {}
    for row in rows:
        for each in [replace(row, **part) for part in parts_of(row.sharers, row.silence_ms or 0, row.open)] or [row]:
            if each.client is not None:
                found.setdefault((each.group, each.client, each.instance or ""), []).append(each)
    return [MemberRow(group, client, run or None, leases) for (group, client, run), leases in sorted(found.items())]


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The newest instance of a worker that wrote a record in the last minutes, with or without partitions."""

    group: str
    client: str
    instance: str
    #: Since its last record (ms). A worker that holds and claims nothing writes no records.
    silence_ms: int
    #: Its last claim was refused: it repeats it, or is silent.
    waits: bool = False
    waits_for: str = "a partition"
    #: Since it released the last partition it held (ms); None: it did not.
    released_ms: int | None = None
    #: Since an operator asked it to hand over (ms); None: no such request.
    asked_ms: int | None = None
    #: The code with which the log refused its join or claim.
    refused: str = ""
    #: It is a member of a coordinated group that has no partition for it.
    is_member: bool = False
    #: Why such a member gets no share of a partition's keys either; "": none is shared by key.
    no_share: str = ""
    #: The client that evicted it, and how long ago (ms); "": it was not evicted, or has claimed since.
    evictor: str = ""
    evicted_ms: int | None = None
    #: It was alive when it was evicted, or is alive.
    was_alive: bool = False
    #: The interval of its records while it waits (ms).
    interval_ms: int = 0
    #: Its group is a coordinated one.
    is_coordinated: bool = False

    @property
    def runs_at(self) -> Instance | None:
        """Host, process and release; None if its instance_id does not contain them."""
        return Instance.parse(self.instance)

    @property
    def is_waiting(self) -> bool:
        """Whether it still repeats its claim."""
        return self.waits and self.silence_ms < patience_ms(self.interval_ms)

    @property
    def is_silent(self) -> bool:
        """Whether it is silent for no known reason: others took over its partitions."""
        is_explained = self.asked_ms is not None or self.is_member or self.refused or self.evictor
        return not (is_explained or self.is_waiting or self.released_ms is not None)

    @property
    def doing(self) -> str:
        """What it does without a partition, according to its last records."""
        if self.evictor:
            return evicted_text(self)
        if self.asked_ms is not None:
            return f"asked to hand over {span(self.asked_ms)} ago: claims nothing until it is restarted"
        if self.is_member:
            more = f", and no share of keys: {self.no_share}" if self.no_share else ""
            return f"a member; there is no partition for it{more}"
        if self.refused == "WRONG_MODE":
            return f"waits: another mode has left messages open, or scattered keys ({span(self.silence_ms)} ago)"
        if self.refused:
            return f"the log rejected it: {self.refused}"
        if self.is_waiting:
            return f"waits for {self.waits_for}"
        if self.waits:
            return f"silent for {span(self.silence_ms)}; it waited for {self.waits_for}"
        if self.released_ms is not None:
            return f"released all it held {span(self.released_ms)} ago"
        return f"silent for {span(self.silence_ms)}; others took over what it held"


def evicted_text(run: WorkerRow) -> str:
    """The eviction in words, and what the worker has done since."""
    text = f"evicted by {run.evictor} {span(run.evicted_ms or 0)} ago"
    if run.was_alive and run.is_coordinated:
        return f"{text}; joins again after three sessions, once its handler returns"
    if run.was_alive:
        return f"{text}; claims nothing until its handler returns"
    return f"{text}; silent for {span(run.silence_ms)}"


@dataclass(frozen=True, slots=True)
class PauseRow:
    """A pause of a group, in all coordination partitions in which it is in force at log time."""

    group: str
    client: str
    #: When the last of them ends, by the broker's time (ms).
    expires: int
    left_ms: int
    #: Coordination partition → when it ends there.
    where: dict[int, int]
    #: How long (ms) it has lasted, as far back as the log was read.
    lasts_ms: int = 0

    @property
    def is_over(self) -> bool:
        """Whether its time has passed; it is still in force only because no records move log time."""
        return self.left_ms <= 0


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group: its partitions, including those never claimed, its members and pauses."""

    group: str
    leases: list[LeaseRow]
    pauses: list[PauseRow] = field(default_factory=list)
    silent_ms: int = 0
    #: Workers that wrote a record in the last minutes, and members of a coordinated group.
    heard: list[WorkerRow] = field(default_factory=list)
    #: "claimed", "coordinated", or "" if only a pause is known (G1).
    kind: str = "claimed"
    #: Of a coordinated group, by the broker's clock (G7): "READY", "PREPARE_FOR_REBALANCE", "STEADY".
    state: str | None = None
    generation: int | None = None
    strategy: str | None = None
    #: The strategy that is set for it, whatever its members name (R6); None: none is.
    strategy_set: str | None = None
    #: `silent_ms` may be longer: the log that was read does not reach back to it.
    silent_at_least: bool = False
    #: None: it takes none.
    checkpoints: CheckpointsRow | None = None
    #: All of its members have been silent since the same moment; None: they have not.
    all_silent: AllSilent | None = None

    @property
    def strategy_text(self) -> str:
        """Its strategy, and whether it is set; "": it has none."""
        return f"{self.strategy_set}, set" if self.strategy_set else self.strategy or ""

    @property
    def worker_count(self) -> int:
        """The number of workers that hold partitions or are members, and are not gone."""
        return sum(member.state != "gone" for member in self.members) + sum(run.is_member for run in self.idle)

    @property
    def living(self) -> int:
        """The number of those, and of workers that wait for a partition."""
        return self.worker_count + sum(run.is_waiting and not run.is_member for run in self.idle)

    @property
    def is_over(self) -> bool:
        """Whether no worker is left, and everything is done."""
        return not self.members and not self.living and self.lag == 0

    @property
    def moving(self) -> list[LeaseRow]:
        """Pieces that their owners are to release."""
        return [row for row in self.leases if row.goes_to is not None]

    @property
    def members(self) -> list[MemberRow]:
        """The workers that hold partitions."""
        heard = {(run.client, run.instance): run for run in self.heard}
        found = []
        for member in members_of(self.leases):
            run = heard.get((member.client, member.instance or ""))
            asked_ms = None if run is None else run.asked_ms
            is_excused = self.is_hold or self.is_unsaved(member.client, member.instance)
            found.append(replace(member, asked_ms=asked_ms, heard=run, is_excused=is_excused))
        return found

    @property
    def is_hold(self) -> bool:
        """Whether it moves as a whole, at checkpoints of all members."""
        return self.checkpoints is not None and self.checkpoints.hold

    def is_unsaved(self, client: str | None, instance: str | None) -> bool:
        """Whether the log says that this member's states are not saved."""
        return self.checkpoints is not None and self.checkpoints.is_unsaved(client, instance)

    @property
    def idle(self) -> list[WorkerRow]:
        """Workers that were heard in the last minutes and hold nothing."""
        holders = {row.client for row in self.leases} | {x.client_id for row in self.leases for x in row.sharers}
        return [run for run in self.heard if run.client not in holders]

    @property
    def lag(self) -> int | None:
        """The lag of all its partitions; None if that of one is not known."""
        return total(row.lag for row in self.leases)

    @property
    def parked(self) -> int:
        """Messages that are set aside."""
        return sum(row.parked for row in self.leases)

    @property
    def open_messages(self) -> int:
        """Messages that wait for their next try, or are in a worker's batch."""
        return sum(row.open_messages for row in self.leases)

    @property
    def known_lag(self) -> int:
        """The lag of those partitions whose lag is known."""
        return sum(row.lag or 0 for row in self.leases)

    @property
    def lost(self) -> list[LeaseRow]:
        """Partitions whose position is lost."""
        return [row for row in self.leases if row.lost]

    @property
    def stuck(self) -> list[LeaseRow]:
        """Partitions that make no progress for another reason."""
        return [row for row in self.leases if row.stuck and not row.lost]

    @property
    def unheld(self) -> list[LeaseRow]:
        """Partitions without a live holder, unless the group is paused."""
        return [] if self.is_paused else [x for x in self.leases if not (x.held or x.outage or x.is_lock)]

    @property
    def is_paused(self) -> bool:
        """Whether a pause is in force by the broker's clock, too."""
        return any(not pause.is_over for pause in self.pauses)

    @property
    def behind_ms(self) -> int | None:
        """The longest time (ms) that messages of one partition have waited without progress."""
        return max((row.behind_ms for row in self.leases if row.behind_ms is not None), default=None)

    @property
    def is_behind_longer(self) -> bool:
        """Whether that may be longer, see :attr:`LeaseRow.is_behind_longer`."""
        return any(row.is_behind_longer and row.behind_ms == self.behind_ms for row in self.leases)

    @property
    def is_dead(self) -> bool:
        """Whether no worker of it was heard for a day."""
        is_silent = self.silent_ms > DAY_MS and not any(row.held for row in self.leases)
        return is_silent and not self.worker_count and not self.pauses


#: The most names in a cell of a table.
_LISTED = 3


def names_of(sharers: Sequence[Sharer]) -> str:
    """Their names, for a cell of a table."""
    names = list(dict.fromkeys(each.client_id for each in sharers))
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def parts_of(sharers: Sequence[Sharer], silence_ms: int, held: Sequence[OpenMessages]) -> list[dict[str, Any]]:
    """The fields that differ in the row of each, if there are several.

    Each has its batches, and its average part of the messages that none has.
    silence_ms: of the one that was heard last. held: what is open.
    """
    if len(sharers) < 2:
        return []
    last = max(each.last_beat for each in sharers)
    ends = [number * (MAX_KEY_HASH + 1) // len(sharers) for number in range(len(sharers) + 1)]
    return [
        {
            "client": each.client_id,
            "instance": each.instance_id,
            "epoch": each.epoch,
            "heartbeat_interval_ms": each.heartbeat_interval_ms,
            "last_beat": each.last_beat,
            "silence_ms": silence_ms + last - each.last_beat,
            "lo": lo,
            "hi": hi - 1,
            "open": tuple(one for one in held if one.holder == each.client_id),
            "sharers": (each,),
        }
        for each, lo, hi in zip(sharers, ends, ends[1:], strict=False)
    ]
