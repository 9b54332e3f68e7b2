"""`status`: groups at a glance, the partitions of one, or the members; `lag`; `check`: is all well?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from shlex import quote
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.connection import catch_up, connected, sizes_of, view_of
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options, complete_group, span_option
from kafka_marshal.cli.output import Cell, Column, Field, Rows, is_terminal, print_json, say, say_warning
from kafka_marshal.cli.watch import Picture, Section, deleted_notes, lag_cell, show, stuck_section
from kafka_marshal.observe.checkpoints import as_of_text, checkpoints_json
from kafka_marshal.observe.problems import (
    KINDS,
    Problem,
    crowded_text,
    mixed_texts,
    open_problems,
    pause_text,
    problems_of,
    too_few,
)
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
from kafka_marshal.observe.text import clock_text, count, no_group, span, time_text

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from kafka_marshal.observe.log_size import Sizes
    from kafka_marshal.observe.view import LiveView

#: The most omitted groups that are named.
_LISTED = 5

_PROBLEMS = Rows[Problem](
    Field("group", column=Column("in group", fold=True)),
    "kind amount",
    Field("partitions", lambda row: [{"topic": x.topic, "partition": x.partition} for x in row.partitions]),
    Field("text", column=Column("what is wrong", fold=True)),
)

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
    view: LiveView, sizes: Sizes, group: str | None, members: bool, everything: bool, *, digests: bool = False
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
            "groups": [{**rows.json(each), **checkpoints_json(each.checkpoints)} for each in groups],
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


def _first(groups: list[GroupRow]) -> str:
    return ", ".join(each.group for each in groups[:_LISTED]) + (", …" if len(groups) > _LISTED else "")


def _headline(groups: list[GroupRow], folded: list[GroupRow]) -> str:
    rows = [row for each in groups for row in each.leases]
    workers = sum(each.worker_count for each in groups)
    text = (
        f"{count(len(groups), 'group')}, {count(partitions_of(rows), 'partition')}, {partitions_held(rows):,} held "
        f"by {count(workers, 'worker')}"
    )
    if folded:
        text += f"; nobody seen for a day in {count(len(folded), 'group')} ({_first(folded)}): --all lists them"
    return text


# -- groups --------------------------------------------------------------------------------------------------


def _groups(problems: dict[str, list[Problem]]) -> Rows[GroupRow]:
    """Groups, with these problems of each."""
    return Rows[GroupRow](
        Field("group", column=Column("group", fold=True, least=8)),
        Field("kind", lambda row: row.kind or None, Column("kind", from_width=95)),
        "state generation strategy strategy_set",
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
        "open_messages parked",
        Field("positions_lost", lambda row: len(row.lost)),
        Field("stuck", lambda row: len(row.stuck)),
        Field(
            "no_progress_ms",
            "behind_ms",
            Column("no progress", right=True, from_width=75),
            lambda row: "-" if row.behind_ms is None else span_text(row.behind_ms, row.is_behind_longer),
        ),
        "no_progress_at_least=is_behind_longer paused=is_paused silence_ms=silent_ms",
        Field("all_silent_since", lambda row: None if row.all_silent is None else row.all_silent.since),
        Field("problems", lambda row: [_PROBLEMS.json(problem) for problem in problems[row.group]]),
        Field(
            "",
            column=Column("state", fold=True, least=14),
            cell=lambda row: _group_state(row, problems[row.group]),
        ),
    )


def _group_section(
    view: LiveView, groups: list[GroupRow], rows: Rows[GroupRow], problems: dict[str, list[Problem]]
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
    rows = [_PROBLEMS.cells(problem) for each in groups for problem in problems[each.group]]
    return Section(_PROBLEMS.columns, rows, None)


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
    Field("partitions", _held(lambda row: sum(not x.is_lock for x in row.leases), 0), Column("partitions", right=True)),
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


def _member_section(view: LiveView, groups: list[GroupRow]) -> Section:
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
    "heartbeat_interval_ms last_beat",
    Field("state", column=Column("seen"), cell=lambda row: Cell(row.seen, _STYLES.get(row.state, "dim"))),
    "silence_ms outage_ms=stood_ms",
    Field("next", column=Column("next", right=True)),
    "granted log_end",
    Field("lag", column=Column("lag", right=True), cell=lambda row: lag_cell([row])),
    "open_messages parked",
    Field(
        "sharers",
        lambda row: [{"client": x.client_id, "instance": x.instance_id, "epoch": x.epoch} for x in row.sharers],
    ),
    Field("position_lost", "lost"),
    Field("stuck", lambda row: row.stuck or None),
    Field("held_back", lambda row: row.held_back or None),
    "verdict",
)


def _pause_rows(view: LiveView, groups: list[GroupRow]) -> list[list[str | Cell]]:
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


def _notes(view: LiveView, groups: list[GroupRow]) -> list[str]:
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
    mixed += [
        f"group {each.group} has strategy {each.strategy_set} by a setting, whatever its members' programs name "
        f"(kafka-marshal group {quote(each.group)} --unset strategy)."
        for each in groups
        if each.strategy_set
    ]
    return [*notes, *mixed, *view.silence.notes(), *view.notes_on_upgrades()]


# -- lag -----------------------------------------------------------------------------------------------------

_LAGS = Rows[LeaseRow](
    Field("group", column=Column("group", pipes_only=True)),
    Field("topic", column=Column("topic", fold=True)),
    Field("partition", column=Column("partition", right=True), cell=lambda row: row.place),
    Field("keys", lambda row: [row.lo, row.hi]),
    Field("claimed", lambda row: row.cp is not None),
    Field("holder", "client", Column("holder", fold=True, least=8), lambda row: _holder(row)),
    "log_start",
    Field("log_end", column=Column("log end", right=True, from_width=65)),
    Field("next", column=Column("next", right=True)),
    Field("done_beyond", "beyond", Column("beyond", right=True, from_width=80)),
    Field("in_flight", column=Column("in flight", right=True, from_width=80)),
    Field("lag", column=Column("lag", right=True), cell=lambda row: lag_cell([row])),
    "open_messages parked deleted position_lost=lost",
    Field("stuck", lambda row: row.stuck or None),
    Field("held_back", lambda row: row.held_back or None),
    Field("messages_per_second", "speed", Column("msg/s", right=True), lambda row: _speed(row.speed)),
)


@command()
@click.option("--group", help="Only this group.", shell_complete=complete_group)
@click.option(
    "--window", callback=span_option, default="30s", metavar="SPAN", help="Speed is measured over this (30s)."
)
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, metavar="SECONDS", help="With --watch (1).")
@click.pass_obj
def lag(options: Options, group: str | None, window: int, watch: bool, interval: float) -> int:
    r"""How far each group is behind, and how fast it goes, for every partition and in all.

    \b
    log end      the end of the partition's log: the next message's offset
    next         the offset to read next: everything below it is done, or set aside (Kafka's CURRENT-OFFSET)
    beyond       messages done beyond that, out of order
    in flight    messages not done with later ones done (at least; the latest ones in flight don't show)
    lag          messages in the log that are neither done nor set aside; "position lost" if the position lies beyond
                 its end, or the topic was recreated. A total with a + omits what is not known. Of a partition that is
                 shared by key (3 (0-33%): the first third) each owner's average share
    msg/s        messages handled by the holder over the last --window of log time; -: not known

    Of a group that takes checkpoints all this is as of the newest, whose age is shown: what was done since counts with
    the next. Its members' metrics have the present lag.

    Partitions that the group never claimed are listed, too; those without progress, with the reason, below
    (see status). At-most-once messages count as done when they are delivered.

    \b
    Exit status: 0; 1 a position is lost, the group is unknown, or the log needs a newer release; 3 no Kafka.
    """
    with connected(options) as cluster:
        return show(
            cluster,
            options,
            lambda view: _lag_picture(view, group),
            interval=interval if watch else None,
            window_ms=window,
            listen=False,
        )


def _lag_picture(view: LiveView, group: str | None) -> Picture:
    view.look_at_data(None if group is None else [group])
    groups = view.groups(group)
    rows = [row for each in groups for row in each.leases]
    upgrades = view.notes_on_upgrades()
    notes = [*deleted_notes(groups), *upgrades]
    if group is not None and not groups:
        notes.append(no_group(group, view.names()))
    totals = {each.group: _total(each) for each in groups}
    sections = []
    for each in groups:
        of_group = sorted(each.leases, key=lambda row: row.badness) if view.watched else each.leases
        cells = [_LAGS.cells(row) for row in of_group]
        cells.insert(0 if view.watched else len(cells), _total_cells(each, totals[each.group]))
        sections.append(Section(_LAGS.columns, cells, None, _behind_text(each, totals[each.group])))
    sections.append(stuck_section(rows))
    return Picture(
        headline=f"{count(len(groups), 'group')}, {count(partitions_of(rows), 'partition')}",
        sections=sections if groups else [Section(_LAGS.columns, [], "no leases")],
        notes=notes,
        json={
            "topic": view.replica.topic,
            "partitions": [_LAGS.json(row) for row in rows],
            "totals": [{"group": name, **figures} for name, figures in totals.items()],
            "notes": notes,
        },
        status=NO if upgrades or any(row.lost for row in rows) or (group is not None and not groups) else DONE,
    )


def _sum(values: Iterable[int | float | None]) -> float | None:
    """The sum of the known values; None: none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _total(group: GroupRow) -> dict[str, float | None]:
    rows = group.leases
    speed = _sum(row.speed for row in rows)
    behind = group.lag
    return {
        "partitions": partitions_of(rows),
        "done_beyond": sum(row.beyond for row in rows),
        "in_flight": sum(row.in_flight for row in rows),
        "lag": behind,
        "open_messages": sum(row.open_messages for row in rows),
        "parked": sum(row.parked for row in rows),
        "messages_per_second": speed,
        "positions_lost": len(group.lost),
        "stuck": len(group.stuck),
        "seconds_left": behind / speed if speed and behind is not None else None,
        "newest": None if group.checkpoints is None else group.checkpoints.newest,
        "age_ms": None if group.checkpoints is None else group.checkpoints.age_ms,
    }


def _behind_text(group: GroupRow, total: dict[str, float | None]) -> str:
    behind, speed, left = total["lag"], total["messages_per_second"], total["seconds_left"]
    known = [row for row in group.leases if row.lag is not None]
    text = f"{group.group}: " + (f"{count(group.known_lag, 'message')} behind" if known else "lag is not known")
    if 0 < len(known) < len(group.leases):
        text += f" in {count(len(known), 'partition')}, not known of {len(group.leases) - len(known):,}"
    if speed is not None:
        text += f", {speed:,.0f}/s"
    if total["positions_lost"]:
        text += f", {count(int(total['positions_lost']), 'position')} lost"
    if total["parked"]:
        text += f", {total['parked']:,.0f} set aside"
    if total["stuck"]:
        text += f", {count(int(total['stuck']), 'partition')} stuck"
    if group.checkpoints is not None:
        text += f", {as_of_text(group.checkpoints.newest, group.checkpoints.age_ms)}"
    if left is not None and behind:
        text += f", through in {span(left * 1000)} if nothing comes in"
    return text


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _holder(row: LeaseRow) -> Cell:
    return Cell(row.state, "yellow") if row.cp is None else Cell(row.holder, "dim" if row.client is None else "")


def _total_cells(group: GroupRow, total: dict[str, float | None]) -> list[str | Cell]:
    values = [total["done_beyond"], total["in_flight"]]
    cells: list[str | Cell] = [
        Cell(text, "bold") for text in (group.group, "total", "", "", "", "", *(f"{value:.0f}" for value in values))
    ]
    return [*cells, lag_cell(group.leases, "bold"), Cell(_speed(total["messages_per_second"]), "bold")]


# -- check ---------------------------------------------------------------------------------------------------


@command()
@click.option("--group", help="Only this group.", shell_complete=complete_group)
@click.option("--max-lag", type=click.IntRange(min=0), metavar="N", help="The largest lag that a group may have.")
@click.option("--max-silence", callback=span_option, metavar="SPAN", help="The longest silence of a holder (30s, 2m).")
@click.option(
    "--max-checkpoint-age",
    "max_cut",
    callback=span_option,
    metavar="SPAN",
    help="The oldest that the last cut of a piece with messages waiting may be (5m).",
)
@click.option(
    "--max-pause",
    callback=span_option,
    default="5m",
    metavar="SPAN",
    help="The longest that a group with messages waiting may be paused (5m).",
)
@click.option("--max-parked", type=click.IntRange(min=0), metavar="N", help="The most messages of a group set aside.")
@click.option(
    "--max-parked-age", callback=span_option, metavar="SPAN", help="The longest that a message may be set aside (2d)."
)
@click.option("--max-log", type=click.IntRange(min=0), metavar="N", help="The most records that the log may have.")
@click.option(
    "--min-members",
    "least",
    multiple=True,
    callback=lambda c, p, v: _least(c, p, v),
    metavar="[GROUP=]N",
    help="The least live members of each group, or of this one (repeatable).",
)
@click.pass_obj
def check(
    options: Options,
    group: str | None,
    max_lag: int | None,
    max_silence: int | None,
    max_cut: int | None,
    max_parked: int | None,
    max_parked_age: int | None,
    max_log: int | None,
    least: dict[str, int],
    max_pause: int,
) -> int:
    r"""Is all well? Exit status 0, or 1 with the reasons, one a line. For cron, probes and alerts.

    \b
    position lost  a position is not in the log that is there (see release-group)
    no topic       the topic of a position was deleted, and not recreated
    stuck          the next message can't be read (see skip), or its partition has no leader
    deleted        retention deleted messages that were not done; until the position is beyond them
    unsaved        members can save no state: their store refuses or hangs. Leave them running, and mend it
    stuck key      one message blocks a partition, while its worker handles others
    hung           a worker beats and has messages waiting, but reports no progress (3 heartbeat intervals, 10 s); in a
                   group that takes checkpoints: although one was complete since
    old cut        messages of a piece wait, and it was not handed in for the last three checkpoints that are kept, or
                   for --max-checkpoint-age: a handler takes longer than drain, or its state can't be saved
    stuck try      messages have waited for their next try for a minute, or have failed ten times: their handler hangs,
                   or next to all fails, or they fail for ever
    stuck batch    a worker of a shared partition beats and has had a batch for a minute, and 3 heartbeat intervals
    holes          a partition has more than half of the open messages that it may have (10,000)
    parked         a message is set aside as CRASHED (workers died with it, or did not end); or more are set aside
                   than --max-parked, or for longer than --max-parked-age, or that can't be known (pruned)
    all silent     the members of a group fell silent at the same moment, with all of their log: check Kafka first;
                   this takes the place of what is said of each of them
    gone           a worker that holds partitions is silent for more than 2 of its heartbeat intervals (its session)
    no holder      a partition without a live holder; not in a paused group, nor in a group without workers that has
                   done everything
    paused         for longer than --max-pause, with messages waiting; a shorter pause is a warning on standard error
    pause over     a pause whose time has passed, but that no record has ended
    lag, silence   above --max-lag (the lag of the whole group), --max-silence
    members        fewer are alive than --min-members: they hold a partition, are members, or wait for a partition

    A log that its members do not keep as short as its topic asks for (see topic), or of more than 50,000,000 records,
    is a warning on standard error; with --max-log its size is a reason, too.

    Groups without a live worker for a day are omitted and counted, unless --group or --min-members names them. Nothing
    is written.

    \b
    Exit status: 0 all is well; 1 it is not, or the group is unknown; 2 wrong use; 3 no Kafka.
    """
    with connected(options) as cluster, view_of(cluster, options) as view:
        catch_up(view)
        view.learn_time()
        view.look_at_data(None if group is None else [group])
        found_all = view.groups(group)
        left_out = [each for each in found_all if each.is_dead and each.group not in {group, *least}]
        groups = [each for each in found_all if each not in left_out]
        known, notes = view.names(), [*view.notes_on_upgrades(), *view.notes_on_clocks()]
        late = view.silence.notes()
        size = sizes_of(cluster).read(view, sum(each.living for each in found_all))
        of_open = {
            each.group: open_problems(cluster, view, each, max_parked, max_parked_age)
            for each in groups
            if any(row.open for row in each.leases)
        }
    found = [
        problem
        for each in groups
        for problem in (
            *problems_of(each, max_lag, max_silence, least.get(each.group, least.get("", 0)), max_cut, max_pause),
            *of_open.get(each.group, ()),
        )
    ]
    found.sort(key=lambda problem: problem.kind != "stuck_try")  # failing tries explain the others
    found += _missing(groups, group, least)
    reasons = [*notes, *(f"{problem.group}: {problem.text}".removeprefix(": ") for problem in found)]
    if group is not None and not groups:
        reasons.append(no_group(group, known))
    if max_log is not None and size.records > max_log:
        reasons.append(f"the log has {count(size.records, 'record')}, more than {max_log:,}: {size.text}")
    shorter = [(each, pause) for each in groups for pause in each.pauses if not pause.is_over]
    named = {problem.group for problem in found if problem.kind == "paused"}
    pauses = [f"{each.group}: {pause_text(each, pause)}" for each, pause in shorter if each.group not in named]
    mixed = [text for each in groups for text in mixed_texts(each)]
    warnings = [*late, *pauses, *mixed, *size.warnings()]
    if options.json:
        print_json(
            {
                "topic": options.topic,
                "ok": not reasons,
                "reasons": reasons,
                "problems": [_PROBLEMS.json(problem) for problem in found],
                "groups": [each.group for each in groups],
                "left_out": [each.group for each in left_out],
                "log": size.json,
                "warnings": warnings,
            }
        )
    else:
        for reason in reasons:
            say(reason)
        if not reasons:
            say(_all_is_well(groups) + (f"; {_left_out_text(left_out)}" if left_out else ""))
        elif left_out:
            say_warning(_left_out_text(left_out))
        for warning in warnings:
            say_warning(warning)
    return NO if reasons else DONE


def _least(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    """[GROUP=]N as group → N; "": every group that is not named."""
    found: dict[str, int] = {}
    for text in values:
        name, _, number = text.rpartition("=")
        if not (number.isascii() and number.isdigit()):
            raise click.BadParameter(f"{text!r} is not of the form N or GROUP=N", context, parameter)
        found[name] = int(number)
    return found


def _missing(groups: list[GroupRow], group: str | None, least: dict[str, int]) -> list[Problem]:
    """Missing members of groups that the log does not know, or of any group."""
    known = {each.group for each in groups}
    wanted = {name: number for name, number in least.items() if name and group in (None, name)}
    found = [too_few(name, 0, number) for name, number in sorted(wanted.items()) if name not in known and number]
    if not groups and not wanted and group is None and least.get("", 0):
        found.append(too_few("", 0, least[""]))
    return found


def _left_out_text(left_out: list[GroupRow]) -> str:
    """Omitted groups, which may have messages waiting."""
    text = f"left out: {count(len(left_out), 'group')} of which nobody was seen for a day ({_first(left_out)})"
    waiting = sum(each.known_lag for each in left_out)
    return text + (f", with {count(waiting, 'message')} waiting" if waiting else "")


def _all_is_well(groups: list[GroupRow]) -> str:
    if not groups:
        return "ok: the log knows no group that was at work within a day"
    partitions = partitions_of(row for each in groups for row in each.leases)
    behind = sum(each.known_lag for each in groups)
    return f"ok: {count(len(groups), 'group')}, {count(partitions, 'partition')}, {count(behind, 'message')} behind"
