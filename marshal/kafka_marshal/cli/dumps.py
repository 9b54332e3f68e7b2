"""`replay` and `dump`: the log as a file."""

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
from kafka_marshal.errors import MarshalError
from kafka_marshal.files import file_beside
from kafka_marshal.topic_names import snapshots_topic
from rationalizer.levels import SUPPORTED_LEVEL

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from rationalizer.dump import (
        DumpHeader,
        DumpRecord,
        Replay,
    )
    from rationalizer.log_hash import LogHash

#: Lines of output that are written at once.
_LINES = 512


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
    # Imported here: a replay needs none of these.
    from kafka_marshal.cli.connection import connected
    from kafka_marshal.cli.output import progress, say_warning
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
