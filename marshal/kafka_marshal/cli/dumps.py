"""`replay` and `dump`: the log as a file (protocol, section 9)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import click

from kafka_marshal.cli.app import command, say_error
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options
from rationalizer.dump import Replay, json_of_outcome, json_of_state
from rationalizer.limits import SUPPORTED_LEVEL

__all__ = ["dump", "replay"]

#: Lines of output that are written at once.
_LINES = 512


class UntilType(click.ParamType):
    """PARTITION:OFFSET."""

    name = "P:OFFSET"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        partition, colon, offset = str(value).partition(":")
        if not colon or not all(part.isascii() and part.isdigit() for part in (partition, offset)):
            self.fail(f"{value!r} is not of the form PARTITION:OFFSET, such as 3:1200", param, ctx)
        return int(partition), int(offset)


@contextmanager
def open_dump(path: str) -> Iterator[BinaryIO]:
    """The dump's bytes; "-" is standard input."""
    if path == "-":
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        yield file


@command()
@click.argument("dump", metavar="DUMP")
@click.option("--state", is_flag=True, help="Print the state at the end instead: one JSON object.")
@click.option(
    "--until", type=UntilType(), multiple=True, help="Leave out this partition's records above OFFSET (repeatable)."
)
@click.pass_obj
def replay(options: Options, dump: str, state: bool, until: tuple[tuple[int, int], ...]) -> int:
    """Replay DUMP (a file, or - for standard input): one JSON line a record, with its outcome.

    \b
    Exit status: 0 replayed to the end; 1 a partition's replay stopped before an Upgrade that this release
    does not know; 2 DUMP is no dump (what was printed before means nothing).
    """
    options.if_interrupted = "The replay is not complete; what was printed is of its beginning."
    limits: dict[int, int] = {}
    for partition, offset in until:
        limits[partition] = min(offset, limits.get(partition, offset))
    out = click.get_binary_stream("stdout")
    with open_dump(dump) as lines:
        replaying = Replay(lines, limits)
        if state:
            # No line end after the one object, as in the protocol's examples, but where people read.
            end = b"\n" if sys.stdout.isatty() else b""
            out.write(json_of_state(replaying.state()).encode() + end)
        else:
            _write_outcomes(replaying, out)
    out.flush()
    return _stopped(replaying.required_levels)


def _write_outcomes(replaying: Replay, out: BinaryIO) -> None:
    lines: list[str] = []
    for outcome in replaying.outcomes():
        lines.append(json_of_outcome(outcome))
        if len(lines) == _LINES:
            out.write(("\n".join(lines) + "\n").encode())
            lines.clear()
    if lines:
        out.write(("\n".join(lines) + "\n").encode())


def _stopped(levels: dict[int, int]) -> int:
    """Name each level that was asked for, and by which CPs (D4)."""
    for level in sorted(set(levels.values())):
        where = ", ".join(str(partition) for partition, wanted in levels.items() if wanted == level)
        say_error(
            f"partition {where}: the replay stopped before an Upgrade to level {level}; this release knows levels up to "
            f"{SUPPORTED_LEVEL}. What is shown is of before it. Install a release of kafka-marshal that knows level {level}."
        )
    return NO if levels else DONE
