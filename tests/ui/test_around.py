"""Moments requested before the whole log is read: it is read around them, from earlier snapshots."""

from __future__ import annotations

import io
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.observe import log as log_reading
from kafka_marshal.observe.log import Source
from kafka_marshal.ports import LogEntry
from kafka_marshal.snapshots.reader import SnapshotReader
from kafka_marshal.ui.archive import (
    Around,
    Histories,
    NotReadError,
    _before,
    read_around,
    read_around_moments,
    read_dump,
)
from kafka_marshal.ui.fold import History, has
from kafka_marshal.ui.moments import Moment
from rationalizer import ClaimingPartition, ReleasingPartition, World, encode, route_lease
from rationalizer.dump import DumpError, DumpReader
from rationalizer.snapshot_log import encode_state
from tests.audit.logs import random_log
from tests.cli.conftest import command, environment, kafka, log_topic
from tests.cli.harness import Command, start
from tests.cli.test_replay import changed_dump
from tests.client.conftest import wait_until
from tests.stored_snapshot import encode_snapshot
from tests.ui.cells import cells
from tests.ui.conftest import get, served
from tests.ui.story import BEGIN, GROUP, TAKEN_AT, TOPIC, after
from tests.ui.story import CPS as STORY_CPS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


__all__ = ["command", "environment", "kafka", "log_topic"]

CPS = 2
TURNS = 6


@dataclass
class Log:
    """A log of claims and releases, written in turns with a snapshot of each CP after every one."""

    source: Source
    cluster: KafkaCluster
    whole: History
    #: Of each turn: when something happened, and CP → place of the snapshot after it.
    turns: list[list[int]] = field(default_factory=list)
    snapshots: list[dict[int, int]] = field(default_factory=list)
    entries: dict[int, list[LogEntry]] = field(default_factory=lambda: {cp: [] for cp in range(CPS)})

    def append(self, topic: str, cp: int, values: list[bytes]) -> None:
        appender = self.cluster.appender(topic, delivery_timeout_ms=10_000)
        for value in values:
            appender.append(cp, value, None)
        assert appender.flush(10) == 0
        appender.close()

    def read_on(self) -> None:
        """Let the whole history read everything written so far."""
        begin = {cp: world.next_offset for cp, world in self.whole.worlds.items()}
        tail = self.cluster.tail(self.source.topic, begin)
        ends = {cp: high for (_, cp), (_, high) in self.watermarks().items()}
        while any(world.next_offset < ends[cp] for cp, world in self.whole.worlds.items()):
            for cp, entries in tail.read(0.2).records.items():
                self.whole.take(cp, entries)
                self.entries[cp] += entries
        tail.close()

    def watermarks(self) -> dict[tuple[str, int], tuple[int, int]]:
        return self.cluster.watermarks([(self.source.topic, cp) for cp in range(CPS)], 10)

    def forge(self, cp: int, next_offset: int, state: bytes) -> None:
        self.append(f"{self.source.topic}_snapshots", cp, list(encode_state(cp, next_offset, state)))

    def history_from(self, places: dict[int, int]) -> History:
        """An empty history that begins with these snapshots."""
        worlds = {cp: World(cp, CPS) for cp in places}
        for cp, entries in self.entries.items():
            worlds[cp].apply_many(entry for entry in entries if entry[0] < places[cp])
        return History(CPS, worlds)

    def turn(self, number: int) -> None:
        events = len(self.whole.events)
        for partition in range(6):
            cp = route_lease("t", partition, CPS)
            lease = self.whole.worlds[cp].lease("g", "t", partition)
            who = (f"host/{number}/0.1.0/x", f"worker-{number % 3}", "g")
            values = [encode(ClaimingPartition(*who, "t", partition, 600_000))]
            if lease is not None and lease.held:
                assert lease.instance_id is not None
                assert lease.client_id is not None
                holder = (lease.instance_id, lease.client_id, "g")
                values.insert(0, encode(ReleasingPartition(*holder, "t", partition, lease.epoch, None)))
            self.append(self.source.topic, cp, values)
        self.read_on()
        at = self.whole.events.columns["time"]
        self.turns.append(sorted({at[number] for number in range(events, len(self.whole.events))}))
        self.snapshots.append({cp: world.next_offset for cp, world in self.whole.worlds.items()})
        for cp, world in self.whole.worlds.items():
            self.append(f"{self.source.topic}_snapshots", cp, list(encode_snapshot(world)))


@pytest.fixture
def log(kafka: Command, kafka_bootstrap: str, log_topic: str) -> Iterator[Log]:
    assert kafka("init", "--partitions", CPS).status == 0
    cluster = KafkaCluster(kafka_bootstrap, {})
    made = Log(Source(log_topic, 10.0, lambda: (kafka_bootstrap, {})), cluster, History(CPS))
    for number in range(TURNS):
        made.turn(number)
        ended = time.monotonic()
        wait_until(lambda ended=ended: time.monotonic() > ended + 0.02)  # type: ignore[misc]  # turns differ in time
    yield made
    cluster.close()


def same(ours: History, theirs: History, moment: Moment) -> bool:
    return cells(ours, ours.groups["g"], moment) == cells(theirs, theirs.groups["g"], moment)


def never() -> bool:
    return False


def test_any_moment_is_reported_from_the_snapshots_before_it(log: Log) -> None:
    for turn, moments in enumerate(log.turns):
        if turn == 0:
            continue
        for moment in moments:
            found = read_around(log.source, moment, None, never)
            assert found is not None
            assert found.covers(moment)
            assert same(found.history, log.whole, Moment(moment))
            assert {cp: at[0] for cp, at in found.history.starts.items()} == log.snapshots[turn - 1]
            assert not found.covers(min(log.turns[turn - 1]) - 1), "what was before is not in it"


def test_before_the_first_snapshot_it_is_read_from_the_beginning(log: Log) -> None:
    found = read_around(log.source, log.turns[0][1], None, never)
    assert found is not None
    assert {at[0] for at in found.history.starts.values()} == {0}
    assert same(found.history, log.whole, Moment(log.turns[0][1]))


def test_the_time_of_a_record(log: Log) -> None:
    for cp in range(CPS):
        offset = log.snapshots[3][cp]  # the first one of turn 4 there
        found = read_around(log.source, -1, (cp, offset), never)
        assert found is not None
        assert has(found.history, cp, offset)
        moment = Moment(found.history.marks[cp][1][0], cp, offset)
        assert same(found.history, log.whole, moment)


def test_a_long_log_is_read_only_as_far_as_needed(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_marshal.ui.archive.AFTER_RECORDS", 2)
    moment = log.turns[2][-1]
    found = read_around(log.source, moment, None, never)
    assert found is not None
    assert same(found.history, log.whole, Moment(moment))
    assert found.covers(moment)
    assert not found.covers(log.turns[4][-1])
    assert read_around(log.source, moment, None, lambda: True) is None


def test_a_snapshot_that_another_one_of_its_place_denies_is_passed_over(log: Log) -> None:
    """Which of them is correct can't be known without a replay (S3)."""
    for cp, offset in log.snapshots[-1].items():
        empty = World(cp, CPS)
        empty.next_offset = offset
        log.forge(cp, offset, empty.snapshot())
    log.turn(TURNS)
    moment = log.turns[-1][-1]
    found = read_around(log.source, moment, None, never)
    assert found is not None
    assert {cp: at[0] for cp, at in found.history.starts.items()} == log.snapshots[-3]
    assert same(found.history, log.whole, Moment(moment))


def test_a_snapshot_counts_by_the_log_time_of_its_state(log: Log) -> None:
    """Not by the broker's timestamp, as brokers' clocks differ."""
    for moment in (log.turns[1][-1], log.turns[3][0] - 1):
        for cp in range(CPS):
            reader = SnapshotReader.find(log.cluster, f"{log.source.topic}_snapshots", 10)
            assert reader is not None
            world = _before(reader, cp, log_reading.Log(log.cluster, log.source.topic, 10), moment)
            assert world is not None
            assert world.log_time <= moment
            assert world.next_offset == max(
                places[cp] for places in log.snapshots if log.entries[cp][places[cp] - 1][1] <= moment
            )


def test_who_asks_is_answered_once_it_is_read_around_that_moment(log: Log) -> None:
    archive, stop = Histories(log.source.topic, is_live=True), threading.Event()
    archive.whole = History(CPS)  # its reading has not begun
    last = log.snapshots[TURNS - 1]
    archive.recent = log.history_from(last)
    reading = threading.Thread(target=read_around_moments, args=(archive, log.source, stop))
    reading.start()
    try:
        moment = Moment(log.turns[2][1])
        with pytest.raises(NotReadError, match="it is read around it first"):
            archive.history(moment)
        found = wait_until(lambda: answering(lambda: archive.history(moment)), 90)
        assert archive.covers(found, moment)
        assert not archive.covers(found, Moment(log.turns[0][1]))
        assert same(found, log.whole, moment)
        cp, offset = 1, log.snapshots[0][1]
        found = wait_until(lambda: answering(lambda: archive.holding(cp, offset)), 90)
        assert has(found, cp, offset)
        assert archive.wanted is None, "whoever reads the whole log goes on"
        archive.whole = log.whole
        archive.finished()
        reading.join(10)
        assert not reading.is_alive(), "it is not needed any more"
        assert archive.holding(cp, offset) is archive.history(moment) is log.whole
    finally:
        stop.set()
        reading.join()


def answering(ask: Callable[[], History]) -> History | None:
    try:
        return ask()
    except NotReadError:
        return None


def test_a_moment_before_a_log_that_was_cut(log: Log, kafka: Command) -> None:
    keys = {(log.source.topic, cp): offset for cp, offset in log.snapshots[2].items()}
    log.cluster.delete_records(keys, 10)
    found = read_around(log.source, log.turns[0][1], None, never)
    assert found is not None
    assert not found.covers(log.turns[0][1]), "nobody can know"
    log.cluster.delete_records({key: offset + 1 for key, offset in keys.items()}, 10)  # the snapshots bridge no gap
    found = read_around(log.source, log.turns[3][-1], None, never)
    assert found is not None
    assert {cp: at[0] for cp, at in found.history.starts.items()} == log.snapshots[3]


@pytest.fixture
def half_read(dump: bytes, archive: Histories) -> Histories:
    """The story while its log is read: the first 20 seconds and a bit, and the last 40 from snapshots on."""
    growing = Histories("__marshal", is_live=True)
    whole = growing.whole = History(STORY_CPS)
    growing.ends = dict.fromkeys(range(STORY_CPS), 0)
    worlds = {cp: World(cp, STORY_CPS) for cp in range(STORY_CPS)}
    late: list[tuple[int, LogEntry]] = []
    passed: set[int] = set()
    for each in DumpReader(io.BytesIO(dump)):
        entry = (each.offset, each.timestamp_ms, each.value)
        growing.ends[each.partition] = each.offset + 1
        if each.partition not in passed:
            whole.take(each.partition, [entry])
            if each.timestamp_ms >= BEGIN + 20_000:
                passed.add(each.partition)
        if each.timestamp_ms < BEGIN + 240_000:
            worlds[each.partition].apply(*entry)
        else:
            late.append((each.partition, entry))
    recent = growing.recent = History(STORY_CPS, worlds)
    for cp, late_entry in late:
        recent.take(cp, [late_entry])
    return growing


@pytest.fixture
def page(browser: Browser, half_read: Histories) -> Iterator[Page]:
    """An empty page with the server's address as its base."""
    with served(half_read) as url:
        opened = browser.new_page(base_url=url, timezone_id="UTC")
        opened.set_default_timeout(20_000)
        yield opened
        opened.close()


def test_the_page_waits_for_a_moment_that_is_not_read_yet(page: Page, half_read: Histories, archive: Histories) -> None:
    assert archive.whole is not None
    page.goto(f"/#group={GROUP}&at={BEGIN + (TAKEN_AT + 2) * 1000}&p={TOPIC}:1&tab=changed")
    page.get_by_text("it is read around it first").first.wait_for()
    assert half_read.wanted == after(TAKEN_AT + 2)
    half_read.around = Around(archive.whole, BEGIN + 200_000)
    page.wait_for_selector("canvas.map")
    page.get_by_role("table", name="Records").get_by_text("was silent for").first.wait_for()
    assert "worker-" in page.locator(".answer").inner_text()
    page.wait_for_function("() => !document.body.innerText.includes('it is read around it first')")


def test_the_change_before_is_looked_for_where_it_is_not_read_yet(
    page: Page, half_read: Histories, archive: Histories
) -> None:
    assert archive.whole is not None
    page.goto(f"/#group={GROUP}")
    page.wait_for_selector("canvas.map")
    page.get_by_role("button", name="Previous change").click()
    page.get_by_text("… change").wait_for()
    half_read.around = Around(archive.whole, BEGIN + 260_000)
    page.wait_for_function("() => /at=[0-9]+:[0-9]+/.test(location.hash)")
    page.get_by_text("◀ change").wait_for()


def test_the_next_change_is_looked_for_beyond_what_is_read(half_read: Histories, archive: Histories) -> None:
    assert archive.whole is not None
    with served(half_read) as url:
        near = f"{url}api/near?group={GROUP}&at={BEGIN + 15_000}"
        assert get(near).status == 503
        assert half_read.wanted is not None
        assert half_read.wanted.time == half_read.reached() + 1
        assert get(f"{near}&direction=back").json["event"]["changed"]
        half_read.around = Around(archive.whole, BEGIN + 260_000)
        found = get(near).json["event"]
        half_read.whole = archive.whole
        half_read.finished()
        assert get(near).json["event"] == found


# -- Which history answers while the log is still being read; a valid dump, and an invalid one --------------------


def opened(path: Path, text: bytes) -> io.BufferedReader:
    path.write_bytes(text)
    return path.open("rb")


def test_the_present_is_there_before_the_past_is_read() -> None:
    log = random_log(2, 400)
    archive = Histories("__marshal", is_live=True)
    with pytest.raises(NotReadError, match="nothing of it is known yet"):
        archive.history()
    worlds = {cp: World.restore(log.world(cp, 300).snapshot(), log.partitions) for cp in log.entries}
    recent = archive.recent = History(log.partitions, worlds)
    whole = archive.whole = History(log.partitions)
    for cp, entries in log.entries.items():
        for offset, stamp, value in entries[300:]:  # as `live` does: its world applies, and the history observes
            recent.see(cp, offset, worlds[cp].apply(offset, stamp, value))
        whole.take(cp, entries[:100])
    archive.progress = (200, 800)
    early = min(log.world(cp, 100).log_time for cp in log.entries)
    late = max(world.log_time for world in worlds.values())
    between = max(log.world(cp, 200).log_time for cp in log.entries)
    assert archive.history() is archive.newest is recent
    assert archive.history(Moment(early)) is whole
    assert archive.history(Moment(late)) is recent
    archive.ends = {0: 100, 1: 400}
    assert archive.reached() == whole.worlds[1].log_time, "what is read to its end does not hold up the rest"
    with pytest.raises(NotReadError, match=r"not read as far as this moment yet \(25 % are\)"):
        archive.history(Moment(between))
    for cp, entries in log.entries.items():
        whole.take(cp, entries[100:])
    told: list[str] = []
    archive.on_change = lambda: told.append("news")
    archive.finished()
    assert archive.history(Moment(between)) is whole
    assert told == ["news"]
    for name, group in recent.groups.items():
        ours = {(cell.topic, cell.partition): cell.client for cell in cells(recent, group, Moment(late))}
        theirs = {(cell.topic, cell.partition): cell.client for cell in cells(whole, whole.groups[name], Moment(late))}
        assert ours == theirs


def test_a_dump_is_read_and_another_file_is_refused(tmp_path: Path) -> None:
    log = random_log(3, 50)
    path = log.write_dump(tmp_path / "whole.dump")
    archive = Histories("?", is_live=False)
    with path.open("rb") as file:
        read_dump(archive, file, threading.Event())
    assert archive.complete
    assert (archive.topic, archive.progress) == ("__marshal", (path.stat().st_size,) * 2)
    begin, end = archive.bounds()
    assert begin <= end == max(log.world(cp).log_time for cp in log.entries)
    cut = path.read_bytes()[:-20]
    for rubbish in (b"", b"rubbish\n", b"\xff\xfe", cut):
        with opened(tmp_path / "rubbish", rubbish) as file, pytest.raises(DumpError):
            read_dump(Histories("?", is_live=False), file, threading.Event())


def test_the_page_says_that_a_dump_was_changed(tmp_path: Path) -> None:
    archive = Histories("?", is_live=False)
    with opened(tmp_path / "changed", changed_dump()) as file:
        read_dump(archive, file, threading.Event())
    assert archive.complete
    assert "the dump was changed after it was written" in archive.problem


def test_reading_ends_where_it_is_asked_to(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    archive = Histories("?", is_live=False)
    with random_log(3, 50).write_dump(tmp_path / "whole.dump").open("rb") as file:
        read_dump(archive, file, stop)
    assert not archive.complete


def test_no_address_is_printed_for_what_is_no_dump(tmp_path: Path, command: Command) -> None:
    for rubbish in (b"", b"rubbish\n", b'{"format": 7}\n'):
        (tmp_path / "rubbish").write_bytes(rubbish)
        ran = command("ui", "--port", 0, "--dump", tmp_path / "rubbish")
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith("error: line 1: ")


def test_the_command_shows_a_dump_until_it_is_interrupted(tmp_path: Path) -> None:
    path = random_log(3, 50).write_dump(tmp_path / "whole.dump")
    with start("ui", "--port", "0", "--json", "--dump", str(path)) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        assert get(f"{url}api/log").json["live"] is False
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
