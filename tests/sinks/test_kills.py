"""Writers of single records that are killed at any moment, and others that continue although a newer epoch writes."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.broker.helpers import REPOSITORY
from tests.sinks.conftest import Kind

RECORDS = 300
THREADS = 6

#: On a line of input, writes all records that are not done, in a random order, with THREADS threads. Prints "before N"
#: after its first, the number of rows of older epochs; then a line for each; and "stale" or "end".
WRITER = f"""
import random, sys, threading
sys.path[:0] = ["marshal", "."]
from concurrent.futures import ThreadPoolExecutor
from tests.sinks.conftest import Kind
from tests.sinks.test_done_records import handle
from kafka_marshal.errors import StaleEpochError
import kafka_marshal.sinks.base

kafka_marshal.sinks.base.MERGE_EVERY = 7
name, where, epoch = sys.argv[1], sys.argv[2], int(sys.argv[3])
kind = Kind(name, where)
sink, stale = kind.sink(), threading.Event()

def say(word):
    sys.stdout.write(word + "\\n")
    sys.stdout.flush()

def write(offset):
    if stale.wait(random.random() / 100):
        return
    try:
        handle(kind, sink, offset, epoch)
    except StaleEpochError:
        stale.set()
    else:
        say("wrote")

todo = list(range({RECORDS}))
random.Random(epoch).shuffle(todo)
say("ready")
sys.stdin.readline()
write(todo.pop())
if not stale.is_set():
    older = f"SELECT count(*) FROM results WHERE CAST(value AS integer) < {{epoch}}"
    say(f"before {{kind.ask(older)[0][0]}}")
with ThreadPoolExecutor({THREADS}) as pool:
    list(pool.map(write, todo))
say("stale" if stale.is_set() else "end")
"""


class Writer:
    """A process that writes with one epoch."""

    def __init__(self, kind: Kind, epoch: int, log: Path) -> None:
        self.epoch, self.said, self.lines = epoch, queue.Queue[str](), list[str]()
        self.errors = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, kind.name, kind.where, str(epoch)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            self.said.put(line)

    def hear(self, lines: int) -> None:
        """Wait for ``lines`` lines, or the end."""
        until = time.monotonic() + 60
        while lines and (self.thread.is_alive() or not self.said.empty()):
            assert time.monotonic() < until, self.lines[-3:]
            try:
                self.said.get(timeout=0.05)
            except queue.Empty:
                continue
            lines -= 1

    def go(self) -> None:
        """It may begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.wait(60)
        self.thread.join(60)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.errors.close()

    @property
    def before(self) -> int | None:
        """Number of rows of older epochs after its first record."""
        found = [int(line.split()[1]) for line in self.lines if line.startswith("before")]
        return found[0] if found else None


@pytest.mark.flaky(reruns=0)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_each_record_is_written_once_whichever_writer_dies_or_continues(
    kind: Kind, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    draw = random.Random(seed)
    writers = [Writer(kind, epoch, tmp_path / f"{epoch}.log") for epoch in range(1, 7)]
    for each in writers:
        each.hear(1)
    alive: list[Writer] = []
    for each in writers:
        request.addfinalizer(each.process.kill)
    for each in writers[:-1]:
        each.go()
        each.hear(draw.randint(5, 30))
        # One half is killed in the middle; the other half continues until it is rejected.
        if draw.random() < 0.5:
            each.end(kill=True)
        else:
            alive.append(each)
    writers[-1].go()
    for each in (*alive, writers[-1]):
        each.end()
    told = json.dumps({each.epoch: each.lines[-1:] for each in writers}) + "".join(
        path.read_text()[-500:] for path in tmp_path.glob("*.log")
    )
    assert writers[-1].lines[-1] == "end", told
    rows = kind.rows()
    assert [offset for offset, _ in rows] == list(range(RECORDS)), told
    by_epoch = [int(value) for _, value in rows]
    assert len(set(by_epoch)) > 3, told
    for each in writers:
        if each.before is not None:
            assert sum(epoch < each.epoch for epoch in by_epoch) == each.before, (each.epoch, told)
    for each in alive:
        assert each.lines[-1] in ("stale", "end"), told
    assert kind.sink().progress("group")["flights", 0].last_offset == RECORDS - 1
