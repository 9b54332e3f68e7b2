"""The report's page and its charts, without Spark."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.files import FolderBeside, file_beside
from kafka_marshal.pipeline.audit import report
from kafka_marshal.pipeline.audit.audit import Audit, check_folder
from kafka_marshal.pipeline.audit.findings import Findings
from kafka_marshal.pipeline.audit.report import _lease_name, write_report
from kafka_marshal.pipeline.audit.sources import DumpSource
from rationalizer import ClaimingPartition, ClaimingShare, Heartbeat, ReleasingPartition, SettlingMessages, Upgrade
from rationalizer.limits import MAX_KEY_HASH
from tests.audit.group_logs import GroupLog
from tests.audit.logs import WholeLog, random_log
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
    cells = page.partition("Messages that were set aside, opened again, discarded, or lost")[2].partition("</table>")[0]
    for cell in ("delays: flights/0", "6", "ValueError", "open"):
        assert f">{cell}</td>" in cells, cell


def test_a_page_of_a_group_that_shares_nothing_has_no_such_pictures(findings: Findings, tmp_path: Path) -> None:
    page = write_report(findings, tmp_path / "page.html").read_text()
    assert "shared which" not in page and "messages were open" not in page and "set aside" not in page


# -- The folder of an audit is replaced atomically or left as it was ----------------------------------------------


def killed(program: str) -> None:
    """Run a program that kills itself."""
    ran = subprocess.run([sys.executable, "-c", dedent(program)], check=False, capture_output=True)
    assert ran.returncode == -9, ran.stderr.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the logs of two nights, which contains nothing else at the end."""
    for night, records in ((1, 300), (2, 50)):
        random_log(night, records).write_dump(tmp_path / f"{night}.jsonl", hashed=True)
    (tmp_path / "work").mkdir()
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} <= {"1.jsonl", "2.jsonl", "work", "out"}
    assert os.listdir(tmp_path / "work") == []


def page(findings: Findings, path: Path) -> None:
    path.write_text(findings.verdict)


def audit(folder: Path, night: int) -> str:
    """Run the audit of one night; returns the verdict stored in the folder."""
    with Audit(DumpSource(folder / f"{night}.jsonl"), out=folder / "out", work=folder / "work") as each:
        findings = each.run(page)
        assert findings.table("records").count_rows() == findings.records
    assert findings.verdict in (folder / "out" / "audit.json").read_text()
    assert findings.verdict in (folder / "out" / "report.html").read_text()
    return findings.verdict.partition(";")[0]  # a random log may lack its first record


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_a_nightly_audit_of_one_folder(folder: Path) -> None:
    assert [audit(folder, night) for night in (1, 2, 1)] == [
        "0 violations in 600 records",
        "0 violations in 100 records",
        "0 violations in 600 records",
    ]


def test_an_audit_that_fails_leaves_the_earlier_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit(folder, 1)
    before = contents(folder / "out")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(OSError, match="No space left"),
        Audit(DumpSource(folder / "2.jsonl"), out=folder / "out", work=folder / "work") as failing,
    ):
        failing.run(full_disk)
    assert contents(folder / "out") == before


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("written", marks=pytest.mark.campaign),
        "moved away",
        pytest.param("in place", marks=pytest.mark.campaign),
    ],
)
def test_a_killed_audit_leaves_the_earlier_one_or_the_new_one_and_the_next_cleans_up(folder: Path, point: str) -> None:
    """Killed after everything is written, between the two renames, and before the earlier audit is removed."""
    audit(folder, 1)
    before = contents(folder / "out")
    killed(
        f"""
        import os, signal, pathlib, shutil
        from kafka_marshal import files
        from tests.audit.test_report import audit
        die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
        rename = pathlib.Path.rename
        def dying(self, target):
            if {point!r} == "written" or ({point!r} == "moved away" and self.suffix == ".part"):
                die()
            return rename(self, target)
        pathlib.Path.rename = dying
        if {point!r} == "in place":
            shutil.rmtree = die
        audit(pathlib.Path({str(folder)!r}), 2)
        """
    )
    left = [path.name for path in folder.iterdir() if path.name.startswith(".out.")]
    assert any(name.endswith(".lock") for name in left)
    if point == "written":
        assert contents(folder / "out") == before
    elif point == "moved away":
        FolderBeside.of(folder / "out").drop()
        assert contents(folder / "out") == before
    else:
        assert b"0 violations in 100 records" in contents(folder / "out")["audit.json"]
    assert audit(folder, 2) == "0 violations in 100 records"


def test_two_audits_at_a_time_do_not_remove_each_others_files(folder: Path) -> None:
    sources = [DumpSource(folder / f"{night}.jsonl") for night in (1, 2)]
    with Audit(sources[0], out=folder / "out", work=folder / "work") as first:
        audit(folder, 2)
        findings = first.run()
        assert findings.table("records").count_rows() == 600


@pytest.mark.parametrize("name", ["thesis.tex", "records/mine.parquet", "violations/deep/x", "audit.json/x"])
def test_a_folder_with_something_else_is_refused_and_left(folder: Path, name: str) -> None:
    audit(folder, 1)
    foreign = folder / "out" / name
    if foreign.parent.is_file():
        foreign.parent.unlink()
    foreign.parent.mkdir(exist_ok=True)
    foreign.touch()
    before = contents(folder / "out")
    with pytest.raises(ConfigurationError, match="holds something that is no audit"):
        audit(folder, 2)
    assert contents(folder / "out") == before


def test_something_else_that_came_meanwhile_is_not_removed(folder: Path) -> None:
    audit(folder, 1)
    source = DumpSource(folder / "2.jsonl")
    with (
        pytest.raises(ConfigurationError, match=r"notes\.txt"),
        Audit(source, out=folder / "out", work=folder / "work") as late,
    ):
        (folder / "out" / "notes.txt").write_text("mine")
        late.run()
    assert (folder / "out" / "notes.txt").read_text() == "mine"
    assert b"in 600 records" in contents(folder / "out")["audit.json"]


def test_the_folder_keeps_its_mode_and_may_be_a_link(folder: Path) -> None:
    real = folder / "work" / "real"
    real.mkdir(mode=0o750)
    (folder / "out").symlink_to(real)
    audit_out = folder / "out"
    with Audit(DumpSource(folder / "1.jsonl"), out=audit_out) as each:
        each.run()
    assert audit_out.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o750
    assert (real / "audit.json").is_file()
    check_folder(audit_out)
    for path in sorted(real.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    real.rmdir()


@pytest.mark.parametrize("url", ["s3://bucket/audit", "hdfs://name:8020/audit", "abfss://x@y/audit", "file:///tmp/x"])
def test_a_url_is_refused_before_anything_is_read(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="is a URL"):
        Audit(DumpSource(Path("nowhere")), out=Path(url))
    with pytest.raises(ConfigurationError, match="is a URL"), file_beside(Path(url)):
        pass
    assert os.listdir(tmp_path) == []


def test_the_working_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="working directory"):
        Audit(DumpSource(Path("nowhere")), out=Path())


def test_a_file_appears_whole_and_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    killed(
        f"""
        import os, signal
        from pathlib import Path
        from kafka_marshal.files import file_beside
        with file_beside(Path({str(path)!r})) as file:
            file.write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert len(os.listdir(tmp_path)) == 1
    assert not path.exists()
    with file_beside(path) as slow:
        slow.write(b"slow")
        with file_beside(path) as fast:
            fast.write(b"fast")
        assert path.read_bytes() == b"fast"
    assert path.read_bytes() == b"slow"
    with pytest.raises(ZeroDivisionError), file_beside(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"slow"
    assert os.listdir(tmp_path) == ["log.jsonl"]
    (tmp_path / "link").symlink_to(path)
    with file_beside(tmp_path / "link") as file:
        file.write(b"through")
    assert path.read_bytes() == b"through"
    with file_beside(Path("/dev/null")) as file:
        file.write(b"gone")
    assert not Path("/dev/null").is_file()


def test_an_earlier_faulty_release_left_the_page_alone(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "report.html").write_text("of a run that removed its tables")
    assert audit(folder, 2) == "0 violations in 100 records"


def test_an_empty_log_replaces_too(folder: Path) -> None:
    audit(folder, 1)
    WholeLog(1, {0: []}).write_dump(folder / "2.jsonl")
    assert audit(folder, 2) == "0 violations in 0 records"
