"""The page's history of a long log: folded by one process and by two, and read from its file.

    python -m benchmarks.ui_index [--records N] [--partitions N] [--short] [--json FILE]

The log of benchmarks.ui as a dump. `wall` is as measured, with whatever else the machine does; `processor` is the time
of all processes together; memory is the largest sum of all processes at a time. A target of two minutes for 10,000,000
records is judged by what this number of records takes, times what is missing.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.common import Row, report
from benchmarks.ui import CPS, GROUP, Story, limit
from kafka_marshal.ui import archive as archives
from kafka_marshal.ui import folding
from kafka_marshal.ui.archive import Histories, read_dump
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.kept import pack, unpack
from kafka_marshal.ui.moments import Moment
from rationalizer.dump import DumpHeader, DumpLines, header_line
from tests.ui.cells import cells

#: The log that the targets are for.
WHOLE = 10_000_000


def write(story: Story, path: Path) -> None:
    """The log as a dump."""
    lines = {cp: DumpLines(cp) for cp in range(CPS)}
    with path.open("w") as file:
        file.write(header_line(DumpHeader("__marshal", CPS)) + "\n")
        for cp, run in story.runs():
            file.writelines(f"{line}\n" for line in lines[cp].take(run))
        for each in lines.values():
            file.writelines(f"{line}\n" for line in each.end())


def rss_mib(pid: int) -> float:
    """Resident memory of a process and its children, without what they share."""
    found = 0.0
    for each in [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]:
        try:
            rows = Path(f"/proc/{each}/status").read_text().splitlines()
        except FileNotFoundError:
            continue
        found += sum(int(row.split()[1]) for row in rows if row.startswith("RssAnon:")) / 1024
    return found


def processor() -> float:
    """Seconds of this process and of its children that have ended."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in found)


def fold(path: Path, cores: int) -> tuple[History, float, float, float]:
    """The history, seconds, seconds of processor, and memory (MiB)."""
    archives.DUMP_AT_LEAST = 0  # type: ignore[misc]
    folding.processes = lambda: cores
    archive, most, stop = Histories("?", is_live=False), [0.0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.1):
            most[0] = max(most[0], rss_mib(os.getpid()))

    thread = threading.Thread(target=sample)
    thread.start()
    began, spent = time.perf_counter(), processor()
    with path.open("rb") as file:
        read_dump(archive, file, threading.Event())
    wall, spent = time.perf_counter() - began, processor() - spent
    stop.set()
    thread.join()
    assert archive.whole is not None
    return archive.whole, wall, spent, most[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, help="1,000,000; short: 60,000")
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--short", action="store_true", help="does it run")
    parser.add_argument("--json", help="write the rows here, too")
    args = parser.parse_args()
    story = Story(args.records or (60_000 if args.short else 1_000_000), args.partitions)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump"
        write(story, path)
        side_by_side, wall, spent, memory = fold(path, 2)
        share = WHOLE / story.written
        rows.append(limit("two processes, wall", wall, None, "s"))
        rows.append(limit("… of 10,000,000 records, by this", wall * share, 120, "s"))
        rows.append(limit("two processes, processor", spent, None, "s"))
        rows.append(limit("memory of all", memory, 600, "MiB"))
        alone, wall, spent, memory = fold(path, 1)
        rows.append(limit("one process, wall", wall, None, "s"))
        rows.append(limit("one process, processor", spent, None, "s"))
        rows.append(limit("memory of it", memory, None, "MiB"))
    at = Moment(story.end_ms - 60_000)
    assert cells(alone, alone.groups[GROUP], at) == cells(side_by_side, side_by_side.groups[GROUP], at)
    began = time.thread_time()
    packed = pack(alone)
    rows.append(limit("packing the history for its file", time.thread_time() - began, None, "s"))
    rows.append(limit("the file", len(packed) / 1e6, None, "MB"))
    began = time.thread_time()
    unpack(packed)
    rows.append(limit("a start that reads the file instead of the log", time.thread_time() - began, None, "s"))
    report("ui_index", rows, args.json, records=f"{story.written:,}", partitions=f"{args.partitions:,}")


if __name__ == "__main__":
    main()
