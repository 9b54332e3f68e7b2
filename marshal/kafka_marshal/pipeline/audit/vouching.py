"""Hashes that confirm the records of a log: stored by members (S4) and in a dump (D5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kafka_marshal.pipeline.audit.findings import Violation
from kafka_marshal.pipeline.audit.invariants import Kind
from kafka_marshal.pipeline.audit.plan import SourceLog
from kafka_marshal.pipeline.audit.snapshots import Claims
from kafka_marshal.pipeline.audit.task import TaskResult
from rationalizer.intervals import union
from rationalizer.limits import SNAPSHOT_INTERVAL
from rationalizer.log_hash import LogHash

#: Ranges that are listed one by one.
_NAMED = 5


def changes(claims: Mapping[int, Claims], results: Sequence[TaskResult]) -> list[Violation]:
    """Ranges of the log that differ from what a member read or a dump contained."""
    found = []
    for result in results:
        for stored, ours in result.hashes_wrong:
            of_member = result.partition in claims and stored in claims[result.partition].hashes
            whose = "that a member stored" if of_member else "that the dump carries"
            what = "a member had read them (or the hash is forged)" if of_member else "the dump was written"
            detail = (
                f"offsets {stored.since} to {stored.next_offset - 1} of partition {stored.partition}: the hash {whose} "
                f"is {stored.digest}, that of the records is {ours}: records were removed, added, altered or moved in "
                f"time after {what}"
            )
            found.append(Violation(str(Kind.LOG_CHANGED), stored.partition, stored.since, None, detail))
    return sorted(found, key=lambda each: (each.partition, each.offset, each.detail))


def vouched(claims: Claims | None, results: Sequence[TaskResult]) -> int:
    """Number of offsets covered by members' hashes that match the log."""
    stored = () if claims is None else claims.hashes
    held = [each for result in results for each in result.hashes_held if each in stored]
    return sum(last - first + 1 for first, last in _ranges(held))


@dataclass(slots=True)
class Vouching:
    """What no hash vouches for: `unvouched` although one should, and `notices` of what none could cover yet."""

    unvouched: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def vouching(log: SourceLog, claims: Mapping[int, Claims], results: Mapping[int, Sequence[TaskResult]]) -> Vouching:
    """Where a change of the log, or of the dump, would not be noticed: by CP, against the hashes that should be there.

    A dump should carry its own up to its last record (D5). Members store one every 10,000 offsets (S4), in the topic of
    snapshots: one that is late by less than twice the longest of them is not missing.
    """
    found = Vouching()
    young, own_only = [], []
    for cp, each in sorted(results.items()):
        if not (pieces := log.pieces.get(cp)):
            continue
        first, last = pieces[0].first, pieces[-1].last
        checked = [x for result in each for x in (*result.hashes_held, *(wrong for wrong, _ in result.hashes_wrong))]
        stored = [x for x in checked if cp in claims and x in claims[cp].hashes]
        own = [x for x in checked if x in log.hashes.get(cp, ())]
        if log.is_dump:
            bare = _without(first, last, _ranges(own))
            if bare:
                found.unvouched.append(
                    f"partition {cp}: the dump carries no hash of offsets {_named(bare)}, where kafka-marshal dump "
                    "writes one every 10,000 offsets and with the last record: a change there is not noticed"
                )
            if cp not in claims:
                own_only.append(cp)
                continue
        late = 2 * max([SNAPSHOT_INTERVAL, *(x.next_offset - x.since for x in stored)])
        bare = _without(first, last, _ranges(stored if log.is_dump else [*stored, *own]))
        # The first hash may begin below what is left of the log, and the next one is due later.
        begun = bare.pop(0) if bare and 0 < first == bare[0][0] and bare[0][1] - first < late else None
        behind = bare.pop() if bare and bare[-1][1] == last and last - bare[-1][0] < late else None
        if bare:
            found.unvouched.append(
                f"partition {cp}: no stored hash covers offsets {_named(bare)}, where members store one every 10,000 "
                "offsets beside their snapshots: a change there is not noticed"
            )
        young += [f"{cp} from offset {span[0]} to {span[1]}" for span in (begun, behind) if span is not None]
    if young:
        found.notices.append(
            f"no hash of members covers partition(s) {_listed(young)} yet (they store one every 10,000 offsets): a "
            "change there is not noticed"
        )
    if own_only:
        found.notices.append(
            "the hashes of the dump show changes since it was written. Whether its records are those that members "
            "read, their hashes show: name the dump of the log of snapshots (--snapshots)"
        )
    return found


def notices_of_offsets(results: Mapping[int, Sequence[TaskResult]]) -> list[str]:
    """Missing offsets between records."""
    found = []
    for cp, each in sorted(results.items()):
        missing = sum(result.missing for result in each)
        if missing:
            first, last = next(result.first_missing for result in each if result.first_missing is not None)
            found.append(
                f"partition {cp}: {missing:,} offset(s) between the first and the last record have none, the first of "
                f"them {first} to {last}: these records were removed or compacted, or are markers of Kafka's own"
            )
    return found


def cuts(log: SourceLog) -> list[str]:
    """Where a dump lacks what the log had when it was written (D5), or does not say what that was."""
    found = []
    if log.is_dump and not log.bounds:
        found.append(
            "the dump does not say where its log began and ended, as kafka-marshal dump writes it: whether its first "
            "and last records are there is not known"
        )
    for cp, (first, end) in enumerate(log.bounds):
        pieces = log.pieces.get(cp, ())
        begin, last = (pieces[0].first, pieces[-1].last + 1) if pieces else (end, first)
        if last < end:
            found.append(
                f"partition {cp}: the dump ends at offset {last}, and the log reached to {end} when it was written: it "
                "was cut"
            )
        if pieces and begin > first:
            found.append(
                f"partition {cp}: the dump begins at offset {begin}, and the log at {first} when it was written: what "
                "was between is missing"
            )
    return found


def _ranges(hashes: Sequence[LogHash]) -> list[tuple[int, int]]:
    """The offsets that they cover: first and last of each run."""
    if not hashes:
        return []
    firsts, lasts = union([(each.since, each.next_offset - 1) for each in hashes])
    return list(zip(firsts, lasts, strict=True))


def _without(first: int, last: int, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of first … last is in none of these ranges, which ascend."""
    found = []
    for low, high in ranges:
        if low > first:
            found.append((first, low - 1))
        first = max(first, high + 1)
    return [*found, (first, last)] if first <= last else found


def _named(ranges: Sequence[tuple[int, int]]) -> str:
    return _listed([f"{first} to {last}" for first, last in ranges])


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more
