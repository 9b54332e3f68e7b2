"""What is wrong with a group, in words: for `check`, and below the overview of `status`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from kafka_marshal.observe.rows import (
    DAY_MS,
    FOREIGN_COMMIT,
    NO_PROGRESS,
    partitions_of,
    span_text,
)
from kafka_marshal.observe.text import count, span

if TYPE_CHECKING:
    from kafka_marshal.observe.rows import (
        GroupRow,
        LeaseRow,
        MemberRow,
        WorkerRow,
    )

#: Kind → the group's state in `status`. Kinds are part of the JSON of `check` and `status`.
KINDS = {
    "position_lost": "position lost",
    "no_topic": "without a topic",
    "stuck": "stuck",
    "stuck_key": "held back",
    "deleted": "deleted unread",
    "hung": "hung?",
    "old_cut": "cut too old",
    "stuck_batch": "batch hangs",
    "stuck_try": "wait for a try",
    "holes": "open messages near the limit",
    "parked": "set aside",
    "gone": "gone",
    "no_holder": "without a holder",
    "pause_over": "pause is over",
    "members": "members too few",
    "lag": "behind",
    "silence": "silent",
}

#: The most ranges of partitions, and the most workers, that a text lists.
_LISTED = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `amount`: the number of partitions, members or messages concerned."""

    group: str
    kind: str
    text: str
    amount: int
    partitions: list[LeaseRow]


def places(rows: Iterable[LeaseRow]) -> str:
    """The partitions in words: flights 1, 3-5, 6 (0-33%); delays 0."""
    found = []
    for topic, of_topic in groupby(sorted(rows, key=lambda row: (row.topic, row.partition)), lambda row: row.topic):
        runs: list[list[int]] = []
        parts: list[str] = []
        for row in of_topic:
            if row.place != str(row.partition):
                parts.append(row.place)
            elif runs and row.partition == runs[-1][-1] + 1:
                runs[-1][1:] = [row.partition]
            else:
                runs.append([row.partition])
        listed = [*("-".join(map(str, run)) for run in runs[:_LISTED]), *parts][:_LISTED]
        found.append(f"{topic} {', '.join(listed)}" + (", …" if len(runs) + len(parts) > _LISTED else ""))
    return "; ".join(found)


#: Of a hold group: which member it is can't be seen in its state.
_NEEDS_ALL: Final = (
    "In a hold group it takes all members: one can't save its state, does not answer, or has a handler that takes "
    "longer than drain; kafka-marshal checkpoints {} says which"
)


def too_few(group: str, living: int, wanted: int) -> Problem:
    """The problem that fewer members are alive than required."""
    return Problem(group, "members", f"{count(living, 'member')} alive, fewer than {wanted:,}", living, [])


def deleted_text(rows: list[LeaseRow]) -> str:
    """Offsets that retention deleted before they were done: the lag does not count them."""
    offsets = sum(row.deleted for row in rows)
    return (
        f"{places(rows)}: {count(offsets, 'offset was', 'offsets were')} deleted (retention) that the group had not "
        "done: lost, and not in its lag; it continues where the log begins now"
    )


def problems_of(
    group: GroupRow,
    max_lag: int | None = None,
    max_silence_ms: int | None = None,
    min_members: int = 0,
    max_cut_ms: int | None = None,
) -> list[Problem]:
    """All problems of the group, the worst first."""
    name = group.group
    found = [*_standing_still(group), *_held_back(group), *_members(group, max_silence_ms)]
    found += _old_cuts(group, max_cut_ms)
    free = [row for row in group.unheld if row.client is None and not (row.no_topic or row.lost)]
    if free and not group.is_over:
        found.append(Problem(name, "no_holder", _unheld_text(group, free), len(free), free))
    deleted = [row for row in group.leases if row.deleted]
    if deleted:
        found.append(Problem(name, "deleted", deleted_text(deleted), len(deleted), deleted))
    for pause in group.pauses:
        if pause.is_over:
            text = (
                f"its pause by {pause.client} ended {span(-pause.left_ms)} ago, and nobody has written to the log "
                f"since: no worker runs. To end it for good: kafka-marshal release-group {shlex.quote(name)} --resume"
            )
            found.append(Problem(name, "pause_over", text, 1, []))
    if group.living < min_members:
        found.append(too_few(name, group.living, min_members))
    behind = group.known_lag
    if max_lag is not None and behind > max_lag:
        found.append(Problem(name, "lag", f"{count(behind, 'message')} behind, more than {max_lag:,}", behind, []))
    return found


def _unheld_text(group: GroupRow, free: list[LeaseRow]) -> str:
    """Partitions without a holder, and what to do: a group whose workers have just died has not ended."""
    waiting = sum(row.lag or 0 for row in free)
    what = "keys" if all(row.place != str(row.partition) for row in free) else count(partitions_of(free), "partition")
    text = f"{what} without a holder ({places(free)})"
    if waiting:
        text += f", {count(waiting, 'message')} waiting"
    if group.members:
        return text
    text += f". No worker holds anything of the group{_heard(group.idle)}. {_last_seen(group)}"
    if not group.living:
        text += ". Start its workers: they continue at its positions"
    if group.silent_ms > DAY_MS:
        text += f". If it is over: kafka-marshal forget-group {shlex.quote(group.group)} (its positions are lost then)"
    return text


def _last_seen(group: GroupRow) -> str:
    return f"Last seen {span_text(group.silent_ms, group.silent_at_least)} ago"


def _standing_still(group: GroupRow) -> Iterator[Problem]:
    hung = {id(row) for member in group.members if member.is_still for row in member.leases}
    still = [row for row in group.leases if row.stuck and not (id(row) in hung and row.stuck.startswith(NO_PROGRESS))]
    for (kind, why), rows in _by_reason(still):
        text = f"{places(rows)}: {why}"
        if kind == "no_topic":
            text += ". Create it again; or, where the group is over: kafka-marshal forget-group "
            text += f"{shlex.quote(group.group)} (all of its positions are dropped)"
        if kind == "position_lost":
            # After a foreign commit the log still has the position: nothing need be repeated.
            keeps = FOREIGN_COMMIT in why
            named = _positions(rows) if keeps else (f"{name}=earliest" for name in _named(group, rows))
            where = " ".join(f"--partition {shlex.quote(name)}" for name in named)
            text += (
                ". Nothing of it is delivered until you say where to continue: kafka-marshal release-group "
                f"{shlex.quote(group.group)} {where}"
            )
        yield Problem(group.group, kind, text, len(rows), rows)


def _held_back(group: GroupRow) -> Iterator[Problem]:
    """One problem for each partition: progress elsewhere hides it from all figures of a worker."""
    for row in group.leases:
        if row.held_back:
            text = (
                f"{places([row])}: {row.held_back}. See {row.client}'s log. If its handler hangs: kafka-marshal evict "
                f"{shlex.quote(group.group)} --member {shlex.quote(row.client or '')} --force (what it has in hand is "
                "repeated)"
            ) + _waiting(group, [row])
            yield Problem(group.group, "stuck_key", text, 1, [row])


def _waiting(group: GroupRow, rows: Iterable[LeaseRow]) -> str:
    """What to do about messages that fail again and again: "" if none is in the log."""
    if not any(each.holder is None and not each.is_parked for row in rows for each in row.open):
        return ""
    return (
        ". Messages wait for their next try there, and their keys for them: kafka-marshal open-messages "
        f"{shlex.quote(group.group)} lists them, and says how to set one aside"
    )


def _old_cuts(group: GroupRow, most_ms: int | None) -> Iterator[Problem]:
    """Pieces with messages waiting whose last cut is older than three checkpoints, or than most_ms."""
    checkpoints = group.checkpoints
    if checkpoints is None:
        return
    old_below = checkpoints.old_below
    for row in group.leases:
        if not row.held or not row.lag or row.cut is None or row.waiting_ms is None:
            continue
        waited_ms = row.waiting_ms + row.as_of_ms
        cut_ms = min(checkpoints.since_ms(row.cut), waited_ms)
        is_old = old_below is not None and row.cut < old_below and waited_ms >= checkpoints.since_ms(old_below)
        if is_old or (most_ms is not None and cut_ms > most_ms):
            since = f"since checkpoint {row.cut}" if row.cut else "so far"
            why = _NEEDS_ALL.format(shlex.quote(group.group))
            if not checkpoints.hold:
                why = (
                    "A handler takes longer than the policy's drain, hangs, or its state can't be saved: see "
                    f"{row.client}'s log, and kafka-marshal show "
                    f"{shlex.quote(f'{row.topic}:{row.partition}:{row.position}')}"
                )
            text = (
                f"{places([row])}: {row.client} has not handed it in {since}, for over {span(cut_ms)}, and messages "
                f"wait at offset {row.position}. {why}. "
                f"Nothing is lost; if {row.client} dies, what it did since then comes again"
            )
            yield Problem(group.group, "old_cut", text, 1, [row])


def _named(group: GroupRow, rows: list[LeaseRow]) -> Iterator[str]:
    """Partitions as options of release-group; the topic alone for all of its partitions. At most the first eight."""
    whole = {row.topic for row in rows} - {row.topic for row in group.leases if row not in rows}
    yield from sorted(whole)
    yield from [f"{row.topic}:{row.partition}" for row in rows if row.topic not in whole][:_LISTED]


def _positions(rows: list[LeaseRow]) -> Iterator[str]:
    """Partitions with their positions in the log, as options of release-group. At most the first eight."""
    yield from [f"{row.topic}:{row.partition}={0 if row.stable is None else row.stable + 1}" for row in rows[:_LISTED]]


def _by_reason(rows: list[LeaseRow]) -> list[tuple[tuple[str, str], list[LeaseRow]]]:
    """(kind, reason) with the partitions, in the order of `KINDS`."""
    found: dict[tuple[str, str], list[LeaseRow]] = {}
    for row in rows:
        kind = "position_lost" if row.lost else "no_topic" if row.no_topic else "stuck"
        found.setdefault((kind, row.stuck), []).append(row)
    return sorted(found.items(), key=lambda item: (list(KINDS).index(item[0][0]), item[0][1]))


def _heard(idle: list[WorkerRow]) -> str:
    """Workers that hold nothing and may still run: without partitions they write no records."""
    last = sorted(idle, key=lambda run: run.silence_ms)[:_LISTED]
    return "".join(f"; {_name(run)} {run.doing}" for run in last) + ("; …" if len(idle) > _LISTED else "")


def _without_checkpoint(group: GroupRow) -> Iterator[Problem]:
    """In a hold group nothing moves while one member can't take part: the others do not hang."""
    hung = [row for member in group.members if member.is_still for row in member.leases]
    if group.checkpoints is not None and hung:
        text = (
            f"no checkpoint has been complete for {span(group.checkpoints.age_ms)}, messages wait, and progress moves "
            f"only at one. {_NEEDS_ALL.format(shlex.quote(group.group))}. Nothing is lost"
        )
        yield Problem(group.group, "hung", text, 1, hung)


def _members(group: GroupRow, max_silence_ms: int | None) -> Iterator[Problem]:
    if group.is_hold:
        yield from _without_checkpoint(group)
    for member in sorted(group.members, key=lambda member: member.badness):
        holds = f"holds {count(len(member.leases), 'partition')} ({places(member.leases)})"
        where = _name(member)
        if member.is_hung:
            waited = span_text(member.no_progress_ms or 0, member.is_still_longer)
            text = f"{where} beats, but no progress for {waited}, hung? It {holds}, {member.lag or 0:,} waiting"
            text += _waiting(group, member.leases)
            yield Problem(group.group, "hung", text, 1, member.leases)
        elif member.state == "gone":
            text = f"{where} is gone: silent for {span(member.silence_ms)}. It {holds}"
            if not group.living:
                text += (
                    f", {member.lag or 0:,} waiting. No other worker is alive: start one, it continues at their "
                    "positions"
                )
            yield Problem(group.group, "gone", text, 1, member.leases)
        elif max_silence_ms is not None and member.state != "unknown" and member.silence_ms > max_silence_ms:
            text = f"{where} is silent for {span(member.silence_ms)}, more than {span(max_silence_ms)}. It {holds}"
            yield Problem(group.group, "silence", text, 1, member.leases)


def _name(member: MemberRow | WorkerRow) -> str:
    runs_at = member.runs_at
    return member.client if runs_at is None else f"{member.client} ({runs_at})"
