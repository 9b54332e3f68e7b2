"""`log`: from a dump, and in the order of the whole log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kafka_marshal.cli.log import Filter, LogLine, LogLines, in_order
from rationalizer import (
    ClaimingPartition,
    Heartbeat,
    ReleasingPartition,
    Tick,
    Upgrade,
    World,
    encode,
    route_lease,
)
from tests.cli.harness import Command, Log, Terminal

A = ("a1", "a", "g")
B = ("b1", "b", "g")


def story() -> Log:
    """Two partitions of a topic, in two CPs; a claims both, b claims one and gets it later."""
    log = Log(4)
    homes = [next(n for n in range(50) if route_lease("t", n, 4) == cp) for cp in (0, 1)]
    first, second = homes
    log.add(Tick("i", "init", "partitions=4"), 900, 0)
    log.add(Tick("i", "init", "partitions=4"), 901, 1)
    epoch = log.add(ClaimingPartition(*A, "t", first, 1000), 1000)
    log.add(ClaimingPartition(*A, "t", second, 1000), 1001)
    log.add(ClaimingPartition(*B, "t", first, 1000), 1002)
    log.add(Heartbeat(*A, "t", first, epoch, 41), 1300)
    log.add(ReleasingPartition(*A, "t", first, epoch, 50), 1400)
    log.add(ClaimingPartition(*B, "t", first, 1000), 1401)
    log.add(b"\xc1junk", 1500, 1)
    log.add(ClaimingPartition("c1", "c", "other", "t", second, 1000), 1600)
    return log


def test_the_log_in_words(command: Command) -> None:
    ran = command("log", "--from-dump", "-", stdin=story().dump)
    assert ran.status == 0
    rows = ran.rows
    assert [row["code"] for row in rows] == ["OK", "OK", "OK", "OK", "HELD", "OK", "OK", "OK", "MALFORMED", "OK"]
    held = rows[4]
    assert (held["client"], held["instance"], held["group"]) == ("b", "b1", "g")
    assert held["why"] == "a holds it, epoch 1, last beat 0.0 s before"
    assert rows[8]["what"] == "5 bytes, not a record"
    assert rows[8]["client"] == ""
    assert rows[0]["group"] == ""
    assert rows[0]["what"] == "fixes the number of partitions of the log at 4"


def test_json_is_the_replays_line_with_words(command: Command) -> None:
    lines = [json.loads(line) for line in command("log", "--json", "--from-dump", "-", stdin=story().dump).lines]
    replayed = [json.loads(line) for line in command("replay", "-", stdin=story().dump).lines]
    assert [{key: line[key] for key in replayed[0]} for line in lines] == replayed
    assert lines[4]["client"] == "b"
    assert lines[4]["topic_partition"] == lines[2]["topic_partition"]
    assert lines[8]["client"] is None


def codes_of(command: Command, *options: str) -> list[tuple[str, str]]:
    rows = command("log", "--from-dump", "-", *options, stdin=story().dump).rows
    return [(row["client"], row["code"]) for row in rows]


def test_what_can_be_asked_for(command: Command) -> None:
    assert codes_of(command, "--group", "other") == [("c", "OK")]
    assert codes_of(command, "-n", "2") == [("", "MALFORMED"), ("c", "OK")]
    assert codes_of(command, "-n", "0") == []
    assert codes_of(command, "-n", "1", "--group", "g") == [("b", "OK")]
    assert codes_of(command, "--since", "1401") == [("b", "OK"), ("", "MALFORMED"), ("c", "OK")]
    assert len(codes_of(command, "--cp", "1")) == 4
    assert ("a", "OK") in codes_of(command, "--no-beats")
    assert len(codes_of(command, "--no-beats")) == len(codes_of(command)) - 3
    assert command("log", "--from-dump", "-", "--cp", "4", stdin=story().dump).status == 2


def test_since_skips_the_past_but_knows_it(command: Command) -> None:
    log = Log()
    log.add(ClaimingPartition(*A, "t", 0, 1000), 1000)
    log.add(Tick(*A), 9000)
    log.add(ClaimingPartition(*B, "t", 0, 1000), 9001)
    ran = command("log", "--since", "9001", "--from-dump", "-", stdin=log.dump)
    assert [row["why"] for row in ran.rows] == ["granted, epoch 2; a was silent for 8.0 s"]


def test_a_part_that_stopped_at_an_upgrade_is_named(command: Command) -> None:
    log = Log(2)
    log.add(Upgrade(*A, 105), 1000, 1)
    log.add(Tick(*A), 1000, 1)
    log.add(Tick(*A), 1000, 0)
    ran = command("log", "--from-dump", "-", stdin=log.dump)
    assert ran.status == 1
    assert "partition 1" in ran.err
    assert "level 105" in ran.err
    assert len(ran.rows) == 1


EVIL = ("i\u202e1", "w\u200b\u2066[red]:bomb:", "g\u00a0")


@pytest.mark.parametrize("args", [["log"], ["who", EVIL[2], "t\u202e", "0"]])
def test_nothing_from_the_log_reaches_a_terminal_unescaped(
    tmp_path: Path, terminal: Callable[..., Terminal], args: list[str]
) -> None:
    log = Log()
    log.add(ClaimingPartition(*EVIL, "t\u202e", 0, 1000), 1000)
    log.add(ClaimingPartition("x", "y", EVIL[2], "t\u202e", 0, 1000), 1001)
    log.add(b"\x1b]0;pwned\x07", 1002)
    log.add(b"\x96\x01\x02\xa9\x1b]0;p\x07\x9b1m\xa1c\xa1g\xa1t", 1003)
    (tmp_path / "dump").write_bytes(log.dump)
    opened = terminal(*args, "--from-dump", str(tmp_path / "dump"), columns=250)
    shown = opened.finish().decode()
    assert opened.process.returncode == 0, shown
    for bad in ("\u202e", "\u200b", "\u2066", "\u00a0", "\x1b]", "\x9b", "\x07"):
        assert bad not in shown
    assert "w\\u200b\\u2066[red]:bomb:" in shown


def test_plain_text_is_escaped_too_so_that_columns_stay_columns(command: Command) -> None:
    log = Log()
    log.add(ClaimingPartition("i", "a\u2028b", "g", "t", 0, 1000), 1000)
    (row,) = command("log", "--from-dump", "-", stdin=log.dump).rows
    assert row["client"] == "a\\u2028b"


# -- the order of the whole log ------------------------------------------------------------------------------


def runs(log: Log) -> list[tuple[int, int, int, bytes]]:
    from rationalizer.dump import DumpReader

    return [(r.partition, r.offset, r.timestamp_ms, r.value or b"") for r in DumpReader(log.dump.splitlines())]


def told(lines: LogLines, records: list[tuple[int, int, int, bytes]]) -> Iterator[LogLine]:
    for partition, offset, stamp, value in records:
        yield from lines.read(partition, [(offset, stamp, value)])


EVERYTHING = Filter(group=None, since=None, no_beats=False)


@pytest.mark.parametrize("by_partition", [True, False])
def test_partitions_are_merged_by_time_however_they_were_read(by_partition: bool) -> None:
    records = runs(story())
    expected = [(stamp, cp, offset) for cp, offset, stamp, _ in sorted(records, key=lambda r: (r[2], r[0], r[1]))]
    if by_partition:
        records.sort(key=lambda record: record[:2])
    ends = {cp: sum(record[0] == cp for record in records) for cp in range(4)}
    seen = [each.key for each in in_order(told(LogLines(4, EVERYTHING, {}), records), ends)]
    assert seen == expected


def test_merging_holds_back_only_as_much_as_partitions_are_read_apart() -> None:
    log = Log(2)
    for number in range(1_000):
        log.add(Tick(*A), number, number % 2)
    lines = LogLines(2, EVERYTHING, {})
    given = 0

    def source() -> Iterator[LogLine]:
        nonlocal given
        for each in told(lines, runs(log)):
            given += 1
            yield each

    for taken, _ in enumerate(in_order(source(), {0: 500, 1: 500}), start=1):
        assert given - taken <= 2


def test_the_end_of_a_partition_that_is_no_record_loses_nothing() -> None:
    """A control record at the end of a CP is never delivered: records that wait for it are shown nevertheless."""
    records = runs(story())
    ends = {cp: sum(record[0] == cp for record in records) + 1 for cp in range(4)}
    seen = [each.key for each in in_order(told(LogLines(4, EVERYTHING, {}), records), ends)]
    assert seen == sorted(seen)
    assert len(seen) == len(records)


def test_what_is_skipped_is_replayed_all_the_same() -> None:
    records = runs(story())
    skipping = LogLines(4, EVERYTHING, {0: 3, 1: 2})
    list(told(skipping, records))
    for cp in range(2):
        world = World(cp, 4)
        world.apply_many([(offset, stamp, value) for p, offset, stamp, value in records if p == cp])
        assert skipping.worlds[cp].digest() == world.digest()


def test_the_story_is_one_that_the_world_accepts() -> None:
    world = World(route_lease("t", 0, 4), 4)
    assert world.apply(0, 1000, encode(ClaimingPartition(*A, "t", 0, 1000))).accepted
