"""`who`, `log`, `audit` and the page answer from a pruned log and its archive as from the whole log."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.adapters import kafka
from kafka_marshal.archive import ArchivedLog
from kafka_marshal.observe.log import Source
from kafka_marshal.observe.text import time_text
from kafka_marshal.pipeline.audit.audit import Audit
from kafka_marshal.pipeline.audit.findings import Findings
from kafka_marshal.pipeline.audit.invariants import Kind
from kafka_marshal.pipeline.audit.kafka import read_archive
from kafka_marshal.pipeline.audit.sources import DumpSource, Opened
from kafka_marshal.pipeline.audit.task import Runner
from kafka_marshal.ui.archive import Archive as PageArchive
from kafka_marshal.ui.archive import read_around, read_kafka
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.moments import Moment
from rationalizer.dump import DumpHeader, DumpRecord, header_line, record_line
from tests.archive.conftest import TIMEOUT_S, TOPIC, Kept
from tests.cli.harness import Command
from tests.ui.cells import cells


@pytest.fixture
def pruned(kept: Kept, command: Command, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Written and archived, with some live records above; pruned by `prune_now` once the whole log has answered."""
    kept.write(450)
    kept.archive()
    kept.write(100)
    monkeypatch.setattr(kafka, "KafkaCluster", lambda *_: kept.cluster.connect("reader"))
    command.before = ("--bootstrap", "memory:1")
    return kept


def test_who_and_log(pruned: Kept, command: Command) -> None:
    leases = [lease for cp in pruned.log.entries for lease in pruned.truth(cp).leases()[:3]]
    asked: list[tuple[str, ...]] = [
        ("who", each.group_id, each.topic, str(each.partition), "--json") for each in leases
    ]
    asked += [(*each, "--at", time_text(pruned.log.entries[0][200][1])) for each in asked[:3]]
    asked += [(*each, "--offset", "40") for each in asked[:2]]
    asked += [("log", "--json"), ("log", "--json", "-n", "30"), ("log", "--json", "--group", leases[0].group_id)]
    before = [command(*each) for each in asked]
    assert {each.status for each in before} == {0}
    pruned.prune(450)
    for each, whole in zip(asked, before, strict=True):
        ran = command(*each, "--archive", pruned.place)
        assert (ran.status, ran.err) == (0, ""), each
        assert ran.out == whole.out, each
    assert any(command(*each).out != whole.out for each, whole in zip(asked, before, strict=True))


def test_the_archive_alone(pruned: Kept, command: Command) -> None:
    """Where Kafka is gone, and nothing but the archive is left."""
    pruned.archive()
    lease = pruned.truth(0).leases()[0]
    asked = ("who", lease.group_id, lease.topic, str(lease.partition), "--json")
    whole = [command(*each) for each in (asked, ("log", "--json"))]
    command.before = ()
    for each, before in zip((asked, ("log", "--json")), whole, strict=True):
        ran = command(*each, "--archive", pruned.place)
        assert (ran.status, ran.out) == (0, before.out)
        assert "no Kafka is named (--bootstrap): the archive is read alone" in ran.err
    assert "no group 'nobody'" in command("who", "nobody", "t", "0", "--archive", pruned.place).err
    assert command("log", "--follow", "--archive", pruned.place).status == 2
    ran = command("log", "--archive", pruned.place, "--topic", "__other")
    assert (ran.status, "is the archive of another log" in ran.err) == (1, True)


def test_the_command_says_what_it_wrote(kept: Kept, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "KafkaCluster", lambda *_: kept.cluster.connect("archiver"))
    command.before = ("--bootstrap", "memory:1")
    kept.write(150)
    ran = command("archive", "--to", kept.place)
    assert (ran.status, ran.err) == (0, "")
    assert "archived: 300 records in " in ran.out
    assert f", to {kept.place}." in ran.out
    assert command("archive", "--to", kept.place).lines[-1] == f"archived: 0 records, to {kept.place}."
    kept.write(150)
    kept.write(100)
    kept.prune(300)
    ran = command("archive", "--to", kept.place, "--json")
    assert ran.status == 1
    assert "were removed from the log before they were archived: they are gone for good" in ran.err
    assert (ran.json["whole"], ran.json["records"], ran.json["topic"]) == (False, 200, TOPIC)
    assert [gap["new"] for each in ran.json["partitions"] for gap in each["gaps"]] == [True, True]
    assert command("archive", "--to", kept.place).status == 0
    path = kept.paths()[-1]
    path.write_bytes(path.read_bytes()[:-1])
    ran = command("archive", "--to", kept.place)
    assert ran.status == 1
    assert "was changed after it was written. It held offsets" in ran.err
    assert command("log", "--archive", kept.place).status == 1
    for args in (("who", "g", "t", "0"), ("log",)):
        assert command(*args, "--archive", kept.place, "--from-dump", "-").status == 2
    assert command("audit", "x", "--archive", kept.place).status == 2
    assert command("ui", "--dump", str(kept.paths()[0]), "--archive", kept.place).status == 2
    assert command("ui", "--port", "0", "--archive", "/nowhere/at/all").status == 2
    assert command("log", "--archive", "/nowhere/at/all").status == 2
    kept.recreate()
    ran = command("log", "--archive", kept.place)
    assert (ran.status, "it was recreated" in ran.err) == (1, True)


# -- the page ----------------------------------------------------------------------------------------------------------


def shown(history: History, time: int) -> dict[str, list[Any]]:
    return {name: list(cells(history, group, Moment(time))) for name, group in sorted(history.groups.items())}


def owners(history: History, time: int) -> set[tuple[str, str, int, str]]:
    found = shown(history, time)
    return {(name, each.topic, each.partition, each.client) for name in found for each in found[name] if each.client}


def test_the_page(pruned: Kept) -> None:
    source = Source(TOPIC, TIMEOUT_S, lambda: ("memory:1", {}))

    def read(source: Source) -> History:
        archive, stop = PageArchive(TOPIC, is_live=True), threading.Event()
        archive.on_change = stop.set
        read_kafka(archive, source, stop)
        assert (archive.problem, archive.complete) == ("", True)
        assert archive.whole is not None
        return archive.whole

    whole = read(source)
    pruned.prune(450)
    joined = Source(TOPIC, TIMEOUT_S, source.connection, partial(ArchivedLog, archive=pruned.at()))
    found = read(joined)
    for time in (pruned.log.entries[0][number][1] for number in (5, 120, 300, 449, 540)):
        assert shown(found, time) == shown(whole, time)
        around = read_around(joined, time, None, lambda: False)
        assert around is not None
        assert around.covers(time)
        assert owners(around.history, time) == owners(whole, time)


# -- the audit ---------------------------------------------------------------------------------------------------------


@dataclass
class Live:
    """The live log as a dump, and the archive below it."""

    kept: Kept
    dump: Path
    name = "the log and its archive"

    def open(self, runner: Runner, spark: object, work: Path) -> Opened:
        log = ArchivedLog(self.kept.cluster, TOPIC, TIMEOUT_S, self.kept.at())
        opened = DumpSource(self.dump).open(runner, None, work)
        return read_archive(log, self.kept.place, runner, work).under(opened)


def dump_of(kept: Kept, path: Path) -> Path:
    lines = [header_line(DumpHeader(TOPIC, kept.log.partitions))]
    for cp, partition in enumerate(kept.cluster.broker.existing[TOPIC].partitions):
        for each in partition.messages:
            lines.append(record_line(DumpRecord(cp, each.offset(), each.timestamp()[1], each.value())))
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def audited(source: Any) -> Iterator[Findings]:
    with Audit(source, records_per_task=1) as audit:
        yield audit.run()


def tables(findings: Findings) -> dict[str, list[str]]:
    """Rows of the tables, but of what is about snapshots."""
    return {
        name: sorted(json.dumps(row, default=str) for row in findings.table(name).to_table().to_pylist())
        for name in findings.tables
        if "snapshot" not in name
    }


def test_the_audit(pruned: Kept, tmp_path: Path) -> None:
    with audited(DumpSource(dump_of(pruned, tmp_path / "whole"))) as findings:
        whole, digests = tables(findings), findings.digests
        assert findings.is_clean
    pruned.prune(430)
    live = dump_of(pruned, tmp_path / "live")
    with audited(Live(pruned, live)) as findings:
        assert findings.is_clean, findings.examples
        assert findings.digests == digests
        assert tables(findings) == whole
        assert all(each.snapshots >= 4 for each in findings.partitions)
    lines = live.read_text().splitlines(keepends=True)
    live.write_text("".join(lines[:5] + lines[6:]))
    with audited(Live(pruned, live)) as findings:
        assert Kind.LOG_CHANGED in {each.kind for each in findings.examples}
