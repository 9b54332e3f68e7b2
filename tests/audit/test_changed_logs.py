"""A log that was changed after members read it, or after it was dumped: every change is reported (S4, D5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kafka_marshal.pipeline.audit.audit import Audit
from kafka_marshal.pipeline.audit.findings import Findings
from kafka_marshal.pipeline.audit.invariants import Breach
from kafka_marshal.pipeline.audit.sources import DumpSource
from rationalizer import Tick, encode
from rationalizer.dump import DumpHeader, DumpLines, header_line
from rationalizer.limits import SNAPSHOT_INTERVAL
from rationalizer.log_hash import RunningHash, encode_hash
from tests.audit.group_logs import random_group_log
from tests.audit.logs import TOPIC, WholeLog, random_log
from tests.rationalizer.strategies import Entry

EVERY = 50

Change = Callable[[list[Entry], int], None]


def removed(entries: list[Entry], at: int) -> None:
    del entries[at]


def three_removed(entries: list[Entry], at: int) -> None:
    del entries[at : at + 3]


def stamp_moved_by_a_millisecond(entries: list[Entry], at: int) -> None:
    offset, stamp, value = entries[at]
    entries[at] = (offset, stamp + 1, value)


def stamp_moved_back(entries: list[Entry], at: int) -> None:
    offset, _, value = entries[at]
    entries[at] = (offset, 0, value)


def stamp_removed(entries: list[Entry], at: int) -> None:
    offset, _, value = entries[at]
    entries[at] = (offset, -1, value)


def value_altered(entries: list[Entry], at: int) -> None:
    offset, stamp, value = entries[at]
    entries[at] = (offset, stamp, (value or b"x")[:-1] + bytes([(value or b"x")[-1] ^ 1]))


def value_emptied(entries: list[Entry], at: int) -> None:
    offset, stamp, value = entries[at]
    entries[at] = (offset, stamp, None if value is not None else b"")


def values_swapped(entries: list[Entry], at: int) -> None:
    other = next(place for place in range(at + 1, len(entries)) if entries[place][2] != entries[at][2])
    (low, early, first), (high, late, second) = entries[at], entries[other]
    entries[at], entries[other] = (low, early, second), (high, late, first)


def later(entries: list[Entry]) -> list[Entry]:
    return [(offset + 1, stamp, value) for offset, stamp, value in entries]


def inserted(entries: list[Entry], at: int) -> None:
    offset, stamp, _ = entries[at]
    entries[at:] = [(offset, stamp, encode(Tick("1", "x", "g"))), *later(entries[at:])]


def duplicated(entries: list[Entry], at: int) -> None:
    entries[at:] = [entries[at], *later(entries[at:])]


def moved_up(entries: list[Entry], at: int) -> None:
    entries[at:] = later(entries[at:])


CHANGES = [
    removed,
    three_removed,
    stamp_moved_by_a_millisecond,
    stamp_moved_back,
    stamp_removed,
    value_altered,
    value_emptied,
    values_swapped,
    inserted,
    duplicated,
    moved_up,
]

#: By kind: a claimed group's log, a coordinated one's, in two partitions.
LOGS: dict[str, Callable[[], WholeLog]] = {
    "claims": lambda: random_log(6, 200),
    "coordinated": lambda: random_group_log(3, 200, 2),
}


def audited(log: WholeLog, folder: Path, dump: Path | None = None) -> Findings:
    snapshots = log.write_snapshots(folder / "snapshots.jsonl") if log.snapshots else None
    with Audit(DumpSource(dump or write_hashed_dump(log, folder / "log.jsonl"), snapshots), tables=False) as audit:
        return audit.run()


def write_hashed_dump(log: WholeLog, path: Path) -> Path:
    """As `kafka-marshal dump` does, with a hash every 10,000 offsets and at each partition's end."""
    ends = tuple((0, entries[-1][0] + 1) for _, entries in sorted(log.entries.items()))
    lines = [header_line(DumpHeader(TOPIC, log.partitions, ends))]
    for cp, entries in sorted(log.entries.items()):
        of_cp = DumpLines(cp)
        lines += [*of_cp.take(entries), *of_cp.end()]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_snapshots_is_reported(kind: str, change: Change, tmp_path: Path) -> None:
    for at in (1, 2 * EVERY - 4):
        log = LOGS[kind]()
        log.store_hashes(EVERY)
        since = 0 if at < EVERY else log.entries[1][EVERY - 1][0] + 1
        change(log.entries[1], at)
        findings = audited(log, tmp_path)
        assert not findings.is_clean
        changed = [each for each in findings.examples if each.kind == Breach.LOG_CHANGED]
        assert (changed[0].partition, changed[0].offset) == (1, since)
        assert {each.partition for each in changed} == {1}


@pytest.mark.parametrize("kind", LOGS)
def test_a_log_as_members_read_it_is_clean(kind: str, tmp_path: Path) -> None:
    log = LOGS[kind]()
    log.store_snapshots(EVERY)
    findings = audited(log, tmp_path)
    assert findings.is_clean
    assert findings.unvouched == []
    young = [text for text in findings.notices if "hash" in text]
    behind = [
        f"{cp} from offset {entries[4 * EVERY - 1][0] + 1} to {entries[-1][0]}"
        for cp, entries in log.entries.items()
        if len(entries) > 4 * EVERY
    ]
    assert len(young) == bool(behind)
    assert all(f"no hash of members covers partition(s) {', '.join(behind)} yet" in text for text in young)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_dump_is_reported_though_no_member_stored_a_hash(change: Change, tmp_path: Path) -> None:
    log = LOGS["claims"]()
    dump = write_hashed_dump(log, tmp_path / "log.jsonl")
    assert audited(log, tmp_path, dump).is_clean
    lines = dump.read_text().splitlines()
    digests = {cp: lines[index] for cp, index in ((0, 200), (1, 400))}
    assert all('"hash"' in line for line in digests.values())
    change(log.entries[0], 120)
    of_cp = DumpLines(0)
    altered = [*of_cp.take(log.entries[0]), *of_cp.end()]
    altered[-1] = altered[-1].rpartition('"hash"')[0] + '"hash"' + digests[0].rpartition('"hash"')[2]
    dump.write_text("\n".join([lines[0], *altered, *lines[201:]]) + "\n")
    findings = audited(log, tmp_path, dump)
    assert findings.violations == {Breach.LOG_CHANGED: 1}
    assert "after the dump was written" in findings.examples[0].detail


def test_a_dump_that_was_cut_or_lacks_records_says_so(tmp_path: Path) -> None:
    log = WholeLog(1, {0: [(offset, offset, encode(Tick("1", "x", "g"))) for offset in range(100)]})
    dump = write_hashed_dump(log, tmp_path / "log.jsonl")
    lines = dump.read_text().splitlines()
    dump.write_text("\n".join([*lines[:40], *lines[43:90]]) + "\n")
    findings = audited(log, tmp_path, dump)
    gap, other = findings.notices
    assert gap.startswith("partition 0: 3 offset(s) between the first and the last record have none, the first of")
    assert other.startswith("the hashes of the dump show changes since it was written")
    end, bare = findings.unvouched
    assert end == "partition 0: the dump ends at offset 89, and the log reached to 100 when it was written: it was cut"
    assert bare.startswith("partition 0: the dump carries no hash of offsets 0 to 88, where kafka-marshal dump writes")
    dump.write_text("\n".join([lines[0], *lines[50:]]) + "\n")
    findings = audited(log, tmp_path, dump)
    assert "partition 0: the dump begins at offset 49, and the log at 0 when it was written: what was between" in (
        " ".join(findings.unvouched)
    )


def test_a_dump_without_hashes_or_bounds_is_not_vouched_for(tmp_path: Path) -> None:
    log = LOGS["claims"]()
    findings = audited(log, tmp_path, log.write_dump(tmp_path / "bare.jsonl"))
    assert findings.is_clean
    assert findings.verdict.endswith("; not all of it is vouched for")
    bounds, *bare = findings.unvouched
    assert bounds.startswith("the dump does not say where its log began and ended")
    assert [text.split(",")[0] for text in bare] == [
        f"partition {cp}: the dump carries no hash of offsets 0 to {log.entries[cp][-1][0]}" for cp in (0, 1)
    ]
    assert audited(log, tmp_path).unvouched == []


def test_a_hash_that_members_should_have_stored_by_now(tmp_path: Path) -> None:
    """Twice the interval is late; a log that is younger has none, and is not wrong."""
    value = encode(Tick("1", "x", "g"))
    for count, missing in ((2 * SNAPSHOT_INTERVAL, False), (2 * SNAPSHOT_INTERVAL + 1, True)):
        log = WholeLog(1, {0: [(offset, offset, value) for offset in range(count)]})
        log.snapshots = {0: [b"nothing"]}
        findings = audited(log, tmp_path)
        assert any("no stored hash covers offsets 0 to" in text for text in findings.unvouched) == missing
        assert any("no hash of members covers partition(s) 0 from" in text for text in findings.notices) != missing


def test_what_is_vouched_for(tmp_path: Path) -> None:
    log = LOGS["claims"]()
    findings = audited(log, tmp_path)
    assert [each.vouched for each in findings.partitions] == [0, 0]
    log.store_hashes(EVERY)
    del log.snapshots[0][1]
    hole = log.entries[0][EVERY - 1][0] + 1, log.entries[0][2 * EVERY - 1][0]
    findings = audited(log, tmp_path)
    assert findings.is_clean
    (bare,) = findings.unvouched
    assert bare.startswith(f"partition 0: no stored hash covers offsets {hole[0]} to {hole[1]}, where members store")
    end = log.entries[0][4 * EVERY - 1][0] + 1
    assert findings.partitions[0].vouched == end - (hole[1] + 1 - hole[0])
    assert findings.partitions[1].vouched == log.entries[1][4 * EVERY - 1][0] + 1


def test_a_log_that_lacks_its_last_records_is_not_vouched_for(tmp_path: Path) -> None:
    log = LOGS["claims"]()
    log.store_hashes(EVERY)
    del log.entries[0][-3:]
    findings = audited(log, tmp_path)
    assert any("1 stored hash(es) reach beyond the log's end" in text for text in findings.unvouched)


def test_two_hashes_of_the_same_records_that_differ_are_a_violation(tmp_path: Path) -> None:
    log = LOGS["coordinated"]()
    log.store_hashes(EVERY)
    forged = RunningHash(0)
    forged.take(log.entries[0][1:EVERY])
    log.snapshots[0].append(encode_hash(forged.at(0, log.entries[0][EVERY - 1][0] + 1)))
    findings = audited(log, tmp_path)
    assert findings.violations == {Breach.LOG_CHANGED: 1}
    assert forged.digest() in findings.examples[0].detail
    assert findings.partitions[0].vouched == log.entries[0][4 * EVERY - 1][0] + 1
