"""`prune`: removes old log and old snapshots, up to a checked snapshot."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command, say_error
from kafka_marshal.cli.connection import connected, note
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import span_option
from kafka_marshal.cli.output import Column, ask, print_json, print_table, progress, say
from kafka_marshal.observe.text import count

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from kafka_marshal.snapshots.prune import PrunedPartition, PrunePlan

_COLUMNS = (
    Column("partition", right=True),
    Column("log from", right=True),
    Column("log to", right=True),
    Column("checked", right=True),
    Column("remove below", right=True),
    Column("records", right=True),
    Column("snapshots", right=True),
    Column("note", fold=True),
)


@command()
@click.option(
    "--keep",
    type=click.IntRange(2),
    metavar="N",
    help="How many checked snapshots of each partition stay, with all log behind the oldest of them (3).",
)
@click.option(
    "--older-than", callback=span_option, metavar="SPAN", help="Only what is older than this (30d); all that may go."
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option("--force", is_flag=True, help="Also remove log that shows a snapshot to be wrong.")
@click.pass_obj
def prune(options: Options, keep: int | None, older_than: int | None, dry_run: bool, yes: bool, force: bool) -> int:
    r"""Remove old log and old snapshots together, up to a snapshot that agrees with the log, never further.

    The whole log is replayed first, and every snapshot compared with it; with --older-than, what is about to go and the
    snapshots next to it. Members continue meanwhile, and new ones can
    start at any time. History before the cut is gone for log, who, dump and audit: archive it first if you need it
    (kafka-marshal archive).

    \b
    Exit status: 0 removed, or nothing to remove; 1 a snapshot contradicts the log, or you said no; 2 wrong use, or no
    --yes; 3 Kafka was not reachable.
    """
    from kafka_marshal.snapshots.prune import DEFAULT_KEEP, OlderThan, carry_out, make_plan

    options.if_interrupted = "Nothing was removed."
    with connected(options) as cluster:
        with progress("checking") as show:
            plan = make_plan(
                cluster,
                options.topic,
                options.timeout,
                keep=DEFAULT_KEEP if keep is None else keep,
                force=force,
                older_than=None if older_than is None else OlderThan(older_than, time.time() * 1000),
                progress=show,
            )
        if not options.json:
            print_table(_COLUMNS, [_row(each) for each in plan.partitions])
        for difference in plan.differences:
            say_error(str(difference.error(plan.topic, plan.snapshots_topic)))
        something = bool(plan.records_removed or plan.snapshots_removed)
        goes = f"{count(plan.records_removed, 'record')} and {count(plan.snapshots_removed, 'snapshot')}"
        done = False
        if something and not dry_run:
            if not ask(f"Remove {goes} of {plan.topic}, for ever?", yes):
                note(options, "Nothing was removed.")
                return NO
            options.if_interrupted = "A part may have been removed: run kafka-marshal prune again, it continues."
            carry_out(cluster, plan, options.timeout)
            done = True
    if options.json:
        print_json(_json(plan, done))
    elif not something:
        say("nothing to remove.")
    else:
        say(f"removed: {goes}." if done else f"{goes} would be removed.")
    return NO if plan.differences else DONE


def _row(each: PrunedPartition) -> list[str]:
    return [
        str(each.partition),
        str(each.log_start),
        str(each.log_end),
        str(len(each.checked)),
        "" if each.cut is None else str(each.cut),
        str(each.records_removed),
        str(each.snapshots_removed),
        each.why,
    ]


def _json(plan: PrunePlan, done: bool) -> dict[str, object]:
    return {
        "topic": plan.topic,
        "snapshots_topic": plan.snapshots_topic,
        "removed": done,
        "records": plan.records_removed,
        "snapshots": plan.snapshots_removed,
        "partitions": [
            {
                "partition": each.partition,
                "log_start": each.log_start,
                "log_end": each.log_end,
                "checked": list(each.checked),
                "remove_below": each.cut,
                "records": each.records_removed,
                "snapshots": each.snapshots_removed,
                "note": each.why or None,
            }
            for each in plan.partitions
        ],
        "differences": [
            {
                "partition": found.cp,
                "next_offset": found.next_offset,
                "digest": found.theirs,
                "replayed_digest": found.ours,
                "since": found.since,
                "why": found.why,
            }
            for found in plan.differences
        ],
    }
