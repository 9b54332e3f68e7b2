"""What is wrong with a group's open messages: too many or too old ones set aside, batches that hang, a full list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from shlex import quote
from typing import TYPE_CHECKING, Any

from kafka_marshal.observe.holes import Holding, holdings_of
from kafka_marshal.observe.problems import Problem, crowded, limit, places
from kafka_marshal.observe.rows import GroupRow, LeaseRow, state_of
from kafka_marshal.observe.text import count, span
from rationalizer.limits import MANY_HOLES, MAX_HOLES

if TYPE_CHECKING:
    from kafka_marshal.observe.view import View
    from kafka_marshal.ports import Cluster

#: A batch whose worker beats may be in its hands for this long (ms), or three heartbeat intervals.
STUCK_BATCH_MS = 60_000

#: A message that has failed this often, and waits for its next try, is named, however short that wait is.
MANY_TRIES = 10

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
        old, unknown = _older(cluster, view, parked, max_parked_ms)
        if unknown := _may_be_older(cluster, view, unknown, max_parked_ms):
            text = (
                f"{count(len(unknown), 'message')} set aside, and whether for more than {span(max_parked_ms)} can't be "
                f"known: the records that say since when were pruned, and the messages are older. {listed}"
            )
            found.append(Problem(name, "parked", text, len(unknown), _rows(rows, unknown)))
        if old:
            age = span(max(age for _, age in old))
            text = f"{count(len(old), 'message')} set aside for more than {span(max_parked_ms)}, up to {age}. {listed}"
            found.append(Problem(name, "parked", text, len(old), _rows(rows, [each for each, _ in old])))
    if group.all_silent is None:  # else no member can log what it does
        found += _stuck_batches(cluster, view, group, holdings)
        found += [] if group.is_paused else _stuck_tries(cluster, view, group, holdings)
    found += [limit(group, [rows[key]], x, MAX_HOLES) for key, x in crowded(group).items() if x < MAX_HOLES]
    for cp in sorted({row.cp for row in group.leases if row.cp is not None}):
        if 2 * (amount := view.worlds[cp].hole_count()) > MANY_HOLES:
            of = f"all groups together in {view.replica.topic} [{cp}]"
            found.append(limit(group, [row for row in group.leases if row.cp == cp], amount, MANY_HOLES, of))
    return found


def _rows(rows: dict[tuple[str, int], LeaseRow], holdings: Sequence[Holding]) -> list[LeaseRow]:
    return [rows[key] for key in dict.fromkeys(each.key for each in holdings)]


def _older(
    cluster: Cluster, view: View, holdings: Sequence[Holding], most_ms: int
) -> tuple[list[tuple[Holding, int]], list[Holding]]:
    """Those that are as they are for longer than this, with their age (ms); and those of which it can't be known.

    One whose record was pruned is as old as the first record that is left, or older.
    """
    from kafka_marshal.observe.point_reads import read_at

    log = view.replica.topic
    wanted: dict[tuple[str, int], set[int]] = {}
    for each in holdings:
        wanted.setdefault((log, each.cp), set()).add(each.hole.since)
    times = read_at(cluster, wanted, _time_of, view.patience_s).found
    pruned = [each for each in holdings if (log, each.cp, each.hole.since) not in times]
    cps = {each.cp for each in pruned}
    marks = cluster.watermarks([(log, cp) for cp in sorted(cps)], view.patience_s) if cps else {}
    firsts = read_at(cluster, {key: [low] for key, (low, _) in marks.items()}, _time_of, view.patience_s).found
    latest = {cp: view.worlds[cp].log_time for cp in cps} | {cp: time for (_, cp, _), time in firsts.items()}
    now_ms, ages = view.silence.now_ms(), []
    for each in holdings:
        time = times.get((log, each.cp, each.hole.since), latest.get(each.cp, 0))
        ages.append((each, now_ms - time - view.silence.stood_ms(view.worlds[each.cp], time)))
    found = [(each, age) for each, age in ages if age > most_ms]
    certain = {id(each) for each, _ in found}
    return found, [each for each in pruned if id(each) not in certain]


def _may_be_older(cluster: Cluster, view: View, holdings: Sequence[Holding], most_ms: int) -> list[Holding]:
    """Those whose message is older than this: none is set aside before it is written."""
    from kafka_marshal.observe.point_reads import read_at

    wanted: dict[tuple[str, int], set[int]] = {}
    for each in holdings:
        wanted.setdefault(each.key, set()).add(each.hole.first)
    times = read_at(cluster, wanted, _time_of, view.patience_s).found if wanted else {}
    now_ms = view.silence.now_ms()
    return [each for each in holdings if now_ms - times.get((*each.key, each.hole.first), 0) > most_ms]


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
    for each, age in _older(cluster, view, oldest[:_MOST_BATCHES], STUCK_BATCH_MS)[0] if oldest else ():
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
    """Messages whose next try has not been logged for long, or that fail for ever."""
    rows = {(row.topic, row.partition): row for row in group.leases if row.held}
    waiting = sorted([x for x in holdings if x.hole.is_free and x.key in rows], key=lambda each: each.hole.since)
    old = _older(cluster, view, waiting[:_MOST_BATCHES], STUCK_BATCH_MS)[0] if waiting else []
    known = {id(each) for each, _ in old}
    failing = [each for each in waiting if each.hole.attempts >= MANY_TRIES and id(each) not in known]
    if old:
        some = _rows(rows, [each for each, _ in old])
        amount, age = count(len(old), "message waits", "messages wait"), span(max(age for _, age in old))
        text = (
            f"{places(some)}: {amount} for the next try, for up to {age}, and later ones of the same keys behind: a "
            "handler hangs, or what the handlers need is away. Nothing is lost. See the workers' logs and health(). "
            f"kafka-marshal open-messages {quote(group.group)} lists them, and says how to set one aside"
        )
        yield Problem(group.group, "stuck_try", text, len(old), some)
    if failing:
        some, most = _rows(rows, failing), max(each.hole.attempts for each in failing)
        text = (
            f"{places(some)}: {count(len(failing), 'message has', 'messages have')} failed {MANY_TRIES} times or more "
            f"(up to {most:,}), and later ones of the same keys wait. Nothing is lost. Mend what makes them fail, see "
            f"the workers' logs; kafka-marshal open-messages {quote(group.group)} lists them, and says how to set one "
            "aside"
        )
        yield Problem(group.group, "stuck_try", text, len(failing), some)
