"""Folds a long log in processes side by side, each its share of the coordination partitions.

`fold` starts them. Each reads its part by itself, from Kafka or from a dump, and hands over what it has folded: soon at
first, then ever more rarely, so that all of this costs half as much again as the last time. The page shows it.
A process ends with the one that started it, as its standard input does.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Any, BinaryIO, Final

from kafka_marshal.errors import KafkaUnavailableError, MarshalError
from kafka_marshal.observe.log import Log, Source
from kafka_marshal.observe.words import dump_changed
from kafka_marshal.ports import LogEntry
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.merging import merged
from kafka_marshal.ui.packing import pack, unpack
from rationalizer import World
from rationalizer.dump import DumpError, DumpReader
from rationalizer.log_hash import LogHash

#: Fewer records are folded by a thread of the page: processes take a second to begin.
AT_LEAST: Final = 300_000

#: The most processes: each takes some 100 MB, and the page and the broker need a core, too.
MOST_PROCESSES: Final = 2

#: A process hands over after this many records, and then each time it has this many times as many.
HAND_OVER: Final = 50_000
HAND_OVER_GROWS: Final = 3

#: After a failure, reading continues after this long (s).
RETRY_S: Final = 2.0

#: Records of a dump that are applied together.
RUN: Final = 2_000

#: Processes report progress at this interval (s).
REPORT_S: Final = 0.2

#: How much a process gives way to the page, and to brokers on this machine.
NICE: Final = 5

#: Lines of a dump as this package writes them: the partition is known without reading the line.
_LINE: Final = b'{"partition": '
_MOST_DIGITS: Final = 10

_PROGRESS, _PROBLEM, _HISTORY, _DONE, _FAILED = b"p", b"w", b"h", b"d", b"f"


class ProcessLostError(Exception):
    """A process ended before its share was folded."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a fold reports meanwhile."""

    #: Called with (read, in all).
    read: Callable[[int, int], object]
    #: Called with why it does not continue, or what was changed in a dump; "": it continues.
    problem: Callable[[str], object]
    #: Called with the history so far.
    history: Callable[[History], object]


def runs(records: Iterable[tuple[int, LogEntry]], most: int) -> Iterator[tuple[int, list[LogEntry]]]:
    """Records of several CPs as runs of one CP each, of at most this length."""
    for cp, found in groupby(records, key=lambda each: each[0]):
        run: list[LogEntry] = []
        for _, entry in found:
            run.append(entry)
            if len(run) == most:
                yield cp, run
                run = []
        if run:
            yield cp, run


def processes() -> int:
    """How many may be started: as many as there are cores, up to the limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_PROCESSES, cores)


def of_kafka(source: Source, ends: Mapping[int, int]) -> dict[str, Any]:
    """What a process has to know to read a log up to these ends."""
    bootstrap, properties = source.connection()
    kafka = {"topic": source.topic, "timeout": source.timeout, "bootstrap": bootstrap, "properties": properties}
    return {"kafka": kafka, "ends": sorted(ends.items())}


def of_dump(path: str) -> dict[str, Any]:
    """What a process has to know to read a dump."""
    return {"dump": path}


def fold(
    task: Mapping[str, Any], worlds: Mapping[int, World], sizes: Mapping[int, int], stop: threading.Event, see: Progress
) -> History | None:
    """The history of a log that begins with these worlds (*blocking*); None: it was stopped.

    sizes: how much there is of each CP. Raises ProcessLostError, DumpError, MarshalError.
    """
    shares = _shares(sizes, processes())
    answers: queue.Queue[tuple[int, bytes, bytes]] = queue.Queue()
    started: list[subprocess.Popen[bytes]] = []
    listening: list[threading.Thread] = []
    try:
        for number, share in enumerate(shares):
            partitions = next(iter(worlds.values())).partitions
            history = History(partitions, {cp: worlds[cp] for cp in share})
            command = [sys.executable, "-P", "-m", __name__]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            started.append(child)
            listening.append(threading.Thread(target=_listen, args=(number, child, answers), daemon=True))
            listening[-1].start()
            assert child.stdin is not None
            try:
                _send(child.stdin, _PROGRESS, json.dumps(task).encode())
                _send(child.stdin, _HISTORY, pack(history))
            except BrokenPipeError:
                raise ProcessLostError("a process did not begin") from None
        return _collect(len(shares), answers, stop, see)
    finally:
        for child in started:
            child.kill()
            child.wait()
            assert child.stdin is not None
            with suppress(BrokenPipeError):
                child.stdin.close()
        for thread in listening:
            thread.join()


def _shares(sizes: Mapping[int, int], count: int) -> list[list[int]]:
    """CPs in as many shares as there are processes, about equal in size."""
    shares: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    for cp in sorted(sizes, key=lambda cp: (-sizes[cp], cp)):
        min(shares, key=lambda share: (sum(sizes[each] for each in share), len(share))).append(cp)
    return shares


def _collect(
    count: int, answers: queue.Queue[tuple[int, bytes, bytes]], stop: threading.Event, see: Progress
) -> History | None:
    done: set[int] = set()
    read: dict[int, tuple[int, int]] = {}
    problems: dict[int, str] = {}
    packed: dict[int, bytes] = {}
    fresh: set[int] = set()
    while len(done) < count:
        if stop.is_set():
            return None
        try:
            number, kind, content = answers.get(timeout=REPORT_S)
        except queue.Empty:
            continue
        if kind == _PROGRESS:
            passed, of_all = json.loads(content)
            read[number] = passed, of_all
            see.read(sum(each for each, _ in read.values()), sum(each for _, each in read.values()))
        elif kind == _PROBLEM:
            problems[number] = content.decode()
            see.problem("; ".join(dict.fromkeys(filter(None, problems.values()))))
        elif kind in (_HISTORY, _DONE):
            packed[number] = content
            fresh.add(number)
            done |= {number} if kind == _DONE else set()
            if len(done) < count and len(fresh | done) == count:
                fresh.clear()
                see.history(merged([unpack(each) for each in packed.values()]))
        elif kind == _FAILED:
            failed = json.loads(content)
            raise DumpError(*failed["dump"]) if "dump" in failed else MarshalError(failed["text"])
        elif number not in done:
            raise ProcessLostError(f"a process that folded the log ended ({content.decode()})")
    return merged([unpack(packed[number]) for number in sorted(packed)])


def _listen(number: int, child: subprocess.Popen[bytes], answers: queue.Queue[tuple[int, bytes, bytes]]) -> None:
    assert child.stdout is not None
    with child.stdout as pipe:
        while (found := _receive(pipe)) is not None:
            answers.put((number, *found))
    answers.put((number, b"", f"status {child.wait()}".encode()))


def _send(pipe: IO[bytes], kind: bytes, content: bytes) -> None:
    pipe.write(kind + len(content).to_bytes(8, "big") + content)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[bytes, bytes] | None:
    """The next message; None: the other end is gone."""
    head = pipe.read(9)
    size = int.from_bytes(head[1:], "big")
    content = pipe.read(size) if len(head) == 9 else b""
    return (head[:1], content) if len(head) == 9 and len(content) == size else None


# -- in such a process -------------------------------------------------------------------------------------------


def main() -> None:
    """Fold one share, as standard input says; answers go to standard output."""
    asked, history = _receive(sys.stdin.buffer), _receive(sys.stdin.buffer)
    if asked is None or history is None:
        return
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    os.nice(NICE)
    worker = _Worker(json.loads(asked[1]), unpack(history[1]), sys.stdout.buffer)
    try:
        worker.run()
    except DumpError as error:
        _send(sys.stdout.buffer, _FAILED, json.dumps({"dump": [error.line_number, error.why]}).encode())
    except MarshalError as error:
        _send(sys.stdout.buffer, _FAILED, json.dumps({"text": str(error)}).encode())


def _end_with_the_other() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


class _Worker:
    def __init__(self, task: dict[str, Any], history: History, answers: BinaryIO) -> None:
        self._task = task
        self._history = history
        self._answers = answers
        self._folded = 0
        self._hand_over = HAND_OVER
        self._reported = 0.0

    def run(self) -> None:
        for cp, entries in self._of_dump() if "dump" in self._task else self._of_kafka():
            self._history.take(cp, entries)
            self._folded += len(entries)
            if self._folded >= self._hand_over:
                self._hand_over = HAND_OVER_GROWS * self._folded
                _send(self._answers, _HISTORY, pack(self._history))
        _send(self._answers, _DONE, pack(self._history))

    def _report(self, done: int, of_all: int) -> None:
        now = time.monotonic()
        if now >= self._reported + REPORT_S or done == of_all:
            self._reported = now
            _send(self._answers, _PROGRESS, json.dumps([done, of_all]).encode())

    def _of_kafka(self) -> Iterator[tuple[int, list[LogEntry]]]:
        """Records from where the history is; while Kafka is away, it is tried again."""
        kafka = self._task["kafka"]
        source = Source(kafka["topic"], kafka["timeout"], lambda: (kafka["bootstrap"], kafka["properties"]))
        worlds = self._history.worlds
        ends = {cp: end for cp, end in self._task["ends"] if cp in worlds}
        begun = {cp: world.next_offset for cp, world in worlds.items()}
        total = sum(max(0, ends[cp] - begun[cp]) for cp in worlds)

        def show(done: int, of_all: int) -> None:
            self._report(total - of_all + done, total)

        problem = ""
        while True:
            try:
                cluster = source.connect()
                try:
                    log = Log(cluster, source.topic, source.timeout)
                    begin = {cp: world.next_offset for cp, world in worlds.items()}
                    for cp, entries in log.read(begin, {cp: max(begin[cp], ends[cp]) for cp in worlds}, show):
                        if problem:
                            problem = ""
                            _send(self._answers, _PROBLEM, b"")
                        log.check_marker(cp, entries[0])
                        yield cp, entries
                    return
                finally:
                    cluster.close()
            except KafkaUnavailableError as error:
                problem = str(error)
                _send(self._answers, _PROBLEM, problem.encode())
                time.sleep(RETRY_S)

    def _of_dump(self) -> Iterator[tuple[int, list[LogEntry]]]:
        mine = self._history.worlds.keys()
        changed: list[LogHash] = []
        with open(self._task["dump"], "rb") as file:
            size = os.fstat(file.fileno()).st_size
            records = DumpReader(_lines(file, mine)).checked(changed)
            entries = ((each.partition, (each.offset, each.timestamp_ms, each.value)) for each in records)
            for cp, run in runs((each for each in entries if each[0] in mine), RUN):
                yield cp, run
                self._report(file.tell(), size)
        found = [dump_changed(each) for each in changed if each.partition in mine]
        if found:
            _send(self._answers, _PROBLEM, "; ".join(found).encode())


def _lines(file: BinaryIO, mine: Container[int]) -> Iterator[bytes]:
    """The lines of a dump, empty ones in place of those that are certainly of other CPs."""
    while line := file.readline():
        if line.startswith(_LINE) and b"\\" not in line and line.count(b'"partition"') == 1:
            number = line[len(_LINE) : line.find(b",")]
            if len(number) <= _MOST_DIGITS and number.isdigit() and int(number) not in mine:
                yield b"\n"
                continue
        yield line


if __name__ == "__main__":
    main()
