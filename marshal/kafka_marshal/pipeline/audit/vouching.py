"""Hashes that confirm the records of a log: stored by members (S4) and in a dump (D5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from kafka_marshal.pipeline.audit.findings import Violation
from kafka_marshal.pipeline.audit.invariants import Kind
from kafka_marshal.pipeline.audit.plan import SourceLog
from kafka_marshal.pipeline.audit.snapshots import Claims
from kafka_marshal.pipeline.audit.task import TaskResult
from rationalizer.intervals import union
from rationalizer.log_hash import LogHash

#: Ranges of one CP that are listed one by one.
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


def notices_of_hashes(claims: Mapping[int, Claims], results: Mapping[int, Sequence[TaskResult]]) -> list[str]:
    """Places where a change of the log would not be noticed, except behind the last hash."""
    found, bare = [], []
    for cp, each in sorted(results.items()):
        stored = claims[cp].hashes if cp in claims else ()
        checked = [x for result in each for x in (*result.hashes_held, *(wrong for wrong, _ in result.hashes_wrong))]
        ranges = _ranges([x for x in checked if x in stored])
        if not ranges:
            bare += [cp] if any(result.records for result in each) else []
            continue
        # Offsets behind the last hash are covered as soon as members store the next.
        holes = [(before + 1, after - 1) for (_, before), (after, _) in pairwise(ranges)]
        if holes:
            named = ", ".join(f"{first} to {last}" for first, last in holes[:_NAMED])
            more = f" and {len(holes) - _NAMED} more" if len(holes) > _NAMED else ""
            found.append(f"partition {cp}: no stored hash covers offsets {named}{more}: a change there is not noticed")
    if bare:
        found.append(
            f"nothing vouches for the log of partition(s) {', '.join(map(str, bare))}: no member has stored a hash of "
            "it (they do every 10,000 offsets, beside their snapshots). Changed or removed records are not noticed"
        )
    return found


def notices_of_offsets(log: SourceLog, results: Mapping[int, Sequence[TaskResult]]) -> list[str]:
    """Missing offsets, and records missing at the end of a dump."""
    found = []
    for cp, each in sorted(results.items()):
        missing = sum(result.missing for result in each)
        if missing:
            first, last = next(result.first_missing for result in each if result.first_missing is not None)
            found.append(
                f"partition {cp}: {missing:,} offset(s) between the first and the last record have none, the first of "
                f"them {first} to {last}: these records were removed or compacted, or are markers of Kafka's own"
            )
    for cp, (first, end) in enumerate(log.bounds):
        pieces = log.pieces.get(cp, ())
        last = pieces[-1].last + 1 if pieces else first
        if last < end:
            found.append(
                f"partition {cp}: the dump ends at offset {last}, and the log reached to {end} when it was written: it "
                "was cut"
            )
    return found


def _ranges(hashes: Sequence[LogHash]) -> list[tuple[int, int]]:
    """The offsets that they cover: first and last of each run."""
    if not hashes:
        return []
    firsts, lasts = union([(each.since, each.next_offset - 1) for each in hashes])
    return list(zip(firsts, lasts, strict=True))
