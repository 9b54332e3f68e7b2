"""`archive`, `dump`, `replay`: the log in files; and the option --archive of commands that read them beside it.

`replay` needs neither the Kafka client nor rich, so functions import what reads Kafka.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from kafka_marshal.cli.app import command, say_error
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options
from kafka_marshal.cli.output import (
    Column,
    Field,
    Rows,
    fields_of,
    print_json,
    print_table,
    progress,
    say,
    say_warning,
    warnings_from_the_library,
)
from kafka_marshal.errors import MarshalError
from kafka_marshal.observe.text import count, time_text
from kafka_marshal.secret import visible
from kafka_marshal.topic_names import snapshots_topic
from kafka_marshal.types import F
from rationalizer.levels import SUPPORTED_LEVEL

if TYPE_CHECKING:
    from contextlib import ExitStack

    from kafka_marshal.archive import Archived, ArchivedPartition, Gap
    from kafka_marshal.observe.log import Log
    from rationalizer.dump import DumpHeader, DumpRecord, Replay
    from rationalizer.log_hash import LogHash


_ARCHIVED: Rows[ArchivedPartition] = Rows(
    Field("partition", column=Column("partition", right=True)),
    Field("first", column=Column("from", right=True)),
    Field("end", column=Column("to", right=True)),
    Field("records", column=Column("new records", right=True)),
    Field("files", column=Column("new files", right=True)),
    Field("since", column=Column("since"), cell=lambda each: _at(each.since)),
    Field("until", column=Column("until"), cell=lambda each: _at(each.until)),
    Field("gaps", lambda each: [_gap_json(each, gap) for gap in each.gaps]),
    Field("problem", lambda each: each.problem or None),
    Field("", column=Column("note", fold=True), cell=lambda each: _note(each)),
)

_PLACE = click.Path(file_okay=False)

#: Lines of output that are written at once.
_LINES = 512


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
        print_table(_ARCHIVED.columns, map(_ARCHIVED.cells, done.partitions))
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


def _at(time_ms: int | None) -> str:
    return "" if time_ms is None else time_text(time_ms)


def _note(each: ArchivedPartition) -> str:
    note = "; ".join(f"lacks {_gap(gap)}" for gap in each.gaps)
    return note or ("not all is archived" if each.problem else "")


def _gap_json(each: ArchivedPartition, gap: Gap) -> dict[str, object]:
    return {**fields_of(gap, "first end since until"), "new": gap in each.new_gaps}


def _json(done: Archived) -> dict[str, object]:
    names = "topic topic_id archive=place whole=is_whole records files since until"
    return {**fields_of(done, names), "partitions": [_ARCHIVED.json(each) for each in done.partitions]}


# -- read by other commands ----------------------------------------------------------------------------------------


def archive_option(function: F) -> F:
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


# -- dumps -------------------------------------------------------------------------------------------------------


def _until(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, int]:
    """PARTITION:OFFSET as partition → last offset to replay; of a partition named twice the smaller one."""
    limits: dict[int, int] = {}
    for value in values:
        partition, colon, offset = value.partition(":")
        if not colon or not all(part.isascii() and part.isdigit() for part in (partition, offset)):
            raise click.BadParameter(
                f"{value!r} is not of the form PARTITION:OFFSET, such as 3:1200", context, parameter
            )
        limits[int(partition)] = min(int(offset), limits.get(int(partition), int(offset)))
    return limits


@contextmanager
def open_dump(path: str) -> Iterator[BinaryIO]:
    """The dump's bytes; "-" is standard input."""
    if path == "-":
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        yield file


@contextmanager
def checked_dump(path: str) -> Iterator[tuple[DumpHeader, Iterator[DumpRecord]]]:
    """The dump's header and records; at the end, changed ranges among those read are named on standard error."""
    from rationalizer.dump import DumpReader

    changed: list[LogHash] = []
    with open_dump(path) as lines:
        reader = DumpReader(lines)
        yield reader.header, reader.checked(changed)
    _name_changed(changed)


def _name_changed(changed: Iterable[LogHash]) -> None:
    from kafka_marshal.observe.words import dump_changed

    for each in changed:
        say_error(dump_changed(each))


@command()
@click.argument("dump", metavar="DUMP")
@click.option("--state", is_flag=True, help="Print the state at the end instead: one JSON object.")
@click.option(
    "--until",
    metavar="P:OFFSET",
    multiple=True,
    callback=_until,
    help="Leave out partition P's records above OFFSET (repeatable).",
)
@click.pass_obj
def replay(options: Options, dump: str, state: bool, until: dict[int, int]) -> int:
    r"""Replay DUMP (a file, or - for standard input): one JSON line a record, with its outcome.

    \b
    Exit status: 0 replayed to the end; 1 a partition's replay stopped before an Upgrade that this release
    does not know; 2 DUMP is no dump (what was printed before means nothing).
    """
    from rationalizer.dump import Replay, json_of_state

    options.if_interrupted = "The replay is not complete; what was printed is of its beginning."
    out = sys.stdout.buffer
    with open_dump(dump) as lines:
        replaying = Replay(lines, until)
        if state:
            # A line end only on a terminal: the protocol's examples have none.
            end = b"\n" if sys.stdout.isatty() else b""
            out.write(json_of_state(replaying.state()).encode() + end)
        else:
            _write_outcomes(replaying, out)
    out.flush()
    _name_changed(replaying.changed)
    return _stopped(replaying.required_levels)


def _write_outcomes(replaying: Replay, out: BinaryIO) -> None:
    from rationalizer.dump import json_of_outcome

    lines: list[str] = []
    for outcome in replaying.outcomes():
        lines.append(json_of_outcome(outcome))
        if len(lines) == _LINES:
            out.write(("\n".join(lines) + "\n").encode())
            lines.clear()
    if lines:
        out.write(("\n".join(lines) + "\n").encode())


def _stopped(levels: dict[int, int]) -> int:
    """Name each required level, and the CPs that require it (D4)."""
    for level in sorted(set(levels.values())):
        where = ", ".join(str(partition) for partition, wanted in levels.items() if wanted == level)
        say_error(
            f"partition {where}: the replay stopped before an Upgrade to level {level}; this release knows levels "
            f"up to {SUPPORTED_LEVEL}. What is shown is of before it. Install a release that knows level {level}."
        )
    return NO if levels else DONE


@command()
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this file; it appears when the dump is complete. Default: standard output.",
)
@click.option(
    "--allow-cut",
    is_flag=True,
    help="Dump also what is left of a log whose beginning is gone; replaying it does not give the true state.",
)
@click.option(
    "--snapshots",
    is_flag=True,
    help="Dump the log of snapshots that belongs to it instead, for `audit --snapshots`; what prune took is left out.",
)
@click.pass_obj
def dump(options: Options, output: Path | None, allow_cut: bool, snapshots: bool) -> int:
    r"""Write the whole coordination log as JSON Lines, for `replay`, `who --from-dump`, `audit` and other programs.

    It ends where the log ended when the command began. Partitions follow each other, so two dumps of the same log are
    equal byte for byte.
    """
    from kafka_marshal.files import file_beside

    if snapshots:
        options.topic, allow_cut = snapshots_topic(options.topic), True
    options.if_interrupted = "The dump is not complete: do not use it."
    if output is None:
        _dump(options, sys.stdout.buffer, allow_cut)
        return DONE
    options.if_interrupted = f"The dump was not complete; {output} was not touched."
    with file_beside(output) as file:
        _dump(options, file, allow_cut)
    return DONE


def _dump(options: Options, out: BinaryIO, allow_cut: bool) -> None:
    from kafka_marshal.cli.connection import connected
    from kafka_marshal.observe.log import Log
    from rationalizer.dump import DumpHeader, DumpLines, header_line

    with connected(options) as cluster, progress("dumping") as show:
        log = Log(cluster, options.topic, options.timeout)
        if not allow_cut:
            log.refuse_if_cut()
        bounds = tuple((log.starts[cp], log.ends[cp]) for cp in range(log.partitions))
        out.write((header_line(DumpHeader(log.topic, log.partitions, bounds)) + "\n").encode())
        total = sum(log.ends.values()) - sum(log.starts.values())
        before = 0
        for cp, start in log.starts.items():
            try:
                lines = DumpLines(cp)
                for _, entries in log.read({cp: start}, progress=partial(_further, show, before, total)):
                    out.write("".join(f"{line}\n" for line in lines.take(entries)).encode())
                out.write("".join(f"{line}\n" for line in lines.end()).encode())
            except MarshalError:
                say_warning("the dump is not complete: do not use it.")
                raise
            before += log.ends[cp] - start
    out.flush()


def _further(show: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    """Turn progress within one CP into progress of all."""
    show(before + done, total)
