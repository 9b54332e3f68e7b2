"""`groups` and `group`: all groups, and one group with its members, pieces, settings and rebalances."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from shlex import quote
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.change import carry_out, yes_option
from kafka_marshal.cli.connection import admin_of, catch_up, connected, id_argument, viewing
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import complete_group
from kafka_marshal.cli.output import Cell, Column, Field, Rows, say
from kafka_marshal.cli.watch import Picture, Section, deleted_notes, lag_cell, print_picture, show, stuck_section
from kafka_marshal.instance import Instance
from kafka_marshal.observe.checkpoints import as_of_text, barrier_text, checkpoints_json
from kafka_marshal.observe.problems import open_text, problems_of
from kafka_marshal.observe.rows import (
    GroupRow,
    LeaseRow,
    partitions_held,
    partitions_of,
    place_text,
    seen_text,
    state_of,
)
from kafka_marshal.observe.text import clock_text, count, near, no_group, span, time_text

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from kafka_marshal.observe.view import LiveView
    from rationalizer import Group, Member, Settings
    from rationalizer.groups.history import Moved, Rebalance
    from rationalizer.history import Span

_SETTINGS = (Column("setting"), Column("value", fold=True))

_STYLES = {"seen": "green", "silent": "yellow", "gone": "bold red"}

#: The most moves in a table; JSON has all.
_MOVES_LISTED = 20


@command()
@click.pass_obj
def groups(options: Options) -> int:
    r"""All groups that the log knows, of both kinds, one row each. One of them: kafka-marshal group NAME.

    \b
    kind         claimed: its workers claim leases; coordinated: its members have generations (docs/operating.md)
    state        of a coordinated group STEADY, PREPARE_FOR_REBALANCE (a piece is to be released, or a member is
                 silent for longer than its session), READY (no members)
    members      workers that hold a partition or are members, and are not gone
    partitions   held / of all topics that the group reads

    \b
    Exit status: 0; 1 a part of the log needs a newer release; 3 no Kafka.
    """
    with connected(options) as cluster:
        return show(cluster, options, _all_groups)


def _all_groups(view: LiveView) -> Picture:
    view.look_at_data()
    found, notes = view.groups(), view.notes_on_upgrades()
    return Picture(
        headline=count(len(found), "group"),
        sections=[Section(_GROUPS.columns, [_GROUPS.cells(each) for each in found], "no groups")],
        notes=notes,
        json={
            "topic": view.replica.topic,
            "groups": [{**_GROUPS.json(each), "paused": each.is_paused} for each in found],
            "notes": notes,
        },
        status=NO if notes else DONE,
    )


def _state(row: GroupRow) -> str:
    words = [*([row.state] if row.state else []), *(["paused"] if row.is_paused else [])]
    return ", ".join(words) or "-"


_GROUPS = Rows[GroupRow](
    Field("group", column=Column("group", fold=True, least=8)),
    Field("kind", lambda row: row.kind or None, Column("kind")),
    Field("state", column=Column("state", fold=True, least=8), cell=_state),
    Field("generation", column=Column("generation", right=True, from_width=95)),
    Field("strategy", column=Column("strategy", from_width=95), cell=lambda row: row.strategy_text or "-"),
    "strategy_set",
    Field("members", "worker_count", Column("members", right=True)),
    Field(
        "partitions",
        lambda row: partitions_of(row.leases),
        Column("partitions", right=True),
        lambda row: f"{partitions_held(row.leases)}/{partitions_of(row.leases)}",
    ),
    Field("held", lambda row: partitions_of(lease for lease in row.leases if lease.held)),
    Field("lag", column=Column("lag", right=True), cell=lambda row: lag_cell(row.leases)),
    "open_messages parked",
)


# -- one group -----------------------------------------------------------------------------------------------


@command()
@click.argument("name", callback=id_argument, shell_complete=complete_group)
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    callback=lambda c, p, v: _settings(c, p, v),
    help="Change a setting of a coordinated group (repeatable); none of its members restarts.",
)
@click.option(
    "--unset",
    metavar="KEY",
    multiple=True,
    callback=lambda c, p, v: _defaults(c, p, v),
    help="Let a setting be what it is by default (repeatable).",
)
@click.option(
    "--rebalances", type=click.IntRange(min=0), default=5, metavar="N", help="Show the last N rebalances (5)."
)
@yes_option("With --set or --unset: don't ask whether to make a group that is not there.")
@click.pass_obj
def group(options: Options, name: str, changes: dict[str, object], unset: dict[str, object], rebalances: int) -> int:
    r"""One group: its state, members, pieces, lag, settings and last rebalances; or set what it allows (--set).

    \b
    owner        a → b: a finishes its messages in flight, then b gets it
    epoch        the generation since which the owner has it: the fencing token
    partition    3 (0-33%): the first third of the keys, if more members than partitions share a topic
    nobody       without an owner: from the last owner's last heartbeat until the next owner had the piece

    \b
    --set accept_individual_commit=true|false      single messages may be committed out of order
    --set accept_range_fetch=TOPIC,TOPIC           topics whose partitions may be shared by key (empty: none)
    --set max_session_timeout_ms=1800000           members with a longer session are refused
    --set max_individual_commits=60000             the most intervals done out of order in a partition
    --set strategy=sticky|range|roundrobin         the group's strategy, whatever the members' programs name
    --unset strategy                               all members must name the same one again

    Rebalances are shown as far as the log was read: back to the last snapshots, some 10,000 records.

    \b
    Exit status: 0; 1 the group is unknown, or a claimed one (--set, --unset); 2 wrong use; 3 no Kafka.
    """
    if both := sorted(changes.keys() & unset.keys()):
        raise click.UsageError(f"--set {both[0]} and --unset {both[0]} exclude each other.")
    if changes or unset:
        return _configure(options, name, {**changes, **unset})
    with viewing(options) as view:
        view.fold.keep = max(1, rebalances)
        view.follow_all()
        catch_up(view)
        view.learn_time()
        kept = view.fold.assignments.get(name) if rebalances else None
        return print_picture(_one_group(view, name, [] if kept is None else kept.rebalances), options)


def _settings(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, object]:
    """KEY=VALUE as settings."""
    found: dict[str, object] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} is not of the form KEY=VALUE", context, parameter)
        default = _defaults(context, parameter, (key,))[key]
        if default is None:
            found[key] = value
        elif isinstance(default, bool):
            if value not in ("true", "false"):
                raise click.BadParameter(f"{key} is true or false, not {value!r}", context, parameter)
            found[key] = value == "true"
        elif isinstance(default, int):
            if not (value.isascii() and value.isdigit()):
                raise click.BadParameter(f"{key} is a number, not {value!r}", context, parameter)
            found[key] = int(value)
        else:
            found[key] = tuple(topic for topic in value.split(",") if topic)
    return found


def _defaults(context: click.Context, parameter: click.Parameter, keys: tuple[str, ...]) -> dict[str, object]:
    """What these settings are by default."""
    from rationalizer import Settings

    defaults = {field.name: getattr(Settings(), field.name) for field in fields(Settings)}
    for key in keys:
        if key not in defaults:
            hint = near(key, defaults) or f"; there are {', '.join(defaults)}."
            raise click.BadParameter(f"a group has no setting {key!r}{hint}", context, parameter)
    return {key: defaults[key] for key in keys}


def _configure(options: Options, name: str, changes: dict[str, object]) -> int:
    from kafka_marshal.observe.words import setting_text

    def do() -> Settings:
        with admin_of(options) as admin:
            return admin.configure_group(name, **changes)

    def say_settings(found: Settings, _: bool) -> None:
        for key, value in _settings_json(found).items():
            say(f"{key}={setting_text(tuple(value) if isinstance(value, list) else value)}")

    with viewing(options) as view:
        view.catch_up(lambda done, of_all: None)
        known = view.names()
    shows = f"kafka-marshal group {quote(name)}{options.reach()}"
    return carry_out(
        options,
        question="" if name in known else f"{no_group(name, known)} Make it, as a coordinated group?",
        do=do,
        if_interrupted=f"The settings may have been written: {shows} shows it.",
        say=say_settings,
        json=lambda found, _: {"group": name, "settings": _settings_json(found)},
    )


def _settings_json(settings: Settings) -> dict[str, object]:
    from rationalizer import Settings

    found = {field.name: getattr(settings, field.name) for field in fields(Settings)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


@dataclass(frozen=True, slots=True)
class _Member:
    """One member, of either kind of group."""

    client: str
    instance: str
    silence_ms: int
    #: When others may take what it holds: its session, or two heartbeat intervals (ms).
    session_ms: int
    leases: list[LeaseRow]
    #: As the log has it, of a coordinated group.
    found: Member | None = None

    @property
    def runs_at(self) -> Instance | None:
        """Host, process and release; None if its instance_id does not contain them."""
        return Instance.parse(self.instance)

    @property
    def state(self) -> str:
        half = (self.session_ms + 1) // 2
        if not self.leases:
            return state_of(self.silence_ms, half)
        return replace(self.leases[0], silence_ms=self.silence_ms, heartbeat_interval_ms=half).state


def _members(view: LiveView, row: GroupRow, known: Group | None) -> list[_Member]:
    if known is None:
        return [
            _Member(each.client, each.instance or "", each.silence_ms, 2 * each.heartbeat_interval_ms, each.leases)
            for each in row.members
        ]
    now_ms = view.silence.now_ms()
    return [
        _Member(
            member.client_id,
            member.instance_id,
            max(0, now_ms - member.last_beat),
            member.session_timeout_ms,
            [lease for lease in row.leases if lease.client == member.client_id],
            known.clients.get(member.client_id),
        )
        for member in known.members.values()
    ]


_MEMBERS = Rows[_Member](
    Field("client", column=Column("member", fold=True, least=8)),
    "instance",
    Field("host", lambda row: getattr(row.runs_at, "host", None), Column("host", fold=True)),
    Field("pid", lambda row: getattr(row.runs_at, "pid", None), Column("pid", right=True)),
    Field("release", lambda row: getattr(row.runs_at, "release", None), Column("release", from_width=90)),
    Field("member", lambda row: getattr(row.found, "member_id", None)),
    Field("slot", lambda row: getattr(row.found, "slot", None)),
    Field("joined", lambda row: getattr(row.found, "joined", None)),
    Field("session_timeout_ms", "session_ms", Column("session", right=True), lambda row: span(row.session_ms)),
    Field("allow_key_share", lambda row: row.found is not None and row.found.allow_key_share),
    Field("pattern", lambda row: getattr(row.found, "pattern", None) or None),
    Field("topics", lambda row: None if row.found is None else sorted(row.found.topics)),
    "state silence_ms",
    Field("partitions", lambda row: sum(not x.is_lock for x in row.leases), Column("partitions", right=True)),
    Field("", column=Column("lag", right=True), cell=lambda row: lag_cell(row.leases) if row.leases else "-"),
    Field(
        "",
        column=Column("seen"),
        cell=lambda row: Cell(seen_text(row.state, row.silence_ms), _STYLES.get(row.state, "")),
    ),
)


def _owner(row: LeaseRow) -> Cell:
    style = "yellow" if row.goes_to is not None or row.client is None else ""
    return Cell(row.state if row.cp is None else row.holder, style)


_PIECES = Rows[LeaseRow](
    Field("topic", column=Column("topic", fold=True)),
    Field("topic_partition", "partition", Column("partition", right=True), lambda row: row.place),
    Field("keys", lambda row: [row.lo, row.hi]),
    Field("owner", "client", Column("owner", fold=True, least=8), _owner),
    Field("epoch", column=Column("epoch", right=True)),
    "goes_to",
    "state",
    Field("next", column=Column("next", right=True)),
    "log_end",
    Field("lag", column=Column("lag", right=True), cell=lambda row: lag_cell([row])),
    Field("cut", lambda row: row.cut or None),
    Field("stuck", lambda row: row.stuck or None),
    Field("held_back", lambda row: row.held_back or None),
)

#: Generation, and a piece that it moved.
_MOVES = Rows[tuple[int, "Moved"]](
    Field("", lambda x: x[0], Column("generation", right=True)),
    Field("topic", lambda x: x[1].after.key[1], Column("topic", fold=True)),
    Field(
        "topic_partition",
        lambda x: x[1].after.partition,
        Column("partition", right=True),
        lambda x: place_text(x[1].after.partition, x[1].after.lo, x[1].after.hi),
    ),
    Field("keys", lambda x: [x[1].after.lo, x[1].after.hi]),
    Field("from", lambda x: _owner_of(x[1].before), Column("from", fold=True)),
    Field("to", lambda x: _owner_of(x[1].after), Column("to", fold=True)),
    Field("at", lambda x: x[1].after.since),
    Field("nobody_ms", lambda x: x[1].vacant_ms, Column("nobody", right=True), lambda x: _span_text(x[1].vacant_ms)),
)


def _owner_of(found: Span | None) -> str | None:
    return found.client_id if found is not None and found.held else None


def _span_text(ms: int | None) -> str:
    return "-" if ms is None else span(ms)


def _rebalances(now_ms: int) -> Rows[Rebalance]:
    from kafka_marshal.observe.words import why_rebalanced

    def longest_ms(each: Rebalance) -> int | None:
        return max((moved.vacant_ms for moved in each.moved if moved.vacant_ms is not None), default=None)

    def rolled_back(each: Rebalance) -> dict[str, object] | None:
        found = each.rolled_back
        return None if found is None else {"checkpoint": found[0], "client": found[1]}

    return Rows(
        Field("generation", column=Column("generation", right=True)),
        Field(
            "time",
            "log_time",
            Column("at"),
            lambda x: Cell(time_text(x.log_time), short=clock_text(x.log_time, now_ms)),
        ),
        Field(
            "why",
            lambda x: "; ".join(why_rebalanced(x)),
            Column("why", fold=True, least=20),
            lambda x: "; ".join(why_rebalanced(x)) or "-",
        ),
        "joined restarted left",
        Field("evicted", lambda x: [{"client": client, "by": by} for client, by in x.evicted]),
        "changed",
        Field("silent", lambda x: [{"client": client, "silence_ms": ms} for client, ms in x.silent]),
        "configured",
        Field("checkpoint", lambda x: x.checkpoint or None),
        Field("rolled_back", rolled_back),
        Field("members", column=Column("members", right=True)),
        Field(
            "moved",
            lambda x: [_MOVES.json((x.generation, moved)) for moved in x.moved],
            Column("moved", right=True),
            lambda x: str(len(x.moved)),
        ),
        Field("", column=Column("nobody, at most", right=True), cell=lambda x: _span_text(longest_ms(x))),
    )


def _one_group(view: LiveView, name: str, last: list[Rebalance]) -> Picture:
    from kafka_marshal.observe.words import setting_text

    view.look_at_data([name])
    found = view.groups(name)
    notes = view.notes_on_upgrades() + deleted_notes(found)
    if not found:
        notes.append(no_group(name, view.names()))
        return Picture(
            f"no group {name!r}", [], notes, {"topic": view.replica.topic, "group": name, "notes": notes}, NO
        )
    (row,) = found
    known = next((each for each in view.coordinated() if each.group_id == name), None)
    members = _members(view, row, known)
    problems = problems_of(row)
    notes += [f"{problem.text}." for problem in problems if problem.kind not in ("deleted", "position_lost", "stuck")]
    if text := open_text(row):
        notes.append(f"open messages: {text}. kafka-marshal open-messages {quote(name)} lists them.")
    sections = [
        Section(_MEMBERS.columns, [_MEMBERS.cells(each) for each in members], "no members"),
        Section(_PIECES.columns, [_PIECES.cells(each) for each in row.leases], "no partitions"),
        stuck_section(row.leases),
    ]
    if known is not None:
        pairs = _settings_json(known.settings).items()
        cells = [[key, setting_text(tuple(v) if isinstance(v, list) else v) or "-"] for key, v in pairs]
        moves = [(each.generation, moved) for each in last for moved in each.moved][-_MOVES_LISTED:]
        rebalances = _rebalances(view.silence.now_ms())
        sections += [
            Section(_SETTINGS, cells, None),
            Section(rebalances.columns, [rebalances.cells(each) for each in last], None),
            Section(_MOVES.columns, [_MOVES.cells(each) for each in moves], None),
        ]
    return Picture(
        headline=_headline(row),
        sections=sections,
        notes=notes,
        json=_group_json(view, row, known, members, last, notes),
        status=NO if list(view.replica.stopped()) else DONE,
    )


def _headline(row: GroupRow) -> str:
    state = "" if row.state is None else f", {row.state}, generation {row.generation}"
    strategy = f" ({row.strategy_text})" if row.strategy_text else ""
    behind = "lag is not known" if row.lag is None else f"{count(row.lag, 'message')} behind"
    paused = ", paused" if row.is_paused else ""
    text = (
        f"{row.group}: {row.kind or 'unknown'}{state}{strategy}{paused}; {count(row.worker_count, 'member')}, "
        f"{count(partitions_of(row.leases), 'partition')}, {behind}"
    )
    if row.checkpoints is None:
        return text
    text += f", {as_of_text(row.checkpoints.newest, row.checkpoints.age_ms)}"
    return text if row.checkpoints.barrier is None else f"{text}; {barrier_text(row.checkpoints.barrier)}"


def _group_json(
    view: LiveView, row: GroupRow, known: Group | None, members: list[_Member], last: list[Rebalance], notes: list[str]
) -> dict[str, object]:
    from rationalizer import route_group

    rebalances = _rebalances(view.silence.now_ms())
    return {
        "topic": view.replica.topic,
        **_GROUPS.json(row),
        "partition": None if known is None else route_group(row.group, len(view.worlds)),
        "paused": row.is_paused,
        **checkpoints_json(row.checkpoints),
        "settings": None if known is None else _settings_json(known.settings),
        "topics": None if known is None else dict(sorted(known.counts.items())),
        "member_list": [_MEMBERS.json(each) for each in members],
        "pieces": [_PIECES.json(each) for each in row.leases],
        "rebalances": [rebalances.json(each) for each in last],
        "notes": notes,
    }
