"""A process that writes to a Delta table with one epoch until it is rejected, killed, or done.

``python -m tests.sinks.delta_writer TABLE EPOCH ROWS PARTITION…``: prints "ready", waits for a line, then prints a line
for each batch, and "stale" or "end".
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from kafka_marshal.errors import SinkError, StaleEpochError
from kafka_marshal.sinks import DeltaSink
from tests.broker.helpers import REPOSITORY

SCHEMA = pa.schema([("partition", pa.int32()), ("offset", pa.int64()), ("epoch", pa.int64())])


def batch(partition: int, epoch: int, first: int, last: int) -> pa.Table:
    offsets = range(first, last + 1)
    columns = {"partition": [partition] * len(offsets), "offset": list(offsets), "epoch": [epoch] * len(offsets)}
    return pa.table(columns, schema=SCHEMA)


def write(sink: DeltaSink, epoch: int, first: int, last: int, partition: int = 0) -> int:
    """Handle a batch as a worker does; returns the number of rows written."""
    with sink.transaction("group", [("flights", partition, epoch, last)]) as tx:
        first = max(first, tx.last_offset("flights", partition) + 1)
        if first <= last:
            tx.append(batch(partition, epoch, first, last))
    return max(0, last - first + 1)


def main(table: str, epoch: int, rows: int, *partitions: int) -> None:
    draw, sink = random.Random(epoch), DeltaSink(table, schema=SCHEMA)
    say("ready")
    sys.stdin.readline()
    at = {
        partition: sink.progress("group", [("flights", partition)]).get(("flights", partition))
        for partition in partitions
    }
    todo = {partition: 0 if stored is None else stored.last_offset + 1 for partition, stored in at.items()}
    while todo:
        partition = draw.choice(list(todo))
        # The log may be behind the table: some rows are repeated.
        first = max(0, todo[partition] - draw.randint(0, 3))
        last = min(rows - 1, todo[partition] + draw.randint(0, 5))
        try:
            write(sink, epoch, first, last, partition)
        except StaleEpochError:
            say("stale")
            return
        except SinkError as error:
            if not error.retry:
                raise
            continue
        say(f"stored {partition} {last}")
        todo[partition] = last + 1
        if last == rows - 1:
            del todo[partition]
    say("end")


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


class Writer:
    """Such a process, ready."""

    def __init__(self, table: Path, epoch: int, rows: int, *partitions: int) -> None:
        self.log = (table.parent / f"{table.name}-{epoch}.log").open("w+")
        command = [sys.executable, "-m", "tests.sinks.delta_writer", *map(str, (table, epoch, rows, *partitions))]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def hear(self, lines: int = 1) -> str:
        """Read ``lines`` lines; returns the last, or "" if it has ended."""
        assert self.process.stdout is not None
        return [self.process.stdout.readline().strip() for _ in range(lines)][-1]

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def rest(self) -> str:
        """Its last line, once it has ended successfully."""
        said, _ = self.process.communicate(timeout=180)
        self.log.seek(0)
        assert self.process.returncode == 0, self.log.read()
        self.log.close()
        return said.split("\n")[-2] if said else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


if __name__ == "__main__":
    # As the tests start it.
    main(sys.argv[1], *map(int, sys.argv[2:]))
