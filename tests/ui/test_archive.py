"""Which history answers while the log is still being read; a valid dump, and an invalid one."""

from __future__ import annotations

import io
import json
import signal
import threading
from pathlib import Path

import pytest

from kafka_marshal.ui.archive import Archive, NotReadError, read_dump
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.moments import Moment
from rationalizer import World
from rationalizer.dump import DumpError
from tests.audit.logs import random_log
from tests.cli.conftest import command, environment
from tests.cli.harness import Command, start
from tests.cli.test_replay import changed_dump
from tests.ui.cells import cells
from tests.ui.conftest import get

__all__ = ["command", "environment"]


def opened(path: Path, text: bytes) -> io.BufferedReader:
    path.write_bytes(text)
    return path.open("rb")


def test_the_present_is_there_before_the_past_is_read() -> None:
    log = random_log(2, 400)
    archive = Archive("__marshal", is_live=True)
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
    archive = Archive("?", is_live=False)
    with path.open("rb") as file:
        read_dump(archive, file, threading.Event())
    assert archive.complete
    assert (archive.topic, archive.progress) == ("__marshal", (path.stat().st_size,) * 2)
    begin, end = archive.bounds()
    assert begin <= end == max(log.world(cp).log_time for cp in log.entries)
    cut = path.read_bytes()[:-20]
    for rubbish in (b"", b"rubbish\n", b"\xff\xfe", cut):
        with opened(tmp_path / "rubbish", rubbish) as file, pytest.raises(DumpError):
            read_dump(Archive("?", is_live=False), file, threading.Event())


def test_the_page_says_that_a_dump_was_changed(tmp_path: Path) -> None:
    archive = Archive("?", is_live=False)
    with opened(tmp_path / "changed", changed_dump()) as file:
        read_dump(archive, file, threading.Event())
    assert archive.complete
    assert "the dump was changed after it was written" in archive.problem


def test_reading_ends_where_it_is_asked_to(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    archive = Archive("?", is_live=False)
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
