"""Whether all members of a group fell silent together, as they do if Kafka hangs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kafka_marshal.observe.standstill import AllSilent, Standstills
from kafka_marshal.observe.text import span, time_text
from rationalizer.limits import STALE_AFTER_INTERVALS

#: What is judged is said to be of a moment before if that is longer ago (ms).
_LATE_MS = 2_000

if TYPE_CHECKING:
    from kafka_marshal.observe.fold import Worker
    from kafka_marshal.observe.meter import BrokerClock
    from kafka_marshal.observe.rows import LeaseRow
    from rationalizer import Group, World


@dataclass(frozen=True, slots=True)
class Heard:
    """The members of a group: instance → last record (log time, ms) and interval; and the CPs where holders write."""

    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    cps: set[int] = field(default_factory=set)

    @staticmethod
    def of(rows: Iterable[LeaseRow], coordinated: Iterable[Group], workers: Iterable[Worker]) -> dict[str, Heard]:
        """Of each group with a holder: holders, members without a partition, and workers that wait for one."""
        found: dict[str, Heard] = {}
        for row in rows:
            if row.cp is not None and row.client is not None:
                of_group = found.setdefault(row.group, Heard())
                of_group.cps.add(row.cp)
                of_group.note(row.instance, row.last_beat, row.heartbeat_interval_ms)
                for each in row.sharers:
                    of_group.note(each.instance_id, each.last_beat, each.heartbeat_interval_ms)
        for group in coordinated:
            for member in group.members.values() if group.group_id in found else ():
                half = (member.session_timeout_ms + 1) // 2
                found[group.group_id].note(member.instance_id, member.last_beat, half)
        for run in workers:
            if run.group in found and (run.waits or run.instance in found[run.group].members):
                found[run.group].note(run.instance, run.last_at, run.interval_ms)
        return found

    def note(self, instance: str | None, last: int | None, interval_ms: int | None) -> None:
        """Take in one of its records."""
        before = self.members.get(instance or "", (0, 0))
        self.members[instance or ""] = max(before[0], last or 0), before[1] or interval_ms or 0


def all_silent(heard: Heard, log_times: Mapping[int, int], now_ms: int, kafka_ms: float | None) -> AllSilent | None:
    """Whether all members of a group fell silent together with their part of the log; None: not so.

    log_times: of all CPs (ms).
    """
    since = max(last for last, _ in heard.members.values())
    together = [interval for last, interval in heard.members.values() if since - last <= interval]
    longest = max(together)
    if now_ms - since <= STALE_AFTER_INTERVALS * longest:
        return None
    others = heard.cps if len(together) > 1 else log_times
    if any(log_times[cp] > since + longest for cp in others):
        return None
    return AllSilent(since, now_ms - since, len(together), now_ms - since + longest, kafka_ms)


@dataclass(slots=True)
class Silence:
    """What is known of a log's silence, and when it is judged."""

    clock: BrokerClock
    standstills: Standstills = field(default_factory=Standstills)
    #: CP → timestamp of its last record.
    stamps: dict[int, int] = field(default_factory=dict)
    #: The broker's time (ms) up to which the log was read: silence is judged then, however long look-ups take.
    judged_at: int | None = None
    #: How long (ms) Kafka took to answer the last look-ups; None: none yet.
    kafka_ms: float | None = None
    #: Those whose members are all silent.
    groups: dict[str, AllSilent] = field(default_factory=dict)

    def now_ms(self) -> int:
        """The broker's time (ms) at which silence is judged."""
        return self.clock.now_ms() if self.judged_at is None else self.judged_at

    def stood_ms(self, world: World, since: int) -> int:
        """How long (ms) a partition of the log has been silent since that log time: it counts for no member."""
        return self.standstills.lasting(world, since, self.now_ms())

    def worked_ms(self, world: World, since: int, as_of_ms: int) -> int:
        """How long (ms) ago that was, less the time in which the log was silent, or is not known."""
        return max(0, self.now_ms() - since - self.stood_ms(world, since) - as_of_ms)

    def judge(
        self,
        rows: list[LeaseRow],
        coordinated: Iterable[Group],
        workers: Iterable[Worker],
        log_times: Mapping[int, int],
    ) -> list[LeaseRow]:
        """Find the groups whose members fell silent together; the rows, with how long that makes no member gone."""
        heard = Heard.of(rows, coordinated, workers).items()
        found = {name: all_silent(each, log_times, self.now_ms(), self.kafka_ms) for name, each in heard}
        self.groups = {name: each for name, each in found.items() if each is not None}
        most = {name: each.most_ms for name, each in self.groups.items() if each.may_live}
        return [replace(row, with_all_ms=most[row.group]) if row.group in most else row for row in rows]

    def notes(self) -> list[str]:
        """At which moment of the log all is judged, if that is a while ago."""
        late_ms = self.clock.now_ms() - self.now_ms()
        note = (
            f"judged as of {time_text(self.now_ms())}, {span(late_ms)} ago: Kafka took that long to be asked the rest"
        )
        return [note] if late_ms > _LATE_MS else []
