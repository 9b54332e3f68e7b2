"""Messages a second with a handler that computes, in 1, 2 and 4 processes: `kafka-marshal work` beside plain consumers.

    python -m benchmarks.processes [--records N] [--rounds N] [--concurrency N] [--processes N …] [--json FILE]

A plain process is a loop around confluent-kafka's consumer in a classic group, as a prefork server has it: it keeps no
order by key, tries nothing again and commits every 5 s. Only the time in which all processes work is measured.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from confluent_kafka import Consumer, Message

from benchmarks.common import bench_kafka, in_turns, new_log, paired, report
from benchmarks.throughput import fill

PARTITIONS, KEYS = 8, 1_000
PROCESSES = (1, 2, 4)
#: Half a millisecond or so of Python.
TURNS = 10_000

_NOTE = struct.Struct("<id")


def handle(message: Message) -> None:
    """Compute, and note which process did when."""
    found = 0
    for turn in range(TURNS):
        found = (31 * found + turn) & 0xFFFF
    os.write(_notes(), _NOTE.pack(os.getpid(), time.time()))


def _notes(opened: list[int] = []) -> int:  # noqa: B006 - once in each process
    if not opened:
        opened.append(os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    return opened[0]


def plain(bootstrap: str, topic: str, group: str) -> None:
    """A plain process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    while True:
        for message in consumer.consume(500, 0.1):
            handle(message)


def rate(records: int, commands: Sequence[Sequence[str]], processes: int) -> float:
    """Messages a second while all processes work; the commands start them."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        notes.touch()
        environment = {**os.environ, "NOTES": str(notes)}
        started = [subprocess.Popen(each, env=environment, stdout=subprocess.DEVNULL) for each in commands]
        while notes.stat().st_size < _NOTE.size * records:
            time.sleep(0.05)
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
        found = list(_NOTE.iter_unpack(notes.read_bytes()))
    times = [[when for pid, when in found if pid == each] for each in {pid for pid, _ in found}]
    assert len(times) == processes, f"{len(times)} of {processes} processes had messages: more records are needed"
    begin, end = max(map(min, times)), min(map(max, times))
    return float(sum(begin < when <= end for _, when in found) / (end - begin))


def ours(bootstrap: str, log: str, topic: str, records: int, concurrency: int, processes: int) -> float:
    """`kafka-marshal work`."""
    argv = ["-m", "kafka_marshal", "work", "benchmarks.processes:handle", "--bootstrap", bootstrap, "--topic", log]
    argv += ["--group", f"g-{uuid.uuid4().hex[:8]}", "--topics", topic, "--processes", str(processes)]
    return rate(records, [[sys.executable, *argv, "--concurrency", str(concurrency)]], processes)


def theirs(bootstrap: str, topic: str, records: int, processes: int) -> float:
    """As many plain processes."""
    call = f"plain({bootstrap!r}, {topic!r}, 'g-{uuid.uuid4().hex[:8]}')"
    command = [sys.executable, "-c", f"from benchmarks.processes import plain; {call}"]
    return rate(records, [command] * processes, processes)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=10_000, help="for each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--processes", type=int, nargs="+", default=PROCESSES)
    parser.add_argument("--json")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rows = []
    with bench_kafka() as bootstrap:
        log, most = new_log(bootstrap, 8), args.records * max(args.processes)
        topic = fill(bootstrap, PARTITIONS, most, KEYS)
        for number in args.processes:
            with_us = partial(ours, bootstrap, log, topic, args.records * number, args.concurrency, number)
            without = partial(theirs, bootstrap, topic, args.records * number, number)
            rows.append(paired(f"{number} processes", in_turns(args.rounds, with_us, without), 0.9, "messages/s"))
    report("processes", rows, args.json, records=args.records, rounds=args.rounds, concurrency=args.concurrency)


if __name__ == "__main__":
    main()
