"""`status`: groups at a glance, then the partitions of one, or the members."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.check import problem_json
from kafka_marshal.cli.connection import connected, sizes_of
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.names import complete_group
from kafka_marshal.cli.output import Cell, Column, is_terminal
from kafka_marshal.cli.watch import Picture, Section, deleted_notes, lag_cell, show, stuck_section
from kafka_marshal.observe.checkpoints import checkpoints_json
from kafka_marshal.observe.names import no_group
from kafka_marshal.observe.problems import KINDS, Problem, crowded_text, mixed_texts, problems_of
from kafka_marshal.observe.rows import (
    GroupRow,
    LeaseRow,
    MemberRow,
    WorkerRow,
    evicted_text,
    partitions_held,
    partitions_of,
    process_cells,
    process_json,
    span_text,
)
from kafka_marshal.observe.text import clock_text, count, number, span, time_text

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from kafka_marshal.observe.log_size import Sizes
    from kafka_marshal.observe.view import View

_Row = MemberRow | WorkerRow
_GROUPS = (
    Column("group", fold=True, least=8),
    Column("kind", from_width=95),
    Column("members", right=True),
    Column("partitions", right=True),
    Column("lag", right=True),
    Column("no progress", right=True, from_width=75),
    Column("state", fold=True, least=14),
)
_PROBLEMS = (Column("in group", fold=True), Column("what is wrong", fold=True))
_MEMBERS = (
    Column("group", fold=True, least=8),
    Column("member", fold=True, least=8),
    Column("host", fold=True, from_width=70),
    Column("pid", right=True, from_width=70),
    Column("release", from_width=90),
    Column("partitions", right=True),
    Column("lag", right=True),
    Column("seen"),
    Column("progress", fold=True, least=10),
)
_LEASES = (
    Column("group", pipes_only=True),
    Column("topic", fold=True),
    Column("partition", right=True),
    Column("holder", fold=True, least=8),
    Column("epoch", right=True, from_width=75),
    Column("seen"),
    Column("next", right=True),
    Column("lag", right=True),
)
_PAUSES = (
    Column("paused group", fold=True),
    Column("by", fold=True),
    Column("until"),
    Column("left", right=True),
    Column("in", fold=True),
)

_STYLES = {"seen": "green", "silent": "yellow", "gone": "bold red", "never claimed": "yellow", "not assigned": "yellow"}


@command()
@click.option("--group", help="The partitions of this group, one by one.", shell_complete=complete_group)
@click.option("--members", is_flag=True, help="One row per worker: its host, its partitions, its progress.")
@click.option("--all", "everything", is_flag=True, help="Also list groups without a live worker for a day.")
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C; what is wrong comes first.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, metavar="SECONDS", help="With --watch (1).")
@click.option("--tick", is_flag=True, help="Ask the broker's time by a record in every partition of the log.")
@click.pass_obj
def status(
    options: Options, group: str | None, members: bool, everything: bool, watch: bool, interval: float, tick: bool
) -> int:
    r"""Groups at a glance, with their problems; the partitions of one group (--group), or workers (--members).

    \b
    kind         claimed (leases), or coordinated (members and generations; see group)
    members      workers that hold a partition, or are members, and are not gone
    partitions   held / of all topics that the group ever read
    no progress  the longest time that messages have waited while the position did not move; "over": at least, as the
                 log was read no further back (at most 10 minutes)
    seen         the holder's last heartbeat, by the broker's clock: "silent" beyond one heartbeat interval,
                 "gone" beyond two: others can take what it holds. In a coordinated group: beyond half a session,
                 and a whole one
    holder       a → b: a finishes its messages in flight, then b gets it. 3 (0-33%): the first third of the keys
    next         the offset to read next, as in release-group
    lag          messages in the log that are not done; "lost", or a + if a part is not known
    progress     "hung?": it beats and has messages waiting, but reports none of them done

    --members also lists workers that hold nothing and wrote a record in the last 10 minutes. A worker that holds and
    claims nothing writes no records; it may still run.

    The broker's time is learned from new records (up to 1.2 seconds), else this machine's clock is used, with a note.
    Nothing is written, except with --tick.

    \b
    Exit status: 0; 1 a position is lost, the group is unknown, or the log needs a newer release; 3 no Kafka.
    """
    with connected(options) as cluster:
        sizes = sizes_of(cluster)
        return show(
            cluster,
            options,
            lambda view: _picture(view, sizes, group, members, everything, digests=options.json),
            interval=interval if watch else None,
            tick=tick,
        )


def _picture(
    view: View, sizes: Sizes, group: str | None, members: bool, everything: bool, *, digests: bool = False
) -> Picture:
    view.look_at_data(None if group is None else [group])
    groups = view.groups(group)
    problems = {each.group: problems_of(each) for each in groups}
    notes = _notes(view, groups)
    if members or group is not None:  # the overview has it among the problems
        notes += deleted_notes(groups)
    if group is not None and not groups:
        notes.append(no_group(group, view.names()))
    is_folding = is_terminal() and not everything and group is None  # programs get all
    folded = [each for each in groups if is_folding and each.is_dead]
    shown = [each for each in groups if each not in folded]
    if members:
        sections = [_member_section(view, shown)]
    elif group is not None:
        rows = [row for each in groups for row in each.leases]
        if view.watched:
            rows.sort(key=lambda row: row.badness)
        sections = [Section(_LEASES, [_cells(row) for row in rows], "no leases"), stuck_section(rows)]
    else:
        sections = [_group_section(view, shown, problems), _problem_section(shown, problems)]
    pauses = [pause for each in groups for pause in each.pauses]
    is_lost = any(each.lost for each in groups)
    size = sizes.read(view, sum(each.living for each in groups))
    of_the_log = Section((), (), None if members or group is not None else f"{view.replica.topic}: {size.text}")
    return Picture(
        headline=_headline(groups, folded),
        sections=[*sections, Section(_PAUSES, _pause_rows(view, groups), None), of_the_log],
        notes=notes,
        json={
            "topic": view.replica.topic,
            "clock": {"source": view.clock.source, "now": view.clock.now_ms(), "judged_at": view.silence.now_ms()},
            "partitions": [
                {
                    "partition": cp,
                    "next_offset": world.next_offset,
                    "digest": world.digest() if digests else None,
                    "log_time": world.log_time,
                    "level": world.level,
                    "rejected": dict(world.rejected),
                }
                for cp, world in view.worlds.items()
            ],
            "groups": [_group_json(each, problems[each.group]) for each in groups],
            "members": [_member_json(row) for each in groups for row in chain[_Row](each.members, each.idle)],
            "leases": [_json(row) for each in groups for row in each.leases if row.cp is not None],
            "pauses": [
                {
                    "partition": cp,
                    "group": pause.group,
                    "client": pause.client,
                    "expires": expires,
                    "lasts_ms": pause.lasts_ms,
                }
                for pause in pauses
                for cp, expires in sorted(pause.where.items())
            ],
            "log": size.json,
            "notes": notes,
        },
        status=NO if is_lost or (group is not None and not groups) or list(view.replica.stopped()) else DONE,
    )


def _headline(groups: list[GroupRow], folded: list[GroupRow]) -> str:
    rows = [row for each in groups for row in each.leases]
    workers = sum(each.worker_count for each in groups)
    text = (
        f"{count(len(groups), 'group')}, {count(partitions_of(rows), 'partition')}, {partitions_held(rows):,} held "
        f"by {count(workers, 'worker')}"
    )
    if folded:
        listed = ", ".join(each.group for each in folded[:5]) + (", …" if len(folded) > 5 else "")
        text += f"; nobody seen for a day in {count(len(folded), 'group')} ({listed}): --all lists them"
    return text


# -- groups --------------------------------------------------------------------------------------------------


def _group_section(view: View, groups: list[GroupRow], problems: dict[str, list[Problem]]) -> Section:
    if view.watched:
        groups = sorted(groups, key=lambda each: (-len(problems[each.group]), -(each.lag or 0)))
    return Section(_GROUPS, [_group_cells(each, problems[each.group]) for each in groups], "no groups")


def _group_cells(group: GroupRow, problems: list[Problem]) -> list[str | Cell]:
    return [
        group.group,
        group.kind or "-",
        str(group.worker_count),
        f"{partitions_held(group.leases)}/{partitions_of(group.leases)}",
        lag_cell(group.leases),
        "-" if group.behind_ms is None else span_text(group.behind_ms, group.is_behind_longer),
        _group_state(group, problems),
    ]


def _group_state(group: GroupRow, problems: list[Problem]) -> Cell:
    amounts: dict[str, int] = {}
    for problem in problems:
        amounts[problem.kind] = amounts.get(problem.kind, 0) + problem.amount
    words = [KINDS[kind] if kind in ("pause_over", "paused") else f"{n:,} {KINDS[kind]}" for kind, n in amounts.items()]
    draining = sum(member.asked_ms is not None for member in group.members)
    if draining:
        words.append(f"{draining:,} draining")
    if group.moving:
        words.append(f"{len(group.moving):,} moving")
    if group.parked:
        words.append(f"{group.parked:,} set aside")
    words += crowded_text(group)
    if group.is_paused:
        words.append(f"paused, {span(max(pause.left_ms for pause in group.pauses))} left")
    if any(row.outage for row in group.leases):
        return Cell("not known", "yellow")
    if group.checkpoints is not None and group.checkpoints.barrier is not None:
        words.append("takes a checkpoint")
    bad = {"position_lost", "no_topic", "stuck", "stuck_key", "all_silent", "gone", "hung"} & amounts.keys()
    return Cell(", ".join(words) or "ok", "bold red" if bad else "yellow" if words else "green")


def _problem_section(groups: list[GroupRow], problems: dict[str, list[Problem]]) -> Section:
    rows = [[problem.group, problem.text] for each in groups for problem in problems[each.group]]
    return Section(_PROBLEMS, rows, None)


def _group_json(group: GroupRow, problems: list[Problem]) -> dict[str, object]:
    return {
        "group": group.group,
        "kind": group.kind or None,
        "state": group.state,
        "generation": group.generation,
        "strategy": group.strategy,
        "members": group.worker_count,
        "members_gone": sum(member.state == "gone" for member in group.members),
        "partitions": partitions_of(group.leases),
        "held": partitions_of([row for row in group.leases if row.held]),
        "lag": group.lag,
        "open_messages": group.open_messages,
        "parked": group.parked,
        "positions_lost": len(group.lost),
        "stuck": len(group.stuck),
        "no_progress_ms": group.behind_ms,
        "no_progress_at_least": group.is_behind_longer,
        "paused": group.is_paused,
        "silence_ms": group.silent_ms,
        "all_silent_since": None if group.all_silent is None else group.all_silent.since,
        "problems": [problem_json(problem) for problem in problems],
        **checkpoints_json(group.checkpoints),
    }


# -- members -------------------------------------------------------------------------------------------------


def _member_section(view: View, groups: list[GroupRow]) -> Section:
    members = [member for each in groups for member in each.members]
    if view.watched:
        members.sort(key=lambda member: member.badness)
    rows = [_member_cells(member) for member in members]
    rows += [_heard_cells(run) for each in groups for run in each.idle]
    return Section(_MEMBERS, rows, "no worker holds anything")


def _member_cells(member: MemberRow) -> list[str | Cell]:
    state = member.state
    silence = member.leases[0] if state == "unknown" else min(member.leases, key=lambda row: row.silence_ms or 0)
    return [
        member.group,
        member.client,
        *process_cells(member.runs_at),
        str(len(member.leases)),
        lag_cell(member.leases),
        Cell(silence.seen, _STYLES.get(state, "")),
        _progress(member),
    ]


def _heard_cells(run: WorkerRow) -> list[str | Cell]:
    return [
        run.group,
        run.client,
        *process_cells(run.runs_at),
        "0",
        "-",
        Cell(f"{span(run.silence_ms)} ago", "dim"),
        Cell(run.doing, "yellow"),
    ]


def _progress(member: MemberRow) -> Cell:
    if member.is_hung:
        return Cell(member.hung_text, "bold red")
    if member.is_still:
        return Cell("waits for a checkpoint of all", "yellow")
    if member.heard is not None and member.heard.evictor:
        return Cell(evicted_text(member.heard), "yellow")
    if member.asked_ms is not None:
        return Cell(f"asked to hand over {span(member.asked_ms)} ago", "yellow")
    if why := next((row.stuck.partition(":")[0] for row in member.leases if row.stuck), ""):
        return Cell(why, "red")
    return Cell("-" if member.state != "seen" else "ok" if member.lag else "nothing to do", "dim")


def _member_json(row: _Row) -> dict[str, object]:
    """Of one that holds partitions, or of one that waits for some."""
    member, heard = (row, row.heard) if isinstance(row, MemberRow) else (None, row)
    return {
        "group": row.group,
        "client": row.client,
        "instance": row.instance,
        **process_json(row.runs_at),
        "partitions": 0 if member is None else len(member.leases),
        "lag": None if member is None else member.lag,
        "state": "idle" if member is None else member.state,
        "silence_ms": row.silence_ms,
        "outage_ms": 0 if member is None else member.last_heard.stood_ms,
        "no_progress_ms": None if member is None else member.no_progress_ms,
        "no_progress_at_least": member is not None and member.is_still_longer,
        "hung": member is not None and member.is_hung,
        "asked_to_hand_over_ms": row.asked_ms,
        "waits": member is None and heard is not None and heard.is_waiting,
        **_evicted_json(heard),
        "doing": row.doing if isinstance(row, WorkerRow) else None,
    }


def _evicted_json(run: WorkerRow | None) -> dict[str, object]:
    is_evicted = run is not None and run.evictor != ""
    return {
        "evicted_by": run.evictor if run is not None and is_evicted else None,
        "evicted_ms": run.evicted_ms if run is not None and is_evicted else None,
    }


# -- partitions ----------------------------------------------------------------------------------------------


def _cells(row: LeaseRow) -> list[str | Cell]:
    return [
        row.group,
        row.topic,
        row.place,
        row.holder,
        number(row.epoch),
        Cell(row.seen, _STYLES.get(row.state, "dim")),
        number(row.next),
        lag_cell([row]),
    ]


def _pause_rows(view: View, groups: list[GroupRow]) -> list[list[str | Cell]]:
    """One row for each pause, with the end in the last coordination partition."""
    rows: list[list[str | Cell]] = []
    now_ms = view.clock.now_ms()
    for pause in [pause for each in groups for pause in each.pauses]:
        left = Cell("over", "red") if pause.is_over else Cell(span(pause.left_ms))
        parts = ", ".join(map(str, sorted(pause.where)))
        everywhere = "everywhere" if len(pause.where) == len(view.worlds) else f"partition(s) {parts} of the log"
        until = Cell(time_text(pause.expires), short=clock_text(pause.expires, now_ms))
        rows.append([pause.group, pause.client, until, left, everywhere])
    return rows


def _notes(view: View, groups: list[GroupRow]) -> list[str]:
    """Caveats of the table."""
    notes = []
    if view.clock.source == "local" and any(row.silence_ms is not None for each in groups for row in each.leases):
        notes.append(
            "silence is by this machine's clock: no record was written meanwhile to learn the broker's from. "
            "--tick asks the broker."
        )
    if view.clock.local_is_behind_ms > 1_000:
        notes.append(f"this machine's clock is at least {span(view.clock.local_is_behind_ms)} behind the broker's.")
    mixed = [text for each in groups for text in mixed_texts(each)]
    return [*notes, *mixed, *view.silence.notes(), *view.notes_on_upgrades()]


def _json(row: LeaseRow) -> dict[str, object]:
    return {
        "partition": row.cp,
        "group": row.group,
        "topic": row.topic,
        "topic_partition": row.partition,
        "kind": row.kind,
        "keys": [row.lo, row.hi],
        "goes_to": row.goes_to,
        "holder": None if row.client is None else {"client": row.client, "instance": row.instance},
        "epoch": row.epoch,
        "heartbeat_interval_ms": row.heartbeat_interval_ms,
        "last_beat": row.last_beat,
        "state": row.state,
        "silence_ms": row.silence_ms,
        "outage_ms": row.stood_ms,
        "next": row.next,
        "granted": row.granted,
        "log_end": row.log_end,
        "lag": row.lag,
        "open_messages": row.open_messages,
        "parked": row.parked,
        "sharers": [{"client": x.client_id, "instance": x.instance_id, "epoch": x.epoch} for x in row.sharers],
        "position_lost": row.lost,
        "stuck": row.stuck or None,
        "held_back": row.held_back or None,
        "verdict": row.verdict,
    }
