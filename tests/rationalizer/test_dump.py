"""Dumps, replays of dumps, states (D1-D4), byte for byte as in examples/."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

from rationalizer import BeatEntry, ClaimingPartition, Heartbeat, HeartbeatBatch, Record, Tick, Upgrade, encode
from rationalizer.dump import (
    DumpError,
    DumpHeader,
    DumpReader,
    DumpRecord,
    Replay,
    UntilError,
    header_line,
    json_of_outcome,
    json_of_state,
    record_line,
)

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
    groups = [name for name in NAMES if name.startswith(("group_", "checkpoint_", "sharing_"))]
    assert len(groups) == 9 + 10 + 8
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
    if not name.startswith(("group_", "checkpoint_", "sharing_")):  # those have their keys in another order (Q22)
        assert state.encode() == example(name, "state.json")


@pytest.mark.parametrize("name", NAMES)
def test_d1_writing_what_was_read_gives_the_same_bytes(name: str) -> None:
    reader = DumpReader(io.BytesIO(example(name, "dump.jsonl")))
    lines = [header_line(reader.header), *(record_line(record) for record in reader)]
    assert "".join(line + "\n" for line in lines).encode() == example(name, "dump.jsonl")


# -- D1 --------------------------------------------------------------------------------------------------------


def test_d1_values_may_be_null_and_timestamps_minus_one() -> None:
    outcomes = list(replay(line(0, 0, None), line(0, 1, Tick(*A1), timestamp=-1)).outcomes())
    assert [(outcome["code"], outcome["log_time"]) for outcome in outcomes] == [("MALFORMED", 1000), ("OK", 1000)]


def test_d1_cps_may_be_interleaved_and_offsets_have_gaps() -> None:
    lines = [line(1, 5, Tick(*A1)), line(0, 7, Tick(*A1)), line(1, 6, Tick(*A1)), line(0, 100, Tick(*A1))]
    assert [(outcome["partition"], outcome["offset"]) for outcome in replay(*lines).outcomes()] == [
        (1, 5),
        (0, 7),
        (1, 6),
        (0, 100),
    ]


def test_d1_extra_keys_are_ignored_and_equal_keys_count_last() -> None:
    text = b'{"x": [1.5, {"y": null}], "partition": 1, "offset": 0, "timestamp": 5, "value": null, "partition": 0}\n'
    assert [record.partition for record in DumpReader(io.BytesIO(HEADER + text))] == [0]


def test_d1_empty_lines_are_skipped_and_counted() -> None:
    good = line(0, 0, Tick(*A1))
    lines = [b"\n", HEADER, b"\n", b"\r\n", b" \t\n", good, b"\n", good]
    reader = iter(DumpReader(io.BytesIO(b"".join(lines))))
    assert next(reader).offset == 0
    with pytest.raises(DumpError) as caught:
        next(reader)
    assert caught.value.line_number == 8


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


@pytest.mark.parametrize(
    "header",
    [
        "{}",
        "[]",
        "7",
        "null",
        '{"topic": "t", "partitions": 2}',
        '{"topic": "t", "partitions": 2, "format": 2}',
        '{"topic": "t", "partitions": 2, "format": true}',
        '{"topic": "t", "partitions": 2, "format": 1.0}',
        '{"topic": "t", "partitions": 2, "format": "1"}',
        '{"topic": "t", "partitions": 0, "format": 1}',
        '{"topic": "t", "partitions": true, "format": 1}',
        '{"topic": "t", "partitions": 2.0, "format": 1}',
        '{"topic": "t", "partitions": 2147483648, "format": 1}',
        '{"topic": 7, "partitions": 2, "format": 1}',
        '{"partitions": 2, "format": 1}',
        '{"partition": 0, "offset": 0, "timestamp": 1, "value": null}',
        '\ufeff{"topic": "t", "partitions": 2, "format": 1}',
    ],
)
def test_d1_another_header_is_bad_in_line_1(header: str) -> None:
    with pytest.raises(DumpError, match=r"^line 1: "):
        Replay(io.BytesIO(header.encode() + b"\n"))


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


def test_d1_values_come_back_as_they_were() -> None:
    for value in (b"", b"a", b"ab", b"abc", bytes(range(256))):
        text = record_line(DumpRecord(0, 0, 1, value))
        assert json.loads(text)["value"] == base64.b64encode(value).decode()
        assert [record.value for record in DumpReader(io.BytesIO(HEADER + text.encode()))] == [value]


# -- D2 --------------------------------------------------------------------------------------------------------


def test_d2_keys_come_in_this_order_and_entries_only_for_batches() -> None:
    batch = HeartbeatBatch(*A1, (BeatEntry("t", 0, 0, 1),))
    lines = [line(0, 0, Tick(*A1)), line(0, 1, batch), line(1, 0, batch)]
    here, batch_here, batch_there = (list(outcome) for outcome in replay(*lines).outcomes())
    keys = ["partition", "offset", "log_time", "type", "accepted", "code", "epoch"]
    assert here == keys
    assert sorted([batch_here, batch_there], key=len) == [keys, [*keys, "entries"]]


def test_d2_type_is_null_up_to_the_check_for_a_known_type() -> None:
    from msgpack import packb

    values = [b"\xc1", packb([2, 32, "1", "a", "g"]), packb([1, 99, "1", "a", "g"]), packb([1, 32, "1", "a", "g", 1])]
    outcomes = replay(*(line(0, offset, value) for offset, value in enumerate(values))).outcomes()
    assert [(outcome["code"], outcome["type"]) for outcome in outcomes] == [
        ("MALFORMED", None),
        ("UNSUPPORTED_VERSION", None),
        ("UNKNOWN_TYPE", None),
        ("MALFORMED", "Tick"),
    ]


# -- D3, D4 ----------------------------------------------------------------------------------------------------


def test_d3_all_cps_of_the_header_are_listed() -> None:
    state = replay(line(1, 4, Tick(*A1))).state()
    partitions = state["partitions"]
    assert isinstance(partitions, list)
    assert [(p["partition"], p["next_offset"], p["log_time"], p["level"]) for p in partitions] == [
        (0, 0, 0, 1),
        (1, 5, 1000, 1),
    ]
    assert (state["leases"], state["pauses"], state["groups"]) == ([], [], [])


def test_d3_a_rejected_record_creates_no_lease_and_a_batch_counts_once() -> None:
    header = HEADER.replace(b"2", b"1")
    batch = HeartbeatBatch(*A1, (BeatEntry("t", 0, 0, 1), BeatEntry("t", 1, 0, 1)))
    state = Replay(io.BytesIO(header + line(0, 0, batch) + line(0, 1, Heartbeat(*A1, "t", 0, 5, 1)))).state()
    assert state["leases"] == []
    assert state["partitions"][0]["rejected"] == {"PARTIAL": 1, "NOT_HELD": 1}  # type: ignore[index]


def test_d3_large_dumps_are_replayed_in_chunks() -> None:
    header = HEADER.replace(b"2", b"1")
    lines = [line(0, 0, ClaimingPartition(*A1, "t", 0, 1000))]
    lines += [line(0, offset, Heartbeat(*A1, "t", 0, 0, offset)) for offset in range(1, 9001)]
    state = Replay(io.BytesIO(header + b"".join(lines))).state()
    assert state["partitions"][0]["next_offset"] == 9001  # type: ignore[index]
    assert state["leases"][0]["stable"] == 9000  # type: ignore[index]


@pytest.mark.parametrize("state", [False, True])
def test_d4_until_leaves_out_what_lies_above_and_reads_other_cps_to_the_end(state: bool) -> None:
    lines = [line(partition, offset, Tick(*A1)) for offset in range(5) for partition in (0, 1)]
    run = replay(*lines, until={0: 2})
    if state:
        assert [p["next_offset"] for p in run.state()["partitions"]] == [3, 5]  # type: ignore[attr-defined]
    else:
        seen = [(outcome["partition"], outcome["offset"]) for outcome in run.outcomes()]
        assert seen == [(p, o) for o in range(5) for p in (0, 1) if p == 1 or o <= 2]


def test_d4_until_may_lie_between_offsets_before_all_and_beyond_all() -> None:
    lines = [line(0, 3, Tick(*A1)), line(0, 9, Tick(*A1)), line(1, 9, Tick(*A1))]
    assert len(list(replay(*lines, until={0: 8, 1: 10**9}).outcomes())) == 2
    assert len(list(replay(*lines, until={0: 0, 1: 0}).outcomes())) == 0


def test_d4_what_until_leaves_out_is_checked_all_the_same() -> None:
    lines = [line(0, 0, Tick(*A1)), line(0, 5, Tick(*A1)), line(0, 5, Tick(*A1))]
    with pytest.raises(DumpError, match="line 4"):
        list(replay(*lines, until={0: 0}).outcomes())


@pytest.mark.parametrize("partition", [2, -1])
def test_d4_until_of_no_cp_is_the_callers_mistake(partition: int) -> None:
    with pytest.raises(UntilError, match=f"partition {partition}"):
        replay(until={partition: 5})


@pytest.mark.parametrize("state", [False, True])
def test_d4_a_cp_that_stopped_at_an_upgrade_has_no_lines_from_there(state: bool) -> None:
    lines = [line(0, 0, Tick(*A1)), line(0, 1, Upgrade(*A1, 103)), line(1, 0, Tick(*A1)), line(0, 2, Tick(*A1), 5000)]
    lines += [line(1, 1, Upgrade(*A1, 1)), line(0, 3, Upgrade(*A1, 109))]
    run = replay(*lines)
    if not state:
        seen = [(outcome["partition"], outcome["offset"]) for outcome in run.outcomes()]
        assert seen == [(0, 0), (1, 0), (1, 1)]
    partitions = run.state()["partitions"]
    assert isinstance(partitions, list)
    assert [(p["next_offset"], p["log_time"], p["rejected"]) for p in partitions] == [(1, 1000, {}), (2, 1000, {})]
    assert run.required_levels == {0: 103}


def test_d4_each_stopped_cp_names_its_level() -> None:
    run = replay(line(1, 0, Upgrade(*A1, 103)), line(0, 0, Upgrade(*A1, 105)))
    assert list(run.outcomes()) == []
    assert run.required_levels == {0: 105, 1: 103}


def test_d1_an_error_after_a_stop_still_counts() -> None:
    with pytest.raises(DumpError, match="line 3"):
        list(replay(line(0, 0, Upgrade(*A1, 103)), b"{}\n").outcomes())


def test_the_header_is_written_as_it_is_read() -> None:
    header = DumpHeader("coordination-é", 3)
    assert DumpReader([header_line(header).encode()]).header == header
