"""An archive outlives what is pruned, and with the log it is one history."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kafka_marshal.adapters import kafka
from kafka_marshal.admin import Admin
from kafka_marshal.archive import Archive, ArchivedLog
from kafka_marshal.archive.stored import Draft, FileName
from kafka_marshal.errors import ArchiveError, ConfigurationError, LogCutError
from kafka_marshal.files import FilesError, FolderFiles
from kafka_marshal.observe.log import Log, Source
from kafka_marshal.observe.text import time_text
from kafka_marshal.pipeline.audit.audit import Audit
from kafka_marshal.pipeline.audit.findings import Findings
from kafka_marshal.pipeline.audit.invariants import Breach
from kafka_marshal.pipeline.audit.kafka import read_archive
from kafka_marshal.pipeline.audit.sources import DumpSource, OpenedLog
from kafka_marshal.pipeline.audit.task import TaskRunner
from kafka_marshal.ui.archive import Histories as PageArchive
from kafka_marshal.ui.archive import read_around, read_kafka
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.moments import Moment
from rationalizer.dump import DumpHeader, DumpReader, DumpRecord, header_line, record_line
from tests.archive.conftest import FILE, TIMEOUT_S, TOPIC, Kept
from tests.cli.harness import Command
from tests.ui.cells import cells


def whole(kept: Kept) -> None:
    """Archive and log together are all that was ever written, to the same state."""
    assert kept.history() == {cp: entries[: kept.written[cp]] for cp, entries in kept.log.entries.items()}
    assert kept.digests() == {cp: kept.truth(cp).digest() for cp in kept.log.entries}


def test_each_run_adds_only_what_is_new(kept: Kept) -> None:
    kept.write(250)
    first = kept.archive()
    assert first.is_whole
    assert first.records == 500
    assert {each.first for each in first.partitions} == {0}
    assert [each.end for each in first.partitions] == [entries[249][0] + 1 for entries in kept.log.entries.values()]
    assert first.since == min(entries[0][1] for entries in kept.log.entries.values())
    again = kept.archive()
    assert (again.is_whole, again.records, again.files, again.since) == (True, 0, 0, None)
    kept.write(30)
    assert kept.archive().records == 60
    kept.prune(260)
    with pytest.raises(LogCutError):
        Log(kept.cluster, TOPIC, TIMEOUT_S).refuse_if_cut()
    whole(kept)
    kept.write(300)
    whole(kept)
    assert kept.archive().records == 600
    kept.prune(550)
    whole(kept)
    assert kept.archive(verify=True).is_whole


def test_from_python(kept: Kept) -> None:
    kept.write(150)
    admin = Admin.on_cluster(lambda: kept.cluster.connect("admin"), topic=TOPIC)
    told: list[tuple[int, int]] = []
    archived = admin.archive(kept.place, progress=lambda done, total: told.append((done, total)))
    assert (archived.is_whole, archived.records, archived.place) == (True, 300, kept.place)
    assert told[-1][0] == told[-1][1] == sum(each.end for each in archived.partitions)
    assert admin.archive(kept.place, verify=True).files == 0
    with pytest.raises(ConfigurationError, match="place must be a folder, or a URL"):
        admin.archive("")


def test_in_a_bucket(bucket: Kept) -> None:
    with pytest.raises(ArchiveError, match="holds no archive of a coordination log"):
        bucket.at()
    bucket.write(60)
    assert bucket.archive().records == 120
    bucket.write(10)
    assert bucket.archive().records == 20
    assert bucket.archive().records == 0
    bucket.prune(70)
    whole(bucket)


def test_a_bucket_that_is_not_there(bucket: Kept) -> None:
    bucket.place = "s3://absent/log"
    with pytest.raises(ArchiveError, match=r"can't be listed: .*bucket does not exist"):
        bucket.archive()


def test_a_file_is_a_dump_of_one_partition(kept: Kept) -> None:
    kept.write(250)
    kept.archive()
    found = []
    for path in kept.paths():
        with gzip.open(path) as lines:
            reader = DumpReader(lines)
            assert (reader.header.topic, reader.header.partitions) == (TOPIC, 2)
            changed: list[object] = []
            found += list(reader.checked(changed))  # type: ignore[arg-type]
            assert changed == []
    assert [(each[0], *each[1:]) for each in found] == [
        (cp, *entry) for cp in (0, 1) for entry in kept.log.entries[cp][:250]
    ]
    offsets = [tuple(map(int, path.name.split("-")[:2])) for path in kept.paths()]
    assert all(end % FILE == 0 or end == kept.log.entries[0][249][0] + 1 for _, end in offsets[: len(offsets) // 2])


class KilledError(Exception):
    """The process is gone at this write."""


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_write_costs_nothing(kept: Kept, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Before the file appears, or after: what is written next is what was missing, and each record is there once."""
    write = FolderFiles.write
    left = 1

    def dying(files: FolderFiles, path: str, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left or after:
            write(files, path, data)
        if not left:
            raise KilledError

    monkeypatch.setattr(FolderFiles, "write", dying)
    kills = 0
    for records in (250, 200):
        kept.write(records)
        while True:
            left = 1 + kills % 2
            try:
                archived = kept.archive()
                break
            except KilledError:
                kills += 1
    assert kills > 8
    assert archived.is_whole
    kept.prune(400)
    whole(kept)
    left = -1
    assert kept.archive(verify=True).is_whole


def test_two_at_once_write_no_harm(kept: Kept) -> None:
    """One with a longer log: its last file holds the other's, and more."""
    kept.write(130)
    kept.archive()
    kept.write(10)
    short, paths = kept.archive(), kept.paths()
    [mine] = {path for path in paths if f"{short.partitions[0].end:019}" in path.name and path.parent.name == "0"}
    data = mine.read_bytes()
    mine.unlink()
    kept.write(300)
    kept.archive()
    mine.write_bytes(data)
    kept.prune(400)
    whole(kept)
    assert kept.archive(verify=True).is_whole


def test_two_at_once_into_one_folder_take_turns(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds what the first has written: no two files begin at one offset."""
    kept.write(FILE + 50)
    others: list[Thread] = []
    write = Archive.write

    def while_another_begins(self: Archive, draft: Draft, end: int) -> FileName:
        if not others:
            others.append(Thread(target=kept.archive))
            others[0].start()
            others[0].join(0.2)  # it waits for this one: it would be done by now
            assert others[0].is_alive()
        return write(self, draft, end)

    monkeypatch.setattr(Archive, "write", while_another_begins)
    kept.archive()
    others[0].join()
    names = [path.name[:19] for path in kept.paths() if path.parent.name == "0"]
    assert len(names) == len(set(names)) > 1
    assert kept.archive().records == 0


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_changed_byte_is_named_with_its_time(kept: Kept, place: int) -> None:
    kept.write(450)
    kept.archive()
    kept.prune(300)
    path = [each for each in kept.paths() if each.parent.name == "1"][place]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    first, end, _, _ = path.name.split("-")[:4]
    for read in (lambda: kept.history(), lambda: problem(kept.archive(verify=True).partitions[1].problem)):
        with pytest.raises(ArchiveError, match="was changed after it was written") as raised:
            read()
        assert f"offsets {int(first)} to {int(end) - 1} of partition 1 (" in str(raised.value)
    assert kept.archive().partitions[0].problem == ""


@pytest.mark.parametrize("field", ["digest", "state"])
def test_a_file_that_says_another_state_is_named(kept: Kept, field: str) -> None:
    """It is as it was written, but what wrote it did not replay as we do."""
    kept.write(450)
    kept.archive()
    path = [each for each in kept.paths() if each.parent.name == "1"][-1]
    top, rest = gzip.decompress(path.read_bytes()).split(b"\n", 1)
    header = json.loads(top)
    other = kept.log.world(1, 20)
    header["archive"][field] = other.digest() if field == "digest" else b64encode(other.snapshot()).decode()
    data = gzip.compress(json.dumps(header).encode() + b"\n" + rest, mtime=0)
    path.unlink()
    path.with_name("-".join([*path.name.split("-")[:4], hashlib.sha256(data).hexdigest()]) + ".jsonl.gz").write_bytes(
        data
    )
    assert "says another state" in kept.archive(verify=True).partitions[1].problem


def problem(text: str) -> None:
    if text:
        raise ArchiveError(text)


def test_a_missing_file_leaves_the_history_behind_it(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.write(450)
    kept.archive()
    kept.prune(420)
    path = [each for each in kept.paths() if each.parent.name == "0"][1]
    path.unlink()
    end = int(path.name.split("-")[1])
    later = [entry for entry in kept.log.entries[0][:450] if entry[0] >= end]
    assert kept.history()[0] == later
    assert kept.digests()[0] == kept.truth(0).digest()
    assert f"does not have all of the log: partition 0 before offset {end} (" in caplog.text
    early = kept.log.entries[0][10]
    found = kept.history(at_ms=early[1])[0]
    assert early in found
    assert found[-1][0] < end
    assert kept.history(at_offset=early[0])[0] == found
    archived = kept.archive(verify=True)
    assert archived.partitions[0].new_gaps == ()
    [gap] = archived.partitions[0].gaps
    assert (gap.end, archived.is_whole) == (end, True)


def test_a_missing_file_that_the_log_still_has_is_written_again(kept: Kept) -> None:
    kept.write(450)
    kept.archive()
    before = kept.paths()
    path = [each for each in before if each.parent.name == "0"][1]
    path.unlink()
    assert kept.archive().files == 1
    assert kept.paths() == before
    kept.prune(440)
    whole(kept)


def test_a_recreated_log_is_refused(kept: Kept) -> None:
    kept.write(150)
    kept.archive()
    before = kept.paths()
    kept.recreate()
    kept.write(150)
    for use in (kept.archive, kept.history):
        with pytest.raises(ArchiveError, match=r"is the archive of another log.*it was recreated"):
            use()
    assert kept.paths() == before


def test_what_was_pruned_first_is_a_gap(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once by the status, always by name; what is left is archived."""
    kept.write(150)
    kept.archive()
    kept.write(150)
    kept.write(150)
    kept.prune(300)
    assert kept.history()[1] == kept.log.entries[1][300:450]
    archived = kept.archive()
    assert not archived.is_whole
    for cp, each in enumerate(archived.partitions):
        [gap] = each.new_gaps
        assert (gap.first, gap.end) == (kept.log.entries[cp][149][0] + 1, kept.log.entries[cp][299][0] + 1)
        assert gap.since <= gap.until
        assert each.records == 150
    again = kept.archive()
    assert again.is_whole
    assert again.partitions[0].gaps == archived.partitions[0].new_gaps
    assert kept.history()[1] == kept.log.entries[1][300:450]
    assert kept.digests()[1] == kept.truth(1).digest()
    assert "The history begins behind" in caplog.text
    assert kept.archive(verify=True).is_whole


def test_a_gap_behind_which_nothing_can_be_archived_yet(kept: Kept) -> None:
    kept.write(150)
    kept.archive()
    kept.write(150)
    kept.prune(290)
    for _ in range(2):
        archived = kept.archive()
        assert (archived.is_whole, archived.files) == (False, 0)
        assert archived.partitions[0].new_gaps[0].first == kept.log.entries[0][149][0] + 1
    kept.write(100)
    assert not kept.archive().is_whole
    assert kept.archive().is_whole


def test_an_archive_begun_after_a_prune_begins_at_the_snapshot(kept: Kept) -> None:
    kept.write(200)
    kept.write(150)
    kept.prune(200)
    archived = kept.archive()
    assert archived.is_whole
    assert archived.partitions[0].gaps == ()
    kept.write(150)
    kept.archive()
    kept.prune(400)
    assert kept.history()[0] == kept.log.entries[0][200:500]
    assert kept.digests()[0] == kept.truth(0).digest()


def test_no_snapshot_no_archive_of_that_partition(kept: Kept) -> None:
    kept.write(150)
    kept.cluster.broker.delete_records(TOPIC, 1, kept.log.entries[1][100][0])
    kept.cluster.broker.delete_records(f"{TOPIC}_snapshots", 1, 100)
    first, second = kept.archive().partitions
    assert (first.records, first.problem) == (150, "")
    assert "no snapshot bridges the gap" in second.problem


def test_a_log_that_was_changed_is_not_the_archived_one(kept: Kept) -> None:
    kept.write(350)
    kept.archive()
    kept.prune(120)
    partition = kept.cluster.broker.existing[TOPIC].partitions[0]
    message = partition.messages[60]
    message.set_value(b"\x00" + (message.value() or b""))
    with pytest.raises(ArchiveError, match=r"partition 0 \(.*are not the same in '__marshal' and in"):
        kept.history()
    kept.write(100)
    assert kept.archive(verify=True).partitions[0].problem


def test_a_log_that_is_shorter_than_its_archive(kept: Kept) -> None:
    kept.write(350)
    kept.archive()
    partition = kept.cluster.broker.existing[TOPIC].partitions[0]
    partition.end = partition.offsets[-20]
    del partition.messages[-20:], partition.offsets[-20:], partition.arrivals[-20:]
    with pytest.raises(ArchiveError, match="the log lost records that it had"):
        kept.history()
    first, second = kept.archive().partitions
    assert "the log lost records" in first.problem
    assert second.problem == ""


def test_places_that_are_no_archive(tmp_path: Path, kept: Kept) -> None:
    with pytest.raises(ConfigurationError, match="there is no such folder, so nothing can be read"):
        Archive.at(str(tmp_path / "absent"))
    with pytest.raises(ArchiveError, match="holds no archive of a coordination log"):
        Archive.at(str(tmp_path))
    with pytest.raises(ConfigurationError, match="and it can't be made"):
        Archive.at(str(tmp_path / "a" / "b"), make=True)


def test_a_full_disk(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(files: FolderFiles, path: str, data: bytes) -> None:
        raise FilesError("No space left on device")

    kept.write(150)
    monkeypatch.setattr(FolderFiles, "write", full)
    with pytest.raises(ArchiveError, match=r"was not written: No space left on device\. What was written"):
        kept.archive()


# -- `who`, `log`, `audit` and the page answer from a pruned log and its archive as from the whole log ------------


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

    def open(self, runner: TaskRunner, spark: object, work: Path) -> OpenedLog:
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
        assert Breach.LOG_CHANGED in {each.kind for each in findings.examples}
