"""The report's page and its charts, without Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kafka_marshal.pipeline.audit import report
from kafka_marshal.pipeline.audit.audit import Audit
from kafka_marshal.pipeline.audit.findings import Findings
from kafka_marshal.pipeline.audit.report import _lease_name, write_report
from kafka_marshal.pipeline.audit.sources import DumpSource
from rationalizer import ClaimingPartition, ClaimingShare, Heartbeat, ReleasingPartition, SettlingMessages, Upgrade
from rationalizer.limits import MAX_KEY_HASH
from tests.audit.group_logs import GroupLog
from tests.cli.harness import Log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOON = 1_764_072_000_000  # 2025-11-25 12:00 UTC

A, B, C = ("a1", "a", "delays"), ("b1", "b", "delays"), ("c1", "c", "billing")


@pytest.fixture
def findings(tmp_path: Path) -> Iterator[Findings]:
    """A hand-over within 20 ms and a takeover after 7 s of `delays`, and a lease of `billing`."""
    log = Log()
    log.add(ClaimingPartition(*A, "flights", 0, 3_000), NOON)
    log.add(Heartbeat(*A, "flights", 0, 0, 40), NOON + 1_000)
    log.add(ReleasingPartition(*A, "flights", 0, 0, 41), NOON + 2_000)
    log.add(ClaimingPartition(*B, "flights", 0, 3_000), NOON + 2_020)
    log.add(ClaimingPartition(*C, "orders", 0, 3_000), NOON + 3_000)
    log.add(Heartbeat(*C, "orders", 0, 4, 7), NOON + 4_000)
    log.add(ClaimingPartition(*A, "flights", 0, 3_000), NOON + 9_020)
    path = tmp_path / "log.jsonl"
    path.write_bytes(log.dump)
    with Audit(DumpSource(path, None)) as audit:
        yield audit.run()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn."""
    figures: list[Figure] = []

    def keep(figure: Any) -> str:
        figures.append(figure)
        return "data:,"

    monkeypatch.setattr(report, "_png", keep)
    return figures


def test_a_page_of_one_group_is_silent_on_the_others(findings: Findings, tmp_path: Path) -> None:
    assert findings.groups() == ["billing", "delays"]
    whole = write_report(findings, tmp_path / "whole.html").read_text()
    assert "billing: orders/0" in whole and "delays: flights/0" in whole
    page = write_report(findings, tmp_path / "page.html", group="delays").read_text()
    assert "billing" not in page and "delays: flights/0" in page
    assert set(findings.waits("delays")) == {"handed over", "replaced"}
    assert findings.waits("billing") == {}


def test_each_column_of_a_table_has_one_title(findings: Findings, tmp_path: Path) -> None:
    page = write_report(findings, tmp_path / "page.html").read_text()
    tables = page.split("<table>")[1:]
    assert len(tables) >= 3
    for table in tables:
        head, row = re.findall(r"<tr>.*?</tr>", table)[:2]
        assert head.count("<th") == row.count("<td"), head


def test_handovers_and_takeovers_have_a_scale_each(findings: Findings, tmp_path: Path, drawn: list[Figure]) -> None:
    write_report(findings, tmp_path / "page.html")
    _, waits, _ = drawn
    assert [axes.get_xlabel() for axes in waits.axes] == [f"time until the next holder, {unit}" for unit in ("ms", "s")]
    assert [axes.get_xlim()[1] < limit for axes, limit in zip(waits.axes, (30, 10), strict=True)] == [True, True]


def test_times_are_the_clocks(findings: Findings, tmp_path: Path, drawn: list[Figure]) -> None:
    write_report(findings, tmp_path / "page.html")
    timeline, _, lag = drawn
    for figure in (timeline, lag):
        (axes,) = figure.axes
        assert axes.get_xlabel() == "clock time, UTC"
        figure.draw_without_rendering()
        labels = [label.get_text() for label in axes.get_xticklabels()]
        assert any(label.startswith("12:00:0") for label in labels), labels


@pytest.mark.parametrize("end", [2**62, 253_402_400_000_000])
def test_times_that_no_calendar_reaches_are_drawn_too(end: int) -> None:
    assert report.bars([report.Bar("g: t/0", "a", 5, end)]).startswith("data:image/png")


def test_the_legend_says_whose_colours_are_the_same(drawn: list[Figure]) -> None:
    report.bars([report.Bar("g: t/0", f"w{number}", number, number + 1) for number in range(19)])
    legend = drawn[0].axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()][:4] == [
        "w0, w8, w16",
        "w1, w9, w17",
        "w2, w10, w18",
        "w3, w11",
    ]
    assert "19 names, 8 colours" in legend.get_title().get_text()


def test_a_lost_position_has_no_lag(findings: Findings, tmp_path: Path, drawn: list[Figure]) -> None:
    def log_ends(partitions: Sequence[tuple[str, int]], times: Sequence[int]) -> dict[tuple[str, int], list[int]]:
        return {("flights", 0): [100] * len(times), ("orders", 0): [5] * len(times)}  # 7 is done of those 5

    page = write_report(findings, tmp_path / "page.html", log_ends).read_text()
    assert "Left out: billing: orders/0, 1 in all" in page
    assert "position lost" in page
    legend = drawn[-1].axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["delays"]


def test_coordinated_groups_are_shown(tmp_path: Path) -> None:
    log = GroupLog()
    log.share("t")
    log.join("a", share=True)
    log.join("<b>", share=True)
    log.leave("<b>")
    with Audit(DumpSource(log.whole.write_dump(tmp_path / "log.jsonl"), None)) as audit:
        found = audit.run()
        assert found.groups() == ["g"]
        page = write_report(found, tmp_path / "page.html", group="g").read_text()
    assert "Which member of a coordinated group owned which partition when" in page
    assert "Rebalances of coordinated groups" in page
    assert page.index("<td>left") < page.index("<td>joined")
    assert "&lt;b&gt;" in page and "<b>" not in page


def test_keys_of_a_partition_have_a_name_of_their_own(tmp_path: Path) -> None:
    row = {"group": "g", "topic": "t", "topic_partition": 0}
    assert _lease_name(row) == _lease_name({**row, "lo": 0, "hi": MAX_KEY_HASH}) == "g: t/0"
    assert _lease_name({**row, "lo": 2**62, "hi": MAX_KEY_HASH}) == "g: t/0 keys 50-100 %"


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Findings]:
    """a and b share by batches; a is gone, and what it had is parked by b; then one of each half of the keys."""
    log = Log()
    log.add(Upgrade(*A, 4), NOON)
    log.add(ClaimingShare(*A, "flights", 0, 1_000), NOON)  # 1
    log.add(ClaimingShare(*B, "flights", 0, 1_000), NOON)  # 2
    log.add(SettlingMessages(*A, "flights", 0, 1, 99, take=(10, 99, False)), NOON + 1_000)  # 3: 0 … 9
    log.add(Heartbeat(*B, "flights", 0, 2, None), NOON + 2_000)  # 4
    log.add(SettlingMessages(*B, "flights", 0, 2, 99, take=(10, 9, False)), NOON + 3_001)  # 5: a ends, b has 0 … 9
    aside = ((6, 5, 2, "ValueError"),)
    log.add(SettlingMessages(*B, "flights", 0, 2, 99, ((0, 5), (7, 9)), parked=aside), NOON + 5_000)  # 6
    log.add(ReleasingPartition(*B, "flights", 0, 2, None), NOON + 6_000)
    log.add(ClaimingShare(*A, "flights", 0, 1_000, 0, 9), NOON + 7_000)
    log.add(ClaimingShare(*B, "flights", 0, 1_000, 10, 19), NOON + 8_000)
    path = tmp_path / "log.jsonl"
    path.write_bytes(log.dump)
    with Audit(DumpSource(path, None)) as audit:
        yield audit.run()


def test_shares_and_open_messages_are_drawn(shared: Findings, tmp_path: Path, drawn: list[Figure]) -> None:
    page = write_report(shared, tmp_path / "page.html").read_text()
    assert shared.is_clean, shared.examples
    bars, *_, opened = drawn
    labels = [each.get_text() for each in bars.axes[0].get_yticklabels()]
    assert sorted(labels)[:2] == ["delays: flights/0 by batches, a", "delays: flights/0 by batches, b"]
    assert len(labels) == 4
    assert len(bars.axes[0].patches) == 4
    (line,) = opened.axes[0].lines
    heights: Any = line.get_ydata()
    assert (max(heights), heights[-1]) == (10, 1)
    assert "Who shared which partition when" in page and "How many messages were open" in page
    cells = page.partition("Messages that were set aside, discarded, or lost")[2].partition("</table>")[0]
    for cell in ("delays: flights/0", "6", "ValueError", "open"):
        assert f">{cell}</td>" in cells, cell


def test_a_page_of_a_group_that_shares_nothing_has_no_such_pictures(findings: Findings, tmp_path: Path) -> None:
    page = write_report(findings, tmp_path / "page.html").read_text()
    assert "shared which" not in page and "messages were open" not in page and "set aside" not in page
