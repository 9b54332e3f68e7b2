"""What a run says in the end: sentences, table, picture and page."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import pytest

from kafka_marshal.demo import DemoError
from kafka_marshal.demo.check import Difference, Verdict
from kafka_marshal.demo.findings import Findings
from kafka_marshal.demo.ownership import End, History, Tenure
from kafka_marshal.demo.process import WORKERS, Crash, Kill, KillPlan, Stage, Story
from kafka_marshal.demo.report import CarrierLine, write_report

EQUAL = Verdict(1_000, 12, 1_000, (), (), ())
UNEQUAL = Verdict(1_000, 12, 1_003, (Difference(("UA", "EWR", 1), "flights", 7, 4),), ((3, 10, 19),), ((2, 0, 4),))


def tenure(partition: int, who: str, since: int, until: int | None, end: End, last_beat: int | None = None) -> Tenure:
    return Tenure(partition, who, f"i-{who}", since, since, last_beat or since, until, end)


def findings(verdict: Verdict = EQUAL, *, calm: bool = False) -> Findings:
    """A short run: worker-2 is killed at 5 s, worker-3 is added at 8 s."""
    history = History("delays", "flights")
    history.tenures = {
        0: [tenure(0, "worker-1", 0, 15_000, End.RELEASED)],
        1: [
            tenure(1, "worker-2", 100, 7_050, End.REPLACED, 4_950),
            tenure(1, "worker-1", 7_050, 9_000, End.RELEASED),
            tenure(1, "worker-3", 9_020, 15_000, End.RELEASED),
            # All was done by then: those who close last still claim what falls free.
            tenure(1, "worker-1", 15_001, 15_010, End.RELEASED),
        ],
    }
    history.progress = [(1_000, "worker-1", 400), (4_000, "worker-2", 300), (10_000, "worker-3", 300)]
    story = Story(started_ms=0, closing_ms=14_990, ended_ms=15_100)
    if not calm:
        story.kill = Kill("worker-2", 5_000, 400, ((1, 100, 199),), written=True, stage=Stage.UNREPORTED)
        story.added = "worker-3", 8_000
        story.repeated = 1
    return Findings("flights", verdict, story, history, seed=4, heartbeat_interval_ms=1_000, pace=6_000)


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
    assert row == ("flights 1", "worker-2", "worker-1", "7.0 s", "2,100 ms", "2,050 ms")


def test_what_changes_hands_while_all_close_is_left_out() -> None:
    assert [(each.old, each.new) for each in findings().handovers()] == [("worker-1", "worker-3")]


def test_the_story_is_told() -> None:
    text = " ".join(findings().sentences())
    assert "worker-2 was killed with -9 when 40 % of the rows were done, with a batch of 100 rows in hand" in text
    assert "committed to the database and not yet reported" in text
    assert "worker-3 was added 3.0 s later." in text
    assert "1 row was handed out again" in text
    assert "handed over 1 partition; each had nobody for 20 ms (median), 20 ms at most." in text


def test_without_a_kill_that_is_said() -> None:
    assert "Nobody was killed" in findings(calm=True).sentences()[0]
    assert findings(calm=True).title() == "Who owned which partition when"


def test_an_end_that_was_not_planned_is_said() -> None:
    found = findings()
    found.story.crashes.append(Crash("worker-1", -11, ""))
    assert any("worker-1 ended by itself, which was not planned (status -11)" in text for text in found.sentences())


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height; that it is a whole PNG is checked on the way."""
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
    page, picture = write_report(findings(verdict), [CarrierLine("UA", 5, 1, 3.25, 40)], tmp_path)
    assert size_of(picture.read_bytes())[0] >= 1_000
    text = page.read_text()
    assert verdict.equal == ("EQUAL: 1,000 flights" in text and "NOT EQUAL" not in text)
    # Nothing is fetched from anywhere.
    assert re.findall(r"(?:src|href)=\"(?!data:)[^\"]*\"|url\(|@import|<script", text) == []
    assert text.count("data:image/png;base64,") == 1
    assert "<td>flights 1</td><td>worker-2</td><td>worker-1</td>" in text
    assert "<td>UA</td>" in text
    assert "3.2 min" in text or "3.3 min" in text


def test_text_on_the_page_is_escaped(tmp_path: Path) -> None:
    found = findings()
    found.story.crashes.append(Crash("worker-1", 1, "<script>alert('&')</script>"))
    page, _ = write_report(found, [], tmp_path)
    assert "<script>" not in page.read_text()
    assert "&lt;script&gt;" in page.read_text()


def test_a_run_without_rows_has_a_page_too(tmp_path: Path) -> None:
    verdict, history = Verdict(0, 0, 0, (), (), ()), History("delays", "flights")
    found = Findings("flights", verdict, Story(0, 5, 6), history, 0, 1_000, 0)
    page, picture = write_report(found, [], tmp_path)
    assert "EQUAL: 0 flights in 0 groups" in page.read_text()
    assert size_of(picture.read_bytes())


def test_a_report_that_can_not_be_written_says_that_the_comparison_is_done(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"nowhere.*The comparison is done \(EQUAL"):
        write_report(findings(), [], tmp_path / "nowhere")


def test_seeds_kill_at_different_moments_and_the_same_seed_at_the_same() -> None:
    plans = [KillPlan.drawn(seed) for seed in range(40)]
    assert plans == [KillPlan.drawn(seed) for seed in range(40)]
    assert {plan.stage for plan in plans} == set(WORKERS.stages)
    assert len({plan.share for plan in plans}) == 40
    assert all(0.25 <= plan.share <= 0.45 and 0.1 <= plan.into_batch <= 0.7 for plan in plans)
