"""Folds a long log in processes side by side, each its share of the coordination partitions.

`fold` starts them. Each reads its part by itself, from Kafka or from a dump, and hands over what it has folded: soon at
first, then ever more rarely, so that all of this costs half as much again as the last time. The page shows it.
A process ends with the one that started it, as their connection does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, BinaryIO, Final

from kafka_marshal.errors import KafkaUnavailableError, MarshalError
from kafka_marshal.observe.log import Log, Source
from kafka_marshal.observe.words import dump_changed
from kafka_marshal.ports import LogEntry
from kafka_marshal.ui.fold import GroupHistory, History
from kafka_marshal.ui.kept import pack, unpack
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

#: What a process sends, and `fold` reports: (kind, content). Progress: (read, in all); a problem: why it does not
#: continue, or what was changed in a dump, "" that it continues; a history, the last one when it is done.
PROGRESS, PROBLEM, HISTORY, DONE = "progress", "problem", "history", "done"

#: What else is found of a process: its error, or the status with which it ended.
_FAILED, _ENDED = "failed", "ended"


class ProcessLostError(Exception):
    """A process ended before its share was folded."""


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
    return {"kafka": kafka, "ends": dict(ends)}


def of_dump(path: str) -> dict[str, Any]:
    """What a process has to know to read a dump."""
    return {"dump": path}


def fold(
    task: Mapping[str, Any], worlds: Mapping[int, World], sizes: Mapping[int, int], stop: threading.Event
) -> Iterator[tuple[str, Any]]:
    """Fold a log that begins with these worlds (*blocking*): what it comes to, until all is done or it was stopped.

    sizes: how much there is of each CP. Raises ProcessLostError, DumpError, MarshalError.
    """
    shares = _shares(sizes, processes())
    children: list[subprocess.Popen[bytes]] = []
    pipes: list[Connection] = []
    try:
        for _ in shares:
            ours, theirs = Pipe()
            with theirs:
                number = theirs.fileno()
                command = [sys.executable, "-P", "-m", __name__, str(number)]
                children.append(subprocess.Popen(command, pass_fds=[number], start_new_session=True))
            pipes.append(ours)
        for pipe, share in zip(pipes, shares, strict=True):
            history = History(next(iter(worlds.values())).partitions, {cp: worlds[cp] for cp in share})
            try:
                pipe.send((task, pack(history)))
            except BrokenPipeError:
                raise ProcessLostError("a process did not begin") from None
        yield from _collect(len(shares), _answers(pipes, children, stop))
    finally:
        for child in children:
            child.kill()
            child.wait()
        for pipe in pipes:
            pipe.close()


def _shares(sizes: Mapping[int, int], count: int) -> list[list[int]]:
    """CPs in as many shares as there are processes, about equal in size."""
    shares: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    for cp in sorted(sizes, key=lambda cp: (-sizes[cp], cp)):
        min(shares, key=lambda share: (sum(sizes[each] for each in share), len(share))).append(cp)
    return shares


def _answers(
    pipes: Sequence[Connection], children: Sequence[subprocess.Popen[bytes]], stop: threading.Event
) -> Iterator[tuple[int, str, Any]]:
    """What processes send: (number of the process, kind, content), until `stop` is set or all have ended."""
    numbers = {pipe: number for number, pipe in enumerate(pipes)}
    while numbers and not stop.is_set():
        for pipe in wait(list(numbers), REPORT_S):
            assert isinstance(pipe, Connection)
            try:
                yield numbers[pipe], *pipe.recv()
            except (EOFError, ConnectionError):
                number = numbers.pop(pipe)
                yield number, _ENDED, f"status {children[number].wait()}"


def _collect(count: int, answers: Iterable[tuple[int, str, Any]]) -> Iterator[tuple[str, Any]]:
    """What the processes come to together."""
    done: set[int] = set()
    read: dict[int, tuple[int, int]] = {}
    problems: dict[int, str] = {}
    packed: dict[int, bytes] = {}
    fresh: set[int] = set()
    for number, kind, content in answers:
        if kind == PROGRESS:
            read[number] = content
            yield PROGRESS, (sum(each for each, _ in read.values()), sum(each for _, each in read.values()))
        elif kind == PROBLEM:
            problems[number] = content
            yield PROBLEM, "; ".join(dict.fromkeys(filter(None, problems.values())))
        elif kind in (HISTORY, DONE):
            packed[number] = content
            fresh.add(number)
            done |= {number} if kind == DONE else set()
            if len(done) == count:
                yield DONE, merged([unpack(packed[number]) for number in sorted(packed)])
                return
            if len(fresh | done) == count:
                fresh.clear()
                yield HISTORY, merged([unpack(each) for each in packed.values()])
        elif kind == _FAILED:
            raise content
        elif number not in done:
            raise ProcessLostError(f"a process that folded the log ended ({content})")


def merged(parts: Sequence[History]) -> History:
    """One history of several, each of which has folded other coordination partitions. The parts are used up.

    All but groups, names and sums is kept by coordination partition anyway. What several of them say of one partition
    of a group carries its place in the log: the later place prevails.
    """
    whole, *others = parts
    for other in others:
        for ours, theirs in ((whole, other), (other, whole)):
            for name in ours.groups.keys() - theirs.groups.keys():
                ours.groups[name].count_rejected(theirs.events)
        names, owners = whole.names.absorb(other.names), whole.owners.absorb(other.owners)
        base = len(whole.spans)
        whole.spans.extend(other.spans, {"owner": owners, "by": names, "evictor": names})
        whole.events.absorb(other.events, names)
        for by_cp in ("worlds", "marks", "starts", "joints", "folds"):
            getattr(whole, by_cp).update(getattr(other, by_cp))
        for name, group in other.groups.items():
            for found in group.keys.values():
                found.renumber(base, owners)
            known = whole.groups.get(name)
            if known is None:
                whole.groups[name] = group
            else:
                _absorb_group(known, group, whole, is_home=group.home in other.worlds)
    whole.worlds = dict(sorted(whole.worlds.items()))
    return whole


def _absorb_group(known: GroupHistory, other: GroupHistory, whole: History, *, is_home: bool) -> None:
    if is_home:  # only there
        for name in ("assignments", "rebalances", "pulses", "counts", "checkpoints"):
            setattr(known, name, getattr(other, name))
    known.paused.update(other.paused)
    known.series.absorb(other.series)
    for place, found in other.keys.items():
        if place in known.keys:
            known.keys[place].absorb(found)
        else:
            known.keys[place] = found
    leased = [found for found in known.keys.values() if found.open and found.open[0].is_lease]
    if known.assignments is None or not leased:
        return
    if known.assignments.now:
        for found in leased:
            found.begin([], whole.owners)
    else:  # it was converted: it has leases now (G1)
        known.assignments = None


# -- in such a process -------------------------------------------------------------------------------------------


def main() -> None:
    """Fold one share, as the first message of the connection says (the descriptor is the argument)."""
    pipe = Connection(int(sys.argv[1]))
    try:
        task, packed = pipe.recv()
    except EOFError:
        return
    threading.Thread(target=_end_with_the_other, args=(pipe,), daemon=True).start()
    os.nice(NICE)
    try:
        _Worker(task, unpack(packed), pipe).run()
    except (DumpError, MarshalError) as error:
        pipe.send((_FAILED, error))


def _end_with_the_other(pipe: Connection) -> None:
    with suppress(EOFError, ConnectionError):
        pipe.recv()
    os._exit(0)


class _Worker:
    def __init__(self, task: dict[str, Any], history: History, pipe: Connection) -> None:
        self._task = task
        self._history = history
        self._pipe = pipe
        self._folded = 0
        self._hand_over = HAND_OVER
        self._reported = 0.0

    def run(self) -> None:
        for cp, entries in self._of_dump() if "dump" in self._task else self._of_kafka():
            self._history.take(cp, entries)
            self._folded += len(entries)
            if self._folded >= self._hand_over:
                self._hand_over = HAND_OVER_GROWS * self._folded
                self._pipe.send((HISTORY, pack(self._history)))
        self._pipe.send((DONE, pack(self._history)))

    def _report(self, done: int, of_all: int) -> None:
        now = time.monotonic()
        if now >= self._reported + REPORT_S or done == of_all:
            self._reported = now
            self._pipe.send((PROGRESS, (done, of_all)))

    def _of_kafka(self) -> Iterator[tuple[int, list[LogEntry]]]:
        """Records from where the history is; while Kafka is away, it is tried again."""
        kafka = self._task["kafka"]
        source = Source(kafka["topic"], kafka["timeout"], lambda: (kafka["bootstrap"], kafka["properties"]))
        worlds = self._history.worlds
        ends = self._task["ends"]
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
                            self._pipe.send((PROBLEM, ""))
                        log.check_marker(cp, entries[0])
                        yield cp, entries
                    return
                finally:
                    cluster.close()
            except KafkaUnavailableError as error:
                problem = str(error)
                self._pipe.send((PROBLEM, problem))
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
            self._pipe.send((PROBLEM, "; ".join(found)))


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
