"""Hashes of the log (S4), and of the records of a dump (D5)."""

from __future__ import annotations

import io
import json
from random import Random

import pytest
from msgpack import packb

from rationalizer.dump import DumpError, DumpHeader, DumpLines, DumpReader, DumpRecord, Replay, header_line, record_line
from rationalizer.limits import SNAPSHOT_INTERVAL
from rationalizer.log_hash import MAX_AT_ONCE, Entry, HashChecks, LogHash, RunningHash, decode_hash, encode_hash
from rationalizer.snapshot_log import MalformedPartError, SnapshotParts, decode_part

LOG: list[Entry] = [(0, 1_700_000_000_000, b"marker"), (1, -1, None), (4, 1_700_000_000_001, b"")]


def hash_of(entries: list[Entry], since: int = 0) -> str:
    running = RunningHash(since)
    running.take(entries)
    return running.digest()


def long_log(records: int) -> list[Entry]:
    rng, offset, found = Random(4), 0, []
    for _ in range(records):
        found.append((offset, rng.choice([-1, 5, 2**62]), rng.choice([None, b"", rng.randbytes(rng.randrange(400))])))
        offset += rng.choice([1, 1, 1, 1, 7])
    return found


def test_s4_the_hash_byte_for_byte() -> None:
    """In a separate line, so that another implementation can be compared with it."""
    assert hash_of(LOG) == "589a8ceb62914d088b095136c4be96ac"
    assert hash_of([]) == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("size", [1, 15, 16, 17, 999, 65_535, 65_536, 70_000])
def test_s4_the_hash_is_the_same_however_records_come(size: int) -> None:
    log = [(offset, offset, None) for offset in range(70_000)] if size > 60_000 else long_log(2_000)
    running = RunningHash(0)
    for at in range(0, len(log), size):
        running.take(log[at : at + size])
    one_by_one = RunningHash(0)
    for entry in log:
        one_by_one.take([entry])
    assert running.digest() == one_by_one.digest()


def test_s4_its_record_and_what_is_none() -> None:
    stored = LogHash(3, 10_000, 20_000, "0123456789abcdef" * 2)
    value = encode_hash(stored)
    assert value == packb([2, 3, 10_000, 20_000, "0123456789abcdef" * 2])
    assert decode_hash(value) == stored
    largest = LogHash(2**31 - 1, 2**63 - 1, 2**63, "f" * 32)
    assert decode_hash(encode_hash(largest)) == largest
    bad: list[object] = [
        [1, 3, 0, 5, "0" * 32],
        [2, 3, 5, 5, "0" * 32],
        [2, 3, -1, 5, "0" * 32],
        [2, True, 0, 5, "0" * 32],
        [2, 3, 0, 5, "0" * 31],
        [2, 3, 0, 5, "G" * 32],
        [2, 3, 0, 5, b"0" * 32],
        [2, 3, 0, 5],
        [2, 3, 0, 5, "0" * 32, 1],
        [2, 3, 0, 2**63 + 1, "0" * 32],
        {2: 3},
    ]
    assert [decode_hash(packb(each)) for each in bad] == [None] * len(bad)
    odd = (None, b"", value[:-1], value + b"\xc0", b"\x95\x02" + b"\xff" * 40)
    assert {decode_hash(each) for each in odd} == {None}


def test_q27_an_earlier_release_takes_its_record_for_no_part_of_a_snapshot() -> None:
    value = encode_hash(LogHash(0, 0, 10_000, "0" * 32))
    with pytest.raises(MalformedPartError):
        decode_part(value)
    parts = SnapshotParts(0)
    assert parts.add(value) is None
    assert (list(parts.hashes), parts.junk) == ([LogHash(0, 0, 10_000, "0" * 32)], 0)
    assert parts.add(encode_hash(LogHash(1, 0, 10_000, "0" * 32))) is None
    assert (len(parts.hashes), parts.junk) == (1, 1)


# -- comparing ---------------------------------------------------------------------------------------------------------


def stored_hashes(log: list[Entry], bounds: list[int]) -> list[LogHash]:
    return [
        LogHash(0, since, end, hash_of([entry for entry in log if since <= entry[0] < end]))
        for since, end in zip([0, *bounds], bounds, strict=False)
    ]


@pytest.mark.parametrize("size", [1, 7, 100, 5_000])
def test_s4_ranges_are_compared_however_records_come(size: int) -> None:
    log = long_log(1_000)
    end = log[-1][0] + 1
    stored = stored_hashes(log, [*range(90, end, 90), end])
    lie = LogHash(0, 90, 180, "0" * 32)
    checks = HashChecks([*stored, lie, LogHash(0, 0, end, hash_of(log)), LogHash(0, 0, end + 1, "0" * 32)])
    for at in range(0, len(log), size):
        checks.take(log[at : at + size])
    checks.ended(end)
    assert sorted(checks.held, key=lambda each: (each.next_offset, each.since)) == sorted(
        [*stored, LogHash(0, 0, end, hash_of(log))], key=lambda each: (each.next_offset, each.since)
    )
    assert checks.wrong == [(lie, stored[1].digest)]


def test_s4_ranges_of_offsets_without_records() -> None:
    nothing = hash_of([])
    log: list[Entry] = [(0, 0, b"x"), (100, 0, b"y")]
    stored = [LogHash(0, 10, 20, nothing), LogHash(0, 20, 100, nothing), LogHash(0, 30, 40, "0" * 32)]
    checks = HashChecks([*stored, LogHash(0, 101, 110, nothing)])
    checks.take(log)
    checks.ended(101)
    assert checks.held == stored[:2]
    assert checks.wrong == [(stored[2], nothing)]


def test_s4_what_begins_before_the_log_does_is_left_out() -> None:
    checks = HashChecks([LogHash(0, 0, 20, "0" * 32), LogHash(0, 10, 20, "0" * 32)], 10)
    checks.take([(offset, 0, None) for offset in range(10, 30)])
    assert [stored.since for stored, _ in checks.wrong] == [10]


def test_s4_forged_ranges_that_overlap_do_not_multiply_the_work() -> None:
    checks = HashChecks([LogHash(0, 0, end, "0" * 32) for end in range(1_000, 2_000)])
    checks.take([(offset, 0, None) for offset in range(2_000)])
    assert len(checks.wrong) == MAX_AT_ONCE


# -- dumps -------------------------------------------------------------------------------------------------------------


def dump_of(log: list[Entry]) -> list[bytes]:
    lines = DumpLines(0)
    header = header_line(DumpHeader("__marshal", 1, ((0, log[-1][0] + 1),)))
    return [line.encode() for line in (header, *lines.take(log), *lines.end())]


def changed(lines: list[bytes]) -> list[tuple[int, int]]:
    found: list[LogHash] = []
    list(DumpReader(lines).checked(found))
    return [(each.since, each.next_offset) for each in found]


def test_d5_a_hash_every_interval_and_at_the_end() -> None:
    log: list[Entry] = [(offset, 0, b"x") for offset in range(2 * SNAPSHOT_INTERVAL + 5)]
    lines = dump_of(log)
    hashed = [json.loads(line)["offset"] for line in lines if b'"hash"' in line]
    assert hashed == [SNAPSHOT_INTERVAL - 1, 2 * SNAPSHOT_INTERVAL - 1, 2 * SNAPSHOT_INTERVAL + 4]
    assert changed(lines) == []
    del lines[SNAPSHOT_INTERVAL + 5]
    assert changed(lines) == [(SNAPSHOT_INTERVAL, 2 * SNAPSHOT_INTERVAL)]


def test_d5_a_dump_without_hashes_is_read_as_ever_and_an_earlier_reader_passes_them_over() -> None:
    header, *records = dump_of(LOG)
    plain = [header_line(DumpHeader("__marshal", 1)), *(record_line(DumpRecord(0, *entry)) for entry in LOG)]
    assert plain[0] == '{"topic": "__marshal", "partitions": 1, "format": 1}'
    assert changed([line.encode() for line in plain]) == []
    assert list(DumpReader([header, *records])) == list(DumpReader([line.encode() for line in plain]))
    assert DumpReader([header]).header.bounds == ((0, 5),)


def test_d5_a_replay_knows_what_was_changed() -> None:
    lines = dump_of(LOG)
    replay = Replay(io.BytesIO(b"\n".join(lines).replace(b'"timestamp": -1', b'"timestamp": 3')))
    replay.state()
    assert [(each.since, each.next_offset) for each in replay.changed] == [(0, 5)]


@pytest.mark.parametrize(
    "line",
    [
        b'{"partition": 0, "offset": 0, "timestamp": 0, "value": null, "hash": "00"}',
        b'{"partition": 0, "offset": 0, "timestamp": 0, "value": null, "hash": null}',
    ],
)
def test_d5_a_hash_that_is_invalid_is_a_bad_line(line: bytes) -> None:
    header = header_line(DumpHeader("__marshal", 1)).encode()
    with pytest.raises(DumpError, match="line 2"):
        list(DumpReader([header, line]))


@pytest.mark.parametrize("bounds", ["1", "[]", "[[0, 1], [0, 1]]", "[[0]]", '[[0, "1"]]', "[[0, true]]", "null"])
def test_d5_bounds_that_are_none_are_a_bad_header(bounds: str) -> None:
    header = f'{{"topic": "x", "partitions": 1, "format": 1, "bounds": {bounds}}}'
    with pytest.raises(DumpError, match="line 1"):
        DumpReader([header.encode()])
