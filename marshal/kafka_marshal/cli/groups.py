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
from kafka_marshal.cli.output import Cell, Column, say
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
    process_cells,
    process_json,
    seen_text,
    state_of,
)
from kafka_marshal.observe.text import clock_text, count, near, no_group, number, span, time_text

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from kafka_marshal.observe.view import View
    from rationalizer import Group, Settings
    from rationalizer.groups.history import Assignments, Moved, Rebalance

_GROUPS = (
    Column("group", fold=True, least=8),
    Column("kind"),
    Column("state", fold=True, least=8),
    Column("generation", right=True, from_width=95),
    Column("strategy", from_width=95),
    Column("members", right=True),
    Column("partitions", right=True),
    Column("lag", right=True),
)
_MEMBERS = (
    Column("member", fold=True, least=8),
    Column("host", fold=True),
    Column("pid", right=True),
    Column("release", from_width=90),
    Column("session", right=True),
    Column("partitions", right=True),
    Column("lag", right=True),
    Column("seen"),
)
_PIECES = (
    Column("topic", fold=True),
    Column("partition", right=True),
    Column("owner", fold=True, least=8),
    Column("epoch", right=True),
    Column("next", right=True),
    Column("lag", right=True),
)
_SETTINGS = (Column("setting"), Column("value", fold=True))
_REBALANCES = (
    Column("generation", right=True),
    Column("at"),
    Column("why", fold=True, least=20),
    Column("members", right=True),
    Column("moved", right=True),
    Column("nobody, at most", right=True),
)
_MOVES = (
    Column("generation", right=True),
    Column("topic", fold=True),
    Column("partition", right=True),
    Column("from", fold=True),
    Column("to", fold=True),
    Column("nobody", right=True),
)

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


def _all_groups(view: View) -> Picture:
    view.look_at_data()
    found, notes = view.groups(), view.notes_on_upgrades()
    return Picture(
        headline=count(len(found), "group"),
        sections=[Section(_GROUPS, [_group_cells(each) for each in found], "no groups")],
        notes=notes,
        json={
            "topic": view.replica.topic,
            "groups": [{**_head(each), "paused": each.is_paused} for each in found],
            "notes": notes,
        },
        status=NO if notes else DONE,
    )


def _head(each: GroupRow) -> dict[str, object]:
    return {
        "group": each.group,
        "kind": each.kind or None,
        "state": each.state,
        "generation": each.generation,
        "strategy": each.strategy,
        "members": each.worker_count,
        "partitions": partitions_of(each.leases),
        "held": partitions_of(row for row in each.leases if row.held),
        "lag": each.lag,
        "open_messages": each.open_messages,
        "parked": each.parked,
    }


def _group_cells(each: GroupRow) -> list[str | Cell]:
    words = [each.state] if each.state else []
    words += ["paused"] if each.is_paused else []
    return [
        each.group,
        each.kind or "-",
        ", ".join(words) or "-",
        number(each.generation),
        each.strategy or "-",
        str(each.worker_count),
        f"{partitions_held(each.leases)}/{partitions_of(each.leases)}",
        lag_cell(each.leases),
    ]


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
    "--rebalances", type=click.IntRange(min=0), default=5, metavar="N", help="Show the last N rebalances (5)."
)
@yes_option("With --set: don't ask whether to make a group that is not there.")
@click.pass_obj
def group(options: Options, name: str, changes: dict[str, object], rebalances: int) -> int:
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

    Rebalances are shown as far as the log was read: back to the last snapshots, some 10,000 records.

    \b
    Exit status: 0; 1 the group is unknown, or a claimed one (--set); 2 wrong use; 3 no Kafka.
    """
    from rationalizer import route_group
    from rationalizer.groups.history import Assignments

    if changes:
        return _configure(options, name, changes)
    with viewing(options) as view:
        fold = Assignments(name, keep=rebalances)
        home = route_group(name, len(view.worlds))
        fold.begin(view.worlds[home])
        view.observers.append(
            lambda cp, _, outcome: fold.see(view.worlds[cp], outcome) if cp == home and rebalances else None
        )
        catch_up(view)
        view.learn_time()
        return print_picture(_one_group(view, name, fold), options)


def _settings(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, object]:
    """KEY=VALUE as settings."""
    from rationalizer import Settings

    found: dict[str, object] = {}
    defaults = {field.name: getattr(Settings(), field.name) for field in fields(Settings)}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} is not of the form KEY=VALUE", context, parameter)
        default = defaults.get(key)
        if key not in defaults:
            hint = near(key, defaults) or f"; there are {', '.join(defaults)}."
            raise click.BadParameter(f"a group has no setting {key!r}{hint}", context, parameter)
        if isinstance(default, bool):
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

    @property
    def state(self) -> str:
        half = (self.session_ms + 1) // 2
        if not self.leases:
            return state_of(self.silence_ms, half)
        return replace(self.leases[0], silence_ms=self.silence_ms, heartbeat_interval_ms=half).state


def _members(view: View, row: GroupRow, known: Group | None) -> list[_Member]:
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
        )
        for member in known.members.values()
    ]


def _one_group(view: View, name: str, fold: Assignments) -> Picture:
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
        Section(_MEMBERS, [_member_cells(each) for each in members], "no members"),
        Section(_PIECES, [_piece_cells(each) for each in row.leases], "no partitions"),
        stuck_section(row.leases),
    ]
    if known is not None:
        pairs = _settings_json(known.settings).items()
        cells = [[key, setting_text(tuple(v) if isinstance(v, list) else v) or "-"] for key, v in pairs]
        moves = [(each, moved) for each in fold.rebalances for moved in each.moved][-_MOVES_LISTED:]
        sections += [
            Section(_SETTINGS, cells, None),
            Section(_REBALANCES, [_rebalance_cells(view, each) for each in fold.rebalances], None),
            Section(_MOVES, [_move_cells(each, moved) for each, moved in moves], None),
        ]
    return Picture(
        headline=_headline(row),
        sections=sections,
        notes=notes,
        json=_group_json(view, row, known, members, fold, notes),
        status=NO if list(view.replica.stopped()) else DONE,
    )


def _headline(row: GroupRow) -> str:
    state = "" if row.state is None else f", {row.state}, generation {row.generation}"
    strategy = f" ({row.strategy})" if row.strategy else ""
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


def _member_cells(member: _Member) -> list[str | Cell]:
    return [
        member.client,
        *process_cells(Instance.parse(member.instance)),
        span(member.session_ms),
        str(len(member.leases)),
        lag_cell(member.leases) if member.leases else "-",
        Cell(seen_text(member.state, member.silence_ms), _STYLES.get(member.state, "")),
    ]


def _piece_cells(row: LeaseRow) -> list[str | Cell]:
    owner = row.state if row.cp is None else row.holder
    style = "yellow" if row.goes_to is not None or row.client is None else ""
    return [row.topic, row.place, Cell(owner, style), number(row.epoch), number(row.next), lag_cell([row])]


def _rebalance_cells(view: View, each: Rebalance) -> list[str | Cell]:
    from kafka_marshal.observe.words import why_rebalanced

    vacant = [moved.vacant_ms for moved in each.moved if moved.vacant_ms is not None]
    return [
        str(each.generation),
        Cell(time_text(each.log_time), short=clock_text(each.log_time, view.silence.now_ms())),
        "; ".join(why_rebalanced(each)) or "-",
        str(each.members),
        str(len(each.moved)),
        span(max(vacant)) if vacant else "-",
    ]


def _move_cells(each: Rebalance, moved: Moved) -> list[str | Cell]:
    before, after = moved
    return [
        str(each.generation),
        after.key[1],
        place_text(after.partition, after.lo, after.hi),
        before.client_id if before is not None and before.held else "-",
        after.client_id if after.held else "-",
        "-" if moved.vacant_ms is None else span(moved.vacant_ms),
    ]


def _group_json(
    view: View, row: GroupRow, known: Group | None, members: list[_Member], fold: Assignments, notes: list[str]
) -> dict[str, object]:
    from rationalizer import route_group

    return {
        "topic": view.replica.topic,
        **_head(row),
        "partition": None if known is None else route_group(row.group, len(view.worlds)),
        "paused": row.is_paused,
        **checkpoints_json(row.checkpoints),
        "settings": None if known is None else _settings_json(known.settings),
        "topics": None if known is None else dict(sorted(known.counts.items())),
        "member_list": [_member_json(each, known) for each in members],
        "pieces": [
            {
                "topic": each.topic,
                "topic_partition": each.partition,
                "keys": [each.lo, each.hi],
                "owner": each.client,
                "epoch": each.epoch,
                "goes_to": each.goes_to,
                "state": each.state,
                "next": each.next,
                "log_end": each.log_end,
                "lag": each.lag,
                "cut": each.cut or None,
                "stuck": each.stuck or None,
                "held_back": each.held_back or None,
            }
            for each in row.leases
        ],
        "rebalances": [_rebalance_json(each) for each in fold.rebalances],
        "notes": notes,
    }


def _member_json(member: _Member, known: Group | None) -> dict[str, object]:
    found = None if known is None else known.clients.get(member.client)
    return {
        "client": member.client,
        "instance": member.instance,
        **process_json(Instance.parse(member.instance)),
        "member": None if found is None else found.member_id,
        "slot": None if found is None else found.slot,
        "joined": None if found is None else found.joined,
        "session_timeout_ms": member.session_ms,
        "allow_key_share": found is not None and found.allow_key_share,
        "pattern": None if found is None or not found.pattern else found.pattern,
        "topics": None if found is None else sorted(found.topics),
        "state": member.state,
        "silence_ms": member.silence_ms,
        "partitions": len(member.leases),
    }


def _rebalance_json(each: Rebalance) -> dict[str, object]:
    from kafka_marshal.observe.words import why_rebalanced

    return {
        "generation": each.generation,
        "time": each.log_time,
        "why": "; ".join(why_rebalanced(each)),
        "joined": each.joined,
        "restarted": each.restarted,
        "left": each.left,
        "evicted": [{"client": client, "by": by} for client, by in each.evicted],
        "changed": each.changed,
        "silent": [{"client": client, "silence_ms": silence_ms} for client, silence_ms in each.silent],
        "configured": each.configured,
        "checkpoint": each.checkpoint or None,
        "rolled_back": None
        if each.rolled_back is None
        else {"checkpoint": each.rolled_back[0], "client": each.rolled_back[1]},
        "members": each.members,
        "moved": [
            {
                "topic": moved.after.key[1],
                "topic_partition": moved.after.partition,
                "keys": [moved.after.lo, moved.after.hi],
                "from": moved.before.client_id if moved.before is not None and moved.before.held else None,
                "to": moved.after.client_id if moved.after.held else None,
                "at": moved.after.since,
                "nobody_ms": moved.vacant_ms,
            }
            for moved in each.moved
        ],
    }
