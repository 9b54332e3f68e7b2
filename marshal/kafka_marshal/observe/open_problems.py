"""What is wrong with a group's open messages: too many or too old ones set aside, batches that hang, a full list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from shlex import quote
from typing import TYPE_CHECKING, Any

from kafka_marshal.observe.holes import Holding, holdings_of
from kafka_marshal.observe.problems import Problem, places
from kafka_marshal.observe.rows import GroupRow, LeaseRow, state_of
from kafka_marshal.observe.text import count, span
from rationalizer.limits import MANY_HOLES, MAX_HOLES

if TYPE_CHECKING:
    from kafka_marshal.observe.view import View
    from kafka_marshal.ports import Cluster

#: A batch whose worker beats may be in its hands for this long (ms), or three heartbeat intervals.
STUCK_BATCH_MS = 60_000

#: The most batches whose age is looked up: the oldest of each worker.
_MOST_BATCHES = 500


def open_text(group: GroupRow) -> str:
    """The open messages of a group in words; "": there are none."""
    parts = []
    if group.parked:
        reasons = Counter(each.parked for row in group.leases for each in row.open if each.parked is not None)
        parts.append(f"{group.parked:,} set aside ({', '.join(f'{n:,} {why}' for why, n in reasons.most_common(5))})")
    taken = sum(
        each.last - each.first + 1 for row in group.leases for each in row.open if each.holder and not each.is_parked
    )
    waiting = group.open_messages - taken
    parts += [f"{waiting:,} waiting for the next try"] if waiting else []
    parts += [f"{taken:,} in workers' batches"] if taken else []
    return ", ".join([*parts, *crowded_text(group)])


def crowded(group: GroupRow) -> dict[tuple[str, int], int]:
    """Partitions with more than half of the open messages that they may have (H5) → how many."""
    counted: Counter[tuple[str, int]] = Counter()
    for row in group.leases:
        counted[row.topic, row.partition] += len(row.open)
    return {key: amount for key, amount in counted.items() if 2 * amount > MAX_HOLES}


def crowded_text(group: GroupRow) -> list[str]:
    """In words, how near to its limit the fullest partition is; []: none has more than half of it."""
    most = max(crowded(group).values(), default=0)
    return [f"{most:,} of the {MAX_HOLES:,} that a partition may have open"] if most else []


def open_problems(
    cluster: Cluster, view: View, group: GroupRow, max_parked: int | None = None, max_parked_ms: int | None = None
) -> list[Problem]:
    """All problems of the group's open messages (*blocking*): ages are read from the log."""
    name = group.group
    holdings = holdings_of(view.worlds, name)
    rows = {(row.topic, row.partition): row for row in group.leases}
    parked = [each for each in holdings if each.hole.is_parked and each.key in rows]
    listed = f"kafka-marshal open-messages {quote(name)} --parked lists them, redrive or discard ends them"
    found = []
    if max_parked is not None and len(parked) > max_parked:
        text = f"{count(len(parked), 'message')} set aside, more than {max_parked:,}. {listed}"
        found.append(Problem(name, "parked", text, len(parked), _rows(rows, parked)))
    if max_parked_ms is not None and parked:
        old = _older(cluster, view, parked, max_parked_ms)
        if old:
            age = span(max(age for _, age in old))
            text = f"{count(len(old), 'message')} set aside for more than {span(max_parked_ms)}, up to {age}. {listed}"
            found.append(Problem(name, "parked", text, len(old), _rows(rows, [each for each, _ in old])))
    if group.all_silent is None:  # else no member can log what it does
        found += _stuck_batches(cluster, view, group, holdings)
        found += [] if group.is_paused else _stuck_tries(cluster, view, group, holdings)
    of_one = [([rows[key]], amount, MAX_HOLES, "a partition") for key, amount in crowded(group).items()]
    for cp in sorted({row.cp for row in group.leases if row.cp is not None}):
        if 2 * (amount := view.worlds[cp].hole_count()) > MANY_HOLES:
            of_cp = [row for row in group.leases if row.cp == cp]
            of_one.append((of_cp, amount, MANY_HOLES, f"all groups together in {view.replica.topic} [{cp}]"))
    for some, amount, most, of in of_one:
        means = (
            "What fails for good can't be set aside any more, and then nothing of it is delivered until some are done"
        )
        if amount < most:
            means = "At the limit nothing more is set aside, and nothing of it is delivered until some are done"
        text = (
            f"{places(some)}: {amount:,} of {most:,} open messages that {of} may have. {means}. "
            "Nothing is lost. Mend what makes them fail, then redrive or discard some: kafka-marshal open-messages "
            f"{quote(name)}"
        )
        found.append(Problem(name, "holes", text, len(some), some))
    return found


def _rows(rows: dict[tuple[str, int], LeaseRow], holdings: Sequence[Holding]) -> list[LeaseRow]:
    return [rows[key] for key in dict.fromkeys(each.key for each in holdings)]


def _older(cluster: Cluster, view: View, holdings: Sequence[Holding], most_ms: int) -> list[tuple[Holding, int]]:
    """Those that are as they are for longer than this, with their age (ms). One whose record was pruned is left out."""
    from kafka_marshal.observe.point_reads import read_at

    log = view.replica.topic
    wanted: dict[tuple[str, int], set[int]] = {}
    for each in holdings:
        wanted.setdefault((log, each.cp), set()).add(each.hole.since)
    times = read_at(cluster, wanted, _time_of, view.patience_s).found
    now_ms = view.silence.now_ms()
    ages = [
        (each, now_ms - time - view.silence.stood_ms(view.worlds[each.cp], time))
        for each in holdings
        if (time := times.get((log, each.cp, each.hole.since))) is not None
    ]
    return [(each, age) for each, age in ages if age > most_ms]


def _time_of(message: Any) -> int:
    time_ms: int = message.timestamp()[1]
    return time_ms


def _stuck_batches(cluster: Cluster, view: View, group: GroupRow, holdings: Sequence[Holding]) -> Iterator[Problem]:
    """Batches that a worker has had for long, though it beats."""
    sharers = {
        (row.topic, row.partition, each.epoch): each
        for row in group.leases
        for each in row.sharers
        if state_of(view.silence.now_ms() - each.last_beat, each.heartbeat_interval_ms) == "seen"
    }
    owned = [each for each in holdings if (*each.key, each.hole.owner) in sharers]
    owned.sort(key=lambda each: (*each.key, each.hole.owner, each.hole.since))
    oldest = [next(of_one) for _, of_one in groupby(owned, key=lambda each: (*each.key, each.hole.owner))]
    rows = {(row.topic, row.partition): row for row in group.leases}
    for each, age in _older(cluster, view, oldest[:_MOST_BATCHES], STUCK_BATCH_MS) if oldest else ():
        sharer = sharers[*each.key, each.hole.owner]
        if age <= 3 * sharer.heartbeat_interval_ms:
            continue
        text = (
            f"{places([rows[each.key]])}: {sharer.client_id} has had offsets {each.hole.first} to {each.hole.last} for "
            f"{span(age)} and beats: a handler hangs? Nothing is lost, and other workers continue. handler_timeout "
            f"gives such messages to others; to end it now, restart {sharer.client_id}"
        )
        yield Problem(group.group, "stuck_batch", text, 1, [rows[each.key]])


def _stuck_tries(cluster: Cluster, view: View, group: GroupRow, holdings: Sequence[Holding]) -> Iterator[Problem]:
    """Messages whose next try has not been logged for long: a handler hangs, most tries fail, or back-off is long."""
    rows = {(row.topic, row.partition): row for row in group.leases if row.held}
    waiting = sorted([x for x in holdings if x.hole.is_free and x.key in rows], key=lambda each: each.hole.since)
    old = _older(cluster, view, waiting[:_MOST_BATCHES], STUCK_BATCH_MS) if waiting else []
    if old:
        some = _rows(rows, [each for each, _ in old])
        amount, age = count(len(old), "message waits", "messages wait"), span(max(age for _, age in old))
        text = (
            f"{places(some)}: {amount} for the next try, for up to {age}, and later ones of the same keys behind: a "
            "handler hangs, or what the handlers need is away. Nothing is lost. See the workers' logs and health(). "
            f"kafka-marshal open-messages {quote(group.group)} lists them, and says how to set one aside"
        )
        yield Problem(group.group, "stuck_try", text, len(old), some)
