"""Runs the command: in this process for speed, as a separate process if the test needs that."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kafka_marshal.cli.app import run
from rationalizer import Record, encode, route_lease
from rationalizer.dump import DumpHeader, DumpRecord, header_line, record_line

#: Variables that commands under test must not inherit.
ENVIRONMENT = ("KAFKA_MARSHAL_DEBUG", "NO_COLOR", "COLUMNS", "LINES")


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def table(self) -> list[dict[str, str]]:
        """The first of several tab-separated tables on standard output."""
        return Ran(self.status, self.out.partition("\n\n")[0], self.err).rows

    @property
    def rows(self) -> list[dict[str, str]]:
        """The tab-separated table on standard output, by its titles."""
        titles, *rows = (line.split("\t") for line in self.lines)
        return [dict(zip(titles, row, strict=True)) for row in rows]


class Command:
    """Runs the command in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capture = capfd
        self._monkeypatch = monkeypatch
        self.before: tuple[str, ...] = ()

    def __call__(self, *args: str | int | os.PathLike[str], stdin: bytes = b"") -> Ran:
        self._capture.readouterr()
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = run([*self.before, *(str(arg) if isinstance(arg, int) else os.fspath(arg) for arg in args)])
        captured = self._capture.readouterr()
        return Ran(status, captured.out, captured.err)


ARGV = [sys.executable, "-m", "kafka_marshal"]


def clean_environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process, without variables that affect the command."""
    return {name: value for name, value in os.environ.items() if name not in ENVIRONMENT} | {"TZ": "UTC", **more}


def process(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
    """The command as a process without a terminal."""
    env = clean_environment(kwargs.pop("env", {}))
    return subprocess.run([*ARGV, *args], capture_output=True, timeout=180, check=False, env=env, **kwargs)


@contextmanager
def start(*args: str, **kwargs: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a running process, which ends with the block."""
    for stream in ("stdout", "stderr"):
        kwargs.setdefault(stream, subprocess.PIPE)
    with subprocess.Popen([*ARGV, *args], env=clean_environment(kwargs.pop("env", {})), **kwargs) as running:
        try:
            yield running
        finally:
            if running.poll() is None:
                running.kill()


#: How long a user waits before typing an answer again.
RETYPE_S = 3.0


class Terminal:
    """The command on a pseudo terminal, with its output."""

    def __init__(self, *args: str, columns: int = 140, argv: Sequence[str] = ARGV) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        env = clean_environment({"TERM": "xterm-256color"})
        self.process = subprocess.Popen(
            [*argv, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )
        os.close(theirs)
        self.shown = b""

    def read_until(self, done: Callable[[bytes], bool], timeout_s: float = 90.0) -> bytes:
        """Read until ``done`` accepts the output."""
        deadline = time.monotonic() + timeout_s
        while not done(self.shown):
            left = deadline - time.monotonic()
            assert left > 0, f"only this was shown in {timeout_s} s: {self.shown!r}"
            if select.select([self._ours], [], [], min(left, 0.2))[0]:
                try:
                    self.shown += os.read(self._ours, 65536)
                except OSError:  # the other end is closed
                    assert done(self.shown), f"only this was shown: {self.shown!r}"
        return self.shown

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def finish(self, timeout_s: float = 90.0, again: bytes = b"") -> bytes:
        """Read until it ends; returns all output.

        again: typed again if nothing happens. A question is shown shortly before the terminal is prepared for its
        answer, which drops earlier input: on a busy machine a program is that fast.
        """
        deadline, retype_at = time.monotonic() + timeout_s, time.monotonic() + RETYPE_S
        while time.monotonic() < deadline:
            if again and time.monotonic() >= retype_at and self.process.poll() is None:
                retype_at += RETYPE_S
                self.type(again)
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._ours, 65536)
                    continue
                except OSError:
                    break
            if self.process.poll() is not None:
                break
        self.process.wait(timeout_s)
        return self.shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self._ours)


class Log:
    """A growing log: records of one CP or more, with ascending offsets, as a dump."""

    def __init__(self, partitions: int = 1, topic: str = "__marshal") -> None:
        self.partitions = partitions
        self.lines = [header_line(DumpHeader(topic, partitions))]
        self._next = [0] * partitions

    def add(self, record: Record | bytes | None, timestamp_ms: int, partition: int | None = None) -> int:
        """Append a record (to its own CP unless one is given); returns its offset."""
        if partition is None:
            partition = home(record, self.partitions)
        value = encode(record) if isinstance(record, Record) else record
        offset = self._next[partition]
        self._next[partition] += 1
        self.lines.append(record_line(DumpRecord(partition, offset, timestamp_ms, value)))
        return offset

    @property
    def dump(self) -> bytes:
        return ("\n".join(self.lines) + "\n").encode()


def home(record: Record | bytes | None, partitions: int) -> int:
    """Where a record belongs."""
    topic, number = getattr(record, "topic", None), getattr(record, "partition", None)
    return route_lease(topic, number, partitions) if isinstance(topic, str) and isinstance(number, int) else 0
