"""The folder of an audit is replaced atomically or left as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.files import FolderBeside, file_beside
from kafka_marshal.pipeline.audit.audit import Audit, check_folder
from kafka_marshal.pipeline.audit.findings import Findings
from kafka_marshal.pipeline.audit.sources import DumpSource
from tests.audit.logs import WholeLog, random_log


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
        from tests.audit.test_folder import audit
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
