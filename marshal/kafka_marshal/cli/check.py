"""`check`: is all well? For cron, probes and alerts."""

from __future__ import annotations

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.names import complete_group, no_group
from kafka_marshal.cli.options import Options, span_option
from kafka_marshal.cli.output import print_json, progress, say
from kafka_marshal.cli.problems import Problem, problems_of
from kafka_marshal.cli.reading import connected
from kafka_marshal.cli.rows import GroupRow, partitions_of
from kafka_marshal.cli.text import count
from kafka_marshal.cli.view import View

__all__ = ["check", "problem_json"]


@command()
@click.option("--group", help="Only this group.", shell_complete=complete_group)
@click.option("--max-lag", type=click.IntRange(min=0), metavar="N", help="A group may be so many messages behind.")
@click.option(
    "--max-silence", callback=span_option, metavar="SPAN", help="A holder may be silent for so long (30s, 2m)."
)
@click.pass_obj
def check(options: Options, group: str | None, max_lag: int | None, max_silence: int | None) -> int:
    r"""Is all well? Exit status 0, or 1 with the reasons, one a line. For cron, probes and alerts.

    \b
    position lost  a position is not in the log that is there (see release-group)
    no topic       the topic of a position was deleted, and not made again
    stuck          the next message can't be read (see skip), or its partition has no leader
    deleted        retention took messages that the group had not done; until it goes on behind them
    hung           a worker beats and has messages waiting, but reports no progress (3 heartbeat intervals, 10 s)
    gone           a worker that holds partitions is silent for more than 2 of its heartbeat intervals (its session)
    no holder      a partition that nobody works on; not in a paused group
    pause over     a pause whose time has passed, but which nothing has ended
    lag, silence   beyond --max-lag (the group's lag in all), --max-silence

    Groups of which nobody was seen for a day are left out, unless --group names one. It only reads.

    \b
    Exit status: 0 all is well; 1 it is not, or the group is unknown; 2 wrong use; 3 no Kafka.
    """
    with connected(options) as cluster:
        view = View(cluster, options.topic, options.timeout)
        try:
            with progress("reading the log") as progressed:
                view.catch_up(progressed)
            view.learn_time()
            view.look_at_data(None if group is None else [group])
            groups = [each for each in view.groups(group) if group is not None or not each.is_dead]
            known, notes = view.names(), [*view.notes_on_upgrades(), *view.notes_on_clocks()]
        finally:
            view.replica.close()
    found = [problem for each in groups for problem in problems_of(each, max_lag, max_silence)]
    reasons = [*notes, *(f"{problem.group}: {problem.text}" for problem in found)]
    if group is not None and not groups:
        reasons.append(no_group(group, known))
    if options.json:
        print_json(_json(options.topic, groups, found, reasons))
    else:
        for reason in reasons:
            say(reason)
        if not reasons:
            say(_all_is_well(groups))
    return NO if reasons else DONE


def _all_is_well(groups: list[GroupRow]) -> str:
    if not groups:
        return "ok: the log knows no group that was at work within a day"
    partitions = partitions_of(row for each in groups for row in each.leases)
    behind = sum(each.known_lag for each in groups)
    return f"ok: {count(len(groups), 'group')}, {count(partitions, 'partition')}, {count(behind, 'message')} behind"


def _json(topic: str, groups: list[GroupRow], found: list[Problem], reasons: list[str]) -> dict[str, object]:
    return {
        "topic": topic,
        "ok": not reasons,
        "reasons": reasons,
        "problems": [problem_json(problem) for problem in found],
        "groups": [each.group for each in groups],
    }


def problem_json(problem: Problem) -> dict[str, object]:
    """One problem for programs."""
    return {
        "group": problem.group,
        "kind": problem.kind,
        "amount": problem.amount,
        "partitions": [{"topic": row.topic, "partition": row.partition} for row in problem.partitions],
        "text": problem.text,
    }
