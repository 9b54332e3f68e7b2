"""The check of a run with Spark drivers: every kind of difference is found and reported."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from flights import DemoError, ledger, reference, tables
from flights.bad_records import Planted
from flights.check import Verdict, check, missing_offsets
from flights.dead_letters import Letters, collect
from flights.findings import Audited, Findings
from flights.options import DemoOptions
from flights.ownership import Change, History, history_of, read_dump
from flights.process import DRIVERS, Kill, KillPlan, Stage
from flights.report import Section, write_report
from rationalizer import (
    BeatEntry,
    ClaimingPartition,
    Heartbeat,
    HeartbeatBatch,
    Record,
    ReleasingPartition,
    encode,
    route_lease,
)
from rationalizer.dump import DumpHeader, DumpRecord, header_line, record_line
from rationalizer.history import End
from tests.demo.helpers import row
from tests.demo.test_report import UNEQUAL, findings

TABLES = tables.PlainTables(
    {"UA": "United"}, {"IAH": "Houston"}, {("EWR", "2013-01-01T10:00:00Z"): True, ("JFK", "2013-01-01T10:00:00Z"): None}
)

ROWS = [
    row(hour="5", dep_time="517", sched_dep_time="515", dep_delay="2", arr_delay="-3"),
    row(hour="5", dep_time="2355", sched_dep_time="5", dep_delay="-10", arr_delay="NA"),
    row(hour="5", dep_time="NA", dep_delay="NA", arr_delay="NA", tailnum="NA"),
    row(hour="7", dep_time="700", sched_dep_time="700", dep_delay="0", arr_delay="0", origin="JFK", carrier="ZZ"),
    row(hour="7", dep_time="700", sched_dep_time="700", dep_delay="5", arr_delay="0", dest="QQQ", origin="LGA"),
]


# -- the plain computation ----------------------------------------------------------------------------------------


def test_the_plain_computation_on_rows_that_one_can_add_up_in_the_head() -> None:
    found = reference.compute(ROWS, TABLES)
    assert found.rows == 5
    assert found.groups == {
        ("UA", "EWR", "IAH", 5): ("United", "Houston", 3, 1, 2, -8, 2, 1, -3, -3, 2, -8),
        ("ZZ", "JFK", "IAH", 7): (None, "Houston", 1, 0, 1, 0, 0, 1, 0, 0, 0, 0),
        ("UA", "LGA", "QQQ", 7): ("United", None, 1, 0, 1, 5, 5, 1, 0, 0, 0, 0),
    }
    assert found.quality == {
        "no tail number": 1,
        "departed, no arrival": 1,
        "delay contradicts times": 1,  # on time, 5 minutes late
        "carrier unknown": 1,
        "destination unknown": 1,
        "no weather": 2,
    }


def test_the_whole_year_by_figures_that_anybody_gets_from_it() -> None:
    from flights.data import find_file, read

    found = reference.compute(read(find_file()), tables.read_tables(tables.find_folder()))
    assert (found.rows, len(found.groups)) == (336_776, 2_893)
    assert found.quality == {
        "no tail number": 2_512,
        "departed, no arrival": 1_175,
        "delay contradicts times": 0,
        "carrier unknown": 0,
        "destination unknown": 7_602,  # four airports outside the mainland
        "no weather": 1_556,
    }
    sums = [sum(int(values[place] or 0) for values in found.groups.values()) for place in (2, 3, 4)]
    assert sums == [336_776, 8_255, 336_776 - 8_255]


def test_a_table_that_would_count_flights_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "airlines.csv").write_text("carrier,name\nUA,United\nUA,Again\n")
    with pytest.raises(DemoError, match="UA twice"):
        tables.read_tables(tmp_path)


def test_a_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "airlines.csv").write_text("code,name\nUA,United\n")
    with pytest.raises(DemoError, match="other columns"):
        tables.read_tables(tmp_path)


# -- the comparison -----------------------------------------------------------------------------------------------

PLANTED: Counter[Planted] = Counter({(b"x", "no JSON object"): 1, (None, "no value"): 2})
FOUND: Mapping[tuple[str, int, int], Planted] = {
    ("flights", 0, 5): (b"x", "no JSON object"),
    ("flights", 0, 6): (None, "no value"),
    ("flights", 0, 7): (None, "no value"),
}
LETTERS = Letters(4, FOUND)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database that agrees with the rows."""
    path = tmp_path / "delays.sqlite"
    ledger.create(path)
    wanted = reference.compute(ROWS, TABLES)
    with closing(sqlite3.connect(path)) as db:
        marks = ", ".join("?" * 16)
        db.executemany(
            f"INSERT INTO delays VALUES ({marks})", [(*key, *values) for key, values in wanted.groups.items()]
        )
        db.executemany("INSERT INTO quality VALUES (?, ?)", wanted.quality.items())
        db.executemany("INSERT INTO dead_letters VALUES (?, ?)", [("no JSON object", 1), ("no value", 2)])
        batches = [(0, 0, 7, 8), (1, 0, 2, 3), (1, 3, 7, 5)]
        db.executemany("INSERT INTO batches VALUES ('flights', ?, ?, ?, ?, 1, 'driver-1', 0)", batches)
        db.commit()
    return path


#: Two partitions, eight messages each.
ENDS = {0: 8, 1: 8}


def judged(database: Path, letters: Letters = LETTERS, ends: Mapping[int, int] = ENDS) -> Verdict:
    return check(database, reference.compute(ROWS, TABLES), PLANTED, letters, ends)


def change(database: Path, statement: str) -> None:
    with closing(sqlite3.connect(database)) as db:
        assert db.execute(statement).rowcount > 0
        db.commit()


def test_what_is_equal_is_found_equal(database: Path) -> None:
    verdict = judged(database)
    assert verdict.equal, verdict
    assert (verdict.rows, verdict.groups, verdict.rows_in_database) == (5, 3, 5)


@pytest.mark.parametrize(
    ("statement", "group", "measure"),
    [
        ("UPDATE delays SET wet_departures = 3 WHERE hour = 5", ("UA", "EWR", "IAH", 5), "wet_departures"),
        ("UPDATE delays SET destination = 'Dallas' WHERE carrier = 'ZZ'", ("ZZ", "JFK", "IAH", 7), "destination"),
        ("UPDATE delays SET carrier_name = NULL WHERE origin = 'LGA'", ("UA", "LGA", "QQQ", 7), "carrier_name"),
        ("UPDATE quality SET flights = 3 WHERE failed = 'no weather'", ("quality",), "no weather"),
        ("DELETE FROM quality WHERE failed = 'no weather'", ("quality",), "no weather"),
        ("UPDATE dead_letters SET messages = 1 WHERE trouble = 'no value'", ("dead letters",), "no value"),
        ("INSERT INTO dead_letters VALUES ('other', 1)", ("dead letters",), "other"),
    ],
)
def test_a_value_that_is_off_is_found(database: Path, statement: str, group: tuple[object, ...], measure: str) -> None:
    change(database, statement)
    verdict = judged(database)
    assert not verdict.equal
    [difference] = verdict.differences
    assert (difference.group, difference.measure) == (group, measure)


def test_letters_that_are_missing_other_or_too_many_are_found(database: Path) -> None:
    fewer = dict(FOUND)
    del fewer["flights", 0, 7]
    [difference] = judged(database, Letters(2, fewer)).differences
    assert (difference.group[0], difference.measure) == ("dead-letter topic", "no value")
    assert (difference.in_database, difference.in_file) == (0, 1)
    more = {**FOUND, ("flights", 1, 0): (b"y", "no JSON object")}
    [difference] = judged(database, Letters(4, more)).differences
    assert (difference.in_database, difference.in_file) == (1, 0)
    other = {**FOUND, ("flights", 0, 5): (b"x", "not UTF-8")}
    assert len(judged(database, Letters(3, other)).differences) == 2


@pytest.mark.parametrize("measure", ledger.NUMBERS)
def test_a_number_that_is_off_by_one_is_found(database: Path, measure: str) -> None:
    change(database, f"UPDATE delays SET {measure} = {measure} + 1 WHERE origin = 'EWR'")
    [difference] = judged(database).differences
    assert (difference.group, difference.measure) == (("UA", "EWR", "IAH", 5), measure)
    assert difference.in_database == int(difference.in_file or 0) + 1


def test_a_group_that_is_missing_or_too_many_is_found(database: Path) -> None:
    change(database, "UPDATE delays SET hour = 6 WHERE origin = 'EWR'")
    assert {each.group for each in judged(database).differences} == {("UA", "EWR", "IAH", 5), ("UA", "EWR", "IAH", 6)}


def spoil(statement: str) -> Callable[[Path], None]:
    return lambda database: change(database, statement)


@pytest.mark.parametrize(
    ("how", "lost", "double"),
    [
        (spoil("DELETE FROM batches WHERE partition = 1 AND first_offset = 0"), ((1, 0, 2),), ()),
        (spoil("DELETE FROM batches WHERE partition = 1 AND first_offset = 3"), ((1, 3, 7),), ()),
        (spoil("DELETE FROM batches WHERE partition = 0"), ((0, 0, 7),), ()),
        (spoil("UPDATE batches SET first_offset = 4, rows = 4 WHERE first_offset = 3"), ((1, 3, 3),), ()),
        (spoil("UPDATE batches SET first_offset = 2, rows = 6 WHERE first_offset = 3"), (), ((1, 2, 2),)),
        (spoil("INSERT INTO batches SELECT * FROM batches WHERE partition = 0"), (), ((0, 0, 7),)),
        (spoil("UPDATE batches SET last_offset = 8, rows = 6 WHERE first_offset = 3"), (), ((1, 8, 8),)),
        (spoil("UPDATE batches SET rows = rows - 1 WHERE first_offset = 3"), ((1, 7, 7),), ()),
    ],
    ids=["first", "last", "whole partition", "gap", "overlap", "twice", "beyond the end", "hole within"],
)
def test_every_offset_counts_once(
    database: Path,
    how: Callable[[Path], None],
    lost: tuple[tuple[int, int, int], ...],
    double: tuple[tuple[int, int, int], ...],
) -> None:
    how(database)
    verdict = judged(database)
    assert (verdict.lost, verdict.double) == (lost, double)
    assert (verdict.rows_lost, verdict.rows_double) == tuple(
        sum(last - first + 1 for _, first, last in ranges) for ranges in (lost, double)
    )
    assert not verdict.equal
    assert missing_offsets(database, ENDS) == list(lost)


def test_an_untouched_partition_is_lost_as_a_whole(database: Path) -> None:
    assert judged(database, ends={**ENDS, 2: 5}).lost == ((2, 0, 4),)


def test_partitions_without_rows_are_fine(database: Path) -> None:
    assert judged(database, ends={**ENDS, 2: 0}).equal


# -- letters ------------------------------------------------------------------------------------------------------


class Message:
    def __init__(self, value: bytes | None, **headers: str) -> None:
        self._value = value
        self._headers = [(name.replace("_", "."), text.encode()) for name, text in headers.items()]

    def offset(self) -> int:
        return 11

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes]]:
        return self._headers


def letter(value: bytes | None, offset: int) -> Message:
    return Message(value, source_topic="flights", source_partition="3", source_offset=str(offset), trouble="t")


def test_letters_of_one_source_are_one() -> None:
    found = collect([letter(b"a", 1), letter(None, 2), letter(b"a", 1), letter(b"a", 4)])
    assert (found.written, len(found.found), found.repeated) == (4, 3, 1)
    assert found.troubles == {"t": 3}


def test_letters_that_do_not_say_whence_they_come_are_an_error() -> None:
    with pytest.raises(DemoError, match=r"offset 11 does not say whence"):
        collect([Message(b"a", trouble="t")])
    with pytest.raises(DemoError, match=r"flights \[3\] @ 1 differ"):
        collect([letter(b"a", 1), letter(b"b", 1)])


# -- messages -----------------------------------------------------------------------------------------------------

AUDITED = Audited("0 violations in 905 records", True, 0, 905, "audit")


def spark_findings(verdict: Verdict | None = None, audit: Audited = AUDITED, letters: Letters = LETTERS) -> Findings:
    plain = findings() if verdict is None else findings(verdict)
    plain.story.kill = Kill("worker-2", 5_000, 400, ((1, 100, 199), (4, 0, 9)), False, Stage.LETTERED, 420)
    plain.story.added = None
    return replace(plain, manner=DRIVERS, letters=letters, quality=[("no weather", 2)], audit=audit)


def test_the_story_of_drivers_is_reported() -> None:
    found = spark_findings()
    assert found.equal
    assert found.verdict_text() == (
        "EQUAL: 1,000 flights in 12 groups, compared number by number with the file: 0 lost, 0 double. 3 more messages "
        "were no flights: dead letters, each accounted for. Audit: 0 violations in 905 records."
    )
    text = " ".join(found.sentences())
    assert "with a batch of 110 rows in flight that was not yet written, but for its dead letters" in text
    assert "Its JVM was gone 420 ms after the driver." in text
    assert "1 dead letter was written again" in text
    assert "Living drivers handed over 1 partition" in text
    assert found.summary()["dead_letters"] == 3


def test_one_dead_letter_is_in_the_singular() -> None:
    found = spark_findings(letters=replace(LETTERS, found=dict([*LETTERS.found.items()][:1])))
    assert " 1 more message was no flight: a dead letter, each accounted for." in found.verdict_text()


def test_successors_are_named_and_marked() -> None:
    found = spark_findings()
    found.story.successors.append(("driver-3", 6_000, "driver-1"))
    assert "driver-3 was started in the place of driver-1." in found.sentences()
    assert [mark.text for mark in found.marks()] == ["worker-2 killed (-9)", "driver-3 started"]


def test_a_violation_or_a_difference_makes_it_unequal() -> None:
    assert not spark_findings(audit=replace(AUDITED, clean=False, violations=1)).equal
    assert not spark_findings(UNEQUAL).equal


def test_sections_stand_on_the_page_and_are_escaped(tmp_path: Path) -> None:
    section = Section("Of <b>", ("name", "count"), [("<i>", "3")], frozenset({1}), "note & more", ("there", "a/b.html"))
    page, _ = write_report(spark_findings(), [], tmp_path, [section], [("audit 'x'", "the log")])
    text = page.read_text()
    assert "<h2>Of &lt;b&gt;</h2>" in text and "<td>&lt;i&gt;</td><td class=number>3</td>" in text
    assert "note &amp; more" in text and '<a href="a/b.html">there</a>' in text
    assert "audit &#x27;x&#x27;  # the log" in text
    assert "Taken over from a silent driver" in text


def test_kills_of_drivers_come_at_every_stage() -> None:
    assert {KillPlan.drawn(seed, DRIVERS).stage for seed in range(40)} == set(Stage)


def test_rounds_are_small_where_rows_are_few() -> None:
    assert [DemoOptions(rows=rows).round_size for rows in (None, 0, 1_000, 120_000, 300_000)] == [
        20_000,
        20_000,
        500,
        7_500,
        18_750,
    ]
    assert DemoOptions(batch_size=7).round_size == 7
    assert (DemoOptions().crew_size, DemoOptions(plain=True).crew_size, DemoOptions(workers=5).crew_size) == (2, 3, 5)


def test_where_a_system_has_no_watchdog_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DemoOptions().watched and not DemoOptions(watchdog=False).watched
    monkeypatch.setattr("flights.options.is_supported", lambda: False)
    assert not DemoOptions().watched


# -- Ownership over time, derived from logs written by hand -------------------------------------------------------


HI = 1_000
HEADER = DumpHeader("__marshal", 2)
#: Partitions of "flights" whose leases are in CP 0, and the first one in CP 1.
P, P2 = [partition for partition in range(50) if route_lease("flights", partition, 2) == 0][:2]
ELSEWHERE = next(partition for partition in range(50) if route_lease("flights", partition, 2) == 1)


class Log:
    """A log with the broker's timestamps; in CP 0 by default."""

    def __init__(self) -> None:
        self.records: list[DumpRecord] = []

    def add(self, at_ms: int, record: Record) -> int:
        """Append; the offset."""
        cp = route_lease("flights", getattr(record, "partition", P), 2)
        self.records.append(DumpRecord(cp, len(self.records), at_ms, encode(record)))
        return len(self.records) - 1

    def claim(self, at_ms: int, who: str, group: str = "delays", partition: int = P) -> int:
        return self.add(at_ms, ClaimingPartition(f"i-{who}", who, group, "flights", partition, HI))

    def beat(self, at_ms: int, who: str, epoch: int, last: int | None = None, partition: int = P) -> int:
        return self.add(at_ms, Heartbeat(f"i-{who}", who, "delays", "flights", partition, epoch, last))

    def release(self, at_ms: int, who: str, epoch: int, last: int | None = None, partition: int = P) -> int:
        return self.add(at_ms, ReleasingPartition(f"i-{who}", who, "delays", "flights", partition, epoch, last))

    def history(self) -> History:
        return history_of(HEADER, self.records, "delays", "flights")


def test_a_silent_holder_is_replaced() -> None:
    log = Log()
    first = log.claim(10_000, "a")
    log.beat(10_300, "a", first, 4)
    log.beat(10_600, "a", first, 9)
    assert log.claim(12_600, "b") >= 0  # 2 000 ms after the last beat: not stale yet
    second = log.claim(12_601, "b")
    log.beat(12_900, "b", second, 20)
    history = log.history()
    old, new = history.tenures[P]
    assert (old.client_id, old.since, old.last_beat, old.until, old.ended) == (
        "a",
        10_000,
        10_600,
        12_601,
        End.REPLACED,
    )
    assert (new.client_id, new.since, new.epoch, new.ended, new.until) == ("b", 12_601, second, End.OPEN, None)
    [takeover] = history.takeovers()
    assert (takeover.old, takeover.new, takeover.change, takeover.partition) == ("a", "b", Change.SILENT, P)
    assert (takeover.at_ms, takeover.since_last_beat_ms, takeover.vacant_ms) == (12_601, 2_001, None)
    assert history.holders() == {P: "b"}
    assert history.progress == [(10_300, "a", 5), (10_600, "a", 5), (12_900, "b", 11)]


def test_a_living_holder_hands_over() -> None:
    log = Log()
    first = log.claim(1_000, "a")
    log.release(1_500, "a", first, 9)
    log.claim(1_540, "b")
    history = log.history()
    assert [tenure.ended for tenure in history.tenures[P]] == [End.RELEASED, End.OPEN]
    [takeover] = history.takeovers()
    assert (takeover.change, takeover.vacant_ms, takeover.since_last_beat_ms) == (Change.HANDED_OVER, 40, 540)
    assert history.progress == [(1_500, "a", 10)]


def test_a_watchdog_releases_in_the_name_of_a_dead_holder() -> None:
    log = Log()
    first = log.claim(1_000, "a")
    log.beat(1_300, "a", first, 9)
    log.release(1_510, "a", first)
    log.claim(1_514, "b")
    [takeover] = log.history().takeovers({"a"})
    assert (takeover.old, takeover.new, takeover.change) == ("a", "b", Change.WATCHDOG)
    assert (takeover.at_ms, takeover.since_last_beat_ms, takeover.vacant_ms) == (1_514, 214, 4)
    # The log alone does not show it: a living member may release so, too.
    [takeover] = log.history().takeovers()
    assert takeover.change is Change.HANDED_OVER
    [takeover] = log.history().takeovers({"b"})
    assert takeover.change is Change.HANDED_OVER


def test_what_a_holder_released_before_it_died_was_handed_over() -> None:
    """Later it wrote about another lease in another CP, whose records may be read before or after."""
    for cps in ((0, 1), (1, 0)):
        log = Log()
        first = log.claim(1_000, "a")
        log.release(1_100, "a", first)
        log.claim(1_110, "b")
        second = log.claim(1_000, "a", partition=ELSEWHERE)
        log.beat(1_900, "a", second, partition=ELSEWHERE)
        log.release(2_000, "a", second, partition=ELSEWHERE)
        log.claim(2_004, "b", partition=ELSEWHERE)
        log.records.sort(key=lambda record: cps.index(record.partition))
        changes = {each.partition: each.change for each in log.history().takeovers({"a"})}
        assert changes == {P: Change.HANDED_OVER, ELSEWHERE: Change.WATCHDOG}


def test_a_release_that_says_what_is_done_is_no_watchdogs() -> None:
    log = Log()
    first = log.claim(1_000, "a")
    log.release(1_100, "a", first, 9)
    log.claim(1_110, "b")
    [takeover] = log.history().takeovers({"a"})
    assert takeover.change is Change.HANDED_OVER


def test_what_a_dead_holder_had_sent_may_arrive_after_its_watchdogs_releases() -> None:
    """Shortly after in another CP, where it still holds the lease; and in the same one, where it is rejected."""
    log = Log()
    first = log.claim(1_000, "a")
    second = log.claim(1_000, "a", partition=ELSEWHERE)
    log.release(1_500, "a", first)
    log.beat(1_501, "a", first)
    log.beat(1_502, "a", second, partition=ELSEWHERE)
    log.release(1_503, "a", second, partition=ELSEWHERE)
    for partition in (P, ELSEWHERE):
        log.claim(1_510, "b", partition=partition)
    assert {each.change for each in log.history().takeovers({"a"})} == {Change.WATCHDOG}


def test_a_lease_that_its_watchdog_could_not_release_falls_free_by_silence() -> None:
    log = Log()
    first = log.claim(1_000, "a")
    log.claim(1_000, "a", partition=P2)
    log.release(1_500, "a", first)
    log.claim(1_510, "b")
    log.claim(3_001, "b", partition=P2)
    changes = {each.partition: each.change for each in log.history().takeovers({"a"})}
    assert changes == {P: Change.WATCHDOG, P2: Change.SILENT}


def test_a_released_partition_has_no_holder() -> None:
    log = Log()
    log.release(1_500, "a", log.claim(1_000, "a"))
    assert log.history().holders() == {}
    assert log.history().takeovers() == []


def test_what_is_rejected_changes_nothing() -> None:
    log = Log()
    first = log.claim(1_000, "a")
    log.claim(1_100, "b")
    log.beat(1_200, "b", first)
    log.release(1_300, "b", first)
    [tenure] = log.history().tenures[P]
    assert (tenure.client_id, tenure.last_beat) == ("a", 1_000)


def test_a_restart_within_the_interval_is_a_separate_tenure() -> None:
    """C7: the same client, another instance, another epoch."""
    log = Log()
    log.claim(1_000, "a")
    log.add(1_400, Heartbeat("i-again", "a", "delays", "flights", P, None, None))
    old, new = log.history().tenures[P]
    assert (old.ended, new.client_id, new.instance_id, new.epoch) == (End.RESTARTED, "a", "i-again", 1)


def test_a_late_beat_revives() -> None:
    """C6: stale but not replaced."""
    log = Log()
    first = log.claim(1_000, "a")
    log.beat(9_000, "a", first)
    [tenure] = log.history().tenures[P]
    assert (tenure.ended, tenure.last_beat) == (End.OPEN, 9_000)


def test_beats_of_many_leases_in_one_record_count() -> None:
    log = Log()
    first = log.claim(1_000, "a")
    log.add(1_300, HeartbeatBatch("i-a", "a", "delays", (BeatEntry("flights", P, first, 41),)))
    history = log.history()
    assert history.tenures[P][0].last_beat == 1_300
    assert history.progress == [(1_300, "a", 42)]


def test_other_groups_and_topics_are_left_out() -> None:
    log = Log()
    log.claim(1_000, "a", group="another")
    log.add(1_000, ClaimingPartition("i-a", "a", "delays", "planes", P, HI))
    assert log.history().all_tenures() == []


def test_bad_records_are_passed_over() -> None:
    log = Log()
    log.records.append(DumpRecord(0, 0, 500, b"\xc1"))
    log.records.append(DumpRecord(0, 1, 500, None))
    log.claim(1_000, "a")
    assert log.history().holders() == {P: "a"}


def test_tenures_of_a_partition_never_overlap() -> None:
    log = Log()
    epoch = log.claim(0, "a")
    for number in range(1, 40):
        who, at_ms = f"w{number % 3}", number * 900
        log.claim(at_ms, who)
        log.beat(at_ms + 100, who, len(log.records) - 1, number)
        if number % 5 == 0:
            log.release(at_ms + 200, who, len(log.records) - 2)
    del epoch
    history = log.history()
    assert len(history.all_tenures()) > 5
    assert history.overlaps() == []


def test_a_history_survives_the_file(tmp_path: Path) -> None:
    log = Log()
    log.beat(1_300, "a", log.claim(1_000, "a"), 3)
    lines = [header_line(HEADER), *map(record_line, log.records)]
    (tmp_path / "log.jsonl").write_text("".join(f"{line}\n" for line in lines))
    header, records = read_dump(tmp_path / "log.jsonl")
    assert (header, records) == (HEADER, log.records)
    assert history_of(header, records, "delays", "flights") == log.history()
