"""`archive`: keeps the history of the log in files; and the option --archive of commands that read them beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kafka_marshal.cli.app import command, say_error
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options
from kafka_marshal.cli.output import (
    Column,
    print_json,
    print_table,
    progress,
    say,
    say_warning,
    warnings_from_the_library,
)
from kafka_marshal.observe.text import count, time_text
from kafka_marshal.secret import visible

if TYPE_CHECKING:
    from contextlib import ExitStack

    from kafka_marshal.archive import Archived, ArchivedPartition, Gap
    from kafka_marshal.observe.log import Log

_F = TypeVar("_F", bound=Callable[..., Any])

_COLUMNS = (
    Column("partition", right=True),
    Column("from", right=True),
    Column("to", right=True),
    Column("new records", right=True),
    Column("new files", right=True),
    Column("since"),
    Column("until"),
    Column("note", fold=True),
)

_PLACE = click.Path(file_okay=False)


@command()
@click.option("--to", "place", type=_PLACE, metavar="DIR|URL", required=True, help="A folder, or s3://BUCKET/PLACE.")
@click.option("--verify", is_flag=True, help="Also read all that is there, replay it, and compare it with the log.")
@click.pass_obj
def archive(options: Options, place: str, verify: bool) -> int:
    r"""Keep the history of the log: write what the archive does not have yet, in files that are never changed.

    Run it daily, before prune, or more often than `init --keep` removes. It may be killed at any time, and continues.
    Each file is a dump of one partition and a range of its offsets, in gzip; its name has their times, and the file's
    SHA-256. Read it beside the log with --archive of `who`, `log`, `ui` and `audit`. A URL needs the extra [bucket].

    \b
    Exit status: 0 all is archived; 1 something was pruned before it was archived, a file is damaged, or the archive is
    of another log (recreated); 2 wrong use; 3 no Kafka.
    """
    from kafka_marshal.archive import Archive, write_archive
    from kafka_marshal.cli.connection import connected

    options.if_interrupted = "What was written counts. Run kafka-marshal archive again: it continues."
    with connected(options) as cluster, progress("archiving") as show:
        kept = Archive.at(place, make=True)
        done = write_archive(cluster, options.topic, kept, options.timeout, verify=verify, progress=show)
    if options.json:
        print_json(_json(done))
    else:
        print_table(_COLUMNS, map(_row, done.partitions))
        files = f" in {count(done.files, 'file')}" if done.records else ""
        say(f"archived: {count(done.records, 'record')}{files}{_times(done.since, done.until)}, to {done.place}.")
    for each in done.partitions:
        if each.problem:
            say_error(visible(each.problem))
        for gap in each.new_gaps:
            say_error(
                f"partition {each.partition}: {_gap(gap)} were removed from the log before they were archived: they "
                "are gone for good. What is left is archived; who and log begin behind them. Archive more often than "
                "the log is pruned."
            )
    return DONE if done.is_whole else NO


def _times(since: int | None, until: int | None) -> str:
    return "" if since is None or until is None else f", {time_text(since)} to {time_text(until)}"


def _gap(gap: Gap) -> str:
    return f"offsets {gap.first} to {gap.end - 1} ({time_text(gap.since)} to {time_text(gap.until)})"


def _row(each: ArchivedPartition) -> list[str]:
    since, until = ("" if at is None else time_text(at) for at in (each.since, each.until))
    note = "; ".join(f"lacks {_gap(gap)}" for gap in each.gaps)
    numbers = (each.partition, each.first, each.end, each.records, each.files)
    return [*map(str, numbers), since, until, note or ("not all is archived" if each.problem else "")]


def _json(done: Archived) -> dict[str, object]:
    return {
        "topic": done.topic,
        "topic_id": done.topic_id,
        "archive": done.place,
        "whole": done.is_whole,
        "records": done.records,
        "files": done.files,
        "since": done.since,
        "until": done.until,
        "partitions": [
            {
                "partition": each.partition,
                "first": each.first,
                "end": each.end,
                "records": each.records,
                "files": each.files,
                "since": each.since,
                "until": each.until,
                "gaps": [
                    {
                        "first": gap.first,
                        "end": gap.end,
                        "since": gap.since,
                        "until": gap.until,
                        "new": gap in each.new_gaps,
                    }
                    for gap in each.gaps
                ],
                "problem": each.problem or None,
            }
            for each in done.partitions
        ],
    }


# -- read by other commands ----------------------------------------------------------------------------------------


def archive_option(function: _F) -> _F:
    """Adds the option --archive."""
    text = "Also read this archive (see archive): what was pruned, and the log from there on."
    return click.option("--archive", "place", type=_PLACE, metavar="DIR|URL", help=text)(function)


def is_alone(options: Options, place: str | None) -> bool:
    """Whether the archive is read without the log, as no Kafka was named: it may be gone."""
    return place is not None and not (options.bootstrap or options.config_file)


def open_history(
    stack: ExitStack, options: Options, place: str | None, *, at_ms: int | None = None, at_offset: int | None = None
) -> Log:
    """The log that the options name, with its archive if there is one (*blocking*); or the archive alone."""
    from kafka_marshal.cli.connection import connected

    opening = history_of(place, at_ms=at_ms, at_offset=at_offset)
    if not is_alone(options, place):
        return opening(stack.enter_context(connected(options)), options.topic, options.timeout)
    stack.enter_context(warnings_from_the_library(options.debug))
    say_warning("no Kafka is named (--bootstrap): the archive is read alone, and history ends where it ends")
    return opening(None, options.topic, options.timeout)


def history_of(place: str | None, *, at_ms: int | None = None, at_offset: int | None = None) -> Callable[..., Log]:
    """Opens the log of a cluster, a topic and a timeout (s), with its archive if there is one (*blocking*)."""
    from kafka_marshal.observe.log import Log

    if place is None:
        return Log
    from kafka_marshal.archive import Archive, ArchivedLog

    return partial(ArchivedLog, archive=Archive.at(place), at_ms=at_ms, at_offset=at_offset)
