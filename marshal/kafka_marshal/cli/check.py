"""`check`: is all well? For cron, probes and alerts."""

from __future__ import annotations

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.connection import connected, sizes_of, view_of
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.names import complete_group
from kafka_marshal.cli.options import Options, span_option
from kafka_marshal.cli.output import print_json, progress, say, say_warning
from kafka_marshal.observe.names import no_group
from kafka_marshal.observe.problems import Problem, mixed_texts, open_problems, pause_text, problems_of, too_few
from kafka_marshal.observe.rows import GroupRow, partitions_of
from kafka_marshal.observe.text import count

#: The most omitted groups that are named.
_LISTED = 5


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
    with connected(options) as cluster:
        view = view_of(cluster, options)
        try:
            with progress("reading the log") as progressed:
                view.catch_up(progressed)
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
        finally:
            view.replica.close()
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
        print_json({**_json(options.topic, groups, left_out, found, reasons), "log": size.json, "warnings": warnings})
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
    listed = ", ".join(each.group for each in left_out[:_LISTED]) + (", …" if len(left_out) > _LISTED else "")
    text = f"left out: {count(len(left_out), 'group')} of which nobody was seen for a day ({listed})"
    waiting = sum(each.known_lag for each in left_out)
    return text + (f", with {count(waiting, 'message')} waiting" if waiting else "")


def _all_is_well(groups: list[GroupRow]) -> str:
    if not groups:
        return "ok: the log knows no group that was at work within a day"
    partitions = partitions_of(row for each in groups for row in each.leases)
    behind = sum(each.known_lag for each in groups)
    return f"ok: {count(len(groups), 'group')}, {count(partitions, 'partition')}, {count(behind, 'message')} behind"


def _json(
    topic: str, groups: list[GroupRow], left_out: list[GroupRow], found: list[Problem], reasons: list[str]
) -> dict[str, object]:
    return {
        "topic": topic,
        "ok": not reasons,
        "reasons": reasons,
        "problems": [problem_json(problem) for problem in found],
        "groups": [each.group for each in groups],
        "left_out": [each.group for each in left_out],
    }


def problem_json(problem: Problem) -> dict[str, object]:
    """A problem as JSON."""
    return {
        "group": problem.group,
        "kind": problem.kind,
        "amount": problem.amount,
        "partitions": [{"topic": row.topic, "partition": row.partition} for row in problem.partitions],
        "text": problem.text,
    }
