"""How large the coordination log is, how old, how long it is kept, and why it is not as short as it should be."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from shlex import quote
from typing import Final

from kafka_marshal.errors import AuthorizationError, grant
from kafka_marshal.node.coordination_topic import check_topic, topic_option
from kafka_marshal.node.kept import keep_of, removable, turn_ms
from kafka_marshal.node.log_reader import read_range
from kafka_marshal.observe.text import count, span
from kafka_marshal.observe.view import LiveView
from kafka_marshal.ports import Cluster
from kafka_marshal.snapshots.prune import DEFAULT_KEEP
from kafka_marshal.topic_names import snapshots_topic
from rationalizer.limits import SNAPSHOT_INTERVAL

#: More records than this are worth a warning: `who`, `log`, `dump`, an audit and `prune` go through all of them, at
#: some 60,000 a second and processor; that takes a quarter of an hour from here on.
LARGE: Final = 50_000_000

#: What a broker stores for a batch of one record beside its value. (A member's records mostly come one at a time.)
BATCH_BYTES: Final = 70

#: The number of records of each partition that are read, the oldest: for their time, and the size of one.
SAMPLE: Final = 50

#: The size is measured again after this time (ms).
_AGAIN_MS: Final = 60_000

#: Log that is older than it is kept by this many turns, and a quarter of an hour, should have gone (ms).
LATE_TURNS: Final = 2
LATE_MS: Final = 900_000


@dataclass(frozen=True, slots=True)
class LogSize:
    """The log at one moment."""

    topic: str
    records: int
    #: Without replicas, by the size of its oldest records; 0: it is empty.
    bytes: int
    #: The stamp of its oldest record, and its age (ms); None: it is empty.
    oldest: int | None
    age_ms: int | None
    #: How long it is to be kept (ms); None: for ever.
    keep_ms: int | None
    #: When a member is expected to remove something (ms from now; 0: it is due); None: not as long as it does not grow.
    next_prune_ms: int | None
    #: Why it is not as short as it should be, for people; "": it is.
    overdue: str

    @property
    def text(self) -> str:
        """One line for people."""
        age = "" if self.age_ms is None else f", the oldest {span(self.age_ms)} old"
        kept = "kept for ever" if self.keep_ms is None else f"kept for {span(self.keep_ms)}"
        if self.next_prune_ms is not None:
            kept += ", next prune " + (f"in about {span(self.next_prune_ms)}" if self.next_prune_ms else "due")
        return f"{count(self.records, 'record')} (about {bytes_text(self.bytes)}){age}; {kept}"

    @property
    def json(self) -> dict[str, object]:
        """For programs."""
        names = ("records", "bytes", "oldest", "age_ms", "keep_ms", "next_prune_ms")
        return {name: getattr(self, name) for name in names}

    def warnings(self) -> list[str]:
        """What an operator should know."""
        found = [self.overdue] if self.overdue else []
        if self.records > LARGE:
            limit = (
                f"{self.topic} has {count(self.records, 'record')}, more than {LARGE:,}: who, log, dump and an audit"
            )
            advice = f"kafka-marshal topic{topic_option(self.topic)} --keep 30d has members remove what is older"
            found.append(f"{limit} take minutes to go through them. {advice if self.keep_ms is None else 'Keep less'}")
        return found


def bytes_text(amount: int) -> str:
    """1.2 GB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount} B"


class Sizes:
    """The size of a log that is shown again and again: measured once a minute."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last: LogSize | None = None
        self._again_at = 0.0

    def read(self, view: LiveView, living: int) -> LogSize:
        """The size now, during an outage the last one (*blocking*). living: members at work."""
        now_ms = view.clock.now_ms()
        if self._last is None or (now_ms >= self._again_at and not view.outage):
            self._again_at = now_ms + _AGAIN_MS
            self._last = measure(self._cluster, view.replica.topic, view.patience_s, now_ms, living=living)
        return self._last


def measure(cluster: Cluster, topic: str, timeout_s: float, now_ms: float, *, living: int | None) -> LogSize:
    """Measure the log (*blocking*). living: members at work; None: not known."""
    config, _ = check_topic(cluster, topic, timeout_s)
    keep = keep_of(config.settings)
    keys = [(topic, cp) for cp in range(config.info.partitions)]
    marks = {cp: mark for (_, cp), mark in cluster.watermarks(keys, timeout_s).items()}
    stamps: dict[int, int] = {}
    values = sizes = 0
    ranges = {cp: (low, min(low + SAMPLE, high)) for cp, (low, high) in marks.items() if low < high}
    for cp, entries in read_range(cluster, topic, ranges, timeout_s):
        stamps.setdefault(cp, entries[0][1])
        values += len(entries)
        sizes += sum(len(value or b"") + BATCH_BYTES for _, _, value in entries)
    records = sum(high - low for low, high in marks.values())
    oldest = min(stamps.values(), default=None)
    return LogSize(
        topic,
        records,
        records * sizes // values if values else 0,
        oldest,
        None if oldest is None else max(0, int(now_ms) - oldest),
        keep,
        _next_prune(keep, marks, stamps, now_ms),
        "" if keep is None else _overdue(cluster, topic, keep, marks, now_ms, timeout_s, living),
    )


def _next_prune(
    keep: int | None, marks: Mapping[int, tuple[int, int]], stamps: Mapping[int, int], now_ms: float
) -> int | None:
    """By the oldest record of partitions with enough snapshots behind it: members take up to a turn, on average."""
    if keep is None:
        return None
    at = [
        stamps[cp] for cp, (low, high) in marks.items() if removable(low, high, high, SNAPSHOT_INTERVAL, DEFAULT_KEEP)
    ]
    return max(0, int(min(at) + keep + turn_ms(keep) - now_ms)) if at else None


def _overdue(
    cluster: Cluster,
    topic: str,
    keep: int,
    marks: Mapping[int, tuple[int, int]],
    now_ms: float,
    timeout_s: float,
    living: int | None,
) -> str:
    """Why something is still there that should have gone long ago, as far as it is to be seen from outside."""
    late_ms = keep + LATE_TURNS * turn_ms(keep) + LATE_MS
    olds = cluster.offsets_for_time([(topic, cp) for cp in marks], int(now_ms - late_ms), timeout_s)
    late = [
        cp
        for cp, (low, high) in sorted(marks.items())
        if removable(low, high, olds.get((topic, cp), low), SNAPSHOT_INTERVAL, DEFAULT_KEEP)
    ]
    if not late:
        return ""
    names = [topic, snapshots_topic(topic)]
    empty = []
    with suppress(AuthorizationError):  # without it, all that it can be is named
        places = cluster.watermarks([(names[1], cp) for cp in late], timeout_s)
        empty = [cp for cp in late if (marked := places.get((names[1], cp))) is None or marked[0] == marked[1]]
    if empty:
        why = (
            f"no snapshots are stored for partition(s) {', '.join(map(str, empty))}, and nothing may go without. "
            f"Members write them as the log grows. {grant('WRITE', 'topic', [names[1]])}"
        )
    elif living == 0:
        why = "no member is at work, and only members remove it by themselves"
    else:
        why = (
            "its members may lack the right for it, be of a release that keeps every log for ever, or have found a "
            "snapshot that contradicts the log; their log lines prune_refused, prune_put_off and snapshot_differs say "
            f"which. {grant('DELETE', 'topic', names)}"
        )
    return (
        f"the log is to be kept for {span(keep)}, and partition(s) {', '.join(map(str, late))} of {topic} hold what is "
        f"older than {span(late_ms)}: {why}. Nothing is lost; to remove it now: kafka-marshal prune"
        f"{topic_option(topic)} --older-than {quote(f'{keep // 60_000}m')}"
    )
