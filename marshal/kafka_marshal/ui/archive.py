"""Reads a whole log, or a dump, into a history in the background, and selects the history for a moment.

A live log is read twice: from its snapshots on, by `live`, for a short history at once; and from its beginning. When
the whole history reaches the short one, that is dropped. For a moment that neither has yet, the log is read around it,
from the snapshots before it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kafka_marshal.errors import KafkaUnavailableError, MarshalError
from kafka_marshal.logs import log
from kafka_marshal.observe.log import Log, Source
from kafka_marshal.observe.text import time_text
from kafka_marshal.observe.words import dump_changed
from kafka_marshal.ports import Cluster
from kafka_marshal.snapshots.reader import SnapshotReader, StoredAt
from kafka_marshal.topic_names import snapshots_topic
from kafka_marshal.ui import folding
from kafka_marshal.ui.fold import GroupHistory, History, begins, has
from kafka_marshal.ui.folding import RETRY_S, RUN, runs
from kafka_marshal.ui.kept import KeptIndex
from kafka_marshal.ui.moments import Moment, time_of
from rationalizer import SnapshotError, World
from rationalizer.limits import MAX_OFFSET
from rationalizer.log_hash import LogHash

if TYPE_CHECKING:
    from typing import BinaryIO

#: A history that has grown is saved at this interval (s), and at the end: a start after a kill reads this much again.
SAVE_S: Final = 300.0

#: A dump of fewer bytes is read by a thread: some 200 a record.
DUMP_AT_LEAST: Final = 200 * folding.AT_LEAST

#: Idle threads check at this interval (s) whether they are to stop.
LOOK_S: Final = 0.5

#: Reading the whole log waits while it is read around a moment, and checks at this interval (s).
YIELD_S: Final = 0.05


class NotReadError(Exception):
    """The history does not reach that moment, or that group, yet."""


class Histories:
    """The histories of one log. Any thread may ask."""

    def __init__(self, topic: str, *, is_live: bool) -> None:
        self.topic = topic
        self.is_live = is_live
        #: From the beginning of the log, as far as it was read.
        self.whole: History | None = None
        #: From snapshots on, until the whole one has reached it.
        self.recent: History | None = None
        #: Around the last requested moment that neither of them had.
        self.around: Around | None = None
        #: That moment, until the log around it is read.
        self.wanted: Moment | None = None
        self.asked: threading.Event = threading.Event()
        self.complete: bool = False
        #: CP → its end when reading of the whole one began.
        self.ends: dict[int, int] = {}
        #: (read, in all) of the whole one: offsets, or bytes of a dump.
        self.progress: tuple[int, int] = (0, 0)
        #: Why reading has stopped, or what was changed in a dump; "": neither.
        self.problem = ""
        #: What of it is no longer in the log; "": nothing.
        self.note = ""
        #: The file in which it is kept between starts; None: in none.
        self.kept: KeptIndex | None = None
        #: Called for new records at the end of the log, and once a dump's header is read.
        self.on_change: Callable[[], object] = lambda: None

    @property
    def newest(self) -> History | None:
        """The history that reaches to the end of the log."""
        return self.whole if self.complete or self.recent is None else self.recent

    def finished(self) -> None:
        """The whole history has reached the end of the log."""
        self.complete, self.recent, self.around, self.wanted = True, None, None, None
        self.asked.set()
        self.on_change()

    def bounds(self) -> tuple[int, int]:
        """The first and the last log time (ms) in the histories; (0, 0): none yet."""
        found = [history for history in (self.whole, self.recent) if history is not None]
        firsts = [times[0] for history in found for _, times in history.marks.values() if times]
        ends = [world.log_time for history in found for world in history.worlds.values()]
        return (min(firsts), max(ends)) if firsts else (0, 0)

    def reached(self) -> int:
        """The log time (ms) up to which the whole history has every CP; those read to their end don't count."""
        if self.whole is None:
            return 0
        worlds = self.whole.worlds
        late = [world.log_time for cp, world in worlds.items() if world.next_offset < self.ends.get(cp, MAX_OFFSET)]
        return min(late, default=max(world.log_time for world in worlds.values()))

    def history(self, moment: Moment | None = None) -> History:
        """The history for this moment; None: for the end. Raises NotReadError, and then reads around the moment."""
        newest = self.newest
        if newest is None:
            raise NotReadError("The log is being read: nothing of it is known yet.")
        if moment is None or self.complete or not self.is_live:
            return newest
        found = self._having(moment.time)
        if found is None:
            raise self._not_read(moment)
        return found

    def beyond(self, history: History, *, forward: bool) -> Moment | None:
        """A moment after or before those of this history; None: there is none."""
        if self.complete or not self.is_live or history is (self.newest if forward else self.whole):
            return None
        if not forward:
            return Moment(begins(history) - 1)
        around = self.around
        return Moment((around.until if around is not None and history is around.history else self.reached()) + 1)

    def covers(self, history: History, moment: Moment) -> bool:
        """Whether this history has this moment, too."""
        return history is (self.newest if self.complete or not self.is_live else self._having(moment.time))

    def _having(self, time: int) -> History | None:
        if self.whole is not None and time <= self.reached():
            return self.whole
        if self.recent is not None and begins(self.recent) <= time:
            return self.recent
        return self.around.history if self.around is not None and self.around.covers(time) else None

    def holding(self, cp: int, offset: int) -> History:
        """The history with this record; the newest once all is read. Raises NotReadError."""
        newest = self.history()
        if self.complete or not self.is_live or cp not in newest.worlds:
            return newest
        around = None if self.around is None else self.around.history
        for history in (self.whole, self.recent, around):
            if history is not None and has(history, cp, offset):
                return history
        if offset >= newest.worlds[cp].next_offset:
            return newest
        raise self._not_read(Moment(-1, cp, offset))

    def _not_read(self, moment: Moment) -> NotReadError:
        """Let the log around it be read next."""
        self.wanted = moment
        self.asked.set()
        done, of_all = self.progress
        share = f" ({100 * done // of_all} % are)" if of_all else ""
        return NotReadError(f"The log is not read as far as this moment yet{share}: it is read around it first.")

    def group(self, name: str, moment: Moment | None = None) -> tuple[History, GroupHistory]:
        """A group in the history for this moment. Raises NotReadError, KeyError."""
        history = self.history(moment)
        return history, history.groups[name]


def read_dump(archive: Histories, file: BinaryIO, stop: threading.Event) -> None:
    """Read a dump to its end, or until `stop` is set (*blocking*). Raises DumpError."""
    from rationalizer.dump import DumpReader

    size = os.fstat(file.fileno()).st_size
    reader = DumpReader(file)
    archive.topic = reader.header.topic
    history = archive.whole = History(reader.header.partitions)
    archive.on_change()
    if size >= DUMP_AT_LEAST and (
        found := _side_by_side(archive, folding.of_dump(file.name), history, dict.fromkeys(history.worlds, 1), stop)
    ):
        archive.whole, archive.progress = found, (size, size)
        archive.finished()
    if archive.complete or stop.is_set():
        return
    changed: list[LogHash] = []
    entries = ((each.partition, (each.offset, each.timestamp_ms, each.value)) for each in reader.checked(changed))
    read = 0
    for cp, run in runs(entries, RUN):
        history.take(cp, run)
        archive.problem = "; ".join(map(dump_changed, changed))
        read += sum(4 * len(value or b"") // 3 + 70 for _, _, value in run)
        archive.progress = (min(read, size), size)
        if stop.is_set():
            return
    archive.progress = (size, size)
    archive.finished()


def read_kafka(archive: Histories, source: Source, stop: threading.Event) -> None:
    """Read the log from its beginning, and then new records, until `stop` is set (*blocking*)."""
    while not stop.is_set():
        try:
            _read_on(archive, source, stop)
        except KafkaUnavailableError as error:
            archive.problem = str(error)
            stop.wait(RETRY_S)
        except Exception as error:  # noqa: BLE001  (the thread's end must be seen: the page would stop silently)
            archive.problem = f"The history is not read any further: {error}. Start kafka-marshal ui again."
            expected = isinstance(error, MarshalError)
            log(logging.ERROR, "history_ended", "%s", archive.problem, error=None if expected else error)
            break
    if archive.kept is not None and archive.complete and archive.whole is not None:
        archive.kept.save(archive.whole)


def read_around_moments(archive: Histories, source: Source, stop: threading.Event) -> None:
    """Read the log around requested moments, until all of it is read or `stop` is set (*blocking*)."""
    from kafka_marshal.ui.archive import read_around

    while not (archive.complete or stop.is_set()):
        if not archive.asked.wait(LOOK_S):
            continue
        archive.asked.clear()
        wanted = archive.wanted
        if wanted is None:
            continue
        place = None if wanted.cp < 0 else (wanted.cp, wanted.offset)
        try:
            found = read_around(source, wanted.time, place, lambda: stop.is_set() or archive.complete)
        except Exception as error:  # noqa: BLE001  (the whole history comes to that moment, too, but later)
            log(logging.WARNING, "moment_not_read", "the log around a moment can't be read yet", error=error)
            stop.wait(RETRY_S)
            found = None
        if found is not None:
            archive.around = found
            archive.on_change()
        if archive.wanted == wanted:
            archive.wanted = None


def _read_on(archive: Histories, source: Source, stop: threading.Event) -> None:
    def show(done: int, of_all: int) -> None:
        archive.progress = (done, of_all)

    cluster = source.connect()
    try:
        reader = source.open(cluster)
        archive.ends = reader.ends
        history = archive.whole
        if history is None:
            history = archive.whole = _begun(archive, cluster, reader, source, stop)
        begin = {cp: world.next_offset for cp, world in history.worlds.items()}
        for cp, entries in reader.read(begin, {cp: max(begin[cp], end) for cp, end in reader.ends.items()}, show):
            reader.check_marker(cp, entries[0])
            history.take(cp, entries)
            while archive.wanted is not None and not stop.is_set():
                stop.wait(YIELD_S)
            if stop.is_set():
                return
        archive.problem = ""
        archive.finished()
        save_at = 0.0
        for batch in reader.follow({cp: world.next_offset for cp, world in history.worlds.items()}):
            for cp, entries in batch.items():
                history.take(cp, entries)
            if batch:
                archive.on_change()
            if archive.kept is not None and time.monotonic() > save_at:
                archive.kept.save(history)
                save_at = time.monotonic() + SAVE_S
            if stop.is_set():
                return
    finally:
        cluster.close()


def _begun(archive: Histories, cluster: Cluster, reader: Log, source: Source, stop: threading.Event) -> History:
    """The history as it was kept, else that of a long log, else that of no record yet (*blocking*)."""
    if archive.kept is not None:
        info = cluster.topic_info([source.topic], source.timeout).get(source.topic)
        found = archive.kept.load(reader, "" if info is None else info.topic_id)
        if found is not None:
            archive.note = _pruned_text(found, reader.starts)
            return found
    history = archive.whole = History(reader.partitions, reader.first_worlds(range(reader.partitions)))
    left = {cp: max(0, reader.ends[cp] - world.next_offset) for cp, world in history.worlds.items()}
    if sum(left.values()) < folding.AT_LEAST or type(reader) is not Log:  # only this thread knows its archive
        return history
    return _side_by_side(archive, folding.of_kafka(source, reader.ends), history, left, stop) or history


def _side_by_side(
    archive: Histories, task: dict[str, Any], history: History, sizes: Mapping[int, int], stop: threading.Event
) -> History | None:
    """The history of a long log, folded by processes (*blocking*); None: they are not possible, or it was stopped."""
    if folding.processes() < 2 or len(history.worlds) < 2:
        return None

    whole: History | None = None
    try:
        for kind, found in folding.fold(task, history.worlds, sizes, stop):
            if kind == folding.PROGRESS:
                archive.progress = found
            elif kind == folding.PROBLEM:
                archive.problem = found
            elif kind == folding.DONE:
                whole = found
            else:
                archive.whole = found
                archive.on_change()
    except (folding.ProcessLostError, OSError) as error:
        log(logging.WARNING, "fold_alone", "%s; the page reads the log by itself, which takes longer", error)
        archive.whole = history
    return whole


def _pruned_text(history: History, log_starts: Mapping[int, int]) -> str:
    """What a kept history has that the log has no more, in words."""
    cut = [cp for cp, start in log_starts.items() if start > history.starts[cp][0]]
    if not cut:
        return ""
    at = max(time_of(history, cp, log_starts[cp]) for cp in cut)
    return (
        f"The log was pruned: it begins at {time_text(at)} now. What is shown of the time before was read when the log "
        "still had it, and is kept in the page's index alone."
    )


#: What is read after the moment, too (ms), and the most records of each CP.
AFTER_MS: Final = 600_000
AFTER_RECORDS: Final = 5_000


class Around:
    """The history of a part of the log: all records of each CP from one log time to another."""

    def __init__(self, history: History, until: int) -> None:
        self.history = history
        #: The last log time (ms) in it.
        self.until = until

    def covers(self, time: int) -> bool:
        """Whether the state at this log time (ms) is in it."""
        return begins(self.history) <= time <= self.until


def read_around(source: Source, time: int, place: tuple[int, int] | None, stop: Callable[[], bool]) -> Around | None:
    """Read from the last snapshot of each CP before this log time (ms) on (*blocking*). None: it was stopped.

    place: (CP, offset) of a record whose time is used instead. Raises KafkaUnavailableError; LogCutError if the log
    begins after that time.
    """
    cluster = source.connect()
    try:
        log = source.open(cluster)
        if place is not None:
            cp, offset = place
            time = max(entries[0][1] for _, entries in log.read({cp: offset}, {cp: offset + 1}))
        worlds = _worlds_before(cluster, log, time, source.timeout)
        history = History(log.partitions, worlds)
        begin = {cp: world.next_offset for cp, world in worlds.items()}
        next_one, later = (log.offsets_for_time(worlds, at + 1) for at in (time, time + AFTER_MS))
        ends = {cp: max(begin[cp], min(later[cp], next_one[cp] + AFTER_RECORDS)) for cp in worlds}
        until = time + AFTER_MS
        for cp, entries in log.read(begin, ends):
            history.take(cp, entries)
            if stop():
                return None
        cut_short = [history.worlds[cp].log_time for cp in worlds if ends[cp] < later[cp]]
        return Around(history, min([until, *cut_short]))
    finally:
        cluster.close()


def _worlds_before(cluster: Cluster, log: Log, time: int, timeout_s: float) -> dict[int, World]:
    """The state of each CP at its last snapshot before this log time (ms), else at the beginning of the log."""
    found: dict[int, World] = {}
    topic = snapshots_topic(log.topic)
    reader = SnapshotReader.find(cluster, topic, timeout_s)
    if reader is not None and len(reader.partitions) == log.partitions:
        keys = [(topic, cp) for cp in reader.partitions if cp not in reader.leaderless]
        reader.look_before({cp: end for (_, cp), end in cluster.offsets_for_time(keys, time, timeout_s).items()})
        reader.read_newest(1)
        for cp in reader.partitions:
            if (world := _before(reader, cp, log, time)) is not None:
                found[cp] = world
    return found | log.worlds_before([cp for cp in log.starts if cp not in found], time)


def _before(reader: SnapshotReader, cp: int, log: Log, time: int) -> World | None:
    """The newest snapshot of this CP before this log time (ms) that no other snapshot at its offset contradicts."""
    tried: set[int] = set()
    while True:
        places: dict[int, list[StoredAt]] = {}
        for place in reader.partitions[cp].sorted():
            if place.holds and place.next_offset >= log.starts[cp] and place.next_offset not in tried:
                places.setdefault(place.next_offset, []).append(place)
        for next_offset, (place, *others) in places.items():
            tried.add(next_offset)
            try:
                world = place.restore(log.partitions)
            except SnapshotError:
                continue
            if not others and world.log_time <= time:
                return world
        if not reader.read_older(cp):
            return None
