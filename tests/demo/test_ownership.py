"""Ownership over time, derived from logs written by hand."""

from __future__ import annotations

from pathlib import Path

from flights.ownership import Change, History, history_of, read_dump
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
