"""The independent account: the users' rows, in the order in which they came, beside what the coordinator knows."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.sinks.coordinator import Coordinator, Shared
from tests.campaigns.sinks.member import hash_of, is_hole

__all__ = ["TABLES", "Row", "compare", "compare_tables"]

#: Of the users; {serial} is what counts the rows.
TABLES = (
    """
    CREATE TABLE written (seq {serial} PRIMARY KEY, part int, round int, off bigint, hash bigint, lo bigint, hi bigint,
    token bigint, summed int, writer text)
    """,
    "CREATE TABLE sums (part int, round int, slot int, n bigint, PRIMARY KEY (part, round, slot))",
)

#: The epoch of a partition whose keys have different ones.
SPLIT = 2**63 - 1
#: Added to tokens of coordinated groups.
COORDINATED = 2**62

Ask = Callable[[str], Sequence[Sequence[Any]]]


class Row(NamedTuple):
    """A row of ``written``. The writer had keys lo … hi; an offset below 0 is the mark of a rewind."""

    seq: int
    part: int
    round: int
    off: int
    hash: int
    lo: int
    hi: int
    token: int
    summed: int


def compare(coordinator: Coordinator, ask: Ask, orders: Sequence[str]) -> Iterator[str]:
    """What is broken. orders: expressions by which rows are ordered as they came; tokens must grow in each order."""
    rows = [Row(*row) for row in ask(f"SELECT {', '.join(Row._fields)} FROM written ORDER BY seq")]
    for shared in coordinator.partitions:
        yield from _once(shared, [row for row in rows if row.part == shared.number and row.off >= 0])
    for order in orders:
        came = [Row(*row) for row in ask(f"SELECT {', '.join(Row._fields)} FROM written ORDER BY {order}, seq")]
        for shared in coordinator.partitions:
            wrong = _older_after_newer([row for row in came if row.part == shared.number])
            yield from (f"ordered by {order}: {each}" for each in wrong)
    sums = {tuple(at): n for *at, n in ask("SELECT part, round, slot, n FROM sums")}
    wanted = Counter((row.part, row.round, row.hash % 7) for row in rows if row.summed)
    yield from (f"sum of {at}: {sums.get(at, 0)}, not {n}" for at, n in wanted.items() if sums.get(at, 0) != n)
    yield from (f"sum of {at}: {n}, without a row" for at, n in sums.items() if at not in wanted)


def _once(shared: Shared, rows: Sequence[Row]) -> Iterator[str]:
    """Each record once in each round, and each that is done is there."""
    found = Counter((row.round, row.off) for row in rows)
    yield from (f"partition {shared.number}: {n} rows of (round, offset) {at}" for at, n in found.items() if n > 1)
    for row in rows:
        if is_hole(shared.number, row.off) or row.hash != hash_of(shared.number, row.off):
            yield f"{row} is of no message"
        if not row.lo <= row.hash <= row.hi:
            yield f"{row} has a key that was not its writer's"
        if row.round > shared.round or row.off <= shared.rounds[row.round].since:
            yield f"{row} was done before its round"
    for number, each in enumerate(shared.rounds):
        lost = sorted(offset for offset in each.done if not found[number, offset])
        if lost:
            yield f"partition {shared.number}, round {number}: {len(lost)} done and not there: {lost[:10]}"
    there, upper = set[int](), shared.stable
    for number in reversed(range(len(shared.rounds))):
        since = shared.rounds[number].since
        there |= {off for round_, off in found if round_ == number and since < off <= upper}
        upper = min(upper, since)
    lost = [off for off in range(shared.stable + 1) if off not in there and not is_hole(shared.number, off)]
    if lost:
        yield f"partition {shared.number}: lost: {len(lost)}, {lost[:10]}"


def _older_after_newer(rows: Sequence[Row]) -> Iterator[str]:
    """No row comes after one whose token is newer and whose writer had its key."""
    bounds = sorted({0, *(row.lo for row in rows), *(row.hi + 1 for row in rows)})
    newest = [(-1, -1)] * (len(bounds) + 1)
    shares = set[tuple[int, int, int]]()
    for row in rows:
        if row.off >= 0:
            at = bisect_left(bounds, row.hash + 1) - 1
            if newest[at][0] > row.token:
                yield f"{row} is older than a token before it, (token, seq) {newest[at]}"
        if (share := (row.token, row.lo, row.hi)) not in shares:
            shares.add(share)
            for at in range(bisect_left(bounds, row.lo), bisect_left(bounds, row.hi + 1)):
                newest[at] = max(newest[at], (row.token, row.seq))


def compare_tables(coordinator: Coordinator, ask: Ask) -> Iterator[str]:
    """The sink's tables as the rules say."""
    done = defaultdict[int, list[tuple[int, int]]](list)
    for part, first, last in ask("SELECT partition, first_offset, last_offset FROM kafka_marshal_done ORDER BY 1, 2"):
        done[part].append((first, last))
    fences = defaultdict[int, list[tuple[int, int, int]]](list)
    for part, lo, hi, epoch in ask("SELECT partition, lo, hi, epoch FROM kafka_marshal_fences ORDER BY 1, 2"):
        fences[part].append((lo, hi, epoch))
    for part, last, epoch in ask("SELECT partition, last_offset, epoch FROM kafka_marshal_progress ORDER BY 1"):
        shared = coordinator.partitions[part]
        yield from (f"partition {part}: {each}" for each in _intervals(shared, last, done[part]))
        if (epoch == SPLIT) != bool(fences[part]):
            yield f"partition {part}: epoch {epoch} with fences {fences[part]}"
        elif fences[part]:
            yield from (f"partition {part}: {each}" for each in _fences(shared, fences[part]))


def _intervals(shared: Shared, last: int, found: Sequence[tuple[int, int]]) -> Iterator[str]:
    before = None
    for first, end in found:
        if first > end or (before is not None and first <= before):
            yield f"intervals overlap: {found}"
        before = end
    covered = {at for first, end in found for at in range(max(first, last), end + 1)}
    over = [at for at in (last, *covered) if at > shared.stable]
    missing = [at for at in range(last + 1, shared.stable + 1) if at not in covered and not is_hole(shared.number, at)]
    if over or missing:
        yield f"{over[:5]} stored as done and are not, {missing[:5]} are and not stored: {last}, {found[:20]}"


def _fences(shared: Shared, found: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    los, his = [lo for lo, _, _ in found], [hi for _, hi, _ in found]
    if los[0] != 0 or his[-1] != MAX_KEY_HASH or los[1:] != [hi + 1 for hi in his[:-1]] or len(found) < 2:
        yield f"fences are not disjoint, or do not cover all keys: {found}"
    if any(left[2] == right[2] for left, right in pairwise(found)):
        yield f"neighbouring fences with one epoch: {found}"
    for lo, hi, epoch in found:
        rightful = [x.token for x in shared.pieces if x.lo <= hi and lo <= x.hi]
        if epoch - COORDINATED > min(rightful):
            yield f"a fence above the rightful token: {lo} … {hi}, {epoch - COORDINATED}, {rightful}"
