"""`status`: groups at a glance, then the partitions of one, or the members."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.check import problem_json
from kafka_marshal.cli.connection import connected, sizes_of
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.names import complete_group
from kafka_marshal.cli.output import Cell, Column, Field, Rows, is_terminal
from kafka_marshal.cli.watch import Picture, Section, deleted_notes, lag_cell, show, stuck_section
from kafka_marshal.observe.checkpoints import barrier_json
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
    span_text,
)
from kafka_marshal.observe.text import clock_text, count, span, time_text

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from kafka_marshal.observe.log_size import Sizes
    from kafka_marshal.observe.view import View

_PROBLEMS = (Column("in group", fold=True), Column("what is wrong", fold=True))

_STYLES = {"seen": "green", "silent": "yellow", "gone": "bold red", "never claimed": "yellow", "not assigned": "yellow"}

_PAUSES = (
    Column("paused group", fold=True),
    Column("by", fold=True),
    Column("until"),
    Column("left", right=True),
    Column("in", fold=True),
)


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
    rows, notes = _groups(problems), _notes(view, groups)
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
        leases = [row for each in groups for row in each.leases]
        if view.watched:
            leases.sort(key=lambda row: row.badness)
        cells = [_LEASES.cells(row) for row in leases]
        sections = [Section(_LEASES.columns, cells, "no leases"), stuck_section(leases)]
    else:
        sections = [_group_section(view, shown, rows, problems), _problem_section(shown, problems)]
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
            "groups": [rows.json(each) for each in groups],
            "members": [_MEMBERS.json(row) for each in groups for row in chain[_Row](each.members, each.idle)],
            "leases": [_LEASES.json(row) for each in groups for row in each.leases if row.cp is not None],
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


def _groups(problems: dict[str, list[Problem]]) -> Rows[GroupRow]:
    """Groups, with these problems of each."""
    return Rows[GroupRow](
        Field("group", column=Column("group", fold=True, least=8)),
        Field("kind", lambda row: row.kind or None, Column("kind", from_width=95)),
        "state",
        "generation",
        "strategy",
        Field("members", "worker_count", Column("members", right=True)),
        Field("members_gone", lambda row: sum(member.state == "gone" for member in row.members)),
        Field(
            "partitions",
            lambda row: partitions_of(row.leases),
            Column("partitions", right=True),
            lambda row: f"{partitions_held(row.leases)}/{partitions_of(row.leases)}",
        ),
        Field("held", lambda row: partitions_of([lease for lease in row.leases if lease.held])),
        Field("lag", column=Column("lag", right=True), cell=lambda row: lag_cell(row.leases)),
        "open_messages",
        "parked",
        Field("positions_lost", lambda row: len(row.lost)),
        Field("stuck", lambda row: len(row.stuck)),
        Field(
            "no_progress_ms",
            "behind_ms",
            Column("no progress", right=True, from_width=75),
            lambda row: "-" if row.behind_ms is None else span_text(row.behind_ms, row.is_behind_longer),
        ),
        Field("no_progress_at_least", "is_behind_longer"),
        Field("paused", "is_paused"),
        Field("silence_ms", "silent_ms"),
        Field("all_silent_since", lambda row: None if row.all_silent is None else row.all_silent.since),
        Field("problems", lambda row: [problem_json(problem) for problem in problems[row.group]]),
        Field("newest", lambda row: getattr(row.checkpoints, "newest", None)),
        Field("age_ms", lambda row: getattr(row.checkpoints, "age_ms", None)),
        Field("barrier", lambda row: barrier_json(getattr(row.checkpoints, "barrier", None))),
        Field(
            "",
            column=Column("state", fold=True, least=14),
            cell=lambda row: _group_state(row, problems[row.group]),
        ),
    )


def _group_section(
    view: View, groups: list[GroupRow], rows: Rows[GroupRow], problems: dict[str, list[Problem]]
) -> Section:
    if view.watched:
        groups = sorted(groups, key=lambda each: (-len(problems[each.group]), -(each.lag or 0)))
    return Section(rows.columns, [rows.cells(each) for each in groups], "no groups")


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


# -- members -------------------------------------------------------------------------------------------------

_Row = MemberRow | WorkerRow


def _held(read: Callable[[MemberRow], object], otherwise: object = None) -> Callable[[_Row], object]:
    """What one that holds partitions has; otherwise: of one that holds none."""
    return lambda row: read(row) if isinstance(row, MemberRow) else otherwise


def _heard(row: _Row) -> WorkerRow | None:
    return row.heard if isinstance(row, MemberRow) else row


def _evicted(row: _Row) -> WorkerRow | None:
    """Its eviction; None: it was not evicted."""
    run = _heard(row)
    return run if run is not None and run.evictor else None


def _seen(row: _Row) -> Cell:
    if isinstance(row, WorkerRow):
        return Cell(f"{span(row.silence_ms)} ago", "dim")
    state = row.state
    silence = row.leases[0] if state == "unknown" else min(row.leases, key=lambda each: each.silence_ms or 0)
    return Cell(silence.seen, _STYLES.get(state, ""))


def _progress(row: _Row) -> Cell:
    if isinstance(row, WorkerRow):
        return Cell(row.doing, "yellow")
    if row.is_hung:
        return Cell(row.hung_text, "bold red")
    if row.is_still:
        return Cell("waits for a checkpoint of all", "yellow")
    if row.heard is not None and row.heard.evictor:
        return Cell(evicted_text(row.heard), "yellow")
    if row.asked_ms is not None:
        return Cell(f"asked to hand over {span(row.asked_ms)} ago", "yellow")
    if why := next((each.stuck.partition(":")[0] for each in row.leases if each.stuck), ""):
        return Cell(why, "red")
    return Cell("-" if row.state != "seen" else "ok" if row.lag else "nothing to do", "dim")


_MEMBERS = Rows[_Row](
    Field("group", column=Column("group", fold=True, least=8)),
    Field("client", column=Column("member", fold=True, least=8)),
    "instance",
    Field("host", lambda row: getattr(row.runs_at, "host", None), Column("host", fold=True, from_width=70)),
    Field("pid", lambda row: getattr(row.runs_at, "pid", None), Column("pid", right=True, from_width=70)),
    Field("release", lambda row: getattr(row.runs_at, "release", None), Column("release", from_width=90)),
    Field("partitions", _held(lambda row: len(row.leases), 0), Column("partitions", right=True)),
    Field(
        "lag",
        _held(lambda row: row.lag),
        Column("lag", right=True),
        lambda row: lag_cell(row.leases) if isinstance(row, MemberRow) else "-",
    ),
    Field("state", _held(lambda row: row.state, "idle"), Column("seen"), _seen),
    "silence_ms",
    Field("outage_ms", _held(lambda row: row.last_heard.stood_ms, 0)),
    Field("no_progress_ms", _held(lambda row: row.no_progress_ms)),
    Field("no_progress_at_least", _held(lambda row: row.is_still_longer, False)),
    Field("hung", _held(lambda row: row.is_hung, False)),
    Field("asked_to_hand_over_ms", "asked_ms"),
    Field("waits", lambda row: isinstance(row, WorkerRow) and row.is_waiting),
    Field("evicted_by", lambda row: getattr(_evicted(row), "evictor", None)),
    Field("evicted_ms", lambda row: getattr(_evicted(row), "evicted_ms", None)),
    Field("doing", lambda row: row.doing if isinstance(row, WorkerRow) else None),
    Field("", column=Column("progress", fold=True, least=10), cell=_progress),
)


def _member_section(view: View, groups: list[GroupRow]) -> Section:
    members = [member for each in groups for member in each.members]
    if view.watched:
        members.sort(key=lambda member: member.badness)
    rows = [_MEMBERS.cells(row) for row in chain[_Row](members, *(each.idle for each in groups))]
    return Section(_MEMBERS.columns, rows, "no worker holds anything")


# -- partitions ----------------------------------------------------------------------------------------------

_LEASES = Rows[LeaseRow](
    Field("partition", "cp"),
    Field("group", column=Column("group", pipes_only=True)),
    Field("topic", column=Column("topic", fold=True)),
    Field("topic_partition", "partition", Column("partition", right=True), lambda row: row.place),
    "kind",
    Field("keys", lambda row: [row.lo, row.hi]),
    "goes_to",
    Field(
        "holder",
        lambda row: None if row.client is None else {"client": row.client, "instance": row.instance},
        Column("holder", fold=True, least=8),
        lambda row: row.holder,
    ),
    Field("epoch", column=Column("epoch", right=True, from_width=75)),
    "heartbeat_interval_ms",
    "last_beat",
    Field("state", column=Column("seen"), cell=lambda row: Cell(row.seen, _STYLES.get(row.state, "dim"))),
    "silence_ms",
    Field("outage_ms", "stood_ms"),
    Field("next", column=Column("next", right=True)),
    "granted",
    "log_end",
    Field("lag", column=Column("lag", right=True), cell=lambda row: lag_cell([row])),
    "open_messages",
    "parked",
    Field(
        "sharers",
        lambda row: [{"client": x.client_id, "instance": x.instance_id, "epoch": x.epoch} for x in row.sharers],
    ),
    Field("position_lost", "lost"),
    Field("stuck", lambda row: row.stuck or None),
    Field("held_back", lambda row: row.held_back or None),
    "verdict",
)


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
