"""Dumps, replays of dumps, states (D1-D4), byte for byte as in examples/."""

from __future__ import annotations

import io
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgpack import packb

from rationalizer import Record, Tick, Upgrade, encode
from rationalizer.dump import (
    DumpError,
    DumpHeader,
    DumpLines,
    DumpReader,
    DumpRecord,
    Replay,
    UntilError,
    header_line,
    json_of_outcome,
    json_of_state,
    record_line,
)
from rationalizer.limits import SNAPSHOT_INTERVAL
from rationalizer.log_hash import MAX_AT_ONCE, Entry, HashChecks, LogHash, RunningHash, decode_hash, encode_hash
from rationalizer.snapshot_log import MalformedPartError, SnapshotParts, decode_part

EXAMPLES = Path(__file__).parent / "examples"
NAMES = sorted(path.name.removesuffix(".dump.jsonl") for path in EXAMPLES.glob("*.dump.jsonl"))
HEADER = b'{"topic": "__marshal", "partitions": 2, "format": 1}\n'
A1 = ("1", "a", "g")
TOP = 2**63 - 1
GOOD = {"partition": 0, "offset": 1, "timestamp": 5, "value": None}


def example(name: str, part: str) -> bytes:
    return (EXAMPLES / f"{name}.{part}").read_bytes()


def line(partition: int, offset: int, record: Record | bytes | None, timestamp: int = 1000) -> bytes:
    value = encode(record) if isinstance(record, Record) else record
    return record_line(DumpRecord(partition, offset, timestamp, value)).encode() + b"\n"


def replay(*lines: bytes, until: dict[int, int] | None = None) -> Replay:
    return Replay(io.BytesIO(HEADER + b"".join(lines)), until)


def test_all_examples_are_there() -> None:
    groups = [name for name in NAMES if name.startswith(("group_", "checkpoint_", "sharing_", "redo_"))]
    assert len(groups) == 9 + 10 + 8 + 8
    assert [name for name in NAMES if name not in groups] == ["digest", "earliest_claim_wins", "ranges_merge"]


@pytest.mark.parametrize("name", NAMES)
def test_d2_outcomes_are_those_of_the_examples_byte_for_byte(name: str) -> None:
    outcomes = Replay(io.BytesIO(example(name, "dump.jsonl"))).outcomes()
    assert "".join(json_of_outcome(outcome) + "\n" for outcome in outcomes).encode() == example(name, "outcomes.jsonl")


@pytest.mark.parametrize("name", NAMES)
def test_d3_states_are_those_of_the_examples(name: str) -> None:
    state = json_of_state(Replay(io.BytesIO(example(name, "dump.jsonl"))).state())
    after_outcomes = Replay(io.BytesIO(example(name, "dump.jsonl")))
    for _ in after_outcomes.outcomes():
        pass
    assert json_of_state(after_outcomes.state()) == state
    assert json.loads(state) == json.loads(example(name, "state.json"))
    if not name.startswith(("group_", "checkpoint_", "sharing_", "redo_")):  # others order keys (Q22)
        assert state.encode() == example(name, "state.json")


@pytest.mark.parametrize("name", NAMES)
def test_d1_writing_what_was_read_gives_the_same_bytes(name: str) -> None:
    reader = DumpReader(io.BytesIO(example(name, "dump.jsonl")))
    lines = [header_line(reader.header), *(record_line(record) for record in reader)]
    assert "".join(line + "\n" for line in lines).encode() == example(name, "dump.jsonl")


# -- D1 --------------------------------------------------------------------------------------------------------


def test_d1_extra_keys_are_ignored_and_equal_keys_count_last() -> None:
    text = b'{"x": [1.5, {"y": null}], "partition": 1, "offset": 0, "timestamp": 5, "value": null, "partition": 0}\n'
    assert [record.partition for record in DumpReader(io.BytesIO(HEADER + text))] == [0]


def test_d1_a_last_line_without_its_end_counts() -> None:
    assert len(list(replay(line(0, 0, Tick(*A1)).rstrip()).outcomes())) == 1


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_d1_lines_end_at_line_feeds_only(separator: str) -> None:
    text = json.dumps({**GOOD, "note": separator}, ensure_ascii=False)
    assert separator in text
    assert len(list(replay(text.encode() + b"\n").outcomes())) == 1


@pytest.mark.parametrize("control", [b"\x0b", b"\x0c", b"\x1c"])
def test_d1_other_white_space_is_no_json_and_no_empty_line(control: bytes) -> None:
    with pytest.raises(DumpError, match="line 2"):
        list(replay(control + b"\n").outcomes())


@pytest.mark.parametrize("text", [b"", b"\n\n \n", b"\r\n"])
def test_d1_an_empty_dump_is_bad_in_line_1(text: bytes) -> None:
    with pytest.raises(DumpError, match="line 1: the dump is empty") as caught:
        Replay(io.BytesIO(text))
    assert caught.value.line_number == 1


def _but(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


BAD_LINES: dict[str, bytes] = {
    "no JSON": b"{",
    "two objects": b'{"a": 1} {"b": 2}',
    "array": b"[1]",
    "string": b'"x"',
    "not UTF-8": _but(note="x").replace(b'"x"', b'"\xff"'),
    "UTF-16": '{"partition": 0}'.encode("utf-16"),
    "NaN": _but(note=float("nan")),
    "Infinity": _but(note=float("inf")),
    "deep": b'{"note": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "huge int": _but().replace(b"5", b"5" * 5000),
    "partition too large": _but(partition=2),
    "partition negative": _but(partition=-1),
    "partition bool": _but(partition=False),
    "partition float": _but(partition=0.0),
    "partition text": _but(partition="0"),
    "offset negative": _but(offset=-1),
    "offset bool": _but(offset=True),
    "offset exponent": _but().replace(b'"offset": 1', b'"offset": 1e1'),
    "offset above int64": _but(offset=TOP + 1),
    "offset null": _but(offset=None),
    "timestamp bool": _but(timestamp=True),
    "timestamp float": _but(timestamp=5.0),
    "timestamp above int64": _but(timestamp=TOP + 1),
    "timestamp below int64": _but(timestamp=-TOP - 2),
    "value int": _but(value=5),
    "value list": _but(value=[]),
    "value unpadded": _but(value="YQ"),
    "value overpadded": _but(value="YQ==="),
    "value with a space": _but(value="YQ= ="),
    "value with a line end": _but(value="YWJj\n"),
    "value url-safe": _but(value="_-__"),
    "value not ASCII": _but(value="é"),
    "value after padding": _but(value="YQ==YQ=="),
    "header again": HEADER.rstrip(),
    **{f"no {key}": json.dumps({k: v for k, v in GOOD.items() if k != key}).encode() for key in GOOD},
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.parametrize("state", [False, True])
def test_d1_a_bad_line_is_named_by_its_number(bad: bytes, state: bool) -> None:
    run = replay(line(0, 0, Tick(*A1)), b"\n", bad + b"\n", line(0, 9, Tick(*A1)))
    with pytest.raises(DumpError, match=r"^line 4: ") as caught:
        _ = run.state() if state else list(run.outcomes())
    assert caught.value.line_number == 4


@pytest.mark.parametrize(("first", "second"), [(5, 5), (5, 4)])
def test_d1_offsets_that_do_not_ascend_are_an_error(first: int, second: int) -> None:
    lines = [line(0, first, Tick(*A1)), line(1, second, Tick(*A1)), line(0, second, Tick(*A1))]
    with pytest.raises(DumpError, match=f"line 4: offset {second} of partition 0"):
        list(replay(*lines).outcomes())


def test_d1_the_ends_of_the_numbers_are_good() -> None:
    lines = [_but(offset=0, timestamp=-TOP - 1, value="") + b"\n", _but(offset=TOP, timestamp=TOP) + b"\n"]
    state = replay(*lines).state()
    assert state["partitions"][0]["next_offset"] == TOP + 1  # type: ignore[index]
    assert [record.value for record in DumpReader(io.BytesIO(HEADER + b"".join(lines)))] == [b"", None]


# -- D2 --------------------------------------------------------------------------------------------------------


# -- D3, D4 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", [2, -1])
def test_d4_until_of_no_cp_is_the_callers_mistake(partition: int) -> None:
    with pytest.raises(UntilError, match=f"partition {partition}"):
        replay(until={partition: 5})


def test_d4_each_stopped_cp_names_its_level() -> None:
    run = replay(line(1, 0, Upgrade(*A1, 103)), line(0, 0, Upgrade(*A1, 105)))
    assert list(run.outcomes()) == []
    assert run.required_levels == {0: 105, 1: 103}


def test_the_header_is_written_as_it_is_read() -> None:
    header = DumpHeader("coordination-é", 3)
    assert DumpReader([header_line(header).encode()]).header == header


# -- Hashes of the log (S4), and of the records of a dump (D5) ----------------------------------------------------


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
