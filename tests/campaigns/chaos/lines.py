"""Workers' output, one line per event, written at once so that it survives a kill.

Lines are JSON arrays ``[what, at, …]``; ``at`` is the wall clock in milliseconds, which is also the broker's:

======== =================================================== ==========================================================
start    group, client_id, instance_id, kind, fail point      the Marshal exists; the file's first line
handed   topic, partition, first, last, epoch                 a batch was delivered
begin    topic, partition, offset, epoch, number              a message's handling begins (epoch −1: unknown)
end      topic, partition, offset                             … and has ended
done     topic, partition, offset                             the client knows that it is done
sent     CP, step, value's digest                             a record is about to be appended
lost     topic, partition                                     on_lost
reported topic, partition, first, last                        at most once: granted, never delivered (C13)
digest   CP, next_offset, digest                              of the worker's replica, at its end
die      fail point                                           the next moment is kill -9
error    type, text                                           the worker ends with this
closed                                                        … or regularly
======== =================================================== ==========================================================
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from hashlib import blake2s
from pathlib import Path
from typing import Any

Line = list[Any]


def digest_of(value: bytes) -> str:
    """A digest that identifies a record's value."""
    return blake2s(value, digest_size=8).hexdigest()


class Pen:
    """Appends lines to a file. Any thread may write: each line is one write to a file opened for appending."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, what: str, *fields: object) -> None:
        """One line, with the time."""
        os.write(self._file, json.dumps([what, round(time.time() * 1000, 1), *fields]).encode() + b"\n")


def read_lines(path: Path) -> Iterator[Line]:
    """All complete lines of a file."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
